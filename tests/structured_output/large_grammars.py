"""Large grammars: `LARGE` would need much time or memory, `HONEST` must compile.

The text of each is within the limit on grammars, 512 KiB.
"""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Iterator
from typing import Any

from octavo.messages import GrammarSpec

_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": False}
_SCALARS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"type": "string", "format": "date-time"},
    {"type": "string", "format": "uuid"},
    {"enum": ["active", "inactive", "pending", "deleted"]},
    {"type": "array", "items": {"type": "string"}},
]


def _json(schema: object) -> GrammarSpec:
    return GrammarSpec("json", json.dumps(schema, ensure_ascii=False, separators=(",", ":")))


def _regex(pattern: str) -> GrammarSpec:
    return GrammarSpec("regex", pattern)


def _grammar(text: str) -> GrammarSpec:
    return GrammarSpec("grammar", text)


def _choice(texts: list[str]) -> GrammarSpec:
    return GrammarSpec("choice", json.dumps(texts, ensure_ascii=False))


def _tags(structures: list[dict[str, Any]], triggers: list[str]) -> GrammarSpec:
    tag = {"type": "structural_tag", "structures": structures, "triggers": triggers}
    return GrammarSpec("structural_tag", json.dumps(tag))


def _properties(schema: dict[str, Any], required: bool = False) -> dict[str, Any]:
    found = {**_OBJECT, "properties": schema}
    return {**found, "required": list(schema)} if required else found


def _names() -> Iterator[str]:
    """Yield names of four letters."""
    return map("".join, itertools.product(string.ascii_lowercase, repeat=4))


def _chain(nbytes: int, line: str = "{}::={}\n", root: str = "root", end: str = '"a"') -> str:
    """Return rules, each of which is the next one."""
    lines, before = [], root
    size = 0
    for name in _names():
        lines.append(line.format(before, name))
        size += len(lines[-1])
        before = name
        if size > nbytes - 40:
            break
    return "".join(lines) + line.format(before, end)


def _rules(count: int, body: str, line: str = "{}::={}\n", root: str = "root") -> str:
    """Return many similar rules, and a root that may be any of them."""
    names = list(itertools.islice(_names(), count))
    first = line.format(root, " | ".join(names))
    return first + "".join(line.format(name, body.format(name=name)) for name in names)


def _doubling(count: int, line: str = "{}::={}\n", root: str = "root") -> str:
    """Return rules each of which is the next one twice."""
    names = [root, *itertools.islice(_names(), count)]
    rules = [line.format(a, f"{b} {b}") for a, b in itertools.pairwise(names)]
    return "".join(rules) + line.format(names[-1], '"a"')


def _one_of_required() -> dict[str, Any]:
    names = [f"n{i}" for i in range(600)]
    kinds = {name: {"type": "string"} for name in names}
    return {
        "oneOf": [
            _properties({**kinds, "kind": {"const": f"k{branch}"}}, required=True)
            for branch in range(12)
        ]
    }


def _ref_chain(count: int) -> dict[str, Any]:
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{count}": {"type": "integer"}}}


def _all_of_doubling(count: int) -> dict[str, Any]:
    twice = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**twice, f"d{count}": {"type": "object"}}}


def _refs_doubling(count: int) -> dict[str, Any]:
    defs: dict[str, Any] = {f"d{count}": {"type": "integer"}}
    for i in range(count):
        ref = {"$ref": f"#/$defs/d{i + 1}"}
        defs[f"d{i}"] = _properties({"a": ref, "b": ref}, required=True)
    return {"$ref": "#/$defs/d0", "$defs": defs}


def _nested_arrays(depth: int, count: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema, "minItems": count, "maxItems": count}
    return schema


def _nested_objects(depth: int, width: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = _properties({f"p{i}": schema for i in range(width)})
    return schema


# Characters of a class that needs many ranges.
_SPARSE = "".join(map(chr, range(0x400, 0xD800, 2)))
_TAG = {"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}

LARGE: dict[str, GrammarSpec] = {
    # EBNF
    "EBNF: chain of unit rules, 60 KB": _grammar(_chain(60_000)),
    "EBNF: chain of unit rules, 120 KB": _grammar(_chain(120_000)),
    "EBNF: chain of unit rules, 428 KB": _grammar(_chain(428_000)),
    "EBNF: chain of unit rules, 520 KB": _grammar(_chain(520_000)),
    "EBNF: class of 60,000 characters": _grammar(f"root ::= [{'abcdef' * 10_000}]{{1,100}}"),
    "EBNF: class of sparse characters, {1,100}": _grammar(f"root ::= [{_SPARSE}]{{1,100}}"),
    "EBNF: class of sparse characters, 30 times": _grammar(
        "root ::= " + f"[{_SPARSE[:5_000]}] " * 30
    ),
    "EBNF: nested repetitions": _grammar('root ::= (((("a"{1,50}){1,50}){1,50}){1,50})'),
    "EBNF: repetition of a million": _grammar('root ::= "a"{1,1000000}'),
    "EBNF: repetitions by rules": _grammar(
        "root ::= a{1,99}\na ::= b{1,99}\nb ::= c{1,99}\nc ::= d{1,99}\nd ::= [a-z]{1,99}\n"
    ),
    "EBNF: optional atoms": _grammar("root ::= " + '"a"? ' * 100_000),
    "EBNF: rules that double": _grammar(_doubling(40)),
    "EBNF: 24,000 rules": _grammar(_rules(24_000, '"{name}"')),
    "EBNF: 12,000 recursive rules": _grammar(_rules(12_000, '"{name}" | {name} "b"')),
    "EBNF: 20,000 nullable rules in a row": _grammar(
        "root ::= "
        + " ".join(itertools.islice(_names(), 20_000))
        + "\n"
        + "".join(f'{name} ::= "a"?\n' for name in itertools.islice(_names(), 20_000))
    ),
    "EBNF: 45,000 alternatives": _grammar(
        "root ::= " + " | ".join(f'"{i}"' for i in range(45_000))
    ),
    "EBNF: a text of 500 KB": _grammar('root ::= "' + "ab" * 250_000 + '"'),
    "EBNF: nested groups": _grammar("root ::= " + "(" * 50_000 + '"a"' + ")" * 50_000),
    "EBNF: ambiguous": _grammar(
        "root ::= a\na ::= a a a a | " + " | ".join(["a a"] * 5_000) + ' | "a" | ""'
    ),
    # Lark
    "Lark: chain of rules": _grammar(_chain(428_000, "{}:{}\n", "start")),
    "Lark: nested repetitions": _grammar("start: ((((" + '"a"' + "~1..50)~1..50)~1..50)~1..50)"),
    "Lark: terminal repeated": _grammar(
        "start: A\nA: /[a-z]{1,400}[0-9]{1,400}/\n".replace("A\n", "A~1..400\n", 1)
    ),
    "Lark: 20,000 terminals": _grammar(
        _rules(20_000, '"{name}"', "{}: {}\n", "start").upper().replace("START", "start")
    ),
    "Lark: 12,000 rules": _grammar(
        _rules(12_000, '"{name}" | {name} "b"', "{}: {}\n", "start").lower()
        if False
        else "start: "
        + " | ".join(f"r{i}" for i in range(12_000))
        + "\n"
        + "".join(f'r{i}: "{i}" | r{i} "b"\n' for i in range(12_000))
    ),
    "Lark: optional atoms": _grammar("start: " + '"a"? ' * 80_000),
    "Lark: a lexer that explodes": _grammar("start: A\nA: /(a|b)*a(a|b){20}/\n"),
    # regex
    'regex: "a?" * 200000': _regex("a?" * 200_000),
    "regex: [ab]? * 100000": _regex("[ab]?" * 100_000),
    "regex: a* * 150000": _regex("a*" * 150_000),
    "regex: a?b?c? groups": _regex("(a?b?c?)?" * 50_000),
    "regex: nested repetitions": _regex("((((a{1,50}){1,50}){1,50}){1,50})"),
    "regex: a{1000000}": _regex("a{1000000}"),
    "regex: many repetitions": _regex("[a-z]{0,100}" * 5_000),
    "regex: state explosion": _regex("(a|b)*a(a|b){25}c"),
    "regex: Unicode repeated": _regex("(\\w{1,100}\\s){1,100}"),
    "regex: 60,000 alternatives": _regex("|".join(f"x{i}y" for i in range(45_000))),
    "regex: large class repeated": _regex(f"[{_SPARSE}]{{1,100}}"),
    "regex: nested groups": _regex("(" * 100_000 + "a" + ")" * 100_000),
    "regex: nested alternatives": _regex("(a|" * 50_000 + "b" + ")" * 50_000),
    "regex: nested stars": _regex("(" * 2_000 + "a" + ")*" * 2_000),
    # choice
    "choice: 50,000 texts": _choice([f"n{i}" for i in range(50_000)]),
    "choice: one of 500 KB": _choice(["ab" * 250_000]),
    "choice: 400 texts that begin alike": _choice(["a" * 1_200 + str(i) for i in range(400)]),
    "choice: texts each one longer": _choice(["a" * i for i in range(1, 980)]),
    # JSON schemas
    "json: oneOf with large required lists": _json(_one_of_required()),
    "json: 20,000 properties": _json(_properties({f"p{i}": {} for i in range(20_000)})),
    "json: 9,000 required properties": _json(
        _properties({f"p{i}": {"type": "string"} for i in range(9_000)}, required=True)
    ),
    "json: patterns": _json(
        _properties(
            {
                f"p{i}": {"type": "string", "pattern": "^[a-z]{1,99}[0-9]{1,99}$"}
                for i in range(4_000)
            }
        )
    ),
    "json: a pattern that explodes": _json({"type": "string", "pattern": "^(a|b)*a(a|b){25}c$"}),
    "json: patternProperties": _json(
        {"type": "object", "patternProperties": {f"^p{i}.*x{{1,50}}": {} for i in range(5_000)}}
    ),
    "json: enum of 50,000": _json({"enum": [f"e{i}" for i in range(50_000)]}),
    "json: enum of a long text": _json({"enum": ["x" * 500_000]}),
    "json: anyOf of 5,000": _json(
        {"anyOf": [_properties({f"k{i}": {"type": "null"}}) for i in range(5_000)]}
    ),
    "json: oneOf of 30 enums": _json(
        {"oneOf": [{"enum": [f"{b}-{i}" for i in range(1_500)]} for b in range(30)]}
    ),
    "json: allOf of 4,000": _json(
        {
            "allOf": [
                {"type": "object", "properties": {f"p{i}": {"type": "integer"}}}
                for i in range(4_000)
            ]
        }
    ),
    "json: allOf that doubles": _json(_all_of_doubling(40)),
    "json: $refs that double": _json(_refs_doubling(40)),
    "json: chain of $refs": _json(_ref_chain(10_000)),
    "json: nested arrays of 50": _json(_nested_arrays(8, 50)),
    "json: minItems of a million": _json(
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 2 * 10**6}
    ),
    "json: maxItems of objects": _json(
        {"type": "array", "items": _nested_objects(2, 20), "maxItems": 10_000}
    ),
    "json: maxLength of ten million": _json(
        {"type": "string", "maxLength": 10**7, "minLength": 10**6}
    ),
    "json: 7,000 with maxLength": _json(
        _properties(
            {f"p{i}": {"type": "string", "minLength": 1, "maxLength": 500} for i in range(7_000)}
        )
    ),
    "json: nested objects, 6^5": _json(_nested_objects(5, 6)),
    "json: minProperties": _json(
        {
            "type": "object",
            "additionalProperties": {"type": "integer"},
            "minProperties": 50_000,
            "maxProperties": 60_000,
        }
    ),
    "json: multipleOf": _json({"type": "number", "multipleOf": 0.000123457}),
    "json: numbers in bounds": _json(
        _properties(
            {
                f"p{i}": {"type": "number", "minimum": 0.1234567 + i, "maximum": 98765.4321 + i}
                for i in range(6_000)
            }
        )
    ),
    # structural tags
    "structural_tag: 7,000 tags": _tags(
        [{**_TAG, "begin": f"<f{i}>"} for i in range(7_000)], ["<f"]
    ),
    "structural_tag: 6,000 triggers": _tags(
        [{**_TAG, "begin": f"<{i}f>"} for i in range(6_000)], [f"<{i}f" for i in range(6_000)]
    ),
    "structural_tag: large schemas": _tags(
        [
            {
                "begin": f"<f{i}>",
                "end": "</f>",
                "schema": _properties(
                    {f"p{j}": {"type": "string"} for j in range(300)}, required=True
                ),
            }
            for i in range(40)
        ],
        ["<f"],
    ),
}


def _api_schema() -> dict[str, Any]:
    """Return some hundreds of objects that refer to each other, as in an API's description."""
    defs: dict[str, Any] = {}
    for i in range(200):
        fields = {
            f"field_{i}_{j}": {**_SCALARS[(i + j) % len(_SCALARS)], "description": f"Field {j}."}
            for j in range(5)
        }
        if i:
            fields["parent"] = {"$ref": f"#/$defs/Object{i // 2}"}
            fields["links"] = {"type": "array", "items": {"$ref": f"#/$defs/Object{i - 1}"}}
        defs[f"Object{i}"] = {
            **_OBJECT,
            "description": f"An object of the kind {i}.",
            "properties": fields,
            "required": list(fields)[:3],
        }
    return {**defs["Object199"], "$defs": defs}


def _function_calls() -> dict[str, Any]:
    """Return a list of calls, each of one of 40 functions."""
    calls = []
    for i in range(40):
        arguments = _properties({f"argument_{j}": _SCALARS[j] for j in range(8)}, required=True)
        call = {"name": {"const": f"function_{i}"}, "arguments": arguments}
        calls.append(_properties(call, required=True))
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, "maxItems": 16}


_LANGUAGE = r"""
root ::= ws (declaration ws)*
declaration ::= function | variable ";" | struct
function ::= type ws1 name ws "(" ws parameters? ws ")" ws block
parameters ::= parameter (ws "," ws parameter)*
parameter ::= type ws1 name
struct ::= "struct" ws1 name ws "{" ws (parameter ws ";" ws)* "}"
variable ::= type ws1 name (ws "=" ws expression)?
type ::= ("int" | "float" | "bool" | "string" | name) ("[" number? "]")* "?"?
block ::= "{" ws (statement ws)* "}"
statement ::= block | variable ";" | expression ";" | if | while | for | return ";" | "break;"
if ::= "if" ws "(" ws expression ws ")" ws statement (ws "else" ws1 statement)?
while ::= "while" ws "(" ws expression ws ")" ws statement
for ::= "for" ws "(" variable? ";" ws expression? ";" ws expression? ")" ws statement
return ::= "return" (ws1 expression)?
expression ::= or (ws ("=" | "+=" | "-=" | "*=" | "/=") ws expression)?
or ::= and (ws "||" ws and)*
and ::= equality (ws "&&" ws equality)*
equality ::= relation (ws ("==" | "!=") ws relation)*
relation ::= sum (ws ("<" | ">" | "<=" | ">=") ws sum)*
sum ::= product (ws ("+" | "-") ws product)*
product ::= unary (ws ("*" | "/" | "%") ws unary)*
unary ::= ("!" | "-" | "++" | "--")? postfix
postfix ::= primary ("." name | "[" expression "]" | "(" arguments? ")")*
arguments ::= expression (ws "," ws expression)*
primary ::= name | number | text | "true" | "false" | "null" | "(" ws expression ws ")"
name ::= [a-zA-Z_] [a-zA-Z0-9_]{0,31}
number ::= [0-9]{1,15} ("." [0-9]{1,15})? ([eE] [+-]? [0-9]{1,3})?
text ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\nrt])* "\""
ws ::= [ \t\n]*
ws1 ::= [ \t\n]+
"""

_LARK = r"""
start: statement+
statement: SELECT columns FROM NAME (WHERE condition)? (ORDER_BY NAME (ASC | DESC)?)? ";"
columns: "*" | NAME ("," NAME)*
condition: comparison ((AND | OR) comparison)*
comparison: NAME OPERATOR (NUMBER | STRING | NAME) | "(" condition ")"
SELECT: "SELECT "
FROM: " FROM "
WHERE: " WHERE "
ORDER_BY: " ORDER BY "
ASC: " ASC"
DESC: " DESC"
AND: " AND "
OR: " OR "
OPERATOR: " = " | " <> " | " < " | " > " | " LIKE "
NAME: /[a-z_][a-z0-9_]{0,30}/
NUMBER: /-?[0-9]{1,12}(\.[0-9]{1,6})?/
STRING: /'[^'\n]{0,200}'/
"""

_TOOLS = [
    {
        "begin": f"<function=tool_{i}>",
        "schema": _properties({f"argument_{j}": _SCALARS[j] for j in range(6)}, required=True),
        "end": "</function>",
    }
    for i in range(64)
]

HONEST: dict[str, GrammarSpec] = {
    "json: the API of a service, 100 KB": _json(_api_schema()),
    "json: function calls": _json(_function_calls()),
    "json: an object of 300 properties": _json(
        _properties({f"field_{i}": _SCALARS[i % 8] for i in range(300)}, required=True)
    ),
    "json: enum of 3,000": _json({"enum": [f"product-{i}" for i in range(3_000)]}),
    "json: arrays of up to 1,000": _json(
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "number"}, "maxItems": 3},
            "minItems": 1,
            "maxItems": 1_000,
        }
    ),
    "json: texts with lengths and patterns": _json(
        _properties(
            {
                f"field_{i}": {"type": "string", "maxLength": 4_096}
                if i % 2
                else {"type": "string", "pattern": "^[A-Z]{2}[0-9]{1,10}(-[a-z]{1,8})?$"}
                for i in range(60)
            }
        )
    ),
    "grammar: a programming language in EBNF": _grammar(_LANGUAGE),
    "grammar: SQL in Lark": _grammar(_LARK),
    "grammar: 1,500 commands in EBNF": _grammar(_rules(1_500, '"{name} " [a-z]+ ";"')),
    "regex: dates": _regex(
        r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
        r"(T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-][0-9]{2}:[0-9]{2})?)?"
    ),
    "regex: URLs and e-mail addresses": _regex(
        r"https?://([a-z0-9-]{1,63}\.){1,8}[a-z]{2,24}(:[0-9]{1,5})?(/[A-Za-z0-9._~%-]{0,64}){0,16}"
        r"|[A-Za-z0-9._%+-]{1,64}@([A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z]{2,24}"
    ),
    "regex: Japanese text": _regex("[ぁ-んァ-ヶ一-龠々ー、。]{1,400}"),
    "regex: 1,000 words": _regex(
        "|".join(word + "[0-9]*" for word in itertools.islice(_names(), 1_000))
    ),
    "choice: 2,000 texts": _choice([f"category {i}: {i * 7919 % 10007}" for i in range(2_000)]),
    "structural_tag: 64 tools": _tags(_TOOLS, ["<function="]),
}
