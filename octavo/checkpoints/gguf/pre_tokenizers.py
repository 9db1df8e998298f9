r"""Pre-tokenizers of byte-level BPE, by the names that GGUF files have for them.

A pre-tokenizer splits a text by one regular expression after the other: each match is a part, and
so is each text between two matches. The expressions are those of the models' own tokenizer.json
where llama.cpp cites them; llama.cpp itself computes with simpler ones, since its library has no
`\p{Lu}`. The syntax is Oniguruma's, which the `tokenizers` library uses.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """Rules for text before BPE merges its characters."""

    patterns: tuple[str, ...]
    """Regular expressions that split the text, in order."""
    ignore_merges: bool = False
    """True if a part that is a token as a whole is not made by merges."""
    add_bos: bool = False
    """True if texts begin with the beginning-of-sequence token unless the file denies it."""


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}"


def _cased_words(upper: str, lower: str, end: str = "") -> str:
    """Return the expression of words with at most one change from upper to lower case.

    Args:
        upper: members of the class of letters before the change.
        lower: members of the class of letters after it.
        end: optional end of a word.
    """
    lead = r"[^\r\n\p{L}\p{N}]?"
    return f"{lead}[{upper}]*[{lower}]+{end}|{lead}[{upper}]+[{lower}]*{end}"


_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = _cased_words(_UPPER, _LOWER)
_CASED_CONTRACTED = _cased_words(_UPPER, _LOWER, f"{_CONTRACTION}?")
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_GPT4O = rf"{_CASED_CONTRACTED}|\p{{N}}{{1,3}}|{_SYMBOLS}|{_SPACES}"
_NO_HAN = r"&&[^\p{Han}]"
_KIMI = _cased_words(_UPPER + _NO_HAN, _LOWER + _NO_HAN, f"{_CONTRACTION}?")
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3_WORD = rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3 = rf"{_DEEPSEEK3_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_KANA_AND_HAN = r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
_HAN_TO_HANGUL = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"
_DEEPSEEK_LETTERS = (
    r"\s?[A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293"
    r"\u0295-\u02AF\u0370-\u0373\u0376\u0377\u037B-\u037D\u037F\u0386\u0388-\u038A\u038C"
    r"\u038E-\u03A1\u03A3-\u03F5\u03F7-\u0481\u048A-\u052F\u0531-\u0556\u10A0-\u10C5"
    r"\u13A0-\u13F5\u13F8-\u13FD\u1C90-\u1CBA\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-\u1D77"
    r"\u1D79-\u1D9A\u1E00-\u1F15\u1F18-\u1F1D\u1F20-\u1F45\u1F48-\u1F4D\u1F50-\u1F57"
    r"\u1F59\u1F5B\u1F5D\u1F5F-\u1F7D\u1F80-\u1FB4\u1FB6-\u1FBC\u1FBE\u1FC2-\u1FC4"
    r"\u1FC6-\u1FCC\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-\u1FEC\u1FF2-\u1FF4\u1FF6-\u1FFC"
    r"\u2102\u2107\u210A-\u2113\u2115\u2119-\u211D\u2124\u2126\u2128\u212A-\u212D"
    r"\u212F-\u2134\u2139\u213C-\u213F\u2145-\u2149\u214E\u2183\u2184\u2C00-\u2C7B"
    r"\u2C7E-\u2CE4\u2CEB-\u2CEE\u2CF2\u2CF3\uA640-\uA66D\uA680-\uA69B\uA722-\uA76F"
    r"\uA771-\uA787\uA78B-\uA78E\uAB70-\uABBF\uFB00-\uFB06\uFB13-\uFB17\uFF21-\uFF3A"
    r"\uFF41-\uFF5A\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}"
    r"\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}]+"
)
_DEEPSEEK_PUNCTUATION = r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+"
_ASIAN_SCRIPTS = (
    r"[\u4E00-\u9FFF\u3400-\u4DBF\u8C48-\uFAFF\u3040-\u309F\u30A0-\u30FF\uFF65-\uFF9F"
    r"\u2F00-\u2FDF\u0E40-\u0E7F\u0E80-\u0EFF\u1780-\u17FF\u1000-\u109F\uAA60-\uAA7F"
    r"\uA9E0-\uA9FF\uAC00-\uD7AF\u1100-\u11FF]+"
)
_YOUTU_SCRIPTS = (
    r"[\uAC00-\uD7A3\u3131-\u318E]+"
    r"|[\uFF01\u2026\u201C\u201D\u2018\u2019\u2014\uFF1A\uFF1B\uFF0C\u3001-\u303F\uFE30-\uFE4F]+"
    r"|[\u3105-\u312F]+|[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
)
_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uFF0C\u3001\u0964\u06D4\u060C)]+"
_EXAONE_WORD = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
_JAIS2_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))


def _groups_of_three(digit: str) -> tuple[str, str]:
    """Return expressions that split a run of digits into groups of three from its end.

    A lookahead at each group would need quadratic time. Here the first expression splits off the
    one or two digits that precede whole groups, once for each run, which is a part of its own.
    """
    return rf"\A{digit}{{1,2}}(?=(?:{digit}{{3}})++\z)", rf"{digit}{{3}}"


_DIGITS = (r"\p{N}+", *_groups_of_three(r"\p{N}"))

_GPT2_RULES = PreTokenizer((_GPT2,))
_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_RULES = PreTokenizer((_LLAMA3,))
_LLAMA3_BOS = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_RULES = PreTokenizer((_QWEN2,))
_DEEPSEEK3_RULES = PreTokenizer((r"\p{N}{1,3}", _KANA_AND_HAN, _DEEPSEEK3))
_GPT4O_RULES = PreTokenizer((_GPT4O,))
_BLOOM_RULES = PreTokenizer((_BLOOM,))
_BAILING_RULES = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)
_COHERE_RULES = PreTokenizer(
    # The model's own: \d{1,3}(?=(?:\d{3})*\b)
    (r"(?<!\d)\d++(?!\w)", *_groups_of_three(r"\d"), _GPT4O)
)

_BY_RULES: tuple[tuple[PreTokenizer, str], ...] = (
    (
        PreTokenizer(
            (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
        ),
        "default",
    ),
    (
        _LLAMA3_BOS,
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (_LLAMA3_RULES, "dbrx smaug-bpe chatglm-bpe"),
    (PreTokenizer((_LLAMA3,), ignore_merges=True), "glm4 glm5"),
    (
        PreTokenizer(
            (
                r"[\r\n]",
                _DEEPSEEK_LETTERS,
                _DEEPSEEK_PUNCTUATION,
                r"\s+$",
                _HAN_TO_HANGUL,
                r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    (
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_TO_HANGUL, r"\p{N}")),
        "deepseek-coder",
    ),
    (_DEEPSEEK3_RULES, "deepseek-v3 hunyuan-dense hy_v4 joyai-llm"),
    (
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                _KANA_AND_HAN,
                rf"{_DEEPSEEK3_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
                r"\p{N}",
            )
        ),
        "spark2_5",
    ),
    (
        PreTokenizer(
            (
                _YOUTU_SCRIPTS,
                rf"{_CASED_CONTRACTED}|\p{{N}}|{_SYMBOLS}|{_SPACES}",
            ),
            ignore_merges=True,
        ),
        "youtu",
    ),
    (
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
        "falcon",
    ),
    (
        _DIGITS_GPT2,
        "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2",
    ),
    (
        _GPT2_RULES,
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert "
        "jina-v1-en jina-v2-code roberta-bpe mpt olmo jais trillion granite-docling exaone4",
    ),
    (
        _QWEN2_RULES,
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    ),
    (
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
            )
        ),
        "qwen35",
    ),
    (PreTokenizer((rf"{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}",)), "ufakzeka"),
    (PreTokenizer((r"[^\n]+|\n+", _QWEN2)), "laguna"),
    (_BLOOM_RULES, "poro-chat bloom gpt3-finnish"),
    (PreTokenizer((_BLOOM, r"\p{N}")), "viking"),
    (
        PreTokenizer(
            (rf"{_CASED}|\p{{N}}|{_SYMBOLS}|{_SPACES}",),
            ignore_merges=True,
            add_bos=True,
        ),
        "tekken",
    ),
    (
        PreTokenizer(
            (
                r"<sentinel:[0-9]+>",
                r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
        "chameleon",
    ),
    (_GPT4O_RULES, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (PreTokenizer((_GPT4O,), ignore_merges=True), "granite-embed-multi-97m"),
    (_COHERE_RULES, "tiny_aya cohere2moe"),
    (
        PreTokenizer(
            (rf"\p{{Han}}+|{_KIMI}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}",),
        ),
        "kimi-k2",
    ),
    (PreTokenizer((r"\p{N}+", r"\d+", *_groups_of_three(r"\d"))), "superbpe"),
    (_BAILING_RULES, "bailingmoe bailingmoe2 llada-moe"),
    (
        PreTokenizer(
            (rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
        ),
        "seed-coder",
    ),
    (PreTokenizer((*_DIGITS, _ASIAN_SCRIPTS, _DEEPSEEK3)), "afmoe"),
    (
        PreTokenizer(
            (
                rf"{_CONTRACTION}|{_EXAONE_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
                r"|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
        "exaone-moe",
    ),
    (
        PreTokenizer(
            (
                r"\p{N}{1,3}",
                rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_PUNCTUATION}|{_SPACES}",
            ),
            ignore_merges=True,
        ),
        "minicpm5",
    ),
    (
        PreTokenizer(
            (
                rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|\s*[\r\n]+"
                rf"|{_JAIS2_SPACES}|\s",
            )
        ),
        "jais-2",
    ),
)

PRE_TOKENIZERS = {name: rules for rules, names in _BY_RULES for name in names.split()}
"""Rules of byte-level BPE by `tokenizer.ggml.pre`."""

LINES = PreTokenizer((r"[^\n]+|\n+",))
"""Rules of BPE on characters, where spaces are part of the words: a line is one part."""
LINES_NAMES = frozenset({"gemma4", "granite-embed-multi-311m", "sarvam-moe"})
"""Values of `tokenizer.ggml.pre` with these rules."""
NFC_NAMES = frozenset({"qwen2", "qwen35", "deepseek-r1-qwen"})
"""Values of `tokenizer.ggml.pre` whose models' tokenizer.json composes characters first (NFC).

llama.cpp omits this step.
"""
