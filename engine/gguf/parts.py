"""Finds the files of a split GGUF model, NAME-00001-of-00003.gguf and so on, and reads them as one.

The first file has the metadata of the model; every file has split.no, split.count and some of the tensors.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from engine.errors import CheckpointError
from engine.fields import listed, shown
from engine.gguf.header import MOST_TENSORS, Header, read_header

NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
MOST_PARTS = 1_000


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
