"""Card of the model of pictures: how it was made, and how many questions it answers."""

from __future__ import annotations

import platform
import random
from pathlib import Path

from tokenizers import Tokenizer

from training.eyes import ROWS, exam, examine, load_eyes
from training.loop import Loop
from training.model import num_parameters
from training.scenes import COLORS, KINDS, SHAPES, SIZE, is_heldout

QUESTIONS = 200
"""Number of questions of each kind."""


def write_eyes_card(folder: Path, loop: Loop, tokenizer: Tokenizer) -> None:
    """Write the card of the model in ``folder``, which is judged with its shipped weights.

    A preliminary card states the progress of the training.
    """
    text = f"# {folder.name}\n\nPreliminary: {100 * loop.progress:.0f} % of the training is done.\n"
    if loop.progress == 1:
        text = "\n".join(_lines(folder, loop, tokenizer))
    (folder / "README.md").write_text(text)


def _lines(folder: Path, loop: Loop, tokenizer: Tokenizer) -> list[str]:
    model = load_eyes(folder)
    vision, text = model.llava.config.vision_config, model.llava.config.text_config
    heldout = [f"{c} {s}" for s in SHAPES for c in COLORS if is_heldout(s, c)]
    rows, weak = [], []
    for kind in KINDS:
        ((example, _),) = exam(kind, 1, random.Random(kind), heldout=False)
        shares = [
            examine(model, tokenizer, kind, QUESTIONS, heldout=heldout) for heldout in (False, True)
        ]
        cells = [f"{100 * share:.0f} %" for share in shares]
        rows.append(f"| {example.text} | {example.answer} | {' | '.join(cells)} |")
        weak += [f'"{example.text}"'] if min(shares) < 0.9 else []
    return [
        *("---", "language: en", "license: apache-2.0", "pipeline_tag: image-text-to-text", "---"),
        f"# {folder.name}",
        "",
        "The model of pictures and texts that comes with Octavo: examples and tests of pictures run"
        " without a download. It answers questions about a few shapes, or about a number of two"
        " digits.",
        "",
        f"{num_parameters(model.llava):,} parameters: LLaVA with a SigLIP tower"
        f" ({vision.num_hidden_layers} layers, hidden size {vision.hidden_size},"
        f" {vision.num_attention_heads} heads, MLP {vision.intermediate_size}; {SIZE} x {SIZE}"
        f" pixels in {ROWS} patches of {vision.patch_size} x {vision.patch_size}), a projector of"
        f" two layers, and a Llama ({text.num_hidden_layers} layers, hidden size"
        f" {text.hidden_size}, {text.num_attention_heads} heads, MLP {text.intermediate_size}, tied"
        f" embeddings of {text.vocab_size} tokens, context {text.max_position_embeddings})."
        " Weights are bfloat16.",
        "",
        "## Data",
        "",
        "All pictures, questions and answers are made by `training/scenes.py`; there is no other"
        f" data. A picture has one to four shapes ({', '.join(SHAPES)}) in colors"
        f" ({', '.join(COLORS)}), each in one of nine cells, on a light ground with a little noise;"
        " one picture in five (two in five after 500 steps) has a number of one or two digits of"
        " seven segments instead."
        " Positions, sizes, angles and shades vary.",
        "",
        f"Held out of training: {', '.join(heldout)}, and one in six of the numbers of two digits.",
        "",
        "## Training",
        "",
        f"`python -m training.train {loop.name}`: {loop.step:,} steps in"
        f" {loop.history.seconds / 60:.0f} minutes on a shared {platform.machine()} core, float32,"
        " from random weights, Muon for the matrices and AdamW for the rest. A step has 32 new"
        " pictures with three questions each. The loss is the cross-entropy of the answers, plus"
        " that of a classifier, not shipped, which names the shape or digit and the color at each"
        " patch. A third of the rows are conversations of three questions.",
        "",
        "## Results",
        "",
        f"Share of {QUESTIONS} single questions about new pictures whose greedy answer is right to"
        " the last letter, with the shipped weights, computed in float32. The last column is about"
        " shapes in held-out colors, or held-out numbers. Each kind of question has two or three"
        " forms, which are those of training.",
        "",
        "| question, such as | answer | right | right, held out |",
        "| --- | --- | --- | --- |",
        *rows,
        "",
        "## What it cannot do",
        "",
        *(
            [f"Its answers to questions such as {', '.join(weak)} are often wrong.", ""]
            * bool(weak)
        ),
        "Nothing else was trained. Photographs, other shapes, other forms of question,"
        " conversations about anything else and several pictures get nonsense, which sounds just as"
        f" sure. Pictures are scaled to {SIZE} x {SIZE} pixels. Use it to try and to test the"
        " engine, for nothing that matters.",
        "",
    ]
