"""The figures of a run: one table, from which the comparison, its sentence and the JSON derive."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from minitui.text import duration

Value = float | None


@dataclass(frozen=True, slots=True)
class Longest:
    """The longest gap between two tokens: its ms, its request, and the number of the token after the gap."""

    ms: float
    request: int
    token: int


@dataclass(frozen=True, slots=True)
class Quantity:
    """A figure of a run. `name`: its field in RunFigures; `key`: its name in JSON, which says the unit, or what is
    counted; `words`: its name in a sentence.

    `less`: True if less is better, False if more is better, None for neither. `samples`: of a percentile: the field
    with the number of values. `each`: it is not a total, so it is compared also for runs that did different work.
    `told`: a candidate for the sentence about two runs of which nothing else is known, and for "In return".
    `optional`: left out if both runs have none.
    """

    name: str
    key: str
    title: str
    words: str
    less: bool | None
    samples: str
    each: bool
    told: bool
    optional: bool

    @property
    def timed(self) -> bool:
        """True for a duration or a speed, which varies from run to run."""
        return self.key.endswith(("_ms", "_per_second"))

    def of(self, figures: RunFigures) -> Value:
        value = getattr(figures, self.name)
        return None if value is None else float(value)

    def text(self, value: Value) -> str:
        """Returns a value with its unit; a dash if it is not known."""
        if value is None:
            return "–"
        if self.key.endswith("_ms"):
            return duration(value)
        if self.key.endswith("_per_second"):
            return f"{value:,.0f}/s"
        return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _figure(
    key: str, title: str = "", words: str = "", less: bool | None = True, samples: str = "", *, each: bool = False,
    told: bool = False, optional: bool = False,
) -> Any:
    """Returns a field of RunFigures (see Quantity). Without a title, the figure is only in the JSON."""
    return field(metadata={"key": key, "row": (title, words, less, samples, each, told, optional)})


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Totals of a run. Durations are in ms, without pauses and slow motion; None: not known."""

    requests: int = _figure("requests", "requests", "requests", None)
    finished: int = _figure("finished_requests")
    time: float = _figure("time_ms", "time", "time of the run", told=True)
    steps: int = _figure("steps", "steps", "number of steps", told=True)
    replies: int = _figure("reply_tokens", "reply tokens", "number of reply tokens", None)
    tok_s: float | None = _figure(
        "reply_tokens_per_second", "reply tokens a second", "speed", False, each=True, told=True)
    tokens_a_step: float | None = _figure(
        "reply_tokens_per_step", "reply tokens a step", "number of reply tokens a step", False)
    prompt_tokens: int = _figure("prompt_tokens", "prompt tokens", "number of prompt tokens", None)
    cached: int = _figure(  # of new requests, as `computed`
        "prompt_tokens_cached", "  from the cache", "number of prompt tokens from the cache", False)
    computed: int = _figure(
        "prompt_tokens_computed", "  computed", "number of prompt tokens computed", told=True)
    twice: int | None = _figure(  # computed again after a preemption
        "tokens_computed_twice", "tokens computed twice", "number of tokens computed twice", optional=True)
    firsts: int = _figure("first_tokens")  # requests whose time to first token is known
    first_p50: float | None = _figure(
        "first_token_p50_ms", "first token p50", "median time to first token", True, "firsts", each=True, told=True)
    first_p99: float | None = _figure(
        "first_token_p99_ms", "first token p99", "time to first token (p99)", True, "firsts", each=True, told=True)
    gaps: int = _figure("gaps")
    gap_p50: float | None = _figure(
        "gap_p50_ms", "token gap p50", "median gap between tokens", True, "gaps", each=True)
    gap_p99: float | None = _figure(
        "gap_p99_ms", "token gap p99", "gap between tokens (p99)", True, "gaps", each=True, told=True)
    gap_longest: float | None = _figure(
        "longest_gap_ms", "longest token gap", "longest gap between tokens", each=True, told=True)
    longest: Longest | None = _figure("longest_gap")  # noqa: RUF009
    delayed: float | None = _figure(  # time for which the host waited while another program had the core
        "host_waited_for_core_ms", "host waited for a core", "time for which the host waited for a core", optional=True)
    preemptions: int = _figure(
        "preemptions", "preemptions", "number of preemptions", told=True, optional=True)
    evicted: int | None = _figure(
        "blocks_evicted", "blocks evicted", "number of evicted blocks", optional=True)
    drafted: int = _figure("draft_tokens", "drafts checked", "number of drafts checked", None, optional=True)
    accepted: int = _figure(
        "draft_tokens_accepted", "drafts accepted", "number of drafts accepted", None, optional=True)


KEYS = {one.name: one.metadata["key"] for one in fields(RunFigures)}  # a figure -> its key in JSON
QUANTITIES = tuple(
    Quantity(name, KEYS[name], *row)
    for name, row in ((one.name, one.metadata["row"]) for one in fields(RunFigures)) if row[0]
)
