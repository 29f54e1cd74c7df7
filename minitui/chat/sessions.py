"""Chats, without any terminal: what was said, the token ids it was made of, and the answers being written.

A conversation is token-exact. A session keeps the ids it sent and received; the next turn's prompt is what the chat
template renders, but wherever that says the same as what was kept, the kept ids stand, so that the blocks of earlier
turns are found in the cache. Where a template rewrites history (Qwen3's drops the thinking of earlier turns), the
prompt says at which token it leaves the kept ids, and why.

Answers run as tasks of one event loop; whoever shows them looks at `version` and the text, at his own pace.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.params import SamplingParams
from minitui.chat.prompt import END_THINK, THINK, Codec, Prompt, continue_prompt
from minitui.chat.store import Store, StoredChat, StoredMessage, StoreError
from minitui.sources.base import Source, Stream
from minitui.text import duration

logger = logging.getLogger("minitui")
SAVE_EVERY = 1.0  # seconds between two saves of an answer being written
STEADY = 0.2  # share of the window that arrivals must span before a rate is told: the first few tokens have none
MOST_RESTORED = 9  # tabs: more are no help
SAVE_AGAIN = 5.0  # seconds before the next attempt, when the chat file could not be written


def split_thinking(text: str) -> tuple[str, str, bool]:
    """`text` as (thinking, answer, still thinking): the part in <think> tags must not reach a Markdown parser, which
    would take it for HTML and drop it."""
    stripped = text.lstrip()
    if not stripped.startswith(THINK):
        # While streaming, "<thi" may yet become the tag.
        return ("", "", True) if stripped and THINK.startswith(stripped) else ("", text, False)
    inner, end, rest = stripped[len(THINK) :].partition(END_THINK)
    return inner.strip("\n"), rest.lstrip("\n"), not end


@dataclass
class Message:
    """One message. `state`: done | queued | running | cancelled | error. Metrics are the engine's, at its end."""

    role: str
    text: str = ""
    state: str = "done"
    error: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    created: float = field(default_factory=time.time)
    unfolded: bool = False  # its thinking is shown
    version: int = 0  # raised by every change

    @property
    def busy(self) -> bool:
        """True until its answer has ended."""
        return self.state in ("queued", "running")

    def touch(self) -> None:
        """Say that it changed."""
        self.version += 1


@dataclass
class Sampling:
    """How the answers of a chat are drawn; None leaves it to the checkpoint, then to the engine."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    seed: int | None = None
    ignore_eos: bool = False

    def params(self, defaults: dict[str, Any]) -> SamplingParams:
        """The engine's parameters; `defaults` are the checkpoint's (its generation_config)."""
        chosen: dict[str, Any] = {"temperature": 0.7, "max_tokens": None} | {
            k: v for k, v in defaults.items() if k in ("temperature", "top_p", "top_k") and v is not None
        }
        chosen |= {k: v for k, v in vars(self).items() if v is not None}
        return SamplingParams(**chosen)

    def set(self, name: str, text: str) -> str:
        """Set one by its name and value as typed; returns what to tell the user. Raises InvalidRequest."""
        kinds: dict[str, Callable[[str], Any]] = {
            "temperature": float,
            "top_p": float,
            "top_k": int,
            "max_tokens": int,
            "seed": int,
            "ignore_eos": _switch,
        }
        if name not in kinds:
            raise InvalidRequest(f"there is no setting {name!r}; there are {', '.join(kinds)}", name)
        try:
            value = None if text in ("", "default", "none") else kinds[name](text)
        except ValueError:
            raise InvalidRequest(f"{name} cannot be {text!r}", name) from None
        changed = replace(self)
        setattr(changed, name, bool(value) if name == "ignore_eos" else value)
        changed.params({}).validate(1 << 31)
        vars(self).update(vars(changed))
        return f"{name} is {'the default' if value is None else value} from the next message on"


def _switch(text: str) -> bool:
    if text.lower() not in ("on", "off", "true", "false", "1", "0", "yes", "no"):
        raise ValueError(text)
    return text.lower() in ("on", "true", "1", "yes")


@dataclass
class Session:
    """One chat. `ids` are those of the conversation as far as it was sent and received."""

    id: str
    title: str
    system: str
    sampling: Sampling = field(default_factory=Sampling)
    messages: list[Message] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    spelled_by: str = ""  # the checkpoint whose tokens the ids are
    parent: str | None = None
    named: bool = False  # the user chose the title
    note: str = ""  # shown under the transcript: "fork of 1 paging at message 4"
    request: int | None = None  # the engine's id of the answer being written, or of the last
    created: float = field(default_factory=time.time)
    _stream: Stream | None = None
    _cancelled: bool = False  # the engine has been asked to end the answer
    _task: asyncio.Task[None] | None = None
    _arrivals: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=128))

    @property
    def busy(self) -> bool:
        """True while an answer is asked for and has not ended."""
        return bool(self.messages) and self.messages[-1].busy

    @property
    def state(self) -> str:
        """idle | queued | running | done | cancelled | error, of the last message."""
        return self.messages[-1].state if self.messages else "idle"

    def rate(self, window: float = 1.0, now: float | None = None) -> float:
        """Tokens a second over the last `window` seconds, as they arrived; 0 until they span STEADY of it."""
        now = time.monotonic() if now is None else now
        recent = [(t, n) for t, n in self._arrivals if now - t <= window]
        if not recent or recent[-1][0] - recent[0][0] < STEADY * window:
            return 0.0
        return sum(n for _, n in recent[1:]) / (recent[-1][0] - recent[0][0])

    def forget_rate(self) -> None:
        """What has arrived until now says nothing of the rate from now on."""
        self._arrivals.clear()

    def conversation(self) -> list[dict[str, str]]:
        """What the template is given: the system prompt and every message that has text, but not an open answer."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return head + [
            {"role": m.role, "content": m.text} for m in self.messages if not m.busy and (m.text or m.role == "user")
        ]


LEADS = frozenset(
    [
        "a",
        "an",
        "and",
        "about",
        "are",
        "can",
        "could",
        "did",
        "do",
        "does",
        "explain",
        "for",
        "from",
        "give",
        "i",
        "in",
        "is",
        "it",
        "me",
        "mean",
        "of",
        "on",
        "please",
        "tell",
        "the",
        "to",
        "what",
        "whats",
        "when",
        "where",
        "which",
        "who",
        "would",
        "you",
        "your",
    ]
)


def title_of(question: str) -> str:
    """What a question is about, in at most 40 characters: its words without the small ones at its beginning."""
    words = question.strip().split("\n")[0].replace("?", " ").replace("!", " ").split()
    while len(words) > 1 and words[0].lower().rstrip(",.:;'") in LEADS:
        words.pop(0)
    title = ""
    for word in words:
        if title and len(title) + 1 + len(word) > 40:
            break
        title = f"{title} {word}".strip()[:40]
    return title.rstrip(".,;: ")


def new_id() -> str:
    """For a chat that is new in every chat file."""
    return uuid.uuid4().hex[:8]


class Chats:
    """All chats on one source. No method blocks; answers are written by tasks of the running loop."""

    def __init__(self, source: Source, store: Store | None = None, sampling: Sampling | None = None) -> None:
        self.source = source
        self.store = store
        self.sampling = sampling or Sampling()
        self.sessions: list[Session] = []
        self.codec: Codec | None = None  # set by `use`, once the checkpoint is known
        self._usable = asyncio.Event()
        self.on_end: Callable[[Session], None] = lambda session: None
        self.on_unsaved: Callable[[str], None] = lambda sentence: None  # told once each time that saving begins to fail
        self.unsaved: dict[str, Session] = {}  # what the chat file lacks, by id
        self.save_error = ""  # why it does
        self.left_out = ""  # what `restore` has not brought back, in words
        self._save_again = 0.0  # not before this moment

    def use(self, codec: Codec) -> None:
        """The checkpoint's tokenizer is there: questions that wait for it go out."""
        self.codec = codec
        self._usable.set()

    # --- which there are

    def new(self, system: str, title: str = "", parent: Session | None = None) -> Session:
        """A new, empty chat at the end of the list."""
        sampling = replace(parent.sampling if parent else self.sampling)
        session = Session(new_id(), title or "new chat", system, sampling, named=bool(title))
        self.sessions.append(session)
        return session

    def fork(self, session: Session) -> Session:
        """A chat that begins with everything said in `session` so far. Both will be answered from the same blocks.

        An answer still being written is taken as far as it stands.
        """
        fork = self.new(session.system, f"fork of {self.number(session)}", session)
        fork.named = False
        fork.messages = [replace(m, state="cancelled" if m.busy else m.state) for m in session.messages]
        fork.ids, fork.spelled_by = list(session.ids), session.spelled_by
        fork.parent = session.id
        origin = f"{self.number(session)} {session.title}"
        fork.note = f"forked from {origin}: the next question takes over the blocks of what stands above"
        self._save(fork, everything=True)
        return fork

    def reopen(self, id: str) -> Session:
        """Bring a chat of the store back to the list, closed or not; one that is on the list already is that. Of one
        that another minitui has open, a fork."""
        session = next((s for s in self.sessions if s.id == id), None)
        if session is None and (session := self.unsaved.get(id)) is not None:  # the file does not hold all of it
            self.sessions.append(session)
            self._save(session, everything=True)
        elif session is None:
            chat = self.store.load(id) if self.store else None
            if chat is None or self.store is None:
                raise InvalidRequest(f"there is no chat {id!r} in the chat file", "id")
            if self.store.claim(id):
                session = self._from_store(chat)
            else:  # two that write one chat would overwrite each other
                session = self._from_store(chat, "another minitui is still writing it")
                session.id, session.parent = new_id(), chat.id
                session.note = "another minitui has this chat open and goes on with it: this is a fork of what it holds"
            self.sessions.append(session)
            self._save(session, everything=True)
        return session

    def close(self, session: Session) -> None:
        """Cancel its answer and take it off the list; it stays in the store."""
        self._stop(session)  # at once: nothing of it comes later, and opens it again in the store
        self.sessions.remove(session)
        if self.store and session.messages:  # one in which nothing was said is not in the store
            try:
                self.store.close_chat(session.id)
            except StoreError as error:
                self._lacks(session, error)

    def rename(self, session: Session, title: str) -> None:
        """Give it a title that stays."""
        session.title, session.named = title.strip()[:40] or session.title, True
        self._save(session)

    def set_system(self, session: Session, system: str) -> None:
        """Change its system prompt: the next turn differs from the first tokens on."""
        session.system = system.strip()
        session.note = "the new system prompt holds from the next turn on" if session.messages else ""
        self._save(session)

    def number(self, session: Session) -> int:
        """Its place in the list, from 1."""
        return self.sessions.index(session) + 1

    @property
    def names(self) -> dict[str, str]:
        """What each is called, by the group of its requests."""
        return {session.id: f"{number} {session.title}" for number, session in enumerate(self.sessions, 1)}

    def restore(self) -> int:
        """Bring back the chats that were open when something was asked last; returns how many. `left_out` says
        what became of the others."""
        if self.store is None:
            return 0
        left = self.store.take_over(MOST_RESTORED)
        self.sessions += [self._from_store(chat) for chat in left.chats]
        told = []
        if left.elsewhere:
            one = left.elsewhere == 1
            told.append(
                f"{left.elsewhere} {'chat is' if one else 'chats are'} open in another minitui, which goes on with "
                f"{'it' if one else 'them'}: F finds {'it' if one else 'them'}, and opens a fork here."
            )
        if left.others:
            chats = "1 older chat that was" if left.others == 1 else f"{left.others} older chats that were"
            told.append(f"F {'also ' if told else ''}finds the {chats} kept.")
        self.left_out = " ".join(told)
        return len(left.chats)

    def _from_store(self, chat: StoredChat, why_cut: str = "cut short: minitui ended while it was written") -> Session:
        known = {k: v for k, v in chat.settings.items() if k in Sampling.__dataclass_fields__}
        session = Session(chat.id, chat.title, chat.system, Sampling(**known), parent=chat.parent, named=True)
        session.created = chat.created
        session.ids, session.spelled_by = chat.ids, chat.model
        for m in chat.messages:
            cut = m.state in ("queued", "running")
            state, error = ("cancelled", why_cut) if cut else (m.state, m.error)
            session.messages.append(Message(m.role, m.text, state, error, m.metrics or {}, m.created))
        return session

    # --- answers

    @property
    def model(self) -> str:
        """What the kept ids belong to: the checkpoint, by its name, or a codec that makes ids of its own."""
        return getattr(self.codec, "spelling", "") or str(self.source.info.get("model", ""))

    def asked(self) -> list[str]:
        """Every question of the chats on the list, the oldest first: what the prompt's history begins with."""
        said = [m for session in self.sessions for m in session.messages if m.role == "user"]
        return [m.text for m in sorted(said, key=lambda m: m.created)]

    def send(self, session: Session, text: str) -> None:
        """Ask. The message is saved first; the answer begins when the engine is ready.

        Raises InvalidRequest while the chat is still being answered.
        """
        if session.busy:
            raise InvalidRequest(
                f"chat {self.number(session)} is still answering: Esc cancels that, /new opens another", "prompt"
            )
        if not session.named and not session.messages:
            session.title = title_of(text) or session.title
        session.messages.append(Message("user", text))
        session.messages.append(Message("assistant", state="queued"))
        session.note = ""
        self._save(session, everything=True)
        session._task = asyncio.get_running_loop().create_task(self._answer(session, session.messages[-1]))

    def send_all(self, text: str) -> list[Session]:
        """Ask in every chat that is not answering; returns those."""
        asked = [s for s in self.sessions if not s.busy]
        for session in asked:
            self.send(session, text)
        return asked

    def retry(self, session: Session, text: str = "") -> None:
        """Ask the last question again, or `text` in its place. Raises InvalidRequest when there is none."""
        last = next((i for i in reversed(range(len(session.messages))) if session.messages[i].role == "user"), None)
        if last is None or session.busy:
            raise InvalidRequest("there is no finished answer to ask for again", "prompt")
        text = text.strip() or session.messages[last].text
        del session.messages[last:]
        self.send(session, text)

    def cancel(self, session: Session) -> bool:
        """End its answer, keeping what is there; False if there was none. Asked again, it waits for no engine."""
        if not session.busy:
            return False
        if session._cancelled:
            self._stop(session)
        elif session._stream is not None:
            session._cancelled = True
            with contextlib.suppress(EngineError):
                session._stream.cancel()  # the stream ends with finish_reason "abort"
        elif session._task is not None:
            session._task.cancel()
            self._end(session, session.messages[-1], "cancelled")
        return True

    def cancel_all(self) -> None:
        """End every answer and save what is there (the application closes)."""
        for session in self.sessions:
            self._stop(session)
        if stop := getattr(self.codec, "stop_rendering", None):
            stop()  # the thread that waits for a rendering would hold up the end of this process
        if self.unsaved:
            self._save_again = 0.0
            self._save(next(iter(self.unsaved.values())))

    def _stop(self, session: Session) -> None:
        """End its answer without waiting for the engine's last word on it."""
        if session.busy:
            if session._stream is not None:
                with contextlib.suppress(EngineError):
                    session._stream.cancel()
            if session._task is not None:
                session._task.cancel()
            self._end(session, session.messages[-1], "cancelled")

    def prompt(self, session: Session) -> Prompt:
        """The prompt of the next turn, from the template and the kept ids."""
        if self.codec is None:
            raise EngineError("the tokenizer is not loaded yet")
        rendered = self.codec.apply_chat_template(session.conversation(), add_generation_prompt=True)
        kept = session.ids if session.spelled_by == self.model else []
        return continue_prompt(rendered, kept, self.codec)

    async def _answer(self, session: Session, message: Message) -> None:
        try:
            await self.source.ready()
            await self._usable.wait()
            # The template and a long prompt's encoding cost milliseconds: not on the loop that draws.
            prompt = await asyncio.to_thread(self.prompt, session)
            params = session.sampling.params(self.source.info.get("generation") or {})
            stream = session._stream = self.source.submit(prompt.ids, params, group=session.id)
            reply: list[int] = []
            saved = time.monotonic()
            session.request = await stream.started()
            async for delta in stream:
                now = time.monotonic()
                message.state = "running"
                message.text += delta.text
                reply += delta.ids
                session.ids, session.spelled_by = prompt.ids + reply, self.model
                session._arrivals.append((now, len(delta.ids)))
                message.touch()
                if delta.metrics is not None:
                    message.metrics = dict(delta.metrics)
                    if prompt.diverges_at is not None:
                        message.metrics["diverged"] = {"at": prompt.diverges_at, "reason": prompt.reason}
                if delta.finish_reason:
                    self._finish(session, message, delta.finish_reason)
                    return
                if now - saved > SAVE_EVERY:
                    saved = now
                    self._save(session, last=True)
            self._end(session, message, "error", "the engine ended this answer without saying why")
        except asyncio.CancelledError:
            self._end(session, message, "cancelled")
        except EngineDead as error:
            sentence = str(error) if str(error)[-1:] in ".?!" else f"{error}."
            self._end(session, message, "error", f"{sentence} What was written so far is kept.")
        except EngineError as error:
            self._end(session, message, "error", str(error))
        except Exception as error:  # nobody awaits this task: the chat must not seem to be answering for ever
            logger.exception("the answer of chat %s", session.id)
            self._end(session, message, "error", f"{type(error).__name__}: {error}")

    def _finish(self, session: Session, message: Message, reason: str) -> None:
        if reason.startswith("error"):
            self._end(session, message, "error", reason.partition(":")[2].strip() or reason)
        else:
            message.metrics["finish"] = reason
            if reason == "length":  # whose limit was it?
                most = session.sampling.max_tokens
                message.metrics["full"] = most is None or message.metrics.get("output_tokens", most) < most
            self._end(session, message, "cancelled" if reason == "abort" else "done")

    def _end(self, session: Session, message: Message, state: str, error: str = "") -> None:
        if not message.busy:
            return
        message.state, message.error = state, error
        message.touch()
        session._stream = session._task = None
        session._cancelled = False
        self._save(session, last=True)
        self.on_end(session)

    # --- keeping

    def _save(self, session: Session, last: bool = False, everything: bool = False) -> None:
        """Keep it, with its last message or all of them. A file that cannot be written holds up nobody: what it lacks
        is remembered, told once, and saved as soon as that is possible."""
        if self.store is None or not session.messages:
            return
        if self.unsaved:
            self.unsaved[session.id] = session
            if time.monotonic() < self._save_again:
                return
        try:
            for lacking in list(self.unsaved.values()):
                self._write(self.store, lacking, 0)
                del self.unsaved[lacking.id]
            self._write(self.store, session, 0 if everything else len(session.messages) - (1 if last else 0))
        except StoreError as error:
            self._lacks(session, error)

    def _lacks(self, session: Session, error: StoreError) -> None:
        self._save_again = time.monotonic() + SAVE_AGAIN
        self.save_error, told = str(error), bool(self.unsaved)
        self.unsaved[session.id] = session
        if not told:
            self.on_unsaved(f"{error}. Chats go on, and are saved as soon as that is possible.")

    def _write(self, store: Store, session: Session, first: int) -> None:
        """The chat, its messages from `first` on, and that there are no more."""
        kept = dict(vars(session.sampling))
        with store.together():
            store.save_chat(
                StoredChat(
                    session.id, session.title, session.system, session.parent, kept, session.created,
                    session.spelled_by, session.ids, [],
                )
            )  # fmt: skip
            for position, m in list(enumerate(session.messages))[first:]:
                store.save_message(
                    session.id, position, StoredMessage(m.role, m.text, m.state, m.error, m.metrics, m.created)
                )
            if first == 0:
                store.truncate(session.id, len(session.messages))
            if session not in self.sessions:
                store.close_chat(session.id)


def describe_answer(message: Message) -> list[tuple[str, str]]:
    """The line under an answer as (text, tone) parts; tones: dim, hit, bad."""
    m = message.metrics
    parts: list[tuple[str, str]] = []
    if message.state == "cancelled":
        parts.append((message.error or "cancelled", "bad"))
    if message.state == "error":
        parts.append((message.error, "bad"))
    if not m:
        return parts
    if message.state == "cancelled" and not m.get("output_tokens"):
        return [("cancelled before its first token", "bad")]
    if m.get("ttft_ms") is not None:
        parts.append((f"first token {duration(m['ttft_ms'])}", "dim"))
    if m.get("decode_tok_s"):
        parts.append((f"{m['decode_tok_s']:,.0f} tok/s", "dim"))
    parts.append((f"{m.get('output_tokens', 0):,} tokens", "dim"))
    if m.get("finish") == "length":
        tokens = (m.get("prompt_tokens") or 0) + m.get("output_tokens", 0)
        full = f"stopped: prompt and answer may have {tokens:,} tokens together, context or pool hold no more"
        parts.append((full if m.get("full") else "stopped at the limit of its length", "dim"))
    if by := m.get("replica"):
        passed = " and ".join(str(number) for number in by["passed"])
        why = f", as {passed} did not answer" if passed else ""
        parts.append((f"replica {by['number']} ({by['name']}){why}", "dim"))
    total, cached = m.get("prompt_tokens", 0), m.get("cached_tokens", 0)
    if total is None or cached is None:  # a server of another make may not tell
        parts.append(("cache use unknown", "dim"))
        return parts
    parts.append((f"{cached:,} of {total:,} prompt tokens from cache", "hit" if cached else "dim"))
    if why := describe_match(m.get("match") or {}, total - cached):
        parts.append((why, "dim"))
    if m.get("drafted_tokens"):
        parts.append((f"{m['accepted_tokens']:,} of {m['drafted_tokens']:,} draft tokens right", "dim"))
    if m.get("preemptions"):
        parts.append((f"preempted {m['preemptions']}×", "bad"))
    if gone := m.get("diverged"):
        parts.append((f"{gone['reason']}: from token {gone['at']:,} on the prompt is a new text", "dim"))
    return parts


def describe_match(match: dict[str, Any], missed: int) -> str:
    """Why the cache did not hold the rest of a prompt, in a few words."""
    at = match.get("at")
    return {
        "whole": "all that can be shared",
        "differs": f"differs at token {at:,}" if isinstance(at, int) else "differs",
        "ends": "no more is cached",
        "short": f"the other {missed:,} are shorter than a block" if missed else "",
        "empty": "nothing cached begins like this",
        "evicted": f"evicted at step {at:,}" if isinstance(at, int) else "evicted",
    }.get(str(match.get("stop")), "")
