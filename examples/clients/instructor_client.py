"""Instructor (`pip install instructor`) with a running server: objects of a class as answers."""

import os

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """Description of a person."""

    name: str
    age: int


def main() -> None:
    url = os.environ.get("OCTAVO_URL", "http://localhost:8000/v1")
    server = OpenAI(base_url=url, api_key=os.environ.get("OCTAVO_API_KEY", "none"))
    model = server.models.list().data[0].id
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(server, mode=mode)
        person = client.chat.completions.create(
            model=model,
            response_model=Person,
            messages=[{"role": "user", "content": "Ben is 25 years old."}],
            temperature=0,
        )
        print(mode.value, repr(person))


if __name__ == "__main__":
    main()
