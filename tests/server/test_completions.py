import dataclasses
import json
import time

import pytest

from octavo.config import EngineConfig
from octavo.server.completions import _prompt_offsets
from tests.server.fake_engine import ANSWER, BOS, EOS, FakeAsyncLLM, events, with_server
from tests.small_tokenizers import sentencepiece


def chunks_of(data):
    return [json.loads(item) for item in data]


def test_text_in_text_out():
    async def scenario(served):
        served.engine.num_cached_tokens = 2
        response = await served.complete(prompt="Say hello")
        assert response.status_code == 200
        answer = response.json()
        assert answer["id"].startswith("cmpl-")
        assert answer["object"] == "text_completion"
        assert answer["model"] == "fake"
        assert answer["system_fingerprint"].startswith("fp_")
        assert answer["choices"] == [
            {
                "index": 0,
                "text": ANSWER,
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "prompt_logprobs": None,
                "token_ids": None,
                "prompt_token_ids": None,
            }
        ]
        assert answer["usage"] == {
            "prompt_tokens": 10,
            "completion_tokens": len(ANSWER.encode()) + 1,
            "total_tokens": 10 + len(ANSWER.encode()) + 1,
            "prompt_tokens_details": {"cached_tokens": 2},
        }

    with_server(scenario)


def test_default_length_is_openais():
    async def scenario(served):
        served.engine.answer = "x" * 50
        response = await served.post("/v1/completions", prompt="hi")
        assert response.json()["usage"]["completion_tokens"] == 16
        assert response.json()["choices"][0]["finish_reason"] == "length"

    with_server(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_answers_are_numbered_prompt_by_prompt(stream):
    async def scenario(served):
        response = await served.complete(prompt=["a", "bc", "d"], n=2, stream=stream)
        texts = dict.fromkeys(range(6), "")
        finished = set()
        for answer in chunks_of(await events(response)) if stream else [response.json()]:
            for choice in answer["choices"]:
                texts[choice["index"]] += choice["text"]
                if choice["finish_reason"]:
                    finished.add(choice["index"])
        assert texts == dict.fromkeys(range(6), ANSWER)
        assert finished == set(range(6))
        requests = {tuple(r.prompt_token_ids): r for r in served.engine.requests}
        turns = {prompt: r.options.turn for prompt, r in requests.items()}
        assert turns == {(BOS, 97): 0, (BOS, 98, 99): 2, (BOS, 100): 4}

    with_server(scenario)


def test_token_ids_as_prompts():
    async def scenario(served):
        await served.complete(prompt=[5, 6, 7])
        await served.complete(prompt=[[5], [6, 7]])
        await served.complete(prompt="ab", add_special_tokens=False)
        prompts = [r.prompt_token_ids for r in served.engine.requests]
        assert prompts == [[5, 6, 7], [5], [6, 7], [97, 98]]

    with_server(scenario)


def test_stream_has_the_same_text_and_ends_with_usage():
    async def scenario(served):
        options = {"include_usage": True}
        response = await served.complete(stream=True, stream_options=options)
        chunks = chunks_of(await events(response))
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert {chunk["object"] for chunk in chunks} == {"text_completion"}
        *content, last = chunks
        assert "".join(c["choices"][0]["text"] for c in content) == ANSWER
        assert [c["choices"][0]["finish_reason"] for c in content][-2:] == [None, "stop"]
        assert all(c["usage"] is None for c in content)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 15

    with_server(scenario)


def test_stream_without_options_has_no_usage():
    async def scenario(served):
        chunks = chunks_of(await events(await served.complete(stream=True)))
        assert all("usage" not in chunk for chunk in chunks)

    with_server(scenario)


def test_continuous_usage_counts_up():
    async def scenario(served):
        options = {"include_usage": True, "continuous_usage_stats": True}
        response = await served.complete(stream=True, max_tokens=4, stream_options=options)
        *chunks, last = chunks_of(await events(response))
        assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 4]
        assert last["usage"]["completion_tokens"] == 4
        assert last["choices"] == []

    with_server(scenario)


@pytest.mark.parametrize("include", [False, None])
def test_continuous_usage_needs_usage(include):
    async def scenario(served):
        options = {"include_usage": include, "continuous_usage_stats": True}
        for response in (
            await served.complete(stream=True, stream_options=options),
            await served.chat(stream=True, stream_options=options),
        ):
            assert all("usage" not in chunk for chunk in chunks_of(await events(response)))

    with_server(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_of_several_prompts_add_up(stream):
    async def scenario(served):
        served.engine.num_cached_tokens = 3
        response = await served.complete(
            prompt=["abc", "abd", "abe"],
            n=2,
            stream=stream,
            stream_options={"include_usage": True} if stream else None,
        )
        answers = chunks_of(await events(response)) if stream else [response.json()]
        usage = answers[-1]["usage"]
        assert usage["prompt_tokens"] == 12
        assert usage["prompt_tokens_details"] == {"cached_tokens": 9}

    with_server(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_echo(stream):
    async def scenario(served):
        prompts = [[BOS, 104, 105], [BOS, 111]]
        response = await served.complete(prompt=prompts, echo=True, stream=stream)
        texts = ["", ""]
        for answer in chunks_of(await events(response)) if stream else [response.json()]:
            for choice in answer["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == ["<s>hi" + ANSWER, "<s>o" + ANSWER]

    with_server(scenario)


def test_echo_of_the_prompt_alone():
    async def scenario(served):
        response = await served.complete(echo=True, max_tokens=0, logprobs=0)
        (choice,) = response.json()["choices"]
        assert choice["text"] == "hi"
        assert choice["logprobs"]["tokens"] == ["<s>", "h", "i"]
        assert response.json()["usage"]["completion_tokens"] == 0

    with_server(scenario)


def test_echo_of_a_truncated_prompt_is_what_the_model_saw():
    async def scenario(served):
        response = await served.complete(
            prompt="abcdef", echo=True, truncate_prompt_tokens=3, max_tokens=1
        )
        assert response.json()["choices"][0]["text"] == "defH"

    with_server(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_with_echo(stream):
    async def scenario(served):
        response = await served.complete(echo=True, logprobs=2, max_tokens=2, stream=stream)
        rows = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for answer in chunks_of(await events(response)) if stream else [response.json()]:
            logprobs = answer["choices"][0]["logprobs"]
            assert set(logprobs) == set(rows)
            for name, values in rows.items():
                values += logprobs[name]
        assert rows["tokens"] == ["<s>", "h", "i", "H", "e"]
        assert rows["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
        assert rows["top_logprobs"][0] is None
        assert rows["top_logprobs"][3] == {"H": -0.5, "I": -9999.0}
        assert rows["text_offset"] == [0, 0, 1, 2, 3]

    with_server(scenario)


PROMPTS = [
    "hi",
    "",
    "wörld \U0001f600!",
    "<s>hi",
    "a</s>b</s></s>c",
    "<s",
    [BOS, 104, EOS, 105],
    [104, 0xC3],
    [0xC3, 0xC3, 104],
    [EOS],
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"skip_special_tokens": False},
        {"stop": "rl"},
        {"stop": "rl", "include_stop_str_in_output": True},
        {"max_tokens": 0},
        {"n": 2, "max_tokens": 9},
        {"truncate_prompt_tokens": 2},
        {"ignore_eos": True, "max_tokens": 20},
    ],
    ids=str,
)
def test_offsets_are_places_in_the_text(prompt, fields, stream):
    fields = {"echo": True, "logprobs": 1, "stream": stream, **fields}

    async def scenario(served):
        choices = {}
        response = await served.complete(prompt=prompt, **fields)
        for answer in chunks_of(await events(response)) if stream else [response.json()]:
            for choice in answer["choices"]:
                text, tokens, places = choices.setdefault(choice["index"], ([], [], []))
                text.append(choice["text"])
                tokens += choice["logprobs"]["tokens"]
                places += choice["logprobs"]["text_offset"]
        assert len(choices) == fields.get("n", 1)
        for pieces, tokens, places in choices.values():
            text = "".join(pieces)
            ends = [*places[1:], len(text)]
            assert places[0] == 0
            assert places == sorted(places)
            slices = [text[begin:end] for begin, end in zip(places, ends, strict=True)]
            if "stop" not in fields or not stream:
                assert "".join(slices) == text
                assert places[-1] <= len(text)
            # Whole characters are at their offsets; the last token may be truncated.
            for token, piece in list(zip(tokens, slices, strict=True))[:-1]:
                if token in ("<s>", "</s>"):
                    assert piece in ("", token)
                elif "\ufffd" not in token and not ("stop" in fields and token in "rld!"):
                    # The next token shows that a character was broken.
                    assert piece.lstrip("\ufffd") == token, (text, tokens, places)

    with_server(scenario)


def test_offsets_of_a_prompt_whose_first_space_is_not_written():
    tokenizer = sentencepiece()
    for text in ("the cat", "the cät <s> the", " the", "</s>the\n"):
        ids = tokenizer.encode(text)
        places = _prompt_offsets(tokenizer, ids, text)
        ends = [*places[1:], len(text)]
        slices = [text[begin:end] for begin, end in zip(places, ends, strict=True)]
        assert "".join(slices) == text
        for token_id, piece in zip(ids, slices, strict=True):
            whole = tokenizer.token_text(token_id)
            if token_id in tokenizer.all_special_ids:
                assert piece in ("", whole)
            elif "\ufffd" not in whole:
                assert piece in (whole, whole.removeprefix(" ")), (text, slices)


def test_an_echo_waits_for_the_prompts_logprobs():
    # The first of n answers computes them; with a warm prefix cache the second one is earlier.
    async def scenario(served):
        own = served.engine.serve

        async def reordered(*args, **kwargs):
            outputs = [output async for output in own(*args, **kwargs)]
            first = outputs[0]
            alone = dataclasses.replace(
                first, prompt_logprobs=None, outputs=[first.outputs[1]], finished=False
            )
            rest = dataclasses.replace(first, outputs=[first.outputs[0]])
            for output in (alone, rest, *outputs[1:]):
                yield output

        served.engine.serve = reordered
        response = await served.complete(echo=True, logprobs=1, n=2, stream=True, max_tokens=3)
        tokens = {0: [], 1: []}
        for chunk in chunks_of(await events(response)):
            (choice,) = chunk["choices"]
            tokens[choice["index"]] += choice["logprobs"]["tokens"]
        assert tokens[0] == tokens[1] == ["<s>", "h", "i", "H", "e", "l"]

    with_server(scenario)


def test_prompt_logprobs_and_token_ids():
    async def scenario(served):
        response = await served.complete(
            prompt="h", prompt_logprobs=1, return_token_ids=True, max_tokens=2
        )
        (choice,) = response.json()["choices"]
        assert choice["prompt_logprobs"] == [
            None,
            {
                "104": {"logprob": -0.5, "rank": 1, "decoded_token": "h"},
            },
        ]
        assert choice["prompt_token_ids"] == [BOS, 104]
        assert choice["token_ids"] == [72, 101]

    with_server(scenario)


def test_streamed_token_ids():
    async def scenario(served):
        response = await served.complete(stream=True, return_token_ids=True)
        choices = [c["choices"][0] for c in chunks_of(await events(response))]
        assert choices[0]["prompt_token_ids"] == [BOS, 104, 105]
        assert all(c["prompt_token_ids"] is None for c in choices[1:])
        assert [t for c in choices for t in c["token_ids"]] == [*ANSWER.encode(), EOS]

    with_server(scenario)


def test_stop_text_ends_the_answer_and_is_told():
    async def scenario(served):
        response = await served.complete(stop=["wör", "zzz"])
        (choice,) = response.json()["choices"]
        assert choice["text"] == "Hello, "
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] == "wör"
        chunks = chunks_of(await events(await served.complete(stop="wör", stream=True)))
        assert "".join(c["choices"][0]["text"] for c in chunks) == "Hello, "
        assert chunks[-1]["choices"][0]["stop_reason"] == "wör"

    with_server(scenario)


def test_every_parameter_reaches_the_engine():
    given = {
        "n": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 7,
        "seed": 11,
        "stop": ["zz"],
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "top_k": 5,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "stop_token_ids": [3],
        "ignore_eos": True,
        "min_tokens": 2,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "truncate_prompt_tokens": 2,
        "truncation_side": "right",
        "allowed_token_ids": [72, 101],
        "bad_words": ["x"],
        "priority": 3,
        "logprobs": 2,
    }

    async def scenario(served):
        response = await served.complete(
            **given,
            logit_bias={"5": 1.5},
            vllm_xargs={"a": [1, 2.5], "b": "x"},
            best_of=1,
            request_id="mine",
            user="u",
        )
        assert response.status_code == 200
        assert response.headers["x-request-id"] == "mine"
        assert response.json()["id"] == "cmpl-mine"
        params = served.engine.params[0]
        for name, value in given.items():
            assert getattr(params, name) == value, name
        assert params.logit_bias == {5: 1.5}
        assert params.extra_args == {"a": [1, 2.5], "b": "x"}

    config = EngineConfig.from_kwargs(served_model_name=["fake"], scheduling_policy="priority")
    with_server(scenario, lambda: FakeAsyncLLM(config))


def test_null_means_not_given():
    async def scenario(served):
        names = ["n", "temperature", "top_p", "seed", "stop", "logit_bias", "stream", "echo"]
        names += ["stream_options", "response_format", "suffix", "logprobs", "model", "user"]
        response = await served.complete(**dict.fromkeys(names), unknown_field={"a": 1})
        assert response.status_code == 200

    with_server(scenario)


def test_the_models_defaults_give_way_to_the_requests_fields():
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 5}

    async def scenario(served):
        await served.post("/v1/completions", prompt="hi", top_k=3)
        params = served.engine.params[0]
        assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 3, 16)

    with_server(scenario, lambda: FakeAsyncLLM(generation_config=defaults))


def test_without_a_tokenizer_ids_go_in_and_out():
    config = EngineConfig.from_kwargs(served_model_name=["fake"], skip_tokenizer_init=True)

    async def scenario(served):
        response = await served.complete(prompt=[5], max_tokens=3, return_token_ids=True)
        (choice,) = response.json()["choices"]
        assert choice["token_ids"] == list(ANSWER.encode()[:3])
        assert choice["text"] == ""
        response = await served.complete(prompt=[5], max_tokens=1, logprobs=1)
        assert response.json()["choices"][0]["logprobs"]["tokens"] == ["token_id:72"]
        assert (await served.complete(prompt="hi")).json()["error"]["param"] == "prompt"
        assert (await served.chat()).json()["error"]["param"] == "messages"
        for fields in ({"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}):
            response = await served.post("/tokenize", **fields)
            assert response.status_code == 400
            assert response.json()["error"]["param"] in fields

    with_server(scenario, lambda: FakeAsyncLLM(config))


def test_the_whole_range_of_seeds():
    async def scenario(served):
        for seed, status in ((-(2**63), 200), (2**64 - 1, 200), (-(2**63) - 1, 400), (2**64, 400)):
            response = await served.complete(seed=seed, max_tokens=1)
            assert response.status_code == status

    with_server(scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_is_lowered_to_what_fits(stream):
    async def scenario(served):
        response = await served.complete(
            prompt=[5] * 250, max_tokens=20, stream=stream, return_token_ids=True
        )
        found = [json.loads(item) for item in await events(response)] if stream else None
        choices = [c["choices"][0] for c in found or [response.json()]]
        assert sum(len(choice["token_ids"]) for choice in choices) == 6
        assert choices[-1]["finish_reason"] == "length"
        # Beams, too.
        fields = {"use_beam_search": True, "n": 2, "ignore_eos": True}
        beams = (await served.complete(prompt=[5] * 250, max_tokens=20, **fields)).json()
        assert beams["usage"]["completion_tokens"] == 12

    with_server(scenario)


def test_a_prompt_that_leaves_no_room():
    async def scenario(served):
        response = await served.complete(prompt=[5] * 256, max_tokens=1)
        error = response.json()["error"]
        assert response.status_code == 400
        assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
        for count in ("maximum context length is 256", "your prompt has 256 tokens"):
            assert count in error["message"]

    with_server(scenario)


def choice(index, text, reason=None, **more):
    """Return a choice of a chunk; the last ones of an answer have its finish reason."""
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason, **more}


def rows(tokens, offsets):
    """Return the logprobs of tokens with one candidate each; the first token has none."""
    known = [None if token == "<s>" else -0.5 for token in tokens]
    return {
        "tokens": tokens,
        "token_logprobs": known,
        "top_logprobs": [None if p is None else {t: p} for t, p in zip(tokens, known, strict=True)],
        "text_offset": offsets,
    }


PLAIN = {"stop_reason": None}
UNASKED = {"prompt_logprobs": None, "token_ids": None, "prompt_token_ids": None}
IDS = [BOS, 97, 98]
# The answer is "Hé!", the first half of é after two tokens.
WHOLE = [
    (
        {"max_tokens": 8},
        [
            choice(0, "H"),
            choice(0, "é"),
            choice(0, "!"),
            choice(0, "", "stop", stop_reason=None),
        ],
        [choice(0, "Hé!", "stop", stop_reason=None, **UNASKED)],
        5,
    ),
    (
        {"max_tokens": 8, "stop": "!"},
        [choice(0, "H"), choice(0, "é"), choice(0, "", "stop", stop_reason="!")],
        [choice(0, "Hé", "stop", stop_reason="!", **UNASKED)],
        4,
    ),
    (
        {"max_tokens": 8, "stop": "!", "include_stop_str_in_output": True},
        [choice(0, "H"), choice(0, "é"), choice(0, "!", "stop", stop_reason="!")],
        [choice(0, "Hé!", "stop", stop_reason="!", **UNASKED)],
        4,
    ),
    (
        {"max_tokens": 3, "return_token_ids": True, "n": 2},
        [
            choice(i, text, reason, stop_reason=None, token_ids=[token], prompt_token_ids=prompt)
            for text, reason, token, prompt in [
                ("H", None, 72, IDS),
                ("", None, 0xC3, None),
                ("é", "length", 0xA9, None),
            ]
            for i in range(2)
        ],
        [
            choice(
                i,
                "Hé",
                "length",
                stop_reason=None,
                prompt_logprobs=None,
                token_ids=[72, 0xC3, 0xA9],
                prompt_token_ids=IDS,
            )
            for i in range(2)
        ],
        6,
    ),
    (
        {"max_tokens": 3, "echo": True, "n": 2},
        [
            choice(i, text, reason, stop_reason=None)
            for text, reason in [("abH", None), ("é", "length")]
            for i in range(2)
        ],
        [choice(i, "abHé", "length", stop_reason=None, **UNASKED) for i in range(2)],
        6,
    ),
    (
        {"max_tokens": 1, "echo": True, "logprobs": 0},
        [
            choice(0, "abH", "length", stop_reason=None)
            | {"logprobs": rows(["<s>", "a", "b", "H"], [0, 0, 1, 2])}
        ],
        [
            choice(0, "abH", "length", stop_reason=None, **UNASKED)
            | {"logprobs": rows(["<s>", "a", "b", "H"], [0, 0, 1, 2])}
        ],
        1,
    ),
    (
        {"max_tokens": 2, "logprobs": 0},
        [
            choice(0, "H", **PLAIN) | {"logprobs": rows(["H"], [0])},
            choice(0, "\ufffd", "length", **PLAIN) | {"logprobs": rows(["\ufffd"], [1])},
        ],
        [
            choice(0, "H\ufffd", "length", **PLAIN, **UNASKED)
            | {"logprobs": rows(["H", "\ufffd"], [0, 1])}
        ],
        2,
    ),
    (
        {"max_tokens": 0, "echo": True, "logprobs": 0, "return_token_ids": True},
        [
            choice(0, "ab", "length", stop_reason=None, token_ids=[], prompt_token_ids=IDS)
            | {"logprobs": rows(["<s>", "a", "b"], [0, 0, 1])}
        ],
        [
            choice(
                0,
                "ab",
                "length",
                stop_reason=None,
                prompt_logprobs=None,
                token_ids=[],
                prompt_token_ids=IDS,
            )
            | {"logprobs": rows(["<s>", "a", "b"], [0, 0, 1])}
        ],
        0,
    ),
]


@pytest.mark.parametrize(("fields", "streamed", "choices", "count"), WHOLE)
def test_the_whole_answer(fields, streamed, choices, count):
    usage = {
        "prompt_tokens": 3,
        "completion_tokens": count,
        "total_tokens": 3 + count,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    body = {"prompt": "ab", "request_id": "mine", **fields}

    async def scenario(served):
        served.engine.answer = "Hé!"
        envelope = {
            "id": "cmpl-mine",
            "object": "text_completion",
            "created": pytest.approx(time.time(), abs=20),
            "model": "fake",
            "system_fingerprint": served.state.system_fingerprint,
        }
        answer = (await served.complete(**body)).json()
        assert answer == {**envelope, "choices": choices, "usage": usage}
        options = {"include_usage": True}
        response = await served.complete(**body, stream=True, stream_options=options)
        chunks = chunks_of(await events(response))
        assert chunks[:-1] == [{**envelope, "choices": [c], "usage": None} for c in streamed]
        assert chunks[-1] == {**envelope, "choices": [], "usage": usage}

    with_server(scenario)


def test_choices_of_several_prompts_in_full():
    async def scenario(served):
        served.engine.num_cached_tokens = 1
        answer = (await served.complete(prompt=["ab", "c"], n=2, max_tokens=1, echo=True)).json()
        expected = ["abH", "abH", "cH", "cH"]
        assert answer["choices"] == [
            choice(i, text, "length", stop_reason=None, **UNASKED)
            for i, text in enumerate(expected)
        ]
        assert answer["usage"] == {
            "prompt_tokens": 5,
            "completion_tokens": 4,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 2},
        }

    with_server(scenario)


def test_the_best_of_several_answers():
    async def scenario(served):
        served.engine.token_logprobs = {0: -3.0, 1: -0.25, 2: -2.0, 3: -0.5, 4: -4.0}
        for extra in ({}, {"logprobs": 1}):
            response = await served.complete(n=2, best_of=5, max_tokens=4, **extra)
            answer = response.json()
            assert [c["index"] for c in answer["choices"]] == [0, 1]
            # Discarded tokens have been generated, too.
            assert answer["usage"]["completion_tokens"] == 5 * 4
            assert answer["usage"]["prompt_tokens"] == 3
            assert (await served.complete(max_tokens=4)).json()["usage"]["completion_tokens"] == 4
            assert served.engine.requests[-2].n == 5
        found = [c["logprobs"]["token_logprobs"] for c in answer["choices"]]
        assert found == [[-0.25] * 4, [-0.5] * 4]

    with_server(scenario)


def test_the_best_of_several_answers_to_each_of_several_prompts():
    async def scenario(served):
        served.engine.token_logprobs = {0: -3.0, 1: -0.25, 2: -2.0}
        answer = (await served.complete(prompt=["a", "b"], best_of=3, max_tokens=2)).json()
        assert [c["index"] for c in answer["choices"]] == [0, 1]
        assert all(c["logprobs"] is None for c in answer["choices"])

    with_server(scenario)


def test_as_many_answers_as_the_best_of_them_need_places():
    async def scenario(served):
        error = (await served.complete(best_of=5)).json()["error"]
        assert (error["param"], "5 answers" in error["message"]) == ("n", True)
        assert (await served.complete(best_of=4)).status_code == 200

    with_server(scenario, max_num_queued_reqs=4)


@pytest.mark.parametrize("fields", [{"best_of": 2, "n": 3}, {"best_of": 3, "stream": True}])
def test_the_best_of_cannot_be_had_with(fields):
    async def scenario(served):
        response = await served.complete(**fields)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "best_of"
        assert not served.engine.requests

    with_server(scenario)


def test_tokens_as_ids():
    async def scenario(served):
        fields = {"logprobs": 1, "return_tokens_as_token_ids": True, "max_tokens": 2, "echo": True}
        for stream in (False, True):
            response = await served.complete(**fields, stream=stream)
            chunks = [json.loads(e) for e in await events(response)] if stream else None
            found = [c["choices"][0]["logprobs"] for c in chunks or [response.json()]]
            ids = [BOS, *b"hi", *ANSWER.encode()[:2]]
            tokens = [token for f in found for token in f["tokens"]]
            assert tokens == [f"token_id:{i}" for i in ids]
            tops = [top for f in found for top in f["top_logprobs"]]
            assert tops[0] is None
            assert all(f"token_id:{i}" in top for i, top in zip(ids[1:], tops[1:], strict=True))

    with_server(scenario)


def test_which_end_of_a_prompt_is_kept():
    async def scenario(served):
        for side, text in ((None, "cd"), ("left", "cd"), ("right", "ab")):
            fields = {"truncate_prompt_tokens": 2, "truncation_side": side, "echo": True}
            answer = (
                await served.complete(
                    prompt="abcd", add_special_tokens=False, max_tokens=0, **fields
                )
            ).json()
            assert answer["choices"][0]["text"] == text

    with_server(scenario)
