from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional as F

from training import train
from training.checkpoint import load_model
from training.corpus import Corpus
from training.data import Document
from training.heads import (
    EagleHead,
    MedusaHeads,
    _SoftLoss,
    acceptance,
    eagle_loss,
    fit_linear,
    medusa_loss,
)
from training.loop import Loop, Plan
from training.own_text import OwnText


@pytest.fixture(scope="session")
def own_text(corpus: Corpus, tokenizer: Tokenizer) -> OwnText:
    """Return stories in place of the model's text: their first two tokens do not count."""

    def document(story: str) -> Document:
        ids = tokenizer.encode(story).ids
        return Document(ids, [False] * 2 + [True] * (len(ids) - 2), whole=False)

    heldout = [document(story) for story in corpus.heldout]
    return OwnText([document(story) for story in corpus.stories], {0.0: heldout})


def make_loop(kind: str, base: Path, text: OwnText, folder: Path, steps: int = 4) -> Loop:
    plan = Plan(steps=steps, bfloat16=False)
    loop = train.head_loop(kind, base, text, plan, folder / "out", folder / "run", 0, 256)
    loop.stream.lengths = (64,)
    return loop


@pytest.mark.parametrize(
    ("kind", "names", "architecture"),
    [
        ("eagle", {"fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight",
                   "layers.0.post_attention_layernorm.weight"}, "EagleLlamaForCausalLM"),
        ("medusa", {"blocks.0.layers.0.weight", "blocks.2.layers.0.weight", "lm_heads.2.weight"},
         "MedusaModel"),
    ],
)  # fmt: skip
def test_heads_train_and_save(
    kind: str,
    names: set[str],
    architecture: str,
    base_folder: Path,
    own_text: OwnText,
    tmp_path: Path,
) -> None:
    loop = make_loop(kind, base_folder, own_text, tmp_path)
    before = {n: p.clone() for n, p in loop.module.state_dict().items()}
    loop.run()
    out = tmp_path / "out"
    tensors = load_file(out / "model.safetensors")
    assert names <= set(tensors)
    assert "layers.0.input_layernorm.weight" not in tensors
    assert json.loads((out / "config.json").read_text())["architectures"] == [architecture]
    assert (out / "README.md").exists()
    assert set(tensors) == set(before)
    for name, tensor in tensors.items():
        assert tensor.dtype == torch.bfloat16
        assert not torch.equal(loop.module.state_dict()[name], before[name]), name


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_the_loss_of_a_head_falls(
    kind: str, base_folder: Path, own_text: OwnText, tmp_path: Path
) -> None:
    loop = make_loop(kind, base_folder, own_text, tmp_path, steps=30)
    with torch.no_grad():  # sharper than an untrained model, so that there is something to learn
        model = load_model(base_folder)
        model.model.embed_tokens.weight.mul_(8)
    make = eagle_loss if kind == "eagle" else medusa_loss
    loop.loss = make(loop.module, model)
    losses = [loop.train_step() for _ in range(25)]
    assert sum(losses[-5:]) < sum(losses[:5])


def test_eagle_drafts_from_each_position_as_if_it_were_alone(base_folder: Path) -> None:
    """Each step sees only the positions up to the one that drafts."""
    config = load_model(base_folder).config
    torch.manual_seed(0)
    head, steps, at = EagleHead(config), 3, 4
    embedding, hidden = torch.randn(2, 1, 9, config.hidden_size)
    with torch.no_grad():
        guesses = head.draft(embedding, hidden, steps)
        states = hidden[:, : at + 1]
        for k, guess in enumerate(guesses):
            assert guess.shape == (1, 9 - steps, config.hidden_size)
            out = head.step(embedding[:, 1 : at + k + 2], states, [])
            torch.testing.assert_close(guess[:, at], out[:, -1], atol=1e-5, rtol=1e-5)
            states = torch.cat((states, out[:, -1:]), dim=1)


def test_eagle_starts_with_the_best_linear_guess(base_folder: Path, own_text: OwnText) -> None:
    """A little more or less of it guesses worse; one that sees nothing is far worse."""
    base = load_model(base_folder)
    head = EagleHead(base.config)
    fit_linear(head, base, own_text.train)
    best = head.fc.weight.clone()

    def error(weight: torch.Tensor) -> float:
        total = 0.0
        with torch.no_grad():
            head.fc.weight.copy_(weight)
            for text in own_text.train:
                tokens = torch.tensor([text.ids])
                hidden, embedding = base.hidden(tokens), base.model.embed_tokens(tokens)
                guess = head.step(embedding[:, 1:], hidden[:, :-1], [])
                total += (guess - hidden[:, 1:]).square().sum().item()
        return total

    assert error(best) < min(error(best * 0.9), error(best * 1.1))
    assert error(best) < 0.5 * error(torch.zeros_like(best))


def test_medusa_starts_as_the_lm_head(base_folder: Path) -> None:
    base = load_model(base_folder)
    hidden = torch.randn(1, 9, base.config.hidden_size)
    with torch.no_grad():
        for logits in MedusaHeads(base)(hidden):
            torch.testing.assert_close(logits, base.logits(hidden))


def test_the_loss_is_torchs() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 11, requires_grad=True)
    wanted = torch.randn(5, 11).softmax(-1)
    ours, theirs = (_SoftLoss.apply(logits, wanted), F.cross_entropy(logits, wanted))
    torch.testing.assert_close(ours, theirs)
    (2 * ours).backward()
    torch.testing.assert_close(logits.grad, 2 * torch.autograd.grad(theirs, logits)[0])


def test_acceptance(base_folder: Path) -> None:
    """Heads that equal the LM head are right where the model repeats its first choice."""
    base = load_model(base_folder)
    with torch.no_grad():
        ids = [1, 2, 3]
        for _ in range(20):
            ids.append(int(base(torch.tensor([ids]))[0, -1].argmax()))
        choices = base(torch.tensor([ids]))[0].argmax(-1).tolist()
    text = Document(ids, [False] * 3 + [True] * 20, whole=False)
    rates, kept = acceptance(MedusaHeads(base, 2), base, [text], 2)
    starts = range(2, len(ids) - 3)  # from the position of the first generated token
    first = [choices[t] == ids[t + 2] for t in starts]
    both = [f and choices[t] == ids[t + 3] for f, t in zip(first, starts, strict=True)]
    assert kept == pytest.approx([sum(first) / len(first), (sum(first) + sum(both)) / len(first)])
    assert rates == pytest.approx([sum(first) / len(first), sum(both) / max(sum(first), 1)])


def test_model_goes_on_from_beginnings(base_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    path = tmp_path / "text.jsonl"
    text = train.own_text(base_folder, corpus, path, seed=0, tokens=2000)
    assert sum(sum(d.counts) for d in text.train) >= 2000
    assert set(text.heldout) == {0.0, 0.8}
    assert all(len(texts) == len(corpus.heldout) for texts in text.heldout.values())
    model = load_model(base_folder)
    greedy = text.heldout[0.0][0]
    begun = greedy.counts.index(True)
    with torch.no_grad():
        choices = model(torch.tensor([greedy.ids]))[0].argmax(-1).tolist()
    assert choices[begun - 1 : begun + 9] == greedy.ids[begun : begun + 10]
    # It is read back, not written again; another model's text is rejected.
    assert train.own_text(base_folder, corpus, path, seed=0) == text
    with pytest.raises(ValueError, match="was written by"):
        train.own_text(tmp_path, corpus, path, seed=0)


def test_other_base_needs_a_folder_to_write_to(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        train.parse_args(["eagle", "--base", "elsewhere"])
    assert "--out" in capsys.readouterr().err
