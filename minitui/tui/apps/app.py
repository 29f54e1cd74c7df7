"""The application: its screens, start, end, frames, and the engine's health. app_base.py has the shared state."""

from __future__ import annotations

import contextlib
import sys
import time
from functools import partial
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.css.query import NoMatches
from textual.screen import ModalScreen

from engine.errors import EngineError
from minitui.chat.conversation import Session
from minitui.chat.describe import replay_note
from minitui.chat.sessions import Chats
from minitui.settings import Settings
from minitui.sources.base import Source
from minitui.tui.actions import ACTIONS, wrong_keys
from minitui.tui.apps.app_base import AppBase
from minitui.tui.apps.audience import Audience, Ballot, JoinScreen
from minitui.tui.apps.heap import fix_thresholds
from minitui.tui.commands import Commands
from minitui.tui.screens.chat import ChatScreen
from minitui.tui.screens.inspect import InspectScreen
from minitui.tui.screens.lecture import LectureScreen
from minitui.tui.terminal.guard import TerminalGuard
from minitui.tui.widgets.chat.prompt import Prompt
from minitui.viewmodel.updater import AFTER_KEY_S
from minitui.web.mirror_driver import FromPage

QUIT_WITHIN_S = 2.0  # longest time between the two presses of ctrl+c that quit


class MinituiApp(AppBase):
    """The application for one source. `guard` restores the terminal at the end; None if there is no terminal."""

    MODES: ClassVar[dict[str, Any]] = {"chat": ChatScreen, "inspect": InspectScreen, "lecture": LectureScreen}
    COMMAND_TABLE: ClassVar[type[Commands]] = Commands
    DEFAULT_MODE = "chat"
    CSS = """
    Screen { background: $ground; color: $ink; }
    ModalScreen { background: $ground 40%; }
    ToastRack { align: right bottom; margin: 0; }  /* over the hints, not the panels */
    ReplayScreen, ReplayLecture, ExerciseScreen { & ToastRack { margin-bottom: 1; } }  /* above the last bar */
    Toast { background: $empty-chip; width: auto; max-width: 100%; padding: 0 1; margin: 0; }
    Tooltip { background: $ground; max-width: 100%; padding: 0 1; border: round $frame; offset-x: 2; }
    .-ascii Prompt, .-ascii ModalScreen > Vertical { border: ascii $accent; }
    .-ascii Toast, .-ascii Tooltip { border: none; }
    .-ascii Transcript:focus { border-left: ascii $accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *AppBase.BINDINGS,  # beside the actions: else Textual replaces a key of the base class
        *(Binding(a.key, f"do('{a.id}')", a.title, id=a.id, tooltip=a.help, show=False) for a in ACTIONS if a.key),
        Binding("escape", "escape", "Back", id="escape", tooltip="Cancel the answer of this chat", show=False),
        Binding("J", "join", "Join", id="join", show=False, tooltip="The address for the phones, with a QR code"),
        Binding("m", "bookmark", "Bookmark", id="bookmark", show=False,
                tooltip="Store a text for this step in the recording; a replay shows it at this step"),
        Binding("ctrl+z", "suspend_process", "Suspend", id="suspend", show=False, priority=True,
                tooltip="Return to the shell; fg continues"),
        Binding("ctrl+c", "interrupt", "Copy or quit", id="interrupt", show=False, priority=True,
                tooltip="Copy the selected text; if none is selected, press twice to quit"),
    ]

    def __init__(
        self,
        source: Source,
        chats: Chats,
        settings: Settings,
        *,
        guard: TerminalGuard | None = None,
        **shown: Any,
    ) -> None:
        """`shown`: the keyword arguments of AppBase."""
        super().__init__(source, chats, settings, **shown)
        self.commands = self.COMMAND_TABLE(self)
        self.audience = Audience(self)
        self._guard = guard
        self._last_pace = 1.0
        self._last_seen = (-1, -1)  # the number of the last record, and the version of the view
        self._interrupted = 0.0  # time of the last ctrl+c
        self._frames = 0
        self._hang_reported = False
        self._names: dict[str, str] = {}
        chats.on_end, chats.begins_in_cache = self._answered, lambda ids: self.view.history.begins_in_cache(ids)
        chats.saver.on_unsaved = partial(self.say, error=True)
        source.on_death(self._engine_ended)

    # ---- start and end

    def on_mount(self) -> None:
        sys.setswitchinterval(0.001)  # so that the thread that reads from the engine does not delay the event loop
        fix_thresholds()
        self.set_interval(1 / self.settings.fps, self._frame)
        # Draw the first frame before the engine starts: its process competes for the same cores.
        self.call_after_refresh(self.run_worker, self._start, group="start")
        for sentence in wrong_keys(self.settings.keys):
            self.say(sentence, error=True)
        if self._guard:
            self._guard.attach(self)

    async def on_unmount(self) -> None:
        self.chats.cancel_all()
        with contextlib.suppress(EngineError):
            await self.source.close()
        if self.chats.store:
            self.chats.store.close()

    def _handle_exception(self, error: Exception) -> None:
        """Handle an unexpected exception. With a guard, do not print it: the command line reports and logs it."""
        super()._handle_exception(error)
        if self._guard:
            self._exit_renderables.clear()

    @property
    def crash(self) -> Exception | None:
        """The unexpected exception that ended the application."""
        return self._exception

    # ---- frames

    def _frame(self) -> None:
        """Drain the records, fold them, and paint the visible screen; just after a key press, do this later."""
        self._check_engine()
        if self.feed.key_waits("fold") and not self.is_headless:
            self.set_timer(AFTER_KEY_S, self._frame)
            return
        if self.feed.pump():
            self.run_worker(self.feed.sync(), group="sync", exclusive=True)
        self.feed.keep_up()
        self.audience.refresh()
        names = self.group_names()
        if names != self._names:
            self._names = self.view.texts.group_names = names
            self.source.name_groups(names)
        if self.pace != self._last_pace:
            self._last_pace = self.pace
            for session in self.chats.sessions:
                session.forget_rate()
        seen = (self.view.history.live.state.seq, self.view.version)
        if seen != self._last_seen or self.progress is not None or any(s.busy for s in self.chats.sessions):
            self._last_seen = seen
            self.frame_limiter.wake()
        if self.is_headless:
            self.draw()
        elif self.frame_limiter.draws():
            self.call_later(self.draw_frame)  # a key that has arrived by now is handled first

    def draw(self) -> None:
        super().draw()
        self.view.home = self.session.id if self.current_mode == "chat" else None
        self.view.frame(time.monotonic())
        self._frames += 1
        for depth, screen in enumerate(reversed(self.screen_stack)):
            if hasattr(screen, "paint"):
                if depth and self._frames % self.settings.fps:  # a screen below a dialog is painted once a second
                    break
                with contextlib.suppress(NoMatches):  # the screen is being removed
                    screen.paint(self.view)
                break

    def submit(self, text: str) -> None:
        """Run a text from the prompt: a slash command, or a question for the current chat."""
        if not text.startswith("/"):
            self.ask_question(text)
        elif not self.commands.run_slash(text):
            self.focus_prompt(text)

    def on_prompt_sent(self, message: Prompt.Sent) -> None:
        self.submit(message.text)

    # ---- the engine's health

    def _check_engine(self) -> None:
        """Show a dialog when the engine's process stops answering, and close it when the process answers again."""
        hung = self.condition.hung
        if hung and not self._hang_reported:
            self._hang_reported = True
            self._show_engine_down("The engine does not answer", hung, hang=True)
        elif self._hang_reported and not hung:
            self._hang_reported = False
            self._close_hang()
            if self.progress is None and self.source.error is None:
                self.say("the engine answers again")

    def _engine_ended(self, error: str) -> None:
        self.call_later(self._show_engine_down, "The engine has ended", error)

    def _answered(self, session: Session) -> None:
        """Called when a chat's answer ends. If the chat is a replay, set its note to the cache hit."""
        metrics = session.messages[-1].metrics
        if session.id in self.replays and metrics:
            self.replays.remove(session.id)
            session.note = replay_note(metrics, self.source.info.block_size or None, session.primed)

    # ---- actions of the bindings

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Allow to cancel an answer only where there are chats, to join only where phones can, and to bookmark only
        what is recorded."""
        allowed = {"escape": self.has_chats, "join": bool(self.audience.link), "bookmark": self.can_bookmark}
        return allowed[action] if action in allowed else super().check_action(action, parameters)

    @property
    def can_bookmark(self) -> bool:
        return self.source.recording_file is not None

    def action_bookmark(self) -> None:
        self.ask_text("Bookmark this step as", "", self._bookmark)

    def _bookmark(self, text: str) -> None:
        try:
            step = self.source.add_note(text.strip() or "bookmark")
            self.say(f"step {step:,} is bookmarked")
        except EngineError as error:
            self.say(str(error), error=True)

    # ---- the phones of a class

    @property
    def told(self) -> str:
        ballot = self.shown_ballot
        return f"{self.story}\n{ballot.told()}" if ballot is not None and ballot.phones else self.story

    @property
    def shown_ballot(self) -> Ballot | None:
        """The question whose counts are shown."""
        return self.audience.open

    def action_join(self) -> None:
        self.push_screen(JoinScreen(self.audience.link))

    def on_from_page(self, message: FromPage) -> None:
        """Handle a message of the process that serves the pages."""
        match message.payload:
            case {"type": "link", "link": str(link)}:
                self.audience.link = link
            case {"type": "counts", "number": int(number), "counts": list(counts), "phones": int(phones)}:
                self.audience.counted(number, counts, phones)
            case {"type": "class", "verb": str(verb), "number": int(number)}:
                self.lecturer_says(verb, number)

    def lecturer_says(self, verb: str, number: int) -> None:
        """Do what the lecturer's page says; an application without scenes can only show the answer of a question."""
        if verb == "next" and self.poll is not None:
            self._asks().reveal()

    def action_do(self, action: str) -> None:
        """Run one of ACTIONS. In a dialog do nothing: the first of two quick presses may have opened it."""
        if not isinstance(self.screen, ModalScreen):
            self.commands.run(action)

    def action_escape(self) -> None:
        if self.chats.cancel(self.session):
            self.say("the answer is cancelled")

    def action_interrupt(self) -> None:
        """Copy the selection. Without a selection, quit at the second press."""
        selected = self.screen.get_selected_text()
        if selected:
            self.copy_to_clipboard(selected)
            self.say("the selection is copied")
            return
        if time.monotonic() - self._interrupted < QUIT_WITHIN_S:
            self.exit()
        self._interrupted = time.monotonic()
        self.say("ctrl+c again quits (esc cancels an answer)")
