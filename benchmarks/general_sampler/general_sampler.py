"""The sampler that ships with the package: its data, its training, its settings, and what it is worth.

    python benchmarks/general_sampler/general_sampler.py data PICTURES CLIPS --fonts FONTS --out DATA
    python benchmarks/general_sampler/general_sampler.py train --data DATA --resnet50 ... --mobilenet ... --out RUN \\
        --device cuda --seconds 300
    python benchmarks/general_sampler/general_sampler.py mix RUN --mobilenet ... --share 0.2 --out MIXED
    python benchmarks/general_sampler/general_sampler.py export RUN --out src/sosampler/samplers/general
    python benchmarks/general_sampler/general_sampler.py choose --pictures PICTURES --clips CLIPS --films FILMS \\
        --fonts OTHER_FONTS --classifier CLASSIFIER --actions ACTIONS --streams STREAMS --work WORK
    python benchmarks/general_sampler/general_sampler.py measure (as for choose)

PICTURES is sports22 with train/, test/ and distractors/; CLIPS holds `manifest.csv` as for banks.py; FILMS are a few
videos of any kind; FONTS and OTHER_FONTS hold .ttf files; CLASSIFIER has learned from the first half of the train
pictures. ACTIONS is a manifest of action clips, split by groups, and STREAMS what `sosampler reels ACTIONS --to mp4
--preset streams --classifier-share 0` makes of it. `data` writes one file without labels, so that `train` needs no
decoder. `train` has all of MobileNetV2 learn from ResNet-50, both ImageNet's, until the time is over. `mix` takes its
weights a share of the way back to where they began. `export` writes the shipped folder. `choose` says
what dev makes of the settings by which frames are chosen, and of others around them: they stand in
`sosampler.policies.learned`, and `card` writes them into the card. `measure` is about what
was left out of all of these. PySceneDetect is measured beside the others where `--scenedetect` names a Python that has
it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

from benchmarks.common import RESULTS, Results

TRAINED = "training.json"  # in the folder of a run
FIGURES = RESULTS / "general_sampler.json"


def data(given: argparse.Namespace) -> None:
    from benchmarks.general_sampler import general_data

    given.out.parent.mkdir(parents=True, exist_ok=True)
    fonts = sorted(given.fonts.glob("*.ttf"))
    print(json.dumps(general_data.make(given.pictures, given.clips, fonts, given.out)), flush=True)


def train(given: argparse.Namespace) -> None:
    import torch

    from benchmarks.general_sampler import general_training

    torch.set_num_threads(given.threads)
    found = general_training.train(
        given.data,
        given.resnet50,
        given.mobilenet,
        given.out,
        general_training.settings_from(given.set),
        seconds=given.seconds,
        device=torch.device(given.device),
    )
    print(json.dumps({key: value for key, value in found.items() if key != "log"}), flush=True)


def mix(given: argparse.Namespace) -> None:
    from benchmarks.general_sampler import general_training

    general_training.mix_with_start(given.run, given.mobilenet, given.share, given.out)


def choose(given: argparse.Namespace) -> None:
    from benchmarks.general_sampler import general_choose
    from benchmarks.general_sampler.general_measure import default_places

    found = general_choose.choose(default_places(given))
    Results(given.out).put(choice=found)
    print(json.dumps({"chosen": found["chosen"], "dev": found["dev"]}), flush=True)


def export(given: argparse.Namespace) -> None:
    from benchmarks.general_sampler import general_choose

    results = Results(given.results)
    results.put(training=json.loads((given.run / TRAINED).read_text(encoding="utf-8")))
    print(json.dumps(general_choose.export(given.run, given.out)), flush=True)
    card(given)


def card(given: argparse.Namespace) -> None:
    from benchmarks.general_sampler import general_card

    general_card.write(Results(given.results).data, given.out)


def measure(given: argparse.Namespace) -> None:
    from benchmarks.general_sampler import general_measure

    results = Results(given.out)
    general_measure.measure(general_measure.default_places(given), results.put, given.only)
    results.put(wins_over_uniform=general_measure.wins(results.data))
    print(json.dumps(results["wins_over_uniform"]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = parser.add_subparsers(dest="stage", required=True)
    doing: dict[str, Callable[[argparse.Namespace], None]] = {
        "data": data,
        "train": train,
        "mix": mix,
        "export": export,
        "choose": choose,
        "card": card,
        "measure": measure,
    }
    parts = {name: stages.add_parser(name) for name in doing}

    part = parts["data"]
    part.add_argument("pictures", type=Path)
    part.add_argument("clips", type=Path)
    for name in ("--fonts", "--out"):
        part.add_argument(name, type=Path, required=True)

    part = parts["train"]
    for name in ("--data", "--resnet50", "--mobilenet", "--out"):
        part.add_argument(name, type=Path, required=True)
    part.add_argument("--device", default="cuda")
    part.add_argument("--seconds", type=float, default=300, help="In which all of it ends, from reading to writing.")
    part.add_argument("--threads", type=int, default=2)
    part.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="Other settings of the training.")

    part = parts["mix"]
    for name in ("--mobilenet", "--out"):
        part.add_argument(name, type=Path, required=True)
    part.add_argument("--share", type=float, required=True, help="Of the weights of the start, 0 to 1.")

    for name in ("mix", "export"):
        parts[name].add_argument("run", type=Path)
    for name in ("export", "card"):
        parts[name].add_argument("--out", type=Path, required=True)
        parts[name].add_argument("--results", type=Path, default=FIGURES)
    for name in ("choose", "measure"):
        for option in ("pictures", "clips", "films", "fonts", "classifier", "actions", "streams", "work"):
            parts[name].add_argument(f"--{option}", type=Path, required=True)
        parts[name].add_argument("--scenedetect", type=Path, default=None, help="A Python that has PySceneDetect.")
        parts[name].add_argument("--out", type=Path, default=FIGURES)
    parts["measure"].add_argument("--only", nargs="*", default=[], help="Some of the sets, by name.")

    given = parser.parse_args()
    begin = time.perf_counter()
    doing[given.stage](given)
    print(f"{given.stage}: {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
