"""MTP layers of hybrid models, compared with torch."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import ModelConfig
from octavo.errors import ConfigError, ModelError
from octavo.models.registry import read_mtp_spec
from octavo.worker.spec_decode.eagle import EagleProposer
from tests.models.cases import CASES
from tests.models.harness import make_hf
from tests.ranks import use_ranks
from tests.worker.spec_decode.heads import record_proposals
from tests.worker.spec_decode.mtp_model import FIELDS, SIZES, make

PROMPTS = [
    {"prompt_token_ids": [(7 * i + 5 * j + j * j) % 272 for j in range(count)]}
    for i, count in enumerate((5, 1, 64, 90))
]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(
    temperature=0.9, seed=3, n=2, max_tokens=20, ignore_eos=True, repetition_penalty=1.1
)
MTP = {"method": "mtp", "num_speculative_tokens": 3}
SETTINGS = [
    {},
    {"max_num_batched_tokens": 16, "max_num_seqs": 8},
    {"num_gpu_blocks_override": 18, "max_num_seqs": 8, "enforce_eager": True},
    {"distributed_executor_backend": "mp"},
    {"quantization": "int8", "kv_cache_dtype": "int8"},
]
"""Prompts in chunks, and preempted requests, among others."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return the models with MTP layers, by name."""
    return {name: make(name, tmp_path_factory.mktemp("mtp")) for name in FIELDS}


@pytest.fixture
def engine(models):
    """Return a function that starts an engine with Qwen3.5, or another model of `FIELDS`."""

    def start(name="qwen3.5", **settings):
        settings = {"max_model_len": 128, "skip_tokenizer_init": True} | settings
        return LLM(str(models[name].folder), **settings)

    return start


def answers(llm):
    """Return greedy and sampled answers, twice: then prefixes are known."""
    params = [GREEDY] * len(PROMPTS) + [SAMPLED] * len(PROMPTS)
    outputs = [llm.generate(PROMPTS * 2, params, use_tqdm=False) for _ in range(2)]
    return [
        (tuple(a.token_ids), str(a.logprobs))
        for output in outputs
        for o in output
        for a in o.outputs
    ]


@pytest.fixture(scope="module")
def expected(models):
    """Return the answers without drafts, by the settings that change them."""
    found = {}

    def get(**settings):
        settings = settings if "quantization" in settings else {}
        if (key := str(settings)) not in found:
            with LLM(str(models["qwen3.5"].folder), max_model_len=128, skip_tokenizer_init=True,
                     enable_prefix_caching=False, max_num_seqs=4, **settings) as llm:  # fmt: skip
                found[key] = answers(llm)
        return found[key]

    return get


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_answer_is_the_same(engine, expected, settings, monkeypatch):
    record_proposals(monkeypatch, EagleProposer)
    with engine(speculative_config=MTP, **settings) as llm:
        assert answers(llm) == expected(**settings)
        stats = llm.stats()
        assert stats.prefix_cache_hits > 0
        llm._client.core.check_integrity()
    assert 0 < sum(stats.num_accepted_tokens_per_pos) < stats.num_draft_tokens
    assert stats.num_preemptions > 0 or "num_gpu_blocks_override" not in settings


@pytest.mark.parametrize(
    ("name", "settings"),
    [("qwen3-next", {}), *(("qwen3.5", settings) for settings in [*SETTINGS[:3], {"idle": True}])],
    ids=str,
)
def test_drafts_are_those_of_the_layer_over_all_tokens(models, engine, name, settings, monkeypatch):
    """Its state after earlier steps, chunks and drafts equals one pass over them."""
    settings = dict(settings)
    if settings.pop("idle", False):  # it computes nothing before the first request for drafts
        monkeypatch.setattr("octavo.worker.spec_decode.eagle._IDLE_AFTER", 0)
        monkeypatch.setattr("octavo.worker.spec_decode.eagle.MOST_LATE", 128)
    proposals = record_proposals(monkeypatch, EagleProposer)
    with engine(name, dtype="float32", speculative_config=MTP, **settings) as llm:
        for _ in range(2):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert len(proposals) > 100
    agreed = 0
    for tokens, drafts in proposals[::6]:
        assert 0 < len(drafts) <= 3
        for logits, draft in zip(models[name].guess(tokens), drafts, strict=False):
            assert logits[draft] >= logits.max() - 1e-4 * logits.max().abs()
            if logits.argmax() != draft:
                break
            agreed += 1
    assert agreed > 30


@pytest.mark.parametrize("splits_rows", [False, True])
def test_rank_0_alone_drafts(engine, expected, splits_rows, monkeypatch):
    use_ranks(monkeypatch, 2, splits_rows=splits_rows)
    record_proposals(monkeypatch, EagleProposer)
    with engine(speculative_config=MTP) as llm:
        assert answers(llm) == expected()
        assert sum(llm.stats().num_accepted_tokens_per_pos) > 0


def test_rejection_knows_what_drafts_were_drawn_from(engine):
    with engine(speculative_config=MTP | {"acceptance": "rejection"}) as llm:
        assert all(len(tokens) == 20 for tokens, _ in answers(llm))


def test_the_memory_plan_has_it(models, engine):
    numbers = sum(p.numel() for p in models["qwen3.5"].layer.parameters())
    with engine() as llm:
        plain = llm.memory_plan
    with engine(speculative_config=MTP) as llm:
        plan = llm.memory_plan
    assert plan.nbytes("draft model") > 4 * 0.9 * numbers + 256 * 272 * 4
    assert plan.block_nbytes == 2 * plain.block_nbytes


def test_models_without_an_mtp_layer_are_refused(models, tmp_path):
    def refuse(message, error=ConfigError, **settings):
        settings = {"speculative_config": MTP, "skip_tokenizer_init": True} | settings
        with pytest.raises(error, match=message):
            LLM(str(tmp_path), max_model_len=128, **settings)

    make_hf(*CASES["llama"][:1], **CASES["llama"][1]).save_pretrained(tmp_path)
    refuse(r"method=mtp needs an MTP layer, and Octavo finds none in .*\(Qwen3_5ForCausalLM, ")

    source = models["qwen3.5"].folder
    fields = json.loads((source / "config.json").read_text())
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    layer = load_file(source / "mtp.safetensors")
    for changes, missing, error, message in (
        ({"mtp_num_hidden_layers": 0}, "", ConfigError, "needs an MTP layer, and"),
        ({"mtp_num_hidden_layers": 2}, "", ModelError, "mtp_num_hidden_layers=2.*one MTP layer is"),
        ({"mtp_use_dedicated_embeddings": True}, "", ModelError, "must share the embedding"),
        ({}, "mtp.norm.weight", ConfigError, "lacks 1 tensors of Qwen3_5MTP: mtp.norm.weight"),
        ({}, "mtp.", ConfigError, r"lacks 15 tensors of Qwen3_5MTP: mtp\.fc\.weight, .*another me"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(fields | changes))
        kept = {n: x for n, x in layer.items() if not (missing and n.startswith(missing))}
        save_file(kept, tmp_path / "mtp.safetensors")
        refuse(message, error)
    save_file(layer | {"mtp.layers.1.x": torch.zeros(1)}, tmp_path / "mtp.safetensors")
    refuse(r"holds 1 tensors that Qwen3_5MTP .*mtp\.layers\.1\.x")
    LLM(str(tmp_path), max_model_len=128, skip_tokenizer_init=True).shutdown()  # without drafts


def test_the_layer_of_a_model_with_a_tower(models, tmp_path):
    """Its sizes are in text_config."""
    fields = json.loads((models["qwen3.5"].folder / "config.json").read_text())
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5"}
    (tmp_path / "config.json").write_text(json.dumps(whole | {"text_config": fields}))
    plain, found = (
        read_mtp_spec(open_checkpoint(folder, "dummy"), ModelConfig())
        for folder in (models["qwen3.5"].folder, tmp_path)
    )
    assert plain is not None
    assert found == plain
    assert SIZES["vocab_size"] == found.vocab_size
