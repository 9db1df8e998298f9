"""Transcription of windows, with an engine that answers from a script."""

import asyncio
import math
from contextlib import asynccontextmanager

import numpy as np
import pytest

from octavo.errors import RequestError
from octavo.media.log_mel import LogMel
from octavo.messages import ALIGNMENT
from octavo.outputs import CompletionOutput, Logprob, RequestOutput
from octavo.speech.interface import TranscriptionOptions
from octavo.speech.model import SpeechModel
from octavo.speech.tokens import WhisperTokens
from octavo.speech.transcription import run, run_all
from octavo.speech.whisper import Whisper
from octavo.system.fair_slots import FairSlots

END, START, PREVIOUS, SILENCE, BARE = 100, 101, 102, 103, 104
ZERO = BARE + 1
ENGLISH = WhisperTokens(START, END, PREVIOUS, SILENCE, BARE, {}, {})
MANY = WhisperTokens(
    START, END, PREVIOUS, SILENCE, BARE, {"transcribe": 98, "translate": 99}, {"en": 96, "de": 97}
)
FEATURES = LogMel(feature_size=4, chunk_length=6)


def model(tokens=ENGLISH):
    facts = SpeechModel(
        FEATURES,
        tokens,
        40,
        (7,),
        (8, END),
        50,
        lambda text: [ord(c) - 32 for c in text],
        lambda ids: "".join(chr(32 + i) for i in ids),
        ((0, 1),),
    )
    return Whisper(facts)


def answer(ask, text, *, logprob=-0.1, silence=0.0, tokens=None, end=(END,), finish_reason="stop"):
    """Return what an engine returns for a text."""
    tokens = [ord(c) - 32 for c in text] if tokens is None else tokens
    tokens = [*tokens, *end]
    rows = [{token: Logprob(logprob)} for token in tokens]
    prompt_rows = [None, *({token: Logprob(-1.0)} for token in ask.prompt_token_ids[1:])]
    after = ask.prompt_token_ids.index(START) + 1
    if silence:
        (prompt_rows + rows)[after][SILENCE] = Logprob(math.log(silence))
    output = CompletionOutput(
        0, "", tokens, None, rows, finish_reason=finish_reason, stop_reason="why"
    )
    given = prompt_rows if ask.params.prompt_logprobs is not None else None
    return RequestOutput("x", None, ask.prompt_token_ids, given, [output], True)


def transcribe(script, seconds=5.0, tokens=ENGLISH, **options):
    """Return the transcript of noise, and what was asked. `script` maps (ask, count) to answers."""
    asks = []
    samples = np.random.default_rng(0).normal(0, 0.1, round(seconds * 16_000)).astype(np.float32)

    def generate(some):
        outputs = []
        for ask in some:
            outputs.append(script(ask, len(asks)))
            asks.append(ask)
        return outputs

    job = model(tokens).start(samples, TranscriptionOptions(**options))
    (transcript,) = run_all([job], generate)

    async def async_run():
        count = iter(range(10**6))

        async def ask_engine(ask):
            await asyncio.sleep(0)
            return script(ask, next(count))

        job = model(tokens).start(samples, TranscriptionOptions(**options))
        texts = [text async for text in run(job, ask_engine)]
        return texts, job.transcript()

    texts, other = asyncio.run(async_run())
    assert other == transcript
    assert "".join(texts) == transcript.text
    assert "".join(segment.text for segment in transcript.segments).strip() == transcript.text
    return transcript, asks


def test_a_window_without_timestamps():
    transcript, (ask,) = transcribe(lambda ask, _: answer(ask, " Hello"))
    assert (transcript.text, transcript.language, transcript.duration) == ("Hello", "en", 5.0)
    (segment,) = transcript.segments
    assert (segment.start, segment.end, segment.text) == (0.0, 5.0, " Hello")
    assert segment.avg_logprob == pytest.approx(-0.1)
    assert ask.prompt_token_ids == [START, BARE]
    assert ask.features.shape == (600, 4)
    assert ask.params.max_tokens == 20
    rules = ask.params.extra_args["whisper_rules"]
    assert (rules["end"], rules["suppress"], rules["begin_suppress"]) == (END, [7], [8, END])
    assert rules["first_timestamp"] is None


def test_timestamps_and_the_language():
    def script(ask, number):
        if ask.params.max_tokens == 1:
            assert ask.prompt_token_ids == [START]
            assert ask.params.allowed_token_ids == [96, 97]
            return answer(ask, "", tokens=[97], end=())
        assert ask.prompt_token_ids == [START, 97, 99]
        return answer(ask, "", tokens=[ZERO, 1, ZERO + 50, ZERO + 100, 2, ZERO + 150])

    transcript, asks = transcribe(script, tokens=MANY, task="translate", timestamps=True)
    assert (transcript.task, transcript.language, transcript.text) == ("translate", "de", '!"')
    assert [(s.start, s.end) for s in transcript.segments] == [(0.0, 1.0), (2.0, 3.0)]
    assert [ask.params.extra_args["whisper_rules"]["first_timestamp"] for ask in asks[1:]] == [ZERO]


def test_windows_are_joined_in_order():
    def script(ask, _):
        # The loudness of each window's features tells them apart.
        return answer(ask, " w")

    transcript, asks = transcribe(script, seconds=40.0)
    assert len(asks) >= 7
    assert transcript.text == " ".join("w" * len(asks))
    assert [segment.id for segment in transcript.segments] == list(range(len(asks)))
    starts = [segment.start for segment in transcript.segments]
    assert starts == sorted(starts)
    assert transcript.segments[-1].end == 40.0


def test_texts_that_begin_without_a_space():
    """The first windows have no text. Whisper writes no space before a bracket."""
    texts = ["", "", " One ", "(two)", " three"]
    transcript, _ = transcribe(
        lambda ask, number: answer(ask, texts[number % 5]), 27.0, condition_on_previous_text=True
    )
    assert transcript.text.startswith("One (two) three")


def test_temperatures_rise_until_an_answer_is_good():
    def script(ask, _):
        if ask.params.temperature < 0.5:
            return answer(ask, " bad", logprob=-2.0)
        return answer(ask, " good")

    transcript, asks = transcribe(script, seed=3)
    assert [ask.params.temperature for ask in asks] == [0.0, 0.2, 0.4, 0.6]
    assert {ask.params.seed for ask in asks} == {3}
    assert transcript.text == "good"
    assert transcript.segments[0].temperature == 0.6
    transcript, asks = transcribe(script, temperature=0.3)
    assert [ask.params.temperature for ask in asks] == [0.3]
    assert transcript.text == "bad"
    transcript, asks = transcribe(lambda ask, _: answer(ask, " bad", logprob=-2.0))
    assert [ask.params.temperature for ask in asks] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert transcript.text == "bad"


@pytest.mark.parametrize("timestamps", [False, True])
def test_made_up_text_of_silence_is_dropped(timestamps):
    def script(ask, _):
        return answer(ask, " Thanks.", logprob=-1.5, silence=0.9)

    transcript, asks = transcribe(script, timestamps=timestamps)
    assert (transcript.text, transcript.segments, len(asks)) == ("", [], 1)
    transcript, _ = transcribe(lambda ask, _: answer(ask, " Yes.", silence=0.9))
    assert transcript.text == "Yes."
    assert transcript.segments[0].no_speech_prob == pytest.approx(0.9)


def test_the_text_before_is_cut_to_half_of_the_context():
    _, (ask,) = transcribe(lambda ask, _: answer(ask, ""), prompt=" " + "a" * 99)
    assert ask.prompt_token_ids == [PREVIOUS, *[ord("a") - 32] * 19, START, BARE]
    assert ask.params.max_tokens == 40 - 22
    _, (ask,) = transcribe(lambda ask, _: answer(ask, ""), prompt="b")
    assert ask.prompt_token_ids == [PREVIOUS, 0, ord("b") - 32, START, BARE]


def test_windows_continue_the_text_before():
    """A text of a high temperature is no context."""

    def script(ask, _):
        has_context = len(ask.prompt_token_ids) > 2
        if has_context and ask.params.temperature < 0.7:
            return answer(ask, " bad", logprob=-2.0)
        return answer(ask, " 2" if has_context else " 1")

    transcript, asks = transcribe(script, seconds=20.0, condition_on_previous_text=True)
    first = [ask.prompt_token_ids for ask in asks if ask.params.temperature == 0.0]
    expected = [[START, BARE], [PREVIOUS, 0, ord("1") - 32, START, BARE]]
    assert len(first) >= 4
    assert first == (expected * len(first))[: len(first)]
    assert transcript.text.split() == (["1", "2"] * len(first))[: len(first)]


def test_times_of_words():
    """One more request for a window with text has its tokens, and returns weights."""

    def script(ask, _):
        given = ask.params.extra_args.get(ALIGNMENT)
        if given is None:
            return answer(ask, "", tokens=[ZERO, 0, 33, 0, 34, ZERO + 100])
        heads, rows = given
        assert (list(map(list, heads)), rows) == ([[0, 1]], 250)
        assert ask.prompt_token_ids == [START, BARE, 0, 33, 0, 34, END]
        weights = np.full((7, rows), -1, np.float32)
        for row, begin in enumerate((0, 50, 75, 110, 120, 140)):
            weights[row + 1, begin : begin + 60] = 1 + row
        output = answer(ask, "", end=())
        output.pooled = weights.tobytes()
        return output

    transcript, asks = transcribe(script, timestamps=True, words=True)
    assert len(asks) == 2
    (segment,) = transcript.segments
    assert [(w.word, w.start, w.end) for w in segment.words] == [("A", 0.0, 1.5), ("B", 1.5, 2.4)]
    assert transcript.words == segment.words
    transcript, asks = transcribe(lambda ask, _: answer(ask, " "), words=True)
    assert (transcript.words, len(asks)) == ([], 1)


def test_failures():
    with pytest.raises(RequestError, match="cannot be transcribed: why"):
        transcribe(lambda ask, _: answer(ask, "", finish_reason="error"))
    with pytest.raises(RequestError, match="language='xx'"):
        transcribe(None, language="xx")


def test_silence_asks_nothing():
    job = model(MANY).start(np.zeros(99_999, np.float32), TranscriptionOptions())
    (transcript,) = run_all([job], None)
    assert (transcript.text, transcript.segments) == ("", [])


def test_features_are_computed_in_turns():
    """The features of a short sound do not wait for those of all windows of long ones."""
    speech, slots, order = model(), FairSlots(1), []

    async def text_of(name, seconds):
        @asynccontextmanager
        async def turn():
            async with slots.hold(name):
                order.append(name)
                yield

        async def generate(ask):
            return answer(ask, "hi")

        noise = np.random.default_rng(0).normal(size=16_000 * seconds).astype(np.float32)
        job = speech.start(noise, TranscriptionOptions())
        return [text async for text in run(job, generate, turn)]

    async def main():
        return await asyncio.gather(text_of("long", 60), text_of("long", 60), text_of("short", 3))

    *_, short = asyncio.run(main())
    assert short == ["hi"]
    assert len(order) > 20
    assert order.index("short") < 3
