"""Draw the contact sheet at the top of README.md: frames of one video, uniform and chosen by the general sampler.

python benchmarks/tables/readme_picture.py car-detection.mp4 --out docs/images/uniform_and_chosen.jpg
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

import sosampler as so

ROWS = {"uniform": "uniform", "general": "chosen by sosampler (general)"}  # policy: title
WIDTH, GAP, MARGIN, TITLE = 300, 8, 16, 48  # of one frame and around it, in pixels
PAPER, INK, LABEL = "#ffffff", "#16191d", "#0b6e6e"


def contact_sheet(clip: Path, num_frames: int) -> Image.Image:
    """Return one row of frames for each policy, every frame with its time."""
    selections = {policy: so.select(clip, num_frames, policy=policy) for policy in ROWS}
    height = round(WIDTH * selections["uniform"].frames.shape[1] / selections["uniform"].frames.shape[2])
    width = 2 * MARGIN + num_frames * (WIDTH + GAP) - GAP
    sheet = Image.new("RGB", (width, MARGIN + len(ROWS) * (TITLE + height + MARGIN)), PAPER)
    draw = ImageDraw.Draw(sheet)
    title_font, time_font = ImageFont.load_default(32), ImageFont.load_default(28)
    for row, (policy, title) in enumerate(ROWS.items()):
        top = MARGIN + row * (TITLE + height + MARGIN)
        draw.text((MARGIN, top), title, fill=LABEL if policy == "general" else INK, font=title_font)
        selection = selections[policy]
        for column, (frame, seconds) in enumerate(zip(selection.frames, selection.pts_seconds, strict=True)):
            left = MARGIN + column * (WIDTH + GAP)
            small = Image.fromarray(frame).resize((WIDTH, height), Image.Resampling.LANCZOS)
            sheet.paste(small, (left, top + TITLE))
            box = draw.textbbox((left + 14, top + TITLE + 10), f"{seconds:.1f} s", font=time_font)
            draw.rounded_rectangle((box[0] - 8, box[1] - 6, box[2] + 8, box[3] + 6), 6, fill=INK)
            draw.text((left + 14, top + TITLE + 10), f"{seconds:.1f} s", fill=PAPER, font=time_font)
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clip", type=Path)
    parser.add_argument("--frames", type=int, default=6)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    contact_sheet(arguments.clip, arguments.frames).save(arguments.out, quality=82, optimize=True)


if __name__ == "__main__":
    main()
