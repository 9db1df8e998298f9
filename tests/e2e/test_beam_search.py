"""Beam search on a real engine: transformers' results, with any concurrent requests."""

import json
import select
import socket

import httpx
import pytest
import torch

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.errors import RequestError
from tests.e2e.harness import serve, wait_until
from tests.hybrid import HYBRIDS, save_hybrid
from tests.models.harness import make_hf

EOS = [2, 3]
PAD = 95
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    model = make_hf(
        "LlamaForCausalLM",
        seed=1,
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        bos_token_id=1,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    with torch.no_grad():
        model.lm_head.weight *= 0.5
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return model, str(folder)


def engine(hf, **settings):
    settings = {"max_logprobs": 1, "max_model_len": 128, "dtype": "float32"} | settings
    return LLM(hf[1], skip_tokenizer_init=True, **settings)


@pytest.fixture(scope="module")
def llm(hf):
    with engine(hf) as llm:
        yield llm


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(4, PAD, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


CASES = [
    (prompt(0, 5), BeamSearchParams(beam_width=4, max_tokens=MAX_TOKENS)),
    (prompt(1, 16), BeamSearchParams(beam_width=3, max_tokens=MAX_TOKENS, length_penalty=2.0)),
    (
        prompt(2, 37),
        BeamSearchParams(beam_width=5, max_tokens=MAX_TOKENS, early_stopping=True),
    ),
    (
        prompt(3, 50),
        BeamSearchParams(
            beam_width=2, max_tokens=MAX_TOKENS, early_stopping="never", ignore_eos=True
        ),
    ),
]


def search(llm, ids, params):
    """Return the tokens and logprobs of the beams; check that no block is held at the end."""
    (output,) = llm.beam_search({"prompt_token_ids": ids}, params)
    assert llm.stats().num_used_blocks == 0
    assert llm.stats().num_running_reqs == llm.stats().num_waiting_reqs == 0
    return [(beam.tokens, beam.cum_logprob, beam.finish_reason) for beam in output.sequences]


@pytest.fixture(scope="module")
def expected(llm):
    return [search(llm, ids, params) for ids, params in CASES]


def test_equal_to_transformers(hf, expected):
    endings = set()
    for (ids, params), beams in zip(CASES, expected, strict=True):
        inputs = torch.tensor([ids])
        with torch.no_grad():
            theirs = hf[0].generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                num_beams=params.beam_width,
                num_return_sequences=params.beam_width,
                do_sample=False,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                max_new_tokens=MAX_TOKENS,
                eos_token_id=None if params.ignore_eos else EOS,
            )
        for (tokens, _, reason), row in zip(beams, theirs.tolist(), strict=True):
            endings.add(reason)
            rest = row[len(tokens) :]
            assert tokens == row[: len(tokens)]
            assert rest[1:] == [PAD] * (len(rest) - 1)
            assert (reason == "stop") == (rest[:1] != [] and rest[0] in EOS)
    assert endings == {"stop", "length"}


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": False},
        {"max_num_seqs": 2},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8, "async_scheduling": True},
        {"num_gpu_blocks_override": 10},
    ],
)
def test_the_bits_do_not_depend_on_the_engine(hf, expected, settings):
    with engine(hf, **settings) as llm:
        assert [search(llm, ids, params) for ids, params in CASES] == expected


def test_several_prompts_at_once(llm, expected):
    ids, params = CASES[0]
    outputs = llm.beam_search([ids, CASES[1][0], ids], params)
    assert [s.tokens for s in outputs[0].sequences] == [tokens for tokens, _, _ in expected[0]]
    assert [s.tokens for s in outputs[2].sequences] == [tokens for tokens, _, _ in expected[0]]
    for sequence in outputs[1].sequences:
        num_new = len(sequence.tokens) - len(CASES[1][0]) + (sequence.finish_reason == "stop")
        assert len(sequence.logprobs) == num_new
        assert all(len(row) == params.beam_width + len(EOS) for row in sequence.logprobs)


def test_the_end_is_kept_if_asked_for(llm, expected):
    ids, params = CASES[0]
    kept = BeamSearchParams(
        beam_width=params.beam_width, max_tokens=MAX_TOKENS, include_stop_str_in_output=True
    )
    for (tokens, _, reason), (short, _, _) in zip(search(llm, ids, kept), expected[0], strict=True):
        assert tokens[: len(short)] == short
        assert tokens[len(short) :] == [] or (reason == "stop" and tokens[-1] in EOS)


def test_a_beam_of_a_step_costs_at_most_a_block(hf):
    """The prefix cache provides the rest."""
    block, width, steps = 16, 4, 30
    with engine(hf) as llm:
        ids = prompt(4, 70)
        llm.beam_search(
            [ids], BeamSearchParams(beam_width=width, max_tokens=steps, ignore_eos=True)
        )
        computed = llm.stats().num_scheduled_tokens - len(ids)
    assert computed <= width * (steps - 1) * block
    assert computed > width * (steps - 1)


def test_the_context_is_a_limit(llm):
    ids = prompt(5, 120)
    (output,) = llm.beam_search(
        [ids], BeamSearchParams(beam_width=2, max_tokens=None, ignore_eos=True)
    )
    assert [len(s.tokens) for s in output.sequences] == [128, 128]
    with pytest.raises(RequestError, match="leaves no room"):
        llm.beam_search([prompt(5, 128)], CASES[0][1])
    with pytest.raises(RequestError, match="vocabulary"):
        llm.beam_search([[5000]], CASES[0][1])
    assert llm.generate([ids], SamplingParams(max_tokens=2), use_tqdm=False)[0].finished


def test_text():
    with LLM(max_model_len=256) as llm:
        params = BeamSearchParams(beam_width=3, max_tokens=8)
        (output,) = llm.beam_search("Once upon a time", params)
        texts = [sequence.text for sequence in output.sequences]
        assert len(set(texts)) == 3
        assert all("Once upon a time" in text for text in texts)
        tokenizer = llm.get_tokenizer()
        special = {"prompt_token_ids": [tokenizer.eos_token_id, *tokenizer.encode("Once")]}
        for skip in (True, False):
            params = BeamSearchParams(beam_width=1, max_tokens=1, skip_special_tokens=skip)
            (output,) = llm.beam_search(special, params)
            assert output.sequences[0].text.startswith("Once") == skip


def test_over_http(hf, llm, expected, tmp_path):
    flags = ("--skip-tokenizer-init", "--max-model-len", "128", "--dtype", "float32")
    with serve(tmp_path, *flags, "--max-logprobs", "1", model=hf[1]) as server:
        ids, params = CASES[0]
        body = {"prompt": ids, "max_tokens": MAX_TOKENS, "return_token_ids": True}
        beams = {"use_beam_search": True, "n": params.beam_width}
        answer = server.post("/v1/completions", body | beams).json()
        for choice, (tokens, _, reason) in zip(answer["choices"], expected[0], strict=True):
            found = choice["token_ids"]
            assert choice["finish_reason"] == reason
            assert ids + (found[:-1] if reason == "stop" else found) == tokens
        best = server.post("/v1/completions", body | {"best_of": 4, "seed": 1}).json()
        assert len(best["choices"]) == 1
        assert best["usage"]["completion_tokens"] > len(best["choices"][0]["token_ids"])
        disconnect(server, body | beams | {"n": 32, "max_tokens": 120, "ignore_eos": True})
        server.wait_for_line("status=499")
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            wait_until(lambda name=name: server.metric(f"octavo:{name}") == 0)
        again = server.post("/v1/completions", body | beams).json()
        assert again["choices"] == answer["choices"]


def disconnect(server, body):
    """Send a request, and disconnect while it is computed."""
    data = json.dumps(body).encode()
    head = ["POST /v1/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    head += [f"Content-Length: {len(data)}", "", ""]
    for _ in range(50):  # an answer may be complete before this process looks at the engine
        with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as client:
            client.sendall("\r\n".join(head).encode() + data)
            while not select.select([client], [], [], 0)[0]:
                if server.get("/load").json()["server_load"]:
                    return
    raise AssertionError("the request never ran")


@pytest.mark.parametrize("kind", HYBRIDS)
def test_models_with_states(kind, tmp_path):
    """Each step of a beam starts from a snapshot, at most 64 tokens before."""
    model = save_hybrid(tmp_path, kind)
    prompts = [
        {"prompt_token_ids": [20 + i * i % 90 for i in range(count)]} for count in (1, 16, 33)
    ]
    params = BeamSearchParams(beam_width=3, max_tokens=40, ignore_eos=True)
    found, scheduled = [], []
    for caching in (False, True):
        settings = {"max_model_len": 160, "max_num_seqs": 8, "enable_prefix_caching": caching}
        with LLM(model, **settings) as llm:
            outputs = llm.beam_search(prompts, params)
            found.append([[(s.tokens, s.cum_logprob) for s in o.sequences] for o in outputs])
            scheduled.append(llm.stats().num_scheduled_tokens)
            llm._client.core.check_integrity()
    assert found[0] == found[1]
    assert scheduled[1] < scheduled[0] / 3
