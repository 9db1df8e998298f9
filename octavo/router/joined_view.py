"""Engine views of several servers, joined to one.

Engines, steps and the owners of blocks get numbers of the router. A label of a server's request
gets the number of its server: 17 at server 1 is 1/17.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import msgspec
import numpy as np

from octavo import __version__
from octavo.observability.view_events import (
    Hello,
    Requests,
    Tick,
    ViewDeath,
    ViewRequest,
    ViewStats,
    encode_event,
)
from octavo.router.pool import Upstream
from octavo.server.view_picture import MAX_ROWS, Cells
from octavo.system import clock

_MAX_OWNERS = 2**14
"""Most owners of blocks that are known of a server: more than can hold blocks at a time."""
_MAX_DEATHS = 64
_TICK = msgspec.json.Decoder(Tick)
_REQUESTS = msgspec.json.Decoder(Requests)
_HELLO = msgspec.json.Decoder(Hello)
_EMPTY = np.zeros(0, np.int64)


class EngineNumbers:
    """Numbers of all servers, and of all their engines, in the order in which they were seen."""

    def __init__(self) -> None:
        self._servers: dict[Upstream, int] = {}
        self._engines: dict[tuple[Upstream, int], int] = {}

    def of_server(self, upstream: Upstream) -> int:
        """Return the number of a server."""
        return self._servers.setdefault(upstream, len(self._servers))

    def of_engine(self, upstream: Upstream, engine: int) -> int:
        """Return the number of a server's engine."""
        return self._engines.setdefault((upstream, engine), len(self._engines))


class ServerView:
    """Engine view of one server, in the router's numbers.

    Args:
        upstream: the server.
        numbers: numbers of all servers and engines.
        is_own: returns True if the viewer may see the details of a request with an id; None: it may
            see what the server shows.
    """

    def __init__(
        self,
        upstream: Upstream,
        numbers: EngineNumbers,
        is_own: Callable[[str], bool] | None,
    ) -> None:
        self.upstream = upstream
        self.events: list[tuple[str, bytes]] = []
        """Events that have arrived, and "end" with its reason: names and data."""
        self.hello: Hello | None = None
        """Settings; None while it is not connected."""
        self.trouble = "it has not answered yet"
        """Reason why it is not connected."""
        self.fault = ""
        """Reason why its events cannot be read; "": they can."""
        self.refusal: tuple[int, str] | None = None
        """Status and message of its refusal of the view."""
        self.engines: list[int] = []
        self.health = "ok"
        self.stats: dict[str, ViewStats] = {}
        self.cells: dict[str, Cells] = {}
        self.experts: dict[str, list[tuple[int, list[int]]]] = {}
        self.rows: list[ViewRequest] = []
        self.others: list[tuple[str, int | None, str]] = []
        self.num_more = 0
        self.labels: dict[int, str] = {}
        """Labels of the owners, by the router's number."""
        self._owners: dict[int, int] = {}
        """Router's numbers of the owners, by the server's number."""
        self._numbers, self._is_own = numbers, is_own
        self._prefix = f"{numbers.of_server(upstream)}/"
        self._lost: tuple[float, str] | None = None
        """Time and reason of the loss of its connection."""
        self._last_death = 0.0

    def take_all(self, tick: Tick, owner_numbers: Iterator[int]) -> None:
        """Take in the events that have arrived, and add what is new to a tick of the router."""
        events, self.events = self.events, []
        try:
            for name, data in events:
                if name == "end":
                    self._end(data.decode())
                elif self.fault:
                    continue
                elif name == "hello":
                    self.hello, self.refusal = _HELLO.decode(data), None
                elif name == "requests":
                    self._take_requests(_REQUESTS.decode(data))
                elif name == "tick":
                    self._take_tick(_TICK.decode(data), tick, owner_numbers)
        except (msgspec.MsgspecError, ValueError) as error:
            self._end(f"its events cannot be read: {error}")
            self.fault = self.trouble

    def _end(self, reason: str) -> None:
        """Forget all after the end of the stream, or because it could not be opened."""
        if self.hello is not None:
            self._lost = clock.now(), reason
        self.trouble, self.hello, self.fault = reason, None, ""
        self.engines, self.health, self.num_more = [], "ok", 0
        for found in (self.stats, self.cells, self.experts, self._owners, self.labels):
            found.clear()
        self.rows, self.others = [], []

    def _engine(self, engine: int) -> int:
        return self._numbers.of_engine(self.upstream, engine)

    def _named(self, found: dict[str, Any]) -> dict[str, Any]:
        return {str(self._engine(int(name))): value for name, value in found.items()}

    def _take_tick(self, found: Tick, tick: Tick, owner_numbers: Iterator[int]) -> None:
        if found.engines is not None:
            self.engines = [self._engine(engine) for engine in found.engines]
        self.health = found.health or self.health
        self._take_deaths(found, tick)
        for step in found.steps:
            step.engine = self._engine(step.engine)
            step.at = round(step.at + 1000 * (found.time - tick.time), 2)
            assert step.parts is None or isinstance(step.parts, list)
            for part in step.parts or ():
                part[0] = self._prefix + part[0]
            if step.wait is not None:
                step.wait = [self._prefix + step.wait[0], *step.wait[1:]]
            if step.preempted is not None:
                step.preempted = [
                    [None if name is None else self._prefix + name for name in names]
                    for names in step.preempted
                ]
        tick.steps += found.steps
        stats, experts = self._named(found.stats), self._named(found.experts)
        self.stats |= stats
        self.experts |= experts
        tick.stats |= stats
        tick.experts |= experts
        for changes in found.blocks.values():
            for name, label in changes.owners.items():
                number = self._owners[int(name)] = next(owner_numbers)
                self.labels[number] = self._prefix + label
        for name, changes in self._named(found.blocks).items():
            last = self.cells.get(name) or Cells(0, 1, _EMPTY, _EMPTY, [])
            self.cells[name] = last.changed_by(changes, self._owners)
        if len(self._owners) > 2 * _MAX_OWNERS:
            self._drop_owners()

    def _drop_owners(self) -> None:
        """Forget the oldest owners that no map shows."""
        shown = {number for cells in self.cells.values() for number in cells.owners}
        oldest = sorted(self._owners.items())[:-_MAX_OWNERS]
        for name, number in oldest:
            if number not in shown:
                del self._owners[name], self.labels[number]

    def _take_deaths(self, found: Tick, tick: Tick) -> None:
        if self._lost is not None:
            when, reason = self._lost
            self._lost, reason = None, f"its server {self.upstream.name} was lost: {reason}"
            tick.deaths += [
                ViewDeath(found.time, max(0.0, found.time - when), engine, reason)
                for engine in self.engines
            ]
        for death in found.deaths:
            if death.time > self._last_death:
                self._last_death, death.engine = death.time, self._engine(death.engine)
                tick.deaths.append(death)

    def _take_requests(self, found: Requests) -> None:
        assert found.others is None or isinstance(found.others, list)
        for row in found.rows:
            row.label = self._prefix + row.label
            row.engine = None if row.engine is None else self._engine(row.engine)
        self.others = [
            (self._prefix + label, None if engine is None else self._engine(engine), state)
            for label, engine, state in found.others or ()
        ]
        self.rows, self.num_more = found.rows, found.more
        if self._is_own is not None:
            if found.others is None:
                self.others = [(row.label, row.engine, row.state) for row in found.rows]
            self.rows = [row for row in found.rows if self._is_own(row.request_id)]


class JoinedView:
    """Engine views of the servers of a router, as viewers with the same rights see them.

    Args:
        numbers: numbers of all servers and engines.
        is_own: see `ServerView`.
    """

    def __init__(self, numbers: EngineNumbers, is_own: Callable[[str], bool] | None = None) -> None:
        self.servers: dict[Upstream, ServerView] = {}
        self.news = b""
        """Events of the last update."""
        self._numbers, self._is_own = numbers, is_own
        self._owner_numbers = count(1)
        self._tick = Tick(0.0)
        self._next_step = 0
        self._shown: dict[str, Cells] = {}
        """Maps that the viewers have."""
        self._state: tuple[list[int], str, dict[str, str]] = [], "", {}
        self._requests = b""
        self._deaths: list[ViewDeath] = []

    @property
    def has_begun(self) -> bool:
        """True if a server has shown its engines."""
        return self._hello is not None

    @property
    def _hello(self) -> Hello | None:
        return next((s.hello for s in self.servers.values() if s.hello is not None), None)

    def add(self, upstream: Upstream) -> ServerView:
        """Add a server."""
        view = self.servers[upstream] = ServerView(upstream, self._numbers, self._is_own)
        return view

    def update(self, now: float) -> None:
        """Take in what has arrived; set `news`.

        Args:
            now: time of the events.
        """
        tick = self._tick = Tick(now, self._next_step)
        for server in self.servers.values():
            server.take_all(tick, self._owner_numbers)
        self._next_step += len(tick.steps)
        self._deaths = [*self._deaths, *tick.deaths][-_MAX_DEATHS:]
        self._take_maps(tick)
        state = self._read_state()
        if state != self._state:
            self._state = state
            tick.engines, tick.health, tick.servers = state
        requests = encode_event("requests", self._join_requests())
        self.news = b"" if tick == Tick(now, tick.first) else encode_event("tick", tick)
        if requests != self._requests:
            self.news += requests
            self._requests = requests

    def whole(self) -> bytes:
        """Return the events with the whole state, after `update`."""
        hello, servers, tick = self._hello, self.servers.values(), self._tick
        assert hello is not None
        connected = [server.hello for server in servers if server.hello is not None]
        hello = msgspec.structs.replace(
            hello,
            time=tick.time,
            version=__version__,
            models=list(dict.fromkeys(name for found in connected for name in found.models)),
            all_requests=self._is_own is None and all(found.all_requests for found in connected),
        )
        state = Tick(
            tick.time,
            tick.first,
            tick.steps,
            {name: stats for server in servers for name, stats in server.stats.items()},
            {
                name: cells.whole({server.labels[number]: number for number in cells.owners})
                for server in servers
                for name, cells in server.cells.items()
            },
            {name: experts for server in servers for name, experts in server.experts.items()},
            *self._state[:2],
            self._deaths,
            self._state[2],
        )
        return encode_event("hello", hello) + encode_event("tick", state) + self._requests

    def _take_maps(self, tick: Tick) -> None:
        """Add the changes of the maps, with the labels of owners that no map has shown."""
        shown, self._shown = self._shown, {}
        known = {number for cells in shown.values() for number in cells.owners}
        for server in self.servers.values():
            self._shown |= server.cells
            for name, cells in server.cells.items():
                last = shown.get(name)
                changes = None if cells is last else cells.changes_from(last)
                if changes is not None:
                    new = set(cells.owners) - known
                    changes.owners = {str(number): server.labels[number] for number in sorted(new)}
                    tick.blocks[name] = changes

    def _read_state(self) -> tuple[list[int], str, dict[str, str]]:
        """Return the engines, the health, and the names of the engines' servers."""
        engines: dict[int, str] = {}
        troubles = []
        for upstream, server in self.servers.items():
            engines |= dict.fromkeys(server.engines, upstream.name)
            trouble = server.trouble if server.hello is None else server.health
            if trouble != "ok":
                troubles.append(f"{upstream.name}: {trouble}")
        names = {str(engine): name for engine, name in sorted(engines.items())}
        return sorted(engines), "; ".join(troubles) or "ok", names

    def _join_requests(self) -> Requests:
        servers = self.servers.values()
        rows = [row for server in servers for row in server.rows]
        others = [other for server in servers for other in server.others]
        hidden = max(len(rows), len(others)) - MAX_ROWS
        more = sum(server.num_more for server in servers) + max(0, hidden)
        shows_others = self._is_own is not None or others
        return Requests(rows[:MAX_ROWS], others[:MAX_ROWS] if shows_others else None, more)
