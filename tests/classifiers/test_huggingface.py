"""Hugging Face video classifiers, against transformers itself."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sosampler.classifiers.huggingface import (
    HuggingFaceClassifier,
    build_huggingface,
    config_from_dict,
    config_to_dict,
    default_preprocessing,
    processor_preprocessing,
)
from sosampler.classifiers.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing, Triple
from sosampler.errors import InvalidArgument, MissingDependency, WeightsError
from tests.classifiers.hf_networks import CLASSES, CONFIGS, SIZE, TABLE, build, frames, plain, save, transformers

FIXED = ("videomae", "vivit")


class TestOtherNetworks:
    @pytest.mark.parametrize("kind", FIXED)
    def test_fixed_length_repeats_evenly_with_a_warning(self, kind: str, caplog: pytest.LogCaptureFixture) -> None:
        classifier = build(kind)
        video = frames(2, 5)
        with caplog.at_level(logging.WARNING, logger="sosampler"):
            actual = classifier.clip_probs(video)
        assert "clips of 5 frames are repeated evenly to the 8" in caplog.text
        expected = plain(classifier, video[:, [0, 0, 1, 2, 2, 3, 4, 4]])
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        assert "takes exactly 8 frames" in classifier.notes[0]

    @pytest.mark.parametrize("kind", FIXED)
    def test_clips_of_the_network_s_length_are_not_changed(self, kind: str) -> None:
        classifier = build(kind)
        video = frames(2, 8)
        torch.testing.assert_close(classifier.clip_probs(video), plain(classifier, video), atol=1e-5, rtol=1e-5)
        with pytest.raises(InvalidArgument, match="at most 8 frames per clip but 9"):
            classifier.clip_probs(frames(1, 9))

    @pytest.mark.parametrize(("count", "taken"), [(1, [0, 0]), (2, [0, 1]), (3, [0, 1, 1, 2]), (10, list(range(10)))])
    def test_vjepa2_takes_any_multiple_of_its_tubelet(self, count: int, taken: list[int]) -> None:
        classifier = build("vjepa2")
        video = frames(1, count)
        places = classifier.length.positions(count, "net")
        assert (places or list(range(count))) == taken
        torch.testing.assert_close(
            classifier.clip_probs(video), plain(classifier, video[:, taken]), atol=1e-5, rtol=1e-5
        )

    def test_frames_and_tubelets_must_agree(self) -> None:
        with pytest.raises(InvalidArgument, match="num_frames=7 must be a multiple"):
            build("videomae", num_frames=7)


class TestInput:
    @pytest.mark.parametrize("kind", CONFIGS)
    def test_other_input_sizes_are_refused(self, kind: str) -> None:
        classifier = build(kind)
        classifier.preprocessing = classifier.preprocessing.with_size(48)
        with pytest.raises(InvalidArgument, match=r"frames of 48x48 but its position embeddings are for 32x32"):
            classifier.clip_probs(frames(1, 4))

    def test_channels(self) -> None:
        classifier = build()
        with pytest.raises(InvalidArgument, match="channels are last"):
            classifier.clip_probs(frames(1, 2).movedim(2, -1))
        with pytest.raises(InvalidArgument, match="takes 1 channels but must take 3"):
            build(num_channels=1)

    @pytest.mark.parametrize(
        ("kind", "size", "resize", "mean", "std"),
        [
            ("timesformer", 224, 224, (0.45,) * 3, (0.225,) * 3),
            ("videomae", 224, 224, IMAGENET_MEAN, IMAGENET_STD),
            ("vivit", 224, 256, (0.75,) * 3, (0.25,) * 3),
            ("vjepa2", 256, 292, IMAGENET_MEAN, IMAGENET_STD),
        ],
    )
    def test_without_a_processor_file(self, kind: str, size: int, resize: int, mean: Triple, std: Triple) -> None:
        expected = Preprocessing(size=(size, size), resize=resize, mean=mean, std=std)
        assert default_preprocessing(kind, (size, size)) == expected

    def test_an_unknown_model_type_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        assert default_preprocessing("new", (64, 64)).mean == IMAGENET_MEAN
        assert "its normalisation is unknown" in caplog.text

    @pytest.mark.parametrize(
        ("kind", "changes"),
        [
            ("VideoMAEVideoProcessor", {"image_mean": [0.45] * 3, "image_std": [0.225] * 3}),
            ("VideoMAEVideoProcessor", {"do_normalize": False, "resample": 3}),
            ("VideoMAEVideoProcessor", {"size": {"height": 32, "width": 32}, "do_center_crop": False}),
            ("VivitVideoProcessor", {}),
            ("TimesformerVideoProcessor", {"do_rescale": False, "image_mean": [110.0] * 3, "image_std": [60.0] * 3}),
            ("VJEPA2VideoProcessor", {}),
        ],
    )
    def test_the_processor_of_transformers_agrees(self, kind: str, changes: dict[str, Any]) -> None:
        settings = {"size": {"shortest_edge": 40}, "crop_size": {"height": SIZE, "width": SIZE}, **changes}
        processor = getattr(transformers, kind)(**settings)
        video = frames(1, 2, size=70)[..., :50]
        data = processor(video[0], return_tensors="pt")
        expected = data.get("pixel_values", data.get("pixel_values_videos"))
        ours = processor_preprocessing(processor.to_dict(), (SIZE, SIZE), where="here")
        actual = ours(video)
        assert actual.shape == expected.shape
        level = 1 / 255 / min(ours.std)  # a grey level, after normalisation
        assert (actual - expected).abs().max() < 1.5 * level
        assert (actual - expected).abs().mean() < 0.1 * level

    def test_the_file_overrides_vivit_s_offset(self) -> None:
        data = transformers.VivitVideoProcessor(offset=False, rescale_factor=1 / 255).to_dict()
        actual = processor_preprocessing(data, (224, 224), where="here")
        assert (actual.mean, actual.std) == ((0.5,) * 3, (0.5,) * 3)

    def test_the_network_s_size_overrides_the_file(self, caplog: pytest.LogCaptureFixture) -> None:
        data = transformers.VivitVideoProcessor().to_dict()
        actual = processor_preprocessing({**data, "resample": 0}, (448, 448), where="here")
        assert (actual.size, actual.resize, actual.interpolation) == ((448, 448), 512, "bilinear")
        assert "the network takes (448, 448)" in caplog.text
        assert "resample 0" in caplog.text


class TestCheckpoints:
    @pytest.mark.parametrize("kind", CONFIGS)
    def test_a_saved_folder_gives_the_same_probabilities(
        self, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        saved = save(tmp_path, kind)
        capfd.readouterr()
        actual = build_huggingface(tmp_path)
        assert capfd.readouterr() == ("", "")
        video = frames(2, 4)
        assert torch.equal(actual.clip_probs(video), saved.clip_probs(video))
        assert actual.name == f"hf:{tmp_path.name}"
        assert type(actual) is HuggingFaceClassifier
        assert actual.class_names == ("0", "1", "2", "3", "4")
        assert not any(parameter.requires_grad for parameter in actual.parameters())

    @pytest.mark.parametrize("kind", CONFIGS)
    def test_options_rebuild_it(self, kind: str) -> None:
        first = build(kind, temporal="nearest" if kind == "timesformer" else "linear")
        options = json.loads(json.dumps(first.options))
        again = build_huggingface(config_from_dict(options.pop("hf_config")), **options)
        again.net.load_state_dict(first.net.state_dict())
        video = frames(1, 3)
        assert torch.equal(again.clip_probs(video), first.clip_probs(video))
        assert (again.name, again.options, again.preprocessing) == (first.name, first.options, first.preprocessing)
        assert again.fingerprint() == first.fingerprint()

    def test_class_names_and_origin_do_not_change_the_fingerprint(self, tmp_path: Path) -> None:
        names = {number: f"class {number}" for number in range(CLASSES)}
        first = save(tmp_path / "one" / "net", id2label=names)
        second = save(tmp_path / "two" / "net")
        one, two = build_huggingface(tmp_path / "one" / "net"), build_huggingface(str(tmp_path / "two" / "net"))
        assert one.fingerprint() == two.fingerprint()
        assert one.class_names == tuple(names.values()) == first.class_names
        assert two.class_names == ("0", "1", "2", "3", "4") == second.class_names

    def test_weights_in_half_precision_become_float32(self, tmp_path: Path) -> None:
        build().net.half().save_pretrained(tmp_path)
        actual = build_huggingface(tmp_path)
        assert {parameter.dtype for parameter in actual.parameters()} == {torch.float32}

    def test_the_state_dict_is_the_published_one(self) -> None:
        net = transformers.AutoModelForVideoClassification.from_config(CONFIGS["timesformer"]())
        classifier = build()
        assert list(classifier.net.state_dict()) == list(net.state_dict())
        assert all(f"{head}.weight" in net.state_dict() for head in classifier.head_names())

    def test_several_labels(self) -> None:
        classifier = build(problem_type="multi_label_classification")
        assert classifier.multi_label
        assert classifier.clip_probs(frames(1, 2)).sum() != pytest.approx(1)

    def test_the_processor_file_is_read(self, tmp_path: Path) -> None:
        save(tmp_path)
        data = {"image_processor_type": "VideoMAEImageProcessor", "image_mean": [0.4] * 3, "image_std": [0.2] * 3}
        sizes = {"size": {"shortest_edge": 36}, "crop_size": {"height": 32, "width": 32}, "resample": 3}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**data, **sizes}))
        actual = build_huggingface(tmp_path).preprocessing
        assert actual == Preprocessing((32, 32), 36, (0.4,) * 3, (0.2,) * 3, "bicubic")
        (tmp_path / "preprocessor_config.json").write_text("{")
        with pytest.raises(InvalidArgument, match="its processor file cannot be read"):
            build_huggingface(tmp_path)

    def test_the_processor_file_is_read_by_versions_without_the_video_processor(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        save(tmp_path, "vivit")
        transformers.VivitImageProcessor(
            size={"shortest_edge": 36}, crop_size={"height": 32, "width": 32}
        ).save_pretrained(tmp_path)
        newest = build_huggingface(tmp_path).preprocessing
        assert newest == Preprocessing((32, 32), 36, (0.75,) * 3, (0.25,) * 3)

        def unknown(*_: Any, **__: Any) -> None:
            raise ValueError("Unrecognized video processor")

        monkeypatch.setattr(transformers.AutoVideoProcessor, "from_pretrained", unknown)
        assert build_huggingface(tmp_path).preprocessing == newest

    def test_other_classes_need_a_new_head(self, tmp_path: Path) -> None:
        saved = save(tmp_path, id2label={number: f"class {number}" for number in range(CLASSES)})
        with pytest.raises(InvalidArgument, match=r"has 5 classes but num_classes=7; .*new_head=True"):
            build_huggingface(tmp_path, num_classes=7)
        actual = build_huggingface(tmp_path, num_classes=7, new_head=True)
        assert actual.class_names == tuple("0123456")
        assert actual.clip_probs(frames(1, 2)).shape == (1, 7)
        old, new = saved.net.state_dict(), actual.net.state_dict()
        assert all(torch.equal(old[key], new[key]) for key in old if not key.startswith("classifier."))
        fresh = build_huggingface(tmp_path, num_classes=CLASSES, new_head=True)
        assert not torch.equal(fresh.net.classifier.weight, saved.net.classifier.weight)
        assert build_huggingface(tmp_path, num_classes=CLASSES).num_classes == CLASSES

    def test_a_trunk_without_a_head(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        build("videomae").net.videomae.save_pretrained(tmp_path)
        with pytest.raises(WeightsError, match=r"do not fill the network; .*missing: classifier\.bias"):
            build_huggingface(tmp_path)
        actual = build_huggingface(tmp_path, new_head=True)
        assert actual.clip_probs(frames(1, 8)).shape == (1, CLASSES)
        assert "2 tensors besides the head are random: fc_norm.bias, fc_norm.weight" in caplog.text

    def test_weights_that_do_not_fit(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        save(tmp_path)
        data = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**data, "num_frames": 6}))
        for new_head in (False, True):
            with pytest.raises(WeightsError, match=r"1 of another shape: timesformer\.embeddings\.time_embeddings"):
                build_huggingface(tmp_path, new_head=new_head)
        (tmp_path / "config.json").write_text(json.dumps({**data, "num_hidden_layers": 3}))
        with pytest.raises(WeightsError, match=r"missing: timesformer\.encoder\.layer\.2\..* and \d+ more"):
            build_huggingface(tmp_path, new_head=True)
        (tmp_path / "config.json").write_text(json.dumps({**data, "num_hidden_layers": 1}))
        build_huggingface(tmp_path)
        assert "are not part of the network and are ignored" in caplog.text

    def test_num_frames_of_a_checkpoint_cannot_change(self, tmp_path: Path) -> None:
        save(tmp_path)
        assert build_huggingface(tmp_path, num_frames=TABLE).net.config.num_frames == TABLE
        with pytest.raises(InvalidArgument, match="for 4 frames but num_frames=6"):
            build_huggingface(tmp_path, num_frames=6)


class TestBadSources:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "has no config.json"),
            ("{}", "config.json is not of a network"),
            ("{", "config.json is not of a network"),
            ('{"model_type": "unheard-of"}', "config.json is not of a network"),
            ('{"model_type": "timesformer", "hidden_size": "wide"}', "hidden_size"),
            ('{"model_type": "bert"}', "'bert' is not a video classifier; .*timesformer, videomae"),
        ],
    )
    def test_folders_without_a_video_classifier(self, content: str | None, message: str, tmp_path: Path) -> None:
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(InvalidArgument, match=message):
            build_huggingface(tmp_path)

    def test_pickled_weights_are_not_opened(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        classifier = save(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        torch.save(classifier.net.state_dict(), tmp_path / "pytorch_model.bin")
        monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was opened"))
        with pytest.raises(WeightsError, match=r"has no model\.safetensors; pickled weights are not read"):
            build_huggingface(tmp_path)

    def test_code_in_a_folder_is_not_run(self, tmp_path: Path) -> None:
        save(tmp_path)
        data = json.loads((tmp_path / "config.json").read_text())
        data.update(model_type="mine", auto_map={"AutoConfig": "evil.Config"})
        (tmp_path / "config.json").write_text(json.dumps(data))
        (tmp_path / "evil.py").write_text("raise SystemExit('code was run')")
        with pytest.raises(InvalidArgument, match="that transformers itself contains"):
            build_huggingface(tmp_path)

    def test_a_truncated_weights_file(self, tmp_path: Path) -> None:
        save(tmp_path)
        whole = (tmp_path / "model.safetensors").read_bytes()
        (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(WeightsError, match="the weights cannot be read"):
            build_huggingface(tmp_path)

    def test_missing_folders(self, tmp_path: Path) -> None:
        for source in (tmp_path / "no", str(tmp_path / "no"), "./no", "a/b/c"):
            with pytest.raises(InvalidArgument, match="no such folder"):
                build_huggingface(source)
        (tmp_path / "file").write_text("")
        with pytest.raises(InvalidArgument, match="is a file; give the folder"):
            build_huggingface(str(tmp_path / "file"))

    @pytest.mark.parametrize("source", ["nobody/nothing", "not a name"])
    def test_the_hub_is_not_available(self, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(
            InvalidArgument,
            match=f"{source}: is neither a folder nor available from .* copy config.json and",
        ):
            build_huggingface(source)

    def test_invalid_sources(self) -> None:
        for source in (3, transformers.BertConfig(), torch.nn.Identity()):
            with pytest.raises(InvalidArgument, match=r"cannot be built from|is not a video classifier"):
                build_huggingface(source)
        with pytest.raises(InvalidArgument, match="num_classes=0"):
            build_huggingface(CONFIGS["vivit"](), num_classes=0)
        with pytest.raises(InvalidArgument, match="has no weights"):
            build_huggingface(pretrained=True)
        with pytest.raises(InvalidArgument, match="cannot build a config of model type 'unheard-of'"):
            config_from_dict({"model_type": "unheard-of"})

    def test_without_transformers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(MissingDependency, match=r"sosampler\[hf\]"):
            build_huggingface("nobody/nothing")


class TestConfigs:
    def test_num_classes_and_num_frames_change_a_copy(self) -> None:
        config = CONFIGS["timesformer"]()
        classifier = build_huggingface(config, num_classes=9, num_frames=6)
        assert classifier.clip_probs(frames(1, 2)).shape == (1, 9)
        assert classifier.net.timesformer.embeddings.time_embeddings.shape[1] == 6
        assert (config.num_labels, config.num_frames) == (CLASSES, TABLE)
        assert build_huggingface(CONFIGS["vjepa2"](), num_frames=16).net.config.frames_per_clip == 16

    def test_config_to_dict(self) -> None:
        data = config_to_dict(CONFIGS["timesformer"](id2label={0: "a", 1: "b", 2: "c", 3: "d", 4: "e"}))
        assert (data["model_type"], data["num_labels"]) == ("timesformer", CLASSES)
        assert not set(data) & {"transformers_version", "id2label", "architectures", "return_dict"}

    def test_names(self) -> None:
        assert build_huggingface(CONFIGS["vivit"]()).name == "hf:vivit"
        assert build_huggingface(CONFIGS["timesformer"]()).name == "hf:timesformer"

    def test_videomae_base_gmacs_are_as_published(self) -> None:
        with torch.device("meta"):
            classifier = build_huggingface(transformers.VideoMAEConfig())
        assert classifier.gmacs(16) == pytest.approx(180, rel=5e-3)
        assert classifier.gmacs(5) == classifier.gmacs(16)  # repeated frames cost as much as others
