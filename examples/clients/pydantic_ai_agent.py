"""Agent of Pydantic AI (`pip install "pydantic-ai-slim[openai]"`) with a running server."""

import os

from openai import OpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class City(BaseModel):
    """Description of a city."""

    name: str
    sunny: bool


def main() -> None:
    url = os.environ.get("OCTAVO_URL", "http://localhost:8000/v1")
    key = os.environ.get("OCTAVO_API_KEY", "none")
    name = OpenAI(base_url=url, api_key=key).models.list().data[0].id
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=url, api_key=key))
    agent = Agent(model, model_settings={"temperature": 0})

    @agent.tool_plain
    def multiply(a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

    print(agent.run_sync("What is 12 * 7?").output)
    cities = Agent(model, output_type=NativeOutput(City))
    print(repr(cities.run_sync("Tell me about Oslo.").output))


if __name__ == "__main__":
    main()
