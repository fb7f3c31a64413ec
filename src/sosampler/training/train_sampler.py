"""`train`: train a sampler to find the frames that a frozen classifier is sure about."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sosampler import __version__
from sosampler._util.hardware import autocast, default_cache_bytes, keep_memory, usable_cores
from sosampler._util.limits import check_count
from sosampler._util.locks import one_run_at_a_time
from sosampler._util.validation import check_int, one_of
from sosampler.bank.bank import Bank
from sosampler.bank.outputs import Features, Teacher
from sosampler.bank.pixels import Shape
from sosampler.baselines.base import refuse_baseline_folder
from sosampler.baselines.registry import list_samplers, list_systems
from sosampler.classifiers.base import Classifier
from sosampler.classifiers.factory import create_classifier, saved_folder
from sosampler.errors import InvalidArgument
from sosampler.policies.auto import Auto
from sosampler.policies.base import count_frames
from sosampler.policies.learned import expected_by_budget
from sosampler.samplers.backbones import load_backbone_weights
from sosampler.samplers.losses import ClipProbs, SamplerLoss
from sosampler.samplers.recipe import BEST, OCSamplerSettings, SamplerRecipe, drawn_frames, read_recipe
from sosampler.samplers.registry import ANSWERS, FUSED, MEAN, PROBED, RECIPES, has_belief
from sosampler.samplers.sosampler import SOSampler, top_n
from sosampler.training.answers import MIN_VIDEOS, fit_answers
from sosampler.training.checkpoints import PRETRAIN, RunFolder, bank_identity, check_apart
from sosampler.training.dev import RANKINGS, DevOutputs, DevSet, choose_ranking, fit_calibration
from sosampler.training.distributed import Processes, send
from sosampler.training.loop import LoopOptions, TrainingLoop
from sosampler.training.optim import diverged, freeze_first, is_finite, make_optimizer, sampler_precision
from sosampler.training.pretrain import pretrain
from sosampler.training.probe import add_probe, find_features
from sosampler.training.rewards import (
    ClipClassifier,
    budget_targets,
    check_candidates,
    check_classifier,
    clip_outputs,
    fit_budget,
)
from sosampler.training.sampler_data import (
    Batch,
    CachedFrames,
    Crops,
    FrameSource,
    NormalisedCrops,
    SamplerBatches,
    VideoTable,
    labelled_rows,
    open_frames,
)

if TYPE_CHECKING:
    from sosampler.baselines.recipe import BaselineRecipe

TEACHERS = ("bank", "online")
KIND = "sampler"
# Frames are kept this much larger than the network's input, so that crops are seldom enlarged much.
_ROOM_TO_CROP = 1.15
_DEV_CANDIDATES = 10  # T on dev where the recipe draws T at random
_MAX_WORKERS = 16
_CALIBRATION_VIDEOS = 256  # of train, where there is no dev
_BUDGET_VIDEOS = 5000  # of train, enough for one linear layer
_FRAMES_AT_A_TIME = 256  # for the online teacher


@dataclass(frozen=True)
class TrainedSampler:
    """The result of `train`: the best sampler by dev, and its scores."""

    sampler: SOSampler
    folder: Path
    result: dict[str, Any]

    def __repr__(self) -> str:
        return f"TrainedSampler({self.folder}, {self.result['metric']}, dev {self.result['dev']})"


@one_run_at_a_time
def train(
    bank: str | Path | Bank,
    *,
    out: str | Path,
    recipe: str | Path | SamplerRecipe | BaselineRecipe | None = None,
    sampler: str = "sosampler",
    classifier: str | Path | Classifier | None = None,
    weights: str | Path | None = None,
    light: str | Path | SOSampler | None = None,
    features: Mapping[str, Any] | None = None,
    teacher: str = "bank",
    device: str | None = None,
    precision: str | None = None,
    workers: int | None = None,
    cache_bytes: int | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> TrainedSampler | Any:  # Any: a `TrainedSystem`, so that code for samplers needs no check
    """Train a sampler on a bank and keep the weights that are best on its dev split; or train a baseline.

    A sampler chooses frames for a classifier. A baseline (frameexit, liteeval, ...) classifies itself, from features of
    the classifier and of other networks. Features that are not in the bank yet are computed for all of its videos,
    once; then it trains within minutes, in memory and in float32. Its last epoch is kept, because its cost differs
    between epochs; dev is only measured.

    Args:
        bank: frames and a classifier's outputs for them, from `prepare`; with one split, `bank.split("train")`, only
            that is used. Without a dev split the last epoch is kept. Baselines need no outputs.
        out: folder for the sampler (`SOSampler.from_pretrained(out)` loads it) or the baseline (`load_system(out)`),
            the log and the result. Called again with the same settings, a killed run resumes; that of a baseline
            starts again and gives the same weights.
        recipe, settings: a name of `list_recipes()`, a YAML file or a `SamplerRecipe`, and single settings of it:
            epochs=20, lr=1e-3, ...; for a baseline a YAML file, and its own settings as well: beta=1e-2, ...
        sampler: a name of `list_samplers()`; its own recipe is the default.
        classifier: the teacher: the classifier, its saved folder, its fingerprint or its name in the bank; needed where
            the bank has several teachers, and as classifier or folder for teacher="online", for a probe where the bank
            has no features of the classifier, which are then computed once, and for OCSampler's rewards unless it
            averages logits. For a baseline, the source of its features: the same; a name or a fingerprint is
            enough if the bank has them.
        weights: start of the backbone: a safetensors file with torchvision's or timm's names, or "pretrained"; with the
            recipe "default" three quarters of it stay so (`freeze`). Without weights nothing is frozen. For a baseline,
            the fixed weights of its light network, MobileNetV2.
        light: for a baseline, another light network: a `SOSampler` without shift, its folder, or the name of features
            in the bank. Baselines without light features (frameexit, marl) ignore it and `weights`; `import_frameexit`
            reads a checkpoint of FrameExit's authors.
        features: for a baseline that runs further networks, the source of each set of features by its name: a saved
            classifier or sampler, its folder, or the name of features in the bank. Sets that are left out are the
            features of that name in the bank.
        teacher: "bank": targets are the stored outputs for whole frames. "online": the classifier runs on the same
            random crops that the sampler sees, which costs its forward pass in each step; dev uses the stored outputs.
            A classifier that is given as an object is frozen and stays on the device.
        device: default: the GPU if there is one. Under `accelerate launch` every process has its own.
        precision: "float32", "bfloat16" or "float16"; default: bfloat16 on GPUs that have it, and for MobileNetV2 on
            CPUs that are fast in it; for baselines float32.
        workers: threads that decode frames into memory, or processes that decode them for every batch where they do not
            fit; default: the cores of this process, at most 16.
        cache_bytes: memory for decoded frames; default: 40 % of the free memory (in a container: under its limit), at
            most 16 GiB. Baselines ignore it and `workers`.
        overwrite: start again in a folder that holds another run of the same kind, sampler or baseline.
        say: is given a line of text for each epoch.

    Returns:
        A `TrainedSampler`; for a baseline a `TrainedSystem`.

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
    if sampler not in RECIPES:
        from sosampler.training.train_baseline import train_baseline

        one_of("sampler", sampler, list_samplers())
        if one_of("teacher", teacher, TEACHERS) != "bank":
            raise InvalidArgument(f"teacher={teacher!r} is for samplers; {sampler} learns from labels, so leave it out")
        if precision not in (None, "float32"):
            raise InvalidArgument(
                f"precision={precision!r} is for samplers; {sampler} trains in float32, so leave it out"
            )
        return train_baseline(
            bank, out, sampler, recipe, classifier, light, weights, features, device, overwrite, say, **settings
        )
    processes = Processes(device)
    report = say if processes.is_main else (lambda text: None)
    run = RunFolder(Path(out), KIND)
    with processes.together():
        recipe = read_recipe(_sampler_recipe(sampler, recipe, light=light, features=features), **settings)
        recipe = recipe.starting_from(weights)
        one_of("teacher", teacher, TEACHERS)
        if workers is None:  # the cores are shared between the processes of one machine
            workers = max(1, min(_MAX_WORKERS, usable_cores() // processes.local_count))
        check_count("workers", workers, "MAX_THREADS", at_least=0)
        begun = None if overwrite else run.begun_with("precision")
        precision = sampler_precision(processes, precision, begun, recipe)
        memory = default_cache_bytes(processes.local_count) if cache_bytes is None else cache_bytes
        check_int("cache_bytes", memory, at_least=0)
        bank = bank if isinstance(bank, Bank) else Bank(bank)
        given, outputs = _teacher(bank, classifier, recipe, online=teacher == "online", device=processes.device)
        online = given if teacher == "online" else None
        clips = None
        if recipe.loss == "reinforce" and outputs.pooling != "mean":
            clips = ClipClassifier(outputs, given, processes.device, precision)
        rows = labelled_rows(bank, min_train=max(2, processes.count))
        if recipe.batch_size < processes.count:
            raise InvalidArgument(
                f"batch_size={recipe.batch_size} is less than the {processes.count} processes; give each at least one "
                "video"
            )
        network = new_sampler(bank, recipe, weights, multi_label=outputs.multi_label)
    with processes.together():
        if processes.is_main:
            check_apart(run.folder, bank)
            run_settings: dict[str, Any] = {
                "bank": bank_identity(bank),
                "teacher": {"name": outputs.name, "asked": teacher},
                "start": None if weights is None else network.fingerprint(),
                "recipe": recipe.identity(),
                "precision": precision,
            }
            if network.multi_label != bank.multi_label:  # earlier versions took the bank's for both
                run_settings["multi_label"] = network.multi_label
            run.begin(run_settings, overwrite=overwrite)
    with processes.together():
        if run.result() is not None:
            report(f"{run.folder}: this run is finished")
            return _saved(run, processes.device)
        opened = {"device": processes.device, "workers": workers, "show": processes.is_main}
        side = math.ceil(_ROOM_TO_CROP * max(recipe.input_size, *(online.preprocessing.size if online else ()), 1))
        batches = SamplerBatches(
            VideoTable(bank, rows["train"], outputs),
            open_frames(bank, rows["train"], Shape(side), cache_bytes=memory, **opened),
            recipe,
            part=processes.part(min(recipe.batch_size, len(rows["train"]))),
            workers=workers,
            sharers=processes.local_count,
        )
        check_candidates(recipe, batches.plan.num_candidates[0])
        class_inputs = None  # of the classifier, for a probe
        fits = len(rows["dev"]) >= MIN_VIDEOS and recipe.class_head  # else no answer could use it
        if processes.is_main and fits and recipe.answer in (BEST, PROBED):
            class_inputs = find_features(
                bank,
                outputs,
                classifier,
                device=processes.device,
                compute=processes.count == 1,  # for a large bank it may take longer than others wait
                insist=recipe.answer == PROBED,
                say=report,
            )
        opened |= {"cache_bytes": memory - memory_taken(batches.source), "threads": workers}
        # One process evaluates.
        dev = None
        if rows["dev"] and processes.is_main:
            dev = _dev_set(bank, rows["dev"], outputs, recipe, clips, **opened)
        network.to(processes.device, memory_format=torch.channels_last)
        if processes.device.type == "cpu":
            keep_memory()  # with channels-last memory 2.8 times as many steps a second on two cores
            if precision == "bfloat16":
                _use_float32_for_strided_depthwise(network)
        report(_start_text(network, processes, precision, batches, rows))
        if weights is None and processes.is_main:
            report(
                "the sampler's network starts from random weights and learns all of them, which needs many videos; "
                "give weights (--weights FILE, or 'pretrained')"
            )
        if processes.is_main and (remark := outputs.remark()):
            report(f"{remark}; a sampler learns nothing from it")
    options = LoopOptions(
        recipe.epochs, recipe.lr, recipe.seed, processes, report, run, precision, recipe.clip, recipe.ema
    )
    pretrain(network, recipe, batches, options)
    loop = SamplerLoop(network, recipe, batches, options, dev, online, clips)
    loop.train()
    with processes.together():
        if processes.is_main:
            first = rows["train"][:_CALIBRATION_VIDEOS]
            calibration = dev or _dev_set(bank, first, outputs, recipe, clips, **opened)
            videos = None
            if drawn_frames(recipe) and OCSamplerSettings(**recipe.reinforce).budget:
                some = rows["train"][:: -(-len(rows["train"]) // _BUDGET_VIDEOS)]
                videos = _dev_set(bank, some, outputs, recipe, clips, **opened)
            _finish(loop, calibration, bank, outputs, rows, run, videos, class_inputs)
    return _saved(run, processes.device)


class SamplerLoop(TrainingLoop):
    """The training of a sampler by the outputs of a classifier.

    `online`: the classifier, where it runs on the crops of every step. `clips`: what gives OCSampler's rewards where
    they do not follow from the probabilities of single frames.
    """

    save_every_epoch, prefer_later, logged = True, True, ("lr", "seconds")

    def __init__(
        self,
        sampler: SOSampler,
        recipe: SamplerRecipe,
        batches: SamplerBatches,
        options: LoopOptions,
        dev: DevSet | None,
        online: Classifier | None,
        clips: ClipClassifier | None = None,
    ) -> None:
        self.sampler, self.recipe, self.plan, self.dev = sampler, recipe, batches.plan, dev
        self.clips, self.rows = clips, batches.table.rows
        self.precision, device = options.precision, options.processes.device
        self.metric = "" if dev is None else dev.metric
        self.sampler_loss = SamplerLoss(recipe, multi_label=sampler.multi_label)
        self.crops = NormalisedCrops(sampler.preprocessing, batches.source.sizes, device)
        self.teacher = None if online is None else OnlineTeacher(online, batches.source.sizes, device)
        self.frozen = freeze_first(sampler.backbone, recipe.freeze)
        optimizer, scheduler = make_optimizer(sampler, recipe, len(batches), momentum=recipe.momentum)
        super().__init__(sampler, batches, options, optimizer, scheduler)

    def start_epoch(self, epoch: int) -> None:
        super().start_epoch(epoch)
        for layer in self.frozen:
            layer.eval()

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return normalised crops [B, T, 3, h, w], the teacher's probabilities [B, T, C] and the labels [B, C]."""
        frames = send(batch.frames, self.device)
        crops = self.crops(frames, batch.draw.crops, batch.sizes).contiguous(memory_format=torch.channels_last)
        probs = send(batch.probs, self.device).float() if self.teacher is None else self.teacher(frames, batch)
        return crops.unflatten(0, batch.draw.positions.shape), probs, send(batch.labels, self.device)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        frames, probs, labels = self.inputs(batch)
        with autocast(self.device, self.precision):
            output = self.forward(frames)
        clip_probs = None if self.sampler_loss.reinforce is None else self.clip_probs(batch, probs)
        loss, parts = self.sampler_loss(output, probs, labels, clip_probs=clip_probs)
        return loss, parts

    def clip_probs(self, batch: Batch, probs: Tensor) -> ClipProbs:
        """Return the classifier of clips of this batch, whose frames alone have the probabilities [B, T, C]."""
        clips = self.clips
        if clips is None:
            return clip_outputs(probs, multi_label=self.sampler.multi_label)
        if self.teacher is not None:
            return self.teacher.clip_probs(send(batch.frames, self.device), batch)
        rows, stored = self.rows[batch.draw.videos], batch.draw.positions

        def of_stored_frames(positions: Tensor) -> Tensor:
            return clips(rows, np.take_along_axis(stored, positions.cpu().numpy(), axis=1))

        return of_stored_frames

    def share(self, batch: Batch) -> float:
        return len(batch.labels) / self.plan.batch_size

    def evaluate(self) -> dict[str, float | None]:
        if self.dev is None:
            return {}
        scores = self.dev.scores(self.evaluated, self.precision)
        # Scores may overflow in float16.
        return {self.metric: self.dev.of_scores(scores) if bool(scores.isfinite().all()) else None}


class OnlineTeacher:
    """The frozen classifier, run on the crops that the sampler sees instead of the outputs in the bank."""

    def __init__(self, classifier: Classifier, sizes: np.ndarray, device: torch.device) -> None:
        self.classifier = classifier.eval()
        self._crops = NormalisedCrops(classifier.preprocessing, sizes, device)

    @torch.no_grad()
    def __call__(self, frames: Tensor, batch: Batch) -> Tensor:
        """Return probabilities [B, T, C] of each crop as a clip of one frame, at the classifier's own input size.

        `frames`: those of the batch on the device, uint8 [B * T, h, w, 3].
        """
        times = send(batch.times.flatten(), frames.device)[:, None]  # [B * T, 1]
        probs = []
        for begin in range(0, len(frames), _FRAMES_AT_A_TIME):
            part = slice(begin, begin + _FRAMES_AT_A_TIME)
            crops = self._crops(frames[part], batch.draw.crops.part(part), batch.sizes[part])  # [F, 3, h, w]
            probs.append(self.classifier.probabilities(self.classifier.scores(crops[:, None], times[part])))
        return torch.cat(probs).unflatten(0, batch.draw.positions.shape)

    def clip_probs(self, frames: Tensor, batch: Batch) -> ClipProbs:
        """Return the classifier of clips of the crops at positions [B, N]."""
        times = send(batch.times, frames.device)
        videos, candidates = batch.draw.positions.shape

        def of_crops(positions: Tensor) -> Tensor:
            # [B, N] in the frames of all videos
            where = (positions + candidates * torch.arange(videos, device=positions.device)[:, None]).cpu()
            near = times.gather(1, positions)
            probs = []
            size = max(1, _FRAMES_AT_A_TIME // where.shape[1])
            for begin in range(0, videos, size):
                some = where[begin : begin + size]
                flat = some.flatten().numpy()
                crops = Crops(batch.draw.crops.boxes[flat], batch.draw.crops.flips[flat])
                clips = self._crops(frames[flat], crops, batch.sizes[flat]).unflatten(0, some.shape)
                probs.append(self.classifier.probabilities(self.classifier.scores(clips, near[begin : begin + size])))
            return torch.cat(probs)

        return of_crops


class Float32Conv2d(nn.Conv2d):
    """A convolution that is computed in float32 under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x.float()).to(x.dtype)


def _use_float32_for_strided_depthwise(network: nn.Module) -> None:
    """Change such layers in place: oneDNN's backward pass through them in bfloat16 takes half of a step."""
    for layer in network.modules():
        if type(layer) is nn.Conv2d and layer.groups == layer.in_channels > 1 and max(layer.stride) > 1:
            layer.__class__ = Float32Conv2d


def _sampler_recipe(sampler: str, recipe: Any, **of_baselines: Any) -> Any:
    """Return the recipe, by default the sampler's own, and refuse what is for baselines alone."""
    for argument, given in of_baselines.items():
        if given is not None:
            systems = ", ".join(list_systems())
            raise InvalidArgument(f"{argument} is for baselines ({systems}), not for {sampler}; leave it out")
    if recipe is None:
        return RECIPES[sampler]
    name = recipe if isinstance(recipe, str) and recipe in list_systems() else getattr(recipe, "system", None)
    if name is not None:
        raise InvalidArgument(f"the recipe is of the baseline {name}; give sampler={name!r} (--sampler {name})")
    return recipe


def memory_taken(source: FrameSource) -> int:
    """Return the bytes of memory that frames take: none on the GPU, and none where each batch is decoded."""
    return source.nbytes if isinstance(source, CachedFrames) and source.device.type == "cpu" else 0


def _teacher(
    bank: Bank,
    classifier: str | Path | Classifier | None,
    recipe: SamplerRecipe,
    *,
    online: bool,
    device: torch.device,
) -> tuple[Any, Teacher]:
    """Return the classifier, frozen on the device, where it is run, else None; and its outputs in the bank."""
    resolved: Any = classifier
    if isinstance(classifier, (str, Path)):
        refuse_baseline_folder("classifier", classifier)
        if str(classifier) not in bank.teachers and saved_folder(classifier):
            resolved = create_classifier(classifier)
        else:
            names = [name for name, about in bank.teachers.items() if about["name"] == str(classifier)]
            resolved = names[0] if len(names) == 1 else str(classifier)
    if not online:
        outputs = bank.teacher(resolved)
        if recipe.loss != "reinforce" or outputs.pooling == "mean":
            return None, outputs
        network = None if isinstance(resolved, str) else resolved
        check_classifier(recipe, outputs, network, classifier)
        return network.to(device).freeze() if isinstance(network, Classifier) else network, outputs
    if not isinstance(resolved, Classifier):
        raise InvalidArgument(
            f"teacher='online' runs the classifier itself, but classifier={classifier!r} is none; "
            "give the classifier or its saved folder"
        )
    return resolved.to(device).freeze(), bank.teacher(resolved)


def new_sampler(
    bank: Bank, recipe: SamplerRecipe, weights: str | Path | None, *, multi_label: bool = False
) -> SOSampler:
    """Create the network of a recipe before its first step; its new layers depend on the recipe's seed.

    `multi_label`: the teacher's classes do not exclude each other (sigmoid).
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(recipe.seed % 2**63)  # new layers are drawn on the CPU
        sampler = SOSampler(
            backbone=recipe.backbone,
            shift=recipe.shift,
            input_size=recipe.input_size,
            num_classes=len(bank.classes) if recipe.class_head else None,
            class_names=bank.classes if recipe.class_head else None,
            dropout=recipe.dropout,
            multi_label=multi_label,
            scoring=dict(recipe.scoring),
        )
    if weights is not None:
        load_backbone_weights(sampler.backbone, weights)
    return sampler


def _saved(run: RunFolder, device: torch.device) -> TrainedSampler:
    """Load the sampler of a finished run."""
    with torch.random.fork_rng(devices=[]):  # layers are drawn before they are filled
        sampler = SOSampler.from_pretrained(run.folder)
    return TrainedSampler(sampler.to(device).freeze(), run.folder, run.result() or {})


def _dev_set(
    bank: Bank, rows: list[int], outputs: Teacher, recipe: SamplerRecipe, clips: ClipClassifier | None, **opened: Any
) -> DevSet:
    """`opened`: options of `open_frames`."""
    source = open_frames(bank, rows, Shape(recipe.input_size, square=True), **opened)
    wanted = recipe.num_candidates if isinstance(recipe.num_candidates, int) else _DEV_CANDIDATES
    num_candidates = min(wanted, max(len(bank[row]) for row in rows))
    drawn = drawn_frames(recipe)
    return DevSet(bank, rows, outputs, source, num_candidates=num_candidates, clips=clips, num_frames=drawn)


def _start_text(
    sampler: SOSampler, processes: Processes, precision: str, batches: SamplerBatches, rows: dict[str, list[int]]
) -> str:
    frames = f"frames do not fit into memory and are decoded in every epoch ({batches.workers} worker processes)"
    if isinstance(batches.source, CachedFrames):
        frames = f"frames in memory ({batches.source.nbytes / 1e9:.2f} GB, {batches.source.device.type})"
    several = f" in {processes.count} processes" if processes.count > 1 else ""
    unlabelled = f" ({len(rows['unlabelled'])} without a label are left out)" if rows["unlabelled"] else ""
    dev = f"{len(rows['dev'])} dev" if rows["dev"] else "no dev split, so the last epoch is kept"
    return (
        f"{sampler!r}, on {processes.device}{several} in {precision}: "
        f"{len(rows['train'])} videos to train on, {dev}{unlabelled}; {frames}"
    )


def _add_budget(loop: SamplerLoop, videos: DevSet) -> dict[str, Any]:
    """Give the trained sampler a head that predicts how many frames a video needs; return facts about it.

    It is fitted to the answers for the best frames of `videos`, and has no state to resume: the same sampler gets the
    same head again.
    """
    sampler, settings = loop.evaluated, OCSamplerSettings(**loop.recipe.reinforce)
    loop.say(f"budget: how many frames {len(videos)} videos of train need")
    scores, features, _ = videos.outputs(sampler, loop.precision)
    num_frames = min(settings.num_frames, videos.num_candidates)
    targets = budget_targets(scores, videos.labels, videos.clip_probs, num_frames, settings.budget_confidence)
    sampler.set_budget(*fit_budget(features, targets, num_frames))
    facts: dict[str, Any] = {"videos": len(videos), "needed": float(targets.double().mean())}
    if loop.dev is not None and loop.dev.metric != "confidence":
        facts |= _measure_budget(loop.dev, sampler, loop.precision)
        loop.say(
            f"budget: dev {loop.dev.metric} {100 * facts['dev']:.2f} % with {facts['dev_frames']:.2f} frames a video "
            f"(always {num_frames}: {100 * facts['dev_all']:.2f} %)"
        )
    return facts


def _measure_budget(dev: DevSet, sampler: SOSampler, precision: str) -> dict[str, float]:
    """Return the metric of dev with as many frames as the budget head wants, their mean number, and with all N."""
    scores, features, _ = dev.outputs(sampler, precision)
    needed = sampler.frames_needed(features[:, None].to(sampler.device)).cpu().numpy()
    candidates = np.full(len(dev), dev.num_candidates)
    counts = count_frames(expected_by_budget(needed, candidates, dev.num_candidates), Auto())
    probs = torch.empty_like(dev.labels)
    for count in np.unique(counts).tolist():
        videos = np.flatnonzero(counts == count)
        probs[videos] = dev.clip_probs(videos, top_n(scores[videos], count)).float()
    all_frames = top_n(scores, min(needed.shape[1], dev.num_candidates))
    return {
        "dev": dev.measure_probs(probs),
        "dev_frames": float(counts.mean()),
        "dev_all": dev.measure(all_frames),
    }


def _add_answers(
    loop: SamplerLoop, dev: DevSet, outputs: DevOutputs, probe: NDArray[np.float64] | None
) -> dict[str, Any] | None:
    """Fit the answers of the calibrated sampler, keep the best or the recipe's; return what they measure on dev.

    `probe`: what its probe makes of the frames, [V, T, C + 1], where it has one.
    """
    sampler, wanted = loop.evaluated, loop.recipe.answer
    data = dev.answers(sampler, outputs, probe)
    if data is None or len(data) < MIN_VIDEOS:
        why = "the classifier has no stored logits of single frames" if data is None else f"dev has {len(dev)} videos"
        if wanted not in (BEST, MEAN):
            loop.say(f"answer: {MEAN} instead of {wanted}, which cannot be fitted: {why}")
        return None
    settings, measured = fit_answers(data)
    best = settings["default"]
    if wanted != BEST and wanted not in (MEAN, *settings):
        needs = "a class head" if wanted == FUSED else "a class head and a probe"
        loop.say(f"answer: {best} instead of {wanted}, which needs {needs}")
    elif wanted != BEST:
        settings["default"] = wanted
    sampler.answer = settings
    shown = [
        f"{kind} {100 * np.mean(measured[kind]['score']):.2f} % (log loss {measured[kind]['log_loss']:.3f})"
        for kind in ANSWERS
        if kind in measured
    ]
    kept = f"{best} is kept" if wanted == BEST else f"{settings['default']} is kept, as the recipe says"
    loop.say(f"answer: dev {dev.metric}, mean over {_numbers(data.numbers)} frames: {', '.join(shown)}; {kept}")
    return {"kept": settings["default"], "best": best, **measured}


def _numbers(numbers: list[int]) -> str:
    """
    >>> _numbers([1, 2, 6]), _numbers([1])
    ('1, 2 and 6', '1')
    """
    *others, last = map(str, numbers)
    return f"{', '.join(others)} and {last}" if others else last


def _finish(
    loop: SamplerLoop,
    calibration: DevSet,
    bank: Bank,
    outputs: Teacher,
    rows: dict[str, list[int]],
    run: RunFolder,
    budget_videos: DevSet | None,
    features: Features | None,
) -> None:
    """Calibrate the best sampler on a set of videos, add a budget head learned on others, write it and the result.

    `features`: of the classifier, for a probe.
    """
    loop.load_best()
    sampler, recipe = loop.evaluated, loop.recipe
    dev_outputs = calibration.outputs(sampler, loop.precision)
    if not dev_outputs.scores.isfinite().all():
        raise diverged("the sampler's scores are not finite", recipe.lr, loop.precision)
    if not is_finite(sampler):  # infinite variances of a batch norm give finite scores
        raise diverged("weights or statistics of the sampler are not finite", recipe.lr, loop.precision)
    ranking = None
    if loop.dev is not None and has_belief(sampler.scoring.settings):
        dev_outputs, ranking = choose_ranking(sampler, calibration, dev_outputs, loop.precision)
        shown = ", ".join(f"{name} {100 * np.mean(ranking[name]):.2f} %" for name in RANKINGS)
        loop.say(
            f"ranking: dev {ranking['metric']}, mean over {_numbers(ranking['num_frames'])} frames: {shown} (chance: "
            f"{200 * ranking['standard_error']:.2f} points of top-1); {ranking['kept']} is kept"
        )
    sampler.calibration = fit_calibration(dev_outputs.scores, calibration.confidence)
    probe, probe_outputs = None, None
    if features is not None:
        probe_outputs, probe = add_probe(
            sampler,
            outputs,
            features,
            rows,
            num_candidates=calibration.num_candidates,
            device=loop.processes.device,
            say=loop.say,
        )
    answers = None if loop.dev is None else _add_answers(loop, calibration, dev_outputs, probe_outputs)
    budget = None if budget_videos is None else _add_budget(loop, budget_videos)
    measured: dict[str, Any] = {"metric": calibration.metric, "dev": loop.best["score"]}
    if loop.dev is not None:
        measured |= {"dev_uniform": loop.dev.of_uniform(), "dev_semi_optimal": loop.dev.of_semi_optimal()}
    if ranking is not None and ranking["kept"] == RANKINGS[1]:
        measured["dev"] = calibration.of_scores(dev_outputs.scores)
    measured |= {"num_candidates": calibration.num_candidates, "num_frames": calibration.num_frames}
    sampler.about = {
        "classifier": outputs.about["name"],
        "teacher": outputs.name,
        "bank": bank.path.resolve().name,
        "num_classes": len(bank.classes),
        **measured,
        "best_epoch": loop.best["epoch"],
        **({} if budget is None else {"budget": budget}),
        **({} if answers is None else {"answers": answers}),
        **({} if probe is None else {"probe": probe}),
        **({} if ranking is None else {"ranking": ranking}),
        "calibrated_on": "train" if loop.dev is None else "dev",
        "seed": recipe.seed,
        "sosampler": __version__,
        "recipe": recipe.to_dict(),
    }
    sampler.save_pretrained(run.folder)
    text = f"written to {run.folder}"
    if loop.dev is not None:
        titles = {"dev": "sampler", "dev_uniform": "uniform", "dev_semi_optimal": "semi-optimal"}
        shown = ", ".join(f"{title} {100 * measured[name]:.2f} %" for name, title in titles.items())
        text = (
            f"best of epoch {loop.best['epoch'] + 1}: dev {calibration.metric} of {calibration.num_frames} of "
            f"{calibration.num_candidates} frames: {shown}; {text}"
        )
    loop.say(text)
    result = {
        **measured,
        "best_epoch": loop.best["epoch"],
        "epochs": recipe.epochs,
        "sizes": {name: len(split) for name, split in rows.items()},
        "calibration": list(sampler.calibration or ()),
        "teacher": outputs.name,
        "fingerprint": sampler.fingerprint(),
    }
    if budget is not None:
        result["budget"] = budget
    if answers is not None:
        result["answers"] = answers
    if probe is not None:
        result["probe"] = probe
    if ranking is not None:
        result["ranking"] = ranking
    if recipe.pretrain:
        stage = run.stage(PRETRAIN)
        result["pretrain"] = {name: stage.history()[-1][name] for name in ("loss", "accuracy")}
        stage.remove_checkpoint()
    run.finish(result)
