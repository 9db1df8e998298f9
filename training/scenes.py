"""Pictures of shapes and of numbers, with questions about them and right answers.

All is drawn and written by this file, so that no data is needed. A scene depends only on the
generator that it is drawn with.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

SIZE = 96
"""Height and width of a picture in pixels."""
_CELL = SIZE // 3
_DRAWN = 2
"""Pictures are drawn larger by this factor, so that edges are smooth."""

COLORS = {
    "red": (220, 30, 35),
    "orange": (245, 145, 25),
    "yellow": (240, 220, 40),
    "green": (40, 155, 60),
    "blue": (40, 75, 215),
    "purple": (130, 45, 160),
    "pink": (245, 140, 185),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle", "star", "cross", "heart")
PLACES = (
    *("at the top left", "at the top", "at the top right"),
    *("on the left", "in the middle", "on the right"),
    *("at the bottom left", "at the bottom", "at the bottom right"),
)
COUNTS = ("no", "one", "two", "three", "four")
KINDS = ("color", "shape", "count", "place", "at", "exists", "describe", "number")
"""Kinds of question."""

_SEGMENTS = (0x77, 0x24, 0x5D, 0x6D, 0x2E, 0x6B, 0x7B, 0x25, 0x7F, 0x6F)
"""Segments of each digit: from bit 0, top, upper left and right, middle, lower left and right,
bottom."""
_LINES = (
    *(((0, 0), (1, 0)), ((0, 0), (0, 1)), ((1, 0), (1, 1)), ((0, 1), (1, 1))),
    *(((0, 1), (0, 2)), ((1, 1), (1, 2)), ((0, 2), (1, 2))),
)


def is_heldout(shape: str, color: str) -> bool:
    """Return True for a shape in a color that no training picture has: one color of each shape."""
    return list(COLORS).index(color) == (3 * SHAPES.index(shape) + 1) % len(COLORS)


def is_heldout_number(number: int) -> bool:
    """Return True for a number that no training picture has: one in six of two digits."""
    return number > 9 and number % 6 == 2


@dataclass(frozen=True)
class Thing:
    """Shape in a color, in one of nine cells (row by row)."""

    shape: str
    color: str
    cell: int

    @property
    def name(self) -> str:
        return f"{self.color} {self.shape}"

    @property
    def a_name(self) -> str:
        return f"{'an' if self.color == 'orange' else 'a'} {self.name}"


@dataclass(frozen=True)
class Question:
    """Question about a picture, with its right answer."""

    kind: str
    text: str
    answer: str


@dataclass(frozen=True)
class Scene:
    """Picture, uint8 ``[SIZE, SIZE, 3]``: things, or else a number in a color."""

    picture: NDArray[np.uint8]
    things: tuple[Thing, ...]
    number: int | None = None
    color: str = ""

    def concerns_heldout(self, question: Question) -> bool:
        """Return True if a question or its answer names a held-out thing, or the number."""
        words = {w.strip("?.,") for w in f"{question.text} {question.answer}".split()}
        pairs = [(t.shape, t.color) for t in self.things if is_heldout(t.shape, t.color)]
        if question.kind in ("count", "place"):  # which may name one of the two
            return any(shape in words or color in words for shape, color in pairs)
        return not pairs or any(shape in words and color in words for shape, color in pairs)


# --- pictures ---------------------------------------------------------------------------------


def make_scene(rng: random.Random, *, numbers: float = 0.2, heldout: bool = False) -> Scene:
    """Draw a scene: one to four things, or a number of one or two digits.

    Args:
        rng: the generator.
        numbers: share of the scenes with a number.
        heldout: the number, or one of the things, is held out; else none of them is.
    """
    levels = [rng.randint(205, 255)] * 3
    levels = [min(255, level + rng.randint(-12, 12)) for level in levels]
    canvas = Image.new("RGB", (_DRAWN * SIZE, _DRAWN * SIZE), tuple(levels))
    draw = ImageDraw.Draw(canvas)
    if rng.random() < numbers:
        free = [n for n in range(100) if is_heldout_number(n) == heldout]
        # There are few numbers of one digit, so they are drawn more often.
        number = rng.choice([n for n in free if n < 10] * 3 + free)
        color = rng.choice(list(COLORS))
        _draw_number(draw, rng, number, color)
        return Scene(_pixels(canvas, rng), (), number, color)
    things: list[Thing] = []
    cells = sorted(rng.sample(range(9), rng.choice((1, 2, 2, 3, 3, 4))))
    chosen = rng.choice(cells) if heldout else -1
    for cell in cells:
        pairs = [(s, c) for s in SHAPES for c in COLORS if is_heldout(s, c) == (cell == chosen)]
        if things and rng.random() < 0.4:  # several of a shape or a color, to count
            kept = rng.choice(things)
            pairs = [p for p in pairs if kept.shape in p or kept.color in p] or pairs
        shape, color = rng.choice(pairs)
        things.append(Thing(shape, color, cell))
        _draw_thing(draw, rng, things[-1])
    return Scene(_pixels(canvas, rng), tuple(things))


def _pixels(canvas: Image.Image, rng: random.Random) -> NDArray[np.uint8]:
    """Return the picture in its size, with noise."""
    small = np.asarray(canvas.reduce(_DRAWN), np.int16)
    noise = np.random.default_rng(rng.getrandbits(32)).integers(-8, 9, small.shape, np.int16)
    return np.clip(small + noise, 0, 255).astype(np.uint8)


def _fill(rng: random.Random, color: str) -> tuple[int, ...]:
    """Return a color like the named one."""
    return tuple(min(255, max(0, level + rng.randint(-14, 14))) for level in COLORS[color])


def _draw_thing(draw: ImageDraw.ImageDraw, rng: random.Random, thing: Thing) -> None:
    radius = rng.uniform(9, 14)
    free = _CELL / 2 - radius
    x = (thing.cell % 3 + 0.5) * _CELL + rng.uniform(-free, free)
    y = (thing.cell // 3 + 0.5) * _CELL + rng.uniform(-free, free)
    turn = math.radians(rng.uniform(-12, 12))

    def place(right: float, down: float) -> tuple[float, float]:
        """Return a point of the shape in pixels; the shape's radius is 1."""
        turned = right * math.cos(turn) - down * math.sin(turn)
        turned_down = right * math.sin(turn) + down * math.cos(turn)
        return _DRAWN * (x + radius * turned), _DRAWN * (y + radius * turned_down)

    points = [place(*point) for point in _outline(thing.shape)]
    draw.polygon(points, fill=_fill(rng, thing.color))


def _outline(shape: str) -> list[tuple[float, float]]:
    """Return the corners of a shape of radius 1, as distances to the right and down."""
    if shape == "circle":
        return _star(32, 1.0)
    if shape == "square":
        return [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]
    if shape == "triangle":
        return [(0, -0.95), (0.95, 0.75), (-0.95, 0.75)]
    if shape == "star":
        return _star(10, 0.42)
    if shape == "cross":
        arm = [(-0.32, -1), (0.32, -1), (0.32, -0.32)]
        turns = [(1, 0, 0, 1), (0, -1, 1, 0), (-1, 0, 0, -1), (0, 1, -1, 0)]
        return [(a * x + b * y, c * x + d * y) for a, b, c, d in turns for x, y in arm]
    turns = [2 * math.pi * i / 32 for i in range(32)]  # a heart
    waves = ((1, 13 / 16), (2, -5 / 16), (3, -2 / 16), (4, -1 / 16))
    return [
        (math.sin(turn) ** 3, -sum(height * math.cos(i * turn) for i, height in waves))
        for turn in turns
    ]


def _star(corners: int, inner: float) -> list[tuple[float, float]]:
    """Return corners around the centre; every second one has the inner radius."""
    angles = [2 * math.pi * i / corners for i in range(corners)]
    radii = [(1.0, inner)[i % 2] for i in range(corners)]
    return [(r * math.sin(a), -r * math.cos(a)) for a, r in zip(angles, radii, strict=True)]


def _draw_number(draw: ImageDraw.ImageDraw, rng: random.Random, number: int, color: str) -> None:
    """Draw digits of seven segments."""
    width, half, gap = rng.uniform(18, 24), rng.uniform(19, 26), rng.uniform(12, 16)
    thick, fill = round(_DRAWN * rng.uniform(5, 8)), _fill(rng, color)
    digits = [int(digit) for digit in str(number)]
    whole = len(digits) * width + (len(digits) - 1) * gap
    left, top = (SIZE - whole) / 2 + rng.uniform(-6, 6), SIZE / 2 - half + rng.uniform(-8, 8)
    for i, digit in enumerate(digits):
        x = left + i * (width + gap)
        for segment, ends in enumerate(_LINES):
            if _SEGMENTS[digit] >> segment & 1:
                line = [(_DRAWN * (x + a * width), _DRAWN * (top + b * half)) for a, b in ends]
                draw.line(line, fill=fill, width=thick)


# --- questions --------------------------------------------------------------------------------


def ask(scene: Scene, kind: str, rng: random.Random) -> Question | None:
    """Return a question of a kind about a scene; None: there is none with one right answer."""
    made = _ASK[kind](scene, rng) if scene.number is None else _ask_number(scene, kind, rng)
    return None if made is None else Question(kind, *made)


def ask_any(scene: Scene, rng: random.Random) -> Question:
    """Return a question of any kind about a scene."""
    while True:
        question = ask(scene, rng.choice(KINDS), rng)
        if question is not None:
            return question


Made = tuple[str, str] | None


def _ask_number(scene: Scene, kind: str, rng: random.Random) -> Made:
    if kind == "number":
        words = "What number is this?", "Which number is it?", "Read the number."
        return rng.choice(words), f"It is {scene.number}."
    if kind == "describe":
        return _describe(rng), f"The number {scene.number} in {scene.color}."
    if kind == "color":
        return f"What {_color(rng)} is the number?", f"It is {scene.color}."
    return None


def _ask_color(scene: Scene, rng: random.Random) -> Made:
    found = _single(scene, [thing.shape for thing in scene.things], rng)
    if found is None:
        return None
    words = (
        f"What {_color(rng)} is the {found.shape}?",
        f"Which {_color(rng)} is the {found.shape}?",
    )
    return rng.choice(words), f"It is {found.color}."


def _ask_shape(scene: Scene, rng: random.Random) -> Made:
    found = _single(scene, [thing.color for thing in scene.things], rng)
    if found is None:
        return None
    words = f"What shape is {found.color}?", f"Which shape is {found.color}?"
    return rng.choice((*words, f"What is {found.color}?")), f"It is a {found.shape}."


def _ask_count(scene: Scene, rng: random.Random) -> Made:
    by = rng.choice(("shape", "shape", "color", "all"))
    if by == "all":
        count, what = len(scene.things), "shape"
    else:
        known = [getattr(thing, by) for thing in scene.things]
        values = SHAPES if by == "shape" else tuple(COLORS)
        value = rng.choice(known if rng.random() < 0.75 else values)
        count = known.count(value)
        what = value if by == "shape" else f"{value} shape"
    is_are = "is" if count == 1 else "are"
    many = f"{what}es" if what == "cross" else f"{what}s"
    answer = f"There {is_are} {COUNTS[count]} {what if count == 1 else many}."
    words = f"How many {many} are there?", f"How many {many} do you see?"
    return rng.choice(words), answer


def _ask_place(scene: Scene, rng: random.Random) -> Made:
    found = _single(scene, [thing.shape for thing in scene.things], rng)
    what = None if found is None else found.shape
    if found is None or rng.random() < 0.5:
        found = _single(scene, [thing.name for thing in scene.things], rng)
        what = None if found is None else found.name
    return None if found is None else (f"Where is the {what}?", f"It is {PLACES[found.cell]}.")


def _ask_at(scene: Scene, rng: random.Random) -> Made:
    known = {thing.cell: thing for thing in scene.things}
    cell = rng.choice(list(known)) if rng.random() < 0.8 else rng.randrange(9)
    question = f"What is {PLACES[cell]}?"
    return question, _sentence(known[cell].a_name if cell in known else "nothing")


def _ask_exists(scene: Scene, rng: random.Random) -> Made:
    names = {thing.name for thing in scene.things}
    asked = rng.choice(scene.things)
    answer = "Yes."
    if rng.random() < 0.5:
        answer = "No."
        changed = [(asked.shape, c) for c in COLORS] + [(s, asked.color) for s in SHAPES] * 2
        free = [Thing(s, c, 0) for s, c in changed if not is_heldout(s, c)]
        asked = rng.choice([thing for thing in free if thing.name not in names])
    words = f"Is there {asked.a_name}?", f"Do you see {asked.a_name}?"
    return rng.choice(words), answer


def _ask_describe(scene: Scene, rng: random.Random) -> Made:
    parts = [f"{thing.a_name} {PLACES[thing.cell]}" for thing in scene.things]
    text = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return _describe(rng), _sentence(text)


_ASK = {
    "color": _ask_color,
    "shape": _ask_shape,
    "count": _ask_count,
    "place": _ask_place,
    "at": _ask_at,
    "exists": _ask_exists,
    "describe": _ask_describe,
    "number": lambda scene, rng: None,
}


def _describe(rng: random.Random) -> str:
    return rng.choice(("Describe the picture.", "What is in the picture?", "What do you see?"))


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _color(rng: random.Random) -> str:
    return rng.choice(("color", "color", "colour"))


def _single(scene: Scene, values: list[str], rng: random.Random) -> Thing | None:
    """Return a thing whose value no other one has, if there is one."""
    single = [t for t, v in zip(scene.things, values, strict=True) if values.count(v) == 1]
    return rng.choice(single) if single else None
