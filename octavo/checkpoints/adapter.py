"""Files of adapters: low-rank changes of the weights of a model (LoRA).

The change of a weight W [outputs, inputs] is scale * B A, with B [outputs, rank] and A [rank,
inputs]. That of an embedding W [tokens, size] is scale * (B A)^T, with B [size, rank] and A [rank,
tokens]. PEFT writes a folder with adapter_config.json and adapter_model.safetensors (or .bin):
https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import FLOATS, Expected, Source, shorten_names
from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.mapped_file import StoredTensor
from octavo.checkpoints.model_files import open_file, printable, require_file
from octavo.checkpoints.patterns import compile_safely
from octavo.checkpoints.safetensors_header import read_header
from octavo.checkpoints.torch_header import read_torch_header
from octavo.errors import AdapterError, ModelError, reason_of
from octavo.system.tensor import numpy_dtype

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""Names of the file of the tensors, the preferred one first."""
MERGE = "merge it into the model with peft (merge_and_unload), and serve the result"
"""Advice for adapters of other kinds."""
_MOST_CONFIG_NBYTES = 2**20  # parsing it holds the interpreter's lock
_MOST_NAME = 1000  # characters of a tensor's name: regular expressions take the square of its time
_KINDS = {
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "trainable_token_indices": "LoRA with trained tokens",
    "layer_replication": "LoRA with repeated layers",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
"""Fields of adapter_config.json that, if set, make another kind of adapter."""
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of values of init_lora_weights for which the training changes the base, too. With
others (gaussian, eva, orthogonal, mica), the adapter is a plain LoRA."""
_PROMPTS = {
    "PROMPT_TUNING": "prompt tuning",
    "MULTITASK_PROMPT_TUNING": "multitask prompt tuning",
    "P_TUNING": "p-tuning",
    "PREFIX_TUNING": "prefix tuning",
    "ADAPTION_PROMPT": "LLaMA-Adapter",
    "CPT": "context-aware prompt tuning",
    "CARTRIDGE": "cartridges",
    "XLORA": "X-LoRA",
    "POLY": "Polytropon",
}
"""Values of peft_type whose adapters are not changes of weights, so nothing can merge them."""
_OTHER_TYPES = {
    "IA3": "(IA)³",
    "ADALORA": "AdaLoRA",
    "LOHA": "LoHa",
    "LOKR": "LoKr",
    "VERA": "VeRA",
    "LN_TUNING": "tuning of norms",
    "FOURIERFT": "FourierFT",
    "VBLORA": "VB-LoRA",
    "RANDLORA": "RandLora",
    "TRAINABLE_TOKENS": "trained tokens",
}
"""Other values of peft_type, and their names if these differ."""
_PREFIX = "base_model.model."
_WRAPPERS = re.compile(r"(?<![^.])(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts of names that wrappers of a training have added."""
_NEWER = {
    "embed_out": "lm_head",
    ".block_sparse_moe.": ".mlp.",
    ".block_sparse_moe.gate": ".mlp.router",
    ".mlp.shared_mlp.": ".mlp.shared_experts.",
    ".mlp.shared_expert.": ".mlp.shared_experts.",
    ".self_attn.f_": ".self_attn.forget_gate.f_",
}
"""Parts of names of modules in checkpoints that transformers 5 has renamed (conversion_mapping.py),
and their new names, which adapters that were trained with it have."""
_TENSOR = re.compile(
    r"\.(?:lora_([AB])(?:\.[\w-]+)?\.weight|lora_(B)(?:\.[\w-]+)?\.(bias)"
    r"|lora_(magnitude)_vector(?:\.[\w-]+)*|lora_embedding_([AB])(?:\.[\w-]+)?)$"
)
"""Ends of the names of tensors; older files also have the name of the adapter, such as default."""
_OF_EMBEDDING = re.compile(r"\.lora_embedding_[AB](?:\.[\w-]+)?$")
"""Ends of the names of the factors of an embedding."""
_TRAINED = re.compile(
    r"(?P<module>[\w.-]+?)(?:\.modules_to_save(?:\.[\w-]+)?)?\.(?P<tensor>weight|bias)"
)
"""Names of whole weights; older files also say where PEFT keeps them."""
_COPY = re.compile(r"\.base_layer\.(weight|bias)$")
"""Ends of the names of copies of the base's weights."""
_OTHER_TENSORS = {r"\.token_adapter\.": "LoRA with trained tokens"}
"""Names of other tensors, and the kind of adapter that they make."""
_SWAPPING = re.compile(r"0\.1[78]\.")
"""Versions of PEFT that take weights [experts, outputs, inputs] for [experts, inputs, outputs]."""
_PLAIN = re.compile(r"\^?[\w.-]+")
"""Keys of patterns that are names, or ends of names."""
_MOST_PATTERNS, _MOST_WAYS = 16, 2**12
"""Limits of the keys that are other regular expressions, and of the ways in which a name could
match one: each key is tried at each dot of each module's name."""
_LONGEST_PATTERN = 1000
"""Limit of the characters of such a key."""


@dataclass(frozen=True)
class Factors:
    """Two factors of the change of a module's weight."""

    a: StoredTensor
    """A: [rank, inputs]."""
    b: StoredTensor
    """B: [outputs, rank]."""
    bias: StoredTensor | None = None
    """Bias of B: [outputs]."""
    magnitude: StoredTensor | None = None
    """Norms of the rows of the changed weight: [outputs], for DoRA."""

    of_embedding: bool = False
    """True for an embedding: A is [rank, tokens], and B is [size, rank]."""

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """All tensors by their names."""
        named = {"A": self.a, "B": self.b, "bias": self.bias, "magnitude": self.magnitude}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def rank(self) -> int:
        """Number of rows of A."""
        return self.a.shape[0]


class AdapterFile(Protocol):
    """Files of an adapter, of which only the descriptions have been read."""

    path: Path
    file: Path
    """File of the tensors."""
    identity: tuple[int, ...]
    """`identity_of` the file before it was read."""
    kind: str
    """Kind of adapter, for people, such as "LoRA"."""
    invocation_tokens: tuple[int, ...]
    """Tokens of the prompt that begin an activated LoRA; empty: the adapter changes all tokens."""
    base: str | None
    """Name of the model that it was trained for, or None."""
    naming: str
    """Files with equal texts have equal `names`."""
    factors: Mapping[str, Factors]
    """Factors of each module, by the module's name in the file."""
    trained: Mapping[str, Mapping[str, StoredTensor]]
    """Weight and bias of each module that the adapter replaces (modules_to_save)."""
    copies: Mapping[str, tuple[int, ...]]
    """Shapes of the copies of the base's weights, by the module's name in the file. PEFT writes
    them with LoRA of the embedding or of the LM head; they are not read."""

    settings: str
    """Text of all that `scale` depends on besides the factors."""
    swaps_experts: bool
    """True if the factors of fused experts are those of transposed weights."""

    def scale(self, module: str, parameter: str | None = None, experts: int = 1) -> float:
        """Return the factor of the change of a module.

        Args:
            module: its name in the file.
            parameter: name of its parameter that is changed; None: its weight.
            experts: number of the experts whose factors the module has.

        Raises:
            AdapterError: the factor contradicts the tensors, or is not finite.
        """
        ...

    def names(self, module: str, expected: Expected) -> list[str]:
        """Return the names that a module of the model may have in the file.

        Args:
            module: its name in the model's checkpoint.
            expected: tensors of that checkpoint.
        """
        ...

    def row_order(self, source: Source, rows: int, head_size: int) -> NDArray[np.int64] | None:
        """Return the row of B in the file for each row of a weight; None: the order is the same.

        Args:
            source: the weight in the model's checkpoint.
            rows: number of its outputs.
            head_size: size of a head of queries or keys; 0: the model has none.
        """
        ...


@contextmanager
def adapter_errors() -> Iterator[None]:
    """Raise `AdapterError` for all errors of files."""
    try:
        yield
    except ModelError as error:
        raise AdapterError(str(error)) from None
    except OSError as error:
        raise AdapterError(f"{error.filename} cannot be read: {reason_of(error)}.") from None


class PeftFolder:
    """`AdapterFile` in PEFT's form.

    Args:
        path: the folder.

    Raises:
        AdapterError: the adapter is damaged, or of a kind that is not supported.
        ModelError: a file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        config = ConfigJson.load(path / CONFIG, _MOST_CONFIG_NBYTES)
        _refuse_other_kinds(config)
        self._config = config
        self._rank = config.integer("r")
        self._alpha = config.number("lora_alpha")
        self._ranks = _Patterns(config, "rank_pattern")
        self._alphas = _Patterns(config, "alpha_pattern")
        self._stabilized = config.flag("use_rslora", False)
        fields = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")
        self.settings = str([config.get(field) for field in fields])
        self.swaps_experts = _SWAPPING.match(str(config.get("peft_version"))) is not None
        self.naming = "PEFT"
        self.invocation_tokens = _invocation_tokens(config)
        is_dora, has_biases = config.flag("use_dora", False), config.flag("lora_bias", False)
        if is_dora and (has_biases or self.invocation_tokens):
            other = "lora_bias" if has_biases else "alora_invocation_tokens"
            raise AdapterError(
                f"{config.where}: use_dora and {other} are set, and PEFT supports only one of "
                "them; train the adapter again with one."
            )
        self.kind = ("rs" if self._stabilized else "") + ("DoRA" if is_dora else "LoRA")
        if self.invocation_tokens:
            self.kind = f"activated {self.kind}"
        base = config.get("base_model_name_or_path")
        self.base = base if isinstance(base, str) and base else None
        self.file = next((path / name for name in WEIGHTS if (path / name).exists()), path)
        if self.file == path:
            raise AdapterError(
                f"{path} has no {WEIGHTS[0]}; save the adapter with save_pretrained, or download "
                "it again."
            )
        self.identity = identity_of(self.file)
        is_torch = self.file.suffix == ".bin"
        tensors = read_torch_header(self.file) if is_torch else read_header(self.file)
        if any(len(name) > _MOST_NAME for name in tensors):
            raise AdapterError(
                f"{self.file} has names of tensors of more than {_MOST_NAME} characters; download "
                "the adapter again."
            )
        copies = {name: _COPY.sub("", _plain_name(name)) for name in tensors if _COPY.search(name)}
        self.copies: Mapping[str, tuple[int, ...]] = {
            module: tensors[name].shape
            for name, module in copies.items()
            if name.endswith(".weight")
        }
        rest = {name: tensor for name, tensor in tensors.items() if name not in copies}
        self.trained: Mapping[str, Mapping[str, StoredTensor]] = _find_trained(self.file, rest)
        if config.get("modules_to_save") and not self.trained:
            raise AdapterError(
                f"{config.where}: modules_to_save is set, and {self.file.name} has no "
                "whole module; save the adapter again."
            )
        self.factors: Mapping[str, Factors] = _pair(self.file, rest)
        for field, tensor, wanted in (
            ("use_dora", "magnitude", is_dora),
            ("lora_bias", "bias", has_biases),
        ):
            wrong = [name for name, it in self.factors.items() if (tensor in it.tensors) != wanted]
            if wrong:
                raise AdapterError(
                    f"{self.file} has {'no ' if wanted else 'a '}{tensor} of "
                    f"{shorten_names(wrong)}, and {CONFIG} says {field}={str(wanted).lower()}; "
                    "correct it, or download the adapter again."
                )
        whole = [name for name, pair in self.factors.items() if pair.of_embedding]
        whole += self.trained
        if self.invocation_tokens and whole:
            raise AdapterError(
                f"{self.file}: activated LoRA (aLoRA) that changes {shorten_names(whole)} for all "
                "tokens is not supported. Train it without."
            )

    def scale(self, module: str, parameter: str | None = None, experts: int = 1) -> float:
        """Implement `AdapterFile`, as PEFT computes it."""
        name = parameter or module
        rank = self._ranks.find(name)
        rank = self._rank if rank is None else rank
        stored = self.factors[module].rank // experts
        if rank != stored:
            raise AdapterError(
                f"{self.file}: the factors of {printable(module)} have rank {stored}, and "
                f"{CONFIG} says {rank} (r, or rank_pattern); correct it, or download the adapter "
                "again."
            )
        alpha = self._alphas.find(name)
        alpha = self._alpha if alpha is None else alpha
        return finite_scale(alpha / (math.sqrt(rank) if self._stabilized else rank), self.path)

    def names(self, module: str, expected: Expected) -> list[str]:
        """Implement `AdapterFile`."""
        stored = expected.stored_names(f"{module}.weight")
        names = [name.removesuffix(".weight") for name in stored if name.endswith(".weight")]
        renamed = [n.replace(old, new) for old, new in _NEWER.items() for n in names if old in n]
        return names + renamed

    def row_order(self, source: Source, rows: int, head_size: int) -> None:
        """Implement `AdapterFile`: the order is that of the checkpoint."""
        return


def finite_scale(scale: float, path: Path) -> float:
    """Return the factor of a change, after a check.

    Raises:
        AdapterError: it is beyond float32.
    """
    if not abs(scale) < float(np.finfo(np.float32).max):
        raise AdapterError(f"{path}: the factor {scale} (alpha / rank) is too large; lower alpha.")
    return scale


def _invocation_tokens(config: ConfigJson) -> tuple[int, ...]:
    """Return the tokens that begin an activated LoRA (Greenewald et al. 2025).

    Raises:
        AdapterError: the config names them as a text only.
        ModelError: they are not token ids.
    """
    tokens = config.token_ids("alora_invocation_tokens")
    if not tokens and config.get("invocation_string"):
        raise AdapterError(
            f"{config.where}: invocation_string is set without alora_invocation_tokens; add the "
            "token ids of the text as alora_invocation_tokens."
        )
    return tokens


def _refuse_other_kinds(config: ConfigJson) -> None:
    """Raise `AdapterError` if a config describes another kind of adapter than LoRA."""
    kind = config.get("peft_type")
    if kind not in (None, "LORA"):
        text = printable(str(kind))
        is_prompt = text in _PROMPTS
        name = (_PROMPTS | _OTHER_TYPES).get(text, "this kind of adapter")
        raise AdapterError(
            f"{config.where}: peft_type={text}: {name} is not supported; supported: LORA. "
            + ("Train a LoRA." if is_prompt else f"Train a LoRA, or {MERGE}.")
        )
    for field, name in _KINDS.items():
        if config.get(field):
            raise AdapterError(
                f"{config.where}: {field} is set: {name} is not supported. Train without it, or "
                f"{MERGE}."
            )
    bias = config.get("bias")
    if bias not in (None, "none"):
        raise AdapterError(
            f"{config.where}: bias={printable(str(bias))}: LoRA with trained biases is not "
            f"supported. Train with bias=none, or {MERGE}."
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise AdapterError(
            f"{config.where}: init_lora_weights={printable(start)}: the adapter belongs to a base "
            "that its training has changed. "
            + (
                f"In the program of the training, {MERGE}."
                if start.lower() == "loftq"
                else "Save it as a LoRA of the original model (save_pretrained with "
                "path_initial_model_for_weight_conversion)."
            )
        )


class _Patterns:
    """Numbers of single modules, by patterns of their names: rank_pattern or alpha_pattern.

    As in PEFT, the first key that matches the end of the name, after a dot, counts. A dot in a key
    that is otherwise a name stands for a dot only.

    Args:
        config: adapter_config.json.
        field: the field.

    Raises:
        ModelError: a key is not a regular expression that is supported, or a number is none.
    """

    def __init__(self, config: ConfigJson, field: str) -> None:
        section = config.section(field)
        self._ends: dict[str, int] = {}
        self._others: dict[int, re.Pattern[str]] = {}
        self._numbers: list[Any] = []
        for index, key in enumerate(section.names()):
            if field == "rank_pattern":
                self._numbers.append(section.integer(key))
            else:
                self._numbers.append(section.number(key))
            if _PLAIN.fullmatch(key):
                self._ends[key] = index
                continue
            if len(self._others) == _MOST_PATTERNS:
                raise AdapterError(
                    f"{section.where}: more than {_MOST_PATTERNS} keys are regular expressions; "
                    "name the modules instead."
                )
            try:
                if len(key) > _LONGEST_PATTERN:
                    raise re.error(f"it has more than {_LONGEST_PATTERN} characters")
                self._others[index] = compile_safely(f"({key})$", _MOST_WAYS)
            except (re.error, RecursionError, OverflowError) as error:
                raise AdapterError(
                    f"{section.where}: {printable(key)!r} is not a regular expression that Octavo "
                    f"supports ({reason_of(error)}); name the modules instead."
                ) from None

    def find(self, module: str) -> Any:
        """Return the number of a module, or None."""
        if not self._numbers:
            return None
        begins = [0, *(dot.end() for dot in re.finditer(r"\.", module))]
        ends = [f"^{module}", *(module[begin:] for begin in begins)]
        found = [self._ends[end] for end in ends if end in self._ends]
        found += [
            index
            for index, pattern in self._others.items()
            if any(pattern.match(module, begin) for begin in begins)
        ]
        return self._numbers[min(found)] if found else None


def _find_trained(
    file: Path, tensors: Mapping[str, StoredTensor]
) -> dict[str, dict[str, StoredTensor]]:
    """Return the tensors of the modules that an adapter replaces, by module.

    Raises:
        AdapterError: a tensor has a wrong type, or is there twice.
    """
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in tensors.items():
        match = _TRAINED.fullmatch(whole := _plain_name(name))
        if match is None or _is_part_of_lora(whole):
            continue
        if match["tensor"] in found.setdefault(match["module"], {}):
            raise AdapterError(
                f"{file} has the {match['tensor']} of {printable(match['module'])} twice; save the "
                "adapter again."
            )
        if tensor.dtype not in FLOATS:
            raise AdapterError(
                f"{file}: {printable(name)} has type {tensor.dtype}; supported: "
                f"{', '.join(FLOATS)}. Save the adapter in one of these."
            )
        found[match["module"]][match["tensor"]] = tensor
    return found


def _is_part_of_lora(name: str) -> bool:
    """Return True for the name of a factor, or of another tensor that makes a kind of LoRA."""
    return bool(_TENSOR.search(name)) or any(re.search(end, name) for end in _OTHER_TENSORS)


def _pair(file: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, Factors]:
    """Return the factors of each module.

    Raises:
        AdapterError: some tensors are not factors of LoRA, or a factor is missing.
    """
    found: dict[str, dict[str, StoredTensor]] = {}
    of_embedding: set[str] = set()
    for name, tensor in tensors.items():
        whole = _plain_name(name)
        match = _TENSOR.search(whole)
        if match is None:
            kinds = (kind for end, kind in _OTHER_TENSORS.items() if re.search(end, whole))
            kind = next(kinds, None)
            if kind is None and _TRAINED.fullmatch(whole):
                continue
            kind = kind or "LoRA with other tensors than weights and biases"
            raise AdapterError(
                f"{file} has {printable(name)}: {kind} is not supported. Train without it, or "
                f"{MERGE}."
            )
        module, factor = whole[: match.start()], match[match.lastindex or 0]
        if _OF_EMBEDDING.search(whole):
            of_embedding.add(module)
        if factor in found.setdefault(module, {}):
            raise AdapterError(
                f"{file} has lora_{factor} of {printable(module)} twice; save the adapter again."
            )
        found[module][factor] = tensor
    if not found:
        raise AdapterError(f"{file} has no factors of LoRA; save the adapter again.")
    return pair_factors(file, found, of_embedding)


def _plain_name(name: str) -> str:
    """Return the name of a tensor without what PEFT and wrappers of a training have added."""
    return _WRAPPERS.sub("", name).removeprefix(_PREFIX)


def pair_factors(
    file: Path, found: Mapping[str, Mapping[str, StoredTensor]], of_embedding: Collection[str]
) -> dict[str, Factors]:
    """Return the factors of each module, after a check of their types and shapes.

    Args:
        file: the file.
        found: tensors of each module, as in `Factors.tensors`.
        of_embedding: modules that are embeddings.

    Raises:
        AdapterError: a factor is missing, has a wrong type, or shapes contradict each other.
    """
    alone = [module for module, pair in found.items() if not {"A", "B"} <= pair.keys()]
    if alone:
        raise AdapterError(
            f"{file} has only one of the two factors (A, B) of {shorten_names(alone)}; download "
            "the adapter again."
        )
    for module, pair in found.items():
        for factor, tensor in pair.items():
            if tensor.dtype not in FLOATS:
                raise AdapterError(
                    f"{file}: {factor} of {printable(module)} has type {tensor.dtype}; supported: "
                    f"{', '.join(FLOATS)}. Save the adapter in one of these."
                )
        a, b = pair["A"].shape, pair["B"].shape
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or 0 in (*a, *b):
            raise AdapterError(
                f"{file}: A {list(a)} and B {list(b)} of {printable(module)} are not "
                "[rank, inputs] and [outputs, rank]; download the adapter again."
            )
        if module in of_embedding and len(pair) > 2:
            raise AdapterError(
                f"{file}: DoRA of the embedding ({printable(module)}) is not supported. Train "
                f"without it, or {MERGE}."
            )
        for factor in ("bias", "magnitude"):
            shape = pair[factor].shape if factor in pair else b[:1]
            if shape != b[:1]:
                raise AdapterError(
                    f"{file}: {factor} {list(shape)} and B {list(b)} of {printable(module)} have "
                    "different numbers of outputs; download the adapter again."
                )
    return {
        module: Factors(
            pair["A"], pair["B"], pair.get("bias"), pair.get("magnitude"), module in of_embedding
        )
        for module, pair in found.items()
    }


class AdapterData:
    """Numbers of an adapter's file, which are read, not mapped: the file may be cut off meanwhile.

    Args:
        adapter: the description of the file.

    Raises:
        AdapterError: the file has changed since its description was read, or ends too early.
        ModelError: the file is no regular file any more.
        OSError: the file cannot be read.
    """

    def __init__(self, adapter: AdapterFile) -> None:
        self._file, self._identity = adapter.file, adapter.identity
        self._stream = open_file(adapter.file)

    def __enter__(self) -> AdapterData:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def check(self) -> None:
        """Raise `AdapterError` if the file has changed."""
        if _identity(os.fstat(self._stream.fileno())) != self._identity:
            raise AdapterError(f"{self._file} has changed while it was read; load it again.")

    def read(
        self, tensors: Sequence[StoredTensor]
    ) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
        """Return the numbers of tensors, in types of numpy or ml_dtypes.

        Returns:
            Blocks of all numbers in the order of the file, where neighbours of one type are one
            block; and the tensors, which are views of blocks.
        """
        places, sizes = _plan_blocks(self._file, tensors)
        blocks: list[NDArray[Any]] = []
        for begin, nbytes, dtype in sizes:
            block = np.empty(nbytes, np.uint8)
            self._stream.seek(begin)
            if self._stream.readinto(block.data) != nbytes:
                raise AdapterError(f"{self._file} has changed while it was read; load it again.")
            blocks.append(block.view(numpy_dtype(dtype)))
        arrays: list[NDArray[Any]] = [
            np.ndarray(
                stored.shape,
                blocks[place].dtype,
                blocks[place],
                stored.begin - sizes[place][0],
                stored.strides,
            )
            for stored, place in zip(tensors, places, strict=True)
        ]
        return blocks, arrays


def _plan_blocks(
    file: Path, tensors: Sequence[StoredTensor]
) -> tuple[list[int], list[tuple[int, int, str]]]:
    """Return the index of each tensor's block, and begin, bytes and type of each block.

    Raises:
        AdapterError: a tensor is a part of a larger one, which would take more memory.
    """
    places, blocks = [0] * len(tensors), [(-1, 0, "")]
    is_open = False
    for index in sorted(range(len(tensors)), key=lambda index: tensors[index].begin):
        stored = tensors[index]
        size = numpy_dtype(stored.dtype).itemsize
        nbytes = math.prod(stored.shape) * size
        if stored.strides is not None:
            spans = zip(stored.shape, stored.strides, strict=True)
            span = size + sum((n - 1) * stride for n, stride in spans)
            if span > nbytes:
                raise AdapterError(
                    f"{file} has tensors that are parts of larger ones; save the adapter again as "
                    "safetensors."
                )
            nbytes = span
        begin, before, dtype = blocks[-1]
        if is_open and (stored.begin, stored.dtype, stored.strides) == (
            begin + before,
            dtype,
            None,
        ):
            blocks[-1] = begin, before + nbytes, dtype
        else:
            blocks.append((stored.begin, nbytes, stored.dtype))
        places[index] = len(blocks) - 2
        is_open = stored.strides is None
    return places, blocks[1:]


def identity_of(file: Path) -> tuple[int, ...]:
    """Return what distinguishes a file from others and from its later contents."""
    return _identity(file.stat())


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def check_place(path: Path, root: Path | None) -> None:
    """Check that an adapter's files are inside of a folder, and are regular files.

    Args:
        path: the adapter's folder or file.
        root: the folder; None: any place is allowed.

    Raises:
        AdapterError: a path, or the target of a link, is outside of the folder.
        ModelError: a file is a pipe or a device.
    """
    files = [path / name for name in (CONFIG, *WEIGHTS)] if path.is_dir() else [path]
    for file in (path, *files):
        if root is not None and not file.resolve().is_relative_to(root.resolve()):
            raise AdapterError(
                f"{file} is outside of {root} (lora_root); move the adapter into that folder."
            )
    for file in files:
        require_file(file)


def check_opened(adapter: AdapterFile, root: Path) -> None:
    """Check that the described file of tensors is inside of a folder, even if links change now.

    Raises:
        AdapterError: it is not, or has changed.
        OSError: the folders have changed.
    """
    place = adapter.file.resolve()
    if place.is_relative_to(root.resolve()):
        *folders, name = place.relative_to(root.resolve()).parts
        at = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for folder in folders:
                inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
                os.close(at)
                at = inner
            found = os.stat(name, dir_fd=at, follow_symlinks=False)
        finally:
            os.close(at)
        if _identity(found) == adapter.identity:
            return
    raise AdapterError(f"{adapter.file} has changed while it was read; load it again.")
