"""Forced ends of reasoning, on the logits of single rows."""

import msgspec
import numpy as np
import pytest

from octavo.kernels.native import NativeOps
from octavo.messages import GuardSpec
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import SamplingState
from tests.params import core_params
from tests.sampling.harness import random_logits, run, tensor

VOCAB = 70
END = (66, 5)
SPEC = GuardSpec((1,), END, True, 3)
# Tokens so far, and the token that comes next; None: any.
CASES = [
    ([9, 9], None),
    ([9, 9, 9], 66),
    ([9, 9, 9, 9], 66),  # it waited
    ([9, 9, 66], 5),
    ([9, 9, 9, 66], 5),
    ([9, 9, 9, 66, 5], None),
    ([66, 5, 1], None),
    ([9, 66, 5, 8, 1], 66),  # all reasoning counts together: 9, 66 and 5
]


def state_of(rows, **fields):
    state = SamplingState(len(rows), VOCAB)
    for i, (spec, output) in enumerate(rows):
        params = msgspec.structs.replace(core_params(VOCAB, **fields), guard=spec)
        state.add_row(i, params, [7, *output], 1)
    return state


def processed(ops, logits, metadata):
    out = tensor(logits)
    for processor, step in metadata.processors:
        processor.apply(ops, out, step)
    return out.numpy()


def test_rows_among_others():
    rows = [(None, [9] * 9), *((SPEC, tokens) for tokens, _ in CASES), (None, [])]
    logits = random_logits(len(rows), VOCAB, seed=1)
    got = processed(NativeOps(), logits, state_of(rows).metadata(np.arange(len(rows))))
    for i, forced in enumerate([None, *(token for _, token in CASES), None]):
        expected = logits[i].copy()
        if forced is not None:
            expected[np.arange(VOCAB) != forced] = -np.inf
        np.testing.assert_array_equal(got[i], expected)


def test_it_waits_for_the_grammar():
    """A token that is excluded already is not forced."""
    state = state_of([(SPEC, [9, 9, 9]), (SPEC, [9, 9, 9])])
    logits = random_logits(2, VOCAB, seed=2)
    logits[0, 66] = -np.inf
    got = processed(NativeOps(), logits, state.metadata(np.arange(2)))
    np.testing.assert_array_equal(got[0], logits[0])
    assert np.isfinite(got[1]).sum() == 1


def test_tokens_that_arrive_later():
    """Appended tokens have the same effect as those of a new row."""
    state = state_of([(SPEC, [])])
    row = np.zeros(1, np.int64)
    for token in (9, 8, 7):
        assert not state.metadata(row).processors
        state.append(row, np.array([token]), np.ones(1, np.int64))
    assert state.needs_tokens(row)
    assert state.metadata(row).processors
    state.remove_row(0)
    assert not state.needs_tokens(row)
    assert not state.metadata(row).processors


def test_a_request_that_excludes_the_end_fails_alone():
    state = SamplingState(2, VOCAB)
    for i, fields in enumerate([{}, {"allowed_token_ids": [9]}]):
        params = msgspec.structs.replace(core_params(VOCAB, **fields), guard=SPEC)
        state.add_row(i, params, [7, 9, 9, 9], 1)
    logits = random_logits(2, VOCAB, seed=3)
    out = run(Sampler(NativeOps()), logits, state.metadata(np.arange(2)))
    assert out.token_ids[0] == 66
    assert "no token is left to choose" in out.errors[1]


@pytest.mark.parametrize(
    "spec",
    [
        GuardSpec(repetition="stop"),
        GuardSpec((1,), END, True, None, "report"),
        GuardSpec(repetition="close_thinking"),
    ],
)
def test_guards_that_force_nothing_cost_nothing(spec):
    assert not spec.forces_tokens
    assert not state_of([(spec, [9] * 500)]).needs_tokens(np.zeros(1, np.int64))
