"""Which pictures the reels of each split are composed of; no picture stands in two splits.

The one exception is dev of the `sports22` benchmark, whose reels differ from those of train while its pictures do not.
Which pictures a split gets never depends on how many reels are asked for, so that calls with different counts agree.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sosampler.datasets.splits import split_word
from sosampler.errors import InvalidArgument
from sosampler.reels.images import (
    CACHE_BYTES,
    PictureFolder,
    Pictures,
    ProceduralPictures,
    _entries,
    _images,
    open_reel_set,
)
from sosampler.reels.recipe import SPORTS22
from sosampler.video.limits import Limits

PROCEDURAL = "procedural"
DISTRACTORS = "distractors"
"""The folder of pictures without a class, beside the folders of the classes or of the splits."""

NUM_CLASSES = 8  # of procedural pictures
_PER_CLASS, _NUM_DISTRACTORS = 250, 500

Part = tuple[int, int, int]
"""(a, b, n): from a / n to b / n of a sorted list."""

_WHOLE: Part = (0, 1, 1)
_OF_ONE_FOLDER: dict[str, Part] = {"train": (0, 3, 5), "dev": (3, 4, 5), "test": (4, 5, 5)}
_OF_TRAIN: dict[str, Part] = {"train": (0, 3, 4), "dev": (3, 4, 4)}  # where test has a folder of its own and dev none


def open_sources(
    pictures: str | os.PathLike[str] | Pictures,
    splits: Sequence[str],
    *,
    size: int,
    seed: int = 0,
    num_classes: int | None = None,
) -> dict[str, Pictures]:
    """The pictures of each split that is asked for.

    A folder with train/ and test/ (and dev/) is taken at its word; without dev/, dev gets the last quarter of train.
    Other pictures are divided by their position: three fifths to train, a fifth to dev, a fifth to test. Neighbours
    stay together, since files with neighbouring names often show the same scene. Distractors are divided likewise.

    Args:
        pictures: a folder, "procedural", or a source that is open.
        size: side of the square pictures in pixels.
        seed: of procedural pictures.
        num_classes: of procedural pictures.
    """
    check_num_classes(pictures, num_classes)
    if isinstance(pictures, Pictures):
        whole = pictures
    elif pictures == PROCEDURAL:
        classes = NUM_CLASSES if num_classes is None else num_classes
        whole = ProceduralPictures(classes, _PER_CLASS, num_distractors=_NUM_DISTRACTORS, size=size, seed=seed)
    else:
        return _from_folder(Path(pictures), splits, size)
    return {split: part_of(whole, _OF_ONE_FOLDER[split], _OF_ONE_FOLDER[split]) for split in splits}


def check_num_classes(pictures: str | os.PathLike[str] | Pictures, num_classes: int | None) -> None:
    """Only procedural pictures have as many classes as one likes."""
    if num_classes is not None and pictures != PROCEDURAL:
        raise InvalidArgument(
            f"num_classes={num_classes} is not allowed with these pictures, which have their own classes; "
            f'leave it out, or give "{PROCEDURAL}" pictures'
        )


def open_sports22(
    pictures: str | os.PathLike[str] | Pictures, splits: Sequence[str], *, size: int
) -> dict[str, Pictures]:
    """The sets of the first measurement: test, and the half of train from which the classifier has not learned.

    Dev shares the pictures of train: they are all needed for the reels of the first measurement, and in the other half
    the classifier is surer than it is on anything new.
    """
    if isinstance(pictures, Pictures) or pictures == PROCEDURAL:
        raise InvalidArgument(
            f'preset="sports22" was asked for with {pictures!r}; give the folder with the pictures of the 22 sports, '
            "or another preset"
        )
    opened = {
        name: open_reel_set(Path(pictures), SPORTS22[name], size=size)
        for name in sorted({_sports22_set(split) for split in splits})
    }
    return _same_classes(Path(pictures), {split: opened[_sports22_set(split)] for split in splits})


def _sports22_set(split: str) -> str:
    return "test" if split == "test" else "train"


def part_of(pictures: Pictures, labelled: Part, distractors: Part) -> Pictures:
    """A part of each class's pictures and of the distractors; large and small classes are divided in proportion."""
    taken = copy.copy(pictures)  # shares the cache
    taken._members = [_cut(members, labelled) for members in pictures._members]
    taken._distractors = _cut(pictures._distractors, distractors)
    for name, left, all_of in zip(pictures.class_names, taken._members, pictures._members, strict=True):
        if not left:
            raise InvalidArgument(
                f"class {name} has {len(all_of)} pictures, too few for every split to get one; give at least 3, "
                "or fewer splits"
            )
    return taken


def _cut(listed: list[Any], part: Part) -> list[Any]:
    first, last, whole = part
    return listed[len(listed) * first // whole : len(listed) * last // whole]


# --- folders ----------------------------------------------------------------------------------------------------------


class _ClassFolders(PictureFolder):
    """One folder a class; a folder of distractors among them is none."""

    def __init__(self, root: Path, distractors: Path | None, size: int) -> None:
        self.root, self._limits = root, Limits()
        folders = [entry for entry in _entries(root) if entry.is_dir() and entry.name != DISTRACTORS]
        if not folders:
            raise InvalidArgument(f"{root}: holds no folders; give a folder with one folder of pictures a class")
        Pictures.__init__(
            self,
            class_names=tuple(folder.name for folder in folders),
            members=[_images(folder) for folder in folders],
            distractors=[] if distractors is None else _images(distractors),
            size=size,
            cache_bytes=CACHE_BYTES,
        )


def _from_folder(root: Path, splits: Sequence[str], size: int) -> dict[str, Pictures]:
    opened: dict[tuple[Path, Path | None], Pictures] = {}  # splits of one folder share its cache
    found: dict[str, Pictures] = {}
    for split in splits:
        folder, part = _place_of(root, split)
        if (root / DISTRACTORS).is_dir():
            distractors, distractor_part = _place_of(root / DISTRACTORS, split)
        else:
            distractors, distractor_part = None, _WHOLE
        key = (folder, distractors)
        if key not in opened:
            opened[key] = _ClassFolders(folder, distractors, size)
        found[split] = part_of(opened[key], part, distractor_part)
    return _same_classes(root, found)


def _place_of(root: Path, split: str) -> tuple[Path, Part]:
    """The folder with the pictures of a split, and which part of each list there is the split's."""
    own = _split_folders(root)
    if "train" not in own or len(own) < 2:
        return root, _OF_ONE_FOLDER[split]
    if split in own and (split != "train" or "dev" in own):
        return own[split], _WHOLE
    if split == "test":
        raise InvalidArgument(f"{root}: has {', '.join(sorted(own))} but no test; add it, or ask for no reels of test")
    return own["train"], _OF_TRAIN[split]


def _split_folders(root: Path) -> dict[str, Path]:
    """Folders that are called like a split."""
    found: dict[str, Path] = {}
    for entry in _entries(root):
        split = split_word(entry.name) if entry.is_dir() else None
        if split is None:
            continue
        if split in found:
            raise InvalidArgument(
                f"{root}: {found[split].name} and {entry.name} both mean {split}; join them, or rename one"
            )
        found[split] = entry
    return found


def _same_classes(root: Path, found: dict[str, Pictures]) -> dict[str, Pictures]:
    names = {split: set(source.class_names) for split, source in found.items()}
    everywhere, somewhere = set.intersection(*names.values()), set.union(*names.values())
    if everywhere != somewhere:
        odd = sorted(somewhere - everywhere)
        where = ", ".join(split for split, known in names.items() if odd[0] in known)
        raise InvalidArgument(
            f"{root}: the class {odd[0]!r} is in {where} only; give every split the same {len(somewhere)} classes"
        )
    return found
