"""Mixtures of experts in the layouts of published quantized checkpoints."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import ModelError
from octavo.system.distributed import Rank
from tests.models.cases import CASES as CONFIGS
from tests.models.harness import load, make_hf, save_config, spec_of
from tests.quantization import test_awq, test_compressed_tensors, test_fp4, test_fp8, test_gptq
from tests.quantization.harness import Folders, Quantize, logits
from tests.quantization.test_compressed_tensors import TOKENS

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "num_experts_per_tok": 4,
}  # fmt: skip
QWEN3 = "Qwen3MoeForCausalLM", SIZES | {"num_experts": 5, "moe_intermediate_size": 64}
QWEN2_SIZES = {name: value for name, value in QWEN3[1].items() if name != "head_dim"}
QWEN2 = "Qwen2MoeForCausalLM", QWEN2_SIZES | {"shared_expert_intermediate_size": 64}
MIXTRAL = "MixtralForCausalLM", SIZES | {"num_local_experts": 5, "sliding_window": None}
LATENT = {name: value for name, value in SIZES.items() if name != "head_dim"} | {
    "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 24,
}  # fmt: skip
DEEPSEEK = "DeepseekV3ForCausalLM", LATENT | {
    "n_routed_experts": 6, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 96,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LLAMA4 = "Llama4ForCausalLM", SIZES | {
    "num_local_experts": 5, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 1,
    "attention_chunk_size": 64,
}  # fmt: skip
GPT_OSS = "GptOssForCausalLM", SIZES | {
    "num_local_experts": 5, "sliding_window": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
GRANITE = "GraniteMoeForCausalLM", SIZES | {"num_local_experts": 5, "attention_multiplier": 0.1}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [48, 64]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
AUTO = GPTQ | {
    "quant_method": "auto-round", "packing_format": "auto_round:gptqmodel", "data_type": "int",
    "extra_config": {
        "model.layers.0.mlp.gate": {"bits": 16}, ".*1.mlp.gate$": {"bits": 16},
        "lm_head": {"bits": 16},
    },
}  # fmt: skip
GATES = [f"model.layers.{i}.mlp.gate" for i in range(2)]
IGNORED = {"ignore": ["lm_head", r"re:.*(mlp|moe)\.gate$", "re:.*router"]}


def but(make: Any, plain: str = "lm_head", **options: Any) -> Quantize:
    """Quantize all modules but those whose names match a pattern; routers have other names."""

    def quantize(rng: np.random.Generator, name: str, rows: int, inputs: int) -> Any:
        return None if re.search(plain, name) else make(rng, rows, inputs, **options)

    return quantize


def stacks(rng: np.random.Generator, name: str, *shape: int) -> Any:
    """Quantize stacked experts: FP8 with a scale for each output."""
    if len(shape) == 2:
        return None if name == "lm_head" else test_fp8.module(rng, *shape, "output")
    made = [test_fp8.module(rng, *shape[1:], "output") for _ in range(shape[0])]
    stored = {name: np.stack([own[name] for own, _ in made]) for name in made[0][0]}
    return stored, np.stack([weight for _, weight in made])


def ints(format: str = "pack-quantized", **fields: Any) -> dict[str, Any]:
    """Return the description of compressed-tensors."""
    return test_compressed_tensors.description(format, **fields) | IGNORED


FLOATS = ints("float-quantized", type="float", num_bits=8, strategy="channel")
INTS = test_compressed_tensors.module


@dataclass(frozen=True)
class Case:
    """A quantized mixture."""

    model: tuple[str, dict[str, Any]]
    quantize: Quantize
    description: dict[str, Any]
    stacked: str = ""

    def make(self, folder: Path) -> Folders:
        architecture, sizes = self.model
        return Folders(folder, self.quantize, sizes, architecture, self.stacked, **self.description)


CASES = {
    "deepseek fp8": Case(DEEPSEEK, but(test_fp8.module, kind="block"), BLOCKS),
    "qwen3 fp8": Case(
        QWEN3,
        but(test_fp8.module, kind="block"),
        BLOCKS | {"modules_to_not_convert": ["lm_head", *GATES]},
    ),
    "qwen3 fp8 tensors": Case(QWEN3, but(test_fp8.module, kind="tensor"), FP8),
    "mixtral fp8 outputs": Case(MIXTRAL, but(test_fp8.module, kind="output"), FLOATS),
    "llama4 fp8 outputs": Case(
        LLAMA4,
        but(test_fp8.module, "lm_head|self_attn", kind="output"),
        FLOATS | {"ignore": [*IGNORED["ignore"], "re:.*self_attn"]},
        "halves",
    ),
    "granite fp8 outputs": Case(GRANITE, stacks, FLOATS),
    "qwen3 W4A16": Case(QWEN3, but(INTS, group=32), ints(group_size=32)),
    "deepseek W4A16 zeros": Case(
        DEEPSEEK, but(INTS, group=32, symmetric=False), ints(group_size=32, symmetric=False)
    ),
    "gpt-oss W4A16": Case(GPT_OSS, but(INTS, group=32), ints(group_size=32), "turns"),
    "mixtral W8A8": Case(
        MIXTRAL,
        but(INTS, bits=8, packed=False),
        ints("int-quantized", num_bits=8, activations=TOKENS),
    ),
    "qwen3 awq": Case(QWEN3, but(test_awq.module), AWQ | {"modules_to_not_convert": ["gate"]}),
    "qwen3 gptq": Case(QWEN3, but(test_gptq.module, group=32), GPTQ),
    "mixtral gptq act-order": Case(
        MIXTRAL,
        but(test_gptq.module, group=32, ordered=True),
        GPTQ | {"desc_act": True, "dynamic": {r"-:.*\.gate$": {}}},
    ),
    "qwen3 auto-round": Case(QWEN3, but(test_gptq.module, group=32, minus_one=False), AUTO),
    "qwen3 nvfp4": Case(
        QWEN3, but(test_fp4.module, kind="nvfp4"), test_fp4.describe("nvfp4") | IGNORED
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_have_the_weights(name: str, tmp_path: Path) -> None:
    """Of all experts, of a rank's columns of them, and of a rank's experts."""
    folders = CASES[name].make(tmp_path)
    folders.assert_same_weights()
    folders.assert_same_weights(Rank(1, 2))
    folders.assert_same_weights(Rank(1, 2, splits_experts=True))
    folders.assert_same_logits()


EXPERT = "model.layers.1.mlp.experts.3."
DAMAGES: list[tuple[str, dict[str, Any], str]] = [
    (f"{EXPERT}.*", {}, r"lacks 3 tensors .*experts\.3\.gate_proj\.weight"),
    (f"{EXPERT}up_proj.weight_scale_inv", {}, f"{EXPERT}up_proj.weight_scale_inv is missing"),
    ("", {"num_experts": 4}, r"holds \d+ tensors .*experts\.4\."),
    ("", {"num_experts": 6}, r"lacks 6 tensors .*experts\.5\."),
    ("", {"moe_intermediate_size": 96}, r"gate_proj\.weight has shape .*requires \[96, 128\]"),
]
"""Pattern of missing tensors, fields of config.json, and the error."""


def test_damaged_checkpoints(tmp_path: Path) -> None:
    folders = CASES["qwen3 fp8"].make(tmp_path)
    good, file = folders.tensors, folders.quantized / "config.json"
    for pattern, fields, message in DAMAGES:
        folders.tensors = {k: v for k, v in good.items() if not re.fullmatch(pattern, k)}
        folders.save()
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        with pytest.raises(ModelError, match=message):
            load(folders.quantized)
    for module in ("up_proj", "down_proj"):
        folders.save(modules_to_not_convert=[f"{EXPERT}{module}"])
        forms = r"\(fp8-48x64 in mlp\.experts\.0\.\w+, plain in mlp\.experts\.3\."
        with pytest.raises(ModelError, match=rf"^model\.layers\.1: .* forms {forms}{module}\)"):
            load(folders.quantized)


@pytest.mark.parametrize("model", [LLAMA4, GPT_OSS, GRANITE], ids=lambda model: model[0])
def test_stacked_experts_are_quantized_while_loading(model: Any, tmp_path: Path) -> None:
    architecture, sizes = model
    make_hf(architecture, **sizes).save_pretrained(tmp_path)
    want = logits(tmp_path)
    for name in ("int8", "int4", "fp8"):
        spec = spec_of(tmp_path, quantization=name)
        own = [weight for weight in spec.weights() if ".experts." in weight.name]
        assert {weight.form.name for weight in own} == {name}
        got = logits(tmp_path, quantization=name)
        assert 0 < (got - want).norm() / want.norm() < 0.2


def test_a_list_may_have_the_names_of_the_whole_model(tmp_path: Path) -> None:
    """A model that also reads pictures calls its text part language_model."""
    architecture, sizes = CONFIGS["qwen3.5-moe"]
    save_config(tmp_path, architecture, sizes)
    file = tmp_path / "config.json"
    plain = [f"model.language_model.layers.0.{name}" for name in ("linear_attn", "mlp.gate")]
    described = BLOCKS | {"modules_to_not_convert": plain}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": described}))
    forms = {w.name: w.form.name for w in spec_of(tmp_path).weights() if w.kind == "linear"}
    own = {name: form for name, form in forms.items() if name.startswith("layers.0.")}
    quantized = {name for name, form in own.items() if form != "plain"}
    assert quantized == {name for name in own if ".experts." in name or ".shared." in name}


def forms(folder: Path, model: tuple[str, dict[str, Any]], **description: Any) -> dict[str, str]:
    """Return the form of each linear weight of a model that is described as quantized."""
    architecture, sizes = model
    save_config(folder, architecture, sizes)
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": description}
    file.write_text(json.dumps(config))
    return {weight.name: weight.form.name for weight in spec_of(folder).weights()}


def test_an_entry_gate_of_awq_is_the_router(tmp_path: Path) -> None:
    """Projections named gate_proj, of dense layers and of shared experts, are quantized."""
    shared = QWEN2[1] | {"mlp_only_layers": [0]}
    for text in ("gate", "mlp.gate"):
        found = forms(tmp_path, (QWEN2[0], shared), **AWQ, modules_to_not_convert=[text])
        for name in ("layers.0.gate_up_proj.weight", "layers.1.shared.gate_up_proj.weight"):
            assert found[name].startswith("awq"), (text, name)
        assert found["layers.1.experts.0.up.weight"].startswith("awq")
        assert found["layers.1.router.proj.weight"] == "plain"


@pytest.mark.parametrize(
    ("pattern", "form"),
    [
        (r".*\.gate$", "gptq"),
        (r"+:.*mlp\.gate", "gptq"),
        (".*mlp", "plain"),
        (r"-:.*gate$", "plain"),
    ],
)
def test_a_router_that_gptq_names(pattern: str, form: str, tmp_path: Path) -> None:
    """A pattern for the router alone quantizes it; one for the whole block does not."""
    found = forms(tmp_path, QWEN3, **GPTQ, dynamic={pattern: {"bits": 8}})
    assert found["layers.1.router.proj.weight"].startswith(form)
    assert found["layers.1.experts.0.up.weight"].startswith("gptq")
