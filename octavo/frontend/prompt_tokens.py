"""Tokens of prompts: encoded from texts, cut to a length, and checked."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.errors import ContextLengthError, RequestError
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import MAX_TOKENS, Tokenizer, is_longer


class PromptTokens:
    """Encoder and checker of the tokens of prompts, for one model.

    Args:
        tokenizer: encodes texts; None: prompts are token ids only (`skip_tokenizer_init`).
        vocab_size: number of tokens of the model.
        max_model_len: most tokens of prompt and answer together.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int) -> None:
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self._vocab_size = vocab_size

    def require_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            RequestError: none is loaded.
        """
        if self.tokenizer is None:
            raise RequestError(
                "No tokenizer is loaded (skip_tokenizer_init); give the prompt as token ids.",
                "prompt",
            )
        return self.tokenizer

    def encode(self, text: str, params: SamplingParams, add_special_tokens: bool) -> list[int]:
        """Return the tokens of a text, which are not cut.

        Raises:
            RequestError: no tokenizer is loaded.
            ContextLengthError: the text is longer than the context, and is not to be cut.
        """
        tokenizer, limit = self.require_tokenizer(), self.max_model_len
        if params.truncate_prompt_tokens is None and is_longer(text, limit):
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens; your prompt of "
                f"{len(text)} characters is longer. Shorten it.",
                "prompt",
            )
        return tokenizer.encode(text, add_special_tokens, max(limit, MAX_TOKENS))

    def kept(self, num_tokens: int, params: SamplingParams) -> slice:
        """Return the range of the prompt's tokens to keep.

        Raises:
            RequestError: `truncate_prompt_tokens` is more than the context.
        """
        keep = params.truncate_prompt_tokens
        if keep is not None and keep > self.max_model_len:
            raise RequestError(
                f"truncate_prompt_tokens={keep} is more than the model's context of "
                f"{self.max_model_len} tokens.",
                "truncate_prompt_tokens",
            )
        if keep == -1:
            keep = max(1, self.max_model_len - (params.max_tokens or 1))
        if keep is None or keep >= num_tokens:
            return slice(None)
        return slice(-keep, None) if params.truncation_side == "left" else slice(keep)

    def check_ids(self, name: str, ids: Iterable[int], vocab_size: int | None = None) -> None:
        """Check token ids.

        Args:
            name: name of the field, for errors.
            ids: the ids.
            vocab_size: number of tokens in place of the model's.

        Raises:
            RequestError: an id is out of the vocabulary.
        """
        vocab_size = vocab_size or self._vocab_size
        highest, lowest = max(ids, default=0), min(ids, default=0)
        if lowest < 0 or highest >= vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise RequestError(
                f"{name} holds the token id {wrong}, which is out of vocabulary: this model has "
                f"{vocab_size} tokens.",
                name,
            )
