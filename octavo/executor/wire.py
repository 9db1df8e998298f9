"""What an executor and its worker processes say to each other. No torch.

Steps, and what comes of them, travel in shared memory (`message_queue.py`); all that is rare comes
back through a pipe of each worker, whose messages have a length of 4 bytes before them.
"""

from __future__ import annotations

import builtins
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.errors import OctavoError, make_error
from octavo.executor.message_queue import QueueHandle
from octavo.messages import (
    GrammarOutput,
    KVConnectorOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from octavo.models.drafts import find_draft
from octavo.models.registry import read_spec
from octavo.models.spec import ModelSpec
from octavo.plan.memory import Scratch
from octavo.plan.setup import WorkerSetup
from octavo.system.distributed import Rank

LENGTH_NBYTES = 4
# What encoding raises for what is no plain value.
UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)


class PlainSetup(msgspec.Struct):
    """A `WorkerSetup` without the models' specs, which a process reads from their folders again."""

    config: EngineConfig
    model_path: str
    dtype: str
    max_model_len: int
    max_num_batched_tokens: int
    scratches: tuple[Scratch, ...]
    kept_layers: tuple[int, ...]
    model_identity: str
    draft: PlainSetup | None

    @classmethod
    def of(cls, setup: WorkerSetup) -> PlainSetup:
        """What of a setup can travel."""
        return cls(
            setup.config,
            str(setup.model_path),
            setup.dtype,
            setup.max_model_len,
            setup.max_num_batched_tokens,
            setup.scratches,
            setup.kept_layers,
            setup.model_identity,
            None if setup.draft is None else cls.of(setup.draft),
        )

    def complete(self, rank: Rank, group: int | None) -> WorkerSetup:
        """The setup of a worker.

        Args:
            rank: which it is.
            group: the descriptor of the workers' memory.

        Raises:
            ConfigError, ModelError: the folders are not what they were.
        """
        model = self.config.model
        spec = read_spec(
            Path(self.model_path),
            trust_remote_code=model.trust_remote_code,
            overrides=model.hf_overrides,
        )
        setup = self._with(spec)
        if self.draft is not None:
            config, speculative = self.config, self.config.speculation.speculative_config
            assert speculative is not None
            # By its folder: the hub need not be asked again.
            speculative = msgspec.structs.replace(speculative, model=self.draft.model_path)
            speculation = msgspec.structs.replace(
                config.speculation, speculative_config=speculative
            )
            found = find_draft(msgspec.structs.replace(config, speculation=speculation), spec)
            assert found is not None
            setup = replace(setup, draft=self.draft._with(found.spec))
        return replace(setup, rank=rank, group=group)

    def _with(self, spec: ModelSpec) -> WorkerSetup:
        return WorkerSetup(
            config=self.config,
            spec=spec,
            model_path=Path(self.model_path),
            dtype=self.dtype,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.max_num_batched_tokens,
            scratches=self.scratches,
            kept_layers=self.kept_layers,
            model_identity=self.model_identity,
        )


# Argument of a process that is to be warm before its setup comes.
WARM = "warm"
# Most descriptors that come with a setup.
MAX_DESCRIPTORS = 16


class WorkerProcessSetup(msgspec.Struct):
    """What an executor sends to a process, on its standard input; the descriptors with it."""

    setup: PlainSetup
    worker_cls: str
    """Module and name of the worker's class, with a dot between: it is made like `Worker`."""
    rank: int
    """Its number among all."""
    steps: QueueHandle
    """From the executor to all workers."""
    results: QueueHandle | None
    """Back; only from the rank that samples."""
    pipe: int
    group: int | None
    """The descriptor of the workers' memory, if they compute one model together."""
    log_level: str
    log_format: str
    log_fields: dict[str, int] = {}
    """What every line says beside the rank."""

    @property
    def descriptors(self) -> list[int]:
        """Those of the process that sends it."""
        found = [self.pipe, *self.steps.descriptors]
        if self.results is not None:
            found += self.results.descriptors
        return found if self.group is None else [*found, self.group]

    def received(self, descriptors: list[int]) -> WorkerProcessSetup:
        """The setup with the numbers that the same descriptors have in this process."""
        numbers = dict(zip(self.descriptors, descriptors, strict=True))
        return msgspec.structs.replace(
            self,
            steps=self.steps.received(numbers),
            results=None if self.results is None else self.results.received(numbers),
            pipe=numbers[self.pipe],
            group=None if self.group is None else numbers[self.group],
        )


class Failure(msgspec.Struct, array_like=True):
    """An exception, as it crosses a process border."""

    kind: str
    """Name of its class."""
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """What can be told of an exception; text that UTF-8 cannot express is replaced."""
        message = str(error).encode("utf-8", "replace").decode()
        return cls(type(error).__name__, message)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"

    def to_exception(self) -> Exception:
        """An exception of the same class, if that is Octavo's or Python's, with the same text."""
        octavos = make_error(self.kind, self.message)
        if type(octavos) is not OctavoError:
            return octavos
        found = getattr(builtins, self.kind, None)
        if isinstance(found, type) and issubclass(found, Exception):
            try:
                return found(self.message)
            except TypeError:  # it wants more than a text
                pass
        return RuntimeError(str(self))


class Execute(msgspec.Struct, array_like=True, tag=0):
    """See `Worker.execute_model`."""

    step: int
    """From 1."""
    work: SchedulerOutput


class Sample(msgspec.Struct, array_like=True, tag=1):
    """See `Worker.sample_tokens`: of the step before."""

    step: int
    grammar: GrammarOutput | None


class Call(msgspec.Struct, array_like=True, tag=2):
    """A call of a worker's method."""

    call_id: int
    method: str
    args: list[Any]
    kwargs: dict[str, Any]


class Drafted(msgspec.Struct, array_like=True, tag=0):
    """The drafts of a step that has places for some; it begins."""

    step: int
    drafts: dict[str, list[int]]
    failure: Failure | None = None
    """What made the step fail before it had any."""


class Sampled(msgspec.Struct, array_like=True, tag=1):
    """A step's result."""

    step: int
    output: ModelRunnerOutput


class StepFailed(msgspec.Struct, array_like=True, tag=2):
    """A step failed as a whole. The worker goes on."""

    step: int
    failure: Failure


class Ready(msgspec.Struct, array_like=True, tag=3):
    """The model is loaded."""


class Returned(msgspec.Struct, array_like=True, tag=4):
    """The answer to a `Call`."""

    call_id: int
    value: Any = None
    failure: Failure | None = None


class Transferred(msgspec.Struct, array_like=True, tag=6):
    """The worker's half of a KV connector has finished something."""

    output: KVConnectorOutput


class Died(msgspec.Struct, array_like=True, tag=5):
    """The worker cannot start or cannot go on, and ends."""

    failure: Failure


ToWorker = Execute | Sample | Call
FromWorker = Drafted | Sampled | StepFailed | Ready | Returned | Died | Transferred
