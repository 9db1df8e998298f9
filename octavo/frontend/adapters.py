"""Adapters whose files a front end has checked."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TypeAlias

import msgspec

from octavo.config import EngineConfig
from octavo.errors import RequestError
from octavo.lora_request import LoRARequest
from octavo.messages import AdapterRef
from octavo.models.adapters import AdaptableModel, open_adapter
from octavo.models.blocks.base import is_adaptable
from octavo.models.forms import without_forms
from octavo.models.hub import builtin_adapter
from octavo.models.spec import ModelSpec
from octavo.plan.memory_plan import resolve_dtype

LoRARequests: TypeAlias = (
    LoRARequest | list[LoRARequest | None] | tuple[LoRARequest | None, ...] | None
)
"""Adapter for all prompts, or for each of them."""

_MOST_KNOWN = 10_000
"""Most adapters whose content is remembered; older ones are read again."""


class AdapterFiles:
    """Checker of adapters for one model. Any thread may use it.

    It reads the files of each pair of number and path once. The engine reads them again when a
    request needs them, and refuses files that have changed since.

    Args:
        config: the engine's settings.
        spec: the model.
    """

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        self._config, self._spec = config, spec
        self._lock = threading.Lock()
        self._model: AdaptableModel | None = None
        self._known: dict[tuple[int, str], AdapterRef] = {}
        """Adapters by number and path."""

    def resolve(self, request: LoRARequest | None, root: Path | None = None) -> AdapterRef | None:
        """Return the adapter of a request; None: the request has none.

        Args:
            request: the adapter.
            root: folder that must contain its files; None: they may be anywhere.

        Raises:
            AdapterError: the files cannot be used with this model.
            RequestError: adapters are off, or `request` is not a `LoRARequest`.
        """
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise RequestError(
                f"lora_request is a {type(request).__name__}; give an octavo.LoRARequest.",
                "lora_request",
            )
        if not self._config.lora.enable_lora:
            raise RequestError(
                f"The adapter {request.lora_name!r} cannot be used: adapters are off; start the "
                "engine with enable_lora=True (--enable-lora).",
                "lora_request",
            )
        builtin = builtin_adapter(request.lora_path) if root is None else None
        path = builtin or Path(request.lora_path).absolute()
        key = request.lora_int_id, str(path)
        with self._lock:
            known = None if request.load_inplace else self._known.pop(key, None)
            found = self._known[key] = known or self._read(path, root)
            if len(self._known) > _MOST_KNOWN:
                del self._known[next(iter(self._known))]
        return msgspec.structs.replace(found, name=request.lora_name)

    def _read(self, path: Path, root: Path | None) -> AdapterRef:
        """Return an adapter whose files are right, without its name."""
        config = self._config
        if self._model is None:
            layers = {
                weight.name.removesuffix("weight")
                for weight in without_forms(self._spec).weights()
                if is_adaptable(weight.name) and (weight.expert is None or config.adapts_experts)
            }
            self._model = AdaptableModel(self._spec, layers)
        adapter = open_adapter(
            path,
            self._model,
            dtype=resolve_dtype(config, self._spec),
            max_lora_rank=config.lora.max_lora_rank,
            root=root,
        )
        content_hash = adapter.read().content_hash
        assert content_hash is not None
        return AdapterRef("", str(path), content_hash, adapter.file.invocation_tokens)

    def resolve_each(self, requests: LoRARequests, count: int) -> list[AdapterRef | None]:
        """Return the adapter of each of `count` prompts, given one for all or one for each.

        Raises:
            AdapterError, RequestError: as `resolve`.
            ValueError: the numbers differ.
        """
        if not isinstance(requests, list | tuple):
            return [self.resolve(requests)] * count
        if len(requests) != count:
            raise ValueError(
                f"There are {count} prompts and {len(requests)} adapters (lora_request); give one "
                "for all or one for each, None for the model alone."
            )
        return [self.resolve(request) for request in requests]
