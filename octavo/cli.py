"""Command line: `octavo serve | run | chat | complete | list | pull | inspect | bench ...`.

Flags are generated from the config, so every setting has a flag. Each command imports its modules
when it runs, so that `octavo --version` and the client commands start fast, and the server's
process does not import torch.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from octavo import __version__
from octavo.compat.settings import translate
from octavo.config import (
    BUILTIN_MODEL,
    ConfigField,
    EngineConfig,
    ServerConfig,
    build_section,
    section_fields,
    server_api_key_from_environment,
    settings_from_environment,
    unknown_variables,
)
from octavo.config.arguments import (
    GIVEN_FLAGS,
    StoreOnce,
    add_engine_settings,
    add_settings,
    engine_kwargs,
    expand_dotted,
    given_settings,
    name_flags,
)
from octavo.config.settings_file import add_config_flag, add_from_file
from octavo.errors import ConfigError, OctavoError
from octavo.several_models.config import (
    SeveralModelsConfig,
    model_settings,
    read_models,
    served_models,
)
from octavo.system.garbage import modules_stay
from octavo.terminal.commands import add_commands
from octavo.terminal.completion import SHELLS, script
from octavo.terminal.screen import note, print_error, write

if TYPE_CHECKING:
    from octavo.frontend.past import Past

_NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})
_BENCHMARKS = {
    "latency": (
        "measure the latency of one batch of requests, and the share of each kernel",
        """\
examples:
  octavo bench latency --batch-size 1
  octavo bench latency --model ./folder --input-len 512 --output-len 64
  octavo bench latency --breakdown --plot roofline.png
""",
    ),
    "throughput": (
        "measure offline requests and tokens per second on a data set",
        """\
examples:
  octavo bench throughput --num-prompts 100
  octavo bench throughput --input-len 128 --output-json result.json
""",
    ),
    "serve": (
        "run a load test of an OpenAI-compatible server",
        """\
examples (start a server first, for example with octavo serve):
  octavo bench serve --num-prompts 100
  octavo bench serve --request-rate 4 --goodput ttft:200 tpot:50
  octavo bench serve --base-url http://host:8000 --save-result --plot run.png

latencies, in ms: ttft, time to the first token; tpot, time per later token;
itl, time between outputs; e2el, time of the whole answer
""",
    ),
    "startup": (
        "measure the time from process start to the first token, and the memory used",
        """\
examples:
  octavo bench startup
  octavo bench startup --model ./folder --server --repeats 3
""",
    ),
    "sweep": (
        "run bench serve at several request rates or settings",
        """\
examples:
  octavo bench sweep --serve-cmd 'octavo serve' --request-rates 1,2,4,8
  octavo bench sweep --serve-cmd 'octavo serve' --find-max-rate --slo ttft:500
  octavo bench sweep --base-url http://host:8000 --plot sweep.png
""",
    ),
    "tune": (
        "find the fastest engine settings within latency limits",
        """\
examples:
  octavo bench tune --slo ttft_p99:500,tpot_p99:100
  octavo bench tune ./folder --slo e2el_p99:2000 --num-configs 6
""",
    ),
}
"""Help text and examples of each module of octavo.bench with `add_arguments` and `run`."""
_MODEL_TOOLS = {
    "inspect": (
        "describe a model and its features, or an adapter, without loading the weights",
        "%(prog)s MODEL [flags]",
        """\
examples:
  octavo inspect octavo/stories
  octavo inspect ./folder --quantization int8
  octavo inspect model-Q4_K_M.gguf --json
  octavo inspect ./adapter
""",
    ),
    "plan": (
        "show the memory of a server by purpose, and what its prefix cache will hold",
        "%(prog)s MODEL [flags]",
        """\
examples:
  octavo plan octavo/stories
  octavo plan ./folder --quantization int8 --max-model-len 8k
  octavo plan model-Q4_K_M.gguf --sessions 32 --turns 20 --system-tokens 4000
""",
    ),
    "quality": (
        "measure a model's perplexity on a text, and its distance from another model",
        "%(prog)s MODEL [--base MODEL] [--text FILE] [flags]",
        """\
examples:
  octavo quality octavo/stories
  octavo quality octavo/stories --quantization int4 --base octavo/stories
  octavo quality model-Q4_K_M.gguf --base ./folder --text book.txt --picture quality.png
""",
    ),
    "experts": (
        "show how often each expert of a model is chosen, as a heat map",
        "%(prog)s MODEL [--prompt TEXT] [--text FILE] [flags]",
        """\
examples:
  octavo experts ./mixture
  octavo experts ./mixture --prompt "Once upon a time" --tokens 64
  octavo experts ./mixture --text book.txt --json
""",
    ),
    "embed": (
        "compute the vectors of a file of texts; an interrupted run continues",
        "%(prog)s FILE --out OUT --model MODEL [flags]",
        """\
examples:
  octavo embed texts.txt --out vectors.npy --model octavo/stories-encoder
  octavo embed texts.jsonl --out vectors.npy --model BAAI/bge-small-en-v1.5
  octavo embed texts.txt --out texts.parquet --model ./all-MiniLM-L6-v2 --truncate
""",
    ),
    "transcribe": (
        "write what is said in sound files, as text or subtitles",
        "%(prog)s FILE... --model MODEL [flags]",
        """\
examples:
  octavo transcribe digits.wav --model octavo/spoken-words
  octavo transcribe talk.mp3 --model openai/whisper-base
  octavo transcribe *.m4a --model ./whisper --format srt --out-dir subtitles
  octavo transcribe interview.ogg --model ./whisper --language de --translate
""",
    ),
    "convert": (
        "write a quantized checkpoint for Octavo, vLLM or llama.cpp",
        "%(prog)s MODEL OUT --to FORM [flags]",
        """\
examples:
  octavo convert octavo/stories stories-int8 --to int8
  octavo convert ./folder folder-int4 --to int4
  octavo convert Qwen/Qwen3-0.6B qwen3-Q4_K_M.gguf --to gguf:Q4_K_M
""",
    ),
}
"""Help text, usage and examples of the commands in octavo.model_tools, which are modules with
`add_arguments` and `run`."""


_LAUNCH_EXAMPLES = """\
examples (start a server first, for example with octavo serve MODEL):
  octavo launch claude
  octavo launch opencode --url http://host:8000
  octavo launch aider -- --no-auto-commits README.md
  octavo launch codex --dry-run

docs/agents.md describes the agents.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its status: 0, 1 (failed), 2 (wrong usage), 130 (interrupted)."""
    arguments = _dashes(sys.argv[1:] if argv is None else argv)
    chosen: argparse.ArgumentParser | None = None
    is_running = False
    try:
        if arguments[:1] == ["help"] and not any(word.startswith("-") for word in arguments):
            arguments = [*arguments[1:], "--help"]
        arguments = expand_dotted(arguments)
        parser = build_parser(arguments)
        args, unknown = parser.parse_known_args(arguments)
        vars(args).pop(GIVEN_FLAGS, None)
        chosen = getattr(args, "parser", parser)
        if unknown:
            chosen.error(_unknown_argument(unknown[0], list(chosen._option_string_actions)))
        if getattr(args, "config", None) is not None:
            add_from_file(chosen, args)
        if args.command is None:
            parser.print_help()
            return 2
        is_running = True
        status: int = args.command(args)
        return status
    except SystemExit as stop:  # argparse: --help, --version, wrong usage
        return stop.code if isinstance(stop.code, int) else 1
    except KeyboardInterrupt:
        return 130
    except RuntimeError as error:
        # On Ctrl-C Python may lose a lock that it waits for, and then fail to release it.
        if isinstance(error.__context__, KeyboardInterrupt):
            return 130
        raise
    except BrokenPipeError:
        # The reader has closed the pipe; prevent further writes to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OctavoError as error:
        message = str(error)
        # Messages of the parser already contain the flags' names.
        if is_running and chosen is not None and isinstance(error, ConfigError):
            message = name_flags(message, chosen)
        print_error(message)
        return 2 if isinstance(error, ConfigError) else 1


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Puts each name of a flag on its own line where one line does not hold them all."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = super()._format_action_invocation(action)
        return names if len(names) + 2 <= self._width else names.replace(", ", ",\n  ")


class _Parser(argparse.ArgumentParser):
    """Argument parser that raises `ConfigError` and rejects repeated flags."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_HelpFormatter, **kwargs)
        self.register("action", None, StoreOnce)

    words: str | None = None
    """Destination of positional arguments that are accepted anywhere between flags."""

    def parse_known_args(  # type: ignore[override]  # argparse has overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments; argparse itself accepts words only up to the next flag."""
        if self.words is None:
            return super().parse_known_args(args, namespace)
        given = list(args or ())
        end = given.index("--") if "--" in given else len(given)
        parsed, rest = super().parse_known_args(given[:end], namespace)
        flags = [word for word in rest if re.match(r"--?[A-Za-z]\S*$", word)]
        words = [word for word in rest if word not in flags] + given[end + 1 :]
        setattr(parsed, self.words, getattr(parsed, self.words) + words)
        return parsed, flags

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError with the message and the command for help."""
        raise ConfigError(f"{_reworded(message)} (see {self.prog} --help)")


def _reworded(message: str) -> str:
    """Shorten argparse's message: "--dtype 'foo' is not allowed; choose one of auto, ..."."""
    if found := re.fullmatch(r"argument (\S+): invalid choice: (.*) \(choose from (.*)\)", message):
        choices = [choice.strip("'") for choice in found[3].split(", ")]
        near = difflib.get_close_matches(found[2].strip("'"), choices, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(choices)}"
        if not found[1].startswith("-"):
            return f"there is no {found[1].lower()} {found[2]}; {hint}"
        return f"{_flag(found[1])} {found[2]} is not allowed; {hint}"
    if found := re.fullmatch(r"argument (\S+): invalid (float|int) value: (.*)", message):
        kind = "number" if found[2] == "float" else "whole number"
        return f"{_flag(found[1])} {found[3]} is not a {kind}"
    if found := re.fullmatch(r"argument (\S+): expected (?:at least )?one argument", message):
        return f"{_flag(found[1])} needs a value"
    if found := re.fullmatch(r"the following arguments are required: (.*)", message):
        return f"{found[1]} is missing"
    if found := re.fullmatch(r"argument (\S+): (.*)", message):
        return f"{_flag(found[1])}: {found[2]}"
    return message


def _flag(names: str) -> str:
    """Return the long form from "-q/--quantization"."""
    return names.rpartition("/")[2]


def build_parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of all commands.

    Args:
        arguments: command line to parse. The parser has the flags of the named command only; those
            of the router, the simulation and the benchmarks require importing their modules.
            Empty: it has the flags of all other commands.
    """
    named = arguments[0] if arguments else None
    parser = _Parser(prog="octavo", description="LLM inference and serving.", epilog=_FIRST_STEPS)
    parser.add_argument("-v", "--version", action="version", version=f"octavo {__version__}")
    parser.set_defaults(command=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=_Parser)

    serve = commands.add_parser(
        "serve",
        help="serve one or several models over an OpenAI-compatible HTTP API",
        usage="%(prog)s [MODEL] [--model MODEL ...] [flags]",
        epilog=_SERVE_EXAMPLES,
    )
    serve.add_argument("model_arg", nargs="?", metavar="MODEL", help=_MODEL_HELP)
    add_config_flag(serve)
    if named in (None, "serve"):
        serve.add_argument(
            "--model",
            action="append",
            default=argparse.SUPPRESS,
            metavar="MODEL",
            help="Another model to serve; several flags are allowed. A model is a folder, a hub id,"
            ' or JSON with settings of its own: {"path": ..., "name": ..., "max_model_len": 512}.',
        )
        add_settings(serve, "several models", list(section_fields(SeveralModelsConfig)))
        add_settings(serve, "server", list(section_fields(ServerConfig, "server")))
        add_engine_settings(serve, exclude=("model",))
    serve.set_defaults(command=_serve)

    router = commands.add_parser(
        "router",
        help="serve several servers at one address, and optionally start them",
        usage="%(prog)s [MODEL] [flags]",
        epilog=_ROUTER_EXAMPLES,
    )
    router.add_argument("model_arg", nargs="?", metavar="MODEL", help=_MODEL_HELP)
    add_config_flag(router)
    if named == "router":
        from octavo.router.config import RouterConfig

        add_settings(router, "router", section_fields(RouterConfig, "router"))
        add_settings(router, "server", list(section_fields(ServerConfig, "server")))
        add_engine_settings(router)
    router.set_defaults(command=_route)

    terminal = add_commands(commands, named)

    batch = commands.add_parser(
        "run-batch",
        help="answer a file of requests in OpenAI's batch format",
        usage="%(prog)s [MODEL] -i FILE -o FILE [flags]",
        epilog=_BATCH_EXAMPLES,
    )
    batch.add_argument("model_arg", nargs="?", metavar="MODEL", help=_MODEL_HELP)
    batch.add_argument(
        "-i", "--input-file", metavar="FILE", help="File of requests, one JSON object per line."
    )
    batch.add_argument("-o", "--output-file", metavar="FILE", help="File to write the answers to.")
    add_config_flag(batch)
    if named in (None, "run-batch"):
        add_settings(batch, "answers", _batch_fields())
        add_engine_settings(batch)
    batch.set_defaults(command=_run_batch)

    replay = commands.add_parser(
        "replay",
        help="repeat the requests of a recording, and report differences",
        usage="%(prog)s FILE [flags]",
        epilog=_REPLAY_EXAMPLES,
    )
    replay.add_argument("file", metavar="FILE", help="Recording of octavo serve --record.")
    replay.add_argument(
        "--free",
        action="store_true",
        help="Send all requests at once instead of each at its step of arrival.",
    )
    replay.add_argument(
        "--allow-other-model",
        action="store_true",
        help="Replay even if the model differs from the recorded one.",
    )
    replay.add_argument(
        "--view",
        metavar="OUT",
        help="Run nothing; write a file that the engine view of the web page can open.",
    )
    if named in (None, "replay"):
        add_engine_settings(replay)
    replay.set_defaults(command=_replay)

    collect = commands.add_parser(
        "collect-env", help="print versions and hardware, for a bug report"
    )
    collect.set_defaults(command=_collect_env)

    bench = commands.add_parser(
        "bench", help="measure latency, throughput, serving or start-up time"
    )
    benchmark = _add_benchmarks(bench, arguments[1] if named == "bench" and arguments[1:] else None)

    simulate = commands.add_parser(
        "simulate",
        help="simulate how the engine serves a load, in virtual time",
        usage="%(prog)s [MODEL] [flags]",
        epilog=_SIMULATE_EXAMPLES,
    )
    if named == "simulate":
        _add_module(simulate, "octavo.simulation.simulate")

    launch = commands.add_parser(
        "launch",
        help="start an agent for code with a running server",
        usage="%(prog)s AGENT [flags] [-- ARGS]",
        epilog=_LAUNCH_EXAMPLES,
    )
    if named == "launch":
        _add_module(launch, "octavo.terminal.launch")

    tools = []
    for name, (doc, usage, examples) in _MODEL_TOOLS.items():
        tool = commands.add_parser(name, help=doc, usage=usage, epilog=examples)
        if name == named:
            _add_module(tool, f"octavo.model_tools.{name}")
        tools.append(tool)

    completion = commands.add_parser(
        "completion",
        help="print a shell script that completes commands and flags",
        epilog=_COMPLETION_EXAMPLES,
    )
    completion.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS) + ".")
    completion.set_defaults(command=_complete)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(command=_version)
    helper = commands.add_parser(
        "help", help="explain a command and its flags", usage="%(prog)s [COMMAND]"
    )

    commands_of_their_own = (serve, router, *terminal, batch, replay, collect, bench, *benchmark)
    for command in (*commands_of_their_own, simulate, launch, *tools, completion, version, helper):
        command.set_defaults(parser=command)
    _describe(commands)
    return parser


def _describe(commands: argparse._SubParsersAction[Any]) -> None:
    """Use the help text of each command in the list as the first line of its help page."""
    for listed in commands._choices_actions:
        assert listed.help is not None
        commands.choices[listed.dest].description = listed.help[0].upper() + listed.help[1:] + "."


def _add_benchmarks(bench: argparse.ArgumentParser, named: str | None) -> list[_Parser]:
    """Add the benchmarks, with flags only for the named one; return its parser in a list."""
    bench.set_defaults(command=None)
    commands = bench.add_subparsers(
        title="benchmarks", metavar="BENCHMARK", required=True, parser_class=_Parser
    )
    parsers: list[_Parser] = []
    for name, (doc, examples) in _BENCHMARKS.items():
        usage = _BENCHMARK_USAGE.get(name, "%(prog)s [flags]")
        parser = commands.add_parser(name, help=doc, usage=usage, epilog=examples)
        if name == named:
            _add_module(parser, f"octavo.bench.{name}")
            parsers.append(parser)
    _describe(commands)
    return parsers


def _add_module(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the flags of a module with `add_arguments` and `run` to a command that runs it."""
    module = importlib.import_module(name)
    module.add_arguments(parser)
    parser.set_defaults(command=_bench, run=module.run)


_BENCHMARK_USAGE = {"tune": "%(prog)s [MODEL] --slo NAME:MS,... [flags]"}
_FIRST_STEPS = """\
examples:
  octavo run                       chat with the built-in model
  octavo serve                     start a server on port 8000
  octavo chat                      chat with that server
  octavo serve Qwen/Qwen3-0.6B     serve a model from the Hugging Face hub
  octavo COMMAND --help            more about a command
"""


_SERVE_EXAMPLES = """\
examples:
  octavo serve
  octavo serve Qwen/Qwen3-0.6B --max-model-len 4k --dtype bfloat16
  octavo serve --host 127.0.0.1 --port 8080 --speculative-config.method ngram
  octavo serve --config settings.yaml
  octavo serve Qwen/Qwen3-0.6B --model BAAI/bge-small-en-v1.5

vLLM's other flags are also recognized: docs/vllm.md describes each of them.
"""
_ROUTER_EXAMPLES = """\
examples:
  octavo router --servers http://a:8000 http://b:8000
  octavo router Qwen/Qwen3-0.6B --replicas 2
  octavo router Qwen/Qwen3-0.6B --prefill 1 --decode 1
  octavo router --replicas 1 --min-replicas 1 --max-replicas 4

flags of octavo serve apply to the servers that the router starts; flags of the HTTP server (--port,
--api-key, --ssl-keyfile ...) apply to the router itself: docs/deploy.md
"""
_BATCH_EXAMPLES = """\
example:
  octavo run-batch -i requests.jsonl -o answers.jsonl --model octavo/stories

a line of the input:
  {"custom_id": "a", "method": "POST", "url": "/v1/completions",
   "body": {"prompt": "Once", "max_tokens": 5}}
  (url may also be /v1/chat/completions, /v1/responses or /v1/embeddings)
"""

_REPLAY_EXAMPLES = """\
examples (record first: octavo serve --record run.rec):
  octavo replay run.rec
  octavo replay run.rec --max-num-batched-tokens 64 --no-enable-prefix-caching
  octavo replay run.rec --free --dtype bfloat16
  octavo replay run.rec --view run.view         then open run.view in the web page, view Engine

Flags override the recorded settings. The exit status is 1 if any answer differs, and 2 if the
recording cannot be replayed.
"""

_SIMULATE_EXAMPLES = """\
examples:
  octavo simulate --request-rate 4 --num-prompts 1000 --save-step-times times.json
  octavo simulate --step-times times.json --trace azure.csv --plot day.png
  octavo simulate --step-times times.json --request-rate 2 --slo ttft_p99:2000,tpot_p99:100
  octavo simulate --step-times run.rec --request-rate 2    with a recording of octavo serve --record
  octavo simulate --request-rate 4 --num-prompts 100 --check

Scheduler, KV-cache blocks and requests are real; a function for the time of a step replaces the
model. Without --step-times, the command first measures step times with the model.
"""

_COMPLETION_EXAMPLES = """\
examples:
  octavo completion bash > ~/.local/share/bash-completion/completions/octavo
  source <(octavo completion zsh)          in ~/.zshrc
  octavo completion fish > ~/.config/fish/completions/octavo.fish
"""

_MODEL_HELP = f"Folder or hub id of a model; default: the built-in one ({BUILTIN_MODEL})."


def _dashes(argv: Sequence[str]) -> list[str]:
    """Replace underscores in flags by dashes, as vLLM does: --max_model_len."""
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
    if not word.startswith("-"):
        return f"unexpected argument {word!r}"
    # Short flags are too similar to each other, and all long ones share the dashes.
    long = [flag[2:] for flag in flags if flag.startswith("--")]
    near = difflib.get_close_matches(name.lstrip("-"), long, n=1, cutoff=0.8)
    # Two swapped letters change a short word more than the cutoff allows.
    near = near or [flag for flag in long if sorted(flag) == sorted(name.lstrip("-"))]
    return f"unknown flag {name}" + (f"; did you mean --{near[0]}?" if near else "")


# serve


def _server_configs(
    args: argparse.Namespace, own: Mapping[str, Any] = _NO_SETTINGS, **server: Any
) -> tuple[ServerConfig, EngineConfig]:
    """Return the settings of the environment, the file and the flags; later ones override.

    Args:
        args: parsed flags, including the settings of the file.
        own: settings of the model, which override the others.
        **server: default settings of the server.
    """
    if names := unknown_variables():
        note(
            f"octavo: warning: ignored environment variables (see docs/vllm.md): {', '.join(names)}"
        )
    environment = settings_from_environment()
    fields = section_fields(ServerConfig)
    server |= {f.name: environment.pop(f.name) for f in fields if f.name in environment}
    own_engine, own_server = model_settings(own)
    server |= given_settings(args, section_fields(ServerConfig)) | own_server
    engine = translate(environment) | engine_kwargs(args, args.model_arg) | own_engine
    return build_section(ServerConfig, server), EngineConfig.from_kwargs(**engine)


def _serve(args: argparse.Namespace) -> int:
    named = [] if args.model_arg is None else [args.model_arg]
    named += [text for text in vars(args).pop("model", []) if [text] != named]
    args.model_arg = None
    models = read_models(named)
    several = build_section(
        SeveralModelsConfig, given_settings(args, section_fields(SeveralModelsConfig))
    )
    if len(models) > 1:
        return _serve_several(args, several, models)
    if several != SeveralModelsConfig():
        raise ConfigError(
            "max_loaded_models and model_load_timeout are for several models; name another "
            "--model, or leave them out."
        )
    server_config, engine_config = _server_configs(args, *models)
    if server_config.headless:
        from octavo.fleet.node import run_node

        return run_node(server_config, engine_config)

    from octavo.fleet.process import CoreProcess

    # The engine imports torch while this process imports the web framework. With several front
    # ends another process starts the engine.
    alone = server_config.api_server_count == 1
    process = CoreProcess(warm=engine_config) if alone else None
    try:
        with modules_stay():
            from octavo.server.run import run_server

        return run_server(server_config, engine_config, process, _what_if)
    finally:
        if process is not None:
            process.shutdown(0.0)


def _serve_several(
    args: argparse.Namespace, several: SeveralModelsConfig, models: list[dict[str, Any]]
) -> int:
    server_config, common = _server_configs(args)
    given = given_settings(args, section_fields(ServerConfig))
    most = min(several.max_loaded_models or len(models), len(models))
    environment = settings_from_environment()
    served = served_models(models, engine_kwargs(args), given, environment, most)

    from octavo.several_models.run import run_models

    return run_models(server_config, several, served, common)


def _what_if(past: Past, settings: Sequence[str]) -> Mapping[str, float]:
    """Call `what_if`, whose modules are imported by the first call."""
    from octavo.simulation.what_if import what_if

    return what_if(past, settings)


# router


def _route(args: argparse.Namespace) -> int:
    from octavo.router.config import RouterConfig, own_server_settings

    server_config, engine_config = _server_configs(args)
    router = build_section(
        RouterConfig,
        server_api_key_from_environment() | given_settings(args, section_fields(RouterConfig)),
    )
    router.check()
    engine = engine_kwargs(args, args.model_arg)
    server = own_server_settings(given_settings(args, section_fields(ServerConfig)))

    from octavo.router.run import run_router
    from octavo.router.server_flags import flags_of_kinds

    flags = flags_of_kinds(router, server, engine, engine_config)
    return run_router(server_config, router, flags)


# run-batch


def _batch_fields() -> list[ConfigField]:
    """Return the server's settings that also apply without a server."""
    names = (
        "chat_template",
        "response_role",
        "request_timeout",
        "request_memory_bytes",
        "max_request_bytes",
        "max_media_request_bytes",
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


# replay


def _replay(args: argparse.Namespace) -> int:
    given = engine_kwargs(args)
    try:
        if args.view is not None:
            from octavo.simulation.view_file import write_view

            num_steps = write_view(Path(args.file), Path(args.view))
            print(f"{num_steps} steps are in {args.view}; open it in the page's engine view.")
            return 0
        from octavo.simulation.replay import run_replay

        return run_replay(
            args.file, given, free=args.free, allow_other_model=args.allow_other_model
        )
    except OctavoError as error:
        print_error(str(error))
        return 2  # 1 means differences


# collect-env


def _collect_env(args: argparse.Namespace) -> int:
    from octavo.collect_env import collect_env

    found = collect_env()
    width = max(map(len, found))
    print("\n".join(f"{name:{width}}  {value}" for name, value in found.items()))
    return 0


# completion, version


def _complete(args: argparse.Namespace) -> int:
    parsers: dict[tuple[str, ...], argparse.ArgumentParser] = {}
    for name in _subparsers(build_parser()):
        # The flags of these commands require their modules.
        parsers[(name,)] = _subparsers(build_parser([name]))[name]
    for name in _BENCHMARKS:
        bench = _subparsers(build_parser(["bench", name]))["bench"]
        parsers["bench", name] = _subparsers(bench)[name]
    write(script(args.shell, parsers))
    return 0


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    assert parser._subparsers is not None
    (commands,) = parser._subparsers._group_actions
    return dict(commands.choices)  # type: ignore[arg-type]  # parsers by name


def _version(args: argparse.Namespace) -> int:
    print(f"octavo {__version__}")
    return 0


# bench


def _bench(args: argparse.Namespace) -> int:
    run = args.run
    del args.run, args.command, args.parser  # not arguments of the benchmark
    result = run(args)
    return 130 if result.get("interrupted") else 0
