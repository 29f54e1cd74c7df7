"""`minitui replay --what-if`, `--sweep` and `minitui advise`: what another setting would have done."""

from __future__ import annotations

import gc
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engine.errors import EngineError
from minitui.tui.terminal.guard import has_terminal
from minitui.visible import json_text

if TYPE_CHECKING:
    from minitui.whatif.answer import Point, Question

COLUMNS = ("first_p50", "first_p99", "gap_p99", "tok_s", "preemptions")  # of a sweep: figures of a run
BAR = 10  # cells


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _question(trace: str, arrivals: str) -> Question:
    from minitui.trace.bundled import find_trace
    from minitui.whatif.answer import Question
    from minitui.whatif.play import ARRIVALS

    if arrivals not in ARRIVALS:
        raise EngineError(f"--arrivals is {arrivals[:40]!r}: it must be {' or '.join(ARRIVALS)}")
    return Question(find_trace(trace), arrivals)


def run_what_if(trace: str, text: str, arrivals: str, json: bool, requests: bool, looks: dict[str, Any]) -> int:
    """Compares a recording with the same requests under another setting; returns the exit code."""
    from minitui.cli.compare import open_recordings, report
    from minitui.trace.reader import TraceReader
    from minitui.viewmodel.compare.comparison import Comparison, key_of
    from minitui.viewmodel.compare.runs import Totals, recorded_view
    from minitui.whatif.answer import Sweep, control, fit_words, recorded_figures
    from minitui.whatif.settings import changes

    found, terminal = changes(text), has_terminal() and not json
    question = _question(trace, arrivals)
    setting, reader = question.changed(found), question.reader
    traced, sides = terminal or requests, question.recorded.sides
    with Sweep(question) as sweep:
        unchanged, recorded = sweep.play([{}]), sweep.submit(recorded_figures)
        player = question.play(setting, traced=traced)
        plain = question.play(question.setting, traced=True) if sides and traced else None
        question.figures, again = recorded.result(), next(unchanged).figures
        sentence, checked = control(question, again)
    # What is not played must not count as an effect of the setting.
    first, figures = ("recorded setting", again) if sides else ("recorded", question.figures)
    gc.freeze()  # what was read and played: a collection, as at the end, would visit all of it
    notes = [*player.notes, *question.doubts(setting), fit_words(question.costs), sentence]
    if terminal:
        with tempfile.TemporaryDirectory() as folder:
            path, before = Path(folder, "what-if.trace"), Path(folder, "recorded-setting.trace")
            player.write(path, reader.info)
            if plain is not None:
                plain.write(before, reader.info)
            readers = reader if plain is None else TraceReader(before), TraceReader(path)
            return open_recordings(readers, (first, text), "", looks, False, False, notes)
    infos = [reader.info, setting.info(reader.info)]
    comparison = Comparison([Totals(first, figures), Totals(text, player.figures)], key_of(infos))
    if json and requests:
        view = player.view(text)
        view.earlier = recorded_view(reader, first, on_all_cores=True) if plain is None else plain.view(first)
        comparison = Comparison.of(view, key_of(infos))
    more = {
        "what_if": {
            "changes": found, "arrivals": arrivals, "extrapolated_steps": player.device.extrapolated,
            "fit": {"steps": question.costs.steps, "median_error_share": question.costs.error},
            "recorded_setting_played": checked,
        }
    }
    report(comparison, f"{reader.path}: {first} and {text}", infos, notes, json, more)
    return 0


def run_sweep(trace: str, text: str, arrivals: str, json: bool, out: Path | None) -> int:
    """Plays a recording's requests under several values of a setting; returns the exit code."""
    from minitui.export.charts import write_beside, write_charts
    from minitui.trace.bundled import is_bundled
    from minitui.trace.reader import TraceError
    from minitui.viewmodel.compare.runs import QUANTITIES
    from minitui.whatif.answer import Sweep, as_data, control, fit_words
    from minitui.whatif.settings import points

    name, values = points(text)
    question = _question(trace, arrivals)
    for value in values:
        question.changed({name: value})
    found: list[Point] = []
    with Sweep(question) as sweep:
        played = sweep.play([{}, *({name: value} for value in values)])
        sentence, checked = control(question, next(played).figures)
        for value, point in zip(values, played, strict=True):
            found.append(point)
            _say(f"{name}={value} played")
    notes = [fit_words(question.costs), sentence, *question.doubts(question.setting)]
    data = {
        "setting": name, "recorded_value": getattr(question.setting, name), "arrivals": arrivals,
        "points": [as_data(point) for point in found], "recorded_setting_played": checked, "notes": notes,
    }
    path = question.reader.path
    base = out or (Path(path.stem) if is_bundled(path) else path.with_suffix("")).with_suffix(f".{name}")
    written = [write_beside(base, ".json", json_text(data, indent=2) + "\n")]
    quantities = [one for one in QUANTITIES if one.name in (*COLUMNS, "cached")]
    try:
        curves = [(one.title.strip(), one.text, [one.of(point.figures) for point in found]) for one in quantities]
        marked = [bool(point.extrapolated) for point in found]
        written.append(write_charts(base, f"{path.name}: {name}", values, curves, marked))
    except TraceError as error:
        _say(str(error))
    if json:
        print(json_text(data, indent=2))
    else:
        noted = [f"{name}={value}: {note}" for value, one in zip(values, found, strict=True) for note in one.notes]
        print("\n".join([*table(name, values, found), "", *notes, *noted]))
    _say(f"written: {', '.join(map(str, written))}")
    return 0


def table(name: str, values: list[str], found: list[Point]) -> list[str]:
    """Returns a sweep as lines: a row for each value, a bar for each figure. "*": extrapolated."""
    from minitui.viewmodel.compare.runs import QUANTITIES

    columns = [one for one in QUANTITIES if one.name in COLUMNS]
    lines = [f"{name:<14}" + "".join(f"{one.title.strip():<{BAR + 12}}" for one in columns)]
    for value, point in zip(values, found, strict=True):
        cells = [f"{value + ('*' if point.extrapolated else ''):<14}"]
        for one in columns:
            most = max((one.of(p.figures) or 0.0 for p in found), default=0.0)
            amount = one.of(point.figures) or 0.0
            bar = "█" * round(BAR * amount / most) if most else ""
            cells.append(f"{bar:<{BAR}} {one.text(one.of(point.figures)):<11}")
        lines.append("".join(cells).rstrip())
    return lines + _legend(found)


def _legend(points: list[Point]) -> list[str]:
    return ["* extrapolated: some steps have work like no recorded step"] * any(one.extrapolated for one in points)


def advise(
    trace: Annotated[str, typer.Argument(help="A recording, or the name of a bundled one.", metavar="FILE|NAME")],
    goal: Annotated[
        str,
        typer.Option(help="In ms: first: the time to first token; gap: the mean gap between the tokens of a reply."),
    ] = "first=500,gap=50",
    arrivals: Annotated[
        str,
        typer.Option(help="recorded; closed: the next question of a chat comes as long after the answer as it did."),
    ] = "recorded",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say which setting would have served a recording's requests best.

    \b
      minitui advise run.trace --goal first=500,gap=50
      minitui advise vllm-8b --goal first=200 --json

    The best setting is the one under which most requests a second keep the goals. The requests are played through the
    scheduler with other budgets, numbers of rows, orders and drafts; the memory stays. "*" marks a setting with steps
    whose work is like that of no recorded step: their times are extrapolated.
    """
    from minitui.goals import goal_words, goals_of
    from minitui.text import count
    from minitui.whatif.answer import advise as best_of
    from minitui.whatif.answer import as_data, control, fit_words, reason, words_of

    goals = goals_of(goal)
    question = _question(trace, arrivals)
    advice = best_of(question, goals, _say)
    sentence, checked = control(question, advice.now.figures)
    cannot = [
        fit_words(question.costs), sentence, *question.doubts(question.setting), *advice.best.notes,
        "The recording cannot tell how clients, another model or another device would behave, nor what the memory of "
        "a larger pool, batch or budget needs.",
    ]
    if json:
        data = {
            "goals_ms": goals, "arrivals": arrivals, "recorded": as_data(advice.now), "best": as_data(advice.best),
            "reason": reason(advice), "tried": [as_data(point) for point in advice.points], "notes": cannot,
            "recorded_setting_played": checked,
        }
        print(json_text(data, indent=2))
        return
    print(f"Goal: {goal_words(goals)}. Best: {words_of(advice.best.changes)}.")
    print(reason(advice))
    print()
    for point in advice.points:
        mark = "*" if point.extrapolated else ""
        kept = f"{point.good:,} of {count(point.figures.firsts, 'request')}"
        print(f"{words_of(point.changes) + mark:<36}{point.goodput:>8.2f} a second   {kept} within the goals")
    print("\n".join([*_legend(advice.points), "", *cannot]))
