"""Engine view in a browser: the map under load, held time, a recording, a death."""

import contextlib
import hashlib
import json
import re
import signal
import threading

import httpx
import pytest

from octavo import cli
from tests.browser.test_page import find_violations
from tests.e2e.harness import serve, wait_until

SETTINGS = ["--num-gpu-blocks-override", "400", "--max-model-len", "1k", "--max-num-seqs", "8"]


def picture(canvas):
    """Return a digest of what a canvas shows, once the next frame has drawn it."""
    frames = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
    canvas.page.evaluate(frames)
    return hashlib.sha256(canvas.evaluate("c => c.toDataURL()").encode()).hexdigest()


def shown(page, number):
    """Return the paragraph about a step."""
    return page.get_by_role("paragraph").filter(has_text=f"Step {number} of engine 0")


def number_at(page, place):
    """Return the engine's number of the step that is shown, once it is the one at a place."""
    page.wait_for_function(
        "place => Number(document.querySelector('.time').value) === place", arg=place
    )
    text = page.get_by_role("paragraph").filter(has_text=re.compile(r"^Step \d+ of engine 0"))
    return int(re.search(r"\d+", text.inner_text())[0])


def send(url, i=0, tokens=200):
    prompt = f"Once upon a time {i} girls saw a dog. " * 8
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    httpx.post(f"{url}/v1/completions", json=body, timeout=100).raise_for_status()


def hold(page, locator):
    """Hold the view at a time at which a locator finds something: a request may end before."""
    while True:
        locator.first.wait_for()
        page.get_by_role("button", name="Hold").click()
        page.get_by_role("button", name="Live", exact=True).wait_for()  # the next frame draws it
        if locator.count():
            return
        page.get_by_role("button", name="Live", exact=True).click()
        page.get_by_role("button", name="Hold").wait_for()


@contextlib.contextmanager
def busy(url, count, tokens=200):
    """Keep some requests running inside of a `with` block, however slow the page is."""
    ends = threading.Event()

    def send_always(i):
        while not ends.is_set():
            send(url, i, tokens)

    threads = [threading.Thread(target=send_always, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ends.set()
        for thread in threads:
            thread.join()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a server that records, and the path of the recording."""
    folder = tmp_path_factory.mktemp("recorded")
    path = folder / "run.rec"
    with serve(folder, *SETTINGS, "--record", str(path), spare=True) as server:
        yield server, path


def test_the_view_follows_the_engine(recorded, open_page):
    server, _ = recorded
    page = open_page("/#/engine", server.url)
    canvas = page.get_by_role("img", name=re.compile("Map of 399 blocks"))
    canvas.wait_for()
    empty, label = picture(canvas), canvas.get_attribute("aria-label")
    assert "0 in use" in label
    with busy(server.url, 24):  # most wait for a seat
        page.get_by_text("all seats are taken").first.wait_for()
        rows = page.get_by_role("table").last.get_by_role("row")
        rows.filter(has_text="answer").nth(3).wait_for()
        rows.filter(has_text="waiting").first.wait_for()
        wait_until(lambda: picture(canvas) != empty)  # a block is full
        figures = page.locator("dl.figures")
        wait_until(lambda: re.search(r"running\s*[1-8]\b", figures.inner_text()))
    page.get_by_text("There are none.").wait_for()
    page.get_by_role("img", name=re.compile(" 0 in use, 0 shared, [1-9]")).wait_for()


def test_time_can_be_held_and_stepped_through(recorded, open_page):
    server, _ = recorded
    page = open_page("/#/engine", server.url)
    page.get_by_role("img", name=re.compile("Map of 399 blocks")).wait_for()
    with busy(server.url, 4, 300):
        # There are three steps to go back.
        page.wait_for_function(
            "() => { const {min, max} = document.querySelector('.time'); return max - min > 3; }"
        )
        hold(page, page.get_by_role("row").filter(has_text="answer"))
    place = int(page.locator(".time").input_value())
    number = number_at(page, place)
    canvas = page.get_by_role("img", name="Time of each step")  # the bars scroll with the step
    for _ in range(3):
        page.get_by_role("button", name="◀ Step").click()
    earlier = number_at(page, place - 3)
    assert earlier <= number - 3  # steps without tokens are not shown
    held = picture(canvas)
    page.keyboard.press("ArrowRight")
    assert earlier < number_at(page, place - 2) < number
    assert picture(canvas) != held
    page.keyboard.press("ArrowLeft")
    assert number_at(page, place - 3) == earlier
    rows = page.get_by_role("row").all_inner_texts()
    send(server.url, tokens=20)
    page.wait_for_timeout(500)
    assert number_at(page, place - 3) == earlier  # nothing has moved
    assert page.get_by_role("row").all_inner_texts() == rows
    page.get_by_role("button", name="Live", exact=True).click()
    page.get_by_text("There are none.").wait_for()
    # A new page knows the steps from before.
    other = open_page("/#/engine", server.url)
    other.get_by_role("slider", name="Step").wait_for()
    other.wait_for_function(
        "() => { const {min, max} = document.querySelector('.time'); return max - min > 200; }"
    )


def test_a_request_leads_to_its_story(recorded, open_page):
    server, _ = recorded
    page = open_page("/#/engine", server.url)
    page.get_by_role("img", name=re.compile("Map of 399 blocks")).wait_for()
    with busy(server.url, 1, 300):
        link = page.get_by_role("link", name=re.compile("^cmpl-"))
        hold(page, link)
        name = link.inner_text()
        link.click()
        answer, _index, _number = name.rsplit("-", 2)
        page.get_by_role("heading", name=answer).wait_for()
        page.get_by_text("the prompt was computed").first.wait_for()


def test_a_death_and_the_revival_are_shown(recorded, open_page):
    server, _ = recorded
    page = open_page("/#/engine", server.url)
    page.get_by_role("img", name=re.compile("Map of 399 blocks")).wait_for()
    server.engine_process().send_signal(signal.SIGKILL)
    # With the spare interpreter the engine may be back before the page draws "starting again".
    page.get_by_text(re.compile(r"engine 0 died .* continued after \d")).wait_for()
    page.get_by_text(re.compile("starting the engine again")).wait_for(state="hidden")


def test_a_recording_can_be_opened(recorded, open_page, tmp_path):
    server, path = recorded
    out = tmp_path / "run.view"
    send(server.url, tokens=20)
    assert cli.main(["replay", str(path), "--view", str(out)]) == 0
    page = open_page("/#/engine", server.url)
    page.get_by_label("Open a file of octavo replay --view").set_input_files(out)
    page.get_by_text(re.compile(r"run.view: [\d,]+ steps")).wait_for()
    page.get_by_text("recording,").wait_for()
    first = shown(page, 1)
    first.wait_for()
    assert "prompt tokens" in first.inner_text()
    recorded_map = page.get_by_role("img", name=re.compile("Map of 399 blocks: [1-9]"))
    recorded_map.wait_for()
    page.get_by_role("button", name="Step ▶").click()
    shown(page, 2).wait_for()
    bad = tmp_path / "bad.view"
    bad.write_text("event: tick\ndata: {\n\n")
    page.get_by_label("Open a file of octavo replay --view").set_input_files(bad)
    page.get_by_text(re.compile("bad.view cannot be shown")).wait_for()
    page.get_by_role("button", name="Live server").click()
    page.get_by_role("img", name=re.compile("Map of 399 blocks")).wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(recorded, open_page, scheme):
    server, _ = recorded
    page = open_page("/#/engine", server.url, color_scheme=scheme)
    page.get_by_role("img", name=re.compile("Map of 399 blocks")).wait_for()
    with busy(server.url, 3):
        page.get_by_role("row").filter(has_text="answer").first.wait_for()
        page.get_by_role("button", name="Hold").click()
        page.get_by_role("button", name="Live", exact=True).wait_for()
    assert find_violations(page) == []


def event(name, **data):
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


HELLO = {"version": "1", "models": ["m"], "block_size": 16}
HELLO |= {"max_num_batched_tokens": 8, "max_num_seqs": 2}


@pytest.mark.parametrize(
    ("per_cell", "names"), [(1, ["1", "2", "3"]), (3, ["1 to 3", "4 to 6", "7 to 9"])]
)
def test_what_a_block_holds(recorded, open_page, tmp_path, per_cell, names):
    first, second, third = names
    used, kept = (1 << 12) + (2 << 9) + (7 << 6), (7 << 3) + 5
    blocks = {"num_blocks": 3 * per_cell, "blocks_per_cell": per_cell, "num_cells": 3}
    blocks |= {"runs": [0, 1, used, 1, 1, kept], "owners": {"1": "17"}}
    step = {"engine": 0, "number": 1, "at": 0, "parts": [["17", 1]]}
    tick = {"time": 1, "engines": [0], "health": "ok", "stats": {"0": {}}}
    tick |= {"servers": {"0": "http://one:8000"}}
    path = tmp_path / "blocks.view"
    path.write_text(
        event("hello", time=0, **HELLO) + event("tick", **tick, blocks={"0": blocks}, steps=[step])
    )
    page = open_page("/#/engine", recorded[0].url)
    page.get_by_label("Open a file of octavo replay --view").set_input_files(path)
    page.get_by_role("heading", name="Engine 0: http://one:8000").wait_for()
    tokens = 16 * per_cell
    page.get_by_text(
        f"Block {first}: held by request 17, 2 reference(s), room for {tokens} tokens."
    ).wait_for()
    page.get_by_role("img", name=re.compile("Map of 3")).hover(position={"x": 20, "y": 8})
    kept = f"Block {second}: {tokens} tokens, kept for later prompts; age 5 of 7"
    page.get_by_text(kept).wait_for()
    slider = page.get_by_role("slider", name="Block")
    slider.press("ArrowRight")
    text = f"Block {third}: empty, room for {tokens} tokens."
    page.get_by_text(text).wait_for()
    assert slider.get_attribute("aria-valuetext") == text


def test_steps_that_the_server_left_out_do_not_end_the_history(recorded, open_page, tmp_path):
    def tick(time, first, *numbers):
        steps = [{"engine": 0, "number": i, "at": 0, "parts": [["7", 1]]} for i in numbers]
        return event("tick", time=time, first=first, engines=[0], health="ok", steps=steps)

    path = tmp_path / "gap.view"
    path.write_text(event("hello", time=0, **HELLO) + tick(1, 0, 1, 2) + tick(2, 902, 903, 904))
    page = open_page("/#/engine", recorded[0].url)
    page.get_by_label("Open a file of octavo replay --view").set_input_files(path)
    shown(page, 1).wait_for()
    for number in (2, 903, 904):
        page.get_by_role("button", name="Step ▶").click()
        shown(page, number).wait_for()


def test_recurrent_states_and_experts(recorded, open_page, tmp_path):
    # A state of request 7, a snapshot that is reused last, and one that is reused next.
    states = [0, 1, (1 << 12) + (1 << 3), 1, 1, 3 << 3, 2, 1, (3 << 3) + 7]
    blocks = {"num_blocks": 4, "blocks_per_cell": 1, "num_cells": 4, "runs": []}
    blocks |= {"num_states": 6, "states": states, "owners": {"1": "7"}}
    step = {"engine": 0, "number": 1, "at": 0, "parts": [["7", 1]]}
    tick = {"time": 1, "engines": [0], "health": "ok", "stats": {"0": {}}}
    path = tmp_path / "hybrid.view"
    path.write_text(
        event("hello", time=0, **HELLO)
        + event("tick", **tick, blocks={"0": blocks}, experts={"0": [[3, [5, 0]], [4, [1, 1]]]})
        + event("tick", **tick, steps=[step], experts={"0": [[3, [5, 9]], [4, [2, 2]]]})
    )
    page = open_page("/#/engine", recorded[0].url)
    page.get_by_label("Open a file of octavo replay --view").set_input_files(path)
    canvas = page.get_by_role("img", name="Map of 6 recurrent states: 1 of requests, 2 snapshots")
    # Details of a square: under the pointer, and chosen with the keyboard.
    canvas.hover(position={"x": 1.5 * 14, "y": 7})
    page.get_by_text("State 1: a snapshot; age 0 of 7, where 7 is reused next.").wait_for()
    page.get_by_label("State", exact=True).focus()
    page.keyboard.press("ArrowLeft")
    page.get_by_text("State 0: of request 7.").wait_for()
    for _ in range(9):
        page.keyboard.press("ArrowRight")
    page.get_by_text("State 5: empty.").wait_for()
    page.keyboard.press("Home")
    pixel = """(canvas, [column, row, size]) => {
        const scale = canvas.width / canvas.clientWidth, at = i => (i + 0.5) * size * scale;
        return [...canvas.getContext("2d").getImageData(at(column), at(row), 1, 1).data].join();
    }"""
    free, state, last, following = (
        canvas.evaluate(pixel, [column, 0, 14]) for column in (3, 0, 1, 2)
    )
    assert len({free, state, last, following}) == 4
    heat = page.get_by_role("img", name="Heat of the experts")
    cold, hot, mean, same = (
        heat.evaluate(pixel, [column, row, 14]) for row in (0, 1) for column in (0, 1)
    )
    assert len({cold, hot, mean}) == 3
    assert mean == same
    page.get_by_text("Most chosen: expert 1 of layer 3, 2.0 times the mean.").wait_for()
