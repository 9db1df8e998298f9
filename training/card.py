"""Model cards (README.md) of the exported models."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from training.checkpoint import load_model
from training.data import Document
from training.evaluate import SAMPLES, accuracy, ask
from training.heads import acceptance
from training.loop import History, Loop, heldout_loss
from training.model import Llama, num_parameters

# Results of `heads.acceptance`, by temperature.
Kept = Mapping[float, tuple[Sequence[float], Sequence[float]]]

DATA = """\
- [TinyStories](https://arxiv.org/abs/2305.07759) by Ronen Eldan and Yuanzhi Li (2023), licence
  CDLA-Sharing-1.0: about 4,600 stories (1.0 M tokens), two fifths of the tokens. Half of them had
  lost their capitals; a true-caser learnt from the other half put them back. Children's names are
  exchanged at random. One story in a hundred is held out.
- Stories that the tool writes itself (`training/own_stories.py`): a grammar of twelve plots whose
  names, things, places and causes stay the same to the end. About a seventh of the tokens.
- Children's books of Project Gutenberg, public domain, 7 % of the tokens in the first 60 % of the
  run.
- Conversations that the tool writes itself (`training/synthetic.py`): questions about colours,
  animals, days, opposites and the like, small sums, lists, JSON records, tool calls, and stories
  on demand; and lines of sums. Only what the assistant says, or a sum's result, counts in the
  loss.
"""


def write_card(
    out: Path,
    model: Llama,
    tokenizer: Tokenizer,
    loop: Loop,
    rows: Sequence[Tensor],
    start: Path | None = None,
    teacher: Llama | None = None,
    judged: Mapping[float, Sequence[Document]] | None = None,
) -> None:
    """Write ``out/README.md``; a preliminary one states the progress of the training.

    ``start`` is the model that the training started from: the card has its figures too. ``judged``
    is text of a draft model's teacher, by temperature.
    """
    if loop.progress < 1:
        (out / "README.md").write_text(
            f"# {out.name}\n\nPreliminary: {100 * loop.progress:.0f} % of the training is done.\n"
        )
        return
    shipped = load_model(out).eval()  # measure and show the shipped model: bfloat16
    before = load_model(start).eval() if start is not None else None
    kept = {}
    if teacher is not None and judged is not None:
        kept = {t: acceptance(shipped, teacher, texts, 5) for t, texts in judged.items()}
    model.eval()
    text = card_text(out.name, model, shipped, before, tokenizer, loop, rows, kept)
    (out / "README.md").write_text(text)
    model.train()


def card_text(
    name: str,
    model: Llama,
    shipped: Llama,
    before: Llama | None,
    tokenizer: Tokenizer,
    loop: Loop,
    rows: Sequence[Tensor],
    kept: Kept,
) -> str:
    config, history, kind = model.config, loop.history, loop.name
    loss = heldout_loss(model, rows)
    measured = [m for m in (before, shipped) if m is not None]
    perplexities = [f"{math.exp(heldout_loss(m, rows)):.2f}" for m in measured]
    skills = [accuracy(m, tokenizer) for m in measured]
    samples = [(q, ask(shipped, tokenizer, q, 300)) for q in SAMPLES]
    use = {
        "main": "The small model that comes with Octavo: it makes the examples and the tests run"
        " without a download.",
        "draft": "The draft model of `stories` for speculative decoding: the same tokenizer and"
        " the same data; half of its loss is the distance from the main model's distribution.",
    }[kind]
    went_on = ""
    if before is not None:
        went_on = ' It went on from the weights of the release before, "before" in the tables.'
    columns = "before | now" if before is not None else "now"
    ruler = "| --- |" + " --- |" * len(measured)
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
        " autocast, Muon for the matrices and AdamW for the rest, a rate that stays and comes down"
        " in the last 30 % of the time, rows of 512 tokens with a tenth of 1,024 and 2,048."
        f"{went_on}",
        "",
        f"| | {columns} |",
        ruler,
        f"| held-out stories, perplexity | {' | '.join(perplexities)} |",
        "",
        f"Before it was rounded to bfloat16 it was {math.exp(loss):.2f}. The training loss at the"
        f" end, over all kinds of text, was {history.losses[-1]:.3f}.",
        "",
        *_overfitting(history),
        "![training loss](loss.png)",
        "",
    ]
    if kept:
        lines += [
            "On what the main model writes to beginnings that no training saw, this model's first",
            "choices are kept as follows (a draft is kept if it and those before it are the main",
            "model's own tokens):",
            "",
            *_kept_table(kept),
            "",
        ]
    lines += [
        "## What it can do",
        "",
        "Right greedy answers to 40 fresh questions of each kind (small ones were also seen in",
        "training, so this is skill and memory together):",
        "",
        f"| kind | {columns} |",
        ruler,
        *(
            f"| {skill} | {' | '.join(f'{100 * shares[skill]:.0f} %' for shares in skills)} |"
            for skill in skills[0]
        ),
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
        "children and the forms of question above; other questions get fluent nonsense. A story",
        "keeps its thread as far as it follows one of the plots that the tool writes; others lose",
        "it. Use it to try and to test the engine, for nothing that matters.",
        "",
    ]
    return "\n".join(lines)


def _overfitting(history: History) -> list[str]:
    """Return a warning if the held-out loss was lower earlier in the run."""
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
    kept: Kept,
) -> None:
    """Write the card of heads."""
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
    lines += _kept_table(kept)
    write_lines(folder, lines)


def _kept_table(kept: Kept) -> list[str]:
    count = len(next(iter(kept.values()))[0])
    lines = ["| temperature | | " + " | ".join(f"{k} drafts" for k in range(1, count + 1)) + " |"]
    lines += ["| --- | --- |" + " --- |" * count]
    for temperature, (rates, means) in kept.items():
        shares = " | ".join(f"{100 * rate:.0f} %" for rate in rates)
        lengths = " | ".join(f"{mean:.2f}" for mean in means)
        lines += [f"| {temperature:g} | the last one is right if those before are | {shares} |"]
        lines += [f"| {temperature:g} | kept on average | {lengths} |"]
    return lines


def write_lines(folder: Path, lines: Sequence[str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "README.md").write_text("\n".join(lines) + "\n")
