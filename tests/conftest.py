"""Switches and fixtures that all tests share.

A test that cannot run on this machine skips and says why. Where SOSAMPLER_TESTS_REQUIRE names what it needs
(comma-separated: torchcodec, light, docs, browser, vllm, mcp), it fails instead, so that a skip cannot
hide a broken job. Where the variable is set, as in CI, so does every skip for a reason that is not in `MAY_SKIP`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from functools import cache, wraps
from pathlib import Path
from typing import Any

import pytest

from sosampler.errors import MissingDependency
from sosampler.video import synthetic

os.environ.setdefault("SVT_LOG", "1")  # the AV1 encoder is talkative
if "PYTEST_XDIST_WORKER" in os.environ:
    # Tests run side by side already: threads of two torches on the same cores wait for each other most of the time.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if "MUTANT_UNDER_TEST" in os.environ:  # mutmut calls the same test several times in one process
    import hypothesis

    allowed = [hypothesis.HealthCheck.differing_executors]
    hypothesis.settings.register_profile("mutants", suppress_health_check=allowed, database=None)
    hypothesis.settings.load_profile("mutants")
REQUIRED = set(filter(None, os.environ.get("SOSAMPLER_TESTS_REQUIRE", "").split(",")))
# What a reason to skip must hold in CI; `.ci/run` explains them.
MAY_SKIP = ("slow: run with --slow", "needs a GPU", "vllm is not installed", "fiftyone is not installed", "lmms_eval")
MAY_SKIP += ("open_clip",)
MAY_SKIP += ("is not installed here", "torchcodec 0.17", "torchcodec cannot seek", "policy keyframe has one")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Give each worker a long run of neighbours, so that fixtures of a module or folder are made by one of them."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def _encoding_once(encode: Callable[..., bytes]) -> Callable[..., bytes]:
    """Keep what was encoded: the same arguments give the same bytes, and a clip takes half a second."""
    known: dict[str, bytes] = {}

    @wraps(encode)
    def numbered_video(out: Path | None = None, **settings: Any) -> bytes:
        key = repr(sorted(settings.items()))
        data = known.get(key) or encode(**settings)
        if len(data) < 2**20:
            known[key] = data
        if out is not None:
            out.write_bytes(data)
        return data

    return numbered_video


synthetic.numbered_video = _encoding_once(synthetic.numbered_video)  # before any test imports it


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _explained((yield))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _explained((yield))


def _explained(report: Any) -> Any:
    """Turn a skip for a reason that nobody knows of into a failure, where skips are counted on."""
    if REQUIRED and report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(known in reason for known in MAY_SKIP):
            report.outcome, report.longrepr = "failed", f"MAY_SKIP in tests/conftest.py does not know: {reason}"
    return report


def unavailable(what: str, reason: str) -> None:
    """Skip, or fail where the job must have it."""
    if what in REQUIRED:
        pytest.fail(f"{what} is required here but: {reason}")
    pytest.skip(reason)


@cache
def torchcodec_problem() -> str | None:
    from sosampler.video.torchcodec_reader import import_decoders

    try:
        import_decoders()
    except MissingDependency as error:
        return str(error)
    return None


@pytest.fixture
def torchcodec() -> None:
    problem = torchcodec_problem()
    if problem:
        unavailable("torchcodec", problem)


@pytest.fixture(scope="session")
def clip_bytes() -> bytes:
    """90 numbered frames at 30 fps, keyframes at 0, 30 and 60, B-frames between."""
    return synthetic.numbered_video(num_frames=90)


@pytest.fixture
def clip(tmp_path: Path, clip_bytes: bytes) -> Path:
    path = tmp_path / "clip.mp4"
    path.write_bytes(clip_bytes)
    return path


@pytest.fixture(scope="session")
def shapes_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small image-text model of drawn shapes, as a folder of ONNX files; it is trained in seconds."""
    pytest.importorskip("torch")
    pytest.importorskip("onnx")
    from benchmarks.accuracy.query import train_model

    return train_model(tmp_path_factory.mktemp("shapes") / "model")
