"""`octavo convert`: against compressed-tensors and gguf where installed, numpy, and loading."""

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy
import torch

from octavo import cli
from octavo.checkpoints.gguf.header import GGUFHeader
from octavo.checkpoints.registry import open_checkpoint
from octavo.kernels.dequantize import dequantize
from octavo.model_tools import gguf_writer, unfinished
from octavo.model_tools.quality import measure
from octavo.models.hub import local_folder
from octavo.models.registry import read_spec
from octavo.text.tokenizer import Tokenizer
from tests import gguf_files, small_tokenizers
from tests.checkpoints.gguf.test_file import FALCON_H1, MODELS
from tests.model_tools.conftest import make_folder
from tests.models.harness import generate, load, make_prompts
from tests.pooling import pooling, write_modules

STORIES = local_folder("octavo/stories")


def convert(model, out, to):
    """Run the command; return the output."""
    assert cli.main(["convert", str(model), str(out), "--to", to, "--disable-tqdm"]) == 0
    return out


def refused(capsys, model, out, to, status=2):
    """Return the error of the command, which leaves nothing under the final name."""
    before = out.exists()
    assert cli.main(["convert", str(model), str(out), "--to", to, "--disable-tqdm"]) == status
    assert out.exists() == before
    return capsys.readouterr().err


# compressed-tensors


def unpack(tensors, module, bits):
    """Return the numbers of a quantized module by plain formulas."""
    scale = tensors[f"{module}.weight_scale"].astype(np.float32)
    if bits == 8:
        return tensors[f"{module}.weight"].astype(np.float32) * scale
    packed = tensors[f"{module}.weight_packed"].view(np.uint32)
    codes = (packed[..., None] >> (4 * np.arange(8, dtype=np.uint32))) & 15
    rows, columns = tensors[f"{module}.weight_shape"].tolist()
    numbers = codes.reshape(rows, scale.shape[1], -1).astype(np.float32) - 8
    return (numbers * scale[..., None]).reshape(rows, columns)


@pytest.mark.parametrize(("bits", "most"), [(8, 0.02), (4, 0.13)])
def test_compressed_tensors(llama, tmp_path, capsys, bits, most):
    folder, hf = llama
    out = convert(folder, tmp_path / "out", f"int{bits}")
    assert not (tmp_path / "out.unfinished").exists()
    size = (out / "model.safetensors").stat().st_size
    assert f"out: {size:,} bytes" in capsys.readouterr().out  # told before
    tensors = safetensors.numpy.load_file(out / "model.safetensors")
    state = {name: tensor.numpy() for name, tensor in hf.state_dict().items()}
    quantized = 0
    for name, tensor in state.items():
        module = name.removesuffix(".weight")
        if "proj" in name:
            found = unpack(tensors, module, bits)
            assert np.linalg.norm(found - tensor) < most * np.linalg.norm(tensor)
            quantized += 1
        elif name != "lm_head.weight":
            np.testing.assert_array_equal(tensors[name], tensor)
    assert quantized == 21
    assert len(tensors) == quantized * (2 if bits == 8 else 3) + 8  # norms and embedding
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "lm_head" in config["quantization_config"]["ignore"]
    assert Tokenizer.from_folder(out).encode("hello") == Tokenizer.from_folder(folder).encode(
        "hello"
    )


@pytest.mark.parametrize("bits", [8, 4])
def test_the_package_compressed_tensors_reads_the_same(llama, tmp_path, bits):
    package = pytest.importorskip("compressed_tensors")
    base = pytest.importorskip("compressed_tensors.compressors.base")
    out = convert(llama[0], tmp_path / "out", f"int{bits}")
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    config = package.QuantizationConfig.model_validate(described)
    compressor = base.BaseCompressor.get_value_from_registry(config.format)
    tensors = safetensors.numpy.load_file(out / "model.safetensors")
    module = "model.layers.1.mlp.down_proj"
    own = {n: torch.tensor(t) for n, t in tensors.items() if n.startswith(f"{module}.")}
    own = {name.removeprefix(f"{module}."): tensor for name, tensor in own.items()}
    theirs = compressor.decompress(own, config.config_groups["group_0"])["weight"]
    np.testing.assert_array_equal(theirs.float().numpy(), unpack(tensors, module, bits))


def test_groups_divide_the_inputs(tmp_path):
    """One size of groups for the whole model; modules that none divides stay plain."""
    folder = tmp_path / "odd"
    make_folder(folder, "LlamaForCausalLM", intermediate_size=80)
    out = convert(folder, tmp_path / "out", "int4")
    tensors = safetensors.numpy.load_file(out / "model.safetensors")
    assert tensors["model.layers.0.self_attn.q_proj.weight_scale"].shape == (64, 2)
    assert "model.layers.0.mlp.down_proj.weight" in tensors
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    assert described["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert "model.layers.2.mlp.down_proj" in described["ignore"]


def test_scales_of_bfloat16_models_fit_float16(tmp_path):
    out = convert("octavo/stories", tmp_path / "out", "int4")
    spec, checkpoint = read_spec(open_checkpoint(STORIES)), out / "model.safetensors"
    assert spec.dtype == "bfloat16"
    with safetensors.safe_open(checkpoint, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  # not a mapping
            if name.endswith("weight_scale"):
                scale = tensors.get_tensor(name)
                assert scale.dtype == torch.bfloat16
                assert torch.equal(scale.half().float(), scale.float())


@pytest.mark.parametrize(("to", "most"), [("int8", 1.005), ("fp8", 1.02), ("int4", 1.05)])
def test_octavo_reads_a_converted_folder(to, most, tmp_path):
    """The codes are those of the file: the model is almost the original."""
    out = convert("octavo/stories", tmp_path / "out", to)
    found = measure({"model": str(out)}, base="octavo/stories", chunk=256, tokens=1500)
    assert 1 / most < found["ratio"]["value"] < most
    assert found["kl_divergence"]["value"] > 1e-5
    forms = {w.form.name for w in read_spec(open_checkpoint(out)).weights() if w.kind == "linear"}
    assert len(forms) == 2  # the layers', and the plain LM head


def test_fp8(tmp_path):
    """Blocks of 128 x 128 numbers, those at the ends smaller, share a scale."""
    folder = tmp_path / "model"
    hf = make_folder(folder, "LlamaForCausalLM", intermediate_size=160)
    out = convert(folder, tmp_path / "out", "fp8")
    tensors = safetensors.torch.load_file(out / "model.safetensors")
    name = "model.layers.1.mlp.gate_proj"
    codes, scales = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale_inv"]
    assert (codes.dtype, codes.shape) == (torch.float8_e4m3fn, (160, 64))
    assert (scales.dtype, scales.shape) == (torch.float32, (2, 1))
    original = hf.get_parameter(f"{name}.weight").detach()
    for block, rows in enumerate((slice(0, 128), slice(128, 160))):
        assert scales[block, 0] == original[rows].abs().max() / 448
        expected = (original[rows] / scales[block, 0]).to(torch.float8_e4m3fn)
        assert torch.equal(codes[rows].view(torch.uint8), expected.view(torch.uint8))
    described = json.loads((out / "config.json").read_text())["quantization_config"]
    assert described["quant_method"] == "fp8"
    assert described["modules_to_not_convert"] == ["lm_head"]


# GGUF

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
KINDS = {
    "llama": ("LlamaForCausalLM", {}),
    "llama3": (
        "LlamaForCausalLM",
        {"max_position_embeddings": 16384, "tie_word_embeddings": True}
        | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}
           | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
           | {"original_max_position_embeddings": 8192}},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
    "gemma": ("GemmaForCausalLM", {"head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", {"head_dim": 16, "sliding_window": 24}
               | {"query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3ForCausalLM", {"head_dim": 16, "sliding_window": 24}
               | {"query_pre_attn_scalar": 16, "num_hidden_layers": 6}),
    "granite": ("GraniteForCausalLM", {"attention_multiplier": 0.2, "logits_scaling": 4.0}
                | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": None}),
    "olmo3": ("Olmo3ForCausalLM", {"sliding_window": 24, "layer_types": WINDOWS}),
    "exaone4": ("Exaone4ForCausalLM", {"sliding_window": 24, "layer_types": WINDOWS}),
    "seed_oss": ("SeedOssForCausalLM", {"head_dim": 16, "attention_out_bias": False}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {}),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", {"head_dim": 16}),
    "yarn": ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}
             | {"factor": 4.0, "original_max_position_embeddings": 64}}),
}  # fmt: skip
READ_ONLY = (
    "mamba2",
    "granitehybrid",
    "falcon-h1",
    "nemotron_h",
    "rwkv7",
    *("gpt-oss", "lfm2moe", "glm4moe", "qwen35moe", "qwen3next", "dots1", "minimax-m2", "llama4"),
    *("exaone-moe", "afmoe", "cohere2moe", "nemotron_h_moe", "granitemoe"),
    *("laguna", "mimo2"),
    *("gemma4 experts", "deepseek2", "minicpm3", "ernie4_5-moe", "hunyuan-moe"),
    "muse-glimmer",
    "exaone",
    "internlm2",
    "xverse",
    "bitnet",
    "qwen2vl",
    "qwen3vl",
    "paddleocr",
    "mamba",
    "jamba",
)
KINDS |= {
    name: model
    for name, model in MODELS.items()
    if {name, name.split()[0]}.isdisjoint({*KINDS, *READ_ONLY, "minicpm", "mistral3"})
}
KINDS |= {name: MODELS[name] for name in ("mistral3 long", "phi3 longrope", "qwen2 yarn")}
OTHER_SIZES = {name: {"num_key_value_heads": 4} for name in ("gpt2", "gptneox", "bloom", "mpt")}
OTHER_SIZES |= {name: {"vocab_size_per_layer_input": 272} for name in ("gemma3n", "gemma4")}
OTHER_SIZES["lfm2 untied"] = {"num_hidden_layers": 2}
OTHER_SIZES["mistral3 long"] = {"max_position_embeddings": 128}


@pytest.mark.parametrize("name", KINDS)
def test_gguf_of_an_architecture(name, tmp_path):
    """The tensors are those of llama.cpp's converter, and the file computes the same model."""
    architecture, config = KINDS[name]
    config = config | OTHER_SIZES.get(name, {})
    folder = tmp_path / name
    hf = make_folder(folder, architecture, **config)
    out = convert(folder, tmp_path / f"{name}.gguf", "gguf:F32")
    kind = {"llama3": "llama", "mistral": "llama", "yarn": "llama", "olmo3": "olmo2"}
    kind = kind.get(name, name.split()[0])
    expected = tmp_path / "expected.gguf"
    gguf_files.convert(hf, kind, expected, as_published=False)
    ours, theirs = GGUFHeader(out), GGUFHeader(expected)
    unread = [f"blk.{i}.attn_{part}.weight" for i in (3, 4) for part in ("k", "v", "k_norm")]
    assert ours.tensors.keys() - theirs.tensors.keys() == {*(unread if kind == "gemma3n" else [])}
    assert not theirs.tensors.keys() - ours.tensors.keys()
    for key, tensor in theirs.tensors.items():
        found = ours.tensors[key]
        assert (found.type, found.shape) == (tensor.type, tensor.shape), key
        data, truth = (
            np.frombuffer(h.data, np.float32, t.nbytes // 4, t.begin)
            for h, t in ((ours, found), (theirs, tensor))
        )
        np.testing.assert_allclose(data, truth, rtol=1e-6, err_msg=key)
    for key, value in theirs.metadata.items():
        if kind in MIXTURES and key.endswith(f"{kind}.feed_forward_length"):
            continue  # size of dense layers, which the model does not have
        if key.startswith(kind) and key in ours.metadata:
            assert ours.metadata[key] == pytest.approx(value), key
    own = {key for key in theirs.metadata if key.startswith(kind)}
    assert own - ours.metadata.keys() <= {f"{kind}.attention.sliding_window"}
    prompts = make_prompts(200, (40, 3))
    first, second = (generate(load(path), prompts, 4) for path in (folder, out))
    assert first.tokens == second.tokens
    for a, b in zip(first.logits, second.logits, strict=True):
        torch.testing.assert_close(a, b, atol=2e-4, rtol=1e-4)
    tokenizer = Tokenizer.from_folder(out)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert tokenizer.chat_templates == {"default": "{{ messages }}"}


def test_gguf_of_tokens_without_a_row(tmp_path):
    """Gemma 3n's table of per-layer embeddings has no rows for the ids of pictures: row 0."""
    architecture, config = MODELS["gemma3n"]
    make_folder(tmp_path / "m", architecture, **config | {"vocab_size_per_layer_input": 250})
    out = convert(tmp_path / "m", tmp_path / "m.gguf", "gguf:F32")
    prompts = [[5, 249, 250, 271, 3]]
    first, second = (generate(load(path), prompts, 2) for path in (tmp_path / "m", out))
    torch.testing.assert_close(first.logits[0], second.logits[0], atol=2e-4, rtol=1e-4)


def test_gguf_of_minicpm(tmp_path):
    """The file has the factors of Granite."""
    fields = {"embedding_multiplier": 3.0, "residual_multiplier": 1.4 / 3**0.5}
    fields |= {"attention_multiplier": 0.25, "logits_scaling": 3.2, "tie_word_embeddings": False}
    fields |= {"scale_emb": 3.0, "scale_depth": 1.4, "dim_model_base": 20}
    make_folder(tmp_path / "m", "MiniCPMForCausalLM", **fields)
    out = convert(tmp_path / "m", tmp_path / "m.gguf", "gguf:F32")
    assert GGUFHeader(out).metadata["general.architecture"] == "minicpm"
    prompts = make_prompts(200, (40, 3))
    first, second = (generate(load(path), prompts, 4) for path in (tmp_path / "m", out))
    assert first.tokens == second.tokens


QUANTIZED = ["gemma3n", "gemma4", "gpt2", "falcon new", "stablelm norms", "lfm2", "qwen35"]
MIXTURES = ("qwen2moe", "qwen3moe", "olmoe")


@pytest.mark.parametrize("name", MIXTURES)
def test_gguf_of_a_mixture_is_quantized(name, tmp_path):
    """Each expert has its own blocks; the router stays in float32."""
    architecture, config = KINDS[name]
    make_folder(tmp_path / "m", architecture, **config | OTHER_SIZES.get(name, {}))
    out = convert(tmp_path / "m", tmp_path / "m.gguf", "gguf:Q8_0")
    tensors = GGUFHeader(out).tensors
    for part in ("gate", "up", "down"):
        tensor = tensors[f"blk.1.ffn_{part}_exps.weight"]
        assert (tensor.type, tensor.shape[0]) == ("q8_0", config["num_experts"])
    assert tensors["blk.1.ffn_gate_inp.weight"].type == "float32"
    first, second = (
        generate(load(path), [[5, 9, 200, 3]], 1).logits[0].log_softmax(-1)
        for path in (tmp_path / "m", out)
    )
    assert 0 < (first - second).abs().mean() < 0.3


def test_gguf_of_a_mixture_that_it_cannot_describe(tmp_path, capsys):
    """Files of Qwen3 have no key for weights that are not divided by their sum."""
    architecture, config = KINDS["qwen3moe"]
    make_folder(tmp_path / "m", architecture, **config | {"norm_topk_prob": False})
    said = refused(capsys, tmp_path / "m", tmp_path / "m.gguf", "gguf:F16")
    assert "its layers would be read as another" in said


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_gguf_of_other_layouts(name, tmp_path):
    """Rows of blocks are those of the model: it is a little off."""
    architecture, config = KINDS[name]
    make_folder(tmp_path / "m", architecture, **config | OTHER_SIZES.get(name, {}))
    out = convert(tmp_path / "m", tmp_path / "m.gguf", "gguf:Q8_0")
    tensors = GGUFHeader(out).tensors.values()
    types = {t.name[: -len(".weight")]: t.type for t in tensors if t.name.endswith(".weight")}
    assert types["token_embd"] == types["blk.1.ffn_down"] == "q8_0"
    assert types.get("altup_proj", "float16") == types.get("blk.1.laurel_l", "float16") == "float16"
    assert types.get("position_embd", "float32") == "float32"
    first, second = (
        generate(load(path), [[5, 9, 200, 3]], 1).logits[0].log_softmax(-1)
        for path in (tmp_path / "m", out)
    )
    assert 0 < (first - second).abs().mean() < 0.3


def test_the_package_gguf_reads_the_file(llama, tmp_path):
    gguf = pytest.importorskip("gguf.gguf_reader")
    out = convert(llama[0], tmp_path / "m.gguf", "gguf:Q4_K_M")
    reader = gguf.GGUFReader(out)
    assert reader.get_field("general.architecture").contents() == "llama"
    assert reader.get_field("general.file_type").contents() == 15
    assert reader.get_field("tokenizer.ggml.tokens").contents()[256] == "<s>"
    assert {tensor.name for tensor in reader.tensors} == GGUFHeader(out).tensors.keys()


def test_the_mixes_are_llama_cpps():
    def kinds(mix, stored, columns=512, layers=32, tied=False):
        return [
            gguf_writer._type_of(
                gguf_writer.MIXES[mix], stored, layer, layers, (64, columns), tied=tied
            )
            for layer in range(layers)
        ]

    more = [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert [i for i, kind in enumerate(kinds("Q4_K_M", "attn_v")) if kind == "q6_k"] == more
    assert kinds("Q4_K_M", "ffn_down") == kinds("Q4_K_M", "attn_v")
    assert set(kinds("Q4_K_M", "attn_q")) == {"q4_k"}
    assert set(kinds("Q4_K_M", "attn_qkv")) == {"q5_k"}
    assert [kinds("Q4_K_S", "attn_v").count(kind) for kind in ("q5_k", "q4_k")] == [4, 28]
    assert set(kinds("Q5_K_S", "ffn_down")) == {"q5_k"}
    assert kinds("Q5_K_M", "ffn_down")[0] == "q6_k"
    assert set(kinds("Q4_0", "ffn_down")) == {"q4_0"}
    assert set(kinds("Q4_0", "output")) == set(kinds("Q4_0", "token_embd", tied=True)) == {"q6_k"}
    assert set(kinds("Q4_K_M", "token_embd")) == {"q4_k"}
    # Rows that blocks of 256 or 32 numbers do not divide.
    assert kinds("Q4_K_M", "ffn_down", 96)[:5] == ["q8_0"] * 4 + ["q5_0"]
    assert set(kinds("Q6_K", "attn_q", 40)) == {"float16"}
    mix = gguf_writer.MIXES["Q4_K_M"]
    assert gguf_writer._type_of(mix, "attn_norm", 0, 32, (512,), tied=False) == "float32"


@pytest.mark.parametrize(("mix", "most"), [("Q8_0", 1.003), ("Q4_K_M", 1.04), ("BF16", 1.001)])
def test_a_converted_model_keeps_its_quality(mix, most, tmp_path):
    out = convert("octavo/stories", tmp_path / "s.gguf", f"gguf:{mix.lower()}")
    found = measure({"model": str(out)}, base="octavo/stories", chunk=256, tokens=1500)
    assert 1 / most < found["ratio"]["value"] < most
    assert read_spec(open_checkpoint(out)).generation_config == {"temperature": 0.7, "top_p": 0.95}
    header = GGUFHeader(out)
    embedding = header.tensors["token_embd.weight"]
    assert embedding.type == {"Q8_0": "q8_0", "Q4_K_M": "q6_k", "BF16": "bfloat16"}[mix]
    if mix == "Q8_0":
        blocks = np.frombuffer(header.data, np.uint8, embedding.nbytes, embedding.begin)
        numbers = dequantize(blocks.reshape(4096, -1), "q8_0")
        table = safetensors.torch.load_file(STORIES / "model.safetensors")
        original = table["model.embed_tokens.weight"].float().numpy()
        np.testing.assert_allclose(numbers, original, atol=np.abs(original).max() / 127)


def test_a_float_gguf_file_is_a_source(llama, tmp_path):
    """Names, order of rows and norms are those of the folder again."""
    middle = convert(llama[0], tmp_path / "m.gguf", "gguf:F32")
    out = convert(middle, tmp_path / "int8", "int8")
    direct = convert(llama[0], tmp_path / "direct", "int8")
    ours, theirs = (safetensors.numpy.load_file(p / "model.safetensors") for p in (out, direct))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor)
    config = json.loads((out / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert Tokenizer.from_folder(out).encode("hello") == Tokenizer.from_folder(direct).encode(
        "hello"
    )


# Interruptions


@pytest.mark.parametrize("to", ["int4", "gguf:Q4_0"])
def test_an_interrupted_conversion_goes_on(llama, tmp_path, monkeypatch, to):
    folder = llama[0]
    suffix = ".gguf" if to.startswith("gguf") else ""
    expected, out = convert(folder, tmp_path / f"a{suffix}", to), tmp_path / f"b{suffix}"
    name = "model.gguf" if suffix else "model.safetensors"
    monkeypatch.setattr("octavo.model_tools.source_tensors._NUMBERS", 1024)
    half = (expected if suffix else expected / name).stat().st_size // 2
    written = []
    real = os.fsync

    def fail(descriptor):
        real(descriptor)
        written.append(os.fstat(descriptor).st_size)
        if written[-1] > half:
            raise KeyboardInterrupt

    monkeypatch.setattr(unfinished.os, "fsync", fail)
    words = ["convert", str(folder), str(out), "--to", to, "--disable-tqdm"]
    assert cli.main(words) == 130
    assert not out.exists()
    part = tmp_path / f"{out.name}.unfinished" / name
    assert part.stat().st_size == written[-1]
    with part.open("ab") as stream:
        stream.write(b"half a piece")  # of a process that was killed while it wrote
    made = []
    monkeypatch.setattr(unfinished, "_result", lambda p, f: made.append(p) or f.result())
    monkeypatch.setattr(unfinished.os, "fsync", real)
    convert(folder, out, to)
    whole = (expected if suffix else expected / name).read_bytes()
    assert (out if suffix else out / name).read_bytes() == whole
    assert sum(piece.nbytes for piece in made) <= len(whole) - half
    assert not part.parent.exists()


def test_work_on_another_source_is_discarded(llama, tmp_path):
    changed = tmp_path / "changed"
    shutil.copytree(llama[0], changed)
    out = tmp_path / "out"
    half = tmp_path / "out.unfinished"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"x" * 100_000)
    (half / "conversion.key").write_text("another source")
    convert(changed, out, "int8")
    direct = convert(llama[0], tmp_path / "direct", "int8")
    names = "model.safetensors"
    assert (out / names).read_bytes() == (direct / names).read_bytes()


def test_further_chat_templates_are_converted_too(llama, tmp_path, monkeypatch):
    source = tmp_path / "source"
    shutil.copytree(llama[0], source)
    templates = source / "additional_chat_templates"
    templates.mkdir()
    (templates / "rag.jinja").write_text("r")
    out = tmp_path / "out"
    convert(source, out, "int8")
    assert (out / "additional_chat_templates" / "rag.jinja").read_text() == "r"
    assert Tokenizer.from_folder(out).chat_templates["rag"] == "r"


def test_a_conversion_that_was_killed_near_its_end_goes_on(llama, tmp_path, monkeypatch):
    out = tmp_path / "out"
    half = tmp_path / "out.unfinished" / "additional_chat_templates"
    half.mkdir(parents=True)
    (half / "rag.jinja").write_text("r")
    convert(llama[0], out, "int8")
    assert not (out / "additional_chat_templates").exists()


@pytest.mark.parametrize("kind", ["write_text", "rename"])
def test_a_full_disk_at_the_end_is_told(llama, tmp_path, capsys, monkeypatch, kind):
    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    real = Path.write_text

    def write_text(path, *args, **kwargs):
        return full() if path.name == "config.json" else real(path, *args, **kwargs)

    out = tmp_path / "out"
    with monkeypatch.context() as broken:
        broken.setattr(Path, kind, write_text if kind == "write_text" else full)
        said = refused(capsys, llama[0], out, "int8")
    assert "No space left on device. The same command continues it." in said
    convert(llama[0], out, "int8")


# Refusals


def test_outputs_that_are_refused(llama, tmp_path, capsys, monkeypatch):
    folder, out = llama[0], tmp_path / "out"
    out.mkdir()
    assert "exists already" in refused(capsys, folder, out, "int8")
    assert "There is no folder" in refused(capsys, folder, tmp_path / "no" / "out", "int8")
    assert "must end in .gguf" in refused(capsys, folder, tmp_path / "m.bin", "gguf:Q8_0")
    other = tmp_path / "other"
    (tmp_path / "other.unfinished").mkdir()
    with (tmp_path / "other.unfinished" / "conversion.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "Another conversion is writing" in refused(capsys, folder, other, "int8")
    monkeypatch.setattr(unfinished.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    assert "and the disk of" in refused(capsys, folder, tmp_path / "large", "int8")


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("int3", "--to int3 is not supported; choose one of int8"),
        ("gguf:Q3_X", "TYPE must be one of F32, F16"),
        ("gguf", "TYPE must be one of"),
    ],
)
def test_targets_that_are_refused(llama, tmp_path, capsys, to, said):
    assert said in refused(capsys, llama[0], tmp_path / "x.gguf", to)


def test_sources_that_are_refused(llama, tmp_path, capsys):
    folder = llama[0]
    out = tmp_path / "out.gguf"
    quantized = convert(folder, tmp_path / "q.gguf", "gguf:Q8_0")
    assert "is quantized already, by gguf" in refused(capsys, quantized, out, "int8")
    windowed = tmp_path / "windowed"
    make_folder(windowed, "MistralForCausalLM", sliding_window=16)
    assert "its layers would be read as another" in refused(capsys, windowed, out, "gguf:F16")
    other = tmp_path / "helium"
    make_folder(other, "HeliumForCausalLM", head_dim=16)
    assert "cannot be written to GGUF" in refused(capsys, other, out, "gguf:F16")
    hybrid = tmp_path / "hybrid"
    make_folder(hybrid, "FalconH1ForCausalLM", **FALCON_H1)
    said = refused(capsys, hybrid, out, "gguf:F16")
    assert "FalconH1ForCausalLM cannot be written to GGUF" in said
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    tensors = safetensors.numpy.load_file(broken / "model.safetensors")
    tensors["model.layers.2.mlp.up_proj.weight"][5, 7] = np.inf
    safetensors.numpy.save_file(tensors, broken / "model.safetensors")
    said = "model.layers.2.mlp.up_proj.weight has numbers that are not finite"
    assert said in refused(capsys, broken, out, "gguf:Q4_0", 1)
    tensors["model.layers.2.mlp.up_proj.weight"][5, 7] = 1e6
    safetensors.numpy.save_file(tensors, broken / "model.safetensors")
    assert "which float16 cannot hold" in refused(capsys, broken, out, "gguf:F16", 1)
    assert "too large for scales in float16" in refused(capsys, broken, out, "gguf:Q4_K_M", 1)
    assert "too large for scales in float16" in refused(capsys, broken, out, "int4", 1)
    (broken / "model.safetensors").write_bytes(b"")
    assert refused(capsys, broken, out, "gguf:F16", 1)


def test_pooling_models(llama, tmp_path, capsys):
    folder = tmp_path / "vectors"
    shutil.copytree(llama[0], folder)
    write_modules(folder, pooling("lasttoken"))
    assert "is a pooling model" in refused(capsys, folder, tmp_path / "out", "int8")


def test_tokenizers_that_gguf_cannot_hold(llama, tmp_path, capsys):
    folder = tmp_path / "bert"
    shutil.copytree(llama[0], folder)
    small_tokenizers.save(small_tokenizers.word_piece(), folder, {})
    said = refused(capsys, folder, tmp_path / "m.gguf", "gguf:F16", 1)
    assert "is of the kind WordPiece" in said
    data = json.loads((llama[0] / "tokenizer.json").read_text())
    data["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    said = refused(capsys, folder, tmp_path / "m.gguf", "gguf:F16", 1)
    assert "for which GGUF has no name" in said
    assert convert(folder, tmp_path / "int8", "int8").exists()


def test_sentencepiece_tokenizers(llama, tmp_path):
    folder = tmp_path / "sp"
    shutil.copytree(llama[0], folder)
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    small_tokenizers.save(small_tokenizers.sentencepiece(), folder, config)
    out = convert(folder, tmp_path / "m.gguf", "gguf:F16")
    ours, theirs = Tokenizer.from_folder(out), Tokenizer.from_folder(folder)
    for text in ("a ab b", "  x", "é a"):
        assert ours.encode(text) == theirs.encode(text)
