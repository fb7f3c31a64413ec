"""Labels, banks, trained weights, rows of an evaluation and the JSON of every command, with tiny seeded networks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sosampler as so
from golden import check, encode, key_paths, scenes, sha256, sosampler

CLASSES = ["jump", "run"]
TINY = "timm:test_resnet"
TRAINING: dict[str, Any] = {"epochs": 1, "batch_size": 4, "device": "cpu", "seed": 0}
SAMPLER: dict[str, Any] = {**TRAINING, "backbone": TINY, "input_size": 32, "num_candidates": 4, "workers": 1}


def tiny_classifier(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    classifier = so.create_classifier(TINY, class_names=CLASSES, input_size=32, device="cpu")
    with torch.no_grad():  # fresh weights hardly tell one frame from another
        [weight for weight in classifier.net.parameters() if weight.ndim == 2][-1].mul_(30)
    return classifier


def tiny_sampler(seed: int = 1) -> so.SOSampler:
    torch.manual_seed(seed)
    return so.SOSampler(backbone=TINY, input_size=32).eval()


def weights_of(network: torch.nn.Module) -> dict[str, list[float]]:
    """Sum and sum of magnitudes of each tensor."""
    return {
        name: [round(float(tensor.double().sum()), 6), round(float(tensor.double().abs().sum()), 6)]
        for name, tensor in network.state_dict().items()
    }


def check_weights(name: str, network: torch.nn.Module) -> None:
    """Magnitudes within 1e-3; sums, which cancel, within 1e-3 of the magnitude."""
    weights = weights_of(network)
    check(f"{name}-magnitudes", {key: magnitude for key, (_, magnitude) in weights.items()}, rel=1e-3, abs_tol=1e-5)
    check(
        f"{name}-sums",
        {key: total / max(magnitude, 1e-6) for key, (total, magnitude) in weights.items()},
        abs_tol=1e-3,
    )


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten clips without loss and their manifest."""
    folder = tmp_path_factory.mktemp("videos")
    lines = ["path,label,split"]
    for number in range(10):
        encode(folder / f"{number}.mp4", scenes(12 + number % 3, 40, 36, every=2, seed=number))
        lines.append(f"{number}.mp4,{CLASSES[number % 2]},{'train' if number < 6 else 'dev'}")
    (folder / "manifest.csv").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def classifier(work: Path) -> Path:
    return so.save_classifier(tiny_classifier(), work / "classifier")


@pytest.fixture(scope="module")
def bank(videos: Path, work: Path) -> so.Bank:
    options: dict[str, Any] = {"num_candidates": 10, "size": 36, "videos_per_shard": 6, "workers": 0, "device": "cpu"}
    made = so.prepare(videos / "manifest.csv", tiny_classifier(), work / "bank", **options)
    return so.add_features(made, tiny_classifier(), device="cpu")


@pytest.fixture(scope="module")
def trained(bank: so.Bank, work: Path) -> Any:
    return so.train(bank, out=work / "sampler", **SAMPLER)


# ---- labels


@pytest.mark.parametrize("chooser", ["uniform", "sampler"])
def test_pipeline(videos: Path, chooser: str) -> None:
    sampler = tiny_sampler() if chooser == "sampler" else "uniform"
    pipeline = so.Pipeline(
        sampler, tiny_classifier(), num_frames=3, num_candidates=6, device="cpu", precision="float32", workers=1
    )
    paths = [videos / f"{number}.mp4" for number in range(4)]
    single, several = pipeline(paths[0]), pipeline(paths)
    check(
        f"pipeline-{chooser}",
        [
            {
                "label": prediction.label,
                "probabilities": np.asarray(prediction.probabilities, dtype=np.float64),
                "top": [[name, float(share)] for name, share in prediction.top],
                "frames": prediction.selection.frame_indices,
                "scores": None if prediction.selection.scores is None else prediction.selection.scores.tolist(),
            }
            for prediction in (single, *several)
        ],
        abs_tol=2e-4,
    )


# ---- banks


def test_bank_bytes(bank: so.Bank) -> None:
    """Frames exactly; what a network computed differs in its last digits between processors."""
    folder = Path(bank.path)
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        exact = path.is_file() and (name.startswith("frames/") or name in ("items.jsonl", "failed.jsonl"))
        found[name] = sha256(path.read_bytes()) if exact else ""
    check("bank-files", sorted(path for path in found if not path.startswith(("teachers/", "features/"))))
    check("bank-bytes", {name: digest for name, digest in found.items() if digest})
    check("bank-header", sorted(key_paths(json.loads((folder / "bank.json").read_text()))))


def test_bank_contents(bank: so.Bank, videos: Path) -> None:
    opened = so.Bank(bank.path)
    teacher = opened.teacher()
    answers = [teacher[place] for place in range(len(opened))]
    check(
        "bank-contents",
        {
            "ids": list(opened.ids),
            "classes": list(opened.classes),
            "labels": [list(item.labels) for item in opened.items],
            "splits": [item.split for item in opened.items],
            "dev": list(opened.split("dev").ids),
            "multi_label": opened.multi_label,
            "frames": [list(np.shape(opened[place].frames())) for place in range(len(opened))],
            "numbers": [opened[place].frame_indices for place in range(len(opened))],
            "seconds": [np.asarray(opened[place].pts_seconds, dtype=np.float64) for place in range(len(opened))],
            "probabilities": [np.asarray(answer.frame_probs, dtype=np.float64) for answer in answers],
        },
        abs_tol=2e-3,
    )


# ---- training


def test_trained_sampler(trained: Any) -> None:
    check_weights("sampler", trained.sampler)
    check("sampler-result", sorted(key_paths(trained.result)))
    check("sampler-run", sorted(path.name for path in trained.folder.iterdir() if not path.name.startswith(".")))


def test_trained_classifier(bank: so.Bank, work: Path) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"input_size": 32, "num_frames": 2, "workers": 0, **TRAINING}
    made = so.train_classifier(bank, TINY, out=work / "trained-classifier", **options)
    check_weights("classifier", made.classifier.net)
    check("classifier-result", sorted(key_paths(made.result)))


def test_trained_frameexit(bank: so.Bank, work: Path) -> None:
    # AdamW would blow up rounding errors: the biases before batch normalisation have no gradient but those.
    options: dict[str, Any] = {**TRAINING, "optimizer": "sgd", "lr": 0.05}
    made = so.train(bank, out=work / "frameexit", sampler="frameexit", **options)
    check_weights("frameexit", made.system)
    check("frameexit-result", sorted(key_paths(made.result)))


# ---- evaluation


def test_evaluation(bank: so.Bank, trained: Any) -> None:
    policies = ["uniform", "random", "semi-optimal", "optimal", "frame-difference", "semi-optimal+mmr", trained.folder]
    rows = so.evaluate(
        bank, [str(policy) for policy in policies], num_frames=[2, 3], num_candidates=5, bootstrap=20, device="cpu"
    ).rows
    found = {}
    for row in rows:
        values = row.to_dict()
        name = Path(str(values["policy"])).name
        found[f"{name} {values['num_frames']}"] = {
            "keys": sorted(key_paths(values)),
            **{key: values[key] for key in ("top1", "mAP", "fidelity", "confidence") if key in values},
        }
    check("evaluation", found, abs_tol=5e-4)


# ---- commands


def test_json_of_commands(bank: so.Bank, trained: Any, classifier: Path, videos: Path, work: Path) -> None:
    clip, made = videos / "0.mp4", work / "commands"
    tiny = ["--set", f"backbone={TINY}", "--set", "input_size=32", "--set", "shift=0", "--device", "cpu"]
    commands: dict[str, list[Any]] = {
        "select": [clip, "-n", 2, "--policy", "frame-difference"],
        "select sampler": [clip, "-n", 2, "--policy", trained.folder],
        "select many": [clip, videos / "1.mp4", "-n", 2],
        "classify": [clip, "-c", classifier, "-n", 2],
        "classify many": [clip, videos / "1.mp4", "-c", classifier, "-s", trained.folder, "-n", 2],
        "prepare": [videos / "manifest.csv", "--out", made / "bank", "-c", classifier, "-t", 4, "--workers", 0],
        "bank info": [bank.path],
        "train": [bank.path, "--out", made / "run", "--epochs", 1, "--batch-size", 4, *tiny],
        "train frameexit": [bank.path, "--out", made / "exit", "--sampler", "frameexit", "--epochs", 1],
        "evaluate": [bank.path, "--policies", "uniform,optimal", "-n", 2, "-t", 5, "--bootstrap", 10],
        "independence": [clip, videos / "1.mp4", "-c", classifier, "--rates", "1,2,5"],
        "datasets": [],
        "reels": [
            "procedural", "--out", made / "reels", "--count-train", 2, "--count-dev", 1, "--count-test", 1,
            "--classes", 2, "--size", 32, "--workers", 1,
        ],
        "reproduce": [
            "figureII", "--bank", f"own={bank.path}", "--out", made / "paper", "--seeds", "0", "--epochs", 1,
            "--bootstrap", 10, "--set", "batch_size=4", *tiny,
        ],
    }  # fmt: skip
    verbs = {"select sampler": "select", "select many": "select", "classify many": "classify"}
    found = {}
    for name, arguments in commands.items():
        verb = verbs.get(name, name.removesuffix(" frameexit")).split()
        keys = set()
        for line in _objects(sosampler(*verb, *arguments, "--json")):
            keys |= {path.replace(str(work), "").replace(str(videos), "") for path in key_paths(line)}
        found[name] = sorted(keys)
    check("commands", found)


def _objects(text: str) -> list[Any]:
    """One JSON value, or one on each line."""
    try:
        return [json.loads(text)]
    except ValueError:
        return [json.loads(line) for line in text.splitlines()]
