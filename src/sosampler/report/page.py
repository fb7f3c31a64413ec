"""`write_report`: an evaluation as one HTML file that needs nothing beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosampler.checks import one_of
from sosampler.errors import InvalidArgument, MissingDependency
from sosampler.evaluation.dials import is_system
from sosampler.files import replacing
from sosampler.report.curves import METRIC_NAMES, Figure, Row, accuracy_figures
from sosampler.report.looks import LEARNED, MEANINGS, SYSTEM, looks_of, looks_of_rows
from sosampler.report.strips import Strip

FILE = "index.html"
NOTHING = "\N{EN DASH}"
"""Where a number is not known."""
_NO_GAP = 1e-6  # what rounding leaves
_SHORT_NAMES = {"top1": "top-1", "mAP": "mAP"}


@dataclass(frozen=True)
class Column:
    """A column of the table: what it is called, what it says, and what it means."""

    name: str
    meaning: str
    is_empty: bool


def write_report(
    folder: str | os.PathLike[str],
    title: str,
    rows: Sequence[Row],
    *,
    curves: Sequence[Figure] | None = None,
    strips: Sequence[Strip] = (),
    facts: Mapping[str, Any] | None = None,
    metric: str = "top1",
    intro: str = "",
    headline: tuple[int, int] | None = None,
) -> Path:
    """Write `folder`/index.html: the finding, curves, strips of chosen frames, the table with intervals, the facts.

    Pictures, figures and style are inside of the file; it has no script and asks the network for nothing. It follows
    the reader's choice of light or dark, fits telephones and prints.

    Args:
        folder: is made if need be.
        title: of the page.
        rows: of an evaluation, as its JSON has them.
        curves: figures; None draws accuracy against frames and against cost.
        strips: videos with the frames that policies chose.
        facts: what was measured on what; nested names are joined.
        metric: the main one, "top1" or "mAP".
        intro: a paragraph below the title.
        headline: N and T of the finding at the top; None takes the middle one of those that a learned sampler has.
    """
    one_of("metric", metric, METRIC_NAMES)
    if not rows:
        raise InvalidArgument("a report needs at least one row; evaluate a policy first")
    looks = looks_of_rows(rows, (line.policy for strip in strips for line in strip.lines))
    systems = any(look.kind == SYSTEM for look in looks.values())
    html = _template().render(
        title=title,
        intro=intro,
        tiles=tiles_of(rows, metric, headline),
        curves=accuracy_figures(rows, metric) if curves is None else curves,
        strips=strips,
        groups=_groups(rows),
        columns=_columns(rows, metric),
        metric=metric,
        other="mAP" if metric == "top1" else "top1",
        short_names=_SHORT_NAMES,
        looks=looks,
        kinds={kind: meaning for kind, meaning in MEANINGS.items() if kind != SYSTEM or systems},
        nothing=NOTHING,
        search=_search(rows),
        facts=_flat(facts or {}),
    )
    target = Path(folder) / FILE
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"{folder}: the folder cannot be made ({error.strerror}); give another") from error
    with replacing(target) as temporary:
        temporary.write_text(html, encoding="utf-8")
    return target


def _template() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise MissingDependency("a report needs jinja2; install sosampler[train]") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sosampler.report", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {"percent": _percent, "clock": _clock, "count": _count}
    return environment.get_template("page.html.jinja")


# ---- the finding


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page."""

    name: str
    value: str
    remark: str
    kind: str


def tiles_of(rows: Sequence[Row], metric: str, headline: tuple[int, int] | None = None) -> list[Tile]:
    """Uniform, the best learned sampler and the oracle at one N of T; and what was won."""
    rows = [row for row in rows if not is_system(row)]  # which have no N
    learned = [row for row in rows if looks_of([row["policy"]])[row["policy"]].kind == LEARNED]
    pairs = sorted({(row["num_frames"], row["num_candidates"]) for row in learned or rows if row["policy"] != "all"})
    if not pairs:
        return []
    pair = headline or pairs[len(pairs) // 2]
    here = {row["policy"]: row for row in rows if (row["num_frames"], row["num_candidates"]) == pair}
    tiles = []
    if "uniform" in here:
        tiles.append(_tile("uniform", here["uniform"], metric, f"{pair[0]} of {pair[1]} frames, evenly spread"))
    samplers = [row for row in learned if here.get(row["policy"]) is row]
    if samplers:
        # With several, the one that won is named; the table has the others.
        best = max(samplers, key=lambda row: float(row[metric]))
        tiles.append(_tile(best["policy"], best, metric, f"{pair[0]} of {pair[1]} frames, learned"))
        versus, recovered = best.get("versus_uniform"), best.get("recovered")
        if versus:
            remark = f"percentage points over uniform{_between(versus.get('ci95'), sign=True)}"
            if recovered is not None:
                remark += f"; {100 * recovered:.0f} % of what the semi-optimal oracle gains"
            tiles.append(Tile("gain", _percent(versus["difference"], sign=True), remark, LEARNED))
    if "semi-optimal" in here:
        tiles.append(_tile("semi-optimal", here["semi-optimal"], metric, "the oracle that knows the label"))
    return tiles


def _tile(name: str, row: Row, metric: str, remark: str) -> Tile:
    bounds = (row.get("ci95") or {}).get(metric)
    return Tile(name, f"{_percent(row[metric])} %", f"{remark}{_between(bounds)}", looks_of([name])[name].kind)


def _between(bounds: Sequence[float] | None, *, sign: bool = False) -> str:
    return f" (95 %: {_percent(bounds[0], sign=sign)} to {_percent(bounds[1], sign=sign)})" if bounds else ""


# ---- the table


def _groups(rows: Sequence[Row]) -> list[dict[str, Any]]:
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


def _columns(rows: Sequence[Row], metric: str) -> dict[str, Column]:
    """What is known of at least one row."""

    def lacks(name: str) -> bool:
        return all(row.get(name) is None for row in rows)

    systems = any(is_system(row) for row in rows)
    main, other = _SHORT_NAMES[metric], _SHORT_NAMES["mAP" if metric == "top1" else "top1"]
    meanings = {
        "top-1": "share of videos whose true class gets the highest probability from the chosen frames",
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
            + (" (of a system: as many as it takes in the mean, rounded)" if systems else "")
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
            "confidence, %", "mean probability that the classifier gives the true class", lacks("confidence")
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


def _search(rows: Sequence[Row]) -> str:
    """How the optimal policy was found, and what its search may have missed."""
    found = [row for row in rows if row.get("gap")]
    if not found:
        return ""
    methods = " and ".join(dict.fromkeys(str(row["method"]) for row in found))
    missed = max(float(row["gap"]["max"]) for row in found)
    bound = (
        f"no other set of frames gives the true class a probability that is higher by more than {missed:.2g}"
        if missed > _NO_GAP
        else "no other set of frames gives the true class a higher probability"
    )
    return f"The optimal policy was found by {methods}: {bound}."


# ---- words and numbers


def _percent(value: float | None, *, sign: bool = False) -> str:
    """
    >>> _percent(0.1234), _percent(-0.05, sign=True), _percent(None)
    ('12.3', '−5.0', '–')
    """
    return NOTHING if value is None else f"{100 * value:{'+' if sign else ''}.1f}".replace("-", "\N{MINUS SIGN}")


def _count(frames: float | None) -> str:
    """
    >>> _count(6), _count(3.42), _count(None)
    ('6', '3.4', '–')
    """
    return NOTHING if frames is None else str(frames) if isinstance(frames, int) else f"{frames:.1f}"


def _clock(seconds: float) -> str:
    """
    >>> _clock(75.26), _clock(3.04)
    ('1:15.3', '0:03.0')
    """
    tenths = round(10 * seconds)
    return f"{tenths // 600}:{tenths % 600 // 10:02d}.{tenths % 10}"


def _flat(facts: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Names and values as text, depth first; what is empty is left out."""
    found: list[tuple[str, str]] = []
    for name, value in facts.items():
        label = f"{before}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            found += _flat(value, f"{label}: ")
        elif isinstance(value, (list, tuple)):
            if value:
                found.append((label, "; ".join(_text(one) for one in value)))
        elif value is not None and value != "":
            found.append((label, _text(value)))
    return found


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return " of ".join(_text(one) for one in value) if len(value) == 2 else ", ".join(_text(one) for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
