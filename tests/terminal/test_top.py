"""`octavo top`: the state that it follows, what it draws, keys and a lost connection."""

import os
import pty
import re
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from octavo import cli
from octavo.terminal import top
from octavo.terminal.engine_state import EngineState

HELLO = {"time": 1.0, "models": ["toy"], "block_size": 16, "version": "1"}


def step(number, *parts, engine=0, **other):
    found = {"engine": engine, "number": number, "at": -5.0, "forward": 2.0, **other}
    return found | ({"parts": [list(part) for part in parts]} if parts else {})


def make_state(**tick):
    """Return a state after a hello, a tick and its requests."""
    state = EngineState()
    state.take("hello", HELLO)
    first = {"time": 100.0, "engines": [0], "health": "ok", "stats": {"0": {"running": 1}}}
    state.take("tick", first | tick)
    rows = [["17", 0, "prompt", "cmpl-x", 64, 32, 0, 16, 99.0]]
    state.take("requests", {"rows": rows, "others": [["17", 0, "prompt"], ["18", 0, "waiting"]]})
    return state


def draw(state, held=None, width=100, height=50, **other):
    return [top._plain(line) for line in top.draw(state, held, "here", width, height, **other)]


def cells(*values, owners=None):
    """Return a whole map of single cells."""
    runs = [number for i, value in enumerate(values) for number in (i, 1, value)]
    found = {"num_blocks": len(values), "blocks_per_cell": 1, "num_cells": len(values)}
    return found | {"runs": runs, "owners": owners or {}}


USED, SHARED, KEPT = 7 << 6 | 1 << 9, 7 << 6 | 2 << 9, 7 << 3


def test_blocks_requests_and_figures_are_drawn():
    blocks = cells(4096 + USED, 4096 + SHARED, KEPT, 0, owners={"1": "17"})
    state = make_state(blocks={"0": blocks}, steps=[step(1, ["17", 32, 0, 1])])
    lines = draw(state)
    assert "toy  here  live" in lines[0]
    assert any("engine 0  running 1" in line for line in lines)
    assert "KV      █▚░·" in lines
    assert any(re.search(r"17 +0 prompt +████ +32/64 +16 +0 +1.0 cmpl-x", line) for line in lines)
    assert any(re.search(r"18 +0 waiting +of another key", line) for line in lines)
    assert any("step 1 of engine 0: 32 prompt, 0 answer tokens" in line for line in lines)


def test_changes_of_a_map_are_applied():
    state = make_state(blocks={"0": cells(0, 0, 0)})
    change = {"num_blocks": 3, "blocks_per_cell": 1, "runs": [1, 2, KEPT]}
    state.take("tick", {"time": 102.0, "blocks": {"0": change}})
    assert "KV      ·░░" in draw(state)
    assert state.frames[0].maps["0"].cells == [0, 0, 0]


def test_no_figure_is_cut_in_a_narrow_terminal():
    stats = {"running": 1, "cache_queries": 4, "cache_hits": 1, "drafts": 2, "accepted": 1}
    state = make_state(stats={"0": stats}, steps=[step(1, ["17", 1])])
    lines = draw(state, width=80)
    assert "\n".join(lines).count("…") == 0
    text = " ".join(lines)
    for figure in ("preemptions 0", "cache hits 25%", "drafts accepted 50%", "output 0.00 ms"):
        assert figure in text


def test_time_can_be_held():
    state = make_state(steps=[step(1, ["17", 32, 0, 1]), step(2, ["17", 1])])
    state.take("tick", {"time": 101.0, "first": 2, "steps": [step(3, ["17", 1], ["18", 3, 2])]})
    state.take("requests", {"rows": []})
    assert any("step 3 of engine 0: 0 prompt, 2 answer tokens, 2 drafts" in n for n in draw(state))
    held = draw(state, held=0)
    assert "HELD" in held[0]
    assert any("step 1 of engine 0: 32 prompt" in line for line in held)
    assert any("cmpl-x" in line for line in held)
    assert not any("cmpl-x" in line for line in draw(state))


def test_history_comes_before_the_first_steps():
    state = EngineState()
    state.take("hello", HELLO)
    state.take("tick", {"time": 9.0, "first": 2, "steps": [step(3, ["1", 1])], "engines": [0]})
    state.take("history", {"time": 8.0, "steps": [step(1, ["1", 1]), step(2)]})
    assert [(s.number, s.parts) for s in state.steps] == [(i, [["1", 1]]) for i in (1, 2, 3)]
    assert state.first == 0
    assert any("no map" in line for line in draw(state, held=0))


def test_steps_that_the_server_left_out_do_not_end_the_history():
    state = make_state(steps=[step(1, ["17", 32, 0, 1]), step(2, ["17", 1])])
    state.take("tick", {"time": 101.0, "first": 902, "steps": [step(903, ["18", 1])]})
    assert [s.number for s in state.steps] == [1, 2, 903]
    assert any("step 1 of engine 0: 32 prompt" in line for line in draw(state, held=0))
    assert any("step 903 of engine 0" in line for line in draw(state))


def test_rates_are_those_of_the_last_seconds():
    state = make_state(stats={"0": {"tokens": 1000}})
    for i in range(1, 41):
        steps = [step(i, ["17", 1], ["18", 1])]
        tick = {"time": 100 + i / 4, "first": i - 1, "steps": steps}
        state.take("tick", tick | {"stats": {"0": {"tokens": 1000 + 2 * i}}})
    tokens, answers = state.rates(state.frames[-1], 0)
    assert tokens == pytest.approx(8.0)
    assert answers == pytest.approx(8.0)


def test_a_death_and_its_engine_are_shown():
    death = {"time": 101.0, "seconds": 1.5, "engine": 0, "reason": "killed"}
    state = make_state(health="starting the engine again")
    assert any("starting the engine again" in line for line in draw(state))
    state.take("tick", {"time": 102.0, "health": "ok", "deaths": [death]})
    lines = draw(state)
    assert any("engine 0 died and was revived after 1.5 s" in line for line in lines)
    assert not any("starting" in line for line in lines)


@pytest.mark.parametrize(("width", "height"), [(20, 4), (80, 24), (300, 100)])
def test_it_fits_the_terminal(width, height):
    blocks = cells(*[4096 + USED] * 4096, owners={"1": "17"})
    state = make_state(
        blocks={"0": blocks}, steps=[step(i, ["17", i % 9 + 1]) for i in range(1, 500)]
    )
    lines = draw(state, width=width, height=height, trouble="x" * 500)
    assert len(lines) <= height
    assert max(map(len, lines)) <= max(width, 60)


def test_control_characters_are_harmless():
    state = EngineState()
    state.take("hello", HELLO | {"models": ["a\x1b]0;evil\x07"]})
    state.take("tick", {"time": 1.0, "engines": [0], "health": "ok\x1b[2J"})
    row = ["1", 0, "answer", "x\x1b[2J", 1, 1, 1, 0, 0.0]
    state.take("requests", {"rows": [row]})
    assert not any("\x1b" in line or "\x07" in line for line in draw(state))


class Handler(BaseHTTPRequestHandler):
    """Server with a model and a view of one tick; the view ends when `ends` is set."""

    ends = threading.Event()
    num_views = 0

    def do_GET(self):
        if self.path == "/v1/models":
            body = b'{"data": [{"id": "toy"}]}'
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        if self.headers["Authorization"] == "Bearer wrong":
            body = b'{"error": {"message": "The view has 1024 viewers."}}'
            self.send_response(429)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        type(self).num_views += 1
        self.send_response(200)
        self.end_headers()
        tick = {"time": 5.0, "engines": [0], "health": "ok", "blocks": {"0": cells(KEPT, 0)}}
        for name, event in (("hello", HELLO), ("tick", tick)):
            data = msgspec.json.encode(event).decode()
            self.wfile.write(f":\n\nevent: {name}\ndata: {data}\n\n".encode())
        self.wfile.flush()
        self.ends.wait(200)

    def log_message(self, *args):
        pass


@pytest.fixture
def url():
    Handler.ends.clear()
    Handler.num_views = 0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    Handler.ends.set()
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_pipe_receives_the_state_once(url, capsys):
    Handler.ends.set()
    assert cli.main(["top", "--url", url]) == 0
    out = capsys.readouterr().out
    assert "KV      ░·" in out
    assert "\x1b" not in out


def test_a_refusal_is_told(url, capsys):
    assert cli.main(["top", "--url", url, "--api-key", "wrong"]) == 1
    assert "1024 viewers" in capsys.readouterr().err


def test_keys_hold_and_quit_and_a_lost_server_is_asked_again(url):
    parent, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "octavo", "top", "--url", url],
        stdin=child,
        stdout=child,
        stderr=child,
        env=os.environ | {"COLUMNS": "80", "LINES": "24"},
    )
    os.close(child)
    seen = b""

    def until(text):
        nonlocal seen
        end = time.monotonic() + 100
        while text.encode() not in seen:
            assert time.monotonic() < end, seen
            seen += os.read(parent, 4096)
        seen = b""

    until("live")
    os.write(parent, b" ")
    until("HELD")
    os.write(parent, b" ")
    until("live")
    Handler.ends.set()
    until("the server ended the stream")
    until("toy")
    assert Handler.num_views >= 1
    os.write(parent, b"q")
    try:
        while os.read(parent, 4096):
            pass
    except OSError:  # the terminal's other end is closed
        pass
    assert process.wait(60) == 0
    os.close(parent)
