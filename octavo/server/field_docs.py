"""What each field of the request bodies means, for `/docs` and for docs/api.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.server import schema, structured_outputs
from octavo.server.body import Body

FIELD_DOCS: Mapping[type[Body], Mapping[str, str]] = {
    schema.ServedBody: {
        "model": "One of the served names; default: the first.",
        "request_id": "Id of the request, printable ASCII; default: X-Request-Id, or generated.",
        "stream": "Stream the answer as server-sent events.",
        "stream_options": "What a stream reports besides the answer; needs stream.",
        "cache_salt": "Only requests with the same salt share the prefix cache.",
        "priority": "With --scheduling-policy priority: lower goes first. Default 0.",
        "kv_transfer_params": "With --kv-transfer-config: what another server has computed of the "
        "prompt, or that another one will go on with it.",
    },
    schema.GenerationBody: {
        "n": "Number of answers; with beam search, the number of beams. Default 1.",
        "temperature": "Divides the logits; 0 is greedy. Default 1, or the model's own.",
        "top_p": "Keep the most probable tokens that add up to this; 1: all. Default 1.",
        "max_tokens": "Maximum tokens of an answer; default: 16, in a chat as many as fit.",
        "seed": "Random seed, which makes the answer repeatable; default: none.",
        "stop": "Texts that end the answer; they are not part of it.",
        "presence_penalty": "Above 0: repeat less; -2 to 2. Default 0.",
        "frequency_penalty": "Above 0: repeat less, the more often; -2 to 2. Default 0.",
        "logit_bias": "Token ids, and what is added to their logits, -100 to 100.",
        "user": "The end user; it has no effect.",
        "top_k": "Keep this many most probable tokens; 0 or -1: all. Default 0.",
        "min_p": "Drop tokens less probable than this share of the best one. Default 0.",
        "repetition_penalty": "Above 1: repeat less of the prompt and the answer. Default 1.",
        "stop_token_ids": "Tokens that end the answer.",
        "ignore_eos": "Continue after the end-of-sequence token.",
        "min_tokens": "Minimum tokens of an answer. Default 0.",
        "skip_special_tokens": "Leave special tokens out of the text. Default true.",
        "spaces_between_special_tokens": "Put spaces between special tokens in the text. "
        "Default true.",
        "include_stop_str_in_output": "Keep the stop text in the answer.",
        "truncate_prompt_tokens": "Keep this many tokens of the prompt; -1: as many as fit.",
        "truncation_side": "Which end truncate_prompt_tokens cuts off: left (default) or right.",
        "prompt_logprobs": "Logprobs of the prompt's tokens, with this many candidates each; "
        "not with stream.",
        "logprob_token_ids": "With logprobs: give the logprobs of these tokens, at most 128, in "
        "place of the most probable ones.",
        "allowed_token_ids": "The only tokens that may be generated.",
        "bad_words": "Texts that may not be generated.",
        "vllm_xargs": "Arguments for logits processors of plug-ins.",
        "add_special_tokens": "Let the tokenizer add its special tokens to the prompt; default: "
        "true for a text, false for a chat, whose template writes them.",
        "return_tokens_as_token_ids": "Show tokens in logprobs by their ids: token_id:N.",
        "return_token_ids": "Return the token ids of prompt and answer.",
        "deadline_ms": "Milliseconds after which the request fails with 408; with 429, at once, "
        "if they cannot be enough. Also as the header X-Deadline-Ms.",
        "max_ttft_ms": "The same for the first token. Also as the header X-Max-TTFT-Ms.",
        "use_beam_search": "Find the most probable answers instead of sampling.",
        "length_penalty": "Beam search: above 1 favours long answers. Default 1.",
        "early_stopping": "Beam search: stop at n finished beams; never: when none can improve.",
    },
    schema.CompletionBody: {
        "prompt": "Text or token ids, or a list of them. Required, but with prompt_embeds.",
        "prompt_embeds": "Embeddings instead of tokens, with --enable-prompt-embeds: a tensor "
        "[tokens, hidden size] saved with torch.save, in base64, or a list of them. Their answers "
        "come before those of prompt.",
        "echo": "Repeat the prompt before each answer.",
        "logprobs": "Return logprobs of each token and of this many most probable ones.",
        "best_of": "Generate this many answers and return the n best; not with stream.",
    },
    schema.ChatBody: {"messages": "The chat so far."},
    schema.BatchChatBody: {"messages": "The chats so far, each a list of messages."},
    schema.ChatFields: {
        "echo": "Repeat the last message before the answer.",
        "max_completion_tokens": "Maximum tokens of an answer: the newer name of max_tokens.",
        "logprobs": "Return logprobs of each token.",
        "top_logprobs": "Also return those of this many most probable ones; needs logprobs.",
        "add_generation_prompt": "Let the template begin the assistant's turn. Default true.",
        "continue_final_message": "Continue the last message instead of answering it.",
        "chat_template_kwargs": "Variables for the chat template.",
        "reasoning_effort": "A variable for the chat template; it also sets enable_thinking there, "
        "unless chat_template_kwargs does.",
        "documents": "Texts for retrieval, for templates that know them: objects of strings, such "
        "as title and text. Other templates leave them out.",
        "tools": "Definitions of tools, for templates that know them; with tool_choice none.",
        "tool_choice": "none: the answer calls no tool. Needed with tools; other values are "
        "refused.",
    },
    schema.Tool: {"type": "function.", "function": "The function."},
    schema.FunctionDefinition: {
        "name": "Its name.",
        "description": "What it does.",
        "parameters": "A JSON schema of its arguments.",
        "strict": "A variable for the template; it has no other effect.",
    },
    schema.ToolCall: {
        "id": "A name for the call, which the tool's message repeats.",
        "type": "function.",
        "function": "What was called.",
    },
    schema.FunctionCall: {
        "name": "The function's name.",
        "arguments": "Its arguments: an object, or the JSON of one.",
    },
    schema.Message: {
        "role": "Who speaks: system, user, assistant, tool ...",
        "content": "The text, or a list of text parts.",
        "name": "The speaker's name, for templates that show it.",
        "tool_calls": "The calls of tools in an assistant's earlier answer.",
        "tool_call_id": "Which of these calls a tool's message answers.",
    },
    schema.ContentPart: {"type": "text.", "text": "The text."},
    schema.StreamOptions: {
        "include_usage": "End the stream with a chunk of token counts.",
        "continuous_usage_stats": "Report token counts in every chunk.",
    },
    structured_outputs.StructuredOutputsBody: {
        "response_format": "OpenAI's: the form that the answer must have.",
        "structured_outputs": "vLLM's: the form that the answer must have.",
        "guided_json": "A JSON schema; older vLLM.",
        "guided_regex": "A regular expression; older vLLM.",
        "guided_choice": "The answer is one of these; older vLLM.",
        "guided_grammar": "A grammar in EBNF or Lark's notation; older vLLM.",
        "guided_decoding_backend": "auto, xgrammar or llguidance; default: the server's.",
        "json_schema": "A JSON schema; llama.cpp and SGLang.",
        "regex": "A regular expression; SGLang.",
        "grammar": "A grammar; llama.cpp.",
        "ebnf": "A grammar; SGLang.",
        "structural_tag": "Tags whose insides follow schemas; SGLang.",
    },
    structured_outputs.ResponseFormat: {
        "type": "What kind; text asks for nothing.",
        "json_schema": "With type json_schema.",
        "schema": "With type json_object, llama.cpp's: a JSON schema.",
        "format": "With type structural_tag: xgrammar's description.",
        "structures": "With type structural_tag, the older form: begin, schema and end of each.",
        "triggers": "With type structural_tag, the older form: what a tag begins with.",
    },
    structured_outputs.JsonSchema: {
        "name": "A name for the schema; it has no effect.",
        "description": "What it is for; it has no effect.",
        "strict": "Refuse a format that cannot be enforced, instead of leaving it out; the answer "
        "follows the rest of the schema either way.",
        "schema": "The JSON schema.",
    },
    structured_outputs.StructuredOutputs: {
        "json": "A JSON schema.",
        "regex": "A regular expression that the whole answer matches.",
        "choice": "The answer is one of these.",
        "grammar": "A grammar in EBNF or Lark's notation.",
        "json_object": "The answer is any JSON object.",
        "structural_tag": "Tags whose insides follow schemas, in xgrammar's notation.",
        "disable_any_whitespace": "JSON without white space between its parts.",
        "backend": "auto, xgrammar or llguidance; default: the server's.",
    },
    schema.GenerateBody: {
        "token_ids": "The prompt.",
        "sampling_params": "Fields of SamplingParams, such as max_tokens and temperature.",
        "output_mode": "tokens (default), or text: return the text of the answer, too.",
        "return_token_ids": "Return the token ids of the prompt, too.",
    },
    schema.TokenizeBody: {
        "model": "One of the served names; default: the first.",
        "prompt": "The text; give this or messages.",
        "messages": "A chat, rendered by the template.",
        "add_special_tokens": "Add special tokens; default: true for a prompt.",
        "add_generation_prompt": "Let the template begin the assistant's turn. Default true.",
        "continue_final_message": "Leave the last message open, to be continued.",
        "chat_template_kwargs": "Variables for the chat template.",
        "documents": "Texts for retrieval, for templates that know them: objects of strings, such "
        "as title and text. Other templates leave them out.",
        "tools": "Definitions of tools, for templates that know them.",
        "return_token_strs": "Return the text of each token, too.",
    },
    schema.ScaleBody: {
        "new_data_parallel_size": "How many engines there are to be.",
        "drain_timeout": "Accepted; nothing is drained, as requests go on at other engines.",
    },
    schema.DetokenizeBody: {
        "model": "One of the served names; default: the first.",
        "tokens": "Token ids.",
    },
}


def field_doc(body: type[Body], name: str) -> str:
    """What a field means, by the name that requests use.

    Raises:
        KeyError: nobody has said it.
    """
    for base in body.__mro__:
        docs = FIELD_DOCS.get(base, {})
        if name in docs:
            return docs[name]
    raise KeyError(f"{body.__name__}.{name} has no line in octavo/server/field_docs.py.")


def describe(body: type[Body], properties: dict[str, Any]) -> None:
    """Writes the meanings into the `properties` of a body's JSON schema."""
    for name, described in properties.items():
        described["description"] = field_doc(body, name)
