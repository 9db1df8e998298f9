"""Random shapes of every family with recurrent states, computed in all the ways that engines have.

Each family has three shapes. The first one is divided between two ranks, the second one between two
stages, and the third one runs in engines, which preempt, draft, and start from every kind of
snapshot.
"""

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import OctavoError
from octavo.kernels.native import NativeOps
from octavo.kv_cache import states
from octavo.models.loader import load_model
from octavo.models.spec import divide_layers
from octavo.models.state_cache import StateCache
from octavo.scheduler.speculation import DraftLengths
from octavo.system.distributed import Rank
from tests.drafts import Drafter
from tests.e2e.fuzz_models import STATEFUL, draw_model
from tests.models.harness import (
    Runner,
    assert_same_as_hf,
    generate,
    load,
    make_hf,
    make_prompts,
    save_config,
    spec_of,
)
from tests.models.test_split import TOKENS, run, run_ranks, script

VOCAB, END = 203, 2
SIZES = {"vocab_size": VOCAB, "max_position_embeddings": 128, "eos_token_id": END}
# Factors of the weights of families that otherwise enlarge the errors of float32, see `make_hf`
FACTORS = {"FalconMamba": 2.0, "KimiLinear": 0.8, "Mamba": 0.8}
families = pytest.mark.parametrize("family", STATEFUL)


@dataclass
class Shape:
    folder: Path
    hf_model: Any
    has_attention: bool


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function of a family that returns its shapes."""

    @cache
    def make(family: str) -> list[Shape]:
        rng, made, without_attention = random.Random(family), list[Shape](), 0
        while len(made) < 3:
            folder = tmp_path_factory.mktemp(family)
            architecture, config = draw_model(rng, family)
            if config.get("hidden_size", 200) > 150:
                continue
            try:
                spec = save_config(folder, architecture, config | SIZES)
                spec.split(Rank(0, 2))
            except OctavoError:
                continue
            kinds = {isinstance(cache, StateCache) for cache in spec.caches}
            if len(spec.layers) < 2 or True not in kinds:
                continue
            without_attention += False not in kinds
            if False in kinds or without_attention > 20:  # no shape of some families has attention
                hf_model = make_hf(architecture, factor=FACTORS.get(family, 1.0), **config | SIZES)
                hf_model.save_pretrained(folder)
                made.append(Shape(folder, hf_model, False in kinds))
        return made

    return make


@families
@pytest.mark.parametrize("number", range(3))
def test_parity_and_chunks(family: str, number: int, shapes: Any) -> None:
    """Some prompts are shorter than the convolution."""
    shape = shapes(family)[number]
    model, prompts = load(shape.folder), make_prompts(VOCAB, (1, 2, 3, 33, 18))
    generated = generate(model, prompts, 24)
    assert_same_as_hf(shape.hf_model, prompts, generated, atol=3e-4)
    assert len({token for tokens in generated.tokens for token in tokens}) > 5
    chunked = generate(model, prompts, 8, chunk=2 + number)
    for some, all_ in zip(chunked.logits, generated.logits, strict=True):
        assert torch.equal(some, all_[:8])


@families
def test_two_ranks(family: str, shapes: Any) -> None:
    folder = shapes(family)[0].folder
    expected = run(load(folder), lambda: None)
    got = run_ranks(folder, 2, "float32", None)
    assert len(got) == len(expected) > 8
    assert all(map(torch.equal, got, expected))


@families
def test_two_stages(family: str, shapes: Any) -> None:
    folder = shapes(family)[1].folder
    spec, checkpoint, ops = spec_of(folder), open_checkpoint(folder), NativeOps()
    stages = [
        Runner(load_model(spec.stage(*part), checkpoint, dtype="float32", ops=ops), 2, TOKENS)
        for part in divide_layers(spec, 2, None)
    ]
    found: list[Tensor] = []
    for scheduled in script():
        stages[0].step(scheduled)
        stages[1].received = stages[0].handed
        found += [logits.clone() for logits in stages[1].step(scheduled).values()]
    expected = run(load(folder), lambda: None)
    assert len(found) == len(expected) > 8
    assert all(map(torch.equal, found, expected))


def engine(shape: Shape, **settings: Any) -> LLM:
    sizes = {"max_model_len": 128, "block_size": 8, "max_num_seqs": 4, "num_threads": 1}
    return LLM(str(shape.folder), dtype="float32", skip_tokenizer_init=True, **sizes | settings)


def ask(llm: LLM, prompts: list[list[int]], count: int) -> list[Any]:
    """Return the answers' tokens and logprobs, and the numbers of cached tokens of the prompts."""
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=1)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(inputs, params, use_tqdm=False)
    answers = [(list(o.outputs[0].token_ids), str(o.outputs[0].logprobs)) for o in outputs]
    return [answers, [o.num_cached_tokens for o in outputs]]


@families
def test_preempted_with_drafts(family: str, shapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are n-grams of the prompts, then right ones and wrong ones."""
    monkeypatch.setattr(DraftLengths, "choose", lambda lengths, num_reqs: lengths.most)
    shape, prompts = shapes(family)[2], make_prompts(VOCAB, (40, 41, 42, 43))
    with engine(shape, enable_prefix_caching=False, max_num_seqs=1) as llm:
        expected, _ = ask(llm, prompts, 28)
    few = {"num_gpu_blocks_override": 20, "long_prefill_token_threshold": 7}
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    for known in (False, True):
        if known:
            drafter = Drafter(monkeypatch, [tokens for tokens, _ in expected])
        with engine(shape, speculative_config=drafts, **few) as llm:
            assert ask(llm, prompts, 28)[0] == expected
            stats = llm.stats()
            assert stats.num_preemptions > 0 or not shape.has_attention
            assert stats.num_draft_tokens > 0
    assert drafter.num_tokens > 1.2 * drafter.num_steps


@families
def test_hits_of_every_kind_of_snapshot(
    family: str, shapes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models without attention do not note where prompts part: they are nearer to their ends."""
    monkeypatch.setattr(states, "ANSWER_SPACING", 16)
    monkeypatch.setattr(states, "_FIRST_DISTANCE", 32)
    shape = shapes(family)[2]
    text = make_prompts(VOCAB, (20,) * 12)
    system, long = [*text[0], *text[1][:3], END], [*text[2], *text[3], *text[4], *text[5]]
    turns = [*text[6], END, *text[7][:18], END]
    with engine(shape, enable_prefix_caching=False) as plain, engine(shape) as llm:
        whole = [*system, *text[8]]
        (answer, _), *_ = ask(llm, [whole], 24)[0]
        kinds = {
            "end of the prompt": ([whole], whole, 40),
            "end of the first message": ([], [*system, *text[9]], 24),
            "end of a last message": ([[*turns, *text[8][:6]]], [*turns, *text[9]], 40),
            "place where prompts part": (
                [[*text[10], *text[0]], [*text[10], *text[1]]],
                [*text[10], *text[2]],
                16,
            ),
            "distance from the end": ([long], [*long[:60], *text[9]], 48),
            "answer": ([], [*whole, *answer, *text[11]], 64),
        }
        for kind, (before, prompt, known) in kinds.items():
            for other in before:
                ask(llm, [other], 1)
            answers, cached = ask(llm, [prompt], 6)
            assert cached == [known], kind
            assert answers == ask(plain, [prompt], 6)[0], kind
        llm._client.core.check_integrity()
