"""Unchanged script for vLLM, run by `python -m octavo.compat.vllm`."""

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import octavo
from octavo.compat import vllm
from octavo.frontend.llm_engine import LLMEngine

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
        from vllm import ModelRegistry
    except ImportError as error:
        print(error)
    try:
        from vllm.model_executor.model_loader import DefaultModelLoader
    except ImportError as error:
        print(error)
    # Other libraries ask so whether vLLM is there.
    print(find_spec("vllm") is not None)
"""


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", "octavo.compat.vllm", *words],
        capture_output=True,
        text=True,
        timeout=250,
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
        "Octavo does not have vllm.ModelRegistry (vLLM's registry of model classes): write it for "
        "Octavo's own interface (docs/architecture.md, Recipes), or leave it out.",
        "Octavo does not have vllm.model_executor.model_loader.DefaultModelLoader (part of "
        "vllm.model_executor.model_loader, vLLM's loaders of weights): "
        "Octavo reads safetensors files and packs them once; see load_format in docs/settings.md.",
        "True",
    ]


def test_what_cannot_be_run_is_said(tmp_path, capsys, monkeypatch):
    assert vllm.main([str(tmp_path / "absent.py")]) == 2
    assert "there is no script" in capsys.readouterr().err
    assert vllm.main([]) == vllm.main(["--help"]) == 2
    assert "usage" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    with pytest.raises(RuntimeError, match="already imported"):
        vllm.install()


@pytest.fixture
def installed(monkeypatch):
    """Make `vllm` Octavo, for one test."""
    for name in vllm._NAMES:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "vllm")
    monkeypatch.setattr(LLMEngine, "metrics_prefix", "octavo")  # restored after the test
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    vllm.install()


def test_pooling_models(installed, capsys):
    from vllm import LLM, EmbeddingRequestOutput, PoolingParams, PoolingRequestOutput
    from vllm.outputs import ClassificationOutput, ScoringRequestOutput
    from vllm.pooling_params import PoolingParams as Same
    from vllm.utils.print_utils import print_embeddings

    assert (LLM, PoolingParams, Same) == (octavo.LLM, octavo.PoolingParams, octavo.PoolingParams)
    assert EmbeddingRequestOutput is octavo.EmbeddingRequestOutput
    assert PoolingRequestOutput[ClassificationOutput] == octavo.ClassificationRequestOutput
    assert ScoringRequestOutput is octavo.ScoringRequestOutput
    print_embeddings([1.0, 2.0, 3.0, 4.0, 5.0])
    assert capsys.readouterr().out == "Embeddings: [1.0, 2.0, 3.0, 4.0, ...] (size=5)\n"


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("from vllm import ModelRegistry", "registry of model classes"),
        (
            "from vllm.lora.layers import BaseLayerWithLoRA",
            r"vllm.lora.layers \(part of vllm.lora, vLLM's layers of adapters",
        ),
        (
            "import vllm.v1.core.sched.output",
            r"sched \(part of vllm.v1.core, vLLM's internal scheduler",
        ),
        ("from vllm.config import SamplingParams", "is in vllm and vllm.sampling_params, not in"),
        ("from vllm.utils import get_ip", "Octavo's get_ip is in vllm.utils.network_utils"),
        ("from vllm import LMM", "knows no name vllm.LMM of vLLM .*; did you mean vllm.LLM?"),
        ("import vllm.frobnicate", "knows no name .* of vLLM .*; check the spelling"),
    ],
)
def test_an_import_of_what_is_absent_says_what_it_is(installed, statement, said):
    with pytest.raises(ImportError, match=said) as error:
        exec(statement)
    assert str(error.value).count(". ") == 0


def test_a_name_that_is_absent_is_no_attribute(installed):
    import vllm as module

    assert not hasattr(module, "ModelRegistry")
    with pytest.raises(AttributeError, match=r"does not have vllm\.ModelRegistry"):
        _ = module.ModelRegistry
    assert importlib.import_module("vllm.envs").VLLM_HTTP_TIMEOUT_KEEP_ALIVE == 5
    with pytest.raises(AttributeError, match=r"VLLM_FROBNICATE .* is not set"):
        _ = importlib.import_module("vllm.envs").VLLM_FROBNICATE


SERVER = """
import http.server, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(404)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "there is nothing here."}}')
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
import httpx; httpx.get(f"http://127.0.0.1:{server.server_port}").raise_for_status()
""".strip().replace("\n", "\n    ")


@pytest.mark.parametrize(
    "start",
    [
        "import threading; threading.Thread(target=f).start()",
        "import multiprocessing as m; m.get_context('fork').Process(target=f).start()",
    ],
)
def test_a_sentence_of_a_thread_and_of_a_process(tmp_path, start):
    script = tmp_path / "script.py"
    script.write_text(f"def f(): import time; time.sleep(0.2); import vllm.lora.ops\n{start}\n")
    done = run(str(script))
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(f"{script}:1: error: Octavo does not have vllm.lora.ops")


def test_a_server_that_refuses(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(f"if True:\n    {SERVER}")
    done = run(str(script))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("the server answers 404: there is nothing here.")
    assert "Traceback" not in done.stderr


def test_flags_of_a_script_and_of_the_engine():
    parser = vllm.FlexibleArgumentParser()
    parser.add_argument("--enable-ssl-refresh", action="store_true")
    vllm.EngineArgs.add_cli_args(parser)
    parser.add_argument("--seed", default="x")
    args = parser.parse_args([])
    assert (args.enable_ssl_refresh, args.seed) == (False, "x")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "from vllm.lora.layers import BaseLayerWithLoRA",
            "vllm.lora.layers (part of vllm.lora, vLLM's layers of adapters",
        ),
        ("import vllm; vllm.ModelRegistry", "does not have vllm.ModelRegistry"),
        ("import vllm; vllm.LLM(cpu_offload_gb=4)", "quantization"),
        ("import frobnicate", "the package frobnicate is not installed"),
    ],
)
def test_a_script_ends_in_one_sentence(tmp_path, line, said):
    script = tmp_path / "script.py"
    script.write_text(f"\n{line}\n")
    done = run(str(script))
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(f"{script}:2: error: ")
    assert said in sentence


def test_modules_are_where_the_document_says():
    text = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text()
    rows = re.findall(r"^\| `(vllm\.[\w.]+)` \| `(octavo[\w.]*)` \|$", text, re.M)
    assert len(rows) == 9
    for theirs, ours in rows:
        module = importlib.import_module(ours)
        for name, value in vllm._MODULES[theirs].items():
            if name != "PromptType":  # for annotations only
                assert getattr(module, name) is value


def test_every_name_is_there(installed):
    vllm.install()
    for name, attributes in vllm._MODULES.items():
        module = importlib.import_module(name)
        for attribute in attributes:
            assert getattr(module, attribute) is attributes[attribute]
