"""The actions on chats: ask, fork, replay, edit, search, copy, export."""

from __future__ import annotations

import textwrap
import time

from engine.errors import EngineError
from minitui.chat import transcripts
from minitui.chat.alternatives import known_tokens
from minitui.chat.conversation import Session
from minitui.chat.describe import split_thinking
from minitui.tui.apps.app_base import AppBase
from minitui.tui.screens.chat import ChatScreen
from minitui.tui.screens.tokens import TokensScreen
from minitui.tui.widgets.rows import whole_words

FIRST_QUESTION = "What is a radix tree?"
MAX_DIGITS = 12


def whole_number(text: str) -> int | None:
    """Returns a whole number of at most MAX_DIGITS digits; None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS else None


class ChatCommands:
    """One method per action, named `do_<id>` as in Commands."""

    def __init__(self, app: AppBase) -> None:
        self.app = app

    @property
    def session(self) -> Session:
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
        self.app.to_now()
        source = self.session
        asked = next((m.text for m in source.messages if m.role == "user"), None)
        if asked is None:  # nothing is cached yet: this chat computes the system prompt, and the new chat reuses it
            asked = FIRST_QUESTION
            self.app.chats.send(source, asked)
        replay = self.app.chats.replay(source, asked)
        replay.note = (
            f"asks the first question of chat {self.app.chats.number(source)} again, with the same system prompt: the "
            "line under the answer says how much of the prompt came from the cache"
        )
        self.app.replays.append(replay.id)
        self.app.select_session(replay)

    def do_all(self, text: str) -> None:
        if not text:
            self.app.focus_prompt("/all ")
            return
        self.app.to_now()
        asked = self.app.chats.send_all(text)
        left = len(self.app.chats.sessions) - len(asked)
        sent = f"sent to {len(asked)} chat{'s' if len(asked) != 1 else ''}"
        self.app.say(sent + (f"; {left} chat{' is' if left == 1 else 's are'} still answering" if left else ""))

    def do_cancel(self, _: str) -> None:
        if not self.app.chats.cancel(self.session):
            self.app.say("no answer is being written in this chat")

    def do_retry(self, _: str) -> None:
        self.app.to_now()
        self.app.chats.retry(self.session)

    def do_edit(self, text: str) -> None:
        session = self.session
        asked = next((m.text for m in reversed(session.messages) if m.role == "user"), None)
        if asked is None:
            raise EngineError("there is no question to edit yet: ask something first")
        if session.busy:
            raise EngineError("the answer is still being written: press Esc to cancel it, then edit the question")
        if text:
            self._resend(session, text)
        else:
            self.app.ask_text("Your last question", asked, lambda t: self._resend(session, t), lines=True)

    def _resend(self, session: Session, text: str) -> None:
        try:
            self.app.to_now()
            self.app.chats.retry(session, text)
        except EngineError as error:
            self.app.say(str(error), error=True)

    def do_search(self, words: str) -> None:
        store = self.app.chats.store
        if store is None:
            raise EngineError("the chats of this run are not saved, so there is nothing to search")
        found = store.search(words)
        if not found:
            raise EngineError(f"no chat contains {words!r}" if words else "no chat is saved yet")
        rows, ids = [], {}
        for chat in found:
            name = f"{chat.title[:28]:<28} {time.strftime('%d %b %H:%M', time.localtime(chat.created))}"
            while name in ids:
                name += " "
            ids[name] = chat.id
            rows.append((name, textwrap.shorten(chat.line, 80, placeholder="…")))
        self.app.choose("Saved chats", rows, lambda name: self._open(ids[name], words))

    def _open(self, id: str, words: str) -> None:
        """Open a stored chat at the passage that contains one of the words."""
        session = self.app.chats.reopen(id)
        self.app.select_session(session)
        self.app.open_mode("chat")
        screen = self.app.screen
        if isinstance(screen, ChatScreen) and screen.is_mounted:
            screen.transcript.show(session)
            screen.transcript.go_to(words.split())

    def do_next(self, _: str) -> None:
        self._go(self.app.chats.number(self.session) % len(self.app.chats.sessions) + 1)

    def do_previous(self, _: str) -> None:
        self._go((self.app.chats.number(self.session) - 2) % len(self.app.chats.sessions) + 1)

    def do_go(self, number: str) -> None:
        count = len(self.app.chats.sessions)
        wanted = whole_number(number)
        if wanted is None or not 1 <= wanted <= count:
            raise EngineError(f"there is no chat {number[:40]!r}: there are chats 1 to {count}")
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
        self.app.say(
            "the next turn begins with the new system prompt: the cached blocks of this chat do not match it"
        )

    def do_ask(self, word: str) -> None:
        fits = [q for q in self.app.known_questions if word.lower() in q.lower()]
        if not fits:
            raise EngineError(
                f"no known question contains {word!r}" if word and self.app.known_questions
                else "this model has no list of known questions: ask anything"
            )
        self.app.choose("Known questions", [(q, "") for q in fits], self.app.ask_question)

    def do_set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not name:
            known = {k: f"{v} (default)" for k, v in self.app.source.info.generation.items()}
            values = vars(self.session.sampling).items()
            self.app.say("; ".join(f"{k} {known.get(k, 'default') if v is None else v}" for k, v in values))
            return
        self.app.say(self.session.sampling.set(name, value.strip(), self.app.source.cannot_use))

    def do_think(self, _: str) -> None:
        answers = [m for m in self.session.messages if m.role == "assistant"]
        if not any(split_thinking(m.text)[0] for m in answers):
            raise EngineError("no answer in this chat has thinking to show")
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
            raise EngineError(f"/copy takes `code`, `chat` or nothing, not {what!r}; Y shows a list to choose from")
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
        texts = [(kind, whole_words(" ".join(text.split()), 100)) for kind, text in found]
        rows = [(f"{n:>3} {kind:<9}", text) for n, (kind, text) in enumerate(texts, 1)]
        self.app.choose("Copy", rows, lambda row: self._copy(*found[int(row.split()[0]) - 1]))

    def do_tokens(self, _: str) -> None:
        ids = known_tokens(self.app.chats, self.session)
        prompt = self.session.messages[-1].metrics.get("prompt_tokens", len(ids))
        self.app.push_screen(TokensScreen(self.app.chats, ids, prompt))

    def do_export(self, name: str) -> None:
        path = transcripts.named_file(name or transcripts.file_name(self.session))
        transcripts.write(self.session, path)
        self.app.say(f"written to {path.resolve()}")

    def do_attach(self, name: str) -> None:
        if not name:
            self.app.focus_prompt("/attach ")
            return
        self.app.focus_prompt(transcripts.quoted_file(transcripts.named_file(name)))

