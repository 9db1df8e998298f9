"""Speech models that answer with text alone, with an engine that answers from a script."""

import re

import numpy as np
import pytest

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError, RequestError, UnsupportedError
from octavo.models.blocks.wave import MIN_SAMPLES
from octavo.multimodal.processors.sounds import Qwen3ASRProcessor, VoxtralProcessor
from octavo.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.speech.interface import TranscriptionOptions
from octavo.speech.texts import Moonshine, Qwen3ASR, Voxtral
from octavo.speech.transcription import run_all

NAMES = ("<s>", "[INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[/INST]", "[TRANSCRIBE]")
SETTINGS = {"feature_size": 8, "placeholder": "[AUDIO]", "embed_token": "[AUDIO]"}


def voxtral(names=NAMES, length=900):
    processor = VoxtralProcessor(ConfigJson(SETTINGS, "test"))
    find = {name: i for i, name in enumerate(names)}.get
    return Voxtral(processor, find, letters, None, length)


def letters(text):
    return [100 + ord(char) for char in text]


TAGS = ("<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_pad|>", "<|audio_end|>")


def qwen3_asr(length=900):
    names = [*TAGS, "<asr_text>"]
    processor = Qwen3ASRProcessor(ConfigJson(SETTINGS, "test"))

    def encode(text):
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text)
        return [
            id for part in parts for id in ([names.index(part)] if part in names else letters(part))
        ]

    def decode(ids):
        return "".join(chr(id - 100) for id in ids if id >= 100)

    return Qwen3ASR(
        processor, {name: i for i, name in enumerate(names)}.get, encode, decode, length
    )


def transcribe(model, samples, texts, **options):
    """Return the transcript and the requests. The texts are the answers, in turn."""
    asked, answers = [], iter(texts)

    def generate(asks):
        outputs = []
        for ask in asks:
            asked.append(ask)
            logprob, text, *given = next(answers)
            tokens = given[0] if given else [1, 2, 3]
            rows = [{token: Logprob(logprob)} for token in tokens]
            output = CompletionOutput(0, text, tokens, None, rows, finish_reason="stop")
            outputs.append(RequestOutput("x", None, [1], None, [output], True))
        return outputs

    (transcript,) = run_all([model.start(samples, TranscriptionOptions(**options))], generate)
    return transcript, asked


def noise(seconds):
    generator = np.random.default_rng(0)
    return generator.normal(0, 0.1, round(seconds * 16_000)).astype(np.float32)


def test_prompts_of_voxtral():
    """As mistral-common writes them for transcriptions."""
    samples = noise(3.0)
    _, (ask,) = transcribe(voxtral(), samples, [(-0.1, "a")])
    assert ask.prompt["prompt_token_ids"] == [0, 1, 2, 3, 4, 5]
    (item,) = ask.prompt["multi_modal_data"]["audio"]
    assert item.num_embeds == 375
    assert ask.params.max_tokens == 500
    _, (ask,) = transcribe(voxtral(length=400), samples, [(-0.1, "a")], language="German")
    assert ask.prompt["prompt_token_ids"] == [0, 1, 2, 3, 4, *letters("lang:de"), 5]
    assert ask.params.max_tokens == 400 - (375 + 5 + 7)
    with pytest.raises(ModelError, match=r"lacks the token \[AUDIO\]"):
        voxtral(names=[name for name in NAMES if name != "[AUDIO]"])


def test_prompts_of_qwen3_asr():
    """As vLLM writes them."""
    start, end, *sound, tag = range(6)
    user = [start, *letters("user\n"), *sound, end, *letters("\n"), start, *letters("assistant\n")]
    _, (ask,) = transcribe(qwen3_asr(), noise(3.0), [(-0.1, "a")])
    assert ask.prompt["prompt_token_ids"] == user
    (item,) = ask.prompt["multi_modal_data"]["audio"]
    assert item.num_embeds == 39
    _, (ask,) = transcribe(
        qwen3_asr(), noise(3.0), [(-0.1, "a")], language="de", prompt=" Octavo \n"
    )
    system = [start, *letters("system\nOctavo"), end, *letters("\n")]
    assert ask.prompt["prompt_token_ids"] == [*system, *user, *letters("language German"), tag]
    for name in (*TAGS, "<asr_text>"):
        with pytest.raises(RequestError, match="special token of this model") as caught:
            transcribe(qwen3_asr(), noise(1.0), [], prompt=f"a{name}b")
        assert caught.value.param == "prompt"
    with pytest.raises(RequestError, match="cannot translate"):
        transcribe(qwen3_asr(), noise(1.0), [], task="translate")
    with pytest.raises(UnsupportedError, match="timestamp_granularities=word"):
        transcribe(qwen3_asr(), noise(1.0), [], words=True)


@pytest.mark.parametrize(
    ("head", "language"),
    [("language German", "de"), ("language None", ""), ("language Chinese", "zh"), ("x", "")],
)
def test_answers_of_qwen3_asr(head, language):
    tokens = [*letters(head), 5, *letters(" Guten Tag"), 1]
    transcript, _ = transcribe(qwen3_asr(), noise(3.0), [(-0.1, "wrong", tokens)])
    assert (transcript.language, transcript.text) == (language, "Guten Tag")
    transcript, _ = transcribe(qwen3_asr(), noise(3.0), [(-0.1, " a ")], language="fr")
    assert (transcript.language, transcript.text) == ("fr", "a")


def test_prompts_of_moonshine():
    _, (ask,) = transcribe(Moonshine(194), noise(2.0), [(-0.1, "a")])
    assert ask.prompt["encoder_prompt"]["input_features"].shape == (32_000, 1)
    assert ask.params.max_tokens == 27
    _, (ask,) = transcribe(Moonshine(20), noise(0.01), [(-0.1, "a")])
    assert ask.prompt["encoder_prompt"]["input_features"].shape == (MIN_SAMPLES, 1)
    assert ask.params.max_tokens == 1


def test_windows_and_temperatures():
    answers = [(-2.0, "bad"), (-0.1, " one "), (-0.1, "two"), (-0.1, "")]
    transcript, asked = transcribe(Moonshine(194), noise(45.0), answers, language="fr")
    assert [ask.params.temperature for ask in asked] == [0.0, 0.0, 0.0, 0.2]
    assert transcript.language == "fr"
    assert len(transcript.segments) == 2
    assert transcript.text == "".join(segment.text for segment in transcript.segments)
    assert [segment.id for segment in transcript.segments] == [0, 1]
    assert transcript.segments[0].end <= transcript.segments[1].start


@pytest.mark.parametrize(
    ("texts", "whole"),
    [
        (["今天天气", "", "很好。"], "今天天气很好。"),
        (["สวัสดี", "ครับ", "Hello"], "สวัสดีครับ Hello"),
        (["one", "two", "three"], "one two three"),
    ],
)
def test_texts_are_joined_as_their_script_is_written(texts, whole):
    transcript, asked = transcribe(
        voxtral(), noise(80.0), [(-0.1, text) for text in texts], temperature=0.5
    )
    assert len(asked) == 3
    assert transcript.text == whole == "".join(s.text for s in transcript.segments)
