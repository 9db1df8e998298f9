"""Identity of a model, independent of its path."""

from __future__ import annotations

import hashlib
from pathlib import Path

from octavo.checkpoints.base import Checkpoint
from octavo.checkpoints.gguf.folder import find_gguf

_SMALL = 32 * 2**20
"""Greatest size in bytes of files that are hashed whole."""
_SAMPLE, _NUM_SAMPLES = 2**16, 64
"""Size in bytes, and number, of the samples of larger files."""


def model_hash(checkpoint: Checkpoint, tokenizer_path: Path) -> str:
    """Return a SHA-256 of a model's description, tokenizer and weights.

    Of large weight files it covers the size, the beginning, the end and samples between them. It
    detects other weights, but may miss a change of a single number.

    Args:
        checkpoint: the model.
        tokenizer_path: the tokenizer's folder, or its GGUF file.

    Raises:
        ModelError: an index of weights is damaged.
        OSError: a file cannot be read.
    """
    found = hashlib.sha256()
    gguf = tokenizer_path if tokenizer_path.is_file() else find_gguf(tokenizer_path)
    if gguf is None:
        tokenizer = [*sorted(tokenizer_path.glob("tokenizer*")), tokenizer_path / "tekken.json"]
    else:
        tokenizer = [gguf]
    files = [checkpoint.config_file, *tokenizer, *checkpoint.weight_files]
    for file in dict.fromkeys(files):
        if file.is_file():
            found.update(f"{file.name} {file.stat().st_size} ".encode())
            _add(found, file)
    return found.hexdigest()


def _add(found: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        if size <= _SMALL:
            found.update(file.read())
            return
        for i in range(_NUM_SAMPLES):
            file.seek(max(0, size - _SAMPLE) * i // (_NUM_SAMPLES - 1))
            found.update(file.read(_SAMPLE))
