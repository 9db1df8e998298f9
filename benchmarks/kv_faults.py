"""Damage stored or transferred keys and values, and check that no stream is affected.

    python benchmarks/kv_faults.py --faults 200 [--streams 16] [--model FOLDER] [--seed 0]

One of two servers computes prompts for the other (P2PConnector), and both store blocks in a folder
that they share; the other one also stores them in memory and in a file. Its KV cache is small, so
that blocks are loaded from all of these continually. Streams are requested repeatedly, with or
without the first server. Meanwhile, at random times, bits flip in files and in transferred memory;
files are truncated, removed or replaced; the disk is full; a server's engine is killed or stopped;
computed prompts are never fetched; descriptions of blocks are forged or late; strangers connect to
the port of the peers; clients disconnect; and caches are reset. Every answer is compared with that
of a server that stores nothing. At the end no block may be held, and no descriptor, process or file
may be left. Exit status 1: something was lost, changed or left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
from chaos import COMPLETIONS, Answer, Load, Site, requests

# Limits of loads; a server that is stopped for longer has lost its engine.
LOAD_TIMEOUT, RELEASE_TIMEOUT = 0.5, 1.0
_MEMORY = 2**24
# Blocks of the second server's KV cache: slightly more than its streams hold.
_NUM_BLOCKS = 300
_NUM_PROMPTS = 3
"""Number of prompts of each stream."""
_SILENT_SECONDS = 120.0
# Increase of memory at the end that counts as growth.
_GROWTH = 2**28


def _config(*connectors: dict[str, Any]) -> list[str]:
    extra = {"connectors": list(connectors)}
    config = {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}
    return ["--kv-transfer-config", json.dumps(config)]


def _flags(folder: Path) -> tuple[list[str], list[str]]:
    """Return the flags of the first and of the second server."""
    shared = {
        "kv_connector": "SharedStorageConnector",
        "kv_connector_extra_config": {
            "shared_storage_path": str(folder / "shared"),
            "write_buffer_bytes": _MEMORY,
            "max_bytes": 2 * _MEMORY,
        },
    }
    peers = {"load_timeout": LOAD_TIMEOUT, "release_timeout": RELEASE_TIMEOUT}
    p2p = {
        "kv_connector": "P2PConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": _MEMORY, **peers},
    }
    offloading = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "cpu_bytes_to_use": _MEMORY // 8,
            "file_path": str(folder / "file"),
            "file_bytes_to_use": _MEMORY,
        },
    }
    small = ["--num-gpu-blocks-override", str(_NUM_BLOCKS)]
    return _config(p2p, shared), [*_config(p2p, offloading, shared), *small]


class Faults(threading.Thread):
    """Thread that causes harmless faults one after another.

    Args:
        sites: the first and the second server.
        folder: folder with their files.
        count: number of faults.
        seed: seed of the random numbers.
    """

    def __init__(self, sites: tuple[Site, Site], folder: Path, count: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.done: Counter[str] = Counter()
        self.failure: str | None = None
        self._sites, self._folder, self._count = sites, folder, count
        self._rng = random.Random(seed)
        self._kinds: dict[str, Callable[[], bool]] = {
            "bits flipped in a file": lambda: self._damage(_flip),
            "file cut short": lambda: self._damage(_cut),
            "file removed": lambda: self._damage(lambda path, _: path.unlink()),
            "file replaced by another": self._replace,
            "folder gone": self._lose_folder,
            "disk full": self._fill_disk,
            "bits flipped in memory that is handed over": self._flip_memory,
            "engine killed": lambda: self._signal(signal.SIGKILL, 0.0),
            "engine stopped": lambda: self._signal(signal.SIGSTOP, 2 * LOAD_TIMEOUT),
            "prompt that is never fetched": self._leave,
            "forged description": self._forge,
            "description that comes late": self._come_late,
            "stranger at the peers' port": self._intrude,
            "client that goes away": self._go_away,
            "caches reset": self._reset,
        }

    def run(self) -> None:
        """Cause faults until their number is reached."""
        try:
            kinds = list(self._kinds)
            while self.done.total() < self._count:
                if not kinds:
                    kinds = list(self._kinds)
                kind = kinds.pop(self._rng.randrange(len(kinds)))
                # Engines restart for as long as half of a short run; one death is enough for it.
                if self._kinds[kind]():
                    self.done[kind] += 1
                time.sleep(self._rng.uniform(0.0, 0.2))
        except Exception as error:
            self.failure = repr(error)

    def _files(self) -> list[Path]:
        with contextlib.suppress(OSError):
            return sorted(path for path in self._folder.rglob("*") if path.is_file())
        return []

    def _damage(self, change: Callable[[Path, random.Random], object]) -> bool:
        files = self._files()
        for path in self._rng.sample(files, min(len(files), 5)):
            with contextlib.suppress(OSError):  # it may be gone meanwhile
                change(path, self._rng)
        return bool(files)

    def _replace(self) -> bool:
        files = self._files()
        if len(files) > 1:
            with contextlib.suppress(OSError):
                source, target = self._rng.sample(files, 2)
                target.write_bytes(source.read_bytes())
        return len(files) > 1

    def _lose_folder(self) -> bool:
        shared = self._folder / "shared"
        aside = self._folder.parent / "aside"
        with contextlib.suppress(OSError):
            shared.rename(aside)
            shared.write_text("in the way")
            time.sleep(self._rng.uniform(0.0, 0.3))
            shared.unlink()
            if self._rng.random() < 0.5:
                aside.rename(shared)
        shutil.rmtree(aside, ignore_errors=True)
        return True

    def _cores(self, site: Site) -> list[psutil.Process]:
        return [process for role, process in site.processes() if role == "core"]

    def _fill_disk(self) -> bool:
        for process in self._cores(self._rng.choice(self._sites)):
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                before = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, before[1]))
                time.sleep(self._rng.uniform(0.1, 0.4))
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, before)
                return True
        return False

    def _flip_memory(self) -> bool:
        for process in self._cores(self._sites[0]):
            with contextlib.suppress(OSError):
                for link in Path(f"/proc/{process.pid}/fd").iterdir():
                    if "memfd:octavo-kv" in os.readlink(link):
                        with link.open("r+b", buffering=0) as memory:
                            for _ in range(200):
                                at = self._rng.randrange(4096, _MEMORY // 4)
                                byte = os.pread(memory.fileno(), 1, at)
                                os.pwrite(memory.fileno(), bytes([byte[0] ^ 16]), at)
                        return True
        return False

    def _signal(self, number: signal.Signals, seconds: float) -> bool:
        if self._rng.random() < 0.5:  # an engine's restart takes as long as many faults
            return False
        for process in self._cores(self._rng.choice(self._sites)):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                time.sleep(seconds)
                if seconds:
                    process.send_signal(signal.SIGCONT)
                return True
        return False

    def _prefill(self) -> dict[str, Any] | None:
        body = {"prompt": f"Somebody {self._rng.random()} " * 12, "max_tokens": 1}
        body["kv_transfer_params"] = {"do_remote_decode": True}
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.post(self._sites[0].url + COMPLETIONS, json=body, timeout=60)
            if answer.status_code == 200:
                params: dict[str, Any] = answer.json()["kv_transfer_params"]
                return params
        return None

    def _leave(self) -> bool:
        return self._prefill() is not None

    def _decode(self, params: object) -> int:
        body = {"prompt": "x", "max_tokens": 1, "kv_transfer_params": params}
        return httpx.post(self._sites[1].url + COMPLETIONS, json=body, timeout=60).status_code

    def _forge(self) -> bool:
        params = self._prefill()
        if params is None:
            return False
        changes: list[dict[str, Any]] = [
            {"remote_port": 1},
            {"remote_request_id": "x"},
            {"signature": "0" * 64},
            {"remote_peers": []},
            {"remote_block_ids": [[2**40] * 9]},
            {"unknown": 1},
            {"do_remote_prefill": "yes"},
        ]
        status = self._decode(params | self._rng.choice(changes))
        if status != 400:
            raise RuntimeError(f"a forged description was answered with {status}")
        return True

    def _come_late(self) -> bool:
        params = self._prefill()
        time.sleep(RELEASE_TIMEOUT * 1.2)
        return params is not None and self._decode(params) == 200

    def _intrude(self) -> bool:
        params = self._prefill()
        if params is None:
            return False
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", params["remote_port"]), 1.0) as stranger,
        ):
            stranger.sendall(self._rng.randbytes(self._rng.randrange(1, 5000)))
        return True

    def _go_away(self) -> bool:
        body = {"prompt": f"Somebody {self._rng.random()} " * 20, "max_tokens": 200}
        with contextlib.suppress(httpx.HTTPError):
            url = self._sites[1].url + COMPLETIONS
            with httpx.stream("POST", url, json=body | {"stream": True}, timeout=60) as stream:
                next(stream.iter_raw(), None)
        return True

    def _reset(self) -> bool:
        for site in self._sites:
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(site.url + "/reset_prefix_cache", timeout=60)
        return True


def _flip(path: Path, rng: random.Random) -> None:
    with path.open("r+b") as file:
        for _ in range(20):
            at = rng.randrange(max(1, path.stat().st_size))
            file.seek(at)
            byte = file.read(1) or b"\0"
            file.seek(at)
            file.write(bytes([byte[0] ^ (1 << rng.randrange(8))]))


def _cut(path: Path, rng: random.Random) -> None:
    size = path.stat().st_size
    os.truncate(path, rng.randrange(size + 1))
    if path.suffix == ".kv":  # a single engine's file: it would never be repaired
        os.truncate(path, size)


def bodies(streams: int, max_tokens: int) -> list[dict[str, Any]]:
    """Return the requests, the same each time: prompts of many blocks, three of each beginning."""
    made = []
    for number, (path, body) in enumerate(requests(4 * streams * _NUM_PROMPTS, max_tokens)):
        # Only requests with one answer: kv_transfer_params support no others.
        if path == COMPLETIONS and body.get("stream") and body.get("n", 1) == 1:
            begin = f"This is the beginning of story number {number // 3}. " * 8
            made.append(body | {"prompt": begin + body["prompt"]})
    return made[: streams * _NUM_PROMPTS]


async def storm(
    sites: tuple[Site, Site], wanted: list[Answer], args: argparse.Namespace, folder: Path
) -> tuple[list[str], int, Faults]:
    """Send requests during faults; return errors, the number of answers, and the faults."""
    asked = bodies(args.streams, args.max_tokens)
    first, second = Load(sites[0].url), Load(sites[1].url)
    faults = Faults(sites, folder, args.faults, args.seed)
    wrong: list[str] = []
    num_answers = 0

    async def repeat(stream: int) -> None:
        nonlocal num_answers
        rng = random.Random(stream)
        while faults.is_alive():
            number = stream * _NUM_PROMPTS + rng.randrange(_NUM_PROMPTS)
            body = asked[number]
            if rng.random() < 0.6:
                one = body | {"max_tokens": 1, "stream": False, "min_tokens": 0}
                one["kv_transfer_params"] = {"do_remote_decode": True}
                params = (await first.ask(COMPLETIONS, one)).first.get("kv_transfer_params")
                body = body if params is None else body | {"kv_transfer_params": params}
            answer = await second.ask(COMPLETIONS, body)
            num_answers += 1
            if (answer.choices, answer.error) != (wanted[number].choices, None):
                wrong.append(f"{body}\n  is      {answer}\n  was     {wanted[number]}")

    faults.start()
    tasks = [asyncio.create_task(repeat(stream)) for stream in range(args.streams)]
    while faults.is_alive():
        await asyncio.sleep(0.05)
    _, hanging = await asyncio.wait(tasks, timeout=_SILENT_SECONDS)
    for task in hanging:
        task.cancel()
    wrong += [f"not answered in {_SILENT_SECONDS:.0f} s (times: {len(hanging)})"] * bool(hanging)
    for task in set(tasks) - hanging:
        task.result()
    await first.close()
    await second.close()
    if faults.failure is not None:
        wrong.append(f"the faults failed: {faults.failure}")
    return wrong, num_answers, faults


def _undisturbed(args: argparse.Namespace, flags: list[str], folder: Path) -> list[Answer]:
    """Return the answers of a server that stores nothing."""
    folder.mkdir()
    with Site(args.model, "plain", flags, folder) as site:

        async def ask() -> list[Answer]:
            load = Load(site.url)
            try:
                asked = bodies(args.streams, args.max_tokens)
                return [await load.ask(COMPLETIONS, body) for body in asked]
            finally:
                await load.close()

        answers = asyncio.run(ask())
    for answer in answers:
        if answer.error is not None or not answer.choices:
            raise RuntimeError(f"undisturbed, one was not answered: {answer}")
    return answers


def _metric(site: Site, name: str) -> float:
    text = httpx.get(site.url + "/metrics", timeout=60).text
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _use(site: Site) -> tuple[int, int]:
    """Return descriptors and resident bytes of a server's processes, without spares."""
    there = [p for role, p in site.processes() if role != "spare"]
    there.append(psutil.Process(site.server.pid))
    return sum(p.num_fds() for p in there), sum(p.memory_info().rss for p in there)


def _wait_until_idle(site: Site) -> str | None:
    """Wait until nothing is held; after a timeout return a description of the rest."""
    end = time.monotonic() + 20 * RELEASE_TIMEOUT
    while True:
        site.settle()
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        held = {name: _metric(site, f"octavo:{name}") for name in names}
        if not any(held.values()):
            return None
        if time.monotonic() > end:
            return f"still held: {held}"
        time.sleep(0.1)


def run(args: argparse.Namespace, folder: Path) -> bool:
    """Run the storm and print the results; return True if there were no errors."""
    started = time.monotonic()
    (files := folder / "files").mkdir()
    key = folder / "key"
    key.write_text(os.urandom(32).hex())
    key.chmod(0o600)
    flags = [*args.flags, "--enable-admin", "--cluster-key-file", str(key)]
    wanted = _undisturbed(args, flags, folder / "plain")
    for name in ("first", "second"):
        (folder / name).mkdir()
    of_first, of_second = _flags(files)
    with (
        Site(args.model, "plain", [*flags, *of_first], folder / "first") as first,
        Site(args.model, "plain", [*flags, *of_second], folder / "second") as second,
    ):
        sites = first, second
        for site in sites:
            site.at_rest()
        before = [_use(site) for site in sites]
        wrong, num_answers, faults = asyncio.run(storm(sites, wanted, args, files))
        for site in sites:
            held = _wait_until_idle(site)
            wrong += [held] if held is not None else []
            site.at_rest()
        for (fds, resident), site in zip(before, sites, strict=True):
            fds_now, resident_now = _use(site)
            if fds_now > fds + 2 * args.streams:  # connections may stay open for a while
                wrong.append(f"{fds} descriptors are {fds_now}")
            if resident_now > resident + _GROWTH:
                wrong.append(f"{resident:,} resident bytes are {resident_now:,}")
        names = ("external_prefix_cache_hits_total", "kv_failed_loads_total")
        names += ("kv_expired_reqs_total", "engine_restarts_total")
        counts = [{name: _metric(site, f"octavo:{name}") for name in names} for site in sites]
    wrong += [f"left: {what}" for what in first.left]
    wrong += [f"left: {what}" for what in second.left if not what.startswith("/dev/shm")]
    for line in wrong[:5]:
        print(line)
    if wrong:
        for site in sites:
            log = [line for line in site.log.read_text().splitlines() if " POST " not in line]
            print("The end of a server's log:", *log[-60:], sep="\n")
    print(
        f"{faults.done.total()} faults in {time.monotonic() - started:.0f} s under "
        f"{args.streams} streams, {num_answers} answers, {len(wrong)} lost, changed or left"
    )
    print("| fault | times |\n| --- | --- |")
    for kind, count in sorted(faults.done.items()):
        print(f"| {kind} | {count} |")
    for name, found in zip(("prefill", "decode"), counts, strict=True):
        print(f"{name} server, since its engine's last start: {found}")
    return not wrong and faults.done.total() >= args.faults


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model")
    parser.add_argument(
        "--flags", nargs=argparse.REMAINDER, default=[], help="flags of octavo serve"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the storm; return the exit status."""
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="kv-faults-") as folder:
        return 0 if run(args, Path(folder)) else 1


if __name__ == "__main__":
    sys.exit(main())
