"""Models of pictures and texts: transformers' numbers, and the same bits in all layouts."""

import pytest
import torch

from tests.pictures import CASES, hf_logprobs, make_llm, params, picture, save_model

PICTURES = [picture(48, 30), picture(16, 40, 1)]


def prompt(name, *images, text="ab {} cd {} ef", **fields):
    placeholder = CASES[name].placeholder
    return {
        "prompt": text.format(*[placeholder] * len(images)),
        "multi_modal_data": {"image": list(images)},
        **fields,
    }


def found(output):
    """Return all that must be the same in every layout."""
    (answer,) = output.outputs
    return answer.token_ids, [row[token].logprob for row, token in zip(answer.logprobs, answer.token_ids)]


@pytest.mark.parametrize("name", CASES)
def test_parity(name, tmp_path):
    model = save_model(name, tmp_path)
    with make_llm(tmp_path) as llm:
        (output,) = llm.generate(prompt(name, *PICTURES), params())
        tokens, logprobs = found(output)
        ids = output.prompt_token_ids
        expected = hf_logprobs(model, name, llm, [*ids, *tokens], PICTURES)[len(ids) - 1 : -1]
    assert expected.argmax(-1).tolist() == list(tokens)
    torch.testing.assert_close(
        torch.tensor(logprobs), expected.max(-1).values, atol=2e-4, rtol=1e-4
    )
