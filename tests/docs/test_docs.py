"""What the documents say is what is there."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path

import pytest

import sosampler as so
from sosampler.datasets.segments import read_segments
from sosampler.inference.options import SelectOptions
from sosampler.policies.registry import describe_policies
from tests.doc_blocks import ROOT, blocks_of, commands_of


def test_the_json_of_the_documents_has_the_right_keys(clip: Path) -> None:
    block, segments = blocks_of("docs/files.md", "json")
    shown, real = json.loads(block.code), so.select(clip, 2, policy="uniform").to_dict()
    assert list(shown) == list(real)
    assert list(shown["candidates"]) == list(real["candidates"])
    line = json.dumps(json.loads(segments.code))
    (clip.parent / "segments.jsonl").write_text(line + "\n", encoding="utf-8")
    assert len(read_segments(clip.parent / "segments.jsonl", ["match/a.mp4"])["match/a.mp4"]) == 2


def test_every_policy_is_in_the_documents_with_its_words() -> None:
    policies = describe_policies()
    policies.pop("last", None)  # which a block of the pages registers as an example
    for name, description in policies.items():
        assert f"| `{name}` | {description}" in (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")


def test_select_documents_every_option() -> None:
    assert so.select.__doc__ is not None
    for field in set(SelectOptions.__dataclass_fields__) - {"min_candidates"}:  # set by the package itself
        assert re.search(rf"^\s+(\w+, )?{field}(, \w+)?: ", so.select.__doc__, flags=re.MULTILINE), field


def test_the_dockerfile_is_the_light_install() -> None:
    """No engine builds it here: its steps are those of the documents, and what it copies is there."""
    steps: dict[str, list[str]] = {}
    for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            word, rest = line.split(" ", 1)
            steps.setdefault(word, []).append(rest)
    assert list(steps) == ["FROM", "ENV", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT", "CMD"]
    (install,) = steps["RUN"]
    light = next(block for block in blocks_of("README.md", "bash") if "pip install" in block.code)
    assert commands_of(light) == [install.split(" && ")[0].split()]
    python = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = re.fullmatch(r"python:(3\.\d+)-slim", steps["FROM"][0])
    assert version is not None
    assert float(version[1][2:]) >= float(python["requires-python"].removeprefix(">=3."))
    copied = [word for step in steps["COPY"] for word in step.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied)
    # What building the package reads.
    assert set(copied) >= {"pyproject.toml", python["readme"], *python["license-files"], "src"}
    assert json.loads(steps["ENTRYPOINT"][0])[0] in python["scripts"]
    assert f"--uid {steps['USER'][0]} " in install


CALLED_FIRST = """
    select watch open_video Pipeline create_classifier wrap_classifier train_classifier prepare write_frames make_reels
    train load_sampler evaluate list_policies list_classifiers list_samplers list_recipes read_recipe
"""


@pytest.mark.parametrize("name", CALLED_FIRST.split())
def test_what_users_call_first_has_an_example(name: str) -> None:
    """Which runs: pytest collects the examples of all docstrings in src."""
    pytest.importorskip("torch")
    text = getattr(so, name).__doc__ or ""
    assert ">>> " in text
    assert "Examples:" in text, "the site shows what stands below that word as code"
    assert "+SKIP" not in text


def test_published_ratios_are_those_of_the_times() -> None:
    """The ratios in the file follow from the seconds in it."""
    result = json.loads((ROOT / "benchmarks" / "results" / "decode.json").read_text())
    from statistics import median

    for video in result["videos"]:
        assert video["same_times_as_torchcodec"]
        for row in video["comparisons"]:
            seconds = video["seconds"]
            expected = median(seconds[row["reference"]]) / median(seconds[row["way"]])
            assert row["times_faster"] == pytest.approx(expected)
            assert row["met"] in (None, True)


def test_mutants_are_those_that_were_counted() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "mutants.json").read_text())["modules"]
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    noticed = {name: row["noticed"] + row["without_end"] for name, row in rows.items()}  # a loop without end is seen
    total, seen = sum(row["changes"] for row in rows.values()), sum(noticed.values())
    only_dtype = sum(row["dtype_or_strict_only"] for row in rows.values())
    assert f"{seen:,} of {total:,} ({100 * seen / total:.1f} %); {only_dtype} of the others" in text
    for name, row in rows.items():
        share = 100 * noticed[name] / row["changes"]
        assert f"| `{name}` | {row['changes']} | {noticed[name]} ({share:.0f} %) |" in text


@pytest.mark.slow
def test_classifier_table_is_what_is_counted() -> None:
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location(
        "classifier_table", ROOT / "benchmarks" / "tables" / "classifier_table.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    document = (ROOT / "docs" / "classifiers.md").read_text(encoding="utf-8")
    for given in module.ROWS[:7]:  # the rest are torchvision's, whose cost has a test of its own
        assert module.row(*given) in document
    for given in module.ROWS[7:]:
        assert f"| `{given[0]}` |" in document


def test_systems_are_shown_as_measured() -> None:
    """Reels as soon as they are measured, then real clips."""
    spec = importlib.util.spec_from_file_location("systems_table", ROOT / "benchmarks" / "tables" / "systems_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    files = [ROOT / "benchmarks" / "results" / f"systems_{name}.json" for name in ("reels", "yoga", "airtlab")]
    results = [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]
    assert module.beside_published(results) in (ROOT / "docs" / "baselines.md").read_text(encoding="utf-8")
