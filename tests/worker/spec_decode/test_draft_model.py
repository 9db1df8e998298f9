"""Draft model that is the target itself: it is always right if its state of the tokens is."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.scheduler.speculation import DraftLengths
from octavo.worker.spec_decode.draft_steps import DraftSteps
from tests.models.cases import CASES
from tests.models.harness import make_hf

LENGTHS = (90, 3, 48)  # the last one fills its blocks: requests that share them get copies
PROMPTS = [
    {"prompt_token_ids": np.random.default_rng(i).integers(3, 4000, n).tolist()}
    for i, n in enumerate(LENGTHS)
]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_k=50, seed=3, n=2, max_tokens=24, ignore_eos=True)
TARGET = {"model": "octavo/stories", "num_speculative_tokens": 3}


@pytest.fixture(autouse=True)
def always_all(monkeypatch):
    """Make the maximum number of drafts, even if they do not pay."""
    monkeypatch.setattr(DraftLengths, "choose", lambda self, num_reqs: self.most)


def answers(llm, prompts=PROMPTS):
    outputs = llm.generate(prompts * 2, [GREEDY] * len(prompts) + [SAMPLED] * len(prompts),
                           use_tqdm=False)  # fmt: skip
    return [answer.token_ids for output in outputs for answer in output.outputs]


@pytest.fixture(scope="module")
def expected():
    with LLM(max_model_len=128) as llm:
        return answers(llm)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": False, "enforce_eager": True},
        # Long prompts take many steps of the target, and of the draft model.
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        # The blocks are too few for all requests: some are preempted.
        {"num_gpu_blocks_override": 14, "max_num_seqs": 8},
        {"num_gpu_blocks_override": 14, "enable_prefix_caching": False},
        {"kv_cache_dtype": "int8", "quantization": "int8"},
    ],
)
def test_the_target_as_its_own_draft_model_is_always_right(expected, settings):
    with LLM(max_model_len=128, speculative_config=TARGET, **settings) as llm:
        for _ in range(2):  # the second time prefixes are known
            got = answers(llm)
            assert "quantization" in settings or got == expected
        stats = llm.stats()
        assert 0 < sum(stats.num_accepted_tokens_per_pos) == stats.num_draft_tokens
        assert stats.num_preemptions > 0 or "num_gpu_blocks_override" not in settings


@pytest.fixture
def computed(monkeypatch):
    """Return positions and numbers of tokens that draft models compute."""
    calls, gather = [], DraftSteps.gather

    def spy(self, rows, starts, counts, wanted):
        calls.extend(zip(starts.tolist(), counts.tolist(), strict=True))
        return gather(self, rows, starts, counts, wanted)

    monkeypatch.setattr(DraftSteps, "gather", spy)
    return calls


def test_shared_blocks_are_computed_once_and_those_without_drafts_when_needed(computed):
    prompt, one = PROMPTS[0], SamplingParams(temperature=0, max_tokens=1)
    with LLM(max_model_len=128, speculative_config=TARGET) as llm:
        llm.generate(prompt, one, use_tqdm=False)
        assert computed == [], "nobody asked for drafts"
        for start in (0, 80):  # the second time five blocks are known
            computed.clear()
            llm.generate(prompt, GREEDY, use_tqdm=False)
            assert computed[0] == (start, 91 - start)
        # Blocks that other requests have used since do not count as computed.
        llm.generate(PROMPTS[2], one, use_tqdm=False)
        computed.clear()
        llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)
        assert computed[0][0] == 0
        stats = llm.stats()
        assert sum(stats.num_accepted_tokens_per_pos) == stats.num_draft_tokens


def test_long_prompts_hold_up_nobody(computed):
    """The draft model computes missed tokens in portions of a step."""
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 128}
    with LLM(speculative_config=TARGET, **settings) as llm:
        llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert computed[:5] == [(16 * i, 16) for i in range(5)]
    assert max(count for _, count in computed) == 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a tiny Llama, and models that draft for it, or must not."""
    architecture, config = CASES["llama"]
    variants = {
        "target": {},
        "short": {"max_position_embeddings": 32},
        "other_vocabulary": {"vocab_size": 60},
        "narrow": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    }
    base = tmp_path_factory.mktemp("models")
    made = {}
    for name, fields in variants.items():
        made[name] = str(base / name)
        make_hf(architecture, **config | fields).save_pretrained(made[name])
    made["windows"] = str(base / "windows")
    architecture, config = CASES["mistral"]
    make_hf(architecture, **config).save_pretrained(made["windows"])
    return SimpleNamespace(**made)


def tiny(model, draft, **settings):
    config = {"model": draft, "num_speculative_tokens": 4}
    plain = {"skip_tokenizer_init": True, "max_num_seqs": 4, "max_model_len": 60}
    return LLM(model, speculative_config=draft and config, **plain, **settings)


def greedy_and_sampled(llm):
    prompts = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": list(range(3, 23))}]
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, detokenize=False)
    sampled = SamplingParams(seed=1, max_tokens=30, ignore_eos=True, detokenize=False)
    return [
        [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        for params in (greedy, sampled)
    ]


@pytest.fixture(scope="module")
def without_drafts(folders):
    with tiny(folders.target, None) as llm:
        return greedy_and_sampled(llm)


@pytest.mark.parametrize(
    ("draft", "acceptance"),
    [
        ("narrow", "exact"),
        ("short", "exact"),
        ("windows", "exact"),
        ("narrow", "rejection"),
        ("short", "typical"),
    ],
)
def test_drafts_of_another_model(folders, without_drafts, draft, acceptance):
    config = {"model": getattr(folders, draft), "acceptance": acceptance}
    with LLM(
        folders.target,
        speculative_config=config,
        skip_tokenizer_init=True,
        max_num_seqs=4,
        max_model_len=60,
    ) as llm:
        got = greedy_and_sampled(llm)
        assert llm.stats().num_draft_tokens > 0
    assert got[0] == without_drafts[0]
    assert got[1] == without_drafts[1] or acceptance != "exact"


def test_what_does_not_go_together_is_refused(folders):
    with pytest.raises(ConfigError, match="60 tokens in its vocabulary"):
        tiny(folders.target, folders.other_vocabulary)
    with pytest.raises(ConfigError, match="see only near tokens"):
        tiny(folders.windows, folders.target)
    with pytest.raises(ConfigError, match="only on device=cpu"):
        tiny(folders.target, folders.narrow, attention_backend="triton")


def test_the_memory_plan_has_it(folders):
    with tiny(folders.target, None) as llm:
        plain = llm.memory_plan
    with tiny(folders.target, folders.target) as llm:
        plan = llm.memory_plan
    assert plan.block_nbytes == 2 * plain.block_nbytes
    assert plan.nbytes("draft model") > plain.nbytes("weights")
    assert plan.steady >= plan.nbytes("draft model") + plan.nbytes("weights") + plan.kv_cache
    assert "draft model" in plan.report()
    assert "draft model" not in plain.report()
