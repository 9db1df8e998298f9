"""Input of the user: editing, history across runs, a paste as one message."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import msgspec

from octavo.config import cache_folder
from octavo.errors import ConfigError
from octavo.terminal.screen import note, print_error, write

PROMPT = ">>> "
_MORE = "... "
_QUOTES = '"""'
_MOST_LINES = 1000


def history_file() -> Path | None:
    """Return the file that keeps typed messages; None without a cache folder."""
    folder = cache_folder()
    return None if folder is None else folder / "history.jsonl"


class Reader:
    """Reader of the user's messages in the terminal.

    Each line of the history file is one message as a JSON string, as a message may have several
    lines; only its owner may read it. Without a usable file, the history only lasts for this run.

    Args:
        history: the file.
    """

    def __init__(self, history: Path | None) -> None:
        import readline

        self._readline = readline
        self._history = history
        # A paste of any number of lines is one message (with GNU readline; libedit lacks
        # the setting). This class stores whole messages itself.
        readline.parse_and_bind("set enable-bracketed-paste on")
        readline.set_auto_history(False)
        self._load()

    def read(self) -> str | None:
        """Return the next message that is not empty; None at the end of the input (Ctrl-D).

        Ctrl-C discards the typed text.
        """
        while True:
            try:
                message = self._read_message()
            except EOFError:
                write("\n")
                return None
            except KeyboardInterrupt:
                write("\n")
                note("Ctrl-D or /bye leaves.")
                continue
            except UnicodeDecodeError as error:
                print_error(f"What was typed is not text in {error.encoding}; type it again.")
                continue
            if message.strip():
                return message

    def _read_message(self) -> str:
        text = input(PROMPT)
        typed = text
        if text.startswith(_QUOTES):
            text = text.removeprefix(_QUOTES)
            while not text.rstrip().endswith(_QUOTES):
                line = input(_MORE)
                typed += "\n" + line
                text += "\n" + line
            text = text.rstrip().removesuffix(_QUOTES).strip("\n")
        self._remember(typed)
        return text

    def _load(self) -> None:
        if self._history is None:
            return
        try:
            lines = self._history.read_bytes().splitlines()
        except OSError:
            return
        kept = lines[-_MOST_LINES:]
        for line in kept:
            with contextlib.suppress(msgspec.MsgspecError):  # a line may be cut off by a full disk
                self._readline.add_history(msgspec.json.decode(line, type=str))
        if len(lines) > 2 * _MOST_LINES:
            self._write("w", b"".join(line + b"\n" for line in kept))

    def _remember(self, typed: str) -> None:
        size = self._readline.get_current_history_length()
        if not typed.strip() or (size and self._readline.get_history_item(size) == typed):
            return
        self._readline.add_history(typed)
        self._write("a", msgspec.json.encode(typed) + b"\n")

    def _write(self, mode: str, data: bytes) -> None:
        if self._history is None:
            return

        def private(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        with contextlib.suppress(OSError):
            self._history.parent.mkdir(parents=True, exist_ok=True)
            with open(self._history, mode + "b", opener=private) as file:
                file.write(data)


def read_all() -> str:
    """Read all of standard input as one prompt, without its last newline.

    Raises:
        ConfigError: standard input is empty, or not text.
    """
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"Standard input is not text in UTF-8: {error}.") from None
    if not text.strip():
        raise ConfigError("Standard input is empty; give the prompt there or as an argument.")
    return text.removesuffix("\n")
