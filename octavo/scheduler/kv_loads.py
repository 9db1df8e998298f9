"""KV blocks that a connector loads for requests before they start."""

from __future__ import annotations

import msgspec

from octavo.config import SchedulerConfig
from octavo.kv_cache.block_pool import NULL_BLOCK_ID
from octavo.kv_cache.kinds.cross_attention import row_hashes
from octavo.kv_cache.manager import KVCacheBlocks, KVCacheManager
from octavo.kv_cache.states import SnapshotLog, id_of_state
from octavo.kv_connector.base import KVConnectorScheduler, SavedState
from octavo.messages import KVConnectorOutput, SchedulerOutput
from octavo.request import Request
from octavo.scheduler.costs import PrefillCosts
from octavo.scheduler.step import ScheduledStep


class KVLoads:
    """Loads of KV blocks, and the requests that wait for them.

    Args:
        connector: the scheduler's half of a KV connector.
        config: the scheduler's settings.
        manager: manager of the blocks.
    """

    def __init__(
        self, connector: KVConnectorScheduler, config: SchedulerConfig, manager: KVCacheManager
    ) -> None:
        self._connector, self._config, self._manager = connector, config, manager
        if manager.states is not None:
            manager.states.log = SnapshotLog()
        if manager.states is not None or manager.cross is not None:
            connector.bind_prefix_cache(manager)
        self._costs = PrefillCosts()
        self._block_ids: list[int] = []
        """Blocks to load from the next step on; see `SchedulerOutput.loaded_block_ids`."""
        self._before_step: list[str] = []
        """Requests with blocks that are loaded before the next step."""
        self._waiting: dict[str, list[Request]] = {}
        """All requests that wait for a load, by the id of the request that started it."""
        self.num_queries = self.num_hits = self.num_failed = 0
        """Tokens that were looked up, tokens that were found, loads that failed."""

    @property
    def replace_computing(self) -> bool:
        """True if a preempted request loads its blocks later instead of computing them again."""
        mode = self._config.preemption_mode
        return mode == "swap" or (mode == "auto" and not self._costs.computing_is_cheaper)

    def must_wait(self, request: Request, hit: KVCacheBlocks, num_running: int, now: float) -> bool:
        """Return True if a request waits for a load, and start that load if necessary.

        The connector is queried once for each request, and again after a preemption.

        Args:
            request: the first of the waiting requests.
            hit: its blocks in the prefix cache.
            num_running: number of running requests.
            now: the time.
        """
        size, connector = self._manager.config.block_size, self._connector
        if (
            not connector.transfer_config.loads
            or request.num_external_tokens is not None
            or request.skip_reading_prefix_cache
            or hit.num_tokens % size
        ):
            return False
        # Several requests may wait for the same blocks, which are loaded once.
        rows = self._manager.missing_rows(request)
        wanted = (rows or request.block_hashes[hit.num_tokens // size :])[:1]
        for owner, waiting in self._waiting.items():
            if self._manager.is_loading(owner, wanted):
                waiting.append(request)
                return True
        if num_running + len(self._waiting) >= self._config.max_num_seqs:
            return False
        if request.request_id in self._waiting:  # a finished request had the same id
            return False
        count, beside = connector.get_num_new_matched_tokens(request, hit.num_tokens)
        if not count:
            return False
        num_rows = len(row_hashes(request, size)) * size if rows else 0
        num_tokens = count - num_rows
        block_ids = self._manager.start_load(request, hit, num_tokens)
        if block_ids is None:
            return False  # the request could not start either
        request.num_external_tokens = num_tokens
        self.num_queries += request.num_tokens - hit.num_tokens
        self.num_hits += num_tokens
        of_tokens = len(self._manager.managers)
        for group_id, ids in enumerate(block_ids):
            begin = hit.num_tokens // size if group_id < of_tokens else 0
            self._block_ids += [i for i in ids[begin:] if i > NULL_BLOCK_ID]
        connector.update_state_after_alloc(request, block_ids, count)
        self._waiting[request.request_id] = [request]
        if not beside:
            self._before_step.append(request.request_id)
        self._costs.load_began(request.request_id, count, now)
        return True

    def request_started(self, request: Request, block_ids: list[list[int]], start: int) -> None:
        """Note that a request starts at token `start`, without a load or after it."""
        if self._connector.transfer_config.loads and request.num_external_tokens is None:
            self.num_queries += request.num_tokens - start
        self._connector.update_state_after_alloc(request, block_ids, 0)

    def complete_step(self, output: SchedulerOutput) -> None:
        """Add the loads, and the connector's message to the workers, to a scheduled step."""
        output.loaded_block_ids, self._block_ids = self._block_ids, []
        output.kv_loads_before, self._before_step = self._before_step, []
        states = self._manager.states
        if states is not None and output.scheduled_reqs:
            changes = states.take_changes()
            new = [SavedState(id_of_state(s.slot), s.block_hash, s.in_prompt) for s in changes.new]
            self._connector.note_states(new, changes.dropped)
        metadata = self._connector.build_connector_meta(output)
        if metadata is not None:
            output.kv_connector_metadata = msgspec.msgpack.encode(metadata)

    def step_succeeded(self, step: ScheduledStep, now: float) -> None:
        """Note that a step has been computed."""
        self._connector.step_succeeded()
        num_tokens = step.output.total_num_scheduled_tokens
        self._costs.step_ended(num_tokens, len(step.entries), step.scheduled_at, now)

    def finish(self, output: KVConnectorOutput, now: float) -> list[tuple[Request, bool]]:
        """End the loads that all workers have finished.

        Returns:
            The requests that waited for them; True if the request may start, False if its load
            failed and must not be replaced by computing.
        """
        recompute = self._connector.transfer_config.kv_load_failure_policy == "recompute"
        ended: list[tuple[Request, bool]] = []
        for req_id in output.finished_recving:
            good = self._manager.finish_load(req_id, output.invalid_block_ids)
            self._costs.load_ended(req_id, now)
            self.num_failed += not good
            owner, *others = self._waiting.pop(req_id)
            ended += [(owner, good or recompute), *((request, True) for request in others)]
        self._connector.update_connector_output(output)
        return ended
