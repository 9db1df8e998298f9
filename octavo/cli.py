"""The command line: `octavo serve | run | chat | complete | list | pull | run-batch | bench ...`.

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
from octavo.arguments import (
    GIVEN_FLAGS,
    StoreOnce,
    add_engine_settings,
    add_settings,
    engine_kwargs,
    expand_dotted,
    given_settings,
)
from octavo.config import (
    BUILTIN_MODEL,
    ConfigField,
    EngineConfig,
    ServerConfig,
    build_section,
    section_fields,
    settings_from_environment,
)
from octavo.errors import ConfigError, OctavoError
from octavo.settings_file import add_config_flag, add_from_file
from octavo.terminal.commands import add_commands, warn_of_variables
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
_EXAMPLES = {
    "latency": (
        "--batch-size 8 --input-len 32 --output-len 128",
        "--breakdown --num-iters 3 --plot roofline.png",
    ),
    "throughput": (
        "--num-prompts 100 --random-input-len 200 --random-output-len 100",
        "--model ./folder --dataset-name sharegpt --dataset-path chats.json",
    ),
    "serve": (
        "--port 8000 --request-rate 4 --num-prompts 100 --goodput ttft:500 tpot:50",
        "--base-url http://host:8000 --save-result --plot requests.png",
    ),
    "startup": ("--repeats 3 --server", "--model ./folder --output-json startup.json"),
    "sweep": (
        '--serve-cmd "octavo serve ./folder" --request-rates 1,2,4,8 --plot sweep.png',
        '--serve-cmd "octavo serve ./folder" --find-max-rate --slo ttft_p99:500',
    ),
    "tune": ("./folder --slo e2el_p99:500", "./folder --slo ttft_p99:500,tpot:50 --num-configs 8"),
}
"""What follows `octavo bench NAME` in the examples of its help."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its status: 0, 1 (failed), 2 (wrong usage), 130 (interrupted)."""
    arguments = _dashes(sys.argv[1:] if argv is None else argv)
    try:
        arguments = expand_dotted(arguments)
        parser = build_parser(arguments)
        args, unknown = parser.parse_known_args(arguments)
        vars(args).pop(GIVEN_FLAGS, None)
        chosen: argparse.ArgumentParser = getattr(args, "parser", parser)
        if unknown:
            chosen.error(_unknown_argument(unknown[0], list(chosen._option_string_actions)))
        if getattr(args, "config", None) is not None:
            add_from_file(chosen, args)
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
    """An argument parser whose errors are `ConfigError` and whose flags are given once."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs
        )
        self.register("action", None, StoreOnce)

    def error(self, message: str) -> NoReturn:
        """Raises the error, with where the help is."""
        raise ConfigError(f"{message} (see {self.prog} --help)")


def build_parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of all commands.

    Args:
        arguments: what it is to parse. A benchmark's flags are there only if it is named, as they
            come with its module.
    """
    parser = _Parser(prog="octavo", description="LLM inference and serving.")
    parser.add_argument("-v", "--version", action="version", version=f"octavo {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)

    serve = commands.add_parser(
        "serve", help="serve a model over OpenAI's HTTP API", epilog=_SERVE_EXAMPLES
    )
    serve.add_argument("model_arg", nargs="?", metavar="MODEL", help=_MODEL_HELP)
    add_config_flag(serve)
    add_settings(serve, "server", list(section_fields(ServerConfig, "server")))
    add_engine_settings(serve)
    serve.set_defaults(command=_serve)

    terminal = add_commands(commands)

    batch = commands.add_parser(
        "run-batch", help="answer a file of requests in OpenAI's format", epilog=_BATCH_EXAMPLES
    )
    batch.add_argument("model_arg", nargs="?", metavar="MODEL", help=_MODEL_HELP)
    batch.add_argument("-i", "--input-file", metavar="FILE", help="Requests, one JSON a line.")
    batch.add_argument("-o", "--output-file", metavar="FILE", help="Where the answers go.")
    add_config_flag(batch)
    add_settings(batch, "answers", _batch_fields())
    add_engine_settings(batch)
    batch.set_defaults(command=_run_batch)

    collect = commands.add_parser("collect-env", help="print versions and the machine's parts")
    collect.set_defaults(command=_collect_env)

    bench = commands.add_parser("bench", help="measure latency, throughput, serving, start-up")
    named = arguments[1] if len(arguments) > 1 and arguments[0] == "bench" else None
    benchmark = _add_benchmarks(bench, named)

    for command in (serve, *terminal, batch, collect, bench, *benchmark):
        command.set_defaults(parser=command)
    return parser


def _add_benchmarks(bench: argparse.ArgumentParser, named: str | None) -> list[_Parser]:
    """Adds the benchmarks; the named one gets its flags, and its parser is returned."""
    bench.set_defaults(command=None)
    commands = bench.add_subparsers(
        title="benchmarks", metavar="BENCHMARK", required=True, parser_class=_Parser
    )
    parsers: list[_Parser] = []
    for name, doc in _BENCHMARKS.items():
        examples = "".join(f"  octavo bench {name} {words}\n" for words in _EXAMPLES[name])
        parser = commands.add_parser(name, help=doc, epilog=f"examples:\n{examples}")
        if name == named:
            module = importlib.import_module(f"octavo.bench.{name}")
            module.add_arguments(parser)
            parser.set_defaults(command=_bench, run=module.run)
            parsers.append(parser)
    return parsers


_SERVE_EXAMPLES = """\
examples:
  octavo serve
  octavo serve Qwen/Qwen3-0.6B --max-model-len 4k --dtype bfloat16
  octavo serve --host 127.0.0.1 --port 8080 --speculative-config.method ngram
  octavo serve --config settings.yaml

vLLM's other flags are known, too: docs/vllm.md says what becomes of each.
"""
_BATCH_EXAMPLES = """\
example:
  octavo run-batch -i requests.jsonl -o answers.jsonl --model octavo/stories

a line of the input:
  {"custom_id": "a", "method": "POST", "url": "/v1/completions",
   "body": {"prompt": "Once", "max_tokens": 5}}
  (url may also be /v1/chat/completions)
"""

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


def _server_configs(args: argparse.Namespace, **server: Any) -> tuple[ServerConfig, EngineConfig]:
    """What the environment, a file and the flags say, the later ones first.

    Args:
        args: the flags, and what the file says.
        **server: settings of the server that are as they are.
    """
    warn_of_variables()
    environment = settings_from_environment()
    fields = section_fields(ServerConfig)
    server |= {f.name: environment.pop(f.name) for f in fields if f.name in environment}
    server |= given_settings(args, section_fields(ServerConfig))
    engine = environment | engine_kwargs(args, args.model_arg)
    return build_section(ServerConfig, server), EngineConfig.from_kwargs(**engine)


def _serve(args: argparse.Namespace) -> int:
    server_config, engine_config = _server_configs(args)

    from octavo.server.run import run_server

    return run_server(server_config, engine_config)


# run-batch


def _batch_fields() -> list[ConfigField]:
    """The server's settings that have a meaning without one."""
    names = (
        "chat_template",
        "response_role",
        "request_timeout",
        "request_memory_bytes",
        "max_request_bytes",
        "log_level",
        "log_format",
    )
    return [f for f in section_fields(ServerConfig, "server") if f.name in names]


def _run_batch(args: argparse.Namespace) -> int:
    if args.input_file is None or args.output_file is None:
        raise ConfigError("run-batch needs -i FILE and -o FILE (see octavo run-batch --help).")
    server_config, engine_config = _server_configs(
        args, max_num_queued_reqs=0, disable_uvicorn_access_log=True
    )

    from octavo.server.run_batch import run_batch

    return run_batch(server_config, engine_config, args.input_file, args.output_file)


# collect-env


def _collect_env(args: argparse.Namespace) -> int:
    from octavo.collect_env import collect_env

    found = collect_env()
    width = max(map(len, found))
    print("\n".join(f"{name:{width}}  {value}" for name, value in found.items()))
    return 0


# bench


def _bench(args: argparse.Namespace) -> int:
    run = args.run
    del args.run, args.command, args.parser  # not of the benchmark
    result = run(args)
    return 130 if result.get("interrupted") else 0
