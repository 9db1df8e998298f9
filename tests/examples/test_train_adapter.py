"""examples/train_adapter.py: PEFT trains an adapter that Octavo serves."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.model_tools.adapter import describe_adapter
from octavo.models.hub import resolve_model

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    importlib.util.find_spec("peft") is None,
    reason="peft is not installed; it belongs to the extra dev",
)
def test_train_adapter(tmp_path):
    chats = tmp_path / "chats.jsonl"
    question = {"role": "user", "content": "Hello!"}
    answers = [{"role": "assistant", "content": "Arr! " * (i % 3 + 1)} for i in range(20)]
    lines = [json.dumps({"messages": [question, answer]}) for answer in answers]
    chats.write_text("\n".join(lines))
    command = [sys.executable, "examples/train_adapter.py", str(resolve_model("octavo/stories"))]
    command += [str(chats), str(tmp_path / "arr"), "--steps", "5"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    words = done.stdout.split()
    before, after = float(words[words.index("before,") - 1]), float(words[-2])
    assert after < before - 1
    described = describe_adapter(tmp_path / "arr")
    assert described["parameters"] == 86_016
    assert set(described["modules"]) == {"q_proj", "k_proj", "v_proj", "o_proj"}
