"""Adapters that are merged into a model's weights have the numbers of PEFT's merge_and_unload."""

import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from octavo.checkpoints.identity import model_hash
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig, LoadConfig, LoRAConfig, ModelConfig
from octavo.errors import AdapterError, ConfigError
from octavo.models.adaptable_model import AdaptableModel
from octavo.models.merge import check_merge, merge_nbytes
from octavo.models.open_model import find_merged, open_model, with_local_adapter
from octavo.models.registry import read_spec
from octavo.models.spec import ModelSpec
from octavo.models.weight_cache import weights_key
from octavo.system.distributed import Rank
from tests.adapters import PREFIX, make_factors, write_adapter
from tests.models.cases import CASES
from tests.models.harness import make_hf, save_config, spec_of
from tests.models.test_adapters import LLAMA, Q, V
from tests.quantization.formats import FORMATS

needs_peft = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="peft is not installed; it belongs to the extra dev",
)


def config_of(folder: Path, adapter: Path | None, **settings: Any) -> EngineConfig:
    merged = None if adapter is None else str(adapter)
    return EngineConfig(
        model=ModelConfig(model=str(folder), **settings), lora=LoRAConfig(lora_merge=merged)
    )


def check(folder: Path, adapter: Path, dtype: str = "float32", **settings: Any) -> None:
    config = config_of(folder, adapter, **settings)
    checkpoint = open_model(config, folder)
    folder = find_merged(config)
    assert folder is not None
    check_merge(folder, read_spec(checkpoint, config.model), checkpoint, dtype)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    make_hf("LlamaForCausalLM", **LLAMA).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def factors(base: Path, modules: list[str], **kwargs: Any) -> dict[str, torch.Tensor]:
    return make_factors(AdaptableModel(spec_of(base)), modules, **kwargs)


@needs_peft
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("case", ["llama", "gpt2", "falcon-40b", "phi3", "codegen"])
def test_numbers_are_those_of_peft(case: str, dtype: str, tmp_path: Path) -> None:
    """For the whole model and for a rank's part; weights that no adapter changes are as before."""
    from peft import LoraConfig, PeftModel, get_peft_model

    architecture, config = CASES[case]
    hf = make_hf(architecture, **config)
    hf.save_pretrained(tmp_path / "base")
    modules = dict(hf.named_modules())
    names = [n for n, m in modules.items() if type(m).__name__.endswith(("Linear", "Conv1D"))]
    names = [name for name in names if name not in ("lm_head", "transformer.h.0.mlp.fc_in")]
    wanted = LoraConfig(r=4, lora_alpha=7, target_modules=names, init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fan_in_fan_out is set by PEFT itself
        torch.manual_seed(1)
        get_peft_model(hf, wanted).save_pretrained(
            tmp_path / "adapter", save_embedding_layers=False
        )
        loaded = type(hf).from_pretrained(tmp_path / "base", dtype=getattr(torch, dtype))
        merged = PeftModel.from_pretrained(loaded, str(tmp_path / "adapter")).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    check(tmp_path / "base", tmp_path / "adapter", dtype)
    settings = config_of(tmp_path / "base", tmp_path / "adapter")
    number = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    for rank in (Rank(), Rank(1, 2)) if case in ("llama", "gpt2") else (Rank(),):
        spec = spec_of(tmp_path / "base").split(rank)
        own = open_model(settings, tmp_path / "base", dtype).open(spec.expected)
        theirs = open_checkpoint(tmp_path / "merged").open(spec.expected)
        before = open_checkpoint(tmp_path / "base").open(spec.expected)
        num_changed = 0
        for source in spec.expected.sources:
            tensor, expected, old = own.read(source), theirs.read(source), before.read(source)
            found, expected_ = (it.numpy().astype(number) for it in (tensor, expected))
            num_changed += not np.array_equal(expected_, old.numpy().astype(number))
            if dtype == "float32":
                np.testing.assert_allclose(found, expected_, rtol=0, atol=2e-6)
            else:  # the products may be added in another order: a rare number is rounded otherwise
                differs = found != expected_
                assert differs.mean() < 1e-2, source.name
                gap = np.abs(found[differs].astype(np.float32) - expected_[differs])
                assert (gap <= 2.0**-7 * np.abs(expected_[differs].astype(np.float32))).all()
            own.done(tensor)
        assert num_changed >= 4


def test_a_dora_and_a_change_of_the_embedding(base: Path) -> None:
    """The rows of a DoRA get its norms; the product of an embedding is transposed."""
    spec, embedding = spec_of(base), "model.embed_tokens"

    def read(adapter: Path | None, name: str) -> Any:
        if adapter is not None:
            check(base, adapter)
        (source,) = (it for it in spec.expected.sources if it.name == f"{name}.weight")
        tensors = open_model(config_of(base, adapter), base).open(spec.expected)
        return np.array(tensors.read(source).numpy(), np.float64)

    def product(tensors: dict[str, torch.Tensor]) -> Any:
        a, b = (
            next(it.numpy() for name, it in tensors.items() if part in name)
            for part in ("_A", "_B")
        )
        return 2.0 * b.astype(np.float64) @ a  # alpha 8, rank 4

    tensors = factors(base, [Q], more="lora_magnitude_vector")
    changed = read(None, Q) + product(tensors)
    norms = tensors[f"{PREFIX}{Q}.lora_magnitude_vector"].numpy()
    expected = changed * (norms / np.linalg.norm(changed, axis=1))[:, None]
    found = read(write_adapter(base.parent / "dora", tensors, use_dora=True), Q)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    tensors = factors(base, [embedding])
    found = read(write_adapter(base.parent / "embedding", tensors), embedding)
    np.testing.assert_allclose(found, read(None, embedding) + product(tensors).T, atol=1e-5)
    tensors = factors(base, [Q], more="lora_B.bias")
    with pytest.raises(AdapterError, match="biases of B"):
        check(base, write_adapter(base.parent / "bias", tensors, lora_bias=True))


def test_what_is_kept_of_a_merged_model_is_not_mistaken_for_the_model(base: Path) -> None:
    """Neither packed weights, nor blocks of the KV cache, nor recordings."""
    adapters = [
        write_adapter(base.parent / name, factors(base, [Q], seed=seed), lora_alpha=alpha)
        for name, seed, alpha in (("a", 0, 8), ("b", 1, 8), ("c", 0, 9))
    ]
    spec = spec_of(base)
    checkpoints = [open_model(config_of(base, it), base) for it in (None, *adapters)]
    assert len({weights_key(spec, it, "float32") for it in checkpoints}) == 4
    assert len({model_hash(it, base) for it in checkpoints}) == 4


def test_refused(base: Path, tmp_path: Path) -> None:
    spec = spec_of(base)
    other = save_config(tmp_path / "big", "LlamaForCausalLM", LLAMA | {"hidden_size": 64})
    adapter = write_adapter(tmp_path / "a", make_factors(AdaptableModel(other), [Q]))
    with pytest.raises(AdapterError, match="change a weight"):
        check(base, adapter)
    with pytest.raises(AdapterError, match=r"There is no adapter .*/none"):
        check(base, tmp_path / "none")
    tensors = factors(base, [Q])
    name = f"{PREFIX}{Q}.lora_B.weight"
    with pytest.raises(AdapterError, match="NaN or infinite"):
        check(base, write_adapter(tmp_path / "b", tensors | {name: tensors[name] * np.nan}))
    begins = write_adapter(tmp_path / "e", tensors, alora_invocation_tokens=[3, 4])
    with pytest.raises(AdapterError, match=r"is an activated LoRA .* Serve it beside"):
        check(base, begins)
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(AdapterError, match=r"a.gguf is a file; name the adapter's folder"):
        check(base, file)
    tied: ModelSpec = save_config(
        tmp_path / "tied", "LlamaForCausalLM", LLAMA | {"tie_word_embeddings": True}
    )
    folder = write_adapter(tmp_path / "c", make_factors(AdaptableModel(tied), [Q, "lm_head"]))
    with pytest.raises(AdapterError, match="lm_head, which share a weight with other layers"):
        check(tmp_path / "tied", folder)
    large = write_adapter(tmp_path / "d", factors(base, [V]), lora_alpha=1e6)
    merged = open_model(config_of(base, large), base, "float16").open(spec.expected)
    (source,) = (it for it in spec.expected.sources if it.name == f"{V}.weight")
    with pytest.raises(
        AdapterError, match=r"v_proj.weight has numbers that are not finite in float16"
    ):
        merged.read(source)


@pytest.mark.parametrize("name", ["W8A16", "gptq", "fp8"])
def test_quantized_bases_are_refused(name: str, base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", factors(base, [Q]))
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = FORMATS[name].description
    (base / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"is stored quantized, by .*merge the adapter into the"):
        check(base, adapter)


def test_other_formats_are_refused(base: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", factors(base, [Q]))
    config = replace(config_of(base, adapter), load=LoadConfig(load_format="sharded_state"))
    checkpoint = open_model(config, base)
    with pytest.raises(ConfigError, match="not supported with load_format=sharded_state"):
        check_merge(adapter, spec_of(base), checkpoint, "float32")


@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
def test_weights_may_be_quantized_after_merging(
    quantization: str, base: Path, tmp_path: Path
) -> None:
    check(base, write_adapter(tmp_path / "a", factors(base, [Q])), quantization=quantization)


def test_hub_ids_become_paths_before_processes_start(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(base, Path("octavo/stories-letters"))
    path = with_local_adapter(config).lora.lora_merge
    assert path is not None
    assert Path(path).is_absolute()
    assert with_local_adapter(config_of(base, None)).lora.lora_merge is None
    assert merge_nbytes(Path(path), "float32") > 192 * 192 * 4
