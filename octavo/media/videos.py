"""Decoding of video files to frames, by PyAV, that is by FFmpeg's libraries.

Only a helper process imports this module. The first bytes of a file choose the one demuxer that
FFmpeg may use, as for sounds (`audio_jobs.py`). The packets of a file are listed first, without
decoding; then the chosen frames are decoded one after the other.
"""

from __future__ import annotations

import bisect
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import av
import av.container
import av.error
import av.logging
import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError, UnsupportedError
from octavo.media.container import open_container

FORMATS = "MP4, MOV, WebM, Matroska, AVI or GIF"
MAX_FRAMES = 2**20
"""Most frames of a file."""
MAX_PIXELS = 2**24
"""Most pixels of a frame."""
MAX_SECONDS = 4 * 3600
"""Longest video in seconds."""
_DECODERS = {
    "av1", "ffv1", "gif", "h264", "hevc", "libdav1d", "mjpeg", "mpeg1video", "mpeg2video", "mpeg4",
    "theora", "vp8", "vp9",
}  # fmt: skip
_PICTURES = (b"\x89PNG", b"\xff\xd8\xff", b"BM", b"II*\0", b"MM\0*")
# Formats in which one may begin to decode at any key frame.
_SEEKABLE = ("mov", "matroska")
# A file may lack this part of the frames, or of the bytes, that its head announces.
_LACKING = 0.02
# Bytes in which the segment of a Matroska file begins.
_HEAD = 2**16
_DEFAULT_FPS, _MAX_FPS = 24.0, 1000.0
_QUARTER = 90

av.logging.set_level(None)


def demuxer_of(data: memoryview) -> str:
    """Return FFmpeg's name of the format that the first bytes of a file show.

    Raises:
        RequestError: it is none that is supported.
    """
    head = bytes(data[:16])
    if head[4:8] == b"ftyp":
        return "mov"
    if head[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    if head[:4] == b"GIF8":
        return "gif"
    if head.startswith(_PICTURES) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP"):
        raise RequestError("the file is a picture; send it as image_url.")
    raise RequestError(
        f"the file is no video of a supported format (it begins with {head[:12]!r}); send "
        f"{FORMATS}."
    )


@dataclass(frozen=True)
class VideoIndex:
    """The frames of a file, before any is decoded."""

    demuxer: str
    times: tuple[int, ...]
    """Time stamp of each frame, in order; empty: they are not known."""
    keys: tuple[int, ...]
    """Time stamps of the key frames, in order."""
    count: int
    """Number of frames."""
    fps: float
    """Frames a second."""


def read_index(data: memoryview) -> VideoIndex:
    """Return the frames of a video file.

    Raises:
        RequestError: it is no video, is damaged or cut off, or breaks a limit.
        UnsupportedError: its codec is another one.
    """
    name = demuxer_of(data)
    if name == "matroska":
        _check_segment(data)
    try:
        with _open(data, name) as container:
            return _read_index(container, name)
    except av.error.FFmpegError as error:
        raise _damaged(name, error) from None


def read_frames(
    data: memoryview, index: VideoIndex, chosen: Sequence[int]
) -> Iterator[NDArray[np.uint8]]:
    """Yield the chosen frames of a video: uint8 [height, width, 3].

    They are rotated as the file says.

    Args:
        data: the file.
        index: its frames.
        chosen: indices of frames, in ascending order, each at most once.

    Raises:
        RequestError: the file is damaged or cut off, or the sizes of its frames change.
    """
    size: tuple[int, ...] | None = None
    try:
        with _open(data, index.demuxer) as container:
            container.streams.video[0].codec_context.thread_count = 1
            count = 0
            for frame in _decode(container, index, chosen):
                image = cast(NDArray[np.uint8], frame.to_ndarray(format="rgb24"))
                pixels = np.rot90(image, round(frame.rotation / _QUARTER))
                if size is None:
                    size = pixels.shape
                if pixels.shape != size:
                    raise RequestError(
                        f"the frames change their size from {size[1]} x {size[0]} to "
                        f"{pixels.shape[1]} x {pixels.shape[0]} pixels; send a video of one size."
                    )
                yield pixels
                count += 1
            if count != len(chosen):
                raise RequestError(
                    f"the file is damaged or cut off: {count} of {len(chosen)} chosen frames can "
                    "be decoded."
                )
    except av.error.FFmpegError as error:
        raise _damaged(index.demuxer, error) from None


def _open(data: memoryview, name: str) -> av.container.InputContainer:
    return open_container(io.BytesIO(data), name, _DECODERS)


def _damaged(name: str, error: av.error.FFmpegError) -> RequestError:
    return RequestError(
        f"the file is damaged or cut off: it begins as {name}, and then: {error.strerror}."
    )


def _check_segment(data: memoryview) -> None:
    """Refuse a Matroska file that ends before its segment does (RFC 8794, RFC 9559).

    The length in seconds would not do: the last frame may be shown for any time. Programs that
    cannot seek announce no size.
    """
    at, segment = 0, 0x18538067
    while at + 18 <= min(len(data), _HEAD):
        length = 9 - data[at].bit_length()  # of the element's name
        kind = int.from_bytes(data[at : at + length])
        at += length
        length = 9 - data[at].bit_length()  # of its size, whose first bit of 1 is no part of it
        size, unknown = int.from_bytes(data[at : at + length]), (1 << 7 * length) - 1
        size &= unknown
        at += length
        if kind == segment:
            there = len(data) - at
            if size != unknown and size - there > _LACKING * size:
                raise RequestError(
                    f"the file is cut off: its head announces {size} bytes, and {there} are "
                    "there; send the whole file."
                )
            return
        at += size


def _read_index(container: av.container.InputContainer, name: str) -> VideoIndex:
    if not container.streams.video:
        raise RequestError("the file has no pictures; send a video.")
    stream = container.streams.video[0]
    context = stream.codec_context
    codec = None if context is None else context.name
    if codec not in _DECODERS:
        raise UnsupportedError(
            f"the video is encoded as {codec or 'an unknown codec'}, which is not supported; send "
            "H.264, H.265, VP8, VP9 or AV1."
        )
    if not 0 < context.width * context.height <= MAX_PIXELS:
        raise RequestError(
            f"the frames have {context.width} x {context.height} pixels; from 1 to {MAX_PIXELS} "
            "are allowed. Make the video smaller."
        )
    times: list[int | None] = []
    keys: list[int] = []
    end = 0
    for packet in container.demux(stream):
        if not packet.size or packet.is_discard:  # the latter is decoded, but not shown
            continue
        times.append(packet.pts)
        end = max(end, (packet.pts or 0) + (packet.duration or 0))
        if packet.is_keyframe and packet.pts is not None:
            keys.append(packet.pts)
        if len(times) > MAX_FRAMES:
            raise RequestError(
                f"the video has more than {MAX_FRAMES} frames, the limit; send a part of it."
            )
    count = len(times)
    if not count:
        raise RequestError("the video has no frames.")
    announced = stream.frames
    if name == "mov" and stream.duration:  # an edit list may leave frames out
        shown = max(1, end - (stream.start_time or 0))
        announced = min(announced, round(count * stream.duration / shown))
    if announced - count > max(1, _LACKING * announced):
        raise RequestError(
            f"the file is cut off: its head announces {announced} frames, and {count} are "
            "there; send the whole file."
        )
    rate = stream.average_rate
    fps = float(rate) if rate else _DEFAULT_FPS
    if not 0 < fps <= _MAX_FPS or count / fps > MAX_SECONDS:
        raise RequestError(
            f"the video has {count} frames at {fps:g} a second; it may have at most {_MAX_FPS:g} a "
            f"second, and last at most {MAX_SECONDS} s. Send a part of it."
        )
    known = sorted({time for time in times if time is not None})
    if name not in _SEEKABLE or len(known) != count:
        known, keys = [], []
    return VideoIndex(name, tuple(known), tuple(sorted(keys)), count, fps)


def _decode(
    container: av.container.InputContainer, index: VideoIndex, chosen: Sequence[int]
) -> Iterator[av.VideoFrame]:
    """Yield the chosen frames, and begin anew at a key frame where that is nearer."""
    stream = container.streams.video[0]
    frames = _frames(container)
    if not index.times:
        wanted = set(chosen)
        for i, frame in enumerate(frames):
            if i in wanted:
                yield frame
            if i == chosen[-1]:
                return
        return
    reached = -1  # index of the last decoded frame
    for i in chosen:
        target = index.times[i]
        before = bisect.bisect_right(index.keys, target) - 1
        key = index.keys[before] if before >= 0 else index.times[0]
        if reached < 0 or key > index.times[reached]:
            container.seek(key, stream=stream)
            frames = _frames(container)
        for frame in frames:
            if frame.pts is not None and frame.pts >= target:
                yield frame
                reached = i
                break
        else:
            return


def _frames(container: av.container.InputContainer) -> Iterator[av.VideoFrame]:
    """Yield decoded frames; those of a damaged packet are left out, as FFmpeg does."""
    for packet in container.demux(container.streams.video[0]):
        try:
            frames = packet.decode()
        except av.error.InvalidDataError:
            continue
        for frame in frames:
            assert isinstance(frame, av.VideoFrame)
            if not 0 < frame.width * frame.height <= MAX_PIXELS:
                raise RequestError(f"a frame has {frame.width} x {frame.height} pixels.")
            yield frame
