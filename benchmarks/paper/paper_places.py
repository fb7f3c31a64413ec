"""What paper_runs.py measures: which tables and figures with which bank and classifier, and what has to be trained.

Left out on purpose, because they would say nothing: Table I asks for 30 and more candidates of short videos, and no
clip at hand has so many frames; Figure 1 on reels, whose neighbouring shots are different pictures by construction;
Table 5 and Figure 4 where a bank stores too few frames for their columns; Table II and Figure I on real clips, since
speed is that of the networks, whatever the pictures, and systems.py compares all systems there. Networks that look at
whole clips have Tables 1 and 2, for which they classify every set of frames, and some of them Table 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sosampler.paper.experiments import EXPERIMENTS
from sosampler.paper.plan import Training

ALL_SEEDS, ONE_SEED = (0, 1, 2), (0,)


@dataclass(frozen=True)
class Wanted:
    """A table or figure; with several seeds those count that are finished when time is up, the first before others."""

    experiment: str
    seeds: tuple[int, ...] = ()  # none: nothing is trained for it
    rank: int = 0  # what has a lower one is done first
    alone: bool = False  # speed is measured while nothing else runs


@dataclass(frozen=True)
class Spec:
    """One bank with one classifier; folders are below WORK."""

    name: str  # of the JSON file
    data: str  # of the page's sections: what the bank is made of
    bank_name: str
    bank: str
    stored: int  # frames of its longest videos
    classifier_name: str
    classifier: str
    wanted: tuple[Wanted, ...]
    pooling: str | None = "mean"  # of the classifier
    epochs: int | None = None  # None: those of the recipes
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def changes(self) -> dict[str, Any]:
        """As `reproduce` keeps them."""
        return dict(self.settings) | ({} if self.epochs is None else {"epochs": self.epochs})

    def folder(self, work: Path) -> Path:
        """Where `reproduce` writes."""
        return work / "out" / self.bank_name / self.classifier_name

    @property
    def has_systems(self) -> bool:
        """Whether anything trained here looks at features of frames."""
        return any(training.is_baseline for wanted in self.wanted for training in self.trainings(wanted.experiment))

    def trainings(self, experiment: str) -> list[Training]:
        """What an experiment needs here, each once; rows that `reproduce` will leave out are not among them."""
        found: dict[str, Training] = {}
        for row in EXPERIMENTS[experiment].rows:
            for pair in row.pairs:
                training = Training.of_row(row, pair, None, None, self.changes)
                if training is not None and pair[1] <= self.stored and self._can_train(training):
                    found.setdefault(training.name, training)
        return list(found.values())

    def _can_train(self, training: Training) -> bool:
        return training.num_candidates <= self.stored and (not training.is_baseline or self.pooling is not None)


def _free(*experiments: str, rank: int = 0) -> tuple[Wanted, ...]:
    return tuple(Wanted(name, (), rank) for name in experiments)


def _trained(*experiments: str, seeds: tuple[int, ...] = ONE_SEED, rank: int) -> tuple[Wanted, ...]:
    return tuple(Wanted(name, seeds, rank) for name in experiments)


REELS = Spec(
    "reels10",
    "reels",
    "reels10",
    "bank10",
    10,
    "resnet50",
    "classifier",
    (
        *_free("table1", "table2"),
        *_trained("table6", seeds=ALL_SEEDS, rank=1),
        *_trained("figureII", "figureIII", rank=2),
    ),
)
# What accuracy costs, on the same reels; apart, so that it can be measured again by itself.
COST = Spec(
    "reels10_cost",
    "reels",
    "reels10_cost",
    "bank10",
    10,
    "resnet50",
    "classifier",
    (Wanted("tableII", ONE_SEED, rank=2, alone=True), *_trained("figureI", rank=4)),
)
# Batches of 64 videos of 100 frames do not fit into a GPU that several trainings share.
LONG_REELS = Spec(
    "reels100",
    "reels",
    "reels100",
    "bank100",
    100,
    "resnet50",
    "classifier",
    (*_trained("table5", rank=1), *_trained("figure4", rank=3), *_trained("table7", rank=4)),
    settings={"batch_size": 8},
)


def _clips(name: str, *, pooling: str | None = None, table6: bool = True) -> Spec:
    """A classifier of another kind on reels."""
    wanted = (*_free("table1", "table2"), *(_trained("table6", rank=5) if table6 else ()))
    return Spec(f"clips10_{name}", "reels", "clips10", f"clips10-{name}", 10, name, name, wanted, pooling)


CLIP_NETWORKS = (
    _clips("resnet50-frameexit", pooling="max"),
    _clips("slowonly50"),
    _clips("i3d"),
    _clips("timesformer", table6=False),
    _clips("x3d_s", table6=False),
)


def _real(name: str, batch_size: int) -> Spec:
    """Real clips, few of them: small batches and more epochs, as in systems.py's measurements of them."""
    wanted = (
        *_free("table1", "table2", "figure1"),
        *_trained("table6", seeds=ALL_SEEDS, rank=2),
        *_trained("table7", seeds=ALL_SEEDS, rank=3),
        *_trained("figureII", "figureIII", rank=3),
    )
    return Spec(
        name,
        name,
        name,
        f"{name}/bank",
        16,
        "resnet50",
        f"{name}/classifier",
        wanted,
        epochs=40,
        settings={"batch_size": batch_size},
    )


REAL_CLIPS = (_real("yoga", 8), _real("airtlab", 16), _real("golfdb", 16))
SPECS = {spec.name: spec for spec in (REELS, COST, LONG_REELS, *REAL_CLIPS, *CLIP_NETWORKS)}
