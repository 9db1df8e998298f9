"""Turns of a speaker, found by the energy of short frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

_FRAME_MS = 20
# Successive loud frames with which speech begins.
_LOUD_FRAMES = 3
_FULL_SCALE = 2**15


@dataclass(frozen=True)
class TurnDetection:
    """Settings, named and filled as in OpenAI's `server_vad`."""

    threshold: float = 0.5
    """Loudness of speech, 0 to 1: -60 dB to -20 dB of full scale."""
    prefix_padding_ms: int = 300
    """Milliseconds of sound before the speech that belong to a turn."""
    silence_duration_ms: int = 500
    """Milliseconds of silence that end a turn."""

    @property
    def power(self) -> float:
        """Least mean square of a loud frame of int16 samples."""
        decibels = -60 + 40 * self.threshold
        return float(_FULL_SCALE**2 * 10 ** (decibels / 10))


class TurnChange(NamedTuple):
    """Begin or end of a turn."""

    kind: Literal["started", "stopped"]
    at: int
    """Sample at which it is, since the first one."""


class TurnDetector:
    """Detector of turns in a stream of samples.

    Args:
        settings: the settings.
        rate: samples a second.
        first: number of the first sample.
    """

    def __init__(self, settings: TurnDetection, rate: int, first: int = 0) -> None:
        self._settings, self._rate = settings, rate
        self._frame = rate * _FRAME_MS // 1000
        self._rest = np.empty(0, np.int16)
        self._at = first
        self._loud = self._quiet = 0
        self.speaking = False
        """True during a turn."""

    @property
    def padding(self) -> int:
        """Samples before the loud frames that belong to a turn, and those of the loud frames."""
        return self._settings.prefix_padding_ms * self._rate // 1000 + _LOUD_FRAMES * self._frame

    def feed(self, samples: NDArray[np.int16]) -> list[TurnChange]:
        """Take in the next samples; return the changes in them."""
        samples = np.concatenate([self._rest, samples])
        whole = len(samples) // self._frame
        frames = samples[: whole * self._frame].astype(np.float32).reshape(whole, self._frame)
        self._rest = samples[whole * self._frame :]
        changes = []
        for loud in (np.square(frames).mean(axis=1) >= self._settings.power).tolist():
            self._at += self._frame
            self._loud, self._quiet = (self._loud + 1, 0) if loud else (0, self._quiet + 1)
            if not self.speaking and self._loud == _LOUD_FRAMES:
                self.speaking = True
                changes.append(TurnChange("started", max(0, self._at - self.padding)))
            elif self.speaking and self._quiet * _FRAME_MS >= self._settings.silence_duration_ms:
                self.speaking = False
                changes.append(TurnChange("stopped", self._at))
        return changes
