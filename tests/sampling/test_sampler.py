"""Tokens against a slow reference, their distribution, and their independence of the batch."""

import numpy as np
import pytest
from scipy import stats
from scipy.special import log_softmax

from octavo.sampling.logits_processors.builtin import BadWords, GrammarBitmask
from octavo.sampling.sampler import Sampler, prompt_logprobs
from tests.params import Params, unpack_logprobs
from tests.sampling.harness import (
    Row,
    make_metadata,
    make_state,
    random_logits,
    random_row,
    reference_sample,
    run,
    tensor,
)

GREEDY = Params(temperature=0.0)


def draw(sampler, logits, params, count):
    """Draw `count` tokens from the same logits [V] at the output positions 0, 1, 2 ..."""
    metadata = make_state([Row(params)], logits.shape[0]).metadata(np.zeros(count, np.int64))
    metadata.params["position"] = np.arange(count)
    out = run(sampler, np.broadcast_to(logits, (count, len(logits))), metadata)
    assert out.errors == {}
    return out.token_ids


def sample(sampler, logits, rows):
    return run(sampler, logits, make_metadata(rows, logits.shape[1]))


# --- greedy ---------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_among_equals(sampler):
    logits = np.array([[1.0, 3.0, 3.0, 2.0], [-1.0, -1.0, -1.0, -2.0], [0.0, -0.0, 0.0, -1.0]])
    out = sample(sampler, logits, [Row(GREEDY)] * 3)
    assert out.token_ids.dtype == np.int64
    assert out.token_ids.tolist() == [1, 0, 0]
    assert out.logprobs == {}
    assert out.errors == {}


def test_a_plain_step_is_one_operation_and_its_result(ops):
    calls = []

    class Spy:
        def __getattr__(self, name):
            calls.append(name)
            return getattr(ops, name)

    sample(Sampler(Spy()), random_logits(9, 50, seed=0), [Row(GREEDY)] * 9)
    assert calls == ["sample", "to_host"]


def test_greedy_rows_among_sampled_ones(sampler):
    logits = random_logits(6, 50, seed=0)
    rows = [Row(GREEDY if i % 2 else Params(seed=i)) for i in range(6)]
    tokens = sample(sampler, logits, rows).token_ids
    assert tokens[1::2].tolist() == logits[1::2].argmax(-1).tolist()


# --- sampled: token for token ---------------------------------------------------------------


@pytest.mark.parametrize(("vocab_size", "count"), [(7, 60), (130, 60), (1500, 25)])
@pytest.mark.parametrize("levels", [None, 4], ids=["distinct", "ties"])
def test_equals_the_slow_reference(sampler, ops, vocab_size, count, levels):
    rng = np.random.default_rng(vocab_size)
    rows = []
    for _ in range(count):
        row = random_row(rng, vocab_size)
        row.params.allowed_token_ids = None  # may leave no token: tested below
        rows.append(row)
    values = rng.normal(size=(count, vocab_size)) * 4
    if levels:
        values = np.round(values / levels) * levels
    logits = values.astype(np.float32)
    out = sample(sampler, logits, rows)
    assert out.errors == {}
    for i, row in enumerate(rows):
        assert out.token_ids[i] == reference_sample(logits[i], row, ops), (i, row.params)


def test_flat_nucleus_needs_the_whole_ranking(sampler, ops):
    logits = random_logits(3, 3000, seed=1) * 0.1
    logits[1] = 0.0
    logits[2] *= 100
    rows = [Row(Params(seed=i, top_p=0.97)) for i in range(3)]
    tokens = sample(sampler, logits, rows).token_ids.tolist()
    assert tokens == [reference_sample(logits[i], rows[i], ops) for i in range(3)]


@pytest.mark.parametrize("k", [1, 3, 64, 65, 999, 1000])
def test_order_of_the_largest(ops, k):
    rng = np.random.default_rng(0)
    values = np.round(rng.normal(size=(4, 1000)) * 3).astype(np.float32)
    values[0, :500] = -np.inf
    values[1, ::7] = -0.0
    values[2] *= 1e37
    values[3] = (np.float32(1.5).view(np.int32) + np.arange(1000, dtype=np.int32)).view(np.float32)
    expected = np.stack([np.lexsort((np.arange(1000), -row))[:k] for row in values])
    got = ops.to_host(ops.top_k(tensor(values), k)[1])
    np.testing.assert_array_equal(got, expected)


@pytest.mark.usefixtures("isa")
def test_min_p_one_keeps_the_most_probable(sampler):
    logits = np.array([0.0, 2.0, 1.9999999, 2.0])
    tokens = draw(sampler, logits, Params(seed=3, min_p=1.0), 200)
    assert set(tokens.tolist()) == {1, 3}


# --- independence of the batch --------------------------------------------------------------


def snapshot(out, i):
    return out.token_ids[i].item(), out.logprobs.get(i), out.errors.get(i)


@pytest.mark.parametrize("vocab_size", [37, 1003, 5000])
def test_batch_invariance(sampler, vocab_size):
    """A row alone, among 64 others, and among the same ones in another order."""
    rng = np.random.default_rng(7)
    rows = [random_row(rng, vocab_size) for _ in range(65)]
    logits = rng.normal(size=(65, vocab_size)).astype(np.float32) * 3
    logits[50, 3] = np.nan
    together = sample(sampler, logits, rows)
    order = rng.permutation(65)
    shuffled = sample(sampler, logits[order], [rows[i] for i in order])
    for at, i in enumerate(order.tolist()):
        alone = sample(sampler, logits[i : i + 1], [rows[i]])
        assert snapshot(together, i) == snapshot(alone, 0)
        assert snapshot(shuffled, at) == snapshot(alone, 0)
    assert 50 in together.errors
    assert together.logprobs


def test_chunks_change_nothing(sampler, monkeypatch):
    rng = np.random.default_rng(8)
    rows = [random_row(rng, 300) for _ in range(40)]
    logits = rng.normal(size=(40, 300)).astype(np.float32) * 3
    whole = sample(sampler, logits, rows)
    monkeypatch.setattr("octavo.sampling.sizes.CHUNK_ELEMENTS", 3 * 300)
    parts = sample(sampler, logits, rows)
    assert whole.token_ids.tolist() == parts.token_ids.tolist()
    assert whole.logprobs == parts.logprobs


def test_seed_and_position_determine_the_draw(sampler):
    logits = np.zeros(1000)
    one = draw(sampler, logits, Params(seed=5), 50)
    again = draw(sampler, logits, Params(seed=5), 50)
    other = draw(sampler, logits, Params(seed=6), 50)
    assert one.tolist() == again.tolist()
    assert one.tolist() != other.tolist()
    assert len(set(one.tolist())) > 40
    # The position is the number of generated tokens, for any prompt.
    row = Row(Params(seed=5), prompt=[1, 2, 3], output=[4] * 7)
    assert sample(sampler, logits[None], [row]).token_ids[0] == one[7]


# --- distributions --------------------------------------------------------------------------

DRAWS = 20_000
LOGITS = random_logits(50, seed=11) * 1.5


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def expected_probs(params, prompt=(), output=()):
    """Return float64 probabilities by the definitions of the parameters."""
    z = LOGITS.astype(np.float64)
    for t in set(prompt) | set(output):
        z[t] = z[t] / params.repetition_penalty if z[t] > 0 else z[t] * params.repetition_penalty
    for t in set(output):
        z[t] -= params.frequency_penalty * output.count(t) + params.presence_penalty
    for t, bias in (params.logit_bias or {}).items():
        z[t] += bias
    p = softmax(z / params.temperature)
    p[p < params.min_p * p.max()] = 0
    ranking = np.argsort(-p, kind="stable")
    if params.top_k:
        p[ranking[params.top_k :]] = 0
    p /= p.sum()
    before = np.cumsum(p[ranking]) - p[ranking]
    p[ranking[before >= params.top_p]] = 0
    return p / p.sum()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 3.0},
        {"top_k": 8},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"temperature": 1.4, "top_k": 20, "top_p": 0.85, "min_p": 0.02},
        {"logit_bias": {3: 2.0, 4: -2.0}},
    ],
    ids=str,
)
def test_distribution(sampler, fields):
    params = Params(seed=1234, **fields)
    check_distribution(draw(sampler, LOGITS, params, DRAWS), expected_probs(params))


def test_distribution_with_penalties(sampler):
    params = Params(seed=99, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.6)
    prompt, output = [1, 2, 3], [3, 4, 4, 5, 6, 6, 6]
    state = make_state([Row(params, prompt, output)], len(LOGITS))
    metadata = state.metadata(np.zeros(DRAWS, np.int64))
    metadata.params["position"] = np.arange(DRAWS)
    tokens = run(sampler, np.broadcast_to(LOGITS, (DRAWS, 50)), metadata).token_ids
    check_distribution(tokens, expected_probs(params, prompt, output))


def check_distribution(tokens, probs):
    """Check chi-square at p > 1e-4; tokens expected fewer than 5 times are pooled."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert counts[probs == 0].sum() == 0
    expected = probs * len(tokens)
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    assert stats.chisquare(observed, wanted).pvalue > 1e-4


# --- extremes -------------------------------------------------------------------------------


def test_very_low_temperature_is_greedy_without_overflow(sampler):
    logits = np.array([3e38, -3e38, 2.9e38, -np.inf])
    assert set(draw(sampler, logits, Params(seed=1, temperature=1e-4), 100)) == {0}


def test_very_high_temperature_is_nearly_uniform(sampler):
    tokens = draw(sampler, LOGITS, Params(seed=1, temperature=100.0), DRAWS)
    check_distribution(tokens, softmax(LOGITS.astype(np.float64) / 100))


def test_tiny_top_p_keeps_one(sampler):
    tokens = draw(sampler, LOGITS, Params(seed=1, top_p=1e-6), 100)
    assert set(tokens) == {int(LOGITS.argmax())}
    # The first of equal tokens.
    assert set(draw(sampler, np.zeros(9), Params(seed=1, top_p=1e-6), 100)) == {0}


def test_top_k_cuts_between_equals_by_id(sampler):
    logits = np.array([1.0, 5.0, 2.0, 2.0, 2.0, 0.0])
    assert set(draw(sampler, logits, Params(seed=1, top_k=3), 2000)) == {1, 2, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.999}, {"top_k": 70}], ids=str)
def test_one_token_left(sampler, temperature, filters):
    logits = np.full(100, -np.inf)
    logits[41] = -3.0
    params = Params(seed=1, temperature=temperature, **filters)
    assert set(draw(sampler, logits, params, 100)) == {41}
    allowed = Params(seed=1, temperature=temperature, allowed_token_ids=[17], **filters)
    assert sample(sampler, random_logits(1, 100, seed=0), [Row(allowed)]).token_ids.tolist() == [17]


def test_rows_that_cannot_be_sampled_fail_alone(sampler):
    logits = random_logits(7, 40, seed=0)
    logits[1, 7] = np.nan
    logits[2, 7] = np.inf
    logits[3] = -np.inf
    logits[4, :20] = -np.inf
    asks = Params(seed=1, logprobs=2)
    nothing_left = Params(seed=1, logprobs=2, allowed_token_ids=[3])
    rows = [Row(p) for p in (asks, asks, GREEDY, asks, nothing_left, GREEDY, asks)]
    out = sample(sampler, logits, rows)
    assert sorted(out.errors) == [1, 2, 3, 4]
    assert all("not finite" in out.errors[i] for i in (1, 2, 3))
    assert "no token is left" in out.errors[4]
    assert out.token_ids[1:5].tolist() == [-1] * 4
    assert sorted(out.logprobs) == [0, 6]
    good = sample(sampler, logits[[0, 5, 6]], [rows[i] for i in (0, 5, 6)])
    assert good.token_ids.tolist() == out.token_ids[[0, 5, 6]].tolist()


def test_processor_that_fails_harms_no_other_request(sampler, monkeypatch, caplog):
    def apply(self, ops, logits, step):
        raise IndexError("a fault")

    monkeypatch.setattr(BadWords, "apply", apply)
    logits = random_logits(3, 40, seed=0)
    rows = [Row(p) for p in (GREEDY, Params(seed=1, bad_words_token_ids=[[3]]), Params(seed=2))]
    out = sample(sampler, logits, rows)
    assert list(out.errors) == [1]
    assert "a fault of Octavo" in out.errors[1]
    assert "BadWords failed" in caplog.text
    good = sample(sampler, logits[[0, 2]], [rows[0], rows[2]])
    assert out.token_ids[[0, 2]].tolist() == good.token_ids.tolist()


def test_penalty_that_overflows_fails_its_row(sampler):
    params = Params(temperature=0.0, repetition_penalty=1e-30)
    out = sample(sampler, np.full((2, 4), 1e20), [Row(params, prompt=[1]), Row(GREEDY)])
    assert list(out.errors) == [0]
    assert out.token_ids.tolist() == [-1, 0]


def test_no_rows(sampler):
    out = sample(sampler, np.empty((0, 30)), [])
    assert out.token_ids.shape == (0,)


# --- grammar --------------------------------------------------------------------------------


def test_grammar_restricts_its_rows_only(sampler):
    logits = random_logits(3, 40, seed=3)
    params = Params(seed=1, logprobs=1)
    state = make_state([Row(GREEDY), Row(params), Row(params)], 40)
    words = np.array([[0, 1 << 5], [0, 0]], np.int32)
    metadata = state.metadata(np.arange(3), grammar=GrammarBitmask(np.array([1, 2]), words))
    assert not metadata.plain
    out = run(sampler, logits, metadata)
    assert out.token_ids.tolist() == [logits[0].argmax().item(), 37, -1]
    assert list(out.errors) == [2]
    # Logprobs are those of the model, without the grammar.
    expected = log_softmax(logits[1])
    ids, values, _ = unpack_logprobs(out.logprobs[1])
    np.testing.assert_allclose(values[0][0], expected[37], atol=1e-5)
    assert ids[0][1] == logits[1].argmax()


def test_grammar_beside_drafts_and_other_processors(sampler):
    """Each position of a request has its own bitmask; a row alone samples the same token."""
    rng = np.random.default_rng(11)
    rows = [random_row(rng, 70) for _ in range(6)]
    rows[2] = Row(Params(seed=7, min_tokens=3, all_stop_token_ids=[5], max_tokens=9), [1], [2])
    logits = rng.normal(size=(9, 70)).astype(np.float32)
    state = make_state(rows, 70)
    at = np.array([1, 3, 4, 5, 8])  # rows 3 to 5 are the third request's
    words = rng.integers(-(2**31), 2**31, (5, 3)).astype(np.int32)
    which, offsets = np.array([0, 1, 2, 2, 2, 2, 3, 4, 5]), np.array([0, 0, 0, 1, 2, 3, 0, 0, 0])
    metadata = state.metadata(which, offsets, GrammarBitmask(at, words))
    out = run(sampler, logits, metadata)
    for i, (row, offset) in enumerate(zip(which, offsets, strict=True)):
        own = words[at == i]
        grammar = GrammarBitmask(np.zeros(len(own), np.int64), own) if len(own) else None
        alone = state.metadata(np.array([row]), np.array([offset]), grammar)
        alone_out = run(sampler, logits[i : i + 1], alone)
        token = out.token_ids[i].item()
        assert token == alone_out.token_ids[0]
        if len(own) and token >= 0:
            assert own[0, token // 32] >> (token % 32) & 1
    assert (out.token_ids[2:6] >= 0).all()


# --- logprobs -------------------------------------------------------------------------------


def check_logprobs(lists, logits, tokens, k):
    """Check one position for each row of logits: the token, its rank, and the k best."""
    expected = log_softmax(logits.astype(np.float64), -1)
    ids, found, ranks = unpack_logprobs(lists)
    assert len(ids) == len(tokens)
    for i, token in enumerate(tokens):
        order = np.lexsort((np.arange(logits.shape[1]), -logits[i])).tolist()
        assert ids[i] == [token, *order[:k]]
        assert ranks[i] == order.index(token) + 1
        np.testing.assert_allclose(found[i], expected[i][ids[i]], atol=2e-5)


@pytest.mark.parametrize("k", [0, 1, 5, 64, 70, 100])
@pytest.mark.parametrize("ties", [False, True])
def test_logprobs_are_of_the_raw_logits(sampler, k, ties):
    logits = random_logits(4, 100, seed=k) * 3
    if ties:
        logits = np.round(logits)
    rows = [
        Row(Params(temperature=t, seed=4, logprobs=k, logit_bias=bias, top_k=3))
        for t in (0.0, 2.0)
        for bias in (None, {7: 50.0})
    ]
    out = sample(sampler, logits, rows)
    assert out.token_ids[1] == 7
    for i in range(4):
        check_logprobs(out.logprobs[i], logits[i : i + 1], [out.token_ids[i].item()], k)
    assert unpack_logprobs(out.logprobs[0])[2] == [1]


def test_logprobs_of_the_whole_vocabulary_beside_fewer(sampler):
    logits = random_logits(3, 100, seed=5)
    rows = [Row(Params(seed=1, logprobs=k)) for k in (-1, 2, None)]
    out = sample(sampler, logits, rows)
    assert sorted(out.logprobs) == [0, 1]
    check_logprobs(out.logprobs[0], logits[:1], [out.token_ids[0].item()], 100)
    check_logprobs(out.logprobs[1], logits[1:2], [out.token_ids[1].item()], 2)


def test_logprobs_of_certain_tokens(sampler):
    """They are in the requested order, next to rows with other requests or the same number of most
    probable tokens, and of the raw logits."""
    logits = random_logits(6, 100, seed=5)
    asked = [[7, 3, 99], None, [0, 0, 7], [50], None, list(range(100))]
    bias = {7: 50.0}
    rows = [
        Row(Params(seed=1, logprob_token_ids=ids, logprobs=None if ids else k, logit_bias=bias))
        for ids, k in zip(asked, (None, 3, None, None, None, None), strict=True)
    ]
    expected = log_softmax(logits.astype(np.float64), -1)
    out = sample(sampler, logits, rows)
    assert out.token_ids.tolist() == [7] * 6
    assert sorted(out.logprobs) == [0, 1, 2, 3, 5]
    check_logprobs(out.logprobs.pop(1), logits[1:2], [7], 3)
    for i, lists in out.logprobs.items():
        (ids,), (found,), (rank,) = unpack_logprobs(lists)
        assert ids == [7, *asked[i]]
        np.testing.assert_allclose(found, expected[i][ids], atol=2e-5)
        assert rank == int((logits[i] > logits[i, 7]).sum()) + 1


def test_prompt_logprobs(ops, monkeypatch):
    monkeypatch.setattr("octavo.sampling.sizes.CHUNK_ELEMENTS", 3 * 60)
    logits = random_logits(10, 60, seed=6)
    targets = np.arange(10) * 5
    for k, count in ((0, 0), (3, 3), (-1, 60)):
        lists = prompt_logprobs(ops, tensor(logits), targets, k)
        check_logprobs(lists, logits, targets.tolist(), count)
