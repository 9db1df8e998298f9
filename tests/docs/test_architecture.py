"""docs/architecture.md and docs/design/ name files, folders and pages that exist."""

import re
from pathlib import Path

import pytest

import octavo

PACKAGE = Path(octavo.__file__).parent
ROOT = PACKAGE.parent
DOCS = ROOT / "docs"
ARCHITECTURE = (DOCS / "architecture.md").read_text()
PAGES = [DOCS / "architecture.md", *sorted((DOCS / "design").glob("*.md"))]


def folders() -> dict[str, str]:
    """Return the rows of the table of folders: name -> description."""
    return dict(re.findall(r"^\| \[?`([\w/]+)/`(?:\]\(.*?\))? \| (.*) \|$", ARCHITECTURE, re.M))


def test_the_table_has_every_folder_of_the_package():
    inside = {"worker/spec_decode", "compat/vllm"}
    here = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name[0] != "_"}
    assert set(folders()) == here | inside


@pytest.mark.parametrize("folder", folders())
def test_the_table_names_files_that_exist(folder):
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", folders()[folder]):
        assert (PACKAGE / folder / name).exists(), name


def test_every_single_file_is_named():
    here = {path.name for path in PACKAGE.glob("*.py")} - {"__init__.py"}
    assert here <= set(re.findall(r"`(\w+\.py)`", ARCHITECTURE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_paths_and_links_lead_somewhere(page):
    text = page.read_text()
    tops = "octavo|csrc|tests|examples|training|benchmarks|docs"
    for name in re.findall(rf"`((?:{tops})/[\w./-]*)`", text):
        # The folder of the tuning belongs to the user.
        assert (ROOT / name).exists() or name in ("octavo/tuning", "octavo/stories"), name
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.stem)
def test_the_index_has_every_page(page):
    index = (DOCS / "design" / "index.md").read_text()
    assert page.name == "index.md" or f"({page.name})" in index


def test_the_files_to_read_first_are_about_as_long_as_stated():
    files = re.findall(r"^\| `([\w/.]+)` \| ([\d,]+) \|", ARCHITECTURE, re.M)
    assert len(files) == 11
    for name, stated in files:
        lines = len((ROOT / name).read_text().splitlines())
        assert lines == pytest.approx(int(stated.replace(",", "")), rel=0.25), name
