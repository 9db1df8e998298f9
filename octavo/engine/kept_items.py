"""Items of prompts that an engine process keeps, so that they need not be sent again.

Only the client decides what is kept. The process reads its messages in their order, so the
client's record is always right; another process has nothing, and its client another record. An
item has the name of its content and scope, so requests of other scopes do not find it. The requests
of a client's records always have all of their items, so another engine can continue them.
"""

from __future__ import annotations

import msgspec

from octavo.errors import EngineDeadError
from octavo.messages import EngineCoreRequest, MultiModalFeatureSpec, TensorData

RESET_ITEMS = "reset_mm_cache"
"""Method of the core whose calls clear both records."""
# Bytes of an item besides its arrays.
_ENTRY = 1024


class RequestWithItems(msgspec.Struct, array_like=True, frozen=True):
    """Message with a request to an engine process that keeps items."""

    request: EngineCoreRequest
    """The request; items that the process has by then have no `data`."""
    keep: list[str]
    """Identifiers of the items to keep."""
    forget: list[str]
    """Identifiers of kept items to forget, once the request is complete."""


class ItemRecord:
    """A client's record of the items that its engine process keeps.

    If there is no room for new ones, those that were not used for the longest time are forgotten.
    """

    def __init__(self) -> None:
        self.max_nbytes = 0
        """Most bytes of all items."""
        self.nbytes = 0
        """Bytes of all items."""
        self._sizes: dict[str, int] = {}
        """Bytes of each item, those unused for the longest time first."""

    def pack(self, request: EngineCoreRequest) -> RequestWithItems:
        """Return the message for a request; `note` it if it is sent."""
        used = {it.identifier for it in request.mm_features if it.identifier in self._sizes}
        new = {it.identifier: it for it in request.mm_features if it.identifier not in used}
        excess = self.nbytes + sum(map(_nbytes, new.values())) - self.max_nbytes
        forget = []
        for identifier, nbytes in self._sizes.items():
            if excess <= 0:
                break
            if identifier not in used:
                forget.append(identifier)
                excess -= nbytes
        if excess > 0:  # the request alone has more
            new, forget = {}, []
        items = []
        for item in request.mm_features:
            items.append(
                msgspec.structs.replace(item, data={}) if item.identifier in used else item
            )
            if item.identifier in new:
                used.add(item.identifier)
        return RequestWithItems(msgspec.structs.replace(request, mm_features=items), [*new], forget)

    def note(self, message: RequestWithItems) -> None:
        """Record a message of `pack`."""
        keep = set(message.keep)
        for identifier in message.forget:
            self.nbytes -= self._sizes.pop(identifier)
        for item in message.request.mm_features:
            if (nbytes := self._sizes.pop(item.identifier, None)) is not None:
                self._sizes[item.identifier] = nbytes
            elif item.identifier in keep:
                self._sizes[item.identifier] = _nbytes(item)
                self.nbytes += _nbytes(item)

    def clear(self) -> None:
        """Forget all items; the process must do the same before the next request."""
        self._sizes.clear()
        self.nbytes = 0


class KeptItems:
    """The items that an engine process keeps."""

    def __init__(self) -> None:
        self._data: dict[str, dict[str, TensorData]] = {}
        """Input of the encoder of each item, by identifier."""

    def complete(self, message: RequestWithItems) -> EngineCoreRequest:
        """Return the request of a message with all of its items; keep and forget items.

        Raises:
            EngineDeadError: an item is missing.
        """
        items, keep = [], set(message.keep)
        for item in message.request.mm_features:
            if item.data:
                if item.identifier in keep:
                    self._data[item.identifier] = item.data
                items.append(item)
                continue
            if (data := self._data.get(item.identifier)) is None:
                raise EngineDeadError("a request came without an item that is not kept here")
            items.append(msgspec.structs.replace(item, data=data))
        for identifier in message.forget:
            del self._data[identifier]
        return msgspec.structs.replace(message.request, mm_features=items)

    def clear(self) -> None:
        """Forget all items."""
        self._data.clear()


def _nbytes(item: MultiModalFeatureSpec) -> int:
    return _ENTRY + sum(len(tensor.data) for tensor in item.data.values())
