"""Sounds for the built-in speech model: words that espeak-ng speaks, with noise, and their times.

A sound is made when it is needed, so no sound is seen twice. The library of Debian's package
`espeak-ng` is loaded by its C interface (`speak_lib.h`), which also tells when each word begins.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.media.log_mel import LogMel
from training.data import IGNORE
from training.loop import Batch
from training.speech import (
    END,
    FIRST_TIMESTAMP,
    MEL,
    NO_SPEECH,
    NO_TIMESTAMPS,
    SECONDS,
    START,
    STATES_A_SECOND,
    WORDS,
    SpeechConfig,
    word_token,
)

Samples = NDArray[np.float32]
RATE = 16_000
ACCENTS = ("en", "en-us", "en-us-nyc", "en-029", "en-gb-x-rp", "en-gb-x-gbclan", "en-gb-x-gbcwmd")
HELD_OUT_ACCENT = "en-gb-scotland"
VOICES = (
    "Alex", "Alicia", "Andy", "Annie", "AnxiousAndy", "Denis", "Diogo", "Henrique", "Hugo", "Jacky",
    "Lee", "Marco", "Mario", "Michael", "Mike", "Nguyen", "adam", "anika", "announcer", "antonio",
    "aunty", "belinda", "benjamin", "boris", "caleb", "david", "ed", "f1", "f2", "f3", "f5",
    "grandma", "grandpa", "gustave", "iven", "iven2", "iven3", "iven4", "john", "kaukovalta",
    "klatt", "klatt2", "klatt3", "klatt4", "klatt5", "klatt6", "m1", "m2", "m3", "m4", "m5", "m7",
    "m8", "marcelo", "max", "michel", "miguel", "norbert", "pablo", "pedro", "quincy", "rob",
    "robert", "sandro", "shelby", "travis", "zac",
)  # fmt: skip
HELD_OUT_VOICES = (
    "Andrea", "Gene", "Gene2", "edward", "edward2", "f4", "linda", "m6", "paul", "steph", "steph2",
    "steph3", "victor",
)  # fmt: skip
LONGEST = 7
"""Most words of a sound."""
_SYNCHRONOUS, _CHARACTERS, _UTF8 = 2, 1, 1
_SPEED, _PITCH, _RANGE = 1, 3, 4
_WORD_EVENT = 1
_BLOCK = 1024


class _Event(ctypes.Structure):
    """`espeak_EVENT` of `speak_lib.h`."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_char * 8),
    )


_Callback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
)


class Synthesizer:
    """espeak-ng.

    Raises:
        FileNotFoundError: the library is not installed.
    """

    def __init__(self) -> None:
        name = ctypes.util.find_library("espeak-ng")
        if name is None:
            raise FileNotFoundError("libespeak-ng is missing: apt install espeak-ng")
        self._library = ctypes.CDLL(name)
        self.rate: int = self._library.espeak_Initialize(_SYNCHRONOUS, 0, None, 0)
        """Samples a second."""
        self._sound: list[Samples] = []
        self._begins: list[int] = []
        self._callback = _Callback(self._receive)  # espeak-ng keeps only its address
        self._library.espeak_SetSynthCallback(self._callback)

    def _receive(self, wav: ctypes._Pointer[ctypes.c_short], count: int, events: Any) -> int:
        if wav and count:
            self._sound.append(np.ctypeslib.as_array(wav, (count,)).astype(np.float32) / 32768)
        i = 0
        while events[i].type:
            if events[i].type == _WORD_EVENT:
                self._begins.append(events[i].sample)
            i += 1
        return 0

    def speak(
        self, text: str, voice: str, speed: int = 175, pitch: int = 50, tone: int = 50
    ) -> tuple[Samples, list[int]]:
        """Return the sound of a text, float32 [samples], and the first sample of each word.

        Args:
            text: what is said.
            voice: language and variant, such as "en-us+f3".
            speed: words a minute.
            pitch: 0 to 100.
            tone: 0 (monotone) to 100.
        """
        library = self._library
        if library.espeak_SetVoiceByName(voice.encode()):
            raise ValueError(f"espeak-ng has no voice {voice!r}")
        for what, value in ((_SPEED, speed), (_PITCH, pitch), (_RANGE, tone)):
            library.espeak_SetParameter(what, value, 0)
        self._sound, self._begins = [], []
        data = text.encode() + b"\0"
        library.espeak_Synth(data, len(data), 0, _CHARACTERS, 0, _UTF8, None, None)
        return np.concatenate(self._sound), self._begins


@dataclass
class Spoken:
    """A sound at 16 kHz, and what is said in it."""

    samples: Samples
    words: list[str]
    edges: list[float]
    """Seconds at which the words begin, and the last one ends."""


def speak(
    synthesizer: Synthesizer, rng: random.Random, voice: str, words: Sequence[str] | None = None
) -> Spoken:
    """Return words in a voice, with random speed, pitch and pauses; without noise.

    Args:
        synthesizer: the synthesizer.
        rng: source of what is random.
        voice: voice of the synthesizer.
        words: what is said; None: words at random.
    """
    while True:
        chosen = list(words or rng.choices(WORDS, k=rng.randint(1, LONGEST)))
        text = "".join(word + rng.choice((" ", " ", ", ")) for word in chosen)
        sound, begins = synthesizer.speak(
            text, voice, rng.randint(120, 210), rng.randint(25, 75), rng.randint(20, 80)
        )
        ratio = RATE / synthesizer.rate * rng.uniform(0.93, 1.07)
        loud = np.flatnonzero(np.abs(sound) > 0.01)
        seconds = len(sound) * ratio / RATE
        if len(begins) == len(chosen) and len(loud) and seconds < SECONDS - 0.3:
            break
    samples = _resample(sound, ratio)
    scale = len(samples) / len(_pad(sound)) / RATE
    return Spoken(samples, chosen, [scale * begin for begin in (*begins, int(loud[-1]))])


def _resample(sound: Samples, ratio: float) -> Samples:
    """Return a sound with about ``ratio`` times the samples and the same waves."""
    sound = _pad(sound)
    count = round(len(sound) * ratio / _BLOCK) * _BLOCK
    spectrum = np.fft.rfft(sound)[: count // 2 + 1]
    return (np.fft.irfft(spectrum, count) * (count / len(sound))).astype(np.float32)


def _pad(sound: Samples, before: int = 0, after: int = 0) -> Samples:
    """Return a sound with silence around it; its length is one of those whose FFT is fast."""
    return np.pad(sound, (before, after + -(before + len(sound) + after) % _BLOCK))


def disturb(spoken: Spoken, noise: np.random.Generator, strength: float = 1.0) -> Spoken:
    """Return the sound as if recorded: filtered, quieter or louder, in noise, not at once.

    Args:
        spoken: the sound.
        noise: source of what is random.
        strength: 0 to 1; below 1, the filter and the noise are weaker.
    """
    rest = SECONDS - 2 * _BLOCK / RATE - len(spoken.samples) / RATE
    lead = noise.uniform(0, min(1.0, rest))
    tail = noise.uniform(0, rest - lead)
    sound = _pad(spoken.samples, round(lead * RATE), round(tail * RATE))
    # A smooth filter: a curve through 8 points, of 4 dB or so.
    spectrum = np.fft.rfft(sound)
    places = np.linspace(0, 1, len(spectrum))
    decibels = np.interp(places, np.linspace(0, 1, 8), noise.normal(0, 4 * strength, 8))
    spectrum *= 10 ** (decibels / 20)
    hiss = _hiss(len(spectrum), noise)
    ratio = 10 ** (-noise.uniform(5 + 20 * (1 - strength), 45) / 20)
    spectrum += hiss * (ratio * _level(spectrum) / _level(hiss))
    sound = np.fft.irfft(spectrum)
    sound *= 10 ** (noise.uniform(-25, 0) / 20) / np.abs(sound).max()
    return Spoken(sound.astype(np.float32), spoken.words, [lead + t for t in spoken.edges])


def silence(noise: np.random.Generator) -> Samples:
    """Return noise in which nothing is said."""
    sound = np.fft.irfft(
        _hiss(noise.integers(8, SECONDS * RATE // _BLOCK) * _BLOCK // 2 + 1, noise)
    )
    sound *= 10 ** (noise.uniform(-80, -10) / 20) / np.abs(sound).max()
    return sound.astype(np.float32)


def _hiss(count: int, noise: np.random.Generator) -> NDArray[np.complex128]:
    """Return the spectrum of noise between white and brown."""
    spectrum = noise.standard_normal(2 * count).view(np.complex128)
    return spectrum * np.maximum(np.arange(count), count / 2000) ** -noise.uniform(0, 1)


def _level(spectrum: NDArray[np.complex128]) -> float:
    return float(np.sqrt(np.square(spectrum.real).sum() + np.square(spectrum.imag).sum()))


class SpokenStream:
    """Batches of sounds; each is a function of the seed and its number.

    The first tensor is the features, float32 ``[sounds, mel bands, frames]``. A row of the second
    has the decoder's tokens, the tokens that follow them, and for each state of the encoder the
    number of the token that is said then (0: none), int64 ``[sounds, 2 * tokens + states]``.
    """

    def __init__(self, config: SpeechConfig, seed: int, sounds: int = 16):
        self.config, self.seed, self.sounds = config, seed, sounds
        self.state, self.progress = 0, 0.0
        self._synthesizer = Synthesizer()
        self._features = LogMel(feature_size=MEL, chunk_length=SECONDS)

    def next(self) -> Batch:
        rng = random.Random(f"{self.seed}/{self.state}")
        noise = np.random.default_rng([self.seed, self.state])
        self.state += 1
        made = [self._sound(rng, noise) for _ in range(self.sounds)]
        features, rows = zip(*made, strict=True)
        return torch.from_numpy(np.stack(features)), torch.tensor(rows)

    def _sound(self, rng: random.Random, noise: np.random.Generator) -> tuple[Samples, list[int]]:
        timed = rng.random() < 0.5
        spans = [0] * self.config.max_source_positions
        if rng.random() < 0.06:
            samples = silence(noise)
            first = FIRST_TIMESTAMP + rng.randrange(STATES_A_SECOND) if timed else NO_TIMESTAMPS
            tokens, targets = [START, first], [NO_SPEECH, END]
        else:
            voice = f"{rng.choice(ACCENTS)}+{rng.choice(VOICES)}"
            strength = min(1.0, 2.5 * self.progress)
            spoken = disturb(speak(self._synthesizer, rng, voice), noise, strength)
            samples, edges = spoken.samples, spoken.edges
            said = [word_token(word) for word in spoken.words]
            first, last = (
                FIRST_TIMESTAMP + round(t * STATES_A_SECOND) for t in (edges[0], edges[-1])
            )
            after = [first, *said, last, END] if timed else [NO_TIMESTAMPS, *said, END]
            tokens, targets = [START, *after[:-1]], after
            for i in range(len(said)):
                begin, end = (round(t * STATES_A_SECOND) for t in edges[i : i + 2])
                spans[begin:end] = [i + 1] * len(spans[begin:end])
        rest = LONGEST + 3 - len(tokens)
        row = [*tokens, *[END] * rest, *targets, *[IGNORE] * rest, *spans]
        return self._features.compute(samples), row
