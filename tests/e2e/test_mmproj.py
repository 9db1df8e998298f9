"""GGUF models of pictures in two files: the same answers as those of the same weights elsewhere."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import LLM
from octavo.errors import ModelError
from tests import sounds
from tests.mmproj_files import (
    FIXED_SOUNDS,
    TEXTS,
    VOCABULARY,
    arrays_of,
    metadata_of,
    save_pair,
    save_tower,
    vocabulary_of,
)
from tests.pictures import CASES, MORE_CASES, make_llm, params, picture, save_model
from tests.videos import frames

LARGE = picture(150, 170, 3)
"""Picture with several windows of 112 pixels."""
QWEN = {"min_pixels": 64, "max_pixels": 30000}
SIZE = {"size": {"longest_edge": 40}}


@pytest.fixture(scope="module")
def make_saved(tmp_path_factory):
    """Return a function: case -> folder, files of the pair, and transformers' model."""

    @functools.cache
    def make(name: str) -> tuple[Path, Path, Path, Any]:
        folder, pair = tmp_path_factory.mktemp(name), tmp_path_factory.mktemp(f"{name}-gguf")
        model = save_model(name, folder)
        config = json.loads((folder / "config.json").read_text())
        if name == "qwen2_5_vl":  # the files do not name the size of windows
            config["vision_config"]["window_size"] = 112
        if name == "gemma3":  # nor the layers with a sliding window: five of six
            config["text_config"]["layer_types"] = ["sliding_attention"] * 3
        (folder / "config.json").write_text(json.dumps(config))
        return (folder, *save_pair(model, name, pair), model)

    return make


def answers(llm: LLM, name: str) -> list[Any]:
    """Return tokens and log-probabilities of prompts with pictures and without."""
    case = (CASES | MORE_CASES)[name]
    place, noise = case.placeholder, sounds.sound(0.52)
    images = [LARGE if name.startswith("qwen") else picture(30, 22, 1), picture(12, 40, 2)]
    prompts = [
        {"prompt": f"a {place} b {place}", "multi_modal_data": {"image": images}},
        {"prompt": "a text"},
    ]
    if case.sounds is not None:
        prompts.append({"prompt": "a <|audio|>", "multi_modal_data": {"audio": noise}})
    found = llm.generate(prompts, params(12), use_tqdm=False)
    return [
        (
            list(one.prompt_token_ids or []),
            list(one.outputs[0].token_ids),
            [next(iter(own.values())).logprob for own in one.outputs[0].logprobs or []],
        )
        for one in found
    ]


def settings(name: str) -> dict[str, Any]:
    """Return settings with which both forms of a model read pictures of the same sizes."""
    options: dict[str, Any] = {"max_num_batched_tokens": 1024, "max_model_len": 500}
    if name.startswith("qwen"):
        options["mm_processor_kwargs"] = QWEN
    if name.startswith("gemma4"):  # nor the number of rows
        options["mm_processor_kwargs"] = {"max_soft_tokens": 70}
    if name == "gemma3":  # the files have no settings of crops
        options["mm_processor_kwargs"] = {"do_pan_and_scan": False}
    return options


def test_videos(make_saved) -> None:
    folder, text, _, _ = make_saved("gemma4_e")
    videos = [frames(3, 24, 40), frames(2, 30, 30, 1)]
    prompt = {"prompt": "a <|video|> b <|video|>", "multi_modal_data": {"video": videos}}
    found = []
    for file in (folder, text):
        with make_llm(file, max_model_len=500, max_num_batched_tokens=1024) as llm:
            found.append(llm.generate(prompt, params(12), use_tqdm=False)[0])
    assert found[0].prompt_token_ids == found[1].prompt_token_ids
    assert found[0].outputs[0].token_ids == found[1].outputs[0].token_ids


@pytest.fixture(scope="module")
def saved_sounds(tmp_path_factory) -> tuple[Path, Path, Any]:
    """Return the folder, the text part's file, and the model of one that hears and sees."""
    folder, pair = tmp_path_factory.mktemp("sounds"), tmp_path_factory.mktemp("sounds-gguf")
    model = sounds.save_model("gemma4 wide", folder, **FIXED_SOUNDS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.mmproj_files.VOCABULARY", vocabulary_of(sounds.ID))
        text, _ = save_pair(model, "gemma4_e", pair)
    return folder, text, model


def hear(file: Path, **options: Any) -> list[Any]:
    """Return tokens and log-probabilities of prompts with sounds, with a picture, and without."""
    heard = [sounds.sound(1.3), sounds.sound(0.52, 1)]
    data = {"audio": heard, "image": [picture(30, 22, 1)]}
    prompts = [
        {"prompt": "a <|audio|> b <|audio|> <|image|> c", "multi_modal_data": data},
        {"prompt": "a text"},
    ]
    limits = {"max_num_batched_tokens": 1200, "max_model_len": 500}
    with make_llm(file, **limits | options) as llm:
        found = llm.generate(prompts, sounds.params(12), use_tqdm=False)
    return [
        (
            list(one.prompt_token_ids or []),
            list(one.outputs[0].token_ids),
            [next(iter(own.values())).logprob for own in one.outputs[0].logprobs or []],
        )
        for one in found
    ]


def test_sounds(saved_sounds) -> None:
    folder, text, _ = saved_sounds
    expected, found = hear(folder), hear(text)
    for (ids, tokens, logprobs), (own_ids, own_tokens, own) in zip(expected, found, strict=True):
        assert (ids, tokens) == (own_ids, own_tokens)
        assert own == pytest.approx(logprobs, abs=2e-5)
    assert hear(text, limit_mm_per_prompt={"video": 0}, max_num_seqs=1) == found


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_types_of_encoders_of_sounds(kind: str, saved_sounds, tmp_path: Path) -> None:
    _, text, model = saved_sounds
    rounded = tmp_path / "tower.gguf"
    save_tower(rounded, metadata_of(model, "gemma4_e"), arrays_of(model, "gemma4_e"), kind)
    (_, _, exact), plain = hear(text)
    (_, _, own), own_plain = hear(text, mmproj=str(rounded))
    assert exact[0] != own[0]
    assert own[0] == pytest.approx(exact[0], abs=0.2 if kind == "q8_0" else 0.02)
    assert own_plain == plain


@pytest.mark.parametrize("name", TEXTS)
def test_answers(name: str, make_saved) -> None:
    folder, text, _, _ = make_saved(name)
    with make_llm(folder, **settings(name)) as llm:
        expected = answers(llm, name)
    with make_llm(text, **settings(name)) as llm:  # finds the tower beside it
        found = answers(llm, name)
    for (ids, tokens, logprobs), (own_ids, own_tokens, own) in zip(expected, found, strict=True):
        assert (ids, tokens) == (own_ids, own_tokens)
        assert own == pytest.approx(logprobs, abs=5e-6)


def test_vocabulary_without_the_token_of_rows(
    make_saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published files of Gemma 3 end before it."""
    _, text, _, model = make_saved("gemma3")
    tokens = VOCABULARY["tokenizer.ggml.tokens"]
    own = [f"<unused{i}>" if x == "<image_soft_token>" else x for i, x in enumerate(tokens)]
    vocabulary = VOCABULARY | {"tokenizer.ggml.tokens": own}
    monkeypatch.setattr("tests.mmproj_files.VOCABULARY", vocabulary)
    found = []
    for file in (text, save_pair(model, "gemma3", tmp_path)[0]):
        with make_llm(file, **settings("gemma3")) as llm:
            found.append([answer[1:] for answer in answers(llm, "gemma3")])
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "mistral3", "gemma3", "gemma4_e"])
def test_types_of_towers(name: str, kind: str, make_saved, tmp_path: Path) -> None:
    """Rounded towers change the answers by no more than rounding does."""
    _, text, tower, model = make_saved(name)
    rounded = tmp_path / "tower.gguf"
    save_tower(rounded, metadata_of(model, name), arrays_of(model, name), kind)
    found = []
    for file in (tower, rounded):
        with make_llm(text, mmproj=str(file), **settings(name)) as llm:
            found.append(answers(llm, name))
    (_, tokens, exact), (_, own_tokens, own) = found[0][0], found[1][0]
    assert exact[0] != own[0]
    assert own[0] == pytest.approx(exact[0], abs=0.2 if kind == "q8_0" else 0.02)
    assert tokens[0] == own_tokens[0]
    assert found[0][1] == found[1][1]  # a text
    alone = {"enable_prefix_caching": False, "max_num_seqs": 1}
    with make_llm(text, mmproj=str(rounded), **settings(name) | alone) as llm:
        assert answers(llm, name) == found[1]


def test_old_names(make_saved, tmp_path: Path) -> None:
    """Old files exchange the names of the MLP's projections, and have layers that nothing reads."""
    _, text, tower, model = make_saved("llava")
    arrays = arrays_of(model, "llava")
    names = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    old = {}
    for name, array in arrays.items():
        part = name.split(".")[-2]
        old[name.replace(part, names.get(part, part))] = array
    old["v.post_ln.weight"] = np.ones(24, np.float32)
    save_tower(tmp_path / "old.gguf", metadata_of(model, "llava"), old)
    found = []
    for file in (tower, tmp_path / "old.gguf"):
        with make_llm(text, mmproj=str(file)) as llm:
            found.append(answers(llm, "llava"))
    assert found[0] == found[1]


def test_without_tower(make_saved, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A tower can be left out, and one beside a text model that cannot have it is left out."""
    _, text, _, model = make_saved("smolvlm")
    for options in ({"mmproj": "off"}, {"language_model_only": True}):
        with make_llm(text, **options) as llm:
            assert not llm.llm_engine.spec.encoders
            assert llm.generate("a", params(2), use_tqdm=False)[0].outputs[0].token_ids
    (tmp_path / "model.gguf").symlink_to(text)
    metadata = metadata_of(model, "smolvlm") | {"clip.projector_type": "ldp"}
    beside = tmp_path / "mmproj-other.gguf"
    save_tower(beside, metadata, {"v.patch_embd.weight": np.ones((2, 2), np.float32)})
    with make_llm(tmp_path / "model.gguf") as llm:
        assert "projector_type=ldp" in llm.llm_engine.spec.left_out
    with pytest.raises(ModelError, match=r"mmproj-other.gguf: .*ldp is not supported.*--no-mmproj"):
        make_llm(tmp_path / "model.gguf", mmproj=str(beside))
