"""Requests and answers of records, and reports; tests/e2e/test_replay.py runs a replay."""

import msgspec
import numpy as np
import pytest

from octavo import cli
from octavo.config import EngineConfig
from octavo.errors import ConfigError, OctavoError
from octavo.messages import (
    CoreSamplingParams,
    EngineCoreOutput,
    FinishReason,
    LogprobsLists,
)
from octavo.observability.recording import (
    FORMAT,
    Arrival,
    Died,
    End,
    Head,
    Lost,
    Outputs,
    Recorder,
    Step,
)
from octavo.sampling_params import SamplingParams
from octavo.simulation.replay import RequestLog, compare, load_recording, replay_config
from tests.params import core_request


def arrival(request_id: str, n: int = 1, time: float = 10.0) -> Arrival:
    return Arrival(
        core_request(request_id, [1, 2], CoreSamplingParams(), time, n=n), SamplingParams(n=n)
    )


def rows(*logprobs: float) -> LogprobsLists:
    count = len(logprobs)
    return LogprobsLists(
        np.ones(count, "i4").tobytes(),
        np.array(logprobs, "f4").tobytes(),
        np.ones(count, "i4").tobytes(),
    )


def tokens(request_id: str, *ids: int, time: float = 11.0, **fields) -> Outputs:
    return Outputs(time, [EngineCoreOutput(request_id, list(ids), **fields)])


def end(request_id: str, count: int, reason=FinishReason.LENGTH, stop=None) -> End:
    return End(12.0, request_id, reason, stop, count)


def step(number: int, *added: str) -> Step:
    return Step(number, 1.0, list(added), [], [], [], [])


def head(config: EngineConfig | None = None, **fields) -> Head:
    found = Head(FORMAT, "id", 1.0, {}, msgspec.to_builtins(config or EngineConfig()), "", "full")
    return msgspec.structs.replace(found, **fields)


def test_an_answer_is_put_together():
    made = RequestLog(
        [
            arrival("a"),
            tokens("b", 9),  # it arrived before the recording
            tokens("a", 5, 6, time=11.0),
            None,
            tokens("a", 7, 8, time=13.0),
            end("a", 3, FinishReason.STOP, "text"),
            tokens("a", 9),  # in transit when the stop text was found
            Died(14.0, "killed"),
            Lost(4),
        ]
    )
    assert list(made.answers) == ["a"]
    answer = made.answers["a"]
    assert answer.token_ids == [5, 6, 7]
    assert answer.complete
    assert (made.ttfts(), made.tpots(), made.seconds()) == ([1.0], [1.0], 3.0)
    assert (made.num_deaths, made.num_unreadable, made.num_lost) == (1, 1, 4)


@pytest.mark.parametrize("gap", [None, Lost(3)])
def test_what_is_missing_is_no_difference(gap):
    """Tokens that are not in the recording are not known to differ."""
    before = [tokens("a", 1, 2), gap, tokens("a", 5), end("a", 4)]
    now = [tokens("a", 1, 2, 3, 4), end("a", 4)]
    report = compared(before, now)
    assert (report.differences, report.num_cut, report.num_tokens) == ([], 1, 2)
    assert compared(before[:-1], now).differences == []
    assert [str(d) for d in compared(before, [tokens("a", 1, 9), end("a", 2)]).differences] == [
        "a: token 1 was 2, is 9"
    ]
    # The missing tokens were of others.
    report = compared([tokens("a", 1), gap, tokens("a", 2), end("a", 2)], [tokens("a", 1)])
    assert [str(d) for d in report.differences] == ["a: token 1 was 2, is not there"]


def test_a_request_of_more_answers_than_were_asked_for():
    made = RequestLog(
        [
            Arrival(msgspec.structs.replace(arrival("a").request, n=10**9), SamplingParams()),
            arrival("b"),
        ]
    )
    assert list(made.answers) == ["b"]
    assert made.num_unreadable == 1


def test_damaged_settings():
    with pytest.raises(OctavoError, match="settings in the recording are damaged"):
        replay_config(head(config={"model": 3}), {})


def test_a_recording_without_a_head(tmp_path, capsys):
    path = tmp_path / "run.rec"
    Recorder(path, head()).close()
    data = bytearray(path.read_bytes())
    data[60] ^= 1
    path.write_bytes(data)
    with pytest.raises(OctavoError, match="it is damaged, or another"):
        load_recording(path)
    assert cli.main(["replay", str(path)]) == 2
    assert "it is damaged" in capsys.readouterr().err


def test_when_a_core_got_a_request():
    made = RequestLog(
        [
            step(1, "a"),
            arrival("a"),
            arrival("b", n=2),
            step(2),
            step(1, "a", "b"),  # another engine
            step(2),
            arrival("c"),
        ]
    )
    assert [made.first_step(a) for a in made.arrivals.values()] == [0, 2, 4]


def compared(before, now):
    return compare(*(RequestLog([arrival("a"), *r]) for r in (before, now)), None)


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ([tokens("a", 1, 2), end("a", 2)], [tokens("a", 1, 2), end("a", 2)], []),
        (
            [tokens("a", 1, 2), end("a", 2)],
            [tokens("a", 1, 3), end("a", 2)],
            ["a: token 1 was 2, is 3"],
        ),
        (
            [tokens("a", 1, 2), end("a", 2)],
            [tokens("a", 1), end("a", 1)],
            ["a: token 1 was 2, is not there"],
        ),
        (
            [tokens("a", 1), end("a", 1)],
            [tokens("a", 1, 2), end("a", 2)],
            ["a: token 1 was not there, is 2"],
        ),
        (
            [tokens("a", 1), end("a", 1)],
            [tokens("a", error="no memory"), end("a", 0, FinishReason.ERROR)],
            ["a: token 0 was 1, is not there (no memory)"],
        ),
        (
            [tokens("a", 1), end("a", 1)],
            [tokens("a", 1), end("a", 1, FinishReason.STOP, 7)],
            ["a: the end was length None, is stop 7"],
        ),
        # A truncated answer is compared up to its end.
        ([tokens("a", 1), end("a", 1, FinishReason.ABORT)], [tokens("a", 1, 2)], []),
        ([tokens("a", 1)], [tokens("a", 1, 2), end("a", 2)], []),
        ([tokens("a", 1)], [tokens("a", 2), end("a", 1)], ["a: token 0 was 1, is 2"]),
        ([tokens("a", 1)], [end("a", 0)], ["a: token 0 was 1, is not there"]),
    ],
)
def test_the_first_token_that_differs(before, now, said):
    report = compared(before, now)
    assert [str(d) for d in report.differences] == said
    assert list(report.lines())[-1] == f"{len(said)} answers differ"


def test_logprobs_are_compared_up_to_the_first_token_that_differs():
    before = [tokens("a", 1, 2, 3, new_logprobs=rows(-1.0, -2.0, -3.0)), end("a", 3)]
    now = [tokens("a", 1, 2, 4, new_logprobs=rows(-1.0, -2.5, -9.0)), end("a", 3)]
    report = compared(before, now)
    assert (report.num_logprobs, report.num_other_logprobs) == (2, 1)
    assert report.most_logprob_difference == 0.5
    assert "logprobs of 2 positions: 1 differ, a token's own by at most 0.5" in report.lines()


def test_answers_that_got_nothing_are_left_out():
    report = compared([end("a", 0, FinishReason.ABORT)], [])
    assert next(report.lines()) == (
        "1 requests, 0 answers with 0 tokens; 1 without tokens are left out"
    )


def test_settings_are_the_recorded_ones_but_for_those_given():
    recorded = EngineConfig.from_kwargs(
        max_num_seqs=7,
        kv_cache_memory_bytes=2**23,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    assert replay_config(head(recorded), {}) == recorded
    made = replay_config(head(recorded), {"num_gpu_blocks_override": 9, "max_num_seqs": 5})
    assert made.cache.num_gpu_blocks_override == 9
    assert made.cache.kv_cache_memory_bytes is None
    assert made.scheduler.max_num_seqs == 5
    assert made.speculation == recorded.speculation


def test_a_setting_of_another_build():
    """An unknown setting is rejected by name."""
    with pytest.raises(ConfigError, match="'new_setting'"):
        replay_config(head(config={"model": {"new_setting": 3}}), {})


@pytest.mark.parametrize(
    ("which", "said"),
    [
        ({"prompts": "hash"}, "--record-prompts hash"),
        ({"format": FORMAT + 1}, "another format"),
        ({}, "has no requests"),
    ],
)
def test_what_cannot_be_replayed_says_why(tmp_path, which, said):
    path = tmp_path / "run.rec"
    Recorder(path, head(**which)).close()
    with pytest.raises(OctavoError, match=said):
        load_recording(path)


def test_the_older_half_of_the_same_recording_is_read(tmp_path):
    path = tmp_path / "run.rec"
    for name, found in (("a", head()), ("b", head())):
        recorder = Recorder(path, found)
        recorder.put(arrival(name))
        recorder.close()
    assert list(load_recording(path).arrivals) == ["a", "b"]
    recorder = Recorder(path, head(id="another"))
    recorder.put(arrival("c"))
    recorder.close()
    assert list(load_recording(path).arrivals) == ["c"]
