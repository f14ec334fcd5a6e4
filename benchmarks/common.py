"""What the benchmarks share: the models, the engine, the bare loop, the machine, tables and the record of a run."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
PERFORMANCE = ROOT / "docs" / "performance.md"
TOY = ROOT / "tests" / "toy"
TOY_ENTRY = "[omni_core.plugins]\ntoy = omni_plugin_toy.plugin\n"
TOY_INDEX = '{"_class_name": "ToyPipeline"}'
BUILT_IN = ("toy", "tiny-wan")


@contextmanager
def checkpoints(names: Sequence[str]) -> Iterator[list[Path]]:
    """The folders of checkpoints: ``toy`` and ``tiny-wan`` are made for the occasion, anything else is a path.

    All at once and before anything of Omni is used, since a process sees one set of plugins for all of its life.
    """
    with tempfile.TemporaryDirectory(prefix="omni-benchmark-") as text:
        folder = Path(text)
        if "toy" in names:
            install_toy(folder / "site")
            (folder / "toy").mkdir()
            (folder / "toy" / "model_index.json").write_text(TOY_INDEX)
        if "tiny-wan" in names:
            from omni_plugin_wan22.checkpoints import write_checkpoint

            write_checkpoint(folder / "tiny-wan")
        yield [folder / name if name in BUILT_IN else Path(name) for name in names]


def install_toy(site: Path) -> None:
    """Make the family of ``tests/toy`` an installed distribution for this process and its children."""
    info = site / "omni_plugin_toy-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: omni-plugin-toy\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(TOY_ENTRY)
    paths = [str(site), str(TOY)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])


def load_bare(resolved: Any) -> Any:
    """The model of a resolved stage in this process, as a worker loads it."""
    from omni_core.diffusion.contract import StageContext
    from omni_core.plugins.declarations import load_reference

    config = resolved.stage
    dtype = config.engine["dtype"].value if "dtype" in config.engine else "auto"
    context = StageContext(
        checkpoint=Path(resolved.checkpoint.local_path()),
        device=torch.device(resolved.platform.device_type),
        dtype=torch.bfloat16 if dtype == "auto" else getattr(torch, dtype),
        attention=load_reference(resolved.platform.attention),
        options={name: setting.value for name, setting in config.options.items()},
    )
    return load_reference(config.stage.model).load(context).eval()


@torch.inference_mode()  # type: ignore[untyped-decorator]
def start_bare(model: Any, requests: Sequence[Any]) -> list[Any]:
    """States of ``requests``, ready for their first step."""
    return [model.begin(request) for request in requests]


@torch.inference_mode()  # type: ignore[untyped-decorator]
def bare_step(model: Any, states: Sequence[Any]) -> None:
    """One denoising step of every state by the contract alone: group, predict, advance."""
    groups: defaultdict[Any, list[Any]] = defaultdict(list)
    for state in states:
        groups[model.batch_key(state)].append(state)
    for group in groups.values():
        for state, prediction in zip(group, model.predict(group), strict=True):
            model.advance(state, prediction)
            state.step += 1


def synchronize() -> None:
    """Wait for the device, where it works on its own."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def request_fields(arguments: argparse.Namespace, steps: int) -> dict[str, Any]:
    """The fields of every request."""
    width, _, height = arguments.size.partition("x")
    size = {"width": int(width), "height": int(height), "num_frames": arguments.num_frames}
    return {**size, "num_inference_steps": steps}


def machine() -> str:
    """Device, processor and versions in a line."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = f"{devices} x {torch.cuda.get_device_name(0)}, " if devices else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {_vllm()}"
    threads = os.environ.get("OMP_NUM_THREADS", "-")
    load = f"load average {os.getloadavg()[0]:.1f} at the end"
    return f"{device}{_processor()}, {cores} cores, OMP_NUM_THREADS={threads}, {load}; {versions}; commit {_commit()}"


def _commit() -> str:
    """The commit that is checked out, with ``-dirty`` where files other than the page of performance differ from it."""
    git = ["git", "-C", str(ROOT)]
    done = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    others = [*git, "diff", "--quiet", "HEAD", "--", ".", f":!{PERFORMANCE.relative_to(ROOT)}"]
    dirty = subprocess.run(others, capture_output=True, check=False).returncode
    return f"{done.stdout.strip() or 'unknown'}{'-dirty' if dirty else ''}"


def _vllm() -> str:
    from omni_core.plugins.versions import find_vllm

    return str(find_vllm() or "no vLLM")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def command() -> str:
    """The command of this process, to be typed at the root of a checkout; of a folder elsewhere only the name."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:] if word != "--record"]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def median(values: Sequence[float]) -> float:
    """The median, of at least one value."""
    return statistics.median(values)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, aligned so that it reads well in a terminal too."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)) + " |\n"

    return line(header) + line(["-" * width for width in widths]) + "".join(map(line, rows))


def finish(title: str, figures: str, raw: Mapping[str, Sequence[float]], unit: str, *, record: bool) -> None:
    """Print machine, command and figures; with ``record`` append them and every round to the page of performance."""
    runs = "".join(f"{name}: {' '.join(f'{value:.4g}' for value in values)}\n" for name, values in raw.items())
    day = datetime.now(UTC).date().isoformat()
    text = f"### {title}, {day}\n\n{machine()}\n\n```bash\n{command()}\n```\n\n{figures}"
    print(f"\n{text}")
    if record:
        with PERFORMANCE.open("a", encoding="utf-8") as page:
            page.write(f"\n{text}\nEvery round, in {unit}:\n\n```text\n{runs}```\n")
        print(f"appended to {PERFORMANCE.relative_to(ROOT)}")
