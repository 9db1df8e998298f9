"""State of the engines as the live view shows it, and its changes since the last tick."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.errors import OctavoError
from octavo.frontend.output_processor import LiveAnswer
from octavo.frontend.step_log import StepLog
from octavo.kv_cache.block_map import INTERVAL, OWNER_SHIFT, REST, BlockMap
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.observability.steps import StepPart, StepPreemption
from octavo.observability.view_events import (
    Requests,
    StepViewer,
    Tick,
    ViewBlocks,
    ViewDeath,
    ViewRequest,
    ViewStats,
    encode_event,
    label_of,
)

MAX_ROWS = 500
"""Most answers that the view shows."""
_STEPS = 256
"""Most steps of a tick. If there are more between two ticks, the older ones are left out."""
_OLDER_STEPS = 64
"""Most steps from before the first tick in one event; fewer, so that the next tick comes soon."""
# Intervals of maps of idle engines, and of the loads of experts, in seconds.
_IDLE_INTERVAL = 5.0
_EXPERT_INTERVAL = 2.0
_CELL = (1 << OWNER_SHIFT) - 1
_ENCODER = msgspec.json.Encoder()


class ViewedEngine(Protocol):
    """What the view reads of an engine; `AsyncLLM` has it."""

    @property
    def config(self) -> Any:
        """Settings: `parallel.first_engine` is read."""
        ...

    @property
    def step_log(self) -> StepLog:
        """Log of the recent steps."""
        ...

    @property
    def engine_stats(self) -> Mapping[int, SchedulerStats]:
        """Latest statistics of each engine, by its index."""
        ...

    @property
    def num_engines(self) -> int:
        """Number of engines."""
        ...

    def live_answers(self) -> Iterator[LiveAnswer]:
        """Yield the unfinished answers, in order of arrival."""
        ...

    def engine_of(self, core_id: str) -> int | None:
        """Return the index of the engine of an unfinished answer."""
        ...

    def health(self) -> Any:
        """Return the state, with a `reason`."""
        ...

    async def block_maps(self) -> dict[int, BlockMap]:
        """Return the map of each engine's KV cache, by the engine's index."""
        ...

    async def expert_counts(self) -> dict[int, list[tuple[int, list[int]]]]:
        """Return (layer, tokens of each expert), by the engine's index."""
        ...


class Update:
    """Events of one tick.

    Args:
        picture: the state after the tick.
        tick: what is new.
        requests: events with the requests, by audience.
    """

    def __init__(self, picture: Picture, tick: Tick, requests: Mapping[str | None, bytes]) -> None:
        self.first = tick.first
        """Number of the first step of the tick, or of the next one."""
        empty = Tick(tick.time, tick.first)
        self._news = b"" if tick == empty else encode_event("tick", tick)
        self._picture, self._tick, self.requests = picture, tick, requests
        self._changed = {who for who in requests if picture.last_requests.get(who) != requests[who]}
        self._whole: bytes | None = None

    def news(self, audience: str | None) -> bytes:
        """Return the events with what is new for an audience; may be empty."""
        return self._news + (self.requests[audience] if audience in self._changed else b"")

    def whole(self, audience: str | None) -> bytes:
        """Return the events with the whole state."""
        if self._whole is None:
            self._whole = encode_event("tick", self._picture.whole(self._tick))
        return self._whole + self.requests[audience]


class Picture:
    """State of the engines, for all viewers.

    An audience is the tenant whose requests are shown in detail, "" for those without a tenant;
    None: all are.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: ViewedEngine) -> None:
        self._engine, self._log = engine, engine.step_log
        self._first_engine = engine.config.parallel.first_engine
        self._next_step = max(0, engine.step_log.end - _OLDER_STEPS)
        self._steps = StepViewer(self._note_step)
        self._computed: dict[str, tuple[int, int]] = {}
        """Engine and computed tokens of each answer whose prompt was begun."""
        self._preempted: set[str] = set()
        self._stats: dict[str, ViewStats] = {}
        self._maps: dict[int, BlockMap] = {}
        """Maps that no tick has shown yet, by index of the engine."""
        self._cells: dict[str, Cells] = {}
        self._owners: dict[str, int] = {}
        """Numbers of the owners of blocks, by label."""
        self._owner_numbers = count(1)
        self._experts: dict[str, list[tuple[int, list[int]]]] = {}
        self._experts_changed = False
        self._health: tuple[list[int], str] | None = None
        self._last_death = 0.0
        self.last_requests: Mapping[str | None, bytes] = {}
        """Last event with the requests, by audience."""

    def update(self, audiences: Iterable[str | None], time: float) -> Update:
        """Take in what is new, and return its events for the given audiences.

        Args:
            audiences: the audiences.
            time: time of the events.
        """
        log = self._log
        tick = Tick(time, max(self._next_step, log.num_dropped, log.end - _STEPS))
        logged = self._log.since(tick.first)
        self._next_step = tick.first + len(logged)
        tick.steps = self._steps.view(
            ((self._first_engine + step.engine_index, step.data) for step in logged), tick.time
        )
        stats = {
            self._name(index): ViewStats.of(stats)
            for index, stats in self._engine.engine_stats.items()
        }
        tick.stats = {name: new for name, new in stats.items() if new != self._stats.get(name)}
        self._stats = stats
        for index, block_map in self._maps.items():
            self._take_map(self._name(index), block_map, tick)
        self._maps = {}
        if self._experts_changed:
            tick.experts, self._experts_changed = self._experts, False
        health = self._engines(), self._engine.health().reason
        if health != self._health:
            self._health, (tick.engines, tick.health) = health, health
        tick.deaths = self._deaths(self._last_death)
        if tick.deaths:
            self._last_death = tick.deaths[-1].time
        update = Update(self, tick, self._requests(set(audiences)))
        self.last_requests = update.requests
        return update

    def whole(self, tick: Tick) -> Tick:
        """Return the whole state after a tick, with the tick's steps."""
        engines, health = self._health or ([], "")
        return Tick(
            tick.time,
            tick.first,
            tick.steps,
            self._stats,
            {name: cells.whole(self._owners) for name, cells in self._cells.items()},
            self._experts,
            engines,
            health,
            self._deaths(0.0),
        )

    def history(self, end: int) -> tuple[int, bytes]:
        """Return steps before step `end`: the number of the first one, and the event.

        The event is empty if the log has no earlier steps.
        """
        first = max(self._log.num_dropped, (end - 1) // _OLDER_STEPS * _OLDER_STEPS)
        if first >= end:
            return first, b""
        logged = self._log.since(first)[: end - first]
        records = ((self._first_engine + step.engine_index, step.data) for step in logged)
        when = logged[-1].time
        return first, encode_event("history", Tick(when, first, StepViewer().view(records, when)))

    def show_maps(self, maps: dict[int, BlockMap]) -> None:
        """Show maps of KV caches, by index of the engine, at the next tick."""
        self._maps = maps

    async def follow_blocks(self) -> None:
        """Ask the engines for maps of their KV caches."""
        while True:
            asked_after, seconds = self._log.end, 0.0
            with contextlib.suppress(OctavoError):  # an engine has died; the next one will answer
                maps = await self._engine.block_maps()
                self.show_maps(maps)
                seconds = max((found.seconds for found in maps.values()), default=0.0)
            await asyncio.sleep(max(INTERVAL, REST * seconds))
            await self._wait_for_steps(asked_after)

    async def follow_experts(self) -> None:
        """Ask the engines for the loads of their experts, if they have any."""
        while True:
            asked_after, begin = self._log.end, time.monotonic()
            with contextlib.suppress(OctavoError):
                if any(stats.num_experts for stats in self._engine.engine_stats.values()):
                    found = await self._engine.expert_counts()
                    self._experts = {self._name(index): found[index] for index in found}
                    self._experts_changed = True
            await asyncio.sleep(max(_EXPERT_INTERVAL, REST * (time.monotonic() - begin)))
            await self._wait_for_steps(asked_after)

    async def _wait_for_steps(self, end: int) -> None:
        """Wait until the log has grown beyond `end`, or for `_IDLE_INTERVAL`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_INTERVAL):
                while self._log.end == end:
                    await asyncio.sleep(INTERVAL)

    def _engines(self) -> list[int]:
        return [self._first_engine + index for index in range(self._engine.num_engines)]

    def _name(self, index: int) -> str:
        return str(self._first_engine + index)

    def _deaths(self, after: float) -> list[ViewDeath]:
        return [
            ViewDeath(
                death.time, death.seconds, self._first_engine + death.engine_index, death.reason
            )
            for death in self._log.deaths
            if death.time > after
        ]

    def _note_step(
        self, engine: int, prompts: list[StepPart], preemptions: list[StepPreemption]
    ) -> None:
        """Follow the requests of a step."""
        for preemption in preemptions:
            self._preempted.add(preemption.request_id)
        for part in prompts:
            known = part.num_known_tokens
            if known is None:
                known = self._computed.get(part.request_id, (engine, 0))[1]
            self._computed[part.request_id] = engine, known + part.num_tokens
            self._preempted.discard(part.request_id)

    def _requests(self, audiences: set[str | None]) -> dict[str | None, bytes]:
        """Return the events with the unfinished answers, by audience."""
        rows: dict[str | None, list[ViewRequest]] = {who: [] for who in audiences}
        others: list[tuple[str, int | None, str]] = []
        total, live = 0, set()
        for answer in self._engine.live_answers():
            total += 1
            live.add(answer.core_id)
            row = None
            for who in (None, answer.tenant or ""):
                if who in rows and len(rows[who]) < MAX_ROWS:
                    row = row or self._row(answer)
                    rows[who].append(row)
            if len(others) < MAX_ROWS and audiences - {None}:
                row = row or self._row(answer)
                others.append((row.label, row.engine, row.state))
        self._computed = {i: found for i, found in self._computed.items() if i in live}
        self._preempted &= live
        raw, more = msgspec.Raw(_ENCODER.encode(others)), max(0, total - MAX_ROWS)
        return {
            who: encode_event("requests", Requests(found, None if who is None else raw, more))
            for who, found in rows.items()
        }

    def _row(self, answer: LiveAnswer) -> ViewRequest:
        engine, computed = self._computed.get(answer.core_id, (None, 0))
        if engine is None:
            index = self._engine.engine_of(answer.core_id)
            engine = None if index is None else self._first_engine + index
        if answer.core_id in self._preempted:
            state = "preempted"
        elif answer.num_output_tokens:
            state, computed = "answer", answer.num_prompt_tokens
        else:
            state = "prompt" if computed else "waiting"
        return ViewRequest(
            label_of(answer.core_id),
            engine,
            state,
            answer.request_id,
            answer.num_prompt_tokens,
            min(computed, answer.num_prompt_tokens),
            answer.num_output_tokens,
            answer.num_cached_tokens,
            round(answer.arrival_time, 3),
        )

    def _take_map(self, name: str, block_map: BlockMap, tick: Tick) -> None:
        """Take in a map, and add its changes to the tick."""
        labels = [label_of(owner) for owner in block_map.owners]
        numbers = {i: self._owners.get(i) or next(self._owner_numbers) for i in labels}
        cells = Cells.of(block_map, list(numbers.values()))
        changes = cells.changes_from(self._cells.get(name))
        new = {str(numbers[i]): i for i in labels if i not in self._owners}
        self._cells[name] = cells
        self._owners |= numbers
        used = {number for other in self._cells.values() for number in other.owners}
        self._owners = {i: number for i, number in self._owners.items() if number in used}
        if changes is not None:
            changes.owners = new
            tick.blocks[name] = changes


class Cells:
    """Map of a KV cache as the view shows it.

    Args:
        num_blocks: number of blocks.
        blocks_per_cell: number of blocks of a cell.
        blocks: cells of the blocks; see `BlockMap`, but the owner is a number of its own.
        states: cells of the recurrent states.
        owners: numbers of the owners.
    """

    def __init__(
        self,
        num_blocks: int,
        blocks_per_cell: int,
        blocks: NDArray[np.int64],
        states: NDArray[np.int64],
        owners: list[int],
    ) -> None:
        self.owners = owners
        self._shape = num_blocks, blocks_per_cell
        self._blocks, self._states = blocks, states

    @classmethod
    def of(cls, found: BlockMap, owners: list[int]) -> Cells:
        """Return the cells of a map.

        Args:
            found: the map.
            owners: number of each of its owners.
        """
        number_of = np.array([0, *owners])

        def numbered(data: bytes) -> NDArray[np.int64]:
            cells = np.frombuffer(data, "<u4").astype(np.int64)
            owner: NDArray[np.int64] = number_of[cells >> OWNER_SHIFT] << OWNER_SHIFT
            return owner | cells & _CELL

        blocks, states = numbered(found.cells), numbered(found.states)
        return cls(found.num_blocks, found.blocks_per_cell, blocks, states, owners)

    def changed_by(self, changes: ViewBlocks, number_of: Mapping[int, int]) -> Cells:
        """Return a copy with the changes of another view.

        Args:
            changes: the changes, or a whole map.
            number_of: numbers of the owners here, by their number there.
        """
        blocks, states = self._blocks.copy(), self._states.copy()
        if changes.num_cells:
            blocks = np.zeros(changes.num_cells, np.int64)
            states = np.zeros(changes.num_states, np.int64)
        for cells, runs in ((blocks, changes.runs), (states, changes.states)):
            for first, length, value in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
                owner = number_of.get(value >> OWNER_SHIFT, 0)
                cells[first : first + length] = owner << OWNER_SHIFT | value & _CELL
        owners = np.unique(np.concatenate((blocks, states)) >> OWNER_SHIFT).tolist()
        shape = changes.num_blocks, changes.blocks_per_cell
        return Cells(*shape, blocks, states, [owner for owner in owners if owner])

    def whole(self, owners: Mapping[str, int]) -> ViewBlocks:
        """Return all cells; `owners` has the numbers of all labels."""
        mine = set(self.owners)
        return ViewBlocks(
            *self._shape,
            _runs(self._blocks, np.ones(len(self._blocks), bool)),
            _runs(self._states, np.ones(len(self._states), bool)),
            len(self._blocks),
            len(self._states),
            {str(number): label for label, number in owners.items() if number in mine},
        )

    def changes_from(self, last: Cells | None) -> ViewBlocks | None:
        """Return the cells that differ from an earlier map, or all; None if none do."""
        if last is None or len(last._blocks) != len(self._blocks):
            return self.whole({})
        changed, states = self._blocks != last._blocks, self._states != last._states
        if not (changed.any() or states.any()):
            return None
        return ViewBlocks(*self._shape, _runs(self._blocks, changed), _runs(self._states, states))


def _runs(cells: NDArray[np.int64], chosen: NDArray[np.bool_]) -> list[int]:
    """Return the chosen cells as triples: first cell, number of cells, their value."""
    places = np.flatnonzero(chosen)
    if not len(places):
        return []
    values = cells[places]
    breaks = np.flatnonzero((np.diff(places) != 1) | (np.diff(values) != 0)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(starts, append=len(places))
    runs: list[int] = np.stack([places[starts], counts, values[starts]], 1).ravel().tolist()
    return runs
