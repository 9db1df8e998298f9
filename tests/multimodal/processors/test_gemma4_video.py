"""Videos of Gemma 4 against transformers: settings, sizes, patches and texts."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from transformers.models.gemma4.processing_gemma4 import get_aspect_ratio_preserving_size

from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import RequestError
from octavo.multimodal.processors.registry import make_video_processor, read_video_processor
from tests.multimodal.processors.test_video import text_of, writer
from tests.videos import frames


def processor(folder, video=None, file="processor_config.json", kind="gemma4"):
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    pictures = {"max_soft_tokens": 280}
    whole = {"image_processor": pictures}
    if video is not None:
        whole |= {"video_processor": video}
    (folder / file).write_text(json.dumps(whole))
    return make_video_processor(*read_video_processor(open_checkpoint(folder)))


def test_settings_are_those_of_videos(tmp_path):
    """Frames do not get the rows of pictures, with or without settings of videos."""
    assert processor(tmp_path).image.most_rows == 70
    found = processor(tmp_path, {"max_soft_tokens": 140, "num_frames": 8})
    assert found.image.most_rows == 140
    assert len(found.choose(100, 10.0)) == 8
    changed = found.changed({"max_soft_tokens": 280, "num_frames": 4})
    assert changed.image.most_rows == 280
    assert len(changed.choose(100, 10.0)) == 4
    with pytest.raises(RequestError, match="70, 140, 280, 560, 1120"):
        found.changed({"max_soft_tokens": 71})


@pytest.mark.parametrize(("kind", "side"), [("gemma4", 16), ("gemma4_unified", 48)])
@pytest.mark.parametrize("size", [(60, 90), (1080, 1920), (700, 30), (336, 480)])
def test_sizes(size, kind, side, tmp_path):
    ours = processor(tmp_path, kind=kind)
    height, width = get_aspect_ratio_preserving_size(*size, 16, 70 * 9, 3)
    for place in ours.places(ours.frames([0, 5], 10, 2.0, size)):
        assert place.num_embeds == height * width // 48**2
        assert place.num_encoder_tokens == height * width // side**2


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
def test_frames_are_pictures(kind, tmp_path):
    """transformers' processor of videos needs torchvision, so that of pictures is the reference."""
    pixels, ours = frames(2, 100, 120), processor(tmp_path, kind=kind)
    parts = list(ours.process(ours.frames([0, 1], 2, 1.0, (100, 120)), pixels))
    for part, image in zip(parts, pixels, strict=True):
        expected = ours.image.process(image)
        assert part.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(part[name], array)


@pytest.mark.parametrize("indices", [[0, 9, 18, 27, 36], [5, 240, 9000]])
def test_texts(indices, tmp_path):
    ours = processor(tmp_path)
    theirs = writer(
        "gemma4",
        "Gemma4Processor",
        boi_token="<|image>",
        eoi_token="<image|>",
        video_token="<v>",
    )
    places = ours.places(ours.frames(indices, 10_000, 2.5, (60, 90)))
    metadata = SimpleNamespace(fps=2.5, timestamps=[i / 2.5 for i in indices])
    given = {
        "num_soft_tokens_per_video": [places[0].num_embeds],
        "video_metadata": [metadata],
    }
    assert text_of(places, "<v>") == theirs.replace_video_token(given, 0)
