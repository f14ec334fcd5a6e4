"""The toy model: x <- gain * x + hash(prompt), so that a result shows prompt, seed, steps and nothing else."""

import os
import time
import zlib
from dataclasses import dataclass
from datetime import timedelta

import torch

from omni_core.diffusion.contract import DiffusionModel, DiffusionState
from omni_plugin_toy.family import ToyRequest


@dataclass
class ToyState(DiffusionState):
    latents: torch.Tensor
    bias: float


class ToyModel(DiffusionModel[ToyRequest, ToyState]):
    def __init__(self, gain):
        super().__init__()
        self.gain = gain
        self.batches = []
        self.preparing = 0
        self.rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0

    @classmethod
    def load(cls, context):
        if seconds := os.environ.get("TOY_RANK_TIMEOUT"):
            from omni_core.vllm.diffusion import runner

            runner.RANK_TIMEOUT = timedelta(seconds=float(seconds))
        return cls(context.options["gain"])

    def start(self, request):
        self._maybe_fail(request, "start", 0)
        generator = torch.Generator("cpu").manual_seed(request.seed)
        latents = torch.rand(request.num_frames, request.height // 16, request.width // 16, 3, generator=generator)
        bias = zlib.crc32(request.prompt.encode()) % 1000 / 2000
        if request.image is not None:
            bias += request.image.pixels.mean().item() / 1000
        return ToyState(request=request, num_steps=request.num_inference_steps, latents=latents, bias=bias)

    def prepare(self, state):
        self.preparing += 1
        try:
            for piece in range(state.request.pieces):
                self._maybe_fail(state.request, "prepare", piece)
                yield
        finally:
            self.preparing -= 1

    def batch_key(self, state):
        return (state.request.group, tuple(state.latents.shape))

    def predict(self, states):
        self.batches.append([state.step for state in states])
        for state in states:
            self._maybe_fail(state.request, "predict", state.step)
            self._maybe_fail(state.request, f"rank {self.rank}", state.step)
        if torch.distributed.is_initialized():  # the ranks of a real model wait for each other
            torch.distributed.all_reduce(torch.zeros(1))
        time.sleep(max(state.request.step_seconds for state in states))
        x = torch.stack([state.latents for state in states])
        return list(x * self.gain + torch.tensor([s.bias for s in states]).view(-1, 1, 1, 1, 1))

    def advance(self, state, prediction):
        self._maybe_fail(state.request, "advance", state.step)
        state.latents = prediction

    def cost(self, state):
        return state.latents.numel()

    def decode(self, state):
        for frame in state.latents.clamp(0, 1).split(1):
            self._maybe_fail(state.request, "decode", state.step)
            time.sleep(state.request.chunk_seconds)
            yield frame.repeat_interleave(16, 1).repeat_interleave(16, 2)

    @staticmethod
    def _maybe_fail(request, where, step):
        if request.fail_in == where and step >= request.fail_at:
            raise RuntimeError(f"asked to fail in {where}")
