"""Each model of pictures that test_pictures.py leaves out of its layouts: the same bits in chunks
over two ranks with few blocks, after a prefill elsewhere, and after a death in its encoder."""

import pytest

from tests.e2e.test_pictures import answers, connected, prompts
from tests.handover import hand_over
from tests.pictures import make_llm, params, save_model
from tests.revival import DyingEncoder

OTHERS = ["llava", "llava_next", "qwen2_vl", "qwen3_vl_moe", "qwen3_5", "gemma4_e"]
OTHERS += ["idefics3", "mistral3", "internvl"]


@pytest.mark.parametrize("name", OTHERS)
def test_layouts(name, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    save_model(name, folder)
    given = prompts(name)
    alone = []
    with make_llm(folder, enable_prefix_caching=False, max_num_seqs=1) as llm:
        for one in given:
            alone += answers(llm, one, 8)
            llm.reset_prefix_cache()
    (tmp_path / "dying").mkdir()
    dying = DyingEncoder(tmp_path / "dying", monkeypatch)
    with make_llm(folder, **dying.settings) as llm:
        assert answers(llm, given[1:2], 8) == alone[1:2]
        with dying.once(llm):
            assert answers(llm, given, 8) == alone
    most = max(len(ids) + len(tokens) for ids, tokens, _ in alone) // 16 + 2
    extra = 10 if name == "gemma4_e" else 2  # windows have block tables of their own
    settings = {"max_num_batched_tokens": 23, "max_model_len": 16 * most}
    settings |= {
        "num_gpu_blocks_override": most + extra,
        "tensor_parallel_size": 2,
        "num_threads": 1,
    }
    with make_llm(folder, **settings) as llm:
        assert answers(llm, given * 2, 8) == alone * 2
        assert llm.stats().num_preemptions > 0
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = {"kv_transfer_config": connected("P2PConnector")}
    with make_llm(folder, **config) as one, make_llm(folder, **config) as two:
        found = hand_over(one, two, given, params, 8)
    assert found == alone
