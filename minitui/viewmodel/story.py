"""The story of one thing, told from the records: block → owners → tokens → node → chats, and so for the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from minitui.viewmodel.annotated_state import STATE_NAMES
from minitui.viewmodel.events import stop_text
from minitui.viewmodel.timing import why_slow
from minitui.viewmodel.tree import quoted, without_markup

if TYPE_CHECKING:
    from minitui.viewmodel.model import View

QUOTED = 600  # characters of a text that are quoted


@dataclass(slots=True)
class Story:
    """A title and lines (label, text); a line without label goes on from the one before."""

    title: str
    lines: list[tuple[str, str]] = field(default_factory=list)

    def tell(self, label: str, text: str) -> None:
        self.lines.append((label, text))


def tell(view: View, kind: str, id: Any) -> Story:
    """What there is to know about a request, group, block, node or step."""
    tellers: dict[str, Callable[[View, Any], Story]] = {
        "request": _request, "group": _group, "block": _block, "node": _node, "step": _step,
    }  # fmt: skip
    return tellers[kind](view, id)


def _request(view: View, id: int) -> Story:
    lane = view.lanes.lanes.get(id)
    request = view.board.state.requests.get(id)
    if lane is None and request is None:
        return Story(f"Request r{id}", [("", "nothing is remembered of it: it ended before this history begins")])
    group = lane.group if lane is not None else request.group if request is not None else ""
    story = Story(f"Request r{id}" + (f" · {view.group_name(group)}" if group else ""))
    state, size = view.board.state, view.board.state.block_size
    if request is not None:
        computed = state.computed(request)
        doing = {"waiting": "waits in the queue", "preempted": "was preempted and waits"}.get(request.state)
        if doing is None:
            drafting = lane is not None and lane.drafted
            each = "a token a step, and drafts that are right" if drafting else "one token a step"
            doing = f"decodes: {each}" if request.joined_at >= 0 else "prefills its prompt"
        story.tell("now", f"{doing}; {computed:,} tokens have their KV, it may grow to {request.max_total:,}")
        if request.state != "running" and id in state.queue:
            story.tell("queue", f"place {state.queue.index(id) + 1} of {len(state.queue)}")
    elif lane is not None:
        speed = f", {lane.tok_s:,.0f} tok/s" if lane.tok_s else ""
        how = f"{lane.finish_reason} after {lane.output_tokens:,} tokens{speed}"
        story.tell("ended", f"{how}, at step {lane.finish_step:,}")
    if lane is not None:
        from_tree = f"{lane.cached_tokens:,} of {lane.prompt_tokens:,} tokens came from the tree"
        story.tell("prompt", from_tree + (f"; then: {stop_text(lane.stop, lane.stop_at)}" if lane.stop else ""))
        if lane.ttft is not None:
            queue, prefill, sample = lane.ttft
            parts = f"queue {queue:.1f} + prefill {prefill:.1f} + sample {sample:.1f}"
            story.tell("first token", f"{queue + prefill + sample:.1f} ms = {parts}")
        if lane.drafted:
            story.tell("drafts", f"{lane.accepted:,} of {lane.drafted:,} were right: so many steps were saved")
        if lane.preemptions:
            story.tell("preempted", f"{lane.preemptions} times")
    if request is not None and request.table:
        shared = [block for block in request.table if state.holders[block] > 1]
        story.tell("blocks", f"{len(request.table)} of {size} tokens, {len(shared)} of them shared")
        path = list(state.path(request.node))[::-1]
        for i, node in enumerate(path):
            role, text = view.tree.text(state, node, view.decode)
            about = f"node {node.id} · {len(node.ids):,} tokens · {role} {quoted(text, 60)}"
            story.tell("path" if i == 0 else "", about)
        private = len(request.table) - request.shared_blocks
        if private:
            story.tell("private", f"{private} block{'s' if private > 1 else ''} not in the tree yet: "
                       "partly filled, or its tokens are not all known")  # fmt: skip
    return story


def _group(view: View, group: str) -> Story:
    story = Story(f"Chat · {view.group_name(group)}")
    requests = view.requests_of(group)
    if not requests:
        story.tell("", "it has asked nothing that is remembered")
    for id in reversed(requests[-8:]):
        lane = view.lanes.lanes[id]
        end = lane.finish_reason or ("runs" if lane.running else "waits")
        story.tell(f"r{id}", f"{end} · {lane.cached_tokens:,} of {lane.prompt_tokens:,} prompt tokens from the tree"
                   + (f" · {lane.output_tokens:,} tokens" if lane.output_tokens else ""))  # fmt: skip
    return story


def _block(view: View, block: int) -> Story:
    board = view.board
    state, size = board.state, board.state.block_size
    name = STATE_NAMES[state.block_state(block)]
    story = Story(f"Block {block:,} · {name}")
    means = {
        "free": "nobody refers to it",
        "active": "one request holds it",
        "shared": "several requests hold it: it is read by all and written by none",
        "cached": "only the tree refers to it: it may be evicted when somebody needs room",
    }
    story.tell("state", means[name])
    for i, request in enumerate(board.holders_of(block)):
        index = request.table.index(block)
        at = f"its tokens {index * size:,} to {min((index + 1) * size, max(1, state.computed(request))) - 1:,}"
        chat = f" · {view.group_name(request.group)}" if request.group else ""
        story.tell("owners" if i == 0 else "", f"r{request.id}{chat}: its logical block {index}, {at}")
    node_id = state.node_of[block]
    if node_id:
        node = state.nodes[node_id]
        index = node.blocks.index(block)
        text = view.decode(node.ids[index * size : (index + 1) * size])
        story.tell("tokens", quoted(without_markup(text), QUOTED))
        role, begins = view.tree.text(state, node, view.decode)
        story.tell("node", f"{node_id}: block {index + 1} of {len(node.blocks)} · {role} {quoted(begins, 60)}")
        if block in state.pending:
            story.tell("pending", f"step {state.pending[block]:,} is writing it; others may share it already")
        saved = int(board.saved[block])
        if saved:
            story.tell("saved", f"{saved:,} prompt tokens were not computed because it was here")
    elif board.holders_of(block):
        story.tell("tokens", "private: not in the tree, because it is not full yet or its tokens are not all known")
    ago = view.engine_now - float(board.changed[block])
    if ago < 1e8:
        story.tell("changed", f"{ago:.1f} s ago")
    return story


def _node(view: View, id: int) -> Story:
    board = view.board
    node = board.state.nodes.get(id)
    if node is None:
        return Story(f"Node {id}", [("", "it is no longer in the tree")])
    role, text = view.tree.text(board.state, node, view.decode)
    story = Story(f"Node {id} · {role} {quoted(text, 40)}")
    blocks = f"{len(node.blocks)} block{'s' if len(node.blocks) > 1 else ''}"
    story.tell("size", f"{len(node.ids):,} tokens in {blocks}: {_numbers(node.blocks)}")
    users = board.users_of(id)
    if users:
        names = ", ".join(f"r{r.id} ({view.group_name(r.group)})" if r.group else f"r{r.id}" for r in users[:6])
        story.tell("users", names + (f" and {len(users) - 6} more" if len(users) > 6 else ""))
    else:
        view.tree.rerank(board)
        rank = view.tree.rank(id)
        story.tell("users", "none: " + (f"number {rank} in the order of eviction" if rank else "it may be evicted"))
    story.tell("saved", f"{board.saved_by(node):,} prompt tokens were not computed because it was here")
    parent = board.state.nodes[node.parent]
    if parent.id:
        story.tell("follows", f"node {parent.id}: {quoted(view.tree.text(board.state, parent, view.decode)[1], 50)}")
    else:
        story.tell("follows", "nothing: a prompt can begin here")
    if node.children:
        story.tell("goes on", f"in {len(node.children)} way{'s' if len(node.children) > 1 else ''}")
    story.tell("text", quoted(without_markup(view.decode(node.ids[:400])), QUOTED))
    return story


def _step(view: View, step: int) -> Story:
    row = view.steps.get(step)
    if row is None:
        return Story(f"Step {step:,}", [("", "it is older than the history kept here")])
    story = Story(f"Step {step:,} · {row.kind}")
    drafts = f"{row.drafted:,} drafts, " if row.drafted else ""
    parts = f"{row.decodes} decodes, {drafts}{row.prefill_tokens:,} prefill"
    story.tell("tokens", f"{row.tokens:,} of {view.board.state.budget:,}: {parts}")
    for i, (request, start, n, samples) in enumerate(row.chunks[:8]):
        lane = view.lanes.lanes.get(request)
        of = f" of {lane.prompt_tokens:,}" if lane is not None else ""
        done = "; its first token is drawn" if samples else ""
        story.tell("prefill" if i == 0 else "", f"r{request}: tokens {start:,} to {start + n - 1:,}{of}{done}")
    for i, (request, drafted, accepted) in enumerate(row.drafts[:8]):
        right = "" if accepted < 0 else f", {accepted} right"
        story.tell("drafts" if i == 0 else "", f"r{request}: {drafted} tokens{right}")
    if row.wall_ms is not None:
        story.tell("took", f"{row.wall_ms:.2f} ms · {why_slow(row, view.timings)}")
        host = f"plan {row.plan_ms:.2f}, launch {row.launch_ms:.2f}, commit {row.commit_ms:.2f} ms"
        story.tell("host", host + (f"; device {row.device_ms:.2f} ms" if row.device_ms is not None else ""))
    if row.comm_ms is not None:
        story.tell("exchange", f"{row.comm_ms:.2f} ms between {view.steps.ranks} ranks, waiting included")
    story.tell("waiting", f"{row.waiting} stay queued" if row.waiting else "nobody")
    told = view.events.of_step(step)
    for i, event in enumerate(told[:10]):
        story.tell("events" if i == 0 else "", f"{event.kind}: {view.event_text(event)}")
    if len(told) > 10:
        story.tell("", f"and {len(told) - 10} more")
    return story


def _numbers(blocks: list[int]) -> str:
    """Block numbers, neighbours joined: "12–15, 40"."""
    parts: list[str] = []
    start = before = blocks[0]
    for block in [*blocks[1:], -1]:
        if block == before + 1:
            before = block
            continue
        parts.append(str(start) if start == before else f"{start}–{before}")
        start = before = block
        if len(parts) == 8:
            parts.append("…")
            break
    return ", ".join(parts)
