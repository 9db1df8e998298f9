"""Offline generation: vLLM's example with the import changed."""

from octavo import LLM, SamplingParams

prompts = [
    "Once upon a time, there was a little girl named",
    "The dog and the cat went to",
    "One day, Tom found a big",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=40)

if __name__ == "__main__":
    llm = LLM(model="octavo/stories")
    for output in llm.generate(prompts, sampling_params):
        print(f"Prompt: {output.prompt!r}\nGenerated text: {output.outputs[0].text!r}\n")
