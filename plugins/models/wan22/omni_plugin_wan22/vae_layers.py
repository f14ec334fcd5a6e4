"""What the modules of diffusers' ``AutoencoderKLWan`` compute, channels last and in few passes over memory.

Modules and weights are diffusers' (``models/autoencoders/autoencoder_kl_wan.py``); only the computation is here.
Activations are contiguous [batch, frames, height, width, channels], the layout in which cuDNN convolves without
transposing. The causal convolutions read a buffer that begins with the last two frames of the chunk before, and what
comes before them (norm and SiLU) is written straight into that buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    AvgDown3D,
    DupUp3D,
    WanAttentionBlock,
    WanCausalConv3d,
    WanDecoder3d,
    WanEncoder3d,
    WanResample,
    WanResidualBlock,
    WanResidualDownBlock,
    WanResidualUpBlock,
    WanRMS_norm,
    WanUpBlock,
)
from torch import nn

try:
    from omni_plugin_wan22 import vae_kernels
except ImportError:  # Triton comes with PyTorch for GPUs only
    vae_kernels = None

CACHED = 2
"""Frames that a causal convolution of three remembers."""
TINY = 1e-24
"""``F.normalize`` divides by max(norm, 1e-12); its square under the root does the same to zeros."""


@dataclass
class Past:
    """What the earlier chunks of one request left behind; every request has its own.

    Attributes:
        frames: by convolution, the last frames that it read, [batch, 2, height, width, channels] (one frame for the
            convolutions that halve the number of frames).
        first: whether no chunk has been through yet. The first frame is not doubled (or halved) in time.
    """

    frames: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    first: bool = True


@dataclass(frozen=True)
class _Duplicated:
    """``DupUp3D`` of a chunk, plus a bias, without the larger tensor that it would be.

    Attributes:
        values: [batch, frames, h, w, out_channels, group], every value once.
        module: says to which places of a block of ``factor_t`` x 2 x 2 each is copied.
        repeats: how many places in a row have the same value.
        times: frames that come out for each, 1 in the first chunk.
    """

    values: torch.Tensor
    module: DupUp3D
    repeats: int
    times: int

    @classmethod
    def of(cls, module: DupUp3D, x: torch.Tensor, bias: torch.Tensor, first: bool) -> _Duplicated:
        repeats = module.repeats
        if module.factor % repeats:  # neighbouring output channels share an input
            x, repeats = x.repeat_interleave(repeats, dim=-1), 1
        values = x.unflatten(-1, (module.out_channels, -1)) + bias[:, None]
        return cls(values, module, repeats, 1 if first else module.factor_t)

    def at(self, time: int, row: int, column: int) -> torch.Tensor:
        """The values at one place of each block, [batch, frames, h, w, out_channels]."""
        time += self.module.factor_t - self.times
        place = (time * self.module.factor_s + row) * self.module.factor_s + column
        return self.values[..., place // self.repeats]


def prepare(vae: nn.Module) -> None:
    """Bring loaded weights into the layout and form that the functions here want, once."""
    with torch.no_grad():
        for module in vae.modules():
            if isinstance(module, nn.Conv3d):
                module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last_3d)
            elif isinstance(module, nn.Conv2d):
                module.weight.data = module.weight.data.contiguous(memory_format=torch.channels_last)
            elif isinstance(module, WanResample) and module.mode.startswith("upsample"):
                module.register_buffer("merged", _merge(module.resample[1].weight), persistent=False)


def encoder(network: WanEncoder3d, x: torch.Tensor, past: Past) -> torch.Tensor:
    """[1, frames, height, width, in_channels] to the moments [1, latent frames, h, w, 2 z_dim], one chunk."""
    x = _conv(network.conv_in, x, past)
    for block in network.down_blocks:
        if isinstance(block, WanResidualDownBlock):
            x = _down_block(block, x, past)
        elif isinstance(block, WanResidualBlock):
            x = residual_block(block, x, past)
        else:
            x = downsample(block, x, past)
    x = _last_conv(network, _mid_block(network.mid_block, x, past), past)
    past.first = False
    return x


def decoder(network: WanDecoder3d, x: torch.Tensor, past: Past) -> torch.Tensor:
    """[1, 1, h, w, z_dim] to [1, frames, height, width, out_channels], one chunk."""
    x = _mid_block(network.mid_block, _conv(network.conv_in, x, past), past)
    for block in network.up_blocks:
        x = _up_block(block, x, past)
    x = _last_conv(network, x, past)
    past.first = False
    return x


def residual_block(block: WanResidualBlock, x: torch.Tensor, past: Past) -> torch.Tensor:
    """``WanResidualBlock`` without dropout; ``x`` is left as it is."""
    y = _norm_silu_conv(block.norm1, block.conv1, x, None, past)
    y = _norm_silu_conv(block.norm2, block.conv2, y, block.conv1.bias, past)
    shortcut = x if isinstance(block.conv_shortcut, nn.Identity) else pointwise(block.conv_shortcut, x)
    return add_(y, block.conv2.bias, shortcut)


def attention_block(block: WanAttentionBlock, x: torch.Tensor) -> torch.Tensor:
    """``WanAttentionBlock``: one head over the positions of each frame."""
    batch, frames, height, width, channels = x.shape
    normed = rms_norm(block.norm, x).view(batch * frames, height, width, channels)
    qkv = _conv2d(normed, block.to_qkv.weight, block.to_qkv.bias).view(batch * frames, 1, height * width, 3 * channels)
    query, key, value = qkv.chunk(3, dim=-1)
    found = F.scaled_dot_product_attention(query, key, value).reshape(normed.shape)
    return add_(_conv2d(found, block.proj.weight, None).view(x.shape), block.proj.bias, x)


def upsample(
    module: WanResample, x: torch.Tensor, past: Past, shortcut: tuple[DupUp3D, torch.Tensor] | None
) -> torch.Tensor:
    """``WanResample`` that doubles height and width, and frames too if it has a ``time_conv`` (all but the first).

    A 3x3 convolution of an image whose pixels were doubled reads only 2x2 different ones for every output. So the
    image is never doubled: one 2x2 convolution with summed weights (``prepare``) makes the four outputs of a pixel as
    channels, at 4/9 of the work. ``shortcut``, the block's ``DupUp3D`` and its input, is added on the way.
    """
    if module.mode == "upsample3d" and not past.first:
        x = _double_frames(module.time_conv, x, past)
    batch, frames, height, width, channels = x.shape
    y = _conv2d(x.view(batch * frames, height, width, channels), module.merged, None, padding=1)
    y = y.view(batch, frames, height + 1, width + 1, 2, 2, -1)
    out = y.new_empty(batch, frames, height, 2, width, 2, y.shape[-1])
    bias = module.resample[1].bias
    added = None if shortcut is None else _Duplicated.of(*shortcut, bias, past.first)
    for row, column in ((0, 0), (0, 1), (1, 0), (1, 1)):
        found = y[:, :, row : row + height, column : column + width, row, column]
        target = out[:, :, :, row, :, column]
        if added is None:
            torch.add(found, bias, out=target)
            continue
        for time in range(added.times):
            torch.add(found[:, time :: added.times], added.at(time, row, column), out=target[:, time :: added.times])
    return out.view(batch, frames, 2 * height, 2 * width, -1)


def downsample(module: WanResample, x: torch.Tensor, past: Past) -> torch.Tensor:
    """``WanResample`` that halves height and width, and frames too if it has a ``time_conv`` (all but the first)."""
    batch, frames, height, width, channels = x.shape
    padded = F.pad(x.view(batch * frames, height, width, channels), (0, 0, 0, 1, 0, 1))
    x = _conv2d(padded, module.resample[1].weight, module.resample[1].bias, stride=2)
    x = x.view(batch, frames, *x.shape[1:])
    if module.mode == "downsample3d":
        last = x[:, -1:]
        if not past.first:
            x = _conv3d(module.time_conv, torch.cat([past.frames[module.time_conv], x], dim=1), biased=True)
        past.frames[module.time_conv] = last.clone()
    return x


def average_down(module: AvgDown3D, x: torch.Tensor) -> torch.Tensor:
    """``AvgDown3D``: blocks of positions become channels, of which neighbours are averaged."""
    time, space = module.factor_t, module.factor_s
    x = F.pad(x, (0, 0, 0, 0, 0, 0, -x.shape[1] % time, 0))
    batch, frames, height, width, channels = x.shape
    x = x.view(batch, frames // time, time, height // space, space, width // space, space, channels)
    x = x.permute(0, 1, 3, 5, 7, 2, 4, 6).reshape(*x.shape[:2], height // space, width // space, -1)
    return x.unflatten(-1, (module.out_channels, module.group_size)).mean(dim=-1)


def causal_buffer(conv: WanCausalConv3d, like: torch.Tensor, past: Past) -> torch.Tensor:
    """What ``conv`` will read: the frames before (zeros before the first), then room for those of ``like``."""
    batch, frames, height, width, _ = like.shape
    buffer = like.new_empty(batch, CACHED + frames, height, width, conv.in_channels)
    before = past.frames.get(conv)
    if before is None:
        buffer[:, :CACHED].zero_()
    else:
        buffer[:, :CACHED].copy_(before)
    return buffer


def causal_conv(conv: WanCausalConv3d, buffer: torch.Tensor, past: Past) -> torch.Tensor:
    """``conv`` of a filled ``causal_buffer``, without its bias; the last frames are kept for the next chunk."""
    past.frames[conv] = buffer[:, -CACHED:].clone()
    return _conv3d(conv, buffer, biased=False)


def pointwise(conv: WanCausalConv3d, x: torch.Tensor) -> torch.Tensor:
    """``conv`` of one position and frame, which remembers nothing."""
    return _conv3d(conv, x, biased=True)


def rms_norm(norm: WanRMS_norm, x: torch.Tensor) -> torch.Tensor:
    """``WanRMS_norm`` over the channels, in float32 inside; zeros stay zeros."""
    channels = x.shape[-1]
    return F.rms_norm(x, (channels,), norm.gamma.view(channels), TINY / channels)


def norm_silu(norm: WanRMS_norm, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """SiLU of the norm of ``x + bias`` into ``out``; with a bias, ``x`` must be the caller's to overwrite."""
    if vae_kernels is not None and x.is_cuda:
        vae_kernels.norm_silu(x, bias, norm.gamma, TINY / x.shape[-1], out)
        return
    x = x if bias is None else x.add_(bias)
    torch.ops.aten.silu.out(rms_norm(norm, x), out=out)


def add_(x: torch.Tensor, bias: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """``x + bias + other`` in the place of ``x``."""
    if vae_kernels is not None and x.is_cuda and bias is not None:
        return vae_kernels.add_(x, bias, other)
    x = x if bias is None else x.add_(bias)
    return x.add_(other)


def _norm_silu_conv(
    norm: WanRMS_norm, conv: WanCausalConv3d, x: torch.Tensor, bias: torch.Tensor | None, past: Past
) -> torch.Tensor:
    """``conv``, without its bias, of ``norm_silu``, which see for ``x`` and ``bias``."""
    buffer = causal_buffer(conv, x, past)
    norm_silu(norm, x, bias, buffer[:, CACHED:])
    return causal_conv(conv, buffer, past)


def _conv(conv: WanCausalConv3d, x: torch.Tensor, past: Past) -> torch.Tensor:
    """``conv`` of ``x`` itself."""
    buffer = causal_buffer(conv, x, past)
    buffer[:, CACHED:].copy_(x)
    return causal_conv(conv, buffer, past).add_(conv.bias)


def _last_conv(network: WanEncoder3d | WanDecoder3d, x: torch.Tensor, past: Past) -> torch.Tensor:
    return _norm_silu_conv(network.norm_out, network.conv_out, x, None, past).add_(network.conv_out.bias)


def _mid_block(block: nn.Module, x: torch.Tensor, past: Past) -> torch.Tensor:
    x = residual_block(block.resnets[0], x, past)
    for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
        x = residual_block(resnet, attention_block(attention, x), past)
    return x


def _down_block(block: WanResidualDownBlock, x: torch.Tensor, past: Past) -> torch.Tensor:
    y = x
    for resnet in block.resnets:
        y = residual_block(resnet, y, past)
    if block.downsampler is not None:
        y = downsample(block.downsampler, y, past)
    return y.add_(average_down(block.avg_shortcut, x))


def _up_block(block: WanUpBlock | WanResidualUpBlock, x: torch.Tensor, past: Past) -> torch.Tensor:
    if isinstance(block, WanResidualUpBlock):
        upsampler, shortcut = block.upsampler, (block.avg_shortcut, x)
    else:
        upsampler, shortcut = block.upsamplers[0] if block.upsamplers else None, None
    for resnet in block.resnets:
        x = residual_block(resnet, x, past)
    return x if upsampler is None else upsample(upsampler, x, past, shortcut)


def _double_frames(conv: WanCausalConv3d, x: torch.Tensor, past: Past) -> torch.Tensor:
    """Two frames for each, which the convolution makes as two halves of its channels."""
    batch, frames, height, width, channels = x.shape
    y = _conv(conv, x, past).view(batch, frames, height, width, 2, channels).permute(0, 1, 4, 2, 3, 5)
    return y.reshape(batch, 2 * frames, height, width, channels)


def _merge(weight: torch.Tensor) -> torch.Tensor:
    """[out, in, 3, 3] after doubling pixels to [2 x 2 x out, in, 2, 2] before it: see ``upsample``.

    Along an axis the even output reads its left neighbour and twice itself, the odd one twice itself and its right.
    """
    taps = weight.new_tensor([[[1, 0, 0], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]], dtype=torch.float32)
    merged = torch.einsum("aui,bvj,ocij->abocuv", taps, taps, weight.float()).flatten(0, 2)
    return merged.to(weight.dtype).contiguous(memory_format=torch.channels_last)


def _conv3d(conv: WanCausalConv3d, x: torch.Tensor, biased: bool) -> torch.Tensor:
    """Pads height and width as ``conv`` does, and not the frames."""
    padding = (0, conv._padding[2], conv._padding[0])
    y = F.conv3d(x.permute(0, 4, 1, 2, 3), conv.weight, conv.bias if biased else None, conv.stride, padding)
    return y.permute(0, 2, 3, 4, 1).contiguous()


def _conv2d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int = 1, padding: int = 0
) -> torch.Tensor:
    return F.conv2d(x.permute(0, 3, 1, 2), weight, bias, stride, padding).permute(0, 2, 3, 1).contiguous()
