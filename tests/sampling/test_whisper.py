"""Rules of Whisper's answers, against transformers."""

import types

import msgspec
import numpy as np
import pytest
import torch
from transformers import WhisperTimeStampLogitsProcessor

from octavo.errors import RequestError
from octavo.kernels.native import NativeOps
from octavo.sampling.logits_processors.whisper import WhisperRules
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import SamplingState
from tests.params import core_params
from tests.sampling.harness import random_logits, run, tensor

# Text, the end (40), special tokens up to <|notimestamps|> (44), and the times.
VOCAB, END, FIRST = 75, 40, 45
RULES = WhisperRules(end=END, suppress=[3, 41], begin_suppress=[7, END], first_timestamp=FIRST)
OUTPUTS = [
    [],
    [45],
    [46, 5],
    [46, 5, 6],
    [46, 5, 6, 50],
    [46, 5, 6, 50, 50],
    [46, 5, 6, 50, 52],
    [46, 5, 6, 50, 52, 8],
    [46, 5, 6, 50, 52, 8, 74],
    [46, 74],
    [50, 5, 50],
]


def add_row(state, row, output, rules):
    params = core_params(VOCAB)
    args = {"whisper_rules": rules if isinstance(rules, dict) else msgspec.to_builtins(rules)}
    params = msgspec.structs.replace(params, extra_args=args)
    state.add_row(row, params, [9, 9, *output], 2)


def expected(output, logits, max_initial):
    config = types.SimpleNamespace(
        no_timestamps_token_id=FIRST - 1,
        eos_token_id=END,
        bos_token_id=END,
        max_initial_timestamp_index=max_initial,
    )
    logits = torch.tensor(logits)[None].clone()
    logits[0, RULES.suppress + (RULES.begin_suppress if not output else [])] = -torch.inf
    process = WhisperTimeStampLogitsProcessor(config, begin_index=2)
    return process(torch.tensor([[9, 9, *output]]), logits)[0].numpy()


@pytest.mark.parametrize("max_initial", [None, 0, 4])
def test_every_state_of_an_answer(max_initial):
    """In one batch, after new tokens, and with logits of which timestamps win or lose."""
    rules = msgspec.structs.replace(RULES, max_initial=max_initial)
    state = SamplingState(len(OUTPUTS) + 1, VOCAB)
    state.add_row(len(OUTPUTS), core_params(VOCAB), [9, 9], 2)  # without rules
    for row, output in enumerate(OUTPUTS):
        add_row(state, row, output[:-1], rules)
        if output:
            state.append(np.array([row]), np.array(output[-1:]), np.array([1]))
    for seed in range(20):
        logits = random_logits(len(OUTPUTS) + 1, VOCAB, seed=seed)
        logits[:, FIRST:] += seed % 4 - 2
        out = tensor(logits)
        for processor, step in state.metadata(np.arange(len(OUTPUTS) + 1)).processors:
            processor.apply(NativeOps(), out, step)
        for row, output in enumerate(OUTPUTS):
            np.testing.assert_array_equal(
                out.numpy()[row], expected(output, logits[row], max_initial), str(output)
            )
        np.testing.assert_array_equal(out.numpy()[-1], logits[-1])


def test_an_answer_without_timestamps():
    rules = msgspec.structs.replace(RULES, first_timestamp=None)
    logits = np.zeros(VOCAB, np.float32)
    assert np.flatnonzero(~rules.allowed([], logits)).tolist() == [3, 7, 40, 41]
    assert np.flatnonzero(~rules.allowed([1, 50], logits)).tolist() == [3, 41]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({}, "missing required field `end`"),
        ({"end": "a"}, r"whisper_rules: Expected `int`.*\$\.end"),
        ({"end": 1, "more": 1}, "unknown field `more`"),
        ({"end": VOCAB}, r"wrong \(\[75\]\)"),
        ({"end": 1, "suppress": [-1]}, r"wrong \(\[-1\]\)"),
        ({"end": 50, "first_timestamp": 45}, "wrong"),
        ({"end": 1, "first_timestamp": VOCAB + 1}, "wrong"),
        ({"end": 1, "first_timestamp": 5, "max_initial": -1}, "max_initial=-1 is negative"),
    ],
)
def test_wrong_rules_fail_their_request(rules, message):
    state = SamplingState(1, VOCAB)
    with pytest.raises(RequestError, match=message) as caught:
        add_row(state, 0, [], rules)
    assert caught.value.param == "extra_args"


def test_logprobs_count_the_allowed_tokens():
    """Those of the answer's tokens; the other candidates have those of all tokens."""
    state = SamplingState(len(OUTPUTS) + 1, VOCAB)
    for row, output in enumerate(OUTPUTS):
        add_row(state, row, output, RULES)
        state._num_logprobs[row] = 2
    state.add_row(len(OUTPUTS), core_params(VOCAB, logprobs=2), [9], 1)
    logits = random_logits(len(OUTPUTS) + 1, VOCAB, seed=3)
    found = run(Sampler(NativeOps()), logits, state.metadata(np.arange(len(OUTPUTS) + 1)))
    for row, (values, token) in enumerate(zip(logits, found.token_ids.tolist(), strict=True)):
        lists = found.logprobs[row]
        own, *others = np.frombuffer(lists.logprobs, np.float32)
        raw = torch.log_softmax(torch.tensor(values), -1).numpy()
        np.testing.assert_allclose(others, np.sort(raw)[:-3:-1], atol=1e-5)
        may = np.ones(VOCAB, np.bool_)
        if row < len(OUTPUTS):
            may = RULES.allowed(OUTPUTS[row], values)
            assert not may.all()
        allowed = torch.log_softmax(torch.tensor(np.where(may, values, -np.inf)), -1)
        assert own == pytest.approx(allowed[token].item(), abs=1e-5)
