"""Systems with their dials turned, in all the ways in which that can be written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sosampler.bank.bank import Bank
from sosampler.baselines.base import load_system
from sosampler.errors import InvalidArgument
from sosampler.evaluation.evaluate import evaluate
from sosampler.evaluation.result import top1
from tests.factories import (
    BASELINE_HEAVY_GMACS,
    HEAVY,
    LABELS,
    TAUGHT_LENGTHS,
    distinct,
    frame_exit,
    given_bank,
    one_hot,
    peek,
    said,
    seen_of,
)
from tests.factories import NUM_CANDIDATES as T


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bank, list[np.ndarray]]:
    return given_bank(tmp_path_factory.mktemp("systems") / "bank")


@pytest.fixture(scope="module")
def bank(both: tuple[Bank, list[np.ndarray]]) -> Bank:
    return both[0]


def test_the_dial_is_turned(both: tuple[Bank, list[np.ndarray]]) -> None:
    bank, tables = both
    found = evaluate(bank, {"a@all": peek(), "b@2": peek(), "b": peek()}, num_frames=2, num_candidates=T, bootstrap=0)
    assert [row.policy for row in found.rows] == ["a@1", "a@2", "a@4", "b@2", "b"]
    for name, most in (("a@1", 1), ("a@2", 2), ("a@4", 4), ("b@2", 2), ("b", 3)):
        seen = seen_of(tables, T, most)
        assert found.row(name).frames_classified == pytest.approx(np.mean([len(places) for places in seen]))
        assert found.row(name).top1 == pytest.approx(top1(said(tables, seen), one_hot(LABELS)))


def test_ways_to_write_a_dial(bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame_exit(Path("runs/fe"))
    frame_exit(Path("runs/fe@0.3"), seed=1)
    frame_exit(Path("runs/a=b"), seed=2)

    def rows(*policies: Any, **named: Any) -> dict[str, float]:
        given = evaluate(
            bank, {**named} if named else list(policies), num_frames=2, num_candidates=T, bootstrap=0, device="cpu"
        )
        return {row.policy: row.frames_classified for row in given.rows}

    low, high = rows("runs/fe@0"), rows("runs/fe@1")
    assert (list(low), list(high)) == (["runs/fe@0"], ["runs/fe@1"])
    assert low["runs/fe@0"] > rows("runs/fe")["runs/fe"] > high["runs/fe@1"]  # a gate is never below 0, always below 1
    every = rows("runs/fe@all")
    assert len(every) == 6
    assert list(every.values()) == sorted(every.values())
    assert all(name.startswith("runs/fe@0.") for name in every)
    assert rows("me=runs/fe@0.00") == {"me@0.0": low["runs/fe@0"]}
    assert rows(Path("runs/fe@1")) == high
    assert (
        rows(me="runs/fe@1")
        == rows(**{"me@1": "runs/fe"})
        == rows(**{"me@1": Path("runs/fe@1")})
        == {"me@1": high["runs/fe@1"]}
    )
    assert rows("runs/a=b@1") == {"runs/a=b@1": pytest.approx(rows("me=runs/a=b@1")["me@1"])}
    # A folder of that very name is taken as it is, and can be turned as any other.
    own = rows("runs/fe@0.3", "runs/fe@0.3@1")
    assert list(own) == ["runs/fe@0.3", "runs/fe@0.3@1"]
    assert own["runs/fe@0.3"] != rows("me=runs/fe@0.30")["me@0.3"]
    assert rows(**{"me@home": "runs/fe"}) == {"me@home": rows("runs/fe")["runs/fe"]}


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        (["fe@much"], r"fe@much cannot be read; @VALUE must be a number for gate_exit of frameexit, .* or all"),
        (["fe@-1"], "gate_exit=-1"),
        (["sampler@0.3"], "only these have a threshold"),
        (["fe+mmr"], r"\+mmr is for samplers"),
        ({"a+nms": "fe"}, r"\+nms is for samplers, so leave it out"),
        ({"a@0.1": "fe@0.2"}, "has the threshold 0.1, but the policy 0.2"),
        ({"optimal": "fe"}, "a baseline cannot be called 'optimal'"),
        (["fe@1_0"], "fe@1_0 cannot be read; @VALUE must be a number"),
        (["fe@ 1"], "fe@ 1 cannot be read; @VALUE must be a number"),
        (["fe@nan"], "fe@nan cannot be read; @VALUE must be a number"),
        (["fe", "fe"], "two policies are called 'fe'"),
        (["frameexit", "frameexit=fe@all"], "'frameexit' and the baseline 'frameexit@0.9' would be one curve"),
        (["frameexit=fe@0.5", "frameexit"], "'frameexit' and the baseline 'frameexit@0.5' would be one curve"),
        (["x=sampler", "x=fe@all"], "'x' and the baseline 'x@0.9' would be one curve called 'x'"),
        (["me=fe@0.1", "me=other@0.3"], "'me@0.1' and 'me@0.3' are two baselines, but would be one curve called 'me'"),
        (["me=fe", "me=other@0.3"], "'me' and 'me@0.3' are two baselines"),
        (["fe", "fe@0.3"], "'fe' and 'fe@0.3' are two baselines"),  # the second is a folder of this very name
        (["fe@0.9", "fe@all"], "two policies are called 'fe@0.9'"),
        (["nothing@0.3"], "is unknown; .* give the folder of a trained sampler or baseline"),
    ],
)
def test_what_is_refused(
    bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policies: Any, message: str
) -> None:
    from sosampler.samplers.sosampler import SOSampler

    monkeypatch.chdir(tmp_path)
    frame_exit(Path("fe"))
    frame_exit(Path("other"), seed=1)
    if policies == ["fe", "fe@0.3"]:
        frame_exit(Path("fe@0.3"), seed=1)
    if "sampler" in str(policies):
        SOSampler(backbone="timm:test_resnet", input_size=32).save_pretrained("sampler")
    with pytest.raises(InvalidArgument, match=message):
        evaluate(bank, policies, num_frames=2, num_candidates=T, bootstrap=0)


def test_one_system_may_be_given_several_times(bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also as an object and as a folder: with its dial turned it is a point of the same curve."""
    monkeypatch.chdir(tmp_path)
    frame_exit(Path("fe"))
    policies: Any = {"me@0.1": "fe", "me": load_system("fe"), "me@0.3": load_system("fe").with_threshold(0.9)}
    found = evaluate(bank, policies, num_frames=2, num_candidates=T, bootstrap=0, device="cpu")
    assert [row.policy for row in found.rows] == ["me@0.1", "me", "me@0.3"]
    frames = [row.frames_classified for row in found.rows]
    assert frames[0] >= frames[1] >= frames[2]
    # With the same weights, but other features to look at, it is another one.
    other = load_system("fe")
    other.about["heavy"] = {**other.about["heavy"], "name": "moved"}
    with pytest.raises(InvalidArgument, match="are two baselines"):
        evaluate(bank, {"me@0.1": "fe", "me": other}, num_frames=2, num_candidates=T)


def test_the_name_of_a_system_that_has_none(bank: Bank, tmp_path: Path) -> None:
    """It is that of its class, also for the one after which a rule is called, if that rule is not there."""
    system = load_system(frame_exit(tmp_path / "run"))
    found = evaluate(bank, system, num_frames=2, num_candidates=T, bootstrap=0)
    assert [(row.policy, row.num_frames) for row in found.rows] == [("frameexit", None)]
    with pytest.raises(InvalidArgument, match="two policies are called 'frameexit'"):
        evaluate(bank, ["frameexit", system], num_frames=2, num_candidates=T)
    fixed = peek()
    fixed.threshold = ""
    with pytest.raises(InvalidArgument, match="has no threshold"):
        evaluate(bank, {"a@2": fixed}, num_frames=2, num_candidates=T)


def test_own_layers_on_uniform_frames(bank: Bank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    frame_exit(Path("runs/fe"))
    system = load_system("runs/fe")
    options: dict[str, Any] = {"num_frames": 3, "num_candidates": T, "bootstrap": 0, "device": "cpu"}
    found = evaluate(bank, ["uniform", "fe=runs/fe", "fe=runs/fe@uniform"], **options)
    own = [row for row in found.rows if row.policy.startswith("fe@uniform@")]
    assert [row.policy for row in own] == [f"fe@uniform@{number}" for number in range(1, T + 1)]
    assert found.facts["systems"]["fe@uniform@3"]["num_frames"] == 3
    for number, row in enumerate(own, start=1):
        frames = [min(number, len(distinct(length))) for length in TAUGHT_LENGTHS]
        assert row.frames_classified == row.frames_decoded == pytest.approx(np.mean(frames))
        assert row.classifier_gmacs == pytest.approx(np.mean(frames) * BASELINE_HEAVY_GMACS)
        assert row.sampler_gmacs == pytest.approx((np.mean(frames) * HEAVY * 8 + 8 * 3) / 1e9)  # neck, one classifier
        assert (row.num_frames, row.fidelity, row.recovered) == (None, None, None)
    # The frames are those of the policy uniform.
    ours, theirs = found.chosen("fe@uniform@3"), found.chosen("uniform", 3)
    for mine, its in zip(ours.tolist(), theirs.tolist(), strict=True):
        assert [slot for slot in mine if slot >= 0] == sorted(set(its))

    def rows(policies: Any, **changes: Any) -> dict[str, float]:
        return {row.policy: row.top1 for row in evaluate(bank, policies, **options | changes).rows}

    three = {"fe@uniform@3": found.row("fe@uniform@3").top1}
    assert rows("fe=runs/fe@uniform@3") == rows({"fe@uniform@3": system}) == rows({"fe@uniform@3": "runs/fe"}) == three
    assert rows({"fe": "runs/fe@uniform@3"}) == rows({"fe@uniform": "runs/fe@uniform@3"}) == three
    assert list(rows("runs/fe@uniform@3")) == ["runs/fe@uniform@3"]
    assert len(rows({"fe@uniform": system}, num_candidates=5)) == 5  # N is at most T
    for wrong, says in [
        ("runs/fe@uniform@9", "fe@uniform@9 is more than the 8 candidates"),
        ("runs/fe@uniform@0", "num_frames=0"),
        ("runs/fe@uniform@x", "@VALUE must be a number for num_frames"),
        ("runs/fe@uniformly", "or all for all of these; @uniform gives it evenly spread frames"),
    ]:
        with pytest.raises(InvalidArgument, match=says):
            rows(wrong)
