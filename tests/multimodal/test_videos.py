"""Videos read by the helper process: frames of every format, and files that are damaged or huge."""

import io
import struct
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image

from octavo.errors import RequestError, UnsupportedError
from octavo.multimodal.processors.registry import make_video_processor
from octavo.multimodal.videos import VideoReader
from tests.videos import frames, smooth_frames, video_file

SETTINGS = {
    "size": {"shortest_edge": 3136, "longest_edge": 100_000},
    "resample": 3,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "placeholder": "<|video_pad|>",
    "embed_token": "<|video_pad|>",
    "num_frames": 6,
    "fps": None,
}
COUNT, HEIGHT, WIDTH = 40, 56, 84
PIXELS = smooth_frames(COUNT, HEIGHT, WIDTH)
H264 = video_file(PIXELS, bf="2", g="9")
WEBM = video_file(frames(COUNT, 16, 16), "webm", "libvpx-vp9")


@pytest.fixture(scope="module")
def reader():
    reader = VideoReader("qwen3_vl", SETTINGS, num_processes=1)
    yield reader
    reader.close()


def read(reader, file, **settings):
    return reader.read(file, "messages", settings).result()


def levels(item):
    """Return the mean level of each part, in levels of 255."""
    return [
        float(np.frombuffer(part.fields["pixel_values"].data, np.float32).mean()) * 127.5 + 127.5
        for part in item.parts
    ]


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("mp4", "libx264"),
        ("mov", "mpeg4"),
        ("matroska", "libx264"),
        ("webm", "libvpx-vp9"),
        ("avi", "mpeg4"),
        ("gif", "gif"),
    ],
)
def test_chosen_frames_of_every_format(reader, kind, codec):
    options = {"bf": "3", "g": "7"} if codec == "libx264" else {}
    item = read(reader, video_file(PIXELS, kind, codec, **options))
    chosen = [0, 7, 15, 23, 31, 39]
    means = [PIXELS[[a, b]].mean() for a, b in zip(chosen[::2], chosen[1::2], strict=True)]
    np.testing.assert_allclose(levels(item), means, atol=3)
    assert [part.place.grid for part in item.parts] == [(1, 2, 3)] * 3
    # Four frames a second; a part has the mean of the times of its two frames.
    texts = [part.place.pieces[0] for part in item.parts]
    times = [f"<{(a + b) / 8:.1f} seconds>" for a, b in zip(chosen[::2], chosen[1::2], strict=True)]
    assert texts == [f"{time}<|vision_start|>" for time in times]
    assert item.modality == "video"


@pytest.mark.parametrize("options", [{"g": "4"}, {"bf": "2", "g": "40"}])
def test_frames_that_an_edit_list_leaves_out_are_not_counted(reader, options):
    """An MP4 that a phone has cut holds frames before its begin: those from a key frame on."""
    file = io.BytesIO()
    muxer = {"use_editlist": "1", "avoid_negative_ts": "disabled"}
    with av.open(file, "w", format="mp4", options=muxer) as container:
        stream = container.add_stream("libx264", rate=4, options=options)
        stream.height, stream.width, stream.pix_fmt = HEIGHT, WIDTH, "yuv420p"
        images = [av.VideoFrame.from_ndarray(image, format="rgb24") for image in PIXELS]
        for packet in [p for image in (*images, None) for p in stream.encode(image)]:
            left_out = int(10 / 4 / packet.time_base)
            packet.pts, packet.dts = packet.pts - left_out, packet.dts - left_out
            container.mux(packet)
    item = read(reader, file.getvalue())
    shown = [10, 15, 21, 27, 33, 39]
    means = [PIXELS[[a, b]].mean() for a, b in zip(shown[::2], shown[1::2], strict=True)]
    np.testing.assert_allclose(levels(item), means, atol=3)
    assert item.parts[0].place.pieces[0] == "<0.6 seconds><|vision_start|>"
    assert len(read(reader, file.getvalue(), num_frames=-1).parts) == 15


def test_request_chooses_frames(reader):
    assert len(read(reader, H264, num_frames=9).parts) == 5
    assert len(read(reader, H264, num_frames=-1).parts) == COUNT // 2
    assert len(read(reader, H264, fps=0.2).parts) == 1
    assert len(read(reader, H264, num_frames=20, fps=1.4).parts) == 7
    assert read(reader, H264, size={"shortest_edge": 1, "longest_edge": 9408}).num_embeds == 3
    with pytest.raises(RequestError, match="num_frames"):
        read(reader, H264, num_frames=0)
    with pytest.raises(RequestError, match=r"fps.*at most 1000"):
        read(reader, H264, fps=1e9)


def still(count, **options):
    """Return a video of a gray picture."""
    return video_file([np.full((32, 32, 3), 99, np.uint8)] * count, fps=30, **options)


def test_frames_beyond_the_chosen_ones_are_not_kept(reader):
    item = read(reader, still(3000, preset="ultrafast"), num_frames=4)
    assert len(item.parts) == 2
    with pytest.raises(
        RequestError, match=r"it has 3000 frames, and at most 768 are read; set num"
    ):
        read(reader, still(3000, preset="ultrafast"), num_frames=-1)


def picture_file():
    file = io.BytesIO()
    Image.fromarray(PIXELS[0]).save(file, "PNG")
    return file.getvalue()


def sound_file():
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.float32), "fltp", "mono")
        frame.sample_rate = 16_000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def changing_sizes():
    """Return a file with pictures of two sizes: the second of two streams follows the first."""
    file = io.BytesIO()
    with av.open(file, "w", format="avi") as container:
        stream = container.add_stream("mjpeg", rate=4)
        stream.height, stream.width, stream.pix_fmt = 32, 32, "yuvj420p"
        for i in range(4):
            side = 32 if i < 2 else 64
            image = io.BytesIO()
            Image.fromarray(np.full((side, side, 3), 90, np.uint8)).save(image, "JPEG")
            packet = av.Packet(image.getvalue())
            packet.stream, packet.pts, packet.dts = stream, i, i
            packet.time_base = Fraction(1, 4)
            container.mux(packet)
    return file.getvalue()


def faststart(file, path):
    """Return an MP4 file whose head stands before its frames."""
    with (
        av.open(io.BytesIO(file)) as given,
        av.open(str(path), "w", format="mp4", options={"movflags": "faststart"}) as made,
    ):
        stream = made.add_stream_from_template(given.streams.video[0])
        for packet in given.demux(given.streams.video[0]):
            if packet.dts is not None:
                packet.stream = stream
                made.mux(packet)
    return path.read_bytes()


def test_a_last_frame_that_is_shown_for_long(reader):
    """Recorders of screens write few frames, and the length of the recording."""
    at = WEBM.index(b"\x44\x89\x88") + 3
    longer = WEBM[:at] + struct.pack(">d", 60_000.0) + WEBM[at + 8 :]
    assert levels(read(reader, longer)) == levels(read(reader, WEBM))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: b"", "begins with b''"),
        (lambda: b"#EXTM3U\nhttp://x/y", "no video of a supported format"),
        (picture_file, "is a picture; send it as image_url"),
        (sound_file, "has no pictures"),
        (lambda: H264[: len(H264) // 3], "damaged or cut off"),
        (lambda: H264[:300], "damaged or cut off"),
        (lambda: WEBM[: len(WEBM) // 2], r"cut off: its head announces \d+ bytes"),
        (lambda: H264[:60] + bytes(len(H264) - 60), "damaged|no pictures"),
        (changing_sizes, "change their size from 32 x 32 to 64 x 64"),
        (lambda: b"\x1a\x45\xdf\xa3" + bytes(500), "damaged|no pictures"),
        (lambda: b"GIF89a" + struct.pack("<HHBBB", 9, 9, 0, 0, 0), "damaged|no frames|no pictures"),
    ],
)
def test_bad_files(reader, make, message):
    """A bad file is refused, and the next one is read."""
    with pytest.raises(RequestError, match=message):
        read(reader, make())
    assert len(read(reader, H264).parts) == 3


def test_a_file_whose_end_is_missing_is_refused(reader, tmp_path):
    file = faststart(video_file(frames(30, 64, 64)), tmp_path / "a.mp4")
    assert len(read(reader, file).parts) == 3
    with pytest.raises(RequestError, match="cut off"):
        read(reader, file[: len(file) * 2 // 3])


def test_other_codecs_are_refused_by_name(reader):
    file = video_file(PIXELS[:3], "avi", "wmv1")
    with pytest.raises(UnsupportedError, match=r"encoded as (wmv1|an unknown)"):
        read(reader, file)


def test_the_size_of_all_frames_is_limited(reader, monkeypatch):
    monkeypatch.setattr("octavo.multimodal.videos._MAX_NBYTES", 100_000)
    with pytest.raises(RequestError, match=r"its 6 frames have more than 100000 bytes"):
        read(reader, H264)


def test_equal_frames_at_other_times_are_other_parts():
    """The positions of the rows of Qwen2-VL depend on the time, so the prefix cache must, too."""
    processor = make_video_processor("qwen2_vl", SETTINGS)
    reader = VideoReader("qwen2_vl", processor.settings.fields, num_processes=1)
    try:
        item = read(reader, still(8, preset="ultrafast"))
    finally:
        reader.close()
    first, second, third = item.parts
    assert first.fields == second.fields == third.fields
    assert len({part.digest for part in item.parts}) == 3
    assert [part.place.time for part in item.parts] == [0, 1, 2]
