"""Save a checkpoint in vLLM's sharded form, which `load_format=sharded_state` reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors.numpy import save_file

from octavo.checkpoints.base import Checkpoint, Source
from octavo.checkpoints.sharded_state import FUSED, SHARDED_PATTERN, ShardedStateFolder
from octavo.errors import ConfigError, UnsupportedError
from octavo.models.cache import AttentionCache
from octavo.models.spec import ModelSpec
from octavo.quantization.plain import Plain
from octavo.system.tensor import HostTensor, concatenate, dense, zeros

# Modules that are divided by rows, by rows of the padded vocabulary, or by columns.
_ROWS = frozenset(FUSED)
_VOCABULARY = frozenset({"embed_tokens", "lm_head"})
_COLUMNS = frozenset({"o_proj", "down_proj"})
# vLLM pads vocabularies to multiples of this.
_VOCABULARY_MULTIPLE = 64


def save_sharded_state(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    target: Path,
    *,
    dtype: str,
    size: int,
    max_size: int | None,
) -> None:
    """Write the weights of a model: one or more files for each rank.

    The files contain the parts of vLLM's ranks, which may differ from Octavo's. Saving needs the
    memory of one file.

    Args:
        spec: the whole model.
        checkpoint: the model's checkpoint.
        target: the folder to write to; created if it does not exist.
        dtype: type of the written numbers.
        size: number of ranks.
        max_size: most bytes of a file, unless a single tensor has more; None: no limit.

    Raises:
        ConfigError: `target` contains sharded files already, or cannot be written to.
        ModelError: the model's folder cannot be read.
        UnsupportedError: the model cannot be divided in vLLM's way.
    """
    if ShardedStateFolder(target, "sharded_state").weight_files:
        raise ConfigError(
            f"path={str(target)!r} holds a sharded state already; choose another folder."
        )
    plan, heads = _plan(spec), _num_kv_heads(spec, size)
    stored = checkpoint.open(spec.expected)

    def tensors(rank: int) -> Iterator[tuple[str, HostTensor]]:
        for name, sources in plan.items():
            mine = []
            for source in sources:
                tensor = stored.read(source)
                mine.append(dense(_share(source, tensor, rank, size, heads), dtype))
            yield name, concatenate(mine)

    try:
        target.mkdir(parents=True, exist_ok=True)
        for rank in range(size):
            for part, state in enumerate(_in_files(tensors(rank), max_size)):
                _save(state, target / SHARDED_PATTERN.format(rank=rank, part=part))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"path={str(target)!r} cannot be written to: {reason}.") from None


def _plan(spec: ModelSpec) -> dict[str, list[Source]]:
    """Return, for each stored tensor, the tensors of the model that it consists of, in order."""
    plan: dict[str, list[Source]] = {}
    seen: set[str] = set()
    for weight in spec.weights():
        if not isinstance(weight.form, Plain):
            raise UnsupportedError(
                f"{weight.name} is {weight.form.name}: quantized weights cannot be saved as a "
                "sharded state; use the model's own files."
            )
        for source in weight.sources:
            if source.name in seen:  # the LM head may be the embedding
                continue
            seen.add(source.name)
            module, _, kind = source.name.rpartition(".")
            parent, _, last = module.rpartition(".")
            is_known = last in _ROWS | _VOCABULARY | _COLUMNS or len(source.shape) == 1
            if source.transform != "none" or source.parts is not None or not is_known:
                raise UnsupportedError(
                    f"{spec.architecture} cannot be saved as a sharded state: vLLM keeps "
                    f"{source.name} in another form; use the model's own files."
                )
            fused = f"{parent}.{FUSED[last]}.{kind}" if last in FUSED else source.name
            plan.setdefault(fused, []).append(source)
    return plan


def _num_kv_heads(spec: ModelSpec, size: int) -> int:
    """Return the number of heads of keys and values of each layer, which ranks divide or share.

    Raises:
        UnsupportedError: layers differ, or ranks would have different numbers of heads.
    """
    heads = {cache.num_kv_heads for cache in spec.caches if isinstance(cache, AttentionCache)}
    if len(heads) != 1 or any(size % count and count % size for count in heads):
        raise UnsupportedError(
            f"tensor_parallel_size={size} cannot be saved: vLLM's ranks have equal numbers of "
            f"heads of keys and values, but {spec.architecture} has {sorted(heads)} in its layers."
        )
    return heads.pop()


def _share(source: Source, tensor: HostTensor, rank: int, size: int, heads: int) -> HostTensor:
    """Return a rank's part of a tensor; `heads` is the number of heads of keys and values."""
    module, _, kind = source.name.rpartition(".")
    last = module.rpartition(".")[2]
    dim, count = 0, size
    if last in _VOCABULARY:
        padding = -len(tensor) % _VOCABULARY_MULTIPLE
        more = zeros(padding, *tensor.shape[1:], dtype=tensor.dtype)
        tensor = concatenate([tensor, more])
    elif last in ("k_proj", "v_proj"):  # ranks may share heads
        count = min(size, heads)
    elif last in _COLUMNS and kind == "weight":
        dim = 1
    elif last not in _ROWS:
        return tensor
    if tensor.shape[dim] % count:
        raise UnsupportedError(
            f"tensor_parallel_size={size} cannot be saved: vLLM divides the {tensor.shape[dim]} "
            f"{'columns' if dim else 'rows'} of {source.name} equally."
        )
    part = tensor.shape[dim] // count
    return tensor.split_with_sizes([part] * count, dim)[rank * count // size]


def _save(state: dict[str, HostTensor], file: Path) -> None:
    """Write a safetensors file."""
    save_file({name: tensor.numpy() for name, tensor in state.items()}, file, {"format": "pt"})


def _in_files(
    tensors: Iterator[tuple[str, HostTensor]], max_size: int | None
) -> Iterator[dict[str, HostTensor]]:
    """Return the tensors of each file."""
    state: dict[str, HostTensor] = {}
    nbytes = 0
    for name, tensor in tensors:
        if state and max_size is not None and nbytes + tensor.nbytes > max_size:
            yield state
            state, nbytes = {}, 0
        state[name] = tensor
        nbytes += tensor.nbytes
    yield state
