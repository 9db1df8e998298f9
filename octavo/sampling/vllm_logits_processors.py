"""vLLM's interface of logits processors (`vllm.v1.sample.logits_processor`), run on Octavo's.

In vLLM a processor sees the whole batch, and rows move as requests arrive and end. Here each
request has its own processor with a batch of that request alone, at index 0. So no processor can
make an answer depend on other requests.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.kernels.base import Ops
from octavo.messages import CoreSamplingParams
from octavo.sampling.logits_processors import base
from octavo.sampling.logits_processors.base import LongArray, NewRow, StepRows
from octavo.sampling.vllm_config import VllmConfig
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

S = TypeVar("S")


class MoveDirectionality(Enum):
    """Kind of movement of a request within a batch."""

    UNIDIRECTIONAL = auto()
    """Move from the first index to the second."""
    SWAP = auto()
    """Swap of two requests."""


RemovedRequest = int
AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
"""Index, parameters, prompt, and the list of generated tokens, which grows automatically."""
MovedRequest = tuple[int, int, MoveDirectionality]
RequestLogitsProcessor = Callable[..., Any]
"""Processor of one request: maps ([prompt,] generated tokens, logits [V]) to logits."""


@dataclass(frozen=True)
class BatchUpdate:
    """Changes of a batch: first removals, then additions, then moves."""

    batch_size: int
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Logits processor that was written for vLLM."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError if a request's parameters are wrong."""

    @abstractmethod
    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool
    ) -> None: ...

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the changed logits [batch, V]; they may be changed in place."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Return True if the most probable token always stays the most probable one."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply the changes since the last step; None: only tokens were generated."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Processor of a batch made of processors of single requests."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        """Processor of each row, by index."""

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the processor of a request's logits, or None."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Apply the changes since the last step."""
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Process the rows that have a processor."""
        for index, process in self.req_info.items():
            row = logits[index]
            processed = process(row)
            if processed is not row:
                logits[index] = processed
        return logits

    def _new_state(
        self, params: SamplingParams, prompt: list[int] | None, output: list[int]
    ) -> Callable[[torch.Tensor], torch.Tensor] | None:
        process = self.new_req_logits_processor(params)
        if process is None:
            return None
        takes_prompt = len(inspect.signature(process).parameters) == 3
        return partial(process, *([prompt, output] if takes_prompt else [output]))


def make_processor(
    kind: type[LogitsProcessor], vllm_config: VllmConfig, device: Any
) -> LogitsProcessor:
    """Return a processor for logits on a platform's device."""
    import torch

    return kind(vllm_config, torch.device(device), False)


def process_dict_updates(
    req_entries: dict[int, S],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], S | None],
) -> bool:
    """Apply changes of a batch to entries kept by index; return True if anything has changed.

    Args:
        req_entries: the entries.
        batch_update: the changes, or None.
        new_state: makes the entry of an added request; None: no entry.
    """
    if batch_update is None:
        return False
    before = dict(req_entries)
    for index in batch_update.removed:
        req_entries.pop(index, None)
    for index, params, prompt, output in batch_update.added:
        state = new_state(params, prompt, output)
        req_entries.pop(index, None)
        if state is not None:
            req_entries[index] = state
    for source, target, direction in batch_update.moved:
        moved, replaced = req_entries.pop(source, None), req_entries.pop(target, None)
        if moved is not None:
            req_entries[target] = moved
        if replaced is not None and direction is MoveDirectionality.SWAP:
            req_entries[source] = replaced
    return before != req_entries


@dataclass
class _Live:
    """Processor of a live request."""

    processor: LogitsProcessor
    output: list[int]
    temperature: float


class PerRequest(base.LogitsProcessor):
    """Adapter of a class of vLLM's interface: one object for each request.

    Args:
        max_num_rows: see `base.LogitsProcessor`.
        vocab_size: see `base.LogitsProcessor`.
        kind: the class.
        make: makes an object of the class.
    """

    takes_all = True
    needs_tokens = True

    def __init__(
        self,
        max_num_rows: int,
        vocab_size: int,
        kind: type[LogitsProcessor],
        make: Callable[[type[LogitsProcessor]], LogitsProcessor],
    ) -> None:
        super().__init__(max_num_rows, vocab_size)
        self._kind, self._make = kind, make
        self._live: dict[int, _Live] = {}
        # Make one now, so that an unusable class fails at the start.
        self._argmax_invariant = make(kind).is_argmax_invariant()

    def add_row(self, new: NewRow) -> bool:
        """Make the request's processor, and pass it the tokens one by one."""
        params = _sampling_params(new.params)
        self._kind.validate_params(params)
        prompt = list(new.token_ids[: new.num_prompt_tokens])
        live = _Live(self._make(self._kind), [], params.temperature)
        added = [(0, params, prompt, live.output)]
        live.processor.update_state(BatchUpdate(1, (), added, ()))
        for token in new.output_token_ids:
            live.output.append(token)
            live.processor.update_state(None)
        if isinstance(live.processor, AdapterLogitsProcessor) and not live.processor.req_info:
            return False
        if self._argmax_invariant and params.temperature == 0:  # vLLM skips these, too
            return False
        self._live[new.row] = live
        return True

    def remove_row(self, row: int) -> None:
        """Remove the request."""
        self._live.pop(row, None)

    def append(self, rows: LongArray, tokens: LongArray) -> None:
        """Add a token to each of some requests."""
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            self._live[row].output.append(token)
            self._live[row].processor.update_state(None)

    def apply(self, ops: Ops, logits: Any, step: StepRows) -> None:
        """Pass each processor its own row."""
        for at, row in zip(step.at.tolist(), step.rows.tolist(), strict=True):
            live, own = self._live[row], logits[at : at + 1]
            # vLLM passes such processors the logits after the temperature.
            scale = live.temperature if self._argmax_invariant else 1.0
            if scale != 1.0:
                own /= scale
            processed = live.processor.apply(own)
            if processed is not own:
                own.copy_(processed)
            if scale != 1.0:
                own *= scale


def _sampling_params(core: CoreSamplingParams) -> SamplingParams:
    """Convert the engine core's parameters of a request to those of vLLM's processors."""
    shared: dict[str, Any] = {
        name: getattr(core, name)
        for name in SamplingParams.__struct_fields__
        if name in CoreSamplingParams.__struct_fields__
    }
    packed = ("allowed_token_ids", "bad_words", "logit_bias", "logprob_token_ids")
    for name in packed:
        del shared[name]
    shared["stop_token_ids"] = sorted(core.stop_token_ids)
    return SamplingParams(**shared)
