"""How the general sampler is taught: a frozen ImageNet network looks at every frame before and after it was spoiled.

Nobody labels anything. For each frame the student learns three things:

- what is left of it: how far the teacher says the same about the spoiled frame as about the clean one (overlap of its
  probabilities, likeness of its features), times what a transition leaves; nothing for plain and written frames;
- how sure the teacher is: its highest probability for the frame as it is;
- which frames resemble each other: the cosines between the teacher's features of all frames of a batch.

The first two are linear heads on the same features, so any mixture of them is one importance head afterwards.

It is made for a small machine without a GPU: the teacher is asked once (`ask`, by several processes if wished), and of
the student the lower blocks stay as ImageNet left them, so that what they say is kept too. `train` then teaches the
upper blocks, in minutes.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from general_data import DEV, TRAIN, Stored, read, read_weights
from general_defects import KINDS, as_filmed, draw_kinds, spoil
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision.models import resnet50

from sosampler.classifiers.preprocessing import IMAGENET_MEAN, IMAGENET_STD
from sosampler.classifiers.weights import load_weights
from sosampler.files import replacing
from sosampler.samplers.sosampler import SOSampler

HEADS = "heads.safetensors"
RETAINED, SURE = 0, 1  # rows of the heads
LOWER_BLOCKS = 15  # of MobileNetV2's 19, which stay as they are
AT_ONCE = 64  # pictures of which answers are kept in one file
NOT_ASKED = ("flat", "title")  # kinds of which nothing is left, whatever the teacher says


@dataclass(frozen=True)
class Settings:
    """All that decides a training besides the file."""

    spoiled: int = 3  # times that each picture is spoiled
    dev_pictures: int = 512
    teacher_size: int = 128
    input_size: int = 128
    epochs: int = 6
    batch_size: int = 256  # frames
    lr: float = 5e-4
    head_lr: float = 3e-3
    weight_decay: float = 0.05
    warmup: float = 0.05  # share of the steps
    averaging: float = 0.99
    sure_weight: float = 0.5
    likeness_weight: float = 10.0
    seed: int = 0


class Answers(NamedTuple):
    """What is kept of some frames."""

    lower: Tensor  # [F, 160, 4, 4], what the lower blocks say
    retained: Tensor  # [F]
    sure: Tensor  # [F], NaN where the teacher was not asked
    taught: Tensor  # [F, 2048], the teacher's features, NaN likewise
    kinds: Tensor  # [F], places in KINDS; -1 for frames to which nothing happened


class Teacher(nn.Module):
    """ImageNet's ResNet-50 with its stride on the first convolution of a block: probabilities and features."""

    def __init__(self, weights: Path) -> None:
        super().__init__()
        self.net = resnet50()
        for layer in (self.net.layer2, self.net.layer3, self.net.layer4):
            layer[0].conv1.stride, layer[0].conv2.stride = (2, 2), (1, 1)
        load_weights(self.net, read_weights(weights), where=str(weights))

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        net = self.net
        x = net.maxpool(net.relu(net.bn1(net.conv1(frames))))
        features = net.layer4(net.layer3(net.layer2(net.layer1(x)))).mean((2, 3))
        return net.fc(features).softmax(-1), features


class Student(nn.Module):
    """The sampler with the two heads in place of its one, seen from the lower blocks on."""

    def __init__(self, weights: Path, input_size: int) -> None:
        super().__init__()
        self.sampler = SOSampler(input_size=input_size)
        load_weights(self.sampler.backbone, read_weights(weights), where=str(weights))
        self.sampler.backbone.features[:LOWER_BLOCKS].requires_grad_(False)
        self.heads = nn.Linear(self.sampler.backbone.num_features, 2)
        nn.init.zeros_(self.heads.weight)
        nn.init.zeros_(self.heads.bias)
        self.eval()  # norms keep ImageNet's statistics: those of the lower blocks were kept with them

    @property
    def upper(self) -> nn.Module:
        blocks: nn.Module = self.sampler.backbone.features[LOWER_BLOCKS:]
        return blocks

    def forward(self, lower: Tensor) -> tuple[Tensor, Tensor]:
        """[F, 160, 4, 4] -> [F, 2] and features [F, D]."""
        features = self.upper(lower).mean((2, 3))
        return self.heads(features), features


# ---- asking


def ask(
    data: Path, teacher_weights: Path, student_weights: Path, out: Path, settings: Settings, *, part: int, parts: int
) -> int:
    """Spoil pictures, ask teacher and lower blocks, keep the answers in `out`; a file that is there is not made again.

    Of `parts` processes each makes every so manieth file. Returns how many files this one made.
    """
    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    stored = read(data)
    teacher = _runtime(Teacher(teacher_weights), settings.teacher_size)
    lower_blocks = Student(student_weights, settings.input_size).sampler.backbone.features[:LOWER_BLOCKS]
    lower = _runtime(lower_blocks, settings.input_size)
    made = 0
    for number, (split, places) in enumerate(_portions(stored, settings)):
        path = out / f"{'dev' if split == DEV else 'train'}-{number:03d}.npz"
        if number % parts != part or path.is_file():
            continue
        torch.manual_seed(1000 * settings.seed + number)
        answers = _asked(stored, places, teacher, lower, settings)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, **answers)
        made += 1
        print(path.name, flush=True)
    return made


def _portions(stored: Stored, settings: Settings) -> Iterator[tuple[int, Tensor]]:
    """All train pictures once, and some of dev, in an order by seed."""
    order = torch.Generator().manual_seed(settings.seed)
    for split in (TRAIN, DEV):
        places = (stored.split == split).nonzero()[:, 0]
        places = places[torch.randperm(len(places), generator=order)]
        for some in (places if split == TRAIN else places[: settings.dev_pictures]).split(AT_ONCE):
            yield split, some


def _asked(stored: Stored, places: Tensor, teacher: Any, lower: Any, settings: Settings) -> dict[str, NDArray]:
    """Each picture as it is and spoiled some times."""
    size, count = settings.input_size, len(places)
    clean = _coloured(cut_out(stored.pictures[places].float() / 255, size))
    probs, features = teacher(_normalised(clean))
    unit = F.normalize(features, dim=1)
    frames, told = (
        [as_filmed(clean)],
        [_row(count, torch.ones(count), probs.amax(1), features, torch.full((count,), -1))],
    )
    for _ in range(settings.spoiled):
        masks = stored.masks[torch.randint(len(stored.masks), (count,))].float() / 255
        masks = F.interpolate(masks[:, None], size=size, mode="bilinear", antialias=True)[:, 0]
        kinds = draw_kinds(count, clean.device)
        spoiled, left = spoil(clean, clean[torch.randperm(count)], masks, kinds)
        spoiled = as_filmed(spoiled)
        asked = ~torch.isin(kinds, torch.tensor([list(KINDS).index(name) for name in NOT_ASKED]))
        retained, sure = torch.zeros(count), torch.full((count,), torch.nan)
        taught = torch.full_like(features, torch.nan)
        new_probs, taught[asked] = teacher(_normalised(spoiled[asked]))
        overlap = (new_probs * probs[asked]).sqrt().sum(1)
        alike = ((F.normalize(taught[asked], dim=1) * unit[asked]).sum(1) * 2 - 1).clamp(0, 1)
        retained[asked] = (left[asked] * (overlap * alike).sqrt()).clamp(0, 1)
        sure[asked] = new_probs.amax(1)
        frames.append(spoiled)
        told.append(_row(count, retained, sure, taught, kinds))
    (below,) = lower(_normalised(torch.cat(frames)))
    joined = {name: np.concatenate([one[name] for one in told]) for name in told[0]}
    return {"lower": below.numpy().astype(np.float16), **joined}


def _row(count: int, retained: Tensor, sure: Tensor, taught: Tensor, kinds: Tensor) -> dict[str, NDArray]:
    return {
        "retained": retained.numpy().astype(np.float32),
        "sure": sure.numpy().astype(np.float32),
        "taught": taught.numpy().astype(np.float16),
        "kinds": kinds.numpy().astype(np.int8),
    }


def _runtime(network: nn.Module, size: int) -> Any:
    """A network as onnxruntime has it, on one thread: three times as fast as torch on a CPU."""
    import io

    import onnxruntime

    held = io.BytesIO()
    example = (torch.zeros(2, 3, size, size),)
    free = ({0: torch.export.Dim("frames", min=1)},)
    made = torch.onnx.export(network.eval(), example, dynamo=True, dynamic_shapes=free, verbose=False)
    assert made is not None
    made.save(held)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(held.getvalue(), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name

    def run(frames: Tensor) -> tuple[Tensor, ...]:
        found = [session.run(None, {name: some.contiguous().numpy()}) for some in frames.split(16)]
        return tuple(torch.from_numpy(np.concatenate(one)) for one in zip(*found, strict=True))

    return run


def _normalised(frames: Tensor) -> Tensor:
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (IMAGENET_MEAN, IMAGENET_STD))
    return (frames - mean) / std


def cut_out(pictures: Tensor, size: int) -> Tensor:
    """A random square of 55 to 100 % of each picture's area, half of them mirrored: [B, 3, size, size]."""
    count, device = len(pictures), pictures.device
    scale = (0.55 + 0.45 * torch.rand(count, device=device)).sqrt()
    mirror = torch.where(torch.rand(count, device=device) < 0.5, -1.0, 1.0)
    theta = torch.zeros(count, 2, 3, device=device)
    theta[:, 0, 0], theta[:, 1, 1] = scale * mirror, scale
    theta[:, 0, 2], theta[:, 1, 2] = ((2 * torch.rand(2, count, device=device) - 1) * (1 - scale)).unbind()
    grid = F.affine_grid(theta, [count, 3, size, size], align_corners=False)
    return F.grid_sample(pictures, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _coloured(pictures: Tensor) -> Tensor:
    """Other light, contrast and saturation, within what cameras do."""
    light, contrast, saturation = (0.8 + 0.4 * torch.rand(3, len(pictures), 1, 1, 1, device=pictures.device)).unbind()
    grey = pictures.mean(1, keepdim=True)
    changed = torch.lerp(grey.expand_as(pictures), pictures, saturation.expand_as(pictures))
    middle = changed.mean((1, 2, 3), keepdim=True)
    return ((middle + (changed - middle) * contrast) * light).clamp(0, 1)


# ---- training


def read_answers(folder: Path, split: str) -> Answers:
    found: dict[str, list[Tensor]] = {name: [] for name in Answers._fields}
    for path in sorted(folder.glob(f"{split}-*.npz")):
        with np.load(path) as told:
            for name in found:
                found[name].append(torch.from_numpy(told[name]))
    if not found["kinds"]:
        raise SystemExit(f"{folder}: has no answers of {split} yet; run the stage ask first")
    return Answers(*(torch.cat(parts) for parts in found.values()))


def losses(student: Student, answers: Answers, settings: Settings) -> tuple[Tensor, dict[str, Tensor]]:
    said, features = student(answers.lower.float())
    asked = ~answers.sure.isnan()
    unit, taught = F.normalize(features[asked], dim=1), F.normalize(answers.taught[asked].float(), dim=1)
    off_diagonal = ~torch.eye(len(unit), dtype=torch.bool)
    parts = {
        "retained": F.binary_cross_entropy_with_logits(said[:, RETAINED], answers.retained),
        "sure": F.binary_cross_entropy_with_logits(said[asked, SURE], answers.sure[asked]),
        "likeness": (unit @ unit.T - taught @ taught.T)[off_diagonal].square().mean(),
    }
    total = parts["retained"] + settings.sure_weight * parts["sure"] + settings.likeness_weight * parts["likeness"]
    return total, parts


def train(
    answers: Path, student_weights: Path, out: Path, settings: Settings, *, seconds: float | None = None
) -> dict[str, Any]:
    """Teach the upper blocks and the heads, and write the sampler's folder with both heads beside it.

    The epoch with the least dev loss is kept. After `seconds` no other epoch begins.
    """
    begin = time.perf_counter()
    torch.manual_seed(settings.seed)
    lessons, dev = read_answers(answers, "train"), read_answers(answers, "dev")
    student = Student(student_weights, settings.input_size)
    averaged = copy.deepcopy(student).requires_grad_(False)
    groups = [
        {"params": list(student.upper.parameters()), "lr": settings.lr},
        {"params": list(student.heads.parameters()), "lr": settings.head_lr},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=settings.weight_decay)
    steps = settings.epochs * (len(lessons.kinds) // settings.batch_size)
    step = 0
    best: tuple[float, Student, int] | None = None
    log: list[dict[str, Any]] = []
    for epoch in range(1, settings.epochs + 1):
        order = torch.randperm(len(lessons.kinds))
        for rows in order[: len(order) // settings.batch_size * settings.batch_size].split(settings.batch_size):
            share = (step + 0.5) / steps
            factor = min(1.0, share / settings.warmup) * 0.5 * (1 + math.cos(math.pi * share))
            for group, rate in zip(optimizer.param_groups, (settings.lr, settings.head_lr), strict=True):
                group["lr"] = rate * factor
            total, _ = losses(student, Answers(*(part[rows] for part in lessons)), settings)
            optimizer.zero_grad(set_to_none=True)
            total.backward()
            nn.utils.clip_grad_norm_(student.parameters(), 5.0)
            optimizer.step()
            _average(averaged, student, min(settings.averaging, (step + 1) / (step + 10)))
            step += 1
        found = measure_dev(averaged, dev, settings)
        took = time.perf_counter() - begin
        log.append(
            {
                "epoch": epoch,
                "seconds": round(took, 1),
                **{name: found[name] for name in ("total", "retained", "sure", "likeness")},
            }
        )
        print(log[-1], flush=True)
        if best is None or found["total"] < best[0]:
            best = found["total"], copy.deepcopy(averaged), epoch
            write(averaged, out, {"epoch": epoch})  # should it be killed, the best so far is there
        if seconds is not None and took > seconds:
            break
    assert best is not None
    told = {
        "settings": asdict(settings),
        "frames": len(lessons.kinds),
        "frames_dev": len(dev.kinds),
        "teacher_asked": int((~lessons.sure.isnan()).sum()),
        "epoch": best[2],
        "steps": step,
        "seconds": round(time.perf_counter() - begin, 1),
        "device": "2 CPU cores",
        "dev": measure_dev(best[1], dev, settings),
        "dev_of_imagenet": measure_dev(Student(student_weights, settings.input_size), dev, settings),
        "log": log,
    }
    write(best[1], out, told)
    return told


def _average(averaged: Student, student: Student, keep: float) -> None:
    for old, new in zip(averaged.parameters(), student.parameters(), strict=True):
        old.lerp_(new.detach(), 1 - keep)


@torch.no_grad()
def measure_dev(student: Student, dev: Answers, settings: Settings) -> dict[str, Any]:
    """Losses on pictures and groups that were held out, and what was wanted and said of each kind of frame."""
    sums: dict[str, float] = {}
    said = []
    portions = torch.arange(len(dev.kinds)).split(settings.batch_size)
    for rows in portions:
        some = Answers(*(part[rows] for part in dev))
        total, parts = losses(student, some, settings)
        for name, value in ({"total": total} | parts).items():
            sums[name] = sums.get(name, 0.0) + float(value) / len(portions)
        said.append(student(some.lower.float())[0][:, RETAINED].sigmoid())
    values = torch.cat(said)
    by_kind = {
        name: [round(float(one[dev.kinds == place].mean()), 3) for one in (dev.retained, values)]
        for place, name in ((-1, "clean"), *enumerate(KINDS))
        if bool((dev.kinds == place).any())
    }
    return {**{name: round(value, 4) for name, value in sums.items()}, "retained, wanted and said": by_kind}


def write(student: Student, out: Path, about: dict[str, Any]) -> None:
    """The sampler's folder, its importance being what is retained, and both heads in a file beside it."""
    out.mkdir(parents=True, exist_ok=True)
    sampler, heads = student.sampler, student.heads
    with torch.no_grad():
        sampler.importance_head.weight.copy_(heads.weight[RETAINED : RETAINED + 1])
        sampler.importance_head.bias.copy_(heads.bias[RETAINED : RETAINED + 1])
    sampler.about = {key: value for key, value in about.items() if key != "log"}
    sampler.save_pretrained(out)
    save_file({"weight": heads.weight.detach().contiguous(), "bias": heads.bias.detach().contiguous()}, out / HEADS)
