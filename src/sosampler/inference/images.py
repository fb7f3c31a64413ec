"""Image files: the chosen frames, and a contact sheet of them above a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sosampler._util.files import replacing
from sosampler.errors import InvalidArgument
from sosampler.inference.selection import Selection

# Larger images are refused by some viewers.
MAX_ROWS = 40

_TILE_WIDTH, _GAP, _MARGIN = 240, 10, 18
_INK, _FAINT, _ACCENT, _PAPER = (28, 28, 30), (150, 150, 156), (196, 64, 32), (255, 255, 255)


@dataclass(frozen=True)
class SheetRow:
    """One video on the sheet, as thumbnails, so that many fit into memory."""

    title: str
    tiles: list[Image.Image]
    captions: list[str]
    candidates: np.ndarray  # seconds [T]
    chosen: np.ndarray  # seconds [N]
    span: tuple[float, float]  # first frame's time, end of the video

    @classmethod
    def of(cls, selection: Selection) -> SheetRow:
        if selection.frames is None:
            raise InvalidArgument("a contact sheet needs the frames; select with decode=True")
        meta = selection.metadata
        captions = [
            f"{_clock(seconds)}   frame {index}"
            for index, seconds in zip(selection.frame_indices, selection.pts_seconds, strict=True)
        ]
        if selection.scores is not None:
            captions = [f"{text}   {score:.3f}" for text, score in zip(captions, selection.scores, strict=True)]
        return cls(
            title=(
                f"{Path(selection.video).name}: {len(selection)} of {selection.num_candidates} "
                f"{selection.candidates.mode} candidates, policy {selection.policy}"
            ),
            tiles=[_tile(frame) for frame in selection.frames],
            captions=captions,
            candidates=selection.candidates.pts_seconds,
            chosen=selection.pts_seconds,
            span=(meta.start_seconds, meta.start_seconds + meta.duration),
        )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{int(minutes)}:{rest:06.3f}" if seconds >= 0 else f"{seconds:.3f} s"


def _tile(frame: np.ndarray) -> Image.Image:
    height = max(1, round(frame.shape[0] * _TILE_WIDTH / frame.shape[1]))
    # A tall, narrow frame would push everything else off the sheet.
    scale = min(1.0, 1.5 * _TILE_WIDTH / height)
    size = max(1, round(_TILE_WIDTH * scale)), max(1, round(height * scale))
    return Image.fromarray(frame).resize(size, Image.Resampling.BICUBIC)


def write_contact_sheet(selections: Sequence[Selection], path: Path) -> None:
    """Write one block for each selection, one below the other."""
    write_sheet([SheetRow.of(selection) for selection in selections], path)


def write_sheet(rows: Sequence[SheetRow], path: Path) -> None:
    """Write the sheet of these videos."""
    if not rows:
        raise InvalidArgument("a contact sheet needs at least one selection")
    if len(rows) > MAX_ROWS:
        raise InvalidArgument(
            f"a contact sheet holds {MAX_ROWS} videos at most, not {len(rows)}; use --save-frames instead"
        )
    columns = min(8, max(len(row.tiles) for row in rows))
    width = 2 * _MARGIN + columns * _TILE_WIDTH + (columns - 1) * _GAP
    blocks = [_draw_row(row, columns, width) for row in rows]
    sheet = Image.new("RGB", (width, sum(block.height for block in blocks) + _MARGIN), _PAPER)
    top = 0
    for block in blocks:
        sheet.paste(block, (0, top))
        top += block.height
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            sheet.save(temporary)
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{path}: the contact sheet cannot be written ({error}); give a path such as sheet.png"
        ) from error


def _draw_row(row: SheetRow, columns: int, width: int) -> Image.Image:
    title_font, text_font = ImageFont.load_default(size=18), ImageFont.load_default(size=13)
    lines = [row.tiles[i : i + columns] for i in range(0, len(row.tiles), columns)]
    heights = [max(tile.height for tile in line) + 24 for line in lines]
    block = Image.new("RGB", (width, 46 + sum(heights) + 56), _PAPER)
    draw = ImageDraw.Draw(block)
    draw.text((_MARGIN, 14), row.title, font=title_font, fill=_INK)
    top = 46
    for number, (line, height) in enumerate(zip(lines, heights, strict=True)):
        for column, tile in enumerate(line):
            left = _MARGIN + column * (_TILE_WIDTH + _GAP)
            block.paste(tile, (left + (_TILE_WIDTH - tile.width) // 2, top))
            draw.text((left, top + height - 20), row.captions[number * columns + column], font=text_font, fill=_INK)
        top += height
    _draw_timeline(draw, row, top + 20, width, text_font)
    return block


def _draw_timeline(
    draw: ImageDraw.ImageDraw, row: SheetRow, y: int, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont
) -> None:
    """Draw candidates as thin ticks and chosen frames as triangles, distinct without colour."""
    left, right = _MARGIN, width - _MARGIN
    begin, end = row.span
    length = max(end - begin, 1e-9)

    def x_of(seconds: float) -> float:
        return left + (right - left) * min(max((seconds - begin) / length, 0.0), 1.0)

    draw.line((left, y, right, y), fill=_FAINT, width=2)
    for seconds in row.candidates.tolist():
        draw.line((x_of(seconds), y - 5, x_of(seconds), y + 5), fill=_FAINT, width=1)
    for seconds in row.chosen.tolist():
        x = x_of(seconds)
        draw.polygon([(x, y - 2), (x - 6, y - 14), (x + 6, y - 14)], fill=_ACCENT)
    draw.text((left, y + 8), _clock(begin), font=font, fill=_FAINT)
    text = _clock(end)
    draw.text((right - draw.textlength(text, font=font), y + 8), text, font=font, fill=_FAINT)


IMAGE_FORMATS = ("jpg", "png")


def save_frames(selection: Selection, folder: Path, *, image_format: str = "jpg") -> list[Path]:
    """Write each frame as NNN_frameINDEX_TIMEs.jpg: position in the selection, true frame number, time."""
    if selection.frames is None:
        raise InvalidArgument("there are no frames to save; select with decode=True")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for position, (frame, index, seconds) in enumerate(
            zip(selection.frames, selection.frame_indices, selection.pts_seconds, strict=True)
        ):
            path = folder / f"{position:03d}_frame{index:06d}_{seconds:.3f}s.{image_format}"
            with replacing(path) as temporary:
                Image.fromarray(frame).save(temporary, quality=95)
            paths.append(path)
    except OSError as error:
        raise InvalidArgument(
            f"{folder}: frames cannot be written there ({error}); give a folder that can be"
        ) from error
    return paths
