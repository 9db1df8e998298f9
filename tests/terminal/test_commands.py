"""Commands of the terminal: their arguments, with a fake model or a fake server."""

import io
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from octavo import cli
from octavo.errors import HubError, RequestError
from octavo.models import hub
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server import client as client_module
from octavo.terminal import commands, explanation


@pytest.fixture(autouse=True)
def levels(monkeypatch):
    """Return the requested levels of logs."""
    seen = []
    monkeypatch.setattr(commands, "setup_logging", lambda level, form: seen.append(level))
    return seen


@pytest.fixture(autouse=True)
def piped(monkeypatch):
    """Return a function that sets standard input which is no terminal."""

    def give(data=b""):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))

    give()
    return give


@pytest.fixture
def typed(monkeypatch):
    """Return a function that sets the typed lines of standard input as a terminal."""

    def type_(*texts):
        rest = iter(texts)

        def read(prompt):
            for text in rest:
                return text
            raise EOFError

        monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
        monkeypatch.setattr("builtins.input", read)

    return type_


# run


class FakeLLM:
    made = None
    error = None
    has_template = True

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

    def get_tokenizer(self):
        return SimpleNamespace(chat_templates={"default": ""} if self.has_template else {})

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
    flags = ["--max-tokens", "9", "--seed", "3", "--top_k", "4"]
    assert cli.main(["run", "--raw", "Once upon", *flags]) == 0
    out, err = capsys.readouterr()
    assert out == "Hello\n"
    model, figures = err.splitlines()
    assert model == "octavo/stories continues the text."
    assert figures.startswith("[4 tokens | first token ")
    assert figures.endswith(" tokens/s | 16 of 20 prompt tokens cached]")
    assert llm().kwargs == {"seed": 3}
    assert llm().prompts == ["Once upon"]
    (params,) = llm().params
    assert (params.max_tokens, params.seed, params.top_k) == (9, 3, 4)
    assert (params.temperature, params.top_p) == (0.6, 0.7)  # the model's defaults
    assert llm().closed


@pytest.fixture(autouse=True)
def no_download(monkeypatch):
    monkeypatch.setattr(hub, "resolve_folders", lambda config: None)


def test_run_tells_the_model_from_the_prompt(llm, typed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "a folder").mkdir()
    typed()
    for argv, model, prompts in [
        (["m", "hello"], "m", ["hello"]),
        (["hello"], "hello", []),
        (["mistral"], "mistral", []),
        (["model.gguf"], "model.gguf", []),
        (["Who are you?"], None, ["Who are you?"]),
        (["Hello!"], None, ["Hello!"]),
        (["\u4ece\u524d"], None, ["\u4ece\u524d"]),
        (["yes/no or maybe"], None, ["yes/no or maybe"]),
        (["--model", "m", "org/name"], "m", ["org/name"]),
        (["2 + 3 ="], None, ["2 + 3 ="]),
        (["org/name"], "org/name", []),
        (["octavo/stories"], "octavo/stories", []),
        (["folder"], "folder", []),
        (["a folder"], "a folder", []),
        ([str(tmp_path)], str(tmp_path), []),
        (["gpt2"], "gpt2", []),
        (["models/llama/7b"], "models/llama/7b", []),
        (["./nothing"], "./nothing", []),
        (["~/nothing"], "~/nothing", []),
        ([], None, []),
    ]:
        assert cli.main(["run", "--raw", *argv]) == 0
        assert llm().kwargs.get("model") == model, argv
        assert llm().prompts == prompts
        assert (model or "octavo/stories") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "model", "prompt"),
    [
        (["m", "--max-tokens", "4", "text"], "m", "text"),
        (["--max-tokens", "4", "m", "text"], "m", "text"),
        (["--max-tokens=4", "m", "--", "--text"], "m", "--text"),
        (["m", "--max-tokens", "4", "- text"], "m", "- text"),
        (["m", "--max-tokens", "4", "-5"], "m", "-5"),
        (["--max-tokens", "4", "a text", "--seed", "1"], None, "a text"),
    ],
)
def test_flags_may_stand_anywhere(llm, argv, model, prompt):
    assert cli.main(["run", *argv]) == 0
    assert llm().kwargs.get("model") == model
    assert llm().prompts == [json.dumps([{"role": "user", "content": prompt}])]
    assert llm().params[0].max_tokens == 4


def test_a_word_taken_for_a_model_that_is_none_may_be_a_text(monkeypatch, capsys, typed, piped):
    def fail(config):
        raise HubError(f"{config.model.model} is no model.")

    monkeypatch.setattr(hub, "resolve_folders", fail)
    hint = "For a message of one word, use: octavo run octavo/stories hello\n"
    piped(b"")
    assert cli.main(["run", "hello"]) == 2
    assert capsys.readouterr().err == (
        "octavo: error: Standard input is empty; give the prompt there or as an argument. " + hint
    )
    assert cli.main(["run", "org/name"]) == 2
    assert "one word" not in capsys.readouterr().err
    typed()
    assert cli.main(["run", "hello"]) == 1
    assert capsys.readouterr().err == f"octavo: error: hello is no model. {hint}"
    for argv in (["hello", "text"], ["org/name"]):
        assert cli.main(["run", *argv]) == 1
        assert capsys.readouterr().err == f"octavo: error: {argv[0]} is no model.\n"


@pytest.mark.parametrize("argv", [[], ["-"], ["org/name", "-"], ["org/name"]])
def test_a_pipe_is_one_message(llm, piped, argv):
    text = "Grüße,\n\nthe dog"
    piped(f"{text}\n".encode())
    assert cli.main(["run", *argv]) == 0
    assert llm().prompts == [json.dumps([{"role": "user", "content": text}])]
    piped(f"{text}\n".encode())
    assert cli.main(["run", "--raw", *argv]) == 0
    assert llm().prompts == [text]
    assert llm().kwargs == ({"model": "org/name"} if "org/name" in argv else {})


def test_a_pipe_is_not_read_for_a_model_that_cannot_be_had(llm, piped, capsys, tmp_path):
    piped(b"Once")
    for path, said in [(tmp_path / "nothing", "no folder"), (tmp_path, "config.json")]:
        for argv in [[str(path)], [str(path), "-"]]:
            assert cli.main(["run", *argv]) == 1
            assert said in capsys.readouterr().err
    assert sys.stdin.read() == "Once"
    assert llm() is None


@pytest.mark.parametrize(("data", "said"), [(b"", "empty"), (b" \n", "empty"), (b"\xff", "UTF-8")])
@pytest.mark.parametrize("command", ["run", "chat", "complete"])
def test_a_pipe_without_a_text(llm, piped, capsys, command, data, said):
    piped(data)
    assert cli.main([command]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert llm() is None


def test_run_without_prompt_is_a_chat_with_memory(llm, typed, capsys):
    typed("hi", "  ", "again")
    assert cli.main(["run", "--system-prompt", "Be brief."]) == 0
    system = {"role": "system", "content": "Be brief."}
    first, second = [json.loads(p) for p in llm().prompts]
    assert first == [system, {"role": "user", "content": "hi"}]
    assert second == [
        *first,
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "again"},
    ]
    assert llm().special == [False, False]
    assert capsys.readouterr().out == "Hello\nHello\n\n"


def test_a_model_without_a_chat_template_continues_texts(llm, typed, capsys, monkeypatch):
    monkeypatch.setattr(FakeLLM, "has_template", False)
    for raw in ([], ["--raw"]):
        typed("Once upon", "The dog", "/regen", "/system x")
        assert cli.main(["run", *raw]) == 0
        assert llm().prompts == ["Once upon", "The dog", "The dog"]
        assert llm().special == [True, True, True]
        error = capsys.readouterr().err
        assert "octavo/stories continues the texts that you type, without a chat template" in error
        assert "Unknown command /system" in error
        assert cli.main(["run", *raw, "Once upon"]) == 0
        assert llm().prompts == ["Once upon"]
        assert "octavo/stories continues the text.\n" in capsys.readouterr().err
    typed()
    assert cli.main(["run", "--system-prompt", "Be brief."]) == 2
    assert "octavo/stories has no chat template; leave it out" in capsys.readouterr().err
    assert llm().closed


def test_run_logs_as_much_as_is_wanted(llm, levels, monkeypatch):
    assert cli.main(["run", "Once upon"]) == 0
    assert cli.main(["run", "Once upon", "--log-level", "info"]) == 0
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    assert cli.main(["run", "Once upon"]) == 0
    assert levels == ["warning", "info", "debug"]


def test_a_prompt_is_a_message_of_a_chat(llm, capsys):
    argv = ["run", "--system-prompt", "Be brief.", "What is 2 + 3?", "--max-tokens", "9"]
    assert cli.main(argv) == 0
    assert [json.loads(prompt) for prompt in llm().prompts] == [
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is 2 + 3?"},
        ]
    ]
    assert llm().special == [False]
    assert llm().params[0].max_tokens == 9
    out, err = capsys.readouterr()
    assert out == "Hello\n"
    assert err.startswith("[4 tokens | first token ")
    assert llm().closed


def test_raw_continues_texts_and_has_no_system_prompt(llm, typed, capsys):
    typed("Once upon")
    assert cli.main(["run", "--raw"]) == 0
    assert llm().prompts == ["Once upon"]
    assert llm().special == [True]
    for prompt in ([], ["Once upon"]):
        FakeLLM.made = None
        assert cli.main(["run", "--raw", "--system-prompt", "Be brief.", *prompt]) == 2
        assert "--raw continues texts; leave one of them out" in capsys.readouterr().err
        assert llm() is None


def test_run_says_what_is_wrong_with_a_prompt(llm, capsys):
    FakeLLM.error = RequestError("the prompt is too long")
    assert cli.main(["run", "a text"]) == 1
    assert capsys.readouterr() == ("", "octavo: error: the prompt is too long\n")
    assert llm().closed


# chat, complete


class FakeClient:
    made = None
    error = None

    def __init__(self, url, api_key=None, model=None):
        self.url, self.api_key, self.model = url, api_key, model
        self.usage = client_module.Usage(20, 4)
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


def test_the_operator_scales_with_a_key(client, capsys, monkeypatch):
    FakeClient.scale = lambda self, size: f"scaled to {size}"
    for name in ("OCTAVO_ADMIN_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["scale", "3"]) == 0
    assert client().api_key is None
    assert cli.main(["scale", "3", "--api-key", "k"]) == 0
    assert client().api_key == "k"
    monkeypatch.setenv("OCTAVO_ADMIN_KEY", "from-env")
    assert cli.main(["scale", "3", "--api-key", "k"]) == 0
    assert client().api_key == "from-env"
    assert cli.main(["scale", "3", "--admin-key", "boss"]) == 0
    assert client().api_key == "boss"
    assert capsys.readouterr().out == "scaled to 3\n" * 4


def test_requests_are_listed_and_explained(client, capsys, monkeypatch):
    monkeypatch.setattr(explanation, "listed", lambda found: f"list of {found}")
    monkeypatch.setattr(explanation, "described", lambda found: f"story of {found}\x1b")
    FakeClient.recent_requests = lambda self: "recent"
    FakeClient.explain = lambda self, name: name
    assert cli.main(["explain"]) == 0
    assert cli.main(["explain", "cmpl-1", "--api-key", "k"]) == 0
    assert client().api_key == "k"
    assert capsys.readouterr().out == "list of recent\nstory of cmpl-1\u241b\n"


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
    assert cli.main(["chat", "--model", "m"]) == 0
    histories = [[m["content"] for m in asked[0]] for asked in client().asked[:-1]]
    assert histories == [["one"], ["two"], ["two", "Hello", "three"]]
    hint, error, *figures = capsys.readouterr().err.splitlines()
    assert hint == "m: Ctrl-C stops an answer, Ctrl-D leaves, /help lists commands."
    assert error == "octavo: error: busy"
    for line in figures:
        assert line.startswith("[4 tokens | first token ")
        assert line.endswith(" tokens/s | 20 prompt tokens]")
    assert len(figures) == 2


def test_one_question_that_fails_is_status_1(client, capsys):
    FakeClient.error = client_module.ServerError("busy")
    assert cli.main(["chat", "-q", "hi"]) == 1
    assert capsys.readouterr().err == "octavo: error: busy\n"


def test_a_text_is_an_argument_or_a_pipe(client, piped, capsys):
    for argv, asked in [
        (["chat", "hi"], ([{"role": "user", "content": "hi"}], {})),
        (["chat"], ([{"role": "user", "content": "from\na pipe"}], {})),
        (["chat", "-"], ([{"role": "user", "content": "from\na pipe"}], {})),
        (["complete", "Once"], ("Once", {})),
        (["complete"], ("from\na pipe", {})),
    ]:
        piped(b"from\na pipe\n")
        assert cli.main(argv) == 0
        assert client().asked == [asked, "closed"]
    assert cli.main(["chat", "hi", "-q", "hello"]) == 2
    assert "two texts" in capsys.readouterr().err


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
        "from octavo.terminal import commands, screen\n"
        "commands.chat_with_server = lambda args: "
        "[screen.write('x' * 100000) for _ in range(100)] and 0\n"
        "sys.exit(cli.main(['chat']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    process.stdout.read(10)
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert process.wait(100) == 1
    assert error == b""


def test_an_interrupt_is_no_traceback(monkeypatch, client):
    def stop(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeClient, "chat", stop)
    assert cli.main(["chat", "-q", "x"]) == 130


# list, pull


def test_list_has_the_built_in_models_and_those_of_the_hub_cache(monkeypatch, tmp_path, capsys):
    import huggingface_hub.constants

    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    assert cli.main(["list"]) == 0  # nothing was ever downloaded
    titles, *rows = capsys.readouterr().out.splitlines()
    assert titles.split() == ["NAME", "SIZE", "WHERE"]
    names = ["stories", "stories-draft", "stories-encoder", "stories-reranker", "stories-eyes"]
    names += ["spoken-words"]
    assert [row.split()[0] for row in rows] == [f"octavo/{name}" for name in names]
    assert rows[2].split()[1:] == ["2", "MB", "built", "in"]
    for repo, file in [("models--org--m", "config.json"), ("models--org--part", "README.md")]:
        blobs, snapshot = cache / repo / "blobs", cache / repo / "snapshots" / "c0ffee"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        (blobs / "1").write_bytes(b"x" * 2_000_000)
        (snapshot / file).symlink_to(blobs / "1")
    assert cli.main(["list"]) == 0
    *_, row = capsys.readouterr().out.splitlines()
    assert row.split() == ["org/m", "2", "MB", str(cache / "models--org--m")]
    assert "part" not in row


def test_pull_reads_the_description_before_it_fetches_the_weights(monkeypatch, tmp_path, capsys):
    fetched = []

    def resolve(model, *, revision, download_dir, load_format="auto"):
        fetched.append((model, revision, load_format))
        return tmp_path

    monkeypatch.setattr(hub, "resolve_model", resolve)
    (tmp_path / "config.json").write_text('{"architectures": ["Strange"]}')
    assert cli.main(["pull", "org/m", "--revision", "v1"]) == 1
    assert "Strange" in capsys.readouterr().err
    assert fetched == [("org/m", "v1", "dummy")]
    folder = hub._BUILTIN["octavo/stories"]
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert cli.main(["pull", "org/m"]) == 0
    assert fetched[1:] == [("org/m", None, "dummy"), ("org/m", None, "auto")]
    assert capsys.readouterr().out == f"org/m is in {tmp_path}\n"


def test_pull_of_nothing(capsys):
    assert cli.main(["pull", "./no/such/model"]) == 1
    assert "There is no folder" in capsys.readouterr().err
