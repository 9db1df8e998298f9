"""Chat templates of Mistral's tekken.json files, which have none: by the tokenizer's version.

They write what mistral-common writes (`tokens/tokenizers/instruct.py`): a system prompt in the last
user's turn (v3) or between tokens of its own (v7 and later), the definitions of tools before the
last user's turn, or the first (v13), and calls and results of tools in the form of the version.
From v15 on, settings of the model follow the tools.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

_VERSIONS = {"v3": 3, "v7": 7, "v11": 11, "v13": 13, "v15": 15}
_SETTINGS = ("[MODEL_SETTINGS]", "[/MODEL_SETTINGS]")
_MEDIA = {"[IMG]": ("image", "[IMG]"), "[BEGIN_AUDIO]": ("audio", "[BEGIN_AUDIO][AUDIO]")}
"""Special tokens of tokenizers for media -> the type of a part, and what stands for it."""
_TEXT = (
    "{%- if @text@ %}{%- if ns.after_text and (ns.begins or not @joins@) %}{{- '\\n\\n' }}"
    "{%- endif %}{%- set ns.after_text = true %}{%- set ns.begins = false %}{{- @text@ }}"
    "{%- endif %}"
)
"""A text; one after another text begins a paragraph, from v15 on only after another message."""
_OLD_CALLS = (
    "{{- '[TOOL_CALLS][' }}{%- for call in message.tool_calls %}"
    "{{- '{\"name\": ' ~ call.function.name | tojson ~ ', \"arguments\": ' ~ "
    "written(call.function.arguments) }}"
    "{%- if call.id %}{{- ', \"id\": ' ~ call.id | tojson }}{%- endif %}{{- '}' }}"
    "{%- if not loop.last %}{{- ', ' }}{%- endif %}{%- endfor %}{{- ']' }}"
)
_CALLS = (
    "{%- for call in message.tool_calls %}{{- '[TOOL_CALLS]' ~ call.function.name @identity@"
    "~ '[ARGS]' ~ written(call.function.arguments) }}{%- endfor %}"
)
_OLD_RESULT = (
    "{%- set result = plain(message.content) | from_json %}"
    "{{- {'content': result, 'call_id': message.tool_call_id} | tojson }}"
)
_RESULT = "{{- message.tool_call_id ~ '[TOOL_CONTENT]' ~ plain(message.content) }}"
_EFFORT = (
    "{%- set effort = reasoning_effort | default(@default@, true) %}"
    "{%- if effort is not none %}{%- if effort not in @values@ %}"
    "{{- raise_exception('The model has no reasoning_effort ' ~ effort ~ '; it has ' "
    "~ @values@ | join(', ') ~ '.') }}{%- endif %}"
    "{{- '[MODEL_SETTINGS]{\"reasoning_effort\": \"' ~ effort ~ '\"}[/MODEL_SETTINGS]' }}"
    "{%- endif %}"
)
"""Settings of the model."""
_TEMPLATE = """
{%- set ns = namespace(system=[], turns=[], tools_at=-1, last=-1, after_text=false, begins=true) %}
{%- macro plain(content) %}
{%- if content is string %}{{- content }}
{%- else %}{{- content | map(attribute='text') | join('\\n\\n') }}{%- endif %}
{%- endmacro %}
{%- macro written(arguments) %}
{{- arguments if arguments is string else arguments | tojson }}
{%- endmacro %}
{%- macro write(content, alone) %}
{%- set ns.begins = true %}
{%- if content is string %}@text_of_content@
{%- elif content %}
{%- if alone and content | length == 2 and content[0].type == 'text'
  and content[1].type == 'image' %}
{%- set content = [content[1], content[0]] %}
{%- endif %}
{%- for part in content %}
{%- if part.type == 'text' %}@text_of_part@
@media@
{%- endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- for message in messages %}
{%- if message.role == 'system' and @inline@ %}
{%- set ns.system = ns.system + [plain(message.content)] %}
{%- else %}{%- set ns.turns = ns.turns + [message] %}{%- endif %}
{%- endfor %}
{%- for message in ns.turns %}
{%- if message.role == 'user' and (loop.first or loop.previtem.role != 'user') %}
{%- set ns.last = loop.index0 %}
{%- if ns.tools_at < 0 or not @tools_first@ %}{%- set ns.tools_at = loop.index0 %}{%- endif %}
{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in ns.turns %}
{%- set begins = loop.first or loop.previtem.role != message.role %}
{%- set ends = loop.last or loop.nextitem.role != message.role %}
{%- if begins %}{%- set ns.after_text = false %}{%- endif %}
{%- if message.role == 'system' %}
{%- set ns.after_text = false %}
{{- '[SYSTEM_PROMPT]' ~ write(message.content, false) }}
{{- '[/SYSTEM_PROMPT]' }}
{%- elif message.role == 'user' %}
{%- if loop.index0 == ns.tools_at and tools %}
{{- '[AVAILABLE_TOOLS][' }}
{%- for tool in tools %}
{%- set function = {'name': tool.function.name, 'description': tool.function.description or '',
  'parameters': tool.function.parameters or {}} %}
{{- {'type': 'function', 'function': function} | tojson }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}
{{- '][/AVAILABLE_TOOLS]' }}
{%- endif %}
{%- if loop.index0 == ns.tools_at %}@settings@{%- endif %}
{%- if begins %}{{- '[INST]' }}{%- endif %}
{%- if loop.index0 == ns.last and ns.system %}
{{- ns.system | join('\\n\\n') ~ '\\n\\n' }}
{%- endif %}
{{- write(message.content, begins and ends) }}
{%- if ends %}{{- '[/INST]' }}{%- endif %}
{%- elif message.role == 'assistant' %}
{%- set content = message.content %}
{{- write(content.rstrip(' ') if content is string else content, false) }}
{%- if message.tool_calls %}@calls@{%- endif %}
{%- if ends %}{{- eos_token }}{%- endif %}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]' }}@result@{{- '[/TOOL_RESULTS]' }}
{%- else %}
{{- raise_exception('Messages have the roles system, user, assistant and tool.') }}
{%- endif %}
{%- endfor %}
"""


class Effort(msgspec.Struct):
    """Values of the setting `reasoning_effort` of a model."""

    values: list[Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]]
    default: str | None = None
    """Value of chats that name none."""

    def __post_init__(self) -> None:
        if self.default not in (None, *self.values):
            raise ValueError(f"default={self.default!r} is none of {self.values}")


class ModelSettings(msgspec.Struct):
    """Settings of a model that its prompts contain: `model_settings_builder` of a tekken.json."""

    reasoning_effort: Effort | None = None


def chat_template(
    version: str, special: Collection[str], settings: ModelSettings | None
) -> str | None:
    """Return the chat template of a tokenizer; None: Octavo knows none of the version.

    Args:
        version: the field `version` of its config, such as v7.
        special: its special tokens.
        settings: settings of the model; v15 needs them.
    """
    number = _VERSIONS.get(version)
    has_settings = settings is not None and all(token in special for token in _SETTINGS)
    if number is None or (number >= 15 and not has_settings):
        return None
    media = [
        f"{{%- elif part.type == '{kind}' %}}{{%- set ns.after_text = false %}}{{{{- '{text}' }}}}"
        for token, (kind, text) in _MEDIA.items()
        if token in special
    ]
    if "[THINK]" in special:
        media.append(
            "{%- elif part.type == 'thinking' %}{%- set ns.after_text = false %}"
            "{{- '[THINK]' ~ part.thinking ~ '[/THINK]' }}"
        )
    identity = " ~ '[CALL_ID]' ~ call.id " if number == 11 else ""
    result = "{{- plain(message.content) }}"
    if number < 13:
        result = _OLD_RESULT if number == 3 else _RESULT
    written = ""
    if number >= 15 and settings is not None and (effort := settings.reasoning_effort) is not None:
        # The values are those of the class, so that they need no quotes of their own.
        default = "none" if effort.default is None else repr(effort.default)
        written = _EFFORT.replace("@default@", default).replace("@values@", repr(effort.values))
    changes = {
        "@text_of_content@": _TEXT.replace("@text@", "content"),
        "@text_of_part@": _TEXT.replace("@text@", "part.text"),
        "@media@": "\n".join(media),
        "@joins@": "true" if number >= 15 else "false",
        "@settings@": written,
        "@inline@": "true" if number == 3 else "false",
        "@tools_first@": "true" if number >= 13 else "false",
        "@calls@": _OLD_CALLS if number < 11 else _CALLS.replace("@identity@", identity),
        "@result@": result,
    }
    template = _TEMPLATE
    for name, text in changes.items():
        template = template.replace(name, text)
    return template.strip()
