"""The Python of README.md and of docs/ runs as it stands there, page by page."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.M | re.S)


def blocks_of(page: Path) -> list[tuple[int, str]]:
    """Line number and text of each block, so that an error points into the page."""
    text = page.read_text()
    return [(text.count("\n", 0, found.start(1)), found[1]) for found in BLOCK.finditer(text)]


@pytest.mark.parametrize("page", [p for p in PAGES if blocks_of(p)], ids=lambda p: p.name)
def test_python_blocks_run(page):
    names: dict[str, object] = {"__name__": page.stem}
    for lines_before, block in blocks_of(page):
        exec(compile("\n" * lines_before + block, page, "exec"), names)


def test_readme_has_an_example_and_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert blocks_of(ROOT / "README.md")
    assert "make demo" in text
    assert "make test" in text
