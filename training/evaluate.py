"""Evaluation of a trained model: sample texts, and its accuracy on new questions."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer

from training import facts, synthetic
from training.model import Llama
from training.synthetic import Conversation
from training.tokenizer import EOS_TOKEN_IDS

# Training chunks are numbered from 0 with another kind of seed, so these draws are new. But the
# number of small sums is low: training has seen most of them.
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


def question_prompt(question: str) -> str:
    return prompt_of({"messages": [{"role": "user", "content": question}]})


def ask(model: Llama, tokenizer: Tokenizer, question: str, limit: int = 200) -> str:
    return generate(model, tokenizer, question_prompt(question), limit)


Judge = Callable[[str], bool]
Case = tuple[str, Judge]


def _pair_case(maker: Callable[[random.Random], tuple[str, str]]) -> Callable[..., Case]:
    def case(rng: random.Random) -> Case:
        question, answer = maker(rng)
        return question_prompt(question), lambda said: said == answer

    return case


def _list_case(rng: random.Random) -> Case:
    """Require the requested number of items, all of the kind and all different."""
    question, example = synthetic.listing(rng)
    # The longest matching name: "animals" is part of "farm animals" too.
    words = facts.LISTS[max((name for name in facts.LISTS if name in question), key=len)]
    count = len(re.findall(r"[a-z]+", example.replace(" and ", " "), re.IGNORECASE))

    def judge(said: str) -> bool:
        found = re.findall(r"[a-z]+", said.replace(" and ", " ").lower())
        return len(found) == len(set(found)) == count and set(found) <= set(words)

    return question_prompt(question), judge


def _json_case(rng: random.Random) -> Case:
    """Require a record that parses and is right (an invented one must only parse)."""
    question, answer = synthetic.json_record(rng)

    def judge(text: str) -> bool:
        try:
            said: Any = json.loads(text)
        except ValueError:
            return False
        return said == json.loads(answer) or "Invent" in question or "a person" in question[-30:]

    return question_prompt(question), judge


def _tool_case(rng: random.Random) -> Case:
    """Require a first call that is exactly the expected one."""
    while True:
        conversation = synthetic.tool_call(rng)
        messages = conversation["messages"]
        first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
        if "tool_calls" in messages[first]:
            break
    tools = conversation["tools"]
    wanted = synthetic.render({"messages": messages[: first + 1], "tools": tools})
    prompt = prompt_of({"messages": messages[:first], "tools": tools})
    return prompt, lambda said: prompt + said + "<|im_end|>\n" == wanted


# Each makes a prompt, and a judge of the answer.
CASES: dict[str, Callable[[random.Random], Case]] = {
    "arithmetic": _pair_case(synthetic.arithmetic),
    "word problems": _pair_case(synthetic.word_problem),
    "lists": _list_case,
    "colours": _pair_case(synthetic.colour),
    "animals": _pair_case(synthetic.animal),
    "facts": _pair_case(synthetic.fact),
    "calendar": _pair_case(synthetic.calendar),
    "counting": _pair_case(synthetic.counting),
    "words": _pair_case(synthetic.words),
    "JSON records": _json_case,
    "tool calls": _tool_case,
}


def accuracy(model: Llama, tokenizer: Tokenizer, trials: int = 40) -> dict[str, float]:
    """Return the share of right greedy answers of each skill."""
    result = {}
    for name, make in CASES.items():
        rng = random.Random(f"{SEED}/{name}")
        cases = [make(rng) for _ in range(trials)]
        right = sum(judge(generate(model, tokenizer, prompt, 80)) for prompt, judge in cases)
        result[name] = right / trials
    return result
