"""The figures that the paper prints, and which of them stand beside a measurement."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

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
    found: dict[str, Any] = json.loads(files("sosampler.reproduce").joinpath("paper.json").read_text(encoding="utf-8"))
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
