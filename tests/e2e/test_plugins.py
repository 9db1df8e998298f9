"""Other packages' processors with device=cuda, on tensors that only claim to be there."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tests.e2e.test_fake_gpu import GREEDY, PLAIN, ids, run
from tests.e2e.test_triton import folder
from tests.fake_gpu import FakeGpu
from tests.plugins import NO_REPEAT, install
from tests.triton import needs_triton

pytestmark = needs_triton


@pytest.mark.parametrize("blocks", [40, 7])
def test_a_logits_processor(blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few blocks, requests are preempted and start over."""
    install(tmp_path, monkeypatch, NO_REPEAT, "NoRepeat", "no_repeat")
    (tmp_path / "model").mkdir()
    model = folder("llama", tmp_path / "model")
    asking = [
        msgspec.structs.replace(each, max_tokens=8, extra_args={"no_repeat": count})
        for each, count in ((PLAIN, 1), (GREEDY, 5))
    ]
    params = [*asking, GREEDY]
    expected = ids(run(model, params, device="cpu"))
    assert all(len(set(expected[1][i : i + 6])) == 6 for i in range(3))
    gpu = FakeGpu(monkeypatch)
    settings = {"num_gpu_blocks_override": blocks, "max_model_len": 40}
    assert ids(run(model, params, gpu, device="cuda", **settings)) == expected
