"""The built-in model of pictures and texts: LLaVA with a SigLIP tower, all of it very small.

Here transformers' own model is trained, so that export is a plain copy. The scenes are those of
``training/scenes.py``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    SiglipVisionConfig,
)

from training.checkpoint import write_json
from training.data import IGNORE
from training.loop import Batch
from training.scenes import COLORS, SHAPES, SIZE, Question, Scene, ask, ask_any, make_scene
from training.tokenizer import (
    EOS_TOKEN_IDS,
    IM_END,
    IM_START,
    PAD_TOKEN_ID,
    save_tokenizer,
    train_tokenizer,
)

IMAGE = "<image>"
IMAGE_ID = 3
PATCH = 16
SIDE = SIZE // PATCH
ROWS = SIDE**2
"""Number of tokens of a picture."""
MAX_LENGTH = 512
_VOCAB = 448
_PICTURES = 32
_QUESTIONS = 3
_MORE_NUMBERS = 500
"""Number of batches after which two pictures in five have a number; before, one in five."""
_BEFORE = f"{IM_START}user\n"
_BETWEEN = f"{IM_END}\n{IM_START}assistant\n"
TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content if part.type == 'image' -%}{{- '<image>' -}}{%- endfor -%}
{%- for part in message.content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def make_config(vocab_size: int) -> LlavaConfig:
    """Return the shape of the model."""
    vision = SiglipVisionConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIZE,
        patch_size=PATCH,
        vision_use_head=False,
    )
    text = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=PAD_TOKEN_ID,
        eos_token_id=EOS_TOKEN_IDS,
        pad_token_id=PAD_TOKEN_ID,
    )
    return LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE_ID,
        image_seq_length=ROWS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )


class Eyes(nn.Module):
    """LLaVA, and a classifier of the patches, which helps the tower to learn and is not shipped."""

    def __init__(self, vocab_size: int):
        super().__init__()
        self.llava = LlavaForConditionalGeneration(make_config(vocab_size))
        # The last layer's result is read before this norm, so it learns nothing.
        self.llava.model.vision_tower.post_layernorm.requires_grad_(False)
        self.classifier = nn.Linear(128, len(_PARTS) + len(_HUES))

    def forward(
        self, tokens: Tensor, pixels: Tensor, turns: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return hidden states ``[rows, length, hidden]``, and logits of parts and hues of patches.

        Args:
            tokens: int64 ``[rows, length]``.
            pixels: uint8 ``[rows, SIZE, SIZE, 3]``.
            turns: int64 ``[rows, length]``: 0, which all later tokens see, or the number of a
                turn, which sees no other turn.
        """
        model = self.llava.model
        levels = pixels.permute(0, 3, 1, 2) / 127.5 - 1
        patches = model.vision_tower(levels, output_hidden_states=True).hidden_states[-1]
        shown = model.multi_modal_projector(patches)
        texts = model.language_model.embed_tokens(tokens)
        place = (tokens == IMAGE_ID)[..., None].expand_as(texts)
        hidden = model.language_model(
            inputs_embeds=texts.masked_scatter(place, shown.to(texts.dtype)),
            attention_mask=_mask(turns),
            position_ids=_positions(turns),
            use_cache=False,
        ).last_hidden_state
        parts, hues = self.classifier(patches).split((len(_PARTS), len(_HUES)), dim=-1)
        return hidden, parts, hues

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[..., vocab]`` of hidden states."""
        return F.linear(hidden, self.llava.model.language_model.embed_tokens.weight)


def _mask(turns: Tensor) -> Tensor:
    """Return what each token sees: bool ``[rows, 1, length, length]``."""
    seen = (turns[:, None, :] == 0) | (turns[:, None, :] == turns[:, :, None])
    return seen.tril()[:, None]


def _positions(turns: Tensor) -> Tensor:
    """Return the number of earlier tokens that each token sees."""
    return _mask(turns)[:, 0].sum(-1) - 1


def answer_loss(model: Eyes) -> Callable[[Batch], Tensor]:
    """Return the cross-entropy of the answers, plus that of the parts and hues of the patches."""

    def loss(batch: Batch) -> Tensor:
        tokens, targets, pixels, turns, parts, hues = batch
        hidden, found_parts, found_hues = model(tokens, pixels, turns)
        keep = targets != IGNORE
        answers = F.cross_entropy(model.logits(hidden[keep]).float(), targets[keep])
        return (
            answers
            + F.cross_entropy(found_parts.flatten(0, 1).float(), parts.flatten())
            + F.cross_entropy(found_hues.flatten(0, 1).float(), hues.flatten())
        )

    return loss


# --- data -------------------------------------------------------------------------------------


_PARTS = ("", *SHAPES, *map(str, range(10)))
_HUES = ("", *COLORS)


def label(scene: Scene) -> tuple[Tensor, Tensor]:
    """Return the part (a shape or a digit) and the color at each patch, each int64 ``[ROWS]``."""
    parts, hues = torch.zeros(2, SIDE, SIDE, dtype=torch.int64)
    for thing in scene.things:
        row, column = (2 * place for place in divmod(thing.cell, 3))
        parts[row : row + 2, column : column + 2] = _PARTS.index(thing.shape)
        hues[row : row + 2, column : column + 2] = _HUES.index(thing.color)
    if scene.number is not None:
        digits = [_PARTS.index(digit) for digit in str(scene.number)]
        begin = 2 if len(digits) == 1 else 1
        for i, digit in enumerate(digits):
            parts[1:5, begin + 2 * i : begin + 2 * i + 2] = digit
        hues[1:5, begin : begin + 2 * len(digits)] = _HUES.index(scene.color)
    return parts.flatten(), hues.flatten()


def make_tokenizer(seed: int) -> Tokenizer:
    """Return a tokenizer of the words of the questions and answers."""
    rng = random.Random(f"{seed}/words")
    questions = [ask_any(make_scene(rng), rng) for _ in range(3000)]
    texts = [f"user\n{q.text}\nassistant\n{q.answer}" for q in questions]
    return train_tokenizer(texts, _VOCAB, (IMAGE,))


def encode(
    tokenizer: Tokenizer, questions: list[Question], *, together: bool
) -> tuple[list[int], list[int], list[int]]:
    """Return tokens, targets and turns of questions about a picture.

    ``together``: a conversation, in which each question follows the answers to those before it;
    else each question sees the picture alone.
    """
    ids = [*tokenizer.encode(_BEFORE).ids, *[IMAGE_ID] * ROWS]
    counts, turns = [False] * len(ids), [0] * len(ids)
    for i, question in enumerate(questions):
        before = f"\n{_BEFORE}" if together and i else ""
        asked = tokenizer.encode(f"{before}{question.text}{_BETWEEN}").ids
        answer = tokenizer.encode(f"{question.answer}{IM_END}").ids
        ids += asked + answer
        counts += [False] * len(asked) + [True] * len(answer)
        turns += [0 if together else i + 1] * len(asked + answer)
    targets = [token if counted else IGNORE for token, counted in zip(ids, counts, strict=True)]
    return ids, [*targets[1:], IGNORE], turns


def collate(rows: list[tuple[Scene, tuple[list[int], list[int], list[int]]]]) -> Batch:
    """Return tokens, targets, pixels, turns, parts and hues of scenes with questions."""
    length = max(len(ids) for _, (ids, _, _) in rows)
    columns = []
    for i, filler in enumerate((PAD_TOKEN_ID, IGNORE, 0)):
        filled = [encoded[i] + [filler] * (length - len(encoded[i])) for _, encoded in rows]
        columns.append(torch.tensor(filled))
    tokens, targets, turns = columns
    pixels = torch.stack([torch.from_numpy(scene.picture) for scene, _ in rows])
    parts, hues = (torch.stack(part) for part in zip(*[label(s) for s, _ in rows], strict=True))
    return tokens, targets, pixels, turns, parts, hues


class SceneStream:
    """Endless, seeded, resumable stream of scenes with questions.

    A batch depends only on (seed, its number), which is ``state``.
    """

    def __init__(self, tokenizer: Tokenizer, seed: int):
        self.tokenizer, self.seed = tokenizer, seed
        self.state = 0
        self.progress = 0.0

    def next(self) -> Batch:
        """Return a batch as `collate` does; a third of its rows are conversations."""
        rng = random.Random(f"{self.seed}/scenes/{self.state}")
        self.state += 1
        rows = []
        for i in range(_PICTURES):
            scene = make_scene(rng, numbers=0.4 if self.state > _MORE_NUMBERS else 0.2)
            questions = [ask_any(scene, rng) for _ in range(_QUESTIONS)]
            rows.append((scene, encode(self.tokenizer, questions, together=i % 3 == 0)))
        return collate(rows)


# --- results ----------------------------------------------------------------------------------


def exam(
    kind: str, count: int, rng: random.Random, *, heldout: bool
) -> Iterator[tuple[Question, Scene]]:
    """Generate questions of a kind; ``heldout``: about held-out things or numbers."""
    made = 0
    while made < count:
        numbers = 1.0 if kind == "number" else 0.2
        scene = make_scene(rng, numbers=numbers, heldout=heldout)
        question = ask(scene, kind, rng)
        if question is not None and (not heldout or scene.concerns_heldout(question)):
            made += 1
            yield question, scene


def examine(
    model: Eyes, tokenizer: Tokenizer, kind: str, count: int, *, heldout: bool, seed: int = 1
) -> float:
    """Return the share of right answers of the greedy model to single questions of a kind.

    The greedy answer is right if each token of the right one is the likeliest after those before.
    """
    rng = random.Random(f"{seed}/exam/{kind}/{heldout}")
    right = 0
    for begin in range(0, count, 50):
        rows = []
        for question, scene in exam(kind, min(50, count - begin), rng, heldout=heldout):
            rows.append((scene, encode(tokenizer, [question], together=True)))
        tokens, targets, pixels, turns, *_ = collate(rows)
        with torch.no_grad():
            hidden, _, _ = model(tokens, pixels, turns)
            found = model.logits(hidden).argmax(-1)
        right += int(((found == targets) | (targets == IGNORE)).all(1).sum())
    return right / count


def export_eyes(model: Eyes, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a folder that transformers and Octavo load."""
    deepcopy(model.llava).bfloat16().save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    special = {"bos_token_id": PAD_TOKEN_ID, "eos_token_id": EOS_TOKEN_IDS}
    special |= {"pad_token_id": PAD_TOKEN_ID}
    write_json(folder / "generation_config.json", special | {"do_sample": False})
    save_tokenizer(tokenizer, folder, MAX_LENGTH, (IMAGE,), template=None)
    # In a file of its own, so that transformers' processor finds it.
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    pictures = {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": SIZE, "width": SIZE},
        "resample": 3,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    write_json(folder / "preprocessor_config.json", pictures)
    parts = {"processor_class": "LlavaProcessor", "patch_size": PATCH, "image_token": IMAGE}
    parts |= {"vision_feature_select_strategy": "full", "num_additional_image_tokens": 0}
    write_json(folder / "processor_config.json", parts)


def load_eyes(folder: Path) -> Eyes:
    """Return the model in a folder, float32; its classifier is a new one."""
    llava = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    model = Eyes(llava.config.text_config.vocab_size)
    model.llava.load_state_dict(llava.state_dict())
    return model.eval()
