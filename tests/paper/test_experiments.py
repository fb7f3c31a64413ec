"""The paper's figures, the list of experiments and the recipes of their rows: whether they fit each other."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sosampler._util.validation import check_int
from sosampler.datasets.catalog import CATALOG
from sosampler.errors import InvalidArgument
from sosampler.paper import experiments
from sosampler.paper.experiments import (
    CURVE,
    EXPERIMENTS,
    FIDELITY,
    INDEPENDENCE,
    KINDS,
    RowRecipe,
    column_for,
    data_sets,
    experiments_of,
    list_experiments,
    named_data_set,
    paper_classifier,
    read_paper,
)
from sosampler.paper.plan import Training
from sosampler.paper.tables import with_titles
from sosampler.policies.registry import get_policy
from sosampler.samplers.recipe import SETTINGS, list_recipes, read_recipe, title_of
from sosampler.samplers.registry import TITLES

NAMES = {"semi_optimal": "semi-optimal", "ar_net": "ar-net"}
ROWS = read_paper()["rows"]


def figure(
    table: str, row: str, classifier: str | None, data: str, num_frames: int | None = None, T: Any = None
) -> Any:
    """The one figure that fits; N and T where they are given."""
    found = [
        told
        for told in ROWS
        if (told["table"], told["row"], told["classifier"], told["data"])
        == (table, NAMES.get(row, row), classifier, data)
        and num_frames in (None, told["num_frames"])
        and T in (None, told["num_candidates"])
    ]
    (one,) = found
    return one


# ---- paper.json


def test_every_figure_is_whole_and_stands_once() -> None:
    keys = Counter()
    for row in ROWS:
        assert row["data"] in data_sets()
        assert row["classifier"] in (None, *read_paper()["classifiers"])
        assert 0 < row["value"] <= 100
        assert row["metric"] == ("fidelity" if row["table"] == "table2" else data_sets()[row["data"]]["metric"])
        assert (row["num_frames"] is None) == (row["num_candidates"] is None)
        if row["num_frames"] is not None:
            assert check_int("N", row["num_frames"]) <= check_int("T", row["num_candidates"])
        for name in ("gmacs", "videos_per_second"):
            assert row.get(name, 1.0) > 0
        keys[tuple(row[name] for name in ("table", "row", "classifier", "data", "num_frames", "num_candidates"))] += 1
    assert set(keys.values()) == {1}
    assert {row["table"] for row in ROWS} == {f"table{name}" for name in (*range(1, 8), "I", "II")}


def test_what_the_paper_claims_follows_from_its_figures() -> None:
    for classifier in ("resnet50", "timesformer"):
        for data in ("activitynet", "mini_kinetics"):
            by = {
                name: figure("table1", name, classifier, data)["value"]
                for name in ("uniform", "semi-optimal", "optimal")
            }
            assert by["uniform"] < by["semi-optimal"] < by["optimal"]
        for wanted, count in ((8, 30), (16, 60), (32, 100)):
            ours, theirs = (
                figure("table5", name, classifier, "activitynet", wanted, count)["value"]
                for name in ("sosampler", "ocsampler")
            )
            assert ours > theirs
    losses = [row["value"] for row in ROWS if row["table"] == "table6"]
    assert all(low < high for low, high in pairwise(losses))
    # What is printed twice is the same.
    assert figure("table7", "sosampler", "resnet50", "activitynet", 6, 10)["value"] == 77.7
    assert figure("table3", "sosampler", "resnet50", "activitynet")["value"] == 77.7
    assert figure("table3", "ocsampler", "resnet50", "activitynet")["gmacs"] == 25.8


def test_the_figures_are_those_that_were_compared_with_the_paper() -> None:
    """Number for number with its tables; whoever changes one compares it again, and the digest with it."""
    assert hashlib.sha256(json.dumps(ROWS, sort_keys=True).encode()).hexdigest()[:16] == "4a2b672c128dc49a"
    assert (data_sets()["activitynet"]["train"], data_sets()["activitynet"]["test"]) == (10_024, 4_926)


# ---- which of the paper's columns stands beside


def test_the_column_of_the_same_data_set_and_classifier() -> None:
    column = column_for(("table3", "table1"), "mini_kinetics", "resnet50")
    assert column is not None
    assert (column.same_data, column.same_classifier) == (True, True)
    assert "orientation" not in column.title
    told = column.find("sosampler", 5, 10)
    assert told is not None
    assert told["value"] == 73.5
    assert column.find("sosampler", 6, 10) is None, "the paper's row has 5 frames"
    assert column.versus_uniform(told) is None, "uniform is printed for 6 frames alone"


def test_another_bank_gets_a_column_for_orientation() -> None:
    column = column_for(("table3", "table1"), None, None)
    assert column is not None
    assert (column.data, column.classifier) == ("activitynet", "resnet50")
    assert column.title == (
        "the paper on ActivityNet v1.3 with ResNet50; another data set and another classifier, for orientation only"
    )
    told = column.find("sosampler", 6, 10)
    assert told is not None
    assert column.versus_uniform(told) == pytest.approx(77.7 - 75.3)
    uniform = column.find("uniform", 6, 10)
    assert uniform is not None
    assert (uniform["table"], column.versus_uniform(uniform)) == ("table1", None)
    assert column_for(("table4",), "activitynet", "resnet50").data == "mini_sports1m"  # type: ignore[union-attr]
    assert column_for(("table6", "table1"), "activitynet", "resnet50").classifier == "timesformer"  # type: ignore[union-attr]
    assert column_for((), "activitynet", "resnet50") is None


def test_all_candidates_are_compared_with_the_only_uniform_row() -> None:
    column = column_for(("table1",), "activitynet", "timesformer")
    assert column is not None
    told = column.find("all", 10, 10)
    assert told is not None
    assert column.versus_uniform(told) == pytest.approx(2.0)  # as printed


def test_systems_without_a_number_of_frames_fit_any() -> None:
    column = column_for(("table3", "table1"), "activitynet", "resnet50")
    assert column is not None
    told = column.find("frameexit", None, 10)
    assert told is not None
    assert (told["value"], column.versus_uniform(told)) == (76.1, None)
    made = ("liteeval", "scsampler", "frameexit", "ocsampler", "ar-net", "videoiq", "adafocus")
    others = [row["row"] for row in column.rows("table3") if row["row"] not in made]
    assert others == ["sosampler"]


def test_names_of_networks() -> None:
    assert paper_classifier("slowonly_r50") == "slowonly50"
    assert paper_classifier("x3d_s") == "x3d_s"
    assert paper_classifier("TimeSformer") == "timesformer"
    assert paper_classifier("timm:vit_base") is None
    others = ("timm:wide_resnet50_2", "timm:seresnet50", "slowonly101", "timm:resnet50d", "my_resnet50v2", "x3d_m")
    assert [paper_classifier(name) for name in others] == [None] * len(others)
    assert paper_classifier("timm:resnet50.a1_in1k") == "resnet50"
    assert all(paper_classifier(name) == name for name in read_paper()["classifiers"])
    assert (data_sets()["activitynet"]["metric"], data_sets()["coin"]["metric"]) == ("mAP", "top1")


def test_names_of_data_sets() -> None:
    same = ("ActivityNet", "activitynet-v1.3", "ACTIVITYNET_V1.3", "activitynet")
    assert [named_data_set(name) for name in same] == ["activitynet"] * len(same)
    assert [named_data_set(known.name) for known in CATALOG][:4] == list(data_sets())
    assert [named_data_set(name) for name in ("reels", "kinetics-400", "activitynet2")] == [None, None, None]


def test_metrics_are_those_of_the_catalog() -> None:
    told = {named_data_set(known.name): known.metric.replace("top-1", "top1") for known in CATALOG}
    assert {name: told[name] for name in data_sets()} == {name: one["metric"] for name, one in data_sets().items()}


def test_what_a_reader_of_the_papers_figures_should_know() -> None:
    def notes(tables: tuple[str, ...], data: str, classifier: str) -> str:
        column = column_for(tables, data, classifier)
        assert column is not None
        return "; ".join(column.notes())

    assert "another number of frames" in notes(("table3", "table1"), "activitynet", "slowonly50")
    assert "leave out attention" in notes(("table3", "table1"), "activitynet", "timesformer")
    assert notes(("table5",), "activitynet", "timesformer") == "", "no GFLOPs are printed there"
    assert "text says mAP for COIN, its tables top-1" in notes(("table4",), "coin", "resnet50")
    assert notes(("table3", "table1"), "activitynet", "resnet50") == ""
    for note in read_paper()["notes"]:
        assert note["classifier"] in read_paper()["classifiers"]
        assert set(note["tables"]) <= {row["table"] for row in ROWS}


# ---- experiments and recipes


@pytest.mark.parametrize("name", list_experiments())
def test_recipes_fit_their_experiment(name: str) -> None:
    experiment = EXPERIMENTS[name]
    assert experiment.kind in KINDS
    assert set(experiment.data) <= set(data_sets())
    assert bool(experiment.rows) == (experiment.kind != INDEPENDENCE)
    shown = set()
    for recipe in EXPERIMENTS[name].rows:
        assert (recipe.policy is None) != (recipe.sampler is None), "a policy or a sampler"
        assert recipe.sampler or not (recipe.recipe or recipe.settings or recipe.threshold)
        assert set(recipe.data) <= set(experiment.data)
        assert set(recipe.classifier) <= set(read_paper()["classifiers"])
        assert recipe.policy is None or get_policy(recipe.policy, teacher=True).name == recipe.policy
        for other in recipe.exceptions:
            assert other["data"] in recipe.data
            assert other["classifier"] in recipe.classifier
        for pair in recipe.pairs:
            assert check_int("N", pair[0]) <= check_int("T", pair[1])
            assert (recipe.row, pair) not in shown, "a row stands once"
            shown.add((recipe.row, pair))
            if recipe.sampler is not None:
                Training.of(recipe.sampler, recipe.recipe, recipe.settings_for(pair), {}).full_recipe()
    if experiment.kind not in (FIDELITY, INDEPENDENCE):
        assert experiment.rows[0].row == "uniform", "what the others are measured against"


@pytest.mark.parametrize("name", [name for name in list_experiments() if name.startswith("table")])
def test_every_row_of_a_table_is_made_or_known_to_be_elsewhere(name: str) -> None:
    made = {recipe.paper_row for recipe in EXPERIMENTS[name].rows}
    printed = {row["row"] for row in ROWS if row["table"] == name}
    assert printed - made <= set(read_paper()["elsewhere"])
    for row in (row for row in ROWS if row["table"] == name and row["row"] in made):
        fitting = [
            recipe
            for recipe in EXPERIMENTS[name].rows
            if recipe.paper_row == row["row"]
            and row["data"] in recipe.data
            and (row["classifier"] is None or row["classifier"] in recipe.classifier)
        ]
        assert fitting, row
        if row["num_frames"] is not None and row["row"] != "all":
            pairs = {pair for one in fitting for pair in one.pairs_for(row["data"], row["classifier"])}
            assert (row["num_frames"], row["num_candidates"]) in pairs, row


def test_mini_kinetics_with_a_resnet_has_five_frames() -> None:
    recipe = next(recipe for recipe in EXPERIMENTS["table3"].rows if recipe.row == "ocsampler")
    assert recipe.pairs_for("mini_kinetics", "resnet50") == ((5, 10),)
    assert recipe.pairs_for("mini_kinetics", "timesformer") == recipe.pairs_for(None, "resnet50") == ((6, 10),)
    settings = recipe.settings_for((5, 10))
    assert settings == {"num_candidates": 10, "reinforce": {"num_frames": 5}}
    trained = Training.of("ocsampler", None, settings, {})
    assert trained.full_recipe().reinforce["num_frames"] == 5
    assert trained.full_recipe().reinforce["reward"] == "confidence", "the rest is that of the recipe"
    assert trained.name == "ocsampler-reinforce-num_frames-5"


def test_the_same_settings_are_one_training() -> None:
    plain = Training.of("sosampler", "paper", {}, {})
    assert plain.name == Training.of("sosampler", "paper", {"num_candidates": 10}, {}).name == "paper"
    changed = Training.of("sosampler", "paper", {"num_candidates": 30}, {"epochs": 1, "batch_size": 4})
    assert changed.name == "paper-num_candidates-30"
    assert (changed.full_recipe().epochs, changed.full_recipe(seed=3).seed) == (1, 3)
    system = Training.of("frameexit", None, {}, {"epochs": 1, "backbone": "timm:x"})
    assert (system.is_baseline, system.settings, system.full_recipe().epochs) == (True, {"epochs": 1}, 1)
    long = Training.of("sosampler", "paper", {"scoring": {"belief": 1.0, "relevance": [4.0] * 20}}, {})
    other = Training.of("sosampler", "paper", {"scoring": {"belief": 1.0, "relevance": [5.0] * 20}}, {})
    assert len(long.name) <= 80
    assert long.name != other.name


# ---- the authors' settings

DOCS = Path(__file__).parents[2] / "docs" / "reproduce.md"
PLACES = {
    "ActivityNet": "activitynet",
    "Mini-Kinetics": "mini_kinetics",
    "Mini-Sports1M": "mini_sports1m",
    "ResNet-50": "resnet50",
    "TimeSformer": "timesformer",
}
STEPS = {"activitynet": 20 * 314, "mini_sports1m": 20 * 146, "coin": 20 * 250}  # of TimeSformer's configurations


def authors_recipe(data: str | None, classifier: str | None, table: str = "table3") -> Any:
    row = next(row for row in EXPERIMENTS[table].rows if row.row == "sosampler-authors")
    training = Training.of_row(row, (6, 10), data, classifier, {})
    assert training is not None
    assert training.name == "authors", "whatever its settings are here"
    return training.full_recipe()


def test_the_authors_settings_are_those_of_the_page() -> None:
    lines = [line for line in DOCS.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    (head,) = (line for line in lines if line.startswith("| configuration |"))
    names = [name.strip() for name in head.strip("|").split("|")]
    listed = [
        dict(zip(names, map(str.strip, line.strip("|").split("|")), strict=True))
        for line in lines
        if "Net, " in line or "Mini-" in line
    ]
    assert len(listed) == 6
    for told in listed:
        data, classifier = (PLACES[name] for name in told["configuration"].split(", "))
        recipe = authors_recipe(data, classifier)
        assert recipe.num_candidates == int(told["T to N"].split()[0])
        assert (recipe.batch_size, recipe.epochs) == (int(told["batch"]), int(told["epochs"]))
        assert recipe.lr == pytest.approx(float(told["rate"]), abs=1e-5)
        assert recipe.warmup == pytest.approx(1500 / STEPS[data] if told["warm-up"] else 0, abs=5e-4)
        assert (recipe.target, recipe.class_head) == (told["target"], told["label guidance"] == "on")
        numbers = [recipe.lam, recipe.margin, recipe.tau, recipe.dropout]
        assert numbers == [float(told[name]) for name in ("λ", "margin", "τ", "dropout")]
        assert recipe.shift == (0 if told["shift"] == "none" else int(told["shift"]))
        unchanged = authors_recipe(None, classifier)
        for name in ("loss", "prediction", "weighted", "optimizer", "clip", "guidance", "crop_scale"):
            assert getattr(recipe, name) == getattr(unchanged, name)


def test_places_without_a_configuration_have_the_nearest() -> None:
    assert authors_recipe("activitynet", "x3d_s") == authors_recipe("activitynet", "resnet50")
    assert authors_recipe("mini_kinetics", None) == authors_recipe("mini_kinetics", "resnet50")
    assert authors_recipe(None, "timesformer") == read_recipe("authors", pretrain=10)
    coin, activitynet = (authors_recipe(data, "timesformer") for data in ("coin", "activitynet"))
    assert coin.changed(warmup=activitynet.warmup) == activitynet
    assert coin.warmup == pytest.approx(1500 / STEPS["coin"])
    # The row's own number of candidates comes first, the user's settings before all.
    row = next(row for row in EXPERIMENTS["tableI"].rows if row.row == "sosampler-authors")
    training = Training.of_row(row, (8, 30), "mini_kinetics", "resnet50", {"lr": 1.0, "epochs": 2})
    assert training is not None
    assert training.name == "authors-num_candidates-30"
    recipe = training.full_recipe()
    assert (recipe.num_candidates, recipe.lr, recipe.epochs, recipe.shift) == (30, 1.0, 2, 8)


def test_the_stage_before_training_is_a_setting_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "SETTINGS", (*SETTINGS, "pretrain"))
    rows = {row.row: row for row in EXPERIMENTS["table3"].rows}
    table6 = {row.row: row.recipe_changes("activitynet", "timesformer") for row in EXPERIMENTS["table6"].rows}
    assert table6["mse-label"] == table6["ranking-max-lg"] == {"pretrain": 10}
    stages = {name: row.recipe_changes(None, None).get("pretrain") for name, row in rows.items()}
    pretrained = dict.fromkeys(("ocsampler", "sosampler", "sosampler-authors"), 10)
    assert {name: stage for name, stage in stages.items() if stage is not None} == pretrained
    authors = rows["sosampler-authors"]
    assert authors.recipe_changes("activitynet", "resnet50")["pretrain"] == 10
    assert authors.recipe_changes("activitynet", "timesformer")["pretrain"] == 0, "it starts from ImageNet"
    short = Training.of("sosampler", "paper", {}, {"epochs": 3}, {"pretrain": 10})
    assert short.recipe_changes == {"pretrain": 3}, "no longer than the training itself"
    monkeypatch.setattr(experiments, "SETTINGS", tuple(name for name in SETTINGS if name != "pretrain"))
    assert authors.recipe_changes(None, None) == {}


# ---- names


def test_names_of_samplers() -> None:
    assert set(TITLES) == set(list_recipes())
    for name, title in TITLES.items():
        assert title_of(read_recipe(name, seed=5).to_dict()) == title
    old = read_recipe("paper").to_dict()
    del old["ema"]
    assert title_of(old) == "SOSampler (paper)", "written before there was this setting"
    assert title_of({**old, "lr": 1.0, "shift": 0}) == "SOSampler (paper), other shift, lr"
    assert title_of({**old, "name": "mine"}) == "mine"


def test_results_of_older_versions_get_the_names_of_today() -> None:
    paper = {"score": 77.7, "metric": "mAP"}
    titles = [
        "SOSampler",
        "SOSampler, authors' code",
        "SOSampler, our recipe",
        "SOSampler with as many frames",
        "uniform",
    ]
    old = {
        "rows": [{"title": title, "paper": paper} for title in titles],
        "left_out": [{"title": titles[2], "paper": paper}],
    }
    new = with_titles(old)
    assert [row["title"] for row in new["rows"]] == [
        *("SOSampler (paper)", "SOSampler (authors' code)", "SOSampler+", "SOSampler (paper)", "uniform")
    ]
    assert [row["paper"] is None for row in new["rows"]] == [False, False, True, False, False]
    assert new["left_out"] == [{"title": "SOSampler+", "paper": None}]
    assert old["rows"][2]["paper"] is paper
    assert with_titles(new) == new


def test_unknown_keys_of_a_row_are_refused() -> None:
    with pytest.raises(TypeError, match="colour"):
        RowRecipe(row="a", title="a", classifier=(), data=(), pairs=((6, 10),), policy="uniform", colour="red")  # type: ignore[call-arg]


def test_all_is_what_the_paper_has_for_the_data_set() -> None:
    assert [one.name for one in experiments_of("all")] == list_experiments()
    assert [one.name for one in experiments_of(["all"], "coin")] == ["table4", "tableI"]
    assert [one.name for one in experiments_of(["figureI", "table1", "table1"])] == ["table1", "figureI"]
    assert [one.name for one in experiments_of(["table1"], "coin")] == ["table1"], "what is named is done"
    with pytest.raises(InvalidArgument, match="'table9' is unknown; choose from: table1"):
        experiments_of(["table9"])
    with pytest.raises(InvalidArgument, match="no experiment is named"):
        experiments_of([])
    assert EXPERIMENTS["figureI"].kind == CURVE
