"""Predicted hits of chat sessions: compared with those of the scheduler."""

from collections import deque

import msgspec
import pytest

from octavo.config import SchedulerConfig
from octavo.errors import ConfigError
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.kv_cache.hashing import make_block_hasher
from octavo.kv_cache.sessions import SessionShape, find_hits
from octavo.messages import ModelRunnerOutput
from octavo.request import Request
from octavo.scheduler.scheduler import Scheduler
from octavo.simulation.step_times import BatchReader
from tests.fakes import STATE, core_request, pages
from tests.params import core_params

SHAPE = SessionShape(sessions=5, turns=4, system_tokens=70, message_tokens=30, answer_tokens=90)
END = 0
KINDS = {
    "dense": pages(None),
    "windows": pages(None, 24),
    "hybrid": (*pages(None), STATE),
    "no attention": (STATE,),
}


def predict(caches, num_blocks, num_states, max_model_len=1000):
    config = KVCacheConfig(num_blocks, 8, make_kv_cache_groups(caches), num_states)
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": max_model_len}
    return find_hits(config, SHAPE, **limits)


def serve(caches, num_blocks, num_states):
    """Serve the sessions token by token with the scheduler; return the hit rate."""
    scheduler = Scheduler(
        msgspec.convert({"max_num_seqs": 3}, SchedulerConfig),
        KVCacheConfig(num_blocks, 8, make_kv_cache_groups(caches), num_states),
        max_model_len=1000,
        max_num_batched_tokens=64,
        enable_caching=True,
        message_ends=(END,),
    )
    reader, hasher = BatchReader(), make_block_hasher(8)
    system = [1] * (SHAPE.system_tokens - 1) + [END]
    conversations = [system for _ in range(SHAPE.sessions)]
    ready = deque((i, 0) for i in range(SHAPE.sessions))
    arrivals = 0
    while ready or scheduler.has_requests():
        while ready:
            i, turn = ready.popleft()
            arrivals += 1
            prompt = conversations[i] + [i + 2] * (SHAPE.message_tokens - 1) + [END]
            params = core_params(max_tokens=SHAPE.answer_tokens, all_stop_token_ids=[])
            core = core_request(f"{i}-{turn}", prompt, params, arrival_time=arrivals)
            scheduler.add_request(Request(core, hasher))
        work = scheduler.schedule()
        _, sampled = reader.read(work)
        names, tokens = [s.req_id for s in work.scheduled_reqs], []
        live = {name: scheduler.requests[name] for name in names}
        for name, gets_token in zip(names, sampled, strict=True):
            is_last = live[name].num_output_tokens == SHAPE.answer_tokens - 1
            token = END if is_last else int(name.split("-")[0]) + 2
            tokens.append([token] if gets_token else [])
        scheduler.update_from_output(work, ModelRunnerOutput(names, tokens))
        for name, request in live.items():
            i, turn = map(int, name.split("-"))
            if request.status.finished:
                conversations[i] = request.all_token_ids
                if turn + 1 < SHAPE.turns:
                    ready.append((i, turn + 1))
    manager = scheduler.kv_cache_manager
    return manager.num_hits / manager.num_queries


@pytest.mark.parametrize("kind", KINDS)
def test_hits_are_the_schedulers(kind):
    """With enough room, and with too little."""
    caches = KINDS[kind]
    found = predict(caches, 2000, 200)
    assert found.hit_rate == serve(caches, 2000, 200) == found.best_hit_rate > 0.6
    tight = predict(caches, 160, 14)
    assert tight.hit_rate == pytest.approx(serve(caches, 160, 14), abs=0.05)
    assert tight.hit_rate < found.hit_rate - 0.1
    assert tight.best_hit_rate == found.best_hit_rate
    assert (tight.snapshots_given_up > 0) == (STATE in caches)
    assert (tight.blocks_forgotten > 0) == (kind != "no attention")


def test_preempted_requests_come_to_their_end():
    tight = predict(KINDS["hybrid"], 74, 9)
    assert 0 < tight.hit_rate < 0.5
    assert tight.blocks_forgotten > 0


def test_turns_that_exceed_the_context():
    found = predict(KINDS["dense"], 2000, 0, max_model_len=310)
    assert (found.shape.turns, found.turns_left_out) == (2, 2)
    assert "5 sessions of 2 turns" in str(found)
    assert "without 2 turns that exceed the context" in str(found)
    with pytest.raises(ConfigError, match="190 tokens in its first turn, and max_model_len=189"):
        predict(KINDS["dense"], 2000, 0, max_model_len=189)


def test_wrong_shapes():
    with pytest.raises(ConfigError, match="turns=0: must be at least 1"):
        SessionShape(turns=0)
    with pytest.raises(ConfigError, match=r"sessions=100000 with turns=8 .*lower one"):
        SessionShape(sessions=100_000)
