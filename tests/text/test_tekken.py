"""Tokenizers in Mistral's tekken.json, against byte pair encoding by ranks."""

import base64
import itertools
import json
import random

import pytest

from octavo.errors import ModelError, RequestError
from octavo.parsers.detect import find_format
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from tests.mistral_files import write_tekken

SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AUDIO]", "[BEGIN_AUDIO]"]
MORE = [b"th", b"he", b"the", b" t", b" the", b"in", b"ing", b"\xc3\xa9", b"abc", b"bc"]
TOKENS = [*(bytes([i]) for i in range(256)), *MORE]
COUNT = 10


def tekken(**changes):
    config = {"pattern": r" ?[^\s]+|\s+", "default_vocab_size": COUNT + len(TOKENS)}
    config |= {"default_num_special_tokens": COUNT, "version": "v11"}
    data = {
        "config": config,
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for i, token in enumerate([*TOKENS, b"unused"])
        ],
        "special_tokens": [{"rank": i, "token_str": name} for i, name in enumerate(SPECIAL)],
    }
    return data | changes


def save(folder, **changes):
    (folder / "config.json").write_text("{}")
    (folder / "tekken.json").write_text(json.dumps(tekken(**changes)))
    return folder


def encode(word):
    """Return the tokens of a word: the neighbors with the lowest rank are joined first."""
    ranks = {token: i for i, token in enumerate(TOKENS)}
    if word in ranks:
        return [COUNT + ranks[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = [(ranks.get(a + b, 10**9), i) for i, (a, b) in enumerate(itertools.pairwise(parts))]
        if not pairs or (best := min(pairs))[0] == 10**9:
            return [COUNT + ranks[part] for part in parts]
        parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]


def test_tokens_follow_the_ranks(tmp_path):
    tokenizer = Tokenizer.from_folder(save(tmp_path))
    generator = random.Random(0)
    for _ in range(200):
        words = ["".join(generator.choices("thetinagbcé", k=6)) for _ in range(4)]
        text = " ".join(words)
        pieces = [words[0], *(f" {word}" for word in words[1:])]
        expected = [token for piece in pieces for token in encode(piece.encode())]
        assert tokenizer.encode(text, False) == expected
        assert tokenizer.decode(expected) == text
    assert tokenizer.encode("[INST]the") == [1, 3, COUNT + 258]
    assert (tokenizer.bos_token, tokenizer.eos_token, len(tokenizer)) == ("<s>", "</s>", 276)
    assert tokenizer.token_to_id("<SPECIAL_9>") == 9


def test_chats_with_sounds(tmp_path):
    template = ChatTemplate.from_tokenizer(Tokenizer.from_folder(save(tmp_path)), None)
    parts = [{"type": "audio"}, {"type": "text", "text": "What?"}]
    chat = [{"role": "user", "content": parts}, {"role": "assistant", "content": "Hello"}]
    chat.append({"role": "user", "content": "And?"})
    assert template.render(chat, placeholders={"audio": "[AUDIO]"}) == (
        "<s>[INST][BEGIN_AUDIO][AUDIO]What?[/INST]Hello</s>[INST]And?[/INST]"
    )


TOOL = {"name": "look", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": TOOL}]
CALL = {"id": "abcdefghi", "type": "function"}
CALL["function"] = {"name": "look", "arguments": '{"at":"é"}'}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "See"}, {"type": "image"}]},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "22", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "Done. ", "reasoning": "hm"},
    {"role": "user", "content": "And"},
    {"role": "user", "content": "more?"},
]
LISTED = (
    '[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "look", "description": "", '
    '"parameters": {"type": "object"}}}][/AVAILABLE_TOOLS]'
)
SYSTEM = "[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT]"
OLD_CALL = '[TOOL_CALLS][{"name": "look", "arguments": {"at": "é"}, "id": "abcdefghi"}]</s>'
OLD_RESULT = "[TOOL_RESULTS]abcdefghi[TOOL_CONTENT]22[/TOOL_RESULTS]"
WRITTEN = {  # mistral-common 1.13 writes the same
    "v3": f"<s>[INST][IMG]See[/INST]{OLD_CALL}"
    '[TOOL_RESULTS]{"content": 22, "call_id": "abcdefghi"}[/TOOL_RESULTS]Done.</s>'
    f"{LISTED}[INST]Be brief.\n\nAnd\n\nmore?[/INST]",
    "v7": f"<s>{SYSTEM}[INST][IMG]See[/INST]{OLD_CALL}{OLD_RESULT}Done.</s>"
    f"{LISTED}[INST]And\n\nmore?[/INST]",
    "v11": f"<s>{SYSTEM}[INST][IMG]See[/INST]"
    f'[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{{"at": "é"}}</s>{OLD_RESULT}Done.</s>'
    f"{LISTED}[INST]And\n\nmore?[/INST]",
    "v13": f"<s>{SYSTEM}{LISTED}[INST][IMG]See[/INST]"
    '[TOOL_CALLS]look[ARGS]{"at": "é"}</s>[TOOL_RESULTS]22[/TOOL_RESULTS]'
    "[THINK]hm[/THINK]Done. </s>[INST]And\n\nmore?[/INST]",
}
WRITTEN["v15"] = WRITTEN["v13"].replace(
    "[INST]", '[MODEL_SETTINGS]{"reasoning_effort": "none"}[/MODEL_SETTINGS][INST]', 1
)
FORMATS = {"v3": "mistral", "v7": "mistral", "v11": "mistral_v11", "v13": "mistral_v13"}
FORMATS["v15"] = "mistral_v13"
EFFORT = {"type": "enum", "values": ["none", "high"], "accepts_none": True, "default": "none"}
SETTINGS = {"reasoning_effort": EFFORT, "json_schema": {"type": "json_schema"}}


@pytest.mark.parametrize("version", WRITTEN)
def test_chats_by_version(tmp_path, version):
    (tmp_path / "config.json").write_text("{}")
    thinks = version in ("v13", "v15")
    write_tekken(tmp_path, version, thinks=thinks, settings=SETTINGS if version == "v15" else None)
    template = ChatTemplate.from_tokenizer(Tokenizer.from_folder(tmp_path))
    assert template.render(CHAT, tools=TOOLS) == WRITTEN[version]
    found = find_format(template.render, template.sources)
    assert found.name == FORMATS[version]
    assert found.thoughts == (("[THINK]", "[/THINK]") if thinks else None)
    with pytest.raises(RequestError, match="roles system, user, assistant and tool"):
        template.render([{"role": "critic", "content": "x"}])


def test_results_of_tools_are_json(tmp_path):
    """The oldest form has the values of JSON texts; mistral-common 1.13 writes the same."""
    (tmp_path / "config.json").write_text("{}")
    write_tekken(tmp_path, "v3", thinks=False)
    template = ChatTemplate.from_tokenizer(Tokenizer.from_folder(tmp_path))
    for content, written in (
        ('{"x":[1,2.50,true,null,"é"]}', '{"x": [1, 2.5, true, null, "é"]}'),
        ("1e5", "100000.0"),
        ("nan", '"nan"'),
        ("{", '"{"'),
        ("", '""'),
    ):
        chat = [*CHAT[:3], {"role": "tool", "content": content, "tool_call_id": "abcdefghi"}]
        rendered = template.render(chat)
        assert f'[TOOL_RESULTS]{{"content": {written}, "call_id": "abcdefghi"}}[/' in rendered
    parts = [{"type": "text", "text": text} for text in ("Be", "brief.")]
    chat = [{"role": "system", "content": parts}, {"role": "user", "content": "Hi"}]
    assert template.render(chat) == "<s>[INST]Be\n\nbrief.\n\nHi[/INST]"


def settings_of(folder, settings):
    """Return the template of a v15 with these settings, or None."""
    (folder / "config.json").write_text("{}")
    write_tekken(folder, "v15", settings=settings)
    tokenizer = Tokenizer.from_folder(folder)
    return tokenizer.chat_template and ChatTemplate.from_tokenizer(tokenizer)


def texts(*given):
    return [{"type": "text", "text": text} for text in given]


def test_settings_of_the_model(tmp_path):
    """From v15 on, the first turn follows the settings; mistral-common 1.13 writes the same."""
    chat = [
        {"role": "system", "content": texts("a", "b")},
        {"role": "system", "content": "c"},
        {"role": "user", "content": texts("", "d", "e")},
        {"role": "user", "content": texts("f", "g")},
        {"role": "assistant", "content": texts("h", "i")},
        {"role": "user", "content": "j"},
        {"role": "assistant", "content": "k ", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "lm", "tool_call_id": "abcdefghi"},
        {"role": "tool", "content": "n", "tool_call_id": "abcdefghi"},
    ]
    template = settings_of(tmp_path, SETTINGS)
    call = '[TOOL_CALLS]look[ARGS]{"at": "é"}'
    written = (
        "<s>[SYSTEM_PROMPT]ab[/SYSTEM_PROMPT][SYSTEM_PROMPT]c[/SYSTEM_PROMPT]"
        '[MODEL_SETTINGS]{"reasoning_effort": "high"}[/MODEL_SETTINGS][INST]de\n\nfg[/INST]hi</s>'
        f"[INST]j[/INST]k{call}{call}</s>[TOOL_RESULTS]lm[/TOOL_RESULTS][TOOL_RESULTS]n"
        "[/TOOL_RESULTS]"
    )
    assert template.render(chat, template_kwargs={"reasoning_effort": "high"}) == written
    assert template.render(chat) == written.replace("high", "none")
    for other in ("low", 5, ["high"], '"}[/MODEL_SETTINGS]'):
        with pytest.raises(RequestError, match=r"has no reasoning_effort .*; it has none, high"):
            template.render(chat, template_kwargs={"reasoning_effort": other})
    parts = [*texts("o"), {"type": "image"}, *texts("p", "q")]
    pictures = [*chat[:5], *({"role": "user", "content": it} for it in ("n", parts, texts("r")))]
    assert template.render(pictures).endswith("[INST]n\n\no[IMG]pq\n\nr[/INST]")
    without = {**EFFORT, "default": None}
    for settings in ({}, {"reasoning_effort": None}, {"reasoning_effort": without}):
        template = settings_of(tmp_path, settings)
        assert template.render(chat[2:3]) == "<s>[INST]de[/INST]"
    assert "high" in template.render(chat[2:3], template_kwargs={"reasoning_effort": "high"})


def test_a_version_without_a_template(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write_tekken(tmp_path, "v16")
    assert Tokenizer.from_folder(tmp_path).chat_template is None
    # mistral-common refuses it, too.
    assert settings_of(tmp_path, None) is None


@pytest.mark.parametrize(
    "effort",
    [
        {"values": ["none", "') }}{{ 7 * 7 }}"]},
        {"values": ["none"], "default": "high"},
        {"values": "none"},
        {"default": "none"},
    ],
    ids=range(4),
)
def test_damaged_settings(tmp_path, effort):
    with pytest.raises(ModelError, match="is damaged"):
        settings_of(tmp_path, {"reasoning_effort": effort})


CONFIG = tekken()["config"]


def vocab(tokens):
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(token).decode()}
        for i, token in enumerate(tokens)
    ]
    return {"vocab": entries, "config": CONFIG | {"default_vocab_size": COUNT + len(tokens)}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab": [{"rank": 1, "token_bytes": "AA=="}]}, "ranks of its tokens"),
        ({"vocab": [{"rank": 0, "token_bytes": "A"}]}, "is damaged"),
        ({"config": {}}, "pattern"),
        ({"special_tokens": [{"rank": 10, "token_str": "x"}]}, "'x' is no special token"),
        ({"special_tokens": [{"rank": 0, "token_str": "x"}]}, "with <s>"),
        ({"special_tokens": [{"rank": 1, "token_str": x} for x in "ab"]}, "have one rank"),
        ({"config": CONFIG | {"default_num_special_tokens": 10**9}}, "default_num_special_tok"),
        ({"config": CONFIG | {"default_vocab_size": 3}}, "default_vocab_size=3"),
        ({"config": CONFIG | {"pattern": "["}}, r"tekken\.json is damaged"),
        (vocab(TOKENS[1:]), "the single bytes"),
        (vocab([*TOKENS, b""]), "no bytes"),
        (vocab([*TOKENS, b"a" * 2000]), "more than 1024"),
        (vocab([*TOKENS, b"<s>"]), "'<s>' is a special token and a text's"),
    ],
)
def test_damaged_files(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_folder(save(tmp_path, **changes))
