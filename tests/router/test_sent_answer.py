"""Stream continued by another server: it omits the part that the client already has."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.router.sent_answer import DifferentAnswerError, SentAnswer

ENVELOPE = {"id": "a", "created": 1, "model": "m", "object": "text_completion"}


def event(text="", index=0, finish=None, logprobs=None, **envelope):
    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
    return msgspec.json.encode(ENVELOPE | envelope | {"choices": [choice]})


def chat(index=0, finish=None, **delta):
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return msgspec.json.encode(ENVELOPE | {"choices": [choice]})


def take(sent, events):
    return [msgspec.json.decode(kept) for e in events if (kept := sent.take(e)) is not None]


def texts(events, index=0):
    choices = [c for e in events for c in e["choices"] if c["index"] == index]
    return "".join(c["text"] for c in choices if c.get("text"))


def cut(text, places):
    places = sorted({0, len(text), *(p % (len(text) + 1) for p in places)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


@given(
    st.text(min_size=1, max_size=40),
    st.lists(st.lists(st.integers(0, 100), max_size=6), min_size=1, max_size=4),
    st.data(),
)
def test_an_answer_is_whole_wherever_servers_are_lost_and_however_it_is_cut(text, tries, data):
    sent, kept = SentAnswer(), []
    for number, places in enumerate(tries):
        sent.begin_again()
        pieces = cut(text, places)
        last = number == len(tries) - 1
        end = len(pieces) if last else data.draw(st.integers(0, len(pieces)))
        events = [event(piece, id=f"id{number}") for piece in pieces[:end]]
        kept += take(sent, events + ([event("", finish="stop")] if last else []))
    sent.check_complete()
    assert texts(kept) == text
    assert [c["finish_reason"] for c in kept[-1]["choices"]] == ["stop"]
    assert len({e["id"] for e in kept}) <= 2, "one server's id, and that of the plain end"


def test_choices_and_logprobs_are_counted_each_for_itself():
    def row(*tokens):
        return {"tokens": list(tokens), "token_logprobs": [-1.0] * len(tokens)}

    sent = SentAnswer()
    sent.begin_again()
    kept = take(sent, [event("ab", 0, logprobs=row("a", "b")), event("x", 1)])
    sent.begin_again()
    kept += take(
        sent,
        [event("x", 1), event("y", 1, "stop"), event("abc", 0, "length", row("a", "b", "c"))],
    )
    assert (texts(kept, 0), texts(kept, 1)) == ("abc", "xy")
    rows = [c["logprobs"] for e in kept for c in e["choices"] if c.get("logprobs")]
    assert [token for r in rows for token in r["tokens"]] == ["a", "b", "c"]


def test_a_chat_has_its_role_and_its_calls_once():
    call = {"index": 0, "id": "call", "type": "function"}
    first = [
        chat(role="assistant", content=""),
        chat(reasoning_content="Hm"),
        chat(tool_calls=[call | {"function": {"name": "f", "arguments": ""}}]),
        chat(tool_calls=[{"index": 0, "function": {"arguments": '{"a"'}}]),
    ]
    rest = [
        chat(tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
        chat(finish="tool_calls"),
    ]
    sent = SentAnswer()
    sent.begin_again()
    kept = take(sent, first)
    sent.begin_again()
    kept += take(sent, first + rest)
    deltas = [c["delta"] for e in kept for c in e["choices"]]
    calls = [c for d in deltas for c in d.get("tool_calls", [])]
    assert sum("role" in d for d in deltas) == 1
    assert "".join(d.get("reasoning_content") or "" for d in deltas) == "Hm"
    assert [c["id"] for c in calls if "id" in c] == ["call"]
    assert "".join(c["function"]["arguments"] for c in calls) == '{"a": 1}'
    assert kept[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_the_usage_comes_once():
    usage = msgspec.json.encode(ENVELOPE | {"choices": [], "usage": {"prompt_tokens": 1}})
    sent = SentAnswer()
    sent.begin_again()
    assert len(take(sent, [event("a", finish="stop"), usage])) == 2
    sent.begin_again()
    assert take(sent, [event("a", finish="stop"), usage]) == []


def test_progress_is_not_the_usage():
    """The client hears of the progress of one server only, and has the usage in any case."""
    progress = msgspec.json.encode(ENVELOPE | {"choices": [], "prompt_progress": {"total": 9}})
    usage = msgspec.json.encode(ENVELOPE | {"choices": [], "usage": {"prompt_tokens": 1}})
    sent = SentAnswer()
    sent.begin_again()
    assert len(take(sent, [progress, progress])) == 2
    sent.begin_again()
    kept = take(sent, [progress, event("a"), event("b", finish="stop"), usage])
    assert [e["choices"] != [] for e in kept] == [True, True, False]
    assert kept[-1]["usage"] == {"prompt_tokens": 1}


@pytest.mark.parametrize("other", ["axc", "ab", "xbc", ""])
def test_another_answer_is_found_out_before_any_of_it_is_sent(other):
    sent = SentAnswer()
    sent.begin_again()
    take(sent, [event("abc")])
    sent.begin_again()
    with pytest.raises(DifferentAnswerError):
        take(sent, [event(other), event("more", finish="stop")])


@pytest.mark.parametrize("data", [b"[]", b"{", b'{"choices": [1]}', b"\xff"])
def test_what_is_no_event(data):
    with pytest.raises((ValueError, msgspec.MsgspecError)):
        SentAnswer().take(data)
