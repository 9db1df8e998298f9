from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoProcessor

from training import train
from training.data import IGNORE
from training.eyes import (
    IMAGE_ID,
    ROWS,
    Eyes,
    SceneStream,
    answer_loss,
    collate,
    encode,
    exam,
    label,
    load_eyes,
    make_tokenizer,
)
from training.loop import Plan
from training.scenes import (
    COLORS,
    KINDS,
    SIZE,
    Scene,
    Thing,
    ask,
    is_heldout,
    is_heldout_number,
    make_scene,
)

GROUND = np.zeros((SIZE, SIZE, 3), np.uint8)
SCENE = Scene(
    GROUND, (Thing("star", "red", 0), Thing("cross", "orange", 4), Thing("cross", "blue", 5))
)
NUMBER = Scene(GROUND, (), 42, "pink")
ANSWERS = {
    "color": {"star": "It is red."},
    "shape": {"red": "It is a star.", "orange": "It is a cross.", "blue": "It is a cross."},
    "count": {
        "many crosses": "There are two crosses.",
        "many stars": "There is one star.",
        "many shapes": "There are three shapes.",
        "red shapes": "There is one red shape.",
        "hearts": "There are no hearts.",
        "pink shapes": "There are no pink shapes.",
    },
    "place": {"star": "It is at the top left.", "blue cross": "It is on the right."},
    "at": {"top left": "A red star.", "middle": "An orange cross.", "bottom?": "Nothing."},
    "exists": {"an orange cross": "Yes.", "a red star": "Yes.", "a blue star": "No."},
    "describe": {
        "": "A red star at the top left, an orange cross in the middle and a blue cross on the"
        " right."
    },
}


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return make_tokenizer(0)


@pytest.fixture(scope="module")
def model(words: Tokenizer) -> Eyes:
    torch.manual_seed(0)
    return Eyes(words.get_vocab_size()).eval()


@pytest.mark.parametrize("kind", ANSWERS)
def test_answers(kind: str) -> None:
    rng = random.Random(0)
    asked = {q.text: q.answer for q in (ask(SCENE, kind, rng) for _ in range(600)) if q}
    for words, answer in ANSWERS[kind].items():
        found = {a for text, a in asked.items() if words in text}
        assert found == {answer}, words


def test_numbers() -> None:
    rng = random.Random(0)
    answers = {(q.kind, q.answer) for k in KINDS if (q := ask(NUMBER, k, rng)) is not None}
    assert answers == {
        ("number", "It is 42."),
        ("describe", "The number 42 in pink."),
        ("color", "It is pink."),
    }
    assert ask(SCENE, "number", rng) is None


def test_a_scene_shows_its_things() -> None:
    for seed in range(20):
        scene = make_scene(random.Random(seed), numbers=0.0)
        assert np.array_equal(scene.picture, make_scene(random.Random(seed), numbers=0.0).picture)
        ground = np.median(scene.picture.reshape(-1, 3), axis=0)
        changed = np.abs(scene.picture.astype(int) - ground).max(-1) > 60
        cells = changed.reshape(3, SIZE // 3, 3, SIZE // 3).mean((1, 3)).ravel()
        assert [i for i in range(9) if cells[i] > 0.05] == [t.cell for t in scene.things]
        for thing in scene.things:
            row, column = divmod(thing.cell, 3)
            cell = np.s_[32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
            mean = scene.picture[cell][changed[cell]].mean(0)
            assert np.abs(mean - COLORS[thing.color]).max() < 60


def test_held_out_things_are_held_out() -> None:
    rng = random.Random(0)
    for _ in range(200):
        scene = make_scene(rng)
        assert not any(is_heldout(t.shape, t.color) for t in scene.things)
        assert scene.number is None or not is_heldout_number(scene.number)
    for kind in ("shape", "number", "place"):
        for question, scene in exam(kind, 10, rng, heldout=True):
            words = f"{question.text} {question.answer}"
            pairs = [t for t in scene.things if is_heldout(t.shape, t.color)]
            assert [t for t in pairs if t.shape in words or t.color in words] or (
                scene.number is not None and is_heldout_number(scene.number)
            )


def test_labels_are_at_the_places() -> None:
    parts, hues = (part.reshape(6, 6) for part in label(SCENE))
    assert parts[0, 0] == parts[1, 1] == 4  # a star
    assert parts[2, 2] == parts[3, 5] == 5
    assert hues[3, 5] == 1 + list(COLORS).index("blue")
    assert (parts > 0).sum() == (hues > 0).sum() == 12
    parts, _ = (part.reshape(6, 6) for part in label(NUMBER))
    assert parts[1:5, 1:5].unique(dim=0).tolist() == [[11, 11, 9, 9]]
    assert (parts > 0).sum() == 16


def test_turns_are_read_alone_as_transformers_reads_them(model: Eyes, words: Tokenizer) -> None:
    rng = random.Random(1)
    scene = make_scene(rng, numbers=0.0)
    questions = [ask(scene, kind, rng) for kind in ("describe", "at", "exists")]
    assert all(questions)

    def answers(*rows: tuple[list[int], list[int], list[int]]) -> list[torch.Tensor]:
        tokens, targets, pixels, turns, *_ = collate([(scene, row) for row in rows])
        with torch.no_grad():
            hidden, _, _ = model(tokens, pixels, turns)
        return [h[t != IGNORE] for h, t in zip(hidden, targets, strict=True)]

    (packed,) = answers(encode(words, questions, together=False))
    single = [encode(words, [question], together=True) for question in questions]
    torch.testing.assert_close(packed, torch.cat(answers(*single)), atol=1e-5, rtol=1e-4)

    ids, targets, _ = encode(words, questions, together=True)
    assert ids.count(IMAGE_ID) == ROWS
    levels = torch.from_numpy(scene.picture).permute(2, 0, 1)[None] / 127.5 - 1
    with torch.no_grad():
        expected = model.llava(input_ids=torch.tensor([ids]), pixel_values=levels).logits[0]
    (found,) = answers((ids, targets, [0] * len(ids)))
    keep = torch.tensor(targets) != IGNORE
    torch.testing.assert_close(model.logits(found), expected[keep], atol=1e-5, rtol=1e-4)


def test_a_run_exports_and_writes_a_card(
    tmp_path: Path, words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.eyes_card.QUESTIONS", 2)
    monkeypatch.setattr("training.train.make_tokenizer", lambda seed: words)
    plan, out = Plan(steps=4, bfloat16=False, workers=1), tmp_path / "stories-eyes"
    train.eyes_loop(plan, out, tmp_path / "run", 0).run()
    card = (out / "README.md").read_text()
    assert "4 steps" in card
    assert card.count(" % |") == 2 * len(KINDS)

    first = train.eyes_loop(plan, out, tmp_path / "other", 0)
    first.run(until_step=2)
    second = train.eyes_loop(plan, out, tmp_path / "other", 0)
    second.resume()
    losses = [second.train_step() for _ in range(2)]
    assert losses[-1] < 12
    for name, weight in load_eyes(out).llava.state_dict().items():
        found = second.module.llava.state_dict()[name]
        assert torch.equal(weight, found.bfloat16().float()), name

    processor = AutoProcessor.from_pretrained(out)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}]
    text = processor.apply_chat_template(chat, add_generation_prompt=True)
    assert text == "<|im_start|>user\n<image>Hi<|im_end|>\n<|im_start|>assistant\n"
    inputs = processor(text=text, images=[SCENE.picture], return_tensors="pt")
    assert inputs["pixel_values"].shape == (1, 3, SIZE, SIZE)
    assert (inputs["input_ids"] == IMAGE_ID).sum() == ROWS
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_loss_falls(words: Tokenizer) -> None:
    torch.manual_seed(0)
    model = Eyes(words.get_vocab_size())
    loss, batch = answer_loss(model), [part[:8] for part in SceneStream(words, 0).next()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        losses.append(loss(tuple(batch)))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]
