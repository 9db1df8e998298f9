"""Descriptions of the fields of request bodies, for `/docs` and docs/api.md."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from octavo.sampling_params import SamplingParams
from octavo.server import schema, structured_outputs
from octavo.server.body import Body

FIELD_DOCS: Mapping[type[Body], Mapping[str, str]] = {
    schema.ServedBody: {
        "model": "Served model name; default: the first one.",
        "request_id": "Request id in printable ASCII; default: X-Request-Id, or generated.",
        "stream": "Stream the answer as server-sent events.",
        "stream_options": "Additional reports of a stream; needs stream.",
        "kv_transfer_params": "With --kv-transfer-config: the part of the prompt that another "
        "server has computed, or the request to compute the prompt for another server.",
    },
    schema.GenerationBody: {
        "n": "Number of answers, or of beams with use_beam_search. Default 1.",
        "temperature": "Divisor of the logits; 0: greedy. Default 1, or the model's default.",
        "max_tokens": "Maximum tokens of an answer; default: 16, in a chat all that fit.",
        "user": "End user; no effect.",
        "prompt_logprobs": "Number of candidates for each prompt token's logprobs; not with "
        "stream.",
        "logprob_token_ids": "Tokens, at most 128, to report instead of the most probable ones; "
        "needs logprobs.",
        "vllm_xargs": "Arguments for logits processors of plug-ins.",
        "add_special_tokens": "Add the tokenizer's special tokens to the prompt; default: true for "
        "a text, false for a chat, because its template adds them.",
        "return_tokens_as_token_ids": "Show tokens in logprobs as token_id:N.",
        "return_token_ids": "Return the token ids of the prompt and the answer.",
        "deadline_ms": "Milliseconds after which the request fails with 408; it fails at once with "
        "429 if they cannot suffice. Also as the header X-Deadline-Ms.",
        "max_ttft_ms": "Deadline of the first token, like deadline_ms. Also as the header "
        "X-Max-TTFT-Ms.",
        "use_beam_search": "Find the most probable answers instead of sampling.",
        "length_penalty": "Beam search: above 1 favours long answers. Default 1.",
        "early_stopping": "Beam search: stop at n finished beams; never: if none can improve.",
    },
    schema.CompletionBody: {
        "prompt": "Text or token ids, or a list of either. Required without prompt_embeds.",
        "prompt_embeds": "Embeddings instead of tokens, with --enable-prompt-embeds: a tensor "
        "[tokens, hidden size] saved with torch.save, in base64, or a list of tensors. Their "
        "answers precede those of prompt.",
        "echo": "Repeat the prompt before each answer.",
        "logprobs": "Return the logprobs of each token and of this number of most probable ones.",
        "best_of": "Number of answers to generate, of which the n best are returned; not with "
        "stream.",
    },
    schema.ChatBody: {"messages": "Messages of the chat."},
    schema.BatchChatBody: {"messages": "Chats, each a list of messages."},
    schema.ChatFields: {
        "echo": "Repeat the last message before the answer.",
        "max_completion_tokens": "Maximum tokens of an answer; newer name for max_tokens.",
        "logprobs": "Return the logprobs of each token.",
        "top_logprobs": "Number of most probable tokens with logprobs; needs logprobs.",
        "add_generation_prompt": "Let the template begin the assistant's turn. Default true.",
        "continue_final_message": "Continue the last message instead of answering it.",
        "chat_template_kwargs": "Variables for the chat template.",
        "reasoning_effort": "Variable for the chat template; it also sets enable_thinking if "
        "chat_template_kwargs does not.",
        "documents": "Texts for retrieval, for templates that use them: objects of strings, such "
        "as title and text.",
        "tools": "Definitions of tools for templates that use them; needs tool_choice none.",
        "tool_choice": "Must be none, so that the answer calls no tool. Required with tools.",
    },
    schema.Tool: {"type": "function.", "function": "Function of the tool."},
    schema.FunctionDefinition: {
        "name": "Name of the function.",
        "description": "Purpose of the function.",
        "parameters": "JSON schema of the arguments.",
        "strict": "Variable for the template; no other effect.",
    },
    schema.ToolCall: {
        "id": "Id of the call, repeated in the tool's message.",
        "type": "function.",
        "function": "Called function.",
    },
    schema.FunctionCall: {
        "name": "Name of the function.",
        "arguments": "Arguments, as an object or as JSON text.",
    },
    schema.Message: {
        "role": "Role of the speaker: system, user, assistant, tool ...",
        "content": "Text, or a list of text parts.",
        "name": "Name of the speaker, for templates that show it.",
        "tool_calls": "Calls of tools in an earlier answer of the assistant.",
        "tool_call_id": "Id of the call that a tool's message answers.",
    },
    schema.ContentPart: {"type": "text.", "text": "Text of the part."},
    schema.StreamOptions: {
        "include_usage": "End the stream with a chunk of token counts.",
        "continuous_usage_stats": "Report token counts in every chunk.",
    },
    structured_outputs.StructuredOutputsBody: {
        "response_format": "Required form of the answer; OpenAI.",
        "structured_outputs": "Required form of the answer; vLLM.",
        "guided_json": "JSON schema; older vLLM.",
        "guided_regex": "Regular expression; older vLLM.",
        "guided_choice": "Allowed answers; older vLLM.",
        "guided_grammar": "Grammar in EBNF or Lark's notation; older vLLM.",
        "guided_decoding_backend": "auto, xgrammar or llguidance; default: the server's.",
        "json_schema": "JSON schema; llama.cpp and SGLang.",
        "regex": "Regular expression; SGLang.",
        "grammar": "Grammar; llama.cpp.",
        "ebnf": "Grammar; SGLang.",
        "structural_tag": "Tags with content that follows schemas; SGLang.",
    },
    structured_outputs.ResponseFormat: {
        "type": "Kind of the form; text: no constraint.",
        "json_schema": "JSON schema with a name, for type json_schema.",
        "schema": "JSON schema for type json_object; llama.cpp.",
        "format": "Description in xgrammar's notation, for type structural_tag.",
        "structures": "Begin, schema and end of each tag, for the older form of structural_tag.",
        "triggers": "Texts with which tags begin, for the older form of structural_tag.",
    },
    structured_outputs.JsonSchema: {
        "name": "Name of the schema; no effect.",
        "description": "Purpose of the schema; no effect.",
        "strict": "Reject a format that cannot be enforced instead of ignoring it.",
        "schema": "JSON schema.",
    },
    structured_outputs.StructuredOutputs: {
        "json": "JSON schema.",
        "regex": "Regular expression that the whole answer matches.",
        "choice": "Allowed answers.",
        "grammar": "Grammar in EBNF or Lark's notation.",
        "json_object": "Allow any JSON object.",
        "structural_tag": "Tags with content that follows schemas, in xgrammar's notation.",
        "disable_any_whitespace": "Write JSON without white space between its parts.",
        "backend": "auto, xgrammar or llguidance; default: the server's.",
    },
    schema.GenerateBody: {
        "token_ids": "Token ids of the prompt.",
        "sampling_params": "Fields of SamplingParams, such as max_tokens and temperature.",
        "output_mode": "tokens (default), or text: also return the text of the answer.",
        "return_token_ids": "Also return the token ids of the prompt.",
    },
    schema.TokenizeBody: {
        "model": "Served model name; default: the first one.",
        "prompt": "Text to tokenize; give this or messages.",
        "messages": "Chat to render with the template and tokenize.",
        "add_special_tokens": "Add special tokens; default: true for a prompt.",
        "add_generation_prompt": "Let the template begin the assistant's turn. Default true.",
        "continue_final_message": "Leave the last message open, so that it can be continued.",
        "chat_template_kwargs": "Variables for the chat template.",
        "documents": "Texts for retrieval, for templates that use them: objects of strings, such "
        "as title and text.",
        "tools": "Definitions of tools for templates that use them.",
        "return_token_strs": "Also return the text of each token.",
    },
    schema.ScaleBody: {
        "new_data_parallel_size": "New number of engines.",
        "drain_timeout": "No effect; requests continue on other engines instead of being drained.",
    },
    schema.DetokenizeBody: {
        "model": "Served model name; default: the first one.",
        "tokens": "Token ids to detokenize.",
    },
}


@lru_cache
def attribute_docs(kind: type) -> dict[str, str]:
    """Return the docstrings of a class's attributes by name."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for attribute, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(attribute, ast.AnnAssign) and isinstance(below, ast.Expr):
            docs[ast.unparse(attribute.target)] = ast.literal_eval(below.value)
    return docs


def field_doc(body: type[Body], name: str) -> str:
    """Return the description of a field.

    Without a line in `FIELD_DOCS` it is the docstring of the field of `SamplingParams`.

    Args:
        body: class of the body.
        name: name of the field in requests.

    Raises:
        KeyError: neither describes the field.
    """
    for base in body.__mro__:
        docs = FIELD_DOCS.get(base, {})
        if name in docs:
            return docs[name]
    if name not in SamplingParams.__struct_fields__:
        raise KeyError(f"{body.__name__}.{name} has no line in octavo/server/field_docs.py.")
    meaning = " ".join(attribute_docs(SamplingParams)[name].split())
    match getattr(SamplingParams(), name):
        case None | False | []:
            return meaning
        case True:
            return f"{meaning} Default true."
        case float() as number:
            return f"{meaning} Default {number:g}."
        case default:
            return f"{meaning} Default {default}."


def describe(body: type[Body], properties: dict[str, Any]) -> None:
    """Write the descriptions into the `properties` of a body's JSON schema."""
    for name, described in properties.items():
        described["description"] = field_doc(body, name)
