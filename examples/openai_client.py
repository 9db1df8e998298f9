"""Streamed chat answer from a running server (`octavo serve`), with OpenAI's client."""

import os

from openai import OpenAI

if __name__ == "__main__":
    url = os.environ.get("OCTAVO_URL", "http://localhost:8000/v1")
    client = OpenAI(base_url=url, api_key=os.environ.get("OCTAVO_API_KEY", "none"))
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me a story about a dog."}],
        max_tokens=100,
        temperature=0.7,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()
