"""Adapters: their slices of linear layers change the weights as PEFT does."""

import importlib.util
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import AdapterError
from octavo.models.adaptable_model import AdaptableModel
from octavo.models.adapters import Adapter, open_adapter, open_adapter_file
from octavo.models.forms import without_forms
from octavo.models.loader import read_parts
from octavo.models.spec import ModelSpec
from octavo.models.weight_norms import WeightNorms
from octavo.system.distributed import Rank
from octavo.system.tensor import numpy_dtype
from tests.adapters import PREFIX, LoadedAdapter, deltas, load_all, make_factors, write_adapter
from tests.models.cases import CASES
from tests.models.configs.with_towers import TEXT_PARTS
from tests.models.harness import make_hf, save_config, spec_of
from tests.models.test_encoders import ENCODERS

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="peft is not installed; it belongs to the extra dev",
)
LLAMA: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
Q, K, V = (
    f"model.layers.{layer}.self_attn.{name}_proj" for layer, name in ((0, "q"), (0, "k"), (1, "v"))
)
RANKS = (Rank(), Rank(0, 2), Rank(1, 2), Rank(1, 2, reduces=True))

# A case for each layout of a checkpoint: rows, Conv1D, groups of heads, parts of heads, halves,
# fused projections, norms over all heads, latents, several streams, linear attention, experts.
LAYOUTS = ("llama", "llama-mqa-tied-bias", "gpt2", "bloom", "falcon-7b", "falcon-40b", "codegen")
LAYOUTS += ("phi3", "glm", "gpt-neox", "mpt", "olmo2", "gemma3n", "gemma4", "qwen3.5", "opt-350m")
LAYOUTS += ("olmo-hybrid", "lfm2", "gpt-oss", "qwen2-moe", "llama4", "hy-v3", "bert", "modernbert")


def linear_weights(folder: Path, spec: ModelSpec) -> dict[str, NDArray[np.float64]]:
    """Return the weights of all linear layers, as they are before they are packed."""
    spec, found = without_forms(spec), {}
    tensors = open_checkpoint(folder).open(spec.expected)
    for weight in spec.weights():
        if weight.kind == "linear":
            parts = [
                np.asarray(part.numpy(), np.float64) for (part,) in read_parts(weight, tensors)[0]
            ]
            found[weight.name.removesuffix("weight")] = np.concatenate(parts)
    return found


@pytest.fixture
def model(tmp_path: Path) -> AdaptableModel:
    return AdaptableModel(save_config(tmp_path / "base", "LlamaForCausalLM", LLAMA))


def load(folder: Path, model: AdaptableModel, **kwargs: Any) -> LoadedAdapter:
    norms = kwargs.pop("norms", None)
    options = {"dtype": "float32", "max_lora_rank": 16} | kwargs
    return load_all(open_adapter(folder, model, **options), norms)


@needs_peft
@pytest.mark.parametrize("dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("case", LAYOUTS)
def test_slices_change_the_weights_as_peft_does(case: str, dora: bool, tmp_path: Path) -> None:
    """For whole models, and for parts of ranks that are split by outputs or by inputs."""
    from peft import LoraConfig, get_peft_model

    architecture, config = (CASES | ENCODERS)[case]
    hf = make_hf(architecture, **config)
    hf.save_pretrained(tmp_path / "base")
    names = [
        name
        for name, module in hf.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") and ".experts." not in name
    ]
    wanted = LoraConfig(
        r=4,
        lora_alpha=7,
        target_modules=names,
        init_lora_weights=False,
        rank_pattern={r"\w+\.0\..*": 3},
        alpha_pattern={"^" + names[-1]: 5},
        use_dora=dora,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fan_in_fan_out is set by PEFT itself
        torch.manual_seed(1)
        adapted = get_peft_model(hf, wanted)
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.data *= 0.5 + torch.rand(parameter.shape)
        adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    for rank in RANKS:
        spec = spec_of(tmp_path / "base").split(rank)
        before, after = (linear_weights(tmp_path / name, spec) for name in ("base", "merged"))
        loaded = load(tmp_path / "adapter", AdaptableModel(spec), norms=norms_of(spec, tmp_path))
        assert loaded.slices.keys() <= before.keys()
        changes = deltas(loaded, {name: weight.shape for name, weight in before.items()})
        for name, change in changes.items():
            expected = before[name] + change
            for it in loaded.slices.get(name, ()):
                assert (it.gain is not None) == dora
                if it.gain is not None:
                    expected[it.begin : it.end] *= it.gain[:, None]
            assert np.abs(after[name] - expected).max() < 1e-5, name
        assert any(np.abs(change).max() > 0.1 for change in changes.values())


def norms_of(spec: ModelSpec, folder: Path) -> WeightNorms:
    """Return the norms of the model in the folder `base`."""
    return WeightNorms(spec.weights(), lambda: open_checkpoint(folder / "base").open(spec.expected))


def slices_of(name: str, loaded: LoadedAdapter) -> list[tuple[int, int, float]]:
    return [(it.begin, it.end, it.scale) for it in loaded.slices[name]]


def test_modules_of_a_fused_layer_are_its_slices(model: AdaptableModel, tmp_path: Path) -> None:
    """Each has its own A; queries are 32 outputs, keys and values 16 each."""
    tensors = make_factors(model, [Q, K])
    loaded = load(write_adapter(tmp_path / "a", tensors), model)
    assert list(loaded.slices) == ["layers.0.qkv_proj."]
    assert slices_of("layers.0.qkv_proj.", loaded) == [(0, 32, 2.0), (32, 48, 2.0)]
    first, second = loaded.slices["layers.0.qkv_proj."]
    for it, name in ((first, Q), (second, K)):
        assert np.array_equal(it.a.numpy(), tensors[f"{PREFIX}{name}.lora_A.weight"].numpy())
        assert np.array_equal(it.b.numpy(), tensors[f"{PREFIX}{name}.lora_B.weight"].numpy())


def test_sizes_are_known_before_the_numbers_are_read(model: AdaptableModel, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", make_factors(model, [Q, V]))
    adapter = open_adapter(folder, model, dtype="float32", max_lora_rank=4)
    assert [(it.layer, it.begin, it.end, it.inputs, rank) for it, rank in adapter.slices] == [
        ("layers.0.qkv_proj.", 0, 32, 32, 4),
        ("layers.1.qkv_proj.", 48, 64, 32, 4),
    ]
    all_slices = {(it.layer, it.begin, it.end, it.inputs) for it in model.slices}
    assert ("layers.1.down_proj.", 0, 32, 48) in all_slices
    assert ("embed.", 0, 32, 128) in all_slices
    assert len(all_slices) == 2 * 7 + 2
    assert adapter.base == "org/base"


NAMES = {
    "without the prefix": lambda name: name.removeprefix(PREFIX),
    "of the model without LM head": lambda name: name.replace("model.model.", "model."),
    "with the adapter's name": lambda name: name.replace(".weight", ".default.weight"),
    "FSDP": lambda name: name.replace("layers.", "layers._fsdp_wrapped_module."),
    "compiled": lambda name: f"_orig_mod.{name}",
    "checkpointed": lambda name: name.replace(
        "self_attn.", "_checkpoint_wrapped_module.self_attn."
    ),
}


@pytest.mark.parametrize("form", NAMES)
def test_names_of_other_tools(form: str, model: AdaptableModel, tmp_path: Path) -> None:
    """The adapter is the same one, and so is its hash."""
    tensors = make_factors(model, [Q, V])
    expected = load(write_adapter(tmp_path / "a", tensors), model)
    renamed = {NAMES[form](name): tensor for name, tensor in tensors.items()}
    assert renamed.keys().isdisjoint(tensors)
    found = load(write_adapter(tmp_path / "b", renamed), model)
    assert found.content_hash == expected.content_hash
    assert found.slices.keys() == expected.slices.keys()


def test_names_of_newer_transformers(tmp_path: Path) -> None:
    config = CASES["gpt-neox"][1]
    model = AdaptableModel(save_config(tmp_path / "base", "GPTNeoXForCausalLM", config))
    tensors = make_factors(model, ["embed_out"])
    renamed = {name.replace("embed_out", "lm_head"): it for name, it in tensors.items()}
    assert list(load(write_adapter(tmp_path / "a", renamed), model).slices) == ["lm_head."]


@pytest.mark.parametrize("stages", [1, 2])
def test_adapters_of_tied_weights_change_one_of_the_two(stages: int, tmp_path: Path) -> None:
    config = LLAMA | {"tie_word_embeddings": True}
    spec = save_config(tmp_path / "base", "LlamaForCausalLM", config)
    whole = AdaptableModel(spec)
    parts = [AdaptableModel(spec.stage(i, i + 1)) for i in range(2)] if stages == 2 else [whole]
    for module, layer in (("lm_head", "lm_head."), ("model.embed_tokens", "embed.")):
        folder = write_adapter(tmp_path / "a", make_factors(whole, [module]))
        assert [name for part in parts for name in load(folder, part).slices] == [layer]


E, HEAD = "model.embed_tokens", "lm_head"


def test_factors_of_an_embedding_and_of_linear_layers(
    model: AdaptableModel, tmp_path: Path
) -> None:
    (it,) = load(write_adapter(tmp_path / "a", make_factors(model, [E])), model).slices["embed."]
    assert (it.begin, it.end, it.a.shape, it.b.shape) == (0, 32, (4, 128), (32, 4))
    tensors = {f"{PREFIX}{E}.lora_{x}.weight": torch.ones(4, 4) for x in "AB"}
    with pytest.raises(AdapterError, match="embed_tokens are those of a linear layer"):
        load(write_adapter(tmp_path / "b", tensors), model)
    tensors = {f"{PREFIX}{Q}.lora_embedding_{x}": torch.ones(4, 4) for x in "AB"}
    with pytest.raises(AdapterError, match="q_proj are those of an embedding, and the model has"):
        load(write_adapter(tmp_path / "b", tensors), model)


def test_copies_of_the_base_are_not_read(model: AdaptableModel, tmp_path: Path) -> None:
    tensors = make_factors(model, [E, HEAD])
    expected = load(write_adapter(tmp_path / "a", tensors), model)
    for module in (E, HEAD):
        tensors[f"{PREFIX}{module}.base_layer.weight"] = torch.full((128, 32), torch.nan)
    found = load(write_adapter(tmp_path / "a", tensors), model)
    assert found.slices.keys() == expected.slices.keys()
    for layer, (one,) in found.slices.items():
        assert np.array_equal(one.a.numpy(), expected.slices[layer][0].a.numpy())
        assert np.array_equal(one.b.numpy(), expected.slices[layer][0].b.numpy())
    tensors[f"{PREFIX}{E}.base_layer.weight"] = torch.zeros(130, 32)
    with pytest.raises(AdapterError, match="The training has added 2 tokens, which is not"):
        load(write_adapter(tmp_path / "a", tensors), model)


def test_heads_of_classifiers_are_replaced(tmp_path: Path) -> None:
    architecture, config = ENCODERS["bert-odd"]
    model = AdaptableModel(save_config(tmp_path / "base", architecture, config))
    factors = make_factors(model, [next(iter(model.modules))])
    weight, bias = torch.randn(3, 39), torch.randn(3)
    head = {f"{PREFIX}classifier.weight": weight, f"{PREFIX}classifier.bias": bias}
    loaded = load(write_adapter(tmp_path / "a", factors | head), model)
    ((layer, found),) = loaded.replaced.items()
    assert layer == "poolers.classify.1."
    assert np.array_equal(found.weight.numpy(), weight.numpy())
    assert found.bias is not None
    assert np.array_equal(found.bias.numpy(), bias.numpy())
    head[f"{PREFIX}classifier.bias"][1] += 1e-6
    again = load(write_adapter(tmp_path / "a", factors | head), model)
    assert again.content_hash != loaded.content_hash
    head[f"{PREFIX}classifier.bias"][1] = torch.nan
    with pytest.raises(AdapterError, match="bias of classifier has numbers that are NaN"):
        load(write_adapter(tmp_path / "a", factors | head), model)
    head[f"{PREFIX}classifier.weight"] = torch.randn(4, 39)
    with pytest.raises(AdapterError, match=r"classifier is a weight \[4, 39\], and that of"):
        load(write_adapter(tmp_path / "a", factors | head), model)


def test_other_modules_are_not_replaced(model: AdaptableModel, tmp_path: Path) -> None:
    factors = make_factors(model, [Q])
    weights = {"model.norm": torch.ones(32), Q: torch.ones(32, 32), "none": torch.ones(3)}
    for name, weight in weights.items():
        tensors = factors | {f"{PREFIX}{name}.weight": weight}
        with pytest.raises(AdapterError, match=rf"replaces {name} \(modules_to_save\)"):
            load(write_adapter(tmp_path / "a", tensors), model)
    tensors = factors | {f"{PREFIX}{E}.weight": torch.ones(131, 32)}
    with pytest.raises(AdapterError, match="has added 3 tokens, which is not supported: merge"):
        load(write_adapter(tmp_path / "a", tensors), model)


def test_a_module_has_one_change(tmp_path: Path) -> None:
    spec = save_config(tmp_path / "base", "LlamaForCausalLM", LLAMA)
    model = AdaptableModel(spec, None, ["lm_head"])
    factors = make_factors(model, [HEAD])
    tensors = factors | {f"{PREFIX}{HEAD}.weight": torch.ones(128, 32)}
    with pytest.raises(AdapterError, match="under two names, or does both: lm_head"):
        load(write_adapter(tmp_path / "a", tensors), model)
    tensors = factors | {f"{PREFIX}{HEAD}.base_layer.weight": torch.tensor(1.0)}
    with pytest.raises(AdapterError, match=r"weight \[\], and that of the model is"):
        load(write_adapter(tmp_path / "a", tensors), model)


def test_adapters_with_added_tokens_are_refused(model: AdaptableModel, tmp_path: Path) -> None:
    config = LLAMA | {"vocab_size": 130}
    larger = AdaptableModel(save_config(tmp_path / "larger", "LlamaForCausalLM", config))
    for module in (E, HEAD):
        folder = write_adapter(tmp_path / "a", make_factors(larger, [module]))
        with pytest.raises(AdapterError, match=r"weight \[130, 32\].* has added 2 tokens, which"):
            load(folder, model)


def test_the_hash_covers_numbers_and_scales(model: AdaptableModel, tmp_path: Path) -> None:
    tensors = make_factors(model, [Q, V])

    def hash_of(**fields: Any) -> str:
        return load(write_adapter(tmp_path / "a", tensors, **fields), model).content_hash

    first = hash_of()
    assert hash_of(base_model_name_or_path="other", target_modules=["x"]) == first
    assert hash_of(alpha_pattern={"q_proj": 8}) == first
    assert hash_of(lora_alpha=9) != first
    assert hash_of(alpha_pattern={"v_proj": 9}) != first
    assert hash_of(use_rslora=True) != first
    assert hash_of(peft_version="0.18.0") != first  # it may turn factors of experts
    assert len({first, *(hash_of(alora_invocation_tokens=it) for it in ([1], [2], [2, 1]))}) == 4
    tensors[f"{PREFIX}{Q}.lora_B.weight"][5, 3] += 1e-6
    assert hash_of() != first


@pytest.mark.parametrize(
    ("more", "fields"),
    [("lora_magnitude_vector", {"use_dora": True}), ("lora_B.bias", {"lora_bias": True})],
)
def test_the_hash_covers_other_tensors(
    more: str, fields: dict[str, bool], model: AdaptableModel, tmp_path: Path
) -> None:
    hashes = []
    for bare, change in ((True, 0.0), (False, 0.0), (False, 1e-6)):
        tensors = make_factors(model, [Q], more="" if bare else more)
        if not bare:
            tensors[f"{PREFIX}{Q}.{more}"][3] += change
        folder = write_adapter(tmp_path / "a", tensors, **({} if bare else fields))
        hashes.append(load(folder, model).content_hash)
    assert len(set(hashes)) == 3
    tensors[f"{PREFIX}{Q}.{more}"][3] = torch.nan
    write_adapter(tmp_path / "a", tensors, **fields)
    with pytest.raises(AdapterError, match=f"(bias|magnitude) of {Q} has numbers that are NaN"):
        load(tmp_path / "a", model)


def test_rows_that_dora_cannot_scale(tmp_path: Path) -> None:
    hf = make_hf("LlamaForCausalLM", **LLAMA)
    with torch.no_grad():
        hf.model.layers[0].self_attn.q_proj.weight[5] = 0
    hf.save_pretrained(tmp_path / "base")
    spec = spec_of(tmp_path / "base")
    model = AdaptableModel(spec)
    tensors = make_factors(model, [Q], more="lora_magnitude_vector")
    tensors[f"{PREFIX}{Q}.lora_B.weight"][5] = 0
    folder = write_adapter(tmp_path / "a", tensors, use_dora=True)
    with pytest.raises(AdapterError, match=rf"row of the changed weight of {Q} has the norm 0\.0"):
        load(folder, model, norms=norms_of(spec, tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_types_of_files_and_models(
    stored: torch.dtype, dtype: str, model: AdaptableModel, tmp_path: Path
) -> None:
    tensors = make_factors(model, [Q], dtype=stored)
    loaded = load(write_adapter(tmp_path / "a", tensors), model, dtype=dtype)
    (it,) = loaded.slices["layers.0.qkv_proj."]
    found = it.b.numpy().astype(numpy_dtype(dtype)).astype(np.float64)
    exact = tensors[f"{PREFIX}{Q}.lora_B.weight"].double()
    assert np.array_equal(found, exact.to(getattr(torch, dtype)).double().numpy())


@pytest.mark.parametrize(
    ("number", "stored", "dtype"),
    [
        (torch.nan, torch.float32, "float32"),
        (-torch.nan, torch.bfloat16, "float32"),
        (torch.inf, torch.float16, "float32"),
        (-torch.inf, torch.float64, "float32"),
        (-65520.0, torch.float32, "float16"),
        (1e39, torch.float64, "bfloat16"),
    ],
)
@pytest.mark.parametrize("factor", "AB")
def test_numbers_that_are_not_finite(
    factor: str,
    number: float,
    stored: torch.dtype,
    dtype: str,
    model: AdaptableModel,
    tmp_path: Path,
) -> None:
    tensors = make_factors(model, [V, Q], dtype=stored)
    tensors[f"{PREFIX}{V}.lora_{factor}.weight"][1, 2] = number
    folder = write_adapter(tmp_path / "a", tensors)
    with pytest.raises(AdapterError, match=f"{factor} of {V} has numbers that are NaN or infinite"):
        load(folder, model, dtype=dtype)


def test_the_largest_numbers_are_finite(model: AdaptableModel, tmp_path: Path) -> None:
    tensors = make_factors(model, [Q])
    tensors[f"{PREFIX}{Q}.lora_A.weight"][0, 0] = -65519.0
    load(write_adapter(tmp_path / "a", tensors), model, dtype="float16")


def test_adapters_of_other_models(model: AdaptableModel, tmp_path: Path) -> None:
    config = LLAMA | {"hidden_size": 64, "num_hidden_layers": 3}
    larger = AdaptableModel(save_config(tmp_path / "larger", "LlamaForCausalLM", config))
    folder = write_adapter(tmp_path / "a", make_factors(larger, [Q]))
    with pytest.raises(
        AdapterError, match=r"weight \[64, 64\], and that of the model is \[32, 32\]"
    ):
        load(folder, model)
    names = [f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 2) for x in "qk"]
    folder = write_adapter(tmp_path / "b", make_factors(larger, names))
    with pytest.raises(AdapterError) as caught:
        load(folder, model)
    assert "2 modules that LlamaForCausalLM does not have: model.layers.2." in str(caught.value)
    assert "It was trained for org/base." in str(caught.value)
    tensors = make_factors(model, [Q])
    far = {name.replace("layers.0", "layers.99"): tensor for name, tensor in tensors.items()}
    with pytest.raises(AdapterError, match=r"does not have: model.layers.99.self_attn.q_proj\."):
        load(write_adapter(tmp_path / "c", far), model)


def test_ranks(model: AdaptableModel, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", make_factors(model, [Q], 16), r=16)
    load(folder, model, max_lora_rank=16)
    with pytest.raises(AdapterError, match="q_proj has rank 16, and max_lora_rank=8; raise"):
        load(folder, model, max_lora_rank=8)
    write_adapter(tmp_path / "a", make_factors(model, [Q], 16), r=8)
    with pytest.raises(AdapterError, match=r"rank 16, and adapter_config.json says 8"):
        load(folder, model)
    tensors = make_factors(model, [Q], 2) | make_factors(model, [V], 8)
    write_adapter(tmp_path / "a", tensors, r=8, rank_pattern={"layers.0.self_attn.q_proj": 2})
    assert slices_of("layers.0.qkv_proj.", load(folder, model)) == [(0, 32, 4.0)]
    assert slices_of("layers.1.qkv_proj.", load(folder, model)) == [(48, 64, 1.0)]


def test_rslora(model: AdaptableModel, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", make_factors(model, [Q]), use_rslora=True, lora_alpha=3)
    assert slices_of("layers.0.qkv_proj.", load(folder, model)) == [(0, 32, 1.5)]
    assert open_adapter_file(folder).kind == "rsLoRA"


def test_weights_that_also_make_tables_are_refused(tmp_path: Path) -> None:
    """DeBERTa's queries and keys of distances are products with the same weights."""
    architecture, config = ENCODERS["deberta"]
    model = AdaptableModel(save_config(tmp_path / "base", architecture, config))
    query = next(name for name in model.others if name.endswith("query_proj"))
    assert not any(name.endswith("query_proj") for name in model.modules)
    tensors = {f"{PREFIX}{query}.lora_{x}.weight": torch.ones(4, 4) for x in "AB"}
    with pytest.raises(AdapterError, match=r"query_proj: LoRA of norms, other embeddings"):
        load(write_adapter(tmp_path / "a", tensors), model)


def test_projections_of_latents_are_refused(tmp_path: Path) -> None:
    """Queries are multiplied by the keys' part, which is stored transposed."""
    architecture, config = CASES["deepseek-v3"]
    model = AdaptableModel(save_config(tmp_path / "base", architecture, config))
    assert any(name.endswith("kv_a_proj_with_mqa") for name in model.modules)
    assert any(name.endswith("kv_b_proj") for name in model.others)
    assert not any(name.endswith("kv_b_proj") for name in model.modules)


def test_layers_that_are_not_adaptable(tmp_path: Path) -> None:
    spec = save_config(tmp_path / "base", "LlamaForCausalLM", LLAMA)
    whole = AdaptableModel(spec)
    model = AdaptableModel(spec, {it.layer for it in whole.slices} - {"lm_head."})
    assert load(write_adapter(tmp_path / "a", make_factors(whole, [Q])), model).slices
    with pytest.raises(
        AdapterError,
        match="lm_head: LoRA of other layers than the decoder's",
    ):
        load(write_adapter(tmp_path / "b", make_factors(whole, [Q, "lm_head"])), model)


def test_stages_have_their_own_slices_and_one_hash(tmp_path: Path) -> None:
    spec = save_config(tmp_path / "base", "LlamaForCausalLM", LLAMA)
    whole = AdaptableModel(spec)
    folder = write_adapter(tmp_path / "a", make_factors(whole))
    stages = [load(folder, AdaptableModel(spec.stage(i, i + 1))) for i in range(2)]
    expected = load(folder, whole)
    assert {stage.content_hash for stage in stages} == {expected.content_hash}
    layers = [len([name for name in it.slices if name.startswith("layers.0.")]) for it in stages]
    assert layers == [4, 4]
    assert "lm_head." in stages[1].slices
    assert "lm_head." not in stages[0].slices
    far = {
        name.replace("layers.1", "layers.7"): it for name, it in make_factors(whole, [V]).items()
    }
    with pytest.raises(AdapterError, match=r"does not have: model.layers.7"):
        load(write_adapter(tmp_path / "b", far), AdaptableModel(spec.stage(0, 1)))


def test_changes_of_towers_are_left_out(tmp_path: Path) -> None:
    architecture, config = TEXT_PARTS["qwen2.5-vl"]
    model = AdaptableModel(save_config(tmp_path / "base", architecture, config))
    text = next(name for name in model.modules if name.endswith("q_proj"))
    tensors = make_factors(model, [text])
    tower = {
        f"{PREFIX}model.visual.blocks.0.attn.qkv.lora_{x}.weight": torch.ones(4, 4) for x in "AB"
    }
    assert len(load(write_adapter(tmp_path / "a", tensors | tower), model).slices) == 1
    with pytest.raises(AdapterError, match=r"only changes parts of Qwen2_5_VL.* does not compute"):
        load(write_adapter(tmp_path / "b", tower), model)


@pytest.mark.parametrize("name", ["model.visual.blocks.0.attn.qkv", "text"])
def test_a_sparse_file_of_terabytes(name: str, tmp_path: Path) -> None:
    """Its large tensors are refused by their shapes, or left out, and never read."""
    architecture, config = TEXT_PARTS["qwen2.5-vl"]
    model = AdaptableModel(save_config(tmp_path / "base", architecture, config))
    text = next(name for name in model.modules if name.endswith("q_proj"))
    folder = write_adapter(tmp_path / "a", make_factors(model, [text]))
    file = folder / "adapter_model.safetensors"
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    at = len(data) - 8 - length
    large = text.replace("q_proj", "k_proj") if name == "text" else name
    for factor, shape in (("A", [4, 2**36]), ("B", [2**36, 4])):
        offsets = [at, at := at + 2**40]
        entry = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        header[f"{PREFIX}{large}.lora_{factor}.weight"] = entry
    described = json.dumps(header).encode()
    file.write_bytes(len(described).to_bytes(8, "little") + described + data[8 + length :])
    os.truncate(file, 8 + len(described) + at)
    if name == "text":
        with pytest.raises(AdapterError, match="Load an adapter of this model"):
            load(folder, model)
    else:
        assert len(load(folder, model).slices) == 1


def test_modules_that_are_named_twice(model: AdaptableModel, tmp_path: Path) -> None:
    tensors = make_factors(model, [Q])
    bare = {name.replace("model.model.", "model."): it.clone() for name, it in tensors.items()}
    with pytest.raises(AdapterError, match="which are the same module"):
        load(write_adapter(tmp_path / "a", tensors | bare), model)


def test_a_file_that_changes_after_its_check(model: AdaptableModel, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", make_factors(model, [Q]))
    file = folder / "adapter_model.safetensors"

    def opened() -> Adapter:
        return open_adapter(folder, model, dtype="float32", max_lora_rank=16)

    adapter = opened()
    assert adapter.file.identity == opened().file.identity
    os.truncate(file, file.stat().st_size - 8)
    with pytest.raises(AdapterError, match="has changed while it was read; load it again"):
        adapter.read()
    write_adapter(folder, make_factors(model, [Q]))
    adapter = opened()
    write_adapter(folder, make_factors(model, [Q], seed=1))
    assert adapter.file.identity != opened().file.identity
    with pytest.raises(AdapterError, match="has changed while it was read"):
        adapter.read()
    adapter = opened()
    file.unlink()
    with pytest.raises(AdapterError, match="cannot be read: No such file"):
        adapter.read()


@settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_adapters(data: st.DataObject, model: AdaptableModel, tmp_path: Path) -> None:
    """Any modules, ranks, alphas, patterns and types: the changes are scale * B A."""
    names = data.draw(st.lists(st.sampled_from(sorted(model.modules)), min_size=1, unique=True))
    ranks = st.integers(1, 6)
    rank, alpha = data.draw(ranks), data.draw(st.floats(-64, 64))
    keys = st.sampled_from(sorted({"q_proj", "mlp.up_proj", r".*\.1\.mlp\..*", *names}))
    rank_pattern = data.draw(st.dictionaries(keys, ranks, max_size=3))
    alpha_pattern = data.draw(st.dictionaries(keys, st.floats(0, 64), max_size=3))
    stabilized = data.draw(st.booleans())

    def first(pattern: dict[str, Any], name: str, default: Any) -> Any:
        return next((v for k, v in pattern.items() if re.match(rf"(.*\.)?({k})$", name)), default)

    tensors: dict[str, torch.Tensor] = {}
    for index, name in enumerate(names):
        tensors |= make_factors(model, [name], first(rank_pattern, name, rank), index)
    folder = write_adapter(
        tmp_path / "a",
        tensors,
        r=rank,
        lora_alpha=alpha,
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        use_rslora=stabilized,
    )
    shapes: dict[str, list[int]] = {}
    for it in model.slices:
        shapes[it.layer] = [max(it.end, shapes.get(it.layer, [0])[0]), it.inputs]
    expected = {layer: np.zeros(shape) for layer, shape in shapes.items()}
    for name in names:
        kind = "embedding_{}" if model.modules[name].is_embedding else "{}.weight"
        r = first(rank_pattern, name, rank)
        scale = first(alpha_pattern, name, alpha) / (r**0.5 if stabilized else r)
        a, b = (tensors[f"{PREFIX}{name}.lora_{kind.format(x)}"].double().numpy() for x in "AB")
        (use,) = model.modules[name].uses
        expected[use.shape.layer][use.shape.begin : use.shape.end] += scale * (b @ a)
    found = deltas(load(folder, model), {layer: (n, k) for layer, (n, k) in shapes.items()})
    for layer, change in expected.items():
        assert np.abs(found[layer] - change).max() < 1e-9 * (1 + np.abs(change).max())
