"""Tokens of a prompt that see each other, beside requests with drafts."""

from tests.fakes import FakeEngine, picture, scheduled_tokens


def test_drafts_make_room_for_tokens_that_see_each_other():
    engine = FakeEngine(
        encoder_cache_size=64, max_num_batched_tokens=20, max_num_seqs=4, num_drafts=3
    )
    for name in "abc":
        engine.add(name, range(3), max_tokens=40)
    lengths = engine.scheduler.drafting.lengths
    lengths.choose = lambda num_reqs: 3
    engine.step()
    engine.step()
    # With one token of each other request it fits, and with their drafts it does not.
    engine.add("r", range(17), features=[picture("p", 0, 17, ranges=((0, 17),))])
    step = engine.schedule()
    assert "r" not in scheduled_tokens(step)
    assert sum(scheduled_tokens(step).values()) > 3
    step = engine.schedule()
    assert scheduled_tokens(step) == {"a": 1, "b": 1, "c": 1, "r": 17}
    step = engine.schedule()
    assert sum(scheduled_tokens(step).values()) > 4
    engine.run()


def test_a_line_that_saves_tokens_stops_no_drafts():
    engine = FakeEngine(
        encoder_cache_size=64, max_num_batched_tokens=200, max_num_seqs=4, num_drafts=3
    )
    engine.scheduler.drafting.lengths.choose = lambda num_reqs: 3
    engine.add("a", range(3), max_tokens=60)
    engine.step()
    engine.step()
    item = picture("p", 0, 60, ranges=((0, 60),))
    line = engine.add("line", range(60), features=[item], background=True, max_tokens=1)
    counts = []
    while not line.status.finished:
        engine.step()
        counts.append(scheduled_tokens(engine.steps[-1])["a"])
    assert len(counts) > 3
    assert min(counts) > 1
