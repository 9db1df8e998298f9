"""Make a tiny model that repeats its prompt: python -m octavo.conformance.parrot FOLDER.

    python -m octavo.conformance.parrot parrot --template chat_template.jinja
    octavo serve parrot
    python -m octavo.conformance.tools http://localhost:8000 --format hermes --force parrot

It is a GPT-2 of one layer whose weights are computed: the next token is the one `DISTANCE` tokens
before it. So a message of the right length is an answer, and servers of any kind can be tried, also
those without structured output. Its tokens are the bytes, the markers of the suite's formats, and a
stand-in for each marker.

Positions are cosines and sines of random frequencies, as in random Fourier features: the product of
two is largest at equal phases. The keys are the positions, and the queries are the positions before
`DISTANCE`, that is, turned back. Each embedding has its numbers twice, with both signs: so its mean
is zero and its length the same for all, and layer normalization only scales it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from octavo.errors import ConfigError

DISTANCE = 3072
POSITIONS = 16384
END = "<|parrot_end|>"
"""End-of-sequence token."""
TOKENS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<seed:think>", "</seed:think>"),
    *("<seed:tool_call>", "</seed:tool_call>", "<minimax:tool_call>", "</minimax:tool_call>"),
    *("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<|tool_calls_section_begin|>"),
    *("<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    *("<|tool_call_end|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    *("<|tool_call|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    *("<|tool_call_start|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
    *("<|constrain|>", "<|call|>", "<|return|>"),
)
"""Markers that are one token, as in the vocabularies of the models that write them."""
TURNS = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<｜User｜>"),
    *("<｜Assistant｜>", "[INST]", "[/INST]", "<|turn>", "<turn|>", "<|user|>", "<|assistant|>"),
)
"""Marks between the messages of a chat, by which servers find the end of the last one."""
STAND_INS = {token: f"<|parrot_{number}|>" for number, token in enumerate((*TOKENS, END))}
"""Texts that make the parrot write a marker. They are in the prompt in its place, because servers
look for markers in prompts, too."""
_ALL = (*TURNS, *TOKENS, END, *STAND_INS.values())
_END_ID = 256 + _ALL.index(END)
_VOCAB = 256 + len(_ALL)
_FAINT = 0.97
"""Size of the embedding of a stand-in: it is the marker's, but the marker is the likelier one."""
_CODE = 128
_HEAD = 64
_FREQUENCIES = _HEAD // 2
_HIDDEN = 2 * _CODE + 4 * _FREQUENCIES
_SHARPNESS = 100.0
_GAIN = 4.0


def tensors() -> dict[str, np.ndarray]:
    """Return the weights by name, float32, in GPT-2's layout (input size, output size)."""
    rng = np.random.default_rng(0)
    code = rng.choice(np.array([-1.0, 1.0]), (_VOCAB - len(STAND_INS), _CODE))
    code = np.vstack([code, _FAINT * code[-len(STAND_INS) :]])
    waves = rng.uniform(0.0, np.pi, _FREQUENCIES)
    angles = np.arange(POSITIONS)[:, None] * waves
    cos, sin = np.cos(angles), np.sin(angles)
    places = 2 * _CODE + np.arange(4) * _FREQUENCIES  # of cos, sin, -cos, -sin
    embed, position = np.zeros((_VOCAB, _HIDDEN)), np.zeros((POSITIONS, _HIDDEN))
    embed[:, : 2 * _CODE] = np.hstack([code, -code])
    position[:, places[0] :] = np.hstack([cos, sin, -cos, -sin])
    variance = 2 * (_CODE + _FREQUENCIES) / _HIDDEN
    # Scores are divided by sqrt(_HEAD); normalization divides queries and keys by sqrt(variance).
    strength = _SHARPNESS / _FREQUENCIES * np.sqrt(_HEAD) * variance
    qkv, out = np.zeros((_HIDDEN, 3 * _HIDDEN)), np.zeros((_HIDDEN, _HIDDEN))
    of_cos, of_sin = (places[i] + np.arange(_FREQUENCIES) for i in (0, 1))
    turn = waves * (DISTANCE - 1)
    for head in range(_CODE // _HEAD):
        first = head * _HEAD
        to_cos, to_sin = (first + i * _FREQUENCIES + np.arange(_FREQUENCIES) for i in (0, 1))
        qkv[of_cos, to_cos] = strength * np.cos(turn)
        qkv[of_sin, to_cos] = strength * np.sin(turn)
        qkv[of_sin, to_sin] = strength * np.cos(turn)
        qkv[of_cos, to_sin] = -strength * np.sin(turn)
        qkv[of_cos, _HIDDEN + to_cos] = qkv[of_sin, _HIDDEN + to_sin] = 1.0
        part = first + np.arange(_HEAD)
        qkv[part, 2 * _HIDDEN + part] = np.sqrt(variance)
        out[part, part], out[part, _CODE + part] = _GAIN, -_GAIN
    ones, zeros = np.ones(_HIDDEN), np.zeros(_HIDDEN)
    layer: dict[str, np.ndarray] = {
        "ln_1.weight": ones,
        "ln_1.bias": zeros,
        "attn.c_attn.weight": qkv,
        "attn.c_attn.bias": np.zeros(3 * _HIDDEN),
        "attn.c_proj.weight": out,
        "attn.c_proj.bias": zeros,
        "ln_2.weight": ones,
        "ln_2.bias": zeros,
        "mlp.c_fc.weight": np.zeros((_HIDDEN, _HEAD)),
        "mlp.c_fc.bias": np.zeros(_HEAD),
        "mlp.c_proj.weight": np.zeros((_HEAD, _HIDDEN)),
        "mlp.c_proj.bias": zeros,
    }
    found: dict[str, np.ndarray] = {
        "transformer.wte.weight": embed,
        "transformer.wpe.weight": position,
    }
    found |= {f"transformer.h.0.{name}": value for name, value in layer.items()}
    found |= {"transformer.ln_f.weight": ones, "transformer.ln_f.bias": zeros}
    return {name: value.astype(np.float32) for name, value in found.items()}


def _config() -> dict[str, object]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": _VOCAB,
        "n_positions": POSITIONS,
        "n_ctx": POSITIONS,
        "n_embd": _HIDDEN,
        "n_layer": 1,
        "n_head": _HIDDEN // _HEAD,
        "n_inner": _HEAD,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": _END_ID,
        "eos_token_id": _END_ID,
        "torch_dtype": "float32",
    }


def _tokenizer() -> dict[str, object]:
    """Return a tokenizer.json of bytes, in GPT-2's alphabet, and markers."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(256 + number): byte for number, byte in enumerate(others)}
    added = [
        {
            "id": 256 + number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            # In models, tokens such as <think> are not special.
            "special": token.startswith(("<|", "[")) or token.endswith("|>"),
        }
        for number, token in enumerate(_ALL)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": level | {"use_regex": True},
        "post_processor": None,
        "decoder": level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": alphabet,
            "merges": [],
        },
    }


def write_parrot(folder: Path, template: str) -> None:
    """Write the checkpoint, with a chat template, into a folder.

    Raises:
        ConfigError: the folder cannot be written.
    """
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": POSITIONS,
        "chat_template": template,
    }
    files = {
        "config.json": _config(),
        "generation_config.json": {"eos_token_id": _END_ID},
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": tokenizer,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        save_file(tensors(), folder / "model.safetensors", {"format": "pt"})
    except OSError as error:
        raise ConfigError(f"Cannot write the parrot: {error}") from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m octavo.conformance.parrot",
        description="Make a tiny model that repeats its prompt.",
    )
    parser.add_argument("folder", type=Path, help="folder to write")
    parser.add_argument("--template", type=Path, required=True, help="file of the chat template")
    args = parser.parse_args(argv)
    try:
        write_parrot(args.folder, args.template.read_text(encoding="utf-8"))
    except (ConfigError, OSError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
