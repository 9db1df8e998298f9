"""Batches built from parameters, and a slow, obvious sampler."""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from octavo.kernels.base import Ops
from octavo.kernels.ops_logits import SAMPLING_ROW
from octavo.kernels.reference import token_numbers
from octavo.sampling.metadata import SamplingMetadata
from octavo.sampling.sampler import Sampler
from octavo.sampling.state import SamplingState
from octavo.system.tensor import HostTensor, empty
from tests.params import Params


@dataclass
class Row:
    """Request: its parameters and its tokens so far."""

    params: Params
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)


def make_state(rows: list[Row], vocab_size: int) -> SamplingState:
    state = SamplingState(len(rows), vocab_size)
    for i, row in enumerate(rows):
        state.add_row(i, row.params.core(vocab_size), row.prompt + row.output, len(row.prompt))
    return state


def make_metadata(rows: list[Row], vocab_size: int) -> SamplingMetadata:
    return make_state(rows, vocab_size).metadata(np.arange(len(rows)))


def tensor(numbers: object) -> HostTensor:
    """Return a copy of numbers as float32."""
    copy = empty(*np.shape(numbers), dtype="float32")
    copy.numpy()[...] = numbers
    return copy


def random_logits(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def run(sampler: Sampler, logits: np.ndarray, metadata: SamplingMetadata):
    """Sample from a copy of logits; return the output with an array of tokens."""
    out = sampler.sample(tensor(logits), metadata)
    return replace(out, token_ids=out.token_ids.numpy())


def random_row(rng: np.random.Generator, vocab_size: int) -> Row:
    """Return a request that uses some features, each with some probability."""

    def maybe(probability: float) -> bool:
        return bool(rng.random() < probability)

    def tokens(count: int) -> list[int]:
        return rng.integers(0, vocab_size, count).tolist()

    prompt, output = tokens(int(rng.integers(1, 30))), tokens(int(rng.integers(0, 30)))
    bad_words = []
    if maybe(0.2):
        bad_words = [tokens(1), [*output[-2:], *tokens(1)], [*tokens(1), *tokens(1)]]
    params = Params(
        temperature=0.0 if maybe(0.3) else float(rng.choice([0.01, 0.5, 1.0, 1.7, 20.0])),
        top_k=int(rng.choice([1, 2, 40, 64, 65, 200, vocab_size])) if maybe(0.4) else 0,
        top_p=float(rng.choice([1e-6, 0.3, 0.9, 0.999])) if maybe(0.4) else 1.0,
        min_p=float(rng.choice([1e-4, 0.05, 1.0])) if maybe(0.3) else 0.0,
        seed=int(rng.integers(0, 2**63)),
        repetition_penalty=1.3 if maybe(0.3) else 1.0,
        frequency_penalty=0.7 if maybe(0.3) else 0.0,
        presence_penalty=-0.4 if maybe(0.3) else 0.0,
        logit_bias={t: float(rng.normal()) for t in tokens(5)} if maybe(0.2) else None,
        allowed_token_ids=tokens(30) if maybe(0.1) else None,
        min_tokens=20 if maybe(0.3) else 0,
        max_tokens=100,
        logprobs=int(rng.integers(0, 8)) if maybe(0.5) else None,
        bad_words_token_ids=bad_words,
        all_stop_token_ids=tokens(3),
    )
    return Row(params, prompt, output)


def reference_process(logits: np.ndarray, row: Row) -> np.ndarray:
    """Apply all processors to one row of logits [V], token by token."""
    p, out = row.params, logits.astype(np.float32).copy()
    for token in range(len(out)):
        if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
            out[token] = -np.inf
        for *prefix, last in p.bad_words_token_ids:
            begin = len(row.output) - len(prefix)
            if token == last and begin >= 0 and row.output[begin:] == prefix:
                out[token] = -np.inf
        if len(row.output) < p.min_tokens and token in p.all_stop_token_ids:
            out[token] = -np.inf
        if p.logit_bias and token in p.logit_bias:
            out[token] += np.float32(p.logit_bias[token])
        if token in row.prompt or token in row.output:
            repetition = np.float32(p.repetition_penalty)
            if out[token] > 0:
                out[token] /= repetition
            else:
                out[token] *= repetition
        count = np.float32(row.output.count(token))
        out[token] -= np.float32(p.frequency_penalty) * count
        if count > 0:
            out[token] -= np.float32(p.presence_penalty)
    return out


def reference_sample(logits: np.ndarray, row: Row, ops: Ops) -> int:
    """Return the token of one row, with Python's integers for the weights."""
    p, z = row.params, reference_process(logits, row)
    vocab_size = len(z)
    ranking = sorted(range(vocab_size), key=lambda t: (-z[t], t))
    if p.greedy:
        return ranking[0]
    shifted = (z - z.max()) / np.float32(p.temperature)
    probs = ops.to_host(ops.exp(tensor(shifted[None])))[0]
    weights = [int(float(q) * 2**40) if q >= np.float32(p.min_p) else 0 for q in probs]
    kept = ranking[: p.top_k or vocab_size]
    total = sum(weights[t] for t in kept)
    if p.top_p < 1.0:
        nucleus, before = [], 0
        for token in kept:
            if before < p.top_p * total:
                nucleus.append(token)
            before += weights[token]
        kept = nucleus
    params = np.zeros(1, SAMPLING_ROW)
    params["seed"], params["position"] = p.seed, len(row.output)
    u = token_numbers(params, vocab_size)[0]
    return min((-math.log(u[t]) / weights[t], t) for t in kept if weights[t])[1]
