"""Two ranks over gloo give what one rank gives; without the sums over ranks they do not."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import torch
from wan22_support import define_torchvision_operators, sdpa

TOLERANCE = 5e-6


def _inputs():
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, 16, 3, 4, 6, generator=generator)
    return latents, torch.tensor([[999.0], [3.0]]), torch.randn(2, 11, 32, generator=generator)


def _run(checkpoint: Path) -> torch.Tensor:
    from omni_core.checkpoint import Checkpoint
    from omni_core.vllm.loading import load_weights
    from omni_plugin_wan22.transformer import TransformerConfig, WanTransformer, checkpoint_name

    config = TransformerConfig.from_json(Checkpoint(checkpoint).read("transformer/config.json"))
    transformer = WanTransformer(config, torch.float32, sdpa)
    load_weights(transformer, checkpoint / "transformer", checkpoint_name)
    with torch.inference_mode():
        return transformer(*_inputs())


def _rank(rank: int, folder: Path, checkpoint: Path) -> None:
    operators = define_torchvision_operators()
    torch.set_num_threads(1)
    from omni_core.vllm.parallel import parallel_state
    from omni_plugin_wan22 import transformer

    with parallel_state(rank, 2, folder / "rendezvous"):
        right = _run(checkpoint)
        transformer.tensor_model_parallel_all_reduce = lambda x: x
        wrong = _run(checkpoint)
    torch.save((right, wrong), folder / f"rank{rank}.pt")
    del operators


def test_two_ranks_give_what_one_gives(parallel, two_experts, tmp_path):
    expected = _run(two_experts)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, tmp_path, two_experts)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]

    size = expected.abs().max()
    for rank in range(2):
        right, without_sum_in_norms = torch.load(tmp_path / f"rank{rank}.pt")
        assert (right - expected).abs().max() <= TOLERANCE * size
        assert (without_sum_in_norms - expected).abs().max() > 1000 * TOLERANCE * size
