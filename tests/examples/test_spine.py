"""examples/spine.py runs, and its answers are those of `LLM`."""

import re
import subprocess
import sys
from pathlib import Path

from octavo import LLM, SamplingParams

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_spine_gives_the_answers_of_llm():
    command = [sys.executable, str(EXAMPLES / "spine.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    sys.path.insert(0, str(EXAMPLES))
    try:
        from spine import MAX_TOKENS, PROMPTS
    finally:
        sys.path.remove(str(EXAMPLES))
    llm = LLM("octavo/stories", device="cpu", max_model_len=256, num_gpu_blocks_override=60)
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    answers = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.llm_engine.shutdown()
    texts = [answer.outputs[0].text for answer in answers]
    assert re.findall(r"^-> (.*)$", done.stdout, re.M) == [repr(text) for text in texts]
    # Chunked prefill, continuous batching, and a prefix that the second request finds.
    assert "tokens computed: A 16 " in done.stdout
    assert "tokens computed: A 1, B 10 " in done.stdout
    assert "B ends: length; 16 tokens cached" in done.stdout
