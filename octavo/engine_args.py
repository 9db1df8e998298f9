"""Settings as scripts for vLLM give them: `EngineArgs`, or any argument of its `LLM`."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import field, fields, make_dataclass
from typing import Any, Self

from octavo.arguments import add_engine_settings
from octavo.config import EngineConfig, config_fields, optional_type
from octavo.errors import ConfigError
from octavo.foreign import FOREIGN, check_foreign

_OWN = {f.name: f for f in config_fields(EngineConfig)}
_DTYPES = {"half": "float16", "float": "float32"}
# What older scripts give, and neither vLLM nor Octavo has any more.
_PAST = {
    "disable_async_output_proc",
    "max_seq_len_to_capture",
    "swap_space",
    "use_v2_block_manager",
}
_NESTED = {
    "attention_config": {"backend": "attention_backend"},
    "profiler_config": {"torch_profiler_dir": "profiler_dir"},
    "structured_outputs_config": {"backend": "guided_decoding_backend"},
}
"""vLLM's sections that Octavo has settings of, and which setting each of their keys is."""
_SPECULATIVE = {
    "spec_method": "method",
    "spec_model": "model",
    "spec_tokens": "num_speculative_tokens",
}
"""Its short forms of keys of `speculative_config`."""


def engine_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Octavo's own settings, for `EngineConfig.from_kwargs`, out of those that vLLM's `LLM` takes.

    Args:
        given: by their names; None stands for the default. Unknown names are passed on.

    Raises:
        ConfigError: one asks for what Octavo cannot do; the message says what to use instead.
    """
    settings: dict[str, Any] = {}
    speculative: dict[str, Any] = {}
    for name, value in given.items():
        if name in _OWN:
            if value is not None or optional_type(_OWN[name].type)[1]:
                settings[name] = value
        elif name in _SPECULATIVE:
            if value is not None:
                speculative[_SPECULATIVE[name]] = value
        elif name in _NESTED:
            settings |= _unpack(name, value)
        elif name == "task":
            if value not in (None, "auto", "generate"):
                raise ConfigError(f"task={value!r} is not supported: models generate text here.")
        elif name not in _PAST and not check_foreign(name, value):
            settings[name] = value
    if speculative:
        if settings.get("speculative_config") is not None:
            raise ConfigError(
                f"speculative_config and {', '.join(n for n in _SPECULATIVE if n in given)} say "
                "the same; give one of them."
            )
        settings["speculative_config"] = speculative
    if "dtype" in settings:  # torch's own are named "torch.float16"
        dtype = str(settings["dtype"]).removeprefix("torch.")
        settings["dtype"] = _DTYPES.get(dtype, dtype)
    return settings


def _unpack(name: str, value: Any) -> dict[str, Any]:
    """The settings of a section of vLLM's."""
    if value is not None and not isinstance(value, Mapping):
        raise ConfigError(f"{name}={value!r} is not a dict.")
    known = _NESTED[name]
    given = {key: v for key, v in (value or {}).items() if v is not None}
    if name == "profiler_config" and given.get("profiler") == "torch":
        del given["profiler"]  # it is implied
    for key in given:
        if key not in known:
            raise ConfigError(
                f"{name} has {key}={given[key]!r}, which is not supported; there is "
                f"{', '.join(known)}."
            )
    return {known[key]: v for key, v in given.items()}


def _fields() -> list[tuple[str, Any, Any]]:
    """Fields of a dataclass: Octavo's settings, and those that only vLLM has."""
    defaults = {name: f.default for name, f in _OWN.items()}
    for name, setting in FOREIGN.items():
        defaults.setdefault(name, setting.harmless[0] if setting.harmless else None)
    defaults |= dict.fromkeys([*_NESTED, *_SPECULATIVE])
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


class EngineArgs(make_dataclass("_EngineArgs", _fields())):  # type: ignore[misc]
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
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        given.pop("enable_log_requests", None)  # only a server has a log of requests
        return EngineConfig.from_kwargs(**engine_settings(given))


class AsyncEngineArgs(
    make_dataclass(  # type: ignore[misc]
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
