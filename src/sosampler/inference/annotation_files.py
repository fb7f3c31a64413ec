"""Lists of images that annotation tools import: COCO, CVAT, Label Studio, FiftyOne and Datumaro.

All share one folder: `images/` and the lists beside it. docs/collections.md shows how each tool imports its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote
from xml.etree import ElementTree

from sosampler._util.files import write_text

Frame = dict[str, Any]
"""An image: file_name below the folder, width, height, video, frame_index, pts_seconds, quality, distance, order."""

COCO, CVAT, LABEL_STUDIO, FIFTYONE = "coco.json", "annotations.xml", "label_studio.json", "fiftyone.json"
DATUMARO, CVAT_MANIFEST = "annotations/default.json", "images/manifest.jsonl"
_OF_FRAME = ("video", "frame_index", "pts_seconds", "quality", "distance", "order")


def write_annotation_files(folder: Path, frames: Sequence[Frame]) -> list[Path]:
    """Write the lists of all tools; each is replaced whole."""
    name = folder.resolve().name
    texts = {
        COCO: _json(coco(frames)),
        CVAT: cvat(frames, name),
        CVAT_MANIFEST: cvat_manifest(frames),
        LABEL_STUDIO: _json(label_studio(frames, name)),
        FIFTYONE: _json(fiftyone(frames, name)),
        DATUMARO: _json(datumaro(frames)),
    }
    for file, text in texts.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        write_text(folder / file, text)
    return [folder / file for file in texts]


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def _about(frame: Frame) -> Frame:
    return {name: frame[name] for name in _OF_FRAME}


def _image_name(frame: Frame) -> str:
    return PurePosixPath(frame["file_name"]).name


def coco(frames: Sequence[Frame]) -> dict[str, Any]:
    """Return images without annotations, and the videos that they are of."""
    ids = {video: number for number, video in enumerate(dict.fromkeys(frame["video"] for frame in frames), 1)}
    images = [
        {
            "id": number,
            "file_name": _image_name(frame),
            "width": frame["width"],
            "height": frame["height"],
            "video_id": ids[frame["video"]],
            "frame_index": frame["frame_index"],
            "seconds": frame["pts_seconds"],
        }
        for number, frame in enumerate(frames, 1)
    ]
    return {
        "info": {"description": "frames chosen by sosampler"},
        "licenses": [],
        "videos": [{"id": number, "name": video} for video, number in ids.items()],
        "images": images,
        "annotations": [],
        "categories": [],
    }


def cvat(frames: Sequence[Frame], folder: str) -> str:
    """Return the XML of "CVAT for images 1.1"; in a zip with images/ it is what "Import dataset" takes."""
    root = ElementTree.Element("annotations")
    ElementTree.SubElement(root, "version").text = "1.1"
    task = ElementTree.SubElement(ElementTree.SubElement(root, "meta"), "task")
    for name, text in (("name", folder), ("size", str(len(frames))), ("mode", "annotation")):
        ElementTree.SubElement(task, name).text = text
    for number, frame in enumerate(frames):
        size = {"width": str(frame["width"]), "height": str(frame["height"])}
        ElementTree.SubElement(root, "image", {"id": str(number), "name": _image_name(frame), **size})
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def cvat_manifest(frames: Sequence[Frame]) -> str:
    """Return CVAT's dataset manifest, which gives the order of the images, and stands for them in a cloud storage."""
    lines: list[dict[str, Any]] = [{"version": "1.1"}, {"type": "images"}]
    for frame in frames:
        name = PurePosixPath(_image_name(frame))
        lines.append(
            {
                "name": name.stem,
                "extension": name.suffix,
                "width": frame["width"],
                "height": frame["height"],
                "meta": {"related_images": []},
            }
        )
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def label_studio(frames: Sequence[Frame], folder: str) -> list[dict[str, Any]]:
    """Return tasks whose images Label Studio serves itself; its document root is the parent of the folder."""
    where = "/data/local-files/?d=" + quote(folder) + "/"
    return [{"data": {"image": where + quote(frame["file_name"]), **_about(frame)}} for frame in frames]


def fiftyone(frames: Sequence[Frame], name: str) -> dict[str, Any]:
    """Return what `fiftyone.Dataset.from_json` reads, with paths below the folder (its `rel_dir`)."""
    kinds = {"video": "String", "frame_index": "Int", "pts_seconds": "Float"}
    kinds |= {"quality": "Float", "distance": "Float", "order": "Int"}
    samples = [
        {
            "filepath": frame["file_name"],
            "tags": [],
            "metadata": {"_cls": "ImageMetadata", "width": frame["width"], "height": frame["height"]},
            **_about(frame),
        }
        for frame in frames
    ]
    return {
        "name": name,
        "media_type": "image",
        "num_samples": len(samples),
        "sample_fields": {
            "filepath": "fiftyone.core.fields.StringField",
            **{field: f"fiftyone.core.fields.{kind}Field" for field, kind in kinds.items()},
        },
        "info": {},
        "samples": samples,
    }


def datumaro(frames: Sequence[Frame]) -> dict[str, Any]:
    """Return the subset "default" in Datumaro's own format."""
    items = [
        {
            "id": PurePosixPath(frame["file_name"]).stem,
            "annotations": [],
            "attr": _about(frame),
            "image": {"path": _image_name(frame), "size": [frame["height"], frame["width"]]},
        }
        for frame in frames
    ]
    return {
        "dm_format_version": "1.0",
        "media_type": 2,  # images
        "infos": {},
        "categories": {"label": {"labels": [], "attributes": []}},
        "items": items,
    }
