"""The application: one source, one view, the chats, and the timer that draws. Screens show, commands act."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, ClassVar

from textual import events
from textual.app import App
from textual.binding import Binding, BindingType
from textual.css.query import NoMatches
from textual.filter import LineFilter
from textual.screen import ModalScreen
from textual.widgets import TextArea

from engine.errors import EngineError
from engine.process.heartbeat import Condition
from minitui import settings as settings_file
from minitui.chat.conversation import Session
from minitui.chat.prompt import Codec
from minitui.chat.sessions import Chats
from minitui.settings import Settings
from minitui.sources.base import Source
from minitui.teaching.stage import LETTERS, Stage
from minitui.tui.actions import ACTIONS
from minitui.tui.ascii import AsciiLines
from minitui.tui.commands import Commands
from minitui.tui.frame_limiter import Thrift
from minitui.tui.screens.chat import ChatScreen
from minitui.tui.screens.dialogs import ChoiceDialog, DeathDialog, TextDialog
from minitui.tui.screens.help import ABOUT, HelpScreen, of_panel
from minitui.tui.screens.inspect import InspectScreen
from minitui.tui.screens.keys import keys_here
from minitui.tui.screens.lecture import LectureScreen
from minitui.tui.terminal import TerminalGuard
from minitui.tui.theme import THEMES, themes_for, use_ascii
from minitui.tui.visible_lines import VisibleLines
from minitui.viewmodel.model import View
from minitui.viewmodel.updater import Updater
from minitui.visible import visible

MOST_SAID = 400  # characters
Script = Callable[["MinituiApp"], Coroutine[Any, Any, None]]


class MinituiApp(App[int]):
    """Owns the state that outlives a screen. `load_codec` makes the tokenizer from the source's info, in a thread."""

    TITLE = "minitui"
    FEATURES: ClassVar[frozenset[str]] = frozenset()  # what some actions need
    ENABLE_COMMAND_PALETTE = False  # the palette is a list of our own actions
    MODES: ClassVar[dict[str, Any]] = {"chat": ChatScreen, "inspect": InspectScreen, "lecture": LectureScreen}
    DEFAULT_MODE = "chat"
    CSS = """
    Screen { background: $ground; color: $ink; }
    ModalScreen { background: $ground 40%; }
    Toast { background: $empty-chip; width: 44; }
    ToastRack { align: right bottom; margin-bottom: 4; }  /* above the prompt */
    .-ascii Prompt, .-ascii ModalScreen > Vertical { border: ascii $accent; }
    .-ascii Toast { border: none; }
    .-ascii Transcript:focus { border-left: ascii $accent; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(a.key, f"do('{a.id}')", a.title, id=a.id, tooltip=a.help, show=False) for a in ACTIONS if a.key),
        Binding("escape", "escape", "Back", id="escape", tooltip="Cancel the answer, else nothing", show=False),
        Binding(
            "ctrl+z",
            "suspend_process",
            "Suspend",
            id="suspend",
            tooltip="Back to the shell; fg returns",
            show=False,
            priority=True,
        ),
        Binding(
            "ctrl+c",
            "interrupt",
            "Copy or quit",
            id="interrupt",
            tooltip="Copy the selection; twice quits",
            show=False,
            priority=True,
        ),
        *(
            Binding(
                letter,
                f"guess({i})",
                f"Guess {letter}",
                id=f"guess.{letter}",
                show=False,
                priority=True,
                system=True,
                tooltip="While a demo asks for a prediction",
            )
            for i, letter in enumerate(LETTERS)
        ),
    ]

    def __init__(
        self,
        source: Source,
        chats: Chats,
        settings: Settings,
        *,
        system: str,
        known_questions: list[str] | None = None,
        speaker: str = "model",
        load_codec: Callable[[dict[str, Any]], Codec],
        guard: TerminalGuard | None = None,
        script: Script | None = None,
    ) -> None:
        super().__init__()
        self.source, self.chats, self.settings = source, chats, settings
        self.system, self.speaker = system, speaker
        self.known_questions = known_questions or []
        self.view = View()
        self.feed = Updater(source, self.view)
        self.thrift = Thrift()
        self.commands = Commands(self)
        self.progress: dict[str, Any] | None = {"text": "starting the engine"}
        self.replays: list[str] = []  # ids of chats whose hit is announced when they are answered
        self.session: Session = chats.sessions[-1] if chats.sessions else chats.new(system)
        self.session.note = chats.left_out or self.session.note
        self.play_again: Callable[[], Coroutine[Any, Any, None]] | None = None  # set by a demo
        self.asking: Stage | None = None  # of a demo that plays: it drives the engine, and may ask for a prediction
        self._paced = 1.0
        self.story = ""  # what a demo tells, under the top bar
        self._load_codec, self._guard, self._script = load_codec, guard, script
        self._interrupted = 0.0
        self._frames = 0
        self._told_hang = False
        for theme in themes_for(self.console.color_system if guard else None):  # else nobody sees it in a terminal
            self.register_theme(theme)
        self.theme = settings.theme if settings.theme in self.available_themes else THEMES[0].name
        use_ascii(settings.ascii)
        self._own_filters: list[LineFilter] = [VisibleLines(), AsciiLines()] if settings.ascii else [VisibleLines()]
        self.set_class(settings.ascii, "-ascii")
        self.set_keymap(settings.keys)
        self._names: dict[str, str] = {}
        chats.on_end = self._answered
        chats.saver.on_unsaved = partial(self.say, error=True)
        source.on_death(self._died)

    @property
    def suggestions(self) -> list[str]:
        """Three known questions for an empty chat, spread over the list."""
        known = self.known_questions
        return [known[len(known) * i // 3] for i in range(3)] if len(known) >= 3 else known

    # ---- life

    def on_mount(self) -> None:
        sys.setswitchinterval(0.001)  # the thread that reads from the engine holds up the loop for no longer than this
        self.set_interval(1 / self.settings.fps, self._frame)
        # The first frame comes first: the engine's process competes for the same cores.
        self.call_after_refresh(self.run_worker, self._start, group="start")
        if self._guard:
            self._guard.attach(self)

    async def _start(self, again: bool = False) -> None:
        self.progress = {"text": "starting the engine"}
        try:
            await (self.source.restart if again else self.source.start)(self._progressed)
            codec = await asyncio.to_thread(self._load_codec, self.source.info)
        except EngineError as error:
            self.progress = None
            self.chats.cancel_all()  # nobody will answer what waits
            self._show_death("The engine could not start", str(error))
            return
        self.progress = None
        self.chats.use(codec)
        self.view.ids_to_text = partial(codec.decode, skip_special_tokens=False)
        await self.feed.sync()
        gc.collect()
        gc.set_threshold(20_000, 20, 100)  # collections of everything seldom: each is a pause
        gc.freeze()  # what stands now stays: later collections need not look at it
        if self._script and not again:
            await self._script(self)

    def _progressed(self, progress: dict[str, Any]) -> None:
        self.progress = progress

    async def on_unmount(self) -> None:
        self.chats.cancel_all()
        with contextlib.suppress(EngineError):
            await self.source.close()
        if self.chats.store:
            self.chats.store.close()

    def _frame(self) -> None:
        """Drain, fold, and paint the visible screen only."""
        self._watch_engine()
        if self.feed.pump():
            self.run_worker(self.feed.sync(), group="sync", exclusive=True)
        self.feed.keep_up()
        names = self.group_names()
        if names != self._names:
            self._names = self.view.group_names = names
            if hasattr(self.source, "name_groups"):  # it is being recorded
                self.source.name_groups(names)
        if self.pace != self._paced:
            self._paced = self.pace
            for session in self.chats.sessions:
                session.forget_rate()
        if not (self.is_headless or self.thrift.draws()):
            return
        self.view.home = self.session.id if self.current_mode == "chat" else None
        self.view.frame(time.monotonic())
        self._frames += 1
        for depth, screen in enumerate(reversed(self.screen_stack)):
            if hasattr(screen, "paint"):
                if depth and self._frames % self.settings.fps:  # under a dialog once a second will do
                    break
                with contextlib.suppress(NoMatches):  # it is being taken down
                    screen.paint(self.view)
                break

    async def on_event(self, event: events.Event) -> None:
        """Every event; keys come before what waits to be folded."""
        if isinstance(event, events.Key):
            self.feed.give_way()
        await super().on_event(event)

    @property
    def pace(self) -> float:
        """By how much slow motion stretches a step now; 1 is real time."""
        return self.view.live.state.pace

    def pace_of(self, session: Session) -> float:
        """By how much slow motion stretches the steps of this chat's engine."""
        return self.pace

    @property
    def gated(self) -> bool:
        """Is the engine held between two steps?"""
        return self.view.live.state.gate == "closed"

    @property
    def idle(self) -> bool:
        """Is there nothing that a step could compute?"""
        return not self.view.live.state.requests and not any(session.busy for session in self.chats.sessions)

    def group_names(self) -> dict[str, str]:
        """What the groups of the requests are called in the panels."""
        return self.chats.names

    def queue_place(self, session: Session) -> int | None:
        """Its place in the waiting queue, from 1; 0 when it does not wait, None when that is not known."""
        state = self.view.live.state
        groups = [state.requests[request].group for request in state.queue]
        return groups.index(session.id) + 1 if session.id in groups else 0

    # ---- what screens and commands ask for

    def submit(self, text: str) -> None:
        """A text from the prompt: a slash command, or a question for the chat that is shown."""
        if text.startswith("/"):
            self.commands.run_slash(text)
            return
        self.ask_question(text)

    def ask_question(self, text: str) -> None:
        """Ask in the chat that is shown; a refusal puts the text back."""
        try:
            self.chats.send(self.session, text)
            if self.view.travel_text:
                self.view.present()
            self.view.select("group", self.session.id)
        except EngineError as error:
            self.say(str(error), error=True)
            self.focus_prompt(text)

    def select_session(self, session: Session) -> None:
        """Show a chat, and select it in every panel."""
        self.session = session
        self.view.select("group", session.id)

    def focus_prompt(self, text: str | None = None) -> None:
        """Go to the prompt, with `text` in it if given."""
        self.switch_mode("chat")
        screen = self.screen
        if isinstance(screen, ChatScreen) and screen.is_mounted:
            if text is not None:
                screen.prompt.put(text)
                screen.prompt.update_suggestion()
            screen.prompt.focus()

    def leave_prompt(self) -> None:
        """Letters are keys; an answer goes on."""
        screen = self.screen
        if isinstance(screen, ChatScreen) and screen.is_mounted and screen.prompt.has_focus:
            screen.prompt.close_list()
            screen.transcript.focus()

    def open_mode(self, mode: str) -> None:
        """Show another screen. Whoever comes back finds keys, whichever way he went."""
        self.leave_prompt()
        self.switch_mode(mode)

    def say(self, text: str, error: bool = False) -> None:
        """A sentence for a few seconds."""
        text = visible(text)
        if len(text) > MOST_SAID:
            text = text[:MOST_SAID] + "…"  # somebody pasted where a name was asked for
        seconds = max(8.0 if error else 2.0, len(text) / 25)  # as long as it takes to read
        self.notify(text, severity="error" if error else "information", timeout=seconds, markup=False)

    def copy_to_clipboard(self, text: str) -> None:
        """Copy plain text: pasted into a shell, an escape sequence could end the paste and begin a command."""
        super().copy_to_clipboard(visible(text))

    def ask_text(self, title: str, text: str, then: Callable[[str], None], lines: bool = False) -> None:
        """Ask for a text, of several `lines` or of one; `then` is called unless Escape is pressed."""
        self.push_screen(TextDialog(title, text, lines), lambda answer: then(answer) if answer is not None else None)

    def choose(self, title: str, choices: list[tuple[str, str]], then: Callable[[str], None]) -> None:
        """Let the user choose; `then` is called with the choice."""
        self.push_screen(ChoiceDialog(title, choices), lambda answer: then(answer) if answer is not None else None)

    def show_help(self) -> None:
        """Help on the screen and the panel that has the focus."""
        about = self.current_mode if self.current_mode in ABOUT else "chat"
        self.push_screen(HelpScreen(about, self.settings.keys, of_panel(self.focused), keys_here(self)))

    def set_theme(self, name: str) -> None:
        """Change the theme and remember it."""
        self.theme = name
        try:
            kept = settings_file.load()  # not what the command line says for this run only
            kept.theme = name
            settings_file.save(kept)
        except (OSError, EngineError) as error:
            self.say(f"the theme could not be saved: {error}", error=True)

    async def start_over(self) -> None:
        """Back to an engine that has done nothing yet, in real time; a demo plays again."""
        self.chats.cancel_all()
        self.feed.frozen = False
        self.view.present()
        try:
            await self.source.control("resume")
            await self.source.control("pace", factor=1)
            for _ in range(300):  # the answers that were cancelled give their blocks back
                if not self.view.live.state.requests:
                    break
                await asyncio.sleep(0.01)
            await self.source.control("clear_cache")
            await self.feed.sync()
            if self.play_again:
                await self.play_again()
            else:
                self.say("everything is as at the beginning: nothing is cached")
        except EngineError as error:
            self.say(str(error), error=True)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Those of Textual, and ours: every line holds only visible characters, with `--ascii` only ASCII."""
        return [*super().get_line_filters(), *self._own_filters]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Letters are guesses only while a demo asks, and only in its picture."""
        if action != "guess":
            return super().check_action(action, parameters)
        free = len(self.screen_stack) == 1 and not isinstance(self.focused, TextArea)
        return free and self._choices_asked > int(str(parameters[0]))

    @property
    def _choices_asked(self) -> int:
        return self.asking.asks if self.asking is not None else 0

    def action_guess(self, choice: int) -> None:
        """Tell the demo."""
        if self.asking is not None:
            self.asking.guess(choice)

    def _handle_exception(self, error: Exception) -> None:
        """A bug. In a terminal the command line tells it, in one sentence and a log, not in pages on the screen."""
        super()._handle_exception(error)
        if self._guard:
            self._exit_renderables.clear()

    @property
    def crash(self) -> Exception | None:
        """What ended the application though nobody had foreseen it."""
        return self._exception

    def restart_engine(self) -> None:
        """Start the engine process again; chats stay."""
        self.feed.restart()
        self.run_worker(self._start(again=True), group="start", exclusive=True)

    # ---- events

    def _answered(self, session: Session) -> None:
        """A chat's answer has ended: a replay tells its hit."""
        metrics = session.messages[-1].metrics
        if session.id in self.replays and metrics:
            self.replays.remove(session.id)
            cached, total = metrics.get("cached_tokens"), metrics.get("prompt_tokens")
            size = self.source.info.get("block_size")
            if cached is None or total is None or not size:
                session.note = "replayed; this server does not tell how much of the prompt came from its cache"
                return
            session.note = (
                f"replayed: {cached:,} of {total:,} prompt tokens came from the cache: {cached // size} blocks of "
                f"{size} were taken over, {total - cached:,} tokens computed"
            )

    @property
    def condition(self) -> Condition:
        """Whether the engine's process lives; of one that is not ours this is not known."""
        return getattr(self.source, "condition", None) or Condition()

    def _watch_engine(self) -> None:
        """Say that the engine's process gives no sign of life, and that it does again."""
        hung = self.condition.hung
        if hung and not self._told_hang:
            self._told_hang = True
            self._show_death("The engine does not answer", hung, hang=True)
        elif self._told_hang and not hung:
            self._told_hang = False
            self._close_hang()
            if self.progress is None and self.source.error is None:
                self.say("the engine answers again")

    def _close_hang(self) -> None:
        if isinstance(self.screen, DeathDialog) and self.screen.hang:
            self.screen.dismiss("it answers")

    def _died(self, error: str) -> None:
        self.call_later(self._show_death, "The engine has ended", error)

    def _show_death(self, title: str, error: str, hang: bool = False) -> None:
        self._close_hang()
        if any(isinstance(screen, DeathDialog) and not screen.hang for screen in self.screen_stack):
            return
        log = str(getattr(self.source, "log_file", "none"))
        self.push_screen(DeathDialog(title, error, log, hang), self._after_death)

    def _after_death(self, choice: str | None) -> None:
        if choice == "restart":
            self.restart_engine()
        elif choice == "quit":
            self.exit(return_code=1)
        elif choice is None:
            self.call_later(self.leave_prompt)  # q quits, as the dialog has said

    # ---- actions of the bindings

    def action_do(self, action: str) -> None:
        """Run an action of the table; not where a key pressed twice has just opened a dialog."""
        if not isinstance(self.screen, ModalScreen):
            self.commands.run(action)

    def action_escape(self) -> None:
        """Outside the prompt Escape cancels the answer of the chat that is shown."""
        if self.chats.cancel(self.session):
            self.say("the answer is cancelled")

    def action_interrupt(self) -> None:
        """Ctrl+C copies a selection; twice within two seconds it quits."""
        selected = self.screen.get_selected_text()
        if selected:
            self.copy_to_clipboard(selected)
            self.say("copied")
            return
        if time.monotonic() - self._interrupted < 2.0:
            self.exit()
        self._interrupted = time.monotonic()
        self.say("ctrl+c again quits (esc cancels an answer)")
