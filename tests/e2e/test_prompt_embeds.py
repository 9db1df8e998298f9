"""Embeddings as prompts, in all uses of a prompt; test_batch_invariance checks the bits."""

import asyncio
import base64
import io

import pytest
import torch
from msgspec.structs import replace

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.config.engine_args import AsyncEngineArgs
from octavo.errors import ConfigError, RequestError
from octavo.frontend.async_llm import AsyncLLM
from octavo.sampling_params import RequestOutputKind, StructuredOutputsParams
from tests.e2e.harness import embed, serve

IDS = list(range(200, 260))
SETTINGS = {"max_model_len": 256, "enable_prompt_embeds": True, "dtype": "bfloat16"}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def llm():
    with LLM(**SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def embeds(llm):
    return embed(llm, IDS)


def answers(llm, prompt, params):
    outputs = llm.generate(prompt, params, use_tqdm=False)[0].outputs
    return [(o.token_ids, o.logprobs, o.finish_reason) for o in outputs]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        replace(GREEDY, temperature=1.0, seed=3, n=4),
        replace(GREEDY, structured_outputs=StructuredOutputsParams(choice=["yes", "never"])),
        replace(GREEDY, stop_token_ids=[300], min_tokens=3, logit_bias={300: 50.0}),
    ],
    ids=["greedy", "n", "grammar", "stop"],
)
def test_they_answer_as_their_tokens_do(llm, embeds, params):
    expected = answers(llm, {"prompt_token_ids": IDS}, params)
    assert answers(llm, {"prompt_embeds": embeds}, params) == expected
    assert (
        answers(llm, {"prompt_embeds": embeds.float()}, params) == expected
    )  # cast to the model's type


def test_what_an_output_says_of_the_prompt(llm, embeds):
    output = llm.generate({"prompt_embeds": embeds, "prompt": "text"}, GREEDY, use_tqdm=False)[0]
    assert output.prompt == "text"
    assert output.prompt_token_ids == [0] * len(IDS)
    assert output.prompt_logprobs is None


def test_penalties_count_the_answer_only(llm, embeds):
    """The placeholder ids of embeddings, 0, are not in the prompt."""
    params = replace(GREEDY, logit_bias={0: 100.0}, repetition_penalty=1000.0)
    first, second, *_ = answers(llm, {"prompt_embeds": embeds}, params)[0][0]
    assert first == 0
    assert second != 0
    assert answers(llm, {"prompt_token_ids": [0] * len(IDS)}, params)[0][0][0] != 0


def test_prefixes_are_known_by_content(llm, embeds):
    llm.reset_prefix_cache()
    before = llm.stats().prefix_cache_hits

    def hits(prompt):
        nonlocal before
        answers(llm, prompt, GREEDY)
        found, before = llm.stats().prefix_cache_hits - before, llm.stats().prefix_cache_hits
        return found

    assert hits({"prompt_token_ids": [0] * len(IDS)}) == 0
    assert hits({"prompt_embeds": embeds}) == 0
    assert hits({"prompt_token_ids": [0] * len(IDS)}) == 48
    assert hits({"prompt_embeds": embeds.clone()}) == 48
    other = embeds.clone()
    other[20, 3] += 1
    assert hits({"prompt_embeds": other}) == 16
    assert hits({"prompt_embeds": embeds[:40]}) == 32


def test_beams_are_those_of_the_tokens(llm, embeds):
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    expected = llm.beam_search({"prompt_token_ids": IDS}, params)[0].sequences
    found = llm.beam_search({"prompt_embeds": embeds}, params)[0].sequences
    assert [b.tokens[len(IDS) :] for b in found] == [b.tokens[len(IDS) :] for b in expected]
    assert [b.cum_logprob for b in found] == [b.cum_logprob for b in expected]


def test_a_step_at_a_time(llm, embeds):
    engine = llm.llm_engine
    engine.add_request("mine", {"prompt_embeds": embeds}, GREEDY)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    expected = answers(llm, {"prompt_token_ids": IDS}, GREEDY)[0][0]
    assert outputs[-1].outputs[0].token_ids == expected
    pieces = list(llm.stream({"prompt_embeds": embeds}, GREEDY))
    assert [t for piece in pieces for t in piece.outputs[0].token_ids] == expected


def test_numbers_beyond_the_models_type_fail_their_request_only(llm, embeds):
    huge = embeds.double()
    huge[3, 3] = 1e300
    wrong, right = llm.generate(
        [{"prompt_embeds": huge}, {"prompt_embeds": embeds}], GREEDY, use_tqdm=False
    )
    assert "not finite" in str(wrong.outputs[0].stop_reason)
    assert right.outputs[0].token_ids == answers(llm, {"prompt_token_ids": IDS}, GREEDY)[0][0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"dtype": "float32"},
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"attention_backend": "reference"},
    ],
    ids=str,
)
def test_what_huge_embeddings_leave_in_the_cache_harms_nobody(embeds, settings):
    """All are finite, but not in the model's type; other requests reuse the blocks full of NaN."""
    few = {"num_gpu_blocks_override": 17, "max_num_seqs": 4}
    with LLM(**SETTINGS | few | settings) as llm:
        expected = answers(llm, {"prompt_token_ids": IDS}, GREEDY)
        for value in (1e300, 1e20):
            huge = torch.full((250, embeds.shape[1]), value, dtype=torch.float64)
            huge[::2, ::3] *= -1
            for _ in range(2):
                wrong = llm.generate({"prompt_embeds": huge}, GREEDY, use_tqdm=False)[0].outputs[0]
                assert wrong.finish_reason == ("error" if value > 1e30 else "length")
            assert answers(llm, {"prompt_token_ids": IDS}, GREEDY) == expected
            llm.reset_prefix_cache()
            assert answers(llm, {"prompt_token_ids": IDS}, GREEDY) == expected


@pytest.mark.parametrize("method", ["ngram", "suffix", "eagle", "draft_model"])
def test_drafts_know_nothing_of_embeddings_and_cost_no_bit(llm, embeds, method):
    model = {"eagle": "octavo/stories-eagle", "draft_model": "octavo/stories-draft"}.get(method)
    speculative = {"method": method, "num_speculative_tokens": 3}
    speculative |= {} if model is None else {"model": model}
    with LLM(speculative_config=speculative, **SETTINGS) as drafting:
        for prompt in ({"prompt_embeds": embeds}, {"prompt_embeds": embeds[:1]}):
            assert answers(drafting, prompt, GREEDY) == answers(llm, prompt, GREEDY)


def test_triton_refuses_them(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="device=cpu only"):
        LLM(attention_backend="triton", **SETTINGS)


def test_over_http_and_with_asyncio(llm, embeds, tmp_path):
    expected = [
        o.outputs[0]
        for o in llm.generate([{"prompt_embeds": embeds}, "Once"], GREEDY, use_tqdm=False)
    ]
    file = io.BytesIO()
    torch.save(embeds, file)
    body = {"prompt_embeds": base64.b64encode(file.getvalue()).decode(), "prompt": ["Once"]}
    body |= {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 2}
    flags = ["--enable-prompt-embeds", "--max-model-len", "256", "--dtype", "bfloat16"]
    with serve(tmp_path, *flags, "--request-memory-bytes", "1M") as server:
        for _ in range(2):
            choices = server.post("/v1/completions", body).json()["choices"]
            assert [choice["text"] for choice in choices] == [o.text for o in expected]
            found = [choice["logprobs"]["token_logprobs"] for choice in choices]
            assert found == [
                [row[t].logprob for t, row in zip(o.token_ids, o.logprobs, strict=True)]
                for o in expected
            ]
        beams = {"prompt_embeds": body["prompt_embeds"], "use_beam_search": True, "n": 2}
        assert len(server.post("/v1/completions", beams).json()["choices"]) == 2
        long = io.BytesIO()
        torch.save(embeds.double().repeat(4, 1), long)
        refused = server.post(
            "/v1/completions", {"prompt_embeds": base64.b64encode(long.getvalue()).decode()}
        )
        assert refused.json()["error"]["code"] == "request_too_large"

    async def scenario():
        args = AsyncEngineArgs(model=llm.config.model.model, **SETTINGS)
        engine = AsyncLLM.from_engine_args(args)
        try:
            params = replace(GREEDY, output_kind=RequestOutputKind.FINAL_ONLY)
            stream = engine.generate({"prompt_embeds": embeds}, params, "1")
            (output,) = [output async for output in stream]
            with pytest.raises(RequestError, match="numbers"):
                async for _ in engine.generate({"prompt_embeds": embeds[:, :8]}, params, "2"):
                    pass
        finally:
            await engine.shutdown()
        return output.outputs[0].token_ids

    assert asyncio.run(scenario()) == expected[0].token_ids
