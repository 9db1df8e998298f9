"""Recording of many kinds of requests, with a death between, that replays bit for bit."""

import asyncio
import gzip
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import cli
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig
from octavo.errors import RequestError
from octavo.fleet.start import EngineProcesses
from octavo.frontend.async_llm import AsyncLLM
from octavo.messages import RequestOptions
from octavo.models.hub import resolve_folders
from octavo.models.registry import read_spec
from octavo.observability.recording import RecordSettings
from octavo.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from octavo.simulation import view_file
from octavo.simulation.replay import load_recording
from octavo.simulation.step_times import StepBatch, StepTimes

SETTINGS = {
    "max_model_len": 256,
    "kv_cache_memory_bytes": "8M",
    "max_num_seqs": 16,
    "enable_prompt_embeds": True,
}
EMBED_SIZE = read_spec(open_checkpoint(resolve_folders(EngineConfig.from_kwargs())[0])).embed_size
NUM_REQUESTS = 80

KINDS = [
    {"temperature": 0.0},
    {},
    {"seed": 11, "top_p": 0.9, "top_k": 40},
    {"n": 4, "max_tokens": 8},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"frequency_penalty": 0.7, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    {"stop": ["the", " and"], "max_tokens": 60},
    {"temperature": 0.0, "stop": ["."], "include_stop_str_in_output": True, "logprobs": 0},
    {"min_tokens": 5, "bad_words": ["the"], "min_p": 0.05},
    {"structured_outputs": StructuredOutputsParams(regex="[a-z]{3,9} [0-9]{2}")},
    {"structured_outputs": StructuredOutputsParams(choice=["red", "green", "blue"])},
    {"logit_bias": {70: 5.0}, "ignore_eos": True},
]
PROMPTS = [
    "Once upon a time",
    "The little dog saw a big tree and wanted to climb it. " * 6,
    "One day, a girl named Lily found",
    "She",
]


async def ask(engine: AsyncLLM, i: int) -> None:
    prompt = f"{i % 7} {PROMPTS[i % len(PROMPTS)]}"
    if i % 40 == 39:
        params = BeamSearchParams(beam_width=3, max_tokens=6)
        await engine.beam_search(prompt, params, str(i), cache_salt="salt")
        return
    settings = {"max_tokens": 24, **KINDS[i % len(KINDS)]}
    params = SamplingParams(output_kind=RequestOutputKind.DELTA, **settings)
    options: dict[str, Any] = {"tenant": (None, "a secret key", "b")[i % 3]}
    if i % 10 == 7:  # both are in the future; in a replay both would have passed
        options["deadline"] = options["first_token_deadline"] = time.monotonic() + 240
    if i % 20 == 3 and settings.keys().isdisjoint({"prompt_logprobs"}):
        prompt = {"prompt_embeds": np.full((9, EMBED_SIZE), 0.01 * (i - 40), np.float32)}
    if i == 13:  # so long that its deadline passes
        prompt, params = "On", SamplingParams(max_tokens=240, ignore_eos=True)
        options["deadline"] = time.monotonic() + 0.3
    leaves = i % 20 == 9  # the client disconnects in the middle of a long answer
    if leaves:
        params = SamplingParams(max_tokens=240, ignore_eos=True, output_kind=params.output_kind)
    if i == 14:
        params = SamplingParams(structured_outputs=StructuredOutputsParams(grammar="root ::= ("))
    try:
        async for _ in engine.generate(prompt, params, str(i), **options):
            if leaves:
                return
    except RequestError:
        assert i in (13, 14)


async def record(path: Path) -> None:
    """Send all requests, a few at a time, and kill the engine while they are in flight."""
    places, done = asyncio.Semaphore(24), []

    async def take_place(i: int) -> None:
        async with places:
            await ask(engine, i)
            done.append(i)
            if len(done) == NUM_REQUESTS // 4:
                os.kill(engine._client.pid, signal.SIGKILL)

    engine = await AsyncLLM.start(
        EngineConfig.from_kwargs(**SETTINGS),
        EngineProcesses(warm_spare=False, record=RecordSettings(str(path))),
    )
    try:
        await engine.wait_ready()
        tasks = [asyncio.create_task(take_place(i)) for i in range(NUM_REQUESTS)]
        await asyncio.gather(*tasks)
    finally:
        await engine.shutdown()


@pytest.fixture(scope="module")
def recording(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "run.rec"
    asyncio.run(record(path))
    return path


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--max-num-batched-tokens", "64", "--max-num-seqs", "5", "--no-enable-prefix-caching"),
        ("--free", "--num-gpu-blocks-override", "60", "--block-size", "32", "--enforce-eager"),
    ],
)
def test_a_recording_replays_without_a_difference(recording, flags, capsys):
    status = cli.main(["replay", str(recording), *flags])
    said = capsys.readouterr()
    assert status == 0, said
    assert "0 answers differ" in said.out
    assert "the engine died 1 times" in said.out
    assert " 0 differ, a token's own by at most 0\n" in said.out  # logprobs


def test_what_is_in_the_recording(recording):
    log = load_recording(recording)
    assert len(log.arrivals) > NUM_REQUESTS  # beams are separate requests
    assert log.num_steps > 50
    steps = [log.first_step(a) for a in log.arrivals.values()]
    assert steps == sorted(steps)
    assert len(set(steps)) > 10
    cut = [a for a in log.answers.values() if not a.complete]
    assert 1 <= len(cut) <= 20  # those whose clients disconnected, and two that failed
    assert {a.error is None for a in cut} == {True, False}
    requests = [a.request for a in log.arrivals.values()]
    assert len({r.options.tenant for r in requests}) == 3
    assert sum(r.prompt_embeds is not None for r in requests) >= 3
    assert sum(r.options.first_token_deadline is not None for r in requests) >= 5
    assert log.num_lost == 0
    assert oct(recording.stat().st_mode & 0o777) == "0o600"
    assert b"salt" not in recording.read_bytes()
    assert b"secret" not in recording.read_bytes()
    tail = recording.with_name("run.rec.crash-1")
    assert load_recording(tail).num_deaths == 1


def test_a_recording_of_format_1_replays(tmp_path, capsys):
    """The file has seven requests, one of them a beam search, of the built-in model."""
    path = tmp_path / "run.rec"
    path.write_bytes(gzip.decompress(Path(__file__).with_name("format-1.rec.gz").read_bytes()))
    requests = {a.request.request_id: a.request for a in load_recording(path).arrivals.values()}
    plain, two, timed, urgent = (requests[f"r{i}"].options for i in ("0#0", "1#4", "2#7", "3#8"))
    assert plain == RequestOptions(plain.arrival_time)
    assert len(two.cache_salt) == 64  # a hash
    assert (two.turn, requests["r1#4"].n, two.tenant is None) == (3, 2, False)
    assert timed.deadline == timed.first_token_deadline > timed.arrival_time
    assert (urgent.priority, requests["r3#8"].sampling_params.grammar.kind) == (2, "choice")
    assert requests["r4#9"].prompt_embeds.num_tokens == 2
    assert cli.main(["replay", str(path)]) == 0
    assert "0 answers differ" in capsys.readouterr().out


def read_view(path):
    """Return the pairs of name and data of a file with events of the engine view."""
    events = path.read_text().split("\n\n")[:-1]
    lines = [event.split("\n") for event in events]
    return [(n.removeprefix("event: "), json.loads(d.removeprefix("data: "))) for n, d in lines]


def test_the_engine_view_of_a_recording(recording, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(view_file, "INTERVAL", 0.001)  # however fast the machine is
    out = tmp_path / "run.view"
    assert cli.main(["replay", str(recording), "--view", str(out)]) == 0
    events = read_view(out)
    name, hello = events[0]
    assert (name, hello["recording"], hello["max_num_seqs"]) == ("hello", True, 16)
    ticks = [event for name, event in events if name == "tick"]
    steps = [step for tick in ticks for step in tick.get("steps", ())]
    assert f"{len(steps)} steps are in {out}" in capsys.readouterr().out
    assert all("number" in step for step in steps)
    assert len(steps) > 60
    assert sum(step.get("forward", 0) > 0 for step in steps) > 0.8 * len(steps)
    deaths = [death for tick in ticks for death in tick.get("deaths", ())]
    assert len(deaths) == 1
    states = [tick["health"] for tick in ticks if "health" in tick]
    assert [state[:20] for state in states] == ["ok", "the engine has died:", "ok"]
    requests = [event["rows"] for name, event in events if name == "requests"]
    assert len({row[0] for rows in requests for row in rows}) > NUM_REQUESTS // 2
    assert requests[-1] == []
    times = [tick["time"] for tick in ticks]
    assert times == sorted(times)
    maps = [tick["blocks"]["0"] for tick in ticks if "blocks" in tick]
    assert len(maps) > 3
    assert "num_cells" in maps[0]
    assert len({label for found in maps for label in found.get("owners", {}).values()}) > 3
    assert "little dog" not in out.read_text()


def test_a_recording_of_format_1_has_a_view(tmp_path):
    path, out = tmp_path / "run.rec", tmp_path / "run.view"
    path.write_bytes(gzip.decompress(Path(__file__).with_name("format-1.rec.gz").read_bytes()))
    assert cli.main(["replay", str(path), "--view", str(out)]) == 0
    assert any("steps" in event for _, event in read_view(out))


def test_a_view_that_cannot_be_written_is_told(recording, tmp_path, capsys):
    assert cli.main(["replay", str(recording), "--view", str(tmp_path / "no" / "x")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_it_tells_what_steps_take(recording, tmp_path, capsys):
    """The times let a simulation use the recorded load."""
    saved = tmp_path / "times.json"
    flags = ["--max-model-len", "256", "--num-prompts", "4", "--input-len", "40"]
    flags += ["--output-len", "8", "--save-step-times", str(saved)]
    assert cli.main(["simulate", "--step-times", str(recording), *flags]) == 0
    times = StepTimes.load(str(saved))
    assert (times.model, times.max_model_len) == ("octavo/stories", 256)
    assert times.num_blocks > 100
    assert 1e-5 < times.make_predictor()(StepBatch(4, 4, 0, 400)) < 1
    assert 0 < times.host_seconds + 8 * times.host_request_seconds < 1
    assert "Simulated Serving Result" in capsys.readouterr().out


def test_what_differs_is_told(recording, capsys):
    """Another dtype computes other bits: some token differs."""
    assert cli.main(["replay", str(recording), "--dtype", "float32"]) == 1
    said = capsys.readouterr().out
    assert "answers differ" in said
    assert " was " in said


def test_another_model_is_refused(recording, capsys):
    assert cli.main(["replay", str(recording), "--model", "octavo/stories-draft"]) == 2
    assert "--allow-other-model" in capsys.readouterr().err


def test_requests_that_a_model_cannot_take_are_told(recording, capsys):
    """Ids of tokens and sizes of embeddings are checked as for any client."""
    flags = ["--max-model-len", "64", "--no-enable-prompt-embeds"]
    assert cli.main(["replay", str(recording), *flags]) == 1
    said = capsys.readouterr().out
    assert "maximum context length is 64 tokens" in said
    assert "prompt embeddings" in said.lower() or "prompt_embeds" in said
