"""Rules of Whisper's answers: tokens that are never generated, and the order of timestamps.

The rules are those of OpenAI's Whisper (`decoding.py`: `SuppressBlank`, `SuppressTokens`,
`ApplyTimestampRules`) and of transformers (`WhisperTimeStampLogitsProcessor`).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.kernels.base import Ops
from octavo.sampling.logits_processors.base import LogitsProcessor, LongArray, NewRow, StepRows
from octavo.system.tensor import Tensor

KEY = "whisper_rules"
"""Key of the rules in `extra_args`."""

Bools = NDArray[np.bool_]
Floats = NDArray[np.float32]


class WhisperRules(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rules of a request's answer."""

    end: int
    """Token that ends the answer; text has smaller ids."""
    suppress: list[int] = []
    """Tokens that are never generated."""
    begin_suppress: list[int] = []
    """Tokens that are not generated first."""
    first_timestamp: int | None = None
    """Token of 0.00 s, which all later times follow; None: an answer without timestamps."""
    max_initial: int | None = None
    """Largest number of the first timestamp, in units of 0.02 s; None: any."""

    def allowed(self, tokens: list[int], logits: Floats) -> Bools:
        """Return the tokens that may come next.

        Args:
            tokens: tokens of the answer so far.
            logits: float32 [V], logits of the next token.

        Returns:
            bool [V].
        """
        may = np.ones(len(logits), np.bool_)
        may[self.suppress] = False
        if not tokens:
            may[self.begin_suppress] = False
        if self.first_timestamp is None:
            return may
        first = self.first_timestamp
        may[first - 1] = False  # <|notimestamps|>
        if not tokens:
            may[:first] = False
            if self.max_initial is not None:
                may[first + self.max_initial + 1 :] = False
        elif tokens[-1] >= first:
            if len(tokens) < 2 or tokens[-2] >= first:
                may[first:] = False  # text after two timestamps, or after the first one
            else:
                may[: self.end] = False  # a second timestamp after the end of a text, or the end
        # Times do not decrease; a text takes some time.
        times = [token for token in tokens if token >= first]
        if times:
            ends_text = tokens[-1] >= first and len(tokens) > 1 and tokens[-2] < first
            may[first : times[-1] + (0 if ends_text else 1)] = False
        # A timestamp follows if all of them together are more probable than any other token.
        scores = np.where(may, logits, -np.inf)
        text, stamps = scores[:first].max(), scores[first:]
        if (most := stamps.max(initial=-np.inf)) > -np.inf:
            total = most + np.log(np.exp(stamps - most).sum(dtype=np.float64))
            if total > text:
                may[:first] = False
        return may


class WhisperAnswers(LogitsProcessor):
    """Processor of the rules in `extra_args`, with the key `whisper_rules`."""

    extra_args = frozenset({KEY})
    needs_tokens = True
    owns_logprobs = True  # as OpenAI's Whisper and transformers compute them

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        super().__init__(max_num_rows, vocab_size)
        self._rows: dict[int, tuple[WhisperRules, list[int]]] = {}
        """Rules and generated tokens, by row."""

    def add_row(self, new: NewRow) -> bool:
        """Read the request's rules.

        Raises:
            RequestError: they are wrong.
        """
        given = (new.params.extra_args or {}).get(KEY)
        if given is None:
            return False
        self._rows[new.row] = self._read(given), [*new.output_token_ids]
        return True

    def remove_row(self, row: int) -> None:
        """Drop the rules."""
        self._rows.pop(row, None)

    def append(self, rows: LongArray, tokens: LongArray) -> None:
        """Add a token to each of some answers."""
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            self._rows[row][1].append(token)

    def apply(self, ops: Ops, logits: Tensor, step: StepRows) -> None:
        """Exclude the tokens that the rules do not allow."""
        numbers: NDArray[Any] = ops.to_host(logits)
        bits = np.zeros((len(step.at), -(-self.vocab_size // 32) * 32), np.bool_)
        for i, (at, row) in enumerate(zip(step.at.tolist(), step.rows.tolist(), strict=True)):
            rules, tokens = self._rows[row]
            bits[i, : self.vocab_size] = rules.allowed(tokens, numbers[at])
        words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        ops.apply_bitmask_(logits, ops.to_device(words), ops.to_device(step.at))

    def _read(self, given: Any) -> WhisperRules:
        try:
            rules = msgspec.convert(given, WhisperRules)
        except msgspec.ValidationError as error:
            raise RequestError(f"extra_args.{KEY}: {error}.", "extra_args") from None
        first = rules.first_timestamp
        ids = [rules.end, *rules.suppress, *rules.begin_suppress]
        if first is not None:
            ids.append(first - 1)
        wrong = [token for token in ids if not 0 <= token < self.vocab_size]
        if wrong or (first is not None and not rules.end < first <= self.vocab_size):
            raise RequestError(
                f"extra_args.{KEY} has a token id that is wrong ({wrong or first}); this model has "
                f"{self.vocab_size} tokens.",
                "extra_args",
            )
        if rules.max_initial is not None and rules.max_initial < 0:
            raise RequestError(
                f"extra_args.{KEY}.max_initial={rules.max_initial} is negative.", "extra_args"
            )
        return rules
