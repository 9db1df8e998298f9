"""Pictures, videos and sounds of Gemma 4 12B in one prompt: transformers' numbers, all layouts."""

import base64
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import (
    Gemma4UnifiedAudioFeatureExtractor,
)

from octavo.errors import RequestError, UnsupportedError
from tests.e2e.harness import serve
from tests.e2e.test_chat_pictures import part
from tests.e2e.test_sounds import wav
from tests.handover import hand_over
from tests.pictures import (
    CASES,
    ID,
    MORE_CASES,
    assert_greedy,
    make_llm,
    params,
    picture,
    save_model,
    unified_masks,
)
from tests.revival import DyingEncoder
from tests.sounds import sound
from tests.videos import VIDEO_CASES, frames

NAME = "gemma4_unified"
FIRST, SECOND = picture(48, 30), picture(16, 40, 1)
NOISE, OTHER = sound(0.52, 1), sound(1.3)
VIDEO = frames(2, 40, 24), {"fps": 4 / 3}
LONGEST_RANGE = 70


def prompt(text, **data):
    return {"prompt": text, "multi_modal_data": data}


PROMPTS = [
    prompt("a <|image|> b <|audio|> c <|video|> d", image=FIRST, audio=NOISE, video=[VIDEO]),
    {"prompt": "only a text of some length, which goes on for more than a block"},
    prompt("<|audio|><|image|><|audio|>", image=[SECOND], audio=[OTHER, NOISE]),
    prompt("a <|image|> b <|audio|> c <|image|>", image=[FIRST, SECOND], audio=NOISE),
    prompt("<|video|>?", video=[VIDEO]),
]


def answers(llm, given, tokens=24):
    outputs = llm.generate(given, params(tokens), use_tqdm=False)
    return [(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder, transformers' model, and the answers of an engine that computes one prompt
    after the other without caches."""
    folder = tmp_path_factory.mktemp(NAME)
    model = save_model(NAME, folder)
    with make_llm(folder, enable_prefix_caching=False, max_num_seqs=1) as llm:
        alone = []
        for one in PROMPTS:
            alone += answers(llm, one)
            llm.reset_prefix_cache()
    return folder, model, alone


def hf_logprobs(model, llm, ids, data):
    """Return transformers' log-probabilities after each token: [tokens, vocab]."""
    readers, arrays = llm.llm_engine.input_processor._media.readers, {}
    found = data.get("image", [])
    if pictures := found if isinstance(found, list) else [found]:
        process = readers["image"].processor.process
        arrays |= (CASES | MORE_CASES)[NAME].join([process(image) for image in pictures])
    if videos := data.get("video", []):
        arrays |= VIDEO_CASES[NAME].join([readers["video"].read(it, {}, 0) for it in videos])
    if "audio" in data:
        sounds = data["audio"] if isinstance(data["audio"], list) else [data["audio"]]
        arrays |= Gemma4UnifiedAudioFeatureExtractor()(sounds, return_tensors="pt")
    tokens = torch.tensor([list(ids)])
    kinds = sum(
        kind * (tokens == ID[f"<|{name}|>"]).int()
        for kind, name in enumerate(("image", "video", "audio"), 1)
    )
    arrays["attention_mask"] = unified_masks(model, tokens, kinds)
    with torch.inference_mode():
        logits = model(input_ids=tokens, **arrays).logits[0]
    return logits.float().log_softmax(-1)


def test_parity(saved):
    folder, model, alone = saved
    with make_llm(folder) as llm:
        for one, answer in zip(PROMPTS, alone, strict=True):
            ids, tokens, _ = answer
            data = one.get("multi_modal_data", {})
            assert_greedy(answer, hf_logprobs(model, llm, [*ids, *tokens], data))


SHAPES = (
    (
        {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 12}
        | {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        {"mm_embed_dim": 40, "output_proj_dims": 40, "patch_size": 1, "mm_posemb_size": 70},
    ),
    (
        {"num_key_value_heads": 1, "num_hidden_layers": 6, "global_head_dim": 24}
        | {"layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "sliding_window": 30},
        {"mm_embed_dim": 17, "output_proj_dims": 17, "pooling_kernel_size": 4},
    ),
)
"""Other fields of text_config and vision_config."""


@pytest.mark.parametrize(("text", "vision"), SHAPES)
def test_parity_of_other_shapes(text, vision, tmp_path, monkeypatch):
    case = MORE_CASES[NAME]
    config = case.config | {"text_config": case.config["text_config"] | text}
    config["vision_config"] = case.config["vision_config"] | vision
    sizes = {k: v for k, v in vision.items() if k in ("patch_size", "pooling_kernel_size")}
    changed = replace(case, config=config, preprocessor=case.preprocessor | sizes)
    monkeypatch.setitem(MORE_CASES, NAME, changed)
    model = save_model(NAME, tmp_path)
    with make_llm(tmp_path) as llm:
        for one, answer in zip(PROMPTS[:3], answers(llm, PROMPTS[:3]), strict=True):
            ids, tokens, _ = answer
            data = one.get("multi_modal_data", {})
            assert_greedy(answer, hf_logprobs(model, llm, [*ids, *tokens], data))


def test_batches_and_caches(saved):
    folder, _, alone = saved
    with make_llm(folder) as llm:
        assert answers(llm, PROMPTS) == alone
        stats = llm.stats()
        assert stats.mm_cache_queries > stats.mm_cache_hits > 0
        assert answers(llm, PROMPTS[::-1]) == alone[::-1]
        assert llm.stats().prefix_cache_hits > 0


LAYOUTS = {
    "chunks": {"max_num_batched_tokens": LONGEST_RANGE + 7, "enforce_eager": True},
    "uncached": {"max_num_batched_tokens": LONGEST_RANGE + 16, "enable_prefix_caching": False},
    "preemptions": {
        "num_gpu_blocks_override": 42,
        "max_model_len": 320,
        "max_num_batched_tokens": LONGEST_RANGE + 8,
    },
    "columns": {"tensor_parallel_size": 2, "num_threads": 1},
    "stages": {"pipeline_parallel_size": 2, "num_threads": 1, "max_num_batched_tokens": 83},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(saved, layout):
    folder, _, alone = saved
    with make_llm(folder, **LAYOUTS[layout]) as llm:
        assert answers(llm, PROMPTS * 2) == alone * 2
        if layout == "preemptions":
            assert llm.stats().num_preemptions > 0


def test_prefill_elsewhere(saved):
    folder, _, alone = saved
    connector = {"kv_connector": "P2PConnector"}
    connector["kv_connector_extra_config"] = {"cpu_bytes_to_use": 2**26}
    config = {"kv_transfer_config": connector}
    with make_llm(folder, **config) as one, make_llm(folder, **config) as two:
        assert hand_over(one, two, PROMPTS, params, 24) == alone
        assert two.stats().external_prefix_cache_hits > 0


def test_death_in_the_encoder(saved, tmp_path, monkeypatch):
    folder, _, alone = saved
    dying = DyingEncoder(tmp_path, monkeypatch)
    with make_llm(folder, **dying.settings) as llm:
        assert answers(llm, PROMPTS[1]) == alone[1:2]
        with dying.once(llm):
            assert answers(llm, PROMPTS) == alone


def test_refusals(saved):
    """Sounds of more than 30 s are refused; without encoders the model reads texts."""
    folder, _, alone = saved
    with make_llm(folder) as llm, pytest.raises(RequestError, match="at most 30 s are supported"):
        answers(llm, prompt("<|audio|>", audio=np.zeros(16_000 * 31, np.float32)))
    with make_llm(folder, language_model_only=True) as llm:
        assert answers(llm, PROMPTS[1]) == alone[1:2]
        with pytest.raises(UnsupportedError, match="reads text only"):
            answers(llm, PROMPTS[0])


TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:{% for p in m['content'] %}{% if p['type'] == 'text' %}"
    "{{ p['text'] }}{% else %}<|{{ p['type'] }}|>{% endif %}{% endfor %};{% endfor %}"
)


def test_chat(saved, tmp_path):
    """A picture and a sound in a chat over HTTP have the answer of the same prompt offline."""
    folder = saved[0]
    samples = (np.round(NOISE * 32768) / 32768).astype(np.float32)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    with make_llm(folder) as llm:
        given = prompt("user:<|image|>and<|audio|>?;", image=FIRST, audio=samples)
        (output,) = llm.generate(given, params(8), use_tqdm=False)
    audio = {"data": base64.b64encode(wav(samples)).decode(), "format": "wav"}
    content = [
        part(FIRST),
        {"type": "text", "text": "and"},
        {"type": "input_audio", "input_audio": audio},
        {"type": "text", "text": "?"},
    ]
    chat = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    chat |= {"temperature": 0, "ignore_eos": True}
    chat["logit_bias"] = {str(token): -100 for token in ID.values()}
    flags = ["--dtype", "float32", "--max-model-len", "400", "--served-model-name", "m"]
    with serve(tmp_path, *flags, model=str(folder)) as server:
        body = server.post("/v1/chat/completions", chat).json()
    assert body["choices"][0]["message"]["content"] == output.outputs[0].text
    assert body["usage"]["prompt_tokens"] == len(output.prompt_token_ids)
