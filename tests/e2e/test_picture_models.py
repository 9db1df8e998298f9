"""Each model of pictures: the same bits in chunks with few blocks, and after a death in the
encoder; over two ranks; and after a prefill elsewhere."""

import pytest

from tests.e2e.test_pictures import answers, budget, connected, prompts
from tests.e2e.test_videos import prompt as video_prompt
from tests.handover import hand_over
from tests.pictures import CASES, MORE_CASES, make_llm, params, save_model
from tests.revival import DyingEncoder
from tests.videos import FPS, VIDEO_CASES, frames

TOKENS = 20


OTHERS = ("paligemma1", "gemma4_unified")
"""A shape of PaliGemma, and a model with tests of its own (tests/e2e/test_gemma4_unified.py)."""


@pytest.mark.parametrize("name", [name for name in CASES | MORE_CASES if name not in OTHERS])
def test_layouts(name, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    save_model(name, folder)
    given, alone = prompts(name), []
    if name in VIDEO_CASES:
        count = VIDEO_CASES[name].num_frames
        given.append(video_prompt(name, (frames(5, 40, 24)[:count], {"fps": FPS}), text="{} ef"))
    with make_llm(folder, enable_prefix_caching=False, max_num_seqs=1) as llm:
        for one in given:
            alone += answers(llm, one, TOKENS)
            llm.reset_prefix_cache()
    (tmp_path / "dying").mkdir()
    dying = DyingEncoder(tmp_path / "dying", monkeypatch)
    most = max(len(ids) + len(tokens) for ids, tokens, _ in alone) // 16 + 2
    blocks, tokens = most + 1, budget(name, 23)
    if "gemma" in name:  # layers with windows have block tables of their own
        blocks += (1 if name == "paligemma" else 2) * (tokens // 16 + 4)
    settings = {"max_num_batched_tokens": tokens, "max_model_len": 16 * most}
    settings |= {"num_gpu_blocks_override": blocks}
    with make_llm(folder, **settings, **dying.settings) as llm:
        with dying.once(llm):
            assert answers(llm, given * 2, TOKENS) == alone * 2
        assert llm.stats().num_preemptions > 0
    with make_llm(folder, tensor_parallel_size=2, num_threads=1) as llm:
        assert answers(llm, given, TOKENS) == alone
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = {"kv_transfer_config": connected("P2PConnector")}
    with make_llm(folder, **config) as one, make_llm(folder, **config) as two:
        found = hand_over(one, two, given, params, TOKENS)
    assert found == alone
