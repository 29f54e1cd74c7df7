"""Radix tree: what is shared, by whom, and what goes next?

A line for each node: who speaks, the text from where it diverges from its siblings, its tokens, the requests that use
it, the prompt tokens it saved, and its place in the order of eviction. What saves most stands first.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding

from minitui.tui.theme import glyphs
from minitui.tui.widgets.base import LinePanel, Opened, Picture, paragraphs
from minitui.tui.widgets.rows import Row, Run, Runs, clean, fit, ordinal, short
from minitui.viewmodel.model import View
from minitui.viewmodel.tree import TreeRow

ROLE_STYLES = {"sys": "pool", "usr": "hit", "ast": "decode"}
COLUMNS = (("tokens", 7), ("users", 6), ("saved", 7), ("out", 7))


def _last_children(rows: Sequence[TreeRow]) -> list[bool]:
    """Of each row: does no sibling of its follow?"""
    last, depths = [False] * len(rows), set[int]()  # the depths at which a sibling follows
    for i in range(len(rows) - 1, -1, -1):
        depth = rows[i].depth
        last[i] = depth not in depths
        depths = {d for d in depths if d < depth} | {depth}
    return last


class RadixTree(LinePanel):
    """Up and down move, f folds, e shows every node, / searches, Enter tells a node's story."""

    TITLE = "Radix tree"
    help_text = paragraphs("""\
The prefix cache. Each node is a run of tokens whose keys and values are in the pool; a path from the top is a text. A
new prompt follows the tree as far as it agrees, takes over those blocks, and computes only the rest. Users are the
requests that hold a node now; saved is what was not computed because of it. Nodes without users can be evicted: out
says in which order, the least recently used leaf first.""")
    BINDINGS: ClassVar = [
        Binding("up", "move(-1)", "node above", show=False, id="tree.up"),
        Binding("down", "move(1)", "node below", show=False, id="tree.down"),
        Binding("pageup", "move(-10)", "ten nodes up", show=False, id="tree.pageup"),
        Binding("pagedown", "move(10)", "ten nodes down", show=False, id="tree.pagedown"),
        Binding("left", "parent", "parent", show=False, id="tree.parent"),
        Binding("f", "fold", "fold", show=False, id="tree.fold", tooltip="hide or show what is below this node"),
        Binding("e", "everything", "all nodes", show=False, id="tree.everything"),
        Binding("slash", "search", "search", show=False, id="tree.search", tooltip="nodes whose text has these words"),
        Binding("enter", "open", "tell its story", show=False, id="tree.open"),
    ]

    def __init__(self, *, id: str | None = None, frame: str | None = None) -> None:
        super().__init__(id=id, frame=frame)
        self.everything = False
        self.search = ""
        self.typing = False
        self.top = 0
        self.nodes: list[int] = []  # of the rows, top to bottom

    def picture(self, view: View, width: int, height: int) -> Picture:
        room = max(1, height - 2)
        board = view.board
        selected = self._selected(view)
        pinned = set(view.links.nodes)
        picture = view.tree.picture(board, view.decode, room, pinned, self.search, self.everything)
        self.nodes = [row.node for row in picture.rows]
        self.top = max(0, min(self.top, len(picture.rows) - room))
        if selected in self.nodes:
            at = self.nodes.index(selected)
            if not self.top <= at < self.top + room:
                self.top = max(0, min(at - room // 2, len(picture.rows) - room))
        shown = picture.rows[self.top : self.top + room]
        rows = [self._head(width)]
        last = _last_children(picture.rows)[self.top : self.top + room]
        rows += [self._line(view, row, width, ends) for row, ends in zip(shown, last, strict=True)]
        if not picture.nodes:
            why = "no prompt has filled a block yet" if view.caching else "prefix caching is off: nothing is kept"
            rows += [Row(line, "dim").done(width) for line in textwrap.wrap(f"empty: {why}", width)[:room]]
        rows += [Row().done(width)] * (room + 1 - len(rows))
        rows.append(self._foot(picture.hidden_nodes + len(picture.rows) - len(shown), picture.evictable_tokens, width))
        g = glyphs()
        legend: list[Run] = [
            (g.in_use, "running"), (" in use  ", "dim"), (g.evictable, "hit"), (" cached, evictable  ", "dim"),
            ("out", "dim"), (" order of eviction", "dim"),
        ]  # fmt: skip
        note: list[Run] = []
        if self.typing or self.search:
            note = [("/" + self.search + ("▏" if self.typing else ""), "accent")]
        nodes = f"{picture.nodes:,} node{'' if picture.nodes == 1 else 's'}"
        title = f"Radix tree · {nodes}, {picture.tokens:,} tokens"
        return Picture(rows[:height], title=title, note=note, legend=legend)

    def _head(self, width: int) -> Runs:
        at = width - sum(w for _, w in self._columns(width))
        row = Row("who  text from where it diverges" if at > 34 else "who  text", "dim")
        for name, w in self._columns(width):
            at += w
            row.right(name, at, "dim")
        return row.done(width)

    def _columns(self, width: int) -> tuple[tuple[str, int], ...]:
        return COLUMNS if width >= 56 else COLUMNS[:2] + COLUMNS[3:] if width >= 44 else COLUMNS[:2]

    def _line(self, view: View, node: TreeRow, width: int, last: bool) -> Runs:
        g = glyphs()
        lit = node.node in view.links.nodes
        here = node.node == self._selected(view)
        glow = view.glow_of(view.board.node_changed.get(node.node, -1e9))
        ground = " on select" if lit else ""
        row = Row()
        if node.depth:
            row.add("  " * (node.depth - 1) + (g.last_branch if last else g.branch) + " ", "faint" + ground)
        if node.pending:
            row.add(g.pending, "prefill" + ground)
        else:
            row.add(g.in_use if node.users else g.evictable, ("running" if node.users else "hit") + ground)
        row.add(" ", "ink" + ground)
        row.add((node.role or "txt") + " ", ROLE_STYLES.get(node.role, "dim") + ground)
        if node.folded and node.has_children:
            row.add(g.folded + " ", "dim" + ground)
        columns = self._columns(width)
        end = width - sum(w for _, w in columns)
        style = "bold accent" if here else "bold ink" if glow == 2 else "ink" if node.users else "dim"
        row.add(fit(clean(node.text), max(0, end - row.width - 1), g.dots), style + ground)
        cells = {
            "tokens": (short(node.tokens), "ink" if glow < 2 else "bold running"),
            "users": (str(node.users) if node.users else "", "running"),
            "saved": (short(node.saved) if node.saved else "", "hit"),
            "out": (ordinal(node.rank) if node.rank else "", "dim"),
        }
        at = end
        row.to(end, " ", "ink" + ground)
        for name, w in columns:
            text, cell_style = cells[name]
            at += w
            row.to(at - len(text), " ", "ink" + ground).add(text, cell_style + ground)
        return row.done(width)

    def _foot(self, hidden: int, evictable: int, width: int) -> Runs:
        row = Row()
        if hidden:
            row.add(f"+{hidden:,} nodes", "ink").add(" · ", "dim")
        words = f"{evictable:,} tokens evictable"
        row.add(words + " in all" if row.width + len(words) + 7 <= width else words, "dim")
        return row.done(width)

    def _selected(self, view: View) -> int | None:
        if view.selection is not None and view.selection.kind == "node":
            return int(view.selection.id)
        return None

    # ---- moving about

    def clicked(self, view: View, column: int, row: int) -> None:
        index = self.top + row - 1
        if row >= 1 and index < len(self.nodes):
            view.select("node", self.nodes[index])

    def action_move(self, by: int) -> None:
        view = self.view
        if view is None or not self.nodes:
            return
        selected = self._selected(view)
        at = self.nodes.index(selected) + by if selected in self.nodes else 0
        view.select("node", self.nodes[max(0, min(len(self.nodes) - 1, at))])
        self.repaint()

    def action_parent(self) -> None:
        view = self.view
        selected = self._selected(view) if view is not None else None
        if view is None or selected not in view.board.state.nodes:
            return
        parent = view.board.state.nodes[selected].parent if selected is not None else 0
        if parent > 0:
            view.select("node", parent)
            self.repaint()

    def action_fold(self) -> None:
        view = self.view
        selected = self._selected(view) if view is not None else None
        if view is not None and selected is not None:
            view.tree.folded.symmetric_difference_update({selected})
            self.repaint()

    def action_everything(self) -> None:
        self.everything = not self.everything
        self.repaint()

    def action_search(self) -> None:
        self.typing, self.search = True, ""
        self.repaint()

    def action_open(self) -> None:
        view = self.view
        selected = self._selected(view) if view is not None else None
        if selected is not None:
            self.post_message(Opened("node", selected))

    def on_key(self, event: events.Key) -> None:
        """Letters go to the search while it is being typed."""
        if not self.typing:
            if event.key == "escape" and self.search:
                self.search = ""
                event.stop()
                event.prevent_default()
                self.repaint()
            return
        if event.key in ("enter", "escape"):
            self.typing = False
            if event.key == "escape":
                self.search = ""
        elif event.key == "backspace":
            self.search = self.search[:-1]
        elif event.is_printable and event.character:
            self.search += event.character
        else:
            return
        event.stop()
        event.prevent_default()
        self.repaint()

    def check_consume_key(self, key: str, character: str | None) -> bool:
        """While a search is typed, no binding gets a printable key."""
        return self.typing and character is not None and character.isprintable()
