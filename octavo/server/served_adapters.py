"""Adapters that a server offers as models."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config import LoRAConfig
from octavo.errors import NotFoundError, RequestError
from octavo.lora_request import LoRARequest
from octavo.messages import AdapterRef
from octavo.server.errors import show

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

MAX_ADAPTERS = 10_000
"""Most adapters of a server."""


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """Adapter that requests may name as their model."""

    name: str
    path: str
    parent: str
    """Name of its model."""
    ref: AdapterRef | None = None
    """The checked adapter; None: the model's files are not known yet."""
    created: int = field(default_factory=lambda: int(time.time()))


class ServedAdapters:
    """Adapters of a server, by name.

    Args:
        config: settings of adapters.
        model_names: names of the served model.
    """

    def __init__(self, config: LoRAConfig, model_names: list[str]) -> None:
        self._root = None if config.lora_root is None else Path(config.lora_root)
        self._model_names = model_names
        self._numbers = itertools.count(1)
        self._changing = asyncio.Lock()
        self._served = {
            it.name: ServedAdapter(it.name, it.path, it.base_model_name or model_names[0])
            for it in config.modules
        }

    def __iter__(self) -> itertools.chain[ServedAdapter]:
        """Iterate over the adapters, in the order in which they were loaded."""
        return itertools.chain(self._served.values())

    def find(self, name: str | None) -> ServedAdapter | None:
        """Return the adapter with a name; None: no adapter has it."""
        return None if name is None else self._served.get(name)

    async def open(self, engine: AsyncLLM) -> None:
        """Check the adapters of the settings.

        Raises:
            AdapterError: an adapter cannot be used.
        """
        for adapter in self._served.values():
            adapter.ref = await engine.resolve_adapter(self._request(adapter.name, adapter.path))

    async def load(
        self, engine: AsyncLLM, name: str, path: str, *, load_inplace: bool = False
    ) -> ServedAdapter:
        """Check an adapter in `lora_root`, and offer it.

        Args:
            engine: the engine.
            name: its name.
            path: its folder, absolute or in `lora_root`.
            load_inplace: True to replace an adapter with this name, whose requests end as they are.

        Raises:
            AdapterError: the files cannot be used.
            RequestError: the name is in use, or there are too many adapters.
        """
        assert self._root is not None
        if name in self._model_names:
            raise RequestError(
                f"lora_name={show(name)} is the name of the model; give another one.", "lora_name"
            )
        async with self._changing:  # one at a time: each reads files
            if name in self._served and not load_inplace:
                raise RequestError(
                    f"lora_name={show(name)} is loaded already; unload it first, or set "
                    "load_inplace.",
                    "lora_name",
                )
            if name not in self._served and len(self._served) >= MAX_ADAPTERS:
                raise RequestError(
                    f"There are {MAX_ADAPTERS} adapters already; unload one first.", "lora_name"
                )
            request = self._request(name, str(self._root / path))
            ref = await engine.resolve_adapter(request, self._root)
            adapter = ServedAdapter(name, request.lora_path, self._model_names[0], ref)
            self._served[name] = adapter
        return adapter

    async def unload(self, name: str) -> None:
        """Stop offering an adapter; its unfinished requests continue.

        Raises:
            NotFoundError: there is no such adapter.
        """
        async with self._changing:
            if self._served.pop(name, None) is None:
                raise NotFoundError(
                    f"The adapter {show(name)} is not loaded; GET /v1/models lists the adapters.",
                    "lora_name",
                )

    def _request(self, name: str, path: str) -> LoRARequest:
        return LoRARequest(name, next(self._numbers), path)
