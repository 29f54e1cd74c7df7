"""What each action of minitui/tui/actions.py does. Keys, slash commands and the palette all end in `Commands.run`."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from engine.errors import EngineError
from minitui.chat import transcripts
from minitui.chat.conversation import Session
from minitui.chat.describe import split_thinking
from minitui.tui.actions import ACTIONS, BY_ID, BY_SLASH, key_label, offered
from minitui.tui.screens.keys import MOVES, keys_here
from minitui.tui.widgets.chrome import has_chats

if TYPE_CHECKING:
    from minitui.tui.app import MinituiApp
    from minitui.tui.replica_app import ReplicaApp

PACES = (1, 2, 5, 10, 20, 50, 100, 200)
UNTIL = {
    "admission": "a waiting request gets a place in the batch",
    "prefill": "a step computes tokens of a prompt",
    "hit": "a prompt finds its beginning in the radix tree",
    "eviction": "cached blocks are given up to make room",
    "preemption": "a running request is put back for want of blocks",
    "finish": "an answer ends",
    "slow": "a step takes longer than 20 ms",
}
DRIVING = {"step", "step10", "until", "slow", "slower", "faster"}  # the engine, which is a demo's while one plays
FIRST_QUESTION = "What is a radix tree?"
MOST_DIGITS = 12


def _number(text: str) -> int | None:
    """A whole number of at most MOST_DIGITS digits, as typed; None for anything else."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS else None


class Commands:
    """One method per action id, named `do_<id>`; the argument is what was typed behind a slash command."""

    def __init__(self, app: MinituiApp) -> None:
        self.app = app

    def run(self, action: str, argument: str = "") -> None:
        """Do it; what is wrong becomes a sentence on the screen."""
        try:
            self._check(action)
            getattr(self, f"do_{action}")(argument.strip())
        except EngineError as error:
            self.app.say(str(error), error=True)

    def _check(self, action: str) -> None:
        if BY_ID[action].group == "Chats" and not has_chats(self.app):
            raise EngineError("this is a recording: it has no chats; `minitui chat` starts an engine")
        if action in DRIVING and self.app.asking is not None:
            raise EngineError("the demo drives the engine itself: space holds it, and at its end the keys are yours")

    def run_slash(self, text: str) -> None:
        """Run "/fork" or "/rename paging"; the shortest unambiguous beginning of a name will do."""
        name, _, argument = text[1:].partition(" ")
        if _number(name) is not None:
            self.run("go", name)
            return
        fits = [a for slash, a in BY_SLASH.items() if slash == name] or [
            a for a in offered(self.app.FEATURES) if a.slash and name and a.slash.startswith(name)
        ]
        if len(fits) == 1:
            self.run(fits[0].id, argument)
        elif fits:
            self.app.say(f"/{name} may be " + ", ".join(f"/{a.slash}" for a in fits), error=True)
        else:
            self.app.say(f"There is no command /{name}: / and a letter lists them, ? explains them.", error=True)

    # --- chats

    @property
    def session(self) -> Session:
        """The chat that is shown."""
        return self.app.session

    def do_write(self, _: str) -> None:
        self.app.focus_prompt()

    def do_keys(self, _: str) -> None:
        self.app.leave_prompt()

    def do_slash(self, _: str) -> None:
        self.app.focus_prompt("/")

    def do_new(self, title: str) -> None:
        self.app.select_session(self.app.chats.new(self.app.system, title))
        self.app.focus_prompt()

    def do_fork(self, _: str) -> None:
        if not self.session.messages:
            raise EngineError("there is nothing to fork yet: ask something first")
        self.app.select_session(self.app.chats.fork(self.session))
        self.app.focus_prompt()

    def do_replay(self, _: str) -> None:
        self._to_now()
        source = self.session
        asked = next((m.text for m in source.messages if m.role == "user"), None)
        if asked is None:  # nothing is cached yet: this chat computes the system prompt, the next one shares it
            asked = FIRST_QUESTION
            self.app.chats.send(source, asked)
        replay = self.app.chats.new(source.system, f"replay of {self.app.chats.number(source)}", source)
        replay.named = False
        self.app.chats.send(replay, asked)
        replay.note = (
            f"same system prompt and first question as chat {self.app.chats.number(source)}: see under the answer how "
            "much came from the cache"
        )
        self.app.replays.append(replay.id)
        self.app.select_session(replay)

    def do_all(self, text: str) -> None:
        if not text:
            self.app.focus_prompt("/all ")
            return
        self._to_now()
        asked = self.app.chats.send_all(text)
        left = len(self.app.chats.sessions) - len(asked)
        sent = f"sent to {len(asked)} chat{'s' if len(asked) != 1 else ''}"
        self.app.say(sent + (f"; {left} still answering" if left else ""))

    def do_cancel(self, _: str) -> None:
        if not self.app.chats.cancel(self.session):
            self.app.say("no answer is being written in this chat")

    def do_retry(self, _: str) -> None:
        self._to_now()
        self.app.chats.retry(self.session)

    def do_edit(self, text: str) -> None:
        session = self.session
        asked = next((m.text for m in reversed(session.messages) if m.role == "user"), None)
        if asked is None:
            raise EngineError("there is no question to edit yet: ask something first")
        if session.busy:
            raise EngineError("the answer is still being written: Esc cancels it, then edit the question")
        if text:
            self._resend(session, text)
        else:
            self.app.ask_text("Your last question", asked, lambda t: self._resend(session, t), lines=True)

    def _resend(self, session: Session, text: str) -> None:
        try:
            self._to_now()
            self.app.chats.retry(session, text)
        except EngineError as error:
            self.app.say(str(error), error=True)

    def do_search(self, words: str) -> None:
        store = self.app.chats.store
        if store is None:
            raise EngineError("the chats of this run are not kept, so there is nothing to search in")
        found = store.search(words)
        if not found:
            raise EngineError(f"no chat holds {words!r}" if words else "no chat has been kept yet")
        rows, ids = [], {}
        for chat in found:
            name = f"{chat.title[:28]:<28} {time.strftime('%d %b %H:%M', time.localtime(chat.created))}"
            while name in ids:
                name += " "
            ids[name] = chat.id
            rows.append((name, textwrap.shorten(chat.line, 80, placeholder="…")))
        self.app.choose("Chats that were kept", rows, lambda name: self._open(ids[name]))

    def _open(self, id: str) -> None:
        self.app.select_session(self.app.chats.reopen(id))
        self.app.open_mode("chat")

    def do_next(self, _: str) -> None:
        self._go(self.app.chats.number(self.session) % len(self.app.chats.sessions) + 1)

    def do_previous(self, _: str) -> None:
        self._go((self.app.chats.number(self.session) - 2) % len(self.app.chats.sessions) + 1)

    def do_go(self, number: str) -> None:
        count = len(self.app.chats.sessions)
        wanted = _number(number)
        if wanted is None or not 1 <= wanted <= count:
            raise EngineError(f"there are chats 1 to {count}; {number[:40]!r} is none of them")
        self._go(wanted)

    def _go(self, number: int) -> None:
        self.app.select_session(self.app.chats.sessions[number - 1])

    def do_rename(self, title: str) -> None:
        session = self.session
        if title:
            self.app.chats.rename(session, title)
        else:
            self.app.ask_text("Title of this chat", session.title, lambda t: self.app.chats.rename(session, t))

    def do_close(self, _: str) -> None:
        session, chats = self.session, self.app.chats
        if len(chats.sessions) == 1:
            chats.new(self.app.system)
        at = chats.sessions.index(session)
        chats.close(session)
        self.app.select_session(chats.sessions[min(at, len(chats.sessions) - 1)])

    def do_system(self, text: str) -> None:
        session = self.session
        if text:
            self._set_system(session, text)
        else:
            self.app.ask_text(
                "System prompt of this chat", session.system, lambda t: self._set_system(session, t), lines=True
            )

    def _set_system(self, session: Session, text: str) -> None:
        self.app.chats.set_system(session, text)
        self.app.say("the next turn begins with the new system prompt: its first tokens differ, so nothing cached fits")

    def do_ask(self, word: str) -> None:
        fits = [q for q in self.app.known_questions if word.lower() in q.lower()]
        if not fits:
            raise EngineError(
                f"no known question holds {word!r}" if word and self.app.known_questions
                else "this model comes without a list of questions it knows: ask anything"
            )  # fmt: skip
        self.app.choose("Questions it knows", [(q, "") for q in fits], self.app.ask_question)

    def do_set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not name:
            s = self.session.sampling
            self.app.say("; ".join(f"{k} {'default' if v is None else v}" for k, v in vars(s).items()))
            return
        self.app.say(self.session.sampling.set(name, value.strip()))

    def do_think(self, _: str) -> None:
        answers = [m for m in self.session.messages if m.role == "assistant"]
        if not any(split_thinking(m.text)[0] for m in answers):
            raise EngineError("no answer of this chat has any thinking to show: this model answers at once")
        unfold = not any(m.unfolded for m in answers)
        for message in answers:
            message.unfolded = unfold
            message.touch()

    def do_copy(self, what: str) -> None:
        answer = next((m.text for m in reversed(self.session.messages) if m.role == "assistant" and m.text), "")
        if what == "chat":
            self._copy("the chat", transcripts.as_markdown(self.session))
        elif what == "code":
            blocks = [text for kind, text in transcripts.pieces(self.session.messages) if kind == "code"]
            if not blocks:
                raise EngineError("there is no code block in this chat")
            self._copy("the last code block", blocks[0])
        elif what:
            raise EngineError(f"/copy takes nothing, code or chat, not {what!r}; Y lets you choose")
        elif not answer:
            raise EngineError("there is no answer to copy yet")
        else:
            self._copy("the answer", answer)

    def _copy(self, what: str, text: str) -> None:
        self.app.copy_to_clipboard(text)
        self.app.say(f"{what} is copied ({len(text):,} characters), if your terminal allows it (OSC 52)")

    def do_pick(self, _: str) -> None:
        found = transcripts.pieces(self.session.messages)
        if not found:
            raise EngineError("there is nothing to copy yet")
        rows = [(f"{n:>3} {kind:<9}", " ".join(text.split())[:100]) for n, (kind, text) in enumerate(found, 1)]
        self.app.choose("Copy", rows, lambda row: self._copy(*found[int(row.split()[0]) - 1]))

    def do_export(self, name: str) -> None:
        path = transcripts.named_file(name or transcripts.file_name(self.session))
        transcripts.write(self.session, path)
        self.app.say(f"written to {path.resolve()}")

    def do_attach(self, name: str) -> None:
        if not name:
            self.app.focus_prompt("/attach ")
            return
        self.app.focus_prompt(transcripts.quoted_file(transcripts.named_file(name)))

    # --- several servers

    def do_replicas(self, _: str) -> None:
        self._several()
        self.app.open_mode("replicas")

    def do_pin(self, which: str) -> None:
        app = self._several()
        if not which and app.current_mode != "replicas":
            rows = [(f"{r.number} {r.name}", app.replicas.reason_against(r) or r.model) for r in app.replicas.replicas]
            app.choose("Pin this chat to", rows, lambda row: self.run("pin", row.split()[0]))
            return
        app.pin(which)

    def do_unpin(self, _: str) -> None:
        self._several().unpin()

    def _several(self) -> ReplicaApp:
        if "replicas" not in self.app.FEATURES:
            raise EngineError("there is one engine here; minitui chat --connect URL --connect URL has several")
        return cast("ReplicaApp", self.app)

    # --- the engine

    def do_freeze(self, _: str) -> None:
        self.app.feed.frozen = not self.app.feed.frozen

    def do_gate(self, _: str) -> None:
        if self.app.asking is not None:  # the engine is the demo's: what is meant is that it should wait
            self.do_freeze("")
            return
        if self.app.gated:
            self._to_now()
        self._control(self.app.source.control("resume" if self.app.gated else "pause"))

    def do_step(self, count: str) -> None:
        steps = _number(count or "1")
        if steps is None:
            raise EngineError(f"/step takes a number of steps, not {count[:40]!r}")
        if self.app.idle:
            raise EngineError("nothing to step: no request is running")
        self._to_now()
        self._control(self.app.source.control("step", n=steps))

    def do_step10(self, _: str) -> None:
        self.do_step("10")

    def do_until(self, event: str) -> None:
        if not event:
            self.app.choose("Run until", list(UNTIL.items()), self.do_until)
            return
        if event not in UNTIL:
            raise EngineError(f"run until {event!r}: there are {', '.join(UNTIL)}")
        predicate: dict[str, Any] = {"event": event} | ({"ms": 20.0} if event == "slow" else {})
        self._to_now()
        self._control(self.app.source.control("run_until", predicate=predicate))

    def do_slower(self, _: str) -> None:
        self._pace(next((p for p in PACES if p > self.app.pace), PACES[-1]))

    def do_faster(self, _: str) -> None:
        self._pace(next((p for p in reversed(PACES) if p < self.app.pace), PACES[0]))

    def do_slow(self, factor: str) -> None:
        try:
            times = float(factor)
        except ValueError:
            times = 0.0
        if not PACES[0] <= times <= PACES[-1]:
            raise EngineError(f"/slow takes a factor from {PACES[0]} to {PACES[-1]}, not {factor!r}")
        self._pace(times)

    def _pace(self, factor: float) -> None:
        self._control(self.app.source.control("pace", factor=factor))

    def do_back(self, _: str) -> None:
        self.app.view.travel(-1)

    def do_forward(self, _: str) -> None:
        self.app.view.travel(1)

    def do_now(self, _: str) -> None:
        if not self.app.view.travel_text:
            raise EngineError("the picture is of now already")
        self._to_now()

    def _to_now(self) -> None:
        """Whoever has the engine do something wants to see it, not the past."""
        if self.app.view.travel_text:
            self.app.view.present()

    def do_clear(self, _: str) -> None:
        self._control(self.app.source.control("clear_cache"))
        self.app.say("the radix tree is emptied of everything that no answer holds")

    def do_reset(self, _: str) -> None:
        if not self.app.feed.live:
            raise EngineError("the engine is just being started: try again in a moment")
        self.app.run_worker(self.app.start_over(), group="start", exclusive=True)

    def do_restart(self, _: str) -> None:
        condition = self.app.condition
        if self.app.source.error is None and not condition.hung and not condition.long:
            raise EngineError("the engine is running: there is nothing to restart")
        self.app.restart_engine()

    def _control(self, call: Coroutine[Any, Any, Any]) -> None:
        """Have the engine do it: at once, or as soon as it is up."""
        if not self.app.source.info and self.app.source.error is None:
            self.app.say("the engine is still being started: this is done as soon as it is up")

        async def guarded() -> None:
            try:
                await self.app.source.ready()
                await call
            except EngineError as error:
                self.app.say(str(error), error=True)
            finally:
                call.close()  # it was not begun if the engine never came up

        self.app.run_worker(guarded(), group="control")

    # --- the application

    def do_chat(self, _: str) -> None:
        self.app.open_mode("chat")

    def do_inspect(self, _: str) -> None:
        self.app.open_mode("inspect")

    def do_lecture(self, _: str) -> None:
        self.app.open_mode("lecture")

    def do_theme(self, name: str) -> None:
        ours = [t for t in self.app.available_themes if t.startswith("minitui-")]
        wanted = f"minitui-{name}" if name and not name.startswith("minitui-") else name
        if wanted and wanted not in ours:
            raise EngineError(f"there is no theme {name!r}: {', '.join(t.removeprefix('minitui-') for t in ours)}")
        self.app.set_theme(wanted or ours[(ours.index(self.app.theme) + 1) % len(ours)])

    def do_help(self, _: str) -> None:
        self.app.show_help()

    def do_palette(self, _: str) -> None:
        left_out = {"palette", "slash", "write", "go"}
        if not has_chats(self.app):
            left_out |= {a.id for a in ACTIONS if a.group == "Chats"} | {"chat", "clear", "restart"}
        rows: list[tuple[str, str]] = []
        done: dict[str, Callable[[], Any]] = {}

        def add(title: str, id: str, key: str, slash: str, words: str, do: Callable[[], Any]) -> None:
            ways = (key_label(self.app.settings.keys.get(id, key)), slash and f"/{slash}")
            rows.append((title, f"{' '.join(way for way in ways if way):<18} {words}"))
            done[title] = do

        for a in offered(self.app.FEATURES):
            if a.id not in left_out:
                add(a.title, a.id, a.key, a.slash, a.help, partial(self.run, a.id))
        for here in keys_here(self.app):
            for b in here.bindings:
                if not MOVES.issuperset(b.key.split(",")):
                    do = partial(self.app.call_later, self.app.run_action, b.action, here.node)
                    title = b.description if b.description not in done else f"{b.description} ({here.name})"
                    add(title, b.id or "", b.key, "", f"{here.name}. {b.tooltip}".strip(), do)
        self.app.choose("Commands", rows, lambda title: done[title]())

    def do_quit(self, _: str) -> None:
        self.app.exit()
