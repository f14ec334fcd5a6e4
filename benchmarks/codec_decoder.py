#!/usr/bin/env python3
"""Decoding with Qwen3-TTS's speech tokenizer at its genuine size: chunks with a state, beside decoding context again.

    python benchmarks/codec_decoder.py
    python benchmarks/codec_decoder.py --device cpu --tiny --batches 1 2 --chunks 1 4

Prints for each batch and chunk: milliseconds per step of all sessions, from codes on the CPU to samples on the CPU
(median of the rounds, the variants in turn so that they see the same clocks), and seconds of audio that a second of
"state, graph" makes. "state" is ours; "again" decodes 25 frames before each chunk once more, as the reference does when
it decodes in chunks. "graph" replays CUDA graphs and is left out elsewhere, "eager" launches kernels one by one. Then
the worst differences between chunks of 4 frames and the whole, and between graphs and eager steps. Weights are random
and made on the device.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from omni_plugin_qwen3_tts.checkpoints import random_tensors, speech_tokenizer_config
from omni_plugin_qwen3_tts.codec_network import CodecNetwork, build_network
from omni_plugin_qwen3_tts.config import Qwen3TTSTokenizer12HzConfig
from omni_plugin_qwen3_tts.layout import speech_tokenizer_tensors
from omni_plugin_qwen3_tts.step_graphs import BatchedStep, GraphSettings

CONTEXT = 25
"""Frames before a chunk that are decoded again."""
RATE = 24000
WARM_UP = 2
ANY = GraphSettings(buckets=(1, 8, 32, 64), max_frames=1 << 30)
"""Graphs of all that is measured."""


def main() -> None:
    """Run all variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small network, to see that it runs")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--chunks", nargs="*", type=int, default=[1, 4, 25], help="frames (default: 1 4 25)")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-tf32", action="store_true", help="true float32, where cuDNN convolves in TF32 otherwise")
    parser.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN choose algorithms by trying them")
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = arguments.cudnn_benchmark
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = not arguments.no_tf32
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    tf32 = "off" if arguments.no_tf32 else "on"
    print(f"{name}, PyTorch {torch.__version__}, {arguments.dtype}, TF32 {tf32}, {arguments.rounds} rounds")
    with torch.inference_mode():
        network = random_network("tiny" if arguments.tiny else "1.7b", device, getattr(torch, arguments.dtype))
        megabytes = network.layout.size * network.pre_conv.conv.weight.element_size() / 1e6
        print(f"state of a session: {megabytes:.2f} MB")
        measure(arguments, network)
        print(f"chunks of 4 frames differ from the whole by {difference(network):.1e} at most, of 1")
        if device.type == "cuda":
            print(f"graphs differ from eager steps by {graph_difference(network):.1e} at most, of 1")


def random_network(size: str, device: torch.device, dtype: torch.dtype) -> CodecNetwork:
    """The decoder with weights that keep the size of what passes through."""
    config = Qwen3TTSTokenizer12HzConfig(**speech_tokenizer_config(size))
    named = ((name, shape) for name, shape in speech_tokenizer_tensors(config) if name.startswith("decoder."))
    tensors = random_tensors(named, torch.Generator(device).manual_seed(0))
    stored = {name.removeprefix("decoder."): tensor for name, tensor in tensors}
    return build_network(config.decoder_config, stored, device, dtype)


def measure(arguments: argparse.Namespace, network: CodecNetwork) -> None:
    """Print a row for each batch and chunk, as soon as it is there."""
    weight = network.pre_conv.conv.weight
    kinds: dict[str, GraphSettings | None] = {"eager": None}
    if weight.is_cuda:
        kinds = {"graph": ANY, **kinds}
    variants = [f"{what}, {how}" for what in ("state", "again") for how in kinds]
    print("| batch | chunk | " + " | ".join(f"{name}, ms" for name in variants) + " | audio s/s |")
    print("| ---: " * (len(variants) + 3) + "|")
    for batch in arguments.batches:
        states = list(torch.zeros(batch, network.layout.size, dtype=weight.dtype, device=weight.device))
        for chunk in arguments.chunks:
            steps = {}
            for what, context in (("state", 0), ("again", CONTEXT)):
                codes = torch.randint(network.codebook_size, (batch, context + chunk, network.groups))
                for how, graphs in kinds.items():
                    decode = BatchedStep(network, network.layout.size, weight.dtype, weight.device, graphs)
                    steps[f"{what}, {how}"] = step_of(decode, codes, states, context * network.samples_per_frame)
            times = rounds_of(steps, arguments.rounds)
            audio = batch * chunk * network.samples_per_frame / RATE / times[variants[0]]
            cells = [f"{times[name] * 1e3:.2f}" for name in variants]
            print(f"| {batch} | {chunk} | " + " | ".join(cells) + f" | {audio:.3g} |", flush=True)
            del steps


def step_of(decode: BatchedStep, codes: torch.Tensor, states: list[torch.Tensor], cut: int) -> Callable[[], None]:
    """One step of sessions that have come 100 frames far; ``cut`` samples of context are dropped."""
    positions = [100] * len(states)

    def step() -> None:
        decode(codes, states, positions)[:, cut:].float().cpu()

    return step


def rounds_of(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Seconds of each step, the median."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM_UP + rounds):
        for name, step in steps.items():
            begin = time.perf_counter()
            step()
            if turn >= WARM_UP:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(values) for name, values in times.items()}


def difference(network: CodecNetwork, frames: int = 96, chunk: int = 4) -> float:
    """The worst of a stream's samples, which is longer than the window of attention."""
    weight = network.pre_conv.conv.weight
    codes = torch.randint(
        network.codebook_size, (1, frames, network.groups), generator=torch.Generator().manual_seed(1)
    )

    def decode(size: int) -> torch.Tensor:
        packed = torch.zeros(1, network.layout.size, dtype=weight.dtype, device=weight.device)
        begins = range(0, frames, size)
        where = [torch.tensor([begin], device=weight.device) for begin in begins]
        chunks = codes.to(weight.device).split(size, dim=1)
        return torch.cat([network(part, packed, at) for part, at in zip(chunks, where, strict=True)], dim=1).float()

    return float((decode(chunk) - decode(frames)).abs().max())


def graph_difference(network: CodecNetwork) -> float:
    """The worst of samples of sessions that take turns in batches, which fill a bucket or do not."""
    weight = network.pre_conv.conv.weight
    codes = torch.randint(network.codebook_size, (5, 16, network.groups), generator=torch.Generator().manual_seed(2))
    turns = [([0], 4), ([0, 1, 2], 4), ([0, 1, 2, 3, 4], 1), ([1, 4, 0], 4), ([3], 4), ([2, 3], 1)]
    heard = []
    for graphs in (ANY, None):
        decode = BatchedStep(network, network.layout.size, weight.dtype, weight.device, graphs)
        states = list(torch.zeros(len(codes), network.layout.size, dtype=weight.dtype, device=weight.device))
        positions, parts = [0] * len(codes), []
        for rows, chunk in turns:
            inputs = torch.stack([codes[row, positions[row] : positions[row] + chunk] for row in rows])
            audio = decode(inputs, [states[row] for row in rows], [positions[row] for row in rows])
            parts.append(audio.float().cpu().flatten())
            for row in rows:
                positions[row] += chunk
        heard.append(torch.cat(parts))
    return float((heard[0] - heard[1]).abs().max())


if __name__ == "__main__":
    main()
