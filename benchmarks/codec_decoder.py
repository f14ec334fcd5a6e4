#!/usr/bin/env python3
"""Decoding with Qwen3-TTS's speech tokenizer at its genuine size: whole steps, and where their time goes.

    python benchmarks/codec_decoder.py
    python benchmarks/codec_decoder.py --device cpu --tiny --batches 1 2 --chunks 1 4 --rounds 2

Prints, for each form, where time goes on the device: milliseconds of each part of the network, for each batch and
chunk. Last comes a table of whole steps, from codes on the CPU to samples on the CPU (median of the rounds): as CUDA
graphs and with kernels launched one by one, and how many seconds of audio a second of the faster makes. "fused" is what
runs on CUDA, in Triton kernels; "torch" is the network as it runs on CPUs, whose whole steps are not recorded. TF32 is
on for float32. Weights are random and made on the device. Kernels are compiled before anything is timed, and stay
compiled on the disk.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Protocol

import torch

from omni_plugin_qwen3_tts.checkpoints import random_tensors, speech_tokenizer_config
from omni_plugin_qwen3_tts.codec_decoder import build_network, empty_network
from omni_plugin_qwen3_tts.config import Qwen3TTSTokenizer12HzConfig
from omni_plugin_qwen3_tts.layout import speech_tokenizer_tensors
from omni_speech_codec.codec_network import CodecNetwork
from omni_speech_codec.fused_network import WIDEST_UNIT, FusedNetwork
from omni_speech_codec.fused_ops import Where
from omni_speech_codec.step_graphs import GraphSettings, SlotDecoder
from omni_speech_codec.streaming_layers import Past

RATE = 24000
DEFAULT = ("fused-float16", "torch-float32")
FORMS = (*DEFAULT, "fused-bfloat16", "fused-float32", "torch-float16", "torch-bfloat16")
REPLAYS = 3
"""Of a part, timed together."""

Parts = list[tuple[str, Callable[[], object]]]


class Form(Protocol):
    """A network as it is measured."""

    def parts(self, batch: int, chunk: int) -> Parts:
        """Its stages, each with an input of its own, of sessions that have come 100 frames far."""

    def steps(self, batch: int, chunk: int) -> dict[str, Callable[[], object]]:
        """``graph`` and ``eager``, or the latter alone: from codes to samples, both on the CPU."""

    def stream(self, codes: torch.Tensor, chunk: int) -> torch.Tensor:
        """The samples of [1, frames, groups] in chunks, on the CPU."""


def main() -> None:
    """Run all forms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small network, to see that it runs")
    parser.add_argument("--forms", nargs="*", choices=FORMS, help=f"default: {' '.join(DEFAULT)}; on CPUs torch alone")
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--chunks", nargs="*", type=int, default=[1, 4, 16], help="frames (default: 1 4 16)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--no-tf32", action="store_true", help="true float32")
    parser.add_argument("--widest-unit", type=int, default=WIDEST_UNIT, help="channels of units that are one kernel")
    arguments = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = not arguments.no_tf32
    device = torch.device(arguments.device)
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else str(device)
    print(f"{name}, PyTorch {torch.__version__}, {arguments.rounds} rounds")
    forms = arguments.forms or [form for form in DEFAULT if cuda or form.startswith("torch")]
    with torch.inference_mode():
        reference = random_network("tiny" if arguments.tiny else "1.7b", device)
        whole: list[str] = []
        for form in forms:
            kind, _, dtype = form.partition("-")
            begin = time.perf_counter()
            if kind == "fused":
                which: Form = Fused(reference, getattr(torch, dtype), arguments)
            else:
                which = Plain(copy_of(reference, getattr(torch, dtype)))
            print(f"\n{form}: ready in {time.perf_counter() - begin:.1f} s, ", end="")
            print(f"{difference(which, reference):.1e} from float32 at most, of 1\n", flush=True)
            whole += measure(arguments, form, which, device)
            del which
    print("\n| form | batch | chunk | graph, ms | eager, ms | audio s/s |\n| --- |" + " ---: |" * 5)
    print("\n".join(whole))


def random_network(size: str, device: torch.device) -> CodecNetwork:
    """The decoder in float32 with weights that keep the size of what passes through."""
    config = Qwen3TTSTokenizer12HzConfig(**speech_tokenizer_config(size))
    named = ((name, shape) for name, shape in speech_tokenizer_tensors(config) if name.startswith("decoder."))
    tensors = random_tensors(named, torch.Generator(device).manual_seed(0))
    stored = {name.removeprefix("decoder."): tensor for name, tensor in tensors}
    network = build_network(config.decoder_config, stored, device, torch.float32)
    network.config = config.decoder_config
    return network


def copy_of(network: CodecNetwork, dtype: torch.dtype) -> CodecNetwork:
    """The same weights in another dtype."""
    with torch.device("meta"):
        copy = empty_network(network.config)
    copy.load_state_dict({name: t.to(dtype) for name, t in network.state_dict().items()}, assign=True)
    return copy.requires_grad_(False)


class Plain:
    """A ``CodecNetwork``."""

    def __init__(self, network: CodecNetwork) -> None:
        self.network = network
        weight = network.pre_conv.conv.weight
        self.like = {"dtype": weight.dtype, "device": weight.device}

    def past(self, batch: int, position: int) -> Past:
        packed = torch.zeros(batch, self.network.layout.size, **self.like)
        return Past(self.network.layout, packed, torch.full((batch,), position, device=self.like["device"]))

    def parts(self, batch: int, chunk: int) -> Parts:
        network, past, length = self.network, self.past(batch, 100), chunk
        codes = torch.zeros(batch, chunk, network.groups, dtype=torch.int64, device=self.like["device"])
        first, *blocks, snake, last = network.decoder

        def noise(channels: int) -> torch.Tensor:
            return torch.randn(batch, channels, length, **self.like)

        def upsample(x: torch.Tensor) -> torch.Tensor:
            for transposed, block in network.upsample:
                x = block(transposed(x, past), past)
            return x

        parts: Parts = [("front", lambda: network.latents(codes, past))]
        x = noise(network.pre_conv.conv.out_channels)
        parts.append(("upsample", lambda x=x: upsample(x)))
        for transposed, _ in network.upsample:
            length *= transposed.stride
        x = noise(first.conv.in_channels)
        parts.append(("first", lambda x=x: first(x, past)))
        for index, block in enumerate(blocks, 1):
            x = noise(block.block[1].conv.in_channels)
            parts.append((f"block {index}", lambda x=x, block=block: block(x, past)))
            length *= block.block[1].stride
        x = noise(last.conv.in_channels)
        parts.append(("last", lambda x=x: last(snake(x), past).clamp(-1, 1)))
        return parts

    def steps(self, batch: int, chunk: int) -> dict[str, Callable[[], object]]:
        codes = torch.randint(self.network.codebook_size, (batch, chunk, self.network.groups))
        past = self.past(batch, 100)

        def step() -> torch.Tensor:
            audio = self.network.render(self.network.latents(codes.to(self.like["device"]), past), past)
            return audio.float().cpu()

        return {"eager": step}

    def stream(self, codes: torch.Tensor, chunk: int) -> torch.Tensor:
        past, parts = self.past(1, 0), []
        for part in codes.to(self.like["device"]).split(chunk, dim=1):
            parts.append(self.network.render(self.network.latents(part, past), past))
            past.positions += part.shape[1]
        return torch.cat(parts, dim=1).float().cpu()


class Fused:
    """A ``FusedNetwork`` with graphs of what is measured."""

    def __init__(self, network: CodecNetwork, dtype: torch.dtype, arguments: argparse.Namespace) -> None:
        batches, chunks = arguments.batches, arguments.chunks
        self.network = FusedNetwork(network, dtype, max(batches) + 1, widest_unit=arguments.widest_unit)
        self.device = self.network.device
        settings = GraphSettings(tuple(sorted({1, *batches})), tuple(sorted({1, *chunks})))
        cuda = self.device.type == "cuda"
        self.decoders = {"graph": SlotDecoder(self.network, settings, graphs=True)} if cuda else {}
        self.decoders["eager"] = SlotDecoder(self.network, settings, graphs=False)

    def parts(self, batch: int, chunk: int) -> Parts:
        network = self.network
        numbers = torch.arange(1, batch + 1, dtype=torch.int32, device=self.device)
        where = Where(numbers, torch.full_like(numbers, 100))
        codes = torch.zeros(batch, chunk, network.groups, dtype=torch.int32, device=self.device)
        out = torch.zeros(batch, chunk * network.samples_per_frame, device=self.device)
        parts: Parts = [("front", lambda: network.front(codes, where))]
        x = network.front(codes, where)
        stages = [("upsample", network.upsample), ("first", network.first)]
        stages += [(f"block {index}", block) for index, block in enumerate(network.blocks, 1)]
        for name, stage in stages:
            parts.append((name, lambda x=x, stage=stage: stage(x, where)))
            x = stage(x, where)
        parts.append(("last", lambda x=x: network.samples(x, where, out)))
        return parts

    def steps(self, batch: int, chunk: int) -> dict[str, Callable[[], object]]:
        codes = torch.randint(self.network.codebook_size, (batch, chunk, self.network.groups)).numpy()
        slots, positions = list(range(1, batch + 1)), [100] * batch
        return {how: lambda decode=decode: decode(codes, slots, positions) for how, decode in self.decoders.items()}

    def stream(self, codes: torch.Tensor, chunk: int) -> torch.Tensor:
        decode, position, parts = next(iter(self.decoders.values())), 0, []
        for part in codes.split(chunk, dim=1):
            parts.append(torch.from_numpy(decode(part.numpy(), [1], [position])))
            position += part.shape[1]
        return torch.cat(parts, dim=1)


def measure(arguments: argparse.Namespace, form: str, which: Form, device: torch.device) -> list[str]:
    """Print a row of parts for each batch and chunk as soon as it is there; give the rows of whole steps."""
    rows = []
    for turn, (batch, chunk) in enumerate((b, c) for b in arguments.batches for c in arguments.chunks):
        parts = which.parts(batch, chunk)
        if turn == 0:
            print("| batch | chunk | " + " | ".join(name for name, _ in parts) + " | sum |")
            print("| ---: " * (len(parts) + 3) + "|")
        times = [device_time(part, device, arguments.rounds) for _, part in parts]
        print(f"| {batch} | {chunk} | " + " | ".join(f"{t * 1e3:.3f}" for t in [*times, sum(times)]) + " |", flush=True)
        del parts
        seconds = {how: host_time(step, arguments.rounds) for how, step in which.steps(batch, chunk).items()}
        audio = batch * chunk * 1920 / RATE / min(seconds.values())
        cells = [f"{seconds[how] * 1e3:.2f}" if how in seconds else "" for how in ("graph", "eager")]
        rows.append(f"| {form} | {batch} | {chunk} | " + " | ".join(cells) + f" | {audio:.0f} |")
    return rows


def device_time(part: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Seconds of a part: on CUDA of a graph of it, without what the host does."""
    if device.type != "cuda":
        return host_time(part, rounds)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            part()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        part()
        graph.capture_end()
        times = []
        for _ in range(max(3, rounds // 2)):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / REPLAYS / 1e3)
    return statistics.median(times)


def host_time(step: Callable[[], object], rounds: int, warm_up: int = 2) -> float:
    """Seconds of a step that ends when its result is there, the median."""
    times = []
    for _ in range(warm_up + rounds):
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[warm_up:])


def difference(which: Form, reference: CodecNetwork, frames: int = 96) -> float:
    """The worst sample of a stream in chunks of 4, longer than the window of attention, beside the reference's in one.

    The reference is computed in true float32.
    """
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(reference.codebook_size, (1, frames, reference.groups), generator=generator)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    right = Plain(reference).stream(codes, frames)
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = tf32
    return float((which.stream(codes, 4) - right).abs().max())


if __name__ == "__main__":
    main()
