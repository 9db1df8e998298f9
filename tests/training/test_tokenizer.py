from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from training.synthetic import TOOLS, render
from training.tokenizer import (
    EOS_TOKEN_IDS,
    SPECIAL_TOKENS,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
)

STORIES = ["Once upon a time there was a cat.", "The cat said meow, and the dog said woof."] * 20
SMALL = train_tokenizer(STORIES, 320)


@given(st.text(max_size=60))
def test_every_text_comes_back(text: str) -> None:
    assert SMALL.decode(SMALL.encode(text).ids, skip_special_tokens=False) == text


def test_special_tokens_have_the_first_ids_and_digits_stand_alone() -> None:
    assert [SMALL.token_to_id(t) for t in SPECIAL_TOKENS] == [0, 1, 2]
    assert [SMALL.id_to_token(i) for i in EOS_TOKEN_IDS] == ["<|endoftext|>", "<|im_end|>"]
    assert len(SMALL.encode("2024").ids) == 4


def test_saved_tokenizer_is_read_back(tmp_path: Path) -> None:
    save_tokenizer(SMALL, tmp_path, 128)
    text = "A cät 🙂 said <|im_end|> meow.\n\n"
    assert load_tokenizer(tmp_path).encode(text).ids == SMALL.encode(text).ids


@pytest.fixture(scope="module")
def hf(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(tokenizer, folder, 128)
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_chat_template(hf) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Add 1 and 2."}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}],
        },
        {"role": "tool", "content": "3"},
    ]
    text = hf.apply_chat_template(
        messages, tools=[TOOLS["add"]], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nBe kind.\nTools:\nadd(a, b): Add two numbers<|im_end|>\n"
        "<|im_start|>user\nAdd 1 and 2.<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}'
        "</tool_call><|im_end|>\n"
        "<|im_start|>tool\n3<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_of_the_trainer_is_transformers_one(hf) -> None:
    import random

    from training.synthetic import conversation

    rng = random.Random(3)
    for _ in range(100):
        made = conversation(rng)
        text = hf.apply_chat_template(made["messages"], tools=made.get("tools"), tokenize=False)
        assert text == render(made)
