"""The demonstration: everything from videos to a report, in minutes, on two cores and without a download.

Videos are composed of drawn pictures, a small classifier learns from trimmed clips, its answers about the candidates of
the untrimmed videos go into a bank, a sampler learns from them, and all policies are measured on videos of their own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sosampler._util.files import replacing
from sosampler._util.progress import progress_bar
from sosampler._util.validation import whole_number
from sosampler.errors import InvalidArgument, MissingDependency

if TYPE_CHECKING:
    from sosampler.bank.bank import Bank
    from sosampler.evaluation.result import Evaluation


Say = Callable[[str], None]

SETTINGS_FILE = "demo.json"
LEARNED = "sosampler"
"""What the sampler is called among the policies."""

_POLICIES = ("uniform", "random", "all", "semi-optimal-max", "semi-optimal", "optimal")
_SHOWN = ("uniform", LEARNED, "semi-optimal")  # in the finding
_CLIP_SEED = 1_000_000  # clips are of other pictures than the videos
_NUM_STEPS = 6
_NEEDED = ("torch", "timm", "pyarrow", "matplotlib", "jinja2")


@dataclass(frozen=True)
class DemoSettings:
    """How large the demonstration is."""

    num_classes: int = 5
    videos: Mapping[str, int] = field(default_factory=lambda: {"train": 220, "dev": 50, "test": 150})
    clips: Mapping[str, int] = field(default_factory=lambda: {"train": 1000, "dev": 100})
    network: str = "timm:test_resnet"  # of the classifier and of the sampler
    classifier_size: int = 64  # pixels
    classifier_epochs: int = 14
    sampler_size: int = 48
    sampler_epochs: int = 12
    num_candidates: int = 16
    num_frames: tuple[int, ...] = (1, 2, 3, 4, 6)
    headline: int = 3  # N of the finding and of the strips
    num_strips: int = 9
    workers: int | None = 1  # processes that read the classifier's clips


# Mostly something else is to be seen; the camera moves little, since the pictures are small.
_VIDEOS: dict[str, Any] = {
    "num_shots": (8, 12),
    "share": (0.1, 0.35),
    "seconds_per_shot": (0.5, 1.5),
    "fps": 4,
    "size": 80,
    "crop_area": (0.8, 1.0),
    "pan": 0.15,
    "zoom": 0.15,
    "blur": 0.015,
}
# One shot, all of it of the class.
_CLIPS: dict[str, Any] = {**_VIDEOS, "num_shots": 1, "share": 1.0, "num_candidates": 4}


def run_demo(
    out: str | os.PathLike[str],
    *,
    seed: int = 0,
    settings: DemoSettings | None = None,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Run the demonstration; returns the evaluation as evaluation.json holds it.

    Below `out`: videos/ (mp4 files), clips/, classifier/, bank/, sampler/, evaluation.json, videos.jsonl and
    report/index.html.
    Killed and called again it goes on with what is there. A folder with anything else in it is refused.

    Args:
        out: a new folder, or one of the same demonstration.
        seed: of pictures, networks and everything that is drawn at random.
        settings: a smaller or larger one.
        say: is told what happens and how long it took.
    """
    _check_installed()
    from sosampler.evaluation.result import EVALUATION_FILE

    chosen = settings or DemoSettings()
    folder = Path(out)
    _claim(folder, {"demo": 1, "seed": whole_number("seed", seed, at_least=0), **asdict(chosen)})
    steps = _Steps(say)
    with steps.step("writing videos"):
        _make_videos(folder, chosen, seed)
    with steps.step("training a classifier on trimmed clips"):
        classifier = _train_classifier(folder, chosen, seed, say)
    with steps.step("preparing a bank: decoding, asking the classifier about every candidate"):
        bank = _prepare(folder, chosen, classifier)
    with steps.step("training a sampler"):
        sampler = _train_sampler(folder, chosen, bank, classifier, seed, say)
    with steps.step("evaluating all policies"):
        evaluation = _evaluate(chosen, bank, classifier, sampler, seed, say)
    with steps.step("writing the report"):
        report = _write_report(folder, chosen, evaluation)
    told = {
        **evaluation.to_dict(),
        "steps": steps.told(),
        "report": str(report),
        "evaluation": str(folder / EVALUATION_FILE),
    }
    _write_json(folder / EVALUATION_FILE, told)
    say(f"\n{evaluation.table()}\n")
    say(_finding(evaluation, chosen))
    say(f"report: {report}; numbers: {folder / EVALUATION_FILE}; {steps.total:.0f} s in all")
    return told


# ---- the steps


def _make_videos(folder: Path, settings: DemoSettings, seed: int) -> None:
    from sosampler.reels.make import make_reels

    with progress_bar("writing videos", sum(settings.videos.values())) as bar:
        make_reels(
            "procedural",
            folder / "videos",
            to="mp4",
            recipe={**_VIDEOS, "num_candidates": settings.num_candidates},
            counts=settings.videos,
            seed=seed,
            num_classes=settings.num_classes,
            on_progress=lambda progress: bar.reach(progress.done),
        )


def _train_classifier(folder: Path, settings: DemoSettings, seed: int, say: Say) -> Any:
    from sosampler.reels.make import make_reels
    from sosampler.training.train_classifier import train_classifier

    clips = make_reels(
        "procedural",
        folder / "clips",
        recipe=_CLIPS,
        counts=settings.clips,
        seed=_CLIP_SEED + seed,
        num_classes=settings.num_classes,
    )
    return train_classifier(
        clips,
        settings.network,
        out=folder / "classifier",
        input_size=settings.classifier_size,
        epochs=settings.classifier_epochs,
        batch_size=32,
        optimizer="adamw",
        lr=0.006,
        crop_scale=(0.75, 1.0),
        num_frames=1,
        seed=seed,
        workers=settings.workers,
        say=_indented(say),
    ).classifier


def _prepare(folder: Path, settings: DemoSettings, classifier: Any) -> Bank:
    from sosampler.bank.prepare import prepare

    with progress_bar("preparing", sum(settings.videos.values())) as bar:
        return prepare(
            folder / "videos" / "manifest.csv",
            classifier,
            folder / "bank",
            num_candidates=settings.num_candidates,
            size=_VIDEOS["size"],
            workers=settings.workers,
            on_progress=lambda progress: bar.reach(progress.done),
        )


def _train_sampler(folder: Path, settings: DemoSettings, bank: Bank, classifier: Any, seed: int, say: Say) -> Any:
    from sosampler.classifiers.factory import WEIGHTS
    from sosampler.training.train_sampler import train

    return train(
        bank,
        out=folder / "sampler",
        classifier=classifier,
        backbone=settings.network,
        # What the classifier has learned to see is a start that saves minutes.
        weights=folder / "classifier" / WEIGHTS,
        input_size=settings.sampler_size,
        epochs=settings.sampler_epochs,
        batch_size=16,
        lr=0.002,
        crop_scale=(0.6, 1.0),
        seed=seed,
        say=_indented(say),
    ).sampler


def _evaluate(settings: DemoSettings, bank: Bank, classifier: Any, sampler: Any, seed: int, say: Say) -> Evaluation:
    from sosampler.evaluation.evaluate import evaluate

    return evaluate(
        bank,
        {**{name: name for name in _POLICIES}, LEARNED: sampler},
        num_frames=settings.num_frames,
        num_candidates=settings.num_candidates,
        classifier=classifier,
        split="test",
        seed=seed,
        say=_indented(say),
    )


def _write_report(folder: Path, settings: DemoSettings, evaluation: Evaluation) -> Path:
    from sosampler.report.page import FILE
    from sosampler.report.run_report import write_run_report

    return write_run_report(
        evaluation.write_run(folder),
        folder / "report" / FILE,
        title="sosampler: the demonstration",
        videos=settings.num_strips,
        bank=folder / "bank",
        headline=(settings.headline, settings.num_candidates),
        intro=(
            f"A small classifier has learned {settings.num_classes} drawn shapes from trimmed clips. Now it is given a "
            "few frames of longer videos, in most of whose shots something else is to be seen. Which frames it is "
            "given decides how often it is right."
        ),
    )


def _finding(evaluation: Evaluation, settings: DemoSettings) -> str:
    """The main numbers in one sentence."""
    shown = {name: evaluation.row(name, settings.headline, settings.num_candidates) for name in _SHOWN}
    uniform, learned, oracle = (100 * getattr(row, evaluation.metric) for row in shown.values())
    return (
        f"{settings.headline} of {settings.num_candidates} frames: right on {uniform:.1f} % of the videos with frames "
        f"spread evenly, on {learned:.1f} % with those of the learned sampler, on {oracle:.1f} % with the semi-optimal "
        "ones, which need the label"
    )


# ---- before it begins: what is installed, whose folder it is; and the clock


def _check_installed() -> None:
    """Said at once, not after the videos are made."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependency(f"the demonstration needs {', '.join(missing)}; install sosampler[train]")


def _claim(folder: Path, told: dict[str, Any]) -> None:
    """Make the folder one of this demonstration, or check that it is."""
    file = folder / SETTINGS_FILE
    told = json.loads(json.dumps(told))  # as it comes back from the file
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"--out {folder}: the folder cannot be made ({error.strerror}); give another") from error
    if file.is_file():
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InvalidArgument(
                f"--out {folder}: {SETTINGS_FILE} is not JSON ({error}); give a new folder"
            ) from error
        if found != told:
            raise InvalidArgument(
                f"--out {folder}: holds a demonstration with other settings{_difference(found, told)}; give the same "
                "to go on with it, or a new folder"
            )
        return
    foreign = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if foreign:
        raise InvalidArgument(f"--out {folder}: holds other things ({', '.join(foreign[:3])}); give a new folder")
    _write_json(file, told)


def _difference(found: Any, told: dict[str, Any]) -> str:
    if not isinstance(found, dict):
        return ""
    names = [name for name in told if found.get(name) != told[name]]
    return f" ({names[0]} was {found.get(names[0])!r}, is {told[names[0]]!r})" if names else ""


def _write_json(path: Path, value: Any) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


class _Steps:
    """What was done and how long it took."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._done: list[tuple[str, float]] = []

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        self._say(f"{len(self._done) + 1}/{_NUM_STEPS} {name} ...")
        begun = time.perf_counter()
        yield
        seconds = time.perf_counter() - begun
        self._done.append((name, seconds))
        self._say(f"    done in {seconds:.1f} s")

    @property
    def total(self) -> float:
        return sum(seconds for _, seconds in self._done)

    def told(self) -> list[dict[str, Any]]:
        return [{"step": name, "seconds": round(seconds, 1)} for name, seconds in self._done]


def _indented(say: Say) -> Say:
    return lambda text: say(f"    {text}")
