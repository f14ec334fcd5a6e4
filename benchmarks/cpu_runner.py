#!/usr/bin/env python3
"""Tokens per second on a CPU: vLLM's Model Runner V2 on Omni's platform beside vLLM's own CPU runner.

    python benchmarks/cpu_runner.py --rounds 5 --record

Two processes, a plain vLLM one and one of Omni's, hold the same engines: a tiny Qwen3 of two layers with a vocabulary
of 1000, and one with 151936 (random weights both). Rounds alternate between the processes, case by case; an engine
runs in its process (no EngineCore process), eagerly. The tiny model makes the runner's own work count; with a real
one the forward pass would hide it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT, finish, median, table

TESTS = ROOT / "plugins" / "platforms" / "cpu" / "tests"
LARGE = 151936
MARK = "ANSWER "


@dataclass
class Case:
    """Rounds of one kind of request on one model; tokens per second of both runners."""

    name: str
    model: str
    requests: int
    tokens: int
    params: dict[str, Any]
    own: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)

    def row(self) -> tuple[str, ...]:
        """Medians, and the ratio."""
        own, ours = median(self.own), median(self.ours)
        vocabulary = LARGE if self.model == "large" else 1000
        return (self.name, str(vocabulary), str(self.requests), f"{own:.0f}", f"{ours:.0f}", f"{ours / own:.2f}")


HEADER = ("sampling", "vocabulary", "requests", "vLLM's V1 (tokens/s)", "V2 on Omni's platform (tokens/s)", "ratio")
GREEDY: dict[str, Any] = {"temperature": 0}
TEMPERATURE: dict[str, Any] = {"temperature": 0.8}
NUCLEUS: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.9}
PENALTY: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "repetition_penalty": 1.1}


def cases() -> list[Case]:
    """What is measured."""
    return [
        Case("greedy", "small", 1, 200, GREEDY),
        Case("greedy", "small", 8, 200, GREEDY),
        Case("temperature", "small", 8, 200, TEMPERATURE),
        Case("temperature, top-k, top-p", "small", 8, 200, NUCLEUS),
        Case("temperature, top-k, penalty", "small", 8, 200, PENALTY),
        Case("greedy", "large", 8, 40, GREEDY),
        Case("temperature", "large", 1, 40, TEMPERATURE),
        Case("temperature", "large", 8, 40, TEMPERATURE),
    ]


class Side:
    """A process with the engines, that runs a case when told to."""

    def __init__(self, checkpoints: Path, environment: dict[str, str], asynchronous: bool | None) -> None:
        command = [sys.executable, __file__, "--serve", str(checkpoints)]
        command += [] if asynchronous is None else ["--async-scheduling", str(int(asynchronous))]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.runner = self._answer()

    def run(self, case: Case) -> float:
        """Tokens per second of one round."""
        assert self.process.stdin is not None
        todo = {"model": case.model, "requests": case.requests, "tokens": case.tokens, "params": case.params}
        self.process.stdin.write(json.dumps(todo) + "\n")
        self.process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError(f"the process ended with status {self.process.wait()}")

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def serve(checkpoints: Path, asynchronous: bool | None) -> None:
    """Start the engines, then run what standard input asks for."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    more = {} if asynchronous is None else {"async_scheduling": asynchronous}
    engines = {
        name: LLM(
            model=str(checkpoints / name),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_num_seqs=8,
            enable_prefix_caching=False,
            **more,
        )
        for name in ("small", "large")
    }
    version = "V2" if engines["small"].llm_engine.vllm_config.use_v2_model_runner else "V1"
    print(MARK + json.dumps(version), flush=True)
    for line in sys.stdin:
        todo = json.loads(line)
        params = SamplingParams(max_tokens=todo["tokens"], ignore_eos=True, detokenize=False, **todo["params"])
        prompts = [{"prompt_token_ids": [5 + index, 7, 11]} for index in range(todo["requests"])]
        begin = time.perf_counter()
        engines[todo["model"]].generate(prompts, params, use_tqdm=False)
        print(MARK + json.dumps(todo["tokens"] * todo["requests"] / (time.perf_counter() - begin)), flush=True)


def compare(arguments: argparse.Namespace) -> list[Case]:
    """Rounds of every case, alternating between the sides."""
    from omni_core.plugins.manager import PLUGIN_SET_VARIABLE, PluginManager

    sys.path.insert(0, str(TESTS))
    from cpu_tiny import write_qwen3

    found = cases()
    with tempfile.TemporaryDirectory(prefix="omni-benchmark-") as text:
        write_qwen3(Path(text) / "small")
        write_qwen3(Path(text) / "large", vocabulary=LARGE)
        plain = {name: value for name, value in os.environ.items() if name != PLUGIN_SET_VARIABLE}
        omni = {**plain, PLUGIN_SET_VARIABLE: PluginManager.scan().plugin_set.to_json()}
        sides: list[Side] = []
        try:
            sides += [Side(Path(text), plain, None)]
            sides += [Side(Path(text), omni, arguments.async_scheduling)]
            if [side.runner for side in sides] != ["V1", "V2"]:
                sys.exit(f"the processes run {' and '.join(side.runner for side in sides)}, not V1 and V2")
            for number in range(-1, arguments.rounds):  # the first is not counted
                for case in found:
                    rates = [side.run(case) for side in sides]
                    if number >= 0:
                        case.own.append(rates[0])
                        case.ours.append(rates[1])
        finally:
            for side in sides:
                side.close()
    return found


def main() -> None:
    """Measure, print, and record if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each case")
    parser.add_argument("--async-scheduling", type=lambda word: bool(int(word)), help="1 or 0: of the V2 side")
    parser.add_argument("--record", action="store_true", help="append the run to docs/performance.md")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve, arguments.async_scheduling)
        return
    measured = compare(arguments)
    raw = {}
    for case in measured:
        name = f"{case.name}, {case.model} vocabulary, {case.requests}"
        raw |= {f"{name}, V1": case.own, f"{name}, V2": case.ours}
    title = "Model Runner V2 on CPU beside vLLM's own CPU runner"
    figures = table(HEADER, [case.row() for case in measured])
    finish(title, figures, raw, "tokens per second", record=arguments.record)


if __name__ == "__main__":
    main()
