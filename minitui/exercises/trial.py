"""One run of an exercise: the real scheduler, with one decision replaced, over the simulated device of what-if."""

from __future__ import annotations

from engine.core.request import Request
from engine.core.step import Emitted
from minitui.exercises.student import Broken, Student
from minitui.exercises.work import Work, costs
from minitui.viewmodel.words.narrate import RULE_BROKEN
from minitui.whatif.play import Player

MOST_STEPS = 5_000  # a run of the references takes at most 900


class Trial(Player):
    """A run of an exercise's requests. A broken rule ends it: `broken`."""

    visits_all_rows = True

    def __init__(self, work: Work, student: Student | None) -> None:
        """`student`: None for the reference."""
        super().__init__(work.recorded, costs(), work.setting, traced=True)
        self.student = student
        self.broken: Broken | None = None
        self.requests: list[Request] = []  # those that have finished
        self._last = self.step
        if student is not None:
            student.step = lambda: self.step

    @property
    def step(self) -> int:
        """The last step that was planned, or is being planned."""
        return self.engine.scheduler.step

    def play(self) -> Trial:
        """Play all requests, or up to the first broken rule; returns this trial."""
        try:
            if self.student is None:
                self.run()
            else:
                with self.student.watched("the run"):  # a limit may end it between two calls, too
                    self.run()
        except Broken as error:
            self.broken = error
            self.records += self.log.drain()
            self._end_step(str(error).removeprefix(f"at step {self.step:,}, "))
            self.ended = self.device.now
        return self

    def _end_step(self, why: str) -> None:
        """Record the end of the step in which a rule was broken: else a recording ends with the step before."""
        step, kinds = self.step, [record[2] for record in self.records if record[3] == self.step]
        if step < 0 or "time" in kinds:
            return
        if "step" not in kinds:
            self.log.append("step", step, [], [], [], 0, len(self.engine.scheduler.waiting))
        self.log.append("fail", step, f"{RULE_BROKEN}{why}")
        self.records += self.log.drain()

    def _emitted(self, emitted: list[Emitted]) -> None:
        super()._emitted(emitted)
        if self.step == self._last:
            raise Broken(f"no request can go on after step {self.step:,}", self.step)
        if self.step >= MOST_STEPS:
            raise Broken(f"the run did not end within {MOST_STEPS:,} steps", self.step)
        self._last = self.step

    def _finished(self, id: int, request: Request) -> None:
        super()._finished(id, request)
        self.requests.append(request)

    # ---- facts for rules and scores

    def users_of(self, node: int) -> tuple[int, ...]:
        """Returns the ids of the requests that hold a node of the tree."""
        holders = self.engine.scheduler.running
        return tuple(r.id for r in holders if r.node is not None and any(each.id == node for each in r.node.path()))

    @property
    def mean_first_ms(self) -> float:
        """The mean time to first token, of the requests that have one."""
        firsts = [one.first_ms for one in self.played.values() if one.tokens]
        return sum(firsts) / max(1, len(firsts))
