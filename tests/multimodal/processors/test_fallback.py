"""transformers' own processors of pictures, where Octavo's do not cover a model's settings."""

import importlib.util
import io
import json

import numpy as np
import pytest
import transformers
from PIL import Image

from octavo.checkpoints.registry import open_checkpoint
from octavo.config import ModelConfig
from octavo.errors import ModelError, RequestError
from octavo.frontend.pictures import Pictures
from octavo.models.encoder import EncoderSpec
from octavo.multimodal.processors import fallback
from octavo.multimodal.processors.registry import make_processor, read_video_processor
from octavo.multimodal.processors.registry import read_processor as read_tuples

LLAVA = {
    "model_type": "llava",
    "vision_config": {"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 84},
    "vision_feature_select_strategy": "full",
}
VIT = {"image_processor_type": "ViTImageProcessor", "size": {"height": 84, "width": 84}}
PIXELS = np.random.default_rng(0).integers(0, 256, (90, 130, 3), np.uint8)


def checkpoint(folder, preprocessor, config=LLAVA):
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return open_checkpoint(folder)


def read_processor(opened):
    return json.loads(json.dumps(read_tuples(opened)))  # as the helper process receives them


def open_pictures(folder, preprocessor):
    class Encoder:
        max_num_tokens = 10_000

    encoder: EncoderSpec = Encoder()
    return Pictures.of_model(checkpoint(folder, preprocessor), ModelConfig(), encoder)


def values(item):
    tensor = item.parts[0].fields["pixel_values"]
    return np.frombuffer(tensor.data, tensor.dtype).reshape(tensor.shape)


def test_pictures_and_files_equal_transformers(tmp_path, caplog):
    with caplog.at_level("INFO"):
        pictures = open_pictures(tmp_path, VIT)
    assert "transformers' ViTImageProcessor, since" in caplog.text
    theirs = transformers.ViTImageProcessorPil(size={"height": 84, "width": 84})
    expected = theirs(PIXELS, return_tensors="np")["pixel_values"][0]
    item = pictures.read(PIXELS, {}, 0)
    np.testing.assert_array_equal(values(item), expected)
    assert item.num_embeds == 36
    file, reader = io.BytesIO(), pictures.open_files()
    Image.fromarray(PIXELS).save(file, "PNG")
    found = reader.read(file.getvalue(), "messages").result()
    assert found.parts[0].digest == item.parts[0].digest
    with pytest.raises(RequestError, match="messages: the PNG file is damaged"):
        reader.read(file.getvalue()[:-2000], "messages").result()
    reader.close()


@pytest.mark.parametrize(
    ("preprocessor", "match"),
    [
        ({"image_processor_type": "NewImageProcessor"}, "needs? NewImageProcessor, which"),
        (VIT | {"size": {"height": 70, "width": 84}}, r"\[3, 70, 84\].*reads \[3, 84, 84\]"),
    ],
)
def test_impossible_processor_is_refused_at_the_start(tmp_path, preprocessor, match):
    with pytest.raises(ModelError, match=match):
        open_pictures(tmp_path, preprocessor)


@pytest.mark.parametrize("missing", ["transformers", "torch"])
def test_error_names_the_class_and_the_missing_library(tmp_path, monkeypatch, missing):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        fallback.importlib.util, "find_spec", lambda name: None if name == missing else find(name)
    )
    with pytest.raises(ModelError, match=rf"ViTImageProcessor; {missing} is not installed: pip"):
        read_processor(checkpoint(tmp_path, VIT))


def test_sizes_that_only_transformers_knows(tmp_path):
    given = {"image_processor_type": "CLIPImageProcessor", "crop_size": 84}
    given["size"] = {"shortest_edge": 84, "longest_edge": 90}
    kind, settings = read_processor(checkpoint(tmp_path, given))
    assert kind == fallback.NAME
    found = make_processor(kind, settings).process(PIXELS)["pixel_values"]
    expected = transformers.CLIPImageProcessorPil.from_dict(given)(PIXELS, return_tensors="np")
    np.testing.assert_array_equal(found, expected["pixel_values"][0])


QWEN = {"min_pixels": 3136, "max_pixels": 50_000, "patch_size": 14}


def test_family_with_grids(tmp_path):
    """Grids must be those of the prompt; settings of a request reach both processors."""
    config = {"model_type": "qwen2_vl"}
    given = QWEN | {"image_processor_type": "PaddleOCRVLImageProcessor"}
    opened = checkpoint(tmp_path, given, config)
    kind, settings = read_processor(opened)
    assert kind == fallback.NAME
    assert read_video_processor(opened) is None
    # transformers' class for the family itself: equal to Octavo's.
    theirs = make_processor(kind, settings | {"class_name": "Qwen2VLImageProcessor"})
    ours = make_processor("qwen2_vl", settings["own_fields"])
    for request in ({}, {"max_pixels": 9000}):
        expected = ours.changed(request).process(PIXELS)
        found = theirs.changed(request).process(PIXELS)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
    other = make_processor(kind, settings | {"class_name": "Qwen2VLImageProcessor"})
    other.own = ours.changed({"max_pixels": 9000})
    with pytest.raises(RequestError, match=r"makes pixel_values .* encoder reads"):
        other.process(PIXELS)
    with pytest.raises(RequestError, match="min_pixels"):
        theirs.changed({"min_pixels": -1})


@pytest.mark.parametrize(
    "name",
    ["CLIPFeatureExtractor", "SiglipImageProcessorFast", "LlavaImageProcessor", None],
)
def test_own_processor_is_first(tmp_path, name):
    kind, _ = read_processor(checkpoint(tmp_path, {"image_processor_type": name, "odd": 1}))
    assert kind in ("clip", "siglip")
