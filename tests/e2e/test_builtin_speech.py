"""The built-in speech model hears what its card says: sounds of voices that its training lacks.

The sounds in tests/speech are made by espeak-ng, with words that have no recorded consonants.
"""

import ctypes.util
import random
from pathlib import Path

import numpy as np
import pytest

from octavo import LLM, cli

MODEL = "octavo/spoken-words"
FOLDER = Path(__file__).parents[1] / "speech"
SAID = {"digits.wav": "one nine one nine one", "words.wav": "no on one"}


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, max_num_seqs=8) as made:
        yield made


def test_sounds_of_held_out_voices(llm):
    sounds = [FOLDER / name for name in SAID]
    untimed = llm.transcribe(sounds, timestamps=False)
    found = llm.transcribe(sounds)
    assert [transcript.text for transcript in untimed] == list(SAID.values())
    assert [transcript.text for transcript in found] == list(SAID.values())
    for transcript in found:
        (segment,) = transcript.segments
        assert segment.start < 0.5
        assert abs(segment.end - transcript.duration) < 0.5


def test_silence_has_no_text(llm):
    noise = np.random.default_rng(0).normal(0, 0.01, 16_000 * 2).astype(np.float32)
    for timestamps in (False, True):
        (transcript,) = llm.transcribe(noise, timestamps=timestamps)
        assert transcript.text == ""


def test_new_sounds_of_espeak(llm):
    if ctypes.util.find_library("espeak-ng") is None:
        pytest.skip("espeak-ng is not installed")
    from training.spoken import HELD_OUT_VOICES, Synthesizer, speak
    from training.spoken_card import error_rate

    synthesizer, rng = Synthesizer(), random.Random(1)
    sounds = [speak(synthesizer, rng, f"en-us+{voice}") for voice in HELD_OUT_VOICES]
    assert error_rate(llm, sounds) < 0.1


def test_octavo_transcribe(capsys):
    command = ["transcribe", str(FOLDER / "digits.wav"), "--model", MODEL, "--format", "srt"]
    assert cli.main(command) == 0
    number, times, text, *_ = capsys.readouterr().out.splitlines()
    assert (number, text) == ("1", SAID["digits.wav"])
    assert times.startswith("00:00:00")
