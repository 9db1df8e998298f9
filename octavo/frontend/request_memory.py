"""Budget for the memory that requests hold in front end and engine core."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from octavo.errors import EngineDeadError, QueueFullError, RequestError, StepFailedError
from octavo.messages import EngineCoreRequest
from octavo.models.blocks.pooler import PoolerSpec
from octavo.sampling_params import SamplingParams
from octavo.system.device import trim_memory

if TYPE_CHECKING:
    from octavo.fleet.core_client import WatchedClient

# Interval of checks for the end of the last request.
_TRIM_INTERVAL = 1.0

# Bytes in both processes together, rounded up.
_ANSWER = 8192
"""Bytes of one answer: its records, its detokenizer, its place in the queues."""
_PROMPT_TOKEN = 96
"""Bytes of a prompt token in three lists, with the hashes of blocks."""
_PROMPT_TOKEN_OF_ANSWER = 12
"""Bytes of one more reference to a prompt token, which each of n answers has."""
_EXTRA_ARGS_BYTE = 128
"""Bytes per byte of msgpack: at most, as for an empty list, 64 in each process."""
_PROMPT_EMBEDS_BYTE = 3
"""Copies of the embeddings: in both processes, and in transit."""
_GRAMMAR_CHARACTER = 16
"""Bytes of a character of a grammar in both processes."""
_OUTPUT_TOKEN = 112
"""Bytes of an output token in the core, the front end and the outputs, its text and hashes."""
_POOLED_NUMBER = 64
"""Bytes of a number of a vector: in both processes, as a float of a list, and as JSON."""
_CANDIDATE = 8
"""Bytes of a token id and a logprob."""
_WRITTEN_CANDIDATE = 512
"""Bytes of a candidate as JSON, in the answer that is being written, with copies in transit."""


def request_nbytes(request: EngineCoreRequest, params: SamplingParams, vocab_size: int) -> int:
    """Return the maximum bytes of a request until it has been answered, in both processes.

    Args:
        request: a result of `InputProcessor.process`.
        params: the sampling parameters from which it was made.
        vocab_size: number of candidates if all are requested.
    """
    core, n = request.sampling_params, request.n
    prompt, output = len(request.prompt_token_ids), core.max_tokens

    def candidates(count: int | None) -> int:
        return 0 if count is None else 1 + (vocab_size if count == -1 else count)

    words = core.bad_words
    long = [core.allowed_token_ids, *(core.logit_bias or ())]
    long += [words.prefixes, words.last] if words is not None else []
    lists = 2 * sum(len(data) for data in long if data is not None)
    # The caller's own lists, and sets of stop tokens in both processes.
    lists += 64 * (len(params.allowed_token_ids or ()) + 3 * len(core.all_stop_token_ids))
    lists += 4 * sum(map(len, [*params.stop, *(params.bad_words or ())]))
    if core.grammar is not None:
        lists += _GRAMMAR_CHARACTER * len(core.grammar.text)
    if core.extra_args:
        lists += _EXTRA_ARGS_BYTE * len(msgspec.msgpack.encode(core.extra_args))
    if request.prompt_embeds is not None:
        lists += _PROMPT_EMBEDS_BYTE * request.prompt_embeds.nbytes
    for feature in request.mm_features:
        nbytes = sum(len(tensor.data) for tensor in feature.data.values())
        lists += _PROMPT_EMBEDS_BYTE * nbytes
    of_answer = output * candidates(core.logprobs)
    of_prompt = prompt * candidates(core.prompt_logprobs)
    return (
        lists
        + prompt * (_PROMPT_TOKEN + n * _PROMPT_TOKEN_OF_ANSWER)
        + n * (_ANSWER + output * _OUTPUT_TOKEN)
        + logprobs_nbytes(of_prompt + n * of_answer, of_prompt + of_answer)
    )


def pooling_nbytes(request: EngineCoreRequest, pooler: PoolerSpec) -> int:
    """Return the maximum bytes of a text until its result is sent, in both processes."""
    prompt = len(request.prompt_token_ids)
    rows = prompt if pooler.pooling[0] == "all" else 1
    sizes = [pooler.size]
    if request.pooling is not None and request.pooling.bare:
        sizes += [dense.linear.inputs for dense in pooler.dense if dense.linear is not None]
    numbers = rows * max(sizes)
    return prompt * (_PROMPT_TOKEN + _PROMPT_TOKEN_OF_ANSWER) + _ANSWER + numbers * _POOLED_NUMBER


def logprobs_nbytes(num_candidates: int, num_written: int) -> int:
    """Return the bytes of logprobs while they are sent.

    Args:
        num_candidates: entries of all prompts and answers.
        num_written: entries that are written at once.
    """
    return num_candidates * _CANDIDATE + num_written * _WRITTEN_CANDIDATE


# Requests in the background may hold this part of the memory, or one of them more if it fits.
_BACKGROUND_SHARE = 4
# A tenant may hold at most this multiple of the free amount.
_LEFT = 8


def leaves_room(held: int, more: int, free: int) -> bool:
    """Return True if a tenant may hold more of a limited resource and still leave room for others.

    The more a tenant holds, the more must stay free: two tenants with unlimited demand hold equal
    amounts, and some room stays free. A tenant that holds nothing may use all free room.

    Args:
        held: amount that the tenant holds.
        more: amount that it requests.
        free: free amount.
    """
    return more <= free and (not held or held + more <= _LEFT * (free - more))


class RequestMemory:
    """Budget for the bytes of all unfinished requests.

    Args:
        limit: bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.kept = 0
        """Bytes of `used` that stay while no request runs."""
        self.spare: Callable[[int], None] = lambda nbytes: None
        """Callback that frees about the given number of bytes of optional data."""
        self._of_tenants: Counter[str] = Counter()
        self._background = 0

    @contextmanager
    def reserve(
        self, nbytes: int, tenant: str | None = None, *, background: bool = False
    ) -> Iterator[None]:
        """Reserve the maximum memory of a request.

        Args:
            nbytes: bytes.
            tenant: tenant of the request; each of several leaves room for the others.
            background: True for a request that leaves most of the memory to all others.

        Raises:
            RequestError: the request could never fit.
            QueueFullError: the request does not fit now.
        """
        if nbytes > self.limit:
            raise RequestError(
                f"The request may take {nbytes / 2**20:,.0f} MiB (its prompt and parameters, n x "
                f"max_tokens, logprobs), but all requests together may take only "
                f"{self.limit / 2**20:,.0f} MiB (--request-memory-bytes). "
                "Lower n, max_tokens or logprobs.",
                "max_tokens",
                "request_too_large",
            )
        if background:
            held, most = self._background, self.limit // _BACKGROUND_SHARE
            if held and held + nbytes > most:
                raise QueueFullError(
                    f"Lines of batches have {held / 2**20:,.1f} of the {most / 2**20:,.0f} MiB that"
                    " they may use together (a quarter of --request-memory-bytes); wait for them."
                )
        else:
            self.make_room(nbytes)
        if self.used + nbytes > self.limit:
            raise QueueFullError(
                f"The request may take {nbytes / 2**20:,.1f} MiB, but {self.used / 2**20:,.1f} of "
                f"the {self.limit / 2**20:,.0f} MiB for requests (--request-memory-bytes) are "
                "in use; try again later, or lower n, max_tokens or logprobs."
            )
        if tenant is not None and not background:
            self._take_share("The request", nbytes, tenant)
        self._background += nbytes if background else 0
        try:
            with self.hold(nbytes):
                yield
        finally:
            self._background -= nbytes if background else 0
            if tenant is not None and not background:
                self._give_back(nbytes, tenant)

    @contextmanager
    def collect(
        self, what: str = "results", tenant: str | None = None
    ) -> Iterator[Callable[[int], None]]:
        """Count parts of one request, such as its results, which stay until its answer is written.

        Args:
            what: name of the parts, for errors.
            tenant: tenant of the request; each of several leaves room for the others.

        Yields:
            A function that adds bytes. It raises RequestError if the parts could never fit, and
            QueueFullError if they do not fit now.
        """
        total = 0

        def add(nbytes: int) -> None:
            nonlocal total
            if total + nbytes > self.limit:
                raise RequestError(
                    f"The {what} of this request take more than the {self.limit / 2**20:,.0f} MiB "
                    "for requests (--request-memory-bytes); split the request.",
                    None,
                    "request_too_large",
                )
            self.make_room(nbytes)
            if self.used + nbytes > self.limit:
                raise QueueFullError(
                    f"The {what} of this request do not fit: {self.used / 2**20:,.1f} of the "
                    f"{self.limit / 2**20:,.0f} MiB for requests (--request-memory-bytes) are in "
                    "use; try again later, or split the request."
                )
            if tenant is not None:
                self._take_share(f"The {what} of this request", nbytes, tenant)
            total += nbytes
            self.used += nbytes

        try:
            yield add
        finally:
            self.used -= total
            if tenant is not None:
                self._give_back(total, tenant)

    def _take_share(self, what: str, nbytes: int, tenant: str) -> None:
        """Count bytes of a tenant, if they leave room for others."""
        held = self._of_tenants[tenant]
        if not leaves_room(held, nbytes, self.limit - self.used):
            raise QueueFullError(
                f"{what} may take {nbytes / 2**20:,.1f} MiB. Requests with this API key "
                f"have {held / 2**20:,.1f} of the {self.limit / 2**20:,.0f} MiB for requests "
                "(--request-memory-bytes), and the rest is for other keys; try again later."
            )
        self._of_tenants[tenant] += nbytes

    def _give_back(self, nbytes: int, tenant: str) -> None:
        self._of_tenants[tenant] -= nbytes
        if not self._of_tenants[tenant]:
            del self._of_tenants[tenant]

    def make_room(self, nbytes: int = 0) -> None:
        """Free optional data until `nbytes` more fit."""
        excess = self.used + nbytes - self.limit
        if excess > 0:
            self.spare(excess)

    @contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Count existing data, such as an answer that is being sent."""
        self.used += nbytes
        try:
            yield
        finally:
            self.used -= nbytes


async def trim_when_idle(memory: RequestMemory, client: WatchedClient) -> None:
    """Return free memory to the system each time that the last request has ended."""
    trimmed = True
    with suppress(EngineDeadError):
        await asyncio.shield(client.ready)
        while True:
            await asyncio.sleep(_TRIM_INTERVAL)
            idle = memory.used == memory.kept
            if idle and not trimmed:
                with suppress(StepFailedError):
                    await client.call_utility("trim_memory")
                await asyncio.to_thread(trim_memory)
            trimmed = idle
