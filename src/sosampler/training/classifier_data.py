"""What `train_classifier` takes as data: a folder of pictures, a manifest of pictures or videos, a bank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from sosampler._util.progress import progress_bar
from sosampler.bank.bank import Bank
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.datasets.manifest import Item, Manifest, read_manifest
from sosampler.datasets.splits import SPLITS, make_splits
from sosampler.errors import InvalidArgument
from sosampler.training.examples import BankExamples, ClipExamples, PictureExamples, read_picture
from sosampler.training.recipe import ClassifierRecipe
from sosampler.video.source import IMAGE_SUFFIXES, VIDEO_SUFFIXES

# Frames stored for each video that is trained on: enough for fresh ones in every epoch.
_STORED_FRAMES = 32
_STORED_SIZE = 256  # short side, or the classifier's own input where that is larger

MakeExamples = Callable[[str, Preprocessing, ClassifierRecipe], ClipExamples]


@dataclass(frozen=True)
class ClassifierData:
    """Labelled examples by split."""

    sizes: dict[str, int]
    unreadable: int  # videos that could not be decoded; they are in no split
    examples: MakeExamples


@dataclass(frozen=True)
class DataSource:
    """Data as it was named: its classes and splits are known, nothing is decoded yet."""

    name: str
    kind: str  # "pictures", "videos" or "bank"
    manifest: Manifest  # with its splits
    path: Path  # where it was read from
    bank: Bank | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        return self.manifest.classes

    @property
    def multi_label(self) -> bool:
        return self.manifest.multi_label

    @property
    def num_train(self) -> int:
        return sum(item.split == "train" for item in self.manifest.items)

    def digest(self) -> str:
        """16 hexadecimal digits that change with every id, path, label, split and class."""
        told = [[asdict(item) for item in self.manifest.items], self.classes, self.multi_label]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]

    def check(self) -> None:
        """Enough to train on, as far as can be told before anything is decoded."""
        _check_sizes(self.name, self.manifest.items, "")
        if len(self.classes) < 2 and not self.multi_label:
            raise InvalidArgument(f"{self.name}: has one class, {self.classes[0]!r}; give at least 2 to tell apart")

    def opened(
        self,
        preprocessing: Preprocessing,
        recipe: ClassifierRecipe,
        *,
        frames_folder: Path,
        workers: int,
        check: bool,
    ) -> ClassifierData:
        """Ready to be read. Videos are decoded once, into a bank in `frames_folder`, which is used again.

        `check`: whether to look at every picture first, so that an unreadable one is told before hours of training.
        """
        if self.kind == "pictures":
            if check:
                _check_pictures([self.manifest.path_of(item) for item in self.manifest.items], workers)
            return _from_pictures(self.manifest)
        if self.bank is not None:
            return _from_bank(self.bank, self.manifest.items)
        from sosampler.bank.prepare import prepare

        stored = max(_STORED_FRAMES, recipe.num_frames)
        with progress_bar("decoding", len(self.manifest)) as bar:
            bank = prepare(
                self.manifest,
                out=frames_folder,
                num_candidates=stored,
                size=max(_STORED_SIZE, *preprocessing.size),
                workers=max(1, workers),
                on_progress=lambda progress: bar.reach(progress.done),
            )
        data = _from_bank(bank, bank.items)
        _check_sizes(self.name, bank.items, f" ({data.unreadable} videos are unreadable, see {bank.path}/failed.jsonl)")
        return data


def open_source(source: str | Path | Manifest | Bank, recipe: ClassifierRecipe) -> DataSource:
    """See what a user gave: classes, splits and whether it is pictures, videos or a bank."""
    if isinstance(source, (str, Path)) and (Path(source) / "bank.json").is_file():
        source = Bank(source)
    if isinstance(source, Bank):
        listed = Manifest(tuple(source.items), source.classes, source.multi_label, source.path)
        return DataSource(str(source.path), "bank", _with_dev(listed, recipe), source.path, source)
    manifest = source if isinstance(source, Manifest) else read_any(Path(source))
    name = "the manifest" if isinstance(source, Manifest) else str(source)
    kinds = {Path(item.path).suffix.lower() in IMAGE_SUFFIXES for item in manifest.items}
    if len(kinds) > 1:
        raise InvalidArgument(f"{name}: holds pictures and videos; train on one of them at a time")
    path = manifest.root if isinstance(source, Manifest) else Path(source)
    return DataSource(name, "pictures" if kinds == {True} else "videos", _with_dev(manifest, recipe), path)


def read_any(path: Path) -> Manifest:
    """A manifest file, or a folder with one folder a class, of pictures or of videos."""
    if not path.exists():
        raise InvalidArgument(
            f"{path}: no such file or folder; give a folder with one folder a class, a CSV or JSONL manifest, or a bank"
        )
    return read_manifest(path, suffixes=(*VIDEO_SUFFIXES, *IMAGE_SUFFIXES))


def _with_dev(manifest: Manifest, recipe: ClassifierRecipe) -> Manifest:
    return make_splits(manifest, dev_share=recipe.dev_share, seed=recipe.seed)


def _check_sizes(name: str, items: Sequence[Item], remark: str) -> None:
    splits = {split: [item for item in items if item.split == split] for split in ("train", "dev")}
    for split, least in (("train", 2), ("dev", 1)):
        if len(splits[split]) < least:
            raise InvalidArgument(
                f"{name}: {len(splits[split])} examples in the {split} split{remark}; give at least {least}"
                + (", or a dev_share above 0" if split == "dev" else "")
            )
    if not any(item.labels for item in splits["dev"]):
        raise InvalidArgument(f"{name}: no label in the dev split{remark}, nothing can be measured there; enlarge it")


def _check_pictures(paths: Sequence[Path], workers: int) -> None:
    with ThreadPoolExecutor(max(1, workers)) as pool, progress_bar("looking at pictures", len(paths)) as bar:
        for _ in pool.map(lambda path: read_picture(path, at_least=1).shape, paths):
            bar.advance()


def _from_pictures(manifest: Manifest) -> ClassifierData:
    parts = {name: manifest.split(name) for name in SPLITS}

    def examples(split: str, preprocessing: Preprocessing, recipe: ClassifierRecipe) -> ClipExamples:
        part = parts[split]
        paths = [part.path_of(item) for item in part.items]
        labels = [item.labels for item in part.items]
        return PictureExamples(paths, labels, len(part.classes), preprocessing, recipe)

    return ClassifierData({name: len(part) for name, part in parts.items()}, 0, examples)


def _from_bank(bank: Bank, items: Sequence[Item]) -> ClassifierData:
    rows = {name: [row for row, item in enumerate(items) if item.split == name] for name in SPLITS}

    def examples(split: str, preprocessing: Preprocessing, recipe: ClassifierRecipe) -> ClipExamples:
        labels = [items[row].labels for row in rows[split]]
        return BankExamples(bank, rows[split], labels, len(bank.classes), preprocessing, recipe)

    return ClassifierData({name: len(found) for name, found in rows.items()}, len(bank.failures), examples)
