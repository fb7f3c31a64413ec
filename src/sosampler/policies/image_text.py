"""Image-text models, which tell how well an image fits a text: ONNX files without torch, transformers, or open_clip.

All are read from a folder, or from the Hugging Face hub: never pickled weights, never code.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sosampler._util.arrays import Frames
from sosampler._util.files import load_json, parse_json, read_text
from sosampler._util.hardware import resolve_device
from sosampler._util.limits import check_count
from sosampler._util.validation import check_float, check_int, one_of
from sosampler.errors import InvalidArgument, MissingDependency, SosamplerError, WeightsError, first_line
from sosampler.samplers.onnx_sampler import open_session, run_session

Vectors = NDArray[np.float32]

# The layout of a folder of ONNX files.
CONFIG, IMAGE_FILE, TEXT_FILE = "image_text.json", "vision_model.onnx", "text_model.onnx"
TOKENIZER, VOCABULARY = "tokenizer.json", "vocab.txt"
IMAGE_OUTPUT, TEXT_OUTPUT = "image_embeds", "text_embeds"
_RESIZES = ("crop", "squash")

_TRANSFORMERS, _OPEN_CLIP = "config.json", "open_clip_config.json"
_WEIGHTS, _OPEN_CLIP_WEIGHTS = "model.safetensors", "open_clip_model.safetensors"
_DOWNLOADS = (
    *("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer*", "special_tokens_map.json"),
    *("vocab.*", "merges.txt", "spiece.model", "model*.safetensors", "model.safetensors.index.json"),
    *(_OPEN_CLIP, CONFIG, IMAGE_FILE, TEXT_FILE),
)
_HASHED = (".json", ".txt", ".onnx", ".safetensors")
_BATCH = 16  # frames in one run of a network
_MAX_LOADED = 2


class ImageTextModel(ABC):
    """Two encoders into one space. Subclasses give `_images`, `_tokens` and `_text`."""

    name: str
    image_size: int  # short side of the frames that it looks at
    context_length: int  # tokens that it reads
    logit_scale: float  # by which it was trained to multiply the cosine of an image and a text

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()  # one batch at a time uses all cores or the whole device
        self._texts: dict[str, Vectors] = {}

    def encode_text(self, text: str) -> Vectors:
        """Return the embedding [D] of a text, of length 1; each text is encoded once."""
        with self._lock:
            if text not in self._texts:
                tokens = self._tokens(text)
                if len(tokens) > self.context_length:
                    raise InvalidArgument(
                        f"query has {len(tokens)} tokens ({text[:40]!r}...), but {self.name} reads at most "
                        f"{self.context_length}; say it in fewer words"
                    )
                self._texts[text] = _unit(self._text(text, tokens)[None], self.name)[0]
            return self._texts[text]

    def encode_images(self, frames: Frames) -> Vectors:
        """Return the embeddings [F, D] of frames uint8 [F, H, W, 3], each of length 1."""
        with self._lock:
            parts = [self._images(frames[begin : begin + _BATCH]) for begin in range(0, len(frames), _BATCH)]
        return _unit(np.concatenate(parts), self.name)

    def fingerprint(self) -> str:
        """Return what changes with the files of the model."""
        digest = hashlib.sha256()
        for file in sorted(path for path in self.folder.iterdir() if path.suffix in _HASHED):
            with open(file, "rb") as stream:
                digest.update(file.name.encode() + hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()[:16]

    @abstractmethod
    def _tokens(self, text: str) -> list[int]:
        """Return the numbers of a text's tokens, those for its start and end included, without padding."""

    @abstractmethod
    def _text(self, text: str, tokens: list[int]) -> Vectors:
        """Return the embedding [D] of a text."""

    @abstractmethod
    def _images(self, frames: Frames) -> Vectors:
        """Return the embeddings [F, D] of a few frames."""


def _unit(vectors: Vectors, name: str) -> Vectors:
    vectors = np.asarray(vectors, dtype=np.float32)
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    if not (np.isfinite(vectors).all() and (length > 0).all()):
        raise WeightsError(f"{name}: gives embeddings that are zero or not finite; check the weights")
    return np.asarray(vectors / length)


# ---- ONNX, without torch


class OnnxImageText(ImageTextModel):
    """A folder with vision_model.onnx, text_model.onnx, image_text.json, and tokenizer.json or vocab.txt."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.name = str(folder)
        for file in (IMAGE_FILE, TEXT_FILE):
            if not (folder / file).is_file():
                raise InvalidArgument(f"{folder}: has {CONFIG} but no {file}; export both encoders into this folder")
        config = parse_json(read_text(folder / CONFIG, "MAX_TEXT_BYTES"), str(folder / CONFIG))
        if not isinstance(config, dict):
            raise InvalidArgument(f"{folder / CONFIG}: must be a JSON object; see the documentation of queries")
        self.image_size = check_count(f"{CONFIG}: size", config.get("size"), "MAX_INPUT_SIDE")
        self.context_length = check_count(
            f"{CONFIG}: context_length", config.get("context_length"), "MAX_CONFIG_NUMBER"
        )
        self.logit_scale = check_float(f"{CONFIG}: logit_scale", config.get("logit_scale", 100.0), above=0)
        self._pad = check_int(f"{CONFIG}: pad_id", config.get("pad_id", 0), at_least=0)
        self._resize = one_of(f"{CONFIG}: resize", config.get("resize", "crop"), _RESIZES)
        self._mean, self._std = (_three(config, name) for name in ("mean", "std"))
        self._tokenize = _tokenizer(folder)
        # By path, not as bytes: large networks keep their weights in a file beside them.
        files, advice = [str(folder / file) for file in (IMAGE_FILE, TEXT_FILE)], "export the encoder again"
        self._vision, self._language = (open_session(file, file, advice=advice) for file in files)

    def _tokens(self, text: str) -> list[int]:
        return self._tokenize(text)

    def _text(self, text: str, tokens: list[int]) -> Vectors:
        missing = self.context_length - len(tokens)
        inputs = {"input_ids": [*tokens, *[self._pad] * missing], "attention_mask": [1] * len(tokens) + [0] * missing}
        arrays = {name: np.array([values], dtype=np.int64) for name, values in inputs.items()}
        return np.asarray(_run(self._language, arrays, TEXT_OUTPUT, self.folder / TEXT_FILE)[0])

    def _images(self, frames: Frames) -> Vectors:
        small = np.stack([self._input_of(frame) for frame in frames])
        pixels = (small.astype(np.float32) / 255 - self._mean) / self._std
        return _run(
            self._vision, {"pixel_values": pixels.transpose(0, 3, 1, 2)}, IMAGE_OUTPUT, self.folder / IMAGE_FILE
        )

    def _input_of(self, frame: Frames) -> Frames:
        """Resize a frame [H, W, 3] to [size, size, 3], bicubic: its centre square, or all of it squashed."""
        image, size = Image.fromarray(frame), self.image_size
        box = None
        if self._resize == "crop":
            side = min(image.size)
            left, top = (image.width - side) / 2, (image.height - side) / 2
            box = (left, top, left + side, top + side)
        return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC, box=box))


def _three(config: dict[str, Any], name: str) -> Vectors:
    values = config.get(name)
    if not isinstance(values, list) or len(values) != 3:
        raise InvalidArgument(f"{CONFIG}: {name}={values!r} must be three numbers, for red, green and blue")
    above = 0.0 if name == "std" else -np.inf
    return np.array([check_float(f"{CONFIG}: {name}", value, above=above) for value in values], dtype=np.float32)


def _run(session: Any, inputs: dict[str, Any], output: str, file: Path) -> Vectors:
    """Run a network on those of the inputs that it takes, and return its embeddings [B, D]."""
    taken = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    chosen = output if output in names else names[0] if len(names) == 1 else None
    if next(iter(inputs)) not in taken or not taken <= set(inputs) or chosen is None:
        raise InvalidArgument(
            f"{file}: takes {', '.join(sorted(taken))} and gives {', '.join(names)}, but must take "
            f"{' and perhaps '.join(inputs)} and give {output}; export it with these names"
        )
    advice = f"check size and context_length in {CONFIG}, and its number of images, which must be free"
    fed = {name: value for name, value in inputs.items() if name in taken}
    (result,) = run_session(session, [chosen], fed, str(file), advice)
    if result.ndim != 2:
        raise InvalidArgument(f"{file}: gives {chosen} of shape {list(result.shape)} but must give [images, D]")
    return np.asarray(result, dtype=np.float32)


def _tokenizer(folder: Path) -> Callable[[str], list[int]]:
    if (folder / TOKENIZER).is_file():
        try:
            tokenizers = import_module("tokenizers")
        except ImportError as error:
            raise MissingDependency(
                f"{folder}: has {TOKENIZER}, which needs the package tokenizers; install sosampler[query]"
            ) from error
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
        except Exception as error:  # the package raises no other kind
            raise InvalidArgument(f"{folder / TOKENIZER}: is no tokenizer ({first_line(error)})") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return lambda text: list(tokenizer.encode(text).ids)
    if (folder / VOCABULARY).is_file():
        return word_tokenizer(read_text(folder / VOCABULARY, "MAX_TEXT_BYTES").splitlines())
    raise InvalidArgument(f"{folder}: has neither {TOKENIZER} nor {VOCABULARY}; copy the tokenizer beside the encoders")


def word_tokenizer(words: list[str]) -> Callable[[str], list[int]]:
    """Return the simple tokenizer of vocab.txt: lower-case words, each the number of its line from 0; [UNK] for others.

    >>> word_tokenizer(["[PAD]", "[UNK]", "a", "red", "car"])("A red, fast car!")
    [2, 3, 1, 4]
    """
    numbers = {word: number for number, word in enumerate(words)}
    if "[UNK]" not in numbers:
        raise InvalidArgument(f"{VOCABULARY}: has no line [UNK], which stands for unknown words; add one")
    return lambda text: [numbers.get(word, numbers["[UNK]"]) for word in re.findall(r"\w+", text.lower())]


# ---- torch: transformers and open_clip


class TransformersImageText(ImageTextModel):
    """CLIP, SigLIP and others of transformers that embed images and texts; preprocessing is that of the folder."""

    def __init__(self, folder: Path, device: Any = None) -> None:
        super().__init__(folder)
        self.name = str(folder)
        with _loading(folder, "transformers", "hf") as transformers:
            config = transformers.AutoConfig.from_pretrained(folder)
            self._check(transformers, config)
            self._device = resolve_device(device)
            net = transformers.AutoModel.from_pretrained(folder, use_safetensors=True, dtype="float32")
            self._net = net.eval().to(self._device)
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            self._processor = transformers.AutoImageProcessor.from_pretrained(folder)
        self.image_size = int(config.vision_config.image_size)
        self.context_length = int(config.text_config.max_position_embeddings)
        self.logit_scale = float(self._net.logit_scale.exp().item())

    def _check(self, transformers: Any, config: Any) -> None:
        kinds = transformers.AutoModel._model_mapping
        kind = kinds.get(type(config), None)
        embeds = kind is not None and hasattr(kind, "get_text_features") and hasattr(kind, "get_image_features")
        if not embeds or not hasattr(config, "vision_config") or not hasattr(config, "text_config"):
            raise InvalidArgument(
                f"{self.folder}: {config.model_type!r} is no image-text model; give the folder or the hub name of one "
                "that embeds images and texts, such as CLIP or SigLIP"
            )

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text)["input_ids"])

    def _text(self, text: str, tokens: list[int]) -> Vectors:
        # SigLIP was trained with texts padded to the full length; CLIP reads the same from both.
        inputs = self._tokenizer(text, padding="max_length", max_length=self.context_length, return_tensors="pt")
        return np.asarray(self._embed(self._net.get_text_features, inputs)[0])

    def _images(self, frames: Frames) -> Vectors:
        inputs = self._processor(images=list(frames), input_data_format="channels_last", return_tensors="pt")
        return self._embed(self._net.get_image_features, {"pixel_values": inputs["pixel_values"]})

    def _embed(self, network: Callable[..., Any], inputs: Any) -> Vectors:
        import torch

        with torch.inference_mode():
            output = network(**{name: value.to(self._device) for name, value in inputs.items()})
        embeddings = getattr(output, "pooler_output", output)  # a tensor in some versions
        return np.asarray(embeddings.float().cpu().numpy())


class OpenClipImageText(ImageTextModel):
    """A folder with open_clip_config.json and open_clip_model.safetensors, as open_clip saves it."""

    def __init__(self, folder: Path, device: Any = None) -> None:
        super().__init__(folder)
        self.name = str(folder)
        # open_clip would take a pickled file in its place.
        if not (folder / _OPEN_CLIP_WEIGHTS).is_file():
            raise WeightsError(
                f"{folder}: has no {_OPEN_CLIP_WEIGHTS}; weights in other formats are not loaded, so convert them to "
                "safetensors"
            )
        with _loading(folder, "open_clip", None) as open_clip:
            self._device = resolve_device(device)
            source = f"local-dir:{folder}"
            self._net, self._transform = open_clip.create_model_from_pretrained(source, device=self._device)
            self._net.eval()
            self._tokenizer = open_clip.get_tokenizer(source)
        size = self._net.visual.image_size
        self.image_size = int(size if isinstance(size, int) else min(size))
        self.context_length = int(self._net.context_length)
        self.logit_scale = float(self._net.logit_scale.exp().item())

    def _tokens(self, text: str) -> list[int]:
        # With twice the room, so that a text which is cut differs from one that fits.
        row: list[int] = self._tokenizer([text], context_length=2 * self.context_length)[0].tolist()
        while len(row) > 1 and row[-1] == row[-2]:  # the padding, but for one of it
            row.pop()
        return row[:-1]

    def _text(self, text: str, tokens: list[int]) -> Vectors:
        import torch

        with torch.inference_mode():
            embedding = self._net.encode_text(self._tokenizer([text]).to(self._device))[0]
        return np.asarray(embedding.float().cpu().numpy())

    def _images(self, frames: Frames) -> Vectors:
        import torch

        with torch.inference_mode():
            pixels = torch.stack([self._transform(Image.fromarray(frame)) for frame in frames])
            return np.asarray(self._net.encode_image(pixels.to(self._device)).float().cpu().numpy())


@contextmanager
def _loading(folder: Path, package: str, extra: str | None) -> Iterator[Any]:
    """Yield the package; what it raises becomes a sentence."""
    try:
        module = import_module(package)
        import_module("torch")
    except ImportError as error:
        install = f"install sosampler[{extra},train]" if extra else "pip install open_clip_torch safetensors"
        raise MissingDependency(
            f"{folder}: an image-text model of {package} needs torch and {package}; {install}, or export both encoders "
            "to ONNX, which needs neither"
        ) from error
    from safetensors import SafetensorError

    try:
        yield module
    except SosamplerError:
        raise
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError) as error:
        raise InvalidArgument(
            f"{folder}: is no image-text model that {package} can load ({first_line(error)}); give a folder with its "
            "config, tokenizer, preprocessor and safetensors weights"
        ) from error


# ---- from a folder or the hub


def load_image_text(source: str | os.PathLike[str], *, device: Any = None) -> ImageTextModel:
    """Return the image-text model of a folder or of a hub name; it is read once a process.

    `device` is for torch: the GPU if there is one, unless given. ONNX runs on the CPU.
    """
    folder = _folder_of(source).resolve()
    # What is written again into the same folder is read again.
    stamp = tuple(sorted((file.name, file.stat().st_mtime_ns) for file in folder.iterdir() if file.is_file()))
    model = _load(folder, stamp, None if device is None else str(device))
    model.name = os.fspath(source)
    return model


@lru_cache(maxsize=_MAX_LOADED)
def _load(folder: Path, stamp: tuple[Any, ...], device: str | None) -> ImageTextModel:
    if (folder / CONFIG).is_file():
        if device not in (None, "cpu", "onnx"):
            raise InvalidArgument(f"device={device!r} is not for ONNX encoders, which run on the CPU; leave it out")
        return OnnxImageText(folder)
    if (folder / _TRANSFORMERS).is_file() and _is_transformers(folder):
        if not any(folder.glob("model*.safetensors")):
            raise WeightsError(
                f"{folder}: has no {_WEIGHTS}; weights in other formats are not loaded, so convert them to safetensors"
            )
        return TransformersImageText(folder, device)
    if (folder / _OPEN_CLIP).is_file():
        return OpenClipImageText(folder, device)
    raise InvalidArgument(
        f"{folder}: is no image-text model; give a folder with {CONFIG} (ONNX), {_TRANSFORMERS} (transformers) or "
        f"{_OPEN_CLIP} (open_clip)"
    )


def _is_transformers(folder: Path) -> bool:
    try:
        config = load_json(folder / _TRANSFORMERS)
    except ValueError:
        return False
    return isinstance(config, dict) and "model_type" in config


def _folder_of(source: str | os.PathLike[str]) -> Path:
    text = os.fspath(source)
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    if path.exists() or not re.fullmatch(r"[\w-]+/[\w.-]+", text):
        what = "is a file" if path.exists() else "no such folder"
        raise InvalidArgument(f"query_model {text}: {what}; give the folder or the hub name of an image-text model")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingDependency(
            f"query_model {text}: no such folder, and downloading needs huggingface_hub; give a folder, or install it"
        ) from error
    try:
        folder = Path(snapshot_download(text, allow_patterns=list(_DOWNLOADS)))
        if not (folder / CONFIG).is_file() and not any(folder.glob("model*.safetensors")):
            folder = Path(snapshot_download(text, allow_patterns=[*_DOWNLOADS, _OPEN_CLIP_WEIGHTS]))
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"query_model {text}: is neither a folder nor available from the Hugging Face hub ({first_line(error)}); "
            "check the name and the connection; without one, give a folder"
        ) from error
    return folder
