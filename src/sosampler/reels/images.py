"""Pictures of reels: folders of image files or drawn pictures, and which of them each split uses.

A source has square pictures of one size, sorted and numbered within each class, and distractors without a class. No
picture is in two splits; the one exception is dev of the `sports22` benchmark, whose reels differ from those of train
while its pictures do not. Which pictures a split gets never depends on the number of reels, so that calls with
different counts agree.
"""

from __future__ import annotations

import copy
import hashlib
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from sosampler._util.validation import check_int
from sosampler.datasets.manifest_io import split_word
from sosampler.errors import InvalidArgument
from sosampler.reels.procedural import MAX_CLASSES, class_name, draw_picture
from sosampler.reels.recipe import DISTRACTOR, SPORTS22, ReelSet
from sosampler.video.folder_reader import upright_rgb
from sosampler.video.limits import Limits
from sosampler.video.source import IMAGE_SUFFIXES

Picture = NDArray[np.uint8]
"""[S, S, 3] RGB, not to be written to."""

CACHE_BYTES = 256 << 20
PROCEDURAL = "procedural"
DISTRACTORS = "distractors"
"""The folder of pictures without a class, beside the folders of the classes or of the splits."""

_NUM_CLASSES, _PER_CLASS, _NUM_DISTRACTORS = 8, 250, 500  # of procedural pictures

Part = tuple[int, int, int]
"""(a, b, n): from a / n to b / n of a sorted list."""

_WHOLE: Part = (0, 1, 1)
_OF_ONE_FOLDER: dict[str, Part] = {"train": (0, 3, 5), "dev": (3, 4, 5), "test": (4, 5, 5)}
_OF_TRAIN: dict[str, Part] = {"train": (0, 3, 4), "dev": (3, 4, 4)}  # where test has its own folder and dev none


class PictureCache:
    """Decoded pictures of at most `max_bytes`; the least recently used ones are dropped. Thread-safe."""

    def __init__(self, max_bytes: int = CACHE_BYTES) -> None:
        self.max_bytes = check_int("cache_bytes", max_bytes, at_least=0)
        self._lock = threading.Lock()
        self._pictures: OrderedDict[Hashable, Picture] = OrderedDict()
        self.held_bytes = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.max_bytes,)  # another process starts with an empty one

    def __len__(self) -> int:
        return len(self._pictures)

    def get(self, key: Hashable) -> Picture | None:
        with self._lock:
            if key in self._pictures:
                self._pictures.move_to_end(key)
            return self._pictures.get(key)

    def put(self, key: Hashable, picture: Picture) -> None:
        with self._lock:
            if key in self._pictures:  # another thread was faster
                return
            self._pictures[key] = picture
            self.held_bytes += picture.nbytes
            while self.held_bytes > self.max_bytes:
                self.held_bytes -= self._pictures.popitem(last=False)[1].nbytes


class Pictures(ABC):
    """Labelled pictures and distractors. A source that was taken from another shares its cache."""

    def __init__(self, members: dict[str, list[Hashable]], distractors: list[Hashable], size: int, cache: int) -> None:
        self.class_names = tuple(members)
        self.size = check_int("size", size)
        self._members = list(members.values())  # [class][picture] keys for `_load`
        self._distractors = distractors
        self._cache = PictureCache(cache)

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
        """Return (label, key) of all pictures, distractors last."""
        labelled = [(label, key) for label, members in enumerate(self._members) for key in members]
        return labelled + [(DISTRACTOR, key) for key in self._distractors]

    def key(self, label: int, index: int) -> Hashable:
        """Return what `_load` needs for picture `index` of a class, or of the distractors."""
        if not DISTRACTOR <= label < len(self._members):
            raise InvalidArgument(
                f"label={label} must be from 0 to {len(self._members) - 1}, or {DISTRACTOR} for a distractor"
            )
        listed = self._distractors if label == DISTRACTOR else self._members[label]
        if not 0 <= index < len(listed):
            raise InvalidArgument(f"picture {index} of label {label} does not exist; there are {len(listed)}")
        return listed[index]

    def name_of(self, label: int, index: int) -> str:
        """Return a name of picture `index` of a class, or of the distractors, which no other picture has."""
        name = self._name(self.key(label, index))
        return "/".join(map(str, name if isinstance(name, tuple) else (name,)))

    def get(self, label: int, index: int) -> Picture:
        """Return picture `index` of a class, or of the distractors: [S, S, 3]."""
        key = self.key(label, index)
        picture = self._cache.get(key)
        if picture is None:
            picture = self._load(key)
            picture.flags.writeable = False
            self._cache.put(key, picture)
        return picture

    def take(self, pictures: slice, distractors: slice = slice(None)) -> Pictures:
        """Return the same source with a slice of each class's pictures, and one of the distractors."""
        taken = copy.copy(self)
        taken._members = [members[pictures] for members in self._members]
        taken._distractors = self._distractors[distractors]
        for name, left, all_of in zip(self.class_names, taken.per_class, self.per_class, strict=True):
            if not left:
                raise InvalidArgument(f"{pictures} leaves none of the {all_of} pictures of {name}; take others")
        return taken

    def fingerprint(self) -> str:
        """Return eight hex digits that change with the choice of pictures, their order and their size."""
        text = repr((type(self).__name__, self.size, [(label, self._name(key)) for label, key in self.listing()]))
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]

    @abstractmethod
    def _load(self, key: Any) -> Picture: ...

    @abstractmethod
    def _name(self, key: Any) -> Hashable:
        """Return what identifies a picture wherever its folder is."""


class PictureFolder(Pictures):
    """Image files, one folder per class below `root`, sorted by name; decoded when needed.

    The short side is scaled to `size` pixels and the centre square taken.
    """

    _no_class: str | None = None  # a folder that is no class

    def __init__(
        self,
        root: Path | str,
        *,
        distractors: Path | str | None = None,
        size: int = 192,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.root = Path(root)
        folders = [entry for entry in _entries(self.root) if entry.is_dir() and entry.name != self._no_class]
        if not folders:
            raise InvalidArgument(f"{root}: holds no folders; give a folder with one folder of pictures per class")
        members = {folder.name: _images(folder) for folder in folders}
        super().__init__(members, [] if distractors is None else _images(Path(distractors)), size, cache_bytes)

    def _load(self, key: Path) -> Picture:
        try:
            with Image.open(key) as image:
                Limits().check_pixels(str(key), *image.size)  # before a pixel is decoded
                Limits().check_pixels(str(key), *_scaled(*image.size, self.size))  # a thin line becomes a long one
                return middle_square(upright_rgb(image), self.size)
        except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
            raise InvalidArgument(f"{key}: not an image that can be read ({error}); remove it") from error

    def _name(self, key: Path) -> Hashable:
        return key.parent.name, key.name, key.stat().st_size


def open_reel_set(root: Path | str, reel_set: ReelSet, *, size: int) -> Pictures:
    """Open the pictures of one side of a benchmark, whose folders are below `root`."""
    distractors = Path(root) / reel_set.distractors
    source = PictureFolder(Path(root) / reel_set.folder, distractors=distractors, size=size)
    return source.take(slice(reel_set.start, reel_set.stop))


class ProceduralPictures(Pictures):
    """Drawn pictures: a shape that is the class, on varied backgrounds among clutter; nothing to download.

    Colours, position, size, contrast and clutter are independent of the class. Distractors have the same backgrounds
    and clutter, and blobs in place of the shape. Picture i of a class depends on the seed, the class and i alone.
    """

    def __init__(
        self,
        num_classes: int = 8,
        per_class: int = 100,
        *,
        num_distractors: int = 200,
        size: int = 120,
        seed: int = 0,
    ) -> None:
        if check_int("num_classes", num_classes) > MAX_CLASSES:
            raise InvalidArgument(f"num_classes={num_classes} must be at most {MAX_CLASSES}, the number of shapes")
        self.seed = check_int("seed", seed, at_least=0)
        check_int("per_class", per_class)
        check_int("num_distractors", num_distractors, at_least=0)
        members: dict[str, list[Hashable]] = {
            class_name(label): [(label, number) for number in range(per_class)] for label in range(num_classes)
        }
        super().__init__(members, [(DISTRACTOR, number) for number in range(num_distractors)], size, CACHE_BYTES)

    def _load(self, key: tuple[int, int]) -> Picture:
        label, number = key
        rng = np.random.default_rng([self.seed, label + 1, number])  # 0 stands for distractors
        return draw_picture(None if label == DISTRACTOR else label, self.size, rng)

    def _name(self, key: tuple[int, int]) -> Hashable:
        return self.seed, *key


def middle_square(image: Image.Image, size: int) -> Picture:
    """Scale the short side to `size` and crop the centre square: [size, size, 3] uint8."""
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


# ---- the pictures of each split


def open_sources(
    pictures: str | os.PathLike[str] | Pictures,
    splits: Sequence[str],
    *,
    size: int,
    seed: int = 0,
    num_classes: int | None = None,
) -> dict[str, Pictures]:
    """Open the pictures of each split.

    A folder with train/ and test/ (and dev/) is used as it is; without dev/, dev gets the last quarter of train.
    Other pictures are divided by position: three fifths for train, a fifth for dev, a fifth for test. Neighbours stay
    together, since files with neighbouring names often show the same scene. Distractors are divided likewise.
    """
    if isinstance(pictures, Pictures):
        whole = pictures
    elif pictures == PROCEDURAL:
        classes = _NUM_CLASSES if num_classes is None else num_classes
        whole = ProceduralPictures(classes, _PER_CLASS, num_distractors=_NUM_DISTRACTORS, size=size, seed=seed)
    else:
        return _from_folder(Path(pictures), splits, size)
    return {split: part_of(whole, _OF_ONE_FOLDER[split], _OF_ONE_FOLDER[split]) for split in splits}


def open_sports22(
    pictures: str | os.PathLike[str] | Pictures, splits: Sequence[str], *, size: int
) -> dict[str, Pictures]:
    """Open the sets of the first measurement: test, and the half of train on which the classifier was not trained.

    Dev shares the pictures of train: they are all needed for the reels of the first measurement, and on the other half
    the classifier is more certain than on anything new.
    """
    if isinstance(pictures, Pictures) or pictures == PROCEDURAL:
        raise InvalidArgument(
            f'preset="sports22" cannot be used with {pictures!r}; give the folder with the pictures of the 22 sports, '
            "or another preset"
        )
    sets = {split: "test" if split == "test" else "train" for split in splits}
    opened = {name: open_reel_set(Path(pictures), SPORTS22[name], size=size) for name in sorted(set(sets.values()))}
    return _same_classes(Path(pictures), {split: opened[name] for split, name in sets.items()})


def part_of(pictures: Pictures, labelled: Part, distractors: Part) -> Pictures:
    """Return a part of each class's pictures and of the distractors; classes are divided in proportion."""
    taken = copy.copy(pictures)  # shares the cache
    taken._members = [_slice(members, labelled) for members in pictures._members]
    taken._distractors = _slice(pictures._distractors, distractors)
    for name, left, all_of in zip(pictures.class_names, taken.per_class, pictures.per_class, strict=True):
        if not left:
            raise InvalidArgument(
                f"class {name} has {all_of} pictures, too few for every split to get one; give at least 3, "
                "or fewer splits"
            )
    return taken


def _slice(listed: list[Any], part: Part) -> list[Any]:
    first, last, whole = part
    return listed[len(listed) * first // whole : len(listed) * last // whole]


class _ClassFolders(PictureFolder):
    """One folder per class; a folder of distractors among them is no class. Its name is part of fingerprints."""

    _no_class = DISTRACTORS


def _from_folder(root: Path, splits: Sequence[str], size: int) -> dict[str, Pictures]:
    opened: dict[tuple[Path, Path | None], Pictures] = {}  # splits of one folder share its cache
    sources: dict[str, Pictures] = {}
    for split in splits:
        folder, part = _folder_of(root, split)
        distractors, distractor_part = None, _WHOLE
        if (root / DISTRACTORS).is_dir():
            distractors, distractor_part = _folder_of(root / DISTRACTORS, split)
        key = (folder, distractors)
        if key not in opened:
            opened[key] = _ClassFolders(folder, distractors=distractors, size=size)
        sources[split] = part_of(opened[key], part, distractor_part)
    return _same_classes(root, sources)


def _folder_of(root: Path, split: str) -> tuple[Path, Part]:
    """Return the folder with the pictures of a split, and which part of each list belongs to the split."""
    folders = _split_folders(root)
    if "train" not in folders or len(folders) < 2:
        return root, _OF_ONE_FOLDER[split]
    if split in folders and (split != "train" or "dev" in folders):
        return folders[split], _WHOLE
    if split == "test":
        raise InvalidArgument(f"{root}: has {', '.join(sorted(folders))} but no test; add it, or make no test reels")
    return folders["train"], _OF_TRAIN[split]


def _split_folders(root: Path) -> dict[str, Path]:
    """Return folders that are named after a split."""
    folders: dict[str, Path] = {}
    for entry in _entries(root):
        split = split_word(entry.name) if entry.is_dir() else None
        if split and folders.setdefault(split, entry) is not entry:
            raise InvalidArgument(
                f"{root}: {folders[split].name} and {entry.name} both mean {split}; join them, or rename one"
            )
    return folders


def _same_classes(root: Path, sources: dict[str, Pictures]) -> dict[str, Pictures]:
    names = {split: set(source.class_names) for split, source in sources.items()}
    everywhere, somewhere = set.intersection(*names.values()), set.union(*names.values())
    if everywhere != somewhere:
        odd = sorted(somewhere - everywhere)
        where = ", ".join(split for split, known in names.items() if odd[0] in known)
        raise InvalidArgument(
            f"{root}: the class {odd[0]!r} is in {where} only; give every split the same {len(somewhere)} classes"
        )
    return sources
