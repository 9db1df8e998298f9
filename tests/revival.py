"""Kill the process of an engine in the middle of an answer."""

from __future__ import annotations

import os
import signal
from typing import Any

from octavo import LLM, SamplingParams
from octavo.outputs import RequestOutput


def assert_revived(llm: LLM, prompt: Any, params: SamplingParams) -> None:
    """Check that the engine of `llm` is replaced after a death, and that its answers stay the same.

    The dead engine may have sent its last token before the kill. So a further request follows,
    which only a replacement can answer.
    """
    engine = llm.llm_engine
    (first,) = engine.client.pids
    found = []
    for number, kill in enumerate((False, True, False)):
        engine.add_request(str(number), prompt, params)
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
