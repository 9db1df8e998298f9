"""LiteLLM (`pip install litellm`) with a running server: a call of a tool, and a stream."""

import json
import os

import litellm
from openai import OpenAI

MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def main() -> None:
    url = os.environ.get("OCTAVO_URL", "http://localhost:8000/v1")
    key = os.environ.get("OCTAVO_API_KEY", "none")
    name = OpenAI(base_url=url, api_key=key).models.list().data[0].id
    settings = {"model": f"openai/{name}", "api_base": url, "api_key": key, "temperature": 0}
    messages = [{"role": "user", "content": "What is 12 * 7?"}]
    reply = litellm.completion(messages=messages, tools=[MULTIPLY], **settings)
    message = reply.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        given = json.loads(call.function.arguments)
        result = str(given["a"] * given["b"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    stream = litellm.completion(messages=messages, tools=[MULTIPLY], stream=True, **settings)
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="")
    print()


if __name__ == "__main__":
    main()
