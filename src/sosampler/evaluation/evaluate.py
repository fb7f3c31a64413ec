"""`evaluate`: let policies choose N of T candidates, and measure the classifier's accuracy on the chosen clips."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sosampler import __version__
from sosampler._util.arrays import Indices
from sosampler._util.environment import circumstances
from sosampler._util.hardware import check_device, keep_memory
from sosampler._util.limits import check_count
from sosampler._util.progress import OnProgress, Progress, progress_bar
from sosampler._util.validation import check_int, one_of
from sosampler.bank.bank import Bank
from sosampler.bank.format import Shown
from sosampler.bank.outputs import Teacher
from sosampler.classifiers.base import PRECISIONS
from sosampler.classifiers.factory import create_classifier, saved_folder
from sosampler.datasets.manifest import SPLITS
from sosampler.errors import InvalidArgument
from sosampler.evaluation.clip_scores import FrameChunk, TeacherBatch, Videos, clips_for, gmacs_of_clips, read_chunks
from sosampler.evaluation.plan import (
    NOT_SEEN,
    Entry,
    Plan,
    Resolver,
    auto_entries,
    autos_of,
    note_differences,
    pairs_of,
    run_baselines,
)
from sosampler.evaluation.result import (
    Cell,
    Evaluation,
    EvaluationRow,
    Measured,
    PerVideo,
    Predictions,
    Resamples,
    Spent,
    Tally,
    calibration_error,
    confidences,
    multi_hot,
    shared_share,
)
from sosampler.policies.auto import AUTO, Auto
from sosampler.policies.base import AnswerSource, Batch, Policy, choose, count_frames, scores_of
from sosampler.policies.registry import ClassFrames, MethodPolicy, Optimal, OwnAnswer, with_answer
from sosampler.samplers.answer import frames_to_ask
from sosampler.samplers.recipe import title_of
from sosampler.samplers.registry import BELIEFS, MEAN, WEIGHTED
from sosampler.video.candidates import segment_centres

DEFAULT_POLICIES = ("uniform", "random", "all", "semi-optimal-max", "semi-optimal", "optimal")

Note = Callable[[str], None]  # called with a text for the reader of the numbers

log = logging.getLogger("sosampler")

# Numbers of the teacher's outputs that are held at a time (256 MiB of float32), and frames that go to a policy.
_MAX_NUMBERS = 1 << 26
_MAX_FRAMES = 1024
# Gaps of the optimal policy below this share of probability do not matter.
_SMALL_GAP = 1e-3
# Sums on a GPU have no fixed order, so that equal clips may differ by rounding; no metric is finer than this.
_ROUNDING = 1e-9


def evaluate(
    bank: Bank | str | os.PathLike[str],
    policies: Any = DEFAULT_POLICIES,
    *,
    num_frames: int | str | Auto | Sequence[int | str | Auto] = 6,
    num_candidates: int | Sequence[int] = 10,
    pairs: Sequence[tuple[int | str | Auto, int]] | None = None,
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
    auto_sure: float | None = None,
    answer: str | None = None,
    on_progress: OnProgress | None = None,
    say: Callable[[str], None] | None = None,
) -> Evaluation:
    """Let policies choose N of T candidates of each video, and measure the classifier's accuracy on the chosen clips.

    Args:
        bank: with the outputs of a classifier, the teacher.
        policies: names of `list_policies(oracles=True)`, samplers, folders of samplers, `Policy` objects,
            "module:Class", "NAME=FOLDER", or a dict {name: any of them}. "+mmr" or "+dpp" behind a policy with scores
            avoids redundant frames; "+aks", "+its" or "+nms" spreads the choice in time. "keyframe" is for a bank that
            was prepared with candidates="keyframe". Trained baselines (systems) and their folders are given in the
            same ways; "FOLDER@VALUE" sets the threshold of a baseline, "FOLDER@all" gives a row for each of its
            values, "FOLDER@uniform" (or "FOLDER@uniform@N") rows of its own layers on N evenly spread frames instead of
            its search. What `train` returns stands for the sampler or the baseline in it. "FOLDER+answer" is the answer
            of the sampler's own class head, without the classifier; "FOLDER+mean", "FOLDER+weighted", "FOLDER+fused"
            and "FOLDER+probed" say how the classifier's answers for the chosen frames become one. "class-frames" is for
            banks that know which frames show the class, as those of reels do.
        num_frames, num_candidates: N and T; all combinations of what is given. A baseline decides how many frames it
            needs, so it has one row for each T. "auto" or an `Auto` among the N gives each sampler rows NAME+auto, for
            which it decides on N video by video.
        pairs: (N, T) pairs instead.
        classifier: object, folder of a saved one, or the name of a teacher. Needed where the bank stores no logits of
            it, and for its GMACs unless the bank stores features of it.
        views: of the teacher, where one classifier annotated the bank with several numbers of views.
        split: "train", "dev" or "test". None takes test, or else dev, or else train, with a note.
        seed: of the random policy and of the bootstrap.
        bootstrap: resamples of the videos for 95 % intervals; 0 for none. Where videos belong to groups, these are
            resampled. Where the bank knows the pictures that they are made of, intervals count these too, so that
            videos of the same pictures do not count as independent (`ci_units` in the result says which).
        device: of the computation and of samplers and classifiers that are loaded; default: the GPU if there is one.
            Objects stay where they are.
        precision: of what is loaded: "float32", "bfloat16" or "float16".
        beam_width: of the search for the optimal policy of classifiers that must be run on every clip.
        auto_min, auto_max, auto_tolerance: of num_frames="auto", as in `select`; several tolerances give a row each,
            NAME+auto@TOLERANCE.
        auto_sure: of num_frames="auto" with answer "fused" or "probed": the belief at which no further frame is asked
            for.
        answer: "mean", "weighted", "fused" or "probed", of all samplers whose name does not say it; None takes the one
            that was best on dev in each sampler's training, where the classifier has answers for single frames.
        on_progress: called after each video whose frames were read; default: a progress bar.
        say: called with each note about the numbers; all are in `notes`.

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
    notes: list[str] = []

    def note(text: str) -> None:
        if text not in notes:
            notes.append(text)
            (say or log.warning)(text)

    where = check_device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if where.type == "cpu":
        keep_memory()  # networks run faster
    if precision is not None:
        one_of("precision", precision, PRECISIONS)
    seed, draws = check_int("seed", seed, at_least=0), check_count("bootstrap", bootstrap, "MAX_RESAMPLES", at_least=0)
    beam_width = check_int("beam_width", beam_width)
    all_pairs = pairs_of(num_frames, num_candidates, pairs)
    part, name = _split_of(bank, split, note)
    network, teacher = _classifier_of(part, classifier, views, where, precision)
    if remark := teacher.remark():
        note(remark)
    clips = clips_for(teacher, network)
    positions = _labelled(part, note)
    labels = multi_hot([part.rows[position].item.labels for position in positions], len(part.classes))
    videos = Videos(teacher, positions, labels, where, clips, beam_width)
    videos.class_inputs = part.features_of_teacher(teacher)
    _check_lengths(videos, [count for _, count in all_pairs], note)
    chosen_policies, baselines = Resolver(device, where, precision).resolve(policies)
    _check_policies(chosen_policies, part, teacher, note)
    source = AnswerSource(
        not clips.needs_frames,
        part.classes,
        teacher.multi_label,
        str(teacher.about["name"]),
        features_of="" if videos.class_inputs is None else teacher.fingerprint,
        no_features=f"{part.path} has no features of the classifier; add them with "
        f"`sosampler bank add-features {part.path} --features classifier=FOLDER`",
    )
    chosen_policies = [with_answer(policy, answer, source, note) for policy in chosen_policies]
    if any(isinstance(_scorer(policy), ClassFrames) for policy in chosen_policies):
        videos.shows_class = _class_frames(part, positions)
    autos = autos_of(num_frames, pairs, auto_min, auto_max, auto_tolerance, auto_sure)
    plan = Plan(all_pairs, chosen_policies, auto_entries(chosen_policies, autos, all_pairs), clips, note)
    note_differences(baselines, teacher, plan.candidates, note)
    price = gmacs_of_clips(clips, network, teacher) if chosen_policies else None
    if chosen_policies and price is None:
        note("no GMACs of the classifier, which is not at hand: give it as classifier (--classifier FOLDER)")

    of_baselines = run_baselines(baselines, plan.candidates, part, videos)
    plan.compare({cell: spent.frames_classified for cell, (_, spent) in of_baselines.items()})
    run = _Run(videos, plan, seed)
    run.all(part, on_progress)
    plan.compare({cell: float(run.counts(cell).mean()) for cell in run.tallies if cell.num_frames is None})
    run.rest()

    metric = "mAP" if part.multi_label else "top1"
    tallies = {**run.tallies, **{cell: tally for cell, (tally, _) in of_baselines.items()}}
    items = [part.rows[position].item for position in positions]
    sources = [part.shown.get(item.id, Shown()).sources for item in items]
    known = [each for each in sources if each is not None]
    resamples = Resamples(
        labels,
        draws,
        seed,
        where,
        groups=[item.group_key for item in items],
        sources=known if len(known) == len(items) else None,
    )
    measuring = Measuring(tallies, labels, metric, resamples)
    spent_by = {cell: _spent(cell, entry.policy, price, run.counts(cell)) for cell, entry in plan.shown}
    spent_by |= {cell: spent for cell, (_, spent) in of_baselines.items()}
    answers = {cell: entry.policy.answer for cell, entry in plan.shown}
    rows = [
        measuring.row(cell, spent, answers.get(cell), against=plan.against(cell)) for cell, spent in spent_by.items()
    ]
    rows.sort(key=lambda row: plan.candidates.index(row.num_candidates))  # baselines follow the policies of their T
    numbers = [AUTO if frames is None else frames for frames, _ in all_pairs]
    facts = {
        "num_candidates": _one_or_list([count for _, count in all_pairs]),
        "num_frames": _one_or_list(numbers),
        "pairs": [[frames, count] for frames, (_, count) in zip(numbers, all_pairs, strict=True)],
        "metric": metric,
        "bank": str(part.path),
        "split": name,
        "num_videos": len(videos),
        "num_classes": len(part.classes),
        "teacher": {key: teacher.about[key] for key in ("name", "fingerprint", "pooling", "views", "precision")},
        "seed": seed,
        "bootstrap": draws,
        "ci_units": resamples.units,
        "device": str(where),
        "versions": {
            "sosampler": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "machine": circumstances(())["machine"],
        "notes": notes,
        "seconds": round(time.perf_counter() - begun, 3),
    }
    recipes = {policy.name: _about_sampler(policy).get("recipe") for policy in chosen_policies}
    titles = {name: title_of(recipe) for name, recipe in recipes.items() if isinstance(recipe, dict) and recipe}
    if titles:
        facts["samplers"] = titles
    if autos:
        facts["auto"] = {suffix: auto.to_dict() for suffix, auto in autos.items()}
    if baselines:
        facts["systems"] = {row.name: row.facts() for row in baselines}
    ids = tuple(part.rows[position].item.id for position in positions)
    predictions = {cell: Predictions.of(tallies[cell].probs, labels) for cell in spent_by}
    per_video = PerVideo(part, tuple(positions), teacher, predictions, run.scores)
    return Evaluation(tuple(rows), facts, ids, {cell: tallies[cell].slots for cell in spent_by}, per_video)


# ---- what is evaluated


def _split_of(given: Any, split: str | None, note: Note) -> tuple[Bank, str]:
    """Return the split of a bank that is meant, and its name."""
    if not isinstance(given, (Bank, str, os.PathLike)):
        raise InvalidArgument(f"bank={given!r} must be a bank, or the folder of one")
    bank = given if isinstance(given, Bank) else Bank(given)
    split = bank._split if split is None else split
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
        use = {"train": "which samplers and baselines learn from", "dev": "by which samplers keep their best epoch"}
        note(f"the bank has no test split, so the policies are evaluated on {name}, {use[name]}")
    return whole.split(name), name


def _classifier_of(
    bank: Bank, given: Any, views: int | None, device: torch.device, precision: str | None
) -> tuple[Any, Teacher]:
    """Return the classifier, or None where only its outputs are at hand, and the teacher."""
    if views is not None:
        views = check_int("views", views)
    folder = saved_folder(given) if isinstance(given, (str, os.PathLike)) else None
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


def _labelled(bank: Bank, note: Note) -> list[int]:
    """Return the positions of the videos with labels."""
    positions = [position for position, row in enumerate(bank.rows) if row.item.labels]
    if not positions:
        raise InvalidArgument(f"{bank.path}: no video of this split has a label, so nothing can be evaluated")
    if len(positions) < len(bank):
        note(f"{len(bank) - len(positions)} of {len(bank)} videos have no label and are left out")
    return positions


def _check_lengths(videos: Videos, candidates: Sequence[int], note: Note) -> None:
    longest = int(videos.lengths.max())
    for num_candidates in dict.fromkeys(candidates):
        if longest < num_candidates:
            raise InvalidArgument(
                f"num_candidates={num_candidates} is more than the bank stores of any video (at most {longest}); "
                f"give at most {longest}, or prepare the bank with more (`sosampler prepare -t {num_candidates}`)"
            )
        short = int((videos.lengths < num_candidates).sum())
        if short:
            note(
                f"{short} of {len(videos)} videos have fewer than {num_candidates} stored frames; each of these is a "
                "candidate once, and repeated evenly only where more frames are needed than there are"
            )


def _check_policies(policies: Sequence[Policy], bank: Bank, teacher: Teacher, note: Note) -> None:
    """Check what the policies choose among, and note samplers that were trained for another teacher."""
    for policy in policies:
        mode = policy.candidate_mode
        if mode is not None and bank.settings.get("candidates") != mode:
            raise InvalidArgument(
                f"policy={policy.name!r} chooses among {mode}s, but {bank.path} stores other candidates; "
                f"prepare a bank with --candidates {mode}, or leave the policy out"
            )
        if isinstance(policy, OwnAnswer):
            _check_classes(policy, policy.base.sampler.config, bank)
        about = _about_sampler(policy)
        trained_for = about.get("teacher")
        if isinstance(trained_for, str) and trained_for != teacher.name:
            note(
                f"{policy.name} was trained for the teacher {trained_for} ({about.get('classifier')}), but the "
                f"clips are classified by {teacher.name} ({teacher.about['name']})"
            )


def _check_classes(policy: Policy, config: Mapping[str, Any], bank: Bank) -> None:
    """Refuse the own answer of a sampler whose classes are not those of the bank."""
    names, count = config.get("class_names"), config["num_classes"]
    if count != len(bank.classes) or (names is not None and list(names) != list(bank.classes)):
        raise InvalidArgument(
            f"{policy.name}: this sampler knows {count} classes{f' ({names[0]}, ...)' if names else ''}, but "
            f"{bank.path} has {len(bank.classes)} ({bank.classes[0]}, ...); give a bank with the same classes in the "
            "same order, or leave it out"
        )


def _class_frames(bank: Bank, positions: Sequence[int]) -> list[NDArray[np.bool_]]:
    """Return which stored frames of each video show its class; refuse a bank that does not know."""
    flags = []
    for position in positions:
        known = bank[position].shows_class
        if known is None:
            raise InvalidArgument(
                f"{bank.path}: does not know which frames of {bank.rows[position].item.id!r} show its class, which "
                "'class-frames' needs; use a bank of so.make_reels (called again with the same arguments it adds this "
                "to an older one), of videos with a segments.jsonl, or of so.write_frames with shows_class, or leave "
                "the policy out"
            )
        flags.append(known)
    return flags


def _one_or_list(numbers: Sequence[int | str]) -> int | str | list[int | str]:
    distinct = list(dict.fromkeys(numbers))
    return distinct[0] if len(distinct) == 1 else distinct


def _spent(cell: Cell, policy: Policy, price: Callable[[int], float] | None, counts: Indices) -> Spent:
    """Return the mean cost of a video; `counts` [V]: frames that were chosen."""
    decodes_all = policy.needs_frames or policy.needs_teacher
    occurrences = Counter(counts.tolist() if cell.num_frames is None else [cell.num_frames])
    total = sum(occurrences.values())
    chosen = cell.num_frames or sum(count * number for count, number in occurrences.items()) / total
    classifier_gmacs = None if chosen else 0.0
    if price is not None and chosen:
        classifier_gmacs = sum(price(count) * number for count, number in occurrences.items()) / total
    return Spent(
        frames_classified=chosen,
        frames_decoded=cell.num_candidates if decodes_all else chosen,
        sampler_gmacs=policy.gmacs(cell.num_candidates),
        classifier_gmacs=classifier_gmacs,
    )


# ---- rows


class Measuring:
    """Turns the tallies of all cells, also of those that are only compared with, into rows; labels are [V, C]."""

    def __init__(
        self, tallies: Mapping[Cell, Tally], labels: NDArray[np.bool_], metric: str, resamples: Resamples
    ) -> None:
        self._tallies, self._labels, self._metric, self._resamples = tallies, labels, metric, resamples
        self._measured: dict[Cell, dict[str, Measured]] = {}

    def _of(self, cell: Cell) -> dict[str, Measured]:
        if cell not in self._measured:
            probs, resamples = self._tallies[cell].probs, self._resamples
            self._measured[cell] = {"top1": resamples.top1(probs), "mAP": resamples.mean_average_precision(probs)}
        return self._measured[cell]

    def row(self, cell: Cell, spent: Spent, answer: str | None, *, against: int | None) -> EvaluationRow:
        """Return the row of a cell with its kind of `answer`.

        `against`: N of the uniform and semi-optimal choices that it is compared with.
        """
        tally, measured = self._tallies[cell], self._of(cell)
        gmacs = None
        if spent.sampler_gmacs is not None and spent.classifier_gmacs is not None:
            gmacs = spent.sampler_gmacs + spent.classifier_gmacs
        best = self._other(cell, "optimal", cell.num_frames)
        fidelity = None if best is None else float(shared_share(tally.slots, self._tallies[best].slots).mean())
        gap = None
        if tally.gap is not None:
            share = float((tally.gap < _SMALL_GAP).mean())
            gap = {"max": float(tally.gap.max()), "mean": float(tally.gap.mean()), "share_below_1e-3": share}
        return EvaluationRow(
            **vars(cell),
            **vars(spent),
            top1=measured["top1"].value,
            mAP=measured["mAP"].value,
            confidence=float(confidences(tally.probs, self._labels).mean()),
            fidelity=fidelity,
            # The best choice for another classifier means nothing for a baseline.
            recovered=None if cell.num_frames is None else self._recovered(cell, against),
            gmacs=gmacs,
            ci95={name: metric.ci95 for name, metric in measured.items() if metric.ci95 is not None},
            versus_uniform=self._versus_uniform(cell, against),
            seconds=round(tally.seconds, 4),
            gap=gap,
            method=" and ".join(sorted(tally.methods)) or None,
            answer=answer,
            ece=calibration_error(tally.probs, self._labels),
        )

    def _other(self, cell: Cell, policy: str, against: int | None) -> Cell | None:
        other = None if against is None else Cell(policy, against, cell.num_candidates)
        return other if other in self._tallies else None

    def _versus_uniform(self, cell: Cell, against: int | None) -> dict[str, Any] | None:
        uniform = self._other(cell, "uniform", against)
        if uniform is None:
            return None
        difference = self._of(cell)[self._metric].minus(self._of(uniform)[self._metric])
        value = difference.value if abs(difference.value) > _ROUNDING else 0.0
        return {"num_frames": against, "metric": self._metric, "difference": value, "ci95": difference.ci95}

    def _recovered(self, cell: Cell, against: int | None) -> float | None:
        uniform, semi_optimal = self._other(cell, "uniform", against), self._other(cell, "semi-optimal", against)
        if uniform is None or semi_optimal is None:
            return None
        low, high = self._of(uniform)[self._metric].value, self._of(semi_optimal)[self._metric].value
        # Without a gain there is no share of it.
        return (self._of(cell)[self._metric].value - low) / (high - low) if high - low > _ROUNDING else None


# ---- the run


def _about_sampler(policy: Policy) -> dict[str, Any]:
    """Return the facts of the training of the sampler behind a policy; {} where there is none."""
    return getattr(getattr(_scorer(policy), "sampler", None), "about", None) or {}


def _scorer(policy: Policy) -> Policy:
    """Return the policy whose scores, or whose sampler, a policy uses."""
    return policy.base if isinstance(policy, (MethodPolicy, OwnAnswer)) else policy


class _Run:
    """Lets every policy choose, and keeps the probabilities of the chosen clips.

    Policies that need frames choose while the bank is read, once for all of them; the others choose when clips are
    classified.
    """

    def __init__(self, videos: Videos, plan: Plan, seed: int) -> None:
        self._videos, self._clips, self._plan, self._seed = videos, videos.clips, plan, seed
        self.tallies: dict[Cell, Tally] = {}
        self.scores: dict[tuple[str, int], NDArray[np.float32]] = {}  # by policy and T: [V, T], of those with frames
        self._chosen: dict[Cell, Indices] = {}  # [V, N] positions, of policies that need frames
        self._add(plan.cells)

    def _add(self, cells: Mapping[Cell, Entry]) -> None:
        for cell, entry in cells.items():
            tally = self.tallies[cell] = Tally.empty(self._videos.labels, cell.num_frames or cell.num_candidates)
            if entry.policy.needs_frames:
                self._chosen[cell] = np.zeros_like(tally.slots)
            if isinstance(entry.policy, Optimal):
                tally.gap = np.zeros(len(self._videos))  # stays 0 where all frames are chosen

    def counts(self, cell: Cell) -> Indices:
        """Return the number of frames that were chosen of each video, [V]."""
        counts: Indices = (self.tallies[cell].slots != NOT_SEEN).sum(1)
        return counts

    def all(self, bank: Bank, on_progress: OnProgress | None) -> None:
        cells = self._plan.cells
        if any(entry.policy.needs_frames for entry in cells.values()) or (cells and self._clips.needs_frames):
            # Frames of all candidates, whatever their number: each is read once.
            slots = [self._videos.candidates(np.arange(len(self._videos)), count)[0] for count in self._plan.candidates]
            wanted = [np.unique(row) for row in np.concatenate(slots, axis=1)]
            progress = Progress(len(self._videos))
            with progress_bar("reading frames", 0 if on_progress is not None else len(self._videos)) as bar:
                for chunk in read_chunks(bank, self._videos.positions, wanted):
                    self._choose_in(chunk)
                    if self._clips.needs_frames:
                        self._classify(self._videos.batches(chunk.indices, self._plan.candidates, chunk), cells)
                    bar.advance(len(chunk.videos))
                    if on_progress is not None:
                        for _ in chunk.videos:
                            progress.done += 1
                            on_progress(progress)
        if not self._clips.needs_frames:
            self._classify_all(cells)

    def rest(self) -> None:
        """Evaluate the cells that were added to the plan since, which need no frames."""
        new = {cell: entry for cell, entry in self._plan.cells.items() if cell not in self.tallies}
        self._add(new)
        self._classify_all(new)

    def _classify_all(self, cells: Mapping[Cell, Entry]) -> None:
        if not cells:
            return
        size = max(1, _MAX_NUMBERS // self._plan.numbers_a_video(self._videos.numbers_a_candidate()))
        for begin in range(0, len(self._videos), size):
            indices = np.arange(begin, min(begin + size, len(self._videos)))
            self._classify(self._videos.batches(indices, self._plan.candidates), cells)

    def _choose_in(self, chunk: FrameChunk) -> None:
        """Let the policies that need frames choose for the videos of a chunk."""
        with_frames = {cell: entry for cell, entry in self._plan.cells.items() if entry.policy.needs_frames}
        for num_candidates in self._plan.candidates:
            cells = {cell: entry for cell, entry in with_frames.items() if cell.num_candidates == num_candidates}
            slots, counts = self._videos.candidates(chunk.indices, num_candidates)
            for group in chunk.groups(chunk.indices.tolist(), num_candidates, _MAX_FRAMES) if cells else ():
                indices = chunk.indices[group]
                frames, _, pts_seconds = chunk.stacked(indices.tolist(), list(slots[group]))
                batch = Batch(num_candidates, counts[group], frames, pts_seconds, self._seed, indices)
                if any(entry.policy.needs_teacher or _answers(entry.policy) for entry in cells.values()):
                    batch.teacher = self._videos.batches(indices, [num_candidates], chunk)[num_candidates]
                self._choose_from(batch, cells)

    def _choose_from(self, batch: Batch, cells: Mapping[Cell, Entry]) -> None:
        seconds: dict[int, float] = {}  # of scoring, which counts for every row that uses the scores
        for cell, entry in cells.items():
            tally, policy = self.tallies[cell], entry.policy
            scorer = _scorer(policy)
            key = id(getattr(scorer, "sampler", scorer))
            begun = time.perf_counter()
            scores = scores_of(scorer, batch) if scorer.has_scores else None
            seconds.setdefault(key, time.perf_counter() - begun)
            begun = time.perf_counter()
            if isinstance(policy, OwnAnswer):  # probabilities, and no frame for the classifier
                tally.probs[batch.indices] = policy.own_answer(batch)
                tally.slots[batch.indices] = NOT_SEEN
                tally.seconds += seconds[key] + time.perf_counter() - begun
                continue
            if _answers(policy):  # the sampler's outputs are at hand here, and the teacher's too
                positions, probs = _answer(entry, batch, cell.num_frames)
                tally.probs[batch.indices] = probs
                tally.slots[batch.indices] = _slots(batch.teacher, positions)
            else:
                positions = _choose(entry, batch, cell.num_frames)
                self._chosen[cell][batch.indices] = positions
            tally.seconds += seconds[key] + time.perf_counter() - begun
            if scores is not None:
                table = np.zeros((len(self._videos), cell.num_candidates), dtype=np.float32)
                self.scores.setdefault((cell.policy, cell.num_candidates), table)[batch.indices] = scores

    def _classify(self, batches: dict[int, TeacherBatch], cells: Mapping[Cell, Entry]) -> None:
        policy_batches = {
            count: Batch(count, outputs.counts, seed=self._seed, indices=outputs.indices, teacher=outputs)
            for count, outputs in batches.items()
        }
        for cell, entry in cells.items():
            if entry.policy.answer != MEAN:  # answered already
                continue
            begun = time.perf_counter()
            tally, outputs = self.tallies[cell], batches[cell.num_candidates]
            if entry.policy.needs_frames:
                positions = self._chosen[cell][outputs.indices]
            else:
                outputs.search = None
                positions = _choose(entry, policy_batches[cell.num_candidates], cell.num_frames)
                if outputs.search is not None and tally.gap is not None:
                    enough = outputs.counts >= (cell.num_frames or 1)
                    tally.gap[outputs.indices[enough]] = outputs.search.gap.double().cpu().numpy()
                    tally.methods.add(outputs.search.method)
            tally.slots[outputs.indices] = _slots(outputs, positions)
            counts = (positions != NOT_SEEN).sum(1)
            for count in np.unique(counts).tolist():
                rows = np.flatnonzero(counts == count)
                some = outputs if len(rows) == len(counts) else outputs.rows(rows)
                chosen = torch.from_numpy(positions[rows, :count]).to(self._videos.device)
                tally.probs[some.indices] = self._clips.probs(some, chosen).cpu().numpy()
            tally.seconds += time.perf_counter() - begun


def _answers(policy: Policy) -> bool:
    """Return whether a policy makes an answer of the classifier's answers for single frames."""
    return policy.answer in (WEIGHTED, *BELIEFS)


def _answer(entry: Entry, batch: Batch, num_frames: int | None) -> tuple[Indices, NDArray[np.float64]]:
    """Return the positions, as `_choose` does, and the probabilities [B, C] by the policy's own answer."""
    policy = entry.policy
    evidence = policy.evidence(batch)
    assert evidence is not None, "its answer is not the mean"
    logits = policy.frame_logits(batch)
    sure = None if entry.auto is None else policy.sure_enough(entry.auto)
    if entry.auto is None or sure is None:
        positions = _choose(entry, batch, num_frames)
        seen = (positions[:, :, None] == np.arange(batch.num_candidates)).any(1)
        return positions, policy.combined(evidence, logits, seen)
    scores = scores_of(policy, batch)
    assert scores is not None, "a sampler has scores"
    order = np.where(batch.mask, -scores, np.inf).argsort(axis=1, kind="stable")[:, : entry.auto.max]
    beliefs = policy.beliefs(evidence, logits, order)
    needed = frames_to_ask(beliefs, sure, at_least=entry.auto.min, counts=batch.counts)
    positions = np.full((len(batch), batch.num_candidates), NOT_SEEN, dtype=np.int64)
    for count in np.unique(needed).tolist():
        rows = np.flatnonzero(needed == count)
        positions[rows, :count] = np.sort(order[rows, :count], axis=1)
    return positions, beliefs[np.arange(len(batch)), needed - 1]


def _slots(outputs: TeacherBatch, positions: Indices) -> Indices:
    """Return the stored frames at positions [B, N]; padding stays."""
    slots = np.take_along_axis(outputs.slots, positions.clip(0), axis=1)
    return np.where(positions == NOT_SEEN, NOT_SEEN, slots)


def _choose(entry: Entry, batch: Batch, num_frames: int | None) -> Indices:
    """Return the positions [B, N], or with N = None [B, T] padded with -1.

    A video with fewer than N frames gives all of them, repeated evenly.
    """
    policy = entry.policy
    if num_frames is None:
        if entry.auto is None:  # baselines have run before
            counts = policy.own_number(batch)
        else:
            expected = policy.expected(batch)
            assert expected is not None, "checked before"
            counts = count_frames(expected, entry.auto)
        positions = np.full((len(batch), batch.num_candidates), NOT_SEEN, dtype=np.int64)
        for count in np.unique(counts).tolist():
            rows = np.flatnonzero(counts == count)
            positions[rows, :count] = choose(policy, batch.rows(rows), count)
        return positions
    enough = batch.counts >= num_frames
    if enough.all():
        return choose(policy, batch, num_frames)
    positions = np.stack([segment_centres(count, num_frames) for count in batch.counts.tolist()])
    if enough.any():
        some = batch.rows(enough)
        positions[enough] = choose(policy, some, num_frames)
        if batch.teacher is not None:
            batch.teacher.search = some.teacher.search
    return positions
