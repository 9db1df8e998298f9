"""Journal of the coordinator, which equals the records of a single front end."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from octavo.fleet.live_requests import LiveRequests
from octavo.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from tests.fakes import picture
from tests.frontend.test_output_processor import Bench
from tests.params import pack_logprobs

REASONS = [FinishReason.LENGTH, FinishReason.STOP, FinishReason.ERROR]


class Both:
    """The same requests in an output processor and in a `LiveRequests`."""

    def __init__(self):
        self.bench = Bench()
        self.live = LiveRequests()

    def add(self, request_id, owner, **params):
        self.bench.add(request_id, prompt="abc", **params)
        [request] = [r for r in self.bench.outputs.unfinished() if r.request_id == request_id]
        request = msgspec.structs.replace(request, answers=None)
        self.live.add(request, msgspec.msgpack.encode(request), owner)

    def move(self, owner_of):
        """Replace the coordinator by one that receives the live requests."""
        self.live = LiveRequests()
        for request in self.bench.outputs.unfinished():
            data = msgspec.msgpack.encode(request)
            self.live.add(request, data, owner_of[request.request_id])

    def check(self):
        theirs, ours = self.bench.outputs.unfinished(), self.live.unfinished()
        for requests in (theirs, ours):
            for request in requests:
                asked = request.sampling_params.prompt_logprobs is not None
                if not asked or 0 not in request.indices:  # the first answer brings them
                    request.num_prompt_logprobs = 0
        assert ours == theirs
        assert len(self.live) == len(theirs)


@given(st.data())
def test_it_is_what_an_output_processor_keeps(data):
    both, live, owner_of, rows_left = Both(), {}, {}, {}
    for number in range(data.draw(st.integers(1, 4))):
        name, n = f"r{number}", data.draw(st.integers(1, 3))
        logprobs = data.draw(st.sampled_from([None, 1]))
        owner_of[name] = data.draw(st.sampled_from(["x", "y"]))
        both.add(name, owner_of[name], n=n, prompt_logprobs=logprobs)
        live[name] = [name] if n == 1 else [f"{i}_{name}" for i in range(n)]
        rows_left[name] = 2 if logprobs else 0
    both.check()
    for _ in range(data.draw(st.integers(0, 12))):
        if not any(live.values()):
            break
        name = data.draw(st.sampled_from([name for name in live if live[name]]))
        answer = data.draw(st.sampled_from(live[name]))
        if data.draw(st.integers(0, 7)) == 0:
            both.move(owner_of)
            both.check()
        if data.draw(st.integers(0, 5)) == 0:
            both.live.remove([answer, "unknown"])
            both.bench.outputs.abort_requests([answer])
            live[name].remove(answer)
            both.check()
            continue
        output = EngineCoreOutput(answer, data.draw(st.lists(st.integers(97, 99), max_size=3)))
        is_first = answer in (name, f"0_{name}")
        if is_first and rows_left[name]:
            rows = rows_left[name] if output.new_token_ids else data.draw(st.integers(0, 2))
            rows = min(rows, rows_left[name])  # the first token ends the prompt
            rows_left[name] -= rows
            packed = pack_logprobs([[97, 98]] * rows, [[-1.0, -2.0]] * rows, [1] * rows)
            output.new_prompt_logprobs = packed
        reason = data.draw(st.sampled_from([None, None, *REASONS]))
        if reason is not None:
            output.finish_reason = reason
            live[name] = [] if reason == FinishReason.ERROR else live[name]
            if answer in live[name]:
                live[name].remove(answer)
        assert both.live.take(output) == owner_of[name]
        both.bench.step(output)
        both.check()
    aborted = both.live.remove_owner("x")
    assert sorted(aborted) == sorted(a for r in live if owner_of[r] == "x" for a in live[r])
    both.bench.outputs.abort_requests(aborted)
    both.check()


def test_what_has_ended_has_no_owner():
    live = Both()
    live.add("a", "x")
    end = EngineCoreOutput("a", [], finish_reason=FinishReason.ABORT)
    assert live.live.take(end) == "x"
    assert live.live.take(end) is None
    assert len(live.live) == 0


def test_equal_items_of_live_requests_are_in_memory_once():
    live, given = LiveRequests(), []
    for name, pictures in (("1", "ab"), ("2", "ba"), ("3", "a"), ("4", "aa")):
        bench = Bench()
        bench.add(name, prompt="abc")
        (request,) = bench.outputs.unfinished()
        items = [picture(one, place, 1) for place, one in enumerate(pictures)]
        request = msgspec.structs.replace(request, answers=None, mm_features=items)
        data = msgspec.msgpack.encode(request)
        live.add(msgspec.msgpack.decode(data, type=EngineCoreRequest), data, "owner")
        given.append(request)
    assert live.unfinished() == given
    found = [item.data for request in live.unfinished() for item in request.mm_features]
    assert len({id(data["pixels"]) for data in found}) == len(live._items) == 2
    live.remove(["1", "2"])
    assert live.unfinished() == given[2:]
    assert [*live._items] == ["a"]
    live.remove(["3", "4"])
    assert not live._items
