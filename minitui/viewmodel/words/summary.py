"""Sentences that sum up the present moment for readers of plain text: cache, eviction, and what limits the speed."""

from __future__ import annotations

from typing import Any

from engine.trace.views import FREE
from minitui.text import count, exact
from minitui.viewmodel.explain.limits import Limit, OtherPrograms, limits
from minitui.viewmodel.state.eviction import free_words, is_under_pressure, pressure_words
from minitui.viewmodel.state.side_groups import Strip, eviction_words, strips
from minitui.viewmodel.state.tree import TreeRow, quoted
from minitui.viewmodel.view import View

MOST_TEXT = 24  # characters of a node's text
MOST_BLOCKS = 8


def summary(view: View) -> list[str]:
    """Returns what the cache saved, what is evicted next and what limits the speed; empty before the first step."""
    if view.history.steps.last < 0:
        return []
    live, reused = view.history.live, view.moment.reused_lately
    state, saved = live.state, count(reused.saved, "prompt token")
    working = " (idle time counts, pauses do not)" if view.moment.knows_the_last_minute else ""
    share = f": {100 * reused.hit_rate:.1f} % of all" if reused.hit_rate is not None else ""
    again = f"; resumed requests took {count(reused.resumed, 'token')} from the cache again" if reused.resumed else ""
    nodes = "; ".join(_node(node) for node in view.moment.tree.evicted_next(live, view.texts.decode))
    known = view.moment.tree.eviction(live).is_known
    none = "nothing, requests hold all cached texts" if known else "unknown"
    texts = [
        f"the cache saved {saved} {view.moment.last_minute}{working}{share}{again}",
        f"evicted next: {nodes or none} · {free_words(state)}",
    ]
    texts += [f"{pool.group.name}: evicted next {eviction_words(state, pool)}" for pool in state.groups]
    if is_under_pressure(state):
        blocks = pressure_words(state, view.moment.tree.eviction(live), MOST_BLOCKS)
        texts.append(f"few free blocks: the next allocations take {blocks}")
    return texts + ["".join(limit.told()) for limit in limits(view.history.steps, view.moment.horizon)]


def summary_json(view: View) -> dict[str, Any]:
    """Returns the summary as plain data; null for what is unknown. "text" has its sentences."""
    evicted = view.moment.tree.evicted_next(view.history.live, view.texts.decode)
    found, reused = limits(view.history.steps, view.moment.horizon), view.moment.reused_lately
    rate = reused.hit_rate
    return {
        "after_step": view.history.steps.committed, "last_s": exact(view.moment.last_minute_s),
        "saved_prompt_tokens": reused.saved,
        "hit_rate": None if rate is None else round(rate, 4),
        "tokens_cached_after_preemption": reused.resumed,
        "free_blocks_first": view.history.live.state.counts[FREE],
        "evicted_next": [{"node": node.node, "tokens": node.tokens, "name": _name(node)} for node in evicted],
        **({"groups": list(map(_strip, groups))} if (groups := strips(view.history.live.state)) else {}),
        "limits": [_limit(one) for one in found if isinstance(one, Limit) or one.limit],
        "text": summary(view),
    }


def _strip(strip: Strip) -> dict[str, Any]:
    free, active, shared, cached = strip.counts
    return {"name": strip.name, "unit": strip.unit, "free": free, "active": active, "shared": shared, "cached": cached}


def _limit(limit: OtherPrograms | Limit) -> dict[str, Any]:
    if isinstance(limit, OtherPrograms):
        return {
            "steps": "all", "number_of_steps": limit.steps, "share_of_time": 1.0, "by": "other_programs",
            "other_programs": round(limit.share, 4), "other_programs_steps": limit.known,
        }
    least, most = (None, None) if limit.waits is None else (round(share, 4) for share in limit.waits)
    return {
        "steps": limit.which or "all", "number_of_steps": limit.count or limit.steps,
        "share_of_time": round(limit.share, 4), "by": limit.by,
        "other_programs": None if limit.others is None else round(limit.others, 4),
        "other_programs_steps": limit.known, "host_waits": least, "host_waits_at_most": most,
    }


def _name(node: TreeRow) -> str:
    return node.name or f"“{quoted(node.text, MOST_TEXT)}”"


def _node(node: TreeRow) -> str:
    what = _name(node)
    return f"{node.rank}. {what} ({count(node.tokens, 'token')})"
