"""Pictures of Phi-4 multimodal against transformers' code, whose module needs torchvision."""

import ast
import json
import math
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import ModelError, RequestError
from octavo.models.towers.siglip import read_hd_layout
from octavo.multimodal.processors.registry import make_processor, read_processor

SIDE, PATCH, TILES = 64, 2, 6  # 32 patches a side, for which transformers counts the rows
SIZES = [(37, 53), (64, 64), (128, 64), (101, 400), (1, 1), (150, 170), (30, 60), (333, 90)]
SIZES += [(500, 40), (63, 129), (2000, 1500), (96, 64)]
ATOL = 1e-6  # of numbers from -1.4 to 1.4


@pytest.fixture(scope="module")
def theirs():
    """Return transformers' function for a list of pictures, float32 and uint8 [3, H, W].

    Pillow stands in for torchvision's filter of uint8 pictures, as in Microsoft's own code.
    """
    folder = Path(find_spec("transformers").origin).parent / "models/phi4_multimodal"
    tree = ast.parse((folder / "image_processing_phi4_multimodal.py").read_text())
    (kind,) = (it for it in tree.body if getattr(it, "name", "").endswith("ImageProcessor"))
    methods = [it for it in kind.body if isinstance(it, ast.FunctionDef) and it.name != "__init__"]
    for method in methods:
        method.decorator_list, method.returns = [], None
        for argument in [*method.args.args, *method.args.kwonlyargs, method.args.kwarg]:
            if argument is not None:
                argument.annotation = None

    def resize(image, size, resample=None, antialias=True):
        if not antialias:
            return torch.nn.functional.interpolate(image[None], (SIDE, SIDE), mode="bicubic")[0]
        picture = Image.fromarray(image.numpy().transpose(1, 2, 0))
        picture = picture.resize(size[::-1], Image.Resampling.BILINEAR)
        return torch.from_numpy(np.array(picture).transpose(2, 0, 1))

    def pad(image, edges, fill):
        bottom_right = (0, edges[2], 0, edges[3])
        return torch.nn.functional.pad(image, bottom_right, value=fill[0])

    functions = {"torch": torch, "math": math, "BatchFeature": lambda data, tensor_type: data}
    functions["tvF"] = SimpleNamespace(resize=resize, pad=pad)
    exec(compile(ast.Module(methods, []), "transformers", "exec"), functions)
    names = [method.name for method in methods]
    own = type("Processor", (), {name: functions[name] for name in names})()
    own.resize = resize

    def levels(image, rescale, factor, normalize, mean, std):
        mean, std = (torch.tensor(n)[:, None, None] * (1.0 / factor) for n in (mean, std))
        return (image.float() - mean) / std

    own.rescale_and_normalize = levels
    settings = {"do_resize": True, "size": SimpleNamespace(height=SIDE, width=SIDE)}
    settings |= {"resample": 3, "do_rescale": True, "rescale_factor": 1 / 255}
    settings |= {"do_normalize": True, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    settings |= {"patch_size": PATCH, "return_tensors": None}
    return lambda images, tiles: own._preprocess(images, dynamic_hd=tiles, **settings)


def make(folder, given=None, **preprocessor):
    vision = {"image_size": SIDE, "crop_size": SIDE, "patch_size": PATCH}
    config = {"model_type": "phi4_multimodal", "vision_config": vision}
    (folder / "config.json").write_text(json.dumps(config))
    preprocessor = {"size": {"height": SIDE, "width": SIDE}, "dynamic_hd": TILES} | preprocessor
    preprocessor |= {"image_processor_type": "Phi4MultimodalImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    kind, settings = read_processor(open_checkpoint(folder))
    return make_processor(kind, json.loads(json.dumps(settings))).changed(given or {})


def picture(height, width):
    pixels = np.random.default_rng(height * 7919 + width).integers(0, 256, (height, width, 3))
    return pixels.astype(np.uint8)


@pytest.mark.parametrize("tiles", [TILES, 2])
def test_pixels_masks_and_tokens_equal_transformers(tiles, tmp_path, theirs):
    ours = make(tmp_path, {} if tiles == TILES else {"dynamic_hd": tiles})
    layout = read_hd_layout(open_checkpoint(tmp_path).config)
    for height, width in SIZES:
        pixels = picture(height, width)
        expected = theirs([torch.from_numpy(pixels.transpose(2, 0, 1))], tiles)
        found = ours.process(pixels)
        values = expected["image_pixel_values"][0].numpy()
        np.testing.assert_array_equal(found["image_pixel_values"][1:], values[1:])
        # Some of torch's kernels do not fuse products and sums.
        np.testing.assert_allclose(found["image_pixel_values"][0], values[0], rtol=0, atol=ATOL)
        size, seen = (found[name].tolist() for name in ("image_sizes", "seen_patches"))
        assert size == expected["image_sizes"][0].tolist()
        rows, columns = (n // SIDE for n in size)
        mask = np.zeros((rows * 32, columns * 32))
        mask[: seen[0], : seen[1]] = 1
        mask = mask.reshape(rows, 32, columns, 32).transpose(0, 2, 1, 3).reshape(-1, 32, 32)
        np.testing.assert_array_equal(expected["image_attention_mask"][0][1:], mask)
        place = ours.place(height, width)
        assert place.pieces == (expected["num_img_tokens"][0],)
        assert layout.sizes(found) == (place.num_encoder_tokens, place.num_embeds)


def test_most_tiles_and_rows(tmp_path):
    """Pictures of all shapes have at most the tiles that the encoder has memory for."""
    ours = make(tmp_path)
    for height, width in [(9000, 9000), (1, 1), (60_000, 3000), (3000, 60_000), (700, 16_000)]:
        place = ours.place(height, width)
        assert place.num_encoder_tokens <= (1 + TILES) * 32**2
        assert place.num_embeds <= (TILES + 1) * 16 * 17 + 1


@pytest.mark.parametrize("size", [(1, 2000), (2000, 1), (6, 64), (1, 60_000)])
def test_narrow_pictures_are_refused(size, tmp_path):
    ours = make(tmp_path)
    with pytest.raises(RequestError, match="too narrow"):
        ours.place(*size)
    with pytest.raises(RequestError, match="too narrow"):
        ours.process(np.zeros((*size, 3), np.uint8))


def test_settings(tmp_path):
    with pytest.raises(RequestError, match="dynamic_hd"):
        make(tmp_path).changed({"dynamic_hd": 37})
    for fields, message in (
        ({"dynamic_hd": 37}, "dynamic_hd"),
        ({"size": {"height": 32, "width": 32}}, "tiles of 64"),
        ({"resample": 2}, "bicubic"),
    ):
        with pytest.raises(ModelError, match=message):
            make(tmp_path, **fields)
    tokens = {"added_tokens_decoder": {"200010": {"content": "<|image|>"}}}
    for written, token in (
        ({}, "<|endoftext10|>"),
        (tokens, "<|image|>"),
        ({"image_token": "<a>"}, "<a>"),
        ({"extra_special_tokens": {"image_token": "<b>"}}, "<b>"),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(written))
        assert make(tmp_path).placeholder == token
