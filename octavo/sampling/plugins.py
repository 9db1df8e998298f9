"""Logits processor plug-ins: entry points `octavo.logits_processors`, and classes by name."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from octavo.errors import ConfigError, RequestError
from octavo.kernels.base import Ops
from octavo.sampling.logits_processors.base import LogitsProcessor, LongArray, NewRow, StepRows
from octavo.sampling.sizes import rows_per_chunk
from octavo.sampling.vllm_logits_processors import LogitsProcessor as VllmLogitsProcessor
from octavo.sampling.vllm_logits_processors import PerRequest
from octavo.system.device import resident_memory
from octavo.system.tensor import Tensor

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

logger = logging.getLogger(__name__)

ENTRY_POINTS = "octavo.logits_processors"
"""Group of entry points: name -> a subclass of `LogitsProcessor`."""

# Exceptions of another package's code, including those that would end this process.
_FAULTS = (Exception, SystemExit)


def import_plugins(names: Sequence[str]) -> int:
    """Import the processors of all installed packages and those of `names`, and torch for them.

    Returns the bytes by which the resident memory of this process has grown.

    Raises:
        ConfigError: a processor cannot be imported.
    """
    points = _find_points()
    if not (points or names):
        return 0
    before = resident_memory()
    for point in points:
        with _naming(point):
            point.load()
            _import_torch()
    for name in names:
        with _naming(name):
            _find_class(name)
            _import_torch()
    after = resident_memory()
    return 0 if before is None or after is None else max(0, after - before)


def load_plugins(max_num_rows: int, vocab_size: int) -> list[LogitsProcessor]:
    """Make the processors of all installed packages, in the order of their names.

    Args:
        max_num_rows: rows of the sampling state.
        vocab_size: width of the logits.

    Raises:
        ConfigError: a processor is unusable; the message names the package and the entry point.
    """
    plugins: list[LogitsProcessor] = []
    owners: dict[str, str] = {}
    for point in _find_points():
        with _naming(point):
            kind = point.load()
            if not issubclass(kind, LogitsProcessor):
                raise TypeError("it is not a subclass of LogitsProcessor")
            if not (isinstance(kind.extra_args, frozenset) and kind.extra_args):
                raise TypeError(
                    "its extra_args is not a frozenset of keys, so no request could use it"
                )
            for key in kind.extra_args:
                if key in owners:
                    raise ValueError(f"{owners[key]} already accepts the key {key!r} of extra_args")
                owners[key] = point.name
            plugins.append(_Plugin(point.name, kind(max_num_rows, vocab_size)))
    return plugins


def load_named(
    names: Sequence[str],
    max_num_rows: int,
    vocab_size: int,
    make_vllm: Callable[[type[VllmLogitsProcessor]], VllmLogitsProcessor],
) -> list[LogitsProcessor]:
    """Make the processors of the setting `logits_processors`, in its order.

    Args:
        names: classes, each as module:Class.
        max_num_rows: rows of the sampling state.
        vocab_size: width of the logits.
        make_vllm: makes a processor of vLLM's interface; called for each request.

    Raises:
        ConfigError: a processor is unusable.
    """
    plugins: list[LogitsProcessor] = []
    for name in names:
        with _naming(name):
            kind = _find_class(name)
            inner: LogitsProcessor
            if issubclass(kind, VllmLogitsProcessor):
                inner = PerRequest(max_num_rows, vocab_size, kind, make_vllm)
            elif issubclass(kind, LogitsProcessor):
                inner = kind(max_num_rows, vocab_size)
            else:
                raise TypeError(
                    "it is not a subclass of octavo.sampling.logits_processors.base."
                    "LogitsProcessor, nor of vllm.v1.sample.logits_processor.LogitsProcessor"
                )
            plugins.append(_Plugin(name, inner))
    return plugins


def _find_points() -> list[EntryPoint]:
    from importlib.metadata import entry_points  # slow, and pooling models do not need it

    return sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name)


@contextlib.contextmanager
def _naming(source: EntryPoint | str) -> Iterator[None]:
    """Turn any fault into a ConfigError that names a processor: an entry point or a class."""
    try:
        yield
    except _FAULTS as error:
        if isinstance(source, str):
            raise ConfigError(
                f"logits_processors has {source!r}, which cannot be used: {error!r}. "
                f"{_advice(error)}"
            ) from error
        package = source.dist.name if source.dist else "?"
        raise ConfigError(
            f"The {ENTRY_POINTS} entry point {source.name} = {source.value} of the package "
            f"{package} cannot be used: {error!r}. {_advice(error)}Fix or uninstall it."
        ) from error


def _import_torch() -> None:
    importlib.import_module("torch")  # the logits of plug-ins are torch's tensors


def _advice(error: BaseException) -> str:
    """Return a sentence for an error whose reason is that torch is not installed."""
    missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
    return "Logits processors need torch: pip install 'octavo[torch]'. " if missing else ""


def _find_class(name: str) -> type:
    module, colon, path = name.partition(":")
    if not (module and colon and path):
        raise ValueError("write it as module:Class")
    if module == "__main__" and "__main__" in sys.modules:
        try:
            return _as_class(pkgutil.resolve_name(name))
        except AttributeError:
            raise ValueError(
                "the engine runs in another process, which has not run your script; put the "
                "class into a module"
            ) from None
    if "vllm" not in sys.modules:
        # Code written for vLLM imports vLLM. The compat package is above the sampler, so it
        # is resolved by name, like the class.
        pkgutil.resolve_name("octavo.compat.vllm:install")()
    return _as_class(pkgutil.resolve_name(name))


def _as_class(found: object) -> type:
    if not isinstance(found, type):
        raise TypeError("it is not a class")
    return found


class _Plugin(LogitsProcessor):
    """Wrapper that limits a plug-in to requests with its keys, and its errors to these requests.

    Args:
        name: name of its entry point.
        inner: the plug-in.
    """

    def __init__(self, name: str, inner: LogitsProcessor) -> None:
        super().__init__(inner.max_num_rows, inner.vocab_size)
        _import_torch()
        self._name, self._inner = name, inner
        self.extra_args, self.needs_tokens = inner.extra_args, inner.needs_tokens
        self.takes_all, self.owns_logprobs = inner.takes_all, inner.owns_logprobs
        self._rows: set[int] = set()
        self._failed: dict[int, BaseException] = {}
        """Exceptions by row; their requests fail when the processor is applied."""

    def add_row(self, new: NewRow) -> bool:
        """Pass on a request that uses the plug-in."""
        if not self.takes_all and self.extra_args.isdisjoint(new.params.extra_args or ()):
            return False
        self._rows.add(new.row)
        # A copy: the answers of a request share extra_args, and a resumed request passes it again.
        extra_args = copy.deepcopy(new.params.extra_args)
        params = msgspec.structs.replace(new.params, extra_args=extra_args)
        try:
            return bool(self._inner.add_row(replace(new, params=params)))
        except _FAULTS as error:
            raise self._error(error) from error

    def remove_row(self, row: int) -> None:
        """Pass on the removal of a request."""
        if row in self._rows:
            self._rows.remove(row)
            self._failed.pop(row, None)
            try:
                self._inner.remove_row(row)
            except _FAULTS:  # no request is left to fail
                logger.exception("logits processor %s failed to forget a request", self._name)

    def append(self, rows: LongArray, tokens: LongArray) -> None:
        """Pass on tokens."""
        try:
            self._inner.append(rows, tokens)
        except _FAULTS as error:
            self._failed |= dict.fromkeys(rows.tolist(), error)

    def select(self, step: StepRows) -> StepRows:
        """Return the plug-in's selection; all rows if it has failed, so that `apply` can raise."""
        try:
            selected = self._inner.select(step)
            own = set(zip(step.at.tolist(), step.rows.tolist(), strict=True))
            if not own.issuperset(zip(selected.at.tolist(), selected.rows.tolist(), strict=True)):
                raise ValueError("select returned rows that were not passed to it")
        except _FAULTS as error:
            self._failed |= dict.fromkeys(step.rows.tolist(), error)
            return step
        return step if self._failed.keys() & step.rows.tolist() else selected

    def apply(self, ops: Ops, logits: Tensor, step: StepRows) -> None:
        """Pass the plug-in its rows, in portions, which bound the memory.

        Raises:
            RequestError: the plug-in has failed.
        """
        count = rows_per_chunk(self.vocab_size)
        try:
            for row in self._failed.keys() & step.rows.tolist():
                raise self._failed[row]
            for begin in range(0, len(step.at), count):
                some = step.take(slice(begin, begin + count))
                places = np.arange(len(some.at))
                chosen = StepRows(places, some.rows, some.num_output_tokens)
                ops.change_rows(logits, some.at, partial(self._change, chosen))
        except _FAULTS as error:
            raise self._error(error) from error

    def _change(self, step: StepRows, ops: Ops, logits: Any) -> None:
        """Have the plug-in change the logits of its rows, a torch.Tensor."""
        self._inner.apply(ops, logits, step)

    def _error(self, error: BaseException) -> RequestError:
        return RequestError(f"logits processor {self._name} failed: {error}", "extra_args")
