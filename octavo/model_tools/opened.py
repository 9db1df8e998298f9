"""Model of a tool's command line: its settings, its checkpoint and its spec."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.checkpoints.base import Checkpoint
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig
from octavo.config.arguments import engine_kwargs
from octavo.config.engine_settings import engine_settings
from octavo.errors import ConfigError
from octavo.models.hub import resolve_folders
from octavo.models.registry import read_spec
from octavo.models.spec import ModelSpec

MODEL_HELP = "Folder, GGUF file, hub id (org/name, org/name:Q4_K_M) or built-in model."


@dataclass(frozen=True)
class OpenedModel:
    """Model that is described, but not loaded."""

    kwargs: dict[str, Any]
    """Settings of the command line, as `LLM` takes them."""
    config: EngineConfig
    path: Path
    tokenizer_path: Path
    checkpoint: Checkpoint
    spec: ModelSpec

    @classmethod
    def of(cls, kwargs: dict[str, Any], *, with_weights: bool = True) -> OpenedModel:
        """Read the description of a model.

        Args:
            kwargs: settings, as `LLM` takes them.
            with_weights: False: of a model on the hub, download only the description.

        Raises:
            ConfigError, ModelError, HubError: settings or model are unusable.
        """
        config = EngineConfig.from_kwargs(**engine_settings(kwargs))
        found = config
        if not with_weights:
            found = EngineConfig.from_kwargs(
                **engine_settings(
                    {k: v for k, v in kwargs.items() if k != "load_format"}
                    | {"load_format": "dummy"}
                )
            )
        path, tokenizer_path = resolve_folders(found, header_only=not with_weights)
        checkpoint = open_checkpoint(
            path, config.load.load_format, config.model.seed, mmproj=config.load.mmproj
        )
        spec = read_spec(checkpoint, config.model)
        return cls(kwargs, config, path, tokenizer_path, checkpoint, spec)


def model_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a command line with a positional MODEL.

    Raises:
        ConfigError: no model is named.
    """
    kwargs = engine_kwargs(args, args.model_arg)
    if "model" not in kwargs:
        raise ConfigError("MODEL is missing; name a folder, a GGUF file or a hub id.")
    return kwargs
