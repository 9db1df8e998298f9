"""Which model it is, wherever its folder lies. No torch."""

from __future__ import annotations

import hashlib
from pathlib import Path

from octavo.models.weights import weight_files

_SMALL = 32 * 2**20
"""Files up to so many bytes count as a whole."""
_SAMPLE, _NUM_SAMPLES = 2**16, 64
"""Of larger ones: bytes, at so many places."""


def model_hash(folder: Path, tokenizer_folder: Path, load_format: str) -> str:
    """A SHA-256 of a model's description, tokenizer and weights.

    Of large files of weights it takes size, beginning, end and samples between them: other weights
    differ there, but a single number that was changed would not be noticed.

    Args:
        folder: the model's.
        tokenizer_folder: the tokenizer's.
        load_format: as in `LoadConfig`.

    Raises:
        ModelError: for a damaged index of weights.
        OSError: a file cannot be read.
    """
    found = hashlib.sha256()
    files = [folder / "config.json", *sorted(tokenizer_folder.glob("tokenizer*"))]
    for file in [*files, *weight_files(folder, load_format)]:
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
