"""Measure the cost of loaded keys and values: against computing them, and on throughput.

    python benchmarks/kv_tiers.py --model DIR [--lengths 1024 8192] [--repeat 7] [--prompts 16]

For each prompt length it prints the median time to the first token (ms) of a prompt that is
computed, in the prefix cache, loaded from memory, loaded from the file two seconds after a restart
and later (the file in the page cache), and fetched from another engine over shared memory and over
TCP; the speedup of each over computing; and the speed of the transfer (GB/s: the bytes of the
loaded blocks and of the recurrent state by the time beyond a hit), next to a plain copy of the same
size. The logprobs of each first token must have the bits of the computed one. Then prompts per
second with and without saving every prompt, in turn, for the given number of prompts at once (0:
left out).
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from operator import mul
from pathlib import Path

import msgspec
import numpy as np

from octavo import LLM, SamplingParams
from octavo.kv_cache.groups import state_nbytes
from octavo.kv_connector import peer

ONE = SamplingParams(max_tokens=1, temperature=0, logprobs=5)
REMOTE = msgspec.structs.replace(ONE, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
_seeds = iter(range(10**6))


def make_prompt(length: int) -> dict[str, list[int]]:
    rng = random.Random(next(_seeds))
    return {"prompt_token_ids": [rng.randrange(5, 1000) for _ in range(length)]}


def ask(llm: LLM, prompt: object, params: SamplingParams = ONE) -> tuple[float, object]:
    """Return the seconds to the first token, and the output."""
    start = time.perf_counter()
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    return time.perf_counter() - start, output


def median(measure: Callable[[], float], repeat: int) -> float:
    measure()
    return statistics.median(measure() for _ in range(repeat))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--memory", type=int, default=2**30)
    parser.add_argument("--prompts", type=int, default=16)
    args = parser.parse_args()
    longest = max(args.lengths)
    settings = {
        "model": args.model,
        "skip_tokenizer_init": True,
        "max_model_len": longest + 64,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
    }
    with tempfile.TemporaryDirectory() as folder:
        for length in args.lengths:
            settings["max_model_len"] = length + 64
            tiers(settings, length, args.repeat, args.memory, folder)
        if args.prompts:
            settings["kv_cache_memory_bytes"] = args.memory
            saving(settings, args.repeat, args.memory, folder, args.prompts)


def connector(name: str, memory: int, folder: str | None = None, **config: object) -> dict:
    extra: dict[str, object] = {"cpu_bytes_to_use": memory}
    if folder is not None:
        extra |= {"file_path": folder, "file_bytes_to_use": memory}
    return {"kv_connector": name, "kv_connector_extra_config": extra} | config


def tiers(settings: dict, length: int, repeat: int, memory: int, folder: str) -> None:
    times: dict[str, float] = {}
    # Room for two prompts, so that pages of memory are touched before the timed part.
    settings = settings | {"num_gpu_blocks_override": 2 * (length // 16) + 20, "max_num_seqs": 2}
    folder = str(Path(folder) / str(length))
    config = connector("OffloadingConnector", memory, folder)
    llm = LLM(**settings, kv_transfer_config=config)
    prompts = [make_prompt(length) for _ in range(repeat + 1)]
    computed = [ask(llm, prompt) for prompt in prompts]
    times["computed"] = statistics.median([seconds for seconds, _ in computed][1:])
    hit, (_, expected) = prompts[-1], computed[-1]

    def again(llm: LLM, params: SamplingParams = ONE) -> float:
        seconds, output = ask(llm, hit, params)
        assert output.num_cached_tokens >= length - 16, "it was computed again"
        assert output.outputs[0].logprobs == expected.outputs[0].logprobs, "other bits"
        return seconds

    times["prefix cache"] = median(lambda: again(llm), repeat)

    def from_memory() -> float:
        llm.reset_prefix_cache()
        return again(llm)

    times["memory"] = median(from_memory, repeat)
    layout = llm.llm_engine.client.core.scheduler._connector.layout
    nbytes = length // layout.block_size * sum(map(mul, layout.num_pages, layout.page_nbytes))
    nbytes += state_nbytes(layout.states)
    llm.llm_engine.shutdown()
    found: dict[str, list[float]] = {"file, after a restart": [], "file": []}
    config["kv_connector_extra_config"]["cpu_bytes_to_use"] = memory // 4  # not all prompts fit
    llm = LLM(**settings, kv_transfer_config=config)
    ask(llm, make_prompt(64))
    for path in Path(folder).iterdir():
        path.read_bytes()  # into the page cache
    time.sleep(2)  # the engine allocates memory for the file's blocks
    for some in found.values():
        for prompt, (_, before) in zip(prompts[1:], computed[1:], strict=True):
            seconds, output = ask(llm, prompt)
            assert output.num_cached_tokens >= length - 16, "the file has lost it"
            assert output.outputs[0].logprobs == before.outputs[0].logprobs, "other bits"
            some.append(seconds)
            llm.reset_prefix_cache()
    times |= {name: statistics.median(some) for name, some in found.items()}
    llm.llm_engine.shutdown()
    one = LLM(**settings, kv_transfer_config=connector("P2PConnector", memory))
    two = LLM(**settings, kv_transfer_config=connector("P2PConnector", memory // 16))
    offer = ask(one, hit, REMOTE)[1].kv_transfer_params
    go_on = msgspec.structs.replace(ONE, extra_args={"kv_transfer_params": offer})

    def from_peer() -> float:
        two.reset_prefix_cache()
        return again(two, go_on)

    times["another engine, shared memory"] = median(from_peer, repeat)
    opened, peer._open = peer._open, lambda peer: None
    times["another engine, TCP"] = median(from_peer, repeat)
    peer._open = opened
    one.llm_engine.shutdown()
    two.llm_engine.shutdown()
    source = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)
    target = np.zeros_like(source)

    def copy() -> float:
        start = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - start

    plain = nbytes / median(copy, 2 * repeat + 1) / 1e9
    print(f"{length} tokens, {nbytes / 2**20:.1f} MiB, plain copy {plain:.1f} GB/s")
    for name, seconds in times.items():
        text = f"  {name:32} {1000 * seconds:8.1f} ms {times['computed'] / seconds:6.1f}x"
        beyond = seconds - times["prefix cache"]
        if name not in ("computed", "prefix cache"):
            text += f" {nbytes / beyond / 1e9:6.1f} GB/s"
        print(text, flush=True)


def saving(settings: dict, repeat: int, memory: int, folder: str, count: int) -> None:
    plain = LLM(**settings)
    saved = {
        "memory": LLM(**settings, kv_transfer_config=connector("OffloadingConnector", memory // 4)),
        "memory and file": LLM(
            **settings,
            kv_transfer_config=connector("OffloadingConnector", memory // 4, folder + "/s"),
        ),
    }
    ratios: dict[str, list[float]] = {name: [] for name in saved}
    for i in range(repeat + 1):
        for name, llm in saved.items():
            prompts = [make_prompt(500) for _ in range(count)]
            params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
            times = []
            for engine in (plain, llm) if i % 2 else (llm, plain):
                start = time.perf_counter()
                engine.generate(prompts, params, use_tqdm=False)
                times.append(time.perf_counter() - start)
            first, second = times if i % 2 else times[::-1]
            if i:
                ratios[name].append(first / second)
    for name, found in ratios.items():
        print(f"throughput, every prompt saved to {name}: {statistics.median(found):.3f}")


if __name__ == "__main__":
    main()
