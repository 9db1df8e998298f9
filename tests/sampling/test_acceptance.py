"""Rejection and typical acceptance against their definitions, over many seeds."""

import numpy as np
import pytest
from scipy import stats

from octavo.kernels.native import NativeOps
from octavo.kernels.ops_logits import SAMPLING_ROW
from octavo.kernels.reference import token_numbers
from octavo.kernels.sampling_weights import sampling_weights
from octavo.sampling import philox
from octavo.sampling.acceptance import ACCEPT, DRAFT, RECOVER, Drafted, accept_drafts
from tests.sampling.harness import tensor

OPS = NativeOps()
NUM_ROWS, VOCAB = 40_000, 10
SEEDS = np.arange(NUM_ROWS, dtype=np.uint64)
POSITIONS = np.full(NUM_ROWS, 3, np.uint32)
LOGITS = np.array([[2.0, 1.0, 0.5, 0.0, -0.5, 1.5, -30.0, 0.2, 0.9, -1.0]], np.float32)
# Probabilities of the draft: a token too often, one too seldom, one that the target never has.
DRAFT_PROBS = np.array([[0.05, 0.3, 0.1, 0.02, 0.03, 0.2, 0.1, 0.1, 0.05, 0.05]], np.float32)


def run(*, typical=False, certain=None, **params):
    """Return tokens of many seeds; `certain`: the draft, instead of one from `DRAFT_PROBS`."""
    row = np.zeros(NUM_ROWS, SAMPLING_ROW)
    row["temperature"], row["top_p"] = 1.0, 1.0
    for name, value in params.items():
        row[name] = value
    row["seed"], row["position"] = SEEDS, POSITIONS
    logits = tensor(LOGITS.repeat(NUM_ROWS, 0))
    tokens = OPS.sample(logits, row)
    plain = tokens.numpy().copy()
    uniform = philox.uniform(SEEDS, POSITIONS, DRAFT)
    drafts = np.searchsorted(np.cumsum(DRAFT_PROBS[0]), uniform, side="right")
    drafts = np.minimum(drafts, VOCAB - 1) if certain is None else np.full(NUM_ROWS, certain)
    drafted = Drafted(
        typical,
        np.arange(NUM_ROWS),
        drafts,
        None if certain is not None else DRAFT_PROBS.repeat(NUM_ROWS, 0),
        accept=philox.uniform(SEEDS, POSITIONS, ACCEPT),
        recover=philox.uniform(SEEDS, POSITIONS, RECOVER),
    )
    accept_drafts(OPS, logits, row, drafted, tokens)
    weights = sampling_weights(OPS, tensor(LOGITS), row[:1])[0]
    return tokens.numpy(), drafts, plain, weights / weights.sum()


def check_distribution(tokens, p):
    found = np.bincount(tokens, minlength=VOCAB)
    possible = p > 0
    assert not found[~possible].any()
    if possible.sum() > 1:
        expected = NUM_ROWS * p[possible]
        enough = expected > 5
        result = stats.chisquare(
            np.append(found[possible][enough], found[possible][~enough].sum() + 1e-9),
            np.append(expected[enough], expected[~enough].sum() + 1e-9),
        )
        assert result.pvalue > 1e-4


@pytest.mark.parametrize(
    "params",
    [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.3}, {"temperature": 0.0}],
)
@pytest.mark.parametrize("certain", [None, 1, 6])
def test_rejection_keeps_the_distribution(params, certain):
    tokens, drafts, plain, p = run(certain=certain, **params)
    check_distribution(tokens, p)
    kept = (tokens == drafts).mean()
    q = DRAFT_PROBS[0] if certain is None else np.eye(VOCAB)[certain]
    best = np.minimum(p, q).sum()
    assert abs(kept - best) < 0.01, "as often as can be"
    if params == {"temperature": 0.0}:
        assert (tokens == plain).all()


def test_its_random_numbers_are_independent():
    """The accepted tokens do not depend on the drafted ones, nor on the recovered ones."""
    row = np.zeros(NUM_ROWS, SAMPLING_ROW)
    row["seed"], row["position"] = SEEDS, POSITIONS
    numbers = [philox.uniform(SEEDS, POSITIONS, stream) for stream in (ACCEPT, RECOVER)]
    for row["stream"] in (0, DRAFT):
        numbers.extend(token_numbers(row, 3).T)
    correlations = np.corrcoef(numbers) - np.eye(len(numbers))
    assert np.abs(correlations).max() < 0.03


def test_typical_keeps_what_is_likely_enough():
    tokens, drafts, plain, p = run(typical=True)
    entropy = -(p[p > 0] * np.log(p[p > 0])).sum()
    likely = p > min(0.09, 0.3 * np.exp(-entropy))
    assert 0 < likely.sum() < VOCAB
    assert (tokens == np.where(likely[drafts], drafts, plain)).all()


@pytest.mark.parametrize("typical", [False, True])
def test_rows_that_failed_and_rows_without_drafts_stay(typical):
    numbers = LOGITS.repeat(3, 0)
    numbers[1] = np.nan
    logits = tensor(numbers)
    params = np.zeros(3, SAMPLING_ROW)
    params["temperature"], params["top_p"] = 1.0, 1.0
    tokens = OPS.sample(logits, params)
    before = tokens.numpy().tolist()
    assert before[1] == -1
    drafted = Drafted(typical, np.array([2, 1]), np.array([1, 1]), None, np.zeros(2), np.zeros(2))
    accept_drafts(OPS, logits, params, drafted, tokens)
    assert tokens.numpy().tolist() == [before[0], -1, 1]


def test_the_least_random_number_recovers_a_token_that_has_a_share():
    """The rejected draft has no share, and is the first of the vocabulary."""
    params = np.zeros(1, SAMPLING_ROW)
    params["temperature"], params["top_p"] = 1.0, 1.0
    logits = tensor(LOGITS)
    tokens = OPS.sample(logits, params)
    most = np.full(1, 1 - 2.0**-53)
    drafted = Drafted(False, np.array([0]), np.array([0]), None, most, np.zeros(1))
    accept_drafts(OPS, logits, params, drafted, tokens)
    assert tokens.numpy().tolist() == [1]


def test_weights_are_those_that_are_sampled_by():
    rng = np.random.default_rng(0)
    logits = tensor(rng.normal(size=(200, 30)))
    params = np.zeros(200, SAMPLING_ROW)
    params["temperature"] = rng.choice([0.0, 0.7, 1.0], 200)
    params["top_p"] = rng.choice([1.0, 0.8], 200)
    params["top_k"] = rng.choice([0, 5], 200)
    params["min_p"] = rng.choice([0.0, 0.1], 200)
    params["seed"] = np.arange(200)
    weights = sampling_weights(OPS, logits, params)
    tokens = OPS.sample(logits, params).numpy()
    assert (weights[np.arange(200), tokens] > 0).all()
