"""Load, unload and evict adapters of a server under load; watch its answers and its memory.

    python benchmarks/lora_churn.py --seconds 600 [--clients 6] [--short-log]

The server has room for 4 adapters in memory, 2 at a time, and 12 adapters of the built-in model in
`--lora-root`. Each client has names of its own, which it loads, replaces, asks and unloads at
random; an unloaded name must be unknown. Every greedy answer must be that of its adapter, asked
alone at the beginning. The proportional set sizes of all processes are sampled: the median of the
last quarter of the time may exceed that of the second by `GROWTH` at most: the front end's log of
steps grows to that size, for ten minutes. With --short-log, that log is full at once, and memory
may grow by `LITTLE_GROWTH` at most. Exit status 1: an answer is wrong, memory grows, or something
is left of the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from chaos import Site
from lora_acceptance import WHOLE, write_adapters

GROWTH = 16 * 2**20
"""Bytes by which the memory of a process may grow: `step_log.MAX_BYTES`."""
LITTLE_GROWTH = 2**20
"""The same if the log of steps is short."""
SHORT_LOG = """
from octavo.frontend import step_log
step_log.StepLog.__init__.__defaults__ = (step_log.MAX_SECONDS, 2**16)
"""
"""Module that Python imports at the start of each process."""
NUM_ADAPTERS, NAMES_PER_CLIENT = 12, 3
_SAMPLE_SECONDS = 2.0


class Churn:
    """Clients of a server, and what they find."""

    def __init__(self, site: Site, adapters: list[Path], seconds: float) -> None:
        self._site, self._adapters = site, adapters
        self._end = time.monotonic() + seconds
        self._client = httpx.AsyncClient(base_url=site.url, timeout=300)
        self._wanted: dict[tuple[int, int], str] = {}
        """Answers by adapter and prompt."""
        self.wrong: list[str] = []
        self.counts = dict.fromkeys(("answers", "loads", "replacements", "unloads"), 0)
        self.sizes: dict[str, list[int]] = {}
        """Samples of the memory of each process."""

    async def run(self, num_clients: int) -> None:
        """Ask each adapter alone, then churn until the time is over."""
        for number, path in enumerate(self._adapters):
            await self._post("/v1/load_lora_adapter", "alone", path.name)
            for prompt in range(4):
                answer = await self._ask("alone", prompt)
                self._wanted[number, prompt] = self._text(answer)
            await self._post("/v1/unload_lora_adapter", "alone")
        await asyncio.gather(self._sample(), *map(self._churn, range(num_clients)))
        await self._client.aclose()

    async def _churn(self, client: int) -> None:
        rng = random.Random(client)
        loaded: dict[str, int] = {}
        while time.monotonic() < self._end and not self.wrong:
            name = f"{client}-{rng.randrange(NAMES_PER_CLIENT)}"
            if name not in loaded or rng.random() < 0.2:
                number = rng.randrange(len(self._adapters))
                self.counts["replacements" if name in loaded else "loads"] += 1
                path = self._adapters[number].name
                await self._post("/v1/load_lora_adapter", name, path, name in loaded)
                loaded[name] = number
            elif rng.random() < 0.2:
                del loaded[name]
                self.counts["unloads"] += 1
                await self._post("/v1/unload_lora_adapter", name)
                answer = await self._ask(name, 0)
                if answer.status_code != 404:
                    self.wrong.append(f"{name} is unloaded, and answers {answer.text}")
                continue
            prompt = rng.randrange(4)
            found = self._text(await self._ask(name, prompt))
            self.counts["answers"] += 1
            if found != self._wanted[loaded[name], prompt]:
                self.wrong.append(f"adapter {loaded[name]}, prompt {prompt}: {found}")

    async def _post(self, path: str, name: str, folder: str = "", inplace: bool = False) -> None:
        body: dict[str, Any] = {"lora_name": name}
        if folder:
            body |= {"lora_path": folder, "load_inplace": inplace}
        answer = await self._client.post(path, json=body)
        if answer.status_code != 200:
            self.wrong.append(f"{path} {body}: {answer.text}")

    async def _ask(self, name: str, prompt: int) -> httpx.Response:
        ids = [300 + 40 * prompt + i for i in range(10 + 30 * prompt)]
        body = {"model": name, "prompt": ids, "max_tokens": 16, "temperature": 0, "logprobs": 0}
        body |= {"ignore_eos": True, "return_token_ids": True}
        return await self._client.post("/v1/completions", json=body)

    def _text(self, answer: httpx.Response) -> str:
        """Return tokens and logprobs."""
        if answer.status_code != 200:
            return answer.text
        (choice,) = answer.json()["choices"]
        return json.dumps([choice["token_ids"], choice["logprobs"]["token_logprobs"]])

    async def _sample(self) -> None:
        server = psutil.Process(self._site.server.pid)
        while time.monotonic() < self._end and not self.wrong:
            for process in [server, *(it for _, it in self._site.processes())]:
                words = [word for word in process.cmdline() if "octavo" in word or word == "serve"]
                name = f"{process.pid} {' '.join(words)[-40:]}"
                self.sizes.setdefault(name, []).append(process.memory_full_info().pss)
            await asyncio.sleep(_SAMPLE_SECONDS)


def report(churn: Churn, growth: int) -> bool:
    """Print what was found; return True if memory grows by so many bytes at most."""
    print(", ".join(f"{count} {name}" for name, count in churn.counts.items()))
    print("| process | first | after a quarter | at the end | highest |")
    print("| --- | --- | --- | --- | --- |")
    flat = True
    for name, sizes in churn.sizes.items():
        part = max(len(sizes) // 4, 1)
        early, late = (statistics.median(it) for it in (sizes[part : 2 * part], sizes[-part:]))
        flat &= late <= early + growth
        cells = (f"{size / 2**20:.1f} MiB" for size in (sizes[0], early, late, max(sizes)))
        print(f"| {name} | {' | '.join(cells)} |")
    return flat


def main() -> int:
    """Run the churn; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--short-log", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lc-") as name:
        folder = Path(name)
        root = folder / "adapters"
        root.mkdir()
        adapters = write_adapters(root, NUM_ADAPTERS)
        if args.short_log:
            (folder / "start").mkdir()
            (folder / "start" / "sitecustomize.py").write_text(SHORT_LOG)
            paths = [str(folder / "start"), os.environ.get("PYTHONPATH", "")]
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        flags = ["--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4", "--enable-admin"]
        flags += ["--lora-modules-to-save", *WHOLE]
        flags += ["--lora-root", str(root), "--max-model-len", "512", "--dtype", "float32"]
        with Site(None, "plain", flags, folder) as site:
            site.at_rest()
            churn = Churn(site, adapters, args.seconds)
            asyncio.run(churn.run(args.clients))
        flat = report(churn, LITTLE_GROWTH if args.short_log else GROWTH)
        wrong = [*churn.wrong, *(f"left: {what}" for what in site.left)]
        print(*wrong[:5], sep="\n")
    return 0 if flat and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
