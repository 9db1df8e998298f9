"""Adapters that a server offers as models."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from octavo.config import LoRAConfig
from octavo.errors import NotFoundError, QueueFullError, RequestError, UnknownAdapterError
from octavo.lora_request import LoRARequest
from octavo.lora_resolver import LoRAResolver
from octavo.messages import AdapterRef
from octavo.server import adapter_table
from octavo.server.adapter_searches import AdapterSearches
from octavo.server.adapter_table import AdapterTable, ServedAdapter, make_table
from octavo.server.errors import show
from octavo.server.lora_resolvers import FOLDER, ask_resolvers, make_resolvers

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

_NUMBER_NBYTES = 6


class ServedAdapters:
    """Adapters of a server, as one of its front ends sees them.

    Args:
        config: settings of adapters.
        model_names: names of the served model.
        table: the table that all front ends share; None: this is the only one.
    """

    def __init__(
        self, config: LoRAConfig, model_names: list[str], table: AdapterTable | None = None
    ) -> None:
        self._config = config
        self._root = None if config.lora_root is None else Path(config.lora_root)
        self._model_names = model_names
        self._table = make_table(config, model_names[0]) if table is None else table
        self._numbers = itertools.count(1)
        self._resolvers: dict[str, LoRAResolver] = {}
        self._engine: AsyncLLM | None = None
        self._searches = AdapterSearches(self._search)

    def __iter__(self) -> Iterator[ServedAdapter]:
        """Iterate over the adapters, in the order in which they were loaded."""
        return iter(self._table)

    def names(self, most: int = -1) -> list[str]:
        """Return the names of the adapters that were loaded first: all, or at most `most`."""
        return self._table.names(most)

    @property
    def resolves(self) -> bool:
        """True if resolvers may find unknown names."""
        return bool(self._config.lora_resolvers)

    def find(self, name: str) -> ServedAdapter | None:
        """Return the adapter with a name; None: no adapter has it."""
        return self._table.find(name) if self._config.enable_lora else None

    async def open(self, engine: AsyncLLM) -> None:
        """Check the adapters of the settings, those of `make_table` if no front end has.

        Raises:
            AdapterError: an adapter cannot be used.
            ConfigError: a resolver does not exist.
        """
        self._engine = engine
        self._resolvers = make_resolvers(self._config)
        await engine.check_default_adapters()
        for adapter in self._table:
            if adapter.ref is None:
                self._table.exchange(adapter, await self._checked(adapter))

    def close(self) -> None:
        """Close the table. It may be called twice."""
        self._table.close()

    async def load(
        self,
        name: str,
        path: str | None,
        *,
        draft_path: str | None = None,
        model_name: str | None,
        load_inplace: bool,
    ) -> ServedAdapter:
        """Check an adapter, and offer it.

        Args:
            name: its name.
            path: its folder, absolute or in `lora_root`, or a hub id; None: that of the adapter
                with this name.
            draft_path: the draft model's adapter, in the same way.
            model_name: name of its model; None: the served model's.
            load_inplace: True to replace an adapter with this name, whose requests end as they are.

        Raises:
            AdapterError: the files cannot be used.
            NotFoundError: `model_name` is unknown, or there is no adapter to be loaded again.
            RequestError: the name is in use or not allowed, or there are too many adapters.
        """
        if model_name is not None and model_name not in self._model_names:
            raise NotFoundError(
                f"base_model_name={show(model_name)} does not exist here; this server has "
                f"{', '.join(self._model_names)}.",
                "base_model_name",
            )
        if name in self._model_names:
            raise RequestError(
                f"lora_name={show(name)} is the name of the model; give another one.", "lora_name"
            )
        if not name.isprintable():
            raise RequestError(
                f"lora_name={show(name)} has a control character, or half a surrogate pair; leave "
                "it out.",
                "lora_name",
            )
        parent = model_name or self._model_names[0]
        if path is None:
            return await self._load_again(name)
        self._check_free(name, load_inplace)  # before the files are read
        adapter = await asyncio.to_thread(self._place, name, path, draft_path, parent)
        adapter = await self._checked(adapter)
        if not self._table.add(adapter, replace=load_inplace):
            self._check_free(name, load_inplace)
            raise _changed(name)
        return adapter

    async def _load_again(self, name: str) -> ServedAdapter:
        before = self.find(name)
        if before is None:
            raise not_loaded(name)
        adapter = await self._checked(msgspec.structs.replace(before, created=int(time.time())))
        if not self._table.exchange(before, adapter):
            raise _changed(name)
        return adapter

    def _check_free(self, name: str, load_inplace: bool) -> None:
        """Raise RequestError if an adapter cannot be added."""
        exists = self.find(name) is not None
        if exists and not load_inplace:
            raise RequestError(
                f"lora_name={show(name)} is loaded already; unload it first, or set load_inplace.",
                "lora_name",
            )
        if not exists and len(self._table) >= adapter_table.MAX_ADAPTERS:
            raise RequestError(
                f"There are {adapter_table.MAX_ADAPTERS} adapters already; unload one first.",
                "lora_name",
            )

    def _place(self, name: str, path: str, draft_path: str | None, parent: str) -> ServedAdapter:
        """Return the adapter at paths that a client names, which is not checked yet."""
        placed, root = self._find_place(path, "lora_path")
        draft = None
        if draft_path is not None:
            draft, draft_root = self._find_place(draft_path, "draft_path")
            if draft_root != root:
                raise RequestError(
                    f"draft_path={show(draft_path)} and lora_path={show(path)} must both be in "
                    "the folder of adapters (--lora-root), or both be hub ids.",
                    "draft_path",
                )
        return ServedAdapter(name=name, path=placed, draft_path=draft, root=root, parent=parent)

    def _find_place(self, path: str, param: str) -> tuple[str, str | None]:
        """Return the path or hub id that a client names, and the folder that must contain it."""
        try:
            is_here = self._root is not None and (self._root / path).exists()
        except (OSError, ValueError):  # too long, or not valid as a file name
            is_here = False
        if not is_here and self._config.allows_from_hub(path):
            return path, None
        if self._root is None:
            raise RequestError(
                f"{param}={show(path)} is not one of the hub ids that may be loaded "
                "(--lora-hub-repos), and no folder is set (--lora-root).",
                param,
            )
        return str(self._root / path), str(self._root)

    async def resolve(self, name: str, tenant: str | None) -> ServedAdapter | None:
        """Let the resolvers find an unknown name; None: none of them knows it.

        Args:
            name: the name.
            tenant: tenant of the request.

        Raises:
            AdapterError: the adapter was found, and cannot be used.
            QueueFullError: too many names are searched for, or there are too many adapters.
            UnavailableError: a resolver failed, or the search takes too long.
        """
        return await self._searches.find(name, tenant)

    async def _search(self, name: str) -> ServedAdapter | None:
        found = await ask_resolvers(self._resolvers, self._model_names[0], name)
        if found is None:
            return None
        resolver, request = found
        root = self._config.lora_root if resolver == FOLDER else None
        adapter = ServedAdapter(
            name=name,
            path=request.lora_path,
            draft_path=request.draft_path,
            root=root,
            parent=self._model_names[0],
        )
        try:
            adapter = await self._checked(adapter)
        except UnknownAdapterError:
            return None
        if not self._table.add(adapter):
            # One that an operator, or another front end, has added meanwhile has precedence.
            if (other := self.find(name)) is not None:
                return other
            raise QueueFullError(
                f"The server has {adapter_table.MAX_ADAPTERS} adapters already; its operator must "
                "unload one first.",
                60,
            )
        return adapter

    async def _checked(self, adapter: ServedAdapter) -> ServedAdapter:
        """Return an adapter whose files have just been read."""
        assert self._engine is not None
        request = LoRARequest(
            adapter.name, next(self._numbers), adapter.path, draft_path=adapter.draft_path
        )
        root = None if adapter.root is None else Path(adapter.root)
        ref = await self._engine.resolve_adapter(request, root)
        assert ref is not None
        return msgspec.structs.replace(adapter, ref=_numbered(ref))

    def unload(self, name: str) -> None:
        """Stop offering an adapter; its unfinished requests continue.

        Raises:
            NotFoundError: there is no such adapter.
        """
        if not self._table.remove(name):
            raise not_loaded(name)


def not_loaded(name: str) -> NotFoundError:
    """Return the error for the name of an adapter that does not exist."""
    return NotFoundError(
        f"The adapter {show(name)} is not loaded; GET /v1/models lists the adapters.", "lora_name"
    )


def _changed(name: str) -> RequestError:
    return RequestError(
        f"lora_name={show(name)} was loaded or unloaded meanwhile; send the request again.",
        "lora_name",
    )


def _numbered(ref: AdapterRef) -> AdapterRef:
    """Return an adapter with the number of its content, which is the same at all front ends."""
    digest = hashlib.blake2b(ref.key.encode(), digest_size=_NUMBER_NBYTES).digest()
    number = 1 + int.from_bytes(digest)
    draft_path = None if ref.draft is None else ref.draft.path
    request = LoRARequest(ref.name, number, ref.path, draft_path=draft_path)
    return msgspec.structs.replace(ref, request=request)
