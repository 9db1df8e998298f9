"""Speech models that answer with text alone, with an engine that answers from a script."""

import numpy as np
import pytest

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.models.blocks.wave import MIN_SAMPLES
from octavo.multimodal.processors.sounds import VoxtralProcessor
from octavo.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.speech.interface import TranscriptionOptions
from octavo.speech.texts import Moonshine, Voxtral
from octavo.speech.transcription import run_all

NAMES = ("<s>", "[INST]", "[BEGIN_AUDIO]", "[AUDIO]", "[/INST]", "[TRANSCRIBE]")
SETTINGS = {"feature_size": 8, "placeholder": "[AUDIO]", "embed_token": "[AUDIO]"}


def voxtral(names=NAMES, length=900):
    processor = VoxtralProcessor(ConfigJson(SETTINGS, "test"))
    find = {name: i for i, name in enumerate(names)}.get
    return Voxtral(processor, find, lambda text: [ord(char) for char in text], length)


def transcribe(model, samples, texts, **options):
    """Return the transcript and the requests. The texts are the answers, in turn."""
    asked, answers = [], iter(texts)

    def generate(asks):
        outputs = []
        for ask in asks:
            asked.append(ask)
            tokens = [1, 2, 3]
            logprob, text = next(answers)
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
    assert ask.prompt["prompt_token_ids"] == [0, 1, 2, 3, 4, *map(ord, "lang:de"), 5]
    assert ask.params.max_tokens == 400 - (375 + 5 + 7)
    with pytest.raises(ModelError, match=r"lacks the token \[AUDIO\]"):
        voxtral(names=[name for name in NAMES if name != "[AUDIO]"])


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
