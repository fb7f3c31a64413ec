"""Choosing frames needs no torch: not in a process that has it, and not on a machine that lacks it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.clips import BY_NAME
from tests.conftest import unavailable

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "torchvision", "torchcodec", "transformers", "timm", "pyarrow", "matplotlib", "sklearn")


def run(*command: str, python: str = sys.executable, **environment: str) -> subprocess.CompletedProcess[str]:
    # A venv of its own must find the installed wheel, not the source tree.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" or python == sys.executable} | environment
    return subprocess.run([python, *command], capture_output=True, text=True, timeout=120, env=env, cwd=ROOT)


def loaded_by(code: str) -> set[str]:
    done = run("-c", f"import sys\n{code}\nprint(' '.join(sys.modules))")
    assert done.returncode == 0, done.stderr
    return {name.split(".")[0] for name in done.stdout.split()}


def test_import_loads_nothing_heavy() -> None:
    loaded = loaded_by("import sosampler")
    assert not loaded & {*HEAVY, "numpy", "av", "PIL", "typer", "rich", "onnxruntime", "huggingface_hub"}


def test_select_loads_no_torch(clip: Path) -> None:
    loaded = loaded_by(f"import sosampler\nsosampler.select({str(clip)!r}, 3, policy='frame-difference', size=64)")
    assert "av" in loaded
    assert not loaded & {*HEAVY}


def test_select_command_loads_no_torch(clip: Path, tmp_path: Path) -> None:
    outputs = [
        "--out",
        str(tmp_path / "o.csv"),
        "--save-frames",
        str(tmp_path / "f"),
        "--contact-sheet",
        str(tmp_path / "s.png"),
    ]
    arguments = ["sosampler", "select", str(clip), *outputs]
    call = "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    assert not loaded_by(f"sys.argv = {arguments!r}\nfrom sosampler.cli.main import main\n{call}") & {*HEAVY}


def test_help_loads_no_numpy_and_answers_at_once() -> None:
    assert not loaded_by("sys.argv = ['x', '--help']\nfrom sosampler.cli.main import app") & {
        *HEAVY,
        "numpy",
        "av",
        "rich",
    }
    took = []
    for _ in range(7):
        before = os.times()
        assert "Pick the few frames" in run("-m", "sosampler", "--help").stdout
        after = os.times()  # of the processor: on a quiet machine as long as on the clock, and on a busy one too
        took.append(after.children_user + after.children_system - before.children_user - before.children_system)
    assert min(took) < 0.3, took


def test_every_public_name_is_there() -> None:
    import sosampler

    for name in sosampler.__all__:
        assert getattr(sosampler, name) is not None
    assert set(sosampler.__all__) <= set(dir(sosampler))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = sosampler.nonsense


# What the core does without: the packages of the extras.
_WITHOUT = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
from sosampler.cli.main import main
main()
"""
HIDDEN = (*HEAVY, "accelerate", "safetensors", "jinja2", "huggingface_hub")
# Arguments with which each command would begin its work, and the extra that it then asks for; None: it needs none.
COMMANDS: dict[str, tuple[list[str], str | None]] = {
    "select": (["{video}", "-n", "3"], None),
    "classify": (["{video}", "-c", "resnet50"], "train"),
    "train-classifier": (["{folder}", "--out", "{folder}/run"], "train"),
    "datasets": (["import", "--help"], None),
    "prepare": (["{folder}", "--out", "{folder}/bank", "-c", "resnet50"], "train"),
    "bank": (["info", "{folder}"], "nothing"),
    "train": (["{folder}", "--out", "{folder}/run"], "train"),
    "evaluate": (["{folder}"], "train"),
    "independence": (["{video}", "-c", "resnet50"], "train"),
    "reproduce": (["table1", "--bank", "{folder}", "--out", "{folder}/runs"], "train"),
    "report": (["{folder}", "--out", "{folder}/report.html"], "nothing"),
    "export": (["{folder}"], "train"),
    "quantize": (["resnet50", "--bank", "{folder}"], "train"),
    "ui": (["--help"], None),
    "mcp": (["--help"], None),
    "watch": (["{video}", "--idle", "0.1"], None),
    "reels": (["{folder}/reels", "--help"], None),
    "demo": (["--out", "{folder}/demo"], "train"),
    "bench": (["--help"], None),
}


def test_every_command_is_tried_without_the_extras() -> None:
    from typer.main import get_command

    from sosampler.cli.main import app

    assert set(COMMANDS) == set(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_say_what_they_lack(command: str, clip: Path, tmp_path: Path) -> None:
    """With the core alone each works, or ends with a sentence that names what to install."""
    arguments, extra = COMMANDS[command]
    given = [text.format(video=clip, folder=tmp_path) for text in arguments]
    done = run("-c", _WITHOUT.format(hidden=HIDDEN), command, *given)
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == (0 if extra is None else 2)
    if extra is not None:
        assert len(done.stderr.splitlines()) == 1
        assert (f"sosampler[{extra}]" in done.stderr) == (extra == "train"), done.stderr


def test_a_download_says_what_it_lacks(clip: Path) -> None:
    query = ("--query", "a red car", "--query-model", "someone/model")
    done = run("-c", _WITHOUT.format(hidden=HIDDEN), "select", str(clip), *query)
    assert done.returncode == 2
    assert "someone/model: no such folder" in done.stderr
    assert "pip install 'sosampler[hub]'" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_install_hints_name_what_exists() -> None:
    """Every `sosampler[EXTRA]` in the source is an extra, and brings the package that is missing."""
    from sosampler.cli.main import _EXTRAS

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]

    def brought_by(extra: str) -> set[str]:
        names = set()
        for requirement in extras[extra]:
            name, inner = re.fullmatch(r"([\w.-]+)(?:\[([\w,]+)\])?.*", requirement).groups()  # type: ignore[union-attr]
            names |= set().union(*map(brought_by, inner.split(","))) if name == "sosampler" else {name}
        return names

    sources = {path: path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")}
    hints = [hint for text in sources.values() for hint in re.findall(r"sosampler\[([a-z,{}]+)\]", text)]
    assert len(hints) > 15
    named = {extra for hint in hints for extra in hint.split(",") if "{" not in extra}
    assert named <= set(extras)
    assert {"hub", "train", "parquet", "ray"} <= named
    distributions = {"sklearn": "scikit-learn"}
    for package, extra in _EXTRAS.items():
        assert distributions.get(package, package) in brought_by(extra), package


def test_what_is_not_the_programs_fault_ends_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    from sosampler.cli import main as module

    def ended_by(error: Exception) -> str:
        def broken() -> None:
            raise error

        monkeypatch.setattr(module, "app", broken)
        with pytest.raises(SystemExit) as stopped:
            module.main()
        assert stopped.value.code == 2
        return capsys.readouterr().err

    told = ended_by(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore."))
    assert "too little memory for this (CUDA out of memory. Tried to allocate 2 GiB.)" in told
    assert "--batch-size" in told
    assert "--device cpu" in told
    assert "sosampler[hf]" in ended_by(ModuleNotFoundError("no", name="transformers.models"))
    for ours in (ModuleNotFoundError("no", name="sosampler.x"), RuntimeError("of our own"), OSError("no file")):
        with pytest.raises(type(ours)):
            ended_by(ours)


def uv(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(Path(sys.executable).parent / "uv"), *arguments], capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (Path(sys.executable).parent / "uv").exists():
        unavailable("light", "uv is not installed beside this Python")
    folder = tmp_path_factory.mktemp("wheel")
    built = uv("build", "--wheel", "--out-dir", str(folder), str(ROOT))
    if built.returncode:
        unavailable("light", f"the wheel cannot be built (no package index?): {built.stderr[-300:]}")
    (path,) = folder.glob("*.whl")
    return path


def install(wheel: Path, venv: Path, *options: str, interpreter: str = sys.executable) -> str:
    """Install the wheel with its core dependencies into a new venv, and return the venv's Python."""
    made = uv("venv", "--quiet", "--python", interpreter, str(venv))
    assert made.returncode == 0, made.stderr
    python = str(venv / "bin" / "python")
    installed = uv("pip", "install", "--quiet", "--python", python, *options, str(wheel))
    if installed.returncode:
        unavailable("light", f"nothing can be installed (no package index?): {installed.stderr[-300:]}")
    return python


def other_python(version: str) -> str:
    """Return a Python of this version from PATH or from pyenv, whose commands on PATH may be inactive shims."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    paths = [shutil.which(f"python{version}"), *map(str, pyenv.glob(f"{version}.*/bin/python{version}"))]
    for path in filter(None, paths):
        if run("-c", "", python=path).returncode == 0:
            return path
    unavailable(f"python{version}", f"Python {version} is not installed here")
    raise AssertionError("unavailable() skips or fails")


def chosen(clip: Path, policy: str, mode: str, python: str = sys.executable) -> list[int]:
    options = ("-n", "3", "--policy", policy, "--candidates", mode, "--json")
    done = run("-m", "sosampler", "select", str(clip), *options, python=python)
    assert done.returncode == 0, done.stderr
    indices: list[int] = json.loads(done.stdout)["frame_indices"]
    return indices


@pytest.fixture(scope="module")
def chosen_here(clip_bytes: bytes, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[int]]:
    """What this environment chooses, by policy and kind of candidates."""
    clip = tmp_path_factory.mktemp("here") / "clip.mp4"
    clip.write_bytes(clip_bytes)
    pairs = (("frame-difference", "exact"), ("general", "snap"), ("farthest-first", "keyframe"))
    return {pair: chosen(clip, *pair) for pair in pairs}


@pytest.mark.light
@pytest.mark.parametrize("version", ["running", "3.13", "3.14"])
def test_unconstrained_install_chooses_the_same_frames(
    version: str, wheel: Path, clip: Path, tmp_path: Path, chosen_here: dict[tuple[str, str], list[int]]
) -> None:
    """What a user's `pip install` resolves to today, not the versions of constraints.txt."""
    interpreter = sys.executable if version == "running" else other_python(version)
    python = install(wheel, tmp_path / "venv", interpreter=interpreter)
    assert {pair: chosen(clip, *pair, python=python) for pair in chosen_here} == chosen_here


# One of each kind that takes a path of its own through PyAV.
ZOO = ["h264", "deep_b_pyramid", "unstated_reordering", "open_gop", "variable_rate", "edit_list", "rotated_90"]
ZOO += ["ten_bit", "interlaced", "container_colours", "fragmented", "hevc", "vp9_webm", "mpeg4_avi_b_frames"]
ZOO += ["mkv_without_cues", "mpeg_ts", "mpeg2_ps", "raw_h264", "one_frame"]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips as files, since an older PyAV cannot write each of them."""
    folder = tmp_path_factory.mktemp("zoo")
    for name in ZOO:
        (folder / name).write_bytes(BY_NAME[name].data)
    return folder


def saved(video: Path, out: Path, python: str = sys.executable) -> NDArray[np.int64]:
    """Three frames of a video as the command writes them, [3, H, W, 3]."""
    options = ("-n", "3", "--policy", "uniform", "--image-format", "png", "--save-frames", str(out))
    done = run("-m", "sosampler", "select", str(video), *options, python=python)
    assert done.returncode == 0, done.stderr
    return np.stack([np.asarray(Image.open(path)) for path in sorted(out.rglob("*.png"))]).astype(np.int64)


# The oldest, the first with a container's index, and the newest, which is not made for Python 3.11.
@pytest.mark.light
@pytest.mark.slow
@pytest.mark.parametrize(("pyav", "version"), [("==15.0.0", "running"), ("==17.0.0", "running"), (">=19", "3.12")])
def test_each_pyav_reads_the_same_frames(
    pyav: str, version: str, wheel: Path, clip: Path, tmp_path: Path, zoo: Path, chosen_here: dict[tuple[str, str], Any]
) -> None:
    interpreter = sys.executable if version == "running" else other_python(version)
    python = install(wheel, tmp_path / "venv", f"av{pyav}", "pytest", "pytest-timeout", interpreter=interpreter)
    assert {pair: chosen(clip, *pair, python=python) for pair in chosen_here} == chosen_here

    # The colours too, where only the container says which matrix they have.
    ours = saved(zoo / "container_colours", tmp_path / "ours")
    theirs = saved(zoo / "container_colours", tmp_path / "theirs", python)
    assert len(ours) == 3
    assert np.abs(ours - theirs).max() <= 2

    tests = ("tests/video/test_readers.py", "-k", "pyav-2-threads and (number or times or metadata or keyframe)")
    quiet = ("-q", "-p", "no:cacheprovider", "--no-header")
    done = run("-m", "pytest", *quiet, *tests, python=python, SOSAMPLER_TESTS_CLIPS=str(zoo))
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 3 * len(ZOO)  # type: ignore[index]


@pytest.mark.light
def test_light_install_in_a_venv_of_its_own(wheel: Path, tmp_path: Path, clip: Path) -> None:
    """The wheel with its core dependencies alone: it selects, draws and explains what is missing."""
    venv = tmp_path / "venv"
    python = install(wheel, venv, "--constraint", str(ROOT / "constraints.txt"))

    packages = json.loads(uv("pip", "list", "--python", python, "--format", "json").stdout)
    assert not {package["name"] for package in packages} & {
        "torch",
        "torchvision",
        "torchcodec",
        "pyarrow",
        "transformers",
        "huggingface-hub",
    }
    size = sum(file.stat().st_size for file in (venv / "lib").rglob("*") if file.is_file())
    assert size < 330 * 2**20, f"{size / 2**20:.0f} MB"

    sheet = tmp_path / "sheet.png"
    done = run(
        "-m", "sosampler", "select", str(clip), "-n", "3", "--json", "--contact-sheet", str(sheet), python=python
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["policy"], told["num_candidates"], len(told["frame_indices"])) == ("general", 32, 3)
    assert sheet.exists()
    done = run("-m", "sosampler", "select", str(clip), "-n", "3", "--policy", "uniform", "--json", python=python)
    assert json.loads(done.stdout)["frame_indices"] == [15, 45, 75]

    done = run("-m", "sosampler", "select", str(clip), "--decoder", "torchcodec", python=python)
    assert done.returncode == 2
    assert "sosampler[torchcodec]" in done.stderr
    assert "Traceback" not in done.stderr
    done = run("-m", "sosampler", "select", str(clip), "--out", str(tmp_path / "o.parquet"), python=python)
    assert done.returncode == 2
    assert "sosampler[parquet]" in done.stderr
    done = run("-c", f"import sosampler; sosampler.select({str(clip)!r}).to_torch()", python=python)
    assert "sosampler[train]" in done.stderr
    done = run("-c", "import sosampler; sosampler.create_classifier('resnet50')", python=python)
    assert "sosampler.create_classifier needs" in done.stderr
    assert "sosampler[train]" in done.stderr
    for command in ("classify", "prepare", "datasets", "report"):  # all others: test_commands_say_what_they_lack
        arguments, extra = COMMANDS[command]
        given = [text.format(video=clip, folder=tmp_path) for text in arguments]
        done = run("-m", "sosampler", command, *given, python=python)
        assert done.returncode == (0 if extra is None else 2), (command, done.stderr)
        assert "Traceback" not in done.stderr
        assert (f"sosampler[{extra}]" in done.stderr) == (extra == "train"), (command, done.stderr)
