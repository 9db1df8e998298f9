"""Offline generation: vLLM's `LLM`."""

from __future__ import annotations

import itertools
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

import msgspec
from tqdm import tqdm

from octavo import clock
from octavo.config import BUILTIN_MODEL, EngineConfig
from octavo.engine.assemble import make_engine_core
from octavo.engine.beam_search import (
    Beam,
    beam_requests,
    candidates_of,
    make_beam_search,
    prompt_params,
    step_params,
)
from octavo.engine.core_client import InprocClient
from octavo.engine.input_processor import InputProcessor, Prompt
from octavo.engine.memory_plan import MemoryPlan
from octavo.engine.output_processor import OutputProcessor
from octavo.errors import EngineDeadError, OctavoError, RequestError, UnsupportedError
from octavo.logs import setup_default_logging
from octavo.messages import EngineCoreRequest, SchedulerStats
from octavo.models.hub import resolve_folders
from octavo.models.registry import read_spec
from octavo.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    RequestOutput,
)
from octavo.profiler import span
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from octavo.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

OFFLINE_BATCHED_TOKENS = 8192

Message = Mapping[str, Any]
T = TypeVar("T")


class LLM:
    """A model in this process, for offline use.

    Args:
        model: folder, hub id, or nothing for the built-in model.
        **kwargs: any setting of `octavo.config.EngineConfig`, by vLLM's name.

    Raises:
        ConfigError, ModelError, HubError: if settings, model folder or download are bad.

    Use it as a context manager, or call `shutdown`, to give its memory back at once.
    """

    def __init__(self, model: str = BUILTIN_MODEL, **kwargs: Any) -> None:
        setup_default_logging()
        self.config = EngineConfig.from_kwargs(model=model, **kwargs)
        settings = self.config.model
        path, tokenizer_path = resolve_folders(self.config)
        self._tokenizer: Tokenizer | None = None
        if not settings.skip_tokenizer_init:
            self._tokenizer = Tokenizer.from_folder(tokenizer_path)
        self._spec = read_spec(path, trust_remote_code=settings.trust_remote_code)
        core, self._plan = make_engine_core(
            self.config, self._spec, path, default_batched_tokens=OFFLINE_BATCHED_TOKENS
        )
        self._client = InprocClient(core)
        self._input_processor = InputProcessor(
            settings, self._spec, self._tokenizer, self._plan.max_model_len
        )
        self._output_processor = OutputProcessor(self._tokenizer)
        self._request_ids = itertools.count()
        self._inboxes: dict[str, list[RequestOutput | OctavoError]] = {}
        """What came for each live request and has not been taken yet."""
        self._running = True

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
        """What the engine holds, byte by byte."""
        return self._plan

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generates an answer to each prompt; the answers come in the order of the prompts.

        Args:
            prompts: one prompt or a list: texts, or dicts with "prompt" or "prompt_token_ids".
            sampling_params: one for all or one for each; None: the model's own defaults.
            use_tqdm: show a progress bar.

        A request that fails by itself, such as one whose grammar cannot be compiled, has an answer
        with `finish_reason` "error" and the reason as `stop_reason`.

        Raises:
            RequestError: if a prompt or parameter is bad; nothing has been generated then.
        """
        batch = _as_list(prompts)
        params = self._params_for(batch, sampling_params)
        return self._generate(batch, params, use_tqdm=use_tqdm, add_special_tokens=True)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Finds the most probable answers to each prompt; they come in the order of the prompts.

        Args:
            prompts: as for `generate`.
            params: for all of them.
            use_tqdm: show a progress bar for each step.

        Raises:
            RequestError: if a prompt or parameter is bad, or a request fails.
        """
        processed = [
            self._process(prompt, prompt_params(params), add_special_tokens=True)
            for prompt in _as_list(prompts)
        ]
        vocab_size = self._spec.vocab_size
        searches = [make_beam_search(params, request, vocab_size) for request, _ in processed]
        while live := [i for i, search in enumerate(searches) if search.live]:
            beams = [
                partial(self._start, beam, step_params(searches[i]), None)
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
        keep_eos = params.include_stop_str_in_output
        return [
            BeamSearchOutput(
                [self._sequence(request.prompt_token_ids, beam, keep_eos) for beam in search.beams]
            )
            for (request, _), search in zip(processed, searches, strict=True)
        ]

    def _sequence(self, prompt: list[int], beam: Beam, keep_eos: bool) -> BeamSearchSequence:
        ended = beam.finish_reason == "stop"
        tokens = prompt + (beam.token_ids[:-1] if ended and not keep_eos else beam.token_ids)
        return BeamSearchSequence(
            tokens,
            [row[0] for row in beam.rows],
            beam.cum_logprob,
            None if self._tokenizer is None else self._tokenizer.decode(tokens),
            beam.finish_reason,
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Generates the next turn of one conversation or of each of several.

        Raises:
            RequestError: if a conversation or parameter is bad.
        """
        conversations: list[Any] = (
            [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        )
        prompts: list[Prompt] = [
            self.render_chat(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        params = self._params_for(prompts, sampling_params)
        # The template writes the special tokens itself.
        return self._generate(prompts, params, use_tqdm=use_tqdm, add_special_tokens=False)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> Iterator[RequestOutput]:
        """Generates one answer piece by piece: each output holds what is new.

        Raises:
            RequestError: if the prompt or a parameter is bad, or the request fails.
        """
        params = self._params_for([prompt], sampling_params)[0]
        request_id: str | None = None
        finished = False
        try:
            with _late_interrupts():
                request_id = self._add(prompt, params, RequestOutputKind.DELTA, add_special_tokens)
                inbox = self._inboxes[request_id]
            while not finished:
                if not inbox:
                    with _late_interrupts():
                        self._step()
                    continue
                output = inbox.pop(0)
                if isinstance(output, OctavoError):
                    finished = True
                    raise output
                finished = output.finished
                yield output
        finally:
            with _late_interrupts():
                if request_id is not None:
                    self._end([request_id])

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; it holds its special tokens already.

        Args:
            messages: OpenAI's messages.
            chat_template: a template, or its file, instead of the model's own.
            add_generation_prompt: end with the beginning of the assistant's turn.
            chat_template_kwargs: further variables for the template.

        Raises:
            RequestError: if the messages are malformed or there is no chat template.
        """
        from octavo.chat_template import ChatTemplate  # brings Jinja, which most calls do without

        template = ChatTemplate.from_tokenizer(self.get_tokenizer(), chat_template)
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=chat_template_kwargs,
        )

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            UnsupportedError: if the engine was made with skip_tokenizer_init.
        """
        if self._tokenizer is None:
            raise UnsupportedError(
                "There is no tokenizer: the engine was made with skip_tokenizer_init=True."
            )
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults, from its generation_config.json."""
        return msgspec.convert(self._spec.generation_config, SamplingParams)

    def stats(self) -> SchedulerStats:
        """State and counters of the scheduler and the KV cache."""
        return msgspec.convert(_complete(self._client.call_utility("stats")), SchedulerStats)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes."""
        return bool(_complete(self._client.call_utility("reset_prefix_cache")))

    def start_profile(self) -> None:
        """Begins to record spans of steps and kernels; needs `profiler_dir`.

        Raises:
            ProfilerError: there is no `profiler_dir`, or a profile is being recorded already.
        """
        _complete(self._client.call_utility("start_profile"))

    def stop_profile(self) -> Path:
        """Ends the profile; returns the Chrome trace's file.

        Raises:
            ProfilerError: no profile is being recorded, or it cannot be written.
        """
        return Path(_complete(self._client.call_utility("stop_profile")))

    def shutdown(self) -> None:
        """Ends the workers and frees their memory. May be called twice."""
        self._running = False
        _complete(self._client.shutdown())

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
    ) -> str:
        request, text = self._process(prompt, params, add_special_tokens=add_special_tokens)
        params = msgspec.structs.replace(params, output_kind=output_kind)
        return self._start(request, params, text)

    def _process(
        self, prompt: Prompt, params: SamplingParams, *, add_special_tokens: bool
    ) -> tuple[EngineCoreRequest, str | None]:
        return self._input_processor.process(
            str(next(self._request_ids)),
            prompt,
            params,
            arrival_time=clock.now(),
            add_special_tokens=add_special_tokens,
        )

    def _start(self, request: EngineCoreRequest, params: SamplingParams, text: str | None) -> str:
        """Hands a request to the engine; returns its id."""
        if not self._running:
            raise EngineDeadError("This LLM was shut down; make a new one.")
        self._inboxes[request.request_id] = []
        self._output_processor.add_request(request, params, text)
        _complete(self._client.add_request(request))
        return request.request_id

    def _step(self) -> list[str]:
        """Runs a step; returns the ids of the requests that it brought something for."""
        outputs = _complete(self._client.get_output())
        with span("process_outputs"):
            processed = self._output_processor.process_outputs(outputs.outputs, outputs.timestamp)
        _complete(self._client.abort_requests(processed.reqs_to_abort))
        for output in processed.request_outputs:
            self._inboxes[output.request_id].append(output)
        for request_id, error in processed.errors.items():
            self._inboxes[request_id].append(error)
        return [*(o.request_id for o in processed.request_outputs), *processed.errors]

    def _end(self, request_ids: Sequence[str]) -> None:
        """Forgets requests; those that still run are aborted."""
        _complete(self._client.abort_requests(self._output_processor.abort_requests(request_ids)))
        for request_id in request_ids:
            del self._inboxes[request_id]

    def _generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        *,
        use_tqdm: bool,
        add_special_tokens: bool,
    ) -> list[RequestOutput]:
        kind = RequestOutputKind.FINAL_ONLY
        starts = [
            partial(self._add, prompt, its_params, kind, add_special_tokens)
            for prompt, its_params in zip(prompts, params, strict=True)
        ]
        return self._run(starts, use_tqdm=use_tqdm)

    def _run(self, starts: Sequence[Callable[[], str]], *, use_tqdm: bool) -> list[RequestOutput]:
        """Starts requests, each by a call that returns its id, and waits for all of them."""
        request_ids: list[str] = []
        results: list[RequestOutput] = []
        with _late_interrupts() as interrupts:
            try:
                for start in starts:
                    interrupts.raise_now()
                    request_ids.append(start())
                waiting = set(request_ids)
                with tqdm(total=len(starts), desc="Processed prompts", disable=not use_tqdm) as bar:
                    while waiting:
                        waiting.difference_update(self._step())
                        bar.update(len(starts) - len(waiting) - bar.n)
                        interrupts.raise_now()
                for request_id in request_ids:
                    (output,) = self._inboxes[request_id]
                    if isinstance(output, OctavoError):
                        output = _failed(request_id, output)
                    results.append(output)
            finally:
                self._end(request_ids)
        return results


def _complete(call: Coroutine[None, None, T]) -> T:
    """The result of an `InprocClient`'s call, which never waits for anything."""
    try:
        call.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a call in process waits")


class _Interrupts:
    """Ctrl-C that has not been raised yet."""

    def __init__(self, handler: Callable[[int, FrameType | None], object]) -> None:
        self._handler = handler
        self._last: tuple[int, FrameType | None] | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        """The handler meanwhile. The second Ctrl-C is raised at once: somebody is in a hurry."""
        if self._last is not None:
            self._handler(number, frame)
        self._last = number, frame

    def raise_now(self) -> None:
        """Raises what has been noted."""
        last, self._last = self._last, None
        if last is not None:
            self._handler(*last)


@contextmanager
def _late_interrupts() -> Iterator[_Interrupts]:
    """Ctrl-C comes at the block's end, or where the block wants it.

    Anywhere else it would leave the engine's books half written.
    """
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or threading.current_thread() is not threading.main_thread():
        yield _Interrupts(lambda *_: None)
        return
    interrupts = _Interrupts(before)
    signal.signal(signal.SIGINT, interrupts.note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
        interrupts.raise_now()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a string, a dict and a list of token ids are one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; give a text, a list of token ids, a dict, or "
            "a list of these.",
            "prompts",
        )
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]  # a list of ids: mypy cannot narrow it
    return list(prompts)  # type: ignore[arg-type]  # nor that these are prompts now


def _failed(request_id: str, error: OctavoError) -> RequestOutput:
    """The output of a request that failed by itself: the others of the batch are not lost."""
    logger.warning("request %s failed: %s", request_id, error)
    answer = CompletionOutput(0, "", [], finish_reason="error", stop_reason=str(error))
    return RequestOutput(request_id, None, [], None, [answer], finished=True)
