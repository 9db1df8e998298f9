"""Digests of packed weights, cache keys and planned sizes: existing weight caches stay valid."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo import _native
from octavo.checkpoints.registry import open_checkpoint
from octavo.kernels.native import NativeOps
from octavo.models.loader import LoadedWeights, load_model
from octavo.models.spec import ModelSpec
from octavo.models.weight_cache import WeightCache, weights_key
from octavo.system.distributed import Rank
from tests.models.cases import CASES
from tests.models.harness import save_config, spec_of
from tests.models.test_encoders import ENCODERS

FORMS = (None, "int8", "int4")
TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 290,
    "hidden_size": 240,
    "intermediate_size": 280,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
}


def key_of(spec: ModelSpec, folder: Path, dtype: str) -> bytes:
    """The part of a key that depends on the model: neither build nor files."""
    key = weights_key(spec, open_checkpoint(folder), dtype)
    assert key is not None
    items = msgspec.json.decode(key, type=list[msgspec.Raw])
    return bytes(items[2]) + bytes(items[4])


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


@pytest.mark.skipif("portable" not in _native.available_isas(), reason="another layout")
@pytest.mark.parametrize(
    ("dtype", "quantization", "expected"),
    [
        ("float32", None, "7d574b1aeca829d5"),
        ("bfloat16", None, "35fb1835d6ce6466"),
        ("float32", "int8", "98151e1456d08dc6"),
        ("bfloat16", "int4", "cefaed2604fd1277"),
    ],
)
def test_packed_bytes(dtype: str, quantization: str | None, expected: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    spec, numbers = spec_of(tmp_path, quantization=quantization), np.random.RandomState(0)
    sources = {s.name: s.shape for w in spec.weights() for s in w.sources}
    state = {name: numbers.uniform(-1, 1, shape) for name, shape in sorted(sources.items())}
    kinds = (np.float32, np.float16, np.float64)
    typed = {name: t.astype(kinds[i % 3]) for i, (name, t) in enumerate(state.items())}
    save_file(typed, tmp_path / "model.safetensors")
    cache, best = WeightCache(tmp_path / "cache", 2**30), _native.isa()
    kept: list[LoadedWeights] = []
    _native.set_isa("portable")
    try:
        load_model(
            spec,
            open_checkpoint(tmp_path),
            dtype=dtype,
            ops=NativeOps(),
            cache=cache,
            keep=kept,
        )
        assert cache.writer is not None
        cache.writer.join()
    finally:
        _native.set_isa(best)
    (file,) = cache.files()
    assert digest(file.read_bytes()[: kept[0].nbytes]) == expected


def total_and_keys(folder: Path, case: str) -> tuple[int, list[bytes]]:
    """Return the planned bytes of a case in all forms and types, and its keys, also of a rank."""
    total, keys = 0, []
    save_config(folder, *(CASES | ENCODERS)[case])
    save_file({"any": np.zeros(1, np.float32)}, folder / "model.safetensors")
    for form in FORMS:
        spec = spec_of(folder, quantization=form)
        for dtype in ("float32", "bfloat16"):
            total += spec.weight_nbytes(dtype, 100)
        keys.append(key_of(spec, folder, "float32"))
        if case in ("llama", "gpt2", "bloom", "falcon", *LATER, *ENCODERS):
            part = spec.split(Rank(0, 2, reduces=True))
            total += part.weight_nbytes("bfloat16", 100)
            keys.append(key_of(part, folder, "bfloat16"))
    return total, keys


LATER: dict[str, tuple[int, str]] = {
    "gptj": (1578946, "e6ead61506c339c4"),
    "stablelm": (1747904, "b37fb7a595d8b575"),
    "stablelm-parallel": (1736672, "9ca51162432634ea"),
    "arcee": (1449472, "a9eab2aaff7ec731"),
    "arcee-bias": (1440280, "33b9d251fceb77e3"),
    "nemotron": (1414336, "015cd31d2c579e6d"),
    "nemotron-bias": (1448248, "6b710a09a7d579d4"),
    "gemma4": (4198928, "8f71fc18d3323a26"),
    "gemma3n": (4370400, "9b40ad9a2ecc3c99"),
    "gemma4-unified": (1752584, "4f22116a23f2ed40"),
    "gemma4-values-are-keys": (1811048, "3d387339bcde3c13"),
    "olmo": (1580800, "d15a80b04f00c525"),
    "olmo-bias": (1531840, "d72c63df0a23e6e4"),
    "apertus": (1424656, "d484e0c3e3d810d5"),
    "apertus-bias": (1434160, "88fe68488d143685"),
    "granite-swa": (1946736, "f5260b6daea1fd18"),
    "granite-swa-full": (1587388, "31686772345d57d6"),
    "minicpm": (1613824, "680c04c43c983ada"),
    "internlm2": (1587136, "795b8ac03c20dc83"),
    "internlm2-tied": (1566880, "4b7f9842326b2cb5"),
    "bitnet": (1644928, "7a89a91e39e83d49"),
    "bitnet-bias": (1654000, "e88f6dadb042a148"),
    "exaone": (1555360, "319611af199f72bc"),
    "jais2": (1477048, "4661b77c8ce63a57"),
    "helium": (1593184, "1e6408ab67e18909"),
    "cwm": (1992448, "c0e2bfafdf0b5fcb"),
    "vaultgemma": (1528672, "c39e57f947db09c0"),
    "codegen": (1571746, "ccde76780cc8abc7"),
    "gpt-bigcode": (1492840, "074237518d2b91fc"),
    "gpt-bigcode-heads": (2106928, "87e6c28f54f5ad5c"),
    "mamba": (1273440, "56dad9dc21b70309"),
    "mamba-bias": (1278140, "04f355dc22399c5a"),
    "mamba-odd": (777718, "175a8346d2702725"),
    "falcon-mamba": (1274124, "6fe539063b38779f"),
    "falcon-mamba-bias": (1866564, "eab8df5f06339848"),
    "falcon-mamba-odd": (644150, "57daacc03827d730"),
    "jamba": (2168144, "44834c347444ddfd"),
    "jamba-bias": (2118160, "95d04588aa797a68"),
    "jamba-no-expert-layer": (1753968, "885e87320af547c6"),
    "mamba2": (1343476, "0d85391805f32aba"),
    "mamba2-groups": (1701844, "10eb4de848882ba7"),
    "mamba2-odd": (819388, "246c41f05ae1bb2c"),
    "rwkv7": (2933632, "f6c2e8be1f21b36a"),
    "rwkv7-ratio": (2460688, "09bc946c93e5e177"),
    "rwkv7-odd": (6491302, "aac254fb2668d1e6"),
    "bamba": (1978048, "1c54f6ef41e72251"),
    "bamba-bias": (1878500, "27f5ea5d356f418c"),
    "granite-hybrid": (1571960, "c8ba5f2cf2da0122"),
    "granite-hybrid-rope": (1421580, "1e812f0ab1a726d1"),
    "falcon-h1": (2484136, "6322a3ba83febccd"),
    "falcon-h1-norm": (2254324, "ba58afcfd5fa0f29"),
    "nemotron-h": (1484368, "1d3332e39712bb82"),
    "nemotron-h-bias": (918108, "d96ef3c4b4741eb9"),
    "lfm2": (1643328, "e1fc343245ee5cb8"),
    "lfm2-bias": (1715712, "f0133fa892cb96a8"),
    "lfm2-convolutions": (1129432, "3b49de8bc1416147"),
    "qwen3.5": (2015776, "c078e8fe7d999c15"),
    "qwen3.5-tied": (1787832, "23b1e1911ce869a7"),
    "qwen3-next": (2340048, "fb66b269b05f7303"),
    "olmo-hybrid": (1810816, "aa76ac86d728efb0"),
    "olmo-hybrid-rope": (1859056, "74b4e4e66ec61da9"),
    "mixtral": (4775872, "6495931e2d5d3c22"),
    "qwen2-moe": (2560352, "e3d7695e7870de65"),
    "qwen3-moe": (3947776, "11e803ec0b2a0145"),
    "olmoe": (2444864, "9b83992d58600b90"),
    "gpt-oss": (3409432, "86b53e1e531cd069"),
    "granite-moe": (2373824, "2aa3ab294cfc32d8"),
    "granite-moe-shared": (5558464, "ea89d876f3325c60"),
    "glm4-moe": (2346800, "5eb443956380dceb"),
    "solar-open": (2283184, "dc5a23153db2d3b6"),
    "dots1": (1824828, "35cd1367dddd12bb"),
    "minimax-m2": (4369528, "2bfcfe494e83045c"),
    "ernie-moe": (2002452, "cc2898195658de5e"),
    "hunyuan-moe": (3844864, "6e8403d7db56a177"),
    "exaone-moe": (1730584, "15ad62535d37ee73"),
    "gemma4-moe": (3438116, "681213b80074bae0"),
    "llama4": (3279184, "e47784b728de0a1b"),
    "llama4-plain": (2837248, "a0fe9fb21b3a61c9"),
    "afmoe": (1824692, "36d0a471f12f56d6"),
    "hy-v3": (1659316, "0eb6bd39c620df09"),
    "command-moe": (2396704, "11badb18e4096cd8"),
    "command-moe-sum": (2499104, "413bbcef46c9bcda"),
    "minicpm3": (1814476, "a967c04ad9ba3787"),
    "minicpm3-yarn": (2309908, "4dc9056d5b1d6153"),
    "minicpm3-longrope": (1975828, "25177489065e0111"),
    "deepseek-v2": (1879396, "e2a9dbbf99e13074"),
    "deepseek-v2-queries": (2233876, "83d47111ebd08ddd"),
    "deepseek-v2-yarn": (1874068, "091fd266a80c1714"),
    "deepseek-v3": (1866796, "cd2b3ab3dbaeaedf"),
    "deepseek-v3-queries": (2297380, "00567af8c18c99f2"),
    "deepseek-v3-halves": (2176516, "d237408dbd4cf853"),
    "deepseek-v3-moe": (4133844, "8e9dd3444b63ee7f"),
    "deepseek-v2-moe": (3465332, "1d3ca2b7fd9f36d4"),
    "deepseek-v2-greedy": (3134068, "26056ea5fa64a760"),
    "glm-lite": (2712028, "93fd476b3d67e990"),
    "qwen3.5-moe": (4109344, "27027d72c58b52af"),
    "qwen3-next-moe": (2849488, "77cfec6db10a6652"),
    "lfm2-moe": (2301608, "082cac624143f98d"),
    "granite-hybrid-moe": (6906488, "c5460cc7af7a77d8"),
    "jamba-moe": (3231056, "191ee9a15e4c8a8e"),
    "nemotron-h-moe": (2450496, "1179d33e8db1b1e7"),
    "mistral4": (3280516, "60259f41203589a2"),
    "phi4-multimodal": (1514272, "098241f728e99497"),
    "kimi-linear": (3177764, "a7a9efda35489a11"),
    "kimi-linear-groups": (3153628, "1c62109276c3f98e"),
    "nemotron-h-latent": (2257856, "e91a673fe829bce2"),
    "phimoe": (4797706, "f4bba31a0ba56454"),
    "phimoe-longrope": (6230848, "172f42b03f5b5043"),
    "llama4-chunks": (3686224, "02c2c733c8e35ae0"),
    "mimo-v2": (2510900, "3e99bfeaf1e58253"),
    "mimo-v2-groups": (3518004, "7b248c1390c8b763"),
    "mimo-v2-one": (2063518, "8c624d1b72f9aab7"),
    "laguna": (2622184, "0bc4efb87902a88e"),
    "laguna-elements": (2844976, "3b054e32366d7504"),
    "laguna-all": (2564584, "caac395dd5d26b13"),
    "deberta": (1334028, "638670cbabd43bc8"),
    "deberta-model": (1169268, "b35cbb39ce863ce5"),
    "deberta-tokens": (1253244, "cc04822cbc8a7cb2"),
    "deberta-own": (2606694, "4c179c1d830e96f1"),
    "deberta-keys": (1096572, "80321abd4c2b334e"),
    "deberta-queries": (1011660, "4a83547dd7887370"),
    "deberta-absolute": (1093656, "f89512bc4b46018a"),
    "deberta-unused": (934104, "15e04059829733e5"),
    "deberta-conv": (1527372, "e880c72bc02f989b"),
    "deberta-conv-model": (1501764, "8d558478d9c17050"),
    "deberta-conv-tokens": (2717580, "61134724fcda0354"),
    "deberta-v1": (2587404, "157b37c3bfdf5f24"),
    "deberta-v1-model": (1454646, "93a1eb63b80efab8"),
    "deberta-v1-tokens": (1268804, "7cac07db7005db88"),
    "deberta-v1-mlm": (1645236, "30b1dfddf9eda453"),
}
"""Digests of the cases that have their own."""


def test_keys_and_sizes(tmp_path: Path) -> None:
    """One digest of all other cases."""
    found = [total_and_keys(tmp_path / case, case) for case in CASES if case not in LATER]
    keys = [key for _, keys in found for key in keys]
    total = sum(total for total, _ in found)
    assert (total, digest(*keys)) == (77377064, "49487e9d853b03b5")


def test_keys_and_sizes_of_encoders(tmp_path: Path) -> None:
    """One digest of all other encoders."""
    found = [total_and_keys(tmp_path / case, case) for case in ENCODERS if case not in LATER]
    keys = [key for _, keys in found for key in keys]
    total = sum(total for total, _ in found)
    assert (total, digest(*keys)) == (43256758, "5d4df03034ab1c26")


def test_keys_and_sizes_of_later_cases(tmp_path: Path) -> None:
    found = {}
    for case in LATER:
        total, keys = total_and_keys(tmp_path / case, case)
        found[case] = (total, digest(*keys))
    assert found == LATER
