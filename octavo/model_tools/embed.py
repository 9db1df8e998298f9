"""`octavo embed`: vectors of the texts of a file, with a progress bar; it can be interrupted.

The vectors grow in `OUT.unfinished`, row after row, so its length tells how many are done. The same
command continues there. When all are done, they are written to OUT.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from octavo.config.arguments import add_engine_settings, engine_kwargs
from octavo.errors import ConfigError, reason_of
from octavo.llm import LLM
from octavo.pooling_params import PoolingParams

_FORMATS = (".jsonl", ".npy", ".parquet")
_BATCH = 1024
"""Texts that are computed at once: an interruption loses at most these."""
_HEAD = hashlib.sha256().digest_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add FILE, the flags of the output, and those of the engine."""
    parser.add_argument(
        "file",
        metavar="FILE",
        help="Texts: .jsonl (a text or an object in each line), or .txt (a text in each line).",
    )
    add = parser.add_argument_group("embed").add_argument
    add(
        "--out",
        required=True,
        metavar="FILE",
        help="Output: .npy (float32), .jsonl (each line with its vector), or .parquet (pyarrow).",
    )
    add("--field", default="text", metavar="NAME", help="Field with the text in a .jsonl [text].")
    add(
        "--prompt",
        default="",
        metavar="TEXT",
        help="Text before each text, as the model's card says.",
    )
    add("--dimensions", type=int, metavar="N", help="Keep the first N numbers of each vector.")
    add(
        "--truncate",
        action="store_true",
        help="Cut long texts to the model's limit; default: a long text is an error.",
    )
    add(
        "--windows",
        action="store_true",
        help="Compute long texts in parts; their vector is the mean, weighted by tokens.",
    )
    add_engine_settings(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Compute and write all vectors.

    Returns:
        The numbers of texts, of those that an earlier run had computed, and of a vector's numbers.

    Raises:
        ConfigError, ModelError, HubError: a flag, a setting or a model is unusable.
        RequestError: a text cannot be computed; the message names its line.
    """
    out = Path(args.out)
    if out.suffix not in _FORMATS:
        raise ConfigError(f"--out {out}: the name must end with {', '.join(_FORMATS)}.")
    if out.exists():
        raise ConfigError(f"{out} exists already; name another output, or remove it.")
    if out.suffix == ".parquet":
        _import_parquet()
    texts = _Texts.read(Path(args.file), args.field)
    params = PoolingParams(
        task="embed",
        dimensions=args.dimensions,
        truncate_prompt_tokens=-1 if args.truncate else None,
        windows=args.windows,
    )
    kwargs = engine_kwargs(args)
    identity = [texts.digest, args.prompt, params, sorted(kwargs.items())]
    key = hashlib.sha256(repr(identity).encode()).digest()
    with _Unfinished.open(out, key) as unfinished, LLM(**kwargs) as llm:
        pooler = llm.llm_engine.spec.pooler("embed")
        size = args.dimensions or (0 if pooler is None else pooler.size)
        done = unfinished.num_rows(size) if size else 0
        bar = tqdm(total=len(texts.texts), initial=done, desc="Embedded texts", unit="text")
        with bar:
            for begin in range(done, len(texts.texts), _BATCH):
                batch = [args.prompt + text for text in texts.texts[begin : begin + _BATCH]]
                outputs = llm.encode(batch, params, use_tqdm=False)
                unfinished.append(np.stack([output.outputs.data for output in outputs]))
                bar.update(len(batch))
        vectors = unfinished.vectors(len(texts.texts), size)
        _WRITERS[out.suffix](out, texts, vectors)
        unfinished.remove()
    sys.stderr.write(f"{out}: {len(texts.texts):,} vectors of {size} numbers\n")
    return {"texts": len(texts.texts), "continued": done, "dimensions": size}


@dataclass(frozen=True)
class _Texts:
    """Texts of a file."""

    texts: list[str]
    rows: list[dict[str, Any]] | None
    """Objects of the lines; None: the lines are texts."""
    digest: str

    @classmethod
    def read(cls, path: Path, field: str) -> _Texts:
        """Read a file.

        Raises:
            ConfigError: it cannot be read, or a line has no text.
        """
        try:
            data = path.read_bytes()
            lines = data.decode("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {reason_of(error)}.") from None
        digest = hashlib.sha256(data).hexdigest()
        if path.suffix != ".jsonl":
            return cls._checked(path, [line for line in lines if line.strip()], None, digest)
        texts: list[str] = []
        rows: list[dict[str, Any]] = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: this is not JSON ({error}).") from None
            row = {field: row} if isinstance(row, str) else row
            text = row.get(field) if isinstance(row, dict) else None
            if not isinstance(text, str) or not text:
                raise ConfigError(
                    f"{path}, line {number}: it has no text in the field {field!r}; name the field "
                    "with --field."
                )
            texts.append(text)
            rows.append(row)
        return cls._checked(path, texts, rows, digest)

    @classmethod
    def _checked(
        cls, path: Path, texts: list[str], rows: list[dict[str, Any]] | None, digest: str
    ) -> _Texts:
        if not texts:
            raise ConfigError(f"{path} has no texts.")
        return cls(texts, rows, digest)


class _Unfinished:
    """File of the vectors that are done: a key of the run, then float32 rows."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file

    @classmethod
    @contextlib.contextmanager
    def open(cls, out: Path, key: bytes) -> Iterator[_Unfinished]:
        """Open or create the file next to the output, and keep other runs out of it.

        Raises:
            ConfigError: it cannot be written, is in use, or belongs to another run.
        """
        path = out.with_name(f"{out.name}.unfinished")
        try:
            file = path.open("a+b")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {reason_of(error)}.") from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise ConfigError(f"Another run is writing {out}; wait for it.") from None
            file.seek(0)
            found = file.read(_HEAD)
            if len(found) < _HEAD:
                file.truncate(0)
                file.write(key)
                file.flush()
            elif found != key:
                raise ConfigError(
                    f"{path} is of a run with other texts or settings; repeat that command, or "
                    "remove the file."
                )
            yield cls(path, file)

    def num_rows(self, size: int) -> int:
        """Return the number of whole rows; drop a part of another one."""
        count = (self._path.stat().st_size - _HEAD) // (4 * size)
        self._file.truncate(_HEAD + 4 * size * count)
        return count

    def append(self, rows: NDArray[np.float32]) -> None:
        """Add rows; they survive an interruption."""
        self._file.write(rows.tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())

    def vectors(self, count: int, size: int) -> NDArray[np.float32]:
        """Return all rows, mapped from the file: [count, size]."""
        return np.memmap(self._path, np.float32, "r", _HEAD, (count, size))

    def remove(self) -> None:
        """Delete the file."""
        self._path.unlink()


def _write_npy(out: Path, texts: _Texts, vectors: NDArray[np.float32]) -> None:
    with _replacing(out) as part, part.open("wb") as file:
        np.save(file, vectors)


def _write_jsonl(out: Path, texts: _Texts, vectors: NDArray[np.float32]) -> None:
    rows = texts.rows or [{"text": text} for text in texts.texts]
    with _replacing(out) as part, part.open("w", encoding="utf-8") as file:
        for row, vector in zip(rows, vectors, strict=True):
            line = json.dumps(row | {"embedding": vector.tolist()}, ensure_ascii=False)
            file.write(line + "\n")


def _write_parquet(out: Path, texts: _Texts, vectors: NDArray[np.float32]) -> None:
    pa, parquet = _import_parquet()
    rows = texts.rows or [{"text": text} for text in texts.texts]
    table = pa.Table.from_pylist(rows)
    numbers = pa.array(np.ascontiguousarray(vectors).reshape(-1))
    column = pa.FixedSizeListArray.from_arrays(numbers, vectors.shape[1])
    with _replacing(out) as part:
        parquet.write_table(table.append_column("embedding", column), part)


def _import_parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            "--out FILE.parquet needs the package pyarrow; install it, or write .npy or .jsonl."
        ) from None
    return pyarrow, pyarrow.parquet


@contextlib.contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """Write a file under another name, and give it its name when it is complete."""
    part = out.with_name(f"{out.name}.part")
    try:
        yield part
        part.replace(out)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {reason_of(error)}.") from None
    finally:
        part.unlink(missing_ok=True)


_WRITERS = {".npy": _write_npy, ".jsonl": _write_jsonl, ".parquet": _write_parquet}
