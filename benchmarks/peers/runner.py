"""Execution of the turns: engine after engine, each in a fresh process, repeatedly."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from peers import machine
from peers.base import Case, Job, Peer, Setup, tree_peak_mib
from peers.cases import LADDER, TPOT_LIMIT_MS, TTFT_LIMIT_MS, Group
from peers.installing import CompareError
from peers.results import Results

QUICK_LADDER = (1.0, 4.0, 16.0)


@dataclass(frozen=True)
class Turn:
    """Turn of an engine at a group; engine None: the machine itself is measured."""

    number: int
    group: Group
    engine: str | None


def interleaved(groups: Sequence[Group], engines: Sequence[str], repeats: int) -> Iterator[Turn]:
    """Yield all turns: machine, A, B, C, D at each group in order, and all repeated."""
    for number in range(repeats):
        for group in groups:
            for engine in (None, *engines):
                yield Turn(number, group, engine)


def search_highest(ladder: Sequence[float], passes: Callable[[int], bool]) -> int | None:
    """Return the index of the highest passing rate, by bisection; None if even the lowest fails."""
    low, high = -1, len(ladder)
    while high - low > 1:
        middle = (low + high) // 2
        if passes(middle):
            low = middle
        else:
            high = middle
    return low if low >= 0 else None


def within_limits(metrics: Mapping[str, float]) -> bool:
    """Return True if a replay kept the limits of the search for the highest rate."""
    return (
        metrics["ttft_ms_p99"] < TTFT_LIMIT_MS
        and metrics["tpot_ms_p99"] < TPOT_LIMIT_MS
        and not metrics["wrong_tokens"]
    )


class Runner:
    """Runner of turns that records their measurements.

    Args:
        peers: the engines by name.
        root: folder of the installed peers.
        models: folder of the checkpoints.
        results: destination of the measurements.
        logs: folder for job files and the engines' output.
        quick: search the highest rate among three.
        silence: seconds without a new measurement after which a process is ended.
        measure_machine: measures the machine's limits.
    """

    def __init__(
        self,
        peers: Mapping[str, Peer],
        root: Path,
        models: Path,
        results: Results,
        logs: Path,
        *,
        quick: bool,
        silence: float,
        measure_machine: Callable[[int, Path], dict[str, Any]] = machine.measure,
    ) -> None:
        self.peers = peers
        self.root = root
        self.models = models
        self.results = results
        self.logs = logs
        self.ladder = QUICK_LADDER if quick else LADDER
        self.silence = silence
        self.measure_machine = measure_machine
        self.cores = sorted(os.sched_getaffinity(0))

    def run(self, groups: Sequence[Group], repeats: int) -> None:
        """Run all remaining turns. A failure is recorded, and the others continue."""
        turns = list(interleaved(groups, list(self.peers), repeats))
        with tqdm(turns, unit="turn", dynamic_ncols=True, disable=None) as bar:
            for turn in bar:
                bar.set_description(f"{turn.engine or 'machine'}: {turn.group.name}")
                if turn.engine is None:
                    self._measure_machine(turn)
                else:
                    self._measure_engine(turn, self.peers[turn.engine])

    def reader(self) -> tuple[str, ...]:
        """Return the command that measures the bandwidth around a measurement."""
        return (str(machine.reader(self.logs)), str(len(self.cores)), "2", "5")

    def todo(self, turn: Turn, peer: Peer, setup: Setup) -> list[Case]:
        """Return the cases of a turn with missing measurements."""
        cases = []
        for case in turn.group.cases:
            reason = peer.refusal(setup, case)
            if setup.draft and not peer.drafts:
                reason = "is not measured with drafts"
            if reason is not None:
                self.results.add_absence(peer.name, case.name, reason)
            elif not self._complete(turn, peer.name, case):
                cases.append(case)
        return cases

    def _complete(self, turn: Turn, engine: str, case: Case) -> bool:
        samples = list(self.results.samples(engine, case.name, turn.number))
        if case.kind != "search":
            return len({s["iteration"] for s in samples}) >= case.iterations
        known = {s["iteration"]: within_limits(s["metrics"]) for s in samples}
        try:
            search_highest(self.ladder, known.__getitem__)
        except KeyError:
            return False
        return True

    def _measure_machine(self, turn: Turn) -> None:
        known = {(limit["group"], limit["turn"]) for limit in self.results.data["limits"]}
        if (turn.group.name, turn.number) in known:
            return
        figures = self.measure_machine(len(self.cores), self.logs)
        _say(f"machine: {_shown(figures)}")
        self.results.add_limit(turn.group.name, turn.number, figures)

    def _measure_engine(self, turn: Turn, peer: Peer) -> None:
        setup = turn.group.setup(self.models, self.cores)
        cases = self.todo(turn, peer, setup)
        if not cases:
            return
        loaded = replace(setup, model=peer.model(self.root, setup))
        environment = machine.environment(peer.environment(self.root, loaded))
        name = f"{turn.number}-{turn.group.name.replace(' ', '-')}-{peer.name}"
        log = self.logs / f"{name}.log"
        try:
            if turn.group.server or not peer.offline:
                self._through_server(turn, peer, loaded, cases, environment, log)
            else:
                self._through_python(turn, peer, loaded, cases, environment, log)
        except CompareError as error:
            _say(f"{peer.name}: {turn.group.name} FAILED: {error}")
            for case in self.todo(turn, peer, setup):
                self.results.add_failure(peer.name, case.name, turn.number, str(error))

    def _take(self, turn: Turn, engine: str, lines: Sequence[str]) -> list[dict[str, float]]:
        """Record the measurements that a process has written."""
        taken = []
        for line in lines:
            event = json.loads(line)
            case, metrics = event["case"], event["metrics"]
            self.results.add_sample(engine, case, turn.number, event["iteration"], metrics)
            _say(f"{engine}: {case}: {_shown(metrics)}")
            taken.append(metrics)
        return taken

    def _through_python(
        self,
        turn: Turn,
        peer: Peer,
        setup: Setup,
        cases: Sequence[Case],
        environment: dict[str, str],
        log: Path,
    ) -> None:
        done = tuple(
            (sample["case"], sample["iteration"])
            for case in cases
            for sample in self.results.samples(peer.name, case.name, turn.number)
        )
        job_file, out_file = log.with_suffix(".job.json"), log.with_suffix(".out.jsonl")
        out_file.unlink(missing_ok=True)
        out_file.touch()
        job = Job(setup, tuple(cases), done, reader=self.reader())
        job_file.write_text(job.to_json())
        job_file.write_text(replace(job, spawned=time.perf_counter()).to_json())
        command = [*peer.driver(self.root), str(job_file), str(out_file)]
        self._follow(turn, peer.name, command, environment, log, out_file)

    def _follow(
        self,
        turn: Turn,
        engine: str,
        command: Sequence[str],
        environment: dict[str, str],
        log: Path,
        out_file: Path,
    ) -> list[dict[str, float]]:
        """Run a process and record its measurements as it writes them; return them."""
        taken: list[dict[str, float]] = []
        with _process(command, environment, log) as process, out_file.open() as out:
            heard, rest = time.monotonic(), ""
            while True:
                ended = process.poll() is not None
                *lines, rest = (rest + out.read()).split("\n")
                if lines:
                    heard = time.monotonic()
                    taken += self._take(turn, engine, lines)
                if ended:
                    break
                if time.monotonic() - heard > self.silence:
                    raise CompareError(f"no measurement for {self.silence:.0f} s; see {log}")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
            if process.returncode != 0:
                raise CompareError(_end_of(log, process.returncode))
        return taken

    def _through_server(
        self,
        turn: Turn,
        peer: Peer,
        setup: Setup,
        cases: Sequence[Case],
        environment: dict[str, str],
        log: Path,
    ) -> None:
        port = _free_port()
        url = f"http://127.0.0.1:{port}"
        begin = time.perf_counter()
        with _process(peer.server(self.root, setup, port), environment, log) as process:
            while not _answers(url + peer.ready_path):
                if process.poll() is not None:
                    raise CompareError(_end_of(log, process.returncode))
                if time.perf_counter() - begin > self.silence:
                    raise CompareError(f"not ready after {self.silence:.0f} s; see {log}")
                time.sleep(0.01)
            ready = time.perf_counter() - begin
            model = _model_of(url)
            body = {"model": model, "prompt": [301, 302, 303, 304], "max_tokens": 1}
            _get(url + "/v1/completions", {**body, **peer.body(setup)})
            start = {"ready_s": ready, "first_token_s": time.perf_counter() - begin}

            def replay(case: Case, iterations: Sequence[int]) -> list[dict[str, float]]:
                job_file, out_file = log.with_suffix(".job.json"), log.with_suffix(".out.jsonl")
                out_file.unlink(missing_ok=True)
                out_file.touch()
                job = {
                    "url": url,
                    "model": model,
                    "body": peer.body(setup),
                    "case": asdict(case),
                    "iterations": iterations,
                    "reader": self.reader(),
                    "out": str(out_file),
                }
                job_file.write_text(json.dumps(job))
                command = [sys.executable, "-m", "peers.client", str(job_file)]
                client_log = log.with_suffix(".client.log")
                if case.kind != "start":
                    client = machine.environment({})
                    return self._follow(turn, peer.name, command, client, client_log, out_file)
                with _process(command, machine.environment({}), client_log) as client_process:
                    try:
                        status = client_process.wait(self.silence)
                    except subprocess.TimeoutExpired:
                        raise CompareError(
                            f"no answer for {self.silence:.0f} s; see {log}"
                        ) from None
                    if status != 0:
                        raise CompareError(_end_of(client_log, status))
                return [json.loads(line)["metrics"] for line in out_file.read_text().splitlines()]

            for case in cases:
                known = {
                    sample["iteration"]: sample["metrics"]
                    for sample in self.results.samples(peer.name, case.name, turn.number)
                }
                if case.kind == "search":

                    def passes(index: int, case: Case = case, known: Any = known) -> bool:
                        if index not in known:
                            rate = replace(case, rate=self.ladder[index])
                            (known[index],) = replay(rate, [index])
                        return within_limits(known[index])

                    search_highest(self.ladder, passes)
                elif case.kind == "start":
                    (found,) = replay(case, [0])
                    start["wrong_tokens"] = found["wrong_tokens"]
                    start["peak_mib"] = tree_peak_mib(process.pid)
                    line = {"case": case.name, "iteration": 0, "metrics": start}
                    self._take(turn, peer.name, [json.dumps(line)])
                else:
                    replay(case, [i for i in range(case.iterations) if i not in known])


@contextlib.contextmanager
def _process(
    command: Sequence[str], environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process in a separate group, and end it with all its children."""
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=log.parent,
                start_new_session=True,
            )
        except OSError as error:
            raise CompareError(f"{command[0]} cannot be started: {error}") from None
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                if process.poll() is None:
                    process.terminate()
                    process.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _end_of(log: Path, status: int) -> str:
    tail = log.read_text(errors="replace").strip().splitlines()[-6:]
    return f"ended with status {status}; end of {log}: " + " | ".join(tail)[-1200:]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _get(url: str, body: dict[str, Any] | None = None) -> Any:
    """Request JSON from a server.

    Raises:
        CompareError: the answer is not JSON.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=300) as response:
            return json.load(response)
    except (OSError, ValueError) as error:
        raise CompareError(f"{url} did not answer as it should: {error}") from None


def _model_of(url: str) -> str:
    """Return the model that a server serves.

    Raises:
        CompareError: the answer does not contain a model.
    """
    answer = _get(url + "/v1/models")
    try:
        return str(answer["data"][0]["id"])
    except (KeyError, IndexError, TypeError):
        raise CompareError(f"{url}/v1/models names no model: {str(answer)[:300]}") from None


def _shown(figures: Mapping[str, float | str]) -> str:
    return ", ".join(
        f"{name} {value if isinstance(value, str) else f'{value:.4g}'}"
        for name, value in figures.items()
    )


def _say(text: str) -> None:
    tqdm.write(text, file=sys.stderr)
