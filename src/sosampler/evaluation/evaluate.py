"""`evaluate`: how good policies are, measured on the videos of a bank."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sosampler import __version__
from sosampler.auto_frames import AUTO
from sosampler.bench.measure import circumstances
from sosampler.checks import one_of, whole_number
from sosampler.classifiers.base import PRECISIONS
from sosampler.classifiers.devices import check_device
from sosampler.classifiers.registry import create_classifier, saved_folder
from sosampler.data.bank import Bank
from sosampler.data.bank_teachers import Teacher
from sosampler.data.shards import OnProgress, Progress
from sosampler.data.splits import SPLITS
from sosampler.errors import InvalidArgument
from sosampler.evaluation.adaptive import autos_of, by_themselves
from sosampler.evaluation.bootstrap import Resamples
from sosampler.evaluation.choosers import AutoChooser, Chooser, choose_all
from sosampler.evaluation.clips import Clips, clips_for, gmacs_of_clips
from sosampler.evaluation.frames import FrameChunk, read_chunks
from sosampler.evaluation.metrics import multi_hot
from sosampler.evaluation.per_video import Answers, PerVideo
from sosampler.evaluation.plan import Plan, pairs_of
from sosampler.evaluation.policies import DEFAULT_POLICIES, ChooserMaker, policies_of
from sosampler.evaluation.rows import Cell, Evaluation, Measuring, Spent, Tally
from sosampler.evaluation.scorers import Scorer, score_chunk
from sosampler.evaluation.systems import NOT_SEEN, run_systems, tell_of_differences
from sosampler.evaluation.views import CandidateView, Videos
from sosampler.progress import progress_bar
from sosampler.video.timeline import Indices

log = logging.getLogger("sosampler")

# Numbers of the teacher's answers that are laid out at once (256 MiB of float32).
_NUMBERS_AT_ONCE = 1 << 26


def evaluate(
    bank: Bank | str | os.PathLike[str],
    policies: Any = DEFAULT_POLICIES,
    *,
    num_frames: int | str | Sequence[int | str] = 6,
    num_candidates: int | Sequence[int] = 10,
    pairs: Sequence[tuple[int | str, int]] | None = None,
    classifier: Any = None,
    views: int | None = None,
    split: str | None = None,
    seed: int = 0,
    bootstrap: int = 2000,
    device: Any = None,
    precision: str | None = None,
    beam_width: int = 16,
    auto_min: int | None = None,
    auto_max: int | None = None,
    auto_tolerance: float | Sequence[float] | None = None,
    on_progress: OnProgress | None = None,
    say: Callable[[str], None] | None = None,
) -> Evaluation:
    """Let policies choose N of T candidates of each video, and measure what the classifier makes of the chosen clips.

    Args:
        bank: with the answers of a classifier.
        policies: names ("uniform", "random", "centre", "frameexit", "all", "frame-difference", "difference-peaks",
            "farthest-first", "dpp", "general"; the oracles "semi-optimal", "semi-optimal-max", "optimal"), samplers,
            folders of samplers, "NAME=FOLDER", or a dict {name: sampler}. "+mmr" or "+dpp" behind a semi-optimal policy
            or a folder minds redundancy; "+aks", "+its" or "+nms", also behind "frame-difference", spreads the choice
            in time. Trained systems and their folders are given in the same ways; "FOLDER@VALUE" turns the dial of a
            system, "FOLDER@all" gives a row for each value that it offers. What `train` returns stands for the sampler
            or the system in it.
        num_frames, num_candidates: N and T; all combinations of what is given. A system decides for itself how many
            frames it looks at, so it has one row for each T. "auto" among the N gives each sampler rows NAME+auto, of
            which it decides on N itself, video by video.
        pairs: (N, T) pairs instead.
        classifier: object, folder of a saved one, or the name of a teacher. Needed where the bank keeps no logits of
            it, and for its GMACs unless the bank keeps features of it.
        views: which teacher is meant where one classifier taught the bank with several numbers of views.
        split: "train", "dev" or "test". None takes test, or else dev, or else train, and says so.
        seed: of the random policy and of the bootstrap.
        bootstrap: resamples of the videos for 95 % intervals; 0 for none.
        device: where the arithmetic and samplers and classifiers that are loaded run; default: the GPU if there is
            one. Objects stay where they are.
        precision: of what is loaded: "float32", "bfloat16" or "float16".
        beam_width: of the search for the optimal policy of classifiers that have to be run on every clip.
        auto_min, auto_max, auto_tolerance: of num_frames="auto", as in `select`; several tolerances give a row each,
            NAME+auto@TOLERANCE.
        on_progress: told after each video whose pictures were looked at; default: a progress bar.
        say: told what a reader of the numbers should know, which is also in `notes`.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import sosampler as so
        >>> with TemporaryDirectory() as folder:
        ...     reels = {"counts": {"test": 4}, "num_classes": 2, "recipe": {"size": 48}}
        ...     bank = so.make_reels("procedural", folder, **reels)
        ...     clf = so.create_classifier("timm:test_resnet", class_names=bank.classes, input_size=32)
        ...     bank = so.add_teacher(bank, clf)
        ...     res = so.evaluate(bank, ["uniform", "optimal"], num_frames=2, num_candidates=6, classifier=clf)
        >>> [row.policy for row in res.rows]
        ['uniform', 'optimal']
        >>> res.row("optimal").confidence >= res.row("uniform").confidence
        True
    """
    begun = time.perf_counter()
    notes = _Notes(say)
    where = check_device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if precision is not None:
        one_of("precision", precision, PRECISIONS)
    seed, draws = whole_number("seed", seed, at_least=0), whole_number("bootstrap", bootstrap, at_least=0)
    asked = pairs_of(num_frames, num_candidates, pairs)
    part, name = _split_of(_bank_of(bank), split, notes)
    judge, teacher = _classifier_of(part, classifier, views, where, precision)
    clips = clips_for(teacher, judge)
    videos = _labelled(part, teacher, where, clips, notes)
    _check_lengths(part, videos, [count for _, count in asked], notes)
    maker = ChooserMaker(clips, len(videos), seed, whole_number("beam_width", beam_width), where, precision)
    choosers, systems = policies_of(policies, maker)
    autos = autos_of(asked, auto_min, auto_max, auto_tolerance)
    plan = Plan(asked, choosers, by_themselves(choosers, autos, asked), maker, clips, notes.add)
    _tell_of_strangers(plan, teacher, notes)
    tell_of_differences(systems, teacher, plan.candidates, notes.add)
    price = gmacs_of_clips(clips, judge, teacher) if choosers else None
    if choosers and price is None:
        notes.add("no GMACs of the classifier, which is not at hand: give it as classifier (--classifier FOLDER)")

    of_systems = run_systems(systems, plan.candidates, part, videos)
    plan.compare({cell: spent.frames_classified for cell, (_, spent) in of_systems.items()})
    run = _Run(videos, clips, plan)
    run.all(part, on_progress)
    plan.compare({cell: float(run.counts(cell).mean()) for cell in run.tallies if cell.num_frames is None})
    run.rest()

    tallies = {**run.tallies, **{cell: tally for cell, (tally, _) in of_systems.items()}}
    measuring = Measuring(
        tallies, videos.labels, "mAP" if part.multi_label else "top1", Resamples(videos.labels, draws, seed, where)
    )
    spent_by = {cell: _spent(cell, chooser, price, run.counts(cell)) for cell, chooser in plan.shown}
    spent_by |= {cell: spent for cell, (_, spent) in of_systems.items()}
    rows = [measuring.row(cell, spent, against=plan.against(cell)) for cell, spent in spent_by.items()]
    rows.sort(key=lambda row: plan.candidates.index(row.num_candidates))  # systems follow the policies of their T
    facts = {
        "num_candidates": _one_or_list([count for _, count in asked]),
        "num_frames": _one_or_list([AUTO if wanted is None else wanted for wanted, _ in asked]),
        "pairs": [[AUTO if wanted is None else wanted, count] for wanted, count in asked],
        "metric": "mAP" if part.multi_label else "top1",
        "bank": str(part.path),
        "split": name,
        "num_videos": len(videos),
        "num_classes": len(part.classes),
        "teacher": {key: teacher.about[key] for key in ("name", "fingerprint", "pooling", "views", "precision")},
        "seed": seed,
        "bootstrap": draws,
        "device": str(where),
        "versions": {
            "sosampler": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "machine": circumstances(())["machine"],
        "notes": notes.texts,
        "seconds": round(time.perf_counter() - begun, 3),
    }
    if autos:
        facts["auto"] = {name: auto.told() for name, auto in autos.items()}
    if systems:
        facts["systems"] = {policy.name: policy.facts() for policy in systems}
    ids = tuple(part.rows[place].item.id for place in videos.places)
    kept = PerVideo(
        part,
        tuple(videos.places),
        teacher,
        {cell: Answers.of(tallies[cell].probs, videos.labels) for cell in spent_by},
        _scores_by_policy(plan, videos),
    )
    return Evaluation(tuple(rows), facts, ids, {cell: tallies[cell].slots for cell in spent_by}, kept)


class _Notes:
    """Collected, and told at once."""

    def __init__(self, say: Callable[[str], None] | None) -> None:
        self.texts: list[str] = []
        self._say = say

    def add(self, text: str) -> None:
        if text not in self.texts:
            self.texts.append(text)
            (self._say or log.warning)(text)


# ---- what is measured


def _split_of(bank: Bank, split: str | None, notes: _Notes) -> tuple[Bank, str]:
    """The part of a bank that is meant, and its name."""
    if split is None and bank._split is not None:
        split = bank._split
    whole = Bank(bank.path, partial=bank._partial)
    sizes = Counter(item.split or "train" for item in whole.items)
    there = ", ".join(f"{count} in {name}" for name, count in sizes.items()) or "no videos at all"
    if split is not None:
        if not sizes[one_of("split", split, SPLITS)]:
            raise InvalidArgument(f"{bank.path}: has no video in the split {split!r}, but {there}; choose one of these")
        return whole.split(split), split
    name = next((name for name in ("test", "dev", "train") if sizes[name]), None)
    if name is None:
        raise InvalidArgument(f"{bank.path}: has no videos; prepare a bank with some")
    if name != "test":
        why = "which samplers and systems learn from" if name == "train" else "by which samplers keep their best epoch"
        notes.add(f"the bank has no test split, so the policies are measured on {name}, {why}")
    return whole.split(name), name


def _bank_of(given: Any) -> Bank:
    if not isinstance(given, (Bank, str, os.PathLike)):
        raise InvalidArgument(f"bank={given!r} is not allowed; give a bank, or the folder of one")
    return given if isinstance(given, Bank) else Bank(given)


def _classifier_of(
    bank: Bank, given: Any, views: int | None, device: torch.device, precision: str | None
) -> tuple[Any, Teacher]:
    """The classifier, or None where only its answers are at hand, and the teacher."""
    if views is not None:
        views = whole_number("views", views)
    folder = saved_folder(given)
    if folder is not None:
        given = create_classifier(str(folder), device=device, precision=precision)
    elif isinstance(given, os.PathLike):
        raise InvalidArgument(f"classifier={os.fspath(given)!r} is no folder of a saved classifier; give such a folder")
    elif given is not None and not isinstance(given, str):
        for member in ("clip_probs", "fingerprint"):
            if not hasattr(given, member):
                raise InvalidArgument(
                    f"classifier is a {type(given).__name__}, which has no {member}; give a classifier of "
                    "so.create_classifier or so.wrap_classifier, the folder of one, or the name of a teacher"
                )
    return (None if given is None or isinstance(given, str) else given), bank.teacher(given, views=views)


def _tell_of_strangers(plan: Plan, teacher: Teacher, notes: _Notes) -> None:
    """Samplers that were trained for another teacher than the one that judges here."""
    for _, chooser in plan.shown:
        about = getattr(getattr(chooser.scorer, "sampler", None), "about", None) or {}
        trained_for = about.get("teacher")
        if isinstance(trained_for, str) and trained_for != teacher.name:
            notes.add(
                f"{chooser.name} was trained for the teacher {trained_for} ({about.get('classifier')}), but "
                f"{teacher.name} ({teacher.about['name']}) judges here"
            )


def _labelled(bank: Bank, teacher: Teacher, device: torch.device, clips: Clips, notes: _Notes) -> Videos:
    places = [place for place, row in enumerate(bank.rows) if row.item.labels]
    if not places:
        raise InvalidArgument(f"{bank.path}: no video of this split has a label, so nothing can be measured")
    if len(places) < len(bank):
        notes.add(f"{len(bank) - len(places)} of {len(bank)} videos have no label and are left out")
    labels = multi_hot([bank.rows[place].item.labels for place in places], len(bank.classes))
    return Videos(teacher, places, labels, device, with_features=not clips.needs_frames)


def _check_lengths(bank: Bank, videos: Videos, candidates: Sequence[int], notes: _Notes) -> None:
    longest = int(videos.lengths.max())
    for num_candidates in dict.fromkeys(candidates):
        if longest < num_candidates:
            raise InvalidArgument(
                f"num_candidates={num_candidates} is more than the bank stores of any video (at most {longest}); "
                f"ask for at most {longest}, or prepare the bank with more (`sosampler prepare -t {num_candidates}`)"
            )
        short = int((videos.lengths < num_candidates).sum())
        if short:
            notes.add(
                f"{short} of {len(videos)} videos have fewer than {num_candidates} stored frames; each of theirs is "
                "offered once, and repeated evenly only where more are wanted than there are"
            )


def _one_or_list(numbers: Sequence[int | str]) -> int | str | list[int | str]:
    distinct = list(dict.fromkeys(numbers))
    return distinct[0] if len(distinct) == 1 else distinct


def _spent(cell: Cell, chooser: Chooser, price: Callable[[int], float] | None, counts: Indices) -> Spent:
    """`counts` [V]: frames that were chosen."""
    scorer = chooser.scorer
    unasked = None if chooser.looks else 0.0  # what oracles know has no price
    how_often = Counter(counts.tolist() if cell.num_frames is None else [cell.num_frames])
    total = sum(how_often.values())
    taken = cell.num_frames or sum(count * often for count, often in how_often.items()) / total
    return Spent(
        frames_classified=taken,
        frames_decoded=cell.num_candidates if chooser.looks else taken,
        sampler_gmacs=unasked if scorer is None else scorer.gmacs(cell.num_candidates),
        classifier_gmacs=None
        if price is None
        else sum(price(count) * often for count, often in how_often.items()) / total,
    )


def _scores_by_policy(plan: Plan, videos: Videos) -> dict[tuple[str, int], NDArray[np.float32]]:
    """Scores [V, T] of everybody who looked at pictures, by the name of the policy and T."""
    found = {}
    for cell, chooser in plan.shown:
        if chooser.scorer is not None:
            found[cell.policy, cell.num_candidates] = videos.scores[chooser.scorer.key, cell.num_candidates]
    return found


# ---- the run


class _Run:
    """Lets everybody choose, and keeps what the classifier said."""

    def __init__(self, videos: Videos, clips: Clips, plan: Plan) -> None:
        self._videos, self._clips, self._plan = videos, clips, plan
        self.tallies = {cell: self._empty(cell) for cell in plan.cells}

    def _empty(self, cell: Cell) -> Tally:
        num_videos, num_classes = self._videos.labels.shape
        return Tally.empty(num_videos, num_classes, cell.num_frames or cell.num_candidates)

    def counts(self, cell: Cell) -> Indices:
        """Frames that were chosen of each video, [V]."""
        found: Indices = (self.tallies[cell].slots != NOT_SEEN).sum(1)
        return found

    def all(self, bank: Bank, on_progress: OnProgress | None) -> None:
        if not self._plan.cells:
            return
        scorers = self._plan.scorers
        if scorers or self._clips.needs_frames:
            with _telling(len(self._videos), on_progress) as tell:
                for chunk in self._chunks(bank):
                    self._look(chunk, scorers)
                    tell(len(chunk.videos))
        if not self._clips.needs_frames:
            self._judge_all(self._plan.cells)

    def rest(self) -> None:
        """Judge what the plan was given since, which needs no pictures."""
        new = {cell: chooser for cell, chooser in self._plan.cells.items() if cell not in self.tallies}
        if new:
            self.tallies |= {cell: self._empty(cell) for cell in new}
            self._judge_all(new)

    def _judge_all(self, cells: Mapping[Cell, Chooser]) -> None:
        if cells:
            a_video = self._plan.numbers_a_video(self._videos.numbers_a_candidate())
            at_once = max(1, _NUMBERS_AT_ONCE // a_video)
            for begin in range(0, len(self._videos), at_once):
                numbers = np.arange(begin, min(begin + at_once, len(self._videos)))
                self._judge(self._videos.views(numbers, self._plan.candidates), cells)

    def _chunks(self, bank: Bank) -> Iterator[FrameChunk]:
        """Pictures of all candidates, whatever their number: each is read once."""
        wanted = [
            np.unique(np.concatenate([self._videos.slots(number, count)[0] for count in self._plan.candidates]))
            for number in range(len(self._videos))
        ]
        return read_chunks(bank, self._videos.places, wanted)

    def _look(self, chunk: FrameChunk, scorers: Sequence[Scorer]) -> None:
        seconds = score_chunk(scorers, self._videos, chunk, self._plan.candidates)
        for cell, chooser in self._plan.cells.items():
            if chooser.scorer is not None:
                self.tallies[cell].seconds += seconds[chooser.scorer.key, cell.num_candidates]
        if self._clips.needs_frames:
            self._judge(self._videos.views(chunk.numbers, self._plan.candidates, chunk), self._plan.cells)

    def _judge(self, views: dict[int, CandidateView], cells: Mapping[Cell, Chooser]) -> None:
        for cell, chooser in cells.items():
            view = views[cell.num_candidates]
            if cell.num_frames is not None:
                self._judge_cell(cell, chooser, view, cell.num_frames)
                continue
            assert isinstance(chooser, AutoChooser), "systems have run before"
            counts = chooser.count(view)
            self.tallies[cell].slots[view.numbers] = NOT_SEEN
            for count in np.unique(counts).tolist():
                self._judge_cell(cell, chooser, view.some(counts == count), count)

    def _judge_cell(self, cell: Cell, chooser: Chooser, view: CandidateView, num_frames: int) -> None:
        begun = time.perf_counter()
        tally = self.tallies[cell]
        chosen = choose_all(chooser, view, num_frames)
        tally.probs[view.numbers] = self._clips.probs(view, chosen.positions).cpu().numpy()
        slots = np.take_along_axis(view.slots, chosen.positions.cpu().numpy(), axis=1)
        tally.slots[view.numbers, :num_frames] = slots
        if chosen.gap is not None:
            tally.gap = np.zeros(len(tally.probs)) if tally.gap is None else tally.gap
            tally.gap[view.numbers] = chosen.gap
        if chosen.method is not None:
            tally.methods.add(chosen.method)
        tally.seconds += time.perf_counter() - begun


@contextmanager
def _telling(total: int, on_progress: OnProgress | None) -> Iterator[Callable[[int], None]]:
    """A function that is told how many videos were just looked at."""
    progress = Progress(total)
    with progress_bar("looking", 0 if on_progress is not None else total) as bar:

        def tell(count: int) -> None:
            bar.advance(count)
            for _ in range(count if on_progress is not None else 0):
                progress.done += 1
                assert on_progress is not None
                on_progress(progress)

        yield tell
