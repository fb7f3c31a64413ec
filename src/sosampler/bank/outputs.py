"""What is stored for each frame, read from disk: a teacher's probabilities, features, or the sound around it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from sosampler.bank.format import (
    AUDIO,
    FEATURES,
    PRECISIONS,
    TEACHER,
    BankFolder,
    OpenShards,
    OutputFolder,
    OutputKind,
    audio_schema,
    features_schema,
    first_difference,
    matrix_of,
    read_json,
    teacher_schema,
)
from sosampler.errors import InvalidArgument, SosamplerError

if TYPE_CHECKING:
    from sosampler.bank.bank import Bank

Output = TypeVar("Output")


class FrameOutputs(Sequence[Output]):
    """Outputs of one network, or sound, in the order of the bank's videos. Pickled as a name, so workers reopen it."""

    output_kind: OutputKind
    schema: Any  # the columns of its shards

    def __init__(self, bank: Bank, name: str) -> None:
        self.bank, self.name = bank, name
        self.folder: OutputFolder = bank.folder.output(self.output_kind, name)
        self.about = read_output_header(bank.folder, self.output_kind, name)  # its teacher.json, ...
        self.fingerprint = str(self.about["fingerprint"])  # of the network, or of the settings of sound
        self._shards = OpenShards(self.folder.shard, self.output_kind.again)

    def __reduce__(self) -> Any:
        return type(self), (self.bank, self.name)

    def __len__(self) -> int:
        return len(self.bank)

    def __getitem__(self, index: Any) -> Any:
        """Return the outputs of one video; a list for a slice."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        return self._output(self.batch(index))

    def batch(self, index: Any) -> Any:
        """Return the row of a video as Arrow stores it."""
        row = self.bank.row(index)
        batch = self._shards.batch(row)
        if batch.schema != self.schema:
            raise SosamplerError(
                f"{self.folder.shard(row.shard)}: its columns are not those in {self.folder.header.name}; "
                f"delete the folder of both and {self.output_kind.again}"
            )
        return batch

    @abstractmethod
    def _output(self, batch: Any) -> Output: ...


# Videos whose answers are compared; a sound classifier differs within the first few.
_REMARKED_VIDEOS = 1000


def same_answer(classifier: str, label: str) -> str:
    """Return the remark about a classifier that answers the same for every video."""
    return (
        f"the classifier {classifier} answers {label!r} for every video, although their labels differ; check its "
        "weights and the order of its classes"
    )


@dataclass(frozen=True, eq=False)
class TeacherItem:
    """Outputs of a classifier for the frames of one video."""

    frame_probs: np.ndarray  # [T, C] float16, each frame as a clip of one
    features: np.ndarray | None  # [T, D]; pooled classifiers only: `classifier.pool` of any of them is their clip


class Teacher(FrameOutputs[TeacherItem]):
    """Outputs of one classifier, in the order of the bank's videos: a `TeacherItem` of each."""

    output_kind = TEACHER

    def __init__(self, bank: Bank, name: str) -> None:
        super().__init__(bank, name)
        # How the classifier pools frames: "mean" of logits, "max" of features, or None where it is not pooled.
        self.pooling: str | None = self.about["pooling"]
        self.num_classes = int(self.about["num_classes"])
        # Its classes do not exclude each other (sigmoid). Not whether videos have several labels: that is the bank's.
        self.multi_label = bool(self.about.get("multi_label", not bank.exclusive))
        features = self.about["features"] or {}
        self.schema = teacher_schema(self.num_classes, features.get("precision"), features.get("width"))

    def __repr__(self) -> str:
        return f"Teacher({self.about['name']!r}, fingerprint={self.fingerprint!r}, {len(self)} videos)"

    def remark(self) -> str | None:
        """Return a sentence where the classifier answers the same for every video although their labels differ.

        Answers are those of the mean over frames, for videos all over the bank.
        """
        labelled = [row for row, item in enumerate(self.bank.items) if item.labels]
        rows = labelled[:: max(1, len(labelled) // _REMARKED_VIDEOS)]
        if len({self.bank.items[row].labels for row in rows}) < 2:
            return None
        answers: set[int] = set()
        for row in rows:
            answers.add(int(self[row].frame_probs.astype(np.float32).mean(0).argmax()))
            if len(answers) > 1:
                return None
        return same_answer(self.about["name"], self.bank.classes[answers.pop()])

    def _output(self, batch: Any) -> TeacherItem:
        features = matrix_of(batch, "features") if self.about["features"] else None
        return TeacherItem(matrix_of(batch, "frame_probs"), features)


class Features(FrameOutputs[np.ndarray]):
    """Features of one network, in the order of the bank's videos: [T, D] of each, a view of the file."""

    output_kind = FEATURES

    def __init__(self, bank: Bank, name: str) -> None:
        super().__init__(bank, name)
        # "classifier": the input of its class layer; "sampler": the features of its backbone.
        self.kind = str(self.about["network"])
        self.width, self.precision = int(self.about["width"]), str(self.about["precision"])
        self.gmacs = float(self.about["gmacs"])  # giga multiply-adds of the network for one frame
        self.schema = features_schema(self.precision, self.width)

    def __repr__(self) -> str:
        return f"Features({self.name!r} of {self.about['network_name']}, {len(self)} videos, {self.width} per frame)"

    def _output(self, batch: Any) -> np.ndarray:
        return matrix_of(batch, "features")


@dataclass(frozen=True, eq=False)
class AudioItem:
    """What is heard around the frames of one video."""

    spectra: np.ndarray  # [T, bands, columns] float16: log-mel of the second around each frame; 0 is silence
    has_audio: bool  # False: the file has no audio that could be decoded, and all spectra are 0
    notes: tuple[str, ...] = ()


class Audio(FrameOutputs[AudioItem]):
    """The sound of a bank, in the order of its videos: an `AudioItem` of each."""

    output_kind = AUDIO

    def __init__(self, bank: Bank, name: str) -> None:
        super().__init__(bank, name)
        self.bands, self.columns = int(self.about["bands"]), int(self.about["columns"])
        self.schema = audio_schema(self.bands, self.columns)

    def __repr__(self) -> str:
        return f"Audio({self.name!r}, {len(self)} videos, {self.bands} x {self.columns} around each frame)"

    def has_audio(self, index: int) -> bool:
        """Return whether a video has sound; reads no spectrum."""
        return bool(self.batch(index).column("has_audio")[0].as_py())

    def _output(self, batch: Any) -> AudioItem:
        spectra = matrix_of(batch, "spectra").reshape(-1, self.bands, self.columns)
        has_audio, notes = (batch.column(name)[0].as_py() for name in ("has_audio", "notes"))
        return AudioItem(spectra, has_audio, tuple(notes))


def read_output_header(folder: BankFolder, kind: OutputKind, name: str) -> dict[str, Any]:
    """Read a teacher.json, features.json or audio.json, and check that it has all keys."""
    header = folder.output(kind, name).header
    remedy = f"delete its folder and {'add the features' if kind is FEATURES else 'prepare it'} again"
    about = read_json(header, kind.kind, remedy)
    missing = [key for key in kind.keys if key not in about]
    if missing:
        raise SosamplerError(f"{header}: lacks {missing[0]!r}; {remedy}")
    if kind is FEATURES:
        width, precision = about["width"], about["precision"]
        if not isinstance(width, int) or width < 1 or precision not in PRECISIONS:
            raise SosamplerError(f"{header}: width={width!r}, precision={precision!r} are not valid; {remedy}")
    elif kind is AUDIO:
        bands, columns = about["bands"], about["columns"]
        if not all(isinstance(number, int) and number > 0 for number in (bands, columns)):
            raise SosamplerError(f"{header}: bands={bands!r}, columns={columns!r} are not valid; {remedy}")
    else:
        kept = about["features"]
        if kept is not None and not (isinstance(kept, dict) and {"precision", "width"} <= kept.keys()):
            raise SosamplerError(f"{header}: features={kept!r} is not a precision and a width; {remedy}")
    return about


def find_output(
    kind: OutputKind, network: Any, known: dict[str, dict[str, Any]], path: Path, *, views: int | None = None
) -> str:
    """Return the name of the outputs that are meant, or raise an error that lists what there is.

    Args:
        network: a name, a fingerprint or the network; None where there is only one.
        known: the header of each, by name.
        views: tells teachers of one classifier apart; earlier versions could average up to four views of a frame.
    """
    if isinstance(network, str) and network in known and views is None:
        return network  # a name is exact; that of a teacher with one view is also the fingerprint of all of them
    is_teacher = kind is TEACHER
    verb, described = ("is", "{name}, views={views}") if is_teacher else ("are", "{network} {network_name}")
    there = "; ".join(f"{name} ({described.format(**about)})" for name, about in known.items()) or "none"
    matching, wanted = list(known), "a teacher" if is_teacher else "features"
    if network is not None:
        if not isinstance(network, str) and not hasattr(network, "fingerprint"):
            raise InvalidArgument(
                f"{path}: a {type(network).__name__} does not identify {kind.name}; give the network, or the name of "
                f"{kind.name} in this bank: {there}"
            )
        fingerprint = network if isinstance(network, str) else network.fingerprint()
        of = f" of {network.name!r}" if is_teacher and not isinstance(network, str) else ""
        wanted = f"{'the teacher' if is_teacher else 'features'}{of} with fingerprint {fingerprint}"
        matching = [name for name, about in known.items() if fingerprint in (name, about["fingerprint"])]
    if views is not None:
        wanted += f" and views={views}"
        matching = [name for name in matching if known[name]["views"] == views]
    if not matching:
        add_teacher = "Run `sosampler prepare` with this classifier to add it"
        remedy = add_teacher if is_teacher else "Add them with so.add_features(bank, network)"
        raise InvalidArgument(f"{path}: {wanted} {verb} not in this bank; it has: {there}. {remedy}")
    if len(matching) > 1:
        remedy = "Name one of them" + (", or its views" if is_teacher else "")
        raise InvalidArgument(f"{path}: {wanted} {verb} ambiguous, several fit: {there}. {remedy}")
    names, stored = getattr(network, "class_names", None), known[matching[0]].get("class_names")
    if is_teacher and names is not None and stored is not None:
        # The fingerprint covers the weights alone; with its classes in another order the outputs mean something else.
        index = first_difference(tuple(names), tuple(stored))
        if index is not None:
            raise InvalidArgument(
                f"{path}: the teacher of {network.name!r} was prepared with class {index} called {stored[index]!r}, "
                f"now {names[index]!r}; give the classifier its classes in the same order"
            )
    return matching[0]
