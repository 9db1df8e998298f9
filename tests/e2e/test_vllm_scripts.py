"""Calls of scripts for vLLM, in the forms of its well-known examples, in one engine."""

import asyncio
import dataclasses
import signal
from functools import partial

import pytest
import tqdm

from octavo import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    EmbedsPrompt,
    EngineArgs,
    LLMEngine,
    SamplingParams,
    TextPrompt,
    TokensPrompt,
)
from octavo.compat.call_arguments import StatLogger
from octavo.errors import ConfigError, EngineDeadError, RequestError, UnsupportedError
from octavo.observability.metrics_reader import Counter, Gauge, Histogram

PROMPTS = ["Once upon a time", "The cat", "The sun is"]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CHAT = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def llm():
    with LLM(
        max_model_len=512,
        kv_cache_memory_bytes="64M",
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        enforce_eager=False,
        seed=None,
        swap_space=4,
        disable_log_stats=False,
        trust_remote_code=True,
        enable_lora=False,
        max_num_seqs=None,
        dtype="auto",
        disable_custom_all_reduce=True,
        compilation_config=None,
        scheduling_policy="priority",
    ) as llm:
        yield llm


def texts(outputs):
    return [o.outputs[0].text for o in outputs]


def test_prompts_of_each_form_and_vllms_arguments(llm):
    expected = texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    ids = llm.get_tokenizer().encode(PROMPTS[1])
    mixed = [TextPrompt(prompt=PROMPTS[0]), TokensPrompt(prompt_token_ids=ids), PROMPTS[2]]
    outputs = llm.generate(
        mixed, GREEDY, use_tqdm=False, lora_request=None, priority=[2, 1, 0], tokenization_kwargs={}
    )
    assert texts(outputs) == expected
    assert outputs[0].metrics.first_token_latency > 0
    cut = llm.generate(
        PROMPTS[0], GREEDY, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": 2}
    )
    assert len(cut[0].prompt_token_ids) == 2


def test_priorities_decide_who_is_first(llm, monkeypatch):
    added = []
    core = llm.llm_engine.client.core
    monkeypatch.setattr(core, "add_request", added.append)
    ids = llm.enqueue(["a", "b"], GREEDY, priority=[3, -1])
    monkeypatch.undo()
    assert [request.options.priority for request in added] == [3, -1]
    llm._enqueued.clear()
    llm.llm_engine.end(ids)


def test_what_is_not_supported_is_refused_with_a_sentence(llm):
    with pytest.raises(RequestError, match=r"give an octavo\.LoRARequest"):
        llm.generate("x", lora_request=object())
    with pytest.raises(UnsupportedError, match="is for media"):
        llm.generate("x", mm_processor_kwargs={"a": 1})
    with pytest.raises(UnsupportedError, match="padding=True"):
        llm.generate("x", tokenization_kwargs={"padding": True})
    with pytest.raises(RequestError, match="--enable-prompt-embeds"):
        llm.generate(EmbedsPrompt(prompt_embeds=[[0.0]]))
    with pytest.raises(UnsupportedError, match="chat_template_content_format"):
        llm.chat(CHAT, chat_template_content_format="openai")
    with pytest.raises(ValueError, match="2 priorities"):
        llm.generate("x", priority=[1, 2])
    for call in (llm.classify, llm.reward):
        with pytest.raises(RequestError, match="It can: generate, embed"):
            call("x", use_tqdm=False)
    for settings, why in [
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2"),
        ({"enable_tower_connector_lora": True}, "adapter"),
        ({"runner": "pooling", "convert": "none"}, "forbids vectors"),
        ({"max_seq_len": 5}, "did you mean"),
    ]:
        with pytest.raises(ConfigError, match=why):
            LLM(**settings)


def test_chat_takes_vllms_arguments_by_position(llm):
    plain = texts(llm.chat(CHAT, GREEDY, use_tqdm=False))
    assert texts(llm.chat(CHAT, GREEDY, False, None, None, "auto", True)) == plain
    own = "{{ messages[0]['content'] }}"
    assert llm.chat(CHAT, GREEDY, False, None, own)[0].prompt == "Hello!"
    begun = [*CHAT, {"role": "assistant", "content": "Once"}]
    went_on = llm.chat(
        begun, GREEDY, use_tqdm=False, add_generation_prompt=False, continue_final_message=True
    )
    assert went_on[0].prompt.endswith("Once")


@pytest.mark.parametrize("messages", [CHAT[0], "Hello!", None, [{"role": "user", "text": "Hi"}]])
def test_what_is_no_conversation_is_refused(llm, messages):
    with pytest.raises(RequestError, match=r"messages is a .*; give a list|messages\[0\] has no"):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_tools_are_shown_to_the_model(llm):
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
    template = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    (output,) = llm.chat(CHAT, GREEDY, tools=[tool], chat_template=template, use_tqdm=False)
    assert output.prompt == "get_weather"


def test_answers_with_logprobs(llm):
    params = SamplingParams(n=2, temperature=0.8, seed=1, logprobs=3, prompt_logprobs=1)
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert [answer.index for answer in output.outputs] == [0, 1]
    for answer in output.outputs:
        assert len(answer.logprobs) == len(answer.token_ids)
        chosen = [row[token] for row, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        assert sum(entry.logprob for entry in chosen) == pytest.approx(answer.cumulative_logprob)
        assert all(3 <= len(row) <= 4 for row in answer.logprobs)
        assert all(entry.decoded_token for entry in chosen)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_a_prefix_is_computed_once(llm):
    prefix = "You are an expert school principal, skilled in managing faculty and staff. "
    first, again = (
        llm.generate([prefix + prompt for prompt in PROMPTS], GREEDY, use_tqdm=False)
        for _ in range(2)
    )
    assert texts(again) == texts(first)
    assert min(output.num_cached_tokens for output in again) >= 16


def test_enqueued_prompts_wait_for_completion(llm):
    expected = texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    first = llm.enqueue(PROMPTS[:2], GREEDY)
    assert llm.enqueue_chat(CHAT, GREEDY)[0] not in first
    llm.enqueue(PROMPTS[2], GREEDY)
    between = llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)
    assert texts(between) == expected[:1]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [o.request_id for o in outputs[:2]] == first
    assert texts(outputs[:2] + outputs[3:]) == expected
    assert llm.wait_for_completion(use_tqdm=False) == []
    with pytest.raises(RequestError, match="99999"):
        llm.enqueue([PROMPTS[0], {"prompt_token_ids": [99999]}], GREEDY)
    assert llm.wait_for_completion(use_tqdm=False) == []
    assert not llm._inboxes
    assert llm.stats().num_waiting_reqs == 0


def test_an_interrupted_wait_leaves_nothing_behind(llm, monkeypatch):
    llm.enqueue(PROMPTS, SamplingParams(max_tokens=400, ignore_eos=True))
    step = llm._step

    def interrupted():
        signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(llm, "_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.wait_for_completion(use_tqdm=False)
    monkeypatch.undo()
    assert llm.wait_for_completion(use_tqdm=False) == []
    assert not llm._inboxes
    llm.generate("The", GREEDY, use_tqdm=False)
    assert llm.stats().num_used_blocks == 0


def test_a_bar_of_the_callers_own(llm):
    made = []

    def make_bar(**kwargs):
        made.append(tqdm.tqdm(**kwargs, disable=True))
        return made[0]

    llm.generate(PROMPTS, GREEDY, use_tqdm=make_bar)
    assert made[0].total == 3
    llm.generate(PROMPTS, GREEDY, use_tqdm=partial(tqdm.tqdm, disable=True))


def test_metrics_as_objects(llm):
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    generated = metrics["octavo:generation_tokens"]
    assert isinstance(generated, Counter)
    assert generated.value >= 18
    assert isinstance(metrics["octavo:num_requests_running"], Gauge)
    latency = metrics["octavo:time_to_first_token_seconds"]
    assert isinstance(latency, Histogram)
    assert latency.buckets["+Inf"] == latency.count >= 3


def test_workers_and_models_can_be_called(llm):
    assert llm.collective_rpc(
        lambda worker, a, b: (type(worker).__name__, a, b), None, (1,), {"b": 2}
    )
    (name,) = llm.apply_model(lambda model: type(model).__name__)
    assert name == "DecoderModel"
    for method in ("no_such_method", "_runner"):
        with pytest.raises(UnsupportedError, match=method):
            llm.collective_rpc(method)


def run_engine(engine, requests):
    """Run vLLM's engine loop: add a request before each step while some are left."""
    finished = {}
    requests = list(requests)
    while requests or engine.has_unfinished_requests():
        if requests:
            engine.add_request(*requests.pop(0))
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
    return finished


def test_the_engine_a_step_at_a_time(llm):
    expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    engine = llm.llm_engine
    assert isinstance(engine, LLMEngine)
    assert engine.model_config.max_model_len == llm.model_config.max_model_len == 512
    got = run_engine(engine, [(f"r{i}", prompt, GREEDY) for i, prompt in enumerate(PROMPTS)])
    assert [got[f"r{i}"].outputs[0].text for i in range(3)] == texts(expected)
    assert engine.step() == []


def test_engine_and_llm_keep_their_outputs_apart(llm):
    engine = llm.llm_engine
    engine.add_request("0", PROMPTS[0], GREEDY)
    with pytest.raises(RequestError, match="id '0' is already running"):
        engine.add_request("0", PROMPTS[0], GREEDY)
    stream = llm.stream(PROMPTS[1], GREEDY)
    piece = next(stream)
    assert piece.prompt == PROMPTS[1]
    seen = []
    while engine.has_unfinished_requests():
        seen += engine.step()
    assert {o.request_id for o in seen} == {"0"}
    assert seen[-1].finished
    assert len("".join(o.outputs[0].text for o in [piece, *stream])) > 5


def test_aborted_and_failed_requests_of_the_engine(llm):
    engine = llm.llm_engine
    engine.add_request("long", PROMPTS[0], SamplingParams(max_tokens=400, ignore_eos=True))
    engine.step()
    engine.abort_request(["long", "unknown"])
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    nothing_left = SamplingParams(
        max_tokens=4, min_tokens=2, allowed_token_ids=[5], stop_token_ids=[5]
    )
    (failed,) = run_engine(engine, [("bad", PROMPTS[0], nothing_left)]).values()
    assert failed.outputs[0].finish_reason == "error"
    assert "no token is left" in failed.outputs[0].stop_reason
    with pytest.raises(RequestError, match="request_id=5"):
        engine.add_request(5, PROMPTS[0], GREEDY)
    assert llm.stats().num_used_blocks == 0


def test_the_tokenizer_does_what_transformers_does(llm):
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == llm.render_chat(CHAT)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True)
    assert tokenizer.apply_chat_template([CHAT, CHAT], add_generation_prompt=True) == [ids, ids]
    assert tokenizer(text, add_special_tokens=False).input_ids == ids
    made = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert made.input_ids.tolist() == [ids]
    assert made.attention_mask.tolist() == [[1] * len(ids)]
    called = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    assert called["input_ids"].tolist() == [ids]
    plain = tokenizer.apply_chat_template(CHAT, return_dict=True)
    assert plain.input_ids == tokenizer.apply_chat_template(CHAT)
    for wrong in ({"return_tensors": "np"}, {"padding": True}, {"truncation": True}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            tokenizer.apply_chat_template(CHAT, **wrong)
    with pytest.raises(RequestError, match="one length"):
        tokenizer(["a", "a longer text"], return_tensors="pt")


def test_engine_args_make_an_llm():
    args = EngineArgs("octavo/stories", max_model_len=128, skip_tokenizer_init=True)
    engine = LLMEngine.from_engine_args(args)
    assert engine.model_config.max_model_len == 128
    engine.add_request("a", {"prompt_token_ids": [5, 6]}, GREEDY)
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert len(outputs[0].outputs[0].token_ids) == 6
    assert engine.get_metrics()
    with pytest.raises(UnsupportedError, match="skip_tokenizer_init"):
        engine.get_tokenizer()
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.add_request("b", {"prompt_token_ids": [5, 6]}, GREEDY)
    with LLM(**dataclasses.asdict(args)) as llm:
        assert llm.generate([[5, 6]], GREEDY, use_tqdm=False)[0].finished
        with pytest.raises(UnsupportedError, match="disable_log_stats=False"):
            LLM.from_engine_args(dataclasses.replace(args, disable_log_stats=True)).get_metrics()


async def check_pauses(engine):
    """A paused engine computes nothing; the answers of its requests do not change."""

    async def tokens(request_id, **fields):
        params = SamplingParams(temperature=0, ignore_eos=True, **fields)
        async for output in engine.generate(PROMPTS[0], params, request_id):
            seen[request_id] = output.outputs[0]
        return seen[request_id].token_ids

    async def stands_still(request_id):
        """Wait until no more outputs arrive."""
        count = 0
        while count != len(seen[request_id].token_ids):
            count = len(seen[request_id].token_ids)
            await asyncio.sleep(0.2)
        return await engine.is_paused()

    async def pause(request_id, **how):
        """Pause the engine in the middle of an answer, which may end before; return its task."""
        for _ in range(20):
            seen.pop(request_id, None)
            task = asyncio.create_task(tokens(request_id, max_tokens=400))
            while request_id not in seen:
                await asyncio.sleep(0.001)
            await engine.pause_generation(**how)
            assert await stands_still(request_id)
            if len(seen[request_id].token_ids) < 400:
                return task
            await task
            await engine.resume_generation()
        raise AssertionError("no pause began in the middle of an answer")

    seen = {}
    expected = await tokens("whole", max_tokens=400)
    for clear_cache in (True, False):
        task = await pause("kept", mode="keep", clear_cache=clear_cache)
        waiting = asyncio.create_task(tokens("new", max_tokens=4))
        await engine.resume_generation()
        assert await task == expected
        assert await waiting == expected[:4]
        assert not await engine.is_paused()
        seen.clear()
    task = asyncio.create_task(tokens("finished", max_tokens=30))
    while "finished" not in seen:
        await asyncio.sleep(0.001)
    await engine.pause_generation(mode="wait")
    assert await task == expected[:30]
    await engine.resume_generation()
    task = await pause("ended")
    assert len(await task) < 400
    assert seen["ended"].finish_reason == "abort"
    await engine.resume_generation()
    with pytest.raises(RequestError, match="mode='stop'"):
        await engine.pause_generation(mode="stop")
    with pytest.raises(UnsupportedError, match="data_parallel_rank=1"):
        await anext(engine.generate("x", GREEDY, "y", data_parallel_rank=1))
    await engine.do_log_stats()


def test_an_async_engine_streams_and_ends(llm):
    expected = texts(llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False))

    args = AsyncEngineArgs(max_model_len=512, kv_cache_memory_bytes="64M")
    with pytest.raises(UnsupportedError, match="stat_loggers has <class 'int'>"):
        AsyncLLMEngine.from_engine_args(args, stat_loggers=[int])

    async def run():
        engine = AsyncLLMEngine.from_engine_args(args, stat_loggers=[StatLogger])
        try:
            with pytest.raises(RequestError, match="LoRARequest"):
                await anext(engine.generate("x", GREEDY, "y", lora_request=object()))

            async def answer(i):
                async for output in engine.generate(PROMPTS[i], GREEDY, f"r{i}", priority=i):
                    last = output
                return last.outputs[0].text

            got = await asyncio.gather(answer(0), answer(1))
            long = SamplingParams(max_tokens=400, ignore_eos=True)
            outputs = []
            async for output in engine.generate(PROMPTS[0], long, "long"):
                outputs.append(output)
                await engine.abort(["long"])
            assert outputs[-1].outputs[0].finish_reason == "abort"
            await check_pauses(engine)
            await engine.check_health()
            assert engine.is_running
            assert engine.get_tokenizer().encode("x")
            return got
        finally:
            engine.shutdown()
            assert engine.errored
            with pytest.raises(EngineDeadError):
                await engine.check_health()
            await engine.shutdown()

    assert asyncio.run(run()) == expected


def test_fields_of_the_model_can_be_overridden(llm):
    overrides = {"rope_theta": 100.0, "max_position_embeddings": 4096}
    settings = {"kv_cache_memory_bytes": "64M", "hf_overrides": overrides}
    with LLM(**settings) as other:
        assert other.model_config.max_model_len == 4096
        changed = texts(other.generate(PROMPTS, GREEDY, use_tqdm=False))
    assert changed != texts(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    with LLM(**settings, isolate=True) as isolated:
        assert texts(isolated.generate(PROMPTS, GREEDY, use_tqdm=False)) == changed
    with pytest.raises(ConfigError, match="hf_overrides=5 is not allowed: expected a JSON object"):
        LLM(hf_overrides=5)


def test_an_async_engine_that_is_made_before_the_event_loop(llm):
    engine = AsyncLLMEngine.from_engine_args(
        AsyncEngineArgs(max_model_len=512, kv_cache_memory_bytes="64M")
    )

    async def answer():
        async for output in engine.generate(PROMPTS[0], GREEDY, "r"):
            last = output
        return last.outputs[0].text

    assert [asyncio.run(answer())] == texts(llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False))
    engine.shutdown()
    assert engine.errored
