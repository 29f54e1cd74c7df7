"""What a lesson shows in a panel besides the engine's records: a text in pieces, candidates, a key that is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minitui.viewmodel.history.steps import Steps


@dataclass(frozen=True, slots=True)
class Pieces:
    """A text in pieces. `prompt`: how many pieces are the prompt; the others are the reply. None: there is no reply."""

    title: str
    pieces: tuple[str, ...]
    line: str = ""  # a sentence about the picture
    ids: tuple[int, ...] = ()  # the token id of each piece, if the pieces are tokens
    lit: frozenset[int] = frozenset()  # the pieces that are new
    prompt: int | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that may be drawn next. `now`: its probability with the present settings; None: it was cut. `at_most`:
    the probability is not known exactly, because the engine lists only the likeliest tokens."""

    text: str
    before: float  # its probability in the model's own distribution
    now: float | None
    at_most: bool = False


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest next tokens with some sampling settings. `drawn`: the index of the token that was drawn."""

    title: str
    tokens: tuple[Candidate, ...]
    line: str = ""  # a sentence about the picture
    drawn: int | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds by size: {n: ms}. Sizes that are not measured yet have no entry."""

    name: str
    points: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Curves:
    """The time of a step by its size, for several machines. `unit`: what a size counts, such as "rows"."""

    title: str
    unit: str
    sizes: tuple[int, ...]
    curves: tuple[Curve, ...]


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """Consecutive steps of a recording, drawn as tracks of host and device. `line`: a sentence about them."""

    name: str
    steps: Steps
    line: str
    pauses: bool = False  # between the kernels of a step, the device has pauses
    first: int = 0  # the picture begins with the end of this step, or of the first one that is kept


@dataclass(frozen=True, slots=True)
class RecordedRuns:
    """Groups of recorded runs; the runs of a group have one scale of `span` ms. `until`: the part drawn so far."""

    title: str
    groups: tuple[tuple[str, float, tuple[RecordedRun, ...]], ...]  # (name, span, runs)
    until: float = 1.0


@dataclass(frozen=True, slots=True)
class KeyRead:
    """A query that reads a key through the block table of its request. Both are numbered by their positions."""

    request: int
    table: tuple[int, ...]
    block_size: int
    query: int
    key: int

    @property
    def logical(self) -> int:
        """The index of the block table's entry for the key."""
        return self.key // self.block_size

    @property
    def block(self) -> int:
        """The physical block of the key."""
        return self.table[self.logical]

    @property
    def slot(self) -> int:
        """The place of the key in the pool, counted in tokens."""
        return self.block * self.block_size + self.key % self.block_size


@dataclass(frozen=True, slots=True)
class Wire:
    """An exchange over HTTP. `lines`: ("sent" or "got", text)."""

    title: str
    lines: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class TreeLine:
    """A node of the prefix tree. `blocks`: (its number in the pool, "kept", "looked", "match", "new" or "evicted")."""

    depth: int
    name: str
    blocks: tuple[tuple[int, str], ...]
    users: int = 0


@dataclass(frozen=True, slots=True)
class TreeBlocks:
    """The prefix tree block by block. `line`: a sentence about the picture."""

    title: str
    nodes: tuple[TreeLine, ...]
    line: str = ""


Board = Pieces | Candidates | KeyRead | Curves | RecordedRuns | Wire | TreeBlocks
