import contextlib

import pytest

from octavo.errors import QueueFullError, RequestError
from octavo.frontend.request_memory import RequestMemory
from octavo.server.realtime_shares import MAX_SESSIONS, SessionPlaces, SoundMemory


def test_places_stay_free_for_others():
    places = SessionPlaces()
    with contextlib.ExitStack() as stack:
        for _ in range(113):
            stack.enter_context(places.hold("a"))
        message = "This client has 113 of 113 sessions"
        with pytest.raises(QueueFullError, match=message), places.hold("a"):
            pass
        for _ in range(10):
            stack.enter_context(places.hold("b"))
        assert MAX_SESSIONS > 113 + 10
    with places.hold("a"):
        pass


def test_memory_stays_free_for_others():
    memory, sound = RequestMemory(400), SoundMemory()
    sound.take(88, "a", memory)
    with pytest.raises(RequestError, match="all sessions") as caught:
        sound.take(2, "a", memory)
    assert (caught.value.code, caught.value.param) == ("sound_memory_full", "audio")
    sound.take(12, "b", memory)
    assert memory.used == 100  # a quarter
    sound.give_back(12, "b", memory)
    with memory.hold(300), pytest.raises(RequestError):  # other requests need the rest
        sound.take(13, "b", memory)
    sound.give_back(88, "a", memory)
    assert memory.used == 0
