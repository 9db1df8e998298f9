"""EuroBERT: Llama as an encoder."""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.blocks.pooler import Pooling
from octavo.models.families.classifiers import classifier, dense, token_classifier
from octavo.models.families.llama import LlamaLike
from octavo.models.spec import ModelSpec

_POOLING: dict[str, Pooling] = {"bos": "cls", "mean": "mean", "late": "mean"}


def read(config: ConfigJson) -> ModelSpec:
    """Read EuroBERT without a head."""
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    return LlamaLike(
        qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias, generates=False, ignored=(r"lm_head\..*",)
    ).read(config)


def _read_classifier(config: ConfigJson) -> ModelSpec:
    """Read EuroBERT with a head for texts; with late pooling the head computes each token."""
    spec = read(config)
    field = "clf_pooling" if config.has("clf_pooling") else "classifier_pooling"
    pooling = config.choice(field, _POOLING)
    head, late = (dense(spec, "dense", "gelu"),), config.get(field) == "late"
    return classifier(config, spec, head, pooling=pooling, of_tokens=2 if late else 0)


ARCHITECTURES = {
    "EuroBertModel": read,
    "EuroBertForMaskedLM": read,
    "EuroBertForSequenceClassification": _read_classifier,
    "EuroBertForTokenClassification": lambda config: token_classifier(config, read(config)),
}
