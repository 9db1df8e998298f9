"""`octavo launch`: start an agent for code with a running server."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from octavo.config import API_KEY_VARIABLES, api_keys_from_environment
from octavo.errors import ConfigError
from octavo.server.client import Client, Served, ServerError
from octavo.terminal.screen import harmless, note, write

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "OCTAVO_API_KEY"
"""Variable from which an agent reads the key, if its settings name one."""
# Agents refuse to start without a key.
_NO_KEY = "none"
_MASK = "***"


@dataclass(frozen=True)
class Settings:
    """Settings of an agent for a server."""

    environment: Mapping[str, str]
    arguments: Sequence[str] = ()
    unset: Sequence[str] = field(default=())
    """Variables that would send another service's key to the server."""


@dataclass(frozen=True)
class Agent:
    """Agent that works with a server."""

    command: str
    install: str
    """Package that has the command."""
    route: str
    """Route of the server that the agent uses."""
    context: int
    """Tokens of context that the agent's instructions, tools and files need."""
    has_tools: bool
    """True if it sends definitions of tools."""
    settings: Callable[[Served, str], Settings]
    """Function that returns the settings, from the server and the key."""


def _claude(server: Served, key: str) -> Settings:
    kinds = ("OPUS", "SONNET", "HAIKU")
    models = [
        "ANTHROPIC_MODEL",
        "ANTHROPIC_SMALL_FAST_MODEL",  # older name of the next one's HAIKU
        *(f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in kinds),
        "CLAUDE_CODE_SUBAGENT_MODEL",
    ]
    return Settings(
        {
            "ANTHROPIC_BASE_URL": server.address,
            "ANTHROPIC_AUTH_TOKEN": key,
            **dict.fromkeys(models, server.model),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(server.context_length),
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            # It changes the beginning of the prompt, so that no prefix would be cached.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        },
        unset=["ANTHROPIC_API_KEY"],
    )


def _codex(server: Served, key: str) -> Settings:
    # Values of TOML, in which texts are written as in JSON.
    provider = {
        "name": "Octavo",
        "base_url": f"{server.address}/v1",
        "env_key": KEY_VARIABLE,
        "wire_api": "responses",
    }
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    values = {
        "model": json.dumps(server.model),
        "model_provider": '"octavo"',
        "model_context_window": str(server.context_length),
        "model_providers.octavo": f"{{ {table} }}",
        "web_search": '"disabled"',  # a tool of OpenAI's servers, on by default
    }
    flags = [word for name, value in values.items() for word in ("-c", f"{name}={value}")]
    return Settings({KEY_VARIABLE: key}, flags)


def _opencode(server: Served, key: str) -> Settings:
    model = {
        "name": server.model,
        "tool_call": server.has_tools,
        "reasoning": server.thinks,
        "limit": {"context": server.context_length, "output": server.context_length // 2},
    }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Octavo",
        "options": {"baseURL": f"{server.address}/v1", "apiKey": f"{{env:{KEY_VARIABLE}}}"},
        "models": {server.model: model},
    }
    name = f"octavo/{server.model}"
    config = {"model": name, "small_model": name, "provider": {"octavo": provider}}
    return Settings({KEY_VARIABLE: key, "OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _aider(server: Served, key: str) -> Settings:
    environment = {"OPENAI_API_BASE": f"{server.address}/v1", "OPENAI_API_KEY": key}
    return Settings(environment, ["--model", f"openai/{server.model}", "--no-show-model-warnings"])


# Makers of such servers advise 64k tokens for the first three, and aider's own 8k.
AGENTS = {
    "claude": Agent(
        "claude",
        "the npm package @anthropic-ai/claude-code",
        "POST /v1/messages",
        64_000,
        True,
        _claude,
    ),
    "codex": Agent(
        "codex", "the npm package @openai/codex", "POST /v1/responses", 64_000, True, _codex
    ),
    "opencode": Agent(
        "opencode",
        "the npm package opencode-ai",
        "POST /v1/chat/completions",
        64_000,
        True,
        _opencode,
    ),
    "aider": Agent(
        "aider",
        "the Python package aider-chat",
        "POST /v1/chat/completions",
        8_000,
        False,
        _aider,
    ),
}
_SECRETS = frozenset([KEY_VARIABLE, "ANTHROPIC_AUTH_TOKEN", "OPENAI_API_KEY"])


def add_arguments(parser: Any) -> None:
    """Add the flags of `octavo launch`."""
    parser.words = "words"
    parser.add_argument(
        "words",
        nargs="*",
        metavar="AGENT [-- ARGS]",
        help=f"Agent: {', '.join(AGENTS)}; and arguments for it.",
    )
    parser.add_argument(
        "--url", default=DEFAULT_URL, help=f"Address of the server [{DEFAULT_URL}]."
    )
    keys = " or ".join(API_KEY_VARIABLES)
    parser.add_argument("--api-key", metavar="KEY", help=f"API key; default: {keys}.")
    parser.add_argument("--model", help="Model to use; default: the server's first.")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="Print the settings as lines for a shell, without the key, and start nothing.",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run `octavo launch`: replace this process by the agent.

    Raises:
        ConfigError: the agent is missing, unknown or not installed.
        ServerError: no server answers, or it does not have what the agent needs.
    """
    if not args.words:
        raise ConfigError(f"AGENT is missing; choose one of {', '.join(AGENTS)}.")
    name, *arguments = args.words
    if name not in AGENTS:
        raise ConfigError(f"agent {name!r} is unknown; choose one of {', '.join(AGENTS)}.")
    agent = AGENTS[name]
    program = shutil.which(agent.command)
    if program is None and not args.dry_run:
        raise ConfigError(
            f"{agent.command} is not installed; install {agent.install}, so that `{agent.command}` "
            "is on PATH."
        )
    key = args.api_key or next(iter(api_keys_from_environment().values()), None)
    with closing(Client(args.url, key, args.model)) as client:
        server = client.describe()
    for warning in find_problems(agent, server):
        note(f"octavo: warning: {harmless(warning)}")
    settings = agent.settings(server, key or _NO_KEY)
    command = [agent.command, *settings.arguments, *arguments]
    if program is None or args.dry_run:
        write(shell_lines(settings, command))
    else:
        environment = {k: v for k, v in os.environ.items() if k not in settings.unset}
        os.execve(program, command, {**environment, **settings.environment})
    return {}


def find_problems(agent: Agent, server: Served) -> list[str]:
    """Return a message about each thing that will not work well.

    Raises:
        ServerError: the agent cannot work with the server at all.
    """
    if agent.route not in server.routes:
        raise ServerError(
            f"{agent.command} needs {agent.route}, which the server at {server.address} does not "
            "have; update the server, or choose another agent."
        )
    problems = []
    if server.context_length < agent.context:
        problems.append(
            f"{server.model} has a context of {server.context_length} tokens here, and "
            f"{agent.command} needs about {agent.context}: its requests will fail or lose their "
            "beginning. Serve a model with a longer context, or raise --max-model-len."
        )
    if agent.has_tools and not server.has_tools:
        problems.append(
            f"the chat template of {server.model} shows no tool calls, so the server rejects "
            f"{agent.command}'s requests, which have tools. Serve another model, or start the "
            "server with --tool-call-parser."
        )
    if agent.has_tools and not server.thinks:
        problems.append(
            f"the chat template of {server.model} shows no reasoning, which helps with large tasks."
        )
    return problems


def shell_lines(settings: Settings, command: Sequence[str]) -> str:
    """Return settings and command as lines for a shell; a mask replaces the key."""
    lines = [f"unset {name}" for name in settings.unset]
    for name, value in settings.environment.items():
        shown = _MASK if name in _SECRETS and value != _NO_KEY else value
        lines.append(f"export {name}={shlex.quote(shown)}")
    return "\n".join([*lines, shlex.join(command), ""])
