"""What each table and figure of the paper needs and makes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from sosampler.errors import InvalidArgument

ACCURACY = "accuracy"  # a table of accuracy and cost
FIDELITY = "fidelity"  # a table of the share of the optimal set that was chosen
THROUGHPUT = "throughput"  # a table of accuracy, cost and videos a second
CURVE = "curve"  # accuracy against frames and against cost, drawn
CASES = "cases"  # single videos with the frames that were chosen
INDEPENDENCE = "independence"  # densities of the likeness of neighbouring frames

KINDS = {
    ACCURACY: "table of accuracy and cost",
    FIDELITY: "table of fidelity to the optimal choice",
    THROUGHPUT: "table of accuracy, cost and videos a second",
    CURVE: "curves of accuracy against frames and cost",
    CASES: "videos with the frames that were chosen",
    INDEPENDENCE: "densities of the likeness of neighbouring frames",
}

EVERYTHING = "all"
_ANET, _KINETICS, _SPORTS, _COIN = "activitynet", "mini_kinetics", "mini_sports1m", "coin"


@dataclass(frozen=True)
class Experiment:
    """One table or figure."""

    name: str
    kind: str
    title: str
    claim: str  # what the paper says that it shows
    data: tuple[str, ...]  # the paper's data sets
    rows: tuple[str, ...] = ()  # names of the files in recipes/<name>/, in the order in which they are shown
    tables: tuple[str, ...] = ()  # where the paper prints figures of these rows; the first is the table itself
    # Cases: what the sampler does right and uniform wrong, or the other way round; None: the first videos.
    success: bool | None = None

    @property
    def metric(self) -> str:
        """What its recipes call their metric."""
        return ACCURACY if self.kind == CURVE else self.kind


_SMALL = ("uniform", "liteeval", "scsampler", "frameexit", "ocsampler", "sosampler", "sosampler-authors")
_LARGE = ("uniform", "ocsampler", "sosampler", "sosampler-default")
_CASES = ("uniform", "sosampler", "semi-optimal", "optimal")

_EXPERIMENTS = (
    Experiment(
        "table1",
        ACCURACY,
        "The optimal and the semi-optimal policy",
        "Frames that are scored one by one come near to the best set of frames, and both are far above uniform.",
        (_ANET, _KINETICS),
        ("uniform", "all", "semi-optimal", "optimal"),
        ("table1",),
    ),
    Experiment(
        "table2",
        FIDELITY,
        "Fidelity to the optimal choice",
        "The semi-optimal policy shares most frames with the optimal one, a fixed order as many as chance.",
        (_ANET, _KINETICS),
        ("random", "frameexit", "semi-optimal"),
        ("table2",),
    ),
    Experiment(
        "table3",
        ACCURACY,
        "Few frames of few candidates: ActivityNet and Mini-Kinetics",
        "SOSampler is ahead of other systems at the same or a lower cost, whatever the classifier.",
        (_ANET, _KINETICS),
        (*_SMALL, "sosampler-default"),
        ("table3", "table1"),
    ),
    Experiment(
        "table4",
        ACCURACY,
        "Few frames of few candidates: Mini-Sports1M and COIN",
        "SOSampler is ahead of other systems at the same or a lower cost on two more data sets.",
        (_SPORTS, _COIN),
        ("uniform", "liteeval", "scsampler", "ocsampler", "sosampler", "sosampler-default"),
        ("table4",),
    ),
    Experiment(
        "table5",
        ACCURACY,
        "Many frames of many candidates, long videos",
        "SOSampler stays above uniform as N and T grow; OCSampler, which searches sets of frames, falls behind.",
        (_ANET, _SPORTS),
        _LARGE,
        ("table5",),
    ),
    Experiment(
        "table6",
        ACCURACY,
        "Which loss",
        "Ranking is better than squared errors, the highest confidence better than the label's, and label guidance "
        "helps a little.",
        (_ANET,),
        ("uniform", "mse-label", "mse-label-lg", "ranking-label", "ranking-label-lg", "ranking-max-lg"),
        ("table6", "table1"),
    ),
    Experiment(
        "table7",
        ACCURACY,
        "How many frames of how many candidates",
        "More frames and more candidates help, each a little less than the one before.",
        (_ANET,),
        ("uniform", "sosampler-6-of-6", "sosampler", "sosampler-default"),
        ("table7", "table1"),
    ),
    Experiment(
        "tableI",
        ACCURACY,
        "Many frames of many candidates, short videos",
        "Where neighbouring frames are alike the gain is small, but SOSampler stays ahead of OCSampler.",
        (_KINETICS, _COIN),
        _LARGE,
        ("tableI",),
    ),
    Experiment(
        "tableII",
        THROUGHPUT,
        "Videos a second",
        "SOSampler takes fewer multiply-adds than other systems and classifies more videos a second.",
        (_ANET,),
        ("uniform", "adaframe", "frameexit", "ocsampler", "sosampler", "sosampler-6"),
        ("tableII", "table3", "table1"),
    ),
    Experiment(
        "figure1",
        INDEPENDENCE,
        "How alike neighbouring frames are",
        "Up to one frame a second frames stand by themselves; five a second are on the borderline.",
        (_ANET,),
    ),
    Experiment(
        "figure2",
        CASES,
        "What the semi-optimal policy chooses",
        "Each frame is scored by itself, and the six surest are taken.",
        (_ANET,),
        ("uniform", "semi-optimal"),
        ("table1",),
    ),
    Experiment(
        "figure4",
        CURVE,
        "Accuracy by sampler across N of T",
        "OCSampler falls below uniform from 16 of 60 on, SOSampler does not.",
        (_ANET,),
        _LARGE,
        ("table5", "table3", "table1"),
    ),
    Experiment(
        "figureI",
        CURVE,
        "Accuracy against cost",
        "At every cost SOSampler is ahead of the other systems.",
        (_ANET,),
        ("uniform", "liteeval", "scsampler", "frameexit", "ocsampler", "sosampler", "sosampler-default"),
        ("table7", "table3", "table1"),
    ),
    Experiment(
        "figureII",
        CASES,
        "Where SOSampler does well",
        "On most videos it chooses nearly as the semi-optimal and the optimal policy do.",
        (_ANET,),
        _CASES,
        ("table3", "table1"),
        success=True,
    ),
    Experiment(
        "figureIII",
        CASES,
        "Where SOSampler fails",
        "On some videos it scatters its frames while the semi-optimal policy finds the right part.",
        (_ANET,),
        _CASES,
        ("table3", "table1"),
        success=False,
    ),
)

EXPERIMENTS = {experiment.name: experiment for experiment in _EXPERIMENTS}


def list_experiments() -> list[str]:
    """Names that `reproduce` takes, besides "all".

    >>> list_experiments()[:3]
    ['table1', 'table2', 'table3']
    """
    return list(EXPERIMENTS)


def experiments_of(names: Iterable[str] | str, data: str | None = None) -> list[Experiment]:
    """The experiments that are meant, each once and in the paper's order.

    Args:
        names: of experiments; "all" is every one that the paper has for this data set.
        data: one of the paper's data sets, or None, for which "all" is all.
    """
    asked: Sequence[str] = [names] if isinstance(names, str) else list(names)
    if not asked:
        raise InvalidArgument(f"no experiment is named; give some of: {', '.join(EXPERIMENTS)}, or {EVERYTHING}")
    wanted = set()
    for name in asked:
        if name == EVERYTHING:
            wanted |= {one.name for one in _EXPERIMENTS if data is None or data in one.data}
        elif name in EXPERIMENTS:
            wanted.add(name)
        else:
            raise InvalidArgument(
                f"experiment={name!r} is unknown; choose from: {', '.join(EXPERIMENTS)}, or {EVERYTHING}"
            )
    return [experiment for experiment in _EXPERIMENTS if experiment.name in wanted]


PaperRow = dict[str, Any]
"""table, row, classifier, data, num_frames, num_candidates, metric, value; gmacs, videos_per_second where printed."""

# Names of networks without what stands before a ":" or "/" and behind a ".", and what the paper calls them.
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
    """All of paper.json: source, data_sets, classifiers, elsewhere (systems that this package lacks), notes, rows."""
    found: dict[str, Any] = json.loads(files("sosampler.paper").joinpath("paper.json").read_text(encoding="utf-8"))
    return found


def data_sets() -> dict[str, dict[str, Any]]:
    """The paper's data sets by the names that `--bank NAME=FOLDER` takes."""
    found: dict[str, dict[str, Any]] = read_paper()["data_sets"]
    return found


def named_data_set(name: str) -> str | None:
    """The data set of the paper that a name means, whatever its case, dashes and version; None for others.

    >>> named_data_set("ActivityNet-v1.3"), named_data_set("mini-kinetics"), named_data_set("reels")
    ('activitynet', 'mini_kinetics', None)
    """
    plain = re.sub(r"[-_. ]*v?1[._]3$", "", name.lower()).replace("-", "_")
    return plain if plain in data_sets() else None


def paper_classifier(name: str) -> str | None:
    """Which of the paper's classifiers a network is, by its whole name.

    >>> paper_classifier("resnet50_v1"), paper_classifier("hf:facebook/timesformer-base"), paper_classifier("i3d")
    ('resnet50', 'timesformer', None)
    >>> paper_classifier("timm:wide_resnet50_2"), paper_classifier("timm:resnet50.a1_in1k")
    (None, 'resnet50')
    """
    plain = re.split(r"[:/]", name.lower())[-1].partition(".")[0]
    return next((told for known, told in _CLASSIFIER_NAMES if re.fullmatch(known, plain)), None)


@dataclass(frozen=True)
class PaperColumn:
    """Which of the paper's columns stands beside a measurement."""

    tables: tuple[str, ...]  # where figures are looked for, in this order
    data: str
    classifier: str | None  # None: the table does not say
    same_data: bool  # whether the measurement is of this very data set
    same_classifier: bool

    @property
    def title(self) -> str:
        """What it is a figure of, and that it is only for orientation where that is so.

        >>> PaperColumn(("table3",), "coin", "resnet50", False, True).title
        'the paper on COIN with ResNet50; another data set, for orientation only'
        """
        told = read_paper()
        name = told["data_sets"][self.data]["title"]
        network = f" with {told['classifiers'][self.classifier]}" if self.classifier else ""
        others = [
            word for same, word in ((self.same_data, "data set"), (self.same_classifier, "classifier")) if not same
        ]
        warning = f"; another {' and another '.join(others)}, for orientation only" if others else ""
        return f"the paper on {name}{network}{warning}"

    def notes(self) -> list[str]:
        """What a reader of these figures should know."""
        told = read_paper()
        found = [
            str(note["text"])
            for note in told["notes"]
            if note["classifier"] == self.classifier and not set(note["tables"]).isdisjoint(self.tables)
        ]
        of_data = told["data_sets"][self.data].get("note")
        return [*found, *([str(of_data)] if of_data else [])]

    def rows(self, table: str) -> list[PaperRow]:
        """What a table has in this column."""
        return [
            row
            for row in read_paper()["rows"]
            if row["table"] == table and row["data"] == self.data and row["classifier"] in (None, self.classifier)
        ]

    def find(self, row: str, num_frames: int | None, num_candidates: int) -> PaperRow | None:
        """The figure of a row; where the paper does not say how many frames it takes, whatever we gave it."""
        for table in self.tables:
            for told in self.rows(table):
                fits = told["num_frames"] in (None, num_frames) and told["num_candidates"] in (None, num_candidates)
                if told["row"] == row and fits:
                    return told
        return None

    def versus_uniform(self, told: PaperRow) -> float | None:
        """Points that a row is above uniform with as many frames of as many, where the paper has both."""
        if told["num_frames"] is None or told["metric"] == "fidelity" or told["row"] == _UNIFORM:
            return None
        for table in dict.fromkeys([told["table"], *_WITH_UNIFORM]):
            for other in self.rows(table):
                wanted = told["num_frames"] if told["row"] != "all" else other["num_frames"]
                same = (other["num_frames"], other["num_candidates"]) == (wanted, told["num_candidates"])
                if other["row"] == _UNIFORM and same:
                    return round(float(told["value"]) - float(other["value"]), 4)
        return None


def column_for(
    tables: Sequence[str], data: str | None, classifier: str | None, *, in_any: bool = False
) -> PaperColumn | None:
    """The column of a data set and a classifier; where the first table lacks it, the first that it has.

    Args:
        tables: in which figures may stand, the most telling first.
        data: one of `data_sets()`, or None.
        classifier: one of the paper's, or None.
        in_any: it will do if any of the tables has the column, as for figures, which print no numbers themselves.
    """
    asked = tables if in_any else tables[:1]
    rows = [row for table in asked for row in read_paper()["rows"] if row["table"] == table]
    if not rows:
        return None
    there = [row["data"] for row in rows]
    chosen = str(data if data in there else there[0])
    networks = [row["classifier"] for row in rows if row["data"] == chosen and row["classifier"]]
    if not networks:
        return PaperColumn(tuple(tables), chosen, None, chosen == data, True)
    network = classifier if classifier in networks else _first_of(networks)
    return PaperColumn(tuple(tables), chosen, network, chosen == data, network == classifier)


def _first_of(networks: Sequence[str]) -> str:
    """The paper's most common network where it is there."""
    return "resnet50" if "resnet50" in networks else networks[0]


def rows_elsewhere(column: PaperColumn, table: str, known: Sequence[str]) -> list[PaperRow]:
    """Rows of a table that no recipe of this package makes; `known` are those that one does."""
    return [row for row in column.rows(table) if row["row"] not in known]


def metric_for(data: str | None, of_bank: str) -> str:
    """In which metric the paper measures a data set; the bank's own for others."""
    return of_bank if data is None else str(data_sets()[data]["metric"])
