"""Base of a section of settings, and the conversion of plain values into a checked section."""

from __future__ import annotations

import difflib
import re
import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from octavo.errors import ConfigError

# Shown in messages in place of a secret.
HIDDEN = "(hidden)"


PositiveInt = Annotated[int, Meta(gt=0)]


S = TypeVar("S", bound="Section")


_IPV6 = re.compile(r"\[[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*\](:\d+)?")


_SIZE_UNITS = ("", "K", "M", "G", "T")


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections."""

    def __repr__(self) -> str:
        """Return the settings that differ from their defaults; secrets appear as `HIDDEN`."""
        shown = (
            f"{f.name}={HIDDEN if f.secret else repr(value)}"
            for f in section_fields(type(self))
            if (value := getattr(self, f.name)) != f.default
        )
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True)
class ConfigField:
    """Name, type, default and description of one setting."""

    section: str
    name: str
    type: Any
    """Type without the Meta annotation; `X | None` if None is allowed."""
    default: Any
    doc: str
    secret: bool
    """True if the value must not be shown."""

    @property
    def flag(self) -> str:
        """Command-line flag of the setting."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_json(self) -> bool:
        """True if the value is a struct or a dict, which the command line accepts as JSON."""
        plain, _ = optional_type(self.type)
        return isinstance(plain, type(msgspec.Struct)) or typing.get_origin(plain) is dict

    @property
    def choices(self) -> tuple[Any, ...] | None:
        """Allowed values except None; None if they are not a fixed set."""
        plain, _ = optional_type(self.type)
        return typing.get_args(plain) if typing.get_origin(plain) is Literal else None


@cache  # each command needs them several times, and resolving the types takes milliseconds
def section_fields(section: type[Section], section_name: str = "") -> tuple[ConfigField, ...]:
    """Return the settings of one section."""
    fields = []
    for info in msgspec.structs.fields(section):
        kind, meta, *_ = typing.get_args(info.type)
        secret = bool((meta.extra or {}).get("secret"))
        default = (
            info.default_factory()
            if info.default_factory is not msgspec.NODEFAULT
            else info.default
        )
        fields.append(ConfigField(section_name, info.name, kind, default, meta.description, secret))
    return tuple(fields)


def build_section(section: type[S], values: dict[str, Any]) -> S:
    """Build one section from plain values, including sizes such as "4G".

    Raises:
        ConfigError: a name is unknown or a value is not allowed; the message names the setting,
            the value and the allowed values.
    """
    fields = {f.name: f for f in section_fields(section)}
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(_unknown(name, list(fields)))
        if is_size(name) and isinstance(value, str):
            value = parse_size(name, value)
        if fields[name].type == list[str]:
            value = _texts(name, value, fields[name].secret)
        if fields[name].is_json and isinstance(value, str):
            value = _json(name, value)
        choices, (_, optional) = fields[name].choices, optional_type(fields[name].type)
        if choices is not None and value not in choices and not (optional and value is None):
            allowed = ", ".join(str(choice) for choice in choices)
            raise ConfigError(f"{name}={value!r} is not allowed; choose one of {allowed}.")
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ConfigError(f"{name}={_shorten(value)} is not allowed: it is too large.")
        if fields[name].is_json and isinstance(value, dict):
            _check_parts(name, fields[name].type, value)
        try:
            plain[name] = getattr(msgspec.convert({name: value}, section), name)
        except msgspec.ValidationError as error:
            reason = _expected(str(error))
            shown = HIDDEN if fields[name].secret else repr(value)
            raise ConfigError(f"{name}={shown} is not allowed: {reason}.") from None
    return section(**plain)


def _check_parts(name: str, kind: Any, value: dict[str, Any]) -> None:
    """Raise ConfigError if a JSON setting has an unknown key, or a key has an unknown choice."""
    plain, _ = optional_type(kind)
    if not isinstance(plain, type(msgspec.Struct)):
        return
    parts = {part: optional_type(hint)[0] for part, hint in typing.get_type_hints(plain).items()}
    for part, item in value.items():
        if part not in parts:
            near = difflib.get_close_matches(part, parts, n=1)
            hint = f"did you mean {near[0]}?" if near else f"its keys are {', '.join(parts)}."
            raise ConfigError(f"{name} has no key {part!r}; {hint}")
        choices = typing.get_args(parts[part]) if typing.get_origin(parts[part]) is Literal else ()
        if choices and item is not None and item not in choices:
            raise ConfigError(
                f"{name}: {part}={item!r} is not allowed; choose one of {', '.join(choices)}."
            )


_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a JSON object",
}


def _expected(error: str) -> str:
    """Reword msgspec's error: "expected an integer >= 1", with the key inside a JSON object."""
    reason, _, where = error.partition(" - at `$.")
    worded = re.sub(r"`([\w |]+)`", _kinds, reason)
    inside = where.rstrip("`").partition(".")[2]
    return worded[:1].lower() + worded[1:] + (f" ({inside})" if inside else "")


def _kinds(found: re.Match[str]) -> str:
    names = [name for name in found[1].split(" | ") if name != "null"]
    return " or ".join(_KINDS.get(name, f"`{name}`") for name in names)


def _texts(name: str, value: Any, secret: bool) -> Any:
    """Return a list of texts from one or several texts, each of which may be a JSON list of texts.

    `--flag a b`, `--flag a --flag b` and `--flag '["a", "b"]'` are equivalent.
    """
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        return value
    texts: list[Any] = []
    for item in value:
        # An IPv6 address also begins with a bracket.
        if not isinstance(item, str) or not item.startswith("[") or _IPV6.fullmatch(item):
            texts.append(item)
            continue
        try:
            texts += msgspec.json.decode(item, type=list[str])
        except msgspec.MsgspecError:
            raise ConfigError(
                f"{name}={HIDDEN if secret else repr(item)} is not allowed: text that begins with"
                ' [ must be a JSON list of texts, such as ["a", "b"]; check the shell\'s quotes.'
            ) from None
    return texts


def _json(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{name}={text!r} is not valid JSON ({error}); check the shell's quotes."
        ) from None


def is_size(name: str) -> bool:
    """Return True if a setting is a number of bytes, which may be written as 4G."""
    return name.endswith("_bytes") or name == "expert_cache"


def parse_size(name: str, text: str) -> int:
    """Parse a number such as 4096, 512M, 1.5GiB or 4k; K is 1,024, and k is 1,000."""
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{name}={text!r} is not a size; write for example 512M or 4G.")
    unit = match[2]
    if unit.islower() and not match[3]:
        return int(float(match[1]) * 1000 ** _SIZE_UNITS.index(unit.upper()))
    return int(float(match[1]) * 1024 ** _SIZE_UNITS.index(unit.upper()))


def optional_type(hint: Any) -> tuple[Any, bool]:
    """Return X without its Meta annotation from `X | None`, and True if None is allowed."""
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if optional:
        hint = next(t for t in typing.get_args(hint) if t is not types.NoneType)
    if typing.get_origin(hint) is Annotated:
        hint = typing.get_args(hint)[0]
    return hint, optional


def _shorten(value: int) -> str:
    return f"{'-' if value < 0 else ''}(about 2**{value.bit_length()})"


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    return f"There is no setting called {name!r}{hint}"
