"""Forms with a sound, through a router and a server of several models."""

import asyncio
import re

import pytest

from octavo.config import ServerConfig
from octavo.router.form import read_sound_job, write_form
from octavo.server.auth import private_salt
from octavo.server.upload import MAX_SOUND_BYTES, _Form
from tests.router.servers import DONE, Routed, stream, whole

PATH = "/v1/audio/transcriptions"
DATA = bytes(range(256)) * 9 + b"\r\n--x--\r\n"


class Sink:
    data = b""

    def write(self, data):
        self.data += data


def read(media_type, body):
    sink = Sink()
    form = _Form(re.search("boundary=(.*)", media_type)[1].encode(), sink)
    form.feed(body)
    assert form.complete
    return form.fields, form.filename, sink.data


@pytest.mark.parametrize("name", ["a.wav", 'a"b\\.wav', "ä 世.mp3"])
def test_a_form_is_read_as_it_was_written(name):
    fields = {"model": "ä".encode(), "timestamp_granularities[]": b"word,segment", "empty": b""}
    found = read(*write_form(fields, name, DATA))
    assert found == (fields, name.replace('"', "%22"), DATA)


def test_each_key_has_its_own_scope():
    headers = [("content-type", "old"), ("x-request-id", "r1"), ("origin", "http://checked")]
    fields = {"model": b"ear", "cache_salt": b"s", "request_id": b"r2"}
    job = read_sound_job(PATH, headers, fields, "a", DATA * 1000, "key")
    assert (job.method, job.model, job.weight) == ("POST", "ear", 3)
    assert job.request_ids == {"r1", "r2"}
    given = dict(job.headers)
    assert list(given) == ["x-request-id", "content-type"]
    found, _, data = read(given["content-type"], job.body)
    assert found == fields | {"cache_salt": private_salt("key", "s").encode()}
    assert data == DATA * 1000
    job = read_sound_job(PATH, headers, {}, "a", DATA, None)
    assert (job.model, job.request_ids) == (None, set())
    assert read(dict(job.headers)["content-type"], job.body)[0] == {}


def test_a_router_passes_sounds_on():
    lost = whole(503, error={"message": "x", "code": "unavailable"})
    good = whole(text="hello")

    async def main():
        async with Routed([lost, good]) as routed:
            for path in (PATH, "/v1/audio/translations"):
                answer = await routed.client.post(
                    path, files={"file": ("a.wav", DATA)}, data={"model": "m", "language": "de"}
                )
                assert (answer.status_code, answer.json()) == (200, {"text": "hello"})
                asked = routed.servers[1].asked[-1]
                assert asked.url.endswith(path)
                found = read(asked.headers["content-type"], asked.content)
                assert found == ({"model": b"m", "language": b"de"}, "a.wav", DATA)

    asyncio.run(main())


def test_a_stream_is_passed_on():
    event = b'data: {"type":"transcript.text.delta","delta":"a"}\n\n'

    async def main():
        async with Routed([stream(event, DONE)]) as routed:
            answer = await routed.client.post(
                PATH, files={"file": ("a", DATA)}, data={"stream": "true"}
            )
            assert answer.content == event + DONE

    asyncio.run(main())


def test_wrong_forms_reach_no_server():
    async def main():
        async with Routed([whole(text="")], config=ServerConfig(api_key=["k"])) as routed:
            post, key = routed.client.post, {"Authorization": "Bearer k"}
            large = {"file": ("a", b"x" * (MAX_SOUND_BYTES + 1))}
            page = key | {"Origin": "http://evil.example"}
            for status, fields in (
                (401, {"files": {"file": ("a", DATA)}}),
                (400, {"data": {"model": "m"}, "files": {"x": (None, "y")}, "headers": key}),
                (415, {"json": {"model": "m"}, "headers": key}),
                (413, {"files": large, "headers": key}),
                (403, {"files": {"file": ("a", DATA)}, "headers": page}),
            ):
                answer = await post(PATH, **fields)
                assert answer.status_code == status, answer.text
            assert not routed.servers[0].asked

    asyncio.run(main())


def test_a_chat_with_pictures_may_be_large_behind_a_proxy():
    async def main():
        config = ServerConfig(root_path="/llm")
        async with Routed([whole(text="hello")], config=config) as routed:
            for path, status in (("chat/completions", 200), ("completions", 413)):
                body = {"model": "m", "messages": [], "prompt": "x" * 9 * 2**20}
                answer = await routed.client.post(f"/llm/v1/{path}", json=body)
                assert answer.status_code == status, answer.text

    asyncio.run(main())
