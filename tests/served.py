"""Stand-in for the server of `octavo serve`."""

import sys
from types import SimpleNamespace

from octavo.fleet import process as process_module


def stand_in(monkeypatch, seen):
    """Make `octavo serve` put its settings into `seen`, or call it; it starts nothing."""

    def run_server(server, engine, process=None, what_if=None):
        if callable(seen):
            return seen(server, engine)
        seen.update(server=server, engine=engine)
        return 0

    process = SimpleNamespace(shutdown=lambda timeout: None)
    monkeypatch.setattr(process_module, "CoreProcess", lambda warm: process)
    module = SimpleNamespace(run_server=run_server)
    monkeypatch.setitem(sys.modules, "octavo.server.run", module)
    node = SimpleNamespace(run_node=run_server)
    monkeypatch.setitem(sys.modules, "octavo.fleet.node", node)
