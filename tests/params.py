"""Parameters and logprobs as the engine core receives and returns them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from octavo.frontend.core_params import make_core_params
from octavo.messages import (
    CoreSamplingParams,
    EngineCoreRequest,
    LogprobsLists,
    RequestOptions,
)
from octavo.request import Request
from octavo.sampling_params import SamplingParams


class Params(SamplingParams, kw_only=True):
    """`SamplingParams` with the additions of the input processor."""

    bad_words_token_ids: Sequence[Sequence[int]] = ()
    all_stop_token_ids: Sequence[int] = ()

    def core(self, vocab_size: int) -> CoreSamplingParams:
        """Return the core's parameters."""
        return make_core_params(
            self,
            vocab_size=vocab_size,
            seed=self.seed or 0,
            max_tokens=2**62 if self.max_tokens is None else self.max_tokens,
            all_stop_token_ids=[*self.stop_token_ids, *self.all_stop_token_ids],
            bad_words_token_ids=self.bad_words_token_ids,
        )


def core_params(vocab_size: int = 100, **fields: object) -> CoreSamplingParams:
    """Return the core's parameters from the fields of `Params`."""
    return Params(**fields).core(vocab_size)


def core_request(
    request_id: str,
    token_ids: Sequence[int],
    params: CoreSamplingParams,
    arrival_time: float = 0.0,
    **fields: Any,
) -> EngineCoreRequest:
    """Return a request for the engine core; `fields` are fields of the request or its options."""
    names = fields.keys() & set(RequestOptions.__struct_fields__)
    options = RequestOptions(arrival_time, **{name: fields.pop(name) for name in names})
    return EngineCoreRequest(request_id, list(token_ids), params, options, **fields)


def set_options(request: EngineCoreRequest | Request, **changes: object) -> None:
    """Replace options of a request."""
    request.options = msgspec.structs.replace(request.options, **changes)


def pack_logprobs(
    token_ids: Sequence[Sequence[int]], logprobs: Sequence[Sequence[float]], ranks: Sequence[int]
) -> LogprobsLists:
    """Pack rows of equal length."""
    return LogprobsLists(
        np.asarray(token_ids, np.int32).tobytes(),
        np.asarray(logprobs, np.float32).tobytes(),
        np.asarray(ranks, np.int32).tobytes(),
    )


def unpack_logprobs(
    lists: LogprobsLists,
) -> tuple[list[list[int]], list[list[float]], list[int]]:
    """Return token ids, logprobs, ranks."""
    shape = (lists.num_rows, -1) if lists.num_rows else (0, 1)
    return (
        np.frombuffer(lists.token_ids, np.int32).reshape(shape).tolist(),
        np.frombuffer(lists.logprobs, np.float32).reshape(shape).tolist(),
        np.frombuffer(lists.ranks, np.int32).tolist(),
    )
