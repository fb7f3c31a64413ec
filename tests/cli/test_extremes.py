"""Options at their ends are refused, forked processes go on, and what cannot work is remarked on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sosampler as so
from sosampler._util import limits
from sosampler.errors import InvalidArgument
from tests.cli.conftest import Ran
from tests.factories import SAMPLER_QUICK, TINY, make_bank, random_logits, teach, write_bank

Command = Callable[..., Ran]


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        (("--fps", "1e300"), "fps=1e+300 must be at most 10000 (limits.MAX_FPS)"),
        (("--folder-fps", "1e300"), "limits.MAX_FPS"),
        (("--threads", 100_000), "threads=100000 must be at most 1024 (limits.MAX_THREADS)"),
        (("--workers", 100_000), "limits.MAX_THREADS"),
        (("-n", 10**9), "num_frames=1000000000 must be at most 1000000 (limits.MAX_CANDIDATES)"),
        (("-t", 10**9), "num_candidates=1000000000 must be at most 1000000 (limits.MAX_CANDIDATES)"),
        (("-n", "auto", "--auto-max", 10**9), "limits.MAX_CANDIDATES"),
    ],
)
def test_select_refuses(command: Command, clip: Path, options: tuple[Any, ...], limit: str) -> None:
    ran = command("select", clip, *options)
    assert ran.code == 2
    assert limit in ran.err
    assert ran.err.count("\n") == 1


def test_the_constants_can_be_set(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_CANDIDATES", 50)
    assert len(so.select(clip, 50, policy="uniform")) == 50
    with pytest.raises(InvalidArgument, match=r"num_frames=51 must be at most 50 \(limits\.MAX_CANDIDATES\)"):
        so.select(clip, 51, policy="uniform")


def test_other_commands_refuse(command: Command, clip: Path, tmp_path: Path) -> None:
    bank = make_bank(tmp_path / "bank", train=4, dev=4).path
    (tmp_path / "m.csv").write_text(f"path,label\n{clip},x\n")
    for arguments, limit in (
        (("evaluate", bank, "-n", 10**9, "-t", 10**9), "MAX_CANDIDATES"),
        (("evaluate", bank, "-t", 10**9), "MAX_CANDIDATES"),
        (("evaluate", bank, "--bootstrap", 10**9), "MAX_RESAMPLES"),
        (("prepare", tmp_path / "m.csv", "--out", tmp_path / "b", "--workers", 10**5), "MAX_THREADS"),
        (("prepare", tmp_path / "m.csv", "--out", tmp_path / "b", "-t", 10**9), "MAX_CANDIDATES"),
        (("prepare", tmp_path / "m.csv", "--out", tmp_path / "b", "--fps", 1e300), "MAX_FPS"),
        (("train", bank, "--out", tmp_path / "r", "--workers", 10**5), "MAX_THREADS"),
        (("train-classifier", bank, "--out", tmp_path / "r", "-c", TINY, "-n", 10**9), "MAX_CANDIDATES"),
        (("classify", clip, "-c", TINY, "-t", 10**9), "MAX_CANDIDATES"),
    ):
        ran = command(*arguments)
        assert ran.code == 2, ran
        assert f"(limits.{limit})" in ran.err
        assert ran.err.count("\n") == 1
    assert not (tmp_path / "b").exists()
    assert not (tmp_path / "r").exists()


FORKED = """
import os, signal, sys
import sosampler as so, torch
torch.set_num_threads(2)
policy = so.load_sampler(sys.argv[2]) if sys.argv[3] == "object" else sys.argv[2]
before = so.select(sys.argv[1], 3, num_candidates=16, policy=policy).frame_indices.tolist()
child = os.fork()
if child == 0:
    signal.alarm(30)  # where it hangs
    after = so.select(sys.argv[1], 3, num_candidates=16, policy=policy).frame_indices.tolist()
    os._exit(0 if after == before else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("given", ["object", "folder"])
def test_a_forked_process_can_use_the_sampler(clip: Path, tmp_path: Path, given: str) -> None:
    """Its pool of threads stays with the parent; a child that waits for them would wait for ever."""
    so.SOSampler(backbone=TINY, input_size=64).save_pretrained(tmp_path / "sampler")
    ran = subprocess.run(
        [sys.executable, "-c", FORKED, str(clip), str(tmp_path / "sampler"), given],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        timeout=120,
    )
    assert ran.returncode != -signal.SIGALRM, "the child hangs"
    assert ran.returncode == 0


class TestRemarks:
    def test_a_sampler_from_random_weights(self, tmp_path: Path) -> None:
        bank = make_bank(tmp_path / "bank", train=8, dev=4)
        said: list[str] = []
        so.train(bank, out=tmp_path / "run", say=said.append, **{**SAMPLER_QUICK, "epochs": 1})
        assert [line for line in said if "starts from random weights" in line and "--weights" in line]
        assert not [line for line in said if "for every video" in line]

    def test_a_classifier_that_always_answers_the_same(self, command: Command, tmp_path: Path) -> None:
        labels = [(number % 3,) for number in range(6)]
        bank = write_bank(tmp_path / "bank", [4] * 6, labels, splits=["train"] * 4 + ["dev"] * 2)
        logits = [np.zeros((4, 3), np.float32) + np.float32([0, 0, 5]) for _ in range(6)]
        teach(bank, logits)
        told = "for every video, although their labels differ"
        arguments = ("--policies", "uniform", "-n", 2, "-t", 4, "--bootstrap", 0, "--device", "cpu")
        ran = command("evaluate", bank.path, *arguments)
        assert (ran.code, told in ran.err) == (0, True)
        said: list[str] = []
        so.train(bank, out=tmp_path / "run", say=said.append, **{**SAMPLER_QUICK, "epochs": 1})
        assert [line for line in said if told in line]

    def test_a_sound_classifier_is_not_remarked_on(self, tmp_path: Path) -> None:
        labels = [(number % 3,) for number in range(6)]
        bank = write_bank(tmp_path / "bank", [4] * 6, labels)
        teach(bank, random_logits([4] * 6, labels))
        assert bank.teacher().remark() is None

    def test_prepare_and_classify(self, command: Command, clip: Path, tmp_path: Path) -> None:
        so.save_classifier(always(["x", "y"]), tmp_path / "c")
        (tmp_path / "m.csv").write_text(f"path,label,id\n{clip},x,1\n{clip},y,2\n")
        arguments = ("--out", tmp_path / "b", "-t", 2, "-c", tmp_path / "c", "--workers", 0)
        ran = command("prepare", tmp_path / "m.csv", *arguments)
        assert (ran.code, "answers 'y' for every video" in ran.err) == (0, True), ran
        clips = [tmp_path / f"{number}.mp4" for number in range(10)]
        for path in clips:
            path.write_bytes(clip.read_bytes())
        ran = command("classify", *clips, "-c", tmp_path / "c", "--device", "cpu")
        assert (ran.code, "all videos got the label 'y'" in ran.err) == (0, True)
        assert "all videos got" not in command("classify", *clips[:5], "-c", tmp_path / "c", "--device", "cpu").err

    def test_train_classifier(self, tmp_path: Path) -> None:
        bank = make_bank(tmp_path / "b", train=4, dev=4)
        small = {"epochs": 1, "num_frames": 1, "workers": 0, "lr": 1e-9, "device": "cpu"}
        said: list[str] = []
        so.train_classifier(bank, always(bank.classes), out=tmp_path / "c", say=said.append, **small)
        assert [line for line in said if "gives the same answer for every video of dev" in line]


def always(classes: Sequence[str]) -> Any:
    """A classifier that always answers the last class."""
    classifier = so.create_classifier(TINY, class_names=classes, input_size=32)
    (bias,) = [value for name, value in classifier.net.named_parameters() if name.endswith("fc.bias")]
    bias.data[-1] = 100.0
    return classifier
