"""All unfinished requests, and the place of each: queued, held or running."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from octavo.config import LoRAConfig
from octavo.kv_cache.encoder_cache import EncoderCacheManager
from octavo.kv_cache.manager import KVCacheManager
from octavo.messages import EngineCoreOutput
from octavo.request import QueueKey, Request, RequestStatus
from octavo.scheduler.adapters import AdapterSlots, AdapterTurns
from octavo.scheduler.deadlines import Deadlines
from octavo.scheduler.fairness import TenantCounters
from octavo.scheduler.held import HELD, HeldRequests
from octavo.scheduler.kv_loads import KVLoads
from octavo.scheduler.listener import StepListener
from octavo.scheduler.queue import Arrivals, Policy, WaitingQueue


class RequestTable:
    """All unfinished requests, and their moves between queue, hold and the running ones.

    A request is in one place at a time. It waits in the queue, or is held while it waits for
    something other than a place in a step, or runs. A preempted request returns to the queue. The
    table frees what a request has once the request stops running.

    Args:
        policy: order of the queue; see `Arrivals`.
        lora: settings of adapters; None: they are off.
        tenants: counters of the tokens of each tenant.
        kv_cache_manager: manager of the blocks.
        encoder_cache: manager of the rows of encoders.
        loads: loads of a KV connector; None: there is no connector.
        listeners: notified when requests are held, become ready or are preempted.
    """

    def __init__(
        self,
        policy: Policy,
        lora: LoRAConfig | None,
        *,
        tenants: TenantCounters,
        kv_cache_manager: KVCacheManager,
        encoder_cache: EncoderCacheManager,
        loads: KVLoads | None,
        listeners: Sequence[StepListener],
    ) -> None:
        self.requests: dict[str, Request] = {}
        """All unfinished requests by id."""
        self.running: list[Request] = []
        """Requests with a row in the worker, in order of service."""
        self.tenants = tenants
        self.waiting = WaitingQueue(tenants)
        self.held = HeldRequests()
        self.paused = False
        """True if new requests are held until `resume`."""
        self.deadlines = Deadlines()
        self.adapters: AdapterSlots | None = None
        """Adapters in memory; None: adapters are off."""
        if lora is not None:
            self.adapters = AdapterSlots(lora.num_in_memory)
        self.turns = AdapterTurns(0 if lora is None else lora.max_loras)
        self.num_preemptions = 0
        self.finished_req_ids: list[str] = []
        """Rows that the worker must free before the next step."""
        self._arrivals = Arrivals(policy)
        self._loads, self._listeners = loads, listeners
        self._kv_cache_manager, self._encoder_cache = kv_cache_manager, encoder_cache

    def add(self, request: Request) -> None:
        """Add a new request: hold it if its status is a wait, else queue it once it can be."""
        request.queue_key = self._arrivals.next_key(request)
        self.requests[request.request_id] = request
        self.deadlines.add(request)
        self.tenants.arrive(request.options.share)
        request.competes = True
        if self.adapters is not None:
            self.adapters.add(request)
        if request.status == RequestStatus.WAITING:
            request.status = self._find_wait(request) or request.status
        if request.status in HELD:
            self._hold(request, request.status)
        else:
            self.waiting.push(request)

    def hold(self, request: Request, status: RequestStatus) -> None:
        """Remove a waiting request from the queue until `set_ready`.

        Args:
            request: a request that waits.
            status: the reason, one of `HELD`.
        """
        self.waiting.remove(request)
        self._hold(request, status)

    def _hold(self, request: Request, status: RequestStatus) -> None:
        self.held.add(request, status)
        for listener in self._listeners:
            listener.on_hold(request)

    def set_ready(self, request_id: str) -> None:
        """Move a held request to its place in the queue; ignore a finished one.

        While the table is paused, the request is held until the pause ends; then, until its adapter
        is in memory.
        """
        request = self.held.get(request_id)
        if request is None:
            return
        if (status := self._find_wait(request)) is not None:
            self._hold(request, status)
            return
        self.waiting.push(self.held.release(request_id))
        for listener in self._listeners:
            listener.on_ready(request)

    def _find_wait(self, request: Request) -> RequestStatus | None:
        """Return the status of a request that cannot be queued yet; None: it can."""
        if self.paused:
            return RequestStatus.WAITING_FOR_WAKE_UP
        if self.adapters is not None and not self.adapters.is_ready(request):
            return RequestStatus.WAITING_FOR_ADAPTER
        return None

    def resume(self) -> None:
        """Queue the requests that a pause holds."""
        self.paused = False
        for request in list(self.held.values()):
            if request.status == RequestStatus.WAITING_FOR_WAKE_UP:
                self.set_ready(request.request_id)

    def start(self, request: Request) -> None:
        """Move a waiting request to its place among the running ones."""
        self.waiting.start(request)
        self.turns.note_start(request)
        request.status = RequestStatus.RUNNING
        bisect.insort(self.running, request, key=_queue_key)

    def cease_to_compete(self, request: Request) -> None:
        """Note that the rest of a request's tokens is in a step, or that the request ends."""
        if request.competes:
            request.competes = False
            self.tenants.cease(request.options.share)

    def preempt_last(self, by: Request | None) -> Request:
        """Return the last running request to the queue, in favour of `by`; return the request.

        Tokens that steps in flight sample for it stay valid: they depend only on its own tokens.
        """
        request = self.running.pop()
        for listener in self._listeners:
            listener.on_preempt(request, by)
        self._free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.num_forced = 0
        if self._loads is not None:
            request.num_external_tokens = None if self._loads.replace_computing else 0
        request.num_preemptions += 1
        request.has_news = True
        self.num_preemptions += 1
        self.finished_req_ids.append(request.request_id)
        self.waiting.push(request)
        return request

    def preempt_all(self) -> None:
        """Return all running requests to the queue."""
        while self.running:
            self.preempt_last(None)

    def _free(self, request: Request) -> None:
        """Free the blocks of a running request, and the rows of encoders that it uses."""
        self._kv_cache_manager.free(request)
        if request.mm_features:
            self._encoder_cache.free(request)

    def finish(self, request: Request, status: RequestStatus) -> None:
        """End a request in any place; the caller then calls `drop_finished`."""
        req_id = request.request_id
        del self.requests[req_id]
        self.cease_to_compete(request)
        self.tenants.leave(request.options.share)
        if request.status == RequestStatus.RUNNING:
            self._free(request)
            self.finished_req_ids.append(req_id)
        elif request.status in HELD:
            del self.held[req_id]
        else:
            self.waiting.remove(request)
        request.status = status
        if self.adapters is not None:
            self.adapters.remove(request)
            self.turns.blocked.discard(req_id)

    def fail(self, request: Request, message: str, error_kind: str) -> EngineCoreOutput:
        """End a request with an error, as `finish` does; return the output with the error."""
        request.error, request.error_kind = message, error_kind
        self.finish(request, RequestStatus.FINISHED_ERROR)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.status.finish_reason,
            error=message,
            error_kind=error_kind,
            num_cached_tokens=request.num_cached_tokens,
            first_scheduled_time=request.first_scheduled_time,
            num_preemptions=request.num_preemptions,
        )

    def take_finished(self) -> list[str]:
        """Return `finished_req_ids`, and clear it: a step takes them to the worker."""
        taken, self.finished_req_ids = self.finished_req_ids, []
        return taken

    def drop_finished(self) -> None:
        """Remove the finished requests from `running`, and let others have their places."""
        running = RequestStatus.RUNNING
        self.running = [request for request in self.running if request.status is running]
        # Requests wait for the turn of their adapter: another one may run now.
        for request_id in self.turns.release(self.running):
            if self.requests[request_id].status == RequestStatus.WAITING_FOR_ADAPTER_TURN:
                self.set_ready(request_id)


def _queue_key(request: Request) -> QueueKey:
    return request.queue_key
