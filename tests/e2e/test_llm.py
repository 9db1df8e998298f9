"""Offline API on the built-in model."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from octavo import LLM, SamplingParams
from octavo.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    RequestError,
    UnsupportedError,
)
from octavo.messages import RequestOptions
from tests.drafts import SETTINGS, Drafter

STORY = "Once upon a time, there was a little"


@pytest.fixture(scope="module")
def llm():
    with LLM(max_model_len=1024, kv_cache_memory_bytes="64M") as llm:
        yield llm


def test_the_well_known_example(llm):
    prompts = ["Hello, my name is", "Once upon a time", "The cat", "The sun is"]
    outputs = llm.generate(
        prompts, SamplingParams(temperature=0.8, top_p=0.95, seed=1), use_tqdm=False
    )
    assert [o.prompt for o in outputs] == prompts
    for output in outputs:
        assert len(output.outputs[0].token_ids) <= 16
        assert output.outputs[0].text
        assert output.finished


def test_prompts_as_ids_and_params_for_each(llm):
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(STORY)
    prompts = [{"prompt_token_ids": ids}, {"prompt": STORY}, STORY]
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (3, 5, 7)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [3, 5, 7]
    assert outputs[2].outputs[0].token_ids[:5] == outputs[1].outputs[0].token_ids
    assert llm.generate(STORY, params[1], use_tqdm=False)[0].outputs[0].text == (
        outputs[1].outputs[0].text
    )
    with pytest.raises(ValueError, match="2 sampling parameters"):
        llm.generate([STORY], params[:2])


def test_agrees_with_transformers(llm):
    transformers = pytest.importorskip("transformers")
    import torch

    folder = Path(llm_folder())
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(STORY, return_tensors="pt").input_ids
    expected = reference.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :]
    with LLM(dtype="float32", max_model_len=256) as exact:
        output = exact.generate(
            STORY, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False
        )[0]
    assert output.outputs[0].token_ids == expected.tolist()[: len(output.outputs[0].token_ids)]


def llm_folder() -> str:
    from octavo.config import BUILTIN_MODEL
    from octavo.models.hub import resolve_model

    return str(resolve_model(BUILTIN_MODEL))


def test_n_shares_the_prompt_and_orders_the_answers(llm):
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=8, ignore_eos=True)
    output = llm.generate(STORY * 20, params, use_tqdm=False)[0]
    assert [o.index for o in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(o.token_ids) for o in output.outputs}) > 1
    assert output.num_cached_tokens == 0  # blocks that siblings share do not count
    again = llm.generate(STORY * 20, params, use_tqdm=False)[0]
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in output.outputs]


def test_n_shares_blocks_even_without_prefix_caching():
    with LLM(enable_prefix_caching=False, max_model_len=512) as llm:
        ids = list(range(10, 330))
        params = SamplingParams(n=8, temperature=1.0, seed=3, max_tokens=4, ignore_eos=True)
        llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        assert llm.stats().prefix_cache_hits >= 7 * 304
        # A second request of the same prompt shares nothing: caching is off.
        before = llm.stats().prefix_cache_hits
        single = SamplingParams(temperature=0, max_tokens=4)
        llm.generate([{"prompt_token_ids": ids}], single, use_tqdm=False)
        assert llm.stats().prefix_cache_hits == before


def test_stop_text_is_cut_where_it_begins(llm):
    greedy = SamplingParams(temperature=0, max_tokens=60)
    text = llm.generate(STORY, greedy, use_tqdm=False)[0].outputs[0].text
    stop = text[20:27]
    cut = llm.generate(
        STORY, SamplingParams(temperature=0, max_tokens=60, stop=[stop]), use_tqdm=False
    )[0].outputs[0]
    assert cut.text == text[: text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)


def test_prompt_logprobs_equal_the_logprobs_of_generation(llm):
    ids = llm.get_tokenizer().encode(STORY)
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0, ignore_eos=True)
    first = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].outputs[0]
    whole = ids + first.token_ids
    scored = llm.generate(
        [{"prompt_token_ids": whole}],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )[0]
    assert scored.prompt_logprobs[0] is None
    assert len(scored.prompt_logprobs) == len(whole)
    for position, token in enumerate(first.token_ids):
        generated = first.logprobs[position][token].logprob
        assert scored.prompt_logprobs[len(ids) + position][token].logprob == generated


def test_logprobs_of_certain_tokens_are_those_among_the_most_probable(llm):
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=20)
    plain = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0]
    for row in range(5):
        ids = sorted(plain.logprobs[row])
        asks = SamplingParams(temperature=0, max_tokens=5, logprob_token_ids=ids, n=2)
        for found in llm.generate("Once upon a time", asks, use_tqdm=False)[0].outputs:
            assert found.token_ids == plain.token_ids
            assert found.cumulative_logprob == plain.cumulative_logprob
            assert all(
                set(given) == {own, *ids}
                for own, given in zip(found.token_ids, found.logprobs, strict=True)
            )
            assert list(found.logprobs[row]) == list(dict.fromkeys([plain.token_ids[row], *ids]))
            for token, logprob in found.logprobs[row].items():
                assert logprob.logprob == plain.logprobs[row][token].logprob
    pieces = list(llm.stream("Once upon a time", asks))
    streamed = [row for piece in pieces for o in piece.outputs if not o.index for row in o.logprobs]
    assert streamed == list(found.logprobs)


def test_logprobs_of_certain_tokens_with_drafts(llm, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=16, logprob_token_ids=[300, 5])
    plain = llm.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0]
    drafter = Drafter(monkeypatch, [plain.token_ids])
    with LLM(max_model_len=1024, kv_cache_memory_bytes="64M", **SETTINGS) as drafting:
        found = drafting.generate("Once upon a time", params, use_tqdm=False)[0].outputs[0]
    assert drafter.num_tokens > drafter.num_steps
    assert (found.token_ids, found.logprobs) == (plain.token_ids, plain.logprobs)


def test_stream_brings_the_same_text_piece_by_piece(llm):
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=30)
    pieces = [o.outputs[0].text for o in llm.stream(STORY, params)]
    assert len(pieces) > 5
    assert "".join(pieces) == llm.generate(STORY, params, use_tqdm=False)[0].outputs[0].text


def test_streams_and_batches_may_be_interleaved(llm):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    expected = llm.generate([STORY, "The cat"], params, use_tqdm=False)
    one, two = llm.stream(STORY, params), llm.stream("The cat", params)
    texts = [next(one).outputs[0].text, next(two).outputs[0].text]
    between = llm.generate("The cat", params, use_tqdm=False)[0]
    texts[0] += "".join(o.outputs[0].text for o in one)
    texts[1] += "".join(o.outputs[0].text for o in two)
    assert texts == [o.outputs[0].text for o in expected]
    assert between.outputs[0].text == texts[1]


def interrupted_after(delay, work):
    """Press Ctrl-C after some seconds, at any place of the main thread."""
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))

    def work_until_then():
        timer.start()
        work()
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        work_until_then()
    timer.join()


@pytest.mark.parametrize("streamed", [False, True])
def test_an_interrupted_batch_leaves_nothing_behind(llm, streamed):
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    before = signal.getsignal(signal.SIGINT)
    rng = random.Random(0)

    def work():
        if streamed:
            for _ in llm.stream(STORY, params):
                pass
        else:
            llm.generate([STORY] * 8, params, use_tqdm=False)

    for _ in range(40):
        interrupted_after(rng.uniform(0, 0.06), work)
        llm._client.core.check_integrity()
    assert signal.getsignal(signal.SIGINT) is before
    assert llm.generate(STORY, SamplingParams(max_tokens=3), use_tqdm=False)[0].finished
    assert llm.stats().num_used_blocks == 0


@pytest.mark.parametrize("method", ["schedule", "update_from_output"])
def test_ctrl_c_in_the_middle_of_a_step(llm, method, monkeypatch):
    scheduler = llm._client.core.scheduler
    original = getattr(scheduler, method)

    def interrupted(*args):
        result = original(*args)
        signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(scheduler, method, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([STORY] * 8, SamplingParams(max_tokens=900), use_tqdm=False)
    monkeypatch.undo()
    assert llm.generate(STORY, SamplingParams(max_tokens=3), use_tqdm=False)[0].finished
    llm._client.core.check_integrity()
    assert llm.stats().num_used_blocks == 0


def test_a_second_ctrl_c_does_not_wait(llm, monkeypatch):
    def hang():
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr(llm._client.core, "step", hang)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(STORY, use_tqdm=False)
    monkeypatch.undo()
    assert llm.generate(STORY, SamplingParams(max_tokens=3), use_tqdm=False)[0].finished


def test_ctrl_c_between_requests_of_a_batch(llm, monkeypatch):
    add = llm._add

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        return add(*args)

    monkeypatch.setattr(llm, "_add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([STORY] * 2, use_tqdm=False)
    assert not llm._inboxes


def test_a_closed_stream_frees_its_blocks(llm):
    stream = llm.stream(STORY, SamplingParams(max_tokens=500, ignore_eos=True))
    next(stream)
    stream.close()
    llm.generate("The", SamplingParams(max_tokens=1), use_tqdm=False)
    assert llm.stats().num_used_blocks == 0


def test_chat(llm):
    messages = [{"role": "user", "content": "Hello!"}]
    one = llm.chat(messages, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    two = llm.chat(
        [messages, messages], SamplingParams(temperature=0, max_tokens=20), use_tqdm=False
    )
    assert len(one) == 1
    assert [o.outputs[0].text for o in two] == [one[0].outputs[0].text] * 2


def test_bad_requests_are_refused_before_anything_runs(llm):
    with pytest.raises(ContextLengthError, match="1024"):
        llm.generate([{"prompt_token_ids": [5] * 1025}], use_tqdm=False)
    with pytest.raises(RequestError, match="99999"):
        llm.generate([STORY, {"prompt_token_ids": [99999]}], use_tqdm=False)
    assert llm.stats().num_running_reqs == 0
    llm.generate(STORY, SamplingParams(max_tokens=1), use_tqdm=False)


def test_a_request_that_fails_leaves_the_batch_its_answers(llm):
    nothing_left = SamplingParams(
        temperature=0, max_tokens=4, min_tokens=2, allowed_token_ids=[5], stop_token_ids=[5]
    )
    plain = SamplingParams(temperature=0, max_tokens=4)
    ids = llm.get_tokenizer().encode(STORY)
    one, bad, other = llm.generate([STORY, STORY, STORY], [plain, nothing_left, plain])
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert len(one.outputs[0].token_ids) == 4
    assert one.outputs[0].finish_reason == "length"
    assert bad.finished
    assert bad.outputs[0].finish_reason == "error"
    assert "no token is left" in bad.outputs[0].stop_reason
    with pytest.raises(RequestError, match="no token is left"):
        list(llm.stream(STORY, nothing_left))
    (again,) = llm.generate(ids, plain, use_tqdm=False)  # ids alone are one prompt
    assert again.outputs[0].token_ids == one.outputs[0].token_ids
    assert llm.stats().num_running_reqs == 0


def test_after_a_stop_text_nothing_runs_on(llm):
    text = llm.generate(STORY, SamplingParams(temperature=0, max_tokens=30))[0].outputs[0].text
    stop = SamplingParams(temperature=0, max_tokens=900, stop=[text[5:12]], ignore_eos=True)
    assert llm.generate(STORY, stop, use_tqdm=False)[0].outputs[0].text == text[:5]
    assert llm.stats().num_running_reqs == 0
    assert llm.reset_prefix_cache(), "no block is in use"
    pieces = list(llm.stream(STORY, stop))
    assert "".join(piece.outputs[0].text for piece in pieces) == text[:5]
    assert llm.stats().num_running_reqs == 0


def test_starved_of_memory_all_finish_with_the_same_tokens():
    """Acceptance 6: KV memory for 2 long requests, 32 arrive."""
    prompts = [{"prompt_token_ids": list(range(100 + i, 200 + i))} for i in range(32)]
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=100, ignore_eos=True)

    def run(**kwargs):
        with LLM(max_model_len=256, enable_prefix_caching=False, **kwargs) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            stats = llm.stats()
            assert stats.num_used_blocks == 0
            return [o.outputs[0].token_ids for o in outputs], stats.num_preemptions

    plenty, none = run()
    starved, preemptions = run(num_gpu_blocks_override=2 * 16 + 1)
    assert none == 0
    assert preemptions > 0
    assert starved == plenty


def test_a_cache_too_small_names_what_fits():
    with pytest.raises(ConfigError, match="max_model_len=144"):
        LLM(max_model_len=1024, num_gpu_blocks_override=10)
    with LLM(max_model_len=-1, num_gpu_blocks_override=10) as llm:
        assert llm.memory_plan.max_model_len == 144


def test_after_shutdown_it_says_so():
    llm = LLM(max_model_len=128)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("x")
    with pytest.raises(RequestError, match="prompts is a int"):
        llm.generate(5)


def test_a_kv_cache_of_another_type_is_refused():
    with pytest.raises(ConfigError, match="kv_cache_dtype=float16"):
        LLM(kv_cache_dtype="float16")
    with LLM(kv_cache_dtype="bfloat16", max_model_len=128) as llm:
        assert llm.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished


def test_without_a_tokenizer():
    with LLM(skip_tokenizer_init=True, max_model_len=256) as llm:
        output = llm.generate(
            [{"prompt_token_ids": [5, 6, 7]}],
            SamplingParams(max_tokens=3, detokenize=False, ignore_eos=True),
            use_tqdm=False,
        )[0]
        assert len(output.outputs[0].token_ids) == 3
        with pytest.raises(UnsupportedError, match="skip_tokenizer_init"):
            llm.get_tokenizer()


def test_dummy_weights_need_no_weight_file(tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(llm_folder()) / name).read_bytes())
    with LLM(str(tmp_path), load_format="dummy", max_model_len=128) as llm:
        assert llm.generate("x", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_examples_run():
    for script in sorted((Path(__file__).parents[2] / "examples").glob("offline*.py")):
        subprocess.run([sys.executable, script], check=True, capture_output=True, timeout=120)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9},
        {"temperature": 0.8, "seed": 7, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 1.0, "seed": 9, "frequency_penalty": 0.7, "min_tokens": 9, "logprobs": 2},
    ],
)
def test_a_request_goes_on_behind_the_output_that_it_has(llm, params):
    """The bits are the same as of a request that was not interrupted."""
    core = llm._client.core

    def run(request):
        core.add_request(request)
        outputs = []
        while core.has_unfinished_requests():
            outputs += core.step().outputs
        tokens = [t for output in outputs for t in output.new_token_ids]
        logprobs = [o.new_logprobs.logprobs for o in outputs if o.new_logprobs is not None]
        return tokens, b"".join(logprobs), outputs[-1].finish_reason

    sampling = SamplingParams(max_tokens=24, ignore_eos=True, **params)
    request, _ = llm._input_processor.process("whole", "Once upon", sampling, RequestOptions(0.0))
    tokens, logprobs, reason = run(request)
    for k in (1, 7, 23):
        resumed = msgspec.structs.replace(
            request, request_id=f"from {k}", output_token_ids=tokens[:k]
        )
        assert run(resumed) == (tokens[k:], logprobs[len(logprobs) // 24 * k :], reason)
