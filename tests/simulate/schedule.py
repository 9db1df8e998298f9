"""Schedule of an engine's events, made of a seed, and reduced after a failure.

Its `repr` is Python code that creates it again. Times are in steps.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups, max_blocks_per_request
from octavo.messages import PauseMode
from octavo.structured_output.base import MAX_FORCED
from tests.fakes import STATE, VOCAB, expected_output, pages
from tests.params import core_params


@dataclass(frozen=True)
class Settings:
    """Settings of the engine."""

    max_model_len: int
    block_size: int
    spare_blocks: int = 0
    """Number of blocks beyond those of one request of the greatest length."""
    windows: tuple[int | None, ...] = (None,)
    spare_states: int | None = None
    """Number of slots of states beyond those of one request; None: the model has no states."""
    max_num_batched_tokens: int = 64
    max_num_seqs: int = 8
    depth: int = 1
    num_stages: int = 1
    caching: bool = True
    num_drafts: int = 0
    policy: Literal["fcfs", "priority"] = "fcfs"
    threshold: int = 0
    chunked: bool = True

    @property
    def kv_cache(self) -> KVCacheConfig:
        """Shape of the KV cache."""
        states = () if self.spare_states is None else (STATE,)
        groups = make_kv_cache_groups(pages(*self.windows) + states)
        least = max_blocks_per_request(
            groups, self.block_size, self.max_model_len, self.max_num_batched_tokens
        )
        num_blocks, own = max(2, 1 + least + self.spare_blocks), self.states_per_request
        return KVCacheConfig(
            num_blocks, self.block_size, groups, own + (self.spare_states or 0), own
        )

    @property
    def states_per_request(self) -> int:
        """Number of slots of a request's live state."""
        return 1 + (max(self.num_drafts, MAX_FORCED) if self.num_drafts else 0)


@dataclass(frozen=True)
class Arrival:
    """Request. Prompts of a family share their first tokens."""

    at: float
    name: str
    family: int
    shared: int
    own: int
    """Number of tokens after the shared ones; unique ones, if `name` is."""
    max_tokens: int
    seed: int = 0
    n: int = 1
    turn: int = 0
    priority: int = 0
    tenant: str | None = None
    seconds: float | None = None
    """Seconds to its deadline."""
    first_seconds: float | None = None
    """Seconds to the deadline of its first token."""
    stop: tuple[int, ...] = ()
    salt: str | None = None
    grammar: int | None = None
    """Rule of its grammar, see `allowed`."""
    compiling: float = 0.0
    """Number of steps until its grammar is compiled."""
    is_bad: bool = False
    """True if its grammar is then rejected; without a grammar the request fails."""
    logprobs: bool = False
    prompt_logprobs: bool = False
    before: tuple[int, ...] = ()
    """First tokens: the prompt and the answer of an earlier request."""

    @property
    def prompt(self) -> list[int]:
        """Return its tokens."""
        first = [(self.family * 17 + i * i) % VOCAB for i in range(self.shared)]
        number = int(self.name[1:])
        return [*self.before, *first] + [(number * 31 + i * 7 + 1) % VOCAB for i in range(self.own)]

    def allowed(self, place: int) -> list[int]:
        """Return the tokens that its grammar allows at a place of the output: often only one."""
        assert self.grammar is not None
        first = (place * 13 + self.grammar) % VOCAB
        return [first] if (place // 3 + self.grammar) % 2 else sorted((first, (first + 7) % VOCAB))


@dataclass(frozen=True)
class Abort:
    """Disconnection of a request's client."""

    at: float
    name: str


@dataclass(frozen=True)
class StepFailure:
    """Failure of the whole next step."""

    at: float


@dataclass(frozen=True)
class Death:
    """Death of the engine."""

    at: float
    with_outputs: bool = False
    """True if its latest outputs are lost, too."""


@dataclass(frozen=True)
class Reset:
    """Request to empty the prefix cache."""

    at: float


@dataclass(frozen=True)
class Sleep:
    """Pause of the scheduling."""

    at: float
    mode: PauseMode


@dataclass(frozen=True)
class WakeUp:
    """End of a pause."""

    at: float


Event: TypeAlias = Arrival | Abort | StepFailure | Death | Reset | Sleep | WakeUp


@dataclass(frozen=True)
class Schedule:
    """Settings and events, in the order of their times."""

    settings: Settings
    events: tuple[Event, ...]


_WINDOWS: tuple[tuple[int | None, ...], ...] = ((None, 9), (11,), (24, None, 24), (5, 12, None))


def make_schedule(seed: int, states: bool = False) -> Schedule:
    """Return the schedule of a seed: mostly a few small requests, in which faults show.

    Args:
        seed: any number.
        states: True for a model with recurrent states; otherwise chance decides.
    """
    rng = random.Random(seed)
    chance = rng.random
    settings = _make_settings(rng, states)
    events: list[Event] = []
    longest = settings.max_model_len - 1
    at, num_requests = 0.0, rng.choice((2, 2, 3, 3, 4, 4, 5, 6, 9))
    # Events that are rare in one schedule are common in another, so that rare events meet.
    odd = rng.choice((0.05, 0.2, 0.5))
    pace = rng.choice((0.0, 0.5, 2.0))
    families = rng.choice((1, 2))
    most_tokens = rng.choice((3, 6, 6, 12))
    tenants = rng.choice(((None,), (None,), ("a", "b"), (None, "a", "b")))
    hurry, hurries = rng.choice((0.02, 0.1)), rng.choice((odd / 3, odd / 3, 0.6))

    def limit(share: float) -> float | None:
        return round(rng.expovariate(hurry), 1) if chance() < share else None

    while len(events) < num_requests:
        at = round(at + rng.expovariate(1.0) * pace, 1)
        shared = min(rng.choice((0, 3, 4, 8, 11, 16, 24)), longest)
        call = Arrival(
            at=at,
            name=f"r{len(events)}",
            family=rng.randrange(families),
            shared=shared,
            own=0,
            max_tokens=1,
            salt="s" if chance() < odd / 4 and settings.caching else None,
            tenant=rng.choice(tenants),
        )
        for turn in range(rng.randint(2, 3) if chance() < odd / 2 else 1):
            own = rng.choice((0, 0, 1, 2, 5, 9))
            own = max(min(own, longest - shared), int(not shared))
            grammar = rng.randrange(4) if chance() < odd / 3 else None
            events.append(
                replace(
                    call,
                    name=f"r{len(events)}",
                    own=own,
                    max_tokens=rng.randint(
                        1, min(most_tokens, settings.max_model_len - shared - own)
                    ),
                    seed=rng.randrange(3),
                    n=rng.randint(2, 4) if chance() < odd / 2 else 1,
                    turn=turn,
                    priority=rng.randrange(3) if settings.policy == "priority" else 0,
                    seconds=limit(hurries),
                    first_seconds=limit(hurries / 3),
                    stop=(rng.randrange(VOCAB), rng.randrange(VOCAB)) if chance() < odd else (),
                    grammar=grammar,
                    compiling=rng.choice((0.0, 2.0, 6.0)) if grammar is not None else 0.0,
                    is_bad=chance() < odd / 5,
                    logprobs=chance() < odd / 4,
                    prompt_logprobs=chance() < odd / 4,
                )
            )
    if settings.spare_states is not None:
        _add_turns(events, settings, rng)
    end, arrivals = at + 8, len(events)

    def when() -> float:
        return round(rng.random() * end, 1)

    for i in range(arrivals):
        if chance() < odd / 3:
            events.append(Abort(when(), f"r{i}"))
    if chance() < odd / 2:
        events += [StepFailure(when()) for _ in range(rng.randint(1, 2))]
    if chance() < odd / 2:
        events += [Death(when(), chance() < 0.5) for _ in range(rng.randint(1, 3))]
    if chance() < odd / 4:
        events.append(Reset(when()))
    if chance() < odd / 4:
        slept = when()
        events.append(Sleep(slept, rng.choice(("abort", "wait", "keep", "keep"))))
        events.append(WakeUp(round(slept + rng.random() * 8, 1)))
    return Schedule(settings, tuple(sorted(events, key=lambda event: event.at)))


def _add_turns(events: list[Event], settings: Settings, rng: random.Random) -> None:
    """Add arrivals that continue others: they may start from the states of answers."""
    longest = settings.max_model_len - 1
    for event in events.copy():
        assert isinstance(event, Arrival)
        if rng.random() < 0.5 or event.stop or event.grammar is not None:
            continue
        params = core_params(seed=event.seed, max_tokens=event.max_tokens)
        answer = expected_output(params, event.prompt, settings.max_model_len)
        before, own = (*event.prompt, *answer), rng.choice((1, 2, 5))
        if len(before) + own <= longest:
            events.append(
                replace(
                    event,
                    at=round(event.at + 1 + rng.expovariate(0.1), 1),
                    name=f"r{len(events)}",
                    before=before,
                    shared=0,
                    own=own,
                    max_tokens=rng.randint(1, min(12, settings.max_model_len - len(before) - own)),
                    turn=event.turn + 1,
                )
            )


def _make_settings(rng: random.Random, states: bool) -> Settings:
    spare_states = rng.choice((0, 1, 4, 12, 40)) if rng.random() < 0.15 or states else None
    windows: tuple[int | None, ...] = (None,)
    if rng.random() < 0.25:
        windows = rng.choice(_WINDOWS)
    if spare_states is not None and rng.random() < 0.3:
        windows = ()
    chunked = rng.random() < 0.9
    return Settings(
        max_model_len=rng.choice((24, 32, 48)),
        block_size=rng.choice((2, 4, 4, 4, 8, 16)),
        spare_blocks=rng.choice((0, 0, 1, 2, 4, 8, 16)),
        windows=windows,
        spare_states=spare_states,
        max_num_batched_tokens=rng.choice((1, 3, 8, 13, 32, 200) if chunked else (32, 64)),
        max_num_seqs=rng.choice((1, 2, 3, 8)),
        depth=rng.choice((1, 2, 2, 3)),
        caching=rng.random() < 0.8,
        num_drafts=rng.choice((0, 0, 1, 3)),
        policy=rng.choice(("fcfs", "fcfs", "priority")),
        threshold=rng.choice((0, 0, 0, 5)),
        chunked=chunked,
        num_stages=rng.choice((1, 1, 1, 2, 3)),
    )


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """Return a smaller schedule that fails, too; no further reduction step does.

    Args:
        schedule: a failing schedule.
        fails: returns True for a failing schedule.
    """
    while smaller := next(filter(fails, _smaller(schedule)), None):
        schedule = smaller
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Yield schedules one step smaller, the greatest steps first."""
    events, settings = schedule.events, schedule.settings
    size = len(events)
    while size := size // 2:
        for start in range(0, len(events), size):
            yield replace(schedule, events=events[:start] + events[start + size :])
    for plain in _plainer(settings, Settings(settings.max_model_len, settings.block_size)):
        yield replace(schedule, settings=plain)
    for i, event in enumerate(events):
        found: list[Event] = []
        if isinstance(event, Arrival):
            plain_event = Arrival(event.at, event.name, 0, event.shared, event.own, 1)
            found += _plainer(event, plain_event)
            for name, least in (
                ("shared", not event.own),
                ("own", not event.shared),
                ("max_tokens", 1),
                ("n", 1),
                ("compiling", 0),
            ):
                value = getattr(event, name)
                found += [
                    replace(event, **{name: less})
                    for less in (value // 2, value - 1)
                    if least <= less < value
                ]
        if event.at:
            found += [replace(event, at=at) for at in (0.0, event.at // 2) if at < event.at]
        for other in found:
            rest = [*events[:i], other, *events[i + 1 :]]
            yield replace(schedule, events=tuple(sorted(rest, key=lambda event: event.at)))


def _plainer(value: Settings | Arrival, plain: Settings | Arrival) -> Iterator[Settings | Arrival]:
    """Yield copies with one field as in `plain`."""
    for field in dataclasses.fields(value):
        default = getattr(plain, field.name)
        if getattr(value, field.name) != default:
            yield replace(value, **{field.name: default})
