#!/usr/bin/env python3
"""One forward of Wan's transformer at its genuine size, beside diffusers' in the same run, on a CUDA device.

    python -m omni_plugin_wan22.checkpoints CHECKPOINT --kind ti2v-5b --real --text-encoder tiny --device cuda
    python benchmarks/wan_forward.py CHECKPOINT

Prints for each variant: milliseconds (median of the timed rounds, in turn so that all see the same clocks), the share
of the card's measured bfloat16 matrix rate that the model's own operations come to, and the largest difference of the
output from diffusers' in float32, beside diffusers' own in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from omni_core.vllm.parallel import parallel_state

ALLOWED = 1.1
"""How far from float32 a variant may be, beside diffusers in bfloat16."""


def main() -> None:
    """Run all variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--size", default="1280x704", help="WIDTHxHEIGHT (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=121)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    arguments = parser.parse_args()
    config = json.loads((arguments.checkpoint / "transformer" / "config.json").read_text())
    inputs = make_inputs(config, arguments)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, {arguments.size}, {arguments.frames} frames")
    rate = matrix_rate()
    work = operations(config, inputs["latents"])
    print(
        f"matrix rate {rate / 1e12:.0f} TFLOP/s; one video is {work / 1e12:.0f} TFLOP, {1e3 * work / rate:.0f} ms at it"
    )
    with parallel_state(backend="gloo"), torch.inference_mode():
        exact = None
        rows = []
        runs: dict[str, Callable[[], torch.Tensor]] = {}
        for name in arguments.variants:
            torch.cuda.reset_peak_memory_stats()
            begin = torch.cuda.memory_allocated()
            runs[name] = VARIANTS[name](arguments.checkpoint, config, inputs)
            output = runs[name]()
            peak = torch.cuda.max_memory_allocated() - begin
            rows.append((name, output.float().cpu(), peak / 2**30))
        exact = reference(arguments.checkpoint, inputs)
        times = measure(runs, arguments.rounds)
    differences = {}
    print(f"{'variant':<24} {'ms':>8} {'of rate':>8} {'difference':>11} {'peak GiB':>9}")
    for name, output, peak in rows:
        videos = output.shape[0]
        difference = (output[:1] - exact).abs().mean().item()
        share = videos * work / rate / (times[name] / 1e3)
        print(f"{name:<24} {times[name]:8.1f} {share:8.1%} {difference:11.2e} {peak:9.1f}")
        differences[name] = difference
    if "diffusers" in differences:
        worst = max(value for name, value in differences.items() if name.startswith("omni"))
        if worst > ALLOWED * differences["diffusers"]:
            raise SystemExit(f"a difference of {worst:.2e} is more than {ALLOWED} times that of diffusers in bfloat16")


def make_inputs(config: dict, arguments: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Latents, timestep and text of one video."""
    width, height = map(int, arguments.size.split("x"))
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, config["in_channels"], (arguments.frames - 1) // 4 + 1, height // 16, width // 16)
    return {
        "latents": torch.randn(shape, generator=generator, device="cuda"),
        "timestep": torch.tensor([[900.0]], device="cuda"),
        "text": torch.randn(1, 512, config["text_dim"], generator=generator, device="cuda"),
    }


def operations(config: dict, latents: torch.Tensor) -> float:
    """Multiplications and additions of one video's forward: matrix products and attention."""
    dim = config["num_attention_heads"] * config["attention_head_dim"]
    tokens = latents[0, 0].numel() // 4
    texts = 512
    products = 2 * tokens * dim * (4 * dim + 2 * dim + 2 * config["ffn_dim"]) + 2 * texts * dim * 2 * dim
    attention = 4 * tokens * tokens * dim + 4 * tokens * texts * dim
    return float(config["num_layers"] * (products + attention))


def matrix_rate() -> float:
    """The card's bfloat16 matrix rate, operations a second, measured on a large product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(20):
        seconds.append(timed(lambda: a @ b) / 1e3)
    return 2 * 8192**3 / statistics.median(seconds[5:])


def timed(work: Callable[[], object]) -> float:
    """Milliseconds on the device."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def measure(runs: dict[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, in turn."""
    for run in runs.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(timed(run))
    for name, values in found.items():
        print(f"raw {name}: {' '.join(f'{value:.1f}' for value in values)}")
    return {name: statistics.median(values) for name, values in found.items()}


def _theirs(checkpoint: Path, dtype: torch.dtype, attention: str = "native") -> torch.nn.Module:
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel.from_pretrained(checkpoint / "transformer", torch_dtype=dtype).cuda().eval()
    model.set_attention_backend(attention)
    return model


def reference(checkpoint: Path, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Diffusers in float32."""
    model = _theirs(checkpoint, torch.float32)
    return model(inputs["latents"], inputs["timestep"][:, 0], inputs["text"], return_dict=False)[0].float().cpu()


def diffusers_variant(compiled: bool, attention: str = "native") -> Callable[..., Callable[[], torch.Tensor]]:
    """Diffusers in bfloat16."""

    def make(checkpoint: Path, config: dict, inputs: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
        model = _theirs(checkpoint, torch.bfloat16, attention)
        if compiled:
            model.compile_repeated_blocks(fullgraph=True)
        latents, text = inputs["latents"].bfloat16(), inputs["text"].bfloat16()
        return lambda: model(latents, inputs["timestep"][:, 0], text, return_dict=False)[0]

    return make


def our_variant(
    compiled: bool, videos: int = 1, attention: str = "attention"
) -> Callable[..., Callable[[], torch.Tensor]]:
    """Ours in bfloat16, with ``videos`` in the batch."""

    def make(checkpoint: Path, config: dict, inputs: dict[str, torch.Tensor]) -> Callable[[], torch.Tensor]:
        from omni_core.diffusion.contract import StageContext
        from omni_platform_cuda import attention as attentions
        from omni_plugin_wan22.model import _load_expert
        from omni_plugin_wan22.transformer import TransformerConfig

        context = StageContext(
            checkpoint, torch.device("cuda"), torch.bfloat16, getattr(attentions, attention), compile=compiled
        )
        model = _load_expert(TransformerConfig.from_json(config), checkpoint / "transformer", context).eval()
        latents, timestep, text = (
            value.repeat(videos, *[1] * (value.dim() - 1))
            for value in (inputs["latents"].bfloat16(), inputs["timestep"], inputs["text"].bfloat16())
        )
        return lambda: model(latents, timestep, text)

    return make


VARIANTS = {
    "diffusers": diffusers_variant(compiled=False),
    "diffusers compiled": diffusers_variant(compiled=True),
    "diffusers cuDNN": diffusers_variant(compiled=False, attention="_native_cudnn"),
    "diffusers compiled cuDNN": diffusers_variant(compiled=True, attention="_native_cudnn"),
    "omni": our_variant(compiled=False),
    "omni compiled": our_variant(compiled=True),
    "omni, pair": our_variant(compiled=False, videos=2),
}


if __name__ == "__main__":
    main()
