"""Forms of a transcript, against known texts."""

import json

import pytest
from openai.types.audio import Transcription, TranscriptionVerbose

from octavo.speech.formats import MEDIA_TYPES, write
from octavo.speech.segments import Segment, Transcript


def segment(number, start, end, text):
    return Segment(number, 3000, start, end, text, [1, 2], 0.0, -0.25, 1.5, 0.01)


TRANSCRIPT = Transcript(
    "transcribe",
    "de",
    3725.34,
    "Hallo, <Welt> --> „da“. Ende",
    [
        segment(0, 0.0, 2.5, " Hallo, <Welt> --> „da“."),
        segment(1, 59.9996, 3725.34, " Ende\n\n 2"),
    ],
)

SRT = """\
1
00:00:00,000 --> 00:00:02,500
Hallo, <Welt> -> „da“.

2
00:01:00,000 --> 01:02:05,340
Ende
2

"""
VTT = """\
WEBVTT

00:00:00.000 --> 00:00:02.500
Hallo, &lt;Welt&gt; -&gt; „da“.

00:01:00.000 --> 01:02:05.340
Ende
2

"""


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("text", "Hallo, <Welt> --> „da“. Ende\n"),
        ("srt", SRT),
        ("vtt", VTT),
        (
            "json",
            '{"text":"Hallo, <Welt> --> „da“. Ende","usage":{"type":"duration","seconds":3726}}',
        ),
    ],
)
def test_known_texts(form, text):
    assert write(TRANSCRIPT, form) == text
    assert form in MEDIA_TYPES


def test_verbose_json():
    data = json.loads(write(TRANSCRIPT, "verbose_json"))
    assert data["segments"][1] == {
        "id": 1,
        "seek": 3000,
        "start": 59.9996,
        "end": 3725.34,
        "text": " Ende\n\n 2",
        "tokens": [1, 2],
        "temperature": 0.0,
        "avg_logprob": -0.25,
        "compression_ratio": 1.5,
        "no_speech_prob": 0.01,
    }
    del data["segments"]
    assert data == {
        "task": "transcribe",
        "language": "german",
        "duration": 3725.34,
        "text": TRANSCRIPT.text,
        "usage": {"type": "duration", "seconds": 3726},
    }


def test_openais_client_reads_them():
    verbose = TranscriptionVerbose.model_validate_json(write(TRANSCRIPT, "verbose_json"))
    assert verbose.segments[0].text == " Hallo, <Welt> --> „da“."
    assert Transcription.model_validate_json(write(TRANSCRIPT, "json")).text == TRANSCRIPT.text


def test_nothing_was_said():
    nothing = Transcript("transcribe", "en", 1.0, "")
    assert [write(nothing, form) for form in ("text", "srt", "vtt")] == ["\n", "", "WEBVTT\n\n"]
    assert json.loads(write(nothing, "verbose_json"))["segments"] == []
