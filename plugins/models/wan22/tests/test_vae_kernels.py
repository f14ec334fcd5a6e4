"""The VAE's Triton kernels against PyTorch: on a GPU, and elsewhere in Triton's interpreter."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

pytest.importorskip("triton")

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
with_kernels = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device or TRITON_INTERPRET=1"
)
TOLERANCES = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.bfloat16: {"atol": 1e-3, "rtol": 2**-7},
    torch.float16: {"atol": 1e-3, "rtol": 2**-10},
}


def noise(*shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.gpu
@with_kernels
@pytest.mark.parametrize("channels", [6, 96, 256, 640])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("biased", [False, True])
def test_norm_and_silu_go_into_the_tail_of_a_buffer(dtype, channels, biased):
    from omni_plugin_wan22.vae_kernels import norm_silu

    x = noise(2, 3, 5, 7, channels, dtype=dtype, seed=0)
    x[:, :, 0] = 0
    bias, gamma = (noise(channels, dtype=dtype, seed=seed) for seed in (1, 2))
    buffer = torch.zeros(2, 5, 5, 7, channels, device=DEVICE, dtype=dtype)

    norm_silu(x, bias if biased else None, gamma, 1e-24 / channels, buffer[:, 2:])

    value = x.float() + bias.float() * biased
    expected = F.silu(F.normalize(value, dim=-1) * math.sqrt(channels) * gamma.float())
    torch.testing.assert_close(buffer[:, 2:].float(), expected, **TOLERANCES[dtype])
    assert not buffer[:, :2].any() and (biased or not buffer[:, 2:, 0].any())


@pytest.mark.gpu
@with_kernels
@pytest.mark.parametrize("channels", [6, 256])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_bias_and_shortcut_are_added_in_place(dtype, channels):
    from omni_plugin_wan22.vae_kernels import add_

    x, other = (noise(1, 3, 5, 7, channels, dtype=dtype, seed=seed) for seed in (0, 1))
    bias = noise(channels, dtype=dtype, seed=2)
    expected = x.float() + bias.float() + other.float()

    found = add_(x, bias, other)

    assert found is x
    torch.testing.assert_close(x.float(), expected, **TOLERANCES[dtype])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["t2v-a14b", "ti2v-5b"])
def test_a_video_is_the_same_with_and_without_the_kernels(parallel, kind, monkeypatch):
    from omni_plugin_wan22 import vae_layers
    from omni_plugin_wan22.checkpoints import build_pipeline
    from omni_plugin_wan22.vae import decode

    vae = build_pipeline(kind=kind).vae.cuda()
    vae_layers.prepare(vae)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    latents = noise(1, vae.config.z_dim, 3, 4, 6, dtype=torch.float32, seed=0)
    with torch.inference_mode():
        found = torch.cat(list(decode(vae, latents)))
        monkeypatch.setattr(vae_layers, "vae_kernels", None)
        expected = torch.cat(list(decode(vae, latents)))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.skipif(DEVICE == "cpu" or torch.cuda.is_available(), reason="the kernels run in this process")
def test_the_kernels_pass_in_tritons_interpreter():
    """In a process of its own, since Triton looks for ``TRITON_INTERPRET`` when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0 and "30 passed" in done.stdout, done.stdout
