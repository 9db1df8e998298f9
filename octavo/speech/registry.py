"""Choice of the speech model of a folder."""

from __future__ import annotations

from octavo.checkpoints.base import Checkpoint
from octavo.models.spec import ModelSpec
from octavo.speech.interface import SpeechToText
from octavo.speech.model import SpeechModel, hears
from octavo.speech.texts import open_text_model
from octavo.text.tokenizer import Tokenizer


def open_speech_model(
    checkpoint: Checkpoint, spec: ModelSpec, tokenizer: Tokenizer | None, max_tokens: int
) -> SpeechToText:
    """Read the files of a model, if it writes what is said.

    Args:
        checkpoint: its folder.
        spec: the model.
        tokenizer: its tokenizer; None: it is not loaded.
        max_tokens: most tokens of a prompt and its answer.

    Raises:
        RequestError: the model does not hear, or its tokenizer is not loaded.
        ModelError: a file of the model is missing or wrong.
    """
    if not hears(spec) or tokenizer is None:
        return SpeechModel.open(checkpoint, spec, tokenizer, max_tokens)  # raises the error
    found = open_text_model(checkpoint, spec, tokenizer, max_tokens)
    return found or SpeechModel.open(checkpoint, spec, tokenizer, max_tokens)
