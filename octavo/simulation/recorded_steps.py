"""Step times from a recording of an engine, for `octavo simulate --step-times FILE`."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from octavo.errors import BenchError
from octavo.observability.recording import (
    Arrival,
    Head,
    Lost,
    Outputs,
    Record,
    Step,
    read_records,
    recording_files,
)
from octavo.simulation.step_times import BatchReader, MeasuredStep, StepBatch, StepTimes

_LONGEST = 3600.0


def read_step_times(path: Path) -> StepTimes:
    """Fit the times of the steps in a recording (`octavo serve --record`).

    Steps with drafts are omitted, as are those of requests that arrived before the recording, and
    the first step of each engine, which takes longer than any other.

    Raises:
        BenchError: the recording has too few steps, or does not contain the KV cache's size.
        OctavoError: the recording cannot be read, or has another format.
    """
    head, files = recording_files(path)
    front = _FrontEnd(_records(files))
    if front.num_blocks is None or front.max_model_len is None:
        raise BenchError(
            f"{path} ends before the model was loaded, so there are no steps in it; record for "
            "longer."
        )
    model, cpu = head.config.get("model"), head.build.get("processor", "unknown")
    name = model.get("model") if isinstance(model, dict) else None
    return StepTimes.of_steps(
        _measured_steps(files, front),
        model=str(name),
        cpu=cpu,
        num_blocks=front.num_blocks,
        max_model_len=front.max_model_len,
    )


def _records(files: Sequence[Path]) -> Iterator[Record | None]:
    for file in files:
        yield from read_records(file)


class _FrontEnd:
    """The front end's records: the plan, and each request's number of tokens over time."""

    def __init__(self, records: Iterator[Record | None]) -> None:
        self.num_blocks: int | None = None
        self.max_model_len: int | None = None
        self._prompts: dict[str, int] = {}
        self._times: defaultdict[str, list[float]] = defaultdict(list)
        """Times of the output tokens, in order."""
        for record in records:
            if isinstance(record, Head) and record.num_blocks is not None:
                self.num_blocks, self.max_model_len = record.num_blocks, record.max_model_len
            elif isinstance(record, Arrival):
                request = record.request
                size = record.num_prompt_tokens or len(request.prompt_token_ids)
                if request.n == record.params.n:
                    self._prompts |= dict.fromkeys(request.child_ids, size)
            elif isinstance(record, Outputs):
                for output in record.outputs:
                    times = [record.time] * len(output.new_token_ids)
                    self._times[output.request_id] += times

    def num_tokens(self, request_id: str, time: float) -> int | None:
        """Return the request's tokens, prompt and output; None if its arrival was not recorded."""
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return None
        return prompt + bisect.bisect_right(self._times.get(request_id, ()), time)


def _measured_steps(files: Sequence[Path], front: _FrontEnd) -> list[MeasuredStep]:
    """Return the steps with known times and batches."""
    reader, pending = BatchReader(), dict[int, MeasuredStep]()
    found: list[MeasuredStep] = []
    for record in _records(files):
        if record is None or isinstance(record, Lost):
            reader, pending = BatchReader(), {}
        if not isinstance(record, Step):
            continue
        if record.number == 1:  # another engine
            reader, pending = BatchReader(), {}
        for ended in record.ended:
            step = pending.pop(ended.number, None)
            # A longer time means damage, not a measurement.
            if step is not None and all(
                0 <= s < _LONGEST for s in (ended.seconds, ended.host_seconds or 0.0)
            ):
                step.seconds, step.host_seconds = ended.seconds, ended.host_seconds
                found.append(step)
        batch = _read_batch(record, reader, front)
        if batch is not None and record.number > 1:
            pending[record.number] = MeasuredStep(batch, len(record.requests), 0.0, None)
    return found


def _read_batch(step: Step, reader: BatchReader, front: _FrontEnd) -> StepBatch | None:
    """Return the batch of a step; None if any of its requests is unknown."""
    batch, known = StepBatch(), True
    reader.forget(step.freed)
    for request in step.requests:
        if request.num_computed_tokens is not None:
            size = front.num_tokens(request.req_id, step.time)
            if size is not None:
                reader.start(request.req_id, request.num_computed_tokens, size)
        known = known and not request.num_drafts and request.req_id in reader
        if request.req_id in reader:  # maybe none of its drafts was right
            reader.add(batch, request.req_id, request.num_tokens - request.num_drafts)
    return batch if known else None
