"""`octavo top`: the live view of a server's engines in the terminal."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import shutil
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Sequence
from typing import Any

from octavo.errors import OctavoError
from octavo.server.client import Client
from octavo.terminal.engine_state import EngineState, Frame, Map, StepView, owner_of
from octavo.terminal.screen import harmless, write

_INTERVAL = 0.2
_RETRY = 2.0
_BARS = " ▁▂▃▄▅▆▇█"
_RED, _DIM, _BOLD, _BLUE, _YELLOW, _MAGENTA = "31", "2", "1", "34", "33", "35"
_PARTS = (("schedule", "32"), ("forward", _BLUE), ("sample", _YELLOW), ("output", _MAGENTA))
_SLOTS = " o+#~"
"""Signs of the recurrent states, by `SlotKind`."""
_MAX_MAP_LINES = 8
_PAGE = 20


def run(client: Client, address: str) -> None:
    """Show the engines until q or Ctrl-C; print one frame if standard output is no terminal.

    Raises:
        ServerError: the server is unreachable at the start, or rejects the request.
    """
    state = EngineState()
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        for name, event in client.watch_engines():
            state.take(name, event)
            if name == "tick" and state.frames[-1].maps:
                break
        lines = draw(state, None, address, shutil.get_terminal_size().columns, 10**6)
        write("\n".join(_plain(line) for line in lines) + "\n")
        return
    events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(client, events), daemon=True).start()
    with _whole_screen():
        _loop(state, events, address)


def _read(client: Client, events: queue.SimpleQueue[tuple[str, Any]]) -> None:
    """Read events, and connect again when the stream ends."""
    while True:
        try:
            for event in client.watch_engines():
                events.put(event)
            events.put(("lost", "the server ended the stream"))
        except OctavoError as error:
            events.put(("lost", str(error)))
        time.sleep(_RETRY)


def _loop(state: EngineState, events: queue.SimpleQueue[tuple[str, Any]], address: str) -> None:
    held: int | None = None
    trouble = ""
    while True:
        while not events.empty():
            name, event = events.get()
            trouble = event if name == "lost" else ""
            if name != "lost":
                state.take(name, event)
        size = shutil.get_terminal_size()
        lines = draw(state, held, address, size.columns, size.lines, trouble)
        write("\x1b[H" + "\x1b[K\r\n".join(lines) + "\x1b[K\x1b[J")
        key = _key(_INTERVAL)
        if key in ("q", "\x03"):
            return
        if key == " ":
            held = state.last if held is None else None
        by = {"\x1b[D": -1, "\x1b[C": 1, "\x1b[5~": -_PAGE, "\x1b[6~": _PAGE}.get(key)
        if by is not None:
            held = max(state.first, min(state.last, (state.last if held is None else held) + by))


def _key(seconds: float) -> str:
    """Return the next key within some seconds; "" if none is pressed."""
    if not select.select([sys.stdin], [], [], seconds)[0]:
        return ""
    return os.read(sys.stdin.fileno(), 8).decode("utf-8", "replace")


@contextlib.contextmanager
def _whole_screen() -> Iterator[None]:
    """Use the terminal's other screen without a cursor and without echo."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        write("\x1b[?1049h\x1b[?25l\x1b[2J")
        yield
    finally:
        write("\x1b[?25h\x1b[?1049l")
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def draw(
    state: EngineState,
    held: int | None,
    address: str,
    width: int,
    height: int,
    trouble: str = "",
) -> list[str]:
    """Return the lines of the screen.

    Args:
        state: the state.
        held: number of the step that is shown; None: the latest state.
        address: address of the server.
        width, height: size of the screen.
        trouble: reason why there are no news.
    """
    frame = state.frame_of(held) if held is not None else None
    if held is None and state.frames:
        frame = state.frames[-1]
    step = state.step(state.last if held is None else held)
    models = ", ".join(state.hello.get("models", ["connecting"]))
    when = "" if step is None else time.strftime("%H:%M:%S", time.localtime(step.time))
    mode = "live" if held is None else "HELD"
    lines = [_styled(_cut(harmless(f"{models}  {address}  {mode} {when}"), width), _BOLD)]
    if frame is not None and frame.health != "ok":
        trouble = trouble or frame.health
    if trouble:
        lines.append(_styled(_cut(harmless(trouble), width), _RED))
    for death in state.deaths[-2:]:
        at = time.strftime("%H:%M:%S", time.localtime(death["time"]))
        text = f"{at} engine {death['engine']} died and was revived after {death['seconds']:.1f} s"
        lines.append(_styled(_cut(text, width), _RED))
    for engine in [] if frame is None else frame.engines:
        lines += _engine_lines(state, frame, engine, held, width)
    if step is not None:
        lines += _step_lines(step, width)
    if frame is None and step is not None:
        lines.append(_styled("no map and no requests are known of this time", _DIM))
    footer = _styled(_cut("q quit  space hold/live  ←/→ step  PgUp/PgDn 20 steps", width), _DIM)
    if frame is not None:
        lines += _request_lines(frame, width)
    return [*lines[: height - 1], footer]


def _engine_lines(
    state: EngineState, frame: Frame | None, engine: int, held: int | None, width: int
) -> list[str]:
    assert frame is not None
    stats = frame.stats.get(str(engine), {})
    tokens, answers = state.rates(frame, engine)
    server = frame.servers.get(str(engine))
    total, queries = stats.get("total_blocks", 0), stats.get("cache_queries", 0)
    facts = [
        f"engine {engine}" + (f" of {harmless(server)}" if server else ""),
        f"running {stats.get('running', 0)}",
        f"waiting {stats.get('waiting', 0)}",
        f"KV {stats.get('used_blocks', 0)}/{total}",
        f"{tokens:,.0f} tokens/s",
        f"answers {answers:,.0f}/s",
        f"preemptions {stats.get('preemptions', 0)}",
    ]
    if queries:
        facts.append(f"cache hits {stats.get('cache_hits', 0) / queries:.0%}")
    if stats.get("drafts"):
        facts.append(f"drafts accepted {stats.get('accepted', 0) / stats['drafts']:.0%}")
    if balance := stats.get("expert_balance"):
        facts.append(f"balance of experts {min(balance):.2f}")
    lines = ["", *(_styled(_cut(line, width), _BOLD) for line in _rows(facts, width))]
    lines += _bars(state, engine, held, width)
    found = frame.maps.get(str(engine))
    return lines if found is None else lines + _map_lines(state, found, width)


def _bars(state: EngineState, engine: int, held: int | None, width: int) -> list[str]:
    """Return the bars of the last steps: tokens, and the split of the time."""
    steps: list[StepView] = []
    number = state.last if held is None else held
    while number >= state.first and len(steps) < width - 8:
        step = state.step(number)
        if step is not None and step.engine == engine:
            steps.insert(0, step)
        number -= 1
    if not steps:
        return []
    splits = [step.split() for step in steps]
    most = max(4, *map(sum, splits))
    bar = "tokens  "
    for prompt, answer, drafts in splits:
        tone = _YELLOW if prompt else _MAGENTA if drafts else _BLUE
        bar += _styled(_BARS[-(-8 * (prompt + answer + drafts) // most)], tone)
    sums = [sum(step.durations[i] for step in steps) for i in range(4)]
    whole, room = sum(sums) or 1.0, max(8, min(40, width - 68))  # the names need 60 columns
    split = "time    "
    for seconds, (_, tone) in zip(sums, _PARTS, strict=True):
        split += _styled("█" * round(room * seconds / whole), tone)
    named = [
        f"{name} {seconds / len(steps):.2f}"
        for seconds, (name, _) in zip(sums, _PARTS, strict=True)
    ]
    return [bar, split + _cut("  " + ", ".join(named) + " ms", width - 8 - room)]


def _map_lines(state: EngineState, found: Map, width: int) -> list[str]:
    """Return the map: a sign for one or several cells."""
    cells, room = found.cells, width - 8
    per_sign = max(1, -(-len(cells) // (room * _MAX_MAP_LINES)))
    signs = []
    for first in range(0, len(cells), per_sign):
        signs.append(_block_sign(state, cells[first : first + per_sign]))
    lines = []
    for first in range(0, len(signs), room):
        lines.append(("KV      " if not first else " " * 8) + "".join(signs[first : first + room]))
    unit = found.blocks_per_cell * per_sign
    lines.append(
        _styled(
            _cut(f"        a sign: {unit} block(s); █ in use ▚ shared ░ kept for later", width),
            _DIM,
        )
    )
    if found.states:
        states = found.states[: room * 2]
        text = "".join(_SLOTS[cell % 4096 >> 3] for cell in states)
        lines.append(f"states  {text[:room]}")
        lines.append(
            _styled(_cut("        o state of a request  # snapshot  + being written", width), _DIM)
        )
    return lines


def _block_sign(state: EngineState, cells: list[int]) -> str:
    used = [cell for cell in cells if cell >> 6 & 7]
    if not used:
        return _styled("░", _DIM) if any(cell >> 3 & 7 for cell in cells) else _styled("·", _DIM)
    label = state.owners.get(owner_of(used[0]), "")
    shared = any(cell >> 9 & 7 > 1 for cell in used)
    return _styled("▚" if shared else "█", _colour(label))


def _step_lines(step: StepView, width: int) -> list[str]:
    prompt, answer, drafts = step.split()
    text = f"step {step.number} of engine {step.engine}: {prompt} prompt, {answer} answer tokens"
    if drafts:
        text += f", {drafts} drafts"
    return ["", *(_cut(line, width) for line in ["; ".join([text, *step.notes])])]


def _request_lines(frame: Frame, width: int) -> list[str]:
    rows, others = frame.requests["rows"], frame.requests.get("others", ())
    heading = f"{'number':>8} {'engine':>6} {'state':9} {'prompt':>19} {'cached':>6} {'answer':>6}"
    lines = ["", _styled(_cut(f"{heading} {'s':>6} id", width), _BOLD)]
    own = set()
    for label, engine, kind, name, size, computed, output, cached, arrived in rows:
        own.add(label)
        progress = "█" * (8 * computed // max(1, size))
        text = (
            f"{label:>8} {'-' if engine is None else engine:>6} {kind:9} {progress:8} "
            f"{computed:>5}/{size:<5}"[: 8 + 1 + 6 + 1 + 9 + 1 + 20]
        )
        text += f" {cached:>6} {output:>6} {max(0.0, frame.time - arrived):>6.1f} {harmless(name)}"
        lines.append(_styled(text[:8], _colour(label)) + _cut(text, width)[8:])
    for label, engine, kind in others:
        if label not in own:
            text = f"{label:>8} {'-' if engine is None else engine:>6} {kind:9} of another key"
            lines.append(_styled(text[:8], _colour(label)) + _cut(text, width)[8:])
    if more := frame.requests.get("more"):
        lines.append(f"and {more} more")
    return lines


def _colour(label: str) -> str:
    """Return the colour of a request: one of the 216 of most terminals, not too dark."""
    number = 7
    for letter in label:
        number = (number * 31 + ord(letter)) % 65521
    red, green, blue = (1 + number // 5**i % 5 for i in range(3))
    return f"38;5;{16 + 36 * red + 6 * green + blue}"


def _styled(text: str, style: str) -> str:
    return f"\x1b[{style}m{text}\x1b[0m"


def _plain(line: str) -> str:
    """Remove the styles of a line."""
    pieces = line.split("\x1b[")
    return pieces[0] + "".join(piece.partition("m")[2] for piece in pieces[1:])


def _rows(facts: Sequence[str], width: int) -> list[str]:
    """Return facts in as few lines as the width allows."""
    lines = [facts[0]]
    for fact in facts[1:]:
        if len(lines[-1]) + 2 + len(fact) <= width:
            lines[-1] += f"  {fact}"
        else:
            lines.append(f"        {fact}")
    return lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
