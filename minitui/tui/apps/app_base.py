"""The part of the application that screens, widgets and commands use, with the start of the engine.

Screens, widgets and commands import this file, and app.py imports them. If they imported app.py instead, the imports
would form a cycle.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.driver import Driver
from textual.filter import LineFilter
from textual.screen import ModalScreen
from textual.widget import AwaitMount
from textual.widgets import TextArea

from engine.errors import EngineError, InvalidRequest
from engine.info import EngineInfo
from engine.process.heartbeat import Condition
from minitui import settings as settings_file
from minitui.chat.conversation import Session
from minitui.chat.describe import OTHER_PAUSED, OTHER_SLOW, PAUSED
from minitui.chat.prompt import Codec
from minitui.chat.sessions import Chats
from minitui.progress import Phases
from minitui.protocol import ServerInfo
from minitui.settings import Settings
from minitui.sources.base import Source
from minitui.teaching.prediction import LETTERS, Poll
from minitui.teaching.stage import THINK_SECONDS, Stage
from minitui.tui.actions import ACTIONS, BY_ID, NEED_CONTROL, Action, alt_key, key_label, key_press
from minitui.tui.apps.frame_limiter import FrameLimiter
from minitui.tui.apps.heap import set_thresholds
from minitui.tui.glyphs import use_ascii
from minitui.tui.screens.dialogs import ChoiceDialog, EngineDownDialog, TextDialog
from minitui.tui.terminal.line_filters import AsciiLines, VisibleLines
from minitui.tui.terminal.textual_insides import (
    LOST_S,
    AltEscape,
    KeyDone,
    KeyOrder,
    Notices,
    change_textual,
    noting_keys,
    write_to_page,
)
from minitui.tui.theme import THEMES
from minitui.tui.widgets.base import LinePanel
from minitui.tui.widgets.chat.prompt import Prompt
from minitui.tui.widgets.chat.transcript import Transcript
from minitui.tutor import FIRST_QUESTIONS
from minitui.viewmodel.updater import Updater
from minitui.viewmodel.view import View
from minitui.visible import visible

KEY_DRAWN_S = 0.010  # from a key press to a picture of its effect


def _answer(then: Callable[[str], object], answer: str | None) -> None:
    if answer is not None:
        then(answer)


class AppBase(Notices):
    """The state that all screens share, and what screens, widgets and commands ask of the application."""

    TITLE = "minitui"
    HELP_FIRST: ClassVar[tuple[tuple[str, str], ...]] = ()  # (title, text) pairs shown before the help of a screen
    TOOLTIP_DELAY = 0.3  # seconds: a pointer that moves across the panels shows no details
    ENABLE_COMMAND_PALETTE = False  # Commands.do_palette replaces Textual's palette
    # Group or id of ACTIONS that this application does not offer -> why. "" offers an action of such a group.
    NOT_OFFERED: ClassVar[dict[str, str]] = {
        "Replicas": "this is for several servers, and only one engine runs here: minitui chat --connect URL "
                    "--connect URL uses several",
    }
    TABS: ClassVar[tuple[tuple[str, str], ...]] = (
        ("chat", "1 Chat"), ("inspect", "2 Inspect"), ("lecture", "3 Lecture"),
    )

    scene_name: str = ""  # of a class; empty in other applications
    THINK_S: ClassVar[float] = THINK_SECONDS  # time for the prediction of a demo

    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(a, f"guess({i})", f"Guess {a}", id=f"guess.{a}", show=False, priority=True, system=True,
                  tooltip="Works while a prediction is asked for") for i, a in enumerate(LETTERS)),
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
        load_codec: Callable[[EngineInfo], Codec] | None = None,
        script: Callable[[Any], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`load_codec` makes the tokenizer from the source's info; it runs in a thread. `script` runs when the engine
        has started."""
        super().__init__()
        change_textual()
        self.source, self.chats, self.settings = source, chats, settings
        self.system, self.speaker = system, speaker
        self.known_questions = known_questions or []
        self.view = View()
        self.view.history.missing = source.missing
        self.feed = Updater(source, self.view)
        self.frame_limiter = FrameLimiter()
        self.session: Session = chats.sessions[-1] if chats.sessions else chats.new(system)
        self.session.note = chats.left_out or self.session.note
        self.progress: dict[str, Any] | None = {"text": source.missing}  # None: the engine is not starting
        self.replays: list[str] = []  # ids of chats that /replay made: each reports its cache hit when its answer ends
        self.asking: Stage | None = None  # the demo that runs now; it controls the engine and asks for predictions
        self.play_again: Callable[[], Coroutine[Any, Any, None]] | None = None  # set by a demo
        self._load_codec, self._script = load_codec, script
        self._keys = KeyOrder()
        self._drawn_moment: tuple[int, str] | None = None  # (selection, time) of the last picture
        self._page: dict[str, object] = {}  # the last message of `tell_page`
        self.story = ""  # text of a demo or a recording, shown under the top bar
        for theme in THEMES:
            self.register_theme(theme)
        self.theme = settings.theme
        use_ascii(settings.ascii)
        self._line_filters: list[LineFilter] = [VisibleLines(), AsciiLines()] if settings.ascii else [VisibleLines()]
        self.set_class(settings.ascii, "-ascii")
        self.set_keymap(settings.keys)

    # ---- actions and keys

    @property
    def actions(self) -> list[Action]:
        """The actions that this application offers, in the order of ACTIONS."""
        return [action for action in ACTIONS if not self.reason_against(action)]

    def reason_against(self, action: Action) -> str:
        """Returns why this application does not offer the action, as a sentence; empty if it does."""
        reason = self.NOT_OFFERED.get(action.id, self.NOT_OFFERED.get(action.group, ""))
        return reason or (self.source.uncontrolled if action.id in NEED_CONTROL else "")

    @property
    def has_chats(self) -> bool:
        """True if the user can ask questions; a recording has no chats."""
        return "Chats" not in self.NOT_OFFERED

    def key_of(self, action: str) -> str:
        """Returns the key of an action, as printed on the keyboard. The table [keys] of settings.toml can change it."""
        return key_label(self.settings.keys.get(action, BY_ID[action].key))

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Allow the guess keys only while a demo or a screen asks for a prediction, outside dialogs and the prompt."""
        if action != "guess":
            return super().check_action(action, parameters)
        free = len(self.screen_stack) == 1 and not isinstance(self.focused, TextArea)
        return free and getattr(self._asks(), "open_choices", 0) > int(str(parameters[0]))

    async def run_action(self, action: Any, *namespaces: Any, **options: Any) -> bool:
        """Run an action, and paint the panel with the focus again: its own actions change what it shows."""
        ran = await super().run_action(action, *namespaces, **options)
        if self.screen_stack and isinstance(panel := self.focused, LinePanel):
            panel.repaint()
        return ran

    def _asks(self) -> Any:
        """Returns the demo that asks for a prediction, else the screen below all dialogs."""
        return self.asking if self.asking is not None and self.asking.open_choices else self.screen_stack[0]

    @property
    def poll(self) -> Poll | None:
        """The question that the demo or the screen asks now."""
        return getattr(self._asks(), "poll", None) if self.screen_stack else None

    def action_guess(self, choice: int) -> None:
        self._asks().guess(choice)

    # ---- the engine

    @property
    def condition(self) -> Condition:
        """The condition of the engine's process; empty if minitui did not start the process."""
        return self.source.condition

    @property
    def pace(self) -> float:
        """The factor by which slow motion stretches a step; 1 is real time."""
        return self.view.history.live.state.pace

    def pace_of(self, session: Session) -> float:
        """Returns the factor by which slow motion stretches the steps of this chat's engine."""
        return self.pace

    @property
    def gated(self) -> bool:
        """True if the engine is paused between two steps."""
        return self.view.history.live.state.gate == "closed"

    @property
    def waits_text(self) -> str:
        """Says where an answer waits that the engine is paused or slowed down; empty if it runs freely."""
        info = self.source.info
        if isinstance(info, ServerInfo) and info.role in ("chat", "watch"):  # somebody else controls the engine
            return OTHER_PAUSED if self.gated else OTHER_SLOW.format(pace=self.pace) if self.pace > 1 else ""
        return PAUSED if self.gated and self.asking is None else ""  # a demo lets the engine run itself

    @property
    def answer_waits(self) -> bool:
        """True if the answer of the current chat has not begun, or the engine is paused within it: escape in the prompt
        then leaves the prompt, and does not cancel the answer."""
        session = self.session
        return session.busy and (self.gated or session.messages[-1].state == "queued")

    @property
    def idle(self) -> bool:
        """True if the engine has nothing to compute."""
        return not self.view.history.live.state.requests and not any(session.busy for session in self.chats.sessions)

    async def _start(self, again: bool = False) -> None:
        load_codec = self._load_codec
        assert load_codec is not None
        self.view.history.missing = self.source.missing
        self.progress = {"text": self.source.missing}
        self.phases = Phases("the application", age_s=0.0 if again else None)
        self.view.history.phases = self.phases.report
        try:
            await (self.source.restart if again else self.source.start)(self._on_progress)
            codec = await asyncio.to_thread(load_codec, self.source.info)
        except EngineError as error:
            self.progress = None
            self.view.history.missing, self.view.history.phases = "the engine could not start", list
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
            self.phases(progress)

    def restart_engine(self) -> None:
        """Start the engine's process again. The chats are kept."""
        self.feed.restart()
        self.run_worker(self._start(again=True), group="start", exclusive=True)

    async def start_over(self) -> None:
        """Cancel all answers, empty the cache, return to real time and clear the history. A demo begins again."""
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

    def _show_engine_down(self, title: str, error: str, hang: bool = False) -> None:
        self._close_hang()
        if any(isinstance(screen, EngineDownDialog) and not screen.hang for screen in self.screen_stack):
            return
        log = str(self.source.log_file or "none")
        self.push_screen(EngineDownDialog(title, error, log, hang), self._after_engine_down)

    def _close_hang(self) -> None:
        if isinstance(self.screen, EngineDownDialog) and self.screen.hang:
            self.screen.dismiss("it answers")

    def _after_engine_down(self, choice: str | None) -> None:
        if choice == "restart":
            self.restart_engine()
        elif choice == "quit":
            self.exit(return_code=1)
        elif choice is None:
            self.call_later(self.leave_prompt)  # outside the prompt q quits, as the dialog says

    # ---- time

    def travel_to(self, step: int) -> bool:
        """Show the engine as it was after a step; for the last or a later step, show the present. Returns False if the
        step is no longer kept."""
        return self.view.travel_to(step) or step >= self.view.moment.newest

    @property
    def steps_kept(self) -> tuple[int, int]:
        """The first and the last step that `travel_to` can show; (0, -1) if there is none."""
        return (self.view.moment.oldest, self.view.moment.newest) if self.view.moment.newest >= 0 else (0, -1)

    def to_now(self) -> None:
        """Returns from the past to the present, where the effect of an action is visible."""
        if self.view.moment.travel_text:
            self.view.moment.present()
            self.view.leave_step(self.view.moment.horizon)

    async def begin_here(self) -> None:
        """Called before a command that lets the engine run."""
        self.to_now()

    # ---- chats

    @property
    def suggestions(self) -> list[str]:
        """Known questions for an empty chat."""
        return [first for first in FIRST_QUESTIONS if first in self.known_questions] or self.known_questions[:3]

    def group_names(self) -> dict[str, str]:
        """Returns the name that the panels show for each group of requests."""
        return self.chats.names

    def queue_place(self, session: Session) -> int | None:
        """Returns the chat's place in the waiting queue, from 1; 0 if the chat does not wait, None if unknown."""
        state = self.view.history.live.state
        groups = [state.requests[request].group for request in state.queue]
        return groups.index(session.id) + 1 if session.id in groups else 0

    def ask_question(self, text: str) -> None:
        """Ask in the current chat; if the question is refused, its text returns to the prompt."""
        try:
            self.chats.send(self.session, text)
            self.to_now()
            self.view.select("group", self.session.id)
        except EngineError as error:
            paused = f". {self.waits_text}" if self.waits_text and self.session.busy else ""
            self.say(f"{error}{paused}", error=True)
            self.focus_prompt(text)

    def select_session(self, session: Session) -> None:
        """Show a chat, and select it in every panel."""
        self.session = session
        self.view.select("group", session.id)

    # ---- a class

    def scene_for_phones(self) -> dict[str, Any]:
        """Returns what the phones of a class show besides the step and the question."""
        return {}

    def scene_for_lecturer(self) -> dict[str, Any]:
        """Returns what only the lecturer's page shows; empty if the application has no scenes."""
        return {}

    @property
    def class_keys(self) -> list[tuple[str, str]]:
        """(key, what it does) of the scenes of a class, which come first in the status bar."""
        return []

    @property
    def told(self) -> str:
        """The text under the top bar."""
        return self.story

    # ---- what is shown

    def note_drawn(self) -> None:
        self.feed.note_drawn()

    def focus_prompt(self, text: str | None = None) -> None:
        """Move the focus to the prompt, with `text` in it if given."""
        self.switch_mode("chat")
        if self.screen.query(Transcript):  # the screen is mounted, and no dialog is above it
            prompt = self.screen.query_one(Prompt)
            if text is not None:
                prompt.put(text)
                prompt.update_suggestion()
            prompt.focus()

    def leave_prompt(self) -> None:
        """Move the focus out of the prompt, so that letters are keys, not text. A running answer continues."""
        prompt, transcripts = self.focused, self.screen.query(Transcript)
        if isinstance(prompt, Prompt) and transcripts:  # a dialog has a prompt, but no transcript
            prompt.close_list()
            self.screen.set_focus(transcripts.first())  # at once: the next key may have arrived already

    def switch_mode(self, mode: str) -> AwaitMount:
        """Show a screen. Raises InvalidRequest for the chat screen if the application has no chats."""
        if mode == "chat" and not self.has_chats:
            raise InvalidRequest(self.NOT_OFFERED["chat"])
        return super().switch_mode(mode)

    def open_mode(self, mode: str) -> None:
        """Show another screen, with the focus outside the prompt."""
        self.leave_prompt()  # letters are then keys when the user returns to the chats
        self.switch_mode(mode)

    def ask_text(
        self, title: str, text: str, then: Callable[[str], object], lines: bool = False, selected: bool = False
    ) -> None:
        """Ask for a text, and call `then` with it; not after Escape. `lines` allows several lines. `selected`: typing
        replaces `text`."""
        self.push_screen(TextDialog(title, text, lines, selected), partial(_answer, then))

    def choose(
        self, title: str, choices: list[tuple[str, str]], then: Callable[[str], object],
        searched: list[str] | None = None, first: int = 0, hang: int = 0,
    ) -> None:
        """Offer (choice, explanation) pairs, and call `then` with the choice; not after Escape. The others: see
        ChoiceDialog."""
        self.push_screen(ChoiceDialog(title, choices, searched, first, hang), partial(_answer, then))

    def press(self, labels: str) -> None:
        """Press keys that are named as in the status bar: "esc r" is two keys."""
        for label in labels.split():
            self.post_message(key_press(label))

    def tell_page(self, keys: Sequence[tuple[str, str]]) -> None:
        """In a browser, give the page its title and the keys of this screen, with what they do."""
        if self.is_web:
            name = dict(self.TABS).get(self.current_mode, "").lstrip("0123456789 ")
            title = f"{self.session.title if self.current_mode == 'chat' else name} · minitui"
            page: dict[str, object] = {"type": "page", "title": visible(title), "keys": list(keys)}
            if page != self._page:
                self._page = page
                write_to_page(self._driver, page)

    def copy_to_clipboard(self, text: str) -> None:
        """Copy visible characters only: in a shell, an escape sequence could end the paste and run a command."""
        super().copy_to_clipboard(visible(text))

    def set_theme(self, name: str) -> None:
        """Change the theme, and save it in the settings."""
        self.theme = name
        try:
            saved = settings_file.load()  # without the options of this run's command line
            saved.theme = name
            settings_file.save(saved)
        except (OSError, EngineError) as error:
            self.say(f"the theme could not be saved: {error}", error=True)

    def get_line_filters(self) -> Sequence[LineFilter]:
        """Returns Textual's filters, then the filters of line_filters.py."""
        return [*super().get_line_filters(), *self._line_filters]

    def get_driver_class(self) -> type[Driver]:
        """Returns Textual's driver. It notes a key when it has read the key, before the event loop is free for it."""
        return noting_keys(super().get_driver_class(), lambda: self.feed.note_key())

    async def on_event(self, event: events.Event) -> None:
        """Handle an event. A key delays the folding of records, so that the effect of the key is shown first. It waits
        until the key before it has taken effect."""
        if isinstance(event, events.InputEvent | events.Paste):
            self.frame_limiter.wake()
        if isinstance(event, events.Key):
            self.feed.note_handled()
            self.set_timer(KEY_DRAWN_S, self._draw_key)
        if not isinstance(event, events.Key | events.Paste) or event.is_forwarded:
            await super().on_event(event)
        else:
            self._keys.waiting.extend(alt_key(event) if isinstance(event, events.Key) else [event])
            await self._pass_next()

    async def _pass_next(self) -> None:
        """Pass the keys and pasted texts that wait to the widget with the focus, each after the one before. A key with
        alt acts outside the prompt: it leaves the prompt first, and the answer continues."""
        while self._keys.waiting and not self._keys.pending and self.screen_stack:  # no screen: the application ends
            event = self._keys.waiting.popleft()
            if isinstance(event, AltEscape):
                if self.current_mode == "chat" and not isinstance(self.screen, ModalScreen):
                    self.leave_prompt()
                    continue
                event = key_press("esc")  # two keys in one packet: letters are keys here, with or without alt
            target = self.focused or self.screen
            await super().on_event(event)
            self._keys.follow(target)
        if self._keys.waiting and self._keys.limited != self._keys.number:
            self._keys.limited = self._keys.number
            self.set_timer(LOST_S, partial(self._lose, self._keys.number))

    async def _lose(self, key: int) -> None:
        """Stop waiting for this key: its path has ended."""
        if key == self._keys.number:
            self._keys.open = None
            await self._pass_next()

    async def on_key_done(self, message: KeyDone) -> None:
        message.stop()
        self._keys.came(message)
        await self._pass_next()

    def _draw_key(self) -> None:
        """After a key that selects something or travels in time, draw without waiting for the next frame."""
        moment = (self.view.version, self.view.moment.travel_text)
        if self._drawn_moment not in (None, moment) and self.screen_stack:  # without a screen, the application ends
            self.draw()

    def draw(self) -> None:
        self._drawn_moment = (self.view.version, self.view.moment.travel_text)

    def draw_frame(self) -> None:
        """Draw, unless a key was pressed: its effect comes first, and the next frame draws."""
        if self.feed.key_waits("frame"):
            self.frame_limiter.put_off()
        else:
            self.draw()
