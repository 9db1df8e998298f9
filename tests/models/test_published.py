"""Models as they are published: older names of weights and fields, and fields that are left out."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from octavo import SamplingParams
from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import ModelError
from octavo.kernels.native import NativeOps
from octavo.models.loader import LoadedWeights
from octavo.models.registry import read_spec
from octavo.sampling_params import BEAM_DEFAULTS
from tests.models.harness import make_hf
from tests.models.published_configs import CONFIGS, PHI4MM
from tests.models.test_encoder_decoders import MODELS, SOUNDS, make_llm, make_model
from tests.models.test_speech_models import MOONSHINE
from tests.models.test_towers import CASES, TEXT

NGRAMS = {"no_repeat_ngram_size": 2}
UNTIED = ("InternVL", "MT5")
"""Models whose published LM head is their own; transformers decides it by the weights."""


GENERATION = ("min_length", "min_new_tokens", "no_repeat_ngram_size", "forced_eos_token_id")
GENERATION += ("length_penalty", "early_stopping")


def spec(folder, config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return read_spec(open_checkpoint(folder))


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name, tmp_path):
    """The model is the one that transformers' config class describes, which has all fields."""
    found = spec(tmp_path / "published", CONFIGS[name])
    complete = AutoConfig.from_pretrained(tmp_path / "published").to_dict()
    if name in UNTIED:
        complete["tie_word_embeddings"] = False
    # transformers moves these fields to generation_config.json.
    for field in (*GENERATION, "forced_bos_token_id", "bad_words_ids"):
        complete.pop(field, None)
        if field in CONFIGS[name]:
            complete[field] = CONFIGS[name][field]
    assert found == spec(tmp_path / "complete", complete)


@pytest.mark.parametrize(
    ("name", "section", "fields"),
    [
        ("Idefics3", "vision_config", ["num_attention_heads"]),
        ("SmolVLM", "vision_config", ["num_attention_heads"]),
        ("Gemma4Unified", "audio_config", list(CONFIGS["Gemma4Unified"]["audio_config"])),
        ("Gemma4Unified", "text_config", ["global_head_dim", "use_bidirectional_attention"]),
        ("Gemma4Unified", "vision_config", list(CONFIGS["Gemma4Unified"]["vision_config"])),
        ("Voxtral", "text_config", ["head_dim", "num_key_value_heads", "rms_norm_eps"]),
        ("Voxtral", "text_config", ["rope_theta", "max_position_embeddings", "num_hidden_layers"]),
    ],
)
def test_fields_that_weights_do_not_show(name, section, fields, tmp_path):
    """A field that is left out has the default of transformers."""
    config = CONFIGS[name]
    part = {key: value for key, value in config[section].items() if key not in fields}
    found = spec(tmp_path / "published", config | {section: part})
    complete = AutoConfig.from_pretrained(tmp_path / "published").to_dict()
    assert found == spec(tmp_path / "complete", complete)


def test_phi4_with_custom_code(tmp_path):
    """Microsoft's config describes the same model as that of transformers' format."""
    names = ("architectures", "model_type", "vision_config", "audio_config")
    same = {k: v for k, v in CONFIGS["Phi4Multimodal"].items() if k not in names}
    found = spec(tmp_path / "published", PHI4MM | same)
    assert found.architecture == "Phi4MMForCausalLM"
    assert len(found.encoders) == 2
    expected = spec(tmp_path / "complete", CONFIGS["Phi4Multimodal"])
    assert replace(found, architecture=expected.architecture) == expected


AUDIO = {"d_model": 40, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 160}
AUDIO |= {"num_mel_bins": 6, "max_source_positions": 24}
VOXTRAL = {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
VOXTRAL |= {"intermediate_size": 160, "num_mel_bins": 6, "max_source_positions": 24}
SMALL = {name: (case.architecture, case.config) for name, case in CASES.items()} | SOUNDS
SMALL["moonshine"] = ("MoonshineForConditionalGeneration", MOONSHINE)
SMALL["qwen2audio"] = (
    "Qwen2AudioForConditionalGeneration",
    {"audio_config": AUDIO, "text_config": TEXT | {"model_type": "qwen2"}},
)
SMALL["voxtral"] = (
    "VoxtralForConditionalGeneration",
    {"audio_config": VOXTRAL, "text_config": TEXT | {"model_type": "llama", "head_dim": 8}},
)
OLD = [  # names before transformers 4.52
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.(?=vision_tower|multi_modal_projector|image_newline|audio_tower)", ""),
]
INNER = (r"(?<=vision_tower\.)", "vision_model.")  # towers before transformers 5
QWEN = [(r"^model\.visual\.", "visual."), (r"^model\.language_model\.", "model.")]
FORMS = {
    **dict.fromkeys(("llava", "llavanext", "llavaonevision", "gemma3"), (OLD, [*OLD, INNER])),
    "paligemma": (OLD, [*OLD, INNER], [INNER]),
    **dict.fromkeys(("mistral3", "llava-pixtral", "internvl", "voxtral", "qwen2audio"), (OLD,)),
    **dict.fromkeys(("qwen2vl", "qwen2_5_vl"), (QWEN,)),
    **dict.fromkeys(("qwen3vl", "qwen3vlmoe", "qwen3_5", "gemma4", "gemma4unified"), ()),
    **dict.fromkeys(("smolvlm", "idefics3"), ()),
    **dict.fromkeys(("t5", "flan-t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian"), ()),
    **dict.fromkeys(("m2m100", "t5gemma", "whisper", "moonshine"), ()),
}
"""Models -> changes of the names that transformers has for their modules."""
PAIRS = [(name, form) for name, forms in FORMS.items() for form in range(len(forms) + 1)]


def weights(folder):
    """Return the weights as the engine computes with them."""
    checkpoint = open_checkpoint(folder)
    settings = {"dtype": "float32", "ops": NativeOps(), "cache": None}
    loaded = LoadedWeights(read_spec(checkpoint), checkpoint, **settings).load()
    return {name: np.array(getattr(w, "data", w).numpy()) for name, w in loaded.items()}


def leftovers(name, state):
    """Return tensors that older versions have stored, too, and that are not weights."""
    patches = ".embeddings.patch_embedding.weight"
    for tower in [key.removesuffix(patches) for key in state if key.endswith(patches)]:
        yield f"{tower}.embeddings.position_ids", torch.arange(4)[None]
        if name in ("llavaonevision", "paligemma", "gemma3"):
            yield f"{tower}.head.probe", torch.zeros(1, 1, 24)
            yield f"{tower}.head.mlp.fc1.weight", torch.zeros(40, 24)
    for table in ("shared.weight", "model.shared.weight"):
        if table in state and name != "t5gemma":
            outer = table.removesuffix("shared.weight")
            yield f"{outer}encoder.embed_tokens.weight", state[table]
            yield f"{outer}decoder.embed_tokens.weight", state[table]
            if "lm_head.weight" not in state:
                yield "lm_head.weight", state[table]
    if name == "t5":
        name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
        yield name, torch.zeros(32, 4)
    if name in ("bart", "mbart", "m2m100"):
        yield "model.encoder.version", torch.tensor([3.0])
        yield "model.decoder.version", torch.tensor([3.0])
    if name == "m2m100":
        yield "model.encoder.embed_positions.weights", torch.zeros(66, 40)
    if name == "whisper":
        yield "proj_out.weight", state["model.decoder.embed_tokens.weight"]


@pytest.mark.parametrize(("name", "form"), PAIRS)
def test_names(name, form, tmp_path):
    """The weights are the same under all names that they have had."""
    if name in MODELS:
        model = make_model(tmp_path, name)
    else:
        architecture, config = SMALL[name]
        model = make_hf(architecture, **config)
        model.save_pretrained(tmp_path)
    expected = weights(tmp_path)
    file = tmp_path / "model.safetensors"
    state = {}
    for key, tensor in model.state_dict().items():
        for pattern, new in FORMS[name][form] if form < len(FORMS[name]) else ():
            key = re.sub(pattern, new, key)
        state[key] = tensor.clone()
    state |= {key: tensor.clone() for key, tensor in leftovers(name, state)}
    save_file(state, file, {"format": "pt"})
    found = weights(tmp_path)
    assert found.keys() == expected.keys()
    for weight, numbers in found.items():
        assert np.array_equal(numbers, expected[weight], equal_nan=True), weight


@pytest.mark.parametrize(
    ("fields", "start", "bad", "rules"),
    [
        (
            {"forced_bos_token_id": 5, "bad_words_ids": [[1]], "min_length": 9},
            (2, 5),
            ((1,),),
            {"min_tokens": 7},
        ),
        (
            {"force_bos_token_to_be_generated": True, "suppress_tokens": [4], "min_new_tokens": 3},
            (2, 0),
            ((4,),),
            {"min_tokens": 2},
        ),
        ({"min_length": 1, "no_repeat_ngram_size": 2}, (2,), (), {"extra_args": NGRAMS}),
    ],
)
def test_generation_settings_in_config(fields, start, bad, rules, tmp_path):
    """Older models have the settings of `generate` in config.json."""
    config = {k: v for k, v in CONFIGS["MBart"].items() if k not in ("num_beams", *GENERATION)}
    found = spec(tmp_path / "model", config | fields)
    assert (found.decoder_start_ids, found.bad_words_ids) == (start, bad)
    assert found.generation_config == rules
    assert found.beams == BEAM_DEFAULTS


def test_wrong_generation_settings(tmp_path):
    for i, (name, value) in enumerate([("early_stopping", "x"), ("min_length", -1)]):
        with pytest.raises(ModelError, match=name):
            spec(tmp_path / str(i), CONFIGS["MBart"] | {name: value})


def test_unused_generation_settings(tmp_path, caplog):
    """The log names the settings that are not applied, once."""
    make_model(tmp_path, "bart")
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    unused = {"num_beams": 4, "encoder_no_repeat_ngram_size": 3}
    file.write_text(json.dumps(config | unused | {"forced_bos_token_id": 9, "max_length": 20}))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    with caplog.at_level("INFO"), make_llm(tmp_path) as llm:
        (answer,) = llm.generate([[7, 8]], SamplingParams(temperature=0, max_tokens=2))
    assert answer.prompt_token_ids == [2, 9]
    (line,) = [r.getMessage() for r in caplog.records if "not applied" in r.getMessage()]
    assert all(f"{name}={value!r}" in line for name, value in unused.items())
