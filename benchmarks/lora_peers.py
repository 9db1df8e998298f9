"""Speed of many LoRA adapters at once: Octavo beside vLLM's CPU build and llama.cpp.

    python benchmarks/lora_peers.py MODEL --peers BENCH [--engines octavo llama]

BENCH is the folder of `compare.py install --peers vllm llama --into BENCH`. All requests arrive at
once, each with one of the random adapters, with prompts and answers of mixed lengths. A turn is a
fresh process that serves the requests twice and reports the second time; the engines take turns.
llama.cpp's server batches only requests of one adapter; it has the same model and adapters in GGUF,
in bfloat16 and float16. `--files` keeps the adapters and the converted files for the next run, so
that `--rounds 0` makes them and a later run only measures. Prints tokens per second of prompts and
answers together, and the ratios of the medians.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENGINES = ("octavo", "vllm", "llama")
_RESULT = "tokens per second: "
_MAX_MODEL_LEN = 512


@dataclass(frozen=True)
class Ask:
    """Request."""

    prompt: list[int]
    max_tokens: int
    adapter: int
    """Index of its adapter."""


def make_requests(count: int, num_adapters: int) -> list[Ask]:
    """Return requests with prompts and answers of mixed lengths."""
    numbers, asks = random.Random(0), []
    for i in range(count):
        prompt = [numbers.randrange(10, 4000) for _ in range(numbers.choice((16, 64, 256)))]
        asks.append(Ask(prompt, numbers.choice((16, 32, 64)), i % num_adapters))
    return asks


def serve(engine: str, model: str, adapters: Sequence[str], rank: int, count: int) -> float:
    """Return the tokens per second of an engine in this process."""
    if engine == "octavo":
        from octavo import LLM, LoRARequest, SamplingParams
    else:
        from vllm import LLM, SamplingParams
        from vllm.lora.request import LoRARequest

    asks = make_requests(count, len(adapters))
    prompts = [{"prompt_token_ids": ask.prompt} for ask in asks]
    settings = [
        SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True, temperature=0.0) for ask in asks
    ]
    requests = [
        LoRARequest(f"adapter-{ask.adapter}", ask.adapter + 1, adapters[ask.adapter])
        for ask in asks
    ]
    options: dict[str, Any] = {
        "model": model,
        "max_model_len": _MAX_MODEL_LEN,
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


def serve_llama(root: Path, model: str, adapters: Sequence[Path], count: int) -> float:
    """Return the tokens per second of a fresh server of llama.cpp.

    Args:
        root: folder of the installed engines.
        model: the model in GGUF.
        adapters: the adapters in GGUF.
        count: number of requests.

    Raises:
        SystemExit: the server ends, or an answer has another length.
    """
    import httpx
    from peers.base import Setup
    from peers.llama import PEER, SLOTS

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cores = tuple(sorted(os.sched_getaffinity(0)))
    setup = Setup(
        model, kv_tokens=SLOTS * _MAX_MODEL_LEN, max_model_len=_MAX_MODEL_LEN, cores=cores
    )
    command = [*PEER.server(root, setup, port), "--lora", ",".join(map(str, adapters))]
    command += ["--lora-init-without-apply"]
    asks = make_requests(count, len(adapters))
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=3600) as client,
        ThreadPoolExecutor(count) as pool,
    ):

        def failed(why: str) -> SystemExit:
            log.seek(0)
            return SystemExit(f"llama.cpp {why}:\n{log.read()[-3000:]}")

        def send(ask: Ask) -> int:
            body: dict[str, Any] = {
                "prompt": ask.prompt,
                "n_predict": ask.max_tokens,
                "ignore_eos": True,
                "temperature": 0.0,
                "cache_prompt": False,
                "lora": [{"id": ask.adapter, "scale": 1.0}],
            }
            found: dict[str, Any] = client.post("/completion", json=body).raise_for_status().json()
            if found["tokens_predicted"] != ask.max_tokens:
                raise failed(f"answered with {found['tokens_predicted']} tokens of {ask}")
            return len(ask.prompt) + ask.max_tokens

        try:
            while True:
                with suppress(httpx.TransportError):
                    if client.get(PEER.ready_path).status_code == 200:
                        break
                if server.poll() is not None:
                    raise failed(f"ended with status {server.returncode}")
                time.sleep(0.1)
            tokens, seconds = 0, 0.0
            for _ in range(2):
                begin = time.perf_counter()
                tokens = sum(pool.map(send, asks))
                seconds = time.perf_counter() - begin
        finally:
            server.kill()
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
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--adapters", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--files", type=Path, help="Folder of the files; default: a temporary one.")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        adapters = sorted(str(path) for path in args.folder.iterdir())
        speed = serve(args.serve, args.model, adapters, args.rank, args.requests)
        print(f"\n{_RESULT}{speed}")
        return

    from lora import write_adapters
    from peers import llama, vllm
    from peers.base import Setup

    from octavo.checkpoints.registry import open_checkpoint
    from octavo.models.adaptable_model import AdaptableModel
    from octavo.models.registry import read_spec

    engines = [it for it in args.engines if it == "octavo" or args.peers is not None]
    found: dict[str, list[float]] = {engine: [] for engine in engines}
    with tempfile.TemporaryDirectory() as name:
        files_folder = args.files or Path(name)
        folder, converted = files_folder / "adapters", files_folder / "gguf"
        if not folder.exists():
            folder.mkdir(parents=True)
            spec = AdaptableModel(read_spec(open_checkpoint(Path(args.model))))
            write_adapters(spec, folder, args.adapters, args.rank, dora=False)
        converted.mkdir(exist_ok=True)
        words = [args.model, "--folder", str(folder), "--rank", str(args.rank)]
        words += ["--requests", str(args.requests)]
        files, gguf = [], converted / "model.gguf"
        if "llama" in engines:
            log = converted / "log"
            if not gguf.exists():
                llama.convert(args.peers, Path(args.model), gguf, log)
            for adapter in sorted(folder.iterdir()):
                files.append(converted / f"{adapter.name}.gguf")
                if not files[-1].exists():
                    llama.convert_adapter(args.peers, adapter, Path(args.model), files[-1], log)

        def turn(engine: str) -> float:
            if engine == "octavo":
                return measure(engine, sys.executable, {}, words)
            if engine == "llama":
                return serve_llama(args.peers, str(gguf), files, args.requests)
            setup = Setup(args.model, cores=tuple(sorted(os.sched_getaffinity(0))))
            environment = vllm.PEER.environment(args.peers, setup)
            return measure(engine, vllm.PEER.python(args.peers), environment, words)

        for _ in range(args.rounds):
            for engine in engines:
                found[engine].append(turn(engine))
                print(f"{engine}: {found[engine][-1]:.0f} tokens/s", flush=True)
    medians = {engine: statistics.median(found[engine] or [0.0]) for engine in engines}
    for engine in engines[1:] if args.rounds else []:
        ratio = medians[engines[0]] / medians[engine]
        print(f"{engines[0]} and {engine}: ratio of the medians {ratio:.2f}")


if __name__ == "__main__":
    main()
