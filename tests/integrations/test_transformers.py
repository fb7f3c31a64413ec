"""Frames chosen in front of transformers: its reader, video processors and classifiers, and a Qwen-VL processor."""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sosampler as so
from sosampler.integrations import qwen_vl
from sosampler.integrations.transformers import SelectingProcessor, as_sample_indices_fn, load_video
from sosampler.video.synthetic import numbered_video, read_number
from tests.clips import BY_NAME, FPS
from tests.doc_blocks import blocks_of, run_page

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SPECIAL = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>"]
# The shape of Qwen3-VL's own template, as far as messages with one text, images and videos need it.
TEMPLATE = """{%- for message in messages -%}<|im_start|>{{ message.role }}:
{%- if message.content is string -%}{{ message.content }}{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'video' -%}<|video_pad|>
{%- elif part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}<|im_end|>{%- endfor -%}"""


def shown(frames: Any) -> list[int]:
    """The numbers that the pictures carry; frames [N, H, W, 3], or [N, 3, H, W] as torchcodec gives them."""
    frames = np.asarray(frames)
    return [read_number(frame if frame.shape[-1] == 3 else frame.transpose(1, 2, 0)) for frame in frames]


def true_seconds(name: str, frame_indices: Any) -> np.ndarray:
    ticks = np.array(BY_NAME[name].ticks)
    return (ticks[frame_indices] - ticks[0]) / FPS


def write(folder: Path, name: str) -> str:
    path = folder / f"{name}{BY_NAME[name].suffix}"
    path.write_bytes(BY_NAME[name].data)
    return str(path)


# --- load_video ---


@pytest.mark.parametrize("name", ["h264", "open_gop", "variable_rate", "edit_list", "mkv", "two_frames"])
def test_load_video_reads_the_chosen_frames(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name)
    chosen = as_sample_indices_fn(path, 6, policy="random", seed=2)
    video, metadata = transformers.video_utils.load_video(path, sample_indices_fn=chosen, backend="pyav")
    selection = so.select(path, 6, policy="random", seed=2, on_short="fewer")
    assert shown(video) == shown(selection.frames)
    assert list(metadata.frames_indices) == selection.frame_indices.tolist() == chosen.selection.frame_indices.tolist()


def test_load_video_reads_the_chosen_frames_with_torchcodec(tmp_path: Path, torchcodec: None) -> None:
    path = write(tmp_path, "variable_rate")
    made = so.select(path, 5, policy="frame-difference")
    video, _ = transformers.video_utils.load_video(
        path, sample_indices_fn=as_sample_indices_fn(made), backend="torchcodec"
    )
    assert shown(video) == shown(made.frames)


def test_an_index_function_answers_for_its_own_video_only(tmp_path: Path) -> None:
    small, long = tmp_path / "small.mp4", write(tmp_path, "h264")
    numbered_video(small, num_frames=75, width=96, height=64)
    with pytest.raises(so.InvalidArgument, match=r"chosen from h264.mp4 \(192x128 pixels, 75 frames\).*96x64 pixels"):
        transformers.video_utils.load_video(str(small), sample_indices_fn=as_sample_indices_fn(long, 4))
    short = write(tmp_path, "two_frames")
    with pytest.raises(so.InvalidArgument, match="being read has 2 frames"):
        transformers.video_utils.load_video(short, sample_indices_fn=as_sample_indices_fn(long, 4))


def test_index_functions_refuse_what_load_video_cannot_do(clip_bytes: bytes) -> None:
    for wrong in ({"on_short": "repeat"}, {"decode": True}):
        with pytest.raises(so.InvalidArgument, match="does not apply"):
            as_sample_indices_fn(clip_bytes, 4, **wrong)
    with pytest.raises(so.InvalidArgument, match="already made"):
        as_sample_indices_fn(so.select(clip_bytes, 2, policy="uniform"), 4)
    with pytest.raises(so.InvalidArgument, match="policy='nobody'"):
        as_sample_indices_fn(clip_bytes, 4, policy="nobody")


@pytest.mark.parametrize("name", ["h264", "variable_rate"])
def test_own_load_video_decodes_once_and_has_true_times(name: str) -> None:
    video, metadata = load_video(BY_NAME[name].data, 5)
    assert isinstance(metadata, transformers.video_utils.VideoMetadata)
    assert metadata.timestamps == pytest.approx(true_seconds(name, shown(video)), abs=0.001)
    assert metadata.duration == pytest.approx(so.select(BY_NAME[name].data, 1, policy="uniform").metadata.duration)


# --- video processors and classifiers ---


def test_a_video_classifier_sees_the_chosen_frames(clip_bytes: bytes) -> None:
    plain = transformers.VideoMAEVideoProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    config = transformers.VideoMAEConfig(**SMALL, image_size=32, patch_size=16, num_frames=8, num_labels=5)
    torch.manual_seed(0)
    model = transformers.VideoMAEForVideoClassification(config).eval()
    processor = SelectingProcessor(plain, 8, policy="random", seed=4)
    inputs = processor([clip_bytes, BY_NAME["two_frames"].data], return_tensors="pt")
    assert set(inputs) == {"pixel_values"}
    assert inputs["pixel_values"].shape == (2, 8, 3, 32, 32)
    # The same frames by hand; the second video has two, which are repeated to the eight that the network needs.
    for place, data in enumerate((clip_bytes, BY_NAME["two_frames"].data)):
        frames = so.select(data, 8, policy="random", seed=4).frames
        by_hand = plain(list(frames), return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(inputs["pixel_values"][place], by_hand)
    with torch.no_grad():
        logits = model(**inputs).logits
    assert logits.shape == (2, 5)
    assert not torch.allclose(logits[0], logits[1])


def test_a_processor_that_would_sample_takes_all_frames_and_returns_their_metadata() -> None:
    plain = transformers.VideoMAEVideoProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, do_sample_frames=True, num_frames=2
    )
    inputs = SelectingProcessor(plain, 5, policy="uniform")(
        BY_NAME["variable_rate"].data, return_tensors="pt", return_metadata=True
    )
    assert inputs["pixel_values"].shape[1] == 5
    (metadata,) = inputs["video_metadata"]
    selection = so.select(BY_NAME["variable_rate"].data, 5, policy="uniform")
    assert metadata.timestamps == pytest.approx(true_seconds("variable_rate", selection.frame_indices), abs=0.001)


@pytest.mark.parametrize("name", ["Timesformer", "Vivit", "VJEPA2", "LlavaOnevision", "InternVL", "Qwen2VL", "SmolVLM"])
def test_any_video_processor_takes_the_chosen_frames(name: str, clip_bytes: bytes) -> None:
    """Also those that would choose for themselves."""
    processor = SelectingProcessor(getattr(transformers, f"{name}VideoProcessor")(), 4, policy="random", size=64)
    inputs = processor(clip_bytes, return_tensors="pt", return_metadata=True)
    (metadata,) = inputs["video_metadata"]
    (selection,) = processor.select(clip_bytes)
    assert list(metadata.frames_indices) == selection.frame_indices.tolist()
    assert (metadata.fps, metadata.total_num_frames, metadata.duration) == (30.0, 90, 3.0)
    if name == "Qwen2VL":
        assert inputs["video_grid_thw"][0, 0] == 4 / 2
    else:
        pixels = inputs["pixel_values_videos" if "pixel_values_videos" in inputs else "pixel_values"]
        assert pixels.shape[:2] == (1, 4)


def test_what_cannot_be_processed_is_refused(clip_bytes: bytes) -> None:
    processor = SelectingProcessor(transformers.VideoMAEVideoProcessor(), 2)
    for name, value in (("do_sample_frames", True), ("num_frames", 4), ("video_metadata", [])):
        with pytest.raises(so.InvalidArgument, match=f"{name} is set by"):
            processor(clip_bytes, **{name: value})
    with pytest.raises(so.InvalidArgument, match="no video was given"):
        processor([])
    with pytest.raises(so.InvalidArgument, match="a str handles no videos"):
        SelectingProcessor("videomae", 2)
    with pytest.raises(so.InvalidArgument, match="ViTImageProcessor handles no videos"):
        SelectingProcessor(transformers.ViTImageProcessor(), 2)
    with pytest.raises(so.InvalidArgument, match="decode=False"):
        SelectingProcessor(transformers.VideoMAEVideoProcessor(), 2, decode=False)
    with pytest.raises(so.VideoError, match="no such file"):
        processor("nowhere.mp4")


# --- Qwen-VL ---


@pytest.fixture(scope="module")
def qwen() -> Any:
    """Qwen3-VL's processor around a tokenizer of single bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(
            patch_size=16, size={"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
        ),
        tokenizer=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<|im_end|>", additional_special_tokens=SPECIAL
        ),
        video_processor=transformers.Qwen3VLVideoProcessor(
            size={"shortest_edge": 2 * 32 * 32, "longest_edge": 16 * 64 * 64}, cap_pixels_per_frame=False
        ),
        chat_template=TEMPLATE,
    )


def prompt(qwen: Any, inputs: Any, place: int = 0) -> str:
    return str(qwen.tokenizer.decode(inputs["input_ids"][place]))


def markers(text: str) -> list[float]:
    """The times that the processor wrote into a prompt."""
    return [float(seconds) for seconds in re.findall(r"<([\d.]+) seconds>", text)]


def paired(seconds: np.ndarray) -> list[float]:
    """Two frames share a patch and the mean of their times; the last one is paired with itself."""
    padded = [*seconds, seconds[-1]][: len(seconds) + len(seconds) % 2]
    return [(padded[place] + padded[place + 1]) / 2 for place in range(0, len(padded), 2)]


@pytest.mark.parametrize("name", ["h264", "variable_rate", "late_start"])
@pytest.mark.parametrize("count", [1, 5, 6])
def test_qwen_reads_true_times(qwen: Any, name: str, count: int) -> None:
    processor = SelectingProcessor(qwen, count, policy="random", seed=1)
    (selection,) = processor.select(BY_NAME[name].data)
    inputs = processor.process(selection, text=["<|video_pad|>What?"], return_tensors="pt")
    truth = true_seconds(name, selection.frame_indices)
    assert markers(prompt(qwen, inputs)) == pytest.approx(paired(truth), abs=0.0501)
    assert inputs["video_grid_thw"][0, 0] == (count + 1) // 2
    # Frame by frame, each patch is one moment.
    alone = SelectingProcessor(qwen, count, policy="random", seed=1, one_moment_per_patch=True)
    inputs = alone(BY_NAME[name].data, text=["<|video_pad|>What?"], return_tensors="pt")
    assert markers(prompt(qwen, inputs)) == pytest.approx(truth, abs=0.0501)


def test_an_older_qwen_hears_the_mean_rate(qwen: Any) -> None:
    """It takes frames to be evenly spaced; then at least the whole must be as long as the video."""
    older = transformers.Qwen2_5_VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(),
        tokenizer=qwen.tokenizer,
        video_processor=transformers.Qwen2VLVideoProcessor(),
    )
    processor = SelectingProcessor(older, 6)
    (selection,) = processor.select(BY_NAME["variable_rate"].data)
    inputs = processor.process(selection, text=["<|video_pad|>?"])
    assert 6 / 2 * inputs["second_per_grid_ts"][0] == pytest.approx(selection.metadata.duration, rel=1e-3)


def test_qwen_reads_several_videos_each_with_its_own_times(qwen: Any) -> None:
    names = ["h264", "variable_rate"]
    processor = SelectingProcessor(qwen, 4)
    selections = processor.select([BY_NAME[name].data for name in names])
    inputs = processor.process(selections, text=["<|video_pad|>One.", "<|video_pad|>Two."])
    for place, (name, selection) in enumerate(zip(names, selections, strict=True)):
        truth = paired(true_seconds(name, selection.frame_indices))
        assert markers(prompt(qwen, inputs, place)) == pytest.approx(truth, abs=0.0501)


def test_frames_alone_lose_their_times(qwen: Any, clip_bytes: bytes) -> None:
    """Why metadata go with frames: without them the prompt claims that frames follow each other at 24 a second."""
    selection = so.select(clip_bytes, 4, policy="uniform")
    inputs = qwen(text=["<|video_pad|>?"], videos=[list(selection.frames)], do_sample_frames=False)
    assert max(markers(prompt(qwen, inputs))) < 0.2
    assert selection.pts_seconds.max() > 2.5


@pytest.mark.parametrize("count", [1, 3, 4])
def test_video_messages_carry_true_times(qwen: Any, count: int) -> None:
    selections = [so.select(BY_NAME[name].data, count, policy="uniform") for name in ("variable_rate", "h264")]
    inputs = qwen.apply_chat_template(
        qwen_vl.build_messages(selections, "Compare.", system="Be brief."),
        processor_kwargs=qwen_vl.processor_kwargs(selections),
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    text = prompt(qwen, inputs)
    assert text.startswith("<|im_start|>system:Be brief.")
    assert text.endswith("Compare.<|im_end|>")
    truth = [
        second
        for name, selection in zip(("variable_rate", "h264"), selections, strict=True)
        for second in paired(true_seconds(name, selection.frame_indices))
    ]
    assert markers(text) == pytest.approx(truth, abs=0.0501)
    # The pixels are those of the processor that is given arrays.
    by_hand = SelectingProcessor(qwen, count).process(
        selections, text=["<|video_pad|><|video_pad|>"], return_tensors="pt"
    )
    torch.testing.assert_close(inputs["pixel_values_videos"], by_hand["pixel_values_videos"])


def test_image_messages_put_each_frame_behind_its_time(qwen: Any) -> None:
    selection = so.select(BY_NAME["variable_rate"].data, 3, policy="uniform")
    messages = qwen_vl.build_messages(selection, "What?", show="images")
    inputs = qwen.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
    text = prompt(qwen, inputs)
    assert markers(text) == pytest.approx(true_seconds("variable_rate", selection.frame_indices), abs=0.0501)
    assert len(inputs["image_grid_thw"]) == 3
    assert re.sub(r"[\d.]+|(<\|image_pad\|>)+", "", text).count("< seconds><|vision_start|><|vision_end|>") == 3


# --- the guide ---


GUIDE = Path(__file__).parents[2] / "docs" / "integrations.md"


class Client:
    """A server's client that keeps what it is asked, as JSON."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.chat = self.completions = self

    def create(self, **request: Any) -> None:
        self.asked.append(json.loads(json.dumps(request)))


class Sample:
    def __init__(self) -> None:
        self.frames: Any = defaultdict(dict)
        self.saved = False

    def save(self) -> None:
        self.saved = True


@pytest.fixture
def guides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qwen: Any) -> Callable[[str], dict[str, Any]]:
    """Runs a page in a folder with videos, with tiny networks under the names of the real ones."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "videos").mkdir()
    for name in ("match.mp4", "videos/a.mp4"):
        (tmp_path / name).write_bytes(numbered_video(num_frames=120, fps=2, gop=12))
    config = transformers.VideoMAEConfig(**SMALL, image_size=32, patch_size=16, num_frames=16, num_labels=5)
    transformers.VideoMAEForVideoClassification(config).save_pretrained("videomae")
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    transformers.VideoMAEVideoProcessor(**sizes).save_pretrained("videomae")
    tiny_qwen(qwen.tokenizer).save_pretrained("qwen")
    qwen.save_pretrained("qwen")

    def tiny(code: str) -> str:
        code = code.replace("MCG-NJU/videomae-base-finetuned-kinetics", "videomae")
        return code.replace('from_pretrained("Qwen/Qwen3-VL-2B-Instruct")', 'from_pretrained("qwen")')

    return lambda page: run_page(page, {"client": Client(), "sample": Sample()}, tiny)


def tiny_qwen(tokenizer: Any) -> Any:
    """Qwen3-VL with next to no layers and this tokenizer's special tokens."""
    text = {
        **{**SMALL, "vocab_size": len(tokenizer), "num_key_value_heads": 2, "head_dim": 8},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32}
    names = {"image_token_id": 0, "video_token_id": 1, "vision_start_token_id": 2, "vision_end_token_id": 3}
    torch.manual_seed(0)
    return transformers.Qwen3VLForConditionalGeneration(
        transformers.Qwen3VLConfig(
            text_config=text,
            vision_config={**vision, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **{name: tokenizer.convert_tokens_to_ids(SPECIAL[place]) for name, place in names.items()},
        )
    )


def test_the_blocks_of_the_guide_run(
    guides: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch, qwen: Any
) -> None:
    registered: list[None] = []
    monkeypatch.setattr("sosampler.integrations.vllm.register", lambda: registered.append(None))
    names = guides("docs/integrations.md")
    assert shown(names["video"]) == names["chosen"].selection.frame_indices.tolist()
    assert names["logits"].shape == (2, 5)
    truth = paired(names["sel"].pts_seconds)
    assert markers(prompt(qwen, names["inputs"])) == pytest.approx(truth, abs=0.0501)
    images, video = names["client"].asked
    assert len(images["messages"][0]["content"]) == 2 * 8 + 1
    assert len(video["extra_body"]["media_io_kwargs"]["video"]["frames_indices"]) == 8
    assert registered
    assert len(names["few"]) == 3
    assert names["sample"].saved
    assert sum(frame["sosampler_selected"] for frame in names["sample"].frames.values()) == 8


def test_the_blocks_about_language_models_run(guides: Callable[[str], dict[str, Any]], qwen: Any) -> None:
    names = guides("docs/video_llm.md")
    assert names["tokens"].shape[1] > len(names["processor"]("match.mp4", text=["<|video_pad|>?"])["input_ids"][0])
    truth = paired(names["sel"].pts_seconds)
    assert markers(prompt(qwen, names["inputs"])) == pytest.approx(truth, abs=0.0501)


def test_the_server_command_of_the_guide_is_understood(clip_bytes: bytes) -> None:
    from sosampler.integrations import vllm

    text = GUIDE.read_text(encoding="utf-8")
    (command,) = blocks_of("docs/integrations.md", "bash")
    words = shlex.split(command.code)
    video = json.loads(words[words.index("--media-io-kwargs") + 1])["video"]
    assert video.pop("video_backend") == vllm.NAME
    frames, _ = vllm.load_bytes(clip_bytes, **video)
    assert len(frames) == 8
    for name in (*vllm._PLAIN, "fps", "policy", "size", "backend", vllm.POLICY_VARIABLE):
        assert f"`{name}" in text
    for bound in (vllm._MAX_FRAMES, vllm._MAX_CANDIDATES):
        assert f"at most {bound}" in text
