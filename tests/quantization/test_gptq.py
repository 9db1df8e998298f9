"""GPTQ: exact codes, and a model with the numbers of its dequantized weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.quantization.gptq import GPTQ, read_gptq
from octavo.quantization.plain import PLAIN
from octavo.system.distributed import Rank
from tests.models.harness import load
from tests.quantization.harness import Array, Folders, Quantize, pack_words


def module(
    rng: np.random.Generator,
    rows: int,
    inputs: int,
    *,
    group: int,
    bits: int = 4,
    symmetric: bool = False,
    minus_one: bool = True,
    ordered: bool = False,
) -> tuple[dict[str, Array], Array]:
    """Return the tensors of a module, and its weight [outputs, inputs]."""
    group = group if group > 0 else inputs
    codes = rng.integers(0, 2**bits, (rows, inputs))
    zeros = rng.integers(0, 2**bits, (rows, inputs // group))
    if symmetric:
        zeros = np.full_like(zeros, 2 ** (bits - 1))
    scales = (rng.uniform(0.01, 0.05, zeros.shape) * 16 / 2**bits).astype(np.float16)
    g_idx = np.arange(inputs) // group
    if ordered:  # the order depends on the inputs only, not on the module
        g_idx = g_idx[np.random.default_rng(inputs).permutation(inputs)]
    weight = (codes - zeros[:, g_idx]) * scales.astype(np.float32)[:, g_idx]
    words = pack_words(zeros.T, bits)
    if minus_one:  # as GPTQModel does: a zero of 0 borrows from the next
        words = (words.view(np.uint32) - pack_words(np.ones((1, 32 // bits)), bits)).astype(
            np.uint32
        )
    stored = {
        "qweight": pack_words(codes, bits).T,
        "qzeros": words.view(np.int32),
        "scales": scales.T,
        "g_idx": g_idx.astype(np.int32),
    }
    return stored, weight


def all_of(**options: Any) -> Quantize:
    """Quantize all modules but the LM head and a down projection in the same way."""

    def quantize(rng: np.random.Generator, name: str, rows: int, inputs: int) -> Any:
        if name in ("lm_head", "model.layers.1.mlp.down_proj"):
            return None
        return module(rng, rows, inputs, **options)

    return quantize


FIELDS: dict[str, Any] = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False,
    "dynamic": {r"-:.*layers\.1\.mlp\.down": {}},
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("gptq"), all_of(group=32), **FIELDS)


def test_a_model(folders: Folders, tmp_path: Path) -> None:
    folders.assert_same_weights()
    folders.assert_same_logits(tmp_path)


@pytest.mark.parametrize("reduces", [False, True])
def test_ranks(folders: Folders, reduces: bool) -> None:
    for index in range(2):
        folders.assert_same_weights(Rank(index, 2, reduces=reduces))


def test_damaged_tensors(folders: Folders) -> None:
    folders.assert_typed_errors()


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"group": 64, "minus_one": False}, {"group_size": 64, "checkpoint_format": "gptq_v2"}),
        ({"group": 128, "symmetric": True}, {"group_size": 128, "sym": True, "format": "gptq"}),
        ({"group": -1}, {"group_size": -1}),
        ({"group": -1}, {"group_size": 2**31 - 128}),
        ({"group": -1, "symmetric": True}, {"group_size": -1, "sym": True, "desc_act": True}),
        ({"group": 64, "bits": 8}, {"group_size": 64, "bits": 8}),
        ({"group": -1, "bits": 8, "symmetric": True}, {"group_size": -1, "bits": 8, "sym": True}),
    ],
)
def test_variants(options: dict[str, Any], fields: dict[str, Any], tmp_path: Path) -> None:
    folders = Folders(tmp_path, all_of(**options), **FIELDS | fields)
    folders.assert_same_weights()
    folders.assert_same_weights(Rank(1, 2))


@pytest.mark.parametrize("bits", [4, 8])
def test_act_order(bits: int, tmp_path: Path) -> None:
    fields = FIELDS | {"desc_act": True, "bits": bits}
    folders = Folders(tmp_path, all_of(group=32, bits=bits, ordered=True), **fields)
    folders.assert_same_weights()
    folders.assert_same_weights(Rank(0, 2))
    folders.assert_same_logits(tmp_path / "cache")
    with pytest.raises(ModelError, match=r"g_idx has groups .*leave out tensor_parallel_mode"):
        folders.assert_same_weights(Rank(1, 2, reduces=True))
    name = "model.layers.0.self_attn.q_proj.g_idx"
    good = folders.tensors.pop(name)
    folders.save()
    with pytest.raises(ModelError, match=rf"^{name} is missing"):
        load(folders.quantized)
    folders.tensors[name] = good[::-1]
    folders.save()
    with pytest.raises(ModelError, match=rf"^{name} differs from that of another module"):
        load(folders.quantized)
    folders.tensors[name] = good % 2
    folders.save()
    with pytest.raises(ModelError, match=rf"^{name} contradicts groups of 32"):
        load(folders.quantized)


def test_autoround(tmp_path: Path) -> None:
    """The tensors of GPTQ without g_idx, other fields, and forms of single modules."""

    def quantize(rng: np.random.Generator, name: str, rows: int, inputs: int) -> Any:
        if name == "model.layers.1.mlp.down_proj":
            return None
        group = 128 if "k_proj" in name else 64
        stored, weight = module(rng, rows, inputs, group=group, minus_one=False)
        del stored["g_idx"]
        return stored, weight

    folders = Folders(
        tmp_path,
        quantize,
        quant_method="auto-round", packing_format="auto_round:gptqmodel", bits=4, group_size=64,
        sym=False, data_type="int", block_name_to_quantize="model.layers",
        extra_config={
            "model.layers.1.mlp.down_proj": {"bits": 16}, "lm_head": {"bits": 4},
            ".*layers.*k_proj.*": {"group_size": 128},
        },
    )  # fmt: skip
    folders.assert_same_weights()
    folders.save(extra_config={"lm_head": {"bits": 2}})
    with pytest.raises(ModelError, match=r"extra_config: lm_head: bits=2"):
        load(folders.quantized)


def test_overrides() -> None:
    """The first pattern that matches a name counts; an LM head needs its flag."""
    fields = {"bits": 4, "group_size": 128, "sym": False}
    dynamic = {"+:.*up": {"group_size": 32}, "-:.*mlp": {}, ".*q_proj": {"sym": True}}
    groups = read_gptq(ConfigJson(fields | {"dynamic": dynamic}, "config.json"))
    assert list(groups) == [
        (["LMHead"], PLAIN),
        (["re:.*up"], GPTQ(32, False)),
        (["re:.*mlp"], PLAIN),
        (["re:.*q_proj"], GPTQ(128, True)),
        (["Linear"], GPTQ(128, False)),
    ]
    groups = read_gptq(ConfigJson(fields | {"lm_head": True}, "config.json"))
    assert groups[0][0] == ["Linear", "LMHead"]
    only = fields | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}
    groups = read_gptq(ConfigJson(only, "config.json"))
    assert groups[-1][0] == ["self_attn.q_proj", "mlp.up_proj"]


def test_contradictions(folders: Folders) -> None:
    """Tensors that contradict the description are refused."""
    for fields, message in (
        ({"sym": True}, r"^model.*proj\.qzeros has other zero points than 8"),
        ({"group_size": 64}, r"scales has shape \[4, 128\].* requires \[2, 128\]"),
    ):
        folders.save(**fields)
        with pytest.raises(ModelError, match=message):
            load(folders.quantized)
    name = "model.layers.0.self_attn.q_proj.g_idx"
    good = folders.tensors[name]
    folders.tensors[name] = good[::-1]
    folders.save()
    with pytest.raises(ModelError, match=rf"^{name} contradicts groups of 32"):
        load(folders.quantized)
    folders.tensors[name] = good
    folders.save()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 3}, "bits=3"),
        ({"bits": None}, "bits is missing"),
        ({"group_size": 16}, "group_size=16"),
        ({"group_size": 0}, "group_size=0"),
        ({"sym": 1}, "sym=1"),
        ({"desc_act": "no"}, "desc_act='no'"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({"is_marlin_format": True}, "is_marlin_format=True"),
        ({"pack_dtype": "int64"}, "pack_dtype='int64'"),
        ({"lm_head": 3}, "lm_head=3"),
        ({"dynamic": ["-:x"]}, "dynamic=.* an object"),
        ({"dynamic": {"+:x": {"bits": 5}}}, r"dynamic: \+:x: bits=5"),
        ({"dynamic": {"x": 3}}, "dynamic: x=3"),
        ({"modules_in_block_to_quantize": ["q_proj"]}, "a list of lists"),
    ],
)
def test_rejected(fields: dict[str, Any], message: str) -> None:
    config = {"bits": 4, "group_size": 128} | fields
    with pytest.raises(ModelError, match=message):
        read_gptq(ConfigJson(config, "config.json"))
