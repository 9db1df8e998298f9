"""Tokenizer of the built-in models: byte-level BPE with a ChatML-like chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
# Ids 0, 1, 2. <tool_call> and </tool_call> are plain text: parsers find them in the output text.
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
EOS_TOKEN_IDS = [0, 2]
PAD_TOKEN_ID = 0
# Digits are single tokens, so that small sums are learnt digit by digit.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}
{{- content -}}
{%- elif content -%}
{%- for part in content if part.type == 'text' -%}{{- part.text -}}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(system='', start=0) -%}
{%- if messages and messages[0].role == 'system' -%}
{%- set ns.system = text(messages[0].content) -%}
{%- set ns.start = 1 -%}
{%- endif -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if ns.system -%}{{- ns.system + '\\n' -}}{%- endif -%}
{{- 'Tools:' -}}
{%- for tool in tools -%}
{%- set function = tool.function if tool.function is defined else tool -%}
{{- '\\n' + function.name + '(' -}}
{%- if function.parameters and function.parameters.properties -%}
{{- function.parameters.properties.keys() | join(', ') -}}
{%- endif -%}
{{- ')' -}}
{%- if function.description -%}{{- ': ' + function.description -}}{%- endif -%}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif ns.system -%}
{{- '<|im_start|>system\\n' + ns.system + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages[ns.start:] -%}
{%- set content = text(message.content) -%}
{{- '<|im_start|>' + message.role + '\\n' + content -}}
{%- for call in message.tool_calls or [] -%}
{%- set function = call.function if call.function is defined else call -%}
{%- if content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>{"name": "' + function.name + '", "arguments": ' -}}
{%- if function.arguments is string -%}
{{- function.arguments -}}
{%- else -%}
{{- function.arguments | tojson -}}
{%- endif -%}
{{- '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def train_tokenizer(
    texts: Iterable[str], vocab_size: int = VOCAB_SIZE, more_special: tuple[str, ...] = ()
) -> Tokenizer:
    """Train a byte-level BPE tokenizer on ``texts``; every byte is in the alphabet.

    The special tokens are `SPECIAL_TOKENS` and then ``more_special``.
    """
    special = (*SPECIAL_TOKENS, *more_special)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[AddedToken(t, normalized=False, special=True) for t in special],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(
    tokenizer: Tokenizer,
    folder: Path,
    max_length: int,
    more_special: tuple[str, ...] = (),
    template: str | None = CHAT_TEMPLATE,
) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` (with the chat template, if any)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in (*SPECIAL_TOKENS, *more_special)
    }
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "added_tokens_decoder": added,
        "additional_special_tokens": [IM_START, IM_END, *more_special],
        "bos_token": None,
        "eos_token": IM_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))
