"""Radix tree: which prefixes are shared, which requests use them, and which node is evicted next?

A row per node: its role, its text from the point where it differs from its siblings' texts, its number of tokens, its
number of users (requests), the prompt tokens that it saved, and its place in the eviction order. The nodes that saved
the most tokens come first. Below are the nodes that are evicted next; if few blocks are free, also the blocks that
the next allocations take.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import ClassVar

from textual.binding import Binding

from engine.trace.state import State
from engine.trace.views import FREE, NodeView
from minitui.text import count, short
from minitui.tui.glyphs import glyphs
from minitui.tui.theme import LIT
from minitui.tui.widgets.base import EDGE, Opened, Picture, SearchPanel, Thing, neighbour, selected
from minitui.tui.widgets.inspect.icicle import Icicle, icicle
from minitui.tui.widgets.rows import (
    Row,
    Run,
    Runs,
    clean,
    fit,
    fitting,
    legend,
    plain,
    runs_width,
    whole_words,
    wrapped,
)
from minitui.viewmodel.state.eviction import free_words, is_under_pressure, pressure_words
from minitui.viewmodel.state.side_groups import kept_ends, tokens_before
from minitui.viewmodel.state.tree import TreePicture, TreeRow
from minitui.viewmodel.view import View

ROLE_STYLES = {"sys": "pool", "usr": "waiting", "ast": "decode"}
TALL = 16  # a panel with this many rows has a row for each of the nodes that are evicted next; a smaller one, one row
LOW = 6  # rows: a panel of this height or less does not show the number of free blocks
LARGE = 30  # a panel with this many rows also has the whole text of the selected node
WHOLE_TOKENS = 2_048  # the most tokens of this text
NARROW = 40  # columns: a narrower panel has the table
LEAST_BARS = 4  # rows of bars, with their axis; a lower panel has the table
COLUMNS = (("tokens", 7), ("users", 6), ("saved", 6), ("evict #", 8))


def _kept(state: State, node: int, width: int) -> str:
    """Returns where the tree keeps checkpoints and windows of a node, in tokens of the text: " ◆256 ◆416". If `width`
    cells are too few for all, the first ones are left out."""
    signs = {"state": glyphs().checkpoint, "window": glyphs().window}
    if not state.groups:
        return ""
    before = tokens_before(state, state.nodes[node])
    words = [f" {signs[kind]}{before + end:,}" for end, kind in kept_ends(state, state.nodes[node])]
    texts = ["".join(words), *(f" {glyphs().dots}" + "".join(words[i:]) for i in range(1, len(words))), ""]
    return next(text for text in texts if len(text) <= width)


def _last_children(rows: Sequence[TreeRow]) -> list[bool]:
    """Returns for each row whether it is its parent's last child."""
    last, depths = [False] * len(rows), set[int]()  # a row has a later sibling if its depth is in depths
    for i in range(len(rows) - 1, -1, -1):
        depth = rows[i].depth
        last[i] = depth not in depths
        depths = {d for d in depths if d < depth} | {depth}
    return last


class RadixTree(SearchPanel):
    """The tree panel. Up and down select a node, f folds it, e shows every node, / searches, Enter shows details."""

    TITLE = "Radix tree"
    NEEDS_STATE = True
    EMPTY = "no prompt has filled a block yet"
    BINDINGS: ClassVar = [
        Binding("up", "move(-1)", "node above", show=False, id="tree.up"),
        Binding("down", "move(1)", "node below", show=False, id="tree.down"),
        Binding("pageup", "move(-10)", "ten nodes up", show=False, id="tree.pageup"),
        Binding("pagedown", "move(10)", "ten nodes down", show=False, id="tree.pagedown"),
        Binding("left", "parent", "parent", show=False, id="tree.parent"),
        Binding("v", "bars", "bars or table", show=False, id="tree.bars", tooltip="the tree as bars, or as a table"),
        Binding("f", "fold", "fold", show=False, id="tree.fold", tooltip="hide or show the children of this node"),
        Binding("e", "everything", "all nodes", show=False, id="tree.everything"),
        Binding("slash", "search", "search", show=False, id="tree.search", tooltip="find nodes by their text"),
        Binding("enter", "open", "details", show=False, id="tree.open"),
    ]

    BARS: ClassVar = True  # False: never as bars
    bars = True  # False: as a table
    everything = False  # True: show every node
    top = 0  # the first row shown
    nodes: Sequence[int] = ()  # the node of each row of the tree
    bottom = 0  # the first row below the tree
    icicle: Icicle | None = None  # None: a table is shown
    _seen: AbstractSet[int] = frozenset()  # the nodes of the last picture as bars
    _split: tuple[int, float] = (0, -1e9)  # the node that was split last, and when it was first drawn
    below: Sequence[int] = ()  # the node of each row from `bottom` on; 0: none
    _more = 0  # nodes of the last picture beyond its rows

    def picture(self, view: View, width: int, height: int) -> Picture:
        shown = view.moment.shown
        whole, below = self._whole_text(view, width, height), self._below(view, width, height)
        as_bars = self.BARS and self.bars and width >= NARROW and not self.search and not self.everything
        if as_bars and height < LEAST_BARS + 2 + len(below):  # the order of eviction is beside the bars, too
            below, self.below = [], ()
        room = max(1, height - 2 - len(whole) - len(below))
        chosen = selected(view, "node")
        pinned = set(view.links.nodes)
        for _ in range(2):  # a branch with several nodes is one row of bars, so there may be room for more nodes
            most = room + self._more
            picture = view.moment.tree.picture(shown, view.texts.decode, most, pinned, self.search, self.everything)
            self.icicle = self._icicle(view, picture, width, room + 1) if as_bars else None
            spare = -self._more if self.icicle is None else min(self.icicle.spare, picture.hidden_nodes)
            before, self._more = self._more, max(0, self._more + spare)
            if self._more == before:
                break
        self.nodes = [row.node for row in picture.rows]
        self.moving = self.icicle is not None and self.icicle.moving
        self.top = max(0, min(self.top, len(picture.rows) - room))
        if chosen in self.nodes:
            at = self.nodes.index(chosen)
            if not self.top <= at < self.top + room:
                self.top = max(0, min(at - room // 2, len(picture.rows) - room))
        visible = picture.rows[self.top : self.top + room]
        rows = [self._head(width)]
        if self.icicle is not None:
            rows, visible = list(self.icicle.rows), []
        last = _last_children(picture.rows)[self.top : self.top + room]
        rows += [self._line(view, row, width, ends) for row, ends in zip(visible, last, strict=False)]
        if not picture.nodes:
            why = self.EMPTY if view.history.caching else "prefix caching is off"
            rows += wrapped(f"empty: {why}", "dim", width)[:room]
        rows += [Row().done(width)] * (room + 1 - len(rows))
        hidden = picture.nodes - (len(visible) if self.icicle is None else self.icicle.nodes)
        rows += whole
        self.bottom = len(rows)
        rows += [*below, self._foot(view, hidden, picture.evictable_tokens, width)]
        g = glyphs()
        key = legend((g.in_use, "running", "in use"), (g.evictable, "hit", "cached"))
        if self.icicle is not None:
            key = legend((" ", "on-fill on shared", "several users"), (" ", "on-fill on active", "one"),
                         (" ", "on-fill on cached", "none: cached"), (g.filling, "active", "not in the tree yet"))
        elif any(row.pending for row in visible):
            key = [*key, ("  ", "dim"), *legend((g.pending, "prefill", "being computed"))]
        kinds, signs = [pool.group.kind for pool in shown.state.groups], list[Run]()
        for kind, sign, words in ("state", g.checkpoint, "checkpoint"), ("window", g.window, "window kept"):
            signs += [("  ", "dim"), *legend((sign, "ink", words))] if kind in kinds else []
        whole_key = [*key, *signs]
        key = whole_key if not signs or runs_width(whole_key) <= width + 4 - EDGE else signs[1:]  # the frame's room
        note = self.search_note()
        if not note and self.BARS:
            note = self.own_key("v: table" if self.icicle is not None else "v: bars", first=True)
        title = f"Radix tree · {count(picture.nodes, 'node')}, {count(picture.tokens, 'token')}"
        whole_title = title
        if self.icicle is not None and (name := next((row for row in picture.rows if row.name), None)):
            why = name.text.removeprefix(name.name).strip(" ·")  # why the nodes have no texts: once
            whole_title += f" · {why}" if why else ""
        if runs_width(note) + len(whole_title) + 8 > width:
            whole_title = title
        return Picture(rows[:height], title=whole_title, note=note, legend=key)

    def _icicle(self, view: View, picture: TreePicture, width: int, height: int) -> Icicle | None:
        """Returns the tree as bars; None if it has none, or the panel is too low."""
        if not picture.rows or height < LEAST_BARS:
            return None
        nodes = view.moment.shown.state.nodes

        def roles(node: int, begin: int) -> Sequence[tuple[int, str, str]]:
            return view.moment.tree.roles(nodes[node], begin, view.texts.decode)

        now, before, self._seen = view.moment.now, self._seen, {row.node for row in picture.rows}
        new = (node for node in self._seen - before if not before.isdisjoint(nodes[node].children))
        if now - self._split[1] > 1.0 and not view.moment.still and (node := next(new, 0)):
            self._split = node, now
        return icicle(view, picture.rows, roles, width, height, self._split[0], now - self._split[1])

    def _head(self, width: int) -> Runs:
        at = width - sum(w for _, w in self._columns(width))
        row = Row("role  text after the shared part" if at > 36 else "role  text", "dim")
        for name, w in self._columns(width):
            at += w
            row.right(name, at, "dim")
        return row.done(width)

    def _columns(self, width: int) -> tuple[tuple[str, int], ...]:
        return COLUMNS if width >= 56 else COLUMNS[:2] + COLUMNS[3:] if width >= 44 else COLUMNS[:2]

    def _line(self, view: View, node: TreeRow, width: int, last: bool, in_tree: bool = True) -> Runs:
        g = glyphs()
        glow = view.moment.glow_of(view.moment.shown.node_changed.get(node.node, -1e9))
        row = Row()
        if node.depth:
            row.add("  " * (node.depth - 1) + (g.last_branch if last else g.branch) + " ", "faint")
        sign = (g.pending, "prefill") if node.pending else (g.in_use, "running") if node.users else (g.evictable, "hit")
        row.add(*sign).add(" ")
        row.add((node.role or "txt") + " ", ROLE_STYLES.get(node.role, "dim"))
        if node.folded and node.has_children:
            row.add(g.folded + " ", "dim")
        columns = self._columns(width)
        end = width - sum(w for _, w in columns)
        chosen = node.node == selected(view, "node")
        style = "bold accent" if chosen else "bold ink" if glow == 2 else "ink" if node.users else "dim"
        room = max(0, end - row.width - 1)
        kept = _kept(view.moment.shown.state, node.node, room // 2) if in_tree else ""
        room -= len(kept)
        row.add(fit(whole_words(clean(node.text), room), room, g.dots), style).add(kept)
        cells = {
            "tokens": (short(node.tokens), "ink" if glow < 2 else "bold running"),
            "users": (str(node.users) if node.users else "", "running"),
            "saved": (short(node.saved) if node.saved else "", "hit"),
            "evict #": (f"{node.rank:,}" if node.rank else "", "dim"),
        }
        for name, w in columns:
            end += w
            text, style = cells[name]
            row.right(text, end, style)
        if any(block in view.lit for block in view.moment.shown.state.nodes[node.node].blocks[:1]):
            return Row(plain(row.done(width)), f"bold on-fill on {LIT}").done(width)
        return row.done(width, "select" if node.node in view.links.nodes else "")

    def _whole_text(self, view: View, width: int, height: int) -> list[Runs]:
        """Returns the whole text of the selected node, below the tree of a large panel."""
        node = view.moment.shown.state.nodes.get(selected(view, "node"))
        if height < LARGE or node is None or not node.id:
            return []
        rows = [Row(f"text of node {node.id}: ", "dim").add(self._figures(view, node), "ink").done(width)]
        text = wrapped(clean(view.texts.decode(node.ids[:WHOLE_TOKENS])), "ink", width)
        most = height // 3
        if len(text) > most:
            text = [*text[: most - 1], Row(glyphs().dots, "dim").done(width)]
        return [*rows, *text]

    def _figures(self, view: View, node: NodeView) -> str:
        return f"{count(len(node.ids), 'token')}, {count(view.moment.shown.saved_by(node), 'prompt token')} saved"

    def _below(self, view: View, width: int, height: int) -> list[Runs]:
        """Returns the rows about the next evictions, below the tree."""
        state, nodes = view.moment.shown.state, view.moment.tree.evicted_next(view.moment.shown, view.texts.decode)
        rows: list[Runs] = []
        self.below = []
        if nodes and height >= TALL:
            head = Row(f"evicted next · {free_words(state)}", "dim")
            rows = [head.done(width), *(self._line(view, node, width, False, False) for node in nodes)]
            self.below = [0, *(node.node for node in nodes)]
        elif nodes:
            roomy = width >= 64 and not any(node.name for node in nodes)
            in_a_row = min(2 if not roomy and height >= 10 else 4, len(nodes))
            rows = [self._next(nodes[i : i + in_a_row], in_a_row, width) for i in range(0, len(nodes), in_a_row)]
            if height > LOW and not is_under_pressure(state):
                texts = f"next eviction: {free_words(state)}", f"eviction {free_words(state, brief=True)}"
                rows.append(Row(fitting(width, *texts), "dim").done(width))
        if view.history.loaded and height > 4 and is_under_pressure(state):
            lead = "few free blocks · next: " if width >= 60 else "next: "
            order = view.moment.tree.eviction(view.moment.shown)
            most, free = max(1, width // 5), state.counts[FREE]  # the whole text only if it names an evicted block
            sizes = [*((n, False) for n in range(most, free, -1)), *((n, True) for n in range(most, 0, -1))]
            for n, brief in sizes:  # the longest text that fits
                words = pressure_words(state, order, n, brief)
                if len(lead) + len(words) <= width:
                    break
            lead = fitting(width - len(words), lead, "next: ")
            rows.append(Row(lead, "waiting").add(words, "ink").done(width))
        return rows

    def _next(self, nodes: list[TreeRow], in_a_row: int, width: int) -> Runs:
        """Returns one row with the beginnings of the texts of these nodes, in the order of eviction."""
        row = Row("evicted next " if width >= 56 else "next ", "dim")
        if nodes[0].rank > 1:
            row = Row().to(row.width)
        each = (width - row.width) // in_a_row
        if any(node.name and len(f"{node.rank} node {node.node}  ") > each for node in nodes):
            return self._numbers(nodes, width)
        for node in nodes:
            role = f"{node.role} " if node.role and each >= 16 else ""
            text = clean(node.text).lstrip(glyphs().dots)
            if node.name:
                text = f"{count(node.tokens, 'token')} · {node.name}" if each >= 40 else node.name
                text = text if len(text) <= each - 3 else f"node {node.node}"
            row.add(f"{node.rank} ", "hit").add(role, ROLE_STYLES.get(node.role, "dim"))
            row.add(fit(text, each - 3 - len(role), glyphs().dots) + " ", "dim")
        return row.done(width)

    def _numbers(self, nodes: list[TreeRow], width: int) -> Runs:
        """Returns one row with the numbers of these nodes, which have no texts."""
        told = [(f"{node.rank} ", f"node {node.node}") for node in nodes]
        row = Row("evicted next ", "dim")
        if row.width + sum(len(rank + name) + 2 for rank, name in told) > width + 2:
            row = Row("next nodes ", "dim")
            told = [("", f"{node.node}," if node is not nodes[-1] else f"{node.node}") for node in nodes]
        for i, (rank, name) in enumerate(told):
            row.add(" " * (1 + bool(rank)) if i else "").add(rank, "hit").add(name, "dim")
        return row.done(width)

    def _foot(self, view: View, hidden: int, evictable: int, width: int) -> Runs:
        row = Row()
        if hidden:
            row.add(f"+{count(hidden, 'node')}", "ink").add(" · ", "dim")
        words, saved, when = f"{count(evictable, 'token')} evictable", view.moment.reused.saved, view.moment.since_begin
        lately = view.moment.reused_lately.saved
        minute = f", {lately:,} in the last minute" if view.moment.knows_the_last_minute else ""
        resumed = f" · {view.moment.reused.resumed:,} again after preemptions"
        texts = [
            (words + " · ", f"{count(saved, 'prompt token')} saved {when}" + resumed),
            ("", f"{saved:,} saved {when}" + resumed),
        ] if view.moment.reused.resumed else []
        texts += [
            (words + " in total · ", f"{count(saved, 'prompt token')} saved {when}{minute}"),
            (words + " · ", f"{count(saved, 'prompt token')} saved {when}"),
            (words + " · ", f"{saved:,} saved {when}"),
            ("", f"{count(saved, 'prompt token')} saved {when}"),
            ("", f"{saved:,} saved {when}"),
        ]  # the first that fits
        evicted, taken = next((text for text in texts if row.width + sum(map(len, text)) <= width), texts[-1])
        return row.add(evicted, "dim").add(taken, "hit").done(width)

    # ---- clicks and keys

    def pointed(self, view: View, column: int, row: int) -> Thing | None:
        index, below = self.top + row - 1, row - self.bottom
        if self.icicle is not None and below < 0:
            bar = self.icicle.at(column, row)
            return None if bar is None or bar.kind == "evicted" else (bar.kind, bar.id)
        if 0 <= below < len(self.below) and self.below[below]:
            return "node", self.below[below]
        return ("node", self.nodes[index]) if below < 0 < row and index < len(self.nodes) else None

    def action_move(self, by: int) -> None:
        if self.nodes:
            self.view.select("node", neighbour(self.nodes, selected(self.view, "node"), by))

    def action_parent(self) -> None:
        node = self.view.moment.shown.state.nodes.get(selected(self.view, "node"))
        if node is not None and node.parent > 0:
            self.view.select("node", node.parent)

    def action_fold(self) -> None:
        chosen = selected(self.view, "node")
        if chosen is not None:
            self.view.moment.tree.folded.symmetric_difference_update({chosen})

    def action_everything(self) -> None:
        self.everything = not self.everything

    def action_bars(self) -> None:
        self.bars = not self.bars

    def action_open(self) -> None:
        chosen = selected(self.view, "node")
        if chosen is not None:
            self.post_message(Opened("node", chosen))
