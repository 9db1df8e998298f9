"""Counts of a replayed session, with a server that keeps what it has seen."""

import argparse
import itertools
import json

import httpx
import pytest
import session_replay
from session_replay import FORMS, find_change, made_session, read_session, replay

ARGS = {
    "form": "chat",
    "answers": "own",
    "rewrite": False,
    "turns": 6,
    "max_tokens": 8,
    "temperature": 0.0,
    "seed": 0,
    "extra": {},
}
CALL = {"name": "get_booking", "arguments": '{"booking_id":"R1"}'}


class Fake:
    """Server with a token for each character and blocks of 16; every other answer is a call.

    Args:
        drops: the template drops the answers of the assistant.
        spaced: the answers have other tokens when they are prompts.
    """

    def __init__(self, drops=False, spaced=False):
        self.drops, self.spaced = drops, spaced
        self.known, self.bodies = [], []

    def render(self, messages):
        ids = []
        for message in messages:
            if self.drops and message["role"] == "assistant":
                continue
            text = json.dumps(message, sort_keys=True)
            known = message["role"] == "assistant" and not self.spaced
            ids += [ord(c) + (1000 if known else 0) for c in text]
        return ids

    def __call__(self, request):
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        body = json.loads(request.content)
        if request.url.path == "/detokenize":
            text = "".join(chr(t % 1000) for t in body["tokens"])
            return httpx.Response(200, json={"prompt": text})
        self.bodies.append(body)
        prompt = self.render(body["messages"])
        same = next((i for i, t in enumerate(prompt) if self.known[i : i + 1] != [t]), len(prompt))
        message = {"role": "assistant", "content": "A text."}
        if len(self.bodies) % 2:
            call = {"id": "1", "type": "function", "function": CALL}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        answer = [ord(c) + 1000 for c in json.dumps(message, sort_keys=True)]
        self.known = prompt + answer
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(answer),
            "prompt_tokens_details": {"cached_tokens": same // 16 * 16},
        }
        choice = {"message": message, "token_ids": answer}
        found = {"choices": [choice], "usage": usage, "prompt_token_ids": prompt}
        if body.get("stream"):
            assert body["stream_options"] == {"include_usage": True}
            deltas = [{"role": "assistant", "content": ""}, {"content": "A"}, {"content": "B"}]
            chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
            chunks.append({"choices": [], "usage": usage})
            lines = [f"data: {json.dumps(chunk)}" for chunk in chunks]
            return httpx.Response(200, text="\n\n".join([*lines, "data: [DONE]", ""]))
        return httpx.Response(200, json=found)


def turns(server, **args):
    given = argparse.Namespace(**{**ARGS, **args})
    transport = httpx.MockTransport(server)
    with httpx.Client(transport=transport, base_url="http://fake") as http:
        return list(replay(http, made_session(6), given))


def test_only_new_tokens():
    server = Fake()
    found = turns(server)
    assert [turn.again < 16 for turn in found] == [True] * 6
    assert [turn.change for turn in found] == [""] * 6
    for before, turn in itertools.pairwise(found):
        assert turn.new == turn.prompt - before.prompt - before.completion > 0
    roles = [message["role"] for message in server.bodies[-1]["messages"]]
    assert roles[:6] == ["system", "user", "assistant", "tool", "assistant", "user"]


@pytest.mark.parametrize(
    ("server", "change"), [(Fake(drops=True), "other text"), (Fake(spaced=True), "other tokens")]
)
def test_changes(server, change):
    found = turns(server)
    assert found[1].change.startswith(change)
    assert any(turn.again > 16 for turn in found)


def test_rewritten_arguments():
    found = turns(Fake(), rewrite=True)
    assert found[1].change.startswith("other text")
    assert found[2].change == ""


def test_an_earlier_change():
    before = session_replay.Turn(3, 0, 2, [], [1, 2, 3], [4, 5])
    after = session_replay.Turn(5, 0, 1, [], [1, 9, 3, 4, 5], [6])
    assert find_change(None, before, after) == "earlier @1"


def test_cut_calls_are_dropped():
    class Cutting(Fake):
        def __call__(self, request):
            answer = super().__call__(request)
            return httpx.Response(200, content=answer.content.replace(b'\\"R1\\"}', b'\\"R1'))

    server = Cutting()
    turns(server)
    sent = [m for m in server.bodies[-1]["messages"] if m["role"] == "assistant"]
    assert sent[0] == {"role": "assistant", "content": ""}


def test_recorded_answers():
    server = Fake()
    found = turns(server, answers="recorded")
    sent = [m for m in server.bodies[-1]["messages"] if m["role"] == "assistant"]
    assert sent == made_session(6).recorded[: len(sent)]
    assert all(turn.again < 16 for turn in found)
    assert all(turn.ttft is not None and turn.ttft > 0 for turn in found)


def test_parts_with_a_token():
    assert not session_replay.has_token({"delta": {"role": "assistant", "content": ""}})
    assert session_replay.has_token({"delta": {"content": "A"}})
    assert session_replay.has_token({"delta": {"content": ""}, "token_ids": [7]})
    assert session_replay.has_token({"delta": {}, "finish_reason": "length"})


def test_a_session_from_a_file(tmp_path):
    made = made_session(4)
    path = tmp_path / "session.json"
    user = {"role": "user", "content": "Hello?"}
    path.write_text(json.dumps({"traj": [user, made.recorded[1]], "tools": made.tools[:1]}))
    session = read_session(path, 4)
    assert (session.asked, len(session.tools), len(session.recorded)) == (["Hello?"], 1, 1)
    path.write_text("{}")
    with pytest.raises(SystemExit, match="messages of a user"):
        read_session(path, 4)
    assert set(FORMS) == {"chat", "messages", "responses", "previous", "ollama"}
