"""Opening of sound and video files with PyAV (FFmpeg), in helper processes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import av
import av.container


def open_container(
    file: Any, demuxer: str, decoders: Collection[str]
) -> av.container.InputContainer:
    """Open a file with one demuxer and some decoders; FFmpeg may use no protocol.

    Args:
        file: object with `read` and `seek`.
        demuxer: FFmpeg's name of the format.
        decoders: FFmpeg's names of the decoders that may be used.

    Raises:
        FFmpegError: the file is damaged.
    """
    container: av.container.InputContainer = av.open(
        file,
        "r",
        format=demuxer,
        options={
            "protocol_whitelist": "none",
            "format_whitelist": demuxer,
            "codec_whitelist": ",".join(sorted(decoders)),
        },
        metadata_errors="ignore",
    )
    return container
