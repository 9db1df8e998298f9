"""Tiny quantized checkpoints, and the weights that the kernels have after loading them."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import ModelError
from octavo.kernels.native import NativeOps
from octavo.models.loader import LoadedWeights
from octavo.models.weight_cache import WeightCache
from octavo.system.distributed import Rank
from octavo.system.tensor import from_numpy
from tests.models.harness import generate, load, make_hf, make_prompts, spec_of

Array = np.ndarray
Quantize = Callable[[np.random.Generator, str, int, int], tuple[dict[str, Array], Array] | None]
"""Returns, for the name, outputs and inputs of a module, its tensors by the last part of their
names, and its weight [outputs, inputs]; None: the module is plain."""

VOCAB = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


_LINEAR = ("proj", "lm_head", "w1", "w2", "w3", "proj_with_mqa", "_linear")
"""Ends of the names of linear modules."""
E4M3 = ml_dtypes.float8_e4m3fn
_TORCH = {E4M3: torch.float8_e4m3fn, ml_dtypes.bfloat16: torch.bfloat16}
"""Types of torch for those that numpy lacks."""


def to_torch(array: Array) -> Tensor:
    """Return a copy as a tensor of torch."""
    copy = np.array(array, order="C")
    if (dtype := _TORCH.get(array.dtype.type)) is None:
        return torch.from_numpy(copy)
    return torch.from_numpy(copy.view(f"u{copy.itemsize}")).view(dtype)


def pack_words(codes: Array, bits: int) -> Array:
    """Pack codes [..., N] in words of 32 bits, the first in the lowest bits."""
    grouped = codes.reshape(*codes.shape[:-1], -1, 32 // bits).astype(np.uint32)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return np.bitwise_or.reduce(grouped << shifts, -1).view(np.int32)


def divide_experts(state: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Return tensors of single experts in place of [experts, inputs, outputs] of all.

    Args:
        state: tensors by name.
        layout: "halves" if the outputs of gate come before those of up, "turns" if they alternate.
    """
    divided = {}
    for name, tensor in state.items():
        prefix, _, last = name.rpartition(".experts.")
        parts = ["down_proj"] if last.startswith("down") else ["gate_proj", "up_proj"]
        if not prefix:
            divided[name] = tensor
            continue
        kind = "bias" if last.endswith("bias") else "weight"
        for index, expert in enumerate(tensor):
            rows = expert.T if kind == "weight" else expert
            for part, own in enumerate(parts):
                count = len(rows) // len(parts)
                chosen = rows[part :: len(parts)]
                if layout == "halves":
                    chosen = rows[part * count : (part + 1) * count]
                divided[f"{prefix}.experts.{index}.{own}.{kind}"] = chosen.contiguous()
    return divided


def stack_experts(state: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    """Return the tensors that `divide_experts` has divided."""
    stacked: dict[str, Any] = {}
    for name, tensor in state.items():
        match = re.fullmatch(r"(.*\.experts\.)\d+\.(gate|up|down)_proj\.(weight|bias)", name)
        if match is None:
            stacked[name] = tensor
        elif match[2] == "up":  # after its gate
            whole = stacked[f"{match[1]}gate_up_proj{'_bias' * (match[3] == 'bias')}"]
            pair = [whole.pop(), tensor]
            whole.append(
                torch.cat(pair) if layout == "halves" else torch.stack(pair, 1).flatten(0, 1)
            )
        else:
            own = "down_proj" if match[2] == "down" else "gate_up_proj"
            stacked.setdefault(f"{match[1]}{own}{'_bias' * (match[3] == 'bias')}", []).append(
                tensor
            )
    return {
        name: tensor
        if isinstance(tensor, Tensor)
        else torch.stack([expert if expert.ndim == 1 else expert.T for expert in tensor])
        for name, tensor in stacked.items()
    }


class Folders:
    """A quantized model, and the same model with its dequantized weights.

    Args:
        folder: where both are written.
        quantize: chooses the tensors of each module.
        sizes: fields of its config.json.
        architecture: the model's.
        stacked: layout of stacked experts that the quantized model divides, see `divide_experts`.
        description: the quantization_config.
    """

    def __init__(
        self,
        folder: Path,
        quantize: Quantize,
        sizes: dict[str, Any] = SIZES,
        architecture: str = "LlamaForCausalLM",
        stacked: str = "",
        **description: Any,
    ) -> None:
        self.quantized, self.plain = folder / "quantized", folder / "plain"
        rng = np.random.default_rng(0)
        make_hf(architecture, **sizes).save_pretrained(self.plain)
        file = self.plain / "model.safetensors"
        state = safetensors.torch.load_file(file)
        if stacked:
            state = divide_experts(state, stacked)
        self.tensors: dict[str, Array] = {}
        for name, tensor in list(state.items()):
            module, _, kind = name.rpartition(".")
            made = None
            if module.endswith(_LINEAR) and kind == "weight":
                made = quantize(rng, module, *tensor.shape)
            if made is None:
                self.tensors[name] = tensor.contiguous().numpy()
                continue
            stored, weight = made
            self.tensors |= {f"{module}.{kind}": array for kind, array in stored.items()}
            state[name] = torch.from_numpy(np.ascontiguousarray(weight, np.float32))
        safetensors.torch.save_file(stack_experts(state, stacked) if stacked else state, file)
        self.quantized.mkdir()
        self.description = description
        self.save()

    def save(self, **fields: Any) -> None:
        """Write the tensors and the config again, with changes of the quantization_config."""
        stored = {name: to_torch(array) for name, array in self.tensors.items()}
        safetensors.torch.save_file(stored, self.quantized / "model.safetensors")
        config = json.loads((self.plain / "config.json").read_text())
        config["quantization_config"] = self.description | fields
        (self.quantized / "config.json").write_text(json.dumps(config))

    def assert_same_weights(self, rank: Rank | None = None, atol: float = 1e-7) -> None:
        """Check that the kernels have the dequantized weights, or a rank's part of them."""
        assert_same_weights(self.quantized, self.plain, rank, atol)

    def assert_same_logits(self, cache_folder: Path | None = None) -> None:
        """Check that logits differ from those of the dequantized model by 8-bit activations.

        A model that is read from the cache of packed weights has the same bits.
        """
        got, want = logits(self.quantized), logits(self.plain)
        error = (got - want).norm() / want.norm()
        assert 0 < error < 0.2, error  # unrelated logits: 1.4
        if cache_folder is None:
            return
        cache = WeightCache(cache_folder, 2**30)
        for _ in range(2):  # written, then read
            assert torch.equal(logits(self.quantized, cache=cache), got)
            if cache.writer is not None:
                cache.writer.join()
        assert len(list(cache.files())) == 1

    def assert_typed_errors(self) -> None:
        """Check that damaged tensors of a module are refused with the tensor's name."""
        for name, array in _damages(self.tensors):
            good = self.tensors[name]
            if array is None:
                del self.tensors[name]
            else:
                self.tensors[name] = array
            self.save()
            with pytest.raises(ModelError, match=re.escape(name)):
                load(self.quantized)
            self.tensors[name] = good
        self.save()


def _damages(tensors: dict[str, Array]) -> Iterator[tuple[str, Array | None]]:
    """Yield damages of the first quantized module: a tensor's name and its contents, if any."""
    first = next(name for name in tensors if re.search("scale|absmax|SCB", name)).rpartition(".")[0]
    for name, good in list(tensors.items()):
        if name.rpartition(".")[0] != first:
            continue
        if not name.endswith(("g_idx", "weight_format")):  # optional tensors
            yield name, None
        yield name, good.repeat(2, 0)
        yield name, good[..., None]
        yield name, np.zeros(0, good.dtype)
        yield name, good.astype("int16")
        if re.search("scale|absmax|SCB", name) and good.dtype.kind != "u":
            for value in (np.nan, np.inf, -np.inf):
                bad = good.copy()
                bad.flat[-1] = value
                yield name, bad


def assert_same_weights(
    quantized: Path, plain: Path, rank: Rank | None = None, atol: float = 1e-7
) -> None:
    """Check that the kernels have the weights of another model, or a rank's part of them.

    A row of x with one number is quantized without an error.
    """
    got, want = (_weights(folder, rank) for folder in (quantized, plain))
    assert got.keys() == want.keys()
    for name, weight in got.items():
        assert np.allclose(weight, want[name], rtol=1e-5, atol=atol), name


def _weights(folder: Path, rank: Rank | None) -> dict[str, Array]:
    """Return the linear weights [outputs, inputs] of a model, or of a rank's part, by name."""
    spec, ops = spec_of(folder), NativeOps()
    part = spec if rank is None else spec.split(rank)
    loaded = LoadedWeights(
        part, open_checkpoint(folder), dtype="float32", ops=ops, cache=None
    ).load()
    found: dict[str, list[Array]] = defaultdict(list)
    for weight in part.weights():
        packed = loaded[weight.name]
        if weight.kind == "linear" and weight.name != "embed.weight":
            assert packed.nbytes == weight.form.nbytes(weight.packed("float32"))
            unit = from_numpy(np.eye(weight.shape[1], dtype=np.float32))
            numbers = ops.to_host(ops.linear(unit, packed)).T  # type: ignore[arg-type]
            found[re.sub(r"\.\d+$", "", weight.name)].append(numbers)
    return {name: np.concatenate(parts) for name, parts in found.items()}


def logits(folder: Path, **options: Any) -> Tensor:
    return generate(load(folder, **options), make_prompts(VOCAB, (20,)), 1).logits[0]
