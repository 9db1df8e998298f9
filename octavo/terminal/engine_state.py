"""State of a server's engines as `octavo top` follows it, with its recent history."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

MAX_SECONDS = 600.0
MAX_STEPS = 60_000
_RATE_SECONDS = 5.0
_MAP_SECONDS = 1.0
"""Least time between two maps of the KV cache that are kept."""
_OWNER = 4096


@dataclass(frozen=True)
class Map:
    """Cells of an engine's KV cache and of its recurrent states; see `BlockMap`."""

    cells: list[int]
    states: list[int]
    blocks_per_cell: int

    def changed_by(self, changes: dict[str, Any]) -> Map:
        """Return a map with the changes of an event."""
        cells, states = list(self.cells), list(self.states)
        if "num_cells" in changes:
            cells, states = [0] * changes["num_cells"], [0] * changes.get("num_states", 0)
        for target, runs in ((cells, changes.get("runs", ())), (states, changes.get("states", ()))):
            for first, count, value in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
                target[first : first + count] = [value] * count
        return Map(cells, states, changes["blocks_per_cell"])


@dataclass
class Frame:
    """State after a tick."""

    time: float
    begin: int
    """Number of its first step."""
    end: int
    """Number of the first step after it."""
    stats: dict[str, dict[str, Any]]
    maps: dict[str, Map]
    engines: list[int]
    health: str
    servers: dict[str, str]
    """Name of each engine's server, if there is a router."""
    requests: dict[str, Any] = field(default_factory=lambda: {"rows": []})


@dataclass(frozen=True)
class StepView:
    """Step of an engine; durations are in ms."""

    engine: int
    number: int
    time: float
    parts: list[list[Any]]
    durations: tuple[float, float, float, float]
    """Schedule, forward, sample, output."""
    notes: list[str]

    def split(self) -> tuple[int, int, int]:
        """Return the tokens of prompts, of answers, and the drafts."""
        prompt = answer = drafts = 0
        for _, tokens, *rest in self.parts:
            num_drafts = rest[0] if rest else 0
            drafts += num_drafts
            if rest[1:] or tokens != 1 + num_drafts:
                prompt += tokens - num_drafts
            else:
                answer += 1
        return prompt, answer, drafts


class EngineState:
    """State of the engines, and the frames and steps of the last ten minutes."""

    def __init__(self) -> None:
        self.hello: dict[str, Any] = {}
        self.frames: deque[Frame] = deque()
        self.steps: deque[StepView] = deque()
        self.first = 0
        """Number of the first step in `steps`, which are counted without gaps."""
        self.owners: dict[int, str] = {}
        """Labels of the owners in the cells, by number."""
        self.deaths: list[dict[str, Any]] = []
        self._maps: dict[str, Map] = {}
        self._kept: tuple[float, dict[str, Map]] = 0.0, {}
        """Last maps that a frame keeps, with their time."""

    @property
    def last(self) -> int:
        """Number of the last step."""
        return self.first + len(self.steps) - 1

    def take(self, name: str, event: dict[str, Any]) -> None:
        """Take in an event."""
        if name == "hello":
            self.__init__()  # type: ignore[misc]  # the server tells everything again
            self.hello = event
        elif name == "requests" and self.frames:
            self.frames[-1].requests = event
        elif name == "tick":
            self._take_tick(event)
        elif name == "history" and event.get("first", 0) + len(event["steps"]) == self.first:
            self.steps.extendleft(reversed(_read_steps(event)))
            self.first = event.get("first", 0)

    def step(self, number: int) -> StepView | None:
        """Return a step; None if it is not known."""
        index = number - self.first
        return self.steps[index] if 0 <= index < len(self.steps) else None

    def frame_of(self, number: int) -> Frame | None:
        """Return the first frame that knows a step; None if the step is older than all frames."""
        if not self.frames or number < self.frames[0].begin:
            return None
        return next((frame for frame in self.frames if frame.end > number), None)

    def rates(self, frame: Frame, engine: int) -> tuple[float, float]:
        """Return tokens, and tokens of answers, per second in the last seconds before a frame."""
        before = frame
        for earlier in reversed(self.frames):
            if earlier.time <= frame.time:
                before = earlier
            if earlier.time < frame.time - _RATE_SECONDS:
                break
        seconds, name = frame.time - before.time, str(engine)
        if seconds <= 0:
            return 0.0, 0.0
        now, then = frame.stats.get(name, {}), before.stats.get(name, {})
        answers = now.get("accepted", 0) - then.get("accepted", 0)
        for number in range(max(self.first, before.end), frame.end):
            step = self.step(number)
            answers += step.split()[1] if step is not None and step.engine == engine else 0
        tokens = now.get("tokens", 0) - then.get("tokens", 0)
        return max(0.0, tokens / seconds), max(0.0, answers / seconds)

    def _take_tick(self, event: dict[str, Any]) -> None:
        if not self.steps:  # later, steps that the server left out have no number
            self.first = event.get("first", 0)
        begin = self.first + len(self.steps)
        self.steps.extend(_read_steps(event))
        last = self.frames[-1] if self.frames else Frame(0.0, 0, 0, {}, {}, [0], "ok", {})
        for engine, changes in event.get("blocks", {}).items():
            self.owners |= {int(i): label for i, label in changes.get("owners", {}).items()}
            self._maps[engine] = self._maps.get(engine, Map([], [], 1)).changed_by(changes)
        if event["time"] >= self._kept[0] + _MAP_SECONDS or not last.maps:
            self._kept = event["time"], dict(self._maps)
        self.deaths = [*self.deaths, *event.get("deaths", ())][-5:]
        self.frames.append(
            Frame(
                event["time"],
                begin,
                self.first + len(self.steps),
                last.stats | event.get("stats", {}),
                self._kept[1],
                event.get("engines", last.engines),
                event.get("health", last.health),
                event.get("servers", last.servers),
                last.requests,
            )
        )
        while self.frames[0].time < event["time"] - MAX_SECONDS:
            self.frames.popleft()
        while len(self.steps) > MAX_STEPS:
            self.steps.popleft()
            self.first += 1


def owner_of(cell: int) -> int:
    """Return the number of a cell's owner; 0 without one."""
    return cell // _OWNER


def _read_steps(event: dict[str, Any]) -> list[StepView]:
    """Return the steps of an event; equal parts of consecutive steps are sent once."""
    steps, last = [], dict[int, list[list[Any]]]()
    for step in event.get("steps", ()):
        engine = step["engine"]
        parts = last[engine] = step.get("parts") or last.get(engine, [])
        notes = []
        if "wait" in step:
            notes.append("{} waits: {}".format(*step["wait"]))
        for name, by in step.get("preempted", ()):
            notes.append(f"{name} preempted" + ("" if by is None else f" for {by}"))
        if step.get("failed"):
            notes.append("failed")
        durations = [step.get(name, 0.0) for name in ("schedule", "forward", "sample", "output")]
        when = event["time"] + step["at"] / 1000
        steps.append(StepView(engine, step["number"], when, parts, tuple(durations), notes))
    return steps
