"""Settings as command-line flags, the same for every command that starts an engine."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

from octavo.compat.settings import (
    FOREIGN,
    OFFLOADING,
    RENAMED,
    SECTIONS,
    SHORT,
    SPECULATIVE,
    VALUES,
    translate,
)
from octavo.config import (
    ConfigField,
    EngineConfig,
    config_fields,
    is_size,
    optional_type,
    parse_size,
    section_doc,
)
from octavo.errors import ConfigError

_DOTTED = re.compile(r"(--?[A-Za-z][\w-]*)\.([\w-]+(?:\.[\w-]+)*)(\+)?(?:=(.*))?", re.DOTALL)

_NAME = re.compile(
    r"(?<![\w./'\"{-])([a-z][a-z0-9_]*)(?:=((?i:true|false))\b)?(?![\w/'\"-])(?=(=|: )?)"
)
"""Pattern of a word in a message that may name a setting, with its value if it is a switch."""

_WIDEST_CHOICES = 40
"""Maximum number of characters of the choices that the help shows after a flag."""

GIVEN_FLAGS = "given_flags"
"""Attribute of a namespace that holds the flags parsed so far."""


def add_engine_settings(parser: argparse.ArgumentParser, exclude: Collection[str] = ()) -> None:
    """Add a flag for each setting of `EngineConfig`, in one group for each section.

    Args:
        parser: parser that receives the flags.
        exclude: names of settings for which the parser already has a flag.
    """
    by_section: dict[str, list[ConfigField]] = {}
    for field in config_fields(EngineConfig):
        if field.name not in exclude:
            by_section.setdefault(field.section, []).append(field)
    for section, fields in by_section.items():
        add_settings(parser, section, fields, section_doc(section))
    _add_foreign_settings(parser)


def add_settings(
    parser: argparse.ArgumentParser,
    title: str,
    fields: Iterable[ConfigField],
    doc: str | None = None,
) -> None:
    """Add a group of flags, one for each setting.

    The namespace contains only the flags of the command line, no defaults.
    """
    group = parser.add_argument_group(title, doc)
    for field in fields:
        plain, _ = optional_type(field.type)
        shown = "" if field.default in (None, [], {}, "") else f" [{shown_default(field)}]"
        kwargs: dict[str, Any] = {
            "action": StoreOnce,
            "default": argparse.SUPPRESS,
            "help": (field.doc + shown).replace("%", "%%"),
        }
        if plain is bool:
            kwargs["action"] = _SwitchOnce
        elif plain == list[str]:
            kwargs |= {"nargs": "+", "action": "extend", "metavar": "TEXT"}
        elif field.choices is not None and len(field.choices) > 1:
            kwargs |= {"choices": field.choices, "type": _choice_type(field)}
            listed = ", ".join(map(str, field.choices))
            if len(listed) > _WIDEST_CHOICES:  # too wide to follow the flag
                kwargs |= {"metavar": "NAME", "help": f"{kwargs['help']} One of {listed}."}
        elif field.is_json:
            kwargs["metavar"] = "JSON"
        else:
            kwargs |= _value_type(field.name, plain)
        group.add_argument(*_names(field.name), **kwargs)
        if field.name == "mmproj":  # llama.cpp's name for its value off
            absent = argparse.SUPPRESS
            group.add_argument(
                "--no-mmproj", dest="mmproj", action=_StoreOff, nargs=0, default=absent, help=absent
            )


def shown_default(field: ConfigField) -> object:
    """Return a default that is not None in the form of the command line: 8M, on, 30."""
    value = field.default
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not is_size(field.name):
        return value
    power = next(power for power in (3, 2, 1, 0) if value % 1024**power == 0)
    return f"{value // 1024**power}{' KMG'[power].strip()}"


def _add_foreign_settings(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only vLLM has; docs/vllm.md lists them, the help does not.

    Flags that the caller has added to the parser remain.
    """
    kwargs: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    taken = {flag for action in parser._actions for flag in action.option_strings}
    for setting in FOREIGN.values():
        if setting.flag in taken:
            continue
        if setting.kind == "bool":
            parser.add_argument(*_names(setting.name), **kwargs, action=_SwitchOnce)
        elif setting.kind == "list":
            parser.add_argument(*_names(setting.name), **kwargs, nargs="+", action="extend")
        else:
            parser.add_argument(*_names(setting.name), **kwargs, action=StoreOnce)
    for name in (*SPECULATIVE, *SECTIONS, *RENAMED, *OFFLOADING):
        number = {"spec_tokens": int, "device_memory_utilization": float}.get(name, str)
        parser.add_argument(*_names(name), **kwargs, type=number, action=StoreOnce)


def _names(name: str) -> list[str]:
    long = "--" + name.replace("_", "-")
    return [SHORT[name], long] if name in SHORT else [long]


class StoreOnce(argparse.Action):
    """Action that stores the value of a flag and rejects a repeated flag."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store the value."""
        _note_given(parser, namespace, self)
        setattr(namespace, self.dest, values)


class _StoreOff(StoreOnce):
    """Action of a flag without a value that stores off."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store off."""
        super().__call__(parser, namespace, "off", option_string)


class _SwitchOnce(argparse.BooleanOptionalAction):
    """Action of --flag and --no-flag, of which the command line may have one, once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store True or False."""
        _note_given(parser, namespace, self)
        super().__call__(parser, namespace, values, option_string)


def _note_given(
    parser: argparse.ArgumentParser, namespace: argparse.Namespace, action: argparse.Action
) -> None:
    given = vars(namespace).setdefault(GIVEN_FLAGS, set())
    if action.option_strings and action.dest in given:
        flag = next(word for word in action.option_strings if word.startswith("--"))
        parser.error(f"{flag} is given twice; give it once")
    given.add(action.dest)


def expand_dotted(words: Iterable[str]) -> list[str]:
    """Combine flags such as --speculative-config.method ngram into one flag with JSON.

    A value is parsed as JSON if possible, otherwise it is text. --flag.key+ adds the values
    between commas to a list.

    Raises:
        ConfigError: a key appears twice, or a value is missing.
    """
    rest = iter(words)
    expanded: list[str] = []
    objects: dict[str, tuple[int, dict[str, Any]]] = {}
    for word in rest:
        if word == "--":
            expanded += [word, *rest]
            break
        match = _DOTTED.fullmatch(word)
        if match is None:
            expanded.append(word)
            continue
        flag, path, plus, value = match[1].replace("_", "-"), match[2], match[3], match[4]
        if value is None:
            value = next(rest, None)
        if value is None:
            raise ConfigError(f"{word} needs a value.")
        if flag not in objects:
            objects[flag] = len(expanded) + 1, {}
            expanded += [flag, ""]  # JSON replaces it
        _put_dotted(objects[flag][1], f"{flag}.{path}", path.split("."), value, bool(plus))
    for place, content in objects.values():
        expanded[place] = json.dumps(content)
    return expanded


def _put_dotted(content: dict[str, Any], name: str, keys: list[str], text: str, add: bool) -> None:
    for key in keys[:-1]:
        content = content.setdefault(key, {})
        if not isinstance(content, dict):
            raise ConfigError(
                f"{name} is given twice, with a value and with keys; give one of them."
            )
    last = keys[-1]
    if add:
        values = content.setdefault(last, [])
        if not isinstance(values, list):
            raise ConfigError(f"{name} is given twice, as a value and as a list.")
        values += [_json_or_text(part) for part in text.split(",")]
    elif last in content:
        raise ConfigError(f"{name} is given twice; give it once.")
    else:
        content[last] = _json_or_text(text)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def given_settings(args: argparse.Namespace, fields: Iterable[ConfigField]) -> dict[str, Any]:
    """Return the settings of the command line."""
    return {f.name: getattr(args, f.name) for f in fields if hasattr(args, f.name)}


def engine_kwargs(args: argparse.Namespace, model: str | None = None) -> dict[str, Any]:
    """Return the command line's engine settings: arguments of `LLM` and `EngineConfig.from_kwargs`.

    Args:
        args: result of a parser with `add_engine_settings`.
        model: positional argument with the model; None if missing.

    Raises:
        ConfigError: the command line names two models.
    """
    known = {field.name for field in config_fields(EngineConfig)}
    known |= {*FOREIGN, *SPECULATIVE, *SECTIONS, *RENAMED, *OFFLOADING}
    kwargs = translate({name: value for name, value in vars(args).items() if name in known})
    if model is not None:
        if kwargs.get("model", model) != model:
            raise ConfigError(
                f"Two models are named: {model!r} and --model {kwargs['model']!r}; give one."
            )
        kwargs["model"] = model
    return kwargs


def name_flags(message: str, parser: argparse.ArgumentParser) -> str:
    """Return an error's message with flags in place of the names of settings.

    Args:
        message: text such as "max_model_len=0 leaves no room".
        parser: parser with the flags.
    """
    flags: dict[str, tuple[str, bool]] = {}
    for action in parser._actions:
        for word in action.option_strings:
            if word.startswith("--") and not word.startswith("--no-"):
                is_switch = isinstance(action, argparse.BooleanOptionalAction)
                flags[word[2:].replace("-", "_")] = word, is_switch

    def flag(found: re.Match[str]) -> str:
        name, value = found[1], found[2]
        # A name of one word may be an ordinary word, except before a value or at the beginning.
        is_named = "_" in name or value or found[3] == "=" or (found[3] and not found.start())
        if name not in flags or not is_named:
            return found[0]
        word, is_switch = flags[name]
        if is_switch and value is not None:
            return word.replace("--", "--no-" if value.lower() == "false" else "--", 1)
        return word + (f"={value}" if value is not None else "")

    return re.sub(_NAME, flag, message)


def setting_flags(values: Mapping[str, Any], fields: Iterable[ConfigField]) -> list[str]:
    """Return the words of a command line that sets the given values.

    Args:
        values: settings by name, as `engine_kwargs` and `given_settings` return them.
        fields: all settings that `values` may contain.
    """
    flags = {field.name: field.flag for field in fields}
    words: list[str] = []
    for name, value in values.items():
        flag = flags[name]
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [flag, *value]
        elif isinstance(value, dict):
            words += [flag, json.dumps(value)]
        elif value is not None:
            words += [flag, str(value)]
    return words


def _choice_type(field: ConfigField) -> Callable[[str], Any]:
    """Return a parser of a fixed set of values, which also accepts vLLM's names of them."""
    assert field.choices is not None
    kind = type(field.choices[0])
    others = VALUES.get(field.name, {})

    def read(text: str) -> Any:
        return kind(others.get(text, text))

    read.__name__ = kind.__name__  # argparse shows it
    return read


def _value_type(name: str, plain: Any) -> dict[str, Any]:
    """Return argparse's options for parsing a value; the config parses sizes in bytes."""
    if is_size(name):
        return {"metavar": "SIZE"}
    number = getattr(plain, "__origin__", plain)  # the type under `Annotated`
    if number is Literal:  # of one value
        number = type(plain.__args__[0])
    if number is int:
        if name == "max_model_len":
            return {"type": _length, "metavar": "N"}
        is_count = name.endswith(("_len", "_tokens", "_threshold", "_override"))
        return {"type": _size if is_count else _whole, "metavar": "N"}
    if number is float:
        return {"type": float, "metavar": "X"}
    return {"metavar": "TEXT"}


def _whole(text: str) -> int:
    """Parse a whole number, such as 4096, 4k (4,000) or 4K (4,096)."""
    try:
        return parse_size("", text) if text[-1:].isalpha() else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _size(text: str) -> int:
    """Parse a number of tokens or blocks; the error mentions the form 4k."""
    try:
        return _whole(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(
            f"{error}; write for example 4096, 4k (4,000) or 4K (4,096)"
        ) from None


def _length(text: str) -> int:
    """Parse a whole number, or auto as -1."""
    return -1 if text.lower() == "auto" else _size(text)
