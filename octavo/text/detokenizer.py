"""Conversion of tokens to text, one at a time: whole characters only, without stop texts."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import REPLACEMENT, Tokenizer

# Maximum number of pieces kept before they are joined: small ones use ten times their length.
_MAX_PIECES = 256
# Number of the prompt's tokens that are decoded for context; a character has at most 4 bytes.
_NUM_CONTEXT_TOKENS = 6
# Maximum number of tokens of a character: text that still ends in U+FFFD then is invalid.
_MAX_HELD_TOKENS = 8


class TextStream(Protocol):
    """Stream that converts tokens to text; it holds incomplete characters back."""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes."""

    def flush(self) -> str:
        """Return the held text, with U+FFFD for incomplete characters."""


class ByteStream:
    """Stream for tokenizers with tokens that stand for fixed bytes (`Tokenizer.has_bytes`).

    The text equals `Tokenizer.decode` of all tokens, with one exception: for invalid UTF-8 of a
    sentencepiece model the number of U+FFFD may differ, since `decode` looks back there.

    Args:
        tokenizer: tokenizer with `has_bytes`.
        prompt_token_ids: preceding tokens; a character begun there is completed.
        skipped: tokens to omit.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._pieces = tokenizer.pieces(skipped)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._incomplete = False
        self._strip = False
        for token_id in prompt_token_ids[-_NUM_CONTEXT_TOKENS:]:
            self.push(token_id)
        # A text's first space is dropped; with a prompt, its first space was.
        self._strip = tokenizer.strips_leading_space and not any(
            map(self._pieces.__getitem__, prompt_token_ids)
        )

    def push(self, token_id: int) -> str:
        """Return the text that this token completes."""
        piece = self._pieces[token_id]
        if self._incomplete or isinstance(piece, bytes):
            data = piece.encode() if isinstance(piece, str) else piece
            piece = self._decoder.decode(data)
            self._incomplete = bool(self._decoder.getstate()[0])
        if self._strip and piece:
            self._strip = False
            return piece.removeprefix(" ")
        return piece

    def flush(self) -> str:
        """Return the held text, with U+FFFD for incomplete characters."""
        self._incomplete = False
        return self._decoder.decode(b"", final=True)


class WindowStream:
    """Stream for any tokenizer: decodes a window of the last tokens with and without the new one.

    Args:
        tokenizer: any tokenizer.
        prompt_token_ids: preceding tokens; the last of them decide about a leading space.
        skipped: tokens to omit.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skipped: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        context = islice(
            (i for i in reversed(prompt_token_ids) if i not in self._skipped), _NUM_CONTEXT_TOKENS
        )
        self._ids = list(context)[::-1]
        self._num_read = len(self._ids)
        self._read_text = tokenizer.decode(self._ids)

    def push(self, token_id: int) -> str:
        """Return the text that this token completes."""
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        held = len(self._ids) - self._num_read
        if text.endswith(REPLACEMENT) and held < _MAX_HELD_TOKENS:
            return ""
        return self._take(text)

    def flush(self) -> str:
        """Return the held text, with U+FFFD for incomplete characters."""
        return self._take(self._tokenizer.decode(self._ids))

    def _take(self, text: str) -> str:
        new_text = text[len(self._read_text) :]
        del self._ids[: self._num_read]
        self._num_read = len(self._ids)
        self._read_text = self._tokenizer.decode(self._ids)
        return new_text


def make_text_stream(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    skip_special_tokens: bool,
    preserved_token_ids: Sequence[int] | None = None,
) -> TextStream:
    """Make the stream that fits the tokenizer.

    Args:
        tokenizer: the model's tokenizer.
        prompt_token_ids: preceding tokens.
        skip_special_tokens: True to omit special tokens.
        preserved_token_ids: special tokens that are kept even so.
    """
    skipped = tokenizer.all_special_ids if skip_special_tokens else frozenset[int]()
    kind = ByteStream if tokenizer.has_bytes else WindowStream
    return kind(tokenizer, prompt_token_ids, skipped.difference(preserved_token_ids or ()))


class IncrementalDetokenizer:
    """Tokens and text of one answer, in constant time per token.

    Text passes two stages: the stream holds incomplete characters back, and with stop texts the
    last `max(len(stop)) - 1` characters wait, as they may become one.

    Args:
        tokenizer: None for no text, like `params.detokenize = False`.
        prompt_token_ids: the prompt.
        params: has stop texts, `min_tokens` and the texts to omit.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
    ) -> None:
        self.token_ids = array("i")
        self._stream: TextStream | None = None
        if tokenizer is not None and params.detokenize:
            self._stream = make_text_stream(
                tokenizer, prompt_token_ids, params.skip_special_tokens, params.preserved_token_ids
            )
        self._stops = list(params.stop)
        self._num_held = max(map(len, params.stop), default=1) - 1
        self._min_tokens = params.min_tokens
        self._keep_stop = params.include_stop_str_in_output
        self._released: list[str] = []
        self._held = ""

    def update(self, new_token_ids: Sequence[int], ended_by_stop_token: bool = False) -> str | None:
        """Add tokens; return the stop text if one ended the answer.

        Tokens after the one that completes a stop text are dropped, so the answer does not depend
        on the number of tokens in a call. Stop texts have no effect before `min_tokens` tokens.

        Args:
            new_token_ids: tokens in order.
            ended_by_stop_token: the last token is a stop token: it is kept as a token but, without
                `include_stop_str_in_output`, not as text.
        """
        stream = self._stream
        if stream is None:
            self.token_ids.extend(new_token_ids)
            return None
        last = len(new_token_ids) - 1
        for i, token_id in enumerate(new_token_ids):
            self.token_ids.append(token_id)
            if i == last and ended_by_stop_token and not self._keep_stop:
                break
            new_text = stream.push(token_id)
            if not new_text:
                continue
            if not self._stops:
                self._released.append(new_text)
                if len(self._released) > _MAX_PIECES:
                    self.text()
                continue
            num_old = len(self._held)
            self._held += new_text
            if len(self.token_ids) > self._min_tokens:
                stop = self._find_stop(num_old)
                if stop is not None:
                    return stop
            self._release(len(self._held) - self._num_held)
            if len(self._released) > _MAX_PIECES:
                self.text()
        return None

    def finish(self) -> None:
        """Release all held text after the last token."""
        if self._stream is not None:
            self._held += self._stream.flush()
        self._release(len(self._held))

    def text(self) -> str:
        """Return all text released so far."""
        text = "".join(self._released)
        self._released = [text]
        return text

    def take_text(self) -> str:
        """Return the text released since the last call; use either this or `text`."""
        text = "".join(self._released)
        self._released.clear()
        return text

    def _find_stop(self, num_old: int) -> str | None:
        """Find a stop text that ends after the first `num_old` held characters.

        The one that begins first wins; among several, the one given first.
        """
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = self._held.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0 and (best is None or start < best[0]):
                best = (start, stop)
        if best is None:
            return None
        start, stop = best
        self._held = self._held[: start + len(stop) if self._keep_stop else start]
        self._release(len(self._held))
        self._stream = None  # nothing after the stop text belongs to the answer
        return stop

    def _release(self, num_chars: int) -> None:
        if num_chars > 0:
            self._released.append(self._held[:num_chars])
            self._held = self._held[num_chars:]
