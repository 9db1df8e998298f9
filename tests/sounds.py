"""Tiny models of sounds and texts with random weights, and transformers' answers of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import WhisperFeatureExtractor
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import (
    Gemma4UnifiedAudioFeatureExtractor,
)
from transformers.models.phi4_multimodal.feature_extraction_phi4_multimodal import (
    Phi4MultimodalFeatureExtractor,
)
from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor

from octavo import SamplingParams
from tests.models.harness import make_hf

SPECIAL = ("<s>", "</s>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>", "[AUDIO]")
SPECIAL += ("<|audio>", "<|audio|>", "<audio|>", "<|image|>")
SPECIAL += ("<|audio_start|>", "<|audio_pad|>", "<|audio_end|>")
SPECIAL += ("[BEGIN_AUDIO]", "[INST]", "[/INST]", "[TRANSCRIBE]", "<|im_start|>", "<|im_end|>")
VOCAB = 256 + len(SPECIAL)
ID = {text: 256 + i for i, text in enumerate(SPECIAL)}
SECONDS, RATE = 6, 16_000


def _text(**fields: Any) -> dict[str, Any]:
    text: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": ID["<s>"]}
    return text | {"eos_token_id": None} | fields


def _qwen(mel: int, size: int, heads: int, layers: int, **text: Any) -> dict[str, Any]:
    audio = {"model_type": "qwen2_audio_encoder", "d_model": size, "encoder_layers": layers}
    audio |= {"encoder_attention_heads": heads, "encoder_ffn_dim": 40, "num_mel_bins": mel}
    audio |= {"max_source_positions": 50 * SECONDS}
    text = _text(model_type="qwen2", **text)
    return {"audio_config": audio, "text_config": text, "audio_token_index": ID["<|AUDIO|>"]}


def _voxtral(mel: int, size: int, heads: int, layers: int, **text: Any) -> dict[str, Any]:
    audio = {"model_type": "voxtral_encoder", "hidden_size": size, "num_hidden_layers": layers}
    audio |= {"num_attention_heads": heads, "intermediate_size": 4 * size, "num_mel_bins": mel}
    audio |= {"max_source_positions": 50 * SECONDS}
    text = _text(model_type="llama", head_dim=8, **text)
    return {"audio_config": audio, "text_config": text, "audio_token_id": ID["[AUDIO]"]}


def _asr(mel: int, size: int, heads: int, layers: int, **text: Any) -> dict[str, Any]:
    audio = {"model_type": "qwen3_asr_encoder", "d_model": size, "encoder_layers": layers}
    audio |= {"encoder_attention_heads": heads, "encoder_ffn_dim": 40, "num_mel_bins": mel}
    audio |= {"downsample_hidden_size": 6, "n_window_infer": 200}
    text = _text(model_type="qwen3", head_dim=8, **text)
    audio["output_dim"] = text["hidden_size"]
    ids = {"audio_token_id": ID["<|audio_pad|>"], "eos_token_id": ID["</s>"], "pad_token_id": 0}
    return {"audio_config": audio, "text_config": text, "tie_word_embeddings": False, **ids}


def _gemma4(mel: int, size: int, heads: int, layers: int, **text: Any) -> dict[str, Any]:
    audio = {"hidden_size": size, "num_hidden_layers": layers, "num_attention_heads": heads}
    audio |= {"subsampling_conv_channels": [mel, 6], "conv_kernel_size": 4, "output_proj_dims": 20}
    audio |= {
        "attention_chunk_size": 5 - layers % 2,
        "attention_context_left": 5,
        "attention_logit_cap": 2.0,
    }
    tower = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1}
    tower |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    tower |= {"patch_size": 2, "pooling_kernel_size": 2, "position_embedding_size": 64}
    text = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, **text}
    types = ["sliding_attention", "full_attention"] * (text["num_hidden_layers"] // 2)
    text |= {
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 9 if layers % 2 else 400,
        "layer_types": types,
    }
    text |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
    ids = {"audio_token_id": ID["<|audio|>"], "boa_token_id": ID["<|audio>"]}
    ids |= {
        "eoa_token_id": ID["<audio|>"],
        "image_token_id": ID["<|image|>"],
        "video_token_id": VOCAB,
    }
    text = _text(model_type="gemma4_text", **text)
    return {"audio_config": audio, "vision_config": tower, "text_config": text, **ids}


def _unified(frame: int, size: int, window: int, **text: Any) -> dict[str, Any]:
    tower = {"mm_embed_dim": size, "output_proj_dims": size, "mm_posemb_size": 9, "patch_size": 2}
    text = {"num_hidden_layers": 2, "head_dim": 8, "global_head_dim": 16, **text}
    types = ["sliding_attention", "full_attention"] * (text["num_hidden_layers"] // 2)
    text |= {"sliding_window": window, "layer_types": types, "model_type": "gemma4_unified_text"}
    ids = {"audio_token_id": ID["<|audio|>"], "boa_token_id": ID["<|audio>"]}
    ids |= {"image_token_id": ID["<|image|>"], "video_token_id": VOCAB}
    audio = {"audio_embed_dim": frame}
    return {"audio_config": audio, "vision_config": tower, "text_config": _text(**text), **ids}


def _phi4(mel: int, size: int, heads: int, layers: int, **text: Any) -> dict[str, Any]:
    audio = {"hidden_size": size, "intermediate_size": 24, "num_blocks": layers}
    audio |= {"num_attention_heads": heads, "input_size": mel, "nemo_conv_channels": 6}
    audio |= {"ext_pw_out_channel": size, "depthwise_separable_out_channel": size}
    audio |= {"bias_max_distance": 20 * layers, "audio_token_id": ID["<|audio|>"]}
    tower = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    tower |= {"num_attention_heads": 4, "image_size": 8, "crop_size": 8, "patch_size": 2}
    tower |= {"image_token_id": ID["<|image|>"]}
    return {"audio_config": audio, "vision_config": tower, **_text(**text)}


@dataclass(frozen=True)
class Case:
    """A model with its placeholder."""

    architecture: str
    config: dict[str, Any]
    placeholder: str

    @property
    def mel(self) -> int:
        """Number of mel bands, or of samples of a frame."""
        audio = self.config["audio_config"]
        if "audio_embed_dim" in audio:
            return int(audio["audio_embed_dim"])
        name = "input_size" if "input_size" in audio else "num_mel_bins"
        return int(audio.get(name) or audio["subsampling_conv_channels"][0])


def _cases() -> dict[str, Case]:
    qwen, bos = "Qwen2AudioForConditionalGeneration", "<|audio_bos|><|AUDIO|><|audio_eos|>"
    voxtral, begin = "VoxtralForConditionalGeneration", "[BEGIN_AUDIO][AUDIO]"
    asr, start = "Qwen3ASRForConditionalGeneration", "<|audio_start|><|audio_pad|><|audio_end|>"
    gemma, phi4 = "Gemma4ForConditionalGeneration", "Phi4MultimodalForCausalLM"
    unified = "Gemma4UnifiedForConditionalGeneration"
    wide = {"hidden_size": 64, "num_key_value_heads": 1, "num_hidden_layers": 1}
    deep = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}
    sharing = {"num_hidden_layers": 2, "num_kv_shared_layers": 0}
    return {
        "gemma4": Case(gemma, _gemma4(8, 24, 3, 2), "<|audio|>"),
        "gemma4 wide": Case(gemma, _gemma4(16, 32, 2, 1, **wide | sharing), "<|audio|>"),
        "gemma4 deep": Case(gemma, _gemma4(128, 16, 4, 3, **deep), "<|audio|>"),
        "gemma4_unified": Case(unified, _unified(640, 24, 400), "<|audio|>"),
        "gemma4_unified wide": Case(
            unified, _unified(800, 16, 9, **wide | {"num_hidden_layers": 2}), "<|audio|>"
        ),
        "gemma4_unified deep": Case(
            unified, _unified(999, 40, 30, **deep, num_hidden_layers=4), "<|audio|>"
        ),
        "phi4": Case(phi4, _phi4(16, 24, 3, 2), "<|audio|>"),
        "phi4 wide": Case(phi4, _phi4(80, 32, 2, 1, **wide), "<|audio|>"),
        "phi4 deep": Case(phi4, _phi4(13, 16, 4, 3, **deep), "<|audio|>"),
        "qwen2_audio": Case(qwen, _qwen(8, 24, 3, 2), bos),
        "qwen2_audio wide": Case(qwen, _qwen(16, 32, 2, 1, **wide), bos),
        "qwen2_audio deep": Case(qwen, _qwen(128, 16, 4, 3, **deep), bos),
        "qwen3_asr": Case(asr, _asr(8, 24, 3, 2), start),
        "qwen3_asr wide": Case(asr, _asr(20, 32, 2, 1, **wide), start),
        "qwen3_asr deep": Case(asr, _asr(128, 16, 4, 3, **deep), start),
        "voxtral": Case(voxtral, _voxtral(8, 24, 3, 2), begin),
        "voxtral wide": Case(voxtral, _voxtral(16, 32, 2, 1, **wide), begin),
        "voxtral deep": Case(voxtral, _voxtral(128, 16, 4, 3, **deep), begin),
    }


CASES = _cases()


def save_model(name: str, folder: Path, *, seconds: int = SECONDS, **audio: Any) -> Any:
    """Save a model with its files; return transformers' model.

    Args:
        name: its case.
        folder: the folder.
        seconds: length of a window of Whisper's encoder.
        audio: other fields of audio_config.
    """
    case = CASES[name]
    own = case.config["audio_config"] | audio
    if "max_source_positions" in own:
        own["max_source_positions"] = 50 * seconds
    case = replace(case, config=case.config | {"audio_config": own})
    model = make_hf(case.architecture, **case.config)
    if name.split()[0] == "gemma4":
        _randomize(model.model.audio_tower)
    model.save_pretrained(folder)
    kind = "Qwen3ASRFeatureExtractor" if "asr" in name else "WhisperFeatureExtractor"
    preprocessor = {"feature_extractor_type": kind, "feature_size": case.mel}
    preprocessor |= {"chunk_length": seconds}
    if "gemma4" in name:
        kind = "Unified" if "unified" in name else ""
        preprocessor = {"image_processor_type": f"Gemma4{kind}ImageProcessor", "patch_size": 2}
        preprocessor |= {"pooling_kernel_size": 2}
        extractor = _gemma4_extractor(case)
        whole = {"feature_extractor": json.loads(extractor.to_json_string())}
        (folder / "processor_config.json").write_text(json.dumps(whole))
    if "phi4" in name:
        preprocessor |= {"image_processor_type": "Phi4MultimodalImageProcessor"}
        preprocessor |= {"feature_extractor_type": "Phi4MultimodalFeatureExtractor"}
        preprocessor |= {"size": {"height": 8, "width": 8}}
    (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)} | ID
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    backend.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "image_token": "<|image|>", "audio_token": "<|audio|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    return model


def _gemma4_extractor(case: Case) -> Any:
    """Return transformers' extractor of features of a model of Gemma 4."""
    if "Unified" in case.architecture:
        return Gemma4UnifiedAudioFeatureExtractor(case.mel, audio_samples_per_token=case.mel)
    return Gemma4AudioFeatureExtractor(feature_size=case.mel)


def _randomize(tower: Any) -> None:
    """Give Gemma 4's encoder bounds, scales and norms that matter."""
    generator = torch.Generator().manual_seed(7)
    for name, tensor in [*tower.named_parameters(), *tower.named_buffers()]:
        noise = torch.rand(tensor.shape, generator=generator)
        if name.endswith(("input_max", "output_max")):
            tensor.data.copy_(0.5 + noise)
        elif name.endswith(("input_min", "output_min")):
            tensor.data.copy_(-0.5 - noise)
        elif name.endswith("per_dim_scale"):
            tensor.data.copy_(3 * noise)
        elif "norm" in name:
            tensor.data.copy_(0.5 + noise)
        elif name.endswith("relative_k_proj.weight"):
            tensor.data.copy_(noise - 0.5)


def sound(seconds: float, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return noise whose loudness changes, float32 [samples] at 16 kHz."""
    count = round(seconds * RATE)
    noise = np.random.default_rng(seed).normal(0, 0.1, count)
    return (noise * (1 + np.sin(np.arange(count) / (900 + 100 * seed)))).astype(np.float32)


def hf_logprobs(
    model: Any, name: str, ids: Sequence[int], sounds: Sequence[np.ndarray]
) -> torch.Tensor:
    """Return transformers' log-probabilities after each token: [tokens, vocab]."""
    arrays: dict[str, Any] = {}
    case = CASES[name]
    make_reader = partial(WhisperFeatureExtractor, feature_size=case.mel, chunk_length=SECONDS)
    options = {"sampling_rate": RATE, "return_tensors": "pt"}
    if sounds and "qwen2" in name:
        found = make_reader()(
            list(sounds), padding="max_length", return_attention_mask=True, **options
        )
        arrays["input_features"] = found["input_features"]
        arrays["feature_attention_mask"] = found["attention_mask"]
    elif sounds and "asr" in name:
        extractor = Qwen3ASRFeatureExtractor(feature_size=case.mel)
        # Alone: in a batch, the silence after a sound changes its last frame.
        found = [
            extractor(one, padding=True, return_attention_mask=True, **options) for one in sounds
        ]
        longest = max(one["input_features"].shape[-1] for one in found)
        for key, name in (("input_features", None), ("input_features_mask", "attention_mask")):
            padded = [
                torch.nn.functional.pad(one[name or key], (0, longest - one[name or key].shape[-1]))
                for one in found
            ]
            arrays[key] = torch.cat(padded)
    elif sounds and "phi4" in name:
        return _phi4_logprobs(model, case, ids, sounds)
    elif sounds and "gemma4" in name:
        arrays |= _gemma4_extractor(case)(list(sounds), return_tensors="pt")
    elif sounds:
        options |= {"padding": True, "truncation": False, "pad_to_multiple_of": SECONDS * RATE}
        windows = [
            make_reader()(one, **options)["input_features"]
            .reshape(case.mel, -1, 100 * SECONDS)
            .transpose(0, 1)
            for one in sounds
        ]
        arrays["input_features"] = torch.cat(windows)
    tokens = torch.tensor([list(ids)])
    with torch.inference_mode():
        logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **arrays).logits[0]
    return logits.float().log_softmax(-1)


def _phi4_logprobs(
    model: Any, case: Case, ids: Sequence[int], sounds: Sequence[np.ndarray]
) -> torch.Tensor:
    """Return the same for Phi-4, with each sound alone: others in a batch change a sound's rows,
    since tokens see the filling of shorter ones."""
    extractor = Phi4MultimodalFeatureExtractor(feature_size=case.mel)
    embed, tokens = model.model.embed_tokens_extend.audio_embed, torch.tensor([list(ids)])
    rows = []
    with torch.inference_mode():
        for one in sounds:
            found = extractor(one, sampling_rate=RATE, return_tensors="pt")
            count = int(found["audio_embed_sizes"][0])
            own = torch.full((1, count), ID["<|audio|>"])
            zeros = torch.zeros(1, count, model.config.hidden_size)
            rows.append(embed(own, zeros, found["audio_input_features"], [count])[0])
        embeds = model.model.embed_tokens(tokens)
        embeds[tokens == ID["<|audio|>"]] = torch.cat(rows)
        return model(inputs_embeds=embeds).logits[0].float().log_softmax(-1)


def params(tokens: int = 8, **fields: Any) -> SamplingParams:
    """Return parameters of a greedy answer with logprobs, without special tokens."""
    bias = dict.fromkeys(ID.values(), -100.0)
    return SamplingParams(
        temperature=0, max_tokens=tokens, logprobs=0, ignore_eos=True, logit_bias=bias, **fields
    )
