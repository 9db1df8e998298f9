"""Process that plans the memory of one model.

Argument: the front's process id. Standard input has a `PlanRequest`, standard output a
`PlanResult`.
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from octavo.engine.assemble import plan_memory, set_up_worker
from octavo.errors import ConfigError, OctavoError
from octavo.model_tools.opened import OpenedModel
from octavo.plan.memory_plan import SPARE_NBYTES, MemoryPlan
from octavo.platforms.registry import get_platform
from octavo.server.abilities import answers_texts, input_modalities
from octavo.server.description import describe_model
from octavo.several_models.planning import PlannedModel, PlanRequest, PlanResult
from octavo.several_models.shares import Needs
from octavo.speech.model import hears
from octavo.system.device import signal_at_parents_end


def main() -> None:
    """Read a request, and write the result."""
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # the front has ended already
        return
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=PlanRequest)
    try:
        result = PlanResult(plan(request))
    except OctavoError as error:
        result = PlanResult(error=str(error), is_setting=isinstance(error, ConfigError))
    sys.stdout.buffer.write(msgspec.json.encode(result))


def plan(request: PlanRequest) -> PlannedModel:
    """Plan the memory of a model.

    Raises:
        ConfigError, ModelError, HubError: settings or model are unusable, or the model does not fit
            even if it is alone.
    """
    model = OpenedModel.of(request.settings, with_weights=False)
    config, spec = model.config, model.spec
    platform = get_platform(config.device.device)
    setup = set_up_worker(config, spec, model.path, platform, platform.server_batched_tokens)
    estimate = platform.estimate_memory(setup)
    engines = config.parallel.num_local_engines
    needs, items, max_model_len = None, {}, setup.max_model_len
    if estimate is not None:
        found, _ = plan_memory(
            setup,
            estimate,
            request_memory=request.request_memory,
            limit=request.limit // engines,
        )
        max_model_len = found.max_model_len
        cache = _cache_nbytes(found)
        needs = Needs(
            request.name,
            engines * (found.total - cache),
            engines * _least_cache(found, model),
            engines * cache,
            SPARE_NBYTES * (1 + config.num_spare_workers),
        )
        kept = (item for item in found.items if item.name not in ("KV cache", "states"))
        items = {item.name: engines * item.nbytes for item in kept}
    described = describe_model(config, spec)
    return PlannedModel(
        needs=needs,
        device=platform.name,
        num_engines=engines,
        items=items,
        max_model_len=max_model_len,
        abilities=[
            *(["generate"] if answers_texts(spec) else []),
            *(["transcribe"] if hears(spec) else []),
            *(pooler.task for pooler in spec.poolers),
        ],
        input_modalities=input_modalities(spec, config.model),
        details=dict(described.details),
        nbytes=described.nbytes,
    )


def _cache_nbytes(plan: MemoryPlan) -> int:
    return plan.kv_cache + plan.nbytes("states")


def _least_cache(plan: MemoryPlan, model: OpenedModel) -> int:
    """Return the bytes of the KV cache with which the plan has the same context.

    If the settings fix the size, it is that size; with max_model_len=-1 the context may shrink.
    """
    cache = model.config.cache
    if cache.kv_cache_memory_bytes is not None or cache.num_gpu_blocks_override is not None:
        return _cache_nbytes(plan)
    per_request = 2 * plan.states_per_request * plan.state_nbytes
    if model.config.model.max_model_len == -1:
        return per_request
    blocks = (plan.blocks_per_request + 1) * plan.block_nbytes
    # States get half of the cache if they can use it.
    return max(per_request, blocks + min(blocks, plan.nbytes("states")))


if __name__ == "__main__":
    main()
