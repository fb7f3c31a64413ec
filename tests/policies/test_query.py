"""Frames for a text: the right ones where they are known, coverage where there are none, and the models that score."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import sosampler as so
from sosampler.cli.main import main
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError, WeightsError
from sosampler.inference.decode import DecodeStep
from sosampler.inference.options import SelectOptions
from sosampler.policies import image_text
from sosampler.policies.base import Batch
from sosampler.policies.image_text import ImageTextModel, OnnxImageText, load_image_text
from sosampler.policies.query import MAX_SPREAD, MODEL_VARIABLE, QueryPolicy, Relevance, query_policy

WANTED, BEGIN, END = ("red", "triangle"), 13, 16  # seconds
QUERY = "a red triangle"
METHODS = ("", "+mmr", "+aks", "+its", "+nms", "+dpp", "+facility")


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODEL_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory, shapes_model: Path) -> Path:
    """24 seconds of shapes, three of which show the wanted one."""
    from benchmarks.accuracy.query import draw_video

    shown: list[Any] = [("blue", "square"), None, ("green", "cross"), ("yellow", "circle")] * 6
    shown[BEGIN:END] = [WANTED] * (END - BEGIN)
    path = tmp_path_factory.mktemp("query") / "shapes.mp4"
    draw_video(path, shown, seed=5)
    return path


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory, shapes_model: Path) -> Path:
    """A video that shows the same all the time."""
    from benchmarks.accuracy.query import draw
    from sosampler.video.synthetic import encode_video

    image = draw(np.random.default_rng(1), WANTED, 128)
    path = tmp_path_factory.mktemp("constant") / "constant.mp4"
    encode_video((image for _ in range(60)), path, fps=5)
    return path


# ---- the right frames


@pytest.mark.parametrize("method", METHODS)
def test_frames_that_show_it_are_chosen(video: Path, shapes_model: Path, method: str) -> None:
    def hits(sel: so.Selection) -> int:
        return int(((sel.pts_seconds >= BEGIN) & (sel.pts_seconds < END)).sum())

    options: dict[str, Any] = {"num_frames": 3, "num_candidates": 24}
    chosen = so.select(video, policy=f"query{method}", query=QUERY, query_model=shapes_model, **options)
    even = so.select(video, policy="uniform", **options)
    assert chosen.policy == f"query{method}"
    assert chosen.query is not None
    assert chosen.query["localised"]
    assert not chosen.notes
    assert chosen.candidates.scores is not None
    assert hits(chosen) > hits(even)
    assert hits(chosen) == 3 or method in ("+aks", "+its", "+nms", "+dpp")  # which spread more


def test_the_result_tells_what_was_asked(video: Path, shapes_model: Path) -> None:
    sel = so.select(video, 2, query=" a  red\ttriangle ", query_model=shapes_model, num_candidates=24)
    row = json.loads(json.dumps(sel.to_dict()))
    assert row["policy"] == "query+mmr"
    spread = row["query"].pop("spread")
    assert row["query"] == {"text": QUERY, "model": str(shapes_model), "localised": True}
    assert 1 / 24 < spread < MAX_SPREAD
    assert "query" not in so.select(video, 2).to_dict()


def test_a_query_without_a_moment_is_answered_by_coverage(constant: Path, shapes_model: Path) -> None:
    options: dict[str, Any] = {"num_frames": 4, "num_candidates": 20}
    for query, policy in ((QUERY, None), ("a blue cross", "query+aks")):
        sel = so.select(constant, query=query, query_model=shapes_model, policy=policy, **options)
        even = so.select(constant, policy="uniform", **options)
        assert sel.frame_indices.tolist() == even.frame_indices.tolist()
        assert sel.query is not None
        assert not sel.query["localised"]
        assert sel.query["spread"] > 0.99
        (note,) = sel.notes
        assert note.startswith("query: no part of the video fits it better than the rest (spread 1.00, above 0.6)")


def test_auto_takes_as_many_as_fit(video: Path, constant: Path, shapes_model: Path) -> None:
    found = so.select(video, so.Auto(max=12, tolerance=0.1), query=QUERY, query_model=shapes_model, num_candidates=24)
    assert 2 <= len(found) <= 6
    assert found.asked is not None
    assert found.asked["expected"] == sorted(found.asked["expected"])
    still = so.select(constant, so.Auto(max=12), query=QUERY, query_model=shapes_model, num_candidates=24)
    assert len(still) == 1  # coverage: one frame shows it all


# ---- scores


class Stub(ImageTextModel):
    """Embeds a text as its first axis, and frames by their mean colour."""

    name, image_size, context_length, logit_scale = "stub", 8, 5, 100.0

    def __init__(self) -> None:
        super().__init__(Path())

    def _tokens(self, text: str) -> list[int]:
        return [0] * len(text.split())

    def _text(self, text: str, tokens: list[int]) -> np.ndarray:
        return np.array([3.0, 0.0, 0.0], dtype=np.float32)

    def _images(self, frames: np.ndarray) -> np.ndarray:
        return frames.mean((1, 2)).astype(np.float32) + 1


def batch_of(*frames: np.ndarray, count: int | None = None) -> Batch:
    return Batch(len(frames), np.array([count or len(frames)]), np.stack(frames)[None])


def test_spread_is_the_effective_share_of_the_candidates() -> None:
    red, blue = (np.full((8, 8, 3), 0, dtype=np.uint8) for _ in range(2))
    red[..., 0], blue[..., 2] = 255, 255
    policy = Relevance("x", Stub())
    assert policy.spread(batch_of(red, red, red, red)) == pytest.approx(1)
    assert policy.spread(batch_of(red, blue, blue, blue)) == pytest.approx(1 / 4)
    assert policy.spread(batch_of(red, red, blue, blue)) == pytest.approx(1 / 2)
    assert policy.spread(batch_of(red, blue, red, red, count=2)) == pytest.approx(1 / 2)  # padding counts nothing
    cosines = policy.cosines(batch_of(red, blue))[0]
    assert cosines == pytest.approx([256 / np.linalg.norm([256, 1, 1]), 1 / np.linalg.norm([256, 1, 1])])


def test_quality_decides_between_frames_that_fit_alike() -> None:
    rng = np.random.default_rng(0)
    sharp = np.asarray(Image.fromarray(rng.integers(0, 255, (12, 12, 3), dtype=np.uint8)).resize((160, 160), 0))
    dull = np.broadcast_to(np.rint(sharp.mean((0, 1))).astype(np.uint8), sharp.shape)
    policy = Relevance("x", Stub())
    batch = batch_of(dull, sharp)
    assert np.abs(np.diff(policy.cosines(batch)[0])) < 1e-3
    scores = policy.scores(batch)[0]
    assert scores[1] > scores[0]
    assert np.abs(scores - policy.cosines(batch)[0]).max() < 0.04  # a second term, no more


def test_a_batch_chooses_as_each_video_alone(video: Path, shapes_model: Path) -> None:
    frames = so.select(video, 8, num_candidates=8, policy="uniform", size=64).frames
    assert frames is not None
    policy = query_policy(QUERY, shapes_model)
    padded = np.concatenate([frames[:5], frames[4:5].repeat(3, axis=0)])
    both = Batch(8, np.array([8, 5]), np.stack([frames, padded]))
    alone = [Batch(8, np.array([8]), frames[None]), Batch(5, np.array([5]), frames[None, :5])]
    assert policy.choose(both, 2).tolist() == [policy.choose(one, 2)[0].tolist() for one in alone]
    assert policy.expected(both)[1, 5:].tolist() == [-np.inf] * 3


def test_the_page_tells_what_was_measured() -> None:
    pytest.importorskip("torch")
    from benchmarks.accuracy.query import table

    root = Path(__file__).parents[2]
    result = json.loads((root / "benchmarks/results/query.json").read_text(encoding="utf-8"))
    assert table(result) in (root / "docs/query.md").read_text(encoding="utf-8")


# ---- one run


@pytest.fixture
def texts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were encoded, as it happens."""
    encoded: list[str] = []
    encode = OnnxImageText._text

    def counted(self: OnnxImageText, text: str, tokens: list[int]) -> Any:
        encoded.append(text)
        return encode(self, text, tokens)

    monkeypatch.setattr(OnnxImageText, "_text", counted)
    image_text._load.cache_clear()
    return encoded


Cli = Callable[..., int]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Cli:
    def run(*args: object) -> int:
        monkeypatch.setattr(sys, "argv", ["sosampler", "select", *map(str, args)])
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0)

    return run


def test_many_videos_and_one_text(
    video: Path, constant: Path, shapes_model: Path, tmp_path: Path, texts: list[str], cli: Cli
) -> None:
    copies = [
        shutil.copy(path, tmp_path / name) for path, name in ((video, "a.mp4"), (video, "b.mp4"), (constant, "c.mp4"))
    ]
    out = tmp_path / "rows.jsonl"
    asked = ("--query", QUERY, "--query-model", shapes_model, "-n", 2, "-t", 12, "--out", out)
    assert cli(*copies, *asked) == 0
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["query"]["localised"] for row in rows] == [True, True, False]
    assert [bool(row["notes"]) for row in rows] == [False, False, True]
    assert texts == [QUERY]
    alone = so.select(copies[0], 2, num_candidates=12, query=QUERY, query_model=shapes_model)
    assert rows[0]["frame_indices"] == alone.frame_indices.tolist()
    assert texts == [QUERY]  # the model stays, and so does the text


def test_another_text_begins_anew(video: Path, shapes_model: Path, tmp_path: Path, cli: Cli) -> None:
    videos = [shutil.copy(video, tmp_path / name) for name in ("a.mp4", "b.mp4")]
    out = tmp_path / "rows.jsonl"
    for query in (QUERY, "a blue square"):
        assert cli(*videos, "--query", query, "--query-model", shapes_model, "-n", 2, "-t", 12, "--out", out) == 0
        rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
        assert [row["query"]["text"] for row in rows] == [query, query]
    same = SelectOptions(query=QUERY, query_model=shapes_model).identity()
    assert same["policy_identity"] == load_image_text(shapes_model).fingerprint()
    assert not {"query", "query_model"} & set(SelectOptions().identity())  # rows of earlier versions resume


def test_the_command_prints_the_row_and_the_note(
    constant: Path, shapes_model: Path, cli: Cli, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MODEL_VARIABLE, str(shapes_model))
    assert cli(constant, "--query", QUERY, "-n", 2, "--json", "--device", "cpu") == 0
    assert json.loads(capsys.readouterr().out)["query"]["text"] == QUERY
    assert cli(constant, "--query", QUERY, "-n", 2) == 0
    assert "note: query: no part of the video fits it better" in capsys.readouterr().out


def test_a_step_for_other_processes(video: Path, shapes_model: Path) -> None:
    """Options travel without the model, and the worker reads it again."""
    options = SelectOptions(query=QUERY, query_model=str(shapes_model), num_frames=2, num_candidates=24)
    assert isinstance(options.resolved_policy, QueryPolicy)
    sel = pickle.loads(pickle.dumps(DecodeStep(options)))(video)
    assert isinstance(sel, so.Selection)
    assert ((sel.pts_seconds >= BEGIN) & (sel.pts_seconds < END)).all()
    assert options.with_all_candidates().query is None


def test_onnx_needs_no_torch(video: Path, shapes_model: Path) -> None:
    code = (
        f"import sys, sosampler as so\nso.select({str(video)!r}, 2, query='a', query_model={str(shapes_model)!r})\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


# ---- bad input


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"query": ""}, "query='' must be a text"),
        ({"query": " \n"}, "must be a text; say what the frames should show"),
        ({"query": 3}, "query=3 must be a text"),
        ({"query": "word " * 10_000}, "query has 10000 tokens .* reads at most 8; say it in fewer words"),
        ({"query": QUERY, "query_model": None}, "query needs an image-text model, .* or set SOSAMPLER_QUERY_MODEL"),
        ({"query": QUERY, "policy": "general"}, "policy='general' does not read the query; .* query, query\\+aks"),
        ({"query": QUERY, "policy": "query+best"}, "policy='query\\+best' does not read the query"),
        ({"policy": "query+mmr", "query_model": None}, "policy='query\\+mmr' chooses for a text; give query too"),
        ({"policy": "uniform"}, "query_model=.* was given without a query"),
        ({"query": QUERY, "query_model": "./nothing"}, "nothing: no such folder; give the folder or the hub name"),
    ],
)
def test_bad_queries(video: Path, shapes_model: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        so.select(video, 2, **{"query_model": shapes_model, **options})


def edited(model: Path, folder: Path, **changes: Any) -> Path:
    """A copy of the model whose config has other values; None leaves one out."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "image_text.json").read_text(encoding="utf-8")) | changes
    text = json.dumps({name: value for name, value in config.items() if value is not None})
    (folder / "image_text.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": None}, "image_text.json: size=None must be an int"),
        ({"size": 64}, None),  # this network takes one size only
        ({"mean": [0.5]}, r"mean=\[0.5\] must be three numbers"),
        ({"std": [0, 1, 1]}, "std=0 must be a number above 0"),
        ({"context_length": "long"}, "context_length='long' must be an int"),
        ({"resize": "stretch"}, "resize='stretch' is unknown; choose one of: crop, squash"),
    ],
)
def test_bad_configs(
    video: Path, shapes_model: Path, tmp_path: Path, changes: dict[str, Any], words: str | None
) -> None:
    folder = edited(shapes_model, tmp_path / "model", **changes)
    with pytest.raises(SosamplerError, match=words or "vision_model.onnx: the network cannot be run.* check size"):
        so.select(video, 2, query=QUERY, query_model=folder)


def test_folders_that_are_no_image_text_model(shapes_model: Path, tmp_path: Path) -> None:
    def folder(name: str, **files: str | Path) -> Path:
        (tmp_path / name).mkdir()
        for file, content in files.items():
            target = tmp_path / name / file.replace("__", ".")
            if isinstance(content, Path):
                shutil.copy(content, target)
            else:
                target.write_text(content, encoding="utf-8")
        return tmp_path / name

    config = shapes_model / "image_text.json"
    vision, text, vocab = (shapes_model / name for name in ("vision_model.onnx", "text_model.onnx", "vocab.txt"))
    encoders: dict[str, Path | str] = {
        "image_text__json": config,
        "vision_model__onnx": vision,
        "text_model__onnx": text,
    }
    cases = {
        folder("empty"): "is no image-text model; give a folder with image_text.json .ONNX., config.json",
        folder("half", image_text__json=config, vision_model__onnx=vision): "but no text_model.onnx",
        folder("silent", **encoders): "has neither tokenizer.json nor vocab.txt",
        folder("words", **encoders, vocab__txt="a\nb\n"): r"has no line \[UNK\]",
        folder("broken", **{**encoders, "vision_model__onnx": "no"}, vocab__txt=vocab): "is not a network that ONNX",
        folder("json", **{**encoders, "image_text__json": "{"}, vocab__txt=vocab): "is not JSON",
        folder("swapped", **{**encoders, "text_model__onnx": vision}, vocab__txt=vocab): "takes pixel_values and gives",
    }
    for path, words in cases.items():
        with pytest.raises(SosamplerError, match=words):
            query_policy(QUERY, path)
    with pytest.raises(InvalidArgument, match=r"is a file; give the folder"):
        load_image_text(config)
    with pytest.raises(InvalidArgument, match=r"device='cuda' is not for ONNX encoders"):
        load_image_text(shapes_model, device="cuda")


def test_what_is_written_again_is_read_again(shapes_model: Path, tmp_path: Path) -> None:
    folder = edited(shapes_model, tmp_path / "model")
    before = load_image_text(folder)
    fingerprint = before.fingerprint()
    assert load_image_text(folder) is before
    shutil.rmtree(folder)
    after = load_image_text(edited(shapes_model, folder, logit_scale=50))
    assert after.logit_scale == 50
    assert after.fingerprint() != fingerprint


def test_squash_sees_the_whole_frame(shapes_model: Path, tmp_path: Path) -> None:
    wide = np.zeros((32, 96, 3), dtype=np.uint8)
    wide[:, :16] = 255  # outside of the centre square
    plain = np.zeros_like(wide)
    crop, squash = (
        load_image_text(edited(shapes_model, tmp_path / resize, resize=resize)).encode_images(np.stack([wide, plain]))
        for resize in ("crop", "squash")
    )
    assert np.allclose(crop[0], crop[1], atol=1e-6)
    assert not np.allclose(squash[0], squash[1], atol=1e-3)


def test_a_tokenizer_json_reads_the_same(shapes_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    folder = edited(shapes_model, tmp_path / "model")
    words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.enable_padding(length=20)  # which is not ours
    made.save(str(folder / "tokenizer.json"))
    (folder / "vocab.txt").unlink()
    plain, other = load_image_text(shapes_model), load_image_text(folder)
    assert np.array_equal(plain.encode_text(QUERY), other.encode_text(QUERY))
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InvalidArgument, match=r"is no tokenizer"):
        load_image_text(folder)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependency, match=r"install sosampler\[query\]"):
        OnnxImageText(folder)


# ---- transformers


def tiny_transformers(kind: str, folder: Path) -> Path:
    """A CLIP or SigLIP with random weights, with its tokenizer and preprocessor, as the hub holds them."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    torch.manual_seed(0)
    words = ["[PAD]", "[UNK]", "[START]", "[END]", "a", "red", "triangle", "blue", "square"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "[START] $0 [END]", special_tokens=[("[START]", 2), ("[END]", 3)]
    )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "bos_token": "[START]", "eos_token": "[END]"}
    wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    size = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        **size,
        "vocab_size": len(words),
        "max_position_embeddings": 12,
        "eos_token_id": 3,
        "bos_token_id": 2,
        "pad_token_id": 0,
    }
    vision = {**size, "image_size": 32, "patch_size": 8}
    if kind == "clip":
        config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
        net: Any = transformers.CLIPModel(config)
        processor: Any = transformers.CLIPImageProcessor(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        )
    else:
        config = transformers.SiglipConfig(text_config=text, vision_config=vision)
        net, processor = (
            transformers.SiglipModel(config),
            transformers.SiglipImageProcessor(size={"height": 32, "width": 32}),
        )
        wrapped.model_input_names = ["input_ids"]
    for part in (net, wrapped, processor):
        part.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_transformers_scores_as_transformers_does(kind: str, tmp_path: Path, video: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = tiny_transformers(kind, tmp_path / kind)
    frames = so.select(video, 5, policy="uniform", size=48).frames
    assert frames is not None
    model = load_image_text(folder, device="cpu")
    ours = model.logit_scale * model.encode_images(frames) @ model.encode_text(QUERY)

    net = transformers.AutoModel.from_pretrained(folder).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(
        QUERY, padding="max_length", max_length=12, return_tensors="pt"
    )
    pixels = transformers.AutoImageProcessor.from_pretrained(folder)(
        [Image.fromarray(f) for f in frames], return_tensors="pt"
    )
    with torch.inference_mode():
        theirs = net(**tokens, **pixels).logits_per_image[:, 0].numpy()
    if kind == "siglip":
        theirs = theirs - net.logit_bias.item()
    assert ours == pytest.approx(theirs, abs=1e-3)
    sel = so.select(video, 2, query=QUERY, query_model=folder)
    assert sel.query is not None
    with pytest.raises(InvalidArgument, match=r"query has 42 tokens .* reads at most 12"):
        so.select(video, 2, query="red " * 40, query_model=folder)


def test_transformers_folders_that_are_refused(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = tiny_transformers("clip", tmp_path / "clip")
    state = transformers.AutoModel.from_pretrained(folder).state_dict()
    (folder / "model.safetensors").rename(tmp_path / "kept")
    torch.save(state, folder / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"has no model.safetensors; weights in other formats are not loaded"):
        load_image_text(folder)
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(InvalidArgument, match=r"is no image-text model that transformers can load"):
        load_image_text(folder)
    other = tmp_path / "bert"
    small = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    transformers.BertModel(transformers.BertConfig(**small)).save_pretrained(other)
    with pytest.raises(InvalidArgument, match=r"'bert' is no image-text model; give the folder or the hub name"):
        load_image_text(other)
    (folder / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InvalidArgument, match=r"is no image-text model; give a folder with"):
        load_image_text(folder)


def test_open_clip_scores_as_open_clip_does(tmp_path: Path, video: Path) -> None:
    torch, open_clip = pytest.importorskip("torch"), pytest.importorskip("open_clip")
    from safetensors.torch import save_file

    torch.manual_seed(0)
    config = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 8},
        "text_cfg": {"context_length": 16, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
    }
    preprocess = {"mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bicubic", "resize_mode": "shortest"}
    folder = tmp_path / "open_clip"
    folder.mkdir()
    both = {"model_cfg": config, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(both), encoding="utf-8")
    net = open_clip.CLIP(**config).eval()
    torch.save(net.state_dict(), folder / "open_clip_pytorch_model.bin")
    with pytest.raises(WeightsError, match=r"has no open_clip_model.safetensors"):
        load_image_text(folder)
    save_file(net.state_dict(), folder / "open_clip_model.safetensors")
    frames = so.select(video, 3, policy="uniform", size=48).frames
    assert frames is not None
    model = load_image_text(folder, device="cpu")
    _, transform = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    tokens = open_clip.get_tokenizer(f"local-dir:{folder}")([QUERY])
    with torch.inference_mode():
        pixels = torch.stack([transform(Image.fromarray(frame)) for frame in frames])
        theirs = (net.encode_image(pixels, normalize=True) @ net.encode_text(tokens, normalize=True)[0]).numpy()
    assert model.encode_images(frames) @ model.encode_text(QUERY) == pytest.approx(theirs, abs=1e-4)
    assert len(model._tokens(QUERY)) == 5  # with its start and end
    with pytest.raises(InvalidArgument, match=r"query has .* tokens .* reads at most 16"):
        model.encode_text("red " * 40)
