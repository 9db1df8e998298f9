"""Processors of other packages with device=cuda, on tensors that only claim to be on a GPU."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from octavo import LLM
from tests.e2e.test_fake_gpu import GREEDY, PLAIN, SMALL, generate, ids, run
from tests.e2e.test_triton import folder
from tests.fake_gpu import FakeGpu
from tests.plugins import NO_REPEAT, install
from tests.triton import needs_triton

pytestmark = needs_triton


def test_a_logits_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of blocks is too small, so requests are preempted and start again."""
    install(tmp_path, monkeypatch, NO_REPEAT, "NoRepeat", "no_repeat")
    (tmp_path / "model").mkdir()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    model = folder("llama", tmp_path / "model", **sizes)
    asking = [
        msgspec.structs.replace(each, max_tokens=8, extra_args={"no_repeat": count})
        for each, count in ((PLAIN, 1), (GREEDY, 5))
    ]
    params = [*asking, GREEDY]
    expected = ids(run(model, params, device="cpu"))
    assert all(len(set(expected[1][i : i + 6])) == 6 for i in range(3))
    gpu = FakeGpu(monkeypatch)
    settings = SMALL | {"num_gpu_blocks_override": 7, "max_model_len": 40}
    with LLM(model=model, dtype="float32", device="cuda", **settings) as llm:
        assert ids(generate(llm, params, gpu)) == expected
        assert llm.stats().num_preemptions > 0
