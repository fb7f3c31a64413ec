"""Classifiers by name: the protocol, the pooled ones, cost, weights files, saving."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import sosampler as so
from sosampler.classifiers.base import Classifier, VideoClassifier, to_channels_last
from sosampler.classifiers.spacetime import torchvision_names
from sosampler.classifiers.weights import read_state

# Small networks of each family; the large ones are built where a test is about them.
TINY = "timm:test_resnet.r160_in1k"
TINY_VIT = "timm:test_vit.r160_in1k"
FAMILIES = {
    "mean": (TINY, {}),
    "frameexit": (TINY, {"head": "frameexit"}),
    "transformer": (TINY_VIT, {}),
    "x3d": ("x3d_s", {"input_size": 64}),
    "torchvision": ("torchvision:r3d_18", {"input_size": 32}),
}


def frames(batch: int = 2, count: int = 3, height: int = 48, width: int = 64, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (batch, count, 3, height, width), generator=generator, dtype=torch.uint8)


def create(family: str, **more) -> Classifier:
    name, options = FAMILIES[family]
    torch.manual_seed(0)
    classifier = so.create_classifier(name, num_classes=7, **options, **more)
    for module in classifier.modules():  # statistics that are not those of a new network
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return classifier


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_protocol(family: str) -> None:
    classifier = create(family)
    assert isinstance(classifier, VideoClassifier)
    clip = frames()
    probabilities = classifier.clip_probs(clip)
    assert probabilities.shape == (2, 7)
    assert probabilities.dtype == torch.float32
    assert torch.allclose(probabilities.sum(-1), torch.ones(2), atol=1e-5)
    alone = classifier.frame_probs(clip)
    assert alone.shape == (2, 3, 7)
    for t in range(3):
        assert torch.allclose(alone[:, t], classifier.clip_probs(clip[:, t : t + 1]), atol=1e-5)
    assert not torch.allclose(alone[:, 0], alone[:, 1], atol=1e-5)
    assert classifier.gmacs(2) > classifier.gmacs(1) > 0
    assert not any(parameter.requires_grad for parameter in classifier.parameters())
    assert not classifier.training


@pytest.mark.parametrize("family", FAMILIES)
def test_save_and_load(family: str, tmp_path: Path) -> None:
    classifier = create(family, class_names=[f"class {number}" for number in range(7)], multi_label=True)
    so.save_classifier(classifier, tmp_path / "saved")
    again = so.create_classifier(tmp_path / "saved")
    assert again.settings() == classifier.settings()
    assert again.fingerprint() == classifier.fingerprint()
    assert torch.equal(again.clip_probs(frames()), classifier.clip_probs(frames()))
    assert again.class_names[3] == "class 3"
    assert again.multi_label


def test_mean_pooling_by_hand() -> None:
    classifier = create("mean")
    clip = frames(count=4)
    with torch.no_grad():
        logits = torch.stack([classifier.net(classifier.preprocessing(clip)[:, t]) for t in range(4)], 1)
    assert torch.allclose(classifier.clip_probs(clip), logits.mean(1).softmax(-1), atol=1e-6)
    assert torch.allclose(classifier.frame_features(clip), logits, atol=1e-5)
    assert torch.allclose(classifier.frame_probs(clip), logits.softmax(-1), atol=1e-5)


def test_frameexit_head_by_hand() -> None:
    classifier = create("frameexit")
    assert classifier.pooling == "max"
    linear, norm, _ = classifier.net.neck
    assert (linear.out_features, classifier.net.fc.in_features) == (4096, 4096)
    clip = frames(count=4)
    with torch.no_grad():
        backbone = classifier.net.backbone(classifier.preprocessing(clip).flatten(0, 1))
        scaled = (linear(backbone) - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias
        each = scaled.clamp(min=0).unflatten(0, (2, 4))
        expected = classifier.net.fc(each.max(1).values).softmax(-1)
    assert torch.allclose(classifier.clip_probs(clip), expected, atol=1e-5)
    assert classifier.frame_features(clip).shape == (2, 4, 4096)


@pytest.mark.parametrize("family", ["mean", "frameexit"])
def test_the_pool_of_a_subset_equals_its_clip(family: str) -> None:
    classifier = create(family)
    clip = frames(count=5)
    features = classifier.frame_features(clip)
    subsets = [[0], [1, 3], [0, 2, 4], [0, 1, 2, 3, 4]]
    for subset in subsets:
        assert torch.allclose(classifier.pool(features[:, subset]), classifier.clip_probs(clip[:, subset]), atol=1e-5)
    pairs = torch.tensor([[0, 1], [2, 3], [1, 4]])  # [S, N]: all at once
    at_once = classifier.pool(features[:, pairs])  # [B, S, C]
    assert at_once.shape == (2, 3, 7)
    assert torch.allclose(at_once[:, 2], classifier.clip_probs(clip[:, [1, 4]]), atol=1e-5)


# ---- cost


def on_meta(name: str, **options) -> Classifier:
    with torch.device("meta"):
        return so.create_classifier(name, **options)


def test_resnet50_has_four_gmacs_per_frame() -> None:
    for name in ("resnet50", "resnet50_v1"):
        assert on_meta(name).gmacs(1) == pytest.approx(4.09 if name == "resnet50" else 3.86, abs=0.01)
    six = on_meta("resnet50").gmacs(6)
    assert six == pytest.approx(6 * on_meta("resnet50").gmacs(1))
    assert on_meta("resnet50", input_size=112).gmacs(1) == pytest.approx(1.078, abs=0.001)


@pytest.mark.parametrize("model", torchvision_names())
def test_torchvision_gmacs_are_as_published(model: str) -> None:
    from torchvision.models import get_model_weights

    meta = get_model_weights(model).DEFAULT.meta
    classifier = on_meta(f"torchvision:{model}")
    assert classifier.gmacs(16) == pytest.approx(meta["_ops"], rel=1e-3)
    assert classifier.num_parameters == meta["num_params"]
    assert list(classifier.class_names) == meta["categories"]


def test_attention_is_counted() -> None:
    """12 tokens of width 8: four projections and two products of attention."""
    from sosampler.classifiers.base import count_gmacs

    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()

    class Self(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x, x, need_weights=False)[0]

    expected = 4 * 12 * 8 * 8 + 2 * 12 * 12 * 8
    assert count_gmacs(Self(), torch.zeros(1, 12, 8)) * 1e9 == pytest.approx(expected)


# ---- names and options


def test_list_classifiers_by_pattern() -> None:
    any_precision = ["any_precision_resnet50", "any_precision_resnet50_v1"]
    assert so.list_classifiers("*50*") == ["resnet50", "resnet50_v1", *any_precision, "slowonly_r50"]
    names = so.list_classifiers()
    assert {"resnet50", "timesformer", "slowonly_r50", "x3d_s", "i3d", "torchvision:mvit_v2_s"} <= set(names)
    assert "timm:mobilenetv2_100" in so.list_classifiers("timm:mobilenetv2*")
    assert so.list_classifiers("nothing*") == []


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (None, {}, "not the folder of a saved classifier"),
        (Path("nowhere"), {}, "not the folder of a saved classifier"),
        ("resnet51", {}, "classifier 'resnet51' is unknown; choose one of resnet50"),
        ("timm:no_such_net", {}, "timm has no network 'no_such_net'"),
        ("torchvision:resnet50", {}, "choose one of: mc3_18"),
        ("x3d_s", {"head": "mean"}, "no option 'head'; choose from: none"),
        (TINY, {"temporal": "linear"}, "choose from: head, stride_on_1x1, drop_rate"),
        (TINY, {"head": "median"}, "mean, frameexit"),
        (TINY, {"num_classes": 0}, "num_classes=0"),
        (TINY, {"num_classes": 3, "class_names": ["a", "b"]}, "give one of the two"),
        (TINY, {"class_names": "no/such/file.txt"}, "no such file"),
        (TINY_VIT, {"stride_on_1x1": True}, "bottleneck ResNets"),
        (TINY, {"precision": "int8"}, "float32, bfloat16, float16"),
    ],
)
def test_unknown_names_and_options(name: str, options: dict, message: str) -> None:
    with pytest.raises(so.InvalidArgument, match=message):
        so.create_classifier(name, **options)


def test_class_names_from_a_file_and_from_the_data_set(tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("ant\nbee\n\ncat\n", encoding="utf-8")
    assert so.create_classifier(TINY, class_names=tmp_path / "names.txt").class_names == ("ant", "bee", "cat")
    assert so.create_classifier(TINY).class_names[:2] == ("tench", "goldfish")
    assert so.create_classifier(TINY, num_classes=3).class_names == ("0", "1", "2")


def test_stride_on_the_first_convolution() -> None:
    plain, first = on_meta("resnet50").net, on_meta("resnet50_v1").net
    for stage in ("layer2", "layer3", "layer4"):
        assert (getattr(plain, stage)[0].conv1.stride, getattr(plain, stage)[0].conv2.stride) == ((1, 1), (2, 2))
        assert (getattr(first, stage)[0].conv1.stride, getattr(first, stage)[0].conv2.stride) == ((2, 2), (1, 1))
    assert first.layer1[0].conv1.stride == (1, 1)


def test_precision_is_used() -> None:
    classifier = create("mean")
    exact = classifier.clip_probs(frames())
    classifier.precision = "float16"
    rough = classifier.clip_probs(frames())
    assert not torch.equal(exact, rough)
    assert torch.allclose(exact, rough, atol=0.05)


def test_fingerprint_changes_with_everything_that_affects_outputs() -> None:
    base = create("mean")
    same = create("mean", class_names=list("abcdefg"))
    assert same.fingerprint() == base.fingerprint()
    others = [create("mean", input_size=128), create("mean", multi_label=True), create("frameexit")]
    changed = create("mean")
    with torch.no_grad():
        next(changed.parameters()).flatten()[0] += 1e-3
    prints = {base.fingerprint(), *(other.fingerprint() for other in [*others, changed])}
    assert len(prints) == 5


# ---- weights files


def tiny_state(classes: int = 7) -> dict[str, Tensor]:
    torch.manual_seed(1)
    net = so.create_classifier(TINY, num_classes=classes).net
    return {key: tensor.clone() for key, tensor in net.state_dict().items()}


def write(state: dict, path: Path) -> Path:
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return path


def half(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.half() if tensor.is_floating_point() else tensor for key, tensor in state.items()}


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("w.safetensors", lambda state: state),
        ("half.safetensors", half),
        ("w.pth", lambda state: state),
        ("nested.pt", lambda state: {"epoch": 3, "state_dict": state}),
        ("video.pyth", lambda state: {"model_state": state}),
        ("parallel.pth", lambda state: {f"module.{key}": tensor for key, tensor in state.items()}),
    ],
)
def test_weights_of_every_kind_of_file(name: str, wrap, tmp_path: Path) -> None:
    state = tiny_state()
    classifier = so.create_classifier(TINY, weights=write(wrap(state), tmp_path / name))
    assert classifier.num_classes == 7  # from the file
    assert not classifier.fresh_head
    for key, tensor in classifier.net.state_dict().items():
        assert tensor.dtype == (torch.float32 if tensor.is_floating_point() else tensor.dtype)
        assert torch.allclose(tensor, state[key], atol=2e-3)


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    state = tiny_state()
    head = next(key for key in state if key.endswith("fc.weight"))

    def message(changed: dict[str, Tensor], **options) -> str:
        with pytest.raises(so.WeightsError) as caught:
            so.create_classifier(TINY, weights=write(changed, tmp_path / "w.safetensors"), **options)
        assert str(tmp_path / "w.safetensors") in str(caught.value)
        return str(caught.value)

    missing = message({key: tensor for key, tensor in state.items() if key != "conv1.0.weight"})
    assert "1 missing: conv1.0.weight" in missing
    assert "1 unknown: conv9.weight" in message({**state, "conv9.weight": torch.zeros(1)})
    shape = list(state["conv1.0.weight"].shape)
    assert f"conv1.0.weight [1, 2] in the file, {shape} here" in message({**state, "conv1.0.weight": torch.zeros(1, 2)})
    fewer = message(state, num_classes=5)
    assert f"{head} [7," in fewer
    assert "new_head=True" in fewer


def test_new_head_loads_the_rest(tmp_path: Path) -> None:
    state = tiny_state()
    path = write(state, tmp_path / "w.safetensors")
    classifier = so.create_classifier(TINY, num_classes=5, weights=path, new_head=True)
    assert classifier.num_classes == 5
    assert classifier.fresh_head
    assert torch.equal(classifier.net.state_dict()["conv1.0.weight"], state["conv1.0.weight"])
    assert so.create_classifier(TINY, num_classes=5, weights=path, new_head=None).fresh_head
    assert not so.create_classifier(TINY, num_classes=7, weights=path, new_head=None).fresh_head
    pooled = so.create_classifier(TINY, num_classes=5, weights=path, new_head=True, head="frameexit")
    assert torch.equal(pooled.net.backbone.state_dict()["conv1.0.weight"], state["conv1.0.weight"])


class Evil:
    def __reduce__(self):
        return (exec, ("raise SystemExit('code was run')",))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: torch.save({"state_dict": Evil()}, path), "could run code"),
        (lambda path: path.write_bytes(b"not weights at all"), "is damaged, or holds|not written by torch.save"),
        (lambda path: path.write_bytes(b""), "not written by torch.save"),
        (lambda path: torch.save([torch.zeros(1)], path), "a list but must hold a state dict"),
        (lambda path: torch.save({"epoch": 3}, path), "holds no tensors"),
        (lambda path: None, "no such file"),
    ],
)
def test_bad_torch_files(make, message: str, tmp_path: Path) -> None:
    make(tmp_path / "w.pth")
    with pytest.raises(so.WeightsError, match=message):
        so.create_classifier(TINY, weights=tmp_path / "w.pth")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_damaged_files_raise_weights_error(suffix: str, tmp_path: Path) -> None:
    import random

    whole = write({"a": torch.arange(50.0), "b": torch.ones(3, 3)}, tmp_path / f"whole{suffix}").read_bytes()
    rng = random.Random(0)
    path = tmp_path / f"damaged{suffix}"
    named = 0
    for _ in range(150):
        data = bytearray(whole[: rng.randrange(len(whole))] if rng.random() < 0.3 else whole)
        for _ in range(rng.randrange(1, 30)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data) if rng.random() < 0.8 else rng.randbytes(rng.randrange(1, 300)))
        try:
            read_state(path)  # numbers may have changed without anybody noticing
        except so.WeightsError as error:
            named += str(path) in str(error)
    assert named > 50


def test_truncated_safetensors(tmp_path: Path) -> None:
    path = write(tiny_state(), tmp_path / "w.safetensors")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(so.WeightsError, match="not a complete safetensors file"):
        so.create_classifier(TINY, weights=path)


def test_bad_folders(tmp_path: Path) -> None:
    folder = so.save_classifier(create("mean"), tmp_path / "saved")
    with pytest.raises(so.InvalidArgument, match="with its own num_classes"):
        so.create_classifier(folder, num_classes=3)
    (folder / "config.json").write_text('{"model_type": "timesformer"}')
    with pytest.raises(so.InvalidArgument, match="give hf:"):
        so.create_classifier(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(so.WeightsError, match="is not the JSON"):
        so.create_classifier(folder)
    (folder / "config.json").write_text('{"kind": "sosampler classifier", "name": "x3d_s"}')
    with pytest.raises(so.WeightsError, match="'options' is missing or wrong"):
        so.create_classifier(folder)


def test_a_wrapped_network_cannot_be_loaded_by_name(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2))
    so.save_classifier(so.wrap_classifier(net, input_size=8, name="mine"), tmp_path / "saved")
    with pytest.raises(so.InvalidArgument, match="wrapped network 'mine', which only your own code can build"):
        so.create_classifier(tmp_path / "saved")


def test_another_input_size_for_a_transformer(tmp_path: Path) -> None:
    state = {
        key: tensor.clone() for key, tensor in so.create_classifier(TINY_VIT, num_classes=4).net.state_dict().items()
    }
    path = write(state, tmp_path / "w.safetensors")
    classifier = so.create_classifier(TINY_VIT, weights=path, input_size=96)
    assert classifier.clip_probs(frames()).shape == (2, 4)
    again = so.create_classifier(so.save_classifier(classifier, tmp_path / "saved"))
    trained_at_96 = so.create_classifier(TINY_VIT, weights=tmp_path / "saved/model.safetensors", input_size=96)
    assert trained_at_96.fingerprint() == classifier.fingerprint()
    assert torch.equal(again.clip_probs(frames()), classifier.clip_probs(frames()))


@pytest.mark.parametrize("family", ["mean", "x3d"])
def test_channels_last_weights_do_not_change_outputs(family: str) -> None:
    classifier = create(family)
    clips = torch.randint(0, 256, (1, 4, 3, 64, 64), dtype=torch.uint8)
    before = classifier.clip_probs(clips)
    changed = to_channels_last(classifier.net)
    assert all(tensor.ndim == 4 for tensor in changed)
    assert bool(changed) == (family == "mean")
    assert torch.allclose(classifier.clip_probs(clips), before, atol=1e-6)


def test_slowonly_starts_from_a_2d_network(tmp_path: Path) -> None:
    torch.manual_seed(0)
    flat = so.create_classifier("resnet50", num_classes=5)
    path = write({key: tensor.clone() for key, tensor in flat.net.state_dict().items()}, tmp_path / "w.safetensors")
    video = so.create_classifier("slowonly_r50", weights=path, input_size=64)
    assert video.num_classes == 5
    assert video.preprocessing.mean == flat.preprocessing.mean
    clip = frames(batch=1, count=1)
    flat.preprocessing = video.preprocessing
    assert torch.allclose(video.clip_probs(clip), flat.clip_probs(clip), atol=1e-4)
