"""`train` for systems that decide one after another which frames to look at: FrameExit, LiteEval, AdaFrame, MARL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosampler import __version__
from sosampler.bank.bank import Bank
from sosampler.baselines.base import Baseline
from sosampler.baselines.folder import load_system, save_baseline
from sosampler.baselines.recipe import BaselineRecipe, read_baseline_recipe
from sosampler.errors import InvalidArgument
from sosampler.samplers.recipe import SamplerRecipe, list_recipes
from sosampler.training.baseline_data import FeatureSource, bank_views, heavy_source, keep_features, light_source
from sosampler.training.baseline_loop import fit, measure_baseline, metric_of, threshold_curve
from sosampler.training.checkpoints import RunFolder, bank_identity, check_apart
from sosampler.training.distributed import Processes
from sosampler.training.examples import labelled_rows
from sosampler.training.optim import diverged, is_finite

KIND = "system"
_ON_DEV = ("metric", "dev", "dev_frames", "dev_frames_decoded", "dev_gmacs")  # None where there is no dev split


@dataclass(frozen=True)
class TrainedSystem:
    """What came out of `train`: the system, and how good it is on dev."""

    system: Baseline
    folder: Path
    result: dict[str, Any]

    def __repr__(self) -> str:
        return f"TrainedSystem({self.system.name}, {self.folder}, {self.result['metric']}, dev {self.result['dev']})"


def train_baseline(
    bank: str | Path | Bank,
    *,
    out: str | Path,
    system: str,
    recipe: Any = None,
    classifier: Any = None,
    light: Any = None,
    weights: str | Path | None = None,
    device: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> TrainedSystem:
    """Train a system on the train split of a bank; `train` says what the arguments are.

    Features that the bank does not keep yet are computed for all of its videos first, which is most of the work and
    goes on after a kill. Training itself takes seconds to minutes: killed, it starts again and gives the same weights.
    Features of all stored frames of the split are in memory, 2 bytes a number, 4 where they are kept in float32. Each
    epoch shows other T of these, as samplers are shown them. T is at most what the longest video has, and no system
    looks at more frames than it was trained with.

    The last epoch is kept: dev chooses none, because a system spends more or less from epoch to epoch.
    """
    processes = Processes(device)
    with processes.together():
        if processes.count > 1:
            raise InvalidArgument(
                f"{system} is trained in one process, not in {processes.count}; start it without a launcher"
            )
    recipe = _recipe_of(system, recipe, settings)
    bank = bank if isinstance(bank, Bank) else Bank(bank)
    sizes = {name: len(rows) for name, rows in labelled_rows(bank).items()}
    sources = [heavy_source(bank, classifier)]
    if recipe.needs_light:
        sources.append(light_source(bank, light, weights))
    run = RunFolder(Path(out), KIND)
    check_apart(run.folder, bank)
    if overwrite:
        run.clear()
    run.begin(_told(bank, sources, recipe))
    finished = run.result()
    where = str(processes.device)
    if finished is not None:
        say(f"{run.folder}: this run is finished")
        return TrainedSystem(load_system(run.folder, where), run.folder, finished)
    for source in sources:
        keep_features(bank, source, device=where, say=say)
    run.begin(_told(bank, sources, recipe))  # again, for features may have become others than they were meant to be
    result = _trained(Bank(bank.path), sources, recipe, run, sizes, where, say)
    return TrainedSystem(load_system(run.folder, where), run.folder, result)


def _recipe_of(system: str, recipe: Any, settings: dict[str, Any]) -> BaselineRecipe:
    if isinstance(recipe, SamplerRecipe) or (isinstance(recipe, str) and recipe in list_recipes()):
        name = recipe if isinstance(recipe, str) else recipe.name
        raise InvalidArgument(
            f"the recipe {name!r} is of a sampler, but {system} is a system; leave the recipe out, or give a YAML file "
            f"of settings for {system}"
        )
    return read_baseline_recipe(system if recipe is None else recipe, system=system, **settings)


def _told(bank: Bank, sources: list[FeatureSource], recipe: BaselineRecipe) -> dict[str, Any]:
    """What decides the outcome of a run."""
    told = [source.identity(bank) for source in sources]
    return {
        "bank": bank_identity(bank),
        "heavy": told[0],
        "light": told[1] if recipe.needs_light else None,
        "recipe": recipe.to_dict(),
    }


def _fitted(recipe: BaselineRecipe, stored: int, say: Callable[[str], None]) -> BaselineRecipe:
    """The recipe with no more candidates than the longest video has, and no layers for frames that are never offered.

    Such layers would keep the weights they were drawn with, and be asked where videos are longer.
    """
    offered = min(recipe.num_candidates, stored)
    changes = {"num_candidates": offered}
    if offered < recipe.num_candidates:
        say(f"the bank stores {stored} frames of a video at most, so T is {offered} instead of {recipe.num_candidates}")
    most = recipe.settings.get("max_frames", 0)
    if most > offered:
        say(f"{recipe.system} looks at {offered} frames at most instead of {most}, for T is {offered}")
        changes["max_frames"] = offered
    return recipe.changed(**changes)


def _trained(
    bank: Bank,
    sources: list[FeatureSource],
    recipe: BaselineRecipe,
    run: RunFolder,
    sizes: dict[str, int],
    device: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Train, measure on dev, write the folder; returns the result."""
    heavy = sources[0].told(bank)
    light = sources[1].told(bank) if recipe.needs_light else None
    asked: dict[str, Any] = {"heavy": heavy["name"], "light": None if light is None else light["name"]}
    gmacs = {"heavy_gmacs": heavy["gmacs"], "light_gmacs": 0.0 if light is None else light["gmacs"]}
    views, labels = bank_views(bank.split("train"), num_candidates=None, **asked)
    recipe = _fitted(recipe, views.heavy.shape[1], say)
    system = recipe.build(
        heavy_width=heavy["width"],
        light_width=None if light is None else light["width"],
        num_classes=len(bank.classes),
        multi_label=bank.multi_label,
    )
    say(_first_words(system, device, sizes))
    history = fit(
        system,
        views,
        labels,
        num_candidates=recipe.num_candidates,
        epochs=recipe.epochs,
        lr=recipe.lr,
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        device=device,
        optimizer=recipe.optimizer,
        weight_decay=recipe.weight_decay,
        clip=recipe.clip,
        say=say,
    )
    if not is_finite(system):
        raise diverged(f"weights of {system.name} are not finite", lr=recipe.lr, precision="float32")
    del views, labels
    measured, curve = dict.fromkeys(_ON_DEV), []
    measured["metric"] = metric = metric_of(system)
    if sizes["dev"]:
        views, labels = bank_views(bank.split("dev"), num_candidates=recipe.num_candidates, **asked)
        found = measure_baseline(system, views, labels, **gmacs)
        measured["dev"] = found.pop(metric)
        measured |= {f"dev_{name}": value for name, value in found.items()}
        curve = threshold_curve(system, views, labels, **gmacs)
    save_baseline(
        run.folder,
        system,
        {
            "classifier": heavy["network"],
            "bank": bank.path.resolve().name,
            "classes": list(bank.classes),
            "num_candidates": recipe.num_candidates,
            "heavy": heavy,
            "light": light,
            **measured,
            "seed": recipe.seed,
            "sosampler": __version__,
            "recipe": recipe.to_dict(),
        },
    )
    run.log(history)
    result = {
        **measured,
        "dev_curve": curve,
        "sizes": sizes,
        "num_candidates": recipe.num_candidates,
        "epochs": recipe.epochs,
        "seed": recipe.seed,
        "heavy": heavy["fingerprint"],
        "light": None if light is None else light["fingerprint"],
    }
    run.finish(result)
    say(_last_words(measured, run.folder))
    return run.result() or {}


def _first_words(system: Baseline, device: str, sizes: dict[str, int]) -> str:
    parameters = sum(weight.numel() for weight in system.parameters())
    unlabelled = f" ({sizes['unlabelled']} without a label are left out)" if sizes["unlabelled"] else ""
    dev = f"{sizes['dev']} dev" if sizes["dev"] else "no dev split"
    return (
        f"{system.name}, {parameters / 1e6:.2f} M parameters, on {device}: "
        f"{sizes['train']} videos to train on, {dev}{unlabelled}"
    )


def _last_words(measured: dict[str, Any], folder: Path) -> str:
    if measured["dev"] is None:
        return f"written to {folder}"
    return (
        f"dev {measured['metric']} {100 * measured['dev']:.2f} % with {measured['dev_frames']:.2f} frames in the heavy "
        f"network, {measured['dev_frames_decoded']:.2f} decoded, {measured['dev_gmacs']:.3f} GMACs a video; "
        f"written to {folder}"
    )
