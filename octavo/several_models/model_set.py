"""Models of which some are loaded: who waits, who is unloaded, and in which order.

At most `most_loaded` models are in memory. A request for a model that is not loaded waits, and its
model is loaded. If there is no room, another model leaves: an idle one if there is one, the least
recently used first. If all are busy, the least recently used one is closed: its running requests go
on, new ones wait, and it leaves after its last running request. So models get their turns in the
order in which their first requests arrived, and a turn serves all requests that have waited for it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Literal, Protocol

from octavo.errors import OctavoError
from octavo.server.errors import UnavailableError, show

logger = logging.getLogger(__name__)

State = Literal["unloaded", "loading", "loaded", "unloading", "failed"]
# Seconds after which a request may try a model again that could not be loaded: doubled each time.
_FIRST_PAUSE = 5.0
_LONGEST_PAUSE = 300.0
_RETRY_SECONDS = 5
"""Seconds after which a client may repeat a request that has waited in vain."""


class ModelFailedError(UnavailableError):
    """Model that could not be loaded."""

    def __init__(self, name: str, reason: str, retry_after: int) -> None:
        super().__init__(f"The model {show(name)} could not be loaded: {reason}", retry_after)
        self.code = "model_failed"


class Backend(Protocol):
    """Loads and unloads one model."""

    async def load(self) -> None:
        """Load the model; after an error or a cancellation, nothing of it is in memory.

        Raises:
            OctavoError: it cannot be loaded.
        """

    async def unload(self) -> None:
        """Unload the model; on return, its memory is free."""


class Model:
    """One model of a set.

    Args:
        names: its names; the first one is shown.
        backend: loads and unloads it.
    """

    def __init__(self, names: Sequence[str], backend: Backend) -> None:
        self.names = list(names)
        self.backend = backend
        self.state: State = "unloaded"
        self.error: OctavoError | None = None
        """Cause of the state "failed"."""
        self.num_users = 0
        """Number of requests that the model answers."""
        self.num_loads = 0
        """Number of times that it was loaded."""
        self.leaving = asyncio.Event()
        """Event that is set while `closed`."""
        self.expires: float | None = None
        """Time of the set's clock at which the idle model leaves; None: it stays."""
        self._waiting: list[asyncio.Future[None]] = []
        self._load_asked = self._unload_asked = False
        self._since = 0
        """Number of the event that made it wanted."""
        self._used = 0
        """Number of the last event that used it: a request's begin, or its end if it was the last
        one."""
        self._pause = _FIRST_PAUSE
        self._retry_at = 0.0
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for the model."""
        return len(self._waiting)

    @property
    def closed(self) -> bool:
        """True if a loaded model accepts no further requests, since it is to leave."""
        return self.leaving.is_set()

    @closed.setter
    def closed(self, value: bool) -> None:
        if value:
            self.leaving.set()
        else:
            self.leaving.clear()

    @property
    def is_wanted(self) -> bool:
        """True if it is to be loaded."""
        return bool(self._waiting) or self._load_asked

    def stop_timer(self) -> None:
        """Do not unload it after a time."""
        self.expires = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ModelSet:
    """Models of which at most `most_loaded` are in memory.

    Args:
        models: all models.
        most_loaded: maximum number of models in memory, those included that are being loaded or
            unloaded.
        load_timeout: maximum seconds for which a request waits for its model.
    """

    def __init__(self, models: Sequence[Model], most_loaded: int, load_timeout: float) -> None:
        self.models = models
        self.most_loaded = most_loaded
        self._load_timeout = load_timeout
        self._events = itertools.count(1)
        self._started = False
        self._closing = False

    def start(self) -> None:
        """Begin to load models: the first ones, as many as fit, and those that requests want."""
        self._started = True
        for model in self.models[: self.most_loaded]:
            if model.state == "unloaded":
                model._load_asked = True
                model._since = model._since or next(self._events)
        self._advance()

    async def close(self) -> None:
        """Unload all models."""
        self._closing = True
        tasks = [model._task for model in self.models if model._task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for model in self.models:
            model.stop_timer()
        await asyncio.gather(*(model.backend.unload() for model in self.models))

    # Requests

    @asynccontextmanager
    async def use(self, model: Model, keep_alive: float | None = None) -> AsyncIterator[None]:
        """Hold a model while it answers a request; first wait until it is loaded.

        Args:
            model: the model.
            keep_alive: seconds after which it is unloaded if it is idle then; None: it stays. The
                last request decides.

        Raises:
            ModelFailedError: it could not be loaded.
            UnavailableError: it was not loaded in time.
        """
        await self._enter(model)
        try:
            yield
        finally:
            self._leave(model, keep_alive)

    async def _enter(self, model: Model) -> None:
        if model.state == "failed":
            if (left := model._retry_at - time.monotonic()) > 0:
                raise _failed(model, left)
            model.state, model.error = "unloaded", None
        if model.state == "loaded" and not model.closed:
            self._admit(model)
            return
        place = asyncio.get_running_loop().create_future()
        if not model.is_wanted:
            model._since = next(self._events)
        model._waiting.append(place)
        self._advance()
        try:
            async with asyncio.timeout(self._load_timeout):
                await place
        except BaseException as error:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._leave(model, None)  # it was admitted at the same moment
            if isinstance(error, TimeoutError):
                raise UnavailableError(
                    f"The model {show(model.names[0])} was not loaded within "
                    f"{self._load_timeout:g} s; try again later.",
                    _RETRY_SECONDS,
                ) from None
            raise
        finally:
            if place in model._waiting:
                model._waiting.remove(place)
                self._advance()

    def _admit(self, model: Model) -> None:
        model.num_users += 1
        model._used = next(self._events)
        model.stop_timer()

    def _leave(self, model: Model, keep_alive: float | None) -> None:
        model.num_users -= 1
        if not model.num_users:
            model._used = next(self._events)
            self._keep(model, keep_alive)
        self._advance()

    def _keep(self, model: Model, seconds: float | None) -> None:
        """Unload an idle model after some seconds; never for None."""
        if seconds is None or model.state != "loaded":
            return
        model.expires = time.monotonic() + seconds
        if seconds <= 0:
            model._unload_asked = True
        else:
            loop = asyncio.get_running_loop()
            model._timer = loop.call_later(seconds, self.unload, model)

    # The operator

    def load(self, model: Model) -> None:
        """Load a model now, even if it has just failed."""
        if model.state == "failed":
            model.state, model.error = "unloaded", None
        model._unload_asked = False
        if model.state in ("unloaded", "unloading") and not model.is_wanted:
            model._load_asked, model._since = True, next(self._events)
        self._advance()

    def unload(self, model: Model) -> None:
        """Unload a model after its running requests; a request that arrives later loads it again.

        Requests that wait while it is being loaded get an error.
        """
        model._load_asked = False
        if model.state == "loaded":
            model._unload_asked = True
        elif model.state == "failed":
            model.state, model.error = "unloaded", None
        elif model.state == "loading":
            self._refuse(
                model,
                lambda: UnavailableError(
                    f"The model {show(model.names[0])} was unloaded while it was loading.",
                    _RETRY_SECONDS,
                ),
            )
            self._begin(model, "unloading")
        self._advance()

    def note_failure(self, model: Model, error: OctavoError) -> None:
        """Record that a model cannot be loaded, or that a loaded one cannot be started again."""
        if model.state in ("unloaded", "loaded"):
            self._fail(model, error)
            self._advance()

    # Turns

    def _advance(self) -> None:
        """Begin what is possible now: load wanted models, and unload others if there is no room."""
        if not self._started or self._closing:
            return
        wanted = sorted(
            (m for m in self.models if m.state == "unloaded" and m.is_wanted),
            key=lambda m: m._since,
        )
        held = [m for m in self.models if m.state in ("loading", "loaded", "unloading")]
        room = self.most_loaded - len(held)
        for model in wanted[:room]:
            self._begin(model, "loading")
        # Each model that finds no room needs one that leaves.
        needed = len(wanted[room:]) - sum(m.state == "unloading" for m in held)
        loaded = [m for m in held if m.state == "loaded"]
        for model in sorted(loaded, key=lambda m: (m.num_users > 0, m._used)):
            model.closed = needed > 0 or model._unload_asked
            needed -= model.closed
            if not model.closed:
                self._let_in(model)
            elif not model.num_users:
                self._begin(model, "unloading")

    def _let_in(self, model: Model) -> None:
        """Admit all requests that wait for a loaded model."""
        for place in model._waiting:
            if not place.done():
                self._admit(model)
                place.set_result(None)
        model._waiting.clear()

    def _begin(self, model: Model, state: Literal["loading", "unloading"]) -> None:
        old = model._task
        if model.state == "loading" and old is not None:
            old.cancel()  # now: it must not complete before the other work begins
        model.state = state
        model.closed = model._unload_asked = False
        model.stop_timer()
        work = self._load(model) if state == "loading" else self._unload(model, old)
        model._task = asyncio.create_task(work)

    async def _load(self, model: Model) -> None:
        logger.info("loading", extra={"model": model.names[0]})
        began = time.monotonic()
        with self._unexpected(model):
            try:
                await model.backend.load()
            except OctavoError as error:
                self._fail(model, error)
            else:
                seconds = round(time.monotonic() - began, 2)
                logger.info("loaded", extra={"model": model.names[0], "seconds": seconds})
                model.state, model._load_asked = "loaded", False
                model.num_loads += 1
                model._pause, model._used = _FIRST_PAUSE, next(self._events)
                self._let_in(model)
        self._advance()

    async def _unload(self, model: Model, loading: asyncio.Task[None] | None) -> None:
        if loading is not None:
            await asyncio.gather(loading, return_exceptions=True)
        with self._unexpected(model):
            await model.backend.unload()
            model.state = "unloaded"
        logger.info("unloaded", extra={"model": model.names[0]})
        self._advance()

    @contextmanager
    def _unexpected(self, model: Model) -> Iterator[None]:
        """Turn an error that no other code expects into a failure of the model."""
        try:
            yield
        except Exception as error:
            logger.error("a model failed", exc_info=error)
            self._fail(model, OctavoError(f"Unexpected: {error!r}"))

    def _fail(self, model: Model, error: OctavoError) -> None:
        logger.error("%s could not be loaded: %s", model.names[0], error)
        model.state, model.error = "failed", error
        model._load_asked = model._unload_asked = model.closed = False
        pause = model._pause
        model._retry_at = time.monotonic() + pause
        model._pause = min(2 * pause, _LONGEST_PAUSE)
        self._refuse(model, lambda: _failed(model, pause))

    @staticmethod
    def _refuse(model: Model, make_error: Callable[[], OctavoError]) -> None:
        """Give all requests that wait for a model an error."""
        for place in model._waiting:
            if not place.done():
                place.set_exception(make_error())
        model._waiting.clear()


def _failed(model: Model, seconds: float) -> ModelFailedError:
    return ModelFailedError(model.names[0], str(model.error), max(1, round(seconds)))
