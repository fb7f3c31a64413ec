"""Single frames of many videos, from files or from a bank, and their features before a classifier's class layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sosampler._util.arrays import Frames, Indices, Seconds
from sosampler.bank.bank import Bank
from sosampler.classifiers.base import Classifier, Penultimate
from sosampler.classifiers.factory import create_classifier, saved_folder
from sosampler.datasets.manifest import Manifest, read_manifest
from sosampler.datasets.manifest_io import MANIFEST_SUFFIXES
from sosampler.errors import InvalidArgument, VideoError
from sosampler.video.source import open_video

# Frames that are decoded and go through a network at a time.
_MAX_FRAMES = 32


# ---- videos


@dataclass(frozen=True)
class OpenFrames:
    """One video whose frames can be read."""

    times: Seconds  # [F] of every frame that can be read, increasing
    read: Callable[[Indices, int], Frames]  # positions in `times`, short side -> uint8 [n, H, W, 3]


@dataclass(frozen=True)
class FrameSource:
    """A video that can be opened later."""

    name: str
    open: Callable[[], Any]  # a context manager of `OpenFrames`


@dataclass(frozen=True)
class Sources:
    """The videos of a measurement."""

    videos: tuple[FrameSource, ...]
    kind: str  # "videos" or "bank"
    available: int  # before some were drawn


def find_sources(videos: Any, *, max_videos: int | None, seed: int) -> Sources:
    """Resolve `videos`: a bank, a manifest, or files and folders; of more than `max_videos` a part, by `seed`."""
    kind = "videos"
    if isinstance(videos, (str, os.PathLike)) and (Path(videos) / "bank.json").is_file():
        videos = Bank(videos)
    if isinstance(videos, (str, os.PathLike)) and Path(videos).suffix.lower() in MANIFEST_SUFFIXES:
        videos = read_manifest(videos)
    if isinstance(videos, Bank):
        kind, sources = "bank", [_of_bank(videos, position) for position in range(len(videos))]
    elif isinstance(videos, Manifest):
        sources = [_of_file(item.id, videos.path_of(item), item.start, item.end) for item in videos.items]
    else:
        from sosampler.video.discover import expand  # one meaning of folders and patterns everywhere

        given = [videos] if isinstance(videos, (str, os.PathLike)) else videos
        if not isinstance(given, Sequence) or not all(isinstance(path, (str, os.PathLike)) for path in given):
            raise InvalidArgument(
                f"a {type(videos).__name__} cannot be read as videos; give a bank, a manifest, or paths of videos"
            )
        sources = [_of_file(str(path), path, None, None) for path in expand([os.fspath(path) for path in given])]
    if not sources:
        raise InvalidArgument("no video was given; give a bank, a manifest, or paths of videos")
    drawn = np.arange(len(sources))
    if max_videos is not None and len(sources) > max_videos:
        drawn = np.sort(np.random.default_rng(seed).choice(len(sources), max_videos, replace=False))
    return Sources(tuple(sources[index] for index in drawn.tolist()), kind, len(sources))


def _of_file(name: str, path: Path, start: float | None, end: float | None) -> FrameSource:
    @contextmanager
    def opened() -> Iterator[OpenFrames]:
        with closing(open_video(path)) as reader:
            timeline = reader.timeline()
            first, last = timeline.range_of(start, end)
            if first >= last:
                raise VideoError(f"{path}: no frame lies between start={start} and end={end}; correct the manifest")
            times = timeline.seconds(np.arange(first, last))
            yield OpenFrames(times, lambda positions, size: reader.read(first + positions, size=size).frames)

    return FrameSource(name, opened)


def _of_bank(bank: Bank, position: int) -> FrameSource:
    @contextmanager
    def opened() -> Iterator[OpenFrames]:
        item = bank[position]
        # A short video repeats frames; each counts once.
        times, stored = np.unique(item.pts_seconds, return_index=True)
        yield OpenFrames(times, lambda positions, size: item.frames(stored[positions], size=size))

    return FrameSource(bank.items[position].id, opened)


# ---- features


class FrameFeatures:
    """`Penultimate` features of a classifier, under a name."""

    def __init__(self, classifier: Classifier, *, untrained: bool = False) -> None:
        self._before = Penultimate(classifier)
        self.classifier, self.name = classifier, classifier.name
        self.untrained = untrained  # known to have random weights

    @property
    def short_side(self) -> int:
        """Of the frames that its preprocessing takes without enlarging them."""
        resize = self.classifier.preprocessing.resize
        return resize if isinstance(resize, int) else max(resize)

    def __call__(self, frames: Tensor) -> Tensor:
        """uint8 [F, 3, H, W] -> float32 [F, D] on the CPU."""
        with self._before.watching():
            return self._before(frames)


def features_at(
    video: OpenFrames, positions: NDArray[np.int64], networks: Sequence[FrameFeatures], size: int
) -> list[Tensor]:
    """Return the features [n, D] of some frames of a video for each network, a few frames at a time."""
    parts: list[list[Tensor]] = [[] for _ in networks]
    for begin in range(0, len(positions), _MAX_FRAMES):
        frames = video.read(positions[begin : begin + _MAX_FRAMES], size)
        images = torch.from_numpy(np.ascontiguousarray(frames.transpose(0, 3, 1, 2)))
        for network, features in zip(networks, parts, strict=True):
            features.append(network(images))
    return [torch.cat(features) for features in parts]


def feature_networks(
    classifiers: Any, weights: Any = None, *, device: str | None = None, precision: str | None = None
) -> list[FrameFeatures]:
    """Return the networks of classifiers by name, by folder or as objects; each gets a unique name."""
    given = list(classifiers) if isinstance(classifiers, (list, tuple)) else [classifiers]
    if not given:
        raise InvalidArgument("no classifier was given; give at least one name, folder or classifier")
    files = list(weights) if isinstance(weights, (list, tuple)) else [weights] * (len(given) if weights is None else 1)
    if len(files) != len(given):
        raise InvalidArgument(
            f"{len(files)} weights were given for {len(given)} classifiers; give one for each, None where there is none"
        )
    networks: list[FrameFeatures] = []
    for source, file in zip(given, files, strict=True):
        if isinstance(source, nn.Module) or hasattr(source, "frame_probs"):
            if file is not None:
                raise InvalidArgument(f"weights={str(file)!r} are for a classifier by name; {source!r} has its own")
            network = FrameFeatures(source)
        else:
            where = device or ("cuda" if torch.cuda.is_available() else "cpu")
            classifier = create_classifier(source, weights=file, new_head=None, device=where, precision=precision)
            comes_with_weights = saved_folder(source) is not None or str(source).startswith("hf:")
            network = FrameFeatures(classifier, untrained=file is None and not comes_with_weights)
        count = sum(other.classifier.name == network.name for other in networks)
        if count:  # the same network with other weights
            network.name = f"{network.name} ({count + 1})"
        networks.append(network)
    return networks
