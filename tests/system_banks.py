"""Banks with features that are given, and a system that can be followed by hand, for tests of what measures systems."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sosampler._util.files import write_text
from sosampler.bank.bank import Bank
from sosampler.bank.format import FEATURES, features_schema, tables_batch
from sosampler.bank.writer import writing_shard
from sosampler.baselines.base import Baseline, BaselineOutput, Views, save_baseline
from sosampler.baselines.registry import create_baseline
from sosampler.errors import InvalidArgument
from tests.taught_banks import FINGERPRINT, LABELS, LENGTHS, distinct, random_logits, softmax, teach, write_bank
from tests.taught_banks import NUM_CANDIDATES as T

HEAVY, LIGHT = 4, 2  # widths: of heavy features the first says when to stop, the others are logits
HEAVY_GMACS, LIGHT_GMACS, STEP_GMACS = 4.0, 0.5, 0.25
OTHER = "cd" * 8  # fingerprint of the light network
CLASSES = ["run", "jump", "swim"]


class Peek(Baseline):
    """Looks from the first candidate on until a frame tells it to stop; the light network looks one ahead."""

    name, threshold, threshold_values = "peek", "most", (1, 2, 4)

    def __init__(
        self, heavy_width: int, light_width: int, num_classes: int, *, most: int = 3, multi_label: bool = False
    ) -> None:
        super().__init__(
            {
                "heavy_width": heavy_width,
                "light_width": light_width,
                "num_classes": num_classes,
                "most": most,
                "multi_label": multi_label,
            }
        )
        if not isinstance(most, int) or most < 1:
            raise InvalidArgument(f"most={most!r} must be an int")
        self.weight = nn.Parameter(torch.zeros(1))

    def decide(self, views: Views, generator: torch.Generator | None) -> BaselineOutput:
        heavy, light = torch.zeros_like(views.real), torch.zeros_like(views.real)
        probabilities = torch.zeros(len(heavy), self.config["num_classes"])
        for row, count in enumerate(views.real.sum(1).tolist()):
            stop = looks(views.heavy[row, :, 0].tolist(), count, self.config["most"])
            heavy[row, :stop] = True
            light[row, : min(count, stop + 1)] = True
            probabilities[row] = self.activate(views.heavy[row, :stop, 1:].mean(0))
        return BaselineOutput(probabilities, heavy, light, heavy.sum(1) + 1)

    def own_gmacs(self, seen: BaselineOutput) -> Tensor:
        assert seen.steps is not None
        return STEP_GMACS * seen.steps


def looks(stops: Sequence[float], count: int, most: int) -> int:
    """How many candidates are looked at."""
    for place in range(min(count, most)):
        if stops[place] > 0.5:
            return place + 1
    return min(count, most)


def keep(
    bank: Bank,
    name: str,
    tables: Sequence[np.ndarray],
    gmacs: float,
    fingerprint: str = FINGERPRINT,
    *,
    precision: str = "float16",
) -> None:
    """Features, as `add_features` would write them."""
    folder, width = bank.folder.features(name), tables[0].shape[1]
    about = {
        "kind": FEATURES.kind,
        "version": 1,
        "name": name,
        "network": "classifier",
        "network_name": f"net of {name}",
        "fingerprint": fingerprint,
        "width": width,
        "precision": precision,
        "gmacs": gmacs,
    }
    folder.path.mkdir(parents=True)
    write_text(folder.header, json.dumps(about))
    schema = features_schema(precision, width)
    for shard in range(bank.header.num_shards):
        with writing_shard(folder.shard(shard), schema) as write:
            for row, table in zip(bank.rows, tables, strict=True):
                if row.shard == shard:
                    write(tables_batch(schema, row.item.id, table.astype(precision)))


def tables_of(lengths: Sequence[int], labels: Sequence[tuple[int, ...]], seed: int = 0) -> list[np.ndarray]:
    """Heavy features [T, 4] in half precision."""
    rng = np.random.default_rng([seed, 7])
    logits = random_logits(lengths, labels, seed=seed + 1)
    found = [np.concatenate((rng.random((len(one), 1)) - 0.2, one), axis=1).astype(np.float16) for one in logits]
    found[-1][:, 0] = 0  # the shortest, which is looked at to its end
    return found


def about(**changes: Any) -> dict[str, Any]:
    """What `train` writes about a system."""
    return {
        "classifier": "given",
        "classes": CLASSES,
        "num_candidates": T,
        "heavy": {"name": "heavy", "fingerprint": FINGERPRINT, "width": HEAVY, "gmacs": HEAVY_GMACS},
        "light": {"name": "light", "fingerprint": OTHER, "width": LIGHT, "gmacs": LIGHT_GMACS},
        **changes,
    }


def peek(**options: Any) -> Peek:
    system = Peek(HEAVY, LIGHT, 3, **options)
    system.about = about()
    return system


def frame_exit(folder: Path, seed: int = 0, **changes: Any) -> str:
    """The folder of a system that looks at no light features."""
    torch.manual_seed(seed)
    system = create_baseline(
        "frameexit", heavy_width=HEAVY, num_classes=3, max_frames=6, neck_width=8, gate_widths=(4, 4), gate_exit=0.25
    )
    with torch.no_grad():
        for name, weight in system.named_parameters():
            if name.startswith("gates") and "decide" in name:
                weight.mul_(10)  # gates that differ between videos
    save_baseline(folder, system, about(light=None, **changes))
    return str(folder)


def given_bank(path: Path, labels: list[tuple[int, ...]] = LABELS, **options: Any) -> tuple[Bank, list[np.ndarray]]:
    bank = write_bank(path, LENGTHS, labels, **options)
    teach(bank, random_logits(LENGTHS, labels), multi_label=options.get("multi_label", False))
    tables = tables_of(LENGTHS, labels)
    keep(bank, "heavy", tables, HEAVY_GMACS)
    keep(bank, "light", [np.zeros((len(table), LIGHT)) for table in tables], LIGHT_GMACS, OTHER)
    return Bank(bank.path), tables


def seen_of(tables: Sequence[np.ndarray], count: int, most: int) -> list[list[int]]:
    """Stored frames that the heavy network is given, video by video."""
    seen = []
    for table in tables:
        offered = distinct(len(table), count)
        seen.append(offered[: looks(table[offered, 0].tolist(), len(offered), most)])
    return seen


def said(tables: Sequence[np.ndarray], seen: Sequence[list[int]], activate: Any = softmax) -> np.ndarray:
    means = [table[places, 1:].astype(np.float32).mean(0) for table, places in zip(tables, seen, strict=True)]
    return np.stack([activate(mean) for mean in means])


def one_hot(labels: Sequence[tuple[int, ...]]) -> np.ndarray:
    return np.array([[label in own for label in range(3)] for own in labels])
