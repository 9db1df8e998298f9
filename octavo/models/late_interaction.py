"""Late interaction: a vector of each token, and MaxSim as the score of two texts.

Khattab and Zaharia, "ColBERT", arXiv 2004.12832, section 3. The files are those of Stanford's
ColBERT (artifact.metadata) and of PyLate (modules.json, config_sentence_transformers.json).
"""

from __future__ import annotations

import json
import logging
import string
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from octavo.checkpoints.base import Checkpoint
from octavo.checkpoints.config_json import ConfigJson
from octavo.errors import ModelError
from octavo.models.blocks.attention import AttentionSpec
from octavo.models.blocks.layer import LayerSpec
from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.pooler import DenseSpec, PoolerSpec, RoleSpec
from octavo.models.sentence_modules import SentenceModules
from octavo.models.spec import ModelSpec
from octavo.models.vocabulary import read_vocabulary

ARCHITECTURES = ("HF_ColBERT", "ColBERTModernBertModel", "ColBERTJinaRobertaModel")
"""Architectures whose checkpoint has a matrix from hidden states to vectors, `linear.weight`."""
_SIZE_FIELDS = ("colbert_dim", "dim", "projection_dim")
_PYLATE = {
    "query_prefix": "query_token_id",
    "document_prefix": "doc_token_id",
    "query_length": "query_maxlen",
    "document_length": "doc_maxlen",
    "attend_to_expansion_tokens": "attend_to_mask_tokens",
}
"""Fields of PyLate, and those of Stanford's ColBERT."""
_DEFAULTS = {"query_length": 32, "document_length": 180}

logger = logging.getLogger(__name__)


def is_late(spec: ModelSpec, modules: SentenceModules | None) -> bool:
    """Return True if the scores of a model's texts are those of their tokens' vectors."""
    return spec.architecture in ARCHITECTURES or (modules is not None and bool(modules.tokens))


def add_late_pooler(
    spec: ModelSpec, config: ConfigJson, checkpoint: Checkpoint, modules: SentenceModules | None
) -> ModelSpec:
    """Return a late-interaction model with its pooler.

    Args:
        spec: the encoder.
        config: its config.json.
        checkpoint: its other files.
        modules: its modules.json, if it has one.

    Raises:
        ModelError: a file is damaged, or the size of the vectors is nowhere.
    """
    stanford = _read_object(checkpoint, "artifact.metadata")
    if modules is not None and modules.tokens:
        dense, size = modules.tokens, modules.size
    else:
        size = _read_size(config, stanford)
        dense = (DenseSpec(LinearSpec((("linear", size),), spec.hidden_size, exact=True)),)
    pylate = _read_object(checkpoint, "config_sentence_transformers.json")
    if pylate is None or not pylate.has("query_prefix"):
        pylate = None if stanford is None else _as_pylate(stanford)
    roles = () if pylate is None else _read_roles(pylate, spec, checkpoint)
    masks = [role.mask for role in roles if role.mask is not None]
    if pylate is not None and masks and not pylate.flag("attend_to_expansion_tokens", False):
        if _can_hide(spec):
            spec = _hide(spec, masks[0])
        else:
            roles = tuple(replace(role, mask=None) for role in roles)
            logger.warning(
                "Queries are not expanded with mask tokens that other tokens do not see, as %s "
                "asks, because %s does not only attend to the whole text; their scores differ from "
                "PyLate's.",
                pylate.where,
                spec.architecture,
            )
    pooler = PoolerSpec("token_embed", ("all",), size, dense, activation="normalize", roles=roles)
    return replace(spec, poolers=(pooler,))


def _can_hide(spec: ModelSpec) -> bool:
    """Return True if tokens depend on others through attention to the whole text alone.

    DeBERTa hides tokens in its own way: masks see nothing.
    """
    for block in (block for layer in spec.distinct_layers for block in layer.blocks):
        if isinstance(block, AttentionSpec) and (block.causal or block.disentangled is not None):
            return False
        if not isinstance(block, AttentionSpec) and (block.caches() or block.arrays()):
            return False
    return True


def _hide(spec: ModelSpec, mask: int) -> ModelSpec:
    """Return the model in which no token sees the masks at the end of a text."""
    made: dict[int, LayerSpec] = {}
    for layer in spec.distinct_layers:
        blocks = [
            replace(block, unseen=mask) if isinstance(block, AttentionSpec) else block
            for block in layer.blocks
        ]
        made[id(layer)] = layer.with_blocks(blocks)
    return replace(spec, layers=tuple(made[id(layer)] for layer in spec.layers))


def _read_size(config: ConfigJson, stanford: ConfigJson | None) -> int:
    for name in _SIZE_FIELDS:
        if config.has(name):
            return config.integer(name)
    if stanford is not None and stanford.has("dim"):
        return stanford.integer("dim")
    raise ModelError(
        f"{config.where} does not have the size of a token's vector; set the number of rows of "
        """linear.weight, such as --hf-overrides '{"colbert_dim": 128}'."""
    )


def _as_pylate(stanford: ConfigJson) -> ConfigJson:
    """Return the fields of artifact.metadata under PyLate's names."""
    fields = {new: stanford.get(old) for new, old in _PYLATE.items() if stanford.has(old)}
    fields = {"query_prefix": "[unused0]", "document_prefix": "[unused1]"} | fields
    if not stanford.flag("mask_punctuation", True):
        fields["skiplist_words"] = []
    return ConfigJson(fields, stanford.where)


def _read_roles(
    pylate: ConfigJson, spec: ModelSpec, checkpoint: Checkpoint
) -> tuple[RoleSpec, ...]:
    """Return the roles of queries and documents, as PyLate reads their texts."""
    vocabulary = read_vocabulary(checkpoint)
    if vocabulary is None:
        raise ModelError(
            f"{checkpoint.path} has no tokenizer.json, and {pylate.where} names tokens; download "
            "the model again."
        )

    def token(text: str, field: str) -> int:
        found = vocabulary.get(text)
        if found is None or found >= spec.vocab_size:
            raise pylate.error(field, f"the vocabulary has no token {text!r}")
        return found

    words = pylate.get("skiplist_words")
    words = list(string.punctuation) if words is None else words
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise pylate.error("skiplist_words", "it must be a list of tokens")
    skipped = tuple(vocabulary[word] for word in words if word in vocabulary)
    mask = None
    if pylate.flag("do_query_expansion", True):
        mask = token(_mask_token(checkpoint), "do_query_expansion")
    roles = []
    for name in ("query", "document"):
        length = pylate.integer(f"{name}_length", default=_DEFAULTS[f"{name}_length"], least=4)
        prefix = pylate.get(f"{name}_prefix")
        if not isinstance(prefix, str):
            raise pylate.error(f"{name}_prefix", "it must be a token, such as [Q]")
        roles.append(
            RoleSpec(
                name,
                token(prefix, f"{name}_prefix") if prefix else None,
                min(length, spec.max_model_len),
                mask if name == "query" else None,
                skipped if name == "document" else (),
            )
        )
    return tuple(roles)


def _mask_token(checkpoint: Checkpoint) -> str:
    config = _read_object(checkpoint, "tokenizer_config.json")
    token = None if config is None else config.get("mask_token")
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) else "[MASK]"


def _read_object(checkpoint: Checkpoint, name: str) -> ConfigJson | None:
    """Return an object in a file of the checkpoint; None: there is no such file."""
    text, where = checkpoint.read_text(name), Path(checkpoint.path / name)
    if text is None:
        return None
    try:
        read = json.loads(text)
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise ModelError(f"{where} is damaged: it must be an object; download it again.")
    return ConfigJson(read, str(where))
