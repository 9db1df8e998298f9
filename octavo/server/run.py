"""`octavo serve`: checks of its settings, and the order of its start."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path

import uvloop

from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig, ServerConfig
from octavo.engine.checks import check_recording, check_settings
from octavo.errors import ConfigError
from octavo.fleet.process import CoreProcess
from octavo.fleet.start import EngineProcesses, start_loading
from octavo.frontend.past import WhatIf
from octavo.models.hub import resolve_model
from octavo.models.open_model import find_merged
from octavo.models.registry import read_spec
from octavo.models.spec import divide_layers
from octavo.observability.recording import RecordSettings
from octavo.parsers.formats import REASONING_PARSERS, TOOL_CALL_PARSERS
from octavo.plan.memory_plan import resolve_dtype, resolve_max_model_len
from octavo.plan.setup import resolve_kv_cache_dtype
from octavo.platforms.registry import get_platform
from octavo.server.auth import AllowedHosts, with_all_keys
from octavo.server.listen import (
    address_of,
    allow_files,
    bind,
    bind_unix,
    is_any_address,
    tls_context,
)
from octavo.server.lora_resolvers import make_resolvers
from octavo.system.device import SWITCH_INTERVAL
from octavo.system.distributed import Rank
from octavo.system.garbage import modules_stay
from octavo.system.logs import setup_logging
from octavo.text.chat_template import RESERVED_VARIABLES, read_override

logger = logging.getLogger(__name__)


def run_server(
    config: ServerConfig,
    engine_config: EngineConfig,
    process: CoreProcess | None,
    what_if: WhatIf | None = None,
) -> int:
    """Serve until a signal ends it; return the exit status.

    Args:
        config: settings of the server.
        engine_config: settings of the engine.
        process: first process of the engine, not started yet; None with several front ends.
        what_if: simulates other settings; None: explanations have no such estimates.

    Raises:
        OctavoError: the address cannot be used, or the engine failed (with the root cause).
    """
    setup_logging(config.log_level, config.log_format)
    config, sources = with_all_keys(config)
    prepare_process()
    tls_context(config)  # reject a bad certificate at once
    if config.api_server_count > 1:
        from octavo.server.api_servers import check_api_servers

        check_api_servers(config, engine_config)
    if reserved := RESERVED_VARIABLES & config.default_chat_template_kwargs.keys():
        raise ConfigError(
            f"default_chat_template_kwargs has {min(reserved)!r}, which the server itself sets; "
            "leave it out."
        )
    _check_parsers(config)
    _check_model(config, engine_config)
    allow_files()
    if sources:
        logger.info("requests need an API key", extra={"keys_from": ", ".join(sources)})
    elif config.uds is None and is_any_address(config.host):
        logger.warning(
            "anyone who can reach this machine can use the server; --host 127.0.0.1 restricts it "
            "to this machine, --api-key requires a key"
        )
    log_host_check(config)
    with (
        bind(config.host, config.port) if config.uds is None else bind_unix(config.uds) as listener
    ):
        name = engine_config.model.served_model_name or [engine_config.model.model]
        logger.info("loading %s, listening on %s", name[0], address_of(config, listener))
        try:
            if config.api_server_count > 1:
                from octavo.server.api_servers import serve_by_api_servers

                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    return runner.run(serve_by_api_servers(config, engine_config, listener))
            processes = engine_processes(config, process)
            if not config.middleware:  # else find errors of the operator's middleware first
                start_loading(engine_config, processes)

            # Import the web framework while the engine loads the model.
            with modules_stay():
                from octavo.server.serve import serve_engine

            return serve_engine(config, engine_config, processes, listener, what_if)
        finally:
            if config.uds is not None:
                Path(config.uds).unlink(missing_ok=True)


def prepare_process() -> None:
    """Prepare a process that serves HTTP."""
    # Threads do the work that would block the event loop, which must not wait long for its turn.
    sys.setswitchinterval(SWITCH_INTERVAL)
    # Those threads tokenize; the library's threads would use the model's cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # The search for plug-ins of pydantic reads a file of each installed package.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def engine_processes(config: ServerConfig, process: CoreProcess | None = None) -> EngineProcesses:
    """Return the settings of a server's engine processes; the first one is `process`, if given."""
    record = None
    if config.record is not None:
        record = RecordSettings(config.record, config.record_prompts, config.record_max_bytes)
    return EngineProcesses(
        progress_timeout=config.progress_timeout,
        max_engine_restarts=config.max_engine_restarts,
        warm_spare=config.warm_spare,
        process=process,
        request_memory=config.request_memory_bytes,
        log_level=config.log_level,
        log_format=config.log_format,
        record=record,
        reports_steps=config.reports_steps,
    )


def log_host_check(config: ServerConfig) -> None:
    """Log if requests to all names are answered."""
    if config.uds is None and AllowedHosts(config).all_names:
        logger.info(
            "the Host header is not checked: a web page that has its own name point at this "
            "machine could reach the server through a visitor's browser; --allowed-hosts NAME "
            "answers to that name only"
        )


def _check_parsers(config: ServerConfig) -> None:
    """Check the names of parsers.

    Raises:
        ConfigError: there is no parser of that name.
    """
    known = {"tool_call_parser": [*TOOL_CALL_PARSERS], "reasoning_parser": [*REASONING_PARSERS]}
    for setting, parsers in known.items():
        name = getattr(config, setting)
        if name is not None and name not in parsers:
            raise ConfigError(
                f"{setting}={name!r} is unknown; use one of {', '.join(sorted(parsers))}, or leave "
                "it out to use the format that the chat template shows."
            )


def _check_model(config: ServerConfig, engine_config: EngineConfig) -> None:
    """Check settings, model and machine before the server announces itself.

    For a model on the hub only the description is fetched; its weights are fetched while the server
    listens.

    Raises:
        ConfigError, ModelError, HubError: template or model are missing, the model is not
            supported or shorter than max_model_len, or the machine lacks the device or cores.
    """
    device = engine_config.device
    engine_config.parallel.check(headless=False)
    check_settings(engine_config, get_platform(device.device))
    check_recording(engine_config, config.record)
    make_resolvers(engine_config.lora)
    if config.chat_template is not None:
        read_override(config.chat_template)
    name, load = engine_config.model, engine_config.load
    folder = resolve_model(
        name.model,
        revision=name.revision,
        download_dir=load.download_dir,
        load_format="dummy",
    )
    checkpoint = open_checkpoint(folder, load.load_format, mmproj=load.mmproj)
    spec = read_spec(checkpoint, name)
    resolve_kv_cache_dtype(engine_config, resolve_dtype(engine_config, spec))
    resolve_max_model_len(engine_config, spec)
    if (adapter := find_merged(engine_config)) is not None:
        from octavo.models.merge import check_merge

        check_merge(adapter, spec, checkpoint, resolve_dtype(engine_config, spec))
    spec.split(Rank.of(0, device))
    divide_layers(spec, device.pipeline_parallel_size, device.pipeline_layers)
    if name.tokenizer is not None:
        resolve_model(name.tokenizer, download_dir=load.download_dir, load_format="dummy")
