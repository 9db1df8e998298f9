"""Agent that calls Python functions, with OpenAI's client and a running server (`octavo serve`).

    python examples/agent.py "What is 12 * 7?" "What is the weather in Oslo?"

The built-in model knows these tools; larger models find out about any tool from its description.
"""

import json
import os
import sys

from openai import OpenAI

TOOLS = {
    "add": lambda a, b: a + b,
    "multiply": lambda a, b: a * b,
    "get_weather": lambda city: {"weather": "sunny", "degrees": len(city) + 15},
}


def describe(name: str, description: str, **types: str) -> dict[str, object]:
    """Return a function in the form of OpenAI's API."""
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


DESCRIPTIONS = [
    describe("add", "Add two numbers", a="integer", b="integer"),
    describe("multiply", "Multiply two numbers", a="integer", b="integer"),
    describe("get_weather", "Get the weather in a city", city="string"),
]


def answer(client: OpenAI, model: str, question: str) -> str:
    """Return the model's answer, after the calls that it asks for."""
    messages = [{"role": "user", "content": question}]
    for _ in range(5):
        reply = client.chat.completions.create(
            model=model, messages=messages, tools=DESCRIPTIONS, temperature=0, max_tokens=200
        )
        message = reply.choices[0].message
        if reply.choices[0].finish_reason == "length":
            return "The answer was longer than max_tokens."
        if not message.tool_calls:
            return message.content
        messages.append(message.model_dump(include={"role", "content", "tool_calls"}))
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = json.dumps(TOOLS[call.function.name](**arguments))
            print(f"  {call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "The model did not stop calling tools."


if __name__ == "__main__":
    url = os.environ.get("OCTAVO_URL", "http://localhost:8000/v1")
    client = OpenAI(base_url=url, api_key=os.environ.get("OCTAVO_API_KEY", "none"))
    model = client.models.list().data[0].id
    for question in sys.argv[1:] or ["What is 12 * 7?", "What is the weather in Oslo?"]:
        print(question)
        print(answer(client, model, question))
