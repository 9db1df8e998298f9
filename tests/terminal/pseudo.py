"""Program in a pseudo-terminal, and simulated typing."""

import codecs
import errno
import fcntl
import os
import pty
import re
import select
import struct
import termios
import time


class NoInputError(AssertionError):
    """The program has printed nothing since the typing began.

    On a busy machine some kernels deliver no input to a new pseudo-terminal at all, not even the
    signal of Ctrl-C: the program waits in select() on a terminal in the right mode.
    """


class Terminal:
    """Program in its own terminal.

    `output` is all its output, as the terminal received it.
    """

    def __init__(self, *argv, columns=80, env=None):
        self.output = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._seen = 0
        self._status = None
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            try:
                variables = {"TERM": "xterm", "PYTHONUNBUFFERED": "1"}
                dropped = {"COLUMNS", "LINES", "NO_COLOR", "INPUTRC"}
                kept = {k: v for k, v in os.environ.items() if k not in dropped}
                os.execve(argv[0], argv, kept | variables | (env or {}))
            finally:
                os._exit(127)
        size = struct.pack("HHHH", 24, columns, 0, 0)
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, size)

    def __enter__(self):
        return self

    def __exit__(self, *args):
        if self._status is None:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
        os.close(self._fd)

    def type(self, text):
        os.write(self._fd, text.encode())

    def paste(self, text):
        """Paste as terminals do: line ends are returns, with a mark before and after."""
        self.type("\x1b[200~" + text.replace("\n", "\r") + "\x1b[201~")

    def wait_for(self, pattern):
        """Wait until the output since the last call matches; return it up to the match's end."""
        end = time.monotonic() + 100
        while (match := re.compile(pattern).search(self.output, self._seen)) is None:
            assert time.monotonic() < end, self.output
            assert self._read(), self.output
        begin, self._seen = self._seen, match.end()
        return self.output[begin : match.end()]

    def interrupt(self, pattern):
        """Press Ctrl-C until the output matches: readline may miss one as it begins a line."""
        begin = self.output
        for seconds in (2, 4, 8, 16, 32):  # a busy machine may be late
            self.type("\x03")
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                if re.compile(pattern).search(self.output, self._seen):
                    self.wait_for(pattern)
                    return
                assert self._read(), self.output
        raise NoInputError(begin) if self.output == begin else AssertionError(self.output)

    def wait(self):
        """Wait for the program's end; return its status."""
        while self._read():
            pass
        _, status = os.waitpid(self.pid, 0)
        self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def _read(self):
        """Read output for up to a second; return False at the end."""
        if not select.select([self._fd], [], [], 1)[0]:
            return True
        try:
            data = os.read(self._fd, 65536)
        except OSError as error:  # Linux raises it when the program has ended
            if error.errno != errno.EIO:
                raise
            return False
        self.output += self._decoder.decode(data)
        return bool(data)
