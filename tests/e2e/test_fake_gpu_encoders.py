"""Encoders with device=cuda, on tensors that only claim to be on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo import SamplingParams
from octavo.models.towers import gemma4, gemma4_audio, gemma4_unified, qwen_vl, whisper
from tests import sounds
from tests.e2e import test_sounds as hearing
from tests.e2e.test_media_embeds import with_rows
from tests.e2e.test_pictures import PICTURES, prompt
from tests.fake_gpu import FakeGpu
from tests.models import test_encoder_decoders as texts
from tests.models.harness import make_hf
from tests.pictures import make_llm, save_model
from tests.triton import needs_triton

pytestmark = needs_triton
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
NAMES = ["smolvlm", "qwen2_5_vl", "qwen3_vl", "gemma3", "paligemma"]
"""Pictures in tiles, m-RoPE and windows, m-RoPE and DeepStack, and tokens that see each other."""
SOUNDS = ["gemma4", "gemma4_unified", "qwen2_audio", "qwen3_asr", "voxtral"]
ENCODER_DECODERS = ["t5", "bart", "whisper"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write the models before the GPU is faked."""
    folders = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    for name, folder in folders.items():
        save_model(name, folder)
    for name in SOUNDS:
        folders[name] = tmp_path_factory.mktemp(name)
        # Voxtral's rows stand for a whole window: its decoder has several tiles of keys.
        sounds.save_model(name, folders[name], seconds=6 if name == "voxtral" else 2)
    for name in ENCODER_DECODERS:
        folders[name] = tmp_path_factory.mktemp(name)
        architecture, config = (texts.MODELS | texts.SOUNDS)[name]
        make_hf(architecture, **config).save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def gpu(models: dict[str, Path]) -> Iterator[FakeGpu]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        # The longest item, which measures the memory, would take minutes in the interpreter.
        monkeypatch.setattr(qwen_vl, "MAX_PATCHES", 96)
        monkeypatch.setattr(whisper, "MAX_SECONDS", 2)
        monkeypatch.setattr(gemma4, "MOST_ROWS", 9)
        monkeypatch.setattr(gemma4_audio, "MAX_TOKENS", 25)
        monkeypatch.setattr(gemma4_unified, "MOST_ROWS", 9)
        monkeypatch.setattr(gemma4_unified, "MAX_TOKENS", 25)
        yield FakeGpu(monkeypatch)


def ask(llm: Any, given: list[Any]) -> list[Any]:
    outputs = llm.generate(given, GREEDY, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", NAMES)
def test_pictures(name: str, models: dict[str, Path], gpu: FakeGpu) -> None:
    """Tokens are those of the CPU, with texts among them; no step waits; some are captured."""
    given = [prompt(name, PICTURES[1], text="{} b"), {"prompt": "only a text"}]
    settings = {"max_num_batched_tokens": 24, "max_num_seqs": 2, "max_model_len": 128}
    if "gemma" in name:  # ranges are whole
        length = {"gemma3": 160, "paligemma": 96}[name]
        settings |= {"max_num_batched_tokens": length, "max_model_len": length}
    with make_llm(models[name], **settings, device="cpu") as llm:
        expected = ask(llm, given)
    with make_llm(models[name], **settings, device="cuda") as llm:
        gpu.waits.clear()
        replays = gpu.replays
        assert ask(llm, given) == expected
        assert gpu.waits == []
        assert gpu.replays > replays


def test_rows_of_a_caller(
    models: dict[str, Path], gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows in place of a picture, with those of DeepStack; no step waits for them."""
    name = "qwen3_vl"
    given = prompt(name, PICTURES[1], text="{} b")
    settings = {"max_num_batched_tokens": 24, "max_num_seqs": 2, "max_model_len": 128}
    settings |= {"enable_mm_embeds": True}
    with make_llm(models[name], **settings, device="cpu") as llm:
        _, [(_, _, row)] = with_rows(llm, given, monkeypatch)
        expected = ask(llm, [given])
    size = PICTURES[1].shape[1], PICTURES[1].shape[0]
    data = {"image": {"image_embeds": row, "image_sizes": size}}
    with make_llm(models[name], **settings, device="cuda") as llm:
        gpu.waits.clear()
        assert ask(llm, [given | {"multi_modal_data": data}]) == expected
        assert gpu.waits == []


def test_bits_alone_and_among_others(models: dict[str, Path], gpu: FakeGpu) -> None:
    """Also if both pictures are items of one run, and a chunk ends within a picture."""
    name = "qwen2_5_vl"
    given = [prompt(name, PICTURES[1], text="{} b"), prompt(name, PICTURES[0], text="a {}")]
    settings = {"max_num_seqs": 2, "max_model_len": 128, "enable_prefix_caching": False}
    settings |= {"max_num_batched_tokens": 30, "device": "cuda", "batch_invariant": True}
    asked = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=2)

    def answer(llm: Any, given: list[Any]) -> list[Any]:
        outputs = [it.outputs[0] for it in llm.generate(given, asked, use_tqdm=False)]
        return [(output.token_ids, output.logprobs) for output in outputs]

    with make_llm(models[name], **settings) as llm:
        together = answer(llm, given)
        assert [*answer(llm, given[:1]), *answer(llm, given[1:])] == together


def compare(folder: Path, given: list[Any], gpu: FakeGpu, **settings: Any) -> None:
    """Compare tokens with the CPU's, and the bits of a request alone and among others."""
    asked = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2)
    settings |= {"max_num_seqs": 2, "enable_prefix_caching": False, "batch_invariant": True}

    def answer(llm: Any, given: list[Any]) -> list[Any]:
        outputs = [it.outputs[0] for it in llm.generate(given, asked, use_tqdm=False)]
        return [(list(output.token_ids), output.logprobs) for output in outputs]

    with make_llm(folder, **settings, device="cpu") as llm:
        expected = [tokens for tokens, _ in answer(llm, given)]
    with make_llm(folder, **settings, device="cuda") as llm:
        gpu.waits.clear()
        replays = gpu.replays
        together = answer(llm, given)
        assert [tokens for tokens, _ in together] == expected
        assert gpu.replays > replays
        assert answer(llm, given[-1:]) == together[-1:]


@pytest.mark.parametrize("name", SOUNDS)
def test_sounds(name: str, models: dict[str, Path], gpu: FakeGpu) -> None:
    given = [{"prompt": "only a text"}, hearing.prompt(name, sounds.sound(0.4), text="a {} b")]
    compare(models[name], given, gpu, max_model_len=192)


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_encoder_decoders(name: str, models: dict[str, Path], gpu: FakeGpu) -> None:
    """Relative biases, learned positions, and an encoder of sounds; decode steps are captured."""
    if name == "whisper":
        config = texts.SOUNDS[name][1]
        shape = 2 * config["max_source_positions"], config["num_mel_bins"]
        features = np.random.default_rng(0).standard_normal((2, *shape), np.float32)
        given: list[Any] = [
            {"encoder_prompt": {"input_features": it}, "decoder_prompt": [5, 6]} for it in features
        ]
    else:
        given = texts.make_inputs()[:3]
    compare(models[name], given, gpu, skip_tokenizer_init=True, max_model_len=24)
