"""A learned sampler against uniform, video by video and class by class; nothing here is chosen by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sosampler.report.curves import Row
from sosampler.report.finding import Pair, headline_of
from sosampler.report.run_videos import RowKey, RunVideos, Said

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
    """Who is compared, with the same N of T."""

    sampler: RowKey
    uniform: RowKey


def contrast_of(rows: Sequence[Row], metric: str, known: RunVideos, pair: Pair | None = None) -> Contrast | None:
    """The best learned sampler and uniform at the headline's N of T; None where one of them is missing."""
    found = headline_of(rows, metric, pair)
    if found is None or found.sampler is None:
        return None
    contrast = Contrast((found.sampler["policy"], *found.pair), ("uniform", *found.pair))
    return contrast if {contrast.sampler, contrast.uniform} <= set(known.keys) else None


def cases(sampler: Sequence[Said], uniform: Sequence[Said], *, success: bool) -> list[int]:
    """Numbers of the videos that one gets right and the other wrong, the largest lead in confidence first.

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
    """How often each is right on the videos of one class; shares."""

    name: str
    videos: int
    uniform: float
    sampler: float
    confidence: float  # mean difference of the confidence in the labels

    @property
    def difference(self) -> float:
        return self.sampler - self.uniform


def class_differences(videos: RunVideos, contrast: Contrast) -> list[ClassDifference]:
    """The classes that have videos; those that gain most first, among equals by confidence, then by name."""
    sampler, uniform = videos.said(contrast.sampler), videos.said(contrast.uniform)
    members: dict[int, list[int]] = {}
    for number, video in enumerate(videos.videos):
        for label in video.labels:
            members.setdefault(label, []).append(number)
    found = [
        ClassDifference(
            videos.classes[label],
            len(own),
            sum(uniform[number].right for number in own) / len(own),
            sum(sampler[number].right for number in own) / len(own),
            sum(sampler[number].confidence - uniform[number].confidence for number in own) / len(own),
        )
        for label, own in members.items()
    ]
    return sorted(found, key=lambda one: (-round(one.difference, 9), -one.confidence, one.name))


# ---- all videos

WHO = {(True, True): "both", (True, False): "sampler alone", (False, True): "uniform alone", (False, False): "nobody"}


@dataclass(frozen=True)
class VideoLine:
    """One video in the table of all."""

    id: str
    label: str
    who: str  # is right
    uniform: Said
    sampler: Said
    uniform_says: str
    sampler_says: str

    @property
    def lead(self) -> float:
        """Of the sampler, in confidence."""
        return self.sampler.confidence - self.uniform.confidence


def video_lines(videos: RunVideos, contrast: Contrast) -> list[VideoLine]:
    """All videos in the order of the evaluation."""
    both = zip(videos.videos, videos.said(contrast.sampler), videos.said(contrast.uniform), strict=True)
    return [
        VideoLine(
            video.id,
            videos.label(video),
            WHO[sampler.right, uniform.right],
            uniform,
            sampler,
            videos.classes[uniform.predicted],
            videos.classes[sampler.predicted],
        )
        for video, sampler, uniform in both
    ]
