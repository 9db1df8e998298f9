"""Special tokens and prompts of Whisper, and its languages."""

import pytest

from octavo.errors import ModelError, RequestError
from octavo.speech.languages import NAMES, find_language
from octavo.speech.tokens import WhisperTokens

NAMES_OF_TOKENS = [
    *("endoftext", "startoftranscript", "en", "de", "haw", "translate", "transcribe"),
    *("startofprev", "nocaptions", "notimestamps"),
]
VOCABULARY = {f"<|{name}|>": 100 + i for i, name in enumerate(NAMES_OF_TOKENS)}
MANY = WhisperTokens.read(VOCABULARY.get, True)
ENGLISH = WhisperTokens.read(VOCABULARY.get, False)


def test_prompts():
    assert MANY.prompt("de", "translate", True) == [101, 103, 105]
    assert MANY.prompt("en", "transcribe", False) == [101, 102, 106, 109]
    assert ENGLISH.prompt("en", "transcribe", False) == [101, 109]
    assert ENGLISH.prompt("en", "transcribe", True) == [101]
    assert MANY.prompt("en", "transcribe", True, [1, 2, 3], 3) == [107, 2, 3, 101, 102, 106]
    assert MANY.prompt("en", "transcribe", True, [1, 2, 3], 1) == [101, 102, 106]
    assert MANY.prompt(None, "transcribe", True)[:1] == [101]


def test_times():
    assert MANY.seconds(109) is None
    assert MANY.seconds(110) == 0.0
    assert MANY.seconds(110 + 1500) == pytest.approx(30.0)


@pytest.mark.parametrize("token", ["startoftranscript", "notimestamps", "transcribe"])
def test_a_missing_token_is_named(token):
    found = {name: i for name, i in VOCABULARY.items() if token not in name}
    with pytest.raises(ModelError, match=token):
        WhisperTokens.read(found.get, True)


def test_languages():
    assert MANY.language_code(None, "transcribe") is None
    assert [MANY.language_code(x, "translate") for x in ("de", "German", "de-AT", "hawaiian")] == [
        "de",
        "de",
        "de",
        "haw",
    ]
    assert ENGLISH.language_code(None, "transcribe") == ENGLISH.language_code("en", "transcribe")
    for special, given in ((MANY, "fr"), (MANY, "klingon"), (ENGLISH, "de")):
        with pytest.raises(RequestError, match=f"language='{given}' is not a language of this"):
            special.language_code(given, "transcribe")
    with pytest.raises(RequestError, match="English only, and cannot translate"):
        ENGLISH.language_code(None, "translate")


def test_names_are_those_of_transformers():
    from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

    assert NAMES == LANGUAGES
    for name, code in TO_LANGUAGE_CODE.items():
        assert find_language(name, NAMES) == code
