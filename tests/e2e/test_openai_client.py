"""Client of OpenAI against the real server and the built-in model."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Annotated

import httpx
import openai
import pydantic
import pytest

from tests.e2e import harness
from tests.server.malformed import cases

MODEL = "octavo/stories"
PARTS = ["--max-num-batched-tokens", "512"]
CHAT = [{"role": "user", "content": "Tell me a story about a dog."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with harness.serve(
        tmp_path_factory.mktemp("server"), "--max-request-bytes", "4M", *PARTS
    ) as made:
        yield made


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL).max_model_len > 0


def test_chat_streamed_and_at_once_are_the_same(client):
    whole = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=30, temperature=0)
    choice = whole.choices[0]
    assert choice.message.role == "assistant"
    assert choice.finish_reason in ("stop", "length")
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    for _ in range(20):  # a server that is slower than its engine sends fewer chunks
        stream = client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            max_tokens=30,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == choice.message.content
        assert len(text) > 10
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        if len(chunks) > 5:
            return
    raise AssertionError(f"{len(chunks)} chunks")


def test_logprobs(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy
        assert entry.token == entry.top_logprobs[0].token
    data = bytes(b for entry in content for b in entry.bytes)
    assert data.decode("utf-8", "replace").startswith(answer.choices[0].message.content[:5])


def test_seeds_make_answers_repeat_and_differ(client):
    def texts(seed):
        answer = client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=20, n=3, seed=seed, temperature=1.5
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    assert texts(1) == texts(1)
    assert texts(1) != texts(2)
    assert len(set(texts(1))) > 1


def test_completions_in_a_batch(client):
    prompts = ["Once upon a time", "The dog", "A long, long day"]
    alone = [
        client.completions.create(model=MODEL, prompt=p, max_tokens=12, temperature=0)
        for p in prompts
    ]
    batch = client.completions.create(model=MODEL, prompt=prompts, max_tokens=12, temperature=0)
    assert [c.text for c in batch.choices] == [a.choices[0].text for a in alone]
    assert [c.index for c in batch.choices] == [0, 1, 2]
    texts = ["", "", ""]
    for chunk in client.completions.create(
        model=MODEL, prompt=prompts, max_tokens=12, temperature=0, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [c.text for c in batch.choices]


def test_echo_with_logprobs(client):
    answer = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=0, echo=True, logprobs=1
    )
    (choice,) = answer.choices
    assert choice.text == "Once upon a time"
    assert choice.logprobs.token_logprobs[0] is None
    assert all(value < 0 for value in choice.logprobs.token_logprobs[1:])
    assert len(choice.logprobs.tokens) == answer.usage.prompt_tokens


def test_stop_and_extra_fields(client):
    answer = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=60, temperature=0, stop=["."]
    )
    assert "." not in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"
    extra = {"top_k": 1, "min_tokens": 5, "ignore_eos": True, "return_token_ids": True}
    answer = client.completions.create(
        model=MODEL, prompt="Once", max_tokens=8, temperature=1, extra_body=extra
    )
    assert len(answer.choices[0].token_ids) == 8


def test_cached_tokens_are_told(client):
    prompt = "Lily and her little brother went to the park to play with the red ball. " * 4
    details = []
    for _ in range(2):
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=1, extra_body={"cache_salt": "test"}
        )
        details.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert details[0] == 0
    assert details[1] >= 16


def test_progress_metrics_and_a_missed_prefix(client):
    """A long prompt tells its progress; when its beginning has changed, the usage says where."""
    story = "Lily and her little brother went to the park to play with the red ball. " * 60

    def ask(system, **fields):
        chat = [{"role": "system", "content": system}, {"role": "user", "content": story}]
        extra = {"cache_salt": salt, "return_metrics": True, **fields.pop("extra", {})}
        return client.chat.completions.create(
            model=MODEL, messages=chat, max_tokens=2, extra_body=extra, **fields
        )

    for attempt in range(20):  # a server that is slower than its engine tells less
        salt = f"progress {attempt}"
        chunks = list(ask("It is 12:01.", stream=True, extra={"return_progress": True}))
        told = [chunk.prompt_progress for chunk in chunks if hasattr(chunk, "prompt_progress")]
        if len(told) > 1 and told[-1]["processed"] == told[-1]["total"]:
            break
    assert len(told) > 1
    assert told == sorted(told, key=lambda part: (part["processed"], part["time_ms"]))
    assert {part["cache"] for part in told} == {0}
    assert told[-1]["processed"] == told[-1]["total"] > 900
    assert chunks[len(told)].choices[0].delta.role == "assistant"
    metrics = chunks[-1].metrics
    assert metrics["time_to_first_token_ms"] > 0
    assert metrics["num_cached_tokens"] == metrics["num_draft_tokens"] == 0

    answer = ask("It is 12:02.")
    miss = answer.usage.prompt_tokens_details.cache_miss
    assert (miss["reason"], miss["message"]) == ("changed", 0)
    assert 0 < miss["token"] < 20
    answer = ask("It is 12:02.")
    assert not hasattr(answer.usage.prompt_tokens_details, "cache_miss")
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert answer.metrics["num_cached_tokens"] == cached > 900


def test_typed_errors(client):
    def ask(**kwargs):
        client.chat.completions.create(**{"model": MODEL, "messages": CHAT, **kwargs})

    with pytest.raises(openai.NotFoundError) as missing:
        ask(model="gpt-4")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as tools:
        ask(tool_choice="required")
    assert tools.value.param == "tool_choice"
    with pytest.raises(openai.BadRequestError) as formatted:
        ask(response_format={"type": "json_schema"})
    assert formatted.value.param == "response_format.json_schema"
    with pytest.raises(openai.BadRequestError) as long:
        ask(messages=[{"role": "user", "content": "word " * 20_000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as late:
        client.completions.create(
            model=MODEL, prompt="Once", max_tokens=200, extra_body={"deadline_ms": 1}
        )
    assert late.value.status_code == 408


def test_tokenize_and_back(server):
    text = "Once upon a time, ein Größenwahn."
    tokens = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json()["prompt"].endswith(text)
    chat = server.post("/tokenize", {"messages": CHAT}).json()
    answer = server.post("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == chat["count"]


def test_a_broken_off_stream_frees_the_engine(client, server):
    stream = client.completions.create(
        model=MODEL,
        prompt="Once upon a time",
        max_tokens=300,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    next(iter(stream))
    stream.close()
    harness.wait_until(lambda: not server.metric("octavo:num_requests_running"))


def test_malformed_requests_disturb_nobody(client, server):
    expected = client.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=200, temperature=0
    )
    found = []

    def stream():
        chunks = client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=200, temperature=0, stream=True
        )
        found.append("".join(chunk.choices[0].text for chunk in chunks))

    healthy = threading.Thread(target=stream)
    healthy.start()
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for case in cases(4 * 2**20):
            response = http.request(case.method, case.path, content=case.body, headers=case.headers)
            case.check(response.status_code, response.content)
        healthy.join()
        assert http.get("/health").status_code == 200
    assert found == [expected.choices[0].text]


def test_answers_health_while_it_loads(tmp_path):
    with harness.serve(tmp_path, wait="") as server:
        harness.wait_for(server, "/health")
        answer = server.post("/v1/completions", {"prompt": "Once", "max_tokens": 3})
        assert answer.status_code == 200  # it waited for the model
        assert server.get("/ready").status_code == 200


def test_a_model_that_cannot_be_loaded_says_why_last(tmp_path):
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "octavo", "serve", str(tmp_path / "empty"), "--port", "0"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("octavo: error: ")
    assert "config.json" in last


def test_client_commands(server):
    def octavo(*argv):
        command = [sys.executable, "-m", "octavo", *argv, "--url", server.url + "/v1"]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)

    limits = ("--temperature", "0", "--max-tokens", "12")
    chat = octavo("chat", "-q", CHAT[0]["content"], *limits)
    assert len(chat.stdout) > 10
    complete = octavo("complete", "-q", "Once upon a time", *limits)
    assert len(complete.stdout) > 10
    *model, _ = complete.stderr.splitlines(keepends=True)
    assert model == ["octavo/stories continues the text.\n"]
    for figures in (chat.stderr, complete.stderr.removeprefix(*model)):
        assert re.fullmatch(r"\[12 tokens \| first token .* prompt tokens cached\]\n", figures)


def test_run_without_a_server():
    command = [sys.executable, "-m", "octavo", "run", "Tell me a story.", "--temperature", "0"]
    done = subprocess.run(
        [*command, "--max-tokens", "12"], capture_output=True, text=True, timeout=240, check=True
    )
    assert len(done.stdout) > 10
    assert done.stderr.strip().splitlines()[-1].startswith("[12 tokens | first token ")


def test_the_example_runs(server):
    script = Path(__file__).parents[2] / "examples" / "openai_client.py"
    url = {"OCTAVO_URL": server.url + "/v1"}
    done = subprocess.run(
        [sys.executable, script],
        env={**os.environ, **url},
        capture_output=True,
        text=True,
        check=True,
        timeout=240,
    )
    assert len(done.stdout) > 20


@pytest.mark.parametrize("stream", [False, True])
def test_arguments_of_plug_ins_that_nobody_takes(client, stream):
    with pytest.raises(openai.BadRequestError if not stream else openai.APIError) as error:
        list(
            client.completions.create(
                model=MODEL, prompt="Once", stream=stream, extra_body={"vllm_xargs": {"mood": 1}}
            )
        )
    assert (
        "vllm_xargs) has the key 'mood', which no logits processor accepts" in error.value.message
    )


class Person(pydantic.BaseModel):
    """Schema without unbounded fields."""

    name: Annotated[str, pydantic.Field(max_length=12)]
    age: Annotated[int, pydantic.Field(ge=1, le=99)]


def test_an_answer_becomes_an_object(client):
    answer = client.chat.completions.parse(
        model=MODEL, messages=CHAT, response_format=Person, n=2, seed=1, max_tokens=80
    )
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Person)


def test_structured_outputs_streamed_and_at_once_are_the_same(client):
    asked = {
        "model": MODEL,
        "prompt": ["Once upon a time", "The dog"],
        "seed": 1,
        "max_tokens": 80,
        "extra_body": {"guided_json": Person.model_json_schema()},
    }
    whole = [choice.text for choice in client.completions.create(**asked).choices]
    assert all(Person.model_validate_json(text) for text in whole)
    streamed = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == whole


def test_json_that_was_cut_says_so(client):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        response_format={"type": "json_object"},
        max_tokens=2,
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "length"
    assert choice.message.content.startswith("{")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {"$ref": "#/nowhere"}},
        {"guided_regex": "("},
        {"guided_grammar": "root ::= ("},
        {"structured_outputs": {"json": {"type": "strange"}}},
    ],
    ids=str,
)
def test_grammars_that_cannot_be_are_ordinary_errors(client, fields, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=CHAT, stream=stream, extra_body=fields, max_tokens=5
        )
    assert caught.value.body["type"] == "invalid_request_error"
    assert len(caught.value.body["message"]) > 10
