"""Which policies choose how many of how many, and what they are measured against."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sosampler import __version__
from sosampler._util.devices import check_device
from sosampler._util.environment import circumstances
from sosampler._util.progress import OnProgress, Progress, progress_bar
from sosampler._util.validation import one_of, whole_number
from sosampler.bank.bank import Bank
from sosampler.bank.outputs import Teacher
from sosampler.classifiers.base import PRECISIONS
from sosampler.classifiers.factory import create_classifier, saved_folder
from sosampler.datasets.splits import SPLITS
from sosampler.errors import InvalidArgument
from sosampler.evaluation.baselines import NOT_SEEN, run_systems, tell_of_differences, whole_frames
from sosampler.evaluation.batches import CandidateView, FrameChunk, Videos, read_chunks
from sosampler.evaluation.bootstrap import Resamples
from sosampler.evaluation.clip_scores import Clips, clips_for, gmacs_of_clips
from sosampler.evaluation.metrics import multi_hot
from sosampler.evaluation.policies import (
    DEFAULT_POLICIES,
    AutoChooser,
    Chooser,
    ChooserMaker,
    RedundancyChooser,
    autos_of,
    by_themselves,
    choose_all,
    policies_of,
)
from sosampler.evaluation.result import Answers, Cell, Evaluation, Measuring, PerVideo, Spent, Tally
from sosampler.evaluation.scorers import Scorer, score_chunk
from sosampler.policies.auto import AUTO
from sosampler.video.timeline import Indices

Pair = tuple[int | None, int]  # N, T; None where the policy decides on N


def pairs_of(num_frames: Any, num_candidates: Any, pairs: Any = None) -> list[Pair]:
    """(N, T) to be evaluated: the given pairs, or all combinations; None for "auto".

    >>> pairs_of([1, "auto"], 10), pairs_of(6, 10, pairs=[(8, 30)])
    ([(1, 10), (None, 10)], [(8, 30)])
    """
    found: list[Pair]
    if pairs is None:
        wanted = [_number_or_auto(value) for value in _listed("num_frames", num_frames)]
        offered = [whole_number("num_candidates", value) for value in _listed("num_candidates", num_candidates)]
        found = [(frames, candidates) for candidates in offered for frames in wanted]
    elif isinstance(pairs, Iterable) and not isinstance(pairs, str):
        found = [_pair(pair) for pair in pairs]
    else:
        raise InvalidArgument(
            f"pairs={pairs!r} is not allowed; give a list of (num_frames, num_candidates), for example [(8, 30)]"
        )
    if not found:
        raise InvalidArgument("pairs are empty; give at least one pair of num_frames and num_candidates")
    for frames, candidates in found:
        if frames is not None and frames > candidates:
            raise InvalidArgument(
                f"num_frames={frames} is more than num_candidates={candidates}; ask for at most as many frames as "
                "there are candidates, or name the combinations as pairs"
            )
    return list(dict.fromkeys(found))


def _listed(name: str, given: Any) -> list[Any]:
    values = list(given) if isinstance(given, (list, tuple, range)) else [given]
    if not values:
        raise InvalidArgument(f"{name} is empty; give at least one whole number")
    return values


def _number_or_auto(given: Any) -> int | None:
    return None if isinstance(given, str) and given == AUTO else whole_number("num_frames", given)


def _pair(given: Any) -> Pair:
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise InvalidArgument(f"pairs hold {given!r}; give (num_frames, num_candidates), for example (8, 30)")
    return _number_or_auto(given[0]), whole_number("num_candidates", given[1])


class Plan:
    """All cells of an evaluation: those that are shown, and those that are only measured against.

    With N = None stands each of `by_themselves`, samplers that decide on N.

    Uniform and semi-optimal choices are measured beside any policy where that costs no run of the classifier, and the
    optimal ones where there are few subsets.
    """

    def __init__(
        self,
        pairs: Sequence[Pair],
        choosers: Sequence[Chooser],
        by_themselves: Sequence[AutoChooser],
        maker: ChooserMaker,
        clips: Clips,
        note: Callable[[str], None],
    ) -> None:
        self.candidates = list(dict.fromkeys(count for _, count in pairs))
        self.frames_of = {count: [frames for frames, same in pairs if same == count] for count in self.candidates}
        self.shown: list[tuple[Cell, Chooser]] = []
        self.cells: dict[Cell, Chooser] = {}
        self._maker, self._clips, self._note = maker, clips, note
        self._as_many: dict[Cell, int] = {}  # of who decides on N: N of the uniform choice that has no fewer frames
        if not choosers:
            return  # systems alone, which are measured against uniform as soon as it is known how much they look at
        names = {chooser.name for chooser in choosers}
        references = [maker.named(name) for name in ("uniform", "semi-optimal") if name not in names]
        unseen = [] if clips.needs_frames else references
        if clips.needs_frames and references:
            missing = " and ".join(repr(reference.name) for reference in references)
            note(f"no comparison with {missing}, which the classifier would have to be run for: add it to the policies")
        for count in self.candidates:
            for frames in self.frames_of[count]:
                if frames is None:
                    self.shown += [(Cell(chooser.name, None, count), chooser) for chooser in by_themselves]
                    continue
                shown = [chooser for chooser in choosers if chooser.name != "all"]
                self.shown += [(Cell(chooser.name, frames, count), chooser) for chooser in shown]
                hidden = list(unseen)
                if "optimal" not in names:
                    if clips.enumerable(count, frames):
                        hidden.append(maker.named("optimal"))
                    else:
                        note(
                            f"no fidelity for {frames} of {count}: add the policy 'optimal', whose search takes a while"
                        )
                self.cells |= {Cell(chooser.name, frames, count): chooser for chooser in hidden}
            # All candidates are the same clip for every N, so they have one row.
            self.shown += [(Cell(one.name, count, count), one) for one in choosers if one.name == "all"]
        self.cells |= dict(self.shown)

    def compare(self, mean_frames: Mapping[Cell, float]) -> None:
        """Let who decides on N be measured against uniform with as many frames as it takes in the mean, rounded up."""
        missing: dict[int, dict[str, int]] = {}  # by T and the name of the row
        for cell, mean in mean_frames.items():
            frames = whole_frames(mean, cell.num_candidates)
            uniform = Cell("uniform", frames, cell.num_candidates)
            if uniform not in self.cells:
                if self._clips.needs_frames:
                    missing.setdefault(cell.num_candidates, {})[cell.policy] = frames
                    continue
                self.cells[uniform] = self._maker.named("uniform")
            self._as_many[cell] = frames
        for count, wanted in missing.items():
            self._note(
                f"no comparison of {', '.join(wanted)} with 'uniform', which the classifier would have to be run for: "
                f"add it to the policies with num_frames={','.join(map(str, sorted(set(wanted.values()))))} of {count}"
            )

    @property
    def scorers(self) -> list[Scorer]:
        """Everybody who looks at pictures, once."""
        found = {chooser.scorer.key: chooser.scorer for chooser in self.cells.values() if chooser.scorer is not None}
        return list(found.values())

    def numbers_a_video(self, a_candidate: int) -> int:
        """Numbers in float32 that the views of one video take, with `a_candidate` of them for each candidate."""
        kernels = any(isinstance(chooser, RedundancyChooser) for chooser in self.cells.values())
        # Likeness of all pairs in float32 and, with what is factored from it, in float64.
        return sum(count * a_candidate + (6 * count * count if kernels else 0) for count in self.candidates)

    def against(self, cell: Cell) -> int | None:
        """N of the uniform and semi-optimal choices that a cell is compared with; None where several would do."""
        if cell.num_frames is None:
            return self._as_many.get(cell)
        if cell.policy != "all":
            return cell.num_frames
        wanted = [frames for frames in self.frames_of[cell.num_candidates] if frames is not None]
        return wanted[0] if len(wanted) == 1 else None


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
