from unittest.mock import ANY, Mock

import msgspec
import pytest

from octavo.config import SchedulerConfig
from octavo.errors import RequestError
from octavo.frontend.encoder_prompt import text_feature
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.messages import ModelRunnerOutput
from octavo.models.cache import AttentionCache, CrossCache
from octavo.request import Request, RequestStatus
from octavo.scheduler.encoders import EncoderInputs
from octavo.scheduler.scheduler import Scheduler
from tests.fakes import FakeEngine, pages, picture, scheduled_tokens
from tests.params import core_params, core_request


def make_engine(rows=64, budget=32, **options):
    return FakeEngine(encoder_cache_size=rows, max_num_batched_tokens=budget, **options)


def test_a_chunk_stops_before_a_picture_that_does_not_fit_into_the_step():
    engine = make_engine()
    pictures = [picture("a", 2, 8, tokens=30), picture("b", 12, 8, tokens=30)]
    engine.add("r", range(25), features=pictures)
    steps = [engine.schedule() for _ in range(3)]
    assert [scheduled_tokens(step) for step in steps] == [{"r": 12}, {"r": 13}, {"r": 1}]
    assert [step.scheduled_encoder_inputs for step in steps] == [{"r": [0]}, {"r": [1]}, {}]


def test_a_chunk_may_end_within_a_picture():
    engine = make_engine(budget=8)
    engine.add("r", range(25), features=[picture("a", 2, 20)])
    engine.run()
    assert engine.executor.num_encoded == 1


def test_a_cached_prefix_needs_no_encoder():
    engine = make_engine()
    features = [picture("a", 2, 10)]
    engine.add("1", range(25), features=features)
    engine.run()
    engine.scheduler._encoders.cache.forget_all()
    engine.add("2", range(25), features=features)
    step = engine.schedule()
    assert step.scheduled_encoder_inputs == {}
    assert step.scheduled_reqs[0].new.mm_features[0].data == {}
    # Another picture in the same place, and the same one in another place, are other prefixes.
    engine.add("3", range(25), features=[picture("b", 2, 10)])
    engine.add("4", range(25), features=[picture("a", 3, 10)])
    step = engine.schedule()
    assert step.scheduled_encoder_inputs == {"3": [0], "4": [0]}


def test_a_prefix_that_ends_within_a_picture_needs_the_rows_after_it():
    engine = make_engine()
    engine.add("1", range(16), features=[picture("a", 2, 14)])
    engine.run()
    engine.scheduler._encoders.cache.forget_all()
    engine.add("2", [*range(16), *range(9)], features=[picture("a", 2, 20)])
    step = engine.schedule()
    assert step.scheduled_encoder_inputs == {"2": [0]}
    assert scheduled_tokens(step) == {"2": 25 - 16}
    engine.run()


def test_pictures_do_not_delay_texts():
    """Beside each step's texts an encoder computes one picture, or some within the budget."""
    engine = make_engine(rows=500, max_num_seqs=20, num_blocks=200)
    for i in range(6):
        engine.add(f"p{i}", range(20), features=[picture(f"p{i}", 0, 10, tokens=100)])
    engine.add("text", range(5), max_tokens=3)
    step = engine.schedule()
    assert scheduled_tokens(step) == {"p0": 20, "text": 5}
    for i in range(1, 6):
        step = engine.schedule()
        assert list(step.scheduled_encoder_inputs) == [f"p{i}"]
    engine.run()


def test_prompts_with_pictures_stay_whole_without_chunked_prefill():
    engine = make_engine(enable_chunked_prefill=False)
    pictures = [picture("a", 2, 8, tokens=30), picture("b", 12, 8, tokens=30)]
    engine.add("1", range(5), features=[picture("c", 0, 4, tokens=8)])
    engine.add("2", range(25), features=pictures)
    engine.add("3", range(5), features=[picture("d", 0, 4, tokens=8)])
    steps = [engine.schedule() for _ in range(3)]
    assert [scheduled_tokens(step) for step in steps] == [{"1": 5}, {"1": 1, "2": 25}, ANY]
    inputs = [step.scheduled_encoder_inputs for step in steps]
    assert inputs == [{"1": [0]}, {"2": [0, 1]}, {"3": [0]}]
    engine.run()


def test_equal_pictures_start_together():
    engine = make_engine(rows=500, max_num_seqs=20, num_blocks=200, caching=False, budget=100)
    for i in range(4):
        engine.add(f"p{i}", range(20), features=[picture("a", 0, 10, tokens=1000)])
    assert list(scheduled_tokens(engine.schedule())) == ["p0", "p1", "p2", "p3"]
    assert engine.executor.num_encoded == 1
    engine.run()
    stats = engine.scheduler.make_stats()
    assert (stats.mm_cache_queries, stats.mm_cache_hits) == (4, 3)
    assert (stats.num_encoder_cache_rows, stats.encoder_cache_usage) == (500, 0)


def test_a_large_picture_is_not_overtaken_for_ever():
    """Others take no more rows while the first picture in order waits for room."""
    engine = make_engine(rows=30, max_num_seqs=20, long_prefill_token_threshold=10)
    engine.add("small", range(30), features=[picture("s", 0, 20)])
    engine.add("large", range(40), features=[picture("l", 0, 30)])
    engine.add("other", range(20), features=[picture("o", 0, 10)])
    engine.add("same", range(20), features=[picture("s", 0, 20)])
    first = engine.schedule()
    assert first.scheduled_encoder_inputs == {"small": [0]}
    assert "other" not in scheduled_tokens(first)
    assert "same" in scheduled_tokens(first)  # it needs no more rows
    engine.schedule()
    assert list(engine.schedule().scheduled_encoder_inputs) == ["large"]
    engine.run()


def test_a_picture_that_needs_a_step_alone_is_not_overtaken_for_ever():
    """Others begin no more pictures while the first one in order waits for a whole step."""
    engine = make_engine(rows=500, budget=64, num_blocks=200, long_prefill_token_threshold=16)

    def add_small(name):
        pictures = [picture(f"{name}-{i}", 16 * i, 8, tokens=8) for i in range(2)]
        engine.add(name, range(32), features=pictures, max_tokens=1)

    add_small("first")
    engine.schedule()
    engine.add("large", range(10), features=[picture("l", 0, 8, tokens=100)])
    for i in range(2):
        add_small(f"later{i}")
        step = engine.schedule()
        assert list(step.scheduled_encoder_inputs) == (["large"] if i else ["first"])
    engine.run()


def test_rows_in_the_cache_are_not_given_up_for_others_of_the_same_tokens():
    engine = make_engine(rows=30)
    for name in "abc":
        engine.add(name, range(20), features=[picture(name, 0, 10)])
        engine.run()
    engine.add("r", range(1, 31), features=[picture("d", 0, 10), picture("a", 10, 10)])
    step = engine.schedule()
    assert step.scheduled_encoder_inputs == {"r": [0]}
    assert step.free_encoder_mm_hashes == ["b"]
    engine.run()


def test_rows_are_computed_again_after_a_preemption():
    engine = make_engine(budget=8, num_blocks=8, caching=False, max_num_seqs=2)
    engine.add("a", range(20), features=[picture("a", 0, 18)], max_tokens=20)
    engine.add("b", range(20), features=[picture("b", 0, 18)], max_tokens=20)
    for _ in range(4):
        engine.step()
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert not engine.scheduler._encoders.cache.num_used_rows
    before = engine.executor.num_encoded
    engine.run()
    assert engine.executor.num_encoded > before
    assert len(engine.tokens("b")) == 20


def test_a_waiting_request_can_end():
    engine = make_engine(rows=30)
    for name in "ab":
        engine.add(name, range(25), features=[picture(name, 0, 20, tokens=100)])
    engine.schedule()
    assert engine.scheduler.requests["b"].status == RequestStatus.WAITING_FOR_ENCODER
    engine.scheduler.finish_requests(["b"], RequestStatus.FINISHED_ABORTED)
    engine.run()


def test_a_picture_that_never_fits_is_refused():
    engine = make_engine(rows=8)
    with pytest.raises(RequestError, match=r"Item 1 .image. has 9 embeddings, .* holds 8"):
        engine.add("r", range(25), features=[picture("a", 0, 9)])


def whole(name, offset, length, **fields):
    """Return a picture whose tokens see each other."""
    return picture(name, offset, length, ranges=((offset, offset + length),), **fields)


def test_a_chunk_does_not_end_among_tokens_that_see_each_other():
    engine = make_engine(budget=20, max_num_seqs=2)
    engine.add("r", range(50), features=[whole("a", 2, 10), whole("b", 15, 15), whole("c", 30, 3)])
    steps = [engine.schedule() for _ in range(4)]
    assert [scheduled_tokens(step)["r"] for step in steps] == [15, 20, 15, 1]
    # Several ranges of one item
    marks = bytes([1] * 8 + [0] * 2 + [1] * 8)
    ranges = ((2, 10), (12, 20))
    engine = make_engine(budget=9, max_num_seqs=2)
    engine.add("r", range(30), features=[picture("a", 2, 18, marks, ranges=ranges)])
    assert [scheduled_tokens(engine.schedule())["r"] for _ in range(4)] == [2, 9, 9, 9]


def test_a_threshold_does_not_cut_tokens_that_see_each_other():
    engine = make_engine(long_prefill_token_threshold=4)
    engine.add("r", range(16), features=[whole("a", 2, 10)])
    engine.add("s", range(16))
    steps = [engine.schedule() for _ in range(2)]
    assert [scheduled_tokens(step) for step in steps] == [{"r": 12, "s": 4}, {"r": 4, "s": 4}]


def test_tokens_that_see_each_other_are_not_overtaken_for_ever():
    """No text takes the room for which a running or a waiting request waits."""
    engine = make_engine(budget=20, max_num_seqs=4)
    engine.add("first", range(15), max_tokens=9)
    engine.add("r", range(30), features=[whole("a", 2, 17), whole("b", 20, 10)])
    engine.add("text", range(100))
    assert scheduled_tokens(engine.schedule()) == {"first": 15, "r": 2, "text": 3}
    assert scheduled_tokens(engine.schedule()) == {"first": 1, "r": 18, "text": 1}
    assert scheduled_tokens(engine.schedule()) == {"first": 1, "r": 10, "text": 9}
    engine.add("waiting", range(16), features=[whole("c", 0, 16)])
    engine.add("later", range(60))
    while "waiting" not in (step := scheduled_tokens(engine.schedule())):
        assert "later" not in step
    engine.run()


def test_more_tokens_that_see_each_other_than_a_step_has_room_for_are_refused():
    engine = make_engine(budget=20, max_num_seqs=4)
    with pytest.raises(RequestError, match=r"Item 1 .image.: 18 tokens .* room for 17 .* to 21"):
        engine.add("r", range(25), features=[whole("a", 0, 18)])


def test_a_hit_may_end_among_tokens_that_see_each_other():
    """The known part has been computed with all of them; the step has the rest."""
    engine = make_engine(budget=24, max_num_seqs=2)
    features = [whole("a", 2, 20)]
    engine.add("1", range(30), features=features)
    engine.run()
    engine.add("2", [*range(22), *range(8)], features=features)
    step = engine.schedule()
    assert (step.scheduled_reqs[0].new.num_computed_tokens, scheduled_tokens(step)["2"]) == (16, 14)


def test_a_prompt_that_sees_all_of_itself_is_one_step_and_known_as_a_whole():
    engine = make_engine(rows=40, budget=40, max_num_seqs=3)

    def add(name, last=29):
        ranges = ((0, 30),)
        pictures = [picture("a", 0, 8, ranges=ranges), picture("b", 8, 8, ranges=ranges)]
        engine.add(name, [*range(29), last], features=pictures, max_tokens=20)

    for name, last, count in ("1", 29, 30), ("2", 28, 30), ("3", 28, 6):
        add(name, last)
        step = engine.schedule()
        assert scheduled_tokens(step)[name] == count
        assert list(step.scheduled_encoder_inputs) == ([name] if name == "1" else [])
    engine.run()
    engine.scheduler.reset_prefix_cache()
    # Encoders compute all of its pictures in that step.
    add("3")
    engine.add("4", range(9), features=[picture("c", 0, 8, tokens=30)])
    engine.scheduler._encoders.cache.forget_all()
    assert list(engine.schedule().scheduled_encoder_inputs) == ["3"]
    engine.run()


def test_the_worker_gets_no_data_of_computed_items():
    features = [picture("a", 0, 4), picture("b", 4, 4)]
    request = Request(core_request("p", range(9), core_params(), mm_features=features))
    inputs = EncoderInputs(8, 8, 1)
    assert [bool(item.data) for item in inputs.data_for_worker(request, 4)] == [False, True]
    assert request.mm_features[0].data


@pytest.mark.parametrize("begin", [0, 2])
def test_the_worker_gets_the_data_of_an_item_in_slices_once(begin):
    """Either with the request, or with the first slice. The executor checks that it has them."""
    engine = make_cut()
    engine.add("p", range(20), features=[picture("p", begin, 8)], max_tokens=2)
    steps = [engine.schedule() for _ in range(5)]
    parts = [step.encoder_slice for step in steps]
    given = [part is not None and bool(part.item.data) for part in parts]
    given += [
        bool(item.data)
        for step in steps
        for request in step.scheduled_reqs
        if request.new is not None
        for item in request.new.mm_features
    ]
    assert sum(given) == 1
    engine.run()


def test_an_item_whose_run_was_forgotten_is_sent_again():
    engine = make_cut()
    engine.add("p", range(20), features=[picture("p", 0, 8)], max_tokens=2)
    assert slices([engine.schedule()]) == [(0, 1)]
    engine.scheduler.reset_encoder_cache()
    step = engine.schedule()
    assert slices([step]) == [(0, 1)]
    assert step.encoder_slice.item.data
    engine.run()


@pytest.mark.parametrize("fate", ["running", "preempted", "aborted"])
def test_what_depends_on_a_failed_item_is_forgotten(fate):
    """So is what the request has released: blocks before a window, all blocks at its end."""
    engine = make_engine(caches=pages(None, 16))
    engine.add("1", range(60), features=[picture("a", 10, 10)])
    engine.schedule()
    engine.schedule()
    if fate == "preempted":
        engine.scheduler._table.preempt_all()
    elif fate == "aborted":
        engine.scheduler.finish_requests(["1"], RequestStatus.FINISHED_ABORTED)
    pool, items = engine.scheduler.kv_cache_manager.pool, engine.scheduler._encoders.cache
    assert [len(pool.cached_blocks(group)) for group in range(2)] == [7, 7]
    assert "a" in items
    engine.in_flight[0][1].errors["1"] = "its encoder failed"
    engine.update()
    # The first block ends before the picture.
    assert [len(pool.cached_blocks(group)) for group in range(2)] == [1, 1]
    assert "a" not in items
    engine.run()


def test_all_of_a_range_depends_on_a_failed_item():
    engine = make_engine(rows=40, budget=40)
    engine.add("1", range(30), features=[picture("a", 10, 10, ranges=((0, 30),))])
    engine.schedule()
    known = engine.scheduler.kv_cache_manager.pool.cached_blocks(0)
    assert len(known) == 3
    engine.in_flight[0][1].errors["1"] = "its encoder failed"
    engine.update()
    assert not known
    engine.run()


def test_an_error_before_the_first_item_forgets_nothing():
    engine = make_engine()
    engine.add("1", range(60), features=[picture("a", 40, 10)])
    engine.schedule()
    pool = engine.scheduler.kv_cache_manager.pool
    forget = engine.scheduler.kv_cache_manager.forget_items = Mock()
    known = len(pool.cached_blocks(0))
    engine.in_flight[0][1].errors["1"] = "its sampling parameters cannot be used"
    engine.update()
    assert known
    assert len(pool.cached_blocks(0)) == known
    assert not forget.called


def test_a_request_that_is_too_late_forgets_nothing():
    engine = make_engine()
    engine.add("1", range(25), features=[picture("a", 2, 10)], deadline=1.0)
    engine.step()
    engine.now = 2.0
    engine.step()
    assert engine.finish_reason("1").name == "ERROR"
    engine.add("2", range(25), features=[picture("a", 2, 10)])
    step = engine.schedule()
    assert (step.scheduled_encoder_inputs, scheduled_tokens(step)) == ({}, {"2": 1})
    engine.run()


def make_cut(pieces=4, **options):
    """Return an engine whose runs of encoders have some pieces; each step has a text."""
    engine = make_engine(encoder_pieces={"image": pieces}, num_blocks=60, **options)
    engine.add("text", range(5), max_tokens=90)
    engine.schedule()
    return engine


def slices(steps):
    """Return the pieces of the slices of steps."""
    parts = [step.encoder_slice for step in steps]
    return [None if part is None else (part.begin, part.end) for part in parts]


def test_pictures_that_see_each_other_are_computed_in_one_step_beside_a_text():
    engine = make_cut()
    pictures = [picture(name, at, 8, ranges=((0, 20),)) for name, at in (("p", 0), ("q", 8))]
    engine.add("p", range(20), features=pictures, max_tokens=2)
    step = engine.schedule()
    assert scheduled_tokens(step) == {"text": 1, "p": 20}
    assert step.scheduled_encoder_inputs == {"p": [0, 1]}
    engine.run()


def test_beside_a_text_a_run_takes_several_steps():
    engine = make_cut()
    engine.add("p", range(20), features=[picture("p", 2, 8)], max_tokens=2)
    steps = [engine.schedule() for _ in range(5)]
    assert slices(steps) == [(0, 1), (1, 2), (2, 3), (3, 4), None]
    assert all("text" in scheduled_tokens(step) for step in steps)
    # The tokens before the picture are computed at once; the others follow with the last slice.
    assert [scheduled_tokens(step).get("p") for step in steps] == [2, None, None, 18, 1]
    assert [step.scheduled_encoder_inputs for step in steps] == [{}, {}, {}, {"p": [0]}, {}]
    engine.run()


def test_a_prompt_that_begins_with_a_picture_starts_with_the_last_slice():
    engine = make_cut()
    engine.add("p", range(20), features=[picture("p", 0, 8)])
    engine.add("other", range(7), max_tokens=1)
    steps = [engine.schedule() for _ in range(4)]
    assert ["p" in scheduled_tokens(step) for step in steps] == [False] * 3 + [True]
    assert scheduled_tokens(steps[0])["other"] == 7  # texts behind it do not wait
    engine.run()


def test_without_texts_a_run_is_one_step():
    engine = make_engine(encoder_pieces={"image": 4})
    engine.add("1", range(20), features=[picture("a", 0, 8)], max_tokens=9)
    engine.add("2", range(20), features=[picture("b", 0, 8)], max_tokens=9)
    steps = [engine.schedule() for _ in range(3)]
    assert slices(steps) == [None] * 3
    assert steps[0].scheduled_encoder_inputs | steps[1].scheduled_encoder_inputs == {
        "1": [0],
        "2": [0],
    }


def test_the_rest_of_a_run_is_one_slice_once_the_texts_have_ended():
    engine = make_cut()
    engine.add("p", range(20), features=[picture("p", 0, 8)])
    engine.schedule()
    engine.scheduler.finish_requests(["text"], RequestStatus.FINISHED_ABORTED)
    step = engine.schedule()
    assert slices([step]) == [(1, 4)]
    assert step.scheduled_encoder_inputs == {"p": [0]}
    engine.run()


def test_the_run_in_progress_ends_first():
    engine = make_cut(pieces=2, rows=500)
    for name in "abc":
        engine.add(name, range(20), features=[picture(name, 0, 8)], max_tokens=1)
    steps = [engine.schedule() for _ in range(6)]
    assert slices(steps) == [(0, 1), (1, 2)] * 3
    assert [list(step.scheduled_encoder_inputs) for step in steps[1::2]] == [["a"], ["b"], ["c"]]
    engine.run()


def test_a_run_without_use_makes_place_for_the_next_one():
    """Its request has no seat, and a request that has one needs another item."""
    engine = make_cut(max_num_seqs=2, budget=16)
    engine.add("two", range(30), features=[picture("a", 4, 8), picture("b", 16, 8)], max_tokens=1)
    assert scheduled_tokens(engine.schedule())["two"] == 4
    run = engine.scheduler._encoders._run
    assert run.item.identifier == "a"
    engine.add("late", range(20), features=[picture("c", 0, 8)], max_tokens=1)
    # As if the run of the waiting request had begun first.
    run.request, run.item = engine.scheduler.requests["late"], picture("c", 0, 8)
    engine.executor.slice = ("c", run.num_done)
    steps = [engine.schedule() for _ in range(16)]
    assert {"two": [0]} in [step.scheduled_encoder_inputs for step in steps]
    engine.run()


@pytest.mark.parametrize(("seats", "rows"), [(2, 500), (4, 455)], ids=["seat", "rows"])
def test_a_run_that_waits_for_room_is_not_computed_again(seats, rows):
    """A running prompt, whose picture is known, takes the time of the steps meanwhile."""
    engine = make_slow(max_num_seqs=seats)
    cache = engine.scheduler._encoders.cache
    cache.num_rows = rows
    engine.add("long", range(450), features=[picture("l", 0, 450, tokens=4)], max_tokens=1)
    while "l" not in cache:
        engine.step()
    for name in "ab":
        engine.add(name, range(10), features=[picture(name, 0, 10, tokens=40)], max_tokens=1)
    parts = [part for _, part in run_steps(engine, ["long", "a", "b"]) if part is not None]
    assert parts == [(0, 1), (1, 2), (2, 3), (3, 4)] * 2
    engine.run()


def test_a_run_ends_with_its_request():
    engine = make_cut()
    engine.add("p", range(20), features=[picture("p", 0, 8)])
    engine.schedule()
    engine.scheduler.finish_requests(["p"], RequestStatus.FINISHED_ABORTED)
    assert slices([engine.schedule()]) == [None]
    assert engine.scheduler._encoders._run is None


def test_a_run_begins_again_after_a_reset():
    engine = make_cut()
    engine.add("p", range(20), features=[picture("p", 0, 8)])
    engine.schedule()
    assert engine.scheduler.reset_encoder_cache()
    assert slices([engine.schedule()]) == [(0, 1)]
    engine.run()


def test_a_run_begins_again_after_a_failed_step():
    engine = make_cut()
    engine.update()
    engine.add("p", range(20), features=[picture("p", 0, 8)])
    work = engine.schedule()
    assert slices([work]) == [(0, 1)]
    engine.in_flight.clear()
    engine.scheduler.fail_step(work, "failed")
    engine.executor.forget()
    step = engine.schedule()  # the text has failed, so the run is whole
    assert slices([step]) == [None]
    assert step.scheduled_encoder_inputs == {"p": [0]}


def make_slow(**options):
    """Return an engine with a text; a step takes 0.01 s, and work for items 0.001 s a token."""
    engine = make_engine(
        encoder_pieces={"image": 4},
        budget=256,
        rows=500,
        num_blocks=120,
        max_model_len=512,
        caching=False,
        **options,
    )
    engine.add("text", range(5), max_tokens=500)
    engine.step()
    pace = engine.scheduler._encoders.pace
    pace._step, pace._costs = 0.01, {"prompt": 0.001, "image": 0.001}
    return engine


def run_steps(engine, names):
    """Run steps until requests have a token; return their chunks and the pieces of each step."""
    found = []
    while not all(any(out.new_token_ids for out in engine.outputs[name]) for name in names):
        step = engine.schedule()
        assert scheduled_tokens(step)["text"] == 1
        chunks = {name: n for name, n in scheduled_tokens(step).items() if name in names and n > 1}
        found.append((chunks, *slices([step])))
        engine.now += 0.01 + engine.scheduler._in_flight[-1].item_work.seconds
        engine.update()
    return found


def test_beside_a_text_a_prompt_with_a_picture_is_computed_in_short_chunks():
    """Its chunks and the pieces of its run take 0.002 s of each step."""
    engine = make_slow()
    engine.add("p", range(84), features=[picture("p", 0, 70, tokens=40)], max_tokens=2)
    found = run_steps(engine, ["p"])
    assert [one for one in found if one != ({}, None)] == [
        ({}, (0, 1)),
        ({}, (1, 2)),
        ({}, (2, 3)),
        ({"p": 32}, (3, 4)),
        ({"p": 32}, None),
        ({"p": 20}, None),
    ]
    spent = 0.0
    for i, (chunks, part) in enumerate(found):
        own = 0.001 * chunks.get("p", 0) + 0.01 * (part is not None)
        assert not own or spent < 0.002 * (i + 1) + 1e-9
        spent += own
    engine.run()


def test_a_run_and_prompts_of_others_take_turns():
    engine = make_slow(max_num_seqs=3)
    cache = engine.scheduler._encoders.cache
    engine.add("a", range(150), features=[picture("a", 0, 150, tokens=4)], max_tokens=1)
    while "a" not in cache:
        engine.step()
    engine.add("b", range(10), features=[picture("b", 0, 10, tokens=100)], max_tokens=1)
    work = [one for one in run_steps(engine, ["a", "b"]) if one != ({}, None)]
    kinds = ["chunk" if chunks else "piece" for chunks, _ in work]
    assert kinds[:6] in (["chunk", "piece"] * 3, ["piece", "chunk"] * 3)
    engine.run()


def test_a_range_has_all_its_tokens_at_once_beside_texts():
    engine = make_slow(max_num_seqs=3)
    engine.add("p", range(90), features=[whole("p", 10, 60, tokens=4)], max_tokens=1)
    chunks = [one[0]["p"] for one in run_steps(engine, ["p"]) if one[0]]
    assert chunks == [10, 60, 20]
    engine.run()


@pytest.mark.parametrize("tenants", [(None, None), ("x", "y")])
@pytest.mark.parametrize("begin", [0, 20], ids=["waiting", "running"])
def test_a_line_saves_tokens_for_those_that_see_each_other(tenants, begin):
    engine = make_engine(budget=200, max_model_len=256, num_blocks=64)
    online = engine.add("online", [1] * 4, max_tokens=60, tenant=tenants[0])
    engine.step()
    item = picture("a", begin, 60, ranges=((begin, begin + 60),))
    line = engine.add(
        "line", range(90), features=[item], background=True, max_tokens=2, tenant=tenants[1]
    )
    engine.add("behind", range(90, 180), background=True, max_tokens=2, tenant=tenants[1])
    of_lines = []
    while not online.status.finished:
        engine.step()
        work = scheduled_tokens(engine.steps[-1])
        if "online" in work:
            of_lines.append(sum(work.values()) - 1)
    assert line.status.finished
    assert all(sum(of_lines[:n]) <= 16 * n for n in range(1, len(of_lines)))
    engine.run()


def test_a_line_saves_no_tokens_alone():
    engine = make_engine(budget=64)
    engine.add(
        "line", range(30), features=[picture("a", 0, 28, ranges=((0, 28),))], background=True
    )
    assert scheduled_tokens(engine.schedule()) == {"line": 30}
    assert engine.scheduler._builder._background.num_saved == 0


def test_whole_runs_have_a_pace_beside_answers_of_tenants_that_are_less_served():
    def request(name, tenant):
        core = core_request(name, range(4), core_params(), mm_features=[picture(name, 0, 4)])
        core.options = msgspec.structs.replace(core.options, tenant=tenant)
        return Request(core)

    inputs = EncoderInputs(0, 8, 8, has_cross=True)
    counters = {"much": 10, "little": 1}
    answer, own, new = request("a", "little"), request("b", "much"), request("c", "much")
    running = [own, answer]
    # Nothing is known yet; then a step takes a second, and a run four.
    inputs.begin_step(running)
    inputs.pace._step, inputs.pace._costs["image"] = 1.0, 1.0
    assert not inputs.must_wait(new, running, counters.__getitem__)
    inputs.add_run(new, running, counters.__getitem__)
    waits = []
    for _ in range(9):
        inputs.begin_step(running)
        waits.append(inputs.must_wait(new, running, counters.__getitem__))
    assert waits == [True] * 7 + [False] * 2  # half a second of each step pays for it
    inputs.add_run(new, running, counters.__getitem__)
    for others, served in (([own], counters), ([own, answer], {"much": 1, "little": 10})):
        assert not inputs.must_wait(new, others, served.__getitem__)
    answer.queue_key = (1, 1, 1)
    assert not inputs.must_wait(new, running, counters.__getitem__)
    inputs.begin_step([])
    assert inputs.pace.may_begin  # nothing is owed to others any more


@pytest.mark.parametrize("max_tokens", [1, 20])
def test_a_flood_of_whole_runs_takes_a_third_of_the_time_of_an_answer(max_tokens):
    """A run has many tokens, as those of sounds have, and takes as long as ten steps."""

    def add(name, tenant, seed, max_tokens):
        core = core_request(name, [0], core_params(max_tokens=max_tokens), tenant=tenant)
        core.mm_features = [text_feature([seed] * 150, None)]
        scheduler.add_request(Request(core, None))

    now = 0.0
    caches = KVCacheConfig(9999, 8, make_kv_cache_groups([AttentionCache(1, 8), CrossCache(1, 8)]))
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=8),
        caches,
        max_model_len=500,
        max_num_batched_tokens=200,
        clock=lambda: now,
    )
    add("answer", "a", 0, 400)
    num_runs = num_steps = 0
    while "answer" in scheduler.requests:
        while len(scheduler.requests) < 6:
            add(f"run {num_runs} {len(scheduler.requests)} {num_steps}", "b", num_steps, max_tokens)
        work = scheduler.schedule()
        ids = [scheduled.req_id for scheduled in work.scheduled_reqs]
        now += 0.01 + 0.1 * len(work.scheduled_encoder_inputs)
        num_steps += 1
        num_runs += len(work.scheduled_encoder_inputs) if num_steps > 100 else 0
        scheduler.update_from_output(work, ModelRunnerOutput(ids, [[1]] * len(ids)))
    assert 8 < num_runs < 20  # in 300 steps, half of whose time pays for 15 runs
