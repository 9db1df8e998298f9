"""Pictures and sounds in one prompt of Phi-4 multimodal: transformers' numbers, and modes."""

import importlib.util
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.phi4_multimodal.feature_extraction_phi4_multimodal import (
    Phi4MultimodalFeatureExtractor,
)

from octavo import LoRARequest
from octavo.errors import ModelError
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


NAMES = (
    (r"(layers\.\d+\.\w+\.(qkv|o|gate_up|down)_proj)\.weight", r"\1.base_layer.weight"),
    (r"img_projection_up\.", "img_projection.0."),
    (r"img_projection_down\.", "img_projection.2."),
    (r"sub_img_feature_extensor", "sub_GN"),
    (r"global_img_feature_extensor", "glb_GN"),
    (r"up_proj_for_vision_speech", "audio_projection.vision.0"),
    (r"down_proj_for_vision_speech", "audio_projection.vision.2"),
    (r"up_proj_for_speech", "audio_projection.speech.0"),
    (r"down_proj_for_speech", "audio_projection.speech.2"),
    (r"(encoders\.\d+\.feed_forward_\w+)\.gate_up_proj", r"\1.net.0.linear"),
    (r"(encoders\.\d+\.feed_forward_\w+)\.down_proj", r"\1.net.2"),
    (r"(encoders\.\d+)\.self_attn\.o_proj", r"\1.self_attn.linear_out"),
    (r"(encoders\.\d+)\.self_attn\.(q|k|v)_proj", r"\1.self_attn.linear_\2"),
)
"""Names of transformers -> those that Microsoft publishes."""


def publish(folder):
    """Turn a saved model into the format that Microsoft publishes, with adapters in the weights."""
    file, found = folder / "model.safetensors", {}
    for name, tensor in load_file(file).items():
        for pattern, new in NAMES:
            name = re.sub(pattern, new, name)
        found[name] = tensor
    found["model.layers.0.mlp.down_proj.lora_A.vision.weight"] = torch.ones(4, 48)
    save_file(found, file)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    audio = config.pop("audio_config")
    del config["vision_config"]
    config |= {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm"}
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_phi4mm.Phi4MMForCausalLM"}}
    audio = {
        "activation": "swish",
        "attention_dim": audio["hidden_size"],
        "attention_heads": audio["num_attention_heads"],
        "chunk_size": -1,
        "depthwise_seperable_out_channel": audio["depthwise_separable_out_channel"],
        "ext_pw_out_channel": audio["ext_pw_out_channel"],
        "input_size": audio["input_size"],
        "kernel_size": 3,
        "linear_units": audio["intermediate_size"],
        "nemo_conv_settings": {"conv_channels": audio["nemo_conv_channels"]},
        "num_blocks": audio["num_blocks"],
        "relative_attention_bias_args": {"t5_bias_max_distance": audio["bias_max_distance"]},
        "time_reduction": 8,
    }
    config["audio_processor"] = {"config": audio, "name": "cascades"}
    image = {"crop_size": 448, "hd_transform_order": "sub_glb", "use_hd_transform": True}
    sound = {"downsample_rate": 1, "use_qformer": False, "use_conv_downsample": False}
    config["embd_layer"] = {"audio_embd_layer": sound, "image_embd_layer": image}
    config["img_processor"] = None
    file.write_text(json.dumps(config))
    file = folder / "preprocessor_config.json"
    given = {"image_processor_type": "Phi4MMImageProcessor", "dynamic_hd": 36}
    given |= {"feature_extractor_type": "Phi4MMAudioFeatureExtractor", "feature_size": 16}
    file.write_text(json.dumps(given))


def test_published_format(saved, tmp_path):
    """The same weights in both formats give the same bits."""
    folder, _ = saved
    for file in folder.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    publish(tmp_path)
    with pytest.raises(ModelError, match="trust_remote_code"):
        make_llm(tmp_path)
    both = prompt(image=[PICTURE], audio=[SOUND])
    with make_llm(folder) as llm:
        expected = answers(llm, [both, prompt("b {}", audio=[SOUND])])
    # The published config has no sizes of the tower; a small one needs them.
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    for name, more in (
        ("config.json", {"vision_config": vision}),
        ("preprocessor_config.json", {"size": {"height": 8, "width": 8}}),
    ):
        file = tmp_path / name
        file.write_text(json.dumps(json.loads(file.read_text()) | more))
    template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}"
    with make_llm(tmp_path, trust_remote_code=True) as llm:
        assert answers(llm, [both, prompt("b {}", audio=[SOUND])]) == expected
        # The template that Microsoft publishes reads texts only.
        part = {"type": "image_pil", "image_pil": Image.fromarray(PICTURE)}
        chat = [{"role": "user", "content": [part, {"type": "text", "text": "what?"}]}]
        (output,) = llm.chat(chat, params(1), chat_template=template, use_tqdm=False)
        assert ID["<|image|>"] in output.prompt_token_ids
