"""Bitmasks of grammars in the model runner."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from octavo.messages import GrammarOutput
from tests.models.cases import CASES
from tests.models.configs.sizes import VOCAB
from tests.models.harness import make_hf
from tests.params import core_params
from tests.worker.test_model_runner import Runner

COUNT = 9
PROMPTS = {"a": [5, 6, 7], "b": [9, 8, 7, 6], "c": [3, 3]}
PARAMS = {
    "a": core_params(VOCAB, temperature=0.9, seed=3),
    "b": core_params(VOCAB, temperature=0.0),
    "c": core_params(VOCAB, temperature=0.0, repetition_penalty=1.5, logit_bias={4: 1.0}),
}
WITH_GRAMMAR = ["c", "a"]  # not in the order of the batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    architecture, config = CASES["llama"]
    make_hf(architecture, **config).save_pretrained(path)
    return path


def allowed(req_id: str, position: int) -> np.ndarray:
    """Return bool [VOCAB]: the tokens that a request's grammar allows at `position`."""
    return np.random.default_rng([ord(req_id), position]).random(VOCAB) < 0.3


def pack(masks: list[np.ndarray]) -> bytes:
    """Return rows of a bitmask."""
    padded = np.zeros((len(masks), -(-VOCAB // 32) * 32), np.bool_)
    padded[:, :VOCAB] = masks
    return np.packbits(padded, axis=1, bitorder="little").tobytes()


def generate(runner: Runner, req_ids: list[str]) -> dict[str, list[int]]:
    """Return the tokens of requests that run together."""
    tokens: dict[str, list[int]] = {req_id: [] for req_id in req_ids}
    new = [runner.new(req_id, PROMPTS[req_id], PARAMS[req_id]) for req_id in req_ids]
    counts = {req_id: len(PROMPTS[req_id]) for req_id in req_ids}
    for i in range(COUNT):
        asked = [req_id for req_id in WITH_GRAMMAR if req_id in req_ids]
        masks = [allowed(req_id, i) for req_id in asked]
        grammar = GrammarOutput(asked, pack(masks)) if asked else None
        output = runner.step(counts, new, grammar=grammar).get()
        assert not output.errors
        for req_id, [token] in zip(output.req_ids, output.sampled_token_ids, strict=True):
            tokens[req_id].append(token)
        new, counts = [], dict.fromkeys(req_ids, 1)
    return tokens


def test_a_bitmask_is_its_request_s_own_whoever_shares_the_step(folder: Path) -> None:
    alone = {r: generate(Runner(folder), [r])[r] for r in PROMPTS}
    for req_id in WITH_GRAMMAR:
        assert all(allowed(req_id, i)[token] for i, token in enumerate(alone[req_id]))
        assert len(set(alone[req_id])) > 3
    assert generate(Runner(folder), ["b", "c", "a"]) == alone


def test_a_request_whose_grammar_allows_nothing_fails_alone(folder: Path) -> None:
    alone = generate(Runner(folder), ["b"])["b"]
    runner = Runner(folder)
    new = [runner.new(req_id, PROMPTS[req_id], PARAMS[req_id]) for req_id in ("a", "b")]
    nothing = GrammarOutput(["a"], pack([np.zeros(VOCAB, np.bool_)]))
    output = runner.step({"a": 3, "b": 4}, new, grammar=nothing).get()
    assert list(output.errors) == ["a"]
    assert "no token is left" in output.errors["a"]
    assert output.sampled_token_ids == [[], alone[:1]]


def test_a_bitmask_for_nobody_changes_nothing(folder: Path) -> None:
    """It names no request, or one whose prompt is not computed yet."""
    alone = generate(Runner(folder), ["b"])["b"]
    for grammar in (GrammarOutput([], b""), GrammarOutput(["a"], b"")):
        runner = Runner(folder)
        new = [runner.new(req_id, PROMPTS[req_id], PARAMS[req_id]) for req_id in ("a", "b")]
        output = runner.step({"a": 2, "b": 4}, new, grammar=grammar).get()
        assert output.sampled_token_ids == [[], alone[:1]]


@pytest.mark.parametrize("agrees", [True, False])
def test_forced_tokens_are_drafts_as_long_as_they_agree_with_what_is_sampled(
    folder: Path, agrees: bool
) -> None:
    everything, expected = pack([np.ones(VOCAB, np.bool_)]), generate(Runner(folder), ["b"])["b"]
    others = [(token + 1) % VOCAB for token in expected[1:4]]  # the proposer's drafts
    runner = Runner(folder)
    forced = expected[:4] if agrees else [(expected[0] + 1) % VOCAB, *expected[1:4]]
    grammar = GrammarOutput(["b"], everything, {"b": forced})
    output = runner.step({"b": 4}, [runner.new("b", PROMPTS["b"], PARAMS["b"])], grammar=grammar)
    assert output.get().sampled_token_ids == [expected[:1]]
    output = runner.step({"b": 1}, drafts={"b": others}).get()
    assert output.num_draft_tokens == {"b": 3}
    assert output.sampled_token_ids == [expected[1:5] if agrees else expected[1:2]]
    # They are used once.
    at = 5 if agrees else 2
    output = runner.step({"b": 1}, drafts={"b": expected[at : at + 2]}).get()
    assert output.sampled_token_ids == [expected[at : at + 3]]


def test_forced_tokens_of_a_request_that_is_gone_are_forgotten(folder: Path) -> None:
    runner = Runner(folder)
    grammar = GrammarOutput(["b"], pack([np.ones(VOCAB, np.bool_)]), {"b": [1, 2, 3]})
    runner.step({"b": 4}, [runner.new("b", PROMPTS["b"], PARAMS["b"])], grammar=grammar).get()
    assert runner.runner._forced
    runner.step({}, finished=["b"]).get()
    assert not runner.runner._forced
