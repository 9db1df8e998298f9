"""What the live requests of several front ends have got: from it another engine goes on."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from octavo.messages import EngineCoreOutput, EngineCoreRequest, FinishReason

OwnerT = TypeVar("OwnerT")


@dataclass(slots=True)
class _Entry(Generic[OwnerT]):
    """A live request."""

    request_id: str
    data: bytes
    """The request, encoded: a tenth of what its numbers take."""
    owner: OwnerT
    answers: dict[int, str] = field(default_factory=dict)
    """Ids of its live answers, by index."""
    tokens: dict[int, array[int]] = field(default_factory=dict)
    """What these have got."""
    num_prompt_logprobs: int = 0


class Journal(Generic[OwnerT]):
    """The live requests of several owners, with the tokens that each has got.

    A front end that is alone keeps the same in its `OutputProcessor`, which knows more of them.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry[OwnerT]] = {}
        """By the request's id, in order of arrival."""
        self._answers: dict[str, tuple[_Entry[OwnerT], int]] = {}
        """By the id of each live answer, with its index."""

    def __len__(self) -> int:
        """Live requests; the n answers of a request count once."""
        return len(self._entries)

    def add(self, request: EngineCoreRequest, data: bytes, owner: OwnerT) -> None:
        """Notes a request, before an engine gets it.

        Args:
            request: it, with a new id, and maybe with tokens that another engine has made.
            data: the same as msgpack.
            owner: whose it is.
        """
        entry = self._entries[request.request_id] = _Entry(request.request_id, data, owner)
        entry.num_prompt_logprobs = request.num_prompt_logprobs
        tokens = request.answers or {0: request.output_token_ids}
        for index, answer in zip(request.indices, request.child_ids, strict=True):
            entry.answers[index] = answer
            entry.tokens[index] = array("i", tokens.get(index, ()))
            self._answers[answer] = entry, index

    def take(self, output: EngineCoreOutput) -> OwnerT | None:
        """Notes what a step brought; returns whose it is, None of what has ended."""
        found = self._answers.get(output.request_id)
        if found is None:
            return None
        entry, index = found
        entry.tokens[index].extend(output.new_token_ids)
        if output.new_prompt_logprobs is not None:
            entry.num_prompt_logprobs += output.new_prompt_logprobs.num_rows
        if output.finish_reason == FinishReason.ERROR:  # its siblings end with it
            self._end(entry, list(entry.tokens))
        elif output.finish_reason is not None:
            self._end(entry, [index])
        return entry.owner

    def remove(self, answers: list[str]) -> None:
        """Forgets answers that nobody wants any more; those that have ended are skipped."""
        for answer in answers:
            if (found := self._answers.get(answer)) is not None:
                self._end(found[0], [found[1]])

    def remove_owner(self, owner: OwnerT) -> list[str]:
        """Forgets all of an owner's; returns the ids of its live answers."""
        answers = [a for a, (entry, _) in self._answers.items() if entry.owner == owner]
        self.remove(answers)
        return answers

    def unfinished(self) -> list[EngineCoreRequest]:
        """See `OutputProcessor.unfinished`."""
        return [_as_request(entry) for entry in self._entries.values()]

    def _end(self, entry: _Entry[OwnerT], indices: list[int]) -> None:
        for index in indices:
            del entry.tokens[index]
            del self._answers[entry.answers.pop(index)]
        if not entry.tokens:
            del self._entries[entry.request_id]


def _as_request(entry: _Entry[OwnerT]) -> EngineCoreRequest:
    request = msgspec.msgpack.decode(entry.data, type=EngineCoreRequest)
    tokens = {index: ids.tolist() for index, ids in entry.tokens.items()}
    request.num_prompt_logprobs = entry.num_prompt_logprobs
    if request.n == 1:
        request.output_token_ids = tokens[0]
    else:
        request.answers = tokens
    return request
