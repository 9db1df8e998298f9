"""Adapters of a server as models: loading, unloading, and requests that name them."""

import asyncio

import pytest

from octavo.config import EngineConfig
from octavo.server import adapter_table
from octavo.server.adapter_table import AdapterTable, make_table
from tests.server.fake_engine import FakeAsyncLLM, serving, with_server

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def engine(**settings):
    settings = {"enable_lora": True, "lora_root": "/adapters", **settings}
    return lambda: FakeAsyncLLM(
        config=EngineConfig.from_kwargs(served_model_name=["m"], **settings)
    )


async def names(served):
    return [it["id"] for it in (await served.http.get("/v1/models")).json()["data"]]


def test_the_adapters_of_the_settings_are_models():
    async def scenario(served):
        assert await names(served) == ["m", "a"]
        (card,) = [
            it for it in (await served.http.get("/v1/models")).json()["data"] if it["parent"]
        ]
        assert (card["id"], card["parent"], card["root"]) == ("a", "m", "/x/a")
        answer = (await served.complete(model="a")).json()
        assert answer["model"] == "a"
        assert (await served.complete(model="b")).status_code == 404

    with_server(scenario, engine(lora_modules=["a=/x/a"]))


def test_a_request_passes_its_adapter_to_the_engine():
    seen = []

    async def scenario(served):
        process = served.engine.process

        async def spy(prompt, params, request_id, options, special):
            seen.append(options.adapter)
            return await process(prompt, params, request_id, options, special)

        served.engine.process = spy
        await served.post(LOAD, lora_name="a", lora_path="one")
        for model in ("m", "a"):
            await served.complete(model=model)
            await served.chat(model=model)
        body = {"lora_path": "two", "draft_path": "drafter", "load_inplace": True}
        await served.post(LOAD, lora_name="a", **body)
        await served.complete(model="a")

    with_server(scenario, engine(), enable_admin=True)
    assert [it and it.key for it in seen] == [
        *(None, None),
        *("content of /adapters/one",) * 2,
        "content of /adapters/two+of /adapters/drafter",
    ]


def test_wrong_loads():
    async def scenario(served):
        async def load(status, said, **body):
            answer = await served.post(LOAD, **body)
            assert (answer.status_code, said in answer.text) == (status, True), answer.text

        await load(200, '"a"', lora_name="a", lora_path="x")
        await load(400, "is loaded already", lora_name="a", lora_path="y")
        await load(400, "is the name of the model", lora_name="m", lora_path="x")
        await load(400, "is damaged", lora_name="b", lora_path="bad")
        await load(400, "lora_name", lora_name="", lora_path="x")
        await load(400, "lora_path", lora_name="b")
        await load(400, "draft_path", lora_name="b", lora_path="x", draft_path="")
        assert await names(served) == ["m", "a"]
        assert (await served.post(UNLOAD, lora_name="b")).status_code == 404
        answer = await served.post(UNLOAD, lora_name="a", lora_int_id=1)
        assert answer.json() == {"id": "a", "object": "model", "deleted": True}
        assert await names(served) == ["m"]

    with_server(scenario, engine(), enable_admin=True)


def test_a_thousand_loads_at_once(monkeypatch):
    monkeypatch.setattr(adapter_table, "MAX_ADAPTERS", 600)

    async def scenario(served):
        loads = [served.post(LOAD, lora_name=f"a{i}", lora_path="x") for i in range(1000)]
        found = [answer.status_code for answer in await asyncio.gather(*loads)]
        assert (found.count(200), found.count(400)) == (600, 400)
        assert len(await names(served)) == 601
        assert (await served.complete(model="m")).status_code == 200
        missing = await served.complete(model="none")
        assert len(missing.text) < 1000

    with_server(scenario, engine(), enable_admin=True)


def test_loading_is_off():
    async def scenario(served):
        for path in (LOAD, UNLOAD):
            answer = await served.post(path, lora_name="a", lora_path="x")
            assert answer.status_code == 404
            assert "cannot be loaded" in answer.json()["error"]["message"]

    with_server(scenario, engine(lora_root=None), enable_admin=True)


class SlowEngine(FakeAsyncLLM):
    """Engine that waits for `go` when it checks a path with "slow"."""

    def __init__(self, **settings):
        settings = {"enable_lora": True, "lora_root": "/adapters", **settings}
        super().__init__(EngineConfig.from_kwargs(served_model_name=["m"], **settings))
        self.go, self.checked = asyncio.Event(), []

    async def resolve_adapter(self, lora_request, root=None):
        self.checked.append(lora_request.lora_path)
        if "slow" in lora_request.lora_path:
            await self.go.wait()
        return await super().resolve_adapter(lora_request, root)


@pytest.fixture
def shared(tmp_path):
    """Function that runs a scenario with two front ends, and then with one that starts later."""

    def run(scenario, later=None, **settings):
        path = tmp_path / "adapters"

        async def main():
            config = SlowEngine(**settings).config.lora
            keep = make_table(config, "m", path)
            made = [
                serving(lambda: SlowEngine(**settings), None, AdapterTable(path), enable_admin=True)
                for _ in range(3)
            ]
            async with made[0] as one, made[1] as two:
                await scenario(one, two)
            if later is not None:
                async with made[2] as three:
                    await later(three)
            keep.close()

        asyncio.run(asyncio.wait_for(main(), 30))
        return path

    return run


def test_all_front_ends_know_an_adapter_at_once(shared):
    """Also one that replaces another later. Its number is the same everywhere."""

    async def scenario(one, two):
        assert (await one.post(LOAD, lora_name="b", lora_path="b")).status_code == 200
        assert (await two.complete(model="b")).status_code == 200
        assert await names(one) == await names(two) == ["m", "a", "b"]
        refused = await two.post(LOAD, lora_name="b", lora_path="c")
        assert "is loaded already" in refused.text
        again = await two.post(LOAD, lora_name="b", lora_path="c", load_inplace=True)
        assert again.status_code == 200
        assert one.state.adapters.find("b").ref.content_hash == "content of /adapters/c"
        assert (await two.post(UNLOAD, lora_name="a")).status_code == 200
        assert (await one.complete(model="a")).status_code == 404
        assert (await one.post(UNLOAD, lora_name="a")).status_code == 404
        await one.post(LOAD, lora_name="same", lora_path="c")
        numbers = {
            it.state.adapters.find(name).ref.request.lora_int_id
            for it in (one, two)
            for name in ("b", "same")
        }
        assert len(numbers) == 1

    async def later(three):
        assert await names(three) == ["m", "b", "same"]  # not a, which was unloaded
        assert (await three.complete(model="b")).status_code == 200
        assert three.engine.checked == []

    shared(scenario, later, lora_modules=["a=/x/a"])


def test_two_front_ends_load_one_name_at_the_same_moment(shared):
    async def scenario(one, two):
        front_ends = (one, two) * 10
        loads = [
            asyncio.create_task(it.post(LOAD, lora_name="x", lora_path=f"slow{i}"))
            for i, it in enumerate(front_ends)
        ]
        while len(one.engine.checked) + len(two.engine.checked) < len(loads):
            await asyncio.sleep(0.001)
        for it in (one, two):
            it.engine.go.set()
        answers = [await it for it in loads]
        (won,) = (it for it in answers if it.status_code == 200)
        assert {it.status_code for it in answers if it is not won} == {400}
        for it in (one, two):
            _, adapter = (await it.http.get("/v1/models")).json()["data"]
            assert adapter["root"] == won.json()["root"]

    shared(scenario)


def test_the_table_does_not_grow(shared):
    async def scenario(one, two):
        for i in range(300):
            loaded, unloaded = (one, two) if i % 2 else (two, one)
            body = {"lora_name": f"x{i}", "lora_path": "x" * 200}
            assert (await loaded.post(LOAD, **body)).status_code == 200
            assert (await unloaded.post(UNLOAD, lora_name=f"x{i}")).status_code == 200

    path = shared(scenario)
    assert sum(it.stat().st_size for it in path.parent.iterdir()) < 500_000


def test_an_adapter_is_loaded_again_from_its_place(shared):
    async def scenario(one, two):
        missing = await one.post(LOAD, lora_name="a")
        assert "lora_path is missing" in missing.text
        unknown = await one.post(LOAD, lora_name="b", load_inplace=True)
        assert unknown.status_code == 404
        again = await two.post(LOAD, lora_name="a", load_inplace=True)
        assert again.json()["root"] == "/x/slow"
        assert two.engine.checked.count("/x/slow") >= 1

        # It is unloaded while its files are read.
        one.engine.go.clear()
        loading = asyncio.create_task(one.post(LOAD, lora_name="a", load_inplace=True))
        before = len(one.engine.checked)
        while len(one.engine.checked) == before:
            await asyncio.sleep(0.001)
        assert (await two.post(UNLOAD, lora_name="a")).status_code == 200
        one.engine.go.set()
        assert "meanwhile" in (await loading).text
        assert await names(one) == ["m"]

    async def opened(one, two):
        for it in (one, two):
            it.engine.go.set()
        for it in (one, two):
            await it.state.get_engine()
        await scenario(one, two)

    shared(opened, lora_modules=["a=/x/slow"])


def test_requests_wait_for_adapters_that_are_not_checked_yet():
    """No request is answered by the model alone, and none waits beyond its deadline."""

    async def scenario(served):
        assert await names(served) == ["m", "a"]
        late = await served.complete(model="a", deadline_ms=20)
        assert (late.status_code, late.json()["error"]["code"]) == (408, "deadline_exceeded")
        waiting = asyncio.create_task(served.complete(model="a"))
        served.engine.go.set()
        assert (await waiting).status_code == 200
        (request,) = served.engine.requests
        assert request.options.adapter.path == "/x/slow"

    with_server(scenario, lambda: SlowEngine(lora_modules=["a=/x/slow"]))


def test_names_and_models_that_are_not_allowed():
    async def scenario(served):
        async def load(status, said, **body):
            answer = await served.post(LOAD, **{"lora_path": "x", **body})
            assert (answer.status_code, said in answer.text) == (status, True), answer.text

        await load(200, '"m"', lora_name="a", base_model_name="m")
        await load(404, "base_model_name='n' does not exist", lora_name="b", base_model_name="n")
        for name in ("a\nb", "a\0", "\u202eb"):
            await load(400, "control character", lora_name=name)
        answer = await served.http.post(
            LOAD,
            content=b'{"lora_name": "\\ud800", "lora_path": "x"}',
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == 400
        assert await names(served) == ["m", "a"]

    with_server(scenario, engine(), enable_admin=True)


def test_a_table_that_cannot_be_used(shared, monkeypatch):
    """Another process was stopped while it held the lock: loads fail, and requests go on."""
    monkeypatch.setattr(adapter_table, "_LOCK_SECONDS", 0.01)

    async def scenario(one, two):
        assert (await one.post(LOAD, lora_name="a", lora_path="a")).status_code == 200
        database = two.state.adapters._table._database
        database.execute("BEGIN IMMEDIATE")
        busy = await one.post(LOAD, lora_name="b", lora_path="b")
        assert (busy.status_code, busy.json()["error"]["code"]) == (503, "unavailable")
        assert (await one.complete(model="a")).status_code == 200
        database.execute("ROLLBACK")
        assert (await one.post(LOAD, lora_name="b", lora_path="b")).status_code == 200

    shared(scenario)


def test_an_adapter_that_is_unloaded_before_its_request_begins():
    """The model alone does not answer in its place."""

    async def scenario(served):
        find_model = served.state.find_model

        async def find_and_unload(*args):
            await find_model(*args)
            served.state.adapters.unload("a")

        served.state.find_model = find_and_unload
        for ask in (served.complete, served.chat):
            assert (await served.post(LOAD, lora_name="a", lora_path="x")).status_code == 200
            assert (await ask(model="a")).status_code == 404
        assert served.engine.requests == []

    with_server(scenario, engine(), enable_admin=True)
