"""Embeddings as prompts: conversion of a caller's tensor for the engine core.

This module does not import torch: a caller with a torch tensor has imported it.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from octavo.errors import ContextLengthError, RequestError
from octavo.messages import EMBEDS_DTYPES, EmbedsDtype, PromptEmbeds, TensorData
from octavo.system.finite import is_finite

NAME = "prompt_embeds"
PROMPT_EMBEDS_OFF = (
    "prompt_embeds is not accepted here; start the engine with --enable-prompt-embeds "
    "(enable_prompt_embeds=True), or give the prompt as text or token ids."
)


def read_tensor(tensor: Any) -> PromptEmbeds:
    """Return the embeddings in a torch tensor or a numpy array of floating-point numbers.

    Args:
        tensor: [tokens, size], or [1, tokens, size].

    Raises:
        RequestError: the object is something else.
    """
    if isinstance(tensor, PromptEmbeds):
        return tensor
    found = to_tensor(tensor, NAME)
    dtype, size = check_form(found.shape, found.dtype)
    return PromptEmbeds(found.data, dtype, size)


def is_torch(value: object) -> bool:
    """Return True if a value is a tensor of torch."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "layout")


def to_tensor(tensor: Any, name: str) -> TensorData:
    """Return a torch tensor or a numpy array of numbers as data.

    Args:
        tensor: the tensor, of any shape.
        name: its field, for errors.

    Raises:
        RequestError: the object is something else.
    """
    if isinstance(tensor, np.ndarray):
        array = np.asarray(tensor, tensor.dtype.newbyteorder("<"))
        return TensorData(str(tensor.dtype.name), tensor.shape, array.tobytes())
    if not is_torch(tensor):
        raise RequestError(
            f"{name} is of type {type(tensor).__name__}; give a torch tensor or a numpy array, or "
            "over HTTP a file of torch.save or numpy.save in base64.",
            name,
        )
    if str(tensor.layout) != "torch.strided":
        raise RequestError(f"{name} is a tensor of layout {tensor.layout}; call to_dense().", name)
    torch = sys.modules["torch"]
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorData(dtype, tuple(tensor.shape), flat.numpy().tobytes())


def check_form(shape: tuple[int, ...], dtype: str) -> tuple[EmbedsDtype, int]:
    """Return the type of a tensor's numbers, and the size of an embedding.

    Args:
        shape: shape of the tensor.
        dtype: name of its type.

    Raises:
        RequestError: the tensor does not hold embeddings.
    """
    if dtype not in EMBEDS_DTYPES:
        raise RequestError(
            f"{NAME} holds numbers of type {dtype}; it must be one of {', '.join(EMBEDS_DTYPES)}.",
            NAME,
        )
    if len(shape) != (3 if len(shape) == 3 and shape[0] == 1 else 2):
        raise RequestError(
            f"{NAME} has the shape {list(shape)[:8]}; it must be [tokens, hidden size].", NAME
        )
    if not shape[-1]:
        raise RequestError(f"{NAME} holds embeddings without numbers.", NAME)
    return dtype, shape[-1]


def check_embeds(embeds: PromptEmbeds, size: int, max_model_len: int) -> None:
    """Reject embeddings that a model does not accept.

    Args:
        embeds: embeddings of the prompt.
        size: size of the model's embeddings.
        max_model_len: maximum tokens of prompt and answer together.

    Raises:
        RequestError: the embeddings are wrong; the message has the reason.
    """
    if embeds.size != size:
        raise RequestError(
            f"{NAME} holds embeddings of {embeds.size} numbers; this model's have {size}.", NAME
        )
    if embeds.num_tokens >= max_model_len:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens; {NAME} has "
            f"{embeds.num_tokens}, which leaves no room for an answer. Shorten it.",
            NAME,
        )
    if not is_finite(embeds.data, embeds.dtype):
        raise RequestError(f"{NAME} holds numbers that are not finite (NaN, infinity).", NAME)
