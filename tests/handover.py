"""Prompts that one engine computes, and answers that another one makes from its blocks."""

from collections.abc import Callable, Sequence
from typing import Any

from octavo import LLM, SamplingParams


def hand_over(
    one: LLM,
    two: LLM,
    prompts: Sequence[Any],
    params: Callable[..., SamplingParams],
    num_tokens: int,
) -> list[tuple[Any, Any, Any]]:
    """Return prompt ids, tokens and logprobs of answers that `two` makes from the blocks of `one`.

    Args:
        one: computes the prompts.
        two: goes on.
        prompts: the prompts.
        params: makes the parameters from a number of tokens and further fields.
        num_tokens: tokens of an answer.
    """
    remote = {"kv_transfer_params": {"do_remote_decode": True}}
    handed = one.generate(prompts, params(1, extra_args=remote), use_tqdm=False)
    go_on = [
        params(num_tokens, extra_args={"kv_transfer_params": output.kv_transfer_params})
        for output in handed
    ]
    outputs = two.generate(prompts, go_on, use_tqdm=False)
    return [(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]
