"""Entry point of the command `octavo` and of `python -m octavo`."""

import os
import signal
import sys


def main() -> int:
    """Run the command line; return its status.

    Importing its modules takes a tenth of a second, in which Ctrl-C also ends the process quietly.
    """
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # SIGINT is not ignored, as with nohup or in a script
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from octavo.system.garbage import modules_stay
    from octavo.system.hidden_keys import hide_keys

    hide_keys()
    with modules_stay():
        from octavo.cli import main as run

    try:
        signal.signal(signal.SIGINT, usual)
        return run()
    except KeyboardInterrupt:
        return 130
    finally:
        # Ctrl-C may have interrupted exec() of a text, which dataclasses call. Python remembers
        # it until the next such exec(), and `python -m` would end with the signal, not the status.
        exec("")


if __name__ == "__main__":
    sys.exit(main())
