"""Registry of the families that read a model's config.json."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from octavo.checkpoints.base import Checkpoint
from octavo.checkpoints.config_json import ConfigJson
from octavo.checkpoints.refusals import reason_of_refusal
from octavo.config import ModelConfig
from octavo.errors import ModelError
from octavo.models import families
from octavo.models.config_defaults import ARCHITECTURES, DEFAULTS, TEXT_PARTS
from octavo.models.families.base import OUTER_FIELDS, Family
from octavo.models.families.classifiers import stored_classifier
from octavo.models.family_index import INDEX
from octavo.models.forms import assign
from octavo.models.poolers import add_poolers
from octavo.models.sentence_modules import is_sparse
from octavo.models.spec import ModelSpec
from octavo.models.variants import Variant, find_variant, read_variant, see_all

if TYPE_CHECKING:
    from octavo.models.heads import MTPSpec

ENTRY_POINTS = "octavo.models"
"""Group of the entry points of other packages: the name is an architecture, the object a
`Family`."""


class _Families(Mapping[str, Family]):
    """Built-in families by names in config.json's `architectures`; imported when they are read."""

    _files: Mapping[str, str] = {name: file for file, names in INDEX.items() for name in names}

    def __getitem__(self, architecture: str) -> Family:
        family: Family = self.module_of(architecture).ARCHITECTURES[architecture]
        return family

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def module_of(self, architecture: str) -> ModuleType:
        """Import the file that reads an architecture; KeyError: no file reads it."""
        return importlib.import_module(f"{families.__name__}.{self._files[architecture]}")


FAMILIES = _Families()
_CAUSAL = ("PaliGemmaForConditionalGeneration",)
"""Architectures whose attention is causal, except in prompts with pictures, whatever their configs
say. Without their towers it is always causal, and a warning says so."""
_EXPERTS = (
    "AfmoeForCausalLM",
    "Cohere2MoeForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
    "Dots1ForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "ExaoneMoeForCausalLM",
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForCausalLM",
    "Gemma4UnifiedForConditionalGeneration",
    "Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM",
    "GraniteMoeSharedForCausalLM",
    "HYV3ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "JambaForCausalLM",
    "KimiK25ForConditionalGeneration",
    "KimiLinearForCausalLM",
    "Kimi_K25ForConditionalGeneration",
    "LagunaForCausalLM",
    "Lfm2MoeForCausalLM",
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
    "MiMoV2FlashForCausalLM",
    "MiniMaxM2ForCausalLM",
    "Mistral3ForConditionalGeneration",
    "Mistral4ForCausalLM",
    "MixtralForCausalLM",
    "NemotronHForCausalLM",
    "NomicBertForMaskedLM",
    "NomicBertForSequenceClassification",
    "NomicBertForTokenClassification",
    "NomicBertModel",
    "OlmoeForCausalLM",
    "PhiMoEForCausalLM",
    "PhimoeForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration",
    "SolarOpenForCausalLM",
)
"""Architectures whose readers read or refuse the fields of experts themselves."""
_DECODERS = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of architectures that may have a head for classes in place of an LM head."""
_DEFAULTS = ModelConfig()
_Spec = TypeVar("_Spec", bound=ModelSpec)


def read_spec(checkpoint: Checkpoint, settings: ModelConfig = _DEFAULTS) -> ModelSpec:
    """Return the spec of a checkpoint's model.

    Args:
        checkpoint: the checkpoint.
        settings: `trust_remote_code` accepts a config that names custom code (`auto_map`). The
            code never runs: Octavo's own decoder computes the model. The fields of `hf_overrides`
            replace those of config.json; fields that are objects in both are merged. `quantization`
            is the form of the linear weights.

    Raises:
        ConfigError: `quantization` is set for a quantized model, or `runner`, `convert` or
            `pooler_config` asks for what the model does not have.
        ModelError: a field has an unsupported value.
    """
    architecture, config = _read_architecture(checkpoint, settings)
    read = FAMILIES.get(architecture) or _installed(architecture)
    if is_sparse(checkpoint):
        from octavo.models.families.splade import SPARSE  # a family, like the others

        read = SPARSE.get(architecture)
        if read is None:
            known = ", ".join(SPARSE)
            raise config.error("architectures", f"sparse encoders that are supported: {known}")
    variant = find_variant(architecture, FAMILIES) if read is None else None
    if read is not None and settings.convert == "classify" and architecture.endswith(_DECODERS):
        variant = Variant(architecture, "ForSequenceClassification")
    if variant is not None:
        family = read or FAMILIES[variant.base]
        architecture = variant.base
        read = partial(read_variant, variant, family, checkpoint=checkpoint)
    if read is None:
        raise config.error(
            "architectures",
            f"{_kind_of(architecture)}; README.md lists the models that are",
        )
    config = complete_config(architecture, config)
    if config.has("auto_map") and not settings.trust_remote_code:
        raise config.error(
            "auto_map",
            "the model needs custom code, which Octavo never runs; with trust_remote_code it "
            f"is run as {architecture} by Octavo's own decoder",
        )
    experts = ("num_local_experts", "num_experts", "n_routed_experts")
    for name in () if architecture in _EXPERTS else experts:
        config.refuse(name, 0, f"mixtures of experts are not supported with {architecture}")
    bidirectional = variant is not None and variant.bidirectional
    sees = config.get("use_bidirectional_attention")
    if architecture not in _CAUSAL:
        if sees not in (None, True, False, "vision"):
            raise config.error("use_bidirectional_attention", "supported: true, false, vision")
        bidirectional |= sees is True or not config.flag("is_causal", True)
    try:
        spec = read(config)
    except ArithmeticError as error:
        raise ModelError(
            f"{config.where}: its numbers do not fit together ({error}); download the file again."
        ) from None
    if config.has("stored_classifier"):
        spec = stored_classifier(config, spec)
    if bidirectional and not spec.sees_all:
        spec = see_all(spec, config)
    if settings.limit("image"):
        from octavo.models.towers.join import with_pictures  # few models read pictures

        spec = with_pictures(spec, config)
    if settings.limit("audio"):
        from octavo.models.towers.whisper import with_sounds  # few models read sounds

        spec = with_sounds(spec, config)
    spec = complete_spec(spec, config, checkpoint, settings)
    return add_poolers(spec, config, checkpoint, settings)


def read_mtp_spec(checkpoint: Checkpoint, settings: ModelConfig) -> MTPSpec | None:
    """Return the spec of the MTP layer of a checkpoint's model; None: Octavo knows of none.

    Args and Raises: as for `read_spec`, which accepts the checkpoint.
    """
    architecture, config = _read_architecture(checkpoint, settings)
    if architecture not in FAMILIES:
        return None
    read = _mtp_layers(FAMILIES.module_of(architecture)).get(architecture)
    if read is None:
        return None
    config = complete_config(architecture, config)
    spec = read(config)
    return None if spec is None else complete_spec(spec, config, checkpoint, settings)


def mtp_architectures() -> list[str]:
    """Return the architectures whose MTP layers Octavo reads."""
    return [name for name in FAMILIES if name in _mtp_layers(FAMILIES.module_of(name))]


def _mtp_layers(family: ModuleType) -> Mapping[str, Callable[[ConfigJson], MTPSpec | None]]:
    """Return a file's readers of MTP layers, by architecture."""
    layers: Mapping[str, Callable[[ConfigJson], MTPSpec | None]] = {}
    return getattr(family, "MTP_LAYERS", layers)


def _read_architecture(checkpoint: Checkpoint, settings: ModelConfig) -> tuple[str, ConfigJson]:
    """Return the architecture and the config with `hf_overrides`."""
    config = checkpoint.config
    if settings.hf_overrides:
        config = config.override(settings.hf_overrides)
    architectures = config.get("architectures")
    model_type = config.get("model_type")
    if not architectures and isinstance(model_type, str) and model_type in ARCHITECTURES:
        architectures = [ARCHITECTURES[model_type]]
        config = config.replaced("architectures", architectures)
    if not isinstance(architectures, list) or [type(name) for name in architectures] != [str]:
        raise config.error("architectures", "it must name one, such as LlamaForCausalLM")
    return architectures[0], config


def complete_config(architecture: str, config: ConfigJson) -> ConfigJson:
    """Return the config with the fields of its text part, and defaults."""
    defaults = DEFAULTS.get(architecture, {})
    if architecture == "Phi4MMForCausalLM":
        from octavo.models.phi4mm import with_sections  # one model has this form

        config = with_sections(config)
    for section in ("text_config", "llm_config"):
        if config.has(section):
            kind = config.section(section).get("model_type")
            defaults = TEXT_PARTS.get(str(kind), {}) | defaults
            config = config.merged(section, OUTER_FIELDS)
    return config.filled(defaults)


def complete_spec(
    spec: _Spec, config: ConfigJson, checkpoint: Checkpoint, settings: ModelConfig
) -> _Spec:
    """Return a spec with the fields that families do not read.

    These are the forms of the weights; the default sampling parameters and additional ids of
    end-of-answer tokens from generation_config.json; and the type of the weights if config.json
    does not name it.

    Args:
        spec: the model.
        config: its config.json.
        checkpoint: its other files.
        settings: see `read_spec`; `quantization` is the form of the linear weights.

    Raises:
        ConfigError: `quantization` is set for a quantized model.
        ModelError: a file is damaged, a field has a wrong value, or the method by which the model
            is quantized is not supported.
    """
    spec = assign(spec, settings.quantization, config, dequantize=settings.dequantize)
    eos_token_ids, defaults = spec.eos_token_ids, dict(spec.generation_config)
    generation = checkpoint.generation_config
    if generation is not None:
        eos_token_ids += generation.token_ids("eos_token_id")
        for name, whole in _SAMPLING.items():
            if generation.has(name):
                key = "max_tokens" if name == "max_new_tokens" else name
                defaults[key] = (
                    generation.integer(name, least=-1) if whole else generation.number(name)
                )
    spec = replace(
        spec,
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        generation_config=defaults,
        dtype=spec.dtype or checkpoint.dtype,
    )
    if not spec.is_encoder_decoder:
        return spec
    return _with_answer_rules(_with_decoder_start(spec, config, generation), generation or config)


def _with_decoder_start(spec: _Spec, config: ConfigJson, generation: ConfigJson | None) -> _Spec:
    """Return an encoder-decoder with the tokens that begin answers, and those that it never writes.

    A field of generation_config.json replaces that of config.json, as in transformers.
    """
    sources = [config] if generation is None else [generation, config]

    def read(name: str) -> tuple[int, ...]:
        return next((source.token_ids(name) for source in sources if source.has(name)), ())

    start = (read("decoder_start_token_id") or read("bos_token_id"))[:1]
    if not start:
        raise config.error("decoder_start_token_id", "an encoder-decoder needs it")
    forced = read("forced_bos_token_id")
    if not forced and config.flag("force_bos_token_to_be_generated", False):  # its older name
        forced = read("bos_token_id")
    words = {(token,) for token in read("suppress_tokens")}
    for source in sources:
        if source.has("bad_words_ids"):
            found = source.get("bad_words_ids")
            if not isinstance(found, list) or not all(
                isinstance(word, list) and word and all(type(i) is int for i in word)
                for word in found
            ):
                raise source.error("bad_words_ids", "it must be a list of lists of token ids")
            words |= {tuple(word) for word in found}
            break
    return replace(
        spec,
        decoder_start_ids=start + forced[:1],
        bad_words_ids=tuple(sorted(words)),
    )


def _with_answer_rules(spec: _Spec, source: ConfigJson) -> _Spec:
    """Return an encoder-decoder with rules of its answers, from the settings of `generate`."""
    defaults, beams = dict(spec.generation_config), spec.beams
    given = len(spec.decoder_start_ids)  # tokens that transformers counts
    least = max(
        source.integer("min_length", default=0, least=0) - given,
        source.integer("min_new_tokens", default=0, least=0) - (given - 1),
    )
    if least > 0:
        defaults["min_tokens"] = least
    if size := source.integer("no_repeat_ngram_size", default=0, least=0):
        defaults["extra_args"] = {"no_repeat_ngram_size": size}
    early: Any = source.get("early_stopping")
    if early is not None:
        if not isinstance(early, bool) and early != "never":
            raise source.error("early_stopping", 'it must be true, false or "never"')
        beams = replace(beams, early_stopping=early)
    forced = source.token_ids("forced_eos_token_id")[:1]
    beams = replace(
        beams,
        length_penalty=source.number("length_penalty", default=beams.length_penalty),
        forced_eos_token_id=forced[0] if forced else None,
    )
    return replace(spec, generation_config=defaults, beams=beams)


def unused_generation_settings(checkpoint: Checkpoint) -> list[str]:
    """Return the settings of `generate` of an encoder-decoder that Octavo does not apply.

    Returns:
        Texts such as "num_beams=4", of generation_config.json, or of config.json without this file.
    """
    source = checkpoint.generation_config or checkpoint.config
    found = [(name, source.get(name), usual) for name, usual in _UNUSED.items()]
    return [f"{name}={value!r}" for name, value, usual in found if value not in (None, usual)]


_UNUSED = {"num_beams": 1, "encoder_no_repeat_ngram_size": 0}
"""Fields that change what `generate` of transformers answers -> the values without an effect."""
_SAMPLING = {"temperature": False, "top_p": False, "min_p": False, "repetition_penalty": False}
_SAMPLING |= {"top_k": True, "max_new_tokens": True}
"""Fields of generation_config.json -> True if the value is a whole number."""


def _kind_of(architecture: str) -> str:
    """Return the reason why an architecture is not supported."""
    reason = reason_of_refusal(architecture)
    if reason is not None:
        return reason
    known = {_stem(name): name for name in FAMILIES}
    near = difflib.get_close_matches(_stem(architecture), known, n=1, cutoff=0.75)
    hint = f", the nearest is {known[near[0]]}" if near else ""
    return f"Octavo has no model family of this name{hint}"


def _stem(architecture: str) -> str:
    return re.sub("ForCausalLM$|LMHeadModel$", "", architecture)


def _installed(architecture: str) -> Family | None:
    """Return the family that an installed package provides, or None."""
    from importlib.metadata import entry_points  # slow, and most models do not need it

    for entry_point in entry_points(group=ENTRY_POINTS, name=architecture):
        try:
            family: Family = entry_point.load()
        except Exception as error:  # another package's code may raise anything
            raise ModelError(
                f"The entry point {entry_point.value} of {ENTRY_POINTS}, for {architecture}, "
                f"cannot be loaded ({error!r}); update or remove the package that offers it."
            ) from error
        return family
    return None
