"""Setup of an engine's workers: the settings, completed by the model and the draft model."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import msgspec

from octavo.checkpoints.identity import model_hash
from octavo.config import EngineConfig, LoRAConfig, SpeculationConfig
from octavo.errors import ConfigError
from octavo.kv_cache.groups import find_full_attention, make_kv_cache_groups
from octavo.kv_connector.registry import get_connector
from octavo.models.drafts import find_draft
from octavo.models.open_model import find_merged, open_model
from octavo.models.spec import ModelSpec
from octavo.plan.memory_plan import (
    resolve_dtype,
    resolve_max_model_len,
    resolve_max_num_batched_tokens,
)
from octavo.plan.setup import WorkerSetup
from octavo.system.device import num_cpus
from octavo.system.distributed import Rank

logger = logging.getLogger(__name__)


def make_worker_setup(
    config: EngineConfig,
    spec: ModelSpec,
    model_path: Path,
    default_batched_tokens: int,
    engine_index: int,
) -> WorkerSetup:
    """Return the setup of the first worker, with draft model and KV connector.

    Args:
        config: the settings.
        spec: the model.
        model_path: folder of the model.
        default_batched_tokens: token budget of a step unless the config sets one.
        engine_index: see `EngineCoreOutputs`.

    Raises:
        ConfigError: settings do not fit the model.
        ModelError: the model folder cannot be used.
    """
    if config.model.enable_prompt_embeds and spec.embed.layer_inputs is not None:
        raise ConfigError(
            f"enable_prompt_embeds is not supported with {spec.architecture}, whose layers also "
            "read embeddings of the token ids; leave it out, and give prompts as text or token ids."
        )
    setup = WorkerSetup(
        config=config,
        spec=spec,
        model_path=model_path,
        dtype=resolve_dtype(config, spec),
        max_model_len=resolve_max_model_len(config, spec),
        max_num_batched_tokens=resolve_max_num_batched_tokens(config, default_batched_tokens, spec),
        rank=Rank.of(0, config.device),
    )
    if (adapter := find_merged(config)) is not None:
        from octavo.models.merge import check_merge

        check_merge(adapter, spec, open_model(config, model_path), setup.dtype)
    if config.lora.lora_target_modules:
        from octavo.models.adaptable_model import check_targets

        check_targets(spec, config.lora)
    _ = setup.expert_slots  # rejects an expert_cache that does not fit the model
    if config.divides_experts:
        _check_divided_experts(setup)
        size = config.parallel.data_parallel_size
        rank = Rank(engine_index, size, redundant_experts=config.device.redundant_experts)
        setup = replace(setup, engine=rank)
    if config.device.enable_eplb:
        _check_balanced_experts(setup)
    setup = _with_draft(setup)
    if config.cache.kv_transfer_config is not None:
        setup = _with_connector(setup, engine_index)
    if setup.rank.world_size > 1:
        _check_parallel(setup)
    return setup


def _check_divided_experts(setup: WorkerSetup) -> None:
    """Check the model and the settings of engines that divide the experts.

    Raises:
        ConfigError: a setting does not fit.
    """
    config = setup.config
    which = f"enable_expert_parallel with data_parallel_size={config.parallel.data_parallel_size}"
    for name, value in (
        ("kv_transfer_config", config.cache.kv_transfer_config is not None),
        ("enable_sleep_mode", config.model.enable_sleep_mode),
    ):
        if value:
            raise ConfigError(
                f"{which} is not supported with {name}: the engines step together; leave out one "
                "of the two."
            )


def _check_balanced_experts(setup: WorkerSetup) -> None:
    """Check that experts and copies can be divided evenly among processes.

    Raises:
        ConfigError: they cannot, or the model has no experts.
    """
    found = (weight.expert for weight in setup.spec.weights())
    counts = sorted({expert.count for expert in found if expert is not None})
    if not counts:
        raise ConfigError(
            f"enable_eplb balances the loads of experts, and {setup.spec.architecture} has none; "
            "leave it out."
        )
    ranks = max(setup.rank.size, setup.expert_rank.size)
    redundant = setup.config.device.redundant_experts

    def fits(number: int) -> bool:
        return all((n + number) % ranks == 0 and number <= n * (ranks - 1) for n in counts)

    if fits(redundant):
        return
    most = counts[0] * (ranks - 1)
    below = next((n for n in range(min(redundant, most), -1, -1) if fits(n)), None)
    above = next((n for n in range(redundant, most + 1) if fits(n)), None)
    sizes = " or ".join(str(n) for n in (below, above) if n is not None)
    fix = f"set it to {sizes}" if sizes else "change the number of processes"
    experts = " and ".join(map(str, counts))
    raise ConfigError(
        f"eplb_config: with num_redundant_experts={redundant}, the {experts} experts of a layer "
        f"and their copies cannot be divided evenly among {ranks} processes, each with different "
        f"experts; {fix}, or leave out enable_eplb."
    )


def _with_draft(setup: WorkerSetup) -> WorkerSetup:
    """Return the setup with its draft model, if any, and the method of this model."""
    config = setup.config
    found = find_draft(config, setup.spec, setup.model_path)
    if found is None:
        return setup
    if found.spec.caches and find_full_attention(make_kv_cache_groups(setup.spec.caches)) is None:
        raise ConfigError(
            f"speculative_config: all layers of {config.model.model} see only near tokens "
            "(sliding windows or chunks), and a draft model needs one layer that sees all; use "
            "method ngram or suffix."
        )
    from octavo.models.heads import EagleSpec

    speculative = config.speculation.speculative_config
    assert speculative is not None
    speculative = msgspec.structs.replace(
        speculative,
        method=found.method,
        num_speculative_tokens=speculative.num_speculative_tokens or found.num_heads,
    )
    draft = WorkerSetup(
        config=msgspec.structs.replace(
            config,
            speculation=SpeculationConfig(),
            model=msgspec.structs.replace(config.model, enable_prompt_embeds=False),
            lora=_lora_of_draft(config.lora) if found.method == "draft_model" else LoRAConfig(),
        ),
        spec=found.spec,
        model_path=found.path,
        dtype=setup.dtype,
        max_model_len=min(setup.max_model_len, found.spec.max_model_len),
        max_num_batched_tokens=setup.max_num_batched_tokens,
    )
    speculation = SpeculationConfig(speculative_config=speculative)
    return replace(
        setup,
        config=msgspec.structs.replace(config, speculation=speculation),
        kept_layers=found.spec.kept_layers if isinstance(found.spec, EagleSpec) else (),
        draft=draft,
    )


def _lora_of_draft(lora: LoRAConfig) -> LoRAConfig:
    """Return the settings of a draft model's adapters, which may change all of its modules."""
    return msgspec.structs.replace(lora, lora_target_modules=[], lora_merge=None)


def _with_connector(setup: WorkerSetup, engine_index: int) -> WorkerSetup:
    """Return the setup with the identity of model and engine for the KV connector.

    Raises:
        ConfigError: the connector does not support the model.
    """
    config, model = setup.config, setup.config.model
    transfer = config.cache.kv_transfer_config
    assert transfer is not None
    if setup.has_states or setup.spec.is_encoder_decoder:
        get_connector(transfer).check_states(transfer)
    if transfer.engine_id is None:
        number = str(config.parallel.first_engine + engine_index)
        transfer = msgspec.structs.replace(transfer, engine_id=number)
    cache = msgspec.structs.replace(config.cache, kv_transfer_config=transfer)
    load_format = config.load.load_format
    seed = model.seed if load_format == "dummy" else None
    found = model_hash(open_model(config, setup.model_path), setup.model_path)
    overrides = msgspec.json.encode(model.hf_overrides, order="sorted").decode()
    numbers = "dequantized" if model.dequantize else model.quantization
    identity = (found, setup.dtype, numbers, load_format, seed, setup.max_model_len)
    return replace(
        setup,
        config=msgspec.structs.replace(config, cache=cache),
        model_identity=" ".join(map(str, [*identity, overrides])),
    )


def _check_parallel(setup: WorkerSetup) -> None:
    """Check the settings of several ranks, and warn if they exceed the cores.

    Raises:
        ConfigError: a setting does not fit; the message names it.
    """
    config, rank = setup.config, setup.rank
    if rank.splits_rows and setup.kept_layers:
        raise ConfigError(
            "enable_sequence_parallel is not supported with a drafter that reads several layers "
            "of the model (EAGLE-3); leave one of the two out."
        )
    cores, threads = num_cpus(), config.device.num_threads or 1
    if config.parallel.data_parallel_size == 1 and rank.world_size * threads > cores:
        logger.warning(
            "%d processes with %d threads each are more than the %d cores there are for them: they "
            "wait for each other%s",
            rank.world_size,
            threads,
            cores,
            " at every layer, and a step takes many times as long" if rank.size > 1 else "",
        )
