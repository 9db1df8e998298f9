"""Answers of the generation endpoints, byte for byte as `frozen_answers.json` has them.

`python -m tests.server.test_frozen_answers` writes the file anew, for changes that clients may see.
"""

import asyncio
import json
import re
from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo.system import clock
from tests.server.fake_engine import FakeAsyncLLM, with_server

FILE = Path(__file__).with_name("frozen_answers.json")
USER = {"role": "user", "content": "hi"}
USAGE = {"include_usage": True}
ALWAYS = {"include_usage": True, "continuous_usage_stats": True}

COMPLETIONS = [
    {},
    {"max_tokens": 2},
    {"n": 2},
    {"logprobs": 2},
    {"logprobs": 0, "return_token_ids": True},
    {"logprobs": 1, "return_tokens_as_token_ids": True},
    {"logprobs": 1, "logprob_token_ids": [5, 6]},
    {"logprobs": 1, "stop": "lo"},
    {"echo": True},
    {"echo": True, "n": 2},
    {"echo": True, "logprobs": 1},
    {"echo": True, "logprobs": 1, "n": 2},
    {"echo": True, "max_tokens": 0},
    {"echo": True, "max_tokens": 0, "logprobs": 1, "return_token_ids": True},
    {"echo": True, "logprobs": 0, "return_token_ids": True, "prompt": ["a", "bc"]},
    {"prompt": ["a", "bc"], "n": 2},
    {"prompt": [[5, 6], [7]], "echo": True},
    {"prompt": [104, 105], "return_token_ids": True},
    {"prompt": "", "n": 2, "temperature": 1.0},
    {"stop": ["l"]},
    {"stop": ["l"], "include_stop_str_in_output": True},
    {"stop_token_ids": [108]},
    {"truncate_prompt_tokens": 1, "echo": True},
    {"prompt_logprobs": 1, "n": 2},
    {"best_of": 2, "logprobs": 1},
    {"use_beam_search": True, "n": 2, "max_tokens": 3},
    {"use_beam_search": True, "n": 2, "max_tokens": 3, "echo": True, "return_token_ids": True},
    {"stream_options": USAGE},
    {"stream_options": ALWAYS, "n": 2},
    {"stream_options": ALWAYS, "prompt": ["a", "bc"], "return_token_ids": True},
    {"temperature": -1},
]
CHATS = [
    {},
    {"max_tokens": 2},
    {"n": 2},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2, "n": 2},
    {"logprobs": True, "return_tokens_as_token_ids": True},
    {"logprobs": True, "logprob_token_ids": [5, 6]},
    {"logprobs": True, "stop": "lo"},
    {"return_token_ids": True, "logprobs": True},
    {"echo": True, "continue_final_message": True},
    {"echo": True, "continue_final_message": True, "n": 2, "return_token_ids": True},
    {"echo": True, "messages": [USER, {"role": "assistant", "content": "So"}]},
    {"stop": ["l"]},
    {"stop": ["l"], "include_stop_str_in_output": True},
    {"stop_token_ids": [108]},
    {"prompt_logprobs": 1},
    {"use_beam_search": True, "n": 2, "max_tokens": 3},
    {"stream_options": USAGE},
    {"stream_options": ALWAYS, "n": 2, "return_token_ids": True},
    {"response_format": {"type": "json_object"}},
    {"temperature": -1},
]
TOKENS = [
    {},
    {"sampling_params": {"logprobs": 1, "n": 2}},
    {"sampling_params": {"stop": "l"}, "output_mode": "text"},
    {"return_token_ids": True, "sampling_params": {"max_tokens": 2, "prompt_logprobs": 1}},
    {"return_token_ids": True, "stream_options": ALWAYS, "sampling_params": {"max_tokens": 2}},
]
SETTINGS = {
    "plain": {},
    "counted": {
        "enable_prompt_tokens_details": True,
        "enable_force_include_usage": True,
        "enable_per_request_metrics": True,
        "response_role": "robot",
    },
}


class EvenEngine(FakeAsyncLLM):
    """Engine whose steps leave the server the time to take each output by itself."""

    async def _run(self):
        while self.live:
            for _ in range(30):
                await asyncio.sleep(0)
            outputs = [self._step(core_id, *live) for core_id, live in list(self.live.items())]
            for core_id in self._output.process_outputs(outputs, clock.now()).reqs_to_abort:
                self.live.pop(core_id, None)
            self.num_steps += 1
            if self.num_steps == self.last_step:
                self.die("gone")

    last_step = None


def make_engine(**settings):
    """Return an engine with a short answer, in which a character has two tokens."""
    config = EngineConfig.from_kwargs(served_model_name=["fake"], **settings)
    engine = EvenEngine(config)
    engine.answer = "Hël lo"
    engine.num_cached_tokens = 1
    return engine


def requests():
    """Yield path and body of each request."""
    for stream in (False, True):
        for fields in COMPLETIONS:
            body = {"prompt": "hi", "max_tokens": 12, **fields}
            yield "/v1/completions", body | ({"stream": True} if stream else {})
        for fields in CHATS:
            body = {"messages": [USER], "max_tokens": 12, **fields}
            yield "/v1/chat/completions", body | ({"stream": True} if stream else {})
        for fields in TOKENS:
            body = {"token_ids": [1, 5], "sampling_params": {}, **fields}
            yield "/inference/v1/generate", body | ({"stream": True} if stream else {})
    batch = {"messages": [[USER], [USER]], "max_tokens": 2, "return_token_ids": True}
    yield "/v1/chat/completions/batch", batch


def plain(response):
    """Return status and body without times and versions, cut into lines."""
    text = re.sub(r'"created":\d+', '"created":0', response.text)
    text = re.sub(r'"system_fingerprint":"[^"]*"', '"system_fingerprint":""', text)
    text = re.sub(r'(_ms|_per_second)":[0-9.e-]+', r'\1":1', text)
    return [response.status_code, *text.splitlines(keepends=True)]


def collect(settings, engine_settings, cases, last_step=None):
    """Return the answers of a server by request."""
    found = {}

    async def scenario(served):
        for path, body in cases:
            served.engine.last_step = last_step
            response = await served.post(path, request_id="mine", **body)
            found[f"{path} {json.dumps(body)}"] = plain(response)

    with_server(scenario, lambda: make_engine(**engine_settings), **settings)
    return found


def collect_all():
    """Return all answers, by the kind of the server."""
    # Every third request will do for settings that change the same part of each answer.
    found = {
        name: collect(settings, {}, list(requests())[:: 3 if settings else 1])
        for name, settings in SETTINGS.items()
    }
    without = {"skip_tokenizer_init": True}
    ids = [
        ("/v1/completions", {"prompt": [5, 6], "logprobs": 1, "echo": True, "stream": stream})
        for stream in (False, True)
    ]
    found["without a tokenizer"] = collect({}, without, ids)
    for path, body in list(requests()):
        if body.get("stream") and not body.keys() - {"messages", "prompt", "max_tokens", "stream"}:
            found.setdefault("dies", {}).update(collect({}, {}, [(path, body)], last_step=3))
    return found


@pytest.fixture(scope="module")
def answers():
    return collect_all()


@pytest.mark.parametrize("kind", [*SETTINGS, "without a tokenizer", "dies"])
def test_the_bytes_are_the_same(answers, kind):
    frozen = json.loads(FILE.read_text())[kind]
    assert list(answers[kind]) == list(frozen)
    for request, lines in frozen.items():
        assert answers[kind][request] == lines, request


if __name__ == "__main__":
    FILE.write_text(json.dumps(collect_all(), indent=0, ensure_ascii=False) + "\n")
