"""Settings of the results of pooling models."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from octavo.errors import ConfigError

SequencePooling = Literal["CLS", "LAST", "MEAN"]
TokenPooling = Literal["ALL", "STEP"]


class PoolerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes of a pooling model's results. Names are vLLM's."""

    pooling_type: Literal["CLS", "LAST", "MEAN", "ALL", "STEP"] | None = None
    """`seq_pooling_type` or `tok_pooling_type`, by its value."""
    seq_pooling_type: SequencePooling | None = None
    """Tokens that the result of a whole text is made of: the first one (CLS), the last one (LAST),
    or the mean of all (MEAN). Default: the model's."""
    tok_pooling_type: TokenPooling | None = None
    """Tokens with a result, for the tasks of tokens: all (ALL), or those with `step_tag_id` (STEP).
    Default: the model's."""
    use_activation: bool | None = None
    """True to normalize vectors and to turn scores into probabilities where a request does not say;
    default: the model's."""
    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """Number of a vector's first numbers, where a request names none (Matryoshka embeddings)."""
    step_tag_id: Annotated[int, Meta(ge=0)] | None = None
    """Token whose scores are returned, where a request names none (STEP)."""
    returned_token_ids: list[Annotated[int, Meta(ge=0)]] | None = None
    """Indices of the classes that are returned, where a request names none."""

    @property
    def of_text(self) -> SequencePooling | None:
        """Pooling of whole texts; None: the model's."""
        kind = self.pooling_type
        return self.seq_pooling_type if kind is None or kind == "ALL" or kind == "STEP" else kind

    @property
    def of_tokens(self) -> TokenPooling | None:
        """Pooling of the tasks of tokens; None: the model's."""
        kind = self.pooling_type
        return kind if kind == "ALL" or kind == "STEP" else self.tok_pooling_type

    def check(self) -> None:
        """Raise ConfigError if the settings contradict each other."""
        for name in ("seq_pooling_type", "tok_pooling_type"):
            given = getattr(self, name)
            meant = self.of_text if name == "seq_pooling_type" else self.of_tokens
            if given is not None and given != meant:
                raise ConfigError(
                    f"pooler_config: pooling_type={self.pooling_type} and {name}={given} "
                    "contradict each other; give one of them."
                )
        if self.of_tokens == "STEP" and self.step_tag_id is None:
            raise ConfigError(
                "pooler_config: tok_pooling_type=STEP needs step_tag_id, the token at the end of "
                "each step."
            )
