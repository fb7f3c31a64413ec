"""What would stop a training, found before anything is written: all that `train` compares and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sosampler.classifiers.registry import WEIGHTS
from sosampler.errors import InvalidArgument, WeightsError, first_line
from sosampler.reproduce.places import Place
from sosampler.reproduce.plan import ExperimentPlan
from sosampler.reproduce.request import Request, light_fingerprint, seeds_of
from sosampler.reproduce.trainings import Training
from sosampler.samplers.recipe import SamplerRecipe
from sosampler.training.checkpoints import CHECKPOINT, LOG, RESULT, SETTINGS, RunFolder, differences
from sosampler.training.preparation import sampler_precision
from sosampler.training.processes import Processes
from sosampler.training.system_features import heavy_source, light_source
from sosampler.training.train_sampler import KIND as SAMPLER
from sosampler.training.train_sampler import new_sampler
from sosampler.training.train_system import KIND as SYSTEM

_BEGUN = (CHECKPOINT, LOG, RESULT, WEIGHTS)


class BeforeTraining:
    """Checks every training of a run; networks of one kind are built once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._built: set[str] = set()
        self._light: dict[Path, dict[str, Any]] = {}

    def check(self, plan: ExperimentPlan) -> None:
        """Whether everything can be trained as asked, and what lies there already was."""
        if self._request.light is not None:
            light_fingerprint(plan.place.bank, self._request.light)  # says what is wrong with it
        for training in plan.trainings:
            self._check_networks(training, plan.place)
            for seed in seeds_of(plan, self._request):
                folder = training.folder(plan.place.folder(self._request.out), seed)
                if _has_begun(folder):
                    self._check_folder(training, plan.place, folder, seed)

    def _check_networks(self, training: Training, place: Place) -> None:
        """Backbones that cannot be had, and weights that do not fit."""
        recipe = training.full_recipe()
        if isinstance(recipe, SamplerRecipe):
            network = [recipe.backbone, recipe.shift, recipe.input_size, recipe.class_head, dict(recipe.scoring)]
            key = json.dumps([str(place.bank.path), *network])
            if key not in self._built:
                new_sampler(place.bank, recipe, self._request.weights)
                self._built.add(key)
        elif recipe.needs_light:
            self._light_identity(place)

    def _light_identity(self, place: Place) -> dict[str, Any]:
        bank, request = place.bank, self._request
        if bank.path not in self._light:
            try:
                self._light[bank.path] = light_source(bank, request.light, request.weights).identity(bank)
            except WeightsError as error:
                raise WeightsError(
                    f"the light network of systems, MobileNetV2, cannot have these weights ({first_line(error)}); give "
                    "--light as well"
                ) from error
        return self._light[bank.path]

    def _check_folder(self, training: Training, place: Place, folder: Path, seed: int) -> None:
        path = folder / SETTINGS
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{path}: cannot be read ({error}); delete the folder to train again") from error
        begun = told.get("precision") if isinstance(told, dict) else None
        wanted = json.loads(json.dumps(self._settings(training, place, seed, begun)))
        # Settings that only `train` knows are left to it.
        kept = {name: told.get(name) for name in wanted} if isinstance(told, dict) else told
        changed = differences(kept, wanted)
        if changed:
            raise InvalidArgument(
                f"{folder}: was trained with other settings: {'; '.join(changed[:3])}; give the same to go on, another "
                "--out, or delete the folder"
            )

    def _settings(self, training: Training, place: Place, seed: int, begun: Any) -> dict[str, Any]:
        """What `train` writes down about a run and compares; `begun` is the precision of the run in the folder."""
        recipe = training.full_recipe(seed)
        told: dict[str, Any] = {"bank": place.identity, "recipe": recipe.to_dict()}
        if isinstance(recipe, SamplerRecipe):
            start = (
                None
                if self._request.weights is None
                else new_sampler(place.bank, recipe, self._request.weights).fingerprint()
            )
            processes = Processes(self._request.device)
            return told | {
                "kind": SAMPLER,
                "teacher": {"name": place.teacher, "asked": "bank"},
                "start": start,
                "precision": sampler_precision(processes, self._request.precision, begun, recipe),
            }
        return told | {
            "kind": SYSTEM,
            "heavy": heavy_source(place.bank, place.heavy).identity(place.bank),
            "light": self._light_identity(place) if recipe.needs_light else None,
        }


def _has_begun(folder: Path) -> bool:
    """Whether anything of a training is there that other settings must not go on with."""
    return RunFolder(folder).frames.exists() or any((folder / name).exists() for name in _BEGUN)
