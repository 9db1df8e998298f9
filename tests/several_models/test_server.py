"""Server process of a model: its log, its failures, its end."""

import asyncio
import json
import sys
import time

import pytest

from octavo.errors import OctavoError
from octavo.router.pool import Pool
from octavo.several_models import server as server_module
from octavo.several_models.server import ModelServer, ModelStarter, _LabelledServer, labelled


def test_lines_of_the_log_show_the_model():
    assert labelled("2026 INFO x\n", "a\nb") == "[a b] 2026 INFO x\n"
    assert json.loads(labelled('{"level": "info"}\n', 'a"b')) == {"model": 'a"b', "level": "info"}


@pytest.fixture
def run_code(monkeypatch, tmp_path):
    """Return a function that loads a model whose server runs the given code."""

    def run(code, on_loss=lambda error: None):
        def start(flags, upstream, kind, environment, **more):
            return kind([sys.executable, "-c", code], **more)

        monkeypatch.setattr(server_module, "start_local", start)
        prepared = []

        async def prepare():
            prepared.append(True)

        async def main():
            pool = Pool(0.02, 1.0)
            starter = ModelStarter("m", tmp_path / "socket")
            server = ModelServer(starter, pool, 0.1, prepare, on_loss)
            try:
                await server.load()
            finally:
                await server.unload()
                assert not pool.upstreams
                assert prepared

        asyncio.run(asyncio.wait_for(main(), 60))

    return run


def test_the_reason_of_a_failed_load_is_the_servers_own(run_code, capfd, monkeypatch):
    """Also if it is read some time after the end of the process has been noticed."""
    read = _LabelledServer._pass_on_lines
    monkeypatch.setattr(
        _LabelledServer,
        "_pass_on_lines",
        lambda server: (server.wait(), time.sleep(0.3), read(server)),
    )
    code = "import sys; print('octavo: error: no such thing.', file=sys.stderr); sys.exit(2)"
    with pytest.raises(OctavoError, match=r"m failed: no such thing\."):
        run_code(code)
    assert "[m] octavo: error: no such thing." in capfd.readouterr().err


def test_a_server_that_ends_without_a_reason(run_code):
    with pytest.raises(OctavoError, match="m ended with status 3 before it was ready"):
        run_code("import sys; sys.exit(3)")
