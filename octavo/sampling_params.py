"""Parameters of one request for sampling and output: vLLM's `SamplingParams`."""

from __future__ import annotations

import copy
import enum
import importlib.util
import json
import numbers
from collections.abc import Mapping, Sized
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias, cast, get_args

import msgspec

from octavo.errors import GRAMMAR_PACKAGES, RequestError, UnsupportedError

# Below this, division by the temperature would overflow float32: the request becomes greedy.
SAMPLING_EPS = 1e-5
MAX_N = 1024
# Far beyond any use; keeps the products with logits away from infinity.
MAX_REPETITION_PENALTY = 1000.0
MAX_INT = 2**63 - 1
# Bounds of one request's parameters. Each is far beyond any use, and keeps the request's work in a
# step, and its memory, small compared with the step's.
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 256
"""Maximum characters of a stop text."""
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 2**19
"""Bound above any vocabulary; an id may occur twice."""
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 512
MAX_BAD_WORD_LENGTH = 64
"""Maximum characters of a bad word."""
MAX_CACHE_SALT_LENGTH = 1024
MAX_BEAM_WIDTH = 64
"""Bound of the beams; each beam of a step needs at least this number of candidates."""
MAX_EXTRA_ARGS_NBYTES = 2**16
"""Maximum size of `extra_args` as msgpack."""
MAX_GRAMMAR_NBYTES = 2**19
"""Maximum size of a schema, a regular expression, a grammar or all choices, as UTF-8."""
MAX_PRESERVED_TOKEN_IDS = 256
MAX_GRAMMAR_DEPTH = 64
"""Maximum levels of nesting of a schema."""
MAX_CHOICES = 4096
_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "flat_logprobs",
    "skip_clone",
)

_LEAVE_OUT = "leave it out"
Refused: TypeAlias = Mapping[str, tuple[tuple[int | None, ...], str]]
"""vLLM's fields that are not supported: values without effect, and the alternative."""

REFUSED: Refused = {
    "watermarking": ((None, False), _LEAVE_OUT),
    "prompt_logprob_token_ids": ((None,), "use prompt_logprobs"),
    "prompt_logprob_start": ((None, 0), "use prompt_logprobs"),
    "stream_interval": ((None, 1), "an output arrives with each step"),
    "skip_reading_prefix_cache": ((None, False), "give the request a unique cache_salt"),
    "repetition_detection": ((None,), "use repetition_guard"),
    "routed_experts_prompt_start": ((None, 0), _LEAVE_OUT),
    "trace_decode_token_ids": ((None,), _LEAVE_OUT),
}
"""Unsupported fields of `SamplingParams`."""

REFUSED_STRUCTURED_OUTPUTS: Refused = {
    "disable_additional_properties": (
        (False,),
        "write additionalProperties: false into the schema",
    ),
    "whitespace_pattern": ((None,), "use disable_any_whitespace"),
}
"""Unsupported fields of `StructuredOutputsParams`."""

REFUSED_BEAM_SEARCH: Refused = {
    "structured_outputs": ((None,), "leave it out, or use SamplingParams"),
    "watermarking": ((None, False), _LEAVE_OUT),
}
"""Unsupported fields of `BeamSearchParams`."""


GrammarKind: TypeAlias = Literal[
    "json", "json_object", "regex", "choice", "grammar", "structural_tag"
]
GrammarBackendName: TypeAlias = Literal["auto", "xgrammar", "llguidance"]
_GRAMMAR_BACKENDS = {
    "auto": "auto",
    "xgrammar": "xgrammar",
    "llguidance": "llguidance",
    "guidance": "llguidance",  # vLLM's name
}


RepetitionGuard: TypeAlias = Literal["off", "report", "stop", "close_thinking"]


class RequestOutputKind(enum.IntEnum):
    """Content of each output of a request."""

    CUMULATIVE = 0
    """All text and tokens so far."""
    DELTA = 1
    """Only the part since the last output."""
    FINAL_ONLY = 2
    """One output, when the request has finished."""


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True):
    """Form that the answer must have: exactly one of the kinds. Names and order are vLLM's.

    Raises:
        RequestError: a field is wrong; `param` is its name, and the message begins with it.
    """

    json: str | dict[str, Any] | bool | None = None
    """JSON schema, or its text; stored as text."""
    regex: str | None = None
    """Regular expression that the whole answer matches."""
    choice: list[str] | None = None
    """Allowed answers."""
    grammar: str | None = None
    """Context-free grammar, in EBNF or Lark's notation."""
    json_object: bool = False
    """True if the answer is any JSON object."""
    disable_any_whitespace: bool = False
    """True for JSON without white space between its parts."""
    disable_additional_properties: bool = False
    """Unsupported: the schema states it."""
    whitespace_pattern: str | None = None
    """Unsupported: no backend has it for all schemas."""
    structural_tag: str | dict[str, Any] | None = None
    """Tags with schemas inside, in xgrammar's notation: JSON or its text; stored as text."""
    backend: GrammarBackendName = "auto"
    """Compiler of the grammar; auto: the engine chooses. vLLM's "guidance" is llguidance."""
    strict: bool = False
    """True to reject a JSON schema with a `format` that cannot be enforced, not to ignore it."""

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace", "strict"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name}={_show(getattr(self, name))} is not true or false.", name
                )
        given = self._given()
        if len(given) != 1:
            raise RequestError(
                f"{given[1]} and {given[0]} are both given; an answer follows one of them."
                if given
                else "structured_outputs is empty; give json, regex, choice, grammar, "
                "json_object or structural_tag.",
                given[1] if given else "structured_outputs",
            )
        backend = self.backend if isinstance(self.backend, str) else ""
        if backend not in _GRAMMAR_BACKENDS:
            raise RequestError(
                f"backend={_show(self.backend)} is not one of {', '.join(_GRAMMAR_BACKENDS)}.",
                "backend",
            )
        self.backend = cast(GrammarBackendName, _GRAMMAR_BACKENDS[backend])
        if self.backend != "auto" and importlib.util.find_spec(self.backend) is None:
            raise RequestError(
                f"backend={_show(backend)} needs the package {self.backend}, which is not "
                f"installed: install it (`{GRAMMAR_PACKAGES[self.backend]}`), or leave backend "
                "out.",
                "backend",
            )
        _refuse_unsupported(self, REFUSED_STRUCTURED_OUTPUTS)
        if self.json is not None:
            self.json = _json_text(
                "json",
                self.json,
                (dict, bool),
                "a JSON schema, which is an object, true or false, or its text (of a pydantic "
                "model: Model.model_json_schema())",
            )
        elif self.structural_tag is not None:
            self.structural_tag = _json_text(
                "structural_tag", self.structural_tag, (dict,), "a JSON object, or its text"
            )
        elif self.choice is not None:
            self._check_choice()
        elif not self.json_object:
            (name,) = given
            text = getattr(self, name)
            if not isinstance(text, str) or not text:
                raise RequestError(
                    f"{name}={_show(text)} is not allowed; it is a non-empty string.", name
                )
            _check_text(name, text)

    @property
    def kind(self) -> GrammarKind:
        """Kind that is given."""
        return self._given()[0]

    def _given(self) -> list[GrammarKind]:
        given: list[GrammarKind] = []
        given += ["json"] if self.json is not None else []
        given += ["regex"] if self.regex is not None else []
        given += ["choice"] if self.choice is not None else []
        given += ["grammar"] if self.grammar is not None else []
        given += ["json_object"] if self.json_object else []
        given += ["structural_tag"] if self.structural_tag is not None else []
        return given

    def _check_choice(self) -> None:
        value: Any = self.choice
        if (
            not isinstance(value, list | tuple)
            or not value
            or not all(isinstance(s, str) for s in value)
        ):
            raise RequestError(
                f"choice={_show(value)} is not allowed; it is a list of one or more strings.",
                "choice",
            )
        if len(value) > MAX_CHOICES:
            raise RequestError(
                f"choice has {len(value)} entries; at most {MAX_CHOICES} are allowed.", "choice"
            )
        if not all(value):
            raise RequestError("choice holds an empty string; remove it.", "choice")
        _check_text("choice", "".join(value))
        self.choice = list(dict.fromkeys(value))


GuidedDecodingParams = StructuredOutputsParams
"""Older name in vLLM."""


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """Parameters of one generation request. Names, order and defaults are vLLM's.

    Raises:
        RequestError: a field is wrong; the message has the field, the value and the range.
    """

    n: int = 1
    """Number of answers to the same prompt."""
    presence_penalty: float = 0.0
    """Above 0: repeat less; -2 to 2. Subtracted from the logit of each generated token."""
    frequency_penalty: float = 0.0
    """Above 0: repeat less; -2 to 2. Subtracted from a token's logit for each occurrence."""
    repetition_penalty: float = 1.0
    """Above 1: repeat less of the prompt and the answer; above 0, at most 1000. Divides positive
    logits of their tokens and multiplies negative ones."""
    temperature: float = 1.0
    """Divisor of the logits; 0 is greedy."""
    watermarking: bool | None = None
    """Unsupported if true."""
    top_p: float = 1.0
    """Keep the most probable tokens up to this total probability; in (0, 1]; 1: all."""
    top_k: int = 0
    """Number of most probable tokens to keep; 0 or -1: all."""
    min_p: float = 0.0
    """Drop tokens below this share of the highest probability; in [0, 1]."""
    seed: int | None = None
    """Random seed for a repeatable answer. Without it, or with -1, the engine derives one."""
    stop: list[str] = msgspec.field(default_factory=list)
    """Texts that end the answer and are not part of it."""
    stop_token_ids: list[int] = msgspec.field(default_factory=list)
    """Tokens that end the answer."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token."""
    max_tokens: int | None = 16
    """Maximum number of tokens to generate; None: all that fit the context."""
    min_tokens: int = 0
    """Minimum tokens of an answer before a stop token or the end-of-sequence token."""
    logprobs: int | None = None
    """Number of most probable tokens to report for each output token; -1: the whole vocabulary."""
    prompt_logprobs: int | None = None
    """Number of most probable tokens to report for each prompt token; -1: the whole vocabulary."""
    prompt_logprob_token_ids: list[list[int]] | None = None
    """Unsupported."""
    prompt_logprob_start: int | None = None
    """Unsupported."""
    logprob_token_ids: list[int] | None = None
    """Tokens to report for each output token, in this order, in place of the most probable ones; at
    most 128, without a rank. `logprobs` is then absent, or their number."""
    flat_logprobs: bool = False
    """Accepted: logprobs are always stored flat, and read like vLLM's in either form."""
    detokenize: bool = True
    """True to turn tokens into text."""
    skip_special_tokens: bool = True
    """True to leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens in the text. It has no effect: tokenizers join them."""
    include_stop_str_in_output: bool = False
    """Keep the stop text in the answer."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Content of the outputs: all so far, only the new part, or one output at the end."""
    stream_interval: int | None = None
    """Unsupported above 1: an output arrives with each step."""
    skip_clone: bool = False
    """Accepted: parameters are never changed, so they are not copied."""
    logit_bias: dict[int, float] | None = None
    """Token ids with values to add to their logits; -100 to 100."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that the answer may contain; default: all."""
    bad_words: list[str] | None = None
    """Texts that the answer must not contain."""
    truncate_prompt_tokens: int | None = None
    """Number of prompt tokens to keep; -1: the number that fits."""
    priority: int = 0
    """Priority with the scheduling policy "priority": lower runs first."""
    cache_salt: str | None = None
    """Salt of the prefix cache, which only requests with the same salt share."""
    structured_outputs: StructuredOutputsParams | None = None
    """Form of the answer."""
    guided_decoding: StructuredOutputsParams | None = None
    """Older name of `structured_outputs`, to which it is moved."""
    extra_args: dict[str, Any] | None = None
    """Arguments for logits processors of plug-ins: plain data by key."""
    truncation_side: Literal["left", "right"] = "left"
    """End that truncate_prompt_tokens cuts: left or right."""
    skip_reading_prefix_cache: bool | None = None
    """Unsupported if true: a unique `cache_salt` keeps a request from cached prefixes."""
    thinking_token_budget: int | None = None
    """Maximum number of tokens of reasoning in an answer; then its end is forced, and the answer
    goes on. -1 or None: no limit. It needs `reasoning_markers`."""
    repetition_detection: Any = None
    """Unsupported."""
    routed_experts_prompt_start: int = 0
    """Unsupported."""
    trace_decode_token_ids: list[int] | None = None
    """Unsupported."""
    preserved_token_ids: list[int] | None = None
    """Special tokens that stay in the text in spite of `skip_special_tokens`; at most 256."""
    repetition_guard: RepetitionGuard | None = None
    """Action when the answer repeats itself, see `octavo.guard`: off (as None), report, stop, or
    close_thinking, which ends the reasoning, or the answer if it is not in reasoning."""
    reasoning_markers: tuple[str, str] | None = None
    """Texts before and after reasoning, such as ("<think>", "</think>"); the server and `LLM.chat`
    find them in the chat template."""

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Construct parameters where None means the default; clamp `logit_bias`.

        Args:
            given: fields by name; biases are clamped to -100 to 100.

        Raises:
            RequestError: a field is wrong, as for the constructor.
        """
        given = {
            name: value
            for name, value in given.items()
            if value is not None or name == "max_tokens"  # None is not its default
        }
        bias = given.get("logit_bias")
        if isinstance(bias, dict) and all(map(_is_number, bias.values())):
            # In this order of comparison NaN stays, and is rejected.
            given["logit_bias"] = {t: max(min(b, 100.0), -100.0) for t, b in bias.items()}
        return cls(**given)

    def clone(self) -> SamplingParams:
        """Return a copy that shares nothing with the original."""
        return copy.deepcopy(self)

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        elif self.stop is None:
            self.stop = []
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(getattr(self, name), bool):
                setattr(self, name, 1 if getattr(self, name) else None)
        self._verify()
        if self.top_k == -1:
            self.top_k = 0
        if self.temperature < SAMPLING_EPS:
            self.temperature = 0.0

    @property
    def greedy(self) -> bool:
        """True if the most probable token is always chosen."""
        return self.temperature == 0.0

    @property
    def num_logprobs(self) -> int | None:
        """Number of tokens reported in addition to each output token; None: no logprobs at all."""
        return self.logprobs if self.logprob_token_ids is None else len(self.logprob_token_ids)

    def _verify(self) -> None:
        _refuse_unsupported(self, REFUSED)
        self._check_int("n", 1, MAX_N)
        self._check_float("presence_penalty", -2.0, 2.0)
        self._check_float("frequency_penalty", -2.0, 2.0)
        self._check_float("repetition_penalty", 0.0, MAX_REPETITION_PENALTY, open_low=True)
        self._check_float("temperature", 0.0, 100.0)
        self._check_float("top_p", 0.0, 1.0, open_low=True)
        self._check_int("top_k", -1, MAX_INT)
        self._check_float("min_p", 0.0, 1.0)
        self._check_int("seed", -(2**63), 2**64 - 1, optional=True)
        if self.seed == -1:  # no seed in vLLM
            self.seed = None
        self._check_int("max_tokens", 1, MAX_INT, optional=True)
        self._check_int("min_tokens", 0, MAX_INT)
        self._check_int("logprobs", -1, MAX_INT, optional=True)
        self._check_int("prompt_logprobs", -1, MAX_INT, optional=True)
        self._check_int("truncate_prompt_tokens", -1, MAX_INT, optional=True)
        self._check_int("priority", -(2**31), 2**31 - 1)
        self._check_int("thinking_token_budget", -1, MAX_INT, optional=True)
        if self.thinking_token_budget == -1:
            self.thinking_token_budget = None
        self._check_guard()
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(
                    f"{name}={_show(getattr(self, name))} is not true or false.", name
                )
        if self.truncation_side not in ("left", "right"):
            raise RequestError(
                f"truncation_side={_show(self.truncation_side)} is not left or right.",
                "truncation_side",
            )
        if self.truncate_prompt_tokens == 0:
            raise RequestError(
                "truncate_prompt_tokens=0 would leave no prompt; use -1 or a positive number.",
                "truncate_prompt_tokens",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens={self.min_tokens} is more than max_tokens={self.max_tokens}; "
                "lower min_tokens or raise max_tokens.",
                "min_tokens",
            )
        self._check_texts("stop", MAX_STOP_STRINGS, MAX_STOP_LENGTH)
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop texts need detokenize=True; use stop_token_ids instead.", "stop"
            )
        if self.bad_words is not None:
            self._check_texts("bad_words", MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH)
        self._check_token_ids("stop_token_ids", MAX_STOP_TOKEN_IDS)
        if self.allowed_token_ids is not None:
            self._check_token_ids("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)
            if not self.allowed_token_ids:
                raise RequestError(
                    "allowed_token_ids is empty: no token could be chosen.", "allowed_token_ids"
                )
        if self.preserved_token_ids is not None:
            self._check_token_ids("preserved_token_ids", MAX_PRESERVED_TOKEN_IDS)
        self._check_logprob_token_ids()
        if self.logit_bias is not None:
            self._check_logit_bias()
        if self.cache_salt is not None and not (
            isinstance(self.cache_salt, str) and self.cache_salt
        ):
            raise RequestError("cache_salt must be a non-empty string.", "cache_salt")
        self._check_structured_outputs()
        if self.extra_args is not None:
            self.extra_args = check_extra_args(self.extra_args, "extra_args")
        try:
            self.output_kind = RequestOutputKind(self.output_kind)
        except ValueError:
            raise RequestError(
                f"output_kind={_show(self.output_kind)} is not a RequestOutputKind.", "output_kind"
            ) from None

    def _check_guard(self) -> None:
        if self.repetition_guard not in (None, *get_args(RepetitionGuard)):
            raise RequestError(
                f"repetition_guard={_show(self.repetition_guard)} is not one of "
                f"{', '.join(get_args(RepetitionGuard))}.",
                "repetition_guard",
            )
        markers: Any = self.reasoning_markers
        if markers is None:
            return
        if (
            not isinstance(markers, list | tuple)
            or len(markers) != 2
            or not all(isinstance(text, str) and text.strip() for text in markers)
            or max(map(len, markers)) > MAX_STOP_LENGTH
        ):
            raise RequestError(
                f"reasoning_markers={_show(markers)} is not allowed; it is the text before "
                f"reasoning and the text after it, of at most {MAX_STOP_LENGTH} characters each.",
                "reasoning_markers",
            )
        self.reasoning_markers = (markers[0], markers[1])

    def _check_texts(self, name: str, most: int, longest: int) -> None:
        value: Any = getattr(self, name)
        if not isinstance(value, list | tuple):
            raise RequestError(f"{name} must be a list of strings.", name)
        self._check_number(name, value, most)
        if not all(isinstance(s, str) for s in value):
            raise RequestError(f"{name} must be a list of strings.", name)
        if not all(value):
            raise RequestError(f"{name} holds an empty string; remove it.", name)
        if (length := max(map(len, value), default=0)) > longest:
            raise RequestError(
                f"{name} holds a text of {length} characters; at most {longest} are allowed.", name
            )
        setattr(self, name, list(value))

    def _check_token_ids(self, name: str, most: int) -> None:
        value: Any = getattr(self, name)
        if isinstance(value, list | tuple):
            self._check_number(name, value, most)
            if not set(map(type, value)) <= {int} and all(map(_is_int, value)):
                value = list(map(int, value))  # numpy's
            if set(map(type, value)) <= {int} and (
                not value or (min(value) >= 0 and max(value) < 2**31)
            ):
                setattr(self, name, list(value))
                return
        raise RequestError(f"{name} must be a list of token ids (integers >= 0).", name)

    @staticmethod
    def _check_number(name: str, value: Sized, most: int) -> None:
        if len(value) > most:
            raise RequestError(
                f"{name} has {len(value)} entries; at most {most} are allowed.", name
            )

    def _check_logprob_token_ids(self) -> None:
        if self.logprob_token_ids is None:
            return
        self._check_token_ids("logprob_token_ids", MAX_LOGPROB_TOKEN_IDS)
        count = len(self.logprob_token_ids)
        if not count:
            self.logprob_token_ids = None
        elif self.logprobs not in (None, count):
            raise RequestError(
                f"logprobs={self.logprobs} contradicts logprob_token_ids, which has {count} "
                "entries; leave logprobs out.",
                "logprob_token_ids",
            )

    def _check_logit_bias(self) -> None:
        value: Any = self.logit_bias
        if not isinstance(value, dict):
            raise RequestError("logit_bias must map token ids to numbers.", "logit_bias")
        self._check_number("logit_bias", value, MAX_LOGIT_BIAS)
        bias: dict[int, float] = {}
        wrong = [entry for entry in value.items() if not _is_bias(*entry)]
        if wrong:
            shown = ", ".join(f"{_show(token)}: {_show(number)}" for token, number in wrong[:3])
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise RequestError(
                f"logit_bias has {shown}{more}; it maps token ids to numbers.", "logit_bias"
            )
        for token, number in value.items():
            if not 0 <= int(token) < 2**31 or not -100.0 <= number <= 100.0:
                raise RequestError(
                    f"logit_bias has {_show(token)}: {_show(number)}; token ids are >= 0 and "
                    "values lie in [-100, 100].",
                    "logit_bias",
                )
            bias[int(token)] = float(number)
        self.logit_bias = bias

    def _check_structured_outputs(self) -> None:
        for name in ("structured_outputs", "guided_decoding"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, StructuredOutputsParams):
                raise RequestError(
                    f"{name}={_show(value)} is not StructuredOutputsParams(...).", name
                )
        if self.guided_decoding is not None:
            if self.structured_outputs is not None:
                raise RequestError(
                    "guided_decoding is the older name of structured_outputs; give one of them.",
                    "guided_decoding",
                )
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None

    def _check_int(self, name: str, low: int, high: int, *, optional: bool = False) -> None:
        value: Any = getattr(self, name)
        if value is None and optional:
            return
        if not _is_int(value) or not low <= value <= high:
            span = f">= {low}" if high == MAX_INT else f"in [{low}, {high}]"
            raise RequestError(
                f"{name}={_show(value)} is not allowed; it is an integer {span}.", name
            )
        setattr(self, name, int(value))

    def _check_float(self, name: str, low: float, high: float, *, open_low: bool = False) -> None:
        value: Any = getattr(self, name)
        # Comparisons with NaN are false.
        above = _is_number(value) and (low < value if open_low else low <= value)
        if not above or not value <= high:
            left = "(" if open_low else "["
            span = f"{left}{low:g}, {high:g}]"
            raise RequestError(
                f"{name}={_show(value)} is not allowed; it is a number in {span}.", name
            )
        setattr(self, name, float(value))


class BeamSearchParams(msgspec.Struct, omit_defaults=True):
    """Parameters of a beam search: vLLM's names and defaults, and also `early_stopping`.

    Raises:
        RequestError: a field is wrong; the message has the field, the value and the range.
    """

    beam_width: int
    """Number of beams, and of answers; 1 to 64."""
    max_tokens: int | None
    """Maximum number of tokens of a beam; None: all that fit the context."""
    ignore_eos: bool = False
    """True to continue after the end-of-sequence token."""
    temperature: float = 0.0
    """0 or 1, which have the same effect: a beam search does not sample."""
    length_penalty: float = 1.0
    """Exponent of a finished beam's length; its score is the sum of its logprobs divided by the
    power. Above 0 longer beams are preferred, below 0 shorter ones; -10 to 10."""
    include_stop_str_in_output: bool = False
    """True to keep the end-of-sequence token in the answer."""
    structured_outputs: StructuredOutputsParams | None = None
    """Unsupported."""
    skip_special_tokens: bool = True
    """True to leave special tokens out of the text."""
    watermarking: bool | None = None
    """Unsupported if true."""
    early_stopping: bool | Literal["never"] = False
    """End of the search, once `beam_width` beams have finished, as in transformers. True: at once;
    False: if no live beam has a better score at its present length than the worst of them; "never":
    only if no live beam can reach a better score."""

    def __post_init__(self) -> None:
        _refuse_unsupported(self, REFUSED_BEAM_SEARCH)
        width, most, penalty = self.beam_width, self.max_tokens, self.length_penalty
        if not _is_int(width) or not 1 <= width <= MAX_BEAM_WIDTH:
            self._refuse("beam_width", f"an integer in [1, {MAX_BEAM_WIDTH}]")
        if most is not None and (not _is_int(most) or not 1 <= most <= MAX_INT):
            self._refuse("max_tokens", "an integer >= 1")
        if not _is_number(self.temperature) or self.temperature not in (0.0, 1.0):
            self._refuse("temperature", "0 or 1 in a beam search, which does not sample")
        if not _is_number(penalty) or not -10.0 <= penalty <= 10.0:  # also rejects NaN
            self._refuse("length_penalty", "a number in [-10, 10]")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                self._refuse(name, "true or false")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            self._refuse("early_stopping", 'true, false or "never"')

    def _refuse(self, name: str, allowed: str) -> NoReturn:
        raise RequestError(
            f"{name}={_show(getattr(self, name))} is not allowed; it is {allowed}.", name
        )


@dataclass(frozen=True)
class BeamDefaults:
    """A model's defaults for beam search, from its generation_config.json."""

    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    forced_eos_token_id: int | None = None
    """Token with which a beam that has the most tokens ends."""


BEAM_DEFAULTS = BeamDefaults()
"""Defaults of a model that has none of its own."""


def fill_defaults(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `SamplingParams`, with a model's defaults for those that are missing.

    The model's `min_tokens` is never more than `max_tokens`. If a grammar decides when an answer
    ends, the model's rules of its length and repetitions do not apply.

    Args:
        given: the fields that a request sets.
        defaults: the model's defaults; keys of `extra_args` are filled one by one.
    """
    fields = {**defaults, **given}
    if fields.get("extra_args") and "extra_args" in defaults:
        fields["extra_args"] = {**defaults["extra_args"], **(given.get("extra_args") or {})}
    if given.get("structured_outputs") is not None:
        for name in ("min_tokens", "extra_args"):
            fields.pop(name, None)
            if name in given:
                fields[name] = given[name]
    most = fields.get("max_tokens")
    if "min_tokens" in defaults and "min_tokens" not in given and most is not None:
        fields["min_tokens"] = min(fields["min_tokens"], most)
    return fields


def _refuse_unsupported(params: object, refused: Refused) -> None:
    for name, (harmless, instead) in refused.items():
        value = getattr(params, name)
        if not (isinstance(value, int | None) and value in harmless):
            raise UnsupportedError(f"{name}={_show(value)} is not supported; {instead}.", name)


def check_extra_args(value: object, name: str) -> dict[str, Any]:
    """Return a private copy of plain data for `SamplingParams.extra_args`.

    Args:
        value: value from the caller.
        name: name of the field.

    Raises:
        RequestError: the value is no dict of plain data, or too large.
    """
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise RequestError(f"{name}={_show(value)} does not map names to values.", name)
    try:
        packed = msgspec.msgpack.encode(value)
        copy = msgspec.msgpack.decode(packed, type=dict[str, Any])
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise RequestError(
            f"{name} cannot be passed on: {_show(error)}. It may hold strings, numbers of 64 bits, "
            "true, false, null, and lists and dicts of these.",
            name,
        ) from None
    if len(packed) > MAX_EXTRA_ARGS_NBYTES:
        raise RequestError(
            f"{name} takes {len(packed)} bytes as msgpack; at most {MAX_EXTRA_ARGS_NBYTES} are "
            "allowed.",
            name,
        )
    return copy


def is_deeper(value: object, limit: int) -> bool:
    """Return True if lists and dicts are nested more than `limit` levels deep."""
    level = [value]
    for _ in range(limit):
        inner: list[object] = []
        for item in level:
            children = item.values() if type(item) is dict else item if type(item) is list else ()
            inner += [child for child in children if type(child) is dict or type(child) is list]
        if not inner:
            return False
        level = inner
    return True


def _json_text(name: str, value: object, kinds: tuple[type, ...], what: str) -> str:
    """Return JSON, or its text, as text in one form: each key once, no white space."""
    reason: str | None = None
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        if len(text) <= 6 * MAX_GRAMMAR_NBYTES:  # a longer text is too long in any form
            parsed = json.loads(text, parse_constant=_no_constant)
            if not isinstance(parsed, kinds):
                reason = ""
            elif not isinstance(value, str) and _has_odd_keys(value):
                reason = ": its keys are not all texts"  # JSON would turn them into texts
            elif is_deeper(parsed, MAX_GRAMMAR_DEPTH):
                raise RecursionError
            text = json.dumps(parsed, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except RecursionError:
        raise RequestError(
            f"{name} is nested more than {MAX_GRAMMAR_DEPTH} levels deep.", name
        ) from None
    except (TypeError, ValueError) as error:
        reason = f": it is not valid JSON ({str(error)[:80]})"
    if reason is not None:
        raise RequestError(f"{name}={_show(value)} is not allowed{reason}; it is {what}.", name)
    _check_text(name, text)
    return text


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not valid JSON")


def _has_odd_keys(value: object) -> bool:
    """Return True if a key of a JSON value is not a text."""
    level = [value]
    while level:
        item = level.pop()
        if isinstance(item, dict):
            if not all(isinstance(key, str) for key in item):
                return True
            level += item.values()
        elif isinstance(item, list | tuple):
            level += item
    return False


def _check_text(name: str, text: str) -> None:
    """Reject texts that are too long, and lone surrogates, which no message can carry."""
    try:
        nbytes = len(text) if len(text) > MAX_GRAMMAR_NBYTES else len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(
            f"{name} is not valid Unicode (it holds a lone surrogate); send valid UTF-8.",
            name,
            "invalid_unicode",
        ) from None
    if nbytes > MAX_GRAMMAR_NBYTES:
        raise RequestError(
            f"{name} has {nbytes} bytes; at most {MAX_GRAMMAR_NBYTES} are allowed.", name
        )


def _is_int(value: object) -> bool:
    """Return True for an integer, including numpy's; True and False are no integers."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_bias(token: object, number: object) -> bool:
    """Return True for an entry of a logit_bias; JSON has only strings as keys."""
    by_text = isinstance(token, str) and token.isascii() and token.isdecimal() and len(token) <= 10
    return (by_text or _is_int(token)) and _is_number(number)


def _show(value: object) -> str:
    """Return a value for an error message, shortened."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        return "(a huge number)"
    return text if len(text) <= 80 else text[:77] + "..."
