"""Requests of every kind, answered through a router as by a server."""

import asyncio
import base64
import io
import json
import re

import httpx
import torch

from octavo.config import EngineConfig, ServerConfig
from octavo.server.app import ROUTES, build_app
from octavo.server.state import ServerState
from tests.router.servers import Routed
from tests.server.fake_engine import FakeAsyncLLM


def embeds(tokens):
    file = io.BytesIO()
    torch.save(torch.full((tokens, 4), 0.5, dtype=torch.bfloat16), file)
    return base64.b64encode(file.getvalue()).decode()


TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
MESSAGES, ASKED = "/v1/messages", HI | {"model": "fake", "max_tokens": 9}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
BEAMS = {"use_beam_search": True, "max_tokens": 4}
KINDS = {
    "plain": (TEXT, {"prompt": "hi"}),
    "stream": (TEXT, {"prompt": "hi", **STREAM}),
    "n": (TEXT, {"prompt": "hi", "n": 3}),
    "n stream": (TEXT, {"prompt": "hi", "n": 3, **STREAM}),
    "best_of": (TEXT, {"prompt": "hi", "n": 1, "best_of": 3}),
    "seed": (TEXT, {"prompt": "hi", "seed": 5}),
    "greedy": (TEXT, {"prompt": "hi", "temperature": 0}),
    "beams": (TEXT, {"prompt": "hi", "n": 2, **BEAMS}),
    "beams of several": (TEXT, {"prompt": ["a", "b"], "n": 2, "echo": True, **BEAMS}),
    "beams of tokens": (TEXT, {"prompt": [1, 2], "length_penalty": 2.0, **BEAMS}),
    "beams of embeddings": (TEXT, {"prompt_embeds": embeds(2), **BEAMS}),
    "echo": (TEXT, {"prompt": "hi", "echo": True, "logprobs": 2, "max_tokens": 3}),
    "echo only": (TEXT, {"prompt": "hi", "echo": True, "max_tokens": 0}),
    "echo stream": (TEXT, {"prompt": "hi", "echo": True, "logprobs": 1, **STREAM}),
    "logprobs": (TEXT, {"prompt": "hi", "logprobs": 3, "return_token_ids": True}),
    "logprobs stream": (TEXT, {"prompt": "hi", "logprobs": 3, "return_token_ids": True, **STREAM}),
    "prompt logprobs": (TEXT, {"prompt": "hi", "prompt_logprobs": 1}),
    "tokens": (TEXT, {"prompt": [72, 105]}),
    "one in a list": (TEXT, {"prompt": ["hi"]}),
    "several": (TEXT, {"prompt": ["a", "b", "c"]}),
    "several of tokens": (TEXT, {"prompt": [[1], [2, 3]], **STREAM}),
    "embeddings": (TEXT, {"prompt_embeds": embeds(3)}),
    "embeddings and texts": (TEXT, {"prompt_embeds": [embeds(1), embeds(2)], "prompt": ["a"]}),
    "grammar": (TEXT, {"prompt": "hi", "structured_outputs": {"regex": "a+"}}),
    "stop": (TEXT, {"prompt": "hi", "stop": ["w"], "include_stop_str_in_output": True}),
    "salt": (TEXT, {"prompt": "hi", "cache_salt": "s", "priority": 0, "deadline_ms": 20_000}),
    "chat": (CHAT, HI),
    "chat stream": (CHAT, HI | STREAM | {"n": 2, "logprobs": True, "top_logprobs": 2}),
    "chat beams": (CHAT, HI | BEAMS | {"n": 2, "temperature": 0}),
    "chat format": (
        CHAT,
        HI
        | {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA},
            }
        },
    ),
    "chat echo": (CHAT, HI | {"echo": True, "max_completion_tokens": 3}),
    "several chats": (CHAT + "/batch", {"messages": [HI["messages"], HI["messages"]]}),
    "tokens in and out": (
        "/inference/v1/generate",
        {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3}, "request_id": "a"},
    ),
    "invoked text": ("/invocations", {"prompt": "hi"}),
    "invoked chat": ("/invocations", HI | STREAM),
    "invoked beams": ("/invocations", HI | BEAMS),
    "tokenize": ("/tokenize", HI),
    "detokenize": ("/detokenize", {"tokens": [72, 105]}),
    "messages": (MESSAGES, ASKED),
    "messages stream": (MESSAGES, ASKED | {"stream": True}),
    "count": (MESSAGES + "/count_tokens", HI),
    "refused messages": (MESSAGES, HI),
    "response": ("/v1/responses", {"input": "hi", "store": False}),
    "response stream": ("/v1/responses", {"input": "hi", "stream": True}),
    "input tokens": ("/v1/responses/input_tokens", {"input": "hi"}),
    "conversation": ("/v1/conversations", {"metadata": {"a": "b"}}),
    "ollama chat": ("/api/chat", HI | {"model": "fake"}),
    "ollama": ("/api/generate", {"model": "fake", "prompt": "hi", "stream": False}),
    "ollama model": ("/api/show", {"model": "fake"}),
    "refused by ollama": ("/api/chat", HI | {"model": "other"}),
    "refused": (TEXT, {"prompt": "hi", "max_tokens": -1}),
    "unknown model": (CHAT, HI | {"model": "other"}),
}
OF_THE_OPERATOR = {
    "/server_info",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/reset_prefix_cache",
    "/reset_encoder_cache",
    "/reset_mm_cache",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/pause",
    "/resume",
    "/is_paused",
    "/scale_elastic_ep",
    "/is_scaling_elastic_ep",
    "/start_profile",
    "/stop_profile",
    "/tokenizer_info",
}
"""Routes for a server's operator, who calls the server itself."""
OF_ONE_SERVER = ("/v1/files", "/v1/batches", "/v1/streams")
"""Beginnings of routes for what one server stores, and the router does not know which."""


class AppServer:
    """Application of a server in place of `aiohttp.ClientSession`, see `FakeServer`."""

    def __init__(self, app):
        transport = httpx.ASGITransport(app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server", timeout=20)

    async def answer(self, request):
        got = await self.client.request(
            request.method, request.url, headers=request.headers, content=request.content
        )
        return got.status_code, dict(got.headers), [got.content]


def same(answer):
    """Return an answer without the fields that always differ."""
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
    kept = [without_own(json.loads(line)) for line in lines if line.startswith("{")]
    return answer.status_code, kept, answer.text.endswith("[DONE]\n\n")


def without_own(value):
    if isinstance(value, list):
        return [without_own(part) for part in value]
    if not isinstance(value, dict):
        return value
    return {
        k: without_own(v)
        for k, v in value.items()
        if k not in ("id", "item_id", "created", "event") and not k.endswith(("_at", "_duration"))
    }


def test_every_kind_of_request_is_answered_as_by_a_server():
    settings = EngineConfig.from_kwargs(served_model_name=["fake"], enable_prompt_embeds=True)

    async def run():
        engine = FakeAsyncLLM(settings)

        async def start():
            return engine

        state = ServerState(ServerConfig(), settings, start)
        state.start()
        server = AppServer(build_app(state))
        async with Routed([server.answer]) as router:
            for name, (path, body) in KINDS.items():
                direct = await server.client.post(path, json=body)
                routed = await router.client.post(path, json=body)
                assert same(routed) == same(direct), name
                refused = name.startswith(("refused", "unknown model"))
                assert (routed.status_code == 200) != refused, (name, routed.text)
            for path in ("/v1/models", "/v1/models/fake", "/v1/models/other"):
                direct, routed = [await c.get(path) for c in (server.client, router.client)]
                assert (routed.status_code, routed.text) == (direct.status_code, direct.text)
        await server.client.aclose()
        await state.close()

    asyncio.run(run())


def test_every_address_of_a_server_is_the_routers_or_the_operators():
    async def run():
        async with Routed([lambda request: (200, {}, [b"{}"])]) as router:
            for path, _, method in ROUTES:
                asked = re.sub(r"\{\w+(:path)?\}", "a", path)
                answer = await router.client.request(method, asked, json={})
                if path in OF_THE_OPERATOR or path.startswith(OF_ONE_SERVER):
                    assert answer.status_code in (404, 405), path
                    assert answer.json()["error"]["code"] == "not_found", path
                else:
                    assert answer.status_code not in (404, 405), path
            assert (await router.client.head("/")).status_code == 200
            assert (await router.client.get("/v1/streams/a")).status_code == 404

    asyncio.run(run())
