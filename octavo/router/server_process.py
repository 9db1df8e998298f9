"""Server that a router has started: `octavo serve`, which ends when the router does.

Arguments: the router's process id, and the words after `octavo serve`.
"""

from __future__ import annotations

import os
import signal
import sys

from octavo.system.device import signal_at_parents_end

if __name__ == "__main__":
    signal_at_parents_end(signal.SIGTERM)  # kept by the program of execv
    if os.getppid() != int(sys.argv[1]):  # the router has ended already
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", "octavo", "serve", *sys.argv[2:]])
