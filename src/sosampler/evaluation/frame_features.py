"""Single frames of many videos, and what a classifier makes of each before its class layer.

Videos come from files or from a bank; either way a video is a table of times and a way to read some of its frames.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sosampler.bank.bank import Bank
from sosampler.classifiers.base import Classifier, Penultimate
from sosampler.classifiers.factory import create_classifier, saved_folder
from sosampler.datasets.manifest import Manifest, read_manifest
from sosampler.datasets.manifest_io import MANIFEST_SUFFIXES
from sosampler.errors import InvalidArgument, VideoError
from sosampler.video.reader import Frames
from sosampler.video.source import open_video
from sosampler.video.timeline import Indices, Seconds

# Frames that are held decoded at once, and that go through a network at once.
_FRAMES_AT_ONCE = 32


# ---- videos


@dataclass(frozen=True)
class OpenFrames:
    """One video whose frames can be read."""

    times: Seconds  # [F] seconds of every frame that can be had, increasing
    read: Callable[[Indices, int], Frames]  # positions in `times`, short side -> uint8 [n, H, W, 3]


@dataclass(frozen=True)
class FrameSource:
    """A video that can be opened when its turn comes."""

    name: str
    open: Callable[[], Any]  # a context manager that gives `OpenFrames`


@dataclass(frozen=True)
class Sources:
    """The videos of a measurement."""

    videos: tuple[FrameSource, ...]
    kind: str  # "videos" or "bank"
    found: int  # how many there were before some were drawn


def find_sources(videos: Any, *, max_videos: int | None, seed: int) -> Sources:
    """What the user means by `videos`: a bank, a manifest, or files and folders; at most `max_videos` drawn by `seed`.

    Drawn ones keep their order.
    """
    kind = "videos"
    if isinstance(videos, (str, os.PathLike)) and (Path(videos) / "bank.json").is_file():
        videos = Bank(videos)
    if isinstance(videos, (str, os.PathLike)) and Path(videos).suffix.lower() in MANIFEST_SUFFIXES:
        videos = read_manifest(videos)
    if isinstance(videos, Bank):
        kind, found = "bank", [_of_bank(videos, place) for place in range(len(videos))]
    elif isinstance(videos, Manifest):
        found = [_of_file(item.id, videos.path_of(item), item.start, item.end) for item in videos.items]
    else:
        from sosampler.video.discover import expand  # one meaning of folders and patterns everywhere

        given = [videos] if isinstance(videos, (str, os.PathLike)) else videos
        if not isinstance(given, Sequence) or not all(isinstance(path, (str, os.PathLike)) for path in given):
            raise InvalidArgument(
                f"a {type(videos).__name__} is no source of videos; give a bank, a manifest, or paths of videos"
            )
        found = [_of_file(str(path), path, None, None) for path in expand([os.fspath(path) for path in given])]
    if not found:
        raise InvalidArgument("no video was given; give a bank, a manifest, or paths of videos")
    drawn = np.arange(len(found))
    if max_videos is not None and len(found) > max_videos:
        drawn = np.sort(np.random.default_rng(seed).choice(len(found), max_videos, replace=False))
    return Sources(tuple(found[place] for place in drawn.tolist()), kind, len(found))


def _of_file(name: str, path: Path, start: float | None, end: float | None) -> FrameSource:
    @contextmanager
    def opened() -> Iterator[OpenFrames]:
        reader = open_video(path)
        try:
            timeline = reader.timeline()
            first, last = timeline.range_of(start, end)
            if first >= last:
                raise VideoError(f"{path}: no frame lies between start={start} and end={end}; mend the manifest")
            times = timeline.seconds(np.arange(first, last))
            yield OpenFrames(times, lambda positions, size: reader.read(first + positions, size=size).frames)
        finally:
            reader.close()

    return FrameSource(name, opened)


def _of_bank(bank: Bank, place: int) -> FrameSource:
    @contextmanager
    def opened() -> Iterator[OpenFrames]:
        item = bank[place]
        # A short video repeats frames; each counts once.
        times, stored = np.unique(item.pts_seconds, return_index=True)
        yield OpenFrames(times, lambda positions, size: item.frames(stored[positions], size=size))

    return FrameSource(bank.items[place].id, opened)


# ---- features


class FrameFeatures:
    """`Penultimate` features of a classifier, under a name."""

    def __init__(self, classifier: Classifier, *, name: str | None = None, untrained: bool = False) -> None:
        self._before = Penultimate(classifier)
        self.classifier = classifier
        self.name = name or classifier.name
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
    """Features [n, D] of some frames of a video, for each network; a few frames are held decoded at a time."""
    parts: list[list[Tensor]] = [[] for _ in networks]
    for begin in range(0, len(positions), _FRAMES_AT_ONCE):
        frames = video.read(positions[begin : begin + _FRAMES_AT_ONCE], size)
        pictures = torch.from_numpy(np.ascontiguousarray(frames.transpose(0, 3, 1, 2)))
        for network, found in zip(networks, parts, strict=True):
            found.append(network(pictures))
    return [torch.cat(found) for found in parts]


def feature_networks(
    classifiers: Any, weights: Any = None, *, device: str | None = None, precision: str | None = None
) -> list[FrameFeatures]:
    """Classifiers by name, by folder or as they are; each gets a name of its own."""
    asked = list(classifiers) if isinstance(classifiers, (list, tuple)) else [classifiers]
    if not asked:
        raise InvalidArgument("no classifier was given; give at least one name, folder or classifier")
    files = list(weights) if isinstance(weights, (list, tuple)) else [weights]
    files = files + [None] * (len(asked) - len(files)) if weights is None else files
    if len(files) != len(asked):
        raise InvalidArgument(
            f"{len(files)} weights were given for {len(asked)} classifiers; give one for each, None where there is none"
        )
    networks: list[FrameFeatures] = []
    for source, file in zip(asked, files, strict=True):
        if isinstance(source, nn.Module) or hasattr(source, "frame_probs"):
            if file is not None:
                raise InvalidArgument(f"weights={str(file)!r} are for a classifier by name; {source!r} has its own")
            classifier, untrained = source, False
        else:
            place = device or ("cuda" if torch.cuda.is_available() else "cpu")
            classifier = create_classifier(source, weights=file, new_head=None, device=place, precision=precision)
            comes_with_weights = saved_folder(source) is not None or str(source).startswith("hf:")
            untrained = file is None and not comes_with_weights
        network = FrameFeatures(classifier, untrained=untrained)
        count = sum(other.classifier.name == network.name for other in networks)
        if count:  # the same network with other weights
            network.name = f"{network.name} ({count + 1})"
        networks.append(network)
    return networks
