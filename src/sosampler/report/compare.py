"""Numbers of a report as text, the columns of its table, and the best learned sampler compared with uniform."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sosampler.figures.curves import LEARNED, MEANINGS, Row, kind_of, looks_of, looks_of_rows
from sosampler.policies.registry import is_system
from sosampler.report.load import Prediction, RowKey, RunVideos

Pair = tuple[int, int]  # N, T
NOTHING = "\N{EN DASH}"  # where a number is not known
SHORT_NAMES = {"top1": "top-1", "mAP": "mAP"}


def percent(value: float | None, *, sign: bool = False) -> str:
    """Format a fraction in percent.

    >>> percent(0.1234), percent(-0.05, sign=True), percent(-1e-9), percent(None)
    ('12.3', '−5.0', '0.0', '–')
    """
    return NOTHING if value is None else _fixed(100 * value, 1, sign=sign)


def _fixed(value: float, places: int, *, sign: bool = False) -> str:
    rounded = round(value, places) + 0.0  # there is no -0.0
    return f"{rounded:{'+' if sign else ''}.{places}f}".replace("-", "\N{MINUS SIGN}")


def between(bounds: Sequence[float] | None, *, sign: bool = False) -> str:
    """Format a 95 % interval.

    >>> between([0.1, 0.25]), between(None)
    (' (95 %: 10.0 to 25.0)', '')
    """
    return f" (95 %: {percent(bounds[0], sign=sign)} to {percent(bounds[1], sign=sign)})" if bounds else ""


def score(value: float | None) -> str:
    """Format a sampler's score, short enough for a small cell.

    >>> score(0.8349), score(-12.3), score(None)
    ('0.83', '−12', '–')
    """
    if value is None:
        return NOTHING
    return _fixed(value, 2 if abs(value) < 9.995 else 0)


def count(frames: float | None) -> str:
    """Format a number of frames.

    >>> count(6), count(3.42), count(None)
    ('6', '3.4', '–')
    """
    return NOTHING if frames is None else str(frames) if isinstance(frames, int) else f"{frames:.1f}"


def clock(seconds: float) -> str:
    """Format seconds as minutes and seconds.

    >>> clock(75.26), clock(3.04), clock(-0.5)
    ('1:15.3', '0:03.0', '−0:00.5')
    """
    tenths = abs(round(10 * seconds))
    sign = "\N{MINUS SIGN}" if seconds < 0 and tenths else ""
    return f"{sign}{tenths // 600}:{tenths % 600 // 10:02d}.{tenths % 10}"


def flat(facts: Mapping[str, Any], before: str = "") -> list[tuple[str, str]]:
    """Return names and values as text, depth first; what is empty is left out.

    >>> flat({"bank": {"name": "b", "size": None}, "pairs": [[1, 4], [2, 4]]})
    [('bank: name', 'b'), ('pairs', '1 of 4; 2 of 4')]
    """
    pairs: list[tuple[str, str]] = []
    for name, value in facts.items():
        label = f"{before}{name}".replace("_", " ")
        if isinstance(value, Mapping):
            pairs += flat(value, f"{label}: ")
        elif isinstance(value, (list, tuple)):
            if value:
                pairs.append((label, "; ".join(_text(inner) for inner in value)))
        elif value is not None and value != "":
            pairs.append((label, _text(value)))
    return pairs


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return (" of " if len(value) == 2 else ", ").join(_text(inner) for inner in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- the table

_NO_GAP = 1e-6  # what rounding leaves


@dataclass(frozen=True)
class Column:
    """A column of the table and its meaning."""

    name: str
    meaning: str
    is_empty: bool


def groups_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Group rows by N and T: policies first, then learned, then oracles; baselines follow the rows of the same T."""
    looks, order = looks_of_rows(rows), list(MEANINGS)
    groups: dict[tuple[int, int | None], list[Row]] = {}
    for row in sorted(rows, key=lambda row: order.index(looks[row["policy"]].kind)):
        groups.setdefault((row["num_candidates"], row["num_frames"]), []).append(row)
    pairs = sorted(groups, key=lambda pair: (pair[0], pair[1] is None, pair[1] or 0))
    return [{"num_frames": pair[1], "num_candidates": pair[0], "rows": groups[pair]} for pair in pairs]


def columns_of(rows: Sequence[Row], metric: str) -> dict[str, Column]:
    """Return the columns; one is empty where no row has a value."""
    baselines = any(is_system(row) for row in rows)
    second = "mAP" if metric == "top1" else "top1"
    main, other = SHORT_NAMES[metric], SHORT_NAMES[second]
    several = metric == "mAP"  # labels of a video
    true_class = "one of whose true classes" if several else "whose true class"
    probability = "the geometric mean of the probabilities" if several else "the probability"

    def of_baselines(text: str) -> str:
        return text if baselines else ""

    meanings = {
        "top-1": f"share of videos {true_class} gets the highest probability from the chosen frames",
        "mAP": "mean average precision: for each class the videos are ranked by its probability; the mean over classes",
    }
    columns = {
        "policy": ("policy", "what chooses N of the T candidates. Its sign and colour are those of the figures"),
        "main": (
            f"{main}, %",
            f"{meanings[main]}. Below it, and as a bar from 0 to 100, the 95 % interval of a bootstrap over videos, "
            'or over what "ci units" names below',
        ),
        "other": (f"{other}, %", meanings[other]),
        "versus": (
            "against uniform",
            f"difference in {main} from the uniform choice of as many frames"
            + of_baselines(" (of a baseline: as many as it takes in the mean, rounded up)")
            + ", in percentage points, with the 95 % interval of the paired bootstrap: where it holds 0, the "
            "difference may be chance",
        ),
        "recovered": (
            "recovered, %",
            f"share of the semi-optimal oracle's gain in {main} over uniform that this policy reaches",
        ),
        "fidelity": (
            "fidelity, %",
            "mean share of the optimal set's frames that were chosen too; there may be other sets as good",
        ),
        "confidence": (
            "confidence, %",
            f"mean over videos of {probability} that the classifier gives the true class{'es' if several else ''}",
        ),
        "ece": (
            "ECE, %",
            "expected calibration error: how far the probability of the most probable class is from the share of such "
            "videos that are named right; 15 bins of equal width",
        ),
        "answer": (
            "answer",
            "what is made of the classifier's answers for the chosen frames: their mean, a mean weighted by the "
            "sampler's relevance, fused with what the sampler says about the other frames, or probed: fused, with "
            "a linear layer of the sampler on the classifier's features; or its own answer",
        ),
        "gmacs": (
            "GMACs",
            "billions of multiply-adds for one video: scoring T candidates plus classifying N frames; none for "
            "oracles, which know the labels"
            + of_baselines("; of a baseline its light network and its own layers, plus the heavy network"),
        ),
        "frames": ("frames", "frames that are classified: N; of a baseline those that it classified, mean over videos"),
        "decoded": (
            "decoded",
            "frames that must be decoded: all T to score them, or only the N"
            + of_baselines("; of a baseline those that any of its networks saw, mean over videos"),
        ),
    }
    keys = {"other": second, "versus": "versus_uniform", "decoded": "frames_decoded"}  # in the rows
    empty = {name: all(row.get(keys.get(name, name)) is None for row in rows) for name in columns}
    empty |= {"policy": False, "main": False, "frames": not baselines}
    # Of interest where rows differ in it.
    empty["answer"] = empty["ece"] = not any(row.get("answer") not in (None, "mean") for row in rows)
    return {name: Column(*texts, empty[name]) for name, texts in columns.items()}


def search_of(rows: Sequence[Row], metric: str) -> str:
    """Return how the optimal policy was searched, and what the search may have missed."""
    searched = [row for row in rows if row.get("gap")]
    if not searched:
        return ""
    methods = " and ".join(dict.fromkeys(str(row["method"]) for row in searched))
    missed = max(float(row["gap"]["max"]) for row in searched)
    what = "true class a {}probability" if metric == "top1" else "labels a {}confidence"
    bound = (
        f"no other set of frames gives the {what.format('')} that is higher by more than {missed:.2g}"
        if missed > _NO_GAP
        else f"no other set of frames gives the {what.format('higher ')}"
    )
    return f"The optimal policy was found by {methods}: {bound}."


# ---- the best learned sampler and uniform


@dataclass(frozen=True)
class Tile:
    """A number at the top of the page."""

    name: str
    value: str
    remark: str
    kind: str


@dataclass(frozen=True)
class Headline:
    """The rows that are compared, all with the same N of T."""

    pair: Pair
    uniform: Row | None
    sampler: Row | None  # the learned one with the highest metric
    semi_optimal: Row | None


def headline_of(rows: Sequence[Row], metric: str, pair: Pair | None = None) -> Headline | None:
    """Return the rows of one N of T: the given one, or the middle one of those that a learned sampler has."""
    policies = [row for row in rows if not is_system(row)]  # baselines have no N
    learned = [row for row in policies if kind_of(row["policy"]) == LEARNED]
    pairs = sorted({_pair(row) for row in learned or policies if row["policy"] != "all"})
    if not pairs:
        return None
    # A policy that takes all candidates chooses nothing.
    choosing = [candidate for candidate in pairs if candidate[0] < candidate[1]] or pairs
    pair = pair or choosing[len(choosing) // 2]
    here = {row["policy"]: row for row in policies if _pair(row) == pair}
    samplers = [row for row in learned if here.get(row["policy"]) is row]
    # With several, the one that won is named; the table has the others.
    best = max(samplers, key=lambda row: float(row[metric]), default=None)
    return Headline(pair, here.get("uniform"), best, here.get("semi-optimal"))


def _pair(row: Row) -> Pair:
    return row["num_frames"], row["num_candidates"]


def tiles_of(rows: Sequence[Row], metric: str, headline: Pair | None = None) -> list[Tile]:
    """Return uniform, the best learned sampler, its gain and the oracle at one N of T."""
    best_rows = headline_of(rows, metric, headline)
    if best_rows is None:
        return []
    frames = f"{best_rows.pair[0]} of {best_rows.pair[1]} frames"
    tiles = []
    if best_rows.uniform is not None:
        tiles.append(_tile("uniform", best_rows.uniform, metric, f"{frames}, evenly spread"))
    if best_rows.sampler is not None:
        best = best_rows.sampler
        tiles.append(_tile(best["policy"], best, metric, f"{frames}, learned"))
        versus, recovered = best.get("versus_uniform"), best.get("recovered")
        if versus:
            lost = versus["difference"] < 0
            remark = f"percentage points against uniform{between(versus.get('ci95'), sign=True)}"
            if recovered is not None and not lost:
                remark += f"; {100 * recovered:.0f} % of what the semi-optimal oracle gains"
            tiles.append(Tile("loss" if lost else "gain", percent(versus["difference"], sign=True), remark, LEARNED))
    if best_rows.semi_optimal is not None:
        tiles.append(_tile("semi-optimal", best_rows.semi_optimal, metric, "the oracle that knows the label"))
    return tiles


def _tile(name: str, row: Row, metric: str, remark: str) -> Tile:
    bounds = (row.get("ci95") or {}).get(metric)
    return Tile(name, f"{percent(row[metric])} %", f"{remark}{between(bounds)}", looks_of([name])[name].kind)


def sentence_of(rows: Sequence[Row], metric: str, facts: Mapping[str, Any], headline: Pair | None = None) -> str:
    """Return the comparison in words, with its interval; empty where nothing can be compared."""
    compared = headline_of(rows, metric, headline)
    if compared is None or compared.sampler is None:
        return ""
    best, versus = compared.sampler, compared.sampler.get("versus_uniform")
    if compared.uniform is not None:
        uniform = float(compared.uniform[metric])
    elif versus and versus.get("metric", metric) == metric:  # it was measured, and has no row of its own
        uniform = float(best[metric]) - float(versus["difference"])
    else:
        return ""
    where = ""
    if facts.get("num_videos") and facts.get("split"):
        where += f"on {facts['num_videos']} videos of {facts['split']}, "
    teacher = facts.get("teacher")
    if isinstance(teacher, Mapping) and teacher.get("name"):
        where += f"classified by {teacher['name']}, "
    does, scores = ("is right on", "of the videos") if metric == "top1" else ("has a mean average precision of", "")
    text = (
        f"{where}with {compared.pair[0]} of {compared.pair[1]} frames {best['policy']} {does} {percent(best[metric])} %"
        f"{scores and ' ' + scores}{between((best.get('ci95') or {}).get(metric))}, uniform "
        f"{'on' if metric == 'top1' else 'one of'} {percent(uniform)} %. "
    )
    text = text[0].upper() + text[1:]
    if not versus:
        return text.strip()
    bounds = versus.get("ci95")
    text += f"The difference is {percent(versus['difference'], sign=True)} percentage points"
    if bounds:
        low, high = (percent(bound, sign=True) for bound in bounds)
        chance = "it may be chance" if bounds[0] <= 0 <= bounds[1] else "more than chance would give"
        text += f", {low} to {high} in 95 % of resamples of the videos: {chance}"
    if best.get("recovered") is not None and versus["difference"] >= 0:
        text += f". It is {100 * best['recovered']:.0f} % of what the semi-optimal oracle gains"
    return f"{text}."


@dataclass(frozen=True)
class Contrast:
    """The rows that are compared, with the same N of T."""

    sampler: RowKey
    uniform: RowKey


def contrast_of(rows: Sequence[Row], metric: str, known: RunVideos, pair: Pair | None = None) -> Contrast | None:
    """Return the best learned sampler and uniform at one N of T; None where one of them is missing."""
    compared = headline_of(rows, metric, pair)
    if compared is None or compared.sampler is None:
        return None
    contrast = Contrast((compared.sampler["policy"], *compared.pair), ("uniform", *compared.pair))
    return contrast if {contrast.sampler, contrast.uniform} <= set(known.keys) else None


def cases(sampler: Sequence[Prediction], uniform: Sequence[Prediction], *, success: bool) -> list[int]:
    """Return indices of videos that one (with `success` the sampler) gets right and the other wrong.

    The largest lead in confidence comes first.
    """
    better, worse = (sampler, uniform) if success else (uniform, sampler)
    lead = {
        number: mine.confidence - other.confidence
        for number, (mine, other) in enumerate(zip(better, worse, strict=True))
        if mine.right and not other.right
    }
    return sorted(lead, key=lambda number: (-lead[number], number))


# ---- by class


@dataclass(frozen=True)
class ClassDifference:
    """How often each is right on the videos of one class; fractions."""

    name: str
    videos: int
    uniform: float
    sampler: float
    confidence: float  # mean difference of the confidence in the labels

    @property
    def difference(self) -> float:
        return self.sampler - self.uniform


def class_differences(videos: RunVideos, contrast: Contrast) -> list[ClassDifference]:
    """Return the classes that have videos; those that gain most first, among equals by confidence, then by name."""
    sampler, uniform = videos.predictions(contrast.sampler), videos.predictions(contrast.uniform)
    members: dict[int, list[int]] = {}
    for number, video in enumerate(videos.videos):
        for label in video.labels:
            members.setdefault(label, []).append(number)
    differences = [
        ClassDifference(
            videos.classes[label],
            len(of_class),
            sum(uniform[number].right for number in of_class) / len(of_class),
            sum(sampler[number].right for number in of_class) / len(of_class),
            sum(sampler[number].confidence - uniform[number].confidence for number in of_class) / len(of_class),
        )
        for label, of_class in members.items()
    ]
    return sorted(differences, key=lambda row: (-round(row.difference, 9), -row.confidence, row.name))


# ---- all videos

RIGHT = {
    (True, True): "both",
    (True, False): "sampler alone",
    (False, True): "uniform alone",
    (False, False): "neither",
}


@dataclass(frozen=True)
class VideoLine:
    """One video in the table of all."""

    id: str
    label: str
    right: str  # one of RIGHT
    uniform: Prediction
    sampler: Prediction
    uniform_class: str
    sampler_class: str

    @property
    def lead(self) -> float:
        """Of the sampler, in confidence."""
        return self.sampler.confidence - self.uniform.confidence


def video_lines(videos: RunVideos, contrast: Contrast) -> list[VideoLine]:
    """Return all videos in the order of the evaluation."""
    sampler, uniform = videos.predictions(contrast.sampler), videos.predictions(contrast.uniform)
    return [
        VideoLine(
            video.id,
            videos.label(video),
            RIGHT[mine.right, other.right],
            other,
            mine,
            videos.classes[other.predicted],
            videos.classes[mine.predicted],
        )
        for video, mine, other in zip(videos.videos, sampler, uniform, strict=True)
    ]
