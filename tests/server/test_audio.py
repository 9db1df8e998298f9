"""POST /v1/audio/transcriptions and /v1/audio/translations, with a small model in a real server."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import openai
import pytest
from pydantic import TypeAdapter

from octavo import LLM
from octavo.server import audio_answers
from octavo.server.audio_schema import read_fields
from octavo.server.upload import MAX_SOUND_BYTES
from tests.e2e.harness import serve
from tests.media.sounds import chirp, encode, wav
from tests.server.fake_engine import with_server
from tests.speech_model import write_speech_model

PATH = "/v1/audio/transcriptions"
SOUND = encode(np.concatenate([chirp(3.0), chirp(9.0)], axis=1), "flac")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_speech_model(tmp_path_factory.mktemp("speech"))


@pytest.fixture(scope="module")
def expected(folder):
    """Transcripts of `LLM`: without and with timestamps, and a translation."""
    with LLM(folder, load_format="dummy") as llm:
        return [
            llm.transcribe(SOUND, **options)[0]
            for options in (
                {"timestamps": False},
                {"language": "de"},
                {"task": "translate", "language": "de", "timestamps": False},
                {"language": "de", "word_timestamps": True},
            )
        ]


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    flags = ["--load-format", "dummy", "--served-model-name", "ear"]
    with serve(tmp_path_factory.mktemp("log"), *flags, model=folder) as made:
        yield made


@pytest.fixture
def post(server):
    def send(path=PATH, data=SOUND, name="a.flac", **fields):
        files = {"file": (name, data)} if data is not None else {"other": (None, "x")}
        return httpx.post(server.url + path, files=files, data=fields, timeout=60)

    return send


def test_openais_client(server, expected):
    plain, timed, _, words = expected
    client = openai.OpenAI(api_key="none", base_url=server.url + "/v1", max_retries=0)
    create = client.audio.transcriptions.create
    assert create(model="ear", file=("a.flac", SOUND)).text == plain.text
    assert create(model="ear", file=("a.flac", SOUND), response_format="text") == plain.text + "\n"
    verbose = create(
        model="ear",
        file=("a.flac", SOUND),
        language="german",
        response_format="verbose_json",
        timestamp_granularities=["segment"],
    )
    assert (verbose.text, verbose.language, verbose.duration) == (timed.text, "german", 12.0)
    assert [s.tokens for s in verbose.segments] == [s.tokens for s in timed.segments]
    assert [s.end for s in verbose.segments] == [s.end for s in timed.segments]
    verbose = create(
        model="ear",
        file=("a.flac", SOUND),
        language="de",
        response_format="verbose_json",
        timestamp_granularities=["word"],
    )
    assert verbose.segments is None
    assert [vars(w) for w in verbose.words] == [vars(w) for w in words.words]
    assert len(verbose.words) > 3
    events = list(create(model="ear", file=("a.flac", SOUND), stream=True))
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == plain.text
    deltas = [event.delta for event in events[:-1]]
    assert len(deltas) == 3  # one for each window
    assert "".join(deltas).strip() == plain.text


def test_a_translation(post, expected):
    found = post("/v1/audio/translations", language="de", response_format="verbose_json").json()
    assert (found["task"], found["language"]) == ("translate", "german")
    found = post("/v1/audio/translations", language="de").json()
    assert found["text"] == expected[2].text


def test_answers_are_as_described(post):
    TypeAdapter(audio_answers.Transcription).validate_python(post().json())
    verbose = post(response_format="verbose_json").json()
    TypeAdapter(audio_answers.VerboseTranscription).validate_python(verbose)
    verbose = post(
        response_format="verbose_json", **{"timestamp_granularities[]": "segment,word"}
    ).json()
    found = TypeAdapter(audio_answers.VerboseTranscription).validate_python(verbose)
    assert {"words", "segments"} <= found.keys()
    response = post(stream="true")
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last = response.text.strip().split("\n\n")
    assert last == "data: [DONE]"
    event = TypeAdapter(audio_answers.TranscriptionDelta | audio_answers.TranscriptionDone)
    for text in events:
        event.validate_python(json.loads(text.removeprefix("data: ")))
    for form, begin in (("vtt", "WEBVTT"), ("srt", "1\n00:00:")):
        response = post(response_format=form)
        assert response.text.startswith(begin)
        assert response.headers["content-type"] == "text/plain; charset=utf-8"


def test_many_at_once_have_their_own_answers(post, expected):
    with ThreadPoolExecutor(6) as pool:
        good = [pool.submit(post) for _ in range(3)]
        bad = [pool.submit(post, data=b"no sound") for _ in range(3)]
    assert {future.result().json()["text"] for future in good} == {expected[0].text}
    assert {future.result().status_code for future in bad} == {400}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"data": b"#EXTM3U\nfile:///etc/passwd"}, "file", "no sound of a supported format"),
        ({"data": b""}, "file", "file is empty"),
        ({"data": None}, "file", "file is missing"),
        ({"data": wav(np.zeros(9, "<i2"))[:-4]}, None, None),
        ({"language": "xx"}, "language", "language='xx' is not a language of this model"),
        ({"response_format": "xml"}, "response_format", "response_format='xml' is not allowed"),
        ({"temperature": "warm"}, "temperature", "temperature='warm' is not allowed"),
        ({"temperature": "nan"}, "temperature", "is not allowed"),
        ({"temperature": "9"}, "temperature", "temperature=9.0 is not allowed"),
        ({"stream": "maybe"}, "stream", "stream='maybe' is not allowed"),
        ({"stream": "true", "response_format": "srt"}, "stream", "not available with"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities", "needs response"),
        ({"timestamp_granularities[]": "segment"}, "timestamp_granularities", "needs response"),
        ({"include[]": "logprobs"}, "include", "include='logprobs' is not supported"),
        ({"chunking_strategy": "x"}, "chunking_strategy", "is not supported"),
        ({"explain": "true"}, "explain", "is not supported"),
        ({"model": "other"}, "model", "does not exist here"),
    ],
    ids=range(17),
)
def test_wrong_requests(post, fields, param, message):
    response = post(**fields)
    if message is None:
        assert response.status_code == 200
        return
    error = response.json()["error"]
    assert response.status_code in (400, 404)
    assert error["param"] == param
    assert message in error["message"]


def test_a_form_is_needed(server):
    response = server.post(PATH, {"file": "x"})
    assert response.status_code == 415
    response = httpx.post(server.url + PATH, files={"file": ("a", b"x" * (25 * 2**20 + 1))})
    assert response.status_code == 413
    assert "compress it, or send it in parts" in response.json()["error"]["message"]
    page = {"Origin": "http://evil.example"}
    response = httpx.post(server.url + PATH, files={"file": ("a", b"x")}, headers=page)
    assert response.status_code == 403


def test_unknown_fields_are_reported(post):
    response = post(mood="good")
    assert response.status_code == 200
    assert response.headers["X-Octavo-Ignored-Fields"] == "mood"
    response = post(mőöd="good")
    assert response.status_code == 200
    assert response.headers["X-Octavo-Ignored-Fields"] == "m??d"


def test_a_model_that_hears_writes_no_text_without_a_sound(server):
    response = server.post("/v1/completions", {"prompt": "hello"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "unsupported_task"
    assert "POST /v1/audio/transcriptions" in error["message"]


def test_a_model_that_does_not_hear():
    async def scenario(served):
        for path in (PATH, "/v1/audio/translations"):
            response = await served.http.post(path, files={"file": ("a", SOUND)})
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["param"], error["code"]) == ("model", "unsupported_task")
            assert "does not transcribe sounds" in error["message"]

    with_server(scenario)


def test_limits_of_an_upload():
    assert MAX_SOUND_BYTES == 25 * 2**20
    body, unknown = read_fields(
        {"timestamp_granularities[]": b"segment,segment", "response_format": b"verbose_json"}
    )
    assert body.timestamp_granularities == ["segment", "segment"]
    assert unknown == []


def test_explanations(server, post):
    response = post(request_id="heard", response_format="verbose_json")
    assert response.status_code == 200
    found = server.get("/v1/requests").json()["data"]
    (listed,) = [one for one in found if one["request_id"] == "heard"]
    assert listed["path"] == PATH
    told = server.get("/v1/requests/heard/explain").json()
    causes = {part["cause"]: part["ms"] for part in told["causes"]}
    assert {"receive", "render", "prefill", "decode"} <= causes.keys()
    assert sum(causes.values()) == pytest.approx(told["wall_ms"], rel=0.01)
    assert told["prompt_tokens"] > 0
