"""Speed of many LoRA adapters at once: Octavo beside vLLM's CPU build.

    python benchmarks/lora_peers.py MODEL --peers BENCH

BENCH is the folder of `compare.py install --peers vllm --into BENCH`. All requests arrive at once,
each with one of the random adapters, with prompts and answers of mixed lengths. A turn is a fresh
process that serves the requests twice and reports the second time; the engines take turns. Prints
tokens per second of prompts and answers together, and the ratio of the medians.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ENGINES = ("octavo", "vllm")
_RESULT = "tokens per second: "


def serve(engine: str, model: str, adapters: Sequence[str], rank: int, count: int) -> float:
    """Return the tokens per second of an engine in this process."""
    if engine == "octavo":
        from octavo import LLM, LoRARequest, SamplingParams
    else:
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest

    numbers = random.Random(0)
    prompts, settings, requests = [], [], []
    for i in range(count):
        length = numbers.choice((16, 64, 256))
        prompts.append({"prompt_token_ids": [numbers.randrange(10, 4000) for _ in range(length)]})
        settings.append(
            SamplingParams(
                max_tokens=numbers.choice((16, 32, 64)), ignore_eos=True, temperature=0.0
            )
        )
        number = i % len(adapters)
        requests.append(LoRARequest(f"adapter-{number}", number + 1, adapters[number]))
    options: dict[str, Any] = {
        "model": model,
        "max_model_len": 512,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "enable_prefix_caching": False,
        "enable_lora": True,
        "max_loras": len(adapters),
        "max_lora_rank": rank,
        "dtype": "bfloat16",
        "seed": 0,
    }
    llm = LLM(**options)
    tokens = 0
    for _ in range(2):
        begin = time.perf_counter()
        outputs = llm.generate(prompts, settings, lora_request=requests, use_tqdm=False)
        seconds = time.perf_counter() - begin
        tokens = sum(len(out.prompt_token_ids) + len(out.outputs[0].token_ids) for out in outputs)
    return tokens / seconds


def measure(engine: str, python: str, environment: dict[str, str], words: Sequence[str]) -> float:
    """Return the result of `serve` in a fresh process.

    Raises:
        SystemExit: the process failed.
    """
    command = [python, __file__, *words, "--serve", engine]
    with tempfile.TemporaryFile("w+") as log:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | environment
        )
        if done.returncode:
            log.seek(0)
            raise SystemExit(f"{engine} failed:\n{log.read()[-3000:]}")
    (line,) = (line for line in done.stdout.splitlines() if line.startswith(_RESULT))
    return float(line.removeprefix(_RESULT))


def main() -> None:
    """Print the speed of both engines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        adapters = sorted(str(path) for path in args.folder.iterdir())
        speed = serve(args.serve, args.model, adapters, args.rank, args.requests)
        print(f"\n{_RESULT}{speed}")
        return

    from lora import write_adapters
    from peers.base import Setup
    from peers.vllm import PEER

    from octavo.checkpoints.registry import open_checkpoint
    from octavo.models.adaptable_model import AdaptableModel
    from octavo.models.registry import read_spec

    engines: dict[str, tuple[str, dict[str, str]]] = {"octavo": (sys.executable, {})}
    if args.peers is not None:
        setup = Setup(args.model, cores=tuple(sorted(os.sched_getaffinity(0))))
        engines["vllm"] = PEER.driver(args.peers)[0], PEER.environment(args.peers, setup)
    found: dict[str, list[float]] = {engine: [] for engine in engines}
    with tempfile.TemporaryDirectory() as name:
        spec = AdaptableModel(read_spec(open_checkpoint(Path(args.model))))
        write_adapters(spec, Path(name), args.adapters, args.rank, dora=False)
        words = [args.model, "--folder", name, "--rank", str(args.rank)]
        words += ["--requests", str(args.requests)]
        for _ in range(args.rounds):
            for engine, (python, environment) in engines.items():
                speed = measure(engine, python, environment, words)
                found[engine].append(speed)
                print(f"{engine}: {speed:.0f} tokens/s", flush=True)
    medians = {engine: statistics.median(speeds) for engine, speeds in found.items()}
    if "vllm" in medians:
        print(f"ratio of the medians: {medians['octavo'] / medians['vllm']:.2f}")


if __name__ == "__main__":
    main()
