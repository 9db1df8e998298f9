"""The checks of the laws find faults."""

from dataclasses import replace

import pytest

from octavo.conformance.cases import Call, Case
from octavo.conformance.laws import (
    Answer,
    FoundCall,
    judge,
    judge_cut,
    read_stream,
    read_whole,
    same,
)

ARGUMENTS = '{"city": "Rome", "days": 3}'
CASE = Case(
    "f/x",
    "f",
    f"<think>Hm.</think>One. CALL{ARGUMENTS}END Two.",
    ["One.", "Two."],
    ["Hm."],
    [Call("get", {"city": "Rome", "days": 3}, ARGUMENTS)],
)
GOOD = Answer(
    "One.\n\nTwo.", "\nHm.\n", [FoundCall("id1", "get", ARGUMENTS)], "tool_calls", num_tokens=20
)


def call(arguments=ARGUMENTS, name="get"):
    return [FoundCall("id1", name, arguments)]


def test_a_good_answer():
    result = judge(CASE, GOOD, GOOD)
    assert not result.broken
    assert set(result.problems) == {"text", "calls", "verbatim", "stream", "deltas", "finish"}
    assert "markers" in judge(Case("f/y", "f", "a", ["a"], subject="markers"), GOOD, GOOD).broken


@pytest.mark.parametrize(
    ("change", "laws"),
    [
        ({"content": "One."}, {"text"}),
        ({"content": "Two. One."}, {"text"}),
        ({"content": "One. One. Two."}, {"text"}),
        ({"reasoning": ""}, {"text"}),
        ({"content": "Hm. One. Two.", "reasoning": ""}, {"text"}),
        ({"calls": []}, {"calls"}),
        ({"calls": call() * 2}, {"calls"}),
        ({"calls": call(name="got")}, {"calls"}),
        ({"calls": call('{"city": "Rome", "days": "3"}')}, {"calls"}),
        ({"calls": call('{"city": "Rome", "days": 3')}, {"calls"}),
        ({"calls": call('{"city":"Rome","days":3}')}, {"verbatim"}),
        ({"calls": call('{"city": "Rome", "days": 3.0}')}, {"verbatim"}),
        ({"finish_reason": "stop"}, {"finish"}),
        ({"finish_reason": "length"}, {"finish"}),
        ({"faults": ["a delta"]}, {"deltas"}),
    ],
    ids=str,
)
def test_faults_of_both_answers(change, laws):
    bad = replace(GOOD, **change)
    assert set(judge(CASE, bad, bad).broken) == laws
    for whole, streamed in ((bad, GOOD), (GOOD, bad)):
        broken = set(judge(CASE, whole, streamed).broken)
        assert broken == (laws if "faults" in change else laws | {"stream"})


@pytest.mark.parametrize(
    ("change", "holds"),
    [
        ({}, True),
        ({"content": "", "calls": []}, True),
        ({"content": "One. CALL{", "calls": []}, False),  # neither all text nor a begun call
        ({"content": "One. Two. CALL{", "calls": []}, True),
        ({"calls": call('{"city": "Ro')}, True),
        ({"calls": call('{"city": "Ro"}')}, False),
        ({"calls": call("")}, True),
        ({"calls": call('{"town')}, False),
        ({"calls": call(name="g")}, False),
        ({"calls": call() * 2}, False),
        ({"finish_reason": "tool_calls"}, False),
        ({"reasoning": "H"}, True),
        ({"reasoning": "One"}, False),
    ],
    ids=str,
)
def test_cut_answers(change, holds):
    cut = replace(GOOD, **({"finish_reason": "length"} | change))
    result = judge_cut(CASE, cut, cut)
    assert not result.problems["stream"]
    assert not result.problems["cut"] if holds else result.problems["cut"]
    assert judge_cut(CASE, cut, replace(cut, content="?")).problems["stream"]


@pytest.mark.parametrize(
    ("arguments", "holds"),
    [
        ('{"city": "Ro', True),
        ('{"city": "Ro"}', True),
        ('{"city": "Rome\\n</par', True),
        ('{"city": "Rome", "days":', True),
        ('{"city": "Rome", "days": 4', False),
        ('{"city": "Oslo', False),
        ('{"city": "Oslo\\n</par', False),
        ('{"city": "Oslo"}', False),
    ],
)
def test_cut_arguments_of_elements(arguments, holds):
    text = "<p=city>\nRome\n</param>\n<p=days>\n3\n</param>"
    case = Case("f/x", "f", text, calls=[Call("get", {"city": "Rome", "days": 3})])
    cut = Answer("", "", call(arguments), "length")
    assert (not judge_cut(case, cut, cut).problems["cut"]) == holds


def test_same_values():
    assert same({"a": [1, {"b": None}]}, {"a": [1.0, {"b": None}]})
    for one, other in ((1, True), ([1], [1, 2]), ({"a": 1}, {"b": 1}), ("1", 1), ([0], [False])):
        assert not same(one, other)


def delta(**fields):
    return {"choices": [{"delta": fields, "finish_reason": None}]}


def piece(index, call_id=None, name=None, arguments=None):
    function = {"name": name, "arguments": arguments}
    return delta(tool_calls=[{"index": index, "id": call_id, "function": function}])


GOOD_STREAM = [
    delta(role="assistant", content=""),
    delta(reasoning_content="Hm", reasoning="Hm"),
    delta(content="One."),
    piece(0, "a", "get", ""),
    piece(0, None, None, '{"x'),
    piece(0, None, None, '": 1}'),
    piece(1, "b", "now", "{}"),
    {"choices": [{"delta": {}, "finish_reason": "tool_calls"}]},
    {"choices": [], "usage": {"completion_tokens": 3}},
]


def test_streams():
    found = read_stream(GOOD_STREAM)
    assert (found.content, found.reasoning, found.finish_reason) == ("One.", "Hm", "tool_calls")
    assert found.calls == [FoundCall("a", "get", '{"x": 1}'), FoundCall("b", "now", "{}")]
    assert not found.faults


@pytest.mark.parametrize(
    "pieces",
    [
        [piece(0, "a", None, "{}")],
        [piece(0, None, "get", "{}")],
        [piece(1, "a", "get", "{}")],
        [piece(None, "a", "get", "{}")],
        [piece(0, "a", "get"), piece(0, "b", None, "{}")],
        [piece(0, "a", "get"), piece(0, None, "get", "{}")],
        [piece(0, "a", "get"), piece(1, "a", "get")],
        [piece(0, "a", "get"), piece(1, "b", "get"), piece(0, None, None, "{}")],
    ],
    ids=str,
)
def test_faults_of_deltas(pieces):
    assert len(read_stream(pieces).faults) == 1


def test_whole_answers():
    function = {"name": "get", "arguments": "{}"}
    tokens = [{"bytes": [226, 130]}, {"bytes": [172]}]
    body = {
        "choices": [
            {
                "message": {"content": None, "tool_calls": [{"id": "a", "function": function}]},
                "finish_reason": "tool_calls",
                "logprobs": {"content": tokens},
            }
        ],
        "usage": {"completion_tokens": 2},
    }
    found = read_whole(body)
    assert found == Answer("", "", [FoundCall("a", "get", "{}")], "tool_calls", 2, "€".encode())
    body["choices"][0]["message"]["tool_calls"] *= 2
    assert read_whole(body).faults
