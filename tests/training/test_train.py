from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from training import train
from training.checkpoint import export_model, load_checkpoint, load_model
from training.corpus import Corpus
from training.data import Document, Recipe
from training.evaluate import ask, generate
from training.loop import Loop, Plan, rate_factor
from training.model import DRAFT, MAIN, Llama, ModelConfig, causal_attention, num_parameters

PLAN = Plan(steps=12, bfloat16=False)
RECIPE = Recipe(
    stories=20, requests=6, continuations=2, own_stories=2, own_requests=2, books=1, chats=20,
    drills=2, lengths=(64, 128),
)  # fmt: skip


MakeLoop = Callable[..., Loop]


@pytest.fixture
def make_loop(tiny: ModelConfig, corpus: Corpus, tokenizer: Tokenizer) -> MakeLoop:
    return partial(_make_loop, tiny, corpus, tokenizer)


def _make_loop(
    tiny: ModelConfig,
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    steps: int = 12,
    kind: str = "main",
    **more: Any,
) -> Loop:
    loop = train.language_model_loop(
        kind,
        tiny,
        corpus,
        tokenizer,
        replace(PLAN, steps=steps),
        folder / "out",
        folder / "run",
        seed=0,
        batch_tokens=256,
        **more,
    )
    loop.stream.recipe = RECIPE
    loop.stream.lengths = RECIPE.lengths
    return loop


@pytest.fixture
def quick_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the 400 questions of the card; a tiny model needs only its shape."""
    monkeypatch.setattr("training.card.accuracy", lambda model, tokenizer: {"sums": 0.5})
    monkeypatch.setattr("training.card.SAMPLES", ("Hi",))
    monkeypatch.setattr("training.card.ask", lambda *args: "Hello!")


def test_the_loss_falls(make_loop: MakeLoop, tmp_path: Path) -> None:
    loop = make_loop(tmp_path, steps=60)
    losses = [loop.train_step() for _ in range(30)]
    assert sum(losses[-5:]) / 5 < losses[0] - 1.0


@pytest.mark.usefixtures("quick_card")
def test_resume_ends_in_the_same_state(make_loop: MakeLoop, tmp_path: Path) -> None:
    straight = make_loop(tmp_path / "a")
    straight.run()

    first = make_loop(tmp_path / "b")
    first.run(until_step=5)
    torch.manual_seed(99)  # any state in between
    second = make_loop(tmp_path / "b")
    second.resume()
    assert second.step == 5
    second.run()

    assert straight.step == second.step == 12
    for (name, a), b in zip(
        straight.module.state_dict().items(), second.module.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    assert straight.history.tokens == second.history.tokens
    assert straight.stream.state == second.stream.state


@pytest.mark.usefixtures("quick_card")
def test_a_run_exports_and_writes_its_papers(make_loop: MakeLoop, tmp_path: Path) -> None:
    make_loop(tmp_path).run()
    out = tmp_path / "out"
    card = (out / "README.md").read_text()
    assert "perplexity" in card
    assert "CDLA-Sharing-1.0" in card
    assert (out / "loss.png").stat().st_size < 100_000
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    assert log[-1]["step"] == 12
    assert log[-1]["heldout"][1] > 0
    assert load_checkpoint(tmp_path / "run" / "checkpoint.pt")["step"] == 12


@pytest.mark.usefixtures("quick_card")
def test_a_run_goes_on_from_another_model(
    make_loop: MakeLoop, base_folder: Path, tmp_path: Path
) -> None:
    loop = make_loop(tmp_path, start=base_folder)
    begun = load_model(base_folder).state_dict()
    for name, weight in loop.module.state_dict().items():
        assert torch.equal(weight, begun[name]), name
    assert loop.plan.matrix_rate == PLAN.matrix_rate / 3
    loop.run()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| kind | before | now |" in card
    assert "| sums | 50 % | 50 % |" in card
    assert "went on from the weights" in card


@pytest.mark.usefixtures("quick_card")
def test_a_draft_tells_how_often_it_is_kept(
    make_loop: MakeLoop, tiny: ModelConfig, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    texts = [Document([1, 2, 3, *range(20)], [False] * 3 + [True] * 20, whole=False)]
    loop = make_loop(tmp_path, kind="draft", teacher=Llama(tiny), judged={0.0: texts})
    loop.run()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| 0 | the last one is right if those before are |" in card
    assert "before" not in card.split("## What it can do")[1]


def test_attention_by_blocks_is_the_whole_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 70, 16) for _ in range(3))
    wanted = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    for block in (16, 70, 256):
        torch.testing.assert_close(causal_attention(q, k, v, block), wanted)


def test_exported_folder_gives_transformers_the_same_logits(
    tiny: ModelConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    model = Llama(tiny)
    export_model(model, tokenizer, tmp_path)
    own = load_model(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, tiny.vocab_size, (2, 50))
    with torch.no_grad():
        torch.testing.assert_close(own(tokens), other(tokens).logits, atol=1e-5, rtol=1e-5)
    assert other.generation_config.eos_token_id == [0, 2]
    assert other.config.tie_word_embeddings
    assert transformers.AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|im_end|>"


def test_sizes_of_the_shipped_models() -> None:
    assert 3_000_000 < num_parameters(Llama(MAIN)) < 8_000_000
    assert 500_000 < num_parameters(Llama(DRAFT)) <= 1_000_000


def test_schedule_warms_up_and_comes_down() -> None:
    plan = Plan()
    rates = [rate_factor(i / 200, plan) for i in range(201)]
    top = max(range(201), key=rates.__getitem__)
    assert rates[0] < 0.05
    assert rates[top] > 0.99
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] == pytest.approx(plan.final_rate)


def test_time_budget_ends_the_run(make_loop: MakeLoop, tmp_path: Path) -> None:
    loop = make_loop(tmp_path)
    loop.plan = Plan(minutes=1.0)
    loop.history.seconds = 30.0
    assert loop.progress == 0.5
    loop.history.seconds = 90.0
    assert loop.progress == 1.0


def test_generate_is_greedy_and_stops(base_folder: Path, tokenizer: Tokenizer) -> None:
    model = load_model(base_folder)
    text = generate(model, tokenizer, "Once", limit=5)
    assert text == generate(model, tokenizer, "Once", limit=5)
    assert len(tokenizer.encode(text).ids) <= 10
    assert isinstance(ask(model, tokenizer, "Hi", limit=3), str)


def test_workers_share_a_batch(make_loop: MakeLoop, tmp_path: Path) -> None:
    grads, losses = [], []
    for workers in (1, 2):
        loop = make_loop(tmp_path)
        loop.plan = replace(PLAN, workers=workers)
        losses.append(loop._gradients(loop.stream.next()))
        grads.append(loop.module.model.embed_tokens.weight.grad.clone())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(grads[0], grads[1], atol=1e-6, rtol=1e-4)


def test_bad_gradient_is_an_error(make_loop: MakeLoop, tmp_path: Path) -> None:
    loop = make_loop(tmp_path)
    loop.loss = lambda batch: loop.module.model.norm.weight.sum() * float("nan")
    with pytest.raises(FloatingPointError, match="step 0"):
        loop.train_step()


@pytest.mark.parametrize("tied", [True, False])
def test_any_plain_llama_is_read(tmp_path: Path, tied: bool) -> None:
    """It is in several files, with the fields that its configuration omits."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        rope_theta=500.0,
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    fields = json.loads((tmp_path / "config.json").read_text())
    del fields["rms_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    ours = load_model(tmp_path)
    assert ours.config.head_dim == 8
    tokens = torch.arange(40)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "is a qwen2; give a Llama"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "scales its rotary embedding"),
        ({"attention_bias": True}, "has biases"),
    ],
)
def test_what_is_no_plain_llama_is_refused(
    base_folder: Path, tmp_path: Path, change: dict[str, object], message: str
) -> None:
    fields = json.loads((base_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, **change}))
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)
