"""Work given to processes: answers in order, errors as they are, nothing left behind, the same bytes as without."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from sosampler import wrap_classifier
from sosampler._util.workers import ProcessPool, SharedPixels, in_order
from sosampler.bank import annotate as teaching
from sosampler.bank import decode as frame_decoding
from sosampler.bank.bank import Bank
from sosampler.bank.decode import FrameDecoder, num_frame_decoders
from sosampler.bank.from_arrays import FrameEntry, write_frames
from sosampler.bank.prepare import add_features, add_teacher
from sosampler.errors import InvalidArgument, SosamplerError
from sosampler.reels import make as reel_processes
from sosampler.reels.images import Picture, ProceduralPictures
from sosampler.reels.make import make_reels, num_render_processes, plan_splits, write_reel_bank
from sosampler.reels.recipe import ReelRecipe
from tests.factories import contents, small_net

SERVER = "tests.process_server:server"
SMALL = ReelRecipe(
    num_shots=(3, 5), num_candidates=4, size=48, picture_size=48, seconds_per_shot=(0.5, 1.0), fps=8, pan=0.2, fade=0.4
)
COUNTS = {"train": 34, "test": 4}  # two shards


def children() -> list[psutil.Process]:
    """All but the one that Python itself keeps for who has ever started a process by "spawn"."""
    alive = [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if not any("resource_tracker" in word for word in child.cmdline())]


class TestWindow:
    def test_results_come_in_order_and_few_tasks_are_taken_ahead(self) -> None:
        taken: list[int] = []

        def tasks() -> Iterator[int]:
            for number in range(10):
                taken.append(number)
                yield number

        with ThreadPoolExecutor(2) as threads:
            results = in_order(lambda number: threads.submit(str, number), tasks(), lambda pending: len(pending) < 3)
            assert next(results) == "0"
            assert taken == [0, 1, 2]
            assert list(results) == [str(number) for number in range(1, 10)]
            assert list(in_order(lambda number: threads.submit(str, number), range(3), lambda pending: False)) == [
                "0",
                "1",
                "2",
            ]

    def test_an_error_of_the_tasks_comes_after_the_results_before_it(self) -> None:
        def tasks() -> Iterator[int]:
            yield from (1, 2)
            raise InvalidArgument("no more")

        with ThreadPoolExecutor(1) as threads:
            results = in_order(lambda number: threads.submit(str, number), tasks(), lambda pending: True)
            assert [next(results), next(results)] == ["1", "2"]
            with pytest.raises(InvalidArgument, match="no more"):
                next(results)

    def test_tasks_that_have_not_started_are_cancelled(self) -> None:
        started: list[int] = []
        gate = threading.Event()

        def work(number: int) -> int:
            started.append(number)
            assert number == 0 or gate.wait(30)
            return number

        with ThreadPoolExecutor(1) as threads:
            results = in_order(lambda number: threads.submit(work, number), range(9), lambda pending: len(pending) < 9)
            assert next(results) == 0
            results.close()
            gate.set()
        assert len(started) <= 2


class TestPool:
    def test_without_processes_this_one_works(self) -> None:
        with ProcessPool(0, SERVER, "config") as pool:
            assert list(pool.results([("wait", 0), ("wait", 0)])) == 2 * [("config", 0, os.getpid())]
            with pytest.raises(InvalidArgument, match=r"^this is why$"):
                pool.submit(("refuse", "this is why")).result()

    def test_answers_come_in_order_from_several_processes(self) -> None:
        with ProcessPool(2, SERVER, "told") as pool:
            tasks = [("wait", 0.05 if number % 3 == 0 else 0.0) for number in range(12)]
            answers = list(pool.results(tasks))
        assert [value for _, value, _ in answers] == [seconds for _, seconds in tasks]
        assert {told for told, _, _ in answers} == {"told"}
        processes = {process for _, _, process in answers}
        assert len(processes) == 2
        assert os.getpid() not in processes
        assert not children()

    def test_errors_are_raised_where_the_answer_is_asked_for(self) -> None:
        with ProcessPool(1, SERVER, None) as pool:
            with pytest.raises(InvalidArgument, match=r"^this is why$"):
                pool.submit(("refuse", "this is why")).result()
            with pytest.raises(SosamplerError, match="Odd: whatever"):
                pool.submit(("odd", None)).result()
            assert pool.submit(("print", 7)).result()[1] == 7  # what libraries print is no answer
            with pytest.raises(SosamplerError, match="a process for this ended with signal SIGKILL; run it again to"):
                pool.submit(("die", None)).result()
            assert pool.submit(("wait", 0)).result()[1] == 0  # by a new process

    def test_a_server_that_cannot_start(self) -> None:
        with (
            ProcessPool(1, "tests.process_server:nothing", None) as pool,
            pytest.raises(SosamplerError, match="exit code 1"),
        ):
            pool.submit(("wait", 0)).result()

    def test_leaving_ends_processes_in_the_middle_of_their_work(self) -> None:
        begin = time.monotonic()
        with ProcessPool(2, SERVER, None) as pool:
            pool.submit(("wait", 0)).result()
            for _ in range(5):
                pool.submit(("wait", 60))
            time.sleep(0.2)
        assert time.monotonic() - begin < 30
        assert not children()

    def test_memory_is_shared_and_grows(self) -> None:
        with SharedPixels() as shared, ProcessPool(1, SERVER, shared.file, files=[shared.file]) as pool:
            for value in (3, 200):
                array = shared.array((value + 1,))
                pool.submit(("fill", value)).result()
                assert array[value] == value
            assert shared.array((201,))[3] == 3
            shared.empty()
            assert not hasattr(os, "memfd_create") or not shared.array((201,)).any()


# --- reels ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reels") / "bank"
    write_reel_bank(out, small_plan(), workers=1)
    return out


def small_plan() -> Any:
    return plan_splits("procedural", None, SMALL, counts=COUNTS, num_classes=3)


@pytest.fixture
def always_processes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Few reels are enough; gives how many processes each run had."""
    seen: list[int] = []
    real = reel_processes.ProcessPool

    def counting(number: int, *arguments: Any, **options: Any) -> Any:
        seen.append(number)
        return real(number, *arguments, **options)

    monkeypatch.setattr(reel_processes, "_FRAMES_PER_PROCESS", 1)
    monkeypatch.setattr(reel_processes, "ProcessPool", counting)
    return seen


class TestReels:
    def test_processes_give_the_same_bytes(self, tmp_path: Path, reels: Path, always_processes: list[int]) -> None:
        write_reel_bank(tmp_path / "bank", small_plan(), workers=2)
        assert always_processes == [2]
        assert contents(tmp_path / "bank") == contents(reels)

    def test_also_where_few_pictures_can_be_shared(
        self, tmp_path: Path, reels: Path, always_processes: list[int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reel_processes, "_SHARED_BYTES", 5 * 48 * 48 * 3)
        write_reel_bank(tmp_path / "bank", small_plan(), workers=2)
        assert always_processes == [2]
        assert contents(tmp_path / "bank") == contents(reels)

    def test_sources_that_share_no_pictures(self, tmp_path: Path, always_processes: list[int]) -> None:
        # The same numbers of pictures, drawn with other seeds: a mix-up would show.
        train, test = small_plan()
        other = plan_splits("procedural", None, SMALL, counts=COUNTS, num_classes=3, seed=5)[1]
        mixed = [train, type(test)("test", test.reels, other.pictures)]
        write_reel_bank(tmp_path / "threads", mixed, workers=1)
        assert not always_processes
        write_reel_bank(tmp_path / "processes", mixed, workers=2)
        assert contents(tmp_path / "threads") == contents(tmp_path / "processes")

    def test_broken_off_it_goes_on_to_the_same_bytes(
        self, tmp_path: Path, reels: Path, always_processes: list[int]
    ) -> None:
        def stop(progress: Any) -> None:
            if progress.done == 33:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_reel_bank(tmp_path / "bank", small_plan(), workers=2, on_progress=stop)
        assert not children()
        assert len(Bank(tmp_path / "bank", partial=True)) == 32
        write_reel_bank(tmp_path / "bank", small_plan(), workers=2)
        assert always_processes == [2, 2]
        assert contents(tmp_path / "bank") == contents(reels)

    def test_a_damaged_picture_is_named(self, tmp_path: Path, always_processes: list[int]) -> None:
        for place, name in enumerate(("a", "b", "distractors")):
            (tmp_path / "p" / name).mkdir(parents=True)
            for number in range(5):
                Image.new("RGB", (50, 50), (40 * number, 90 * place, 9)).save(tmp_path / "p" / name / f"{number}.png")
        (tmp_path / "p" / "b" / "1.png").write_bytes(b"damaged")
        with pytest.raises(InvalidArgument, match=r"b/1\.png: not an image that can be read"):
            make_reels(tmp_path / "p", tmp_path / "out", preset=None, recipe=SMALL, counts={"train": 20}, workers=2)
        assert always_processes == [2]
        assert not children()

    def test_where_processes_pay(self) -> None:
        class Own(ProceduralPictures):
            def _load(self, key: Any) -> Picture:
                return np.zeros((48, 48, 3), np.uint8)

        package, own = ProceduralPictures(2, 3, size=48), Own(2, 3, size=48)
        assert num_render_processes(16, [package], 30_000) == 16
        assert num_render_processes(16, [package], 3500) == 8
        assert num_render_processes(2, [package], 300) == 0
        assert num_render_processes(1, [package], 30_000) == 1  # that is no gain: the caller renders itself
        assert num_render_processes(16, [package, own], 30_000) == 0  # its class may not be found elsewhere

    def test_interrupted_from_the_keyboard_nothing_is_left(self, tmp_path: Path) -> None:
        code = (
            # Where tests run in the background, a shell has told them to ignore interrupts.
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "from sosampler.reels import make\n"
            "make._FRAMES_PER_PROCESS = 1\n"
            f"make.make_reels('procedural', {str(tmp_path / 'bank')!r}, counts={{'train': 5000}}, workers=2)\n"
        )
        run = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.PIPE, text=True)
        try:
            until = time.monotonic() + 60
            while len(workers := psutil.Process(run.pid).children(recursive=True)) < 2:
                assert time.monotonic() < until
                time.sleep(0.05)
            time.sleep(0.5)
            os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to all of them
            said = run.communicate(timeout=60)[1]
        finally:
            run.kill()
        assert said.rstrip().endswith("KeyboardInterrupt")
        assert said.count("Traceback") == 1  # of the caller alone
        assert not psutil.wait_procs(workers, timeout=10)[1]


# --- stored frames ----------------------------------------------------------------------------------------------------


def jpegs_of(bank: Bank) -> tuple[list[bytes], list[str]]:
    pairs = [(jpeg, item.id) for item in bank for jpeg in item.jpegs]
    return [jpeg for jpeg, _ in pairs], [name for _, name in pairs]


class TestDecoding:
    def test_processes_give_the_same_pixels(self, reels: Path) -> None:
        jpegs, names = jpegs_of(Bank(reels))
        with FrameDecoder(2) as processes:
            for count in (1, 2, 16, 17, 40, len(jpegs)):
                with (
                    FrameDecoder().decoded(jpegs[:count], names) as expected,
                    processes.decoded(jpegs[:count], names) as found,
                ):
                    assert found.shape == (count, 48, 48, 3)
                    np.testing.assert_array_equal(found, expected)
        assert not children()

    def test_large_batches_give_their_memory_back(self, reels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        jpegs, names = jpegs_of(Bank(reels))
        monkeypatch.setattr(frame_decoding, "_MAX_DECODED_BYTES", 20 * 48 * 48 * 3)
        with FrameDecoder(1) as processes:
            for first in (0, 30, 60):  # into room that was used before
                part = slice(first, first + 30)
                with (
                    processes.decoded(jpegs[part], names[part]) as found,
                    FrameDecoder().decoded(jpegs[part], names[part]) as expected,
                ):
                    np.testing.assert_array_equal(found, expected)
                    held = found
                assert not hasattr(os, "memfd_create") or not held.any()

    def test_a_damaged_frame_is_named_and_the_next_batch_goes_well(self, reels: Path) -> None:
        jpegs, names = jpegs_of(Bank(reels))
        broken = [*jpegs[:30], jpegs[30][:40], *jpegs[31:40]]
        with FrameDecoder(2) as processes:
            with (
                pytest.raises(SosamplerError, match=f"'{names[30]}': a JPEG is damaged"),
                processes.decoded(broken, names),
            ):
                pass
            with processes.decoded(jpegs[:40], names) as found, FrameDecoder().decoded(jpegs[:40], names) as expected:
                np.testing.assert_array_equal(found, expected)

    def test_where_processes_pay(self) -> None:
        assert num_frame_decoders("cuda", 16, 30_000) == 15
        assert num_frame_decoders("cuda", 64, 30_000) == 16
        assert num_frame_decoders("cuda", 16, 300) == 0
        assert num_frame_decoders("cuda", 2, 30_000) == 0
        assert num_frame_decoders("cpu", 16, 30_000) == 0


class TestAsking:
    @pytest.fixture
    def bank(self, tmp_path: Path) -> Path:
        """Seven shards, one of them of another size."""
        videos = [
            FrameEntry(f"v{number}", (number % 3,), np.full((4, 32, 40 + 8 * (number == 5), 3), 9 * number, np.uint8))
            for number in range(20)
        ]
        write_frames(tmp_path / "bank", videos, classes=("a", "b", "c"), videos_per_shard=3)
        return tmp_path / "bank"

    def test_answers_are_the_same(self, bank: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        shutil.copytree(bank, tmp_path / "other")
        classifier = pooled_of_three()
        add_teacher(bank, classifier, batch=5)
        add_features(bank, classifier, batch=5, name="own")
        used: list[int] = []
        monkeypatch.setattr(teaching, "num_frame_decoders", lambda device, cores, frames: used.append(frames) or 2)
        add_teacher(tmp_path / "other", classifier, batch=5)
        add_features(tmp_path / "other", classifier, batch=5, name="own")
        assert used == [80, 80]
        assert contents(tmp_path / "other") == contents(bank)
        assert not children()

    def test_only_what_is_missing_is_counted(self, bank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        classifier = pooled_of_three()
        add_teacher(bank, classifier)
        before = contents(bank)
        (folder,) = (bank / "teachers").iterdir()
        for shard in ("00001.arrow", "00004.arrow"):
            (folder / shard).unlink()
        frames: list[int] = []
        monkeypatch.setattr(teaching, "num_frame_decoders", lambda device, cores, count: frames.append(count) or 0)
        add_teacher(bank, classifier)
        assert frames == [80 * 2 // 7]
        assert contents(bank) == before

    def test_a_damaged_shard_does_not_cost_those_before_it(self, bank: Path) -> None:
        damaged = bank / "frames" / "00004.arrow"
        damaged.write_bytes(damaged.read_bytes()[:100])
        with pytest.raises(SosamplerError, match=r"00004\.arrow"):
            add_teacher(bank, pooled_of_three(), batch=5)
        (folder,) = (bank / "teachers").iterdir()
        assert sorted(path.name for path in folder.glob("*.arrow")) == [f"{number:05d}.arrow" for number in range(4)]


def pooled_of_three() -> Any:
    return wrap_classifier(small_net(0, 3), input_size=64, resize=72, layout="BCHW", class_names=["a", "b", "c"])
