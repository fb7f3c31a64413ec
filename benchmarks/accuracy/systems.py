"""All samplers and systems on one bank, at what they really cost: tuned alike on dev, measured once on test.

    python benchmarks/accuracy/systems.py NAME BANK --classifier FOLDER --sampler-weights MOBILENETV2 --work RUNS \
        --out benchmarks/systems_NAME.json --seeds 0 1 2 --trials 4 --parallel 3

BANK has train, dev and test. The stages, which `--stage` runs one at a time, and all of which go on after a kill:

- features: the classifier's answers about all frames, its features, those of a light network and those of networks
  that systems bring go into the bank. With the same methods it comes before all others: only one process may write
  features into a bank.
- tune: every learned method has the same number of trials (systems_trials.py), each trained with the first seed. A
  trial counts by its best dev metric over the numbers of frames, or values of its dial, that cost on the mean no more
  than six evenly spread frames. `--tune-bank` is another bank for this, whose dev shares no pictures with its train
  where that of BANK does; what is chosen on dev is then chosen there, with the trials themselves.
- train: the best trial of each method with all seeds.
- evaluate: on dev, to choose the number of frames or the dial of each method within the budget; then, for the first
  time, on test.
- train-longer: `--longer N/T=BANK ...` have longer videos, train and test: SOSampler and OCSampler are trained there.
- longer: both of them on the longer videos, as trained on BANK and as trained there.

Methods may be measured beside each other, each with its own --out that began as a copy; `--take FILES --methods ...`
then takes their trials and rows into one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import sosampler as so
from sosampler._util.environment import circumstances
from sosampler._util.hardware import usable_cores
from sosampler.baselines.base import light_network
from sosampler.baselines.recipe import read_baseline_recipe
from sosampler.baselines.registry import baseline_class, list_systems
from sosampler.errors import MissingDependency, SosamplerError
from sosampler.samplers.recipe import read_recipe
from sosampler.samplers.registry import RECIPES
from sosampler.training.baseline_data import FeatureSource, feature_sources, keep_features

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.accuracy import systems_trials as trials
from benchmarks.accuracy.systems_trials import NUM_CANDIDATES, NUM_FRAMES, PICTURES, TRIALS, Row, Settings
from benchmarks.accuracy.train_many import Reply, Task, Trainers
from benchmarks.common import Results, device, end_with_parent, fast_precision
from benchmarks.tables.systems_table import draw_curve

PAIRS = tuple((num_frames, NUM_CANDIDATES) for num_frames in NUM_FRAMES)
LONGER_METHODS = ("sosampler", "ocsampler")
FRAMES_A_STEP = 960  # of trainings on longer videos; batches of 64 of them would not fit into a GPU that several share


def begin(arguments: argparse.Namespace, results: Results) -> None:
    """Refuse to mix two measurements, and write the circumstances."""
    asked = {key: getattr(arguments, key) for key in ("name", "epochs", "trial_epochs", "batch_size")}
    asked["tune_bank"] = None if arguments.tune_bank is None else arguments.tune_bank.name
    if results.data.get("asked", asked) != asked:
        raise SystemExit(
            f"{results.path}: holds a measurement of {results['asked']}, not of {asked}; give another --out"
        )
    bank = so.Bank(arguments.bank)
    results.put(
        what=f"samplers and systems on {arguments.name}, tuned alike on dev, measured once on test",
        name=arguments.name,
        **circumstances(("torch", "torchvision", "timm", "numpy", "scikit-learn")),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        asked=asked,
        seeds=sorted({*results.data.get("seeds", []), *arguments.seeds}),  # methods may have fewer
        trials_each=arguments.trials,
        parallel=arguments.parallel,
        metric="mAP" if bank.multi_label else "top1",
        videos=count_videos(bank),
        **({} if arguments.tune_bank is None else {"tune_videos": count_videos(so.Bank(arguments.tune_bank))}),
        num_classes=len(bank.classes),
    )


def count_videos(bank: so.Bank) -> dict[str, int]:
    """Of each split."""
    return dict(Counter(item.split or "train" for item in bank.items))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="Of the data, for titles.")
    parser.add_argument("bank", type=Path)
    parser.add_argument("--tune-bank", type=Path, default=None, help="For trials and choices; default: BANK.")
    parser.add_argument("--classifier", type=Path, required=True, help="Its saved folder.")
    parser.add_argument("--sampler-weights", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--curve", type=Path, default=None, help="Pictures of the curve: this name as .svg and .png.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--networks", type=Path, default=None, help="Folder of networks.py; methods that need it.")
    parser.add_argument("--methods", nargs="+", choices=list(TRIALS), default=None, help="Default: all that can be.")
    parser.add_argument("--learned-only", action="store_true", help="Oracles, and rules but three, are left out.")
    parser.add_argument("--few-clips", action="store_true", help="Trials for few clips a class.")
    parser.add_argument("--trials", type=int, default=4, help="Of each method.")
    parser.add_argument("--parallel", type=int, default=3, help="Trainings at a time.")
    parser.add_argument("--epochs", type=int, default=None, help="Default: those of the recipes.")
    parser.add_argument("--trial-epochs", type=int, default=None, help="Of trials that train on pictures.")
    parser.add_argument("--batch-size", type=int, default=None, help="At most; default: those of the recipes.")
    parser.add_argument("--longer", nargs="+", default=[], metavar="N/T=BANK")
    parser.add_argument("--stage", choices=list(STAGES), default=None)
    parser.add_argument("--take", type=Path, nargs="+", default=[], help="Files of other methods; measure nothing.")
    arguments = parser.parse_args()
    lacking = [method for method in trials.NETWORKS if arguments.networks is None]
    left_out = {*lacking, trials.FIRST}
    arguments.methods = arguments.methods or [method for method in TRIALS if method not in left_out]
    if impossible := [method for method in arguments.methods if method in lacking]:
        raise SystemExit(f"{', '.join(impossible)} need networks of their own; make them with networks.py, --networks")
    if arguments.few_clips:
        TRIALS.update(trials.FEW_CLIPS)
    results = Results(arguments.out)
    if arguments.take:
        take(arguments, results)
        return tabulate(arguments, results)
    begin(arguments, results)
    for name, stage in STAGES.items():
        if arguments.stage in (None, name):
            started = time.perf_counter()
            stage(arguments, results)
            results.took(name, time.perf_counter() - started)
            print(f"{name}: {results['seconds'][name][-1]:.0f} s", flush=True)


# ---- features


def add_features(arguments: argparse.Namespace, results: Results) -> None:
    """What trainings read is in the banks before several of them start; each bank has a process of its own."""
    banks = [arguments.bank] + ([arguments.tune_bank] if arguments.tune_bank is not None else [])
    if not all(_has_all(so.Bank(bank), results.data) for bank in banks):
        classifier, light = so.create_classifier(arguments.classifier), light_network(arguments.sampler_weights)
        results.put(
            classifier={
                "name": classifier.name,
                "fingerprint": classifier.fingerprint(),
                "gmacs": classifier.gmacs(1),
            },
            light={"fingerprint": light.fingerprint(), "gmacs": light.gmacs(1)},
        )
    with ProcessPoolExecutor(len(banks), get_context("spawn"), end_with_parent) as processes:
        settings = {method: TRIALS[method][: arguments.trials] for method in arguments.methods}
        for done in [processes.submit(add_to_bank, arguments, bank, settings) for bank in banks]:
            print(done.result(), flush=True)


def add_to_bank(arguments: argparse.Namespace, path: Path, trials_of: dict[str, Sequence[Settings]]) -> str:
    """The classifier's answers; its features, those of the light network, and those of networks that systems bring."""
    begin, results = time.perf_counter(), Results(arguments.out)
    if not _has_all(so.Bank(path), results.data):
        classifier = so.create_classifier(arguments.classifier, device=device())
        teach(path, classifier)
        if all(method in PICTURES for method in trials_of):  # these read no light features
            return f"answers and features for {path.name} are there: {time.perf_counter() - begin:.0f} s"
        light = light_network(arguments.sampler_weights).to(device())
        light.precision = _precision(so.Bank(path).feature_sets.values(), light.fingerprint(), "computed_in")
        so.add_features(path, light)
    sources: dict[str, FeatureSource] = {}
    for method, tried in trials_of.items():
        if method in SOURCES and method not in trials.PIXELS:
            for settings in tried:
                given = SOURCES[method](arguments)
                networks = {name: given.pop(name) for name in ("classifier", "weights", "features") if name in given}
                recipe = read_baseline_recipe(method, **settings, **given)
                if "heavy" in recipe.feature_sets:  # the classifier's own, which the bank has
                    networks["classifier"] = results["classifier"]["fingerprint"]
                found = feature_sources(so.Bank(path), recipe.without_weights(), **networks)
                sources |= {source.fingerprint: source for source in found.values()}
    keep_features(so.Bank(path), list(sources.values()), device=device(), say=lambda text: print(text, flush=True))
    return f"answers and features for {path.name} are there: {time.perf_counter() - begin:.0f} s"


def _has_all(bank: so.Bank, result: dict[str, Any]) -> bool:
    """Without a look at the networks, which takes seconds."""
    if "light" not in result:
        return False
    heavy = result["classifier"]["fingerprint"]
    try:
        bank.teacher(heavy), bank.features(heavy), bank.features(result["light"]["fingerprint"])
    except SosamplerError:
        return False
    return True


def teach(bank: Path, classifier: Any) -> None:
    """Run the classifier on the frames that have no outputs or features yet."""
    known = so.Bank(bank).teachers.values()
    classifier.precision = _precision(known, classifier.fingerprint(), "precision")
    so.add_teacher(bank, classifier, probe_features=True)


def _precision(known: Iterable[dict[str, Any]], fingerprint: str, key: str) -> str:
    """In which a network answers: as it began, or as suits the machine."""
    begun = [str(about[key]) for about in known if about["fingerprint"] == fingerprint]
    return begun[0] if begun else fast_precision()


# ---- trainings


def task_of(
    arguments: argparse.Namespace,
    results: Results,
    method: str,
    settings: Settings,
    seed: int,
    epochs: int | dict[str, int] | None,
    bank: Path | None = None,
) -> Task:
    """Arguments of `so.train`. The folder's name follows from them, so that a run is found again."""
    classifier = results.needed("classifier", "features")["fingerprint"]
    sampler = trials.SAMPLERS.get(method, method)
    own: Settings = {"sampler": sampler, "classifier": classifier, "seed": seed, **settings}
    if epochs is not None:
        own["epochs"] = epochs
    if arguments.batch_size is not None:
        own["batch_size"] = min(own.get("batch_size", arguments.batch_size), arguments.batch_size)
    place = bank or arguments.bank
    digest = hashlib.sha256(json.dumps([own, place.name], sort_keys=True).encode()).hexdigest()[:8]
    if method in PICTURES or method in SOURCES:
        own |= SOURCES.get(method, _of_weights)(arguments)
    elif settings.get("light") == trials.TRAINED:
        shorter = arguments.trial_epochs if bank is not None and bank == arguments.tune_bank else None
        first = TRIALS[trials.TRAINED][0]
        light = task_of(arguments, results, trials.TRAINED, first, seed, shorter or arguments.epochs, bank)
        own["light"] = light["out"]
    else:
        own["light"] = results["light"]["fingerprint"]
    return {"bank": str(place), "out": str(arguments.work / f"{method}-{seed}-{digest}"), **own}


def _of_weights(arguments: argparse.Namespace) -> Task:
    return {"weights": str(arguments.sampler_weights)}


def _of_ar_net(arguments: argparse.Namespace) -> Task:
    folders = {name: str(arguments.networks / name) for name in trials.NETWORKS["ar-net"]}
    return {**_of_weights(arguments), "features": folders}


def _of_videoiq(arguments: argparse.Namespace) -> Task:
    return {**_of_weights(arguments), "classifier": str(arguments.networks / "any_precision")}


def _of_adafocus(arguments: argparse.Namespace) -> Task:
    size = so.create_classifier(arguments.classifier).preprocessing.size[0]
    return {**_of_weights(arguments), "classifier": str(arguments.classifier), "size": size}


def _of_adafuse(arguments: argparse.Namespace) -> Task:
    return {"classifier": str(arguments.classifier)}


def _of_ada3d(arguments: argparse.Namespace) -> Task:
    return {**_of_weights(arguments), "classifier": str(arguments.networks / "slowonly")}


# What `so.train` is given of the networks, for systems that need more than the features that all share
SOURCES: dict[str, Callable[[argparse.Namespace], Task]] = {
    "ar-net": _of_ar_net,
    "videoiq": _of_videoiq,
    "adafocus": _of_adafocus,
    "adafuse": _of_adafuse,
    "ada3d": _of_ada3d,
}


def is_trained(task: Task) -> bool:
    return (Path(task["out"]) / "result.json").exists()


def train_all(arguments: argparse.Namespace, tasks: dict[str, Task]) -> dict[str, Reply]:
    """Those that are not trained yet; trainings on pictures first, for they take longest."""
    left = {name: task for name, task in tasks.items() if not is_trained(task)}
    pictures = {name: task for name, task in left.items() if task["sampler"] in PICTURES}
    heavy = {name: task for name, task in left.items() if task["sampler"] in trials.HEAVY}
    features = {name: task for name, task in left.items() if name not in pictures and name not in heavy}

    def done(name: str, reply: Reply) -> None:
        print(f"{name}: {reply['seconds']:.0f} s {reply.get('failed', '')}", flush=True)

    with Trainers(arguments.parallel, arguments.work / "logs") as trainers:
        replies = trainers.train(pictures, done)
    # A network's features go into the bank before several trainings read them.
    light = {(task["bank"], str(task["light"])) for task in features.values() if "light" in task}
    for bank, folder in sorted(pair for pair in light if (Path(pair[1]) / "config.json").is_file()):
        so.add_features(bank, so.load_sampler(folder, device=device()))
    with Trainers(arguments.parallel, arguments.work / "logs") as trainers:
        replies |= trainers.train(heavy, done)
    # Small steps of small layers: a GPU waits for the core that feeds it, so each core feeds it.
    parallel = usable_cores() if device() == "cuda" else arguments.parallel
    with Trainers(parallel, arguments.work / "logs") as trainers:
        return replies | trainers.train(features, done)


def trial_task(arguments: argparse.Namespace, results: Results, method: str, settings: Settings) -> Task:
    epochs = trials.trial_epochs(method, arguments.trial_epochs) or arguments.epochs
    return task_of(arguments, results, method, settings, arguments.seeds[0], epochs, arguments.tune_bank)


def final_tasks(arguments: argparse.Namespace, results: Results) -> dict[str, Task]:
    """By policy, as method#seed."""
    chosen = results.needed("chosen", "tune")
    return {
        f"{method}#{seed}": task_of(arguments, results, method, TRIALS[method][chosen[method]], seed, arguments.epochs)
        for method in arguments.methods
        for seed in arguments.seeds
    }


def tune(arguments: argparse.Namespace, results: Results) -> None:
    tasks = {
        f"{method}#{place}": trial_task(arguments, results, method, settings)
        for method in arguments.methods
        for place, settings in enumerate(TRIALS[method][: arguments.trials])
    }
    known: dict[str, dict[str, Any]] = results.data.get("trials", {})
    # What was judged before needs no training again, also on a machine that has not its folders.
    left = {name: task for name, task in tasks.items() if known.get(name, {}).get("run") != Path(task["out"]).name}
    replies = train_all(arguments, left)
    new = {name: task for name, task in left.items() if is_trained(task)}
    policies = named(["uniform"], new)
    rows = measured(arguments, policies, "dev", bank=arguments.tune_bank).pop("rows") if new else []
    for name, task in left.items():
        if name in new:
            known[name] = _scored(name, task, rows, results["metric"])
        else:
            known[name] = {"method": task["sampler"], "dev": None, "failed": replies[name]["failed"]}
        if name in replies:
            known[name]["seconds"] = replies[name]["seconds"]
    results.put(trials=known, **({"budget_gmacs": trials.budget_of(rows)} if rows else {}))
    chosen = {}
    for method in arguments.methods:
        chosen[method] = trials.best_trial([known[f"{method}#{place}"] for place in range(_count(method, arguments))])
    results.put(chosen=results.data.get("chosen", {}) | chosen)
    for method, place in chosen.items():
        result = known[f"{method}#{place}"]
        print(f"{method}: trial {place} {result['settings']} with dev {result['dev']} at {result['at']}", flush=True)


def _count(method: str, arguments: argparse.Namespace) -> int:
    return len(TRIALS[method][: arguments.trials])


def _scored(name: str, task: Task, rows: Sequence[Row], metric: str) -> dict[str, Any]:
    """What a trial is worth on dev."""
    method, _, place = name.partition("#")
    own = [row for row in rows if trials.read_policy(row["policy"])[:2] == (method, place)]
    best = trials.best_within(own, metric, trials.budget_of(rows))
    keys = ("policy", "num_frames", "frames_classified", "frames_decoded", "gmacs", metric)
    return {
        "method": method,
        "settings": TRIALS[method][int(place)],
        "epochs": task.get("epochs"),
        "run": Path(task["out"]).name,
        "dev": None if best is None else best[metric],
        "at": None if best is None else {key: best[key] for key in keys},
        "curve": [{key: row[key] for key in keys} for row in own],
    }


def judged_tasks(arguments: argparse.Namespace, results: Results) -> dict[str, Task]:
    """What the number of frames or the dial is chosen with on dev: the chosen trials, or the trainings themselves.

    What was trained on BANK has seen the pictures of its dev; the trials on --tune-bank have not.
    """
    if arguments.tune_bank is None:
        return final_tasks(arguments, results)
    chosen = results.needed("chosen", "tune")
    return {
        f"{method}#trial": trial_task(arguments, results, method, TRIALS[method][chosen[method]])
        for method in arguments.methods
    }


def train(arguments: argparse.Namespace, results: Results) -> None:
    """All seeds; and the chosen trials again, where the tuning was done elsewhere."""
    replies = train_all(arguments, final_tasks(arguments, results) | judged_tasks(arguments, results))
    _refuse_failures(replies)


def _refuse_failures(replies: dict[str, Reply]) -> None:
    failed = {name: reply["failed"] for name, reply in replies.items() if "failed" in reply}
    if failed:
        raise SystemExit("; ".join(f"{name}: {text}" for name, text in failed.items()))


# ---- measuring


def named(policies: Sequence[str], tasks: dict[str, Task]) -> dict[str, str]:
    """Policies for `so.evaluate`, and trained ones by their folders; systems at all values of their dials."""
    with_dial = [name for name in list_systems() if baseline_class(name).threshold]
    folders = {name: task["out"] + ("@all" if task["sampler"] in with_dial else "") for name, task in tasks.items()}
    return dict(zip(policies, policies, strict=True)) | folders


def choosing(tasks: dict[str, Task]) -> dict[str, str]:
    """Policies of trained methods, and what is compared with each."""
    policies = named([], tasks)
    first = {task["sampler"]: name for name, task in reversed(tasks.items())}
    for name, task in tasks.items():
        if name.startswith("sosampler#"):
            policies |= {f"{name}+{method}": task["out"] for method in trials.METHODS}
            # Without a classifier; with the mean over frames, as other methods that choose frames; without the probe.
            answers = ["answer", "mean", *(["fused"] if _has_probe(Path(task["out"])) else [])]
            policies |= {f"{name}+{answer}": task["out"] for answer in answers}
        # Networks on pixels take minutes for these, so the first training of such a system stands for all.
        if task["sampler"] not in PICTURES and (task["sampler"] not in trials.PIXELS or name == first[task["sampler"]]):
            policies[f"{name}@{trials.UNIFORM}"] = task["out"]
    return policies


def _has_probe(folder: Path) -> bool:
    return "probe" in json.loads((folder / "config.json").read_text(encoding="utf-8"))


def measured(
    arguments: argparse.Namespace,
    policies: dict[str, str],
    split: str,
    *,
    bank: Path | None = None,
    pairs: Sequence[tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """All policies in one pass over a split: rows and facts as plain values."""
    begin = time.perf_counter()
    found = so.evaluate(
        bank or arguments.bank,
        policies,
        pairs=pairs or PAIRS,
        classifier=arguments.classifier,
        split=split,
        device=device(),
        precision=fast_precision(),
    ).to_dict()
    found.pop("bank")  # a path of the machine
    print(f"{len(policies)} policies on {split}: {time.perf_counter() - begin:.0f} s", flush=True)
    return found


def measure_new(
    arguments: argparse.Namespace,
    results: Results,
    split: str,
    tasks: dict[str, Task],
    rules: Sequence[str],
    *,
    bank: Path | None = None,
) -> None:
    """Measure the trainings that were not measured yet; methods of earlier calls keep their rows."""
    known = results.data.get(split, {"runs": {}, "rows": []})
    runs = {name: Path(task["out"]).name for name, task in tasks.items()}
    new = {name: task for name, task in tasks.items() if known["runs"].get(name) != runs[name]}
    if not new and known["rows"]:
        return
    first = not known["rows"]
    policies = named(rules if first else ["uniform"], {}) | choosing(new)  # all are compared with uniform frames
    found = measured(arguments, policies, split, bank=bank)
    if not first:
        found["rows"] = [row for row in found["rows"] if row["policy"] != "uniform"]
    results.put(**{split: _with_rows(known, {**found, "runs": {name: runs[name] for name in new}})})


def _with_rows(known: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The result of a split with the rows of what was found now in place of earlier ones of the same trainings."""
    rows = [row for row in known["rows"] if not any(trials.is_of(row["policy"], name) for name in found["runs"])]
    networks = known.get("systems", {}) | found.get("systems", {})  # which features each system has
    return {**found, "runs": known["runs"] | found["runs"], "systems": networks, "rows": [*rows, *found["rows"]]}


def take(arguments: argparse.Namespace, results: Results) -> None:
    """Take the trials and rows of methods that were measured beside, with the same classifier and the same banks."""
    for path in arguments.take:
        other = Results(path)
        if any(results[key] != other[key] for key in ("asked", "classifier", "videos", "trials_each")):
            raise SystemExit(f"{path}: is not of the same classifier, banks and trials as {results.path}")
        methods = [method for method in arguments.methods if f"{method}#{arguments.seeds[0]}" in other["test"]["runs"]]
        parts: dict[str, Any] = {
            "chosen": results["chosen"] | {method: other["chosen"][method] for method in methods},
            "trials": results["trials"]
            | {name: trial for name, trial in other["trials"].items() if name.partition("#")[0] in methods},
        }
        for split in ("dev", "test"):
            own = {name: run for name, run in other[split]["runs"].items() if name.partition("#")[0] in methods}
            rows = [row for row in other[split]["rows"] if any(trials.is_of(row["policy"], name) for name in own)]
            known = other[split]["systems"].items()
            networks = {row: about for row, about in known if any(trials.is_of(row, name) for name in own)}
            found = {**results[split], "runs": own, "rows": rows, "systems": networks}
            parts[split] = _with_rows(results[split], found)
        # Of the last call of each stage: trainings of a method side by side, among those of other methods.
        seconds = {stage: times[-1] for stage, times in other["seconds"].items() if stage != "features"}
        parts["seconds_of"] = results.data.get("seconds_of", {}) | dict.fromkeys(methods, seconds)
        results.put(**parts)


def evaluate(arguments: argparse.Namespace, results: Results) -> None:
    tasks = final_tasks(arguments, results)
    missing = [name for name, task in tasks.items() if not is_trained(task)]
    if missing:
        raise SystemExit(f"{', '.join(missing)}: not trained yet; run --stage train first")
    judged = judged_tasks(arguments, results)
    rules = [*trials.RULES, *(() if arguments.learned_only else trials.SELECTORS)]
    oracles = () if arguments.learned_only else trials.ORACLES
    measure_new(arguments, results, "dev", judged, rules, bank=arguments.tune_bank)
    measure_new(arguments, results, "test", tasks, [*rules, *oracles])
    tabulate(arguments, results)


def tabulate(arguments: argparse.Namespace, results: Results) -> None:
    """Means over seeds, and the place of each method at the budget."""
    metric = results["metric"]
    dev, test = (trials.means(results[split]["rows"], metric) for split in ("dev", "test"))
    budget = trials.budget_of(dev)
    results.put(budget_gmacs=budget, table=test, at_budget=trials.at_budget(dev, test, metric, budget))
    if arguments.curve is not None:
        try:
            draw_curve(results.data, arguments.curve)
        except MissingDependency as error:
            print(f"no curve: {error}; systems_table.py draws it from {results.path} elsewhere", flush=True)
    for line in results["at_budget"]:
        print(json.dumps({key: line[key] for key in ("policy", "num_frames", "dial", "gmacs", metric)}), flush=True)


# ---- longer videos


def longer_tasks(arguments: argparse.Namespace, results: Results) -> dict[str, Task]:
    """Trainings on the longer videos themselves, by method and N/T; the first seed."""
    found: dict[str, Task] = {}
    for (num_frames, num_candidates), bank in longer_banks(arguments).items():
        if not len(so.Bank(bank).split("train")):
            continue
        for method in longer_methods(arguments):
            settings = TRIALS[method][results.needed("chosen", "tune")[method]]
            settings = longer_settings(method, settings, num_frames, num_candidates)
            task = task_of(arguments, results, method, settings, arguments.seeds[0], arguments.epochs, bank)
            found[f"{method} {num_frames}/{num_candidates}"] = task
    return found


def longer_methods(arguments: argparse.Namespace) -> list[str]:
    return [method for method in LONGER_METHODS if method in arguments.methods]


def train_longer(arguments: argparse.Namespace, results: Results) -> None:
    """Ask the classifier about the longer videos, and train there."""
    if not arguments.longer:
        return
    classifier = so.create_classifier(arguments.classifier, device=device())
    for bank in longer_banks(arguments).values():
        teach(bank, classifier)
    _refuse_failures(train_all(arguments, longer_tasks(arguments, results)))


def longer(arguments: argparse.Namespace, results: Results) -> None:
    """What samplers of ten candidates do with more, and what training with more brings; the first seed."""
    finals, again = final_tasks(arguments, results), longer_tasks(arguments, results)
    methods, seed = longer_methods(arguments), arguments.seeds[0]
    for (num_frames, num_candidates), bank in longer_banks(arguments).items():
        key = f"{num_frames}/{num_candidates}"
        tasks = {f"{method}, T={NUM_CANDIDATES}": finals[f"{method}#{seed}"] for method in methods}
        tasks |= {f"{m}, T={num_candidates}": again[f"{m} {key}"] for m in methods if f"{m} {key}" in again}
        runs = {name: Path(task["out"]).name for name, task in tasks.items()}
        result = results.data.get("longer", {})
        if result.get(key, {}).get("runs") != runs:
            policies = named([*trials.RULES, *trials.ORACLES], tasks)
            found = measured(arguments, policies, "test", bank=bank, pairs=[(num_frames, num_candidates)])
            results.put(longer=result | {key: {"runs": runs, **found}})


def longer_settings(method: str, settings: Settings, num_frames: int, num_candidates: int) -> Settings:
    """The same trial for N of T, with as many frames a step as fit; SGD's rate goes with the batch."""
    others = {name: value for name, value in settings.items() if name != "recipe"}
    recipe = read_recipe(settings.get("recipe", RECIPES[method]), **others)
    batch = max(2, min(recipe.batch_size, FRAMES_A_STEP // num_candidates))
    found: Settings = {**settings, "num_candidates": num_candidates, "batch_size": batch}
    if recipe.optimizer == "sgd":
        found["lr"] = recipe.lr * batch / recipe.batch_size
    if recipe.reinforce:
        found["reinforce"] = {**recipe.reinforce, "num_frames": num_frames}
    return found


def longer_banks(arguments: argparse.Namespace) -> dict[tuple[int, int], Path]:
    """By (N, T)."""
    return dict(_read_longer(text) for text in arguments.longer)


def _read_longer(text: str) -> tuple[tuple[int, int], Path]:
    numbers, _, bank = text.partition("=")
    num_frames, _, num_candidates = numbers.partition("/")
    if not (bank and num_frames.isdigit() and num_candidates.isdigit()):
        raise SystemExit(f"--longer {text}: write N/T=BANK, for example 8/30=bank30")
    return (int(num_frames), int(num_candidates)), Path(bank)


STAGES: dict[str, Callable[[argparse.Namespace, Results], None]] = {
    "features": add_features,
    "tune": tune,
    "train": train,
    "train-longer": train_longer,
    "evaluate": evaluate,
    "longer": longer,
}

if __name__ == "__main__":
    main()
