"""YAML file of settings (`--config`), with the names of the flags as keys."""

from __future__ import annotations

import argparse
import difflib
import json
from typing import Any

from octavo.errors import ConfigError


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    """Add --config."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of settings with the names of these flags; flags override it.",
    )


def add_from_file(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Add to `args` the settings of the --config file that no flag sets.

    Args:
        parser: parser with the flags that the file may name; its errors are ConfigError.
        args: parsed command line; `config` is the path of the file.

    Raises:
        ConfigError: the file cannot be read, or has an unknown key, a repeated key or a wrong
            value; the message names the file and the key.
    """
    flags = parser._option_string_actions
    model_named = getattr(args, "model_arg", None) is not None
    seen: dict[str, str] = {}
    for key, value in _read(args.config).items():
        where = f"{args.config}: {key}"
        action = flags.get("--" + key.replace("_", "-"))
        if action is None or action.dest in ("help", "config"):
            raise ConfigError(f"{args.config}: {_unknown(key, list(flags))}")
        if action.dest in seen:
            raise ConfigError(f"{where} repeats {seen[action.dest]}; keep one.")
        seen[action.dest] = key
        words = _words(where, action, value)
        if hasattr(args, action.dest) or (action.dest == "model" and model_named):
            continue
        try:
            part = parser.parse_args(words)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        setattr(args, action.dest, getattr(part, action.dest))


def _read(path: str) -> dict[str, Any]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        content = yaml.safe_load(text)
        node = yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(f"config={path!r} cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"config={path!r} is not valid YAML: {' '.join(str(error).split())}."
        ) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"config={path!r} has no keys; write lines such as max-model-len: 4k.")
    keys = [key.value for key, _ in node.value]
    for key in keys:
        if keys.count(key) > 1:  # YAML itself would use the last one
            raise ConfigError(f"{path}: {key} appears twice; keep one.")
    return {str(key): value for key, value in content.items()}


def _unknown(key: str, flags: list[str]) -> str:
    near = difflib.get_close_matches("--" + key.replace("_", "-"), flags, n=1)
    hint = f"; did you mean {near[0][2:]}?" if near else "; keys are the names of flags."
    return f"there is no setting called {key!r}{hint}"


def _words(where: str, action: argparse.Action, value: Any) -> list[str]:
    """Return a key and its value as words of a command line."""
    flag = next(word for word in action.option_strings if word.startswith("--"))
    switch = isinstance(action, argparse.BooleanOptionalAction)
    if value is None:
        raise ConfigError(f"{where} has no value; give one, or leave the key out.")
    if switch != isinstance(value, bool):
        wanted = "true or false" if switch else "a value, not true or false"
        raise ConfigError(f"{where}={value!r} is not allowed; give {wanted}.")
    if switch:
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, list) and action.nargs == "+":
        return [f"{flag}={item}" for item in map(str, value)]
    if isinstance(value, (dict, list)):
        return [f"{flag}={json.dumps(value, default=str)}"]
    return [f"{flag}={value}"]
