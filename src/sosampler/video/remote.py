"""Videos at addresses: a file-like object that fetches ranges of bytes, as FFmpeg needs them.

Which bytes are needed is known only while FFmpeg reads: the index first, which may lie at the end, then the packets of
the wanted frames. So the file is cut into blocks. Missing blocks are fetched, and those read last are kept.
"""

from __future__ import annotations

import io
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

from sosampler._util.validation import check_int
from sosampler.errors import InvalidArgument, LimitExceeded, MissingDependency, VideoError
from sosampler.video.limits import MAX_STALL_SECONDS, Limits, TimeLimit

SCHEMES = ("https", "http", "s3", "gs", "hf")
# What fsspec needs for a scheme, and what installs it.
_PACKAGES = {"s3": "'sosampler[remote]'", "gs": "'sosampler[gcs]'", "hf": "fsspec huggingface_hub"}
STORES = tuple(_PACKAGES)
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")

BLOCK = 1 << 16
"""Bytes of a block: about a keyframe, so that one request gets it and little else."""
# Blocks of one request at most: while reading goes straight on, as through an index, as many as were read before.
_MAX_AHEAD = 16
_MAX_CACHED = 512  # blocks, 32 MiB: the index of a long video and some hundred keyframes


# ---- names


def is_address(source: Any) -> bool:
    """Return whether a source is text that begins with a scheme.

    >>> is_address("https://example.org/a.mp4"), is_address("videos/a.mp4"), is_address("C:/a.mp4")
    (True, False, False)
    """
    return isinstance(source, str) and _ADDRESS.match(source) is not None


def shown_address(address: str) -> str:
    """Return an address as it is shown: without user, password, query and fragment, which may be secrets.

    >>> shown_address("https://me:secret@example.org:8443/a%20b.mp4?X-Amz-Signature=secret#t=5")
    'https://example.org:8443/a%20b.mp4'
    >>> shown_address("s3://bucket/what?.mp4")
    's3://bucket/what?.mp4'
    >>> shown_address("https://me:pa/ss@example.org/a.mp4")
    'https://...'
    """
    scheme, rest = address.split("://", 1)
    if scheme.lower() in ("s3", "gs", "hf"):  # "?" and "#" are letters of a name there
        place, slash, path = rest.partition("/")
        return f"{scheme}://{place.rpartition('@')[2]}{slash}{path}"
    try:
        parts = urlsplit(address)
        host = parts.netloc.rpartition("@")[2]
        # A password with an unescaped "/", "#" or "?" stands where the port should be.
        is_torn = "@" in rest and "@" not in parts.netloc and ":" in parts.netloc
    except ValueError:  # brackets that are no IPv6 address
        is_torn = True
    if is_torn:
        return f"{scheme}://..."
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def check_schemes(schemes: Iterable[str], known: Sequence[str] = SCHEMES) -> tuple[str, ...]:
    """Return the schemes that may be opened, each of which must be known."""
    if isinstance(schemes, str):
        raise InvalidArgument(f"schemes={schemes!r} must be a tuple of schemes, for example ({schemes!r},)")
    for scheme in (allowed := tuple(schemes)):
        if scheme not in known:
            raise InvalidArgument(f"the scheme {scheme!r} is {_whose(scheme)}; choose of: {', '.join(known)}")
    return allowed


def _whose(scheme: str) -> str:
    """Return which commands open a scheme that another one does not know."""
    from sosampler.video.streams import SCHEMES as OF_STREAMS

    if scheme in SCHEMES:
        return "for `select` and `classify`"
    return "for `watch`" if scheme in OF_STREAMS else "unknown"


def scheme_of(address: str, schemes: Sequence[str], known: Sequence[str] = SCHEMES) -> str:
    """Return the scheme of an address if it may be opened."""
    scheme, name = address.split("://", 1)[0].lower(), shown_address(address)
    if scheme not in known:
        raise VideoError(f"{name}: the scheme {scheme!r} is {_whose(scheme)}; addresses begin with {', '.join(known)}")
    if scheme not in schemes:
        raise VideoError(
            f"{name}: addresses are opened only where their scheme is allowed, by `select`, `classify` and `watch`; "
            f'add --allow-scheme {scheme} or schemes=("{scheme}",), or download it'
        )
    return scheme


# ---- a file


class Ranges(Protocol):
    """A file elsewhere."""

    size: int
    requests: int
    bytes_read: int
    notes: list[str]

    def fetch(self, start: int, stop: int) -> bytes:
        """Return exactly the bytes start <= i < stop, or raise VideoError."""
        ...

    def close(self) -> None: ...


class RemoteFile(io.RawIOBase):
    """A file at an address, to read and seek in. Nothing is shown of its address that may be secret."""

    def __init__(self, name: str, ranges: Ranges) -> None:
        super().__init__()
        self.name, self._ranges = name, ranges
        self._position = 0
        self._blocks: OrderedDict[int, bytes] = OrderedDict()  # number -> bytes, the one used last at the end
        self._run, self._next = 0, -1  # blocks that were fetched one behind the other, and the block behind them

    @property
    def transfer(self) -> dict[str, Any]:
        """What was fetched so far."""
        ranges = self._ranges
        return {
            "bytes_read": ranges.bytes_read,
            "file_bytes": ranges.size,
            "requests": ranges.requests,
        }

    @property
    def notes(self) -> list[str]:
        return self._ranges.notes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._ranges.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def read(self, size: int = -1) -> bytes:
        stop = self._ranges.size if size < 0 else min(self._position + size, self._ranges.size)
        if stop <= self._position:
            return b""
        first, last = self._position // BLOCK, (stop - 1) // BLOCK
        data = b"".join([self._block(number, last) for number in range(first, last + 1)])
        begin = self._position - first * BLOCK
        data = data[begin : begin + stop - self._position]
        self._position = stop
        return data

    def read_some(self, size: int) -> bytes:
        """Read what is left of the block at hand, and no more. FFmpeg asks for as much as its buffer holds."""
        return self.read(min(size, BLOCK - self._position % BLOCK))

    def _block(self, number: int, last: int) -> bytes:
        """Return a block, fetched together with others up to the last of this reading that are not there either."""
        if number not in self._blocks:
            self._run = self._run if number == self._next else 0
            end, furthest = number + 1, number + min(max(self._run, last + 1 - number), _MAX_AHEAD)
            while end < furthest and end not in self._blocks:
                end += 1
            start, stop = number * BLOCK, min(end * BLOCK, self._ranges.size)
            data = self._ranges.fetch(start, stop)
            self._run, self._next = self._run + end - number, end
            for offset in range(0, stop - start, BLOCK):
                self._blocks[(start + offset) // BLOCK] = data[offset : offset + BLOCK]
            while len(self._blocks) > _MAX_CACHED:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return self._blocks[number]

    def close(self) -> None:
        if not self.closed:
            self._ranges.close()
            self._blocks.clear()
        super().close()


def check_read(name: str, num_bytes: int, limits: Limits) -> None:
    """Refuse to read more bytes of an address than allowed."""
    if num_bytes > limits.max_read:
        raise LimitExceeded(
            f"{name}: more than max_read={limits.max_read} bytes of it are needed; keyframe candidates of an MP4 "
            "file need far less, fewer of them (-t) too; or raise the limit with --max-read or Limits(max_read=...)"
        )


def open_address(address: str, *, schemes: Sequence[str], limits: Limits) -> RemoteFile:
    """Open a file at an address whose scheme is allowed."""
    scheme = scheme_of(address, check_schemes(schemes))
    name = shown_address(address)
    ranges: Ranges
    if scheme in ("http", "https"):
        from sosampler.video.http_ranges import HttpRanges

        ranges = HttpRanges(address, name, limits)
    else:
        ranges = StoreRanges(address, name, limits)
    if not ranges.size:
        ranges.close()
        raise VideoError(f"{name}: the file is empty (zero bytes); upload it again")
    return RemoteFile(name, ranges)


# ---- stores that fsspec knows


class StoreRanges:
    """A file in S3, Google Cloud Storage or on the Hugging Face Hub. fsspec finds the credentials in its own places."""

    def __init__(self, address: str, name: str, limits: Limits) -> None:
        self._name, self._limits = name, limits
        self.requests = self.bytes_read = 0
        self.notes: list[str] = []
        self._time = TimeLimit(name, limits)
        self._store = store_of(address)
        self._path = path_in_store(self._store, address)
        info = self._call(lambda: self._store.info(self._path))
        if info.get("type") != "file":
            raise VideoError(f"{name}: is a folder; end it with / to take all videos below it, or give a pattern")
        self.size = check_int("size", info.get("size"), at_least=0)

    def fetch(self, start: int, stop: int) -> bytes:
        check_read(self._name, self.bytes_read + stop - start, self._limits)
        data: bytes = self._call(lambda: self._store.cat_file(self._path, start=start, end=stop))
        self.bytes_read += len(data)
        if len(data) != stop - start:
            raise VideoError(
                f"{self._name}: {len(data)} bytes came where {stop - start} were requested, so it changed or its "
                "length is wrong; try again"
            )
        return data

    def _call(self, work: Callable[[], Any]) -> Any:
        with self._time:
            for attempt in range(self._limits.retries + 1):
                self._time.check()
                self.requests += 1
                try:
                    return call_store(self._name, work, min(MAX_STALL_SECONDS, self._time.seconds_left))
                except Transient as error:
                    if attempt == self._limits.retries:
                        raise VideoError(str(error)) from None
                    time.sleep(pause(attempt))
        raise AssertionError("the last attempt returns or raises")

    def close(self) -> None:
        """Nothing is kept open."""


class Transient(Exception):
    """A failure that may be over at the next attempt; its text is a sentence."""


def pause(attempt: int) -> float:
    """Return the seconds to wait before the next attempt, from 0 on."""
    return min(0.5 * 2.0**attempt, 8.0)


def store_of(address: str) -> Any:
    """Return fsspec's file system for an address. Chains of addresses (`a::b`) are names like others here."""
    scheme = address.split("://", 1)[0].lower()
    try:
        import fsspec

        return fsspec.filesystem(scheme)
    except ImportError:
        raise MissingDependency(
            f"{scheme}:// needs a package that is not installed; install it with: pip install {_PACKAGES[scheme]}"
        ) from None


def path_in_store(store: Any, address: str) -> Any:
    """Return an address as its file system names it."""
    scheme, rest = address.split("://", 1)
    return store._strip_protocol(f"{scheme.lower()}://{rest}")


def call_store(name: str, work: Callable[[], Any], seconds: float, *, verb: str = "read") -> Any:
    """Call fsspec within a time; `verb` is for messages.

    What it says on errors is not shown: it may hold addresses and keys.
    """
    from sosampler._util.workers import within

    try:
        return within(seconds, work)
    except FileNotFoundError:
        raise VideoError(f"{name}: not found; check the address") from None
    except TimeoutError:
        raise Transient(
            f"{name}: the server does not answer within {seconds:g} seconds; try again, or raise the limit with "
            "--retries or Limits(retries=...)"
        ) from None
    except Exception as error:  # noqa: BLE001 - of whatever library serves the scheme
        kind, text = type(error).__name__, str(error).lower()
        if "expired" in text:
            raise VideoError(f"{name}: the credential has expired; get a new one, and run it again") from None
        if isinstance(error, PermissionError) or "Credential" in kind:
            raise VideoError(
                f"{name}: access is denied ({kind}); put a credential that may do this where fsspec looks, such as the "
                "variables of the cloud's own tools"
            ) from None
        raise Transient(
            f"{name}: cannot be {verb} ({kind}); check the address and the connection, or try again"
        ) from None


# ---- lists

LISTING_SECONDS = 600.0
"""To list the files of a pattern or a folder: a thousand a request."""


def has_pattern(address: str) -> bool:
    """Return whether an address of a store is a pattern or a folder; on the web "?" begins a query.

    >>> has_pattern("s3://bucket/*.mp4"), has_pattern("s3://bucket/folder/"), has_pattern("https://h/a.mp4?key=*")
    (True, True, False)
    """
    scheme = address.split("://", 1)[0].lower()
    return scheme in STORES and (address.endswith("/") or re.search(r"[*?\[]", address) is not None)


def expand_address(address: str, schemes: Sequence[str], suffixes: Iterable[str]) -> list[str]:
    """Return the videos that a pattern (`s3://bucket/*.mp4`) or a folder (`s3://bucket/folder/`) stands for."""
    scheme, name = scheme_of(address, check_schemes(schemes)), shown_address(address)
    store = store_of(address)
    path = path_in_store(store, address)
    endings = tuple(suffixes)

    def names() -> list[str]:
        found = store.find(path) if address.endswith("/") else store.glob(path)
        return [each for each in found if not address.endswith("/") or each.lower().endswith(endings)]

    try:
        paths = call_store(name, names, LISTING_SECONDS)
    except Transient as error:
        raise VideoError(str(error)) from None
    if not paths:
        raise InvalidArgument(f"{name}: there is no video; check the address, and quote it against the shell")
    return [f"{scheme}://{each}" for each in sorted(paths)]
