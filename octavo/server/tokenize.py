"""POST /tokenize and /detokenize, as in vLLM."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.sampling_params import SamplingParams
from octavo.server import answers
from octavo.server.body import read_model
from octavo.server.call import unanswered_options
from octavo.server.chat import (
    collect_media,
    read_chat_media,
    read_media_settings,
    render_messages,
)
from octavo.server.middleware import context_of
from octavo.server.schema import DetokenizeBody, TokenizeBody
from octavo.server.state import state_of
from octavo.system.offload import offload
from octavo.text.tokenizer import MAX_TOKENS, Tokenizer


async def tokenize(request: Request) -> Response:
    """Return the token ids of a text or of a rendered chat, with those of its media."""
    state = state_of(request)
    body = await read_model(request, TokenizeBody, state.max_chat_bytes)
    body.check()
    await state.find_model(request, body.model)
    engine = await state.get_engine()
    tokenizer = state.tokenizer(engine, "prompt" if body.messages is None else "messages")
    special = body.add_special_tokens
    if body.messages is None:
        text = body.prompt or ""
        special = True if special is None else special
    else:
        media = engine.chat_media
        settings = read_media_settings(media, body.mm_processor_kwargs, body.media_io_kwargs)
        rendered = await render_messages(
            await state.chat_template(tokenizer),
            body.messages,
            body.add_generation_prompt,
            body.continue_final_message,
            state.template_kwargs(body.chat_template_kwargs),
            body.tools,
            body.documents,
            None if media is None else media.kinds,
        )
        text = rendered.text
        special = bool(special)  # the template writes them itself
        if rendered.items or len(rendered.pieces) > 1:
            context = context_of(request)
            options = unanswered_options(state, context, body.cache_salt)

            async def read() -> list[int]:
                with (
                    state.admit(1, "messages", options.tenant),
                    collect_media(engine, options) as add,
                ):
                    prompt = await read_chat_media(engine, rendered, settings, options, add)
                    params = SamplingParams()
                    found, _ = await engine.process(prompt, params, "tokenize", options, special)
                    return found.prompt_token_ids

            try:
                deadline = state.deadline(context.arrival, context.deadline_ms)
                ids = await state.run(request.receive, read(), deadline)
            except RequestError as error:
                if error.param in ("prompt", "multi_modal_data"):
                    error.param = "messages"
                raise
            return Response(
                await offload(len(ids), _written, tokenizer, ids, engine.max_model_len, body),
                media_type="application/json",
            )
    return Response(
        await offload(len(text), _tokenized, tokenizer, text, special, engine.max_model_len, body),
        media_type="application/json",
    )


async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    state = state_of(request)
    body = await read_model(request, DetokenizeBody, state.config.max_request_bytes)
    await state.find_model(request, body.model)
    engine = await state.get_engine()
    tokenizer = state.tokenizer(engine, "tokens")
    # A model may have more rows than its tokenizer has tokens, or fewer.
    vocab_size = max(engine.spec.vocab_size, len(tokenizer))
    if max(body.tokens, default=0) >= vocab_size:
        raise RequestError(
            f"tokens holds the token id {max(body.tokens)}, which is out of vocabulary: this "
            f"model has {vocab_size} tokens.",
            "tokens",
        )
    text = await offload(len(body.tokens), tokenizer.decode, body.tokens, False)
    return answers.respond(answers.Text(prompt=text))


def _tokenized(
    tokenizer: Tokenizer, text: str, special: bool, max_model_len: int, body: TokenizeBody
) -> bytes:
    """Return the JSON of the answer."""
    ids = tokenizer.encode(text, special, max(max_model_len, MAX_TOKENS))
    return _written(tokenizer, ids, max_model_len, body)


def _written(tokenizer: Tokenizer, ids: list[int], max_model_len: int, body: TokenizeBody) -> bytes:
    return msgspec.json.encode(
        answers.Tokens(
            count=len(ids),
            max_model_len=max_model_len,
            tokens=ids,
            token_strs=tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None,
        )
    )
