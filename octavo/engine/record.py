"""Recordings of an engine: the first record of one, and the listener that records steps."""

from __future__ import annotations

import hashlib
import platform
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

import octavo
from octavo import _native
from octavo.checkpoints.identity import model_hash
from octavo.config import EngineConfig
from octavo.kv_cache.block_map import INTERVAL, REST, BlockMap
from octavo.messages import EngineCoreOutputs, EngineCoreRequest, SchedulerOutput
from octavo.models.open_model import open_model
from octavo.observability.recording import (
    FORMAT,
    Head,
    Recorder,
    RecordSettings,
    Step,
    StepEnd,
    StepRequest,
)
from octavo.scheduler.listener import StepListener
from octavo.system import clock
from octavo.system.device import cpu_model


def make_recorder(
    settings: RecordSettings, config: EngineConfig, path: Path, tokenizer_path: Path
) -> Recorder:
    """Start a recording.

    Args:
        settings: content and file of the recording.
        config: the engine's settings; they hold no secrets.
        path: folder of the model.
        tokenizer_path: folder of the tokenizer.

    Raises:
        ConfigError: the file cannot be written, or exists and is not a recording.
        ModelError: the model's index of weights is damaged.
    """
    head = Head(
        format=FORMAT,
        id=secrets.token_hex(8),
        created=clock.now(),
        build=describe_build(),
        config=msgspec.to_builtins(config),
        model=model_hash(open_model(config, path), tokenizer_path),
        prompts=settings.prompts,
    )
    return Recorder(Path(settings.path), head, settings.max_bytes)


def describe_build() -> dict[str, str]:
    """Return version, kernels and machine, by name."""
    native = Path(_native.__file__).read_bytes()
    return {
        "octavo": octavo.__version__,
        "kernels": f"{_native.isa()} {hashlib.sha256(native).hexdigest()[:16]}",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": cpu_model(),
    }


@dataclass(slots=True)
class _Times:
    """Times of a step; see `StepEnd`."""

    begun: float
    """Time at which the executor received the step, in seconds of `time.perf_counter`."""
    seconds: float | None = None
    host_seconds: float | None = None
    has_result: bool = False


class StepRecorder(StepListener):
    """Listener that records each step before it is computed, with the times of earlier steps.

    Args:
        put: accepts the records.
    """

    def __init__(self, put: Callable[[Step], object]) -> None:
        self._put = put
        self._added: list[str] = []
        self._aborted: list[str] = []
        self._times: dict[int, _Times] = {}
        """Steps in flight, and steps whose times are not recorded yet."""
        self._last_end = 0.0
        """Time at which the last step ended."""
        self._last_result: float | None = None
        """Time of the last result; None: the engine has been idle since."""
        self.make_map: Callable[[], BlockMap] | None = None
        """Function that returns the map of the KV cache; None: no map is recorded."""
        self._last_map, self._map_rest = 0.0, 0.0
        """Time of the last map, in seconds of `time.monotonic`, and the time to rest after it."""

    def on_add(self, request: EngineCoreRequest) -> None:
        """Keep the id for the next record."""
        self._added.append(request.request_id)

    def on_abort(self, request_ids: Sequence[str]) -> None:
        """Keep the ids for the next record."""
        self._aborted += request_ids

    def on_schedule(self, step: int, work: SchedulerOutput) -> None:
        """Record the step."""
        requests = [
            StepRequest(
                r.req_id,
                r.num_tokens,
                r.num_drafts,
                None if r.new is None else r.new.num_computed_tokens,
            )
            for r in work.scheduled_reqs
        ]
        done = {number: times for number, times in self._times.items() if times.has_result}
        record = Step(
            step,
            clock.now(),
            self._added,
            self._aborted,
            requests,
            work.finished_req_ids,
            work.blocks_to_copy,
            [
                StepEnd(number, times.seconds, times.host_seconds)
                for number, times in done.items()
                if times.seconds is not None
            ],
            self._block_map(bool(requests)),
        )
        self._added, self._aborted = [], []
        for number in done:
            del self._times[number]
        self._put(record)
        if requests:
            self._times[step] = _Times(time.perf_counter())

    def _block_map(self, has_requests: bool) -> bytes:
        """Return the packed map of the KV cache, as often as the engine view shows one.

        Args:
            has_requests: False for a step before the engine becomes idle, whose map remains.
        """
        pause = max(INTERVAL, self._map_rest) if has_requests else self._map_rest
        if self.make_map is None or time.monotonic() < self._last_map + pause:
            return b""
        begin = time.thread_time()
        packed = self.make_map().pack()
        self._last_map, self._map_rest = time.monotonic(), REST * (time.thread_time() - begin)
        return packed

    def on_computed(self, step: int) -> None:
        """Keep how long the step took; it began after the end of the step before it."""
        end = time.perf_counter()
        if (times := self._times.get(step)) is not None:
            times.seconds = end - max(times.begun, self._last_end)
        self._last_end = end

    def on_result(self, step: int, waited: float, failed: bool, sample_seconds: float) -> None:
        """Keep how long the engine's thread worked since the last result."""
        if failed:
            self._times.pop(step, None)
            return
        now = time.perf_counter()
        if (times := self._times.get(step)) is not None:
            times.has_result = True
            if self._last_result is not None:
                times.host_seconds = now - waited - self._last_result
        self._last_result = now

    def on_outputs(self, outputs: EngineCoreOutputs, is_idle: bool) -> None:
        """Forget the time of the last result when the engine becomes idle."""
        if is_idle:
            self._last_result = None
