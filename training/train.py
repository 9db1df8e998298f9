"""Training of the built-in models: ``python -m training.train main|draft|encoder|...``.

The script reads texts from ``../shared/data/text`` next to the repository (``--data``); ``eyes``
needs none. It saves checkpoints in ``runs/<kind>``, from which ``--resume`` continues, and exports
the model to ``octavo/builtin``.

``python -m training.train adapter`` trains LoRA adapters and has its own ``--help``.

Heads (``eagle``, ``medusa``) can be trained for any Llama that fits in memory: give ``--base``,
``--out`` and ``--data``, a folder of ``*.txt`` files. The model continues the first words of these
texts, and its answers are the training text (saved in ``runs/<base>-text.jsonl``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from training import adapters
from training.card import write_card, write_head_card
from training.checkpoint import export_model, load_model
from training.corpus import Corpus, load_corpus
from training.data import IGNORE, Document, Stream, heldout_rows, tokenizer_texts
from training.encoder import (
    WORD_STEPS,
    Encoder,
    EncoderConfig,
    PairStream,
    Reranker,
    RivalStream,
    Words,
    contrastive_loss,
    export_encoder,
    load_encoder,
    make_wordpiece,
    ranking_loss,
)
from training.encoder import tokenizer_texts as encoder_texts
from training.encoder_card import write_encoder_card
from training.eyes import Eyes, SceneStream, answer_loss, export_eyes, make_tokenizer
from training.eyes_card import write_eyes_card
from training.heads import (
    EagleHead,
    MedusaHeads,
    acceptance,
    eagle_loss,
    export_head,
    fit_linear,
    medusa_loss,
)
from training.loop import Batch, History, Loop, Plan, draw_losses, heldout_loss
from training.model import DRAFT, MAIN, Llama, ModelConfig, num_trainable
from training.own_text import (
    OWN_TOKENS,
    OwnText,
    OwnTextStream,
    beginning,
    load_own_text,
    save_own_text,
    write_own_text,
)
from training.pairs import Pairs
from training.speech import Speech, SpeechConfig, export_speech, speech_loss
from training.spoken import SpokenStream
from training.spoken_card import write_spoken_card
from training.teacher import Lessons, load_lessons
from training.tokenizer import IM_START, load_tokenizer, save_tokenizer, train_tokenizer

ROOT = Path(__file__).resolve().parent.parent
BUILTIN = ROOT / "octavo" / "builtin"
DATA = ROOT.parent / "shared" / "data" / "text"
RUNS = ROOT / "runs"
BATCH_TOKENS = 6144
NAMES = {
    "main": "stories",
    "draft": "stories-draft",
    "eagle": "stories-eagle",
    "medusa": "stories-medusa",
    "encoder": "stories-encoder",
    "reranker": "stories-reranker",
    "eyes": "stories-eyes",
    "spoken": "spoken-words",
}
MINUTES = {"main": 60.0, "draft": 10.0, "eagle": 15.0, "medusa": 15.0}
# Kinds that have no time budget: the same weights on a slow machine. One worker, so that a text's
# rivals are the whole batch. bfloat16 is slower for small matrices.
PLANS = {
    "encoder": Plan(steps=1000, bfloat16=False, workers=1, vector_rate=5e-4, matrix_rate=0.01),
    "reranker": Plan(steps=1000, bfloat16=False, workers=1),
    "eyes": Plan(steps=1700, bfloat16=False, workers=1, warmup=20 / 1700, decay=0.53),
    "spoken": Plan(steps=1550, workers=1),
}


def next_token_loss(model: Llama) -> Callable[[Batch], Tensor]:
    """Return the cross-entropy at the positions that count (only those need logits)."""

    def loss(batch: Batch) -> Tensor:
        tokens, targets = batch
        keep = targets.flatten() != IGNORE
        hidden = model.hidden(tokens).flatten(0, 1)[keep]
        return F.cross_entropy(model.logits(hidden).float(), targets.flatten()[keep])

    return loss


def distillation_loss(model: Llama, teacher: Llama) -> Callable[[Batch], Tensor]:
    """Return half the text's cross-entropy plus half the teacher's (forward KL)."""

    def loss(batch: Batch) -> Tensor:
        tokens, targets = batch
        keep = targets.flatten() != IGNORE
        with torch.no_grad():
            wanted = teacher.logits(teacher.hidden(tokens).flatten(0, 1)[keep]).float()
        logits = model.logits(model.hidden(tokens).flatten(0, 1)[keep]).float()
        own = F.cross_entropy(logits, targets.flatten()[keep])
        return 0.5 * own + 0.5 * F.cross_entropy(logits, wanted.softmax(-1))

    return loss


def go_on_from(start: Path, module: nn.Module, plan: Plan) -> Plan:
    """Load the weights in ``start``; return a plan with a third of the rates."""
    weights = load_file(start / "model.safetensors")
    module.load_state_dict({name: w.float() for name, w in weights.items()})
    return replace(plan, matrix_rate=plan.matrix_rate / 3, vector_rate=plan.vector_rate / 3)


def tokenizer_for(
    corpus: Corpus, folder: Path, seed: int, resume: bool, start: Path | None = None
) -> Tokenizer:
    """Return the tokenizer of ``start``, or the run's: trained once, then read back on resume."""
    if start is not None:
        return load_tokenizer(start)
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
    start: Path | None = None,
    judged: Mapping[float, Sequence[Document]] | None = None,
) -> Loop:
    """Return the loop that trains ``main`` (no teacher) or ``draft`` and exports it to ``out``.

    ``start`` has the initial weights; ``judged`` is text that the teacher wrote, by temperature,
    for the acceptance of drafts in the draft's card.
    """
    torch.manual_seed(seed)
    model = Llama(config)
    if start is not None:
        plan = go_on_from(start, model, plan)
    rows = heldout_rows(corpus, tokenizer)
    loss = next_token_loss(model) if teacher is None else distillation_loss(model, teacher)

    def export(loop: Loop) -> None:
        export_model(model, tokenizer, out)
        if loop.history.losses:
            draw_losses(loop.history, out / "loss.png", f"{out.name}: training loss")
        write_card(out, model, tokenizer, loop, rows, start, teacher, judged)

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


def own_text(
    base: Path, corpus: Corpus, path: Path, seed: int, tokens: int = OWN_TOKENS
) -> OwnText:
    """Return the text of the Llama in ``base``: read from ``path``, which is written if missing.

    The Llama continues the first words of the corpus' texts, and answers the conversations if it
    knows their form.
    """
    if path.exists():
        return load_own_text(base, path)
    tokenizer = load_tokenizer(base)
    bos = json.loads((base / "config.json").read_text()).get("bos_token_id")
    start = [] if bos is None else [bos]

    def prose(text: str) -> Document:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        return Document(ids, [True] * len(ids), whole=False)

    def documents(chunk: int, rng: random.Random) -> list[Document]:
        if tokenizer.token_to_id(IM_START) is None:
            chosen = rng.sample(corpus.stories, min(1000, len(corpus.stories)))
            return [prose(story) for story in chosen]
        stream = Stream(corpus, tokenizer, BATCH_TOKENS, seed)
        return [d for d in stream.documents(chunk, rng) if any(d.counts)]

    def beginnings() -> Iterator[list[int]]:
        rng = random.Random(f"{seed}/beginnings")
        for chunk in itertools.count():
            found = documents(chunk, rng)
            rng.shuffle(found)
            for document in found:
                yield beginning(document, start, rng)

    heldout = [[*start, *prose(story).ids[:16]] for story in corpus.heldout]
    text = write_own_text(base, beginnings(), heldout, seed, tokens)
    save_own_text(text, base, path)
    return text


def head_loop(
    kind: str,
    base: Path,
    text: OwnText,
    plan: Plan,
    out: Path,
    run: Path,
    seed: int,
    batch_tokens: int = 1024,
    start: Path | None = None,
) -> Loop:
    """Return the loop that trains ``eagle`` or ``medusa`` for the Llama in ``base``."""
    torch.manual_seed(seed)
    model = load_model(base).requires_grad_(False)
    head: EagleHead | MedusaHeads
    if kind == "eagle":
        head = EagleHead(model.config)
        if start is None:
            fit_linear(head, model, text.train[:200])
        loss, steps = eagle_loss(head, model), 5
    else:
        head = MedusaHeads(model)
        loss, steps = medusa_loss(head, model), len(head.blocks)
        plan = replace(plan, vector_rate=1e-3)
    if start is not None:
        plan = go_on_from(start, head, plan)

    def export(loop: Loop) -> None:
        export_head(head, out)
        kept = {t: acceptance(head, model, texts, steps) for t, texts in text.heldout.items()}
        write_head_card(out, kind, base.name, loop.history, num_trainable(head), kept)

    stream = OwnTextStream(text.train, batch_tokens, seed)
    return Loop(head, loss, stream, plan, run, export, name=kind)


def encoder_loop(
    config: EncoderConfig,
    pairs: Pairs,
    tokenizer: Tokenizer,
    plan: Plan,
    out: Path,
    run: Path,
    seed: int,
    lessons: Lessons | None = None,
) -> Loop:
    """Return the loop that trains the encoder of texts and exports it to ``out``.

    The embeddings begin with the pieces' vectors in ``lessons``.
    """
    torch.manual_seed(seed)
    model = Encoder(config)
    if lessons is not None:
        model.start_from(lessons.pieces)

    def export(loop: Loop) -> None:
        export_encoder(model, tokenizer, out)
        write_encoder_card(out, None, loop, pairs, lessons)

    stream = PairStream(pairs, tokenizer, seed, lessons)
    return Loop(model, contrastive_loss(model), stream, plan, run, export, name="encoder")


def words_loop(loop: Loop, steps: int) -> Loop:
    """Return the loop that trains the embeddings of the encoder in ``loop`` as a bag of words.

    A step is cheap, so it has more of the pairs.
    """
    words, pairs = Words(loop.module), loop.stream
    stream = PairStream(pairs.pairs, pairs.tokenizer, pairs.seed, pairs.lessons, factor=3)
    plan = replace(loop.plan, steps=steps, vector_rate=1e-2)
    return Loop(words, contrastive_loss(words), stream, plan, loop.folder / "words", name="words")


def reranker_loop(
    config: EncoderConfig, encoder: Path, pairs: Pairs, plan: Plan, out: Path, run: Path, seed: int
) -> Loop:
    """Return the loop that trains a reranker; it begins with the weights of ``encoder``."""
    torch.manual_seed(seed)
    model = Reranker(config)
    trained = load_encoder(encoder, config)
    model.model.load_state_dict(trained.state_dict())
    tokenizer = load_tokenizer(encoder)

    def export(loop: Loop) -> None:
        export_encoder(model, tokenizer, out)
        write_encoder_card(encoder, out, loop, pairs)

    stream = RivalStream(pairs, tokenizer, seed, trained)
    return Loop(model, ranking_loss(model), stream, plan, run, export, name="reranker")


def eyes_loop(plan: Plan, out: Path, run: Path, seed: int) -> Loop:
    """Return the loop that trains the model of pictures and exports it to ``out``."""
    tokenizer = make_tokenizer(seed)
    torch.manual_seed(seed)
    model = Eyes(tokenizer.get_vocab_size())

    def export(loop: Loop) -> None:
        export_eyes(model, tokenizer, out)
        write_eyes_card(out, loop, tokenizer)

    stream = SceneStream(tokenizer, seed)
    return Loop(model, answer_loss(model), stream, plan, run, export, name="eyes")


def spoken_loop(
    config: SpeechConfig, stream: SpokenStream, plan: Plan, out: Path, run: Path, seed: int
) -> Loop:
    """Return the loop that trains the speech model and exports it to ``out``."""
    torch.manual_seed(seed)
    model = Speech(config)

    def export(loop: Loop) -> None:
        export_speech(model, out)
        write_spoken_card(out, loop)

    return Loop(model, speech_loss(model), stream, plan, run, export, name="spoken")


def report(history: History, parameters: int) -> None:
    print(
        f"{parameters:,} parameters, {history.tokens:,} tokens in {history.seconds / 60:.1f} min"
        f" ({history.tokens / history.seconds:.0f} tokens/s)"
    )
    if history.heldout:
        print(f"held-out perplexity {math.exp(history.heldout[-1][1]):.2f}")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m training.train", description=__doc__)
    parser.add_argument("kind", choices=NAMES)
    parser.add_argument("--out", type=Path, help="folder for the exported model")
    parser.add_argument(
        "--minutes",
        type=float,
        help="time budget; default: 60, draft 10, heads 15; the others have none",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue from the checkpoint in runs/<kind>"
    )
    parser.add_argument(
        "--start", type=Path, help="folder of a model to start from; needs the same kind and shape"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the data and the weights")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of texts (*.txt)")
    parser.add_argument(
        "--base", type=Path, default=BUILTIN / "stories", help="folder of the main model, a Llama"
    )
    parser.add_argument(
        "--teacher", type=Path, help="folder of all-MiniLM-L6-v2, which teaches the encoder"
    )
    args = parser.parse_args(argv)
    if args.out is None:
        if args.base != BUILTIN / "stories":
            parser.error("another --base needs --out")
        args.out = BUILTIN / NAMES[args.kind]
    if args.kind in PLANS and (args.minutes or args.start or args.base != BUILTIN / "stories"):
        parser.error(f"{args.kind} trains a number of steps, without --minutes, --start, --base")
    if args.minutes is None:
        args.minutes = MINUTES.get(args.kind)
    return args


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["adapter"]:
        adapters.main(argv[1:])
        return
    args = parse_args(argv)
    torch.set_num_threads(1)  # see Loop._gradients
    run = RUNS / args.kind
    run.mkdir(parents=True, exist_ok=True)
    if args.kind in PLANS:
        plan = PLANS[args.kind]
    else:
        plan = Plan(minutes=args.minutes)
    if args.kind == "encoder":
        corpus, config = load_corpus(args.data), EncoderConfig()
        tokenizer = make_wordpiece(encoder_texts(corpus, args.seed), config.vocab_size)
        pairs = Pairs(corpus)
        lessons = load_lessons(args.teacher, RUNS / "lessons.npz", pairs, tokenizer)
        loop = encoder_loop(config, pairs, tokenizer, plan, args.out, run, args.seed, lessons)
        words = words_loop(loop, WORD_STEPS)
        if args.resume and words.checkpoint.exists():
            words.resume()
        words.run()
    elif args.kind == "reranker":
        encoder = args.out.with_name(NAMES["encoder"])
        # Short texts only, so that a step is fast.
        pairs = Pairs(load_corpus(args.data), short=True)
        loop = reranker_loop(EncoderConfig(), encoder, pairs, plan, args.out, run, args.seed)
    elif args.kind == "eyes":
        loop = eyes_loop(plan, args.out, run, args.seed)
    elif args.kind == "main":
        corpus = load_corpus(args.data)
        tokenizer = tokenizer_for(corpus, run, args.seed, args.resume, args.start)
        loop = language_model_loop(
            "main",
            MAIN,
            corpus,
            tokenizer,
            plan,
            args.out,
            run,
            args.seed,
            start=args.start,
        )
    elif args.kind == "spoken":
        spoken = SpeechConfig()
        stream = SpokenStream(spoken, args.seed)
        loop = spoken_loop(spoken, stream, plan, args.out, run, args.seed)
    elif args.kind == "draft":
        corpus = load_corpus(args.data)
        text = own_text(args.base, corpus, RUNS / f"{args.base.name}-text.jsonl", args.seed)
        loop = language_model_loop(
            "draft",
            DRAFT,
            corpus,
            load_tokenizer(args.base),
            plan,
            args.out,
            run,
            args.seed,
            load_model(args.base).eval().requires_grad_(False),
            start=args.start,
            judged=text.heldout,
        )
    else:
        path = RUNS / f"{args.base.name}-text.jsonl"
        text = own_text(args.base, load_corpus(args.data), path, args.seed)
        loop = head_loop(
            args.kind, args.base, text, plan, args.out, run, args.seed, start=args.start
        )
    if args.resume and loop.checkpoint.exists():
        loop.resume()
    history = loop.run()
    report(history, num_trainable(loop.module))


if __name__ == "__main__":
    main()
