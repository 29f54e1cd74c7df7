"""The steps between two painted frames, summed up."""

from __future__ import annotations

from dataclasses import dataclass

from minitui.viewmodel.steps import Steps


@dataclass(frozen=True, slots=True)
class Frame:
    """Means over the steps between two painted frames, and the peak, which is the step with the most tokens."""

    count: int = 0
    first: int = -1
    last: int = -1
    tokens: float = 0.0
    decodes: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    prefill_tokens: float = 0.0
    chunks: float = 0.0
    peak_tokens: int = 0
    peak_step: int = -1

    @classmethod
    def of(cls, steps: Steps, first: int, last: int) -> Frame:
        """Returns the means over the kept steps from `first` to `last`."""
        at = steps.indices(first, last)
        if not len(at):
            return cls()
        tokens = steps.column("tokens")[at]
        decodes, drafted = steps.column("decodes")[at], steps.column("drafted")[at]
        prefilled = steps.prefilled(at)
        chunks = sum(len(steps.chunks(int(step))) for step in steps.column("step")[at][prefilled > 0])
        peak = int(tokens.argmax())
        n = len(at)
        return cls(
            count=n,
            first=first,
            last=last,
            tokens=float(tokens.mean()),
            decodes=float(decodes.mean()),
            drafted=float(drafted.mean()),
            accepted=float(steps.column("accepted")[at].mean()),
            prefill_tokens=float(prefilled.mean()),
            chunks=chunks / n,
            peak_tokens=int(tokens[peak]),
            peak_step=int(steps.column("step")[at][peak]),
        )
