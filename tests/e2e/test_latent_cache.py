"""A model with latent attention in the engine: preemption, a connector, types of the cache."""

import random

import pytest

from octavo import LLM, SamplingParams
from tests.models.cases import CASES
from tests.models.configs.sizes import VOCAB
from tests.models.harness import make_hf

SETTINGS = {
    "skip_tokenizer_init": True,
    "block_size": 8,
    "max_model_len": 96,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 24,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("minicpm3")
    architecture, config = CASES["minicpm3"]
    make_hf(architecture, **config).save_pretrained(folder)
    return str(folder)


def answers(llm):
    rng = random.Random(0)
    shared = [rng.randrange(3, VOCAB) for _ in range(30)]
    prompts = [shared[: 10 * i] + [rng.randrange(3, VOCAB) for _ in range(9)] for i in range(4)] * 2
    params = SamplingParams(max_tokens=30, seed=1, ignore_eos=True, logprobs=2)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [(list(o.outputs[0].token_ids), str(o.outputs[0].logprobs)) for o in outputs]


@pytest.mark.parametrize("cache", ["auto", "fp8", "int8"])
def test_preempted_and_loaded_again(cache, folder):
    settings = SETTINGS | {"kv_cache_dtype": cache, "dtype": "bfloat16"}
    with LLM(folder, **settings, enable_prefix_caching=False) as llm:
        expected = answers(llm)
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 2**21},
    }
    few = {"num_gpu_blocks_override": 24, "kv_transfer_config": connector}
    with LLM(folder, **settings, **few, preemption_mode="swap") as llm:
        assert answers(llm) == expected
        llm.reset_prefix_cache()
        assert answers(llm) == expected
        stats = llm.stats()
        assert stats.num_preemptions > 0
        assert stats.external_prefix_cache_hits > 0
