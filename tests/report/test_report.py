"""Contact sheets and saved frames: the right pictures in the right places."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sosampler import select
from sosampler.errors import InvalidArgument
from sosampler.inference.many import MAX_ROWS, SelectJob, SheetRow, save_frames, write_contact_sheet
from sosampler.inference.options import SelectOptions
from sosampler.inference.selection import Candidates, Selection
from sosampler.video.reader import VideoMetadata
from sosampler.video.synthetic import numbered_frame, read_number

# A sheet shows pictures of this size as they are, so that they can be found in it pixel by pixel.
TILE = {"width": 240, "height": 160}
GREEN = (0, 200, 0)


def selection_of(
    frames: Sequence[np.ndarray] | None,
    indices: Sequence[int],
    *,
    fps: float = 30.0,
    total: int = 90,
    scores: Sequence[float] | None = None,
) -> Selection:
    """A selection of given pictures, without a video."""
    numbers, seconds = np.array(indices, dtype=np.int64), np.array(indices) / fps
    height, width = (1, 1) if frames is None else frames[0].shape[:2]
    none_moved = np.zeros(len(numbers))
    return Selection(
        video="films/clip.mp4",
        policy="uniform",
        frame_indices=numbers,
        pts_seconds=seconds,
        candidates=Candidates("exact", "uniform", numbers, seconds, none_moved.astype(np.int64), none_moved),
        metadata=VideoMetadata(total, fps, total / fps, 0.0, width, height, 0, "h264", 1, "pyav"),
        scores=None if scores is None else np.array(scores),
        frames=None if frames is None else np.stack(frames),
    )


def numbered_selection(indices: Sequence[int]) -> Selection:
    return selection_of([numbered_frame(index, **TILE) for index in indices], indices)


def sheet_of(selections: Sequence[Selection], path: Path) -> np.ndarray:
    write_contact_sheet([SheetRow.of(selection) for selection in selections], path)
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def corner_of(frame: np.ndarray, sheet: np.ndarray) -> tuple[int, int]:
    """(left, top) of the one place at which the sheet shows exactly this frame."""
    height, width, _ = frame.shape
    bottom_left = (sheet[height - 1 :, : sheet.shape[1] - width + 1] == frame[-1, 0]).all(axis=2)
    bottom_right = (sheet[height - 1 :, width - 1 :] == frame[-1, -1]).all(axis=2)
    found = [
        (int(left), int(top))
        for top, left in np.argwhere(bottom_left & bottom_right)
        if np.array_equal(sheet[top : top + height, left : left + width], frame)
    ]
    assert len(found) == 1, f"the frame is shown {len(found)} times"
    return found[0]


def box_of(colour: tuple[int, int, int], sheet: np.ndarray) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) around all pixels of this colour."""
    y, x = np.nonzero((sheet == colour).all(axis=2))
    return int(x.min()), int(y.min()), int(x.max()) + 1, int(y.max()) + 1


# --- contact sheets --------------------------------------------------------------------------------------------------


def test_frames_stand_side_by_side_in_time_order(tmp_path: Path) -> None:
    chosen = numbered_selection([3, 40, 41, 88])
    assert chosen.frames is not None
    sheet = sheet_of([chosen], tmp_path / "sheet.png")
    corners = [corner_of(frame, sheet) for frame in chosen.frames]
    lefts, tops = [left for left, _ in corners], {top for _, top in corners}
    assert len(tops) == 1
    assert all(step >= TILE["width"] for step in np.diff(lefts))
    assert lefts[-1] + TILE["width"] <= sheet.shape[1]


def test_each_selection_has_a_row_of_its_own(tmp_path: Path) -> None:
    rows = [numbered_selection([1, 2]), numbered_selection([11, 12]), numbered_selection([21, 22])]
    sheet = sheet_of(rows, tmp_path / "sheet.png")
    corners = [[corner_of(frame, sheet) for frame in row.frames] for row in rows if row.frames is not None]
    tops = [{top for _, top in row} for row in corners]
    assert [len(row) for row in tops] == [1, 1, 1]
    assert all(step > TILE["height"] for step in np.diff([row.pop() for row in tops]))
    assert len({tuple(left for left, _ in row) for row in corners}) == 1


def test_rows_are_drawn_whole_one_below_the_other(tmp_path: Path) -> None:
    above, below = numbered_selection([1, 2]), numbered_selection([11, 80])
    both = sheet_of([above, below], tmp_path / "both.png")
    first, second = sheet_of([above], tmp_path / "first.png"), sheet_of([below], tmp_path / "second.png")
    seam = len(both) - len(second)
    assert np.array_equal(both[seam:], second)
    assert np.array_equal(both[:seam], first[:seam])
    assert (first[seam:] == 255).all()  # only the lower margin is left out


def test_more_frames_than_fit_go_on_in_the_next_line(tmp_path: Path) -> None:
    chosen = numbered_selection(list(range(10)))
    assert chosen.frames is not None
    sheet = sheet_of([chosen], tmp_path / "sheet.png")
    corners = [corner_of(frame, sheet) for frame in chosen.frames]
    assert corners == sorted(corners, key=lambda corner: (corner[1], corner[0]))
    first, second = sorted({top for _, top in corners})
    assert second - first > TILE["height"]
    assert corners[8][0] == corners[0][0]


def test_tiles_of_a_real_video_carry_the_numbers_of_the_chosen_frames(tmp_path: Path, clip_bytes: bytes) -> None:
    chosen = select(clip_bytes, 4, size=(128, 192), threads=1, policy="uniform")
    assert chosen.frame_indices.tolist() == [11, 33, 56, 78]
    sheet = sheet_of([chosen], tmp_path / "sheet.png")
    same_layout = numbered_selection([1, 2, 3, 4])  # 192x128 is enlarged to 240x160
    assert same_layout.frames is not None
    places = sheet_of([same_layout], tmp_path / "places.png")
    assert sheet.shape == places.shape
    read = []
    for frame in same_layout.frames:
        left, top = corner_of(frame, places)
        read.append(read_number(sheet[top : top + TILE["height"], left : left + TILE["width"]]))
    assert read == [11, 33, 56, 78]


@pytest.mark.parametrize(
    ("height", "width"), [(128, 192), (30, 900), (900, 30), (1, 1), (1, 2000), (2000, 1), (7, 641), (240, 240)]
)
def test_any_shape_of_picture_fits_and_keeps_its_aspect_ratio(tmp_path: Path, height: int, width: int) -> None:
    frame = np.full((height, width, 3), GREEN, dtype=np.uint8)
    sheet = sheet_of([selection_of([frame], [45])], tmp_path / "sheet.png")
    left, top, right, bottom = box_of(GREEN, sheet)
    shown_width, shown_height = right - left, bottom - top
    assert (sheet[top:bottom, left:right] == GREEN).all()
    assert 1 <= shown_width <= 240
    assert 1 <= shown_height <= 360
    assert shown_width == 240 or shown_height == 360
    # The shorter side is a whole number of pixels, and at least one.
    assert abs(shown_width - max(1, shown_height * width / height)) <= max(1, width / height)
    assert 0 < left < right < sheet.shape[1]
    assert 0 < top < bottom < sheet.shape[0] < 600


@pytest.mark.parametrize("index", [0, 22, 45, 67, 90])
def test_a_mark_on_the_time_line_shows_when_the_frame_is(tmp_path: Path, index: int) -> None:
    blank = np.full((160, 240, 3), 255, dtype=np.uint8)
    sheet = sheet_of([selection_of([blank, blank], [index, index])], tmp_path / "sheet.png").astype(int)
    reddish = (sheet[..., 0] - sheet[..., 2]) > 100
    x = np.nonzero(reddish)[1].mean()
    margin = 18
    assert x == pytest.approx(margin + (sheet.shape[1] - 2 * margin) * index / 90, abs=2)


def test_captions_give_time_number_and_score() -> None:
    frame = np.zeros((4, 6, 3), dtype=np.uint8)
    plain = SheetRow.of(selection_of([frame, frame], [15, 2250]))
    scored = SheetRow.of(selection_of([frame, frame], [15, 2250], scores=[0.25, 0.5]))
    assert plain.title == "clip.mp4: 2 of 2 exact candidates, policy uniform"
    assert plain.captions == ["0:00.500   frame 15", "1:15.000   frame 2250"]
    assert scored.captions == ["0:00.500   frame 15   0.250", "1:15.000   frame 2250   0.500"]


def test_a_time_just_below_a_minute_is_rounded_to_the_minute() -> None:
    frame = np.zeros((4, 6, 3), dtype=np.uint8)
    row = SheetRow.of(selection_of([frame], [599_999], fps=10_000))  # 59.9999 s
    assert row.captions == ["1:00.000   frame 599999"]


def test_the_sheet_is_written_in_the_format_of_its_ending_and_its_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "made" / "for it" / "sheet.webp"
    write_contact_sheet([SheetRow.of(numbered_selection([1]))], path)
    assert Image.open(path).format == "WEBP"
    assert list(path.parent.iterdir()) == [path]


def test_an_earlier_sheet_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "sheet.png"
    path.write_bytes(b"something older")
    assert sheet_of([numbered_selection([1])], path).shape[1] > TILE["width"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("file/sheet.png", id="a file where the folder should be"),
        pytest.param("folder.png", id="a folder where the file should be"),
        pytest.param("sheet.nonsense", id="unknown ending"),
        pytest.param("sheet", id="no ending"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InvalidArgument, match=r"cannot be written .* give a path such as sheet\.png"):
        write_contact_sheet([SheetRow.of(numbered_selection([1]))], tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder.png"}
    assert (tmp_path / "file").read_text() == "in the way"


def test_too_many_videos_are_refused(tmp_path: Path) -> None:
    job = SelectJob(SelectOptions(num_frames=1), sheet=tmp_path / "sheet.png")
    with pytest.raises(InvalidArgument, match=f"{MAX_ROWS} videos at most, not 41"):
        job.run([Path("clip.mp4")] * (MAX_ROWS + 1))
    assert list(tmp_path.iterdir()) == []


def test_as_many_selections_as_allowed_are_drawn(tmp_path: Path) -> None:
    frame = np.full((10, 30, 3), GREEN, dtype=np.uint8)
    sheet = sheet_of([selection_of([frame], [0])] * MAX_ROWS, tmp_path / "sheet.png")
    green = (sheet == GREEN).all(axis=2).any(axis=1)
    begins = np.flatnonzero(np.diff(green.astype(int), prepend=0) == 1)
    assert len(begins) == MAX_ROWS


def test_a_sheet_without_pixels_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="decode=True"):
        SheetRow.of(selection_of(None, [0]))


# --- saved frames ----------------------------------------------------------------------------------------------------


def test_saved_frames_are_named_by_place_number_and_time(tmp_path: Path) -> None:
    paths = save_frames(numbered_selection([0, 7, 89]), tmp_path / "made" / "frames")
    assert [path.name for path in paths] == [
        "000_frame000000_0.000s.jpg",
        "001_frame000007_0.233s.jpg",
        "002_frame000089_2.967s.jpg",
    ]
    assert sorted((tmp_path / "made" / "frames").iterdir()) == paths
    assert [read_number(np.asarray(Image.open(path))) for path in paths] == [0, 7, 89]


def test_png_keeps_every_pixel(tmp_path: Path) -> None:
    chosen = numbered_selection([4, 5])
    assert chosen.frames is not None
    paths = save_frames(chosen, tmp_path, image_format="png")
    assert [path.suffix for path in paths] == [".png", ".png"]
    for path, frame in zip(paths, chosen.frames, strict=True):
        assert np.array_equal(np.asarray(Image.open(path)), frame)


def test_a_frame_chosen_twice_is_saved_twice(tmp_path: Path) -> None:
    paths = save_frames(numbered_selection([6, 6]), tmp_path)
    assert [path.name for path in paths] == ["000_frame000006_0.200s.jpg", "001_frame000006_0.200s.jpg"]
    assert all(path.is_file() for path in paths)


def test_saving_again_replaces_the_files(tmp_path: Path) -> None:
    first = save_frames(numbered_selection([6, 9]), tmp_path)
    first[0].write_bytes(b"damaged since")
    assert save_frames(numbered_selection([6, 9]), tmp_path) == first
    assert [read_number(np.asarray(Image.open(path))) for path in first] == [6, 9]
    assert sorted(tmp_path.iterdir()) == first


def test_frames_of_a_real_video_are_the_chosen_ones(tmp_path: Path, clip_bytes: bytes) -> None:
    chosen = select(clip_bytes, 6, threads=1, policy="uniform")
    read = [read_number(np.asarray(Image.open(path))) for path in save_frames(chosen, tmp_path)]
    assert read == chosen.frame_indices.tolist() == [7, 22, 37, 52, 67, 82]


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidArgument, match="frames cannot be written there"):
        save_frames(numbered_selection([1]), tmp_path / name)
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_selection_without_pixels_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="decode=True"):
        save_frames(selection_of(None, [0]), tmp_path / "frames")
    assert not (tmp_path / "frames").exists()
