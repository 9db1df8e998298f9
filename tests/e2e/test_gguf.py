"""GGUF models with blocks of several types: one request, one answer, in every layout."""

import asyncio
import os
import signal

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.config import EngineConfig
from octavo.fleet.start import EngineProcesses
from octavo.frontend.async_llm import AsyncLLM
from octavo.sampling_params import RequestOutputKind
from octavo.scheduler.speculation import DraftLengths
from tests.gguf_files import convert
from tests.models.harness import make_hf

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
TYPES = {"attn_v": "q8_0", "ffn_down": "iq2_xxs", "token_embd": "q8_0", "": "q4_0"}
SETTINGS = {"max_model_len": 128, "kv_cache_memory_bytes": "16M", "max_num_seqs": 8}
PROMPTS = [[(7 * i + 3 * j) % 120 for j in range(count)] for i, count in enumerate((1, 17, 40, 70))]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return a model, and another one that drafts."""
    folder, files = tmp_path_factory.mktemp("gguf"), {}
    for name, layers in (("target", 2), ("draft", 1)):
        torch.manual_seed(layers)
        model = make_hf("Glm4ForCausalLM", **SIZES, head_dim=64, num_hidden_layers=layers)
        path = folder / f"{name}.gguf"
        convert(model, "glm4", path, TYPES)
        files[name] = str(path)
    return files


def answers(llm: LLM, prompts: list[list[int]]) -> list[tuple[object, ...]]:
    """Return the tokens and logprobs of sampled answers, one with a temperature of 0."""
    params = [
        SamplingParams(temperature=0.9 if i else 0, seed=3, max_tokens=16, logprobs=2)
        for i in range(len(prompts))
    ]
    ids = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(ids, params, use_tqdm=False)
    return [
        (tuple(o.outputs[0].token_ids), [sorted(x.items()) for x in o.outputs[0].logprobs or []])
        for o in outputs
    ]


@pytest.fixture(scope="module")
def expected(files: dict[str, str]) -> list[tuple[object, ...]]:
    with LLM(files["target"], enable_prefix_caching=False, **SETTINGS) as llm:
        first = [answers(llm, [prompt])[0] for prompt in PROMPTS[:1]]
        return first + answers(llm, PROMPTS)[1:]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"long_prefill_token_threshold": 7, "num_threads": 1, "enforce_eager": True},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"draft": 3},
    ],
    ids=["prefixes", "chunks", "tensor parallel", "pipeline parallel", "draft"],
)
def test_layouts(files, expected, settings, monkeypatch):
    """Alone and among others, with cached prefixes the second time."""
    drafts = "draft" in settings
    if drafts:
        # The maximum: the best number depends on the drafts' time.
        monkeypatch.setattr(DraftLengths, "choose", lambda self, num_reqs: self.most)
        draft = {"model": files["draft"], "num_speculative_tokens": settings["draft"]}
        settings = {"speculative_config": draft}
    with LLM(files["target"], **SETTINGS, **settings) as llm:
        assert len({answer[0] for answer in expected}) == len(PROMPTS)
        assert answers(llm, PROMPTS) == expected
        crowd = [[(5 * i + j) % 120 for j in range(30)] for i in range(3)]
        assert answers(llm, PROMPTS + crowd)[: len(PROMPTS)] == expected
        assert llm.stats().prefix_cache_hits > 64
        assert (llm.stats().num_draft_tokens > 0) == drafts


def test_revival(files):
    """An engine that is killed in the middle of an answer is replaced, and the answer goes on."""

    async def generate(engine: AsyncLLM, kill: bool) -> list[int]:
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=60, ignore_eos=True)
        params.output_kind = RequestOutputKind.DELTA
        tokens: list[int] = []
        prompt = {"prompt_token_ids": PROMPTS[2]}
        async for output in engine.generate(prompt, params, str(kill)):
            tokens += output.outputs[0].token_ids
            if kill and len(tokens) > 3:
                os.kill(engine._client.pid, signal.SIGKILL)
                kill = False
        return tokens

    async def main() -> None:
        config = EngineConfig.from_kwargs(model=files["target"], **SETTINGS)
        engine = await AsyncLLM.start(config, EngineProcesses(60.0, 5, warm_spare=False))
        try:
            undisturbed = await generate(engine, False)
            pid = engine._client.pid
            assert await generate(engine, True) == undisturbed
            assert engine._client.pid != pid
        finally:
            await engine.shutdown()

    asyncio.run(main())
