"""Persistent rows: added, appended, resumed and removed."""

import math

import msgspec
import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.messages import BadWordsTokenIds
from octavo.sampling.logits_processors.builtin import (
    AllowedTokenIds,
    BadWords,
    LogitBias,
    MinTokens,
)
from octavo.sampling.logits_processors.penalties import Penalties
from octavo.sampling.metadata import NO_LOGPROBS
from octavo.sampling.sizes import state_nbytes
from octavo.sampling.state import SamplingState
from octavo.system.tensor import from_numpy
from tests.params import Params, core_params

VOCAB = 100


def changed(meta, *kinds, logit=2.0):
    """Return (row, token) -> the logit changed by processors of the given kinds."""
    logits = np.full((meta.num_rows, VOCAB), logit, np.float32)
    for processor, step in meta.processors:
        if isinstance(processor, kinds):
            processor.apply(NativeOps(), from_numpy(logits), step)
    at = np.argwhere(logits != logit).tolist()
    return {(row, token): logits[row, token].item() for row, token in at}


def banned(meta):
    return {key for key, value in changed(meta, BadWords, MinTokens).items() if value == -math.inf}


def same(a, b):
    """Return whether two metadata are equal."""
    if not np.array_equal(a.params, b.params) or not np.array_equal(a.num_logprobs, b.num_logprobs):
        return False
    kinds = (AllowedTokenIds, BadWords, MinTokens, LogitBias, Penalties)
    return [type(p) for p, _ in a.processors] == [type(p) for p, _ in b.processors] and all(
        changed(a, kind, logit=logit) == changed(b, kind, logit=logit)
        for kind in kinds
        for logit in (2.0, -3.0)
    )


RICH = Params(
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    min_p=0.1,
    seed=-1,
    repetition_penalty=1.5,
    frequency_penalty=0.25,
    presence_penalty=0.5,
    logit_bias={3: 1.5, 7: -2.0},
    allowed_token_ids=[1, 2, 3, 3],
    min_tokens=3,
    max_tokens=50,
    logprobs=4,
    bad_words_token_ids=[[9], [1, 2, 8]],
    all_stop_token_ids=[0, 50, VOCAB, 5000],
).core(VOCAB)


def drawn(params, position):
    """Return the random numbers of a position of a request."""
    return (params.seed % 2**64, position)


def numbers(row):
    return (row["seed"], row["position"])


def append(state, row, *tokens):
    """Append generated tokens to a row."""
    state.append(np.array([row]), np.array(tokens), np.array([len(tokens)]))


PLAIN = core_params(temperature=0.0)
ONE = np.array([1])


def test_metadata_holds_the_parameters():
    state = SamplingState(4, VOCAB)
    state.add_row(1, RICH, [10, 11, 11], 3)
    meta = state.metadata(ONE)
    assert meta.num_rows == 1
    expected = (np.float32(0.7), np.float32(0.1), 0.9, *drawn(RICH, 0), 0, 5)
    assert meta.params[0].tolist() == expected
    assert meta.num_logprobs[0] == 4
    assert changed(meta, LogitBias) == {(0, 3): 3.5, (0, 7): 0.0}
    excluded = {(0, token) for token in range(VOCAB) if token not in (1, 2, 3)}
    assert changed(meta, AllowedTokenIds) == dict.fromkeys(excluded, -math.inf)
    assert banned(meta) == {(0, 9), (0, 0), (0, 50)}
    assert changed(meta, Penalties, logit=3.0) == {(0, 10): 2.0, (0, 11): 2.0}
    assert changed(meta, Penalties, logit=-2.0) == {(0, 10): -3.0, (0, 11): -3.0}


def test_plain_rows_need_nothing():
    state = SamplingState(4, VOCAB)
    state.add_row(0, RICH, [10], 1)
    state.add_row(1, PLAIN, [10], 1)
    meta = state.metadata(ONE)
    assert meta.plain
    assert meta.num_logprobs[0] == NO_LOGPROBS
    assert state.metadata(np.array([1, 0])).processors
    assert not state.needs_tokens(ONE), "what the other row waits for does not hold this one up"
    assert state.needs_tokens(np.array([1, 0]))
    words = core_params(temperature=0.0, bad_words_token_ids=[[1, 2]])
    state.add_row(2, words, [10], 1)
    assert state.needs_tokens(np.array([1, 2]))


def test_rows_follow_the_order_asked_for():
    state = SamplingState(4, VOCAB)
    state.add_row(0, RICH, [10], 1)
    state.add_row(3, PLAIN, [10], 1)
    meta = state.metadata(np.array([3, 0]))
    assert meta.params["temperature"].tolist() == [0.0, np.float32(0.7)]
    assert set(changed(meta, LogitBias)) == {(1, 3), (1, 7)}
    assert {row for row, _ in changed(meta, AllowedTokenIds)} == {1}
    assert set(changed(meta, Penalties)) == {(1, 10)}


def test_append_counts_and_moves_on():
    state = SamplingState(4, VOCAB)
    other = core_params(seed=9)
    state.add_row(0, RICH, [10], 1)
    state.add_row(2, other, [10], 1)
    rows = np.array([2, 0])
    for tokens in ([5, 10], [5, 20], [5, 20]):
        state.append(rows, np.array(tokens), np.ones(2, np.int64))
    meta = state.metadata(np.array([0]))
    assert numbers(meta.params[0]) == drawn(RICH, 3)
    # Once and twice the frequency penalty, and the presence penalty.
    assert changed(meta, Penalties, logit=3.0) == {(0, 10): 1.25, (0, 20): 1.0}
    assert banned(meta) == {(0, 9)}  # min_tokens is reached
    assert numbers(state.metadata(np.array([2])).params[0]) == drawn(other, 3)


def test_several_tokens_at_once_equal_one_after_the_other():
    rng = np.random.default_rng(3)
    frequent = core_params(seed=5, frequency_penalty=1.0)
    words = core_params(temperature=0.0, bad_words_token_ids=[[9], [1, 2, 8], [2, 1]])
    kinds = [RICH, PLAIN, frequent, words, core_params(seed=4, min_tokens=9, stop_token_ids=[2])]
    at_once, one_by_one = SamplingState(5, VOCAB), SamplingState(5, VOCAB)
    for state in (at_once, one_by_one):
        for row, params in enumerate(kinds):
            state.add_row(row, params, [1, 2, 3], 2)
    for _ in range(8):
        rows = rng.permutation(5)
        counts = rng.integers(0, 5, 5)
        tokens = rng.integers(0, 4, counts.sum())  # a small range: tokens often repeat
        at_once.append(rows, tokens, counts)
        pieces = np.split(tokens, np.cumsum(counts)[:-1])
        for row, some in zip(rows.tolist(), pieces, strict=True):
            for token in some.tolist():
                append(one_by_one, row, token)
        assert same(at_once.metadata(np.arange(5)), one_by_one.metadata(np.arange(5)))


def test_counts_are_known_before_the_tokens():
    state, other = SamplingState(2, VOCAB), SamplingState(2, VOCAB)
    for each in (state, other):
        each.add_row(1, RICH, [1], 1)
    state.advance(ONE, np.array([3]))
    meta = state.metadata(ONE)
    assert numbers(meta.params[0]) == drawn(RICH, 3)
    assert set(changed(meta, Penalties)) == {(0, 1)}
    state.record(ONE, np.array([5, 6, 5]), np.array([3]))
    append(other, 1, 5, 6, 5)
    assert same(state.metadata(ONE), other.metadata(ONE))


def test_offsets_give_what_the_row_would_have_after_its_drafts():
    params = core_params(seed=6, min_tokens=3, stop_token_ids=[7], logit_bias={2: 1.0}, logprobs=1)
    state = SamplingState(3, VOCAB)
    state.add_row(0, PLAIN, [1], 1)
    state.add_row(1, params, [1, 2], 1)
    # Two rows, the second one with three drafts after its last token.
    meta = state.metadata(np.array([1, 1, 0, 1, 1]), np.array([0, 1, 0, 2, 3]))
    seen = banned(meta)
    for i, position in ((0, 0), (1, 1), (3, 2), (4, 3)):
        alone = state.metadata(ONE)
        assert meta.params[i] == alone.params[0]
        assert numbers(meta.params[i]) == drawn(params, position + 1)
        assert {t for row, t in seen if row == i} == {t for _, t in banned(alone)}
        assert meta.num_logprobs[i] == 1
        append(state, 1, 4)
    assert set(changed(meta, LogitBias)) == {(i, 2) for i in (0, 1, 3, 4)}
    assert seen == {(0, 7), (1, 7)}


def test_bad_word_is_banned_only_after_its_beginning():
    state = SamplingState(1, VOCAB)
    params = core_params(temperature=0.0, bad_words_token_ids=[[1, 2, 8], [2, 7], [4]])
    # The prompt ends with the word's beginning, but only generated tokens count.
    state.add_row(0, params, [1, 2], 2)

    def tokens():
        return {token for _, token in banned(state.metadata(np.array([0])))}

    seen = [tokens()]
    for token in (1, 2, 2, 1, 2):
        append(state, 0, token)
        seen.append(tokens())
    assert seen == [{4}, {4}, {4, 7, 8}, {4, 7}, {4}, {4, 7, 8}]


def test_only_repetition_looks_at_the_prompt():
    state = SamplingState(1, VOCAB)
    state.add_row(0, core_params(temperature=0.0, presence_penalty=1.0), [1, 2, 3], 2)
    assert set(changed(state.metadata(np.array([0])), Penalties)) == {(0, 3)}


@pytest.mark.parametrize("cut", [0, 1, 7, 20])
def test_resumed_row_equals_one_that_never_stopped(cut):
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 12, 9).tolist()
    output = rng.integers(0, 12, 20).tolist()
    state, resumed = SamplingState(3, VOCAB), SamplingState(3, VOCAB)
    state.add_row(1, RICH, prompt, len(prompt))
    for token in output:
        append(state, 1, token)
    resumed.add_row(1, RICH, prompt + output[:cut], len(prompt))
    for token in output[cut:]:
        append(resumed, 1, token)
    assert same(state.metadata(ONE), resumed.metadata(ONE))


def test_tokens_to_report_belong_to_their_row_while_it_lives():
    state = SamplingState(3, 100)
    for row, ids in enumerate(([5, 6], None, [7])):
        state.add_row(row, core_params(logprob_token_ids=ids), [1, 2], 2)
    asked = state.metadata(np.array([2, 1, 0, 2])).logprob_token_ids
    assert {i: ids.tolist() for i, ids in asked.items()} == {0: [7], 2: [5, 6], 3: [7]}
    state.remove_row(2)
    assert list(state.metadata(np.array([2, 1, 0])).logprob_token_ids) == [2]


def test_removed_row_leaves_nothing_behind():
    used, fresh = SamplingState(2, VOCAB), SamplingState(2, VOCAB)
    used.add_row(1, RICH, [1, 2, 3, 4], 2)
    append(used, 1, 7)
    used.remove_row(1)
    meta = used.metadata(ONE)
    assert meta.params["temperature"][0] == 0.0
    assert meta.plain
    assert not used.needs_tokens(ONE)
    for params in (RICH, core_params(seed=1, frequency_penalty=1.0), PLAIN):
        for state in (used, fresh):
            state.add_row(1, params, [5, 6, 6], 1)
        assert same(used.metadata(ONE), fresh.metadata(ONE))
        for state in (used, fresh):
            state.remove_row(1)


def test_penalties_come_in_portions(monkeypatch):
    rng = np.random.default_rng(0)
    state = SamplingState(20, VOCAB)
    for row in range(20):
        params = core_params(seed=row, frequency_penalty=0.0 if row % 5 == 0 else 1.0)
        state.add_row(row, params, rng.integers(0, VOCAB, int(rng.integers(0, 80))).tolist(), 0)
    rows = np.array([*range(19, 0, -1)])
    portions, apply = [], Penalties._apply

    def spy(self, ops, logits, step):
        before = logits.numpy().copy()
        apply(self, ops, logits, step)
        portions.append(int((logits.numpy() != before).sum()))

    monkeypatch.setattr(Penalties, "_apply", spy)
    expected = changed(state.metadata(rows), Penalties)
    assert len(portions) == 1
    portions.clear()
    monkeypatch.setattr("octavo.sampling.sizes.CHUNK_ELEMENTS", 2 * VOCAB)
    assert changed(state.metadata(rows), Penalties) == expected
    assert 4 < len(portions) < 19
    assert max(portions) <= 2 * VOCAB // 4 + 80


def test_row_stays_empty_whatever_goes_wrong():
    state = SamplingState(2, VOCAB)
    broken = msgspec.structs.replace(
        core_params(temperature=0.0, repetition_penalty=2.0, logprobs=1),
        bad_words=BadWordsTokenIds(b"12345678", b"123"),
    )
    with pytest.raises(ValueError, match="buffer"):
        state.add_row(1, broken, [1, 2, 3], 1)
    assert same(state.metadata(ONE), SamplingState(2, VOCAB).metadata(ONE))
    # With steps scheduled ahead its request's failure is not known yet: it continues to sample.
    assert not state.needs_tokens(ONE)
    append(state, 1, 7)
    assert state.metadata(ONE).plain
    state.remove_row(1)
    fresh = SamplingState(2, VOCAB)
    for each in (state, fresh):
        each.add_row(1, RICH, [4], 1)
    assert same(state.metadata(ONE), fresh.metadata(ONE))


def test_tokens_outside_the_vocabulary_in_the_prompt_are_passed_over():
    state = SamplingState(1, VOCAB)
    state.add_row(0, core_params(temperature=0.0, repetition_penalty=2.0), [VOCAB, 3], 2)
    assert set(changed(state.metadata(np.array([0])), Penalties)) == {(0, 3)}


def test_arrays_stay_within_the_planned_bytes():
    state = SamplingState(8, VOCAB)
    parts = [vars(state), *map(vars, state.processors)]
    arrays = [v for part in parts for v in part.values() if isinstance(v, np.ndarray)]
    assert sum(a.nbytes for a in arrays) <= state_nbytes(8, VOCAB)
    # A row that has seen every token still fits its arrays.
    state.add_row(0, core_params(temperature=0.0, repetition_penalty=2.0), range(VOCAB), VOCAB)
    append(state, 0, VOCAB - 1)
    assert len(changed(state.metadata(np.array([0])), Penalties)) == VOCAB
