"""GET /v1/realtime, with real clients of WebSockets and the built-in speech model."""

import base64
import json
import signal
import wave
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from tests.e2e.harness import serve

sync = pytest.importorskip("websockets.sync.client", reason="websockets is not installed")
exceptions = pytest.importorskip("websockets.exceptions")

MODEL, KEY = "octavo/spoken-words", "secret"
DIGITS = Path(__file__).parents[1] / "speech" / "digits.wav"
TEXT = "one nine one nine one"


def sound(before=0.5, after=1.0):
    """Return the digits at 24 kHz between silences, as int16."""
    with wave.open(str(DIGITS)) as file:
        rate, count = file.getframerate(), file.getnframes()
        samples = np.frombuffer(file.readframes(count), "<i2")
    places = np.arange(int(count * 24_000 / rate)) * rate / 24_000
    speech = np.interp(places, np.arange(count), samples)
    silences = (np.zeros(round(seconds * 24_000)) for seconds in (before, after))
    return np.concatenate([next(silences), speech, next(silences)]).astype("<i2")


def encoded(samples):
    return base64.b64encode(samples.tobytes()).decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve(tmp_path_factory.mktemp("log"), "--api-key", KEY, model=MODEL) as made:
        yield made


@pytest.fixture
def address(server):
    return server.url.replace("http", "ws") + "/v1/realtime"


@pytest.fixture
def session(address):
    """Return a connection whose turns the client commits."""
    headers = {"Authorization": f"Bearer {KEY}"}
    with sync.connect(address, additional_headers=headers) as made:
        assert receive(made)["type"] == "session.created"
        send(made, "session.update", session={"audio": {"input": {"turn_detection": None}}})
        assert receive(made)["type"] == "session.updated"
        yield made


def send(session, kind, /, **fields):
    session.send(json.dumps({"type": kind, **fields}))


def receive(session):
    return json.loads(session.recv(timeout=60))


def receive_all(session, kind, count=1):
    """Return the events up to the n-th of a kind."""
    events = []
    while sum(event["type"] == kind for event in events) < count:
        events.append(receive(session))
        assert events[-1]["type"] != "error"
    return events


COMPLETED = "conversation.item.input_audio_transcription.completed"


# OpenAI's client calls `connect` in an older way.
@pytest.mark.filterwarnings("ignore:connect:DeprecationWarning")
def test_openais_client_with_turns_of_the_server(server):
    client = openai.OpenAI(api_key=KEY, base_url=server.url + "/v1")
    with client.realtime.connect(model=MODEL) as connection:
        connection.session.update(
            session={
                "type": "transcription",
                "audio": {
                    "input": {
                        "format": {"type": "audio/pcm", "rate": 24000},
                        "transcription": {"model": MODEL, "language": "en"},
                        "turn_detection": {"type": "server_vad", "silence_duration_ms": 400},
                    }
                },
            }
        )
        samples = np.concatenate([sound(), sound()])
        for begin in range(0, len(samples), 5000):
            connection.input_audio_buffer.append(audio=encoded(samples[begin : begin + 5000]))
        events = []
        for event in connection:
            events.append(event)
            if [event.type for event in events].count(COMPLETED) == 2:
                break
    kinds = [event.type for event in events]
    assert kinds[:2] == ["session.created", "session.updated"]
    assert events[1].session.audio.input.turn_detection.silence_duration_ms == 400
    for kind in ("speech_started", "speech_stopped", "committed"):
        assert kinds.count(f"input_audio_buffer.{kind}") == 2
    committed = [event for event in events if event.type == "input_audio_buffer.committed"]
    assert committed[1].previous_item_id == committed[0].item_id
    done = [event for event in events if event.type == COMPLETED]
    assert [event.item_id for event in done] == [event.item_id for event in committed]
    assert [event.transcript for event in done] == [TEXT, TEXT]
    assert all(2 < event.usage.seconds < 4 for event in done)
    deltas = [event for event in events if event.type.endswith(".delta")]
    assert "".join(event.delta for event in deltas) == TEXT + TEXT


def test_commits_of_the_client(session):
    samples = sound(0, 0)
    for part in np.array_split(samples, 3):
        send(session, "input_audio_buffer.append", audio=encoded(part))
    send(session, "input_audio_buffer.commit")
    send(session, "input_audio_buffer.append", audio=encoded(samples))
    send(session, "input_audio_buffer.clear")
    send(session, "input_audio_buffer.append", audio=encoded(np.zeros(24_000, "<i2")))
    send(session, "input_audio_buffer.commit")
    events = receive_all(session, COMPLETED, 2)
    done = [event for event in events if event["type"] == COMPLETED]
    assert [event["transcript"] for event in done] == [TEXT, ""]
    assert done[0]["usage"] == {"type": "duration", "seconds": round(len(samples) / 24_000, 3)}
    assert done[1]["usage"]["seconds"] == 1
    assert "input_audio_buffer.cleared" in [event["type"] for event in events]


def test_the_texts_of_windows_make_up_the_transcript(session):
    """A long item has several windows; each adds what the transcript has in its place."""
    samples = np.concatenate([sound(0.5, 4.0)] * 8)
    for part in np.array_split(samples, 8):
        send(session, "input_audio_buffer.append", audio=encoded(part))
    send(session, "input_audio_buffer.commit")
    events = receive_all(session, COMPLETED)
    deltas = [event["delta"] for event in events if event["type"].endswith(".delta")]
    assert len(deltas) > 2
    assert "".join(deltas) == events[-1]["transcript"] == " ".join([TEXT] * 8)


def update(**fields):
    return {"type": "session.update", "session": {"type": "transcription", **fields}}


@pytest.mark.parametrize(
    ("event", "param", "message"),
    [
        ("no json", None, "not valid JSON"),
        ("[" * 100_000, None, "not valid JSON"),
        (b"bytes", None, "binary"),
        ([1], "type", "has no type"),
        ({"type": 5}, "type", "has no type"),
        ({"type": "response.create"}, "type", "'response.create' is not supported"),
        ({"type": "transcription_session.update"}, "type", "is not supported"),
        ({"type": "session.update"}, "session", "session is missing"),
        (update(type="realtime"), "session", "'realtime' - at `session.type`"),
        (update(voice="x"), "session", "unknown field `voice`"),
        (update(include=["logprobs"]), "session.include", "is not supported"),
        (update(audio={"output": {}}), "session", "unknown field `output`"),
        (
            update(audio={"input": {"turn_detection": {"type": "semantic_vad"}}}),
            "session",
            "'semantic_vad' - at `session.audio.input.turn_detection.type`",
        ),
        (
            update(audio={"input": {"turn_detection": {"threshold": 2}}}),
            "session.audio.input.turn_detection",
            "needs a threshold of 0 to 1",
        ),
        (update(audio={"input": {"format": {"type": "audio/pcmu"}}}), "session", "audio/pcmu"),
        (update(audio={"input": {"format": {"rate": 8000}}}), "session", "8000"),
        (
            update(audio={"input": {"noise_reduction": {"type": "near_field"}}}),
            "session",
            "session.audio.input.noise_reduction",
        ),
        (
            update(audio={"input": {"transcription": {"language": "xx"}}}),
            "language",
            "language='xx'",
        ),
        (
            update(audio={"input": {"transcription": {"model": "other"}}}),
            "model",
            "does not exist here",
        ),
        (
            update(audio={"input": {"transcription": {"prompt": "x" * 4097}}}),
            "session",
            "length <= 4096 - at `session.audio.input.transcription.prompt`",
        ),
        ({"type": "input_audio_buffer.append"}, "audio", "audio is missing"),
        ({"type": "input_audio_buffer.append", "audio": "?"}, "audio", "not valid base64"),
        ({"type": "input_audio_buffer.append", "audio": "YQ=="}, "audio", "half a sample"),
        ({"type": "input_audio_buffer.commit"}, None, "0 ms of sound"),
    ],
    ids=range(24),
)
def test_a_wrong_event_harms_nothing(session, event, param, message):
    if isinstance(event, dict):
        event["event_id"] = "mine"
    session.send(event if isinstance(event, str | bytes) else json.dumps(event))
    found = receive(session)
    assert found["type"] == "error"
    assert message in found["error"]["message"]
    assert found["error"]["param"] == param
    assert found["error"]["event_id"] == ("mine" if isinstance(event, dict) else None)
    send(session, "input_audio_buffer.clear")
    assert receive(session)["type"] == "input_audio_buffer.cleared"


def test_limits(session):
    part = {"audio": encoded(np.zeros(24_000 * 14, "<i2"))}
    for _ in range(300 // 14):
        send(session, "input_audio_buffer.append", **part)
    send(session, "input_audio_buffer.append", **part)
    error = receive(session)["error"]
    assert (error["code"], error["param"]) == ("input_audio_buffer_full", "audio")
    send(session, "input_audio_buffer.clear")
    assert receive(session)["type"] == "input_audio_buffer.cleared"

    def send_too_much():
        session.send(["x" * 2**20, "x"])  # refused when all is read, so the refusal is not lost
        receive(session)

    with pytest.raises(exceptions.ConnectionClosedError, match="1009"):
        send_too_much()


def test_sessions_that_are_refused(server, address):
    key = {"Authorization": f"Bearer {KEY}"}
    for options, status in (
        ({}, 401),
        ({"additional_headers": {"Authorization": "Bearer x"}}, 401),
        ({"additional_headers": key, "origin": "http://evil.example"}, 403),
        ({"additional_headers": key | {"X-Octavo": "1"}, "uri": address + "?model=other"}, 404),
        ({"additional_headers": key, "uri": address + "/other"}, 403),
    ):
        with (
            pytest.raises(exceptions.InvalidStatus) as caught,
            sync.connect(**({"uri": address} | options)),
        ):
            pass
        assert caught.value.response.status_code == status
    answer = httpx.get(server.url + "/v1/realtime", headers=key)
    assert answer.status_code == 404
    assert "is for WebSockets" in answer.json()["error"]["message"]


def test_a_key_as_a_protocol(address):
    protocols = ["realtime", f"openai-insecure-api-key.{KEY}"]
    with sync.connect(address, subprotocols=protocols) as session:
        assert session.subprotocol == "realtime"
        assert receive(session)["session"]["type"] == "transcription"


def test_a_server_that_stops_ends_its_sessions(tmp_path):
    """The transcripts of items are sent before; an idle session does not delay the end."""
    with serve(tmp_path, "--shutdown-timeout", "1000", model=MODEL) as server:
        address = server.url.replace("http", "ws") + "/v1/realtime"
        with sync.connect(address) as idle, sync.connect(address) as busy:
            send(busy, "session.update", session={"audio": {"input": {"turn_detection": None}}})
            send(busy, "input_audio_buffer.append", audio=encoded(sound(0, 0)))
            send(busy, "input_audio_buffer.commit")
            receive_all(busy, "input_audio_buffer.committed")
            server.process.send_signal(signal.SIGTERM)
            for session in (idle, busy):
                events = [json.loads(event) for event in session]  # until it is closed
                assert session.close_code == 1001
                assert events[-1]["error"]["code"] == "unavailable"
            assert COMPLETED in [event["type"] for event in events]
        assert server.process.wait(100) == 0
        assert "WEBSOCKET /v1/realtime" in server.log.read_text()
