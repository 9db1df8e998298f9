"""Descriptions of the fields of request bodies, for `/docs` and docs/api.md."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import lru_cache
from typing import Any

from octavo.sampling_params import SamplingParams
from octavo.server.body import Body


@lru_cache
def attribute_docs(kind: type) -> dict[str, str]:
    """Return the docstrings of a class's attributes by name."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for attribute, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(attribute, ast.AnnAssign) and isinstance(below, ast.Expr):
            docs[ast.unparse(attribute.target)] = ast.literal_eval(below.value)
    return docs


def field_doc(body: type[Body], name: str) -> str:
    """Return the description of a field: its docstring, or that of `SamplingParams`.

    Args:
        body: class of the body.
        name: name of the field in requests.

    Raises:
        KeyError: neither has a docstring.
    """
    for attribute, info in body.model_fields.items():
        if (info.alias or attribute) == name:
            for kind in body.__mro__[: body.__mro__.index(Body)]:
                if attribute in (docs := attribute_docs(kind)):
                    return " ".join(docs[attribute].split())
    if name not in SamplingParams.__struct_fields__:
        raise KeyError(f"{body.__name__}.{name} has no docstring.")
    meaning = " ".join(attribute_docs(SamplingParams)[name].split())
    match getattr(SamplingParams(), name):
        case None | False | []:
            return meaning
        case True:
            return f"{meaning} Default true."
        case float() as number:
            return f"{meaning} Default {number:g}."
        case default:
            return f"{meaning} Default {default}."


def describe(schemas: dict[str, dict[str, Any]]) -> None:
    """Write the descriptions of all fields into the JSON schemas of bodies, by class name."""
    kinds: list[type[Body]] = [Body]
    for kind in kinds:
        kinds += kind.__subclasses__()
        for name, described in schemas.get(kind.__name__, {}).get("properties", {}).items():
            described["description"] = field_doc(kind, name)
