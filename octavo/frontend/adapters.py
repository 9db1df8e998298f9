"""Adapters whose files a front end has checked."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import TypeAlias

import msgspec

from octavo.checkpoints.tasks import TASKS
from octavo.config import EngineConfig
from octavo.errors import AdapterError, RequestError, UnsupportedError
from octavo.lora_request import LoRARequest
from octavo.messages import AdapterRef
from octavo.models.adaptable_model import EMBED, AdaptableModel
from octavo.models.adapters import open_adapter
from octavo.models.blocks.base import is_adaptable
from octavo.models.forms import without_forms
from octavo.models.hub import local_adapter, resolve_adapter, resolve_folders
from octavo.models.media_adapters import MEDIA_ADAPTERS
from octavo.models.spec import ModelSpec
from octavo.plan.memory_plan import resolve_dtype
from octavo.pooling_params import PoolingParams

LoRARequests: TypeAlias = (
    LoRARequest | list[LoRARequest | None] | tuple[LoRARequest | None, ...] | None
)
"""Adapter for all prompts, or for each of them."""

logger = logging.getLogger(__name__)

_MOST_KNOWN = 10_000
"""Most adapters whose content is remembered; older ones are read again."""
_THREADS = 16
"""Most adapters that are read at the same time, and most that are downloaded."""
_NO_NUMBER = 0
"""Number of adapters that no `LoRARequest` names."""
_Key: TypeAlias = tuple[int, str, str | None, Path | None]
"""Number, path, path of the draft model's adapter, and root."""
_Found: TypeAlias = "Future[AdapterRef]"
"""Adapter without its name, as soon as it has been read."""


def no_pins(lora_id: int) -> UnsupportedError:
    """Return the error for `pin_lora`."""
    return UnsupportedError(
        f"pin_lora({lora_id!r:.40}) is not supported: an adapter stays in memory as long as no "
        "other one needs its place; raise max_cpu_loras to the number of adapters, and all stay.",
        "lora_id",
    )


def _named(found: AdapterRef, request: LoRARequest) -> AdapterRef:
    name, draft = request.lora_name, found.draft
    if draft is not None:
        draft = msgspec.structs.replace(draft, name=name)
    return msgspec.structs.replace(found, name=name, request=request, draft=draft)


class AdapterFiles:
    """Checker of adapters for one model. Any thread may use it.

    It reads the files of each pair of number and path once, on a thread of its own, so one that is
    slow to read makes no other adapter wait. Downloads have further threads, so that a slow hub
    delays no adapter that is on the disk. The engine reads the files again when a request needs
    them, and refuses files that have changed since.

    Args:
        config: the engine's settings.
        spec: the model.
    """

    def __init__(self, config: EngineConfig, spec: ModelSpec) -> None:
        self._config, self._spec = config, spec
        self._lock = threading.Lock()
        self._readers = ThreadPoolExecutor(_THREADS, "octavo-adapter-files")
        self._downloaders = ThreadPoolExecutor(_THREADS, "octavo-adapter-downloads")
        self._known: dict[_Key, _Found] = {}
        """Adapters that have been read, or are."""
        self._has_warned = False
        """True after the warning of a prompt whose media have different adapters."""

    def resolve(self, request: LoRARequest | None, root: Path | None = None) -> AdapterRef | None:
        """Return the adapter of a request; None: the request has none.

        Args:
            request: the adapter.
            root: folder that must contain its files; None: they may be anywhere, and the path may
                be a hub id.

        Raises:
            AdapterError: the files cannot be used with this model.
            RequestError: adapters are off, or `request` is not a `LoRARequest`.
        """
        if request is None:
            return None
        return _named(self._find(request, root).result(), request)

    async def resolve_async(
        self, request: LoRARequest | None, root: Path | None = None
    ) -> AdapterRef | None:
        """Do the same as `resolve`; the event loop continues meanwhile."""
        if request is None:
            return None
        # A caller that gives up must not end the work for the others.
        found = asyncio.wrap_future(self._find(request, root))
        found.add_done_callback(asyncio.Future.exception)  # all callers may have given up
        return _named(await asyncio.shield(found), request)

    @cached_property
    def defaults(self) -> Mapping[str, LoRARequest]:
        """Adapters of prompts with media that name no adapter, by modality.

        They are those of `default_mm_loras`, or else those in the model's folder.
        """
        lora = self._config.lora
        if lora.default_mm_loras:
            # The numbers are vLLM's.
            pairs = enumerate(sorted(lora.default_mm_loras.items()), 1)
            return {name: LoRARequest(name, i, path) for i, (name, path) in pairs}
        own = MEDIA_ADAPTERS.get(self._spec.architecture, {})
        reads = [name for name in own if any(it.reads(name) for it in self._spec.encoders)]
        paths = {name: self._folder / own[name] for name in reads}
        if not lora.enable_lora and reads:
            logger.warning(
                "%s reads media with the adapters in its folders %s; they are off: start with "
                "--enable-lora and a --max-lora-rank of at least their rank",
                self._spec.architecture,
                ", ".join(own[name] for name in reads),
            )
            return {}
        for path in paths.values():
            if not path.exists():
                logger.warning("%s is missing: media are read without this adapter", path)
        known = [(name, path) for name, path in paths.items() if path.exists()]
        return {name: LoRARequest(name, i, str(path)) for i, (name, path) in enumerate(known, 1)}

    def of_media(self, prompt: object) -> LoRARequest | None:
        """Return the adapter of the media in a prompt that names none; None: it has none.

        With adapters in the model's folder, that of pictures precedes. With `default_mm_loras`,
        media with different adapters have none, as in vLLM.
        """
        data = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
        if not isinstance(data, Mapping) or not self.defaults:
            return None
        found = {
            request.lora_path: request
            for name, request in self.defaults.items()
            if (items := data.get(name)) is not None
            and not (isinstance(items, list | tuple) and not items)
        }
        if len(found) > 1 and self._config.lora.default_mm_loras:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "a prompt has media with different adapters (default_mm_loras): %s; such "
                    "prompts have none of them",
                    ", ".join(request.lora_name for request in found.values()),
                )
            return None
        return next(iter(found.values()), None)

    def add(self, request: LoRARequest) -> bool:
        """Check an adapter before a request uses it.

        Returns:
            True if its number was not known, or the files were read again (`load_inplace`).

        Raises:
            AdapterError, RequestError: see `resolve`.
        """
        is_new = request.load_inplace or request.lora_int_id not in self.numbers
        self.resolve(request)
        return is_new

    def remove(self, lora_int_id: int) -> bool:
        """Forget an adapter: the files are read again for its next request; False: unknown."""
        with self._lock:
            known = [key for key in self._known if key[0] == lora_int_id != _NO_NUMBER]
            for key in known:
                del self._known[key]
        return bool(known)

    @property
    def numbers(self) -> set[int]:
        """Numbers of the adapters that have been read."""
        with self._lock:
            known = list(self._known.items())
        done = {key[0] for key, it in known if it.done() and it.exception() is None}
        return done - {_NO_NUMBER}

    def _find(self, request: LoRARequest, root: Path | None) -> _Found:
        """Begin to read the adapter of a request, unless it is known; see `resolve`."""
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
        key = request.lora_int_id, request.lora_path, request.draft_path, root
        if request.load_inplace:  # others use the old files meanwhile
            found = self._read(*key[1:])
            found.add_done_callback(partial(self._note_again, key))
            return found
        return self._find_known(key)

    def _find_known(self, key: _Key) -> _Found:
        with self._lock:
            found = self._known.pop(key, None)
            if found is None or (found.done() and found.exception() is not None):
                found = self._read(*key[1:])
            self._note(key, found)
        return found

    def _note_again(self, key: _Key, found: _Found) -> None:
        """Remember an adapter that has been read again."""
        if found.exception() is None:
            with self._lock:
                self._note(key, found)

    def _note(self, key: _Key, found: _Found) -> None:
        self._known[key] = found
        if len(self._known) > _MOST_KNOWN:
            del self._known[next(iter(self._known))]

    @property
    def has_tasks(self) -> bool:
        """True if the model's checkpoint has adapters, see `resolve_task`."""
        return bool(self._spec.sentences.tasks)

    @cached_property
    def _folder(self) -> Path:
        """Folder of the model."""
        return resolve_folders(self._config)[0]

    def resolve_task(self, params: PoolingParams, adapter: AdapterRef | None) -> AdapterRef | None:
        """Return the adapter of a text: that of the task that its prompt has, or the given one.

        Raises:
            AdapterError: the adapter of the task cannot be used.
            RequestError: adapters are off, or the text has both.
        """
        sentences, name = self._spec.sentences, params.prompt_name
        name = sentences.default_prompt_name if name is None else name
        if name not in sentences.tasks:
            return adapter
        if adapter is not None:
            raise RequestError(
                f"prompt_name={name!r} has an adapter of its own, and the request names "
                f"{adapter.name!r}; leave one of them out.",
                "prompt_name",
            )
        if not self._config.lora.enable_lora:
            raise RequestError(
                f"prompt_name={name!r} has an adapter, and adapters are off; start the engine with "
                "enable_lora=True (--enable-lora).",
                "prompt_name",
            )
        path = str(self._folder / TASKS / name)
        found = self._find_known((_NO_NUMBER, path, None, None)).result()
        return msgspec.structs.replace(found, name=name)

    def _read(self, name: str, draft_name: str | None, root: Path | None) -> _Found:
        """Begin to read an adapter and that of the draft model, after downloads if necessary."""
        names = [name] if draft_name is None else [name, draft_name]
        found = Future[AdapterRef]()
        found.set_running_or_notify_cancel()  # from here on, no caller can cancel it
        self._readers.submit(self._read_into, found, names, root)
        return found

    def _read_into(self, found: _Found, names: list[str], root: Path | None) -> None:
        try:
            paths = [local_adapter(name) if root is None else Path(name) for name in names]
            local = [path for path in paths if path is not None]
            if len(local) < len(names):
                self._downloaders.submit(self._download_into, found, names)
            else:
                found.set_result(self._open_all(local, root))
        except BaseException as error:
            found.set_exception(error)

    def _download_into(self, found: _Found, names: list[str]) -> None:
        try:
            folder = self._config.load.download_dir
            paths = [resolve_adapter(name, download_dir=folder) for name in names]
            found.set_result(self._open_all(paths, None))
        except BaseException as error:
            found.set_exception(error)

    def _open_all(self, paths: list[Path], root: Path | None) -> AdapterRef:
        """Return an adapter, with that of the draft model if there is a second path."""
        found = self._open(paths[0], root, self._model)
        if len(paths) == 1:
            return found
        drafter = self._drafter
        if drafter is None:
            raise RequestError(
                f"draft_path={str(paths[1])!r:.80} is an adapter of a draft model, and this engine "
                "has none; start it with a draft model (speculative_config, method draft_model), "
                "or leave draft_path out.",
                "draft_path",
            )
        try:
            draft = self._open(paths[1], root, drafter)
        except AdapterError as error:
            raise AdapterError(f"draft_path: {error}") from None
        if draft.invocation_tokens not in ((), found.invocation_tokens):
            raise AdapterError(
                f"draft_path: {draft.path} begins where the model's adapter does, and its "
                "alora_invocation_tokens differ; train it with the same ones, or without."
            )
        return msgspec.structs.replace(found, draft=draft)

    def _open(self, path: Path, root: Path | None, model: AdaptableModel) -> AdapterRef:
        """Return an adapter whose files are right, without its name."""
        config = self._config
        path = path.absolute()
        adapter = open_adapter(
            path,
            model,
            dtype=resolve_dtype(config, self._spec),
            max_lora_rank=config.lora.max_lora_rank,
            root=root,
        )
        return AdapterRef("", str(path), adapter.read(), adapter.file.invocation_tokens)

    @cached_property
    def _model(self) -> AdaptableModel:
        return self._adaptable(self._spec, self._config.lora.lora_target_modules)

    @cached_property
    def _drafter(self) -> AdaptableModel | None:
        """Draft model; None without drafts, or if heads make them."""
        from octavo.models.drafts import find_draft  # few engines have a draft model

        draft = find_draft(self._config, self._spec, self._folder)
        return self._adaptable(draft.spec) if draft and draft.method == "draft_model" else None

    def _adaptable(self, spec: ModelSpec, targets: Sequence[str] = ()) -> AdaptableModel:
        lora, adapts = self._config.lora, self._config.adapts_experts
        layers = {
            weight.name.removesuffix("weight")
            for weight in without_forms(spec).weights()
            if is_adaptable(weight.name) and (weight.expert is None or adapts)
        }
        layers.add(EMBED)  # a table that is tied has another name
        return AdaptableModel(spec, layers, lora.lora_modules_to_save, targets)

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
