"""Flags and functions of `octavo run | chat | complete | scale | top | explain | list | pull`."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import sys
from typing import TYPE_CHECKING, Any

from octavo.config import (
    ADMIN_KEY_VARIABLE,
    API_KEY_VARIABLES,
    BUILTIN_MODEL,
    EngineConfig,
    ServerConfig,
    admin_keys_from_environment,
    api_keys_from_environment,
    read_hub_address,
    section_fields,
    settings_from_environment,
)
from octavo.config.arguments import add_engine_settings, engine_kwargs
from octavo.config.engine_settings import engine_settings
from octavo.config.settings_file import add_config_flag
from octavo.errors import ConfigError, HubError, OctavoError
from octavo.system.logs import setup_logging
from octavo.terminal.answers import LocalModel, Source, show_answer
from octavo.terminal.lines import Reader, history_file, read_all
from octavo.terminal.screen import harmless, note, print_error, spinner
from octavo.terminal.session import SAMPLING, Session, check_sampling

if TYPE_CHECKING:
    from octavo.llm import LLM

DEFAULT_URL = "http://localhost:8000/v1"
_KEYS = " or ".join(API_KEY_VARIABLES)
_STDIN = "-"
_NAME = re.compile(r"[\w.~/\\:@+-]+", re.ASCII)
"""Pattern of a model's name, path or URL."""

_RUN_EXAMPLES = """examples:
  octavo run                          chat with the built-in model
  octavo run "Tell me a story."       ask one question
  octavo run org/name                 chat with a model from Hugging Face's hub
  octavo run model.gguf "2 + 3?"      ask a local model
  octavo run --raw "Once upon a time" continue a text
  octavo run --raw - < story.txt      continue the text on standard input
"""
_CHAT_EXAMPLES = """examples:
  octavo chat                         chat with the server on this machine
  octavo chat "What is 3 + 4?"        ask one question
  octavo chat --url http://host:8000  another server
  git diff | octavo chat              send what is piped in
"""
_COMPLETE_EXAMPLES = """examples:
  octavo complete                     continue what is typed
  octavo complete "Once upon a time" --max-tokens 50 --temperature 0
"""
_SCALE_EXAMPLE = """example:
  octavo scale 3                      a server that was started with --enable-elastic-ep
"""
_TOP_EXAMPLES = """examples:
  octavo top                          the server on this machine
  octavo top --url http://host:8000   another server
  octavo top | cat                    print the state once
"""
_EXPLAIN_EXAMPLES = """examples:
  octavo explain                      list the recent requests
  octavo explain chatcmpl-3f2a9c      why this request took as long as it did
"""
_PULL_EXAMPLE = """example:
  octavo pull Qwen/Qwen3-0.6B
"""


def add_commands(commands: Any, named: str | None) -> list[argparse.ArgumentParser]:
    """Add the terminal's commands to the parser; return their parsers.

    Args:
        commands: subparsers of the whole parser.
        named: only this command gets the engine's settings; None: each that has them.
    """
    run = commands.add_parser(
        "run",
        help="generate in the terminal, without a server",
        usage="%(prog)s [MODEL] [PROMPT] [flags]",
        epilog=_RUN_EXAMPLES,
    )
    run.words = "words"
    run.add_argument(
        "words",
        nargs="*",
        metavar="[MODEL] [PROMPT]",
        help="Model, and one message (-: read it from standard input); without a message, a "
        "chat. A model without a chat template continues the message as a text. One word without "
        "white space is a model: a folder, a file, a hub id (org/name) or its URL. To send such a "
        "word, name the model, too.",
    )
    run.add_argument(
        "--raw",
        action="store_true",
        help="Continue each text as it is, without the model's chat template.",
    )
    add_config_flag(run)
    run.add_argument(
        "--system-prompt", metavar="TEXT", help="Instructions that the model gets before the chat."
    )
    (level,) = (f for f in section_fields(ServerConfig, "server") if f.name == "log_level")
    run.add_argument(
        level.flag,
        choices=level.choices,
        default=argparse.SUPPRESS,
        help=f"{level.doc} [{level.default}]",
    )
    _add_sampling_flags(run, exclude="seed")  # it is an engine setting
    if named in (None, "run"):
        add_engine_settings(run)
    run.set_defaults(command=run_model)

    chat = commands.add_parser(
        "chat",
        help="chat with a running server",
        usage="%(prog)s [TEXT] [flags]",
        epilog=_CHAT_EXAMPLES,
    )
    _add_client_flags(
        chat, "Ask this one question (-: read it from standard input) instead of chatting."
    )
    chat.add_argument(
        "--system-prompt", metavar="TEXT", help="Instructions that the model gets before the chat."
    )
    chat.set_defaults(command=chat_with_server)

    complete = commands.add_parser(
        "complete",
        help="continue a text with a running server",
        usage="%(prog)s [TEXT] [flags]",
        epilog=_COMPLETE_EXAMPLES,
    )
    _add_client_flags(
        complete, "Continue this text (-: read it from standard input); default: ask for texts."
    )
    complete.set_defaults(command=complete_with_server)

    scale = commands.add_parser(
        "scale",
        help="change the number of a running server's engines",
        epilog=_SCALE_EXAMPLE,
    )
    scale.add_argument("size", type=int, metavar="N", help="How many engines there are to be.")
    _add_address_flags(scale)
    scale.add_argument(
        "--admin-key",
        metavar="KEY",
        help=f"Admin key; default: {ADMIN_KEY_VARIABLE}, else the API key.",
    )
    scale.set_defaults(command=scale_server, model=None)

    top = commands.add_parser(
        "top",
        help="watch a running server's engines: KV blocks, steps and requests",
        epilog=_TOP_EXAMPLES,
    )
    _add_address_flags(top)
    top.set_defaults(command=watch_server, model=None)
    explain = commands.add_parser(
        "explain",
        help="show why a request to a running server took as long as it did",
        usage="%(prog)s [ID] [flags]",
        epilog=_EXPLAIN_EXAMPLES,
    )
    explain.add_argument(
        "id",
        nargs="?",
        metavar="ID",
        help="Id of the answer or of the request (X-Request-Id); default: list recent requests.",
    )
    _add_address_flags(explain)
    explain.set_defaults(command=explain_request, model=None)

    listing = commands.add_parser("list", help="list the models on this machine")
    listing.set_defaults(command=list_models)

    pull = commands.add_parser(
        "pull", help="download a model from the Hugging Face hub", epilog=_PULL_EXAMPLE
    )
    pull.add_argument("model", metavar="MODEL", help="Hub id of the model (org/name), or its URL.")
    pull.add_argument("--revision", metavar="TEXT", help="Branch, tag or commit on the hub.")
    pull.add_argument(
        "--download-dir",
        metavar="DIR",
        help="Folder to download to; default: the hub client's cache.",
    )
    pull.set_defaults(command=pull_model)
    return [run, chat, complete, scale, top, explain, listing, pull]


def _add_sampling_flags(parser: argparse.ArgumentParser, exclude: str | None = None) -> None:
    group = parser.add_argument_group("sampling")
    for name, (kind, doc) in SAMPLING.items():
        if name != exclude:
            group.add_argument(
                "--" + name.replace("_", "-"),
                type=kind,
                action="append" if name == "stop" else "store",
                metavar={int: "N", float: "X", str: "TEXT"}[kind],
                default=argparse.SUPPRESS,
                help=doc,
            )


def _add_client_flags(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("text", nargs="?", metavar="TEXT", help=text)
    parser.add_argument("-q", "--quick", metavar="TEXT", help="The same as TEXT.")
    parser.add_argument("--model", help="Model to use; default: the server's first.")
    _add_address_flags(parser)
    _add_sampling_flags(parser)


def _add_address_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default=DEFAULT_URL, help=f"Address of the API [{DEFAULT_URL}].")
    parser.add_argument("--api-key", metavar="KEY", help=f"API key; default: {_KEYS}.")


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling flags that were given."""
    given = {name: getattr(args, name) for name in SAMPLING if hasattr(args, name)}
    check_sampling(given)
    return given


# run


def run_model(args: argparse.Namespace) -> int:
    """Run `octavo run`."""
    model, prompt = model_and_prompt(args.words, hasattr(args, "model"))
    kwargs = engine_kwargs(args, model)
    # Wrong settings are reported before torch is imported.
    config = EngineConfig.from_kwargs(**engine_settings(kwargs))
    params = _sampling(args)
    if prompt == _STDIN or (prompt is None and not sys.stdin.isatty()):
        _check_local(config)  # piped input may take long to arrive
        try:
            prompt = read_all()
        except ConfigError as error:
            raise ConfigError(f"{error}{_hint(args.words, model)}") from None
    if args.raw and args.system_prompt is not None:
        raise ConfigError(
            "--system-prompt is for a chat, and --raw continues texts; leave one of them out."
        )

    level = getattr(args, "log_level", settings_from_environment().get("log_level"))
    setup_logging(level or "warning", "text")
    try:
        llm = _load(kwargs, config, show_progress=level is None)
    except HubError as error:
        raise HubError(f"{error}{_hint(args.words, model)}") from None
    try:
        source = LocalModel(llm, config.model.model)
        has_template = bool(llm.get_tokenizer().chat_templates)
        if not has_template and args.system_prompt is not None:
            raise ConfigError(
                f"--system-prompt is for a chat, and {source.model} has no chat template; leave "
                "it out."
            )
        is_chat = has_template and not args.raw
        if prompt is not None and not is_chat:
            return _answer(source, prompt, params)
        session = Session(source, params, args.system_prompt, is_chat)
        if prompt is None:
            session.run()
            return 0
        return 130 if session.ask(prompt) else 0
    finally:
        llm.shutdown()


def _hint(words: list[str], model: str | None) -> str:
    """Return the end of an error if the only word may have been meant as a message."""
    if len(words) != 1 or model is None or "/" in model or os.path.exists(model):
        return ""
    return f" For a message of one word, use: octavo run {BUILTIN_MODEL} {shlex.quote(model)}"


def _load(kwargs: dict[str, Any], config: EngineConfig, *, show_progress: bool) -> LLM:
    """Load the model; with `show_progress` show that on a terminal."""
    from octavo.models.hub import resolve_folders

    resolve_folders(config)  # a download shows its own progress
    if not show_progress:
        from octavo.llm import LLM

        return LLM(**kwargs)
    with spinner(f"loading {config.model.model}") as show:
        from octavo.llm import LLM
        from octavo.worker import loading_bar

        loading_bar.on_progress = show
        try:
            return LLM(**kwargs)
        finally:
            loading_bar.on_progress = None


def _check_local(config: EngineConfig) -> None:
    """Raise ModelError if the model is a missing folder, or not a supported model."""
    from octavo.checkpoints.registry import open_checkpoint
    from octavo.models.hub import local_folder
    from octavo.models.registry import read_spec

    path = local_folder(config.model.model)
    if path is not None:
        read_spec(
            open_checkpoint(path, config.load.load_format, mmproj=config.load.mmproj), config.model
        )


def model_and_prompt(words: list[str], has_model: bool) -> tuple[str | None, str | None]:
    """Distinguish the model from the prompt.

    Args:
        words: the positional arguments.
        has_model: --model was given, so none of the arguments is a model.

    Raises:
        ConfigError: there are too many arguments.
    """
    most = 1 if has_model else 2
    if len(words) > most:
        raise ConfigError(
            f"There are {len(words)} arguments, at most {most} allowed; put the prompt in quotes."
        )
    if len(words) == 2:
        return words[0], words[1]
    if not words:
        return None, None
    if not has_model and _is_model(words[0]):
        return words[0], None
    return None, words[0]


def _is_model(word: str) -> bool:
    """Return True if a single word names a model: a path, a hub id, or any name.

    Only words with white space or characters that no name contains are texts.
    """
    if word == _STDIN:
        return False
    return os.path.exists(os.path.expanduser(word)) or _NAME.fullmatch(word) is not None


def _answer(source: Source, prompt: str, params: dict[str, Any]) -> int:
    """Continue one text; return the command's status."""
    note(f"{source.model} continues the text.")
    _, stopped = show_answer(source, source.complete(prompt, params))
    return 130 if stopped else 0


# chat, complete


def chat_with_server(args: argparse.Namespace) -> int:
    """Run `octavo chat`."""
    params, text = _sampling(args), _text(args)
    with _connect(args) as client:
        session = Session(client, params, args.system_prompt)
        if text is None:
            session.run()
            return 0
        return 130 if session.ask(text) else 0


def complete_with_server(args: argparse.Namespace) -> int:
    """Run `octavo complete`."""
    params, text = _sampling(args), _text(args)
    with _connect(args) as client:
        if text is not None:
            return _answer(client, text, params)
        reader = Reader(history_file())
        note(f"{client.model} continues what you type; Ctrl-C stops it, Ctrl-D leaves.")
        while (text := reader.read()) is not None:
            try:
                show_answer(client, client.complete(text, params))
            except OctavoError as error:
                print_error(str(error))
        return 0


def _text(args: argparse.Namespace) -> str | None:
    """Return the text of the arguments or of piped input; None: the user types in a terminal."""
    if args.text is not None and args.quick is not None:
        raise ConfigError("There are two texts, as an argument and with -q; give one.")
    text: str | None = args.quick if args.text is None else args.text
    if text == _STDIN or (text is None and not sys.stdin.isatty()):
        return read_all()
    return text


def _connect(args: argparse.Namespace, key: str | None = None) -> Any:
    from octavo.server import client

    key = key or args.api_key or next(iter(api_keys_from_environment().values()), None)
    return contextlib.closing(client.Client(args.url, key, args.model))


def scale_server(args: argparse.Namespace) -> int:
    """Run `octavo scale`."""
    key = args.admin_key or next(iter(admin_keys_from_environment()), None)
    with _connect(args, key) as client:
        print(harmless(client.scale(args.size)))
    return 0


def watch_server(args: argparse.Namespace) -> int:
    """Run `octavo top`."""
    from octavo.terminal.top import run

    with _connect(args) as client, contextlib.suppress(KeyboardInterrupt):
        run(client, args.url)
    return 0


def explain_request(args: argparse.Namespace) -> int:
    """Run `octavo explain`."""
    from octavo.terminal.explanation import described, listed

    with _connect(args) as client:
        found = listed(client.recent_requests()) if args.id is None else None
        print(harmless(described(client.explain(args.id)) if found is None else found))
    return 0


# list, pull


def list_models(args: argparse.Namespace) -> int:
    """Run `octavo list`."""
    from octavo.models.hub import list_models as find

    rows = [("NAME", "SIZE", "WHERE")]
    for model in find():
        where = "built in" if model.is_builtin else str(model.path)
        rows.append((model.name, f"{model.nbytes / 1e6:,.0f} MB", where))
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for name, size, where in rows:
        print(harmless(f"{name:{widths[0]}}  {size:>{widths[1]}}  {where}"))
    return 0


def pull_model(args: argparse.Namespace) -> int:
    """Run `octavo pull`."""
    from octavo.checkpoints.registry import open_checkpoint
    from octavo.config import ModelConfig
    from octavo.models.hub import resolve_model
    from octavo.models.registry import read_spec

    model, revision = read_hub_address(args.model)
    where = {"revision": args.revision or revision, "download_dir": args.download_dir}
    # Description first: unsupported models are not downloaded.
    described = open_checkpoint(resolve_model(model, **where, load_format="dummy"))
    read_spec(described, ModelConfig(trust_remote_code=True))
    print(f"{model} is in {resolve_model(model, **where)}")
    return 0
