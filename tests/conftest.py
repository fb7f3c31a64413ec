"""Switches and fixtures that all tests share.

A test that cannot run on this machine skips and says why. Where SOSAMPLER_TESTS_REQUIRE names what it needs
(comma-separated: torchcodec, light, pytorchvideo, docs, browser, shared, vllm), it fails instead, so that a skip cannot
hide a broken job.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from sosampler.errors import MissingDependency
from sosampler.video.synthetic import numbered_video

os.environ.setdefault("SVT_LOG", "1")  # the AV1 encoder is talkative
if "PYTEST_XDIST_WORKER" in os.environ:
    # Tests run side by side already: threads of two torches on the same cores wait for each other most of the time.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
REQUIRED = set(filter(None, os.environ.get("SOSAMPLER_TESTS_REQUIRE", "").split(",")))


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Give each worker a long run of neighbours, so that fixtures of a module or folder are made by one of them."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no":
        config.option.dist = "worksteal"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


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
    return numbered_video(num_frames=90)


@pytest.fixture
def clip(tmp_path: Path, clip_bytes: bytes) -> Path:
    path = tmp_path / "clip.mp4"
    path.write_bytes(clip_bytes)
    return path
