"""The table of all rows: which columns it has, what they mean, and how rows stand together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sosampler.evaluation.dials import is_system
from sosampler.report.curves import Row
from sosampler.report.looks import MEANINGS, looks_of_rows
from sosampler.report.words import SHORT_NAMES

_NO_GAP = 1e-6  # what rounding leaves


@dataclass(frozen=True)
class Column:
    """A column of the table: what it is called, what it says, and what it means."""

    name: str
    meaning: str
    is_empty: bool


def groups_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows of one N and T together; rules first, then learned, then oracles. Systems follow what has the same T."""
    looks = looks_of_rows(rows)
    distinct = {(row["num_candidates"], row["num_frames"]) for row in rows}
    pairs = sorted(distinct, key=lambda pair: (pair[0], pair[1] is None, pair[1] or 0))
    order = list(MEANINGS)
    return [
        {
            "num_frames": frames,
            "num_candidates": candidates,
            "rows": sorted(
                (row for row in rows if (row["num_candidates"], row["num_frames"]) == (candidates, frames)),
                key=lambda row: order.index(looks[row["policy"]].kind),
            ),
        }
        for candidates, frames in pairs
    ]


def columns_of(rows: Sequence[Row], metric: str) -> dict[str, Column]:
    """What is known of at least one row."""

    def lacks(name: str) -> bool:
        return all(row.get(name) is None for row in rows)

    systems = any(is_system(row) for row in rows)
    main, other = SHORT_NAMES[metric], SHORT_NAMES["mAP" if metric == "top1" else "top1"]
    several = metric == "mAP"  # labels of a video
    meanings = {
        "top-1": f"share of videos {'one of whose true classes' if several else 'whose true class'} gets the highest "
        "probability from the chosen frames",
        "mAP": "mean average precision: for each class the videos are ranked by its probability; the mean over classes",
    }
    return {
        "policy": Column(
            "policy", "who chooses N of the T candidates. Its sign and colour are those of the figures", False
        ),
        "main": Column(
            f"{main}, %",
            f"{meanings[main]}. Below it, and as a bar from 0 to 100, the 95 % interval of a bootstrap over videos",
            False,
        ),
        "other": Column(f"{other}, %", meanings[other], lacks("mAP" if metric == "top1" else "top1")),
        "versus": Column(
            "against uniform",
            f"difference in {main} from the uniform choice of as many frames"
            + (" (of a system: as many as it takes in the mean, rounded up)" if systems else "")
            + ", in percentage points, with the 95 % interval of the paired bootstrap: where it holds 0, the "
            "difference may be chance",
            lacks("versus_uniform"),
        ),
        "recovered": Column(
            "recovered, %",
            f"share of the semi-optimal oracle's gain in {main} over uniform that this policy reaches",
            lacks("recovered"),
        ),
        "fidelity": Column(
            "fidelity, %",
            "mean share of the optimal set's frames that were chosen too; there may be other sets as good",
            lacks("fidelity"),
        ),
        "confidence": Column(
            "confidence, %",
            "mean over videos of "
            + ("the geometric mean of the probabilities" if several else "the probability")
            + f" that the classifier gives the true class{'es' if several else ''}",
            lacks("confidence"),
        ),
        "gmacs": Column(
            "GMACs",
            "billions of multiply-adds for one video: scoring T candidates plus classifying N frames; none for "
            "oracles, which are told the answers"
            + ("; of a system its light network and its own layers, plus the heavy network" if systems else ""),
            lacks("gmacs"),
        ),
        "frames": Column(
            "frames",
            "frames that are classified: N; of a system those that it looked at, mean over videos",
            not systems,
        ),
        "decoded": Column(
            "decoded",
            "frames that must be decoded: all T to look at them, or only the N"
            + ("; of a system those that it looked at with any network, mean over videos" if systems else ""),
            lacks("frames_decoded"),
        ),
    }


def search_of(rows: Sequence[Row], metric: str) -> str:
    """How the optimal policy was found, and what its search may have missed."""
    found = [row for row in rows if row.get("gap")]
    if not found:
        return ""
    methods = " and ".join(dict.fromkeys(str(row["method"]) for row in found))
    missed = max(float(row["gap"]["max"]) for row in found)
    what = "true class a {}probability" if metric == "top1" else "labels a {}confidence"
    bound = (
        f"no other set of frames gives the {what.format('')} that is higher by more than {missed:.2g}"
        if missed > _NO_GAP
        else f"no other set of frames gives the {what.format('higher ')}"
    )
    return f"The optimal policy was found by {methods}: {bound}."
