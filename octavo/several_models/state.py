"""State shared by all requests of a server of several models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from starlette.requests import Request

from octavo.config import EngineConfig, ServerConfig
from octavo.errors import NotFoundError, OctavoError
from octavo.router.config import RouterConfig
from octavo.router.job import Job
from octavo.router.pool import Pool
from octavo.router.proxy_state import ProxyState
from octavo.server.errors import UnavailableError, show
from octavo.several_models.config import ServedModel, SeveralModelsConfig
from octavo.several_models.memory import ModelMemory, Share
from octavo.several_models.model_set import Model, ModelSet, State
from octavo.several_models.server import ModelServer, ModelStarter
from octavo.system import clock
from octavo.system.notify import notify_ready
from octavo.system.socket_folder import SocketFolder

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05


class OneModel(Model):
    """One of the models: its memory, its server, and the pool that has the server.

    Args:
        share: its settings, and its part of the memory plan.
        backend: its server.
    """

    backend: ModelServer

    def __init__(self, share: Share, backend: ModelServer) -> None:
        super().__init__(share.served.names, backend)
        self.share = share
        self.pool = backend.pool

    @property
    def shown_state(self) -> State:
        """State for clients: a server that is started again is loading."""
        if self.state == "loaded" and not any(upstream.ready for upstream in self.pool.upstreams):
            return "loading"
        return self.state

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
        for model in self.models:
            self._by_name |= {it.name: model for it in model.share.served.adapters}
        self._planned = asyncio.Event()
        self._starting: asyncio.Task[None] | None = None

    def _make_model(self, number: int, share: Share, pool: Pool) -> OneModel:
        starter = ModelStarter(share.served.names[0], self._folder.path / f"model-{number}")

        async def prepare() -> None:
            if share.planned is None:
                await self.memory.add(share)
            starter.flags = share.flags()

        def note_failure(error: OctavoError) -> None:
            self.set.note_failure(model, error)

        timeout = self.config.shutdown_timeout
        model = OneModel(share, ModelServer(starter, pool, timeout, prepare, note_failure))
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

    @property
    def names(self) -> list[str]:
        """Names of all models and of their adapters."""
        return list(self._by_name)

    def find(self, name: str) -> OneModel:
        """Return the model with a name.

        Raises:
            NotFoundError: no model has it.
        """
        model = self._by_name.get(name)
        if model is None:
            raise NotFoundError(
                f"The model {show(name)} does not exist here; this server has "
                f"{', '.join(self.names)}.",
                "model",
            )
        return model

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
