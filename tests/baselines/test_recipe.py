"""Recipes of systems: those that come along, those of files, and what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import sosampler as so  # noqa: E402
from sosampler.baselines.recipe import read_baseline_recipe  # noqa: E402
from sosampler.baselines.registry import list_systems  # noqa: E402


@pytest.mark.parametrize("name", list_systems())
def test_the_recipes_that_come_along_are_whole(name: str) -> None:
    recipe = read_baseline_recipe(name)
    assert (recipe.name, recipe.system) == (name, name)
    assert recipe.changed() == recipe
    assert type(recipe)(**json.loads(json.dumps(recipe.to_dict()))) == recipe
    widths = {f"{one}_width": 4 for one in recipe.feature_sets}
    built = recipe.build(**widths, num_classes=2, multi_label=False, num_candidates=3)
    assert built.config | recipe.settings == built.config
    if built.threshold:
        assert built.config[built.threshold] == recipe.settings[built.threshold]


def test_a_file_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "eager.yaml"
    path.write_text("epochs: {gates: 3}\nlr: 3e-4\nbeta: 1e-2\nsettings: {max_frames: 6}\n")
    with pytest.raises(so.InvalidArgument, match="has no baseline; add a line system: NAME"):
        read_baseline_recipe(path)
    recipe, own = read_baseline_recipe(path, system="frameexit", seed=4), read_baseline_recipe("frameexit")
    assert (recipe.name, recipe.lr, recipe.seed) == ("eager", 3e-4, 4)
    assert recipe.settings == own.settings | {"beta": 1e-2, "max_frames": 6}
    assert isinstance(own.epochs, dict)
    assert recipe.epochs == own.epochs | {"gates": 3}
    path.write_text("system: liteeval\ntarget: 0.5\n")
    assert read_baseline_recipe(str(path)).settings["target"] == 0.5
    with pytest.raises(so.InvalidArgument, match="'eager' is of liteeval, but marl is to be trained"):
        read_baseline_recipe(path, system="marl")
    for text, says in (
        ("system: glimpse\n", "choose one of: frameexit"),
        ("system: marl\ntarget: 1\n", "target: no such setting in a recipe of marl"),
        ("system: marl\nsettings: 3\n", "settings=3 must be a mapping"),
        ("system: marl\nsettings: {target: 1}\n", "target: no such setting in settings of marl"),
        ("- 1\n", "must hold settings"),
        ("a: [\n", "is not YAML"),
    ):
        path.write_text(text)
        with pytest.raises(so.InvalidArgument, match=says):
            read_baseline_recipe(path)


def test_epochs_of_phases() -> None:
    recipe = read_baseline_recipe("frameexit", epochs=7)
    assert recipe.epochs == 7
    assert recipe.changed(epochs={"gates": 0}).epochs == {"classifiers": 7, "gates": 0}
    with pytest.raises(so.InvalidArgument, match="must train at least one phase"):
        recipe.changed(epochs={"gates": 0, "classifiers": 0})
    with pytest.raises(so.InvalidArgument, match=r"epochs\['gates'\]=-1"):
        recipe.changed(epochs={"gates": -1})
