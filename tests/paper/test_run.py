"""Reproducing tables and figures on small banks: the numbers, what is shared, what is resumed, what is refused."""

from __future__ import annotations

import csv
import io
import json
import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sosampler.bank.bank import Bank
from sosampler.errors import InvalidArgument, MissingDependency
from sosampler.evaluation.result import mean_average_precision
from sosampler.paper import run as runner
from sosampler.paper.folder import TABLES
from sosampler.paper.run import Reproduction, reproduce
from sosampler.video.candidates import segment_centres, uniform_positions
from tests.factories import TINY, make_bank, softmax

SMALL: dict[str, Any] = {"backbone": TINY, "shift": 0, "input_size": 32, "batch_size": 8}
QUICK: dict[str, Any] = {
    "seeds": (0,),
    "epochs": 1,
    "settings": SMALL,
    "device": "cpu",
    "workers": 1,
    "bootstrap": 20,
}
EXPERIMENTS = ["table1", "table2", "table6", "figureI"]


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return make_bank(tmp_path_factory.mktemp("reproduce") / "bank", stored=12, train=16, dev=12)


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reproduced")


@pytest.fixture(scope="module")
def said() -> list[str]:
    return []


@pytest.fixture(scope="module")
def found(bank: Bank, out: Path, said: list[str]) -> dict[str, Reproduction]:
    results = reproduce(EXPERIMENTS, f"activitynet={bank.path}", out=out, say=said.append, **QUICK)
    return {one.experiment.name: one for one in results}


def rows_by(one: Reproduction) -> dict[tuple[str, int | None], dict[str, Any]]:
    return {(row["row"], row["num_frames"]): row for row in one.result["rows"]}


# ---- the numbers, computed a second time


def logits_of(bank: Bank) -> list[tuple[np.ndarray, int]]:
    """What the teacher says about the candidates of the dev videos, and the label."""
    dev = bank.split("dev")
    teacher = dev.teacher()
    found = []
    for place, item in enumerate(dev.items):
        kept = teacher[place].features
        assert kept is not None
        offered = np.unique(uniform_positions(len(kept), 10))
        found.append((kept[offered].astype(np.float64), item.labels[0]))
    return found


def slow_sets(logits: np.ndarray, label: int, wanted: int) -> dict[str, tuple[int, ...]]:
    """What each policy takes of one video."""
    count = len(logits)
    sure = [softmax(row)[label] for row in logits]
    subsets = list(combinations(range(count), min(wanted, count)))
    best = max(subsets, key=lambda subset: softmax(logits[list(subset)].mean(0))[label])
    return {
        "uniform": tuple(segment_centres(count, min(wanted, count)).tolist()),
        "semi-optimal": tuple(sorted(np.argsort(sure)[::-1][:wanted].tolist())),
        "optimal": best,
        "all": tuple(range(count)),
    }


def test_table_1_is_what_a_slow_loop_finds(bank: Bank, found: dict[str, Reproduction]) -> None:
    videos = logits_of(bank)
    sets = [slow_sets(logits, label, 6) for logits, label in videos]
    truth = np.eye(3)[[label for _, label in videos]]
    shown = {row["row"]: row for row in found["table1"].result["rows"]}
    assert list(shown) == ["uniform", "all", "semi-optimal", "optimal"]
    slow = {}
    for policy, row in shown.items():
        probs = np.stack(
            [softmax(logits[list(one[policy])].mean(0)) for (logits, _), one in zip(videos, sets, strict=True)]
        )
        slow[policy] = 100 * mean_average_precision(probs, truth)
        assert row["score"] == pytest.approx(slow[policy]), policy
        assert row["top1"] == pytest.approx(100 * (probs.argmax(1) == truth.argmax(1)).mean())
    # The bank has one label a video, and the paper measures this data set in mAP.
    assert found["table1"].result["metric"] == "mAP"
    for policy in ("all", "semi-optimal", "optimal"):
        assert shown[policy]["versus_uniform"] == pytest.approx(slow[policy] - slow["uniform"])
    assert shown["uniform"]["versus_uniform"] is None
    low, high = shown["uniform"]["score_ci95"]
    assert 0 <= low <= shown["uniform"]["score"] <= high <= 100


def test_table_2_is_what_a_slow_loop_finds(bank: Bank, found: dict[str, Reproduction]) -> None:
    shown = rows_by(found["table2"])
    assert [wanted for row, wanted in shown if row == "semi-optimal"] == [1, 2, 3, 4, 5, 6]
    for wanted in (1, 3, 6):
        shares = []
        for logits, label in logits_of(bank):
            sets = slow_sets(logits, label, wanted)
            shares.append(len(set(sets["semi-optimal"]) & set(sets["optimal"])) / wanted)
        assert shown["semi-optimal", wanted]["score"] == pytest.approx(100 * np.mean(shares), abs=1e-4)
    assert shown["semi-optimal", 1]["score"] == pytest.approx(100)
    assert all(row["versus_uniform"] is None for row in shown.values())
    assert {row for row, _ in shown} == {"random", "frameexit", "semi-optimal"}, "optimal is only measured against"


def test_the_paper_stands_beside(found: dict[str, Reproduction]) -> None:
    told = found["table1"].result
    assert (
        told["paper"]["column"]
        == "the paper on ActivityNet v1.3 with ResNet50; another classifier, for orientation only"
    )
    figures = {row["row"]: row["paper"] for row in told["rows"]}
    assert figures["optimal"]["score"] == 90.5
    assert figures["optimal"]["versus_uniform"] == pytest.approx(15.2)
    assert figures["all"]["versus_uniform"] == pytest.approx(2.5)
    losses = {row["row"]: row["paper"]["score"] for row in found["table6"].result["rows"] if row["paper"]}
    assert losses["ranking-max-lg"] == 88.65
    assert losses["uniform"] == 87.0
    fidelity = rows_by(found["table2"])
    assert fidelity["semi-optimal", 2]["paper"]["score"] == 74.6
    curve = rows_by(found["figureI"])
    assert curve["sosampler", 4]["paper"]["score"] == 76.2
    assert curve["sosampler", 3]["paper"] is None
    assert curve["sosampler-authors", 4]["paper"]["score"] == 76.2
    assert curve["sosampler-default", 4]["paper"] is None, "the paper has no figure of this package's recipe"
    assert curve["sosampler-default", 4]["title"] == "SOSampler+"
    line = next(line for line in found["figureI"].table("markdown").splitlines() if line.startswith("| SOSampler+"))
    assert "71.1" not in line
    assert curve["scsampler", 6]["paper"] is None, "nobody knows for which of the N it would be"


def test_tables_as_text_markdown_and_csv(found: dict[str, Reproduction]) -> None:
    one = found["table1"]
    text = one.table()
    assert text.startswith("Table 1: The optimal and the semi-optimal policy\n12 videos of dev in activitynet")
    line = next(line for line in text.splitlines() if line.startswith("optimal"))
    assert line.split()[1:3] == ["6", "10"]
    assert line.split()[-1] == "+15.2"
    assert "ours: mAP, %  paper: mAP, %" in text
    assert "88.65" in found["table6"].table()
    assert "note: the bank has no labelled test videos, so everything is measured on dev\n" in text
    learnt = "so everything is measured on dev, by which samplers keep their best epoch\n"
    assert learnt in found["table6"].table()
    assert "note: points to uniform in mAP have no interval here" in text
    assert "note: the paper's figure of uniform is from its Table 1" in found["table6"].table()
    assert "4926 to measure on and 200 classes; this bank has 16, 12 and 3" in text
    grid = [line for line in one.table("markdown").splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in grid}) == 1
    assert len(grid) == 2 + 4
    lines = list(csv.DictReader(io.StringIO(one.table("csv"))))
    by = {line["row"]: line for line in lines}
    assert float(by["optimal"]["paper_score"]) == 90.5
    assert float(by["optimal"]["score"]) == pytest.approx(one.result["rows"][3]["score"])
    for style, name in TABLES.items():
        assert (one.folder / name).read_text(encoding="utf-8") == one.table(style)
    with pytest.raises(InvalidArgument, match="style='pdf' is unknown"):
        one.table("pdf")


# ---- files, and what is shared


def test_the_files_of_a_run(bank: Bank, out: Path, found: dict[str, Reproduction]) -> None:
    folder = out / "activitynet" / "by-hand"
    assert sorted(path.name for path in folder.iterdir()) == sorted(["samplers", "tables.md", *EXPERIMENTS])
    told = json.loads((folder / "table6" / "run.json").read_text())
    assert told["settings"]["seeds"] == [0]
    assert told["settings"]["changes"] == {**SMALL, "epochs": 1}
    assert told["settings"]["bank"]["path"] == str(bank.path.resolve())
    assert told["begun"] <= told["ended"]
    assert {"torch", "sosampler", "python"} <= set(told["versions"])
    assert told["machine"]["cores"]
    recipes = {row["row"]: row.get("recipe") for row in told["settings"]["rows"]}
    assert recipes["uniform"] is None
    assert (recipes["mse-label"]["loss"], recipes["mse-label"]["class_head"]) == ("mse", False)
    assert (recipes["ranking-max-lg"]["target"], recipes["ranking-max-lg"]["lam"]) == ("max", 0.99)
    kept = json.loads((folder / "table6" / "evaluation.json").read_text())
    assert list(kept["parts"]) == ["T=10"]
    videos = (folder / "table6" / "videos" / "T=10" / "videos.jsonl").read_text(encoding="utf-8").splitlines()
    head, *answered = [json.loads(line) for line in videos]
    assert len(answered) == found["table6"].result["bank"]["videos"]
    right = [video["answers"][head["rows"].index(["uniform", 6, 10])]["right"] for video in answered]
    assert 100 * sum(right) / len(right) == pytest.approx(found["table6"].result["rows"][0]["top1"])
    assert json.loads((folder / "table6" / "result.json").read_text()) == found["table6"].result
    files = found["figureI"].result["files"]
    assert {"curve.svg", "report/index.html", "table.md"} <= set(files)
    assert all((folder / "figureI" / file).stat().st_size > 500 for file in files)


def test_one_training_serves_every_table(out: Path, found: dict[str, Reproduction]) -> None:
    trained = sorted(path.name for path in (out / "activitynet" / "by-hand" / "samplers").iterdir())
    assert trained == sorted(
        [
            *("paper-0", "authors-0", "default-0", "scsampler-rank-0", "ocsampler-0"),
            *(f"ocsampler-reinforce-num_frames-{wanted}-0" for wanted in (2, 3, 4)),
            *("paper-target-label-0", "paper-target-label-loss-mse-0"),
            *(
                "paper-class_head-false-target-label-lam-1.0-0",
                "paper-class_head-false-target-label-loss-mse-lam-1.0-0",
            ),
        ]
    )
    shown = rows_by(found["figureI"])
    assert shown["sosampler", 6]["trained"] == "paper"
    assert shown["sosampler", 6]["score"] == rows_by(found["table6"])["ranking-max-lg", 6]["score"]
    assert shown["ocsampler", 2]["trained"] == "ocsampler-reinforce-num_frames-2"


def test_rows_that_cannot_be_had_say_why(found: dict[str, Reproduction]) -> None:
    left_out = {row["row"]: row["why"] for row in found["figureI"].result["left_out"]}
    assert set(left_out) == {"liteeval", "ar-net", "videoiq", "adafocus", "frameexit"}
    assert "runs the classifier itself, which is not available; give --classifier FOLDER" in left_out["adafocus"]
    assert "give --classifier FOLDER" in left_out["frameexit"]
    line = next(line for line in found["figureI"].table().splitlines() if line.startswith("FrameExit"))
    assert line.split()[-3:] == ["10", "left", "out"], "the paper's figure is of one value of the dial, not of all"


def test_it_tells_which_step_of_how_many_runs(said: list[str], found: dict[str, Reproduction]) -> None:
    assert said[0] == "16 steps to run"
    steps = [text for text in said if text.startswith("[")]
    assert [text.partition("]")[0] for text in steps] == [f"[{number}/16" for number in range(1, 17)]
    assert sum("] training" in text for text in steps) == 12
    assert sum(": evaluating with 10 candidates" in text for text in steps) == 4
    assert len([text for text in said if text.startswith("    done in")]) == 16


# ---- going on, and refusing


def test_a_finished_run_does_nothing(
    bank: Bank, out: Path, found: dict[str, Reproduction], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "train_one", None)
    monkeypatch.setattr(runner, "evaluate_part", None)
    said: list[str] = []
    again = reproduce(EXPERIMENTS, f"activitynet={bank.path}", out=out, say=said.append, **QUICK)
    assert [one.result for one in again] == [found[name].result for name in EXPERIMENTS]
    assert said[0] == "nothing to run"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"epochs": 2}, r"table6: holds a run with other settings: changes.epochs was 1, is 2"),
        ({"seeds": (0, 1)}, r"seeds was \[0\], is \[0, 1\]"),
    ],
)
def test_other_settings_are_refused(
    bank: Bank, out: Path, found: dict[str, Reproduction], changes: dict[str, Any], sentence: str
) -> None:
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(InvalidArgument, match=sentence):
        reproduce("table6", f"activitynet={bank.path}", out=out, **{**QUICK, **changes})
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_samplers_of_other_settings_are_refused_before_anything_is_written(
    bank: Bank, out: Path, found: dict[str, Reproduction]
) -> None:
    with pytest.raises(InvalidArgument, match=r"paper-0: was trained with other settings: recipe.epochs was 1, is 2"):
        reproduce(["table1", "figureII"], f"activitynet={bank.path}", out=out, **{**QUICK, "epochs": 2})
    assert not (out / "activitynet" / "by-hand" / "figureII").exists()


def test_a_killed_run_goes_on(bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []
    plain = runner.train_one

    def counted(training: Any, folder: Path, *rest: Any, **more: Any) -> Any:
        if not (folder / "result.json").exists():
            trained.append(folder.name)
        return plain(training, folder, *rest, **more)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "train_one", counted)
    with monkeypatch.context() as patched:
        patched.setattr(runner, "evaluate_part", killed)
        with pytest.raises(KeyboardInterrupt):
            reproduce("figureII", {"own": bank}, out=tmp_path / "out", **QUICK)
    folder = tmp_path / "out" / "own" / "by-hand" / "figureII"
    assert sorted(path.name for path in folder.iterdir()) == ["run.json"]
    (one,) = reproduce("figureII", {"own": bank}, out=tmp_path / "out", **{**QUICK, "seeds": (0, 1)})
    assert trained == ["paper-0", "authors-0", "default-0"]
    assert one.result["metric"] == "top1", "the bank's own, where the data set is not the paper's"
    assert "another data set" in one.result["paper"]["column"]
    assert one.result["videos"]
    assert one.result["files"][0] == "report/index.html"


# ---- what is asked for


@pytest.mark.parametrize(
    ("names", "more", "sentence"),
    [
        (["table9"], {}, "'table9' is unknown; choose from"),
        ([], {}, "no experiment is named"),
        (["table1"], {"seeds": ()}, "seeds="),
        (["table1"], {"seeds": (1, 1)}, "each once"),
        (["table1"], {"epochs": 0}, "epochs=0"),
        (["table1"], {"settings": {"colour": 1}}, "colour: no such setting"),
        (["table1"], {"settings": {"seed": 1}}, "seed: no such setting"),
        (["table1"], {"weights": "nowhere.safetensors"}, "no such file"),
        (["table1"], {"classifiers": "resnet51"}, "resnet51"),
        (["figure1"], {}, "figure1: the classifier itself is needed; give --classifier FOLDER"),
        (["table5"], {}, "30 candidates are needed, but the bank stores at most 12"),
    ],
)
def test_bad_input_is_told_and_nothing_is_written(
    bank: Bank, tmp_path: Path, names: list[str], more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidArgument, match=sentence):
        reproduce(names, bank.path, out=tmp_path / "out", **{**QUICK, **more})
    assert not (tmp_path / "out").exists()


def test_bad_places_are_told(bank: Bank, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="two banks are called 'bank'"):
        reproduce("table1", [bank.path, bank.path], out=tmp_path / "out")
    with pytest.raises(InvalidArgument, match="nothing behind the ="):
        reproduce("table1", "activitynet=", out=tmp_path / "out")
    with pytest.raises(InvalidArgument, match="must be a name of letters"):
        reproduce("table1", f"../x={bank.path}", out=tmp_path / "out")
    with pytest.raises(InvalidArgument, match="is given twice"):
        reproduce("table1", bank.path, classifiers={"a": "by hand", "b": "a" * 16}, out=tmp_path / "out")
    with pytest.raises(InvalidArgument, match="lie inside each other"):
        reproduce("table1", bank.path, out=bank.path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="is a file; give a folder"):
        reproduce("table1", bank.path, out=tmp_path / "file")
    foreign = tmp_path / "out" / "bank" / "by-hand" / "table1"
    foreign.mkdir(parents=True)
    (foreign / "result.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="no reproduction wrote"):
        reproduce("table1", bank.path, out=tmp_path / "out")
    (foreign / "run.json").write_text('{"kind": "sampler"}')
    with pytest.raises(InvalidArgument, match="of something else"):
        reproduce("table1", bank.path, out=tmp_path / "out")


def test_a_folder_whose_name_has_a_sign_of_equality(bank: Bank, tmp_path: Path) -> None:
    shutil.copytree(bank.path, tmp_path / "a=b")
    (one,) = reproduce("table1", str(tmp_path / "a=b"), out=tmp_path / "out", **QUICK)
    assert one.folder == tmp_path / "out" / "a-b" / "by-hand" / "table1"
    assert one.result["bank"]["data"] is None


def test_what_was_measured_is_kept_where_nothing_can_be_drawn(
    bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*arguments: Any, **options: Any) -> Any:
        raise MissingDependency("a report needs jinja2; install sosampler[train]")

    monkeypatch.setattr("sosampler.paper.run.write_report", missing)
    (one,) = reproduce("figure2", bank.path, out=tmp_path, **QUICK)
    assert [row["row"] for row in one.result["rows"]] == ["uniform", "semi-optimal"]
    assert "not drawn: a report needs jinja2; install sosampler[train]" in one.result["notes"]
    assert one.result["files"] == ["table.csv", "table.md", "table.txt"]
