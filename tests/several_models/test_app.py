"""A server of several models over HTTP, with fake servers of the models."""

import asyncio
import contextlib
import json
from urllib.parse import quote

import httpx
import pytest

from octavo import LoRARequest
from octavo.config import EngineConfig, ServerConfig
from octavo.errors import OctavoError, RequestError
from octavo.lora_resolver import LoRAResolver, LoRAResolverRegistry
from octavo.server.adapter_table import ServedAdapter
from octavo.several_models import memory
from octavo.several_models.app import build_app
from octavo.several_models.config import SeveralModelsConfig, read_models, served_models
from octavo.several_models.metrics import join_metrics
from octavo.several_models.planning import PlannedModel
from octavo.several_models.routing import read_keep_alive
from octavo.several_models.shares import Needs
from octavo.several_models.state import ModelsState
from tests.router.servers import FakeServer, stream, upstream, whole

MIB = 2**20
PAGE = """\
# HELP octavo:x Things.
# TYPE octavo:x gauge
octavo:x{engine="0"} 1.0
octavo:x{engine="0",model_name="own"} 2.0
"""


class FakeModelServer:
    """Server of one model: a function that answers its requests.

    Args:
        model: the model.
        answer: see `FakeServer`.
        error: error of each load.
    """

    num_restarts = 0

    def __init__(self, model, answer, error=None):
        self.pool, self.name, self.answer, self.error = model.pool, model.names[0], answer, error
        self.server, self.loads = None, 0

    async def load(self):
        self.loads += 1
        if self.error is not None:
            raise self.error
        self.server = FakeServer(self.answer)
        made = upstream(self.name, self.server)
        self.pool.add(made)
        while not made.ready:
            await asyncio.sleep(0)

    async def unload(self):
        for made in list(self.pool.upstreams):
            await self.pool.remove(made)


def answer_of(name):
    """Return a function that answers with the name of its model, and the request's body."""

    def answer(request):
        if request.url.endswith("/metrics"):
            return 200, {}, [PAGE.encode()]
        body = json.loads(request.content or b"null")
        return whole(model=name, got=body)(request)

    return answer


class Served:
    """Server of models with the abilities that `abilities` has by name.

    Args:
        abilities: the models.
        answers: functions in place of `answer_of`, by name.
        broken: names of models whose load fails.
        unread: names of models that cannot be read.
        config: settings of the HTTP server.
        adapters: names of the adapters of each model.
        lora: settings of the adapters of each model.
        **several: settings of the loading.
    """

    def __init__(
        self,
        abilities,
        answers=None,
        broken=(),
        unread=(),
        config=None,
        adapters=None,
        lora=None,
        **several,
    ):
        given = [{"path": f"/m/{n}", "name": n} for n in abilities]
        for one in given:
            if names := (adapters or {}).get(one["name"]):
                modules = [f"{name}=/a/{name}" for name in names]
                one |= {"enable_lora": True, "lora_modules": modules}
            if settings := (lora or {}).get(one["name"]):
                one |= {"enable_lora": True, **settings}
        models = read_models([json.dumps(one) for one in given])
        settings = SeveralModelsConfig(**several)
        most = min(settings.max_loaded_models or len(models), len(models))
        served = served_models(models, {}, {}, {}, most)
        self.unread = set(unread)

        async def plan_model(request):
            if request.name in self.unread:
                raise OctavoError(f"{request.name} is unreadable.")
            needs = Needs(request.name, 10 * MIB, MIB, 5 * MIB)
            return PlannedModel(
                *(needs, "cpu", 1, {"weights": 10 * MIB}, 64),
                *(abilities[request.name], ["text"], {}, MIB),
            )

        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(memory, "plan_model", plan_model)
        self.state = ModelsState(config or ServerConfig(), settings, served, EngineConfig())
        for model in self.state.models:
            name = model.names[0]
            error = OctavoError(f"{name} is broken.") if name in broken else None
            answer = (answers or {}).get(name, answer_of(name))
            model.backend = FakeModelServer(model, answer, error)

    def model(self, name):
        return self.state.find(name)

    async def __aenter__(self):
        self.state.start()
        transport = httpx.ASGITransport(build_app(self.state))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://front", timeout=20)
        with contextlib.suppress(OctavoError):
            await self.state._starting
        return self

    async def __aexit__(self, *error):
        await self.client.aclose()
        await self.state.close()
        self._patch.undo()

    async def ask(self, path="/v1/completions", headers=None, **fields):
        return await self.client.post(path, json=fields, headers=headers)

    async def states(self):
        cards = (await self.client.get("/v1/models")).json()["data"]
        return {card["id"]: card["state"] for card in cards}


BOTH = {"gen": ["generate", "embed"], "emb": ["embed", "token_embed"]}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


@pytest.mark.parametrize(
    ("path", "fields", "model"),
    [
        ("/v1/completions", {"model": "gen", "prompt": "a"}, "gen"),
        ("/v1/completions", {"prompt": "a"}, "gen"),
        ("/v1/completions", {"prompt": "a", "model": None}, "gen"),
        ("/v1/chat/completions", {"model": "gen", "messages": []}, "gen"),
        ("/v1/messages", {"model": "gen"}, "gen"),
        ("/v1/responses", {"model": "gen"}, "gen"),
        ("/v1/embeddings", {"model": "gen", "input": "a"}, "gen"),
        ("/v1/embeddings", {"input": "a"}, "emb"),
        ("/embed", {"inputs": "a"}, "emb"),
        ("/embed?x=1", {"inputs": "a"}, "emb"),
        ("/v2/rerank", {"query": "a"}, "cls"),
        ("/score", {}, "cls"),
        ("/v1/score", {"model": "emb"}, "emb"),
        ("/predict", {}, "cls"),
        ("/api/chat", {"model": "gen:latest"}, "gen"),
        ("/api/embed", {"model": "emb"}, "emb"),
        ("/api/show", {"name": "emb:latest"}, "emb"),
        ("/tokenize", {"model": "emb", "prompt": "a"}, "emb"),
        ("/tokenize", {"prompt": "a"}, "gen"),
        ("/invocations", {"model": "gen"}, "gen"),
    ],
)
def test_a_request_reaches_its_model(path, fields, model):
    async def main():
        async with Served({"emb": BOTH["emb"], "gen": BOTH["gen"], "cls": ["classify"]}) as served:
            answer = await served.ask(path, **fields)
            assert (answer.status_code, answer.json()["model"]) == (200, model)

    run(main())


@pytest.mark.parametrize(
    ("path", "fields", "status", "message"),
    [
        ("/v1/completions", {"model": "x"}, 404, "'x' does not exist here; this server has gen, e"),
        ("/v1/completions", {"model": "gen:latest"}, 404, "does not exist"),
        ("/v1/embeddings", {"model": 5}, 400, "model=5 is not allowed"),
        ("/models/load", {}, 400, "model is missing"),
        ("/models/load", {"model": 1}, 400, "model is 1"),
        ("/models/unload", {"model": "x"}, 404, "does not exist"),
        ("/v1/files", {}, 404, "is not available with several models"),
        ("/v1/audio/transcriptions", {}, 415, "multipart/form-data"),
        ("/v1/responses/resp_1/cancel", {}, 404, "'resp_1' not found"),
        ("/api/chat", {"model": "gen", "keep_alive": "x"}, 400, "keep_alive='x' is not allowed"),
    ],
)
def test_wrong_requests(path, fields, status, message):
    async def main():
        async with Served(BOTH) as served:
            answer = await served.ask(path, **fields)
            assert answer.status_code == status
            error = answer.json()["error"]
            assert message in (error if isinstance(error, str) else error["message"])

    run(main())


def test_sounds_go_to_the_model_that_hears():
    def answer(name):
        return lambda request: whole(model=name)(request)

    async def main():
        models = {"gen": ["generate"], "ear": ["transcribe"]}
        async with Served(models, {name: answer(name) for name in models}) as served:
            files = {"file": ("a.wav", b"RIFF")}
            for fields, expected in (({}, "ear"), ({"model": "gen"}, "gen")):
                for kind in ("transcriptions", "translations"):
                    found = await served.client.post(
                        f"/v1/audio/{kind}", files=files, data=fields | {"deadline_ms": "200000"}
                    )
                    assert found.json()["model"] == expected
            found = await served.client.post(
                "/v1/audio/transcriptions", files=files, data={"model": "x"}
            )
            assert found.status_code == 404
            assert "'x' does not exist" in found.json()["error"]["message"]

    run(main())


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"{", 400), (b"[1]", 400), (b"\xff", 400), (b'"a"', 400), (b"[" * 100_000, 400)],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/embed"])
def test_bodies_that_are_no_objects(path, content, status):
    async def main():
        async with Served(BOTH) as served:
            headers = {"content-type": "application/json"}
            answer = await served.client.post(path, content=content, headers=headers)
            assert answer.status_code == status, answer.text

    run(main())


def test_a_large_body():
    async def main():
        async with Served(BOTH, config=ServerConfig(max_request_bytes=2000)) as served:
            answer = await served.ask(prompt="a" * 3000)
            assert answer.status_code == 413

    run(main())


def test_names_with_odd_characters():
    odd = 'a "b"\n{c}/ü%20'

    async def main():
        async with Served({odd: ["generate"], "c ?#%/ü": ["generate"]}) as served:
            assert (await served.ask(model=odd, prompt="a")).json()["model"] == odd
            answer = await served.client.get(f"/v1/models/{quote('c ?#%/ü')}")
            assert answer.json()["id"] == "c ?#%/ü"
            assert 'model_name="a \\"b\\"\\n{c}/ü%20"' in (await served.client.get("/metrics")).text

    run(main())


def test_the_list_shows_the_state_of_each_model():
    async def main():
        models = BOTH | {"bad": ["generate"], "late": ["generate"]}
        async with Served(models, unread=["bad"], max_loaded_models=2) as served:
            wanted = {"gen": "loaded", "emb": "loaded", "bad": "failed", "late": "unloaded"}
            assert await served.states() == wanted
            card = (await served.client.get("/v1/models/bad")).json()
            assert card["error"] == "bad is unreadable."
            assert card["status"] == {"value": "unloaded", "failed": True}
            assert (await served.client.get("/v1/models/gen")).json()["max_model_len"] == 64
            assert (await served.client.get("/v1/models/none")).status_code == 404
            assert (await served.client.get("/models")).json()["data"][0]["id"] == "gen"
            assert (await served.client.get("/ready")).status_code == 200
            tags = (await served.client.get("/api/tags")).json()["models"]
            assert [tag["name"] for tag in tags] == ["gen", "emb", "late"]
            tags = (await served.client.get("/api/ps")).json()["models"]
            assert [tag["name"] for tag in tags] == ["gen", "emb"]

    run(main())


def test_adapters_choose_their_models():
    """Also that of a model that is not loaded."""

    async def main():
        adapters = {"gen": ["poems"], "emb": ["short", "long"]}
        async with Served(BOTH, adapters=adapters, max_loaded_models=1) as served:
            assert (await served.states())["short"] == "unloaded"
            for name, model in (("long", "emb"), ("poems", "gen"), ("short", "emb")):
                answer = (await served.ask("/v1/embeddings", model=name, input="a")).json()
                assert (answer["model"], answer["got"]["model"]) == (model, name)
                assert (await served.states())[name] == "loaded"
            card = (await served.client.get("/v1/models/long")).json()
            assert (card["parent"], card["root"]) == ("emb", "/a/long")
            assert list(await served.states()) == ["gen", "poems", "emb", "short", "long"]
            assert (await served.ask("/models/unload", model="short")).status_code == 200

    run(main())


LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Adapting(Served):
    """Server whose fake servers of models load adapters, and count their loads."""

    def __init__(self, **settings):
        self.loads = []
        answers = {name: self._answer_of(name) for name in BOTH}
        settings = {"config": ServerConfig(enable_admin=True), **settings}
        super().__init__(BOTH, answers, **settings)

    def _answer_of(self, name):
        def answer(request):
            if not str(request.url).endswith(LOAD):
                return answer_of(name)(request)
            body = json.loads(request.content)
            self.loads.append((name, body["lora_name"]))
            adapter = ServedAdapter(name=body["lora_name"], path="/x", parent=name)
            self.model(name).adapters.add(adapter, replace=True)
            return whole(id=body["lora_name"])(request)

        return answer


def test_adapters_are_loaded_to_a_model():
    """A model that is not loaded is loaded for them; they stay when it is unloaded."""

    async def main():
        lora = {name: {"lora_root": "/adapters"} for name in BOTH}
        async with Adapting(lora=lora, max_loaded_models=1) as served:

            async def load(status, said="", **body):
                answer = await served.ask(LOAD, **{"lora_path": "x", **body})
                assert answer.status_code == status, answer.text
                assert said in answer.text

            await load(400, "base_model_name is missing", lora_name="a")
            await load(
                404, "base_model_name='x' does not exist", lora_name="a", base_model_name="x"
            )
            await load(400, "is the name of a model", lora_name="gen", base_model_name="emb")
            await load(400, "lora_name", lora_name="", base_model_name="emb")
            assert served.loads == []
            await load(200, lora_name="a", base_model_name="emb")
            await load(200, lora_name="b", base_model_name="gen")
            await load(400, "is an adapter of emb", lora_name="a", base_model_name="gen")
            await load(200, lora_name="a", load_inplace=True)
            assert served.loads == [("emb", "a"), ("gen", "b"), ("emb", "a")]
            wanted = {"gen": "unloaded", "b": "unloaded", "emb": "loaded", "a": "loaded"}
            assert await served.states() == wanted
            card = (await served.client.get("/v1/models/b")).json()
            assert (card["parent"], card["root"]) == ("gen", "/x")
            assert (await served.ask(model="b", prompt="x")).json()["model"] == "gen"
            assert (await served.states())["a"] == "unloaded"

            for status in (200, 404):
                assert (await served.ask(UNLOAD, lora_name="a")).status_code == status
            assert (await served.ask(UNLOAD, lora_name="gen")).status_code == 404
            assert (await served.ask(model="a", prompt="x")).status_code == 404
            assert (await served.states())["gen"] == "loaded"

    run(main())


def test_one_name_is_loaded_to_two_models_at_the_same_moment():
    async def main():
        lora = {name: {"lora_root": "/adapters"} for name in BOTH}
        async with Adapting(lora=lora) as served:
            asked = [
                served.ask(LOAD, lora_name="a", lora_path="x", base_model_name=name)
                for name in BOTH
            ]
            answers = await asyncio.gather(*asked)
            assert sorted(answer.status_code for answer in answers) == [200, 400]
            assert len(served.loads) == 1

    run(main())


@pytest.mark.parametrize("path", [LOAD, UNLOAD, "/v1/%6Coad_lora_adapter", f"{LOAD}?x=1"])
def test_only_operators_load_adapters(path):
    async def main():
        config = ServerConfig(api_key=["one", "two"])
        async with Adapting(lora={"gen": {"lora_root": "/x"}}, config=config) as served:
            headers = {"authorization": "Bearer one"}
            answer = await served.ask(path, headers, lora_name="a", lora_path="x")
            assert (answer.status_code, served.loads) == (403, [])

    run(main())


def test_adapters_that_cannot_change():
    async def main():
        async with Adapting(adapters={"gen": ["a"]}) as served:
            for body in ({}, {"base_model_name": "gen"}):
                answer = await served.ask(LOAD, lora_name="b", lora_path="x", **body)
                assert (answer.status_code, served.loads) == (404, [])
                assert "Adapters cannot be loaded" in answer.text
            answer = await served.ask(UNLOAD, lora_name="a")
            assert (answer.status_code, "or unloaded" in answer.text) == (404, True)
            assert (await served.client.get("/v1/models/a")).status_code == 200

    run(main())


class Waiting(LoRAResolver):
    """Resolver that never ends for the name "slow", and knows "poems" of the model emb."""

    async def resolve_lora(self, base_model_name, lora_name):
        if lora_name == "slow":
            await asyncio.Event().wait()
        known = (base_model_name, lora_name) == ("emb", "poems")
        return LoRARequest("poems", 1, "/x") if known else None


def test_resolvers_choose_the_model(tmp_path, monkeypatch):
    monkeypatch.setitem(LoRAResolverRegistry.resolvers, "mine", Waiting())
    for model in BOTH:
        (tmp_path / model / f"of {model}").mkdir(parents=True)
        (tmp_path / model / f"of {model}" / "adapter_config.json").touch()

    async def main():
        lora = {
            model: {"lora_root": str(tmp_path / model), "lora_resolvers": ["folder", "mine"]}
            for model in BOTH
        }
        async with Adapting(lora=lora) as served:
            for name, model in (("of gen", "gen"), ("of emb", "emb"), ("poems", "emb")):
                answer = await served.ask(model=name, prompt="a")
                assert (answer.status_code, answer.json()["model"]) == (200, model)
            assert (await served.ask(model="none", prompt="a")).status_code == 404
            assert (await served.ask("/api/chat", model="of gen")).status_code == 404
            for param, body, headers in (
                ("deadline_ms", {"deadline_ms": 10}, {}),
                ("deadline_ms", {}, {"X-Deadline-Ms": "10"}),
                ("deadline_ms", {"deadline_ms": 10**400}, {"X-Deadline-Ms": "10"}),
                ("max_ttft_ms", {"max_ttft_ms": 10, "deadline_ms": 10**6}, {}),
                ("max_ttft_ms", {}, {"X-Max-TTFT-Ms": "10"}),
            ):
                late = await served.ask(headers=headers, model="slow", prompt="a", **body)
                assert (late.status_code, late.json()["error"]["param"]) == (408, param)

    run(main())


def test_a_model_that_cannot_be_loaded_harms_only_its_requests():
    async def main():
        async with Served(BOTH, broken=["emb"]) as served:
            answer = await served.ask("/v1/embeddings", model="emb", input="a")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "model_failed"
            assert "emb is broken." in answer.json()["error"]["message"]
            assert int(answer.headers["retry-after"]) >= 1
            assert (await served.ask(model="gen", prompt="a")).status_code == 200
            assert (await served.client.get("/ready")).status_code == 200
            served.model("emb").backend.error = None
            assert (await served.ask("/models/load", model="emb")).json() == {"success": True}
            answer = await served.ask("/v1/embeddings", model="emb", input="a")
            assert answer.status_code == 200

    run(main())


def test_a_model_that_could_not_be_read_is_read_again():
    async def main():
        async with Served(BOTH, unread=["emb"]) as served:
            served.unread.clear()
            await served.ask("/models/load", model="emb")
            # Its server, which is a fake, would have asked for it.
            await served.state.memory.add(served.model("emb").share)
            assert served.model("emb").share.cache_nbytes == 5 * MIB

    run(main())


@pytest.mark.parametrize("problem", ["broken", "unread"])
def test_the_server_ends_if_no_model_is_usable(problem):
    async def main():
        async with Served(BOTH, **{problem: ["gen", "emb"]}) as served:
            assert isinstance(served.state.failure, OctavoError)
            assert (await served.client.get("/ready")).status_code == 503

    run(main())


def test_models_take_turns():
    async def main():
        async with Served(BOTH, max_loaded_models=1) as served:
            models = ["gen", "emb"] * 100
            found = await asyncio.gather(*(served.ask(model=name, prompt="a") for name in models))
            assert [answer.json()["model"] for answer in found] == models
            assert sum(served.model(name).backend.loads for name in BOTH) <= 4

    run(main())


def test_a_stream_holds_its_model():
    async def main():
        go = asyncio.Event()
        event = b'data: {"id":"1","model":"gen","choices":[{"index":0,"text":"a","finish_reason":'
        pieces = [event + b"null}]}\n\n", go, event + b'"stop"}]}\n\n', b"data: [DONE]\n\n"]
        answers = {"gen": stream(*pieces)}
        async with Served(BOTH, answers, max_loaded_models=1) as served:
            streaming = asyncio.create_task(served.ask(model="gen", prompt="a", stream=True))
            while not served.model("gen").num_users:
                await asyncio.sleep(0)
            other = asyncio.create_task(served.ask("/v1/embeddings", model="emb", input="a"))
            await asyncio.sleep(0.05)
            assert await served.states() == {"gen": "loaded", "emb": "unloaded"}
            go.set()
            assert (await streaming).text.endswith("data: [DONE]\n\n")
            assert (await other).json()["model"] == "emb"

    run(main())


def test_a_request_waits_only_so_long():
    async def main():
        async with Served(BOTH, max_loaded_models=1, model_load_timeout=0.05) as served:
            async with served.state.set.use(served.model("gen")):
                answer = await served.ask("/v1/embeddings", model="emb", input="a")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
            assert answer.headers["retry-after"]

    run(main())


def test_waiting_requests_are_bounded():
    async def main():
        config = ServerConfig(max_num_queued_reqs=3)
        async with Served(BOTH, max_loaded_models=1, config=config) as served:
            async with served.state.set.use(served.model("gen")):
                asked = [served.ask("/embed", model="emb", inputs="a") for _ in range(5)]
                asked = [asyncio.create_task(one) for one in asked]
                while sum(one.done() for one in asked) < 2:
                    await asyncio.sleep(0)
            found = await asyncio.gather(*asked)
            assert sorted(a.status_code for a in found) == [200, 200, 200, 429, 429]

    run(main())


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/api/generate", {"response": ""}),
        ("/api/chat", {"message": {"role": "assistant", "content": ""}}),
    ],
)
def test_ollamas_unloading(path, part):
    async def main():
        async with Served(BOTH) as served:
            answer = (await served.ask(path, model="gen", keep_alive=0)).json()
            assert answer["done_reason"] == "unload"
            assert answer.items() >= part.items()
            while (await served.states())["gen"] != "unloaded":
                await asyncio.sleep(0)
            prompt = {"prompt": "a"} if "generate" in path else {"messages": [{}]}
            answer = await served.ask(path, model="gen", keep_alive="1m", **prompt)
            assert answer.json()["model"] == "gen"
            assert (await served.states())["gen"] == "loaded"
            assert served.model("gen").expires is not None

    run(main())


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        (0, 0.0),
        (2.5, 2.5),
        (-1, None),
        ("-1", None),
        ("-1s", None),
        ("0", 0.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5s", 1.5),
        ("300ms", 0.3),
        ("+10s", 10.0),
    ],
)
def test_durations(value, seconds):
    assert read_keep_alive(value) == (seconds if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    "value", ["", "x", "5 m", "5d", "m", True, [], {}, "1e9", float("inf"), 10**400]
)
def test_wrong_durations(value):
    with pytest.raises(RequestError, match="keep_alive="):
        read_keep_alive(value)


def test_several_keys_need_the_operators_to_unload():
    async def main():
        config = ServerConfig(api_key=["a", "b"], admin_key=["root"])
        async with Served(BOTH, config=config) as served:
            for key, status in (("a", 403), ("root", 200), ("x", 401)):
                headers = {"authorization": f"Bearer {key}"}
                answer = await served.ask("/models/unload", headers, model="gen")
                assert answer.status_code == status
            answer = await served.ask(prompt="a", headers={"authorization": "Bearer a"})
            assert answer.json()["got"]["cache_salt"]  # each key has its own cached prefixes
            assert (await served.ask(prompt="a")).status_code == 401

    run(main())


def test_stored_responses_stay_with_their_model():
    async def main():
        def store(name):
            return whole(id=f"resp_{name}", object="response", model=name)

        async with Served(
            {"a": ["generate"], "b": ["generate"]}, {name: store(name) for name in "ab"}
        ) as served:
            assert (await served.ask("/v1/responses", model="b", input="x")).status_code == 200
            answer = await served.client.get("/v1/responses/resp_b")
            assert answer.json()["model"] == "b"
            answer = await served.ask("/v1/responses", input="x", previous_response_id="resp_b")
            assert answer.json()["model"] == "b"
            assert (await served.client.get("/v1/responses/resp_c")).status_code == 404

    run(main())


def test_work_without_a_client_needs_models_that_stay():
    async def main():
        for most, status in ((1, 400), (2, 200)):
            async with Served(BOTH, max_loaded_models=most) as served:
                answer = await served.ask("/v1/responses", input="x", background=True)
                assert answer.status_code == status

    run(main())


def test_metrics_are_joined():
    page = join_metrics({"": "# TYPE a gauge\na 1\n", 'm"1': PAGE, "m2": PAGE}, [])
    assert page.count("# TYPE octavo:x gauge") == 1
    lines = page.splitlines()
    assert 'octavo:x{model_name="m\\"1",engine="0"} 1.0' in lines
    assert 'octavo:x{model_name="m2",engine="0"} 1.0' in lines
    assert lines.count('octavo:x{engine="0",model_name="own"} 2.0') == 2
    assert "a 1" in lines

    async def main():
        async with Served(BOTH) as served:
            page = (await served.client.get("/metrics")).text
            assert 'octavo:x{model_name="emb",engine="0"} 1.0' in page
            assert 'octavo:model_loaded{model_name="gen"} 1.0' in page

    run(main())
