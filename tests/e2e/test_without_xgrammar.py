"""Structured output where the extra xgrammar is not installed."""

from __future__ import annotations

import os
import subprocess
import sys

# `sitecustomize` of all processes: they do not find the package.
HIDE = """
from importlib.machinery import PathFinder

find_spec = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name == "xgrammar" else find_spec(name, *rest)
"""
PROGRAM = """
import json

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, RequestError
from octavo.sampling_params import StructuredOutputsParams

with pytest.raises(ConfigError, match=r"guided_decoding_backend='xgrammar' .*octavo\\[xgrammar\\]"):
    LLM(model="/nowhere", structured_outputs_config={"backend": "xgrammar"})
with pytest.raises(RequestError, match=r"backend='xgrammar' .*octavo\\[xgrammar\\]"):
    StructuredOutputsParams(regex="a", backend="xgrammar")

digit = {"type": "integer", "maximum": 9}
schema = {"type": "object", "properties": {"a": digit}, "required": ["a"]}
tag = {"type": "tag", "begin": "<t>", "content": {"type": "regex", "pattern": "[ab]"}, "end": "!"}
wanted = [
    {"json": schema},
    {"grammar": 'root ::= "yes"\\n  | "no"'},
    {"structural_tag": {"type": "structural_tag", "format": tag}},
    {"json": {"type": "array", "uniqueItems": True}},
    {"grammar": 'start: "a" "b'},
]
params = [
    SamplingParams(seed=1, max_tokens=40, structured_outputs=StructuredOutputsParams(**fields))
    for fields in wanted
]
with LLM(max_model_len=128) as llm:
    answers = [answer.outputs[0] for answer in llm.generate(["Once"] * len(wanted), params)]
assert json.loads(answers[0].text)["a"] <= 9
assert answers[1].text in ("yes", "no")
assert answers[2].text in ("<t>a!", "<t>b!")
for answer in answers[3:]:
    assert answer.finish_reason == "error"
    assert "No grammar for this: llguidance: " in answer.stop_reason
assert answers[3].stop_reason.endswith("pip install 'octavo[xgrammar]'")
assert "xgrammar" not in answers[4].stop_reason  # xgrammar does not read Lark either
print("done")
"""


def test_llguidance_serves_all_forms_and_errors_name_the_extra(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment
    )
    assert done.stdout == "done\n", done.stderr
