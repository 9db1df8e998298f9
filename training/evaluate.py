"""What a trained model can do: sample texts, and how often it is right on fresh questions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer

from training import synthetic
from training.model import Llama
from training.synthetic import Conversation
from training.tokenizer import EOS_TOKEN_IDS

# Training chunks are numbered from 0 with another kind of seed, so these are new draws. Small
# sums are few, though: most were seen in training.
SEED = "evaluation"
SAMPLES = (
    "Who are you?",
    "Tell me a story about a dog.",
    "What is 7 + 5?",
    "What color is the sky?",
    "List three animals.",
    "Write a JSON record for a person named Anna who is 7 and likes cats.",
)


def generate(
    model: Llama, tokenizer: Tokenizer, prompt: str, limit: int = 200, temperature: float = 0.0
) -> str:
    """Continue ``prompt`` greedily, or by sampling with torch's generator."""
    ids = tokenizer.encode(prompt).ids
    start = len(ids)
    with torch.no_grad():
        while len(ids) - start < limit:
            logits = model.logits(model.hidden(torch.tensor([ids]))[0, -1])
            if temperature:
                chosen = int(torch.multinomial((logits / temperature).softmax(-1), 1))
            else:
                chosen = int(logits.argmax())
            if chosen in EOS_TOKEN_IDS:
                break
            ids.append(chosen)
    return tokenizer.decode(ids[start:])


def prompt_of(conversation: Conversation) -> str:
    return synthetic.render(conversation) + "<|im_start|>assistant\n"


def ask(model: Llama, tokenizer: Tokenizer, question: str, limit: int = 200) -> str:
    messages = [{"role": "user", "content": question}]
    return generate(model, tokenizer, prompt_of({"messages": messages}), limit)


def _pair_test(maker: Callable[[random.Random], tuple[str, str]]) -> Callable[..., bool]:
    def test(model: Llama, tokenizer: Tokenizer, rng: random.Random) -> bool:
        question, answer = maker(rng)
        return ask(model, tokenizer, question, 80) == answer

    return test


def _json_test(model: Llama, tokenizer: Tokenizer, rng: random.Random) -> bool:
    """The record must parse and be the right one (a free invention must only parse)."""
    question, answer = synthetic.json_record(rng)
    try:
        said: Any = json.loads(ask(model, tokenizer, question, 80))
    except ValueError:
        return False
    return said == json.loads(answer) or "Invent" in question or "a person" in question[-30:]


def _tool_test(model: Llama, tokenizer: Tokenizer, rng: random.Random) -> bool:
    """The first call must be exactly the expected one."""
    while True:
        conversation = synthetic.tool_call(rng)
        messages = conversation["messages"]
        first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
        if "tool_calls" in messages[first]:
            break
    tools = conversation["tools"]
    wanted = synthetic.render({"messages": messages[: first + 1], "tools": tools})
    prompt = prompt_of({"messages": messages[:first], "tools": tools})
    return prompt + generate(model, tokenizer, prompt, 80) + "<|im_end|>\n" == wanted


TESTS: dict[str, Callable[..., bool]] = {
    "arithmetic": _pair_test(synthetic.arithmetic),
    "word problems": _pair_test(synthetic.word_problem),
    "colours": _pair_test(synthetic.colour),
    "animals": _pair_test(synthetic.animal),
    "facts": _pair_test(synthetic.fact),
    "calendar": _pair_test(synthetic.calendar),
    "counting": _pair_test(synthetic.counting),
    "words": _pair_test(synthetic.words),
    "JSON records": _json_test,
    "tool calls": _tool_test,
}


def accuracy(model: Llama, tokenizer: Tokenizer, trials: int = 40) -> dict[str, float]:
    """The share of right greedy answers of each skill."""
    result = {}
    for name, test in TESTS.items():
        rng = random.Random(f"{SEED}/{name}")
        result[name] = sum(test(model, tokenizer, rng) for _ in range(trials)) / trials
    return result
