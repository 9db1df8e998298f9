"""Count words and phrases that make Octavo's prose hard to read.

    python docs/count_dialect.py [PATHS] [--files N]

PATHS are files or folders; the default is the whole repository. The script reads Markdown files,
the docstrings and comments of Python files, and the comments of C++ files. It skips quoted code:
text in back-quotes and fenced blocks. It prints, for each marker, the number of matches and the
matches per 1,000 words of prose, and then the sum. `--files N` adds the N files with the most
matches. CONTRIBUTING.md describes the style that replaces the markers.
"""

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPENING = "docstring opening"
MARKERS = {
    name: re.compile(rf"\b(?:{name})\b", re.IGNORECASE)
    for name in (
        "told",
        "asked",
        "taken",
        "so many",
        "as many",
        "behind",
        "beside",
        "whoever",
        "nobody",
        "somebody",
        "there is none",
        "likewise",
        "of (?:its|one's) own",
    )
}
_OPENINGS = re.compile(r"(?:What|Who|Whose|Which|Where|How|Whether|Of|As|See)\b")
_CPP = {".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"}
_SUFFIXES = {".md", ".py", *_CPP}
_WORD = re.compile(r"[A-Za-z]+(?:['-][A-Za-z]+)*")
_FENCE = re.compile(r"^ *(```+|~~~+).*?^ *\1[`~]*$", re.MULTILINE | re.DOTALL)
_QUOTED = re.compile(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
_LINK = re.compile(r"\]\([^)\s]*\)")
# String and character literals are matched only so that "//" within them starts no comment.
_CPP_TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|//(?P<line>[^\n]*)|/\*(?P<block>.*?)\*/', re.DOTALL
)
_DIRECTIVE = re.compile(r"#\s*(?:noqa|type:|pragma|ruff|mypy|fmt)")


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a text, without quoted code and with single spaces."""
    for paragraph in re.split(r"\n\s*\n", _FENCE.sub("\n\n", text)):
        # A bar keeps the words on both sides of the code apart.
        yield " ".join(_LINK.sub("]", _QUOTED.sub(" | ", paragraph)).split())


def docstrings(tree: ast.AST) -> Iterator[str]:
    """Yield the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value.value


def python_comments(source: str) -> Iterator[str]:
    """Yield the comments of a Python file; comments on adjacent lines are one text."""
    block: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or _DIRECTIVE.match(token.string):
            continue
        if token.start[0] != last + 1:
            yield "\n".join(block)
            block = []
        block.append(token.string.lstrip("# "))
        last = token.start[0]
    yield "\n".join(block)


def cpp_comments(source: str) -> Iterator[str]:
    """Yield the comments of a C++ file; line comments on adjacent lines are one text."""
    block: list[str] = []
    last = -1
    for match in _CPP_TOKEN.finditer(source):
        text = match["line"] if match["line"] is not None else match["block"]
        if text is None:
            continue
        line = source.count("\n", 0, match.start())
        if line != last + 1:
            yield "\n".join(block)
            block = []
        block.append(text.strip("/* "))
        last = line
    yield "\n".join(block)


def count(path: Path) -> tuple[Counter[str], int]:
    """Return the number of matches of each marker in a file, and its number of words of prose."""
    source = path.read_text(encoding="utf-8")
    found: Counter[str] = Counter()
    if path.suffix == ".md":
        texts = [source]
    elif path.suffix == ".py":
        opened = list(docstrings(ast.parse(source)))
        found[OPENING] = sum(_OPENINGS.match(text.lstrip()) is not None for text in opened)
        texts = [*opened, *python_comments(source)]
    else:
        texts = list(cpp_comments(source))
    num_words = 0
    for text in texts:
        for paragraph in paragraphs(text):
            num_words += len(_WORD.findall(paragraph))
            for name, pattern in MARKERS.items():
                found[name] += len(pattern.findall(paragraph))
    return found, num_words


def files(paths: list[Path]) -> Iterator[Path]:
    """Yield the files to read: each given file, and those in folders that are not hidden."""
    for path in paths:
        if path.is_file():
            yield path
            continue
        for child in sorted(path.iterdir()):
            if child.name.startswith((".", "__")) and child.name != "__init__.py":
                continue
            if child.is_dir() and child.name not in {"build", "dist"}:
                yield from files([child])
            elif child.suffix in _SUFFIXES:
                yield child


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT])
    parser.add_argument("--files", type=int, default=0, metavar="N", help="list the N worst files")
    args = parser.parse_args()
    total: Counter[str] = Counter()
    num_words = 0
    per_file: list[tuple[int, int, Path]] = []
    for path in files(args.paths):
        found, words = count(path)
        total += found
        num_words += words
        per_file.append((found.total(), words, path))

    def row(name: object, matches: int, words: int) -> None:
        print(f"{name!s:<24} {matches:>7,} {1000 * matches / max(words, 1):>16.2f}")

    print(f"{'marker':<24} {'count':>7} {'per 1,000 words':>16}")
    for name in [*MARKERS, OPENING]:
        row(name.replace("(?:its|one's)", "its/one's"), total[name], num_words)
    row("sum", total.total(), num_words)
    print(f"{num_words:,} words of prose in {len(per_file):,} files")
    if args.files:
        print()
        for matches, words, path in sorted(per_file, key=lambda found: -found[0])[: args.files]:
            row(path, matches, words)


if __name__ == "__main__":
    main()
