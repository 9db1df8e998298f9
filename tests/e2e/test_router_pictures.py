"""Pictures through a router: prefill here and decode there, and uuids, which one server knows."""

import base64
import io
import random

import httpx
import openai
import pytest
from PIL import Image

from octavo import LLM, SamplingParams
from tests.e2e import harness
from tests.e2e.test_router import own_servers, wait_for_servers
from training.scenes import make_scene

EYES = "octavo/stories-eyes"
SIZE = {"max_model_len": 256, "kv_cache_memory_bytes": 16 * 2**20, "num_threads": 1}
FLAGS = ["--max-model-len", "256", "--kv-cache-memory-bytes", "16M", "--num-threads", "1"]
SCENES = [make_scene(random.Random(number)).picture for number in range(4)]
QUESTION = (
    "Describe the picture. What is in it, what colors do the things have, and where are they?"
)
PLAIN = {"temperature": 0, "max_tokens": 16}


def chat(scene=None, **fields):
    """Return a chat with a picture, or without its content."""
    url = None
    if scene is not None:
        file = io.BytesIO()
        Image.fromarray(scene).save(file, "PNG")
        url = {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"}
    picture = {"type": "image_url", "image_url": url, **fields}
    return [{"role": "user", "content": [picture, {"type": "text", "text": QUESTION}]}]


@pytest.fixture(scope="module")
def expected():
    """Return tokens and logprobs of the answer to each chat from one engine."""
    params = SamplingParams(**PLAIN, logprobs=0)
    with LLM(EYES, **SIZE) as llm:
        outputs = llm.chat([chat(scene) for scene in SCENES], params, use_tqdm=False)
    rows = [[row.values() for row in output.outputs[0].logprobs] for output in outputs]
    return [[(one.decoded_token, one.logprob) for (one,) in answer] for answer in rows]


@pytest.fixture(scope="module")
def router(tmp_path_factory):
    flags = [*FLAGS, "--prefill", "1", "--decode", "2", "--no-warm-spare"]
    flags += ["--health-check-interval", "0.2", "--api-key", "one", "two"]
    flags += ["--failover-timeout", "240", "--health-check-timeout", "60"]
    folder = tmp_path_factory.mktemp("router")
    with harness.serve(folder, *flags, model=EYES, what="router") as router:
        router.get = lambda path: httpx.get(
            router.url + path, headers={"authorization": "Bearer one"}, timeout=120
        )
        wait_for_servers(router)
        yield router


def ask(router, messages, key="one"):
    """Return tokens and logprobs of an answer, or the code of an error."""
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key=key, max_retries=0) as client:
        try:
            answer = client.chat.completions.create(
                model=EYES, messages=messages, logprobs=True, **PLAIN
            )
        except openai.BadRequestError as error:
            return error.code
    return [(one.token, one.logprob) for one in answer.choices[0].logprobs.content]


def num_encoded(router, role):
    """Return the number of items that servers needed rows of."""
    count = 0.0
    for process in own_servers(router, role).values():
        words = process.cmdline()
        socket = words[words.index("--uds") + 1]
        with httpx.Client(transport=httpx.HTTPTransport(uds=socket), timeout=120) as client:
            text = client.get("http://server/metrics").text
        lines = [line for line in text.splitlines() if "mm_cache_queries_total" in line]
        count += sum(float(line.rsplit(" ", 1)[1]) for line in lines if line[0] != "#")
    return count


def test_a_picture_is_computed_here_and_answered_there(router, expected):
    for scene, answer in zip(SCENES, expected, strict=True):
        assert ask(router, chat(scene)) == answer
    assert 'router_prefills_total{where="remote"} 4.0' in router.get("/metrics").text
    assert num_encoded(router, "prefill") == 4
    assert num_encoded(router, "decode") == 0


def test_a_uuid_is_known_to_the_server_that_has_its_picture(router, expected):
    answers = dict(enumerate(expected))
    for i, answer in answers.items():
        assert ask(router, chat(SCENES[i], uuid=f"u{i}")) == answer
    for i in (3, 1, 0, 2) * 2:
        assert ask(router, chat(uuid=f"u{i}")) == answers[i]
    # The last picture counts, wherever it was sent.
    for i in answers:
        assert ask(router, chat(SCENES[i], uuid="u")) == answers[i]
        assert ask(router, chat(uuid="u")) == answers[i]


def test_no_client_finds_the_uuids_of_another(router, expected):
    headers = [{"authorization": f"Bearer {key}"} for key in ("one", "two")]

    def post(path, key, messages, **fields):
        body = {"model": EYES, "messages": messages, **fields}
        got = httpx.post(router.url + path, json=body, headers=headers[key], timeout=60)
        return got.json().get("error", {"code": "known"})["code"]

    paths = ("/v1/chat/completions", "/v1/chat/completions/render", "/tokenize", "/invocations")
    for path in paths:
        for _ in range(2):  # so that both servers have it
            assert post(path, 0, chat(SCENES[0], uuid="mine")) == "known"
    for path in paths:
        assert post(path, 0, chat(uuid="mine")) == "known"
        assert post(path, 1, chat(uuid="mine")) == "unknown_uuid"
        assert post(path, 1, chat(uuid="mine"), cache_salt="s") == "unknown_uuid"
    text = [{"role": "user", "content": "a"}]
    counts = (
        ("messages/count_tokens", {"messages": text}),
        ("responses/input_tokens", {"input": "a"}),
    )
    for path, body in counts:
        got = httpx.post(f"{router.url}/v1/{path}", json=body, headers=headers[0], timeout=60)
        assert got.json()["input_tokens"] > 0
    assert ask(router, chat(SCENES[1], uuid="mine"), "two") == expected[1]
    assert ask(router, chat(uuid="mine")) == expected[0]
    assert ask(router, chat(uuid="mine"), "two") == expected[1]


def test_media_are_lost_with_their_server(router, expected):
    assert ask(router, chat(SCENES[2], uuid="lost")) == expected[2]
    restarts = router.metric("octavo:router_server_restarts_total")
    for process in own_servers(router, "decode").values():
        process.kill()
    router.wait_for_metric("octavo:router_server_restarts_total", restarts + 2)
    assert ask(router, chat(uuid="lost")) == "unknown_uuid"
    wait_for_servers(router)
    assert ask(router, chat(uuid="lost")) == "unknown_uuid"
    assert ask(router, chat(SCENES[2], uuid="lost")) == expected[2]
    assert ask(router, chat(uuid="lost")) == expected[2]
