"""Chat templates: compared with transformers, forms of content, errors."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from octavo.errors import ConfigError, ModelError, OctavoError, RequestError, UnsupportedError
from octavo.parsers.detect import find_format
from octavo.text import chat_template
from octavo.text.chat_template import ChatTemplate
from octavo.text.template_client import RenderRequest, TemplateClient
from octavo.text.template_process import _Templates
from tests.conftest import SHARED_DATA
from tests.small_tokenizers import byte_level

TEMPLATES = sorted((SHARED_DATA / "chat_templates" / "models").glob("*.jinja"))
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the <weather> & more.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Où?"}},
                "required": ["city"],
            },
        },
    }
]


def call(arguments):
    function = {"name": "get_weather", "arguments": arguments}
    return {"id": "abcdefghi", "type": "function", "function": function}


CONVERSATIONS = {
    "one turn": [{"role": "user", "content": "Hello <b> & 中"}],
    "system": [
        {"role": "system", "content": "Be nice."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Yo"},
        {"role": "user", "content": "  Bye \n"},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call({"city": "Köln"})]},
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "sunny"},
    ],
}


def simple(source, **sources):
    return ChatTemplate({"default": source} | sources, SPECIAL)


CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.skipif(not TEMPLATES, reason="the shared chat templates are not on this machine")
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.stem)
def test_same_text_as_transformers(path):
    theirs = pytest.importorskip("transformers.utils.chat_template_utils")
    source = path.read_text("utf-8")
    template = simple(source)
    for name, messages in CONVERSATIONS.items():
        tools = TOOLS if name == "tools" else None
        for generation_prompt in (True, False):
            try:
                expected = theirs.render_jinja_template(
                    [messages],
                    tools=tools,
                    chat_template=source,
                    add_generation_prompt=generation_prompt,
                    **SPECIAL,
                )[0][0]
            except Exception:
                expected = None
            try:
                rendered = template.render(
                    messages, tools=tools, add_generation_prompt=generation_prompt
                )
            except OctavoError:
                assert expected is None, name
                continue
            if expected is None:
                # Octavo adapts the messages where transformers does not; then all words must be
                # present.
                assert all(m["content"].strip() in rendered for m in messages), name
            else:
                assert rendered == expected, name


@pytest.mark.skipif(not TEMPLATES, reason="the shared chat templates are not on this machine")
def test_most_templates_of_the_collection_work():
    failed = []
    for path in TEMPLATES:
        template = simple(path.read_text("utf-8"))
        try:
            assert "Hello <b> & 中" in template.render(CONVERSATIONS["one turn"])
        except OctavoError:
            failed.append(path.stem)
    # Three work only with tools, one needs a special variable.
    assert len(failed) == 4, failed


@pytest.mark.skipif(not TEMPLATES, reason="the shared chat templates are not on this machine")
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.stem)
def test_parts_are_never_printed_as_lists(path):
    template = simple(path.read_text("utf-8"))
    parts = [{"type": "text", "text": "first words"}, {"type": "text", "text": "second words"}]
    try:
        rendered = template.render([{"role": "user", "content": parts}])
    except RequestError as error:
        pytest.skip(f"the template wants more than this: {error}")
    assert "first words" in rendered
    assert "second words" in rendered
    assert "{'" not in rendered.split("first words")[0][-30:]


def test_variables_and_extras():
    source = (
        "{{ bos_token }}{{ eos_token }}{{ tools }}{{ documents }}{{ thing }}"
        "{{ [1, '<é>'] | tojson }}{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}"
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}x{{ 1 + 1 }}{% endgeneration %}{{ strftime_now('%Y') }}"
    )
    rendered = simple(source).render(USER, template_kwargs={"thing": "T"})
    expected = '<s></s>NoneNoneT[1, "<é>"]{\n "a": 2,\n "b": 1\n}01x2'
    assert re.fullmatch(re.escape(expected) + r"\d{4}", rendered)


def test_blocks_are_trimmed():
    assert simple("  {% if true %}\nA\n  {% endif %}\nB").render(USER) == "A\nB"


def test_named_templates():
    template = simple("plain", tool_use="tools")
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[]) == "plain"
    assert template.render(USER, tools=TOOLS) == "tools"
    assert ChatTemplate({"rag": "alone"}, {}).render(USER) == "alone"
    with pytest.raises(ModelError, match="'a', 'b'"):
        ChatTemplate({"a": "1", "b": "2"}, {}).render(USER)


def test_no_template():
    template = ChatTemplate.from_tokenizer(byte_level())
    assert not template.available
    with pytest.raises(RequestError, match="no chat template"):
        template.render(USER)


def test_a_model_without_a_template_needs_no_process(monkeypatch):
    clients = TemplateClient(), TemplateClient()
    monkeypatch.setattr(chat_template, "_short_client", clients[0])
    monkeypatch.setattr(chat_template, "_long_client", clients[1])
    template = ChatTemplate.from_tokenizer(byte_level())
    assert find_format(template.render, template.sources) is None
    assert not any(client._thread._threads for client in clients)


def test_override(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("file {{ messages[0].content }}")
    tokenizer = byte_level()
    for override in (str(file), file.read_text()):
        template = ChatTemplate.from_tokenizer(tokenizer, override)
        assert template.available
        assert template.render(USER) == "file hi"
    with pytest.raises(ConfigError, match="neither"):
        ChatTemplate.from_tokenizer(tokenizer, str(tmp_path / "nowhere.jinja"))
    with pytest.raises(ConfigError, match="line 2"):
        ChatTemplate.from_tokenizer(tokenizer, "{{ 1 }}\n{% if %}")


def test_content_parts():
    knows_text = simple(CHATML)
    parts = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]
    messages = [{"role": "user", "content": parts}]
    assert knows_text.render(messages) == "<|user|>a\nb\nc\n<|assistant|>"
    knows_parts = simple(
        "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    )
    assert knows_parts.render(messages) == "[a][b][c]"
    assert knows_parts.render(USER) == "[hi]"
    knows_both = simple(
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}"
    )
    assert knows_both.render(USER + messages) == "hi[a][b][c]"


THINKING = "{% for m in messages %}{% if m.thinking is defined %}({{ m.thinking }}){% endif %}"
PARTS = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '(' + p.thinking + ')' if p.type == 'thinking' else p.text }}"
    "{% endfor %}{% endif %};{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "with_text", "with_text_and_calls"),
    [
        (THINKING + "{{ m.content }};{% endfor %}", "Hi;(hm)so;", "Hi;(hm)so;"),
        (
            THINKING
            + "{% if m.thinking and m.content and m.tool_calls %}{{ raise_exception('3') }}"
            "{% endif %}{{ m.content }};{% endfor %}",
            "Hi;(hm)so;",
            "Hi;so;",
        ),
        (PARTS, "Hi;(hm)so;", "Hi;(hm)so;"),
        ("{% for m in messages %}{{ m.content }};{% endfor %}", "Hi;so;", "Hi;so;"),
        (CHATML, "<|user|>Hi\n<|assistant|>so\n", "<|user|>Hi\n<|assistant|>so\n"),
    ],
    ids=["field", "refusing field", "parts", "no thoughts", "chatml"],
)
def test_thoughts_where_a_template_reads_them(source, with_text, with_text_and_calls):
    """Some read them from `thinking` or from a part, where clients send `reasoning`."""
    question = {"role": "user", "content": "Hi", "reasoning": "not the assistant's"}
    answer = {"role": "assistant", "content": "so", "reasoning": "hm"}
    calls = [call({"city": "Köln"})]
    template = simple(source)

    def render(message, **options):
        return template.render([question, message], add_generation_prompt=False, **options)

    assert render(answer) == with_text
    assert render({**answer, "tool_calls": calls}) == with_text_and_calls
    empty = {**answer, "content": "", "tool_calls": calls}
    assert render(empty) == with_text.replace("so", "")
    begun = render(answer, continue_final_message=True)
    assert with_text.startswith(begun)
    assert begun.endswith("so")
    with pytest.raises(RequestError, match="with text"):
        render({**answer, "content": ""}, continue_final_message=True)


def test_missing_content_is_empty():
    source = "{% for m in messages %}({{ m.content }}){% endfor %}"
    messages = [*USER, {"role": "assistant", "content": None}, {"role": "assistant"}]
    assert simple(source).render(messages) == "(hi)()()"


def test_arguments_of_tool_calls():
    wants_objects = simple(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    wants_text = simple(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ '' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    prints = simple(
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    for arguments in ('{"city": "Köln"}', {"city": "Köln"}):
        messages = [*USER, {"role": "assistant", "tool_calls": [call(arguments)]}]
        for template in (wants_objects, wants_text, prints):
            assert template.render(messages) == '{"city": "Köln"}'
        assert messages[1]["tool_calls"][0]["function"]["arguments"] == arguments  # not changed
    for empty in ("", None):
        messages = [*USER, {"role": "assistant", "tool_calls": [call(empty)]}]
        assert wants_objects.render(messages) == "{}"


def test_arguments_that_were_cut():
    """They stay a text, where the template shows one."""
    start = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    end = "{% endfor %}{% endfor %}"
    cut = '{"city": "Kö'
    messages = [*USER, {"role": "assistant", "tool_calls": [call(cut)]}]
    of_text = "{{ '' + c.function.arguments }}"
    qwen = (
        "{% if c.function.arguments is string %}{{ c.function.arguments }}"
        "{% else %}{{ c.function.arguments | tojson }}{% endif %}"
    )
    for body in (of_text, qwen):
        assert simple(start + body + end).render(messages) == cut
    quoted = simple(start + "{{ c.function.arguments | tojson }}" + end).render(messages)
    assert json.loads(quoted) == cut
    each = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    keys = "{% for k in c.function.arguments %}{{ k }}={{ c.function.arguments[k] }}{% endfor %}"
    for body in (each, keys):
        with pytest.raises(RequestError, match=r"messages\[1\].tool_calls: .*not JSON") as caught:
            simple(start + body + end).render(messages)
        assert caught.value.param == "messages"


def test_continue_final_message():
    messages = [*USER, {"role": "assistant", "content": "Once upon "}]

    def render(source, messages=messages):
        return simple(source).render(
            messages, add_generation_prompt=False, continue_final_message=True
        )

    assert render(CHATML + "<|end|>") == "<|user|>hi\n<|assistant|>Once upon "
    trims = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}"
    assert render(trims) == "<hi><Once upon"
    with_parts = [*USER, {"role": "assistant", "content": [{"type": "text", "text": "Once"}]}]
    assert render(CHATML, with_parts) == "<|user|>hi\n<|assistant|>Once"
    twice = "{{ messages[-1].content }}|" + CHATML
    assert render(twice).endswith("|<|user|>hi\n<|assistant|>Once upon "), "cut at the last one"
    with pytest.raises(RequestError, match="leaves the last"):
        render("{{ messages[0].content }}")
    with pytest.raises(RequestError, match="with text"):
        render(CHATML, [*USER, {"role": "assistant", "content": ""}])
    with pytest.raises(RequestError, match="exclude"):
        simple(CHATML).render(messages, continue_final_message=True)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "hi",
        {"role": "user"},
        ["hi"],
        [None],
        [{"content": "hi"}],
        [{"role": 1, "content": "hi"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": {"text": "hi"}}],
        [{"role": "user", "content": [5]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": 3, "text": "x"}]}],
        [{"role": "user", "content": "hi", "extra": object()}],
        [{"role": "assistant", "tool_calls": "x"}],
        [{"role": "assistant", "tool_calls": [{"id": "x"}]}],
    ],
)
def test_malformed_messages(messages):
    with pytest.raises(RequestError) as caught:
        simple(CHATML).render(messages)
    assert caught.value.param == "messages"


def test_deep_nesting_is_the_requests_fault():
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    for kwargs in (
        {"messages": [{"role": "user", "content": "x", "extra": deep}]},
        {"messages": USER, "tools": [{"a": deep}]},
        {"messages": [{"role": "assistant", "tool_calls": [call("[" * 100_000)]}]},
    ):
        with pytest.raises(RequestError):
            simple(CHATML).render(**kwargs)


def test_media_is_refused():
    content = [{"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(UnsupportedError, match="image_url"):
        simple(CHATML).render([{"role": "user", "content": content}])


def test_reserved_variables():
    with pytest.raises(RequestError) as caught:
        simple(CHATML).render(USER, template_kwargs={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_templates_refusal_is_the_requests_fault():
    with pytest.raises(RequestError, match="no such order") as caught:
        simple("{{ raise_exception('no such order') }}").render(USER)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages[7].content }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}"])
def test_failing_templates(source):
    with pytest.raises(RequestError, match="cannot render"):
        simple(source).render(USER)


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ x | nofilter }}", "{% generation %}", "{{ " + "(" * 2000]
)
def test_broken_templates(source):
    with pytest.raises(ModelError, match="does not compile"):
        simple(source).render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ messages.clear() }}",
        "{{ (1).__class__.__base__.__subclasses__() }}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises((ModelError, RequestError)):
        simple(source).render(USER)


def test_user_text_is_no_template():
    assert "{{ 7 * 7 }}" in simple(CHATML).render([{"role": "user", "content": "{{ 7 * 7 }}"}])


def test_odd_roles_fill_no_memory():
    templates = _Templates({"default": CHATML}, SPECIAL)
    for i in range(50):
        templates.render(RenderRequest({}, {}, [{"role": f"role{i}", "content": ["x"]}]))
    assert len(templates._habits) < 10


def test_threads():
    template = simple(CHATML)

    def render(i):
        return template.render([{"role": "user", "content": f"n{i}"}])

    with ThreadPoolExecutor(4) as pool:
        for i, text in enumerate(pool.map(render, range(100))):
            assert text == f"<|user|>n{i}\n<|assistant|>"


MEDIA = [{"type": "text", "text": "See"}, {"type": "image"}, {"type": "text", "text": "this."}]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        # It writes the placeholders of media itself.
        (
            "{% for m in messages %}{% for p in m['content'] %}"
            "{% if p['type'] == 'image' %}[IMG]{% else %}{{ p['text'] }}{% endif %}"
            "{% endfor %}{% endfor %}",
            "See[IMG]this.",
        ),
        # It reads parts, but none with media.
        (
            "{% for m in messages %}{% for p in m['content'] %}{{ p['text'] }}|"
            "{% endfor %}{% endfor %}",
            "See|<image>|this.|",
        ),
        # It reads texts only.
        ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "See\n<image>\nthis."),
    ],
)
def test_media_are_written_by_the_template_or_as_placeholders(source, expected):
    template = ChatTemplate({"default": source}, {})
    chat = [{"role": "user", "content": MEDIA}]
    assert template.render(chat, placeholders={"image": "<image>"}) == expected


def test_media_need_a_placeholder_if_the_template_writes_none():
    template = ChatTemplate({"default": "{{ messages[0]['content'] }}"}, {})
    with pytest.raises(UnsupportedError, match="part of type 'image'"):
        template.render([{"role": "user", "content": MEDIA}])
