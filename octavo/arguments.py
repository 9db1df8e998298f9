"""Settings as command-line flags: for every command that makes an engine, the very same ones."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from octavo.config import ConfigField, EngineConfig, config_fields, optional_type
from octavo.errors import ConfigError


def add_engine_settings(parser: argparse.ArgumentParser, exclude: Collection[str] = ()) -> None:
    """Adds a flag for each setting of `EngineConfig`, a group for each section.

    Args:
        parser: where to.
        exclude: names of settings that the parser has a flag for already.
    """
    by_section: dict[str, list[ConfigField]] = {}
    for field in config_fields(EngineConfig):
        if field.name not in exclude:
            by_section.setdefault(field.section, []).append(field)
    for section, fields in by_section.items():
        add_settings(parser, section, fields)


def add_settings(
    parser: argparse.ArgumentParser, title: str, fields: Iterable[ConfigField]
) -> None:
    """Adds a flag for each setting. Only flags that were given end up in the namespace."""
    group = parser.add_argument_group(title)
    for field in fields:
        plain, _ = optional_type(field.type)
        shown = "" if field.default in (None, [], {}, "") else f" [{field.default}]"
        kwargs: dict[str, Any] = {
            "default": argparse.SUPPRESS,
            "help": (field.doc + shown).replace("%", "%%"),
        }
        if plain is bool:
            kwargs["action"] = argparse.BooleanOptionalAction
        elif plain == list[str]:
            kwargs |= {"nargs": "+", "action": "extend", "metavar": "TEXT"}
        elif field.choices is not None:
            kwargs |= {"choices": field.choices, "type": type(field.choices[0])}
        elif field.is_json:
            kwargs["metavar"] = "JSON"
        else:
            kwargs |= _value_type(field.name, plain)
        group.add_argument(field.flag, **kwargs)


def given_settings(args: argparse.Namespace, fields: Iterable[ConfigField]) -> dict[str, Any]:
    """The settings that were given on the command line."""
    return {f.name: getattr(args, f.name) for f in fields if hasattr(args, f.name)}


def engine_kwargs(args: argparse.Namespace, model: str | None = None) -> dict[str, Any]:
    """The engine settings that were given: arguments for `LLM` or `EngineConfig.from_kwargs`.

    Args:
        args: what a parser with `add_engine_settings` made.
        model: the model as a positional argument, if there was one.

    Raises:
        ConfigError: two models are named.
    """
    kwargs = given_settings(args, config_fields(EngineConfig))
    if model is not None:
        if kwargs.get("model", model) != model:
            raise ConfigError(
                f"Two models are named: {model!r} and --model {kwargs['model']!r}; give one."
            )
        kwargs["model"] = model
    return kwargs


def engine_flags(kwargs: Mapping[str, Any]) -> list[str]:
    """The words of a command line that say what `engine_kwargs` returned."""
    fields = {f.name: f for f in config_fields(EngineConfig)}
    words: list[str] = []
    for name, value in kwargs.items():
        flag = fields[name].flag
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, list):
            words += [flag, *value]
        elif isinstance(value, dict):
            words += [flag, json.dumps(value)]
        elif value is not None:
            words += [flag, str(value)]
    return words


def _value_type(name: str, plain: Any) -> dict[str, Any]:
    """How argparse reads a value; sizes such as 4G are left to the config."""
    if name.endswith("_bytes"):
        return {"metavar": "SIZE"}
    number = getattr(plain, "__origin__", plain)  # the type under `Annotated`
    if number is int:
        return {"type": int, "metavar": "N"}
    if number is float:
        return {"type": float, "metavar": "X"}
    return {"metavar": "TEXT"}
