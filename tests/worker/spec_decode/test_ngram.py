import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from octavo.config import EngineConfig
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.messages import NewRequestData
from octavo.models.cache import AttentionCache
from octavo.worker.input_batch import InputBatch
from octavo.worker.spec_decode.base import Target
from octavo.worker.spec_decode.ngram import NgramProposer, look_up
from tests.params import core_params


def find(tokens, longest=5, count=3):
    return look_up(np.array(tokens, np.int32), longest, count)


def test_the_longest_match_wins_and_then_the_most_recent():
    assert find([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]) == (3, [9, 2, 3])
    assert find([5, 3, 7, 1, 3, 8, 2, 3]) == (1, [8, 2, 3])


def test_nothing_is_found():
    assert find([1, 2, 3, 4]) == (0, [])
    assert find([1]) == (0, [])


def test_what_repeats_goes_on_repeating():
    assert find([7, 1, 2, 1, 2], count=5) == (2, [1, 2, 1, 2, 1])
    assert find([4, 4], count=4) == (1, [4, 4, 4, 4])


def test_no_more_is_looked_for_than_asked():
    tokens = [1, 2, 3, 9, 5, 2, 3, 8, 1, 2, 3]
    assert find(tokens, longest=3) == (3, [9, 5, 2])
    assert find(tokens, longest=2) == (2, [8, 1, 2])


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 6), st.integers(1, 6))
def test_as_one_would_search_by_hand(tokens, longest, count):
    """The text continues after its end as it did after the match."""
    found = (0, [])
    for end in range(1, len(tokens)):
        length = 0
        while length < min(end, longest) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        if length and length >= found[0]:
            text = list(tokens)
            for i in range(count):
                text.append(text[end + i])
            found = (length, text[len(tokens) :])
    assert find(tokens, longest, count) == found


def test_a_match_is_as_long_as_the_settings_say():
    """A shorter match does not count, and of a longer one only the maximum of tokens."""
    config = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3}
    setup = type("Setup", (), {"config": EngineConfig.from_kwargs(speculative_config=config)})
    batch = InputBatch(3, 20, KVCacheConfig(8, 16, make_kv_cache_groups([AttentionCache(1, 1)])))
    for prompt in ([8, 3, 9, 7, 3], [2, 3, 9, 2, 3], [1, 2, 3, 4, 9, 2, 3, 4, 8, 1, 2, 3, 4]):
        data = NewRequestData(prompt, len(prompt), core_params(), 0)
        batch.add(str(prompt), data)
    proposer = NgramProposer(Target(setup, None, batch, *5 * [None]))
    proposal = proposer.propose(np.array([1, 0, 2]), np.array([1, 2, 2]))
    assert [list(drafts) for drafts in proposal.token_ids] == [[9], [], [8, 1]]
