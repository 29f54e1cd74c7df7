"""Says what limits the speed, from measured times: the host, the device, or other programs on the engine's cores.

The host's waits are the device's time. Another program on the core delays the host's work and, if the device is a CPU,
the device: both get the rest of the time only. A step's record has the length of the delays but not their place in the
step, so the host's share of waits in the rest is known as a range. It is narrow unless other programs have most of the
time.

The delays are not read in every short step: a reading has those of all steps since the reading before. So they are
known for the steps up to the last reading, and unknown for those after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from minitui.viewmodel.explain.cost_model import PLANNED, Windows, windows
from minitui.viewmodel.history.steps import Steps

LIMIT_STEPS = 1_000  # the last steps that decide
HALF = 0.5  # the share of the time from which on the device, or other programs, limit
COVERED = 0.9  # of the steps: if the delays are known for fewer, it is told for how many
WITHOUT, OTHERWISE = "apart from that, ", "else, "  # beside other programs; the same in a narrow panel
LEAST_OTHERS = 0.005  # a smaller share of other programs is 0 % in words, and not told


Told = tuple[str, str]  # what limits, and the figures


@dataclass(frozen=True, slots=True)
class OtherPrograms:
    """Other programs had a core of the engine for this `share` of the time, while the engine had work for it.
    `known`: the number of `steps` for which this is measured."""

    share: float
    steps: int
    known: int

    @property
    def limit(self) -> bool:
        """True if they limit the speed: they had the core for half of the time or more."""
        return self.share >= HALF

    @property
    def what(self) -> str:
        """Returns "other programs limit the speed", or "another program had the core"."""
        return "other programs limit the speed" if self.limit else "another program had the core"

    def told(self, width: int = 1_000) -> Told:
        """Returns "another program had the core", " for 31 % of the time · last 743 steps"; in a narrow panel, less."""
        share = f"{100 * self.share:.0f} % of the time"
        why = f"{': they had the core' if self.limit else ''} for {share}"
        brief = "other programs limit" if self.limit else "other programs"
        part = f" (measured in {self.known:,} of {self.steps:,} steps)" * (self.known < COVERED * self.steps)
        whys = [why + part + _last(self.steps), why + part, why]
        texts = [*((self.what, why) for why in whys), *[(brief, why)] * self.limit]
        return _fitting(width, [*texts, (brief, f": {share}")])


@dataclass(frozen=True, slots=True)
class Limit:
    """What limits some steps. `which`: empty for all, "launching prompts" for those in whose time the host
    launched prompts, "launching no prompts" for the others: these are `count` of the last `steps`, with this
    `share` of their time. `waits`: the least and the largest possible share of the host's waits in the time that other
    programs left; None: not reported. `others`: see OtherPrograms, for `known` of the steps; None: not measured."""

    which: str
    steps: int
    waits: tuple[float, float] | None = None
    others: float | None = None
    count: int = 0
    share: float = 1.0
    known: int = 0

    @property
    def by(self) -> str | None:
        """What limits: "device" or "host"; None: unknown."""
        if self.waits is None or self.waits[0] < HALF <= self.waits[1]:
            return None
        return "device" if self.waits[0] >= HALF else "host"

    @property
    def reason(self) -> str:
        """Returns "the host waits for it 86 % of the time", with "it" for the device that limits."""
        if self.waits is None:
            return "the engine does not report its waits"
        who, only = {
            "device": ("the host waits for it", ""), "host": ("it waits for the device", "only "),
            None: ("the host waits for the device", ""),
        }[self.by]
        return f"{who} {only}{self._waits}"

    @property
    def _waits(self) -> str:
        """Returns "86 % of the time", or "80 to 86 % of the rest" beside other programs."""
        least, most = (f"{100 * share:.0f}" for share in self.waits or (0.0, 0.0))
        whole = "the rest" if worth_telling(self.others) else "their time" if self.which else "the time"
        return f"{least if least == most else f'{least} to {most}'} % of {whole}"

    def told(self, width: int = 1_000) -> Told:
        """Returns "the device limits the speed", ": the host waits for it 86 % of the time · last 743 steps"; if
        narrow, less. For a part of the steps: "the host limits the speed of steps that launch prompts",
        " (53 steps, 29 % of the time): it waits ...". Beside other programs: "apart from that, the device limits
        the speed", ": ..."."""
        rest, share = worth_telling(self.others), f"{100 * self.share:.0f} % of the time"
        steps = self.which and f" steps that launch{self.which.removeprefix('launching')}"
        claims = [f"the {self.by} limits the speed{' of' * bool(steps)}{steps}", f"the {self.by} limits{steps}"]
        brief = claims[1].removeprefix("the ")
        if self.by is None:
            claims = [f"{steps.lstrip()}: limit unknown" if steps else "limit unknown"] * 2
            brief = f"{share}: limit unknown" if self.which else claims[0]
        shares = [f" ({self.count:,} steps, {share})", f" ({share})"] if self.which else [""]
        others = " (other programs: unknown)" if self.others is None else _known(self.known, self.count) * (not rest)
        last = _last(self.steps)
        openings, why = [WITHOUT, OTHERWISE] if rest else [""], f": {self.reason}"
        texts = [
            (opening + claim, of + why + tail)
            for claim in claims for of in shares for opening in openings for tail in (others + last, others, last, "")
        ]
        if not self.which and self.waits is not None:
            waiting = f"{'it' if self.by == 'host' else 'the host'} waits {self._waits}"
            texts.append((openings[-1] + claims[1], f": {waiting}"))
        texts += [(openings[-1] + claim, of) for of in (shares[-1], "") for claim in claims]
        return _fitting(width, [*texts, (openings[-1] + brief, ""), (brief, "")])


def worth_telling(share: float | None) -> bool:
    """Returns True if other programs had a share of the time that is worth a line."""
    return share is not None and share >= LEAST_OTHERS


def _known(known: int, steps: int) -> str:
    """Returns " (other programs: known for 50 of 159 steps)"; empty if they are known for most of the steps."""
    return f" (other programs: known for {known:,} of {steps:,} steps)" if known < COVERED * steps else ""


def _last(steps: int) -> str:
    return f" · last {steps:,} steps"


def _fitting(width: int, texts: list[Told]) -> Told:
    """Returns the first of the texts with at most `width` cells; if there is none, the last one."""
    return next((text for text in texts if sum(map(len, text)) <= width), texts[-1])


def limits(steps: Steps, horizon: int) -> list[OtherPrograms | Limit]:
    """Returns what limits the steps up to `horizon`: OtherPrograms if these had a part of the time; then one Limit, or
    two if the host limits the steps in whose time it launches prompts and the device limits the others (or the
    reverse), that of the larger share of time first. Empty before the first timed step."""
    at = steps.indices(horizon - LIMIT_STEPS + 1, horizon)
    at = at[~np.isnan(steps.column("wall")[at])]
    if not len(at):
        return []
    seen = windows(steps, at)
    took = np.sum([seen.parts[name] for name in ("wait", "commit", "emit", *PLANNED)], axis=0)
    known = took > 0  # not NaN
    if not known.any():
        return [Limit("", len(at))]
    delayed, wait, every = steps.column("part:delayed")[at].astype(np.float64), seen.parts["wait"], int(known.sum())
    read = known & _read(delayed, seen, steps.column("part:gate")[at])
    delayed, whole = np.nan_to_num(delayed), float(took[known].sum())

    def share(of: np.ndarray) -> float | None:
        return float(delayed[of & read].sum() / took[of & read].sum()) if (of & read).any() else None

    def limit(which: str, of: np.ndarray) -> Limit:
        spent = float(took[of].sum())
        rest = max(spent - float(delayed[of].sum()), 1e-9)
        # The delays of a step lie in its waits, as far as these are long enough, or in the host's work.
        least, most = np.maximum(wait - delayed, 0.0), np.minimum(wait, took - delayed)
        waits = float(least[of].sum()) / rest, float(most[of].sum()) / rest
        return Limit(which, every, waits, share(of), int(of.sum()), spent / whole, int((of & read).sum()))

    prompts, others = seen.with_prompts, share(known)
    first = [OtherPrograms(others, every, int(read.sum()))] if others is not None and worth_telling(others) else []
    kinds = {"launching no prompts": known & ~prompts, "launching prompts": known & prompts}
    found = [limit(which, of) for which, of in kinds.items() if of.any()]
    if len({one.by for one in found}) > 1:
        return [*first, *sorted(found, key=lambda one: -one.share)]
    return [*first, limit("", known)]


def _read(delayed: np.ndarray, seen: Windows, gate: np.ndarray) -> np.ndarray:
    """Returns for each step whether a reading has its delays: its own, or that of a later step. What an engine does not
    read before it is idle or paused is discarded."""
    at = np.flatnonzero(~np.isnan(delayed))
    if not len(at):
        return np.zeros(len(delayed), bool)
    discarded = np.cumsum((gate > 0) | (seen.parts["commit"] == 0))
    following = np.searchsorted(at, np.arange(len(delayed)))
    reading = at[np.minimum(following, len(at) - 1)]
    return (following < len(at)) & (discarded[reading] == discarded)
