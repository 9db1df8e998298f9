"""Exchange of rows among engines that divide the experts of a model.

Each engine computes requests of its own. Each rank, which is a process of an engine, has some
experts of every layer. At a mixture all ranks meet twice. After the first barrier each rank
computes its experts for the tokens of all engines. After the second barrier each rank sums the
results of its own engine's tokens. An engine without a step takes part without tokens.

If a token of any engine has an adapter that may change experts, the two products of the experts
are separate, and each rank changes the results of both for its own engine's tokens; see
`octavo.layers.expert_adapter`. All ranks agree on that at the beginning of each step.

If the engines are on several machines, each machine has such memory. Its ranks and a relay meet
there. Each meeting then has two barriers. Between them the relay exchanges rows with the relays of
the other machines; see `ExpertRelay`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.kernels.memory import placeholder
from octavo.kernels.native_base import DTYPE_CODES
from octavo.kernels.ops_experts import TokenSlots
from octavo.system.distributed import CACHE_LINE, GroupMemory, Rank, aligned
from octavo.system.tensor import HostTensor, Tensor, from_numpy, itemsize

N = TypeVar("N", bound=np.generic)


@dataclass(frozen=True)
class MixtureSizes:
    """Sizes of a mixture."""

    hidden: int
    top_k: int
    experts: int
    up: int = 0
    """Numbers of a row of the first product's results; 0: adapters do not change experts."""
    inner: int = 0
    """Numbers of such a row after the activation."""


@dataclass(frozen=True)
class MixtureRows:
    """A mixture's part of the memory, as bytes and numbers.

    T is the number of tokens of all slots, K that of a token's experts.
    """

    counts: NDArray[np.int32]
    """Number of tokens of each slot."""
    x: NDArray[np.uint8]
    """Inputs: [T, bytes of a row]."""
    ids: NDArray[np.int32]
    """Experts: [T, K]."""
    factors: NDArray[np.float32]
    """Factors: [T, K]."""
    results: NDArray[np.uint8]
    """Results of the pairs, sorted by expert and then by token: [T * K, bytes of a row]."""


class ExpertExchange:
    """Rows of all engines of a group, in memory that the engines share.

    The memory has a slot for each engine, with room for its largest step. The mixtures reserve the
    rows when they are built, so the sizes follow from the model alone. All layers use the same
    memory, one after the other.

    Args:
        rank: this rank among those of all engines.
        most_tokens: tokens of an engine's largest step.
        dtype: type of activations.
        per_engine: number of successive ranks that are an engine's. They have the same tokens, and
            the first one of them sends these.
        meeting: position among those that meet in this memory, if the engines are on several
            machines; the last one is a relay. None: all ranks meet here.
    """

    def __init__(
        self,
        rank: Rank,
        most_tokens: int,
        dtype: str,
        per_engine: int = 1,
        meeting: Rank | None = None,
    ) -> None:
        self.rank, self.per_engine = rank, per_engine
        self.meeting = rank if meeting is None else meeting
        self.mixtures: list[MixtureSizes] = []
        """All mixtures, in the order of the layers."""
        self._has_relay = meeting is not None
        self._most_tokens, self._dtype = most_tokens, dtype
        self._engines = rank.size // per_engine
        self._memory: GroupMemory | None = None
        self._begin = 0

    def reserve(self, hidden: int, top_k: int, experts: int, up: int = 0, inner: int = 0) -> None:
        """Make room for a mixture: `top_k` rows of `hidden` numbers for each token.

        With adapters of experts also for rows of `up` and `inner` numbers; see `MixtureSizes`.
        """
        assert self._memory is None, "memory is reserved before it is attached"
        self.mixtures.append(MixtureSizes(hidden, top_k, experts, up, inner))

    def for_relay(self) -> ExpertExchange:
        """Return the relay's end of this exchange."""
        meeting = replace(self.meeting, index=self.meeting.size - 1)
        made = ExpertExchange(self.rank, self._most_tokens, self._dtype, self.per_engine, meeting)
        made.mixtures = self.mixtures
        return made

    @property
    def num_engines(self) -> int:
        """Number of engines on all machines, each with a slot."""
        return self._engines

    @property
    def slot_size(self) -> int:
        """Number of tokens that a slot has room for."""
        return self._most_tokens

    @property
    def tokens(self) -> int:
        """Number of tokens that all slots have room for: T."""
        return self._most_tokens * self._engines

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(map(aligned, self._sizes))

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Bytes of the counts, x, experts, factors, results, inner rows and flags, in this order.

        A mixture's results of the first product have the memory of those of the second one.
        """
        number = itemsize(self._dtype)
        row = max((it.hidden for it in self.mixtures), default=0) * number
        results = max((max(it.hidden, it.up) for it in self.mixtures), default=0) * number
        inner = max((it.inner for it in self.mixtures), default=0) * number
        pairs = self.tokens * max((it.top_k for it in self.mixtures), default=0)
        counts = 4 * self._engines
        rows = self.tokens * row, 4 * pairs, 4 * pairs, pairs * results, pairs * inner
        return counts, *rows, counts

    def attach(self, memory: GroupMemory, begin: int) -> None:
        """Place the rows in a group's memory, from byte `begin` on."""
        assert begin % CACHE_LINE == 0
        assert begin + self.nbytes <= len(memory.data), "the group's memory is too small"
        self._memory, self._begin = memory, begin

    def _tensor(self, part: int, shape: tuple[int, ...], dtype: str) -> HostTensor:
        if self._memory is None:
            return placeholder(*shape, dtype=dtype)
        begin = self._begin + sum(map(aligned, self._sizes[:part]))
        nbytes = int(np.prod(shape)) * itemsize(dtype)
        return from_numpy(self._memory.data[begin : begin + nbytes]).view(dtype).view(shape)

    @property
    def slots(self) -> TokenSlots:
        """The slots: one for each engine."""
        counts = self._tensor(0, (self._engines,), "int32")
        return TokenSlots(counts, self._most_tokens, self.rank.index // self.per_engine)

    @property
    def _sends(self) -> bool:
        """True if this rank sends its engine's tokens."""
        return self.rank.index % self.per_engine == 0

    def inputs(self, hidden: int, top_k: int) -> tuple[HostTensor, HostTensor, HostTensor]:
        """Return x [T, H], experts int32 [T, K] and factors float32 [T, K] of all slots.

        T is `tokens`, H is `hidden` and K is `top_k`.
        """
        return (
            self._tensor(1, (self.tokens, hidden), self._dtype),
            self._tensor(2, (self.tokens, top_k), "int32"),
            self._tensor(3, (self.tokens, top_k), "float32"),
        )

    def results(self, hidden: int, top_k: int) -> HostTensor:
        """Return the rows of all pairs of a token and one of its experts: [T * K, H]."""
        return self._tensor(4, (self.tokens * top_k, hidden), self._dtype)

    def inner(self, size: int, top_k: int) -> HostTensor:
        """Return the inputs of the second product, which ranks with adapters write: [T * K, I]."""
        return self._tensor(5, (self.tokens * top_k, size), self._dtype)

    @property
    def adapts(self) -> bool:
        """True if adapters may change experts."""
        return any(it.inner for it in self.mixtures)

    def agree(self, has_adapters: bool) -> bool:
        """Return True if some token of the step that begins has an adapter, in any engine.

        All ranks call this. The barriers of the step separate the next call from this one.

        Args:
            has_adapters: True if a token of this engine has one.
        """
        flags = self._array(6, (self._engines,), np.int32)
        if self._sends:
            flags[self.slots.own] = has_adapters
        self.join()
        return bool(flags.any())

    def rows(self, sizes: MixtureSizes) -> MixtureRows:
        """Return a mixture's part of the memory."""
        tokens, top_k = self.tokens, sizes.top_k
        row = sizes.hidden * itemsize(self._dtype)
        return MixtureRows(
            self._array(0, (self._engines,), np.int32),
            self._array(1, (tokens, row), np.uint8),
            self._array(2, (tokens, top_k), np.int32),
            self._array(3, (tokens, top_k), np.float32),
            self._array(4, (tokens * top_k, row), np.uint8),
        )

    def _array(self, part: int, shape: tuple[int, ...], dtype: type[N]) -> NDArray[N]:
        assert self._memory is not None, "the memory is attached"
        begin = self._begin + sum(map(aligned, self._sizes[:part]))
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._memory.data[begin : begin + nbytes].view(dtype).reshape(shape)

    def send(self, x: Tensor, ids: Tensor, factors: Tensor | None) -> None:
        """Copy x [T, H], experts [T, K] and factors [T, K] of this engine's step to its slot."""
        if not self._sends:
            return
        (tokens, hidden), top_k, slots = x.shape, ids.shape[1], self.slots
        begin, end = slots.own * slots.size, (slots.own + 1) * slots.size
        assert tokens <= slots.size
        assert ids.is_contiguous()
        assert factors is None or factors.is_contiguous()
        own = [tensor[begin:end] for tensor in self.inputs(hidden, top_k)]
        _native.kernels.send_tokens(
            x=x.data_ptr(),
            x_stride=x.stride(0),
            ids=ids.data_ptr(),
            factors=0 if factors is None else factors.data_ptr(),
            x_out=own[0].data_ptr(),
            ids_out=own[1].data_ptr(),
            factors_out=own[2].data_ptr(),
            tokens_out=slots.counts[slots.own :].data_ptr(),
            tokens=tokens,
            hidden=hidden,
            top_k=top_k,
            dtype=DTYPE_CODES[x.dtype],
        )

    def send_nothing(self) -> None:
        """Note in this engine's slot that it has no tokens."""
        if self._sends:
            self._tensor(0, (self._engines,), "int32").numpy()[self.slots.own] = 0

    def join(self, relay: Callable[[], object] = lambda: None) -> None:
        """Wait until all ranks have come here.

        Args:
            relay: exchanges rows with other machines, after the ranks of this one have come; only
                the relay passes it.
        """
        if self._memory is None:  # a recording that only measures memory
            return
        self._memory.barrier()
        if self._has_relay:
            relay()
            self._memory.barrier()
