"""What the README says of each kind's fields, against the request models themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from wan22_support import picture

README = Path(__file__).parent.parent / "README.md"
KINDS = ("ti2v-5b", "i2v-a14b", "dmd")


def row(name: str) -> list[str]:
    """The cells of the table of kinds in the line that begins with ``name``."""
    table = README.read_text(encoding="utf-8").partition("Other checkpoints differ in this:")[2]
    line = next(line for line in table.splitlines() if line.startswith(f"| {name}"))
    return [cell.strip() for cell in line.strip("| ").split("|")][1:]


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_of_kinds_says_what_requests_say(parser_of, kind):
    column = KINDS.index(kind)
    request = parser_of(kind)(prompt="x", **({"image": picture(1)} if kind == "i2v-a14b" else {}))
    # The tiny checkpoints' positions end at 64 tokens, which both sizes are within.
    grid = {"ti2v-5b": 32, "i2v-a14b": 16, "dmd": 16}[kind]
    assert row("`width` x `height`")[column] == f"{request.width} x {request.height}, {grid}"
    assert row("`num_frames`, `fps`")[column] == f"{request.num_frames}, {request.fps}"
    assert row("`num_inference_steps`")[column].split(",")[0] == str(request.num_inference_steps)
    fields = type(request).model_fields
    guidance = str(request.guidance_scale) if "guidance_scale" in fields else "no such field"
    assert row("`guidance_scale` ")[column] == guidance
    for name in ("`negative_prompt`", "`guidance_scale_2`"):
        assert (row(name)[column] == "as above") == (name.strip("`") in fields)


def test_images_are_where_the_table_says(parser_of):
    for name in ("image", "last_image"):
        cells = row(f"`{name}`") + [""] * 3
        for kind, cell in zip(KINDS, cells, strict=False):
            fields = type(parser_of(kind)(prompt="x", **({"image": picture(1)} if kind == "i2v-a14b" else {})))
            assert bool(cell) == (name in fields.model_fields)
            assert cell.startswith("required") == bool(cell and fields.model_fields[name].is_required())
