"""The documentation site builds without warnings, fetches nothing from other hosts, and has every page."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.conftest import unavailable
from tests.doc_blocks import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("mkdocstrings") is None:
        unavailable("docs", "mkdocs is not installed; install sosampler[docs]")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


class _Loaded(HTMLParser):
    """Collect the addresses that a browser fetches by itself, without the links a reader may follow."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        follows = tag == "a" or (tag == "link" and attributes.get("rel") in ("prev", "next", "canonical"))
        if not follows:
            self.fetched += [attributes[name] for name in ("src", "href", "srcset", "data") if attributes.get(name)]


def test_nothing_is_fetched_from_other_hosts(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) >= 20
    for page in pages:
        parser = _Loaded()
        parser.feed(page.read_text(encoding="utf-8"))
        assert parser.fetched
        outside = [address for address in parser.fetched if re.match(r"(\w+:)?//", address)]
        assert not outside, (page.name, outside)
        # Everything it fetches exists.
        for address in parser.fetched:
            if not address.startswith(("data:", "#")) and page.name != "404.html":
                assert (page.parent / address.split("?")[0].split("#")[0]).exists(), (page.name, address)
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(https?:)?//|@import", sheet.read_text(encoding="utf-8")), sheet.name


def test_every_page_is_in_the_navigation(site: Path) -> None:
    front = (site / "index.html").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert f'href="{name}"' in front, f"{page.name} has no entry under nav: in mkdocs.yml"
    assert not list(site.rglob("*.py")), "only pages and what they link to"


def test_the_reference_has_every_public_name(site: Path) -> None:
    import sosampler as so

    document = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^::: sosampler\.(\w+)$", document, flags=re.MULTILINE))
    errors = {name for name in so.__all__ if name.endswith("Error") or name in ("InvalidArgument", "LimitExceeded")}
    missing = set(so.__all__) - listed - errors - {"__version__", "MissingDependency"}
    assert not missing, f"docs/api.md lacks {sorted(missing)}"
    page = (site / "api.html").read_text(encoding="utf-8")
    assert "Choose <code>num_frames</code> of the <code>num_candidates</code>" in page


def test_links_of_the_readme_lead_somewhere() -> None:
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"):
        text = document.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#\s]+)", text):
            if "://" not in link:
                assert (document.parent / link).exists(), (document.name, link)
