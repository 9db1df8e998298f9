import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.messages import CoreSamplingParams
from octavo.request import Request
from octavo.scheduler.fairness import TenantCounters
from octavo.scheduler.queue import Arrivals, RequestQueue, TenantQueue, WaitingQueue
from tests.params import core_request


def make_requests(
    *turns,
    priorities=None,
    policy="fcfs",
    deadlines=None,
    first_token_deadlines=None,
    tenants=None,
    flows=None,
):
    """Return requests that arrive in this order; their ids are "0", "1" ..."""
    arrivals = Arrivals(policy)
    requests = []
    for i, turn in enumerate(turns):
        core = core_request(
            str(i),
            [1],
            CoreSamplingParams(),
            turn=turn,
            priority=priorities[i] if priorities else 0,
            deadline=deadlines[i] if deadlines else None,
            first_token_deadline=first_token_deadlines[i] if first_token_deadlines else None,
            tenant=tenants[i] if tenants else None,
            flow=flows[i] if flows else None,
        )
        request = Request(core)
        request.queue_key = arrivals.next_key(request)
        requests.append(request)
    return requests


def drain(queue):
    return [int(queue.pop().request_id) for _ in range(len(queue))]


def order(*turns, **kwargs):
    queue = RequestQueue()
    for request in make_requests(*turns, **kwargs):
        queue.push(request)
    return drain(queue)


def test_fcfs_looks_at_the_arrival_only():
    assert order(0, 0, 0, priorities=[5, 0, 9]) == [0, 1, 2]


def test_priority_comes_before_arrival():
    assert order(0, 0, 0, 0, priorities=[5, 0, 0, -1], policy="priority") == [3, 1, 2, 0]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_calls_of_many_prompts_take_turns_with_others(policy):
    assert order(0, 1, 2, 3, 0, 0, policy=policy) == [0, 1, 4, 2, 5, 3]
    assert order(0, 1, 2, 0, 1, 2, policy=policy) == [0, 1, 3, 2, 4, 5]
    assert order(0, 0, 1, 2, 0) == [0, 1, 2, 4, 3]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_nobody_waits_for_more_than_came_before_or_takes_its_turn(sizes):
    calls = [(call, turn) for call, size in enumerate(sizes) for turn in range(size)]
    served = [calls[i] for i in order(*[turn for _, turn in calls])]
    for at, (call, turn) in enumerate(served):
        assert [t for c, t in served[:at] if c == call] == list(range(turn))
        assert all(c - call <= turn for c, _ in served[:at])  # later calls pass once for each turn


def test_a_request_that_comes_back_keeps_its_place():
    queue = RequestQueue()
    requests = make_requests(0, 0, 0, 0)
    for request in requests:
        queue.push(request)
    first, second = queue.pop(), queue.pop()
    queue.push(second)
    queue.push(first)
    assert drain(queue) == [0, 1, 2, 3]


def test_removal():
    queue = RequestQueue()
    requests = make_requests(*[0] * 300)
    for request in requests:
        queue.push(request)
    for request in requests[:299]:
        assert request in queue
        queue.remove(request)
        assert request not in queue
    assert len(queue) == 1
    assert len(queue._heap) < 100  # removed entries do not pile up
    assert queue.peek() is requests[299]
    queue.push(requests[5])
    assert drain(queue) == [5, 299]
    assert not queue


def test_a_request_is_queued_once():
    queue = RequestQueue()
    [request] = make_requests(0)
    queue.push(request)
    with pytest.raises(AssertionError, match="queued twice"):
        queue.push(request)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), st.integers(0, 9))))
def test_against_a_sorted_list(operations):
    queue = RequestQueue()
    requests = make_requests(
        *[i % 4 for i in range(10)], priorities=[-i % 3 for i in range(10)], policy="priority"
    )
    model = []
    for operation, i in operations:
        request = requests[i]
        if operation == "push" and request not in model:
            queue.push(request)
            model.append(request)
        elif operation == "pop" and model:
            best = min(model, key=lambda r: r.queue_key)
            assert queue.peek() is best
            assert queue.pop() is best
            model.remove(best)
        elif operation == "remove" and request in model:
            queue.remove(request)
            model.remove(request)
        assert len(queue) == len(model)
        assert list(queue) == sorted(model, key=lambda r: r.queue_key)
        assert [r in queue for r in requests] == [r in model for r in requests]


def start_order(queue, requests):
    for request in requests:
        queue.push(request)
    started = []
    while queue:
        started.append(queue.peek())
        queue.start(started[-1])
    return [int(request.request_id) for request in started]


class TestDeadlines:
    def test_the_earliest_deadline_goes_first(self):
        requests = make_requests(
            0, 0, 0, 0, deadlines=[None, 9.0, 5.0, 7.0], first_token_deadlines=[None] * 3 + [3.0]
        )
        assert start_order(TenantQueue(), requests) == [3, 2, 1, 0]

    def test_priority_is_above_deadlines(self):
        requests = make_requests(
            0, 0, 0, priorities=[0, 1, 0], deadlines=[None, 1.0, 9.0], policy="priority"
        )
        assert start_order(TenantQueue(), requests) == [2, 0, 1]

    def test_one_in_four_goes_to_those_without(self):
        requests = make_requests(*[0] * 12, deadlines=[None] * 3 + [1.0] * 9)
        assert start_order(TenantQueue(), requests) == [3, 4, 5, 0, 6, 7, 8, 1, 9, 10, 11, 2]

    def test_a_stream_of_them_does_not_keep_others_waiting_for_ever(self):
        queue = TenantQueue()
        requests = make_requests(*[0] * 100, deadlines=[None, *[1.0] * 99])
        for request in requests[:3]:
            queue.push(request)
        for request in requests[3:]:
            queue.push(request)
            queue.start(queue.peek())
        assert requests[0] not in queue

    @given(st.lists(st.none() | st.integers(0, 5), max_size=30))
    def test_everyone_is_started_once_and_in_order(self, deadlines):
        requests = make_requests(*[0] * len(deadlines), deadlines=deadlines)
        served = start_order(TenantQueue(), requests)
        timed = [i for i in served if deadlines[i] is not None]
        assert timed == sorted(timed, key=lambda i: (deadlines[i], i))
        assert [i for i in served if deadlines[i] is None] == [
            i for i, deadline in enumerate(deadlines) if deadline is None
        ]


class TestTenants:
    def test_who_was_served_least(self):
        counters = TenantCounters(0)
        requests = make_requests(*[0] * 4, tenants=["a", "a", "b", "c"])
        for request in requests:
            counters.arrive(request.options.tenant)
        for tenant, tokens in (("a", 3), ("b", 2), ("c", 2)):
            counters.charge(tenant, tokens)
        assert start_order(WaitingQueue(counters), requests) == [2, 3, 0, 1]

    @pytest.mark.parametrize(
        ("tenants", "order"), [(None, [2, 0, 1]), (["a", "a", "a"], [0, 1, 2])]
    )
    def test_without_tenants_flows_take_turns(self, tenants, order):
        counters = TenantCounters(0)
        requests = make_requests(*[0] * 3, tenants=tenants, flows=[1, 1, 2])
        for request in requests:
            counters.arrive(request.options.share)
        counters.charge("a" if tenants else 1, 3)
        assert start_order(WaitingQueue(counters), requests) == order

    def test_priority_is_above_tenants(self):
        counters = TenantCounters(0)
        requests = make_requests(
            0, 0, 0, tenants=["a", "b", "a"], priorities=[1, 2, 3], policy="priority"
        )
        for request in requests:
            counters.arrive(request.options.tenant)
        counters.charge("a", 1000)
        assert start_order(WaitingQueue(counters), requests) == [0, 1, 2]

    def test_each_is_in_one_place(self):
        counters = TenantCounters(0)
        queue = WaitingQueue(counters)
        requests = make_requests(*[0] * 6, tenants=["a", "b", None] * 2, deadlines=[None, 1.0] * 3)
        for i, request in enumerate(requests):
            counters.arrive(request.options.tenant)
            queue.push(request)
            assert request in queue
            assert len(queue) == i + 1
        assert set(queue) == set(requests)
        for request in requests:
            queue.remove(request)
            assert request not in queue
        assert not queue
