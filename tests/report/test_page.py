"""The report: one file that needs nothing else, whose numbers, marks and pictures are those it was given."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sosampler.bank.from_arrays import write_frames
from sosampler.errors import InvalidArgument
from sosampler.evaluation.evaluate import evaluate
from sosampler.figures.curves import LEARNED, ORACLE, RULE, accuracy_figures, kind_of, looks_of, spread
from sosampler.report.compare import tiles_of
from sosampler.report.load import read_run_videos
from sosampler.report.page import MAX_COLUMNS, Answer, Strip, StripLine, data_uri, strip_of, write_report
from tests.factories import entries, teacher_by_hand

VOID = {"meta", "link", "img", "br", "hr", "input", "path", "use", "rect"}
SCORES = {"uniform": 0.40, "random": 0.38, "runs/mine": 0.61, "semi-optimal": 0.90, "optimal": 0.93}


def row(policy: str, frames: int, top1: float, **more: Any) -> dict[str, Any]:
    oracle = kind_of(policy) == ORACLE
    return {
        "policy": policy,
        "num_frames": frames,
        "num_candidates": 12,
        "top1": top1,
        "mAP": top1 + 0.01,
        "confidence": top1 - 0.1,
        "fidelity": 0.5,
        "recovered": 0.42,
        "gmacs": None if oracle else 0.1 * frames + (0.2 if policy == "runs/mine" else 0),
        "sampler_gmacs": None if oracle else 0.2 if policy == "runs/mine" else 0.0,
        "classifier_gmacs": 0.1 * frames,
        "frames_decoded": 12 if oracle or policy == "runs/mine" else frames,
        "ci95": {"top1": [top1 - 0.05, top1 + 0.06], "mAP": [top1 - 0.04, top1 + 0.04]},
        "versus_uniform": {"metric": "top1", "difference": top1 - 0.4, "ci95": [top1 - 0.5, top1 - 0.3]},
        "seconds": 0.1,
        "gap": {"max": 0.0004, "mean": 0.0, "share_below_1e-3": 1.0} if policy == "optimal" else None,
        "method": "enumeration" if policy == "optimal" else None,
        **more,
    }


ROWS = [row(policy, frames, score + frames / 100) for frames in (1, 2, 4) for policy, score in SCORES.items()]
ALL = row("all", 12, 0.55, versus_uniform=None, recovered=None)


class Page(HTMLParser):
    """Elements with their attributes, the text of table cells, and whether tags are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self._open: list[str] = []
        self._in_cell = False
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
            self._in_cell = True

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self._open.pop() == tag
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.tables[-1][-1][-1] = " ".join(f"{self.tables[-1][-1][-1]} {data}".split())


def frame(number: int, height: int = 40, width: int = 60) -> np.ndarray:
    return np.full((height, width, 3), (10 * number % 256, 60, 200), dtype=np.uint8)


def strip(count: int = 6, title: str = "video") -> Strip:
    lines = (
        StripLine("uniform", (1, 4), Answer("jump", 0.4, False)),
        StripLine("runs/mine", (0, count - 1), Answer("run", 0.75, True)),
    )
    pictures = tuple(data_uri(frame(number)) for number in range(count))
    return Strip(title, "run", pictures, tuple(0.5 * place for place in range(count)), (0.25,) * count, lines)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("report") / "made" / "here"
    facts = {"split": "test", "teacher": {"name": "resnet"}, "notes": [], "pairs": [[1, 12], [2, 12]], "seconds": 1.5}
    path = write_report(folder, "A <title> & more", [*ROWS, ALL], strips=[strip()], facts=facts, headline=(2, 12))
    assert [entry.name for entry in folder.iterdir()] == ["index.html"]
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


# ---- one file


def test_nothing_is_fetched_and_only_its_own_script_runs(text: str, page: Page) -> None:
    assert not [tag for tag, _ in page.elements if tag in ("iframe", "object", "embed", "base")]
    assert [attrs for tag, attrs in page.elements if tag == "script"] == [{}]
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [attrs["content"] for _, attrs in page.elements if "http-equiv" in attrs]
    assert policy == (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"  # and no other
    )
    links = [attrs[name] for _, attrs in page.elements for name in ("src", "href", "xlink:href") if name in attrs]
    assert len(links) > 10
    assert all(link and link.startswith(("data:", "#")) for link in links)
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)


def test_what_is_given_is_escaped(text: str, tmp_path: Path) -> None:
    assert "<title>A &lt;title&gt; &amp; more</title>" in text
    hostile = "<script>alert(1)</script>"
    rows = [row(hostile, frames, 0.5) for frames in (1, 2)]
    answer = StripLine(hostile, (0,), Answer(hostile, 0.5, True))
    shown = Strip(hostile, hostile, (data_uri(frame(1)),), (0.0,), None, (answer,))
    written = write_report(tmp_path, hostile, rows, strips=[shown], facts={hostile: hostile}, intro=hostile)
    tags = [tag for tag, _ in Page(written.read_text(encoding="utf-8")).elements]
    assert tags.count("script") == 1  # its own
    assert "<script>alert" not in written.read_text(encoding="utf-8")


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    once, again = (write_report(tmp_path / name, "t", ROWS, strips=[strip()]).read_bytes() for name in ("a", "b"))
    assert once == again


def test_a_report_is_replaced_whole(tmp_path: Path) -> None:
    write_report(tmp_path, "first", ROWS, curves=())
    write_report(tmp_path, "second", ROWS, curves=())
    assert [entry.name for entry in tmp_path.iterdir()] == ["index.html"]
    assert "<h1>second</h1>" in (tmp_path / "index.html").read_text(encoding="utf-8")


# ---- the table


def table_rows(page: Page) -> list[dict[str, str]]:
    heads, *lines = page.tables[-1]
    return [dict(zip(heads, line, strict=True)) for line in lines if len(line) == len(heads)]


def test_the_table_has_every_row_and_its_numbers(page: Page) -> None:
    found = table_rows(page)
    assert len(found) == len(ROWS) + 1
    uniform, _, learned, semi_optimal, _ = found[:5]
    assert learned["policy"] == "● runs/mine learned"
    assert learned["top-1, %"] == "62.0 57.0 to 68.0"
    assert learned["mAP, %"] == "63.0"
    assert learned["against uniform"] == "+22.0 +12.0 to +32.0"
    assert learned["GMACs"] == "0.3 0.2 sampler"
    assert learned["decoded"] == "12"
    assert (uniform["against uniform"], semi_optimal["GMACs"]) == ("–", "–")  # noqa: RUF001
    groups = [line[0] for line in page.tables[-1] if len(line) == 1]
    assert groups == ["1 of 12 frames", "2 of 12 frames", "4 of 12 frames", "all 12 candidates"]


def test_every_column_is_explained(text: str, page: Page) -> None:
    heads = page.tables[-1][0]
    assert len(heads) == 9
    explained = re.findall(r"<dt>([^<]*)</dt><dd>([^<]+)</dd>", text[text.index("What the columns mean") :])
    assert heads == [name for name, _ in explained][: len(heads)]
    assert all(len(meaning) > 30 for _, meaning in explained[: len(heads)])


def test_columns_that_nobody_has_are_left_out(tmp_path: Path) -> None:
    bare = [{**one, "fidelity": None, "recovered": None, "gmacs": None, "ci95": {}} for one in ROWS]
    page = Page(write_report(tmp_path, "t", bare, curves=()).read_text(encoding="utf-8"))
    assert page.tables[-1][0] == ["policy", "top-1, %", "mAP, %", "against uniform", "confidence, %", "decoded"]
    assert table_rows(page)[0]["top-1, %"] == "41.0"


def test_the_main_metric_comes_first(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path, "t", ROWS, metric="mAP", curves=()).read_text(encoding="utf-8"))
    assert page.tables[-1][0][1:3] == ["mAP, %", "top-1, %"]
    assert table_rows(page)[0]["mAP, %"] == "42.0 37.0 to 45.0"


def test_what_the_search_may_have_missed_is_told(text: str, tmp_path: Path) -> None:
    assert "found by enumeration: no other set of frames gives the true class a probability that is higher by" in text
    assert "more than 0.0004." in text
    exact = [{**one, "gap": {"max": 1e-9}} if one["gap"] else one for one in ROWS]
    assert "gives the true class a higher probability." in write_report(tmp_path, "t", exact, curves=()).read_text()
    without = [one for one in ROWS if one["policy"] != "optimal"]
    assert "no other set" not in write_report(tmp_path, "t", without, curves=()).read_text(encoding="utf-8")


# ---- the finding


def test_tiles_tell_the_main_numbers() -> None:
    tiles = {tile.name: tile for tile in tiles_of(ROWS, "top1", (2, 12))}
    assert list(tiles) == ["uniform", "runs/mine", "gain", "semi-optimal"]
    assert (tiles["uniform"].value, tiles["runs/mine"].value) == ("42.0 %", "63.0 %")
    assert tiles["gain"].value == "+23.0"
    assert "(95 %: +13.0 to +33.0); 42 % of what" in tiles["gain"].remark


def test_tiles_name_the_best_of_several_samplers() -> None:
    rows = [*ROWS, row("runs/better", 2, 0.8), row("runs/worse", 2, 0.5)]
    assert "runs/better" in [tile.name for tile in tiles_of(rows, "top1", (2, 12))]
    assert [tile.name for tile in tiles_of([ALL], "top1")] == []


# ---- looks and figures


def test_policies_of_a_report_differ_without_colour() -> None:
    names = ["uniform", "random", "all", "centre", "a", "b", "c", "semi-optimal", "semi-optimal-max", "optimal"]
    looks = looks_of(names)
    assert [looks[name].kind for name in names] == [RULE] * 4 + [LEARNED] * 3 + [ORACLE] * 3
    assert len({(look.mark, look.dash, look.kind == ORACLE) for look in looks.values()}) == len(names)
    assert len({look.symbol for look in looks.values()}) == len(names)


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_letters_stand_out_from_their_ground_in_light_and_dark(text: str) -> None:
    """WCAG asks for a contrast of 4.5 for text."""
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#\w{6});", block)) for block in re.findall(r":root {(.*?)}", text, re.S)[:2]
    )
    assert light != dark
    for scheme in (light, dark):
        for ground in ("paper", "card", "tint"):
            for ink in set(scheme) - {"paper", "card", "tint", "line", "grid"}:
                bright, dim = sorted((luminance(scheme[ink]), luminance(scheme[ground])), reverse=True)
                assert (bright + 0.05) / (dim + 0.05) >= 4.5, (ink, ground)


def test_figures_take_their_colours_from_the_page(text: str) -> None:
    figures = accuracy_figures([*ROWS, ALL], "top1")
    assert [figure.title.split(",")[0] for figure in figures] == [
        "Accuracy against the number of frames",
        "Accuracy against cost",
    ]
    for figure in figures:
        drawn = ElementTree.fromstring(figure.svg.replace("xlink:", ""))
        assert drawn.get("viewBox")
        assert drawn.get("width") is None
        used = set(re.findall(r"var\(--([\w-]+)\)", figure.svg))
        assert {"ink", "rule", "learned-1"} <= used
        assert used <= set(re.findall(r"--([\w-]+):", text))
        assert not re.search(r"#0102[0-9a-f]{2}", figure.svg)  # no colour that only stands for another
        assert "runs/mine" in figure.svg
    assert "optimal" in figures[0].svg
    assert "optimal" not in figures[1].svg  # what they know has no price


def test_points_lie_where_the_numbers_say() -> None:
    """The marks of the learned sampler, in the figure's coordinates, against those of the axis' labels."""
    svg = accuracy_figures([row("mine", 1, 0.2), row("mine", 2, 0.6), row("mine", 4, 0.4)], "top1")[0].svg
    drawn = ElementTree.fromstring(svg.replace("xlink:", "").replace('xmlns="http://www.w3.org/2000/svg"', ""))
    marks = [
        (float(use.attrib["x"]), float(use.attrib["y"]))
        for use in drawn.iter("use")
        if "var(--learned-1)" in use.attrib.get("style", "")
    ]
    assert len(marks) == 3
    (x1, y1), (x2, y2), (x4, y4) = marks
    assert (x4 - x2) == pytest.approx(2 * (x2 - x1), rel=1e-3)
    assert y2 < y4 < y1
    assert (y1 - y4) == pytest.approx((y1 - y2) / 2, rel=1e-3)


def test_names_are_no_formulas() -> None:
    (figure,) = accuracy_figures([row("$\\frac$", frames, 0.5) for frames in (1, 2)], "top1")
    assert "● $\\frac$<" in figure.svg
    (odd,) = accuracy_figures([row("half \udcff", frames, 0.5) for frames in (1, 2)], "top1")
    assert r"● half \xff<" in odd.svg


def test_one_number_of_frames_makes_no_curve(tmp_path: Path) -> None:
    single = [one for one in ROWS if one["num_frames"] == 2]
    assert accuracy_figures(single, "top1") == []
    assert "<figure>" not in write_report(tmp_path, "t", single).read_text(encoding="utf-8")


def test_pairs_make_one_curve_where_frames_grow_with_candidates() -> None:
    pairs = [row(name, 2 * n, 0.5 + n / 10, num_candidates=6 * n) for n in (1, 2) for name in ("uniform", "x" * 40)]
    figures = accuracy_figures(pairs, "top1")
    assert [figure.title for figure in figures] == [
        "Accuracy against the number of frames, 2 of 6, 4 of 12",
        "Accuracy against cost, 2 of 6, 4 of 12",
    ]
    assert f"● …{'x' * 25}<" in figures[0].svg  # a name that would take half of the figure
    crossed = [row("uniform", 2, 0.5, num_candidates=count) for count in (6, 12)]
    assert accuracy_figures(crossed, "top1") == []


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1), max_size=9))
def test_labels_are_spread_in_order(wanted: list[float]) -> None:
    found = spread(wanted, 0.1)
    order = sorted(range(len(wanted)), key=lambda place: wanted[place])
    placed = [found[place] for place in order]
    assert all(later - earlier >= 0.1 - 1e-6 for earlier, later in pairwise(placed))
    if all(later - earlier >= 0.1 for earlier, later in pairwise(sorted(wanted))):
        assert found == pytest.approx(wanted, abs=1e-8)  # nobody moves without need


# ---- strips


def test_each_policy_marks_the_frames_it_chose(page: Page) -> None:
    heads, uniform, learned = page.tables[0]
    assert heads[0] == "candidates"
    assert [place for place, cell in enumerate(uniform[1:7]) if cell == "■"] == [1, 4]
    assert [place for place, cell in enumerate(learned[1:7]) if cell == "●"] == [0, 5]
    assert {*uniform[1:7], *learned[1:7]} == {"■", "●", "·"}
    assert uniform[-1] == "✗ jump 40.0 %, wrong"
    assert learned[-1] == "✓ run 75.0 %, right"
    pictures = [attrs for tag, attrs in page.elements if tag == "img"]
    assert [picture["alt"] for picture in pictures[1:5:3]] == ["candidate 2, 0:00.5", "candidate 5, 0:02.0"]
    assert [picture["src"] for picture in pictures] == [data_uri(frame(number)) for number in range(6)]  # each once


def test_of_many_candidates_those_that_were_chosen_have_a_column(tmp_path: Path) -> None:
    page = Page(
        write_report(tmp_path, "t", ROWS, strips=[strip(MAX_COLUMNS + 1)], curves=()).read_text(encoding="utf-8")
    )
    heads, uniform, learned = page.tables[0]
    assert heads == ["candidates", "0:00.0", "0:00.5", "0:02.0", "0:12.0"]
    assert (uniform[1:5], learned[1:5]) == (["·", "■", "■", "·"], ["●", "·", "·", "●"])
    assert sum(tag == "img" for tag, _ in page.elements) == 4
    styles = [attrs.get("style") or "" for tag, attrs in page.elements if tag in ("i", "b")]
    assert sum("height: 25.0%" in style for style in styles) == MAX_COLUMNS + 1  # all of them on the time line
    marks = [style for style in styles if style.startswith("left") and ";" not in style][:4]
    assert marks == ["left: 4.17%", "left: 16.67%", "left: 0.0%", "left: 100.0%"]


def test_scores_and_missing_pictures(tmp_path: Path) -> None:
    line = StripLine("runs/mine", (1,), Answer("jump", 0.5, False, 0.25), (-1.234, 0.5, None))
    bare = Strip("v", "run", (), (0.0, 1.0, 2.0), None, (line,))
    page = Page(write_report(tmp_path, "t", ROWS, strips=[bare], curves=()).read_text(encoding="utf-8"))
    assert page.tables[0][1] == ["● runs/mine", "· −1.23", "● 0.50", "· –", "✗ jump 50.0 %, wrong; label 25.0 %"]  # noqa: RUF001
    assert "img" not in {tag for tag, _ in page.elements}


def test_pictures_are_made_small_and_keep_their_shape() -> None:
    uri = data_uri(frame(3, height=300, width=480), side=100)
    with Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))) as picture:
        assert picture.size == (160, 100)
        assert np.abs(np.asarray(picture).astype(int) - (30, 60, 200)).max() <= 4
    small = data_uri(frame(3, height=10, width=20))
    with Image.open(io.BytesIO(base64.b64decode(small.split(",")[1]))) as picture:
        assert picture.size == (20, 10)


def test_strips_of_a_bank_show_what_was_evaluated(tmp_path: Path) -> None:
    bank = write_frames(tmp_path / "bank", entries(16), classes=("run", "jump", "swim"))
    answers = teacher_by_hand(bank)
    evaluation = evaluate(bank, ["uniform", "semi-optimal"], num_frames=2, num_candidates=6, split="test")
    part = bank.split("test")
    videos = read_run_videos(evaluation.write_run(tmp_path / "run") / "videos.jsonl")
    keys = [(policy, 2, 6) for policy in ("uniform", "semi-optimal")]
    strips = [strip_of(videos, video, keys, part) for video in videos.videos[:3]]
    assert [one.title for one in strips] == part.ids[:3] == ["v3", "v7", "v11"]
    for one in strips:
        number = int(one.title[1:])
        probs = answers[number].astype(np.float64)
        slots = bank[number].uniform(6)
        assert one.label == bank.classes[number % 3]
        assert one.values == pytest.approx(probs[slots, number % 3], abs=1e-4)
        assert one.seconds == pytest.approx(bank[number].pts_seconds[slots], abs=1e-3)
        uniform, semi_optimal = one.lines
        # Features are ten times the probabilities, taken for logits; a clip is the mean of its features.
        frame_logits = 10 * probs[slots]
        confidence = (np.exp(frame_logits) / np.exp(frame_logits).sum(axis=1, keepdims=True))[:, number % 3]
        assert set(semi_optimal.chosen) == set(np.argsort(-confidence, kind="stable")[:2].tolist())
        assert uniform.chosen == (1, 4)
        logits = frame_logits[list(uniform.chosen)].mean(axis=0)
        assert uniform.answer is not None
        assert uniform.answer.label == bank.classes[int(logits.argmax())]
        assert uniform.answer.probability == pytest.approx(
            float((np.exp(logits) / np.exp(logits).sum()).max()), abs=1e-3
        )
        assert uniform.answer.right == (int(logits.argmax()) == number % 3)


# ---- what is refused


def test_bad_input_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="at least one row"):
        write_report(tmp_path, "t", [])
    with pytest.raises(InvalidArgument, match="metric='f1' is unknown"):
        write_report(tmp_path, "t", ROWS, metric="f1")
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidArgument, match="the folder cannot be made"):
        write_report(tmp_path / "file" / "below", "t", ROWS)
    with pytest.raises(InvalidArgument, match="needs as many times"):
        Strip("v", "run", (data_uri(frame(0)),), (0.0, 1.0), None, ())
    with pytest.raises(InvalidArgument, match="2 scores of 1"):
        Strip("v", "run", (), (0.0,), None, (StripLine("uniform", (0,), None, (0.0, 1.0)),))
    with pytest.raises(InvalidArgument, match=r"chose \(1,\) of 1 candidates"):
        Strip("v", "run", (data_uri(frame(0)),), (0.0,), None, (StripLine("uniform", (1,)),))
