"""Texts of `octavo explain`."""

import msgspec
import pytest

from octavo.server.client import Explanation, RecentRequests
from octavo.terminal.explanation import described, listed


def explanation(**changes):
    found = {
        "id": "chatcmpl-1",
        "path": "/v1/chat/completions",
        "status": 200,
        "finished": True,
        "wall_ms": 100.0,
        "first_token_ms": 60.0,
        "completion_tokens": 7,
        "timeline": [
            {"cause": "queued", "begin_ms": 0.0, "ms": 60.0, "text": "queued: all seats taken"},
            {"cause": "decode", "begin_ms": 60.0, "ms": 30.0, "text": "the answer " * 12},
            {"cause": "deliver", "begin_ms": 90.0, "ms": 10.0, "text": "sent"},
        ],
        "causes": [{"cause": "queued", "ms": 60.0, "text": "queued"}],
        "cache": {"text": ["3 of 9 prompt tokens were in the cache."], "difference": None},
        "advice": [
            {"setting": "max_num_seqs", "text": "More.", "saved_ms": 60.0, "estimate": "at_most"}
        ],
        **changes,
    }
    return msgspec.convert(found, Explanation)


@pytest.mark.parametrize("width", [40, 80, 200])
def test_bars_are_in_proportion_and_within_the_width(width):
    lines = described(explanation(), width).splitlines()
    bars = [line.count("█") for line in lines if " ms █" in line]
    assert len(bars) == 3
    assert bars[0] == max(8, min(60, width - 26))
    assert bars[1] == pytest.approx(bars[0] / 2, abs=1)
    if width >= 80:
        assert max(map(len, lines[2:])) <= width


def test_all_parts_are_told():
    text = described(explanation(), 100)
    for expected in (
        "chatcmpl-1: 100.0 ms, first token 60.0 ms, 7 tokens, status 200, /v1/chat/completions",
        "queued: all seats taken",
        "60.0 ms  60.0 %  queued",
        "3 of 9 prompt tokens were in the cache.",
        "what would have helped\n   max_num_seqs: More.",
    ):
        assert expected in text


def test_the_cache():
    cache = {
        "text": ["3 of 9 prompt tokens were in the cache.", "What differs is an id."],
        "difference": {"volatile": "an id", "text": "a\nb", "earlier_text": "a\nc"},
    }
    told = described(explanation(cache=cache), 100)
    assert "\n   3 of 9 prompt tokens were in the cache.\n   What differs is an id.\n" in told
    assert r"this prompt: 'a\nb'" in told
    assert r"before: 'a\nc'" in told


def test_the_list():
    data = [
        {
            "id": "cmpl-1",
            "path": "/v1/completions",
            "created": 0.0,
            "seconds": 1.25,
            "completion_tokens": 5,
            "status": status,
        }
        for status in (200, None)
    ]
    head, first, second = listed(msgspec.convert({"data": data}, RecentRequests)).splitlines()
    assert head.split() == ["ID", "ROUTE", "AT", "SECONDS", "TOKENS", "STATUS"]
    assert first.split()[:2] == ["cmpl-1", "/v1/completions"]
    assert first.split()[3:] == ["1.250", "5", "200"]
    assert second.split()[-1] == "runs"
