"""Writing to the terminal: answers with words wrapped, notes and errors beside them."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# What a terminal takes as an order (move, erase, rename the window ...), apart from line and tab.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_TAB = 8


def write(text: str) -> None:
    """Writes to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A line that is not part of an answer: on stderr, dim where that is a terminal."""
    if sys.stderr.isatty():
        console = _console()
        style = "" if console.no_color else "dim"
        console.print(harmless(text), style=style, markup=False, emoji=False)
    else:
        print(text, file=sys.stderr)


def print_error(message: str) -> None:
    """The line of an error: on stderr, red where that is a terminal."""
    line = "octavo: error: " + " ".join(message.split())
    if sys.stderr.isatty():
        _console().print(harmless(line), style="red", markup=False, emoji=False)
    else:
        print(line, file=sys.stderr)


@contextlib.contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """Show in a terminal that something takes a while; the first log line takes its place.

    What it yields changes the text.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.markup import escape

    with _console().status(escape(harmless(text)), refresh_per_second=8) as status:

        def stop(record: logging.LogRecord) -> bool:
            status.stop()
            return True

        handlers = logging.getLogger("octavo").handlers
        for handler in handlers:
            handler.addFilter(stop)
        try:
            yield lambda text: status.update(escape(harmless(text)))
        finally:
            for handler in handlers:
                handler.removeFilter(stop)


def harmless(text: str) -> str:
    """The text without what would command a terminal: control characters become visible."""
    return _CONTROL.sub(lambda match: _picture(match[0]), text)


def show(pieces: Iterable[str]) -> None:
    """Writes an answer as it comes, and ends its line.

    In a terminal its words are wrapped and control characters are shown, not obeyed; a file or a
    pipe gets the text as it is. However the pieces end, what came is shown.
    """
    wrapper = Wrapper() if sys.stdout.isatty() else None
    came = False
    try:
        for piece in pieces:
            came = came or bool(piece)
            write(piece if wrapper is None else wrapper.feed(piece))
    except BaseException:
        if came:
            write(_last(wrapper))
        raise
    write(_last(wrapper))


def _last(wrapper: Wrapper | None) -> str:
    return "\n" if wrapper is None else wrapper.end() + "\n"


class Wrapper:
    """Breaks lines between words, for text that comes in pieces.

    A word is held back until it is known where it goes: until its end comes. Between wide
    characters (Chinese, Japanese ...) lines may break anywhere.

    Args:
        width: columns of the terminal; None: what it has when a line begins.
    """

    def __init__(self, width: int | None = None) -> None:
        self._given = width
        self._column = 0
        self._spaces = ""
        self._word = ""
        self._word_width = 0
        self._width = self._measure()

    def feed(self, text: str) -> str:
        """Takes in a piece; returns what may be written now."""
        from rich.cells import cell_len

        out: list[str] = []
        for char in text:
            if char == "\n":
                out.append(self._flush() + "\n")
                self._new_line()
            elif char in " \t":
                out.append(self._flush())
                self._spaces += char if char == " " else " " * (_TAB - self._place() % _TAB)
            elif _CONTROL.match(char):
                self._word += _picture(char)
                self._word_width += 1
            else:
                wide = cell_len(char)
                if self._word and wide > 1:
                    out.append(self._flush())
                if self._word_width + wide > self._width:  # longer than a line
                    out.append(self._flush())
                self._word += char
                self._word_width += wide
        return "".join(out)

    def end(self) -> str:
        """What is left to be written at the end of the text."""
        return self._flush()

    def _place(self) -> int:
        return self._column + len(self._spaces)

    def _flush(self) -> str:
        """The word that is held back, on this line or on the next one."""
        if not self._word:
            return ""
        if self._column and self._place() + self._word_width > self._width:
            self._new_line()
            out = "\n" + self._word
            self._column = self._word_width
        else:
            out = self._spaces + self._word
            self._column = self._place() + self._word_width
        self._spaces, self._word, self._word_width = "", "", 0
        return out

    def _new_line(self) -> None:
        self._column, self._spaces = 0, ""
        self._width = self._measure()

    def _measure(self) -> int:
        return max(self._given or shutil.get_terminal_size().columns, 10)


def _picture(char: str) -> str:
    """A visible sign for a control character."""
    if char < " ":
        return chr(0x2400 + ord(char))
    return "\u2421" if char == "\x7f" else "\ufffd"


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)
