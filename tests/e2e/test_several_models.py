"""Several models in one server: each answers as if it were alone, also while another one dies."""

import asyncio
import concurrent.futures
import json
import re
import shutil
import signal
import threading

import httpx
import openai
import psutil
import pytest

from octavo.system.device import cpu_memory
from tests.adapters import builtin_model, make_factors, write_adapter
from tests.e2e import harness
from tests.e2e.watching import until, watching
from tests.encoders import write_encoder

MODEL = "octavo/stories"
FLAGS = ["--max-model-len", "512", "--num-threads", "1"]
TEXT = "Once upon a time there was a little dog who liked to run in the park with his friend. "
PROMPTS = [TEXT * 3 + f"Then number {i} came, and" for i in range(4)]
PARAMS = {"max_tokens": 120, "temperature": 0.8, "seed": 7, "logprobs": 1}
INPUTS = [f"text {i}" for i in range(8)]


async def ask(client, prompt, on_text=lambda prompt: None):
    """Return an answer's text and logprobs."""
    texts, logprobs = [], []
    stream = await client.completions.create(
        model=MODEL, prompt=prompt, stream=True, extra_body={"ignore_eos": True}, **PARAMS
    )
    async for event in stream:
        choice = event.choices[0]
        texts.append(choice.text)
        if choice.logprobs is not None:
            logprobs += zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
        on_text(prompt)
    return "".join(texts), logprobs


async def ask_all(url, then=lambda: None):
    """Return the answers to simultaneous prompts; once all have begun, call `then`."""
    left = set(PROMPTS)

    def on_text(prompt):
        if prompt in left:
            left.remove(prompt)
            if not left:
                then()

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        return await asyncio.gather(*(ask(client, prompt, on_text) for prompt in PROMPTS))


def answers(url, **kwargs):
    return asyncio.run(ask_all(url, **kwargs))


def vectors(url, model="embed"):
    body = {"model": model, "input": INPUTS}
    answer = httpx.post(f"{url}/v1/embeddings", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return [item["embedding"] for item in answer.json()["data"]]


def states(server):
    return {card["id"]: card["state"] for card in server.get("/v1/models").json()["data"]}


def wait_for_states(server, **wanted):
    harness.wait_until(lambda: wanted.items() <= states(server).items(), server.log.read_text)


def child(server, number):
    """Return the server process of a model."""
    for process in psutil.Process(server.process.pid).children():
        words = process.cmdline()
        if "--uds" in words and words[words.index("--uds") + 1].endswith(f"/model-{number}"):
            return process
    raise AssertionError(server.log.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("several")


@pytest.fixture(scope="module")
def encoder(folder):
    path = write_encoder(folder / "encoder")
    own = {"path": path, "name": "embed", "load_format": "dummy", "max_model_len": 64}
    return json.dumps(own)


@pytest.fixture(scope="module")
def expected(folder, encoder):
    """Return the answers and the vectors of servers of one model."""
    with harness.serve(folder, *FLAGS) as server:
        found = answers(server.url)
    with harness.serve(folder, *FLAGS, "--model", encoder) as server:  # a model with settings
        return found, vectors(server.url)


@pytest.fixture(scope="module")
def server(tmp_path_factory, encoder):
    flags = ["--model", MODEL, "--model", encoder, *FLAGS]
    with harness.serve(tmp_path_factory.mktemp("server"), *flags) as server:
        yield server


class Load:
    """Clients that ask for vectors all the time."""

    def __init__(self, url, expected):
        self._url, self._expected = url, expected
        self._stop = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(3)
        self.count = 0

    def _ask(self):
        while not self._stop.is_set():
            assert vectors(self._url) == self._expected
            self.count += 1

    def __enter__(self):
        self._clients = [self._pool.submit(self._ask) for _ in range(3)]
        return self

    def __exit__(self, *error):
        self._stop.set()
        for client in self._clients:
            client.result()
        self._pool.shutdown()


@pytest.mark.parametrize("victim", [1, 0])
def test_a_model_dies_under_load_and_the_other_does_not_notice(server, expected, victim):
    """The killed model's own requests go on, too, once its server has restarted."""
    texts, floats = expected
    restarts = server.metric("octavo:router_server_restarts_total")
    other = child(server, 1 - victim)
    with Load(server.url, floats) as load:
        assert answers(server.url, then=child(server, victim).kill) == texts
        server.wait_for_metric("octavo:router_server_restarts_total", restarts + 1)
        wait_for_states(server, **{MODEL: "loaded", "embed": "loaded"})
    assert load.count > 0
    assert other.is_running()
    assert child(server, 1 - victim).pid == other.pid
    assert vectors(server.url) == floats


def test_requests_without_a_name_reach_a_model_that_can_answer(server, expected):
    texts, floats = expected
    body = {"prompt": PROMPTS[0], "ignore_eos": True, **PARAMS}
    assert server.post("/v1/completions", body).json()["choices"][0]["text"] == texts[0][0]
    found = server.post("/embed", {"inputs": INPUTS}).json()
    assert found == [pytest.approx(vector) for vector in floats]


def test_lists_metrics_and_errors(server):
    names = [MODEL, "embed"]
    assert [m["name"] for m in server.get("/api/tags").json()["models"]] == names
    assert [m["name"] for m in server.get("/api/ps").json()["models"]] == names
    assert server.get(f"/v1/models/{MODEL}").json()["state"] == "loaded"
    metrics = server.get("/metrics").text
    for name in names:
        assert re.search(rf'octavo:num_requests_running{{.*model_name="{name}".*}} ', metrics)
    assert metrics.count("# TYPE octavo:num_requests_running ") == 1
    answer = server.post("/v1/chat/completions", {"model": "other", "messages": []})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "octavo/stories, embed" in answer.json()["error"]["message"]
    answer = server.post("/v1/embeddings", {"model": ["embed"], "input": "a"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    answer = httpx.post(
        f"{server.url}/embed", content=b"{", headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400
    answer = server.post("/v1/embeddings", {"model": "embed", "input": "a" * 9 * 2**20})
    assert answer.status_code == 413
    assert server.post("/v1/batches", {}).status_code == 404
    shown = server.post("/api/show", {"model": "embed:latest"}).json()
    assert shown["capabilities"] == ["embedding"]


def test_the_memory_of_all_models_is_within_the_plan(server):
    total = re.search(r"memory plan for all 2 models: ([\d,]+) MiB", server.log.read_text())
    assert server.resident_bytes() < int(total[1].replace(",", "")) * 2**20


def test_the_engine_view_shows_both_models(server):
    servers = {}
    with watching(server.url) as events:

        def note(name, event):
            servers.update(event.get("servers", {}))
            return len(servers) == 2

        until(events, note)
    assert sorted(servers.values()) == ["embed", MODEL]


def test_one_model_at_a_time(folder, encoder, expected):
    texts, floats = expected
    flags = ["--model", MODEL, "--model", encoder, "--model", "/nowhere", *FLAGS]
    with harness.serve(folder, *flags, "--max-loaded-models", "1") as server:
        assert states(server) == {MODEL: "loaded", "embed": "unloaded", "/nowhere": "failed"}
        broken = server.post("/v1/completions", {"model": "/nowhere", "prompt": "a"})
        assert (broken.status_code, broken.json()["error"]["code"]) == (503, "model_failed")
        assert "There is no folder /nowhere" in broken.json()["error"]["message"]
        assert int(broken.headers["Retry-After"]) > 0
        with concurrent.futures.ThreadPoolExecutor(20) as pool:
            asked = pool.submit(answers, server.url)
            many = [pool.submit(vectors, server.url) for _ in range(12)]
            assert asked.result() == texts
            assert all(answer.result() == floats for answer in many)
        # Four or fewer, but for clients that were late.
        assert server.metric("octavo:model_loads_total") <= 8
        # Ollama's way to unload, llama.cpp's way to load and to unload.
        body = {"model": "embed", "input": "a", "keep_alive": 0}
        assert server.post("/api/embed", body).status_code == 200
        wait_for_states(server, embed="unloaded")
        assert server.post("/models/load", {"model": MODEL}).json() == {"success": True}
        wait_for_states(server, **{MODEL: "loaded"})
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            unloads = []

            def unload():
                unloads.append(pool.submit(server.post, "/models/unload", {"model": MODEL}))

            assert answers(server.url, then=unload) == texts  # it waits for running requests
            assert unloads[0].result().status_code == 200
        wait_for_states(server, **{MODEL: "unloaded"})
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert not family, "an unloaded model keeps no process"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


def test_models_that_do_not_fit(folder, encoder):
    half = str(int(0.6 * cpu_memory()[1]))  # of each model
    flags = ["--model", MODEL, "--model", encoder, *FLAGS, "--kv-cache-memory-bytes", half]
    with harness.serve(folder, *flags, wait="") as server:
        assert server.process.wait(240) == 2
        assert "octavo: error: The models need" in server.log.read_text()


def test_no_process_outlives_a_killed_front(server):
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert len(family) >= 4
    server.process.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_adapters_of_two_models_in_turns(tmp_path):
    """They outlive the processes of their models, which are loaded in turns, and which die."""
    factors = make_factors(builtin_model(), rank=2)
    write_adapter(tmp_path / "one" / "a", factors, r=2, lora_alpha=2)
    for name in ("b", "found"):
        shutil.copytree(tmp_path / "one" / "a", tmp_path / "two" / name)
    flags = [*FLAGS, "--dtype", "float32", "--max-loaded-models", "1", "--enable-admin"]
    for name in ("one", "two"):
        own = {"path": MODEL, "name": name, "enable_lora": True, "lora_resolvers": ["folder"]}
        flags += ["--model", json.dumps({**own, "lora_root": str(tmp_path / name)})]
    load = "/v1/load_lora_adapter"
    with harness.serve(tmp_path, *flags) as server:

        def ask(model):
            body = {"model": model, "prompt": TEXT, "max_tokens": 16, "temperature": 0}
            answer = server.post("/v1/completions", body).json()
            return answer["choices"][0]["text"] if "choices" in answer else answer["error"]

        def names():
            return list(states(server))

        bare = server.post(load, {"lora_name": "x", "lora_path": "a"})
        assert bare.json()["error"]["param"] == "base_model_name"
        body = {"lora_name": "x", "lora_path": "a", "base_model_name": "one"}
        assert server.post(load, body).json()["parent"] == "one"
        wrong = server.post(load, {**body, "lora_name": "y", "lora_path": "b"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "invalid_adapter")
        body = {"lora_name": "y", "lora_path": "b", "base_model_name": "two"}
        assert server.post(load, body).status_code == 200
        assert names() == ["one", "x", "two", "y"]
        plain, changed = ask("two"), ask("y")
        assert plain != changed
        assert [ask("one"), ask("x")] == [plain, changed]  # after the unloading of two
        child(server, 0).kill()
        assert [ask("x"), ask("found"), ask("y")] == [changed] * 3
        assert names() == ["one", "x", "two", "y", "found"]
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "x"}).status_code == 200
        assert ask("x")["code"] == "model_not_found"
        assert names() == ["one", "two", "y", "found"]
