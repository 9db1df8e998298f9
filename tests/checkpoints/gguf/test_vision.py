"""Damaged, foreign and hostile mmproj files, and the choice among several files."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.checkpoints.gguf.folder import choose_mmproj
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import ModelConfig
from octavo.errors import ModelError
from octavo.kernels.native import NativeOps
from octavo.models.loader import load_model
from octavo.models.registry import read_spec
from octavo.multimodal.processors.registry import make_processor, read_processor
from tests import sounds
from tests.mmproj_files import FIXED_SOUNDS, arrays_of, metadata_of, save_pair, save_tower
from tests.models.harness import make_hf
from tests.pictures import CASES, MORE_CASES


@pytest.fixture(scope="module")
def make_files(tmp_path_factory):
    """Return a function: case -> file of its text part, metadata and tensors of its tower."""

    def make(name: str) -> tuple[Path, dict[str, Any], dict[str, Any]]:
        case = (CASES | MORE_CASES)[name]
        model = make_hf(case.architecture, **case.config)
        text, _ = save_pair(model, name, tmp_path_factory.mktemp(name))
        return text, metadata_of(model, name), arrays_of(model, name)

    return make


@pytest.fixture(scope="module")
def hearing(tmp_path_factory):
    """Return a text part's file, and the metadata and the tensors of a tower that hears, too."""
    config = sounds.CASES["gemma4"].config
    fixed = {k: v for k, v in FIXED_SOUNDS.items() if k.startswith("attention")}
    config = config | {"audio_config": config["audio_config"] | fixed}
    model = make_hf("Gemma4ForConditionalGeneration", **config)
    text, tower = save_pair(model, "gemma4_e", tmp_path_factory.mktemp("hearing"))
    load(text, tower)
    return text, metadata_of(model, "gemma4_e"), arrays_of(model, "gemma4_e")


def load(text: Path, tower: Path) -> None:
    checkpoint = open_checkpoint(text, mmproj=str(tower))
    spec = read_spec(checkpoint, ModelConfig(model="m"))
    assert spec.encoders
    found = read_processor(checkpoint)
    assert found is not None
    make_processor(
        found[0], {k: list(v) if isinstance(v, tuple) else v for k, v in found[1].items()}
    )
    load_model(spec, checkpoint, dtype="float32", ops=NativeOps())


V = "clip.vision."
HUGE = 2**31 - 1
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("smolvlm", {"general.architecture": "llama"}, "is not an mmproj file.*--mmproj"),
    ("smolvlm", {"clip.projector_type": None}, "is not an mmproj file"),
    ("smolvlm", {"clip.projector_type": 5}, "is not an mmproj file"),
    ("smolvlm", {"clip.projector_type": "mlp"}, "projector_type=mlp|mm.2.weight has the shape"),
    ("smolvlm", {"clip.projector_type": "qwen3vl_merger"}, "needs a text model of .*qwen3vl"),
    ("smolvlm", {"clip.has_audio_encoder": True}, "type=idefics3 is supported .* pictures only"),
    ("smolvlm", {"clip.vision.new_key": 3}, "keys clip.vision.new_key is not supported"),
    ("smolvlm", {f"{V}block_count": None}, "block_count is missing"),
    ("smolvlm", {f"{V}block_count": HUGE}, "block_count=2147483647.*<= 4096"),
    ("smolvlm", {f"{V}block_count": 4096}, "lacks .* tensors of the tower"),
    ("smolvlm", {f"{V}block_count": 1}, "holds .* tensors that the tower .*v.blk.1"),
    ("smolvlm", {f"{V}embedding_length": 0}, "embedding_length=0"),
    ("smolvlm", {f"{V}embedding_length": "8"}, "embedding_length='8'"),
    ("smolvlm", {f"{V}embedding_length": 48}, "v.patch_embd.weight has shape|requires"),
    ("smolvlm", {f"{V}attention.head_count": 5}, "num_attention_heads|heads"),
    ("smolvlm", {f"{V}attention.head_count": HUGE}, "head_count=2147483647"),
    ("smolvlm", {f"{V}attention.layer_norm_epsilon": float("nan")}, "layer_norm_epsilon=nan"),
    ("smolvlm", {f"{V}attention.layer_norm_epsilon": -1.0}, "layer_norm_epsilon=-1"),
    ("smolvlm", {f"{V}patch_size": HUGE}, "patch_size=2147483647"),
    ("smolvlm", {f"{V}image_size": HUGE}, "image_size=2147483647"),
    ("smolvlm", {f"{V}image_mean": None}, "image_mean is missing"),
    ("smolvlm", {f"{V}image_mean": [0.5, float("inf"), 0.5]}, "image_mean.*3 finite numbers"),
    ("smolvlm", {f"{V}image_std": [0.5, 0.0, 0.5]}, "image_std.*must not be 0"),
    ("smolvlm", {f"{V}image_std": [0.5, 0.5]}, "image_std.*3 finite numbers"),
    ("smolvlm", {f"{V}projector.scale_factor": 0}, "scale_factor=0"),
    ("smolvlm", {f"{V}projector.scale_factor": 3}, "multiple of 3 patches|image_size"),
    ("smolvlm", {f"{V}preproc_image_size": HUGE}, "preproc_image_size=2147483647"),
    ("llava", {f"{V}feature_layer": [1, 2]}, "feature_layer.*the last layer"),
    ("llava", {f"{V}image_grid_pinpoints": [336, 672]}, "image_grid_pinpoints is not supported"),
    ("llava", {f"{V}image_aspect_ratio": "anyres"}, "image_aspect_ratio='anyres'"),
    ("qwen2_5_vl", {f"{V}n_wa_pattern": None}, "n_wa_pattern is missing"),
    ("qwen3_vl", {f"{V}spatial_merge_size": HUGE}, "spatial_merge_size=2147483647"),
    ("mistral3", {"clip.use_silu": True, "clip.use_gelu": True}, "either it or clip.use_gelu"),
    ("gemma3", {f"{V}projector.scale_factor": 3}, "scale_factor=3.*it must divide 8"),
    ("gemma3", {f"{V}projector.scale_factor": 16}, "scale_factor=16.*it must divide 8"),
    ("gemma3", {"clip.projector_type": "idefics3"}, "needs a text model of .*llama"),
    ("gemma4_e", {"clip.projector_type": "gemma5v"}, "projector_type=gemma5v is not supported"),
    ("gemma4_unified", {"clip.vision.projector_type": "gemma4v"}, "supported: gemma4a"),
    ("gemma4_unified", {"clip.audio.projector_type": "gemma4a"}, "supported: gemma4ua"),
    ("gemma4_unified", {f"{V}projector.scale_factor": 2}, r"patch_norm.1.weight has shape \[108\]"),
    ("gemma4_e", {"clip.has_audio_encoder": True}, "audio.projector_type is missing"),
    (
        "gemma4_e",
        {"clip.has_audio_encoder": True, "clip.audio.projector_type": "gemma4ua"},
        "projector_type='gemma4ua'.*supported: gemma4a",
    ),
    (
        "gemma4_e",
        {"clip.has_audio_encoder": True, "clip.audio.projector_type": "gemma4a"},
        r"mm.a.input_projection.weight has the shape \[\]",
    ),
    ("gemma4_e", {"clip.audio.block_count": 2}, "keys clip.audio.block_count is not supported"),
    ("gemma4_e", {f"{V}projector.scale_factor": 1}, "pooling_kernel_size=1"),
    ("gemma4_e", {f"{V}projector.scale_factor": HUGE}, "scale_factor=2147483647"),
    ("gemma4_e", {f"{V}attention.head_count": 5}, "must divide num_attention_heads"),
    ("gemma4_e", {f"{V}patch_size": 3}, "v.patch_embd.weight has shape"),
    ("internvl", {f"{V}preproc_max_tiles": 0}, "preproc_max_tiles=0"),
    ("internvl", {f"{V}preproc_min_tiles": 9}, "max_patches=4"),
]


@pytest.mark.parametrize(
    "name",
    [
        *("smolvlm", "llava", "qwen2_5_vl", "qwen3_vl", "mistral3", "internvl"),
        *("gemma3", "gemma4_e", "gemma4_unified"),
    ],
)
def test_metadata(name: str, make_files, tmp_path: Path) -> None:
    text, metadata, arrays = make_files(name)
    tower = tmp_path / "tower.gguf"
    save_tower(tower, metadata, arrays)
    load(text, tower)
    for case, changes, message in WRONG:
        if case != name:
            continue
        changed = {k: v for k, v in (metadata | changes).items() if v is not None}
        save_tower(tower, changed, arrays)
        with pytest.raises(ModelError) as caught:
            load(text, tower)
        assert re.search(message, str(caught.value)), (changes, str(caught.value))
        assert str(tower) in str(caught.value) or "max_patches" in message, str(caught.value)


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "message"),
    [
        ("smolvlm", "v.blk.1.attn_q.weight", None, "lacks 1 tensors .*v.blk.1.attn_q.weight"),
        ("smolvlm", "v.blk.1.attn_q.weight", (24, 23), r"attn_q.weight has shape \[24, 23\]"),
        ("smolvlm", "v.patch_embd.weight", (24, 3, 2, 8), "v.patch_embd.weight has shape"),
        ("smolvlm", "v.blk.0.ffn_up.weight", None, "intermediate_size|lacks|ffn_up"),
        ("smolvlm", "mm.model.fc.weight", (31, 96), "embeddings of 32 numbers"),
        ("smolvlm", "v.extra.weight", (2,), "holds 1 tensors .*v.extra.weight"),
        ("gemma3", "mm.input_projection.weight", (24, 31), "embeddings of 32 numbers"),
        ("gemma3", "mm.input_projection.weight", (23, 32), r"has shape \[23, 32\]"),
        ("gemma3", "mm.soft_emb_norm.weight", None, "lacks 1 tensors .*mm.soft_emb_norm"),
        ("gemma4_e", "v.blk.0.attn_q_norm.weight", (6,), "multiple of 4"),
        ("gemma4_e", "v.blk.0.attn_q_norm.weight", None, "lacks|multiple of 4"),
        ("gemma4_e", "v.blk.0.attn_k.weight", (4, 24), "num_key_value_heads=0"),
        ("gemma4_e", "v.blk.1.attn_q.input_min", None, "lacks 1 tensors .*attn_q.input_min"),
        ("gemma4_e", "v.blk.1.attn_q.input_min", (2,), r"input_min has shape \[2\]"),
        ("gemma4_e", "v.patch_embd.weight", (24, 12), "must have 4 dimensions, not 2"),
        ("gemma4_e", "v.position_embd.weight", None, "position_embedding_size=0"),
        ("gemma4_e", "v.position_embd.weight", (3, 64, 24), r"has shape \[3, 64, 24\]"),
        ("gemma4_e", "v.std_bias", (24,), "lacks 1 tensors .*v.std_scale"),
        ("gemma4_e", "mm.input_projection.weight", (31, 24), "embeddings of 32 numbers"),
        ("gemma4_unified", "v.patch_norm.3.bias", None, "lacks 1 tensors .*v.patch_norm.3.bias"),
        ("gemma4_unified", "v.patch_embd.weight", (24, 108, 1), "must have 2 dimensions, not 3"),
        ("gemma4_unified", "v.position_embd.weight", None, "mm_posemb_size=0"),
        ("gemma4_unified", "v.position_embd.weight", (80, 2, 24), r"has shape \[80, 2, 24\]"),
        ("gemma4_unified", "mm.a.input_projection.weight", (31, 640), "embeddings of 32 numbers"),
        ("qwen2_vl", "v.blk.2.attn_k.bias", (15,), r"attn_k.bias has shape \[15\]"),
        ("qwen2_vl", "v.patch_embd.weight.1", (16, 3, 4, 5), "v.patch_embd.weight.1 has shape"),
        ("qwen2_vl", "v.patch_embd.weight.1", None, "v.patch_embd.weight has shape"),
        ("qwen3_vl", "v.position_embd.weight", None, "num_position_embeddings|position_embd"),
        ("qwen3_vl", "v.position_embd.weight", (15, 16), "it must be a square"),
        ("qwen3_vl", "v.deepstack.1.norm.bias", None, "lacks 1 tensors .*v.deepstack.1.norm.bias"),
    ],
)
def test_tensors(
    name: str,
    tensor: str,
    shape: tuple[int, ...] | None,
    message: str,
    make_files,
    tmp_path: Path,
) -> None:
    text, metadata, arrays = make_files(name)
    tower = tmp_path / "tower.gguf"
    arrays.pop(tensor, None)
    if shape is not None:
        arrays[tensor] = np.zeros(shape, np.float32)
    save_tower(tower, metadata, arrays)
    with pytest.raises(ModelError, match=message):
        load(text, tower)


def test_files(make_files, tmp_path: Path) -> None:
    text, metadata, arrays = make_files("smolvlm")
    with pytest.raises(ModelError, match="there is no such file; name a GGUF file"):
        open_checkpoint(text, mmproj=str(tmp_path / "none.gguf"))
    with pytest.raises(ModelError, match="is not a GGUF file, and only such models"):
        open_checkpoint(tmp_path, mmproj=str(text))
    tower = tmp_path / "tower.gguf"
    save_tower(tower, metadata, arrays)
    whole = tower.read_bytes()
    for damaged in (b"", b"GGUF", whole[:300], whole[:-100], b"x" * 100):
        tower.write_bytes(damaged)
        with pytest.raises(ModelError, match=re.escape(str(tower))):
            load(text, tower)


def test_choice_among_files() -> None:
    assert choose_mmproj(["model.gguf", "README.md"]) is None
    assert choose_mmproj(["model.gguf", "mmproj.gguf"]) == "mmproj.gguf"
    published = ["mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf", "m-F16.gguf"]
    assert choose_mmproj(published) == "mmproj-F16.gguf"
    assert choose_mmproj(["mmproj-m-bf16.gguf", "mmproj-m-f32.gguf"]) == "mmproj-m-bf16.gguf"
    with pytest.raises(ModelError, match=r"several mmproj files: mmproj-a.gguf, mmproj-b.gguf"):
        choose_mmproj(["mmproj-a.gguf", "mmproj-b.gguf"])


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"clip.audio.num_mel_bins": 128}, {}, "num_mel_bins=128.*it must be 8, the channels"),
        ({"clip.audio.num_mel_bins": None}, {}, "num_mel_bins is missing"),
        ({"clip.audio.block_count": HUGE}, {}, "block_count=2147483647"),
        ({"clip.audio.block_count": 3}, {}, "lacks .* tensors .*a.blk.2"),
        ({"clip.audio.block_count": 1}, {}, "holds .* tensors .*a.blk.1"),
        ({"clip.audio.attention.head_count": 5}, {}, "multiple of the number of heads"),
        ({"clip.audio.chunk_size": 8}, {}, "keys clip.audio.chunk_size is not supported"),
        ({"clip.has_audio_encoder": 3}, {}, "has_audio_encoder=3"),
        ({"clip.has_audio_encoder": False}, {}, "keys clip.audio.* is not supported"),
        ({}, {"mm.a.input_projection.weight": (31, 20)}, "embeddings of 32 numbers"),
        ({}, {"a.blk.0.conv_dw.weight": (24,)}, "conv_kernel_size=24|conv_dw.weight has shape"),
        ({}, {"a.conv1d.1.weight": (6, 7, 3, 3)}, r"conv1d.1.weight has shape \[6, 7, 3, 3\]"),
        ({}, {"a.blk.1.per_dim_scale.weight": (7,)}, r"per_dim_scale.weight has shape \[7\]"),
        ({}, {"a.pre_encode.out.weight": None}, "output_proj_dims=0"),
        ({}, {"a.blk.0.attn_k_rel.weight": None}, "lacks 1 tensors .*attn_k_rel"),
    ],
)
def test_sounds(
    changes: dict[str, Any],
    tensors: dict[str, tuple[int, ...] | None],
    message: str,
    hearing: tuple[Path, dict[str, Any], dict[str, Any]],
    tmp_path: Path,
) -> None:
    text, metadata, arrays = hearing
    metadata = {k: v for k, v in (metadata | changes).items() if v is not None}
    own = dict(arrays)
    for name, shape in tensors.items():
        own.pop(name)
        if shape is not None:
            own[name] = np.zeros(shape, np.float32)
    tower = tmp_path / "tower.gguf"
    save_tower(tower, metadata, own)
    with pytest.raises(ModelError, match=message) as caught:
        load(text, tower)
    assert str(tower) in str(caught.value)
