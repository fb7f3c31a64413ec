"""The page in a browser: drop a video, see its frames, change the settings, take frames and JSON along."""

# ruff: noqa: F811 - a fixture has the name under which it is imported
from __future__ import annotations

import json
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sosampler as so
from sosampler.ui.decoder import Decoder
from sosampler.ui.server import Server, Service
from sosampler.ui.view import Controls, make_controls
from sosampler.video.synthetic import numbered_video
from tests.report.test_browser import browser  # noqa: F401

HOSTILE = "<img src=x onerror=\"document.title='broken'\">${1+1}{{2}}.mp4"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "uploads"
    folder.mkdir()
    with Server(Service(Controls(), folder, max_upload=300_000, max_videos=5)) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


class Opened:
    """The page with everything that it said and asked for."""

    def __init__(self, browser: Any, server: Server, **options: Any) -> None:
        self.page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.set_default_timeout(60_000)
        self.page.goto(server.url)
        self.page.wait_for_selector("#policy option >> nth=0", state="attached")

    def drop(self, *files: Path) -> None:
        """Through the box that also takes clicks."""
        self.page.set_input_files("#files", list(files))

    def shown(self, count: int, kind: str = "chosen", card: int = 0) -> list[str]:
        """Descriptions of a strip's pictures, once there are so many."""
        pictures = self.page.locator(".card").nth(card).locator(f".of-{kind} .shot img")
        pictures.nth(count - 1).wait_for()
        self.page.wait_for_selector("#get-frames[href]")
        found: list[str] = pictures.evaluate_all("all => all.map(one => one.alt)")
        assert len(found) == count
        return found

    def colour(self, selector: str, name: str = "background-color") -> int:
        text = self.page.eval_on_selector(selector, f"one => getComputedStyle(one)['{name}']")
        return sum(int(float(part)) for part in text[text.index("(") + 1 : -1].split(",")[:3])


@pytest.fixture
def opened(browser: Any, server: Server) -> Iterator[Opened]:
    found = Opened(browser, server)
    yield found
    found.page.close()


def frames_of(video: Path, count: int, policy: str = "general") -> list[str]:
    frames = so.select(video, count, policy=policy).frame_indices.tolist()
    return [f"frame {frame} at 0:0{frame / 30:.1f}" for frame in frames]


def test_upload_see_change_download(opened: Opened, server: Server, clip: Path, tmp_path: Path) -> None:
    page = opened.page
    assert page.locator("#empty").is_visible()
    assert page.locator("#get-frames[href]").count() == 0
    opened.drop(clip)
    frames = [text.split()[1] for text in opened.shown(8)]
    assert frames == [text.split()[1] for text in frames_of(clip, 8)]
    assert not page.locator("#empty").is_visible()
    uniform = [text.split()[1] for text in opened.shown(8, "uniform")]
    assert uniform == [str(frame) for frame in so.select(clip, 8, policy="uniform").frame_indices]
    assert page.locator(".time .mark.of-chosen").count() == 8
    assert page.locator(".time .curve").count() == 1
    loaded = page.locator(".shot img").evaluate_all("all => all.every(one => one.naturalWidth === 192)")
    assert loaded

    page.fill("#num-frames", "3")
    page.wait_for_selector(".of-chosen .strip[style*='--columns: 4']")
    frames = [text.split()[1] for text in opened.shown(3)]
    assert frames == [text.split()[1] for text in frames_of(clip, 3)]
    assert page.locator("#frames-range").input_value() == "3"
    assert page.locator(".time .mark.of-chosen").count() == 3

    with page.expect_download() as waiting:
        page.click("#get-frames")
    waiting.value.save_as(tmp_path / "frames.zip")
    assert waiting.value.suggested_filename == "frames.zip"
    with zipfile.ZipFile(tmp_path / "frames.zip") as archive:
        names = [name for name in archive.namelist() if name.startswith("clip.mp4/")]
    assert [int(name.split("frame")[1].split("_")[0]) for name in names] == [int(frame) for frame in frames]
    with page.expect_download() as waiting:
        page.click("#get-json")
    (row,) = json.loads(Path(waiting.value.path()).read_text(encoding="utf-8"))["videos"]
    assert row["frame_indices"] == [int(frame) for frame in frames]
    assert row["settings"]["policy"] == "general"

    # All of it without a word, and from this machine alone.
    assert opened.said == []
    assert [url for url in opened.asked if not url.startswith((server.url, "data:"))] == []


def test_policies_candidates_and_diversity(opened: Opened, clip: Path) -> None:
    page = opened.page
    opened.drop(clip)
    opened.shown(8)
    page.fill("#num-frames", "2")
    page.fill("#num-candidates", "12")
    page.select_option("#policy", "frame-difference")
    page.select_option("#diversity", "its")
    page.wait_for_selector(".policy:has-text('frame-difference+its'):has-text('2 of 12 exact')")
    page.select_option("#policy", "dpp")
    page.wait_for_selector(".policy:has-text('dpp'):has-text('2 of 12 exact')")
    assert page.locator("#diversity").is_disabled()
    assert page.locator(".time .curve").count() == 0  # it has no scores,
    assert page.locator(".time .candidate").count() == 12  # so the candidates are shown
    page.select_option("#candidates", "keyframe")
    page.wait_for_selector(".policy:has-text('2 of 3 keyframe candidates')")
    assert "keyframes for 12 candidates" in page.locator(".notes").inner_text()
    page.fill("#num-candidates", "1")
    page.wait_for_selector(".error:has-text('num_frames=2 is more than num_candidates=1')")
    assert page.locator(".shot:visible").count() == 0
    assert page.locator("#get-frames[href]").count() == 0
    page.fill("#num-candidates", "")
    opened.shown(2)
    assert not page.locator(".error").is_visible()


def test_a_query_takes_the_place_of_the_policy(
    browser: Any, opened: Opened, server: Server, clip: Path, shapes_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not opened.page.locator("#query").is_visible()
    controls = make_controls(query_model=str(shapes_model))
    monkeypatch.setattr(server.service, "controls", controls)
    monkeypatch.setattr(server.service, "decoder", Decoder(controls))
    asking = Opened(browser, server)
    asking.drop(clip)
    asking.page.fill("#num-frames", "3")
    asking.page.fill("#query", "a red circle")
    asking.page.wait_for_selector(".policy:has-text('query')")
    assert asking.page.locator("#policy").is_disabled()
    assert len(asking.shown(3)) == 3
    asking.page.fill("#query", "")
    asking.page.wait_for_selector(".policy:has-text('general')")
    assert not asking.page.locator("#policy").is_disabled()
    assert not asking.said
    asking.page.close()


def test_what_is_no_video_gets_a_sentence(opened: Opened, clip: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.mp4").write_text("Nothing to see here. " * 20)
    (tmp_path / "long.mp4").write_bytes(clip.read_bytes() + bytes(300_000))
    opened.drop(tmp_path / "notes.mp4", clip, tmp_path / "long.mp4")
    opened.shown(8, card=1)  # the others do not suffer
    errors = opened.page.locator(".error:visible")
    assert errors.count() == 2
    assert errors.nth(0).get_attribute("role") == "alert"
    assert errors.nth(0).inner_text().startswith("notes.mp4: not a video")
    assert "uploads must be at most 300 KB" in errors.nth(1).inner_text()
    assert opened.asked.count(opened.page.url + "videos") == 2  # the large one was not even sent
    assert "Traceback" not in opened.page.content()


def test_several_videos_come_and_go(opened: Opened, server: Server, clip: Path, tmp_path: Path) -> None:
    page = opened.page
    numbered_video(tmp_path / "other.mp4", num_frames=40)
    opened.drop(clip, tmp_path / "other.mp4")
    opened.shown(8, card=1)
    assert page.locator(".card h2").all_inner_texts() == ["clip.mp4", "other.mp4"]
    assert page.get_attribute("#get-json", "href").count("result=") == 2
    with page.expect_response(lambda answer: answer.request.method == "DELETE"):
        page.get_by_label("Remove clip.mp4").click()
    assert page.locator(".card h2").all_inner_texts() == ["other.mp4"]
    page.reload()
    opened.shown(8)
    assert page.locator(".card h2").all_inner_texts() == ["other.mp4"]
    assert len(list(server.service.videos.folder.iterdir())) == 1
    page.get_by_label("Remove other.mp4").click()
    assert page.locator("#empty").is_visible()


def test_a_reload_shows_the_same_at_once(
    opened: Opened, server: Server, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened.drop(clip)
    opened.page.fill("#num-frames", "3")
    opened.page.wait_for_selector(".of-chosen .strip[style*='--columns: 4']")
    frames = opened.shown(3)
    with server.service._one_at_a_time:  # nothing can be computed
        opened.page.reload()
        assert opened.shown(3) == frames
    assert opened.page.locator("#num-frames").input_value() == "3"
    assert opened.said == []


def test_a_name_is_only_text(opened: Opened, clip: Path, tmp_path: Path) -> None:
    (tmp_path / HOSTILE).write_bytes(clip.read_bytes())
    opened.drop(tmp_path / HOSTILE)
    opened.shown(8)
    assert opened.page.locator(".card h2").inner_text() == HOSTILE
    assert opened.page.title() == "sosampler"
    assert opened.said == []


def test_a_click_shows_the_frame_in_full(opened: Opened, tmp_path: Path) -> None:
    page = opened.page
    numbered_video(tmp_path / "large.mp4", num_frames=12, width=480, height=320)
    opened.drop(tmp_path / "large.mp4")
    opened.shown(8)
    page.locator(".of-chosen .shot button").nth(6).click()
    page.wait_for_selector("#full[open]")
    page.keyboard.press("ArrowRight")
    assert "8 of 8" in page.locator("#full-text").inner_text()
    assert page.locator("#later").is_disabled()
    picture = page.locator("#full-picture")
    picture.evaluate("one => one.decode()")
    assert picture.evaluate("one => one.naturalWidth") == 480
    page.keyboard.press("Escape")
    assert not page.locator("#full").is_visible()
    assert opened.said == []


def test_a_mark_and_its_picture_light_up_together(opened: Opened, clip: Path) -> None:
    opened.drop(clip)
    opened.shown(8)
    opened.page.locator(".time .mark.of-chosen").nth(2).hover()
    assert opened.page.locator(".of-chosen .shot").nth(2).get_attribute("class") == "shot hot"
    opened.page.locator(".of-uniform .shot").nth(1).hover()
    assert "hot" in opened.page.locator(".time .mark.of-uniform").nth(1).get_attribute("class")
    assert opened.page.locator(".shot.hot").count() == 1


def test_it_follows_the_reader_into_the_dark(browser: Any, opened: Opened, server: Server) -> None:
    dark = Opened(browser, server, color_scheme="dark")
    assert opened.colour("body") > 600
    assert dark.colour("body") < 150
    assert dark.colour("h1", "color") > 600
    assert dark.colour("#settings") < 150
    dark.page.close()


@pytest.mark.parametrize("width", [380, 800, 1280])
def test_nothing_sticks_out(browser: Any, server: Server, clip: Path, width: int) -> None:
    server.service.videos.add_file(clip)
    found = Opened(browser, server, viewport={"width": width, "height": 800})
    found.shown(8)
    assert found.page.evaluate("document.documentElement.scrollWidth") <= width
    columns = found.page.locator(".of-chosen .shot").evaluate_all(
        "all => all.filter(one => one.offsetTop === all[0].offsetTop).length"
    )
    assert columns == {380: 3, 800: 7, 1280: 8}[width]
    found.page.close()


def test_a_server_that_is_gone_is_told(opened: Opened, server: Server, clip: Path) -> None:
    opened.page.route("**/videos", lambda route: route.abort())
    opened.drop(clip)
    opened.page.wait_for_selector(".error:has-text('is sosampler ui still running?')")
