"""Worker in a separate process: the same bits, and an engine that outlives it."""

import random
import signal
import threading
import time

import psutil
import pytest

from octavo import LLM, SamplingParams
from octavo.errors import EngineDeadError
from octavo.platforms.cpu import WORKER_RUNTIME_NBYTES
from octavo.sampling_params import StructuredOutputsParams
from tests.e2e import harness

MODEL = "octavo/stories"
SIZES = {"max_model_len": 256, "kv_cache_memory_bytes": "8M", "max_num_seqs": 8}


def load(count=24):
    """Return requests of all kinds."""
    rng = random.Random(3)
    requests = []
    for i in range(count):
        grammar = (
            StructuredOutputsParams(regex="[a-z]{3,8}( [a-z]{3,8}){4}") if i % 6 == 1 else None
        )
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8]),
            seed=i,
            max_tokens=rng.randrange(1, 30),
            logprobs=rng.choice([None, 3]),
            prompt_logprobs=2 if i % 7 == 3 else None,
            repetition_penalty=rng.choice([1.0, 1.2]),
            ignore_eos=grammar is None,
            structured_outputs=grammar,
            n=1 + (i % 8 == 5),
        )
        prompt = [rng.randrange(10, 4000) for _ in range(rng.randrange(1, 150))]
        requests.append(({"prompt_token_ids": prompt}, params))
    return requests


def bits(llm):
    prompts, params = zip(*load(), strict=True)
    outputs = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [
        (
            [(list(c.token_ids), c.finish_reason, _rows(c.logprobs)) for c in output.outputs],
            _rows(output.prompt_logprobs),
        )
        for output in outputs
    ]


def _rows(logprobs):
    if logprobs is None:
        return None
    return [None if row is None else {t: lp.logprob for t, lp in row.items()} for row in logprobs]


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_sleep_mode": True},
        {"async_scheduling": False, "speculative_config": {"method": "ngram"}},
        {"speculative_config": {"model": "octavo/stories-draft"}},
    ],
    ids=["plain", "ngram", "draft"],
)
def test_the_bits_are_those_of_one_process(settings):
    with LLM(**SIZES, **settings) as llm:
        expected = bits(llm)
        budget = llm.llm_engine.memory_plan.nbytes("runtime")
    with LLM(**SIZES, **settings, distributed_executor_backend="mp") as llm:
        executor = llm._client.core.executor
        (pid,) = executor.pids
        assert bits(llm) == expected
        assert llm.llm_engine.memory_plan.nbytes("runtime") == budget + WORKER_RUNTIME_NBYTES
        if "enable_sleep_mode" in settings:
            before = psutil.Process(pid).memory_info().rss
            llm.sleep()
            assert psutil.Process(pid).memory_info().rss < before - 2**20
            llm.wake_up()
            assert bits(llm) == expected
    assert not psutil.pid_exists(pid)


def test_offline_a_worker_that_is_killed_is_an_error_at_once():
    with LLM(**SIZES, distributed_executor_backend="mp") as llm:
        worker = psutil.Process(llm._client.core.executor.pids[0])
        threading.Timer(0.5, worker.kill).start()
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        with pytest.raises(EngineDeadError, match=r"worker 0 \(pid \d+\) was killed by SIGKILL"):
            llm.generate(["Once"] * 1000, params, use_tqdm=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = ["--max-model-len", "256", "--kv-cache-memory-bytes", "8M"]
    flags += ["--distributed-executor-backend", "mp"]
    with harness.serve(tmp_path_factory.mktemp("server"), *flags, spare=True) as made:
        yield made


def worker_of(server):
    found = server.engine_process().children()
    (worker,) = [c for c in found if "octavo.executor.worker_process" in c.cmdline()]
    return worker


@pytest.mark.parametrize(("number", "busy"), [(signal.SIGKILL, False), (signal.SIGSTOP, True)])
def test_a_server_outlives_its_worker(server, number, busy):
    body = {"model": MODEL, "prompt": "The dog", "max_tokens": 230, "ignore_eos": True, "seed": 5}
    harness.wait_for(server, "/ready")
    expected = server.post("/v1/completions", body).json()["choices"][0]["text"]
    engine, worker = server.engine_process(), worker_of(server)
    restarts = server.metric("octavo:engine_restarts_total")
    answers, ended = [], threading.Event()

    def ask():
        while not (answers and ended.is_set()):  # one answer may end before the signal
            answers.append(server.post("/v1/completions", body).json())

    asking = threading.Thread(target=ask)
    if busy:
        asking.start()
        time.sleep(0.05)
    worker.send_signal(number)
    engine.wait(120)
    ended.set()
    if not busy:
        asking.start()
    asking.join()
    assert {answer["choices"][0]["text"] for answer in answers} == {expected}
    server.wait_for_metric("octavo:engine_restarts_total", restarts + 1)
    harness.wait_for(server, "/ready")
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE
    assert f"worker 0 (pid {worker.pid}) " in server.log.read_text()
