"""The application over several servers: their table, and chats that go to one of them or to any."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, ClassVar

from engine.errors import EngineDead, EngineError
from minitui.chat.conversation import Session
from minitui.chat.model_choice import load_codec
from minitui.sources.remote import RemoteSource
from minitui.sources.replicas import Opening, Replica, ReplicaSource, opening_of
from minitui.sources.server_metrics import Pulse
from minitui.tui.app import MinituiApp
from minitui.tui.openai_app import ForeignChatScreen
from minitui.tui.screens.chat import ChatScreen
from minitui.tui.screens.replicas import ReplicaScreen
from minitui.tui.widgets.chrome import SCREENS
from minitui.tui.widgets.replicas import Replicas

EVERY_S = 0.5
TAB = ("replicas", "4 Replicas")
HEADLINE = "Several chats, several servers."
HINT = ("4", "the servers, and where each chat goes")


class ReplicaChatScreen(ChatScreen):
    """One of several answers."""

    HEADLINE = HEADLINE
    LEAD = "Ask something: one of them answers, and the panels show what it does."
    HINTS: ClassVar[tuple[tuple[str, str], ...]] = (*ChatScreen.HINTS[:-1], HINT, ChatScreen.HINTS[-1])


class BlindChatScreen(ForeignChatScreen):
    """One of several answers, and none tells what its engine does."""

    HEADLINE = HEADLINE
    HINTS: ClassVar[tuple[tuple[str, str], ...]] = (
        *ForeignChatScreen.HINTS[:-1], HINT, ForeignChatScreen.HINTS[-1],
    )  # fmt: skip


class ReplicaApp(MinituiApp):
    """The panels show one replica at a time, that of the chat that is shown or the one that they are held to: a line
    under the top bar says which, and where this chat goes."""

    FEATURES: ClassVar[frozenset[str]] = frozenset({"replicas"})
    TABS: ClassVar[tuple[tuple[str, str], ...]] = (*SCREENS, TAB)
    MODES: ClassVar[dict[str, Any]] = {**MinituiApp.MODES, "chat": ReplicaChatScreen, "replicas": ReplicaScreen}

    def __init__(self, source: ReplicaSource, *args: Any, **options: Any) -> None:
        if source.codec is not None:
            options["load_codec"] = lambda info: source.codec
        super().__init__(source, *args, **options)
        self.replicas = source
        source.opening = self._opening
        self._followed: RemoteSource | None = None  # whose records the panels hold
        self._held = False  # the panels stay with the replica that they show
        self._states: dict[int, str] = {}
        self._turning = asyncio.Lock()

    def on_mount(self) -> None:
        self.set_interval(EVERY_S, self._look)  # Textual calls the parent's handler, too

    def _opening(self, group: str) -> Opening:
        session = next((s for s in self.chats.sessions if s.id == group), None)
        return opening_of(session) if session is not None else Opening(group)

    def whither(self, session: Session) -> tuple[str, str]:
        """The replica that the next question of a chat goes to, and why; "nobody" if none can answer."""
        try:
            replica = self.replicas.place(session.id)
        except EngineDead as error:
            return "nobody", str(error)
        if session.id in self.replicas.pins:
            return str(replica.number), "pinned"
        if self._opening(session.id).last == replica.url:
            return str(replica.number), "which wrote the last answer"
        return str(replica.number), "by its prefix"

    def concerned(self) -> Replica | None:
        """The replica of the chat that is shown: it writes its answer, wrote the last one, or would write the next."""
        session, source = self.session, self.replicas
        writing = getattr(session._stream, "replica", None)
        if writing is not None or not source.info:
            return writing
        url = source.pins.get(session.id, "") or opening_of(session).last
        known = next((replica for replica in source.replicas if replica.url == url), None)
        if known is not None and not source.reason_against(known):
            return known
        try:
            return source.place(session.id)
        except EngineDead:
            return known

    def _elsewhere(self, session: Session) -> bool:
        """Is its answer being written by a replica that the panels do not show?"""
        return session._stream is not None and getattr(session._stream, "replica", None) is not self.replicas.shown

    def queue_place(self, session: Session) -> int | None:
        """Known of the replica that is shown."""
        return None if self._elsewhere(session) else super().queue_place(session)

    def pace_of(self, session: Session) -> float:
        """Others than the one that is shown are taken to run in real time."""
        return 1.0 if self._elsewhere(session) else self.pace

    # ---- what commands ask for

    def pin(self, which: str) -> None:
        """Hold the chat that is shown to a replica: number or address, or nothing for the chosen one of the table."""
        screen = self.screen
        if not which and isinstance(screen, ReplicaScreen):
            replica = screen.table.chosen
        else:
            replica = self.replicas.find(which)
        self.replicas.pins[self.session.id] = replica.url
        against = self.replicas.reason_against(replica)
        self.say(
            f"chat {self.chats.number(self.session)} is pinned to {replica.title}"
            + (f", which cannot answer now: {against}" if against else ""),
            error=bool(against),
        )

    def unpin(self) -> None:
        """Any replica may answer the chat that is shown."""
        number = self.chats.number(self.session)
        if self.replicas.pins.pop(self.session.id, None) is None:
            self.say(f"chat {number} is not pinned")
        else:
            self.say(f"any replica may answer chat {number}")

    def on_replicas_chosen(self, message: Replicas.Chosen) -> None:
        """Hold the panels to this replica; they follow the chat again if they were held to it already."""
        self._held = not (self._held and message.replica is self.replicas.shown)
        if self._held:
            self.run_worker(self.follow(message.replica), group="follow", exclusive=False)
        else:
            self.say("the panels show the replica of the chat that is shown")

    async def follow(self, replica: Replica) -> None:
        """Show this replica in the panels."""
        async with self._turning:
            try:
                await self.replicas.watch(replica)
                self._followed = replica.telemetry
                if self._followed is not None:
                    codec = await asyncio.to_thread(load_codec, self._followed.info)
                    self.view.ids_to_text = partial(codec.decode, skip_special_tokens=False)
                self.feed.replaced()
                await self.feed.sync()
            except EngineError as error:
                self.say(str(error), error=True)

    # ---- what goes on

    async def _start(self, again: bool = False) -> None:
        await super()._start(again)
        self._followed = self._shown_telemetry
        if self.replicas.codec is not None and self.replicas.shown is not None:
            await self.follow(self.replicas.shown)  # the chats' codec spells no tokens

    @property
    def _shown_telemetry(self) -> RemoteSource | None:
        return self.replicas.shown.telemetry if self.replicas.shown is not None else None

    async def _look(self) -> None:
        """Tell of comings and goings; follow the replica of the chat that is shown, if it tells and the panels are not
        held, and that which is shown when it has become another server."""
        for replica in self.replicas.replicas:
            now, before = self.replicas.reason_against(replica), self._states.get(replica.number)
            if self.replicas.info and before is not None and bool(now) != bool(before):
                self.say(f"{replica.title}: {now or 'it can answer again'}", error=bool(now))
            if self.replicas.info:
                self._states[replica.number] = now
        if self.progress is not None or self._turning.locked():
            return
        telling = [r for r in self.replicas.replicas if r.telemetry is not None and not r.trouble]
        concerned = None if self._held else self.concerned()
        wanted = concerned if concerned in telling else self.replicas.shown or next(iter(telling), None)
        if wanted is None or wanted not in telling:
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
        to, why = self.whither(self.session)
        parts.append(f"this chat: {to}, {why}" if to != "nobody" else "nobody can answer this chat (4)")
        return "   ".join(parts)


class BlindReplicaApp(ReplicaApp):
    """Over servers none of which tells what its engine does: there is nothing to inspect."""

    TABS: ClassVar[tuple[tuple[str, str], ...]] = (SCREENS[0], TAB)
    MODES: ClassVar[dict[str, Any]] = {**ReplicaApp.MODES, "chat": BlindChatScreen}

    def beside(self) -> tuple[str, Pulse | None]:
        """See ServerVitals."""
        replica = self.concerned()
        return (f"{replica.number} {replica.url}", replica.pulse) if replica is not None else ("no replica", None)

    def switch_mode(self, mode: str) -> Any:
        """The chats and the table."""
        if mode not in ("chat", "replicas"):
            self.say("these servers do not tell what their engines do: only a minitui server does", error=True)
            mode = "chat"
        return super().switch_mode(mode)
