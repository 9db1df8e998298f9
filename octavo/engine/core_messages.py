"""Messages between a front end and an engine-core process, besides those of `messages.py`."""

from __future__ import annotations

import msgspec

from octavo.config import EngineConfig
from octavo.plan.memory_plan import MemoryPlan
from octavo.plan.setup import Machine

# Kinds of message, sent as the first frame. ITEMS is a `RequestWithItems`.
ADD, ITEMS, ABORT, UTILITY = b"A", b"I", b"B", b"U"
READY, OUTPUTS, RESULT, DEAD = b"R", b"O", b"V", b"D"
# Between a coordinator and its front ends: the state of the engines; a page of metrics, which a
# front end requests by an empty page.
STATE, PAGE = b"S", b"P"


class ReachedBy(msgspec.Struct):
    """Address and keys by which an engine on another machine reaches its head node."""

    address: str
    """Address of the head node, in ZMQ's form."""
    public: bytes
    secret: bytes
    """Secret key of the cluster's key pair; both keys are Z85."""
    launch_id: bytes
    """Id of the process on the head node."""


class CoreProcessSetup(msgspec.Struct):
    """Settings that the parent writes to the new process's standard input."""

    config: EngineConfig
    model_path: str
    default_batched_tokens: int
    request_memory: int | None
    warm_spare: bool | None
    log_level: str
    log_format: str
    record: str | None = None
    """Path of the recording to extend; None: no recording."""
    reports_steps: bool = False
    """True if outputs contain records of the steps."""
    input_address: str = ""
    output_address: str = ""
    """Address to send outputs to. The parent chooses it and `input_address`, which receives
    requests."""
    engine_index: int = 0
    memory_limit: int | None = None
    """Bytes that the process may use; None: its share of the free memory."""
    expert_memory: tuple[str, ...] = ()
    """Memory of the engines that divide the experts; see `ExpertGroup`."""
    machine: Machine | None = None
    """This machine, if these engines are on several."""
    clock_epoch: float = 0.0
    """`clock.epoch` of the parent."""
    reached_by: ReachedBy | None = None
    """Replacement for the two addresses if the front end is on another machine."""


class CoreReady(msgspec.Struct):
    """Message of a core that has loaded its model."""

    plan: MemoryPlan
    worker_pids: list[int] = []
    """Process ids of the workers that have separate processes."""
    kept_items_nbytes: int = 0
    """Most bytes of the items that clients may order the core to keep; see `RequestWithItems`."""


class CoreDead(msgspec.Struct):
    """Message of a core that cannot start or continue."""

    error: str
    stopped: bool = False
    """True if the error is an `EngineStoppedError`."""


class EnginesState(msgspec.Struct):
    """State of the engines, as a coordinator sends it to its front ends; see `WatchedClient`."""

    up: bool = False
    down: dict[int, str] = {}
    missing: list[int] = []
