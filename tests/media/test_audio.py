"""Sounds of every format, and files that attack their reader."""

import contextlib
import itertools
import random
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import OctavoError, RequestError
from octavo.media.audio import AudioParts, AudioReader
from tests.media.sounds import CODECS, chirp, encode, extensible_wav, wav

TONE = chirp(2.0)
INT16 = (TONE[0] * 2**15).astype("<i2")


@pytest.fixture(scope="module")
def reader():
    made = AudioReader()
    yield made
    made.close()


@pytest.fixture(scope="module")
def read(reader):
    return lambda data: reader.submit(data).result()


@pytest.mark.parametrize("kind", CODECS)
def test_every_format_at_48_khz_in_stereo(read, kind):
    samples = read(encode(chirp(2.0, 48_000, 2), kind, 48_000))
    assert samples.dtype == np.float32
    delay, close = (341, 0.99) if kind == "aac" else (0, 0.999)  # AAC has no place for its delay
    assert abs(len(samples) - delay - 32_000) < 600
    both = samples[delay : delay + 31_000], TONE[0, : len(samples) - delay][:31_000]
    assert np.corrcoef(*both)[0, 1] > close
    assert np.abs(both[0]).max() == pytest.approx(np.abs(both[1]).max(), rel=0.05)


@pytest.mark.parametrize("kind", ["m4a", "webm"])
def test_the_sound_of_a_video(read, kind):
    samples = read(encode(chirp(2.0, 48_000, 2), kind, 48_000, with_pictures=True))
    assert np.corrcoef(samples[:31_000], TONE[0, :31_000])[0, 1] > 0.999


def test_16_khz_stays_as_it_is(read):
    assert np.array_equal(read(wav(INT16)), INT16 / np.float32(2**15))
    assert np.array_equal(read(wav(TONE[0], code=3)), TONE[0])
    assert np.array_equal(read(bytearray(encode(TONE, "flac"))), read(encode(TONE, "wav")))


def test_channels_are_averaged(read):
    left_only = np.stack([chirp(2.0, 16_000)[0], np.zeros(32_000, np.float32)])
    assert np.abs(read(encode(left_only, "wav")) - TONE[0] / 2).max() < 1e-4


@pytest.mark.parametrize("num_channels", [3, 6, 8, 9, 24])
def test_many_channels(read, num_channels):
    samples = np.random.default_rng(0).integers(-9000, 9000, (9000, num_channels)).astype("<i2")
    data = bytearray(wav(samples.ravel()))
    data[22:24] = struct.pack("<H", num_channels)
    data[28:34] = struct.pack("<IH", 32_000 * num_channels, 2 * num_channels)
    np.testing.assert_allclose(read(data), (samples / 2**15).mean(1), atol=1e-6)


@pytest.mark.parametrize("nbytes", [0, 2**32 - 1, 2**31 - 1])
def test_a_wav_that_was_written_as_a_stream(read, nbytes):
    assert len(read(wav(INT16, nbytes=nbytes))) == 32_000


@pytest.mark.parametrize(
    ("bits", "code", "data"),
    [
        (8, 1, (TONE[0] * 127 + 128).astype("u1").tobytes()),
        (24, 1, np.delete((TONE[0] * 2**31).astype("<i4").view("u1").reshape(-1, 4), 0, 1)),
        (32, 1, (TONE[0] * 2**31).astype("<i4").tobytes()),
        (32, 3, TONE[0].tobytes()),
        (64, 3, TONE[0].astype("<f8").tobytes()),
    ],
)
def test_every_wav(read, bits, code, data):
    samples = read(extensible_wav(bytes(data), bits, code))
    np.testing.assert_allclose(samples, TONE[0], atol=2.0 ** (2 - min(bits, 24)))
    # Some programs write a wrong rate of bytes.
    for byte_rate in (0, 1, 32, 10**9):
        wrong = extensible_wav(bytes(data), bits, code, byte_rate=byte_rate)
        assert np.array_equal(read(wrong), samples)


def lengths_of_webm(data):
    """Yield a WebM file whose head announces other lengths: 1 ms, 3 s and 10 hours."""
    at = data.index(b"\x44\x89\x88") + 3
    for milliseconds in (1.0, 3000.0, 36e6):
        yield data[:at] + struct.pack(">d", milliseconds) + data[at + 8 :]


def lengths_of_mp3(data):
    """Yield an MP3 file whose head announces other lengths: 3 frames and 7 hours."""
    at = data.index(b"Info\0\0\0\x0f") + 8
    for frames in (3, 10**6):
        yield data[:at] + struct.pack(">II", frames, 200 * frames) + data[at + 8 :]


def test_files_as_browsers_and_streams_write_them(read):
    """Without a length, or with that of the recording's pauses."""
    webm, mp3, mp4 = (encode(TONE, kind) for kind in ("webm", "mp3", "m4a"))
    live = encode(TONE, "webm", live="1")
    assert b"\x44\x89\x88" not in live
    for other in (live, *lengths_of_webm(webm)):
        assert np.array_equal(read(other), read(webm))
    for other in (encode(TONE, "mp3", write_xing="0"), *lengths_of_mp3(mp3)):
        assert len(read(other)) == pytest.approx(len(read(mp3)), abs=2100)
    assert mp4.index(b"mdat") < mp4.index(b"moov")
    other = encode(TONE, "m4a", movflags="frag_keyframe+empty_moov")
    assert len(read(other)) == pytest.approx(len(read(mp4)), abs=2100)


def test_a_head_that_announces_less_than_there_is(reader):
    """The limit holds for what is there."""
    other = bytearray(encode(TONE, "flac"))
    other[8 + 14 : 8 + 18] = struct.pack(">I", 16_000)
    files = [other, *lengths_of_webm(encode(TONE, "webm")), *lengths_of_mp3(encode(TONE, "mp3"))]
    files.append(encode(TONE, "webm", live="1"))
    for data in files:
        with pytest.raises(RequestError, match="too long: it has more than the limit of 1 s"):
            reader.read(data, len, max_seconds=1).result()


def test_a_sound_that_is_too_long_is_not_decoded_up_to_the_limit(reader):
    """A refusal for length precedes the error of damaged data after the first minute."""
    samples = np.zeros(16_000 * 130, np.float32)
    samples[16_000 * 90] = np.nan
    with pytest.raises(RequestError, match="more than the limit of 120 s"):
        reader.read(wav(samples, code=3), len, max_seconds=120).result()
    with pytest.raises(RequestError, match="not finite"):
        reader.read(wav(samples, code=3), len, max_seconds=130).result()


def test_a_short_sound_that_announces_hours(reader):
    """More than a minute, so that it is measured."""
    data = bytearray(encode(chirp(62.0), "opus"))
    at = data.rindex(b"OggS") + 6
    data[at : at + 8] = struct.pack("<q", 48_000 * 36_000)
    mp3 = bytearray(encode(chirp(62.0), "mp3"))
    at = mp3.index(b"Xing" if b"Xing" in mp3 else b"Info") + 8
    mp3[at : at + 4] = struct.pack(">I", 2**24)
    endless = wav(np.zeros(62 * 16_000, "<i2"), nbytes=2**32 - 1)
    for file in (bytes(data), bytes(mp3), endless):
        count = reader.read(file, len, max_seconds=70).result()
        assert count == pytest.approx(62 * 16_000, abs=16_000)


def test_tags_before_the_sound(read):
    tag = b"ID3\x04\0\0\0\0\x02\x01" + bytes(257)
    assert np.array_equal(read(tag + encode(TONE, "flac")), read(encode(TONE, "flac")))
    assert len(read(tag + encode(TONE, "mp3"))) == 32_000
    assert np.array_equal(read(tag + encode(TONE, "aac")), read(encode(TONE, "aac")))


NAN = TONE[0].copy()
NAN[9] = np.nan
PLAYLIST = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "file is empty"),
        (b"a", "no sound of a supported format"),
        (PLAYLIST, "no sound of a supported format"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "no sound of a supported format"),
        (b"RIFF\0\0\0\0AVI LIST", "no sound of a supported format"),
        (b"%PDF-1.7\n" + wav(INT16), "no sound of a supported format"),
        (b"ID3\x04\0\0\0\0\0\0" + PLAYLIST, "damaged or cut off"),
        (b"RIFF\0\0\0\0WAVE", "damaged or cut off"),
        (b"\xff\xfb" + bytes(1000), "damaged or cut off"),
        (b"OggS" + random.Random(0).randbytes(1000), "damaged or cut off"),
        (b"\0\0\0\x20ftypM4A " + bytes(100), "damaged or cut off"),
        (wav(INT16[:0]), "no samples"),
        (wav(INT16)[:30_000], r"cut off: .* 2\.0 s .* 0\.9 s are there"),
        (wav(NAN, code=3), "not finite"),
        (wav(TONE[0] * np.float32(1e30), code=3), "not finite numbers, or are huge"),
        (wav(INT16[:999], rate=1), "1 samples a second; send one with 1000 to 768000"),
        (wav(INT16, rate=4 * 10**6), "4000000 samples a second"),
        (wav(np.zeros(999, "<i2"), code=0x161), "encoded as wmav2"),
    ],
    ids=itertools.count(),
)
def test_files_that_are_refused(read, data, message):
    with pytest.raises(RequestError, match=message) as caught:
        read(data)
    assert caught.value.param == "file"
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("kind", ["flac", "m4a", "webm"])
def test_files_that_are_cut(read, kind):
    data = encode(chirp(5.0), kind)
    with pytest.raises(RequestError, match="cut off"):
        read(data[: len(data) // 2])


def test_hours_of_silence_in_a_small_file(read):
    bomb = bytearray(encode(np.zeros((1, 7300 * 1000), np.float32), "flac", 1000))
    assert len(bomb) < 2**21
    with pytest.raises(RequestError, match="7300 s, more than the limit of 7200 s"):
        read(bomb)
    # Without the length in the head, the reader stops in the middle.
    begin = bomb.index(b"fLaC") + 8 + 13
    bomb[begin] &= 0xF0
    bomb[begin + 1 : begin + 5] = bytes(4)
    with pytest.raises(RequestError, match="it has more than the limit of 7200 s"):
        read(bomb)


def test_a_movie_whose_sound_is_in_another_file(read):
    """A QuickTime file may name a file that has its samples; FFmpeg does not open it."""
    data = encode(TONE, "m4a")
    reference = b"\0\0\0\x0curl \0\0\0\x01"
    assert reference in data
    # The flag says that the samples are in this file; without it, a name follows.
    other = data.replace(reference, b"\0\0\0\x0curl \0\0\0\0")
    try:
        samples = read(other)
    except RequestError:
        return
    assert np.array_equal(samples, read(data))


@pytest.mark.parametrize("kind", CODECS)
def test_damaged_files_give_samples_or_a_request_error(read, kind):
    random_ = random.Random(kind)
    good = encode(chirp(0.5, 48_000, 2), kind, 48_000)
    for _ in range(12):
        data = bytearray(good)
        for _ in range(random_.choice([1, 5, 50])):
            data[random_.randrange(len(data))] = random_.randrange(256)
        try:
            samples = read(data[: random_.randrange(len(data))] if random_.random() < 0.2 else data)
        except RequestError:
            continue
        assert np.isfinite(samples).all()
    assert len(read(good)) > 6000


@pytest.fixture(scope="module")
def parts():
    made = AudioParts()
    yield made
    made.close()


@pytest.mark.parametrize("kind", CODECS)
def test_parts_are_the_whole(read, parts, kind):
    data = encode(chirp(3.0, 48_000, 2), kind, 48_000)
    whole = read(data)
    seconds, found = parts.open(data, 10_000)
    found = list(found)
    assert [len(part) for part in found[:-1]] == [10_000] * (len(whole) // 10_000)
    assert len(found[-1]) == len(whole) % 10_000
    assert np.array_equal(np.concatenate(found), whole)
    # FFmpeg cannot tell the length of AAC without a container.
    assert seconds == pytest.approx(3.0, abs=0.1) or kind == "aac"


def test_several_sounds_in_parts(read, parts):
    """Each has a process of its own while it is open."""
    files = [wav(INT16[:count]) for count in (30_000, 20_000, 5_000, 0)]
    opened = [parts.open(file, 10_000)[1] for file in files[:3]]
    firsts = [next(it) for it in opened]
    for file, first, rest in zip(files, firsts, opened, strict=False):
        assert np.array_equal(np.concatenate([first, *rest]), read(file))
    for data, message in (
        (b"", "file is empty"),
        (b"no sound at all", "no sound of a supported format"),
    ):
        with pytest.raises(RequestError, match=message):
            parts.open(data, 10_000)
    for data, message in (
        (files[3], "contains no samples"),
        (encode(chirp(9.0), "flac")[:60_000], "cut off"),
    ):
        with pytest.raises(RequestError, match=message):
            list(parts.open(data, 10_000)[1])
    assert len(list(parts.open(files[0], 10_000)[1])) == 4


def test_a_part_of_a_lost_process(parts):
    _, found = parts.open(wav(INT16), 10_000)
    next(found)
    next(found)
    (process,) = [it for it in parts._all if it not in parts._free]
    process._all[0].stop()
    with pytest.raises(OctavoError):
        list(found)


def test_the_process_holds_a_file_once():
    """A second copy would exceed the bound; the parent's own copy is the caller's."""
    nbytes = 100 * 2**20
    with contextlib.closing(AudioParts()) as parts:
        list(parts.open(wav(INT16), 10_000)[1])
        status = Path(f"/proc/{parts._all[0]._all[0].pid}/status")

        def peak():
            return 1024 * int(re.search(r"VmHWM:\s*(\d+) kB", status.read_text())[1])

        before = peak()
        _, found = parts.open(wav(np.zeros(nbytes // 2, "<i2")), 10_000)
        next(found)
        assert nbytes < peak() - before < 1.5 * nbytes
        found.close()


def test_files_that_are_too_large(parts, monkeypatch):
    monkeypatch.setattr("octavo.media.audio.MAX_BYTES_IN_PARTS", 1000)
    with pytest.raises(RequestError, match="bytes, more than the limit of 1000") as caught:
        parts.open(wav(INT16), 10_000)
    assert caught.value.param == "file"
