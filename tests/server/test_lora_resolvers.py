"""Resolvers of adapters that requests name and the server does not know."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from octavo import LoRARequest
from octavo.config import EngineConfig, LoRAConfig
from octavo.errors import ConfigError, UnknownAdapterError
from octavo.lora_resolver import LoRAResolver, LoRAResolverRegistry
from octavo.server import adapter_searches
from octavo.server.lora_resolvers import ENTRY_POINTS, make_resolvers
from tests.server.fake_engine import FakeAsyncLLM, with_server

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def engine(**settings):
    settings = {"enable_lora": True, **settings}
    return lambda: FakeAsyncLLM(
        config=EngineConfig.from_kwargs(served_model_name=["m"], **settings)
    )


@pytest.fixture
def root(tmp_path):
    for name in ("poems", "bad", "père noël", ".hidden"):
        (tmp_path / "root" / name).mkdir(parents=True)
        (tmp_path / "root" / name / "adapter_config.json").touch()
    (tmp_path / "root" / "empty").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "root" / "file").touch()
    return tmp_path / "root"


def test_folders(root):
    async def scenario(served):
        async def ask(model):
            return (await served.complete(model=model)).status_code

        assert await ask("poems") == 200
        chat = await served.chat(model="père noël")
        assert chat.json()["model"] == "père noël"
        listed = (await served.http.get("/v1/models")).json()["data"]
        assert [it["id"] for it in listed] == ["m", "poems", "père noël"]
        assert listed[1]["root"] == str(root / "poems")
        assert await ask("bad") == 400
        hostile = ["none", "../outside", str(root / "poems"), "poems/", ".hidden", ".", "..", "//"]
        hostile += [
            "file",
            "empty",
            "x" * 257,
            "x" * 100_000,
            "ü" * 200,
            "poems\0",
            "a\nb",
            "\u202epoems",
        ]
        for name in hostile:
            assert await ask(name) == 404, name
        surrogate = json.dumps({"model": "\ud800", "prompt": "a"}).encode()
        answer = await served.http.post(
            "/v1/completions", content=surrogate, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code in (400, 404)
        assert (await served.http.get("/v1/models/none")).status_code == 404
        assert len((await served.http.get("/v1/models")).json()["data"]) == 3

    with_server(scenario, engine(lora_root=str(root), lora_resolvers=["folder"]))


def test_they_are_off_unless_they_are_named(root):
    async def scenario(served):
        assert (await served.complete(model="poems")).status_code == 404

    with_server(scenario, engine(lora_root=str(root)))


def test_hub_ids_that_are_allowed(tmp_path, monkeypatch):
    """Clients name them as models, and an operator loads them; local paths are none."""
    (tmp_path / "all" / "private").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    async def scenario(served):
        async def ask(model):
            return (await served.complete(model=model)).status_code

        assert await ask("org/a") == 200
        assert await ask("all/any-thing_1.0") == 200
        paths = "all/private", "all/..", "all/.", "./all"
        for name in ("org/b", "all/*", "all/x/y", "all/../x", "all", "*/*", "all/é", *paths):
            assert await ask(name) == 404, name
        loaded = await served.post(LOAD, lora_name="c", lora_path="all/c")
        assert loaded.json()["root"] == "all/c"
        refused = await served.post(LOAD, lora_name="d", lora_path="other/c")
        assert refused.status_code == 400
        assert "not one of the hub ids" in refused.text

    settings = {"lora_hub_repos": ["org/a", "all/*"], "lora_resolvers": ["hub"]}
    with_server(scenario, engine(**settings), enable_admin=True)


class Store(LoRAResolver):
    """Resolver that is slow, fails, or finds, as the name says."""

    def __init__(self):
        self.seen, self.go = [], asyncio.Event()

    async def resolve_lora(self, base_model_name, lora_name):
        self.seen.append((base_model_name, lora_name))
        if lora_name.startswith("slow"):
            await self.go.wait()
        if lora_name == "broken":
            raise OSError("the store is gone")
        if lora_name == "odd":
            return "/store/odd"
        if lora_name == "cancelled":
            raise asyncio.CancelledError
        if lora_name == "unknown":
            return None
        return LoRARequest("another name", 7, f"/store/{lora_name}")


@pytest.fixture
def store():
    LoRAResolverRegistry.register_resolver("store", store := Store())
    yield store
    LoRAResolverRegistry.resolvers.clear()


def test_a_slow_or_failing_search_makes_no_others_wait(store, monkeypatch):
    monkeypatch.setattr(adapter_searches, "_MOST_SEARCHES", 2)

    async def scenario(served):
        waiting = [asyncio.create_task(served.complete(model="slow")) for _ in range(5)]
        while not store.seen:
            await asyncio.sleep(0)
        assert (await served.complete(model="a")).status_code == 200
        assert (await served.complete(model="m")).status_code == 200
        for name, kind in (("broken", "OSError"), ("odd", "TypeError")):
            failed = await served.complete(model=name)
            assert failed.status_code == 503
            assert f"the resolver store failed ({kind})" in failed.text
        assert (await served.complete(model="cancelled")).status_code == 503
        assert (await served.complete(model="unknown")).status_code == 404
        waiting.append(asyncio.create_task(served.complete(model="slow too")))
        while len(store.seen) < 7:
            await asyncio.sleep(0)
        assert (await served.complete(model="b")).status_code == 429
        store.go.set()
        assert {it.status_code for it in await asyncio.gather(*waiting)} == {200}
        assert store.seen.count(("m", "slow")) == 1
        assert (await served.complete(model="a")).status_code == 200  # without another search
        assert store.seen.count(("m", "a")) == 1

    with_server(scenario, engine(lora_resolvers=["store"]))


def test_a_search_ends(store, monkeypatch):
    monkeypatch.setattr(adapter_searches, "_SEARCH_SECONDS", 0.01)

    async def scenario(served):
        late = await served.complete(model="slow")
        assert late.status_code == 503
        assert "was not found within" in late.text
        assert (await served.complete(model="a")).status_code == 200

    with_server(scenario, engine(lora_resolvers=["store"]))


def test_a_search_ends_for_a_request_at_its_deadline(store):
    """It continues for others."""

    async def scenario(served):
        waiting = asyncio.create_task(served.complete(model="slow"))
        late = [
            await served.complete(model="slow", deadline_ms=10),
            await served.http.post(
                "/v1/embeddings",
                json={"model": "slow", "input": "a"},
                headers={"X-Deadline-Ms": "10"},
            ),
        ]
        late.append(await served.complete(model="slow", deadline_ms=60_000, max_ttft_ms=10))
        errors = [answer.json()["error"] for answer in late]
        assert {answer.status_code for answer in late} == {408}
        assert {error["code"] for error in errors} == {"deadline_exceeded"}
        assert [error["param"] for error in errors] == ["deadline_ms", "deadline_ms", "max_ttft_ms"]
        store.go.set()
        assert (await waiting).status_code == 200
        assert len(store.seen) == 1

    with_server(scenario, engine(lora_resolvers=["store"]))


def test_a_key_leaves_searches_to_others(store, monkeypatch):
    monkeypatch.setattr(adapter_searches, "_MOST_SEARCHES", 10)

    async def scenario(served):
        async def ask(model, key):
            return await served.http.post(
                "/v1/completions",
                json={"model": model, "prompt": "a", "max_tokens": 1},
                headers={"Authorization": f"Bearer {key}"},
            )

        waiting = [asyncio.create_task(ask(f"slow {i}", "one")) for i in range(20)]
        while sum(it.done() for it in waiting) < 12:
            await asyncio.sleep(0.001)
        assert len(store.seen) == 8
        (full,) = {it.result().json()["error"]["message"] for it in waiting if it.done()}
        assert "8 adapters for this API key" in full
        assert (await ask("a", "two")).status_code == 200
        store.go.set()
        assert [it.status_code for it in await asyncio.gather(*waiting)].count(200) == 8
        assert (await ask("slow 19", "one")).status_code == 200

    with_server(scenario, engine(lora_resolvers=["store"]), api_key=["one", "two"])


def test_an_unknown_hub_id_is_an_unknown_model():
    """An operator who loads it learns what the hub says."""

    class Engine(FakeAsyncLLM):
        async def resolve_adapter(self, lora_request, root=None):
            raise UnknownAdapterError(f"{lora_request.lora_path} is not on the hub.")

    async def scenario(served):
        load = {"lora_name": "a", "lora_path": "org/a"}
        for answer, says in (
            (await served.complete(model="org/a"), "'org/a' does not exist here"),
            (await served.post(LOAD, **load), "org/a is not on the hub"),
        ):
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (404, "model_not_found")
            assert says in error["message"]

    settings = {"lora_hub_repos": ["org/*"], "lora_resolvers": ["hub"], "enable_lora": True}
    config = EngineConfig.from_kwargs(served_model_name=["m"], **settings)
    with_server(scenario, lambda: Engine(config=config), enable_admin=True)


def test_an_operator_s_adapter_has_precedence(root, store):
    """The search began before the adapter was loaded."""

    async def scenario(served):
        asked = asyncio.create_task(served.complete(model="slow"))
        while not store.seen:
            await asyncio.sleep(0)
        loaded = await served.post(LOAD, lora_name="slow", lora_path="poems")
        assert loaded.status_code == 200
        store.go.set()
        assert (await asked).status_code == 200
        listed = (await served.http.get("/v1/models")).json()["data"]
        assert [it["root"] for it in listed if it["id"] == "slow"] == [str(root / "poems")]

    settings = {"lora_root": str(root), "lora_resolvers": ["store"]}
    with_server(scenario, engine(**settings), enable_admin=True)


def test_installed_resolvers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "found_adapters.py").write_text(
        "from octavo.lora_resolver import LoRAResolver\n"
        "class Mine(LoRAResolver):\n"
        "    async def resolve_lora(self, base_model_name, lora_name):\n"
        "        return None\n"
        "other = dict\n"
    )
    info = tmp_path / "found_adapters-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: found-adapters\nVersion: 1.0\n")
    lines = f"[{ENTRY_POINTS}]\nmine = found_adapters:Mine\nodd = found_adapters:other\n"
    (info / "entry_points.txt").write_text(lines + "gone = found_adapters:Gone\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name):
        return make_resolvers(LoRAConfig(enable_lora=True, lora_resolvers=[name]))

    assert isinstance(make("mine")["mine"], LoRAResolver)
    with pytest.raises(ConfigError, match="'odd' is a dict, and it must be a LoRAResolver"):
        make("odd")
    with pytest.raises(ConfigError, match="'gone' cannot be loaded"):
        make("gone")
    with pytest.raises(ConfigError, match="no resolver 'none'; installed: folder, gone, hub, mine"):
        make("none")
    sys.modules.pop("found_adapters", None)
