"""Activated LoRA: PEFT's answers, the same bits in every layout, and shared cached prefixes."""

import concurrent.futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from octavo import LLM, BeamSearchParams, LoRARequest, SamplingParams
from octavo.errors import AdapterError, RequestError
from octavo.models.adaptable_model import AdaptableModel
from octavo.sampling_params import StructuredOutputsParams
from tests.adapters import builtin_model, make_factors, write_adapter
from tests.e2e.harness import serve
from tests.models.harness import make_hf

LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 4}
INVOCATION = [7, 5, 7]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=3)
DRAWN = replace(GREEDY, temperature=0.9, seed=5, n=2)
CONTEXT = list(range(300, 400))
PROMPTS = {
    "begin": [*INVOCATION, *CONTEXT],
    "middle": [*CONTEXT[:40], *INVOCATION, *CONTEXT[40:]],
    "overlap": [*CONTEXT[:50], 7, 5, 7, 5, 7, *CONTEXT[50:60]],
    "twice": [*CONTEXT[:20], *INVOCATION, *CONTEXT[20:], *INVOCATION, *CONTEXT[:30]],
    "end": [*CONTEXT, *INVOCATION],
    "a part": [*CONTEXT, *INVOCATION[:2]],
    "absent": CONTEXT,
}
BEGINS = {"begin": 0, "middle": 40, "overlap": 52, "twice": 103, "end": 100}
"""Tokens of each prompt before the adapter; the others never have it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of the built-in model: "a" and "b" are activated, "plain" has the numbers of "a"."""
    made, model = tmp_path_factory.mktemp("adapters"), builtin_model()
    linear = linear_modules(model)
    factors = [make_factors(model, linear, seed=seed) for seed in (0, 1)]
    write_adapter(made / "a", factors[0], alora_invocation_tokens=INVOCATION)
    write_adapter(made / "b", factors[1], alora_invocation_tokens=INVOCATION)
    write_adapter(made / "plain", factors[0])
    return made


def linear_modules(model: AdaptableModel) -> list[str]:
    """Return the modules of a model but the embedding, which an activated LoRA cannot change."""
    return [name for name, module in model.modules.items() if not module.is_embedding]


def lora(folder: Path, name: str | None) -> LoRARequest | None:
    return name and LoRARequest(name, 1 + ["a", "b", "plain"].index(name), str(folder / name))


@pytest.fixture(scope="module")
def llm():
    with LLM(max_model_len=512, dtype="float32", max_num_seqs=32, **LORA) as llm:
        yield llm


def ask(llm, folder, asked, params=GREEDY):
    """Return tokens and logprobs of the answers to (adapter, prompt) pairs, all at once."""
    outputs = llm.generate(
        [{"prompt_token_ids": PROMPTS[prompt]} for _, prompt in asked],
        params,
        lora_request=[lora(folder, name) for name, _ in asked],
        use_tqdm=False,
    )
    return [
        [
            (
                answer.token_ids,
                [sorted((t, it.logprob) for t, it in row.items()) for row in answer.logprobs or ()],
            )
            for answer in output.outputs
        ]
        for output in outputs
    ]


SMALL = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
ASKED = [(name, prompt) for prompt in PROMPTS for name in ("a", None, "b", "plain")]


@pytest.fixture(scope="module")
def alone(llm, folder):
    """Answers to each pair, one after the other, without cached prefixes."""
    found = {}
    for asked in ASKED:
        llm.reset_prefix_cache()
        found[asked] = ask(llm, folder, [asked])[0]
    return found


def test_answers_are_those_of_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    hf = make_hf("LlamaForCausalLM", **SMALL)
    hf.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        target_modules="all-linear",
        init_lora_weights=False,
        lora_alpha=32,
        alora_invocation_tokens=INVOCATION,
    )
    torch.manual_seed(1)
    adapted = peft.get_peft_model(hf, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    request = LoRARequest("a", 1, str(tmp_path / "adapter"))
    params = replace(GREEDY, prompt_logprobs=0, max_tokens=8)
    with LLM(
        str(tmp_path / "base"),
        skip_tokenizer_init=True,
        dtype="float32",
        max_num_batched_tokens=48,
        max_num_seqs=8,
        **LORA,
    ) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS.values()]
        outputs = llm.generate(prompts, params, lora_request=request, use_tqdm=False)
    changed = 0
    for output in outputs:
        ids = torch.tensor([output.prompt_token_ids])
        with torch.no_grad():
            logprobs = adapted(ids).logits[0].log_softmax(-1)
            answer = adapted.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
            with adapted.disable_adapter():
                base = adapted.base_model(ids)
        assert output.outputs[0].token_ids == answer[0, ids.shape[1] :].tolist()
        rows = zip(output.prompt_logprobs, ids[0].tolist(), strict=True)
        found = [row[token].logprob for row, token in rows if row is not None]
        wanted = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(found, wanted, atol=1e-4)
        changed += bool((base.logits[0].log_softmax(-1) - logprobs).abs().max() > 0.1)
    assert changed == len(BEGINS)


def test_the_adapter_begins_at_the_last_invocation(alone):
    for prompt in PROMPTS:
        base, plain = alone[None, prompt], alone["plain", prompt]
        assert (alone["a", prompt] == plain) == (prompt == "begin"), prompt
        assert (alone["a", prompt] == base) == (prompt not in BEGINS), prompt


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "two drawn"])
def test_all_at_once_give_the_bits_of_each_alone(llm, folder, alone, params):
    llm.reset_prefix_cache()
    wanted = [alone[asked] for asked in ASKED]
    if params is not GREEDY:
        wanted = [ask(llm, folder, [asked], params)[0] for asked in ASKED]
        llm.reset_prefix_cache()
    for _ in range(2):  # the second time with cached prefixes
        assert ask(llm, folder, ASKED, params) == wanted
    llm.llm_engine.client.core.check_integrity()


@pytest.mark.parametrize(
    "settings",
    [
        {"enforce_eager": True, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 24, "max_num_seqs": 5, "max_loras": 1},
        {"num_gpu_blocks_override": 36, "block_size": 16},
        {"tensor_parallel_size": 2, "num_threads": 1},
        {"pipeline_parallel_size": 2, "num_threads": 1},
        {"speculative_config": {"method": "ngram"}},
    ],
    ids=["eager", "small steps", "few blocks", "tp", "pp", "ngram"],
)
def test_every_layout_gives_the_same_bits(folder, alone, settings):
    settings = {"max_model_len": 512, "dtype": "float32", **LORA, **settings}
    with LLM(**settings) as llm:
        assert ask(llm, folder, ASKED) == [alone[asked] for asked in ASKED]


def test_the_cached_prefix_of_the_model_serves_the_adapter_and_the_other_way_round(llm, folder):
    prompt = {"prompt_token_ids": PROMPTS["twice"]}

    def cached(name):
        request = lora(folder, name)
        (output,) = llm.generate(prompt, GREEDY, lora_request=request, use_tqdm=False)
        return output.num_cached_tokens

    last = len(PROMPTS["twice"]) - 1
    shared = BEGINS["twice"] // 16 * 16
    llm.reset_prefix_cache()
    assert [cached(name) for name in (None, "a", "b", "a", None)] == [
        0, shared, shared, last // 16 * 16, last // 16 * 16
    ]  # fmt: skip
    llm.reset_prefix_cache()
    assert [cached(name) for name in ("a", None, "plain")] == [0, shared, 0]


def test_beams_grammars_chats_and_streams(llm, folder, alone):
    beams = BeamSearchParams(beam_width=2, max_tokens=6)
    prompts = [{"prompt_token_ids": PROMPTS[name]} for name in ("end", "absent")]
    found = [
        [[it.tokens for it in output.sequences] for output in llm.beam_search(prompts, beams, it)]
        for it in (lora(folder, "a"), None)
    ]
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]

    form = StructuredOutputsParams(regex="(cat|dog){3}")
    params = SamplingParams(temperature=0.0, max_tokens=20, structured_outputs=form)
    texts = [
        output.outputs[0].text
        for output in llm.generate(prompts, params, lora_request=lora(folder, "b"), use_tqdm=False)
    ]
    assert all(len(text) == 9 and set(text) <= set("catdog") for text in texts)

    pieces = llm.stream(prompts[0], GREEDY, lora_request=lora(folder, "a"))
    tokens = [token for piece in pieces for token in piece.outputs[0].token_ids]
    assert tokens == alone["a", "end"][0][0]


def test_a_chat(llm, folder, tmp_path):
    """The invocation tokens of a chat are those of its template."""
    messages = [{"role": "user", "content": "A story, please."}]
    (base,) = llm.chat(messages, GREEDY, use_tqdm=False)
    tail = base.prompt_token_ids[-2:]
    model = builtin_model()
    factors = make_factors(model, linear_modules(model), seed=3)
    path = write_adapter(tmp_path / "c", factors, alora_invocation_tokens=tail)
    request = LoRARequest("c", 40, str(path))
    (adapted,) = llm.chat(messages, GREEDY, use_tqdm=False, lora_request=request)
    assert adapted.prompt_token_ids == base.prompt_token_ids
    assert adapted.outputs[0].token_ids != base.outputs[0].token_ids
    (other,) = llm.generate("A story", GREEDY, use_tqdm=False, lora_request=request)
    (plain,) = llm.generate("A story", GREEDY, use_tqdm=False)
    assert other.outputs[0].token_ids == plain.outputs[0].token_ids


def test_embeddings_have_no_invocation_tokens(folder):
    prompt = {"prompt_embeds": torch.zeros(4, 256)}
    with (
        LLM(max_model_len=64, enable_prompt_embeds=True, **LORA) as llm,
        pytest.raises(RequestError, match="prompt_embeds has no tokens") as caught,
    ):
        llm.generate(prompt, lora_request=lora(folder, "a"))
    assert caught.value.param == "prompt_embeds"


def test_invocation_tokens_of_another_model(llm, tmp_path):
    model = builtin_model()
    factors = make_factors(model, linear_modules(model))
    path = write_adapter(tmp_path / "x", factors, alora_invocation_tokens=[1, 10**6])
    with pytest.raises(AdapterError, match="the invocation token 1000000 is none of"):
        llm.generate("x", lora_request=LoRARequest("x", 50, str(path)), use_tqdm=False)


def test_vectors(folder):
    """A text's vector has the adapter from the invocation on."""
    settings = {"convert": "embed", "runner": "pooling", "dtype": "float32", "max_model_len": 256}
    texts = [{"prompt_token_ids": prompt} for prompt in PROMPTS.values()]
    with LLM(**settings, **LORA) as llm:
        found, plain, base = (
            [
                it.outputs.embedding
                for it in llm.embed(texts, lora_request=lora(folder, name), use_tqdm=False)
            ]
            for name in ("a", "plain", None)
        )
    for name, *vectors in zip(PROMPTS, found, plain, base, strict=True):
        assert (vectors[0] == vectors[1]) == (name == "begin")
        assert (vectors[0] == vectors[2]) == (name not in BEGINS)


def test_a_server_whose_engine_dies(tmp_path, folder, alone):
    """Usage counts the cached tokens of the model; a new engine continues with the adapter."""

    long = [*CONTEXT, *CONTEXT[:20], *INVOCATION, *CONTEXT, *CONTEXT, *CONTEXT]

    def complete(server, model, prompt, max_tokens=16):
        ids = long if prompt == "long" else PROMPTS[prompt]
        body = {"model": model, "prompt": ids, "max_tokens": max_tokens}
        body |= {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        response = server.post("/v1/completions", body).raise_for_status().json()
        details = response["usage"]["prompt_tokens_details"]
        miss = (details.get("cache_miss") or {}).get("reason")
        return response["choices"][0]["token_ids"], details["cached_tokens"], miss

    modules = [f"{name}={folder / name}" for name in ("a", "plain")]
    flags = ["--dtype", "float32", "--max-model-len", "512", "--enable-lora", "--max-loras", "2"]
    flags += ["--enable-prompt-tokens-details", "--lora-modules", *modules]
    with (
        serve(tmp_path, *flags, spare=True) as server,
        concurrent.futures.ThreadPoolExecutor(4) as pool,
    ):
        for name, cached in ((None, 0), ("a", 96), ("plain", 0)):
            found = complete(server, name or "octavo/stories", "twice")
            assert found == (alone[name, "twice"][0][0], cached, None)
        names = ("octavo/stories", "a", "plain", "a")
        assert [complete(server, name, "long")[1:] for name in names] == [
            (16, None),
            (112, "other_adapter"),
            (16, "other_adapter"),
            (416, None),
        ]
        jobs = server.begin_together(
            lambda: [pool.submit(complete, server, "a", prompt, 300) for prompt in BEGINS]
        )
        server.engine_process().kill()
        found = [job.result()[0] for job in jobs]
        assert [tokens[:16] for tokens in found] == [alone["a", it][0][0] for it in BEGINS]
        assert found == [complete(server, "a", prompt, 300)[0] for prompt in BEGINS]
