"""Vectors and scores of the asyncio front end: the methods of `AsyncLLM` for pooling models."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from pathlib import Path

import msgspec

from octavo.errors import RequestError
from octavo.frontend.adapters import AdapterFiles
from octavo.frontend.input_processor import InputProcessor
from octavo.frontend.pooling import pooling_output, windows_output
from octavo.frontend.prompts import Prompt, processing_time
from octavo.frontend.request_memory import RequestMemory, pooling_nbytes
from octavo.frontend.time_line import Stages
from octavo.lora_request import LoRARequest
from octavo.messages import AdapterRef, EngineCoreRequest, RequestOptions
from octavo.models.blocks.pooler import PoolerSpec
from octavo.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from octavo.pooling_params import PoolingParams
from octavo.sampling_params import SamplingParams
from octavo.system.offload import offload


class AsyncPooling(ABC):
    """Methods of `AsyncLLM` that return vectors or scores instead of answers."""

    request_memory: RequestMemory
    _input_processor: InputProcessor
    _adapters: AdapterFiles

    @abstractmethod
    def _begin(self) -> None:
        """Begin a call: raise the error that ended the engine, and attach it to the event loop."""

    @abstractmethod
    def _envelope(
        self,
        *,
        deadline: float | None = None,
        tenant: str | None = None,
        flow: int | None = None,
        turn: int = 0,
        trace_headers: Mapping[str, str] | None = None,
    ) -> RequestOptions:
        """Return the envelope of a new call; the arguments are those of `generate`."""

    @abstractmethod
    def _stream(
        self,
        request: EngineCoreRequest,
        params: SamplingParams,
        text: str | None = None,
        stages: Stages | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream the outputs of a processed request; closing the stream aborts it."""

    @abstractmethod
    async def resolve_adapter(
        self, lora_request: LoRARequest | None, root: Path | None = None
    ) -> AdapterRef | None:
        """Return the adapter of a request; see `AdapterFiles.resolve`."""

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams,
        request_id: str,
        *,
        deadline: float | None = None,
        tenant: str | None = None,
        flow: int | None = None,
        add_special_tokens: bool = True,
        turn: int = 0,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Yield the result of a text: a vector or scores; closing the stream aborts the request.

        Args and Raises: as for `generate`, with the parameters of the result in `pooling_params`.
        """
        options = msgspec.structs.replace(
            self._envelope(
                deadline=deadline,
                tenant=tenant,
                flow=flow,
                turn=turn,
                trace_headers=trace_headers,
            ),
            priority=priority,
            adapter=await self.resolve_adapter(lora_request),
        )
        yield await self.serve_pooling(
            prompt, pooling_params, request_id, options, add_special_tokens=add_special_tokens
        )

    async def serve_pooling(
        self,
        prompt: Prompt,
        params: PoolingParams,
        request_id: str,
        options: RequestOptions,
        *,
        add_special_tokens: bool = True,
        stages: Stages | None = None,
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Return the result of a text with an envelope; see `encode`. Cancelling it ends it.

        `stages` gets the stages of the request before the engine.
        """
        if self._adapters.has_tasks:
            adapter = await asyncio.to_thread(self._adapters.resolve_task, params, options.adapter)
            options = msgspec.structs.replace(options, adapter=adapter)
        if params.windows:
            return await self._serve_windows(
                prompt, params, request_id, options, add_special_tokens, stages
            )
        output, pooler = await self._pool(
            prompt, params, request_id, options, add_special_tokens, stages
        )
        return pooling_output(output, pooler, params)

    async def _serve_windows(
        self,
        prompt: Prompt,
        params: PoolingParams,
        request_id: str,
        options: RequestOptions,
        add_special_tokens: bool,
        stages: Stages | None,
    ) -> PoolingRequestOutput[PoolingOutput]:
        """Return the result of a text that is computed in parts, one after the other."""
        parts = await offload(
            processing_time(prompt, params.as_sampling_params()),
            self._input_processor.pooling.windows,
            prompt,
            params,
            add_special_tokens=add_special_tokens,
        )
        whole = msgspec.structs.replace(params, windows=False)
        found = []
        for part, _ in parts:
            output = await self._pool(part, whole, request_id, options, add_special_tokens, stages)
            found.append(output)
            stages = None
        outputs, weights = [output for output, _ in found], [weight for _, weight in parts]
        return windows_output(outputs, weights, found[0][1], params)

    async def _pool(
        self,
        prompt: Prompt,
        params: PoolingParams,
        request_id: str,
        options: RequestOptions,
        add_special_tokens: bool,
        stages: Stages | None = None,
    ) -> tuple[RequestOutput, PoolerSpec]:
        """Return the output of a request for a vector or scores, and its pooler."""
        self._begin()
        passed = params.as_sampling_params()
        request, pooler = await offload(
            processing_time(prompt, passed),
            self._input_processor.pooling.process,
            request_id,
            prompt,
            params,
            options,
            add_special_tokens=add_special_tokens,
        )
        if stages is not None:
            stages.end("tokenize")
        nbytes = pooling_nbytes(request, pooler)
        with self.request_memory.reserve(nbytes, options.tenant, background=options.background):
            async with aclosing(self._stream(request, passed, None, stages)) as outputs:
                async for output in outputs:
                    if output.pooled is not None:
                        return output, pooler
        raise RequestError("The request was aborted before it had a result; send it again.")
