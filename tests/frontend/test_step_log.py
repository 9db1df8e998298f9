"""The log of recent steps: its order, limits and decoded records."""

import msgspec

from octavo.frontend.step_log import StepLog
from octavo.observability.steps import StepPart, StepRecord


def raw(number, size=1):
    parts = [StepPart(f"request-{i}", 1) for i in range(size)]
    record = StepRecord(number, 1.0, 1.1, 1.2, 1.3, 1.4, parts)
    return msgspec.Raw(msgspec.msgpack.encode(record))


def test_steps_come_back_in_order_with_their_engine():
    log = StepLog()
    log.add(0, 10.0, [raw(1), raw(2)])
    log.add(1, 11.0, [raw(1, size=3)])
    assert [(s.engine_index, s.record.number) for s in log.since(0)] == [(0, 1), (0, 2), (1, 1)]
    assert log.since(2)[0].record.num_tokens == 3
    assert log.since(log.end) == []
    assert [s.time for s in log.between(10.5, 11.0)] == [11.0]


def test_old_steps_are_dropped_by_age():
    log = StepLog(max_seconds=60.0)
    log.add(0, 0.0, [raw(1)])
    log.add(0, 59.0, [raw(2)])
    assert log.num_dropped == 0
    log.add(0, 61.0, [raw(3)])
    assert [s.record.number for s in log.since(0)] == [2, 3]
    assert log.num_dropped == 1
    assert [s.record.number for s in log.since(2)] == [3]


def test_old_steps_are_dropped_by_memory():
    log = StepLog(max_bytes=10_000)
    for number in range(200):
        log.add(0, float(number) / 100, [raw(number, size=8)])
        assert log.nbytes <= 10_000
    numbers = [s.record.number for s in log.since(0)]
    assert numbers == list(range(200 - len(numbers), 200))
    assert len(numbers) > 10
    log.add(0, 3.0, [raw(1, size=10_000)])  # larger than the limit: it is not kept either
    assert log.nbytes == 0
    assert log.since(0) == []


def test_records_without_a_step_are_no_steps():
    log = StepLog(max_seconds=60.0)
    log.add(0, 1.0, [raw(1)])
    log.add(0, 2.0, [raw(0, size=0)])
    log.add(0, 3.0, [raw(2)])
    assert [s.record.number for s in log.since(0)] == [1, 2]
    assert [s.record.number for s in log.between(0.0, 9.0)] == [1, 0, 2]
    log.add(0, 63.5, [])
    assert log.since(0) == []
    assert list(log.between(0.0, 99.0)) == []
    assert (log.num_dropped, log.nbytes) == (2, 0)
