"""TimeSformer on clips of any length, against transformers' own forward pass."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sosampler.classifiers.base import count_gmacs
from sosampler.classifiers.huggingface import (
    HuggingFaceClassifier,
    build_huggingface,
    temporal_embeddings,
    timesformer_logits,
)
from sosampler.errors import InvalidArgument
from tests.classifiers.hf_networks import CLASSES, TABLE, build, frames, plain


class TestTemporalEmbeddings:
    table = torch.randn(1, TABLE, 6, generator=torch.Generator().manual_seed(1))

    def at(self, position: float) -> Tensor:
        """The table by hand: entries at (k + 1/2) / K, straight lines between, flat beyond the ends."""
        centres = [(entry + 0.5) / TABLE for entry in range(TABLE)]
        if position <= centres[0]:
            return self.table[0, 0]
        for left in range(TABLE - 1):
            if position <= centres[left + 1]:
                share = (position - centres[left]) / (centres[left + 1] - centres[left])
                return (1 - share) * self.table[0, left] + share * self.table[0, left + 1]
        return self.table[0, -1]

    def test_linear_follows_positions(self) -> None:
        positions = torch.rand(5, 7, generator=torch.Generator().manual_seed(2))
        positions[0, :4] = torch.tensor([0.0, 1.0, 0.125, 0.5])
        expected = torch.stack([torch.stack([self.at(float(p)) for p in row]) for row in positions])
        torch.testing.assert_close(temporal_embeddings(self.table, 7, positions, "linear"), expected)

    @pytest.mark.parametrize("count", [1, 2, 3, TABLE, 5, 8, 13])
    @pytest.mark.parametrize("temporal", ["linear", "nearest"])
    def test_without_positions_as_torch_interpolates(self, count: int, temporal: str) -> None:
        how = {"mode": "linear", "align_corners": False} if temporal == "linear" else {"mode": "nearest"}
        expected = F.interpolate(self.table.transpose(1, 2), size=count, **how).transpose(1, 2)
        actual = temporal_embeddings(self.table, count, None, temporal)
        torch.testing.assert_close(actual, expected)
        if count == TABLE:
            assert torch.equal(actual, self.table)

    def test_nearest_ignores_positions_and_gives_one_frame_the_first_entry(self) -> None:
        actual = temporal_embeddings(self.table, 1, torch.tensor([[0.9]]), "nearest")
        assert torch.equal(actual[0, 0], self.table[0, 0])

    def test_a_table_of_one_entry(self) -> None:
        actual = temporal_embeddings(self.table[:, :1], 3, torch.tensor([[0.0, 0.5, 1.0]]), "linear")
        assert torch.equal(actual[0], self.table[0, :1].expand(3, -1))


class TestTimeSformer:
    @pytest.mark.parametrize("kind", ["divided_space_time", "joint_space_time"])
    @pytest.mark.parametrize("count", [1, 2, 3, TABLE, 6, 9])
    def test_nearest_agrees_with_transformers(self, count: int, kind: str) -> None:
        classifier = build(temporal="nearest", attention_type=kind)
        video = frames(2, count)
        torch.testing.assert_close(classifier.clip_probs(video), plain(classifier, video), atol=1e-5, rtol=1e-5)

    def test_linear_at_the_trained_length_agrees_with_transformers(self) -> None:
        classifier = build()
        video = frames(2, TABLE)
        torch.testing.assert_close(classifier.clip_probs(video), plain(classifier, video), atol=1e-5, rtol=1e-5)

    def test_linear_with_positions_agrees_with_replaced_embeddings(self) -> None:
        classifier = build()
        video, positions = frames(3, 3), torch.tensor([[0.0, 0.1, 0.9], [0.2, 0.5, 0.5], [0.3, 0.6, 1.0]])
        table = classifier.net.timesformer.embeddings.time_embeddings
        by_hand = TestTemporalEmbeddings()
        by_hand.table = table.data
        for clip, row in enumerate(positions):
            moved = build(num_frames=3)
            moved.net.load_state_dict(
                {k: v for k, v in classifier.net.state_dict().items() if "time_embeddings" not in k}, strict=False
            )
            moved.net.timesformer.embeddings.time_embeddings.data = torch.stack([by_hand.at(float(p)) for p in row])[
                None
            ]
            expected = plain(moved, video[clip : clip + 1])
            actual = classifier.clip_probs(video, positions)[clip : clip + 1]
            torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)

    def test_positions_matter_clip_by_clip(self) -> None:
        classifier = build()
        video = frames(1, 3).expand(3, -1, -1, -1, -1)
        actual = classifier.clip_probs(video, [[0.1, 0.5, 0.9], [0.1, 0.2, 0.3], [0.1, 0.5, 0.9]])
        assert torch.equal(actual[0], actual[2])
        assert (actual[0] - actual[1]).abs().max() > 1e-3
        nearest = build(temporal="nearest")
        assert torch.equal(nearest.clip_probs(video, [[0.1, 0.5, 0.9]] * 3), nearest.clip_probs(video))

    def test_single_frames_are_clips_of_one(self) -> None:
        classifier = build()
        video, positions = frames(2, 5), torch.rand(2, 5, generator=torch.Generator().manual_seed(3))
        actual = classifier.frame_probs(video, positions)
        assert actual.shape == (2, 5, CLASSES)
        for b in range(2):
            for t in range(5):
                one = classifier.clip_probs(video[b : b + 1, t : t + 1], positions[b : b + 1, t : t + 1])[0]
                torch.testing.assert_close(actual[b, t], one)

    def test_space_only_averages_frames_before_the_last_norm(self) -> None:
        classifier = build(attention_type="space_only")
        video = frames(2, 3)
        net = classifier.net
        with torch.no_grad():
            hidden = net.timesformer(classifier.preprocessing(video), output_hidden_states=True).hidden_states[-1]
            mean = hidden[:, 0].view(2, 3, -1).mean(1)
            expected = net.classifier(net.timesformer.layernorm(mean)).softmax(-1)
        torch.testing.assert_close(classifier.clip_probs(video), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(classifier.clip_probs(video[:1, :1]), plain(classifier, video[:1, :1]))

    def test_is_thread_safe(self) -> None:
        classifier = build()
        clips = [frames(2, 1 + number % 6, seed=number) for number in range(24)]
        expected = [classifier.clip_probs(video) for video in clips]
        with ThreadPoolExecutor(4) as pool:
            actual = list(pool.map(classifier.clip_probs, clips))
        assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(actual, expected, strict=True))
        assert classifier.net.config.num_frames == TABLE

    def test_gradients_reach_the_table_and_dropout_is_off_when_frozen(self) -> None:
        classifier = build(hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5, drop_path_rate=0)
        video = frames(1, 3)
        assert torch.equal(classifier.clip_probs(video), classifier.clip_probs(video))
        classifier.requires_grad_(True)
        classifier(classifier.preprocessing(video), torch.tensor([[0.4, 0.5, 0.6]])).sum().backward()
        moved = classifier.net.timesformer.embeddings.time_embeddings.grad[0].abs().sum(1) > 0
        assert moved.tolist() == [False, True, True, False]
        classifier.train()
        clips = classifier.preprocessing(video)
        assert not torch.equal(classifier(clips), classifier(clips))

    def test_it_compiles_in_one_graph(self) -> None:
        classifier = build()
        clips = classifier.preprocessing(frames(1, 3))
        compiled = torch.compile(timesformer_logits, backend="eager", fullgraph=True)
        where = torch.tensor([[0.1, 0.4, 0.8]])
        torch.testing.assert_close(compiled(classifier.net, clips, where), classifier(clips, where))

    def test_unknown_options(self) -> None:
        with pytest.raises(InvalidArgument, match="temporal='cubic' is unknown; choose one of: linear, nearest"):
            build(temporal="cubic")
        with pytest.raises(InvalidArgument, match="temporal='nearest' is for TimeSformer"):
            build("videomae", temporal="nearest")
        with pytest.raises(InvalidArgument, match=r"does not accept the config .*[Uu]nknown attention type"):
            build(attention_type="diagonal")


class TestCost:
    @pytest.fixture(scope="class")
    @classmethod
    def timesformer(cls) -> HuggingFaceClassifier:
        with torch.device("meta"):
            return build_huggingface()

    @pytest.mark.parametrize(("count", "gmacs"), [(8, 195.5), (6, 146.7), (1, 24.44)])
    def test_timesformer_base(self, timesformer: HuggingFaceClassifier, count: int, gmacs: float) -> None:
        assert timesformer.name == "timesformer"
        assert timesformer.class_names[0] == "abseiling"
        assert timesformer.num_classes == 400
        assert timesformer.gmacs(count) == pytest.approx(gmacs, rel=5e-3)

    def test_gmacs_agree_with_transformers(self, timesformer: HuggingFaceClassifier) -> None:
        clip = torch.empty(1, 8, 3, 224, 224, device="meta")
        assert timesformer.gmacs(8) == pytest.approx(count_gmacs(timesformer.net, clip))
