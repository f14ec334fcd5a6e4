"""The speaker encoder of Base checkpoints: a mel spectrogram, and an ECAPA-TDNN that makes one vector of it.

ECAPA-TDNN is of Desplanques et al., 2020 (arXiv 2005.07143). Weights and sizes are those of ``Qwen3TTSSpeakerEncoder``
in ``qwen-tts`` 0.1.1 (``core/models/modeling_qwen3_tts.py``), and so is the spectrogram.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers.audio_utils import mel_filter_bank

from omni_plugin_qwen3_tts.config import Qwen3TTSSpeakerEncoderConfig

SAMPLE_RATE = 24000
WINDOW, HOP = 1024, 256
MARGIN = (WINDOW - HOP) // 2
"""Samples that are mirrored at both ends; there have to be more."""


class MelSpectrogram:
    """Logarithms of a mel spectrogram up to 12 kHz: Slaney's scale and norm, magnitudes, at least 1e-5."""

    def __init__(self, bands: int, device: torch.device) -> None:
        filters = mel_filter_bank(
            WINDOW // 2 + 1, bands, 0.0, SAMPLE_RATE / 2, SAMPLE_RATE, norm="slaney", mel_scale="slaney"
        )
        self._filters = torch.from_numpy(filters.astype(np.float32)).to(device)
        self._window = torch.hann_window(WINDOW, device=device)

    def __call__(self, audio: torch.Tensor) -> torch.Tensor:
        """float32 [samples], at least ``shortest_audio``, to [samples // 256, bands]."""
        padded = F.pad(audio[None], (MARGIN, MARGIN), mode="reflect")[0]
        spectrum = torch.view_as_real(
            torch.stft(padded, WINDOW, HOP, window=self._window, center=False, return_complex=True)
        )
        magnitudes = (spectrum.square().sum(-1) + 1e-9).sqrt()
        return (magnitudes.T @ self._filters).clamp(min=1e-5).log()


def shortest_audio(config: Qwen3TTSSpeakerEncoderConfig) -> int:
    """Samples of the shortest audio that can be mirrored at its ends, and whose spectrogram can be."""
    margin = max((k - 1) * d // 2 for k, d in zip(config.enc_kernel_sizes, config.enc_dilations, strict=True))
    return max(MARGIN + 1, (margin + 1) * HOP)


def _conv(inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> nn.Conv1d:
    return nn.Conv1d(inputs, outputs, kernel, dilation=dilation, padding="same", padding_mode="reflect")


class TimeDelay(nn.Module):
    """A convolution and ReLU: [1, inputs, time] to [1, outputs, time], as all of them here."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.conv = _conv(inputs, outputs, kernel, dilation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).relu()


class Res2Net(nn.Module):
    """Channels in parts: the first passes, each other one is convolved together with the result of the one before."""

    def __init__(self, inputs: int, outputs: int, scale: int, kernel: int, dilation: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            TimeDelay(inputs // scale, outputs // scale, kernel, dilation) for _ in range(scale - 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, *parts = x.chunk(len(self.blocks) + 1, dim=1)
        results = [first]
        for index, (block, part) in enumerate(zip(self.blocks, parts, strict=True)):
            results.append(block(part + results[-1] if index else part))
        return torch.cat(results, dim=1)


class SqueezeExcitation(nn.Module):
    """Channels scaled by what their means over time say."""

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = _conv(width, squeezed), _conv(squeezed, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(dim=2, keepdim=True)
        return x * self.conv2(self.conv1(mean).relu()).sigmoid()


class SERes2Net(nn.Module):
    """Pointwise, Res2Net, pointwise, squeeze and excitation, and the input added."""

    def __init__(self, width: int, config: Qwen3TTSSpeakerEncoderConfig, kernel: int, dilation: int) -> None:
        super().__init__()
        self.tdnn1 = TimeDelay(width, width)
        self.res2net_block = Res2Net(width, width, config.enc_res2net_scale, kernel, dilation)
        self.tdnn2 = TimeDelay(width, width)
        self.se_block = SqueezeExcitation(width, config.enc_se_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.se_block(self.tdnn2(self.res2net_block(self.tdnn1(x))))


class AttentiveStatistics(nn.Module):
    """Mean and deviation over time, weighted by attention: [1, width, time] to [1, 2 * width, 1]."""

    def __init__(self, width: int, attention: int) -> None:
        super().__init__()
        self.tdnn = TimeDelay(3 * width, attention)
        self.conv = _conv(attention, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time = x.shape[2]
        overall = _statistics(x, torch.full_like(x[:, :1], 1.0 / time))
        seen = torch.cat((x, *(value.expand(-1, -1, time) for value in overall)), dim=1)
        weights = self.conv(self.tdnn(seen).tanh()).softmax(dim=2)
        return torch.cat(_statistics(x, weights), dim=1)


def _statistics(x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    mean = (weights * x).sum(dim=2, keepdim=True)
    variance = (weights * (x - mean).square()).sum(dim=2, keepdim=True)
    return mean, variance.clamp(min=1e-12).sqrt()


class SpeakerEncoder(nn.Module):
    """A mel spectrogram to a vector, in the width of the talker; the vector has no particular length."""

    def __init__(self, config: Qwen3TTSSpeakerEncoderConfig) -> None:
        super().__init__()
        channels, kernels, dilations = config.enc_channels, config.enc_kernel_sizes, config.enc_dilations
        self.blocks = nn.ModuleList([TimeDelay(config.mel_dim, channels[0], kernels[0], dilations[0])])
        for width, kernel, dilation in zip(channels[1:-1], kernels[1:-1], dilations[1:-1], strict=True):
            self.blocks.append(SERes2Net(width, config, kernel, dilation))
        self.mfa = TimeDelay(channels[-1], channels[-1], kernels[-1], dilations[-1])
        self.asp = AttentiveStatistics(channels[-1], config.enc_attention_channels)
        self.fc = _conv(2 * channels[-1], config.enc_dim)

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        """[time, bands] to [enc_dim]."""
        x = mel.T[None]
        results = []
        for block in self.blocks:
            x = block(x)
            results.append(x)
        return self.fc(self.asp(self.mfa(torch.cat(results[1:], dim=1))))[0, :, 0]


def build_speaker_encoder(
    config: Qwen3TTSSpeakerEncoderConfig, stored: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> SpeakerEncoder:
    """With weights by the names that the checkpoint has after ``speaker_encoder.``."""
    with torch.device("meta"):
        encoder = SpeakerEncoder(config)
    weights = {name: tensor.to(device, dtype) for name, tensor in stored.items()}
    encoder.load_state_dict(weights, strict=True, assign=True)
    return encoder.requires_grad_(False).eval()
