"""Find the chat templates that change earlier turns of a conversation, so that prefixes miss.

    python benchmarks/template_prefixes.py FOLDER_OR_FILES

For each template (*.jinja) the script renders a conversation as it grows: a question, an answer
with a thought and a call, its result, an answer with a thought, the next question. Each prompt must
begin with the prompt before it, and must contain the thoughts that the model wrote. It prints what
happens to the earlier turns when results arrive, and when the next question does:

    kept     the prompt begins with the last one, and has the thought (if the format has thoughts)
    answer   the last answer is not as the model wrote it, as without its thought: it is computed
             again
    earlier  the prompt before the last answer changes: all from there is computed again
    error    the template rejects the conversation

`date` marks templates that write the date, with which every prompt changes at midnight.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import OctavoError
from octavo.parsers.detect import find_format
from octavo.text.chat_template import ChatTemplate

_THOUGHTS = ("octavo-first-thought", "octavo-second-thought")
# Variables of templates that keep the thoughts of earlier turns.
_KEEP = {
    "preserve_thinking": True,
    "keep_past_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find_place",
            "description": "Find a place.",
            "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
        },
    }
]
_CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "find_place", "arguments": '{"town": "Oslo"}'},
}


def conversation(with_thoughts: bool, with_calls: bool) -> list[dict[str, Any]]:
    """Return the whole conversation."""
    called: dict[str, Any] = {"role": "assistant", "content": "octavo-first"}
    answered: dict[str, Any] = {"role": "assistant", "content": "octavo-second"}
    following = {"role": "user", "content": "octavo-more"}
    if with_calls:
        called |= {"content": "", "tool_calls": [_CALL]}
        following = {
            "role": "tool",
            "tool_call_id": "call00001",
            "name": "find_place",
            "content": "octavo-result",
        }
    if with_thoughts:
        for message, thought in zip((called, answered), _THOUGHTS, strict=True):
            message["reasoning"] = message["reasoning_content"] = thought
    question = {"role": "user", "content": "octavo-question"}
    return [question, called, following, answered, {"role": "user", "content": "octavo-next"}]


def compare(
    template: ChatTemplate,
    *,
    with_thoughts: bool,
    with_calls: bool,
    variables: Mapping[str, Any] | None = None,
) -> tuple[str, str]:
    """Return what happens to the earlier turns with a result, and with the next question."""
    messages = conversation(with_thoughts, with_calls)
    tools = _TOOLS if with_calls else None
    prompts: list[str] = []
    for end in (1, 3, 5):
        try:
            prompts.append(
                template.render(
                    messages[:end],
                    tools=tools,
                    template_kwargs={"enable_thinking": with_thoughts, **(variables or {})},
                    may_drop_tool_calls=False,
                )
            )
        except OctavoError:
            break
    found: list[str] = []
    for number, (before, after) in enumerate(itertools.pairwise(prompts)):
        if not after.startswith(before):
            # A prompt may open the thoughts, which the template drops with them.
            same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b))
            found.append("answer" if same >= len(before.rstrip()) - 32 else "earlier")
        elif with_thoughts and _THOUGHTS[number] not in after[len(before) :]:
            found.append("answer")
        else:
            found.append("kept")
    found += ["error"] * (2 - len(found))
    return found[0], found[1]


def examine(file: Path) -> list[str]:
    """Return the columns of a template in the table."""
    source = file.read_text("utf-8")
    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"})
    answer_format = find_format(template.render, source)
    thinks = answer_format is not None and answer_format.thoughts is not None
    with_calls = answer_format is not None and answer_format.calls is not None
    found = compare(template, with_thoughts=thinks, with_calls=with_calls)
    plain = compare(template, with_thoughts=False, with_calls=with_calls) if thinks else found
    kept_by = {name: value for name, value in _KEEP.items() if name in source}
    kept = "-"
    if kept_by:
        again = compare(template, with_thoughts=thinks, with_calls=with_calls, variables=kept_by)
        names = ", ".join(f"`{name}`: {str(value).lower()}" for name, value in kept_by.items())
        kept = f"{names}: {' '.join(again)}"
    date = " (date)" if "strftime_now" in source or "date_string" in source else ""
    return [f"`{file.stem}`{date}", *found, " ".join(plain), kept]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path)
    args = parser.parse_args()
    files = [f for p in args.paths for f in (sorted(p.glob("*.jinja")) if p.is_dir() else [p])]
    print("| template | result of a call | next question | both without thoughts | with |")
    print("| --- | --- | --- | --- | --- |")
    counts: Counter[str] = Counter()
    for file in files:
        columns = examine(file)
        for column, value in zip(("result", "next"), columns[1:3], strict=True):
            counts[f"{column} {value}"] += 1
        print(f"| {' | '.join(columns)} |")
    print(dict(sorted(counts.items())))


if __name__ == "__main__":
    main()
