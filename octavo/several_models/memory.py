"""Memory plan over several models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from octavo.config import EngineConfig
from octavo.errors import ConfigError, OctavoError
from octavo.plan.memory_plan import MIB, SERVER_NBYTES
from octavo.several_models.config import ServedModel
from octavo.several_models.planning import PlannedModel, PlanRequest, plan_model
from octavo.several_models.shares import Needs, divide, total_of
from octavo.system.device import cpu_memory

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Share:
    """One model in the plan."""

    served: ServedModel
    planned: PlannedModel | None = None
    """What is known without loading it; None: not yet, or it could not be read."""
    cache_nbytes: int = 0
    """Size of its KV cache in the plan."""
    warm_spare: bool = False
    """True if its server keeps a spare process."""
    error: OctavoError | None = field(default=None, repr=False)
    """Why it could not be read."""

    @property
    def needs(self) -> Needs | None:
        """Its memory with the chosen spare process; None: it has no plan."""
        if self.planned is None or self.planned.needs is None:
            return None
        needs = self.planned.needs
        spare = needs.spare if self.warm_spare else 0
        return msgspec.structs.replace(needs, fixed=needs.fixed + spare)

    def flags(self) -> list[str]:
        """Return the words for `octavo serve`; the model has been planned."""
        assert self.planned is not None
        cache, nbytes = self.served.config.cache, None
        is_fixed = cache.kv_cache_memory_bytes or cache.num_gpu_blocks_override
        if self.planned.needs is not None and not is_fixed:
            nbytes = self.cache_nbytes // self.planned.num_engines
        return self.served.flags(nbytes, warm_spare=self.warm_spare)


class ModelMemory:
    """Plan that holds for any models that are loaded at once.

    Args:
        served: the models.
        common: settings of the engine for all models.
        most_loaded: number of models that may be loaded at once.
    """

    def __init__(
        self, served: Sequence[ServedModel], common: EngineConfig, most_loaded: int
    ) -> None:
        self.shares = [Share(model) for model in served]
        self._most_loaded = most_loaded
        self._utilization = common.cache.gpu_memory_utilization
        self._numa_node = common.device.numa_node
        self._limit = 0

    async def plan(self) -> None:
        """Read all models, and divide the memory among those that can be read.

        Raises:
            OctavoError: no model can be read.
            ConfigError: the models do not fit into the memory.
        """
        available = cpu_memory(self._numa_node)[1]
        self._limit = int(available * self._utilization) - SERVER_NBYTES
        await asyncio.gather(*map(self._try_to_read, self.shares))
        if all(share.error for share in self.shares):
            assert self.shares[0].error is not None
            raise self.shares[0].error
        self._choose_spares()
        planned = self._planned()
        needs = [found for share in planned if (found := share.needs) is not None]
        for share, nbytes in zip(
            planned, divide(needs, self._limit, self._most_loaded), strict=True
        ):
            share.cache_nbytes = nbytes
        self._log()

    async def add(self, share: Share) -> None:
        """Plan a model that could not be read before, with the memory that the others leave.

        Raises:
            OctavoError: it cannot be read.
            ConfigError: the memory does not suffice.
        """
        await self._read(share)
        planned = self._planned()
        needs = [
            msgspec.structs.replace(found, least=s.cache_nbytes, wish=s.cache_nbytes)
            if s is not share
            else found
            for s in planned
            if (found := s.needs) is not None
        ]
        try:
            caches = divide(needs, self._limit, self._most_loaded)
        except ConfigError:
            share.planned = None
            raise
        if share in planned:
            share.cache_nbytes = caches[planned.index(share)]

    def _planned(self) -> list[Share]:
        return [share for share in self.shares if share.needs is not None]

    async def _try_to_read(self, share: Share) -> None:
        try:
            await self._read(share)
        except OctavoError as error:
            share.error = error

    async def _read(self, share: Share) -> None:
        served = share.served
        request = PlanRequest(served.names[0], served.engine, self._limit, served.request_memory)
        planned = await plan_model(request)
        if planned.needs is None and served.config.cache.kv_cache_memory_bytes is None:
            raise ConfigError(
                f"{served.path} runs on device={planned.device}, which measures its memory only "
                "after loading; with several models, give kv_cache_memory_bytes for it."
            )
        share.planned, share.error = planned, None

    def _choose_spares(self) -> None:
        """Keep spare processes if no setting forbids them, and no KV cache becomes smaller."""
        free = [share for share in self._planned() if "warm_spare" not in share.served.server]
        for share in self.shares:
            share.warm_spare = share in free or share.served.server.get("warm_spare") is True
        needs = [found for share in self.shares if (found := share.needs) is not None]
        wishes = [max(n.wish, n.least) for n in needs]
        if total_of(needs, wishes, self._most_loaded) > self._limit:
            for share in free:
                share.warm_spare = False

    def _log(self) -> None:
        planned = self._planned()
        needs = [found for share in planned if (found := share.needs) is not None]
        total = total_of(needs, [share.cache_nbytes for share in planned], self._most_loaded)
        most, count = self._most_loaded, len(self.shares)
        which = f"all {count} models" if most == count else f"any {most} of {count} models"
        logger.info(
            "memory plan for %s: %s MiB of %s MiB",
            which,
            f"{(total + SERVER_NBYTES) / MIB:,.0f}",
            f"{(self._limit + SERVER_NBYTES) / MIB:,.0f}",
        )
        logger.info("  %-24s %10.1f MiB", "front", SERVER_NBYTES / MIB)
        for share, found in zip(planned, needs, strict=True):
            assert share.planned is not None
            items = {"KV cache": share.cache_nbytes, **share.planned.items}
            if share.warm_spare:
                items["warm spare"] = share.planned.needs.spare if share.planned.needs else 0
            largest = sorted(items.items(), key=lambda item: item[1], reverse=True)
            logger.info(
                "  %-24s %10.1f MiB: %s",
                found.name,
                (found.fixed + share.cache_nbytes) / MIB,
                ", ".join(f"{name} {nbytes / MIB:,.1f}" for name, nbytes in largest if nbytes),
            )
