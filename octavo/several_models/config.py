"""Settings of a server of several models, and the settings of each of its models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from octavo.compat.settings import translate
from octavo.config import (
    EngineConfig,
    LoRAModule,
    Section,
    ServerConfig,
    build_section,
    config_fields,
    section_fields,
)
from octavo.config.arguments import setting_flags
from octavo.config.section import PositiveInt
from octavo.errors import ConfigError
from octavo.router.config import PASSED_ON, REFUSED, SHARED
from octavo.system.device import num_cpus

_ALIASES = {"path": "model", "name": "served_model_name"}
_FOR_ALL = {
    "gpu_memory_utilization": "it limits all models together",
    "numa_node": "the memory of all models is planned together",
}
"""Settings that one model cannot have for itself, with the reason."""
_REFUSED = {
    "record": "each server would write the same file; record at a server of one model",
    "record_prompts": "it belongs to record",
    "record_max_bytes": "it belongs to record",
    "headless": "a node serves one model",
    "state_dir": "only one server uses a folder",
    "resume_grace": "a stream cannot be resumed at a server of several models",
    "data_parallel_rank": "each model has a server of its own",
}
# The front limits the requests of all models, and a model may have all of them.
_PASSED_ON = PASSED_ON | {"max_num_queued_reqs"}
_SERVER = {field.name for field in section_fields(ServerConfig)} - SHARED - REFUSED.keys()
_SERVER |= _PASSED_ON
_ENGINE = {field.name for field in config_fields(EngineConfig)}


class SeveralModelsConfig(Section, frozen=True):
    """Loading of several models of one server."""

    max_loaded_models: Annotated[
        PositiveInt | None,
        Meta(
            description="Maximum number of models in memory at once; a request for another model"
            " loads it, and the least recently used idle model is unloaded. Default: all models."
        ),
    ] = None
    model_load_timeout: Annotated[
        float,
        Meta(
            description="Maximum seconds for which a request waits until its model is loaded.", gt=0
        ),
    ] = 300.0


@dataclass(frozen=True)
class ServedModel:
    """One of several models, with all its settings."""

    names: list[str]
    """Names in requests; the first one is shown."""
    engine: dict[str, Any]
    """Settings of its engine that were given."""
    server: dict[str, Any]
    """Settings of its server that were given."""
    config: EngineConfig
    """All settings of its engine."""

    @property
    def adapters(self) -> list[LoRAModule]:
        """Its adapters, whose names choose it, too."""
        return self.config.lora.modules

    @property
    def path(self) -> str:
        """Its folder or hub id."""
        return self.config.model.model

    @property
    def request_memory(self) -> int:
        """Bytes for the requests of its server."""
        return build_section(ServerConfig, dict(self.server)).request_memory_bytes

    def flags(self, cache_nbytes: int | None, *, warm_spare: bool) -> list[str]:
        """Return the words for `octavo serve`.

        Args:
            cache_nbytes: size of its KV cache; None: as the settings say.
            warm_spare: True to keep a spare process.
        """
        values = {**self.engine, **self.server, "served_model_name": self.names}
        if cache_nbytes is not None:
            values["kv_cache_memory_bytes"] = cache_nbytes
        fields = [*config_fields(EngineConfig), *section_fields(ServerConfig)]
        # Only the front reaches it, which checks the permission.
        values |= {"warm_spare": warm_spare, "enable_admin": self.config.lora.can_change}
        return setting_flags(values, fields)


def read_models(given: Sequence[str]) -> list[dict[str, Any]]:
    """Return the settings of each model that the command line names.

    Args:
        given: values of --model: paths or hub ids, JSON objects of settings, or JSON lists of both.

    Raises:
        ConfigError: a value is malformed.
    """
    found: list[dict[str, Any]] = []
    for text in given:
        if not text.startswith(("{", "[")):
            found.append({"model": text})
            continue
        try:
            value = msgspec.json.decode(text)
        except msgspec.MsgspecError as error:
            raise ConfigError(
                f"model={text!r} is not valid JSON ({error}); check the shell's quotes."
            ) from None
        for item in value if isinstance(value, list) else [value]:
            found.append({"model": item} if isinstance(item, str) else _read_object(item))
    return found


def _read_object(item: object) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ConfigError(f"model={item!r} is not a path or a JSON object of settings.")
    settings: dict[str, Any] = {}
    for key, value in item.items():
        name = key.replace("-", "_")
        name = _ALIASES.get(name, name)
        if name in settings:
            raise ConfigError(f"model={item!r} has {key} twice; give it once.")
        if name == "served_model_name" and isinstance(value, str):
            value = [value]
        settings[name] = value
    if not isinstance(settings.get("model"), str) or not settings["model"]:
        raise ConfigError(
            f'model={item!r} has no path; write {{"path": "folder or hub id", "name": ...}}.'
        )
    return settings


def served_models(
    models: Sequence[Mapping[str, Any]],
    engine: Mapping[str, Any],
    server: Mapping[str, Any],
    environment: Mapping[str, Any],
    most_loaded: int,
) -> list[ServedModel]:
    """Return the models with all their settings; a model's own ones override those for all.

    Models share the cores equally, if no setting gives the threads.

    Args:
        models: settings of each model; see `read_models`.
        engine: settings of the engine for all models.
        server: settings of the server that were given.
        environment: settings of the engine from environment variables.
        most_loaded: number of models that may be loaded at once.

    Raises:
        ConfigError: a setting is unknown, wrong or not supported, or two models have the same name.
    """
    for name in _REFUSED.keys() & {*server, *engine}:
        raise ConfigError(f"{name} cannot be given with several models: {_REFUSED[name]}.")
    if engine.get("served_model_name"):
        raise ConfigError(
            "served_model_name would name all models alike; name each: "
            '--model \'{"path": ..., "name": ...}\'.'
        )
    common = {name: value for name, value in server.items() if name in _SERVER}
    request_memory = build_section(ServerConfig, dict(common)).request_memory_bytes
    common["request_memory_bytes"] = max(2**20, request_memory // most_loaded)
    found = [_served_model(own, engine, common, environment, most_loaded) for own in models]
    names: dict[str, ServedModel] = {}
    for model in found:
        for name in (*model.names, *(adapter.name for adapter in model.adapters)):
            if name in names:
                raise ConfigError(
                    f"Two models have the name {name!r}: {names[name].path} and "
                    f"{model.path}; give one another name: "
                    f'--model \'{{"path": ..., "name": ..., "lora_modules": [...]}}\'.'
                )
            names[name] = model
    return found


def model_settings(own: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of one model for its engine, and those for its server.

    Raises:
        ConfigError: a setting is not supported.
    """
    server = {name: value for name, value in own.items() if name in _SERVER}
    return translate({k: v for k, v in own.items() if k not in server}), server


def _served_model(
    own: Mapping[str, Any],
    engine: Mapping[str, Any],
    server: Mapping[str, Any],
    environment: Mapping[str, Any],
    most_loaded: int,
) -> ServedModel:
    path = own["model"]
    own_engine, own_server = model_settings(own)
    for name in own_engine:
        if name in _FOR_ALL:
            raise ConfigError(f"{name} cannot be a setting of one model: {_FOR_ALL[name]}.")
        if name in _REFUSED:
            raise ConfigError(f"{name} cannot be given with several models: {_REFUSED[name]}.")
        if name not in _ENGINE and name in SHARED:
            raise ConfigError(f"{name} cannot be a setting of one model; give it as a flag.")
    values = {**{k: v for k, v in environment.items() if k in _ENGINE}, **engine, **own_engine}
    try:
        config = EngineConfig.from_kwargs(**values)
        build_section(ServerConfig, dict(own_server))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    events = config.cache.kv_events_config
    if events is not None and events.enable_kv_cache_events and "kv_events_config" in engine:
        raise ConfigError(
            "kv_events_config names one address, and each model needs its own; give it in --model."
        )
    names = config.model.served_model_name or [path]
    if not all(names):
        raise ConfigError(f"{path} has an empty name; give another one.")
    settings = {**engine, **own_engine}
    if config.device.num_threads is None:
        processes = config.parallel.data_parallel_size * config.world_size
        settings["num_threads"] = max(1, num_cpus() // (most_loaded * processes))
    return ServedModel(list(dict.fromkeys(names)), settings, {**server, **own_server}, config)
