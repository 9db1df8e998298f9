"""Templates that change earlier turns; the page's table is what the script finds."""

import re
from pathlib import Path

import pytest
from template_prefixes import compare, examine

from octavo.text.chat_template import ChatTemplate

ROOT = Path(__file__).parents[2]
TEMPLATES = ROOT.parent / "shared" / "data" / "chat_templates" / "models"
PAGE = ROOT / "docs" / "prefix_caching.md"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.reasoning or '' }}{{ m.content }}{% endfor %}"
OPEN = "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (PLAIN + OPEN, ("kept", "kept")),
        (PLAIN.replace("m.reasoning or ''", "''") + OPEN, ("answer", "answer")),
        (
            PLAIN.replace("m.reasoning or ''", "m.reasoning if loop.revindex < 3 else ''") + OPEN,
            ("kept", "earlier"),
        ),
        ("{{ messages | length }}" + PLAIN + OPEN, ("earlier", "earlier")),
        (PLAIN + "{{ raise_exception('no') if messages | length > 3 }}" + OPEN, ("kept", "error")),
    ],
)
def test_effects(source, found):
    template = ChatTemplate({"default": source}, {})
    assert compare(template, with_thoughts=True, with_calls=False) == found


@pytest.mark.skipif(not TEMPLATES.exists(), reason="needs ../shared/data/chat_templates")
def test_table_of_the_page():
    rows = [" | ".join(examine(file)) for file in sorted(TEMPLATES.glob("*.jinja"))]
    kept = [row for row in rows if "| kept | kept | kept kept" in row]
    page = PAGE.read_text().partition("## Templates")[2]
    shown = re.findall(r"^\| (`[\w.-]+`(?: \(date\))? \| .*) \|$", page, re.MULTILINE)
    assert shown == [row for row in rows if row not in kept]
    assert f"Of {len(rows)} chat templates" in page
    assert all(row.partition(" ")[0] in page for row in kept if "(date)" in row)
