"""Measure the gain of speculative decoding: same answers with and without drafts, in turn.

    python benchmarks/speculation.py MODEL --draft '{"method": "ngram"}' \\
        --draft '{"method": "draft_model", "model": "octavo/stories-draft"}' --batch 1,16

A process for each configuration holds the model; they take turns, one workload after the other, and
the ratios are those of successive runs. Workloads: `stories` continue a story, greedily and at
temperature 0.8; `repeats` continues a repetitive text. MODEL should write real text: the built-in
model, or one that `training/widen.py` enlarged. `suffix` finds its earlier answer to the same
prompt in every turn except the first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

from peers.workloads import TEXTS

WORKLOADS: dict[str, dict[str, Any]] = {
    "stories": {"prompts": TEXTS["stories"], "temperature": 0.0},
    "stories at 0.8": {"prompts": TEXTS["stories"], "temperature": 0.8},
    "repeats": {"prompts": TEXTS["repeats"], "temperature": 0.0},
}
MAX_TOKENS = 96


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--draft", action="append", default=[], metavar="JSON")
    parser.add_argument("--batch", default="1,16", metavar="N,M")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve(args.model, json.loads(args.draft[0]), args.dtype)
        return 0
    configs = [None, *map(json.loads, args.draft)]
    engines = [Engine(args.model, config, args.dtype) for config in configs]
    print("| workload | batch | drafts | tokens a step | accepted | speed |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in WORKLOADS:
        for batch in map(int, args.batch.split(",")):
            measure(engines, name, batch, args.repeats)
    for engine in engines:
        engine.close()
    return 0


def measure(engines: list[Engine], workload: str, batch: int, repeats: int) -> None:
    """Run a workload on all engines in turn; print a line for each except the first."""
    runs: list[list[dict[str, float]]] = [[] for _ in engines]
    for turn in range(repeats + 1):
        order = range(len(engines)) if turn % 2 else reversed(range(len(engines)))
        for i in order:
            run = engines[i].run(workload, batch)
            if turn:  # the first run warms up, and determines the number of drafts
                runs[i].append(run)
    plain = runs[0]
    for engine, its in zip(engines[1:], runs[1:], strict=True):
        assert all(run["digest"] == plain[0]["digest"] for run in its) or engine.inexact
        ratio = statistics.median(
            a["seconds"] / b["seconds"] for a, b in zip(plain, its, strict=True)
        )
        last = its[-1]
        per_step = last["tokens"] / max(1.0, last["tokens"] - last["accepted"])
        share = last["accepted"] / max(1.0, last["drafted"])
        print(
            f"| {workload} | {batch} | {engine.title} | {per_step:.2f} | {share:.0%} |"
            f" {ratio:.2f}x |",
            flush=True,
        )


class Engine:
    """Process with the model.

    Args:
        model: the model.
        config: its `speculative_config`.
        dtype: dtype of the weights.
    """

    def __init__(self, model: str, config: dict[str, Any] | None, dtype: str) -> None:
        self.title = "none" if config is None else config.get("method", "draft_model")
        self.inexact = config is not None and config.get("acceptance", "exact") != "exact"
        words = [sys.executable, __file__, model, "--child", "--dtype", dtype]
        self._process = subprocess.Popen(
            [*words, "--draft", json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._read()

    def _read(self) -> Any:
        while True:
            line = self._out.readline()
            if not line:
                raise SystemExit(f"the engine with drafts={self.title} ended")
            if line.startswith("{"):
                return json.loads(line)

    def run(self, workload: str, batch: int) -> dict[str, float]:
        """Return the seconds, tokens, drafts, and a digest of the answers of one run."""
        self._in.write(json.dumps([workload, batch]) + "\n")
        self._in.flush()
        result: dict[str, float] = self._read()
        return result

    def close(self) -> None:
        """End the process."""
        self._in.close()
        self._process.wait()


def serve(model: str, config: dict[str, Any] | None, dtype: str) -> None:
    """Run a child process: one run for each line."""
    from octavo import LLM, SamplingParams

    with LLM(
        model=model,
        dtype=dtype,
        max_model_len=512,
        max_num_seqs=16,
        enable_prefix_caching=False,
        speculative_config=config,
    ) as llm:
        print("{}", flush=True)
        for line in sys.stdin:
            name, batch = json.loads(line)
            workload = WORKLOADS[name]
            prompts = [workload["prompts"][i % len(workload["prompts"])] for i in range(batch)]
            params = [
                SamplingParams(
                    temperature=workload["temperature"],
                    seed=i,
                    max_tokens=MAX_TOKENS,
                    ignore_eos=True,
                )
                for i in range(batch)
            ]
            before, start = llm.stats(), time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds, after = time.perf_counter() - start, llm.stats()
            accepted = sum(after.num_accepted_tokens_per_pos)
            accepted -= sum(before.num_accepted_tokens_per_pos)
            answers = [tuple(o.outputs[0].token_ids) for o in outputs]
            result = {
                "seconds": seconds,
                "tokens": sum(map(len, answers)),
                "accepted": accepted,
                "drafted": after.num_draft_tokens - before.num_draft_tokens,
                "digest": hash(tuple(answers)),  # of integers: the same in every process
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.exit(main())
