"""Every code block of every page runs, or states why not and is checked as far as possible."""

from __future__ import annotations

import http.client
import re
import shutil
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

import sosampler as so
from sosampler.policies import registry
from sosampler.video import http_ranges
from tests import web_server
from tests.conftest import unavailable
from tests.doc_blocks import LANGUAGES, ROOT, TINY, Block, blocks_of, check, commands_of, pages, run_page
from tests.doc_world import make_world

# Number of blocks that a test cannot run; the reason is above each block.
ONLY_CHECKED = {
    "README.md": 2,
    "docs/addresses.md": 2,
    "docs/add_policy.md": 1,
    "docs/assistant.md": 1,
    "docs/baselines.md": 4,
    "docs/cli.md": 1,
    "docs/integrations.md": 1,
    "docs/query.md": 1,
    "docs/quick_start.md": 1,
    "docs/reproduce.md": 1,
    "docs/sampler.md": 1,
    "docs/scale.md": 1,
    "docs/video_benchmarks.md": 1,
    "docs/watch.md": 1,
}
# Run by the tests of the integrations, which make small transformers models for them.
RUN_WITH_TRANSFORMERS = ("docs/integrations.md", "docs/video_llm.md")
# These train.
SLOW = ("docs/baselines.md", "docs/classifiers.md", "docs/sampler.md")
# Python code that would take a test too long.
_SMALLER = {
    r'so\.train\(("?\w+"?), (.*?)weights="mobilenet_v2\.safetensors"': (
        rf'so.train(\1, \2weights="mobilenet_v2.safetensors", backbone="{TINY}", input_size=32, epochs=1, batch_size=4'
    ),
    r"epochs=\d+": "epochs=1",
}


def smaller(code: str) -> str:
    for pattern, replacement in _SMALLER.items():
        code = re.sub(pattern, replacement, code)
    return code


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("torch")
    pytest.importorskip("pyarrow")
    folder = tmp_path_factory.mktemp("world")
    make_world(folder)
    return folder


@pytest.fixture
def folder(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the world as the current folder."""
    shutil.copytree(world, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def given(page: str) -> dict[str, Any]:
    """Python names that a page assumes."""
    if page == "docs/assistant.md":
        return {"client": MagicMock()}
    if page != "docs/classifiers.md":
        return {}
    import torch

    so.save_classifier(so.create_classifier("resnet50", num_classes=22), "saved")
    Path("saved/model.safetensors").rename("my.safetensors")

    class Net(torch.nn.Module):
        def forward(self, clips: Any) -> Any:
            return clips.mean((2, 3, 4))[:, :2] * 9

    return {"module": Net()}


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page in SLOW else ())
        for page in pages()
        if page not in RUN_WITH_TRANSFORMERS and blocks_of(page)
    ],
)
def test_the_blocks_of_a_page_run(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:  # policies that a page registers are not for other tests
        patched.setattr(registry, "_POLICIES", dict(registry._POLICIES))
        if page == "docs/assistant.md":
            _pass_the_path_on(patched)
        if page in ("README.md", "docs/addresses.md"):
            _serve_the_folder(patched)
        names = run_page(page, given(page), smaller)
    if page in _AFTER:
        _AFTER[page](names)


def _serve_the_folder(patched: pytest.MonkeyPatch) -> None:
    """Let https://example.org be a server that has the files of the current folder; it ends with the tests."""
    server = web_server.WebServer()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.add("/match.mp4", Path("match.mp4").read_bytes())

    def connect(_: Any, target: Any) -> http.client.HTTPConnection:
        assert target.geturl().startswith("https://example.org/")
        connection = http.client.HTTPConnection(*server.server_address[:2])
        connection.connect()
        return connection

    patched.setattr(http_ranges.HttpRanges, "_connect", connect)


def _pass_the_path_on(patched: pytest.MonkeyPatch) -> None:
    """The SDK starts servers with little of the environment; here the package may be found by PYTHONPATH alone."""
    try:
        from mcp.client import stdio
    except ImportError:
        unavailable("mcp", "mcp is not installed")
    patched.setattr(stdio, "DEFAULT_INHERITED_ENV_VARS", [*stdio.DEFAULT_INHERITED_ENV_VARS, "PYTHONPATH"])


def _after_readme(names: dict[str, Any]) -> None:
    assert len(names["sel"]) == 6
    assert isinstance(names["pipeline"], so.Pipeline)
    assert Path("frames.jsonl").exists()
    assert Path("sheet.png").exists()
    assert len(list(Path("frames").rglob("*.jpg"))) == 16


def _after_classifiers(names: dict[str, Any]) -> None:
    assert names["clf"].class_names == ("ant", "bee")


def _after_baselines(names: dict[str, Any]) -> None:
    rows = {row.policy: row for row in names["res"].rows}
    assert set(rows) == {"uniform", "frameexit", "early@0.2"}
    heavy = so.Bank("bank").features(so.create_classifier("runs/mine")).gmacs  # for one frame
    for row in (rows["frameexit"], rows["early@0.2"]):
        assert 1 <= row.frames_classified <= row.frames_decoded <= 10
        assert row.gmacs >= row.frames_classified * heavy  # its own layers come on top


def _after_report(names: dict[str, Any]) -> None:
    """The page explains every part of a report under its name."""
    page = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    parts = re.findall(r"<h2[^>]*>([^<:]+)", Path("report.html").read_text(encoding="utf-8"))
    assert len(parts) >= 8
    for part in parts:
        assert f"**{part.strip()}**" in page
    assert len(names["kept"]) == 9  # three policies with three numbers of frames


_AFTER = {
    "README.md": _after_readme,
    "docs/classifiers.md": _after_classifiers,
    "docs/report.md": _after_report,
    "docs/baselines.md": _after_baselines,
}


def test_blocks_that_are_not_run_are_counted() -> None:
    blocks = [block for page in pages() for block in blocks_of(page)]
    assert Counter(block.page for block in blocks if block.not_run) == ONLY_CHECKED
    assert sum(not block.not_run for block in blocks) >= 60
    for block in blocks:
        assert block.language in LANGUAGES, f"{block}: give it one of the languages {', '.join(LANGUAGES)}"
        if block.not_run:
            assert len(block.not_run.split()) >= 3, f"{block}: say why"
            check(block)


def test_check_finds_mistakes() -> None:
    for language, code in (
        ("bash", "sosampler select match.mp4 --no-such-option"),
        ("bash", "sosampler evaluate"),
        ("bash", "make nothing"),
        ("bash", 'pip install "sosampler[nothing]"'),
        ("bash", "rm -rf ."),
        ("bash", "sosampler --no-such-option"),
        ("python", "so.select("),
    ):
        with pytest.raises((Exception, SystemExit)):
            check(Block("x.md", 1, language, code, "it would take hours"))
    check(Block("x.md", 1, "bash", 'sosampler train bank --out x  # why\nmake docs\npip install ".[train,hf]"\n', "x"))
    check(Block("x.md", 1, "bash", "sosampler --install-completion\n", "changes the shell"))


def test_blocks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[Block.__module__], "ROOT", tmp_path)
    (tmp_path / "x.md").write_text(
        "```python\na = 1\n```\n\n<!-- not run: needs a cluster -->\n```bash\nsosampler ui \\\n  x.mp4  # y\n```\n"
        "- in a list:\n\n  ```python\n  if a:\n      b = 2\n  ```\n",
        encoding="utf-8",
    )
    first, second, third = blocks_of("x.md")
    assert (first.line, first.code, first.not_run) == (2, "a = 1\n", "")
    assert (second.not_run, commands_of(second)) == ("needs a cluster", [["sosampler", "ui", "x.mp4"]])
    assert third.code == "if a:\n    b = 2\n"
    monkeypatch.chdir(tmp_path)
    assert run_page("x.md")["b"] == 2
    (tmp_path / "x.md").write_text('```python\nprint("a", 3)\n```\n\n```text\na ...\n```\n', encoding="utf-8")
    run_page("x.md")
    (tmp_path / "x.md").write_text("```python\nprint(4)\n```\n```text\n5\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="other output"):
        run_page("x.md")
