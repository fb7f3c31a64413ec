"""How the general sampler is taught: all of MobileNetV2 learns what general_lessons.py knows of every frame.

What is left of a frame and how sure the teacher is are linear heads on the same features, so any mixture of them is one
importance head afterwards; the likeness of the teacher's features is learned by the features themselves.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.general_sampler.general_data import DEV, TRAIN, read
from benchmarks.general_sampler.general_defects import KINDS
from benchmarks.general_sampler.general_lessons import Lesson, Lessons, Teacher, normalised
from sosampler.classifiers.weights import load_weights, read_state
from sosampler.samplers.sosampler import SOSampler

HEADS, TRAINED = "heads.safetensors", "training.json"
RETAINED, SURE = 0, 1  # rows of the heads
_DEV_SEED = 1000  # the same dev frames whatever the seed of a training is
_SECONDS_TO_END = 4.0  # of the time given, kept for the last measurement and for writing
_WARM_STEPS = 10  # while a GPU finds its ways; they are part of the training, but time is only shared out after them


@dataclass(frozen=True)
class Settings:
    """All that decides a training besides the file and the time that it may take."""

    pictures: int = 96  # a step
    spoiled: int = 3  # times that each picture is spoiled
    dev_pictures: int = 512
    teacher_size: int = 160
    input_size: int = 128
    fade: float = KINDS["fade"]  # how often, among the weights of all kinds
    wipe: float = KINDS["wipe"]
    lr: float = 1e-3
    lower_lr: float = 0.5  # share of `lr` for the lower blocks, which are nearer to what they should be
    head_lr: float = 3e-3
    weight_decay: float = 0.05
    warmup: float = 0.05  # share of the time
    averaging: float = 0.995
    norms: bool = True
    sure_weight: float = 0.5
    likeness_weight: float = 10.0
    measured: int = 24  # times that dev is looked at
    seed: int = 0


_LOWER_BLOCKS = 11  # of MobileNetV2's 19


def settings_from(given: list[str]) -> Settings:
    """Of "name=value"."""
    kinds: dict[str, type] = {field.name: type(field.default) for field in fields(Settings)}
    changed: dict[str, Any] = {}
    for one in given:
        name, _, value = one.partition("=")
        if name not in kinds:
            raise SystemExit(f"--set {one}: there is no such setting; there are {', '.join(kinds)}")
        changed[name] = value.lower() in ("1", "true", "yes") if kinds[name] is bool else kinds[name](value)
    return Settings(**changed)


class Student(nn.Module):
    """The sampler with the two heads in place of its one; on a GPU its convolutions run in bfloat16."""

    def __init__(self, weights: Path, input_size: int) -> None:
        super().__init__()
        self.sampler = SOSampler(input_size=input_size)
        state = read_state(weights)
        inside = {name: tensor for name, tensor in state.items() if name.startswith("features.")}
        load_weights(self.sampler.backbone, inside, where=str(weights))
        self.heads = nn.Linear(self.sampler.backbone.num_features, 2)
        nn.init.zeros_(self.heads.weight)
        nn.init.zeros_(self.heads.bias)
        self.eval()

    def forward(self, frames: Tensor) -> tuple[Tensor, Tensor]:
        """[F, 3, S, S] in 0..1 -> [F, 2] and features [F, D], in float32."""
        with torch.autocast(frames.device.type, torch.bfloat16, enabled=frames.is_cuda):
            x = self.sampler.backbone.features(normalised(frames))
        features = x.float().mean((2, 3))
        return self.heads(features), features

    def learn(self, norms: bool) -> None:
        """To training mode; norms keep ImageNet's statistics unless they learn too.

        They learn by default: two thirds of the frames are spoiled, which is not what ImageNet's statistics are of, and
        every batch has the same mixture of hundreds of frames, so that the running ones are right afterwards.
        """
        self.train(norms)  # nothing but norms has a mode here: SOSampler's dropout is 0


class _Learning(NamedTuple):
    """What changes in a training."""

    student: Student
    averaged: Student
    optimizer: torch.optim.Optimizer
    rates: list[float]  # a group
    pairs: tuple[list[Tensor], list[Tensor]]  # averaged tensors and those that they follow, statistics of norms too


def losses(student: Student, lesson: Lesson, settings: Settings) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The sum to be made small, its parts, and what is said of each frame [F, 2]."""
    said, features = student(lesson.frames)
    asked = lesson.asked
    unit, taught = F.normalize(features[asked], dim=1), lesson.taught[asked]
    # Of a frame with itself both likenesses are 1, so the diagonal adds nothing to the sum.
    pairs = len(unit) * (len(unit) - 1)
    parts = {
        "retained": F.binary_cross_entropy_with_logits(said[:, RETAINED], lesson.retained),
        "sure": F.binary_cross_entropy_with_logits(said[asked, SURE], lesson.sure[asked]),
        "likeness": (unit @ unit.T - taught @ taught.T).square().sum() / pairs,
    }
    total = parts["retained"] + settings.sure_weight * parts["sure"] + settings.likeness_weight * parts["likeness"]
    return total, parts, said


def train(
    data: Path,
    teacher_weights: Path,
    student_weights: Path,
    out: Path,
    settings: Settings,
    *,
    seconds: float,
    device: torch.device,
) -> dict[str, Any]:
    """Teach the network in the time given, and write the sampler's folder with both heads beside it.

    Rates follow the time that has passed, so that they end with it, however fast the machine is. What has the least dev
    loss is kept, and written as soon as it is found.
    """
    begin = time.perf_counter()
    torch.backends.cudnn.benchmark = True
    stored = read(data)
    teacher = Teacher(teacher_weights).to(device, memory_format=torch.channels_last)
    masks = stored.masks.to(device)

    def lessons(split: int, weights: dict[str, float]) -> Lessons:
        pictures = stored.pictures[stored.split == split].to(device)
        sizes = {"teacher_size": settings.teacher_size, "size": settings.input_size, "spoiled": settings.spoiled}
        return Lessons(pictures, masks, teacher, **sizes, weights=weights)

    dev = list(dev_lessons(lessons(DEV, {}), settings))
    torch.manual_seed(settings.seed)
    school = lessons(TRAIN, {"fade": settings.fade, "wipe": settings.wipe})
    student = Student(student_weights, settings.input_size).to(device, memory_format=torch.channels_last)
    learning = _begin(student, settings)

    measured = 0
    a_pass = len(school.pictures) // settings.pictures  # steps
    result: dict[str, Any] = {
        "settings": asdict(settings),
        "device": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU cores",
        "frames_dev": sum(len(lesson.kinds) for lesson in dev),
        "dev_of_imagenet": measure_dev(learning.averaged, dev, settings),
        "log": [],
    }
    share, begun = 0.0, time.perf_counter()
    for step, places in enumerate(_orders(len(school.pictures), settings.pictures), start=1):
        _step(learning, school.make(places), settings, share, step)
        now = time.perf_counter()
        if step == _WARM_STEPS:
            begun = now
        share = min(1.0, (now - begun) / max(1.0, begin + seconds - _SECONDS_TO_END - begun))
        if share == 1 or share * settings.measured >= measured + 1:
            measured = int(share * settings.measured)
            found = measure_dev(learning.averaged, dev, settings)
            row = {"epoch": round(step / a_pass, 1), "step": step, "seconds": round(time.perf_counter() - begin, 1)}
            row |= {name: found[name] for name in ("total", "retained", "sure", "likeness")}
            row |= {name: found[_BY_KIND][name][1] for name in ("clean", "fade", "wipe")}
            print(row, flush=True)
            result["log"].append(row)
            frames = step * settings.pictures * (1 + settings.spoiled)
            result |= {"frames": frames, "steps": step, "epochs": row["epoch"], "seconds": row["seconds"]}
            if "dev" not in result or found["total"] < result["dev"]["total"]:
                result |= {"epoch": row["epoch"], "step": step, "dev": found}
                write(learning.averaged, out, result)
            (out / TRAINED).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if share >= 1:
            return result
    raise AssertionError("pictures are drawn without end")


def dev_lessons(lessons: Lessons, settings: Settings) -> Iterator[Lesson]:
    """Frames of pictures that were held out, made once and always the same."""
    torch.manual_seed(_DEV_SEED)
    places = torch.randperm(len(lessons.pictures))[: settings.dev_pictures]
    for some in places.split(64):
        lesson = lessons.make(some)
        yield lesson._replace(frames=(lesson.frames * 255).round().byte())


def _begin(student: Student, settings: Settings) -> _Learning:
    averaged = copy.deepcopy(student).requires_grad_(False)
    student.learn(settings.norms)
    # The heads that are written come of `heads`; the sampler's own one is filled in at the end.
    student.sampler.importance_head.requires_grad_(False)
    blocks = student.sampler.backbone.features
    parts = (
        (blocks[:_LOWER_BLOCKS], settings.lr * settings.lower_lr),
        (blocks[_LOWER_BLOCKS:], settings.lr),
        (student.heads, settings.head_lr),
    )
    groups: list[dict[str, Any]] = []
    for part, rate in parts:
        for decayed in (True, False):  # norms and biases are not drawn to nought
            found = [one for one in part.parameters() if (one.ndim > 1) == decayed]
            groups.append({"params": found, "lr": rate, "weight_decay": settings.weight_decay if decayed else 0.0})
    fused = next(student.parameters()).is_cuda
    optimizer = torch.optim.AdamW(groups, fused=fused)
    old, new = (
        [one.detach() for one in net.state_dict(keep_vars=True).values() if one.is_floating_point()]
        for net in (averaged, student)
    )
    return _Learning(student, averaged, optimizer, [group["lr"] for group in groups], (old, new))


def _orders(count: int, at_once: int) -> Iterator[Tensor]:
    """All pictures in turn, in a new order each time, without end; what does not fill a step is left out."""
    while True:
        yield from torch.randperm(count)[: count // at_once * at_once].split(at_once)


def _step(learning: _Learning, lesson: Lesson, settings: Settings, share: float, step: int) -> None:
    student = learning.student
    factor = min(1.0, (share + 1e-3) / settings.warmup) * 0.5 * (1 + math.cos(math.pi * share))
    for group, rate in zip(learning.optimizer.param_groups, learning.rates, strict=True):
        group["lr"] = rate * factor
    total, _, _ = losses(student, lesson, settings)
    learning.optimizer.zero_grad(set_to_none=True)
    total.backward()
    nn.utils.clip_grad_norm_([one for one in student.parameters() if one.grad is not None], 5.0)
    learning.optimizer.step()
    old, new = learning.pairs
    torch._foreach_lerp_(old, new, 1 - min(settings.averaging, step / (step + 9)))


_BY_KIND = "retained, wanted and said"


@torch.no_grad()
def measure_dev(student: Student, dev: list[Lesson], settings: Settings) -> dict[str, Any]:
    """Losses on pictures and groups that were held out, and what was wanted and said of each kind of frame."""
    sums: dict[str, float] = {}
    said = []
    for lesson in dev:
        seen = lesson._replace(frames=lesson.frames.float() / 255)
        total, parts, heads = losses(student, seen, settings)
        for name, value in ({"total": total} | parts).items():
            sums[name] = sums.get(name, 0.0) + float(value) / len(dev)
        said.append(heads[:, RETAINED].sigmoid().cpu())
    kinds = torch.cat([lesson.kinds for lesson in dev])
    wanted, values = torch.cat([lesson.retained.cpu() for lesson in dev]), torch.cat(said)
    by_kind = {
        name: [round(float(one[kinds == place].mean()), 3) for one in (wanted, values)]
        for place, name in ((-1, "clean"), *enumerate(KINDS))
        if bool((kinds == place).any())
    }
    return {**{name: round(value, 4) for name, value in sums.items()}, _BY_KIND: by_kind}


def mix_with_start(run: Path, start: Path, share: float, out: Path) -> None:
    """A run whose network is `share` of the weights that it started from and the rest its own; heads stay.

    What was learned of faults is kept nearly whole by a small share, and what the start knew of pictures comes back.
    """
    shutil.copytree(run, out)
    student = Student(start, Settings().input_size)
    before = student.sampler.backbone.state_dict()
    student.sampler = SOSampler.from_pretrained(run)
    with torch.no_grad():
        for name, tensor in student.sampler.backbone.state_dict().items():
            if tensor.is_floating_point():
                tensor.lerp_(before[name], share)
    student.heads.load_state_dict(load_file(run / HEADS))
    result = json.loads((run / TRAINED).read_text(encoding="utf-8")) | {"share_of_start": share}
    write(student, out, result)
    (out / TRAINED).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def write(student: Student, out: Path, about: dict[str, Any]) -> None:
    """The sampler's folder, its importance being what is retained, and both heads in a file beside it."""
    out.mkdir(parents=True, exist_ok=True)
    written = copy.deepcopy(student).cpu().to(memory_format=torch.contiguous_format)
    sampler, heads = written.sampler, written.heads
    with torch.no_grad():
        sampler.importance_head.weight.copy_(heads.weight[RETAINED : RETAINED + 1])
        sampler.importance_head.bias.copy_(heads.bias[RETAINED : RETAINED + 1])
    sampler.about = {key: value for key, value in about.items() if key != "log"}
    sampler.save_pretrained(out)
    save_file({"weight": heads.weight.detach().contiguous(), "bias": heads.bias.detach().contiguous()}, out / HEADS)
