import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.messages import CoreSamplingParams, EngineCoreRequest
from octavo.request import Request
from octavo.scheduler.queue import RequestQueue, make_queue_key


def make_request(number, priority=0, arrival_time=0.0, policy="fcfs"):
    params = CoreSamplingParams(priority=priority)
    request = Request(EngineCoreRequest(str(number), [1], params, arrival_time))
    request.queue_key = make_queue_key(policy, request, number)
    return request


def drain(queue):
    return [queue.pop().request_id for _ in range(len(queue))]


def test_fcfs_looks_at_the_arrival_only():
    queue = RequestQueue()
    for number, priority, arrival in [(0, 5, 2.0), (1, 0, 3.0), (2, 9, 1.0)]:
        queue.push(make_request(number, priority, arrival))
    assert drain(queue) == ["2", "0", "1"]


def test_priority_comes_before_arrival():
    queue = RequestQueue()
    for number, priority, arrival in [(0, 5, 1.0), (1, 0, 3.0), (2, 0, 2.0), (3, -1, 4.0)]:
        queue.push(make_request(number, priority, arrival, "priority"))
    assert drain(queue) == ["3", "2", "1", "0"]


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_ties_are_served_in_order_of_arrival(policy):
    queue = RequestQueue()
    for number in range(20):
        queue.push(make_request(number, policy=policy))
    assert drain(queue) == [str(i) for i in range(20)]


def test_a_request_that_comes_back_keeps_its_place():
    queue = RequestQueue()
    requests = [make_request(i) for i in range(4)]
    for request in requests:
        queue.push(request)
    first, second = queue.pop(), queue.pop()
    queue.push(second)
    queue.push(first)
    assert drain(queue) == ["0", "1", "2", "3"]


def test_removal():
    queue = RequestQueue()
    requests = [make_request(i) for i in range(300)]
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
    assert drain(queue) == ["5", "299"]
    assert not queue


def test_a_request_is_queued_once():
    queue = RequestQueue()
    request = make_request(0)
    queue.push(request)
    with pytest.raises(AssertionError, match="queued twice"):
        queue.push(request)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["push", "pop", "remove"]), st.integers(0, 9))))
def test_against_a_sorted_list(operations):
    queue = RequestQueue()
    requests = [make_request(i, -i % 3, float(i % 4), "priority") for i in range(10)]
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
