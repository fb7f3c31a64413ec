"""`sosampler select` as a user meets it: exit codes, what is printed, and what is written."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sosampler.video.synthetic import numbered_frame, numbered_video, read_number
from tests.cli.conftest import Ran

POLICIES = "uniform, random, all, centre, keyframe, frame-difference, frameexit"


def by_uniform(args: Sequence[object]) -> list[str]:
    """Most of these tests are about numbers and files, so uniform chooses where they name no policy."""
    words = list(map(str, args))
    return words if "--policy" in words else [*words, "--policy", "uniform"]


@pytest.fixture
def cli(command: Callable[..., Ran]) -> Callable[..., Ran]:
    return lambda *args: command("select", *by_uniform(args))


def run_process(*args: object) -> Ran:
    command = [sys.executable, "-m", "sosampler", "select", *by_uniform(args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return Ran(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def short_clips() -> dict[int, bytes]:
    """Videos by their number of frames."""
    return {count: numbered_video(num_frames=count) for count in (20, 24, 30)}


@pytest.fixture
def tree(tmp_path: Path, short_clips: dict[int, bytes]) -> Path:
    """Three videos at three depths, with a capital ending, and a file that is none."""
    root = tmp_path / "videos"
    (root / "deep" / "deeper").mkdir(parents=True)
    (root / "a.mp4").write_bytes(short_clips[20])
    (root / "deep" / "b.MP4").write_bytes(short_clips[24])
    (root / "deep" / "deeper" / "c.mp4").write_bytes(short_clips[30])
    (root / "deep" / "notes.txt").write_text("not a video")
    return root


def names(selections: list[dict[str, Any]]) -> list[str]:
    return [Path(row["video"]).name for row in selections]


def without_timing(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "timing"}


def assert_sentence(ran: Ran, *parts: str) -> None:
    """Exit code 2, nothing on standard output, and one sentence that holds all parts."""
    assert ran.code == 2
    assert ran.out == ""
    assert "Traceback" not in ran.err
    for part in parts:
        assert part in ran.err


# --- as a process of its own -----------------------------------------------------------------------------------------


def test_process_prints_exactly_one_json_object(clip: Path) -> None:
    ran = run_process(clip, "-n", 3, "--json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count("\n") == 1
    assert ran.json["frame_indices"] == [15, 45, 75]


def test_process_prints_the_frames_for_people(clip: Path) -> None:
    ran = run_process(clip, "-n", 3)
    assert (ran.code, ran.err) == (0, "")
    assert re.findall(r"frame +(\d+) +([\d.]+) s", ran.out) == [("15", "0.500"), ("45", "1.500"), ("75", "2.500")]


def test_process_ends_with_a_sentence_for_a_missing_file(tmp_path: Path) -> None:
    ran = run_process(tmp_path / "nowhere.mp4", "--json")
    assert_sentence(ran, "nowhere.mp4: no such file or folder")
    assert ran.err.startswith("sosampler: ")
    assert ran.err.count("\n") == 1


def test_process_ends_with_a_sentence_for_a_number_that_is_none(clip: Path) -> None:
    assert_sentence(run_process(clip, "-n", "abc"), "--num-frames", "integer")


def test_process_reports_one_bad_file_among_many(tree: Path) -> None:
    (tree / "bad.mp4").write_bytes(b"this is no video" * 100)
    ran = run_process(tree, "-n", 2, "--json")
    assert ran.code == 1
    assert "Traceback" not in ran.err
    assert "bad.mp4" in ran.err
    assert names(ran.json["selections"]) == ["a.mp4", "b.MP4", "c.mp4"]
    assert [Path(failure["video"]).name for failure in ran.json["failures"]] == ["bad.mp4"]


# --- what the JSON holds ---------------------------------------------------------------------------------------------


def test_json_holds_what_is_promised(cli: Callable[..., Ran], clip: Path) -> None:
    row = cli(clip, "-n", 3, "--json").json
    times = pytest.approx([0.5, 1.5, 2.5])
    assert row["video"] == str(clip)
    assert row["policy"] == "uniform"
    assert (row["num_frames"], row["num_candidates"]) == (3, 3)
    assert row["frame_indices"] == [15, 45, 75]
    assert row["pts_seconds"] == times
    assert row["scores"] is None
    assert row["candidates"]["mode"] == "exact"
    assert row["candidates"]["frame_indices"] == [15, 45, 75]
    assert row["candidates"]["pts_seconds"] == times
    assert row["video_metadata"] == {
        "total_num_frames": 90,
        "fps": pytest.approx(30.0),
        "width": 192,
        "height": 128,
        "duration": pytest.approx(3.0),
        "video_backend": "pyav",
        "frames_indices": [15, 45, 75],
    }
    parts = [seconds for name, seconds in row["timing"].items() if name != "total"]
    assert row["timing"]["total"] == pytest.approx(sum(parts))
    assert min(parts) > 0


def test_scores_are_those_of_the_chosen_candidates(cli: Callable[..., Ran], clip: Path) -> None:
    row = cli(clip, "-n", 4, "-t", 12, "--policy", "frame-difference", "--json").json
    offered = dict(zip(row["candidates"]["frame_indices"], row["candidates"]["scores"], strict=True))
    assert row["num_candidates"] == len(offered) == 12
    assert row["scores"] == [offered[index] for index in row["frame_indices"]]
    assert sorted(row["scores"]) == sorted(offered.values())[-4:]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("-n 3", [15, 45, 75]),
        ("-n 3 --no-decode", [15, 45, 75]),
        ("-n 3 --grid linspace", [0, 45, 89]),
        ("--policy all -t 3", [15, 45, 75]),
        ("--policy centre -n 2 -t 6", [37, 52]),
        ("--policy keyframe -n 3", [0, 30, 60]),
        ("--policy frameexit -n 3 -t 3", [15, 45, 75]),
        ("-n 3 --candidates keyframe", [0, 30, 60]),
        ("-n 3 --candidates snap --snap-tolerance 0.6", [0, 30, 60]),
        ("-n 3 --candidates snap --snap-tolerance 0.1", [15, 45, 75]),
        ("--fps 1", [0, 30, 60]),
        ("--start 1 --end 2 -n 2", [37, 52]),
        ("-n 5 --candidates keyframe --on-short repeat", [0, 30, 45, 60, 81]),
        ("-n 5 --candidates keyframe --on-short fewer", [0, 30, 60]),
    ],
)
def test_options_decide_which_frames(cli: Callable[..., Ran], clip: Path, options: str, expected: list[int]) -> None:
    row = cli(clip, *options.split(), "--json").json
    assert row["frame_indices"] == expected
    assert row["pts_seconds"] == pytest.approx([index / 30 for index in expected])
    assert row["num_frames"] == len(expected)


def test_eight_frames_are_chosen_where_nothing_says_how_many(cli: Callable[..., Ran], clip: Path) -> None:
    assert cli(clip, "--json").json["num_frames"] == 8


@pytest.mark.parametrize(
    "options", ["-n 4", "-n 4 --policy random", "-n 4 --policy frame-difference", "-n 4 --size 64"]
)
def test_a_repeated_run_gives_the_same_json_apart_from_timing(
    cli: Callable[..., Ran], clip: Path, options: str
) -> None:
    first, second = (cli(clip, *options.split(), "--json").json for _ in range(2))
    assert without_timing(first) == without_timing(second)
    assert set(first["timing"]) == set(second["timing"])


def test_the_seed_changes_a_random_choice(cli: Callable[..., Ran], clip: Path) -> None:
    chosen = [cli(clip, "-n", 4, "--policy", "random", "--seed", seed, "--json").json["frame_indices"] for seed in "12"]
    assert chosen[0] != chosen[1]


# --- what a path may mean --------------------------------------------------------------------------------------------


def test_several_videos_come_in_the_order_given(cli: Callable[..., Ran], tree: Path) -> None:
    ran = cli(tree / "deep" / "b.MP4", tree / "a.mp4", "-n", 2, "--json")
    assert ran.code == 0
    assert (ran.json["num_videos"], ran.json["num_failed"], ran.json["failures"]) == (2, 0, [])
    assert names(ran.json["selections"]) == ["b.MP4", "a.mp4"]
    assert [row["frame_indices"] for row in ran.json["selections"]] == [[6, 18], [5, 15]]


def test_a_video_named_twice_is_done_once(cli: Callable[..., Ran], tree: Path) -> None:
    ran = cli(tree / "a.mp4", tree, tree / "a.mp4", "-n", 2, "--json")
    assert names(ran.json["selections"]) == ["a.mp4", "b.MP4", "c.mp4"]


def test_a_folder_stands_for_all_videos_below_it(cli: Callable[..., Ran], tree: Path) -> None:
    ran = cli(tree, "-n", 2, "--json")
    assert ran.code == 0
    assert [row["video"] for row in ran.json["selections"]] == [
        str(tree / "a.mp4"),
        str(tree / "deep" / "b.MP4"),
        str(tree / "deep" / "deeper" / "c.mp4"),
    ]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.mp4", ["a.mp4"]),
        ("**/*.mp4", ["a.mp4", "c.mp4"]),
        ("deep/*.[mM]*", ["b.MP4"]),
        ("dee?", ["b.MP4", "c.mp4"]),
    ],
)
def test_a_pattern_stands_for_what_it_matches(
    cli: Callable[..., Ran], tree: Path, pattern: str, expected: list[str]
) -> None:
    result = cli(tree / pattern, "-n", 2, "--json").json
    assert names(result.get("selections", [result])) == expected


def test_a_file_name_with_pattern_signs_is_a_file_name(cli: Callable[..., Ran], tree: Path) -> None:
    odd = (tree / "a.mp4").rename(tree / "a [1].mp4")
    assert cli(odd, "-n", 2, "--json").json["video"] == str(odd)


@pytest.mark.parametrize("pattern", ["*.avi", "nowhere/*.mp4", "a?.mp4"])
def test_a_pattern_without_match_is_refused(cli: Callable[..., Ran], tree: Path, pattern: str) -> None:
    assert_sentence(cli(tree / pattern, "--json"), pattern, "matches nothing")


def test_a_pattern_that_matches_only_an_empty_folder_is_refused(cli: Callable[..., Ran], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert_sentence(cli(tmp_path / "empt*", "--json"), "empt")


def test_a_folder_without_videos_is_refused(cli: Callable[..., Ran], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a video")
    assert_sentence(cli(tmp_path, "--json"), str(tmp_path), ".mp4", ".webm")


@pytest.fixture
def frame_dump(tmp_path: Path) -> Path:
    """Twelve numbered pictures whose names sort wrongly as text."""
    folder = tmp_path / "dump"
    folder.mkdir()
    for number in range(12):
        Image.fromarray(numbered_frame(number)).save(folder / f"img_{number}.png")
    return folder


def test_a_folder_of_frame_images_is_one_video(cli: Callable[..., Ran], frame_dump: Path, tmp_path: Path) -> None:
    ran = cli(frame_dump, "-n", 3, "--folder-fps", 10, "--save-frames", tmp_path / "out", "--json")
    assert ran.json["video"] == str(frame_dump)
    assert ran.json["frame_indices"] == [2, 6, 10]
    assert ran.json["pts_seconds"] == pytest.approx([0.2, 0.6, 1.0])
    saved = sorted((tmp_path / "out").iterdir())
    assert [read_number(np.asarray(Image.open(path))) for path in saved] == [2, 6, 10]


def test_a_frame_dump_without_a_rate_is_told_which_one_is_taken(cli: Callable[..., Ran], frame_dump: Path) -> None:
    row = cli(frame_dump, "-n", 1, "--json").json
    assert row["pts_seconds"] == pytest.approx([6 / 25])
    assert any("25 frames a second" in note for note in row["notes"])


def test_frame_dumps_and_videos_may_lie_in_one_folder(
    cli: Callable[..., Ran], frame_dump: Path, short_clips: dict[int, bytes]
) -> None:
    (frame_dump.parent / "a.mp4").write_bytes(short_clips[20])
    ran = cli(frame_dump.parent, "-n", 2, "--json")
    assert names(ran.json["selections"]) == ["a.mp4", "dump"]
    assert [row["video_metadata"]["total_num_frames"] for row in ran.json["selections"]] == [20, 12]


# --- bad videos ------------------------------------------------------------------------------------------------------

BAD_CONTENTS = {"empty": b"", "text": b"this is no video\n" * 200, "cut": None, "missing": None}


def make_bad(kind: str, path: Path, whole: bytes) -> Path:
    if kind != "missing":
        contents = BAD_CONTENTS[kind]
        path.write_bytes(whole[: len(whole) // 3] if contents is None else contents)
    return path


@pytest.mark.parametrize("kind", BAD_CONTENTS)
def test_a_single_bad_file_ends_with_code_2(
    cli: Callable[..., Ran], tmp_path: Path, short_clips: dict[int, bytes], kind: str
) -> None:
    bad = make_bad(kind, tmp_path / "bad.mp4", short_clips[20])
    before = set(tmp_path.iterdir())
    ran = cli(bad, "--json", "--out", tmp_path / "x.jsonl", "--contact-sheet", tmp_path / "x.png")
    assert_sentence(ran, str(bad))
    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", BAD_CONTENTS)
def test_one_bad_file_among_many_does_not_stop_the_rest(cli: Callable[..., Ran], tree: Path, kind: str) -> None:
    bad = make_bad(kind, tree / "bad.mp4", (tree / "a.mp4").read_bytes())
    ran = cli(tree / "a.mp4", bad, tree / "deep", "-n", 2, "--json")
    assert ran.code == 1
    assert (ran.json["num_videos"], ran.json["num_failed"]) == (4, 1)
    assert names(ran.json["selections"]) == ["a.mp4", "b.MP4", "c.mp4"]
    (failure,) = ran.json["failures"]
    assert failure["video"] == str(bad)
    assert str(bad) in failure["error"]
    assert failure["error"] in ran.err
    assert "1 of 4 videos failed" in ran.err


def test_without_json_the_good_ones_are_printed_and_the_bad_one_goes_to_stderr(
    cli: Callable[..., Ran], tree: Path
) -> None:
    bad = make_bad("text", tree / "bad.mp4", b"")
    ran = cli(tree, "-n", 2)
    assert ran.code == 1
    assert all(f"{name}: 2 of 2 exact candidates" in ran.out for name in ("a.mp4", "b.MP4", "c.mp4"))
    assert str(bad) not in ran.out
    assert f"failed: {bad}" in ran.err


def test_an_argument_at_fault_for_one_video_does_not_stop_the_rest(cli: Callable[..., Ran], tree: Path) -> None:
    ran = cli(tree, "-n", 22, "--on-short", "error", "--json")
    assert ran.code == 1
    assert names(ran.json["selections"]) == ["b.MP4", "c.mp4"]
    assert [failure["video"] for failure in ran.json["failures"]] == [str(tree / "a.mp4")]
    assert "only 20 frames" in ran.json["failures"][0]["error"]


# --- --out -----------------------------------------------------------------------------------------------------------

FLAT_NUMBERS = ("num_frames", "num_candidates", "total_num_frames", "width", "height")
FLAT_LISTS = ("frame_indices", "pts_seconds", "scores", "candidate_frame_indices", "candidate_pts_seconds")


def as_flat(row: dict[str, Any]) -> dict[str, Any]:
    """The columns a table should hold for one selection, taken from its JSON."""
    return {
        **{key: row[key] for key in ("video", "policy", "num_frames", "num_candidates")},
        **{key: row[key] for key in ("frame_indices", "pts_seconds", "scores")},
        "candidate_mode": row["candidates"]["mode"],
        "candidate_frame_indices": row["candidates"]["frame_indices"],
        "candidate_pts_seconds": row["candidates"]["pts_seconds"],
        "candidate_moved_seconds": row["candidates"]["moved_seconds"],
        **{key: row["video_metadata"][key] for key in ("total_num_frames", "fps", "duration", "width", "height")},
        "codec": "h264",
        "notes": row["notes"],
    }


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [as_flat(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def read_csv(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with open(path, encoding="utf-8", newline="") as file:
        for cells in csv.DictReader(file):
            row: dict[str, Any] = dict(cells)
            row |= {key: int(row[key]) for key in FLAT_NUMBERS}
            row |= {key: float(row[key]) for key in ("fps", "duration")}
            row |= {
                key: json.loads(row[key]) if row[key] else None
                for key in (*FLAT_LISTS, "candidate_moved_seconds", "notes")
            }
            rows.append(row)
    return rows


def read_parquet(path: Path) -> list[dict[str, Any]]:
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    return parquet.read_table(path).to_pylist()


READERS = {".jsonl": read_jsonl, ".csv": read_csv, ".parquet": read_parquet}


@pytest.mark.parametrize("policy", ["uniform", "frame-difference"])
@pytest.mark.parametrize("suffix", READERS)
def test_the_file_holds_the_selections(cli: Callable[..., Ran], tree: Path, suffix: str, policy: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    options = (tree, "-n", 2, "-t", 6, "--policy", policy, "--json")
    expected = [as_flat(row) for row in cli(*options).json["selections"]]
    out = tree.parent / f"x{suffix}"
    ran = cli(*options, "--out", out)
    assert ran.code == 0
    assert ran.json == {
        "num_videos": 3,
        "num_failed": 0,
        "num_with_notes": 0,
        "out": str(out),
        "num_written": 3,
        "num_done_before": 0,
        "failures": [],
    }
    assert READERS[suffix](out) == expected
    assert {path.name for path in tree.parent.iterdir()} == {"videos", out.name}


@pytest.mark.parametrize("suffix", READERS)
def test_the_file_of_one_video_holds_one_row(cli: Callable[..., Ran], tree: Path, suffix: str) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
    out = tree.parent / f"x{suffix}"
    ran = cli(tree / "a.mp4", "-n", 2, "--json", "--out", out)
    assert READERS[suffix](out) == [as_flat(ran.json)]
    assert ran.json["frame_indices"] == [5, 15]
    assert {path.name for path in tree.parent.iterdir()} == {"videos", out.name}


def test_jsonl_rows_are_whole_selections(cli: Callable[..., Ran], tree: Path) -> None:
    out = tree.parent / "x.jsonl"
    printed = cli(tree, "-n", 2, "--json").json["selections"]
    cli(tree, "-n", 2, "--out", out)
    written = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [without_timing(row) for row in written] == [without_timing(row) for row in printed]


def test_an_earlier_file_is_replaced(cli: Callable[..., Ran], tree: Path) -> None:
    out = tree.parent / "x.jsonl"
    cli(tree, "-n", 2, "--out", out)
    cli(tree / "deep", "-n", 3, "--out", out)
    assert [row["num_frames"] for row in read_jsonl(out)] == [3, 3]


def test_the_rest_is_written_when_one_fails(cli: Callable[..., Ran], tree: Path) -> None:
    bad = make_bad("text", tree / "bad.mp4", b"")
    out = tree.parent / "x.jsonl"
    ran = cli(tree, "-n", 2, "--out", out, "--json")
    assert ran.code == 1
    assert ran.json["num_written"] == 3
    assert [failure["video"] for failure in ran.json["failures"]] == [str(bad)]
    assert names(read_jsonl(out)) == ["a.mp4", "b.MP4", "c.mp4"]


@pytest.mark.parametrize("name", ["x.txt", "x.json", "x.jsonl.gz"])
def test_an_unknown_ending_is_refused_before_any_work(cli: Callable[..., Ran], tree: Path, name: str) -> None:
    assert_sentence(cli(tree, "--out", tree.parent / name), name, ".parquet, .jsonl, .csv")
    assert list(tree.parent.iterdir()) == [tree]


def test_a_name_without_ending_is_a_folder_of_parquet_files(cli: Callable[..., Ran], tree: Path) -> None:
    """It resumes: videos that have a row are not done again, and other options are refused."""
    pq = pytest.importorskip("pyarrow.parquet", reason="Parquet needs pyarrow")
    out = tree.parent / "rows"
    assert cli(tree / "a.mp4", "-n", 2, "--out", out).code == 0
    again = cli(tree, "-n", 2, "-o", out, "--json")
    assert (again.json["num_done_before"], again.json["num_written"]) == (1, 3)
    assert "continuing: 1 of 3 videos are done" in again.err
    expected = [as_flat(row) for row in cli(tree, "-n", 2, "--json").json["selections"]]
    assert pq.read_table(out).to_pylist() == expected
    assert_sentence(cli(tree, "-n", 3, "--out", out), "num_frames=2, now 3")
    assert len(list(out.glob("*.parquet"))) == 2


def test_a_missing_folder_for_the_file_is_refused(cli: Callable[..., Ran], tree: Path) -> None:
    folder = tree.parent / "nowhere"
    assert_sentence(cli(tree, "--out", folder / "x.csv"), str(folder), "does not exist")
    assert not folder.exists()


@pytest.mark.parametrize("videos", [".", "a.mp4"])
def test_a_folder_in_the_place_of_the_file_is_refused(cli: Callable[..., Ran], tree: Path, videos: str) -> None:
    out = tree.parent / "x.jsonl"
    out.mkdir()
    assert_sentence(cli(tree / videos, "--out", out), str(out))
    assert {path.name for path in tree.parent.iterdir()} == {"videos", "x.jsonl"}


# --- --save-frames and --contact-sheet -------------------------------------------------------------------------------


@pytest.mark.parametrize("image_format", ["jpg", "png"])
def test_saved_frames_carry_the_number_in_their_name(
    cli: Callable[..., Ran], clip: Path, tmp_path: Path, image_format: str
) -> None:
    folder = tmp_path / "frames"
    ran = cli(clip, "-n", 5, "--save-frames", folder, "--image-format", image_format, "--json")
    files = sorted(folder.iterdir())
    assert [path.name for path in files] == [
        f"00{place}_frame{index:06d}_{index / 30:.3f}s.{image_format}"
        for place, index in enumerate([9, 27, 45, 63, 81])
    ]
    assert ran.json["frame_indices"] == [9, 27, 45, 63, 81]
    assert [read_number(np.asarray(Image.open(path))) for path in files] == [9, 27, 45, 63, 81]
    assert {Image.open(path).size for path in files} == {(192, 128)}


def test_size_is_the_short_side_of_saved_frames(cli: Callable[..., Ran], clip: Path, tmp_path: Path) -> None:
    cli(clip, "-n", 2, "--size", 64, "--save-frames", tmp_path / "frames")
    assert [Image.open(path).size for path in (tmp_path / "frames").iterdir()] == [(96, 64)] * 2


def test_frames_of_many_videos_go_into_folders_of_their_own(cli: Callable[..., Ran], tree: Path) -> None:
    folder = tree.parent / "frames"
    make_bad("text", tree / "bad.mp4", b"")
    ran = cli(tree, "-n", 2, "--save-frames", folder, "--json")
    for row in ran.json["selections"]:
        saved = sorted((folder / Path(row["video"]).relative_to(tree)).iterdir())
        in_names = [int(re.fullmatch(r"\d{3}_frame(\d{6})_.*s\.jpg", path.name)[1]) for path in saved]  # type: ignore[index]
        assert in_names == row["frame_indices"]
        assert [read_number(np.asarray(Image.open(path))) for path in saved] == in_names
    assert sum(path.is_file() for path in folder.rglob("*")) == 6


def test_a_contact_sheet_of_one_video_opens(cli: Callable[..., Ran], clip: Path, tmp_path: Path) -> None:
    sheet = tmp_path / "made" / "sheet.png"
    assert cli(clip, "-n", 4, "--contact-sheet", sheet, "--json").code == 0
    with Image.open(sheet) as picture:
        picture.load()
        assert picture.format == "PNG"
        # Four pictures side by side, none smaller than it is stored, and room for text.
        assert 4 * 192 <= picture.width <= 2000
        assert 128 < picture.height < 600
    assert list(sheet.parent.iterdir()) == [sheet]


def test_a_contact_sheet_has_a_block_for_each_good_video(cli: Callable[..., Ran], tree: Path) -> None:
    one, three = tree.parent / "one.png", tree.parent / "three.png"
    make_bad("text", tree / "bad.mp4", b"")
    assert cli(tree / "a.mp4", "-n", 3, "--contact-sheet", one).code == 0
    assert cli(tree, "-n", 3, "--contact-sheet", three).code == 1
    small, large = Image.open(one).size, Image.open(three).size
    assert large[0] == small[0]
    assert 2.5 * small[1] < large[1] <= 3 * small[1]


def test_a_contact_sheet_of_more_than_40_videos_is_refused_before_any_work(
    cli: Callable[..., Ran], tmp_path: Path, short_clips: dict[int, bytes]
) -> None:
    folder = tmp_path / "videos"
    folder.mkdir()
    for number in range(41):
        (folder / f"{number:02d}.mp4").write_bytes(short_clips[20])
    ran = cli(folder, "--contact-sheet", tmp_path / "sheet.png", "--out", tmp_path / "x.jsonl")
    assert_sentence(ran, "40 videos", "41", "--save-frames")
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("name", ["sheet.nonsense", "sheet", "clip.mp4/sheet.png"])
def test_a_contact_sheet_that_cannot_be_written_is_refused(
    cli: Callable[..., Ran], clip: Path, tmp_path: Path, name: str
) -> None:
    assert_sentence(cli(clip, "-n", 2, "--contact-sheet", tmp_path / name), name, "cannot be written")
    assert list(tmp_path.iterdir()) == [clip]


def test_frames_that_cannot_be_saved_are_refused(cli: Callable[..., Ran], clip: Path, tmp_path: Path) -> None:
    assert_sentence(cli(clip, "-n", 2, "--save-frames", clip), str(clip), "cannot be written")
    assert list(tmp_path.iterdir()) == [clip]


@pytest.mark.parametrize("option", ["--save-frames", "--contact-sheet"])
def test_no_decode_and_pictures_contradict_each_other(
    cli: Callable[..., Ran], clip: Path, tmp_path: Path, option: str
) -> None:
    assert_sentence(cli(clip, "--no-decode", option, tmp_path / "x.png"), "--no-decode", option)
    assert list(tmp_path.iterdir()) == [clip]


# --- arguments outside of what is allowed ----------------------------------------------------------------------------

WRONG = [
    ("-n 9 -t 4", "num_frames=9", "num_candidates=4"),
    ("-n 0", "num_frames=0", "at least 1"),
    ("-n -3", "num_frames=-3", "at least 1"),
    ("-t 0", "num_candidates=0", "at least 1"),
    ("--policy nope", "policy='nope'", POLICIES),
    ("--candidates nope", "candidates='nope'", "exact, keyframe, snap"),
    ("--grid nope", "grid='nope'", "uniform, linspace, stratified, jitter"),
    ("--on-short nope", "on_short='nope'", "repeat, fewer, error"),
    ("--decoder nope", "decoder='nope'", "pyav, torchcodec"),
    ("--image-format gif", "--image-format='gif'", "jpg, png"),
    ("--policy keyframe --candidates exact", "policy 'keyframe'", "candidates='exact'"),
    ("--policy all -n 3 -t 5", "policy 'all'", "contradict"),
    ("--fps 0", "fps=0", "above 0"),
    ("--fps nan", "fps=nan", "above 0"),
    ("--fps 2 -t 5", "num_candidates=5", "fps=2"),
    ("--start 2 --end 1", "end=1", "start=2"),
    ("--snap-tolerance -1", "snap_tolerance=-1", "at least 0"),
    ("--seed -1", "seed=-1", "at least 0"),
    ("--size 0", "size=0", "at least 1"),
    ("--threads 0", "threads=0", "at least 1"),
    ("--workers 0", "--workers=0", "at least 1"),
    ("--max-pixels 0", "max_pixels=0", "at least 1"),
    ("--max-frames -1", "max_frames=-1", "at least 1"),
    ("--max-duration 0", "max_duration=0", "above 0"),
    ("--folder-fps 0", "folder_fps=0", "above 0"),
]


@pytest.mark.parametrize(("options", "given", "allowed"), WRONG, ids=[wrong[0] for wrong in WRONG])
def test_a_wrong_argument_ends_with_a_sentence(
    cli: Callable[..., Ran], clip: Path, options: str, given: str, allowed: str
) -> None:
    ran = cli(clip, *options.split(), "--json")
    assert_sentence(ran, given, allowed)
    assert ran.err.startswith("sosampler: ")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("option", "value"),
    [("-n", "2.5"), ("-n", "abc"), ("-n", ""), ("-t", "1e3"), ("--seed", "x"), ("--fps", "fast"), ("--size", "64x64")],
)
def test_a_word_in_the_place_of_a_number_is_refused(
    cli: Callable[..., Ran], clip: Path, option: str, value: str
) -> None:
    assert_sentence(cli(clip, option, value), option, "number" if option == "--fps" else "integer")


@pytest.mark.parametrize(("options", "given", "allowed"), WRONG, ids=[wrong[0] for wrong in WRONG])
def test_a_wrong_argument_is_found_before_the_first_of_many_videos(
    cli: Callable[..., Ran], tree: Path, options: str, given: str, allowed: str
) -> None:
    """One sentence instead of one a video, and what an earlier run has written stays."""
    out = tree.parent / "x.jsonl"
    out.write_text("an earlier result\n")
    ran = cli(tree, *options.split(), "--out", out)
    assert_sentence(ran, given, allowed)
    assert ran.err.count("\n") == 1
    assert out.read_text() == "an earlier result\n"
    assert {path.name for path in tree.parent.iterdir()} == {"videos", "x.jsonl"}


def test_too_few_frames_are_refused_where_that_is_asked_for(cli: Callable[..., Ran], clip: Path) -> None:
    assert_sentence(cli(clip, "-n", 91, "--on-short", "error"), "91", "only 90 frames")


def test_a_range_without_frames_is_refused(cli: Callable[..., Ran], clip: Path) -> None:
    assert_sentence(cli(clip, "--start", 5), str(clip), "0.000 to 3.000 s")


# --- limits ----------------------------------------------------------------------------------------------------------

LIMITS = [
    ("--max-pixels", 192 * 128, 192 * 128 - 1),
    ("--max-frames", 90, 89),
    ("--max-duration", 3.0, 2.9),
]


@pytest.mark.parametrize("decode", ["--decode", "--no-decode"])
@pytest.mark.parametrize(("option", "enough", "too_low"), LIMITS)
def test_a_limit_refuses_until_it_is_raised(
    cli: Callable[..., Ran], clip: Path, option: str, enough: float, too_low: float, decode: str
) -> None:
    assert_sentence(cli(clip, option, too_low, "-n", 3, decode), str(clip), option)
    assert cli(clip, option, enough, "-n", 3, decode, "--json").json["frame_indices"] == [15, 45, 75]


def test_a_limit_refuses_only_the_videos_above_it(cli: Callable[..., Ran], tree: Path) -> None:
    ran = cli(tree, "--max-frames", 24, "-n", 2, "--json")
    assert ran.code == 1
    assert names(ran.json["selections"]) == ["a.mp4", "b.MP4"]
    assert [Path(failure["video"]).name for failure in ran.json["failures"]] == ["c.mp4"]
    assert "--max-frames" in ran.json["failures"][0]["error"]


@pytest.mark.parametrize(
    ("option", "enough", "too_low"),
    [("--max-pixels", 192 * 128, 192 * 128 - 1), ("--max-frames", 12, 11), ("--max-duration", 0.48, 0.4)],
)
def test_limits_hold_for_frame_dumps(
    cli: Callable[..., Ran], frame_dump: Path, option: str, enough: float, too_low: float
) -> None:
    assert_sentence(cli(frame_dump, option, too_low, "-n", 2), str(frame_dump), option)
    assert cli(frame_dump, option, enough, "-n", 2, "--json").json["frame_indices"] == [3, 9]


def test_saved_frames_are_not_taken_for_videos_the_next_time(
    tmp_path: Path, clip_bytes: bytes, cli: Callable[..., Ran]
) -> None:
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / name).write_bytes(clip_bytes)
    for _ in range(2):
        out = tmp_path / "rows.jsonl"
        assert cli(tmp_path, "-n", 2, "--save-frames", tmp_path / "frames", "--out", out).code == 0
        assert len(out.read_text().splitlines()) == 2


def test_a_table_of_failures_alone_has_its_header(tmp_path: Path, cli: Callable[..., Ran]) -> None:
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / name).write_text("no video")
    assert cli(tmp_path, "--out", tmp_path / "rows.csv").code == 1
    assert (tmp_path / "rows.csv").read_text().startswith("video,policy,num_frames")


@pytest.mark.parametrize("words", [["demo", "--out"], ["bench", "decode"]])
def test_other_commands_end_with_a_sentence_too(words: list[str], command: Callable[..., Ran], tmp_path: Path) -> None:
    """A folder that cannot be made, and a text in place of a video."""
    text = tmp_path / "text.mp4"
    text.write_text("no video")
    done = command(*words, text / "below" if words[0] == "demo" else text)
    assert done.code == 2
    assert "text.mp4" in done.err
    assert "Traceback" not in done.err


def test_the_summary_counts_the_videos_with_notes(cli: Callable[..., Ran], tree: Path) -> None:
    options = (tree, "-n", 4, "--candidates", "keyframe", "--out", tree.parent / "x.jsonl")
    ran = cli(*options)
    assert ran.code == 0
    assert "3 of 3 videos have notes, such as: 1 keyframe for 4 candidates; the others are exact" in ran.err
    rows = [json.loads(line) for line in (tree.parent / "x.jsonl").read_text().splitlines()]
    assert all(len(set(row["frame_indices"])) == 4 for row in rows)
    assert cli(*options, "--overwrite", "--seed", 1, "--json").json["num_with_notes"] == 3
    quiet = cli(tree, "-n", 4, "--out", tree.parent / "y.jsonl")
    assert "notes" not in quiet.err
