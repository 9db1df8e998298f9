"""Results of pooling models: from the worker's numbers to what the caller asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.models.blocks.pooler import PoolerSpec
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
        x = x.reshape(len(token_ids), -1)
        tag = pooler.step_tag_id if params.step_tag_id is None else params.step_tag_id
        if tag is not None:
            x = x[np.array(token_ids) == tag]
    cut = pooler.cut if params.dimensions is None else params.dimensions
    if cut is not None:
        x = x[..., :cut]
    classes = params.returned_token_ids or pooler.returned_token_ids
    if classes is not None:
        x = x[..., list(classes)]
    activates = pooler.activates if params.use_activation is None else params.use_activation
    return _ACTIVATIONS[pooler.activation](x) if activates else x


def normalize(x: Floats) -> Floats:
    """Return vectors [..., n] divided by their lengths; a zero vector stays zero."""
    length: Floats = np.sqrt(np.sum(x * x, axis=-1, keepdims=True, dtype=np.float32))
    result: Floats = (x / np.maximum(length, _LEAST_LENGTH)).astype(np.float32)
    return result


def cosine(a: Floats, b: Floats) -> float:
    """Return the cosine of two vectors; 0 if one of them is zero."""
    lengths = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.dot(a, b)) / lengths if lengths else 0.0


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
