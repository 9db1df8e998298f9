"""Resolvers of adapters: folders, the hub, and those of other packages."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from octavo.checkpoints.adapter import CONFIG
from octavo.config import LoRAConfig
from octavo.errors import ConfigError, OctavoError
from octavo.lora_request import LoRARequest
from octavo.lora_resolver import LoRAResolver, LoRAResolverRegistry
from octavo.server.errors import UnavailableError, show

logger = logging.getLogger(__name__)

ENTRY_POINTS = "octavo.lora_resolvers"
"""Group of the entry points of other packages: the object is a `LoRAResolver`, or makes one."""
FOLDER, HUB = "folder", "hub"
"""Names of the resolvers that belong to Octavo."""


class FolderResolver(LoRAResolver):
    """Resolver of the folders directly in `lora_root`, by their names.

    Args:
        root: the folder of adapters.
    """

    def __init__(self, root: str) -> None:
        self._root = Path(root)

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter in the folder with this name; None for paths and hidden folders.

        Folders without adapter_config.json are no adapters.
        """
        if lora_name.startswith(".") or os.sep in lora_name:
            return None
        path = self._root / lora_name
        try:
            if not await asyncio.to_thread((path / CONFIG).is_file):
                return None
        except (OSError, ValueError):  # too long, or not valid as a file name
            return None
        return LoRARequest(lora_name, 1, str(path))


class HubResolver(LoRAResolver):
    """Resolver of hub ids that `lora_hub_repos` allows.

    Args:
        config: the settings.
    """

    def __init__(self, config: LoRAConfig) -> None:
        self._config = config

    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """Return the adapter with this hub id; the hub is not asked yet."""
        allowed = await asyncio.to_thread(self._config.allows_from_hub, lora_name)
        return LoRARequest(lora_name, 1, lora_name) if allowed else None


async def ask_resolvers(
    resolvers: Mapping[str, LoRAResolver], model_name: str, name: str
) -> tuple[str, LoRARequest] | None:
    """Return the adapter with a name, and the name of the first resolver that knows it.

    Args:
        resolvers: the resolvers in the order of precedence.
        model_name: name of the served model.
        name: name of the adapter.

    Raises:
        UnavailableError: a resolver failed.
    """
    for resolver_name, resolver in resolvers.items():
        try:
            request = await resolver.resolve_lora(model_name, name)
            if request is not None and not isinstance(request, LoRARequest):
                raise TypeError(f"it returned a {type(request).__name__}, no LoRARequest")
        except OctavoError:
            raise
        except Exception as error:  # another package's code may raise anything
            logger.exception("the resolver %s failed for %s", resolver_name, show(name))
            raise UnavailableError(
                f"The adapter {show(name)} cannot be found: the resolver {resolver_name} "
                f"failed ({type(error).__name__}); the log of the server has the reason."
            ) from error
        if request is not None:
            return resolver_name, request
    return None


def make_resolvers(config: LoRAConfig) -> dict[str, LoRAResolver]:
    """Return the resolvers that the settings turn on, by their names.

    Raises:
        ConfigError: no resolver has this name, or it cannot be loaded.
    """
    return {name: _make(name, config) for name in config.lora_resolvers}


def _make(name: str, config: LoRAConfig) -> LoRAResolver:
    if name == FOLDER:
        assert config.lora_root is not None
        return FolderResolver(config.lora_root)
    if name == HUB:
        return HubResolver(config)
    if name in LoRAResolverRegistry.get_supported_resolvers():
        return LoRAResolverRegistry.get_resolver(name)
    from importlib.metadata import entry_points

    found = entry_points(group=ENTRY_POINTS)
    if name not in found.names:
        registered = LoRAResolverRegistry.get_supported_resolvers()
        known = ", ".join(sorted({FOLDER, HUB, *found.names, *registered}))
        raise ConfigError(
            f"lora_resolvers: there is no resolver {name!r}; installed: {known}. Install the "
            f"package that declares it (entry points of {ENTRY_POINTS}), or leave it out."
        )
    try:
        made = found[name].load()
        resolver = made if isinstance(made, LoRAResolver) else made()
    except Exception as error:  # another package's code may raise anything
        raise ConfigError(
            f"lora_resolvers: {name!r} cannot be loaded ({error!r}); update or remove the package "
            "that declares it."
        ) from error
    if not isinstance(resolver, LoRAResolver):
        raise ConfigError(
            f"lora_resolvers: {name!r} is a {type(resolver).__name__}, and it must be a "
            "LoRAResolver of octavo.lora_resolver."
        )
    return resolver
