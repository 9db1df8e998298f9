"""The part of a model's specification that prompts are checked with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from octavo.messages import Modality, MultiModalFeatureSpec
from octavo.models.blocks.pooler import PoolerSpec, SentencesSpec


class InputSpec(Protocol):
    """Part of a `ModelSpec` that an `InputProcessor` reads."""

    @property
    def architecture(self) -> str:
        """Name of the architecture, for errors."""

    @property
    def generates(self) -> bool:
        """True if the model can generate tokens."""

    @property
    def poolers(self) -> Sequence[PoolerSpec]:
        """Results that the model has in place of tokens."""

    @property
    def sentences(self) -> SentencesSpec:
        """Prompts of a model of vectors."""

    @property
    def sees_all(self) -> bool:
        """True if one step must compute all tokens of a text."""

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding and of the output head."""

    @property
    def embed_size(self) -> int:
        """Number of numbers of an embedding; read only for prompts with embeddings."""

    @property
    def eos_token_ids(self) -> Iterable[int]:
        """Tokens that end an answer."""

    @property
    def is_encoder_decoder(self) -> bool:
        """True if a prompt has an input of an encoder. The properties below are of such models."""

    @property
    def encoder_modality(self) -> Modality:
        """Kind of the encoder's inputs: "text" or "audio"."""

    @property
    def encoder_vocab_size(self) -> int:
        """Number of rows of the encoder's embedding."""

    @property
    def encoder_frames(self) -> tuple[int, int]:
        """Shape of a sound: frames, numbers of a frame; -1 frames: any number."""

    def num_encoder_tokens(self, frames: int) -> int:
        """Return the number of tokens of a sound with a number of frames."""

    @property
    def max_encoder_len(self) -> int:
        """Most tokens of an encoder's input."""

    def check_item(self, item: MultiModalFeatureSpec) -> None:
        """Check that an encoder can read an item of a prompt.

        Raises:
            RequestError: no encoder can.
        """

    @property
    def decoder_start_ids(self) -> Sequence[int]:
        """Tokens with which every answer begins."""

    @property
    def bad_words_ids(self) -> Iterable[Sequence[int]]:
        """Sequences of tokens that the model never generates."""
