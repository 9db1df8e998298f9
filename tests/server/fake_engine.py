"""Fake `AsyncLLM` without a model: real input and output processing, invented tokens.

The answer to every request is the bytes of `answer` as tokens, one a step, then the
end-of-sequence token.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from octavo.config import EngineConfig, ServerConfig
from octavo.errors import AdapterError, EngineDeadError, ProfilerError, ScalingError
from octavo.frontend.beam_search import make_beam_search, prompt_params, run_beam_search
from octavo.frontend.input_processor import InputProcessor
from octavo.frontend.output_processor import OutputProcessor, RequestOutputCollector
from octavo.frontend.pooling import pooling_output
from octavo.frontend.prompts import processing_time
from octavo.frontend.request_memory import RequestMemory
from octavo.frontend.step_log import StepLog
from octavo.kv_cache.block_map import BlockMap
from octavo.messages import (
    AdapterRef,
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    LogprobsLists,
)
from octavo.models.blocks.pooler import NO_SENTENCES, PoolerSpec
from octavo.observability.metrics import EngineMetrics
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.quantization.plain import PLAIN
from octavo.sampling_params import BEAM_DEFAULTS, BeamSearchParams, SamplingParams
from octavo.server.adapter_table import AdapterTable
from octavo.server.app import build_app
from octavo.server.state import ServerState
from octavo.system import clock
from octavo.system.offload import offload
from octavo.text.tokenizer import Tokenizer
from tests.params import pack_logprobs

ANSWER = "Hello, wörld!"
MAX_MODEL_LEN = 256
BOS, EOS = 256, 257
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{{ hint or '' }}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE) -> Tokenizer:
    """Return a tokenizer with one token for each byte, <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: ord(c))
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(printable)]
    byte_of = {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}
    backend = tokenizers.Tokenizer(models.BPE(vocab={c: byte_of[c] for c in alphabet}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    return Tokenizer(backend, config, {} if template is None else {"default": template})


class FakeSpec(SimpleNamespace):
    """Description of the fake model; it generates text if it has no poolers."""

    sees_all = False
    is_encoder_decoder = False
    sentences = NO_SENTENCES
    beams = BEAM_DEFAULTS

    @property
    def generates(self) -> bool:
        return not self.poolers

    def encoder(self, modality):
        return None

    def pooler(self, task):
        return next((pooler for pooler in self.poolers if pooler.task == task), None)


class FakeAsyncLLM:
    """Fake engine, see the module. `paused` holds all requests in their state."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
        generation_config: dict[str, float | int] | None = None,
        poolers: Sequence[PoolerSpec] = (),
    ) -> None:
        self.config = config or EngineConfig.from_kwargs(served_model_name=["fake"])
        self.tokenizer = (
            None if self.config.model.skip_tokenizer_init else tokenizer or make_tokenizer()
        )
        self.spec = FakeSpec(
            poolers=tuple(poolers),
            vocab_size=258,
            embed_size=4,
            eos_token_ids=(EOS,),
            generation_config=generation_config or {},
            architecture="FakeForCausalLM",
            generates=True,
            is_encoder_decoder=False,
            dtype="float32",
            hidden_size=4,
            layers=(),
            weights=lambda: [SimpleNamespace(sources=(), shape=(258, 4), form=PLAIN)],
            weight_nbytes=lambda dtype: 258 * 4 * 4,
        )
        self.max_model_len = MAX_MODEL_LEN
        self.chat_media = None
        self.request_memory = RequestMemory(2**30)
        self.metrics = EngineMetrics("fake", MAX_MODEL_LEN)
        self.stats = SchedulerStats()
        self.step_log = StepLog()
        self.engine_stats: dict[int, SchedulerStats] = {}
        self.maps: dict[int, BlockMap] = {}
        self.max_num_batched_tokens = 2048
        self.num_blocks = 0
        self.ready = True
        self.num_steps = 0
        self.answer = ANSWER
        self.token_logprobs: dict[int, float] = {}
        """Logprobs of the answers' tokens, by index; others have -0.5."""
        self.pool: Callable[[list[int], PoolerSpec], np.ndarray] = fake_pool
        """Function that makes a result of a text's tokens."""
        self.grammar_error: str | None = None
        """Error of every grammar, which the core finds when it compiles the grammar."""
        self.num_cached_tokens = 0
        self.cache_emptied_at: float | None = None
        self.holder: tuple[int, int] | None = None
        """Other engine with more of a prompt, and the number of its tokens; see `Stages`."""
        self.paused = False
        self.step_time = 0.0
        self.dead: EngineDeadError | None = None
        self.load_error: Exception | None = None
        self.loaded = asyncio.Event()
        self.loaded.set()
        self.requests: list[EngineCoreRequest] = []
        self.params: list[SamplingParams] = []
        """Parameters of each of `requests`."""
        self.beam_params: list[BeamSearchParams] = []
        self.live: dict[str, tuple[EngineCoreRequest, int]] = {}
        """Request and index of its answer, by core id."""
        self.aborted: list[str] = []
        self.num_to_abort = 0
        """Number of answers that the operator is still to stop at their second token."""
        self.was_reset, self.resets = False, []
        self.profiling = False
        self.asleep = self.scaling = False
        self.num_engines = 1
        self.sleeps: list[tuple[object, ...]] = []
        """Arguments of the calls of `sleep` and `wake_up`."""
        self.was_shut_down = False
        self._progress: dict[str, int] = {}
        self._input = InputProcessor(
            self.config.model, self.spec, self.tokenizer, self.max_model_len
        )
        self._output = OutputProcessor(self.tokenizer, self.metrics)
        self._stepping: asyncio.Task[None] | None = None

    async def serve(self, prompt, params, request_id, options, *, add_special_tokens, stages=None):
        request, text = await self.process(prompt, params, request_id, options, add_special_tokens)
        if stages is not None:
            stages.end("tokenize")
            stages.end("to_engine")
            stages.holder = self.holder
        async with aclosing(self._stream(request, params, text)) as outputs:
            async for output in outputs:
                yield output

    async def serve_pooling(
        self, prompt, params, request_id, options, *, add_special_tokens, stages=None
    ):
        if self.dead is not None:
            raise self.dead
        request, pooler = self._input.pooling.process(
            request_id, prompt, params, options, add_special_tokens=add_special_tokens
        )
        if stages is not None:
            stages.end("tokenize")
            stages.end("to_engine")
        async with aclosing(self._stream(request, params.as_sampling_params())) as stream:
            (output,) = [output async for output in stream]
        return pooling_output(output, pooler, params)

    async def serve_beams(
        self, prompt, params, request_id, options, *, add_special_tokens, stages=None
    ):
        self.beam_params.append(params)
        of_prompt = prompt_params(params, self.spec)
        request, text = await self.process(
            prompt, of_prompt, request_id, options, add_special_tokens
        )
        search = make_beam_search(params, request, self.spec)
        return await run_beam_search(request, text, search, of_prompt, self.tokenizer, self._stream)

    async def process(self, prompt, params, request_id, options, add_special_tokens):
        if self.dead is not None:
            raise self.dead
        return await offload(
            processing_time(prompt, params),
            self._input.process,
            request_id,
            prompt,
            params,
            options,
            add_special_tokens=add_special_tokens,
        )

    async def _stream(self, request, sampling_params, text=None):
        queue = RequestOutputCollector(sampling_params.output_kind)
        finished = False
        try:
            self._output.add_request(request, sampling_params, text, queue)
            self.requests.append(request)
            self.params.append(sampling_params)
            for index, core_id in enumerate(request.child_ids):
                self.live[core_id] = request, index
                self._progress[core_id] = 0
            if self._stepping is None or self._stepping.done():
                self._stepping = asyncio.create_task(self._run())
            while not finished:
                output = queue.get_nowait() or await queue.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                await self.abort(request.request_id)

    async def abort(self, request_id):
        for core_id in self._output.abort_requests([request_id]):
            self.live.pop(core_id, None)
            self.aborted.append(core_id)

    @property
    def num_unfinished_requests(self) -> int:
        return self._output.num_unfinished_requests

    def live_answers(self):
        for number, answer in enumerate(self._output.live_answers()):
            yield answer._replace(core_id=f"{answer.core_id}#{number}")

    def engine_of(self, core_id):
        return 0

    async def block_maps(self):
        return self.maps

    async def expert_counts(self):
        return {}

    @property
    def is_running(self) -> bool:
        return self.dead is None

    @property
    def loading(self) -> bool:
        return not self.loaded.is_set()

    def health(self):
        if self.dead is not None:
            return SimpleNamespace(ok=False, reason=str(self.dead))
        return SimpleNamespace(ok=True, reason="ok" if self.ready else "loading the model")

    async def render_metrics(self):
        return self.metrics.render()

    async def wait_ready(self):
        await self.loaded.wait()
        if self.load_error is not None:
            raise self.load_error

    async def reset_prefix_cache(self, reset_running_requests=False, reset_connector=False):
        self.was_reset = True
        self.resets.append((reset_running_requests, reset_connector))
        return True

    async def reset_encoder_cache(self):
        self.resets.append("encoder")
        return False

    async def reset_mm_cache(self):
        self.resets.append("mm")

    async def sleep(self, level, mode):
        self.sleeps.append((level, mode))
        self.asleep = True

    async def wake_up(self, tags):
        self.sleeps.append((tags,))
        self.asleep = tags == ["weights"]
        return not self.asleep

    async def check_default_adapters(self):
        pass

    async def resolve_adapter(self, lora_request, root=None):
        if "bad" in lora_request.lora_path:
            raise AdapterError(f"{lora_request.lora_path} is damaged.")
        path = lora_request.lora_path
        name, draft = lora_request.lora_name, lora_request.draft_path
        return AdapterRef(
            name, path, f"content of {path}", draft=draft and AdapterRef("", draft, f"of {draft}")
        )

    async def scale(self, size):
        if size > 8:
            raise ScalingError("There is no room.")
        self.num_engines = size

    async def is_sleeping(self):
        return self.asleep

    async def pause_generation(self, *, mode, clear_cache):
        self.sleeps.append((mode, clear_cache))
        self.asleep = True

    async def resume_generation(self):
        self.asleep = False

    async def is_paused(self):
        return self.asleep

    async def start_profile(self):
        if self.profiling:
            raise ProfilerError("A profile is being recorded already.")
        self.profiling = True

    async def stop_profile(self):
        if not self.profiling:
            raise ProfilerError("No profile is being recorded.")
        self.profiling = False
        return "/traces/1.trace.json"

    async def shutdown(self):
        self.was_shut_down = True
        if self._stepping is not None:
            self._stepping.cancel()

    def die(self, reason: str) -> None:
        self.dead = EngineDeadError(reason)
        self.ready = False
        self.live.clear()
        self._output.propagate_error(self.dead)

    async def _run(self) -> None:
        while self.live:
            await asyncio.sleep(self.step_time)
            if self.paused or not self.ready:
                await asyncio.sleep(0.005)
                continue
            self.num_steps += 1
            outputs = [self._step(core_id, *live) for core_id, live in list(self.live.items())]
            for core_id in self._output.process_outputs(outputs, clock.now()).reqs_to_abort:
                self.live.pop(core_id, None)

    def _step(self, core_id: str, request: EngineCoreRequest, index: int) -> EngineCoreOutput:
        params = request.sampling_params
        if self.grammar_error is not None and params.grammar is not None:
            del self.live[core_id]
            return EngineCoreOutput(
                core_id,
                [],
                finish_reason=FinishReason.ERROR,
                error=self.grammar_error,
                error_kind="GrammarError",
            )
        if request.pooling is not None:
            del self.live[core_id]
            pooler = self.spec.pooler(request.pooling.task)
            pooled = self.pool(request.prompt_token_ids, pooler).astype(np.float32).tobytes()
            return EngineCoreOutput(core_id, [], finish_reason=FinishReason.STOP, pooled=pooled)
        at = self._progress[core_id]
        self._progress[core_id] += 1
        data = self.answer.encode()
        position = at % (len(data) + 1)
        ended = position == len(data) and EOS in params.all_stop_token_ids
        token = EOS if position == len(data) else data[position]
        reason = FinishReason.STOP if ended else None
        if reason is None and at + 1 == params.max_tokens:
            reason = FinishReason.LENGTH
        if at == 1 and self.num_to_abort:
            self.num_to_abort -= 1
            reason = FinishReason.ABORT
        prompt, own = request.prompt_token_ids, self.token_logprobs.get(index, -0.5)
        if reason is not None:
            del self.live[core_id]
        return EngineCoreOutput(
            core_id,
            [token],
            new_logprobs=None
            if params.logprobs is None
            else _rows([token], params.logprobs, own)
            if params.logprob_token_ids is None
            else _asked_rows(token, params.logprob_token_ids),
            new_prompt_logprobs=_rows(prompt[1:], params.prompt_logprobs)
            if at == index == 0 and params.prompt_logprobs is not None
            else None,
            finish_reason=reason,
            num_cached_tokens=self.num_cached_tokens,
        )


def fake_pool(ids, pooler):
    """Return numbers that depend on the tokens and their order: [size], or [tokens, size]."""
    rows = np.sin(np.outer(ids, np.arange(1, pooler.size + 1)) + np.arange(len(ids))[:, None])
    return rows if pooler.pooling == ("all",) else rows.mean(0)


def _asked_rows(token: int, asked: bytes) -> LogprobsLists:
    ids = [token, *np.frombuffer(asked, np.int32).tolist()]
    return pack_logprobs([ids], [[-0.25 * t for t in ids]], [1])


def _rows(tokens: list[int], k: int, own: float = -0.5) -> LogprobsLists:
    """Return rows where the token has rank 1; the next ids follow, the last one impossible."""
    k = 256 if k == -1 else k
    ids = [[t, *((t + i) % 256 if i else t for i in range(k))] for t in tokens]
    last = float("-inf")
    values = [[own, *(last if i == k - 1 > 0 else -0.5 - i for i in range(k))] for _ in tokens]
    return pack_logprobs(ids, values, [1] * len(tokens))


@dataclass
class Served:
    """Server of a fake engine, and a client of it."""

    engine: FakeAsyncLLM
    state: ServerState
    http: httpx.AsyncClient

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", **{"prompt": "hi", "max_tokens": 64, **body})

    async def chat(self, *messages: Any, **body: Any) -> httpx.Response:
        chat = list(messages) or [{"role": "user", "content": "hi"}]
        return await self.post("/v1/chat/completions", messages=chat, **body)


def with_server(
    scenario: Callable[[Served], Awaitable[None]],
    engine: Callable[[], FakeAsyncLLM] = FakeAsyncLLM,
    headers: dict[str, str] | None = None,
    **settings: Any,
) -> None:
    """Run a scenario against a server in this process, without sockets."""

    async def run() -> None:
        async with serving(engine, headers, **settings) as served:
            await scenario(served)

    asyncio.run(asyncio.wait_for(run(), 200))


@asynccontextmanager
async def serving(
    engine: Callable[[], FakeAsyncLLM] = FakeAsyncLLM,
    headers: dict[str, str] | None = None,
    adapters: AdapterTable | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """Serve in this process, without sockets; `adapters` is a table that front ends share."""
    fake = engine()

    async def start() -> FakeAsyncLLM:
        return fake

    state = ServerState(ServerConfig(**settings), fake.config, start, adapters)
    state.start()
    await asyncio.sleep(0)
    transport = httpx.ASGITransport(build_app(state), raise_app_exceptions=False)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://test", headers=headers, timeout=20
    ) as http:
        yield Served(fake, state, http)
    assert state.num_active == 0
    assert fake.num_unfinished_requests == 0
    await state.close()
    assert fake.was_shut_down


class Call:
    """Request made by hand, so that a test can read a part of the answer and disconnect."""

    def __init__(
        self,
        served: Served,
        path: str,
        body: bytes,
        headers: dict[str, str] | None = None,
        chunks: int = 1,
        cut_after: int | None = None,
        method: str = "POST",
    ) -> None:
        path, _, query = path.partition("?")
        self.sent: list[dict[str, Any]] = []
        self.grown = asyncio.Event()
        self._gone = asyncio.Event()
        size = max(1, -(-len(body) // chunks))
        parts = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
        self._parts = parts[:cut_after]
        self._num_parts = len(parts)
        if cut_after is not None:
            self._gone.set()
        self.num_read = 0
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [
                (k.lower().encode(), v.encode())
                for k, v in {"content-type": "application/json", **(headers or {})}.items()
            ],
            "client": ("10.0.0.1", 1),
            "server": ("test", 80),
        }
        app = served.http._transport.app
        self.send = self._send
        self.task = asyncio.create_task(app(scope, self._receive, lambda m: self.send(m)))

    async def _receive(self) -> dict[str, Any]:
        if self.num_read < len(self._parts):
            self.num_read += 1
            return {
                "type": "http.request",
                "body": self._parts[self.num_read - 1],
                "more_body": self.num_read < self._num_parts,
            }
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self.grown.set()

    async def wait_for_body(self) -> None:
        while not any(m["type"] == "http.response.body" for m in self.sent):
            self.grown.clear()
            await self.grown.wait()

    def disconnect(self) -> None:
        self._gone.set()

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent)


async def events(response: httpx.Response) -> list[str]:
    """Return the data of a stream's server-sent events."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    text = response.text
    assert text.endswith("data: [DONE]\n\n")
    lines = text.split("\n\n")[:-1]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines[:-1]]


__all__ = ["Call", "FakeAsyncLLM", "Served", "aclosing", "events", "make_tokenizer", "with_server"]
