"""Models of sounds and texts: a death in the encoder, and a prefill elsewhere, change no bit."""

import pytest

from tests.e2e.test_pictures import connected
from tests.e2e.test_sounds import answers, prompts
from tests.handover import hand_over
from tests.pictures import make_llm
from tests.revival import DyingEncoder
from tests.sounds import params, save_model


@pytest.mark.parametrize("name", ["gemma4 wide", "qwen2_audio", "qwen3_asr", "voxtral"])
def test_layouts(name, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "dying").mkdir()
    save_model(name, folder)
    given = prompts(name)
    with make_llm(folder, enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = answers(llm, given, 8)
    dying = DyingEncoder(tmp_path / "dying", monkeypatch)
    with make_llm(folder, **dying.settings) as llm:
        assert answers(llm, given[1:2], 8) == alone[1:2]
        with dying.once(llm):
            assert answers(llm, given, 8) == alone
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = {"kv_transfer_config": connected("P2PConnector")}
    with make_llm(folder, **config) as one, make_llm(folder, **config) as two:
        found = hand_over(one, two, given, params, 8)
        assert two.stats().mm_cache_queries < one.stats().mm_cache_queries
    assert found == alone
