"""How much faster a sampler trains from a bank than with the classifier run on every frame in every step.

python benchmarks/speed/train.py --videos 2048 --steps 16 --device cuda --out benchmarks/results/training_gpu.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from sosampler._util.environment import circumstances, compare
from sosampler._util.hardware import check_device, usable_cores
from sosampler.bank.bank import Bank
from sosampler.bank.prepare import add_teacher
from sosampler.classifiers.factory import create_classifier
from sosampler.classifiers.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from sosampler.reels.make import make_reels
from sosampler.samplers.losses import SamplerLoss
from sosampler.samplers.recipe import read_recipe
from sosampler.training.checkpoints import LOG, RunFolder
from sosampler.training.train_sampler import new_sampler, train

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import RESULTS, write_result

Say = Callable[[str], None]

OURS, AUTHORS = "from the bank", "classifier asked in every step"
_BARS = {"cpu": 12.0, "cuda": 8.0}  # times as fast
_GPU_STEPS = 500
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
    """Time epochs of `train` against steps of the authors' code, in turns, both as videos a second.

    The authors' code: worker processes decode, crop and normalise the frames of a video on the CPU; the frozen
    classifier and the sampler run eagerly in float32 on them, the sampler on a nearest-neighbour reduction. Ours is an
    epoch of `train`, with frames and teacher outputs read once: the last epoch of each run is timed: the second,
    on a GPU the last of 500 steps, which is a usual training.

    `with_teacher` includes the time to run the classifier over the bank, spread over the epochs of the recipe: that
    part is done once, whereas the authors' code runs the classifier in every step of every epoch.

    Args:
        work: folder for the videos, which are reels of procedural images and used again, and for the runs.
        classifier: its weights are random; it is run over all frames of the bank once, which is timed as well.
        recipe: of the sampler: its name, file or `SamplerRecipe`.
        videos: how many.
        batch: videos a step; None takes the recipe's.
        steps: of the authors' code in a round; on a GPU at least one a worker, which all start together.
        workers: processes and threads that decode, for both; None: one a core.
    """
    place = check_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    num_workers = usable_cores() if workers is None else workers
    if place.type == "cuda":
        steps = max(steps, num_workers)
    work.mkdir(parents=True, exist_ok=True)
    bank = _made(work, videos, say)
    net: Any = create_classifier(classifier, class_names=list(bank.classes), device=str(place))
    say("running the classifier once")
    asking = _annotated(bank, net)
    batch_size = min(read_recipe(recipe).batch_size if batch is None else batch, videos)
    full = read_recipe(recipe, batch_size=batch_size)
    chosen = read_recipe(full, epochs=2 if place.type == "cpu" else max(2, -(-_GPU_STEPS * batch_size // videos)))
    say(f"{videos} videos, {batch_size} a step, {rounds} rounds")
    rates: dict[str, list[float]] = {OURS: [], AUTHORS: []}
    unhindered = []
    # The authors' code has a process of its own: `train` lets this one keep freed memory, which would make both faster.
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:
        for _ in range(rounds):
            rate, precision = _epoch(bank, net, chosen, work / "run", place, num_workers)
            rates[OURS].append(rate)
            asked = apart.submit(_steps, bank.path, classifier, chosen, place, num_workers, steps)
            rate, without_waiting = asked.result()
            rates[AUTHORS].append(rate)
            unhindered.append(without_waiting)
            say(", ".join(f"{name} {values[-1]:.1f} videos/s" for name, values in rates.items()))
    seconds = {name: [1 / rate for rate in values] for name, values in rates.items()}  # a video
    row = compare(seconds, way=OURS, reference=AUTHORS)
    bar = _BARS[place.type]
    of_teacher = asking / videos / full.epochs  # seconds a video and epoch
    included = {OURS: [taken + of_teacher for taken in seconds[OURS]], AUTHORS: seconds[AUTHORS]}
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
        "videos_a_second": {name: 1 / statistics.median(values) for name, values in seconds.items()},
        "videos_a_second_if_pictures_were_ready": {AUTHORS: statistics.median(unhindered)},
        "comparisons": [{**row, "bar": bar, "met": row["times_faster"] >= bar}],
        "with_teacher": compare(included, way=OURS, reference=AUTHORS)["times_faster"],
        "epochs_of_the_recipe": full.epochs,
    }


def _made(work: Path, videos: int, say: Say) -> Bank:
    say(f"making {videos} reels")
    still = {"pan": 0.0, "zoom": 0.0, "blur": 0.0, "fade": 0.0}
    size = {"size": 176, "num_candidates": 10, "num_shots": 10, "seconds_per_shot": 1.0, "fps": 4}
    made = make_reels("procedural", work / f"reels-{videos}", recipe={**still, **size}, counts={"train": videos})
    assert isinstance(made, Bank)
    return made


def _annotated(bank: Bank, classifier: Any) -> float:
    """Return the seconds that the classifier takes for all frames."""
    for name in bank.teachers:  # of an earlier call
        shutil.rmtree(bank.folder.teacher(name).path)
    begin = time.perf_counter()
    add_teacher(bank, classifier)
    return time.perf_counter() - begin


def _epoch(bank: Bank, classifier: Any, recipe: Any, out: Path, device: Any, workers: int) -> tuple[float, str]:
    """Return videos a second of the last epoch of `train`, and its precision."""
    shutil.rmtree(out, ignore_errors=True)
    train(bank, out=out, recipe=recipe, classifier=classifier, device=str(device), workers=workers)
    last = json.loads((out / LOG).read_text(encoding="utf-8").splitlines()[-1])
    precision = str(RunFolder(out).begun_with("precision"))
    shutil.rmtree(out)
    return len(bank) / max(float(last["seconds"]), 1e-3), precision


# --- the authors' code ------------------------------------------------------------------------------------------------


class Pictures:
    """A data set of videos: their frames in float, cropped and normalised on the CPU, and their labels."""

    def __init__(self, bank: Bank, num_candidates: int, crop_scale: tuple[float, float]) -> None:
        self.bank, self.num_candidates, self.crop_scale = bank, num_candidates, crop_scale

    def __len__(self) -> int:
        return len(self.bank)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """float32 [T, 3, 224, 224] and multi-hot [C]."""
        item, rng = self.bank[index], np.random.default_rng(index)
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
    """Return videos a second of some steps with the named classifier; and without the time it waited for frames.

    Steps before them are not counted. On a GPU, where workers may be the slower part, that is as many as they may have
    ready when it begins, and they are busy to the end.
    """
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
        before_batch = time.perf_counter()
        frames, labels = next(batches)
        waited += time.perf_counter() - before_batch
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
    """Return `count` batches, repeating the videos."""
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


# --- text ----------------------------------------------------------------------------------------------------------


def table(result: dict[str, Any]) -> str:
    """Return the rates and ratios as text."""
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
            f"  {row['times_faster']:.1f} times ({low:.1f} to {high:.1f}), required {row['bar']:g}: "
            f"{'met' if row['met'] else 'MISSED'}"
        )
    lines.append(f"  {result['with_teacher']:.1f} times with running the classifier over the bank")
    lines.append(
        f"  running the classifier once, before the first epoch: {result['seconds_to_ask_once']:.1f} s, "
        f"{result['frames_asked_a_second']:.0f} frames a second"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classifier", default="resnet50", help="its weights are random")
    parser.add_argument("--recipe", default="paper", help="of the sampler")
    parser.add_argument("--work", type=Path, default=Path(".bench"), help="folder for reels and runs")
    parser.add_argument("--videos", type=int, default=256, help="reels of procedural images")
    parser.add_argument("--batch", type=int, help="videos a step; the recipe's if not given")
    parser.add_argument("--steps", type=int, default=2, help="of the baseline in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device")
    parser.add_argument("--workers", type=int, help="decoders; one a core if not given")
    parser.add_argument("--out", type=Path, default=RESULTS / "training_gpu.json")
    given = vars(parser.parse_args())
    out = given.pop("out")
    result = bench_train(**given, say=print)
    write_result(out, result)
    print(table(result))


if __name__ == "__main__":
    main()
