"""Sound files for tests, encoded by PyAV."""

import io
import struct

import av
import numpy as np

CODECS = {
    "wav": ("wav", "pcm_s16le"),
    "flac": ("flac", "flac"),
    "mp3": ("mp3", "libmp3lame"),
    "ogg": ("ogg", "vorbis"),
    "opus": ("ogg", "libopus"),
    "m4a": ("ipod", "aac"),
    "webm": ("webm", "libopus"),
    "aac": ("adts", "aac"),
}
# FFmpeg's own encoder of Vorbis knows stereo only.
_OPTIONS = {"ogg": {"strict": "experimental"}}


def chirp(seconds, rate=16_000, channels=1):
    """Return a tone from 200 to 1,200 Hz that swells, float32 [channels, samples]."""
    t = np.arange(round(seconds * rate)) / rate
    tone = np.sin(2 * np.pi * (200 + 500 * t / seconds) * t) * (0.3 + 0.2 * np.sin(3 * t))
    return np.repeat(tone[None].astype(np.float32), channels, 0)


def encode(samples, kind, rate=16_000, with_pictures=False, **options):
    """Return a file of float32 [channels, samples].

    `with_pictures` adds a stream of pictures; `options` are those of FFmpeg's muxer.
    """
    container_format, codec = CODECS[kind]
    file = io.BytesIO()
    with av.open(file, "w", format=container_format, options=options) as container:
        video = None
        if with_pictures:
            video = container.add_stream("libvpx" if kind == "webm" else "mpeg4", rate=10)
            video.width = video.height = 32
            video.pix_fmt = "yuv420p"
        layout = "mono" if len(samples) == 1 else "stereo"
        stream = container.add_stream(codec, rate=rate, layout=layout, options=_OPTIONS.get(kind))
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples), "fltp", layout)
        frame.sample_rate, frame.pts = rate, 0
        resampler = av.AudioResampler(
            stream.format.name, layout, rate, frame_size=stream.codec_context.frame_size or 4096
        )
        if video is not None:
            for i in range(5):
                picture = av.VideoFrame.from_ndarray(np.zeros((48, 32), np.uint8), "yuv420p")
                picture.pts = i
                container.mux(video.encode(picture))
            container.mux(video.encode())
        for piece in (*resampler.resample(frame), *resampler.resample(None)):
            container.mux(stream.encode(piece))
        container.mux(stream.encode())
    return file.getvalue()


def extensible_wav(data, bits, code, rate=16_000, byte_rate=None):
    """Return a WAV file with the long head: `code` is 1 for integers, 3 for floats."""
    size = bits // 8
    byte_rate = rate * size if byte_rate is None else byte_rate
    head = struct.pack("<HHIIHHHHI", 0xFFFE, 1, rate, byte_rate, size, bits, 22, bits, 4)
    head += struct.pack("<H", code) + bytes.fromhex("000000001000800000aa00389b71")
    body = b"WAVEfmt " + struct.pack("<I", len(head)) + head
    body += b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def wav(samples, rate=16_000, nbytes=None, code=1):
    """Return a WAV file of [samples]: int16, or float32 (code 3).

    `nbytes` is the size of the data in the head.
    """
    data = samples.tobytes()
    size = samples.itemsize
    nbytes = len(data) if nbytes is None else nbytes
    head = struct.pack("<IHHIIHH", 16, code, 1, rate, rate * size, size, 8 * size)
    body = b"WAVEfmt " + head + b"data" + struct.pack("<I", nbytes) + data
    return b"RIFF" + struct.pack("<I", min(2**32 - 1, nbytes + 36)) + body
