"""Limits of an answer's reasoning and repetition."""

from __future__ import annotations

from octavo.errors import RequestError
from octavo.messages import GuardSpec
from octavo.sampling_params import SamplingParams
from octavo.text.markers import marker_tokens
from octavo.text.tokenizer import Tokenizer

# Last tokens of a prompt in which a marker may be.
_MARKER_TOKENS = 32
_MAX_MARKERS = 64


class Guards:
    """Maker of the limits of answers, for one model.

    Args:
        tokenizer: the model's; None: no reasoning is known.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._markers: dict[tuple[str, str], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        """Results of `_find_markers`."""

    def make(self, params: SamplingParams, prompt: list[int]) -> GuardSpec | None:
        """Return the limits of an answer's reasoning and repetition; None: it has none.

        Args:
            params: the parameters of the answer.
            prompt: the token ids of the prompt, whose end may begin the reasoning.

        Raises:
            RequestError: reasoning cannot be limited, and the parameters have a limit for it.
        """
        budget, repetition = params.thinking_token_budget, params.repetition_guard or "off"
        if budget is None and repetition == "off":
            return None
        begin: tuple[int, ...] = ()
        end: tuple[int, ...] = ()
        thinks = False
        if params.reasoning_markers is not None and self._tokenizer is not None:
            begin, end = self._find_markers(params.reasoning_markers)
            tail = self._tokenizer.decode(prompt[-_MARKER_TOKENS:]).rstrip()
            thinks = bool(end) and tail.endswith(params.reasoning_markers[0].rstrip())
        if budget is not None and not end:
            reason = (
                "the end of this model's reasoning is no token of its own"
                if params.reasoning_markers is not None
                else "this model's chat template shows no reasoning"
            )
            raise RequestError(
                f"thinking_token_budget={budget} is not available: {reason}. Leave it out, and use "
                "max_tokens.",
                "thinking_token_budget",
            )
        return GuardSpec(begin, end, thinks, budget, repetition)

    def _find_markers(self, markers: tuple[str, str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return `marker_tokens` of the texts before and after reasoning."""
        found = self._markers.get(markers)
        if found is None:
            assert self._tokenizer is not None
            if len(self._markers) >= _MAX_MARKERS:
                self._markers.clear()
            found = self._markers[markers] = marker_tokens(self._tokenizer, markers)
        return found
