"""One message as one `bytes`: a header, then its fields in order, arrays aligned to 8 bytes.

Nothing is pickled. `decode` checks every length before it reads and validates the result, so any
bytes either give a sound message or raise MalformedMessage. Decoded arrays are read-only views of
the bytes, which they keep alive; nobody else can change them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from outrider.protos.messages import (
    DraftBatch,
    FeatureSpec,
    MalformedMessage,
    Message,
    RequestClose,
    RequestOpen,
    VerdictBatch,
)
from outrider.protos.sampling import SamplingParameters

WIRE_VERSION = 1
MAX_MESSAGE_BYTES = 2**28
ALIGNMENT = 8

_MAGIC = b"ORDR"
_HEADER = struct.Struct("<4sHHQ")  # magic, wire version, type tag, bytes without padding
_DTYPES = tuple(
    np.dtype(t).newbyteorder("<") for t in (np.int32, np.int64, np.uint16, np.float16, np.float32)
)
_MAX_DIMENSIONS = 2


def encode(message: Message, pad_to: int = 0) -> bytes:
    """The message as bytes, followed by zeros up to `pad_to` bytes.

    Padding makes the size of a batch independent of what was drawn: give the size that the
    largest possible batch has (`largest_draft_batch`). Raises MalformedMessage for a message
    that is not sound and ValueError for a `pad_to` that it does not fit into.
    """
    message.validate()
    tag = _TAGS[type(message)]
    writer = _Writer()
    for name, kind in _LAYOUTS[tag].fields:
        kind.write(writer, getattr(message, name))
    size = writer.size
    if pad_to and size > pad_to:
        raise ValueError(f"pad_to: {pad_to} is not usable; the message takes {size} bytes")
    if max(size, pad_to) > MAX_MESSAGE_BYTES:
        raise MalformedMessage("size", size, f"send at most {MAX_MESSAGE_BYTES} bytes a message")
    writer.parts[0] = _HEADER.pack(_MAGIC, WIRE_VERSION, tag, size)
    writer.parts.append(bytes(max(0, pad_to - size)))
    return b"".join(writer.parts)


def decode(data: bytes | bytearray | memoryview) -> Message:
    """The message in `data`. Raises MalformedMessage for anything else, and nothing else."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise MalformedMessage("size", len(data), f"send at most {MAX_MESSAGE_BYTES} bytes")
    if not isinstance(data, bytes):
        data = bytes(data)  # what the sender may still write to must not change a message
    if len(data) < _HEADER.size:
        raise MalformedMessage("size", len(data), f"a message has at least {_HEADER.size} bytes")
    magic, version, tag, size = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise MalformedMessage("magic", magic, f"a message begins with {_MAGIC!r}")
    if version != WIRE_VERSION:
        raise MalformedMessage("version", version, f"this side speaks version {WIRE_VERSION}")
    if tag not in _LAYOUTS:
        raise MalformedMessage("tag", tag, f"the types here are {sorted(_LAYOUTS)}")
    if not _HEADER.size <= size <= len(data):
        raise MalformedMessage("size", size, f"{len(data)} bytes arrived; send it whole")
    if np.frombuffer(data, np.uint8, offset=size).any():
        raise MalformedMessage("padding", "other bytes", "pad with zeros")
    layout = _LAYOUTS[tag]
    reader = _Reader(data, size)
    values = {name: kind.read(reader, name) for name, kind in layout.fields}
    if reader.offset != size:
        raise MalformedMessage("size", size, f"the fields end at byte {reader.offset}")
    message: Message = layout.type(**values)
    message.validate()
    return message


def largest_draft_batch(
    service: str, sender: str, entries: int, tokens: int, max_support: int, id_bytes: int
) -> int:
    """The most bytes a batch of that many chains and draft tokens can take; for `pad_to`."""
    arrays = (8 + 3 * 4) * entries + 4 * (entries + 1)
    arrays += 2 * 4 * tokens + 4 * (tokens + 1) + (id_bytes + 2) * max_support * tokens
    names = 2 * 2 + len(service.encode()) + len(sender.encode())
    # Ten arrays, each with its dtype, dimensions and length, and up to 7 bytes of alignment.
    return _HEADER.size + names + 3 * 8 + 1 + 10 * (2 + 4 + ALIGNMENT - 1) + arrays


class _Writer:
    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = [b""]  # the header, once the size is known
        self.size = _HEADER.size

    def put(self, part: bytes | memoryview) -> None:
        self.parts.append(part)
        self.size += len(part)

    def align(self) -> None:
        self.put(bytes(-self.size % ALIGNMENT))


class _Reader:
    def __init__(self, data: bytes, end: int) -> None:
        self.data = data
        self.end = end
        self.offset = _HEADER.size

    def take(self, size: int, field: str) -> int:
        """Moves past `size` bytes and returns where they begin."""
        start = self.offset
        if size > self.end - start:
            raise MalformedMessage(field, f"{self.end - start} bytes", f"{size} were announced")
        self.offset = start + size
        return start

    def unpack(self, form: struct.Struct, field: str) -> tuple[Any, ...]:
        return form.unpack_from(self.data, self.take(form.size, field))

    def align(self, field: str) -> None:
        size = -self.offset % ALIGNMENT
        start = self.take(size, field)
        if any(self.data[start : start + size]):
            raise MalformedMessage(field, "other bytes", "align with zeros")


@dataclass(frozen=True)
class _Kind:
    """How one sort of field is written and read."""

    write: Callable[[_Writer, Any], None]
    read: Callable[[_Reader, str], Any]


def _plain(form: str) -> _Kind:
    packer = struct.Struct(form)
    return _Kind(
        lambda writer, value: writer.put(packer.pack(value)),
        lambda reader, field: reader.unpack(packer, field)[0],
    )


_INTEGER = _plain("<q")
_SEED = _plain("<Q")
_REAL = _plain("<d")
_BYTE = _plain("<B")
_LENGTH = _plain("<I")
_NAME_LENGTH = _plain("<H")


def _write_flag(writer: _Writer, value: bool) -> None:
    _BYTE.write(writer, int(value))


def _read_flag(reader: _Reader, field: str) -> bool:
    value = _BYTE.read(reader, field)
    if value > 1:
        raise MalformedMessage(field, value, "a flag is 0 or 1")
    return bool(value)


def _write_name(writer: _Writer, value: str) -> None:
    text = value.encode()
    _NAME_LENGTH.write(writer, len(text))
    writer.put(text)


def _read_name(reader: _Reader, field: str) -> str:
    size = _NAME_LENGTH.read(reader, field)
    start = reader.take(size, field)
    try:
        return reader.data[start : start + size].decode()
    except UnicodeDecodeError as error:
        raise MalformedMessage(field, reader.data[start : start + size], "write UTF-8") from error


def _write_array(writer: _Writer, value: np.ndarray[Any, Any]) -> None:
    code = _DTYPES.index(value.dtype.newbyteorder("<"))
    writer.put(struct.pack(f"<BB{value.ndim}I", code, value.ndim, *value.shape))
    writer.align()
    writer.put(value.astype(_DTYPES[code], copy=False).tobytes())


def _read_array(reader: _Reader, field: str) -> np.ndarray[Any, Any]:
    code, dimensions = _BYTE.read(reader, field), _BYTE.read(reader, field)
    if code >= len(_DTYPES) or dimensions > _MAX_DIMENSIONS:
        raise MalformedMessage(field, (code, dimensions), "unknown type or number of dimensions")
    shape = tuple(_LENGTH.read(reader, field) for _ in range(dimensions))
    reader.align(field)
    dtype = _DTYPES[code]
    count = 1
    for length in shape:
        count *= length
    start = reader.take(count * dtype.itemsize, field)
    flat = np.frombuffer(reader.data, dtype, count, start)
    return flat.reshape(shape).astype(dtype.newbyteorder("="), copy=False)


def _optional(kind: _Kind) -> _Kind:
    def write(writer: _Writer, value: Any) -> None:
        _write_flag(writer, value is not None)
        if value is not None:
            kind.write(writer, value)

    def read(reader: _Reader, field: str) -> Any:
        return kind.read(reader, field) if _read_flag(reader, field) else None

    return _Kind(write, read)


def _several(*kinds: _Kind) -> _Kind:
    """A tuple of plain values, or of tuples where there are several kinds."""

    def write(writer: _Writer, values: tuple[Any, ...]) -> None:
        _LENGTH.write(writer, len(values))
        for value in values:
            row = value if len(kinds) > 1 else (value,)
            for kind, item in zip(kinds, row, strict=True):
                kind.write(writer, item)

    def read(reader: _Reader, field: str) -> tuple[Any, ...]:
        count = _LENGTH.read(reader, field)
        if count > reader.end - reader.offset:  # an item takes at least a byte
            raise MalformedMessage(field, count, "more were announced than arrived")
        rows = (tuple(kind.read(reader, field) for kind in kinds) for _ in range(count))
        return tuple(row if len(kinds) > 1 else row[0] for row in rows)

    return _Kind(write, read)


def _record(type_: type[Any], fields: tuple[tuple[str, _Kind], ...]) -> _Kind:
    def write(writer: _Writer, value: Any) -> None:
        for name, kind in fields:
            kind.write(writer, getattr(value, name))

    def read(reader: _Reader, field: str) -> Any:
        return type_(**{name: kind.read(reader, f"{field}.{name}") for name, kind in fields})

    return _Kind(write, read)


@dataclass(frozen=True)
class _Layout:
    type: type[Any]
    fields: tuple[tuple[str, _Kind], ...]


_FLAG = _Kind(_write_flag, _read_flag)
_NAME = _Kind(_write_name, _read_name)
_ARRAY = _Kind(_write_array, _read_array)
_PARAMETERS = _record(
    SamplingParameters,
    (
        ("temperature", _REAL),
        ("top_k", _INTEGER),
        ("top_p", _REAL),
        ("min_p", _REAL),
        ("repetition_penalty", _REAL),
        ("frequency_penalty", _REAL),
        ("presence_penalty", _REAL),
        ("logit_bias", _several(_INTEGER, _REAL)),
        ("allowed_token_ids", _optional(_several(_INTEGER))),
    ),
)
_ROUND = (
    ("service", _NAME),
    ("sender", _NAME),
    ("round", _INTEGER),
    ("target_version", _INTEGER),
    ("head_version", _INTEGER),
)


def _arrays(*names: str) -> tuple[tuple[str, _Kind], ...]:
    return tuple((name, _ARRAY) for name in names)


_LAYOUTS: dict[int, _Layout] = {
    1: _Layout(
        RequestOpen,
        (
            ("request_id", _INTEGER),
            ("epoch", _INTEGER),
            ("seed", _SEED),
            ("sample_index", _INTEGER),
            ("method", _NAME),
            ("parameters", _PARAMETERS),
            *_arrays("prompt_ids", "output_ids"),
        ),
    ),
    2: _Layout(RequestClose, (("request_id", _INTEGER), ("epoch", _INTEGER))),
    3: _Layout(
        FeatureSpec,
        (
            ("layers", _several(_INTEGER)),
            ("hidden_size", _INTEGER),
            ("head_version", _INTEGER),
            ("norm", _optional(_ARRAY)),
            ("projection", _optional(_ARRAY)),
        ),
    ),
    4: _Layout(
        VerdictBatch,
        (
            *_ROUND,
            *_arrays("request_ids", "epochs", "base_lengths", "num_accepted", "num_to_draft"),
            *_arrays("cu_tokens", "token_ids", "features"),
        ),
    ),
    5: _Layout(
        DraftBatch,
        (
            *_ROUND,
            ("deterministic", _FLAG),
            *_arrays("request_ids", "epochs", "base_lengths", "last_token_ids"),
            *_arrays("cu_num_draft_tokens", "token_ids", "parents"),
            *_arrays("cu_support", "support_ids", "support_weights"),
        ),
    ),
}
_TAGS: dict[type[Any], int] = {layout.type: tag for tag, layout in _LAYOUTS.items()}
