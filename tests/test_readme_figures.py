"""Every number of README.md comes from a file of the benchmarks, or is in a short list of those not measured."""

from __future__ import annotations

import copy
import importlib
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import sosampler as so

ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
README = (ROOT / "README.md").read_text(encoding="utf-8")

# Phrases with digits that are no measurements, each as often as it may stand in the text
NOT_MEASURED = {
    "car-detection.mp4": 1,
    "CC BY 4.0": 1,
    "licenses/by/4.0/": 1,
    "Python 3.11": 1,
    "BMVC 2024": 1,
    "arxiv.org/abs/2409.05260": 1,
    "isno0907/sosampler": 1,
    "your.mp4": 1,
    "Apache-2.0": 1,
}


@pytest.fixture(scope="module")
def scripts() -> Iterator[Callable[[str], ModuleType]]:
    """Import a script of the benchmarks by its name."""
    before = list(sys.path)

    def load(name: str) -> ModuleType:
        (path,) = (ROOT / "benchmarks").rglob(f"{name}.py")
        sys.path.insert(0, str(path.parent))
        return importlib.import_module(name)

    yield load
    sys.path[:] = before


@pytest.fixture(scope="module")
def figures(scripts: Callable[[str], ModuleType]) -> ModuleType:
    return scripts("readme_figures")


@pytest.fixture(scope="module")
def blocks(figures: ModuleType, files: dict[str, Any]) -> list[str]:
    return blocks_of(figures, files)


@pytest.fixture(scope="module")
def files(figures: ModuleType) -> dict[str, Any]:
    return dict(figures.read_files())


def blocks_of(figures: ModuleType, files: dict[str, Any]) -> list[str]:
    """Return the parts of README.md that are made from the files."""
    return [figures.BEGIN.format(name) + write(files) + figures.END for name, write in figures.BLOCKS.items()]


def unexplained(text: str, blocks: list[str]) -> list[str]:
    """Return the lines with numbers that neither a file nor NOT_MEASURED explains."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)  # code is run by other tests
    for block in blocks:
        text = text.replace(block, "", 1)
    for phrase, count in NOT_MEASURED.items():
        text = re.sub(rf"(?<!\w){re.escape(phrase)}(?!\w)", "", text, count=count)
    return [line for line in text.splitlines() if re.search(r"\d", line)]


def test_every_number_has_a_source(figures: ModuleType, files: dict[str, Any], blocks: list[str]) -> None:
    assert not unexplained(README, blocks), "write them again: python benchmarks/tables/readme_figures.py"
    assert figures.with_figures(README, files) == README


def test_no_number_can_be_changed_unseen(blocks: list[str]) -> None:
    code = [match.span() for match in re.finditer(r"^```.*?^```$", README, flags=re.DOTALL | re.MULTILINE)]
    numbers = [
        match
        for match in re.finditer(r"\d+(\.\d+)?", README)
        if not any(start <= match.start() < end for start, end in code)
    ]
    assert len(numbers) > 60
    for match in numbers:
        value = match.group()
        other = value[:-1] + str((int(value[-1]) + 1) % 10)
        changed = README[: match.start()] + other + README[match.end() :]
        assert unexplained(changed, blocks), f"{value} can become {other}: {changed[match.start() - 40 :][:80]}"
    assert unexplained(README + "\nIt is 7 times as fast.\n", blocks)


def test_other_measurements_give_other_figures(figures: ModuleType, files: dict[str, Any]) -> None:
    changed = copy.deepcopy(files)
    for line in changed["samplers"]["table"]:
        line["top1"] /= 2
    changed["light"]["install_megabytes"] = 111.4
    text = figures.with_figures(README, changed)
    assert "111 MB" in text
    assert text != README
    assert unexplained(README, blocks_of(figures, changed))
    with pytest.raises(SystemExit, match="it must have it once"):
        figures.with_figures(README.replace("<!-- figures: speed -->", ""), files)


def test_rows_without_a_fair_baseline_are_left_out(figures: ModuleType, files: dict[str, Any]) -> None:
    """Plain eager float32 on a CPU, uniform frames for keyframes, and a classifier that runs for nothing are unfair."""
    changed = copy.deepcopy(files)
    for key in ("torchcodec_same_keyframes", "with_teacher", "baselines"):
        _remove(changed, key)
    for row in changed["frame_engine"]["gpu"]["batches"]:
        row["videos_per_second"].pop("eager tf32", None)
    text = figures.speed(changed)
    for task in ("keyframes |", "score 10 frames", "train a sampler"):
        assert task not in text, task

    changed["decode"]["videos"][0]["comparisons"][0]["torchcodec_same_keyframes"] = [1.84, 1.96]
    changed["frame_engine"]["cpu"]["batches"][0]["baselines"] = {
        **{"eager": 2.9, "eager_loop": 3.1, "autocast_bf16_channels_last": 1.31, "compile": [1.2, 1.4]}
    }
    changed["pipeline"]["baselines"] = {
        "torchcodec_uniform": {"1 thread": [[1.5, 1.6], [9.01, 8.0]], "2 threads": [[1.4], [7.0]]},
        "transformers": [[1.71], [6.0]],
    }
    changed["training"]["training"]["with_teacher"] = 8.25
    changed["training_gpu"]["with_teacher"] = [5.0, 6.04]
    text = figures.speed(changed)
    cores = changed["decode"]["machine"]["cores"]
    for line in (
        f"| decode 32 keyframes | torchcodec, the same keyframes | 1.8 to 2.0 | {cores} cores, 1 thread |",
        "| decode 32 keyframes | torchcodec, 32 uniform frames |",
        "autocast bf16, channels-last; `torch.compile`; eager float32; eager float32, one video after the other | "
        "1.3; 1.2 to 1.4; 2.9; 3.1 |",
        "ResNet-50, 1 thread | 1.5 to 9.0 |",
        "ResNet-50, 2 threads | 1.4 to 7.0 |",
        "transformers' video loader, 6 uniform frames, ResNet-50 | 1.7 to 6.0 |",
        "as in the authors' code | 8.2 |",
        "as in the authors' code | 5.0 to 6.0 |",
    ):
        assert line in text, line


def _remove(result: Any, key: str) -> None:
    if isinstance(result, dict):
        result.pop(key, None)
    for value in result.values() if isinstance(result, dict) else result if isinstance(result, list) else ():
        _remove(value, key)


def test_the_page_about_speed_is_that_of_the_files(scripts: Callable[[str], ModuleType], files: dict[str, Any]) -> None:
    written = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    assert scripts("speed_table").page(files) == written, "write it again: python benchmarks/tables/speed_table.py"


def test_where_it_brings_nothing_is_as_measured(scripts: Callable[[str], ModuleType], files: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    assert "On short clips of one scene no gain over uniform frames is shown." in README
    claims = scripts("claims")
    for name in ("yoga", "airtlab"):
        assert claims.verdict(claims.gain(files, name)) != claims.HOLDS
    assert claims.verdict(claims.gain(files, "reels")) == claims.HOLDS


# ---- besides figures


def test_the_readme_is_short_and_opens_with_the_essentials() -> None:
    lines = README.splitlines()
    assert len(lines) <= 150
    screen = "\n".join(lines[:20])
    for part in ("pip install", "so.select(", "docs/images/uniform_and_chosen.jpg"):
        assert part in screen, part
    assert "CC BY 4.0" in "\n".join(lines[18:21])
    assert (ROOT / "docs/images/uniform_and_chosen.jpg").stat().st_size < 150_000


def test_the_paper_is_cited_alike_everywhere() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == so.__version__
    paper = citation["preferred-citation"]
    names = [f"{author['given-names']} {author['family-names']}" for author in paper["authors"]]
    assert f"*{paper['title']}.*\n{', '.join(names)}. BMVC {paper['year']}." in README
    assert f"title     = {{{paper['title']}}}" in README
    entry = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"])
    assert f"author    = {{{entry}}}" in README
    assert f"year      = {{{paper['year']}}}" in README


def test_readme_metadata_and_card_agree_about_the_weights() -> None:
    card = (ROOT / "src/sosampler/samplers/general/README.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for text in (card, README, project["description"]):
        assert re.search(r"licences\s+of\s+most\s.*?not\s+stated", text, flags=re.DOTALL | re.IGNORECASE), text[:80]
    assert project["readme"] == "README.md"  # so that it is the metadata's long description
