"""`LLM(isolate=True)` and `LLM(data_parallel_size=2)`: engines in separate processes."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, EngineDeadError, RequestError, UnsupportedError
from octavo.sampling_params import BeamSearchParams

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
    (dead,) = llm.llm_engine.client.pids

    def kill():
        time.sleep(0.1)
        os.kill(dead, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert answers(llm) == wanted
    killer.join()
    if llm.llm_engine.client.pids == [dead]:  # it was faster than the killer
        assert answers(llm) == wanted
    assert llm.llm_engine.client.pids != [dead]


def test_a_death_while_nothing_runs(llm):
    dead = psutil.Process(*llm.llm_engine.client.pids)
    dead.kill()
    dead.wait(60)
    assert len(llm.generate("The", SamplingParams(max_tokens=3), use_tqdm=False)) == 1
    assert llm.llm_engine.client.pids != [dead.pid]


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


def test_a_script_that_ends_without_shutdown_says_nothing():
    script = f"from octavo import LLM; llm = LLM(isolate=True, **{SETTINGS!r})"
    command = [sys.executable, "-W", "error", "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert "Task" not in ended.stderr


def test_the_process_ends_with_it():
    llm = LLM(isolate=True, **SETTINGS)
    process = psutil.Process(*llm.llm_engine.client.pids)
    llm.shutdown()
    llm.shutdown()
    assert not process.is_running()
    with pytest.raises(EngineDeadError, match="was shut down"):
        llm.generate("The", use_tqdm=False)


def test_several_engines_give_what_one_gives_and_survive_a_death():
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:3]]
    beams = BeamSearchParams(beam_width=2, max_tokens=5)

    def everything(llm):
        llm.reset_prefix_cache()
        return (
            answers(llm),
            [o.outputs[0].token_ids for o in llm.chat(chats, PARAMS, use_tqdm=False)],
            [[s.tokens for s in o.sequences] for o in llm.beam_search(PROMPTS[:3], beams)],
            "".join(o.outputs[0].text for o in llm.stream("One", SamplingParams(max_tokens=9))),
        )

    with LLM(**SETTINGS) as one:
        wanted = everything(one)
    others = psutil.Process().children(recursive=True)
    with LLM(data_parallel_size=2, num_threads=1, disable_log_stats=False, **SETTINGS) as llm:
        processes = [psutil.Process(pid) for pid in llm.llm_engine.client.pids]
        assert len(processes) == 2
        assert everything(llm) == wanted
        name = "octavo:generation_tokens"
        tokens = {m.labels["engine"]: m.value for m in llm.get_metrics() if m.name == name}
        assert all(tokens[engine] > 0 for engine in "01")  # both computed a part
        llm.enqueue(PROMPTS, PARAMS, use_tqdm=False)
        processes[0].kill()
        outputs = llm.wait_for_completion(use_tqdm=False)
        assert [[o.token_ids for o in out.outputs] for out in outputs] == [
            [o[1] for o in out] for out in wanted[0]
        ]
        assert llm.stats().num_running_reqs == 0
        family = set(psutil.Process().children(recursive=True)).difference(others)
    assert psutil.wait_procs(family, timeout=60)[1] == []
    with pytest.raises(EngineDeadError, match="was shut down"):
        llm.generate("The", use_tqdm=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"profiler_dir": "x"}, "profiler_dir='x' is of one engine"),
        ({"enable_elastic_ep": True}, "enable_elastic_ep=True is not supported here"),
        (
            {
                "data_parallel_size_local": 1,
                "data_parallel_address": "h",
                "cluster_key_file": "f",
            },
            "data_parallel_size_local=1 is not supported here",
        ),
    ],
)
def test_what_several_engines_behind_an_llm_cannot_do(settings, message):
    with pytest.raises(ConfigError, match=message):
        LLM(data_parallel_size=2, **settings, **SETTINGS)
