"""Octavo's settings: small frozen sections that make up one `EngineConfig`.

Every field holds its default, its description and its check; command-line flags and the keyword
arguments of `LLM` are generated from the fields. Names and defaults are vLLM's if vLLM has the
setting. `environment.py` reads the environment variables of settings; those of other
programs (Ray, Triton) are read where they matter.
"""

from __future__ import annotations

from octavo.config.cache import CacheConfig, KVEventsConfig, KVTransferConfig
from octavo.config.device import DeviceConfig, EplbConfig
from octavo.config.engine import EngineConfig, build_sections, config_fields, section_doc
from octavo.config.environment import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLES,
    ENVIRONMENT,
    SERVER_API_KEY_VARIABLE,
    admin_keys_from_environment,
    api_keys_from_environment,
    cache_folder,
    environment_without_keys,
    hub_offline,
    notify_socket,
    server_api_key_from_environment,
    settings_from_environment,
    traces_from_environment,
    unknown_variables,
)
from octavo.config.lora import BUILTIN_ADAPTERS, LoRAConfig, LoRAModule
from octavo.config.model import (
    BUILTIN_DRAFT_MODEL,
    BUILTIN_EAGLE_HEAD,
    BUILTIN_ENCODER,
    BUILTIN_EYES,
    BUILTIN_MEDUSA_HEADS,
    BUILTIN_MODEL,
    BUILTIN_RERANKER,
    BUILTIN_SPEECH,
    LoadConfig,
    ModelConfig,
    read_hub_address,
)
from octavo.config.observability import ObservabilityConfig
from octavo.config.parallel import ParallelConfig
from octavo.config.pooler import PoolerConfig
from octavo.config.scheduler import SchedulerConfig
from octavo.config.section import (
    HIDDEN,
    ConfigField,
    Section,
    build_section,
    is_size,
    optional_type,
    parse_size,
    section_fields,
)
from octavo.config.server import ServerConfig
from octavo.config.speculation import SpeculationConfig, SpeculativeConfig

__all__ = [
    "ADMIN_KEY_VARIABLE",
    "API_KEY_VARIABLES",
    "BUILTIN_ADAPTERS",
    "BUILTIN_DRAFT_MODEL",
    "BUILTIN_EAGLE_HEAD",
    "BUILTIN_ENCODER",
    "BUILTIN_EYES",
    "BUILTIN_MEDUSA_HEADS",
    "BUILTIN_MODEL",
    "BUILTIN_RERANKER",
    "BUILTIN_SPEECH",
    "CacheConfig",
    "ConfigField",
    "DeviceConfig",
    "ENVIRONMENT",
    "EngineConfig",
    "EplbConfig",
    "HIDDEN",
    "KVEventsConfig",
    "KVTransferConfig",
    "LoRAConfig",
    "LoRAModule",
    "LoadConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "PoolerConfig",
    "SERVER_API_KEY_VARIABLE",
    "SchedulerConfig",
    "Section",
    "ServerConfig",
    "SpeculationConfig",
    "SpeculativeConfig",
    "admin_keys_from_environment",
    "api_keys_from_environment",
    "build_section",
    "build_sections",
    "cache_folder",
    "config_fields",
    "environment_without_keys",
    "hub_offline",
    "notify_socket",
    "optional_type",
    "is_size",
    "parse_size",
    "read_hub_address",
    "section_doc",
    "section_fields",
    "server_api_key_from_environment",
    "settings_from_environment",
    "traces_from_environment",
    "unknown_variables",
]
