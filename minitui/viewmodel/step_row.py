"""One step: its figures, and the parts of the host's time."""

from __future__ import annotations

from dataclasses import dataclass

Chunk = tuple[int, int, int, bool]  # request, start, tokens, True if the step samples a token after the chunk
Draft = tuple[int, int, int]  # request, tokens drafted, tokens accepted (-1: not known yet)
KINDS = ("", "decode", "mixed", "prefill")
PARTS = ("commit", "emit", "gate", "plan", "launch", "wait")  # parts of the host's time, as in the record "parts"


@dataclass(frozen=True, slots=True)
class StepParts:
    """The host's time, in ms, by kind of work, and its interruptions.

    The time begins when the results of the previous step arrive, or when the idle engine gets work.
    """

    commit: float
    emit: float
    gate: float
    plan: float
    launch: float
    wait: float
    gc: float
    delayed: float | None  # time in which another program had the core; None: unknown
    stops: int  # how often a signal stopped the process

    @property
    def took(self) -> float:
        """The time without `gate` (pause and slow motion)."""
        return self.commit + self.emit + self.plan + self.launch + self.wait


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step. Durations are in ms; None if unknown, or if the timing of the step has not arrived yet."""

    step: int
    t: float
    tokens: int
    decodes: int
    chunks: list[Chunk]
    waiting: int
    wall_ms: float | None  # from its `time` record: without the commit of the step before and the output
    took_ms: float | None  # the step's duration: the time since the results of the step before, without pauses
    plan_ms: float | None
    launch_ms: float | None
    commit_ms: float | None
    device_ms: float | None
    ended: float | None  # engine time of its `time` record
    end_seq: int  # sequence number of its `time` record; 0: not arrived yet
    drafts: tuple[Draft, ...] = ()
    comm_ms: float | None = None  # time in collectives between ranks: the `comm` record
    parts: StepParts | None = None  # None: not recorded
    keys: float = 0.0  # keys that its decoding requests read
    pairs: float = 0.0  # pairs of a query and a key in its prefill chunks
    cut_ms: float = 0.0  # time left out of the axis before this step (spans.py)
    held: bool = False  # planned while the engine was paused or slowed

    @property
    def drafted(self) -> int:
        """Number of draft tokens verified."""
        return sum(draft[1] for draft in self.drafts)

    @property
    def accepted(self) -> int:
        """Number of draft tokens accepted. The requests decoded `decodes` + `accepted` tokens."""
        return sum(max(0, draft[2]) for draft in self.drafts)

    @property
    def prefill_tokens(self) -> int:
        return self.tokens - self.decodes - self.drafted

    @property
    def kind(self) -> str:
        if not self.chunks:
            return "decode"
        return "mixed" if self.decodes else "prefill"
