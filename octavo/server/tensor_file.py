"""Tensors of embeddings from clients: files of `torch.save`, in base64."""

from __future__ import annotations

import binascii
from collections.abc import Iterator

import numpy as np

from octavo.checkpoints.torch_file import FileTensor, TorchFileError, read_torch_file
from octavo.errors import RequestError
from octavo.frontend.prompt_embeds import NAME, check_form
from octavo.messages import EMBEDS_DTYPES, PromptEmbeds

# The file of a tensor has eight.
_MAX_ENTRIES = 64
_MAX_PROGRAM_NBYTES = 4096
# Characters of base64 that are decoded in one call, which keeps the interpreter's lock.
_PIECE = 2**20


def decode_embeds(text: str) -> PromptEmbeds:
    """Return the embeddings of a tensor from a client: `torch.save`d, in base64.

    Raises:
        RequestError: the text is something else.
    """
    return read_tensor_file(b"".join(_decode(text)))


def read_tensor_file(data: bytes) -> PromptEmbeds:
    """Return the embeddings in the bytes of a file of `torch.save`.

    Raises:
        RequestError: the file is something else.
    """
    try:
        tensor = read_torch_file(
            memoryview(data), max_entries=_MAX_ENTRIES, max_program_nbytes=_MAX_PROGRAM_NBYTES
        )
        if not isinstance(tensor, FileTensor):
            raise TorchFileError("it holds a dictionary, not one tensor")
    except TorchFileError as error:
        raise RequestError(
            f"{NAME} is not a tensor saved with torch.save: {error}.", NAME
        ) from None
    dtype, size = check_form(tensor.shape, tensor.dtype)
    bits = f"u{EMBEDS_DTYPES[dtype]}"
    numbers: np.ndarray = np.ndarray(tensor.shape, bits, data, tensor.begin, tensor.strides)
    return PromptEmbeds(numbers.tobytes(), dtype, size)


def _decode(text: str) -> Iterator[bytes]:
    padding = text.find("=")
    if padding < 0 or padding >= len(text) - 2:
        try:
            for begin in range(0, len(text), _PIECE):
                yield binascii.a2b_base64(text[begin : begin + _PIECE], strict_mode=True)
            return
        except ValueError:
            pass
    raise RequestError(f"{NAME} is not valid base64.", NAME)
