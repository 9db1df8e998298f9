"""Page at /docs: `/openapi.json` for people, without external resources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

# The browser loads and runs nothing on the page, even if text was injected.
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
summary { cursor: pointer; padding: .3em 0; }
code { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; margin: .5em 0 1em 1em; }
td, th { text-align: left; padding: .1em 1.5em .1em 0; vertical-align: top; }
.method { display: inline-block; width: 4em; font-weight: bold; }
"""


def docs_page(description: Mapping[str, Any]) -> str:
    """Return the page of an OpenAPI description, as HTML."""
    info = description["info"]
    title = escape(f"{info['title']} {info['version']}")
    return "\n".join(
        (
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>{title}</h1>",
            f"<p>{escape(info['description'])}",
            'For programs: <a href="openapi.json">openapi.json</a>.</p>',
            "<h2>Addresses</h2>",
            *_operations(description["paths"]),
            "<h2>Objects</h2>",
            *_schemas(description["components"]["schemas"]),
            "</body></html>\n",
        )
    )


def _operations(paths: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in paths.items():
        for method, operation in methods.items():
            shown = f'<span class="method">{method.upper()}</span> <code>{escape(path)}</code>'
            yield f"<details><summary>{shown} {escape(operation['description'])}</summary><table>"
            for parameter in operation.get("parameters", []):
                yield _row(f"{parameter['name']} ({parameter['in']})", _kind(parameter["schema"]))
            if "requestBody" in operation:
                yield _row("body", _content(operation["requestBody"]["content"]))
            for status, response in operation["responses"].items():
                what = f"{status} {response['description']}"
                yield _row(what, _content(response.get("content", {})))
            yield "</table></details>"


def _schemas(schemas: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in sorted(schemas.items()):
        about = escape(schema.get("description", ""))
        yield f'<details id="{escape(name)}"><summary><code>{escape(name)}</code> {about}</summary>'
        yield "<table>"
        required = schema.get("required", ())
        for field, kind in schema.get("properties", {}).items():
            yield _row(field, _kind(kind), "required" if field in required else "")
        if "properties" not in schema:
            yield _row("is", _kind(schema))
        yield "</table></details>"


def _row(name: str, kind: str, note: str = "") -> str:
    """Return a row of a table; `kind` is HTML already."""
    return f"<tr><td><code>{escape(name)}</code></td><td>{kind}</td><td>{note}</td></tr>"


def _content(content: Mapping[str, Any]) -> str:
    """Return the schema of each media type."""
    return "<br>".join(
        f"{_kind(item.get('schema', {}))} ({escape(media)})" for media, item in content.items()
    )


def _kind(schema: Mapping[str, Any]) -> str:
    """Describe a schema in words, with links to its objects."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_kind(s) for s in schema[key] if s.get("type") != "null")
    if "const" in schema:
        return escape(repr(schema["const"]))
    if "enum" in schema:
        return " or ".join(escape(repr(value)) for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return escape(str(schema.get("type", "anything")))
