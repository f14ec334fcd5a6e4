"""``--print-config`` shows every value with its source, and its text is itself a deploy file."""

import json
from dataclasses import dataclass, field

from omni_core.config.show import plain, to_json, to_text


def test_text_names_value_and_source(configure):
    lines = to_text(configure("diffusion.gain=2", max_num_seqs=3)).splitlines()

    assert "# family: made-up" in lines
    assert next(line.split("#")[1] for line in lines if "max_num_seqs" in line) == " --max-num-seqs"
    assert any(line.split() == ["gain:", "2.0", "#", "--set", "diffusion.gain"] for line in lines)
    assert any(line.split() == ["dtype:", "auto", "#", "vLLM", "default"] for line in lines)
    assert any(line.split() == ["max_queued_requests:", "64", "#", "default"] for line in lines)


def test_text_read_back_as_a_deploy_file_configures_the_same(configure, tmp_path):
    server = {"max_queued_requests": 3, "video_store": str(tmp_path), "allow_routes": ["a: b"]}
    first = configure("diffusion.gain=2", max_num_seqs=3, device_ids=[0, "1"], server=server)

    second = configure(deploy=to_text(first))

    assert second.server == first.server
    for name in ("engine", "options"):
        a, b = getattr(first.stage, name), getattr(second.stage, name)
        assert {key: setting.value for key, setting in a.items()} == {key: setting.value for key, setting in b.items()}


def test_json_has_the_same(configure):
    content = json.loads(to_json(configure(max_num_seqs=3)))

    assert content["family"] == "made-up"
    assert content["stages"]["diffusion"]["engine"]["max_num_seqs"] == {"value": 3, "source": "--max-num-seqs"}
    assert content["server"]["max_queued_requests"] == {"value": 64, "source": "default"}


@dataclass
class Nested:
    name: str = "a"
    sizes: list[int] = field(default_factory=list)


def test_of_a_dataclass_only_what_was_changed_is_shown():
    assert plain(Nested()) == {}
    assert plain({"x": Nested(sizes=[1]), "y": {2, 1}}) == {"x": {"sizes": [1]}, "y": [1, 2]}
