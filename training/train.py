"""``python -m training.train main|draft|eagle|medusa|lora``: makes the built-in models.

The data are read from ``../shared/data/text`` beside the repository (``--data``); what a run
needs to go on is kept in ``runs/<kind>``, what it makes is written to ``octavo/builtin``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from training.card import write_card, write_extra_card
from training.checkpoint import export_model, load_model
from training.corpus import Corpus, load_corpus
from training.data import IGNORE, Stream, heldout_rows, tokenizer_texts
from training.heads import (
    EagleHead,
    MedusaHeads,
    agreement,
    eagle_loss,
    export_head,
    medusa_loss,
)
from training.loop import Batch, History, Loop, Plan, draw_losses, heldout_loss
from training.lora import PirateStream, add_lora, export_lora, pirate_rows
from training.model import DRAFT, MAIN, Llama, ModelConfig, num_trainable
from training.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
BUILTIN = ROOT / "octavo" / "builtin"
DATA = ROOT.parent / "shared" / "data" / "text"
RUNS = ROOT / "runs"
BATCH_TOKENS = 6144


def next_token_loss(model: Llama) -> Callable[[Batch], Tensor]:
    """Cross-entropy at the positions that count (only those need logits)."""

    def loss(batch: Batch) -> Tensor:
        tokens, targets = batch
        keep = targets.flatten() != IGNORE
        hidden = model.hidden(tokens).flatten(0, 1)[keep]
        return F.cross_entropy(model.logits(hidden).float(), targets.flatten()[keep])

    return loss


def distillation_loss(model: Llama, teacher: Llama) -> Callable[[Batch], Tensor]:
    """Half the text's own tokens, half the teacher's distribution (forward KL)."""

    def loss(batch: Batch) -> Tensor:
        tokens, targets = batch
        keep = targets.flatten() != IGNORE
        with torch.no_grad():
            wanted = teacher.logits(teacher.hidden(tokens).flatten(0, 1)[keep]).float()
        logits = model.logits(model.hidden(tokens).flatten(0, 1)[keep]).float()
        own = F.cross_entropy(logits, targets.flatten()[keep])
        return 0.5 * own + 0.5 * F.cross_entropy(logits, wanted.softmax(-1))

    return loss


def tokenizer_for(corpus: Corpus, folder: Path, seed: int, resume: bool) -> Tokenizer:
    """The run's tokenizer: trained once, then read back on resume."""
    if not (resume and (folder / "tokenizer.json").exists()):
        save_tokenizer(
            train_tokenizer(tokenizer_texts(corpus, seed)), folder, MAIN.max_position_embeddings
        )
    return load_tokenizer(folder)


def language_model_loop(
    kind: str,
    config: ModelConfig,
    corpus: Corpus,
    tokenizer: Tokenizer,
    plan: Plan,
    out: Path,
    run: Path,
    seed: int,
    teacher: Llama | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> Loop:
    """The loop that trains ``main`` (no teacher) or ``draft`` and exports it to ``out``."""
    torch.manual_seed(seed)
    model = Llama(config)
    rows = heldout_rows(corpus, tokenizer)
    loss = next_token_loss(model) if teacher is None else distillation_loss(model, teacher)

    def export(loop: Loop) -> None:
        export_model(model, tokenizer, out)
        if loop.history.losses:
            draw_losses(loop.history, out / "loss.png", f"{out.name}: training loss")
        write_card(out, model, tokenizer, loop, rows)

    return Loop(
        model,
        loss,
        Stream(corpus, tokenizer, batch_tokens, seed),
        plan,
        run,
        export,
        lambda: heldout_loss(model, rows),
        name=kind,
    )


def extra_loop(
    kind: str,
    base: Path,
    corpus: Corpus,
    plan: Plan,
    out: Path | None,
    run: Path,
    seed: int,
    batch_tokens: int = 4096,
) -> Loop:
    """The loop that trains a head or an adapter for the main model in ``base``."""
    torch.manual_seed(seed)
    model = load_model(base).requires_grad_(False)
    tokenizer = load_tokenizer(base)
    if kind == "lora":
        adapted = add_lora(model)
        folder = out or BUILTIN / "stories-pirate-lora"
        plan = replace(plan, vector_rate=2e-3)
        batch = pirate_rows(tokenizer, seed)

        def pirate_loss() -> float:
            with torch.no_grad():
                return next_token_loss(adapted)(batch).item()

        return Loop(
            adapted,
            next_token_loss(adapted),
            PirateStream(tokenizer, batch_tokens, seed),
            plan,
            run,
            lambda loop: _export_extra(loop, folder, lambda: export_lora(adapted, folder)),
            pirate_loss,
            name=kind,
        )
    head: EagleHead | MedusaHeads
    if kind == "eagle":
        head = EagleHead(model.config)
        plan = replace(plan, workers=1)  # two would draw random numbers in any order
        loss = eagle_loss(head, model)
    else:
        head = MedusaHeads(model)
        loss = medusa_loss(head, model)
        plan = replace(plan, vector_rate=1e-3)
    folder = out or BUILTIN / f"stories-{kind}"

    def export(loop: Loop) -> None:
        shares = agreement(head, model, heldout_rows(corpus, tokenizer))
        _export_extra(loop, folder, lambda: export_head(head, folder), shares)

    return Loop(
        head,
        loss,
        Stream(corpus, tokenizer, batch_tokens, seed),
        plan,
        run,
        export,
        name=kind,
    )


def _export_extra(
    loop: Loop, folder: Path, export: Callable[[], None], agreement: Sequence[float] = ()
) -> None:
    export()
    write_extra_card(folder, loop.name, loop.history, num_trainable(loop.module), agreement)


def report(history: History, parameters: int) -> None:
    print(
        f"{parameters:,} parameters, {history.tokens:,} tokens in {history.seconds / 60:.1f} min"
        f" ({history.tokens / history.seconds:.0f} tokens/s)"
    )
    if history.heldout:
        print(f"held-out perplexity {math.exp(history.heldout[-1][1]):.2f}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__)
    parser.add_argument("kind", choices=("main", "draft", "eagle", "medusa", "lora"))
    parser.add_argument("--out", type=Path, help="folder to export to")
    parser.add_argument("--minutes", type=float, help="time budget (60, draft 10, others 3)")
    parser.add_argument("--resume", action="store_true", help="go on from runs/<kind>")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the texts")
    parser.add_argument("--base", type=Path, default=BUILTIN / "stories", help="the main model")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)  # see Loop._gradients
    run = RUNS / args.kind
    run.mkdir(parents=True, exist_ok=True)
    corpus = load_corpus(args.data)
    if args.kind == "main":
        out = args.out or BUILTIN / "stories"
        tokenizer = tokenizer_for(corpus, run, args.seed, args.resume)
        plan = Plan(minutes=args.minutes or 60.0)
        loop = language_model_loop("main", MAIN, corpus, tokenizer, plan, out, run, args.seed)
    elif args.kind == "draft":
        out = args.out or BUILTIN / "stories-draft"
        tokenizer = load_tokenizer(args.base)
        plan = Plan(minutes=args.minutes or 10.0)
        teacher = load_model(args.base).eval().requires_grad_(False)
        loop = language_model_loop(
            "draft", DRAFT, corpus, tokenizer, plan, out, run, args.seed, teacher
        )
    else:
        plan = Plan(minutes=args.minutes or 3.0)
        loop = extra_loop(args.kind, args.base, corpus, plan, args.out, run, args.seed)
    if args.resume and loop.checkpoint.exists():
        loop.resume()
    history = loop.run()
    report(history, num_trainable(loop.module))


if __name__ == "__main__":
    main()
