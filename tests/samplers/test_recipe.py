"""Recipes of samplers: what the files say, what is refused, how a user changes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from sosampler.errors import InvalidArgument
from sosampler.samplers.recipe import (
    SETTINGS,
    SamplerRecipe,
    list_recipes,
    pretrain_recipe,
    read_recipe,
    read_settings,
)

every_recipe = pytest.mark.parametrize("name", list_recipes())

REFUSED: dict[str, list[Any]] = {
    "name": ["", 3, None],
    "backbone": ["", None, 18],
    "shift": [-1, 2.5, True],
    "input_size": [0, 16, 128.5],
    "dropout": [-0.1, 1.0, "0.5"],
    "class_head": [1, "yes", None],
    "scoring": [None, ["blend"], {"blend": object()}, {"blend": float("nan")}, {1: 2}],
    "target": ["labels", None, 3],
    "target_space": ["odds", None],
    "tau": [0, -1.0, "1", float("inf")],
    "loss": ["l1", None],
    "prediction": ["Softmax", None],
    "margin": [-0.01, None, float("nan")],
    "weighted": [0, "true"],
    "temperature": [0, -1, None],
    "reinforce": [None, {"reward": "label"}, [1]],
    "lam": [-0.01, 1.01, None],
    "guidance": ["scores", None],
    "distill": [-1, None],
    "calibrate": [-1, None],
    "optimizer": ["adam", None],
    "lr": [0, -1e-3, "1e-3", None, float("inf")],
    "momentum": [-0.1, 1, None],
    "weight_decay": [-1e-4, None],
    "epochs": [0, 1.5, None, True],
    "batch_size": [0, -64, 64.0],
    "warmup": [-0.1, 1, None],
    "clip": [0, -40, "40"],
    "ema": [-0.1, 1, None],
    "num_candidates": [1, 9.5, [1, 4], [8, 4], [4], [4, 8, 16], "4-16", None],
    "crop_scale": [[0, 1], [0.5, 1.1], [0.9, 0.5], 0.5, [0.5], ["a", 1]],
    "crop_ratio": [[0, 1], [2, 1], 1.0, None],
    "crop_per": ["clip", None],
    "flip": [1, "no"],
    "seed": [-1, 0.5, None],
    "pretrain": [-1, 1.5, None],
    "pretrain_lr": [0, -1, "x"],
    "freeze": [-0.1, 1.1, None],
    "answer": ["all", "", None],
}


class TestFiles:
    @every_recipe
    def test_is_complete_and_named_after_its_file(self, name: str) -> None:
        assert read_recipe(name).name == name

    @every_recipe
    def test_goes_through_yaml_json_and_back(self, name: str) -> None:
        recipe = read_recipe(name)
        values = recipe.to_dict()
        # Settings that came later are left out at their defaults: runs and recipes of before are still equal.
        later = {"default": ("freeze",)}.get(name, ("answer",))
        assert tuple(values) == (*SETTINGS[: SETTINGS.index("pretrain")], *later)
        assert SamplerRecipe.from_dict(yaml.safe_load(yaml.safe_dump(values))) == recipe
        assert json.loads(json.dumps(values)) == values
        assert SamplerRecipe.from_dict(json.loads(json.dumps(values))) == recipe

    def test_paper_as_printed(self) -> None:
        recipe = read_recipe("paper")
        printed = {
            "input_size": 128,
            "class_head": True,
            "target": "max",
            "loss": "hinge",
            "weighted": False,
            "prediction": "softmax",
            "lam": 0.99,
            "optimizer": "sgd",
            "lr": 1e-3,
            "momentum": 0.9,
            "weight_decay": 1e-4,
            "warmup": 0.0,
            "num_candidates": 10,
            "flip": True,
        }
        assert {name: recipe.to_dict()[name] for name in printed} == printed

    def test_authors_differ_from_the_paper_where_they_are_known_to(self) -> None:
        paper, authors = read_recipe("paper").to_dict(), read_recipe("authors").to_dict()
        assert {name: value for name, value in authors.items() if value != paper[name]} == {
            "name": "authors",
            "dropout": 0.5,
            "class_head": False,
            "prediction": "softmax-sigmoid",
            "weighted": True,
            "guidance": "logits",
            "lr": 0.2,
            "clip": 40.0,
        }

    def test_default_serves_any_number_of_frames(self) -> None:
        recipe = read_recipe("default")
        assert recipe.target == "label"
        assert recipe.prediction == "raw"
        assert isinstance(recipe.num_candidates, tuple)


class TestChecks:
    def test_every_setting_is_checked(self) -> None:
        assert tuple(REFUSED) == SETTINGS

    @pytest.mark.parametrize(("setting", "value"), [(name, value) for name in REFUSED for value in REFUSED[name]])
    def test_refused(self, setting: str, value: Any) -> None:
        with pytest.raises(InvalidArgument, match=setting):
            read_recipe("paper", **{setting: value})

    @pytest.mark.parametrize(
        ("setting", "value", "kept"),
        [
            ("shift", 0, 0),
            ("tau", None, None),
            ("clip", None, None),
            ("clip", 5, 5.0),
            ("lam", 0, 0.0),
            ("lam", 1, 1.0),
            ("num_candidates", [4, 16], (4, 16)),
            ("num_candidates", (10, 10), (10, 10)),
            ("num_candidates", 2, 2),
            ("crop_scale", [1, 1], (1.0, 1.0)),
            ("scoring", {"blend": 0.5}, {"blend": 0.5}),
            ("backbone", "timm:resnet18", "timm:resnet18"),
        ],
    )
    def test_allowed(self, setting: str, value: Any, kept: Any) -> None:
        actual = getattr(read_recipe("paper", **{setting: value}), setting)
        assert actual == kept
        assert type(actual) is type(kept)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"loss": "logistic"}, "prediction to raw and tau to null"),
            ({"loss": "listwise", "prediction": "raw"}, "tau to null"),
            ({"loss": "logistic", "tau": None}, "prediction to raw"),
            ({"class_head": False, "distill": 0.5}, "needs a class head"),
            ({"class_head": False, "lam": 0}, "leaves no loss"),
        ],
    )
    def test_settings_that_do_not_go_together(self, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            read_recipe("paper", **settings)

    def test_unknown_settings_are_told_with_the_known(self) -> None:
        with pytest.raises(InvalidArgument, match=r"learning_rate.*choose from: name, backbone, .*batch_size"):
            read_recipe("default", learning_rate=0.1)

    def test_missing_settings_are_told(self) -> None:
        values = read_recipe("default").to_dict()
        del values["lr"], values["seed"]
        with pytest.raises(InvalidArgument, match="no lr, seed"):
            SamplerRecipe.from_dict(values)

    def test_a_recipe_keeps_its_own_scoring(self) -> None:
        given = {"blend": {"weight": 0.5}}
        recipe = read_recipe("default", scoring=given)
        given["blend"]["weight"] = 0.9
        recipe.to_dict()["scoring"]["blend"]["weight"] = 0.1
        assert recipe.scoring == {"blend": {"weight": 0.5}}


class TestChanging:
    def test_settings_over_a_name(self) -> None:
        recipe = read_recipe("authors", epochs=3, lr=0.5)
        assert (recipe.name, recipe.epochs, recipe.lr, recipe.weighted) == ("authors", 3, 0.5, True)

    def test_settings_over_a_recipe(self) -> None:
        paper = read_recipe("paper")
        assert read_recipe(paper) == paper
        assert read_recipe(paper, seed=7) == paper.changed(seed=7)
        assert paper.seed == 0

    def test_texts(self) -> None:
        texts = ["lr=3e-4", "momentum=.9", "num_candidates=[4, 16]", "tau=null", "flip=false", "loss = hinge", "seed=7"]
        assert read_settings([*texts, "scoring={blend: 0.5}", "backbone=timm:resnet18"]) == {
            "lr": 3e-4,
            "momentum": 0.9,
            "num_candidates": [4, 16],
            "tau": None,
            "flip": False,
            "loss": "hinge",
            "seed": 7,
            "scoring": {"blend": 0.5},
            "backbone": "timm:resnet18",
        }

    @pytest.mark.parametrize("text", ["lr", "lr=", "=3", "rate=3", "lr=[1", "scoring={a: 1, a: 2}"])
    def test_texts_refused(self, text: str) -> None:
        with pytest.raises(InvalidArgument):
            read_settings([text])


class TestUserFiles:
    def write(self, folder: Path, text: str) -> Path:
        path = folder / "mine.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    def test_what_is_left_out_comes_from_the_default(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, "lr: 1e-3  # tried\nepochs: 20\n")
        for given in (path, str(path)):
            assert read_recipe(given) == read_recipe("default", name="mine", lr=0.001, epochs=20)

    def test_or_from_its_base(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, "base: paper\nname: paper-long\nepochs: 50\n")
        assert read_recipe(path, seed=3) == read_recipe("paper", name="paper-long", epochs=50, seed=3)

    def test_a_stage_of_pretraining_is_kept(self, tmp_path: Path) -> None:
        recipe = read_recipe("paper", pretrain=10)
        assert recipe.to_dict() == {**read_recipe("paper").to_dict(), "pretrain": 10}
        assert read_recipe(self.write(tmp_path, yaml.safe_dump(recipe.to_dict()))) == recipe
        assert (pretrain_recipe(recipe).epochs, pretrain_recipe(recipe).lr) == (10, 0.01)
        assert pretrain_recipe(recipe.changed(optimizer="adamw")).lr == 0.001
        assert pretrain_recipe(recipe.changed(pretrain_lr=0.3)).lr == 0.3

    def test_a_saved_recipe_is_a_file(self, tmp_path: Path) -> None:
        recipe = read_recipe("authors", clip=None, num_candidates=[3, 9])
        path = self.write(tmp_path, yaml.safe_dump(recipe.to_dict()))
        assert read_recipe(path) == recipe  # `freeze` is left out at 0, which is not that of the default
        assert read_recipe(path, seed=4) == recipe.changed(seed=4)
        unnamed = {name: value for name, value in recipe.to_dict().items() if name != "name"}
        assert read_recipe(self.write(tmp_path, yaml.safe_dump(unnamed))) == recipe.changed(name="mine")
        path = self.write(tmp_path, yaml.safe_dump({**recipe.to_dict(), "base": "default"}))
        assert read_recipe(path) == recipe.changed(freeze=0.75)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("rate: 0.1\n", r"rate: no such setting in the recipe .*mine\.yaml; choose from: base, name, backbone"),
            ("3: 4\n", "3: no such setting"),
            (
                "base: mine\n",
                "base='mine' is unknown; choose one of: default, paper, authors",
            ),
            ("lr: 0\n", "lr=0 must be"),
            ("lr: 0.1\nlr: 0.2\n", "lr is given twice"),
            ("- lr\n", "holds list but must hold settings"),
            ("", "holds NoneType but must hold settings"),
            ("epochs: 3\nlr: a: b\n", r"is not YAML in line 2 \(mapping values are not allowed here\)"),
            ("lr: !!python/object/apply:os.getcwd []\n", "is not YAML"),
            ("[" * 600, "is not YAML"),
        ],
    )
    def test_refused(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(InvalidArgument, match=message):
            read_recipe(self.write(tmp_path, text))

    def test_neither_a_name_nor_a_file(self, tmp_path: Path) -> None:
        for given in ("papers", tmp_path, tmp_path / "none.yaml"):
            with pytest.raises(
                InvalidArgument,
                match=r"give one of: default, paper, authors, .*; or a YAML file",
            ):
                read_recipe(given)

    def test_not_text(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        path.write_bytes(b"lr: \xff\xfe")
        with pytest.raises(InvalidArgument, match="cannot be read"):
            read_recipe(path)


@pytest.mark.parametrize("given", [None, {"lr": 0.1}, 5])
def test_invalid_recipes(given: Any) -> None:
    with pytest.raises(
        InvalidArgument,
        match=r"must be one of: default, paper, authors, .*; a YAML file",
    ):
        read_recipe(given)
