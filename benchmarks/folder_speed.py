"""Compare Octavo with peers on any model folder: decoding of 1 and 8 requests, and prefill.

    python benchmarks/shaped_model.py FOLDER --shape lfm2-350m
    python benchmarks/folder_speed.py FOLDER... --peers BENCH --engines octavo,transformers

BENCH is the folder of `compare.py install --into BENCH`. transformers runs in Octavo's own
environment. Each turn is a fresh process, and the engines take turns. Prints medians in tokens per
second, with the least and the most. A folder with quantized weights may have a different form for
each engine; `gguf_speed.py` compares with llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from compare import names, peer_named
from peers import machine
from peers.base import TOKENS, Case, Job, Row, Setup

SHORT, OUTPUT, LONG = 32, 64, 2000
"""Tokens of a prompt and an answer that measure decoding, and of one that measures prefill."""


def cases(seed: int) -> tuple[Case, ...]:
    """Return the cases of a round, whose prompts are random."""
    numbers = random.Random(seed)

    def row(length: int, output: int) -> Row:
        return Row([numbers.randrange(TOKENS[0], 4000) for _ in range(length)], output)

    found = [
        Case(f"batch {n}", "latency", "", 3, rows=tuple(row(SHORT, OUTPUT) for _ in range(n)))
        for n in (1, 8)
    ]
    prompts = tuple(row(LONG, 1) for _ in range(2))
    return (*found, Case("prefill", "prefill", "", 2, rows=prompts))


def measure(engine: str, folder: Path, root: Path, seed: int, kv_gib: int) -> dict[str, float]:
    """Return tokens per second of one process, the best of each case's repetitions.

    Raises:
        SystemExit: the process failed.
    """
    peer = peer_named(engine)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    setup = Setup(str(folder), kv_gib=kv_gib, max_num_seqs=8, max_model_len=2048, cores=cores)
    driver = peer.driver(root)
    if engine == "transformers":
        driver[0] = sys.executable
    with tempfile.TemporaryDirectory() as name:
        job, out, log = (Path(name) / part for part in ("job.json", "out.jsonl", "log"))
        job.write_text(Job(setup, cases(seed)).to_json())
        with log.open("wb") as stream:
            done = subprocess.run(
                [*driver, str(job), str(out)],
                env=machine.environment(peer.environment(root, setup)),
                stdout=stream,
                stderr=stream,
                check=False,
            )
        if done.returncode:
            raise SystemExit(f"{engine} failed on {folder}:\n{log.read_text()[-3000:]}")
        found: dict[str, float] = {}
        for line in out.read_text().splitlines():
            event = json.loads(line)
            case, metrics = event["case"], event["metrics"]
            if metrics["wrong_tokens"]:
                raise SystemExit(f"{engine} gave an answer of a wrong length on {folder}")
            if case == "prefill":
                speed = metrics["prefill_tok_s"]
            else:
                speed = 1e3 * int(case.split()[1]) / metrics["tpot_ms"]
            found[case] = max(speed, found.get(case, 0.0))
    return found


def main() -> None:
    """Measure all folders, and print a line for each case."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--peers", type=Path, default=Path(), metavar="BENCH")
    parser.add_argument("--engines", type=names, default=["octavo", "transformers"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-gib", type=int, default=1)
    args = parser.parse_args()
    for folder in args.folders:
        rows: dict[str, list[dict[str, float]]] = {engine: [] for engine in args.engines}
        for seed in range(args.rounds):
            for engine, found in rows.items():
                found.append(
                    measure(engine, folder.resolve(), args.peers.resolve(), seed, args.kv_gib)
                )
        print(folder.name, flush=True)
        for key in next(iter(rows.values()))[0]:
            values = {engine: [one[key] for one in found] for engine, found in rows.items()}
            texts = [
                f"{engine} {statistics.median(v):.4g} ({min(v):.4g} to {max(v):.4g})"
                for engine, v in values.items()
            ]
            ours, *others = (statistics.median(v) for v in values.values())
            ratios = ", ".join(f"{ours / other:.2f}" for other in others)
            print(f"  {key:8} {'; '.join(texts)}; ratio {ratios}", flush=True)


if __name__ == "__main__":
    main()
