"""`make demo`: the built-in model writes a story, answers a question, and writes many at once."""

from __future__ import annotations

import sys
import time

from octavo import LLM, SamplingParams

STORY = (
    "Once upon a time, there was a little girl named Lily. She had a small dog named Max. "
    "One sunny day, Lily and Max went to the park to play with a red ball. Suddenly, they saw"
)
QUESTION = "What is 3 + 4?"
MANY = 64


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


def main() -> None:
    started = time.perf_counter()
    with LLM() as llm:
        print(f"ready in {time.perf_counter() - started:.1f} s\n")
        print(STORY, end="")
        alone = stream(llm, STORY, params(seed=7), is_text=True)

        print(f"user: {QUESTION}\nassistant: ", end="")
        chat = llm.render_chat([{"role": "user", "content": QUESTION}])
        stream(llm, chat, SamplingParams(temperature=0, max_tokens=40), is_text=False)

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
