"""Tables and figures of the paper on real data: everything that paper_places.py names, as one job with a time limit.

    python benchmarks/paper/paper_runs.py --pictures SPORTS22 --resnet50 ... --mobilenet ... --i3d ... --work WORK \
        --out benchmarks/paper --limit 540

WORK may hold `yoga`, `airtlab` and `golfdb` as realvid.py makes them (bank, and head.safetensors, which is else made
here); sets that are not there, or do not come within `--patience` seconds, are left out. Reels, classifiers, samplers
and tables are made by some processes at a time, in the order of their ranks. Killed and started again, it goes on.

`--reserve` seconds before the limit no training goes on; what can be measured with what is trained still is. A table
whose trainings did not finish is left out, never half-written. In --out: one JSON file for each bank and classifier,
without single videos; golf_events.json beside it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.paper.paper_places import ALL_SEEDS, CLIP_NETWORKS, REAL_CLIPS, SPECS, Spec, Wanted
from benchmarks.paper.paper_worker import GOLF_TRAININGS, MARK, Common, Job, Reply, spec_of

COUNTS = {"bank10": [1200, 150, 800], "bank100": [200, 0, 250], "cls10": [1500, 150, 0], "clips10": [600, 60, 80]}
STEP = 0.2  # seconds between looks at what is ready
FIRST, LAST = -1, 99  # ranks


@dataclass
class Task:
    """A job, what must be done before it, and how it went."""

    name: str
    job: Job
    needs: tuple[str, ...] = ()
    rank: tuple[int, ...] = (FIRST,)
    measures: Wanted | None = None  # its needs are trainings, of which those of one seed may be enough
    trainings: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # of a measurement, by seed
    state: str = "waiting"  # running, done, failed, left out
    why: str = ""
    seconds: float = 0.0

    @property
    def is_training(self) -> bool:
        return self.job["do"] in ("train", "clip network", "resnet50")


# ---- what is to be done


def plan(common: Common, specs: Sequence[Spec]) -> dict[str, Task]:
    """All tasks, by name."""
    tasks: dict[str, Task] = {}

    def add(name: str, job: Job, needs: Sequence[str] = (), **more: object) -> str:
        tasks.setdefault(name, Task(name, job, tuple(needs), **more))  # type: ignore[arg-type]
        return name

    clip_networks = {spec.name for spec in CLIP_NETWORKS}
    for spec in specs:
        if spec in REAL_CLIPS:
            ready = [add(f"rebuild {spec.name}", {"do": "rebuild", "place": spec.name})]
        else:
            needs = [add("resnet50", {"do": "resnet50"})]
            reels = spec.bank.partition("-")[0]
            needs.append(add(f"reels {reels}", {"do": "reels", "bank": reels}))
            if spec.name in clip_networks:
                before = [needs[0], add("reels cls10", {"do": "reels", "bank": "cls10"})]
                job = {"do": "clip network", "name": spec.classifier_name}
                needs = [add(f"network {spec.classifier_name}", job, before), needs[1]]
            # By the bank, which has one writer; places that share it share the classifier too.
            ready = [add(f"teach {spec.bank}", {"do": "teach", "place": spec.name}, needs)]
        _add_wanted(add, spec_of(common, spec.name), ready)
    return tasks


def _add_wanted(add: object, spec: Spec, ready: list[str]) -> None:
    assert callable(add)
    features = list(ready)
    if spec.has_systems:
        features = [add(f"features {spec.name}", {"do": "features", "place": spec.name}, ready)]
    for wanted in spec.wanted:
        by_seed: dict[int, list[str]] = {seed: [] for seed in wanted.seeds}
        for training in spec.trainings(wanted.experiment):
            for seed in wanted.seeds:
                job: Job = {"do": "train", "place": spec.name, "experiment": wanted.experiment}
                job |= {"training": training.name, "seed": seed}
                needs = features if training.is_baseline else ready
                rank = (2 * ALL_SEEDS.index(seed), wanted.rank)  # one seed of everything first, but for what is last
                name = f"train {spec.name}/{training.name}-{seed}"
                by_seed[seed].append(add(name, job, needs, rank=_with_clips_last(rank)))
        add(
            f"measure {spec.name}/{wanted.experiment}",
            {"do": "measure", "place": spec.name, "experiment": wanted.experiment},
            ready,
            rank=(LAST if wanted.alone else FIRST, wanted.rank),
            measures=wanted,
            trainings={seed: tuple(names) for seed, names in by_seed.items()},
        )
    if spec.name == "golfdb":
        names = GOLF_TRAININGS.values()
        add(
            "golf events",
            {"do": "golf", "place": spec.name},
            ready,
            rank=(FIRST,),
            measures=Wanted("golf", ALL_SEEDS),
            trainings={seed: tuple(f"train {spec.name}/{name}-{seed}" for name in names) for seed in ALL_SEEDS},
        )


def _with_clips_last(rank: tuple[int, int]) -> tuple[int, int]:
    """Table 6 of networks that look at clips comes between the second and the third seed of the rest."""
    return (3, rank[1]) if rank[1] >= 5 else rank


# ---- who does it


class Schedule:
    """Which task is next; for threads, one at a time."""

    def __init__(self, tasks: dict[str, Task], limit: float, reserve: float) -> None:
        self.tasks = tasks
        self.begun = time.monotonic()
        self._limit, self._reserve = limit, reserve
        self._lock = threading.Lock()

    @property
    def age(self) -> float:
        return time.monotonic() - self.begun

    @property
    def trains(self) -> bool:
        """Whether there is time left for trainings."""
        return self.age < self._limit - self._reserve

    @property
    def is_over(self) -> bool:
        open_states = ("waiting", "running")
        return self.age >= self._limit or not any(task.state in open_states for task in self.tasks.values())

    def next(self, *, only_measuring: bool) -> tuple[Task, Job] | None:
        """The first of the tasks that can be done now, and its job; it is then running."""
        with self._lock:
            self._settle()
            ready = [task for task in self.tasks.values() if task.state == "waiting" and self._is_ready(task)]
            for task in sorted(ready, key=lambda one: one.rank):
                if only_measuring and task.measures is None:
                    continue
                seeds = self._seeds(task)
                if task.measures is not None and task.measures.experiment != "golf":
                    task.job |= {"seeds": seeds}
                task.state = "running"
                return task, dict(task.job)
        return None

    def _is_ready(self, task: Task) -> bool:
        if any(self.tasks[need].state != "done" for need in task.needs):
            return False
        if task.is_training:
            return self.trains
        if task.measures is None:
            return True
        if task.measures.alone and any(
            other.state == "running" or (other.state == "waiting" and not (other.measures and other.measures.alone))
            for other in self.tasks.values()
            if other is not task
        ):
            return False
        names = [name for names in task.trainings.values() for name in names]
        finished = all(self.tasks[name].state not in ("waiting", "running") for name in names)
        return (finished or not self.trains) and (not task.measures.seeds or bool(self._seeds(task)))

    def _seeds(self, task: Task) -> list[int]:
        """Those of which all trainings are finished."""
        found = [
            seed for seed, names in task.trainings.items() if all(self.tasks[name].state == "done" for name in names)
        ]
        return found if task.measures is not None else []

    def _settle(self) -> None:
        """Leave out what can never be done."""
        for task in self.tasks.values():
            if task.state != "waiting":
                continue
            lost = [need for need in task.needs if self.tasks[need].state in ("failed", "left out")]
            if lost:
                task.state, task.why = "left out", f"{lost[0]} is not there"
            elif task.is_training and not self.trains:
                task.state, task.why = "left out", "no time was left"
            elif task.measures is not None and task.measures.seeds and not self._may_have_seeds(task):
                task.state, task.why = "left out", "its trainings are not finished"

    def _may_have_seeds(self, task: Task) -> bool:
        states = ("waiting", "running", "done")
        return any(all(self.tasks[name].state in states for name in names) for names in task.trainings.values())

    def ended(self, task: Task, reply: Reply | None) -> None:
        with self._lock:
            if reply is None:
                task.state, task.why = "failed", "its process died" if self.trains else "time was up"
            elif "failed" in reply:
                task.state, task.why = "failed", str(reply["failed"])
            else:
                task.state = "done"
            task.seconds = 0.0 if reply is None else float(reply["seconds"])
            remark = f": {task.why}" if task.why else ""
            print(f"{self.age:4.0f} s  {task.name} {task.state} in {task.seconds:.0f} s{remark}", flush=True)


class Worker:
    """A process and the thread that feeds it; one that dies is started again."""

    def __init__(self, schedule: Schedule, common: Common, log: Path, *, only_measuring: bool) -> None:
        self._schedule, self._common, self._only_measuring, self._log = schedule, common, only_measuring, log
        self._process = self._started()
        self._busy_with: Task | None = None
        self._thread = threading.Thread(target=self._feed, daemon=True)
        self._thread.start()

    def _started(self) -> subprocess.Popen[str]:
        with self._log.open("a", encoding="utf-8") as file:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("paper_worker.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        assert process.stdin is not None
        process.stdin.write(self._common.to_json() + "\n")
        return process

    def _feed(self) -> None:
        while not self._schedule.is_over:
            found = self._schedule.next(only_measuring=self._only_measuring)
            if found is None:
                time.sleep(STEP)
                continue
            self._busy_with, job = found
            reply = self._asked(job)
            self._schedule.ended(self._busy_with, reply)
            self._busy_with = None
            if reply is None and not self._schedule.is_over:
                self._process.wait()
                self._process = self._started()

    def _asked(self, job: Job) -> Reply | None:
        """None where the process died."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        for line in self._process.stdout:
            if line.startswith(MARK):
                reply: Reply = json.loads(line.removeprefix(MARK))
                return reply
        return None

    def stop_training(self) -> None:
        """End it in the middle of a training: what is left of the time is for measuring."""
        if self._busy_with is not None and self._busy_with.is_training:
            self._process.terminate()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._thread.join(timeout=5)


def work(schedule: Schedule, common: Common, parallel: int, measurers: int) -> None:
    """Until all is done or time is up."""
    logs = common.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    workers = [
        Worker(schedule, common, logs / f"worker-{number}.log", only_measuring=number >= parallel)
        for number in range(parallel + measurers)
    ]
    try:
        while not schedule.is_over:
            if not schedule.trains:
                for worker in workers:
                    worker.stop_training()
            time.sleep(STEP)
    finally:
        for worker in workers:
            worker.stop()


# ---- what came out


def collect(common: Common, out: Path, facts: Mapping[str, object]) -> list[str]:
    """The small files; names of those that are written."""
    from benchmarks.common import Results
    from benchmarks.paper.paper_contrasts import collected

    written = []
    for name in SPECS:
        spec = spec_of(common, name)
        about: dict[str, object] = {
            "what": f"tables and figures of the paper: {spec.bank_name}, {spec.classifier_name}"
        }
        about |= {"name": name, "data": spec.data, "changes": spec.changes, **facts}
        found = collected(spec.folder(common.folder), about)
        if found is not None:
            network = common.folder / spec.classifier / "result.json"
            if network.is_file():
                found["classifier_training"] = json.loads(network.read_text(encoding="utf-8"))
            results = Results(out / f"{name}.json")
            results.data = {}
            results.put(**found)
            written.append(name)
    golf = common.folder / "golf_events.json"
    if golf.is_file():
        (out / "golf_events.json").write_bytes(golf.read_bytes())
    return written


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, required=True)
    parser.add_argument("--resnet50", type=Path, required=True)
    parser.add_argument("--mobilenet", type=Path, required=True)
    parser.add_argument("--i3d", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=540, help="Seconds for everything.")
    parser.add_argument("--reserve", type=float, default=110, help="Seconds of these in which nothing is trained.")
    parser.add_argument("--parallel", type=int, default=7, help="Processes that make, train and measure.")
    parser.add_argument("--measurers", type=int, default=3, help="Processes that measure alone.")
    parser.add_argument("--places", nargs="+", choices=list(SPECS), default=list(SPECS))
    parser.add_argument(
        "--reuse", type=Path, default=None, help="Samplers that samplers.py trained on the same bank10."
    )
    parser.add_argument("--counts", nargs="+", default=[], metavar="BANK=TRAIN,DEV,TEST")
    parser.add_argument("--classifier-epochs", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=None, help="Of samplers; default: those of the recipes.")
    parser.add_argument("--precision", default=None)
    parser.add_argument("--workers", type=int, default=4, help="Processes that read for each training of a classifier.")
    parser.add_argument("--patience", type=float, default=0, help="Seconds in which files that are missing may come.")
    parser.add_argument("--remarks", nargs="+", default=[], help="What a reader of these figures has to know.")
    parser.add_argument("--stage", choices=("work", "collect"), default=None)
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parsed()
    counts = COUNTS | {
        bank: [int(number) for number in result.split(",")]
        for bank, _, result in (one.partition("=") for one in arguments.counts)
    }
    common = Common(
        **{name: str(getattr(arguments, name)) for name in ("work", "pictures", "resnet50", "mobilenet", "i3d")},
        precision=arguments.precision,
        reel_counts=counts,
        classifier_epochs=arguments.classifier_epochs,
        sampler_epochs=arguments.epochs,
        reuse=None if arguments.reuse is None else str(arguments.reuse),
        workers=arguments.workers,
        patience=arguments.patience,
    )
    arguments.work.mkdir(parents=True, exist_ok=True)
    facts: dict[str, object] = {"reels": counts, "limit_seconds": arguments.limit}
    if arguments.remarks:
        facts["remarks"] = arguments.remarks
    if arguments.stage in (None, "work"):
        there = [SPECS[name] for name in arguments.places]
        if not arguments.patience:
            there = [spec for spec in there if _is_possible(spec, arguments.work)]
        schedule = Schedule(plan(common, there), arguments.limit, arguments.reserve)
        work(schedule, common, arguments.parallel, arguments.measurers)
        result = {task.name: [task.state, task.seconds, task.why] for task in schedule.tasks.values()}
        (arguments.work / "tasks.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"{schedule.age:.0f} s in all", flush=True)
    if arguments.stage in (None, "collect"):
        arguments.out.mkdir(parents=True, exist_ok=True)
        print(f"written: {', '.join(collect(common, arguments.out, facts)) or 'nothing'}", flush=True)


def _is_possible(spec: Spec, work: Path) -> bool:
    """Banks of real clips are brought, all else is made."""
    if spec in REAL_CLIPS and not (work / spec.bank / "bank.json").is_file():
        print(f"{spec.name}: {work / spec.bank} is not there; left out", flush=True)
        return False
    return True


if __name__ == "__main__":
    main()
