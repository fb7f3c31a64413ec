"""What a classifier is shown in training: clips of pictures or of stored video frames, cut at random, by seed.

An example is asked for by (epoch, number); its random crop and frames depend on these and the seed alone, so a run
that was killed goes on with the very examples it would have seen. Epoch None gives the fixed view of evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision.transforms import v2

from sosampler.bank.bank import Bank
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.errors import InvalidArgument
from sosampler.training.recipe import ClassifierRecipe
from sosampler.video.folder_reader import upright_rgb

Key = tuple[int | None, int]
Example = tuple[Tensor, Tensor, Tensor]  # frames uint8 [N, 3, h, w], targets float [C], positions float [N]


class ClipExamples(Dataset[Example]):
    """Labelled clips, brought to the classifier's input size."""

    def __init__(
        self, labels: Sequence[Sequence[int]], num_classes: int, preprocessing: Preprocessing, recipe: ClassifierRecipe
    ) -> None:
        self.labels = labels
        self.num_classes = num_classes
        self.preprocessing = preprocessing
        self.recipe = recipe
        self._augment = v2.Compose(
            [
                v2.RandomResizedCrop(
                    list(preprocessing.size), scale=recipe.crop_scale, ratio=recipe.crop_ratio, antialias=True
                ),
                v2.RandomHorizontalFlip(0.5 if recipe.flip else 0.0),
            ]
        )

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
        return pixels, multi_hot(self.labels[number], self.num_classes), torch.from_numpy(positions).float()

    def clip(self, number: int, rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        """Frames uint8 [N, H, W, 3] and where they lie in the video, [N] in 0..1."""
        raise NotImplementedError


class PictureExamples(ClipExamples):
    """Pictures as clips of one frame."""

    def __init__(self, paths: Sequence[Path], *rest: Any) -> None:
        super().__init__(*rest)
        self.paths = paths

    def clip(self, number: int, rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        return read_picture(self.paths[number], at_least=2 * max(self.preprocessing.size))[None], np.array([0.5])


class BankExamples(ClipExamples):
    """Clips of a frame bank: one random frame of each of N stretches in training, the middle ones in evaluation."""

    def __init__(self, bank: Bank, rows: Sequence[int], *rest: Any) -> None:
        super().__init__(*rest)
        self.bank = bank
        self.rows = rows

    def clip(self, number: int, rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        video, wanted = self.bank[self.rows[number]], self.recipe.num_frames
        places = video.uniform(wanted) if rng is None else video.stratified(wanted, rng)
        return video.frames(places), video.positions[places]


def multi_hot(labels: Sequence[int], num_classes: int) -> Tensor:
    target = torch.zeros(num_classes)
    target[list(labels)] = 1
    return target


def read_picture(path: Path, *, at_least: int) -> np.ndarray:
    """uint8 [H, W, 3], upright; a large JPEG is decoded at the smallest scale that keeps `at_least` pixels a side."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            picture.draft("RGB", (at_least, at_least))
            return np.asarray(upright_rgb(picture))
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InvalidArgument(f"{path}: cannot be read as a picture ({error}); mend or remove it") from error


class _Batches(Sampler[list[Key]]):
    """Keys of each batch of an epoch, from step `begin` on; the last, smaller batch is left out."""

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        self.count, self.batch_size, self.seed = count, min(batch_size, count), seed
        self.epoch, self.begin = 0, 0

    def __len__(self) -> int:
        return self.count // self.batch_size

    def __iter__(self) -> Iterator[list[Key]]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.count).tolist()
        for step in range(self.begin, len(self)):
            numbers = order[step * self.batch_size : (step + 1) * self.batch_size]
            yield [(self.epoch, number) for number in numbers]


class TrainingBatches:
    """Batches of an epoch, from any step on; the same whatever was killed before."""

    def __init__(self, examples: ClipExamples, *, workers: int, pin_memory: bool) -> None:
        self._sampler = _Batches(len(examples), examples.recipe.batch_size, examples.recipe.seed)
        self._loader = DataLoader(
            examples,
            batch_sampler=self._sampler,
            num_workers=workers,
            pin_memory=pin_memory,
            persistent_workers=workers > 0,
        )

    def __len__(self) -> int:
        return len(self._sampler)

    def epoch(self, number: int, begin: int = 0) -> Iterator[Example]:
        self._sampler.epoch, self._sampler.begin = number, begin
        return iter(self._loader)


def evaluation_batches(examples: ClipExamples, *, batch_size: int, workers: int) -> DataLoader[Example]:
    """All examples once, in order, in their fixed view."""
    keys: list[list[Key]] = [
        [(None, number) for number in range(begin, min(begin + batch_size, len(examples)))]
        for begin in range(0, len(examples), batch_size)
    ]
    return DataLoader(examples, batch_sampler=keys, num_workers=workers, persistent_workers=workers > 0)


def labelled_rows(bank: Bank, *, least: int = 2) -> dict[str, list[int]]:
    """Places in the bank of the videos of "train" and "dev" with a label, and of those of both that are "unlabelled".

    Args:
        bank: a bank, or one split of it.
        least: videos that train must have.
    """
    found: dict[str, list[int]] = {"train": [], "dev": [], "unlabelled": []}
    for row, item in enumerate(bank.items):
        split = item.split or "train"
        if split in ("train", "dev"):
            found[split if item.labels else "unlabelled"].append(row)
    if len(found["train"]) < least:
        raise InvalidArgument(
            f"{bank.path}: {len(found['train'])} videos with a label in the train split; give at least {least}"
        )
    return found
