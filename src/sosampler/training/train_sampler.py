"""`train`: teach a sampler which frames a frozen classifier is sure about."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sosampler import __version__
from sosampler._util.memory import usable_cores
from sosampler._util.validation import one_of, whole_number
from sosampler.bank.bank import Bank
from sosampler.bank.outputs import Teacher
from sosampler.baselines.folder import refuse_system_folder
from sosampler.baselines.registry import list_samplers, list_systems
from sosampler.classifiers.base import Classifier
from sosampler.classifiers.factory import create_classifier, saved_folder
from sosampler.engine.memory import keep_memory
from sosampler.errors import InvalidArgument
from sosampler.samplers.backbones import load_backbone_weights
from sosampler.samplers.recipe import SamplerRecipe, drawn_frames, read_recipe
from sosampler.samplers.registry import RECIPES
from sosampler.samplers.sosampler import SOSampler
from sosampler.training import cpu_network, gpu_network
from sosampler.training.checkpoints import RunFolder, bank_identity, check_apart
from sosampler.training.distributed import Processes
from sosampler.training.examples import labelled_rows
from sosampler.training.optim import diverged
from sosampler.training.preparation import can_be_graphed, preparation_pays, sampler_precision
from sosampler.training.sampler_data import (
    CachedFrames,
    FrameSource,
    SamplerBatches,
    Shape,
    VideoTable,
    default_cache_bytes,
    open_frames,
)
from sosampler.training.sampler_dev import EvaluationSet, check_rewards, fit_calibration
from sosampler.training.sampler_loop import SamplerLoop

if TYPE_CHECKING:
    from sosampler.baselines.recipe import SystemRecipe


TEACHERS = ("bank", "online")
KIND = "sampler"
# Pictures are kept this much larger than the network's input, so that crops are seldom enlarged much.
_ROOM_TO_CROP = 1.15
_EVALUATED_CANDIDATES = 10  # T on dev where the recipe draws T at random
_MOST_WORKERS = 16
_CALIBRATION_VIDEOS = 256  # of train, where there is no dev


@dataclass(frozen=True)
class TrainedSampler:
    """What came out of `train`: the best sampler by dev, and how good it is."""

    sampler: SOSampler
    folder: Path
    result: dict[str, Any]

    def __repr__(self) -> str:
        return f"TrainedSampler({self.folder}, {self.result['metric']}, dev {self.result['dev']})"


def train(
    bank: str | Path | Bank,
    *,
    out: str | Path,
    recipe: str | Path | SamplerRecipe | SystemRecipe | None = None,
    sampler: str = "sosampler",
    classifier: str | Path | Classifier | None = None,
    weights: str | Path | None = None,
    light: str | Path | SOSampler | None = None,
    teacher: str = "bank",
    device: str | None = None,
    precision: str | None = None,
    workers: int | None = None,
    cache_bytes: int | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> TrainedSampler | Any:  # Any: a `TrainedSystem`; who trains samplers need not tell the two apart
    """Train a sampler on a bank and keep the weights that are best on its dev split; or train a system.

    A sampler chooses frames for a classifier. A system (frameexit, liteeval, adaframe, marl) classifies itself, on
    features of the classifier and of a light network. Those that the bank does not keep yet are computed for all of its
    videos, once; then it trains within minutes, in memory and in float32. Its last epoch is kept, for what it spends
    differs between epochs; dev is measured only. Returns a `TrainedSampler`, of a system a `TrainedSystem`.

    Args:
        bank: frames and a classifier's answers about them, from `prepare`; of one split of it, `bank.split("train")`,
            no more is used. Without a dev split the last epoch is kept. Systems need no answers.
        out: folder for the sampler (`SOSampler.from_pretrained(out)` loads it) or the system (`load_system(out)`), the
            log and the result. Run again with the same settings, a killed run goes on; that of a system starts again
            and gives the same weights.
        recipe, settings: a name of `list_recipes()`, a YAML file or a `SamplerRecipe`, and single settings of it:
            epochs=20, lr=1e-3, ...; for a system a YAML file, and its own settings as well: beta=1e-2, ...
        sampler: a name of `list_samplers()`, whose own recipe is taken where none is given.
        classifier: whose answers: the classifier, its saved folder, its fingerprint or its name in the bank; needed
            where the bank has several teachers, and as classifier or folder for teacher="online". For a system, whose
            features: the same, where a name or a fingerprint will do if the bank keeps them.
        weights: start of the backbone: a safetensors file with torchvision's or timm's names, or "pretrained". For a
            system, those of its light network, MobileNetV2, which they stay.
        light: of a system, instead of that: a `SOSampler` without shift, its folder, or the name of features in the
            bank. Systems that look at no light features (frameexit, marl) take no notice of it and of `weights`.
        teacher: "bank": targets are the kept answers about whole frames. "online": the classifier is asked about the
            same random crops that the sampler sees, which costs its forward pass a step; dev uses the kept answers.
            A classifier that is given as such is frozen and stays on the device.
        device: default: the GPU if there is one. Under `accelerate launch` every process has its own.
        precision: "float32", "bfloat16" or "float16"; default: bfloat16 on GPUs that have it, and for MobileNetV2 on
            CPUs that are fast in it; for systems float32.
        workers: threads that decode frames into memory, or processes that decode them again and again where they do
            not fit; default: as many as there are cores for this process, at most 16.
        cache_bytes: memory for decoded frames; default: 40 % of what is free (in a container: under its limit), at
            most 16 GiB. It and `workers` change nothing for systems.
        overwrite: start again in a folder that holds another run of the same kind, sampler or system.
        say: is given a line of text for each epoch.

    Examples:
        >>> from tempfile import TemporaryDirectory
        >>> import sosampler as so
        >>> with TemporaryDirectory() as folder:
        ...     reels = {"counts": {"train": 4, "dev": 2}, "num_classes": 2, "recipe": {"size": 48}}
        ...     bank = so.make_reels("procedural", f"{folder}/bank", **reels)
        ...     clf = so.create_classifier("timm:test_resnet", class_names=bank.classes, input_size=32)
        ...     bank = so.add_teacher(bank, clf)
        ...     small = {"backbone": "timm:test_resnet", "input_size": 32, "epochs": 1, "batch_size": 2}
        ...     trained = so.train(bank, out=f"{folder}/sampler", **small)
        ...     so.load_sampler(f"{folder}/sampler").class_names == bank.classes
        True
    """
    if sampler in list_systems():
        from sosampler.training.train_baseline import train_system

        _refuse_for_systems(sampler, teacher=teacher, precision=precision)
        return train_system(
            bank,
            out=out,
            system=sampler,
            recipe=recipe,
            classifier=classifier,
            light=light,
            weights=weights,
            device=device,
            overwrite=overwrite,
            say=say,
            **settings,
        )
    processes = Processes(device)
    if not processes.is_main:
        say = _say_nothing
    run = RunFolder(Path(out), KIND)
    with processes.together():
        recipe = read_recipe(_sampler_recipe(sampler, recipe, light), **settings)
        one_of("teacher", teacher, TEACHERS)
        workers = _default_workers(processes) if workers is None else whole_number("workers", workers, at_least=0)
        begun = None if overwrite else run.begun_with("precision")
        precision = sampler_precision(processes, precision, begun, recipe)
        if cache_bytes is None:
            cache_bytes = default_cache_bytes(processes.local_count)
        whole_number("cache_bytes", cache_bytes, at_least=0)
        bank = bank if isinstance(bank, Bank) else Bank(bank)
        asked, answers = _teacher(bank, classifier, online=teacher == "online", device=processes.device)
        rows = _rows(bank, recipe, processes)
        network = new_sampler(bank, recipe, weights)
    with processes.together():
        if processes.is_main:
            start = None if weights is None else network.fingerprint()
            _begin(run, bank, answers, recipe, overwrite, teacher=teacher, start=start, precision=precision)
    with processes.together():
        finished = run.result()
        if finished is not None:
            say(f"{run.folder}: this run is finished")
            return TrainedSampler(_saved_sampler(run.folder, processes.device), run.folder, finished)
        network.to(processes.device)
        open_ = _Opening(bank, answers, cache_bytes, processes, workers)
        batches = open_.training(rows["train"], recipe, asked)
        offered = batches.plan.num_candidates[0]
        check_rewards(recipe, answers.pooling, answers.about["name"], offered, drawn_frames(recipe))
        taken = _bytes_taken(batches.source)
        # One process evaluates.
        dev = open_.evaluation(rows["dev"], recipe, taken) if rows["dev"] and processes.is_main else None
        fast = preparation_pays(processes.device, batches, recipe)
        if fast:
            gpu_network.prepare_network(network, norms=processes.count == 1)
        if processes.device.type == "cpu":
            cpu_network.prepare_network(network)
            keep_memory()  # with channels-last 2.8 times as many steps a second on two cores
        say(_first_words(network, processes, precision, batches, rows))
    with torch.random.fork_rng(devices=[processes.device] if processes.device.type == "cuda" else []):
        loop = SamplerLoop(
            *(network, recipe, batches, dev, run),
            processes=processes,
            precision=precision,
            asked=asked,
            graphed=fast and processes.count == 1 and can_be_graphed(network, precision, recipe),
            say=say,
        )
        loop.train()
        with processes.together():
            if processes.is_main:
                fitted = open_.evaluation(rows["train"][:_CALIBRATION_VIDEOS], recipe, taken) if dev is None else dev
                run.finish(_finish(loop, fitted, bank, answers, rows, say))
    return TrainedSampler(_saved_sampler(run.folder, processes.device), run.folder, run.result() or {})


def _refuse_for_systems(system: str, *, teacher: str, precision: str | None) -> None:
    """What would change nothing must not seem to."""
    if one_of("teacher", teacher, TEACHERS) != "bank":
        raise InvalidArgument(f"teacher={teacher!r} is for samplers; {system} learns from labels, so leave it out")
    if precision not in (None, "float32"):
        raise InvalidArgument(f"precision={precision!r} is for samplers; {system} trains in float32, so leave it out")


def _sampler_recipe(sampler: str, recipe: Any, light: Any) -> Any:
    """The recipe that is meant, where nothing given is for systems alone."""
    own = RECIPES[one_of("sampler", sampler, list_samplers())]
    if light is not None:
        raise InvalidArgument(f"light is for systems ({', '.join(list_systems())}), not for {sampler}; leave it out")
    system = recipe if isinstance(recipe, str) and recipe in list_systems() else getattr(recipe, "system", None)
    if system is not None:
        raise InvalidArgument(f"the recipe is of the system {system}; give sampler={system!r} (--sampler {system})")
    return own if recipe is None else recipe


def _bytes_taken(source: FrameSource) -> int:
    """Memory of the machine that frames have; none where they went to the GPU or are decoded again and again."""
    return source.nbytes if isinstance(source, CachedFrames) and source.device.type == "cpu" else 0


def _default_workers(processes: Processes) -> int:
    """The cores, shared between the processes of one machine."""
    return max(1, min(_MOST_WORKERS, usable_cores() // processes.local_count))


def _teacher(
    bank: Bank, classifier: str | Path | Classifier | None, *, online: bool, device: torch.device
) -> tuple[Classifier | None, Teacher]:
    """The classifier if it is to be asked, and its kept answers."""
    meant: Any = classifier
    refuse_system_folder("classifier", classifier)
    if isinstance(classifier, (str, Path)) and str(classifier) not in bank.teachers and saved_folder(classifier):
        meant = create_classifier(classifier)
    elif isinstance(classifier, (str, Path)):
        named = [name for name, about in bank.teachers.items() if about["name"] == str(classifier)]
        meant = named[0] if len(named) == 1 else str(classifier)
    if not online:
        return None, bank.teacher(meant)
    if not isinstance(meant, Classifier):
        raise InvalidArgument(
            f"teacher='online' asks the classifier itself, but classifier={classifier!r} is none; "
            "give the classifier or its saved folder"
        )
    return meant.to(device).freeze(), bank.teacher(meant)


def _rows(bank: Bank, recipe: SamplerRecipe, processes: Processes) -> dict[str, list[int]]:
    """Places in the bank of the videos of train and dev that have a label."""
    found = labelled_rows(bank, least=max(2, processes.count))
    if recipe.batch_size < processes.count:
        raise InvalidArgument(
            f"batch_size={recipe.batch_size} is less than the {processes.count} processes; give each a video at least"
        )
    return found


def new_sampler(bank: Bank, recipe: SamplerRecipe, weights: str | Path | None) -> SOSampler:
    """The network of a recipe before its first step, with its fresh layers drawn by the recipe's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.seed % 2**63)  # fresh layers, on the CPU
        sampler = SOSampler(
            backbone=recipe.backbone,
            shift=recipe.shift,
            input_size=recipe.input_size,
            num_classes=len(bank.classes) if recipe.class_head else None,
            class_names=bank.classes if recipe.class_head else None,
            dropout=recipe.dropout,
            multi_label=bank.multi_label,
            scoring=dict(recipe.scoring),
        )
    if weights is not None:
        load_backbone_weights(sampler.backbone, weights)
    return sampler


def _saved_sampler(folder: Path, device: torch.device) -> SOSampler:
    with torch.random.fork_rng(devices=[]):  # layers are drawn before they are filled
        sampler = SOSampler.from_pretrained(folder)
    sampler.to(device)
    return sampler.freeze()


def _begin(
    run: RunFolder,
    bank: Bank,
    answers: Teacher,
    recipe: SamplerRecipe,
    overwrite: bool,
    *,
    teacher: str,
    start: str | None,
    precision: str,
) -> None:
    check_apart(run.folder, bank)
    if overwrite:
        run.clear()
    run.begin(
        {
            "bank": bank_identity(bank),
            "teacher": {"name": answers.name, "asked": teacher},
            "start": start,
            "recipe": recipe.to_dict(),
            "precision": precision,
        }
    )


@dataclass(frozen=True)
class _Opening:
    """How videos of the bank become batches."""

    bank: Bank
    answers: Teacher
    cache_bytes: int
    processes: Processes
    workers: int

    def training(self, rows: list[int], recipe: SamplerRecipe, asked: Classifier | None) -> SamplerBatches:
        largest = max(recipe.input_size, *(asked.preprocessing.size if asked else ()), 1)
        source = self._frames(rows, Shape(math.ceil(_ROOM_TO_CROP * largest)))
        table = VideoTable(self.bank, rows, self.answers)
        return SamplerBatches(
            *(table, source, recipe),
            part=self.processes.part(min(recipe.batch_size, len(rows))),
            workers=self.workers,
            sharers=self.processes.local_count,
        )

    def evaluation(self, rows: list[int], recipe: SamplerRecipe, taken: int) -> EvaluationSet:
        """`taken`: bytes of memory that the frames of training have."""
        source = self._frames(rows, Shape(recipe.input_size, square=True), taken, threads=self.workers)
        asked = recipe.num_candidates
        most = max(len(self.bank[row]) for row in rows)
        wanted = min(asked if isinstance(asked, int) else _EVALUATED_CANDIDATES, most)
        return EvaluationSet(self.bank, rows, self.answers, source, num_candidates=wanted)

    def _frames(self, rows: list[int], shape: Shape, taken: int = 0, *, threads: int = 1) -> Any:
        return open_frames(
            self.bank,
            rows,
            shape,
            cache_bytes=self.cache_bytes - taken,
            device=self.processes.device,
            workers=self.workers,
            threads=threads,
            show=self.processes.is_main,
        )


def _first_words(
    sampler: SOSampler, processes: Processes, precision: str, batches: SamplerBatches, rows: dict[str, list[int]]
) -> str:
    source = batches.source
    where = (
        f"frames in memory ({source.nbytes / 1e9:.2f} GB, {source.device.type})"
        if isinstance(source, CachedFrames)
        else f"frames do not fit into memory and are decoded again in every epoch ({batches.workers} worker processes)"
    )
    several = f" in {processes.count} processes" if processes.count > 1 else ""
    unlabelled = f" ({len(rows['unlabelled'])} without a label are left out)" if rows["unlabelled"] else ""
    dev = f"{len(rows['dev'])} dev" if rows["dev"] else "no dev split, so the last epoch is kept"
    return (
        f"{sampler!r}, on {processes.device}{several} in {precision}: "
        f"{len(rows['train'])} videos to train on, {dev}{unlabelled}; {where}"
    )


def _finish(
    loop: SamplerLoop,
    fitted: EvaluationSet,
    bank: Bank,
    answers: Teacher,
    rows: dict[str, list[int]],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Calibrate the best sampler, write it, and tell how good it is."""
    sampler, recipe = loop.best_sampler(), loop.recipe
    scores = fitted.scores(sampler, loop.precision)
    if not scores.isfinite().all():
        raise diverged("the sampler's scores are not finite", lr=recipe.lr, precision=loop.precision)
    sampler.calibration = fit_calibration(scores, fitted.confidence)
    measured: dict[str, Any] = {"metric": fitted.metric, "dev": loop.best["score"]}
    if loop.dev is not None:
        measured |= {
            "dev_uniform": loop.dev.of_uniform(),
            "dev_semi_optimal": loop.dev.of_semi_optimal(),
        }
    measured |= {"num_candidates": fitted.num_candidates, "num_frames": fitted.num_frames}
    sampler.about = {
        "classifier": answers.about["name"],
        "teacher": answers.name,
        "bank": bank.path.resolve().name,
        "num_classes": len(bank.classes),
        **measured,
        "best_epoch": loop.best["epoch"],
        "calibrated_on": "train" if loop.dev is None else "dev",
        "seed": recipe.seed,
        "sosampler": __version__,
        "recipe": recipe.to_dict(),
    }
    sampler.save_pretrained(loop.run.folder)
    shown = ", ".join(
        f"{words} {100 * measured[name]:.2f} %"
        for name, words in (("dev", "sampler"), ("dev_uniform", "uniform"), ("dev_semi_optimal", "semi-optimal"))
        if measured.get(name) is not None
    )
    best = f"best of epoch {loop.best['epoch'] + 1}: dev {fitted.metric} of {fitted.num_frames} of "
    say(
        (f"{best}{fitted.num_candidates} frames: {shown}; " if loop.dev is not None else "")
        + f"written to {loop.run.folder}"
    )
    return {
        **measured,
        "best_epoch": loop.best["epoch"],
        "epochs": recipe.epochs,
        "sizes": {name: len(found) for name, found in rows.items()},
        "calibration": list(sampler.calibration or ()),
        "teacher": answers.name,
        "fingerprint": sampler.fingerprint(),
    }


def _say_nothing(text: str) -> None:
    pass
