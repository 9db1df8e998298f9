"""Kill the process of an engine in the middle of an answer, or of an encoder's run."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.outputs import RequestOutput


def assert_revived(
    llm: LLM,
    prompt: Any,
    params: SamplingParams,
    of_request: Callable[[], SamplingParams] | None = None,
) -> None:
    """Check that the engine of `llm` is replaced after a death, and that its answers stay the same.

    The dead engine may have sent its last token before the kill. So a further request follows,
    which only a replacement can answer.

    Args:
        llm: an engine in a process of its own.
        prompt: any prompt.
        params: parameters of the requests.
        of_request: returns `params` with more for one request.
    """
    engine = llm.llm_engine
    (first,) = engine.client.pids
    found = []
    for number, kill in enumerate((False, True, False)):
        engine.add_request(str(number), prompt, of_request() if of_request else params)
        tokens: tuple[int, ...] = ()
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert isinstance(output, RequestOutput)
                tokens = tuple(output.outputs[0].token_ids)
            if kill and len(tokens) > 3:
                os.kill(first, signal.SIGKILL)
                kill = False
        assert not kill
        found.append(tokens)
    assert found == [found[0]] * 3
    assert len(found[0]) == params.max_tokens
    assert engine.client.pids != [first]


_DYING = '''
import os, signal
from octavo.models.encoder import EncoderModel
from octavo.sampling.logits_processors.base import LogitsProcessor

class Dying(LogitsProcessor):
    """Processor that changes no logits. Its process dies after the layers of an encoder, once."""

    def __init__(self, *args):
        super().__init__(*args)
        compute = EncoderModel.end

        def die(self, *args):
            if os.path.exists(os.environ["DYING"]):
                os.unlink(os.environ["DYING"])
                os.kill(os.getpid(), signal.SIGKILL)
            return compute(self, *args)

        EncoderModel.end = die

    def add_row(self, new):
        return False

    def apply(self, ops, logits, step):
        raise NotImplementedError
'''


class DyingEncoder:
    """Engine setting by which the process dies in the middle of an encoder's run.

    Args:
        folder: an empty folder.
        monkeypatch: changes the environment of processes.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "dying.py").write_text(_DYING)
        self._sign = folder / "die"
        monkeypatch.setenv("DYING", str(self._sign))
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("PYTHONPATH", str(folder))
        self.settings = {"isolate": True, "logits_processors": ["dying:Dying"]}

    @contextlib.contextmanager
    def once(self, llm: LLM) -> Iterator[None]:
        """Let the next run of an encoder in the context die; check that it did."""
        (first,) = llm.llm_engine.client.pids
        self._sign.touch()
        yield
        assert not self._sign.exists()
        assert llm.llm_engine.client.pids != [first]
