"""What an engine's recording begins with: which build, settings and model it is of."""

from __future__ import annotations

import hashlib
import platform
import secrets
from pathlib import Path

import msgspec

import octavo
from octavo import _native
from octavo.checkpoints.identity import model_hash
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig
from octavo.observability.recording import FORMAT, Head, Recorder, RecordSettings
from octavo.system import clock
from octavo.system.device import cpu_model


def make_recorder(
    settings: RecordSettings, config: EngineConfig, path: Path, tokenizer_path: Path
) -> Recorder:
    """Begins a recording.

    Args:
        settings: what is recorded, and where.
        config: the engine's settings, which hold no secrets.
        path: the model's folder.
        tokenizer_path: the tokenizer's.

    Raises:
        ConfigError: the file cannot be written, or is there and is no recording.
        ModelError: the model's index of weights is damaged.
    """
    head = Head(
        format=FORMAT,
        id=secrets.token_hex(8),
        created=clock.now(),
        build=describe_build(),
        config=msgspec.to_builtins(config),
        model=model_hash(open_checkpoint(path, config.load.load_format), tokenizer_path),
        prompts=settings.prompts,
    )
    return Recorder(Path(settings.path), head, settings.max_bytes)


def describe_build() -> dict[str, str]:
    """What computes: version, kernels and machine, by name."""
    native = Path(_native.__file__).read_bytes()
    return {
        "octavo": octavo.__version__,
        "kernels": f"{_native.isa()} {hashlib.sha256(native).hexdigest()[:16]}",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": cpu_model(),
    }
