"""Write parts of a report as one self-contained HTML file, with strips of the frames that policies chose."""

from __future__ import annotations

import base64
import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from sosampler._util.arrays import Indices
from sosampler._util.files import replacing
from sosampler._util.validation import one_of
from sosampler.errors import InvalidArgument, MissingDependency
from sosampler.figures.curves import MEANINGS, METRIC_NAMES, SYSTEM, Figure, Row, accuracy_figures, looks_of_rows
from sosampler.report.compare import (
    NOTHING,
    SHORT_NAMES,
    ClassDifference,
    Contrast,
    Pair,
    VideoLine,
    clock,
    columns_of,
    count,
    flat,
    groups_of,
    percent,
    score,
    search_of,
    tiles_of,
)
from sosampler.report.load import Grid, RowKey, RunVideo, RunVideos, is_folder

if TYPE_CHECKING:
    from sosampler.bank.bank import Bank

FILE = "index.html"
# Of more classes only those that differ most are shown at once, of more videos only the first are listed.
MAX_CLASSES, MAX_VIDEOS = 24, 5000
# With more candidates than this, images in one row would be too small to see: only the chosen ones are shown.
MAX_COLUMNS = 24
_THUMBNAIL, _SMALL_THUMBNAIL = 88, 64  # pixels of the short side
_QUALITY = 78


# ---- strips


@dataclass(frozen=True)
class Answer:
    """The classifier's prediction from the chosen frames."""

    label: str
    probability: float
    right: bool
    confidence: float | None = None  # in the true labels


@dataclass(frozen=True)
class StripLine:
    """One policy's choice among the candidates of a video."""

    policy: str
    chosen: tuple[int, ...]  # indices of candidates, in time order
    answer: Answer | None = None
    scores: tuple[float | None, ...] | None = None  # [T]


@dataclass(frozen=True)
class Strip:
    """One video: its candidates, and what each policy chose."""

    title: str
    label: str
    images: tuple[str, ...]  # [T] data URIs; empty where the frames are not available, "" for one that is not shown
    seconds: tuple[float, ...]  # [T]
    values: tuple[float, ...] | None  # [T] in 0..1: the classifier's confidence in the label, frame by frame
    lines: tuple[StripLine, ...]

    def __post_init__(self) -> None:
        count = len(self.seconds)
        images = self.images or self.seconds
        if len(images) != count or (self.values is not None and len(self.values) != count):
            raise InvalidArgument(f"{self.title}: a strip of {len(images)} images needs as many times and values")
        for line in self.lines:
            if any(not 0 <= index < count for index in line.chosen):
                raise InvalidArgument(f"{self.title}: {line.policy} chose {line.chosen} of {count} candidates")
            if line.scores is not None and len(line.scores) != count:
                raise InvalidArgument(f"{self.title}: {line.policy} has {len(line.scores)} scores of {count}")

    @property
    def is_wide(self) -> bool:
        """Whether the candidates are too many for one row."""
        return len(self.seconds) > MAX_COLUMNS

    @property
    def columns(self) -> tuple[int, ...]:
        """Candidates that have a column: all, or of too many those that a policy chose."""
        if not self.is_wide:
            return tuple(range(len(self.seconds)))
        return tuple(sorted({index for line in self.lines for index in line.chosen}))

    @property
    def positions(self) -> tuple[float, ...]:
        """Of the candidates between the first and the last one, in percent."""
        first, length = self.seconds[0], max(self.seconds[-1] - self.seconds[0], 1e-9)
        return tuple(round(100 * (time - first) / length, 2) for time in self.seconds)


@dataclass(frozen=True)
class Gallery:
    """Strips under one heading."""

    title: str
    note: str  # how they were chosen
    strips: tuple[Strip, ...]


def data_uri(frame: NDArray[np.uint8], side: int = _THUMBNAIL) -> str:
    """Return a frame [H, W, 3] as a small JPEG inside of a link; never enlarged."""
    image = Image.fromarray(frame)
    scale = min(1.0, side / min(image.size))
    if scale < 1:
        size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        image = image.resize(size, Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=_QUALITY, optimize=True)
    return "data:image/jpeg;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def strip_of(videos: RunVideos, video: RunVideo, keys: Sequence[RowKey], bank: Bank | None) -> Strip:
    """Return the strip of one video of a run, with the rows `keys` of one T; with images if there is a bank."""
    candidates = video.candidates[keys[0][2]]
    lines = []
    for key in keys:
        prediction = video.predictions[videos.keys.index(key)]
        scores = candidates.confidence if key[0] == "semi-optimal" else candidates.scores.get(key[0])
        label = videos.classes[prediction.predicted]
        answer = Answer(label, prediction.probability, prediction.right, prediction.confidence)
        chosen = _indices_among(np.array(candidates.slots), prediction.chosen)
        lines.append(StripLine(key[0], chosen, answer, scores))
    bare = Strip(video.id, videos.label(video), (), candidates.seconds, candidates.confidence, tuple(lines))
    if bank is None:
        return bare
    frames = bank[bank.ids.index(video.id)].frames([candidates.slots[index] for index in bare.columns])
    side = _SMALL_THUMBNAIL if len(bare.columns) > MAX_COLUMNS else _THUMBNAIL
    images = [""] * len(candidates.slots)
    for index, frame in zip(bare.columns, frames, strict=True):
        images[index] = data_uri(frame, side)
    return replace(bare, images=tuple(images))


def _indices_among(slots: Indices, chosen: ArrayLike) -> tuple[int, ...]:
    """Return the indices of stored frames among the candidates; each once, without the -1 that pad a baseline's."""
    frames = np.asarray(chosen, dtype=np.int64)
    return tuple(np.unique(np.searchsorted(slots, frames[frames >= 0])).tolist())


# ---- the page


@dataclass(frozen=True, eq=False)
class Part:
    """Content of one run; what is empty is left out."""

    title: str = ""
    summary: str = ""
    rows: Sequence[Row] = ()  # of an evaluation, as its JSON has them
    metric: str = "top1"
    headline: Pair | None = None
    figures: Sequence[Figure] = ()
    grids: Sequence[Grid] = ()
    galleries: Sequence[Gallery] = ()
    contrast: Contrast | None = None  # the rows that classes and videos compare
    classes: Sequence[ClassDifference] = ()
    videos: Sequence[VideoLine] = ()
    notes: Sequence[str] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


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
    headline: Pair | None = None,
) -> Path:
    """Write `folder`/index.html: the comparison, curves, strips of chosen frames, the table with intervals, the facts.

    Args:
        rows: of an evaluation, as its JSON has them.
        curves: figures; None draws accuracy against frames and against cost.
        facts: settings and machine; nested names are joined.
        metric: the main one, "top1" or "mAP".
        headline: N and T of the comparison at the top; None takes the middle one of those that a learned sampler has.
    """
    one_of("metric", metric, METRIC_NAMES)
    if not rows:
        raise InvalidArgument("a report needs at least one row; evaluate a policy first")
    galleries = [Gallery("Chosen frames", "", tuple(strips))] if strips else []
    figures = accuracy_figures(rows, metric) if curves is None else curves
    part = Part(
        rows=rows, metric=metric, headline=headline, figures=figures, galleries=galleries, facts=dict(facts or {})
    )
    return write_page(Path(folder) / FILE, title, [part], intro=intro)


def is_report(path: Path) -> bool:
    """Return whether a file is a page that `write_page` wrote."""
    with open(path, "rb") as file:
        return b'<meta name="generator" content="sosampler report">' in file.read(4096)


def write_page(path: str | os.PathLike[str], title: str, parts: Sequence[Part], *, intro: str = "") -> Path:
    """Write one file for one or several runs.

    Images, figures, style and a script that sorts and filters tables are embedded. It loads nothing from the network,
    and no other script may run in it. It follows the reader's choice of light or dark, fits telephones and prints;
    without the script its tables are plain.
    """
    if not parts:
        raise InvalidArgument("a page needs at least one run; give some")
    script = files("sosampler.report").joinpath("templates", "tables.js").read_text(encoding="utf-8")
    # A browser compares the hash with exactly what stands between the tags.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    html = _template().render(
        title=title,
        intro=intro,
        parts=[_context(part, number) for number, part in enumerate(parts, start=1)],
        several=len(parts) > 1,
        script=script,
        script_hash=f"sha256-{digest}",
        nothing=NOTHING,
    )
    target = Path(path)
    if is_folder(target):
        raise InvalidArgument(f"{target} is a folder; give the name of a file, for example report.html")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"{target.parent}: the folder cannot be made ({error.strerror}); give another") from error
    try:
        with replacing(target) as temporary:
            temporary.write_text(html, encoding="utf-8", errors="replace")  # names of files may hold lone surrogates
    except OSError as error:
        raise InvalidArgument(f"{target}: cannot be written ({error.strerror}); give another name") from error
    return target


def _context(part: Part, number: int) -> dict[str, Any]:
    """Return a part for the templates; `number` distinguishes its anchors from those of other parts."""
    drawn = [line.policy for gallery in part.galleries for strip in gallery.strips for line in strip.lines]
    looks = looks_of_rows(part.rows, drawn)
    baselines = any(look.kind == SYSTEM for look in looks.values())
    many = len(part.classes) > MAX_CLASSES
    ends = [*part.classes[: MAX_CLASSES // 2], *part.classes[-(MAX_CLASSES // 2) :]]
    return {
        **vars(part),
        "number": number,
        "tiles": tiles_of(part.rows, part.metric, part.headline),
        "class_tables": [ends, part.classes] if many else [part.classes] if part.classes else [],
        "widest": max((abs(row.difference) for row in part.classes), default=0.0) or 1.0,
        "videos": part.videos[:MAX_VIDEOS],
        "num_videos": len(part.videos),
        "groups": groups_of(part.rows),
        "columns": columns_of(part.rows, part.metric),
        "other": "mAP" if part.metric == "top1" else "top1",
        "looks": looks,
        "kinds": {kind: meaning for kind, meaning in MEANINGS.items() if kind != SYSTEM or baselines},
        "search": search_of(part.rows, part.metric),
        "facts": flat(part.facts),
    }


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
    environment.filters |= {"percent": percent, "clock": clock, "count": count, "score": score}
    environment.globals |= {"short_names": SHORT_NAMES}
    return environment.get_template("page.html.jinja")
