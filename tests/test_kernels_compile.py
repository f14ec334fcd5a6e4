"""The kernels at the shapes of genuine checkpoints, compiled for a GPU that need not be there."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from omni_platform_cuda.compiling import compiling

HALF = torch.bfloat16
LAYERS = {
    "predictor qkv": (1024, 4096, False), "predictor o": (2048, 1024, False), "predictor mlp": (1024, 3072, True),
    "predictor down": (3072, 1024, False), "talker qkv": (2048, 4096, False), "talker mlp": (2048, 6144, True),
    "talker down": (6144, 2048, False),
}  # fmt: skip


def half(*shape):
    return torch.empty(*shape, dtype=HALF)


@pytest.fixture(scope="module", autouse=True)
def platform():
    from omni_core.config.startup import check_versions

    check_versions(allow_version_mismatch=False)  # before vLLM is imported


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize("layer", LAYERS)
def test_linear_layers_fit_into_registers_and_shared_memory(rows, layer):
    from omni_speech_codec.decode_kernels import fused_linear

    inputs, outputs, swiglu = LAYERS[layer]
    out = torch.zeros(rows, outputs, dtype=HALF)
    norm = None if layer.endswith(("o", "down")) else half(inputs)
    weight = torch.zeros(outputs * (2 if swiglu else 1), inputs, dtype=HALF)
    with compiling() as compiled:
        fused_linear(
            torch.zeros(rows, inputs, dtype=HALF), weight, out, norm=norm, eps=1e-6, swiglu=swiglu,
            residual=None if norm is not None else out, pdl=True,
        )  # fmt: skip
    assert compiled.kernels or rows > 1, "the library's product takes no kernel of ours"
    assert [kernel for kernel in compiled.kernels if kernel.spilled] == []


@pytest.mark.parametrize("rows", [1, 64])
def test_attention_and_sampling_do(rows):
    from omni_platform_cuda.sampling import sample_codes_kernel
    from omni_speech_codec.attention_kernels import DecodeAttention, attend_frame, rotate_heads

    attend = DecodeAttention(16, 8, 128, 64, torch.device("cpu"))
    qkv, positions, table = half(rows, 4096), torch.zeros(rows, dtype=torch.int64), half(64, 128)
    angles = torch.zeros(16, 64)
    with compiling() as compiled:
        attend(
            qkv, positions, table, half(128), half(128), 1e-6, (half(4, 16, 8, 128), half(4, 16, 8, 128)),
            torch.zeros(rows, 512, dtype=torch.int32), positions, half(rows, 2048), pdl=True,
        )  # fmt: skip
        rotate_heads(qkv, positions, table, half(128), half(128), 16, 8, 1e-6, pdl=True)
        attend_frame(
            half(rows, 16, 4096), 3, 1, half(128), half(128), angles, angles, half(rows, 2048), 16, 8, 1e-6, pdl=True
        )
        settings = torch.ones(rows), positions, torch.ones(rows), positions, positions
        sample_codes_kernel(torch.zeros(rows, 2048), *settings, half(2048, 1024), pdl=True)
        sample_codes_kernel(torch.zeros(rows, 3072), *settings, pdl=True)
    assert len(compiled.kernels) == 5
    assert [kernel for kernel in compiled.kernels if kernel.spilled] == []


def test_what_does_not_compile_is_an_error():
    """The interpreter would run it."""
    from kernels_that_fail import changes_shape
    from vllm.triton_utils import triton

    with compiling(), pytest.raises(triton.compiler.errors.CompilationError):
        changes_shape[(1,)](torch.zeros(4), 2)


def test_more_shared_memory_than_there_is_is_an_error():
    from omni_speech_codec import decode_kernels

    def wide(*arguments):
        return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 256, "num_warps": 4, "num_stages": 4}

    with pytest.MonkeyPatch.context() as patch, compiling(), pytest.raises(AssertionError, match="shared memory"):
        patch.setattr(decode_kernels, "many_rows_shape", wide)
        decode_kernels.fused_linear(half(40, 1024), half(1024, 1024), half(40, 1024))
