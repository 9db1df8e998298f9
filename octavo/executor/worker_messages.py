"""Messages between an executor and its worker processes.

Steps and their results use shared memory (`message_queue.py`). Rare messages use a pipe from each
worker, and are preceded by a length of 4 bytes.
"""

from __future__ import annotations

import builtins
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig
from octavo.errors import OctavoError, make_error
from octavo.executor.message_queue import QueueHandle
from octavo.messages import (
    AdapterLoaded,
    GrammarOutput,
    KVConnectorOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from octavo.models.drafts import find_draft
from octavo.models.registry import read_spec
from octavo.models.spec import ModelSpec
from octavo.plan.memory import Scratch
from octavo.plan.setup import Machine, WorkerSetup
from octavo.system.distributed import Rank

LENGTH_NBYTES = 4
# Exceptions of the encoder for values that are not plain.
UNENCODABLE = (TypeError, ValueError, OverflowError, RecursionError)


class SetupMessage(msgspec.Struct):
    """Form of `WorkerSetup` without the models' specs, which a process reads from their folders."""

    config: EngineConfig
    model_path: str
    dtype: str
    max_model_len: int
    max_num_batched_tokens: int
    scratches: tuple[Scratch, ...]
    kept_layers: tuple[int, ...]
    model_identity: str
    draft: SetupMessage | None
    engine: Rank
    expert_memory: tuple[str, ...]
    machine: Machine | None

    @classmethod
    def of(cls, setup: WorkerSetup) -> SetupMessage:
        """Return the part of a setup that can be encoded."""
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
            setup.engine,
            setup.expert_memory,
            setup.machine,
        )

    def complete(self, rank: Rank, group: int | None) -> WorkerSetup:
        """Return the setup of a worker.

        Args:
            rank: rank of the worker.
            group: the descriptor of the workers' memory.

        Raises:
            ConfigError, ModelError: the folders have changed.
        """
        checkpoint = open_checkpoint(
            Path(self.model_path), self.config.load.load_format, mmproj=self.config.load.mmproj
        )
        spec = read_spec(checkpoint, self.config.model)
        setup = self._with(spec)
        if self.draft is not None:
            config, speculative = self.config, self.config.speculation.speculative_config
            assert speculative is not None
            # By its folder, so that the hub is not queried again.
            speculative = msgspec.structs.replace(speculative, model=self.draft.model_path)
            speculation = msgspec.structs.replace(
                config.speculation, speculative_config=speculative
            )
            config = msgspec.structs.replace(config, speculation=speculation)
            found = find_draft(config, spec, Path(self.model_path))
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
            engine=self.engine,
            expert_memory=self.expert_memory,
            machine=self.machine,
        )


# Argument of a process that imports modules before its setup arrives.
WARM = "warm"
# Maximum number of descriptors of a setup.
MAX_DESCRIPTORS = 16


class WorkerProcessSetup(msgspec.Struct):
    """Message that starts a worker, with descriptors, on a process' standard input."""

    setup: SetupMessage
    worker_cls: str
    """Class of the worker as module.name; its constructor is that of `Worker`."""
    rank: int
    """Index of the worker among all."""
    steps: QueueHandle
    """Queue from the executor to all workers."""
    results: QueueHandle | None
    """Queue of results; only from the rank that samples."""
    pipe: int
    group: int | None
    """Descriptor of the workers' memory, if they compute one model together."""
    log_level: str
    log_format: str
    log_fields: dict[str, int] = {}
    """Fields of every log line besides the rank."""

    @property
    def descriptors(self) -> list[int]:
        """Descriptors of the sending process."""
        found = [self.pipe, *self.steps.descriptors]
        if self.results is not None:
            found += self.results.descriptors
        return found if self.group is None else [*found, self.group]

    def received(self, descriptors: list[int]) -> WorkerProcessSetup:
        """Return the setup with the descriptors' numbers in this process."""
        numbers = dict(zip(self.descriptors, descriptors, strict=True))
        return msgspec.structs.replace(
            self,
            steps=self.steps.received(numbers),
            results=None if self.results is None else self.results.received(numbers),
            pipe=numbers[self.pipe],
            group=None if self.group is None else numbers[self.group],
        )


class Failure(msgspec.Struct, array_like=True):
    """Exception, encoded for another process."""

    kind: str
    """Name of the exception's class."""
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Encode an exception; replace text that UTF-8 cannot express."""
        message = str(error).encode("utf-8", "replace").decode()
        return cls(type(error).__name__, message)

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"

    def to_exception(self) -> Exception:
        """Return an exception of the same class, if that is Octavo's or Python's."""
        octavos = make_error(self.kind, self.message)
        if type(octavos) is not OctavoError:
            return octavos
        found = getattr(builtins, self.kind, None)
        if isinstance(found, type) and issubclass(found, Exception):
            try:
                return found(self.message)
            except TypeError:  # it needs more arguments
                pass
        return RuntimeError(str(self))


class Execute(msgspec.Struct, array_like=True, tag=0):
    """Message that calls `Worker.execute_model`."""

    step: int
    """Number of the step, from 1."""
    work: SchedulerOutput


class Sample(msgspec.Struct, array_like=True, tag=1):
    """Message that calls `Worker.sample_tokens` for the previous step."""

    step: int
    grammar: GrammarOutput | None


class Call(msgspec.Struct, array_like=True, tag=2):
    """Call of a worker's method."""

    call_id: int
    method: str
    args: list[Any]
    kwargs: dict[str, Any]


class Drafted(msgspec.Struct, array_like=True, tag=0):
    """Drafts of a step with placeholders for drafts; the step begins."""

    step: int
    drafts: dict[str, list[int]]
    failure: Failure | None = None
    """Error that made the step fail before it had drafts."""


class Sampled(msgspec.Struct, array_like=True, tag=1):
    """Result of a step."""

    step: int
    output: ModelRunnerOutput


class StepFailed(msgspec.Struct, array_like=True, tag=2):
    """Failure of a whole step. The worker continues."""

    step: int
    failure: Failure


class Ready(msgspec.Struct, array_like=True, tag=3):
    """Notification that the model is loaded."""


class Returned(msgspec.Struct, array_like=True, tag=4):
    """Answer to a `Call`."""

    call_id: int
    value: Any = None
    failure: Failure | None = None


class Transferred(msgspec.Struct, array_like=True, tag=6):
    """Result of the worker's KV connector."""

    output: KVConnectorOutput


class ReadAdapter(msgspec.Struct, array_like=True, tag=7):
    """Result of reading an adapter."""

    loaded: AdapterLoaded


class Died(msgspec.Struct, array_like=True, tag=5):
    """Error of a worker that cannot start or continue, and ends."""

    failure: Failure


ToWorker = Execute | Sample | Call
FromWorker = Drafted | Sampled | StepFailed | Ready | Returned | Died | Transferred | ReadAdapter
