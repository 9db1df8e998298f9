from __future__ import annotations

import pytest

from octavo import SamplingParams
from octavo.outputs import CompletionOutput, RequestOutput

pytest.importorskip("triton", reason="the package triton is not installed")

from gpu.engines import generate


class Failing:
    """Engine with requests that end early."""

    def __init__(self, *answers: CompletionOutput) -> None:
        self.answers = answers

    def generate(self, prompts, params, *, use_tqdm):
        return [
            RequestOutput(str(i), None, [], None, [a], True) for i, a in enumerate(self.answers)
        ]


def test_a_failed_request_is_no_figure() -> None:
    params = SamplingParams(max_tokens=2)
    good = CompletionOutput(0, "", [5, 6], finish_reason="length")
    assert generate(Failing(good), [[3]], params) == [good]
    for bad in (
        CompletionOutput(0, "", [], finish_reason="error", stop_reason="CUDA is gone"),
        CompletionOutput(0, "", [5], finish_reason="length"),
        CompletionOutput(0, "", [5, 6], finish_reason="stop"),
    ):
        with pytest.raises(RuntimeError, match=rf"of 2 tokens: {bad.finish_reason}"):
            generate(Failing(good, bad), [[3], [4]], [params, params])
