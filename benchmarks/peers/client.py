"""HTTP client that sends a workload to an OpenAI-compatible server and times the streams.

It runs in a separate process, the same for every server: `python -m peers.client JOB`, with a JSON
file of `url`, `model`, `body`, `case`, `iterations`, `reader` and `out`. Lines are stamped as they
arrive and parsed at the end. It also reports its own share of a core (`client_cpu`) and the delay
of its requests (`lag_ms_p99`): a client that is busy or late would measure itself.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from peers.base import Answer, Bandwidth, Case, Row, metrics, rows_of, warm_up_rows


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` percent of the values are, interpolated linearly.

    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    at = share / 100 * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


class Stream:
    """Request with its answer."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.sent = 0.0
        self.lag = 0.0
        self.lines: list[tuple[float, bytes]] = []

    def parse(self) -> tuple[Answer, list[float]]:
        """Return the first and last time, the number of tokens, and the times of the pieces.

        Raises:
            ValueError: the server did not send a stream of completions.
        """
        times: list[float] = []
        usage = None
        for now, line in self.lines:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                continue
            chunk = json.loads(data)
            if not isinstance(chunk, dict) or "error" in chunk:
                raise ValueError(f"the server streamed {data[:300]!r}")
            usage = chunk.get("usage") or usage
            choices = chunk.get("choices")
            # The last piece may only contain the finish reason.
            if choices and (choices[0].get("text") or choices[0].get("finish_reason") is None):
                times.append(now)
        if not times or usage is None:
            raise ValueError("the server's stream has no text or no usage")
        return Answer(times[0], times[-1], int(usage["completion_tokens"])), times


async def send(client: httpx.AsyncClient, stream: Stream, body: dict[str, Any], due: float) -> None:
    """Send a request when it is due and collect its stream.

    Raises:
        ValueError: the server's status is not 200.
    """
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    stream.sent = time.perf_counter()
    stream.lag = stream.sent - due
    request = {
        **body,
        "prompt": stream.row.prompt_token_ids,
        "max_tokens": stream.row.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with client.stream("POST", "/v1/completions", json=request) as response:
        if response.status_code != 200:
            text = (await response.aread())[:500]
            raise ValueError(f"the server answered {response.status_code}: {text!r}")
        rest = b""
        async for piece in response.aiter_raw():
            now = time.perf_counter()
            *lines, rest = (rest + piece).split(b"\n")
            stream.lines.extend((now, line) for line in lines if line)


async def replay(
    client: httpx.AsyncClient, body: dict[str, Any], rows: Sequence[Row], rate: float | None
) -> tuple[list[Stream], float, float]:
    """Send all rows, at their times for a rate or at once; return streams, begin and end."""
    streams = [Stream(row) for row in rows]
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            due = begin + (stream.row.arrival_unit / rate if rate else 0.0)
            group.create_task(send(client, stream, body, due))
    end = time.perf_counter()
    return streams, begin, end


def serving_metrics(streams: Sequence[Stream], begin: float, end: float) -> dict[str, float]:
    """Return TTFT, TPOT and ITL of a replay in ms, and its output tokens/s.

    Raises:
        ValueError: a stream is invalid.
    """
    tokens = 0
    ttft: list[float] = []
    tpot: list[float] = []
    itl: list[float] = []
    for stream in streams:
        answer, times = stream.parse()
        tokens += answer.num_tokens
        ttft.append(1e3 * (answer.first - stream.sent))
        if answer.num_tokens > 1:
            tpot.append(1e3 * (answer.last - answer.first) / (answer.num_tokens - 1))
        itl.extend(1e3 * (b - a) for a, b in itertools.pairwise(times))
    found = {"out_tok_s": tokens / (end - begin)}
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl)):
        for share in (50, 99):
            found[f"{name}_ms_p{share}"] = percentile(values or [0.0], share)
    found["lag_ms_p99"] = percentile([1e3 * stream.lag for stream in streams], 99)
    return found


async def measure(job: dict[str, Any], case: Case) -> None:
    """Warm up and measure a case, one JSON line for each iteration."""
    # A connection for each request: llama-server closes idle ones, which no request must use.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=job["url"], timeout=900.0, limits=limits) as client:
        body = {"model": job["model"], **job["body"]}
        await replay(client, body, warm_up_rows(case), None)
        for iteration in job["iterations"]:
            before, rows = rows_of(case, iteration)
            if before:
                await replay(client, body, before, None)
            bandwidth = Bandwidth(job["reader"], case)
            cpu = time.process_time()
            streams, begin, end = await replay(client, body, rows, case.rate)
            cpu = time.process_time() - cpu
            answers = [stream.parse()[0] for stream in streams]
            found = metrics(case, rows, answers, begin, end)
            if case.kind in ("serve", "search"):
                found |= serving_metrics(streams, begin, end)
            if case.rate is not None:
                found["rate"] = case.rate
            found["client_cpu"] = cpu / (end - begin)
            found |= bandwidth.metrics()
            with Path(job["out"]).open("a") as out:
                line = {"case": case.name, "iteration": iteration, "metrics": found}
                out.write(json.dumps(line) + "\n")


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    plain = job["case"]
    case = Case(**{**plain, "rows": tuple(Row(**row) for row in plain["rows"])})
    try:
        asyncio.run(measure(job, case))
    except* (ValueError, httpx.HTTPError) as group:
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        sys.exit(f"the server failed: {first or type(first).__name__}")


if __name__ == "__main__":
    main()
