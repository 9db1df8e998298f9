"""Settings in the form of vLLM's `EngineArgs`."""

from __future__ import annotations

import argparse
from dataclasses import field, fields, make_dataclass
from typing import Any, Self

from octavo.compat.settings import FOREIGN, OFFLOADING, SECTIONS, SPECULATIVE
from octavo.config import EngineConfig, config_fields
from octavo.config.arguments import add_engine_settings
from octavo.config.engine_settings import engine_settings

_OWN = {f.name: f for f in config_fields(EngineConfig)}


def _fields() -> list[tuple[str, Any, Any]]:
    """Return dataclass fields for Octavo's settings and for those that only vLLM has."""
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


class EngineArgs(make_dataclass("_EngineArgs", _fields())):  # type: ignore[misc]  # built from the settings
    """Dataclass with vLLM's interface: all of Octavo's settings and those that only vLLM has.

    `model` is the first field. `create_engine_config` checks the values.
    """

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each setting and return the parser."""
        add_engine_settings(parser)
        parser.set_defaults(**{name: f.default for name, f in _OWN.items()})
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """Return the settings of a parsed command line."""
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)})

    def create_engine_config(self) -> EngineConfig:
        """Return Octavo's config of the settings.

        Raises:
            ConfigError: a value is wrong or not supported.
        """
        return EngineConfig.from_kwargs(**engine_settings(vars(self)))


class AsyncEngineArgs(
    make_dataclass(  # type: ignore[misc]  # built from the settings
        "_AsyncEngineArgs",
        [("enable_log_requests", bool, field(default=False))],
        bases=(EngineArgs,),
    )
):
    """Settings of an `AsyncLLMEngine`."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each setting and return the parser."""
        parser.add_argument("--enable-log-requests", action=argparse.BooleanOptionalAction)
        return EngineArgs.add_cli_args(parser)
