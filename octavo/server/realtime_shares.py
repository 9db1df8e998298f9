"""Shares of the senders of sound in the sessions of /v1/realtime and in the memory of their sound.

A sender is the owner of an API key; without several keys, it is a class of addresses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from octavo.errors import QueueFullError, RequestError
from octavo.frontend.request_memory import RequestMemory, leaves_room

MAX_SESSIONS = 128
"""Most sessions of a server, and of a router for each of its servers."""
# The sound of all sessions takes at most this part of the memory for requests.
_MEMORY_SHARE = 4


class SessionPlaces:
    """Places of sessions; the more a sender holds, the more stay free for others."""

    def __init__(self) -> None:
        self._held: Counter[Hashable] = Counter()

    @contextmanager
    def hold(self, sender: Hashable, num_servers: int = 1) -> Iterator[None]:
        """Hold a place.

        Args:
            sender: the sender.
            num_servers: number of servers that have places.

        Raises:
            QueueFullError: the sender has too many, or no place is free.
        """
        held, total = self._held[sender], self._held.total()
        most = MAX_SESSIONS * num_servers
        if not leaves_room(held, 1, most - total):
            raise QueueFullError(
                f"This client has {held} of {total} sessions at /v1/realtime, and the server has "
                f"places for {most}, of which some stay free for others; close sessions, "
                "or try again later.",
                5,
            )
        self._held[sender] += 1
        try:
            yield
        finally:
            self._held[sender] -= 1
            if not self._held[sender]:
                del self._held[sender]


class SoundMemory:
    """Memory of the sound that sessions hold until it is transcribed."""

    def __init__(self) -> None:
        self._held: Counter[Hashable] = Counter()

    def take(self, nbytes: int, sender: Hashable, memory: RequestMemory) -> None:
        """Count bytes of a session.

        Args:
            nbytes: their number.
            sender: sender of the sound.
            memory: memory of all requests, of which they are a part.

        Raises:
            RequestError: there is no room now; the session may send the sound later.
        """
        held, total = self._held[sender], self._held.total()
        limit = memory.limit // _MEMORY_SHARE
        memory.make_room(nbytes)
        fits = memory.used + nbytes <= memory.limit
        if not (fits and leaves_room(held, nbytes, limit - total)):
            raise RequestError(
                f"The sessions of this client hold {held / 2**20:,.1f} MiB of sound, and all "
                f"sessions {total / 2**20:,.1f} of {limit / 2**20:,.0f} MiB (a quarter of "
                "--request-memory-bytes); commit or clear sound, or send this later.",
                "audio",
                "sound_memory_full",
            )
        self._held[sender] += nbytes
        memory.used += nbytes

    def give_back(self, nbytes: int, sender: Hashable, memory: RequestMemory) -> None:
        """Count bytes that a session has forgotten."""
        self._held[sender] -= nbytes
        memory.used -= nbytes
        if not self._held[sender]:
            del self._held[sender]
