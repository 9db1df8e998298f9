"""Packages with logits processors, as the engine finds installed ones."""

import importlib

NO_REPEAT = """
import math
from collections import deque

from octavo.sampling.logits_processors.base import LogitsProcessor


class NoRepeat(LogitsProcessor):
    "Excludes the last `no_repeat` generated tokens."

    extra_args = frozenset({"no_repeat"})
    needs_tokens = True

    def __init__(self, max_num_rows, vocab_size):
        super().__init__(max_num_rows, vocab_size)
        self.last = {}

    def add_row(self, new):
        count = new.params.extra_args["no_repeat"]
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"no_repeat={count!r} is no positive integer")
        self.last[new.row] = deque(new.output_token_ids, maxlen=count)
        return True

    def remove_row(self, row):
        self.last.pop(row, None)

    def append(self, rows, tokens):
        for row, token in zip(rows.tolist(), tokens.tolist()):
            self.last[row].append(token)

    def apply(self, ops, logits, step):
        for at, row in zip(step.at.tolist(), step.rows.tolist()):
            logits[at, list(self.last[row])] = -math.inf
"""


def install(folder, monkeypatch, source, kind, name="toy"):
    """Put a package of one module with one entry point on the path, for one test.

    Modules stay imported, so a test with another source must use another name.
    """
    (folder / f"{name}.py").write_text(source)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[octavo.logits_processors]\n{name}_point = {name}:{kind}\n"
    )
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
