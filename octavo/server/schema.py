"""Request bodies of the API, with OpenAI's fields and vLLM's additions."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import msgspec
from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, StringConstraints

from octavo.compat import request_fields as known_fields
from octavo.errors import RequestError
from octavo.lora_request import MAX_ADAPTER_NAME
from octavo.sampling_params import (
    BEAM_DEFAULTS,
    MAX_BEAM_WIDTH,
    MAX_LOGIT_BIAS,
    MAX_N,
    MAX_STOP_STRINGS,
    BeamDefaults,
    BeamSearchParams,
    RepetitionGuard,
    RequestOutputKind,
    SamplingParams,
    check_extra_args,
    fill_defaults,
)
from octavo.server.body import Body, validate
from octavo.server.chat_messages import (
    MAX_TOOLS,
    AllowedTools,
    Documents,
    FunctionDefinition,
    Message,
    Messages,
    NamedFunction,
    NamedTool,
    Tool,
    Tools,
    check_conversations,
    check_functions,
    check_tool_choice,
)
from octavo.server.errors import show
from octavo.server.old_functions import check_choice
from octavo.server.structured_outputs import StructuredOutputsBody
from octavo.system.offload import pieces
from octavo.text.tokenizer import MAX_TOKENS

MAX_TOKEN_ID = 2**31 - 1
MAX_PROMPTS = 4096
MAX_ENGINES = 1024

RequestId: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[!-~]{1,128}$")]
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}(\.0*)?")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3})?")


def _read_int(value: object) -> object:
    """Return an integer, also from 3.0, "3" or "3.0"; leave others for pydantic to reject."""
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        return int(value.partition(".")[0])
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _read_ints(value: object) -> object:
    """Return a list with each entry converted by `_read_int`."""
    if isinstance(value, list) and not set(map(type, value)) <= {int}:
        return [_read_int(entry) for entry in value]
    return value


def _read_float(value: object) -> object:
    """Return a number, also from "0.5"; leave others for pydantic to reject."""
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


Int: TypeAlias = Annotated[int, BeforeValidator(_read_int)]
Milliseconds: TypeAlias = Annotated[int, Field(gt=0, le=2**53), BeforeValidator(_read_int)]
Float: TypeAlias = Annotated[float, BeforeValidator(_read_float)]
# One error is enough; without `fail_fast` pydantic makes one for each entry.
Ints: TypeAlias = Annotated[list[int], Field(fail_fast=True), BeforeValidator(_read_ints)]
Xargs: TypeAlias = dict[str, str | int | float | list[str | int | float]] | None
Prompts: TypeAlias = str | list[int] | list[str] | list[list[int]]


def check_token_ids(value: object, param: str) -> list[int]:
    """Return `value` if it is a list of one or more token ids, of any vocabulary.

    Raises:
        RequestError: `value` is not such a list; the message names the first wrong entry.
    """
    if not isinstance(value, list) or not value:
        raise RequestError(f"{param}={show(value)} is not a list of token ids.", param)
    if all(
        set(map(type, piece)) == {int} and min(piece) >= 0 and max(piece) <= MAX_TOKEN_ID
        for piece in pieces(value)
    ):
        return value
    for i, token in enumerate(value):
        if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
            raise RequestError(
                f"{param}[{i}]={show(token)} is not a token id (an integer >= 0).", param
            )
    return value


def check_prompts(value: object, param: str) -> object:
    """Return `value` if it is one prompt or a list of them: texts, or lists of token ids.

    Raises:
        RequestError: `value` is something else; the message names the first wrong entry.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestError(
            f"{param}={show(value)} is not allowed; give a string, a list of strings, a list of "
            "token ids, or a list of lists of token ids.",
            param,
        )
    if not value:
        raise RequestError(f"{param} is an empty list; give at least one {param}.", param)
    if isinstance(value[0], int):
        return check_token_ids(value, param)
    kind = type(value[0])
    if kind not in (str, list):
        raise RequestError(
            f"{param}[0]={show(value[0])} is not a string, a token id or a list of token ids.",
            param,
        )
    if len(value) > MAX_PROMPTS:
        raise RequestError(
            f"{param} has {len(value)} {param}s; at most {MAX_PROMPTS} are allowed.", param
        )
    for i, item in enumerate(value):
        if type(item) is not kind:
            raise RequestError(
                f"{param}[{i}]={show(item)} differs in kind from {param}[0]; the {param}s of one "
                "request are all strings or all lists of token ids.",
                param,
            )
        if kind is list:
            check_token_ids(item, f"{param}[{i}]")
    return value


def _check_prompt(value: object) -> object:
    return check_prompts(value, "prompt")


def _check_prompt_embeds(value: object) -> list[str] | None:
    """Return prompt embeddings as base64 texts; code that knows the model decodes them later."""
    if value is None or value == []:
        return None
    tensors: list[Any] = value if isinstance(value, list) else [value]
    if not all(isinstance(tensor, str) for tensor in tensors):
        raise RequestError(
            f"prompt_embeds={show(value)} is not allowed; give a tensor saved with torch.save "
            "or numpy.save, in base64, or a list of them.",
            "prompt_embeds",
        )
    if len(tensors) > MAX_PROMPTS:
        raise RequestError(
            f"prompt_embeds has {len(tensors)} prompts; at most {MAX_PROMPTS} are allowed.",
            "prompt_embeds",
        )
    return tensors


def _check_stop(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if stops is None:
        return None
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise RequestError(
            f"stop={show(value)} is not allowed; give a string or a list of strings.", "stop"
        )
    if len(stops) > MAX_STOP_STRINGS:
        raise RequestError(
            f"stop has {len(stops)} strings; at most {MAX_STOP_STRINGS} are allowed.", "stop"
        )
    return stops


def _check_bias(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias has {len(value)} entries; at most {MAX_LOGIT_BIAS} are allowed.",
            "logit_bias",
        )
    return value


def _clamp_bias(value: dict[str, float] | None) -> dict[str, float] | None:
    """Clamp values to the range of `SamplingParams`; beyond it a bias has the same effect."""
    return value and {token: min(max(bias, -100.0), 100.0) for token, bias in value.items()}


def _check_xargs(value: object) -> object:
    """Check that the values are strings, numbers, or lists of these, as vLLM does."""
    for name, entry in value.items() if isinstance(value, dict) else ():
        entries = entry if isinstance(entry, list) else [entry]
        if not set(map(type, entries)) <= {str, int, float, bool}:
            raise RequestError(
                f"vllm_xargs[{show(name)}]={show(entry)} is not allowed; give a string, a number "
                "or a list of these.",
                "vllm_xargs",
            )
    return None if value is None else check_extra_args(value, "vllm_xargs")


class StreamOptions(Body):
    """Options for additional reports of a stream."""

    unsupported = known_fields.STREAM_OPTIONS

    include_usage: bool | None = None
    """End the stream with a chunk of token counts."""
    continuous_usage_stats: bool | None = None
    """Report token counts in every chunk."""


class ServedBody(Body):
    """Fields of every generation request that say how the server answers it."""

    model: str | None = None
    """Served model name; default: the first one."""
    request_id: RequestId | None = None
    """Request id in printable ASCII; default: X-Request-Id, or generated."""
    stream: bool | None = None
    """Stream the answer as server-sent events."""
    stream_options: StreamOptions | None = None
    """Additional reports of a stream; needs stream."""
    cache_salt: Annotated[str, StringConstraints(min_length=1)] | None = None
    priority: Int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    """With --kv-transfer-config: the part of the prompt that another server has computed, or
    the request to compute the prompt for another server."""


class GenerationBody(ServedBody, StructuredOutputsBody):
    """Fields of both generation endpoints; null means not given."""

    n: Int | None = None
    """Number of answers, or of beams with use_beam_search. Default 1."""
    temperature: Float | None = None
    """Divisor of the logits; 0: greedy. Default 1, or the model's default."""
    top_p: Float | None = None
    max_tokens: Int | None = None
    """Maximum tokens of an answer; default: 16, in a chat all that fit."""
    seed: Int | None = None
    stop: Annotated[str | list[str] | None, BeforeValidator(_check_stop)] = None
    presence_penalty: Float | None = None
    frequency_penalty: Float | None = None
    logit_bias: Annotated[
        dict[str, Float] | None, BeforeValidator(_check_bias), AfterValidator(_clamp_bias)
    ] = None
    user: str | None = None
    """End user; no effect."""

    top_k: Int | None = None
    min_p: Float | None = None
    repetition_penalty: Float | None = None
    stop_token_ids: Ints | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None
    prompt_logprobs: Int | None = None
    """Number of candidates for each prompt token's logprobs; not with stream."""
    logprob_token_ids: Ints | None = None
    """Tokens, at most 128, to report instead of the most probable ones; needs logprobs."""
    allowed_token_ids: Ints | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True)] | None = None
    thinking_token_budget: Int | None = None
    """Maximum number of tokens of reasoning; then its end is forced, and the answer goes on. -1
    (default): no limit. It needs a model whose chat template shows reasoning."""
    repetition_guard: RepetitionGuard | None = None
    """Action when the answer repeats itself: off, report, stop, or close_thinking, which ends the
    reasoning, or the answer if it is not in reasoning. Default: --repetition-guard."""
    vllm_xargs: Annotated[Xargs, PlainValidator(_check_xargs, json_schema_input_type=Xargs)] = None
    """Arguments for logits processors of plug-ins."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens to the prompt; default: true for a text, false for a
    chat, because its template adds them."""
    return_token_ids: bool | None = None
    """Return the token ids of the prompt and the answer."""
    return_tokens_as_token_ids: bool | None = None
    """Show tokens in logprobs as token_id:N."""
    return_metrics: bool | None = None
    """Report times and counts of the request as metrics of the answer, or of the last chunk; only
    for one answer to one prompt."""
    explain: bool | None = None
    """Explain the time of the request in its answer, or in the last chunk of its stream, as
    explanation; see docs/explain.md."""
    return_progress: bool | None = None
    """Send chunks with prompt_progress while the prompt is computed; needs stream, and one
    prompt."""
    deadline_ms: Milliseconds | None = None
    """Milliseconds after which the request fails with 408; it fails at once with 429 if that
    time cannot suffice. Also as the header X-Deadline-Ms."""
    max_ttft_ms: Milliseconds | None = None
    """Deadline of the first token, like deadline_ms. Also as the header X-Max-TTFT-Ms."""

    use_beam_search: bool | None = None
    """Find the most probable answers instead of sampling."""
    length_penalty: Float | None = None
    """Beam search: above 1 favours long answers. Default 1."""
    early_stopping: bool | Literal["never"] | None = None
    """End of a beam search after n finished beams. true: at once; false (default): if no unfinished
    beam has a better score at its present length; never: only if none can reach a better score."""

    unsupported = known_fields.GENERATION
    inner: ClassVar[Mapping[str, type[Body]]] = {
        **StructuredOutputsBody.inner,
        "stream_options": StreamOptions,
    }

    def check(self) -> None:
        """Check that the fields fit together.

        Raises:
            RequestError: fields contradict each other; the message names one of them.
        """
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream=true.", "stream_options")
        if self.return_progress and not self.stream:
            raise RequestError("return_progress needs stream=true.", "return_progress")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs is not available with stream=true; leave one of them out.",
                "prompt_logprobs",
            )
        constraint = self.constraint()
        if self.use_beam_search:
            if constraint is not None:
                raise RequestError(
                    f"{constraint[0]} is not available with use_beam_search=true; leave one of them"
                    " out.",
                    constraint[0],
                )
            self._check_beams()
        elif self.length_penalty not in (None, 1.0) or self.early_stopping is not None:
            name = "length_penalty" if self.early_stopping is None else "early_stopping"
            raise RequestError(f"{name} needs use_beam_search=true.", name)
        asked = getattr(self, "logprobs", None)
        if self.logprob_token_ids and (asked is None or asked is False):
            raise RequestError("logprob_token_ids needs logprobs.", "logprob_token_ids")

    def _check_beams(self) -> None:
        """Raise RequestError for fields that beam search does not support (sampling, streaming)."""
        for name, nothing in _WITHOUT_BEAMS.items():
            value = getattr(self, name, None)
            if name == "logprobs" and value is False:
                continue  # of a chat; 0 in a completion is a request
            if name not in _WITH_BEAMS and value not in nothing:
                raise RequestError(
                    f"{name}={show(value)} is not available with use_beam_search=true; leave one "
                    "of them out.",
                    name,
                )
        self.beam_params(None)

    def beam_params(
        self, max_tokens: int | None, defaults: BeamDefaults = BEAM_DEFAULTS
    ) -> BeamSearchParams:
        """Return the parameters of the beam search, with n as its width.

        Args:
            max_tokens: maximum number of tokens of an answer; None: the rest of the context.
            defaults: the model's defaults.

        Raises:
            RequestError: a value is out of its range.
        """
        width = 1 if self.n is None else self.n
        if not 1 <= width <= MAX_BEAM_WIDTH:
            raise RequestError(
                f"n={show(width)} is not allowed with use_beam_search=true; it is the number of "
                f"beams, 1 to {MAX_BEAM_WIDTH}.",
                "n",
            )
        return BeamSearchParams(
            beam_width=width,
            max_tokens=max_tokens,
            ignore_eos=bool(self.ignore_eos),
            length_penalty=defaults.length_penalty
            if self.length_penalty is None
            else self.length_penalty,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            early_stopping=defaults.early_stopping
            if self.early_stopping is None
            else self.early_stopping,
        )

    def sampling_params(self, defaults: Mapping[str, Any], **overrides: object) -> SamplingParams:
        """Return the sampling parameters of this request.

        Args:
            defaults: defaults of the model's generation config; given fields override them.
            overrides: fields that the endpoint derives; None: not given.

        Raises:
            RequestError: a value is out of its range.
        """
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS} | overrides
        given["extra_args"] = self.vllm_xargs
        if self.kv_transfer_params is not None:
            given["extra_args"] = {
                **(self.vllm_xargs or {}),
                "kv_transfer_params": self.kv_transfer_params,
            }
        given["structured_outputs"] = self.structured_outputs_params()
        kwargs = fill_defaults(
            {name: value for name, value in given.items() if value is not None}, defaults
        )
        kwargs["output_kind"] = (
            RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        )
        return SamplingParams(**kwargs)


# The others are derived by `sampling_params`, or by an endpoint.
_SAMPLING_FIELDS = tuple(
    name
    for name in GenerationBody.model_fields
    if name in SamplingParams.__struct_fields__ and name not in ("cache_salt", "structured_outputs")
)


# What a beam search cannot do, and the values of it that request nothing.
_WITHOUT_BEAMS: Mapping[str, tuple[object, ...]] = {
    **{
        name: (None, default)
        for name, default in msgspec.structs.asdict(SamplingParams()).items()
        if name in _SAMPLING_FIELDS
    },
    **dict.fromkeys(("best_of", "logprobs", "vllm_xargs", "kv_transfer_params"), (None,)),
    **dict.fromkeys(("bad_words", "logprob_token_ids"), (None, [])),
    "temperature": (None, 0.0, 1.0),
    "top_k": (None, 0, -1),
    "logit_bias": (None, {}),
    "stream": (None, False),
    "return_metrics": (None, False),
}
_WITH_BEAMS = (
    "n",
    "max_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "spaces_between_special_tokens",
)


class CompletionBody(GenerationBody):
    """Body of POST /v1/completions."""

    # `_check_prompt` checks it once; pydantic would try one kind of list after the other.
    prompt: Annotated[
        Prompts | None, PlainValidator(_check_prompt, json_schema_input_type=Prompts)
    ] = None
    """Text or token ids, or a list of either. Required without prompt_embeds."""
    prompt_embeds: Annotated[
        list[str] | None,
        PlainValidator(_check_prompt_embeds, json_schema_input_type=str | list[str] | None),
    ] = None
    """Embeddings instead of tokens, with --enable-prompt-embeds: a tensor [tokens, hidden size]
    saved with torch.save or numpy.save, in base64, or a list of tensors. Their answers precede
    those of prompt."""
    echo: bool | None = None
    """Repeat the prompt before each answer."""
    logprobs: Int | None = None
    """Return the logprob of each token, and those of this number of most probable tokens."""
    best_of: Int | None = None
    """Number of answers to generate, of which the n best are returned; not with stream."""

    unsupported = known_fields.COMPLETION

    def check(self) -> None:
        """Check that the fields fit together; see `GenerationBody.check`."""
        super().check()
        if self.prompt_embeds is not None:
            self._check_without_tokens()
        elif self.prompt is None:
            raise RequestError("prompt is missing; it is required.", "prompt", "missing_parameter")
        n = 1 if self.n is None else self.n
        if self.best_of is None or self.best_of == n:
            return
        if not max(n, 1) <= self.best_of <= MAX_N:
            raise RequestError(
                f"best_of={show(self.best_of)} is not allowed; it is the number of answers of "
                f"which the best n={show(n)} are returned, n to {MAX_N}.",
                "best_of",
            )
        if self.stream:
            raise RequestError(
                f"best_of={show(self.best_of)} is not available with stream=true, since the best "
                "answers are known at the end; leave one of them out.",
                "best_of",
            )

    def _check_without_tokens(self) -> None:
        """Raise RequestError for fields that need the prompt's tokens."""
        for name, asked in (
            ("echo", self.echo),
            ("prompt_logprobs", self.prompt_logprobs is not None),
        ):
            if asked:
                raise RequestError(
                    f"{name} is not available with prompt_embeds, which has no tokens; leave one "
                    "of them out.",
                    name,
                )


class ChatFields(GenerationBody):
    """Fields of chats, except the messages."""

    echo: bool | None = None
    """Repeat the last message before the answer."""
    max_completion_tokens: (
        Annotated[int, Field(ge=1, le=2**63 - 1), BeforeValidator(_read_int)] | None
    ) = None
    """Maximum tokens of an answer; newer name for max_tokens."""
    logprobs: bool | None = None
    """Return the logprobs of each token."""
    top_logprobs: Annotated[int, Field(ge=-1, le=2**31), BeforeValidator(_read_int)] | None = None
    """Number of most probable tokens with logprobs; needs logprobs."""
    add_generation_prompt: bool | None = None
    """Let the template begin the assistant's turn. Default true."""
    continue_final_message: bool | None = None
    """Continue the last message instead of answering it."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Settings of the processors of media for this request."""
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    """Choice of the frames of videos: {"video": {"num_frames": 64, "fps": 2}}."""
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    """Variable for the chat template; it also sets enable_thinking if chat_template_kwargs does
    not."""
    documents: Documents = None
    """Texts for retrieval, for templates that use them: objects of strings, such as title and
    text."""
    tools: Tools = None
    """Definitions of the tools that the model may call."""
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | NamedTool | AllowedTools | None,
        BeforeValidator(check_tool_choice),
    ] = None
    """auto (default): the model may call tools; none: it calls none; required: it calls at least
    one; a function: it calls this one; allowed_tools: auto or required with some of the tools."""
    functions: Annotated[list[FunctionDefinition], Field(max_length=MAX_TOOLS, fail_fast=True)] | (
        None
    ) = None
    """Older form of tools: the answer has function_call, with at most one call."""
    function_call: Annotated[
        Literal["none", "auto"] | NamedFunction | None, BeforeValidator(check_choice)
    ] = None
    """Older form of tool_choice."""
    parallel_tool_calls: bool | None = None
    """Allow several calls in an answer. Default true."""
    include_reasoning: bool | None = None
    """Return the reasoning. Default true."""

    unsupported = known_fields.CHAT
    inner: ClassVar[Mapping[str, type[Body]]] = {
        **GenerationBody.inner,
        "messages": Message,
        "tools": Tool,
        "functions": FunctionDefinition,
        "function_call": NamedFunction,
    }

    @property
    def callable_tools(self) -> list[Tool]:
        """Tools that the answer may call."""
        tools, choice = self.tools or [], self.tool_choice
        if choice == "none":
            return []
        if isinstance(choice, AllowedTools):
            names = {tool.function.name for tool in choice.allowed_tools.tools}
            tools = [tool for tool in tools if tool.function.name in names]
        return tools

    @property
    def must_call(self) -> bool:
        """True if the answer consists of calls."""
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode == "required"
        return choice not in (None, "none", "auto")

    @property
    @abstractmethod
    def conversations(self) -> list[list[Message]]:
        """Chats to answer."""

    def check(self) -> None:
        """Check that the fields fit together; see `GenerationBody.check`."""
        super().check()
        self._adopt_functions()
        self._check_tools()
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true.", "top_logprobs")
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            raise RequestError(
                f"max_tokens={both[0]} and max_completion_tokens={both[1]} contradict; "
                "give one of them.",
                "max_tokens",
            )

    def _adopt_functions(self) -> None:
        """Turn functions and function_call into tools and tool_choice."""
        given = [n for n in ("functions", "function_call") if getattr(self, n) is not None]
        for name in ("tools", "tool_choice"):
            if given and getattr(self, name) is not None:
                raise RequestError(
                    f"{given[0]} is the older form of tools and does not go with {name}; send only "
                    f"{name}.",
                    given[0],
                )
        choice = self.function_call
        if not self.functions:
            if choice not in (None, "none"):
                raise RequestError("function_call needs functions.", "function_call")
            return
        check_functions(self.functions, "functions", "functions[{}]")
        names = [function.name for function in self.functions]
        if isinstance(choice, NamedFunction) and choice.name not in names:
            raise RequestError(
                f"function_call.name={show(choice.name)} is not a function of functions.",
                "function_call",
            )
        self.tools = [Tool(function=function) for function in self.functions]
        self.parallel_tool_calls = False
        self.tool_choice = (
            NamedTool(function=choice) if isinstance(choice, NamedFunction) else choice
        )

    def _check_tools(self) -> None:
        functions = [tool.function for tool in self.tools or ()]
        check_functions(functions, "tools", "tools[{}].function")
        names = [function.name for function in functions]
        choice = self.tool_choice
        if names and choice != "none" and self.use_beam_search:
            raise RequestError(
                'tools are not available with use_beam_search=true; send tool_choice="none", or '
                "leave one of them out.",
                "tools",
            )
        if choice in (None, "none", "auto"):
            return
        if not names:
            raise RequestError("tool_choice needs tools.", "tool_choice")
        if isinstance(choice, AllowedTools):
            for i, allowed in enumerate(choice.allowed_tools.tools):
                if allowed.function.name not in names:
                    where = f"tool_choice.allowed_tools.tools[{i}].function.name"
                    raise RequestError(
                        f"{where}={show(allowed.function.name)} is not a function of tools.",
                        "tool_choice",
                    )
        if not self.must_call:
            return
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise RequestError(
                f"tool_choice.function.name={choice.function.name!r} is not a function of tools.",
                "tool_choice",
            )
        if (found := self.constraint()) is not None:
            raise RequestError(
                f"tool_choice={show(choice)} and {found[0]} both constrain the form of the answer; "
                "give one of them.",
                "tool_choice",
            )


class ChatBody(ChatFields):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    """Messages of the chat."""

    @classmethod
    def checked(cls, fields: Mapping[str, Any]) -> ChatBody:
        """Return the checked body with those fields that are not None.

        Raises:
            RequestError: a field is wrong, or the fields do not fit together.
        """
        body = validate(cls, {k: v for k, v in fields.items() if v is not None})
        body.check()
        return body

    @property
    def conversations(self) -> list[list[Message]]:
        """Chats to answer; see `ChatFields.conversations`."""
        return [self.messages]


class BatchChatBody(ChatFields):
    """Body of vLLM's POST /v1/chat/completions/batch: several chats in one request."""

    messages: Annotated[
        list[Annotated[list[Message], Field(fail_fast=True)]],
        Field(fail_fast=True),
        BeforeValidator(check_conversations),
    ]
    """Chats, each a list of messages."""

    @property
    def conversations(self) -> list[list[Message]]:
        """Chats to answer; see `ChatFields.conversations`."""
        return self.messages

    def check(self) -> None:
        """Check that the fields fit together; see `GenerationBody.check`."""
        super().check()
        for name, nothing in _WITHOUT_BATCH.items():
            value = getattr(self, name)
            if value not in nothing:
                raise RequestError(
                    f"{name}={show(value)} is not available with several chats in a request; send "
                    "each to POST /v1/chat/completions.",
                    name,
                )


_WITHOUT_BATCH: Mapping[str, tuple[object, ...]] = {
    "stream": (None, False),
    "use_beam_search": (None, False),
    "tools": (None, []),
    "n": (None, 1),
    "prompt_logprobs": (None,),
    "kv_transfer_params": (None,),
}


class GenerateBody(ServedBody):
    """Body of vLLM's POST /inference/v1/generate: tokens in, tokens out."""

    unsupported = known_fields.GENERATE
    inner: ClassVar[Mapping[str, type[Body]]] = {"stream_options": StreamOptions}

    token_ids: Annotated[
        list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(_read_ints),
    ]
    """Token ids of the prompt."""
    sampling_params: dict[str, Any]
    """Fields of SamplingParams, such as max_tokens and temperature."""
    output_mode: Literal["tokens", "text"] | None = None
    """tokens (default), or text: also return the text of the answer."""
    return_token_ids: bool | None = None
    """Also return the token ids of the prompt."""


class TokenizeBody(Body):
    """Body of POST /tokenize: a text, or a chat to render."""

    model: str | None = None
    """Served model name; default: the first one."""
    prompt: str | None = None
    """Text to tokenize; give this or messages."""
    messages: Messages | None = None
    """Chat to render with the template and tokenize."""
    add_special_tokens: bool | None = None
    """Add special tokens; default: true for a prompt."""
    add_generation_prompt: bool | None = None
    """Let the template begin the assistant's turn. Default true."""
    continue_final_message: bool | None = None
    """Leave the last message open, so that it can be continued."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    documents: Documents = None
    """Texts for retrieval, for templates that use them: objects of strings, such as title and
    text."""
    tools: Tools = None
    """Definitions of tools for templates that use them."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Settings of the processors of media."""
    media_io_kwargs: dict[str, dict[str, Any]] | None = None
    """Choice of the frames of videos, as in `ChatFields`."""
    return_token_strs: bool | None = None
    """Also return the text of each token."""
    cache_salt: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Scope of the uuids and files of media."""

    unsupported = known_fields.TOKENIZE
    inner: ClassVar[Mapping[str, type[Body]]] = {"messages": Message, "tools": Tool}

    def check(self) -> None:
        """Raise RequestError if fields contradict each other."""
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("Give either prompt or messages.", "prompt")


class ScaleBody(Body):
    """Body of POST /scale_elastic_ep."""

    unsupported = known_fields.SCALE

    new_data_parallel_size: Annotated[int, Field(ge=1, le=MAX_ENGINES)]
    """New number of engines."""
    drain_timeout: Annotated[float, Field(ge=0)] | None = None
    """No effect; requests continue on other engines instead of being drained."""


class LoadAdapterBody(Body):
    """Body of POST /v1/load_lora_adapter."""

    unsupported = known_fields.ADAPTER

    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_NAME)]
    """Name by which requests choose the adapter."""
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Folder of the adapter, in --lora-root; or a hub id that --lora-hub-repos allows. With
    load_inplace it may be missing: the files of the adapter are read again."""
    draft_path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    """Folder of the draft model's adapter, as lora_path; null: it drafts without one."""
    load_inplace: bool = False
    """True to replace an adapter with the same name."""
    base_model_name: str | None = None
    """Served name of the adapter's model; default: the first one. A server of several models needs
    it unless only one of them has adapters."""

    def check(self) -> None:
        """Raise RequestError if a field is missing."""
        if self.lora_path is None and not self.load_inplace:
            raise RequestError("lora_path is missing; it is required.", "lora_path")
        if self.draft_path is not None and self.lora_path is None:
            raise RequestError("draft_path needs lora_path; add it.", "draft_path")


class UnloadAdapterBody(Body):
    """Body of POST /v1/unload_lora_adapter."""

    unsupported = known_fields.ADAPTER

    lora_name: Annotated[str, Field(min_length=1, max_length=MAX_ADAPTER_NAME)]
    """Name of the adapter."""
    lora_int_id: int | None = None
    """No effect: the name is enough."""


class DetokenizeBody(Body):
    """Body of POST /detokenize."""

    unsupported = known_fields.DETOKENIZE

    model: str | None = None
    """Served model name; default: the first one."""
    tokens: Annotated[
        list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]],
        Field(max_length=MAX_TOKENS, fail_fast=True),
        BeforeValidator(_read_ints),
    ]
    """Token ids to detokenize."""
