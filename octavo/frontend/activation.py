"""Activated LoRA (aLoRA): an adapter that begins within the prompt.

The adapter changes the tokens from the last occurrence of its invocation tokens in the prompt on,
and all generated tokens. A prompt without them has the answer of the model alone. So the keys and
values before the adapter are those of the model (Greenewald et al. 2025, arXiv:2504.12397).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from octavo.errors import RequestError
from octavo.messages import RequestOptions


def activate(options: RequestOptions, prompt: Sequence[int] | None) -> RequestOptions:
    """Return a request's options with the index at which its adapter begins.

    Args:
        options: the options.
        prompt: the token ids; None: the prompt is embeddings.

    Raises:
        RequestError: the adapter looks for tokens, and the prompt is embeddings.
    """
    adapter = options.adapter
    if adapter is None or not adapter.invocation_tokens:
        return options
    if prompt is None:
        raise RequestError(
            f"The adapter {adapter.name!r} begins at certain tokens of a prompt (aLoRA), and "
            "prompt_embeds has no tokens; give the prompt as text or token ids.",
            "prompt_embeds",
        )
    begin = last_occurrence(prompt, adapter.invocation_tokens)
    if begin is None:
        return msgspec.structs.replace(options, adapter=None)
    return msgspec.structs.replace(options, adapter_begin=begin)


def last_occurrence(tokens: Sequence[int], part: Sequence[int]) -> int | None:
    """Return the index of the last occurrence of some tokens in others; None if absent."""
    ids = np.array(tokens)
    starts = np.arange(max(0, len(ids) - len(part) + 1))
    for offset, token in enumerate(part):
        starts = starts[ids[starts + offset] == token]
    return int(starts[-1]) if len(starts) else None
