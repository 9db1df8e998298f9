"""Adapters that a server offers as models."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.config import LoRAConfig
from octavo.errors import (
    NotFoundError,
    OctavoError,
    QueueFullError,
    RequestError,
)
from octavo.lora_request import MAX_ADAPTER_NAME, LoRARequest
from octavo.lora_resolver import LoRAResolver
from octavo.messages import AdapterRef
from octavo.server.errors import UnavailableError, show
from octavo.server.lora_resolvers import FOLDER, make_resolvers

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

MAX_ADAPTERS = 10_000
"""Most adapters of a server."""
_MOST_SEARCHES = 64
"""Most unknown names that resolvers search for at the same time."""
_SEARCH_SECONDS = 60.0
"""Most seconds of a search, in which the adapter may be downloaded."""


@dataclass(slots=True, eq=False)
class ServedAdapter:
    """Adapter that requests may name as their model."""

    name: str
    path: str
    parent: str
    """Name of its model."""
    draft_path: str | None = None
    """Folder of the draft model's adapter."""
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
        self._config = config
        self._root = None if config.lora_root is None else Path(config.lora_root)
        self._resolvers: dict[str, LoRAResolver] = {}
        self._resolving: dict[str, asyncio.Task[ServedAdapter | None]] = {}
        """Searches for unknown names, by name."""
        self._model_names = model_names
        self._numbers = itertools.count(1)
        self._changing = asyncio.Lock()
        self._served = {
            it.name: ServedAdapter(
                it.name, it.path, it.base_model_name or model_names[0], it.draft_path
            )
            for it in config.modules
        }

    def __iter__(self) -> itertools.chain[ServedAdapter]:
        """Iterate over the adapters, in the order in which they were loaded."""
        return itertools.chain(self._served.values())

    @property
    def resolves(self) -> bool:
        """True if resolvers may find unknown names."""
        return bool(self._config.lora_resolvers)

    def find(self, name: str | None) -> ServedAdapter | None:
        """Return the adapter with a name; None: no adapter has it."""
        return None if name is None else self._served.get(name)

    async def open(self, engine: AsyncLLM) -> None:
        """Check the adapters of the settings.

        Raises:
            AdapterError: an adapter cannot be used.
            ConfigError: a resolver does not exist.
        """
        self._resolvers = make_resolvers(self._config)
        for adapter in self._served.values():
            adapter.ref = await engine.resolve_adapter(
                self._request(adapter.name, adapter.path, adapter.draft_path)
            )

    async def load(
        self,
        engine: AsyncLLM,
        name: str,
        path: str,
        *,
        draft_path: str | None = None,
        load_inplace: bool = False,
    ) -> ServedAdapter:
        """Check an adapter in `lora_root`, and offer it.

        Args:
            engine: the engine.
            name: its name.
            path: its folder, absolute or in `lora_root`.
            draft_path: folder of the draft model's adapter, in the same way.
            load_inplace: True to replace an adapter with this name, whose requests end as they are.

        Raises:
            AdapterError: the files cannot be used.
            RequestError: the name is in use, or there are too many adapters.
        """
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
            placed, root = self._place(path, "lora_path")
            draft = None
            if draft_path is not None:
                draft, draft_root = self._place(draft_path, "draft_path")
                if draft_root != root:
                    raise RequestError(
                        f"draft_path={show(draft_path)} and lora_path={show(path)} must both be in "
                        "the folder of adapters (--lora-root), or both be hub ids.",
                        "draft_path",
                    )
            adapter = await self._check(engine, self._request(name, placed, draft), root)
            self._served[name] = adapter
            return adapter

    def _place(self, path: str, param: str) -> tuple[str, Path | None]:
        """Return the path or hub id that a client names, and the folder that must contain it."""
        is_here = self._root is not None and os.path.exists(self._root / path)
        if not is_here and self._config.allows_from_hub(path):
            return path, None
        if self._root is None:
            raise RequestError(
                f"{param}={show(path)} is not one of the hub ids that may be loaded "
                "(--lora-hub-repos), and no folder is set (--lora-root).",
                param,
            )
        return str(self._root / path), self._root

    async def resolve(self, engine: AsyncLLM, name: str) -> ServedAdapter | None:
        """Let the resolvers find an unknown name; None: none of them knows it.

        All requests that name it wait for one search, and no others do.

        Raises:
            AdapterError: the adapter was found, and cannot be used.
            QueueFullError: too many names are searched for, or there are too many adapters.
            UnavailableError: a resolver failed, or the search takes too long.
        """
        if not (0 < len(name) <= MAX_ADAPTER_NAME and name.isprintable()):
            return None
        task = self._resolving.get(name)
        if task is None:
            if len(self._resolving) >= _MOST_SEARCHES:
                raise QueueFullError(
                    f"The server already looks for {_MOST_SEARCHES} adapters; try again later.", 1
                )
            task = asyncio.create_task(self._search(engine, name))
            self._resolving[name] = task
            task.add_done_callback(partial(self._end_search, name))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by a resolver, not by this request
                raise UnavailableError(f"The search for the adapter {show(name)} ended.") from None
            raise

    def _end_search(self, name: str, task: asyncio.Task[ServedAdapter | None]) -> None:
        del self._resolving[name]
        if not task.cancelled():
            task.exception()  # all requests may have given up

    async def _search(self, engine: AsyncLLM, name: str) -> ServedAdapter | None:
        try:
            async with asyncio.timeout(_SEARCH_SECONDS):
                return await self._ask_resolvers(engine, name)
        except TimeoutError:
            raise UnavailableError(
                f"The adapter {show(name)} was not found within {_SEARCH_SECONDS:.0f} s; try again "
                "later."
            ) from None

    async def _ask_resolvers(self, engine: AsyncLLM, name: str) -> ServedAdapter | None:
        for resolver_name, resolver in self._resolvers.items():
            try:
                request = await resolver.resolve_lora(self._model_names[0], name)
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
                if len(self._served) >= MAX_ADAPTERS:
                    raise QueueFullError(
                        f"The server has {MAX_ADAPTERS} adapters already; its operator must unload "
                        "one first.",
                        60,
                    )
                own = self._request(name, request.lora_path, request.draft_path)
                root = self._root if resolver_name == FOLDER else None
                found = await self._check(engine, own, root)
                # An adapter that an operator has loaded meanwhile has precedence.
                return self._served.setdefault(name, found)
        return None

    async def _check(
        self, engine: AsyncLLM, request: LoRARequest, root: Path | None
    ) -> ServedAdapter:
        ref = await engine.resolve_adapter(request, root)
        return ServedAdapter(
            request.lora_name, request.lora_path, self._model_names[0], request.draft_path, ref
        )

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

    def _request(self, name: str, path: str, draft_path: str | None) -> LoRARequest:
        return LoRARequest(name, next(self._numbers), path, draft_path=draft_path)
