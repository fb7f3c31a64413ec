"""The report in a browser: it loads in silence, sorts and filters, and is fit for the dark, paper and telephones."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sosampler.bank.from_arrays import FrameEntry, write_frames
from sosampler.report.run_report import write_run_report
from tests.conftest import unavailable
from tests.report.runs import CLASSES, SEVERAL, write_made_up_run

HOSTILE = "<script>document.title = 'broken'</script>"
IDS = [f"video-{number:02d}" for number in range(29)] + [HOSTILE]
# Without its own calls to the network, and without a sandbox, which root cannot have.
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        unavailable("browser", "no chromium is installed (apt-get install chromium)")
    tried = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    if tried.returncode:
        unavailable("browser", f"{program} does not start: {tried.stderr.strip()[:200]}")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        unavailable("browser", "playwright is not installed (pip install playwright)")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    rng = np.random.default_rng(0)
    entries = [
        FrameEntry(
            id=name,
            labels=(number % 3,),
            frames=np.broadcast_to(rng.integers(0, 256, (6, 1, 1, 3), dtype=np.uint8), (6, 48, 64, 3)).copy(),
            split="test",
        )
        for number, name in enumerate(IDS)
    ]
    write_frames(folder / "bank", entries, classes=CLASSES)
    write_made_up_run(folder / "run", ids=IDS, pairs=SEVERAL, bank=str(folder / "bank"))
    return write_run_report(folder / "run", folder / "report.html", videos=6)


class Opened:
    """A page with everything that it said and asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any) -> None:
        self.page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())

    def colour(self, selector: str, name: str = "background-color") -> tuple[int, ...]:
        text = self.page.eval_on_selector(selector, f"one => getComputedStyle(one)['{name}']")
        return tuple(int(part) for part in text[text.index("(") + 1 : -1].split(",")[:3])


@pytest.fixture
def opened(browser: Any, report: Path) -> Iterator[Opened]:
    found = Opened(browser, report)
    yield found
    found.page.close()


def column(opened: Opened, table: str, place: int) -> list[str]:
    """Texts of a column, of the rows that are shown."""
    rows = f"{table} tbody tr:not(.group):not([hidden])"
    found: list[str] = opened.page.eval_on_selector_all(
        rows, f"rows => rows.map(row => row.cells[{place}].textContent.trim())"
    )
    return found


def test_it_loads_in_silence_and_asks_for_nothing(opened: Opened, report: Path) -> None:
    assert opened.said == []
    assert [url for url in opened.asked if not url.startswith("data:")] == [report.as_uri()]
    assert opened.page.title() == "sosampler: run"
    assert HOSTILE in column(opened, ".videos", 0)


def test_no_script_but_its_own_can_run(opened: Opened) -> None:
    opened.page.evaluate("document.body.insertAdjacentHTML('beforeend', '<img src=x: onerror=\"window.ran = 1\">')")
    opened.page.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = 2'}))"
    )
    assert opened.page.evaluate("window.ran") is None
    assert any("Content Security Policy" in text for text in opened.said)


def test_a_click_sorts_down_then_up_then_as_it_was(opened: Opened) -> None:
    opened.page.click(".videos >> xpath=ancestor::details >> summary")
    before = column(opened, ".videos", 7)
    numbers = [float(text.replace("\N{MINUS SIGN}", "-")) for text in before]
    button = opened.page.locator(".videos thead button").nth(7)
    head = opened.page.locator(".videos thead th").nth(7)
    for way, expected in (
        ("descending", sorted(numbers, reverse=True)),
        ("ascending", sorted(numbers)),
        ("none", numbers),
    ):
        button.click()
        found = [float(text.replace("\N{MINUS SIGN}", "-")) for text in column(opened, ".videos", 7)]
        assert (head.get_attribute("aria-sort"), found) == (way, expected)
    assert column(opened, ".videos", 7) == before


def test_keys_sort_too_and_one_column_at_a_time(opened: Opened) -> None:
    opened.page.locator(".classes thead button").nth(5).focus()
    opened.page.keyboard.press("Enter")
    opened.page.locator(".classes thead button").nth(0).focus()
    opened.page.keyboard.press("Space")
    assert column(opened, ".classes", 0) == sorted(CLASSES)
    ways = opened.page.eval_on_selector_all(".classes thead th", "heads => heads.map(head => head.ariaSort)")
    assert ways == ["ascending"] + ["none"] * 5


def test_policies_sort_by_their_names_and_not_by_their_signs(opened: Opened) -> None:
    table = ".numbers[data-filter]:not(.classes):not(.videos)"
    opened.page.locator(f"{table} thead button").first.click()
    names = [line.split()[1] for line in column(opened, table, 0)]
    assert names == ["mine", "optimal", "semi-optimal", "uniform"] * len(SEVERAL)


def test_sorting_is_told_where_a_browser_has_no_property_for_it(browser: Any, report: Path) -> None:
    page = browser.new_page()
    page.add_init_script("delete Element.prototype.ariaSort")
    page.goto(report.as_uri())
    page.locator(".classes thead button").first.click()
    assert page.locator(".classes thead th").first.get_attribute("aria-sort") == "ascending"
    page.close()


def test_groups_stay_together_and_what_is_unknown_comes_last(opened: Opened) -> None:
    table = ".numbers[data-filter]:not(.classes):not(.videos)"
    groups = opened.page.eval_on_selector_all(f"{table} .group", "rows => rows.map(row => row.textContent.trim())")
    heads = opened.page.eval_on_selector_all(f"{table} thead th", "heads => heads.map(head => head.textContent)")
    opened.page.locator(f"{table} thead button").nth(heads.index("GMACs")).click()
    opened.page.locator(f"{table} thead button").nth(heads.index("GMACs")).click()  # rising
    bodies = opened.page.eval_on_selector_all(
        f"{table} tbody", "bodies => bodies.map(body => [...body.rows].map(row => row.cells[0].textContent.trim()))"
    )
    assert [body[0] for body in bodies] == groups
    for body in bodies:
        assert [line.split()[1] for line in body[1:]] == ["uniform", "mine", "semi-optimal", "optimal"]


def test_words_filter_rows(opened: Opened) -> None:
    opened.page.click(".videos >> xpath=ancestor::details >> summary")
    box = opened.page.locator("details .filter input")
    every = opened.page.eval_on_selector_all(".videos tbody tr", "rows => rows.map(row => row.innerText)")
    texts = dict(zip(column(opened, ".videos", 0), (" ".join(text.lower().split()) for text in every), strict=True))
    for typed, words in (("SWIM alone", ("swim", "alone")), ('"swim sampler alone"', ("swim sampler alone",))):
        box.fill(typed)
        expected = [name for name, text in texts.items() if all(word in text for word in words)]
        assert 0 < len(expected) < 30
        assert column(opened, ".videos", 0) == expected
        assert opened.page.locator("details .filter output").text_content() == f"{len(expected)} of 30"
    box.fill("nothing has these")
    assert column(opened, ".videos", 0) == []
    box.fill("")
    assert len(column(opened, ".videos", 0)) == 30
    assert opened.page.locator("details .filter output").text_content() == ""


def test_rows_are_found_by_their_group(opened: Opened) -> None:
    table = ".numbers[data-filter]:not(.classes):not(.videos)"
    opened.page.locator(".filter input").nth(0).fill('"4 of 6" mine')
    assert len(column(opened, table, 0)) == 1
    assert opened.page.locator(f"{table} .group:not([hidden])").all_text_contents() == ["4 of 6 frames"]


def test_a_strip_shows_its_pictures_and_marks(opened: Opened) -> None:
    strip = opened.page.locator(".strip").first
    loaded = strip.locator("img").evaluate_all("all => all.map(one => one.complete && one.naturalWidth)")
    assert loaded == [64] * 6
    widths = strip.locator("img").evaluate_all("all => all.map(one => one.getBoundingClientRect().width)")
    assert min(widths) > 40
    for line in range(4):
        assert strip.locator("tbody tr").nth(line).locator("[aria-label=chosen]").count() == 2
    # A mark stands below its picture.
    first = strip.locator("tbody tr").first
    place = first.locator("td").evaluate_all("cells => cells.findIndex(cell => cell.matches('.on'))")
    mark, picture = first.locator(".mark").first.bounding_box(), strip.locator("img").nth(place).bounding_box()
    assert mark is not None
    assert picture is not None
    assert mark["x"] + mark["width"] / 2 == pytest.approx(picture["x"] + picture["width"] / 2, abs=2)


def test_it_follows_the_reader_into_the_dark(browser: Any, report: Path, opened: Opened) -> None:
    dark = Opened(browser, report, color_scheme="dark")
    assert sum(opened.colour("body")) > 600
    assert sum(dark.colour("body")) < 150
    assert sum(dark.colour("h1", "color")) > 600
    assert sum(dark.colour(".plot svg text", "fill")) > 400  # figures too
    assert dark.said == []
    dark.page.emulate_media(media="print")
    assert sum(dark.colour("body")) > 600  # paper is white
    dark.page.close()


@pytest.mark.parametrize("width", [400, 800, 1280])
def test_nothing_sticks_out(browser: Any, report: Path, width: int) -> None:
    found = Opened(browser, report, viewport={"width": width, "height": 800})
    found.page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    assert found.page.evaluate("document.documentElement.scrollWidth") <= width
    wide = found.page.eval_on_selector_all(
        "main *:not(svg *)",
        "(all, width) => all.filter(one => !one.closest('.scroll') && one.getBoundingClientRect().right > width + 1)"
        ".map(one => one.outerHTML.slice(0, 80))",
        width,
    )
    assert wide == []
    found.page.close()


def test_paper_has_no_boxes_to_type_into(opened: Opened) -> None:
    assert opened.page.locator(".filter").first.is_visible()
    opened.page.emulate_media(media="print")
    assert not opened.page.locator(".filter").first.is_visible()
    assert opened.page.locator(".strip").first.is_visible()
    assert len(opened.page.pdf(format="A4")) > 10_000


def test_paper_has_all_rows_whatever_the_screen_shows(opened: Opened) -> None:
    table = ".numbers[data-filter]:not(.classes):not(.videos)"
    rows = opened.page.locator(f"{table} tbody tr")
    opened.page.locator(".filter input").nth(0).fill("semi-optimal")
    assert 0 < opened.page.locator(f"{table} tbody tr:visible").count() < rows.count()
    opened.page.emulate_media(media="print")
    assert opened.page.locator(f"{table} tbody tr:visible").count() == rows.count()


@pytest.mark.parametrize("width", [400, 1280])
def test_long_names_do_not_stick_out(browser: Any, tmp_path: Path, width: int) -> None:
    long = "aratherlongnamewithoutanyblank" * 8
    write_made_up_run(tmp_path / "run", ids=IDS[:6], teacher={"name": long}, split=long)
    path = write_run_report(tmp_path / "run", tmp_path / "long.html", title=long, intro=long)
    found = Opened(browser, path, viewport={"width": width, "height": 800})
    assert found.page.evaluate("document.documentElement.scrollWidth") <= width
    found.page.close()


def test_without_the_script_tables_are_plain(browser: Any, report: Path) -> None:
    found = Opened(browser, report, java_script_enabled=False)
    assert found.page.locator("thead button, .filter").count() == 0
    assert found.page.locator(".numbers tbody tr").count() > 30
    assert found.page.locator(".numbers thead th").first.text_content() == "class"
    found.page.close()
