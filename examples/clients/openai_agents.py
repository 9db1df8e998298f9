"""Agent of OpenAI's Agents SDK (`pip install openai-agents`) with a running server."""

import asyncio
import os

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers"""
    return a * b


@function_tool
def get_weather(city: str) -> str:
    """Get the weather in a city"""
    return f"sunny in {city}, 19 degrees"


async def main() -> None:
    url = os.environ.get("OCTAVO_URL", "http://localhost:8000/v1")
    client = AsyncOpenAI(base_url=url, api_key=os.environ.get("OCTAVO_API_KEY", "none"))
    set_tracing_disabled(True)  # traces would go to OpenAI
    model = (await client.models.list()).data[0].id
    agent = Agent(
        "Assistant",
        model=OpenAIChatCompletionsModel(model, client),
        model_settings=ModelSettings(temperature=0),
        tools=[multiply, get_weather],
    )
    result = await Runner.run(agent, "What is 12 * 7?")
    print(result.final_output)
    streamed = Runner.run_streamed(agent, "What is the weather in Oslo?")
    async for event in streamed.stream_events():
        if event.type == "run_item_stream_event":
            print(" ", event.name)
    print(streamed.final_output)


if __name__ == "__main__":
    asyncio.run(main())
