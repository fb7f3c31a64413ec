"""Compare the best learned sampler with uniform: in a sentence, in large numbers, by class and video by video."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sosampler.figures.curves import LEARNED, Row, kind_of, looks_of
from sosampler.policies.registry import is_system
from sosampler.report.load import Prediction, RowKey, RunVideos
from sosampler.report.tables import between, percent

Pair = tuple[int, int]  # N, T


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
        text += (
            f", {percent(bounds[0], sign=True)} to {percent(bounds[1], sign=True)} in 95 % of resamples of the videos: "
        )
        text += "it may be chance" if bounds[0] <= 0 <= bounds[1] else "more than chance would give"
    if best.get("recovered") is not None and versus["difference"] >= 0:
        text += f". It is {100 * best['recovered']:.0f} % of what the semi-optimal oracle gains"
    return f"{text}."


SUCCESS_RULE = (
    "Videos that {sampler} gets right and uniform wrong, those first in which {sampler} leads by most in the "
    "classifier's confidence in the label."
)
FAILURE_RULE = (
    "Videos that uniform gets right and {sampler} wrong, those first in which uniform leads by most in the "
    "classifier's confidence in the label."
)


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
    """Return indices of videos that one gets right and the other wrong, the largest lead in confidence first.

    Args:
        success: the sampler is the one that is right.
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
