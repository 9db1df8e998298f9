"""The command `octavo`, and `python -m octavo`."""

import os
import signal
import sys


def main() -> int:
    """Run the command line; returns its status.

    Its modules take half a second to import, in which Ctrl-C ends the process quietly, too.
    """
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # not where it is ignored: behind nohup, or in a script
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from octavo.system.hidden_keys import hide_keys

    hide_keys()
    from octavo.cli import main as run

    try:
        signal.signal(signal.SIGINT, usual)
        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
