"""File of requests, answered line by line."""

import json

import pytest

from octavo.config import EngineConfig, ServerConfig
from octavo.errors import ConfigError, EngineDeadError
from octavo.server import run_batch
from tests.server.fake_engine import FakeAsyncLLM

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def line(custom_id, body, url="/v1/completions", **others):
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body} | others)


@pytest.fixture
def answer(monkeypatch, tmp_path):
    """Answer lines by a fake engine; return the written answers."""

    def run(*lines, engine=None, **settings):
        async def start(config, engine_config, processes):
            return engine or FakeAsyncLLM(engine_config)

        monkeypatch.setattr(run_batch, "start_engine", start)
        (tmp_path / "in").write_bytes(
            b"\n".join(x if isinstance(x, bytes) else x.encode() for x in lines)
        )
        (tmp_path / "out").write_text("of an earlier run, which all may read")
        config = EngineConfig.from_kwargs(max_num_seqs=1, max_num_batched_tokens=8)
        try:
            run_batch.run_batch(
                ServerConfig(**settings), config, str(tmp_path / "in"), str(tmp_path / "out")
            )
        finally:
            assert (tmp_path / "out").stat().st_mode & 0o777 == 0o600
            written = [json.loads(x) for x in (tmp_path / "out").read_text().splitlines()]
        return written

    return run


def test_answers_come_in_the_order_of_the_lines(answer):
    lines = [line(str(i), {"prompt": "x", "max_tokens": 1 + i % 3}) for i in range(9)]
    found = answer(*lines, "", line("chat", CHAT, "/v1/chat/completions"))
    assert [a["custom_id"] for a in found] == [*map(str, range(9)), "chat"]
    assert all(a["error"] is None and a["response"]["status_code"] == 200 for a in found)
    used = [a["response"]["body"]["usage"]["completion_tokens"] for a in found[:9]]
    assert used == [1, 2, 3] * 3
    assert found[-1]["response"]["body"]["choices"][0]["message"]["content"] == "Hello, wörld!"
    assert len({a["id"] for a in found}) == len(found)


@pytest.mark.parametrize(
    ("wrong", "custom_id", "said"),
    [
        ("not json", None, "line 2 of the input is not valid JSON (at byte 4); write each request"),
        ('{"custom_id": ', None, "line 2 of the input is not valid JSON; write each request on"),
        (
            b'{"custom_id": "b\xff"}',
            None,
            "line 2 of the input is not valid JSON (not UTF-8 at byte 16)",
        ),
        ("[]", None, "line 2 of the input is not a JSON object; write {"),
        ("[" * 5000, None, "line 2 of the input is not"),
        (
            '{"custom_id": 5}',
            None,
            "line 2 of the input has a custom_id that is of JSON's type int;",
        ),
        (json.dumps({"custom_id": "b"}), "b", "line 2 of the input has no method; write {"),
        (
            line("b", {}, "/v1/images"),
            "b",
            "has url='/v1/images'; use /v1/chat/completions",
        ),
        (line("b", {}, method="GET"), "b", "line 2 of the input has method='GET'; use POST."),
        (line("b", []), "b", "object"),
        (line("b", {"prompt": "x", "max_tokens": -1}), "b", "max_tokens=-1"),
        (line("b", {"prompt": "x", "model": "other"}), "b", "other"),
        (line("b", {"prompt": "x", "stream": True}), "b", "stream must be false"),
        (line("b", {"prompt": "x" * 5000}), "b", "larger"),
    ],
)
def test_a_wrong_line_harms_only_itself(answer, wrong, custom_id, said):
    good = {"prompt": "x", "max_tokens": 1}
    found = answer(line("a", good), wrong, line("c", good), max_request_bytes=4096)
    assert [a["custom_id"] for a in found] == ["a", custom_id, "c"]
    assert [a["error"] is None for a in found] == [True, False, True]
    assert said in found[1]["error"]["message"]


def test_lines_wait_for_room(answer):
    # Two lines are in flight at a time, and the server admits the answers of one.
    lines = [line(str(i), {"prompt": "x", "n": 2, "max_tokens": 2}) for i in range(4)]
    found = answer(*lines, max_num_queued_reqs=2)
    assert [a["response"]["status_code"] for a in found] == [200] * 4


def test_files_are_looked_at_before_the_model(tmp_path):
    there, none = tmp_path / "in", tmp_path / "no" / "file"
    there.touch()
    for source, target, said in (
        (none, there, "input_file=.*cannot be read"),
        (there, none, "output_file=.*cannot be written"),
        (there, there, "is the input file"),
    ):
        with pytest.raises(ConfigError, match=said):
            run_batch.run_batch(ServerConfig(), EngineConfig(), str(source), str(target))


def test_an_engine_that_cannot_start_is_an_error(answer):
    engine = FakeAsyncLLM()
    engine.load_error = EngineDeadError("no memory")
    with pytest.raises(EngineDeadError, match="no memory"):
        answer(line("a", {"prompt": "x"}), engine=engine)
