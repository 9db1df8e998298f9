"""Answers of speech models, equal to those of transformers in float32, and alike in all layouts."""

from typing import Any

import numpy as np
import pytest
import torch

from octavo import SamplingParams
from octavo.errors import RequestError
from octavo.models.blocks.wave import MIN_SAMPLES
from octavo.models.families.moonshine import MAX_SAMPLES
from tests.models.harness import make_hf
from tests.models.test_encoder_decoders import make_llm

VOCAB = 97
MOONSHINE: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 72, "intermediate_size": 56}
MOONSHINE |= {"encoder_num_hidden_layers": 2, "decoder_num_hidden_layers": 2}
MOONSHINE |= {"encoder_num_attention_heads": 2, "decoder_num_attention_heads": 2}
MOONSHINE |= {"max_position_embeddings": 64}
WIDE = {"hidden_size": 104, "encoder_num_hidden_layers": 1, "pad_head_dim_to_multiple_of": 8}
DEEP = {"hidden_size": 60, "encoder_num_attention_heads": 3, "decoder_num_attention_heads": 3}
DEEP |= {"decoder_num_hidden_layers": 3, "attention_bias": True, "tie_word_embeddings": False}
DEEP |= {"decoder_hidden_act": "gelu"}
SHAPES = {"tiny": MOONSHINE, "base": MOONSHINE | WIDE, "deep": MOONSHINE | DEEP}
LENGTHS = (16_000, MIN_SAMPLES, 31_234, 5_000)
"""Numbers of samples of the sounds, all in one step."""

WHISPER: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 40, "num_mel_bins": 128}
WHISPER |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 56}
WHISPER |= {"decoder_ffn_dim": 56, "max_source_positions": 25, "max_target_positions": 30}
WHISPER |= {"decoder_start_token_id": 3, "bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1}
WHISPERS = {
    "large-v3-turbo": WHISPER | {"encoder_layers": 8, "decoder_layers": 4},
    "distil-large-v3": WHISPER | {"encoder_layers": 8, "decoder_layers": 2},
    "distil-small.en": WHISPER | {"encoder_layers": 4, "decoder_layers": 4, "num_mel_bins": 80},
}


def sounds():
    generator = np.random.default_rng(0)
    return [generator.normal(0, 0.1, (n, 1)).astype(np.float32) for n in LENGTHS]


def prompts(starts):
    return [
        {"encoder_prompt": {"input_features": sound}, "decoder_prompt": start}
        for sound, start in zip(sounds(), starts, strict=True)
    ]


def params(tokens=30):
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1)


def check(answers, hf_model, inputs):
    """Compare answers with transformers; `inputs` are its arguments besides the tokens."""
    for given, answer in zip(inputs, answers, strict=True):
        tokens, start = answer.outputs[0].token_ids, len(answer.prompt_token_ids)
        ids = torch.tensor([[*answer.prompt_token_ids, *tokens[:-1]]])
        with torch.inference_mode():
            logits = hf_model(**given, decoder_input_ids=ids, use_cache=False).logits[0]
        expected = torch.log_softmax(logits[start - 1 :], -1)
        assert expected.argmax(-1).tolist() == list(tokens)
        for row, found in zip(expected, answer.outputs[0].logprobs, strict=True):
            for token, logprob in found.items():
                assert abs(row[token].item() - logprob.logprob) < 1e-4


STARTS = [[1], [1, 9, 11], [1, *range(20)], [1, 5]]


@pytest.mark.parametrize("name", SHAPES)
def test_moonshine(name, tmp_path):
    hf_model = make_hf("MoonshineForConditionalGeneration", **SHAPES[name])
    with torch.no_grad():  # the norm of the item: not just ones and zeros
        hf_model.model.encoder.groupnorm.weight.normal_(1, 0.2)
        hf_model.model.encoder.groupnorm.bias.normal_(0, 0.2)
    hf_model.save_pretrained(tmp_path)
    with make_llm(tmp_path) as llm:
        answers = llm.generate(prompts(STARTS), params())
    check(answers, hf_model, [{"input_values": torch.tensor(sound).T} for sound in sounds()])


@pytest.fixture(scope="module")
def moonshine(tmp_path_factory):
    """Return a folder, and the answers to one prompt after the other."""
    folder = tmp_path_factory.mktemp("moonshine")
    make_hf("MoonshineForConditionalGeneration", **MOONSHINE).save_pretrained(folder)
    with make_llm(folder, enable_prefix_caching=False, max_num_seqs=1) as llm:
        return folder, [bits(llm.generate(one, params())) for one in prompts(STARTS)]


def bits(outputs):
    return [(o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 96, "max_num_seqs": 3},
        {"num_gpu_blocks_override": 84, "max_num_seqs": 24, "enable_prefix_caching": False},
    ],
    ids=["batch", "small steps", "preemptions"],
)
def test_moonshine_in_all_layouts(moonshine, settings):
    folder, alone = moonshine
    with make_llm(folder, block_size=16, **settings) as llm:
        count = 6 if "num_gpu_blocks_override" in settings else 2
        found = llm.generate(prompts(STARTS) * count, params())
        assert [[one] for one in bits(found)] == alone * count
        assert count == 2 or llm.stats().num_preemptions > 0


def test_wrong_sounds(moonshine):
    folder, alone = moonshine
    with make_llm(folder) as llm:
        for wrong, message in (
            (np.zeros(9000, np.float32), "has the shape"),
            (np.zeros((9000, 2), np.float32), "has the shape"),
            (np.zeros((MIN_SAMPLES - 1, 1), np.float32), f"at least {MIN_SAMPLES} samples"),
            (np.full((9000, 1), np.nan), "not finite"),
            (np.zeros((31 * 16_000, 1), np.float32), "at most"),
            (np.zeros((MAX_SAMPLES + 100, 1), np.float32), f"at most {MAX_SAMPLES}"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.generate({"encoder_prompt": {"input_features": wrong}}, params())
        assert bits(llm.generate(prompts(STARTS)[0], params())) == alone[0]


@pytest.mark.parametrize("name", WHISPERS)
def test_whisper(name, tmp_path):
    config = WHISPERS[name]
    hf_model = make_hf("WhisperForConditionalGeneration", **config)
    hf_model.save_pretrained(tmp_path)
    generator = np.random.default_rng(0)
    frames = [generator.normal(size=(50, config["num_mel_bins"])) for _ in range(3)]
    given = [
        {"encoder_prompt": {"input_features": one.astype(np.float32)}, "decoder_prompt": start}
        for one, start in zip(frames, [[3], [3, 9, 11], [3, *range(20)]], strict=True)
    ]
    with make_llm(tmp_path) as llm:
        answers = llm.generate(given, params(7))
    inputs = [{"input_features": torch.tensor(one.T[None]).float()} for one in frames]
    check(answers, hf_model, inputs)
