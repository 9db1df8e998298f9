"""Table of settings that need other settings or a device, and the checks that read it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kv_connector.registry import get_connector
from octavo.models.spec import ModelSpec
from octavo.models.weight_cache import WeightCache
from octavo.worker.platform import Platform

_NATIVE = "`device=cpu`, without `attention_backend=triton`"
_Condition = Callable[[EngineConfig, Platform], bool]


@dataclass(frozen=True)
class Requirement:
    """Setting that needs another one, or a device."""

    setting: str
    """Name of the setting, and its values that have the requirement; Markdown."""
    needs: str
    """Requirement; Markdown."""
    is_broken: _Condition
    error: str
    """Message of the error; a format string with `config` and `platform`."""


def _is_native(config: EngineConfig, platform: Platform) -> bool:
    return platform.is_native(config.device)


def _has_draft(config: EngineConfig) -> bool:
    speculative = config.speculation.speculative_config
    return speculative is not None and speculative.has_weights


REQUIREMENTS = (
    Requirement(
        "`enable_sleep_mode`",
        _NATIVE + ", on Linux",
        lambda config, platform: (
            config.model.enable_sleep_mode
            and not (_is_native(config, platform) and sys.platform == "linux")
        ),
        "enable_sleep_mode works with device=cpu on Linux only, without Triton; leave it out, and "
        "end the process to free its memory.",
    ),
    Requirement(
        "`speculative_config` with a `model`, or with method `mtp`",
        _NATIVE,
        lambda config, platform: _has_draft(config) and not _is_native(config, platform),
        "speculative_config: draft models, heads and MTP layers run only on device=cpu and without "
        "Triton; use method ngram or suffix.",
    ),
    Requirement(
        "`enable_prompt_embeds`",
        _NATIVE,
        lambda config, platform: (
            config.model.enable_prompt_embeds and not _is_native(config, platform)
        ),
        "enable_prompt_embeds: embeddings as prompts are supported on device=cpu only, without "
        "Triton; leave it out.",
    ),
    Requirement(
        "`tensor_parallel_size` > 1",
        _NATIVE,
        lambda config, platform: (
            config.device.tensor_parallel_size > 1 and not _is_native(config, platform)
        ),
        "tensor_parallel_size={config.device.tensor_parallel_size} needs device=cpu without "
        "Triton; change one of the two.",
    ),
    Requirement(
        "`pipeline_parallel_size` > 1",
        _NATIVE,
        lambda config, platform: (
            config.device.pipeline_parallel_size > 1 and not _is_native(config, platform)
        ),
        "pipeline_parallel_size={config.device.pipeline_parallel_size} needs device=cpu without "
        "Triton; change one of the two.",
    ),
    Requirement(
        "`pipeline_parallel_size` > 1",
        "`speculative_config` without a `model`, and not with method `mtp`",
        lambda config, platform: config.device.pipeline_parallel_size > 1 and _has_draft(config),
        "pipeline_parallel_size={config.device.pipeline_parallel_size} needs no draft model, "
        "heads or MTP layer (use the methods ngram or suffix); change one of the two.",
    ),
    Requirement(
        "`pipeline_parallel_size` > 1",
        "`enable_prompt_embeds=false`",
        lambda config, platform: (
            config.device.pipeline_parallel_size > 1 and config.model.enable_prompt_embeds
        ),
        "pipeline_parallel_size={config.device.pipeline_parallel_size} needs "
        "enable_prompt_embeds=false; change one of the two.",
    ),
    Requirement(
        "`expert_cache`",
        _NATIVE,
        lambda config, platform: (
            config.load.expert_cache is not None and not _is_native(config, platform)
        ),
        "expert_cache works on device=cpu only, without Triton; leave it out.",
    ),
    Requirement(
        "`expert_cache`",
        "a `weight_cache` folder",
        lambda config, platform: (
            config.load.expert_cache is not None and WeightCache.from_config(config) is None
        ),
        "expert_cache keeps the experts in the weight_cache folder; set weight_cache to a folder.",
    ),
    Requirement(
        "`expert_cache`",
        "another `load_format` than `dummy`",
        lambda config, platform: (
            config.load.expert_cache is not None and config.load.load_format == "dummy"
        ),
        "expert_cache needs the weights of a checkpoint; leave out one of expert_cache and "
        "load_format=dummy.",
    ),
    Requirement(
        "`expert_cache`",
        "no `kv_transfer_config`",
        lambda config, platform: (
            config.load.expert_cache is not None and config.cache.kv_transfer_config is not None
        ),
        "expert_cache is not supported with kv_transfer_config: keys and values would be saved even"
        " if an expert could not be read; leave out one of the two.",
    ),
    Requirement(
        "`kv_transfer_config`",
        "`enable_prefix_caching`",
        lambda config, platform: (
            config.cache.kv_transfer_config is not None and not config.cache.enable_prefix_caching
        ),
        "kv_transfer_config needs enable_prefix_caching: blocks are found by the hashes of the "
        "prefix cache; set it to true.",
    ),
    Requirement(
        "`data_parallel_size` > 1",
        "`device=cpu`",
        lambda config, platform: config.parallel.data_parallel_size > 1 and not platform.shared,
        "data_parallel_size={config.parallel.data_parallel_size} is not supported on "
        "device={platform.name}, where an engine uses all of the device; start a server for each, "
        "and a load balancer in front.",
    ),
)
"""Requirements of every engine, in the order of the checks."""


def check_settings(config: EngineConfig, platform: Platform) -> None:
    """Reject settings that conflict. The check is quick and precedes all loading.

    Args:
        config: the settings.
        platform: the device that computes.

    Raises:
        ConfigError: settings conflict; the message names them.
    """
    platform.check_settings(config.device)
    check_requirements(config, platform)
    transfer = config.cache.kv_transfer_config
    if transfer is not None:
        get_connector(transfer).host_nbytes(transfer)


def check_requirements(config: EngineConfig, platform: Platform) -> None:
    """Check all rows of the table.

    Raises:
        ConfigError: settings conflict; the message names them.
    """
    for requirement in REQUIREMENTS:
        if requirement.is_broken(config, platform):
            raise ConfigError(requirement.error.format(config=config, platform=platform))


def check_encoders(spec: ModelSpec, config: EngineConfig) -> None:
    """Reject settings with which a model's encoders do not run.

    Raises:
        ConfigError: a setting does not fit; the message names it.
    """
    if not spec.is_encoder_decoder:
        return
    for name, wrong in (
        ("a draft model in speculative_config", _has_draft(config)),
        ("kv_events_config", config.cache.kv_events_config is not None),
        ("enable_lora", config.lora.enable_lora),
        ("enable_prompt_embeds", config.model.enable_prompt_embeds),
    ):
        if wrong:
            kinds = " and ".join(encoder.modality for encoder in spec.encoders)
            raise ConfigError(
                f"The encoder of {spec.architecture} ({kinds}) is not supported with {name}; "
                "change it."
            )


def check_recording(config: EngineConfig, path: str | None) -> None:
    """Reject a recording of several engines.

    Raises:
        ConfigError: settings conflict; the message names them.
    """
    parallel = config.parallel.of_server()
    size, can_scale = parallel.data_parallel_size, parallel.enable_elastic_ep
    if path is not None and (size > 1 or can_scale):
        which = "enable_elastic_ep" if can_scale else f"data_parallel_size={size}"
        raise ConfigError(
            f"record={path!r} is not supported with {which}: a recording is of one engine; leave "
            "out one of them."
        )


def check_offline(config: EngineConfig) -> None:
    """Reject settings of servers for an engine without a server.

    Raises:
        ConfigError: a setting needs a server; the message names it.
    """
    parallel = config.parallel
    parallel.check(headless=False)
    if parallel.enable_elastic_ep:
        raise ConfigError(
            "enable_elastic_ep=True is not supported here: the number of engines is fixed. Start a "
            "server with it, or make an AsyncLLM."
        )
    if parallel.external or parallel.data_parallel_hybrid_lb:
        raise ConfigError(
            "data_parallel_rank, data_parallel_external_lb and data_parallel_hybrid_lb are for "
            "servers behind a load balancer; leave them out."
        )
    if parallel.num_local_engines < parallel.data_parallel_size:
        raise ConfigError(
            f"data_parallel_size_local={parallel.data_parallel_size_local} is not supported here: "
            "all engines are on this machine. Start a server with it, or make an AsyncLLM."
        )
    if parallel.data_parallel_size > 1 and config.observability.profiler_dir is not None:
        raise ConfigError(
            f"profiler_dir={config.observability.profiler_dir!r} is of one engine here; leave out "
            "data_parallel_size."
        )
