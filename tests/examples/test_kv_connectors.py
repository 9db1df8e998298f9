"""Examples of KV connectors, run as by users."""

import re
import subprocess
import sys
from pathlib import Path

from octavo import LLM, SamplingParams

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*words):
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_disaggregated_prefill_as_it_is_written_for_vllm(tmp_path):
    text = (EXAMPLES / "disaggregated_prefill.py").read_text()
    script = tmp_path / "disaggregated_prefill.py"
    script.write_text(re.sub(r"^from octavo", "from vllm", text, flags=re.M))
    printed = run("-m", "octavo.compat.vllm", script)
    assert re.findall(r"(\d+) of \d+ prompt tokens were loaded", printed) == ["160"] * 3
    sys.path.insert(0, str(EXAMPLES))
    try:
        from disaggregated_prefill import PROMPTS
    finally:
        sys.path.remove(str(EXAMPLES))
    llm = LLM("octavo/stories", max_model_len=256, num_gpu_blocks_override=60)
    answers = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20), use_tqdm=False)
    for answer in answers:
        assert f"generated text: {answer.outputs[0].text!r}" in printed
    llm.llm_engine.shutdown()


def test_kv_offload():
    printed = run(EXAMPLES / "kv_offload.py")
    there = re.findall(r"(\d+) of 1080 prompt tokens were there", printed)
    assert there == ["0", "1072", "1072", "1072"]


def test_a_connector_of_ones_own():
    first, text, second, again = run(EXAMPLES / "my_kv_connector.py").splitlines()
    assert first.startswith("0 of 144 ")
    assert second.startswith("143 of 144 ")
    assert text == again
