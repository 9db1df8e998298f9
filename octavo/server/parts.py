"""New parts of a choice, which a writer turns into JSON."""

from __future__ import annotations

import msgspec

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.parsers.parts import Part


class Delta(msgspec.Struct, gc=False):
    """New parts of one choice; without streaming, all its parts."""

    index: int
    """Number of the choice in the answer."""
    prompt: int
    """Number of the prompt in the request."""
    parts: list[Part]
    completion: CompletionOutput
    """Tokens, logprobs, finish and stop reason of the choice. Its text is in `parts`."""
    output: RequestOutput
    """Output that contains `completion`, with data about the prompt."""


def fold(parts: list[Part]) -> dict[type[Part], str]:
    """Return the joined text of each kind of part."""
    texts: dict[type[Part], list[str]] = {}
    for part in parts:
        texts.setdefault(type(part), []).append(part.text)
    return {
        kind: pieces[0] if len(pieces) == 1 else "".join(pieces) for kind, pieces in texts.items()
    }
