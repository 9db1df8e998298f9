"""Tokens of the live requests of several front ends, from which another engine can continue."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from octavo.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, TensorData

OwnerT = TypeVar("OwnerT")


@dataclass(slots=True)
class _Entry(Generic[OwnerT]):
    """Live request."""

    request_id: str
    data: bytes
    """Request as msgpack, in a tenth of the memory of its decoded form."""
    owner: OwnerT
    answers: dict[int, str] = field(default_factory=dict)
    """Ids of its live answers, by index."""
    tokens: dict[int, array[int]] = field(default_factory=dict)
    """Tokens of the live answers, by index."""
    num_prompt_logprobs: int = 0
    items: list[str] = field(default_factory=list)
    """Identifiers of its items, whose arrays are not in `data`."""


class LiveRequests(Generic[OwnerT]):
    """Live requests of several owners, with the tokens of each.

    A single front end keeps these data, and more, in its `OutputProcessor`.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry[OwnerT]] = {}
        """Entries by the request's id, in order of arrival."""
        self._answers: dict[str, tuple[_Entry[OwnerT], int]] = {}
        """Entry and index by the id of each live answer."""
        self._items: dict[str, tuple[dict[str, TensorData], int]] = {}
        """Arrays of each item of live requests, by identifier, and the number of its uses. Equal
        pictures of many requests take the memory of one."""

    def __len__(self) -> int:
        """Return the number of live requests; the n answers of a request count once."""
        return len(self._entries)

    def add(self, request: EngineCoreRequest, data: bytes, owner: OwnerT) -> None:
        """Record a request, before an engine receives it.

        Args:
            request: the request, with a new id, and maybe with tokens that another engine has made.
            data: the request as msgpack.
            owner: owner of the request.
        """
        items = [item.identifier for item in request.mm_features]
        if items:
            data = self._share_items(request)
        entry = _Entry(request.request_id, data, owner, items=items)
        self._entries[request.request_id] = entry
        entry.num_prompt_logprobs = request.num_prompt_logprobs
        tokens = request.answers or {0: request.output_token_ids}
        for index, answer in zip(request.indices, request.child_ids, strict=True):
            entry.answers[index] = answer
            entry.tokens[index] = array("i", tokens.get(index, ()))
            self._answers[answer] = entry, index

    def take(self, output: EngineCoreOutput) -> OwnerT | None:
        """Record an output of a step; return its owner, or None if the request has ended."""
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
        """Remove answers that are no longer needed; ignore those that have ended."""
        for answer in answers:
            if (found := self._answers.get(answer)) is not None:
                self._end(found[0], [found[1]])

    def remove_owner(self, owner: OwnerT) -> list[str]:
        """Remove all requests of an owner; return the ids of the owner's live answers."""
        answers = [a for a, (entry, _) in self._answers.items() if entry.owner == owner]
        self.remove(answers)
        return answers

    def unfinished(self) -> list[EngineCoreRequest]:
        """Return the live requests, see `OutputProcessor.unfinished`."""
        return [self._as_request(entry) for entry in self._entries.values()]

    def _share_items(self, request: EngineCoreRequest) -> bytes:
        """Record a use of each item of a request; return the request without their arrays."""
        for item in request.mm_features:
            data, uses = self._items.get(item.identifier, (item.data, 0))
            self._items[item.identifier] = data, uses + 1
        items = [msgspec.structs.replace(item, data={}) for item in request.mm_features]
        return msgspec.msgpack.encode(msgspec.structs.replace(request, mm_features=items))

    def _release_items(self, identifiers: list[str]) -> None:
        for identifier in identifiers:
            data, uses = self._items.pop(identifier)
            if uses > 1:
                self._items[identifier] = data, uses - 1

    def _end(self, entry: _Entry[OwnerT], indices: list[int]) -> None:
        for index in indices:
            del entry.tokens[index]
            del self._answers[entry.answers.pop(index)]
        if not entry.tokens:
            del self._entries[entry.request_id]
            self._release_items(entry.items)

    def _as_request(self, entry: _Entry[OwnerT]) -> EngineCoreRequest:
        request = msgspec.msgpack.decode(entry.data, type=EngineCoreRequest)
        tokens = {index: ids.tolist() for index, ids in entry.tokens.items()}
        request.num_prompt_logprobs = entry.num_prompt_logprobs
        request.mm_features = [
            msgspec.structs.replace(item, data=self._items[item.identifier][0])
            for item in request.mm_features
        ]
        if request.n == 1:
            request.output_token_ids = tokens[0]
        else:
            request.answers = tokens
        return request
