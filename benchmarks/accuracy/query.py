"""Queries on drawn videos, where the right frames are known: chosen frames that show what was asked for.

No weights of a real image-text model are used. A small one is trained here on drawn shapes, in seconds on a CPU, and
exported to ONNX. The figures show that the way from a text to the frames works; they say nothing about real videos.

python benchmarks/accuracy/query.py --out benchmarks/results/query.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper
from PIL import Image, ImageDraw
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))  # the root of the repository, for the imports below

import sosampler as so
from benchmarks.common import RESULTS, write_result
from sosampler._util.environment import circumstances
from sosampler.video.synthetic import encode_video

COLOURS = {"red": (214, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (240, 200, 30)}
SHAPES = ("circle", "square", "triangle", "cross")
CONCEPTS = tuple(product(COLOURS, SHAPES))
WORDS = ("[PAD]", "[UNK]", "a", *COLOURS, *SHAPES)
SIZE, CONTEXT, DIM = 32, 8, 24
_FPS = 5


# ---- pictures and videos


def draw(rng: np.random.Generator, concept: tuple[str, str] | None, side: int = SIZE) -> np.ndarray:
    """Return an image [side, side, 3] with one shape, or none, somewhere on a soft background."""
    noise = rng.integers(60, 190, (4, 4, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC)
    if concept is not None:
        colour, shape = concept
        radius = side * rng.uniform(0.28, 0.38)
        x, y = rng.uniform(radius, side - radius, 2)
        pen, box = ImageDraw.Draw(image), (x - radius, y - radius, x + radius, y + radius)
        fill = tuple(int(np.clip(value + rng.integers(-20, 20), 0, 255)) for value in COLOURS[colour])
        if shape == "circle":
            pen.ellipse(box, fill=fill)
        elif shape == "square":
            pen.rectangle(box, fill=fill)
        elif shape == "triangle":
            pen.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=fill)
        else:
            arm = radius / 3
            pen.rectangle((x - arm, y - radius, x + arm, y + radius), fill=fill)
            pen.rectangle((x - radius, y - arm, x + radius, y + arm), fill=fill)
    return np.asarray(image)


def draw_video(path: Path, concepts: Sequence[tuple[str, str] | None], seed: int, side: int = 128) -> None:
    """Write a video that shows each of the concepts for one second."""
    rng = np.random.default_rng(seed)
    pictures = [draw(rng, concept, side) for concept in concepts]
    encode_video((picture for picture in pictures for _ in range(_FPS)), path, fps=_FPS)


def text_of(concept: tuple[str, str]) -> str:
    return f"a {concept[0]} {concept[1]}"


# ---- the model


class Vision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 24), (24, 48), (48, 64)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(64, DIM)

    def forward(self, pixel_values: Tensor) -> Tensor:
        """[B, 3, 32, 32] -> [B, D]"""
        return self.head(self.net(pixel_values).amax((2, 3)))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), 48)
        self.head = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, DIM))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[B, L] twice -> [B, D]"""
        mask = attention_mask.unsqueeze(-1).float()
        return self.head((self.words(input_ids) * mask).sum(1) / mask.sum(1))


def train_model(folder: Path, *, steps: int = 150, seed: int = 0) -> Path:
    """Train both encoders by CLIP's loss, and write them as a folder of ONNX files."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    vision, language = Vision(), Language()
    scale = nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.AdamW([*vision.parameters(), *language.parameters(), scale], lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=steps)
    tokens = torch.tensor([[WORDS.index(word) for word in text_of(concept).split()] for concept in CONCEPTS])
    mask = torch.ones_like(tokens)
    for _ in range(steps):
        # All concepts once, and images without any, which belong to no text.
        images = np.stack([draw(rng, concept) for concept in (*CONCEPTS, *[None] * 8)])
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1
        logits = scale.exp() * F.normalize(language(tokens, mask)) @ F.normalize(vision(pixels)).T
        target = torch.arange(len(CONCEPTS))
        loss = F.cross_entropy(logits, target) + F.cross_entropy(logits[:, : len(CONCEPTS)].T, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    folder.mkdir(parents=True, exist_ok=True)
    onnx.save(_vision_graph(vision), folder / "vision_model.onnx")
    onnx.save(_language_graph(language), folder / "text_model.onnx")
    config = {"size": SIZE, "mean": [0.5] * 3, "std": [0.5] * 3, "context_length": CONTEXT}
    config |= {"logit_scale": scale.exp().item(), "resize": "crop", "pad_id": 0}
    (folder / "image_text.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    return folder


def _vision_graph(net: Vision) -> onnx.ModelProto:
    """By hand: torch's exporter takes longer than the training."""
    nodes, last = [], "pixel_values"
    for number, layer in enumerate(net.net):
        out = f"x{number}"
        if isinstance(layer, nn.Conv2d):
            names = [last, f"net.{number}.weight", f"net.{number}.bias"]
            nodes.append(helper.make_node("Conv", names, [out], strides=list(layer.stride), pads=[1, 1, 1, 1]))
        else:
            nodes.append(helper.make_node("Relu", [last], [out]))
        last = out
    nodes.append(helper.make_node("GlobalMaxPool", [last], ["pooled"]))
    nodes.append(helper.make_node("Flatten", ["pooled"], ["flat"]))
    nodes.append(helper.make_node("Gemm", ["flat", "head.weight", "head.bias"], ["image_embeds"], transB=1))
    pixels = helper.make_tensor_value_info("pixel_values", TensorProto.FLOAT, ["images", 3, SIZE, SIZE])
    return _model(
        nodes, [pixels], helper.make_tensor_value_info("image_embeds", TensorProto.FLOAT, ["images", DIM]), net
    )


def _language_graph(net: Language) -> onnx.ModelProto:
    nodes = [
        helper.make_node("Gather", ["words.weight", "input_ids"], ["vectors"]),
        helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["mask", "two"], ["column"]),
        helper.make_node("Mul", ["vectors", "column"], ["real"]),
        helper.make_node("ReduceSum", ["real", "one"], ["total"], keepdims=0),
        helper.make_node("ReduceSum", ["mask", "one"], ["count"], keepdims=1),
        helper.make_node("Div", ["total", "count"], ["mean"]),
        helper.make_node("Gemm", ["mean", "head.0.weight", "head.0.bias"], ["hidden"], transB=1),
        helper.make_node("Relu", ["hidden"], ["active"]),
        helper.make_node("Gemm", ["active", "head.2.weight", "head.2.bias"], ["text_embeds"], transB=1),
    ]
    names = ("input_ids", "attention_mask")
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ["texts", CONTEXT]) for name in names]
    return _model(nodes, inputs, helper.make_tensor_value_info("text_embeds", TensorProto.FLOAT, ["texts", DIM]), net)


def _model(nodes: list[Any], inputs: list[Any], output: Any, net: nn.Module) -> onnx.ModelProto:
    weights = [numpy_helper.from_array(value.numpy(), name) for name, value in net.state_dict().items()]
    weights += [numpy_helper.from_array(np.array([axis]), name) for name, axis in (("one", 1), ("two", 2))]
    graph = helper.make_graph(nodes, "encoder", inputs, [output], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


# ---- the measurement


def make_case(rng: np.random.Generator, path: Path, seconds: int = 60, moment: int = 3) -> tuple[tuple[str, str], int]:
    """Write a video with one moment of a few seconds, and return what it shows then and when that begins."""
    wanted, *others = (CONCEPTS[number] for number in rng.permutation(len(CONCEPTS)))
    concepts: list[tuple[str, str] | None] = [None, *others]
    shown = [concepts[number] for number in rng.integers(0, len(concepts), seconds)]
    begin = int(rng.integers(0, seconds - moment + 1))
    shown[begin : begin + moment] = [wanted] * moment
    draw_video(path, shown, int(rng.integers(1 << 30)))
    return wanted, begin


def measure(
    model: Path, folder: Path, *, videos: int, num_frames: int = 4, moment: int = 3, seed: int = 1
) -> dict[str, Any]:
    """Return for each policy how often a chosen frame shows the wanted concept, and the share of such frames."""
    rng = np.random.default_rng(seed)
    policies = ("uniform", "general", "query", "query+mmr", "query+aks", "query+its", "query+facility")
    rows: dict[str, list[tuple[bool, float, bool]]] = {policy: [] for policy in policies}
    for number in range(videos):
        path = folder / f"{number}.mp4"
        wanted, begin = make_case(rng, path, moment=moment)
        for policy in policies:
            query = {"query": text_of(wanted), "query_model": model} if policy.startswith("query") else {}
            sel = so.select(path, num_frames, num_candidates=60, policy=policy, threads=1, **query)
            hit = (sel.pts_seconds >= begin) & (sel.pts_seconds < begin + moment)
            rows[policy].append((bool(hit.any()), float(hit.mean()), sel.query is None or sel.query["localised"]))
    table = {policy: np.array(values, dtype=float).mean(0) for policy, values in rows.items()}
    return {
        "videos": videos,
        "num_frames": num_frames,
        "num_candidates": 60,
        "seconds": 60,
        "moment_seconds": moment,
        "policies": {
            policy: {"found": round(found, 4), "frames_that_show_it": round(share, 4), "localised": round(local, 4)}
            for policy, (found, share, local) in table.items()
        },
    }


def table(result: dict[str, Any]) -> str:
    """Return the table of docs/query.md."""
    lines = ["| policy | videos in which the moment was found, % | chosen frames that show it, % |", "|---|---|---|"]
    for policy, row in result["policies"].items():
        lines.append(f"| `{policy}` | {100 * row['found']:.0f} | {100 * row['frames_that_show_it']:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--videos", type=int, default=100)
    parser.add_argument("--out", type=Path, default=RESULTS / "query.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        model = train_model(Path(work) / "model", steps=600)
        result = measure(model, Path(work), videos=arguments.videos)
    write_result(arguments.out, {**result, "circumstances": circumstances(("torch", "onnxruntime", "numpy"))})
    print(table(result))


if __name__ == "__main__":
    main()
