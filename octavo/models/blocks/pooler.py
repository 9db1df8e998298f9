"""Specification of a pooler: from the hidden states of a text to a vector or to scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from octavo.models.blocks.linear import LinearSpec
from octavo.models.blocks.norm import NormSpec
from octavo.models.weights import Names, Weight

if TYPE_CHECKING:
    from octavo.layers.pooler import Pooler
    from octavo.models.blocks.base import Parts

Pooling = Literal["cls", "last", "mean", "max", "sum", "weighted_mean", "mean_sqrt_len", "all"]
"""Way from the hidden states of a text to one vector, as sentence-transformers names it.

cls: the first token's. last: the last token's. mean, max, sum: over all tokens, for each number.
weighted_mean: the mean with the weight p + 1 at position p (Muennighoff, "SGPT", arXiv
2202.08904). mean_sqrt_len: the sum, divided by the square root of the number of tokens. all: no
pooling, each token has a result."""
SparseActivation = Literal["log1p_relu", "log1p_log1p_relu"]
"""Function of the logits of a sparse encoder. log1p_relu: log(1 + max(x, 0)) (SPLADE).
log1p_log1p_relu: log(1 + log(1 + max(x, 0)))."""
DenseActivation = Literal["none", "tanh", "relu", "gelu", "sigmoid", "silu", "margin"]
"""Function of a layer's result. margin: of two numbers, the second minus the first."""
FinalActivation = Literal["none", "normalize", "softmax", "sigmoid", "relu"]
Similarity = Literal["cosine", "dot", "euclidean", "manhattan", "max_sim"]
"""Function that compares two texts. max_sim: of the vectors of their tokens (ColBERT)."""


@dataclass(frozen=True)
class DenseSpec:
    """Layer of a pooler: norm(activation(linear(x)))."""

    linear: LinearSpec | None
    """None: the input as it is."""
    activation: DenseActivation | SparseActivation = "none"
    norm: NormSpec | None = None


@dataclass(frozen=True)
class RoleSpec:
    """Way to read the texts of one side of a pair, for late interaction (ColBERT)."""

    name: str
    """query or document; a request names it as `prompt_name`."""
    marker: int | None
    """Token that is put after a text's first one; None: none is."""
    max_tokens: int
    """Number of tokens to which a text is cut, with the special ones and the marker."""
    mask: int | None = None
    """Token with which shorter texts are filled; None: they are not."""
    skipped: tuple[int, ...] = ()
    """Tokens that have no vector."""


@dataclass(frozen=True)
class PoolerSpec:
    """Result of a text for one task."""

    task: str
    """One of `PoolingTask`."""
    pooling: tuple[Pooling, ...]
    """Ways of pooling; the vectors of several are joined."""
    size: int
    """Number of numbers of the result, or of each token's."""
    dense: tuple[DenseSpec, ...] = ()
    """Layers after the pooling."""
    activation: FinalActivation = "none"
    """Last function. normalize: divide a vector by its length."""
    labels: tuple[str, ...] = ()
    """Names of the classes."""
    activates: bool = True
    """True if `activation` is applied where a request does not say."""
    token_dense: tuple[DenseSpec, ...] = ()
    """Layers of each token before the pooling (EuroBERT, SPLADE)."""
    dimensions: tuple[int, ...] | None = None
    """Numbers of first numbers to which a vector may be cut (Kusupati et al., "Matryoshka
    Representation Learning", arXiv 2205.13147). Empty: any number. None: it cannot be cut."""
    cut: int | None = None
    """Number of first numbers where a request names none; None: all."""
    step_tag_id: int | None = None
    """Token whose results are returned where a request names none; None: those of all tokens."""
    returned_token_ids: tuple[int, ...] | None = None
    """Classes that are returned where a request names none; None: all."""
    edges: tuple[int | None, int | None] = (None, None)
    """Tokens that have no result where a text begins with the first one, or ends with the second
    one (BGE-M3); None: the token at this end has one."""
    sparse: bool = False
    """True if the numbers are weights of the vocabulary, most of them 0: one for each entry of it
    (SPLADE), or one for each token of the text (BGE-M3)."""
    weightless: tuple[int, ...] = ()
    """Tokens that have no weight in a sparse vector, wherever they are."""
    roles: tuple[RoleSpec, ...] = ()
    """Roles of texts, of a late-interaction model whose files describe them."""

    @property
    def reads_all(self) -> bool:
        """True if the pooling reads more tokens than the last one."""
        return self.pooling != ("last",)

    def role(self, name: str | None) -> RoleSpec | None:
        """Return the role of a name; None: no role has this name."""
        return next((role for role in self.roles if role.name == name), None)

    def refusal(self, dimensions: int) -> str | None:
        """Return the reason why a vector cannot be cut to a number of numbers; None: it can."""
        if dimensions == self.size:
            return None
        if self.dimensions is None:
            return (
                f"this model was not trained for shorter vectors; leave it out, or use {self.size}."
            )
        if dimensions > self.size or (self.dimensions and dimensions not in self.dimensions):
            known = ", ".join(map(str, self.dimensions)) or f"1 to {self.size}"
            return f"this model's vectors have {self.size} numbers; choose one of: {known}."
        return None

    def weights(self, names: Names) -> Iterator[Weight]:
        """Yield the weights of the layers."""
        for i, dense in enumerate(self.token_dense + self.dense):
            if dense.linear is not None:
                yield from dense.linear.weights(names.of(f"{i}"))
            if dense.norm is not None:
                yield from dense.norm.weights(names.of(f"{i}.norm"))

    def build(self, parts: Parts) -> Pooler:
        """Return the live block."""
        from octavo.layers.pooler import Dense, Pooler

        layers = [
            Dense(
                None if dense.linear is None else dense.linear.build(parts.of(f"{i}")),
                dense.activation,
                None if dense.norm is None else dense.norm.build(parts.of(f"{i}").of("norm")),
            )
            for i, dense in enumerate(self.token_dense + self.dense)
        ]
        first = len(self.token_dense)
        return Pooler(
            *(parts.ops, parts.dtype, self.pooling, layers[first:], layers[:first]), parts.adapters
        )


@dataclass(frozen=True)
class SentencesSpec:
    """Use of a model of vectors, as its config_sentence_transformers.json describes it."""

    prompts: tuple[tuple[str, str], ...] = ()
    """Names of prompts, and the text of each, which is put before a text."""
    default_prompt_name: str | None = None
    """Prompt of a text for which none is named; None: no prompt."""
    tasks: tuple[str, ...] = ()
    """Names of prompts whose texts are computed with an adapter of the checkpoint; see
    `checkpoints/task_adapters.py`."""
    similarity_fn_name: Similarity = "cosine"
    """Function that compares two vectors."""


NO_SENTENCES = SentencesSpec()
