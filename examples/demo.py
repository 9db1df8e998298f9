"""`make demo`: the built-in model writes a story and answers a question, streamed."""

from __future__ import annotations

import sys
import time

from octavo import LLM, SamplingParams

STORY = (
    "Once upon a time, there was a little girl named Lily. She had a small dog named Max. "
    "One sunny day, Lily and Max went to the park to play with a red ball. Suddenly, they saw"
)
QUESTION = "What is 3 + 4?"


def stream(llm: LLM, prompt: str, params: SamplingParams, *, is_text: bool) -> None:
    """Prints the answer as it comes, then a line of figures."""
    started = time.perf_counter()
    first = None
    tokens = cached = 0
    for output in llm.stream(prompt, params, add_special_tokens=is_text):
        if first is None:
            first = time.perf_counter() - started
        tokens += len(output.outputs[0].token_ids)
        cached = output.num_cached_tokens
        sys.stdout.write(output.outputs[0].text)
        sys.stdout.flush()
    total = time.perf_counter() - started
    rate = (tokens - 1) / (total - (first or 0)) if tokens > 1 else 0.0
    print(
        f"\n  [{tokens} tokens, first after {1000 * (first or 0):.0f} ms, "
        f"{rate:.0f} tokens/s, {cached} prompt tokens from the cache]\n"
    )


def main() -> None:
    started = time.perf_counter()
    with LLM() as llm:
        print(f"ready in {time.perf_counter() - started:.1f} s\n")
        for seed in (7, 8):  # the second time, the prompt comes from the prefix cache
            params = SamplingParams(temperature=0.7, top_p=0.95, seed=seed, max_tokens=120)
            print(STORY, end="")
            stream(llm, STORY, params, is_text=True)
        print(f"user: {QUESTION}\nassistant: ", end="")
        chat = llm.render_chat([{"role": "user", "content": QUESTION}])
        stream(llm, chat, SamplingParams(temperature=0, max_tokens=40), is_text=False)


if __name__ == "__main__":
    main()
