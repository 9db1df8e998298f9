"""Kill the process of an engine in the middle of an answer, or of an encoder's run."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

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
import importlib.util, os, signal, sys

MODULE = "octavo.models.encoder"

class Finder:
    """Finder that changes the module of encoders when a process imports it."""

    def find_spec(self, name, path=None, target=None):
        if name != MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), change(module.EncoderModel))
        return spec

def change(model):
    """Let the process die between the first and the last layer of an encoder, once; or before the
    projection of one that has no layers."""
    compute, project = model.layer, model.end

    def die():
        try:
            os.rename(os.environ["DYING"], os.environ["DYING"] + "-died")
        except FileNotFoundError:
            pass  # not wanted, or another rank dies
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def layer(self, layer, *args):
        if 0 < layer == len(self.spec.layers) - 1:
            die()
        return compute(self, layer, *args)

    def end(self, *args):
        if not self.spec.layers:
            die()
        return project(self, *args)

    model.layer, model.end = layer, end

sys.meta_path.insert(0, Finder())
'''
"""Module that each Python process with its folder in PYTHONPATH runs when it starts."""


class DyingEncoder:
    """Engine setting by which a process dies in the middle of an encoder's run.

    The process kills itself when it has computed all layers but the last one of some items. Of
    several ranks, the first one that gets there dies.

    Args:
        folder: an empty folder.
        monkeypatch: changes the environment of processes.
    """

    settings: ClassVar[dict[str, Any]] = {"isolate": True}

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (folder / "sitecustomize.py").write_text(_DYING)
        self._sign, self._died = folder / "die", folder / "die-died"
        monkeypatch.setenv("DYING", str(self._sign))
        monkeypatch.setenv("PYTHONPATH", str(folder))

    @contextlib.contextmanager
    def once(self, llm: LLM) -> Iterator[None]:
        """Let the next run of an encoder in the context die; check that it did."""
        (first,) = llm.llm_engine.client.pids
        self._sign.touch()
        yield
        assert self._died.exists(), "no process has died in an encoder's run"
        assert llm.llm_engine.client.pids != [first]
        self._died.unlink()
