"""Processors of videos against transformers: patches, sizes, and texts."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize

from octavo.errors import RequestError
from octavo.multimodal.processors.registry import make_processor, make_video_processor
from octavo.multimodal.processors.video import MAX_FRAMES, in_words
from tests.multimodal.processors.test_parity import CASES, make, picture
from tests.multimodal.test_videos import SETTINGS
from tests.videos import frames

OTHERS = {
    "smolvlm": {"size": {"longest_edge": 256}, "max_image_size": {"longest_edge": 84}}
    | {"image_seq_len": 4, "tile_patches": 36, "do_image_splitting": False},
    "gemma4": {"max_soft_tokens": 70, "pooling_kernel_size": 3, "patch_size": 16}
    | {"do_normalize": False},
    "internvl": {"size": {"height": 84, "width": 84}, "min_patches": 1, "max_patches": 12}
    | {"image_seq_length": 9, "tile_patches": 37},
    "llava_onevision": {"size": {"height": 84, "width": 84}, "patch_size": 14, "limit": 9}
    | {"image_grid_pinpoints": [[84, 84]]},
}


def processor(name, **settings):
    return make_video_processor(name, SETTINGS | OTHERS.get(name, {}) | settings)


def text_of(places, token):
    pieces = [piece for place in places for piece in place.pieces]
    return "".join(token * piece if isinstance(piece, int) else piece for piece in pieces)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl"])
@pytest.mark.parametrize("count", [4, 5])
def test_patches_have_successive_frames(name, count):
    """Each frame has the numbers that the processor of pictures makes of it, once in each patch."""
    ours, pictures = processor(name), make_processor("qwen2_vl", SETTINGS)
    video = frames(count, 60, 90)
    described = ours.frames(list(range(count)), count, 4.0, (60, 90))
    places = ours.places(described)
    rows, columns = 60 // 14 // 2 * 2, 90 // 14 // 2 * 2
    parts = list(ours.process(described, iter(video)))
    assert len(parts) == len(places) == -(-count // 2)
    for i, (part, place) in enumerate(zip(parts, places, strict=True)):
        assert part["image_grid_thw"].tolist() == [1, rows, columns]
        assert place.grid == (1, rows // 2, columns // 2)
        cut = part["pixel_values"].reshape(rows * columns, 3, 2, 14, 14)
        for j in range(2):
            alone = pictures.process(video[min(2 * i + j, count - 1)])["pixel_values"]
            np.testing.assert_array_equal(
                cut[:, :, j], alone.reshape(rows * columns, 3, 2, 14, 14)[:, :, 0]
            )


@pytest.mark.parametrize("size", [(60, 90), (700, 300), (20, 500), (1080, 1920)])
@pytest.mark.parametrize("count", [2, 7, 40])
def test_all_frames_of_qwen3_share_the_limits(size, count):
    limits = {"shortest_edge": 60_000, "longest_edge": 1_000_000}
    ours = processor("qwen3_vl", size=limits)
    place = ours.places(ours.frames(list(range(count)), count, 4.0, size))[0]
    height, width = smart_resize(
        count, *size, temporal_factor=2, factor=28, min_pixels=60_000, max_pixels=1_000_000
    )
    assert place.grid == (1, height // 28, width // 28)


def test_one_frame_of_qwen3_is_two_equal_ones():
    ours = processor("qwen3_vl", size={"shortest_edge": 60_000, "longest_edge": 1_000_000})
    one, two = (ours.frames(list(range(n)), n, 4.0, (1080, 1920)) for n in (1, 2))
    assert ours.places(one)[0].grid == ours.places(two)[0].grid


def test_times_of_qwen():
    """Positions in time: the index of a part, or of Qwen2.5-VL its time times a rate."""
    video = ([0, 3, 6, 9, 12], 15, 4.0, (60, 90))
    first = processor("qwen2_vl")
    assert [p.time for p in first.places(first.frames(*video))] == [0, 1, 2]
    second = processor("qwen2_5_vl", tokens_per_second=2)
    # Two frames of a part take 2 / (5 / 15 * 4) = 1.5 s.
    places = second.places(second.frames(*video))
    assert [p.time for p in places] == [0, 3, 6]
    assert [p.follows for p in places] == [0, 6, 12]


def writer(module, kind, **attributes):
    module = importlib.import_module(f"transformers.models.{module}.processing_{module}")
    made = object.__new__(getattr(module, kind))
    vars(made).update(attributes)
    return made


@pytest.mark.parametrize("indices", [[0, 9, 18, 27, 36], [5, 240]])
def test_texts_equal_those_of_transformers(indices):
    pytest.importorskip("num2words")
    metadata = SimpleNamespace(
        fps=2.5,
        frames_indices=list(indices),
        timestamps=[i / 2.5 for i in indices],
        duration=260 / 2.5,
    )
    count = len(indices)
    shaped = {"pixel_values": np.zeros((1, count, 1)), "video_metadata": [metadata]}
    token = {"image_token": "<i>"}

    ours = processor("smolvlm")
    places = ours.places(ours.frames(indices, 260, 2.5, (60, 90)))
    theirs = writer(
        "smolvlm",
        "SmolVLMProcessor",
        image_seq_len=4,
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        **token,
    )
    assert text_of(places, "<i>") == theirs.replace_video_token(shaped, 0)


@pytest.mark.parametrize("indices", [[0, 9, 18, 27, 36], [5, 240]])
def test_texts_of_frames(indices):
    count = len(indices)
    metadata = SimpleNamespace(fps=2.5, frames_indices=list(indices))
    ours = processor("qwen3_vl")
    places = ours.places(ours.frames(indices, 260, 2.5, (60, 90)))
    theirs = writer(
        "qwen3_vl",
        "Qwen3VLProcessor",
        video_token="<v>",
        vision_start_token="<|vision_start|>",
        vision_end_token="<|vision_end|>",
        video_processor=SimpleNamespace(merge_size=2, temporal_patch_size=2),
    )
    grid = np.array([[-(-count // 2), 4, 6]])
    given = {"video_grid_thw": grid, "video_metadata": [metadata]}
    assert text_of(places, "<v>") == theirs.replace_video_token(given, 0)

    given = {"pixel_values_videos": [np.zeros((count, 1))]}
    ours = processor("internvl")
    theirs = writer(
        "internvl",
        "InternVLProcessor",
        start_image_token="<img>",
        end_image_token="</img>",
        image_token="<i>",
        image_seq_length=9,
    )
    places = ours.places(ours.frames(indices, 260, 2.5, (60, 90)))
    assert text_of(places, "<i>") == theirs.replace_video_token(given, 0)

    ours = processor("llava_onevision")
    theirs = writer("llava_onevision", "LlavaOnevisionProcessor", video_token="<v>")
    theirs.num_image_tokens = 36
    places = ours.places(ours.frames(indices, 260, 2.5, (60, 90)))
    assert text_of(places, "<v>") == theirs.replace_video_token(given, 0)


def test_frames_of_smolvlm_are_pictures_that_are_not_cut(tmp_path):
    pictures = make("idefics3-whole", tmp_path)
    size = CASES["idefics3-whole"]["preprocessor"]["size"]
    ours = processor("smolvlm", size=size)
    video = picture(60, 90)[None]
    (part,) = ours.process(ours.frames([0], 1, 1.0, (60, 90)), video)
    expected = pictures.process(video[0])["pixel_values"]
    np.testing.assert_array_equal(part["pixel_values"].shape, expected.shape)


def test_chosen_frames():
    ours = processor("qwen2_vl", num_frames=4)
    assert ours.choose(10, 1.0) == [0, 3, 6, 9]
    assert ours.choose(3, 1.0) == [0, 1, 2]
    assert processor("qwen2_vl", num_frames=-1, fps=0.5).choose(10, 1.0) == [0, 2, 4, 6, 9]
    assert processor("qwen2_vl", fps=0.01).choose(10, 1.0) == [0]
    everything = processor("qwen2_vl", num_frames=-1)
    assert everything.choose(MAX_FRAMES, 1.0) == list(range(MAX_FRAMES))
    with pytest.raises(RequestError, match=f"{MAX_FRAMES + 1} frames, and at most {MAX_FRAMES}"):
        everything.choose(MAX_FRAMES + 1, 1.0)


def test_number_words():
    assert [in_words(n) for n in (1, 13, 20, 32, 100, 305, 768)] == [
        "one",
        "thirteen",
        "twenty",
        "thirty-two",
        "one hundred",
        "three hundred and five",
        "seven hundred and sixty-eight",
    ]
