"""Medusa heads, compared with the training tool."""

from __future__ import annotations

import json

import pytest
import torch

from octavo import LLM
from octavo.errors import ConfigError, ModelError
from octavo.worker.spec_decode.medusa import MedusaProposer
from tests.worker.spec_decode.heads import (
    GREEDY,
    SETTINGS,
    TEXTS,
    answers,
    base_model,
    record_proposals,
    save,
)
from training.heads import MedusaHeads


@pytest.fixture(scope="module")
def base():
    return base_model()


@pytest.fixture(scope="module")
def made(base, tmp_path_factory):
    heads, folder = MedusaHeads(base, num_heads=3), tmp_path_factory.mktemp("medusa")
    save(heads, folder)
    return heads, folder


@pytest.fixture(scope="module")
def expected():
    with LLM(max_model_len=128) as llm:
        return answers(llm)


def config(folder, num_drafts=3, **more):
    return {"model": str(folder), "num_speculative_tokens": num_drafts, **more}


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_answer_is_the_same(expected, made, settings, monkeypatch):
    proposals = record_proposals(monkeypatch, MedusaProposer)
    with LLM(max_model_len=128, speculative_config=config(made[1]), **settings) as llm:
        assert answers(llm) == expected
        stats = llm.stats()
    assert 0 < sum(stats.num_accepted_tokens_per_pos) < stats.num_draft_tokens
    assert all(drafts for _, drafts in proposals), "the last hidden state is always there"
    assert stats.num_preemptions > 0 or "num_gpu_blocks_override" not in settings


def test_each_head_s_first_choice_is_drafted(base, made, monkeypatch):
    proposals = record_proposals(monkeypatch, MedusaProposer)
    speculative = config(made[1], method="medusa")
    with LLM(max_model_len=128, dtype="float32", speculative_config=speculative) as llm:
        llm.generate(TEXTS, GREEDY, use_tqdm=False)
    assert len(proposals) > 10
    for tokens, drafts in proposals:
        with torch.no_grad():
            hidden = base.hidden(torch.tensor([tokens[:-1]]))[0, -1]
            guesses = made[0](hidden)
        assert 0 < len(drafts) <= 3
        for logits, draft in zip(guesses, drafts, strict=False):
            assert logits[draft] > logits.max() - 1e-3


def test_rejection_knows_what_drafts_were_drawn_from(made):
    speculative = config(made[1], acceptance="rejection")
    with LLM(max_model_len=128, speculative_config=speculative) as llm:
        assert all(len(tokens) == 20 for tokens in answers(llm))


def test_heads_that_do_not_fit_are_refused(made, tmp_path):
    with pytest.raises(ConfigError, match="more than the 3 heads"):
        LLM(max_model_len=128, speculative_config=config(made[1], 4))
    fields = json.loads((made[1] / "config.json").read_text())
    for change in (
        {"hidden_size": 128},
        {"vocab_size": 4000},
        {"truncated_vocab_size": 400},
        {"original_lm_head": True},
        {"num_heads": 1000},
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields | change))
        with pytest.raises(ModelError, match=next(iter(change))):
            LLM(max_model_len=128, speculative_config=config(tmp_path))


def test_the_memory_plan_has_them(made):
    heads = made[0]
    with LLM(max_model_len=128, speculative_config=config(made[1])) as llm:
        plan = llm.memory_plan
    numbers = sum(weight.numel() for weight in heads.parameters())
    logits = 256 * 4096 * 4
    assert plan.draft > 2 * numbers + logits
    with LLM(max_model_len=128) as llm:
        assert llm.memory_plan.block_nbytes == plan.block_nbytes
