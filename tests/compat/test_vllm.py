"""An unchanged script for vLLM, run by `python -m octavo.compat.vllm`."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from octavo.compat import vllm
from octavo.engine.llm_engine import LLMEngine

SCRIPT = """
import sys
from importlib.util import find_spec

from helper import PROMPT
from vllm import LLM, EngineArgs, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.inputs import TokensPrompt
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="octavo/stories")
    parser.add_argument("--answer-len", type=int, default=4)
    args = vars(parser.parse_args())
    params = SamplingParams(temperature=0, max_tokens=args.pop("answer_len"))
    llm = LLM(**{**args, "disable_log_stats": False})
    choice = StructuredOutputsParams(choice=["yes", "no"])
    for output in llm.generate([PROMPT, TokensPrompt(prompt_token_ids=[5])], params):
        print("tokens", len(output.outputs[0].token_ids))
    metrics = {metric.name: metric for metric in llm.get_metrics()}
    print(metrics["vllm:generation_tokens"].value, "generated", len(metrics) > 20)
    del llm
    cleanup_dist_env_and_memory()
    try:
        from vllm import PoolingParams
    except ImportError as error:
        print(error)
    try:
        import vllm.model_executor
    except ImportError as error:
        print(error)
    # Other libraries ask so whether vLLM is there.
    print(find_spec("vllm") is not None, find_spec("vllm.lora") is None)
"""


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", "octavo.compat.vllm", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_script_runs_unchanged(tmp_path):
    (tmp_path / "helper.py").write_text("PROMPT = 'Once upon a time'\n")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = run(
        str(script), "--max_model_len", "128", "--tensor-parallel-size=1", "--answer_len", "3"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "tokens 3",
        "tokens 3",
        "6 generated True",
        f"cannot import name 'PoolingParams' from 'vllm' ({vllm.__file__})",
        "No module named 'vllm.model_executor'",
        "True True",
    ]


def test_what_cannot_be_run_is_said(tmp_path, capsys, monkeypatch):
    assert vllm.main([str(tmp_path / "absent.py")]) == 2
    assert "there is no script" in capsys.readouterr().err
    assert vllm.main([]) == vllm.main(["--help"]) == 2
    assert "usage" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    with pytest.raises(RuntimeError, match="imported already"):
        vllm.install()


def test_modules_are_where_the_document_says():
    text = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
    rows = re.findall(r"^\| `(vllm\.[\w.]+)` \| `(octavo[\w.]*)` \|$", text, re.M)
    assert len(rows) == 9
    for theirs, ours in rows:
        module = importlib.import_module(ours)
        for name, value in vllm._MODULES[theirs].items():
            if name != "PromptType":  # for annotations only
                assert getattr(module, name) is value


def test_every_name_is_there(monkeypatch):
    for name in vllm._MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.setattr(LLMEngine, "metrics_prefix", "octavo")  # it is put back after the test
    vllm.install()
    vllm.install()
    for name, attributes in vllm._MODULES.items():
        module = importlib.import_module(name)
        for attribute in attributes:
            assert getattr(module, attribute) is attributes[attribute]
