"""Card of the speech model: how it was made, and how many words it gets wrong, by voice."""

from __future__ import annotations

import platform
import random
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from octavo import LLM
from training.loop import Loop
from training.model import num_parameters
from training.speech import COMMANDS, DIGITS, SECONDS, SpeechConfig
from training.spoken import (
    ACCENTS,
    HELD_OUT_ACCENT,
    HELD_OUT_VOICES,
    VOICES,
    Spoken,
    Synthesizer,
    disturb,
    silence,
    speak,
)

SOUNDS = 40
"""Number of sounds of a voice that are measured."""
DATA = """\
Speech of the synthesizer [eSpeak NG](https://github.com/espeak-ng/espeak-ng) (GPL-3.0-or-later), as
Debian packages it: one to seven of the words at random, in {accents} accents of English and
{voices} voices, with random speed, pitch and pauses. numpy then changes the speed, filters the
sound, and adds noise 5 to 45 dB below it, less at first (`training/spoken.py`). One sound in 17 is
noise alone. No other speech was used.

The synthesizer's licence is that of its program and its files, which Octavo does not ship. The
weights contain neither. Most of what it says is computed; only in its consonants there are short
recordings, which are among its files.
"""
LIMITS = """\
It knows {words} words: whatever else is said, it writes some of them, or nothing. It has heard one
synthesizer only, so expect many errors with people. Of words that are said twice in a row, as in
"nine one one", it may write one wrong. It hears English, does not translate, and
has not learnt to use text before a sound (`prompt`). Its window is {seconds} s, not Whisper's 30 s.
Use it to try and to test the engine, for nothing that matters.
"""


def num_errors(said: Sequence[str], written: Sequence[str]) -> int:
    """Return the least number of inserted, missing and changed words (Levenshtein's distance)."""
    row = list(range(len(written) + 1))
    for i, word in enumerate(said, 1):
        last, row = row, [i]
        for j, other in enumerate(written, 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (word != other)))
    return row[-1]


def draw(synthesizer: Synthesizer, voice: str, count: int) -> tuple[list[Spoken], list[Spoken]]:
    """Return new sounds of a voice, and the same ones with noise."""
    rng = random.Random(f"measured/{voice}")
    noise = np.random.default_rng(zlib.crc32(voice.encode()))
    clean = [speak(synthesizer, rng, voice) for _ in range(count)]
    return clean, [disturb(spoken, noise) for spoken in clean]


def error_rate(llm: LLM, sounds: Sequence[Spoken]) -> float:
    """Return the word error rate: the errors of all transcripts, divided by the words said."""
    transcripts = llm.transcribe([spoken.samples for spoken in sounds], timestamps=False)
    errors = sum(
        num_errors(spoken.words, transcript.text.split())
        for spoken, transcript in zip(sounds, transcripts, strict=True)
    )
    return errors / sum(len(spoken.words) for spoken in sounds)


def write_spoken_card(out: Path, loop: Loop) -> None:
    """Write the card of the model in `out`; a preliminary one while the training goes on."""
    if loop.progress < 1:
        (out / "README.md").write_text(
            f"# {out.name}\n\nPreliminary: {100 * loop.progress:.0f} % of the training is done.\n"
        )
        return
    with LLM(str(out)) as llm:
        (out / "README.md").write_text("\n".join(_lines(out, loop, llm)))


def _lines(out: Path, loop: Loop, llm: LLM) -> list[str]:
    config: SpeechConfig = loop.module.config
    shipped = num_parameters(loop.module) - num_parameters(loop.module.classifier)
    words = len(DIGITS) + len(COMMANDS)
    return [
        *("---", "language: en", "license: apache-2.0"),
        *("pipeline_tag: automatic-speech-recognition", "---", f"# {out.name}", ""),
        f"The speech model that comes with Octavo: it writes down {words} spoken words without a"
        f" download. These are the digits ({', '.join(DIGITS)}) and some commands"
        f" ({', '.join(COMMANDS)}).",
        "",
        f"    octavo transcribe digits.wav --model octavo/{out.name}",
        "",
        f"{shipped:,} parameters: Whisper, {config.encoder_layers} layers of the encoder and"
        f" {config.decoder_layers} of the decoder, hidden size {config.d_model},"
        f" {config.encoder_attention_heads} heads, {config.num_mel_bins} mel bands, windows of"
        f" {SECONDS} s, {config.vocab_size} tokens (byte-level BPE in which each word is one token;"
        " timestamps). Weights are bfloat16.",
        *("", "## Data", "", DATA.format(accents=len(ACCENTS), voices=len(VOICES))),
        *("## Training", ""),
        f"`python -m training.train {loop.name}`: {loop.step:,} steps of"
        f" {loop.stream.sounds} sounds in {loop.history.seconds / 60:.0f} minutes on a shared"
        f" {platform.machine()} core, bfloat16 autocast, Muon for the matrices and AdamW for the"
        " rest. The loss is the cross-entropy of the tokens. Two more terms, whose classifier is"
        " not shipped, show the model where each word is (`training.speech.speech_loss`).",
        *("", "## Held-out voices", ""),
        "Word error rate: errors (inserted, missing and changed words) divided by the words said,"
        f" in {SOUNDS} new sounds of 1 to 7 words for each voice, as the synthesizer makes them,"
        " and with filter and noise as in training. The training has no sound of these voices, nor"
        f" of the accent {HELD_OUT_ACCENT}.",
        "",
        *_table(llm),
        *("", *_silence(llm)),
        *("", "## What it cannot do", "", LIMITS.format(words=words, seconds=SECONDS)),
    ]


def _table(llm: LLM) -> list[str]:
    synthesizer = Synthesizer()
    lines = ["| voice of eSpeak NG | clean | with noise |", "| --- | --- | --- |"]

    def row(name: str, drawn: Sequence[tuple[list[Spoken], list[Spoken]]]) -> None:
        kinds = ([s for sounds in kind for s in sounds] for kind in zip(*drawn, strict=True))
        rates = [f"{100 * error_rate(llm, sounds):.1f} %" for sounds in kinds]
        lines.append(f"| {name} | {' | '.join(rates)} |")

    heldout = {v: draw(synthesizer, f"en-us+{v}", SOUNDS) for v in HELD_OUT_VOICES}
    for voice, drawn in heldout.items():
        row(f"en-us, {voice}", [drawn])
    row("all of these", list(heldout.values()))
    row(f"{HELD_OUT_ACCENT}, own voice", [draw(synthesizer, HELD_OUT_ACCENT, SOUNDS)])
    voices = [draw(synthesizer, f"en-us+{voice}", 4) for voice in VOICES]
    row("voices of the training, new sounds", voices)
    return lines


def _silence(llm: LLM) -> list[str]:
    noise = np.random.default_rng(12)
    transcripts = llm.transcribe([silence(noise) for _ in range(100)], timestamps=False)
    empty = sum(not transcript.text for transcript in transcripts)
    return [f"Of 100 sounds of noise alone, {empty} have an empty transcript."]
