"""Steps as CUDA graphs: the samples of steps without, for batches that fill a bucket and for those that do not."""

from __future__ import annotations

import pytest
import torch

from omni_core.module.contract import ModuleContext
from omni_plugin_qwen3_tts.codec_decoder import CodecDecoder
from omni_plugin_qwen3_tts.step_graphs import BatchedStep, GraphSettings


def running_sum(inputs, packed, positions):
    """A step that needs all that it is given: the sum so far, plus the position."""
    packed += inputs.sum(1)
    return packed + positions[:, None]


@pytest.mark.parametrize(
    ("batch", "chunk", "recorded"), [(1, 1, (1, 1)), (3, 2, (4, 2)), (4, 4, (4, 4)), (3, 5, None), (5, 1, None)]
)
def test_which_steps_are_recorded(monkeypatch, batch, chunk, recorded):
    """Given buckets of 1 and 4 and at most 16 frames, then a padded batch within both is a graph."""
    asked = []

    def capture(self, inputs):
        asked.append(tuple(inputs.shape[:2]))

    monkeypatch.setattr(BatchedStep, "_capture", capture)
    step = BatchedStep(running_sum, 2, torch.float32, torch.device("cpu"), GraphSettings((1, 4), max_frames=16))
    states = list(torch.zeros(batch, 2))
    outputs = step(torch.ones(batch, chunk, 2), states, list(range(batch)))
    assert asked == ([recorded] if recorded else [])
    assert outputs.tolist() == [[chunk + row] * 2 for row in range(batch)]
    assert all(state.tolist() == [chunk] * 2 for state in states)


def test_no_more_graphs_than_allowed(monkeypatch):
    asked = []
    monkeypatch.setattr(BatchedStep, "_capture", lambda self, inputs: asked.append(tuple(inputs.shape[:2])))
    step = BatchedStep(running_sum, 2, torch.float32, torch.device("cpu"), GraphSettings((1,), max_graphs=2))
    for chunk in (1, 2, 3, 1):
        step(torch.ones(1, chunk, 2), [torch.zeros(2)], [0])
    assert asked == [(1, 1), (1, 2)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@torch.inference_mode()
def test_graphs_decode_what_steps_without_decode(checkpoint_of):
    """Given sessions that join and leave, then with graphs each hears what it hears without; both in true float32."""
    import numpy as np

    codes = np.random.default_rng(0).integers(0, 256, (5, 30, 16))
    turns = [([0], 4), ([0, 1, 2], 4), ([0, 1, 2, 3, 4], 1), ([1, 4, 0], 4), ([3], 4), ([2, 3], 1)]
    heard = []
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for graphs in (True, False):
            context = ModuleContext(checkpoint_of("base"), torch.device("cuda"), torch.float32, {"cuda_graphs": graphs})
            decoder = CodecDecoder.load(context)
            states = [decoder.open({}) for _ in codes]
            parts = []
            for rows, chunk in turns:
                inputs = [{"codes": codes[row, states[row].position :][:chunk]} for row in rows]
                outputs = decoder.step([states[row] for row in rows], inputs)
                parts += [output["audio"] for output in outputs]
            heard.append(np.concatenate(parts))
            assert sorted(decoder._decode.graphs) == ([(1, 4), (2, 1), (4, 4), (8, 1)] if graphs else [])
    assert np.abs(heard[0] - heard[1]).max() < 1e-5
