"""Manifests where one file has several names: absolute and relative paths, links of files and folders."""

from __future__ import annotations

from pathlib import Path

import pytest

from sosampler.datasets.importers.build import VideoIndex
from sosampler.datasets.manifest import read_manifest
from sosampler.errors import InvalidArgument


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


@pytest.mark.parametrize("name", ["{here}/m/v.mp4", "../m/v.mp4", "../linked/v.mp4"])
def test_a_video_in_two_splits_is_found_by_any_of_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The manifest itself is given by a relative path."""
    touch(tmp_path / "m" / "v.mp4")
    (tmp_path / "linked").symlink_to(tmp_path / "m")
    other = name.format(here=tmp_path)
    (tmp_path / "m" / "a.csv").write_text(f"path,label,split,id\nv.mp4,x,train,1\n{other},x,test,2\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=r"line 3: the video .* is in test, but in train at m/a.csv, line 2"):
        read_manifest("m/a.csv")


def test_one_video_under_two_names_in_one_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text(f"path,label,id\nv.mp4,x,1\n{tmp_path}/v.mp4,x,2\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match="write its path and its group alike"):
        read_manifest("a.csv")


def test_linked_folders_below_a_class_are_followed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    touch(tmp_path / "elsewhere" / "b.mp4", *(tmp_path / "plain" / f"{number}.jpg" for number in range(3)))
    touch(root / "x" / "a.mp4", root / "y" / "deep" / "c.mp4")
    (root / "x" / "frames").symlink_to(tmp_path / "plain")
    (root / "x" / "more").symlink_to(tmp_path / "elsewhere")
    (root / "y" / "circle").symlink_to(root / "y")
    manifest = read_manifest(root)
    assert [item.path for item in manifest.items] == ["x/a.mp4", "x/frames", "x/more/b.mp4", "y/deep/c.mp4"]


def test_links_to_themselves_are_passed_over(tmp_path: Path) -> None:
    touch(tmp_path / "x" / "a.mp4")
    for place in (tmp_path / "loop", tmp_path / "x" / "loop", tmp_path / "x" / "b.mp4"):
        place.symlink_to(place.name)
    assert VideoIndex(tmp_path, ["a", "b"]).find(["b", "a"]) == ("x/a.mp4", "a")
    (tmp_path / "x" / "b.mp4").unlink()
    assert [item.path for item in read_manifest(tmp_path).items] == ["x/a.mp4"]
