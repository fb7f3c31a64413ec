"""`sosampler report` with several runs, reproductions and densities, and with what is none of these."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from sosampler.cli.evaluate import report_command
from sosampler.errors import InvalidArgument
from sosampler.paper.tables import grid_of
from sosampler.report.load import independence_grid
from sosampler.report.run_report import write_run_report
from tests.report.runs import heads_of, made_up_row, text_of, write_made_up_run
from tests.report.test_page import Page

IDS = [f"video-{number:02d}" for number in range(6)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_made_up_run(tmp_path / "run", ids=IDS)
    return tmp_path / "run"


# ---- several runs


def test_several_runs_on_one_page(run: Path, tmp_path: Path) -> None:
    text = text_of(run, run / "evaluation.json", run, out=tmp_path, videos=2, title="Both")
    assert re.findall(r'<h2 id="(run-\d)">([^<]*)</h2>', text) == [("run-1", "run"), ("run-2", "evaluation.json")]
    assert re.findall(r'<a href="#(run-\d)">', text) == ["run-1", "run-2"]
    page = Page(text)
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs and "svg" not in str(attrs.get("class"))]
    named = [
        name for name in ids if name and re.fullmatch(r"(run|curves|gallery|classes|table|videos|notes|facts).*", name)
    ]
    assert len(named) == len(set(named)) > 8
    referred = {attrs["aria-labelledby"] for _, attrs in page.elements if "aria-labelledby" in attrs}
    assert referred <= set(named)


def test_a_page_names_the_recipes_of_samplers(run: Path, tmp_path: Path) -> None:
    write_made_up_run(tmp_path / "named", ids=IDS, samplers={"mine": "SOSampler+", "printed": "SOSampler (paper)"})
    words = "mine is SOSampler+; printed is SOSampler (paper). SOSampler+ is this package&#39;s recipe."
    assert words in text_of(tmp_path / "named", out=tmp_path, videos=0)
    assert "SOSampler" not in text_of(run, out=tmp_path, videos=0)


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path: Path) -> None:
    for name in ("x", "y"):
        write_made_up_run(tmp_path / name / "evaluation", ids=IDS)
    write_made_up_run(tmp_path / "other", ids=IDS)
    (tmp_path / "link").symlink_to(tmp_path / "other")
    paths = [tmp_path / "x" / "evaluation", tmp_path / "y" / "evaluation", tmp_path / "other"]
    again = [tmp_path / "x" / ".." / "y" / "evaluation", tmp_path / "link"]
    text = text_of(*paths, *again, out=tmp_path, videos=0)
    assert re.findall(r'<h2 id="run-\d">([^<]*)</h2>', text) == ["x/evaluation", "y/evaluation", "other"]
    for path in paths:
        assert f"<dt>run</dt><dd>{path}</dd>" in text


def test_a_page_does_not_replace_what_it_is_made_from(run: Path) -> None:
    before = (run / "evaluation.json").read_bytes()
    for given_path in (run, run / "evaluation.json"):
        with pytest.raises(InvalidArgument, match=r"is a file of the run .*; give another name"):
            write_run_report(given_path, run / ".." / "run" / "evaluation.json")
    assert (run / "evaluation.json").read_bytes() == before


# ---- reproductions and independence


def result_of(experiment: str, **changes: Any) -> dict[str, Any]:
    """As `sosampler reproduce` writes it, with little in it."""
    row = {
        "row": "uniform", "title": "uniform | evenly", "num_frames": 2, "num_candidates": 6, "dial": None, "seeds": 0,
        "score": 61.5, "score_sd": None, "score_ci95": [55.0, 68.0], "top1": 61.5, "mAP": 62.0, "fidelity": None,
        "recovered": None, "versus_uniform": None, "gmacs": 0.5, "sampler_gmacs": 0.0, "classifier_gmacs": 0.5,
        "frames_classified": 2, "frames_decoded": 2, "note": "",
        "paper": {"table": experiment, "row": "uniform", "metric": "mAP", "num_frames": 2, "score": 75.3,
                  "versus_uniform": None, "gmacs": 24.7, "videos_per_second": None},
    }  # fmt: skip
    left_out = {"row": "x", "title": "another", "num_frames": 8, "num_candidates": 30, "why": "too few frames <b>"}
    return {
        "experiment": experiment,
        "kind": "accuracy",
        "title": "A title",
        "claim": "It is so.",
        "bank": {"name": "own", "path": "banks/own", "split": "test", "videos": 9},
        "classifier": {"name": "resnet50"},
        "metric": "top1",
        "seeds": [0],
        "paper": {"title": "The paper", "column": "the column of ActivityNet, for orientation only"},
        "rows": [row],
        "left_out": [{**left_out, "paper": None}],
        "elsewhere": [],
        "notes": ["a note"],
        "refused": None,
        **changes,
    }


def write_json(path: Path, told: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(told), encoding="utf-8")


def test_reproductions_show_the_papers_column(tmp_path: Path) -> None:
    place = tmp_path / "runs" / "own" / "resnet50"
    write_json(place / "table3" / "result.json", result_of("table3"))
    write_json(place / "table1" / "result.json", result_of("table1"))
    write_json(place / "table1" / "run.json", {"begun": "2026-01-02", "git": {"commit": "abc", "dirty": False}})
    write_json(place / "samplers" / "sosampler-0" / "result.json", {"epochs": 3})  # a training
    for given_path in (tmp_path / "runs", place):
        text = text_of(given_path, out=tmp_path)
        assert heads_of(text) == ["Table 1: A title", "Table 3: A title", "What was measured"]
    first = Page(text).tables[0]
    assert first[0][:5] == ["method", "N", "T", "ours: top-1, %", "paper: mAP, %"]
    assert first[1][:5] == ["uniform | evenly", "2", "6", "61.5 (55.0 to 68.0)", "75.3"]
    assert first[2][3] == "left out"
    assert "[1] too few frames &lt;b&gt;" in text
    assert "the column of ActivityNet, for orientation only" in text
    assert "<dt>git: commit: table1</dt><dd>abc</dd>" in text
    assert heads_of(text_of(place / "table1", out=tmp_path))[0] == "Table 1: A title"


def test_facts_that_differ_are_told_by_experiment(tmp_path: Path) -> None:
    place = tmp_path / "own" / "resnet50"
    write_json(place / "table1" / "result.json", result_of("table1"))
    bank = {"name": "own", "path": "banks/own", "split": "dev", "videos": 500}
    write_json(place / "table3" / "result.json", result_of("table3", seeds=[0, 1, 2], bank=bank))
    text = text_of(tmp_path, out=tmp_path)
    facts = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)</dd>", text))
    assert facts["bank: name"] == "own"
    assert (facts["bank: videos: table1"], facts["bank: videos: table3"]) == ("9", "500")
    assert (facts["seeds: table1"], facts["seeds: table3"]) == ("0", "0; 1; 2")
    assert "measured on 9 videos of test in own, and on 500 videos of dev in own." in text


def test_unfinished_experiments_are_told(tmp_path: Path) -> None:
    place = tmp_path / "own" / "resnet50"
    write_json(place / "table1" / "result.json", result_of("table1"))
    write_json(place / "table5" / "run.json", {"kind": "sosampler reproduction", "settings": {}})
    write_json(place / "table5" / "evaluation.json", {"parts": {}})
    write_json(place / "other" / "run.json", {"kind": "something"})
    notes: list[str] = []
    text = text_of(tmp_path, out=tmp_path, say=notes.append)
    assert notes == [f"Started and not finished, so it is not shown: {place / 'table5'}."]
    assert notes[0] in text
    with pytest.raises(InvalidArgument, match="no experiment is finished"):
        text_of(place / "table5", out=tmp_path)


def test_other_files_of_that_name_do_no_harm(run: Path, tmp_path: Path) -> None:
    for name, told in {"list": "[1]", "cut": "{", "training": '{"epochs": 3}', "bytes": "\udcff"}.items():
        (run / name).mkdir()
        (run / name / "result.json").write_text(told, encoding="utf-8", errors="surrogateescape")
    assert "All videos" in heads_of(text_of(run, out=tmp_path))
    write_json(run / "x" / "y" / "table1" / "result.json", result_of("table1"))
    heads = heads_of(text_of(run, out=tmp_path))
    assert {"All videos", "Table 1: A title"} <= set(heads)
    # What a reproduction itself wrote has to be whole.
    write_json(run / "x" / "y" / "table3" / "run.json", {"kind": "sosampler reproduction"})
    (run / "x" / "y" / "table3" / "result.json").write_text("{")
    with pytest.raises(InvalidArgument, match=r"table3/result\.json: is not JSON"):
        text_of(run, out=tmp_path)


@pytest.mark.parametrize("change", [{"bank": {"name": "own"}}, {"bank": None}, {"rows": None}, {"classifier": {}}])
def test_a_reproduction_that_lacks_something_is_told(tmp_path: Path, change: dict[str, Any]) -> None:
    write_json(tmp_path / "table1" / "result.json", result_of("table1", **change))
    with pytest.raises(InvalidArgument, match=r"result\.json: is not what `sosampler reproduce` writes"):
        text_of(tmp_path / "table1", out=tmp_path)


def test_reproduced_curves_are_drawn(tmp_path: Path) -> None:
    told = result_of("figureI", kind="curve")
    told["rows"] = [{**told["rows"][0], "num_frames": frames, "gmacs": frames / 2} for frames in (1, 2, 4)]
    write_json(tmp_path / "figureI" / "result.json", told)
    assert text_of(tmp_path / "figureI", out=tmp_path).count("<svg") == 1


def test_a_damaged_reproduction_is_told(tmp_path: Path) -> None:
    write_json(tmp_path / "table1" / "result.json", {**result_of("table1"), "rows": [{"row": "x"}]})
    with pytest.raises(InvalidArgument, match="is not what `sosampler reproduce` writes"):
        text_of(tmp_path / "table1", out=tmp_path)


def write_independence(folder: Path) -> None:
    rate = {"classifier": "resnet", "pairs": 60, "mean": 0.581, "redundant": 0.1, "passes": True}
    told = {
        "videos": 9,
        "criterion": "a rate passes where it passes",
        "classifiers": [{"classifier": "resnet", "verdict": 1.0}],
        "rows": [{**rate, "rate": 0.5}, {**rate, "rate": 25, "mean": None, "redundant": None, "passes": None}],
        "notes": [],
    }
    write_json(folder / "independence.json", told)
    Image.new("RGB", (8, 6), "white").save(folder / "independence.png")


def test_densities_of_independence(tmp_path: Path) -> None:
    write_independence(tmp_path / "kde")
    text = text_of(tmp_path / "kde", out=tmp_path)
    assert heads_of(text) == ["How similar neighbouring frames are", "What was measured"]
    assert text.count('src="data:image/png;base64,') == 1
    assert "frames are independent up to 1 frames a second" in text
    assert Page(text).tables[0][1] == ["resnet", "0.5", "60", "0.581", "10.0", "yes"]
    write_made_up_run(tmp_path / "both", ids=IDS[:3])
    write_independence(tmp_path / "both")
    assert "How similar neighbouring frames are" in heads_of(text_of(tmp_path / "both", out=tmp_path))
    (tmp_path / "kde" / "independence.png").write_text("no picture")
    grid = independence_grid(tmp_path / "kde")
    assert grid is not None
    assert grid.images == []
    (tmp_path / "kde" / "independence.json").write_text('{"rows": 3}')
    with pytest.raises(InvalidArgument, match="not what `sosampler independence` writes"):
        independence_grid(tmp_path / "kde")


def test_a_result_without_rows_is_a_grid_without_rows() -> None:
    grid = grid_of(result_of("table1", rows=[], left_out=[], refused="no labels"))
    assert (grid.title, grid.head, grid.rows) == ("Table 1: A title", ["no labels"], [])


# ---- what is refused


@pytest.mark.parametrize(
    "change",
    [
        {"rows": []},
        {"rows": "none"},
        {"rows": [{}]},
        {"rows": [made_up_row("a", 0, 6, 0.5)]},
        {"rows": [made_up_row("a", 2, 6, float("nan"))]},
        {"rows": [made_up_row("a", 2, 6, 0.5, ci95={"top1": [0.1]})]},
        {"rows": [made_up_row("a", 2, 6, 0.5, ci95=[0.1, 0.2])]},
        {"rows": [made_up_row("a", 2, 6, 0.5, versus_uniform={"ci95": None})]},
        {"rows": [made_up_row("a", 2, 6, 0.5, fidelity="high")]},
        {"rows": [made_up_row("a", 2, 6, 85.0)]},
        {"rows": [made_up_row("a", 2, 6, 0.5, mAP=-0.1)]},
        {"rows": [made_up_row("a", 2, 6, 0.5, fidelity=1.5)]},
        {"rows": [made_up_row("a", 2, 6, 0.5, gmacs=float("inf"))]},
        {"rows": [made_up_row("a", 2, 6, 0.5, gmacs=10**400)]},
        {"rows": [made_up_row("a", 2, 6, 0.5, frames_classified="x")]},
        {"rows": [made_up_row("a", 2, 6, 0.5, gap=[1])]},
        {"rows": [made_up_row("a", 2, 6, 0.5, gap={"mean": 1.0})]},
        {"rows": [made_up_row("a", 2, 6, 0.5, ci95={"top1": [0.9, 0.1]})]},
        {"notes": json.loads("[" * 500 + "]" * 500)},
        {"metric": ["top1"]},
        {"metric": "f1"},
        {"notes": "one"},
    ],
)
def test_files_that_are_no_evaluation_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "evaluation.json"
    path.write_text(json.dumps({"rows": [made_up_row("a", 2, 6, 0.5)]}))
    text_of(path, out=tmp_path)  # no more is needed
    path.write_text(json.dumps({"rows": [made_up_row("a", 2, 6, 0.5)], **change}))
    with pytest.raises(InvalidArgument, match=r"evaluation\.json: "):
        text_of(path, out=tmp_path)


def test_places_that_are_no_run_are_refused(tmp_path: Path, run: Path) -> None:
    with pytest.raises(InvalidArgument, match="is not there"):
        text_of(tmp_path / "no", out=tmp_path)
    with pytest.raises(InvalidArgument, match=r"holds neither evaluation\.json nor"):
        text_of(tmp_path, out=tmp_path)
    with pytest.raises(InvalidArgument, match="no run is given"):
        write_run_report([], tmp_path / "r.html")
    with pytest.raises(InvalidArgument, match="videos=-1"):
        write_run_report(run, tmp_path / "r.html", videos=-1)
    with pytest.raises(InvalidArgument, match="is a folder; give the name of a file"):
        write_run_report(run, tmp_path, videos=0)
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(InvalidArgument, match="no object with rows"):
        text_of(tmp_path / "x.json", out=tmp_path)
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(InvalidArgument, match="is not JSON"):
        text_of(tmp_path / "x.json", out=tmp_path)


def test_what_cannot_be_read_or_written_is_told_in_a_sentence(tmp_path: Path, run: Path) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(InvalidArgument, match=r"deep\.json: .*nested too deeply"):
        text_of(deep, out=tmp_path)
    with pytest.raises(InvalidArgument, match="File name too long"):
        text_of(tmp_path / ("a" * 300), out=tmp_path)
    with pytest.raises(InvalidArgument, match="cannot be written"):
        write_run_report(run, tmp_path / ("a" * 300 + ".html"), videos=0)


# ---- the command


def report_by_command(*arguments: Any) -> Any:
    app = typer.Typer()
    app.command()(report_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_writes_a_report(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "made" / "r.html"
    done = report_by_command(run, "-o", out, "--title", "Mine", "--videos", 3)
    assert done.exit_code == 0, done.output
    assert f"{out}: 0." in done.stderr
    assert done.stdout == ""
    text = out.read_text(encoding="utf-8")
    assert "<h1>Mine</h1>" in text
    assert text.count('class="strip"') == 3


def test_the_command_tells_as_json_what_is_missing(tmp_path: Path) -> None:
    write_made_up_run(tmp_path / "run", ids=IDS[:3])
    done = report_by_command(tmp_path / "run", "-o", tmp_path / "r.html", "--json")
    told = json.loads(done.stdout)
    assert told["report"] == str(tmp_path / "r.html")
    assert told["bytes"] == (tmp_path / "r.html").stat().st_size
    assert told["notes"][0].startswith("No frames are shown")
    assert "note: No frames are shown" in done.stderr
    alone = report_by_command(tmp_path / "run" / "evaluation.json", "-o", tmp_path / "r.html", "--json")
    assert json.loads(alone.stdout)["notes"][0].startswith("Nothing is known of single videos")
    assert isinstance(report_by_command(tmp_path / "no", "-o", tmp_path / "x.html").exception, InvalidArgument)
    assert not (tmp_path / "x.html").exists()
