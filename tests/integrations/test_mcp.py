"""The tools of `sosampler mcp`, by themselves and through the SDK's own client over standard input and output."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import sosampler as so
from sosampler.cli.main import app
from sosampler.errors import InvalidArgument, MissingDependency, VideoError
from sosampler.integrations.mcp import VideoTools, fit_images
from sosampler.video.synthetic import encode_video, numbered_frame, numbered_video, read_number
from tests.conftest import unavailable


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that may be seen, beside one that may not."""
    root = tmp_path_factory.mktemp("mcp")
    (root / "open" / "deeper").mkdir(parents=True)
    (root / "closed").mkdir()
    data = numbered_video(num_frames=120, fps=4)  # 30 s
    for name in ("open/match.mp4", "open/deeper/late.mp4", "closed/secret.mp4"):
        (root / name).write_bytes(data)
    (root / "open" / "link.mp4").symlink_to(root / "closed" / "secret.mp4")
    (root / "open" / "way").symlink_to(root / "closed")
    (root / "open" / "inner.mp4").symlink_to(root / "open" / "match.mp4")
    (root / "open" / "list.mp4").write_text("ffconcat version 1.0\nfile way/secret.mp4\n", encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def tools(videos: Path) -> VideoTools:
    return VideoTools([videos / "open"], "uniform")


def images_of(parts: list[Any]) -> list[Image.Image]:
    return [part for part in parts if isinstance(part, Image.Image)]


# ---- the tools by themselves


def test_frames_come_with_their_true_times(tools: VideoTools) -> None:
    heading, label, sheet, *timed = tools.look_at_video("match.mp4", num_frames=3)
    assert "0.000 to 30.000 s" in heading
    assert "3 of 3 candidates by uniform" in heading
    assert label == "Contact sheet:"
    assert isinstance(sheet, Image.Image)
    same = so.select(tools.folders[0] / "match.mp4", 3, policy="uniform")
    assert timed[::2] == [f"{t:.3f} s (frame {i}):" for i, t in zip(same.frame_indices, same.pts_seconds, strict=True)]
    assert len(images_of(timed)) == 3


def test_a_range_and_no_sheet(tools: VideoTools) -> None:
    parts = tools.look_at_video("match.mp4", start=10, end=12, num_frames=2, max_images=2, contact_sheet=False)
    assert [part for part in parts[1:] if isinstance(part, str)] == ["10.500 s (frame 42):", "11.500 s (frame 46):"]


def test_frames_at_shows_the_frame_of_each_moment(tools: VideoTools) -> None:
    parts = tools.frames_at("match.mp4", [7.9, 0.0, 8.1])
    assert parts[::2] == ["0.000 s (frame 0):", "7.750 s (frame 31):", "8.000 s (frame 32):"]
    with pytest.raises(InvalidArgument, match=r"nothing is shown at 30 s; give seconds from 0.000 to below 30.000"):
        tools.frames_at("match.mp4", [3, 30])
    with pytest.raises(InvalidArgument, match=r"the number of seconds=0 must be an int from 1 to 17"):
        tools.frames_at("match.mp4", [])


def test_video_info(tools: VideoTools) -> None:
    info = tools.video_info("deeper/late.mp4")
    assert (info["num_frames"], info["end_seconds"], info["fps"]) == (120, 30.0, 4.0)
    assert info["path"] == str(tools.folders[0] / "deeper" / "late.mp4")


def test_the_budget_of_images(videos: Path, tools: VideoTools) -> None:
    assert len(images_of(tools.look_at_video("match.mp4", max_images=4))) == 4
    with pytest.raises(InvalidArgument, match=r"num_frames=9 must be an int from 1 to 8"):
        tools.look_at_video("match.mp4", num_frames=9)
    with pytest.raises(InvalidArgument, match=r"max_images=18 must be an int from 2 to 17"):
        tools.look_at_video("match.mp4", max_images=18)
    few = VideoTools([videos / "open"], "uniform", max_images=3)
    with pytest.raises(InvalidArgument, match=r"max_images=9 must be an int from 2 to 3"):
        few.look_at_video("match.mp4")


def test_the_budget_of_tokens(tmp_path: Path) -> None:
    path = tmp_path / "large.mp4"
    encode_video((numbered_frame(number, width=960, height=540) for number in range(8)), path, fps=2)
    tools = VideoTools([tmp_path], "uniform")
    sizes = {}
    for budget in (None, 4000, 1500, 200):
        images = images_of(tools.look_at_video("large.mp4", num_frames=4, max_tokens=budget))
        sizes[budget] = [image.size for image in images]
        if budget is not None:
            assert sum(width * height for width, height in sizes[budget]) / 750 <= budget
    assert sizes[None][1] == (768, 432)
    assert len(sizes[1500]) == 5
    assert max(sizes[1500][1]) < 768
    assert len(sizes[200]) == 3  # smaller, then fewer
    metadata = so.select(path, 1, decode=False).metadata
    assert fit_images(metadata, 4, None) == (4, 768)
    with pytest.raises(InvalidArgument, match=r"max_tokens leaves 20 for frames, but one needs 50; give more"):
        fit_images(metadata, 4, 20)
    with pytest.raises(InvalidArgument, match=r"is enough for 2 of 3 frames"):
        tools.frames_at("large.mp4", [0, 1, 2], max_tokens=110)


def test_the_number_is_that_of_what_there_is_to_see(tmp_path: Path) -> None:
    """A still video needs fewer frames than one of many scenes, where the policy can tell."""
    pytest.importorskip("torch")
    from benchmarks.accuracy.query import CONCEPTS, draw_video

    draw_video(tmp_path / "still.mp4", CONCEPTS[:1] * 8, seed=0)
    draw_video(tmp_path / "scenes.mp4", CONCEPTS[::2], seed=0)
    tools = VideoTools([tmp_path])
    looks = [tools.look_at_video(f"{name}.mp4", contact_sheet=False) for name in ("still", "scenes")]
    still, many = (len(images_of(parts)) for parts in looks)
    assert still <= 3
    assert many >= 5


# ---- what may not be seen


@pytest.mark.parametrize(
    "path",
    [
        *(
            "../closed/secret.mp4",
            "link.mp4",
            "way/secret.mp4",
            "{root}/closed/secret.mp4",
            "{root}/closed/missing.mp4",
        ),
        *("/etc/passwd", "missing.mp4", "deeper", "", "a\0b", "~/match.mp4", "https://example.com/a.mp4"),
    ],
)
def test_paths_outside_are_refused_without_telling_what_is_there(videos: Path, tools: VideoTools, path: str) -> None:
    path = path.format(root=videos)
    with pytest.raises(InvalidArgument) as refused:
        tools.video_info(path)
    allowed = videos / "open"
    rest = f": is no video file in the folders of this server ({allowed}); there are: "
    assert str(refused.value).startswith(path + rest)
    assert "deeper/late.mp4" in str(refused.value)


def test_links_inside_and_absolute_paths_are_followed(videos: Path, tools: VideoTools) -> None:
    inside = str(videos / "open" / "match.mp4")
    assert tools.video_info("inner.mp4")["path"] == tools.video_info(inside)["path"] == inside


def test_a_playlist_cannot_lead_outside(videos: Path, tools: VideoTools) -> None:
    for look in (tools.video_info, tools.look_at_video, lambda path: tools.frames_at(path, [0])):
        with pytest.raises(VideoError, match="a playlist or manifest, which names other files, not a video"):
            look("list.mp4")


def test_a_server_is_refused_before_it_starts(videos: Path) -> None:
    for folders, words in (([], "no folder was given"), ([videos / "none"], "no such folder")):
        with pytest.raises(InvalidArgument, match=words):
            VideoTools(folders)
    with pytest.raises(InvalidArgument, match=r"policy='nothing' is unknown"):
        VideoTools([videos], "nothing")
    with pytest.raises(InvalidArgument, match=r"no such folder; give the folder or the hub name"):
        VideoTools([videos], query_model="./nothing")


# ---- over the protocol


def with_client(arguments: list[str], work: Callable[[Any], Awaitable[None]]) -> None:
    """Start the command as an assistant does, and work with the SDK's client."""
    try:
        from mcp import ClientSession, StdioServerParameters
        from mcp.client.stdio import stdio_client
    except ImportError:
        unavailable("mcp", "mcp is not installed")
    # The client passes little of the environment on.
    environment = {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
    server = StdioServerParameters(command=sys.executable, args=["-m", "sosampler", "mcp", *arguments], env=environment)

    async def run() -> None:
        async with stdio_client(server) as streams, ClientSession(*streams) as session:
            await session.initialize()
            await work(session)

    asyncio.run(asyncio.wait_for(run(), 120))


def images_in(result: Any) -> list[Image.Image]:
    plain = [part.model_dump(by_alias=True) for part in result.content]
    assert all(part["mimeType"] == "image/jpeg" for part in plain if part["type"] == "image")
    return [Image.open(io.BytesIO(base64.b64decode(part["data"]))) for part in plain if part["type"] == "image"]


def texts_in(result: Any) -> list[str]:
    return [part.text for part in result.content if part.type == "text"]


def test_an_assistant_looks_at_a_video(videos: Path) -> None:
    async def work(session: Any) -> None:
        tools = {tool.name: tool.model_dump(by_alias=True) for tool in (await session.list_tools()).tools}
        assert set(tools) == {"look_at_video", "frames_at", "video_info"}
        assert tools["look_at_video"]["inputSchema"]["required"] == ["path"]
        assert "its true time" in tools["look_at_video"]["description"]

        seen = await session.call_tool("look_at_video", {"path": "match.mp4", "num_frames": 3, "start": 5})
        assert len(images_in(seen)) == 4  # the contact sheet, and three frames
        assert "general" in texts_in(seen)[0]
        assert [text.endswith("):") for text in texts_in(seen)[2:]] == [True] * 3

        close = await session.call_tool("frames_at", {"path": "match.mp4", "seconds": [12.3]})
        assert texts_in(close) == ["12.250 s (frame 49):"]
        assert read_number(np.asarray(images_in(close)[0])) == 49

        info = await session.call_tool("video_info", {"path": "match.mp4"})
        assert json.loads(texts_in(info)[0])["num_frames"] == 120

        for arguments, words in (
            ({"path": "../closed/secret.mp4"}, "is no video file in the folders of this server"),
            ({"path": "link.mp4"}, "is no video file in the folders of this server"),
            ({"path": "match.mp4", "query": "a goal"}, "this server has no image-text model"),
            ({"path": "match.mp4", "start": 40}, "no frame lies between start=40"),
            ({"path": "match.mp4", "num_frames": "many"}, "num_frames"),
        ):
            refused = await session.call_tool("look_at_video", arguments)
            assert refused.model_dump(by_alias=True)["isError"]
            assert words in texts_in(refused)[0]
        again = await session.call_tool("video_info", {"path": "match.mp4"})
        assert not again.model_dump(by_alias=True)["isError"]

    with_client([str(videos / "open")], work)


def test_a_query_through_the_protocol(shapes_model: Path, tmp_path: Path) -> None:
    from benchmarks.accuracy.query import draw_video

    shown = [("blue", "square"), None, ("green", "cross"), ("yellow", "circle")] * 4
    shown[9:11] = [("red", "triangle")] * 2
    draw_video(tmp_path / "shapes.mp4", shown, seed=3)

    async def work(session: Any) -> None:
        asked = {"path": "shapes.mp4", "query": "a red triangle", "num_frames": 2}
        found = await session.call_tool("look_at_video", asked)
        times = [float(text.split()[0]) for text in texts_in(found)[2:]]
        assert all(9 <= seconds < 11 for seconds in times)
        assert "They fit the query 'a red triangle' best" in texts_in(found)[0]
        for query, words in (("", "query='' must be a text"), ("word " * 10_000, "has 10000 tokens")):
            refused = await session.call_tool("look_at_video", {**asked, "query": query})
            assert words in texts_in(refused)[0]

    with_client([str(tmp_path), "--query-model", str(shapes_model)], work)


def test_the_command_needs_the_package(videos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mcp.server.mcpserver", "mcp.server.fastmcp"):
        monkeypatch.setitem(sys.modules, name, None)
    done = CliRunner().invoke(app, ["mcp", str(videos / "open")])
    assert isinstance(done.exception, MissingDependency)
    assert "install it with: pip install 'sosampler[mcp]'" in str(done.exception)
