"""Noise that moves towards a colour of the prompt's; one line of arithmetic stands where the network would."""

import zlib
from dataclasses import dataclass

import torch

from omni_core.diffusion.contract import DiffusionModel, DiffusionState
from omni_plugin_noise.family import NoiseRequest


@dataclass
class NoiseState(DiffusionState):
    latents: torch.Tensor  # [frames, height / 16, width / 16, 3]
    colour: torch.Tensor  # [3]


class NoiseModel(DiffusionModel[NoiseRequest, NoiseState]):
    def __init__(self, device, strength):
        super().__init__()
        self.device, self.strength = device, strength

    @classmethod
    def load(cls, context):
        return cls(context.device, context.options["strength"])

    def start(self, request):
        generator = torch.Generator("cpu").manual_seed(request.seed)
        shape = (request.num_frames, request.height // 16, request.width // 16, 3)
        latents = torch.rand(shape, generator=generator).to(self.device)
        colour = torch.tensor(list(zlib.crc32(request.prompt.encode()).to_bytes(4)[:3]), device=self.device) / 255
        return NoiseState(request, request.num_inference_steps, latents, colour)

    def batch_key(self, state):
        return tuple(state.latents.shape)

    def cost(self, state):
        return state.latents.numel()

    def predict(self, states):
        latents = torch.stack([state.latents for state in states])
        colours = torch.stack([state.colour for state in states])[:, None, None, None]
        return list(colours - latents)

    def advance(self, state, prediction):
        state.latents = state.latents + prediction * (self.strength / state.num_steps)

    def decode(self, state):
        for chunk in state.latents.split(8):
            yield chunk.repeat_interleave(16, 1).repeat_interleave(16, 2)
