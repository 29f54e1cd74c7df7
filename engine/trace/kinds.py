"""Every kind of record: what it means, its fields, how it changes a State, and when it is possible.

`apply` changes the state. It trusts the record; `faults` and the fields' own bounds check records that come from a file
or from another server (minitui/trace/check.py). Kinds that only other servers write are in minitui/trace/foreign.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from engine.trace import kind
from engine.trace.state import State
from engine.trace.views import ACTIVE, FREE, NodeView, RequestView

# ---- requests and the queue


class Submit(kind.Kind):
    """Joins the end of the waiting queue. `salt`: a number for its cache_salt, equal for equal salts; 0: none."""

    request: kind.Count
    group: kind.Text
    prompt_tokens: kind.Count
    max_total: kind.Count
    priority: kind.Whole = 0
    salt: kind.Count = 0

    @staticmethod
    def apply(state: State, request: int, group: str, prompt_tokens: int, max_total: int) -> RequestView:
        view = RequestView(request, group, prompt_tokens, max_total, submitted=state.t)
        view.side = [{} for _ in state.groups]
        state.requests[request] = view
        state.queue.append(request)
        return view


class Refuse(kind.Kind):
    """Rejected before it became a request; the state does not change."""

    group: kind.Text
    reason: kind.Text


class Wait(kind.Kind):
    """The head of the queue is not admitted; written when the reason changes."""

    request: kind.Request
    reason: kind.Text


class Order(kind.Kind):
    """The head of the queue was sorted (engine/core/policy.py); its request ids in the new order."""

    queue: kind.Counts

    @staticmethod
    def apply(state: State, queue: list[int]) -> None:
        state.queue[: len(queue)] = queue

    @staticmethod
    def faults(state: State, queue: list[int]) -> Iterator[str]:
        if sorted(queue) != sorted(state.queue[: len(queue)]):
            yield "its requests are not the first requests of the queue"


class Admit(kind.Kind):
    """Leaves the queue and gets a row. `reason`: "new" or "resumed"."""

    request: kind.Request
    row: kind.Count
    reason: kind.Text

    @staticmethod
    def apply(state: State, request: int, row: int) -> None:
        view = state.requests[request]
        view.state, view.row = "running", row
        view.admitted = view.admitted or state.t
        state.queue.remove(request)

    @staticmethod
    def faults(state: State, request: int) -> Iterator[str]:
        if state.requests[request].state == "running":
            yield f"r{request} is running already"


class Match(kind.Kind):
    """Prefix match at admission or before a chunk: the tokens taken from the tree, and why the match stopped.

    `stop`: "whole" (all blocks that can be shared were taken), "differs" (at token `at`), "ends" (nothing is cached
    beyond token `at`), "short" (the prompt has at most one block), "empty" (no cached text has the same beginning),
    "evicted" (the rest was evicted; `at` is the step), "window", "state" (a side group of this kind does not have what
    it needs to go on; full attention has `at` tokens).
    """

    request: kind.Running
    tokens: kind.Count
    stop: kind.Text
    at: kind.OrNone
    detail: kind.Detail

    @staticmethod
    def apply(state: State, request: int, tokens: int, stop: str, at: int, detail: str) -> None:
        view = state.requests[request]
        before = view.base
        view.base += tokens
        if not view.preemptions:
            view.cached_tokens += min(view.base, view.prompt_tokens) - min(before, view.prompt_tokens)
            view.match = (stop, at, detail)

    @staticmethod
    def faults(state: State, request: int, tokens: int) -> Iterator[str]:
        if tokens > len(state.requests[request].table) * state.block_size:
            yield f"r{request} holds too few blocks for {tokens:,} tokens"


class Preempt(kind.Kind):
    """Releases its blocks and returns to the head of the queue."""

    request: kind.Running
    reason: kind.Text
    blocks: kind.Count

    @staticmethod
    def apply(state: State, request: int) -> None:
        view = state.requests[request]
        view.lost = max(view.lost, state.computed(view))
        state.release_all(view)
        view.state = "preempted"
        view.preemptions += 1
        state.queue.insert(0, request)


class Requeue(kind.Kind):
    """Like preempt, after a failed step: the request's results in flight are dropped."""

    request: kind.Running
    reason: kind.Text

    apply = Preempt.apply


class Finish(kind.Kind):
    """Releases row and blocks. `reason`: stop | length | abort | error: …; `output_tokens`: of the reply, without
    those that the last commit appended after a stop string."""

    request: kind.Request
    reason: kind.Text
    output_tokens: kind.Count

    @staticmethod
    def apply(state: State, request: int) -> None:
        view = state.requests.pop(request)
        state.release_all(view)
        if view.state != "running":
            state.queue.remove(request)


# ---- blocks and the tree


class Alloc(kind.Kind):
    """Private blocks, appended to the request's table."""

    request: kind.Running
    blocks: kind.Blocks

    @staticmethod
    def apply(state: State, request: int, blocks: list[int]) -> None:
        state.requests[request].table += blocks
        holders, counts = state.holders, state.counts
        for block in blocks:  # free blocks: no holders, not in the tree
            holders[block] = 1
        if state.free is not None:
            del state.free[len(state.free) - len(blocks) :]
        counts[FREE] -= len(blocks)
        counts[ACTIVE] += len(blocks)

    @staticmethod
    def faults(state: State, blocks: list[int]) -> Iterator[str]:
        for block in blocks:
            if block >= state.num_blocks:
                yield f"block {block:,} is not in the pool"
            if state.holders[block] or state.node_of[block]:
                yield f"block {block:,} is not free"
        if len(set(blocks)) != len(blocks):
            yield "a block is allocated twice"
        if state.free is not None and state.free[len(state.free) - len(blocks) :] != blocks[::-1]:
            yield "its blocks are not the free blocks that are next"


class Hold(kind.Kind):
    """The request's table becomes the blocks on the path to `node`, and then its private blocks. The first `dropped`
    private blocks are freed: the request now shares blocks of equal content."""

    request: kind.Running
    node: kind.Node
    dropped: kind.Count

    @staticmethod
    def apply(state: State, request: int, node: int, dropped: int) -> None:
        holder = state.requests[request]
        new: list[int] = []
        held = False
        for view in state.path(node):
            held = held or view.id == holder.node
            if not held:
                view.users += 1
                new[:0] = view.blocks
            view.last_used = state.seq
        start, size = holder.shared_blocks, state.block_size
        if state.waste is not None and dropped:
            state.waste.duplicate += max(0, min(dropped * size, state.computed(holder) - start * size))
        released = holder.table[start : start + dropped]
        holder.table[start : start + dropped] = new
        state.hold_blocks(new)
        state.release_blocks(released)
        holder.node = node
        holder.shared_blocks = start + len(new)

    @staticmethod
    def faults(state: State, request: int, node: int, dropped: int) -> Iterator[str]:
        holder = state.requests[request]
        if dropped > len(holder.table) - holder.shared_blocks:
            yield f"r{request} has fewer than {dropped:,} private blocks"
        if state.blocks_below(holder.node, node) is None:
            yield f"node {node} is not below node {holder.node}, which r{request} holds"


def _grow(state: State, view: NodeView, request: int, ids: list[int], blocks: list[int], step: int) -> None:
    view.ids.fromlist(ids)
    view.blocks += blocks
    view.last_used = state.seq
    node_of, pending, node = state.node_of, state.pending, view.id
    for block in blocks:
        node_of[block] = node
        if step >= 0:
            pending[block] = step
    holder = state.requests[request]
    holder.node = view.id
    holder.shared_blocks += len(blocks)


def _grow_faults(state: State, request: int, ids: list[int], blocks: list[int]) -> Iterator[str]:
    holder = state.requests[request]
    start = holder.shared_blocks
    if not blocks or len(ids) != len(blocks) * state.block_size:
        yield f"{len(ids):,} ids do not fill {len(blocks):,} blocks"
    if holder.table[start : start + len(blocks)] != blocks:
        yield f"its blocks are not the next private blocks of r{request}"


class Insert(kind.Kind):
    """A new leaf, made of the request's next private blocks. The request now holds it. The blocks are pending until
    `step` commits (-1: already written)."""

    node: kind.Count
    parent: kind.Count
    request: kind.Running
    ids: kind.Counts
    blocks: kind.Blocks
    step: kind.OrNone

    @staticmethod
    def apply(state: State, node: int, parent: int, request: int, ids: list[int], blocks: list[int], step: int) -> None:
        view = state.nodes[node] = NodeView(node, parent, array("i"), [], 1, state.seq)
        state.nodes[parent].children.append(node)
        _grow(state, view, request, ids, blocks, step)

    @staticmethod
    def faults(state: State, node: int, parent: int, request: int, ids: list[int], blocks: list[int]) -> Iterator[str]:
        yield from _grow_faults(state, request, ids, blocks)
        if node in state.nodes:
            yield f"node {node} exists already"
        if parent != state.requests[request].node:
            yield f"r{request} does not hold node {parent}"


class Extend(kind.Kind):
    """Like insert, for a leaf that only this request holds."""

    node: kind.Count
    request: kind.Running
    ids: kind.Counts
    blocks: kind.Blocks
    step: kind.OrNone

    @staticmethod
    def apply(state: State, node: int, request: int, ids: list[int], blocks: list[int], step: int) -> None:
        _grow(state, state.nodes[node], request, ids, blocks, step)

    @staticmethod
    def faults(state: State, node: int, request: int, ids: list[int], blocks: list[int]) -> Iterator[str]:
        yield from _grow_faults(state, request, ids, blocks)
        if not node or node != state.requests[request].node or state.nodes[node].children:
            yield f"node {node} is not a leaf held by r{request}"


class Again(kind.Kind):
    """After insert or extend: prompt tokens of its blocks that were in the tree before. The request computes them again
    because their blocks were evicted."""

    request: kind.Running
    tokens: kind.Count

    @staticmethod
    def apply(state: State, tokens: int) -> None:
        if state.waste is not None:
            state.waste.evicted += tokens


class Full(kind.Kind):
    """Without a prefix cache: the request's next full blocks. Each has the number of its text; two blocks have the same
    number if they hold the same tokens after the same prefix."""

    request: kind.Running
    contents: kind.Blocks

    @staticmethod
    def apply(state: State, request: int, contents: list[int]) -> None:
        state.requests[request].contents += contents

    @staticmethod
    def faults(state: State, request: int, contents: list[int]) -> Iterator[str]:
        holder = state.requests[request]
        if len(holder.contents) + len(contents) > len(holder.table):
            yield f"r{request} has fewer blocks"


class Split(kind.Kind):
    """The first `blocks` blocks of the node become a new parent, `upper`."""

    node: kind.Count
    upper: kind.Positive
    blocks: kind.Positive

    @staticmethod
    def apply(state: State, node: int, upper: int, blocks: int) -> None:
        lower = state.nodes[node]
        cut = blocks * state.block_size
        view = NodeView(
            upper, lower.parent, lower.ids[:cut], lower.blocks[:blocks], lower.users, lower.last_used, children=[node]
        )
        siblings = state.nodes[lower.parent].children
        siblings[siblings.index(node)] = upper
        lower.ids, lower.blocks, lower.parent = lower.ids[cut:], lower.blocks[blocks:], upper
        state.nodes[upper] = view
        state.move_blocks(view.blocks, upper)

    @staticmethod
    def faults(state: State, node: int, upper: int, blocks: int) -> Iterator[str]:
        if not node or node not in state.nodes or blocks >= len(state.nodes[node].blocks):
            yield f"node {node} does not exist or has no more than {blocks:,} blocks"
        if upper in state.nodes:
            yield f"node {upper} exists already"


class Merge(kind.Kind):
    """A node and its only child, which the same requests hold, become one node. It has the smaller of the two ids."""

    upper: kind.Positive
    lower: kind.Positive

    @staticmethod
    def apply(state: State, upper: int, lower: int) -> None:
        node, child = state.nodes.pop(upper), state.nodes.pop(lower)
        id = min(upper, lower)
        state.move_blocks(child.blocks if id == upper else node.blocks, id)
        siblings = state.nodes[node.parent].children
        siblings[siblings.index(upper)] = id
        for each in child.children:
            state.nodes[each].parent = id
        node.id, node.children, node.last_used = id, child.children, max(node.last_used, child.last_used)
        node.ids += child.ids
        node.blocks += child.blocks
        state.nodes[id] = node
        for request in state.requests.values():
            if request.node == lower:
                request.node = id

    @staticmethod
    def faults(state: State, upper: int, lower: int) -> Iterator[str]:
        node, child = state.nodes.get(upper), state.nodes.get(lower)
        if node is None or child is None or node.children != [lower]:
            yield f"node {lower} is not the only child of node {upper}"
        elif node.users != child.users:
            yield f"node {upper} has {node.users:,} users, node {lower} has {child.users:,}"


class Evict(kind.Kind):
    """The last `blocks` blocks of a leaf are evicted; an empty leaf is removed."""

    node: kind.Count
    blocks: kind.Positive
    reason: kind.Text

    @staticmethod
    def apply(state: State, node: int, blocks: int) -> list[int]:
        return state.cut(node, len(state.nodes[node].blocks) - blocks)

    @staticmethod
    def faults(state: State, node: int, blocks: int) -> Iterator[str]:
        view = state.nodes.get(node)
        if view is None or not node or view.children or blocks > len(view.blocks):
            yield f"node {node} is not a leaf with at least {blocks:,} blocks"
        elif view.users > 0:
            yield f"node {node} is in use"
        elif state.copies and any(block in state.copies for block in view.blocks[-blocks:]):
            yield f"blocks of node {node} have copies"


class Settle(kind.Kind):
    """The pending blocks of this step are now written."""

    step: kind.OrNone

    @staticmethod
    def apply(state: State, step: int) -> None:
        for block in [block for block, at in state.pending.items() if at == step]:
            del state.pending[block]


class Withdraw(kind.Kind):
    """The step failed. `nodes`: [(node, blocks kept)], deepest first; 0 removes the node."""

    step: kind.OrNone
    nodes: kind.CutNodes

    @staticmethod
    def apply(state: State, step: int, nodes: list[tuple[int, int]]) -> None:
        for node, keep in nodes:
            state.cut(node, keep)
        Settle.apply(state, step)

    @staticmethod
    def faults(state: State, nodes: list[tuple[int, int]]) -> Iterator[str]:
        left = {id: len(state.nodes[id].children) for id, _ in nodes if id and id in state.nodes}
        for id, keep in nodes:
            if id not in left or keep > len(state.nodes[id].blocks) or (not keep and left[id]):
                yield f"node {id} cannot be cut to {keep:,} blocks"
            if state.nodes[id].users > 0:
                yield f"node {id} is in use"
            parent = state.nodes[id].parent
            if not keep:
                del left[id]
                if parent in left:
                    left[parent] -= 1


# ---- side groups (engine/trace/side_pool.py); only for models with several kinds of memory


class Take(kind.Kind):
    """Free pages or slots of a side group become the request's."""

    group: kind.SideGroup
    request: kind.Running
    pages: kind.Pages

    @staticmethod
    def apply(state: State, group: int, request: int, pages: list[tuple[int, int]]) -> None:
        state.groups[group].take_pages([page for _, page in pages])
        state.requests[request].side[group].update(pages)

    @staticmethod
    def faults(state: State, group: int, request: int, pages: list[tuple[int, int]]) -> Iterator[str]:
        held = state.requests[request].side[group]
        yield from state.groups[group].take_faults([page for _, page in pages])
        if any(place in held for place, _ in pages) or len({place for place, _ in pages}) != len(pages):
            yield f"r{request} has a page at one of these places"


class Borrow(kind.Kind):
    """A hit: the request holds pages or a checkpoint that the tree keeps."""

    group: kind.SideGroup
    request: kind.Running
    pages: kind.Pages

    @staticmethod
    def apply(state: State, group: int, request: int, pages: list[tuple[int, int]]) -> None:
        state.groups[group].hold(page for _, page in pages)
        state.requests[request].side[group].update(pages)

    @staticmethod
    def faults(state: State, group: int, request: int, pages: list[tuple[int, int]]) -> Iterator[str]:
        pool, view = state.groups[group], state.requests[request]
        for place, page in pages:
            if place in view.side[group]:
                yield f"r{request} has a page at {place}"
            if not 0 <= place < view.shared_blocks or pool.kept.get(view.table[place]) != page:
                yield f"page {page:,} is not kept for block {place} of r{request}"


class Drop(kind.Kind):
    """The request releases pages behind the window, or states that later ones replaced. `soon`: what the tree keeps of
    them is evicted first."""

    group: kind.SideGroup
    request: kind.Running
    places: kind.Places
    soon: kind.Flag

    @staticmethod
    def apply(state: State, group: int, request: int, places: list[int], soon: bool) -> None:
        held = state.requests[request].side[group]
        state.groups[group].release([held.pop(place) for place in places], soon)

    @staticmethod
    def faults(state: State, group: int, request: int, places: list[int]) -> Iterator[str]:
        if len(set(places)) != len(places) or not state.requests[request].side[group].keys() >= set(places):
            yield f"r{request} has no page at one of these places"


class Keep(kind.Kind):
    """The tree keeps pages or checkpoints for its blocks: [(block, page)]. `request`: -1 if no request is known."""

    group: kind.SideGroup
    request: kind.RunningOrNone
    pages: kind.Pages

    @staticmethod
    def apply(state: State, group: int, pages: list[tuple[int, int]]) -> None:
        state.groups[group].keep(pages)

    @staticmethod
    def faults(state: State, group: int, request: int, pages: list[tuple[int, int]]) -> Iterator[str]:
        pool, view = state.groups[group], state.requests.get(request)
        places = {page: place for place, page in view.side[group].items()} if view else {}
        for block, page in pages:
            place = places.get(page, -1)
            if pool.group.shared:  # vLLM keeps pages whose text is not in the tree, until it is there again
                if block >= state.num_blocks or page >= state.num_blocks or not state.node_of[block]:
                    yield f"block {block:,} is not in the tree"
            elif view is None or not 0 <= place < view.shared_blocks or view.table[place] != block:
                yield f"page {page:,} is not that of block {block:,} of r{request}"
            if block in pool.kept or page in pool.block_of:
                yield f"block {block:,} or page {page:,} is kept already"


class Lose(kind.Kind):
    """Idle pages or checkpoints are evicted; the blocks of the tree for which they were kept stay. In vLLM, also pages
    with holders whose content is not cached any more."""

    group: kind.SideGroup
    pages: kind.Blocks
    reason: kind.Text

    @staticmethod
    def apply(state: State, group: int, pages: list[int]) -> None:
        state.groups[group].evict(pages)

    @staticmethod
    def faults(state: State, group: int, pages: list[int]) -> Iterator[str]:
        pool = state.groups[group]
        known = pool.block_of if pool.group.shared else pool.idle
        if len(set(pages)) != len(pages) or not known.keys() >= set(pages):
            yield "one of these pages is not idle"


# ---- steps


class Budget(kind.Kind):
    """The token budget from the next step on. It changes with a target for gaps (engine/core/gap_target.py)."""

    tokens: kind.Positive

    @staticmethod
    def apply(state: State, tokens: int) -> None:
        state.budget = tokens


class Step(kind.Kind):
    """A step was planned. `prefills`: [(request, start, n, samples)]; `joined`, `left`: the requests that joined and
    left the decoding set, each member of which advances by one token in every step; `tokens`: the part of the budget
    used; `waiting`: the number of requests left in the queue."""

    step: kind.Count
    prefills: kind.Chunks
    joined: kind.Requests
    left: kind.Requests
    tokens: kind.Count
    waiting: kind.Count

    @staticmethod
    def apply(
        state: State, step: int, prefills: list[tuple[int, int, int, bool]], joined: list[int], left: list[int]
    ) -> None:
        for id in left:
            state.stop_decoding(state.requests[id])
        for id in joined:
            state.requests[id].joined_at = state.ticks
        state.ticks += 1
        state.step = step
        for id, start, n, _samples in prefills:
            request = state.requests[id]
            request.base = start + n
            if request.lost > start and state.waste is not None:
                state.waste.preempted += min(n, request.lost - start)

    @staticmethod
    def faults(
        state: State, step: int, prefills: list[tuple[int, int, int, bool]], left: list[int], tokens: int
    ) -> Iterator[str]:
        if step != state.step + 1:
            yield f"step {step:,} does not follow step {state.step:,}"
        if any(state.requests[id].joined_at < 0 for id in left):
            yield "a request leaves the decoding set but was not in it"
        if sum(chunk[2] for chunk in prefills) > tokens:
            yield "its prompt chunks have more tokens than the step"


class Fail(kind.Kind):
    """The step failed; its requests finish with an error."""

    step: kind.PlannedStep
    error: kind.Text


# ---- speculation; only for steps with drafts


class Draft(kind.Kind):
    """Before the `step` record: [(request, draft tokens)]."""

    step: kind.OrNone
    drafts: kind.Drafted


class Accept(kind.Kind):
    """At the commit: [(request, drafted, accepted)]; adds `accepted` tokens to a request."""

    step: kind.OrNone
    drafts: kind.Accepted

    @staticmethod
    def apply(state: State, drafts: list[tuple[int, int, int]]) -> None:
        for id, _drafted, accepted in drafts:
            state.requests[id].base += accepted

    @staticmethod
    def faults(state: State, drafts: list[tuple[int, int, int]]) -> Iterator[str]:
        for id, drafted, accepted in drafts:
            if accepted > drafted:
                yield f"r{id} has more accepted drafts than drafts"


# ---- control


class Gate(kind.Kind):
    """"open" | "closed", and why."""

    state: kind.GateState
    reason: kind.Text

    @staticmethod
    def apply(view: State, state: str) -> None:
        view.gate = state


class Pace(kind.Kind):
    """Slow motion: every step takes this many times as long (1: off)."""

    factor: kind.Factor

    @staticmethod
    def apply(state: State, factor: float) -> None:
        state.pace = factor


# ---- timings, not part of the state


class Time(kind.Kind):
    """`wall_ms`: from the plan, or from the results of the previous step if these came later, to its own results,
    without the delay by slow motion. `launch_us`, `device_ms`: None if unknown."""

    step: kind.PlannedStep
    plan_us: kind.Signed
    launch_us: kind.MaybeSigned
    commit_us: kind.Signed
    wall_ms: kind.Duration
    device_ms: kind.MaybeDuration
    work: kind.Work


class Parts(kind.Kind):
    """Before the step's `time`. The first six add up to the host's time since the results of the previous step arrived,
    or since the idle engine got work. emit: output and commands between two steps; gate: pause and slow motion; wait:
    blocked until the device finished. The other three overlap with the six. gc: garbage collection; delayed: the
    process was ready to run while another program had the core, since the last step that has it (None: not read, as in
    most short steps, or not available); stops: how often a signal stopped the process."""

    step: kind.PlannedStep
    commit_us: kind.Signed
    emit_us: kind.Signed
    gate_us: kind.Signed
    plan_us: kind.Signed
    launch_us: kind.Signed
    wait_us: kind.Signed
    gc_us: kind.Signed
    delayed_us: kind.MaybeSigned
    stops: kind.Count


class Comm(kind.Kind):
    """Before the step's `time`, only with several ranks: rank 0's time in collectives. It includes the waiting for
    other ranks, except for a step replayed as CUDA graphs."""

    step: kind.PlannedStep
    ranks: kind.Positive
    ms: kind.Signed


class Experts(kind.Kind):
    """[(layer, [tokens of each expert])] since the last `experts` record; a few times per second, for models with
    experts."""

    step: kind.PlannedStep
    load: kind.Load


class First(kind.Kind):
    """At the first token; the two times add up to the TTFT."""

    request: kind.Count
    queue_ms: kind.Signed
    prefill_ms: kind.Signed
