"""Code2Wav's kernels at its genuine size, compiled for a GPU that need not be there."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig

from omni_platform_cuda.compiling import compiling
from omni_plugin_qwen3_omni.code2wav import empty_network
from omni_speech_codec.codec_products import TWO_AT_A_TIME

KERNELS = {
    "attention_kernel", "carry_kernel", "depthwise_norm_kernel", "entries_kernel", "product_kernel", "rms_norm_kernel",
    "samples_kernel", "unit_kernel",
}  # fmt: skip

MOST_SPILLED = 64
"""Bytes of a thread, of products whose registers are capped so that two run at a time."""


@pytest.fixture(scope="module", autouse=True)
def platform():
    from omni_core.config.startup import check_versions

    check_versions(allow_version_mismatch=False)  # before vLLM is imported


@pytest.fixture(scope="module")
def fused():
    """With whatever the memory holds as weights."""
    from omni_speech_codec.fused_network import FusedNetwork

    with torch.inference_mode():
        return FusedNetwork(empty_network(Qwen3OmniMoeCode2WavConfig()).to_empty(device="cpu"), torch.float16, 3)


@pytest.mark.parametrize(("batch", "chunk"), [(1, 1), (16, 16)], ids=["a frame of one", "16 frames of 16"])
def test_a_step_fits_into_registers_and_shared_memory(fused, batch, chunk):
    from omni_speech_codec.fused_ops import Where

    where = Where(*torch.zeros(2, batch, dtype=torch.int32).unbind())
    codes = torch.zeros(batch, chunk, fused.groups, dtype=torch.int32)
    out = torch.empty(batch, chunk * fused.samples_per_frame)
    with torch.inference_mode(), compiling() as compiled:
        fused(codes, where, out)
    assert {kernel.name for kernel in compiled.kernels} == KERNELS
    few = [
        kernel for kernel in compiled.kernels if kernel.registers == TWO_AT_A_TIME and kernel.spilled <= MOST_SPILLED
    ]
    assert [kernel for kernel in compiled.kernels if kernel.spilled and kernel not in few] == []
