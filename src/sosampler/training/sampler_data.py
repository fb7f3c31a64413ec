"""Batches that a sampler is trained on: small frames, random crops, labels and teacher outputs.

Frames are decoded once into memory where they fit, else for every batch, with the same pixels. Large images are partly
shrunk by the JPEG decoder (`fast` of `BankItem.frames`), which halves the time of decoding and changes pixels a little;
training crops them at random anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from sosampler._util.arrays import Indices
from sosampler._util.hardware import free_shared_memory
from sosampler._util.progress import progress_bar
from sosampler.bank.bank import Bank
from sosampler.bank.outputs import Teacher
from sosampler.bank.pixels import BankFrames, Shape
from sosampler.classifiers.preprocessing import Preprocessing
from sosampler.errors import InvalidArgument
from sosampler.evaluation.result import multi_hot
from sosampler.samplers.recipe import SamplerRecipe
from sosampler.training.distributed import send

_SHARE_OF_DEVICE = 0.25
_MAX_LENGTHS = 3  # different T in a training
_TRIES = 10  # as torchvision: then the largest central box of an allowed shape is taken


# ---- labels


def bank_labels(bank: Bank, rows: Sequence[int]) -> Tensor:
    """Return the labels of some videos, multi-hot float32 [V, C]."""
    return torch.from_numpy(multi_hot([bank.rows[row].item.labels for row in rows], len(bank.classes))).float()


def labelled_rows(bank: Bank, *, min_train: int = 2) -> dict[str, list[int]]:
    """Return rows of "train" and "dev" videos with a label, and of the "unlabelled" ones of both."""
    rows: dict[str, list[int]] = {"train": [], "dev": [], "unlabelled": []}
    for row, item in enumerate(bank.items):
        split = item.split or "train"
        if split in ("train", "dev"):
            rows[split if item.labels else "unlabelled"].append(row)
    if len(rows["train"]) < min_train:
        raise InvalidArgument(
            f"{bank.path}: {len(rows['train'])} videos with a label in the train split; give at least {min_train}"
        )
    return rows


# ---- frames


class CachedFrames:
    """All frames decoded, in memory or on the device: those of one size in one flat array."""

    def __init__(self, source: BankFrames, *, workers: int, show: bool = True) -> None:
        self.sizes = source.sizes
        sizes, self._array_of = np.unique(source.sizes, axis=0, return_inverse=True)  # [K, 2], [V]
        self._first = np.zeros(len(self._array_of), dtype=np.int64)  # row of each video's first frame in its array
        arrays = []
        for number, (height, width) in enumerate(sizes.tolist()):
            members = self._array_of == number
            ends = np.cumsum(source.counts[members])
            self._first[members] = ends - source.counts[members]
            arrays.append(np.empty((ends[-1], height, width, 3), dtype=np.uint8))

        def decode(video: int) -> int:
            begin = self._first[video]
            arrays[self._array_of[video]][begin : begin + source.counts[video]] = source.read(video)
            return int(source.counts[video])

        total = int(source.counts.sum())
        with ThreadPoolExecutor(max(1, workers)) as pool, progress_bar("decoding", total if show else 0) as bar:
            for count in pool.map(decode, range(len(self._array_of))):
                bar.advance(count)
        self._arrays = [torch.from_numpy(array) for array in arrays]
        self.nbytes, self.device = source.nbytes, torch.device("cpu")

    def to(self, device: torch.device) -> CachedFrames:
        self._arrays, self.device = [array.to(device) for array in self._arrays], device
        return self

    def frames(self, videos: Indices, positions: Indices) -> Tensor:
        numbers = self._array_of[videos]
        frame_rows = torch.from_numpy(self._first[videos][:, None] + positions)  # [B, T] in the videos' arrays
        if len(used := np.unique(numbers)) == 1:
            frames = self._arrays[used[0]].index_select(0, send(frame_rows.flatten(), self.device))
            return frames.unflatten(0, frame_rows.shape)
        height, width = self.sizes[videos].max(0).tolist()
        canvas = torch.zeros((*frame_rows.shape, height, width, 3), dtype=torch.uint8, device=self.device)
        for number in used.tolist():
            rows = torch.from_numpy(np.flatnonzero(numbers == number))
            array = self._arrays[number]
            frames = array[send(frame_rows[rows], self.device)]
            canvas[send(rows, self.device), :, : array.shape[1], : array.shape[2]] = frames
        return canvas


FrameSource = BankFrames | CachedFrames


def open_frames(
    bank: Bank,
    rows: Sequence[int],
    shape: Shape,
    *,
    cache_bytes: int,
    device: torch.device,
    workers: int,
    threads: int = 1,  # that decode each batch again where the frames do not fit into memory
    show: bool = True,
) -> FrameSource:
    """Open frames of some videos, in memory if they take at most `cache_bytes`, on the device if that has room."""
    source = BankFrames(bank, rows, shape, threads=threads)
    if source.nbytes > cache_bytes:
        return source
    cached = CachedFrames(source, workers=workers, show=show)
    if device.type == "cuda" and cached.nbytes <= _SHARE_OF_DEVICE * torch.cuda.mem_get_info(device)[0]:
        return cached.to(device)
    return cached


# ---- crops: drawn with NumPy by seed and image size alone, so that all devices and processes crop the same boxes


class Crops(NamedTuple):
    """Boxes of F images in pixels, and which are flipped."""

    boxes: np.ndarray  # [F, 4] float32: left, top, width, height
    flips: np.ndarray  # [F] bool

    def part(self, rows: slice) -> Crops:
        return Crops(self.boxes[rows], self.flips[rows])


def draw_crops(
    rng: np.random.Generator,
    sizes: np.ndarray,  # [F, 2] height and width of each image
    *,
    scale: tuple[float, float],  # min and max share of the area
    ratio: tuple[float, float],  # min and max width over height, uniform in its logarithm
    flip: bool,  # every second image, on average
) -> Crops:
    """Draw boxes as torchvision's RandomResizedCrop, but not rounded to whole pixels."""
    draws = rng.random((len(sizes), _TRIES, 2))
    corners = rng.random((len(sizes), 2))
    flips = rng.random(len(sizes)) < (0.5 if flip else 0.0)
    height, width = (sizes[:, side, None].astype(np.float64) for side in (0, 1))  # [F, 1]
    area = (scale[0] + (scale[1] - scale[0]) * draws[..., 0]) * height * width  # [F, tries]
    low, high = np.log(ratio)
    shape = np.exp(low + (high - low) * draws[..., 1])
    widths, heights = np.sqrt(area * shape), np.sqrt(area / shape)
    fits = (widths <= width) & (heights <= height)
    first = np.arange(len(sizes)), fits.argmax(1)
    none = ~fits.any(1)
    # Too wide or too high in every try: all of one side, and as much of the other as the shape allows.
    full_width, full_height = width[:, 0], height[:, 0]
    box_width = np.where(none, np.minimum(full_width, full_height * ratio[1]), widths[first])
    box_height = np.where(none, np.minimum(full_height, full_width / ratio[0]), heights[first])
    corners[none] = 0.5
    left = corners[:, 0] * (full_width - box_width)
    top = corners[:, 1] * (full_height - box_height)
    return Crops(np.stack([left, top, box_width, box_height], 1).astype(np.float32), flips)


def points_per_pixel(sizes: np.ndarray, size: tuple[int, int]) -> int:
    """Return how many points `crop` samples per pixel and side, by the largest of the images [F, 2]."""
    shrink = min(sizes[:, side].max() / size[side] for side in (0, 1))
    return max(1, int(np.ceil(shrink - 0.5)))


def crop(frames: Tensor, crops: Crops, sizes: np.ndarray, size: tuple[int, int], points: int | None = None) -> Tensor:
    """Crop uint8 [F, H, W, 3] -> float32 [F, 3, h, w] in 0..255, bilinear.

    Images [F, 2] (height and width), at the top left of their frames, that are much larger than `size` are sampled at
    several `points` a pixel and side and averaged, so that fine patterns do not alias.
    """
    points = points_per_pixel(sizes, size) if points is None else points
    axes = []
    for side, length in ((0, frames.shape[2]), (1, frames.shape[1])):  # across, down
        count = points * size[1 - side]
        steps = np.broadcast_to((np.arange(count, dtype=np.float32) + 0.5) / count, (len(sizes), count))
        if side == 0:
            steps = np.where(crops.flips[:, None], steps[:, ::-1], steps)
        # Pixel k covers k .. k + 1, and its value is that of its centre. No point is outside of its image.
        pixels = crops.boxes[:, side, None] + steps * crops.boxes[:, side + 2, None] - 0.5
        pixels = np.clip(pixels, 0, sizes[:, 1 - side, None] - 1).astype(np.float32)
        axes.append(send(torch.from_numpy(2 * pixels / max(1, length - 1) - 1), frames.device))  # in -1..1
    grid = torch.stack(torch.broadcast_tensors(axes[0][:, None, :], axes[1][:, :, None]), -1)
    values = frames.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.preserve_format)
    cropped = F.grid_sample(values, grid, mode="bilinear", padding_mode="border", align_corners=True)
    return F.avg_pool2d(cropped, points) if points > 1 else cropped


class NormalisedCrops:
    """Crops for a network, normalised with constants on the device, so that no step waits for their copies.

    `sizes`: [V, 2] of all images, so that a crop is the same whichever others are in the batch.
    """

    def __init__(self, preprocessing: Preprocessing, sizes: np.ndarray, device: torch.device) -> None:
        std = torch.tensor(preprocessing.std)
        self._scale = (1 / (255 * std)).view(3, 1, 1).to(device)
        self._offset = (-torch.tensor(preprocessing.mean) / std).view(3, 1, 1).to(device)
        self._size, self._points = preprocessing.size, points_per_pixel(sizes, preprocessing.size)

    def __call__(self, frames: Tensor, crops: Crops, sizes: np.ndarray) -> Tensor:
        """Return float32 [F, 3, h, w] of images, see `crop`."""
        return torch.addcmul(self._offset, crop(frames, crops, sizes, self._size, self._points), self._scale)


# ---- batches


class VideoTable:
    """Labels, times and teacher outputs of some videos, in memory."""

    def __init__(self, bank: Bank, rows: Sequence[int], teacher: Teacher) -> None:
        self.rows = np.array(rows, dtype=np.int64)  # [V] in the bank
        self.labels = bank_labels(bank, rows)  # [V, C]
        probs = [teacher[row].frame_probs for row in rows]
        self.counts = np.array([len(video) for video in probs], dtype=np.int64)  # stored frames of each
        self._first = np.cumsum(self.counts) - self.counts  # [V] in the flat arrays
        self.probs = torch.from_numpy(np.concatenate(probs))  # of the teacher, [F, C] float16
        self.times = torch.from_numpy(np.concatenate([bank[row].positions for row in rows]))  # [F] float32 in 0..1

    def frame_rows(self, videos: Indices, positions: Indices) -> Tensor:
        """Return where frames of videos [B] at positions [B, T] are in `probs` and `times`, int64 [B, T]."""
        return torch.from_numpy(self._first[videos][:, None] + positions)


class Draw(NamedTuple):
    """What was drawn for a batch of B videos with T frames each."""

    videos: Indices  # [B]
    positions: Indices  # [B, T]
    crops: Crops  # of B * T frames

    def part(self, rows: slice) -> Draw:
        """Return the share of some of the videos."""
        count = self.positions.shape[1]
        frames = slice(rows.start * count, rows.stop * count)
        return Draw(self.videos[rows], self.positions[rows], self.crops.part(frames))


class Plan:
    """The draws of every epoch by (seed, epoch, step); the last, smaller batch of each epoch is left out."""

    def __init__(self, counts: np.ndarray, sizes: np.ndarray, recipe: SamplerRecipe) -> None:
        self.counts, self.sizes, self.recipe = counts, sizes, recipe  # [V], [V, 2]
        self.batch_size = min(recipe.batch_size, len(counts))
        self.steps = len(counts) // self.batch_size  # of an epoch
        wanted = recipe.num_candidates
        lowest, highest = (wanted, wanted) if isinstance(wanted, int) else wanted
        stored = max(2, int(counts.max()))  # more than any video has would only repeat frames
        # A few numbers between the two: libraries for GPUs prepare for every shape, which takes seconds.
        spread = np.geomspace(min(lowest, stored), min(highest, stored), _MAX_LENGTHS)
        self.num_candidates = tuple(np.unique(np.rint(spread).astype(int)).tolist())

    def draw(self, epoch: int, step: int) -> Draw:
        recipe = self.recipe
        # Trailing zeros of a seed are ignored, so the steps begin at 1.
        order = np.random.default_rng([recipe.seed, epoch, 0]).permutation(len(self.counts))
        videos = order[step * self.batch_size : (step + 1) * self.batch_size]
        rng = np.random.default_rng([recipe.seed, epoch, 1 + step])
        count = self.num_candidates[int(rng.integers(len(self.num_candidates)))]
        positions = stratified(self.counts[videos], count, rng)
        per_frame = recipe.crop_per == "frame"
        crops = draw_crops(
            rng,
            np.repeat(self.sizes[videos], count if per_frame else 1, axis=0),
            scale=recipe.crop_scale,
            ratio=recipe.crop_ratio,
            flip=recipe.flip,
        )
        if not per_frame:
            crops = Crops(*(np.repeat(part, count, axis=0) for part in crops))
        return Draw(videos, positions, crops)


def stratified(counts: np.ndarray, wanted: int, rng: np.random.Generator) -> Indices:
    """Draw a stored frame of each of `wanted` equal segments of each video, [B, wanted] in time order.

    A video with fewer frames repeats them evenly, as `BankItem.stratified` does.
    """
    stored = counts[:, None].astype(np.int64)
    edges = np.arange(wanted + 1, dtype=np.int64) * stored // wanted
    drawn = edges[:, :-1] + (rng.random((len(counts), wanted)) * np.diff(edges, axis=1)).astype(np.int64)
    centres = (2 * np.arange(wanted, dtype=np.int64) + 1) * stored // (2 * wanted)
    positions: Indices = np.where(stored < wanted, centres, drawn)
    return positions


class Batch(NamedTuple):
    """One process's share of a step."""

    frames: Tensor  # uint8 [B * T, h, w, 3], in memory or on the device
    sizes: np.ndarray  # [B * T, 2] height and width of the image in each
    draw: Draw
    labels: Tensor  # float32 [B, C]
    probs: Tensor  # float16 [B, T, C]
    times: Tensor  # float32 [B, T]


class _StepFrames(Dataset[Tensor]):
    """Frames of this process's share of each (epoch, step), for worker processes."""

    def __init__(self, plan: Plan, source: FrameSource, part: slice) -> None:
        self.plan, self.source, self.part = plan, source, part

    def __getitem__(self, key: tuple[int, int]) -> Tensor:
        draw = self.plan.draw(*key).part(self.part)
        return self.source.frames(draw.videos, draw.positions)


def prefetch(workers: int, nbytes: int, room: int | None) -> tuple[int, int | None]:
    """Return how many worker processes fit and how many batches each may prefetch, in `room` bytes for them all.

    Batches wait in shared memory; a container may have little of it and kills a process that takes more.

    >>> prefetch(8, 10, None), prefetch(8, 10, 1000), prefetch(8, 10, 200), prefetch(8, 10, 15)
    ((8, 2), (8, 2), (8, 1), (0, None))
    """
    # Besides those that are ready, each worker is writing one.
    workers_that_fit = workers if room is None else min(workers, room // (2 * nbytes))
    if workers_that_fit == 0:
        return 0, None
    return workers_that_fit, 2 if room is None or 3 * nbytes * workers_that_fit <= room else 1


class SamplerBatches:
    """Batches of every epoch, from any step on."""

    def __init__(
        self,
        table: VideoTable,
        source: FrameSource,
        recipe: SamplerRecipe,
        *,
        part: slice,
        workers: int,
        sharers: int = 1,
    ) -> None:
        """`sharers`: processes of this machine that train together."""
        self.table, self.source, self.part = table, source, part
        self.plan = Plan(table.counts, source.sizes, recipe)
        self._keys: list[tuple[int, int]] = []  # (epoch, step) of the current epoch
        frames = (part.stop - part.start) * max(self.plan.num_candidates)
        room = free_shared_memory()
        # Frames in memory need no workers; others are decoded by processes while the network trains.
        self.workers, factor = prefetch(
            0 if isinstance(source, CachedFrames) else workers,
            int(source.sizes.max(0).prod()) * 3 * frames,
            None if room is None else room // sharers,
        )
        self._loader = DataLoader(
            _StepFrames(self.plan, source, part),
            batch_size=None,
            sampler=self._keys,
            num_workers=self.workers,
            prefetch_factor=factor,
            persistent_workers=self.workers > 0,
        )

    def __len__(self) -> int:
        return self.plan.steps

    def epoch(self, number: int, begin: int = 0) -> Iterator[Batch]:
        self._keys[:] = [(number, step) for step in range(begin, len(self))]
        for step, frames in enumerate(self._loader, begin):
            draw = self.plan.draw(number, step).part(self.part)
            rows = self.table.frame_rows(draw.videos, draw.positions)
            yield Batch(
                frames.flatten(0, 1),
                np.repeat(self.source.sizes[draw.videos], draw.positions.shape[1], axis=0),
                draw,
                self.table.labels[torch.from_numpy(draw.videos)],
                self.table.probs[rows],
                self.table.times[rows],
            )
