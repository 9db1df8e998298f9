"""Cards of the encoder and of the reranker: how they were made, and how well they retrieve."""

from __future__ import annotations

import platform
from pathlib import Path

from training.encoder import WORD_STEPS, EncoderConfig, Reranker
from training.loop import Loop
from training.model import num_parameters
from training.pairs import Pairs
from training.retrieval import DEPTH, Results, likeness, measure
from training.teacher import Lessons

KINDS = {
    "notes": ("question about a child", "note of a sentence or two"),
    "facts": ("question about the world", "sentence that answers it"),
    "lines": ("sentence of a story of TinyStories, reworded", "the sentence"),
    "titles": ("words about a generated story", "the story"),
    "stories": ("sentence of a story of TinyStories, reworded", "sentences around it"),
    "quotes": ("sentence of a story of TinyStories, reworded", "sentences around it and itself"),
    "books": ("sentence of a children's book, reworded", "sentences around it"),
    "extracts": ("sentence of a children's book, reworded", "sentences around it and itself"),
}
WAYS = ("BM25", "The encoder", "Encoder and reranker")
DATA = """\
Pairs of a query and a text (`training/pairs.py`). Notes, facts and titles are generated; in some,
the words that query and text share are replaced by other ones. The others come from
[TinyStories](https://arxiv.org/abs/2305.07759) by Ronen Eldan and Yuanzhi Li (2023), licence
CDLA-Sharing-1.0, with children's names exchanged at random, and from children's books of Project
Gutenberg, public domain. "Reworded": words are replaced by synonyms of a table, and in a third of
the queries words are missing. TinyStories' licence asks that shared data keep it; a model trained
on the data is a result, which it does not restrict. No text of the data is shipped.
"""
TEACHER = """\
[all-MiniLM-L6-v2](https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2) (Apache-2.0)
taught it: the embeddings began with the principal components of its vectors of the tokenizer's
pieces, and in a quarter of the steps the encoder learnt to find sentences of the data as similar as
the teacher finds them (`training/teacher.py`).
"""
SHORT_DATA = """\
Pairs of a query and a short text (`training/pairs.py`): generated notes about children, generated
facts, and sentences of [TinyStories](https://arxiv.org/abs/2305.07759) (CDLA-Sharing-1.0). In some,
the words that query and text share are replaced by other ones. The encoder's card names the data
and the teacher that its weights come from.
"""
HELD_OUT = """\
One subject in ten (a story, a fact, a child's thing) is held out of training; names, forms of
sentences and synonyms are the same in training.
"""


def write_encoder_card(
    encoder: Path,
    reranker: Path | None,
    loop: Loop,
    pairs: Pairs,
    lessons: Lessons | None = None,
) -> None:
    """Write the card of the encoder, or of the reranker if there is one.

    ``lessons`` are those of the encoder. A preliminary card states the progress of the training.
    """
    out = encoder if reranker is None else reranker
    if loop.progress < 1:
        (out / "README.md").write_text(
            f"# {out.name}\n\nPreliminary: {100 * loop.progress:.0f} % of the training is done.\n"
        )
        return
    (out / "README.md").write_text("\n".join(_lines(encoder, reranker, loop, pairs, lessons)))


def _lines(
    encoder: Path, reranker: Path | None, loop: Loop, pairs: Pairs, lessons: Lessons | None
) -> list[str]:
    ranks = reranker is not None
    out = reranker or encoder
    model = loop.module
    config: EncoderConfig = (model.model if isinstance(model, Reranker) else model).config
    what = (
        f"The reranker that comes with Octavo: it reads a query and a text together and returns how"
        f" well the text answers. Its layers began with the weights of `{encoder.name}`, and each"
        " query has three wrong texts beside the right one, which the encoder finds similar."
        if ranks
        else "The encoder that comes with Octavo: examples and tests of vectors run without a"
        " download."
    )
    loss = (
        "cross-entropy of the right text of four, and binary cross-entropy of each"
        if ranks
        else "InfoNCE, both ways, temperature 0.05, with the other texts of the batch as rivals;"
        " for the teacher's sentences, cross-entropy of the similarities. Before that,"
        f" {WORD_STEPS:,} steps trained the embeddings alone as a bag of words, with the same"
        " losses and three times the batch"
    )
    results = measure(encoder, reranker, pairs)
    return [
        *("---", "language: en", "license: apache-2.0"),
        f"pipeline_tag: {'text-ranking' if ranks else 'sentence-similarity'}",
        *("---", f"# {out.name}", "", what, ""),
        f"{num_parameters(model):,} parameters: ModernBERT, {config.num_hidden_layers} layers,"
        f" hidden size {config.hidden_size}, {config.num_attention_heads} heads of"
        f" {config.head_dim}, gated MLP {config.intermediate_size}, all layers see the whole text,"
        f" {config.vocab_size} WordPiece tokens without case, context"
        f" {config.max_position_embeddings}. "
        + ("One class; a score is a sigmoid." if ranks else "Vectors are means of length 1.")
        + " Weights are bfloat16.",
        *("", "## Data", "", SHORT_DATA if ranks else DATA, HELD_OUT),
        *([TEACHER] if lessons is not None else []),
        *("## Training", ""),
        f"`python -m training.train {loop.name}`: {loop.step:,} steps in"
        f" {loop.history.seconds / 60:.0f} minutes on a shared {platform.machine()} core, float32,"
        f" Muon for the matrices and AdamW for the rest; loss: {loss}.",
        *("", "## Held-out pairs", ""),
        "Share of queries for which the right text is the first one, and mean reciprocal rank. The"
        " rivals are the other texts of the kind. BM25 compares words."
        + (f" The reranker sorts the encoder's best {DEPTH}." if ranks else ""),
        "",
        *_table(results),
        *_likeness(encoder, lessons),
        *("", "## What it cannot do", ""),
        "Nearly everything else. It knows the words and the forms of text above."
        f"{_better_alone(results)} Use it to try and to test the engine, for nothing that"
        " matters.",
        "",
    ]


def _likeness(encoder: Path, lessons: Lessons | None) -> list[str]:
    """Return the sentence on the correlation with the teacher, if there are lessons."""
    if lessons is None:
        return []
    found = likeness(encoder, lessons.heldout, lessons.heldout_vectors.numpy())
    return [
        "",
        f"Spearman's correlation of its similarities of {len(lessons.heldout)} held-out queries"
        f" with the teacher's: {found:.2f}.",
    ]


def _better_alone(results: Results) -> str:
    """Return sentences that name the kinds for which a simpler way is better, or ""."""
    count = len(next(iter(results.values()))[2])
    text = ""
    for i, way in enumerate(WAYS[: count - 1]):
        kinds = [
            KINDS[kind] for kind, (_, _, found) in results.items() if found[i].mrr > found[-1].mrr
        ]
        if kinds:
            named = "; ".join(f"{query} ({its})" for query, its in kinds)
            text += f" {way} alone is better for: {named}."
    return text


def _table(results: Results) -> list[str]:
    count = len(next(iter(results.values()))[2])
    lines = ["| query | text | queries, texts | " + " | ".join(WAYS[:count]) + " |"]
    lines.append("| --- | --- | --- |" + " --- |" * count)
    for kind, (queries, texts, found) in results.items():
        query, text = KINDS[kind]
        lines.append(f"| {query} | {text} | {queries}, {texts} | {' | '.join(map(str, found))} |")
    return lines
