"""Chat for users: in a pseudo-terminal, and its commands one by one."""

import json
import re
import stat
import sys
from pathlib import Path

import pytest

from octavo.errors import ConfigError, RequestError
from octavo.terminal.session import SAMPLING, Session
from tests.terminal.fake_chat import FakeSource
from tests.terminal.pseudo import Terminal

ROOT = Path(__file__).parents[2]
PROMPT = r">>> "
ANSWER = r"<(\[.*\])>\s+[^\n]*\[4 tokens"
ESCAPES = re.compile(r"\x1b\[[?\d;]*[A-Za-z]")


@pytest.fixture
def chat(tmp_path, monkeypatch):
    """Return a function that starts a chat in a terminal; chats share a cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def start(columns=9999, **env):
        terminal = Terminal(
            sys.executable, "-m", "tests.terminal.fake_chat", columns=columns, env=env
        )
        terminal.wait_for(PROMPT)
        return terminal

    return start


def asked(terminal):
    """Return the messages and parameters of the fake model's request, up to the next prompt."""
    seen = terminal.wait_for(ANSWER + r"[^\n]*\n[^\n]*>>> ")
    return json.loads(re.search(r"<(\[.*\])>", seen)[1])


def user(text):
    return {"role": "user", "content": text}


def test_a_paste_is_one_message_and_so_are_triple_quotes(chat):
    with chat() as terminal:
        terminal.paste("first line\n\n/second line\nthird")
        terminal.type("\r")
        messages, _ = asked(terminal)
        assert messages == [user("first line\n\n/second line\nthird")]
        terminal.type('"""one\r')
        terminal.wait_for(r"\.\.\. ")
        terminal.type("two\r")
        terminal.wait_for(r"\.\.\. ")
        terminal.type('three"""\r')
        messages, _ = asked(terminal)
        assert messages[2:] == [user("one\ntwo\nthree")]
        terminal.type('"""all at once"""\r')
        messages, _ = asked(terminal)
        assert messages[4:] == [user("all at once")]


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(chat):
    with chat() as terminal:
        terminal.type("for ever\r")
        terminal.wait_for("w3 ")
        terminal.interrupt(r"\[stopped \|")
        terminal.wait_for(PROMPT)
        terminal.type("and now?\r")
        messages, _ = asked(terminal)
        assert messages[0] == user("for ever")
        assert messages[1]["content"].startswith("w0 w1 w2 w3 ")  # the received text stays
        assert messages[2] == user("and now?")
        terminal.type("half a quest")
        terminal.wait_for("half a quest")
        terminal.interrupt("leaves")  # discards that
        terminal.wait_for(PROMPT)
        terminal.type("whole\r")
        assert asked(terminal)[0][-1] == user("whole")
        terminal.type('"""begun\r')
        terminal.type("more")
        terminal.wait_for(r"\.\.\. more")
        terminal.interrupt(PROMPT)
        terminal.type("\x04")
        terminal.wait_for("left")
        assert terminal.wait() == 0


def test_the_history_is_there_in_the_next_run(chat, tmp_path):
    with chat() as terminal:
        terminal.paste("two\nlines")
        terminal.type("\r")
        asked(terminal)
        terminal.type("Grüße\r")
        asked(terminal)
        terminal.type("/bye\r")
        assert terminal.wait() == 0
    (file,) = (tmp_path / "octavo").iterdir()
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        "two\nlines",
        "Grüße",
        "/bye",
    ]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with file.open("a") as damaged:
        damaged.write("\x00{not json\n")
    with chat() as terminal:
        terminal.type("\x1b[A\x1b[A\r")  # up, up
        assert asked(terminal)[0] == [user("Grüße")]
        terminal.type("\x1b[A" * 4 + "\r")  # Grüße, /bye and Grüße were typed since
        assert asked(terminal)[0][-1] == user("two\nlines")


def test_lines_end_between_words(chat):
    with chat(columns=60) as terminal:
        terminal.type("words\r")
        seen = terminal.wait_for(r"\[4 tokens")
    rows = [line.strip("\r") for line in ESCAPES.sub("", seen).split("\n")]
    lines = [line for line in rows if line.startswith("abcdefg")]
    assert {*" ".join(lines).split()} == {"abcdefg"}
    assert [len(line) for line in lines] == [55, 55, 55, 55, 15]


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}])
def test_colours_only_where_they_are_wanted(chat, variables):
    with chat(**variables) as terminal:
        terminal.type("hi\r")
        asked(terminal)
        terminal.type("/frobnicate\r")
        terminal.wait_for("Unknown command[^>]*" + PROMPT)
        terminal.type("/bye\r")
        terminal.wait()
        styles = re.findall(r"\x1b\[[\d;]*m", terminal.output)
    assert bool(styles) == (not variables)


def test_an_answer_does_not_command_the_terminal(chat):
    with chat() as terminal:
        terminal.type("attack\r")
        seen = terminal.wait_for(r"\[4 tokens")
    assert "␛]0;title␇␛[2J" in seen
    assert "\x1b]" not in seen


# The commands, without a terminal


@pytest.fixture
def session(capsys):
    made = Session(FakeSource())
    made.take("one")
    capsys.readouterr()
    return made


def last_asked(session, capsys):
    session.take("last")
    text = capsys.readouterr().out
    return json.loads(text.strip()[1:-1])


def test_help_names_every_command(session, capsys):
    assert session.take("/help")
    text = capsys.readouterr().out
    for name in ("help", "set", "show", "system", "save", "load", "clear", "regen", "bye", '"""'):
        assert name in text
    assert not session.take("/bye")


def test_set_lists_all_values(session, capsys):
    session.take("/set top-k 7")
    assert capsys.readouterr().err == "top_k: 7\n"
    session.take("/set")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == [*SAMPLING]
    shown = {line[:20].strip(): line[21:].partition("  ")[0] for line in lines}
    assert (shown["top_k"], shown["temperature"]) == ("7", "0.6 (default)")
    assert (shown["max_tokens"], shown["seed"]) == ("default", "default")


def test_set_and_show(session, capsys):
    session.take("/set temperature 0.5")
    session.take("/set top-k 7")
    session.take("/set stop The end")
    session.take("/set seed 3")
    session.take("/set seed")
    session.take("/system Be brief.")
    session.take("/show")
    shown = capsys.readouterr().out
    for line in ("model: fake", "system: Be brief.", "temperature: 0.5", "top_k: 7", "messages: 2"):
        assert line in shown.splitlines()
    messages, params = last_asked(session, capsys)
    assert params == {"temperature": 0.5, "top_k": 7, "stop": ["The end"]}
    assert messages[0] == {"role": "system", "content": "Be brief."}
    session.take("/system")
    assert last_asked(session, capsys)[0][0] == user("one")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("/set temprature 1", "temprature"),
        ("/set temperature warm", "temperature is a number, not 'warm'"),
        ("/set temperature -1", "temperature"),
        ("/set max_tokens 1.5", "a whole number"),
        ("/save", "/save needs"),
        ("/save /no/such/folder/file", "No such file"),
        ("/load /no/such/file", "No such file"),
        ("/load /", "directory"),
        ("/sytem x", "did you mean /system?"),
        ("/usr/bin is what?", "begin with a space"),
    ],
)
def test_wrong_commands_change_nothing(session, text, said):
    before = list(session.messages), dict(session.params), session.system
    with pytest.raises(ConfigError, match=re.escape(said)):
        session.take(text)
    assert (session.messages, session.params, session.system) == before


def test_a_saved_chat_goes_on(session, tmp_path, capsys):
    session.take("/set temperature 0.5")
    session.take("/system Be brief.")
    session.take(f"/save {tmp_path}/my chat.json")
    other = Session(FakeSource())
    other.take(f"/load {tmp_path}/my chat.json")
    capsys.readouterr()
    messages, params = last_asked(other, capsys)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    assert messages[1] == user("one")
    assert params == {"temperature": 0.5}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "\xff",
        '{"model": "m", "system": null, "params": {}, "messages": [], "more": 1}',
        '{"model": "m", "system": null, "params": {"n": 5}, "messages": []}',
        '{"model": "m", "system": null, "params": {"top_p": 7}, "messages": []}',
        '{"model": "m", "system": null, "params": {"top_p": "x"}, "messages": []}',
        '{"model": "m", "system": null, "params": {}, "messages": '
        '[{"role": "user", "content": "a"}]}',
        '{"model": "m", "system": null, "params": {}, "messages": [{}, {}]}',
        '{"model": "m", "system": null, "params": {}, "messages": '
        '[{"role": "assistant", "content": "a"}, {"role": "user", "content": "a"}]}',
    ],
)
def test_a_file_that_is_no_chat(session, tmp_path, text):
    before = list(session.messages)
    (tmp_path / "chat").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        session.take(f"/load {tmp_path}/chat")
    assert (session.messages, session.params, session.system) == (before, {}, None)


def test_clear_and_regen(session, capsys):
    session.take("/set seed 5")
    session.take("/regen")
    messages, params = json.loads(capsys.readouterr().out.strip()[1:-1])
    assert messages == [user("one")]
    assert params == {"seed": 6}  # the same seed would generate the same answer
    assert len(session.messages) == 2
    session.take("/clear")
    assert session.messages == []
    with pytest.raises(ConfigError, match="no answer yet"):
        session.take("/regen")


def test_an_answer_that_fails_leaves_the_conversation_as_it_was(session, monkeypatch):
    def fail(messages, params):
        yield from ()
        raise RequestError("too long")

    session.take("/set seed 5")
    before = list(session.messages)
    monkeypatch.setattr(session.source, "chat", fail, raising=False)
    for text in ("more", "/regen"):
        with pytest.raises(RequestError):
            session.take(text)
        assert session.messages == before
        assert session.params == {"seed": 5}
