"""LangChain's chat model (`pip install langchain-openai`) with a running server: tools, objects."""

import os

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers"""
    return a * b


class City(BaseModel):
    """Description of a city."""

    name: str
    sunny: bool


def main() -> None:
    url = os.environ.get("OCTAVO_URL", "http://localhost:8000/v1")
    key = os.environ.get("OCTAVO_API_KEY", "none")
    name = OpenAI(base_url=url, api_key=key).models.list().data[0].id
    model = ChatOpenAI(model=name, base_url=url, api_key=key, temperature=0)
    with_tools = model.bind_tools([multiply])
    messages = [HumanMessage("What is 12 * 7?")]
    reply = with_tools.invoke(messages)
    messages += [reply, *(multiply.invoke(call) for call in reply.tool_calls)]
    for chunk in with_tools.stream(messages):
        print(chunk.content, end="")
    print()
    print(repr(model.with_structured_output(City).invoke("Tell me about Oslo.")))


if __name__ == "__main__":
    main()
