import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

import octavo
from octavo import cli
from octavo.config import (
    EngineConfig,
    ServerConfig,
    SpeculativeConfig,
    config_fields,
    section_fields,
)
from octavo.errors import EngineDeadError, RequestError
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server import client as client_module


@pytest.fixture
def served(monkeypatch):
    """What `octavo serve` would have served."""
    seen = {}
    module = SimpleNamespace(
        run_server=lambda server, engine: seen.update(server=server, engine=engine) or 0
    )
    monkeypatch.setitem(sys.modules, "octavo.server.run", module)
    return seen


def example(field):
    """A value other than the default, as it is typed, and as the config holds it."""
    if field.choices is not None:
        other = [c for c in field.choices if c != field.default] or [field.default]
        return [str(other[0])], other[0]
    if field.type is bool:
        return (["no"] if field.default else []), not field.default
    if field.type == list[str]:
        return ["a", "b"], ["a", "b"]
    if field.name.endswith("_bytes"):
        return ["2M"], 2 * 2**20
    if field.name == "speculative_config":
        return ['{"method": "suffix"}'], SpeculativeConfig(method="suffix")
    if field.name == "gpu_memory_utilization":
        return ["0.5"], 0.5
    if "float" in str(field.type):
        return ["3.5"], 3.5
    if "int" in str(field.type):
        return ["7777" if "batched" in field.name else "77"], (
            7777 if "batched" in field.name else 77
        )
    return ["text"], "text"


ALL_FIELDS = [*config_fields(EngineConfig), *section_fields(ServerConfig, "server")]


@pytest.mark.parametrize("field", ALL_FIELDS, ids=lambda f: f.name)
def test_every_setting_has_a_flag(served, field):
    words, value = example(field)
    flag = field.flag
    if field.type is bool:
        flag = flag.replace("--", "--no-", 1) if words else flag
        words = []
    for spelling in (flag, "--" + flag[2:].replace("-", "_")):
        served.clear()
        assert cli.main(["serve", spelling, *words]) == 0
        config = served["server" if field.section == "server" else "engine"]
        section = config if field.section == "server" else getattr(config, field.section)
        assert getattr(section, field.name) == value


def test_without_flags_all_is_default(served):
    assert cli.main(["serve"]) == 0
    assert served["engine"] == EngineConfig()
    assert served["server"] == ServerConfig()


def test_the_model_is_an_argument_or_a_flag(served):
    for argv in (["serve", "org/m"], ["serve", "--model", "org/m"], ["serve", "--model=org/m"]):
        assert cli.main([*argv, "--max-model-len", "64"]) == 0
        assert served["engine"].model.model == "org/m"
        assert served["engine"].model.max_model_len == 64


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["serve", "a", "--model", "b"], "Two models"),
        (["serve", "--max-model-lenn", "5"], "did you mean --max-model-len?"),
        (["serve", "--zzzz"], "unknown flag --zzzz"),
        (["serve", "a", "b"], "unexpected argument 'b'"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "--port", "70000"], "port=70000"),
        (["serve", "--dtype", "int3"], "--dtype"),
        (["serve", "--kv-cache-memory-bytes", "4X"], "kv_cache_memory_bytes='4X'"),
        (["serve", "--max-model-len", "0"], "max_model_len=0"),
        (["serve", "--max-num-batched-tokens", "4"], "max_num_batched_tokens=4"),
        (["serve", "--max-model"], "unknown flag"),
        (["serv"], "serv"),
        (["run", "a", "b", "c"], "quotes"),
        (["run", "--model", "m", "a", "b"], "quotes"),
        (["run", "--temperature", "-1", "x"], "temperature"),
        (["run", "--block-size", "5", "x"], "--block-size"),
        (["chat", "--frobnicate"], "--frobnicate"),
    ],
)
def test_wrong_usage_is_one_clear_line(served, capsys, argv, said):
    assert cli.main(argv) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo: error: ")
    assert said in line
    assert not served


def test_no_command_shows_the_help(capsys):
    assert cli.main([]) == 2
    assert "serve" in capsys.readouterr().out
    assert cli.main(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for field in ALL_FIELDS:
        assert field.flag in text


def test_failures_are_one_line_and_status_1(monkeypatch, capsys):
    def fail(server, engine):
        raise EngineDeadError("out of\nmemory")

    monkeypatch.setitem(sys.modules, "octavo.server.run", SimpleNamespace(run_server=fail))
    assert cli.main(["serve"]) == 1
    assert capsys.readouterr().err == "octavo: error: out of memory\n"


def test_version_and_module():
    done = subprocess.run([sys.executable, "-m", "octavo", "--version"], capture_output=True)
    assert done.stdout.decode().strip() == f"octavo {octavo.__version__}"


def test_the_command_line_is_light():
    code = "import sys, octavo.cli; octavo.cli.build_parser(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert not loaded & {"torch", "fastapi", "pydantic", "httpx", "uvicorn", "rich", "transformers"}


# run


class FakeLLM:
    made = None
    error = None

    def __init__(self, **kwargs):
        self.kwargs = kwargs
        self.prompts = []
        self.params = []
        self.special = []
        self.closed = False
        FakeLLM.made = self

    def stream(self, prompt, params, *, add_special_tokens=True):
        self.prompts.append(prompt)
        self.params.append(params)
        self.special.append(add_special_tokens)
        if FakeLLM.error is not None:
            raise FakeLLM.error
        for text, reason in (("Hel", None), ("lo", "stop")):
            answer = CompletionOutput(0, text, [1, 2], finish_reason=reason)
            yield RequestOutput(
                "0", prompt, [1] * 20, None, [answer], bool(reason), num_cached_tokens=16
            )

    def get_default_sampling_params(self):
        return SamplingParams(temperature=0.6, top_p=0.7)

    def render_chat(self, messages):
        return json.dumps(messages)

    def shutdown(self):
        self.closed = True


@pytest.fixture
def llm(monkeypatch):
    monkeypatch.setitem(sys.modules, "octavo.llm", SimpleNamespace(LLM=FakeLLM))
    FakeLLM.made = FakeLLM.error = None
    return lambda: FakeLLM.made


def test_run_streams_and_ends_with_figures(llm, capsys):
    assert cli.main(["run", "Once upon", "--max-tokens", "9", "--seed", "3", "--top_k", "4"]) == 0
    out, err = capsys.readouterr()
    assert out == "Hello\n"
    (figures,) = err.splitlines()
    assert figures.startswith("[4 tokens | first token ")
    assert figures.endswith(" tokens/s | 16 of 20 prompt tokens cached]")
    assert llm().kwargs == {"seed": 3}
    assert llm().prompts == ["Once upon"]
    (params,) = llm().params
    assert (params.max_tokens, params.seed, params.top_k) == (9, 3, 4)
    assert (params.temperature, params.top_p) == (0.6, 0.7)  # the model's own
    assert llm().closed


def test_run_tells_the_model_from_the_prompt(llm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))
    monkeypatch.setattr("builtins.input", lambda *_: (_ for _ in ()).throw(EOFError))
    for argv, model, prompts in [
        (["m", "hello"], "m", ["hello"]),
        (["hello"], None, ["hello"]),
        (["Who are you?"], None, ["Who are you?"]),
        (["yes/no or maybe"], None, ["yes/no or maybe"]),
        (["--model", "m", "org/name"], "m", ["org/name"]),
        (["org/name"], "org/name", []),
        (["octavo/stories"], "octavo/stories", []),
        (["folder"], "folder", []),
        ([str(tmp_path)], str(tmp_path), []),
        ([], None, []),
    ]:
        assert cli.main(["run", *argv]) == 0
        assert llm().kwargs.get("model") == model
        assert llm().prompts == prompts


def test_run_without_prompt_is_a_chat_with_memory(llm, monkeypatch, capsys):
    lines = iter(["hi", "  ", "again"])
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)
    assert cli.main(["run"]) == 0
    first, second = [json.loads(p) for p in llm().prompts]
    assert first == [{"role": "user", "content": "hi"}]
    assert second == [
        *first,
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "again"},
    ]
    assert llm().special == [False, False]
    assert capsys.readouterr().out == "Hello\nHello\n"


def test_run_says_what_is_wrong_with_a_prompt(llm, capsys):
    FakeLLM.error = RequestError("the prompt is too long")
    assert cli.main(["run", "x"]) == 1
    assert capsys.readouterr().err == "octavo: error: the prompt is too long\n"
    assert llm().closed


# chat, complete


class FakeClient:
    made = None
    error = None

    def __init__(self, url, api_key=None, model=None):
        self.url, self.api_key, self.model = url, api_key, model
        self.asked = []
        FakeClient.made = self

    def chat(self, messages, params):
        self.asked.append(([dict(m) for m in messages], params))
        if FakeClient.error is not None:
            error, FakeClient.error = FakeClient.error, None
            raise error
        yield from ("Hel", "lo")

    def complete(self, prompt, params):
        self.asked.append((prompt, params))
        yield from (" upon", " a time")

    def close(self):
        self.asked.append("closed")


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(client_module, "Client", FakeClient)
    monkeypatch.delenv("OCTAVO_API_KEY", raising=False)
    FakeClient.made = FakeClient.error = None
    return lambda: FakeClient.made


@pytest.fixture
def typed(monkeypatch):
    def feed(*lines):
        rest = iter(lines)

        def read(prompt):
            for line in rest:
                return line
            raise EOFError

        monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))
        monkeypatch.setattr("builtins.input", read)

    return feed


def test_one_question(client, capsys):
    argv = ["chat", "-q", "hi", "--url", "http://x/v1", "--model", "m", "--api-key", "k"]
    argv += ["--system-prompt", "Be brief.", "--temperature", "0", "--seed", "5", "--stop", "a"]
    assert cli.main([*argv, "--stop", "b"]) == 0
    made = client()
    assert (made.url, made.api_key, made.model) == ("http://x/v1", "k", "m")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert made.asked == [
        (messages, {"temperature": 0.0, "stop": ["a", "b"], "seed": 5}),
        "closed",
    ]
    assert capsys.readouterr().out == "Hello\n"


def test_one_completion(client, capsys, monkeypatch):
    monkeypatch.setenv("OCTAVO_API_KEY", "from-env")
    assert cli.main(["complete", "-q", "Once", "--max-tokens", "5"]) == 0
    assert client().asked == [("Once", {"max_tokens": 5}), "closed"]
    assert client().api_key == "from-env"
    assert client().url == "http://localhost:8000/v1"
    assert capsys.readouterr().out == " upon a time\n"


def test_a_chat_goes_on_after_an_error(client, typed, capsys):
    typed("one", "two", "three")
    FakeClient.error = client_module.ServerError("busy")
    assert cli.main(["chat"]) == 0
    histories = [[m["content"] for m in asked[0]] for asked in client().asked[:-1]]
    assert histories == [["one"], ["two"], ["two", "Hello", "three"]]
    assert capsys.readouterr().err == "octavo: error: busy\n"


def test_one_question_that_fails_is_status_1(client, capsys):
    FakeClient.error = client_module.ServerError("busy")
    assert cli.main(["chat", "-q", "hi"]) == 1
    assert capsys.readouterr().err == "octavo: error: busy\n"


def test_completions_one_after_the_other(client, typed):
    typed("a", "b")
    assert cli.main(["complete"]) == 0
    assert [asked[0] for asked in client().asked[:-1]] == ["a", "b"]


def test_no_server(capsys):
    assert cli.main(["chat", "-q", "hi", "--url", "http://127.0.0.1:1/v1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("octavo: error: No answer from http://127.0.0.1:1/v1")


def test_a_reader_that_goes_away():
    code = (
        "import sys; from octavo import cli\n"
        "cli._chat = lambda args: [cli._write('x' * 100000) for _ in range(100)] and 0\n"
        "sys.exit(cli.main(['chat']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.read(10)
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(20) == 1
    assert error == b""


def test_an_interrupt_is_no_traceback(monkeypatch, client):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeClient, "chat", stop)
    assert cli.main(["chat", "-q", "x"]) == 130
