"""Writes docs/vllm.md: every flag of vLLM's, and what Octavo makes of it.

The names come from docs/vllm_names.txt, a list of vLLM 0.32's flags with their short forms, and of
arguments of its `LLM` that have no flag; what becomes of them from the parser and `octavo.foreign`.

    python docs/make_vllm_table.py
"""

from functools import cache
from pathlib import Path

from octavo.cli import build_parser
from octavo.config import ENVIRONMENT, ServerConfig, config_fields, section_fields
from octavo.foreign import FOREIGN, RENAMED, SECTIONS, SPECULATIVE

FOLDER = Path(__file__).parent

HEAD = """# Coming from vLLM

`octavo serve` takes the command line of `vllm serve`, and `LLM(...)` the arguments of vLLM's. What
Octavo has goes by the same name. A setting that it does not have is accepted as long as its value
asks for nothing, and otherwise refused with what to use instead: nothing is silently dropped. This
page is written by `docs/make_vllm_table.py` from the code.

- Flags may be written with `_` for `-`; each is given once.
- Numbers: `4k` is 4,000, `4K` is 4,096, and so on with `m`, `g` and `t`; `--max-model-len auto` is
  what fits the memory.
- JSON may be given in parts: `--speculative-config.method ngram`, `-sc.method=ngram`;
  `--flag.key+ a,b` adds to a list.
- `--config FILE` reads a YAML file whose keys are the names of flags; flags win over it.
"""


def document() -> str:
    """The whole text of docs/vllm.md."""
    return "\n".join([HEAD, *_variables(), "", "## Flags and arguments", "", *_flags(), ""])


def _variables() -> list[str]:
    lines = [
        "## Environment variables",
        "",
        "Flags and the file win over them. `OCTAVO_API_KEY` and `VLLM_API_KEY` are API keys. Any",
        "other `VLLM_` variable that vLLM would heed is named in a warning.",
        "",
        "| variable | or | setting | value |",
        "| --- | --- | --- | --- |",
    ]
    for name, (setting, _, allowed) in ENVIRONMENT.items():
        lines.append(f"| `OCTAVO_{name}` | `VLLM_{name}` | `{setting}` | {allowed} |")
    return lines


def _flags() -> list[str]:
    lines = ["| vLLM's name | in Octavo |", "| --- | --- |"]
    for line in (FOLDER / "vllm_names.txt").read_text().splitlines():
        words = line.split()
        shown = ", ".join(f"`{word}`" for word in words)
        lines.append(f"| {shown} | {_status(words)} |")
    return lines


def _status(words: list[str]) -> str:
    """What Octavo makes of a flag.

    Raises:
        LookupError: it is not known, or known twice.
    """
    name = words[0].removeprefix("--").replace("-", "_")
    own = {f.name for f in [*config_fields(), *section_fields(ServerConfig)]} | {"config"}
    if words[0].startswith("-"):
        missing = [word for word in words if word not in _parser_flags()]
        if missing:
            raise LookupError(f"octavo serve does not know {', '.join(missing)}")
    if name in own and name in FOREIGN:
        raise LookupError(f"{name} is Octavo's own by now: take it out of octavo/foreign.py")
    if name in own:
        return "the same"
    if name in SPECULATIVE:
        return f"the same: `{SPECULATIVE[name]}` of `speculative_config`"
    if name in SECTIONS:
        key, setting, _ = SECTIONS[name]
        return f"`{key}` is `{setting}`; other keys are refused"
    if name in RENAMED:
        return f"`{RENAMED[name]}`"
    if name not in FOREIGN:
        raise LookupError(f"{name} is unknown: put it into octavo/foreign.py")
    setting = FOREIGN[name]
    if setting.harmless is None:
        return f"any value is accepted: {setting.why}"
    if setting.kind == "bool":
        values = ["on" if value else "off" for value in setting.harmless]
    else:
        values = [f"`{v}`" for v in setting.harmless if v not in (None, "", [], {})]
    return f"{', '.join(values)}; else refused: {setting.why}".removeprefix("; else ")


@cache
def _parser_flags() -> set[str]:
    return set(build_parser().parse_args(["serve"]).parser._option_string_actions)


if __name__ == "__main__":
    (FOLDER / "vllm.md").write_text(document())
