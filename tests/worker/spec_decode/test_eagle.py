"""EAGLE heads, compared with the training tool and, for EAGLE-3, with plain torch."""

from __future__ import annotations

import functools
import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from octavo import LLM
from octavo.errors import ConfigError, ModelError
from octavo.scheduler.speculation import DraftLengths
from octavo.worker.spec_decode.eagle import EagleProposer
from tests.ranks import use_ranks
from tests.worker.spec_decode.heads import (
    GREEDY,
    SETTINGS,
    TEXTS,
    answers,
    base_model,
    record_proposals,
    save,
)
from training.heads import EagleHead
from training.model import rope_tables

KEPT = (1, 2, 2)  # of six layers


@pytest.fixture(scope="module")
def base():
    return base_model()


@pytest.fixture(scope="module")
def eagle(base, tmp_path_factory):
    head, folder = EagleHead(base.config), tmp_path_factory.mktemp("eagle")
    attention, mlp = head.layers[0].self_attn, head.layers[0].mlp
    with torch.no_grad():  # all weights must matter, which at first they do not
        mlp.down_proj.weight.normal_(std=0.02)
        for linear in (attention.v_proj, attention.o_proj):
            linear.weight.normal_(std=0.12)
        head.fc.weight[:, base.config.hidden_size :] += torch.eye(base.config.hidden_size)
    save(head, folder)

    def guess(tokens):
        """Return guessed hidden states, and the logits of the last one."""
        ids, given, drafts = torch.tensor([tokens]), base.hidden(torch.tensor([tokens[:-1]])), []
        while True:
            out = head.step(base.model.embed_tokens(ids[:, 1:]), given, [])
            drafts.append(base.logits(out[:, -1])[0])
            yield drafts[-1]
            ids = torch.cat((ids, drafts[-1].argmax().view(1, 1)), 1)
            given = torch.cat((given, out[:, -1:]), 1)

    return SimpleNamespace(folder=folder, guess=kept(guess))


@pytest.fixture(scope="module")
def eagle3(base, tmp_path_factory):
    """Return a random EAGLE-3 head, as vLLM computes it."""
    folder, config = tmp_path_factory.mktemp("eagle3"), base.config
    size, inner, own = config.hidden_size, config.intermediate_size, 1000
    query, key = config.num_attention_heads * 64, config.num_key_value_heads * 64
    shapes = {
        "fc.weight": (size, 3 * size),
        "midlayer.self_attn.q_proj.weight": (query, 2 * size),
        "midlayer.self_attn.k_proj.weight": (key, 2 * size),
        "midlayer.self_attn.v_proj.weight": (key, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, query),
        "midlayer.mlp.gate_proj.weight": (inner, size),
        "midlayer.mlp.up_proj.weight": (inner, size),
        "midlayer.mlp.down_proj.weight": (size, inner),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.post_attention_layernorm.weight": (size,),
        "norm.weight": (size,),
        "lm_head.weight": (own, size),
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {n: 0.05 * torch.randn(s, generator=generator) for n, s in shapes.items()}
    tensors = {n: t + 1 if t.ndim == 1 else t for n, t in tensors.items()}
    tensors["fc.weight"][:, :size] += torch.eye(size)
    d2t = 3 * torch.arange(own)  # its tokens are every fourth of the target's
    save_file(tensors | {"d2t": d2t, "t2d": torch.zeros(4096, dtype=torch.bool)},
              folder / "model.safetensors")  # fmt: skip
    fields = config.to_json() | {"architectures": ["LlamaForCausalLMEagle3"]}
    fields |= {"draft_vocab_size": own, "num_hidden_layers": 1, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(fields))

    w = SimpleNamespace(**{n.removesuffix(".weight").split(".")[-1]: t for n, t in tensors.items()})
    head = EagleHead(config).layers[0]  # for its attention, whose weights are replaced
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        getattr(head.self_attn, name).weight = torch.nn.Parameter(getattr(w, name))
    cos, sin = rope_tables(config, 256)

    def norm(x, weight):
        return F.rms_norm(x, (size,), weight, config.rms_norm_eps)

    def layer(embedding, hidden):
        both = torch.cat((norm(embedding, w.input_layernorm), norm(hidden, w.hidden_norm)), -1)
        x = hidden + head.self_attn(both, cos[: both.shape[1]], sin[: both.shape[1]])
        y = norm(x, w.post_attention_layernorm)
        return x + (F.silu(y @ w.gate_proj.T) * (y @ w.up_proj.T)) @ w.down_proj.T

    def guess(tokens):
        kept = hidden_states(base, tokens[:-1])
        ids, given = torch.tensor([tokens]), torch.cat([kept[i] for i in KEPT], -1) @ w.fc.T
        while True:
            out = layer(base.model.embed_tokens(ids[:, 1:]), given)
            logits = torch.full((4096,), -torch.inf)
            logits[torch.arange(own) + d2t] = norm(out[0, -1], w.norm) @ w.lm_head.T
            yield logits
            ids = torch.cat((ids, logits.argmax().view(1, 1)), 1)
            given = torch.cat((given, out[:, -1:]), 1)

    return SimpleNamespace(folder=folder, guess=kept(guess))


def kept(guess):
    """Return a function of a tuple of tokens that keeps the first guesses."""
    return functools.cache(
        torch.no_grad()(lambda tokens: list(itertools.islice(guess(list(tokens)), 3)))
    )


def hidden_states(base, tokens):
    """Return the hidden states after each of the model's layers."""
    kept, handles = [], []
    for block in base.model.layers:
        handles.append(block.register_forward_hook(lambda m, a, out: kept.append(out)))
    base.hidden(torch.tensor([tokens]))
    for handle in handles:
        handle.remove()
    return kept


@pytest.fixture(scope="module")
def expected():
    with LLM(max_model_len=128) as llm:
        return answers(llm)


@pytest.fixture(params=["eagle", "eagle3"])
def head(request):
    return request.getfixturevalue(request.param)


def config(folder, **more):
    return {"model": str(folder), "num_speculative_tokens": 3, **more}


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_answer_is_the_same(expected, head, settings, monkeypatch):
    proposals = record_proposals(monkeypatch, EagleProposer)
    with LLM(max_model_len=128, speculative_config=config(head.folder), **settings) as llm:
        assert answers(llm) == expected
        stats = llm.stats()
    assert sum(stats.num_accepted_tokens_per_pos) < stats.num_draft_tokens
    assert all(drafts for _, drafts in proposals), "the last guess is always there"
    assert stats.num_preemptions > 0 or "num_gpu_blocks_override" not in settings


@pytest.mark.parametrize("settings", [*SETTINGS, {"block_size": 8}, {"idle": True}])
def test_drafts_are_those_of_the_head_over_all_tokens(head, settings, monkeypatch):
    """Its state after earlier steps, chunks and drafts equals one pass over them."""
    settings = dict(settings)
    if settings.pop("idle", False):  # it computes nothing before the first request for drafts
        monkeypatch.setattr("octavo.worker.spec_decode.eagle._IDLE_AFTER", 0)
        monkeypatch.setattr("octavo.worker.spec_decode.eagle.MOST_LATE", 128)
    proposals = record_proposals(monkeypatch, EagleProposer)
    speculative = config(head.folder, method="eagle")
    with LLM(max_model_len=128, dtype="float32", speculative_config=speculative, **settings) as llm:
        whole = {"prompt_token_ids": list(range(100, 132))}
        for _ in range(2):
            llm.generate([*TEXTS, whole], GREEDY, use_tqdm=False)
    assert len(proposals) > 10
    for tokens, drafts in proposals:
        assert 0 < len(drafts) <= 3
        if len(tokens) % 3:  # one in three, the same with all settings
            continue
        for logits, draft in zip(head.guess(tuple(tokens)), drafts, strict=False):
            assert logits[draft] >= logits.max() - 1e-4 * logits.max().abs()
            if logits.argmax() != draft:
                break


def test_drafts_after_a_pause_may_be_worse_and_answers_are_not(eagle, expected, monkeypatch):
    monkeypatch.setattr("octavo.worker.spec_decode.eagle._IDLE_AFTER", 0)
    monkeypatch.setattr("octavo.worker.spec_decode.eagle.MOST_LATE", 2)
    monkeypatch.setattr(DraftLengths, "choose", lambda self, num_reqs: next(turns))
    turns = itertools.cycle((0, 0, 0, 0, 3))
    with LLM(max_model_len=128, speculative_config=config(eagle.folder)) as llm:
        assert answers(llm) == expected
        assert llm.stats().num_draft_tokens > 0


def test_rank_0_alone_drafts(expected, head, monkeypatch):
    use_ranks(monkeypatch, 2)
    with LLM(max_model_len=128, speculative_config=config(head.folder)) as llm:
        assert answers(llm) == expected
        assert llm.stats().num_draft_tokens > 0


def test_ranks_that_divide_the_rows_of_norms(expected, eagle, eagle3, monkeypatch):
    use_ranks(monkeypatch, 2, splits_rows=True)
    with LLM(max_model_len=128, speculative_config=config(eagle.folder)) as llm:
        assert answers(llm) == expected
        assert llm.stats().num_draft_tokens > 0
    with pytest.raises(ConfigError, match="enable_sequence_parallel is not supported with a dr"):
        LLM(max_model_len=128, speculative_config=config(eagle3.folder))


def test_rejection_knows_what_drafts_were_drawn_from(head):
    speculative = config(head.folder, acceptance="rejection")
    with LLM(max_model_len=128, speculative_config=speculative) as llm:
        assert all(len(tokens) == 20 for tokens in answers(llm))


def test_drafts_end_where_the_head_s_context_does(eagle, expected, tmp_path, monkeypatch):
    fields = json.loads((eagle.folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"max_position_embeddings": 24}))
    (tmp_path / "model.safetensors").symlink_to(eagle.folder / "model.safetensors")
    proposals = record_proposals(monkeypatch, EagleProposer)
    with LLM(max_model_len=128, speculative_config=config(tmp_path)) as llm:
        assert answers(llm) == expected
    drafted = [len(tokens) + len(drafts) for tokens, drafts in proposals if drafts]
    assert max(drafted) == 26  # the last guess is of the token after the last position


def test_heads_that_do_not_fit_are_refused(eagle, eagle3, tmp_path):
    for head, changes in (
        (eagle, [{"hidden_size": 128}, {"vocab_size": 4000}, {"num_hidden_layers": 2}]),
        (eagle3, [{"draft_vocab_size": 5000}, {"norm_before_residual": True},
                  {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}]),
    ):  # fmt: skip
        fields = json.loads((head.folder / "config.json").read_text())
        for change in changes:
            (tmp_path / "config.json").write_text(json.dumps(fields | change))
            with pytest.raises(ModelError, match=next(iter(change))):
                LLM(max_model_len=128, speculative_config=config(tmp_path))
    tensors = load_file(eagle3.folder / "model.safetensors")
    for d2t, message in (
        (None, "lacks the tensor d2t"),
        (torch.arange(999), "1000 integers"),
        (torch.full((1000,), 3097), "beyond 4096"),
    ):
        (tmp_path / "config.json").write_text((eagle3.folder / "config.json").read_text())
        changed = {k: v for k, v in tensors.items() if k != "d2t"}
        save_file(changed if d2t is None else changed | {"d2t": d2t},
                  tmp_path / "model.safetensors")  # fmt: skip
        with pytest.raises(ModelError, match=message):
            LLM(max_model_len=128, speculative_config=config(tmp_path))
    with pytest.raises(ConfigError, match="only on device=cpu"):
        LLM(max_model_len=128, attention_backend="triton",
            speculative_config=config(eagle.folder))  # fmt: skip


def test_the_memory_plan_has_them(head):
    numbers = sum(t.numel() for t in load_file(head.folder / "model.safetensors").values())
    with LLM(max_model_len=128) as llm:
        plain = llm.memory_plan
    with LLM(max_model_len=128, speculative_config=config(head.folder)) as llm:
        plan = llm.memory_plan
    assert plan.nbytes("draft model") > 2 * 0.9 * numbers + 256 * 4096 * 4
    assert plan.block_nbytes == plain.block_nbytes * 7 // 6


def test_what_is_kept_is_copied_with_the_target_s_blocks(head, monkeypatch):
    copied, copy_blocks = [], EagleProposer.copy_blocks

    def spy(self, pairs):
        copy_blocks(self, pairs)
        for source, to in pairs:
            for memory in self._steps._memory:
                blocks = memory.numpy()
                assert blocks[source].any()
                assert (blocks[source] == blocks[to]).all()
                copied.append(to)

    monkeypatch.setattr(EagleProposer, "copy_blocks", spy)
    whole = {"prompt_token_ids": list(range(100, 132))}
    settings = {"max_num_batched_tokens": 16, "max_num_seqs": 8}  # the second arrives steps later
    with LLM(max_model_len=128, speculative_config=config(head.folder), **settings) as llm:
        llm.generate([whole, whole], GREEDY, use_tqdm=False)
    assert copied
