"""The application's chats on one source: the list of chats, the tasks that write their answers, and their saving.

A session keeps the token ids that it sent and received. The chat template renders the next prompt. Where the text is
the same, the kept ids replace the rendered ids: the prompt then matches the blocks of earlier turns, which are reused.
Some templates change earlier turns (Qwen3's template drops their thinking). `Prompt` then says from which token on the
prompt differs from the kept ids, and why.

Each answer is a task of the running event loop; the screens poll `Message.version`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from engine.errors import EngineDead, EngineError, InvalidRequest
from minitui.chat.conversation import LONGEST_TITLE, Message, Sampling, Session, new_id, title_of
from minitui.chat.prompt import Codec, Prompt, continue_prompt
from minitui.chat.store import Store, StoreError
from minitui.sources.base import Source, Stream

RETRY_S = 5.0
logger = logging.getLogger("minitui")
SAVE_EVERY_S = 1.0  # interval between saves of an unfinished answer
ACCEPTED_S = 0.1  # a question waits this long for the engine to accept the question before it
MOST_RESTORED = 9  # chats that `restore` reopens: more tabs are hard to use


class Chats:
    """All chats on one source. No method blocks."""

    def __init__(self, source: Source, store: Store | None = None, sampling: Sampling | None = None) -> None:
        self.source = source
        self.store = store
        self.saver = Saver(store)
        self.sampling = sampling or Sampling()
        self.sessions: list[Session] = []
        self._titles: dict[str, str] = {}  # also of removed chats: the panels still show their requests
        self.codec: Codec | None = None  # set by `use`, once the checkpoint is known
        self._usable = asyncio.Event()
        self._order = asyncio.Lock()  # questions reach the engine in the order in which they were sent
        self.on_end: Callable[[Session], None] = lambda session: None
        self.begins_in_cache: Callable[[list[int]], bool | None] = lambda ids: None  # of a prompt; None: unknown
        self.left_out = ""  # sentences about the chats that `restore` did not reopen

    def use(self, codec: Codec) -> None:
        """Sets the checkpoint's tokenizer and sends the waiting questions."""
        self.codec = codec
        self._usable.set()

    # --- the list

    def new(self, system: str, title: str = "", parent: Session | None = None) -> Session:
        """Adds a new, empty chat at the end of the list and returns it."""
        sampling = replace(parent.sampling if parent else self.sampling)
        session = Session(new_id(), title or "new chat", system, sampling, named=bool(title))
        self.sessions.append(session)
        return session

    def fork(self, session: Session) -> Session:
        """Returns a new chat with all messages of `session`, even an unfinished answer. Both chats share blocks."""
        fork = self.new(session.system, f"fork of #{self.number(session)}", session)
        fork.named = False
        fork.messages = [replace(m) for m in session.messages]
        _mark_cut_short(fork, "copied before the answer was complete")
        fork.ids, fork.ids_model = list(session.ids), session.ids_model
        fork.parent = session.id
        origin = f"#{self.number(session)} {session.title}"
        fork.note = f"forked from {origin}: the next question reuses the blocks of it that the cache still has"
        self.saver.save(fork, everything=True)
        return fork

    def reopen(self, id: str) -> Session:
        """Returns the chat with this id: from the list, or reopened from the store. If the chat is open in another
        minitui, returns a copy of it. Raises InvalidRequest for an unknown id."""
        session = next((s for s in self.sessions if s.id == id), None)
        if session is None and (session := self.saver.unsaved.get(id)) is not None:  # newer than the stored chat
            session.closed = False
            self.sessions.append(session)
            self.saver.save(session, everything=True)
        elif session is None:
            chat = self.store.load(id) if self.store else None
            if chat is None or self.store is None:
                raise InvalidRequest(f"the chat file has no chat {id!r}", "id")
            if self.store.claim(id):
                session = _mark_cut_short(chat)
            else:  # two processes would overwrite each other's messages
                session = _mark_cut_short(chat, "another minitui is still writing this answer")
                session.id, session.parent = new_id(), chat.id
                session.note = "this is a copy: the chat is open in another minitui"
            self.sessions.append(session)
            self.saver.save(session, everything=True)
        return session

    def close(self, session: Session) -> None:
        """Cancels the chat's answer and removes the chat from the list, but not from the store."""
        self._stop(session)  # before close_chat: a save of the answer would reopen the chat in the store
        self.sessions.remove(session)
        self.saver.close_chat(session)

    def rename(self, session: Session, title: str) -> None:
        """Sets the chat's title; later questions do not change it."""
        session.title, session.named = title.strip()[:LONGEST_TITLE] or session.title, True
        self.saver.save(session)

    def set_system(self, session: Session, system: str) -> None:
        """Changes the chat's system prompt. The next prompt then differs from the kept ids in its first tokens."""
        session.system = system.strip()
        session.note = "the new system prompt applies from the next question on" if session.messages else ""
        self.saver.save(session)

    def number(self, session: Session) -> int:
        """Returns the chat's position in the list, from 1."""
        return self.sessions.index(session) + 1

    @property
    def names(self) -> dict[str, str]:
        """The name of each chat, by the group of the chat's requests. A removed chat has no number."""
        self._titles |= {session.id: session.title for session in self.sessions}
        return self._titles | {session.id: f"#{at} {session.title}" for at, session in enumerate(self.sessions, 1)}

    def restore(self) -> int:
        """Reopens the chats of the minitui process that was used last; returns their number. Sets `left_out`."""
        if self.store is None:
            return 0
        reopened = self.store.take_over(MOST_RESTORED)
        self.sessions += [_mark_cut_short(chat) for chat in reopened.chats]
        sentences = []
        if reopened.elsewhere:
            chats = "1 chat is" if reopened.elsewhere == 1 else f"{reopened.elsewhere} chats are"
            sentences.append(f"{chats} open in another minitui: F opens a copy here.")
        if reopened.others:
            chats = "1 older chat" if reopened.others == 1 else f"{reopened.others} older chats"
            sentences.append(f"F {'also ' if sentences else ''}finds {chats}.")
        self.left_out = " ".join(sentences)
        return len(reopened.chats)

    # --- answers

    @property
    def model(self) -> str:
        """The name of the checkpoint, or of a codec with its own ids. Token ids are valid for this name only."""
        return getattr(self.codec, "spelling", "") or self.source.info.model

    def asked(self) -> list[str]:
        """Returns every question of the listed chats, oldest first."""
        questions = [message for session in self.sessions for message in session.questions]
        return [m.text for m in sorted(questions, key=lambda m: m.created)]

    def send(self, session: Session, text: str, like: Session | None = None) -> None:
        """Saves and sends a question; the answer starts when the engine is ready. `like`: a chat with the same prompt.
        If nothing of the prompt is in the cache, a request of that chat computes it before. Raises InvalidRequest while
        an earlier answer is unfinished."""
        if session.busy:
            raise InvalidRequest(
                f"chat {self.number(session)} is still answering: Esc cancels, /new opens another chat", "prompt"
            )
        if not session.named and not session.messages:
            session.title = title_of(text) or session.title
        session.messages.append(Message("user", text))
        session.messages.append(Message("assistant", state="queued"))
        session.note = ""
        self.saver.save(session, everything=True)
        session._task = asyncio.get_running_loop().create_task(self._answer(session, session.messages[-1], like))

    def replay(self, source: Session, text: str) -> Session:
        """Asks the question in a new chat with the system prompt of `source`; returns this chat."""
        session = self.new(source.system, f"replay of #{self.number(source)}", source)
        session.named = False
        self.send(session, text, None if source.busy else source)
        return session

    def send_all(self, text: str) -> list[Session]:
        """Sends the question in every idle chat; returns these chats."""
        asked = [s for s in self.sessions if not s.busy]
        for session in asked:
            self.send(session, text)
        return asked

    def retry(self, session: Session, text: str = "") -> None:
        """Asks the last question again, or `text` instead. Raises InvalidRequest if there is no finished answer."""
        last = next((i for i in reversed(range(len(session.messages))) if session.messages[i].role == "user"), None)
        if last is None or session.busy:
            raise InvalidRequest("there is no finished answer to retry", "prompt")
        text = text.strip() or session.messages[last].text
        del session.messages[last:]
        self.send(session, text)

    def cancel(self, session: Session) -> bool:
        """Cancels the chat's answer and keeps its text so far; returns False if the chat has no unfinished answer. A
        second call ends the answer without waiting for the engine."""
        if not session.busy:
            return False
        if session._cancelled:
            self._stop(session)
        elif session._stream is not None:
            session._cancelled = True
            with contextlib.suppress(EngineError):
                session._stream.cancel()  # the stream then ends with finish_reason "abort"
        elif session._task is not None:
            session._task.cancel()
            self._end(session, session.messages[-1], "cancelled")
        return True

    def cancel_all(self, error: str = "") -> None:
        """Ends and saves every unfinished answer: as cancelled, or with the error that ended it."""
        for session in self.sessions:
            self._stop(session, error)
        if stop := getattr(self.codec, "stop_rendering", None):
            stop()  # a thread that waits for a rendered template would delay the exit of this process
        self.saver.retry_now()

    def _stop(self, session: Session, error: str = "") -> None:
        """Ends the chat's answer without waiting for the engine. `error`: see `cancel_all`."""
        if session.busy:
            if session._stream is not None:
                with contextlib.suppress(EngineError):
                    session._stream.cancel()
            if session._task is not None:
                session._task.cancel()
            self._end(session, session.messages[-1], "error" if error else "cancelled", error)

    def prompt(self, session: Session) -> Prompt:
        """Returns the next prompt, from the template and the kept ids."""
        if self.codec is None:
            raise EngineError("the tokenizer is not loaded yet")
        rendered = self.codec.apply_chat_template(session.conversation(), add_generation_prompt=True)
        kept = session.ids if session.ids_model == self.model else []
        return continue_prompt(rendered, kept, self.codec)

    async def _submit(self, session: Session, like: Session | None) -> tuple[Prompt, Stream]:
        """Sends the chat's next prompt after all prompts that were sent before. `like`: see `send`."""
        async with self._order:
            await self.source.ready()
            await self._usable.wait()
            # The template and the encoding take milliseconds and would block drawing in this event loop.
            prompt = await asyncio.to_thread(self.prompt, session)
            params = session.sampling.params(self.source.info.generation)
            computed = like is not None and self.begins_in_cache(prompt.ids) is False
            if computed:
                assert like is not None
                params, group = replace(params, max_tokens=1), like.id
                session.primed = True
            else:
                group = session.id
            stream = session._stream = self.source.submit(prompt.ids, params, group=group)
            accepted = asyncio.ensure_future(stream.started())
            try:
                await asyncio.wait([accepted], timeout=ACCEPTED_S)
            except asyncio.CancelledError:
                accepted.cancel()
                raise
        try:
            session.request = await accepted
        finally:
            accepted.cancel()
        if not computed:
            return prompt, stream
        async for _ in stream:
            pass
        if session._cancelled:
            raise asyncio.CancelledError
        return await self._submit(session, None)

    async def _answer(self, session: Session, message: Message, like: Session | None) -> None:
        try:
            prompt, stream = await self._submit(session, like)
            saved = time.monotonic()
            async for delta in stream:
                now = time.monotonic()
                if message.state != "running":
                    message.state = "running"
                    session.ids, session.ids_model = list(prompt.ids), self.model
                message.text += delta.text
                session.ids += delta.ids
                session._arrivals.append((now, len(delta.ids)))
                message.touch()
                if delta.finish_reason and delta.metrics is not None:  # the first delta may have a part of them
                    message.metrics = dict(delta.metrics)
                    if prompt.diverges_at is not None:
                        message.metrics["diverged"] = {"at": prompt.diverges_at, "reason": prompt.reason}
                if delta.finish_reason:
                    self._finish(session, message, delta.finish_reason)
                    return
                if now - saved > SAVE_EVERY_S:
                    saved = now
                    self.saver.save(session, last=True)
            self._end(session, message, "error", "the engine ended this answer without a reason")
        except asyncio.CancelledError:
            self._end(session, message, "cancelled")
        except EngineDead as error:
            sentence = str(error) if str(error)[-1:] in ".?!" else f"{error}."
            self._end(session, message, "error", f"{sentence} The text so far is kept.")
        except EngineError as error:
            self._end(session, message, "error", str(error))
        except Exception as error:  # no code awaits this task; an uncaught error would leave the chat busy for ever
            logger.exception("the answer of chat %s", session.id)
            self._end(session, message, "error", f"{type(error).__name__}: {error}")

    def _finish(self, session: Session, message: Message, reason: str) -> None:
        if reason.startswith("error"):
            self._end(session, message, "error", reason.partition(":")[2].strip() or reason)
        else:
            message.metrics["finish"] = reason
            if reason == "length":  # max_tokens is reached, or the context or the pool is full
                most = session.sampling.max_tokens
                message.metrics["full"] = most is None or message.metrics.get("output_tokens", most) < most
            if reason == "abort" and not session._cancelled:
                self._end(session, message, "error", "the engine ended this answer before it was complete")
            else:
                self._end(session, message, "cancelled" if reason == "abort" else "done")

    def _end(self, session: Session, message: Message, state: str, error: str = "") -> None:
        if not message.busy:
            return
        message.state, message.error = state, error
        message.touch()
        session._stream = session._task = None
        session._cancelled = False
        self.saver.save(session, last=True)
        self.on_end(session)


def _mark_cut_short(
    stored: Session, reason: str = "cut short: minitui ended before the answer was complete"
) -> Session:
    """Marks the unfinished answer of a stored chat as cancelled; returns the chat."""
    for message in stored.messages:
        if message.busy:
            message.state, message.error = "cancelled", reason
    return stored


class Saver:
    """Writes chats to `store`; does nothing if `store` is None. If the file cannot be written, `unsaved` keeps
    the chats until a later attempt succeeds."""

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self.unsaved: dict[str, Session] = {}  # by id
        self.error = ""  # the reason why chats could not be saved
        self.on_unsaved: Callable[[str], None] = lambda sentence: None  # called once, not at failed retries
        self._retry_at = 0.0

    def save(self, session: Session, last: bool = False, everything: bool = False) -> None:
        """Saves the chat's row; with `last` also its last message, with `everything` all its messages."""
        if self.store is None or not session.messages:
            return
        if self.unsaved:
            self.unsaved[session.id] = session
            if time.monotonic() < self._retry_at:
                return
        try:
            for waiting in list(self.unsaved.values()):
                self._write(self.store, waiting, 0)
                del self.unsaved[waiting.id]
            self._write(self.store, session, 0 if everything else len(session.messages) - (1 if last else 0))
        except StoreError as error:
            self._failed(session, error)

    def close_chat(self, session: Session) -> None:
        """Marks the chat as closed in the file."""
        if self.store is None or not session.messages:  # empty chats are not in the file
            return
        session.closed = True
        try:
            self.store.close_chat(session.id)
        except StoreError as error:
            self._failed(session, error)

    def retry_now(self) -> None:
        """Tries to save the unsaved chats at once, even if RETRY_S has not passed."""
        if self.unsaved:
            self._retry_at = 0.0
            self.save(next(iter(self.unsaved.values())))

    def _failed(self, session: Session, error: StoreError) -> None:
        self._retry_at = time.monotonic() + RETRY_S
        self.error, failing = str(error), bool(self.unsaved)
        self.unsaved[session.id] = session
        if not failing:
            self.on_unsaved(f"{error}. Chats continue, and are saved as soon as possible.")

    def _write(self, store: Store, session: Session, first: int) -> None:
        """Writes the chat and its messages from position `first` on. If `first` is 0, also deletes removed messages."""
        with store.together():
            store.save_chat(session)
            for position, message in list(enumerate(session.messages))[first:]:
                store.save_message(session.id, position, message)
            if first == 0:
                store.truncate(session.id, len(session.messages))
            if session.closed:
                store.close_chat(session.id)
