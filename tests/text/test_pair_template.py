"""Templates of rerankers, and the texts that they make of pairs."""

import pytest

from octavo.errors import ConfigError, RequestError
from octavo.text.pair_template import PairTemplate

QWEN = """<|im_start|>system
Answer "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first
    | default("Given a web search query, retrieve passages") }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ (messages | selectattr("role", "eq", "document") | first).content }}<|im_end|>
"""
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class Templates:
    """Tokenizer with templates."""

    def __init__(self, **chat_templates: str) -> None:
        self.special_tokens = {"bos_token": "<s>"}
        self.chat_templates = chat_templates


def test_roles_and_instruction():
    template = PairTemplate.find(Templates(default=QWEN))
    text = template.submit("Which <b>?", "A dog & a cat").result()
    assert "<Instruct>: Given a web search query, retrieve passages\n" in text
    assert "<Query>: Which <b>?\n<Document>: A dog & a cat<|im_end|>" in text
    text = template.submit("q", "d", "Find duplicates").result()
    assert "<Instruct>: Find duplicates\n<Query>: q\n<Document>: d" in text


def test_a_template_of_chats_is_not_one_of_pairs():
    assert PairTemplate.find(Templates(default=CHAT)) is None
    assert PairTemplate.find(Templates()) is None
    template = PairTemplate.find(Templates(default=CHAT, rerank=QWEN.replace('"yes"', "YES")))
    assert "YES" in template.submit("q", "d").result()


def test_the_operators_template_comes_first(tmp_path):
    template = PairTemplate.find(Templates(default=QWEN), CHAT)
    assert template.submit("q", "d").result() == "query: q\ndocument: d\n"
    with pytest.raises(ConfigError, match="does not compile"):
        PairTemplate.find(Templates(), "{{ messages")


def test_a_template_may_reject_a_pair():
    source = QWEN + "{{ raise_exception('too short') }}"
    with pytest.raises(RequestError, match="too short"):
        PairTemplate.find(Templates(default=source)).submit("q", "d").result()
