"""Conversion of text to tokens and back, by the `tokenizers` library.

A tokenizer is read from a Hugging Face folder: `tokenizer.json`, Mistral's `tekken.json`, or a
SentencePiece model contains the tokenizer; `tokenizer_config.json` and `special_tokens_map.json`
name the special tokens and the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tokenizers

from octavo.checkpoints.base import Checkpoint
from octavo.checkpoints.registry import open_checkpoint
from octavo.errors import (
    ContextLengthError,
    ModelError,
    RequestError,
    UnsupportedError,
    reason_of,
)
from octavo.system.byte_chars import BYTE_OF_CHAR, bytes_of
from octavo.system.device import trim_memory
from octavo.text.longest_match import LongestMatch

TokenizerMode = Literal["auto", "mistral"]
_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
REPLACEMENT = "\ufffd"
MAX_CHARS_PER_TOKEN = 16
"""Upper bound of the characters per token in long texts: four are usual."""
MAX_TOKENS = 2**17
"""Maximum tokens of a text without a context limit: making a list of them is one call, too."""
# In characters: limit for tokenising at once, and for tokenising to determine the length.
_SHORT_TEXT = 1_000
_SMALL_TEXT = 2**16
# Tokens beyond those to keep: more than one word has, and than the end of a text changes.
_MORE_TOKENS = 256


class BatchEncoding(dict[str, Any]):
    """Result of calling a `Tokenizer`: "input_ids" and "attention_mask", also as attributes."""

    @property
    def input_ids(self) -> Any:
        """Token ids: a list, or a list for each text."""
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        """Mask of ones in the shape of the ids."""
        return self["attention_mask"]


def _longest_first(lengths: list[int], total: int) -> list[int]:
    """Return lengths of one or two texts with at most `total` tokens, as transformers cuts them."""
    if sum(lengths) <= total:
        return lengths
    if len(lengths) == 1:
        return [total]
    shorter, longer = min(lengths), max(total - min(lengths), 0)
    if shorter > longer:
        shorter, longer = total // 2, total - total // 2
    return [shorter, longer] if lengths[0] <= lengths[1] else [longer, shorter]


def _batch_encoding(
    ids: list[list[int]], several: bool, return_tensors: str | None
) -> BatchEncoding:
    """Make token ids with their mask: of one text or of several, as lists or as tensors."""
    masks = [[1] * len(one) for one in ids]
    if return_tensors is None:
        if several:
            return BatchEncoding(input_ids=ids, attention_mask=masks)
        return BatchEncoding(input_ids=ids[0], attention_mask=masks[0])
    if return_tensors != "pt":
        raise RequestError(
            f"return_tensors={return_tensors!r} is not supported; use 'pt'.", "return_tensors"
        )
    if len(set(map(len, ids))) > 1:
        raise RequestError(
            "return_tensors='pt' needs texts of one length, as padding is not supported; pass one "
            "at a time.",
            "return_tensors",
        )
    import torch  # most tokenizers never need it

    return BatchEncoding(input_ids=torch.tensor(ids), attention_mask=torch.tensor(masks))


class Tokenizer:
    """Immutable tokenizer; several threads may call every method at once.

    Other methods have the names of transformers' tokenizers: calling it, `apply_chat_template`,
    `get_vocab` ...

    Attributes:
        config: contents of tokenizer_config.json and special_tokens_map.json.
        chat_templates: jinja sources by name ("default", "tool_use" ...); may be empty.
        special_tokens: the named special tokens ("bos_token" -> "<s>" ...).
        bos_token_id: id of the beginning-of-sequence token, or None.
        eos_token_id: id of the end-of-sequence token, or None.
        all_special_ids: ids that `skip_special_tokens` omits.
        strips_leading_space: True if decoding drops one space at the very beginning of a text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: dict[str, Any] | None = None,
        chat_templates: dict[str, str] | None = None,
        divider: tuple[tokenizers.Tokenizer, list[int]] | None = None,
    ) -> None:
        """Make a tokenizer.

        Args:
            backend: the library's tokenizer.
            config: see `config`.
            chat_templates: see `chat_templates`.
            divider: the tokenizer that divides texts, and the id in `backend` of each of its
                tokens; None: `backend` itself.
        """
        config = config or {}
        self.config = config
        self._backend = backend
        self._divider = divider[0] if divider else backend
        self._ids = divider[1] if divider else None
        self._divider.no_truncation()
        self._divider.no_padding()
        self.chat_templates = chat_templates or {}
        self.special_tokens = {
            name: text for name in _NAMED_TOKENS if (text := _token_text(config.get(name)))
        }
        self._add_missing_tokens(config)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.all_special_ids = frozenset(
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self._bytes_kind, self.strips_leading_space = _bytes_kind(backend)
        self._longest = self._make_longest_match()
        probe = self._ids_of(self._divider.encode("a"))
        # The post-processor of tokenizer.json decides; the flags only add missing tokens.
        self._prefix: list[int] = []
        self._suffix: list[int] = []
        if (
            config.get("add_bos_token") is True
            and self.bos_token_id is not None
            and probe[:1] != [self.bos_token_id]
        ):
            self._prefix = [self.bos_token_id]
        if (
            config.get("add_eos_token") is True
            and self.eos_token_id is not None
            and probe[-1:] != [self.eos_token_id]
        ):
            self._suffix = [self.eos_token_id]
        self._replacements = _replacements(backend)
        self._context = _context_token(backend) if self._bytes_kind is None else ([], "")
        self._pieces: dict[frozenset[int], _Pieces] = {}
        self._all_pieces = self.pieces(frozenset())

    @classmethod
    def from_folder(cls, path: str | Path, mode: TokenizerMode = "auto") -> Tokenizer:
        """Read the tokenizer of a model folder.

        Args:
            path: the folder, or a GGUF file.
            mode: mistral: read only tekken.json, whatever files are beside it.

        Raises:
            ModelError: there is no usable tokenizer.json; the message names the file and the fix.
        """
        checkpoint = open_checkpoint(Path(path))
        if mode == "mistral":
            return cls._of_tekken(checkpoint)
        where = str(checkpoint.path / "tokenizer.json")
        text, config = checkpoint.read_text("tokenizer.json"), dict[str, Any]()
        if text is None and (tekken := checkpoint.read_text("tekken.json")) is not None:
            from octavo.text.tekken import read_tekken  # few models have such a file

            where = str(checkpoint.path / "tekken.json")
            text, config = read_tekken(tekken, where)
        for name in ("special_tokens_map.json", "tokenizer_config.json"):
            config |= {k: v for k, v in _read_json(checkpoint, name).items() if v is not None}
        divider = None
        if text is None:
            from octavo.text.sentencepiece_families import Built, build_tokenizer  # few need it

            built = build_tokenizer(checkpoint.path, config)
            where = f"The SentencePiece model of {checkpoint.path}"
            if built is None:
                from octavo.text.wordpiece import build_wordpiece  # as few

                found = build_wordpiece(checkpoint, config)
                if found is None:
                    raise ModelError(_missing_message(checkpoint))
                built, where = Built(*found), f"{checkpoint.path / 'vocab.txt'}"
            text, config = built.text, built.config | config
            if "added_tokens_decoder" not in config:  # as transformers 4 and before write them
                config["added_tokens_decoder"] = _read_added_tokens(checkpoint, config)
            if built.divider is not None and built.ids is not None:
                dividing = _parsed(built.divider, where)
                divider = dividing, built.ids(dividing.get_vocab(with_added_tokens=True))
        backend = _parsed(text, where)
        del text
        tokenizer = cls(backend, config, _read_chat_templates(checkpoint, config), divider)
        trim_memory()  # the library has freed about three times as much as the tokenizer takes
        return tokenizer

    @classmethod
    def _of_tekken(cls, checkpoint: Checkpoint) -> Tokenizer:
        """Read tekken.json, with Mistral's own chat template."""
        from octavo.text.tekken import read_tekken  # few models have such a file

        file = checkpoint.path / "tekken.json"
        if (tekken := checkpoint.read_text(file.name)) is None:
            raise ModelError(f"tokenizer_mode=mistral: {file} is missing; leave the setting out.")
        text, config = read_tekken(tekken, str(file))
        backend = _parsed(text, str(file))
        template = config.get("chat_template")
        return cls(backend, config, None if template is None else {"default": template})

    def pieces(self, skipped: frozenset[int]) -> Mapping[int, str | bytes]:
        """Return the text or the bytes that each token adds to a text.

        Args:
            skipped: tokens that add no text.
        """
        pieces = self._pieces.get(skipped)
        if pieces is None:
            pieces = self._pieces[skipped] = _Pieces(self, skipped)
        return pieces

    @property
    def vocab_size(self) -> int:
        """Number of tokens without the added ones."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        """Return the number of tokens, including added ones."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token(self) -> str | None:
        """Text of the beginning-of-sequence token."""
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the end-of-sequence token."""
        return self.special_tokens.get("eos_token")

    @property
    def pad_token(self) -> str | None:
        """Text of the padding token."""
        return self.special_tokens.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id of the padding token, or None."""
        return self._named_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        """Id of the token for unknown texts, or None."""
        return self._named_id("unk_token")

    @property
    def all_special_tokens(self) -> list[str]:
        """Texts of the tokens that `skip_special_tokens` omits."""
        return self.convert_ids_to_tokens(sorted(self.all_special_ids))

    @property
    def chat_template(self) -> str | None:
        """Jinja source of the model's chat template."""
        return self.chat_templates.get("default")

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens as written in the vocabulary, including added ones, with their ids."""
        return self._backend.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        """Return the added tokens with their ids."""
        return {t.content: i for i, t in self._backend.get_added_tokens_decoder().items()}

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
    ) -> BatchEncoding:
        """Convert one text or several to token ids, like transformers' tokenizers; never pad.

        Args:
            text: one text or several.
            add_special_tokens: add special tokens as specified by the tokenizer's files.
            truncation: keep at most `max_length` ids: special ones, and the first of the others.
            max_length: see `truncation`.
            return_tensors: "pt": tensors of int64, [texts, tokens], instead of lists.

        Raises:
            RequestError: a text is not valid Unicode, or tensors are requested for texts of several
                lengths.
        """
        keep = max_length if truncation else None
        texts = [text] if isinstance(text, str) else text
        ids = [self._encode_at_most(one, add_special_tokens, keep) for one in texts]
        return _batch_encoding(ids, not isinstance(text, str), return_tensors)

    def _encode_at_most(self, text: str, special: bool, keep: int | None) -> list[int]:
        ids = self.encode(text, special)
        if keep is None or len(ids) <= keep:
            return ids
        if not special:
            return ids[:keep]
        (encoding,) = self._encode([text], False)
        num_special = len(self._prefix) + len(self._suffix)
        num_special += self._divider.num_special_tokens_to_add(False)
        encoding.truncate(max(keep - num_special, 0))
        shorter = self._ids_of(self._divider.post_process(encoding))
        return self._prefix + shorter + self._suffix

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        *,
        return_tensors: str | None = None,
        return_dict: bool = False,
        **template_kwargs: Any,
    ) -> Any:
        """Make the prompt of a conversation, or of several, like transformers' tokenizers.

        Args:
            conversation: OpenAI's messages, or a list of such lists.
            tools: definitions of tools, for templates that support them.
            documents: texts for retrieval, for templates that support them.
            chat_template: a template, or its file, instead of the model's own.
            add_generation_prompt: end with the beginning of the assistant's turn.
            continue_final_message: end inside the last message.
            tokenize: return token ids instead of a text.
            return_tensors: "pt": a tensor of int64, [conversations, tokens], instead of lists.
            return_dict: return the result type of calling the tokenizer.
            template_kwargs: further variables for the template.

        Returns:
            A text or a list of ids; of several conversations, a list of these.

        Raises:
            RequestError: the messages are malformed, or the template rejects them; or tensors are
                requested for conversations of several lengths.
            UnsupportedError: padding or truncation is requested.
        """
        for name in ("padding", "truncation", "max_length", "return_assistant_tokens_mask"):
            if template_kwargs.pop(name, None):
                raise UnsupportedError(f"{name} is not supported in apply_chat_template.", name)
        from octavo.text.chat_template import ChatTemplate  # most tokenizers never need it

        template = ChatTemplate.from_tokenizer(self, chat_template)
        several = bool(conversation) and not isinstance(conversation[0], Mapping)
        conversations: Any = conversation if several else [conversation]
        made: list[Any] = []
        for messages in conversations:
            text = template.render(
                messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=template_kwargs or None,
            )
            # The template writes the special tokens itself.
            made.append(self.encode(text, add_special_tokens=False) if tokenize else text)
        if tokenize and (return_dict or return_tensors is not None):
            encoding = _batch_encoding(made, several, return_tensors)
            return encoding if return_dict else encoding.input_ids
        return made if several else made[0]

    def encode(
        self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Convert text to token ids; special tokens written out in the text are recognised.

        Long texts are tokenised without the interpreter's lock: other threads continue meanwhile.

        Args:
            text: any text.
            add_special_tokens: add special tokens as specified by the tokenizer's files.
            max_tokens: maximum number of tokens (before special ones are added); a text that
                `is_longer` is rejected without being tokenised.

        Raises:
            ContextLengthError: the text is longer than `max_tokens`.
            RequestError: the text is not valid Unicode (it contains lone surrogates).
        """
        if max_tokens is not None and is_longer(text, max_tokens):
            raise ContextLengthError(
                f"The text has {len(text)} characters; at most {max_tokens} tokens are accepted. "
                "Shorten it.",
                "prompt",
            )
        (encoding,) = self._encode([text], add_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise ContextLengthError(
                f"The text has {len(encoding)} tokens; at most {max_tokens} are accepted. "
                "Shorten it.",
                "prompt",
            )
        ids = self._ids_of(encoding)
        return self._prefix + ids + self._suffix if add_special_tokens else ids

    def _ids_of(self, encoding: tokenizers.Encoding) -> list[int]:
        ids: list[int] = encoding.ids
        return ids if self._ids is None else [self._ids[i] for i in ids]

    def encode_text(
        self,
        text: str,
        pair: str | None,
        add_special_tokens: bool,
        *,
        max_tokens: int | None,
        truncation_side: Literal["left", "right"] = "right",
    ) -> tuple[list[int], int]:
        """Convert a text, or a pair of texts, to token ids, for a model that reads whole texts.

        Args:
            text: any text.
            pair: second text of a pair, such as the document for a query; None: a single text.
            add_special_tokens: add special tokens as specified by the tokenizer's files.
            max_tokens: number of ids to keep; special tokens are always kept. None: all. Of a pair,
                the longer text is cut first.
            truncation_side: side at which tokens are dropped.

        Returns:
            The ids, and the index of the first id that belongs to the second text by the
            tokenizer's types; 0 for a single text.

        Raises:
            RequestError: a text is not valid Unicode.
        """
        texts, backend = [text] if pair is None else [text, pair], self._divider
        if max_tokens is None:
            encodings = self._encode(texts, False)
        else:
            encodings = [self._encode_end(one, max_tokens, truncation_side) for one in texts]
            special = 0
            if add_special_tokens:
                special = len(self._prefix) + len(self._suffix)
                special += backend.num_special_tokens_to_add(pair is not None)
            lengths = _longest_first([len(e) for e in encodings], max(max_tokens - special, 0))
            for encoding, length in zip(encodings, lengths, strict=True):
                encoding.truncate(length, direction=truncation_side)
        first, second = encodings[0], None if pair is None else encodings[1]
        whole = backend.post_process(first, second, add_special_tokens)
        ids, types = self._ids_of(whole), whole.type_ids
        if add_special_tokens:
            ids = self._prefix + ids + self._suffix
            types = [0] * len(self._prefix) + types
        return ids, types.index(1) if pair is not None and 1 in types else 0

    def _encode_end(
        self, text: str, max_tokens: int, side: Literal["left", "right"]
    ) -> tokenizers.Encoding:
        """Return the tokens of a text of which `max_tokens` will be kept.

        Of a very long text, only a part is tokenized. It is longer than the tokens to keep, so that
        the cut does not change these. All of a megabyte's tokens would need 200 MB.
        """
        size = max(_SMALL_TEXT, MAX_CHARS_PER_TOKEN * max_tokens)
        while size < len(text):
            part = text[:size] if side == "right" else text[-size:]
            (encoding,) = self._encode([part], False)
            if len(encoding) > max_tokens + _MORE_TOKENS:
                return encoding
            size *= 4
        (encoding,) = self._encode([text], False)
        return encoding

    def cut(self, text: str, max_tokens: int) -> str:
        """Return the beginning of a text, as far as its first tokens without special ones reach.

        Raises:
            RequestError: the text is not valid Unicode.
        """
        if self._longest is not None:
            return self.decode(self.encode(text, False)[:max_tokens])
        size = max(_SMALL_TEXT, MAX_CHARS_PER_TOKEN * max_tokens)
        while True:  # as in `_encode_end`
            try:
                # Of the library's calls only those for batches release the lock.
                (encoding,) = self._divider.encode_batch([text[:size]], add_special_tokens=False)
            except (TypeError, UnicodeEncodeError):
                raise _not_unicode() from None
            if size >= len(text) or len(encoding) > max_tokens + _MORE_TOKENS:
                break
            size *= 4
        offsets = encoding.offsets
        return text if len(offsets) <= max_tokens else text[: offsets[max_tokens - 1][1]]

    def special_ends(self) -> tuple[list[int], list[int]]:
        """Return the special tokens that are added before a text and after it."""
        bare, whole = self.encode("a", False), self.encode("a")
        starts = range(len(whole) - len(bare) + 1)
        at = next(i for i in starts if whole[i : i + len(bare)] == bare)
        return whole[:at], whole[at + len(bare) :]

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Convert texts to token ids in one call, without adding special tokens.

        Raises:
            RequestError: a text is not valid Unicode.
        """
        return [self._ids_of(encoding) for encoding in self._encode(texts, False)]

    def _encode(self, texts: Sequence[str], add_special_tokens: bool) -> list[tokenizers.Encoding]:
        options = {"add_special_tokens": add_special_tokens}
        backend = self._divider
        inputs: Sequence[str] | list[list[str]] = texts
        try:
            if self._longest is not None:
                inputs = [self._longest.split(text) for text in texts]
                options["is_pretokenized"] = True
            if sum(map(len, texts)) > _SHORT_TEXT:
                # Of the library's calls only those for batches release the lock.
                return backend.encode_batch_fast(inputs, **options)
            return [backend.encode(one, **options) for one in inputs]
        except (TypeError, UnicodeEncodeError):
            raise _not_unicode() from None

    def decode(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Convert one or several token ids to text; ids outside the vocabulary have none.

        Many ids are converted without the interpreter's lock, like long texts.

        Raises:
            RequestError: an id is negative or exceeds 32 bits.
        """
        backend = self._backend
        ids = [ids] if isinstance(ids, int) else ids
        try:
            if len(ids) > _SHORT_TEXT:
                (text,) = backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
            else:
                text = backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError):
            raise RequestError(
                "Token ids must be integers in the range of the vocabulary.", "tokens"
            ) from None
        return str(text)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a token as written in the vocabulary, or None if it is unknown."""
        return self._backend.token_to_id(token)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the token as in the vocabulary ("Ġworld", "▁world"), or None."""
        try:
            return self._backend.id_to_token(token_id)
        except OverflowError:
            return None

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Return tokens as written in the vocabulary; "" for unknown ids."""
        return [self.id_to_token(i) or "" for i in ids]

    def convert_tokens_to_ids(self, tokens: Sequence[str]) -> list[int]:
        """Return the ids of tokens as written in the vocabulary.

        Raises:
            RequestError: a token is not in the vocabulary.
        """
        ids = [self.token_to_id(token) for token in tokens]
        known = [i for i in ids if i is not None]
        if len(known) < len(ids):
            unknown = tokens[ids.index(None)]
            raise RequestError(f"{unknown!r} is not a token of this model.", "tokens")
        return known

    @property
    def has_bytes(self) -> bool:
        """True if each token stands for fixed bytes, independently of its neighbours."""
        return self._bytes_kind is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to the text; they may be part of a character.

        For tokenizers without `has_bytes`, these are the token's text after another one.
        """
        piece = self._all_pieces[token_id]
        return piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece

    def token_text(self, token_id: int) -> str:
        """Return the text that a token adds inside a text; U+FFFD for parts of characters."""
        piece = self._all_pieces[token_id]
        return piece if isinstance(piece, str) else piece.decode("utf-8", "replace")

    def make_piece(self, token_id: int) -> str | bytes:
        """Make an item of `_Pieces`."""
        token = self.id_to_token(token_id)
        if token is None:
            return ""
        if self._bytes_kind is None:
            context, context_text = self._context
            return self._backend.decode([*context, token_id], skip_special_tokens=False)[
                len(context_text) :
            ]
        if self._bytes_kind == "byte_level":
            data = bytes_of(token)
        else:
            for pattern, content in self._replacements:
                token = token.replace(pattern, content)
            data = _fallback_byte(token) if self._bytes_kind == "byte_fallback" else b""
            data = data or token.encode()
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    def _make_longest_match(self) -> LongestMatch | None:
        """Return the division of texts into the longest tokens; None: the library divides them.

        The library's search for the longest token takes a time that grows with the cube of a text's
        length.

        Raises:
            ModelError: a single byte is no token.
        """
        model = self._backend.model
        if not isinstance(model, tokenizers.models.WordPiece) or model.continuing_subword_prefix:
            return None
        vocab = self._backend.get_vocab(with_added_tokens=False)
        if self._bytes_kind != "byte_level" or not vocab.keys() >= BYTE_OF_CHAR.keys():
            raise ModelError(
                "tokenizer.json: WordPiece without a prefix is supported with all 256 bytes as "
                "tokens and a decoder of the type ByteLevel."
            )
        added = self._backend.get_added_tokens_decoder().values()
        return LongestMatch(vocab, (token.content for token in added))

    def _named_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    def _add_missing_tokens(self, config: dict[str, Any]) -> None:
        """Add the tokens that the folder's other files list, as transformers does."""
        backend = self._backend
        listed = config.get("added_tokens_decoder") or {}
        known = self.get_added_vocab()
        for key, entry in sorted(listed.items(), key=lambda item: int(item[0])):
            text = _token_text(entry)
            if text and text not in known:
                flags = {
                    name: bool(entry[name])
                    for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
                    if isinstance(entry, dict) and name in entry
                }
                is_new = backend.token_to_id(text) is None
                backend.add_tokens([tokenizers.AddedToken(text, **flags)])
                if is_new and backend.token_to_id(text) != int(key):
                    raise ModelError(
                        f"tokenizer_config.json or added_tokens.json gives the token {text!r} the "
                        f"id {key}, which does not follow on from the vocabulary; the files do not "
                        "belong together."
                    )
        known = self.get_added_vocab()
        for text in _further_special_tokens(config):
            if text not in known:
                backend.add_special_tokens([text])
        for text in self.special_tokens.values():
            if backend.token_to_id(text) is None:
                backend.add_special_tokens([text])


def is_longer(text: str, max_tokens: int) -> bool:
    """Return True if a text is so long that it can be rejected without being tokenised.

    That is, longer than 64 Ki characters and than `MAX_CHARS_PER_TOKEN` for each token.
    """
    return len(text) > max(_SMALL_TEXT, MAX_CHARS_PER_TOKEN * max_tokens)


class _Pieces(dict[int, str | bytes]):
    """Text that each token adds, computed on first use.

    `str` if the token consists of whole characters, `bytes` if it contains part of a character.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skipped = skipped

    def __missing__(self, token_id: int) -> str | bytes:
        skip = token_id in self._skipped
        piece = self[token_id] = "" if skip else self._tokenizer.make_piece(token_id)
        return piece


def _decoder_steps(backend: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the decoder's parts, as written in tokenizer.json."""
    if backend.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _bytes_kind(backend: tokenizers.Tokenizer) -> tuple[str | None, bool]:
    """Determine how a token's bytes are found, if they do not depend on its neighbours.

    Returns:
        "byte_level" (GPT-2's characters), "byte_fallback" (sentencepiece's "▁" and "<0x0A>"), or
        None; and True if one leading space of a text is dropped.
    """
    steps = _decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level", False
    plain = all(
        "String" in step["pattern"] if step["type"] == "Replace" else True for step in steps
    )
    if plain and kinds in (
        ["Replace", "ByteFallback", "Fuse"],
        ["Replace", "ByteFallback", "Fuse", "Strip"],
    ):
        strip = steps[3] if len(steps) == 4 else None
        if strip is None:
            return "byte_fallback", False
        if strip["content"] == " " and strip["start"] == 1 and strip["stop"] == 0:
            return "byte_fallback", True
    return None, False


def _replacements(backend: tokenizers.Tokenizer) -> list[tuple[str, str]]:
    return [
        (step["pattern"]["String"], step["content"])
        for step in _decoder_steps(backend)
        if step["type"] == "Replace" and "String" in step["pattern"]
    ]


def _fallback_byte(token: str) -> bytes:
    """Return the byte of a token such as "<0x0A>", nothing for other tokens."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return b""
    return b""


def _context_token(backend: tokenizers.Tokenizer) -> tuple[list[int], str]:
    """Return a plain token to put before another one, and its text."""
    for text in ("a", "the", "0", "."):
        ids = backend.encode(text, add_special_tokens=False).ids[-1:]
        decoded = backend.decode(ids, skip_special_tokens=True)
        if decoded and REPLACEMENT not in decoded:
            return ids, decoded
    return [], ""


def _parsed(text: str, where: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"{where} is damaged or of an unknown kind: {error}") from error


def _token_text(value: Any) -> str | None:
    """Return the text of a token, which config files write as a string or as a dict."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _further_special_tokens(config: Mapping[str, Any]) -> list[str]:
    """Return the special tokens of a folder's files that have no name of their own."""
    found: list[str] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        listed = config.get(name)
        values = list(listed.values()) if isinstance(listed, dict) else listed
        if isinstance(values, list):
            found += [text for value in values if (text := _token_text(value))]
    return found


def _read_json(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    text, file = checkpoint.read_text(name), checkpoint.path / name
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{file} cannot be read: {reason_of(error)}.") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} does not hold a JSON object.")
    return value


def _read_added_tokens(checkpoint: Checkpoint, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens of added_tokens.json in the form of `added_tokens_decoder`."""
    named = {_token_text(config.get(name)) for name in _NAMED_TOKENS}
    special = {*named, *_further_special_tokens(config)}
    found: dict[str, Any] = {}
    for text, number in _read_json(checkpoint, "added_tokens.json").items():
        if type(number) is not int or number < 0:
            raise ModelError(
                f"{checkpoint.path / 'added_tokens.json'} has the wrong id {number!r} for "
                f"{text[:80]!r}."
            )
        flags = {"normalized": text not in special, "special": text in special}
        found[str(number)] = {"content": text} | flags
    return found


def _not_unicode() -> RequestError:
    return RequestError(
        "The text is not valid Unicode (it holds a lone surrogate); send valid UTF-8.",
        "prompt",
        "invalid_unicode",
    )


def _read_chat_templates(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, str]:
    """Read all templates by name; separate files precede the config's entry."""
    templates: dict[str, str] = {}
    entry = config.get("chat_template")
    if entry is None:
        entry = _read_json(checkpoint, "chat_template.json").get("chat_template")
    if isinstance(entry, str):
        templates["default"] = entry
    elif isinstance(entry, dict):
        templates |= {str(name): source for name, source in entry.items()}
    elif isinstance(entry, list):
        for named in entry:
            if not isinstance(named, dict) or not {"name", "template"} <= named.keys():
                raise ModelError(
                    f"{checkpoint.path / 'tokenizer_config.json'}: each entry of chat_template "
                    "needs a name and a template."
                )
            templates[str(named["name"])] = named["template"]
    files = {"default": "chat_template.jinja"}
    files |= {Path(f).stem: f for f in checkpoint.file_names("additional_chat_templates/*.jinja")}
    for name, file in files.items():
        if (text := checkpoint.read_text(file)) is not None:
            templates[name] = text
    return templates


def _missing_message(checkpoint: Checkpoint) -> str:
    path = checkpoint.path
    if not path.is_dir():
        return f"There is no folder {path} to read a tokenizer from."
    message = f"{path} has no tokenizer.json"
    others = {
        "only a vocabulary of the old form": ["vocab.json", "vocab.txt"],
    }
    for kind, patterns in others.items():
        if any(checkpoint.file_names(pattern) for pattern in patterns):
            return (
                f"{message}, {kind}. Convert it once with transformers: "
                "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)."
            )
    return message + "; name a folder that has one with --tokenizer, or give --skip-tokenizer-init."


def require_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer of an engine.

    Raises:
        UnsupportedError: the engine has no tokenizer.
    """
    if tokenizer is None:
        raise UnsupportedError(
            "There is no tokenizer: the engine was made with skip_tokenizer_init=True."
        )
    return tokenizer
