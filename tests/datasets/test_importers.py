"""Official files, written by hand in their published form, become manifests."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from sosampler.datasets.catalog import CATALOG
from sosampler.datasets.importers.build import Imported, import_dataset
from sosampler.datasets.importers.readers import READERS
from sosampler.datasets.manifest import Manifest, read_manifest
from sosampler.errors import InvalidArgument


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    (tmp_path / "videos").mkdir()
    return tmp_path / "videos"


def put(videos: Path, *names: str) -> None:
    for name in names:
        path = videos / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")


def table(manifest: Manifest) -> dict[str, tuple[str, list[str], str]]:
    """id -> (path, class names, split)."""
    return {
        item.id: (item.path, [manifest.classes[label] for label in item.labels], item.split) for item in manifest.items
    }


def check_round_trip(imported: Imported, folder: Path) -> None:
    """What the importer writes is read back with the same videos, classes and splits, from another folder too."""
    for out in (folder / "out.csv", folder / "deep" / "out.jsonl"):
        imported.write(out)
        read = read_manifest(out)
        assert [read.path_of(item).resolve() for item in read.items] == [
            imported.manifest.path_of(item).resolve() for item in imported.manifest.items
        ]
        assert read.classes == imported.manifest.classes
        assert [(i.id, i.labels, i.split, i.group, i.start, i.end) for i in read.items] == [
            (i.id, i.labels, i.split, i.group, i.start, i.end) for i in imported.manifest.items
        ]
        assert Path(f"{out}.missing.txt").read_text(encoding="utf-8").split() == list(imported.missing)


ACTIVITYNET: dict[str, Any] = {
    "version": "VERSION 1.3",
    "taxonomy": [],
    "database": {
        "sJFgo9H6zNo": {
            "duration": 138.4,
            "subset": "training",
            "resolution": "1280x720",
            "url": "https://www.youtube.com/watch?v=sJFgo9H6zNo",
            "annotations": [
                {"label": "Fun sliding down", "segment": [0.0, 10.5]},
                {"label": "BMX", "segment": [20.0, 30.5]},
                {"label": "Fun sliding down", "segment": [40.0, 50.5]},
            ],
        },
        "--1DO2V4K74": {
            "subset": "validation",
            "annotations": [{"label": "Baking cookies", "segment": [0, 1]}],
        },
        "dumped_____": {"subset": "validation", "annotations": [{"label": "BMX", "segment": [0, 1]}]},
        "gone_______": {"subset": "training", "annotations": [{"label": "Ballet", "segment": [0, 1]}]},
        "hidden_____": {"subset": "testing", "annotations": []},
    },
}


class TestActivityNet:
    def load(self, tmp_path: Path, videos: Path, content: Any = ACTIVITYNET, **options: Any) -> Imported:
        path = write(tmp_path, "activity_net.v1-3.min.json", json.dumps(content, indent=1))
        return import_dataset("activitynet", [path], videos=videos, **options)

    def test_videos_with_all_their_classes(self, tmp_path: Path, videos: Path) -> None:
        put(videos, "v_sJFgo9H6zNo.mp4", "val/--1DO2V4K74.mkv", "v_unrelated.mp4", "v_gone_______.txt")
        # FrameExit calls the folders of its frames after the video files.
        put(videos, "frames/v_dumped_____.mp4/image_00001.jpeg", "frames/v_dumped_____.mp4/image_00002.jpeg")
        imported = self.load(tmp_path, videos)
        assert table(imported.manifest) == {
            "sJFgo9H6zNo": ("v_sJFgo9H6zNo.mp4", ["BMX", "Fun sliding down"], "train"),
            "--1DO2V4K74": ("val/--1DO2V4K74.mkv", ["Baking cookies"], "test"),
            "dumped_____": ("frames/v_dumped_____.mp4", ["BMX"], "test"),
        }
        assert imported.manifest.multi_label
        # Classes of missing videos keep their place, or positions would depend on what could be downloaded.
        assert imported.manifest.classes == ("BMX", "Baking cookies", "Ballet", "Fun sliding down")
        assert imported.missing == ("gone_______",)
        assert imported.unlabelled == ("hidden_____",)
        check_round_trip(imported, tmp_path)

    def test_validation_may_be_dev_and_the_order_of_classes_given(self, tmp_path: Path, videos: Path) -> None:
        put(videos, "v_sJFgo9H6zNo.mp4", "v_dumped_____.mp4")
        order = write(tmp_path, "order.txt", "Fun sliding down\nBallet\nBaking cookies\nBMX\nZumba\n")
        imported = self.load(tmp_path, videos, classes=order, split_map={"validation": "dev"})
        assert [(item.labels, item.split) for item in imported.manifest.items] == [((0, 3), "train"), ((3,), "dev")]

    def test_frameexits_split_file_is_a_subset(self, tmp_path: Path, videos: Path) -> None:
        put(videos, "v_sJFgo9H6zNo.mp4", "v_dumped_____.mp4")
        split = write(tmp_path, "val.txt", "v_dumped_____.mp4\nv_nowhere____.mp4\n")
        imported = self.load(tmp_path, videos, subset=[split])
        assert list(table(imported.manifest)) == ["dumped_____"]
        assert imported.unknown_in_subset == ("v_nowhere____.mp4",)

    def test_the_file_beside_is_preferred_to_one_in_a_folder(self, tmp_path: Path, videos: Path) -> None:
        put(videos, "a/b/v_sJFgo9H6zNo.mp4", "z/v_sJFgo9H6zNo.webm", "sJFgo9H6zNo.mp4")
        assert table(self.load(tmp_path, videos).manifest)["sJFgo9H6zNo"][0] == "z/v_sJFgo9H6zNo.webm"

    def test_links_in_circles_and_pictures_beside_videos(self, tmp_path: Path, videos: Path) -> None:
        put(videos, "v_sJFgo9H6zNo.mp4", "v_sJFgo9H6zNo.jpg")
        (videos / "again").symlink_to(videos, target_is_directory=True)
        assert table(self.load(tmp_path, videos).manifest)["sJFgo9H6zNo"][0] == "v_sJFgo9H6zNo.mp4"

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            ([], "has no videos under 'database'"),
            ({"database": {}}, "has no videos under 'database'"),
            ({"database": {"a": 3}}, "video a: is not a JSON object"),
            ({"database": {"a": {"subset": "training"}}}, "video a: 'annotations' is not a list"),
            ({"database": {"a": {"annotations": []}}}, "video a: 'subset' is missing"),
            ({"database": {"a": {"subset": "trainig", "annotations": []}}}, "video a: the subset 'trainig' is unknown"),
            ({"database": {"a": {"subset": "training", "annotations": [{}]}}}, "video a: 'label' is missing"),
            ({"database": {"a": {"subset": "testing", "annotations": []}}}, "holds no video with a label"),
        ],
    )
    def test_bad_files(self, tmp_path: Path, videos: Path, content: Any, says: str) -> None:
        with pytest.raises(InvalidArgument, match=says) as error:
            self.load(tmp_path, videos, content)
        assert "activity_net.v1-3.min.json" in str(error.value)

    def test_broken_json_names_the_line(self, tmp_path: Path, videos: Path) -> None:
        path = write(tmp_path, "a.json", '{"database":\n {"x": {,}}}')
        with pytest.raises(InvalidArgument, match=r"a\.json, line 2: is not JSON"):
            import_dataset("activitynet", [path], videos=videos)
        path = write(tmp_path, "a.json", '{"database": {"x": {}, "x": {}}}')
        with pytest.raises(InvalidArgument, match="the key 'x' occurs twice"):
            import_dataset("activitynet", [path], videos=videos)

    def test_nothing_found_says_what_was_looked_for(self, tmp_path: Path, videos: Path) -> None:
        with pytest.raises(InvalidArgument, match=r"holds none of the 4 videos; .* v_sJFgo9H6zNo\.mp4 or sJFgo9H6zNo"):
            self.load(tmp_path, videos)
        with pytest.raises(InvalidArgument, match="is not a folder"):
            self.load(tmp_path, videos / "no")

    def test_a_label_outside_of_the_list(self, tmp_path: Path, videos: Path) -> None:
        put(videos, "v_sJFgo9H6zNo.mp4")
        order = write(tmp_path, "order.txt", "BMX\n")
        with pytest.raises(InvalidArgument, match=r"video sJFgo9H6zNo: the label 'Fun sliding down' is not among"):
            self.load(tmp_path, videos, classes=order)


KINETICS_TRAIN = '''label,youtube_id,time_start,time_end,split,is_cc
"air drumming",--nQbRBEz2s,104,114,train,0
abseiling,-3B32lodo2M,59,69,train,0
abseiling,whole______,5.0,15.0,train,0
abseiling,shared_____,0,10,train,0
"playing the ""gong""",gone_______,0,10,train,0
'''
KINETICS_VAL = """label,youtube_id,time_start,time_end,split
air drumming,7LSJ2Ryv1a8,0,10,validate
abseiling,shared_____,20,30,val
"""
KINETICS_TEST = "youtube_id,time_start,time_end,split\nheldout____,3,13,test\n"


class TestKinetics:
    def load(self, tmp_path: Path, videos: Path, **options: Any) -> Imported:
        files = [
            write(tmp_path, "train.csv", KINETICS_TRAIN),
            write(tmp_path, "val.csv", KINETICS_VAL),
            write(tmp_path, "test.csv", KINETICS_TEST),
        ]
        return import_dataset("kinetics", files, videos=videos, **options)

    def fill(self, videos: Path) -> None:
        put(videos, "train/air drumming/--nQbRBEz2s_000104_000114.mp4", "-3B32lodo2M_000059_000069.mkv")
        put(videos, "whole______.mp4", "7LSJ2Ryv1a8_000000_000010.mp4")
        put(videos, "shared______000000_000010.mp4", "shared______000020_000030.mp4")

    def test_clips_by_either_name(self, tmp_path: Path, videos: Path) -> None:
        self.fill(videos)
        imported = self.load(tmp_path, videos)
        assert table(imported.manifest) == {
            "--nQbRBEz2s_000104_000114": (
                "train/air drumming/--nQbRBEz2s_000104_000114.mp4",
                ["air drumming"],
                "train",
            ),
            "-3B32lodo2M_000059_000069": ("-3B32lodo2M_000059_000069.mkv", ["abseiling"], "train"),
            "whole_______000005_000015": ("whole______.mp4", ["abseiling"], "train"),
            "7LSJ2Ryv1a8_000000_000010": ("7LSJ2Ryv1a8_000000_000010.mp4", ["air drumming"], "test"),
            "shared______000020_000030": ("shared______000020_000030.mp4", ["abseiling"], "test"),
        }
        assert imported.manifest.classes == ("abseiling", "air drumming", 'playing the "gong"')
        assert not imported.manifest.multi_label
        assert imported.missing == ("gone________000000_000010",)
        assert imported.unlabelled == ("heldout_____000003_000013",)
        # One video, two clips, two splits: the one in train goes.
        assert imported.overlapping == ("shared______000000_000010",)
        assert {item.group for item in imported.manifest.items if "whole" in item.id} == {"whole______"}
        assert all(item.start is None for item in imported.manifest.items)
        check_round_trip(imported, tmp_path)

    def test_segments_bound_the_clip_in_whole_videos_only(self, tmp_path: Path, videos: Path) -> None:
        self.fill(videos)
        items = {item.id: item for item in self.load(tmp_path, videos, segments=True).manifest.items}
        assert (items["whole_______000005_000015"].start, items["whole_______000005_000015"].end) == (5.0, 15.0)
        assert items["7LSJ2Ryv1a8_000000_000010"].end is None

    @pytest.mark.parametrize(
        ("lines", "kept"),
        [
            ("air drumming\n", ["--nQbRBEz2s_000104_000114", "7LSJ2Ryv1a8_000000_000010"]),
            ("air_drumming\n", ["--nQbRBEz2s_000104_000114", "7LSJ2Ryv1a8_000000_000010"]),
            ("-3B32lodo2M\n7LSJ2Ryv1a8\n", ["-3B32lodo2M_000059_000069", "7LSJ2Ryv1a8_000000_000010"]),
            ("7LSJ2Ryv1a8_000000_000010.mp4\n", ["7LSJ2Ryv1a8_000000_000010"]),
            ("https://www.youtube.com/watch?v=7LSJ2Ryv1a8\n", ["7LSJ2Ryv1a8_000000_000010"]),
        ],
    )
    def test_mini_kinetics_by_classes_or_ids(self, tmp_path: Path, videos: Path, lines: str, kept: list[str]) -> None:
        self.fill(videos)
        imported = self.load(tmp_path, videos, subset=[write(tmp_path, "mini.txt", lines)])
        assert list(table(imported.manifest)) == kept
        used = {name for _, names, _ in table(imported.manifest).values() for name in names}
        assert set(imported.manifest.classes) == used

    def test_lists_of_ids_add_up_and_classes_narrow(self, tmp_path: Path, videos: Path) -> None:
        self.fill(videos)
        ids = [write(tmp_path, "train_ytid_list.txt", "-3B32lodo2M\n--nQbRBEz2s\nxxxxxxxxxxx\n")]
        ids.append(write(tmp_path, "val_ytid_list.txt", "7LSJ2Ryv1a8\n"))
        imported = self.load(tmp_path, videos, subset=ids)
        assert imported.manifest.counts()["splits"] == {"train": 2, "test": 1}
        assert imported.unknown_in_subset == ("xxxxxxxxxxx",)
        classes = write(tmp_path, "classes200.txt", "air drumming\n")
        assert list(table(self.load(tmp_path, videos, subset=[*ids, classes]).manifest)) == [
            "--nQbRBEz2s_000104_000114",
            "7LSJ2Ryv1a8_000000_000010",
        ]

    def test_bad_subsets(self, tmp_path: Path, videos: Path) -> None:
        self.fill(videos)
        for lines, says in {
            "abseiling\nair druming\n": "line 2: 'air druming' is not a class",
            "xxxxxxxxxxx\n": "names no video",
            "\n": "names nothing",
        }.items():
            with pytest.raises(InvalidArgument, match=says):
                self.load(tmp_path, videos, subset=[write(tmp_path, "mini.txt", lines)])

    def test_one_file_for_two_clips_needs_segments(self, tmp_path: Path, videos: Path) -> None:
        text = "label,youtube_id,time_start,time_end,split\na,v,0,10,train\nb,v,20,30,train\n"
        path = write(tmp_path, "k700.csv", text)
        put(videos, "v.mp4")
        with pytest.raises(InvalidArgument, match=r"v\.mp4: is the video of both v_000000_000010 and v_000020_000030"):
            import_dataset("kinetics", [path], videos=videos)
        items = import_dataset("kinetics", [path], videos=videos, segments=True).manifest.items
        assert [(item.start, item.end, item.group) for item in items] == [(0, 10, "v"), (20, 30, "v")]

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("label,id\nx,y\n", r"line 1: the column 'youtube_id' is missing, found: label, id"),
            ("label,youtube_id,time_start,time_end,split\na,v,0\n", "line 2: has 3 fields instead of 5"),
            ("label,youtube_id,time_start,time_end,split\na,v,x,9,train\n", "line 2: time_start='x' is not a time"),
            ("label,youtube_id,time_start,time_end,split\na,v,9,9,train\n", "line 2: time_end=9 is not after"),
            ("label,youtube_id,time_start,time_end,split\na,v,-1,9,train\n", "line 2: time_start='-1' is not"),
            ("label,youtube_id,time_start,time_end,split\na,,0,9,train\n", "line 2: youtube_id is empty"),
            ("label,youtube_id,time_start,time_end,split\na,v,0,9,holdout\n", "line 2: the subset 'holdout'"),
            ("label,youtube_id,time_start,time_end\na,v,0,9\n", "its name does not contain its split"),
            (f"label,youtube_id,time_start,time_end,split\n{'a' * 200_000},v,0,9,train\n", "line 2: is not CSV"),
            ("", "line 1: the column 'youtube_id' is missing, found: nothing"),
            (
                "label,youtube_id,time_start,time_end,split\na,v,0,9,train\n\nb,v,0,9,train\n",
                "line 4: v_000000_000009 has the label b, but a in .*line 2",
            ),
        ],
    )
    def test_bad_files(self, tmp_path: Path, videos: Path, text: str, says: str) -> None:
        put(videos, "v.mp4")
        with pytest.raises(InvalidArgument, match=says) as error:
            import_dataset("kinetics", [write(tmp_path, "k400.csv", text)], videos=videos)
        assert "k400.csv" in str(error.value)

    def test_without_a_split_column_the_name_or_the_user_says_it(self, tmp_path: Path, videos: Path) -> None:
        put(videos, "v.mp4")
        text = "label,youtube_id,time_start,time_end\na,v,0,9\na,v,0,9\n"
        named = import_dataset("kinetics", [write(tmp_path, "my_val_list.csv", text)], videos=videos)
        assert named.manifest.items[0].split == "test"
        assert named.repeated == 1
        path = write(tmp_path, "list.csv", text)
        assert import_dataset("kinetics", [f"{path}=dev"], videos=videos).manifest.items[0].split == "dev"


class TestSports1M:
    LABELS = "boomerang\naquathlon\naerobatics\nmodel aircraft\n"
    TRAIN = (
        "https://www.youtube.com/watch?v=UDqivjS-lpI 2,0\n"
        "https://www.youtube.com/watch?v=feature_abc&t=3 3\n"
        "https://www.youtube.com/watch?v=ABPsSSS2uY0 1\n"
        "https://www.youtube.com/watch?v=feature_abc 1\n"
    )
    TEST = "https://youtu.be/3DmN3cqNKOs 1\r\nhttps://www.youtube.com/watch?v=ABPsSSS2uY0 0\r\n"

    def test_partitions(self, tmp_path: Path, videos: Path) -> None:
        put(videos, "UDqivjS-lpI.mp4", "feature_abc.mp4", "ABPsSSS2uY0.webm")
        train = tmp_path / "train_partition.txt.gz"
        train.write_bytes(gzip.compress(self.TRAIN.encode()))
        files = [train, write(tmp_path, "test_partition.txt", self.TEST)]
        labels = write(tmp_path, "labels.txt", self.LABELS)
        imported = import_dataset("sports1m", files, videos=videos, classes=labels)
        assert imported.manifest.classes == ("boomerang", "aquathlon", "aerobatics", "model aircraft")
        assert imported.manifest.multi_label
        assert [(item.id, item.labels, item.split) for item in imported.manifest.items] == [
            ("UDqivjS-lpI", (0, 2), "train"),
            ("feature_abc", (1, 3), "train"),  # its two lines together
            ("ABPsSSS2uY0", (0,), "test"),
        ]
        assert imported.missing == ("3DmN3cqNKOs",)
        assert imported.overlapping == ("ABPsSSS2uY0",)
        assert imported.repeated == 1
        check_round_trip(imported, tmp_path)

    def test_the_mini_subset_keeps_the_numbers_of_the_classes(self, tmp_path: Path, videos: Path) -> None:
        put(videos, "UDqivjS-lpI.mp4", "feature_abc.mp4")
        path, labels = write(tmp_path, "train.txt", self.TRAIN), write(tmp_path, "labels.txt", self.LABELS)
        mini = write(tmp_path, "mini.txt", "https://www.youtube.com/watch?v=feature_abc 3\n")
        imported = import_dataset("sports1m", [path], videos=videos, classes=labels, subset=[mini])
        assert [item.labels for item in imported.manifest.items] == [(1, 3)]
        assert len(imported.manifest.classes) == 4

    def test_without_names_the_numbers_are_the_classes(self, tmp_path: Path, videos: Path) -> None:
        put(videos, "UDqivjS-lpI.mp4")
        imported = import_dataset("sports1m", [write(tmp_path, "train.txt", "UDqivjS-lpI 11\n")], videos=videos)
        assert imported.manifest.classes == tuple(map(str, range(12)))
        assert imported.manifest.items[0].labels == (11,)
        assert not imported.manifest.multi_label

    @pytest.mark.parametrize(
        ("line", "says"),
        [
            ("https://www.youtube.com/watch?v=a", "line 1: has 1 fields"),
            ("folder 300 5", "line 1: has 3 fields .* import frames"),
            ("https://www.youtube.com/watch?v=a 7", "line 1: the label 7 is outside of the class list"),
            ("https://www.youtube.com/watch?v=a x", "line 1: the label 'x' is not an int"),
            ("https://www.youtube.com/watch?v=a ,", "line 1: has no label"),
            ("https://example.org/a 1", "line 1: 'https://example.org/a' is not the address of a video"),
        ],
    )
    def test_bad_lines(self, tmp_path: Path, videos: Path, line: str, says: str) -> None:
        labels = write(tmp_path, "labels.txt", self.LABELS)
        with pytest.raises(InvalidArgument, match=says):
            import_dataset("sports1m", [write(tmp_path, "train.txt", line)], videos=videos, classes=labels)

    def test_a_torn_archive(self, tmp_path: Path, videos: Path) -> None:
        path = tmp_path / "train.txt.gz"
        path.write_bytes(gzip.compress(self.TRAIN.encode())[:-9])
        with pytest.raises(InvalidArgument, match="is not a complete gzip file"):
            import_dataset("sports1m", [path], videos=videos)


COIN: dict[str, Any] = {
    "database": {
        "LtRSn-ntcLY": {
            "duration": 131.0309,
            "class": "ReplaceCDDriveWithSSD",
            "video_url": "https://www.youtube.com/embed/LtRSn-ntcLY",
            "start": 56.640895694775196,
            "annotation": [{"id": "212", "segment": [60.0, 69.0], "label": "take out the laptop CD drive"}],
            "subset": "training",
            "end": 85.714362947023,
            "recipe_type": 131,
        },
        "gO7dPb3rQ8k": {"class": "UseAnalyticalBalance", "subset": "testing", "recipe_type": 0, "start": 0, "end": 9},
        "4i6V7HTaaSI": {"class": "AssembleBed", "subset": "validation", "recipe_type": 2, "start": 1, "end": 9},
    }
}


class TestCoin:
    def load(self, tmp_path: Path, videos: Path, content: Any = COIN, **options: Any) -> Imported:
        return import_dataset("coin", [write(tmp_path, "COIN.json", json.dumps(content))], videos=videos, **options)

    def test_classes_in_the_order_of_their_numbers(self, tmp_path: Path, videos: Path) -> None:
        put(videos, "131/LtRSn-ntcLY.mp4", "0/gO7dPb3rQ8k/img_00001.jpg")
        imported = self.load(tmp_path, videos)
        assert imported.manifest.classes == ("UseAnalyticalBalance", "AssembleBed", "ReplaceCDDriveWithSSD")
        assert table(imported.manifest) == {
            "LtRSn-ntcLY": ("131/LtRSn-ntcLY.mp4", ["ReplaceCDDriveWithSSD"], "train"),
            "gO7dPb3rQ8k": ("0/gO7dPb3rQ8k", ["UseAnalyticalBalance"], "test"),
        }
        assert imported.missing == ("4i6V7HTaaSI",)
        assert imported.manifest.items[0].start is None
        check_round_trip(imported, tmp_path)

    def test_the_annotated_part(self, tmp_path: Path, videos: Path) -> None:
        put(videos, "131/LtRSn-ntcLY.mp4")
        imported = self.load(tmp_path, videos, segments=True)
        (item,) = imported.manifest.items
        assert (item.start, item.end) == (56.640895694775196, 85.714362947023)
        check_round_trip(imported, tmp_path)

    @pytest.mark.parametrize(
        ("change", "says"),
        [
            ({"class": ""}, "'class' is missing"),
            ({"recipe_type": "2"}, "recipe_type='2' is not an int"),
            ({"recipe_type": 0}, "two classes share a recipe_type"),
            ({"class": "UseAnalyticalBalance"}, "has recipe_type 2, but 0 before"),
            ({"subset": "maybe"}, "the subset 'maybe' is unknown"),
            ({"start": "x"}, "'x' is not a time"),
            ({"start": 9.5}, "end=9.0 must be after start=9.5"),
        ],
    )
    def test_bad_entries(self, tmp_path: Path, videos: Path, change: dict[str, Any], says: str) -> None:
        put(videos, "2/4i6V7HTaaSI.mp4")
        content = {"database": {**COIN["database"], "4i6V7HTaaSI": {**COIN["database"]["4i6V7HTaaSI"], **change}}}
        with pytest.raises(InvalidArgument, match=says) as error:
            self.load(tmp_path, videos, content, segments=True)
        assert "COIN.json" in str(error.value)

    def test_a_split_given_by_hand_is_refused(self, tmp_path: Path, videos: Path) -> None:
        path = write(tmp_path, "COIN.json", json.dumps(COIN))
        with pytest.raises(InvalidArgument, match="names its subsets itself"):
            import_dataset("coin", [f"{path}=train"], videos=videos)


class TestFrameLists:
    def load(self, tmp_path: Path, videos: Path, text: str, **options: Any) -> Manifest:
        path = write(tmp_path, "some_val_list.txt", text)
        return import_dataset("frames", [path], videos=videos, **options).manifest

    def dump(self, videos: Path, *folders: str) -> None:
        for folder in folders:
            put(videos, f"{folder}/img_00001.jpg", f"{folder}/img_00002.jpg")

    @pytest.mark.parametrize(
        ("text", "labels"),
        [
            ("v_a 3153 10\nv_b 5531 1 0\n", {"v_a": (10,), "v_b": (0, 1)}),  # OCSampler, blanks
            ("a,4165,10\nb,1800,1,1,0\n", {"a": (10,), "b": (0, 1)}),  # AR-Net: commas, a label for each segment
            ("v_a;1;300;10\nv_b;1;280;1\n", {"v_a": (10,), "v_b": (1,)}),  # AdaMML: first and last frame
            ("v_a 1 300 10\nv_b 1 280 1\n", {"v_a": (10,), "v_b": (1,)}),
            ("v_a.mp4 10\nsub/v_b.mp4 1\n", {"v_a.mp4": (10,), "sub/v_b.mp4": (1,)}),  # mmaction's lists of files
            ("v_a; 300; 10\n\nv_b; 280; 1\n", {"v_a": (10,), "v_b": (1,)}),
        ],
    )
    def test_every_form(self, tmp_path: Path, videos: Path, text: str, labels: dict[str, tuple[int, ...]]) -> None:
        self.dump(videos, "v_a", "sub/v_b")
        manifest = self.load(tmp_path, videos, text)
        assert {item.id: item.labels for item in manifest.items} == labels
        assert [item.path for item in manifest.items] == ["v_a", "sub/v_b"]
        assert manifest.classes == tuple(map(str, range(11)))
        assert {item.split for item in manifest.items} == {"test"}
        assert manifest.multi_label == any(len(some) > 1 for some in labels.values())

    def test_names_from_the_class_list(self, tmp_path: Path, videos: Path) -> None:
        self.dump(videos, "v_a", "v_b")
        put(videos, "v_c.mp4")
        classes = write(tmp_path, "label_map.txt", "zebra\nape\n")
        train = write(tmp_path, "anet_train_video.txt", "v_a 10 1\nv_c 9 0\n")
        val = write(tmp_path, "anet_val_video_multi_label.txt", "v_b 10 1 0\nv_gone 5 0\n")
        imported = import_dataset("frames", [train, val], videos=videos, classes=classes)
        assert table(imported.manifest) == {
            "v_a": ("v_a", ["ape"], "train"),
            "v_c": ("v_c.mp4", ["zebra"], "train"),
            "v_b": ("v_b", ["zebra", "ape"], "test"),
        }
        assert imported.missing == ("v_gone",)
        check_round_trip(imported, tmp_path)

    def test_folders_with_blanks_and_equal_names(self, tmp_path: Path, videos: Path) -> None:
        self.dump(videos, "air drumming/x_000000_000010", "arm wrestling/x_000000_000010", "deep/arm wrestling/y")
        text = "arm wrestling/x_000000_000010 60 1\nair drumming/x_000000_000010 60 0\narm wrestling/y 8 1\n"
        manifest = self.load(tmp_path, videos, text)
        assert [item.path for item in manifest.items] == [
            "arm wrestling/x_000000_000010",
            "air drumming/x_000000_000010",
            "deep/arm wrestling/y",
        ]

    def test_the_lists_of_mini_kinetics(self, tmp_path: Path, videos: Path) -> None:
        """As AR-Net's: folders that begin with images/, class names with blanks, clips of one video in two classes."""
        self.dump(videos, "frames/air drumming/7L-J2Ryv1a8_000000_000010", "frames/hurling (sport)/AAA_000001_000011")
        put(videos, "clips/air drumming/AAA_000051_000061.mp4")
        classes = write(tmp_path, "minik_classInd.txt", "air drumming\nhurling (sport)\n")
        train = write(
            tmp_path,
            "mini_train_videofolder.txt",
            "images/train/air drumming/7L-J2Ryv1a8_000000_000010 60 0\n"
            "images/train/hurling (sport)/gone_000001_000011 1 1\n",
        )
        val = write(
            tmp_path,
            "mini_val_videofolder.txt",
            "images/val/hurling (sport)/AAA_000001_000011 300 1\nimages/val/air drumming/AAA_000051_000061 1 0\n",
        )
        imported = import_dataset("frames", [train, val], videos=videos, classes=classes)
        found = [(item.path, item.labels, item.split) for item in imported.manifest.items]
        assert found == [
            ("frames/air drumming/7L-J2Ryv1a8_000000_000010", (0,), "train"),
            ("frames/hurling (sport)/AAA_000001_000011", (1,), "test"),
            ("clips/air drumming/AAA_000051_000061.mp4", (0,), "test"),
        ]
        assert imported.manifest.classes == ("air drumming", "hurling (sport)")
        assert not imported.manifest.multi_label
        assert imported.missing == ("images/train/hurling (sport)/gone_000001_000011",)

    def test_two_lines_never_share_a_dump(self, tmp_path: Path, videos: Path) -> None:
        self.dump(videos, "a/x")
        with pytest.raises(InvalidArgument, match="is the video of both a/x and b/x"):
            self.load(tmp_path, videos, "a/x 60 1\nb/x 60 0\n")

    def test_the_layout_may_be_given(self, tmp_path: Path, videos: Path) -> None:
        self.dump(videos, "a")
        assert self.load(tmp_path, videos, "a 1 3 4\n").items[0].labels == (4,)
        assert self.load(tmp_path, videos, "a 1 3 4\n", layout="count").items[0].labels == (3, 4)
        assert self.load(tmp_path, videos, "a 7 9 4\n", layout="range").items[0].labels == (4,)
        assert self.load(tmp_path, videos, "a 3 4\n", layout="video").items[0].labels == (3, 4)
        with pytest.raises(InvalidArgument, match="--layout='x' is unknown"):
            self.load(tmp_path, videos, "a 3 4\n", layout="x")

    @pytest.mark.parametrize(
        ("text", "says"),
        [
            ("a 10 0\nb\n", "line 2: 'b' does not end in numbers"),
            ("a 10 0\nb 7\n", "line 2: needs a folder, its number of frames, and at least one label"),
            ("a 1 10 0\nb 1 7 0\nc 1 7\nd 1 7 1\n", "line 3: needs a folder, its first and last frame, and at least"),
            ("a 10 -1\n", "line 1: 'a 10 -1' does not end in numbers"),
            ("a 10 3\n", "line 1: the label 3 is outside of the class list"),
            ("", "holds no video with a label"),
        ],
    )
    def test_bad_lines(self, tmp_path: Path, videos: Path, text: str, says: str) -> None:
        self.dump(videos, "a", "b", "c")
        classes = write(tmp_path, "label_map.txt", "zebra\nape\n")
        with pytest.raises(InvalidArgument, match=says):
            self.load(tmp_path, videos, text, classes=classes)

    def test_repeated_lines_that_disagree(self, tmp_path: Path, videos: Path) -> None:
        self.dump(videos, "a")
        with pytest.raises(InvalidArgument, match=r"line 2: a has the label 1, but 0 in .*line 1"):
            self.load(tmp_path, videos, "a 10 0\na 10 1\n")


class TestAll:
    def test_dev_is_carved_from_train_when_asked(self, tmp_path: Path, videos: Path) -> None:
        put(videos, *(f"v{n}.mp4" for n in range(30)))
        train = write(tmp_path, "train.txt", "".join(f"v{n} {n % 2}\n" for n in range(20)))
        test = write(tmp_path, "test.txt", "".join(f"v{n} 0\n" for n in range(20, 30)))
        both = [import_dataset("frames", [train, test], videos=videos, dev_share=0.2, seed=seed) for seed in (0, 1)]
        assert [one.manifest.counts()["splits"] for one in both] == [{"train": 16, "dev": 4, "test": 10}] * 2
        assert both[0].manifest != both[1].manifest

    def test_bad_arguments(self, tmp_path: Path, videos: Path) -> None:
        path = write(tmp_path, "train.txt", "a 1 0\n")
        for arguments, says in (
            (("ucf101", [path]), "data set='ucf101' is unknown; choose one of: activitynet"),
            (("frames", []), "no annotation file was given"),
            (("frames", [f"{path}=fold1"]), "'fold1' is not a split"),
            (("frames", [tmp_path / "train_no.txt"]), "cannot be read"),
        ):
            with pytest.raises(InvalidArgument, match=says):
                import_dataset(*arguments, videos=videos)
        with pytest.raises(InvalidArgument, match="split for validation='eval' is unknown"):
            import_dataset("frames", [path], videos=videos, split_map={"validation": "eval"})

    def test_the_catalog_agrees_with_itself(self) -> None:
        assert {"activitynet-v1.3", "mini-kinetics", "mini-sports1m", "coin"} <= {known.name for known in CATALOG}
        mini = next(known for known in CATALOG if known.name == "mini-kinetics")
        assert (mini.reader, mini.train, mini.test) == ("frames", 121_215, 9_867)
        assert "mengyuest/AR-Net" in mini.where
        assert "s9xie/Mini-Kinetics-200 is another set" in mini.where
        for known in CATALOG:
            assert known.reader in READERS
            assert known.metric in ("mAP", "top-1")
            assert (known.train is None) == (known.test is None)
            assert known.train is None or known.test is None or known.train + known.test == known.videos
