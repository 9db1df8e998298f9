"""Prompt logprobs: the same for all chunks, batches and numbers of answers."""

import pytest

from octavo import LLM, SamplingParams

PROMPT = list(range(700, 850))


def rows(output):
    assert output.prompt_logprobs[0] is None
    return [
        {token: (entry.logprob, entry.rank) for token, entry in row.items()}
        for row in output.prompt_logprobs[1:]
    ]


@pytest.fixture(scope="module")
def expected():
    with LLM(max_model_len=256, max_num_seqs=1) as llm:
        params = SamplingParams(max_tokens=2, prompt_logprobs=3)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
        result = rows(output)
        assert [token in row for token, row in zip(PROMPT[1:], result, strict=True)]
        return result


@pytest.mark.parametrize("chunk", [0, 1, 13])
def test_in_chunks_and_with_several_answers(expected, chunk):
    with LLM(max_model_len=256, long_prefill_token_threshold=chunk) as llm:
        params = SamplingParams(n=3, max_tokens=2, prompt_logprobs=3, seed=1)
        others = SamplingParams(max_tokens=30, ignore_eos=True)
        outputs = llm.generate(
            [{"prompt_token_ids": PROMPT}, "The dog", "The cat", {"prompt_token_ids": PROMPT}],
            [params, others, others, params],
            use_tqdm=False,
        )
    assert rows(outputs[0]) == expected
    assert rows(outputs[3]) == expected
    assert outputs[1].prompt_logprobs is None
