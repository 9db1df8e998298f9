"""Languages of Whisper: codes and English names."""

from __future__ import annotations

from collections.abc import Collection

from octavo.errors import RequestError

_NAMES = """
    en=english zh=chinese de=german es=spanish ru=russian ko=korean fr=french ja=japanese
    pt=portuguese tr=turkish pl=polish ca=catalan nl=dutch ar=arabic sv=swedish it=italian
    id=indonesian hi=hindi fi=finnish vi=vietnamese he=hebrew uk=ukrainian el=greek ms=malay
    cs=czech ro=romanian da=danish hu=hungarian ta=tamil no=norwegian th=thai ur=urdu
    hr=croatian bg=bulgarian lt=lithuanian la=latin mi=maori ml=malayalam cy=welsh sk=slovak
    te=telugu fa=persian lv=latvian bn=bengali sr=serbian az=azerbaijani sl=slovenian
    kn=kannada et=estonian mk=macedonian br=breton eu=basque is=icelandic hy=armenian
    ne=nepali mn=mongolian bs=bosnian kk=kazakh sq=albanian sw=swahili gl=galician mr=marathi
    pa=punjabi si=sinhala km=khmer sn=shona yo=yoruba so=somali af=afrikaans oc=occitan
    ka=georgian be=belarusian tg=tajik sd=sindhi gu=gujarati am=amharic yi=yiddish lo=lao
    uz=uzbek fo=faroese ht=haitian_creole ps=pashto tk=turkmen nn=nynorsk mt=maltese
    sa=sanskrit lb=luxembourgish my=myanmar bo=tibetan tl=tagalog mg=malagasy as=assamese
    tt=tatar haw=hawaiian ln=lingala ha=hausa ba=bashkir jw=javanese su=sundanese
    yue=cantonese
"""
NAMES = {
    code: name.replace("_", " ") for code, name in (item.split("=") for item in _NAMES.split())
}
"""English name of each language, by code."""
_OTHER_NAMES = {
    "burmese": "my",
    "castilian": "es",
    "flemish": "nl",
    "haitian": "ht",
    "letzeburgesch": "lb",
    "mandarin": "zh",
    "moldavian": "ro",
    "moldovan": "ro",
    "panjabi": "pa",
    "pushto": "ps",
    "sinhalese": "si",
    "valencian": "ca",
}
_CODES = {name: code for code, name in NAMES.items()} | _OTHER_NAMES


def find_language(given: str, known: Collection[str]) -> str:
    """Return the code of a language.

    Args:
        given: code or English name, such as "de" or "German"; a region as in "de-AT" is ignored.
        known: codes that the model knows.

    Raises:
        RequestError: the model does not know the language.
    """
    name = given.strip().lower()
    code = name if name in NAMES else _CODES.get(name, name.replace("_", "-").split("-")[0])
    if code not in known:
        raise RequestError(
            f"language={given[:40]!r} is not a language of this model; give the code of one that "
            f"it knows ({', '.join(sorted(known))}).",
            "language",
        )
    return code
