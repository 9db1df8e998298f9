"""Balancing of experts, which move between ranks while steps run.

All ranks count the tokens of every expert in the same steps, with the same results. So all ranks
make the same decisions in the same steps. They send each other nothing but the experts themselves.
Layer by layer, the moving experts go through shared memory:

1. In some steps, ranks copy experts that others will have to the shared memory.
2. Between two steps all ranks switch to the new placement. New experts are read from the shared
   memory.
3. In some steps, ranks copy their new experts to their own memory, in place of those that they
   gave away. Then they use these copies.

Each part of this work is done at the beginning of a step. The barriers within the step separate
that part from the next one. Before a step a rank copies `_STEP_NBYTES` at most, so no step takes
much longer.
"""

from __future__ import annotations

import logging
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from octavo.config.device import EplbConfig
from octavo.errors import EngineDeadError
from octavo.kernels.ops_experts import PlacedExperts
from octavo.kernels.weights import PackedWeight, QuantizedWeight
from octavo.layers.experts import Experts
from octavo.plan.balance_layout import BalanceLayout, LayerSlots
from octavo.system.distributed import COUNTER_NBYTES, Counter, GroupMemory, Rank
from octavo.system.tensor import HostTensor, from_numpy
from octavo.worker.expert_placement import Loads, Placement, balance, first_placement, rank_loads
from octavo.worker.graphs import StepResult, StepRunner
from octavo.worker.input_batch import StepInputs

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]

_STEP_NBYTES = 8 * 2**20


class ExpertSource(Protocol):
    """Source of the experts' weights that are not in this process's memory."""

    @property
    def is_busy(self) -> bool:
        """True while a thread reads the loaded weights, which must not change."""
        ...

    def wait(self) -> None:
        """Wait until no thread reads the loaded weights."""
        ...

    def load(self, block: str, index: int, up: Bytes, down: Bytes) -> None:
        """Read an expert of a block from the checkpoint, and pack it.

        Args:
            block: prefix of the names of the block's weights.
            index: number of the expert in the block.
            up: receives the packed weight up (with the gate).
            down: receives the packed weight down.

        Raises:
            ModelError: the checkpoint cannot be read.
        """
        ...


class ExpertBalancer:
    """A rank's part of the balancing. All calls are from the thread that runs the steps.

    Args:
        mixtures: mixtures of the model, before a step is recorded.
        layout: layout of the memory that all ranks share.
        rank: this rank among those that divide the experts.
        config: settings of the balancing.
        source: source of the experts that this rank lacks when it takes over a placement.
    """

    def __init__(
        self,
        mixtures: Sequence[Experts],
        layout: BalanceLayout,
        rank: Rank,
        config: EplbConfig,
        source: ExpertSource,
    ) -> None:
        self.layout, self.config = layout, config
        self._index, self._source = rank.index, source
        self.loads: Loads = np.zeros(layout.counts_shape, np.int64)
        """Tokens of all ranks since the last `_restart`: int64 [mixtures, experts]."""
        self._layers = [
            _Layer(mixture, slots, row, rank)
            for mixture, slots, row in zip(mixtures, layout.layers, self.loads, strict=True)
        ]
        self._memory: GroupMemory | None = None
        self._begin = 0
        self._versions: list[Counter] = []
        self._ready: list[Counter] = []
        self._decisions: list[Counter] = []
        self._version = 0
        """Number of switches to a new placement."""
        self._step = 0
        """Number of steps that have begun since the last `_restart`."""
        self._is_ready = False
        self._earlier: deque[Loads] = deque()
        """Loads at the beginnings of the windows that have not ended yet."""
        self._logged: Loads = self.loads.copy()
        self._window: Loads = self.loads
        """Loads of the window by which the current rebalancing decides."""
        self.process_tokens = 0.0, 0.0
        """Mean and maximum of the tokens of a rank in the last window, over all layers."""
        self._left: list[int] = []
        """Layers that the current rebalancing has not come to yet."""
        self._move: _Move | None = None
        """Move of the experts of the current layer."""

    def attach(self, memory: GroupMemory, begin: int) -> None:
        """Use the memory of a group, from byte `begin` on."""
        layout = self.layout
        self._memory, self._begin = memory, begin
        self._versions, self._ready, self._decisions = (
            [memory.counter(begin + offset + i * COUNTER_NBYTES) for i in range(layout.ranks)]
            for offset in (layout.versions, layout.ready, layout.decisions)
        )

    @property
    def placements(self) -> list[Placement]:
        """Current placement of each mixture."""
        return [layer.placement for layer in self._layers]

    @property
    def num_switches(self) -> int:
        """Number of changes of a layer's placement since the start."""
        return self._version

    def advance(self) -> None:
        """Do the balancing's work before the next step. All ranks call this before each step.

        Raises:
            EngineDeadError: ranks have decided differently.
        """
        self._step += 1
        step, done = self._step, self._step - 1
        if not self._is_ready and not self._source.is_busy:
            self._ready[self._index].post(step)
            self._is_ready = True
        if self.config.log_balancedness and self._index == 0:
            self._log(done)
        window = self._take_window(done)
        if window is not None:
            self.process_tokens = self._balance(window)
        if window is not None and self._move is None and not self._left and self._all_ready(step):
            self._window, self._left = window, list(range(len(self._layers)))
        if self._move is not None:
            self._continue(self._move)
        elif self._left:
            self._begin_move(self._left.pop(0))

    def reset(self) -> None:
        """Return to the first placement, after all weights have been loaded again."""
        has_moved = any((layer.placement != layer.first).any() for layer in self._layers)
        for layer in self._layers:
            layer.use(layer.first)
        if has_moved:
            self._publish()
        self._move = None
        self._restart()

    def settle(self) -> None:
        """Take over the newest placement of all ranks, while none of them runs a step.

        If one rank has switched to a new placement, all ranks have copied the moving experts to the
        shared memory. So a rank that has not switched yet does so now. A new process does not know
        what is in the shared memory, and reads its experts from the checkpoint.

        Raises:
            ModelError: the checkpoint cannot be read.
        """
        newest = max((counter.value for counter in self._versions), default=0)
        move = self._move
        if move is not None and newest == self._version + 1 and move.tick == move.num_outgoing:
            self._switch(move)
        if newest != self._version:
            self._load(newest)
        elif move is not None and move.has_switched:
            for tick in range(move.num_incoming):
                _copy(move.incoming, tick)
            self._layers[move.layer].use(move.target)
        self._move = None
        self._restart()

    def _restart(self) -> None:
        """Count steps and loads from 0. All ranks do so before the same step."""
        self._step, self._is_ready, self._left = 0, False, []
        self._ready[self._index].post(0)
        self.loads[:] = 0
        self._logged[:] = 0
        self._earlier.clear()

    def _all_ready(self, step: int) -> bool:
        """Return True if all ranks were ready before a step.

        All ranks get the same answer, since the barriers of a step separate its `post` from the
        next step's check.
        """
        return all(0 < counter.value < step for counter in self._ready)

    def _take_window(self, done: int) -> Loads | None:
        """Return the loads of the last steps if it is time to balance, after `done` steps."""
        window, interval = self.config.window_size, self.config.step_interval
        if (done + window) % interval == 0:
            self._earlier.append(self.loads.copy())
        if done == 0 or done % interval:
            return None
        return self.loads - self._earlier.popleft() if done >= window else self.loads.copy()

    def _log(self, done: int) -> None:
        """Log the balancedness of the last steps."""
        if done == 0 or done % self.config.log_balancedness_interval:
            return
        steps, self._logged = self.loads - self._logged, self.loads.copy()
        mean, most = self._balance(steps)
        logger.info(
            "EPLB step %d: avg_tokens=%.2f, max_tokens=%.2f, balancedness=%.4f",
            done,
            mean,
            most,
            mean / most if most else 1.0,
        )

    def _balance(self, loads: Loads) -> tuple[float, float]:
        """Return the mean and the maximum of the ranks' loads, each summed over all layers."""
        pairs = zip(self._layers, loads, strict=True)
        of_layers = [layer.rank_loads(row) for layer, row in pairs]
        return (
            sum(float(each.mean()) for each in of_layers),
            sum(float(each.max()) for each in of_layers),
        )

    def _begin_move(self, index: int) -> None:
        """Decide on the new placement of a layer, and begin to move experts if it differs."""
        layer = self._layers[index]
        loads = self._window[index, : layer.slots.experts]
        target = balance(loads, layer.placement)
        if (target == layer.placement).all():
            return
        self._move = move = self._make_move(index, target)
        self._decisions[self._index].post(move.checksum)
        if self._index == 0 and logger.isEnabledFor(logging.DEBUG):
            before, after = (rank_loads(loads, at).max() for at in (layer.placement, target))
            logger.debug(
                "EPLB moves %d experts of %s: the largest load of %d processes falls from %.0f to "
                "%.0f tokens, of %d",
                move.num_experts,
                layer.slots.block.rstrip("."),
                self.layout.ranks,
                before,
                after,
                loads.sum(),
            )
        self._continue(move)

    def _make_move(self, index: int, target: Placement) -> _Move:
        layer, nbytes = self._layers[index], self.layout.layers[index].expert_nbytes
        current, staging = layer.placement, self._data(self.layout.staging, self.layout.nbytes)
        moving = sorted(set(target[target != current].tolist()))
        staged = {expert: staging[i * nbytes : (i + 1) * nbytes] for i, expert in enumerate(moving)}
        counts, outgoing, incoming = np.zeros(self.layout.ranks, np.int64), [], []
        for expert in moving:
            sender = int((current == expert).any(1).argmax())
            counts[sender] += 1
            if sender == self._index:
                (held,) = np.flatnonzero(current[sender] == expert).tolist()
                outgoing += layer.pieces(held, staged[expert], outgoing=True)
        own = target[self._index]
        for slot in np.flatnonzero(own != current[self._index]).tolist():
            incoming += layer.pieces(slot, staged[int(own[slot])], outgoing=False)
        return _Move(
            index,
            target,
            staged,
            outgoing,
            incoming,
            num_outgoing=-(-int(counts.max()) * nbytes // _STEP_NBYTES),
            num_incoming=-(-int((target != current).sum(1).max()) * nbytes // _STEP_NBYTES),
        )

    def _continue(self, move: _Move) -> None:
        """Do a step's part of a move."""
        tick, move.tick = move.tick, move.tick + 1
        if tick < move.num_outgoing:
            _copy(move.outgoing, tick)
            return
        if tick == move.num_outgoing:
            if any(counter.value != move.checksum for counter in self._decisions):
                raise EngineDeadError("ranks have counted different loads of experts")
            self._switch(move)
        tick -= move.num_outgoing
        _copy(move.incoming, tick)
        if tick == move.num_incoming - 1:
            self._layers[move.layer].use(move.target)
            self._move = None

    def _switch(self, move: _Move) -> None:
        """Use the new placement from now on."""
        layer = self._layers[move.layer]
        layer.use(move.target, move.staged)
        move.has_switched = True
        self._publish()

    def _publish(self) -> None:
        """Make the placements of all layers the next version, which new processes take over."""
        table = self._placement(self._version + 1)
        np.concatenate([layer.placement.ravel() for layer in self._layers], out=table)
        self._set_version(self._version + 1)

    def _load(self, version: int) -> None:
        """Read the experts of a version's placement that are not in this process's memory."""
        self._source.wait()
        table = np.split(self._placement(version), self.layout.placement_ends[:-1])
        for layer, row in zip(self._layers, table, strict=True):
            target = row.reshape(self.layout.ranks, -1).copy()
            for slot in np.flatnonzero(target[self._index] != layer.in_slots).tolist():
                expert = int(target[self._index, slot])
                self._source.load(layer.slots.block, expert, *layer.memory[slot])
            layer.use(target)
        self._set_version(version)

    def _set_version(self, version: int) -> None:
        self._version = version
        self._versions[self._index].post(version)

    def _placement(self, version: int) -> NDArray[np.int32]:
        """Return the shared memory of a version's placement."""
        return self._data(*self.layout.placement(version)).view(np.int32)

    def _data(self, begin: int, end: int) -> Bytes:
        assert self._memory is not None, "attach the memory first"
        return self._memory.data[self._begin + begin : self._begin + end]


class BalancedSteps:
    """`StepRunner` of a rank that balances experts before each step."""

    def __init__(self, steps: StepRunner, balancer: ExpertBalancer) -> None:
        self._steps, self._balancer = steps, balancer
        self.buffers, self.put_tokens = steps.buffers, steps.put_tokens

    def run(self, inputs: StepInputs, params: NDArray[np.void] | None) -> StepResult:
        """Implement `StepRunner`."""
        self._balancer.advance()
        return self._steps.run(inputs, params)


class _Layer:
    """A layer's mixture, with the memory of this rank's experts."""

    def __init__(self, mixture: Experts, slots: LayerSlots, loads: Loads, rank: Rank) -> None:
        self.slots, self._index = slots, rank.index
        self.first: Placement = first_placement(slots.experts, rank.size, slots.slots)
        self.memory = [
            (_bytes(up), _bytes(down))
            for up, down in zip(mixture.up.weights, mixture.down.weights, strict=True)
            if up is not None and down is not None
        ]
        """Bytes of the weights up and down in each slot."""
        self._tables = [
            cast("HostTensor", stacked.addresses).numpy() for stacked in (mixture.up, mixture.down)
        ]
        self._shares: NDArray[np.int32] = np.ones((slots.experts, 2), np.int32)
        mixture.placed = PlacedExperts(from_numpy(loads[: slots.experts]), from_numpy(self._shares))
        self.placement = self.first
        self.in_slots: NDArray[np.int32] = self.first[self._index].copy()
        """Expert whose weights are in each of this rank's slots."""
        self.use(self.first)

    def rank_loads(self, loads: Loads) -> NDArray[np.float64]:
        """Return the load of each rank, from those of the experts."""
        return rank_loads(loads[: self.slots.experts], self.placement)

    def pieces(self, slot: int, staged: Bytes, *, outgoing: bool) -> list[tuple[Bytes, Bytes]]:
        """Return the copies of an expert's weights up and down, as pairs (to, from).

        Args:
            slot: the slot of this rank.
            staged: the expert's place in the shared memory.
            outgoing: True: copy from the slot to the shared memory; False: copy back.
        """
        up, down = self.memory[slot]
        pairs = [(staged[: len(up)], up), (staged[len(up) :], down)]
        return pairs if outgoing else [(own, place) for place, own in pairs]

    def use(self, placement: Placement, staged: dict[int, Bytes] | None = None) -> None:
        """Use a placement from the next step on.

        Args:
            placement: the placement: int32 [ranks, slots].
            staged: shared memory of the experts that have moved; None: the weights of this rank's
                experts are all in its slots.
        """
        own = placement[self._index].tolist()
        for table, part in zip(self._tables, (0, 1), strict=True):
            table[:] = 0
            for slot, expert in enumerate(own):
                if staged is None or self.in_slots[slot] == expert:
                    table[expert] = self.memory[slot][part].ctypes.data
                else:
                    begin = part * self.slots.up_nbytes
                    table[expert] = staged[expert].ctypes.data + begin
        has = np.zeros((len(placement), self.slots.experts), bool)
        np.put_along_axis(has, placement, True, 1)
        self._shares[:, 0] = has[: self._index].sum(0)
        self._shares[:, 1] = has.sum(0)
        self.placement = placement
        if staged is None:
            self.in_slots[:] = own


@dataclass(slots=True)
class _Move:
    """Move of a layer's experts to a new placement."""

    layer: int
    target: Placement
    staged: dict[int, Bytes]
    """Shared memory of each moving expert."""
    outgoing: list[tuple[Bytes, Bytes]]
    """Copies from this rank to the shared memory: pairs (to, from)."""
    incoming: list[tuple[Bytes, Bytes]]
    """Copies from the shared memory to this rank: pairs (to, from)."""
    num_outgoing: int
    """Number of steps in which ranks copy experts to the shared memory."""
    num_incoming: int
    """Number of steps in which ranks copy experts from the shared memory."""
    tick: int = 0
    """Number of steps since the beginning of the move."""
    has_switched: bool = False

    @property
    def checksum(self) -> int:
        """Checksum of the layer and its new placement."""
        return zlib.crc32(self.target.tobytes(), self.layer)

    @property
    def num_experts(self) -> int:
        """Number of experts that move."""
        return len(self.staged)


def _bytes(weight: PackedWeight | QuantizedWeight) -> Bytes:
    """Return the memory of a weight."""
    data: Bytes = cast("HostTensor", weight.data).view("uint8").numpy().reshape(-1)
    assert data.ctypes.data == weight.data.data_ptr(), "the weight is not one piece of memory"
    return data


def _copy(pairs: Sequence[tuple[Bytes, Bytes]], tick: int) -> None:
    """Copy the `tick`-th `_STEP_NBYTES` of all pairs (to, from), one pair after the other."""
    begin = tick * _STEP_NBYTES
    end = begin + _STEP_NBYTES
    for target, source in pairs:
        if end <= 0:
            return
        part = slice(max(0, begin), end)
        target[part] = source[part]
        begin, end = begin - len(source), end - len(source)
