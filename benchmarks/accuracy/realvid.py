"""The bank and the classifier of one set of real clips, made where videos can be decoded; measuring needs no decoder.

    python benchmarks/accuracy/realvid.py CLIPS --set yoga --classifier-weights RESNET50 --work WORK

The sets are yoga (which pose), airtlab (what people do, several labels a clip) and golfdb (from where a swing is seen).

CLIPS holds `manifest.csv` as for banks.py. What lies in WORK afterwards:

- `bank`: 16 frames of each clip, evenly spread. A fifth of the clips is dev and two fifths are test, whole groups
  (one scene is never on both sides), by `make_splits` with seed 0. Where clips have several labels, those of fewer than
  25 clips are left out, and so are clips without any other. The classifier's answers about all frames are kept.
- `classifier`: a ResNet-50 with the given weights as it is; only its class layer is new. That is a logistic regression
  on clips of 1, 2, 4, 8 and 16 frames of the train split. Its decay is chosen by five-fold cross-validation there,
  again by whole groups, by the likelihood: what samplers learn from are probabilities, and a head that knows its train
  clips by heart would be sure of every frame.
- `head.safetensors`: that layer alone. With it, `--rebuild` makes `classifier` again from the bank and RESNET50, where
  50 MB are too much to carry about.
- `facts.json`: sizes, the decay, and how good all frames are on dev and test.
- `events.json`, where clips have them: in which frames of the original something happens, for golf_events.py.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save
from torch import Tensor

import sosampler as so
from sosampler._util.environment import circumstances
from sosampler._util.files import replacing
from sosampler.classifiers.base import class_layer
from sosampler.classifiers.factory import saved_folder
from sosampler.datasets.manifest import Item
from sosampler.training.sampler_data import bank_labels

LEAST_CLIPS = 25  # of a label, where clips have several
DEV_SHARE, TEST_SHARE = 0.2, 0.4
NUM_FRAMES = 16
QUALITY = {"yoga": 75, "airtlab": 65, "golfdb": 90}  # of the JPEGs, so that a bank can be carried about
EVENTS, EVENTS_COLUMN = "events.json", "source_events_at_native_fps"
TRUNK = "trunk"  # features that the head is trained on; they are not needed later
HEAD = "head.safetensors"
CLIP_LENGTHS = (1, 2, 4, 8, 16)
CLIPS_A_VIDEO = 20
FOLDS = 5
DECAYS = tuple(10.0 ** (exponent / 2) for exponent in range(-8, 3))


class Clips(NamedTuple):
    """What the head is trained on."""

    features: Tensor  # [V, K, D], means over the frames of K clips of each video
    labels: Tensor  # [V, C] multi-hot


def rows_of(clips: Path, name: str) -> list[dict[str, str]]:
    """What the manifest says of one set."""
    with (clips / "manifest.csv").open(newline="", encoding="utf-8") as lines:
        rows = [row for row in csv.DictReader(lines) if row["set"] == name]
    if not rows:
        raise SystemExit(f"{clips / 'manifest.csv'}: has no set {name!r}")
    return rows


def events_of(clips: Path, name: str) -> dict[str, Any] | None:
    """Frames of the original in which something happens, by clip, and how many of them one frame of a clip stands for.

    Clips keep every so manieth frame of the original, the first among them; the last event is its last frame.
    """
    rows = [row for row in rows_of(clips, name) if row[EVENTS_COLUMN]]
    if not rows:
        return None
    events = {row["path"]: [int(number) for number in row[EVENTS_COLUMN].split()] for row in rows}
    steps = {math.ceil((events[row["path"]][-1] + 1) / int(row["n_frames"])) for row in rows}
    if len(steps) != 1:
        raise SystemExit(f"{name}: clips keep every {sorted(steps)}th frame of their originals, not all the same")
    return {"native_frames_a_frame": steps.pop(), "events": events}


def manifest_of(clips: Path, name: str) -> so.Manifest:
    """One set, split by groups."""
    rows = rows_of(clips, name)
    several = any("|" in row["label"] for row in rows)
    counts = Counter(label for row in rows for label in row["label"].split("|"))
    classes = tuple(sorted(label for label, count in counts.items() if count >= LEAST_CLIPS or not several))
    labels = [{classes.index(label) for label in row["label"].split("|") if label in classes} for row in rows]
    items = tuple(
        Item(row["path"], row["path"], tuple(sorted(found)), "", row["group"])
        for row, found in zip(rows, labels, strict=True)
        if found
    )
    manifest = so.Manifest(items, classes, several, clips)
    return so.make_splits(manifest, dev_share=DEV_SHARE, test_share=TEST_SHARE, seed=0)


def trunk_of(bank: so.Bank, weights: Path) -> Any:
    """The classifier with a class layer that is still 0; always the same for the same weights."""
    trunk = so.create_classifier(
        "resnet50_v1", class_names=bank.classes, weights=weights, new_head=True, multi_label=bank.multi_label
    )
    with torch.no_grad():
        for weight in class_layer(trunk).parameters():
            weight.zero_()
    return trunk


def training_clips(bank: so.Bank) -> tuple[Clips, np.ndarray]:
    """Clips of the train split, and the fold of each video."""
    part = bank.split("train")
    kept = part.features(TRUNK)
    draw = np.random.default_rng(0)
    videos = []
    for place in range(len(part)):
        frames = torch.from_numpy(np.array(kept[place], dtype=np.float32))  # [T, D]
        lengths = [min(CLIP_LENGTHS[clip % len(CLIP_LENGTHS)], len(frames)) for clip in range(CLIPS_A_VIDEO)]
        chosen = [draw.choice(len(frames), length, replace=False) for length in lengths]
        videos.append(torch.stack([frames[clip].mean(0) for clip in chosen]))
    labels = bank_labels(part, range(len(part)))
    groups = sorted({item.group_key for item in part.items})
    fold_of = dict(zip(groups, draw.permutation(len(groups)) % FOLDS, strict=True))
    return Clips(torch.stack(videos), labels), np.array([fold_of[item.group_key] for item in part.items])


def loss_of(scores: Tensor, labels: Tensor, multi_label: bool) -> Tensor:
    """Mean over clips; scores [V, K, C], labels [V, C]."""
    targets = labels[:, None].expand_as(scores)
    if multi_label:
        return F.binary_cross_entropy_with_logits(scores, targets)
    return -(scores.log_softmax(-1) * targets / targets.sum(-1, keepdim=True)).sum(-1).mean()


def fit_head(clips: Clips, decay: float, *, multi_label: bool) -> tuple[Tensor, Tensor]:
    """Weight [C, D] and bias [C] of least loss with `decay` / 2 · |weight|² in features of unit scale."""
    flat = clips.features.flatten(0, 1)
    centre, scale = flat.mean(0), flat.std()
    features = (clips.features - centre) / scale
    weight = torch.zeros(clips.labels.shape[1], flat.shape[1], device=flat.device, requires_grad=True)
    bias = torch.zeros(clips.labels.shape[1], device=flat.device, requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        solver.zero_grad()
        loss = loss_of(features @ weight.T + bias, clips.labels, multi_label) + decay / 2 * weight.square().sum()
        loss.backward()
        return loss

    solver.step(closure)
    with torch.no_grad():
        found = weight / scale
        return found, bias - found @ centre


def choose_decay(clips: Clips, folds: np.ndarray, *, multi_label: bool) -> dict[float, float]:
    """Loss on the folds left out, by decay."""
    found = dict.fromkeys(DECAYS, 0.0)
    for fold in range(FOLDS):
        out = torch.from_numpy(folds == fold).to(clips.labels.device)
        train, left = (Clips(clips.features[rows], clips.labels[rows]) for rows in (~out, out))
        for decay in DECAYS:
            weight, bias = fit_head(train, decay, multi_label=multi_label)
            loss = loss_of(left.features @ weight.T + bias, left.labels, multi_label)
            found[decay] += float(loss) * int(out.sum()) / len(out)
    return found


def make_classifier(bank: so.Bank, weights: Path, folder: Path) -> dict[str, Any]:
    """Train the class layer on the features of the network below, and save the classifier."""
    trunk = trunk_of(bank, weights)
    so.add_features(bank, trunk.to(device()), name=TRUNK)
    clips, folds = training_clips(so.Bank(bank.path))
    clips = Clips(clips.features.to(device()), clips.labels.to(device()))
    losses = choose_decay(clips, folds, multi_label=bank.multi_label)
    decay = min(losses, key=lambda one: (losses[one], -one))
    weight, bias = fit_head(clips, decay, multi_label=bank.multi_label)
    with replacing(folder.parent / HEAD) as temporary:
        temporary.write_bytes(save({"weight": weight.contiguous().cpu(), "bias": bias.cpu()}))
    rebuild(bank, weights, folder)
    return {"decay": decay, "left_out_loss": {f"{one:.2g}": round(loss, 4) for one, loss in losses.items()}}


def rebuild(bank: so.Bank, weights: Path, folder: Path) -> None:
    """Save the classifier: the given weights with the class layer that lies beside the folder."""
    classifier = trunk_of(bank, weights)
    class_layer(classifier).load_state_dict(load_file(folder.parent / HEAD))
    so.save_classifier(classifier, folder, state=halved(classifier.net.state_dict()))


def halved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors that half precision holds without a loss, as those of weights that came in it: half as much to carry."""
    halves = {key: tensor.half() if tensor.is_floating_point() else tensor for key, tensor in state.items()}
    return {
        key: half if torch.equal(half.to(state[key].dtype), state[key]) else state[key] for key, half in halves.items()
    }


def accuracy(bank: Path, classifier: Any) -> dict[str, Any]:
    """Of all stored frames and of some, on dev and test."""
    found = {}
    for split in ("dev", "test"):
        shown = so.evaluate(
            bank,
            ("uniform", "all", "semi-optimal"),
            pairs=[(1, NUM_FRAMES), (6, NUM_FRAMES)],
            classifier=classifier,
            split=split,
            device="cpu",
        )
        found[split] = {
            f"{row.policy} {row.num_frames}": round(getattr(row, shown.metric), 4)
            for row in sorted(shown.rows, key=lambda row: row.policy)
        } | {"metric": shown.metric, "videos": shown.facts["num_videos"]}
    return found


def size_mb(folder: Path) -> float:
    return round(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6, 1)


def finish(name: str, bank: so.Bank, weights: Path, work: Path, done: Callable[[str], None]) -> dict[str, Any]:
    """Everything but the bank itself: the class layer, the classifier, its answers, facts.json."""
    folder, facts = work / "classifier", work / "facts.json"
    head: dict[str, Any] = json.loads(facts.read_text(encoding="utf-8"))["head"] if facts.exists() else {}
    if not head or not (work / HEAD).exists():
        head = make_classifier(bank, weights, folder)
        facts.write_text(json.dumps({"head": head}) + "\n", encoding="utf-8")
        done(f"class layer: {head}")
    if saved_folder(folder) is None:
        rebuild(bank, weights, folder)
    classifier = so.create_classifier(folder, device=device())
    so.add_teacher(bank, classifier)
    shutil.rmtree(bank.path / "features" / TRUNK, ignore_errors=True)
    result = {
        "what": f"bank and classifier of {name}",
        **circumstances(("av", "torch", "timm", "numpy")),
        "sizes": dict(Counter(item.split for item in bank.items)),
        "classes": list(bank.classes),
        "bank_mb": size_mb(bank.path),
        "head": head,
        "fingerprint": classifier.fingerprint(),
        "accuracy": accuracy(bank.path, classifier),
    }
    facts.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clips", type=Path)
    parser.add_argument("--set", dest="name", choices=sorted(QUALITY), required=True)
    parser.add_argument("--classifier-weights", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rebuild", action="store_true", help="Make the classifier again from what lies in WORK.")
    parser.add_argument("--finish", action="store_true", help="The bank is there; make the rest, without a decoder.")
    arguments = parser.parse_args()
    begin = time.perf_counter()

    def done(what: str) -> None:
        print(f"{what}, after {math.ceil(time.perf_counter() - begin)} s", flush=True)

    if arguments.rebuild:
        rebuild(so.Bank(arguments.work / "bank"), arguments.classifier_weights, arguments.work / "classifier")
        return
    if arguments.finish:
        bank = so.Bank(arguments.work / "bank")
    else:
        bank = so.prepare(
            manifest_of(arguments.clips, arguments.name),
            out=arguments.work / "bank",
            num_candidates=NUM_FRAMES,
            quality=QUALITY[arguments.name],
        )
        done(f"{len(bank)} clips, {len(bank.failures)} unreadable, {size_mb(bank.path)} MB")
        events = events_of(arguments.clips, arguments.name)
        if events is not None:
            (arguments.work / EVENTS).write_text(json.dumps(events) + "\n", encoding="utf-8")
    result = finish(arguments.name, bank, arguments.classifier_weights, arguments.work, done)
    print(json.dumps({key: result[key] for key in ("sizes", "bank_mb", "accuracy")}, indent=1))
    done("finished")


if __name__ == "__main__":
    main()
