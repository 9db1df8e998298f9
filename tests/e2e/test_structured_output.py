"""Answers that follow grammars, bit for bit the same under any load."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal

import jsonschema
import msgspec
import numpy as np
import pytest

from octavo import LLM
from octavo.messages import FinishReason, GrammarSpec, LogprobsLists
from tests import drafts
from tests.params import core_params, core_request

VOCAB, STOPS = 4096, [0, 2]
ANIMAL = {
    "type": "object",
    "properties": {
        "the name of the animal": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 30},
        "kind": {"enum": ["a cat that sleeps", "a dog that runs"]},
    },
    "required": ["the name of the animal", "age", "kind"],
    "additionalProperties": False,
}
JSON = GrammarSpec("json", json.dumps(ANIMAL), any_whitespace=False)
REGEX = GrammarSpec("regex", "[A-Z][a-z]{2,9} was [0-9]{1,2} years old\\.")
CHOICE = GrammarSpec("choice", '["yes, of course", "no, thank you"]')
EBNF = GrammarSpec("grammar", 'root ::= "(" root ")" | "a ball" | "a box"')
SPECS = [JSON, REGEX, CHOICE, EBNF, None]
PROMPTS = ["Once upon a time there was a little animal. " * 3, "Tom said:", "Lily saw"]
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.95, "logprobs": 2},
    {"temperature": 0.8, "repetition_penalty": 1.2, "min_tokens": 2, "presence_penalty": 0.5},
]


class Answer(msgspec.Struct):
    tokens: list[int] = []
    logprobs: list[LogprobsLists] = []
    reason: FinishReason | None = None
    error: str | None = None

    @property
    def all_logprobs(self) -> LogprobsLists:
        return LogprobsLists.join(self.logprobs)


def request(llm, request_id, prompt, spec, seed=0, n=1, **params):
    sampling = core_params(VOCAB, **{"max_tokens": 60, "all_stop_token_ids": STOPS} | params)
    sampling = msgspec.structs.replace(sampling, grammar=spec, seed=seed)
    tokens = llm.get_tokenizer().encode(prompt)
    return core_request(request_id, tokens, sampling, n=n)


def run(llm, requests, before_step=lambda core: None):
    """Return the answers of requests that run together."""
    core = llm._client.core
    answers = {}
    for item in requests:
        answers |= {child: Answer() for child in item.child_ids}
        core.add_request(item)
    while any(answer.reason is None for answer in answers.values()):
        core.wait(10)
        before_step(core)
        for output in core.step().outputs:
            answer = answers[output.request_id]
            answer.tokens += output.new_token_ids
            if output.new_logprobs is not None:
                answer.logprobs.append(output.new_logprobs)
            answer.reason, answer.error = output.finish_reason, output.error
    core.check_integrity()
    return answers


def all_requests(llm, backend="auto"):
    cases = [(p, s, k) for p in PROMPTS for s in SPECS for k in PARAMS]
    requests = []
    for i, (prompt, spec, params) in enumerate(cases):
        if spec is not None:
            spec = msgspec.structs.replace(spec, backend=backend)
        requests.append(request(llm, str(i), prompt, spec, seed=i, **params))
    return requests


def text(llm, answer):
    return llm.get_tokenizer().decode(answer.tokens, skip_special_tokens=True)


def check(llm, item, answer):
    """Check that an answer follows its request."""
    assert answer.error is None
    spec, said = item.sampling_params.grammar, text(llm, answer)
    if answer.reason == FinishReason.LENGTH or spec is None:
        return
    if spec.kind == "json":
        jsonschema.validate(json.loads(said), ANIMAL)
    elif spec.kind == "regex":
        assert re.fullmatch(spec.text, said)
    elif spec.kind == "choice":
        assert said in json.loads(spec.text)
    else:
        assert re.fullmatch(r"(\(*)(a ball|a box)(\)*)", said)
        assert said.count("(") == said.count(")")


def bits(answers):
    return [(a.tokens, a.all_logprobs, a.reason) for a in answers.values()]


@pytest.fixture(scope="module")
def llm():
    with LLM(max_model_len=256, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(llm):
    """Return the answers to `all_requests`, without the drafts of grammars."""
    core = llm._client.core
    core.scheduler.max_num_drafts, most = 0, core.scheduler.max_num_drafts
    answers = run(llm, all_requests(llm))
    core.scheduler.max_num_drafts = most
    return answers


def test_answers_are_what_was_asked_for(llm, expected):
    for item, answer in zip(all_requests(llm), expected.values(), strict=True):
        check(llm, item, answer)
    stopped = [a for a in expected.values() if a.reason == FinishReason.STOP]
    assert len(stopped) >= len(expected) / 2
    assert len({tuple(a.tokens) for a in expected.values()}) > len(expected) / 2


def test_jumping_ahead_changes_no_bit_and_saves_steps(llm, expected):
    before, requests, answers = llm.stats(), all_requests(llm), {}
    for i in range(0, len(requests), 3):  # larger batches have no such drafts
        answers |= run(llm, requests[i : i + 3])
    assert bits(answers) == bits(expected)
    after = llm.stats()
    assert sum(after.num_accepted_tokens_per_pos) > sum(before.num_accepted_tokens_per_pos)
    # One request alone.
    core = llm._client.core
    steps, most = [], core.scheduler.max_num_drafts
    for num_drafts in (0, most):
        core.scheduler.max_num_drafts = num_drafts
        began = llm.stats().num_steps
        (answer,) = run(llm, [request(llm, "0", PROMPTS[0], JSON)]).values()
        steps.append(llm.stats().num_steps - began)
    assert steps[0] >= len(answer.tokens)
    assert steps[1] < 0.8 * steps[0]


def test_alone_or_among_others(llm, expected):
    for i, item in enumerate(all_requests(llm)):
        if i % 4 == 0:
            assert bits(run(llm, [item])) == bits({"": expected[str(i)]}), i


SETTINGS = {
    "synchronous": {"async_scheduling": False, "enforce_eager": True},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    "starved": {"num_gpu_blocks_override": 24, "enable_prefix_caching": False},
    "drafts": drafts.SETTINGS,
    "synchronous drafts": drafts.SETTINGS | {"async_scheduling": False},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_engine_s_settings_do_not_matter(llm, expected, name, monkeypatch):
    settings = {"max_model_len": 256, "max_num_seqs": 16} | SETTINGS[name]
    drafter = drafts.Drafter(monkeypatch, [a.tokens for a in expected.values()])
    with LLM(**settings) as other:
        assert bits(run(other, all_requests(other))) == bits(expected)
        stats = other.stats()
    if name == "starved":
        assert stats.num_preemptions > 0
    if "drafts" in name:
        assert drafter.num_tokens > drafter.num_steps


def test_kills_of_grammar_processes_change_nothing(llm, expected):
    steps, pids = itertools.count(1), set()

    def kill_some(core):
        if next(steps) % 9 == 0:
            for state in core.structured_output._states.values():
                if state.process.status is None and state.process.pid not in pids:
                    pids.add(state.process.pid)
                    os.kill(state.process.pid, signal.SIGKILL)

    requests = all_requests(llm)[::3]
    answers = run(llm, requests, kill_some)
    assert len(pids) > 2
    assert bits(answers) == bits({r.request_id: expected[r.request_id] for r in requests})


def test_the_other_backend(llm, expected):
    requests = all_requests(llm, "llguidance")
    for item, answer in zip(requests, run(llm, requests).values(), strict=True):
        check(llm, item, answer)


def test_several_answers_to_one_prompt(llm):
    item = request(llm, "0", PROMPTS[1], REGEX, seed=3, n=3, temperature=1.0)
    answers = run(llm, [item])
    for answer in answers.values():
        check(llm, item, answer)
    assert len({tuple(a.tokens) for a in answers.values()}) == 3
    alone = [
        run(llm, [request(llm, "0", PROMPTS[1], REGEX, seed=3 + i, temperature=1.0)])["0"]
        for i in range(3)
    ]
    assert bits(answers) == bits(dict(enumerate(alone)))


def test_a_request_goes_on_behind_its_output(llm):
    item = request(llm, "0", PROMPTS[1], JSON, temperature=0.9, seed=4)
    whole = run(llm, [item])["0"]
    for given in (1, 5, len(whole.tokens) - 1):
        item.output_token_ids = whole.tokens[:given]
        assert run(llm, [item])["0"].tokens == whole.tokens[given:]


def test_prompt_logprobs_beside_a_grammar(llm):
    plain = request(llm, "0", PROMPTS[2], None, prompt_logprobs=1, max_tokens=1)
    guided = request(llm, "0", PROMPTS[2], CHOICE, prompt_logprobs=1)
    rows = []
    for item in (plain, guided):
        core = llm._client.core
        core.add_request(item)
        while core.has_work() or core.structured_output.is_compiling:
            core.wait(10)
            rows += [o.new_prompt_logprobs for o in core.step().outputs if o.new_prompt_logprobs]
    assert rows[0] == rows[1]


def test_the_end_of_a_grammar_is_the_answer_s(llm):
    """ignore_eos: the request has no stop token, and only one can follow."""
    for params in ({}, {"all_stop_token_ids": []}):
        answer = run(llm, [request(llm, "0", PROMPTS[1], CHOICE, **params)])["0"]
        assert answer.reason == FinishReason.STOP
        assert answer.tokens[-1] in STOPS
        assert text(llm, answer) in json.loads(CHOICE.text)


def test_a_stop_token_of_the_request_ends_it_before(llm):
    whole = run(llm, [request(llm, "0", PROMPTS[1], CHOICE)])["0"]
    stop = whole.tokens[1]
    params = {"stop_token_ids": [stop], "all_stop_token_ids": STOPS}
    answer = run(llm, [request(llm, "0", PROMPTS[1], CHOICE, **params)])["0"]
    assert answer.tokens == whole.tokens[: whole.tokens.index(stop) + 1]


def test_min_tokens_that_a_grammar_cannot_reach_is_an_error_that_says_so(llm):
    other = request(llm, "1", PROMPTS[1], None, max_tokens=30)
    alone = run(llm, [other])["1"]
    item = request(llm, "0", PROMPTS[1], CHOICE, min_tokens=30)
    answers = run(llm, [item, other])
    assert "no token is left to choose" in answers["0"].error
    assert "min_tokens" in answers["0"].error
    assert answers["1"].tokens == alone.tokens


def test_no_padding_or_special_token_is_ever_allowed(llm):
    """The request favours them as much as possible."""
    tokenizer = llm.get_tokenizer()
    special = sorted(tokenizer.all_special_ids)
    favoured = dict.fromkeys(special, 100.0)
    spec = GrammarSpec("regex", "(.|\n){10,12}")
    item = request(llm, "0", PROMPTS[1], spec, logit_bias=favoured)
    answer = run(llm, [item])["0"]
    assert not set(answer.tokens[:-1]) & set(special)
    assert 10 <= len(text(llm, answer)) <= 12


def test_what_cannot_be_compiled_fails_alone_before_it_begins(llm, expected):
    wrong = GrammarSpec("json", '{"type": "array", "uniqueItems": true}')
    good = request(llm, "0", PROMPTS[0], JSON, temperature=0.0)
    answers = run(llm, [request(llm, "bad", "Tom", wrong), good])
    assert answers["bad"].tokens == []
    assert "uniqueItems" in answers["bad"].error
    assert answers["0"].tokens == expected["0"].tokens


def test_many_grammars_at_once(llm):
    texts = [str(1000 + i) for i in range(60)]
    requests = [
        request(llm, t, PROMPTS[1], GrammarSpec("choice", json.dumps([t, "x" + t]))) for t in texts
    ]
    for request_id, answer in run(llm, requests).items():
        assert text(llm, answer) in (request_id, "x" + request_id)
    assert np.all([len(a.tokens) > 1 for a in run(llm, requests[:5]).values()])
