"""Rotary embeddings that change with the length: greedy tokens equal to those of transformers."""

import copy
from pathlib import Path

import pytest
import torch

from tests.models.configs.sizes import LONGROPE, SIZES, VOCAB, WIDE_HEADS
from tests.models.harness import (
    assert_same_as_hf,
    generate,
    load,
    make_hf,
    make_prompts,
    save_and_load,
)


def test_dynamic_ntk(tmp_path: Path) -> None:
    """Within the original context, and beyond it token by token as transformers generates."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    config = WIDE_HEADS | {"max_position_embeddings": 24, "rope_parameters": rope}
    hf_model = make_hf("LlamaForCausalLM", **config)
    model = save_and_load(hf_model, tmp_path)
    assert model.spec.max_model_len == 96
    prompts = make_prompts(VOCAB, (3, 11, 24))
    assert_same_as_hf(hf_model, prompts[:2], generate(model, prompts[:2], 13))
    prompts, num_tokens = prompts[1:], 32
    generated = generate(model, prompts, num_tokens)
    for prompt, tokens, logits in zip(prompts, generated.tokens, generated.logits, strict=True):
        # A fresh copy: transformers keeps the base of the longest sequence seen.
        out = copy.deepcopy(hf_model).generate(
            torch.tensor([prompt]),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert out.sequences[0, len(prompt) :].tolist() == tokens
        torch.testing.assert_close(
            torch.log_softmax(logits, -1),
            torch.cat(out.logits).log_softmax(-1),
            atol=1e-4,
            rtol=0,
        )


@pytest.mark.parametrize("part", [1.0, 0.75])
def test_longrope(part: float, tmp_path: Path) -> None:
    """The short factors up to the original context, the long ones where the table is longer."""
    config = SIZES | {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 48}
    config |= {"original_max_position_embeddings": 32, "pad_token_id": 0}
    pairs = int(8 * part)
    rope = LONGROPE | {"short_factor": [1 + 0.1 * i for i in range(pairs)]}
    rope |= {"long_factor": [2 + 0.5 * i for i in range(pairs)], "partial_rotary_factor": part}
    hf_model = make_hf("Phi3ForCausalLM", **config, rope_parameters=rope)
    long = save_and_load(hf_model, tmp_path)
    assert long.spec.max_model_len == 128
    prompts = make_prompts(VOCAB, (33, 40, 64))
    assert_same_as_hf(hf_model, prompts, generate(long, prompts, 64))
    short = load(tmp_path, max_model_len=32)
    prompts = make_prompts(VOCAB, (3, 12))
    assert_same_as_hf(hf_model, prompts, generate(short, prompts, 20))
