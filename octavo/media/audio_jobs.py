"""Jobs of the helper process that reads sounds with PyAV, that is with FFmpeg's libraries.

The first bytes of a file choose the one demuxer that FFmpeg may use, so no playlist and no other
format that names files or addresses is ever parsed. FFmpeg may use no protocol, and only decoders
of common sounds; the process can open no file anyway (`media/process.py`). FFmpeg's libswresample
resamples each channel, with its default filter.
"""

from __future__ import annotations

import contextlib
import io
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import av
import av.audio
import av.error
import av.logging
import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.media.audio import SAMPLE_RATE
from octavo.media.container import open_container
from octavo.media.process import Job
from octavo.media.sound_length import least_seconds
from octavo.system.limited_process import Buffer

_FORMATS = "WAV, FLAC, MP3, Ogg, M4A, MP4, WebM or AAC"
_DECODERS = {
    "aac", "adpcm_ima_wav", "adpcm_ms", "alac", "flac", "mp1float", "mp2float", "mp3", "mp3float",
    "opus", "pcm_alaw", "pcm_f32be", "pcm_f32le", "pcm_f64le", "pcm_mulaw", "pcm_s16be",
    "pcm_s16le", "pcm_s24be", "pcm_s24le", "pcm_s32le", "pcm_u8", "vorbis",
}  # fmt: skip
_ID3_HEAD = 10
# Samples are in [-1, 1]; integers that were stored as float are at most 2^31.
_MAX_SAMPLE = 2.0**31
# A file may lack this part of the sound that its head announces, and this many seconds.
_LACKING, _LACKING_SECONDS = 0.02, 1.0
# One damaged packet in this number of packets is the limit.
_PACKETS_PER_DAMAGED = 10
_ENDLESS = 0x7FFF0000
# A sound of up to this number of seconds is decoded as fast as it could be measured.
_SHORT = 60
# What a sound may be longer by its packets than decoded, in seconds.
_PADDING = 1.0
# The id of the element of Matroska that contains the sound.
_SEGMENT = b"\x18\x53\x80\x67"
# Samples a second. Resampling from others would take long.
_MIN_RATE, _MAX_RATE = 1000, 768_000

av.logging.set_level(None)


def demuxer_of(data: memoryview) -> str:
    """Return FFmpeg's name of the format that the first bytes of a file show.

    Raises:
        RequestError: it is none that is supported.
    """
    head = bytes(data[:16])
    if head[:3] == b"ID3" and len(head) >= _ID3_HEAD:
        size = 0
        for byte in head[6:_ID3_HEAD]:
            size = size << 7 | byte & 0x7F
        begin = _ID3_HEAD + size
        head = bytes(data[begin : begin + 4])
        # Nothing but these formats has such a tag.
        return "flac" if head == b"fLaC" else "aac" if _is_adts(head) else "mp3"
    if head[:4] in (b"RIFF", b"RF64", b"BW64") and head[8:12] == b"WAVE":
        return "wav"
    if head[4:8] == b"ftyp":
        return "mov"
    for magic, name in (
        (b"fLaC", "flac"),
        (b"OggS", "ogg"),
        (b"\x1a\x45\xdf\xa3", "matroska"),
    ):
        if head.startswith(magic):
            return name
    if len(head) > 2 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:
        return "aac" if _is_adts(head) else "mp3"
    raise RequestError(
        f"The file is no sound of a supported format (it begins with {head[:12]!r}); send "
        f"{_FORMATS}."
    )


def _is_adts(head: bytes) -> bool:
    """Return True if a frame of AAC begins; a frame of MP3 has a layer."""
    return len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0


def decode(max_seconds: int, files: list[memoryview]) -> tuple[None, list[NDArray[np.float32]]]:
    """Decode a sound; see `AudioReader.submit`.

    Args:
        max_seconds: longest sound.
        files: the file.

    Returns:
        None, and the samples, float32 [samples].

    Raises:
        RequestError: it is no sound, is damaged or too long.
    """
    (data,) = files
    with _open(data, max_seconds) as decoder:
        return None, [decoder.run()]


@contextlib.contextmanager
def _open(data: Buffer, max_seconds: int) -> Iterator[_Decoder]:
    """Open a file; errors of FFmpeg become a RequestError."""
    view = memoryview(data)
    name = demuxer_of(view)
    try:
        with open_container(_Input(view), name, _DECODERS) as container:
            part = {"wav": _wav_part, "matroska": _matroska_part}.get(name, lambda _: 1.0)(view)

            def is_too_long() -> bool:
                most = max_seconds + _PADDING
                with open_container(_Input(view), name, _DECODERS) as again:
                    return least_seconds(again, name, most) > most

            yield _Decoder(container, name, max_seconds, part, is_too_long)
    except av.error.FFmpegError as error:
        raise RequestError(
            f"The file is damaged or cut off: it begins as {name}, and then: {error.strerror}."
        ) from None


class _Input:
    """File in memory that FFmpeg reads; `io.BytesIO` would copy it.

    Args:
        data: the file.
    """

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most `size`."""
        found = bytes(self._data[self._at : self._at + size])
        self._at += len(found)
        return found

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place; return it."""
        begins = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}
        self._at = max(0, begins[whence] + offset)
        return self._at

    def tell(self) -> int:
        """Return the place."""
        return self._at


_parts: Iterator[NDArray[np.float32]] | None = None
"""Parts of the sound that `begin` opened."""


def begin(arguments: list[int], files: list[memoryview]) -> tuple[float, list[Any]]:
    """Open a sound that `proceed` decodes in parts; forget the one before.

    Args:
        arguments: longest sound in seconds, and the number of samples of a part.
        files: the file.

    Returns:
        The seconds of sound that its head announces, or an estimate; 0: unknown.

    Raises:
        RequestError: it is no sound, or too long.
    """
    global _parts
    _parts = None
    (data,), (max_seconds, size) = files, arguments

    def parts() -> Iterator[Any]:
        with _open(data, max_seconds) as decoder:
            yield decoder.seconds
            yield from decoder.parts(size)

    opened = parts()
    seconds = next(opened)
    _parts = opened
    return seconds, []


def proceed(_: None, files: list[memoryview]) -> tuple[None, list[NDArray[np.float32]]]:
    """Return the next part of the sound; one with fewer samples, even none, is the last.

    Raises:
        RequestError: the file is damaged or too long.
    """
    part = None if _parts is None else next(_parts, None)
    if part is None:
        raise RequestError("The process that read the file was lost; send the file again.")
    return None, [part]


def _wav_part(data: memoryview) -> float:
    """Return the part of a WAV file's samples that is there, at most 1."""
    begin = 12
    while begin + 8 < len(data):
        kind, size = struct.unpack_from("<4sI", data, begin)
        begin += 8
        if kind == b"data":
            # A program that cannot seek writes the largest number, or nearly.
            return _part(len(data) - begin, 0 if size >= _ENDLESS else size)
        begin += size + size % 2
    return 1.0


def _matroska_part(data: memoryview) -> float:
    """Return the part of a Matroska file's segment that is there, at most 1.

    A file that was written as a stream, as browsers do, does not tell its segment's size.
    """
    begin = 0
    while begin + 12 <= len(data):
        id_size, num_bytes = (9 - data[at].bit_length() for at in (begin, begin + 4))
        if id_size != 4 or num_bytes > 8:
            break
        size = int.from_bytes(data[begin + 4 : begin + 4 + num_bytes]) - (1 << 7 * num_bytes)
        is_segment = bytes(data[begin : begin + 4]) == _SEGMENT
        begin += 4 + num_bytes
        if is_segment:
            unknown = (1 << 7 * num_bytes) - 1
            return _part(len(data) - begin, 0 if size == unknown else size)
        begin += size
    return 1.0


def _part(there: int, announced: int) -> float:
    """Return `there` by `announced`, at most 1; 0 announces nothing."""
    return min(1.0, there / announced) if announced else 1.0


class _Decoder:
    """Reader of the first sound of a file.

    Args:
        container: the file.
        name: its format.
        max_seconds: longest sound.
        part: the part of the bytes that its head announces which is there, above 0, at most 1.
        is_too_long: returns True if the packets of the sound show that it is too long, in a small
            part of the time of decoding them; called if the sound is not short.
    """

    def __init__(
        self,
        container: av.container.InputContainer,
        name: str,
        max_seconds: int,
        part: float,
        is_too_long: Callable[[], bool],
    ) -> None:
        if not container.streams.audio:
            raise RequestError("The file contains no sound; send a file with one.")
        self._container, self._name = container, name
        self._stream = stream = container.streams.audio[0]
        codec = None if stream.codec_context is None else stream.codec_context.name
        if codec not in _DECODERS:
            raise RequestError(
                f"The file's sound is encoded as {codec or 'an unknown codec'}, which is not "
                f"supported; send {_FORMATS}."
            )
        self._max_samples = max_seconds * SAMPLE_RATE
        # One file must not use more cores than the process' limit of processor time expects.
        stream.codec_context.thread_count = 1
        self._part, self._is_too_long = part, is_too_long
        self._announced = 0.0
        # Of the other formats, the length is an estimate (MP3), is read from the end (Ogg), comes
        # from a rate that may be wrong (WAV), or is that of other streams, or of a recording with
        # its pauses, which programs insert into the files of browsers (WebM).
        if name in ("flac", "mov") and stream.duration and stream.time_base:
            self._announced = float(stream.duration * stream.time_base)
        if self._announced > max_seconds:
            raise self._too_long(f"{self._announced:.0f} s, more than")
        self._damaged = self._packets = 0

    @property
    def seconds(self) -> float:
        """Seconds of sound that the head announces, or an estimate; 0: unknown."""
        duration = self._container.duration
        return self._announced or (0.0 if duration is None else duration / av.time_base)

    def run(self) -> NDArray[np.float32]:
        """Return the samples, float32 [samples]."""
        # The system provides memory of this array only where samples are written.
        samples = np.empty(self._max_samples, np.float32)
        count = 0
        for block in self._checked_blocks():
            samples[count : count + len(block)] = block
            count += len(block)
        return samples[:count]

    def parts(self, size: int) -> Iterator[NDArray[np.float32]]:
        """Yield the samples in parts of `size`; the last one has fewer."""
        part, count = np.empty(size, np.float32), 0
        for block in self._checked_blocks():
            while len(block):
                some = min(len(block), size - count)
                part[count : count + some] = block[:some]
                count, block = count + some, block[some:]
                if count == size:
                    yield part
                    part, count = np.empty(size, np.float32), 0
        yield part[:count]

    def _checked_blocks(self) -> Iterator[NDArray[np.float32]]:
        """Yield the samples in blocks.

        Raises:
            RequestError: they are too many, or wrong; or in the end, that the file is damaged.
        """
        count = 0
        for block in self._blocks():
            was_short = count <= _SHORT * SAMPLE_RATE
            count += len(block)
            is_short = count <= _SHORT * SAMPLE_RATE
            if count > self._max_samples or (was_short and not is_short and self._is_too_long()):
                raise self._too_long("more than")
            # Comparisons with NaN are false.
            if len(block) and not (block.max() <= _MAX_SAMPLE and block.min() >= -_MAX_SAMPLE):
                raise RequestError(
                    "The file contains samples that are not finite numbers, or are huge; samples "
                    "are in [-1, 1]."
                )
            yield block
        if not count:
            raise RequestError("The file contains no samples; send a sound that is not empty.")
        if self._damaged * _PACKETS_PER_DAMAGED > self._packets:
            raise RequestError(
                f"The file is damaged: {self._damaged} of its {self._packets} packets cannot be "
                "decoded."
            )
        seconds = count / SAMPLE_RATE
        announced = self._announced or seconds / self._part
        if announced - seconds > max(_LACKING_SECONDS, _LACKING * announced):
            raise RequestError(
                f"The file is cut off: its head announces {announced:.1f} s of sound, and "
                f"{seconds:.1f} s are there; send the whole file."
            )

    def _too_long(self, has: str) -> RequestError:
        limit = self._max_samples // SAMPLE_RATE
        return RequestError(
            f"The sound is too long: it has {has} the limit of {limit} s; send parts."
        )

    def _blocks(self) -> Iterator[NDArray[np.float32]]:
        """Yield the samples in blocks."""
        resampler, resampled_from = None, None
        for frame in self._frames():
            kind = (frame.format.name, frame.layout.name, frame.sample_rate)
            if resampler is None or kind != resampled_from:  # joined files may change in the middle
                if not _MIN_RATE <= frame.sample_rate <= _MAX_RATE:
                    raise RequestError(
                        f"The sound has {frame.sample_rate} samples a second; send one with "
                        f"{_MIN_RATE} to {_MAX_RATE}."
                    )
                if resampler is not None:
                    yield from _arrays(resampler.resample(None))
                # PyAV reads beyond the planes of eight and more channels, so they share one.
                resampler = av.AudioResampler(format="flt", rate=SAMPLE_RATE)
                resampled_from = kind
            frame.pts = None
            yield from _arrays(resampler.resample(frame))
        if resampler is not None:
            yield from _arrays(resampler.resample(None))

    def _frames(self) -> Iterator[av.audio.AudioFrame]:
        """Yield decoded frames; a damaged packet is counted and left out, as FFmpeg does."""
        for packet in self._container.demux(self._stream):
            self._packets += 1
            try:
                frames = packet.decode()
            except av.error.InvalidDataError:
                self._damaged += 1
                continue
            for frame in frames:
                assert isinstance(frame, av.audio.AudioFrame)
                yield frame


def _arrays(frames: list[av.audio.AudioFrame]) -> Iterator[NDArray[np.float32]]:
    """Yield the mean of the channels of each frame, as Whisper's own reader computes it.

    FFmpeg's mix of float samples would be louder.
    """
    for frame in frames:
        samples: Any = frame.to_ndarray().reshape(-1, frame.layout.nb_channels)
        yield samples[:, 0] if samples.shape[1] == 1 else samples.mean(axis=1)


JOBS: Mapping[str, Job] = {"decode": decode, "begin": begin, "proceed": proceed}


def _import_all() -> None:
    """Decode a sound and a wrong file, so that the library imports now all that it needs later."""
    head = struct.pack("<IHHIIHH", 16, 1, 1, 8000, 16_000, 2, 16)
    body = b"WAVEfmt " + head + b"data" + struct.pack("<I", 8000) + bytes(8000)
    decode(1, [memoryview(b"RIFF" + struct.pack("<I", len(body)) + body)])
    with contextlib.suppress(RequestError):
        decode(1, [memoryview(b"fLaC" + bytes(8000))])


_import_all()
