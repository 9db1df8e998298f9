"""/v1/files: uploads in pieces, lists, limits, and files of other keys."""

import asyncio
import json

import openai
import pytest
from openai.types import FileDeleted, FileObject
from pydantic import TypeAdapter

from octavo.server import file_answers, file_store, upload
from octavo.server.file_store import FileStore, StorageError
from tests.server.fake_engine import Call, with_server

KEYS = {"api_key": ["a", "b"]}


def client_of(served, key="none"):
    return openai.AsyncOpenAI(
        api_key=key, base_url="http://test/v1", http_client=served.http, max_retries=0
    )


def as_user(key):
    return {"Authorization": f"Bearer {key}"}


async def post_file(served, data=b"{}", name="a.jsonl", purpose="batch", key=None, **fields):
    return await served.http.post(
        "/v1/files",
        files={"file": (name, data)},
        data={"purpose": purpose, **fields},
        headers=as_user(key) if key else {},
    )


async def answer_to(call):
    await call.task
    return call.status, call.body


def strictly(kind, found):
    """Check an answer against OpenAI's type and ours."""
    own = getattr(file_answers, kind.__name__)
    TypeAdapter(own).validate_python(found.model_dump(include=set(found.model_fields_set)))
    kind.model_validate(found.model_dump(), strict=True)
    assert not found.model_extra, found.model_extra
    return found


def test_openai_client():
    async def scenario(served):
        files = client_of(served).files
        data = bytes(range(256)) * 1000
        made = strictly(
            FileObject,
            await files.create(
                file=("n.jsonl", data),
                purpose="batch",
                expires_after={"anchor": "created_at", "seconds": 3600},
            ),
        )
        assert (made.bytes, made.filename, made.purpose) == (len(data), "n.jsonl", "batch")
        assert made.expires_at == made.created_at + 3600
        other = await files.create(file=b"x", purpose="user_data")
        assert other.expires_at is None
        assert strictly(FileObject, await files.retrieve(made.id)) == made
        assert (await files.content(made.id)).content == data
        assert [f.id async for f in files.list()] == [other.id, made.id]
        assert [f.id async for f in files.list(order="asc", limit=1)] == [made.id, other.id]
        assert [f.id async for f in files.list(purpose="batch")] == [made.id]
        gone = strictly(FileDeleted, await files.delete(made.id))
        assert gone.deleted
        for call in (files.retrieve, files.content, files.delete):
            with pytest.raises(openai.NotFoundError, match="There is no file"):
                await call(made.id)

    with_server(scenario)


def test_files_of_another_key_do_not_exist():
    async def scenario(served):
        mine = (await post_file(served, key="a")).json()["id"]
        for method, path in (
            ("GET", f"/v1/files/{mine}"),
            ("GET", f"/v1/files/{mine}/content"),
            ("DELETE", f"/v1/files/{mine}"),
        ):
            theirs = await served.http.request(method, path, headers=as_user("b"))
            assert (theirs.status_code, theirs.json()["error"]["code"]) == (404, "file_not_found")
        listed = await served.http.get("/v1/files", headers=as_user("b"))
        assert listed.json()["data"] == []
        after = await served.http.get(f"/v1/files?after={mine}", headers=as_user("b"))
        assert after.status_code == 400
        assert (await served.http.get(f"/v1/files/{mine}", headers=as_user("a"))).is_success

    with_server(scenario, **KEYS)


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..", ".", "a/b\\c", "nul", "ü" * 255, "a" * 255]
)
def test_a_file_name_is_no_path(name, tmp_path):
    async def scenario(served):
        made = await post_file(served, name=name)
        assert made.status_code == 200, made.text
        names = {path.name for path in (tmp_path / "s" / "files").iterdir()}
        assert names == {made.json()["id"] + ".bin", made.json()["id"] + ".json"}

    with_server(scenario, state_dir=str(tmp_path / "s"))
    assert {path.name for path in tmp_path.iterdir()} == {"s"}


def form(*parts, boundary="xx", end="--xx--\r\n"):
    head = 'Content-Disposition: form-data; name="%s"%s\r\n\r\n'
    text = "".join(f"--{boundary}\r\n{head % (n, f)}{value}\r\n" for n, f, value in parts)
    return (text + end).encode()


FILE = ("file", '; filename="a"', "data")
PURPOSE = ("purpose", "", "batch")


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (form(FILE), 400, "purpose is missing"),
        (form(PURPOSE), 400, "file is missing"),
        (form(FILE, ("purpose", "", "evil")), 400, "purpose='evil' is not allowed"),
        (form(FILE, PURPOSE, PURPOSE), 400, "several values"),
        (form(FILE, FILE, PURPOSE), 400, "several files"),
        (form(("file", "", "text"), PURPOSE), 400, "send a file with a file name"),
        (form(("file", '; filename="a\x00b"', ""), PURPOSE), 400, "file name 'a\\x00b'"),
        (form(("file", f'; filename="{"a" * 256}"', ""), PURPOSE), 400, "is not allowed; give 1"),
        (form(("file", '; filename=""', ""), PURPOSE), 400, "is not allowed; give 1"),
        (form(FILE, ("purpose", "", "b" * 5000)), 400, "more than 4096 bytes"),
        (form(FILE, *[("f[]", "", "b" * 1000)] * 5), 400, "more than 4096 bytes"),
        (form(FILE, *[(f"f{i}", "", "") for i in range(40)]), 400, "more than 32 fields"),
        (form(FILE, PURPOSE, end=""), 400, "it has no end"),
        (form(FILE, PURPOSE)[:60], 400, "it has no end"),
        (b"--xx\r\n" + b"a: b\r\n" * 20, 400, "no valid form"),
        (b"--xx\r\na: " + b"b" * 10_000, 400, "no valid form"),
        (b"--xx\r\na: b\r\n\r\n", 400, "a part has no name"),
        (b"", 400, "it has no end"),
        (b"\x00" * 100, 400, "no valid form"),
        (
            form(FILE, PURPOSE, ("expires_after[seconds]", "", "3600")),
            400,
            "expires_after[anchor]='' is not allowed",
        ),
        (
            form(
                FILE,
                PURPOSE,
                ("expires_after[anchor]", "", "created_at"),
                ("expires_after[seconds]", "", "9" * 50),
            ),
            400,
            "expires_after[seconds]",
        ),
        (form(("file", '; filename="a"', "x" * 3000), PURPOSE), 413, "--max-file-bytes"),
    ],
)
@pytest.mark.parametrize("chunks", [1, 17])
def test_a_bad_form_leaves_nothing(body, status, said, chunks, tmp_path):
    async def scenario(served):
        kind = {"content-type": "multipart/form-data; boundary=xx"}
        answer = await answer_to(Call(served, "/v1/files", body, kind, chunks))
        assert answer[0] == status
        assert said in json.loads(answer[1])["error"]["message"]
        assert [*(tmp_path / "s" / "files").iterdir()] == []
        assert (await served.http.get("/v1/files")).json()["data"] == []

    with_server(scenario, state_dir=str(tmp_path / "s"), max_file_bytes=2000)


def test_a_file_may_have_all_bytes_in_all_pieces(tmp_path):
    data = b"\r\n--x\r\n--xx-\r\n--xy--\r\n-\r\r\n\n--" * 20

    async def scenario(served):
        kind = {"content-type": "multipart/form-data; boundary=xx"}
        body = form(("file", '; filename="a"', data.decode()), PURPOSE)
        for chunks in (1, 3, len(body)):
            status, answer = await answer_to(Call(served, "/v1/files", body, kind, chunks))
            assert status == 200, answer
            found = await served.http.get(f"/v1/files/{json.loads(answer)['id']}/content")
            assert found.content == data

    with_server(scenario)


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"content-type": "application/json"}, 415, "unsupported_media_type"),
        ({"content-type": "multipart/form-data"}, 415, "unsupported_media_type"),
        ({"content-type": "multipart/form-data; boundary="}, 415, "unsupported_media_type"),
        ({"content-type": "multipart/form-data; boundary=" + "x" * 300}, 400, "invalid_form"),
        ({"content-encoding": "gzip"}, 415, "unsupported_media_type"),
        ({"content-length": str(2 * 2**30)}, 413, "file_too_large"),
        ({"origin": "http://evil.example"}, 403, "origin_not_allowed"),
        ({"origin": "null"}, 403, "origin_not_allowed"),
        ({"origin": "http://[::1"}, 403, "origin_not_allowed"),
    ],
)
def test_headers(headers, status, code):
    async def scenario(served):
        given = {"content-type": "multipart/form-data; boundary=xx", **headers}
        found = await answer_to(Call(served, "/v1/files", form(FILE, PURPOSE), given))
        assert (found[0], json.loads(found[1])["error"]["code"]) == (status, code)

    with_server(scenario)


def test_pages_of_the_same_site_may_upload():
    async def scenario(served):
        for origin in ("http://test", "http://friend"):
            kind = {"content-type": "multipart/form-data; boundary=xx", "host": "test"}
            call = Call(served, "/v1/files", form(FILE, PURPOSE), {**kind, "origin": origin})
            assert (await answer_to(call))[0] == 200

    with_server(scenario, allowed_origins=["http://friend"])


def test_an_upload_that_breaks_off_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(upload, "_PATIENCE", 0.05)
    kind = {"content-type": "multipart/form-data; boundary=xx"}

    async def scenario(served):
        cut = Call(served, "/v1/files", form(FILE, PURPOSE), kind, chunks=4, cut_after=2)
        await cut.task
        slow = Call(served, "/v1/files", form(FILE, PURPOSE), kind, chunks=4)
        slow._parts = slow._parts[:1]
        status, said = await answer_to(slow)
        assert status == 408
        assert b"too slowly" in said
        assert [*(tmp_path / "s" / "files").iterdir()] == []

    with_server(scenario, state_dir=str(tmp_path / "s"))


def test_a_full_disk_is_a_typed_error(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    async def scenario(served):
        assert (await post_file(served)).status_code == 200
        with monkeypatch.context() as broken:
            broken.setattr(file_store.os, "fsync", full)
            failed = await post_file(served)
        assert (failed.status_code, failed.json()["error"]["code"]) == (507, "storage_failed")
        assert "No space left on device" in failed.json()["error"]["message"]
        with monkeypatch.context() as broken:
            broken.setattr(file_store, "write_file", full)
            assert (await post_file(served)).status_code == 507
        assert len([*(tmp_path / "s" / "files").iterdir()]) == 2
        assert (await post_file(served)).status_code == 200

    with_server(scenario, state_dir=str(tmp_path / "s"))


def test_limits_of_all_files(monkeypatch):
    monkeypatch.setattr(file_store, "MAX_FILES", 12)

    async def scenario(served):
        codes = [(await post_file(served, key="a")).status_code for _ in range(12)]
        assert codes == [200] * 10 + [400] * 2  # the rest is for the other key
        found = await post_file(served, key="a")
        assert found.json()["error"]["code"] == "storage_limit_exceeded"
        assert (await post_file(served, key="b")).status_code == 200

    with_server(scenario, **KEYS)


def test_limit_of_all_bytes(tmp_path):
    async def scenario(served):
        codes = [(await post_file(served, b"x" * 1000)).status_code for _ in range(60)]
        assert 30 < codes.count(200) <= 51  # of fifty times 1024 bytes, with those of the form
        assert codes == sorted(codes)
        listed = (await served.http.get("/v1/files")).json()["data"]
        await served.http.delete(f"/v1/files/{listed[0]['id']}")
        assert (await post_file(served, b"x" * 100)).status_code == 200

    with_server(scenario, max_file_bytes=1024)


def test_files_survive_a_restart_and_others_are_removed(tmp_path):
    made = {}

    async def begin(served):
        for name, fields in (
            ("kept", {}),
            (
                "expired",
                {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"},
            ),
            ("cut", {}),
        ):
            made[name] = (await post_file(served, b"0123456789", name, **fields)).json()["id"]

    async def go_on(served):
        listed = (await served.http.get("/v1/files")).json()["data"]
        assert [file["filename"] for file in listed] == ["kept"]
        content = await served.http.get(f"/v1/files/{made['kept']}/content")
        assert content.content == b"0123456789"

    settings = {"state_dir": str(tmp_path / "s")}
    with_server(begin, **settings)
    folder = tmp_path / "s" / "files"
    (folder / f"{made['cut']}.bin").write_bytes(b"01234")
    description = folder / f"{made['expired']}.json"
    found = json.loads(description.read_text())
    description.write_text(json.dumps(found | {"expires_at": 1}))
    (folder / "file-torn.bin").write_bytes(b"x")
    (folder / "file-bad.json").write_bytes(b"\xff{")
    with_server(go_on, **settings)
    assert {path.name for path in folder.iterdir()} == {
        f"{made['kept']}.bin",
        f"{made['kept']}.json",
    }


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=" + "9" * 99, "limit"),
        ("order=up", "order"),
        ("after=x", "after"),
    ],
)
def test_bad_lists(query, param):
    async def scenario(served):
        found = await served.http.get(f"/v1/files?{query}")
        assert (found.status_code, found.json()["error"]["param"]) == (400, param)

    with_server(scenario)


def test_several_front_ends_have_no_files():
    async def scenario(served):
        found = await post_file(served)
        assert found.status_code == 404
        assert "--api-server-count" in found.json()["error"]["message"]

    with_server(scenario, api_server_count=2)


def test_without_a_state_dir_nothing_stays(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    async def scenario(served):
        assert [*tmp_path.iterdir()] == []  # most servers need no folder
        await post_file(served)
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700

    with_server(scenario)
    assert [*tmp_path.iterdir()] == []


def test_ids_of_a_store_are_no_paths(tmp_path):
    (tmp_path / "secret.bin").write_bytes(b"x")
    (tmp_path / "files").mkdir()
    store = FileStore(tmp_path / "files", 1000, several_owners=False)
    for name in ("../secret", "", "file-", "file-" + "g" * 32, "file-" + "0" * 32 + "\n"):
        with pytest.raises(file_store.NotFoundError):
            store.find(None, name)
    (tmp_path / "files").rmdir()
    with pytest.raises(StorageError):
        store.begin(None)


def test_ranges_have_no_effect():
    async def scenario(served):
        path = f"/v1/files/{(await post_file(served, b'0123456789')).json()['id']}/content"
        for given in ("bytes=2-3", "bytes=0-1,4-5", "bytes=90-", "letters"):
            found = await served.http.get(path, headers={"Range": given})
            assert (found.status_code, found.content) == (200, b"0123456789")
            assert found.headers["content-length"] == "10"

    with_server(scenario)


def test_a_file_that_is_deleted_while_it_is_read():
    async def scenario(served):
        data = bytes(range(256)) * 5000
        file = (await post_file(served, data)).json()["id"]
        call = Call(served, f"/v1/files/{file}/content", b"", method="GET")
        go_on, send = asyncio.Event(), call.send

        async def slowly(message):
            await send(message)
            if message["type"] == "http.response.body":
                await go_on.wait()

        call.send = slowly
        await call.wait_for_body()
        assert (await served.http.delete(f"/v1/files/{file}")).status_code == 200
        go_on.set()
        assert await answer_to(call) == (200, data)
        left = Call(served, f"/v1/files/{file}/content", b"", method="GET")
        assert (await answer_to(left))[0] == 404

    with_server(scenario)


def test_a_file_that_is_gone_is_a_typed_error(tmp_path):
    async def scenario(served):
        file = (await post_file(served)).json()["id"]
        (tmp_path / "s" / "files" / f"{file}.bin").unlink()
        found = await served.http.get(f"/v1/files/{file}/content")
        assert (found.status_code, found.json()["error"]["code"]) == (507, "storage_failed")

    with_server(scenario, state_dir=str(tmp_path / "s"))


def test_files_keep_their_order_after_a_restart(tmp_path):
    made = []

    async def fill(served):
        made.extend([(await post_file(served)).json()["id"] for _ in range(12)])

    async def look(served):
        listed = (await served.http.get("/v1/files?order=asc")).json()["data"]
        assert [file["id"] for file in listed] == made

    settings = {"state_dir": str(tmp_path / "s")}
    with_server(fill, **settings)
    with_server(look, **settings)


def test_expired_files_of_batches_do_not_keep_others(tmp_path, monkeypatch):
    monkeypatch.setattr(file_store, "_MOST_DROPPED", 2)
    monkeypatch.setattr(file_store.time, "time", lambda: 1.0)
    store = FileStore(tmp_path, 1000, several_owners=False)

    async def make():
        return [await store.begin(None).finish("a", "batch", 5) for _ in range(5)]

    files = asyncio.run(make())
    store.in_use = {file.id for file in files[:3]}.__contains__
    monkeypatch.setattr(file_store.time, "time", lambda: 10.0)
    assert store.files(None) == files[:3]
