"""Results of pooling models: from the worker's numbers to what the caller asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.models.blocks.pooler import PoolerSpec, SentencesSpec, Similarity
from octavo.outputs import Pooled, PoolingOutput, PoolingRequestOutput, RequestOutput
from octavo.pooling_params import PoolingParams

Floats = NDArray[np.float32]
_LEAST_LENGTH = np.float32(1e-12)  # as in torch.nn.functional.normalize


def read_pooled(
    data: bytes, pooler: PoolerSpec, params: PoolingParams, token_ids: Sequence[int]
) -> Floats:
    """Return the result of a text, float32 [n], or for each token [tokens, n].

    Args:
        data: the worker's numbers.
        pooler: the pooler that computed them.
        params: the request's parameters. They select numbers before these are normalized.
        token_ids: the text's tokens, some of which `step_tag_id` selects.
    """
    x: Floats = np.frombuffer(data, np.float32)
    if pooler.pooling == ("all",):
        x = x.reshape(len(token_ids), -1)[_kept(pooler, params, token_ids)]
    cut = pooler.cut if params.dimensions is None else params.dimensions
    if cut is not None:
        x = x[..., :cut]
    classes = params.returned_token_ids or pooler.returned_token_ids
    if classes is not None:
        x = x[..., list(classes)]
    activates = pooler.activates if params.use_activation is None else params.use_activation
    x = _ACTIVATIONS[pooler.activation](x) if activates else x
    return x.ravel() if pooler.sparse else x


def _kept(pooler: PoolerSpec, params: PoolingParams, token_ids: Sequence[int]) -> NDArray[np.bool_]:
    """Return True for each token of a text whose result is returned."""
    ids = np.array(token_ids)
    tag = pooler.step_tag_id if params.step_tag_id is None else params.step_tag_id
    kept = np.ones(len(ids), np.bool_) if tag is None else ids == tag
    first, last = pooler.edges
    kept[0] &= ids[0] != first
    kept[-1] &= ids[-1] != last
    role = pooler.role(params.prompt_name)
    if role is not None:
        kept &= ~np.isin(ids, role.skipped)
    return kept


def sparse_vector(
    output: PoolingRequestOutput[PoolingOutput], pooler: PoolerSpec, params: PoolingParams
) -> tuple[NDArray[np.int64], Floats]:
    """Return the entries of the vocabulary that have a weight, in ascending order, and the weights.

    The weight of an entry is the greatest one of its tokens (Chen et al., "BGE M3-Embedding",
    arXiv 2402.03216, section 3.2).

    Args:
        output: result of a sparse pooler.
        pooler: the pooler.
        params: the request's parameters.
    """
    weights = output.outputs.data
    entries = np.arange(len(weights))
    if pooler.pooling == ("all",):
        ids = np.array(output.prompt_token_ids, np.int64)[
            _kept(pooler, params, output.prompt_token_ids)
        ]
        entries, places = np.unique(ids, return_inverse=True)
        most = np.zeros(len(entries), np.float32)
        np.maximum.at(most, places, weights)
        weights = most
    found = (weights > 0) & ~np.isin(entries, pooler.weightless)
    return entries[found], weights[found]


def normalize(x: Floats) -> Floats:
    """Return vectors [..., n] divided by their lengths; a zero vector stays zero."""
    length: Floats = np.sqrt(np.sum(x * x, axis=-1, keepdims=True, dtype=np.float32))
    result: Floats = (x / np.maximum(length, _LEAST_LENGTH)).astype(np.float32)
    return result


def cosine(a: Floats, b: Floats) -> float:
    """Return the cosine of two vectors; 0 if one of them is zero."""
    lengths = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.dot(a, b)) / lengths if lengths else 0.0


def max_sim(a: Floats, b: Floats) -> float:
    """Return the sum over the vectors of `a` of the greatest product with one of `b`.

    Khattab and Zaharia, "ColBERT", arXiv 2004.12832, section 3.3.

    Args:
        a: vectors of the query's tokens, float32 [tokens, n].
        b: vectors of the document's tokens, float32 [tokens, n].
    """
    if not len(a) or not len(b):
        return 0.0
    return float(np.max(a @ b.T, axis=1).sum(dtype=np.float32))


def _compare(name: Similarity) -> Callable[[Floats, Floats], float]:
    """Return a function that compares two vectors as sentence-transformers does."""
    if name == "dot":
        return lambda a, b: float(np.dot(a, b))
    if name in ("euclidean", "manhattan"):
        order = 2 if name == "euclidean" else 1
        return lambda a, b: -float(np.linalg.norm(a - b, ord=order))
    return cosine


class Comparison(NamedTuple):
    """Score of two texts from their own results, of a model that does not read both together."""

    task: str
    """Task whose results are compared."""
    function: Callable[[Floats, Floats], float]
    roles: tuple[str | None, str | None]
    """`prompt_name` of the first text and of the second one; None: as the request says."""


def find_comparison(poolers: Sequence[PoolerSpec], sentences: SentencesSpec) -> Comparison | None:
    """Return the comparison of a model; None: it has no vectors.

    Args:
        poolers: the results that the model has.
        sentences: its prompts and similarity.
    """
    tasks = {pooler.task: pooler for pooler in poolers}
    if "embed" in tasks:
        return Comparison("embed", _compare(sentences.similarity_fn_name), (None, None))
    if "token_embed" in tasks:
        roles = [role.name for role in tasks["token_embed"].roles]
        first, second = roles or (None, None)
        return Comparison("token_embed", max_sim, (first, second))
    return None


def _softmax(x: Floats) -> Floats:
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    result: Floats = e / np.sum(e, axis=-1, keepdims=True, dtype=np.float32)
    return result


def _sigmoid(x: Floats) -> Floats:
    result: Floats = np.float32(1) / (np.float32(1) + np.exp(-x))
    return result


_ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "none": lambda x: x,
    "normalize": normalize,
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "relu": lambda x: np.maximum(x, np.float32(0)),
}


def pooling_output(
    output: RequestOutput, pooler: PoolerSpec, params: PoolingParams
) -> PoolingRequestOutput[PoolingOutput]:
    """Return the result of a finished request."""
    assert output.pooled is not None
    return PoolingRequestOutput(
        output.request_id,
        PoolingOutput(read_pooled(output.pooled, pooler, params, output.prompt_token_ids)),
        output.prompt_token_ids,
        output.num_cached_tokens,
    )


def windows_output(
    outputs: Sequence[RequestOutput],
    weights: Sequence[int],
    pooler: PoolerSpec,
    params: PoolingParams,
) -> PoolingRequestOutput[PoolingOutput]:
    """Return the result of a text from those of its parts: the mean of their vectors.

    Args:
        outputs: the finished requests of the parts, in order.
        weights: number of tokens of each part.
        pooler: the pooler that computed them.
        params: the request's parameters, which apply to the mean.
    """
    total = np.zeros(pooler.size, np.float32)
    for output, weight in zip(outputs, weights, strict=True):
        assert output.pooled is not None
        total += np.frombuffer(output.pooled, np.float32) * np.float32(weight)
    mean = total / np.float32(max(1, sum(weights)))
    ids = [i for output in outputs for i in output.prompt_token_ids]
    return PoolingRequestOutput(
        outputs[0].request_id,
        PoolingOutput(read_pooled(mean.tobytes(), pooler, params, ids)),
        ids,
        sum(output.num_cached_tokens for output in outputs),
    )


def with_result(
    output: PoolingRequestOutput[PoolingOutput], result: Pooled, token_ids: list[int] | None = None
) -> PoolingRequestOutput[Pooled]:
    """Return a request's output with a result in another form.

    Args:
        output: the request's output.
        result: the result.
        token_ids: tokens that were read; None: those of `output`.
    """
    ids = output.prompt_token_ids if token_ids is None else token_ids
    return PoolingRequestOutput(output.request_id, result, ids, output.num_cached_tokens)
