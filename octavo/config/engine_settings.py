"""Settings from the arguments of vLLM's `LLM`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.compat.settings import translate
from octavo.config import EngineConfig, config_fields, settings_from_environment
from octavo.config.arguments import GIVEN_FLAGS
from octavo.errors import ConfigError

_OWN = {f.name: f for f in config_fields(EngineConfig)}
_TASKS: dict[object, dict[str, str]] = {
    None: {},
    "auto": {},
    "generate": {"runner": "generate"},
    "embed": {"runner": "pooling", "convert": "embed"},
    "embedding": {"runner": "pooling", "convert": "embed"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "score": {"runner": "pooling", "convert": "classify"},
    "reward": {"runner": "pooling"},
}
"""vLLM's older tasks, as settings."""
_IGNORED = {
    # Arguments of older scripts that vLLM has removed.
    "disable_async_output_proc",
    "max_seq_len_to_capture",
    "swap_space",
    "use_v2_block_manager",
    # Only `octavo serve` logs requests.
    "enable_log_requests",
    # Attribute that the parser of `add_cli_args` adds to its namespace.
    GIVEN_FLAGS,
}


def engine_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `EngineConfig.from_kwargs` for arguments of vLLM's `LLM`.

    Environment variables supply settings that `given` lacks.

    Args:
        given: arguments by name. Defaults and None are dropped, so that they do not contradict
            other settings. Unknown names are passed on.

    Raises:
        ConfigError: the task is unknown, a setting of vLLM's is not supported, or an
            environment variable has a wrong value.
    """
    environment = settings_from_environment()
    settings: dict[str, Any] = {k: v for k, v in environment.items() if k in _OWN}
    for name, value in given.items():
        if name == "logits_processors" and isinstance(value, list | tuple):
            settings[name] = [_class_name(kind) for kind in value]
        elif name == "task":  # vLLM's older name for runner and convert
            if value not in _TASKS:
                known = ", ".join(str(task) for task in _TASKS if task is not None)
                raise ConfigError(f"task={value!r} is not supported; choose one of {known}.")
            settings |= _TASKS[value]
        elif name not in _IGNORED and not (name in _OWN and _is_default(name, value)):
            settings[name] = value
    if "dtype" in settings:  # torch's types are named "torch.float16"
        settings["dtype"] = str(settings["dtype"]).removeprefix("torch.")
    return translate(settings)


def _class_name(kind: Any) -> Any:
    """Return the name by which any process can import a class; return other values unchanged.

    Raises:
        ConfigError: the class is local to a function.
    """
    if not isinstance(kind, type):
        return kind
    if "<locals>" in kind.__qualname__:
        raise ConfigError(
            f"logits_processors has the class {kind.__qualname__}, which is local to "
            "a function; define it at module level."
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_default(name: str, value: Any) -> bool:
    default = _OWN[name].default
    return value is None or (type(value) is type(default) and bool(value == default))
