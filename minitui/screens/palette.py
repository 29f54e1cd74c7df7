"""The command palette (`:`): every action of the table, and every chat by its title."""

from __future__ import annotations

from functools import partial

from textual.command import DiscoveryHit, Hit, Hits, Provider

from minitui.actions import ACTIONS, key_label
from minitui.widgets.chrome import host


class ActionProvider(Provider):
    """Searches actions and chats."""

    def _commands(self) -> list[tuple[str, str, partial[None]]]:
        app = host(self.app)
        commands = []
        for a in ACTIONS:
            if a.id in ("palette", "slash"):
                continue
            keys = f"  [{key_label(a.key)}]" if a.key else f"  [/{a.slash}]"
            commands.append((a.title + keys, a.help, partial(app.commands.run, a.id)))
        for session in app.chats.sessions:
            title = f"Chat {app.chats.number(session)}: {session.title}"
            commands.append((title, "Show this chat.", partial(app.select_session, session)))
        return commands

    async def discover(self) -> Hits:
        for title, help, command in self._commands():
            yield DiscoveryHit(title, command, help=help)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for title, help, command in self._commands():
            if (score := max(matcher.match(title), matcher.match(help) * 0.5)) > 0:
                yield Hit(score, matcher.highlight(title), command, help=help)
