"""The picture of accuracy against cost: points where the numbers say, nothing that hides or touches another."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from sosampler.errors import InvalidArgument
from sosampler.figures.curves import (
    COLOURS,
    LEARNED,
    ORACLE,
    RULE,
    SYSTEM,
    accuracy_figures,
    cost_figure,
    looks_of,
    looks_of_rows,
    write_cost_curve,
)
from sosampler.report.page import tiles_of, write_report

T = 10


def row(policy: str, frames: int | None, top1: float, **more: Any) -> dict[str, Any]:
    seen = 3.5 if frames is None else frames
    return {
        "policy": policy,
        "num_frames": frames,
        "num_candidates": T,
        "frames_classified": seen,
        "frames_decoded": seen,
        "gmacs": 4.0 * seen,
        "sampler_gmacs": 0.3 if frames is None else 0.0,
        "top1": top1,
        "mAP": top1 + 0.01,
        "ci95": {"top1": [top1 - 0.03, top1 + 0.02], "mAP": [top1 - 0.02, top1 + 0.04]},
        **more,
    }


def policy(name: str, base: float, **more: Any) -> list[dict[str, Any]]:
    return [row(name, frames, base + frames / 100, **more) for frames in (1, 2, 4, 8)]


def system(name: str, base: float, **more: Any) -> list[dict[str, Any]]:
    """With its dial from costly to cheap, so that sorting matters."""
    return [
        row(f"{name}@{value}", None, base + seen / 90, frames_decoded=seen + 0.25, gmacs=4 * seen + 0.3, **more)
        for value, seen in ((0.1, 7.5), (0.5, 3.5), (0.95, 1.25))
    ]


ORACLES = [
    {**one, "gmacs": None, "frames_decoded": T} for name in ("semi-optimal", "optimal") for one in policy(name, 0.8)
]
LOOKING = [{**one, "frames_decoded": T, "gmacs": one["gmacs"] + 2} for one in policy("runs/sampler", 0.6)]
ROWS = [*policy("uniform", 0.5), *LOOKING, row("all", T, 0.68), *ORACLES, *system("runs/exit", 0.55)]


def by_name(figure: Any) -> dict[str, Any]:
    """Curves of the last panel, by their names in the legend."""
    legend = figure.legends[0]
    handles = dict(zip([text.get_text() for text in legend.get_texts()], legend.legend_handles, strict=True))
    found = {}
    for name, handle in handles.items():
        for line in figure.axes[-1].get_lines():
            same = all(
                getattr(line, f"get_{what}")() == getattr(handle, f"get_{what}")()
                for what in ("marker", "color", "markerfacecolor", "linestyle", "fillstyle")
            )
            if same and len(line.get_xdata()):
                found[name] = line
    return found


# ---- numbers


def test_points_lie_where_the_numbers_say() -> None:
    figure = cost_figure(ROWS, "top1")
    cost, frames = figure.axes
    assert (cost.get_xscale(), frames.get_xscale()) == ("log", "linear")
    lines = by_name(figure)
    assert list(lines) == ["uniform", "all", "runs/sampler", "runs/exit", "semi-optimal", "optimal"]
    for name, line in lines.items():
        own = [one for one in ROWS if one["policy"].split("@")[0] == name]
        own.sort(key=lambda one: one["frames_decoded"])
        assert list(line.get_xdata()) == pytest.approx([one["frames_decoded"] for one in own])
        assert list(line.get_ydata()) == pytest.approx([100 * one["top1"] for one in own])
    priced = {tuple(line.get_xdata()): list(line.get_ydata()) for line in cost.get_lines()}
    assert set(priced) == {
        (4.0, 8.0, 16.0, 32.0),
        (6.0, 10.0, 18.0, 34.0),
        (40.0,),
        (5.3, 14.3, 30.3),  # the values of one dial are one curve
    }
    assert priced[5.3, 14.3, 30.3] == pytest.approx([100 * (0.55 + seen / 90) for seen in (1.25, 3.5, 7.5)])


@pytest.mark.parametrize("metric", ["top1", "mAP"])
def test_bars_are_the_intervals(metric: str) -> None:
    figure = cost_figure(ROWS, metric)
    for axes, rows in zip(figure.axes, ([one for one in ROWS if one["gmacs"]], ROWS), strict=True):
        bars = sorted(tuple(np.round(segment[:, 1], 6)) for bar in axes.collections for segment in bar.get_segments())
        assert bars == sorted(tuple(np.round([100 * bound for bound in one["ci95"][metric]], 6)) for one in rows)
    low, high = figure.axes[0].get_ylim()
    assert low < min(bar[0] for bar in bars)
    assert high > max(bar[1] for bar in bars)
    assert figure.axes[0].get_ylabel() == {"top1": "top-1 accuracy, %", "mAP": "mean average precision, %"}[metric]


def test_a_system_as_it_is_joins_its_dial() -> None:
    figure = cost_figure([*system("a", 0.5), row("a", None, 0.6, frames_decoded=2.0)], "top1")
    assert list(by_name(figure)) == ["a"]
    assert list(by_name(figure)["a"].get_xdata()) == [1.5, 2.0, 3.75, 7.75]


def test_without_multiply_adds_there_is_one_panel() -> None:
    figure = cost_figure([{**one, "gmacs": None} for one in ROWS], "top1")
    (axes,) = figure.axes
    assert axes.get_xlabel() == "decoded frames a video, mean"
    assert axes.get_ylabel() == "top-1 accuracy, %"
    assert "no panel of GMACs: those of the classifier are not known" in figure._supxlabel.get_text()


def test_curves_whose_cost_is_not_known_are_named() -> None:
    """Where the classifier is not at hand, systems alone have a cost."""
    assert "not known" not in cost_figure(ROWS, "top1")._supxlabel.get_text()  # oracles have none
    unpriced = [{**one, "gmacs": None} if one["num_frames"] else one for one in ROWS]
    figure = cost_figure(unpriced, "top1")
    assert len(figure.axes) == 2
    remark = figure._supxlabel.get_text()
    assert remark.endswith("not in the panel of GMACs, because theirs are not known: uniform, runs/sampler, all")
    more = [{**one, "gmacs": None} if one["num_frames"] else one for one in many()]
    named = "uniform, random, centre, frame-difference and 4 more"
    assert cost_figure(more, "top1")._supxlabel.get_text().endswith(named)


def test_rows_may_be_plain() -> None:
    """As benchmarks make them of several seeds."""
    plain = [
        {"policy": one["policy"], "num_frames": one["num_frames"], "frames_decoded": one["frames_decoded"]}
        | {"gmacs": one["gmacs"], "top1": one["top1"]}
        for one in ROWS
    ]
    figure = cost_figure(plain, "top1")
    assert not [bar for axes in figure.axes for bar in axes.collections]
    assert list(by_name(figure)) == list(by_name(cost_figure(ROWS, "top1")))


def test_several_numbers_of_candidates() -> None:
    more = [{**one, "num_candidates": 20, "gmacs": one["gmacs"] and 2 * one["gmacs"]} for one in ROWS]
    names = list(by_name(cost_figure([*ROWS, *more], "top1")))
    assert names == [
        *("uniform, T=10", "uniform, T=20", "all", "runs/sampler, T=10", "runs/sampler, T=20"),
        *("runs/exit, T=10", "runs/exit, T=20", "semi-optimal, T=10", "semi-optimal, T=20"),
        *("optimal, T=10", "optimal, T=20"),
    ]
    # Where N grows with T there is one curve.
    pairs = [row("uniform", n, 0.5, num_candidates=4 * n) for n in (2, 4)]
    pairs += [row("a", None, 0.6, num_candidates=4 * n, frames_decoded=n + 0.5) for n in (2, 4)]
    assert list(by_name(cost_figure(pairs, "top1"))) == ["uniform", "a"]


@pytest.mark.parametrize("costs", [(3.1, 3.4), (0.5, 0.9), (4.0, 40.0), (1e-3, 2e3), (5.0,)])
def test_the_axis_of_cost_can_be_read(costs: tuple[float, ...]) -> None:
    figure = cost_figure([row("uniform", 1 + place, 0.5, gmacs=cost) for place, cost in enumerate(costs)], "top1")
    axes = figure.axes[0]
    low, high = axes.get_xlim()
    shown = [float(label.get_text()) for label in axes.get_xticklabels()]
    assert shown == pytest.approx(list(axes.get_xticks()), rel=1e-6)
    assert 1 <= len([tick for tick in shown if low <= tick <= high]) <= 10
    if len(costs) > 1:
        assert len(shown) >= 2


# ---- looks


def many(samplers: int = 3, systems: int = 4) -> list[dict[str, Any]]:
    """Most curves lie close together. Without more it is ten policies and four systems."""
    names = ["uniform", "random", "centre", "frame-difference", "farthest-first"]
    names += [f"runs/a/long/name/of/sampler-{number}" for number in range(samplers)]
    rows = [one for place, name in enumerate(names) for one in policy(name, 0.5 + place / 300)]
    rows = [{**one, "frames_decoded": T} if one["policy"] in names[3:] else one for one in rows] + ORACLES
    return rows + [one for number in range(systems) for one in system(f"runs/system-{number}", 0.55 + number / 200)]


def _without_prices(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**one, "gmacs": None} if one["num_frames"] else one for one in rows]


@pytest.mark.parametrize(
    "rows",
    [
        *(ROWS, many(), many(20, 9), [row("uniform", 2, 0.5)], _without_prices(many(20, 9))),
        *(_without_prices(policy("uniform", 0.5)), _without_prices([*LOOKING, *system("a", 0.5)])),
    ],
)
@pytest.mark.parametrize("title", [None, "120 videos of test, a classifier with a long name"])
def test_nothing_overlaps(rows: list[dict[str, Any]], title: str | None) -> None:
    figure = cost_figure(rows, "top1", title=title)
    figure.canvas.draw()
    boxes = [(text.get_text(), text.get_window_extent()) for text in _texts(figure)]
    for text, box in boxes:
        assert (box.extents[:2] >= -1).all(), text
        assert (box.extents[2:] <= figure.bbox.extents[2:] + 1).all(), text
    for (text, one), (other_text, other) in combinations(boxes, 2):
        assert not _touch(one, other), (text, other_text)
    # Nor does the legend lie on a panel, or a curve outside of its panel.
    for axes in figure.axes:
        panel = axes.get_window_extent()
        assert not _touch(figure.legends[0].get_window_extent(), panel)
        for line in axes.get_lines():
            points = line.get_transform().transform(np.column_stack(line.get_data()))
            assert (points >= panel.extents[:2] - 1).all()
            assert (points <= panel.extents[2:] + 1).all()


def _touch(one: Any, other: Any) -> bool:
    (left, bottom, right, top), (left2, bottom2, right2, top2) = one.extents, other.extents
    return bool(left < right2 and left2 < right and bottom < top2 and bottom2 < top)


def _texts(figure: Any) -> list[Any]:
    """All that is written: legend, title, remark, names of axes, and the labels of ticks that are drawn."""
    found = [*figure.legends[0].get_texts(), *figure.texts]
    for number, axes in enumerate(figure.axes):
        found += [axes.xaxis.label, axes.yaxis.label]
        for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
            ticks = [tick for tick in axis.get_major_ticks() if limits[0] <= tick.get_loc() <= limits[1]]
            found += [tick.label1 for tick in ticks if axis is axes.xaxis or not number]  # heights stand at the left
    return [text for text in found if text.get_text()]


def test_upright_curves_stand_side_by_side() -> None:
    rows = [{**one, "frames_decoded": T} for name in ("a", "b", "optimal") for one in policy(name, 0.6)]
    figure = cost_figure([*rows, *policy("uniform", 0.5)], "top1")
    figure.canvas.draw()
    lines = by_name(figure)
    places = [float(lines[name].get_transform().transform((T, 50))[0]) for name in ("a", "b", "optimal")]
    step = places[1] - places[0]
    assert step > 5
    assert places[2] - places[1] == pytest.approx(step)
    assert float(figure.axes[-1].transData.transform((T, 50))[0]) == pytest.approx(places[1])  # around their x
    assert "side by side" in figure._supxlabel.get_text()
    assert "side by side" not in cost_figure(policy("uniform", 0.5), "top1")._supxlabel.get_text()


def test_systems_look_different_without_colour() -> None:
    names = ["uniform", "runs/sampler", "semi-optimal", *(f"system-{number}" for number in range(4))]
    looks = looks_of(names, names[3:])
    assert [looks[name].kind for name in names] == [RULE, LEARNED, ORACLE, *[SYSTEM] * 4]
    assert len({(look.mark, look.dash, look.kind == ORACLE) for look in looks.values()}) == len(names)
    assert len({look.symbol for look in looks.values()}) == len(names)
    more = looks_of([*(f"sampler-{number}" for number in range(12)), *names[3:], *"abcd"], [*names[3:], *"abcd"])
    assert len(set(more.values())) == 20
    # A system may be called as a rule is, and the values of a dial look alike.
    found = looks_of_rows(
        [row("frameexit@0.3", None, 0.5), row("frameexit@0.5", None, 0.5), row("frameexit", None, 0.5)]
    )
    assert {look.kind for look in found.values()} == {SYSTEM}
    assert len(set(found.values())) == 1
    assert looks_of(["frameexit"])["frameexit"].kind == RULE


def test_kinds_differ_in_their_lines() -> None:
    figure = cost_figure(ROWS, "top1")
    lines = by_name(figure)
    styles = {name: lines[name]._dash_pattern for name in ("uniform", "runs/sampler", "runs/exit", "optimal")}
    assert len({str(style) for style in styles.values()}) == 4
    assert lines["optimal"].get_markerfacecolor() == COLOURS["paper"]
    heads = [text.get_text() for text in figure.legends[0].get_texts() if text.get_fontweight() == "bold"]
    assert heads == ["rules", "learned samplers", "systems", "oracles"]
    twice = by_name(cost_figure([*policy("a", 0.5), *policy("a", 0.6, num_candidates=20)], "top1"))
    assert twice["a, T=10"].get_markerfacecolor() != twice["a, T=20"].get_markerfacecolor()


def test_colours_are_those_of_the_page(tmp_path: Path) -> None:
    text = write_report(tmp_path, "t", ROWS).read_text(encoding="utf-8")
    light = dict(re.findall(r"--([\w-]+): (#\w{6});", re.findall(r":root {(.*?)}", text, re.S)[0]))
    assert {name: light[name] for name in COLOURS} == COLOURS


# ---- files


def test_files(tmp_path: Path) -> None:
    png = write_cost_curve(ROWS, "top1", tmp_path / "new" / "curve.PNG", title="t")
    with Image.open(png) as picture:
        assert picture.format == "PNG"
        assert picture.width > 1500
        assert picture.convert("RGB").getpixel((2, picture.height // 2)) == (255, 255, 255)
    svg = write_cost_curve(ROWS, "top1", str(tmp_path / "new" / "curve.svg"))
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert {file.name for file in png.parent.iterdir()} == {"curve.PNG", "curve.svg"}
    for path in (png, svg):
        title = "t" if path is png else None
        assert write_cost_curve(ROWS, "top1", tmp_path / path.name, title=title).read_bytes() == path.read_bytes()


def test_bad_input_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"curves are written as \.svg or \.png"):
        write_cost_curve(ROWS, "top1", tmp_path / "curve.pdf")
    with pytest.raises(InvalidArgument, match="metric='f1' is unknown"):
        write_cost_curve(ROWS, "f1", tmp_path / "curve.png")
    with pytest.raises(InvalidArgument, match="at least one row"):
        write_cost_curve([], "top1", tmp_path / "curve.png")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(InvalidArgument, match="is a folder"):
        write_cost_curve(ROWS, "top1", tmp_path / "folder.svg")
    assert [file.name for file in tmp_path.iterdir()] == ["folder.svg"]


# ---- the same rows in a report


def test_figures_of_a_report_have_systems_in_the_cost_alone() -> None:
    frames, cost = accuracy_figures(ROWS, "top1")
    assert "runs/exit" not in frames.svg
    assert "runs/exit" in cost.svg
    assert "Dash-dotted: systems" in cost.caption
    assert "var(--system-1)" in cost.svg
    marks = [
        float(use.attrib["y"])
        for use in ElementTree.fromstring(cost.svg.replace("xlink:", "")).iter()
        if use.tag.endswith("use") and "var(--system-1)" in use.attrib.get("style", "")
    ]
    assert len(marks) == 3
    assert (marks[0] - marks[2]) == pytest.approx((marks[0] - marks[1]) * (7.5 - 1.25) / (3.5 - 1.25), rel=1e-3)


def test_figures_of_a_report_where_nobody_has_several_numbers_of_frames() -> None:
    single = [one for one in ROWS if one["num_frames"] in (2, None)]
    assert [one.title for one in accuracy_figures(single, "top1")] == ["Accuracy against cost, 10 candidates"]
    assert accuracy_figures([one for one in single if one["num_frames"]], "top1") == []
    assert accuracy_figures([row("a", None, 0.5)], "top1") == []
    pairs = [row("uniform", n, 0.5, num_candidates=4 * n) for n in (2, 4)]
    pairs += [one for n in (2, 4) for one in system("a", 0.5, num_candidates=4 * n)]
    frames, cost = accuracy_figures(pairs, "top1")
    assert frames.title == "Accuracy against the number of frames, 2 of 8, 4 of 16"
    assert "a, T=8" in cost.svg


def test_the_page_groups_systems_behind_the_policies(tmp_path: Path) -> None:
    text = write_report(tmp_path, "t", ROWS).read_text(encoding="utf-8")
    groups = re.findall(r'<th scope="rowgroup"[^>]*><span>(.*?)</span>', text)
    assert groups[-2:] == ["all 10 candidates", "baselines, which decide for themselves how many of 10 frames"]
    assert "<td>7.8</td>" in text  # decoded
    assert "<td>3.5</td>" in text  # classified
    assert [tile.name for tile in tiles_of(ROWS, "top1")] == ["uniform", "runs/sampler", "semi-optimal"]
    alone = write_report(tmp_path, "t", system("a", 0.5)).read_text(encoding="utf-8")
    assert 'class="tiles"' not in alone
    without = write_report(tmp_path, "t", policy("uniform", 0.5)).read_text(encoding="utf-8")
    assert "sees one frame after another" not in without


def test_rows_with_a_number_of_their_own_are_no_systems() -> None:
    names = ["class-frames", "runs/a+answer", "runs/a+auto", "runs/liteeval", "frameexit"]
    kinds = [looks_of(names, names)[name].kind for name in names]
    assert kinds == ["oracle", "learned", "learned", "system", "system"]
