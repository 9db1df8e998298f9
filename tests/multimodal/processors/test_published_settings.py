"""Settings of processors in all published forms, and those of requests, against transformers."""

import json

import numpy as np
import pytest
import transformers

from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import RequestError
from octavo.multimodal.processors.registry import make_processor, read_processor

CLIP_TOWER = {"model_type": "clip_vision_model", "patch_size": 14}
LLAVA = {"model_type": "llava", "vision_config": CLIP_TOWER}
CROP = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
INTERNVL = {"model_type": "internvl", "vision_config": {"patch_size": [14, 14]}}
INTERNVL |= {"image_seq_length": 4}
PIXTRAL = {"model_type": "mistral3", "vision_config": {"patch_size": 14}, "spatial_merge_size": 2}
PIXELS = [
    np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
    for size in ((90, 130), (40, 200), (300, 100), (56, 56))
]


def make(folder, config, **files):
    """Return a processor, which receives its settings as the helper process does."""
    (folder / "config.json").write_text(json.dumps(config))
    for name, fields in files.items():
        (folder / f"{name}.json").write_text(json.dumps(fields))
    kind, settings = read_processor(open_checkpoint(folder))
    return make_processor(kind, json.loads(json.dumps(settings)))


def check(ours, theirs, **options):
    for pixels in PIXELS:
        found = ours.process(pixels)
        expected = theirs(pixels, return_tensors="np", **options)
        for name in found:
            array = expected[name]
            array = array if array.shape == found[name].shape else array[0]
            np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("kind", ["CLIP", "Llava"])
def test_only_the_class_of_llava_pads(kind, tmp_path):
    fields = CROP | {"image_processor_type": f"{kind}ImageProcessor", "do_pad": True}
    theirs = getattr(transformers, f"{kind}ImageProcessorPil").from_dict(fields)
    check(make(tmp_path, LLAVA, preprocessor_config=fields), theirs)


@pytest.mark.parametrize(
    "files",
    [
        {"preprocessor_config": {"size": 56, "crop_size": 56, "resample": 3}},
        {"preprocessor_config": CROP | {"feature_extractor_type": "CLIPFeatureExtractor"}},
        {"preprocessor_config": CROP | {"image_processor_type": "CLIPFeatureExtractor"}},
        {"preprocessor_config": CROP | {"image_processor_type": "CLIPImageProcessorFast"}},
        {"processor_config": {"processor_class": "LlavaProcessor", "image_processor": CROP}},
        {
            "preprocessor_config": CROP | {"processor_class": "LlavaProcessor"},
            "processor_config": {"patch_size": 14, "vision_feature_select_strategy": "default"},
        },
    ],
    ids=["sides", "extractor", "old class", "fast", "one file", "two files"],
)
def test_files_of_all_versions(files, tmp_path):
    check(make(tmp_path, LLAVA, **files), transformers.CLIPImageProcessorPil(**CROP))


@pytest.mark.parametrize(
    "options",
    [
        {"max_patches": 2},
        {"min_patches": 3, "max_patches": 5},
        {"crop_to_patches": False},
        {"crop_to_patches": False, "max_patches": 3},
    ],
)
def test_tiles_of_internvl(options, tmp_path):
    fields = {"size": {"height": 56, "width": 56}, "max_patches": 6}
    ours = make(tmp_path, INTERNVL, preprocessor_config=fields).changed(options)
    theirs = transformers.GotOcr2ImageProcessorPil(**fields)
    check(ours, theirs, **({"crop_to_patches": True} | options))
    with pytest.raises(RequestError, match="max_patches"):
        ours.changed({"min_patches": 4, "max_patches": 3})


@pytest.mark.parametrize("longest", [56, 85, 400])
def test_size_of_pixtral(longest, tmp_path):
    fields = {"size": {"longest_edge": 140}, "patch_size": 14}
    size = {"size": {"longest_edge": longest}}
    ours = make(tmp_path, PIXTRAL, preprocessor_config=fields).changed(size)
    check(ours, transformers.PixtralImageProcessorPil(**fields), patch_size=28, **size)
    with pytest.raises(RequestError, match="size"):
        ours.changed({"size": {"longest_edge": 0}})
