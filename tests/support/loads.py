"""Loads of the simulated engine (minitui/dev/simulator.py), and views that begin with it."""

from __future__ import annotations

from engine.trace.state import State
from minitui.dev.simulator import Load
from minitui.viewmodel.view import View

# A pool so tight that requests are preempted, and a budget so small that prompts are chunked.
TIGHT = Load(blocks=40, chats=6, rows=6, budget=48, context=480, reply=(60, 160), turns=3, think=0.05, paste=0.3)
LONG = Load(blocks=600, chats=6, rows=6, budget=512, context=2048, reply=(60, 160), turns=3, think=0.05, paste=0.3)


def empty_state(load: Load) -> State:
    """Returns the state of a simulated engine before its first record."""
    return State(load.blocks + 1, load.block_size, load.budget, load.rows)


def empty_view(load: Load) -> View:
    """Returns a view of this state."""
    view = View()
    view.reset(empty_state(load).snapshot())
    return view
