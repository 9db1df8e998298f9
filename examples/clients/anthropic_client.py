"""Anthropic's client (`pip install anthropic`) with a running server: a tool, a stream."""

import os

import anthropic

MULTIPLY = {
    "name": "multiply",
    "description": "Multiply two numbers",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


def main() -> None:
    url = os.environ.get("OCTAVO_URL", "http://localhost:8000/v1").removesuffix("/v1")
    key = os.environ.get("OCTAVO_API_KEY", "none")
    client = anthropic.Anthropic(base_url=url, api_key=key)
    model = client.models.list().data[0].id
    settings = {"model": model, "max_tokens": 200, "tools": [MULTIPLY]}
    settings["extra_body"] = {"temperature": 0}
    messages = [{"role": "user", "content": "What is 12 * 7?"}]
    print(client.messages.count_tokens(model=model, messages=messages).input_tokens, "tokens")
    reply = client.messages.create(messages=messages, **settings)
    results = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": str(block.input["a"] * block.input["b"]),
        }
        for block in reply.content
        if block.type == "tool_use"
    ]
    messages += [
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": results},
    ]
    with client.messages.stream(messages=messages, **settings) as stream:
        for text in stream.text_stream:
            print(text, end="")
    print()


if __name__ == "__main__":
    main()
