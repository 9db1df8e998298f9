"""Adapters of a server as models: loading, unloading, and requests that name them."""

import asyncio

import pytest

from octavo.config import EngineConfig
from octavo.server import served_adapters
from tests.server.fake_engine import FakeAsyncLLM, with_server

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
    monkeypatch.setattr(served_adapters, "MAX_ADAPTERS", 600)

    async def scenario(served):
        loads = [served.post(LOAD, lora_name=f"a{i}", lora_path="x") for i in range(1000)]
        found = [answer.status_code for answer in await asyncio.gather(*loads)]
        assert (found.count(200), found.count(400)) == (600, 400)
        assert len(await names(served)) == 601
        assert (await served.complete(model="m")).status_code == 200
        missing = await served.complete(model="none")
        assert len(missing.text) < 1000

    with_server(scenario, engine(), enable_admin=True)


@pytest.mark.parametrize(
    ("settings", "server"),
    [({"lora_root": None}, {}), ({}, {"api_server_count": 2})],
)
def test_loading_is_off(settings, server):
    async def scenario(served):
        for path in (LOAD, UNLOAD):
            answer = await served.post(path, lora_name="a", lora_path="x")
            assert answer.status_code == 404
            assert "cannot be loaded" in answer.json()["error"]["message"]

    with_server(scenario, engine(**settings), enable_admin=True, **server)
