"""Grammars, drafts, parallel answers, prefix hits and chunked prompts, each with every other one.

The answer is always the plain one, bit for bit, and fits its grammar. In chunks, models with
recurrent states take the place of the built-in one where drafting needs no draft model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import jsonschema
import pytest

from octavo import LLM, SamplingParams
from octavo.config import BUILTIN_MODEL
from octavo.sampling_params import StructuredOutputsParams
from octavo.scheduler.speculation import DraftLengths
from tests import small_tokenizers
from tests.hybrid import HYBRIDS, save_hybrid
from tests.worker.spec_decode import mtp_model

PROMPT = (
    "Lily had a red ball. She put the red ball in a box. Tom had a blue ball. He put the blue ball"
    " in a box. The names of the children and the colours of their balls are: "
)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colour": {"enum": ["red", "blue", "green"]},
        "balls": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["name", "colour", "balls"],
    "additionalProperties": False,
}
REGEX = r"(Lily|Tom) has a (red|blue) ball(, and (Lily|Tom) has a (red|blue) one)?\."
GRAMMARS = {
    "none": None,
    "json": StructuredOutputsParams(json=SCHEMA),
    "regex": StructuredOutputsParams(regex=REGEX),
}
SAMPLING = {
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.1},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "seed": 11, "logprobs": 1},
}
CASES = [(sampling, grammar, n) for sampling in SAMPLING for grammar in GRAMMARS for n in (1, 4)]
METHODS = {
    "none": None,
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
    "draft_model": {"method": "draft_model", "model": "octavo/stories-draft"},
    "medusa": {"method": "medusa", "model": "octavo/stories-medusa"},
    "eagle": {"method": "eagle", "model": "octavo/stories-eagle"},
}
RUNS = [(BUILTIN_MODEL, method, False) for method in ("none", "ngram", "eagle")]
RUNS += [(BUILTIN_MODEL, method, True) for method in ("draft_model", "medusa", "eagle")]
RUNS += [("qwen3.5", method, True) for method in ("none", "ngram", "suffix")]
RUNS += [(kind, "ngram", True) for kind in ("lfm2", "mamba2")]
"""Model, method of drafting, and whether prompts are computed in chunks."""


@dataclass(frozen=True)
class Answer:
    case: tuple[str, str, int]
    text: str
    token_ids: tuple[int, ...]
    logprobs: str
    finish_reason: str


def answers(llm: LLM) -> list[Answer]:
    """Return the answers of all cases, computed at once."""
    params = [
        SamplingParams(
            n=n, max_tokens=60, structured_outputs=GRAMMARS[grammar], **SAMPLING[sampling]
        )
        for sampling, grammar, n in CASES
    ]
    outputs = llm.generate([PROMPT] * len(CASES), params, use_tqdm=False)
    return [
        Answer(case, a.text, tuple(a.token_ids), str(a.logprobs), a.finish_reason)
        for case, output in zip(CASES, outputs, strict=True)
        for a in output.outputs
    ]


def check(answer: Answer) -> None:
    _, grammar, _ = answer.case
    if grammar == "json" and answer.finish_reason == "stop":
        jsonschema.validate(json.loads(answer.text), SCHEMA)
    elif grammar == "regex":
        assert answer.finish_reason == "stop"
        assert re.fullmatch(REGEX, answer.text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return a function that returns the folder, or the name, of a model."""

    @cache
    def make(model: str) -> str:
        if model not in HYBRIDS:
            return model
        return save_hybrid(tmp_path_factory.mktemp(model), model)

    return make


@cache
def expected_of(model: str) -> list[Answer]:
    """Return the answers of one request after the other, without reuse."""
    settings = {"enable_prefix_caching": False, "async_scheduling": False, "max_num_seqs": 4}
    with LLM(model, max_model_len=256, **settings) as llm:
        found = answers(llm)
    for answer in found:
        check(answer)
    assert sum(a.case[1] == "json" and a.finish_reason == "stop" for a in found) > 5
    assert len({a.token_ids for a in found}) > len(CASES) // 2
    return found


@pytest.mark.parametrize(("model", "method", "chunked"), RUNS)
def test_each_with_every_other(
    model: str, method: str, chunked: bool, folder: Callable[[str], str]
) -> None:
    model = folder(model)
    expected = expected_of(model)
    settings = {"max_num_batched_tokens": 32, "max_num_seqs": 32} if chunked else {}
    with LLM(model, max_model_len=256, speculative_config=METHODS[method], **settings) as llm:
        assert answers(llm) == expected
        hits = llm.stats().prefix_cache_hits
        assert answers(llm) == expected
        stats = llm.stats()
        assert stats.prefix_cache_hits > hits
        if METHODS[method] is not None:
            assert 0 < sum(stats.num_accepted_tokens_per_pos) < stats.num_draft_tokens
        llm._client.core.check_integrity()


def test_a_hybrid_model_with_its_mtp_layer(tmp_path, monkeypatch) -> None:
    mtp_model.make("qwen3.5", tmp_path)
    model = str(small_tokenizers.save(small_tokenizers.byte_level(), tmp_path))
    with LLM(model, enable_prefix_caching=False, async_scheduling=False, max_num_seqs=4) as llm:
        expected = answers(llm)
    monkeypatch.setattr(DraftLengths, "choose", lambda self, num_reqs: self.most)
    speculative = {"method": "mtp", "num_speculative_tokens": 3}
    for settings in ({}, {"max_num_batched_tokens": 32, "max_num_seqs": 32}):
        with LLM(model, speculative_config=speculative, **settings) as llm:
            assert answers(llm) == expected
            assert answers(llm) == expected
            stats = llm.stats()
            assert stats.prefix_cache_hits > 0
            assert 0 < sum(stats.num_accepted_tokens_per_pos) < stats.num_draft_tokens
            llm._client.core.check_integrity()
