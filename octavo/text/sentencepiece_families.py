"""Tokenizers of folders that have SentencePiece models and no tokenizer.json.

Each family arranges its tokens in its own way, which the class in tokenizer_config.json or the
model's type in config.json tells. The arrangements are those of transformers' tokenizers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.errors import ModelError, UnsupportedError, reason_of
from octavo.text.sentencepiece import SentencePiece, replace_regex

FILES = ("spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "source.spm", "spm.model")
"""Files with a SentencePiece model."""
_MOST_BYTES = 64 * 2**20
_MOST_EXTRA_TOKENS = 2**14
_MOST_ID = 2**22
_CODE_MARK = "\ue000"
"""Character that the normalizer writes before a code of a language at the beginning of a text."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_MBART = _words(
    "ar_AR cs_CZ de_DE en_XX es_XX et_EE fi_FI fr_XX gu_IN hi_IN it_IT ja_XX kk_KZ ko_KR lt_LT "
    "lv_LV my_MM ne_NP nl_XX ro_RO ru_RU si_LK tr_TR vi_VN zh_CN"
)
_MBART50 = _MBART + _words(
    "af_ZA az_AZ bn_IN fa_IR he_IL hr_HR id_ID ka_GE km_KH mk_MK ml_IN mn_MN mr_IN pl_PL ps_AF "
    "pt_XX sv_SE sw_KE ta_IN te_IN th_TH tl_XX uk_UA ur_PK xh_ZA gl_ES sl_SI"
)
_M2M100 = {
    "m2m100": _words(
        "af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl "
        "gu ha he hi hr ht hu hy id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml "
        "mn mr ms my ne nl no ns oc or pa pl ps pt ro ru sd si sk sl so sq sr ss su sv sw ta th tl "
        "tn tr uk ur uz vi wo xh yi yo zh zu"
    ),
    "wmt21": _words("en ha is ja cs ru zh de"),
}


@dataclass(frozen=True)
class Built:
    """Tokenizer of a folder.

    Attributes:
        text: tokenizer.json.
        config: named tokens that the folder's own files may replace.
        divider: tokenizer.json that divides texts, if it has ids of its own.
        ids: the id in `text` of each token of `divider`.
    """

    text: str
    config: dict[str, Any]
    divider: str | None = None
    ids: Callable[[Mapping[str, int]], list[int]] | None = None


@dataclass
class _Layout:
    """Tokens of a family, in the order of their ids, around those of the file."""

    front: list[tuple[str, float]] = field(default_factory=list)
    skip: int = 0
    """Tokens of the file that `front` replaces."""
    back: list[str] = field(default_factory=list)
    unk: str = "<unk>"
    begin: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    between: list[str] = field(default_factory=list)
    """Special tokens before the second text of a pair."""
    second_type: int = 0
    """Type of the tokens of the second text of a pair."""
    special: list[str] = field(default_factory=list)
    always_prefix: bool = True
    config: dict[str, Any] = field(default_factory=dict)


def build_tokenizer(path: Path, config: Mapping[str, Any]) -> Built | None:
    """Return the tokenizer of a folder; None: it has no SentencePiece model.

    Args:
        path: the folder.
        config: contents of special_tokens_map.json and tokenizer_config.json.

    Raises:
        ModelError: a file is damaged or too large, or files do not belong together.
        UnsupportedError: the family is not supported.
    """
    name = next((name for name in FILES if (path / name).is_file()), None)
    if name is None:
        return None
    kind = _kind(path, config)
    model = SentencePiece.from_bytes(_read_bytes(path / name), str(path / name))
    if kind == "MarianTokenizer":
        return _marian(path, model, config)
    if kind == "M2M100Tokenizer":
        return _m2m100(path, model, config)
    if kind not in _LAYOUTS:
        known = ", ".join(sorted([*_LAYOUTS, "M2M100Tokenizer", "MarianTokenizer"]))
        raise UnsupportedError(
            f"{path} has no tokenizer.json, and {name} of a tokenizer of the class "
            f"{kind or 'unknown'!r} cannot be read; supported: {known}. Convert it once with "
            "transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )
    layout = _LAYOUTS[kind](model, config)
    tokens = [*layout.front]
    tokens += [(piece.text, piece.score) for piece in model.pieces[layout.skip :]]
    tokens += [(token, 0.0) for token in layout.back]
    return Built(_tokenizer_json(model, tokens, layout), layout.config)


def _kind(path: Path, config: Mapping[str, Any]) -> str:
    """Return the class of a folder's tokenizer, without "Fast"; "": unknown."""
    named = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if named and named != "PreTrainedTokenizer":
        return "MBart50Tokenizer" if named == "MBartTokenizer" and _has_50(config) else named
    if (path / "source.spm").is_file():
        return "MarianTokenizer"
    model_type = str(_read_json(path / "config.json").get("model_type"))
    if model_type == "m2m_100":
        return "M2M100Tokenizer" if (path / "vocab.json").is_file() else "NllbTokenizer"
    if model_type == "mbart" and _has_50(config):
        return "MBart50Tokenizer"
    return _OF_MODEL_TYPE.get(model_type, "")


def _has_50(config: Mapping[str, Any]) -> bool:
    return "sl_SI" in _extra(config)


def _extra(config: Mapping[str, Any]) -> list[str]:
    """Return the additional special tokens of a folder's files."""
    listed = config.get("additional_special_tokens") or config.get("extra_special_tokens") or []
    if not isinstance(listed, list) or len(listed) > _MOST_EXTRA_TOKENS:
        raise ModelError(
            "additional_special_tokens in tokenizer_config.json is not a list of at most "
            f"{_MOST_EXTRA_TOKENS} tokens."
        )
    return [str(token["content"] if isinstance(token, dict) else token) for token in listed]


def _t5(model: SentencePiece, config: Mapping[str, Any]) -> _Layout:
    count = config.get("extra_ids", 100)
    if not isinstance(count, int) or not 0 <= count <= _MOST_EXTRA_TOKENS:
        raise ModelError(
            f"extra_ids in tokenizer_config.json is {count!r}, not a number from 0 to "
            f"{_MOST_EXTRA_TOKENS}."
        )
    extra = [f"<extra_id_{i}>" for i in range(count - 1, -1, -1)]
    named = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return _Layout(
        back=extra,
        end=["</s>"],
        special=[*named.values(), *extra],
        config=named,
    )


def _pegasus(model: SentencePiece, config: Mapping[str, Any]) -> _Layout:
    if config.get("offset", 103) != 103:
        raise UnsupportedError(
            f"offset={config['offset']!r} in tokenizer_config.json is not supported for Pegasus "
            "without tokenizer.json; it must be 103."
        )
    named = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    named |= {"mask_token": "<mask_2>"}
    unused = [f"<unk_{i}>" for i in range(2, 103)]
    masks = ["<mask_1>", "<mask_2>"]
    front = [(token, 0.0) for token in ("<pad>", "</s>", *masks)]
    return _Layout(
        front=front + [(token, -100.0) for token in unused],
        skip=2,
        end=["</s>"],
        special=[*named.values(), "<mask_1>", *unused],
        config=named,
    )


def _fairseq(languages: Sequence[str]) -> _Layout:
    """Return the layout of XLM-R and the models that begin with it."""
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    named |= {"sep_token": "</s>", "cls_token": "<s>", "mask_token": "<mask>"}
    front = ["<s>", "<pad>", "</s>", "<unk>"]
    return _Layout(
        front=[(token, 0.0) for token in front],
        skip=3,
        back=[*languages, "<mask>"],
        end=["</s>"],
        special=[*front, *languages, "<mask>"],
        config=named,
    )


def _xlm_roberta(model: SentencePiece, config: Mapping[str, Any]) -> _Layout:
    layout = _fairseq(())
    layout.begin, layout.between = ["<s>"], ["</s>"]
    return layout


def _translator(
    languages: Sequence[str], config: Mapping[str, Any], default: str, last: bool
) -> _Layout:
    """Return the layout of a model that reads the code of a text's language before or after it."""
    language = _language(config, languages, default)
    layout = _fairseq(languages)
    if last:
        layout.end = ["</s>", language]
    else:
        layout.begin = [language]
    return layout


def _language(config: Mapping[str, Any], languages: Sequence[str], default: str) -> str:
    language = config.get("src_lang") or default
    if language not in languages:
        raise ModelError(
            f"src_lang={language!r} in tokenizer_config.json is not one of the tokenizer's "
            f"{len(languages)} languages."
        )
    return str(language)


def _mbart(model: SentencePiece, config: Mapping[str, Any]) -> _Layout:
    return _translator(_MBART, config, "en_XX", last=True)


def _mbart50(model: SentencePiece, config: Mapping[str, Any]) -> _Layout:
    return _translator(_MBART50, config, "en_XX", last=False)


def _nllb(model: SentencePiece, config: Mapping[str, Any]) -> _Layout:
    languages = [token for token in _extra(config) if token != "<mask>"]
    if not languages:
        raise ModelError(
            "NLLB's special_tokens_map.json or tokenizer_config.json must list its languages in "
            "additional_special_tokens, as there is no tokenizer.json."
        )
    return _translator(languages, config, "eng_Latn", last=bool(config.get("legacy_behaviour")))


def _deberta(model: SentencePiece, config: Mapping[str, Any]) -> _Layout:
    for field_name in ("do_lower_case", "split_by_punct"):
        if config.get(field_name):
            raise UnsupportedError(
                f"{field_name}=true in tokenizer_config.json is not supported for DeBERTa without "
                "tokenizer.json. Convert it once with transformers: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
            )
    named = {"bos_token": "[CLS]", "eos_token": "[SEP]", "unk_token": "[UNK]"}
    named |= {"sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]"}
    named |= {"mask_token": "[MASK]"}
    in_file = any(piece.text == "[MASK]" for piece in model.pieces)
    return _Layout(
        back=[] if in_file else ["[MASK]"],
        unk="[UNK]",
        begin=["[CLS]"],
        end=["[SEP]"],
        second_type=1,
        special=[*named.values()],
        config=named,
    )


def _plain(model: SentencePiece, config: Mapping[str, Any]) -> _Layout:
    """Return the layout of decoders, whose ids are those of the file."""
    special = [piece.text for piece in model.pieces if piece.control]
    unk = next((piece.text for piece in model.pieces if piece.kind == 2), "<unk>")
    named = {"bos_token": "<s>", "eos_token": "</s>"}
    if "<bos>" in special:
        named = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return _Layout(
        unk=unk,
        special=special,
        always_prefix=config.get("legacy") is not False,
        config=named | {"unk_token": unk, "add_bos_token": True},
    )


_LAYOUTS: dict[str, Callable[[SentencePiece, Mapping[str, Any]], _Layout]] = {
    "T5Tokenizer": _t5,
    "MT5Tokenizer": _t5,
    "PegasusTokenizer": _pegasus,
    "XLMRobertaTokenizer": _xlm_roberta,
    "MBartTokenizer": _mbart,
    "MBart50Tokenizer": _mbart50,
    "NllbTokenizer": _nllb,
    "DebertaV2Tokenizer": _deberta,
    "LlamaTokenizer": _plain,
    "CodeLlamaTokenizer": _plain,
    "GemmaTokenizer": _plain,
}
_OF_MODEL_TYPE = {
    "t5": "T5Tokenizer",
    "mt5": "T5Tokenizer",
    "umt5": "T5Tokenizer",
    "pegasus": "PegasusTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "mbart": "MBartTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "llama": "LlamaTokenizer",
    "mistral": "LlamaTokenizer",
    "mixtral": "LlamaTokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
}
"""Classes of tokenizers by the `model_type` of config.json, where no file names the class."""


def _m2m100(path: Path, model: SentencePiece, config: Mapping[str, Any]) -> Built:
    kind = config.get("language_codes", "m2m100")
    if kind not in _M2M100:
        raise ModelError(f"language_codes={kind!r} in tokenizer_config.json is unknown.")
    codes = _M2M100[kind]
    vocab = _read_vocab(path / "vocab.json")
    size = len(vocab)
    languages = [f"__{code}__" for code in codes]
    vocab |= {token: size + i for i, token in enumerate(languages)}
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    special = [*named.values(), *languages]
    language = f"__{_language(config, codes, 'en')}__"
    return _built(model, vocab, named, special, [language])


def _marian(path: Path, model: SentencePiece, config: Mapping[str, Any]) -> Built:
    if config.get("separate_vocabs"):
        raise UnsupportedError(
            f"{path} has separate vocabularies for its two languages (separate_vocabs), which are "
            "not supported; give token ids."
        )
    vocab = _read_vocab(path / "vocab.json")
    named = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    codes = [token for token in vocab if token.startswith(">>") and token.endswith("<<")]
    return _built(model, vocab, named, [*named.values()], [], codes)


def _built(
    model: SentencePiece,
    vocab: dict[str, int],
    named: dict[str, str],
    special: list[str],
    begin: list[str],
    codes: Sequence[str] = (),
) -> Built:
    """Return a tokenizer whose ids are those of vocab.json.

    A SentencePiece model divides a text; its tokens that vocab.json lacks are unknown.

    Args:
        model: the model.
        vocab: ids by token.
        named: named tokens.
        special: tokens that are found in a text before anything else.
        begin: special tokens before each text.
        codes: tokens that count as such at the beginning of a text only.
    """
    if missing := [token for token in named.values() if token not in vocab]:
        raise ModelError(f"vocab.json has no token {missing[0]!r}.")
    layout = _Layout(begin=begin, end=["</s>"], special=special, config=dict(named))
    # No text has a control token; one that is not special for the family would be found as text.
    pieces = [(piece.text, piece.score) for piece in model.pieces if not piece.control]
    pieces += [(token, 0.0) for token in dict.fromkeys(special)]
    divider = json.loads(_tokenizer_json(model, pieces, layout))
    if codes:
        # A code is found in the normalized text, where only one at the beginning has the mark.
        pattern = "|".join(re.escape(code[2:-2]) for code in codes)
        steps = divider["normalizer"]["normalizers"]
        steps.insert(0, replace_regex(rf"\A>>(?=(?:{pattern})<<)", _CODE_MARK + ">>"))
        divider["added_tokens"] += [
            _added(len(pieces) + i, code) | {"normalized": True, "special": False}
            for i, code in enumerate(codes)
        ]
    unk = vocab["<unk>"]
    whole = {
        "version": "1.0",
        "added_tokens": [_added(vocab[token], token) for token in _by_id(special, vocab)],
        "decoder": model.decoder(),
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    return Built(
        json.dumps(whole, ensure_ascii=False),
        layout.config,
        json.dumps(divider, ensure_ascii=False),
        lambda tokens: [vocab.get(t, unk) for t in sorted(tokens, key=tokens.__getitem__)],
    )


def _tokenizer_json(model: SentencePiece, tokens: list[tuple[str, float]], layout: _Layout) -> str:
    ids = {token: i for i, (token, _) in enumerate(tokens)}
    if missing := [t for t in (*layout.special, layout.unk, *layout.end) if t not in ids]:
        raise ModelError(f"The SentencePiece model has no token {missing[0]!r}.")

    def around(sequence: str, before: list[str], kind: int) -> list[dict[str, Any]]:
        texts = [{"SpecialToken": {"id": token, "type_id": kind}} for token in before]
        texts.append({"Sequence": {"id": sequence, "type_id": kind}})
        return texts + [{"SpecialToken": {"id": token, "type_id": kind}} for token in layout.end]

    first = around("A", layout.begin, 0)
    used = dict.fromkeys([*layout.begin, *layout.end, *layout.between])
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [_added(ids[t], t) for t in _by_id(layout.special, ids)],
            "normalizer": model.normalizer(layout.always_prefix),
            "pre_tokenizer": model.pre_tokenizer(layout.always_prefix),
            "post_processor": {
                "type": "TemplateProcessing",
                "single": first,
                "pair": [*first, *around("B", layout.between, layout.second_type)],
                "special_tokens": {t: {"id": t, "ids": [ids[t]], "tokens": [t]} for t in used},
            }
            if used
            else None,
            "decoder": model.decoder(),
            "model": model.model(tokens, ids[layout.unk]),
        },
        ensure_ascii=False,
    )


def _by_id(tokens: Sequence[str], ids: Mapping[str, int]) -> list[str]:
    return sorted(dict.fromkeys(tokens), key=ids.__getitem__)


def _added(token_id: int, token: str) -> dict[str, Any]:
    return {
        "id": token_id,
        "content": token,
        "single_word": False,
        "lstrip": token == "<mask>",
        "rstrip": False,
        "normalized": False,
        "special": True,
    }


def _read_bytes(file: Path) -> bytes:
    try:
        size = file.stat().st_size
        if size > _MOST_BYTES:
            raise ModelError(f"{file} has {size} bytes; at most {_MOST_BYTES} are supported.")
        return file.read_bytes()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {reason_of(error)}.") from error


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_bytes(file))
    except ValueError as error:
        raise ModelError(f"{file} cannot be read: {reason_of(error)}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} does not hold a JSON object.")
    return value


def _read_vocab(file: Path) -> dict[str, int]:
    vocab = _read_json(file)
    ids = set(map(repr, vocab.values()))
    if not vocab or len(ids) < len(vocab):
        raise ModelError(f"{file} is missing or empty, or has an id twice.")
    for token, value in vocab.items():
        if type(value) is not int or not 0 <= value < _MOST_ID:
            raise ModelError(f"{file} has the wrong id {value!r} for {token[:80]!r}.")
    return vocab
