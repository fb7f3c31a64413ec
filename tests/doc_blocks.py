"""Find, run and check the code blocks of the documentation.

A block runs unless the line before it is `<!-- not run: why -->`; such a block is compiled, or its options are
compared with those of the command. A `text` block is the output of the block before it, with `...` for what may
differ.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import sosampler as so

ROOT = Path(__file__).parent.parent
TINY = "timm:test_resnet.r160_in1k"
LANGUAGES = ("python", "bash", "text", "json", "yaml", "csv", "bibtex")

_FENCE = re.compile(r"^( *)```(\w*)\s*$")
_WRITTEN = ("--out", "--run", "-o", "--save-frames")  # options that name what a command writes
_MARK = re.compile(r"^ *<!-- not run: (.+) -->$")


@dataclass(frozen=True)
class Block:
    """One fenced code block."""

    page: str  # path from the repository's root
    line: int  # number of its first line
    language: str
    code: str
    not_run: str = ""  # the reason

    def __str__(self) -> str:
        return f"{self.page}, line {self.line}"


def pages() -> list[str]:
    """Return all pages that users read."""
    top = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
    return [path.relative_to(ROOT).as_posix() for path in [*top, *sorted((ROOT / "docs").rglob("*.md"))]]


def blocks_of(page: str, language: str | None = None) -> list[Block]:
    """Return the blocks of a page in order."""
    blocks: list[Block] = []
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    begin: int | None = None
    indent, named = "", ""
    for number, line in enumerate(lines):
        fence = _FENCE.match(line)
        if begin is None:
            if fence:
                begin, indent, named = number + 1, fence[1], fence[2]
        elif fence and fence[1] == indent and not fence[2]:
            code = "\n".join(part.removeprefix(indent) for part in lines[begin:number]) + "\n"
            mark = _MARK.match(lines[begin - 2]) if begin >= 2 else None
            blocks.append(Block(page, begin + 1, named, code, mark[1] if mark else ""))
            begin = None
    assert begin is None, f"{page}: the block at line {begin} has no end"
    return [block for block in blocks if language in (None, block.language)]


def commands_of(block: Block) -> list[list[str]]:
    """Return the words of each command; a backslash at the end of a line continues it."""
    lines = block.code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


# ---- checking blocks that are not run


def check(block: Block) -> None:
    """Check a block without running it."""
    if block.language == "python":
        compile(block.code, str(block), "exec")
    elif block.language == "bash":
        for words in commands_of(block):
            check_command(words)
    else:
        raise AssertionError(f"{block}: only python and bash blocks can be marked as not run")


def check_command(words: Sequence[str]) -> None:
    """Raise an error for options and arguments that are unknown or missing."""
    program, *rest = words
    if program == "sosampler":
        check_own_command(rest)
    elif program == "accelerate":
        assert rest[0] == "launch"
        assert rest[rest.index("-m") + 1] == "sosampler"
        check_own_command(rest[rest.index("-m") + 2 :])
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert set(rest) <= set(targets), rest
    elif program == "pip":
        assert rest[0] == "install"
        known = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
        for what in rest[1:]:
            extras = re.fullmatch(r"(?:sosampler|\.)(?:\[([a-z,]+)\])?", what)
            assert extras, what
            assert set(filter(None, (extras[1] or "").split(","))) <= set(known), what
    elif program == "vllm":
        json.loads(rest[rest.index("--media-io-kwargs") + 1])
    elif program == "python":
        assert (ROOT / rest[0]).is_file(), rest
    else:
        raise AssertionError(f"unknown program {program!r}")


def check_own_command(words: Sequence[str]) -> None:
    from typer.main import get_command

    from sosampler.cli.main import app

    known: Any = get_command(app)
    words = list(words)
    options = {option for parameter in known.params for option in parameter.opts}
    if words and words[0] in options:  # parsing --install-completion would change the user's shell
        return
    while hasattr(known, "commands") and words and words[0] in known.commands:
        known = known.commands[words.pop(0)]
    known.make_context(known.name, words)  # raises for what is unknown or missing


# ---- running


Change = Callable[[str], str]


def run_page(page: str, names: dict[str, Any] | None = None, change: Change = str) -> dict[str, Any]:
    """Run the blocks of a page in order in the current folder and return the Python names they defined.

    `names` are defined from the start; `change` replaces Python code that would take a test too long.
    """
    names = {} if names is None else names
    printed: str | None = None
    blocks = blocks_of(page)
    _remove_outputs(blocks)
    for block in blocks:
        if block.not_run:
            check(block)
        elif block.language == "python":
            printed = _run_python(block, names, change)
        elif block.language == "bash":
            printed = "".join(run_command(words, str(block)) for words in commands_of(block))
        elif block.language == "text":
            assert printed is not None, f"{block}: no block before it printed anything"
            _compare(block, printed)
        else:
            _read_data(block)
    return names


def _run_python(block: Block, names: dict[str, Any], change: Change) -> str:
    code = "\n" * (block.line - 1) + change(block.code)  # so that tracebacks show the line of the page
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, block.page, "exec"), names)
    return printed.getvalue()


def _compare(block: Block, printed: str) -> None:
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    right = doctest.OutputChecker().check_output(block.code, printed, options)
    assert right, f"{block}: other output\n{printed}"


def _read_data(block: Block) -> None:
    """Check that data shown on a page can be read."""
    if block.language == "json":
        json.loads(block.code)
    elif block.language == "csv":
        Path("shown").mkdir(exist_ok=True)  # apart from class lists, which belong to the manifest beside them
        Path("shown/manifest.csv").write_text(block.code, encoding="utf-8")
        assert so.read_manifest("shown/manifest.csv").items
    elif block.language == "yaml":
        Path("shown.yaml").write_text(block.code, encoding="utf-8")
        so.read_recipe("shown.yaml")
    elif block.language == "bibtex":
        assert re.fullmatch(r"@\w+\{\w+,\n(  \w+ += \{.+\},?\n)+\}\n", block.code), f"{block}: not a BibTeX entry"
    else:
        raise AssertionError(f"{block}: give the block one of these languages: {', '.join(LANGUAGES)}")


def _remove_outputs(blocks: Sequence[Block]) -> None:
    """Remove what the page itself writes before it uses it."""
    seen: set[str] = set()
    for words in (words for block in blocks if block.language == "bash" for words in commands_of(block)):
        written = {after for word, after in pairwise(words) if word in _WRITTEN}
        for path in map(Path, written - seen if len(words) > 2 and not _keeps_output(words) else ()):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        used = [word for before, word in zip(["", *words], words, strict=False) if before != "--to"]
        seen.update(re.sub(r"^\w+=", "", part) for word in used for part in word.split(","))


def _keeps_output(words: Sequence[str]) -> bool:
    """`prepare` without a manifest works on an existing bank; `export` writes into an existing folder."""
    return words[1] == "export" or (words[1] == "prepare" and words[2].startswith("-"))


def run_command(words: Sequence[str], where: str) -> str:
    """Run one command of the package at test size and return its standard output."""
    from typer.testing import CliRunner

    from sosampler.cli.main import app

    assert words[0] == "sosampler", f"{where}: {words[0]} cannot be run here; mark the block with <!-- not run: why -->"
    if words[1] == "ui":
        return _open_page(words, where)
    if words[1] == "mcp":
        return _start_server(words, where)
    done = CliRunner().invoke(app, small(words[1:]), prog_name="sosampler")
    if done.exit_code:
        error = done.exception if not isinstance(done.exception, SystemExit) else done.stderr
        raise AssertionError(f"{where}: {shlex.join(words)}\nended with {done.exit_code}: {error}") from done.exception
    return done.output


def small(words: Sequence[str]) -> list[str]:
    """Return the same command with a small network and small numbers."""
    command, *rest = words
    if command in ("train-classifier", "prepare", "independence") and "-c" in rest:
        index = rest.index("-c") + 1
        if not Path(rest[index]).is_dir():
            rest[index] = TINY.replace("timm", "any_precision") if rest[index].startswith("any_precision") else TINY
            if command != "independence":  # has no such option
                rest = _with(rest, "--input-size", "32")
    if command == "train-classifier":
        rest = _with(_with(rest, "--epochs", "1"), "--workers", "0")
    elif command == "train":
        rest = _with(_with(rest, "--epochs", "1"), "--batch-size", "4")
        if "--sampler" not in rest or "sampler" in rest[rest.index("--sampler") + 1]:
            rest += ["--set", "input_size=32", "--set", f"backbone={TINY}", "--set", "shift=0"]
        elif "--weights" in rest:  # of a light network; use the existing sampler
            index = rest.index("--weights")
            rest[index : index + 2] = ["--light", "runs/sampler"]
    elif command == "evaluate":
        rest = _with(rest, "--bootstrap", "20")
    elif command == "reels":
        for split in ("train", "dev", "test"):
            rest = _with(rest, f"--count-{split}", "2")
        rest = _with(rest, "--size", "48")
        if "streams" in rest:
            rest += ["--num-shots", "4", "4"]
    elif command == "watch":
        rest = _with(rest, "--idle", "0.2")
    elif command == "prepare":
        rest = _with(rest, "--workers", "1")
    return [command, *rest]


def _with(words: list[str], option: str, value: str) -> list[str]:
    """Set an option, replacing its value if it has one."""
    if option in words:
        index = words.index(option) + 1
        return [*words[:index], value, *words[index + 1 :]]
    return [*words, option, value]


def _start_server(words: Sequence[str], where: str) -> str:
    """Start the server for assistants with nothing to read, so that it ends at once."""
    done = subprocess.run([sys.executable, "-m", *words], input="", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{where}: {done.stderr}"
    return done.stdout


def _open_page(words: Sequence[str], where: str) -> str:
    """Start the web server, wait until the page can be opened, and stop it with Ctrl-C."""
    command = [sys.executable, "-m", *words, "--port", "0", "--json"]
    environment = {**os.environ, "BROWSER": "true"}  # opens nothing
    # A background process ignores Ctrl-C, and its children inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert line, f"{where}: {errors}"
    assert json.loads(line)["url"].startswith("http://127.0.0.1:")
    return line
