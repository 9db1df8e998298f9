"""Record of recent prompts, which tells a client why a long prefix was not in the cache.

A client sees only its own key's part of the record: prompts are compared with those of the same
scope (`private_salt`), in which they could share cached blocks. An answer contains indices and
times, never tokens or text of other prompts.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from octavo.server import explain_answers

LONG = 256
"""Tokens of a prefix that is worth a report; shorter prompts are not recorded."""
MAX_BYTES = 2**24
MAX_PROMPTS = 64
"""Number of recorded prompts of a scope."""

_TOKEN = 4
_ENTRY = 512
"""Bytes of an entry without its tokens, rounded up."""
_PIECE = 2**14
_MOST_UNKNOWN = 8
_RUN = 32
_RUNS = 16


class Recorded:
    """Prompt of a request and, after its end, the answer.

    Attributes:
        prompt: token ids as int32.
        since: second of `time.monotonic` from which a later request could find the prompt.
        answer: token ids of the answer as int32; empty until the request ends.
        ended: second of `time.monotonic` from which a later request could find the answer.
        adapter: content hash of the request's adapter; None: it had none.
    """

    __slots__ = ("adapter", "answer", "ended", "prompt", "scope", "since")

    def __init__(self, scope: str | None, prompt: bytes, adapter: str | None = None) -> None:
        self.scope, self.adapter = scope, adapter
        self.prompt = prompt
        self.since = self.ended = time.monotonic()
        self.answer = b""

    @property
    def nbytes(self) -> int:
        """Bytes of the record."""
        return _ENTRY + len(self.scope or "") + len(self.prompt) + len(self.answer)

    def num_common(self, prompt: bytes, before: float) -> int:
        """Return the number of tokens that prompt and answer share with the beginning of `prompt`.

        Args:
            prompt: token ids as int32.
            before: an answer that ended after this second of `time.monotonic` does not count.
        """
        common = _num_common(self.prompt, prompt)
        if common == len(self.prompt) // _TOKEN and self.answer and self.ended <= before:
            common += _num_common(self.answer, prompt[len(self.prompt) :])
        return common


class Found(NamedTuple):
    """Recorded prompt that is most like a given one."""

    recorded: Recorded
    num_common: int


class RecentPrompts:
    """Recent prompts by scope; the prompts that were not used for longest are dropped.

    Args:
        max_bytes: maximum bytes of all prompts and answers.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._scopes: dict[str | None, list[Recorded]] = {}
        """Prompts of each scope, the oldest first."""
        self._by_age: OrderedDict[Recorded, None] = OrderedDict()
        self.nbytes = 0

    def find(
        self, scope: str | None, prompt: bytes, before: float, adapter: str | None = None
    ) -> Found | None:
        """Return the prompt of a scope that is most like a new one; among equals, the newest.

        A prompt with another adapter counts if it has `LONG` tokens more in common than all with
        the same one.

        Args:
            scope: scope of the new prompt.
            prompt: its token ids as int32.
            before: prompts that were recorded after this second of `time.monotonic` do not count.
            adapter: content hash of its adapter; None: it has none.
        """
        best: Found | None = None
        other: Found | None = None
        for recorded in self._scopes.get(scope, ()):
            if recorded.since > before:
                continue
            common = recorded.num_common(prompt, before)
            if recorded.adapter != adapter:
                if common >= LONG and (other is None or common >= other.num_common):
                    other = Found(recorded, common)
            elif common and (best is None or common >= best.num_common):
                best = Found(recorded, common)
        if other is not None and (best is None or other.num_common - best.num_common >= LONG):
            return other
        return best

    def add(self, scope: str | None, prompt: bytes, adapter: str | None = None) -> Recorded | None:
        """Record a prompt in place of those that it begins with; None if it is too long."""
        recorded = Recorded(scope, prompt, adapter)
        if recorded.nbytes > self._max_bytes:
            return None
        known = self._scopes.setdefault(scope, [])
        for old in [old for old in known if prompt.startswith(old.prompt)]:
            if old.adapter == adapter and prompt.startswith(old.answer, len(old.prompt)):
                self._drop(old)
        known = self._scopes.setdefault(scope, [])
        if len(known) == MAX_PROMPTS:
            self._drop(known[0])
        known.append(recorded)
        self._by_age[recorded] = None
        self.nbytes += recorded.nbytes
        self._shrink()
        return recorded

    def add_answer(self, recorded: Recorded, token_ids: Iterable[int]) -> None:
        """Record the answer to a prompt; ignore a prompt that has been dropped."""
        if recorded in self._by_age:
            self.nbytes -= recorded.nbytes
            recorded.answer = to_bytes(token_ids)
            recorded.ended = time.monotonic()
            self.nbytes += recorded.nbytes
            self._shrink()

    def _shrink(self) -> None:
        while self.nbytes > self._max_bytes:
            self._drop(next(iter(self._by_age)))

    def _drop(self, recorded: Recorded) -> None:
        del self._by_age[recorded]
        self.nbytes -= recorded.nbytes
        known = self._scopes[recorded.scope]
        known.remove(recorded)
        if not known:
            del self._scopes[recorded.scope]


def to_bytes(token_ids: Iterable[int]) -> bytes:
    """Return token ids as int32."""
    return array("i", token_ids).tobytes()


def explain(
    found: Found,
    prompt: bytes,
    num_cached: int,
    num_stored: int,
    emptied: float | None,
    adapter: str | None = None,
) -> explain_answers.CacheMiss | None:
    """Return why a prefix was not in the cache; None if less than `LONG` tokens were missed.

    Args:
        found: the recorded prompt that is most like this one.
        prompt: token ids of this one as int32.
        num_cached: number of its tokens that were in the cache.
        num_stored: number of its tokens with cached keys and values.
        emptied: second of `time.monotonic` at which the cache was emptied last.
        adapter: content hash of the adapter of this prompt; None: it has none.
    """
    recorded, common = found
    num_tokens = len(prompt) // _TOKEN
    now = time.monotonic()
    in_answer = common * _TOKEN > len(recorded.prompt)
    used = recorded.ended if in_answer else recorded.since
    reusable = min(common, num_tokens - 1)
    if recorded.adapter != adapter:
        if reusable - num_cached < LONG:
            return None
        return {
            "reason": "other_adapter",
            "token": num_cached,
            "message": None,
            "known_tokens": common,
            "seconds": round(now - used, 3),
        }
    if reusable - num_cached >= LONG:
        was_emptied = emptied is not None and emptied >= used
        lost: Literal["forgotten", "no_state"] = "forgotten"
        if reusable - num_stored < LONG:
            lost = "no_state"
        return {
            "reason": "emptied" if was_emptied else lost,
            "token": num_cached,
            "message": None,
            "known_tokens": common,
            "seconds": round(now - (emptied if was_emptied and emptied else used), 3),
        }
    length = (len(recorded.prompt) + len(recorded.answer)) // _TOKEN
    if min(length, num_tokens) - common >= LONG and _resembles(recorded, prompt, common):
        return {
            "reason": "changed",
            "token": common,
            "message": None,
            "known_tokens": length,
            "seconds": round(now - used, 3),
        }
    return None


def _resembles(recorded: Recorded, prompt: bytes, common: int) -> bool:
    """Return True if a prompt repeats a part of a recorded one after their common beginning.

    Otherwise it is another conversation. The function looks for some runs of tokens only.
    """
    rest = (recorded.prompt + recorded.answer)[common * _TOKEN :]
    step = max(_RUN, len(rest) // _TOKEN // _RUNS)
    runs = (rest[i * _TOKEN : (i + _RUN) * _TOKEN] for i in range(1, len(rest) // _TOKEN, step))
    return any(len(run) == _RUN * _TOKEN and prompt.find(run, common * _TOKEN) >= 0 for run in runs)


def message_at(text: str, contents: Sequence[str], position: int) -> int | None:
    """Return the index of the message at a character of a rendered chat; None: before the first.

    A message extends from its content to the next message's content, so the marker before a
    message belongs to the message before.

    Args:
        text: the rendered chat.
        contents: text of each message; a message whose text is not found counts as part of the one
            before. After several of these the result is None, as each takes a search of the chat.
        position: index of the character.
    """
    found, begin, num_unknown = None, 0, 0
    for index, content in enumerate(contents):
        content = content.strip()
        place = text.find(content, begin) if content else -1
        if place < 0:
            num_unknown += bool(content)
            if num_unknown > _MOST_UNKNOWN:
                return None
            continue
        if place > position:
            break
        found, begin = index, place + len(content)
    return found


def _num_common(one: bytes, other: bytes) -> int:
    """Return the number of tokens that two lists of int32 have in common at their beginning."""
    shared = min(len(one), len(other))
    low = 0
    while low < shared and one[low : low + _PIECE] == other[low : low + _PIECE]:
        low += _PIECE
    low, high = min(low, shared) // _TOKEN, min(low + _PIECE, shared) // _TOKEN
    while low < high:  # the first tokens up to `low` are equal, and not all up to `high`
        middle = (low + high + 1) // 2
        if one[low * _TOKEN : middle * _TOKEN] == other[low * _TOKEN : middle * _TOKEN]:
            low = middle
        else:
            high = middle - 1
    return low
