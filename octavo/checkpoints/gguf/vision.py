"""mmproj file of llama.cpp: the towers of a model whose text part is another file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.checkpoints.base import Source, shorten_names
from octavo.checkpoints.config_json import MOST_LAYERS, ConfigJson
from octavo.checkpoints.gguf.file import block_type, release, stored_form
from octavo.checkpoints.gguf.header import STORED_BLOCKS, GGUFHeader, GGUFTensor, Texts
from octavo.checkpoints.gguf.projectors import PROJECTORS, Projector
from octavo.checkpoints.gguf.repack import REPACKED, repack
from octavo.checkpoints.gguf.sounds import COMMON_KEYS, SOUND_ENCODERS, SoundEncoder
from octavo.checkpoints.model_files import printable
from octavo.errors import ModelError
from octavo.system.tensor import HostTensor, from_numpy

_PREFIXES: tuple[str, ...] = ("visual.", "vision_tower.", "model.vision_model.")
_PREFIXES += ("multi_modal_projector.", "model.connector.")
_PREFIXES += ("embed_vision.", "vision_embedder.", "audio_tower.", "embed_audio.")
_KEYS = {"has_vision_encoder", "has_audio_encoder", "has_text_encoder", "has_llava_projector"}
_KEYS |= {"projector_type", "use_gelu", "use_silu"}
_KEYS |= {
    f"vision.{name}"
    for name in (
        "projector_type",
        "image_size",
        "patch_size",
        "embedding_length",
        "feed_forward_length",
        "block_count",
        "projection_dim",
        "attention.head_count",
        "attention.layer_norm_epsilon",
        "image_mean",
        "image_std",
    )
}
"""Keys of all files, without `clip.`."""
_MERGER = re.compile(r"visual\.deepstack_merger_list\.(\d+)\.(norm|linear_fc1|linear_fc2)\.(\w+)")
_MOST_SIDE = 2**14
_FUSED, _SPLIT = "attn_qkv", ("attn_q", "attn_k", "attn_v")
_PATCHES = "v.patch_embd.weight"


def tower_name(name: str) -> bool:
    """Return True for the name of a tower's tensor in Hugging Face's form."""
    return name.startswith(_PREFIXES)


class VisionFile:
    """An mmproj file. Its header is read when it is first needed.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @cached_property
    def _header(self) -> GGUFHeader:
        return GGUFHeader(self.path)

    @cached_property
    def keys(self) -> ConfigJson:
        """The metadata, with numbers as they were meant: the file has float32 numbers."""
        return ConfigJson({k: _plain(v) for k, v in self._header.metadata.items()}, str(self.path))

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all tensors by their names, rows first."""
        return {name: tensor.shape for name, tensor in self._header.tensors.items()}

    @cached_property
    def kind(self) -> str:
        """Value of clip.projector_type.

        Raises:
            ModelError: this is another file.
        """
        kind = self.keys.get("clip.vision.projector_type", "clip.projector_type")
        if self.keys.get("general.architecture") != "clip" or not isinstance(kind, str):
            raise ModelError(
                f"{self.path} is not an mmproj file: it has no general.architecture=clip with a "
                "clip.projector_type. Name the model's mmproj file with --mmproj, or start with "
                "--no-mmproj."
            )
        return kind

    @cached_property
    def _projector(self) -> Projector:
        return PROJECTORS[self.kind]

    @cached_property
    def _sound_encoder(self) -> SoundEncoder | None:
        """The encoder of sounds; None: the file has none.

        Raises:
            ModelError: it is of a kind that is not supported with this tower.
        """
        keys = self.keys
        if not keys.flag("clip.has_audio_encoder", False):
            return None
        if not self._projector.sounds:
            raise keys.error(
                "clip.has_audio_encoder",
                f"clip.projector_type={self.kind} is supported for towers of pictures only",
            )
        return SOUND_ENCODERS[
            keys.choice("clip.audio.projector_type", {k: k for k in self._projector.sounds})
        ]

    def misfit(self, text: ConfigJson, text_kind: str) -> str:
        """Return the reason why a text model cannot have this tower; empty: it can.

        Args:
            text: config of the text part.
            text_kind: architecture of its file.

        Raises:
            ModelError: this is another file.
        """
        known = PROJECTORS.get(self.kind)
        if known is None:
            return (
                f"clip.projector_type={printable(self.kind)} is not supported; supported: "
                f"{', '.join(PROJECTORS)}"
            )
        if known.texts and text_kind not in known.texts:
            return (
                f"clip.projector_type={self.kind} needs a text model of general.architecture="
                f"{' or '.join(known.texts)}, and this one has {printable(text_kind)}"
            )
        hidden = text.integer("hidden_size")
        sounds = [encoder.last] if (encoder := self._sound_encoder) else []
        for name in (known.last, *sounds):
            shape = self.shapes.get(name, ())
            if (shape[-1:] if known.transposed else shape[:1]) != (hidden,):
                return (
                    f"{name} has the shape {list(shape)}, and the text model has embeddings of "
                    f"{hidden} numbers"
                )
        return ""

    def number(self, key: str, default: int | None = None) -> int:
        """Return a whole number of `clip.vision`."""
        return self.keys.integer(f"clip.vision.{key}", default=default, most=2**20)

    def describe(self, text: ConfigJson, text_kind: str) -> dict[str, Any]:
        """Return the fields of config.json that describe the tower.

        Args:
            text: config of the text part.
            text_kind: architecture of its file.

        Raises:
            ModelError: the file is damaged, is of a kind that is not supported, or belongs to
                another model.
        """
        if reason := self.misfit(text, text_kind):
            raise ModelError(
                f"{self.path}: {reason}. Name the mmproj file of this model with --mmproj, or "
                "start with --no-mmproj."
            )
        projector, hidden = self._projector, text.integer("hidden_size")
        tower, model_type = projector.text_of.get(
            text_kind, (projector.tower, projector.model_type)
        )
        vision = self._sizes | {"out_hidden_size": hidden}
        own, _ = projector.read(self, vision)
        if sounds := self._sound_encoder:
            own["audio_config"], _ = sounds.read(self)
        return {"gguf_tower": tower, "model_type": model_type} | own

    @property
    def has_sections(self) -> bool:
        """True if the positions of the text part have sections."""
        return self._projector.sections

    @cached_property
    def preprocessor(self) -> str:
        """Return the settings of pictures, in the form of preprocessor_config.json."""
        keys = self.keys
        _, pictures = self._projector.read(self, self._sizes | {"out_hidden_size": 1})
        for name in ("image_mean", "image_std"):
            pictures[name] = list(keys.numbers(f"clip.vision.{name}", 3))
        if not all(pictures["image_std"]):
            raise keys.error("clip.vision.image_std", "its numbers must not be 0")
        return json.dumps(pictures)

    @cached_property
    def feature_extractor(self) -> str | None:
        """Settings of sounds, in the form of processor_config.json; None: the file has none."""
        sounds = self._sound_encoder
        return json.dumps({"feature_extractor": sounds.read(self)[1]}) if sounds else None

    @cached_property
    def _sizes(self) -> dict[str, Any]:
        """Fields of vision_config that all towers have.

        Raises:
            ModelError: a key is missing, impossible, or unknown.
        """
        keys, own = self.keys, {f"vision.{name}" for name in self._projector.own_keys}
        known = {f"clip.{name}" for name in _KEYS | own}
        if self._sound_encoder:
            known |= {f"clip.audio.{name}" for name in COMMON_KEYS}
        unknown = [k for k in keys.names() if k.startswith("clip.") and k not in known]
        if unknown:
            raise ModelError(
                f"{self.path}: clip.projector_type={self.kind} with the keys "
                f"{shorten_names(unknown)} is not supported; use the model's Hugging Face folder, "
                "or start with --no-mmproj."
            )
        inner, least = self.shapes.get(f"v.blk.0.{self._up}.weight", (0,)), 1
        if not self._projector.has_layers:
            least = 0
        return {
            "hidden_size": self.number("embedding_length"),
            # Old files have another number in feed_forward_length.
            "intermediate_size": inner[0],
            "num_hidden_layers": keys.integer(
                "clip.vision.block_count", least=least, most=MOST_LAYERS
            ),
            "num_attention_heads": keys.integer(
                "clip.vision.attention.head_count", least=least, most=2**20
            ),
            "num_channels": 3,
            "image_size": keys.integer("clip.vision.image_size", most=_MOST_SIDE),
            "patch_size": keys.integer("clip.vision.patch_size", most=1024),
            "layer_norm_eps": keys.positive("clip.vision.attention.layer_norm_epsilon", 1e-6),
        }

    @cached_property
    def _up(self) -> str:
        """Name of the first projection of an MLP: old files exchange the two names."""
        width = self.number("embedding_length")
        down = self.shapes.get("v.blk.0.ffn_down.weight", (0, 0))
        swapped = len(down) == 2 and down[1] == width and down[0] != width
        return "ffn_down" if swapped else "ffn_up"

    def _stored_names(self, name: str) -> list[str]:
        """Return the tensors of the file that are a tensor in Hugging Face's form together.

        They are queries, keys and values, or the first and the second frame of patches.
        """
        projector, sounds = self._projector, self._sound_encoder
        if sounds is not None and name.startswith(("audio_tower.", "embed_audio.")):
            return [_stored_name(sounds, name)]
        if match := _MERGER.fullmatch(name):
            taps = self._taps
            index = int(match[1])
            layer = taps[index] if index < len(taps) else -1
            return [f"v.deepstack.{layer}.{match[2].removeprefix('linear_')}.{match[3]}"]
        if name in projector.names:
            return [projector.names[name]]
        module, _, kind = name.rpartition(".")
        if module in projector.names:
            first = f"{projector.names[module]}.{kind}"
            second = f"{first}.1"
            return [first, second] if first == _PATCHES and second in self.shapes else [first]
        layer_, _, inner = name.removeprefix(projector.layers).partition(".")
        prefix = f"v.blk.{layer_}."
        if inner in projector.inner:
            return [prefix + projector.inner[inner]]
        module, _, kind = inner.rpartition(".")
        stored = projector.inner.get(module, module)
        if stored == _FUSED and f"{prefix}{_FUSED}.{kind}" not in self.shapes:
            return [f"{prefix}{part}.{kind}" for part in _SPLIT]
        if stored in ("ffn_up", "ffn_down") and self._up == "ffn_down":
            stored = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}[stored]
        return [f"{prefix}{stored}.{kind}"]

    @cached_property
    def _taps(self) -> list[int]:
        """Layers whose results are projected, too."""
        found = (re.fullmatch(r"v\.deepstack\.(\d+)\.fc1\.weight", name) for name in self.shapes)
        return sorted(int(match[1]) for match in found if match is not None)

    @cached_property
    def block_types(self) -> dict[str, str]:
        """Block types of linear modules by their names in Hugging Face's form."""
        tensors = self._header.tensors
        types: dict[str, str] = {}
        for module in self._modules():
            stored = self._stored_names(f"{module}.weight")
            found = {tensors[name].type for name in stored if name in tensors}
            if len(found) == 1 and found & STORED_BLOCKS.keys():
                types[module] = block_type(tensors[stored[0]])
        return types

    def _modules(self) -> list[str]:
        """Return the modules whose weights may be blocks."""
        projector = self._projector
        layers = self._sizes["num_hidden_layers"]
        modules = [f"{projector.layers}{i}.{m}" for i in range(layers) for m in projector.inner]
        modules += [
            module
            for module, stored in projector.names.items()
            if stored.startswith("mm.") and stored not in projector.floats
        ]
        if sounds := self._sound_encoder:
            modules += [m for m in sounds.names if m in sounds.linears]
            inner = [m for m in sounds.inner if m in sounds.linears]
            if inner:
                count = self.keys.integer("clip.audio.block_count", most=MOST_LAYERS)
                modules += [f"{sounds.layers}{i}.{m}" for i in range(count) for m in inner]
        return modules + [
            f"visual.deepstack_merger_list.{i}.linear_fc{n}"
            for i in range(len(self._taps))
            for n in (1, 2)
        ]

    def open(self, sources: Sequence[Source], architecture: str) -> VisionTensors:
        """Compare the tensors with those of the tower.

        Raises:
            ModelError: a tensor is missing, unexpected, or has a wrong shape or type.
        """
        tensors = self._header.tensors
        stored = {source.name: self._stored_names(source.name) for source in sources}
        used = {name for names in stored.values() for name in names}
        missing = sorted(used - tensors.keys())
        if missing:
            raise ModelError(
                f"{self.path} lacks {len(missing)} tensors of the tower of {architecture}: "
                f"{shorten_names(missing)}. Download the file again."
            )
        layers = self._sizes["num_hidden_layers"]
        extra = [n for n in tensors if n not in used and not self._is_ignored(n, layers)]
        if extra:
            raise ModelError(
                f"{self.path} holds {len(extra)} tensors that the tower of {architecture} with "
                f"this metadata does not have: {shorten_names(extra)}."
            )
        parts = {source.name: [tensors[name] for name in stored[source.name]] for source in sources}
        for source in sources:
            required = source
            if source.name == self._projector.swapped:
                first, second, *rest = source.shape
                required = replace(source, shape=(second, first, *rest))
            _check(required, parts[source.name])
        heads = self._sizes["num_attention_heads"]
        sounds = self._sound_encoder
        softplus = f".{sounds.softplus}" if sounds and sounds.softplus else ""
        return VisionTensors(self._header, parts, self._projector, heads, softplus)

    def _is_ignored(self, name: str, num_layers: int) -> bool:
        """Return True for a tensor that nothing reads, such as those of layers after the last."""
        layer = re.match(r"v\.blk\.(\d+)\.", name)
        if layer is not None and self.kind == "mlp" and int(layer[1]) >= num_layers:
            return True
        return any(re.fullmatch(pattern, name) for pattern in self._projector.ignored)


def _stored_name(sounds: SoundEncoder, name: str) -> str:
    """Return the tensor of the file that is one of an encoder of sounds."""
    module, _, kind = name.rpartition(".")
    if module in sounds.names:
        return f"{sounds.names[module]}.{kind}"
    layer, _, inner = name.removeprefix(sounds.layers).partition(".")
    module, _, kind = inner.rpartition(".")
    stored = sounds.inner.get(inner) or f"{sounds.inner.get(module, module)}.{kind}"
    return f"a.blk.{layer}.{stored}"


def _check(source: Source, parts: list[GGUFTensor]) -> None:
    """Check the shape and the type of a tensor that may have several parts.

    Raises:
        ModelError: they do not match.
    """
    forms = [stored_form(part) for part in parts]
    required = source.shape
    if len(parts) == 2:  # frames of patches
        required = (*source.shape[:2], *source.shape[3:]) if source.shape[2:3] == (2,) else ()
    elif len(parts) == 3:
        required = (source.shape[0] // 3, *source.shape[1:])
    for part, (shape, dtype) in zip(parts, forms, strict=True):
        if dtype not in source.dtypes or dtype != forms[0][1] or part.type != parts[0].type:
            others = " as its neighbors" if dtype in source.dtypes else ""
            raise ModelError(
                f"{part.file}: {part.name} has type {part.type.upper()}; it must be "
                f"{forms[0][1] if others else ' or '.join(source.dtypes)}{others}. Convert the "
                "file again, with --outtype f16 or q8_0."
            )
        flat = len(shape) != len(required) and math.prod(shape) == math.prod(required)
        if shape != required and shape not in source.other_shapes and not flat:
            raise ModelError(
                f"{part.file}: {part.name} has shape {list(shape)}, but the metadata requires "
                f"{list(required)}. Download the file again."
            )


class VisionTensors:
    """`Tensors` of an mmproj file, with the converter's changes undone.

    Args:
        header: the file.
        parts: tensors of the file by names in Hugging Face's form.
        projector: the kind of file.
        num_heads: number of heads of the tower.
        softplus: end of the names of tensors whose softplus the file has; empty: there are none.
    """

    def __init__(
        self,
        header: GGUFHeader,
        parts: Mapping[str, list[GGUFTensor]],
        projector: Projector,
        num_heads: int,
        softplus: str,
    ) -> None:
        self._header, self._parts = header, parts
        self._projector, self._num_heads, self._softplus = projector, num_heads, softplus

    def read(self, source: Source) -> HostTensor:
        """Return a view of the mapped file, or a changed copy."""
        parts = self._parts[source.name]
        if len(parts) == 1:
            (part,) = parts
            shape, dtype = stored_form(part)
            data = self._bytes(part)
            module = source.name.split(".")[-2]
            if self._projector.permuted and module in ("q_proj", "k_proj"):
                data = self._neighbors_apart(data, part)
            if dimensions := self._projector.by_channels.get(source.name):
                data = _channels_last(data, part, dimensions)
            if source.name == self._projector.swapped:
                data = _swapped(data, part)
            if self._softplus and source.name.endswith(self._softplus):
                floats = from_numpy(data).view(dtype).numpy().astype(np.float64)
                with np.errstate(divide="ignore", invalid="ignore"):
                    inverse = floats + np.log(-np.expm1(-floats))
                return from_numpy(inverse.astype(np.float32).reshape(shape))
            if source.name == self._projector.shifted:
                floats = from_numpy(data).view(dtype).numpy().astype(np.float32)
                return from_numpy((floats - 1).reshape(shape))
            kept = shape == source.shape or shape in source.other_shapes
            tensor: HostTensor = from_numpy(data).view(dtype).view(shape if kept else source.shape)
            return tensor
        shape, dtype = stored_form(parts[0])
        if len(parts) == 3:
            joined = np.concatenate([self._bytes(part) for part in parts])
        else:
            frames = [self._bytes(part).reshape(math.prod(shape[:2]), -1) for part in parts]
            joined = np.stack(frames, 1).reshape(-1)
        result: HostTensor = from_numpy(joined).view(dtype).view(source.shape)
        return result

    def _bytes(self, part: GGUFTensor) -> NDArray[np.uint8]:
        data = np.frombuffer(self._header.data, np.uint8, part.nbytes, part.begin)
        return repack(data, part.type) if part.type in REPACKED else data

    def _neighbors_apart(self, data: NDArray[np.uint8], part: GGUFTensor) -> NDArray[np.uint8]:
        """Return the rows of queries or keys in the order of transformers."""
        rows, heads = part.shape[0], self._num_heads
        if rows % (2 * heads):
            raise ModelError(f"{part.file}: {part.name} has {rows} rows for {heads} heads.")
        halves = data.reshape(heads, rows // heads // 2, 2, -1)
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(-1)

    def done(self, tensor: HostTensor) -> None:
        """Let the system drop the tensor's pages of the mapped file."""
        release(self._header.data, tensor)


def _channels_last(data: NDArray[np.uint8], part: GGUFTensor, dimensions: int) -> NDArray[np.uint8]:
    """Return the bytes of the numbers of patches with the three channels last.

    Args:
        data: bytes of the tensor, [rows, 3, height, width], [rows, 3 * pixels] or [3 * pixels].
        part: the tensor.
        dimensions: number of dimensions that it must have.
    """
    if len(part.shape) != dimensions:
        raise ModelError(
            f"{part.file}: {part.name} must have {dimensions} dimensions, not {len(part.shape)}."
        )
    rows = part.shape[0] if dimensions > 1 else 1
    pixels = data.reshape(rows, 3, math.prod(part.shape) // rows // 3, -1)
    return np.ascontiguousarray(pixels.swapaxes(1, 2)).reshape(-1)


def _swapped(data: NDArray[np.uint8], part: GGUFTensor) -> NDArray[np.uint8]:
    """Return the bytes of a tensor with its first two dimensions exchanged."""
    pairs = data.reshape(*part.shape[:2], -1)
    return np.ascontiguousarray(pairs.swapaxes(0, 1)).reshape(-1)


def _plain(value: Any) -> Any:
    """Return a value of the metadata as JSON has it."""
    if isinstance(value, np.ndarray):
        return [_plain(item) for item in value[:_MOST_SIDE].tolist()]
    if isinstance(value, Texts):
        return value[:_MOST_SIDE]
    if isinstance(value, float) and math.isfinite(value):
        with np.errstate(over="ignore"):
            return float(str(np.float32(value)))
    return value
