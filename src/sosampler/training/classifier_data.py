"""What `train_classifier` takes as data: a folder of pictures, a manifest of pictures or videos, a bank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.data.bank import Bank
from sosampler.data.manifest import Manifest, read_manifest
from sosampler.data.splits import SPLITS, make_splits
from sosampler.errors import InvalidArgument
from sosampler.training.examples import BankExamples, ClipExamples, PictureExamples
from sosampler.training.recipe import ClassifierRecipe
from sosampler.video.source import IMAGE_SUFFIXES, VIDEO_SUFFIXES

# Frames stored for each video that is trained on: enough for fresh ones in every epoch.
_STORED_FRAMES = 32


@dataclass(frozen=True)
class ClassifierData:
    """Labelled examples by split."""

    classes: tuple[str, ...]
    multi_label: bool
    sizes: dict[str, int]
    kind: str  # "pictures" or "videos"
    examples: Callable[[str, Preprocessing, ClassifierRecipe], ClipExamples]


def open_data(
    source: str | Path | Manifest | Bank, *, recipe: ClassifierRecipe, frames_folder: Path, workers: int
) -> ClassifierData:
    """Open what a user gave. Videos are decoded once, into a bank in `frames_folder`, which is used again."""
    if isinstance(source, Bank):
        return _from_bank(source, recipe)
    if isinstance(source, (str, Path)) and (Path(source) / "bank.json").is_file():
        return _from_bank(Bank(source), recipe)
    manifest = source if isinstance(source, Manifest) else read_any(Path(source))
    manifest = make_splits(manifest, dev_share=recipe.dev_share, seed=recipe.seed)
    kinds = {Path(item.path).suffix.lower() in IMAGE_SUFFIXES for item in manifest.items}
    if len(kinds) > 1:
        raise InvalidArgument(f"{source}: holds pictures and videos; train on one of them at a time")
    if kinds == {True}:
        return _from_pictures(manifest)
    from sosampler.data.prepare import prepare

    bank = prepare(manifest, out=frames_folder, num_candidates=max(_STORED_FRAMES, recipe.num_frames), workers=workers)
    return _from_bank(bank, recipe)


def read_any(path: Path) -> Manifest:
    """A manifest file, or a folder with one folder a class, of pictures or of videos."""
    if not path.exists():
        raise InvalidArgument(
            f"{path}: no such file or folder; give a folder with one folder a class, a CSV or JSONL manifest, or a bank"
        )
    return read_manifest(path, suffixes=(*VIDEO_SUFFIXES, *IMAGE_SUFFIXES))


def _from_pictures(manifest: Manifest) -> ClassifierData:
    parts = {name: manifest.split(name) for name in SPLITS}

    def examples(split: str, preprocessing: Preprocessing, recipe: ClassifierRecipe) -> ClipExamples:
        part = parts[split]
        paths = [part.path_of(item) for item in part.items]
        facts: tuple[Any, ...] = ([item.labels for item in part.items], len(part.classes), preprocessing, recipe)
        return PictureExamples(paths, *facts)

    sizes = {name: len(part) for name, part in parts.items()}
    return ClassifierData(manifest.classes, manifest.multi_label, sizes, "pictures", examples)


def _from_bank(bank: Bank, recipe: ClassifierRecipe) -> ClassifierData:
    listed = Manifest(tuple(bank.items), bank.classes, bank.multi_label, bank.path)
    manifest = make_splits(listed, dev_share=recipe.dev_share, seed=recipe.seed)
    rows = {name: [row for row, item in enumerate(manifest.items) if item.split == name] for name in SPLITS}

    def examples(split: str, preprocessing: Preprocessing, recipe: ClassifierRecipe) -> ClipExamples:
        labels = [manifest.items[row].labels for row in rows[split]]
        return BankExamples(bank, rows[split], labels, len(bank.classes), preprocessing, recipe)

    sizes = {name: len(found) for name, found in rows.items()}
    return ClassifierData(bank.classes, bank.multi_label, sizes, "videos", examples)
