"""Simulation of a schedule on a real engine core and front-end records, with a fake worker.

Each step checks all records; each token must be the one of its request's run alone.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from concurrent.futures import Future
from typing import Any
from unittest.mock import patch

import numpy as np

from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.errors import GrammarError, OctavoError
from octavo.frontend.output_processor import OutputProcessor
from octavo.kv_cache import states
from octavo.messages import (
    CoreSamplingParams,
    EngineCoreRequest,
    GrammarOutput,
    GrammarSpec,
    ModelRunnerOutput,
    SchedulerOutput,
)
from octavo.outputs import RequestOutput
from octavo.request import Request
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.scheduler.fairness import (
    CREDIT_STEPS,
    OUTPUT_WEIGHT,
    PROMPT_WEIGHT,
    TenantCounters,
)
from octavo.scheduler.queue import WaitingQueue
from octavo.scheduler.scheduler import Scheduler
from octavo.structured_output.base import MAX_FORCED
from tests.fakes import MESSAGE_ENDS, VOCAB, FakeExecutor, FakeStep, FakeWorker, expected_output
from tests.params import core_request
from tests.simulate.schedule import (
    Abort,
    Arrival,
    Death,
    Event,
    Reset,
    Schedule,
    Settings,
    Sleep,
    StepFailure,
    WakeUp,
)

STEP_FAILED = "the device coughed"
_PARAMS = {
    key: SamplingParams(
        output_kind=RequestOutputKind.DELTA,
        detokenize=False,
        logprobs=0 if key[0] else None,
        prompt_logprobs=0 if key[1] else None,
    )
    for key in [(False, False), (False, True), (True, False), (True, True)]
}


def run(schedule: Schedule) -> None:
    """Run a schedule to its end.

    Raises:
        Exception: an AssertionError of a check, or an error of the engine.
    """
    Simulation(schedule).run()


class CheckedScheduler(Scheduler):
    """Scheduler with a check of every decision."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._tenants = CheckedCounters(CREDIT_STEPS * self.max_num_batched_tokens)
        self._table.tenants = self._tenants
        self._table.waiting = CheckedQueue(self._tenants)
        self._all: list[tuple[Request, int]] = []
        """All requests so far, and their numbers of output tokens."""

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._all.append((request, request.num_output_tokens))

    def schedule(self) -> SchedulerOutput:
        work = super().schedule()
        self.check_integrity()
        assert work.total_num_scheduled_tokens <= self.max_num_batched_tokens, "over the budget"
        for request in self.requests.values():
            assert request.next_deadline > self._clock(), f"{request.request_id} is too late"
        competing = Counter(r.options.tenant for r in self.requests.values() if r.competes)
        assert competing == self._tenants._competing, "somebody competes who does not, or no more"
        assert Counter(r.options.tenant for r in self.requests.values()) == self._tenants._live
        self._check_charges()
        return work

    def _check_charges(self) -> None:
        """Check that no tenant pays twice for a token; for one of the prompt perhaps not at all."""
        least: Counter[str | None] = Counter()
        most: Counter[str | None] = Counter()
        for request, brought in self._all:
            new = OUTPUT_WEIGHT * (request.num_output_tokens - brought)
            least[request.options.tenant] += new
            most[request.options.tenant] += new + (0 if brought else PROMPT_WEIGHT) * (
                request.num_prompt_tokens
            )
        for tenant, charged in self._tenants.charged.items():
            assert least[tenant] <= charged <= most[tenant], f"{tenant} has paid {charged}"


class CheckedCounters(TenantCounters):
    """Counters of the tenants that record charges.

    Attributes:
        charged: charges of each tenant.
    """

    def __init__(self, credit: int) -> None:
        super().__init__(credit)
        self.charged: Counter[str | None] = Counter()

    def charge(self, tenant: str | None, tokens: int) -> None:
        super().charge(tenant, tokens)
        self.charged[tenant] += tokens

    def served(self, tenant: str | None) -> int:
        return self._served[tenant]


class CheckedQueue(WaitingQueue):
    """Queue of waiting requests; each started one must be the next by the rules.

    The rules are those of docs/design/scheduling.md, written again: the best priority first; within
    it the tenant that was served least; of its requests those with deadlines, the earliest first,
    but a fourth of the starts is for the others.
    """

    def __init__(self, tenants: CheckedCounters) -> None:
        super().__init__(tenants)
        self._counters = tenants
        self._passes: Counter[str | None] = Counter()
        """Number of each tenant's starts with deadlines in a row while others waited."""

    def start(self, request: Request) -> None:
        name, tenant, served = request.request_id, request.options.tenant, self._counters.served
        best = min(other.queue_key[0] for other in self)
        assert request.queue_key[0] == best, f"{name} has passed a better priority"
        rivals = [other for other in self if other.queue_key[0] == best]
        least = min(served(other.options.tenant) for other in rivals)
        assert served(tenant) == least, f"{name} has passed a tenant that was served less"
        timed = [r for r in rivals if r.options.tenant == tenant and r.options.due < math.inf]
        plain = [r for r in rivals if r.options.tenant == tenant and r.options.due == math.inf]
        if timed and not (plain and self._passes[tenant] >= 3):
            first = min(timed, key=lambda r: (r.options.due, r.queue_key))
        else:
            first = min(plain, key=lambda r: r.queue_key)
        assert request is first, f"{name} has passed {first.request_id}"
        others = [r for r in self if r.options.tenant == tenant and r.options.due == math.inf]
        passes = request in timed and bool(others)
        self._passes[tenant] = self._passes[tenant] + 1 if passes else 0
        super().start(request)

    def _drop_empty(self, tenant: str | None) -> None:
        super()._drop_empty(tenant)
        if tenant not in self._queues:
            del self._passes[tenant]


class RandomDraftLengths:
    """Replacement of `DraftLengths`, which chooses by the times of steps."""

    paused = False

    def __init__(self, most: int) -> None:
        self.most = most
        self._rng = random.Random(most)

    def choose(self, num_reqs: int) -> int:
        return self._rng.randint(0, self.most)

    def record(self, *measured: object) -> None:
        pass


class SimulatedGrammars:
    """Replacement of `StructuredOutputManager`, which compiles on threads: ready when due."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._compiling: list[tuple[float, Request]] = []

    @property
    def next_time(self) -> float:
        """Return the time at which the next one is compiled."""
        return min((at for at, _ in self._compiling), default=math.inf)

    @property
    def has_finished(self) -> bool:
        return self.next_time <= self._simulation.now

    def add(self, request: Request) -> bool:
        arrival = self._arrival(request)
        if arrival.compiling:
            self._compiling.append((self._simulation.now + arrival.compiling, request))
        elif arrival.is_bad:
            raise GrammarError("bad")
        return not arrival.compiling

    def take_finished(self) -> list[tuple[Request, GrammarError | None]]:
        now = self._simulation.now
        done = [request for at, request in self._compiling if at <= now]
        self._compiling = [entry for entry in self._compiling if entry[0] > now]
        return [(r, GrammarError("bad") if self._arrival(r).is_bad else None) for r in done]

    def make_output(
        self, requests: list[tuple[Request, int]], drafts: dict[str, list[int]]
    ) -> tuple[GrammarOutput, dict[Request, str]]:
        rows, forced = [], {}
        for request, wanted in requests:
            arrival, place = self._arrival(request), request.num_output_tokens
            count = 1 + len(drafts.get(request.request_id, ()))
            for at in range(place, place + count):
                row = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
                row[arrival.allowed(at)] = 1
                rows.append(np.packbits(row, bitorder="little").tobytes())
            tokens: list[int] = []
            while wanted and len(tokens) < wanted + count:
                choice = arrival.allowed(place + len(tokens))
                if len(choice) > 1:
                    break
                tokens += choice
            if tokens:
                forced[request.request_id] = tokens
        ids = [request.request_id for request, _ in requests]
        return GrammarOutput(ids, b"".join(rows), forced), {}

    def shutdown(self) -> None:
        pass

    def _arrival(self, request: Request) -> Arrival:
        spec = request.sampling_params.grammar
        assert spec is not None
        return self._simulation.arrivals[spec.text]


class SimulatedExecutor(FakeExecutor):
    """Fake executor with a step that fails now and then."""

    def __init__(self, settings: Settings, fail: list[str], scheduler: Scheduler) -> None:
        super().__init__(max_in_flight=settings.depth)
        self.scheduler = scheduler
        self.worker = FakeWorker(settings.kv_cache, max(settings.num_drafts, MAX_FORCED), fail)
        self.fails_next = False

    def execute(self, work: SchedulerOutput) -> FakeStep:
        step = SimulatedStep(self, work, self.fails_next and bool(work.scheduled_reqs))
        if work.scheduled_reqs:
            self.fails_next = False
        return step


class SimulatedStep(FakeStep):
    def __init__(self, executor: SimulatedExecutor, work: SchedulerOutput, fails: bool) -> None:
        super().__init__(executor, work)
        self._fails, self._scheduler = fails, executor.scheduler

    def drafts(self) -> dict[str, list[int]]:
        if self._fails:
            raise RuntimeError(STEP_FAILED)
        return super().drafts()

    def sample(self, grammar: GrammarOutput | None = None) -> Future[ModelRunnerOutput]:
        worker = self._executor.worker
        assert worker is not None
        future: Future[ModelRunnerOutput] = Future()
        if self._fails:
            future = _FailedStep(worker, self._scheduler)
        future.set_result(worker.finish(grammar))
        return future


class _FailedStep(Future[ModelRunnerOutput]):
    """Failed step: neither its results nor those of later steps in flight exist."""

    def __init__(self, worker: FakeWorker, scheduler: Scheduler) -> None:
        super().__init__()
        self._worker, self._scheduler = worker, scheduler

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        # A step dropped after an earlier failure lost nothing: later writes came after it.
        if self._scheduler._in_flight[0].entries:
            self._worker.memory.clear()
        raise RuntimeError(STEP_FAILED)


class Simulation:
    """Engine, the records of its front end, and the outputs that clients received."""

    def __init__(self, schedule: Schedule) -> None:
        self.settings = schedule.settings
        self._events = deque(schedule.events)
        self.now = 0.0
        self.arrivals = {e.name: e for e in schedule.events if isinstance(e, Arrival)}
        self._processor = OutputProcessor(None)
        self._live: dict[str, Arrival] = {}
        self._aborted: set[str] = set()
        self._slept: set[str] = set()
        """Requests that a sleep ended, or may have."""
        self._tokens: dict[tuple[str, int], list[int]] = {}
        self._ended: dict[tuple[str, int], str] = {}
        self._errors: dict[str, OctavoError] = {}
        self._error_times: dict[str, float] = {}
        self._logprobs: dict[tuple[str, int], list[int]] = {}
        self._prompt_logprobs: dict[str, list[int]] = {}
        self._step_failures = self._restarts = self._num_steps = 0
        self._fails_next = False
        self._idle_steps = 0
        self._most_steps = _most_steps(schedule)
        self._start_engine()

    @patch.multiple(states, ANSWER_SPACING=8, _FIRST_DISTANCE=8)  # requests are short
    def run(self) -> None:
        """Run everything, from the first event to the last answer."""
        while True:
            while self._events and self._events[0].at <= self.now:
                self._apply(self._events.popleft())
            if self._core.has_work():
                self._step()
                continue
            next_time = self._next_time()
            if next_time < math.inf:
                self.now = max(self.now, next_time)
            elif self._core.is_sleeping():
                self._core.wake_up()
            else:
                break
        self._check_end()

    def _next_time(self) -> float:
        """Return the time of the next event while nothing runs."""
        event = self._events[0].at if self._events else math.inf
        deadline = self._core.seconds_to_deadline()
        held = math.inf if deadline is None else self.now + deadline
        return min(event, held, self._grammars.next_time)

    def _start_engine(self) -> None:
        settings = self.settings
        self._scheduler = CheckedScheduler(
            SchedulerConfig(
                max_num_seqs=settings.max_num_seqs,
                scheduling_policy=settings.policy,
                enable_chunked_prefill=settings.chunked,
                long_prefill_token_threshold=settings.threshold,
            ),
            settings.kv_cache,
            max_model_len=settings.max_model_len,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            enable_caching=settings.caching,
            num_speculative_tokens=settings.num_drafts,
            max_num_drafts=max(
                3 * settings.num_drafts, MAX_FORCED if settings.spare_states is None else 0
            ),
            num_stages=settings.num_stages,
            clock=lambda: self.now,
            message_ends=MESSAGE_ENDS,
        )
        lengths: Any = RandomDraftLengths(settings.num_drafts)
        self._scheduler.drafting.lengths = lengths
        fail = [
            child
            for arrival in self.arrivals.values()
            if arrival.is_bad and arrival.grammar is None
            for child in _core_request(arrival).child_ids[-1:]
        ]
        self._executor = SimulatedExecutor(settings, fail, self._scheduler)
        self._grammars = SimulatedGrammars(self)
        grammars: Any = self._grammars
        self._core = EngineCore(
            self._scheduler, self._executor, clock=lambda: self.now, structured_output=grammars
        )

    def _apply(self, event: Event) -> None:
        match event:
            case Arrival():
                self._arrive(event)
            case Abort(name=name):
                if self._live.pop(name, None) is not None:
                    self._aborted.add(name)
                self._core.abort_requests(self._processor.abort_requests([name]))
            case StepFailure():
                self._executor.fails_next = True
                self._step_failures += 1
            case Death():
                if event.with_outputs and self._core.has_work():
                    self._core.step()
                self._restarts += 1
                self._start_engine()
                for request in self._processor.unfinished():
                    self._core.add_request(request)
            case Reset():
                was_idle = not self._scheduler.running
                assert self._core.reset_prefix_cache() == was_idle
            case Sleep(mode=mode):
                if mode == "abort":
                    self._slept |= self._live.keys()
                self._core.sleep(0, mode)
            case WakeUp():
                self._core.wake_up()
        self._scheduler.check_integrity()

    def _arrive(self, arrival: Arrival) -> None:
        request = _core_request(arrival)
        params = _PARAMS[arrival.logprobs, arrival.prompt_logprobs]
        for index in range(arrival.n):
            self._tokens[arrival.name, index] = []
        self._live[arrival.name] = arrival
        self._processor.add_request(request, params)
        self._core.add_request(request)

    def _step(self) -> None:
        """Run a step of the engine; its outputs reach the clients."""
        computed = self._scheduler._num_scheduled_tokens
        outputs = self._core.step()
        self._num_steps += 1
        self.now += 1.0
        worker = self._executor.worker
        assert worker is not None
        running = {request.request_id for request in self._scheduler.running}
        assert running <= worker.rows.keys(), "a running request has no row"
        idle = computed == self._scheduler._num_scheduled_tokens and not outputs.outputs
        self._idle_steps = self._idle_steps + 1 if idle else 0
        assert self._idle_steps <= 2 * self.settings.depth + 4, "nothing moves"
        assert self._num_steps <= self._most_steps, "somebody starves"
        processed = self._processor.process_outputs(outputs.outputs, outputs.timestamp)
        self._core.abort_requests(processed.reqs_to_abort)
        for output in processed.request_outputs:
            self._deliver(output)
        for name, error in processed.errors.items():
            assert name in self._live, f"{name} fails after its end"
            del self._live[name]
            self._errors[name] = error
            self._error_times[name] = self.now

    def _deliver(self, output: RequestOutput) -> None:
        name = output.request_id
        arrival = self._live.get(name)
        assert arrival is not None, f"{name} gets something after its end"
        if output.prompt_logprobs is not None:
            assert name not in self._prompt_logprobs, "prompt logprobs come twice"
            rows = list(output.prompt_logprobs)
            assert rows[0] is None
            self._prompt_logprobs[name] = [next(iter(row)) for row in rows[1:] if row is not None]
        for answer in output.outputs:
            key = name, answer.index
            assert key not in self._ended, f"{key} gets something after its end"
            self._tokens[key] += answer.token_ids
            if answer.logprobs is not None:
                self._logprobs.setdefault(key, []).extend(next(iter(p)) for p in answer.logprobs)
            if answer.finish_reason is not None:
                self._ended[key] = answer.finish_reason
        if output.finished:
            del self._live[name]

    def _check_end(self) -> None:
        self._scheduler.check_integrity()
        assert not self._live, f"{sorted(self._live)} never ended"
        assert not self._processor.num_unfinished_requests
        assert not self._scheduler.requests
        assert not self._scheduler._table.held
        assert not self._scheduler.kv_cache_manager.num_used_blocks, "blocks leak"
        worker = self._executor.worker
        assert worker is not None
        assert not worker.rows, "rows leak"
        for arrival in self.arrivals.values():
            for index in range(arrival.n):
                self._check_answer(arrival, index)

    def _check_answer(self, arrival: Arrival, index: int) -> None:
        """Compare a client's answer with that of a run alone."""
        name, key = arrival.name, (arrival.name, index)
        params, tokens = _core_request(arrival).child(index).sampling_params, self._tokens[key]
        allowed = None if arrival.grammar is None else arrival.allowed
        alone = expected_output(params, arrival.prompt, self.settings.max_model_len, allowed)
        assert tokens == alone[: len(tokens)], f"{key}: {tokens} instead of {alone}"
        if arrival.logprobs:
            assert self._logprobs.get(key, []) == tokens
        if arrival.prompt_logprobs and tokens and not index:
            assert self._prompt_logprobs.get(name) == arrival.prompt[1:]
        if name in self._errors:
            self._check_error(arrival, self._errors[name])
        elif (reason := self._ended.get(key)) is None:
            assert name in self._aborted, f"{key} never ended"
        elif reason == "abort":
            assert name in self._slept, f"{key} was aborted by nobody"
        else:
            assert tokens == alone, f"{key}: {tokens} instead of {alone}"
            assert reason == ("stop" if alone[-1] in arrival.stop else "length")

    def _check_error(self, arrival: Arrival, error: OctavoError) -> None:
        kind, settings = type(error).__name__, self.settings
        expected = {
            "DeadlineError": arrival.seconds is not None
            and self._error_times[arrival.name] >= arrival.at + arrival.seconds,
            "FirstTokenError": arrival.first_seconds is not None
            and self._error_times[arrival.name] >= arrival.at + arrival.first_seconds
            and not all(self._tokens[arrival.name, index] for index in range(arrival.n)),
            "StepFailedError": self._step_failures and STEP_FAILED in str(error),
            "GrammarError": arrival.is_bad and arrival.grammar is not None,
            "ContextLengthError": not settings.chunked
            and len(arrival.prompt) > settings.max_num_batched_tokens,
            "RequestError": arrival.is_bad and "made to fail" in str(error),
        }
        assert expected.get(kind), f"{arrival.name} failed: {kind}: {error}"


def _core_request(arrival: Arrival) -> EngineCoreRequest:
    grammar = None if arrival.grammar is None else GrammarSpec("regex", arrival.name)
    stop = frozenset(arrival.stop)
    return core_request(
        arrival.name,
        arrival.prompt,
        CoreSamplingParams(
            seed=arrival.seed,
            max_tokens=arrival.max_tokens,
            logprobs=0 if arrival.logprobs else None,
            prompt_logprobs=0 if arrival.prompt_logprobs else None,
            stop_token_ids=stop,
            all_stop_token_ids=stop,
            grammar=grammar,
        ),
        arrival_time=arrival.at,
        cache_salt=arrival.salt,
        deadline=None if arrival.seconds is None else arrival.at + arrival.seconds,
        first_token_deadline=(
            None if arrival.first_seconds is None else arrival.at + arrival.first_seconds
        ),
        tenant=arrival.tenant,
        n=arrival.n,
        turn=arrival.turn,
        priority=arrival.priority,
    )


def _most_steps(schedule: Schedule) -> int:
    """Return the steps that serve all one by one, as the first in order always advances.

    A request may start again after each death of an engine or failure of a step, and after the
    arrival of one that is served before it.
    """
    settings = schedule.settings
    arrivals = [event for event in schedule.events if isinstance(event, Arrival)]
    in_order = len({a.tenant for a in arrivals}) == 1 and all(
        a.seconds is a.first_seconds is None for a in arrivals
    )
    chunk = min(settings.max_num_batched_tokens, settings.threshold or math.inf)
    steps = count = again = 0
    for event in schedule.events:
        if isinstance(event, Arrival):
            length = len(event.prompt) + event.max_tokens
            steps += event.n * (math.ceil(length / chunk) + event.max_tokens + settings.depth + 2)
            overtakes = not in_order or settings.policy == "priority" or event.turn or event.n > 1
            again += event.n if overtakes else 0
        count += not isinstance(event, Arrival)
    return 20 + steps * (1 + count + again)
