"""The probe of a sampler: linear layers on the classifier's features of single frames.

It learns from the labels of whole videos alone. The evidence of frame t for class c is that of an answer (see
`samplers.answer`): e_t(c) = log(1 - r_t + r_t h_t(c) C), with the probe's class answer h_t and its relevance r_t. Its
belief about a video is softmax(sum_t e_t) over all of its candidates, and the loss that of the video's classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from sosampler.classifiers.probed import probed_layer
from sosampler.policies.learned import probe_outputs
from sosampler.training.baseline_data import heavy_source, keep_features
from sosampler.video.candidates import uniform_positions

RIDGES = (3e-4, 1e-3, 3e-3, 1e-2)  # weight of the squared weights, of which dev takes one
_STEPS = 60  # of L-BFGS
_MAX_BYTES = 1 << 30  # of features, in float32


class ProbeVideos(NamedTuple):
    """Videos that a probe learns from, or is judged by."""

    features: Tensor  # float32 [V, T, D], of the classifier
    real: Tensor  # bool [V, T], False for repeated frames of a short video
    labels: Tensor  # float32 [V, C]


def find_features(
    bank: Bank,
    teacher: Teacher,
    classifier: str | Path | Classifier | None,
    *,
    device: torch.device,
    say: Callable[[str], None],
) -> Features | None:
    """Return the teacher's features before its class layer; the classifier is run for them, once, where it is given.

    None where there are none to be had: the classifier is not at hand, or does not average the outputs of one linear
    layer.
    """
    if teacher.pooling != "mean" or not teacher.about["features"]:
        return None
    if (found := bank.features_of_teacher(teacher)) is not None:
        return found
    network = classifier
    if isinstance(network, (str, Path)) and saved_folder(network) is not None:
        network = create_classifier(network)
    if not isinstance(network, Classifier) or network.fingerprint() != teacher.fingerprint:
        say(
            "no probe: the bank has no features of the classifier, and it is not at hand; give its folder "
            "(--classifier FOLDER), and they are computed once"
        )
        return None
    if probed_layer(network) is None:
        return None
    keep_features(bank, [heavy_source(bank, network)], device=str(device), say=say)
    return bank.features_of_teacher(teacher)


def probe_videos(
    features: Features, rows: Sequence[int], labels: Tensor, num_candidates: int, *, device: torch.device
) -> ProbeVideos:
    """Read features of evenly spread frames of videos of the bank, as many videos as fit into memory."""
    most = max(1, _MAX_BYTES // (4 * num_candidates * features.width))
    kept = np.linspace(0, len(rows) - 1, min(most, len(rows))).round().astype(np.int64)
    values, real = [], []
    for row in (rows[index] for index in kept.tolist()):
        stored = features[row]
        positions = uniform_positions(len(stored), num_candidates)
        values.append(stored[positions].astype(np.float32))
        real.append(np.diff(positions, prepend=-1) > 0)  # a short video repeats frames
    tensors = torch.from_numpy(np.stack(values)), torch.from_numpy(np.stack(real)), labels[kept].float()
    return ProbeVideos(*(tensor.to(device) for tensor in tensors))


def probe_dev(probe: Any, features: Features, rows: Sequence[int], num_candidates: int) -> NDArray[np.float64]:
    """Return what a probe makes of evenly spread frames of videos of the bank, [V, T, C + 1]."""
    outputs = []
    for row in rows:
        stored = features[row]
        outputs.append(probe_outputs(probe, stored[uniform_positions(len(stored), num_candidates)]))
    return np.stack(outputs)


def belief_loss(outputs: Tensor, videos: ProbeVideos, *, multi_label: bool, prior: Tensor) -> Tensor:
    """Return the mean loss of the probe's belief, from its outputs [V, T, C + 1]; `prior` [C] of each class."""
    logits, relevance = outputs[..., :-1], outputs[..., -1:]
    not_shown, shown = F.logsigmoid(-relevance), F.logsigmoid(relevance)

    def evidence(log_probs: Tensor, log_prior: Tensor) -> Tensor:
        each = torch.logaddexp(not_shown, shown + log_probs - log_prior)
        return (each * videos.real[..., None]).sum(1)  # [V, C]

    if not multi_label:
        belief = evidence(logits.log_softmax(-1), prior.log())
        return F.cross_entropy(belief, label_shares(videos.labels, belief.dtype))
    odds = evidence(F.logsigmoid(logits), prior.log()) - evidence(F.logsigmoid(-logits), torch.log1p(-prior))
    return F.binary_cross_entropy_with_logits(odds + prior.logit(), videos.labels)


def fit_probe(videos: ProbeVideos, ridge: float, *, multi_label: bool) -> tuple[Tensor, Tensor]:
    """Return the weight [C + 1, D] and bias [C + 1] with the lowest loss plus `ridge` times the squared weights.

    Features count in units of their spread over all frames.
    """
    rows = videos.features.flatten(0, 1)
    mean, spread = rows.mean(0), rows.std(0).clamp_min(1e-6)
    scaled = videos._replace(features=(videos.features - mean) / spread)
    classes = videos.labels.shape[1]
    weight = torch.zeros(classes + 1, rows.shape[1], device=rows.device, requires_grad=True)
    bias = torch.zeros(classes + 1, device=rows.device, requires_grad=True)
    prior = class_prior(videos.labels, multi_label=multi_label)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        outputs = F.linear(scaled.features, weight, bias)
        loss = belief_loss(outputs, scaled, multi_label=multi_label, prior=prior) + ridge * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        weight = weight / spread
        return weight.cpu(), (bias - weight @ mean).cpu()


def class_prior(labels: Tensor, *, multi_label: bool) -> Tensor:
    """Return the prior of each class [C]: 1 / C, or of classes that do not exclude each other their mean frequency."""
    classes = labels.shape[1]
    value = float(labels.mean().clamp(1e-4, 0.5)) if multi_label else 1 / classes
    return torch.full((classes,), value, device=labels.device)


def choose_probe(
    train: ProbeVideos, dev: ProbeVideos, *, multi_label: bool
) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Return the probe whose belief has the lowest loss on dev, of those with each ridge, and what they have there."""
    prior = class_prior(train.labels, multi_label=multi_label)
    probes = [fit_probe(train, ridge, multi_label=multi_label) for ridge in RIDGES]
    losses = []
    for weight, bias in probes:
        outputs = F.linear(dev.features.cpu(), weight, bias).to(dev.labels.device)
        losses.append(float(belief_loss(outputs, dev, multi_label=multi_label, prior=prior)))
    best = int(np.argmin(losses))
    return probes[best], {"ridge": RIDGES[best], "log_loss": dict(zip(map(str, RIDGES), losses, strict=True))}
