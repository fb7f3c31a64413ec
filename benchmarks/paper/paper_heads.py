"""FrameExit's head on a network that stays as it is: features of all frames once, then epochs of seconds.

Clips of six frames are drawn anew in every epoch. AdamW with a rate of 1e-3 for 15 epochs was the best on dev of six
ways (SGD at 0.01 and 0.1, AdamW; 6 and 15 epochs). The epoch that is best on dev is kept.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import sosampler as so
from sosampler._util.files import replacing
from sosampler.training.optim import warmup_cosine
from sosampler.training.train_classifier import starting_network

CLIP_FRAMES = 6  # as the other classifiers of paper_classifiers.py learn from
BATCH = 64
RESULT = "result.json"


def train_head(
    bank: Path, kind: Any, weights: Path | None, out: Path, *, epochs: int, lr: float = 1e-3, seed: int = 0
) -> dict[str, Any]:
    """A classifier of a pooled kind into `out`, or find that it was done; returns what its result.json says."""
    if (out / RESULT).is_file():
        found: dict[str, Any] = json.loads((out / RESULT).read_text(encoding="utf-8"))
        return found
    reels = so.Bank(bank)
    torch.manual_seed(seed)
    network = starting_network(
        kind.registered,
        reels.classes,
        multi_label=False,
        weights=weights,
        input_size=kind.input_size,
        options=kind.options,
    )
    network.to("cuda" if torch.cuda.is_available() else "cpu")
    parts = _kept_features(network, reels, out.with_name(f"{out.name}-features.safetensors"))
    for layer in (network.net.neck, network.net.fc):
        layer.requires_grad_(True)  # classifiers come frozen
    best, state = _fit(network.net.neck, network.net.fc, parts, epochs, lr)
    network.net.neck.load_state_dict(state["neck"])
    network.net.fc.load_state_dict(state["fc"])
    so.save_classifier(network, out)
    sizes = {split: len(labels) for split, (_, labels) in parts.items()}
    result = {"metric": "top1", **best, "epochs": epochs, "trained": "the head, on features", "sizes": sizes}
    result |= {"num_classes": network.num_classes, "fingerprint": network.fingerprint()}
    (out / RESULT).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return result


def _kept_features(network: Any, reels: so.Bank, file: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """By split; what takes minutes without a GPU is kept for who was killed."""
    if not file.is_file():
        result = {}
        for split in ("train", "dev"):
            result[split], result[f"{split}_labels"] = (part.cpu() for part in _features(network, reels.split(split)))
        with replacing(file) as temporary:
            save_file(result, temporary)
    result = load_file(file, device=str(network.device))
    return {split: (result[split], result[f"{split}_labels"]) for split in ("train", "dev")}


@torch.no_grad()
def _features(network: Any, items: Any) -> tuple[Tensor, Tensor]:
    """What the head sees of each frame [V, T, D], and labels [V]."""
    network.eval()
    rows = []
    for item in items:
        frames = torch.from_numpy(np.ascontiguousarray(item.frames())).movedim(-1, -3)[:, None]  # [T, 1, 3, H, W]
        clips = network._preprocess(frames.to(network.device))
        rows.append(network.net.backbone(clips.flatten(0, 1)).float())
    return torch.stack(rows), torch.tensor([item.labels[0] for item in items], device=rows[0].device)


def _fit(
    neck: nn.Module, fc: nn.Module, parts: dict[str, tuple[Tensor, Tensor]], epochs: int, lr: float
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The best epoch by dev and its weights."""
    features, labels = parts["train"]
    optimizer = torch.optim.AdamW([*neck.parameters(), *fc.parameters()], lr, weight_decay=0.05)
    steps, step = epochs * (len(features) // BATCH), 0
    best: dict[str, Any] = {"dev": -1.0}
    state: dict[str, Any] = {}
    for epoch in range(epochs):
        neck.train()
        for places in torch.randperm(len(features), device=features.device).split(BATCH):
            if len(places) < BATCH:
                continue
            for group in optimizer.param_groups:
                group["lr"] = lr * warmup_cosine(step, steps, 0.05)
            drawn = torch.rand(len(places), features.shape[1], device=features.device).argsort(1)[:, :CLIP_FRAMES]
            logits = _logits(neck, fc, features[places[:, None], drawn])
            optimizer.zero_grad()
            F.cross_entropy(logits, labels[places], label_smoothing=0.1).backward()
            optimizer.step()
            step += 1
        found = _dev_top1(neck, fc, *parts["dev"])
        if found > best["dev"]:
            best = {"dev": round(found, 6), "best_epoch": epoch}
            state = {"neck": copy.deepcopy(neck.state_dict()), "fc": copy.deepcopy(fc.state_dict())}
    return best, state


def _logits(neck: nn.Module, fc: nn.Module, features: Tensor) -> Tensor:
    """Features [B, N, D] of frames -> logits [B, C]: the maximum over frames, as `FrameExitClassifier` has it."""
    seen = neck(features.flatten(0, 1)).unflatten(0, features.shape[:2])
    logits: Tensor = fc(seen.amax(1))
    return logits


@torch.no_grad()
def _dev_top1(neck: nn.Module, fc: nn.Module, features: Tensor, labels: Tensor) -> float:
    """On clips of evenly spread frames."""
    neck.eval()
    places = torch.linspace(0, features.shape[1] - 1, CLIP_FRAMES, device=features.device).round().long()
    right = _logits(neck, fc, features[:, places]).argmax(1) == labels
    return float(right.double().mean())
