"""Chat with a fake model; run as a program in the test's terminal."""

import itertools
import json
import sys
import time

from octavo.server.client import Usage
from octavo.terminal.session import Session


class FakeSource:
    model = "fake"
    usage = Usage(20, 4, 16)

    def __init__(self):
        self.defaults = {"temperature": 0.6, "max_tokens": None}

    def chat(self, messages, params):
        question = messages[-1]["content"]
        if question == "for ever":
            for number in itertools.count():
                yield f"w{number} "
                time.sleep(0.01)
        elif question == "words":
            for _ in range(30):
                yield "abc"
                yield "defg "
        elif question == "attack":
            yield "\x1b]0;title\x07\x1b[2J"
        else:
            yield "<" + json.dumps([messages, params], separators=(",", ":")) + ">"

    def complete(self, prompt, params):
        yield "<" + json.dumps([prompt, params], separators=(",", ":")) + ">"


if __name__ == "__main__":
    Session(FakeSource(), {}, None).run()
    print("left")
    sys.exit(0)
