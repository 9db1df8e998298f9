"""Models of sounds and texts: the same bits in chunks with few blocks, and after a death in the
encoder; over two ranks; and after a prefill elsewhere."""

import pytest

from tests.e2e.test_pictures import connected
from tests.e2e.test_sounds import answers, prompts
from tests.handover import hand_over
from tests.pictures import make_llm
from tests.revival import DyingEncoder
from tests.sounds import params, save_model


@pytest.mark.parametrize("name", ["gemma4", "phi4", "qwen2_audio", "qwen3_asr", "voxtral"])
def test_layouts(name, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "dying").mkdir()
    save_model(name, folder)
    given = prompts(name)
    with make_llm(folder, enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = answers(llm, given)
    dying = DyingEncoder(tmp_path / "dying", monkeypatch)
    most = max(len(ids) + len(tokens) for ids, tokens, _ in alone) // 16 + 2
    groups = 2 if name == "gemma4" else 1  # of layers with own blocks
    settings = {"max_num_batched_tokens": 23, "max_model_len": 16 * most}
    settings |= {"num_gpu_blocks_override": groups * most + 2}
    with make_llm(folder, **settings, **dying.settings) as llm:
        with dying.once(llm):
            assert answers(llm, given * 2) == alone * 2
        assert llm.stats().num_preemptions > 0
    with make_llm(folder, tensor_parallel_size=2, num_threads=1) as llm:
        assert answers(llm, given) == alone
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = {"kv_transfer_config": connected("P2PConnector")}
    with make_llm(folder, **config) as one, make_llm(folder, **config) as two:
        found = hand_over(one, two, given, params, 30)
        assert two.stats().mm_cache_queries < one.stats().mm_cache_queries
    assert found == alone
