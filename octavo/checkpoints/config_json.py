"""Typed reading of a model folder's JSON, with errors that name file, field and value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from octavo.checkpoints.model_files import (
    open_file,
    printable,
    refuse_lfs_pointer,
    without_config,
)
from octavo.errors import ModelError, reason_of

# The index of the largest models has half this size.
MOST_JSON_NBYTES = 32 * 2**20
# Far beyond any model: memory for each layer is allocated before the layers are checked against the
# weights.
MOST_LAYERS = 4096
_MOST = 2**31 - 1
_Choice = TypeVar("_Choice", bound=str)
_MOST_SHOWN = 100  # characters of a value in an error message


class ConfigJson:
    """JSON object of a model folder. A field that is null counts as absent.

    A getter with several names uses the first field that is present. Every getter raises
    `ModelError` if the field is absent and has no default, or if its value is of the wrong kind.
    """

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self._data = data
        self.where = where
        """File, and object within it, for error messages."""

    @classmethod
    def load(cls, path: Path, most_nbytes: int = MOST_JSON_NBYTES) -> ConfigJson:
        """Read a file of at most `most_nbytes`.

        Raises:
            ModelError: the file is missing, not a JSON object, or too large.
        """
        try:
            refuse_lfs_pointer(path)
            with open_file(path) as stream:
                text = stream.read(most_nbytes + 1)
            if len(text) > most_nbytes:
                raise ValueError(f"it has more than {most_nbytes} bytes")
            data = json.loads(text.decode())
        except FileNotFoundError:
            raise without_config(path.parent) from None
        except (OSError, ValueError, RecursionError) as error:
            raise ModelError(
                f"{path} is damaged or cut off ({reason_of(error)}); download the file again."
            ) from None
        if not isinstance(data, dict):
            raise ModelError(f"{path} must hold a JSON object, not {type(data).__name__}.")
        return cls(data, str(path))

    def filled(self, defaults: dict[str, Any]) -> ConfigJson:
        """Return the same object with the values of `defaults` for absent fields.

        A field that is null keeps this value, as in transformers.
        """
        return ConfigJson(defaults | self._data, self.where)

    def filled_from(self, other: ConfigJson) -> ConfigJson:
        """Return the same object with the values of another object for absent fields."""
        return self.filled(other._data)

    def replaced(self, name: str, value: object) -> ConfigJson:
        """Return the same object with another value of a field."""
        return ConfigJson(self._data | {name: value}, self.where)

    def override(self, fields: Mapping[str, Any]) -> ConfigJson:
        """Return the object with some fields replaced; merge fields that are objects in both."""
        where = f"{self.where} with hf_overrides"
        return ConfigJson(_merge(self._data, fields), where)

    def merged(self, name: str, kept: Sequence[str]) -> ConfigJson:
        """Return the object with the fields of a nested object beside its own.

        Where both have a field, that of the nested object is used, except the fields `kept`.
        """
        own = {field: self._data[field] for field in kept if self.has(field)}
        return ConfigJson({**self._data, **self.section(name)._data, **own}, self.where)

    def error(self, name: str, expected: str) -> ModelError:
        """Return the error for a field with a wrong or unsupported value."""
        value = repr(self._data.get(name))
        if len(value) > _MOST_SHOWN:
            value = value[:_MOST_SHOWN] + "..."
        return ModelError(f"{self.where}: {name}={value} is not supported; {expected}.")

    def get(self, *names: str) -> Any:
        """Return the unchecked value of the first field that is present, or None."""
        for name in names:
            if self._data.get(name) is not None:
                return self._data[name]
        return None

    def names(self) -> list[str]:
        """Return the names of all fields."""
        return list(self._data)

    def values(self) -> list[Any]:
        """Return the unchecked values of all fields."""
        return list(self._data.values())

    @property
    def fields(self) -> dict[str, Any]:
        """A copy of all fields, as they are."""
        return dict(self._data)

    def has(self, name: str) -> bool:
        """Return True if the field is present and not null."""
        return self._data.get(name) is not None

    def integer(
        self, *names: str, default: int | None = None, least: int = 1, most: int = _MOST
    ) -> int:
        """Return a whole number from `least` to `most`."""
        value = self._required(names, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.error(
                self._present(names), f"it must be a whole number >= {least} and <= {most}"
            )
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """Return a finite number."""
        value = self._required(names, default)
        if not _is_finite(value):
            raise self.error(self._present(names), "it must be a finite number")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.number(name, default=default)
        if value <= 0:
            raise self.error(name, "it must be more than 0")
        return value

    def optional_number(self, name: str) -> float | None:
        """Return a finite number, or None if the field is absent."""
        return self.number(name) if self.has(name) else None

    def optional_integer(self, name: str, least: int = 0) -> int | None:
        """Return a whole number, or None if the field is absent."""
        return self.integer(name, least=least) if self.has(name) else None

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._required((name,), default)
        if not isinstance(value, bool):
            raise self.error(name, "it must be true or false")
        return value

    def choice(self, name: str, allowed: dict[str, _Choice], default: str | None = None) -> _Choice:
        """Return the value in `allowed` of a text that must be one of its keys."""
        value = self._required((name,), default)
        if not isinstance(value, str) or value not in allowed:
            raise self.error(name, "supported: " + ", ".join(allowed))
        return allowed[value]

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """Return a list of `length` numbers."""
        value = self._required((name,), None)
        if not isinstance(value, list) or len(value) != length or not all(map(_is_finite, value)):
            raise self.error(name, f"it must be a list of {length} finite numbers")
        return tuple(float(v) for v in value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """Return token ids: one, a list of them, or none if the field is absent."""
        value = self.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= _MOST for i in ids):
            raise self.error(name, "it must be a token id or a list of token ids")
        return tuple(ids)

    def section(self, name: str) -> ConfigJson:
        """Return a nested object; empty if the field is absent."""
        value = self.get(name)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, "it must be an object")
        return ConfigJson(value or {}, f"{self.where}: {printable(name)}")

    def refuse(self, name: str, neutral: object, reason: str) -> None:
        """Raise `ModelError` unless the field is absent or has the value `neutral`."""
        if self.has(name) and self._data[name] != neutral:
            raise self.error(name, reason)

    def _present(self, names: tuple[str, ...]) -> str:
        return next((n for n in names if self.has(n)), names[0])

    def _required(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.get(*names)
        if value is None:
            value = default
        if value is None:
            raise ModelError(
                f"{self.where}: the field {' or '.join(names)} is missing; add it, or download the "
                "file again."
            )
        return value


def _is_finite(value: object) -> bool:
    try:
        return (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        )
    except OverflowError:  # a whole number beyond float64
        return False


def _merge(data: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**data, **fields}
    for name, value in fields.items():
        if isinstance(value, dict) and isinstance(data.get(name), dict):
            merged[name] = _merge(data[name], value)
    return merged
