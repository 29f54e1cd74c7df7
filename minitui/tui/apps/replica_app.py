"""The application for several servers: a table of the servers, and chats that any server can answer."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, ClassVar

from textual import getters
from textual.app import ComposeResult

from engine.errors import EngineError
from minitui.chat.conversation import Session
from minitui.chat.model_choice import load_codec
from minitui.sources.remote import RemoteSource
from minitui.sources.replica import Replica
from minitui.sources.replicas import ReplicaSource
from minitui.sources.routing import Opening
from minitui.tui.apps.app import MinituiApp
from minitui.tui.apps.openai_app import ForeignChatScreen, need_records
from minitui.tui.commands import Commands
from minitui.tui.screens.base import BaseScreen, Hint
from minitui.tui.screens.chat import ChatScreen
from minitui.tui.widgets.bars import StatusBar, TopBar
from minitui.tui.widgets.chat.session_tabs import SessionTabs
from minitui.tui.widgets.servers.replicas import Replicas


class ReplicaScreen(BaseScreen[None]):
    """Arranges the widgets; the replicas are in the application's source."""

    DEFAULT_CSS = "ReplicaScreen { layout: vertical; background: $ground; & Replicas { height: 1fr; } }"
    table = getters.query_one(Replicas)

    def compose(self) -> ComposeResult:
        yield TopBar()
        yield SessionTabs()
        yield Replicas(id="table")
        yield StatusBar()

    def on_mount(self) -> None:
        self.table.focus()

    def hints(self) -> list[Hint]:
        table = [("up, down", "choose"), ("enter", "show its panels"), ("P", "pin"), ("U", "unpin")]
        return table + [h for h in super().hints() if h[1] in ("write", "new", "chats", "help", "commands")]


CHECK_EVERY_S = 0.5
TAB = ("replicas", "4 Replicas")
NO_RECORDS = "only minitui servers report what their engines do; these servers do not"
HEADLINE = "Several chats, several servers."
REPLICAS_KEY = ("4", "the servers, and the server of each chat")


class ReplicaChatScreen(ChatScreen):
    """The chats of several servers."""

    HEADLINE = HEADLINE
    LEAD = "Ask something: one server answers, and the panels show what it does."
    WELCOME_KEYS = (*ChatScreen.WELCOME_KEYS, REPLICAS_KEY)


class ForeignReplicaChatScreen(ForeignChatScreen):
    """The chats of several servers that do not report what their engines do."""

    HEADLINE = HEADLINE
    WELCOME_KEYS = (*ForeignChatScreen.WELCOME_KEYS, REPLICAS_KEY)


class ReplicaCommands(Commands):
    """The commands, with those about replicas."""

    app: ReplicaApp

    def do_pin(self, which: str) -> None:
        """Let only the replica `which` (number or address) answer the current chat. If `which` is empty, pin the chat
        to the replica chosen in the table. On other screens, the user chooses one of the replicas from a list."""
        screen = self.app.screen
        if which:
            replica = self.app.replicas.find(which)
        elif isinstance(screen, ReplicaScreen):
            replica = screen.table.chosen
        else:
            reason = self.app.replicas.reason_against
            rows = [(f"{r.number} {r.name}", reason(r) or r.model) for r in self.app.replicas.replicas]
            self.app.choose("Pin this chat to", rows, lambda row: self.run("pin", row.split()[0]))
            return
        self.app.replicas.pins[self.app.session.id] = replica.url
        trouble = self.app.replicas.reason_against(replica)
        self.app.say(
            f"chat {self.app.chats.number(self.app.session)} is pinned to {replica.title}"
            + (f", which cannot answer now: {trouble}" if trouble else ""),
            error=bool(trouble),
        )

    def do_unpin(self, _: str) -> None:
        number = self.app.chats.number(self.app.session)
        if self.app.replicas.pins.pop(self.app.session.id, None) is None:
            self.app.say(f"chat {number} is not pinned")
        else:
            self.app.say(f"every replica may answer chat {number}")


class ReplicaApp(MinituiApp):
    """The panels show one replica at a time: the replica of the current chat, or the replica chosen in the table. A
    line under the top bar gives the numbers of the replica in the panels and of the current chat's replica."""

    COMMAND_TABLE = ReplicaCommands
    NOT_OFFERED: ClassVar[dict[str, str]] = {}
    TABS: ClassVar[tuple[tuple[str, str], ...]] = (*MinituiApp.TABS, TAB)
    MODES: ClassVar[dict[str, Any]] = {**MinituiApp.MODES, "chat": ReplicaChatScreen, "replicas": ReplicaScreen}

    def __init__(self, source: ReplicaSource, *args: Any, **options: Any) -> None:
        if source.codec is not None:
            options["load_codec"] = lambda info: source.codec
        super().__init__(source, *args, **options)
        self.replicas = source
        source.opening = self._opening
        self._followed: RemoteSource | None = None  # the source of the records in the panels
        self._held = False  # the panels keep their replica when the user changes to another chat
        self._reasons: dict[int, str] = {}  # replica number -> reason against it at the last check; "": none
        self._switching = asyncio.Lock()  # held while the panels change to another replica

    def on_mount(self) -> None:
        self.set_interval(CHECK_EVERY_S, self._check_replicas)  # Textual calls the parent's handler too

    def _opening(self, group: str) -> Opening:
        session = next((s for s in self.chats.sessions if s.id == group), None)
        return session.opening if session is not None else Opening(group)

    def _elsewhere(self, session: Session) -> bool:
        """Returns True if a replica that the panels do not show is writing this chat's answer."""
        writer = self.replicas.writer(session.id)
        return writer is not None and writer is not self.replicas.shown

    def queue_place(self, session: Session) -> int | None:
        """As in AppBase; None (unknown) if the chat's replica is not in the panels."""
        return None if self._elsewhere(session) else super().queue_place(session)

    def pace_of(self, session: Session) -> float:
        """As in AppBase; 1.0 (real time) is assumed if the chat's replica is not in the panels."""
        return 1.0 if self._elsewhere(session) else self.pace

    # ---- called by screens and commands

    def on_replicas_chosen(self, message: Replicas.Chosen) -> None:
        """Keep this replica in the panels. If it is kept there already, the panels follow the current chat again."""
        self._held = not (self._held and message.replica is self.replicas.shown)
        if self._held:
            self.run_worker(self.follow(message.replica), group="follow", exclusive=False)
        else:
            self.say("the panels follow the current chat")

    async def follow(self, replica: Replica) -> None:
        """Show this replica in the panels."""
        async with self._switching:
            try:
                await self.replicas.watch(replica)
                self._followed = replica.telemetry
                if self._followed is not None:
                    codec = await asyncio.to_thread(load_codec, self._followed.info)
                    self.view.texts.ids_to_text = partial(codec.decode, skip_special_tokens=False)
                self.feed.replaced()
                await self.feed.sync()
            except EngineError as error:
                self.say(str(error), error=True)

    # ---- checks of the replicas

    async def _start(self, again: bool = False) -> None:
        await super()._start(again)
        self._followed = self.replicas.shown.telemetry if self.replicas.shown is not None else None
        if self.replicas.codec is not None and self.replicas.shown is not None:
            # Loads the engine's codec: the chats' codec cannot decode the engine's token ids.
            await self.follow(self.replicas.shown)

    async def _check_replicas(self) -> None:
        """Report replicas that went down or came back, and choose the replica for the panels. The panels show the
        replica of the current chat, unless the user keeps another replica in them. The panels start again when a new
        server runs at their replica's address."""
        for replica in self.replicas.replicas:
            reason, before = self.replicas.reason_against(replica), self._reasons.get(replica.number)
            if self.replicas.info and before is not None and bool(reason) != bool(before):
                self.say(f"{replica.title}: {reason or 'it can answer again'}", error=bool(reason))
            if self.replicas.info:
                self._reasons[replica.number] = reason
        if self.progress is not None or self._switching.locked():
            return
        reporting = [r for r in self.replicas.replicas if r.telemetry is not None and not r.trouble]
        current = None if self._held else self.replicas.current(self.session.id)
        wanted = current if current in reporting else self.replicas.shown or next(iter(reporting), None)
        if wanted is None or wanted not in reporting:
            return
        telemetry = wanted.telemetry
        if telemetry is None or wanted is not self.replicas.shown or telemetry is not self._followed:
            await self.follow(wanted)
        elif not self.feed.live and not telemetry.connection:
            await self.feed.sync()

    def _frame(self) -> None:
        self.story = "" if self.current_mode == "replicas" else self._summary()
        super()._frame()

    def _summary(self) -> str:
        source = self.replicas
        if not source.info:
            return ""
        parts = [f"{len(source.usable)} of {len(source.replicas)} replicas can answer"]
        if source.shown is not None:
            parts.append(f"panels: {source.shown.number}{', held' if self._held else ''}")
        number, why = source.route(self.session.id)
        no_replica = "no replica can answer this chat (press 4)"
        parts.append(f"this chat: {number}, {why}" if number is not None else no_replica)
        return "   ".join(parts)


class ForeignReplicaApp(ReplicaApp):
    """The application for servers that do not report what their engines do: it has no inspect or lecture screen."""

    NOT_OFFERED = need_records(NO_RECORDS)
    TABS: ClassVar[tuple[tuple[str, str], ...]] = (MinituiApp.TABS[0], TAB)
    MODES: ClassVar[dict[str, Any]] = {"chat": ForeignReplicaChatScreen, "replicas": ReplicaScreen}
