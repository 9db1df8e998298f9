"""Answers of encoder-decoders, equal to those of transformers in float32."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import GenerationConfig

from octavo import LLM, BeamSearchParams, SamplingParams
from tests.models.harness import make_hf

VOCAB = 97
LENGTHS = (1, 5, 40, 17)
"""Numbers of tokens of the encoder's inputs, all in one step."""
NUM_TOKENS = 12
T5: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 40, "d_kv": 8, "d_ff": 56, "num_layers": 2}
T5 |= {"num_heads": 4, "n_positions": 64, "decoder_start_token_id": 0}
SMALL = {"d_model": 24, "d_kv": 16, "d_ff": 40, "num_heads": 3, "num_layers": 3}
BART: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 40, "max_position_embeddings": 64}
BART |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 56, "decoder_ffn_dim": 56}
BART |= {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
BART |= {"forced_eos_token_id": None}
ODD = {"d_model": 36, "encoder_attention_heads": 2, "decoder_attention_heads": 3}
ODD |= {"encoder_layers": 1, "decoder_layers": 3, "decoder_ffn_dim": 40, "scale_embedding": True}
DEEP = {"d_model": 24, "encoder_attention_heads": 3, "decoder_attention_heads": 2}
DEEP |= {"encoder_layers": 3, "decoder_layers": 4, "encoder_ffn_dim": 32}
GEMMA: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 56}
GEMMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
GEMMA |= {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 12}
GEMMA |= {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
GEMMA |= {"max_position_embeddings": 64}
ENCODER = {"hidden_size": 24, "num_hidden_layers": 3, "num_key_value_heads": 4, "head_dim": 6}
BIASED = {"attention_bias": True, "num_key_value_heads": 1, "sliding_window": 5}
T5GEMMA = {"encoder": GEMMA, "decoder": GEMMA, "vocab_size": VOCAB}
MARIAN = BART | {"activation_function": "swish", "scale_embedding": True}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", T5),
    "t5-small": ("T5ForConditionalGeneration", T5 | SMALL | {"num_decoder_layers": 1}),
    "t5-buckets": (
        "T5ForConditionalGeneration",
        T5 | {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    ),
    "flan-t5": (
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "flan-t5-small": (
        "T5ForConditionalGeneration",
        T5 | SMALL | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "flan-t5-wide": (
        "T5ForConditionalGeneration",
        T5
        | {"d_model": 64, "d_kv": 12, "num_heads": 6, "num_layers": 1, "num_decoder_layers": 4}
        | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5": ("MT5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}),
    "bart": ("BartForConditionalGeneration", BART),
    "bart-odd": ("BartForConditionalGeneration", BART | ODD),
    "bart-relu": ("BartForConditionalGeneration", BART | DEEP | {"activation_function": "relu"}),
    "mbart": ("MBartForConditionalGeneration", BART | ODD),
    "pegasus": ("PegasusForConditionalGeneration", BART | {"scale_embedding": True}),
    "marian": ("MarianMTModel", MARIAN),
    "marian-odd": ("MarianMTModel", MARIAN | ODD),
    "umt5": ("UMT5ForConditionalGeneration", T5 | {"feed_forward_proj": "gated-gelu"}),
    "umt5-small": ("UMT5ForConditionalGeneration", T5 | SMALL | {"num_decoder_layers": 4}),
    "umt5-plain": ("UMT5ForConditionalGeneration", T5 | {"feed_forward_proj": "relu"}),
    "m2m100": ("M2M100ForConditionalGeneration", BART | {"activation_function": "relu"}),
    "m2m100-odd": (
        "M2M100ForConditionalGeneration",
        BART | ODD | {"scale_embedding": False, "pad_token_id": 0},
    ),
    "m2m100-small": ("M2M100ForConditionalGeneration", BART | {"d_model": 24}),
    "t5gemma": ("T5GemmaForConditionalGeneration", T5GEMMA),
    "t5gemma-own": (
        "T5GemmaForConditionalGeneration",
        T5GEMMA | {"encoder": GEMMA | ENCODER, "tie_word_embeddings": False},
    ),
    "t5gemma-bias": (
        "T5GemmaForConditionalGeneration",
        {"encoder": GEMMA | BIASED | ENCODER, "decoder": GEMMA | BIASED, "vocab_size": VOCAB},
    ),
    "marian-own": (
        "MarianMTModel",
        MARIAN | DEEP | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 61},
    ),
}


def make_model(folder: Path, name: str) -> Any:
    """Save a random model of transformers, and return it."""
    architecture, config = MODELS[name]
    hf_model = make_hf(architecture, **config)
    with torch.no_grad():
        if name.startswith("flan"):  # T5 1.1 has an LM head of its own
            head = torch.nn.Parameter(torch.randn_like(hf_model.lm_head.weight) * 0.2)
            hf_model.lm_head.weight = head
        if hasattr(hf_model, "final_logits_bias"):
            hf_model.final_logits_bias.normal_(std=0.1)
        for module in hf_model.modules():
            if hasattr(module, "create_weight"):  # sinusoids, which checkpoints lack
                module.weight.copy_(module.create_weight())
    hf_model.save_pretrained(folder)
    return hf_model


def make_llm(folder: Path, **settings: Any) -> LLM:
    """Load a model in float32."""
    defaults: dict[str, Any] = {"dtype": "float32", "skip_tokenizer_init": True, "max_num_seqs": 8}
    defaults |= {"num_gpu_blocks_override": 200, "weight_cache": "off"}
    return LLM(str(folder), **(defaults | settings))


def make_inputs(vocab_size: int = 61) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.mark.parametrize("name", MODELS)
def test_same_as_transformers(name, tmp_path):
    hf_model, inputs = make_model(tmp_path, name), make_inputs()
    pad = hf_model.config.pad_token_id  # transformers masks it, or gives it no position
    params = SamplingParams(
        temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2, logit_bias={pad: -100.0}
    )
    answers = make_llm(tmp_path).generate(inputs, params)
    start = getattr(hf_model.config, "decoder_start_token_id", None)
    if start is None:
        start = hf_model.config.bos_token_id
    for ids, answer in zip(inputs, answers, strict=True):
        assert (answer.encoder_prompt_token_ids, answer.prompt_token_ids) == (ids, [start])
        tokens = answer.outputs[0].token_ids
        with torch.inference_mode():
            expected = hf_model(
                input_ids=torch.tensor([ids]),
                decoder_input_ids=torch.tensor([[start, *tokens[:-1]]]),
                use_cache=False,
            ).logits[0]
        expected = torch.log_softmax(expected, -1)
        assert pad not in tokens
        allowed = expected.index_fill(1, torch.tensor([pad]), -100.0)
        assert allowed.argmax(-1).tolist() == list(tokens)
        for row, found in zip(expected, answer.outputs[0].logprobs, strict=True):
            for token, logprob in found.items():
                assert abs(row[token].item() - logprob.logprob) < 1e-4


RULES: dict[str, dict[str, Any]] = {
    "bart": {
        "forced_bos_token_id": 0,
        "forced_eos_token_id": 2,
        "min_length": 3,
        "no_repeat_ngram_size": 3,
        "early_stopping": "never",
    },
    "marian": {"bad_words_ids": [[1], [20], [9, 30]], "forced_eos_token_id": 2}
    | {"length_penalty": 2.0, "early_stopping": True},
    "m2m100": {"min_new_tokens": 6, "no_repeat_ngram_size": 1, "early_stopping": False}
    | {"bad_words_ids": [[1]]},
    "t5": {"no_repeat_ngram_size": 2, "length_penalty": 0.5, "min_length": 4},
}
"""Settings of generation_config.json."""


@pytest.mark.parametrize("name", RULES)
def test_rules_same_as_transformers(name, tmp_path):
    """Greedy answers and beams follow generation_config.json as in transformers' `generate`."""
    hf_model, inputs, most = make_model(tmp_path, name), make_inputs(), 16
    eos = hf_model.config.eos_token_id
    with torch.no_grad():  # ends and repetitions occur
        hf_model.get_output_embeddings().weight *= 0.6
        hf_model.get_output_embeddings().weight[eos] *= -5.0 if name == "marian" else 2.0
    settings = {"decoder_start_token_id", "bos_token_id", "eos_token_id", "pad_token_id"}
    fields = {key: getattr(hf_model.generation_config, key) for key in settings}
    hf_model.generation_config = GenerationConfig(**fields, **RULES[name], num_beams=4)
    hf_model.save_pretrained(tmp_path)
    forced = RULES[name].get("forced_bos_token_id")
    start = (fields["decoder_start_token_id"], *([] if forced is None else [forced]))

    def generate(ids, **settings):
        return hf_model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            max_new_tokens=most + len(start) - 1,
            **settings,
        )

    def text(tokens):
        """Return the tokens up to the end; a forced one is no part of the answer."""
        tokens = tokens.tolist()[len(start) :]
        return tokens[: tokens.index(eos)] if eos in tokens else tokens

    with make_llm(tmp_path, max_logprobs=1) as llm:
        greedy = msgspec.structs.replace(
            llm.get_default_sampling_params(), temperature=0.0, max_tokens=most
        )
        answers = llm.generate(inputs, greedy, use_tqdm=False)
        lengths = set()
        for ids, answer in zip(inputs, answers, strict=True):
            assert tuple(answer.prompt_token_ids) == start
            found = [token for token in answer.outputs[0].token_ids if token != eos]
            expected = text(generate(ids, num_beams=1)[0])
            assert found[: len(expected)] == expected
            assert len(found) - len(expected) in (0, "forced_eos_token_id" in RULES[name])
            lengths.add(len(found))
        assert llm.generate(inputs, greedy, use_tqdm=False)[1].outputs == answers[1].outputs
        beams = BeamSearchParams(
            beam_width=4,
            max_tokens=most,
            length_penalty=RULES[name].get("length_penalty", 1.0),
            early_stopping=RULES[name].get("early_stopping", False),
        )
        for ids, search in zip(inputs, llm.beam_search(inputs, beams), strict=True):
            expected = generate(ids, num_return_sequences=4)
            for sequence, row in zip(search.sequences, expected, strict=True):
                assert text(torch.tensor(sequence.tokens)) == text(row)
                # Each token, also a forced end, has its logprob; the end is not in the tokens.
                tokens = [*sequence.tokens[len(start) :], eos][: len(sequence.logprobs)]
                logprobs = [
                    its[token].logprob for token, its in zip(tokens, sequence.logprobs, strict=True)
                ]
                assert sum(logprobs) == pytest.approx(sequence.cum_logprob, abs=1e-4)
                lengths.add(len(text(row)))
        assert len(lengths) > 2 or name == "m2m100"


WHISPER: dict[str, Any] = {"vocab_size": VOCAB, "d_model": 40, "num_mel_bins": 6}
WHISPER |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
WHISPER |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 56, "decoder_ffn_dim": 56}
WHISPER |= {"max_source_positions": 25, "max_target_positions": 30, "decoder_start_token_id": 3}
WHISPER |= {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1}
SOUNDS: dict[str, tuple[str, dict[str, Any]]] = {
    "whisper": ("WhisperForConditionalGeneration", WHISPER),
    "whisper-odd": (
        "WhisperForConditionalGeneration",
        WHISPER | {"d_model": 36, "encoder_layers": 3, "num_mel_bins": 5},
    ),
    "whisper-turbo": (
        "WhisperForConditionalGeneration",
        WHISPER | {"encoder_layers": 4, "decoder_layers": 1, "d_model": 32},
    ),
}


@pytest.mark.parametrize("name", SOUNDS)
def test_sounds_same_as_transformers(name, tmp_path):
    architecture, config = SOUNDS[name]
    hf_model = make_hf(architecture, **config)
    hf_model.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(0)
    sounds = [torch.randn(50, config["num_mel_bins"], generator=generator) for _ in range(3)]
    starts = [[3], [3, 9, 11], [3, *range(20)]]
    params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, logprobs=1)
    prompts = [
        {"encoder_prompt": {"input_features": sound.numpy()}, "decoder_prompt": start}
        for sound, start in zip(sounds, starts, strict=True)
    ]
    answers = make_llm(tmp_path).generate(prompts, params)
    for sound, start, answer in zip(sounds, starts, answers, strict=True):
        tokens = answer.outputs[0].token_ids
        with torch.inference_mode():
            logits = hf_model(
                input_features=sound.T[None],
                decoder_input_ids=torch.tensor([[*start, *tokens[:-1]]]),
                use_cache=False,
            ).logits[0, len(start) - 1 :]
        expected = torch.log_softmax(logits, -1)
        assert expected.argmax(-1).tolist() == list(tokens)
        for row, found in zip(expected, answer.outputs[0].logprobs, strict=True):
            for token, logprob in found.items():
                assert abs(row[token].item() - logprob.logprob) < 1e-4
