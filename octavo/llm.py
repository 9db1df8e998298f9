"""Offline generation: vLLM's `LLM`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from octavo.compat.call_arguments import apply_tokenization, refuse_unsupported
from octavo.config import BUILTIN_MODEL, EngineConfig, ModelConfig
from octavo.config.engine_settings import engine_settings
from octavo.errors import OctavoError, RequestError
from octavo.frontend.adapters import LoRARequests
from octavo.frontend.beam_search import (
    Beam,
    beam_requests,
    candidates_of,
    make_beam_search,
    prompt_params,
    step_params,
)
from octavo.frontend.interrupts import late_interrupts
from octavo.frontend.llm_engine import LLMEngine, failed_output
from octavo.frontend.open_media import check_processor_kwargs
from octavo.frontend.prompts import Prompt, with_processor_kwargs
from octavo.llm_pooling import PoolingMethods, as_list
from octavo.llm_speech import SpeechMethods
from octavo.lora_request import LoRARequest
from octavo.media.content import MediaItem, read_media
from octavo.messages import AdapterRef, EngineCoreRequest, PauseMode
from octavo.observability.scheduler_stats import SchedulerStats
from octavo.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from octavo.parsers.answer import Format
from octavo.parsers.detect import find_format
from octavo.parsers.message import MessageReader
from octavo.plan.memory_plan import MemoryPlan
from octavo.sampling_params import (
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
    fill_defaults,
)
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from octavo.config.engine_args import EngineArgs
    from octavo.observability.metrics_reader import Metric

# Chat templates of which the formats of answers are kept.
_MAX_FORMATS = 64

Message = Mapping[str, Any]
Bar = bool | Callable[..., Any]
"""True for a progress bar, or a function that makes one, as `tqdm` does."""
T = TypeVar("T")


class LLM(PoolingMethods, SpeechMethods):
    """Model in this process, for offline use.

    Args:
        model: folder, hub id, or nothing for the built-in model.
        chat_template: a template, or its file, for `chat` instead of the model's template.
        isolate: True if the engine runs in its own process. If that process dies, another one
            replaces it, and every request continues. With `data_parallel_size` several
            engines run so, and prompts are divided among them.
        **kwargs: any setting of `octavo.config.EngineConfig`, by vLLM's name. Settings that only
            vLLM has are accepted if they change nothing; otherwise the error names an alternative.

    Raises:
        ConfigError, ModelError, HubError: settings, model folder or download are wrong.
        EngineDeadError: an isolated engine cannot load the model.

    Use it as a context manager, or call `shutdown`, to free its memory at once.
    """

    def __init__(
        self,
        model: str = BUILTIN_MODEL,
        *,
        chat_template: str | Path | None = None,
        isolate: bool = False,
        **kwargs: Any,
    ) -> None:
        self.config = EngineConfig.from_kwargs(**engine_settings({"model": model, **kwargs}))
        self.llm_engine = LLMEngine(
            self.config, log_stats=not kwargs.get("disable_log_stats", True), isolate=isolate
        )
        """Engine as vLLM's `LLMEngine`."""
        self._chat_template = None if chat_template is None else str(chat_template)
        self._client = self.llm_engine.client
        self._input_processor = self.llm_engine.input_processor
        self._inboxes = self.llm_engine.inboxes
        self._enqueued: list[str] = []
        """Requests of `enqueue`, in their order."""
        self._chats: dict[str, Callable[[RequestOutput], None]] = {}
        """Setters of the messages in the outputs of `enqueue_chat`, by request."""
        self._formats: dict[str | None, Format | None] = {}
        """Formats of answers by chat template; None: the model's."""

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Return an LLM with vLLM's settings.

        Raises:
            ConfigError, ModelError, HubError: settings, model folder or download are wrong.
        """
        return cls(**vars(engine_args))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    @property
    def memory_plan(self) -> MemoryPlan:
        """Memory plan of the engine, byte by byte."""
        return self.llm_engine.memory_plan

    @property
    def model_config(self) -> ModelConfig:
        """Settings of the model, with the resolved `max_model_len`."""
        return self.llm_engine.model_config

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Bar = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate an answer to each prompt; return them in the order of the prompts.

        Args:
            prompts: one prompt or a list: texts, or dicts with "prompt", "prompt_token_ids" or
                "prompt_embeds". Pictures are in "multi_modal_data": {"image": [...]}, as images of
                Pillow or arrays uint8 [height, width, 3], one for each placeholder of the prompt;
                videos in {"video": [...]}, as arrays uint8 [frames, height, width, 3] or lists of
                pictures.
            sampling_params: one for all or one for each; None: the model's defaults.
            use_tqdm: True for a progress bar, or a function that makes one, as `tqdm` does.
            lora_request: an adapter for all prompts, or one for each (None: the model alone); with
                `enable_lora`.
            priority: one for each prompt, lower ones are served earlier; with
                `scheduling_policy="priority"`.
            tokenization_kwargs: `truncate_prompt_tokens` and `add_special_tokens`.
            mm_processor_kwargs: settings of the processors of media.

        If a single request fails, such as for a grammar that cannot be compiled, its answer has
        `finish_reason` "error" and the reason as `stop_reason`.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing has been generated.
        """
        starts = self._starts(
            with_processor_kwargs(as_list(prompts), mm_processor_kwargs),
            sampling_params,
            True,
            priority,
            tokenization_kwargs,
            lora_request,
        )
        return self._run(starts, use_tqdm=use_tqdm)

    def enqueue(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        use_tqdm: Bar = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Submit prompts without computing them; `wait_for_completion` does that.

        Args:
            prompts: as for `generate`.
            sampling_params: as for `generate`.
            lora_request: as for `generate`.
            priority: as for `generate`.
            use_tqdm: ignored: the call returns at once.
            tokenization_kwargs: as for `generate`.
            mm_processor_kwargs: as for `generate`.

        Returns:
            The ids of the requests.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing has been submitted.
        """
        starts = self._starts(
            with_processor_kwargs(as_list(prompts), mm_processor_kwargs),
            sampling_params,
            True,
            priority,
            tokenization_kwargs,
            lora_request,
        )
        return self._enqueue(starts)

    def wait_for_completion(
        self, output_type: object = None, *, use_tqdm: Bar = True
    ) -> list[RequestOutput]:
        """Compute the requests of `enqueue` and `enqueue_chat`.

        Args:
            output_type: ignored: all outputs have one type.
            use_tqdm: as for `generate`.

        Returns:
            The answers, in the order of submission.
        """
        request_ids, self._enqueued = self._enqueued, []
        with late_interrupts() as interrupts:
            try:
                outputs = self._wait(request_ids, use_tqdm, interrupts.raise_now)
            finally:
                self.llm_engine.end(request_ids)
                readers = [self._chats.pop(request_id, None) for request_id in request_ids]
        for read, output in zip(readers, outputs, strict=True):
            if read is not None:
                read(output)
        return outputs

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequests = None,
        *,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Find the most probable answers to each prompt; return them in the order of the prompts.

        Args:
            prompts: as for `generate`.
            params: parameters for all prompts.
            lora_request: as for `generate`.
            use_tqdm: show a progress bar for each step.

        Raises:
            RequestError: a prompt or parameter is wrong, or a request fails.
        """
        given = as_list(prompts)
        adapters = self.llm_engine.adapters.resolve_each(lora_request, len(given))
        spec = self.llm_engine.spec
        its_params = prompt_params(params, spec)
        processed = [
            self._process(prompt, its_params, add_special_tokens=True, adapter=adapter)
            for prompt, adapter in zip(given, adapters, strict=True)
        ]
        searches = [make_beam_search(params, request, spec) for request, _ in processed]
        while live := [i for i, search in enumerate(searches) if search.live]:
            beams = [
                partial(self.llm_engine.start, beam, step_params(searches[i]), None)
                for i in live
                for beam in beam_requests(processed[i][0], searches[i])
            ]
            outputs = iter(self._run(beams, use_tqdm=use_tqdm))
            for i in live:
                its_outputs = list(itertools.islice(outputs, len(searches[i].live)))
                for output in its_outputs:
                    if output.outputs[0].finish_reason == "error":
                        raise RequestError(str(output.outputs[0].stop_reason))
                searches[i].step([candidates_of(output) for output in its_outputs])
        return [
            BeamSearchOutput([self._sequence(request, beam, params) for beam in search.beams])
            for (request, _), search in zip(processed, searches, strict=True)
        ]

    def _sequence(
        self, request: EngineCoreRequest, beam: Beam, params: BeamSearchParams
    ) -> BeamSearchSequence:
        tokenizer = self.llm_engine.tokenizer
        cut = beam.finish_reason == "stop" and not params.include_stop_str_in_output
        tokens = beam.token_ids[:-1] if cut else beam.token_ids
        text = None
        if tokenizer is not None:
            known = request.known_token_ids + tokens
            text = tokenizer.decode(known, skip_special_tokens=params.skip_special_tokens)
        return BeamSearchSequence(
            request.prompt_token_ids + tokens,
            [row[0] for row in beam.rows],
            beam.cum_logprob,
            text,
            beam.finish_reason,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Bar = True,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generate the next turn of one conversation or of each of several.

        Args:
            messages: OpenAI's messages, of one conversation or of several.
            sampling_params: as for `generate`.
            use_tqdm: as for `generate`.
            lora_request: as for `generate`.
            chat_template: as for `render_chat`.
            chat_template_content_format: only "auto": each template receives a form that it
                supports.
            add_generation_prompt: as for `render_chat`.
            continue_final_message: as for `render_chat`.
            tools: as for `render_chat`.
            chat_template_kwargs: as for `render_chat`.
            tokenization_kwargs: as for `generate`.
            mm_processor_kwargs: as for `generate`.

        Returns:
            The answers. The `message` of each of their `outputs` has its content, reasoning and
            tool calls, as the server would separate them; `text` is the whole text.

        Raises:
            RequestError: a conversation or parameter is wrong.
        """
        refuse_unsupported(chat_template_content_format=chat_template_content_format)
        prompts = self._render_chats(
            messages,
            mm_processor_kwargs,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        reader = self._message_reader(chat_template, tools)
        params = [reader.limit(its) for its in self._params_for(prompts, sampling_params)]
        starts = self._starts(prompts, params, False, None, tokenization_kwargs, lora_request)
        outputs = self._run(starts, use_tqdm=use_tqdm)
        for prompt, its_params, output in zip(prompts, params, outputs, strict=True):
            reader.read(_text_of(prompt), its_params, output)
        return outputs

    def enqueue_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Bar = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Submit conversations without computing them; see `enqueue` and `chat`."""
        refuse_unsupported(chat_template_content_format=chat_template_content_format)
        prompts = self._render_chats(
            messages,
            mm_processor_kwargs,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        reader = self._message_reader(chat_template, tools)
        params = [reader.limit(its) for its in self._params_for(prompts, sampling_params)]
        starts = self._starts(prompts, params, False, priority, tokenization_kwargs, lora_request)
        request_ids = self._enqueue(starts)
        for request_id, prompt, its_params in zip(request_ids, prompts, params, strict=True):
            self._chats[request_id] = partial(reader.read, _text_of(prompt), its_params)
        return request_ids

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Generate one answer piece by piece: each output has only the new part.

        Raises:
            RequestError: the prompt or a parameter is wrong, or the request fails.
        """
        params = self._params_for([prompt], sampling_params)[0]
        request_id: str | None = None
        finished = False
        try:
            with late_interrupts():
                adapter = self.llm_engine.adapters.resolve(lora_request)
                kind = RequestOutputKind.DELTA
                request_id = self._add(prompt, params, kind, add_special_tokens, adapter)
                inbox = self._inboxes[request_id]
            while not finished:
                if not inbox:
                    with late_interrupts():
                        self._step()
                    continue
                output = inbox.pop(0)
                if isinstance(output, OctavoError):
                    finished = True
                    raise output
                finished = output.finished
                yield output
        finally:
            with late_interrupts():
                if request_id is not None:
                    self.llm_engine.end([request_id])

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a conversation, including its special tokens.

        Args:
            messages: OpenAI's messages.
            chat_template: a template, or its file, instead of the model's template.
            add_generation_prompt: end with the beginning of the assistant's turn.
            continue_final_message: end inside the last message, so that the model continues it.
            tools: definitions of tools, in OpenAI's form, for templates that support them.
            chat_template_kwargs: further variables for the template.

        Raises:
            RequestError: the messages are malformed or the model has no chat template.
        """
        pieces, _ = self._render(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return "".join(pieces)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer.

        Raises:
            UnsupportedError: the engine was made with skip_tokenizer_init.
        """
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the model's defaults, from its generation_config.json."""
        defaults = self.llm_engine.spec.generation_config
        given = {"max_tokens": defaults.get("max_tokens", SamplingParams().max_tokens)}
        return SamplingParams(**fill_defaults(given, defaults))

    def stats(self) -> SchedulerStats:
        """Return state and counters of the scheduler and the KV cache."""
        return self.llm_engine.stats()

    def get_metrics(self) -> list[Metric]:
        """Return the current values of all metrics.

        Raises:
            UnsupportedError: the engine was made without `disable_log_stats=False`.
        """
        return self.llm_engine.get_metrics()

    def collective_rpc(
        self,
        method: str | Callable[..., T],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[T]:
        """Call a method of each worker; see `LLMEngine.collective_rpc`."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def apply_model(self, func: Callable[[Any], T]) -> list[T]:
        """Call a function with the model of each worker: an `octavo.models.base.Model`."""
        return self.llm_engine.apply_model(func)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes.

        Args:
            reset_running_requests: True to restart running requests with their tokens, so that they
                hold no blocks.
            reset_connector: True to clear the KV connector's store as well.

        Returns:
            False if requests hold blocks and nothing is forgotten, or if the connector's folder is
            shared with other engines and stays unchanged.
        """
        return self.llm_engine.reset_prefix_cache(reset_running_requests, reset_connector)

    def reset_encoder_cache(self) -> bool:
        """Forget what encoders have computed for pictures and sounds.

        Returns:
            False if requests use some of it, and nothing is forgotten.
        """
        return self.llm_engine.reset_encoder_cache()

    def reset_mm_cache(self) -> None:
        """Forget the pictures, videos and sounds that this process, by their files and uuids, and
        the engine's process keep."""
        self.llm_engine.reset_mm_cache()

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Return memory to the system until `wake_up`; see `LLMEngine.sleep`."""
        self.llm_engine.sleep(level, mode)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """End a sleep, or a part of it; see `LLMEngine.wake_up`."""
        return self.llm_engine.wake_up(tags)

    def start_profile(self) -> None:
        """Start to record spans of steps and kernels; needs `profiler_dir`.

        Raises:
            ProfilerError: `profiler_dir` is not set, or a profile is already being recorded.
        """
        self.llm_engine.start_profile()

    def stop_profile(self) -> Path:
        """End the profile and return the path of the Chrome trace.

        Raises:
            ProfilerError: no profile is being recorded, or the file cannot be written.
        """
        return Path(self.llm_engine.stop_profile())

    def shutdown(self) -> None:
        """End the workers and free their memory. A second call is harmless."""
        self.llm_engine.shutdown()

    def _params_for(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"There are {len(prompts)} prompts and {len(params)} sampling parameters; give "
                "one for all or one for each."
            )
        return list(params)

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        output_kind: RequestOutputKind,
        add_special_tokens: bool,
        adapter: AdapterRef | None,
    ) -> str:
        request, text = self._process(
            prompt, params, add_special_tokens=add_special_tokens, adapter=adapter
        )
        params = msgspec.structs.replace(params, output_kind=output_kind)
        return self.llm_engine.start(request, params, text)

    def _process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        add_special_tokens: bool,
        adapter: AdapterRef | None,
    ) -> tuple[EngineCoreRequest, str | None]:
        return self.llm_engine.process(
            prompt, params, add_special_tokens=add_special_tokens, adapter=adapter
        )

    def _step(self) -> list[str]:
        """Run a step; return the ids of the requests with new outputs."""
        return self.llm_engine.advance()

    def _render_chats(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        mm_processor_kwargs: Mapping[str, Any] | None,
        **options: Any,
    ) -> list[str | dict[str, Any]]:
        """Return the prompts of one conversation or of several."""
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise RequestError(
                f"messages is a {type(messages).__name__}; give a list of messages, "
                '[{"role": "user", "content": "..."}], or a list of such lists.',
                "messages",
            )
        conversations: list[Any] = (
            [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        )
        return [
            self._render_prompt(conversation, mm_processor_kwargs, **options)
            for conversation in conversations
        ]

    def _render_prompt(
        self,
        messages: Sequence[Message],
        mm_processor_kwargs: Mapping[str, Any] | None,
        **options: Any,
    ) -> str | dict[str, Any]:
        """Return the prompt of a conversation, with its media."""
        pieces, items = self._render(messages, **options)
        media = self.llm_engine.chat_media
        check_processor_kwargs(media, mm_processor_kwargs)
        if media is None or (not items and len(pieces) == 1):
            return "".join(pieces)
        return media.read_prompt_now(pieces, items, mm_processor_kwargs)

    def _render(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template_kwargs: dict[str, Any] | None,
    ) -> tuple[list[str], list[MediaItem]]:
        """Return the pieces of a conversation's prompt that are tokenised alone, and its media."""
        from octavo.text.chat_template import ChatTemplate  # imports Jinja, which few calls need

        template = ChatTemplate.from_tokenizer(
            self.get_tokenizer(), chat_template or self._chat_template
        )
        media = self.llm_engine.chat_media
        kinds = {} if media is None else media.kinds
        # The template refuses anything else.
        are_messages = isinstance(messages, Sequence) and not isinstance(messages, str)
        chat = read_media(messages if are_messages else [], kinds)
        rendered = template.render(
            chat.messages if are_messages else messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=chat.protect(tools),
            template_kwargs=chat.protect(chat_template_kwargs),
            placeholders={name: kind.placeholder for name, kind in kinds.items()},
        )
        return chat.split(rendered), chat.items

    def _message_reader(
        self, chat_template: str | None, tools: Sequence[Mapping[str, Any]] | None
    ) -> MessageReader:
        """Return the reader of the answers to chats with a template."""
        from octavo.text.chat_template import ChatTemplate  # imports Jinja

        name, tokenizer = chat_template or self._chat_template, self.get_tokenizer()
        if name not in self._formats:
            template = ChatTemplate.from_tokenizer(tokenizer, name)
            if len(self._formats) >= _MAX_FORMATS:
                self._formats.clear()
            self._formats[name] = find_format(template.render, template.sources)
        return MessageReader(self._formats[name], tokenizer, tools)

    def _starts(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        add_special_tokens: bool,
        priority: Sequence[int] | None,
        tokenization_kwargs: Mapping[str, Any] | None,
        lora_request: LoRARequests,
    ) -> list[Callable[[], str]]:
        """Return a call for each request of a batch that starts it."""
        params = self._params_for(prompts, sampling_params)
        adapters = self.llm_engine.adapters.resolve_each(lora_request, len(prompts))
        if priority is not None:
            if len(priority) != len(prompts):
                raise ValueError(
                    f"There are {len(prompts)} prompts and {len(priority)} priorities; give one "
                    "for each."
                )
            params = [
                msgspec.structs.replace(its_params, priority=its_priority)
                for its_params, its_priority in zip(params, priority, strict=True)
            ]
        starts: list[Callable[[], str]] = []
        for prompt, its_params, adapter in zip(prompts, params, adapters, strict=True):
            its_params, special = apply_tokenization(
                its_params, tokenization_kwargs, add_special_tokens
            )
            kind = RequestOutputKind.FINAL_ONLY
            starts.append(partial(self._add, prompt, its_params, kind, special, adapter))
        return starts

    def _enqueue(self, starts: Sequence[Callable[[], str]]) -> list[str]:
        request_ids: list[str] = []
        with late_interrupts() as interrupts:
            try:
                for start in starts:
                    interrupts.raise_now()
                    request_ids.append(start())
            except BaseException:
                self.llm_engine.end(request_ids)
                raise
            self._enqueued += request_ids
        return request_ids

    def _run(self, starts: Sequence[Callable[[], str]], *, use_tqdm: Bar) -> list[RequestOutput]:
        """Start requests, each by a call that returns its id, and wait for all of them."""
        request_ids: list[str] = []
        with late_interrupts() as interrupts:
            try:
                for start in starts:
                    interrupts.raise_now()
                    request_ids.append(start())
                return self._wait(request_ids, use_tqdm, interrupts.raise_now)
            finally:
                self.llm_engine.end(request_ids)

    def _wait(
        self, request_ids: Sequence[str], use_tqdm: Bar, between: Callable[[], None]
    ) -> list[RequestOutput]:
        """Run steps until requests have finished; call `between` after each step."""
        waiting = {request_id for request_id in request_ids if not self._inboxes[request_id]}
        bar = _make_bar(use_tqdm, len(request_ids))
        num_done = 0
        try:
            while waiting:
                waiting.difference_update(self._step())
                if bar is not None:
                    bar.update(len(request_ids) - len(waiting) - num_done)
                    num_done = len(request_ids) - len(waiting)
                between()
        finally:
            if bar is not None:
                bar.close()
        results: list[RequestOutput] = []
        for request_id in request_ids:
            (output,) = self._inboxes[request_id]
            if isinstance(output, OctavoError):
                output = failed_output(request_id, output)
            results.append(output)
        return results


def _make_bar(kind: Bar, total: int) -> Any:
    """Return the progress bar that `use_tqdm` asks for; None: none."""
    if not kind:
        return None
    if callable(kind):
        return kind(total=total, desc="Processed prompts")
    from tqdm import tqdm  # slow to import, and many programs show no bar

    return tqdm(total=total, desc="Processed prompts")


def _text_of(prompt: str | dict[str, Any]) -> str:
    """Return the text of a rendered chat."""
    return prompt if isinstance(prompt, str) else prompt["prompt"]
