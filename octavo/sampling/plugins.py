"""Logits processors of other packages: those of entry points `octavo.logits_processors`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from importlib.metadata import entry_points

import numpy as np
import torch

from octavo.errors import ConfigError, RequestError
from octavo.kernels.base import Ops
from octavo.kernels.memory import to_device
from octavo.messages import CoreSamplingParams
from octavo.sampling.logits_processors.base import LogitsProcessor, LongArray, StepRows
from octavo.sampling.sizes import rows_per_chunk

logger = logging.getLogger(__name__)

GROUP = "octavo.logits_processors"


def load_plugins(max_num_rows: int, vocab_size: int) -> list[LogitsProcessor]:
    """Makes the processors of all installed packages, in the order of their names.

    Args:
        max_num_rows: rows of the sampling state.
        vocab_size: width of the logits.

    Raises:
        ConfigError: if one of them cannot be used; it names the package and the entry point.
    """
    plugins: list[LogitsProcessor] = []
    owners: dict[str, str] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: point.name):
        package = point.dist.name if point.dist else "?"
        where = f"{GROUP} entry point {point.name} = {point.value} of the package {package}"
        try:
            kind = point.load()
            if not (inspect.isclass(kind) and issubclass(kind, LogitsProcessor)):
                raise TypeError("it is no subclass of LogitsProcessor")
            if not kind.extra_args:
                raise ValueError("it names no key of extra_args, so no request could reach it")
            for key in kind.extra_args:
                if (owner := owners.setdefault(key, point.name)) != point.name:
                    raise ValueError(f"{owner} takes the key {key!r} of extra_args already")
            plugins.append(_Plugin(point.name, kind(max_num_rows, vocab_size)))
        except Exception as error:
            raise ConfigError(
                f"The {where} cannot be used: {error!r}. Mend or uninstall it."
            ) from error
    return plugins


class _Plugin(LogitsProcessor):
    """Keeps a plug-in to the requests that ask for it, and its faults to these.

    Args:
        name: its entry point's.
        inner: what is kept.
    """

    def __init__(self, name: str, inner: LogitsProcessor) -> None:
        super().__init__(inner.max_num_rows, inner.vocab_size)
        self._name, self._inner = name, inner
        self.extra_args, self.needs_tokens = inner.extra_args, inner.needs_tokens
        self._rows: set[int] = set()
        self._failed: dict[int, Exception] = {}
        """What it raised for some of its rows; their requests fail when it is applied."""

    def add_row(
        self,
        row: int,
        params: CoreSamplingParams,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
    ) -> bool:
        """Passes on a request that asks for it."""
        if self.extra_args.isdisjoint(params.extra_args or ()):
            return False
        self._rows.add(row)
        try:
            return bool(self._inner.add_row(row, params, token_ids, num_prompt_tokens))
        except Exception as error:
            raise self._error(error) from error

    def remove_row(self, row: int) -> None:
        """Passes on that such a request is gone."""
        if row in self._rows:
            self._rows.remove(row)
            self._failed.pop(row, None)
            try:
                self._inner.remove_row(row)
            except Exception:  # nobody is left whom it could fail
                logger.exception("logits processor %s failed to forget a request", self._name)

    def append(self, rows: LongArray, tokens: LongArray) -> None:
        """Passes on tokens."""
        try:
            self._inner.append(rows, tokens)
        except Exception as error:
            self._failed |= dict.fromkeys(rows.tolist(), error)

    def select(self, step: StepRows) -> StepRows:
        """What it selects."""
        try:
            return self._inner.select(step)
        except Exception as error:
            self._failed |= dict.fromkeys(step.rows.tolist(), error)
            return step

    def apply(self, ops: Ops, logits: torch.Tensor, step: StepRows) -> None:
        """Shows it its rows, in portions, which bound the memory.

        Raises:
            RequestError: if it has failed.
        """
        count = rows_per_chunk(self.vocab_size)
        try:
            for row in self._failed.keys() & step.rows.tolist():
                raise self._failed[row]
            for begin in range(0, len(step.at), count):
                some = step.take(slice(begin, begin + count))
                at = to_device(some.at, logits.device)
                own = logits[at]
                places = np.arange(len(some.at))
                self._inner.apply(ops, own, StepRows(places, some.rows, some.num_output_tokens))
                logits[at] = own
        except Exception as error:
            raise self._error(error) from error

    def _error(self, error: Exception) -> RequestError:
        return RequestError(f"logits processor {self._name} failed: {error}", "extra_args")
