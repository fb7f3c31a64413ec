"""The tables and figures of the paper: their rows (experiments.yaml) and what the paper prints in them (paper.json)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from sosampler.errors import InvalidArgument
from sosampler.samplers.recipe import SETTINGS, read_mapping
from sosampler.samplers.registry import OWN_RECIPE, RECIPES, TITLES

ACCURACY, FIDELITY, THROUGHPUT = "accuracy", "fidelity", "throughput"  # tables
CURVE, CASES, INDEPENDENCE = "curve", "cases", "independence"  # figures

KINDS = {
    ACCURACY: "table of accuracy and cost",
    FIDELITY: "table of fidelity to the optimal choice",
    THROUGHPUT: "table of accuracy, cost and videos a second",
    CURVE: "curves of accuracy against frames and cost",
    CASES: "videos with the frames that were chosen",
    INDEPENDENCE: "densities of the similarity of neighbouring frames",
}
EVERYTHING = "all"

Pair = tuple[int, int]  # N, T


@dataclass(frozen=True)
class RowRecipe:
    """One row of an experiment: a policy or a trained sampler, and how many frames it chooses of how many."""

    row: str
    title: str
    classifier: tuple[str, ...]  # with which the paper prints it
    data: tuple[str, ...]
    pairs: tuple[Pair, ...]
    policy: str | None = None
    sampler: str | None = None
    recipe: str | None = None  # None: the sampler's own
    settings: dict[str, Any] = field(default_factory=dict)
    threshold: str | None = None  # of a baseline: "all" for a row of each
    paper_row: str | None = None  # its name in paper.json; None: the paper has no figure of it
    exceptions: tuple[dict[str, Any], ...] = ()  # other numbers of frames for a data set and a classifier
    note: str = ""

    def pairs_for(self, data: str | None, classifier: str | None) -> tuple[Pair, ...]:
        """Return N and T for a data set and a classifier of the paper."""
        for other in self.exceptions:
            if other["data"] == data and other["classifier"] == classifier:
                return tuple((other["num_frames"], count) for _, count in self.pairs)
        return self.pairs

    def settings_for(self, pair: Pair) -> dict[str, Any]:
        """Return the settings with the numbers of a pair in place of N and T."""

        def filled(settings: dict[str, Any]) -> dict[str, Any]:
            numbers = {"N": pair[0], "T": pair[1]}
            return {
                key: filled(value) if isinstance(value, dict) else numbers.get(str(value), value)
                for key, value in settings.items()
            }

        return filled(self.settings)

    def recipe_changes(self, data: str | None, classifier: str | None) -> dict[str, Any]:
        """Return what changes in the recipe of every row with a data set and a classifier of the paper."""
        name = self.recipe or RECIPES.get(self.sampler or "", "")
        changes = _RECIPE_CHANGES.get(name, {})
        by_classifier = changes.get(data, {})
        own = by_classifier.get(classifier, by_classifier.get(_FIRST_CLASSIFIER, {}))
        return {key: value for key, value in {**changes.get("all", {}), **own}.items() if key in SETTINGS}


@dataclass(frozen=True)
class Experiment:
    """One table or figure."""

    name: str
    kind: str
    title: str
    claim: str  # what the paper concludes from it
    data: tuple[str, ...]  # the paper's data sets
    rows: tuple[RowRecipe, ...] = ()  # in the order in which they are shown
    tables: tuple[str, ...] = ()  # where the paper prints figures of these rows; the first is the table itself
    # Cases: videos that the sampler gets right and uniform wrong, or the other way round; None: the first videos.
    success: bool | None = None


_FIRST_CLASSIFIER = "resnet50"
_SOSAMPLER = "sosampler"
# Rows of SOSampler: the key of each recipe, and its footnote.
_SOSAMPLER_ROWS = {
    "paper": (_SOSAMPLER, "trained as the paper prints it"),
    "authors": (
        f"{_SOSAMPLER}-authors",
        "trained by the authors' configuration for this data set and classifier, or the nearest that they have",
    ),
    "default": (f"{_SOSAMPLER}-default", f"{OWN_RECIPE}; the paper has no figure of it"),
}


def _rows_of(key: str, keys: dict[str, Any], data: tuple[str, ...]) -> list[RowRecipe]:
    """Return the row of an entry; of SOSampler without a recipe one for each of its recipes."""
    if keys.get("sampler") == _SOSAMPLER and "recipe" not in keys:
        rows = []
        for recipe, (row, note) in _SOSAMPLER_ROWS.items():
            is_own = recipe == "default"
            settings = {} if is_own else keys.get("settings", {})
            if keys.get("settings"):
                note += "; one sampler for all N and T" if is_own else "; with as many candidates as it chooses from"
            more = {"row": row, "recipe": recipe, "settings": settings, "paper_row": None if is_own else key}
            rows += _rows_of(key, {**keys, **more, "note": "; ".join(filter(None, [note, keys.get("note")]))}, data)
        return rows
    row = keys.get("row", key)
    recipe = keys.get("recipe") or RECIPES.get(keys.get("sampler", ""), "")
    given: dict[str, Any] = {"row": row, "title": TITLES.get(recipe, row), "paper_row": row, "data": data, **keys}
    given["pairs"] = [tuple(pair) for pair in given["pairs"]]
    given |= {name: tuple(given.get(name, ())) for name in ("classifier", "data", "pairs", "exceptions")}
    return [RowRecipe(**given)]


def _read_experiments() -> tuple[dict[str, Experiment], dict[str, Any]]:
    """Return the experiments, and the changes to recipes: {recipe: {"all" or data set: settings}}."""
    text = files("sosampler.paper").joinpath("experiments.yaml").read_text(encoding="utf-8")
    listed = read_mapping(text, "experiments.yaml", aliases=True)
    changes = listed.pop("recipes")
    experiments = {}
    for name, values in listed.items():
        data, tables = tuple(values.pop("data")), tuple(values.pop("tables", ()))
        rows = [row for key, keys in values.pop("rows", {}).items() for row in _rows_of(key, keys, data)]
        experiments[name] = Experiment(name, data=data, rows=tuple(rows), tables=tables, **values)
    return experiments, changes


EXPERIMENTS, _RECIPE_CHANGES = _read_experiments()


def list_experiments() -> list[str]:
    """Return the names that `reproduce` takes, besides "all".

    >>> list_experiments()[:3]
    ['table1', 'table2', 'table3']
    """
    return list(EXPERIMENTS)


def experiments_of(names: Iterable[str] | str, data: str | None = None) -> list[Experiment]:
    """Return the named experiments, each once and in the paper's order.

    "all" is every one that the paper has for this data set; for None it is all.
    """
    listed = [names] if isinstance(names, str) else list(names)
    known = f"{', '.join(EXPERIMENTS)}, or {EVERYTHING}"
    if not listed:
        raise InvalidArgument(f"no experiment is named; give some of: {known}")
    for name in listed:
        if name not in (EVERYTHING, *EXPERIMENTS):
            raise InvalidArgument(f"experiment={name!r} is unknown; choose from: {known}")
    fitting = [one for one in EXPERIMENTS.values() if EVERYTHING in listed and (data is None or data in one.data)]
    return [one for name, one in EXPERIMENTS.items() if name in listed or one in fitting]


# ---- paper.json

PaperRow = dict[str, Any]
"""table, row, classifier, data, num_frames, num_candidates, metric, value; gmacs, videos_per_second where printed."""

# Names of networks, without what stands before a ":" or "/" and behind a ".", and what the paper calls them.
_CLASSIFIER_NAMES = (
    (r"timesformer([-_]base.*)?", "timesformer"),
    (r"slow[-_]?only[-_]?(r|resnet)?[-_]?50|slow_r50", "slowonly50"),
    (r"x3d[-_]?s", "x3d_s"),
    (r"resnet[-_]?50([-_]v1)?", "resnet50"),
)
_WITH_UNIFORM = ("table1", "table5")  # tables that have a row of uniform frames
_UNIFORM = "uniform"


@cache
def read_paper() -> dict[str, Any]:
    """Return paper.json: source, data_sets, classifiers, elsewhere (methods that this package lacks), notes, rows."""
    paper: dict[str, Any] = json.loads(files("sosampler.paper").joinpath("paper.json").read_text(encoding="utf-8"))
    return paper


def data_sets() -> dict[str, dict[str, Any]]:
    """Return the paper's data sets by the names that `--bank NAME=FOLDER` takes."""
    sets: dict[str, dict[str, Any]] = read_paper()["data_sets"]
    return sets


def named_data_set(name: str) -> str | None:
    """Return the data set of the paper that a name means, whatever its case, dashes and version; None for others.

    >>> named_data_set("ActivityNet-v1.3"), named_data_set("mini-kinetics"), named_data_set("reels")
    ('activitynet', 'mini_kinetics', None)
    """
    plain = re.sub(r"[-_. ]*v?1[._]3$", "", name.lower()).replace("-", "_")
    return plain if plain in data_sets() else None


def paper_classifier(name: str) -> str | None:
    """Return which of the paper's classifiers a network is, by its full name.

    >>> paper_classifier("resnet50_v1"), paper_classifier("hf:facebook/timesformer-base"), paper_classifier("i3d")
    ('resnet50', 'timesformer', None)
    >>> paper_classifier("timm:wide_resnet50_2"), paper_classifier("timm:resnet50.a1_in1k")
    (None, 'resnet50')
    """
    plain = re.split(r"[:/]", name.lower())[-1].partition(".")[0]
    return next((in_paper for pattern, in_paper in _CLASSIFIER_NAMES if re.fullmatch(pattern, plain)), None)


@dataclass(frozen=True)
class PaperColumn:
    """The column of the paper that is shown beside a measurement."""

    tables: tuple[str, ...]  # where figures are looked up, in this order
    data: str
    classifier: str | None  # None: the table does not name one
    same_data: bool  # whether the measurement is of this very data set
    same_classifier: bool

    @property
    def title(self) -> str:
        """What it shows, and a warning where data set or classifier differ.

        >>> PaperColumn(("table3",), "coin", "resnet50", False, True).title
        'the paper on COIN with ResNet50; another data set, for orientation only'
        """
        network = f" with {read_paper()['classifiers'][self.classifier]}" if self.classifier else ""
        same = {"data set": self.same_data, "classifier": self.same_classifier}
        others = [f"another {word}" for word, is_same in same.items() if not is_same]
        warning = f"; {' and '.join(others)}, for orientation only" if others else ""
        return f"the paper on {data_sets()[self.data]['title']}{network}{warning}"

    def notes(self) -> list[str]:
        """Return what a reader of these figures should know."""
        notes = [
            str(note["text"])
            for note in read_paper()["notes"]
            if note["classifier"] == self.classifier and not set(note["tables"]).isdisjoint(self.tables)
        ]
        of_data = data_sets()[self.data].get("note")
        return [*notes, of_data] if of_data else notes

    def rows(self, table: str) -> list[PaperRow]:
        """Return the rows of a table in this column."""
        return [
            row
            for row in read_paper()["rows"]
            if row["table"] == table and row["data"] == self.data and row["classifier"] in (None, self.classifier)
        ]

    def find(self, row: str, num_frames: int | None, num_candidates: int) -> PaperRow | None:
        """Return the figure of a row; where the paper gives no number of frames, any N and T fit."""
        figures = (figure for table in self.tables for figure in self.rows(table) if figure["row"] == row)
        wanted = (None, num_frames), (None, num_candidates)
        fitting = (one for one in figures if one["num_frames"] in wanted[0] and one["num_candidates"] in wanted[1])
        return next(fitting, None)

    def versus_uniform(self, figure: PaperRow) -> float | None:
        """Return the points above uniform with the same N and T, where the paper has both."""
        if figure["num_frames"] is None or figure["metric"] == FIDELITY or figure["row"] == _UNIFORM:
            return None
        for table in dict.fromkeys([figure["table"], *_WITH_UNIFORM]):
            for other in self.rows(table):
                wanted = figure["num_frames"] if figure["row"] != "all" else other["num_frames"]
                same = (other["num_frames"], other["num_candidates"]) == (wanted, figure["num_candidates"])
                if other["row"] == _UNIFORM and same:
                    return round(float(figure["value"]) - float(other["value"]), 4)
        return None


def column_for(
    tables: Sequence[str], data: str | None, classifier: str | None, *, in_any: bool = False
) -> PaperColumn | None:
    """Return the column of a data set and a classifier; where the first table lacks it, the first that it has.

    `in_any`: any of the tables may have the column, as for figures, which print no numbers themselves.
    """
    searched = tables if in_any else tables[:1]
    rows = [row for table in searched for row in read_paper()["rows"] if row["table"] == table]
    if not rows:
        return None
    available = [row["data"] for row in rows]
    chosen = str(data if data in available else available[0])
    networks = [row["classifier"] for row in rows if row["data"] == chosen and row["classifier"]]
    if not networks:
        return PaperColumn(tuple(tables), chosen, None, chosen == data, True)
    most_common = _FIRST_CLASSIFIER if _FIRST_CLASSIFIER in networks else networks[0]
    network = classifier if classifier in networks else most_common
    return PaperColumn(tuple(tables), chosen, network, chosen == data, network == classifier)
