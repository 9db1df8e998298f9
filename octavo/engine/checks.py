"""Settings that do not go together, or not with this device."""

from __future__ import annotations

import sys

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.kv_connector.registry import get_connector
from octavo.worker.platform import Platform


def check_settings(config: EngineConfig, platform: Platform) -> None:
    """Refuse what the engine cannot do together. Quick: called before anything is loaded.

    Args:
        config: the settings.
        platform: the device that computes.

    Raises:
        ConfigError: naming the settings.
    """
    device = config.device
    platform.check_settings(device)
    is_native = platform.is_native(device)
    speculative = config.speculation.speculative_config
    has_draft = speculative is not None and speculative.model is not None
    if config.model.enable_sleep_mode and not (is_native and sys.platform == "linux"):
        raise ConfigError(
            "enable_sleep_mode works with device=cpu on Linux only, without Triton; leave it out, "
            "and end the process to free its memory."
        )
    if has_draft and not is_native:
        raise ConfigError(
            "speculative_config: draft models run only on device=cpu and without Triton; use "
            "method ngram or suffix."
        )
    if config.model.enable_prompt_embeds and not is_native:
        raise ConfigError(
            "enable_prompt_embeds: embeddings as prompts are supported on device=cpu only, without "
            "Triton; leave it out."
        )
    if config.world_size > 1 and not is_native:
        size = device.tensor_parallel_size
        setting = f"tensor_parallel_size={size}"
        if size == 1:
            setting = f"pipeline_parallel_size={device.pipeline_parallel_size}"
        raise ConfigError(f"{setting} needs device=cpu without Triton; change one of the two.")
    if device.pipeline_parallel_size > 1:
        unsupported = {
            "no draft model or heads (use the methods ngram or suffix)": has_draft,
            "enable_prompt_embeds=false": config.model.enable_prompt_embeds,
        }
        for needed, is_given in unsupported.items():
            if is_given:
                raise ConfigError(
                    f"pipeline_parallel_size={device.pipeline_parallel_size} needs {needed}; "
                    "change one of the two."
                )
    transfer = config.cache.kv_transfer_config
    if transfer is not None:
        get_connector(transfer).host_nbytes(transfer)
        if not config.cache.enable_prefix_caching:
            raise ConfigError(
                "kv_transfer_config needs enable_prefix_caching: blocks are found by the hashes of "
                "the prefix cache; set it to true."
            )


def check_recording(config: EngineConfig, path: str | None) -> None:
    """Refuse a recording where there are several engines.

    Raises:
        ConfigError: naming the settings.
    """
    parallel = config.parallel.of_server()
    size, can_scale = parallel.data_parallel_size, parallel.enable_elastic_ep
    if path is not None and (size > 1 or can_scale):
        which = "enable_elastic_ep" if can_scale else f"data_parallel_size={size}"
        raise ConfigError(
            f"record={path!r} is not supported with {which}: a recording is of one engine; leave "
            "out one of them."
        )
