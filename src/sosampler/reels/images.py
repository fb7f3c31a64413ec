"""Where the pictures of reels come from: folders of image files, or pictures drawn by a rule.

A source gives square pictures of one size, sorted and numbered within each class, and distractors without a class.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from sosampler._util.validation import whole_number
from sosampler.errors import InvalidArgument
from sosampler.reels.procedural import MAX_CLASSES, class_name, draw_picture
from sosampler.reels.recipe import DISTRACTOR, ReelSet
from sosampler.video.folder_reader import upright_rgb
from sosampler.video.limits import Limits
from sosampler.video.source import IMAGE_SUFFIXES

Picture = NDArray[np.uint8]
"""[S, S, 3] RGB, not to be written to."""

CACHE_BYTES = 256 << 20


class PictureCache:
    """Decoded pictures, the least recently used of which go when they hold more than `max_bytes`. Thread-safe."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.max_bytes = whole_number("cache_bytes", max_bytes, at_least=0)
        self._lock = threading.Lock()
        self._pictures: OrderedDict[Hashable, Picture] = OrderedDict()
        self._held = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.max_bytes,)  # another process begins with an empty one

    def __len__(self) -> int:
        return len(self._pictures)

    @property
    def held_bytes(self) -> int:
        return self._held

    def get(self, key: Hashable) -> Picture | None:
        with self._lock:
            if key in self._pictures:
                self._pictures.move_to_end(key)
                return self._pictures[key]
            return None

    def put(self, key: Hashable, picture: Picture) -> None:
        with self._lock:
            if key in self._pictures:  # another thread was faster
                return
            self._pictures[key] = picture
            self._held += picture.nbytes
            while self._held > self.max_bytes:
                _, oldest = self._pictures.popitem(last=False)
                self._held -= oldest.nbytes


class Pictures(ABC):
    """Labelled pictures and distractors. Sources that were taken from one another share their cache."""

    def __init__(
        self,
        *,
        class_names: tuple[str, ...],
        members: list[list[Hashable]],
        distractors: list[Hashable],
        size: int,
        cache_bytes: int,
    ) -> None:
        self.class_names = class_names
        self.size = whole_number("size", size)
        self._members = members  # [class][picture] what `_load` takes
        self._distractors = distractors
        self._cache = PictureCache(cache_bytes)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({len(self.class_names)} classes, {sum(self.per_class)} pictures, "
            f"{self.num_distractors} distractors, {self.size} px)"
        )

    @property
    def per_class(self) -> tuple[int, ...]:
        """How many pictures each class has."""
        return tuple(len(members) for members in self._members)

    @property
    def num_distractors(self) -> int:
        return len(self._distractors)

    def listing(self) -> list[tuple[int, Hashable]]:
        """(label, what names the picture) of all pictures, distractors last."""
        labelled = [(label, key) for label, members in enumerate(self._members) for key in members]
        return labelled + [(DISTRACTOR, key) for key in self._distractors]

    def get(self, label: int, index: int) -> Picture:
        """Picture `index` of a class, or of the distractors: [S, S, 3]."""
        if not DISTRACTOR <= label < len(self._members):
            raise InvalidArgument(
                f"label={label} is not allowed; give 0 to {len(self._members) - 1}, or {DISTRACTOR} for a distractor"
            )
        listed = self._distractors if label == DISTRACTOR else self._members[label]
        if not 0 <= index < len(listed):
            raise InvalidArgument(f"picture {index} of label {label} was asked for; there are {len(listed)}")
        key = listed[index]
        picture = self._cache.get(key)
        if picture is None:
            picture = self._load(key)
            picture.flags.writeable = False
            self._cache.put(key, picture)
        return picture

    def take(self, pictures: slice, distractors: slice = slice(None)) -> Pictures:
        """The same source with a slice of each class's pictures, and one of the distractors."""
        taken = copy.copy(self)
        taken._members = [members[pictures] for members in self._members]
        taken._distractors = self._distractors[distractors]
        for name, left, all_of in zip(self.class_names, taken._members, self._members, strict=True):
            if not left:
                raise InvalidArgument(f"{pictures} leaves none of the {len(all_of)} pictures of {name}; take others")
        return taken

    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """All labelled pictures [M, S, S, 3] and their labels [M], class by class: what a classifier learns from."""
        labels = np.repeat(np.arange(len(self._members)), self.per_class)
        numbers = [number for count in self.per_class for number in range(count)]
        stacked = [self.get(label, number) for label, number in zip(labels.tolist(), numbers, strict=True)]
        return np.stack(stacked), labels.astype(np.int64)

    def fingerprint(self) -> str:
        """Eight hex digits that change with the choice of pictures, their order and their size."""
        text = repr((type(self).__name__, self.size, [(label, self._name(key)) for label, key in self.listing()]))
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]

    @abstractmethod
    def _load(self, key: Any) -> Picture: ...

    @abstractmethod
    def _name(self, key: Any) -> Hashable:
        """What identifies a picture wherever its folder lies."""


class PictureFolder(Pictures):
    """Image files, one folder a class, sorted by name; decoded when asked for.

    The short side is scaled to `size` and the middle square kept.

    Args:
        root: holds one folder of images a class.
        distractors: a folder of images; none without it.
        size: side of the squares in pixels.
        cache_bytes: how much of decoded pictures is kept.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        distractors: Path | str | None = None,
        size: int = 192,
        cache_bytes: int = CACHE_BYTES,
        limits: Limits | None = None,
    ) -> None:
        self.root = Path(root)
        self._limits = limits or Limits()
        folders = [entry for entry in _entries(self.root) if entry.is_dir()]
        if not folders:
            raise InvalidArgument(f"{root}: holds no folders; give a folder with one folder of pictures a class")
        super().__init__(
            class_names=tuple(folder.name for folder in folders),
            members=[_images(folder) for folder in folders],
            distractors=[] if distractors is None else _images(Path(distractors)),
            size=size,
            cache_bytes=cache_bytes,
        )

    def _load(self, key: Path) -> Picture:
        try:
            with Image.open(key) as image:
                self._limits.check_pixels(str(key), *image.size)  # before a pixel is decoded
                self._limits.check_pixels(str(key), *_scaled(*image.size, self.size))  # a thin line becomes a long one
                return middle_square(upright_rgb(image), self.size)
        except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
            raise InvalidArgument(f"{key}: not an image that can be read ({error}); take it out") from error

    def _name(self, key: Path) -> Hashable:
        return key.parent.name, key.name, key.stat().st_size


def open_reel_set(root: Path | str, reel_set: ReelSet, *, size: int, cache_bytes: int = CACHE_BYTES) -> Pictures:
    """The pictures of one side of a benchmark, whose folders lie below `root`."""
    source = PictureFolder(
        Path(root) / reel_set.folder,
        distractors=Path(root) / reel_set.distractors,
        size=size,
        cache_bytes=cache_bytes,
    )
    return source.take(slice(reel_set.start, reel_set.stop))


class ProceduralPictures(Pictures):
    """Pictures drawn by a rule: a shape that is the class, on varied grounds among clutter; nothing to download.

    Colours, place, size, contrast and clutter say nothing about the class. Distractors have the same grounds and
    clutter, and blobs in place of the shape. Picture i of a class depends on the seed, the class and i alone.
    """

    def __init__(
        self,
        num_classes: int = 8,
        per_class: int = 100,
        *,
        num_distractors: int = 200,
        size: int = 120,
        seed: int = 0,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        if whole_number("num_classes", num_classes) > MAX_CLASSES:
            raise InvalidArgument(f"num_classes={num_classes} is not allowed; there are {MAX_CLASSES} shapes at most")
        self.seed = whole_number("seed", seed, at_least=0)
        whole_number("per_class", per_class)
        whole_number("num_distractors", num_distractors, at_least=0)
        super().__init__(
            class_names=tuple(class_name(label) for label in range(num_classes)),
            members=[[(label, number) for number in range(per_class)] for label in range(num_classes)],
            distractors=[(DISTRACTOR, number) for number in range(num_distractors)],
            size=size,
            cache_bytes=cache_bytes,
        )

    def _load(self, key: tuple[int, int]) -> Picture:
        label, number = key
        rng = np.random.default_rng([self.seed, label + 1, number])  # 0 stands for distractors
        return draw_picture(None if label == DISTRACTOR else label, self.size, rng)

    def _name(self, key: tuple[int, int]) -> Hashable:
        return self.seed, *key


def middle_square(image: Image.Image, size: int) -> Picture:
    """Scale the short side to `size`, keep the middle square: [size, size, 3] uint8."""
    width, height = _scaled(*image.size, size)
    scaled = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (width - size) // 2, (height - size) // 2
    return np.array(scaled.crop((left, top, left + size, top + size)))


def _scaled(width: int, height: int, size: int) -> tuple[int, int]:
    factor = size / min(width, height)
    return max(size, round(width * factor)), max(size, round(height * factor))


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted((entry for entry in folder.iterdir() if not entry.name.startswith(".")), key=lambda p: p.name)
    except OSError as error:
        raise InvalidArgument(f"{folder}: cannot be listed ({error.strerror}); give a folder of pictures") from error


def _images(folder: Path) -> list[Hashable]:
    images: list[Hashable] = [entry for entry in _entries(folder) if entry.suffix.lower() in IMAGE_SUFFIXES]
    if not images:
        raise InvalidArgument(
            f"{folder}: holds no pictures; give image files ({', '.join(sorted(IMAGE_SUFFIXES))}) or remove the folder"
        )
    return images
