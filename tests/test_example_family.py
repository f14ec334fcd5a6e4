"""The family that ``docs/writing-a-model-family.md`` prints is one: found, matched, and driven by the runner."""

from __future__ import annotations

import json
import re
import sys
import tomllib
import zlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from omni_core.checkpoint import Checkpoint
from omni_core.diffusion.contract import StageContext
from omni_core.diffusion.messages import Job, StageSettings
from omni_core.diffusion.results import ResultFolder
from omni_core.errors import RequestError
from omni_core.plugins.declarations import ModelFamily, load_reference
from omni_core.plugins.loading import PluginEntry, PluginState, load_plugin
from omni_core.plugins.predicates import ClassName
from omni_core.requests import parse_request

pytest.importorskip("vllm")

EXAMPLE = Path(__file__).parent.parent / "examples" / "omni-plugin-noise"


@pytest.fixture(scope="module")
def family():
    """What the distribution declares, as its metadata leads to it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [(name, module)] = project["entry-points"]["omni_core.plugins"].items()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        record = load_plugin(PluginEntry(name, module, project["name"], project["version"]))
        assert record.state is PluginState.REGISTERED, record.traceback
        [family] = [d for d in record.declarations if isinstance(d, ModelFamily)]
        yield family
        for loaded in [name for name in sys.modules if name.startswith("omni_plugin_noise")]:
            del sys.modules[loaded]


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "NoisePipeline"}))
    return Checkpoint(str(tmp_path))


@pytest.fixture
def run(family, checkpoint, tmp_path):
    """``run(*requests)``: the frames of each, all in one runner, step by step as the engine does it."""
    from omni_core.vllm.diffusion.runner import DiffusionModelRunner

    stage = load_reference(family.pipeline)(checkpoint).stage
    results = ResultFolder(tmp_path / "results")
    settings = StageSettings(
        stage=stage.name,
        family=family.name,
        model=stage.model,
        attention="omni_platform_cpu.attention:attention",
        request=family.request,
        results=str(results.path),
        options=stage.options,
    )
    config = SimpleNamespace(
        additional_config=settings.to_config(),
        model_config=SimpleNamespace(model=checkpoint.source, dtype=torch.float32),
        parallel_config=SimpleNamespace(world_size=1),
        scheduler_config=SimpleNamespace(async_scheduling=False),
    )
    runner = DiffusionModelRunner(config, torch.device("cpu"), rank=0)
    runner.load_model()

    def work(*requests):
        new = [
            SimpleNamespace(
                req_id=f"r{i}", sampling_params=SimpleNamespace(extra_args=Job(fields, "float32").to_extra_args())
            )
            for i, fields in enumerate(requests)
        ]
        frames, finished = {}, set()
        while len(frames) < len(requests):
            scheduled = {f"r{i}": 1 for i in range(len(requests)) if f"r{i}" not in frames}
            output = runner.execute_model(
                SimpleNamespace(finished_req_ids=finished, scheduled_new_reqs=new, num_scheduled_tokens=scheduled)
            ).get_output()
            new, finished = [], set()
            for request_id, report in output.reports.items():
                assert report.error is None
                if report.result is not None:
                    frames[request_id] = results.take(report.result)
                    finished.add(request_id)
        return [frames[f"r{i}"] for i in range(len(requests))], runner.stats

    yield work
    runner.shutdown()
    results.close()


def expected(prompt, seed, *, width=64, height=64, num_frames=16, num_inference_steps=10):
    noise = torch.rand(num_frames, height // 16, width // 16, 3, generator=torch.Generator().manual_seed(seed)).numpy()
    colour = np.array(list(zlib.crc32(prompt.encode()).to_bytes(4, "big")[:3])) / 255
    latents = colour + (noise - colour) * (1 - 0.5 / num_inference_steps) ** num_inference_steps
    return latents.repeat(16, 1).repeat(16, 2)


def test_it_claims_its_checkpoint_and_no_other(family, checkpoint, tmp_path):
    assert family.matches == ClassName("NoisePipeline")
    assert family.matches.specificity(checkpoint) is not None
    other = tmp_path / "other"
    other.mkdir()
    (other / "model_index.json").write_text('{"_class_name": "OtherPipeline"}')
    assert family.matches.specificity(Checkpoint(str(other))) is None


def test_requests_are_checked(family, checkpoint):
    model = load_reference(family.request)(checkpoint)
    for wrong in ({"prompt": "x", "width": 65}, {"prompt": " "}, {"prompt": "x", "strength": 1}):
        with pytest.raises(RequestError):
            parse_request(model, wrong)


def test_each_request_gives_what_it_gives_alone(run):
    small, large = {"prompt": "a cat", "seed": 1}, {"prompt": "a dog", "seed": 2, "width": 128, "num_frames": 20}
    twin = {"prompt": "a bird", "seed": 3, "num_inference_steps": 7}
    frames, stats = run(small, twin, large)
    for got, fields in zip(frames, (small, twin, large), strict=True):
        np.testing.assert_allclose(got, expected(**fields), atol=1e-5)
    assert stats.forwards[2] > 0, "requests of one size share forwards"


def test_the_way_to_load_weights_that_the_page_shows_works(tmp_path):
    from safetensors.torch import save_file

    page = (EXAMPLE.parents[1] / "docs" / "writing-a-model-family.md").read_text(encoding="utf-8")
    [code] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def load_network" in block]
    shown = {}
    exec(code, shown)

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.norm = torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)

    network = Network()
    (tmp_path / "transformer").mkdir()
    save_file(network.state_dict(), tmp_path / "transformer" / "model.safetensors")
    context = StageContext(tmp_path, torch.device("cpu"), torch.float32, attention=None)
    loaded = shown["load_network"](Network, context)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in network.state_dict().items())
