"""Output to the terminal: answers with wrapped words, notes and errors."""

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

# Control characters that a terminal interprets, except for line feed and tab.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_TAB = 8


def write(text: str) -> None:
    """Write to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Print a line that is not part of an answer on stderr, dim on a terminal."""
    if sys.stderr.isatty():
        console = _console()
        style = "" if console.no_color else "dim"
        console.print(harmless(text), style=style, markup=False, emoji=False)
    else:
        print(text, file=sys.stderr)


def print_error(message: str) -> None:
    """Print an error in one line on stderr, red on a terminal."""
    line = "octavo: error: " + " ".join(message.split())
    if sys.stderr.isatty():
        _console().print(harmless(line), style="red", markup=False, emoji=False)
    else:
        print(line, file=sys.stderr)


@contextlib.contextmanager
def spinner(text: str) -> Iterator[Callable[[str], None]]:
    """Show progress in a terminal until the first log line.

    Yields a function that changes the text.
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
    """Replace control characters by visible signs."""
    return _CONTROL.sub(lambda match: _picture(match[0]), text)


def show(pieces: Iterable[str]) -> None:
    """Write an answer as it arrives, and end its line.

    On a terminal, words are wrapped and control characters are made visible; a file or a pipe
    receives the unchanged text. If the pieces end with an exception, all text so far is shown.
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
    """Line breaker between words, for text that arrives in pieces.

    A word is held back until its end arrives and its position is known. Between wide characters
    (Chinese, Japanese ...) lines may break anywhere.

    Args:
        width: columns of the terminal; None: its width at the beginning of each line.
    """

    def __init__(self, width: int | None = None) -> None:
        self._given = width
        self._column = 0
        self._spaces = ""
        self._word = ""
        self._word_width = 0
        self._width = self._measure()

    def feed(self, text: str) -> str:
        """Add a piece; return the text that may be written now."""
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
        """Return the remaining text at the end."""
        return self._flush()

    def _place(self) -> int:
        return self._column + len(self._spaces)

    def _flush(self) -> str:
        """Return the held word, on this line or on the next one."""
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
    """Return a visible sign for a control character."""
    if char < " ":
        return chr(0x2400 + ord(char))
    return "\u2421" if char == "\x7f" else "\ufffd"


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)
