"""Models that read videos: transformers' numbers, and the same bits in all layouts."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from octavo.checkpoints.registry import open_checkpoint
from octavo.config import ModelConfig
from octavo.errors import RequestError
from octavo.frontend.videos import Videos
from tests.e2e.test_pictures import connected
from tests.handover import hand_over
from tests.pictures import assert_greedy, make_llm, params, picture, save_model
from tests.videos import FPS, VIDEO_CASES, frames, hf_video_logprobs

# Grids with fewer parts than rows or columns, where transformers and the paper of Qwen2-VL agree on
# the position of the text behind a video.
PICTURE = picture(24, 24)
FIRST, SECOND = (frames(5, 40, 24), {"fps": FPS}), (frames(5, 40, 24, 1), {"fps": FPS})


def prompt(name, *videos, text="ab {} cd {} ef", **fields):
    words = [VIDEO_CASES[name].text] * len(videos)
    data = {"video": list(videos)}
    return {"prompt": text.format(*words), "multi_modal_data": data, **fields}


def prompts(name):
    count = VIDEO_CASES[name].num_frames
    first, second = ((pixels[:count], metadata) for pixels, metadata in (FIRST, SECOND))
    return [
        prompt(name, first, second),
        {"prompt": "only a text of some length, which goes on for more than a block"},
        prompt(name, second, text="{} quite another text"),
        prompt(name, first, text="ab {} cd"),
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
        for one, answer in zip(prompts(name), alone, strict=True):
            videos = one.get("multi_modal_data", {}).get("video", [])
            if not videos:
                continue
            ids, tokens, _ = answer
            expected = hf_video_logprobs(model, name, llm, [*ids, *tokens], videos)
            assert_greedy(answer, expected)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "llava_onevision", "gemma4_e"])
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 13, "enforce_eager": True}])
def test_layouts(make_saved, name, settings):
    folder, _, alone = make_saved(name)
    with make_llm(folder, max_model_len=500, **settings) as llm:
        assert answers(llm, prompts(name) * 2) == alone * 2
        assert answers(llm, prompts(name)[::-1]) == alone[::-1]
        assert llm.stats().prefix_cache_hits > 0


def test_prefill_elsewhere(make_saved, tmp_path, monkeypatch):
    """Blocks of two sizes and the embeddings per layer of placeholders: Gemma 4 E."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = "gemma4_e"
    folder, _, alone = make_saved(name)
    settings = {"max_model_len": 500, "kv_transfer_config": connected("P2PConnector")}
    with make_llm(folder, **settings) as one, make_llm(folder, **settings) as two:
        assert hand_over(one, two, prompts(name), params, 12) == alone
        assert two.stats().mm_cache_queries < one.stats().mm_cache_queries


def test_forms_of_a_video(make_saved):
    """A list of pictures, all frames of a file, and pictures beside videos."""
    folder, _, alone = make_saved("smolvlm")
    pixels, metadata = FIRST
    pictures = [Image.fromarray(image) for image in pixels]
    with make_llm(folder, max_model_len=500) as llm:
        for video in ((pictures, metadata), (list(pixels), metadata)):
            assert answers(llm, prompt("smolvlm", video, text="ab {} cd")) == alone[3:]
        (bare,) = answers(llm, prompt("smolvlm", pixels, text="ab {} cd"), 1)
        data = {"video": pictures}
        (same,) = answers(llm, {"prompt": "ab <video> cd", "multi_modal_data": data}, 1)
        assert bare == same
        both = {"prompt": "<video>a<image>", "multi_modal_data": data | {"image": [PICTURE]}}
        (first,) = answers(llm, both, 1)
        other = {"prompt": "<image>a<video>", "multi_modal_data": data | {"image": [PICTURE]}}
        (second,) = answers(llm, other, 1)
        assert sorted(first[0]) == sorted(second[0]) != first[0]
        fewer = prompt("smolvlm", FIRST, text="ab {} cd", mm_processor_kwargs={"num_frames": 2})
        assert len(answers(llm, fewer, 1)[0][0]) < len(alone[3][0])


def test_errors(make_saved):
    """A bad video harms only its own request."""
    folder, _, alone = make_saved("smolvlm")
    with make_llm(folder, max_model_len=500, limit_mm_per_prompt={"video": 1}) as llm:

        def refuse(message, *videos, **fields):
            text = "{}" * len(videos)
            with pytest.raises(RequestError, match=message):
                answers(llm, prompt("smolvlm", *videos, text=text, **fields))

        refuse("2 videos; at most 1 are allowed", FIRST, SECOND)
        refuse("video 1: it is a str", "file.mp4")
        refuse("video 1: it is an array float64", np.zeros((2, 2, 2, 3)))
        refuse("video 1: it is a ndarray uint8", np.zeros((2, 2), np.uint8))
        refuse(r"several sizes", [picture(9, 9), picture(9, 8)])
        refuse("its fps is 0", (FIRST[0], {"fps": 0}))
        refuse("its fps is 'x'", (FIRST[0], {"fps": "x"}))
        refuse("tuple of 1", (FIRST[0],))
        refuse("0 frames", np.zeros((0, 8, 8, 3), np.uint8))
        refuse("769 frames", np.zeros((769, 8, 8, 3), np.uint8))
        refuse("num_frames", FIRST, mm_processor_kwargs={"num_frames": "many"})
        refuse("colors is not allowed", FIRST, mm_processor_kwargs={"colors": 1})
        refuse("maximum context|model's context", np.zeros((40, 8, 8, 3), np.uint8))
        assert answers(llm, prompts("smolvlm")[1:]) == alone[1:]


def test_options_choose_frames(make_saved):
    folder, *_ = make_saved("smolvlm")
    with make_llm(folder, max_model_len=500, media_io_kwargs={"video": {"num_frames": 3}}) as llm:
        reader = llm.llm_engine.input_processor._media.readers["video"]
        assert len(reader.processor.choose(50, 0.1)) == 3
    with pytest.raises(RequestError, match=r"media_io_kwargs\.video\.size"):
        make_llm(folder, media_io_kwargs={"video": {"size": 3}})
    with make_llm(folder, limit_mm_per_prompt={"video": 0}) as llm:
        assert "video" not in llm.llm_engine.input_processor._media.readers


@pytest.mark.parametrize(
    ("known", "placeholder"), [("<video>", "<video>"), ("<global-img>", "<global-img>"), ("", None)]
)
def test_a_tokenizer_may_lack_the_token_of_videos(make_saved, known, placeholder):
    folder, *_ = make_saved("smolvlm")
    tokenizer = SimpleNamespace(encode=lambda text, special: [1] if text == known else [1, 2])
    found = Videos.of_model(open_checkpoint(folder), ModelConfig(), None, tokenizer)
    assert (found and found.processor.placeholder) == placeholder
