"""Messages between a front end and an engine-core process, besides those of `messages.py`."""

from __future__ import annotations

import msgspec

from octavo.config import EngineConfig
from octavo.plan.memory_plan import MemoryPlan

# Kinds of message, sent as the first frame.
ADD, ABORT, UTILITY = b"A", b"B", b"U"
READY, OUTPUTS, RESULT, DEAD = b"R", b"O", b"V", b"D"
# Between a coordinator and its front ends: how the engines are; a page of metrics, which is asked
# for by an empty one.
STATE, PAGE = b"S", b"P"


# Argument of a process that is to be warm before its setup comes; the next one is how many worker
# processes it has to start meanwhile.
WARM = "warm"


class ReachedBy(msgspec.Struct):
    """How an engine on another machine reaches its head node."""

    address: str
    """As ZMQ writes it."""
    public: bytes
    secret: bytes
    """The cluster's key pair, as Z85."""
    launch_id: bytes
    """The process' number there."""


class CoreProcessSetup(msgspec.Struct):
    """What the parent writes to the new process's standard input."""

    config: EngineConfig
    model_path: str
    default_batched_tokens: int
    request_memory: int | None
    warm_spare: bool | None
    log_level: str
    log_format: str
    record: str | None = None
    """The recording that it adds to."""
    input_address: str = ""
    output_address: str = ""
    """Where it takes requests, and where it sends outputs; the process that starts it knows."""
    engine_index: int = 0
    memory_limit: int | None = None
    """Bytes that it may use; None: its share of what is free."""
    clock_epoch: float = 0.0
    """`clock.epoch` of the process that starts it."""
    reached_by: ReachedBy | None = None
    """Instead of the two addresses: its front end is on another machine."""


class CoreReady(msgspec.Struct):
    """Sent once the model is loaded."""

    plan: MemoryPlan
    worker_pids: list[int] = []
    """Of workers with processes of their own."""


class CoreDead(msgspec.Struct):
    """Sent when the core cannot start or cannot go on."""

    error: str
    stopped: bool = False
    """Whether it was an `EngineStoppedError`."""


class EnginesState(msgspec.Struct):
    """What a coordinator tells its front ends of the engines; see `WatchedClient`."""

    up: bool = False
    down: dict[int, str] = {}
    missing: list[int] = []
