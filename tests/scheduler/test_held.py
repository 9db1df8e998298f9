"""Requests that wait for something other than a place in a step."""

from octavo.request import RequestStatus
from tests.fakes import FakeEngine


class TestWaits:
    def test_they_do_not_block_the_queue(self):
        engine = FakeEngine(max_num_seqs=1)
        a = engine.add("a", range(4))
        engine.scheduler.hold("a", RequestStatus.WAITING_FOR_FSM)
        b, c = engine.add("b", range(4)), engine.add("c", range(4))
        engine.step()
        assert engine.running_ids() == ["b"]
        assert engine.scheduler.make_stats().num_waiting_reqs == 2
        engine.scheduler.set_ready("a")
        engine.scheduler.set_ready("a")
        while engine.running_ids() == ["b"]:
            engine.step()
        engine.step()
        assert engine.running_ids() == ["a"]  # it arrived before c
        engine.run()
        engine.check_tokens(a, b, c)

    def test_a_request_can_arrive_with_one(self):
        engine = FakeEngine()
        donor = engine.add("x", range(4))
        engine.scheduler.finish_requests(["x"], RequestStatus.FINISHED_ABORTED)
        donor.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        engine.scheduler.add_request(donor)
        assert engine.schedule().total_num_scheduled_tokens == 0
        engine.update()
        engine.scheduler.set_ready("x")
        engine.run()
        engine.check_tokens(donor)
