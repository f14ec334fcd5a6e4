"""What the toy model must give, computed without any of the runtime."""

import zlib

import torch


def toy_video(prompt, seed, *, steps=4, frames=5, height=32, width=32, gain=0.5):
    """float32 [frames, height, width, 3] in [0, 1]."""
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.rand(frames, height // 16, width // 16, 3, generator=generator)
    for _ in range(steps):
        x = x * gain + zlib.crc32(prompt.encode()) % 1000 / 2000
    return x.clamp(0, 1).repeat_interleave(16, 1).repeat_interleave(16, 2).numpy()
