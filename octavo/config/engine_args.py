"""Settings as scripts for vLLM give them: `EngineArgs`, or any argument of its `LLM`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import field, fields, make_dataclass
from typing import Any, Self

from octavo.compat.settings import FOREIGN, OFFLOADING, SECTIONS, SPECULATIVE, translate
from octavo.config import EngineConfig, config_fields, settings_from_environment
from octavo.config.arguments import GIVEN_FLAGS, add_engine_settings
from octavo.errors import ConfigError

_OWN = {f.name: f for f in config_fields(EngineConfig)}
_IGNORED = {
    # What older scripts give, and neither vLLM nor Octavo has any more.
    "disable_async_output_proc",
    "max_seq_len_to_capture",
    "swap_space",
    "use_v2_block_manager",
    # Only `octavo serve` has a log of requests.
    "enable_log_requests",
    # What the parser of `add_cli_args` leaves in its namespace.
    GIVEN_FLAGS,
}


def engine_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `EngineConfig.from_kwargs` for arguments of vLLM's `LLM`.

    Args:
        given: arguments by name. Defaults, and None, are left out, so that they contradict no
            other setting. Unknown names are passed on. The environment gives the rest.

    Raises:
        ConfigError: the task is not generation, a setting of vLLM's is not supported, or a
            variable of the environment has a wrong value.
    """
    environment = settings_from_environment()
    settings: dict[str, Any] = {k: v for k, v in environment.items() if k in _OWN}
    for name, value in given.items():
        if name == "logits_processors" and isinstance(value, list | tuple):
            settings[name] = [_class_name(kind) for kind in value]
        elif name == "task":  # vLLM's older name of runner
            if value not in (None, "auto", "generate"):
                raise ConfigError(f"task={value!r} is not supported: models generate text here.")
        elif name not in _IGNORED and not (name in _OWN and _is_default(name, value)):
            settings[name] = value
    if "dtype" in settings:  # torch's own are named "torch.float16"
        settings["dtype"] = str(settings["dtype"]).removeprefix("torch.")
    return translate(settings)


def _class_name(kind: Any) -> Any:
    """The name of a class by which an engine finds it, in whatever process."""
    if not isinstance(kind, type):
        return kind
    if "<locals>" in kind.__qualname__:
        raise ConfigError(
            f"logits_processors has the class {kind.__qualname__}, which only a function of yours "
            "can see; define it outside of functions."
        )
    return f"{kind.__module__}:{kind.__qualname__}"


def _is_default(name: str, value: Any) -> bool:
    default = _OWN[name].default
    return value is None or (type(value) is type(default) and bool(value == default))


def _fields() -> list[tuple[str, Any, Any]]:
    """Fields of a dataclass: Octavo's settings, and those that only vLLM has."""
    defaults = {name: f.default for name, f in _OWN.items()}
    for name, setting in FOREIGN.items():
        defaults[name] = setting.harmless[0] if setting.harmless else None
    defaults |= dict.fromkeys([*SECTIONS, *SPECULATIVE, *OFFLOADING])
    return [
        (
            name,
            Any,
            field(default_factory=value.copy)
            if isinstance(value, list | dict)
            else field(default=value),
        )
        for name, value in defaults.items()
    ]


class EngineArgs(make_dataclass("_EngineArgs", _fields())):  # type: ignore[misc]  # made by settings
    """vLLM's dataclass of an engine's settings: all of Octavo's, and those that only vLLM has.

    `model` comes first. Values are checked by `create_engine_config`.
    """

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds a flag for each setting; returns the parser."""
        add_engine_settings(parser)
        parser.set_defaults(**{name: f.default for name, f in _OWN.items()})
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The settings among the arguments of a command line."""
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)})

    def create_engine_config(self) -> EngineConfig:
        """Octavo's config of these settings.

        Raises:
            ConfigError: a value is wrong, or asks for what Octavo cannot do.
        """
        return EngineConfig.from_kwargs(**engine_settings(vars(self)))


class AsyncEngineArgs(
    make_dataclass(  # type: ignore[misc]  # made by settings
        "_AsyncEngineArgs",
        [("enable_log_requests", bool, field(default=False))],
        bases=(EngineArgs,),
    )
):
    """The settings of an `AsyncLLMEngine`."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds a flag for each setting; returns the parser."""
        parser.add_argument("--enable-log-requests", action=argparse.BooleanOptionalAction)
        return EngineArgs.add_cli_args(parser)
