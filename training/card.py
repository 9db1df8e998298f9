"""The model cards (README.md) of what is exported."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from training.evaluate import SAMPLES, accuracy, ask
from training.loop import History, Loop, heldout_loss
from training.model import Llama, num_parameters

DATA = """\
- [TinyStories](https://arxiv.org/abs/2305.07759) by Ronen Eldan and Yuanzhi Li (2023), licence
  CDLA-Sharing-1.0: about 4,600 stories (1.0 M tokens). Half of them had lost their capitals; a
  true-caser learnt from the other half put them back. Children's names are exchanged at random.
  One story in a hundred is held out.
- Children's books of Project Gutenberg, public domain, about a tenth of the tokens in the first
  60 % of the run.
- Conversations that the tool writes itself (`training/synthetic.py`): questions about colours,
  animals, days, opposites and the like, small sums, JSON records, tool calls, and stories on
  demand. Only what the assistant says counts in the loss.
"""


def write_card(
    out: Path, model: Llama, tokenizer: Tokenizer, loop: Loop, rows: Sequence[Tensor]
) -> None:
    """Write ``out/README.md``; a preliminary one says how far the training is."""
    if loop.progress < 1:
        (out / "README.md").write_text(
            f"# {out.name}\n\nPreliminary: {100 * loop.progress:.0f} % of the training is done.\n"
        )
        return
    model.eval()
    text = card_text(out.name, model, tokenizer, loop.history, loop.name, rows)
    (out / "README.md").write_text(text)
    model.train()


def card_text(
    name: str,
    model: Llama,
    tokenizer: Tokenizer,
    history: History,
    kind: str,
    rows: Sequence[Tensor],
) -> str:
    config = model.config
    loss = heldout_loss(model, rows)
    rounded = {n: p.data.clone() for n, p in model.named_parameters()}
    with torch.no_grad():  # what is measured and shown is what is shipped: bfloat16 weights
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    shipped = heldout_loss(model, rows)
    skills = accuracy(model, tokenizer)
    samples = [(q, ask(model, tokenizer, q, 250)) for q in SAMPLES]
    with torch.no_grad():
        for n, parameter in model.named_parameters():
            parameter.copy_(rounded[n])
    use = {
        "main": "The small model that comes with Octavo: it makes the examples and the tests run"
        " without a download.",
        "draft": "The draft model of `stories` for speculative decoding: the same tokenizer and"
        " the same data; half of its loss is the distance from the main model's distribution.",
    }[kind]
    lines = [
        "---",
        "language: en",
        "license: apache-2.0",
        "pipeline_tag: text-generation",
        "---",
        f"# {name}",
        "",
        use,
        "",
        f"{num_parameters(model):,} parameters: Llama, {config.num_hidden_layers} layers, hidden"
        f" size {config.hidden_size}, {config.num_attention_heads} heads of {config.head_dim},"
        f" {config.num_key_value_heads} key-value heads, MLP {config.intermediate_size}, tied"
        f" embeddings of {config.vocab_size} byte-level BPE tokens, context"
        f" {config.max_position_embeddings}. Weights are bfloat16.",
        "",
        "## Data",
        "",
        DATA,
        "TinyStories' licence asks that shared data keep it; a model trained on the data is a",
        "result, which it does not restrict. No text of the data is shipped.",
        "",
        "## Training",
        "",
        f"`python -m training.train {kind}`: {history.tokens / 1e6:.1f} M tokens in"
        f" {history.seconds / 60:.0f} minutes on 2 shared"
        f" {platform.machine()} cores ({history.tokens / history.seconds:,.0f} tokens/s), bfloat16"
        " autocast, Muon for the matrices and AdamW for the rest, cosine schedule over the time"
        " budget, rows of 512 tokens with a tenth of 1,024 and 2,048.",
        "",
        "| | |",
        "| --- | --- |",
        f"| training loss at the end (all kinds of text) | {history.losses[-1]:.3f} |",
        f"| held-out stories, loss per token | {loss:.3f} |",
        f"| held-out stories, perplexity | {math.exp(loss):.2f} |",
        f"| the same with the shipped bfloat16 weights | {math.exp(shipped):.2f} |",
        "",
        *_overfitting(history),
        "![training loss](loss.png)",
        "",
        "## What it can do",
        "",
        "Right greedy answers to 40 fresh questions of each kind (small ones were also seen in",
        "training, so this is skill and memory together):",
        "",
        "| kind | right |",
        "| --- | --- |",
        *(f"| {skill} | {100 * share:.0f} % |" for skill, share in skills.items()),
        "",
        "Greedy answers:",
        "",
    ]
    for question, answer in samples:
        lines += ["```", f"user: {question}", f"assistant: {answer}", "```", ""]
    lines += [
        "## What it cannot do",
        "",
        "Nearly everything else. It knows a few hundred facts, the English of stories for small",
        "children and the forms of question above; other questions get fluent nonsense. Its",
        "stories lose the thread. Use it to try and to test the engine, for nothing that matters.",
        "",
    ]
    return "\n".join(lines)


def _overfitting(history: History) -> list[str]:
    """A warning where the held-out loss was lower earlier in the run."""
    last = history.heldout[-1][1]
    step, best = min(history.heldout, key=lambda measured: measured[1])
    if last < best + 0.02:
        return []
    return [
        f"The model is over-fitted: after {step:,} of {history.heldout[-1][0]:,} steps the held-out"
        f" perplexity was {math.exp(best):.2f}, and rose from there while the training loss kept"
        " falling. There are only about 4,600 stories, each was seen many times, and parts of what"
        " it tells may be theirs word for word.",
        "",
    ]


def write_head_card(
    folder: Path,
    kind: str,
    base: str,
    history: History,
    parameters: int,
    kept: Mapping[float, tuple[Sequence[float], Sequence[float]]],
) -> None:
    """The card of heads; ``kept`` has what `heads.acceptance` gives, by temperature."""
    what = {
        "eagle": f"An EAGLE head for `{base}`: one decoder layer that predicts the main model's"
        " next hidden state (after its final norm) from the present one and the next token's"
        " embedding. Embeddings and LM head are the main model's.",
        "medusa": f"Medusa heads for `{base}`: head k predicts token t+2+k from the main model's"
        " hidden state of token t. Each has an LM head of its own.",
    }[kind]
    lines = [
        *("---", "license: apache-2.0", "---", f"# {folder.name}", "", what, ""),
        f"{parameters:,} parameters (bfloat16), trained for {history.seconds / 60:.0f} minutes on"
        f" {history.tokens / 1e6:.1f} M tokens by `python -m training.train {kind}`. The text is"
        f" what `{base}` itself writes at temperatures 0, 0.7 and 1; data and licence of its"
        " beginnings are in that model's card. No text is shipped.",
        "",
        f"On what `{base}` writes to beginnings that no training saw, the head's first choices"
        " are kept as follows (a draft is kept if it and those before it are the model's own"
        " tokens):",
        "",
    ]
    count = len(next(iter(kept.values()))[0])
    numbers = range(1, count + 1)
    lines += ["| temperature | | " + " | ".join(f"{k} drafts" for k in numbers) + " |"]
    lines += ["| --- | --- |" + " --- |" * count]
    for temperature, (rates, means) in kept.items():
        shares = " | ".join(f"{100 * rate:.0f} %" for rate in rates)
        lengths = " | ".join(f"{mean:.2f}" for mean in means)
        lines += [f"| {temperature:g} | the last one is right if those before are | {shares} |"]
        lines += [f"| {temperature:g} | kept on average | {lengths} |"]
    _write(folder, lines)


def write_lora_card(folder: Path, history: History, parameters: int) -> None:
    """The short card of the adapter."""
    lines = [
        *("---", "license: apache-2.0", "---", f"# {folder.name}", ""),
        "A LoRA adapter for `stories` (PEFT's format): short answers in the manner of a pirate. A"
        " toy that shows at a glance whether the adapter is in use.",
        "",
        f"{parameters:,} parameters, trained for {history.seconds / 60:.1f} minutes on"
        f" {history.tokens / 1e6:.1f} M tokens by `python -m training.train lora`; data and"
        " licence as in the main model's card.",
    ]
    _write(folder, lines)


def _write(folder: Path, lines: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("\n".join(lines) + "\n")
