"""Offline chat with the built-in model, streamed token by token."""

from octavo import LLM, SamplingParams

if __name__ == "__main__":
    with LLM() as llm:
        messages = [{"role": "user", "content": "Tell me a story about a cat."}]
        prompt = llm.render_chat(messages)
        params = SamplingParams(temperature=0.7, seed=1, max_tokens=120)
        for output in llm.stream(prompt, params, add_special_tokens=False):
            print(output.outputs[0].text, end="", flush=True)
        print()
