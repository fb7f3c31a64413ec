"""The demonstration: everything from videos to a report, in minutes, on two cores and without a download.

Videos are composed of procedural images, a small classifier learns from trimmed clips, its outputs for the candidates
of the untrimmed videos go into a bank, a sampler learns from them, and all policies are evaluated on separate videos.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sosampler._util.files import begin, plain, read_settings, write_text
from sosampler._util.progress import progress_bar
from sosampler._util.validation import check_int
from sosampler.errors import InvalidArgument, MissingDependency

if TYPE_CHECKING:
    from sosampler.evaluation.result import Evaluation

Say = Callable[[str], None]

SETTINGS_FILE = "demo.json"
LEARNED = "sosampler"  # the sampler among the policies
_POLICIES = ("uniform", "random", "all", "semi-optimal-max", "semi-optimal", "optimal")
_SHOWN = ("uniform", LEARNED, "semi-optimal")  # in the summary
_CLIP_SEED = 1_000_000  # clips have other images than the videos
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
    headline: int = 3  # N of the summary and of the strips
    num_strips: int = 9
    workers: int | None = 1  # processes that read the classifier's clips


# Most shots show something else; the camera moves little, since the images are small.
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
# One shot of the class.
_CLIPS: dict[str, Any] = {**_VIDEOS, "num_shots": 1, "share": 1.0, "num_candidates": 4}


def run_demo(
    out: str | os.PathLike[str], *, seed: int = 0, settings: DemoSettings | None = None, say: Say = lambda text: None
) -> dict[str, Any]:
    """Run the demonstration and return the evaluation as evaluation.json holds it; `say` is given a line for each step.

    Below `out`: videos/ (mp4 files), clips/, classifier/, bank/, sampler/, evaluation.json, videos.jsonl and
    report/index.html. Killed and called again, it resumes. A folder with anything else in it is refused.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingDependency(
            f"the demonstration needs {', '.join(missing)}; install it with: pip install 'sosampler[train]'"
        )
    from sosampler.bank.prepare import prepare
    from sosampler.classifiers.factory import WEIGHTS
    from sosampler.evaluation.evaluate import evaluate
    from sosampler.evaluation.result import EVALUATION_FILE
    from sosampler.reels.make import make_reels
    from sosampler.report.page import FILE
    from sosampler.report.run_report import write_run_report
    from sosampler.training.train_classifier import train_classifier
    from sosampler.training.train_sampler import train

    chosen = settings or DemoSettings()
    folder, num_videos = Path(out), sum(chosen.videos.values())
    _claim(folder, {"demo": 1, "seed": check_int("seed", seed, at_least=0), **asdict(chosen)})
    steps, make = _Steps(say), partial(make_reels, "procedural", num_classes=chosen.num_classes)
    with steps.step("writing videos"), progress_bar("writing videos", num_videos) as writing:
        make(
            folder / "videos",
            to="mp4",
            recipe={**_VIDEOS, "num_candidates": chosen.num_candidates},
            counts=chosen.videos,
            seed=seed,
            on_progress=lambda progress: writing.reach(progress.done),
        )
    with steps.step("training a classifier on trimmed clips"):
        clips = make(folder / "clips", recipe=_CLIPS, counts=chosen.clips, seed=_CLIP_SEED + seed)
        classifier = train_classifier(
            clips,
            chosen.network,
            out=folder / "classifier",
            input_size=chosen.classifier_size,
            epochs=chosen.classifier_epochs,
            batch_size=32,
            optimizer="adamw",
            lr=0.006,
            crop_scale=(0.75, 1.0),
            num_frames=1,
            seed=seed,
            workers=chosen.workers,
            say=steps.indented,
        ).classifier
    with (
        steps.step("preparing a bank: decoding, running the classifier on every candidate"),
        progress_bar("preparing", num_videos) as preparing,
    ):
        bank = prepare(
            folder / "videos" / "manifest.csv",
            classifier,
            folder / "bank",
            num_candidates=chosen.num_candidates,
            size=_VIDEOS["size"],
            probe_features=True,
            workers=chosen.workers,
            on_progress=lambda progress: preparing.reach(progress.done),
        )
    with steps.step("training a sampler"):
        sampler: Any = train(
            bank,
            out=folder / "sampler",
            classifier=classifier,
            backbone=chosen.network,
            weights=folder / "classifier" / WEIGHTS,  # a start that saves minutes
            input_size=chosen.sampler_size,
            epochs=chosen.sampler_epochs,
            batch_size=16,
            lr=0.002,
            crop_scale=(0.6, 1.0),
            freeze=0.0,  # a network this small has nothing to spare, and its weights are no ImageNet's
            dropout=0.0,
            seed=seed,
            say=steps.indented,
        )
    with steps.step("evaluating all policies"):
        evaluation = evaluate(
            bank,
            {**{name: name for name in _POLICIES}, LEARNED: sampler.sampler},
            num_frames=chosen.num_frames,
            num_candidates=chosen.num_candidates,
            classifier=classifier,
            split="test",
            seed=seed,
            say=steps.indented,
        )
    with steps.step("writing the report"):
        report = write_run_report(
            evaluation.write_run(folder),
            folder / "report" / FILE,
            title="sosampler: the demonstration",
            videos=chosen.num_strips,
            bank=folder / "bank",
            headline=(chosen.headline, chosen.num_candidates),
            intro=(
                f"A small classifier has learned {chosen.num_classes} drawn shapes from trimmed clips. Now it "
                "classifies longer videos from a few frames, and most of their shots show something else. Which frames "
                "are chosen decides how often it is right."
            ),
        )
    result = {
        **evaluation.to_dict(),
        "steps": [{"step": name, "seconds": round(seconds, 1)} for name, seconds in steps.done],
        "report": str(report),
        "evaluation": str(folder / EVALUATION_FILE),
    }
    write_text(folder / EVALUATION_FILE, json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    say(f"\n{evaluation.table()}\n")
    say(_summary(evaluation, chosen))
    total = sum(seconds for _, seconds in steps.done)
    say(f"report: {report}; numbers: {folder / EVALUATION_FILE}; {total:.0f} s in all")
    return result


def _summary(evaluation: Evaluation, settings: DemoSettings) -> str:
    """Return the main numbers in one sentence."""
    shown = {name: evaluation.row(name, settings.headline, settings.num_candidates) for name in _SHOWN}
    uniform, learned, oracle = (100 * getattr(row, evaluation.metric) for row in shown.values())
    return (
        f"{settings.headline} of {settings.num_candidates} frames: right on {uniform:.1f} % of the videos with frames "
        f"spread evenly, on {learned:.1f} % with those of the learned sampler, on {oracle:.1f} % with the semi-optimal "
        "ones, which need the label"
    )


def _claim(folder: Path, settings: dict[str, Any]) -> None:
    """Write the settings into a new folder, or check that they are the same."""
    file, settings = folder / SETTINGS_FILE, plain(settings)
    stored = read_settings(file)
    if stored is None:
        begin(file, settings)
    elif stored != settings:
        difference = ""
        if isinstance(stored, dict):
            names = [name for name in settings if stored.get(name) != settings[name]]
            difference = f" ({names[0]} was {stored.get(names[0])!r}, is {settings[names[0]]!r})" if names else ""
        raise InvalidArgument(
            f"--out {folder}: holds a demonstration with other settings{difference}; give the same to resume it, or a "
            "new folder"
        )


class _Steps:
    """The finished steps with their seconds."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.done: list[tuple[str, float]] = []

    def indented(self, text: str) -> None:
        self._say(f"    {text}")

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        self._say(f"{len(self.done) + 1}/{_NUM_STEPS} {name} ...")
        begin = time.perf_counter()
        yield
        seconds = time.perf_counter() - begin
        self.done.append((name, seconds))
        self.indented(f"done in {seconds:.1f} s")
