"""Speculation changes only the number of steps of an answer."""

from __future__ import annotations

import msgspec
import pytest

from octavo import LLM, SamplingParams
from octavo.scheduler.speculation import DraftLengths

STORY = "Lily had a red ball. She put the red ball in a box. Tom had a blue ball. He put the blue"
PROMPTS = [STORY, "Once upon a time there was a cat. The cat was sad. Once upon a time", "The dog"]
GREEDY = SamplingParams(temperature=0, max_tokens=40, logprobs=2, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=40, logprobs=0)
PENALISED = msgspec.structs.replace(SAMPLED, repetition_penalty=1.1, min_tokens=20, n=2)
PARAMS = [GREEDY, SAMPLED, PENALISED]
METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
    "draft_model": {"model": "octavo/stories-draft", "num_speculative_tokens": 3},
}


def answers(llm):
    outputs = llm.generate(
        [prompt for prompt in PROMPTS for _ in PARAMS], PARAMS * len(PROMPTS), use_tqdm=False
    )
    return [(a.text, a.token_ids, a.logprobs, a.finish_reason) for o in outputs for a in o.outputs]


@pytest.fixture(autouse=True)
def most_drafts(monkeypatch):
    """Make engines use all possible drafts: the best number depends on the drafts' time."""
    monkeypatch.setattr(DraftLengths, "choose", lambda lengths, num_reqs: lengths.most)


@pytest.fixture(scope="module")
def expected():
    with LLM(max_model_len=256) as llm:
        return answers(llm)


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": False, "enforce_eager": True}])
@pytest.mark.parametrize("method", METHODS)
def test_the_answer_is_the_same(expected, method, settings):
    with LLM(max_model_len=256, speculative_config=METHODS[method], **settings) as llm:
        assert answers(llm) == expected
        assert answers(llm) == expected  # prefixes, and for suffix the answers, are known now
        stats = llm.stats()
        assert 0 < sum(stats.num_accepted_tokens_per_pos) < stats.num_draft_tokens


def test_rejection_answers_greedily_alike():
    config = METHODS["ngram"] | {"acceptance": "rejection"}
    with LLM(max_model_len=256) as llm:
        plain = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    with LLM(max_model_len=256, speculative_config=config) as llm:
        assert [o.outputs for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)] == [
            o.outputs for o in plain
        ]
        sampled = llm.generate(PROMPTS, SAMPLED, use_tqdm=False)
        assert all(len(o.outputs[0].logprobs) == len(o.outputs[0].token_ids) for o in sampled)
        assert llm.stats().num_draft_tokens > 0
