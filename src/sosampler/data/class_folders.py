"""A folder for each class, optionally below train/, dev/ (val/) and test/: the manifest that needs no file."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from sosampler.data.manifest_rows import Row, Table
from sosampler.data.splits import split_word
from sosampler.errors import InvalidArgument
from sosampler.video.source import IMAGE_SUFFIXES, frame_images


def read_class_folders(root: Path, *, suffixes: Collection[str], multi_label: bool | None) -> Table:
    """Every file with one of the `suffixes` below a class folder, at any depth, in the order of its path.

    Where videos are looked for, a folder of numbered frame images below a class folder is a video too.
    """
    wanted = {suffix.lower() for suffix in suffixes}
    rows: list[Row] = []
    for layer, split in _split_layers(root, wanted):
        classes = _folders(layer)
        _refuse_loose_files(layer, wanted)
        for folder in classes:
            found = _media_below(folder, wanted)
            if not found:
                raise InvalidArgument(
                    f"{folder}: the class folder holds none of {' '.join(sorted(wanted))}; fill it or remove it"
                )
            for path in found:
                rows.append(Row(0, path.relative_to(root).as_posix(), (folder.name,), split=split))
    if not rows:
        raise InvalidArgument(f"{root}: holds no class folders; make one folder for each class, or give a CSV or JSONL")
    return Table(rows, bool(multi_label), lambda row: str(root / row.path))


def _split_layers(root: Path, wanted: Collection[str]) -> list[tuple[Path, str]]:
    """The folders that hold class folders, each with its split: `root` itself if there are no split folders."""
    folders = _folders(root)
    named = {folder: split_word(folder.name) for folder in folders}
    splits = {folder: split for folder, split in named.items() if split}
    if splits and len(splits) == len(folders):
        _refuse_loose_files(root, wanted)
        return list(splits.items())
    # "train" may be a class (next to "bus"); with folders inside, it is rather a split with a stranger beside it.
    layers = [folder.name for folder in splits if _folders(folder)]
    if layers:
        others = [folder.name for folder, split in named.items() if not split]
        raise InvalidArgument(
            f"{root}: {', '.join(layers)} look like splits, {', '.join(others)} do not; move the latter elsewhere, "
            "or give a CSV or JSONL"
        )
    return [(root, "")]


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Also through a link; a link to itself is none."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _folders(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and is_folder(entry))
    return [folder / name for name in names]


def _refuse_loose_files(folder: Path, wanted: Collection[str]) -> None:
    with os.scandir(folder) as entries:
        loose = sorted(entry.name for entry in entries if _is_media(entry.name, wanted) and os.path.isfile(entry.path))
    if loose:
        raise InvalidArgument(
            f"{folder / loose[0]}: lies beside the class folders and so has no class; move it into one"
        )


def _is_media(name: str, wanted: Collection[str]) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in wanted


def _media_below(folder: Path, wanted: Collection[str]) -> list[Path]:
    frames_count = IMAGE_SUFFIXES.isdisjoint(wanted)
    found: list[Path] = []
    seen: set[tuple[int, int]] = set()  # links may lead in circles
    for here, folders, files in os.walk(folder, followlinks=True):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        media = [Path(here, name) for name in sorted(files) if _is_media(name, wanted)]
        found += media
        if frames_count and not media and Path(here) != folder and files and frame_images(Path(here)):
            found.append(Path(here))
    return sorted(found)
