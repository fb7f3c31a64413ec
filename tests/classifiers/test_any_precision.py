"""The any-precision ResNet: its quantisers by hand, its widths against the plain network, and its training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import sosampler as so
from sosampler.classifiers.any_precision import (
    WIDTHS,
    AnyPrecisionClassifier,
    AnyPrecisionConv,
    QuantisedActivation,
    SwitchableNorm,
    quantised_weight,
    weight_codes,
)
from sosampler.classifiers.base import to_channels_last
from sosampler.errors import InvalidArgument
from sosampler.training.classifier_data import ClassifierRecipe
from sosampler.training.distributed import Processes
from sosampler.training.loop import LoopOptions
from sosampler.training.train_classifier import ClassifierLoop
from tests.factories import make_plain_bank

PLAIN, TINY = "timm:test_resnet", "any_precision:test_resnet"
COLOURS = ((200, 70, 70), (70, 200, 70), (70, 70, 200))


def weights(seed: int = 0, scale: float = 0.3) -> Tensor:
    return scale * torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(seed))


def frames(batch: int = 2, count: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (batch, count, 3, 40, 48), generator=generator, dtype=torch.uint8)


def plain_file(folder: Path, num_classes: int = 5) -> Path:
    """A plain network with statistics that are not those of a new one."""
    torch.manual_seed(0)
    classifier = so.create_classifier(PLAIN, num_classes=num_classes, input_size=32)
    for module in classifier.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)  # the last one of each block begins at 0
    return so.save_classifier(classifier, folder / "plain") / "model.safetensors"


def tiny(folder: Path, **options) -> AnyPrecisionClassifier:
    classifier = so.create_classifier(TINY, weights=plain_file(folder), input_size=32, **options)
    assert isinstance(classifier, AnyPrecisionClassifier)
    return classifier


# ---- quantisers


@pytest.mark.parametrize("bits", [4, 2])
def test_weights_have_the_levels_of_their_width(bits: int) -> None:
    weight = weights()
    values = quantised_weight(weight, bits)
    assert 2 ** (bits - 1) < len(values.unique()) <= 2**bits
    # By hand, from the integers.
    bounded = weight.tanh()
    codes = torch.round((bounded / (2 * bounded.abs().max()) + 0.5) * 15)
    assert codes.min() == 0 or codes.max() == 15  # the largest weight is at one end
    expected = codes / 15
    if bits == 2:
        dropped = torch.floor(codes / 4) * 4 / 15
        expected = dropped * (codes.mean() / 15 / dropped.mean())
    assert torch.allclose(values, 2 * expected - 1, atol=1e-6)


def test_dropping_bits_of_the_four_bit_code_gives_the_two_bit_code() -> None:
    four, two = weight_codes(weights(), 4), weight_codes(weights(), 2)
    assert len(four.unique()) > 10
    assert torch.equal(two, (four.long() >> 2).to(two.dtype))


def test_dropping_bits_keeps_the_mean() -> None:
    weight = weights() + 0.1
    means = [float(quantised_weight(weight, bits).mean()) for bits in (4, 2)]
    assert means[0] == pytest.approx(means[1], abs=1e-6)
    assert abs(means[0]) > 0.05


@pytest.mark.parametrize("bits", [4, 2])
def test_the_gradient_of_weights_passes_the_rounding(bits: int) -> None:
    weight = weights().requires_grad_()
    quantised_weight(weight, bits).sum().backward()
    with torch.no_grad():
        largest = weight.tanh().abs().max()
        expected = (1 - weight.tanh() ** 2) / largest  # of 2 (tanh(w) / (2 max) + 1/2) - 1
    assert torch.allclose(weight.grad, expected, atol=1e-6)


def test_weights_of_zero_stay_finite() -> None:
    for bits in (4, 2):
        assert quantised_weight(torch.zeros(2, 2), bits).isfinite().all()


def test_activations_by_hand() -> None:
    x = torch.tensor([-1.0, 0.0, 0.3, 0.34, 1.0, 1.49, 1.5, 1.51, 9.0], requires_grad=True)
    clip = torch.tensor(1.5, requires_grad=True)
    values = QuantisedActivation.apply(x, clip, 2)  # steps of 0.5
    assert values.tolist() == pytest.approx([0, 0, 0.5, 0.5, 1.0, 1.5, 1.5, 1.5, 1.5])
    values.backward(torch.arange(1.0, 10.0))
    assert x.grad.tolist() == [0, 0, 3, 4, 5, 6, 0, 0, 0]
    assert clip.grad.item() == 7 + 8 + 9  # at the clip and above


@pytest.mark.parametrize("bits", [4, 2])
def test_activations_have_the_levels_of_their_width(bits: int) -> None:
    values = QuantisedActivation.apply(torch.linspace(-1, 3, 1000), torch.tensor(2.0), bits)
    assert len(values.unique()) == 2**bits
    assert (values.min(), values.max()) == (0, 2)


def test_activations_keep_half_precision() -> None:
    x = torch.rand(5, dtype=torch.bfloat16, requires_grad=True)
    clip = torch.tensor(0.5, requires_grad=True)
    values = QuantisedActivation.apply(x, clip, 4)
    values.sum().backward()
    assert values.dtype == x.grad.dtype == torch.bfloat16
    assert clip.grad.dtype == torch.float32


# ---- the network


def test_32_bits_are_the_plain_network(tmp_path: Path) -> None:
    classifier = tiny(tmp_path)
    plain = so.create_classifier(tmp_path / "plain")
    assert torch.equal(classifier.frame_features(frames()), plain.frame_features(frames()))
    assert not torch.allclose(classifier.with_bits(4).frame_features(frames()), plain.frame_features(frames()))


def test_what_is_quantised(tmp_path: Path) -> None:
    classifier = tiny(tmp_path, bits=2)
    of_stages = [name for name, layer in classifier.net.named_modules() if isinstance(layer, AnyPrecisionConv)]
    plain = [name for name, layer in classifier.net.named_modules() if isinstance(layer, nn.Conv2d)]
    assert {name.split(".")[0] for name in of_stages} == {"layer1", "layer2", "layer3", "layer4"}
    assert {name.split(".")[0] for name in plain} == {"conv1"}
    assert "layer2.0.downsample.1" in of_stages
    assert type(classifier.net.fc) is nn.Linear
    assert not any(isinstance(layer, nn.BatchNorm2d) for layer in classifier.net.layer1.children())
    # The input and the weights of every such convolution have few levels.
    seen: list[tuple[int, int]] = []
    real = F.conv2d

    def watched(x: Tensor, weight: Tensor, *rest) -> Tensor:
        seen.append((len(x.unique()), len(weight.unique())))
        return real(x, weight, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "conv2d", watched)
        classifier.clip_probs(frames(1, 1))
    assert len(seen) == len(of_stages) + 3  # the stem's three are torch's own layers
    assert all(max(levels) <= 4 for levels in seen[3:])
    assert all(min(levels) > 4 for levels in seen[:3])


def test_all_widths_cost_the_same_multiply_adds(tmp_path: Path) -> None:
    classifier = tiny(tmp_path)
    costs = {classifier.with_bits(bits).gmacs(1) for bits in WIDTHS}
    assert costs == {so.create_classifier(tmp_path / "plain").gmacs(1)}


def test_switching_the_width_switches_the_batch_norms(tmp_path: Path) -> None:
    classifier = tiny(tmp_path)
    before = {key: tensor.clone() for key, tensor in classifier.net.state_dict().items()}
    classifier.set_bits(4)
    classifier.train()
    classifier(classifier.preprocessing(frames()))
    changed = {key for key, tensor in classifier.net.state_dict().items() if not torch.equal(tensor, before[key])}
    norms = [name for name, layer in classifier.net.named_modules() if isinstance(layer, SwitchableNorm)]
    assert {key.rpartition(".")[0] for key in changed} == {f"{name}.4" for name in norms}
    classifier.eval()
    answers = {bits: classifier.with_bits(bits).clip_probs(frames()) for bits in WIDTHS}
    with torch.no_grad():
        classifier.net.layer4[0].bn2["4"].bias += 1
        classifier.net.layer4[0].conv2.clips["2"] *= 0.5
    after = {bits: classifier.with_bits(bits).clip_probs(frames()) for bits in WIDTHS}
    assert torch.equal(answers[32], after[32])
    assert not torch.allclose(answers[4], after[4])
    assert not torch.allclose(answers[2], after[2])


def test_a_width_is_a_classifier_of_its_own(tmp_path: Path) -> None:
    classifier = tiny(tmp_path)
    low = classifier.with_bits(4)
    assert (classifier.bits, low.bits) == (32, 4)
    assert len({classifier.with_bits(bits).fingerprint() for bits in WIDTHS}) == 3
    weight, same = classifier.net.layer1[0].conv1.weight, low.net.layer1[0].conv1.weight
    assert weight is not same
    assert weight.data_ptr() == same.data_ptr()
    low.to(torch.float64)  # as moving it to a device does
    assert {tensor.dtype for tensor in classifier.net.state_dict().values()} == {torch.float32, torch.int64}


def test_saved_and_loaded_at_any_width(tmp_path: Path) -> None:
    classifier = tiny(tmp_path)
    so.save_classifier(classifier, tmp_path / "saved")
    for bits in WIDTHS:
        again = so.create_classifier(tmp_path / "saved", bits=bits)
        assert torch.equal(again.clip_probs(frames()), classifier.with_bits(bits).clip_probs(frames()))
        assert again.fingerprint() == classifier.with_bits(bits).fingerprint()
    so.save_classifier(classifier.with_bits(2), tmp_path / "low")
    assert so.create_classifier(tmp_path / "low").fingerprint() == classifier.with_bits(2).fingerprint()
    with pytest.raises(InvalidArgument, match="has one precision"):
        so.create_classifier(tmp_path / "plain", bits=4)


def test_features_of_three_widths_in_a_bank(tmp_path: Path) -> None:
    bank, classifier = make_plain_bank(tmp_path / "bank"), tiny(tmp_path)
    for bits in WIDTHS:
        bank = so.add_features(bank, classifier.with_bits(bits), name=f"{bits}bit", precision="float32")
    sets = [bank.features(f"{bits}bit") for bits in WIDTHS]
    assert [stored.width for stored in sets] == [96] * 3
    assert {stored.gmacs for stored in sets} == {classifier.gmacs(1)}
    images = torch.from_numpy(bank[0].frames().transpose(0, 3, 1, 2).copy())[None]
    for bits, stored in zip(WIDTHS, sets, strict=True):
        logits = torch.from_numpy(stored[0].copy()) @ classifier.net.fc.weight.T + classifier.net.fc.bias
        assert torch.allclose(logits, classifier.with_bits(bits).frame_features(images)[0], atol=1e-4)


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("any_precision:mobilenetv2_100", {}, "must be a ResNet"),
        ("any_precision:no_such_net", {}, "no_such_net"),
        (TINY, {"bits": 8}, "bits"),
        (TINY, {"clip": 0.0}, "clip"),
        (TINY, {"head": "frameexit"}, "no option 'head'"),
        (PLAIN, {"bits": 4}, "no option 'bits'"),
    ],
)
def test_it_refuses(name: str, options: dict, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        so.create_classifier(name, num_classes=2, **options)


# ---- training


@pytest.mark.parametrize("multi_label", [False, True])
def test_the_loss_is_that_of_every_width_and_of_imitating_32_bits(tmp_path: Path, multi_label: bool) -> None:
    classifier = tiny(tmp_path, multi_label=multi_label)
    to_channels_last(classifier.net)
    recipe = ClassifierRecipe(lr=0.01, label_smoothing=0.0, weight_decay=1e-4, optimizer="sgd", batch_size=2)
    options = LoopOptions(1, 0.01, 0, Processes("cpu", alone=True), print)
    loop = ClassifierLoop(classifier, recipe, [None], None, options)  # type: ignore[arg-type]
    clips = frames()[:, :, :, :32, :32]
    targets = torch.eye(5)[[1, 3]]
    loss, _ = loop.loss((clips, targets, torch.zeros(2, 3)))
    logits = [classifier.with_bits(bits)(classifier.preprocessing.normalised(clips)) for bits in WIDTHS]
    taught = logits[0].sigmoid() if multi_label else logits[0].softmax(-1)
    loss_of = F.binary_cross_entropy_with_logits if multi_label else F.cross_entropy
    expected = sum(loss_of(scores, targets) for scores in logits) + sum(loss_of(low, taught) for low in logits[1:])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    assert classifier.bits == 32
    # 32 bits do not learn from the lower widths.
    alone = loss_of(classifier(classifier.preprocessing.normalised(clips)), targets)
    bias = classifier.net.layer4[0].bn2["32"].bias
    assert torch.allclose(bias.grad, torch.autograd.grad(alone, bias)[0], atol=1e-6)
    for name, parameter in classifier.named_parameters():
        assert parameter.grad is not None, name
    groups = {group["params"][0].ndim: group for group in loop.optimizer.param_groups[:2]}
    assert groups[1]["weight_decay"] == 0
    four, two = loop.optimizer.param_groups[2:]
    clipped = [layer for layer in classifier.net.modules() if isinstance(layer, AnyPrecisionConv)]
    assert [id(clip) for clip in four["params"]] == [id(layer.clips["4"]) for layer in clipped]
    assert (four["initial_lr"], four["weight_decay"]) == (pytest.approx(0.1), 5e-4)
    assert (two["initial_lr"], two["weight_decay"]) == (pytest.approx(0.01), 6e-2)
    every = [id(weight) for group in loop.optimizer.param_groups for weight in group["params"]]
    assert sorted(every) == sorted(id(weight) for weight in classifier.parameters())


def test_weights_with_another_stride_are_refused(tmp_path: Path) -> None:
    data = pictures(tmp_path / "data")
    plain_file(tmp_path, num_classes=3)
    with pytest.raises(InvalidArgument, match="stride on another convolution"):
        so.train_classifier(
            data,
            TINY,
            out=tmp_path / "run",
            weights=tmp_path / "plain" / "model.safetensors",
            options={"stride_on_1x1": True},
            epochs=1,
        )


def pictures(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    for number, colour in enumerate(COLOURS):
        (folder / f"class{number}").mkdir(parents=True)
        for image in range(20):
            noisy = (rng.normal(0, 40, (40, 40, 3)) + np.array(colour)).clip(0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(folder / f"class{number}" / f"{image}.png")
    return folder


def test_low_widths_learn_from_a_float_checkpoint(tmp_path: Path) -> None:
    data = pictures(tmp_path / "data")
    quick = {"batch_size": 9, "input_size": 32, "workers": 0, "lr": 0.02, "device": "cpu", "dev_share": 0.25}
    so.train_classifier(data, PLAIN, out=tmp_path / "float", epochs=3, **quick)
    trained = so.train_classifier(
        data, TINY, out=tmp_path / "any", weights=tmp_path / "float" / "model.safetensors", epochs=6, **quick
    )
    assert not trained.result["fresh_head"]
    again = so.create_classifier(tmp_path / "any")
    assert isinstance(again, AnyPrecisionClassifier)
    assert again.fingerprint() == trained.result["fingerprint"]
    log = (tmp_path / "any" / "log.jsonl").read_text().splitlines()
    assert all(f'"dev_top1_{bits}bit"' in line for line in log for bits in WIDTHS)
    assert trained.result["dev"] > 0.8  # the mean over widths
