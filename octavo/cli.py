"""The command line: `octavo serve | run | chat | complete | run-batch | bench | collect-env`.

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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

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
    API_KEY_VARIABLES,
    BUILTIN_DRAFT_MODEL,
    BUILTIN_MODEL,
    ConfigField,
    EngineConfig,
    ServerConfig,
    api_keys_from_environment,
    build_section,
    config_fields,
    section_fields,
    settings_from_environment,
    unknown_variables,
)
from octavo.errors import ConfigError, OctavoError, RequestError
from octavo.sampling_params import SamplingParams
from octavo.settings_file import add_config_flag, add_from_file

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.outputs import RequestOutput

DEFAULT_URL = "http://localhost:8000/v1"

_BENCHMARKS = {
    "latency": "time of one batch of requests, and where a step's time goes",
    "throughput": "requests and tokens a second of a whole data set, offline",
    "serve": "what the users of an OpenAI-compatible server see",
    "startup": "from process start to the first token; memory when ready",
    "sweep": "serve at several rates or settings",
    "tune": "search the engine settings for the most throughput within limits",
}
"""Modules of octavo.bench with `add_arguments` and `run`."""

_KEYS = " or ".join(API_KEY_VARIABLES)

# Flags of one request: name, type, help. The names are those of SamplingParams and of the API.
_SAMPLING_FLAGS: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "Most tokens to generate; default: as many as fit."),
    ("temperature", float, "Divides the logits; 0 is greedy."),
    ("top_p", float, "Keep the most probable tokens that add up to this."),
    ("top_k", int, "Keep this many most probable tokens; 0: all."),
    ("min_p", float, "Drop tokens less probable than this share of the best one."),
    ("repetition_penalty", float, "Above 1: repeat less."),
    ("presence_penalty", float, "Above 0: repeat less, -2 to 2."),
    ("frequency_penalty", float, "Above 0: repeat less, the more often, -2 to 2."),
    ("stop", str, "Text that ends the answer; may be given several times."),
)


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
        _print_error(str(error))
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

    run = commands.add_parser(
        "run", help="generate in the terminal, without a server", epilog=_RUN_EXAMPLES
    )
    run.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] [PROMPT]",
        help="The model, and the text to continue; without a text, an interactive chat. One "
        "argument alone is the model if it is a built-in one, a folder or a hub id (org/name).",
    )
    add_config_flag(run)
    _add_sampling_flags(run)
    add_engine_settings(run)
    run.set_defaults(command=_run)

    chat = commands.add_parser("chat", help="chat with a running server", epilog=_CHAT_EXAMPLES)
    _add_client_flags(chat, "Ask this one question instead of chatting.")
    chat.add_argument("--system-prompt", metavar="TEXT", help="First message of the chat.")
    chat.set_defaults(command=_chat)

    complete = commands.add_parser(
        "complete", help="continue texts with a running server", epilog=_COMPLETE_EXAMPLES
    )
    _add_client_flags(complete, "Continue this one text instead of asking for texts.")
    complete.set_defaults(command=_complete)

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

    for command in (serve, run, chat, complete, batch, collect, bench, *benchmark):
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
        parser = commands.add_parser(name, help=doc)
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
_RUN_EXAMPLES = """\
examples:
  octavo run                                   a chat with the built-in model
  octavo run "Once upon a time"
  octavo run Qwen/Qwen3-0.6B "The sea is" --max-tokens 50 --temperature 0
"""
_CHAT_EXAMPLES = """\
examples:
  octavo chat
  octavo chat -q "Who are you?" --url http://localhost:8000/v1 --system-prompt "Be brief."
"""
_COMPLETE_EXAMPLES = """\
examples:
  octavo complete
  octavo complete -q "Once upon a time" --max-tokens 50 --temperature 0
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


def _add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    for name, kind, doc in _SAMPLING_FLAGS:
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            action="append" if name == "stop" else "store",
            metavar={int: "N", float: "X", str: "TEXT"}[kind],
            default=argparse.SUPPRESS,
            help=doc,
        )


def _add_client_flags(parser: argparse.ArgumentParser, quick: str) -> None:
    parser.add_argument("-q", "--quick", metavar="TEXT", help=quick)
    parser.add_argument("--url", default=DEFAULT_URL, help=f"Address of the API [{DEFAULT_URL}].")
    parser.add_argument("--model", help="Model to ask; default: the server's first.")
    parser.add_argument("--api-key", metavar="KEY", help=f"API key; default: {_KEYS}.")
    _add_sampling_flags(parser)
    parser.add_argument(
        "--seed", type=int, metavar="N", default=argparse.SUPPRESS, help="Seed of the sampling."
    )


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


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given."""
    names = [name for name, _, _ in _SAMPLING_FLAGS]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def _warn_of_variables() -> None:
    """Says which variables of the environment are not read, in one line."""
    if names := unknown_variables():
        _note(f"octavo: warning: without meaning here (see docs/vllm.md): {', '.join(names)}")


# serve


def _server_configs(args: argparse.Namespace, **server: Any) -> tuple[ServerConfig, EngineConfig]:
    """What the environment, a file and the flags say, the later ones first.

    Args:
        args: the flags, and what the file says.
        **server: settings of the server that are as they are.
    """
    _warn_of_variables()
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
    _write("".join(f"{name:{width}}  {value}\n" for name, value in found.items()))
    return 0


# run


def _run(args: argparse.Namespace) -> int:
    model, prompt = _model_and_prompt(args.words, hasattr(args, "model"))
    _warn_of_variables()
    known = {field.name for field in config_fields(EngineConfig)}
    environment = {k: v for k, v in settings_from_environment().items() if k in known}
    kwargs = environment | engine_kwargs(args, model)
    EngineConfig.from_kwargs(**kwargs)  # wrong settings are told before torch is imported
    given = {"max_tokens": None, "seed": kwargs.get("seed"), **_sampling(args)}
    _check_sampling(given)

    from octavo.llm import LLM

    llm = LLM(**kwargs)
    try:
        params = msgspec.structs.replace(llm.get_default_sampling_params(), **given)
        if prompt is None:
            return _run_chat(llm, params)
        _show_answer(llm.stream(prompt, params))
        return 0
    finally:
        llm.shutdown()


def _model_and_prompt(words: list[str], has_model: bool) -> tuple[str | None, str | None]:
    """Tells the model from the prompt.

    Args:
        words: the positional arguments.
        has_model: --model was given, so none of them is a model.
    """
    most = 1 if has_model else 2
    if len(words) > most:
        raise ConfigError(
            f"There are {len(words)} arguments where at most {most} can be; put the prompt in "
            "quotes."
        )
    if len(words) == 2:
        return words[0], words[1]
    if not words:
        return None, None
    if not has_model and _looks_like_model(words[0]):
        return words[0], None
    return None, words[0]


def _looks_like_model(word: str) -> bool:
    """Whether a word names a built-in model, an existing folder, or something on the hub."""
    if word in (BUILTIN_MODEL, BUILTIN_DRAFT_MODEL) or os.path.isdir(os.path.expanduser(word)):
        return True
    return re.fullmatch(r"[\w.-]+/[\w.-]+", word) is not None


def _check_sampling(given: dict[str, Any]) -> None:
    """Refuses wrong sampling flags before a model is loaded."""
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise ConfigError(error.message) from None


def _run_chat(llm: LLM, params: SamplingParams) -> int:
    messages: list[dict[str, str]] = []
    for question in _questions("You"):
        messages.append({"role": "user", "content": question})
        try:
            text = llm.render_chat(messages)
            answer = _show_answer(llm.stream(text, params, add_special_tokens=False))
        except RequestError as error:
            _print_error(error.message)
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})
    return 0


def _show_answer(outputs: Iterator[RequestOutput]) -> str:
    """Prints an answer as it comes, then a line of figures; returns its text."""
    begin = time.monotonic()
    first = end = begin
    pieces: list[str] = []
    num_tokens = num_prompt = num_cached = 0
    for output in outputs:
        completion = output.outputs[0]
        end = time.monotonic()
        if num_tokens == 0 and completion.token_ids:
            first = end
        num_tokens += len(completion.token_ids)
        num_prompt, num_cached = len(output.prompt_token_ids), output.num_cached_tokens
        pieces.append(completion.text)
        _write(completion.text)
    _write("\n")
    seconds = end - first
    rate = f"{(num_tokens - 1) / seconds:.1f} tokens/s" if seconds > 0 else "- tokens/s"
    _note(
        f"[{num_tokens} tokens | first token {(first - begin) * 1000:.0f} ms | {rate} | "
        f"{num_cached} of {num_prompt} prompt tokens cached]"
    )
    return "".join(pieces)


# bench


def _bench(args: argparse.Namespace) -> int:
    run = args.run
    del args.run, args.command, args.parser  # not of the benchmark
    result = run(args)
    return 130 if result.get("interrupted") else 0


# chat, complete


def _chat(args: argparse.Namespace) -> int:
    messages: list[dict[str, str]] = []
    if args.system_prompt is not None:
        messages.append({"role": "system", "content": args.system_prompt})

    def answer(client: Any, question: str, params: dict[str, Any]) -> None:
        messages.append({"role": "user", "content": question})
        try:
            text = _show(client.chat(messages, params))
        except OctavoError:
            messages.pop()
            raise
        messages.append({"role": "assistant", "content": text})

    return _ask_server(args, "You", answer)


def _complete(args: argparse.Namespace) -> int:
    def answer(client: Any, prompt: str, params: dict[str, Any]) -> None:
        _show(client.complete(prompt, params))

    return _ask_server(args, "Text", answer)


def _ask_server(
    args: argparse.Namespace, prompt: str, answer: Callable[[Any, str, dict[str, Any]], None]
) -> int:
    """Answers one question (-q), or one after the other until there are no more."""
    from octavo.server.client import Client, ServerError

    params = _sampling(args)
    if hasattr(args, "seed"):
        params["seed"] = args.seed
    key = args.api_key or next(iter(api_keys_from_environment().values()), None)
    client = Client(args.url, key, args.model)
    try:
        if args.quick is not None:
            answer(client, args.quick, params)
            return 0
        for question in _questions(prompt):
            try:
                answer(client, question, params)
            except ServerError as error:
                _print_error(str(error))
        return 0
    finally:
        client.close()


# The terminal


def _questions(prompt: str) -> Iterator[str]:
    """What the user types, line by line, until the end of the input."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  # line editing and history for input()

        _note("Ctrl-D ends.")
    while True:
        try:
            line = input(f"{prompt}: " if interactive else "")
        except EOFError:
            if interactive:
                _write("\n")
            return
        if line.strip():
            yield line


def _show(pieces: Iterable[str]) -> str:
    """Prints pieces of text as they come; returns all of it."""
    parts: list[str] = []
    for piece in pieces:
        parts.append(piece)
        _write(piece)
    _write("\n")
    return "".join(parts)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _note(text: str) -> None:
    """A line that is not part of an answer: on stderr, dim where that is a terminal."""
    if sys.stderr.isatty():
        from rich.console import Console

        Console(stderr=True, highlight=False).print(text, style="dim", markup=False)
    else:
        print(text, file=sys.stderr)


def _print_error(message: str) -> None:
    line = "octavo: error: " + " ".join(message.split())
    if sys.stderr.isatty():
        from rich.console import Console

        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(line, style="red", markup=False)
    else:
        print(line, file=sys.stderr)
