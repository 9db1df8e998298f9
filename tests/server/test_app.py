import asyncio
import json
import re
import time

import pytest
from pydantic import TypeAdapter

import octavo
from octavo.config import EngineConfig, ServerConfig
from octavo.errors import EngineDeadError
from octavo.outputs import RequestMetrics
from octavo.server import generation_answers
from octavo.server.generation import metrics_json
from octavo.server.openapi import OPERATIONS
from octavo.server.state import ServerState
from tests.server.fake_engine import FakeAsyncLLM, events, make_tokenizer, with_server


def loading_engine():
    engine = FakeAsyncLLM()
    engine.ready = False
    engine.loaded.clear()
    return engine


def test_index_lists_the_addresses():
    async def scenario(served):
        answer = (await served.http.get("/")).json()
        assert answer["version"] == octavo.__version__
        assert answer["models"] == ["fake"]
        assert answer["endpoints"] == [
            "GET /openapi.json",
            "GET /docs",
            "GET /",
            "GET /health",
            "GET /ping",
            "POST /ping",
            "GET /ready",
            "GET /load",
            "GET /version",
            "GET /metrics",
            "GET /v1/models",
            "GET /v1/models/{model:path}",
            "POST /v1/load_lora_adapter",
            "POST /v1/unload_lora_adapter",
            "POST /v1/completions",
            "POST /v1/chat/completions",
            "POST /v1/chat/completions/batch",
            "POST /v1/completions/render",
            "POST /v1/chat/completions/render",
            "POST /v1/audio/transcriptions",
            "POST /v1/audio/translations",
            "POST /v1/embeddings",
            "POST /pooling",
            "POST /classify",
            "POST /v1/classify",
            "POST /score",
            "POST /v1/score",
            "POST /rerank",
            "POST /v1/rerank",
            "POST /v2/rerank",
            "POST /v1/embed",
            "POST /v2/embed",
            "POST /embed",
            "POST /embed_all",
            "POST /embed_sparse",
            "POST /predict",
            "POST /similarity",
            "GET /info",
            "POST /v1/messages",
            "POST /v1/messages/count_tokens",
            "POST /v1/responses",
            "POST /v1/responses/input_tokens",
            "GET /v1/responses/{response_id}",
            "DELETE /v1/responses/{response_id}",
            "POST /v1/responses/{response_id}/cancel",
            "GET /v1/responses/{response_id}/input_items",
            "POST /v1/conversations",
            "GET /v1/conversations/{conversation_id}",
            "POST /v1/conversations/{conversation_id}",
            "DELETE /v1/conversations/{conversation_id}",
            "GET /v1/conversations/{conversation_id}/items",
            "POST /v1/conversations/{conversation_id}/items",
            "GET /v1/conversations/{conversation_id}/items/{item_id}",
            "DELETE /v1/conversations/{conversation_id}/items/{item_id}",
            "POST /api/chat",
            "POST /api/generate",
            "POST /api/embed",
            "POST /api/embeddings",
            "GET /api/tags",
            "GET /api/ps",
            "POST /api/show",
            "GET /api/version",
            "POST /inference/v1/generate",
            "POST /invocations",
            "GET /v1/requests",
            "GET /v1/requests/{request_id:path}/explain",
            "POST /v1/files",
            "GET /v1/files",
            "GET /v1/files/{file_id}",
            "DELETE /v1/files/{file_id}",
            "GET /v1/files/{file_id}/content",
            "POST /v1/batches",
            "GET /v1/batches",
            "GET /v1/batches/{batch_id}",
            "POST /v1/batches/{batch_id}/cancel",
            "GET /v1/streams/{stream_id:path}",
            "GET /v1/engine/view",
            "POST /tokenize",
            "POST /detokenize",
            "GET /tokenizer_info",
            "GET /server_info",
            "POST /reset_prefix_cache",
            "POST /reset_encoder_cache",
            "POST /reset_mm_cache",
            "POST /sleep",
            "POST /wake_up",
            "GET /is_sleeping",
            "POST /pause",
            "POST /resume",
            "GET /is_paused",
            "POST /scale_elastic_ep",
            "POST /is_scaling_elastic_ep",
            "POST /start_profile",
            "POST /stop_profile",
            "GET /ui/{name}",
            "GET /v1/realtime",
        ]

    with_server(scenario)


def test_models():
    config = EngineConfig.from_kwargs(served_model_name=["one", "org/two"])

    async def scenario(served):
        answer = (await served.http.get("/v1/models")).json()
        assert answer["object"] == "list"
        assert [m["id"] for m in answer["data"]] == ["one", "org/two"]
        card = (await served.http.get("/v1/models/org/two")).json()
        assert card == answer["data"][1]
        assert card == {
            "id": "org/two",
            "object": "model",
            "created": pytest.approx(time.time(), abs=20),
            "owned_by": "octavo",
            "root": "octavo/stories",
            "parent": None,
            "max_model_len": 256,
            "permission": [],
            "input_modalities": ["text"],
        }
        for name in ("one", "org/two"):
            assert (await served.complete(model=name)).json()["model"] == name
        response = await served.complete(model="octavo/stories")
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "model_not_found"
        assert "one, org/two" in response.json()["error"]["message"]

    with_server(scenario, lambda: FakeAsyncLLM(config))


def test_health_and_ready():
    async def scenario(served):
        async def probes():
            found = [await served.http.get(path) for path in ("/health", "/ready")]
            for response in found:
                unready = "ready" in response.text and response.status_code == 503
                assert response.headers.get("retry-after") == ("1" if unready else None)
            return [(response.status_code, response.json()) for response in found]

        def not_ready(reason):
            return 503, {"status": "not ready", "reason": reason}

        fine = 200, {"status": "ok", "reason": "ok"}
        assert await probes() == [fine, (200, {"status": "ready"})]
        served.engine.ready = False
        loading = 200, {"status": "ok", "reason": "loading the model"}
        assert await probes() == [loading, not_ready("loading the model")]
        served.engine.ready = True
        served.state.begin_drain()
        assert await probes() == [fine, not_ready("draining")]
        served.state.draining = False
        engine, served.state.engine = served.state.engine, None
        starting = 200, {"status": "ok", "reason": "starting"}
        assert await probes() == [starting, not_ready("loading the model")]
        served.state.engine = engine
        served.engine.dead, served.engine.ready = EngineDeadError("silent for 60 s"), False
        assert await probes() == [
            (503, {"status": "unhealthy", "reason": "silent for 60 s"}),
            not_ready("silent for 60 s"),
        ]
        served.engine.dead, served.engine.ready = None, True
        assert await probes() == [fine, (200, {"status": "ready"})]
        served.state.draining = True  # no request waits for an answer
        served.state.fail(EngineDeadError("its node was stopped"))
        assert served.state.failure is None
        served.state.draining = False
        served.state.fail(EngineDeadError("the device is gone"))
        served.state.fail(EngineDeadError("what came of it"))
        assert await probes() == [
            (503, {"status": "unhealthy", "reason": "the device is gone"}),
            not_ready("the device is gone"),
        ]

    with_server(scenario)


def test_before_there_is_an_engine():
    async def scenario(served):
        engine, served.state.engine = served.state.engine, None
        response = await served.http.get("/metrics")
        assert (response.status_code, response.content) == (200, b"")
        assert response.headers["content-type"].startswith("text/plain")
        (card,) = (await served.http.get("/v1/models")).json()["data"]
        assert card["max_model_len"] is None
        served.state.engine = engine

    with_server(scenario)


def test_an_engine_that_cannot_be_made():
    async def start():
        raise RuntimeError("no such luck")

    async def scenario():
        state = ServerState(ServerConfig(), EngineConfig(), start)
        failures = []
        state.on_failure = lambda: failures.append(str(state.failure))
        state.start()
        while state.failure is None:
            await asyncio.sleep(0.001)
        expected = "the engine could not be started: RuntimeError('no such luck')"
        assert failures == [expected]
        with pytest.raises(EngineDeadError) as caught:
            await state.get_engine()
        assert str(caught.value) == expected
        await state.close()
        await state.close()

    asyncio.run(scenario())


def test_a_template_that_cannot_be_used_is_told_at_once():
    async def scenario(served):
        failed = asyncio.Event()
        served.state.on_failure = failed.set
        await asyncio.wait_for(failed.wait(), 60)
        assert "chat_template" in str(served.state.failure)
        assert (await served.http.get("/health")).status_code == 503

    with_server(scenario, chat_template="/no/such/file.jinja")


def test_fingerprints_tell_settings_apart():
    def fingerprint(**settings):
        async def start():
            raise AssertionError

        config = EngineConfig.from_kwargs(**settings)
        return ServerState(ServerConfig(), config, start).system_fingerprint

    plain = fingerprint()
    assert re.fullmatch("fp_[0-9a-f]{12}", plain)
    assert fingerprint() == fingerprint(max_num_seqs=3) == plain  # the same bits at any load
    others = {fingerprint(kv_cache_dtype="int8"), fingerprint(dtype="float32")}
    assert len(others | {plain}) == 3


def test_requests_wait_while_the_model_loads():
    async def scenario(served):
        assert (await served.http.get("/health")).status_code == 200
        response = await served.http.get("/ready")
        assert response.status_code == 503
        assert response.json()["reason"] == "loading the model"
        assert (await served.http.get("/v1/models")).json()["data"][0]["max_model_len"] is None
        waiting = asyncio.create_task(served.complete())
        # Errors of the request are reported at once.
        assert (await served.complete(temperature=-1)).status_code == 400
        await asyncio.sleep(0.02)
        assert not waiting.done()
        served.engine.ready = True
        served.engine.loaded.set()
        assert (await waiting).status_code == 200
        assert (await served.http.get("/ready")).status_code == 200

    with_server(scenario, loading_engine)


def test_a_model_that_cannot_be_loaded():
    async def scenario(served):
        failed = asyncio.Event()
        served.state.on_failure = failed.set
        waiting = asyncio.create_task(served.complete())
        await asyncio.sleep(0.02)
        served.engine.load_error = EngineDeadError("out of memory: 5 GiB needed")
        served.engine.die("out of memory: 5 GiB needed")
        served.engine.loaded.set()
        response = await waiting
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "out of memory: 5 GiB needed"
        await failed.wait()
        for path in ("/health", "/ready"):
            assert (await served.http.get(path)).status_code == 503
        assert (await served.complete()).status_code == 503

    with_server(scenario, loading_engine)


@pytest.mark.parametrize("stream", [False, True])
def test_a_dying_engine_ends_requests_with_an_error_and_the_server(stream):
    async def scenario(served):
        failed = asyncio.Event()
        served.state.on_failure = failed.set
        served.engine.step_time = 0.005
        served.engine.answer = "x" * 200
        task = asyncio.create_task(served.complete(max_tokens=200, stream=stream))
        while not served.engine.live or served.engine.num_steps < 5:  # the answer has begun
            await asyncio.sleep(0.005)
        served.engine.die("killed by signal 9")
        response = await task
        assert "killed by signal 9" in response.text
        assert response.status_code == (200 if stream else 503)
        assert failed.is_set()

    with_server(scenario)


def test_an_engine_that_dies_idle_ends_the_server_too():
    async def scenario(served):
        failed = asyncio.Event()
        served.state.on_failure = failed.set
        await served.complete()
        served.engine.die("killed by signal 9")
        await asyncio.wait_for(failed.wait(), 60)
        assert "killed by signal 9" in str(served.state.failure)

    with_server(scenario)


def test_version_metrics_and_docs():
    async def scenario(served):
        assert (await served.http.get("/version")).json() == {"version": octavo.__version__}
        metrics = await served.http.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert "octavo:num_requests_running" in metrics.text
        assert (await served.http.get("/docs")).status_code == 200
        description = (await served.http.get("/openapi.json")).json()
        post = description["paths"]["/v1/chat/completions"]["post"]
        ref = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        schema = description["components"]["schemas"][ref.rpartition("/")[2]]
        assert {"messages", "temperature", "max_completion_tokens"} <= set(schema["properties"])

    with_server(scenario)


ADMIN_ROUTES = (
    "/reset_prefix_cache",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/start_profile",
    "/stop_profile",
    "/sleep",
    "/wake_up",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/pause",
    "/resume",
)


def test_all_of_the_operators_routes_are_known():
    found = {path for path, operation in OPERATIONS.items() if 403 in operation.errors}
    # Closed to pages of other sites only.
    found -= {"/v1/files", "/v1/batches/{batch_id}/cancel"}
    found -= {"/v1/audio/transcriptions", "/v1/audio/translations"}
    assert found == {*ADMIN_ROUTES, "/server_info", "/is_sleeping", "/is_paused"}


@pytest.mark.parametrize("path", ADMIN_ROUTES)
def test_the_operators_routes_are_closed_unless_it_is_known_who_that_is(path):
    async def closed(served):
        response = await served.post(path)
        assert response.status_code == 403
        error = response.json()["error"]
        assert error["code"] == "admin_disabled"
        assert path in error["message"]
        assert "--admin-key" in error["message"]
        assert "--enable-admin" in error["message"]
        assert not served.engine.was_reset
        assert not served.engine.profiling

    with_server(closed, profiled_engine)

    async def post(served, key):
        headers = {"Authorization": f"Bearer {key}"}
        response = await served.http.post(path, json={}, headers=headers)
        code = "" if response.status_code < 400 else response.json()["error"]["code"]
        return response.status_code, code

    async def with_keys(served):
        assert (await served.post(path)).status_code == 401
        for key in served.state.config.api_key:
            assert await post(served, key) == (403, "admin_disabled")

    with_server(with_keys, profiled_engine, api_key=["k"])
    with_server(with_keys, profiled_engine, api_key=["k", "j"])

    async def with_an_admin_key(served):
        assert (await post(served, "k"))[0] == 403
        # Errors of the request itself are checked after the key.
        assert (await post(served, "boss"))[0] in (200, 400, 404, 409)

    with_server(with_an_admin_key, profiled_engine, api_key=["k"], admin_key=["boss"])

    async def only_an_admin_key(served):
        assert (await served.complete()).status_code == 200
        assert (await post(served, "k")) == (403, "admin_key_required")
        assert (await served.post(path)).status_code == 403
        assert (await post(served, "boss"))[0] in (200, 400, 404, 409)

    with_server(only_an_admin_key, profiled_engine, admin_key=["boss"])

    async def everybody(served):
        assert (await post(served, "k"))[0] in (200, 400, 404, 409)
        assert (await served.post(path)).status_code == 401

    with_server(everybody, profiled_engine, api_key=["k"], enable_admin=True)

    async def from_a_web_page(served):
        # A page may send these without a preflight; browsers add the header Origin.
        origin = {"Origin": "http://example.org"}
        for headers in (origin, {"Origin": "null"}, {"Content-Type": "text/plain"}):
            response = await served.http.post(path, headers=headers)
            assert response.status_code == 415
        response = await served.http.post(path, content=b"{}")
        assert response.status_code == 415
        assert not served.engine.was_reset
        assert not served.engine.profiling

    with_server(from_a_web_page, profiled_engine, enable_admin=True)


def test_admin_routes_need_no_content_type_where_there_is_no_body():
    async def without_keys(served):
        assert (await served.http.post("/pause")).json() == {"status": "paused"}
        assert (await served.http.post("/resume")).json() == {"status": "resumed"}

    with_server(without_keys, enable_admin=True)

    async def with_an_admin_key(served):
        # A page of another site cannot send the key, so nothing else is checked.
        headers = {"Authorization": "Bearer boss", "Origin": "http://example.org"}
        assert (await served.http.post("/pause", headers=headers)).status_code == 200
        headers["Content-Type"] = "application/x-www-form-urlencoded"  # of `curl --data ''`
        assert (await served.http.post("/resume", headers=headers)).status_code == 200

    with_server(with_an_admin_key, admin_key=["boss"])


def test_reset_prefix_cache():
    async def scenario(served):
        response = await served.post("/reset_prefix_cache")
        assert response.json() == {"success": True}
        assert served.engine.was_reset
        await served.post("/reset_prefix_cache?reset_running_requests=true")
        await served.post("/reset_prefix_cache?reset_external=true&reset_running_requests=false")
        assert served.engine.resets == [(False, False), (True, False), (False, True)]
        response = await served.post("/reset_prefix_cache?reset_external=maybe")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "reset_external"
        assert len(served.engine.resets) == 3

    with_server(scenario, enable_admin=True)


def test_reset_of_media():
    async def scenario(served):
        response = await served.post("/reset_encoder_cache")
        assert response.json() == {"success": False}
        response = await served.post("/reset_mm_cache")
        assert response.json() == {"success": True}
        assert served.engine.resets == ["encoder", "mm"]

    with_server(scenario, enable_admin=True)


def profiled_engine():
    config = {"profiler_dir": "/traces", "enable_sleep_mode": True}
    return FakeAsyncLLM(EngineConfig.from_kwargs(**config))


def test_sleeping_and_waking_up():
    async def scenario(served):
        async def ready():
            return (await served.http.get("/ready")).json().get("reason")

        get, post, engine = served.http.get, served.post, served.engine
        assert (await get("/is_sleeping")).json() == {"is_sleeping": False}
        assert (await post("/sleep")).json() == {"status": "sleeping", "level": 1}
        assert (await get("/is_sleeping")).json() == {"is_sleeping": True}
        assert await ready() == "asleep"
        assert (await get("/health")).status_code == 200
        answer = (await post("/wake_up?tags=weights")).json()
        assert answer == {"status": "sleeping", "tags": ["weights"]}
        assert await ready() == "asleep"
        answer = (await post("/wake_up?tags=weights&tags=kv_cache")).json()
        assert answer == {"status": "awake", "tags": ["weights", "kv_cache"]}
        assert await ready() is None
        await post("/sleep?level=2&mode=keep")
        assert (await post("/wake_up")).json() == {"status": "awake", "tags": None}
        expected = [(1, "abort"), (["weights"],), (["weights", "kv_cache"],), (2, "keep"), (None,)]
        assert engine.sleeps == expected
        for query, param in (("level=3", "level"), ("level=one", "level"), ("mode=stop", "mode")):
            response = await post(f"/sleep?{query}")
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
        assert engine.sleeps == expected

    with_server(scenario, profiled_engine, enable_admin=True)


def test_pausing_and_resuming():
    async def scenario(served):
        get, post, engine = served.http.get, served.post, served.engine
        assert (await post("/pause")).json() == {"status": "paused"}
        assert (await get("/is_paused")).json() == {"is_paused": True}
        assert (await post("/resume")).json() == {"status": "resumed"}
        assert (await get("/is_paused")).json() == {"is_paused": False}
        await post("/pause?mode=keep&clear_cache=false")
        assert engine.sleeps == [("abort", True), ("keep", False)]
        for query, param in (("mode=stop", "mode"), ("clear_cache=no", "clear_cache")):
            response = await post(f"/pause?{query}")
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
        assert len(engine.sleeps) == 2

    with_server(scenario, enable_admin=True)


def elastic_engine():
    return FakeAsyncLLM(EngineConfig.from_kwargs(enable_elastic_ep=True))


def test_the_number_of_engines():
    async def scenario(served):
        async def scale(size):
            return await served.post("/scale_elastic_ep", new_data_parallel_size=size)

        answer = (await scale(3)).json()
        assert answer == {"message": "Scaled to 3 data parallel engines"}
        assert served.engine.num_engines == 3
        answer = (await served.post("/is_scaling_elastic_ep")).json()
        assert answer == {"is_scaling_elastic_ep": False}
        for size, status in ((0, 400), (1025, 400), ("many", 400), (None, 400), (9, 409)):
            response = await scale(size)
            assert response.status_code == status
            assert response.json()["error"]["param"] == "new_data_parallel_size"
        assert served.engine.num_engines == 3

    with_server(scenario, elastic_engine, enable_admin=True)


@pytest.mark.parametrize("path", ["/scale_elastic_ep", "/is_scaling_elastic_ep"])
def test_who_may_change_the_number_of_engines_and_where(path):
    async def closed(served):
        response = await served.post(path, new_data_parallel_size=2)
        assert response.json()["error"]["code"] == "admin_disabled"

    with_server(closed, elastic_engine)

    async def fixed(served):
        response = await served.post(path, new_data_parallel_size=2)
        assert response.status_code == 404
        assert "--enable-elastic-ep" in response.json()["error"]["message"]
        assert served.engine.num_engines == 1

    with_server(fixed, enable_admin=True)


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/is_sleeping"])
def test_without_sleep_mode_there_is_no_sleep(path):
    async def scenario(served):
        method = "GET" if path == "/is_sleeping" else "POST"
        response = await served.http.request(method, path, json={})
        assert response.status_code == 404
        assert "--enable-sleep-mode" in response.json()["error"]["message"]

    with_server(scenario, enable_admin=True)


def test_who_may_ask_whether_it_sleeps():
    async def scenario(served):
        response = await served.http.get("/is_sleeping")
        assert response.json()["error"]["code"] == "admin_disabled"

    with_server(scenario, profiled_engine)


def test_profiles_are_started_and_stopped():
    async def scenario(served):
        response = await served.post("/stop_profile")
        assert response.status_code == 409
        assert response.json()["error"]["code"] == "profiler"
        assert (await served.post("/start_profile")).json() == {"status": "recording"}
        response = await served.post("/start_profile")
        assert response.status_code == 409
        assert "recorded already" in response.json()["error"]["message"]
        assert (await served.post("/stop_profile")).json() == {"path": "/traces/1.trace.json"}

    with_server(scenario, profiled_engine, enable_admin=True)


@pytest.mark.parametrize("path", ["/start_profile", "/stop_profile"])
def test_without_a_folder_there_are_no_profiles(path):
    async def scenario(served):
        response = await served.post(path)
        assert response.status_code == 404
        assert "--profiler-dir" in response.json()["error"]["message"]
        assert not served.engine.profiling

    with_server(scenario, enable_admin=True)


def test_tokenize_and_back():
    async def scenario(served):
        answer = (await served.post("/tokenize", prompt="hé", return_token_strs=True)).json()
        assert answer["count"] == 4
        assert answer["max_model_len"] == 256
        assert answer["tokens"] == [256, 104, 0xC3, 0xA9]
        assert answer["token_strs"] == ["<s>", "h", "Ã", "©"]
        answer = (await served.post("/detokenize", tokens=answer["tokens"])).json()
        assert answer == {"prompt": "<s>hé"}
        answer = (await served.post("/tokenize", prompt="h", add_special_tokens=False)).json()
        assert answer["tokens"] == [104]
        assert answer["token_strs"] is None
        long = (await served.post("/tokenize", prompt="x" * 50_000)).json()
        assert long["count"] == 50_001

    with_server(scenario)


def test_ids_outside_the_vocabulary_are_not_turned_into_text():
    async def scenario(served):
        assert (await served.post("/detokenize", tokens=[257])).status_code == 200
        for tokens in ([258], [5, 258, 6], [2**31 - 1]):
            response = await served.post("/detokenize", tokens=tokens)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "tokens"
            assert f"{max(tokens)}" in error["message"]
            assert "258 tokens" in error["message"]

    with_server(scenario)

    async def more_tokens_than_rows(served):
        served.engine.spec.vocab_size = 200
        ids = (await served.post("/tokenize", prompt="a")).json()["tokens"]
        assert max(ids) > 200
        response = await served.post("/detokenize", tokens=ids)
        assert response.json() == {"prompt": "<s>a"}

    with_server(more_tokens_than_rows)


def test_tokenize_a_chat():
    async def scenario(served):
        messages = [{"role": "user", "content": "a"}]
        answer = (await served.post("/tokenize", messages=messages)).json()
        text = (await served.post("/detokenize", tokens=answer["tokens"])).json()["prompt"]
        assert text == "<s><user>a</s><assistant>"

    with_server(scenario)


def test_cors_only_for_the_allowed():
    headers = {"Origin": "https://app.test", "Access-Control-Request-Method": "POST"}

    async def allowed(served):
        response = await served.http.options("/v1/completions", headers=headers)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == "https://app.test"
        # Errors have the headers as well, so that scripts can read them.
        response = await served.http.post("/v1/completions", headers=headers)
        assert response.status_code == 401
        assert response.headers["access-control-allow-origin"] == "https://app.test"

    with_server(allowed, allowed_origins=["https://app.test"], api_key=["k"])

    async def off(served):
        response = await served.http.get("/version", headers=headers)
        assert "access-control-allow-origin" not in response.headers
        assert (await served.http.options("/v1/completions", headers=headers)).status_code == 405

    with_server(off)


def test_request_ids():
    async def scenario(served):
        response = await served.http.get("/version", headers={"X-Request-Id": "abc-1"})
        assert response.headers["x-request-id"] == "abc-1"
        for bad in ("a b", "x" * 200, ""):
            response = await served.http.get("/version", headers={"X-Request-Id": bad})
            assert response.headers["x-request-id"] not in ("", bad)
        error = await served.http.post(
            "/v1/completions", json={}, headers={"X-Request-Id": "abc-2"}
        )
        assert error.status_code == 400
        assert error.headers["x-request-id"] == "abc-2"
        # Two simultaneous uses of an id are two requests.
        both = await asyncio.gather(*(served.complete(request_id="same") for _ in range(2)))
        assert [r.status_code for r in both] == [200, 200]

    with_server(scenario)


def test_an_unexpected_error_is_a_500_and_harms_no_other():
    async def scenario(served):
        async def broken(*what):
            raise RuntimeError("boom")

        served.engine.reset_prefix_cache = broken
        response = await served.post("/reset_prefix_cache")
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "internal_error"
        assert "boom" not in response.text
        assert (await served.complete()).status_code == 200

    with_server(scenario, enable_admin=True)


def test_ping_is_health():
    async def scenario(served):
        for method in ("GET", "POST"):
            assert (await served.http.request(method, "/ping")).status_code == 200
        served.engine.die("gone")
        response = await served.http.post("/ping")
        assert (response.status_code, response.json()["reason"]) == (503, "gone")

    with_server(scenario, api_key=["secret"])


def test_load_counts_what_is_being_answered():
    async def scenario(served):
        async def load():
            return (await served.http.get("/load")).json()["server_load"]

        assert await load() == 0
        served.engine.paused = True
        tasks = [asyncio.create_task(served.complete()) for _ in range(3)]
        while served.engine.num_unfinished_requests < 3:
            await asyncio.sleep(0)
        assert await load() == 3
        served.engine.paused = False
        await asyncio.gather(*tasks)
        assert await load() == 0

    with_server(scenario)


def test_the_tokenizers_configuration():
    def engine():
        tokenizer = make_tokenizer()
        tokenizer.config |= {
            "bos_token": {"content": "<s>", "special": True},
            "model_max_length": 10**30,
            "chat_template": [],
        }
        return FakeAsyncLLM(tokenizer=tokenizer)

    async def scenario(served):
        answer = (await served.http.get("/tokenizer_info")).json()
        assert answer == {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "add_bos_token": True,
            "model_max_length": 10**30,
            "chat_template": "own: {{ messages }}",
        }

    flags = {"enable_tokenizer_info_endpoint": True, "chat_template": "own: {{ messages }}"}
    with_server(scenario, engine, **flags)


def test_the_tokenizers_configuration_is_shown_to_nobody_unasked():
    async def scenario(served):
        response = await served.http.get("/tokenizer_info")
        assert response.status_code == 404
        assert "--enable-tokenizer-info-endpoint" in response.json()["error"]["message"]

    with_server(scenario)


def test_server_info(monkeypatch):
    monkeypatch.setenv("OCTAVO_ISA_OF_TEST", "avx2")
    for name in ("OCTAVO_API_KEY", "VLLM_HF_TOKEN"):
        monkeypatch.setenv(name, "top-secret")
    config = EngineConfig.from_kwargs(served_model_name=["fake"], seed=7)

    async def scenario(served):
        text, data = [
            await served.http.get("/server_info", params={"config_format": form})
            for form in ("text", "json")
        ]
        assert "seed=7" in text.json()["vllm_config"]
        assert data.json()["vllm_config"]["model"]["seed"] == 7
        for response in (text, data):
            assert response.json()["vllm_env"]["OCTAVO_ISA_OF_TEST"] == "avx2"
            assert response.json()["system_env"]["octavo_version"] == octavo.__version__
            assert "top-secret" not in response.text
        response = await served.http.get("/server_info?config_format=yaml")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "config_format"

    with_server(scenario, lambda: FakeAsyncLLM(config), enable_admin=True)


def test_server_info_is_the_operators():
    async def scenario(served):
        response = await served.http.get("/server_info")
        assert (response.status_code, response.json()["error"]["code"]) == (403, "admin_disabled")

    with_server(scenario)


def test_invocations():
    async def scenario(served):
        post = served.post
        answer = (await post("/invocations", prompt="hi", max_tokens=3)).json()
        assert (answer["object"], answer["choices"][0]["text"]) == ("text_completion", "Hel")
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        answer = (await post("/invocations", **chat)).json()
        assert answer["choices"][0]["message"]["content"] == "Hel"
        streamed = await events(await post("/invocations", **chat, stream=True))
        assert '"object":"chat.completion.chunk"' in streamed[0]
        response = await post("/invocations", **chat, mood=1)
        assert response.headers["X-Octavo-Ignored-Fields"] == "mood"
        for body, param in (
            ({}, "prompt"),
            ({**chat, "prompt": "x"}, "prompt"),
            ({"n": 1}, "prompt"),
        ):
            response = await post("/invocations", **body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
        assert (await post("/invocations", **chat, top_p=7)).json()["error"]["param"] == "top_p"

    with_server(scenario)


def test_the_documentation_needs_no_network():
    async def scenario(served):
        response = await served.http.get("/docs")
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        assert response.headers["content-security-policy"].startswith("default-src 'none'")
        page = response.text
        for reference in re.findall(r'(?:src|href)="?([^ >"]+)', page):
            assert reference == "openapi.json" or f'id="{reference.removeprefix("#")}"' in page
        for shown in ("/v1/chat/completions", "max_completion_tokens", "config_format", "messages"):
            assert shown in page
        assert "//" not in page

    with_server(scenario)


def test_no_documentation():
    async def scenario(served):
        for path in ("/docs", "/openapi.json", "/redoc"):
            assert (await served.http.get(path)).status_code == 404
        assert (await served.complete()).status_code == 200

    with_server(scenario, disable_fastapi_docs=True)


def test_behind_a_path_of_a_proxys():
    async def scenario(served):
        for prefix in ("", "/llm"):  # a proxy may leave it out or not
            assert (await served.http.get(prefix + "/health")).status_code == 200
            assert (await served.http.get(prefix + "/v1/models")).status_code == 401
            described = (await served.http.get(prefix + "/openapi.json")).json()
            assert described["servers"] == [{"url": "/llm"}]
        for path in ("/llmhealth", "/llm/llm/health"):
            assert (await served.http.get(path)).status_code == 401

    with_server(scenario, root_path="/llm", api_key=["secret"])


async def tag_answer(request, call_next):
    response = await call_next(request)
    response.headers["X-Tags"] = response.headers.get("X-Tags", "") + "function"
    return response


class TagAnswer:
    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        async def send_tagged(message):
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-tags", b"class,")]
            await send(message)

        await self.app(scope, receive, send_tagged)


def test_the_operators_middleware():
    async def scenario(served):
        for stream in (False, True):
            response = await served.complete(stream=stream)
            assert response.status_code == 200
            assert response.headers["X-Tags"] == "class,function"
        assert (await served.complete(top_p=7)).headers["X-Tags"] == "class,function"

    with_server(scenario, middleware=[f"{__name__}.TagAnswer", f"{__name__}.tag_answer"])


def test_the_templates_default_variables():
    async def scenario(served):
        prompts = []
        for given in (None, {}, {"hint": "mine"}, {"other": 1}):
            await served.chat(chat_template_kwargs=given)
            prompts.append(bytes(i for i in served.engine.requests[-1].prompt_token_ids if i < 256))
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        tokens = (await served.post("/tokenize", **chat)).json()["tokens"]
        prompts.append(bytes(i for i in tokens if i < 256))
        hints = [p.removeprefix(b"<user>hi").removesuffix(b"<assistant>") for p in prompts]
        assert hints == [b"ours", b"ours", b"mine", b"ours", b"ours"]

    with_server(scenario, default_chat_template_kwargs={"hint": "ours"})


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": False}}])
def test_usage_of_every_stream(options):
    async def scenario(served):
        for ask in (served.complete, served.chat):
            chunks = await events(await ask(stream=True, max_tokens=2, **options))
            usages = [json.loads(chunk)["usage"]["completion_tokens"] for chunk in chunks]
            assert usages == sorted(usages)
            assert usages[-1] == 2

    with_server(scenario, enable_force_include_usage=True)


def test_usage_without_details():
    async def scenario(served):
        assert (await served.chat()).json()["usage"]["prompt_tokens_details"] is None

    with_server(scenario, enable_prompt_tokens_details=False)


def test_metrics_of_each_request():
    """vLLM reports them for one answer to one prompt, on the usage chunk of a stream; else null."""
    usage = {"stream_options": {"include_usage": True}}

    async def scenario(served):
        for ask in (served.complete, served.chat):
            metrics = (await ask(max_tokens=3)).json()["metrics"]
            TypeAdapter(generation_answers.PerRequestMetrics).validate_python(metrics)
            assert metrics["generation_time_ms"] == pytest.approx(2 * metrics["mean_itl_ms"])
            assert "metrics" not in (await ask(max_tokens=3, n=2, temperature=1)).json()
            *others, last = await events(await ask(stream=True, max_tokens=3, **usage))
            assert json.loads(last)["metrics"]["generation_time_ms"] >= 0
            assert not any("metrics" in json.loads(chunk) for chunk in others)
            *_, last = await events(await ask(stream=True, max_tokens=1, **usage))
            assert "mean_itl_ms" not in json.loads(last)["metrics"]

    with_server(scenario, enable_per_request_metrics=True)
    times = RequestMetrics(10.0, 10.5, 11.0, 13.0)
    assert metrics_json(times, 5) == {
        "time_to_first_token_ms": 500.0,
        "generation_time_ms": 2000.0,
        "queue_time_ms": 500.0,
        "mean_itl_ms": 500.0,
        "tokens_per_second": 2.0,
    }
    assert set(metrics_json(RequestMetrics(), 0).values()) == {None}
    assert metrics_json(times, 1)["mean_itl_ms"] is None
