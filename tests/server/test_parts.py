"""A parser splits an answer into parts; the writers of streamed and whole answers know them."""

import json

import pytest

from octavo.parsers.parts import Reasoning, Text
from octavo.server.chat import ChatCompletion
from octavo.server.parts import fold
from tests.server.fake_engine import events, with_server

OPEN, CLOSE = "<think>", "</think>"


class Thoughts:
    """Parser of an answer that begins with `<think>...</think>`."""

    def __init__(self, prompt):
        self._kind, self._mark, self._held = Text, OPEN, ""

    def feed(self, text):
        held, parts = self._held + text, []
        before, found, after = held.partition(self._mark)
        if found:
            parts = [self._kind(before)] if before else []
            thinks = self._mark == OPEN
            self._kind, self._mark = (Reasoning, CLOSE) if thinks else (Text, OPEN)
            self._held = ""
            return parts + self.feed(after)
        # The end may be the beginning of a mark.
        sizes = range(min(len(held), len(self._mark)), -1, -1)
        cut = next(len(held) - n for n in sizes if held.endswith(self._mark[:n]))
        certain, self._held = held[:cut], held[cut:]
        return [self._kind(certain)] if certain else []

    def end(self):
        return [self._kind(self._held)] if self._held else []


@pytest.mark.parametrize(
    ("answer", "thoughts", "text"),
    [
        ("<think>a<b</think>Hi <there", "a<b", "Hi <there"),
        ("<think>never ends</thi", "never ends</thi", ""),
        ("plain", None, "plain"),
    ],
)
@pytest.mark.parametrize("fields", [{}, {"logprobs": True}, {"n": 2}], ids=str)
def test_a_parser_is_seen_in_streams_and_whole_answers(answer, thoughts, text, fields, monkeypatch):
    monkeypatch.setattr(ChatCompletion, "make_parser", Thoughts)

    async def scenario(served):
        served.engine.answer = answer
        fields["max_tokens"] = 64
        whole = (await served.chat(**fields)).json()
        for choice in whole["choices"]:
            assert choice["message"]["reasoning"] == thoughts
            assert choice["message"]["content"] == text
        found = [{"content": "", "reasoning": ""} for _ in whole["choices"]]
        num_logprobs = 0
        for item in await events(await served.chat(**fields, stream=True)):
            (choice,) = json.loads(item)["choices"]
            for name, piece in choice["delta"].items():
                if name not in ("role", "reasoning_content"):
                    found[choice["index"]][name] += piece
            num_logprobs += len((choice["logprobs"] or {"content": []})["content"])
        expected = {"content": text, "reasoning": thoughts or ""}
        assert found == [expected] * len(whole["choices"])
        assert num_logprobs == (len(answer) + 1 if "logprobs" in fields else 0)

    with_server(scenario)


def test_what_a_kind_has_is_joined():
    parts = [Text("a"), Reasoning("b"), Text("c")]
    assert fold(parts) == {Text: "ac", Reasoning: "b"}
