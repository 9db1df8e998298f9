"""Communication of a worker with the other ranks of its model."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.layers.shared import BufferRows, SharedBuffers
from octavo.layers.step import Handed
from octavo.plan.group_layout import ERRORS_NBYTES, HANDED_SLOTS, SLOT_HEAD_NBYTES, GroupLayout
from octavo.plan.setup import WorkerSetup
from octavo.system.distributed import COUNTER_NBYTES, GroupMemory
from octavo.system.tensor import HostTensor, empty, from_numpy
from octavo.worker.graphs import StepResult, StepRunner
from octavo.worker.input_batch import StepBuffers, StepInputs
from octavo.worker.token_broadcast import TokenBroadcast

# Most characters of the message of an error that a stage sends to the next one.
_MESSAGE_LENGTH = 500


def make_buffers(setup: WorkerSetup) -> SharedBuffers | None:
    """Return the buffers that the ranks of a stage share; None if a stage is one rank."""
    if setup.rank.size == 1:
        return None
    tokens, samples = setup.max_num_batched_tokens, setup.largest_step.samples
    most_rows: dict[BufferRows, int] = {
        "tokens": tokens,
        "samples": samples,
        "prompt_logprobs": setup.prompt_logprobs_rows,
        "encoder": max((encoder.max_num_tokens for encoder in setup.part.encoders), default=0),
    }
    return SharedBuffers(setup.rank, most_rows, setup.dtype)


def make_received(setup: WorkerSetup, dtype: str) -> Handed | None:
    """Return memory for the output of the stage before; None for the first stage."""
    if setup.rank.is_first:
        return None
    tokens, spec, inputs = setup.max_num_batched_tokens, setup.spec, setup.part.layer_inputs
    residual = empty(tokens, spec.hidden_size, dtype=dtype) if spec.hands_residual else None
    return (
        empty(tokens, spec.stream_size, dtype=dtype),
        residual,
        None if inputs is None else empty(tokens, *inputs, dtype=dtype),
    )


class Group:
    """Memory and messages that ranks share.

    Args:
        setup: contains the rank and the group's descriptor.
        buffers: buffers of the built model, if several ranks compute the same layers.

    Raises:
        ConfigError: the other ranks do not compute the same model.
    """

    def __init__(self, setup: WorkerSetup, buffers: SharedBuffers | None) -> None:
        assert setup.group is not None, "the executor has made no memory for the group"
        rank, layout = setup.rank, setup.group_layout
        self.memory = GroupMemory(setup.group, layout.nbytes, rank)
        self.broadcast = TokenBroadcast(self.memory, layout)
        self.errors: dict[str, str] = {}
        """Errors of the requests of the step that begins; the run adds those of earlier stages, and
        the next stage gets all."""
        self._rank, self._layout = rank, layout
        if buffers is not None:
            buffers.attach(self.memory, layout.buffers_of(rank.stage))

    @property
    def expert_counts(self) -> NDArray[np.int64]:
        """Counts of the expert caches of all ranks on this host: int64 [ranks, 8]."""
        begin = self._layout.expert_counts
        counts: NDArray[np.int64] = self.memory.data[begin : self._layout.nbytes].view(np.int64)
        return counts.reshape(self._rank.world_size, -1)

    @property
    def balancing(self) -> int:
        """Offset of the stage's memory for the balancing of experts."""
        return self._layout.balancing_of(self._rank.stage)

    def connect(self, steps: StepRunner, received: Handed | None) -> StepRunner:
        """Return a runner that receives input from the previous stage and sends output to the next.

        Args:
            steps: the runner of the stage's layers.
            received: the memory that `steps` reads its input from.
        """
        rank, memory, layout = self._rank, self.memory, self._layout
        if rank.num_stages == 1:
            return steps
        before = None if rank.is_first else _Channel(memory, layout, rank.stage - 1, rank.index)
        behind = None if rank.is_last else _Channel(memory, layout, rank.stage, rank.index)
        return _StageSteps(self, steps, before, received, behind)


class _Channel:
    """Channel from a rank to the rank of the same index in the next stage, step by step."""

    def __init__(self, memory: GroupMemory, layout: GroupLayout, stage: int, index: int) -> None:
        begin = layout.handed(stage, index)
        self._sent = memory.counter(begin)
        self._taken = memory.counter(begin + COUNTER_NBYTES)
        begin += 2 * COUNTER_NBYTES
        size = layout.slot_nbytes
        self._slots: list[HostTensor] = [
            from_numpy(memory.data[begin + i * size : begin + (i + 1) * size])
            for i in range(HANDED_SLOTS)
        ]
        self._step = 0

    def send(self, handed: Handed, rows: int, errors: Mapping[str, str]) -> None:
        """Send the first rows of a step, and the errors of its requests, as far as there is room.

        Wait while the receiver is too many steps late.
        """
        self._step += 1
        self._taken.wait(self._step - HANDED_SLOTS)
        size = 0
        for tensor, place in self._places(handed, rows):
            _copy(place, tensor)
            size += place.nbytes
        slot, packed = self._slot, _pack(errors)
        begin = SLOT_HEAD_NBYTES + size
        slot[begin : begin + len(packed)] = np.frombuffer(packed, np.uint8)
        slot[:16].view(np.int64)[:] = size + len(packed), len(packed)
        self._sent.post(self._step)

    def receive(self, into: Handed, rows: int) -> dict[str, str]:
        """Receive the first rows of the next step, and return the errors; wait for them."""
        self._step += 1
        self._sent.wait(self._step)
        for tensor, place in self._places(into, rows):
            _copy(tensor, place)
        slot = self._slot
        size, packed = slot[:16].view(np.int64).tolist()
        end = SLOT_HEAD_NBYTES + size
        errors = {}
        if packed:
            errors = msgspec.msgpack.decode(slot[end - packed : end].tobytes(), type=dict[str, str])
        self._taken.post(self._step)
        return errors

    @property
    def _slot(self) -> NDArray[np.uint8]:
        slot: NDArray[np.uint8] = self._slots[self._step % HANDED_SLOTS].numpy()
        return slot

    def _places(self, handed: Handed, rows: int) -> list[tuple[HostTensor, HostTensor]]:
        """Return pairs of the tensors' rows and their places in the memory in this step."""
        slot, begin = self._slots[self._step % HANDED_SLOTS], SLOT_HEAD_NBYTES
        places = []
        for tensor in handed:
            if tensor is not None:
                part: HostTensor = tensor[:rows]
                place = slot[begin : begin + part.nbytes].view(part.dtype).view(part.shape)
                places.append((part, place))
                begin += part.nbytes
        return places


def _copy(out: HostTensor, x: HostTensor) -> None:
    """Copy the bytes of a dense tensor."""
    out.view("uint8").numpy()[...] = x.view("uint8").numpy()


def _pack(errors: Mapping[str, str]) -> bytes:
    """Return the first errors that fit into `ERRORS_NBYTES`, as msgpack; b"": there are none."""
    shown = {req_id: message[:_MESSAGE_LENGTH] for req_id, message in errors.items()}
    while len(packed := msgspec.msgpack.encode(shown)) > ERRORS_NBYTES:
        shown.popitem()
    return packed if shown else b""


class _StageSteps:
    """`StepRunner` of one of several stages."""

    def __init__(
        self,
        group: Group,
        steps: StepRunner,
        before: _Channel | None,
        received: Handed | None,
        behind: _Channel | None,
    ) -> None:
        self._group = group
        self._steps, self._before, self._received, self._behind = steps, before, received, behind
        self.put_tokens = steps.put_tokens

    def buffers(self, num_tokens: int, num_reqs: int) -> StepBuffers:
        """Implement `StepRunner`."""
        return self._steps.buffers(num_tokens, num_reqs)

    def run(self, inputs: StepInputs, params: NDArray[np.void] | None) -> StepResult:
        """Implement `StepRunner`."""
        rows = inputs.size.tokens
        if self._before is not None:
            assert self._received is not None
            self._group.errors |= self._before.receive(self._received, rows)
        result = self._steps.run(inputs, params)
        if self._behind is not None:
            assert result.handed is not None
            self._behind.send(result.handed, rows, self._group.errors)
        return result
