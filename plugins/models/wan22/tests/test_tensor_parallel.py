"""Two ranks over gloo give what one rank gives; without the sums over ranks they do not."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import torch
from wan22_support import define_torchvision_operators, sdpa

TOLERANCE = 5e-6


KINDS = ("t2v-a14b", "ti2v-5b", "i2v-a14b")


def _run(checkpoint: Path) -> torch.Tensor:
    """One forward; with a timestep per frame, as a given first frame has it, where the checkpoint takes them."""
    from omni_core.checkpoint import Checkpoint
    from omni_core.vllm.loading import load_weights
    from omni_plugin_wan22.family import read_layout
    from omni_plugin_wan22.transformer import TransformerConfig, WanTransformer, checkpoint_name

    layout = read_layout(Checkpoint(checkpoint))
    config = TransformerConfig.from_json(layout.transformer)
    transformer = WanTransformer(config, torch.float32, sdpa)
    load_weights(transformer, checkpoint / "transformer", checkpoint_name)
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, config.in_channels, 3, 4, 6, generator=generator)
    text = torch.randn(2, 11, 32, generator=generator)
    timestep = torch.tensor([[999.0], [3.0]])
    if layout.conditioning == "first-frame":
        timestep = torch.tensor([[0.0, 999.0, 999.0], [3.0, 3.0, 3.0]])
    with torch.inference_mode():
        return transformer(latents, timestep, text)


def _rank(rank: int, folder: Path, checkpoints: list[Path]) -> None:
    operators = define_torchvision_operators()
    torch.set_num_threads(1)
    from omni_core.vllm.parallel import parallel_state
    from omni_plugin_wan22 import transformer

    with parallel_state(rank, 2, folder / "rendezvous"):
        right = [_run(checkpoint) for checkpoint in checkpoints]
        transformer.tensor_model_parallel_all_reduce = lambda x: x
        wrong = [_run(checkpoint) for checkpoint in checkpoints]
    torch.save((right, wrong), folder / f"rank{rank}.pt")
    del operators


def test_two_ranks_give_what_one_gives(parallel, checkpoint_of, tmp_path):
    checkpoints = [checkpoint_of(kind) for kind in KINDS]
    expected = [_run(checkpoint) for checkpoint in checkpoints]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, tmp_path, checkpoints)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]

    for rank in range(2):
        for one, two, without_sum_in_norms in zip(expected, *torch.load(tmp_path / f"rank{rank}.pt"), strict=True):
            assert (two - one).abs().max() <= TOLERANCE * one.abs().max()
            assert (without_sum_in_norms - one).abs().max() > 1000 * TOLERANCE * one.abs().max()
