"""Manifests, class lists and splits; no video is opened."""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sosampler.datasets.manifest import Item, Manifest, make_splits, read_manifest
from sosampler.datasets.manifest_io import read_classes
from sosampler.errors import InvalidArgument
from sosampler.video.source import IMAGE_SUFFIXES


def write(folder: Path, text: str, name: str = "videos.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


class TestCsv:
    def test_the_smallest(self, tmp_path: Path) -> None:
        manifest = read_manifest(write(tmp_path, "path,label\na.mp4,dog\nsub/b.mp4,cat\n"))
        assert manifest.classes == ("cat", "dog")
        assert manifest.items == (Item("a.mp4", "a.mp4", (1,)), Item("sub/b.mp4", "sub/b.mp4", (0,)))
        assert not manifest.multi_label
        assert manifest.path_of(manifest.items[1]) == tmp_path / "sub/b.mp4"
        assert manifest.split("train") == manifest
        assert len(manifest.split("test")) == 0

    def test_everything(self, tmp_path: Path) -> None:
        text = (
            "\ufeffEnd, id ,path,Labels,split,group,start,notes\r\n"
            '7.5,one,"a, b.mp4",dog; cat,Train,g,1,x\r\n'
            "\r\n"
            ",,c.mp4,,VAL,,2.5,\r\n"
            "3,,c.mp4,cat|dog|cat,validation,,0,\r\n"
        )
        manifest = read_manifest(write(tmp_path, text))
        assert manifest.multi_label
        assert manifest.items == (
            Item("one", "a, b.mp4", (0, 1), "train", "g", 1.0, 7.5),
            Item("c.mp4#2.5-", "c.mp4", (), "dev", "", 2.5, None),
            Item("c.mp4#0-3", "c.mp4", (0, 1), "dev", "", 0.0, 3.0),
        )
        assert manifest.counts() == {
            "videos": 3,
            "classes": 2,
            "groups": 2,
            "multi_label": True,
            "exclusive": False,
            "splits": {"train": 1, "dev": 2},
        }

    def test_root_moves_relative_paths_only(self, tmp_path: Path) -> None:
        path = write(tmp_path, "path,label\na.mp4,x\n/far/b.mp4,x\n")
        manifest = read_manifest(path, root=Path("/videos"))
        assert [manifest.path_of(item) for item in manifest.items] == [Path("/videos/a.mp4"), Path("/far/b.mp4")]

    def test_numbers_without_a_class_list_are_names_in_the_order_of_their_value(self, tmp_path: Path) -> None:
        manifest = read_manifest(write(tmp_path, "path,label\na,10\nb,9\nc,100\n"))
        assert manifest.classes == ("9", "10", "100")
        assert [item.labels for item in manifest.items] == [(1,), (0,), (2,)]

    def test_a_label_column_is_split_where_several_labels_are_asked_for(self, tmp_path: Path) -> None:
        path = write(tmp_path, "path,label\na,x|y\nb,y\n")
        assert [item.labels for item in read_manifest(path, multi_label=True).items] == [(0, 1), (1,)]
        assert read_manifest(path).classes == ("x|y", "y")

    def test_single_label_may_be_asked_of_a_labels_column(self, tmp_path: Path) -> None:
        assert not read_manifest(write(tmp_path, "path,labels\na,x\n"), multi_label=False).multi_label
        with pytest.raises(InvalidArgument, match=r"videos.csv, line 2: has 2 labels where exactly one"):
            read_manifest(write(tmp_path, "path,labels\na,x;y\n"), multi_label=False)


class TestJsonl:
    def test_labels_of_each_kind(self, tmp_path: Path) -> None:
        lines = [{"path": "a", "label": "dog", "start": 1}, {"path": "b", "label": 0, "id": 7, "group": None}]
        path = write(tmp_path, "\n".join(map(json.dumps, lines)) + "\n\n", "v.jsonl")
        manifest = read_manifest(path, classes=["cat", "dog"])
        assert manifest.items == (Item("a#1-", "a", (1,), start=1.0), Item("7", "b", (0,)))

    def test_several(self, tmp_path: Path) -> None:
        path = write(tmp_path, '{"path": "a", "labels": ["x;y", "z"]}\n{"path": "b", "labels": []}\n', "v.jsonl")
        manifest = read_manifest(path)
        assert manifest.classes == ("x;y", "z")
        assert [item.labels for item in manifest.items] == [(0, 1), ()]


CSV_ERRORS = {
    "empty file": ("", "line 1: the column 'path' is missing, found: nothing"),
    "no rows": ("path,label\n\n", "the manifest is empty"),
    "no path": ("video,label\na,x\n", "line 1: the column 'path' is missing, found: video, label"),
    "no label": ("path,split\na,train\n", "line 1: the column 'label' or 'labels' is missing"),
    "semicolons": ("path;label\na;x\n", "separated by commas"),
    "both": ("path,label,labels\na,x,y\n", "both columns 'label' and 'labels'"),
    "column twice": ("path,label,path\na,x,b\n", "the column 'path' occurs twice"),
    "too many fields": ("path,label\na,x\nb,y,z\n", "line 3: has too many fields, 3 instead of 2"),
    "too few fields": ("path,label\na\n", "line 2: has too few fields, 1 instead of 2"),
    "empty label": ("path,label\na,x\nb, \n", "line 3: has 0 labels"),
    "empty path": ("path,label\n ,x\n", "line 2: the path ' ' is empty"),
    "duplicate id": ("path,label,id\na,x,i\nb,x,j\nc,x,i\n", "line 4: the id 'i' is already used by .*line 2"),
    "duplicate path": ("path,label\na,x\na,x\n", "line 3: the id 'a' is already used by .*line 2"),
    "split unknown": ("path,label,split\na,x,fold1\n", "line 2: the split 'fold1' is unknown"),
    "split partly": ("path,label,split\na,x,train\nb,x,\n", "line 3: has no split, .*line 2 has one"),
    "video in two splits": (
        "path,label,split,start,end\na,x,train,0,1\n./a,x,test,1,2\n",
        "line 3: the video './a' is in test, but in train at .*line 2",
    ),
    "group in two splits": (
        "path,label,split,group\na,x,train,g\nb,x,dev,g\n",
        "line 3: the group 'g' is in dev, but in train at .*line 2",
    ),
    "video in two groups": (
        "path,label,group,start,end\na,x,g,0,1\na,x,h,1,2\n",
        "line 3: the video a is in group 'h', but in group 'g'",
    ),
    "video written twice": ("path,label,start,end\na,x,0,1\n./a,x,1,2\n", "line 3: the video ./a is in group './a'"),
    "start negative": ("path,label,start\na,x,-1\n", "line 2: start=-1.0 is not a time in the video"),
    "end before start": ("path,label,start,end\na,x,3,2\n", "line 2: end=2.0 must be after start=3.0"),
    "end at start": ("path,label,start,end\na,x,3,3\n", "line 2: end=3.0 must be after start=3.0"),
    "end zero": ("path,label,end\na,x,0\n", "line 2: end=0.0 must be after start=0"),
    "start no number": ("path,label,start\na,x,soon\n", "line 2: start='soon' is not a time"),
    "start not finite": ("path,label,start\na,x,nan\n", "line 2: start='nan' is not a time"),
    "open quotes": ('path,label\na,"x\n', "line 2: is not CSV"),
    "null": ("path,label\na\0,x\n", "line 2: the path"),
    "name over two lines": ('path,label\na,"x\ny"\n', "cannot be the name of a class"),
}


@pytest.mark.parametrize("case", CSV_ERRORS)
def test_a_bad_csv_is_refused_with_its_line(tmp_path: Path, case: str) -> None:
    text, says = CSV_ERRORS[case]
    path = write(tmp_path, text)
    with pytest.raises(InvalidArgument, match=says) as error:
        read_manifest(path)
    assert str(path) in str(error.value) or case == "name over two lines"


JSONL_ERRORS = {
    "no json": ('{"path": "a", "label": "x"}\n{"path"\n', "line 2: is not JSON"),
    "no object": ("[1]\n", "line 1: is not a JSON object"),
    "empty": ("\n", "the manifest is empty"),
    "both": ('{"path": "a", "label": "x", "labels": ["x"]}\n', "line 1: both"),
    "mixed": (
        '{"path": "a", "label": "x"}\n{"path": "b", "labels": ["x"]}\n',
        "line 2: has 'labels' where the lines before have 'label'",
    ),
    "key twice": ('{"path": "a", "path": "b", "label": "x"}\n', "line 1: the key 'path' occurs twice"),
    "labels no list": ('{"path": "a", "labels": "x"}\n', "line 1: labels='x' is not a list"),
    "label is true": ('{"path": "a", "label": true}\n', "line 1: the label True is neither"),
    "label is a fraction": ('{"path": "a", "label": 1.5}\n', "line 1: the label 1.5 is neither"),
    "path no text": ('{"path": 3, "label": "x"}\n', "line 1: path=3 is not a string"),
    "start text": ('{"path": "a", "label": "x", "start": "1"}\n', "line 1: start='1' is not a time"),
    "start infinite": ('{"path": "a", "label": "x", "start": Infinity}\n', "line 1: start=inf is not a time"),
    "start huge": (f'{{"path": "a", "label": "x", "start": 1{"0" * 400}}}\n', "line 1: start=.* is not a time"),
    "half a character": ('{"path": "\\ud800", "label": "x"}\n', "line 1: .* not UTF-8"),
    "deep": ("[" * 100_000, "line 1: .*nested too deeply"),
}


@pytest.mark.parametrize("case", JSONL_ERRORS)
def test_a_bad_jsonl_is_refused_with_its_line(tmp_path: Path, case: str) -> None:
    text, says = JSONL_ERRORS[case]
    path = write(tmp_path, text, "v.jsonl")
    with pytest.raises(InvalidArgument, match=says) as error:
        read_manifest(path)
    assert str(path) in str(error.value)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([b"", b"path,label\n", b"path,labels,split,start\n", b'{"path": "a", "label": ']),
    st.binary(max_size=60) | st.text('ab,;|"\n\r0.-e{}[]:', max_size=60).map(str.encode),
    st.sampled_from([".csv", ".jsonl"]),
)
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, begin: bytes, rest: bytes, kind: str
) -> None:
    folder = tmp_path_factory.mktemp("f")
    (folder / f"v{kind}").write_bytes(begin + rest)
    try:
        manifest = read_manifest(folder / f"v{kind}")
    except InvalidArgument:
        return
    manifest.write(folder / "again.jsonl")
    assert read_manifest(folder / "again.jsonl") == manifest


class TestFiles:
    def test_not_utf8_names_the_line(self, tmp_path: Path) -> None:
        path = tmp_path / "v.csv"
        path.write_bytes("path,label\na,x\nb,Bücher\n".encode("latin-1"))
        with pytest.raises(InvalidArgument, match=r"v\.csv, line 3: byte 0xfc is not UTF-8"):
            read_manifest(path)

    def test_missing_or_of_another_kind(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match="cannot be read"):
            read_manifest(tmp_path / "no.csv")
        with pytest.raises(InvalidArgument, match="is not a manifest"):
            read_manifest(write(tmp_path, "path,label\n", "v.xlsx"))


class TestClasses:
    def test_a_given_list_fixes_the_order_and_takes_positions(self, tmp_path: Path) -> None:
        names = write(tmp_path, "zebra\r\n\r\nape\r\n", "names.txt")
        path = write(tmp_path, "path,label\na,ape\nb,0\nc,1\n")
        manifest = read_manifest(path, classes=names)
        assert manifest.classes == ("zebra", "ape")
        assert [item.labels for item in manifest.items] == [(1,), (0,), (1,)]

    def test_a_name_wins_over_a_position(self, tmp_path: Path) -> None:
        manifest = read_manifest(write(tmp_path, "path,label\na,1\nb,0\nc,2\n"), classes=["1", "7", "0"])
        assert [item.labels for item in manifest.items] == [(0,), (2,), (2,)]

    @pytest.mark.parametrize(
        ("label", "says"),
        [
            ("dgo", r"line 3: the label 'dgo' is not among the 2 names .*did you mean 'dog'"),
            ("2", "line 3: the label 2 is outside of .* from 0 to 1"),
            ("-1", "line 3: the label '-1' is not among"),
            ("9" * 5000, "line 3: the label '9+' is not among"),
            ("²", "line 3: the label '²' is not among"),
        ],
    )
    def test_a_label_outside_of_the_list(self, tmp_path: Path, label: str, says: str) -> None:
        with pytest.raises(InvalidArgument, match=says):
            read_manifest(write(tmp_path, f"path,label\na,cat\nb,{label}\n"), classes=["cat", "dog"])

    def test_the_saved_list_is_read_back(self, tmp_path: Path) -> None:
        path = write(tmp_path, "path,label\na,x\n")
        write(tmp_path, "y\nx\n", "classes.txt")
        assert read_manifest(path).items[0].labels == (1,)
        write(tmp_path, "z\ny\nx\n", "videos.classes.txt")  # its own comes first
        assert read_manifest(path).classes == ("z", "y", "x")
        assert read_manifest(path, classes=["x"]).classes == ("x",)

    def test_bad_lists(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match="line 3: the class 'x' is already on line 1"):
            read_classes(write(tmp_path, "x\ny\nx\n", "c.txt"))
        with pytest.raises(InvalidArgument, match="holds no class"):
            read_classes(write(tmp_path, "\n", "c.txt"))
        path = write(tmp_path, "path,label\na,x\n")
        for bad in ([], ["x", "x"], ["x", ""], [" x"], ["x\ny"]):
            with pytest.raises(InvalidArgument, match="class"):
                read_manifest(path, classes=bad)


class TestFolders:
    def test_a_folder_for_each_class(self, tmp_path: Path) -> None:
        touch(tmp_path / "dog/b.mp4", tmp_path / "dog/deep/a.MKV", tmp_path / "cat/a.webm", tmp_path / "cat/note.txt")
        touch(tmp_path / "cat/dump/img_1.jpg", tmp_path / "cat/dump/img_2.jpg", tmp_path / ".git/x.mp4")
        manifest = read_manifest(tmp_path)
        assert manifest.classes == ("cat", "dog")
        assert [(item.path, item.labels) for item in manifest.items] == [
            ("cat/a.webm", (0,)),
            ("cat/dump", (0,)),
            ("dog/b.mp4", (1,)),
            ("dog/deep/a.MKV", (1,)),
        ]
        assert {item.split for item in manifest.items} == {""}
        assert manifest.path_of(manifest.items[0]).exists()

    def test_pictures_by_the_same_function(self, tmp_path: Path) -> None:
        touch(tmp_path / "cat/1.jpg", tmp_path / "cat/2.PNG", tmp_path / "dog/x/3.jpeg", tmp_path / "dog/a.mp4")
        manifest = read_manifest(tmp_path, suffixes=IMAGE_SUFFIXES)
        assert [item.path for item in manifest.items] == ["cat/1.jpg", "cat/2.PNG", "dog/x/3.jpeg"]

    def test_splits_above_the_classes(self, tmp_path: Path) -> None:
        touch(tmp_path / "train/dog/a.mp4", tmp_path / "train/cat/a.mp4", tmp_path / "val/dog/b.mp4")
        touch(tmp_path / "test/bird/a.mp4")
        manifest = read_manifest(tmp_path)
        assert manifest.classes == ("bird", "cat", "dog")
        assert {item.path: (item.split, item.labels) for item in manifest.items} == {
            "train/cat/a.mp4": ("train", (1,)),
            "train/dog/a.mp4": ("train", (2,)),
            "val/dog/b.mp4": ("dev", (2,)),
            "test/bird/a.mp4": ("test", (0,)),
        }

    def test_a_class_may_be_called_train(self, tmp_path: Path) -> None:
        touch(tmp_path / "train/a.mp4", tmp_path / "bus/b.mp4")
        assert read_manifest(tmp_path).classes == ("bus", "train")

    @pytest.mark.parametrize(
        ("files", "says"),
        [
            ([], "holds no class folders"),
            (["a.mp4"], "a.mp4: is beside the class folders"),
            (["cat/a.mp4", "b.mp4"], "b.mp4: is beside the class folders"),
            (["cat/a.txt"], "cat: the class folder holds none of"),
            (["cat/1.jpg"], "cat: the class folder holds none of"),
            (["train/a.mp4", "test/cat/b.mp4"], "a.mp4: is beside the class folders"),
            (["train/cat/a.mp4", "extra/cat/b.mp4"], "train look like splits, extra do not"),
        ],
    )
    def test_bad_folders(self, tmp_path: Path, files: list[str], says: str) -> None:
        touch(*(tmp_path / name for name in files))
        with pytest.raises(InvalidArgument, match=says):
            read_manifest(tmp_path)

    def test_a_folder_that_cannot_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its videos would be missing without a word."""
        touch(tmp_path / "cat/a.mp4", tmp_path / "dog/deep/b.mp4")
        scan = os.scandir

        def refuse(path: Any) -> Any:
            if Path(path).name == "deep":
                raise PermissionError(13, "Permission denied", str(path))
            return scan(path)

        monkeypatch.setattr(os, "scandir", refuse)
        with pytest.raises(InvalidArgument, match=r"deep: cannot be read \(Permission denied\); make it readable"):
            read_manifest(tmp_path)

    def test_a_class_outside_of_the_list(self, tmp_path: Path) -> None:
        touch(tmp_path / "cat/a.mp4")
        write(tmp_path, "dog\n", "classes.txt")
        with pytest.raises(InvalidArgument, match=r"a.mp4: the label 'cat' is not among the 1 names of .*classes.txt"):
            read_manifest(tmp_path)


names = st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters=";|"), min_size=1, max_size=6).map(
    str.strip
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    classes = tuple(draw(st.lists(names.filter(bool), min_size=1, max_size=5, unique=True)))
    multi = draw(st.booleans())
    with_splits = draw(st.booleans())
    items = []
    for number in range(draw(st.integers(1, 8))):
        some = draw(st.sets(st.integers(0, len(classes) - 1), min_size=0 if multi else 1, max_size=5 if multi else 1))
        start = draw(st.none() | st.floats(0, 1e4))
        end = draw(st.none() | st.floats((start or 0) + 0.001, 2e4))
        path = f"{draw(names)}{number}"
        items.append(
            Item(
                id=draw(st.sampled_from(["", "i"])) + f"{number}",
                path=path,
                labels=tuple(sorted(some)),
                split=draw(st.sampled_from(["train", "dev", "test"])) if with_splits else "",
                group=draw(st.sampled_from(["", f"g{number}"])),
                start=start,
                end=end,
            )
        )
    return Manifest(tuple(items), classes, multi)


class TestWriting:
    @settings(max_examples=60, deadline=None)
    @given(manifests(), st.sampled_from([".csv", ".jsonl"]))
    def test_what_is_written_is_read(
        self, tmp_path_factory: pytest.TempPathFactory, manifest: Manifest, kind: str
    ) -> None:
        folder = tmp_path_factory.mktemp("w")
        manifest = replace(manifest, root=folder)
        classes_file = manifest.write(folder / f"v{kind}")
        assert classes_file == folder / "classes.txt"
        assert read_manifest(folder / f"v{kind}") == manifest
        assert sorted(path.name for path in folder.iterdir()) == sorted(["classes.txt", f"v{kind}"])

    def test_default_ids_survive(self, tmp_path: Path) -> None:
        read = read_manifest(write(tmp_path, "path,label,start,end\na,x,0.1,0.30000000000000004\nb,y,,\n"))
        read.write(tmp_path / "other.csv")
        assert read_manifest(tmp_path / "other.csv") == read

    def test_another_class_list_is_not_overwritten(self, tmp_path: Path) -> None:
        first = Manifest((Item("a", "a", (0,)),), ("x",), root=tmp_path)
        second = Manifest((Item("a", "a", (1,)),), ("y", "x"), root=tmp_path)
        first.write(tmp_path / "first.csv")
        assert second.write(tmp_path / "second.csv") == tmp_path / "second.classes.txt"
        assert read_manifest(tmp_path / "first.csv") == first
        assert read_manifest(tmp_path / "second.csv") == second
        first.write(tmp_path / "second.csv")  # its own list must not outlive it
        assert read_manifest(tmp_path / "second.csv") == first

    def test_paths_lead_to_the_same_files_from_another_folder(self, tmp_path: Path) -> None:
        videos = tmp_path / "data" / "videos"
        manifest = Manifest((Item("i", "k/a.mp4", (0,)), Item("j", "/far/b.mp4", (0,))), ("x",), root=videos)
        for out in (tmp_path / "above.csv", tmp_path / "beside" / "m.jsonl"):
            manifest.write(out)
            read = read_manifest(out)
            assert [read.path_of(item) for item in read.items] == [videos / "k/a.mp4", Path("/far/b.mp4")]
            assert [item.id for item in read.items] == ["i", "j"]
        assert read_manifest(tmp_path / "above.csv").items[0].path == "data/videos/k/a.mp4"

    def test_a_separator_in_a_name_needs_jsonl(self, tmp_path: Path) -> None:
        manifest = Manifest((Item("a", "a", (0, 1)),), ("x;y", "z"), multi_label=True, root=tmp_path)
        with pytest.raises(InvalidArgument, match=r"'x;y' contains a separator .*\.jsonl"):
            manifest.write(tmp_path / "v.csv")
        assert list(tmp_path.iterdir()) == []
        manifest.write(tmp_path / "v.jsonl")
        assert read_manifest(tmp_path / "v.jsonl") == manifest

    def test_nothing_to_write_or_another_ending(self, tmp_path: Path) -> None:
        manifest = Manifest((Item("a", "a", (0,), "train"),), ("x",), root=tmp_path)
        with pytest.raises(InvalidArgument, match="no video to write"):
            manifest.split("dev").write(tmp_path / "v.csv")
        with pytest.raises(InvalidArgument, match=r"\.txt"):
            manifest.write(tmp_path / "v.txt")

    @pytest.mark.parametrize(
        "item",
        [Item("a", "a", ()), Item("a", "a", (1,)), Item("a", "a", (-1,)), Item("a", "a", (0,), split="val")],
    )
    def test_manifests_made_in_python_are_checked_too(self, item: Item) -> None:
        with pytest.raises(InvalidArgument, match=r"item 0 \(a\)"):
            Manifest((item,), ("x",))

    def test_repr(self) -> None:
        assert repr(Manifest((Item("a", "a", (0,)),), ("x",))) == "Manifest(1 videos, 1 classes: 1 train)"


def made(groups: dict[str, list[int]], classes: int) -> Manifest:
    """A manifest with these groups, each with videos of these classes."""
    items = [
        Item(f"{group}/{n}", f"{group}/{n}.mp4", (label,), group=group)
        for group, labels in groups.items()
        for n, label in enumerate(labels)
    ]
    return Manifest(tuple(items), tuple(f"c{n}" for n in range(classes)))


class TestSplits:
    @settings(max_examples=40, deadline=None)
    @given(
        st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=4, max_size=60),
        st.integers(0, 3),
        st.sampled_from([0.1, 0.2, 0.4]),
        st.randoms(use_true_random=False),
    )
    def test_whole_groups_whatever_the_order(
        self, groups: list[list[int]], seed: int, share: float, shuffler: random.Random
    ) -> None:
        manifest = made({f"g{n}": labels for n, labels in enumerate(groups)}, 5)
        homes = [{n for n, labels in enumerate(groups) if c in labels} for c in range(5)]
        small = [n for n, labels in enumerate(groups) if 2 * len(labels) <= len(manifest)]
        if all(any(home == {n} for home in homes) for n in small):  # taking any of them would lose a class
            with pytest.raises(InvalidArgument, match="takes no group"):
                make_splits(manifest, dev_share=share, seed=seed)
            return
        split = make_splits(manifest, dev_share=share, seed=seed)
        homes_of: dict[str, set[str]] = {}
        for item in split.items:
            homes_of.setdefault(item.group, set()).add(item.split)
        assert all(len(homes) == 1 for homes in homes_of.values())
        assert [replace(item, split="") for item in split.items] == list(manifest.items)
        assert 0 < len(split.split("dev")) < len(manifest)
        # No class is lost to training.
        assert {item.labels for item in split.split("train").items} == {item.labels for item in manifest.items}
        mixed = list(manifest.items)
        shuffler.shuffle(mixed)
        again = make_splits(replace(manifest, items=tuple(mixed)), dev_share=share, seed=seed)
        assert {item.id: item.split for item in again.items} == {item.id: item.split for item in split.items}

    def test_each_class_in_its_share(self) -> None:
        sizes = {0: 1000, 1: 100, 2: 40, 3: 10}
        manifest = made({f"{c}-{n}": [c] for c, size in sizes.items() for n in range(size)}, 4)
        dev = make_splits(manifest, dev_share=0.1).split("dev")
        assert Counter(item.labels[0] for item in dev.items) == {0: 100, 1: 10, 2: 4, 3: 1}

    def test_many_small_classes_still_give_the_whole_share(self) -> None:
        manifest = made({f"{c}-{n}": [c] for c in range(100) for n in range(4)}, 100)
        counts = Counter(item.labels[0] for item in make_splits(manifest, dev_share=0.1).split("dev").items)
        assert sum(counts.values()) == 40
        assert max(counts.values()) == 1

    def test_groups_of_all_sizes_are_drawn(self) -> None:
        # If small groups were preferred, dev would be unlike train.
        rng = random.Random(0)
        groups = {f"g{n}": [n % 5] * rng.choice([1, 2, 8]) for n in range(600)}
        manifest = made(groups, 5)
        dev = make_splits(manifest, dev_share=0.2).split("dev")
        share_of_large = Counter(len(groups[item.group]) for item in dev.items)[8] / len(dev)
        assert abs(len(dev) / len(manifest) - 0.2) < 0.01
        expected = sum(len(g) for g in groups.values() if len(g) == 8) / len(manifest)
        assert abs(share_of_large - expected) < 0.08

    def test_the_seed_matters_and_no_other_state(self) -> None:
        manifest = made({f"g{n}": [n % 3] for n in range(90)}, 3)
        chosen = [{item.id for item in make_splits(manifest, seed=seed).split("dev").items} for seed in (0, 0, 1)]
        assert chosen[0] == chosen[1] != chosen[2]
        assert [len(some) for some in chosen] == [9, 9, 9]

    def test_test_and_dev_together(self) -> None:
        manifest = made({f"g{n}": [n % 2] for n in range(100)}, 2)
        counts = make_splits(manifest, dev_share=0.1, test_share=0.3).counts()
        assert counts["splits"] == {"train": 60, "dev": 10, "test": 30}

    def test_what_is_there_stays(self) -> None:
        items = [Item(f"{n}", f"{n}", (0,), split) for n, split in enumerate(["train"] * 20 + ["test"] * 5)]
        manifest = Manifest(tuple(items), ("x",))
        split = make_splits(manifest)
        assert split.counts()["splits"] == {"train": 18, "dev": 2, "test": 5}
        assert split.items[20:] == manifest.items[20:]
        assert make_splits(split, seed=5) == split
        with pytest.raises(InvalidArgument, match="has a test split"):
            make_splits(manifest, test_share=0.1)

    def test_parts_of_a_video_stay_together(self, tmp_path: Path) -> None:
        rows = "".join(f"v{n}.mp4,x,{part},{part + 1}\n" for n in range(30) for part in range(3))
        split = make_splits(read_manifest(write(tmp_path, "path,label,start,end\n" + rows)), dev_share=0.2)
        assert len(split.split("dev")) == 18
        assert len({item.path for item in split.split("dev").items}) == 6

    def test_videos_without_a_label(self) -> None:
        items = tuple(Item(f"{n}", f"{n}", (0,) if n % 2 else ()) for n in range(40))
        split = make_splits(Manifest(items, ("x",), multi_label=True), dev_share=0.1)
        assert sorted(len(item.labels) for item in split.split("dev").items) == [0, 0, 1, 1]

    def test_no_dev_is_possible(self) -> None:
        with pytest.raises(InvalidArgument, match=r"dev_share=0\.1 takes no group out of the 1 in train"):
            make_splits(made({"g": [0, 0, 0]}, 1))

    def test_large_groups_give_the_smallest(self) -> None:
        split = make_splits(made({"a": [0] * 9, "b": [0] * 8, "c": [0] * 10}, 1), dev_share=0.01)
        assert {item.group for item in split.split("dev").items} == {"b"}

    @pytest.mark.parametrize(
        "bad",
        [{"dev_share": -0.1}, {"dev_share": 1}, {"dev_share": 0.5, "test_share": 0.5}, {"seed": -1}, {"seed": 0.5}],
    )
    def test_bad_arguments(self, bad: dict[str, float]) -> None:
        with pytest.raises(InvalidArgument):
            make_splits(made({f"g{n}": [0] for n in range(9)}, 1), **bad)  # type: ignore[arg-type]

    def test_nothing_asked(self) -> None:
        split = make_splits(made({f"g{n}": [0] for n in range(9)}, 1), dev_share=0)
        assert split.counts()["splits"] == {"train": 9}


def test_a_hundred_thousand_lines_in_seconds(tmp_path: Path) -> None:
    rows = "".join(f"videos/{n}.mp4,class {n % 400},g{n // 3}\n" for n in range(100_000))
    path = write(tmp_path, "path,label,group\n" + rows)
    start = time.perf_counter()
    manifest = read_manifest(path)
    split = make_splits(manifest, dev_share=0.1)
    split.write(tmp_path / "split.jsonl")
    took = time.perf_counter() - start
    assert abs(len(split.split("dev")) - 10_000) <= 1  # whole groups of three
    assert len(manifest.classes) == 400
    per_class = Counter(item.labels[0] for item in split.split("dev").items)
    # A tenth is 25; groups here mix three classes, and drawing them blindly spreads from about 11 to 40.
    assert min(per_class.values()) >= 20
    assert max(per_class.values()) <= 30
    assert took < 60  # a few seconds; a quadratic loop takes hours


class TestExclusive:
    """Labels may be sets (the metric) although classes exclude each other (activation and losses)."""

    def test_by_default_as_the_labels(self, tmp_path: Path) -> None:
        assert read_manifest(write(tmp_path, "path,label\na.mp4,x\n")).exclusive
        assert not read_manifest(write(tmp_path, "path,labels\na.mp4,x;y\n")).exclusive

    @pytest.mark.parametrize(("word", "expected"), [("true", True), ("False", False)])
    @pytest.mark.parametrize("column", ["label", "labels"])
    def test_a_column_decides(self, tmp_path: Path, column: str, word: str, expected: bool) -> None:
        path = write(tmp_path, f"path,{column},exclusive\na.mp4,x,{word}\nb.mp4,y,{word}\n")
        manifest = read_manifest(path)
        assert (manifest.multi_label, manifest.exclusive) == (column == "labels", expected)
        assert read_manifest(path, exclusive=not expected).exclusive is not expected

    @pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
    @pytest.mark.parametrize("several", [False, True])
    @pytest.mark.parametrize("exclusive", [False, True])
    def test_written_and_read_again(self, tmp_path: Path, suffix: str, several: bool, exclusive: bool) -> None:
        items = (Item("a.mp4", "a.mp4", (0,)), Item("b.mp4", "b.mp4", (0, 1) if several else (1,)))
        manifest = Manifest(items, ("x", "y"), several, tmp_path, exclusive=exclusive)
        manifest.write(tmp_path / f"m{suffix}")
        assert read_manifest(tmp_path / f"m{suffix}") == manifest
        assert ("exclusive" in (tmp_path / f"m{suffix}").read_text()) is (exclusive == several)
        assert manifest.split("train").exclusive is exclusive

    def test_lines_must_agree(self, tmp_path: Path) -> None:
        path = write(tmp_path, "path,labels,exclusive\na.mp4,x,true\nb.mp4,y,\n")
        with pytest.raises(InvalidArgument, match=r"line 3: 'exclusive' differs from .*line 2; give the same"):
            read_manifest(path)
        path = write(tmp_path, "path,labels,exclusive\na.mp4,x,maybe\n")
        with pytest.raises(InvalidArgument, match=r"exclusive='maybe' must be true or false"):
            read_manifest(path)
