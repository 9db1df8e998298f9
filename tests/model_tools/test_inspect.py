"""`octavo inspect`: what it counts, and that its features are the engine's own checks."""

import json
import math
import shutil

import pytest
import transformers

from octavo import cli
from octavo.checkpoints.registry import open_checkpoint
from octavo.checkpoints.safetensors_header import read_header
from octavo.engine import checks
from octavo.errors import ModelError
from octavo.model_tools.inspect import inspect
from octavo.models.hub import local_folder
from octavo.models.registry import read_spec
from tests.gguf_files import convert
from tests.models.cases import CASES
from tests.models.harness import make_hf, save_config
from tests.models.test_encoders import ENCODERS

STORIES = local_folder("octavo/stories")


def features(result):
    """Return the error of each feature, None for those that work."""
    return {feature["name"]: feature["problem"] for feature in result["features"]}


@pytest.fixture(scope="module")
def gguf(tmp_path_factory):
    """Write a tied Llama with blocks in its layers: 4 heads, 2 of keys and values, 3 layers."""
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    types = {"attn_": "q4_0", "ffn_": "q8_0", "": "f32"}
    convert(transformers.LlamaForCausalLM(config), "llama", path, types)
    return path


def test_parameters_are_those_of_the_file():
    result = inspect({"model": "octavo/stories"})
    stored = read_header(STORIES / "model.safetensors").values()
    assert result["parameters"] == sum(math.prod(tensor.shape) for tensor in stored)
    kinds = result["weights"]
    assert sum(kind["parameters"] for kind in kinds.values()) == result["parameters"]
    assert kinds["embedding"]["parameters"] == 4096 * 256  # once, though tied
    assert "head" not in kinds
    assert kinds["norms"]["parameters"] == 13 * 256
    assert {kind["bits_per_weight"] for kind in kinds.values()} == {16.0}
    assert result["files"]["bits_per_weight"] == pytest.approx(16, abs=0.1)
    assert result["context_length"] == 2048
    assert result["layers"][0].startswith("6 x attention (4 heads of 64, 2 of keys and values)")


@pytest.mark.parametrize(
    ("case", "layer"),
    [
        ("lfm2", "2 x short convolution (3 tokens) + MLP (gated silu, 70 inner columns)"),
        ("rwkv7", "3 x time mix (4 heads of 16) + channel mix (96 inner columns)"),
        ("jamba", "2 x Mamba (96 channels of 16) + MLP (gated silu, 72 inner columns)"),
        ("nemotron-h-latent", "2 x experts (3 of 6, 20 inner columns, 28 shared)"),
        (
            "falcon-h1",
            "3 x Mamba-2 (6 heads of 16 x 12) beside attention (4 heads of 16, 2 of keys and "
            "values) + MLP (gated silu, 72 inner columns)",
        ),
        (
            "kimi-linear",
            "1 x Kimi delta attention (2 heads of 16 x 16, 2 of queries and keys) + MLP (gated "
            "silu, 72 inner columns)",
        ),
    ],
)
def test_layers_have_plain_names(case, layer, tmp_path):
    save_config(tmp_path, *CASES[case])
    found = inspect({"model": str(tmp_path), "load_format": "dummy", "skip_tokenizer_init": True})
    assert layer in found["layers"]
    assert "Spec" not in " ".join(found["layers"])
    assert found["files"]["number"] == 0


def test_a_quantized_head_holds_a_tied_table_twice():
    kinds = inspect({"model": "octavo/stories", "quantization": "int8"})["weights"]
    assert kinds["embedding"]["parameters"] == 4096 * 256
    assert kinds["embedding"]["forms"] == {"bfloat16": 4096 * 256, "int8": 4096 * 256}
    assert kinds["embedding"]["bits_per_weight"] == 16 + 8 + 32 / 256
    assert set(kinds["MLP"]["forms"]) == {"int8"}
    assert 8 < kinds["MLP"]["bits_per_weight"] < 8.2


def test_weights_that_are_computed_from_others_have_no_parameters(tmp_path):
    """The vectors of distances of DeBERTa: only their table and its norm are of the file."""
    hf = make_hf(ENCODERS["deberta-model"][0], **ENCODERS["deberta-model"][1])
    hf.save_pretrained(tmp_path)
    found = inspect({"model": str(tmp_path), "skip_tokenizer_init": True})
    assert found["parameters"] == sum(parameter.numel() for parameter in hf.parameters())


def test_a_gguf_file_has_its_own_types(gguf):
    result = inspect({"model": str(gguf)})
    assert result["quantization"] == "gguf"
    kinds = result["weights"]
    assert set(kinds["attention"]["forms"]) == {"gguf-q4_0"}
    assert set(kinds["MLP"]["forms"]) == {"gguf-q8_0"}
    assert kinds["attention"]["bits_per_weight"] == pytest.approx(4.5, abs=0.1)
    assert kinds["attention"]["parameters"] == 3 * 64 * (64 + 32 + 32 + 64)
    assert kinds["embedding"]["parameters"] == 128 * 64
    found = features(result)
    assert "quantized already" in found["--quantization int8"]
    assert found["structured output"] is None
    sizes = {feature["name"]: feature["note"] for feature in result["features"]}
    assert sizes["tensor_parallel_size"].startswith("2, 3, 4 of 2 to 8: tensor_parallel_size=5 is")
    assert sizes["pipeline_parallel_size"].startswith("2, 3 of 2 to 8: pipeline_parallel_size=4 is")


def test_features_are_the_engines_checks(monkeypatch):
    """A new requirement of the engine shows up without a change of the command."""
    found = features(inspect({"model": "octavo/stories"}))
    assert found["prefix caching"] is found["draft model"] is found["int8 KV cache"] is None
    assert found["LoRA adapters"] is None
    more = checks.Requirement(
        "", "", lambda config, _: config.model.enable_sleep_mode, "{config.model.model} never rests"
    )
    monkeypatch.setattr(checks, "REQUIREMENTS", (*checks.REQUIREMENTS, more))
    found = features(inspect({"model": "octavo/stories"}))
    assert found["sleep mode"] == "octavo/stories never rests"
    assert found["prefix caching"] is None


def test_a_model_that_cannot_be_loaded(tmp_path, capsys):
    """The tokenizer and the weights may be missing; damaged files raise the errors of loading."""
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(STORIES / "config.json", folder)
    result = inspect({"model": str(folder)})
    assert "safetensors" in result["files"]["problem"]
    assert result["files"]["bits_per_weight"] is None
    assert "tokenizer.json" in features(result)["structured output"]
    assert features(result)["chat"] == features(result)["structured output"]
    data = (STORIES / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError) as caught:
        open_checkpoint(folder).open(read_spec(open_checkpoint(folder)).expected)
    assert cli.main(["inspect", str(folder)]) == 1
    assert str(caught.value) in capsys.readouterr().err
    (folder / "model.safetensors").write_bytes(data)
    config = json.loads((STORIES / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    assert cli.main(["inspect", str(folder)]) == 1
    assert "has shape" in capsys.readouterr().err


def test_the_command_prints_text_and_json(capsys):
    assert cli.main(["inspect", "octavo/stories", "--json", "--dtype", "float32"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["dtype"] == "float32"
    assert result["weights"]["MLP"]["bits_per_weight"] == 32
    assert cli.main(["inspect", "octavo/stories"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for words in ("5,475,584", "LlamaForCausalLM", "prefix caching", "yes"):
        assert words in shown.out
    assert cli.main(["inspect"]) == 2
    assert "MODEL is missing" in capsys.readouterr().err


def test_no_weight_is_read(monkeypatch):
    from octavo.checkpoints.mapped_file import MappedTensors

    def read(self, source):
        raise AssertionError("a weight is read")

    monkeypatch.setattr(MappedTensors, "read", read)
    inspect({"model": "octavo/stories"})
