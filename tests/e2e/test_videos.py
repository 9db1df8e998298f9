"""Models that read videos: transformers' numbers, and the same bits in all layouts."""

import functools
import json

import pytest
import torch

from tests.pictures import make_llm, params, save_model
from tests.videos import FPS, VIDEO_CASES, frames, hf_video_logprobs

# Grids with fewer parts than rows or columns, where transformers and the paper of Qwen2-VL agree on
# the position of the text behind a video.
FIRST, SECOND = (frames(5, 40, 24), {"fps": FPS}), (frames(5, 40, 24, 1), {"fps": FPS})


def prompt(name, *videos, text="ab {} cd {} ef", image=None, **fields):
    words = [VIDEO_CASES[name].text] * len(videos)
    data = {"video": list(videos)}
    return {"prompt": text.format(*words), "multi_modal_data": data, **fields}


def prompts(name):
    return [
        prompt(name, FIRST, SECOND),
        {"prompt": "only a text of some length, which goes on for more than a block"},
        prompt(name, SECOND, text="{} quite another text"),
        prompt(name, FIRST, text="ab {} cd"),
    ]


def answers(llm, given, tokens=12):
    outputs = llm.generate(given, params(tokens), use_tqdm=False)
    return [(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.fixture(scope="module")
def make_saved(tmp_path_factory):
    """Return a function: case -> folder, transformers' model, and answers one after the other."""

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp(name)
        model = save_model(name, folder)
        if name.startswith("qwen"):
            limits = {"size": {"shortest_edge": 64, "longest_edge": 4096}}
            (folder / "video_preprocessor_config.json").write_text(json.dumps(limits))
        alone = []
        with make_llm(
            folder, max_model_len=500, enable_prefix_caching=False, max_num_seqs=1
        ) as llm:
            for one in prompts(name):
                alone += answers(llm, one)
                llm.reset_prefix_cache()
        return folder, model, alone

    return make


@pytest.mark.parametrize("name", VIDEO_CASES)
def test_parity(make_saved, name):
    folder, model, alone = make_saved(name)
    with make_llm(folder, max_model_len=500) as llm:
        for one, (ids, tokens, logprobs) in zip(prompts(name), alone, strict=True):
            videos = one.get("multi_modal_data", {}).get("video", [])
            if not videos:
                continue
            expected = hf_video_logprobs(model, name, llm, [*ids, *tokens], videos)
            best = expected[len(ids) - 1 : -1, :256].max(-1).values
            found = [row[token].logprob for row, token in zip(logprobs, tokens, strict=True)]
            torch.testing.assert_close(torch.tensor(found), best, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava_onevision"])
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 13, "enforce_eager": True}])
def test_layouts(make_saved, name, settings):
    folder, _, alone = make_saved(name)
    with make_llm(folder, max_model_len=500, **settings) as llm:
        assert answers(llm, prompts(name) * 2) == alone * 2
        assert answers(llm, prompts(name)[::-1]) == alone[::-1]
        assert llm.stats().prefix_cache_hits > 0
