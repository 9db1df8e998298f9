"""Embeddings as prompts from clients: files of tensors, in base64."""

from __future__ import annotations

from octavo.frontend.prompt_embeds import NAME, check_form
from octavo.media import tensor_file
from octavo.messages import PromptEmbeds, TensorData


def decode_embeds(text: str) -> PromptEmbeds:
    """Return the embeddings of a tensor from a client, in base64.

    Raises:
        RequestError: the text is something else.
    """
    return _embeds(tensor_file.decode_tensor(text, NAME))


def read_tensor_file(data: bytes) -> PromptEmbeds:
    """Return the embeddings in the bytes of a file; see `tensor_file.read_tensor`.

    Raises:
        RequestError: the file is something else.
    """
    return _embeds(tensor_file.read_tensor(data, NAME))


def _embeds(tensor: TensorData) -> PromptEmbeds:
    dtype, size = check_form(tensor.shape, tensor.dtype)
    return PromptEmbeds(tensor.data, dtype, size)
