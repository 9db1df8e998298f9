"""Forms of weights by module: a method of a package, ignore lists, and rejected forms."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from octavo.checkpoints.base import Source
from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import ConfigError, ModelError, OctavoError
from octavo.kernels.base import Ops
from octavo.kernels.native import NativeOps
from octavo.kernels.torch_tensors import as_torch, from_torch
from octavo.kernels.weights import PackedWeight
from octavo.models.loader import LoadedWeights
from octavo.models.weight_cache import WeightCache, weights_key
from octavo.quantization import methods
from octavo.quantization.base import IntArray, PackedShape, Part
from octavo.quantization.int8 import GroupedInt8
from octavo.quantization.plain import PLAIN, Plain
from octavo.system.distributed import Rank
from octavo.system.tensor import HostTensor
from tests.models.cases import CASES
from tests.models.configs.sizes import VOCAB
from tests.models.harness import generate, load, make_hf, make_prompts, spec_of
from tests.models.test_encoders import SIZES as ENCODER

GROUP = 4
MIXED = ("layers.1.self_attn.v_proj", "layers.1.self_attn.o_proj", "layers.1.mlp.up_proj")
"""Plain modules; two of them are in a stack with modules of the toy form."""


@dataclass(frozen=True)
class Toy(Plain):
    """Codes int8 [rows, inputs], and a scale of each row and some inputs; plain once packed."""

    group: int = GROUP
    num_tensors = 2

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"toy-{self.group}"

    def sources(self, module: str, rows: int, inputs: int) -> tuple[Source, ...]:
        return (
            Source(f"{module}.codes", (rows, inputs), dtypes=("int8",)),
            Source(f"{module}.scales", (rows, inputs // self.group)),
        )

    def cut(
        self,
        tensors: Sequence[HostTensor],
        rows: Sequence[slice | IntArray],
        columns: tuple[int, int] | None,
    ) -> list[Part]:
        codes, scales = tensors
        if columns is not None:
            begin, end = columns
            codes, scales = codes[:, begin:end], scales[:, begin // GROUP : end // GROUP]
        return [(codes[selected], scales[selected]) for selected in rows]

    def pack(
        self, ops: Ops, parts: Sequence[Part], shape: PackedShape, out: HostTensor | None = None
    ) -> PackedWeight:
        whole = [from_torch(restored(*map(as_torch, part))) for part in parts]
        return super().pack(ops, [(part,) for part in whole], shape, out)


def restored(codes: Tensor, scales: Tensor) -> Tensor:
    return codes * scales.repeat_interleave(GROUP, dim=1)


def read_toy(config: ConfigJson) -> methods.Groups:
    return [(config.get("targets") or ["Linear"], Toy(config.integer("group")))]


@pytest.fixture
def quantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A Llama in the toy form except some modules, and the same model with its weights restored."""
    monkeypatch.setitem(methods.METHODS, "toy", read_toy)
    toy, plain = tmp_path / "toy", tmp_path / "plain"
    make_hf("LlamaForCausalLM", **CASES["llama"][1]).save_pretrained(toy)
    describe(toy, ignore=["re:.*down_proj", *MIXED])
    plain.mkdir()
    generator = torch.Generator().manual_seed(0)
    state: dict[str, Tensor] = {}
    whole = safetensors.torch.load_file(toy / "model.safetensors")
    for name, tensor in list(whole.items()):
        module, _, kind = name.rpartition(".")
        is_plain = re.search("|".join(("norm|embed|lm_head|down_proj", *MIXED)), name)
        if kind != "weight" or is_plain:
            state[name] = tensor
            continue
        codes = torch.randint(-127, 128, tensor.shape, generator=generator, dtype=torch.int8)
        scales = torch.rand(len(tensor), tensor.shape[1] // GROUP, generator=generator) / 300
        state |= {f"{module}.codes": codes, f"{module}.scales": scales}
        whole[name] = restored(codes, scales)
    safetensors.torch.save_file(state, toy / "model.safetensors")
    safetensors.torch.save_file(whole, plain / "model.safetensors")
    fields = json.loads((toy / "config.json").read_text())
    del fields["quantization_config"]
    (plain / "config.json").write_text(json.dumps(fields))
    return toy, plain


def describe(folder: Path, **fields: Any) -> None:
    file = folder / "config.json"
    described = {"quant_method": "toy", "group": GROUP} | fields
    config = json.loads(file.read_text()) | {"quantization_config": described}
    file.write_text(json.dumps(config))


def logits(folder: Path, **options: Any) -> Tensor:
    return generate(load(folder, **options), make_prompts(VOCAB, (20,)), 2).logits[0]


def test_a_form_for_some_modules(quantized: tuple[Path, Path], tmp_path: Path) -> None:
    """A step has the bits of the restored weights, from the checkpoint and from the cache."""
    toy, plain = quantized
    spec, restored_spec = spec_of(toy), spec_of(plain)
    forms = {w.name: w.form.name for w in spec.weights() if w.kind == "linear"}
    assert {name for name, form in forms.items() if form == "plain"} == {
        "lm_head.weight",
        "layers.1.qkv_proj.weight.1",
        "layers.1.o_proj.weight",
        "layers.1.gate_up_proj.weight.1",
        *(f"layers.{i}.down_proj.weight" for i in range(3)),
    }
    assert set(forms.values()) == {"plain", "toy-4"}
    # Layers with equal forms are one object, as they were.
    assert spec.layers[0] is spec.layers[2] is not spec.layers[1]
    # Each weight of a stack is padded.
    assert spec.weight_nbytes("float32") > restored_spec.weight_nbytes("float32")
    expected, cache = logits(plain), WeightCache(tmp_path / "cache", 2**30)
    assert torch.equal(logits(toy, cache=cache), expected)
    assert cache.writer is not None
    cache.writer.join()
    key = weights_key(spec, open_checkpoint(toy), "float32")
    assert key is not None
    assert cache.file(key).exists()
    assert torch.equal(logits(toy, cache=cache), expected)
    describe(toy)
    assert weights_key(spec_of(toy), open_checkpoint(toy), "float32") != key


def test_ranks_have_parts_of_it(quantized: tuple[Path, Path]) -> None:
    def packed(folder: Path, rank: Rank) -> dict[str, Any]:
        part = spec_of(folder).split(rank)
        weights = LoadedWeights(
            *(part, open_checkpoint(folder)),
            dtype="float32",
            ops=NativeOps(),
            cache=None,
        )
        return weights.load()

    for index, reduces in ((0, False), (1, True)):
        rank = Rank(index, 2, reduces=reduces)
        found, expected = (packed(folder, rank) for folder in quantized)
        assert len(found.keys() - expected.keys()) == 4
        for name, weight in found.items():
            if name not in expected:  # a part of a stack
                continue
            one, other = (getattr(w, "data", w).numpy() for w in (weight, expected[name]))
            assert np.array_equal(one, other), name


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({"quant_method": "strange"}, {}, r"quant_method='strange' .*: .* bfloat16, .*toy"),
        ({"quant_method": "quark"}, {}, r"quant_method='quark'.* --quantization int8"),
        ({"quant_method": ["toy"]}, {}, r"quant_method=\['toy'\] .*: .* bfloat16, .*toy"),
        ({}, {"quantization": "int8"}, r"quantization=int8: .* already, by toy; leave the setting"),
        ({"ignore": "lm_head"}, {}, r"ignore='lm_head'.*a list of names"),
        ({"modules_to_not_convert": ["re:("]}, {}, r"'re:\(' is not a regular expression"),
        ({"ignore": ["re:(a+)+$"]}, {}, r"'re:.*' is not .*it repeats a group"),
        ({"ignore": ["re:(?x)(.|.) *$"]}, {}, r"'re:.*' is not .*the flag x"),
        ({"ignore": ["re:(?i)(?sx:(.|.) *$)"]}, {}, r"'re:.*' is not .*the flag x"),
        ({"ignore": ["re:" + 5 * "a?"]}, {}, r"more than 4 repeats"),
        ({"ignore": ["re:" + 22 * "(a|a)"]}, {}, r"too many alternatives"),
        ({"ignore": ["re:.*.*.*(?:a|(?:.|..|...|....|.....|......)" + 3 * "(|.)"]}, {}, "too many"),
        ({"group": 0}, {}, r"group=0"),
    ],
)
def test_rejected(
    fields: dict[str, Any],
    settings: dict[str, Any],
    message: str,
    quantized: tuple[Path, Path],
) -> None:
    describe(quantized[0], **fields)
    with pytest.raises(OctavoError, match=message) as raised:
        spec_of(quantized[0], **settings)
    assert type(raised.value) is (ConfigError if settings else ModelError)


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["Linear"], {"q_proj", "o_proj", "gate_proj", "down_proj"}),
        (["lm_head"], {"lm_head"}),
        (["re:model.layers.*mlp", "lm_head"], {"gate_proj", "down_proj", "lm_head"}),
        (["self_attn.o_proj"], {"o_proj"}),
    ],
)
def test_targets(targets: list[str], expected: set[str], quantized: tuple[Path, Path]) -> None:
    describe(quantized[0], targets=targets)
    weights = [w for w in spec_of(quantized[0]).weights() if not w.name.startswith("layers.1")]
    found = {w.sources[0].name.split(".")[-2] for w in weights if w.form != PLAIN}
    assert found == expected


def test_a_setting_is_the_form_of_all(tmp_path: Path) -> None:
    make_hf("LlamaForCausalLM", **CASES["llama-mqa-tied-bias"][1]).save_pretrained(tmp_path)
    for form in ("int8", "int4"):
        weights = {w.name: w for w in spec_of(tmp_path, quantization=form).weights()}
        assert {w.form.name for w in weights.values() if w.kind == "linear"} == {form}
        assert weights["embed.weight"].sources == weights["lm_head.weight"].sources
    assert "embed.weight" not in {w.name for w in spec_of(tmp_path).weights()}


def test_int8_of_an_encoder_has_groups(tmp_path: Path) -> None:
    make_hf("BertModel", **ENCODER).save_pretrained(tmp_path)
    forms = {w.form for w in spec_of(tmp_path, quantization="int8").weights() if w.kind == "linear"}
    assert forms == {GroupedInt8()}
    other = spec_of(tmp_path, quantization="int4").weights()
    assert {w.form.name for w in other if w.kind == "linear"} == {"int4"}
