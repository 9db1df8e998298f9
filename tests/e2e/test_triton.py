"""Engine on interpreted Triton kernels: the same tokens as with the CPU kernels."""

from __future__ import annotations

import random
from pathlib import Path

from octavo import LLM, SamplingParams
from tests.models.cases import CASES
from tests.models.configs.sizes import VOCAB
from tests.models.harness import make_hf
from tests.triton import needs_triton

pytestmark = needs_triton
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def folder(case: str, tmp_path: Path, **sizes: object) -> str:
    """Return a model of two layers, of two kinds if the family has two, or of other `sizes`."""
    architecture, config = CASES[case]
    name = next(key for key in ("num_hidden_layers", "n_layer", "n_layers") if key in config)
    make_hf(architecture, **config | {name: 2} | sizes).save_pretrained(tmp_path)
    return str(tmp_path)


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (1, 9, 20, 33)]


def tokens(model: str, params: list[SamplingParams], **settings: object) -> list[list[int]]:
    defaults = {"max_num_batched_tokens": 24, "max_num_seqs": 4, "num_gpu_blocks_override": 40}
    with LLM(
        model=model,
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=64,
        block_size=8,
        **defaults | settings,
    ) as llm:
        outputs = llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts()], params, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]


def test_greedy_tokens_are_the_same(tmp_path: Path) -> None:
    model = folder("gemma2", tmp_path)
    params = [GREEDY] * 4
    assert tokens(model, params, attention_backend="triton") == tokens(model, params)
