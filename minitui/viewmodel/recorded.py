"""Folds a whole recording into a view, to compare it with another run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minitui.viewmodel.cost_models import first_model
from minitui.viewmodel.model import View

if TYPE_CHECKING:
    from minitui.trace.reader import TraceReader


def recorded_view(reader: TraceReader, name: str = "") -> View:
    """Returns the view at the end of a recording. If records are missing, the view begins after the last gap.

    Raises TraceError if a part of the file cannot be read.
    """
    view = View()
    view.ids_to_text, view.group_names = reader.decode, reader.names
    last = -1  # the number of the last record
    for index, keyframe in enumerate(reader.keyframes):
        part = reader.part(index)
        if keyframe.seq != last:
            view.reset(part.snapshot)
            if not index:
                view.models.look_ahead(first_model(part.snapshot, reader.records()))
        view.fold(part.records)
        last = keyframe.seq + len(part.records)
    view.caching = bool(reader.info.get("prefix_caching", True))
    view.run_name = name
    return view
