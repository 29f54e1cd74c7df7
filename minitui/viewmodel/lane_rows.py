"""The rows in which lanes are drawn, if there are more requests than rows."""

from __future__ import annotations

from minitui.viewmodel.lanes import Lanes

ENDED_PER_ROW = 8  # a new layout places at most so many finished requests for each row


class LaneRows:
    """Gives each request a row, which it keeps. If no row is free, a new request uses the row of a finished one."""

    def __init__(self) -> None:
        self.slots: list[list[int]] = []  # the requests of each row, oldest first
        self._placed_for: object = None  # the layout in which the requests got their rows
        self._seen = -1  # the newest request that `place` has seen

    def place(self, lanes: Lanes, room: int, start: int, end: int, scale: object, chosen: int | None) -> None:
        """Place the requests that are in sight from step `start` to step `end` in `room` rows. With another room or
        another `scale`, all requests are placed anew. The request `chosen` always gets a row."""
        known = lanes.lanes
        layout = (lanes, room, scale)
        if self._placed_for != layout:
            self._placed_for, self.slots, self._seen = layout, [[] for _ in range(room)], -1
            new = [*lanes.ended_since(start)[: ENDED_PER_ROW * room], *lanes.active.values()]
            new = sorted((lane for lane in new if lane.submitted_step <= end + 1), key=lambda lane: lane.id)
        else:
            for slot in self.slots:
                slot[:] = [id for id in slot if id in known and known[id].finish_step >= start]
            new = [known[id] for id in range(self._seen + 1, lanes.newest + 1) if id in known]
        for lane in new:
            target = next((slot for slot in self.slots if not slot), None)
            if target is None:
                idle = [slot for slot in self.slots if known[slot[-1]].finish_step < lane.submitted_step]
                target = min(idle, key=lambda slot: known[slot[-1]].finish_step, default=None)
            if target is not None:
                target.append(lane.id)
            self._seen = max(self._seen, lane.id)
        placed = any(chosen in slot for slot in self.slots)
        if chosen in known and not placed and self.slots and known[chosen].finish_step >= start:
            self.slots[-1] = [chosen]
