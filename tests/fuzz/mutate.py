"""Damage files: bytes of any file, and the structure of MP4 boxes, EBML elements and RIFF chunks."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

_EXTREMES = (0, 1, 2, 3, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 10**5, 5 * 10**6)
_EXTREMES += (0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1)
_MAX_BYTES = 4 << 20  # of a damaged file


# ---- trees: a file as nested nodes, which write themselves again


@dataclass
class Node:
    """A box, element or chunk. `claimed` is a size to write in the place of the true one."""

    kind: bytes
    data: bytes = b""  # before the children
    children: list[Node] = field(default_factory=list)
    is_parent: bool = False
    claimed: int | None = None


@dataclass(frozen=True)
class Format:
    parse: Callable[[bytes], list[Node]]
    header: Callable[[Node, int], bytes]  # of a node whose contents have so many bytes
    pad: int = 1  # contents are filled up to a multiple of this


def to_bytes(nodes: list[Node], fmt: Format) -> bytes:
    written = bytearray()
    for node in nodes:
        body = node.data + to_bytes(node.children, fmt)
        written += fmt.header(node, len(body) if node.claimed is None else node.claimed) + body
        written += bytes(-len(body) % fmt.pad)
    return bytes(written)


def walk(nodes: list[Node]) -> Iterator[tuple[list[Node], int]]:
    """Yield every node as its siblings and its place among them."""
    for place, node in enumerate(nodes):
        yield nodes, place
        yield from walk(node.children)


_BOXES = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"mvex", b"moof", b"traf", b"dinf", b"udta"}


def _parse_boxes(data: bytes) -> list[Node]:
    nodes, at = [], 0
    while at + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, at)
        size = size if 8 <= size <= len(data) - at else len(data) - at
        body = data[at + 8 : at + size]
        is_parent = kind in _BOXES
        nodes.append(Node(kind, b"" if is_parent else body, _parse_boxes(body) if is_parent else [], is_parent))
        at += size
    return nodes


def _box_header(node: Node, size: int) -> bytes:
    return struct.pack(">I4s", (size + 8) & 0xFFFFFFFF, node.kind)


# Segment, SeekHead, Info, Tracks, TrackEntry, Video, Cluster, BlockGroup, Cues, CuePoint, CueTrackPositions, Tags, EBML
_MASTERS = set(map(bytes.fromhex, ("18538067", "114D9B74", "1549A966", "1654AE6B", "AE", "E0", "1F43B675")))
_MASTERS |= set(map(bytes.fromhex, ("A0", "1C53BB6B", "BB", "B7", "1254C367", "1A45DFA3")))


def _parse_elements(data: bytes) -> list[Node]:
    nodes, at = [], 0
    while at < len(data):
        id_size = 9 - data[at].bit_length() if data[at] else 1
        kind, at = data[at : at + id_size], at + id_size
        if at >= len(data):
            break
        length = 9 - data[at].bit_length() if data[at] else 1
        size = int.from_bytes(data[at : at + length]) & ((1 << 7 * length) - 1)
        at += length
        size = min(size, len(data) - at)  # also of those whose size is unknown
        body = data[at : at + size]
        is_parent = kind in _MASTERS
        nodes.append(Node(kind, b"" if is_parent else body, _parse_elements(body) if is_parent else [], is_parent))
        at += size
    return nodes


def _element_header(node: Node, size: int) -> bytes:
    return node.kind + (1 << 56 | size & ((1 << 56) - 1)).to_bytes(8)


def _parse_chunks(data: bytes) -> list[Node]:
    nodes, at = [], 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from("<4sI", data, at)
        size = min(size, len(data) - at - 8)
        body = data[at + 8 : at + 8 + size]
        is_parent = kind in (b"RIFF", b"LIST")
        children = _parse_chunks(body[4:]) if is_parent else []
        nodes.append(Node(kind, body[:4] if is_parent else body, children, is_parent))
        at += 8 + size + size % 2
    return nodes


def _chunk_header(node: Node, size: int) -> bytes:
    return struct.pack("<4sI", node.kind, size & 0xFFFFFFFF)


BOXES = Format(_parse_boxes, _box_header)
ELEMENTS = Format(_parse_elements, _element_header)
CHUNKS = Format(_parse_chunks, _chunk_header, pad=2)
FORMATS = {".mp4": BOXES, ".mov": BOXES, ".mkv": ELEMENTS, ".webm": ELEMENTS, ".avi": CHUNKS}


# ---- edits


def _with_number(data: bytes, rng: np.random.Generator) -> bytes:
    """Overwrite 1, 2, 4 or 8 bytes by an extreme number, or by one near to what was there."""
    width = int(rng.choice([1, 2, 4, 4, 4, 8]))
    if len(data) < width:
        return data
    # Counts, sizes and rates stand at the beginning.
    at = int(rng.integers(0, len(data) - width + 1 if rng.random() < 0.3 else min(len(data) - width, 32) + 1))
    order = "big" if rng.random() < 0.8 else "little"
    value = _EXTREMES[int(rng.choice(len(_EXTREMES)))]
    if rng.random() >= 0.8:
        value = int.from_bytes(data[at : at + width], order) + int(rng.integers(-3, 4))
    return data[:at] + (value % (1 << 8 * width)).to_bytes(width, order) + data[at + width :]


def edit_tree(data: bytes, fmt: Format, rng: np.random.Generator) -> bytes:
    """Drop, double, exchange, rename or enlarge nodes, change numbers in them, or lie about their sizes."""
    nodes = fmt.parse(data)
    for _ in range(int(rng.integers(1, 5))):
        places = list(walk(nodes))
        if not places:
            break
        # Half of the time one of the last half, where the small ones with the numbers are, not the pictures.
        siblings, place = places[int(rng.integers(len(places) // 2 if rng.random() < 0.5 else 0, len(places)))]
        node = siblings[place]
        match int(rng.integers(0, 9)):
            case 0:
                del siblings[place]
            case 1:
                siblings.insert(place, node)
            case 2:
                other, elsewhere = places[int(rng.integers(len(places)))]
                if not (node.is_parent or other[elsewhere].is_parent):  # a box inside itself never ends
                    siblings[place], other[elsewhere] = other[elsewhere], node
            case 3:
                node.kind = rng.bytes(len(node.kind))
            case 4:
                node.claimed = int(rng.choice([0, 1, 7, 8, 1000, 10**6, 2**31 - 1, 2**32 - 1]))
            case 5 if not node.is_parent and node.data:
                times = int(rng.integers(2, max(3, min(100_000, 1_200_000 // len(node.data)))))
                node.data = (node.data * times)[:_MAX_BYTES]  # tables of thousands of entries
            case _:
                if not node.is_parent:
                    node.data = _with_number(node.data, rng)
    return to_bytes(nodes, fmt)


def claim(data: bytes, rng: np.random.Generator) -> bytes:
    """Let the index of an MP4 file name many samples of one or two bytes, or show them in many edits."""
    nodes, boxes = _parse_boxes(data), {}
    for siblings, place in walk(nodes):
        boxes[siblings[place].kind] = siblings[place]
    count = int(rng.choice([1000, 3000, 10**5, 10**6, 5 * 10**6]))
    if rng.random() < 0.5 and b"elst" in boxes:
        edits = rng.integers(0, 3000, (min(count, 10**5), 3), dtype=np.uint32)
        edits[:, 2] = 0x10000  # at normal speed
        boxes[b"elst"].data = struct.pack(">II", 0, len(edits)) + edits.astype(">u4").tobytes()
    elif {b"stsz", b"stts", b"stsc"} <= boxes.keys():
        boxes[b"stsz"].data = struct.pack(">III", 0, int(rng.integers(1, 3)), count)
        boxes[b"stts"].data = struct.pack(">IIII", 0, 1, count, 1)
        boxes[b"stsc"].data = struct.pack(">IIIII", 0, 1, 1, count, 1)
        if b"ctts" in boxes:
            boxes[b"ctts"].data = bytes(8)
    return to_bytes(nodes, BOXES)


def edit_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    """Cut, overwrite, drop, double or blank a part of the file, flip bits, or change a number."""
    damaged = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        if len(damaged) < 64:
            break
        at = int(rng.integers(0, len(damaged)))
        length = int(rng.integers(1, max(2, len(damaged) // 8)))
        match int(rng.integers(0, 8)):
            case 0:
                del damaged[max(at, 64) :]
            case 1:
                damaged[at : at + length] = rng.bytes(len(damaged[at : at + length]))
            case 2:
                del damaged[at : at + length]
            case 3:
                damaged[at:at] = damaged[at : at + length]
            case 4:
                damaged[at : at + length] = bytes(len(damaged[at : at + length]))
            case 5:
                for place in rng.integers(0, len(damaged), int(rng.integers(1, 40))).tolist():
                    damaged[place] ^= 1 << int(rng.integers(0, 8))
            case 6:
                damaged[at:] = _with_number(bytes(damaged[at:]), rng)
            case _:
                damaged[:] = _with_number(bytes(damaged), rng)
    return bytes(damaged)


def damaged(data: bytes, suffix: str, rng: np.random.Generator) -> bytes:
    """Return the file with some damage."""
    fmt = FORMATS.get(suffix)
    if fmt is BOXES and rng.random() < 0.05:
        return claim(data, rng)
    if suffix == ".gif" and rng.random() < 0.1:  # a canvas of some megapixels from some bytes
        data = data[:6] + rng.choice([0, 1, 3000, 8000, 0xFFFF], 2).astype("<u2").tobytes() + data[10:]
    if fmt is not None and rng.random() < 0.6:
        data = edit_tree(data, fmt, rng)
        if rng.random() < 0.7:
            return data[:_MAX_BYTES]
    return edit_bytes(data, rng)[:_MAX_BYTES]
