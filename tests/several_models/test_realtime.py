"""Sessions of /v1/realtime at a server of several models, with servers in this process."""

import asyncio
import contextlib
import json
import socket

import pytest

from octavo.router.pool import Upstream
from octavo.server.serve import serve_app
from octavo.several_models.app import build_app
from tests.router.test_realtime import COMPLETED, FakeEar, exceptions, last_of, text, until
from tests.several_models.test_app import Served

client = pytest.importorskip("websockets.asyncio.client", reason="websockets is not installed")

MODELS = {"gen": ["generate"], "ear": ["transcribe"], "ear2": ["transcribe"]}


class EarServer:
    """Server of one model of the set, in place of a process."""

    num_restarts = 0

    def __init__(self, model, ear):
        self.pool, self.name, self.ear, self.loads = model.pool, model.names[0], ear, 0

    async def load(self):
        self.loads += 1
        made = Upstream(self.name, self.ear.url)
        self.pool.add(made)
        while not made.ready:
            await asyncio.sleep(0.005)

    async def unload(self):
        for made in list(self.pool.upstreams):
            await self.pool.remove(made)


@contextlib.asynccontextmanager
async def models(**several):
    """Yield the state of a server, its address, and the servers of its models by name."""
    async with contextlib.AsyncExitStack() as stack:
        ears = {name: await stack.enter_async_context(FakeEar()) for name in MODELS}
        ears["gen"].status = 400
        served = Served(MODELS, **several)
        state = served.state
        for model in state.models:
            model.backend = EarServer(model, ears[model.names[0]])
        listener = socket.create_server(("127.0.0.1", 0))
        address = f"ws://127.0.0.1:{listener.getsockname()[1]}/v1/realtime"
        serving = asyncio.create_task(serve_app(state, build_app(state), listener, id))
        try:
            await until(lambda: state.ready)
            yield state, address, ears
        finally:
            state.on_failure()
            await serving
            await state.close()
            served._patch.undo()


def update(model=None):
    transcription = {} if model is None else {"model": model}
    audio = {"input": {"transcription": transcription}}
    session = {"type": "transcription", "audio": audio}
    return json.dumps({"type": "session.update", "session": session})


@pytest.mark.parametrize(
    ("query", "first", "model"),
    [
        ("?model=ear2", "hello", "ear2"),
        ("", update("ear2"), "ear2"),
        ("?intent=transcription", update(), "ear"),
        ("", "hello", "ear"),
        ("", '{"type":"session.update","session":5}', "ear"),
    ],
)
def test_the_model_of_a_session(query, first, model):
    async def main():
        async with models() as (state, address, ears):
            async with client.connect(address + query) as session:
                assert json.loads(await session.recv())["type"] == "session.created"
                await session.send(first)
                assert await session.recv() == first
                assert [name for name, ear in ears.items() if ear.sessions] == [model]
                assert [m.num_users for m in state.models if m.names[0] == model] == [1]
                other = "ear" if model == "ear2" else "ear2"
                await session.send(update(other))
                error = json.loads(await session.recv())["error"]
                assert error["param"] == "model"
                assert f"has the model '{model}'" in error["message"]
                await session.send(update(model))
                assert await session.recv() == update(model)
            await until(lambda: all(m.num_users == 0 for m in state.models))

    asyncio.run(main())


def test_models_that_are_refused():
    async def main():
        async with models() as (_, address, _):
            for model, status in (("x", 404), ("gen", 400)):
                with pytest.raises(exceptions.InvalidStatus) as caught:
                    await client.connect(f"{address}?model={model}")
                assert caught.value.response.status_code == status
                async with client.connect(address) as session:
                    await session.recv()
                    await session.send(update(model))
                    event, code, _ = await last_of(session)
                    assert (event["type"], code) == ("error", 1008)
                    assert event["event_id"].startswith("event_")
                    assert event["error"]["event_id"] is None

    asyncio.run(main())


def test_a_model_that_leaves_ends_its_sessions():
    """Their items get their transcripts first; then the other model is loaded."""

    async def main():
        async with models(max_loaded_models=1) as (state, address, ears):
            async with client.connect(f"{address}?model=ear") as session:
                await session.send("!commit")
                for _ in range(2):
                    await session.recv()
                waiting = asyncio.create_task(client.connect(f"{address}?model=ear2").__aenter__())
                await until(lambda: state.find("ear2").num_waiting == 1)
                assert state.find("ear").num_users == 1
                (connection,) = ears["ear"].made.connections
                await connection.send(text(COMPLETED))
                assert json.loads(await session.recv()) == COMPLETED
                event, code, _ = await last_of(session)
                assert (event["error"]["code"], code) == ("unavailable", 1001)
                assert "'ear' is about to be unloaded" in event["error"]["message"]
            other = await waiting
            assert json.loads(await other.recv())["type"] == "session.created"
            assert state.find("ear").state == "unloaded"
            await other.close()

    asyncio.run(main())


def test_a_client_that_goes_wants_its_model_no_longer():
    async def main():
        async with models(max_loaded_models=1) as (state, address, _):
            ear2, release = state.find("ear2"), asyncio.Event()
            ear2.backend.load = release.wait
            begun = client.connect(address, close_timeout=0.1)
            for connecting in (client.connect(f"{address}?model=ear2"), begun):
                task = asyncio.create_task(connecting.__aenter__())
                if connecting is begun:
                    session = await task
                    await session.send(update("ear2"))
                await until(lambda: ear2.num_waiting == 1)
                assert state.sessions._held.total() == 1
                if connecting is begun:
                    session.transport.abort()
                else:
                    task.cancel()
                await until(lambda: not ear2.num_waiting and not state.sessions._held)
            release.set()

    asyncio.run(main())


def test_a_server_that_is_lost_at_the_first_message():
    async def main():
        async with models() as (_, address, ears):
            ears["ear"].greets = False
            async with client.connect(address) as session:
                await session.recv()
                await session.send("!die")
                event, code, _ = await last_of(session)
                assert (event["error"]["code"], code) == ("unavailable", 1011)

    asyncio.run(main())


def test_a_silent_client_ends(monkeypatch):
    monkeypatch.setattr("octavo.several_models.realtime.IDLE_SECONDS", 0.05)

    async def main():
        async with models() as (_, address, _), client.connect(address) as session:
            event, code, _ = await last_of(session)
            assert (event["error"]["code"], code) == ("session_idle", 1001)

    asyncio.run(main())
