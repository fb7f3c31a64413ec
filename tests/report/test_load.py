"""`sosampler report`: what is compared and shown is what the runs say, whatever they say."""

from __future__ import annotations

import json
import re
from html import unescape
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sosampler.bank.from_arrays import FrameEntry, write_frames
from sosampler.errors import InvalidArgument
from sosampler.figures.curves import report_figures
from sosampler.report.compare import (
    Contrast,
    cases,
    class_differences,
    contrast_of,
    headline_of,
    sentence_of,
    tiles_of,
    video_lines,
)
from sosampler.report.load import Prediction, RunVideo, RunVideos, read_run_videos
from sosampler.report.page import data_uri
from sosampler.report.run_report import choose_videos, write_run_report
from tests.report.runs import CLASSES, POLICIES, SEVERAL, heads_of, made_up_row, text_of, write_made_up_run
from tests.report.test_page import Page

IDS = [f"video-{number:02d}" for number in range(20)]
PAIR = (2, 6)  # the middle one of the pairs of a made-up run
CONTRAST = Contrast(("mine", *PAIR), ("uniform", *PAIR))


def picture(video: int, slot: int) -> np.ndarray:
    return np.full((24, 36, 3), (10 * video, 30 * slot, 90), dtype=np.uint8)


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entries = [
        FrameEntry(
            id=name,
            labels=(number % 3,),
            frames=np.stack([picture(number, slot) for slot in range(6)]),
            split="test",
        )
        for number, name in enumerate(IDS)
    ]
    return write_frames(tmp_path_factory.mktemp("report") / "bank", entries, classes=CLASSES).path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, bank: Path) -> Path:
    folder = tmp_path_factory.mktemp("report") / "run"
    write_made_up_run(folder, ids=IDS, pairs=SEVERAL, bank=str(bank))
    return folder


@pytest.fixture(scope="module")
def text(run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return text_of(run, out=tmp_path_factory.mktemp("page"), videos=9)


def shown_in(text: str, title: str) -> list[str]:
    """Names of the videos of one gallery."""
    section = text[text.index(f">{title}</h") :].split("</section>")[0]
    return re.findall(r'class="sub">[^<]* <span class="faint">([^<]*)</span>', section)


# ---- who is compared


def said(confidence: float, right: bool, predicted: int = 0) -> Prediction:
    return Prediction(predicted, 0.5, confidence, right, (0,))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from([0.1, 0.3, 0.6]), st.booleans(), st.sampled_from([0.1, 0.5]), st.booleans())))
def test_cases_follow_their_rule(told: list[tuple[float, bool, float, bool]]) -> None:
    sampler = [said(mine, right) for mine, right, _, _ in told]
    uniform = [said(other, right) for _, _, other, right in told]
    for success, better, worse in ((True, sampler, uniform), (False, uniform, sampler)):
        found = cases(sampler, uniform, success=success)
        assert set(found) == {number for number in range(len(told)) if better[number].right and not worse[number].right}
        leads = [better[number].confidence - worse[number].confidence for number in found]
        assert leads == sorted(leads, reverse=True)
        same = [(lead, number) for lead, number in zip(leads, found, strict=True)]
        assert all(a[1] < b[1] for a, b in pairwise(same) if a[0] == b[0])


def test_classes_against_loops(run: Path) -> None:
    videos = read_run_videos(run / "videos.jsonl")
    found = class_differences(videos, CONTRAST)
    assert sorted(one.name for one in found) == sorted(CLASSES)
    for one in found:
        own = [number for number in range(20) if CLASSES[number % 3] == one.name]
        place = {policy: videos.keys.index((policy, *PAIR)) for policy in ("mine", "uniform")}
        right = {
            policy: np.mean([videos.videos[number].predictions[place[policy]].right for number in own])
            for policy in place
        }
        assert one.videos == len(own)
        assert (one.sampler, one.uniform) == pytest.approx((right["mine"], right["uniform"]))
        assert one.difference == pytest.approx(right["mine"] - right["uniform"])
    assert [one.difference for one in found] == sorted((one.difference for one in found), reverse=True)


def test_a_video_of_several_labels_counts_for_each_of_its_classes() -> None:
    both = (said(0.5, True), said(0.25, False))
    videos = RunVideos("", CLASSES, (CONTRAST.sampler, CONTRAST.uniform), (RunVideo("a", (0, 2), {}, both),))
    found = class_differences(videos, CONTRAST)
    assert [(one.name, one.videos, one.difference, one.confidence) for one in found] == [
        ("run", 1, 1.0, 0.25),
        ("swim", 1, 1.0, 0.25),
    ]
    (line,) = video_lines(videos, CONTRAST)
    assert (line.label, line.right, line.lead) == ("run, swim", "sampler alone", 0.25)


def test_the_best_sampler_is_compared_where_uniform_has_as_many_frames(run: Path) -> None:
    videos = read_run_videos(run / "videos.jsonl")
    rows = json.loads((run / "evaluation.json").read_text())["rows"]
    assert contrast_of(rows, "top1", videos) == CONTRAST
    assert contrast_of([row for row in rows if row["policy"] != "mine"], "top1", videos) is None
    assert contrast_of([*rows, made_up_row("other", *PAIR, 1.0)], "top1", videos) is None  # nothing is known of it


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 12, 50])
def test_no_video_is_shown_twice_and_not_more_than_asked_for(run: Path, count: int) -> None:
    videos = read_run_videos(run / "videos.jsonl")
    chosen = choose_videos(videos, CONTRAST, count)
    every = [number for numbers in chosen.values() for number in numbers]
    assert len(every) == len(set(every)) == min(count, 20)
    assert chosen["first"] == sorted(chosen["first"])


# ---- the page


def test_the_page_has_everything(text: str) -> None:
    assert heads_of(text) == [
        "Curves",
        "Where the sampler helps",
        "Where it does harm",
        "The first videos",
        "Class by class: mine against uniform",
        "All numbers",
        "All videos",
        "Notes and failures",
        "What was measured",
    ]
    assert text.count("<svg") == 3  # accuracy against frames and cost, and fidelity
    assert "a note &lt;b&gt;" in text
    assert "<dt>versions: sosampler</dt><dd>0.1.0</dd>" in text
    assert "<title>sosampler: run</title>" in text


def test_galleries_show_what_their_rule_says(text: str, run: Path) -> None:
    videos = read_run_videos(run / "videos.jsonl")
    both = videos.predictions(CONTRAST.sampler), videos.predictions(CONTRAST.uniform)
    success, failure = (cases(*both, success=one)[:3] for one in (True, False))
    assert shown_in(text, "Where the sampler helps") == [IDS[number] for number in success]
    assert shown_in(text, "Where it does harm") == [IDS[number] for number in failure]
    first = [name for number, name in enumerate(IDS) if number not in {*success, *failure}]
    assert shown_in(text, "The first videos") == first[: 9 - len(success) - len(failure)]
    assert "Videos that mine gets right and uniform wrong, those first in which mine leads by most" in text
    assert "Videos that uniform gets right and mine wrong, those first in which uniform leads by most" in text


@pytest.mark.parametrize("count", [1, 2, 9])
def test_a_gallery_says_how_many_more_there_are(run: Path, tmp_path: Path, count: int) -> None:
    """Few strips are no reason to say that there is no such video."""
    videos = read_run_videos(run / "videos.jsonl")
    both = videos.predictions(CONTRAST.sampler), videos.predictions(CONTRAST.uniform)
    text = text_of(run, out=tmp_path, videos=count)
    assert "There is none." not in text
    chosen = choose_videos(videos, CONTRAST, count)
    for kind, title in (("success", "Where the sampler helps"), ("failure", "Where it does harm")):
        every = cases(*both, success=kind == "success")
        assert every
        section = text[text.index(f">{title}</h") :].split("</section>")[0]
        assert f"Shown: {len(chosen[kind])} of {len(every)}." in section


def test_no_failure_is_told_as_such(tmp_path: Path) -> None:
    write_made_up_run(tmp_path / "run", ids=IDS[:1], classes=["only"])
    text = text_of(tmp_path / "run", out=tmp_path)
    assert text.count("There is none.") >= 1


def test_strips_mark_what_was_chosen_and_show_the_pictures_of_the_bank(text: str, run: Path, bank: Path) -> None:
    videos = read_run_videos(run / "videos.jsonl")
    page = Page(text)
    films = [table for table in page.tables if table[0][0] == "candidates"]
    order = [name for title in ("Where the sampler helps", "Where it does harm", "The first videos")
             for name in shown_in(text, title)]  # fmt: skip
    assert len(films) == len(order) == 9
    pictures = [attrs["src"] for tag, attrs in page.elements if tag == "img"]
    for film, name in zip(films, order, strict=True):
        number = IDS.index(name)
        video = videos.videos[number]
        for line, policy in zip(film[1:], POLICIES, strict=True):
            told = video.predictions[videos.keys.index((policy, *PAIR))]
            assert line[0].endswith(policy)
            assert [place for place, cell in enumerate(line[1:7]) if not cell.startswith("·")] == list(told.chosen)
            assert CLASSES[told.predicted] in line[-1]
            assert ("✓" in line[-1]) == told.right
        scores = [cell.split()[1].replace("\N{MINUS SIGN}", "-") for cell in film[2][1:7]]
        assert [float(one) for one in scores] == pytest.approx(video.candidates[6].scores["mine"], abs=0.006)
    stored = decoded(bank, order[0])
    assert pictures[:6] == [data_uri(frame) for frame in stored]
    assert len(pictures) == 9 * 6  # each once


def decoded(bank: Path, name: str) -> np.ndarray:
    from sosampler.bank.bank import Bank

    opened = Bank(bank)
    frames: np.ndarray = opened[opened.ids.index(name)].frames()
    return frames


def test_the_table_of_all_videos(text: str, run: Path) -> None:
    videos = read_run_videos(run / "videos.jsonl")
    (table,) = [table for table in Page(text).tables if table[0][0] == "video"]
    assert [line[0] for line in table[1:]] == IDS
    for line, expected in zip(table[1:], video_lines(videos, CONTRAST), strict=True):
        assert line[1:3] == [expected.label, expected.right]
        assert line[5] == f"{100 * expected.uniform.confidence:.1f}"
        assert float(line[7].replace("\N{MINUS SIGN}", "-")) == pytest.approx(100 * expected.lead, abs=0.051)


def test_the_finding_in_words() -> None:
    rows = [made_up_row("uniform", 2, 6, 0.5), made_up_row("mine", 2, 6, 0.7, recovered=0.42)]
    facts = {"num_videos": 90, "split": "test", "teacher": {"name": "resnet"}}
    assert sentence_of(rows, "top1", facts) == (
        "On 90 videos of test, classified by resnet, with 2 of 6 frames mine is right on 70.0 % of the videos "
        "(95 %: 60.0 to 80.0), uniform on 50.0 %. The difference is +20.0 percentage points, +10.0 to +30.0 in 95 % of "
        "resamples of the videos: more than chance would give. It is 42 % of what the semi-optimal oracle gains."
    )
    unsure = {"metric": "mAP", "difference": 0.01, "ci95": [-0.02, 0.04]}
    maybe = [rows[0], made_up_row("mine", 2, 6, 0.7, versus_uniform=unsure)]
    told = sentence_of(maybe, "mAP", {})
    assert told.startswith("With 2 of 6 frames mine has a mean average precision of 75.0 %, uniform one of 55.0 %.")
    assert told.endswith("it may be chance.")
    assert sentence_of(rows[:1], "top1", facts) == ""


def test_the_finding_without_a_row_of_uniform() -> None:
    versus = {"num_frames": 2, "metric": "top1", "difference": 0.2, "ci95": [0.1, 0.3]}
    rows = [made_up_row("mine", 2, 6, 0.7, versus_uniform=versus)]
    told = sentence_of(rows, "top1", {})
    assert told.startswith("With 2 of 6 frames mine is right on 70.0 % of the videos")
    assert "uniform on 50.0 %. The difference is +20.0 percentage points, +10.0 to +30.0" in told
    assert sentence_of([made_up_row("mine", 2, 6, 0.7, versus_uniform=None)], "top1", {}) == ""


def test_a_loss_is_called_one() -> None:
    versus = {"num_frames": 2, "metric": "top1", "difference": -0.1, "ci95": [-0.15, -0.05]}
    rows = [
        made_up_row("uniform", 2, 6, 0.6),
        made_up_row("mine", 2, 6, 0.5, versus_uniform=versus, recovered=-0.4),
        made_up_row("semi-optimal", 2, 6, 0.85),
    ]
    assert "oracle gains" not in sentence_of(rows, "top1", {})
    tile = tiles_of(rows, "top1")[2]
    assert (tile.name, tile.value) == ("loss", "\N{MINUS SIGN}10.0")
    assert tile.remark == "percentage points against uniform (95 %: \N{MINUS SIGN}15.0 to \N{MINUS SIGN}5.0)"


def test_whoever_takes_everything_is_no_headline() -> None:
    rows = [made_up_row(policy, frames, 6, 0.5) for frames in (2, 6) for policy in ("uniform", "mine")]
    found = headline_of(rows, "top1")
    assert found is not None
    assert found.pair == (2, 6)
    everything = headline_of(rows[2:], "top1")
    assert everything is not None
    assert everything.pair == (6, 6)


def test_videos_of_several_labels_are_told_in_their_own_words(tmp_path: Path) -> None:
    write_made_up_run(tmp_path / "run", ids=IDS, metric="mAP")
    text = unescape(text_of(tmp_path / "run", out=tmp_path))
    assert "A video of several labels counts for each of its classes" in text
    assert (
        "mean over videos of the geometric mean of the probabilities that the classifier gives the true classes" in text
    )
    assert "share of videos one of whose true classes gets the highest probability" in text
    assert "gives the labels a higher confidence" in text
    assert "; labels " in text
    assert "the probability of the label" not in text
    assert "true class," not in text


def test_figures_of_candidates_and_fidelity() -> None:
    rows = [made_up_row(policy, 2, count, 0.5 + count / 100) for policy in POLICIES for count in (6, 12)]
    assert [one.title for one in report_figures(rows, "top1")] == [
        "Accuracy against the number of candidates, 2 frames chosen"
    ]
    rows = [made_up_row(policy, frames, 6, 0.5) for policy in POLICIES for frames in (1, 2)]
    fidelity = report_figures(rows, "top1")[-1]
    assert fidelity.title == "Fidelity to the optimal choice, 6 candidates"
    assert "semi-optimal" in fidelity.svg
    assert "▽" not in fidelity.svg  # the optimal choice shares all with itself


# ---- without pictures, with other banks


def test_without_the_bank_there_are_no_pictures_and_a_note(tmp_path: Path) -> None:
    write_made_up_run(tmp_path / "run", ids=IDS)
    notes: list[str] = []
    text = text_of(tmp_path / "run", out=tmp_path, say=notes.append)
    assert "<img" not in text
    assert len([table for table in Page(text).tables if table[0][0] == "candidates"]) == 12
    (note,) = notes
    assert note == "No frames are shown: they would be in the bank not/there, but it is not there. Give it with --bank."
    assert note in text


def test_a_bank_that_was_moved_with_its_run_is_found(tmp_path: Path, bank: Path) -> None:
    write_made_up_run(tmp_path / "run", ids=IDS, bank="/elsewhere/bank")
    (tmp_path / "run" / "bank").symlink_to(bank)
    assert text_of(tmp_path / "run", out=tmp_path, videos=1).count("<img") == 6
    (tmp_path / "run" / "bank").unlink()
    assert text_of(tmp_path / "run", out=tmp_path, videos=1, bank=bank).count("<img") == 6


def test_a_bank_of_other_videos_is_not_used(tmp_path: Path, bank: Path) -> None:
    write_made_up_run(tmp_path / "ids", ids=["other"], bank=str(bank))
    assert "but it holds other videos" in text_of(tmp_path / "ids", out=tmp_path)
    write_made_up_run(tmp_path / "classes", ids=IDS, classes=("a", "b", "c"), bank=str(bank))
    assert "but it has other classes" in text_of(tmp_path / "classes", out=tmp_path)
    with pytest.raises(InvalidArgument, match=r"--bank .*holds other videos; give the bank that was evaluated"):
        text_of(tmp_path / "ids", out=tmp_path, bank=bank)
    with pytest.raises(InvalidArgument, match=r"--bank .*it is not there"):
        text_of(tmp_path / "ids", out=tmp_path, bank=tmp_path / "no")


def test_an_evaluation_alone_has_no_videos(run: Path, tmp_path: Path) -> None:
    text = text_of(run / "evaluation.json", out=tmp_path)
    assert heads_of(text) == ["Curves", "All numbers", "Notes and failures", "What was measured"]
    assert "Nothing is known of single videos" in text


def test_a_run_without_a_learned_sampler_compares_nobody(tmp_path: Path) -> None:
    told, videos = write_made_up_run(tmp_path / "run", ids=IDS[:4], pairs=[(2, 6)])
    lines = [json.loads(line) for line in (tmp_path / "run" / "videos.jsonl").read_text().splitlines()]
    from sosampler.evaluation.result import rows_digest

    told["rows"] = [row for row in told["rows"] if row["policy"] != "mine"]
    lines[0] |= {"rows": [key for key in lines[0]["rows"] if key[0] != "mine"], "evaluation": rows_digest(told["rows"])}
    for line in lines[1:]:
        del line["answers"][1]
    (tmp_path / "run" / "evaluation.json").write_text(json.dumps(told))
    (tmp_path / "run" / "videos.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = text_of(tmp_path / "run", out=tmp_path)
    assert heads_of(text)[:2] == ["The first videos", "All numbers"]
    assert "so they are not compared" in text
    assert len(videos) == 4


# ---- what comes from files is only text


def test_names_cannot_break_out(tmp_path: Path) -> None:
    hostile = [
        "<script>alert(1)</script>",
        "'\" onload=alert(1)",
        "</style></script>",
        "&lt;b&gt;",
        "{{ 7 * 7 }}",
        "\ud800",
    ]
    ids = [f"{number} {name}" for number, name in enumerate(hostile * 4)]
    write_made_up_run(tmp_path / "run", ids=ids, classes=hostile, split=hostile[0], teacher={"name": hostile[1]})
    text = text_of(tmp_path / "run", out=tmp_path, title=hostile[0], intro=hostile[2], videos=20)
    page = Page(text)
    assert [attrs for tag, attrs in page.elements if tag == "script"] == [{}]
    assert not [name for _, attrs in page.elements for name in attrs if name.startswith("on")]
    assert text.count("<style") == text.count("</style>")  # the page's, and one of each figure
    (table,) = [table for table in page.tables if table[0][0] == "video"]
    assert [line[0] for line in table[1:]] == [name.replace("\ud800", "?") for name in ids]
    assert "{{ 7 * 7 }}" in unescape(text)


def test_many_videos_make_no_large_page(tmp_path: Path) -> None:
    classes = [f"a class with a rather long name {number}" for number in range(200)]
    ids = [f"v_{number:011d}_000000_000010" for number in range(3000)]
    entries = []
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (1, 14, 25, 3), dtype=np.uint8)
    # As detailed as a natural picture: noise that is enlarged.
    large = np.asarray(Image.fromarray(noise[0]).resize((400, 224), Image.Resampling.BICUBIC))
    for name in ids[:40]:
        entries.append(FrameEntry(id=name, labels=(0,), frames=np.stack([large] * 16), split="test"))
    write_made_up_run(tmp_path / "run", ids=ids, classes=classes, pairs=[(6, 16)])
    (tmp_path / "run" / "few").mkdir()
    write_made_up_run(tmp_path / "few", ids=ids[:40], classes=classes, pairs=[(6, 16)], bank=str(tmp_path / "bank"))
    write_frames(tmp_path / "bank", entries, classes=classes)
    listed = write_run_report(tmp_path / "run", tmp_path / "a.html")
    shown = write_run_report(tmp_path / "few", tmp_path / "b.html")
    assert shown.read_text().count("<img") == 12 * 16
    size = listed.stat().st_size + shown.stat().st_size  # the lists of one and the pictures of the other
    assert size < 5_000_000, size
