"""Processors against transformers' Pillow backend: pixels to the last bit, and tokens."""

import ast
import importlib
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import RequestError
from octavo.multimodal.processors.registry import make_processor, read_processor
from octavo.multimodal.prompt import Placeholders, arrange_prefix, expand_prompt
from octavo.text.tokenizer import Tokenizer

SIZES = [(37, 53), (224, 224), (640, 480), (101, 700), (900, 333), (1, 1), (1, 90), (1500, 1201)]
HALF = [0.5, 0.5, 0.5]
TALL = [(1200, 300), (300, 1300), (520, 1024), (800, 810), (256, 511)]

CASES = {
    "clip": {
        "model": "llava",
        "config": {"vision_config": {"model_type": "clip_vision_model", "patch_size": 14}},
        "preprocessor": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 98},
            "crop_size": {"height": 98, "width": 98},
        },
    },
    "clip-old": {
        "model": "llava",
        "config": {"vision_config": {"model_type": "clip_vision_model", "patch_size": 14}},
        "preprocessor": {"feature_extractor_type": "CLIPFeatureExtractor", "size": 56}
        | {"crop_size": 84, "image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]},
    },
    "llava-pad": {
        "model": "llava",
        "config": {
            "vision_config": {"model_type": "clip_vision_model", "patch_size": 14},
            "vision_feature_select_strategy": "full",
        },
        "preprocessor": {
            "image_processor_type": "LlavaImageProcessorFast",
            "do_pad": True,
            "size": {"shortest_edge": 70},
            "crop_size": {"height": 70, "width": 70},
        },
    },
    "siglip": {
        "model": "llava",
        "config": {
            "vision_config": {"model_type": "siglip_vision_model", "patch_size": 14},
            "vision_feature_select_strategy": "full",
        },
        "preprocessor": {
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 84, "width": 84},
        },
    },
    "llava_next": {
        "model": "llava_next",
        "config": {"vision_config": {"model_type": "clip_vision_model", "patch_size": 14}},
        "preprocessor": {
            "size": {"shortest_edge": 98},
            "crop_size": {"height": 98, "width": 98},
            "image_grid_pinpoints": [[98, 196], [196, 98], [196, 196], [294, 98], [98, 294]],
        },
    },
    "llava_onevision": {
        "model": "llava_onevision",
        "config": {
            "vision_config": {"model_type": "siglip_vision_model", "patch_size": 14},
            "vision_aspect_ratio": "anyres_max_4",
        },
        "preprocessor": {
            "size": {"height": 84, "width": 84},
            "image_mean": HALF,
            "image_std": HALF,
            "image_grid_pinpoints": [[84 * y, 84 * x] for y in range(1, 6) for x in range(1, 6)],
        },
    },
    "gemma3": {
        "model": "gemma3",
        "config": {"vision_config": {"patch_size": 14}, "mm_tokens_per_image": 4},
        "preprocessor": {"size": {"height": 84, "width": 84}, "do_pan_and_scan": None},
    },
    "gemma3-pan": {
        "model": "gemma3",
        "config": {"vision_config": {"patch_size": 14}, "mm_tokens_per_image": 4},
        "preprocessor": {"size": {"height": 84, "width": 84}},
        "request": {"do_pan_and_scan": True},
        "sizes": TALL,
    },
    "gemma4": {
        "model": "gemma4",
        "config": {},
        "preprocessor": {"image_processor_type": "Gemma4ImageProcessor"},
        "sizes": [*SIZES, (1, 4000), (4000, 2), (768, 768)],
    },
    "gemma4-small": {
        "model": "gemma4",
        "config": {},
        "preprocessor": {"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 560},
        "request": {"max_soft_tokens": 70},
    },
    "gemma4-unified": {
        "model": "gemma4_unified",
        "config": {},
        "preprocessor": {"image_processor_type": "Gemma4UnifiedImageProcessor"},
        "sizes": [*SIZES, (1, 4000), (4000, 2), (768, 768)],
    },
    "gemma4-unified-small": {
        "model": "gemma4_unified",
        "config": {},
        "preprocessor": {"patch_size": 8, "pooling_kernel_size": 2, "max_soft_tokens": 560},
        "request": {"max_soft_tokens": 70},
    },
    "paligemma": {
        "model": "paligemma",
        "config": {"vision_config": {"patch_size": 14}},
        "preprocessor": {
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": 84, "width": 84},
            "image_seq_length": 36,
        },
    },
    "idefics3": {
        "model": "idefics3",
        "config": {"vision_config": {"patch_size": 14}, "scale_factor": 3},
        "preprocessor": {"size": {"longest_edge": 336}, "max_image_size": {"longest_edge": 84}},
    },
    "idefics3-whole": {
        "model": "idefics3",
        "config": {"vision_config": {"patch_size": 14}, "scale_factor": 3},
        "preprocessor": {"size": {"longest_edge": 336}, "max_image_size": {"longest_edge": 84}},
        "request": {"do_image_splitting": False},
    },
    "smolvlm": {
        "model": "smolvlm",
        "config": {"vision_config": {"patch_size": 16}, "scale_factor": 4},
        "preprocessor": {"size": {"longest_edge": 512}, "max_image_size": {"longest_edge": 128}},
        "sizes": [(37, 53), (128, 128), (500, 130), (300, 900), (1, 70)],
    },
    "qwen2_vl": {
        "model": "qwen2_5_vl",
        "config": {},
        "preprocessor": {"min_pixels": 3136, "max_pixels": 200_000, "patch_size": 14},
        "sizes": [*SIZES, (70, 126)],  # 2.5 and 4.5 times the factor
    },
    "qwen3_vl": {
        "model": "qwen3_vl",
        "config": {},
        "preprocessor": {
            "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
            "patch_size": 16,
            "image_mean": HALF,
            "image_std": HALF,
        },
    },
    "qwen2_vl-request": {
        "model": "qwen2_vl",
        "config": {},
        "preprocessor": {"min_pixels": 3136, "max_pixels": 12_845_056},
        "request": {"min_pixels": 50_000, "max_pixels": 90_000},
        "sizes": SIZES[:3],
    },
    "qwen2_vl-size": {
        "model": "qwen2_vl",
        "config": {},
        "preprocessor": {"min_pixels": 3136, "max_pixels": 12_845_056},
        "request": {"size": {"shortest_edge": 50_000, "longest_edge": 90_000}},
        "sizes": SIZES[:3],
    },
    "pixtral": {
        "model": "llava",
        "config": {"vision_config": {"model_type": "pixtral", "patch_size": 16}},
        "preprocessor": {
            "image_processor_type": "PixtralImageProcessor",
            "size": {"longest_edge": 256},
            "patch_size": {"height": 16, "width": 16},
        },
        "sizes": [size for size in SIZES if size != (1, 1500)],
    },
    "mistral3": {
        "model": "mistral3",
        "config": {"vision_config": {"patch_size": 14}, "spatial_merge_size": 2},
        "preprocessor": {"size": {"longest_edge": 280}, "patch_size": 14},
    },
    "internvl": {
        "model": "internvl",
        "config": {"vision_config": {"patch_size": [14, 14]}, "image_seq_length": 9},
        "preprocessor": {"size": {"height": 84, "width": 84}, "max_patches": 6},
        "sizes": [*SIZES, (100, 200), (300, 600), (100, 150)],
    },
}

SPECIAL = (
    "<s>",
    "<image>",
    "<start_of_image>",
    "<image_soft_token>",
    "<end_of_image>",
    "<fake_token_around_image>",
    "<global-img>",
    *(f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)),
    "<end_of_utterance>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<IMG_CONTEXT>",
    "<img>",
    "</img>",
    "<video>",
    "<|image>",
    "<|image|>",
    "<image|>",
    "<bos>",
)
EXTRA = {
    "gemma3": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
}


@pytest.fixture(scope="module")
def backend():
    """Tokenizer with merges of line ends and all special tokens."""
    backend = Backend(models.BPE())
    # Line ends are separate from words, as in Gemma's vocabulary.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("\n+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    words = ["user\n\n\nHere is the picture\n\n and here\n\n\n\nare crops\n\n\n\n\nnow\n"] * 9
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(words, trainer)
    return backend


def make(name, folder):
    case = CASES[name]
    config = {"model_type": case["model"], **case["config"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(case["preprocessor"]))
    kind, settings = read_processor(open_checkpoint(folder))
    # As the helper process receives them.
    return make_processor(kind, json.loads(json.dumps(settings))).changed(case.get("request", {}))


def reference(name):
    """Return transformers' processor of pictures, made as from the same files."""
    case = CASES[name]
    given = {k: v for k, v in case["preprocessor"].items() if v is not None}
    kind = given.pop("image_processor_type", "CLIPImageProcessor")
    given.pop("feature_extractor_type", None)
    classes = {
        "gemma3": ("gemma3", "Gemma3"),
        "gemma4": ("gemma4", "Gemma4"),
        "gemma4_unified": ("gemma4", "Gemma4"),
        "paligemma": ("siglip", "Siglip"),
        "idefics3": ("idefics3", "Idefics3"),
        "smolvlm": ("smolvlm", "SmolVLM"),
        "mistral3": ("pixtral", "Pixtral"),
        "internvl": ("got_ocr2", "GotOcr2"),
        "llava_next": ("llava_next", "LlavaNext"),
        "llava_onevision": ("llava_onevision", "LlavaOnevision"),
    }
    if case["model"].startswith("qwen"):
        classes[case["model"]] = ("qwen2_vl", "Qwen2VL")
    if case["model"] == "llava":
        stem = kind.removesuffix("Fast").removesuffix("ImageProcessor")
        classes["llava"] = (stem.lower(), stem)
    module, stem = classes[case["model"]]
    module = importlib.import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    made = getattr(module, f"{stem}ImageProcessorPil")(**given)
    return Merging(made) if case["model"] == "gemma4_unified" else made


class Merging:
    """Processor of Gemma 4 12B, whose module cannot be imported without torchvision: patches of
    Gemma 4, which its own function joins."""

    def __init__(self, patches):
        self.patches = patches
        file = Path(transformers.__file__).parent
        file /= "models/gemma4_unified/image_processing_gemma4_unified.py"
        (merge,) = (
            node
            for node in ast.parse(file.read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name == "patches_merge"
        )
        names = {"math": math, "torch": torch}
        exec(compile(ast.Module([merge], []), str(file), "exec"), names)
        self.merge = names["patches_merge"]

    def __call__(self, *args, **options):
        found = self.patches(*args, **options)
        (count,) = found["num_soft_tokens_per_image"]
        valid = (found["image_position_ids"] >= 0).all(-1)
        patches, places = (
            torch.from_numpy(found[name][valid][None])
            for name in ("pixel_values", "image_position_ids")
        )
        patches, places = (it.numpy() for it in self.merge(patches, places, int(count)))
        return {**found, "pixel_values": patches, "image_position_ids": places}


def picture(height, width):
    pixels = np.random.default_rng(height * 7919 + width).integers(0, 256, (height, width, 3))
    return pixels.astype(np.uint8)


def call(name, theirs, pixels):
    options = dict(CASES[name].get("request", {}))
    if CASES[name]["model"] == "gemma3":
        defaults = transformers.Gemma3Processor.images_kwargs
        options = {**defaults, **options}
    if CASES[name]["model"] == "internvl":
        options["crop_to_patches"] = True
    if CASES[name]["model"] == "mistral3":
        options["patch_size"] = 28
    if CASES[name]["model"] in ("idefics3", "smolvlm"):
        options["return_row_col_info"] = True
    if "min_pixels" in options:
        options = {
            "size": {
                "shortest_edge": options.pop("min_pixels"),
                "longest_edge": options.pop("max_pixels"),
            }
        }
    return theirs(Image.fromarray(pixels), return_tensors="np", **options)


@pytest.mark.parametrize("name", CASES)
def test_pixels_equal_transformers(name, tmp_path):
    ours, theirs = make(name, tmp_path), reference(name)
    for height, width in CASES[name].get("sizes", SIZES):
        pixels = picture(height, width)
        expected = call(name, theirs, pixels)
        found = ours.process(pixels)
        values = expected["pixel_values"]
        if "image_position_ids" in expected:
            places, count = expected["image_position_ids"][0], len(found["pixel_values"])
            np.testing.assert_array_equal(found["image_position_ids"], places[:count])
            assert (places[count:] == -1).all()
            values = values[:, :count]
        values = values[0] if values.shape != found["pixel_values"].shape else values
        assert found["pixel_values"].dtype == np.float32
        np.testing.assert_array_equal(found["pixel_values"], values, f"{height} x {width}")
        if "image_grid_thw" in expected:
            np.testing.assert_array_equal(found["image_grid_thw"], expected["image_grid_thw"][0])
        if "rows" in expected:
            assert found["tiles"].tolist() == [expected["rows"][0][0], expected["cols"][0][0]]
            assert expected["pixel_attention_mask"].all()
        if "image_sizes" in expected:
            np.testing.assert_array_equal(found["image_sizes"], expected["image_sizes"][0])


PROMPTS = {
    "llava": ("<image>", "LlavaProcessor"),
    "gemma3": ("<start_of_image>", "Gemma3Processor"),
    "idefics3": ("<image>", "Idefics3Processor"),
    "smolvlm": ("<image>", "Idefics3Processor"),
    "qwen2_vl": ("<|image_pad|>", "Qwen2VLProcessor"),
    "qwen2_5_vl": ("<|image_pad|>", "Qwen2_5_VLProcessor"),
    "qwen3_vl": ("<|image_pad|>", "Qwen3VLProcessor"),
    "mistral3": ("[IMG]", "PixtralProcessor"),
    "internvl": ("<IMG_CONTEXT>", "InternVLProcessor"),
}


# The part of transformers that writes a picture's text: its module, its class, and the attributes
# that it reads.
WRITERS = {
    "llava": ("llava", "LlavaProcessor", {"image_token": "<image>", "patch_size": 14}),
    "llava_next": (
        "llava_next",
        "LlavaNextProcessor",
        {"image_token": "<image>", "patch_size": 14, "num_additional_image_tokens": 1}
        | {"vision_feature_select_strategy": "default"},
    ),
    "llava_onevision": (
        "llava_onevision",
        "LlavaOnevisionProcessor",
        {"image_token": "<image>", "num_image_tokens": 36}
        | {"vision_aspect_ratio": "anyres_max_4", "vision_feature_select_strategy": "full"},
    ),
    "gemma3": (
        "gemma3",
        "Gemma3Processor",
        {
            "full_image_sequence": "\n\n<start_of_image>"
            + "<image_soft_token>" * 4
            + "<end_of_image>\n\n"
        },
    ),
    "idefics3": (
        "idefics3",
        "Idefics3Processor",
        {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_tag": "<global-img>",
            "image_seq_len": 4,
        },
    ),
    "qwen2_vl": ("qwen2_vl", "Qwen2VLProcessor", {"image_token": "<|image_pad|>"}),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLProcessor", {"image_token": "<|image_pad|>"}),
    "internvl": (
        "internvl",
        "InternVLProcessor",
        {
            "image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "image_seq_length": 9,
        },
    ),
}
WRITERS |= {"clip": WRITERS["llava"], "siglip": WRITERS["llava"], "gemma3-pan": WRITERS["gemma3"]}
WRITERS["gemma4"] = WRITERS["gemma4-small"] = (
    "gemma4",
    "Gemma4Processor",
    {"boi_token": "<|image>", "image_token": "<|image|>", "eoi_token": "<image|>"},
)
WRITERS["gemma4-unified"] = WRITERS["gemma4-unified-small"] = (
    "gemma4_unified",
    "Gemma4UnifiedProcessor",
    WRITERS["gemma4"][2],
)
WRITERS["paligemma"] = (
    "paligemma",
    "PaliGemmaProcessor",
    {"image_token": "<image>", "image_seq_length": 36},
)
WRITERS |= {"smolvlm": WRITERS["idefics3"], "llava-pad": WRITERS["llava"]}
OTHERS = {
    "clip": {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
    "llava-pad": {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "full"},
    "siglip": {"num_additional_image_tokens": 0, "vision_feature_select_strategy": "full"},
}


@pytest.mark.parametrize("name", sorted(WRITERS.keys() - {"llava"}))
def test_tokens_equal_transformers(name, tmp_path, backend):
    ours, theirs = make(name, tmp_path), reference(name)
    module, kind, attributes = WRITERS[name]
    module = importlib.import_module(f"transformers.models.{module}.processing_{module}")
    writer = object.__new__(getattr(module, kind))
    vars(writer).update(image_processor=theirs, **(attributes | OTHERS.get(name, {})))
    sizes = CASES[name].get("sizes", SIZES)[:5]
    text, replaced = "", ""
    for i, (height, width) in enumerate(sizes):
        expected = call(name, theirs, picture(height, width))
        here = writer.replace_image_token(expected, 0)
        before, after = f"user{chr(10) * i}", f"{chr(10) * (i % 3)}and here"
        text += before + ours.placeholder + after
        replaced += before + here + after
    # Two pictures in a row, whose line ends meet.
    text += 2 * ours.placeholder
    replaced += 2 * here
    tokenizer = Tokenizer(backend)
    places = [ours.place(height, width) for height, width in [*sizes, sizes[-1], sizes[-1]]]
    ids = {token: tokenizer.get_added_vocab()[token] for token in SPECIAL}
    embed = ids[ours.embed_token]
    given = Placeholders("picture", embed, [[place] for place in places])
    found, owned = expand_prompt(tokenizer.encode(text), {ids[ours.placeholder]: given}, tokenizer)
    ranges = [range_ for _, range_ in owned]
    assert found == tokenizer.encode(replaced)
    rows = [
        range_.offset + i
        for range_ in ranges
        for i in range(range_.length)
        if range_.is_embed is None or range_.is_embed[i]
    ]
    assert rows == [i for i, token in enumerate(found) if token == embed]
    assert [range_.num_embeds for range_ in ranges] == [place.num_embeds for place in places]


@pytest.mark.parametrize(
    "text", ["caption en", "<image>caption en", "see <image>and<image>what\n\nis it?", ""]
)
def test_prefix_equals_transformers(text, tmp_path, backend):
    """Pictures, the beginning of a text, the text and a line end, as in `PaliGemmaProcessor`."""
    ours, module = make("paligemma", tmp_path), "transformers.models.paligemma.processing_paligemma"
    kind = importlib.import_module(module).PaliGemmaProcessor
    tokenizer = Tokenizer(backend, {"bos_token": "<bos>", "add_bos_token": True})
    count = max(1, text.count("<image>"))

    class Writer(kind):
        def __init__(self):
            self.tokenizer = SimpleNamespace(bos_token="<bos>")

        def validate_inputs(self, *given, **fields):
            pass

    images = [[Image.fromarray(picture(4, 4))] * count]
    _, (expected,), *_ = Writer().prepare_inputs_layout(images, [text])
    placeholder = tokenizer.get_added_vocab()["<image>"]
    end = tokenizer.encode(ours.prefix_end, False)
    given = tokenizer.encode(text), count, placeholder, tokenizer.bos_token_id, end
    found = arrange_prefix(*given)
    assert tokenizer.decode(found) == expected
    assert arrange_prefix(found, *given[1:]) == found


@pytest.mark.parametrize(("name", "step"), [("pixtral", 16), ("mistral3", 28)])
def test_tokens_of_pixtral(name, step, tmp_path):
    """Its module in transformers cannot be imported without torchvision."""
    ours = make(name, tmp_path)
    for height, width in SIZES:
        rows, columns = (
            side // step for side in ours.process(picture(height, width))["image_sizes"]
        )
        expected = ("[IMG]" * columns + "[IMG_BREAK]") * rows
        pieces = ours.place(height, width).pieces
        text = "".join("[IMG]" * piece if isinstance(piece, int) else piece for piece in pieces)
        assert text == expected.removesuffix("[IMG_BREAK]") + "[IMG_END]"


def test_number_of_placeholders_must_be_that_of_the_pictures(tmp_path, backend):
    ours, tokenizer = make("clip", tmp_path), Tokenizer(backend)
    places = [[ours.place(4, 4)]] * 2
    with pytest.raises(RequestError, match=r"has 1 placeholders for pictures.* 2 pictures"):
        expand_prompt([5, 1, 6], {1: Placeholders("picture", 1, places)}, tokenizer)


@pytest.mark.parametrize("name", CASES)
def test_settings_of_a_request(name, tmp_path):
    ours = make(name, tmp_path)
    with pytest.raises(RequestError, match=r"mm_processor_kwargs\.nonsense is not allowed"):
        ours.changed({"nonsense": 1})
    for field in ours.request_settings:
        with pytest.raises(RequestError, match=field):
            ours.changed({field: "huge"})


def test_size_of_a_request_is_checked(tmp_path):
    ours = make("qwen2_vl-request", tmp_path)
    assert ours.changed({"size": None}).place(40, 40) == ours.place(40, 40)
    for least in ({}, {"shortest_edge": -1}, {"shortest_edge": 6000}):
        with pytest.raises(RequestError, match="shortest_edge"):
            ours.changed({"size": {"longest_edge": 5000, **least}})


def test_narrow_picture_is_refused_before_it_is_enlarged(tmp_path):
    with pytest.raises(RequestError, match="too narrow"):
        make("clip", tmp_path).process(np.zeros((1, 60_000, 3), np.uint8)[:, :60_000])
    with pytest.raises(RequestError, match="at most 200 times"):
        make("qwen3_vl", tmp_path).place(1, 201)
