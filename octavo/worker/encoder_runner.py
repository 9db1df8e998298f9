"""Runner of an encoder: from the items of prompts to rows that the decoder reads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.attention.base import AttentionBackend, AttentionMetadata
from octavo.errors import EngineDeadError
from octavo.kernels.base import Ops
from octavo.kernels.memory import Arena, map_memory, placeholder
from octavo.kernels.native import NativeOps
from octavo.layers.step import StepContext, StepRotary
from octavo.messages import EMBEDS, EncoderSlice, MultiModalFeatureSpec
from octavo.models.blocks.encoder_input import EncoderItem, LongArray, array_of
from octavo.models.encoder import EncoderModel, EncoderSpec, Piece
from octavo.system.distributed import group_failure
from octavo.system.dtypes import DTYPE_NBYTES
from octavo.system.tensor import Tensor, dense, from_numpy, full

logger = logging.getLogger(__name__)

BLOCK_SIZE = 16
"""Number of tokens of a block of keys and values."""


def num_blocks(spec: EncoderSpec) -> int:
    """Return the number of blocks of the scratch memory of keys and values.

    Each segment begins a block, so segments of 16 tokens on average fit.
    """
    return 2 * -(-spec.max_num_tokens // BLOCK_SIZE)


def runner_nbytes(
    model: EncoderModel, ops: NativeOps, backend: AttentionBackend
) -> tuple[int, int]:
    """Return the exact bytes of an arena for the largest run, and those of its other memory.

    The other memory is that of the keys and values, an upper bound of the arrays, and, if runs may
    take several steps, the arrays and hidden states of one such run.

    Args:
        model: the encoder without memory of its weights.
        ops: its operations.
        backend: computes attention; only recorded.
    """
    spec = model.spec
    item = spec.inputs.largest(spec.max_num_tokens)

    def allocate(blocks: int, nbytes: int) -> Tensor:
        return placeholder(blocks, nbytes, dtype="uint8")

    caches, cached = _make_caches(spec, model.dtype, backend, allocate)
    step = make_context(spec, [item], caches, ops, backend, model.dtype)
    arena, plan = Arena(), _native.Plan()
    with ops.record(plan, arena):
        results = model.forward(step)
    rows = sum(result.nbytes for result in results)
    arrays = [
        array for part in (item.numbers, item.arrays, item.indices) for array in part.values()
    ]
    arrays += [it for it in (item.positions, item.rotary) if it is not None]
    given = 2 * sum(array.nbytes for array in arrays)
    states = 4 * item.num_tokens * spec.hidden_size * DTYPE_NBYTES[model.dtype]
    kept = given + states + rows
    return arena.peak, cached + rows + given + kept


def _make_caches(
    spec: EncoderSpec,
    dtype: str,
    backend: AttentionBackend,
    allocate: Callable[[int, int], Tensor],
) -> tuple[list[Tensor], int]:
    """Return the keys and values of each layer, in memory of all in turn, and its bytes.

    Args:
        spec: the encoder.
        dtype: type of the model.
        backend: computes attention.
        allocate: returns memory of a number of blocks with a number of bytes.
    """
    if spec.cache is None:
        return [], 0
    blocks, nbytes = num_blocks(spec), spec.cache.block_nbytes(BLOCK_SIZE, dtype)
    cache = spec.cache.view(allocate(blocks, nbytes), BLOCK_SIZE, dtype, backend)
    return [cache] * len(spec.layers), blocks * nbytes


def encoder_arena(nbytes: int) -> Arena:
    """Return an arena for runs of any size, one after the other.

    A smaller run may have larger gaps between its buffers, so there is room for twice the bytes;
    the system allocates only the pages that are used.

    Args:
        nbytes: bytes of the largest run: `Scratch.encoder_arena`.
    """
    return Arena(2 * nbytes)


def make_context(
    spec: EncoderSpec,
    items: Sequence[EncoderItem],
    caches: Sequence[Tensor],
    ops: Ops,
    backend: AttentionBackend,
    dtype: str,
) -> StepContext:
    """Return the context of a run of items, which are joined without padding.

    Args:
        spec: the encoder.
        items: the arrays of the items.
        caches: the keys and values of each layer.
        ops: moves arrays to the device.
        backend: computes attention.
        dtype: type of the model.
    """
    counts = np.array([item.num_tokens for item in items])
    starts, total = np.cumsum(counts) - counts, int(counts.sum())
    first, arrays = items[0], {}
    for name in first.numbers:
        joined = from_numpy(_join([item.numbers[name] for item in items]))
        arrays[name] = ops.to_device(dense(joined, dtype))
    for name in first.arrays:
        arrays[name] = ops.to_device(_join([item.arrays[name] for item in items]))
    for name in first.indices:
        pairs = zip(items, starts, strict=True)
        indices = [
            (item.indices[name] + start).astype(item.indices[name].dtype) for item, start in pairs
        ]
        arrays[name] = ops.to_device(_join(indices))
    rows = ops.to_device(np.arange(total))
    positions, rotary = rows, None
    if first.positions is not None:
        given = [item.positions for item in items if item.positions is not None]
        positions = ops.to_device(_join(given))
    if first.rotary is not None:
        tables = [item.rotary for item in items if item.rotary is not None]
        table = _join(tables)
        parts = 1 if table.ndim == 2 else table.shape[1]
        of_parts = ops.to_device(_rotary_rows(total, parts, 0, total))
        rotary = StepRotary(of_parts, ops.to_device(table.reshape(-1, table.shape[-1])))
    kinds = range(len(first.segments))
    segments = [np.concatenate([item.segments[kind] for item in items]) for kind in kinds]
    limits = [item.seen for item in items if item.seen is not None]
    seen = _join(limits) if limits else None
    return StepContext(
        positions=positions,
        caches=caches,
        metadata=_metadata_of_layers(spec, segments, seen, ops, 0, total),
        backend=backend,
        arrays=arrays,
        rotary=rotary,
        item_sizes=[item.size for item in items],
    )


def _join(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.ascontiguousarray(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))


def _rotary_rows(num_tokens: int, parts: int, begin: int, end: int) -> LongArray:
    """Return rows of a table [num_tokens, parts] for some tokens, those of each part in turn."""
    rows = np.arange(num_tokens * parts).reshape(num_tokens, parts)
    return rows[begin:end].T.ravel()


def _metadata_of_layers(
    spec: EncoderSpec,
    segments: Sequence[LongArray],
    seen: LongArray | None,
    ops: Ops,
    begin: int,
    end: int,
) -> list[AttentionMetadata]:
    """Return the metadata of each layer for the tokens from `begin` up to `end`.

    Args:
        spec: the encoder.
        segments: sizes of the segments of all tokens, for each kind of attention.
        seen: see `EncoderItem`.
        ops: moves arrays to the device.
        begin: first token.
        end: token after the last one.
    """
    kinds = [_metadata(sizes, seen, ops, begin, end) for sizes in segments]
    return [kinds[kind] for kind in spec.segments or (0,) * len(spec.layers)]


def _metadata(
    sizes: LongArray, seen: LongArray | None, ops: Ops, begin: int, end: int
) -> AttentionMetadata:
    """Return the places of segments of tokens: each is a request in blocks of its own."""
    blocks = -(-sizes // BLOCK_SIZE)
    first_blocks = np.cumsum(blocks) - blocks
    starts = np.concatenate([[0], np.cumsum(sizes)])
    slots = np.arange(starts[-1]) + np.repeat(first_blocks * BLOCK_SIZE - starts[:-1], sizes)
    first = int(np.searchsorted(starts, begin, "right")) - 1
    last = int(np.searchsorted(starts, end, "left"))
    some = slice(first, last)
    table = first_blocks[some, None] + np.arange(blocks[some].max())
    queries = np.clip(starts[first : last + 1], begin, end) - begin
    lens = (sizes if seen is None else seen)[some]
    return AttentionMetadata(
        num_reqs=last - first,
        num_tokens=end - begin,
        max_query_len=int(np.diff(queries).max()),
        max_seq_len=int(lens.max()),
        query_start_loc=ops.to_device(queries.astype(np.int32)),
        seq_lens=ops.to_device(lens.astype(np.int32)),
        block_table=ops.to_device(table.astype(np.int32)),
        slot_mapping=ops.to_device(slots[begin:end].astype(np.int64)),
    )


_Stream: TypeAlias = "tuple[Tensor, Tensor | None]"
"""Hidden states x and residual of a run, as for `Layer`."""


def _tokens(stream: _Stream, begin: int, end: int) -> _Stream:
    """Return some tokens of a stream."""
    x, residual = stream
    return x[begin:end], None if residual is None else residual[begin:end]


@dataclass(slots=True)
class _PartialRun:
    """Run of one item that takes several steps."""

    identifier: str
    item: EncoderItem
    step: StepContext
    pieces: list[Piece]
    rows: Tensor
    """[rows, out_size]: the result."""
    given: _Stream
    """Input of the layer that is computed; its memory and that of `result` are the run's own."""
    result: _Stream | None = None
    """Result of the layer, of which the first tokens are there; the others may hold anything."""
    num_done: int = 0
    """Number of computed pieces."""
    num_stored: int = 0
    """Number of the first tokens whose keys and values of the layer are in the scratch memory."""


class EncoderRunner:
    """Runner of an encoder.

    An item's rows have the same bits alone and with any others.

    Args:
        model: the encoder.
        ops: its operations.
        backend: computes attention.
        arena: memory of the intermediate results of native operations; see `encoder_arena`. None:
            each result has memory of its own.
    """

    def __init__(
        self,
        model: EncoderModel,
        ops: Ops,
        backend: AttentionBackend,
        arena: Arena | None = None,
    ) -> None:
        self.spec = spec = model.spec
        self._model, self._ops, self._backend = model, ops, backend
        self._arena = arena
        self._partial: _PartialRun | None = None
        """Run that later steps continue."""
        self._num_blocks = num_blocks(spec)

        def allocate(blocks: int, nbytes: int) -> Tensor:
            return ops.to_device(map_memory(blocks * nbytes).view(blocks, nbytes))

        self._caches, _ = _make_caches(spec, model.dtype, backend, allocate)

    def rows_of(self, item: MultiModalFeatureSpec) -> Tensor:
        """Return the rows that an item has in place of an input, in the model's type.

        They are on the device of the model: [rows, out_size].
        """
        embeds = item.data[EMBEDS]
        given = from_numpy(np.frombuffer(embeds.data, np.uint8)).view(embeds.dtype)
        return self._ops.to_device(dense(given.view(*embeds.shape), self._model.dtype))

    def run(self, items: Sequence[MultiModalFeatureSpec]) -> list[Tensor]:
        """Return the rows of each item: [rows, out_size], in the model's type.

        Each item has memory of its own. The columns of `EncoderSpec.taps` are the last ones.
        Items that exceed `max_num_tokens` together are computed one part after the other.
        """
        results: list[Tensor] = []
        for group in self._divide(items):
            results += self._run(group)
        return results

    def advance(self, part: EncoderSlice) -> Tensor | None:
        """Compute a part of an item's run; return its rows if the run has ended.

        The rows have the same bits as those of `run`. If a part fails, the run is forgotten: its
        further parts do nothing, and `run_apart` computes the item and reports the failure. In a
        divided encoder a failure is an `EngineDeadError`, as in `run`.
        """
        run, self._partial = self._partial, None
        try:
            if not part.begin:
                run = None  # its memory is free before the next one begins
                run = self._begin(part.item)
            elif run is None or (run.identifier, run.num_done) != (
                part.item.identifier,
                part.begin,
            ):
                return None
            for piece in run.pieces[max(part.begin, 1) : part.end]:
                self._compute(run, piece)
        except Exception as error:
            if self.spec.is_divided:  # the other ranks may wait for this one
                raise group_failure(error) from error
            if isinstance(error, EngineDeadError | MemoryError):
                raise
            logger.debug("a part of an encoder's run failed", exc_info=True)
            return None
        run.num_done = part.end
        if part.end == len(run.pieces):
            return run.rows
        self._partial = run
        return None

    def _begin(self, feature: MultiModalFeatureSpec) -> _PartialRun:
        """Return the run of an item after its first piece."""
        arrays = {name: array_of(tensor) for name, tensor in feature.data.items()}
        item = self.spec.inputs.read(arrays)
        ops, dtype = self._ops, self._model.dtype
        step = make_context(self.spec, [item], self._caches, ops, self._backend, dtype)
        with self._memory():
            x = self._model.begin(step)
        given = self._put(None, (x, None), 0, item.num_tokens)
        rows = ops.empty(item.num_rows, self.spec.out_size, like=x)
        pieces = self.spec.pieces(item.num_tokens, item.num_rows)
        return _PartialRun(feature.identifier, item, step, pieces, rows, given)

    def _compute(self, run: _PartialRun, piece: Piece) -> None:
        """Compute a piece of a run that is not the first one."""
        model, layer, begin, end = self._model, piece.layer, piece.begin, piece.end
        if piece.kind == "store":
            self._store(run, layer, end)
        elif piece.kind == "layer":
            step, num_tokens = run.step, run.item.num_tokens
            if end - begin < num_tokens:
                self._store(run, layer, num_tokens)
                step = self._part_of(run, begin, end)
            with self._memory():
                part = model.layer(layer, *_tokens(run.given, begin, end), step)
            run.result = self._put(run.result, part, begin, num_tokens)
            if end == num_tokens:
                run.given, run.result, run.num_stored = run.result, run.given, 0
        else:
            rows = (begin, end) if end - begin < run.item.num_rows else None
            with self._memory():
                if piece.kind == "tap":
                    found = model.tap(layer, *run.given, run.step, rows)
                else:
                    found = model.end(*run.given, run.step, rows)
            first = self.spec.first_column(piece)
            self._ops.copy_(run.rows[begin:end, first : first + found.shape[1]], found)

    def _store(self, run: _PartialRun, layer: int, end: int) -> None:
        """Store the keys and values of a layer before token `end` that are not stored yet."""
        begin = run.num_stored
        if begin < end:
            step = self._part_of(run, begin, end)
            with self._memory():
                self._model.store(layer, *_tokens(run.given, begin, end), step)
            run.num_stored = end

    def _part_of(self, run: _PartialRun, begin: int, end: int) -> StepContext:
        """Return the context of some tokens of a run; its arrays are those of all tokens."""
        rotary = run.step.rotary
        if rotary is not None:
            tokens = run.item.num_tokens
            rows = _rotary_rows(tokens, rotary.rows.shape[0] // tokens, begin, end)
            rotary = StepRotary(self._ops.to_device(rows), rotary.table)
        return replace(
            run.step,
            positions=run.step.positions[begin:end],
            metadata=_metadata_of_layers(
                self.spec, run.item.segments, run.item.seen, self._ops, begin, end
            ),
            rotary=rotary,
        )

    def _put(self, stream: _Stream | None, part: _Stream, begin: int, num_tokens: int) -> _Stream:
        """Write tokens from `begin` into a stream, which gets memory of its own; return it."""

        def write(old: Tensor | None, new: Tensor) -> Tensor:
            if old is None:
                old = self._ops.empty(num_tokens, new.shape[1], like=new)
            self._ops.copy_(old[begin : begin + new.shape[0]], new)
            return old

        (old_x, old_residual), (x, residual) = stream or (None, None), part
        return write(old_x, x), None if residual is None else write(old_residual, residual)

    def run_largest(self) -> list[Tensor]:
        """Run the longest item, of zeros, for a measurement of memory; return its rows."""
        return self._run([self.spec.inputs.largest(self.spec.max_num_tokens)])

    def run_apart(
        self, items: Sequence[MultiModalFeatureSpec]
    ) -> tuple[list[Tensor], dict[int, str]]:
        """Run the items in such a way that one that fails harms no other.

        Returns:
            The rows of each item, and messages by the index of the items that failed. Their rows
            are NaN, so that no answer can be made from them.
        """
        try:
            return self.run(items), {}
        except (EngineDeadError, MemoryError):
            raise
        except Exception as error:
            if len(items) == 1:
                logger.exception("an encoder failed with an item, and its requests fail with it")
                nan = full((items[0].num_rows, self.spec.out_size), np.nan, "float32")
                rows = self._ops.to_device(dense(nan, self._model.dtype))
                return [rows], {0: f"{type(error).__name__}: {error}"}
        results: list[Tensor] = []
        errors: dict[int, str] = {}
        for index, item in enumerate(items):
            own, failed = self.run_apart([item])
            results += own
            if failed:
                errors[index] = failed[0]
        return results, errors

    def _divide(self, items: Iterable[MultiModalFeatureSpec]) -> Iterator[list[EncoderItem]]:
        """Yield groups of successive items that fit in the memory of a run."""
        group: list[EncoderItem] = []
        for feature in items:
            arrays = {name: array_of(tensor) for name, tensor in feature.data.items()}
            item = self.spec.inputs.read(arrays)
            assert self._fits([item]), "the item exceeds max_num_tokens"
            if not self._fits([*group, item]):
                yield group
                group = []
            group.append(item)
        if group:
            yield group

    def _fits(self, items: Sequence[EncoderItem]) -> bool:
        tokens = sum(item.num_tokens for item in items)
        blocks = sum(item.num_blocks(BLOCK_SIZE) for item in items)
        return tokens <= self.spec.max_num_tokens and blocks <= self._num_blocks

    def _run(self, items: Sequence[EncoderItem]) -> list[Tensor]:
        """Return the rows of items that fit together."""
        ops, dtype = self._ops, self._model.dtype
        step = make_context(self.spec, items, self._caches, ops, self._backend, dtype)
        if self._partial is not None:
            self._partial.num_stored = 0  # its keys and values are overwritten
        with self._memory():
            try:
                parts = self._model.forward(step)
            except Exception as error:
                if self.spec.is_divided:  # the other ranks may wait for this one
                    raise group_failure(error) from error
                raise
        return self._rows(items, parts)

    def _rows(self, items: Sequence[EncoderItem], parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows of each item, in memory of their own, from those of a run."""
        ops, results, row = self._ops, [], 0
        for item in items:
            rows = ops.empty(item.num_rows, self.spec.out_size, like=parts[0])
            column = 0
            for part in parts:
                end = column + part.shape[1]
                ops.copy_(rows[:, column:end], part[row : row + item.num_rows])
                column = end
            results.append(rows)
            row += item.num_rows
        assert row == len(parts[0])
        return results

    def _memory(self) -> AbstractContextManager[None]:
        if self._arena is None:
            return nullcontext()
        assert isinstance(self._ops, NativeOps)
        return self._ops.allocate_in(self._arena)
