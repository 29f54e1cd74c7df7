"""The application: its screens, start, end, frames, and the engine's health. app_base.py has the shared state."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ClassVar

from textual.binding import Binding, BindingType
from textual.css.query import NoMatches
from textual.screen import ModalScreen

from engine.errors import EngineError
from engine.info import EngineInfo
from minitui.chat.conversation import Session
from minitui.chat.describe import replay_note
from minitui.chat.prompt import Codec
from minitui.chat.sessions import Chats
from minitui.settings import Settings
from minitui.sources.base import Source
from minitui.tui.actions import ACTIONS
from minitui.tui.app_base import AppBase
from minitui.tui.commands import Commands
from minitui.tui.heap import fix_thresholds, set_thresholds
from minitui.tui.screens.bindings import bindings_here
from minitui.tui.screens.chat import ChatScreen
from minitui.tui.screens.dialogs import ChoiceDialog, EngineDownDialog, TextDialog
from minitui.tui.screens.help import HelpScreen, name_of_text, panel_help
from minitui.tui.screens.inspect import InspectScreen
from minitui.tui.screens.lecture import LectureScreen
from minitui.tui.terminal import TerminalGuard
from minitui.viewmodel.updater import AFTER_KEY_S

Script = Callable[["MinituiApp"], Coroutine[Any, Any, None]]
QUIT_WITHIN_S = 2.0  # longest time between the two presses of ctrl+c that quit


class MinituiApp(AppBase):
    """The application for one source. `load_codec` makes the tokenizer from the source's info; it runs in a thread.

    `script` runs after the engine's start. `guard` restores the terminal at the end; None if there is no terminal.
    """

    HELP_FIRST: ClassVar[tuple[tuple[str, str], ...]] = ()  # (title, text) pairs shown before the help of a screen
    MODES: ClassVar[dict[str, Any]] = {"chat": ChatScreen, "inspect": InspectScreen, "lecture": LectureScreen}
    DEFAULT_MODE = "chat"
    CSS = """
    Screen { background: $ground; color: $ink; }
    ModalScreen { background: $ground 40%; }
    Toast { background: $empty-chip; width: 44; }
    ToastRack { align: right bottom; margin-bottom: 4; }  /* above the prompt */
    InspectScreen ToastRack, LessonScreen ToastRack { margin: 0; }  /* over the hints, not the panels */
    ReplayScreen ToastRack { margin-bottom: 1; }  /* not over the bar of the recording */
    InspectScreen Toast, LessonScreen Toast { width: auto; max-width: 100%; padding: 0 1; margin: 0; }
    .-ascii Prompt, .-ascii ModalScreen > Vertical { border: ascii $accent; }
    .-ascii Toast { border: none; }
    .-ascii Transcript:focus { border-left: ascii $accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(a.key, f"do('{a.id}')", a.title, id=a.id, tooltip=a.help, show=False) for a in ACTIONS if a.key),
        Binding("escape", "escape", "Back", id="escape", tooltip="Cancel the answer of this chat", show=False),
        Binding("ctrl+z", "suspend_process", "Suspend", id="suspend", show=False, priority=True,
                tooltip="Return to the shell; fg continues"),
        Binding("ctrl+c", "interrupt", "Copy or quit", id="interrupt", show=False, priority=True,
                tooltip="Copy the selected text; if none is selected, press twice to quit"),
    ]  # fmt: skip

    def __init__(
        self,
        source: Source,
        chats: Chats,
        settings: Settings,
        *,
        load_codec: Callable[[EngineInfo], Codec],
        guard: TerminalGuard | None = None,
        script: Script | None = None,
        **shown: Any,
    ) -> None:
        """`shown`: the keyword arguments of AppBase."""
        super().__init__(source, chats, settings, **shown)
        self.commands = Commands(self)
        self.play_again: Callable[[], Coroutine[Any, Any, None]] | None = None  # set by a demo
        self._load_codec, self._guard, self._script = load_codec, guard, script
        self._last_pace = 1.0
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
        if self._guard:
            self._guard.attach(self)

    async def _start(self, again: bool = False) -> None:
        self.progress = {"text": self.source.missing}
        try:
            await (self.source.restart if again else self.source.start)(self._on_progress)
            codec = await asyncio.to_thread(self._load_codec, self.source.info)
        except EngineError as error:
            self.progress = None
            self.chats.cancel_all(f"The engine could not start: {error}")  # no engine will answer waiting questions
            self._show_engine_down("The engine could not start", str(error))
            return
        self.progress = None
        self.view.texts.ids_to_text = partial(codec.decode, skip_special_tokens=False)
        await self.feed.sync()
        self.chats.use(codec)  # the waiting questions are sent now: a replay looks into the cache first
        gc.collect()
        set_thresholds()
        gc.freeze()  # later collections skip the objects that exist now
        if self._script and not again:
            await self._script(self)

    def _on_progress(self, progress: dict[str, Any]) -> None:
        if self.progress is not None:  # not when a demo or a lesson replaces the engine
            self.progress = progress

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
        names = self.group_names()
        if names != self._names:
            self._names = self.view.texts.group_names = names
            self.source.name_groups(names)
        if self.pace != self._last_pace:
            self._last_pace = self.pace
            for session in self.chats.sessions:
                session.forget_rate()
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

    # ---- called by screens and commands (see AppBase)

    def run_command(self, action: str, argument: str = "") -> None:
        self.commands.run(action, argument)

    def submit(self, text: str) -> None:
        if not text.startswith("/"):
            self.ask_question(text)
        elif not self.commands.run_slash(text):
            self.focus_prompt(text)

    def focus_prompt(self, text: str | None = None) -> None:
        self.switch_mode("chat")
        screen = self.screen
        if isinstance(screen, ChatScreen) and screen.is_mounted:
            if text is not None:
                screen.prompt.put(text)
                screen.prompt.update_suggestion()
            screen.prompt.focus()

    def leave_prompt(self) -> None:
        screen = self.screen
        if isinstance(screen, ChatScreen) and screen.is_mounted and screen.prompt.has_focus:
            screen.prompt.close_list()
            screen.transcript.focus()

    def open_mode(self, mode: str) -> None:
        self.leave_prompt()  # letters are then keys when the user returns to the chats
        self.switch_mode(mode)

    def ask_text(
        self, title: str, text: str, then: Callable[[str], object], lines: bool = False, selected: bool = False
    ) -> None:
        dialog = TextDialog(title, text, lines, selected)

        def answered(answer: str | None) -> None:
            if answer is not None:
                then(answer)

        self.push_screen(dialog, answered)

    def choose(
        self, title: str, choices: list[tuple[str, str]], then: Callable[[str], None],
        searched: list[str] | None = None, first: int = 0,
    ) -> None:  # fmt: skip
        """Offer (choice, explanation) pairs. `searched`, `first`: see ChoiceDialog."""
        dialog = ChoiceDialog(title, choices, searched, first)
        self.push_screen(dialog, lambda answer: then(answer) if answer is not None else None)

    def show_help(self) -> None:
        about = name_of_text(self.screen, self.current_mode)
        self.push_screen(HelpScreen(about, [*self.HELP_FIRST, *panel_help(self.focused)], bindings_here(self)))

    async def start_over(self) -> None:
        self.chats.cancel_all()
        self.feed.frozen = False
        self.view.moment.present()
        try:
            await self.source.control("resume")
            await self.source.control("pace", factor=1)
            for _ in range(300):  # until the cancelled answers have freed their blocks
                if not self.view.history.live.state.requests:
                    break
                await asyncio.sleep(0.01)
            await self.source.control("clear_cache")
            await self.feed.sync()
            if self.play_again:
                await self.play_again()
            else:
                self.say("started over: the cache is empty")
        except EngineError as error:
            self.say(str(error), error=True)

    def restart_engine(self) -> None:
        self.feed.restart()
        self.run_worker(self._start(again=True), group="start", exclusive=True)

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

    def _close_hang(self) -> None:
        if isinstance(self.screen, EngineDownDialog) and self.screen.hang:
            self.screen.dismiss("it answers")

    def _engine_ended(self, error: str) -> None:
        self.call_later(self._show_engine_down, "The engine has ended", error)

    def _show_engine_down(self, title: str, error: str, hang: bool = False) -> None:
        self._close_hang()
        if any(isinstance(screen, EngineDownDialog) and not screen.hang for screen in self.screen_stack):
            return
        log = str(self.source.log_file or "none")
        self.push_screen(EngineDownDialog(title, error, log, hang), self._after_engine_down)

    def _after_engine_down(self, choice: str | None) -> None:
        if choice == "restart":
            self.restart_engine()
        elif choice == "quit":
            self.exit(return_code=1)
        elif choice is None:
            self.call_later(self.leave_prompt)  # outside the prompt q quits, as the dialog says

    def _answered(self, session: Session) -> None:
        """Called when a chat's answer ends. If the chat is a replay, set its note to the cache hit."""
        metrics = session.messages[-1].metrics
        if session.id in self.replays and metrics:
            self.replays.remove(session.id)
            session.note = replay_note(metrics, self.source.info.block_size or None, session.primed)

    # ---- actions of the bindings

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Allow to cancel an answer only where there are chats."""
        return self.has_chats if action == "escape" else super().check_action(action, parameters)

    def action_do(self, action: str) -> None:
        """Run one of ACTIONS. In a dialog do nothing: the first of two quick presses may have opened it."""
        if not isinstance(self.screen, ModalScreen):
            self.commands.run(action)

    def action_escape(self) -> None:
        """Cancel the answer of the current chat."""
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
