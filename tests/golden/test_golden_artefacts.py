"""A bank and a sampler's run folder as the version 0.1.0 wrote them still open.

The weights of the sampler are not kept, only their names and shapes: the test fills them by a formula.
"""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import sosampler as so
from golden import check, encode, key_paths, scenes, sosampler

ARTEFACTS = Path(__file__).parent / "artefacts"


def fill(name: str, shape: list[int], dtype: str) -> np.ndarray:
    """Values that follow from the tensor's name."""
    if dtype == "int64":
        return np.ones(shape, dtype=np.int64)
    values = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) == 1:  # scales and variances of normalisation around one, shifts and means around zero
        return (0.1 * values + name.endswith((".weight", "running_var"))).astype(np.float32)
    return (values / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ARTEFACTS / "bank", tmp_path / "bank"))


@pytest.fixture
def run(bank: Path, tmp_path: Path) -> Path:
    """The run folder as if it had been trained on the copied bank."""
    folder = Path(shutil.copytree(ARTEFACTS / "run", tmp_path / "run"))
    shapes = json.loads((ARTEFACTS / "weights.json").read_text())
    save_file({name: fill(name, *about) for name, about in shapes.items()}, folder / "model.safetensors")
    settings = json.loads((folder / "run.json").read_text())
    settings["bank"]["path"] = str(bank.resolve())
    (folder / "run.json").write_text(json.dumps(settings))
    return folder


def test_bank_opens(bank: Path) -> None:
    opened = so.Bank(bank)
    teacher = opened.teacher()
    check(
        "old-bank",
        {
            "ids": list(opened.ids),
            "classes": list(opened.classes),
            "labels": [list(item.labels) for item in opened.items],
            "splits": [item.split for item in opened.items],
            "seconds": [item.pts_seconds.tolist() for item in opened],
            "info": sorted(key_paths(json.loads(sosampler("bank", "info", bank, "--json")))),
        },
        abs_tol=1e-6,
    )
    probabilities = [teacher[index].frame_probs.astype(np.float64).tolist() for index in range(len(opened))]
    check("old-bank-teacher", probabilities, abs_tol=1e-6)
    check("old-bank-frames", [float(item.frames().mean()) for item in opened], abs_tol=0.5)


def test_sampler_scores(run: Path, tmp_path: Path) -> None:
    clip = encode(tmp_path / "clip.mp4", scenes(20, seed=9))
    sel = so.select(clip, 3, num_candidates=6, policy=str(run))
    assert sel.candidates.scores is not None
    scores = np.asarray(sel.candidates.scores, dtype=np.float64)
    check("old-sampler", {"frames": sel.frame_indices, "scores": scores}, rel=1e-3, abs_tol=1e-4)


@pytest.fixture
def options() -> dict[str, Any]:
    """The arguments of the run, with what the recipe `default` was then."""
    given: dict[str, Any] = json.loads((ARTEFACTS / "options.json").read_text())
    return {**given, "dropout": 0.0, "lam": 0.9, "guidance": "logits", "distill": 1.0, "calibrate": 1.0}


def test_finished_run_is_taken_up(run: Path, bank: Path, options: dict[str, Any]) -> None:
    said: list[str] = []
    done = so.train(bank, out=run, say=said.append, **options)
    assert any("finished" in line for line in said), said
    assert done.result == json.loads((run / "result.json").read_text())


def test_run_of_other_settings_is_refused(run: Path, bank: Path, options: dict[str, Any]) -> None:
    with pytest.raises(so.InvalidArgument, match=r"epochs was 1, is 2.* overwrite it"):
        so.train(bank, out=run, **{**options, "epochs": 2})
