"""Reads the header of a GGUF file: the metadata and the list of tensors. Everything in it is checked before it is used.

A file has a magic number, a version, two counts, the metadata, the list of tensors, and then the tensors' bytes. A
model may be split into NAME-00001-of-00003.gguf and so on. The first file has the metadata of the model; every file
has split.no, split.count and some of the tensors.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from engine.errors import CheckpointError
from engine.fields import listed, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
LARGEST_HEADER = 256 << 20  # bytes; that of a model with 260,000 tokens and their merges has 20 million
LONGEST_STRING = 4 << 20  # bytes; the longest chat templates have 30,000
MOST_ENTRIES = 4_096  # of the metadata
MOST_ITEMS = 1 << 21  # of all arrays; 260,000 tokens, with their types, scores and 520,000 merges, are 1.3 million
MOST_TENSORS = 100_000
MOST_DIMENSIONS = 4
MOST_NUMBERS = 65_536  # of a tensor that holds settings
STRING, ARRAY, FLOAT = 8, 9, 6
NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
BLOCKS = {  # type of a tensor -> (name, numbers of a block, bytes of a block)
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 39: ("MXFP4", 32, 17),
}
NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
MOST_PARTS = 1_000


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the file. `shape`: as in torch; the file lists it in reverse."""

    name: str
    shape: tuple[int, ...]
    type: str  # a name of BLOCKS
    offset: int  # of its first byte, from the file's begin
    nbytes: int
    path: Path  # of the file: a model may be split into several


@dataclass(frozen=True)
class Header:
    """The metadata and the tensors of a file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    def error(self, sentence: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {sentence}")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Returns a value of the metadata. Raises CheckpointError if it is not a `kind`, or absent with no default."""
        value = self.metadata.get(key, default)
        if value is None:
            raise self.error(f"has no {key} in its metadata: download it again, or use another file")
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.error(f"has {key} = {shown(value)}, which is not of type {kind.__name__}: download it again")
        return value

    def numbers(self, name: str) -> list[float]:
        """Returns the numbers of a small tensor that holds settings of the model."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.type != "F32" or tensor.nbytes > 4 * MOST_NUMBERS:
            raise self.error(f"has no tensor {name} of at most {MOST_NUMBERS:,} F32 numbers: download it again")
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset)
            return list(struct.unpack(f"<{tensor.nbytes // 4}f", file.read(tensor.nbytes)))


def model_name(path: Path) -> str:
    """Returns the name of a GGUF file without its number and its ending: equal for all parts of a model."""
    match = NAME.fullmatch(path.name)
    return match[1] if match else path.stem


def parts_of(path: Path) -> list[Path]:
    """Returns the files of the model, in order, of which `path` is one. Raises CheckpointError if files are missing."""
    match = NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    if not 0 < int(match[2]) <= count <= MOST_PARTS:
        raise CheckpointError(
            f"{path} is named as part {int(match[2])} of {count}, but a model has 1 to {MOST_PARTS:,} parts: give the "
            "file its own name again"
        )
    parts = [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}{path.suffix}") for number in range(1, count + 1)]
    if missing := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(
            f"{path} is part {int(match[2])} of {count}, and {listed(missing)} {'is' if len(missing) == 1 else 'are'} "
            f"missing: download the rest to {path.parent}"
        )
    return parts


def read_parts(parts: list[Path]) -> Header:
    """Returns the headers of all parts as one. Raises CheckpointError if the parts are not those of one model."""
    headers = [read_header(part) for part in parts]
    first, total = headers[0], sum(len(header.tensors) for header in headers)
    for number, header in enumerate(headers):
        count, place = header.get("split.count", int, 1), header.get("split.no", int, number)
        if count != len(parts) and not (count == 0 and len(parts) == 1):
            raise header.error(
                f"has split.count = {count}, but its name means {len(parts)} part{'s' if len(parts) > 1 else ''}: give "
                f"the parts their own names again, as in {model_name(header.path)}-00001-of-{count:05}.gguf"
            )
        if place != number:
            raise header.error(f"has split.no = {place} and should have {number}: give the parts their own names again")
    expected = first.get("split.tensors.count", int, total)
    if total != expected or total > MOST_TENSORS:
        raise first.error(
            f"has split.tensors.count = {expected:,}, but its {len(parts)} parts have {total:,} tensors: the parts "
            "belong to different models; download them again"
        )
    tensors = dict(first.tensors)
    for header in headers[1:]:
        if twice := tensors.keys() & header.tensors.keys():
            raise header.error(f"has the tensor {shown(min(twice))}, like another part: download the parts again")
        tensors |= header.tensors
    return replace(first, tensors=tensors)


def read_header(path: Path) -> Header:
    """Returns the header of a GGUF file. Raises CheckpointError, with the fault, if it is not a whole GGUF file."""
    try:
        with path.open("rb") as file:
            return _Reader(path, file, path.stat().st_size).header()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}): download it again") from error


class _Reader:
    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self._size = path, file, size
        self._taken = self._items = 0  # bytes of the header, items of arrays in it

    def header(self) -> Header:
        if self._take(4) != MAGIC:
            raise self._error("does not begin with GGUF: it is not a GGUF file")
        version, tensors, entries = self._number("<I"), self._number("<Q"), self._number("<Q")
        if version not in VERSIONS:
            raise self._error(f"has version {version} of GGUF: supported are {VERSIONS[0]} and {VERSIONS[1]}")
        self._limit("entries of metadata", entries, MOST_ENTRIES)
        self._limit("tensors", tensors, MOST_TENSORS)
        metadata = {}
        for _ in range(entries):
            key = self._string()
            metadata[key] = self._value(self._number("<I"))
        listed = [self._tensor() for _ in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment <= 1 << 20:
            raise self._error(f"has general.alignment {shown(alignment)}: download it again")
        begin = -(-self._file.tell() // alignment) * alignment
        room = self._size - begin
        found: dict[str, Tensor] = {}
        for name, shape, kind, offset in listed:
            if kind not in BLOCKS:
                raise self._error(
                    f"stores {shown(name)} as type {kind}, which is not supported: use a file of type "
                    f"{', '.join(sorted(name for name, *_ in BLOCKS.values()))}"
                )
            title, numbers, bytes_ = BLOCKS[kind]
            count = math.prod(shape)
            if name in found or shape[-1] % numbers:
                raise self._error(f"has a tensor {shown(name)} twice, or in parts of blocks: download it again")
            tensor = Tensor(name, shape, title, begin + offset, count // numbers * bytes_, self._path)
            room -= tensor.nbytes
            if tensor.offset + tensor.nbytes > self._size:
                raise self._error(
                    f"ends at byte {self._size:,}, within the tensor {shown(name)}, which needs "
                    f"{tensor.offset + tensor.nbytes:,}: download it again"
                )
            if room < 0:
                raise self._error(f"has tensors that overlap, such as {shown(name)}: download it again")
            found[name] = tensor
        return Header(self._path, metadata, found)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(), self._number("<I")
        self._limit("dimensions", dimensions, MOST_DIMENSIONS)
        shape = tuple(self._number("<Q") for _ in range(dimensions))[::-1]
        if not shape or not all(0 < size <= self._size * 8 for size in shape):
            raise self._error(f"has a tensor {shown(name)} of shape {shown(list(shape))}: download it again")
        return name, shape, self._number("<I"), self._number("<Q")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            value = self._number(self._format(kind))
            return float(str(np.float32(value))) if kind == FLOAT else value  # 0.22, not 0.2199999988079071
        inner, count = self._number("<I"), self._number("<Q")
        self._items += count
        self._limit("items in its arrays", self._items, MOST_ITEMS)
        if inner == STRING:
            return [self._string() for _ in range(count)]
        one = self._format(inner)
        data = self._take(count * struct.calcsize(one))
        return list(struct.unpack(f"<{count}{one[1]}", data))

    def _format(self, kind: int) -> str:
        if kind not in NUMBERS:
            raise self._error(f"has a value of type {kind} in its metadata, which is unknown: download it again")
        return NUMBERS[kind]

    def _string(self) -> str:
        length = int.from_bytes(self._take(8), "little")  # not `_number`: there are a million strings
        if length > LONGEST_STRING:
            self._limit("bytes in a string", length, LONGEST_STRING)
        return self._take(length).decode("utf-8", "replace")

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _limit(self, what: str, found: int, most: int) -> None:
        if found > most:
            raise self._error(f"has {found:,} {what}, and the limit is {most:,}: download it again")

    def _take(self, count: int) -> bytes:
        self._taken += count
        if self._taken > LARGEST_HEADER:
            raise self._error(f"has a header of more than {LARGEST_HEADER:,} bytes: download it again")
        data = self._file.read(count)
        if len(data) < count:
            raise self._error(f"ends within its header, at byte {self._size:,}: download it again")
        return data

    def _error(self, sentence: str) -> CheckpointError:
        return CheckpointError(f"{self._path} {sentence}")
