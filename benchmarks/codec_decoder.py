#!/usr/bin/env python3
"""Decoding with Qwen3-TTS's speech tokenizer at its genuine size: whole steps, and where their time goes.

    python benchmarks/codec_decoder.py
    python benchmarks/codec_decoder.py --device cpu --tiny --batches 1 2 --chunks 1 4 --rounds 2

Prints two tables. The first says where time goes on the device: milliseconds of each part of the network for each form,
batch and chunk. The second, the last that is printed, is of whole steps, from codes on the CPU to samples on the CPU
(median of the rounds): as CUDA graphs and with kernels launched one by one, and how many seconds of audio a second of
graphs makes. Before it stand the worst differences between forms and between chunks. Weights are random and made on the
device. "torch" is the network as it runs on CPUs, and TF32 is on for float32.
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
from omni_plugin_qwen3_tts.streaming_layers import Past

RATE = 24000
FORMS = ("torch-float32", "torch-float16")
ANY = GraphSettings(buckets=(1, 8, 32, 64), max_frames=1 << 30)
"""Graphs of all that is measured."""
REPLAYS = 5
"""Of a part, timed together."""

Parts = list[tuple[str, Callable[[], object]]]


def main() -> None:
    """Run all forms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small network, to see that it runs")
    parser.add_argument("--forms", nargs="*", choices=FORMS, default=FORMS)
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 64])
    parser.add_argument("--chunks", nargs="*", type=int, default=[1, 4, 16], help="frames (default: 1 4 16)")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--no-tf32", action="store_true", help="true float32, where cuDNN convolves in TF32 otherwise")
    arguments = parser.parse_args()
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = not arguments.no_tf32
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    print(f"{name}, PyTorch {torch.__version__}, {arguments.rounds} rounds")
    with torch.inference_mode():
        reference = random_network("tiny" if arguments.tiny else "1.7b", device)
        whole: list[str] = []
        for form in arguments.forms:
            network = reference if form.endswith("float32") else copy_of(reference, torch.float16)
            print(f"\n{form}: {difference(network, reference):.1e} from float32 at most, of 1\n", flush=True)
            whole += measure(arguments, form, network)
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
        copy = CodecNetwork(network.config)
    copy.load_state_dict({name: t.to(dtype) for name, t in network.state_dict().items()}, assign=True)
    return copy.requires_grad_(False)


def measure(arguments: argparse.Namespace, form: str, network: CodecNetwork) -> list[str]:
    """Print a row of parts for each batch and chunk as soon as it is there; give the rows of whole steps."""
    weight, rows = network.pre_conv.conv.weight, []
    for turn, (batch, chunk) in enumerate((b, c) for b in arguments.batches for c in arguments.chunks):
        parts = torch_parts(network, batch, chunk)
        if turn == 0:
            print("| batch | chunk | " + " | ".join(name for name, _ in parts) + " | sum |")
            print("| ---: " * (len(parts) + 3) + "|")
        times = [device_time(part, weight.device, arguments.rounds) for _, part in parts]
        print(f"| {batch} | {chunk} | " + " | ".join(f"{t * 1e3:.3f}" for t in [*times, sum(times)]) + " |", flush=True)
        seconds = {}
        for how, graphs in (("graph", ANY), ("eager", None)):
            if how == "graph" and not weight.is_cuda:
                continue
            seconds[how] = host_time(torch_step(network, batch, chunk, graphs), arguments.rounds)
        audio = batch * chunk * network.samples_per_frame / RATE / min(seconds.values())
        cells = [f"{seconds[how] * 1e3:.2f}" if how in seconds else "" for how in ("graph", "eager")]
        rows.append(f"| {form} | {batch} | {chunk} | " + " | ".join(cells) + f" | {audio:.0f} |")
    return rows


def torch_parts(network: CodecNetwork, batch: int, chunk: int) -> Parts:
    """The stages of the network, each with an input of its own."""
    weight = network.pre_conv.conv.weight
    like = {"dtype": weight.dtype, "device": weight.device}
    packed = torch.zeros(batch, network.layout.size, **like)
    past = Past(network.layout, packed, torch.full((batch,), 100, device=weight.device))
    codes = torch.zeros(batch, chunk, network.groups, dtype=torch.int64, device=weight.device)
    first, *blocks, snake, last = network.decoder

    def upsample(x: torch.Tensor) -> torch.Tensor:
        for transposed, block in network.upsample:
            x = block(transposed(x, past), past)
        return x

    parts: Parts = [("front", lambda: network.latents(codes, past))]
    length = chunk
    x = torch.randn(batch, network.pre_conv.conv.out_channels, length, **like)
    parts.append(("upsample", lambda x=x: upsample(x)))
    for transposed, _ in network.upsample:
        length *= transposed.stride
    x = torch.randn(batch, first.conv.in_channels, length, **like)
    parts.append(("first", lambda x=x: first(x, past)))
    for index, block in enumerate(blocks, 1):
        x = torch.randn(batch, block.block[1].conv.in_channels, length, **like)
        parts.append((f"block {index}", lambda x=x, block=block: block(x, past)))
        length *= block.block[1].stride
    x = torch.randn(batch, last.conv.in_channels, length, **like)
    parts.append(("last", lambda x=x: last(snake(x), past).clamp(-1, 1)))
    return parts


def torch_step(network: CodecNetwork, batch: int, chunk: int, graphs: GraphSettings | None) -> Callable[[], object]:
    """One step of sessions that have come 100 frames far."""
    weight = network.pre_conv.conv.weight
    codes = torch.randint(network.codebook_size, (batch, chunk, network.groups))
    states = list(torch.zeros(batch, network.layout.size, dtype=weight.dtype, device=weight.device))
    decode = BatchedStep(network, network.layout.size, weight.dtype, weight.device, graphs)
    return lambda: decode(codes, states, [100] * batch).float().cpu()


def device_time(part: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Seconds of a part: on CUDA of a graph of it, without what the host does."""
    if device.type != "cuda":
        return host_time(part, rounds)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            part()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            part()
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


def difference(network: CodecNetwork, reference: CodecNetwork, frames: int = 32) -> float:
    """The worst sample of a stream in chunks of 4, beside the reference's in one."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(network.codebook_size, (1, frames, network.groups), generator=generator)

    def decode(which: CodecNetwork, size: int) -> torch.Tensor:
        weight = which.pre_conv.conv.weight
        packed = torch.zeros(1, which.layout.size, dtype=weight.dtype, device=weight.device)
        where = [torch.tensor([begin], device=weight.device) for begin in range(0, frames, size)]
        chunks = codes.to(weight.device).split(size, dim=1)
        return torch.cat([which(part, packed, at) for part, at in zip(chunks, where, strict=True)], dim=1).float()

    return float((decode(network, 4) - decode(reference, frames)).abs().max())


if __name__ == "__main__":
    main()
