"""The rows of an experiment as recipes/<experiment>/<row>.yaml describe them.

A file says who chooses: a `policy` of `evaluate`, or a `sampler` of `train` with a `recipe` and `settings`. In settings
N and T stand for the numbers of the pair, so that a sampler which is trained for one pair alone is trained for each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from sosampler.checks import one_of, whole_number
from sosampler.errors import InvalidArgument
from sosampler.reproduce.experiments import EXPERIMENTS, Experiment
from sosampler.reproduce.paper import data_sets, read_paper
from sosampler.samplers.recipe import check_known, read_mapping

Pair = tuple[int, int]  # N, T

_KEYS = (
    *("table", "row", "title", "classifier", "data", "num_frames", "num_candidates", "pairs"),
    *("policy", "sampler", "recipe", "settings", "dial", "metric", "paper_row", "exceptions", "note"),
)
_NEEDED = ("table", "row", "classifier", "data", "metric")


@dataclass(frozen=True)
class RowRecipe:
    """One row of a table: who chooses how many frames of how many."""

    table: str
    row: str
    title: str
    classifier: tuple[str, ...]  # with which the paper has it
    data: tuple[str, ...]
    pairs: tuple[Pair, ...]
    metric: str
    policy: str | None = None
    sampler: str | None = None
    recipe: str | None = None  # None: the sampler's own
    settings: dict[str, Any] = field(default_factory=dict)
    dial: str | None = None  # of a system: "all" for a row of each value
    paper_row: str = ""  # what the paper calls it
    exceptions: tuple[dict[str, Any], ...] = ()  # other numbers of frames for a data set and a classifier
    note: str = ""

    def pairs_for(self, data: str | None, classifier: str | None) -> tuple[Pair, ...]:
        """N and T for a data set and a classifier of the paper."""
        for other in self.exceptions:
            if other["data"] == data and other["classifier"] == classifier:
                return tuple((other["num_frames"], count) for _, count in self.pairs)
        return self.pairs

    def settings_for(self, pair: Pair) -> dict[str, Any]:
        """The settings with the numbers of a pair in place of N and T."""
        found = _filled(self.settings, {"N": pair[0], "T": pair[1]})
        assert isinstance(found, dict)
        return found


def _filled(value: Any, numbers: dict[str, int]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(inner, numbers) for key, inner in value.items()}
    return numbers.get(value, value) if isinstance(value, str) else value


@cache
def rows_of(experiment: str) -> tuple[RowRecipe, ...]:
    """The rows of an experiment, in the order in which they are shown."""
    return tuple(_read(EXPERIMENTS[experiment], name) for name in EXPERIMENTS[experiment].rows)


def _read(experiment: Experiment, name: str) -> RowRecipe:
    path = files("sosampler.reproduce").joinpath("recipes", experiment.name, f"{name}.yaml")
    whose = f"recipes/{experiment.name}/{name}.yaml"
    recipe = row_recipe(read_mapping(path.read_text(encoding="utf-8"), whose), whose)
    if (recipe.table, recipe.metric) != (experiment.name, experiment.metric):
        raise InvalidArgument(
            f"{whose}: is of {recipe.table} and {recipe.metric}, but {experiment.name} shows {experiment.metric}"
        )
    return recipe


def row_recipe(values: dict[str, Any], whose: str) -> RowRecipe:
    """A row from what its file says, or what is wrong with the file."""
    check_known(values, _KEYS, whose)
    missing = [key for key in _NEEDED if key not in values]
    if missing:
        raise InvalidArgument(f"{whose}: has no {', '.join(missing)}; add it")
    given = dict(values)
    if ("policy" in given) == ("sampler" in given):
        raise InvalidArgument(f"{whose}: names a policy and a sampler, or neither; give one of them")
    alone = [key for key in ("recipe", "settings", "dial") if key in given and "sampler" not in given]
    if alone:
        raise InvalidArgument(f"{whose}: {', '.join(alone)} is of a sampler, but it names a policy; leave it out")
    pairs = _pairs(given, whose)
    for key in ("num_frames", "num_candidates", "pairs"):
        given.pop(key, None)
    for key in ("classifier", "data", "exceptions"):
        given[key] = tuple(given.get(key, ()))
    for data in given["data"]:
        one_of(f"{whose}: data", data, data_sets())
    for classifier in given["classifier"]:
        one_of(f"{whose}: classifier", classifier, read_paper()["classifiers"])
    return RowRecipe(
        **{**given, "title": given.get("title", given["row"]), "paper_row": given.get("paper_row", given["row"])},
        pairs=pairs,
    )


def _pairs(values: dict[str, Any], whose: str) -> tuple[Pair, ...]:
    if ("pairs" in values) == ("num_frames" in values):
        raise InvalidArgument(f"{whose}: give pairs, or num_frames and num_candidates")
    if "pairs" in values:
        found = [tuple(pair) for pair in values["pairs"]]
    else:
        frames = values["num_frames"]
        listed = frames if isinstance(frames, list) else [frames]
        found = [(count, values.get("num_candidates")) for count in listed]
    for pair in found:
        if len(pair) != 2 or whole_number("num_frames", pair[0]) > whole_number("num_candidates", pair[1]):
            raise InvalidArgument(f"{whose}: {list(pair)} is no N of T; give two whole numbers, N at most T")
    return tuple((int(frames), int(count)) for frames, count in found)
