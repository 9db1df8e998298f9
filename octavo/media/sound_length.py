"""Length of a sound by its packets, without decoding them: ten times as fast or faster.

What a file's head says about the length may be wrong, so it is not used. MP4 and Matroska files
have tables of the packets' lengths, which may be wrong, too: there, a packet has at most the length
of a frame of its codec, and none if that is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import av.container
from av.audio.codeccontext import AudioCodecContext
from av.packet import Packet

# Seconds of a packet.
_Length: TypeAlias = "Callable[[Packet[Any]], float]"

_MOST_OPUS_SECONDS = 0.12
# Samples a second by the index in the head of a frame of AAC (ADTS), and samples of a frame.
_ADTS_RATES = (
    *(96_000, 88_200, 64_000, 48_000, 44_100, 32_000, 24_000, 22_050, 16_000, 12_000, 11_025),
    *(8000, 7350),
)
_ADTS_SAMPLES = 1024
_VORBIS = b"\x01vorbis"


def least_seconds(container: av.container.InputContainer, demuxer: str, enough: float) -> float:
    """Return the seconds that the first sound of a file has at least; stop beyond `enough`.

    Damaged packets count as well.

    Args:
        container: the file, of which nothing has been read.
        demuxer: FFmpeg's name of its format.
        enough: seconds.

    Raises:
        FFmpegError: the file is damaged.
    """
    stream = container.streams.audio[0]
    codec = stream.codec_context
    time_base = float(stream.time_base or 0)

    def by_content(packet: Packet[Any]) -> float:
        # FFmpeg's demuxers of these formats compute it from the packet itself.
        return (packet.duration or 0) * time_base

    def by_frame(packet: Packet[Any]) -> float:
        return min(by_content(packet), most)

    length: _Length = by_content
    if codec.name == "opus":
        length = _opus_seconds
    elif demuxer == "aac":
        length = _adts_seconds
    elif demuxer in ("mov", "matroska"):
        most = _frame_samples(codec) / codec.sample_rate if codec.sample_rate else 0.0
        length = by_frame
    seconds = 0.0
    for packet in container.demux(stream):
        if packet.size and not packet.is_discard:
            seconds += length(packet)
            if seconds > enough:
                break
    return seconds


def _frame_samples(codec: AudioCodecContext) -> int:
    """Return the most samples of a frame; 0: unknown."""
    head = codec.extradata or b""
    if codec.name == "flac":
        return int.from_bytes(head[2:4])
    if codec.name == "vorbis" and len(sizes := head[head.find(_VORBIS) :][28:29]) == 1:
        return 1 << (sizes[0] >> 4) >> 1  # half of the longer one of the two blocks
    return codec.frame_size


def _opus_seconds(packet: Packet[Any]) -> float:
    """Return the seconds of an Opus packet; RFC 6716, section 3.1."""
    data = memoryview(packet)
    config, code = data[0] >> 3, data[0] & 3
    if config < 12:  # SILK
        frame = (0.01, 0.02, 0.04, 0.06)[config & 3]
    elif config < 16:  # both
        frame = (0.01, 0.02)[config & 1]
    else:  # CELT
        frame = 0.0025 * (1 << (config & 3))
    if code < 3:
        num_frames = 1 if code == 0 else 2
    else:
        num_frames = data[1] & 63 if len(data) > 1 else 0
    seconds = num_frames * frame
    return seconds if seconds < _MOST_OPUS_SECONDS + 1e-6 else 0.0


def _adts_seconds(packet: Packet[Any]) -> float:
    """Return the seconds of a frame of AAC by its own head: joined files differ."""
    data = memoryview(packet)
    index = data[2] >> 2 & 15 if len(data) > 2 else len(_ADTS_RATES)
    return _ADTS_SAMPLES / _ADTS_RATES[index] if index < len(_ADTS_RATES) else 0.0
