"""Regular expressions from files, which must take little time."""

from __future__ import annotations

import math
import re
from functools import lru_cache

MOST_WAYS = 2**21
"""Limit of the ways in which a name could match a pattern: each takes nanoseconds."""
_LONG_NAME = 60  # characters of a module's name


@lru_cache(1024)
def compile_safely(pattern: str, most_ways: int = MOST_WAYS) -> re.Pattern[str]:
    """Return a pattern that takes little time for a name.

    Repeats can divide a name in many ways, and each way can use other alternatives.

    Args:
        pattern: the regular expression.
        most_ways: limit of the ways in which a name could match it.

    Raises:
        re.error: the pattern is none, or could take long.
    """
    plain = re.sub(r"\\.|\[[^]]*\]", "c", pattern)
    if re.search(r"\)[*+{]", plain):
        raise re.error("it repeats a group")
    if re.search(r"\(\?[a-z]*x", plain):
        raise re.error("it has the flag x, which hides repeats")
    plain = plain.replace("(?", "(")
    repeats, ways, open_groups = len(re.findall(r"[*+?{]", plain)), 1, [1]
    for character in f"{plain})":
        match character:
            case "(":
                open_groups.append(1)
            case "|":
                open_groups[-1] += 1
            case ")":
                ways *= open_groups.pop()
                open_groups = open_groups or [1]
    if repeats > 4 or ways * math.comb(_LONG_NAME + repeats, repeats) > most_ways:
        raise re.error("it has more than 4 repeats, or too many alternatives besides")
    return re.compile(pattern)
