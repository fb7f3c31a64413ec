"""The probe of a sampler: one linear layer on the classifier's features of single frames.

It learns from the labels of whole videos alone. The evidence of frame t for class c is that of an answer (see
`samplers.answer`): e_t(c) = log(1 - r_t + r_t p_t(c) C). The log-odds of r_t are one output of the probe. Its others,
h_t, correct the classifier's logits l_t: p_t = softmax(a l_t + h_t), where a is learned too. The belief about a video
is softmax(sum_t e_t) over all of its candidates, and the loss that of the video's classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from sosampler.bank.bank import Bank
from sosampler.bank.outputs import Features, Teacher
from sosampler.classifiers.base import Classifier, label_shares
from sosampler.classifiers.factory import create_classifier, saved_folder
from sosampler.classifiers.probed import probe_refusal
from sosampler.errors import SosamplerError, first_line
from sosampler.policies.learned import probe_outputs
from sosampler.samplers.sosampler import SOSampler
from sosampler.training.baseline_data import heavy_source, keep_features
from sosampler.training.sampler_data import bank_labels
from sosampler.video.candidates import uniform_positions

RIDGES = (0.01, 0.03, 0.1)  # weight of the squared weights of the classes, of which dev takes one
# That of the relevance is weaker: it is one output for all videos, and those of the classes have few videos each.
_OF_RELEVANCE = 0.1
_LEAST_SPREAD = 0.1  # of a feature, as a share of the median feature's
_STEPS = 60  # of L-BFGS
_STRENGTHS = tuple(np.linspace(0.1, 1.5, 15).tolist())  # by which beliefs are tempered before they are compared
_MAX_BYTES = 1 << 30  # of features and of what the fit keeps of each frame, in float32
_KEPT = 8  # tensors [V, T, C] that a step of the fit holds


class ProbeVideos(NamedTuple):
    """Videos that a probe learns from, or is judged by."""

    features: Tensor  # float32 [V, T, D], of the classifier
    logits: Tensor  # float32 [V, T, C], the classifier's own
    real: Tensor  # bool [V, T], False for repeated frames of a short video
    labels: Tensor  # float32 [V, C]


def find_features(
    bank: Bank,
    teacher: Teacher,
    classifier: str | Path | Classifier | None,
    *,
    device: torch.device,
    compute: bool,
    insist: bool,
    say: Callable[[str], None],
) -> Features | None:
    """Return the teacher's features before its class layer, or None and say why there are none.

    Where the bank has none and the classifier is given, it is run for them, once, if `compute` allows it. `insist`:
    raise where the bank cannot be written.
    """
    if teacher.pooling != "mean" or not teacher.about["features"]:
        say("no probe: the bank has no logits of single frames that the classifier averages")
        return None
    network = classifier
    if isinstance(network, (str, Path)) and saved_folder(network) is not None:
        network = create_classifier(network)
    at_hand = isinstance(network, Classifier) and network.fingerprint() == teacher.fingerprint
    if at_hand and (refusal := probe_refusal(network)) is not None:
        say(f"no probe: {refusal}")
        return None
    if (found := bank.features_of_teacher(teacher)) is not None:
        return found
    if not (at_hand and compute):
        remedy = "add them with `sosampler bank add-features BANK --features classifier=FOLDER`"
        if compute:
            remedy = "give its folder (--classifier FOLDER), and they are computed once"
        say(f"no probe: the bank has no features of the classifier; {remedy}")
        return None
    try:
        keep_features(bank, [heavy_source(bank, network)], device=str(device), say=say)
    except (SosamplerError, OSError) as error:  # the bank is locked or read-only, or the disk is full
        if insist:
            raise
        say(f"no probe: {first_line(error)}")
    return bank.features_of_teacher(teacher)


def add_probe(
    sampler: SOSampler,
    teacher: Teacher,
    features: Features,
    rows: Mapping[str, Sequence[int]],
    *,
    num_candidates: int,
    device: torch.device,
    say: Callable[[str], None],
) -> tuple[NDArray[np.float64] | None, dict[str, Any] | None]:
    """Give a sampler a probe; return what it makes of the dev frames [V, T, C + 1], and facts. None for no probe.

    It has no state to resume: the same videos give the same probe again.
    """
    train, dev = (
        probe_videos(
            features, teacher, rows[name], bank_labels(teacher.bank, rows[name]), num_candidates, device=device
        )
        for name in ("train", "dev")
    )
    found = choose_probe(train, dev, multi_label=sampler.multi_label)
    if found is None:
        say("no probe: its loss on dev is not finite; check the classifier's features")
        return None, None
    probe, facts = found
    sampler.set_probe(probe.weight, probe.bias, features.fingerprint)
    say(f"probe: learned from {facts['videos']} videos, ridge {facts['ridge']:g}")
    return probe_dev(sampler.probe, features, rows["dev"], num_candidates), facts


def probe_videos(
    features: Features,
    teacher: Teacher,
    rows: Sequence[int],
    labels: Tensor,
    num_candidates: int,
    *,
    device: torch.device,
) -> ProbeVideos:
    """Read features of evenly spread frames of videos of the bank, as many videos as fit into memory."""
    most = max(1, _MAX_BYTES // (4 * num_candidates * (features.width + _KEPT * labels.shape[1])))
    kept = np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(np.int64)
    columns: tuple[list[NDArray[Any]], ...] = ([], [], [])
    for row in (rows[index] for index in kept.tolist()):
        stored = features[row]
        positions = uniform_positions(len(stored), num_candidates)
        real = np.diff(positions, prepend=-1) > 0  # a short video repeats frames
        parts = stored[positions].astype(np.float32), teacher[row].features[positions].astype(np.float32), real
        for column, part in zip(columns, parts, strict=True):
            column.append(part)
    tensors = *(torch.from_numpy(np.stack(column)) for column in columns), labels[kept].float()
    return ProbeVideos(*(tensor.to(device) for tensor in tensors))


def probe_dev(probe: Any, features: Features, rows: Sequence[int], num_candidates: int) -> NDArray[np.float64]:
    """Return what a probe makes of evenly spread frames of videos of the bank, [V, T, C + 1]."""
    outputs = []
    for row in rows:
        stored = features[row]
        outputs.append(probe_outputs(probe, stored[uniform_positions(len(stored), num_candidates)]))
    return np.stack(outputs)


def beliefs(outputs: Tensor, scale: Tensor, videos: ProbeVideos, prior: float, *, multi_label: bool) -> Tensor:
    """Return the logits of the belief [V, C], by outputs of the probe [V, T, C + 1] and the classifier's `scale`."""
    logits, relevance = outputs[..., :-1] + scale * videos.logits, outputs[..., -1:]
    hidden, shown = F.logsigmoid(-relevance), F.logsigmoid(relevance)

    def evidence(log_probs: Tensor, log_prior: float) -> Tensor:
        each = torch.logaddexp(hidden, shown + log_probs - log_prior)
        return (each * videos.real[..., None]).sum(1)  # [V, C]

    if not multi_label:
        return evidence(logits.log_softmax(-1), math.log(prior))
    against = math.log1p(-prior)
    odds = evidence(F.logsigmoid(logits), math.log(prior)) - evidence(F.logsigmoid(-logits), against)
    return odds + math.log(prior) - against


def class_prior(labels: Tensor, *, multi_label: bool) -> float:
    """Return the prior of each class: 1 / C, or of classes that do not exclude each other their mean frequency."""
    return float(labels.mean().clamp(1e-4, 0.5)) if multi_label else 1 / labels.shape[1]


def loss_of(belief: Tensor, labels: Tensor, *, multi_label: bool) -> Tensor:
    """Return the mean log loss of the logits of beliefs [V, C]."""
    if multi_label:
        return F.binary_cross_entropy_with_logits(belief, labels)
    return F.cross_entropy(belief, label_shares(labels, belief.dtype))


class Probe(NamedTuple):
    """A linear layer that was fitted, on the CPU."""

    weight: Tensor  # [C + 1, D]
    bias: Tensor  # [C + 1]
    scale: Tensor  # of the classifier's logits, a
    prior: float  # of each class

    def belief(self, videos: ProbeVideos, *, multi_label: bool) -> Tensor:
        """Return the logits of its belief about videos, [V, C]."""
        weight, bias, scale = (part.to(videos.features.device) for part in self[:3])
        outputs = F.linear(videos.features, weight, bias)
        return beliefs(outputs, scale, videos, self.prior, multi_label=multi_label)


def fit_probe(videos: ProbeVideos, ridge: float, *, multi_label: bool) -> Probe:
    """Return the probe with the lowest loss plus `ridge` times its squared weights.

    Features count in units of their spread over all frames.
    """
    rows = videos.features[videos.real]
    mean, spread = rows.mean(0), rows.std(0)
    # What hardly ever differs in train must not count for much where it does.
    spread = spread.clamp_min(_LEAST_SPREAD * float(spread.median()) + torch.finfo(spread.dtype).tiny)
    prior = class_prior(videos.labels, multi_label=multi_label)
    scaled = videos._replace(features=(videos.features - mean) / spread)
    classes = videos.labels.shape[1]
    weight, bias, scale = (
        torch.zeros(shape, device=rows.device) for shape in ((classes + 1, rows.shape[1]), classes + 1, ())
    )
    learned = [part.requires_grad_() for part in (weight, bias, scale)]
    penalty = torch.full((classes + 1, 1), ridge, device=rows.device)
    penalty[-1] *= _OF_RELEVANCE
    optimizer = torch.optim.LBFGS(learned, max_iter=_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        belief = beliefs(F.linear(scaled.features, weight, bias), scale, scaled, prior, multi_label=multi_label)
        loss = loss_of(belief, scaled.labels, multi_label=multi_label) + (penalty * weight.square()).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        weight = weight / spread
        return Probe(weight.cpu(), (bias - weight @ mean).cpu(), scale.detach().cpu(), prior)


def choose_probe(train: ProbeVideos, dev: ProbeVideos, *, multi_label: bool) -> tuple[Probe, dict[str, Any]] | None:
    """Return the probe whose belief has the lowest loss on dev, of those with each ridge, and facts.

    Beliefs are compared at the strength that suits each best, since an answer fits its own. None where no loss is
    finite.
    """
    probes, losses = {}, {}
    for ridge in RIDGES:
        probe = fit_probe(train, ridge, multi_label=multi_label)
        belief = probe.belief(dev, multi_label=multi_label)
        loss = min(float(loss_of(s * belief, dev.labels, multi_label=multi_label)) for s in _STRENGTHS)
        if math.isfinite(loss):
            probes[ridge], losses[ridge] = probe, loss
    if not losses:
        return None
    best = min(losses, key=lambda ridge: losses[ridge])
    facts = {"ridge": best, "scale": float(probes[best].scale), "videos": len(train.labels)}
    return probes[best], {**facts, "log_loss": {str(ridge): loss for ridge, loss in losses.items()}}
