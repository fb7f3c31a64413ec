"""What a user asked `reproduce` for, checked before anything is written."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sosampler._util.devices import check_device
from sosampler._util.validation import one_of, whole_number
from sosampler.bank.bank import Bank
from sosampler.classifiers.base import PRECISIONS
from sosampler.classifiers.weights import read_state
from sosampler.errors import InvalidArgument
from sosampler.paper.experiments import CASES
from sosampler.paper.plan import ExperimentPlan, recipe_dict
from sosampler.samplers.recipe import SETTINGS, check_known
from sosampler.training.baseline_data import light_source

_PRETRAINED = "pretrained"
_NOT_TO_CHANGE = ("name", "seed")  # the seeds are an argument of their own


@dataclass(frozen=True)
class Request:
    """The arguments that all experiments share."""

    out: Path
    seeds: tuple[int, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)  # settings of every sampler
    weights: str | Path | None = None
    light: Any = None  # a network, or the name of features in a bank
    device: str | None = None
    precision: str | None = None
    workers: int | None = None
    bootstrap: int = 2000
    num_cases: int = 6
    say: Callable[[str], None] = lambda text: None


def checked_request(
    out: Any,
    seeds: Sequence[int] | int,
    epochs: int | None,
    settings: Mapping[str, Any] | None,
    weights: Any,
    light: Any = None,
    **others: Any,
) -> Request:
    """A request, or what is wrong with it; the light network is loaded."""
    if not isinstance(out, (str, Path)) or not str(out):
        raise InvalidArgument(f"out={out!r} is not allowed; give a folder")
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"--out {folder}: is a file; give a folder")
    changes = dict(settings or {})
    check_known(changes, [name for name in SETTINGS if name not in _NOT_TO_CHANGE], "settings of the samplers")
    if epochs is not None:
        changes["epochs"] = whole_number("epochs", epochs)
    whole_number("bootstrap", others["bootstrap"], at_least=0)
    whole_number("num_cases", others["num_cases"])
    if others["device"] is not None:
        check_device(others["device"])
    if others["precision"] is not None:
        one_of("precision", others["precision"], PRECISIONS)
    if others["workers"] is not None:
        whole_number("workers", others["workers"], at_least=0)
    chosen = _checked_seeds(seeds)
    _check_weights(weights)
    return Request(folder, chosen, changes, weights, _checked_light(light), **others)


def _check_weights(weights: Any) -> None:
    """Whether the file can be read; whether it fits shows with the networks that begin with it."""
    if weights is None or str(weights) == _PRETRAINED:
        return
    if not isinstance(weights, (str, Path)) or not Path(weights).is_file():
        raise InvalidArgument(f"weights={str(weights)!r}: no such file; give one, or {_PRETRAINED!r}")
    read_state(Path(weights))


def _checked_light(light: Any) -> Any:
    """The network of a saved folder, so that it is read once; names of features are for the banks to know."""
    from sosampler.baselines.folder import refuse_baseline_folder
    from sosampler.classifiers.factory import create_classifier, saved_folder
    from sosampler.samplers.folder import is_sampler_folder
    from sosampler.samplers.registry import load_sampler

    if not isinstance(light, (str, Path)):
        return light
    refuse_baseline_folder("light", light)
    if is_sampler_folder(light):
        return load_sampler(light)
    folder = saved_folder(light)
    if folder is not None:
        return create_classifier(str(folder))
    if isinstance(light, Path) or light != Path(light).name:  # more than a plain name
        raise InvalidArgument(
            f"--light {str(light)!r}: no saved sampler or classifier is there; give the folder of a sampler without "
            "shift, or the name of features in the bank"
        )
    return light


def _checked_seeds(given: Any) -> tuple[int, ...]:
    listed = list(given) if isinstance(given, (list, tuple, range)) else [given]
    seeds = tuple(whole_number("seed", seed, at_least=0) for seed in listed)
    if not seeds or len(set(seeds)) < len(seeds):
        raise InvalidArgument(f"seeds={list(seeds)} is not allowed; give some, each once, for example 0,1,2")
    return seeds


def seeds_of(plan: ExperimentPlan, request: Request) -> tuple[int, ...]:
    """Single videos are shown as the sampler of the first seed sees them; without training one seed is enough."""
    return request.seeds[:1] if plan.experiment.kind == CASES or not plan.trainings else request.seeds


def settings_of(plan: ExperimentPlan, request: Request) -> dict[str, Any]:
    """All that decides the numbers of an experiment; what run.json keeps and a later run must match."""
    place, trains = plan.place, bool(plan.trainings)
    return {
        "experiment": plan.experiment.name,
        "bank": {**place.identity, "name": place.bank_name, "data": place.data, "split": place.split},
        "classifier": {
            "name": place.classifier_name,
            "teacher": place.teacher,
            "fingerprint": place.about["fingerprint"],
            "at_hand": place.classifier is not None,
        },
        "seeds": list(seeds_of(plan, request)),
        "changes": dict(request.changes) if trains else {},
        "weights": _identity(request.weights) if trains else None,
        "light": light_fingerprint(place.bank, request.light) if trains and request.light is not None else None,
        "precision": request.precision,
        "bootstrap": request.bootstrap,
        **({"num_cases": request.num_cases} if plan.experiment.kind == CASES else {}),
        "rows": [
            {"row": cell.recipe.row, "num_frames": cell.num_frames, "num_candidates": cell.num_candidates}
            | ({"policy": cell.recipe.policy} if cell.training is None else {"recipe": recipe_dict(cell.training)})
            for cell in plan.cells
        ],
    }


def _identity(weights: Any) -> dict[str, str] | None:
    """A file by its name and content, so that it may move."""
    if weights is None or str(weights) == _PRETRAINED:
        return None if weights is None else {"name": _PRETRAINED}
    path = Path(weights)
    return {"name": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:16]}


def light_fingerprint(bank: Bank, light: Any) -> str:
    """A light network by its content, whatever its folder or the bank calls it."""
    return light_source(bank, light, None).fingerprint if isinstance(light, str) else str(light.fingerprint())
