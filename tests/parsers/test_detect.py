"""Detection of the format of answers from chat templates."""

import re
from pathlib import Path

import pytest

from octavo.parsers.detect import find_format
from octavo.text.chat_template import ChatTemplate

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT.parent / "shared" / "data" / "chat_templates" / "models"
PAGE = ROOT / "docs" / "tool_calls.md"


def table():
    """Return the documented formats: {template: (format of calls, texts around reasoning)}."""
    rows = re.findall(r"^\| `([\w.-]+)` \| (\S+) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (calls, thoughts) for name, calls, thoughts in rows}


def found(source):
    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
    return find_format(template.render, source)


@pytest.mark.skipif(not TEMPLATES.exists(), reason="needs ../shared/data/chat_templates")
def test_templates_of_models():
    """The page's table is what detection finds."""
    shown = {}
    for file in sorted(TEMPLATES.glob("*.jinja")):
        fmt = found(file.read_text("utf-8"))
        calls = "none" if fmt is None or fmt.calls is None else fmt.name
        thoughts = (
            "none"
            if fmt is None or fmt.thoughts is None
            else " ... ".join(f"`{text.strip()}`" for text in fmt.thoughts)
        )
        shown[file.stem] = (calls, thoughts.replace("|", "\\|"))
    assert table() == shown


def test_names_instead_of_a_template():
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    template = ChatTemplate({"default": plain}, {})
    assert find_format(template.render, plain) is None
    fmt = find_format(template.render, plain, "hermes", "qwen3")
    assert (fmt.calls.begins[0], fmt.thoughts) == ("<tool_call>", ("<think>", "</think>"))
    assert find_format(template.render, plain, None, "mistral").thoughts == ("[THINK]", "[/THINK]")
    assert find_format(template.render, plain, None, "none").thoughts is None


def test_a_template_that_fails():
    assert found("{{ raise_exception('no') }}") is None


@pytest.mark.parametrize("space", ["", "\n"])
def test_white_space_next_to_a_marker(space):
    """A grammar makes the model write calls as its template shows them."""
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
        "{{ space }}{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
        "{{ space }}</tool_call>{% endfor %}{% endfor %}"
    ).replace("{{ space }}", "{{ '\\n' }}" if space else "")
    tag = found(source).calls.tag("f", {})
    assert tag["begin"] == f'<tool_call>{space}{{"name": "f", "arguments": '
    assert tag["end"] == f"}}{space}</tool_call>"
