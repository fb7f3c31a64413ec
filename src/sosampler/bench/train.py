"""How much faster a sampler trains from a bank than by asking the classifier about every frame in every step."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from sosampler.bank.bank import Bank


Say = Callable[[str], None]

OURS, AUTHORS = "from the bank", "classifier asked in every step"
_BAR = 20.0
_AHEAD = 2  # batches that each worker of the authors' kind may have ready
_CLASSIFIER_SIDE = 224  # pixels that the classifier sees, and from which the sampler's are taken


def bench_train(
    *,
    work: Path,
    classifier: str = "resnet50",
    recipe: Any = "paper",
    videos: int = 256,
    batch: int | None = None,
    steps: int = 2,
    rounds: int = 3,
    device: str | None = None,
    workers: int | None = None,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """Time epochs of `train` against steps of the authors' kind, in turns, both as videos a second.

    The authors' kind: worker processes decode, crop and normalise the pictures of a video on the processor, the frozen
    classifier and the sampler run eagerly in float32 on what they give, the sampler on every so-manyth pixel of it.
    Ours is an epoch of `train` as it is, frames and answers read once: the last epoch of each run is timed. That is the
    second; on a GPU, that of a run for which `train` prepares the network.

    Args:
        work: folder for the videos, which are reels of procedural pictures and used again, and for the runs.
        classifier: its weights are random; it answers about all frames of the bank once, which is timed as well.
        recipe: of the sampler: its name, file or `SamplerRecipe`.
        videos: how many.
        batch: videos a step; None takes the recipe's.
        steps: of the authors' kind in a round; on a GPU at least as many as there are workers, which all begin at once.
        workers: processes and threads that decode, for both; None: one a core.
    """
    import torch

    from sosampler._util.devices import check_device
    from sosampler._util.environment import circumstances, compare
    from sosampler._util.memory import usable_cores
    from sosampler.classifiers.factory import create_classifier
    from sosampler.samplers.recipe import read_recipe

    place = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    num_workers = usable_cores() if workers is None else workers
    if place.type == "cuda":
        steps = max(steps, num_workers)
    work.mkdir(parents=True, exist_ok=True)
    bank = _made(work, videos, say)
    net: Any = create_classifier(classifier, class_names=list(bank.classes), device=str(place))
    say("asking the classifier once")
    asking = _asked(bank, net)
    batch_size = min(read_recipe(recipe).batch_size if batch is None else batch, videos)
    chosen = read_recipe(recipe, batch_size=batch_size)
    chosen = read_recipe(chosen, epochs=_epochs_to_run(bank, chosen, on_gpu=place.type == "cuda"))
    say(f"{videos} videos, {batch_size} a step, {rounds} rounds")
    rates: dict[str, list[float]] = {OURS: [], AUTHORS: []}
    unhindered = []
    # Their kind has a process of its own: `train` lets this one keep freed memory, which would make both faster.
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:
        for _ in range(rounds):
            rate, precision = _epoch(bank, net, chosen, work / "run", place, num_workers)
            rates[OURS].append(rate)
            asked = apart.submit(_steps, bank.path, classifier, chosen, place, num_workers, steps)
            rate, without_waiting = asked.result()
            rates[AUTHORS].append(rate)
            unhindered.append(without_waiting)
            say(", ".join(f"{way} {found[-1]:.1f} videos/s" for way, found in rates.items()))
    seconds = {way: [1 / rate for rate in found] for way, found in rates.items()}  # a video
    row = compare(seconds, way=OURS, reference=AUTHORS)
    return {
        "benchmark": "train",
        "what": "videos a second in training a sampler",
        **circumstances(("torch", "torchvision", "timm", "numpy", "pillow", "pyarrow")),
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else str(place),
        "threads": torch.get_num_threads(),
        "workers": num_workers,
        "classifier": classifier,
        "recipe": chosen.name,
        "precision": {OURS: precision, AUTHORS: "float32, with TF32 where torch allows it by default"},
        "num_candidates": chosen.num_candidates,
        "videos": videos,
        "batch": batch_size,
        "epochs": chosen.epochs,
        "rounds": rounds,
        "steps": steps,
        "seconds_to_ask_once": asking,
        "frames_asked_a_second": sum(len(item) for item in bank) / asking,
        "seconds_a_video": seconds,
        "videos_a_second": {way: 1 / statistics.median(found) for way, found in seconds.items()},
        "videos_a_second_if_pictures_were_ready": {AUTHORS: statistics.median(unhindered)},
        "comparisons": [{**row, "bar": _BAR, "met": row["times_faster"] >= _BAR}],
    }


def _epochs_to_run(bank: Bank, recipe: Any, *, on_gpu: bool) -> int:
    """Two; on a GPU as many as it takes that `train` goes about it as in a long training."""
    import numpy as np

    from sosampler.training.preparation import steps_that_pay
    from sosampler.training.sampler_data import Plan

    if not on_gpu:
        return 2
    plan = Plan(np.array([len(item) for item in bank]), np.zeros((len(bank), 2)), recipe)
    return max(2, math.ceil(steps_that_pay(len(plan.num_candidates)) / plan.steps))


def _made(work: Path, videos: int, say: Say) -> Bank:
    from sosampler.bank.bank import Bank
    from sosampler.reels.make import make_reels

    say(f"making {videos} reels")
    still = {"pan": 0.0, "zoom": 0.0, "blur": 0.0, "fade": 0.0}
    size = {"size": 176, "num_candidates": 10, "num_shots": 10, "seconds_per_shot": 1.0, "fps": 4}
    made = make_reels("procedural", work / f"reels-{videos}", recipe={**still, **size}, counts={"train": videos})
    assert isinstance(made, Bank)
    return made


def _asked(bank: Bank, classifier: Any) -> float:
    """Seconds in which the classifier answered about all frames."""
    from sosampler.bank.prepare import add_teacher

    for name in bank.teachers:  # of an earlier call
        shutil.rmtree(bank.folder.teacher(name).path)
    begin = time.perf_counter()
    add_teacher(bank, classifier)
    return time.perf_counter() - begin


def _epoch(bank: Bank, classifier: Any, recipe: Any, out: Path, device: Any, workers: int) -> tuple[float, str]:
    """Videos a second of the last epoch of `train`, and its precision."""
    from sosampler.training.checkpoints import LOG, RunFolder
    from sosampler.training.train_sampler import train

    shutil.rmtree(out, ignore_errors=True)
    train(bank, out=out, recipe=recipe, classifier=classifier, device=str(device), workers=workers)
    last = json.loads((out / LOG).read_text(encoding="utf-8").splitlines()[-1])
    precision = str(RunFolder(out).begun_with("precision"))
    shutil.rmtree(out)
    return len(bank) / max(float(last["seconds"]), 1e-3), precision


# --- the authors' kind ------------------------------------------------------------------------------------------------


class Pictures:
    """A data set of videos: their pictures in float, cropped and normalised on the processor, and their labels."""

    def __init__(self, bank: Bank, num_candidates: int, crop_scale: tuple[float, float]) -> None:
        self.bank, self.num_candidates, self.crop_scale = bank, num_candidates, crop_scale

    def __len__(self) -> int:
        return len(self.bank)

    def __getitem__(self, place: int) -> tuple[np.ndarray, np.ndarray]:
        """float32 [T, 3, 224, 224] and multi-hot [C]."""
        import numpy as np
        from PIL import Image

        from sosampler.classifiers.preprocessing import IMAGENET_MEAN, IMAGENET_STD

        item, rng = self.bank[place], np.random.default_rng(place)
        frames = item.frames(item.stratified(min(self.num_candidates, len(item)), rng))
        height, width = frames.shape[1:3]
        side = np.sqrt(rng.uniform(*self.crop_scale)) * min(height, width)  # one square for all frames
        left, top = rng.uniform(0, width - side), rng.uniform(0, height - side)
        shown = (_CLASSIFIER_SIDE, _CLASSIFIER_SIDE)
        box = (left, top, left + side, top + side)
        cropped = [Image.fromarray(frame).resize(shown, Image.Resampling.BILINEAR, box) for frame in frames]
        pictures = np.stack([np.asarray(picture, dtype=np.float32) for picture in cropped])
        if rng.random() < 0.5:
            pictures = pictures[:, :, ::-1]
        normal = (pictures / 255 - np.array(IMAGENET_MEAN, np.float32)) / np.array(IMAGENET_STD, np.float32)
        labels = np.zeros(len(self.bank.classes), dtype=np.float32)
        labels[list(item.labels)] = 1
        return np.ascontiguousarray(normal.transpose(0, 3, 1, 2), dtype=np.float32), labels


def _steps(path: Path, name: str, recipe: Any, device: Any, workers: int, steps: int) -> tuple[float, float]:
    """Videos a second of some steps with the classifier of a name; and if it never had to wait for pictures.

    Steps before them are not counted. On a GPU, where workers may be the slower part, that is as many as they may have
    ready when it begins, and they are busy to the end.
    """
    import torch

    from sosampler.bank.bank import Bank
    from sosampler.classifiers.factory import create_classifier
    from sosampler.samplers.losses import SamplerLoss
    from sosampler.training.train_sampler import new_sampler

    bank = Bank(path)
    classifier: Any = create_classifier(name, class_names=list(bank.classes), device=str(device))
    sampler = new_sampler(bank, recipe, None).to(device).train()
    optimizer = torch.optim.SGD(sampler.parameters(), lr=recipe.lr, momentum=0.9, weight_decay=1e-4)
    loss_of = SamplerLoss(recipe, multi_label=sampler.multi_label)
    size = [recipe.input_size, recipe.input_size]
    before, behind = (1 + workers * _AHEAD, workers * _AHEAD) if device.type == "cuda" else (1, 0)
    batches = _batches(bank, recipe, workers, before + steps + behind, on_gpu=device.type == "cuda")
    begin, waited = 0.0, 0.0
    for number in range(before + steps):
        if number == before:
            begin, waited = time.perf_counter(), 0.0
        asked = time.perf_counter()
        frames, labels = next(batches)
        waited += time.perf_counter() - asked
        frames, labels = frames.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        with torch.no_grad():
            clips = frames.flatten(0, 1)[:, None]  # every frame a clip of one
            probs = classifier.probabilities(classifier(clips)).unflatten(0, frames.shape[:2])
            small = torch.nn.functional.interpolate(frames.flatten(0, 1), size).unflatten(0, frames.shape[:2])
        loss, _ = loss_of(sampler(small), probs, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        float(loss.detach())  # as it is logged in every step
    taken, seen = time.perf_counter() - begin, steps * recipe.batch_size
    for _ in batches:  # workers end by themselves
        pass
    return seen / taken, seen / (taken - waited)


def _batches(bank: Bank, recipe: Any, workers: int, count: int, *, on_gpu: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """So many, the videos over and over again."""
    from torch.utils.data import DataLoader, RandomSampler

    candidates = recipe.num_candidates
    most = candidates if isinstance(candidates, int) else max(candidates)
    pictures: Any = Pictures(bank, most, recipe.crop_scale)
    loader: DataLoader[Any] = DataLoader(
        pictures,
        batch_size=recipe.batch_size,
        sampler=RandomSampler(pictures, num_samples=count * recipe.batch_size),
        num_workers=workers,
        prefetch_factor=_AHEAD if workers else None,
        pin_memory=on_gpu,  # as mmaction's loader, which the authors use
    )
    return iter(loader)


# --- telling ----------------------------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """For reading."""
    lines = [
        f"{result['recipe']}, {result['num_candidates']} candidates, {result['classifier']}, {result['device']}, "
        f"{result['batch']} videos a step"
    ]
    lines += [f"  {way:<32}{rate:9.1f} videos a second" for way, rate in result["videos_a_second"].items()]
    ready = result["videos_a_second_if_pictures_were_ready"][AUTHORS]
    lines.append(f"  {'  if it never waited for pictures':<32}{ready:9.1f} videos a second")
    for row in result["comparisons"]:
        low, high = row["times_faster_by_round"]
        lines.append(
            f"  {row['times_faster']:.1f} times ({low:.1f} to {high:.1f}), asked for {row['bar']:g}: "
            f"{'met' if row['met'] else 'MISSED'}"
        )
    lines.append(
        f"  asking once, before the first epoch: {result['seconds_to_ask_once']:.1f} s, "
        f"{result['frames_asked_a_second']:.0f} frames a second"
    )
    return "\n".join(lines)


def add_to(app: typer.Typer) -> None:
    """Register `sosampler bench train`."""
    app.command("train")(train_command)


def train_command(
    classifier: Annotated[str, typer.Option("--classifier", "-c", help="Its weights are random.")] = "resnet50",
    recipe: Annotated[str, typer.Option("--recipe", help="Of the sampler.")] = "paper",
    work: Annotated[Path, typer.Option("--work", help="Folder for reels and runs.")] = Path(".bench"),
    videos: Annotated[int, typer.Option("--videos", min=2, help="Reels of drawn pictures.")] = 256,
    batch: Annotated[int | None, typer.Option("--batch", min=2, help="Videos a step.  [default: the recipe's]")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Of the authors' kind in a round.")] = 2,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often everything is timed.")] = 3,
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda, ...")] = None,
    workers: Annotated[int | None, typer.Option("--workers", min=0, help="Decoders.  [default: one a core]")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the result as JSON.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a sampler from a bank, against asking the classifier about every frame in every step."""
    from sosampler.cli.bench import give

    result = bench_train(
        work=work,
        classifier=classifier,
        recipe=recipe,
        videos=videos,
        batch=batch,
        steps=steps,
        rounds=rounds,
        device=device,
        workers=workers,
        say=lambda text: typer.echo(text, err=True),
    )
    give(result, table(result), out, json_output)
