"""`LLM(isolate=True)`: the engine in a process of its own."""

import os
import signal
import threading
import time

import psutil
import pytest

from octavo import LLM, SamplingParams
from octavo.errors import EngineDeadError, RequestError, UnsupportedError

SETTINGS = {"max_model_len": 256, "kv_cache_memory_bytes": "8M", "max_num_seqs": 8}
PROMPTS = ["Once upon a time", "The dog", "A cat", "One day"] * 3
PARAMS = SamplingParams(max_tokens=100, ignore_eos=True, seed=5, logprobs=2, n=2)


@pytest.fixture(scope="module")
def llm():
    with LLM(isolate=True, **SETTINGS) as llm:
        yield llm


def answers(llm):
    return [
        [(o.text, o.token_ids, o.logprobs, o.cumulative_logprob) for o in output.outputs]
        for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    ]


def test_it_gives_what_an_engine_in_process_gives_and_survives_its_death(llm):
    with LLM(**SETTINGS) as other:
        wanted = answers(other)
        assert llm.memory_plan.num_blocks == other.memory_plan.num_blocks
    assert answers(llm) == wanted
    dead = llm.llm_engine.client.pid

    def kill():
        time.sleep(0.1)
        os.kill(dead, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert answers(llm) == wanted
    killer.join()
    if llm.llm_engine.client.pid == dead:  # it was quicker than the killer
        assert answers(llm) == wanted
    assert llm.llm_engine.client.pid != dead


def test_a_death_while_nothing_runs(llm):
    dead = psutil.Process(llm.llm_engine.client.pid)
    dead.kill()
    dead.wait(10)
    assert len(llm.generate("The", SamplingParams(max_tokens=3), use_tqdm=False)) == 1
    assert llm.llm_engine.client.pid != dead.pid


def test_calls(llm):
    assert llm.reset_prefix_cache()
    assert llm.stats().num_running_reqs == 0
    with pytest.raises(UnsupportedError, match="isolate=True"):
        llm.collective_rpc("whatever")
    with pytest.raises(RequestError, match="context length"):
        llm.generate([{"prompt_token_ids": [5] * 300}], PARAMS, use_tqdm=False)
    assert llm.generate("The", SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_a_model_that_cannot_be_loaded():
    with pytest.raises(EngineDeadError, match="num_threads=1000"):
        LLM(isolate=True, num_threads=1000, **SETTINGS)


def test_the_process_ends_with_it():
    llm = LLM(isolate=True, **SETTINGS)
    process = psutil.Process(llm.llm_engine.client.pid)
    llm.shutdown()
    llm.shutdown()
    assert not process.is_running()
    with pytest.raises(EngineDeadError, match="was shut down"):
        llm.generate("The", use_tqdm=False)
