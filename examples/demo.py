"""`make demo`: built-in models write stories, call a function, see a picture, and hear digits."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from picture import draw

from octavo import LLM, SamplingParams

STORY = (
    "Once upon a time, there was a little girl named Lily. She had a small dog named Max. "
    "One sunny day, Lily and Max went to the park to play with a red ball. Suddenly, they saw"
)
QUESTION = "What is 3 + 4?"
PRODUCT = "What is 12 * 7?"
MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
MANY = 64
SPEECH = Path(__file__).parents[1] / "tests" / "speech" / "digits.wav"


def params(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.7, top_p=0.95, seed=seed, max_tokens=300)


def stream(llm: LLM, prompt: str, params: SamplingParams, *, is_text: bool) -> str:
    """Print the answer as it arrives, then a line of figures; return the answer."""
    started = time.perf_counter()
    first = None
    tokens = cached = 0
    text = ""
    for output in llm.stream(prompt, params, add_special_tokens=is_text):
        if first is None:
            first = time.perf_counter() - started
        tokens += len(output.outputs[0].token_ids)
        cached = output.num_cached_tokens
        text += output.outputs[0].text
        sys.stdout.write(output.outputs[0].text)
        sys.stdout.flush()
    total = time.perf_counter() - started
    rate = (tokens - 1) / (total - (first or 0)) if tokens > 1 else 0.0
    print(
        f"\n  [{tokens} tokens, first after {1000 * (first or 0):.0f} ms, "
        f"{rate:,.0f} tokens/s, {cached} prompt tokens from the cache]\n"
    )
    return text


def ask_with_a_tool(llm: LLM, question: str) -> None:
    """Print the call of a function that a question leads to, its result, and the answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    greedy = SamplingParams(temperature=0, max_tokens=60)
    print(f"user: {question}")
    for _ in range(3):
        (output,) = llm.chat(messages, greedy, tools=[MULTIPLY], use_tqdm=False)
        message = output.outputs[0].message
        if not message.tool_calls:
            print(f"assistant: {message.content}\n")
            return
        messages.append(asdict(message))
        for call in message.tool_calls:
            numbers = json.loads(call.function.arguments)
            result = str(numbers["a"] * numbers["b"])
            print(f"  call: {call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def see_and_hear() -> None:
    """Print what a model says about a picture, and what another one hears in a sound."""
    question = "Describe the picture."
    with LLM("octavo/stories-eyes") as llm:
        content = [
            {"type": "image_pil", "image_pil": draw()},
            {"type": "text", "text": question},
        ]
        greedy = SamplingParams(temperature=0, max_tokens=80)
        (output,) = llm.chat([{"role": "user", "content": content}], greedy, use_tqdm=False)
        print(f"user: (a picture of three shapes) {question}")
        print(f"assistant: {output.outputs[0].text}\n")
    with LLM("octavo/spoken-words") as llm:
        (transcript,) = llm.transcribe(SPEECH)
        print(f"{SPEECH.name}, {transcript.duration:.1f} s of speech: {transcript.text}\n")


def main() -> None:
    started = time.perf_counter()
    with LLM() as llm:
        print(f"ready in {time.perf_counter() - started:.1f} s\n")
        print(STORY, end="")
        alone = stream(llm, STORY, params(seed=7), is_text=True)

        print(f"user: {QUESTION}\nassistant: ", end="")
        chat = llm.render_chat([{"role": "user", "content": QUESTION}])
        stream(llm, chat, SamplingParams(temperature=0, max_tokens=40), is_text=False)

        ask_with_a_tool(llm, PRODUCT)

        see_and_hear()

        print(f"The same story among {MANY} that are written at once:")
        started = time.perf_counter()
        seeds = [params(seed) for seed in range(7, 7 + MANY)]
        outputs = llm.generate([STORY] * MANY, seeds, use_tqdm=False)
        total = time.perf_counter() - started
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        same = outputs[0].outputs[0].text == alone
        print(
            f"  [{tokens:,} tokens, {tokens / total:,.0f} tokens/s; "
            f"the story is {'the same, to the letter' if same else 'another one'}]"
        )


if __name__ == "__main__":
    main()
