"""Compare the token ids of GGUF files with llama.cpp's on random texts.

    python benchmarks/gguf_tokens.py FILE.gguf ... [--texts 100000] [--seed 0] [--show 5]
    python benchmarks/gguf_tokens.py --pre all [--texts 10000]

The texts mix all kinds of characters: words, contractions, digits of many scripts, runs of spaces,
Chinese, Korean, emoji with joiners, control characters, code, and the file's own tokens. With
`--pre`, the files have a small vocabulary made from such texts, where tokens cross the borders of
words, so that each difference between two pre-tokenizers is a difference of ids.

Needs `pip install gguf llama-cpp-python`. Prints the number of texts with other ids, and the first
ones, shortened as long as they differ.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import argparse
import ctypes
import random
import sys
import tempfile
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import llama_cpp
import tokenizers

from octavo.checkpoints.gguf.pre_tokenizers import PRE_TOKENIZERS
from octavo.checkpoints.gguf.tokenizer import tokenizer_texts
from octavo.text.tokenizer import Tokenizer

WORDS = (
    "the of quick brown Fox JUMPED over McDonald iPhone camelCase naïve Straße ÉCOLE éÉ "
    "I'm you're WE'VE it'S don't CAN'T they'll SHE'D 'Tis o'clock rock'n'roll l'eau "
    "Привет мир Ελλάδα עברית العربية हिन्दी বাংলা தமிழ் ไทย ລາວ ខ្មែរ မြန်မာ ქართული "
    "中文字符 日本語のテスト カタカナ 한국어 텍스트 𠀀𠀁 ㄅㄆㄇ 々〆 ﾃｽﾄ ＡＢＣ "
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 ❤️ 🤗 é̂ ñ à́ ﬁ ﬀ ² ³ ½ Ⅷ ① ٣٤٥ १२३ ４５ 𝟘𝟙 "
    "1 12 123 1234 12345 1234567 3.14 1,000,000 0x1F 1e-9 2024-05-01 12:30 $5 50% #1 "
    "... !!! ??? -- --- ==== **** //// ((( )) [] {} <> <= >= != := -> => :: ;; \\n `` '' "
    "¿ ¡ « » “ ” ‘ ’ … — – 。 、 ， ！ ？ 「 」 € £ ¥ © ® ™ ° ± × ÷ ∑ ∞ → ▁ ▁▁ Ġ Ċ "
    "<s> </s> <unk> <pad> <|endoftext|> <|im_start|> <0x0A> <|a|> <b> </b> [CLS] [MASK] "
)
SAMPLES = [
    *WORDS.split(),
    "def f(x):\n    return x + 1\n",
    "for (int i = 0; i < n; i++) {\n\t\ta[i] *= 2;\n\t}\r\n",
    '{"key": [1, 2.5, null], "ключ": "значение"}\n',
    "https://example.com/a?b=c&d=%20#e",
    "SELECT * FROM t WHERE id='1';",
    "# Title\n\n- item\n- item 2\n\n```py\nx\n```\n",
]
SPACES = " \t\n\r\v\f\u0085\u00a0\u1680\u2003\u2028\u2029\u202f\u205f\u3000\u200b\ufeff"
Encode = Callable[[str], list[int]]


def random_texts(count: int, tokens: list[str], seed: int) -> Iterator[str]:
    """Yield texts of up to a dozen parts."""
    rng = random.Random(seed)
    chars = [chr(c) for c in range(0x20000) if unicodedata.category(chr(c)) not in ("Cs", "Cn")]
    common = [c for c in chars if ord(c) < 0x3000]

    def part() -> str:
        match rng.randrange(14):
            case 0 | 1 | 2 | 3:
                return rng.choice(SAMPLES)
            case 4:
                return rng.choice(SPACES) * rng.choice((1, 1, 2, 3, 5, 17))
            case 5:
                return "".join(rng.choices(SPACES[:4], k=rng.randrange(1, 6)))
            case 6:
                return str(rng.randrange(10 ** rng.randrange(1, 13)))
            case 7:
                return "".join(rng.choices(common, k=rng.randrange(1, 6)))
            case 8:
                return rng.choice(chars)
            case 9:
                return rng.choice("=-_*#.~aA0e") * rng.randrange(1, 40)
            case 10 | 11:
                return rng.choice(tokens).replace("\u0120", " ").replace("\u2581", " ")
            case 12:
                return chr(rng.randrange(0x20))
            case _:
                word = rng.choice(SAMPLES)
                return rng.choice((word.upper(), word.lower(), word.title(), word[::-1]))

    for _ in range(count):
        glue = rng.choice(("", "", " ", "\n"))
        yield glue.join(part() for _ in range(rng.randrange(1, 13)))


def llama_encoder(file: str) -> Encode:
    """Return llama.cpp's tokenizer of a file; special tokens are added, and parsed in texts."""
    lib = llama_cpp
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(file.encode(), params)
    if not model:
        raise SystemExit(f"llama.cpp cannot read {file}")
    vocab = lib.llama_model_get_vocab(model)
    buffer = (ctypes.c_int32 * 2**16)()

    def encode(text: str) -> list[int]:
        data = text.encode()
        count = lib.llama_tokenize(vocab, data, len(data), buffer, len(buffer), True, True)
        return list(buffer[:count])

    return encode


def our_encoder(file: str) -> tuple[Encode, list[str]]:
    """Return Octavo's tokenizer of a file, and its tokens."""
    fields = gguf.GGUFReader(file).fields
    metadata = {k: f.contents() for k, f in fields.items() if k.startswith(("tok", "general"))}
    texts = tokenizer_texts(metadata)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in texts.items():
            Path(folder, name).write_text(text, "utf-8")
        tokenizer = Tokenizer.from_folder(folder)
    return tokenizer.encode, metadata["tokenizer.ggml.tokens"]


def shorten(text: str, differs: Callable[[str], bool]) -> str:
    """Remove characters as long as the rest still differs."""
    size = len(text) // 2
    while size:
        begin = 0
        while begin < len(text):
            shorter = text[:begin] + text[begin + size :]
            if differs(shorter):
                text = shorter
            else:
                begin += size
        size //= 2
    return text


def compare(file: str, name: str, texts: int, seed: int, show: int) -> int:
    """Print the differences of a file; return the number of texts that differ."""
    ours, tokens = our_encoder(file)
    theirs = llama_encoder(file)
    different = [t for t in random_texts(texts, tokens, seed) if ours(t) != theirs(t)]
    print(f"{name}: {len(different)} of {texts} texts differ", flush=True)
    shown = {shorten(t, lambda s: ours(s) != theirs(s)): t for t in different[: show * 4]}
    for text in list(shown)[:show]:
        a, b = ours(text), theirs(text)
        print(f"    {text!r} {[hex(ord(c)) for c in text[:6]]}\n      Octavo {a}\n      llama  {b}")
    return len(different)


def make_vocabulary(folder: str) -> dict[str, list[str]]:
    """Make tokens and merges from random texts, without a pre-tokenizer."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(False, use_regex=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=16000, initial_alphabet=alphabet, max_token_length=12, show_progress=False
    )
    backend.train_from_iterator(random_texts(60000, SAMPLES, -1), trainer)
    backend.model.save(folder)
    vocab = backend.get_vocab()
    lines = Path(folder, "merges.txt").read_text("utf-8").splitlines()
    return {"tokens": sorted(vocab, key=vocab.__getitem__), "merges": lines[1:]}


def write_vocabulary(file: str, pre: str, made: dict[str, list[str]]) -> None:
    """Write a GGUF file that contains only a vocabulary."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(made["tokens"])
    writer.add_token_merges(made["merges"])
    writer.add_add_bos_token(False)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*")
    parser.add_argument("--pre", nargs="+", default=[], help="names of pre-tokenizers, or all")
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", type=int, default=5)
    args = parser.parse_args()
    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    bad = 0
    for file in args.files:
        bad += compare(file, Path(file).name, args.texts, args.seed, args.show)
    with tempfile.TemporaryDirectory() as folder:
        made = make_vocabulary(folder) if args.pre else {}
        for pre in [*PRE_TOKENIZERS] if args.pre == ["all"] else args.pre:
            file = f"{folder}/{pre}.gguf"
            write_vocabulary(file, pre, made)
            bad += compare(file, pre, args.texts, args.seed, args.show)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
