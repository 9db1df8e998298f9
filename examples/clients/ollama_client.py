"""Ollama's client (`pip install ollama`) with a running server: OLLAMA_HOST is its address."""

import os

import ollama
from pydantic import BaseModel


class City(BaseModel):
    """Description of a city."""

    name: str
    sunny: bool


def multiply(a: int, b: int) -> int:
    """Multiply two numbers

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def main() -> None:
    url = os.environ.get("OCTAVO_URL", "http://localhost:8000/v1").removesuffix("/v1")
    key = os.environ.get("OCTAVO_API_KEY", "none")
    client = ollama.Client(url, headers={"Authorization": f"Bearer {key}"})
    model = client.list().models[0].model
    print(model, client.show(model).capabilities)
    messages = [{"role": "user", "content": "What is 12 * 7?"}]
    options = {"temperature": 0}
    reply = client.chat(model, messages, tools=[multiply], options=options)
    messages.append(reply.message)
    for call in reply.message.tool_calls or []:
        result = str(multiply(**call.function.arguments))
        messages.append({"role": "tool", "tool_name": call.function.name, "content": result})
    for part in client.chat(model, messages, tools=[multiply], options=options, stream=True):
        print(part.message.content, end="")
    print()
    schema = City.model_json_schema()
    answer = client.generate(model, "Tell me about Oslo.", format=schema, options=options)
    print(repr(City.model_validate_json(answer.response)))


if __name__ == "__main__":
    main()
