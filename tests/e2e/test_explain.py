"""Explanations of a real server's requests under load, with preemptions and a killed engine."""

import collections
import concurrent.futures
import itertools
import json
import re
import threading
import time

import httpx
import ollama
import openai
import pytest

from octavo.config import BUILTIN_MODEL
from octavo.server.explain import TITLES
from tests.bert_files import write_bert
from tests.e2e.harness import ENGINE, processes, serve, wait_until

NUM_REQUESTS = 200
NUM_CLIENTS = 24
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}


def body(number):
    """Return the route and the body of one of the mixed requests."""
    words = "the small dog ran home " * (1 + number % 29)
    common = {"max_tokens": 8 + number % 60, "ignore_eos": True, "temperature": 0.5}
    match number % 6:
        case 0:
            return "completions", {**common, "prompt": f"{number} {words}"}
        case 1:
            return "completions", {**common, "prompt": words, "n": 2, "stream": True}
        case 2:
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
            chat = {"messages": [{"role": "user", "content": f"{number}"}], "max_tokens": 40}
            return "chat/completions", {**chat, "response_format": form}
        case 3:
            chat = {"messages": [{"role": "user", "content": words}], "stream": True}
            return "chat/completions", {**common, **chat}
        case 4:
            return "completions", {**common, "prompt": [words, "once", f"{number}"]}
        case _:
            fields = {"use_beam_search": True, "n": 2, "prompt": f"{number} once"}
            return "completions", {**fields, "max_tokens": 6}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    flags = [
        *("--max-model-len", "512", "--num-gpu-blocks-override", "40", "--max-num-seqs", "8"),
        *("--max-num-batched-tokens", "96", "--explain-requests", "1000"),
        *("--strip-client-noise", "--explain-prompts"),
    ]
    with serve(tmp_path_factory.mktemp("explain"), *flags, spare=True) as server:
        yield server


def explain(server, name):
    """Return the explanation of a request, which must be a partition of its time."""
    answer = server.get(f"/v1/requests/{name}/explain?simulate=false")
    assert answer.status_code == 200, answer.text
    found = answer.json()
    parts = found["timeline"]
    assert parts[0]["begin_ms"] == 0
    for part, after in itertools.pairwise(parts):
        assert after["begin_ms"] == pytest.approx(part["begin_ms"] + part["ms"], abs=1e-6)
        assert part["ms"] >= 0
    assert sum(part["ms"] for part in parts) == pytest.approx(found["wall_ms"], abs=1e-6)
    assert sum(c["ms"] for c in found["causes"]) == pytest.approx(found["wall_ms"], abs=1e-6)
    return found


def num_running(server):
    """Return the number of recorded requests that have not ended."""
    return sum(not it["finished"] for it in server.get("/v1/requests").json()["data"])


def logged_times(server):
    """Return the milliseconds that the server's log has for each request."""
    lines = server.log.read_text().splitlines()
    pattern = re.compile(r"POST /v1/\S+ .*latency_ms=([\d.]+).*request_id=(\S+)")
    return {m[2]: float(m[1]) for line in lines if (m := pattern.search(line))}


def test_mixed_requests_under_load_with_preemptions_and_a_killed_engine(server):
    done = threading.Semaphore(0)
    spans = {}

    def send(number):
        path, fields = body(number)
        name = f"mixed-{number}"
        begin = time.monotonic()
        with httpx.stream(
            "POST",
            f"{server.url}/v1/{path}",
            json=fields,
            headers={"X-Request-Id": name},
            timeout=300,
        ) as response:
            text = response.read()
            # A machine with other work may refuse a grammar, which is explained as well.
            assert response.status_code == 200 or b"grammar_busy" in text, text
        spans[name] = begin, time.monotonic()
        done.release()

    with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
        sent = [pool.submit(send, number) for number in range(NUM_REQUESTS)]
        for _ in range(NUM_REQUESTS // 3):
            done.acquire()
        engine = server.engine_process()
        engine.suspend()  # so that requests of all clients are in flight when it dies
        wait_until(lambda: num_running(server) >= NUM_CLIENTS - 4, server.log.read_text)
        killed = time.monotonic()
        engine.kill()
        for future in sent:
            future.result()
    server.wait_for_metric("octavo:engine_restarts_total", 1)
    # Lines may follow the answers.
    logged = wait_until(lambda: (found := logged_times(server)).keys() >= spans.keys() and found)
    seen, recovered, named = collections.Counter(), [], collections.Counter()
    numbers, numbered, num_shorter = {}, {}, 0
    for name, (begin, end) in spans.items():
        found = wait_until(lambda: (told := explain(server, name))["finished"] and told)  # noqa: B023
        assert found["wall_ms"] == pytest.approx(logged[name], abs=2)
        num_shorter += found["wall_ms"] <= (end - begin) * 1000
        causes = {cause["cause"]: cause["ms"] for cause in found["causes"]}
        seen.update(causes.keys())
        assert {"receive", "parse", "tokenize", "deliver"} <= causes.keys()
        assert "prefill" in causes or found["status"] == 503
        if end < killed:
            assert "engine_death" not in causes
        for answer in found["answers"]:
            assert numbers.setdefault(answer["number"], found["id"]) == found["id"]
        for part in found["timeline"]:
            for other in part.get("who") or ():
                named[part["cause"], part.get("reason")] += 1
                assert f"#{other['number']}" in part["text"]
                numbered[other["number"]] = other["id"]
            if part["cause"] == "engine_death":
                recovered.append(found["created"] + (part["begin_ms"] + part["ms"]) / 1000)
    # A client may notice the end of its answer before the server does.
    assert num_shorter > NUM_REQUESTS // 2
    # The death ends at the same time for all.
    assert max(recovered) - min(recovered) < 0.001
    assert len(recovered) == seen["engine_death"] > 8
    assert seen["decode"] > NUM_REQUESTS // 2
    for cause in ("queued", "grammar", "preempted", "recompute", "engine_death"):
        assert seen[cause], (cause, seen)
    assert seen["not_recorded"] == 0
    for cause in (("queued", "SEAT"), ("queued", "BLOCKS"), ("decode", None), ("preempted", None)):
        assert named[cause], (cause, named)
    # A number means the same request wherever it is.
    assert numbered.items() <= numbers.items()
    # A simulation takes a second, with others' work on this machine some.
    found = server.get("/v1/requests/mixed-199/explain").json()
    assert all(a["estimate"] in ("at_most", "simulated") for a in found["advice"])


def test_the_explanation_is_in_the_answer(server):
    fields = {"prompt": "Once upon a time", "max_tokens": 5, "explain": True, "ignore_eos": True}
    whole = server.post("/v1/completions", fields).json()
    assert {part["cause"] for part in whole["explanation"]["timeline"]} >= {"prefill", "decode"}
    assert whole["explanation"]["id"] == whole["id"]
    assert not whole["explanation"]["finished"]
    text = server.post("/v1/completions", {**fields, "stream": True}).text
    assert text.count('"explanation":') == 1
    last = text.split("\n\n")[-3]
    assert '"explanation":{"' in last
    assert last.startswith("data: ")


def test_a_busy_engine_that_had_the_prefix_is_named(tmp_path):
    flags = ["--max-model-len", "512", "--num-threads", "1", "--kv-cache-memory-bytes", "8M"]
    fields = {"max_tokens": 8, "ignore_eos": True, "explain": True}

    def ask(server):
        prompt = "The dog ran to the tree. " * 55
        answer = server.post("/v1/completions", {**fields, "prompt": prompt})
        return answer.json()["explanation"]

    with (
        serve(tmp_path, "-dp", "2", *flags) as server,
        concurrent.futures.ThreadPoolExecutor(12) as pool,
    ):
        assert "routing" not in {a["setting"] for a in ask(server)["advice"]}
        engines = processes(server.process.pid, ENGINE)
        for engine in engines:  # so that no request ends before the last one comes
            engine.suspend()
        asked = [pool.submit(ask, server) for _ in range(12)]
        wait_until(lambda: num_running(server) == 12)
        for engine in engines:
            engine.resume()
        told = [future.result() for future in asked]
        advice = [a for found in told for a in found["advice"]]
        (text,) = {a["text"] for a in advice if a["setting"] == "routing"}
        named = re.match(r"Engine [01] likely had the first (\d+) tokens of the prompt in", text)
        tokens = told[0]["cache"]["prompt_tokens"]
        assert tokens - 32 < int(named[1]) <= tokens


def test_what_was_given_up_and_what_differs(server):
    first = "It was 2026-11-27 and " + "a dog ran to the tree. " * 60
    second = first.replace("11-27", "11-28")
    for prompt in (first[:900], second[:900]):
        answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
    cache = explain(server, answer.json()["id"])["cache"]
    assert cache["cached_tokens"] == 0
    assert cache["given_up"] is None
    assert (cache["miss"]["reason"], cache["miss"]["message"]) == ("changed", None)
    assert cache["difference"]["volatile"] == "a date or time"
    assert "2026-11-28 and a dog" in cache["difference"]["text"]
    assert "2026-11-27 and a dog" in cache["difference"]["earlier_text"]
    for number in range(12):  # they take all blocks
        server.post("/v1/completions", {"prompt": f"{number} " + "cats " * 150, "max_tokens": 1})
    answer = server.post("/v1/completions", {"prompt": second[:900], "max_tokens": 1}).json()
    given_up = explain(server, answer["id"])["cache"]["given_up"]
    assert given_up["token"] == 0
    assert given_up["seconds_before"] > 0


def test_clients_of_all_routes_read_the_explanation(server):
    asked = {"explain": True}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        response = client.responses.create(
            model=BUILTIN_MODEL, input="Once", max_output_tokens=3, extra_body=asked
        )
        events = list(
            client.responses.create(
                model=BUILTIN_MODEL,
                input="Once",
                max_output_tokens=3,
                stream=True,
                extra_body=asked,
            )
        )
        streamed = events[-1].response
        chat = client.chat.completions.create(
            model=BUILTIN_MODEL,
            messages=[{"role": "user", "content": "Once"}],
            max_tokens=3,
            extra_body=asked,
        )
    found = [answer.model_extra["explanation"] for answer in (response, streamed, chat)]
    assert [e["id"] for e in found] == [response.id, streamed.id, chat.id]
    # Ollama's client cannot send further fields, but reads the answers.
    for path, kind in (("chat", ollama.ChatResponse), ("generate", ollama.GenerateResponse)):
        body = {"model": BUILTIN_MODEL, "options": {"num_predict": 3}, **asked}
        body |= {"messages": [{"role": "user", "content": "Once"}], "prompt": "Once"}
        for stream in (False, True):
            text = server.post(f"/api/{path}", {**body, "stream": stream}).text
            last = json.loads(text.splitlines()[-1])
            assert kind.model_validate(last).eval_count == 3
            found.append(last["explanation"])
    message = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 3, **asked}
    found.append(server.post("/v1/messages", message).json()["explanation"])
    last = server.post("/v1/messages", {**message, "stream": True}).text.strip().split("\n\n")[-1]
    assert last.startswith("event: message_stop\n")
    found.append(json.loads(last.partition("data: ")[2])["explanation"])
    for explanation in found:
        assert {part["cause"] for part in explanation["timeline"]} >= {"prefill", "decode"}
        assert explanation.keys() == found[0].keys()


def test_vectors_and_scores(tmp_path):
    """The parts of a request for vectors sum to its time, and name all of its tokens."""
    flags = ["--served-model-name", "m", "--device", "cpu", "--max-num-seqs", "4"]
    model = str(write_bert(tmp_path / "bert"))
    with serve(tmp_path, *flags, "--dtype", "float32", model=model) as server:
        texts = [f"{i} dogs like the sun" for i in range(50)]
        long = "a dog barks " * 60
        bodies = [
            ("/v1/embeddings", {"input": texts}),
            ("/v1/embeddings", {"input": [long, "a cat"], "windows": True}),
            ("/rerank", {"query": "a dog", "documents": texts}),
            ("/api/embed", {"model": "m", "input": texts}),
        ]
        for path, body in bodies:
            begin = time.monotonic()
            answer = server.post(path, body | {"explain": True})
            seconds = time.monotonic() - begin
            assert answer.status_code == 200, answer.text
            name = answer.headers["x-request-id"]
            path = f"/v1/requests/{name}/explain"
            found = wait_until(lambda: (it := server.get(path).json())["finished"] and it)  # noqa: B023
            for told in (answer.json()["explanation"], found):
                spans = told["timeline"]
                total = sum(span["ms"] for span in spans)
                assert total == pytest.approx(told["wall_ms"], abs=0.01)
                tokens = sum(span["tokens"] for span in spans if "tokens" in span)
                assert tokens == told["prompt_tokens"] > 0
                assert {span["cause"] for span in spans} <= {*TITLES, "several"}
            assert answer.json()["explanation"]["wall_ms"] <= seconds * 1000
