"""Media that several front ends share: the rules of `MediaCache`, in files."""

import threading

import numpy as np
import pytest

from octavo.frontend.media_cache import MediaKey
from octavo.frontend.shared_media import SharedMedia
from octavo.multimodal.items import Item, make_part
from octavo.multimodal.processors.base import Place

ENTRY = 2**16


def key(uuid, scope=None):
    return MediaKey(scope, uuid, "image")


def item(number=0, nbytes=1000):
    data = {"pixel_values": np.full(nbytes, number, np.uint8), "grid": np.array([1, 2], np.int64)}
    return Item("image", (make_part(Place(("a", 3, "b"), 4, (1, 3, 1)), data),))


@pytest.fixture
def make(tmp_path):
    """Return a function: most bytes -> the media of a front end."""
    return lambda nbytes: SharedMedia(tmp_path, nbytes)


def test_what_one_keeps_the_others_find(make):
    mine, other = make(10**6), make(10**6)
    assert mine.get(key("a")) is None
    mine.put(key("a"), item(1), item().nbytes, "t")
    assert mine.get(key("a")) == other.get(key("a")) == make(10**6).get(key("a")) == item(1)
    other.put(key("a"), item(2), item().nbytes, "t")  # at once in place of the first
    assert mine.get(key("a")) == other.get(key("a")) == item(2)
    mine.put(key("a"), item(3), item().nbytes, 7)  # also by another sender
    assert mine.get(key("a")) == other.get(key("a")) == item(3)
    other.put(key("a", "mine"), item(4), item().nbytes, "t")
    assert mine.get(key("a")) == item(3)
    assert mine.get(key("a", "mine")) == item(4)
    assert mine.get(key("a", "yours")) is None
    mine.clear()
    assert other.get(key("a")) is other.get(key("a", "mine")) is None


def test_who_holds_most_gives_up_the_item_unused_for_longest(make, tmp_path):
    media = make(5 * (ENTRY + 1500))

    def put(name, tenant):
        media.put(key(name), item(ord(name)), item().nbytes, tenant)

    put("x", "small")
    for name in "abcd":
        put(name, "large")
    assert media.get(key("a")) == item(ord("a"))
    put("y", "small")
    put("y", "small")  # in its own place
    put("z", "small")
    assert {name for name in "abcdxyz" if media.get(key(name))} == set("adxyz")
    nbytes = sum(path.stat().st_size + ENTRY for path in tmp_path.iterdir() if "-" in path.name)
    assert nbytes <= 5 * (ENTRY + 1500)


def test_an_item_that_never_fits_is_not_kept(make):
    media = make(ENTRY + 3000)
    media.put(key("a"), item(), item().nbytes, None)
    assert media.get(key("a")) == item()
    media.put(key("a"), item(1, 4000), 4000, None)
    assert media.get(key("a")) is None
    full = make(ENTRY + item().nbytes)  # the file has more bytes
    full.put(key("b"), item(), item().nbytes, None)
    assert full.get(key("b")) is None
    off = make(0)
    off.put(key("a"), item(), item().nbytes, None)
    assert off.get(key("a")) is None


def test_a_full_disk_keeps_nothing(make, monkeypatch, caplog, tmp_path):
    media = make(10**6)
    media.put(key("a"), item(), item().nbytes, None)

    def fail(path, data):
        path.touch()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.write_bytes", fail)
        media.put(key("b"), item(1), item().nbytes, None)
    assert "No space left" in caplog.text
    assert not (tmp_path / "new").exists()
    assert (media.get(key("a")), media.get(key("b"))) == (item(), None)
    media.put(key("b"), item(1), item().nbytes, None)
    assert media.get(key("b")) == item(1)


def test_a_folder_that_is_lost_keeps_nothing(make, tmp_path, caplog):
    media = make(10**6)
    tmp_path.rmdir()
    media.put(key("a"), item(), item().nbytes, None)
    assert media.get(key("a")) is None
    assert "cannot be kept" in caplog.text
    assert "cannot be read" in caplog.text


def test_many_at_once(make):
    """Each reader finds a whole item, the old or the new one, while others replace it."""
    make(10**6).put(key("a"), item(0), item().nbytes, 0)
    wrong = []

    def work(number):
        media = make(10**6)
        for _ in range(30):
            media.put(key("a"), item(number), item().nbytes, number)
            found = media.get(key("a"))
            if found not in [item(i) for i in range(4)]:
                wrong.append(found)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
