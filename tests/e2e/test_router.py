"""Router of real servers: the answers of one server, even if any of them die."""

import asyncio
import concurrent.futures
import contextlib
import re
import signal
import time

import openai
import psutil
import pytest

from octavo.config import BUILTIN_ADAPTERS
from tests.adapters import builtin_model, make_factors, write_adapter
from tests.e2e import harness
from tests.e2e.watching import until, watching

MODEL = "octavo/stories"
SIZE = ["--max-model-len", "512", "--kv-cache-memory-bytes", "16M", "--num-threads", "1"]
TEXT = "Once upon a time there was a little dog who liked to run in the park with his friend. "
PROMPTS = [TEXT * 3 + f"Then number {i} came, and" for i in range(6)]
PARAMS = {"max_tokens": 120, "temperature": 0.8, "seed": 7, "logprobs": 1}
IGNORE = {"ignore_eos": True}


async def ask(client, prompt, on_text=lambda: None):
    """Return an answer's text and logprobs."""
    texts, logprobs = [], []
    stream = await client.completions.create(
        model=MODEL, prompt=prompt, stream=True, extra_body=IGNORE, **PARAMS
    )
    async for event in stream:
        choice = event.choices[0]
        texts.append(choice.text)
        if choice.logprobs is not None:
            logprobs += zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
        on_text()
    return "".join(texts), logprobs


async def ask_all(url, prompts=PROMPTS, at=None, then=None):
    """Return the answers to simultaneous prompts; after `at` events in all, call `then`."""
    count = 0

    def on_text():
        nonlocal count
        count += 1
        if count == at:
            then()

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        found = await asyncio.gather(*(ask(client, prompt, on_text) for prompt in prompts))
    if at is not None and count < at:  # a server that is slower than its engine sends few events
        then()
    return found


def answers(url, *args, **kwargs):
    return asyncio.run(ask_all(url, *args, **kwargs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("router")


@pytest.fixture(scope="module")
def expected(folder):
    """Return the answers of one server."""
    with harness.serve(folder, *SIZE) as server:
        return answers(server.url)


@pytest.fixture(scope="module")
def split(folder):
    """Start a router with its own prefill server and two decode servers."""
    flags = [*SIZE, "--prefill", "1", "--decode", "2", "--no-warm-spare"]
    flags += ["--health-check-interval", "0.2", "--failover-timeout", "240"]
    with harness.serve(folder, *flags, what="router") as router:
        wait_for_servers(router)
        yield router


def own_servers(router, role=""):
    """Return the processes of a router's own servers."""
    found = {}
    for child in psutil.Process(router.process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            words = child.cmdline()
            if "--uds" in words:
                name = words[words.index("--uds") + 1].rpartition("/")[2]
                if name.startswith(role):
                    found[name] = child
    return found


def wait_for_servers(router, count=3):
    def look():
        return sum(server["ready"] for server in router.get("/").json()["servers"]) >= count

    harness.wait_until(look, router.log.read_text)


def num_remote(router):
    """Return the number of prompts that prefill servers have computed."""
    found = re.search(r'router_prefills_total\{where="remote"\} (\S+)', router.get("/metrics").text)
    return 0 if found is None else float(found[1])


def test_prefill_here_and_decode_there_give_the_bits_of_one_server(split, expected):
    for _ in range(10):  # a server that was silent for a moment gets no prompts
        before = num_remote(split)
        assert answers(split.url) == expected
        if num_remote(split) == before + 6:
            break
    assert num_remote(split) == before + 6
    body = {"model": MODEL, "prompt": PROMPTS[0], **PARAMS, **IGNORE}
    answer = split.post("/v1/completions", body).json()
    assert answer["choices"][0]["text"] == expected[0][0]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    beams = {"model": MODEL, "prompt": TEXT, "use_beam_search": True, "n": 2, "max_tokens": 4}
    assert len(split.post("/v1/completions", beams).json()["choices"]) == 2


@pytest.mark.parametrize(
    ("role", "number"), [("decode", signal.SIGSTOP), ("prefill", signal.SIGKILL)]
)
def test_a_server_dies_in_the_middle_of_streams(split, expected, role, number):
    restarts = split.metric("octavo:router_server_restarts_total")
    victim = next(iter(own_servers(split, role).values()))
    assert answers(split.url, at=40, then=lambda: victim.send_signal(number)) == expected
    harness.wait_until(lambda: split.metric("octavo:router_server_restarts_total") > restarts)
    wait_for_servers(split)
    assert answers(split.url) == expected


def test_chats_go_on_elsewhere_too_and_what_is_refused_says_why(split):
    asked = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 60, "seed": 1}
    pieces, ids = [], set()
    victims = list(own_servers(split, "decode").values())
    with openai.OpenAI(base_url=f"{split.url}/v1", api_key="-", max_retries=0) as client:
        whole = client.chat.completions.create(model=MODEL, **asked, extra_body=IGNORE)
        for event in client.chat.completions.create(
            model=MODEL, stream=True, **asked, extra_body=IGNORE
        ):
            pieces.append(event.choices[0].delta.content or "")
            ids.add(event.id)
            if len(pieces) == 3:
                for victim in victims:  # both: the answer waits for the first that has restarted
                    victim.kill()
        assert "".join(pieces) == whole.choices[0].message.content
        assert len(ids) == 1
        wait_for_servers(split)
        with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
            client.completions.create(model="other", prompt="a")
    refused = split.post("/v1/completions", {"model": MODEL, "prompt": "a", "max_tokens": -1})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")
    params = {"do_remote_prefill": True}
    refused = split.post(
        "/v1/completions", {"model": MODEL, "prompt": "a", "kv_transfer_params": params}
    )
    assert refused.json()["error"]["param"] == "kv_transfer_params"
    for path in ("/v1/streams/x", "/server_info", "/reset_prefix_cache"):
        assert split.get(path).status_code in (404, 405), path


def test_the_engine_view_shows_all_servers_and_the_death_of_one(split):
    names, maps, labels = {}, {}, set()
    decoder = next(iter(own_servers(split, "decode")))
    with watching(split.url) as events:

        def wait(found):
            def note(name, event):
                names.update(event.get("servers", {}))
                maps.update(event.get("blocks", {}))
                parts = [part for s in event.get("steps", ()) for part in s.get("parts", ())]
                labels.update(part[0] for part in parts)
                return found(name, event)

            return until(events, note)

        wait(lambda *_: len(maps) == 3)
        assert sorted(names.values()) == ["decode-0", "decode-1", "prefill-0"]
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            asked = pool.submit(answers, split.url)
            # Steps of all servers; requests that end between two events are in no other one.
            wait(lambda *_: len({label.partition("/")[0] for label in labels}) == 3)
            wait(lambda *_: len(labels) >= len(PROMPTS))
            asked.result()
        own_servers(split, "decode")[decoder].kill()
        wait(lambda _, event: f"{decoder}: " in event.get("health", ""))
        (death,) = wait(lambda _, event: "deaths" in event)["deaths"]
        assert names[str(death["engine"])] == decoder
        assert decoder in death["reason"]
        assert death["seconds"] > 0
    wait_for_servers(split)


def test_servers_follow_the_load_and_end_with_the_router(folder):
    flags = [*SIZE, "--replicas", "1", "--min-replicas", "1", "--max-replicas", "2"]
    flags += ["--target-load", "2", "--no-warm-spare"]
    with harness.serve(folder, *flags, what="router") as router:
        body = {"model": MODEL, "prompt": TEXT, "max_tokens": 400, "ignore_eos": True}
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            end = time.monotonic() + 200
            while len(own_servers(router)) < 2:
                assert time.monotonic() < end, router.log.read_text()
                asked = [pool.submit(router.post, "/v1/completions", body) for _ in range(4)]
                assert {a.result().status_code for a in asked} == {200}
        wait_for_servers(router, 2)
        family = psutil.Process(router.process.pid).children(recursive=True)
        router.process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
        assert router.process.wait(60) == 0


def test_servers_end_when_the_router_is_killed(split):
    family = psutil.Process(split.process.pid).children(recursive=True)
    assert len(family) >= 6
    split.process.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive


def test_requests_reach_the_server_that_has_their_adapter(tmp_path):
    """Also if the adapter was loaded while the router ran."""
    folders = [tmp_path / name for name in ("a", "b", "router")]
    for folder in folders:
        folder.mkdir()
    names = {"letters": BUILTIN_ADAPTERS[0], "calls": BUILTIN_ADAPTERS[1]}
    flags = [*SIZE, "--enable-lora", "--enable-admin", "--lora-root", str(tmp_path)]
    modules = [["--lora-modules", f"{name}={path}"] for name, path in names.items()]
    write_adapter(tmp_path / "new", make_factors(builtin_model(), rank=2), r=2, lora_alpha=2)
    with contextlib.ExitStack() as stack:
        a, b = (
            stack.enter_context(harness.serve(folder, *flags, *own))
            for folder, own in zip(folders[:2], modules, strict=True)
        )
        router = stack.enter_context(
            harness.serve(folders[2], "--servers", a.url, b.url, what="router")
        )

        def status(model):
            body = {"model": model, "prompt": TEXT, "max_tokens": 2}
            return router.post("/v1/completions", body).status_code

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert set(pool.map(status, [*names] * 8)) == {200}
        assert status("new") == 404
        assert b.post("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "new"}).is_success
        # The router reads the servers' lists now and then.
        harness.wait_until(
            lambda: all(status("new") == 200 for _ in range(5)), router.log.read_text, 240
        )
