"""Engines that divide the experts of a model: their number changes while requests run.

The tests are in order: each begins with the engines that the one before has left.
"""

import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from octavo import LLM, LoRARequest, SamplingParams
from octavo.models.adaptable_model import AdaptableModel
from tests.adapters import make_factors, write_adapter
from tests.e2e import harness
from tests.mixture import save_mixture
from tests.models.harness import spec_of

NUM_TOKENS = 120
PROMPTS = [f"Once upon a time there were {i} dogs" for i in range(8)]
PARAMS = [
    {"max_tokens": NUM_TOKENS, "seed": i, "temperature": 0.9 * (i % 3), "n": 1 + (i == 5)}
    for i in range(len(PROMPTS))
]
ADAPTED = (1, 4)
"""Numbers of the prompts for the adapter."""
# Experts move all the time. They are divided evenly: 12 and 0 copies by 1, 2 and 3.
FLAGS = ["--enable-expert-parallel", "--enable-elastic-ep", "--enable-admin", "--enable-eplb"]
FLAGS += ["--eplb-config", json.dumps({"window_size": 1, "step_interval": 2})]
FLAGS += ["--max-model-len", "256", "--kv-cache-memory-bytes", "4M", "--num-threads", "1"]
FLAGS += ["--enable-lora"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_mixture(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory):
    """An adapter of all layers, experts included."""
    tensors = make_factors(AdaptableModel(spec_of(Path(model))))
    return str(write_adapter(tmp_path_factory.mktemp("adapter"), tensors))


@pytest.fixture(scope="module")
def expected(model, adapter):
    settings = {"max_model_len": 256, "kv_cache_memory_bytes": "4M", "enable_lora": True}
    llm = LLM(model, **settings, num_threads=1)
    params = [SamplingParams(**p, ignore_eos=True) for p in PARAMS]
    adapters = [LoRARequest("a", 1, adapter) if it in ADAPTED else None for it in range(8)]
    answers = llm.generate(PROMPTS, params, lora_request=adapters, use_tqdm=False)
    return [[list(output.token_ids) for output in answer.outputs] for answer in answers]


@pytest.fixture(scope="module")
def server(model, adapter, tmp_path_factory):
    folder, flags = tmp_path_factory.mktemp("server"), [*FLAGS, "--lora-modules", f"a={adapter}"]
    with harness.serve(folder, "-dp", "2", *flags, model=model) as made:
        yield made


def engines(server):
    """Return the engine processes, the oldest first."""
    return harness.processes(server.process.pid, harness.ENGINE)


def ask(server, number, adapted=ADAPTED):
    """Return the tokens of the streamed answers to a prompt; `adapted` ones use adapter a."""
    tokens = [[] for _ in range(PARAMS[number]["n"])]
    body = {"prompt": PROMPTS[number], "stream": True, "ignore_eos": True, **PARAMS[number]}
    body["return_token_ids"] = True
    if number in adapted:
        body["model"] = "a"
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=240) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    tokens[choice["index"]] += choice["token_ids"]
    return tokens


class Load:
    """Clients that repeat all prompts, and compare each answer with the expected one."""

    def __init__(self, server, expected, adapted=ADAPTED):
        self._server, self._expected, self._adapted = server, expected, adapted
        self._end = threading.Event()
        self.num_answers = 0

    def __enter__(self):
        self._pool = ThreadPoolExecutor(len(PROMPTS))
        self._clients = [self._pool.submit(self._repeat, i) for i in range(len(PROMPTS))]
        return self

    def __exit__(self, *error):
        self.end()

    def end(self):
        """Wait for the last answers. May be called twice."""
        self._end.set()
        for client in self._clients:
            client.result(240)
        self._pool.shutdown()

    def _repeat(self, number):
        while not self._end.is_set():
            found = ask(self._server, number, self._adapted)
            assert found == self._expected[number]
            self.num_answers += PARAMS[number]["n"]

    def wait_for_answers(self, count):
        """Wait for `count` more answers."""
        end = self.num_answers + count

        def look():
            for client in self._clients:
                assert self._end.is_set() or not client.done(), client.exception()
            return self.num_answers >= end

        harness.wait_until(look)


def scale(server, size):
    return server.post("/scale_elastic_ep", {"new_data_parallel_size": size}, timeout=240)


def is_scaling(server):
    return server.post("/is_scaling_elastic_ep", {}).json()["is_scaling_elastic_ep"]


def test_streams_have_the_same_tokens_while_the_number_changes(server, expected):
    before = server.metric("octavo:generation_tokens_total")
    with Load(server, expected) as load:
        for size in (3, 1, 2):
            response = scale(server, size)
            assert response.json() == {"message": f"Scaled to {size} data parallel engines"}
            assert len(engines(server)) == size
            load.wait_for_answers(4)  # of the new group
    count = server.metric("octavo:generation_tokens_total") - before
    assert count == load.num_answers * NUM_TOKENS  # each token once
    assert server.get("/health").json() == {"status": "ok", "reason": "ok"}
    assert server.metric("octavo:eplb_rearrangements_total") > 0


def test_only_one_change_at_a_time_and_an_engine_may_die_meanwhile(server, expected):
    with Load(server, expected), ThreadPoolExecutor(1) as pool:
        for _ in range(9):  # the first change may end before the second one is asked for
            scaling = pool.submit(scale, server, 3)
            harness.wait_until(lambda: is_scaling(server) or scaling.done())  # noqa: B023
            response = scale(server, 1)
            if response.status_code == 503:
                break
            assert scaling.result().status_code == scale(server, 2).status_code == 200
        assert response.status_code == 503
        assert "being changed already" in response.json()["error"]["message"]
        assert int(response.headers["retry-after"]) > 0
        engines(server)[0].kill()
        assert scaling.result().status_code == 200
    harness.wait_until(
        lambda: len(engines(server)) == 3 and server.get("/health").json()["reason"] == "ok"
    )


def test_a_new_engine_that_dies_changes_nothing(server, expected):
    with Load(server, expected), ThreadPoolExecutor(1) as pool:
        for _ in range(9):  # the new engine may serve before this process sees it
            old = engines(server)
            scaling = pool.submit(scale, server, 1)
            while not ((new := set(engines(server)) - set(old)) or scaling.done()):
                time.sleep(0.005)
            for engine in new:
                with contextlib.suppress(psutil.NoSuchProcess):  # it has ended
                    engine.kill()
            response = scaling.result()
            if response.status_code != 200:
                break
            assert scale(server, 3).status_code == 200
        assert response.status_code == 409
        assert "was killed by SIGKILL" in response.json()["error"]["message"]
        assert engines(server) == old


def test_a_size_that_is_impossible_changes_nothing(server, expected):
    old = engines(server)
    response = scale(server, 5)
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "scaling_failed"
    assert "cannot be divided evenly among 5 processes" in response.json()["error"]["message"]
    assert engines(server) == old
    assert ask(server, 0) == expected[0]
