"""The command line: `octavo serve | run | chat | complete | list | pull | bench`.

Flags are generated from the config, so every setting has one. What a command needs is imported
when it runs: `octavo --version` and the client commands start at once, the server has no torch.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from octavo import __version__
from octavo.arguments import add_engine_settings, add_settings, engine_kwargs, given_settings
from octavo.config import BUILTIN_MODEL, EngineConfig, ServerConfig, build_section, section_fields
from octavo.errors import ConfigError, OctavoError
from octavo.terminal.commands import add_commands
from octavo.terminal.screen import print_error

_BENCHMARKS = {
    "latency": "time of one batch of requests, and where a step's time goes",
    "throughput": "requests and tokens a second of a whole data set, offline",
    "serve": "what the users of an OpenAI-compatible server see",
    "startup": "from process start to the first token; memory when ready",
    "sweep": "serve at several rates or settings",
    "tune": "search the engine settings for the most throughput within limits",
}
"""Modules of octavo.bench with `add_arguments` and `run`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its status: 0, 1 (failed), 2 (wrong usage), 130 (interrupted)."""
    arguments = _dashes(sys.argv[1:] if argv is None else argv)
    try:
        parser = build_parser(arguments)
        args, unknown = parser.parse_known_args(arguments)
        if unknown:
            parser.error(_unknown_argument(unknown[0], getattr(args, "flags", [])))
        if args.command is None:
            parser.print_help()
            return 2
        status: int = args.command(args)
        return status
    except SystemExit as stop:  # argparse: --help, --version, wrong usage
        return stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has gone; nothing more may be written to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OctavoError as error:
        print_error(str(error))
        return 2 if isinstance(error, ConfigError) else 1


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        """Prints the error and exits with status 2."""
        print_error(f"{message} (see {self.prog} --help)")
        sys.exit(2)


def build_parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of all commands.

    Args:
        arguments: what it is to parse. A benchmark's flags are there only if it is named, as they
            come with its module.
    """
    parser = _Parser(prog="octavo", description="LLM inference and serving.")
    parser.add_argument("--version", action="version", version=f"octavo {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)

    serve = commands.add_parser("serve", help="serve a model over OpenAI's HTTP API")
    serve.add_argument("model_arg", nargs="?", metavar="MODEL", help=_MODEL_HELP)
    add_settings(serve, "server", list(section_fields(ServerConfig, "server")))
    add_engine_settings(serve)
    serve.set_defaults(command=_serve)

    terminal = add_commands(commands)

    bench = commands.add_parser("bench", help="measure latency, throughput, serving, start-up")
    named = arguments[1] if len(arguments) > 1 and arguments[0] == "bench" else None
    benchmark = _add_benchmarks(bench, named)

    for command in (serve, *terminal, bench, *benchmark):
        command.set_defaults(flags=sorted(command._option_string_actions))
    return parser


def _add_benchmarks(bench: argparse.ArgumentParser, named: str | None) -> list[_Parser]:
    """Adds the benchmarks; the named one gets its flags, and its parser is returned."""
    bench.set_defaults(command=None)
    commands = bench.add_subparsers(
        title="benchmarks", metavar="BENCHMARK", required=True, parser_class=_Parser
    )
    parsers: list[_Parser] = []
    for name, doc in _BENCHMARKS.items():
        parser = commands.add_parser(name, help=doc)
        if name == named:
            module = importlib.import_module(f"octavo.bench.{name}")
            module.add_arguments(parser)
            parser.set_defaults(command=_bench, run=module.run)
            parsers.append(parser)
    return parsers


_MODEL_HELP = f"Folder or hub id of a model; default: the built-in one ({BUILTIN_MODEL})."


def _dashes(argv: Sequence[str]) -> list[str]:
    """Lets flags be written with underscores, as vLLM does: --max_model_len."""
    words = list(argv)
    for i, word in enumerate(words):
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if re.fullmatch(r"--[A-Za-z][\w-]*", name):
            words[i] = name.replace("_", "-") + equals + value
    return words


def _unknown_argument(word: str, flags: list[str]) -> str:
    name = word.partition("=")[0]
    near = difflib.get_close_matches(name, flags, n=1)
    if not word.startswith("-"):
        return f"unexpected argument {word!r}"
    return f"unknown flag {name}" + (f"; did you mean {near[0]}?" if near else "")


# serve


def _serve(args: argparse.Namespace) -> int:
    engine_config = EngineConfig.from_kwargs(**engine_kwargs(args, args.model_arg))
    server_config = build_section(ServerConfig, given_settings(args, section_fields(ServerConfig)))

    from octavo.server.run import run_server

    return run_server(server_config, engine_config)


# bench


def _bench(args: argparse.Namespace) -> int:
    run = args.run
    del args.run, args.command, args.flags  # not of the benchmark
    result = run(args)
    return 130 if result.get("interrupted") else 0
