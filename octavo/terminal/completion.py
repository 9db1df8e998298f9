"""`octavo completion`: scripts for shells that complete commands, flags and their values."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping

Parsers = Mapping[tuple[str, ...], argparse.ArgumentParser]
"""Parsers of the commands by their words: ("serve",), ("bench", "serve")."""

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
_octavo() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} at= before=
    [[ $prev == = ]] && prev=${{COMP_WORDS[COMP_CWORD-2]}}
    [[ $cur == = ]] && cur= && prev=${{COMP_WORDS[COMP_CWORD-1]}}
    if [[ $cur == --*=* ]]; then  # one word in zsh
        prev=${{cur%%=*}} before=${{cur%%=*}}= cur=${{cur#*=}}
    fi
    (( COMP_CWORD > 1 )) && at=${{COMP_WORDS[1]}}
    [[ $at == bench ]] && (( COMP_CWORD > 2 )) && at="bench ${{COMP_WORDS[2]}}"
    local found=
    case "$at $prev" in
{values}
    esac
    if [[ -z $found ]]; then
        case "$at" in
{flags}
        esac
        [[ -n $at && $at != bench && $cur != -* ]] && return
    fi
    COMPREPLY=($(compgen -P "$before" -W "$found" -- "$cur"))
}}
complete -o default -F _octavo octavo
"""
_FISH = """\
function __octavo_at
    set -l words (commandline -opc)
    set -e words[1]
    string match -q -- "$argv *" "$words "
end
"""


def script(shell: str, parsers: Parsers) -> str:
    """Return the completion script of a shell.

    Args:
        shell: one of `SHELLS`.
        parsers: parsers of the commands to complete.
    """
    if shell == "fish":
        return _fish(parsers)
    head = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"
    return (head if shell == "zsh" else "") + _bash(parsers)


def _bash(parsers: Parsers) -> str:
    values: list[str] = []
    flags = [f"            '') found={shlex.quote(' '.join(_next(parsers, ())))};;"]
    for words, parser in parsers.items():
        at = " ".join(words)
        found = [*_next(parsers, words), *(flag for action in _flags(parser) for flag in action)]
        flags.append(f"            {shlex.quote(at)}) found={shlex.quote(' '.join(found))};;")
        # What a command itself takes comes after its last word.
        for names, action in {words[-1:]: _argument(parser), **_flags(parser)}.items():
            if choices := _choices(action):
                pattern = "|".join(shlex.quote(f"{at} {name}") for name in names)
                values.append(f"        {pattern}) found={shlex.quote(' '.join(choices))};;")
    return _BASH.format(values="\n".join(values), flags="\n".join(flags))


def _fish(parsers: Parsers) -> str:
    lines = [_FISH]
    for words, parser in {(): None, **parsers}.items():
        below = _next(parsers, words)
        if below:
            depth = f"test (count (commandline -opc)) -eq {len(words) + 1}; and "
            for name in below:
                doc = parsers[(*words, name)].description or ""
                lines.append(
                    f"complete -c octavo -n {shlex.quote(depth + _at(words))} -f -a {name} "
                    f"-d {shlex.quote(doc)}"
                )
        if parser is None:
            continue
        if choices := _choices(_argument(parser)):
            lines.append(
                f"complete -c octavo -n {shlex.quote(_at(words))} -x -a "
                f"{shlex.quote(' '.join(choices))}"
            )
        for names, action in _flags(parser).items():
            choices = _choices(action)
            takes = "" if action.nargs == 0 else " -r"
            if choices:
                takes = f" -x -a {shlex.quote(' '.join(choices))}"
            doc = (action.help or "").replace("%%", "%")
            for name in names:
                lines.append(
                    f"complete -c octavo -n {shlex.quote(_at(words))} -l {name[2:]}{takes} "
                    f"-d {shlex.quote(doc)}"
                )
    return "\n".join(lines) + "\n"


def _at(words: tuple[str, ...]) -> str:
    return " ".join(["__octavo_at", *words]) if words else "true"


def _next(parsers: Parsers, words: tuple[str, ...]) -> list[str]:
    """Return the words of commands that may follow others."""
    return [found[-1] for found in parsers if found[:-1] == words]


def _flags(parser: argparse.ArgumentParser) -> dict[tuple[str, ...], argparse.Action]:
    """Return the long flags shown in the help, grouped by action."""
    return {
        names: action
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        and (names := tuple(n for n in action.option_strings if n.startswith("--")))
    }


def _argument(parser: argparse.ArgumentParser) -> argparse.Action | None:
    """Return what a command takes first beside flags and further commands."""
    positional = [action for action in parser._actions if not action.option_strings]
    is_command = positional and isinstance(positional[0], argparse._SubParsersAction)
    return positional[0] if positional and not is_command else None


def _choices(action: argparse.Action | None) -> list[str]:
    return [str(choice) for choice in (action.choices if action else None) or ()]
