"""What the site needs besides the pages in docs: files elsewhere in the repository that pages link to.

Pages name them as they lie in the repository (`../benchmarks/results/decode.json`), so that links work there too.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")
_PAGES = ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")
_FRONT = {"README.md": "index.md"}  # the repository's front page and the site's


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the repository's root, and every file that a page links to."""
    root = Path(config["config_file_path"]).parent
    wanted = list(_PAGES)
    for page in [root / "docs" / file.src_uri for file in files.documentation_pages()] + [root / p for p in _PAGES]:
        wanted += [
            target.relative_to(root).as_posix()
            for link, _ in _LINK.findall(page.read_text(encoding="utf-8"))
            if (target := (page.parent / link).resolve()).is_file() and root / "docs" not in target.parents
        ]
    for name in dict.fromkeys(wanted):
        if name not in _FRONT and name not in ("LICENSE",):
            files.append(File.generated(config, name, abs_src_path=str(root / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links from where files lie in the repository to where they lie in the site."""
    root = Path(config["config_file_path"]).parent
    generated = page.file.src_uri in _PAGES
    here = root / page.file.src_uri if generated else root / "docs" / page.file.src_uri
    depth = page.file.src_uri.count("/")

    def moved(match: re.Match[str]) -> str:
        target = (here.parent / match[1]).resolve()
        if "://" in match[1] or not target.is_relative_to(root) or not target.exists():
            return match[0]
        inside = target.relative_to(root).as_posix()
        inside = inside.removeprefix("docs/") if inside.startswith("docs/") else inside
        if inside in _FRONT:
            return f"]({'../' * depth}{_FRONT[inside]})"
        return f"]({'../' * depth}{inside}{match[2] or ''})"

    return _LINK.sub(moved, markdown)
