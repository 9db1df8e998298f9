"""What a front end and an engine-core process say to each other beside the messages."""

from __future__ import annotations

import msgspec

from octavo.config import EngineConfig

# Kinds of message, sent as the first frame.
ADD, ABORT, UTILITY = b"A", b"B", b"U"
READY, OUTPUTS, RESULT, DEAD = b"R", b"O", b"V", b"D"


class CoreProcessSetup(msgspec.Struct):
    """What the parent writes to the new process's standard input."""

    config: EngineConfig
    model_path: str
    default_batched_tokens: int
    request_memory: int
    input_address: str
    output_address: str
    log_level: str
    log_format: str
    engine_index: int = 0


class CoreReady(msgspec.Struct):
    """Sent once the model is loaded."""

    max_model_len: int
    num_blocks: int
    max_concurrency: float
    """How many requests of the greatest length fit the KV cache."""


class CoreDead(msgspec.Struct):
    """Sent when the core cannot start or cannot go on."""

    error: str
