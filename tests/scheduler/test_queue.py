import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.messages import CoreSamplingParams, EngineCoreRequest
from octavo.request import Request
from octavo.scheduler.queue import Arrivals, RequestQueue


def make_requests(*turns, priorities=None, policy="fcfs"):
    """Requests that arrive in this order; their ids are "0", "1" ..."""
    arrivals = Arrivals(policy)
    requests = []
    for i, turn in enumerate(turns):
        params = CoreSamplingParams(priority=priorities[i] if priorities else 0)
        request = Request(EngineCoreRequest(str(i), [1], params, arrival_time=0.0, turn=turn))
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
