"""Limits of reasoning and repetition: the same tokens at any load and after a preemption."""

from dataclasses import replace

import pytest

from octavo import LLM, SamplingParams
from octavo.guard import MIN_LOOP
from octavo.parsers.answer import AnswerParser
from octavo.parsers.formats import FORMATS
from octavo.parsers.parts import CallStart
from octavo.sampling_params import StructuredOutputsParams
from tests.drafts import SETTINGS, Drafter

MARKERS = ("<|im_start|>", "<|endoftext|>")
BEGIN, END = 1, 0
PROMPT = "Once upon a time there was a cat. <|im_start|>"
FIELDS = {"reasoning_markers": MARKERS, "max_tokens": 40, "ignore_eos": True, "logprobs": 2}
LOOP = {"allowed_token_ids": [14, 16, END], "logit_bias": {END: -50.0}, "temperature": 0.0}
REQUESTS = [
    SamplingParams(thinking_token_budget=7, temperature=0.0, **FIELDS),
    SamplingParams(thinking_token_budget=0, temperature=0.9, seed=3, **FIELDS),
    SamplingParams(thinking_token_budget=1000, temperature=0.9, seed=4, **FIELDS),
    SamplingParams(repetition_guard="stop", **(FIELDS | LOOP | {"max_tokens": 300})),
    SamplingParams(repetition_guard="close_thinking", **(FIELDS | LOOP | {"max_tokens": 300})),
    SamplingParams(repetition_guard="report", **(FIELDS | LOOP | {"max_tokens": 150})),
    SamplingParams(
        thinking_token_budget=9, temperature=0.7, seed=5, repetition_penalty=1.2, **FIELDS
    ),
]


def answers(llm, requests=REQUESTS):
    outputs = llm.generate([PROMPT] * len(requests), requests, use_tqdm=False)
    return [
        (
            o.outputs[0].token_ids,
            [sorted((t, p.logprob) for t, p in row.items()) for row in o.outputs[0].logprobs],
            o.outputs[0].finish_reason,
            o.outputs[0].repetition_period,
        )
        for o in outputs
    ]


@pytest.fixture(scope="module")
def expected():
    with LLM(dtype="float32", max_model_len=512, async_scheduling=False) as llm:
        return [answers(llm, [request])[0] for request in REQUESTS]


def test_the_rules(expected):
    tokens = [answer[0] for answer in expected]
    assert tokens[0].index(END) == 7
    assert len(tokens[0]) == 40  # the answer goes on
    assert tokens[1][0] == END
    assert tokens[6].index(END) == 9
    with LLM(dtype="float32", max_model_len=512) as llm:
        free = SamplingParams(temperature=0.0, **FIELDS)
        assert answers(llm, [free])[0][0][:7] == tokens[0][:7]
        assert END not in answers(llm, [free])[0][0][:8]
    stopped, closed, reported = expected[3:6]
    assert stopped[2:] == ("repetition", stopped[3])
    period = stopped[3]
    assert len(stopped[0]) >= max(MIN_LOOP, 3 * period)
    tail = stopped[0][-max(MIN_LOOP, 3 * period) :]
    assert tail[period:] == tail[:-period]
    # The loop ends the reasoning, and the next loop, in the text, ends the answer.
    size = len(stopped[0])
    assert closed[0][:size] == stopped[0]
    assert closed[0][size] == END
    assert closed[2] == "repetition"
    assert len(closed[0]) > size + MIN_LOOP
    assert reported[2:] == ("length", period)
    assert len(reported[0]) == 150


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": False, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 36, "max_num_seqs": 12},
        {"distributed_executor_backend": "mp"},
        SETTINGS,
    ],
    ids=str,
)
def test_same_bits_everywhere(expected, settings, monkeypatch):
    drafter = None
    if settings is SETTINGS:
        drafter = Drafter(monkeypatch, [answer[0] for answer in expected])
    with LLM(dtype="float32", max_model_len=512, **settings) as llm:
        assert answers(llm, REQUESTS * 2) == expected * 2
        if "num_gpu_blocks_override" in settings:
            assert llm.stats().num_preemptions
        if drafter is not None:
            assert drafter.num_tokens > 1.1 * drafter.num_steps


def test_a_grammar_after_the_reasoning():
    """The budget ends the reasoning where the grammar allows it; then a call follows."""
    markers = ("<|endoftext|>", "<|im_start|>")  # the first one ends texts: grammars have it not
    fmt = replace(FORMATS["hermes"], thoughts=markers)
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    tag = fmt.structural_tag({"f": schema}, required=True, parallel=False, thinks=True)
    params = SamplingParams(
        thinking_token_budget=6,
        structured_outputs=StructuredOutputsParams(structural_tag=tag, disable_any_whitespace=True),
        temperature=0.8,
        seed=7,
        max_tokens=80,
        reasoning_markers=markers,
        preserved_token_ids=[BEGIN],
    )
    with LLM(dtype="float32", max_model_len=512) as llm:
        many = llm.generate(["Once upon a time. <|endoftext|>"] * 3, params, use_tqdm=False)
    for output in many:
        (answer,) = output.outputs
        assert answer.token_ids == many[0].outputs[0].token_ids
        assert answer.token_ids.index(BEGIN) == 6
        parser = AnswerParser(fmt, {"f": schema}, thinks=True)
        parts = parser.feed(answer.text) + parser.end()
        assert [part.text for part in parts if isinstance(part, CallStart)] == ["f"]
        assert answer.finish_reason == "stop"
