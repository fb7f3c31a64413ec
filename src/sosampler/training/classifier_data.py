"""Data of `train_classifier`: folders of images, manifests of images or videos, banks; and the batches they give.

An example is read by (epoch, number). Its random crop and frames depend on these and the seed alone, so a run that was
killed resumes with the same examples. Epoch None gives the fixed view of evaluation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from sosampler._util.limits import check_count
from sosampler._util.progress import progress_bar
from sosampler._util.validation import check_bool, check_float, check_int, check_range, one_of
from sosampler.bank.bank import Bank
from sosampler.bank.prepare import prepare
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.datasets.manifest import SPLITS, Item, Manifest, make_splits, read_manifest
from sosampler.errors import InvalidArgument
from sosampler.evaluation.result import multi_hot
from sosampler.video.folder_reader import upright_rgb
from sosampler.video.source import IMAGE_SUFFIXES, VIDEO_SUFFIXES

# ---- settings

OPTIMIZERS = ("sgd", "adamw")
TRAINABLE = ("all", "head")

# Learning rate for a batch of 64, and weight decay.
_RATES = {"sgd": (0.01, 1e-4), "adamw": (1e-4, 0.05)}


@dataclass(frozen=True)
class ClassifierRecipe:
    """Settings of `train_classifier`."""

    epochs: int = 30
    batch_size: int = 64
    optimizer: str | None = None  # None: AdamW for transformers, SGD with Nesterov momentum for convolutions
    lr: float | None = None  # None: 0.01 (SGD) or 1e-4 (AdamW) for a batch of 64, in proportion to the batch
    weight_decay: float | None = None  # None: 1e-4 (SGD) or 0.05 (AdamW); not for biases and norms
    warmup: float = 0.05  # share of all steps in which the rate rises from 0
    label_smoothing: float = 0.1  # for one label a video
    crop_scale: tuple[float, float] = (0.3, 1.0)  # area of the random crop, one for all frames of a clip
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)  # its width over its height
    flip: bool = True
    trainable: str = "all"  # or "head": everything else is frozen
    num_frames: int = 8  # of a clip from videos; images are clips of one frame
    dev_share: float = 0.1  # of train, where there is no dev split
    seed: int = 0
    # `to_dict` leaves these out at their defaults, so that runs of versions without them resume.
    freeze: float = 0.0  # first layers that do not learn, as a share of the network's parameters
    mixup: float = 0.0  # clips are mixed in pairs with weights from Beta(mixup, mixup); 0: not mixed
    ema: float = 0.0  # decay per step of the moving average of the weights, which is evaluated and kept; 0: none

    def __post_init__(self) -> None:
        check_int("epochs", self.epochs)
        check_int("batch_size", self.batch_size, at_least=2)  # batch normalisation needs two
        if self.optimizer is not None:
            one_of("optimizer", self.optimizer, OPTIMIZERS)
        if self.lr is not None:
            check_float("lr", self.lr, above=0.0)
        if self.weight_decay is not None:
            check_float("weight_decay", self.weight_decay, at_least=0.0)
        check_float("mixup", self.mixup, at_least=0.0)
        for name in ("warmup", "label_smoothing", "dev_share", "freeze", "ema"):
            if not 0 <= check_float(name, getattr(self, name)) < 1:
                raise InvalidArgument(f"{name}={getattr(self, name)!r} must be a share from 0 to below 1")
        for name in ("crop_scale", "crop_ratio"):
            object.__setattr__(self, name, check_range(name, getattr(self, name)))
        if self.crop_scale[1] > 1:
            raise InvalidArgument(f"crop_scale={self.crop_scale} must be at most 1, the whole area")
        check_bool("flip", self.flip)
        one_of("trainable", self.trainable, TRAINABLE)
        check_count("num_frames", self.num_frames, "MAX_CANDIDATES")
        check_int("seed", self.seed, at_least=0)

    def filled(self, *, transformer: bool) -> ClassifierRecipe:
        """Return the recipe with optimiser, rate and decay for a kind of network."""
        optimizer = self.optimizer or ("adamw" if transformer else "sgd")
        default_lr, default_decay = _RATES[optimizer]
        lr = default_lr * self.batch_size / 64 if self.lr is None else self.lr
        decay = default_decay if self.weight_decay is None else self.weight_decay
        return replace(self, optimizer=optimizer, lr=lr, weight_decay=decay)

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value or name not in ("freeze", "mixup", "ema")}


# ---- examples

# Frames stored for each video: enough for other ones in every epoch.
_STORED_FRAMES = 32
_STORED_SIZE = 256  # short side, or the classifier's own input where that is larger

Key = tuple[int | None, int]
Example = tuple[Tensor, Tensor, Tensor]  # frames uint8 [N, 3, h, w], targets float [C], positions float [N]


class ClipExamples(Dataset[Example]):
    """Labelled clips, resized to the classifier's input size."""

    def __init__(
        self, labels: Sequence[Sequence[int]], num_classes: int, preprocessing: Preprocessing, recipe: ClassifierRecipe
    ) -> None:
        self.labels, self.num_classes, self.preprocessing, self.recipe = labels, num_classes, preprocessing, recipe
        crop = v2.RandomResizedCrop(
            list(preprocessing.size), scale=recipe.crop_scale, ratio=recipe.crop_ratio, antialias=True
        )
        self._augment = v2.Compose([crop, v2.RandomHorizontalFlip(0.5 if recipe.flip else 0.0)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, key: Key) -> Example:
        epoch, number = key
        rng = None if epoch is None else np.random.default_rng([self.recipe.seed, epoch, number])
        frames, positions = self.clip(number, rng)  # [N, H, W, 3]
        pixels = torch.from_numpy(np.ascontiguousarray(frames.transpose(0, 3, 1, 2)))
        if rng is None:
            pixels = self.preprocessing.resized(pixels)
        else:
            with torch.random.fork_rng(devices=[]):  # torchvision draws from torch's own generator
                torch.default_generator.manual_seed(int(rng.integers(2**62)))
                pixels = self._augment(pixels)  # one box for all frames
        targets = torch.from_numpy(multi_hot([self.labels[number]], self.num_classes)[0])
        return pixels, targets.float(), torch.from_numpy(positions).float()

    def clip(self, number: int, rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        """Return frames uint8 [N, H, W, 3] and their times in the video, [N] in 0..1."""
        raise NotImplementedError


class ImageExamples(ClipExamples):
    """Images as clips of one frame."""

    def __init__(self, paths: Sequence[Path], *rest: Any) -> None:
        super().__init__(*rest)
        self.paths = paths

    def clip(self, number: int, rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        return read_image(self.paths[number], at_least=2 * max(self.preprocessing.size))[None], np.array([0.5])


class BankExamples(ClipExamples):
    """Clips of a frame bank: a random frame of each of N segments in training, the middle ones in evaluation."""

    def __init__(self, bank: Bank, rows: Sequence[int], *rest: Any) -> None:
        super().__init__(*rest)
        self.bank = bank
        self.rows = rows

    def clip(self, number: int, rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        video, wanted = self.bank[self.rows[number]], self.recipe.num_frames
        chosen = video.uniform(wanted) if rng is None else video.stratified(wanted, rng)
        return video.frames(chosen), video.positions[chosen]


def read_image(path: Path, *, at_least: int) -> np.ndarray:
    """Read uint8 [H, W, 3], upright; a large JPEG is decoded at the smallest scale with `at_least` pixels a side."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            image.draft("RGB", (at_least, at_least))
            return np.asarray(upright_rgb(image))
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InvalidArgument(f"{path}: cannot be read as an image ({error}); fix or remove it") from error


class ClassifierBatches:
    """Batches of every epoch, from any step on; the last, smaller batch of each is left out."""

    def __init__(self, examples: ClipExamples, *, workers: int, pin_memory: bool) -> None:
        self._count, self._seed = len(examples), examples.recipe.seed
        self._batch_size = min(examples.recipe.batch_size, self._count)
        self._keys: list[list[Key]] = []  # those of each batch of the current epoch
        self._loader = DataLoader(
            examples,
            batch_sampler=self._keys,
            num_workers=workers,
            pin_memory=pin_memory,
            persistent_workers=workers > 0,
        )

    def __len__(self) -> int:
        return self._count // self._batch_size

    def epoch(self, number: int, begin: int = 0) -> Iterator[Example]:
        order = np.random.default_rng([self._seed, number]).permutation(self._count)
        batches = order[: len(self) * self._batch_size].reshape(len(self), -1)[begin:].tolist()
        self._keys[:] = [[(number, example) for example in batch] for batch in batches]
        return iter(self._loader)


def evaluation_batches(examples: ClipExamples, *, workers: int) -> DataLoader[Example]:
    """Load all examples once, in order, in their fixed view."""
    numbers, size = range(len(examples)), examples.recipe.batch_size
    keys: list[list[Key]] = [[(None, number) for number in numbers[begin : begin + size]] for begin in numbers[::size]]
    return DataLoader(examples, batch_sampler=keys, num_workers=workers, persistent_workers=workers > 0)


# ---- sources


@dataclass(frozen=True)
class DataSource:
    """Data before anything is decoded: its classes and splits are known."""

    name: str
    kind: str  # "images", "videos" or "bank"
    manifest: Manifest  # with its splits
    path: Path  # file or folder that it was read from
    bank: Bank | None = None

    def digest(self) -> str:
        """Return 16 hexadecimal digits that change with every id, path, label, split and class."""
        manifest = self.manifest
        contents = [[asdict(item) for item in manifest.items], manifest.classes, manifest.multi_label]
        if manifest.exclusive == manifest.multi_label:  # the default of earlier versions is left out
            contents.append(manifest.exclusive)
        return hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16]

    def open(
        self, preprocessing: Preprocessing, recipe: ClassifierRecipe, *, frames_folder: Path, workers: int, check: bool
    ) -> tuple[dict[str, ClipExamples], int]:
        """Return the examples of each split, and the number of videos that cannot be decoded and are in no split.

        Videos are decoded once, into a bank in `frames_folder`, which is used again.
        `check`: read every image first, so that an unreadable one is reported before hours of training.
        """
        manifest, bank = self.manifest, self.bank
        items: Sequence[Item] = manifest.items
        unreadable = 0 if bank is None else len(bank.failures)
        if self.kind == "images" and check:
            paths = [manifest.path_of(item) for item in items]
            with ThreadPoolExecutor(max(1, workers)) as pool, progress_bar("reading images", len(paths)) as bar:
                for _ in pool.map(lambda path: read_image(path, at_least=1).shape, paths):
                    bar.advance()
        elif self.kind == "videos":
            with progress_bar("decoding", len(manifest)) as bar:
                bank = prepare(
                    manifest,
                    out=frames_folder,
                    num_candidates=max(_STORED_FRAMES, recipe.num_frames),
                    size=max(_STORED_SIZE, *preprocessing.size),
                    workers=max(1, workers),
                    on_progress=lambda progress: bar.reach(progress.done),
                )
            items, unreadable = bank.items, len(bank.failures)
            _check_sizes(self.name, items, f" ({unreadable} videos are unreadable, see {bank.path}/failed.jsonl)")
        examples: dict[str, ClipExamples] = {}
        bank_rows = {} if bank is None else {item.id: row for row, item in enumerate(bank.items)}
        for split in SPLITS:
            rows = [row for row, item in enumerate(items) if item.split == split]
            rest = ([items[row].labels for row in rows], len(manifest.classes), preprocessing, recipe)
            if bank is None:
                examples[split] = ImageExamples([manifest.path_of(items[row]) for row in rows], *rest)
            else:
                examples[split] = BankExamples(bank, [bank_rows[items[row].id] for row in rows], *rest)
        return examples, unreadable


def open_source(
    source: str | Path | Manifest | Bank, recipe: ClassifierRecipe, exclusive: bool | None = None
) -> DataSource:
    """Find classes, splits and kind (images, videos or a bank) of what a user gave; refuse what is too little."""
    if isinstance(source, (str, Path)) and (Path(source) / "bank.json").is_file():
        source = Bank(source)
    if isinstance(source, Bank):
        items = tuple(source.items)
        manifest = Manifest(items, source.classes, source.multi_label, source.path, exclusive=source.exclusive)
        name, kind, path = str(source.path), "bank", source.path
    else:
        if isinstance(source, Manifest):
            manifest, name, path = source, "the manifest", source.root
        else:
            name, path = str(source), Path(source)
            if not path.exists():
                raise InvalidArgument(
                    f"{path}: no such file or folder; give a folder with one folder a class, a CSV or JSONL manifest, "
                    "or a bank"
                )
            manifest = read_manifest(path, suffixes=(*VIDEO_SUFFIXES, *IMAGE_SUFFIXES))
        kinds = {Path(item.path).suffix.lower() in IMAGE_SUFFIXES for item in manifest.items}
        if len(kinds) > 1:
            raise InvalidArgument(f"{name}: holds images and videos; train on one of them at a time")
        kind = "images" if kinds == {True} else "videos"
    if exclusive is not None:
        manifest = replace(manifest, exclusive=exclusive)
    if manifest.exclusive:  # without a label there is nothing to learn, nor to compare with
        manifest = replace(manifest, items=tuple(item for item in manifest.items if item.labels))
    manifest = make_splits(manifest, dev_share=recipe.dev_share, seed=recipe.seed)
    _check_sizes(name, manifest.items, "")
    if len(manifest.classes) < 2 and manifest.exclusive:
        raise InvalidArgument(f"{name}: has one class, {manifest.classes[0]!r}; give at least 2")
    return DataSource(name, kind, manifest, path, source if isinstance(source, Bank) else None)


def _check_sizes(name: str, items: Sequence[Item], remark: str) -> None:
    """Refuse data that is too little to train on."""
    splits = {split: [item for item in items if item.split == split] for split in ("train", "dev")}
    for split, needed in (("train", 2), ("dev", 1)):
        if len(splits[split]) < needed:
            raise InvalidArgument(
                f"{name}: {len(splits[split])} examples in the {split} split{remark}; give at least {needed}"
                + (", or a dev_share above 0" if split == "dev" else "")
            )
    if not any(item.labels for item in splits["dev"]):
        raise InvalidArgument(f"{name}: no label in the dev split{remark}, so it cannot be measured; enlarge it")
