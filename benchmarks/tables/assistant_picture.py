"""Draw the picture of docs/assistant.md: a query, the call of `sosampler mcp` over its protocol, and what it gave.

python benchmarks/tables/assistant_picture.py --out docs/images/assistant.png
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import os
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

import sosampler as so
from benchmarks.accuracy.query import make_case, text_of, train_model
from sosampler.inference.many import SheetRow, draw_contact_sheet

NUM_FRAMES, SEED = 4, 4
MARGIN, GAP = 28, 16  # pixels
PAPER, INK, FAINT, BOX, LABEL = "#ffffff", "#16191d", "#69707a", "#eef3f3", "#0b6e6e"


async def look(folder: Path, model: Path, arguments: dict[str, Any]) -> Any:
    """Call `look_at_video` as an assistant does."""
    command = ["-m", "sosampler", "mcp", str(folder), "--query-model", str(model)]
    environment = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    server = StdioServerParameters(command=sys.executable, args=command, env=environment)
    async with stdio_client(server) as streams, ClientSession(*streams) as session:
        await session.initialize()
        return await session.call_tool("look_at_video", arguments)


def picture(question: str, call: str, answer: str, sheet: Image.Image, even: Image.Image) -> Image.Image:
    """Return the chain from top to bottom, and below it what evenly spaced frames show."""
    width = max(sheet.width, even.width) + 2 * MARGIN
    blocks: list[tuple[str, str | Image.Image]] = [
        ("a question to an assistant", question),
        ("the assistant calls a tool of sosampler mcp", call),
        ("the server answers with a text, this contact sheet, and each frame behind its time", answer),
        ("", sheet),
        ("for comparison: the same number of frames by policy uniform", even),
    ]
    canvas = Image.new("RGB", (width, 2000), PAPER)
    draw, top = ImageDraw.Draw(canvas), MARGIN
    small, large = ImageFont.load_default(19), ImageFont.load_default(22)
    for title, content in blocks:
        if title:
            draw.text((MARGIN, top), title, font=small, fill=LABEL)
            top += 30
        if isinstance(content, Image.Image):
            canvas.paste(content, (MARGIN, top))
            draw.rectangle((MARGIN, top, MARGIN + content.width, top + content.height), outline=FAINT)
            top += content.height + GAP
            continue
        lines = [part for line in content.splitlines() for part in textwrap.wrap(line, 88)]
        height = 30 * len(lines) + 18
        draw.rounded_rectangle((MARGIN, top, width - MARGIN, top + height), 10, fill=BOX)
        draw.multiline_text((MARGIN + 16, top + 9), "\n".join(lines), font=large, fill=INK, spacing=7)
        top += height + GAP
        if content != answer:
            x = MARGIN + 30
            draw.polygon([(x - 9, top - 10), (x + 9, top - 10), (x, top + 1)], fill=LABEL)
            top += GAP // 2
    return canvas.crop((0, 0, width, top + MARGIN - GAP))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as work:
        model, folder = train_model(Path(work) / "model", steps=600), Path(work) / "videos"
        folder.mkdir()
        wanted, _ = make_case(np.random.default_rng(SEED), folder / "shapes.mp4", moment=4)
        arguments = {"path": "shapes.mp4", "query": text_of(wanted), "num_frames": NUM_FRAMES}
        seen = asyncio.run(look(folder, model, arguments))
        even = so.select(folder / "shapes.mp4", NUM_FRAMES, policy="uniform")
    first, _, image = (part.model_dump(by_alias=True) for part in seen.content[:3])
    sheet = Image.open(io.BytesIO(base64.b64decode(image["data"])))
    call = f"look_at_video({', '.join(f'{name}={value!r}' for name, value in arguments.items())})"
    question = f"When does {text_of(wanted)} appear in shapes.mp4?"
    drawn = picture(question, call, first["text"], sheet, draw_contact_sheet([SheetRow.of(even)], NUM_FRAMES))
    drawn.quantize(256).save(out, optimize=True)  # a third of the bytes


if __name__ == "__main__":
    main()
