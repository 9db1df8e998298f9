"""Several front ends: all of them know a `uuid` of one, for its sender only."""

import base64
import contextlib
import io
import random
import re
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import httpx
import pytest
from PIL import Image

from tests.e2e import harness
from tests.e2e.test_front_ends import front_ends, wait_for_front_ends
from training.scenes import make_scene

EYES = "octavo/stories-eyes"
FLAGS = ["--max-model-len", "256", "--kv-cache-memory-bytes", "16M", "--num-threads", "1"]
FLAGS += ["-asc", "2", "--admin-key", "admin", "--api-key", "one", "two"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with harness.serve(folder, *FLAGS, model=EYES) as made:
        wait_for_front_ends(made, 2)
        yield made


@contextlib.contextmanager
def both(server):
    """Return a connection to each front end."""
    found = {}
    with contextlib.ExitStack() as stack:
        for _ in range(20):  # a free front end accepts a connection
            names = [uuid4().hex for _ in range(8)]
            clients = [stack.enter_context(httpx.Client(timeout=60)) for _ in names]

            def greet(client, name):
                body = {"model": EYES, "prompt": "a"}
                headers = {"authorization": "Bearer one", "x-request-id": name}
                client.post(f"{server.url}/tokenize", json=body, headers=headers)

            with ThreadPoolExecutor(len(names)) as threads:
                list(threads.map(greet, clients, names))
            for line in server.log.read_text().splitlines():
                for client, name in zip(clients, names, strict=True):
                    if name in line and (number := re.search(r"api_server=(\d)", line)):
                        found[number[1]] = client
            if len(found) == 2:
                yield [found["0"], found["1"]]
                return
        raise AssertionError("one front end gets all connections")


def ask(client, server, number=None, key="one", **fields):
    """Return the answer to a picture, or the code of an error."""
    url = None
    if number is not None:
        file = io.BytesIO()
        Image.fromarray(make_scene(random.Random(number)).picture).save(file, "PNG")
        url = {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}
    picture = {"type": "image_url", "image_url": url, **fields}
    content = [picture, {"type": "text", "text": "Describe the picture."}]
    body = {"model": EYES, "messages": [{"role": "user", "content": content}]}
    response = client.post(
        f"{server.url}/v1/chat/completions",
        json=body | {"temperature": 0, "max_tokens": 6},
        headers={"authorization": f"Bearer {key}"},
    )
    answer = response.json()
    if response.status_code != 200:
        return answer["error"]["code"]
    return answer["choices"][0]["message"]["content"]


def test_all_know_what_one_was_told(server):
    with both(server) as clients:

        def told(who, number, **fields):
            return ask(clients[who], server, number, **fields)

        def known(**fields):
            return [ask(client, server, **fields) for client in clients]

        first, second = told(0, 0), told(0, 1)
        assert first != second
        assert told(0, 0, uuid="a") == first
        assert known(uuid="a") == [first] * 2
        assert told(1, 1, uuid="a") == second  # in its place, for all at once
        assert known(uuid="a") == [second] * 2
        assert known(uuid="b") == ["unknown_uuid"] * 2
        assert known(uuid="a", key="two") == ["unknown_uuid"] * 2
        assert told(0, 0, uuid="a", key="two") == first
        assert known(uuid="a", key="two") == [first] * 2
        assert known(uuid="a") == [second] * 2


def test_one_that_is_replaced_knows_them(server):
    with both(server) as clients:
        expected = [ask(clients[i], server, i, uuid=f"kept {i}") for i in range(2)]
    before = server.log.read_text().count("INFO ready")
    killed = front_ends(server)[0]
    killed.kill()
    wait_for_front_ends(server, before + 1, [killed.pid])
    with both(server) as clients:
        for client in clients:
            assert [ask(client, server, uuid=f"kept {i}") for i in range(2)] == expected


def test_all_forget_together(server):
    with both(server) as clients:
        assert ask(clients[0], server, 0, uuid="forgotten") != "unknown_uuid"
        headers = {"authorization": "Bearer admin"}
        response = clients[1].post(f"{server.url}/reset_mm_cache", headers=headers)
        assert response.status_code == 200, response.text
        for client in clients:
            assert ask(client, server, uuid="forgotten") == "unknown_uuid"
