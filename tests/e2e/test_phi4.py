"""Pictures and sounds in one prompt of Phi-4 multimodal: transformers' numbers, and modes."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from transformers.models.phi4_multimodal.feature_extraction_phi4_multimodal import (
    Phi4MultimodalFeatureExtractor,
)

from octavo import LoRARequest
from tests.e2e.test_peft import make_adapter
from tests.pictures import SIGLIP, assert_greedy, hd_arrays, make_llm, picture
from tests.sounds import ID, RATE, params, save_model, sound

PICTURE, SOUND = picture(9, 14), sound(0.9)
SETTINGS = {"enable_lora": True, "max_lora_rank": 4}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("phi4")
    return folder, save_model("phi4", folder)


def prompt(text="a {} b {}", **data):
    places = {"image": "<|image|>", "audio": "<|audio|>"}
    return {"prompt": text.format(*[places[name] for name in data]), "multi_modal_data": data}


def answers(llm, given, **options):
    outputs = llm.generate(given, params(8), use_tqdm=False, **options)
    return [(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def logprobs(model, llm, ids):
    """Return transformers' logprobs for a prompt with both."""
    readers = llm.llm_engine.input_processor._media.readers
    vision = SIGLIP | {"image_size": 8, "patch_size": 2}
    pictures = hd_arrays([readers["image"].processor.process(PICTURE)], vision)
    del pictures["seen_patches"]
    extractor = Phi4MultimodalFeatureExtractor(feature_size=16)
    sounds = extractor(SOUND, sampling_rate=RATE, return_tensors="pt")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([list(ids)]), **pictures, **sounds).logits[0]
    return logits.float().log_softmax(-1)


def test_sounds_beside_pictures(saved):
    """They have another projection than sounds alone; both are cached apart."""
    folder, model = saved
    both = prompt(image=[PICTURE], audio=[SOUND])
    alone = prompt("b {}", audio=[SOUND])
    with make_llm(folder) as llm:
        found = answers(llm, [both, alone, prompt(audio=[SOUND, SOUND][:1], image=[PICTURE])])
        assert answers(llm, alone) == found[1:2]
        ids, tokens, _ = found[0]
        assert_greedy(found[0], logprobs(model, llm, [*ids, *tokens]))
        assert ids.count(ID["<|audio|>"]) == found[1][0].count(ID["<|audio|>"]) > 0
    with make_llm(folder, enable_prefix_caching=False, max_num_batched_tokens=9) as llm:
        assert answers(llm, [alone, both]) == [found[1], found[0]]


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_modes_of_adapters(saved):
    """A prompt with pictures has the adapter of pictures, one with sounds only that of sounds."""
    folder, _ = saved
    names = {"image": "vision-lora", "audio": "speech-lora"}
    for seed, name in enumerate(names.values()):
        target = r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"
        make_adapter(folder, folder / name, seed=seed, target_modules=target)
    image, audio = prompt("a {}", image=[PICTURE]), prompt("a {}", audio=[SOUND])
    both, text = prompt(image=[PICTURE], audio=[SOUND]), {"prompt": "a"}
    given = [image, audio, both, text]
    lora = {k: LoRARequest(k, i, str(folder / names[k])) for i, k in enumerate(names, 1)}
    with make_llm(folder) as llm:
        plain = answers(llm, text)
    with make_llm(folder, max_loras=2, **SETTINGS) as llm:
        found = answers(llm, given)
        chosen = [lora["image"], lora["audio"], lora["image"]]
        assert found == answers(llm, given[:3], lora_request=chosen) + plain
        assert found[0] != answers(llm, image, lora_request=lora["audio"])[0]
    with make_llm(folder, max_loras=1, **SETTINGS) as llm:  # they take turns
        assert answers(llm, given) == found


def test_published_token_names(saved, tmp_path):
    """Without names in the tokenizer's files, those of Microsoft's tokenizer are used."""
    folder, _ = saved
    for file in folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    text = (tmp_path / "tokenizer.json").read_text()
    for old, new in (("<|image|>", "<|endoftext10|>"), ("<|audio|>", "<|endoftext11|>")):
        text = text.replace(json.dumps(old), json.dumps(new))
    (tmp_path / "tokenizer.json").write_text(text)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with make_llm(tmp_path) as llm:
        kinds = llm.llm_engine.chat_media.kinds
        assert kinds["image"].placeholder == "<|endoftext10|>"
        assert kinds["audio"].placeholder == "<|endoftext11|>"
        data = {"image": [PICTURE], "audio": [np.zeros(4000, np.float32)]}
        given = {"prompt": "<|endoftext10|><|endoftext11|>", "multi_modal_data": data}
        assert llm.generate(given, params(1), use_tqdm=False)
