"""Parameters of one request to a pooling model: vLLM's `PoolingParams`."""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, TypeAlias, get_args

import msgspec

from octavo.errors import RequestError, UnsupportedError
from octavo.sampling_params import RequestOutputKind, SamplingParams

PoolingTask: TypeAlias = Literal["embed", "classify", "token_embed", "token_classify"]
"""Result of a text. embed: one vector. classify: scores of classes. token_embed and token_classify:
the same for each token."""
POOLING_TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)
_TASK_ALIASES: dict[str, PoolingTask] = {"score": "classify", "encode": "token_embed"}
_ACTIVATION_ALIASES = ("normalize", "activation", "softmax")


class PoolingParams(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Parameters of a request that returns vectors or scores. Names are vLLM's.

    Raises:
        RequestError: a field is wrong; `param` is its name, and the message begins with it.
        UnsupportedError: a field of vLLM is not supported; the message names an alternative.
    """

    truncate_prompt_tokens: int | None = None
    """Number of the prompt's tokens to keep; -1: as many as the model takes; None: all."""
    truncation_side: Literal["left", "right"] = "right"
    """Side at which tokens are dropped."""
    windows: bool = False
    """True to compute a text that is longer than the model's context in parts, and to return the
    mean of their vectors, weighted by their tokens."""
    dimensions: int | None = None
    """Number of the vector's first numbers to return (Matryoshka embeddings); None: all."""
    use_activation: bool | None = None
    """True to normalize vectors, or to turn scores into probabilities; None: as the model says."""
    normalize: bool | None = None
    """Older name of `use_activation`."""
    activation: bool | None = None
    """Older name of `use_activation`."""
    softmax: bool | None = None
    """Older name of `use_activation`."""
    task: str | None = None
    """One of `PoolingTask`; None: the method's, or the model's first one."""
    prompt_name: str | None = None
    """Prompt of the model that is put before the text, such as query; "": none; None: the model's
    default, mostly none. A task of jina-embeddings-v3 also has an adapter (docs/lora.md)."""
    bare: bool = False
    """True for the hidden states of the tokens without the Dense layers of the model, with the task
    token_embed. It is not in vLLM."""
    step_tag_id: int | None = None
    """Return the scores of the tokens with this id only; for reward models of steps."""
    returned_token_ids: list[int] | None = None
    """Return only these classes, by their indices."""
    skip_reading_prefix_cache: bool | None = None
    """True to compute the whole prompt again; the result is the same."""
    requires_token_ids: bool = False
    """Ignored: outputs always have the token ids."""
    extra_kwargs: dict[str, object] | None = None
    """Unsupported."""
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY
    """Ignored: there is one output."""

    def __post_init__(self) -> None:
        for name in ("dimensions", "truncate_prompt_tokens", "step_tag_id"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise RequestError(f"{name}={value!r} is not an integer.", name)
        if self.dimensions is not None and self.dimensions < 1:
            raise RequestError(f"dimensions={self.dimensions} must be at least 1.", "dimensions")
        keep = self.truncate_prompt_tokens
        if keep is not None and keep < 1 and keep != -1:
            raise RequestError(
                f"truncate_prompt_tokens={keep} must be at least 1, or -1 for the model's limit.",
                "truncate_prompt_tokens",
            )
        if not isinstance(self.prompt_name, str | None):
            raise RequestError(f"prompt_name={self.prompt_name!r} is not a text.", "prompt_name")
        if type(self.windows) is not bool:
            raise RequestError(f"windows={self.windows!r} is not true or false.", "windows")
        if self.windows and keep is not None:
            raise RequestError(
                f"windows and truncate_prompt_tokens={keep} contradict; leave one of them out.",
                "windows",
            )
        if self.truncation_side not in ("left", "right"):
            raise RequestError(
                f"truncation_side={self.truncation_side!r} must be left or right.",
                "truncation_side",
            )
        for name in _ACTIVATION_ALIASES:
            value = getattr(self, name)
            if value is None:
                continue
            if self.use_activation not in (None, value):
                raise RequestError(
                    f"{name}={value} contradicts use_activation={self.use_activation}; set one.",
                    name,
                )
            self.use_activation = value
            setattr(self, name, None)
        if self.task is not None:
            self.task = _TASK_ALIASES.get(self.task, self.task)
            if self.task not in POOLING_TASKS:
                raise RequestError(
                    f"task={self.task!r} must be one of {', '.join(POOLING_TASKS)}.", "task"
                )
        ids = self.returned_token_ids
        if ids is not None and not (
            isinstance(ids, list) and ids and all(type(i) is int and i >= 0 for i in ids)
        ):
            raise RequestError(
                f"returned_token_ids={ids!r} must be a list of indices of classes.",
                "returned_token_ids",
            )
        if self.extra_kwargs:
            raise UnsupportedError("extra_kwargs is not supported; leave it out.", "extra_kwargs")

    def clone(self) -> PoolingParams:
        """Return a copy."""
        return msgspec.structs.replace(self)

    def as_sampling_params(self) -> SamplingParams:
        """Return the parameters with which the request passes through the engine.

        Other requests share them: do not change them.
        """
        return _passed(self.truncate_prompt_tokens, self.truncation_side)


@lru_cache(maxsize=64)
def _passed(
    truncate_prompt_tokens: int | None, truncation_side: Literal["left", "right"]
) -> SamplingParams:
    return SamplingParams(
        max_tokens=1,
        detokenize=False,
        truncate_prompt_tokens=truncate_prompt_tokens,
        truncation_side=truncation_side,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
