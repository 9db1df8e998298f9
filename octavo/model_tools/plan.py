"""`octavo plan`: memory of a server by purpose, and what its prefix cache will hold."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec

from octavo.config import ServerConfig
from octavo.config.arguments import add_engine_settings
from octavo.engine.assemble import plan_memory, set_up_worker
from octavo.errors import ConfigError
from octavo.kv_cache.groups import KVCacheConfig
from octavo.kv_cache.sessions import SessionShape, find_hits
from octavo.model_tools.opened import MODEL_HELP, OpenedModel, model_kwargs
from octavo.model_tools.tables import make_console, mib, print_pairs
from octavo.plan.memory_plan import MemoryPlan
from octavo.plan.setup import WorkerSetup
from octavo.platforms.registry import get_platform

_SESSION_FLAGS = {
    "sessions": "Concurrent sessions",
    "turns": "Messages of the user in a session",
    "system_tokens": "Tokens of the system prompt that all sessions share",
    "message_tokens": "Tokens of a message of the user",
    "answer_tokens": "Tokens of an answer",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --json, the shape of chat sessions and the flags of the engine."""
    parser.add_argument("model_arg", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")
    group = parser.add_argument_group("chat sessions, whose cached prefixes are predicted")
    for name, doc in _SESSION_FLAGS.items():
        default, flag = getattr(SessionShape, name), "--" + name.replace("_", "-")
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{doc} [{default}].")
    add_engine_settings(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Plan the memory, and print the plan.

    Returns:
        See `plan`.

    Raises:
        ConfigError, ModelError, HubError: see `plan`.
    """
    shape = SessionShape(**{name: getattr(args, name) for name in _SESSION_FLAGS})
    result = plan(model_kwargs(args), shape)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n")
    else:
        _print(result)
    return result


def plan(kwargs: Mapping[str, Any], shape: SessionShape | None = None) -> dict[str, Any]:
    """Return the memory plan of `octavo serve`.

    Args:
        kwargs: settings, as `LLM` takes them.
        shape: chat sessions whose hits are predicted; None: the default ones.

    Returns:
        model; total, limit (bytes); `items`: the bytes of each purpose; num_blocks, block_size,
        kv_cache_dtype, kv_cache_nbytes_per_token; max_model_len (tokens); max_concurrency: number
        of requests of that length that fit at once; `prefix_cache`: see `_describe_cache`.

    Raises:
        ConfigError, ModelError, HubError: settings or model are unusable, or the memory is too
            small, or the device measures its memory only after loading.
    """
    model = OpenedModel.of(dict(kwargs), with_weights=False)
    platform = get_platform(model.config.device.device)
    setup = set_up_worker(
        model.config, model.spec, model.path, platform, platform.server_batched_tokens
    )
    estimate = platform.estimate_memory(setup)
    if estimate is None:
        raise ConfigError(f"device={platform.name} has no plan: it measures memory after loading.")
    memory = ServerConfig().request_memory_bytes
    planned, kv_cache = plan_memory(setup, estimate, request_memory=memory, warm_spare=None)
    return {
        "model": model.config.model.model,
        "total": planned.total,
        "limit": planned.limit,
        "items": {item.name: item.nbytes for item in planned.items},
        "num_blocks": planned.num_blocks,
        "block_size": planned.block_size,
        "kv_cache_dtype": setup.kv_cache_dtype,
        "kv_cache_nbytes_per_token": planned.block_nbytes / planned.block_size,
        "max_model_len": planned.max_model_len,
        "max_concurrency": planned.max_concurrency,
        "prefix_cache": _describe_cache(planned, kv_cache, setup, shape or SessionShape()),
    }


def _describe_cache(
    planned: MemoryPlan, kv_cache: KVCacheConfig, setup: WorkerSetup, shape: SessionShape
) -> dict[str, Any]:
    """Return what the prefix cache keeps of chat sessions.

    Returns:
        problem, or None; of a model with recurrent states state_nbytes, most_snapshots and
        snapshots, a phrase; the fields of `SessionHits`; description.
    """
    config = setup.config
    if not config.cache.enable_prefix_caching:
        return {"problem": "enable_prefix_caching=False"}
    found: dict[str, Any] = {"problem": None}
    if planned.num_states:
        found |= {"state_nbytes": planned.state_nbytes, "most_snapshots": planned.most_snapshots}
        found["snapshots"] = planned.describe_snapshots()
    try:
        hits = find_hits(
            kv_cache,
            shape,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=planned.max_model_len,
        )
    except ConfigError as error:
        return found | {"problem": str(error)}
    return found | asdict(hits) | {"description": str(hits)}


def _print(result: Mapping[str, Any]) -> None:
    """Print the plan."""
    console = make_console()
    items = {name: mib(nbytes) for name, nbytes in result["items"].items()}
    tokens = result["num_blocks"] * result["block_size"]
    if "KV cache" in items:
        items["KV cache"] += (
            f" = {result['num_blocks']:,} blocks of {result['block_size']} tokens = {tokens:,} "
            f"tokens, {result['kv_cache_nbytes_per_token']:,.0f} bytes each "
            f"({result['kv_cache_dtype']}); {result['max_concurrency']:,.1f} requests of "
            f"{result['max_model_len']:,} tokens"
        )
    title = f"memory plan: {mib(result['total'])} of {mib(result['limit'])}"
    print_pairs(console, title, items)
    cache, lines = result["prefix_cache"], {}
    if "snapshots" in cache:
        lines["snapshot of a state"] = cache["snapshots"]
    lines["chat sessions"] = cache["problem"] or cache["description"]
    print_pairs(console, "prefix cache", lines)
