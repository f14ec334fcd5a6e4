#!/usr/bin/env python3
"""The kernels of one step of Qwen3-TTS's codec decoder, one by one, and which tiles suit its products best.

    python benchmarks/codec_kernels.py --sizes 64x16 1x1
    python benchmarks/codec_kernels.py --sizes 64x16 64x1 8x4 1x1 --tune

For each size (sessions x frames) prints the launches of a step, equal ones together: how many, microseconds of each
(within a CUDA graph, so that launching does not count), their share of the step, and of products TFLOP/s. With --tune
products with a share of it that is worth it are tried with other tiles, and the three fastest are printed beside what
``codec_products.blocks`` chooses: rows x columns (+ more columns) x depth, warps, stages, and the most registers of a
thread. Kernels are compiled at once, on all processors, before.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from codec_decoder import random_network

from omni_speech_codec import fused_ops
from omni_speech_codec.fused_network import WIDEST_UNIT, FusedNetwork
from omni_speech_codec.fused_ops import Where

Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]
"""Kernel, grid, arguments, constants."""
TILES = [
    # rows, columns, more columns, depth, warps, stages
    *((128, 128, 0, 64, 8, stages) for stages in (2, 3, 4)),
    (128, 128, 0, 32, 8, 4), (128, 128, 0, 32, 8, 5),
    (128, 256, 0, 64, 8, 3), (256, 128, 0, 64, 8, 3), (128, 128, 0, 128, 8, 2), (128, 128, 0, 64, 4, 3),
    (64, 128, 0, 64, 4, 3), (64, 128, 0, 64, 4, 4), (64, 256, 0, 64, 4, 3), (128, 64, 0, 64, 4, 4),
    (128, 64, 0, 64, 8, 4), (64, 64, 0, 64, 4, 3), (64, 64, 0, 64, 4, 4), (64, 64, 0, 128, 4, 3),
    (64, 32, 0, 128, 4, 4),
    (128, 128, 64, 64, 8, 2), (128, 128, 64, 64, 8, 3), (128, 128, 64, 32, 8, 3), (128, 128, 64, 32, 8, 4),
    (64, 128, 64, 64, 4, 2), (64, 128, 64, 64, 4, 3), (256, 64, 0, 64, 8, 3), (256, 64, 0, 64, 8, 4),
    (32, 32, 0, 128, 4, 4), (32, 64, 0, 128, 4, 4), (16, 32, 0, 128, 4, 4), (16, 32, 0, 128, 2, 5),
    (16, 64, 0, 128, 4, 4),
    (16, 16, 0, 128, 2, 5), (16, 32, 0, 256, 4, 3), (16, 16, 0, 256, 4, 4), (32, 32, 0, 64, 4, 5),
    (32, 16, 0, 128, 2, 5),
]  # fmt: skip
UNIT_TILES = [
    (m, 64, 32, 32, warps, stages)
    for m, warps in ((64, 4), (128, 8), (128, 4), (256, 8), (32, 4), (64, 8))
    for stages in (2, 3, 4, 5)
] + [
    (m, 128, 64, k, warps, stages)
    for m, warps in ((64, 4), (128, 8), (64, 8))
    for k, stages in ((64, 2), (64, 3), (32, 4))
]
RUNS = 10
WORTH = 0.03
"""Of a step, from which share on a product is tried with other tiles."""


def main() -> None:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", default=["64x16", "1x1"], help="sessions x frames (default: 64x16 1x1)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float16")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--widest-unit", type=int, default=WIDEST_UNIT, help="channels of units that are one kernel")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = torch.device("cuda")
    sizes = [tuple(map(int, size.split("x"))) for size in arguments.sizes]
    with torch.inference_mode():
        plain = random_network("1.7b", device)
        slots = max(batch for batch, _ in sizes) + 1
        network = FusedNetwork(plain, getattr(torch, arguments.dtype), slots, widest_unit=arguments.widest_unit)
        del plain
        for batch, chunk in sizes:
            show(network, batch, chunk, arguments.tune)


def show(network: FusedNetwork, batch: int, chunk: int, tune: bool) -> None:
    """One size."""
    groups: dict[str, list[Launch]] = defaultdict(list)
    for launch in launches(network, batch, chunk):
        groups[described(launch)].append(launch)
    compile_all([group[0] for group in groups.values()])
    times = {name: seconds(group[0]) for name, group in groups.items()}
    total = sum(times[name] * len(group) for name, group in groups.items())
    audio = batch * chunk * 0.08 / total
    print(f"\n{batch} sessions, {chunk} frames: {total * 1e3:.3f} ms in kernels, {audio:.0f} s of audio per second\n")
    print("| launch | times | us | share | TFLOP/s |\n| --- |" + " ---: |" * 4)
    for name, group in sorted(groups.items(), key=lambda item: -times[item[0]] * len(item[1])):
        rate = operations(group[0]) / times[name] / 1e12
        share = times[name] * len(group) / total
        print(f"| {name} | {len(group)} | {times[name] * 1e6:.1f} | {share:.1%} | {rate:.0f} |", flush=True)
    if tune:
        print("\n| product | now, us | best |\n| --- | ---: | --- |")
        large = [name for name, group in groups.items() if times[name] * len(group) >= WORTH * total]
        tried = {name: list(candidates(groups[name][0])) for name in large}
        with contextlib.suppress(Exception):  # of tiles that do not fit; the others are compiled and on the disk
            compile_all([launch for launches_ in tried.values() for launch in launches_])
        for name, launches_ in tried.items():
            if launches_:
                found = sorted((timed(launch), tiles(launch)) for launch in launches_)
                best = ", ".join(f"{tile} {time * 1e6:.1f}" for time, tile in found[:3])
                print(f"| {name} | {times[name] * 1e6:.1f} | {best} |", flush=True)


def launches(network: FusedNetwork, batch: int, chunk: int) -> list[Launch]:
    """All of a step, none of which runs."""
    seen: list[Launch] = []
    numbers = torch.arange(1, batch + 1, dtype=torch.int32, device=network.device)
    codes = torch.zeros(batch, chunk, network.groups, dtype=torch.int32, device=network.device)
    out = torch.zeros(batch, chunk * network.samples_per_frame, device=network.device)
    launch = fused_ops._launch
    fused_ops._launch = lambda kernel, grid, *args, **constants: seen.append((kernel, grid, args, constants))
    try:
        network(codes, Where(numbers, torch.full_like(numbers, 100)), out)
    finally:
        fused_ops._launch = launch
    return seen


def named(launch: Launch) -> dict[str, Any]:
    """Arguments and constants by name."""
    kernel, _, args, constants = launch
    return dict(zip(kernel.arg_names, args, strict=False)) | constants


def described(launch: Launch) -> str:
    """What makes launches equal."""
    values, name = named(launch), launch[0].fn.__name__.removesuffix("_kernel")
    if name == "product":
        ends = [word for word, flag in (("+x", "ADDED"), ("raw", "RAW"), ("scale", "SCALED")) if values[flag]]
        after = ("", "snake", "gelu", "gated")[getattr(values["ACTIVATION"], "value", values["ACTIVATION"])]
        shape = f"{values['rows']} x {values['TAPS']}*{values['CHANNELS']} x {values['columns']}"
        return f"product {shape} {after} {' '.join(ends)}, {tiles(launch)}"
    if name == "unit":
        head = " head" * values["HEAD"]
        return f"unit {values['rows']} x {values['TAPS']}*{values['CHANNELS']}{head}, {tiles(launch)}"
    x = launch[2][0]
    return f"{name} {list(x.shape)}"


def tiles(launch: Launch) -> str:
    values = named(launch)
    more = f"+{values['SECOND_N']}" if values.get("SECOND_N") else ""
    shape = f"{values['BLOCK_M']}x{values['BLOCK_N']}{more}x{values['BLOCK_K']}"
    registers = f" r{values['maxnreg']}" if values["maxnreg"] else ""
    return f"{shape} w{values['num_warps']} s{values['num_stages']}{registers}"


def candidates(launch: Launch) -> Iterator[Launch]:
    """The launch with other tiles."""
    kernel, _, args, constants = launch
    values, name = named(launch), kernel.fn.__name__
    if name not in ("product_kernel", "unit_kernel"):
        return
    for m, n, more, k, warps, stages in TILES if name == "product_kernel" else UNIT_TILES:
        gated = values.get("ACTIVATION") is not None and getattr(values["ACTIVATION"], "value", 0) == 3
        width = values["columns"] if gated else values.get("weight_columns", values["CHANNELS"])
        if values["PADDED"] % k or width % (n + more) or m > max(16, 2 * values["rows"]) or (gated and more):
            continue
        if values["rows"] > 4096 and (m < 64 or n < 64):
            continue
        sizes = {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}
        sizes["SECOND_N"] = n if gated else more
        columns = values.get("columns", n)
        grid = (-(-values["rows"] // m) * -(-columns // (n + more)),)
        for registers in (None, 128) if warps == 8 and more < 64 else (None,):
            yield kernel, grid, args, constants | sizes | {"maxnreg": registers}


def operations(launch: Launch) -> int:
    values, name = named(launch), launch[0].fn.__name__
    if name == "product_kernel":
        twice = 2 if getattr(values["ACTIVATION"], "value", 0) == 3 else 1
        return 2 * values["rows"] * values["TAPS"] * values["CHANNELS"] * values["columns"] * twice
    if name == "unit_kernel":
        return 2 * values["rows"] * (values["TAPS"] + 1) * values["CHANNELS"] ** 2
    return 0


def compile_all(launches_: list[Launch]) -> None:
    with fused_ops.compiling():
        for kernel, grid, args, constants in launches_:
            fused_ops._launch(kernel, grid, *args, **constants)


def timed(launch: Launch) -> float:
    """Seconds, or very many where the tiles do not fit into the chip."""
    try:
        return seconds(launch)
    except Exception:  # Triton's own classes of errors differ between versions
        return float("inf")


def seconds(launch: Launch) -> float:
    """Of one launch, the median of graphs of ``RUNS``."""
    kernel, grid, args, constants = launch
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        kernel[grid](*args, **constants)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for _ in range(RUNS):
            kernel[grid](*args, **constants)
        graph.capture_end()
        times = []
        for _ in range(5):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / RUNS / 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
