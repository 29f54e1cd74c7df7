"""L9: the tree of cached prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.trace import views
from engine.trace.views import FREE, NodeView
from minitui.teaching import hybrid
from minitui.teaching.lessons.page import Seen
from minitui.teaching.lessons.side_by_side import side_by_side
from minitui.teaching.lessons.written import read_lesson
from minitui.teaching.scenarios import QUESTIONS, VOICES, paste, paste_of
from minitui.teaching.stage import Stage
from minitui.text import count, match_reason
from minitui.viewmodel.board import TreeBlocks, TreeLine

SAME, LONG = 141, 152  # in the question of `walk`: equal tokens at the beginning of both prompts, tokens of the second
CACHED_A, CACHED_B, ROOM, NEEDED = 5, 3, 48, 53  # in the question of `touch_and_evict`: blocks of A, B, none, C

Prefix = tuple[int, ...]  # the tokens from the root to the end of a block: what a cached block stands for


class Block(NamedTuple):
    """A block of the tree. Its number can be used again later; its prefix cannot."""

    prefix: Prefix
    number: int


class TreeDrawing:
    """Draws the tree of a stage, and remembers the blocks that it has drawn."""

    def __init__(self, stage: Stage, title: str) -> None:
        self.stage, self.title = stage, title
        self._drawn: dict[Prefix, tuple[Block, int, str]] = {}  # with the depth and the name of its node

    def nodes(self) -> list[tuple[NodeView, int, list[Block]]]:
        """Returns (node, depth, blocks) of each node; a parent is before its children."""
        state = self.stage.state()
        found: list[tuple[NodeView, int, list[Block]]] = []

        def visit(node: NodeView, depth: int, before: Prefix) -> None:
            size = state.block_size
            ids = before + tuple(node.ids)
            ends = range(len(before) + size, len(ids) + 1, size)
            if node.id:
                blocks = [Block(ids[:end], number) for end, number in zip(ends, node.blocks, strict=True)]
                found.append((node, depth, blocks))
            for child in sorted(node.children):
                visit(state.nodes[child], depth + bool(node.id), ids)

        visit(state.nodes[0], 0, ())
        return found

    def draw(self, line: str, marks: dict[Prefix, str] | None = None, new: bool = False) -> list[Block]:
        """Shows the tree. `marks`: the state of blocks. `new`: blocks that were not drawn before are new. Blocks that
        were drawn before and have left the tree stay in the picture; returns these blocks."""
        marks = marks or {}
        nodes = self.nodes()
        inside = {block.prefix for _, _, blocks in nodes for block in blocks}
        evicted = {prefix: drawn for prefix, drawn in self._drawn.items() if prefix not in inside}
        lines: list[tuple[TreeLine, Prefix]] = []  # with the prefix of the last block
        for node, depth, blocks in nodes:
            name = self._name(node)
            states = ("new" if new and b.prefix not in self._drawn else "kept" for b in blocks)
            cells = [(b.number, marks.get(b.prefix) or state) for b, state in zip(blocks, states, strict=True)]
            tail = blocks[-1].prefix
            while not node.children and (following := self._after(tail, evicted)):
                cells.append((evicted.pop(following)[0].number, "evicted"))
                tail = following
            lines.append((TreeLine(depth, name, tuple(cells), node.users), tail))
        gone = [block for block, _, _ in self._drawn.values() if block.prefix not in inside]
        while evicted:  # whole nodes: each run of blocks is a line
            first = min(evicted, key=len)
            block, depth, name = evicted.pop(first)
            above = [i for i, (_, tail) in enumerate(lines) if tail == first[: -self.stage.state().block_size]]
            cells, tail = [(block.number, "evicted")], first
            while following := self._after(tail, evicted):
                cells.append((evicted.pop(following)[0].number, "evicted"))
                tail = following
            lines.insert(above[-1] + 1 if above else len(lines), (TreeLine(depth, name, tuple(cells)), tail))
        self.stage.view.put(TreeBlocks(self.title, tuple(row for row, _ in lines), line))
        for node, depth, blocks in nodes:
            self._drawn |= {block.prefix: (block, depth, self._name(node)) for block in blocks}
        return gone

    def _after(self, prefix: Prefix, among: dict[Prefix, tuple[Block, int, str]]) -> Prefix | None:
        size = self.stage.state().block_size
        return next((p for p in among if len(p) == len(prefix) + size and p[: len(prefix)] == prefix), None)

    def _name(self, node: NodeView) -> str:
        """Returns the role and the text of a node, from the first token on that its siblings do not have."""
        view = self.stage.view
        return " ".join(view.moment.tree.text(self.stage.state(), node, view.texts.decode))


async def walk(stage: Stage) -> Seen:
    """Looks a second prompt up, block by block. The answer: what was computed of it, 0: all, 1: what differs, 2: what
    follows the last equal block, 3: one token."""
    drawing = TreeDrawing(stage, "Lookup of the second prompt")
    await stage.write(paste(3), 12, 1)
    drawing.draw("The blocks of the first prompt are in the tree, in one node.")
    await stage.pause(3)
    second = stage.chat(max_tokens=12, whole=True)
    question = paste(1) + " Is this right?"
    ids, size = tuple(stage.prompt(question, stage.system)), stage.source.info.block_size
    id = await stage.ask(second, question)
    equal = await _compare(stage, drawing, ids, size)
    await stage.step(1)
    record = stage.events("hit")[-1].record
    cached, prompt = record.tokens, stage.view.history.lanes.lanes[id].request.prompt_tokens
    drawing.draw(
        f"{count(equal, 'block')} of {size} were equal: {cached} of {prompt} tokens. The node was split after them. "
        f"The other {prompt - cached} tokens were computed.",
        dict.fromkeys((ids[: size * (n + 1)] for n in range(equal)), "match"), new=True,
    )
    return Seen(
        f"The engine's record of the hit: r{id} took {cached} of its {prompt} prompt tokens from the tree. Why not "
        f"more? The engine says: {match_reason(record.stop, record.at)}. This token is in the middle of a block, and "
        "only full blocks are shared.\n\nThe engine split the node: the common part became the parent, which both "
        "requests hold. Below the parent, each prompt has a child of its own. “+” marks new blocks: "
        "a block of the second prompt, and a block that the first chat has just filled.",
        {0: 0, record.at: 1, record.at // size * size: 2, prompt - 1: 3}.get(cached),
    )


async def _compare(stage: Stage, drawing: TreeDrawing, ids: Sequence[int], size: int) -> int:
    """Marks the blocks of the tree that equal the prompt's, one after the other; returns their number."""
    cached = {block.prefix: block.number for _, _, blocks in drawing.nodes() for block in blocks}
    marks: dict[Prefix, str] = {}
    equal = 0
    for end in range(size, len(ids), size):  # the last token is computed in any case
        prefix = tuple(ids[:end])
        if prefix not in cached:
            break
        name = f"Logical block {equal} of the prompt, tokens {end - size} to {end - 1}"
        drawing.draw(f"{name}: compared.", marks | {prefix: "looked"})
        await stage.pause(0.5)
        marks[prefix] = "match"
        equal += 1
        drawing.draw(f"{name}: equal to physical block {cached[prefix]}.", marks)
        await stage.pause(0.3)
    drawing.draw(f"Logical block {equal} of the prompt is not in the tree: the lookup ends.", marks)
    await stage.pause(3)
    return equal


async def touch_and_evict(stage: Stage) -> Seen:
    """Fills the pool until all blocks of B are evicted, and blocks of A. The answer: 1 if A lost its first block, 2 if
    it lost its last."""
    drawing = TreeDrawing(stage, "The tree before and after the eviction")
    chats = [stage.chat(voice, name, max_tokens=8, whole=True) for voice, name in zip(VOICES, ("A", "B"), strict=False)]
    for session, what in ((chats[0], "A"), (chats[1], "B"), (chats[0], "A again")):
        await stage.ask(session, QUESTIONS[0])
        await stage.run_until("finish")
        drawing.draw(f"Used last: {what}.")
        await stage.pause(1.5)
    stage.show(chats[0])
    free, pool = stage.state().counts[FREE], stage.source.info.num_blocks
    mine, theirs = (_blocks(stage, name) for name in ("Alpha", "Bravo"))
    big = stage.chat(VOICES[2], "C", max_tokens=8, whole=True)
    await stage.ask(big, paste_of(stage, VOICES[2], free + len(theirs)))
    await stage.run_until("eviction")
    reason = stage.events("evict")[0].record.reason
    needed = next(int(number) for number in reason.split() if number.isdecimal())
    line = f"C needs {needed} blocks; {free} of {pool} are free. So {needed - free} cached blocks are evicted."
    lost = drawing.draw(line, new=True)
    others = [block.number for block in lost if block.number not in theirs]
    return Seen(
        f"The least recently used blocks were evicted first: all {len(theirs)} blocks of B. A came first, but was used "
        f"again after B. Then A lost its last {count(len(others), 'block')}. A's first blocks are still useful: a "
        "prompt that begins like A finds them.\n\nThis engine evicts only leaves (nodes without children), from their "
        "ends, and only as many blocks as are needed.",
        None if not others or set(theirs) - {block.number for block in lost} else
        1 if mine[0] in others else 2 if others == mine[-len(others):] else None,
    )


def _blocks(stage: Stage, word: str) -> list[int]:
    """Returns the blocks of the prefix that has this word in its text."""
    nodes, decode = stage.state().nodes.values(), stage.view.texts.decode
    return next(list(node.blocks) for node in nodes if node.id and word in decode(node.ids))


PROMPTS, SYSTEM = 752, 112  # tokens: of the six prompts of `shared_system_prompt`, and of their common full blocks
BUDGET = 1024  # tokens: more than PROMPTS
PAGE = 256  # tokens between two checkpoints of a long prompt
BLOCKS = 56  # of the pool: enough for these six requests, even if they share nothing


async def shared_system_prompt(stage: Stage) -> Seen:
    """Sends six prompts with one system prompt at once."""
    sessions = await stage.write_all(QUESTIONS, [8] * len(QUESTIONS))
    await stage.step(2, seconds=1.0)
    await stage.answers(sessions)
    await stage.gate()
    figures = stage.figures()
    counts = {"all prompts": figures.prompt_tokens, "computed": figures.computed, "shared": figures.cached}
    rows = [(name, float(n), f"{n:,} tokens") for name, n in counts.items()]
    return Seen(
        "The common beginning was computed once, for all six:\n\n"
        f"{stage.bars(rows)}\n\nWhen the scheduler planned the first prompt, it added the prompt's full blocks to the "
        "tree. So the other five found them in the same step. vLLM can share within a step, too. In SGLang, only later "
        "steps find a prompt's new blocks.",
        {PROMPTS: 0, PROMPTS - SYSTEM: 1, PROMPTS - 5 * SYSTEM: 2, PROMPTS - 6 * SYSTEM: 3}.get(figures.computed),
    )


async def nearest_checkpoint(stage: Stage) -> Seen:
    """Runs three chats in a model that also keeps recurrent states. Their second hit ends at the nearest checkpoint."""
    await stage.other_engine(**hybrid.OPTIONS, checkpoint_interval=PAGE)
    await stage.gate()
    stage.begin_count()
    _, second, third = await hybrid.three_chats(stage, hybrid.SHORT)
    taken, equal = second["cached_tokens"], second["match"]["at"]
    counts = {"from the cache": taken, "computed again": equal - taken, "new": second["prompt_tokens"] - equal}
    rows = [(name, float(n), f"{n} tokens") for name, n in counts.items()]
    return Seen(
        f"The second prompt:\n\n{stage.bars(rows)}\n\nThe engine says: {hybrid.told(second)}. So it left a checkpoint "
        f"at {equal}, and the third chat took {third['cached_tokens']}: all full blocks of the shared text.",
        {hybrid.FOUND: 0, PAGE: 1, 0: 2, hybrid.SAME: 3}.get(taken),
    )


async def close(stage: Stage) -> None:
    """Starts three chats with one system prompt and stops the engine."""
    for question in QUESTIONS[:3]:
        await stage.write(question, 30, 2)


def _trunk(stage: Stage) -> str:
    state = stage.state()
    trunk = max((n for n in state.nodes.values() if n.id), key=lambda n: n.users)
    return f"{len(trunk.blocks)} blocks, {len(trunk.ids)} tokens, held by {trunk.users} requests"


def _hit(stage: Stage) -> str:
    lane = stage.view.history.lanes.lanes[max(stage.view.history.lanes.lanes)]
    return f"{lane.request.cached_tokens} of {lane.request.prompt_tokens}"


with_and_without_cache = side_by_side("cache")

LESSON = read_lesson(globals(), views, kv_blocks=BLOCKS, max_num_batched_tokens=BUDGET)
