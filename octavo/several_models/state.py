"""State shared by all requests of a server of several models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from starlette.requests import Request

from octavo.config import EngineConfig, LoRAConfig, ServerConfig
from octavo.errors import NotFoundError, OctavoError, RequestError
from octavo.router.config import RouterConfig
from octavo.router.job import Job
from octavo.router.pool import Pool
from octavo.router.proxy_state import ProxyState
from octavo.server.adapter_searches import AdapterSearches
from octavo.server.adapter_table import AdapterTable, ServedAdapter, make_table
from octavo.server.adapters import NO_CHANGES
from octavo.server.errors import RouteError, UnavailableError, show
from octavo.server.lora_resolvers import ask_resolvers, make_resolvers
from octavo.server.served_adapters import not_loaded
from octavo.several_models.config import ServedModel, SeveralModelsConfig
from octavo.several_models.memory import ModelMemory, Share
from octavo.several_models.model_set import Model, ModelSet, State
from octavo.several_models.server import ModelServer, ModelStarter
from octavo.system import clock
from octavo.system.notify import notify_ready
from octavo.system.socket_folder import SocketFolder

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
# Most names that an error lists.
_MOST_NAMED = 20


class OneModel(Model):
    """One of the models: its memory, its server, and the pool that has the server.

    Args:
        share: its settings, and its part of the memory plan.
        backend: its server.
        adapters: the table of adapters that it shares with its server; None: it has no adapters.
    """

    backend: ModelServer

    def __init__(
        self, share: Share, backend: ModelServer, adapters: AdapterTable | None = None
    ) -> None:
        super().__init__(share.served.names, backend)
        self.share = share
        self.pool = backend.pool
        self.adapters = adapters

    @property
    def shown_state(self) -> State:
        """State for clients: a server that is started again is loading."""
        if self.state == "loaded" and not any(upstream.ready for upstream in self.pool.upstreams):
            return "loading"
        return self.state

    @property
    def lora(self) -> LoRAConfig:
        """Settings of its adapters."""
        return self.share.served.config.lora

    def find_adapter(self, name: str) -> ServedAdapter | None:
        """Return one of its adapters; None: it has none with this name."""
        return None if self.adapters is None else self.adapters.find(name)

    def can(self, ability: str) -> bool:
        """Return True if the model has an ability; see `PlannedModel.abilities`."""
        return self.share.planned is not None and ability in self.share.planned.abilities


class ModelsState(ProxyState):
    """State of a server of several models.

    Args:
        config: settings of the front's HTTP server.
        several: settings of the loading.
        served: the models.
        common: settings of the engine for all models.
    """

    def __init__(
        self,
        config: ServerConfig,
        several: SeveralModelsConfig,
        served: Sequence[ServedModel],
        common: EngineConfig,
    ) -> None:
        router = RouterConfig(failover_timeout=several.model_load_timeout)
        pools = [Pool(router.health_check_interval, router.health_check_timeout) for _ in served]
        super().__init__(config, router, pools)
        self.created = int(clock.now())
        most = min(several.max_loaded_models or len(served), len(served))
        self.memory = ModelMemory(served, common, most)
        self._folder = SocketFolder("octavo-models-")
        shares = enumerate(zip(self.memory.shares, pools, strict=True))
        self.models = [self._make_model(number, *share) for number, share in shares]
        self.set = ModelSet(self.models, most, several.model_load_timeout)
        self._by_name = {name: model for model in self.models for name in model.names}
        self._resolvers = {model: make_resolvers(model.lora) for model in self.models}
        self._searches = AdapterSearches(self._search)
        self._being_loaded: list[tuple[str, OneModel]] = []
        """Names of the adapters that are being loaded, with their models."""
        self._planned = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None

    def _make_model(self, number: int, share: Share, pool: Pool) -> OneModel:
        name, lora = share.served.names[0], share.served.config.lora
        file = self._folder.path / f"adapters-{number}" if lora.enable_lora else None
        adapters = None if file is None else make_table(lora, name, file)
        starter = ModelStarter(name, self._folder.path / f"model-{number}", file)

        async def prepare() -> None:
            if share.planned is None:
                await self.memory.add(share)
            starter.flags = share.flags()

        def note_failure(error: OctavoError) -> None:
            self.set.note_failure(model, error)

        timeout = self.config.shutdown_timeout
        backend = ModelServer(starter, pool, timeout, prepare, note_failure)
        model = OneModel(share, backend, adapters)
        return model

    def start(self) -> None:
        """Plan the memory, and begin to load models."""
        self._starting = asyncio.create_task(self._start())
        self._starting.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, OctavoError):
                logger.error("the start failed", exc_info=error)
                error = OctavoError(f"Unexpected: {error!r}")
            self.fail(error)

    async def _start(self) -> None:
        await self.memory.plan()
        for model in self.models:
            if model.share.error is not None:
                self.set.note_failure(model, model.share.error)
        self._planned.set()
        self.set.start()
        while any(model.state == "loading" for model in self.models):
            await asyncio.sleep(_LOOK_SECONDS)
        loaded = [model.names[0] for model in self.models if model.state == "loaded"]
        if not self.usable:
            raise OctavoError("No model can be loaded; see above why.")
        logger.info("ready: %s", ", ".join(loaded))
        notify_ready()

    async def close(self) -> None:
        """End all servers."""
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self.set.close()
        for pool in self.pools:
            await pool.close()
        for model in self.models:
            if model.adapters is not None:
                model.adapters.close()
        self._folder.close()

    @property
    def usable(self) -> bool:
        """True if a model is loaded, or may be."""
        return any(model.state != "failed" for model in self.models)

    @property
    def ready(self) -> bool:
        """True if the first models are loaded, or have failed, and requests would be answered."""
        begun = self._starting is not None and self._starting.done()
        return begun and self.failure is None and self.usable

    @property
    def num_restarts(self) -> int:
        """Number of restarts of the models' servers."""
        return sum(model.backend.num_restarts for model in self.models)

    # Choice of a model

    def look_up(self, name: str) -> OneModel | None:
        """Return the model that has this name, or an adapter of this name; None if no model has."""
        model = self._by_name.get(name)
        if model is None:
            found = (model for model in self.models if model.find_adapter(name) is not None)
            model = next(found, None)
        return model

    def find(self, name: str) -> OneModel:
        """Return the model with a name, or with an adapter of this name.

        Raises:
            NotFoundError: no model has this name.
        """
        model = self.look_up(name)
        if model is None:
            raise NotFoundError(
                f"The model {show(name)} does not exist here; this server has "
                f"{', '.join(self._some_names())}.",
                "model",
            )
        return model

    def _some_names(self) -> list[str]:
        names = list(self._by_name)
        for model in self.models:
            if model.adapters is not None and len(names) < _MOST_NAMED:
                names += model.adapters.names(_MOST_NAMED - len(names))
        return names

    async def find_or_resolve(self, name: str, tenant: str | None) -> OneModel:
        """Return the model with a name; for an unknown one, that whose resolvers know it.

        The resolvers of the models are asked in the order of the models.

        Args:
            name: the name.
            tenant: tenant of the request.

        Raises:
            NotFoundError: no model and no resolver knows it.
            QueueFullError, UnavailableError: see `AdapterSearches.find`.
        """
        if self.look_up(name) is None and any(self._resolvers.values()):
            model = await self._searches.find(name, tenant)
            if model is not None:
                return model
        return self.find(name)

    async def _search(self, name: str) -> OneModel | None:
        for model, resolvers in self._resolvers.items():
            if await ask_resolvers(resolvers, model.names[0], name) is not None:
                return model
        return None

    # Adapters

    def model_for_adapter(self, name: str, model_name: str | None) -> OneModel:
        """Return the model for which an adapter is to be loaded.

        Args:
            name: name of the adapter.
            model_name: name of the model; None: the one that has the adapter, or the only one
                whose adapters may change.

        Raises:
            NotFoundError: there is no such model.
            RequestError: the name is in use, or the model must be named.
            RouteError: its adapters cannot change.
        """
        if name in self._by_name:
            raise RequestError(
                f"lora_name={show(name)} is the name of a model; give another one.", "lora_name"
            )
        changeable = [model for model in self.models if model.lora.can_change]
        loading = (model for it, model in self._being_loaded if it == name)
        owner = self.look_up(name) or next(loading, None)
        if model_name is not None:
            model = self._by_name.get(model_name)
            if model is None:
                raise NotFoundError(
                    f"base_model_name={show(model_name)} does not exist here; this server has "
                    f"{', '.join(self._by_name)}.",
                    "base_model_name",
                )
            if owner is not None and owner is not model:
                raise RequestError(
                    f"lora_name={show(name)} is an adapter of {owner.names[0]}; give another name.",
                    "lora_name",
                )
        elif owner is not None:
            model = owner
        elif len(changeable) > 1:
            raise RequestError(
                "base_model_name is missing: adapters of several models may be loaded, "
                f"{', '.join(model.names[0] for model in changeable)}; name one of them.",
                "base_model_name",
            )
        elif changeable:
            (model,) = changeable
        else:
            raise RouteError(404, NO_CHANGES)
        if model not in changeable:
            raise RouteError(404, f"{model.names[0]}: {NO_CHANGES}")
        return model

    @asynccontextmanager
    async def loading(self, name: str, model: OneModel) -> AsyncIterator[None]:
        """Return a context in which a model's server loads an adapter.

        No other model can load one of this name meanwhile.

        Raises:
            RequestError: see `model_for_adapter`.
        """
        self.model_for_adapter(name, model.names[0])  # another request may have been quicker
        place = name, model
        self._being_loaded.append(place)
        try:
            async with self.set.use(model, None):
                yield
        finally:
            self._being_loaded.remove(place)

    def unload_adapter(self, name: str) -> None:
        """Stop offering an adapter; its unfinished requests continue.

        Raises:
            NotFoundError: there is no such adapter.
            RouteError: the adapters of its model cannot change.
        """
        owner = self.look_up(name)
        if owner is None or owner.adapters is None or name in owner.names:
            raise not_loaded(name)
        if not owner.lora.can_change:
            raise RouteError(404, f"{owner.names[0]}: {NO_CHANGES}")
        if not owner.adapters.remove(name):
            raise not_loaded(name)

    async def default(self, abilities: Sequence[str]) -> OneModel:
        """Return the model for a request that names none: the first one with an ability.

        For vectors and scores, models that do not generate come first: most decoders have vectors,
        too.

        Args:
            abilities: wanted abilities, the best one first; see `PlannedModel.abilities`.

        Raises:
            UnavailableError: the models have not been read in time.
        """
        try:
            async with asyncio.timeout(self.router.failover_timeout):
                await self._planned.wait()
        except TimeoutError:
            raise UnavailableError("The models are still being read; try again later.") from None
        models = sorted(self.models, key=lambda model: model.can("generate"))
        for ability in abilities:
            for model in self.models if ability == "generate" else models:
                if model.can(ability):
                    return model
        return self.models[0]

    def owner_of(self, job: Job) -> OneModel | None:
        """Return the model whose server stores an object that a request names, if it is known."""
        found = {self.stored.find(job.api_key, name) for names in job.objects for name in names}
        owners = (model for model in self.models if not found.isdisjoint(model.pool.upstreams))
        return next(owners, None)


def models_of(request: Request) -> ModelsState:
    """Return the server of several models that received a request."""
    state = request.app.state.octavo
    assert isinstance(state, ModelsState)
    return state
