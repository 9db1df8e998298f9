import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo._native import SuffixAutomaton
from octavo.config import EngineConfig
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.messages import NewRequestData
from octavo.models.cache import AttentionCache
from octavo.plan.draft_sizes import SUFFIX_NBYTES_PER_TOKEN
from octavo.worker.input_batch import UNKNOWN, InputBatch
from octavo.worker.spec_decode import suffix
from octavo.worker.spec_decode.base import Target
from octavo.worker.spec_decode.suffix import SuffixProposer
from tests.params import core_params

texts = st.lists(st.integers(0, 2), max_size=25)


def add(automaton, tokens):
    automaton.add(np.array(tokens, np.int32).ctypes.data, len(tokens))


def match(automaton, tokens, most=4):
    return automaton.match(np.array(tokens, np.int32).ctypes.data, len(tokens), most)


@given(st.lists(texts, max_size=6), texts)
def test_the_longest_known_end_that_went_on(known, tokens):
    automaton = SuffixAutomaton()
    for text in known:
        add(automaton, text)
    assert len(automaton) == sum(len(text) + 1 for text in known)
    length, following = match(automaton, tokens)

    def places(end):
        """Return the places in the known texts where a run is followed by a token."""
        return [
            text[i + len(end) :][:4]
            for text in known
            for i in range(len(text) - len(end))
            if text[i : i + len(end)] == end
        ]

    if length:
        assert following in places(tokens[-length:])
    else:
        assert following == []
    # A run that was last at the end of a text may hide an earlier place: only then a longer one.
    ends = {tuple(text[i:]) for text in known for i in range(len(text))}
    for longer in range(length + 1, len(tokens) + 1):
        end = tokens[-longer:]
        assert not places(end) or tuple(end) in ends


def test_the_most_recent_place_is_taken():
    automaton = SuffixAutomaton()
    add(automaton, [1, 2, 3, 4])
    add(automaton, [9, 2, 3, 5, 6])
    assert match(automaton, [2, 3]) == (2, [5, 6])
    assert match(automaton, [1, 2, 3]) == (3, [4])


def test_it_takes_no_more_memory_than_planned():
    automaton = SuffixAutomaton()
    tokens = np.random.default_rng(0).integers(0, 50, 20_000).astype(np.int32)
    automaton.add(tokens.ctypes.data, len(tokens))
    assert automaton.nbytes < SUFFIX_NBYTES_PER_TOKEN * len(automaton)
    assert len(automaton) == len(tokens) + 1


def test_what_is_no_token_is_refused():
    with pytest.raises(IndexError, match="negative"):
        add(SuffixAutomaton(), [1, -1])


class Bench:
    """Proposer and rows for three requests."""

    def __init__(self, **config):
        config = {"method": "suffix", "num_speculative_tokens": 4} | config
        setup = type("Setup", (), {"config": EngineConfig.from_kwargs(speculative_config=config)})
        kv = KVCacheConfig(8, 16, make_kv_cache_groups([AttentionCache(1, 1)]))
        self.batch = InputBatch(3, 200, kv)
        self.proposer = SuffixProposer(Target(setup, None, self.batch, *5 * [None]))

    def add(self, req_id, prompt, output=(), *, private=False):
        data = NewRequestData([*prompt, *output], len(prompt), core_params(), 0, private=private)
        row = self.batch.add(req_id, data)
        self.proposer.add_row(row, data)

    def remove(self, req_id):
        self.proposer.remove_row(self.batch.remove(req_id))

    def propose(self, req_id, count=4):
        rows, counts = np.array([self.batch.row_of[req_id]]), np.array([count])
        return list(self.proposer.propose(rows, counts).token_ids[0])


def test_earlier_answers_are_found():
    bench = Bench()
    bench.add("a", [1, 2], [10, 11, 12, 13, 14])
    assert bench.propose("a") == []
    bench.add("b", [3, 4, 10, 11, 12])
    assert bench.propose("b") == [], "an answer is known once it is whole"
    bench.remove("a")
    assert bench.propose("b") == [13, 14]
    assert bench.propose("b", 1) == [13]
    bench.add("c", [5, 1, 2])
    assert bench.propose("c") == [10, 11], "no longer than the match: one that short tells little"


def test_the_longer_match_wins():
    bench = Bench()
    bench.add("a", [1], [7, 8, 9, 20, 21])
    bench.remove("a")
    bench.add("b", [8, 9, 30, 31, 8, 9])
    assert bench.propose("b") == [30, 31]
    bench.add("c", [8, 9, 30, 31, 7, 8, 9])
    assert bench.propose("c") == [20, 21]


def test_private_requests_give_and_take_nothing():
    bench = Bench()
    bench.add("a", [1], [7, 8, 9, 20, 21], private=True)
    bench.remove("a")
    bench.add("b", [7, 8, 9])
    assert bench.propose("b") == []
    bench.remove("b")
    bench.add("a", [1], [7, 8, 9, 20, 21])
    bench.remove("a")
    bench.add("b", [7, 8, 9], private=True)
    assert bench.propose("b") == []
    bench.remove("b")
    bench.add("b", [7, 8, 9])
    assert bench.propose("b") == [20, 21], "a row is private as long as its request has it"


def test_tokens_that_are_on_their_way_are_no_part_of_an_answer():
    bench = Bench()
    bench.add("a", [1], [7, 8, 9, 20])
    bench.batch.append(np.array([0]), np.array([UNKNOWN]), np.array([1]))
    bench.remove("a")
    bench.add("b", [7, 8, 9])
    assert bench.propose("b") == [20]


def test_old_answers_are_forgotten(monkeypatch):
    monkeypatch.setattr(suffix, "SUFFIX_TOKENS", 20)
    bench = Bench()
    for i in range(10, 60, 10):
        bench.add("a", [1], [*range(i, i + 9)])
        bench.remove("a")
    for i, expected in ((10, []), (20, []), (40, [43, 44, 45]), (50, [53, 54, 55])):
        bench.add("b", [i, i + 1, i + 2])
        assert bench.propose("b") == expected
        bench.remove("b")


def test_an_answer_without_tokens_and_one_without_a_match():
    bench = Bench(prompt_lookup_min=3)
    bench.add("a", [1, 2, 3])
    bench.remove("a")
    bench.add("a", [1], [7, 8, 9])
    bench.remove("a")
    bench.add("b", [7, 8])
    assert bench.propose("b") == []
