"""Describes one request, chat, block, node or step in labelled lines: a block's holders, for example."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.trace.views import NodeView
from engine.trace.waste import copies_of
from minitui.text import count, listed, ms, ranges
from minitui.viewmodel.explain.cut_hits import why_ended
from minitui.viewmodel.explain.timing import took_words, why_slow
from minitui.viewmodel.history.spans import parts_of
from minitui.viewmodel.history.steps import StepRow
from minitui.viewmodel.requests import Requests
from minitui.viewmodel.state.annotated_state import STATE_NAMES
from minitui.viewmodel.state.side_groups import held_words, kept_words, of_block
from minitui.viewmodel.state.tree import quoted, without_markup
from minitui.viewmodel.words.request_words import first_token_words, why_first

if TYPE_CHECKING:
    from minitui.viewmodel.view import View

QUOTED = 600  # characters: longer texts are cut
HISTORY = 6  # events of a block
UNKNOWN_TIME = "expected time unknown: too few such steps have a time"
LISTED = 100  # chunks, drafts and events of a step


@dataclass(slots=True)
class Story:
    """A title and lines (label, text); a line without a label continues the line before."""

    title: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    def tell(self, label: str, text: str) -> None:
        self.lines.append((label, text))

    def tell_all(self, label: str, texts: Sequence[str]) -> None:
        """Add a line for each of the first LISTED texts; the label is that of the first."""
        self.lines += [("" if i else label, text) for i, text in enumerate(texts[:LISTED])]
        if len(texts) > LISTED:
            self.tell("", f"and {len(texts) - LISTED:,} more")


def tell(view: View, kind: str, id: Any) -> Story:
    """Returns the Story of a request, group, block, node or step."""
    tellers: dict[str, Callable[[View, Any], Story]] = {
        "request": _request, "group": _group, "block": _block, "node": _node, "step": _step,
    }
    return tellers[kind](view, id)


def _request(view: View, id: int) -> Story:
    lane = view.history.lanes.lanes.get(id)
    request = view.moment.shown.state.requests.get(id)
    if lane is not None and not view.moment.begun(lane):
        return Story(f"Request r{id}", [("", "not submitted yet at this moment")])
    if lane is None and request is None:
        return Story(f"Request r{id}", [("", "no longer known: it finished before the start of this history")])
    last = request or (lane.request if lane is not None else None)
    story = Story(f"Request r{id}" + (f" · {view.texts.group_name(last.group)}" if last and last.group else ""))
    state, size = view.moment.shown.state, view.moment.shown.state.block_size
    if request is not None:
        computed = state.computed(request)
        doing = {"waiting": "waiting in the queue", "preempted": "preempted, waiting in the queue"}.get(request.state)
        if doing is None:
            drafting = lane is not None and lane.drafted
            each = "one token and its accepted drafts per step" if drafting else "one token per step"
            doing = f"decoding, {each}" if request.joined_at >= 0 else "prefilling its prompt"
        story.tell("now", f"{doing}; KV of {count(computed, 'token')} (limit: {request.max_total:,})")
        if request.state != "running" and id in state.queue:
            story.tell("queue", f"place {state.queue.index(id) + 1} of {len(state.queue)}")
    elif lane is not None:
        gaps = Requests().of(view, lane).gaps
        speed = f", {gaps.tok_s:,.0f} tok/s" if gaps is not None and gaps.tok_s else ""
        how = f"{lane.finish_reason} after {count(lane.output_tokens, 'token')}{speed}"
        story.tell("finished", f"{how}, at step {lane.finish_step:,}")
    if lane is not None:
        figures = Requests().of(view, lane)
        cached, (stop, at, detail) = figures.request.cached_tokens, figures.request.match
        from_tree = f"{cached:,} of {lane.request.prompt_tokens:,} tokens came from the tree"
        why = why_ended(view.history, lane, stop, at, cached, detail)
        story.tell("prompt", from_tree + (f"; {why}" if stop else ""))
        if figures.first_ms is not None:
            story.tell("first token", first_token_words(figures, why_first(view, figures)))
        drafted, accepted = lane.drafted, lane.accepted
        if request is not None and view.moment.travel_text:
            drafted, accepted = view.history.steps.drafts_of(id, lane.submitted_step, view.moment.horizon)
        if drafted:
            story.tell("drafts", f"{accepted:,} of {drafted:,} accepted: each accepted draft saves one step")
        if figures.request.preemptions:
            reused = "the first before these records began; tokens from the tree again: unknown"
            if figures.reused_tokens is not None:
                reused = f"then {count(figures.reused_tokens, 'token')} came from the tree again"
            story.tell("preempted", f"{count(figures.request.preemptions, 'time')}; {reused}")
    if request is not None and request.table:
        shared = [block for block in request.table if state.holders[block] > 1]
        story.tell("blocks", f"{count(len(request.table), 'block')} of {size} tokens, {len(shared)} shared")
        path = [
            f"node {node.id} · {len(node.ids):,} tokens · {_node_text(view, node, 60)}"
            for node in list(state.path(request.node))[::-1]
        ]
        story.lines += [("" if i else "path", text) for i, text in enumerate(path)]
        private = len(request.table) - request.shared_blocks
        if private:
            why = "not full, or with tokens not known yet"
            story.tell("private", f"{count(private, 'block')} not in the tree yet: {why}")
        for pool, pages in zip(state.groups, request.side, strict=True):
            story.tell(pool.group.name, held_words(pool, pages, size))
    return story


def _group(view: View, group: str) -> Story:
    story = Story(f"Chat · {view.texts.group_name(group)}")
    lanes = [lane for id in view.history.requests_of(group) if view.moment.begun(lane := view.history.lanes.lanes[id])]
    if not lanes:
        story.tell("", "none of its requests is in this history")
    for lane in reversed(lanes[-8:]):
        request = view.moment.shown.state.requests.get(lane.id)
        cached = (request or lane.request).cached_tokens
        end = lane.finish_reason if request is None else "running" if request.state == "running" else "waiting"
        story.tell(
            f"r{lane.id}", f"{end} · {cached:,} of {lane.request.prompt_tokens:,} prompt tokens from the tree"
            + (f" · {count(lane.output_tokens, 'token')}" if request is None and lane.output_tokens else "")
        )
    return story


def _block(view: View, block: int) -> Story:
    shown = view.moment.shown
    state, size = shown.state, shown.state.block_size
    name = STATE_NAMES[state.block_state(block)]
    story = Story(f"Block {block:,} · {name}")
    means = {
        "free": "unused",
        "active": "held by one request",
        "shared": "held by several requests: all read it, none writes to it",
        "cached": "in the tree and held by no request: it may be evicted when blocks are needed",
    }
    story.tell("state", means[name])
    happened = [
        f"{view.moment.picture_now - t:,.1f} s ago {_HAPPENED[kind].format(id=id)}"
        for _seq, t, kind, id, *_blocks in view.history.block_events(block, HISTORY, view.moment.shown.state.seq)
    ]
    if happened:
        story.tell("history", " · ".join(happened))
    for i, request in enumerate(shown.holders_of(block)):
        index = request.table.index(block)
        at = f"tokens {index * size:,} to {min((index + 1) * size, max(1, state.computed(request))) - 1:,}"
        chat = f" · {view.texts.group_name(request.group)}" if request.group else ""
        story.tell("held by" if i == 0 else "", f"r{request.id}{chat}: logical block {index}, {at}")
    node_id = state.node_of[block]
    if node_id:
        node = state.nodes[node_id]
        index = node.blocks.index(state.original_of(block))
        text = view.texts.decode(node.ids[index * size : (index + 1) * size])
        story.tell("tokens", quoted(without_markup(text), QUOTED))
        story.tell("node", f"{node_id}: block {index + 1} of {len(node.blocks)} · {_node_text(view, node, 60)}")
        if block in state.pending:
            step = f"step {state.pending[block]:,}"
            story.tell("pending", f"{step} is writing this block; other requests may already share it")
        saved = int(shown.saved[block])
        if saved:
            story.tell("saved", f"{count(saved, 'prompt token')} taken from this block, not computed")
    elif shown.holders_of(block):
        why = "not in the tree yet, because the block is not full or has tokens not known yet"
        story.tell("tokens", f"private: {why if view.history.caching else 'the prefix cache is off'}")
    for pool, page, held in of_block(state, block):
        name = "checkpoint in slot" if pool.group.kind == "state" else "page"
        by = f"read by {listed([f'r{request.id}' for request, _ in held])}" if held else "cached"
        story.tell(pool.group.name, f"{name} {page:,}, {by}")
    copies = copies_of(state, block)
    if copies:
        story.tell("copies", f"the same text is also in {ranges(sorted(copies))}")
    ago = view.moment.picture_now - float(shown.changed[block])
    if ago < 1e8:
        story.tell("changed", f"{ago:.1f} s ago")
    return story


_HAPPENED = {  # kind of record -> what happened to the block
    "alloc": "allocated for r{id}", "hold": "taken by r{id} from the tree", "evict": "evicted with node {id}",
    "finish": "released by r{id}, which finished", "preempt": "released by r{id}, which was preempted",
    "requeue": "released by r{id}, which queues again",
}


def _node_text(view: View, node: NodeView, most: int) -> str:
    """Returns the role and the beginning of a node's text."""
    role, text = view.moment.tree.text(view.moment.shown.state, node, view.texts.decode)
    return f"{role} {quoted(text, most)}"


def _node(view: View, id: int) -> Story:
    shown = view.moment.shown
    node = shown.state.nodes.get(id)
    if node is None:
        return Story(f"Node {id}", [("", "no longer in the tree")])
    story = Story(f"Node {id} · {_node_text(view, node, 40)}")
    blocks = count(len(node.blocks), "block")
    story.tell("size", f"{count(len(node.ids), 'token')} in {blocks}: {ranges(node.blocks)}")
    users = shown.users_of(id)
    if users:
        names = ", ".join(f"r{r.id} ({view.texts.group_name(r.group)})" if r.group else f"r{r.id}" for r in users[:6])
        story.tell("users", names + (f" and {len(users) - 6} more" if len(users) > 6 else ""))
    else:
        story.tell("users", f"none; evict #{view.moment.tree.eviction(shown).rank(node):,}")
    story.tell("saved", f"{count(shown.saved_by(node), 'prompt token')} taken from this node, not computed")
    for pool in shown.state.groups:
        story.tell(pool.group.name, kept_words(shown.state, pool, node))
    parent = shown.state.nodes[node.parent]
    if parent.id:
        text = view.moment.tree.text(shown.state, parent, view.texts.decode)[1]
        story.tell("follows", f"node {parent.id}: {quoted(text, 50)}")
    else:
        story.tell("follows", "nothing: prompts begin here")
    if node.children:
        story.tell("children", f"{len(node.children):,}")
    story.tell("text", quoted(without_markup(view.texts.decode(node.ids[:400])), QUOTED))
    return story


def _step(view: View, step: int) -> Story:
    row = view.history.steps.get(step)
    if row is None:
        return Story(f"Step {step:,}", [("", "older than this history")])
    story = Story(f"Step {step:,} · {row.kind}")
    drafts = f"{count(row.drafted, 'draft')}, " if row.drafted else ""
    parts = f"{count(row.decodes, 'decode')}, {drafts}{row.prefill_tokens:,} prefill"
    story.tell("tokens", f"{row.tokens:,} of {view.moment.shown.state.budget:,}: {parts}")
    chunks = []
    for request, start, n, samples in row.chunks:
        lane = view.history.lanes.lanes.get(request)
        total = lane.prefill_of(step, start + n, samples) if lane is not None else None
        of, done = f" of {total:,}" if total is not None else "", "; samples a token" if samples else ""
        chunks.append(f"r{request}: tokens {start:,} to {start + n - 1:,}{of}{done}")
    story.tell_all("prefill", chunks)
    story.tell_all("drafts", [
        f"r{request}: {count(drafted, 'token')}" + (f", {accepted} accepted" if accepted >= 0 else "")
        for request, drafted, accepted in row.drafts
    ])
    if row.took_ms is not None:
        why = why_slow(row, view.models.of(step), always=True) or UNKNOWN_TIME
        story.tell("took", f"{took_words(row)}; {why}")
        work = {"plan": row.plan_ms, "launch": row.launch_ms, "commit": row.commit_ms}
        host = ", ".join(f"{kind} {'–' if part is None else ms(part)}" for kind, part in work.items()) + " ms"
        story.tell("this step", host + (f"; device {ms(row.device_ms)} ms" if row.device_ms is not None else ""))
    if row.parts is not None:
        found = parts_of(view.history.steps, row)
        since = [f"{part.name(step)} {ms(part.ms)}" for part in found if part.ms is not None]
        paused = f"; paused {ms(row.parts.gate)} ms" * (row.parts.gate > 0)
        story.tell("parts", f"since the results of step {step - 1:,}: {', '.join(since)} ms{paused}")
        delayed = "not read in this step" if row.parts.delayed is None else f"{ms(row.parts.delayed)} ms"
        story.tell("pauses", f"garbage collection {ms(row.parts.gc)} ms, another program on the core {delayed}"
                   + (", stopped" if row.parts.stops else ""))
    if row.comm_ms is not None:
        story.tell("exchange", f"{ms(row.comm_ms)} ms between {view.history.steps.ranks} ranks, waiting included")
    story.tell("waiting", _waiting(view, row))
    events = view.history.events.of_step(step)
    story.tell_all("events", [f"{event.kind}: {view.texts.event(event)}" for event in events])
    return story


def _waiting(view: View, row: StepRow) -> str:
    """Returns the length of the queue when the step was planned and, if the panels show a later moment, then."""
    text = f"{count(row.waiting, 'request')} in the queue" if row.waiting else "none"
    ahead, state = view.moment.planned_ahead, view.moment.shown.state
    if row.step != view.moment.horizon or ahead is None:
        return text
    queue = len(state.queue)
    now = f"{len(state.requests) - queue:,} running, {queue:,} waiting"
    return f"{text} when this step was planned; after the plan of step {ahead:,}, as in the panels: {now}"
