"""ColBERT: encoders with a matrix from each token's hidden state to its vector.

The architectures' names are vLLM's; Stanford's checkpoints name HF_ColBERT. The vectors themselves
are read in `octavo/models/late_interaction.py`.
"""

from __future__ import annotations

from octavo.checkpoints.config_json import ConfigJson
from octavo.models.families import modernbert
from octavo.models.families.bert import BertLike
from octavo.models.families.rotary_bert import read_flash
from octavo.models.spec import ModelSpec


def _read(config: ConfigJson) -> ModelSpec:
    """Read a ColBERT with BERT, or with the encoder of jina-colbert-v2."""
    rotary = config.get("position_embedding_type") == "rotary"
    return read_flash(config) if rotary else BertLike().read(config)


ARCHITECTURES = {
    "HF_ColBERT": _read,
    "ColBERTModernBertModel": modernbert.read,
    "ColBERTJinaRobertaModel": read_flash,
}
