"""Interactive chat: questions, answers, and commands that begin with a slash."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import ConfigError, OctavoError, RequestError
from octavo.sampling_params import SamplingParams
from octavo.terminal.answers import Message, Source, show_answer
from octavo.terminal.lines import Reader, history_file
from octavo.terminal.screen import note, print_error, write

SAMPLING: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "Maximum number of tokens to generate; default: as many as fit."),
    "temperature": (float, "Randomness; 0: always the most probable token."),
    "top_p": (float, "Keep the most probable tokens whose probabilities add up to this."),
    "top_k": (int, "Keep this many most probable tokens; 0: all."),
    "min_p": (float, "Drop tokens less probable than this share of the best one."),
    "repetition_penalty": (float, "Above 1: repeat less."),
    "presence_penalty": (float, "Above 0: repeat less, -2 to 2."),
    "frequency_penalty": (float, "Above 0: repeat less, the more often, -2 to 2."),
    "stop": (str, "Text that ends the answer; may be given several times."),
    "seed": (int, "Seed of the sampling."),
}
"""Settable parameters of a request: type and help by name, as in SamplingParams and the API."""


def check_sampling(params: dict[str, Any]) -> None:
    """Reject wrong sampling parameters before a request is sent.

    Raises:
        ConfigError: a parameter is wrong; the message names it, its value and the allowed values.
    """
    try:
        SamplingParams(**params)
    except RequestError as error:
        raise ConfigError(error.message) from None


@dataclass
class Session:
    """Chat with a model.

    Args:
        source: the model or the server that answers.
        params: sampling parameters by name; the others are the model's own.
        system: the system prompt.
        is_chat: False if the model continues each text by itself, without a conversation.
    """

    source: Source
    params: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    is_chat: bool = True
    messages: list[Message] = field(default_factory=list)
    """Conversation without the system prompt: alternating questions and answers."""

    def run(self) -> None:
        """Run until the user leaves."""
        reader = Reader(history_file())
        keys = "Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands."
        if self.is_chat:
            note(f"{self.source.model}: {keys}")
        else:
            note(
                f"{self.source.model} continues the texts that you type, without a chat "
                f"template. {keys}"
            )
        while (text := reader.read()) is not None:
            try:
                if not self.take(text):
                    return
            except OctavoError as error:
                print_error(str(error))
            except KeyboardInterrupt:
                write("\n")

    def take(self, text: str) -> bool:
        """Handle a message; return False if it ends the session.

        Raises:
            OctavoError: the message failed; the conversation is unchanged.
        """
        if not text.startswith("/") or "\n" in text:
            self.ask(text)
            return True
        name, _, rest = text[1:].partition(" ")
        commands = self._commands()
        command = commands.get(name)
        if command is None:
            near = difflib.get_close_matches(name, commands, n=1)
            hint = f"did you mean /{near[0]}?" if near else "/help lists the commands."
            raise ConfigError(
                f"Unknown command /{name}; {hint} To say this to the model, begin with a space."
            )
        if command.do is None:
            return False
        command.do(self, rest.strip())
        return True

    def ask(self, question: str) -> bool:
        """Ask and show the answer; keep the part of an answer that Ctrl-C ended.

        Returns:
            True if Ctrl-C ended it.

        Raises:
            OctavoError: the request was rejected or failed; the conversation is unchanged.
        """
        asked: list[Message] = [*self.messages, {"role": "user", "content": question}]
        if self.is_chat:
            sent = asked
            if self.system is not None:
                sent = [{"role": "system", "content": self.system}, *asked]
            pieces = self.source.chat(sent, self.params)
        else:
            asked = asked[-1:]
            pieces = self.source.complete(question, self.params)
        answer, stopped = show_answer(self.source, pieces)
        if answer:  # otherwise two questions would be adjacent
            self.messages = [*asked, {"role": "assistant", "content": answer}]
        return stopped

    def _commands(self) -> dict[str, _Command]:
        """Return the commands of this session."""
        return {
            name: command
            for name, command in _COMMANDS.items()
            if self.is_chat or not command.is_for_chats
        }

    def _help(self, rest: str) -> None:
        commands = self._commands()
        width = max(len(f"{name} {command.takes}") for name, command in commands.items())
        for name, command in commands.items():
            write(f"/{f'{name} {command.takes}':{width}}  {command.doc}\n")
        write('"""' + " " * (width - 2) + "  Begins and ends a message of several lines.\n")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        name = name.replace("-", "_")
        if not name:
            values = {known: self._shown(known) for known in SAMPLING}
            width = max(map(len, values.values()))
            for known, (_, doc) in SAMPLING.items():
                write(f"{known:20} {values[known]:{width}}  {doc}\n")
            return
        if name not in SAMPLING:
            raise ConfigError(f"{name!r} cannot be set; choose one of {', '.join(SAMPLING)}.")
        kind = SAMPLING[name][0]
        params = {key: known for key, known in self.params.items() if key != name}
        if value.strip():
            try:
                params[name] = [value.strip()] if name == "stop" else kind(value)
            except ValueError:
                needs = "a whole number" if kind is int else "a number"
                raise ConfigError(f"{name} is {needs}, not {value.strip()!r}.") from None
        check_sampling(params)
        self.params = params
        note(f"{name}: {self._shown(name)}")

    def _shown(self, name: str) -> str:
        """Return the value of a sampling parameter: the set one, or else the model's own."""
        if name in self.params:
            return str(self.params[name])
        default = self.source.defaults.get(name)
        return "default" if default in (None, []) else f"{default} (default)"

    def _show(self, rest: str) -> None:
        write(f"model: {self.source.model}\n")
        write(f"system: {'(none)' if self.system is None else self.system}\n")
        for name, value in self.params.items():
            write(f"{name}: {value}\n")
        write(f"messages: {len(self.messages)}\n")

    def _system(self, rest: str) -> None:
        self.system = rest or None

    def _save(self, rest: str) -> None:
        path = _file(rest, "/save")
        saved = _Saved(self.source.model, self.system, self.params, self.messages)
        data = msgspec.json.format(msgspec.json.encode(saved)) + b"\n"
        try:
            path.write_bytes(data)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None
        note(f"{len(self.messages)} messages saved in {path}")

    def _load(self, rest: str) -> None:
        path = _file(rest, "/load")
        try:
            saved = msgspec.json.decode(path.read_bytes(), type=_Saved)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path} is not a chat saved by /save: {error}.") from None
        unknown = saved.params.keys() - SAMPLING.keys()
        if unknown:
            raise ConfigError(f"{path} sets {sorted(unknown)[0]!r}, which cannot be set.")
        check_sampling(saved.params)
        turns = zip(saved.messages, itertools.cycle(("user", "assistant")))
        if len(saved.messages) % 2 or not all(
            message.keys() == {"role", "content"} and message["role"] == role
            for message, role in turns
        ):
            raise ConfigError(f"{path}: messages must be the user's and the assistant's in turn.")
        self.system, self.params, self.messages = saved.system, saved.params, saved.messages
        note(f"{len(self.messages)} messages loaded from {path}")

    def _clear(self, rest: str) -> None:
        self.messages = []
        note("The conversation starts afresh.")

    def _regen(self, rest: str) -> None:
        if not self.messages:
            raise ConfigError("There is no answer yet to regenerate.")
        before, params = self.messages, self.params
        question = before[-2]["content"]
        self.messages = before[:-2]
        if "seed" in params:  # the same seed would repeat the answer
            self.params = {**params, "seed": params["seed"] + 1}
        try:
            self.ask(question)
        finally:
            if len(self.messages) < len(before):
                self.messages, self.params = before, params


class _Saved(msgspec.Struct, forbid_unknown_fields=True):
    """Chat in a file, as JSON."""

    model: str
    """Name of its model; for information only."""
    system: str | None
    params: dict[str, Any]
    messages: list[dict[str, str]]


@dataclass(frozen=True)
class _Command:
    takes: str
    doc: str
    do: Callable[[Session, str], None] | None
    """Function of the command; None: it ends the session."""
    is_for_chats: bool = False
    """True if it needs a conversation."""


_COMMANDS = {
    "help": _Command("", "Lists the commands.", Session._help),
    "set": _Command(
        "[NAME [VALUE]]",
        "Sets a sampling parameter or resets it; alone: lists all with their values.",
        Session._set,
    ),
    "show": _Command("", "Shows model, system prompt and what is set.", Session._show),
    "system": _Command(
        "[TEXT]", "Sets the system prompt; without a text, none.", Session._system, True
    ),
    "save": _Command("FILE", "Saves the conversation.", Session._save, True),
    "load": _Command("FILE", "Loads a saved conversation.", Session._load, True),
    "clear": _Command("", "Forgets the conversation.", Session._clear, True),
    "regen": _Command("", "Regenerates the last answer.", Session._regen),
    "bye": _Command("", "Leaves, as Ctrl-D does.", None),
}


def _file(rest: str, command: str) -> Path:
    if not rest:
        raise ConfigError(f"{command} needs the name of a file.")
    return Path(rest).expanduser()
