"""Text that a model writes itself: the training text of its heads (self-distillation).

Heads guess the model's next tokens, so the model's text is the best training text (Cai et al. 2024,
section 2.3.2). It is sampled with `octavo.LLM`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path

from octavo import LLM, SamplingParams
from training.data import ChunkStream, Document

OWN_TOKENS = 600_000
# In turn: users' temperatures range from greedy to plain sampling.
TEMPERATURES = (0.0, 0.7, 1.0, 1.0)
HELDOUT_TEMPERATURES = (0.0, 0.8)
_LENGTH = 300
_WAVE = 512
_PER_CHUNK = 500


@dataclass(frozen=True)
class OwnText:
    """Text of a model; in each document, the tokens that it wrote count."""

    train: list[Document]
    heldout: dict[float, list[Document]]
    """Texts by temperature; their beginnings are of texts that are kept out of training."""


def beginning(document: Document, start: Sequence[int], rng: random.Random) -> list[int]:
    """Return a beginning for the model: a conversation's question, or the first words of prose.

    ``start`` is the beginning of prose: the beginning-of-sequence token, or nothing.
    """
    if document.whole:
        return document.ids[: document.counts.index(True)]
    # At least one token, except the one that ends the text.
    return [*start, *document.ids[: rng.randint(1, max(1, min(24, len(document.ids) - 1)))]]


def go_on(
    llm: LLM, beginnings: Sequence[list[int]], temperatures: Sequence[float], seed: int
) -> list[Document]:
    """Return the model's continuation of each beginning, with the temperatures in turn."""
    longest = llm.memory_plan.max_model_len - 1
    prompts = [p[:longest] for p in beginnings]
    params = [
        SamplingParams(
            temperature=t,
            top_p=1.0,
            top_k=0,
            max_tokens=min(_LENGTH, longest + 1 - len(p)),
            seed=seed + i,
        )
        for i, (p, t) in enumerate(zip(prompts, cycle(temperatures), strict=False))
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    documents = []
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = list(output.outputs[0].token_ids)
        counts = [False] * len(prompt) + [True] * len(answer)
        documents.append(Document(prompt + answer, counts, whole=False))
    return documents


def write_own_text(
    base: Path,
    beginnings: Iterator[list[int]],
    heldout: Sequence[list[int]],
    seed: int,
    tokens: int,
) -> OwnText:
    """Continue ``beginnings`` with the Llama in ``base`` until it has written ``tokens``."""
    train: list[Document] = []
    count = 0
    with LLM(str(base)) as llm:
        judged = {t: go_on(llm, heldout, (t,), seed) for t in HELDOUT_TEMPERATURES}
        while count < tokens:
            wave = go_on(llm, list(islice(beginnings, _WAVE)), TEMPERATURES, seed + len(train))
            train += wave
            count += sum(sum(d.counts) for d in wave)
            print(f"{base.name} has written {count:,} of {tokens:,} tokens")
    return OwnText(train, judged)


def save_own_text(text: OwnText, base: Path, path: Path) -> None:
    """Write a line of JSON that names the model, then one for each text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with partial.open("w") as file:
        file.write(json.dumps({"base": str(base.resolve())}) + "\n")
        for temperature, documents in [(None, text.train), *text.heldout.items()]:
            for document in documents:
                begun = document.counts.index(True)
                line = {"heldout": temperature, "begun": begun, "ids": document.ids}
                file.write(json.dumps(line) + "\n")
    partial.replace(path)


def load_own_text(base: Path, path: Path) -> OwnText:
    """Read a file of `save_own_text`.

    Raises:
        ValueError: another model wrote the text.
    """
    text = OwnText([], {})
    with path.open() as file:
        writer = json.loads(file.readline())["base"]
        if writer != str(base.resolve()):
            raise ValueError(f"{path} was written by {writer}, not by {base}; remove it.")
        for line in map(json.loads, file):
            ids, begun = line["ids"], line["begun"]
            counts = [False] * begun + [True] * (len(ids) - begun)
            temperature = line["heldout"]
            kept = text.train if temperature is None else text.heldout.setdefault(temperature, [])
            kept.append(Document(ids, counts, whole=False))
    return text


class OwnTextStream(ChunkStream):
    """Stream of texts that the model wrote: all of them once, in a new order, then again."""

    def __init__(self, texts: Sequence[Document], batch_tokens: int, seed: int):
        super().__init__(batch_tokens, seed, (256,))
        self.texts = texts

    def documents(self, chunk: int, rng: random.Random) -> Iterator[Document]:
        n = len(self.texts)
        for i in range(chunk * _PER_CHUNK, (chunk + 1) * _PER_CHUNK):
            epoch, place = divmod(i, n)
            if i == chunk * _PER_CHUNK or place == 0:
                order = list(range(n))
                random.Random(f"{self.seed}/order/{epoch}").shuffle(order)
            yield self.texts[order[place]]
