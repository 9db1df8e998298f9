"""Fields for the form of the answer, as in the APIs of OpenAI, vLLM, SGLang and llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, Field

from octavo.compat import request_fields as known_fields
from octavo.errors import RequestError
from octavo.sampling_params import GrammarKind, StructuredOutputsParams
from octavo.server.body import Body

_FLAT: dict[str, GrammarKind] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "grammar": "grammar",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
"""Kind of the grammar in each body field that holds a single grammar."""

_PARTS = {
    "text": (),
    "json_object": ("schema",),
    "json_schema": ("json_schema",),
    "structural_tag": ("format", "structures", "triggers"),
}
"""Fields of `response_format` that each type allows."""

# One error is enough; without `fail_fast` pydantic makes one for each entry.
Choice: TypeAlias = Annotated[list[str], Field(fail_fast=True)]
Schema: TypeAlias = dict[str, Any] | bool
SchemaOrText: TypeAlias = dict[str, Any] | bool | str
ObjectOrText: TypeAlias = dict[str, Any] | str


class JsonSchema(Body):
    """JSON schema of `response_format`; an answer always follows it."""

    name: str | None = None
    """Name of the schema; no effect."""
    description: str | None = None
    """Purpose of the schema; no effect."""
    strict: bool | None = None
    """Reject a format that cannot be enforced instead of ignoring it."""
    schema_: Annotated[Schema, Field(alias="schema")]
    """JSON schema."""


class ResponseFormat(Body):
    """`response_format`: OpenAI's, with vLLM's structural tags and llama.cpp's `schema`."""

    inner: ClassVar[Mapping[str, type[Body]]] = {"json_schema": JsonSchema}

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    """Kind of the form; text: no constraint."""
    json_schema: JsonSchema | None = None
    """JSON schema with a name, for type json_schema."""
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    """JSON schema for type json_object; llama.cpp."""
    format: dict[str, Any] | None = None
    """Description in xgrammar's notation, for type structural_tag."""
    structures: list[dict[str, Any]] | None = None
    """Begin, schema and end of each tag, for the older form of structural_tag."""
    triggers: list[str] | None = None
    """Texts with which tags begin, for the older form of structural_tag."""

    def parts(self) -> dict[str, object]:
        """Return the given fields except the type.

        Raises:
            RequestError: the type does not allow a given field.
        """
        parts = {
            "json_schema": self.json_schema,
            "schema": self.schema_,
            "format": self.format,
            "structures": self.structures,
            "triggers": self.triggers,
        }
        given: dict[str, object] = {name: p for name, p in parts.items() if p is not None}
        for name in given:
            if name not in _PARTS[self.type]:
                raise RequestError(
                    f"response_format.{name} cannot be used with type {self.type!r}.",
                    f"response_format.{name}",
                )
        return given


class StructuredOutputs(Body):
    """`structured_outputs`, as in vLLM."""

    unsupported = known_fields.STRUCTURED_OUTPUTS

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    """JSON schema."""
    regex: str | None = None
    """Regular expression that the whole answer matches."""
    choice: Choice | None = None
    """Allowed answers."""
    grammar: str | None = None
    """Grammar in EBNF or Lark's notation."""
    json_object: bool | None = None
    """Allow any JSON object."""
    structural_tag: ObjectOrText | None = None
    """Tags with content that follows schemas, in xgrammar's notation."""
    disable_any_whitespace: bool | None = None
    """Write JSON without white space between its parts."""
    backend: str | None = None
    """auto, xgrammar or llguidance; default: the server's."""


class StructuredOutputsBody(Body):
    """Fields of a request that constrain the form of the answer."""

    inner: ClassVar[Mapping[str, type[Body]]] = {
        "response_format": ResponseFormat,
        "structured_outputs": StructuredOutputs,
    }

    response_format: ResponseFormat | None = None
    """Required form of the answer; OpenAI."""
    structured_outputs: StructuredOutputs | None = None
    """Required form of the answer; vLLM."""
    guided_json: SchemaOrText | None = None
    """JSON schema; older vLLM."""
    guided_regex: str | None = None
    """Regular expression; older vLLM."""
    guided_choice: Choice | None = None
    """Allowed answers; older vLLM."""
    guided_grammar: str | None = None
    """Grammar in EBNF or Lark's notation; older vLLM."""
    guided_decoding_backend: str | None = None
    """auto, xgrammar or llguidance; default: the server's."""
    # SGLang and llama.cpp, which sends an empty grammar to mean none.
    json_schema: SchemaOrText | None = None
    """JSON schema; llama.cpp and SGLang."""
    regex: str | None = None
    """Regular expression; SGLang."""
    grammar: Annotated[str | None, AfterValidator(lambda text: text or None)] = None
    """Grammar; llama.cpp."""
    ebnf: str | None = None
    """Grammar; SGLang."""
    structural_tag: ObjectOrText | None = None
    """Tags with content that follows schemas; SGLang."""

    def constraint(self) -> tuple[str, GrammarKind, object] | None:
        """Return the name, the kind and the value of the field that constrains the answer.

        Fields with equal values, such as `structured_outputs.grammar` and `guided_grammar`, count
        as one, because clients send both to support every version of vLLM.

        Raises:
            RequestError: two fields differ, or a field is incomplete.
        """
        found = [*self._response_format(), *self._structured_outputs()]
        for name, kind in _FLAT.items():
            if (value := getattr(self, name)) is not None:
                found.append((name, kind, value))
        for name, kind, value in found[1:]:
            first = found[0]
            if (kind, value) == first[1:]:
                continue
            differ = " and differ" if kind == first[1] else ""
            raise RequestError(
                f"{first[0]} and {name} both constrain the form of the answer{differ}; give one "
                "of them.",
                name,
            )
        return found[0] if found else None

    def structured_outputs_params(self) -> StructuredOutputsParams | None:
        """Return the constraint as a sampling parameter; None if the request has none.

        Raises:
            RequestError: a field is wrong; the message names the field.
        """
        found = self.constraint()
        if found is None:
            return None
        field, kind, value = found
        options: dict[str, Any] = {kind: value}
        names = {kind: field, "backend": "guided_decoding_backend"}
        if self.guided_decoding_backend is not None:
            options["backend"] = self.guided_decoding_backend
        if kind == "json" and self.response_format is not None:
            schema = self.response_format.json_schema
            options["strict"] = schema is not None and bool(schema.strict)
        wanted = self.structured_outputs
        if wanted is not None:
            options["disable_any_whitespace"] = bool(wanted.disable_any_whitespace)
            if wanted.backend is not None:
                options["backend"] = wanted.backend
                names["backend"] = "structured_outputs.backend"
        try:
            return StructuredOutputsParams(**options)
        except RequestError as error:
            # The message begins with the parameter's name.
            param = error.param or ""
            message = names[param] + error.message.removeprefix(param)
            raise RequestError(message, names[param], error.code) from None

    def _response_format(self) -> list[tuple[str, GrammarKind, object]]:
        given = self.response_format
        if given is None:
            return []
        parts = given.parts()
        if given.type == "json_schema":
            if given.json_schema is None:
                raise RequestError(
                    'response_format.json_schema is missing; give {"name": "...", "schema": '
                    "{...}}.",
                    "response_format.json_schema",
                    "missing_parameter",
                )
            return [("response_format.json_schema.schema", "json", given.json_schema.schema_)]
        if given.type == "structural_tag":
            return [("response_format", "structural_tag", {"type": given.type, **parts})]
        if given.type == "json_object":
            if parts:
                return [("response_format.schema", "json", parts["schema"])]
            return [("response_format", "json_object", True)]
        return []

    def _structured_outputs(self) -> list[tuple[str, GrammarKind, object]]:
        given = self.structured_outputs
        if given is None:
            return []
        values: dict[GrammarKind, object] = {
            "json": given.json_,
            "regex": given.regex,
            "choice": given.choice,
            "grammar": given.grammar,
            "json_object": given.json_object or None,
            "structural_tag": given.structural_tag,
        }
        found = [
            (f"structured_outputs.{kind}", kind, value)
            for kind, value in values.items()
            if value is not None
        ]
        if not found:
            raise RequestError(
                f"structured_outputs is empty; give one of {', '.join(values)}.",
                "structured_outputs",
            )
        return found
