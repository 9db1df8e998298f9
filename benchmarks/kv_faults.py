"""Breaks what KV connectors keep and send, under load, and looks whether any answer shows it.

    python benchmarks/kv_faults.py [--faults 200] [--streams 16] [--seed 0]

One engine computes prompts and hands them over (`P2PConnector`), over TCP as to another machine,
one goes on with them, and has a file of its own and a KV cache too small for all prompts. Meanwhile
bits change in memory and in the file; the file is cut short, made read-only, deleted, or may not
grow; the first engine dies (SIGKILL) or stands still (SIGSTOP) for longer than blocks are waited
for; prompts are computed that nobody fetches; kv_transfer_params are forged or not signed; somebody
without the key sends rubbish; requests are given up while their blocks are loaded; caches are
reset. All tokens and logprobs are held against those of an engine without a connector. Exit status
1: an answer was lost or changed, or blocks, memory or descriptors were left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import resource
import signal
import socket
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import zmq

from octavo import AsyncLLM, SamplingParams
from octavo.config import EngineConfig
from octavo.engine_args import engine_settings
from octavo.errors import RequestError
from octavo.kv_connector.p2p import P2PConnector
from octavo.outputs import RequestOutput

Answer = tuple[tuple[int, ...], tuple[tuple[tuple[int, float], ...], ...]]
"""Tokens, and the logprobs at each of them."""

LOAD_SECONDS, RELEASE_SECONDS = 1.0, 2.0
_SILENT_SECONDS = 120.0
# Prompts beside those of the streams: together more than the KV cache holds.
_PROMPTS, _BLOCKS = 40, 140
_MAX_LEN = 256
_MEMORY_NBYTES, _FILE_NBYTES = 2**24, 2**25
# How much more memory is no leak: allocators keep some.
_MORE_NBYTES = 48 * 2**20
_MORE_DESCRIPTORS = 8
TEXT = "Once upon a time there was a little dog who found a big red ball in the park"


class FarConnector(P2PConnector):
    """As if it were on another machine: others fetch over TCP."""

    def get_handshake_metadata(self) -> Any:
        """See `KVConnectorBase`."""
        found = super().get_handshake_metadata()
        return {**found, "machine": "another"}


def prompts() -> list[str]:
    """Different ones from the beginning, some of them twice as long."""
    rng = random.Random(0)
    words = TEXT.split()
    return [" ".join(rng.choices(words, k=rng.randint(50, 100))) for _ in range(_PROMPTS)]


def params(number: int, transfer: dict[str, Any] | None = None) -> SamplingParams:
    """Of a prompt: greedy or sampled."""
    extra = None if transfer is None else {"kv_transfer_params": transfer}
    return SamplingParams(
        max_tokens=16,
        temperature=0.8 * (number % 2),
        seed=number,
        ignore_eos=True,
        logprobs=2,
        extra_args=extra,
    )


async def start(**settings: Any) -> AsyncLLM:
    """An engine that is ready."""
    settings = {"max_model_len": _MAX_LEN, **settings}
    config = EngineConfig.from_kwargs(**engine_settings(settings))
    engine = await AsyncLLM.start(config, max_engine_restarts=1_000_000, log_level="error")
    await engine.wait_ready()
    return engine


class Pair:
    """Two engines, the first of which hands prompts to the second.

    Args:
        folder: for the file.
        seed: of the random numbers.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._folder, self._rng, self._number = folder, random.Random(seed), 0
        self.prompts = prompts()
        self.wanted: list[Answer] = []
        self.wrong: list[str] = []
        self.answers = self.fetched = 0
        self.done: Counter[str] = Counter()

    async def __aenter__(self) -> Pair:
        plain = await start()
        try:
            asked = (self._ask(plain, i, params(i)) for i in range(len(self.prompts)))
            self.wanted = [answer_of(output) for output in await asyncio.gather(*asked)]
        finally:
            plain.shutdown()
        extra = {"cpu_bytes_to_use": _MEMORY_NBYTES, "load_timeout": LOAD_SECONDS}
        extra |= {"release_timeout": RELEASE_SECONDS}
        file = {"file_path": str(self._folder), "file_bytes_to_use": _FILE_NBYTES}
        far = {"kv_connector": "FarConnector", "kv_connector_module_path": "kv_faults"}
        self.first = await start(kv_transfer_config={**far, "kv_connector_extra_config": extra})
        try:
            self.second = await start(
                num_gpu_blocks_override=_BLOCKS,
                kv_transfer_config={**far, "kv_connector_extra_config": extra | file},
            )
        except BaseException:
            self.first.shutdown()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        self.first.shutdown()
        self.second.shutdown()

    async def _ask(self, engine: AsyncLLM, number: int, how: SamplingParams) -> RequestOutput:
        """The whole answer to a prompt."""
        self._number += 1
        found = None
        async for output in engine.generate(self.prompts[number], how, f"r{self._number}"):
            found = output
        assert found is not None
        return found

    async def prefill(self, number: int) -> dict[str, Any]:
        """Has a prompt computed; what it is handed over with."""
        how = msgspec.structs.replace(params(number, {"do_remote_decode": True}), max_tokens=1)
        found = (await self._ask(self.first, number, how)).kv_transfer_params
        assert found is not None, "nothing was handed over"
        return found

    async def stream(self, going: asyncio.Event) -> None:
        """Asks, until there is an end of it; some prompts are handed over, others known."""
        while not going.is_set():
            number = self._rng.randrange(len(self.prompts))
            handed = await self.prefill(number) if self._rng.random() < 0.5 else None
            output = await self._ask(self.second, number, params(number, handed))
            self.answers += 1
            self.fetched += handed is not None
            if (found := answer_of(output)) != self.wanted[number]:
                self.wrong.append(f"{number}: {found}\n  was {self.wanted[number]}")

    def core_of(self, *, file: bool) -> psutil.Process | None:
        """The process of the second engine, which has a file, or the first one; None: none now."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error, OSError):
                names = [os.readlink(path) for path in _descriptors(process.pid)]
                if any("memfd:octavo-kv" in name for name in names) and file == any(
                    ".kv" in name for name in names
                ):
                    return process
        return None

    def _file(self) -> Path | None:
        return next(iter(self._folder.glob("*.kv")), None)

    async def strike(self, fault: str) -> None:
        """Does one thing, and undoes what would last."""
        await getattr(self, "_" + fault)()
        self.done[fault] += 1

    async def _memory_bits(self) -> None:
        """In a place of either engine's memory."""
        process = self.core_of(file=self._rng.random() < 0.5)
        for path in _descriptors(process.pid) if process is not None else ():
            with contextlib.suppress(OSError):
                if "memfd:octavo-kv" in os.readlink(path):
                    _flip(path, self._rng, 4096, 200)

    async def _file_bits(self) -> None:
        if (file := self._file()) is not None:
            _flip(str(file), self._rng, 0, 200)

    async def _file_cut(self) -> None:
        if (file := self._file()) is not None:
            os.truncate(file, self._rng.randrange(file.stat().st_size + 1))

    async def _file_read_only(self) -> None:
        if (file := self._file()) is not None:
            file.chmod(stat.S_IRUSR)

    async def _file_deleted(self) -> None:
        if (file := self._file()) is not None:
            file.unlink()
            # It is there for who has it open; another one is made by the next engine.
            if (process := self.core_of(file=True)) is not None:
                process.kill()
                await self._until_there(file=True)

    async def _file_full(self) -> None:
        process = self.core_of(file=True)
        if process is None:
            return
        old = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (8192, old[1]))
        await asyncio.sleep(0.3)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, old)

    async def _producer_killed(self) -> None:
        process = self.core_of(file=False)
        if process is not None:
            process.send_signal(signal.SIGKILL)
            await self._until_there(file=False)

    async def _producer_stopped(self) -> None:
        process = self.core_of(file=False)
        if process is None:
            return
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(LOAD_SECONDS + 0.5)
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)

    async def _until_there(self, *, file: bool) -> None:
        end = time.monotonic() + _SILENT_SECONDS
        while self.core_of(file=file) is None:
            if time.monotonic() > end:
                raise RuntimeError("an engine that died does not come again")
            await asyncio.sleep(0.05)

    async def _nobody_comes(self) -> None:
        await self.prefill(self._rng.randrange(len(self.prompts)))

    async def _forged(self) -> None:
        number = self._rng.randrange(len(self.prompts))
        handed = await self.prefill(number)
        changes = {"signature": "", "remote_port": 1, "remote_request_id": "x", "remote_peers": []}
        name = self._rng.choice(list(changes))
        await self._refused(number, {**handed, name: changes[name]})

    async def _not_signed(self) -> None:
        number = self._rng.randrange(len(self.prompts))
        handed = await self.prefill(number)
        del handed["signature"]
        await self._refused(number, handed)

    async def _refused(self, number: int, handed: dict[str, Any]) -> None:
        try:
            await self._ask(self.second, number, params(number, handed))
        except RequestError:
            return
        self.wrong.append("forged kv_transfer_params were taken")

    async def _stranger(self) -> None:
        """Somebody without the key, at both engines' ports."""
        peer = (await self.prefill(0))["remote_peers"][0]
        address = peer["host"], peer["port"]
        with contextlib.suppress(OSError), socket.create_connection(address, 1) as plain:
            plain.sendall(self._rng.randbytes(self._rng.randrange(1, 5000)))
        context: zmq.Context[Any] = zmq.Context()
        with context.socket(zmq.DEALER) as bare:
            bare.setsockopt(zmq.LINGER, 100)
            bare.connect(f"tcp://{address[0]}:{address[1]}")
            bare.send_multipart([b"h", b"r1"])
            await asyncio.sleep(0.05)
        context.destroy(linger=0)

    async def _aborted(self) -> None:
        number = self._rng.randrange(len(self.prompts))
        handed = await self.prefill(number)
        task = asyncio.ensure_future(self._ask(self.second, number, params(number, handed)))
        await asyncio.sleep(self._rng.uniform(0, 0.03))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    async def _cache_reset(self) -> None:
        engine = self.first if self._rng.random() < 0.5 else self.second
        await engine.reset_prefix_cache()

    async def metric(self, engine: AsyncLLM, name: str) -> float:
        """The value of a metric."""
        text = (await engine.render_metrics()).decode()
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.startswith((f"octavo:{name}{{", f"octavo:{name}_total{{"))
        )

    def sizes(self) -> tuple[int, int]:
        """Bytes and descriptors of this process, with both front ends, and of the engines."""
        there = [psutil.Process(), self.core_of(file=False), self.core_of(file=True)]
        processes = [process for process in there if process is not None]
        nbytes = sum(process.memory_info().rss for process in processes)
        return nbytes, sum(process.num_fds() for process in processes)

    async def rest(self) -> None:
        """Waits until no engine has blocks in use.

        Raises:
            RuntimeError: one has them still.
        """
        end = time.monotonic() + 10
        for engine in (self.first, self.second):
            while await self.metric(engine, "kv_cache_usage_perc"):
                if time.monotonic() > end:
                    raise RuntimeError("blocks are in use though nothing runs")
                await asyncio.sleep(0.1)


FAULTS = sorted(
    name[1:]
    for name in (
        *("_memory_bits", "_file_bits", "_file_cut", "_file_read_only", "_file_deleted"),
        *("_file_full", "_producer_killed", "_producer_stopped", "_nobody_comes", "_forged"),
        *("_not_signed", "_stranger", "_aborted", "_cache_reset"),
    )
)


def answer_of(output: RequestOutput) -> Answer:
    """What must not change."""
    (answer,) = output.outputs
    rows = tuple(
        tuple((i, p.logprob) for i, p in sorted(row.items())) for row in answer.logprobs or ()
    )
    return tuple(answer.token_ids), rows


def _descriptors(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    return (f"{folder}/{name}" for name in os.listdir(folder))


def _flip(path: str, rng: random.Random, begin: int, count: int) -> None:
    """Changes bits of a file, or of memory that has no name."""
    fd = os.open(path, os.O_RDWR)
    try:
        size = os.fstat(fd).st_size
        for _ in range(count if size > begin else 0):
            at = rng.randrange(begin, size)
            byte = os.pread(fd, 1, at)
            if byte:
                os.pwrite(fd, bytes([byte[0] ^ (1 << rng.randrange(8))]), at)
    finally:
        os.close(fd)


async def storm(args: argparse.Namespace, folder: Path) -> Pair:
    """Asks while things break; returns what came of it."""
    rng = random.Random(args.seed)
    async with Pair(folder, args.seed) as pair:
        going = asyncio.Event()
        streams = [asyncio.create_task(pair.stream(going)) for _ in range(args.streams)]
        before = None
        kinds = [args.kinds[i % len(args.kinds)] for i in range(args.faults)]
        rng.shuffle(kinds)
        for i, fault in enumerate(kinds):
            if any(task.done() for task in streams):
                break
            try:
                await asyncio.wait_for(pair.strike(fault), _SILENT_SECONDS)
            except Exception as error:
                pair.wrong.append(f"{fault}: {error!r}")
                break
            if i == len(kinds) // 3:
                before = pair.sizes()
            await asyncio.sleep(rng.uniform(0, args.pause))
        going.set()
        _, hanging = await asyncio.wait(streams, timeout=_SILENT_SECONDS)
        pair.wrong += [f"{len(hanging)} streams hang"] * bool(hanging)
        for task in streams:
            if task in hanging:
                task.cancel()
            elif (error := task.exception()) is not None:
                pair.wrong.append(f"a stream ended: {error!r}")
        try:
            await pair.rest()
        except RuntimeError as error:
            pair.wrong.append(str(error))
        after = pair.sizes()
        if before is not None:
            limits = before[0] + _MORE_NBYTES, before[1] + _MORE_DESCRIPTORS
            if after[0] > limits[0] or after[1] > limits[1]:
                pair.wrong.append(f"{before} bytes and descriptors became {after}")
        for name in ("kv_failed_loads", "external_prefix_cache_hits", "kv_expired_reqs"):
            values = [int(await pair.metric(it, name)) for it in (pair.first, pair.second)]
            print(f"{name}: {values[0]} (computes prompts), {values[1]} (goes on)")
    return pair


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--pause", type=float, default=0.3, help="seconds between, at most")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Runs the storm, and prints what came of it; returns the exit status."""
    args = parse(argv)
    # Engines are processes, and find the connector of this module there.
    here = str(Path(__file__).resolve().parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    sys.path.insert(0, here)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="kv-faults-") as folder:
        os.environ["XDG_CACHE_HOME"] = str(Path(folder) / "cache")
        pair = asyncio.run(storm(args, Path(folder) / "kv"))
    for line in pair.wrong[:5]:
        print(line)
    seconds = time.monotonic() - started
    print(
        f"{pair.done.total()} faults in {seconds:.0f} s, {pair.answers} answers, {pair.fetched} of "
        f"them handed over, {len(pair.wrong)} lost, changed or left"
    )
    print("| fault | times |\n| --- | --- |")
    for fault, count in sorted(pair.done.items()):
        print(f"| {fault.replace('_', ' ')} | {count} |")
    return 0 if not pair.wrong and pair.done.total() == args.faults else 1


if __name__ == "__main__":
    sys.exit(main())
