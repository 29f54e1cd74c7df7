"""Makes records without a model: simulated chats and a simulated clock drive the real scheduler and cache.

The panels show splits, evictions and preemptions as with a real engine, but without forward passes. One core
simulates a thousand steps a second with 256 requests and 44,000 blocks. The same seed gives the same records.
`python -m minitui.dev.panel NAME` shows a panel over them.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.core.cache import KVCache
from engine.core.commit import Committer
from engine.core.request import Request
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.core.step import Scheduled, StepResult
from engine.params import SamplingParams
from engine.trace.records import Record, RecordLog
from minitui.viewmodel.view import View

START, END, NEWLINE, SYSTEM, USER, ASSISTANT = range(6)
SPECIALS = ["<|im_start|>", "<|im_end|>", "\n", "system", "user", "assistant"]

SYSTEM_PROMPTS = (
    "You are a patient teacher of inference systems. Answer in a few sentences and give an example when it helps.",
    "You are a careful reviewer of code. Point at the line, say what is wrong, and suggest the smallest change.",
    "You summarise papers for busy engineers: the claim, the evidence, the limits, in that order.",
    "You are a translator who keeps the tone of the original and explains idioms in a note.",
    "You write short poems about machines and the people who look after them.",
    "You answer questions of operators at night: first what to do now, then why it happened.",
)
OPENINGS = (
    "Explain {} to a first-year student.",
    "What is {} and when does it matter?",
    "Why is {} slow on my machine?",
    "Summarise the paper about {} in five lines.",
    "Write a haiku about {}.",
    "Compare {} with what came before it.",
    "def {}(n): what does this function do?",
    "How would you measure {}?",
)
TOPICS = (
    "paged attention", "the radix tree", "continuous batching", "prefill", "a block table", "speculative decoding",
    "the KV cache", "tensor parallelism", "chunked prefill", "quantisation", "a CUDA graph", "the scheduler", "fib",
)
FOLLOW_UPS = (
    "And when is a block shared?",
    "Give me an example with numbers.",
    "Why?",
    "What are the limits?",
    "What is the main result?",
    "Shorter, please.",
)
WORDS = (  # noqa: SIM905  a hundred words are easier to read as a sentence
    "a the of in and to is it that for with as on by this block token request step cache tree table memory pool "
    "prefix model layer head query key value attention kernel queue batch budget row graph device host time tokens "
    "blocks requests shared private free full next last first each every reads writes holds waits runs starts ends "
    "because so then when while until after before without one two three four sixteen many few more less than"
).split()


@dataclass(frozen=True, slots=True)
class Load:
    """The traffic of a simulation."""

    blocks: int = 640
    block_size: int = 16
    chats: int = 12  # number of chats
    rows: int = 64
    budget: int = 512
    context: int = 2048
    reply: tuple[int, int] = (40, 240)  # tokens
    think: float = 1.5  # mean seconds between an answer and the next question
    turns: int = 6  # questions of a chat; then a new chat replaces it
    system_repeat: int = 2  # repetitions of the system prompt's sentences
    paste: float = 0.08  # share of the questions with a long pasted text
    step_ms: float = 3.0  # duration of a decode step of one row
    probes: float = 0.0  # single short questions per second, outside the chats; each adds a leaf to the tree
    seed: int = 0


SMALL = Load(blocks=64, chats=3, rows=8, budget=128, context=512, reply=(24, 60), turns=3, step_ms=3.0)
CLASSROOM: Load = Load(chats=8, reply=(60, 400), think=1.2)
LARGE = Load(
    blocks=44_000, chats=256, rows=288, budget=2048, context=2048, reply=(200, 900), think=0.05, turns=4,
    system_repeat=12, step_ms=0.2, probes=520,
)
PROBE = -1  # the chat index of a probe, which belongs to no chat


class Words:
    """A word-level tokenizer, so that prompts and replies have text."""

    def __init__(self) -> None:
        self.words = list(SPECIALS)
        self._ids = {word: i for i, word in enumerate(self.words)}

    def encode(self, text: str) -> list[int]:
        return [self._id(word) for word in text.split()]

    def _id(self, word: str) -> int:
        token = self._ids.get(word)
        if token is None:
            token = self._ids[word] = len(self.words)
            self.words.append(word)
        return token

    def decode(self, ids: Sequence[int]) -> str:
        out: list[str] = []
        for token in ids:
            if token >= len(SPECIALS) and out and out[-1] not in SPECIALS:
                out.append(" ")
            out.append(self.words[token])
        return "".join(out)


@dataclass(slots=True)
class _Chat:
    name: str
    ids: list[int]
    turn: int = 0
    question: str = ""
    reply: deque[int] = field(default_factory=deque)


class Stress:
    """Chats, their scheduler and its log; `run(seconds)` simulates this much time."""

    def __init__(self, load: Load = CLASSROOM) -> None:
        self.load = load
        self.now = 0.0
        self.log = RecordLog(clock=lambda: self.now)
        self.cache = KVCache(load.blocks + 1, load.block_size, self.log)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=load.budget, max_num_seqs=load.rows, max_model_len=load.context),
            self.cache,
            self.log,
        )
        self.committer = Committer(self.scheduler)
        self.words = Words()
        self.closed = False  # the gate
        self.pace = 1.0
        self.steps_run = 0
        self.group_names: dict[str, str] = {}
        self._random = random.Random(load.seed)
        self._chats: dict[int, _Chat] = {}
        self._submitted: dict[int, tuple[float, float]] = {}  # request id -> time of (submission, admission or 0)
        self._speaking: list[tuple[float, int]] = []  # heap of (time of the next question, chat index)
        self._people: list[_Chat] = []
        self._next_id = 1
        for i in range(load.chats):
            self._people.append(self._new_chat(i))
            heapq.heappush(self._speaking, (self._random.random() * min(4.0, 0.25 * load.chats), i))
        if load.probes:
            heapq.heappush(self._speaking, (1 / load.probes, PROBE))

    # ---- as a source

    def drain(self) -> list[Record]:
        return self.log.drain()

    def show(self, view: View) -> list[Record]:
        """Folds the records since the last call into a view, and begins its next picture. Returns the records."""
        records = self.drain()
        view.fold(records, self.now)
        view.frame(self.now)
        return records

    def gate(self, closed: bool, reason: str = "you") -> None:
        """Closes or opens the gate between two steps."""
        self.closed = closed
        self.log.append("gate", "closed" if closed else "open", reason)

    def run(self, seconds: float) -> None:
        """Simulates this much time; runs no steps while the gate is closed."""
        end = self.now + seconds
        while self.now < end:
            self._ask()
            if self.closed or not self.scheduler.has_work:
                upcoming = self._speaking[0][0] if self._speaking else end
                self.now = min(end, max(upcoming, self.now + 1e-3))
                continue
            self.step()

    def run_steps(self, n: int) -> None:
        """Runs exactly `n` steps, even while the gate is closed. Time without requests is skipped."""
        target = self.steps_run + n
        while self.steps_run < target:
            self._ask()
            if not self.scheduler.has_work:
                self.now = max(self.now, self._speaking[0][0])
                continue
            self.step()

    # ---- one step

    def step(self) -> None:
        """Plans a step, invents its tokens, commits it."""
        begin = self.now
        scheduled = self.scheduler.plan()
        if scheduled is None:
            self.now += 1e-3
            return
        plan, requests = scheduled.plan, scheduled.requests
        joined = {settings.row for settings in plan.joins}
        for request in self.scheduler.running if joined else ():
            if request.row in joined:
                submitted, _ = self._submitted[request.id]
                self._submitted[request.id] = (submitted, begin)
        prefill = plan.num_tokens - plan.num_decodes
        device_ms = self._device_ms(plan.num_decodes, prefill)
        plan_us = 40 + 1.2 * len(requests) + self._random.random() * 20
        launch_us = 90 + self._random.random() * 25
        commit_us = 30 + 0.9 * len(requests)
        self.now = begin + (plan_us + launch_us + commit_us) / 1e6 + device_ms / 1e3
        first = [
            request for i, request in enumerate(requests)
            if plan.samples[i] and request.in_flight and len(request.ids) == request.prompt_len
        ]
        emitted = self.committer.commit(scheduled, self._draw(scheduled))
        for request in first:
            submitted, admitted = self._submitted[request.id]
            prefill_ms = (self.now - admitted) * 1e3
            self.log.append("first", request.id, (admitted - submitted) * 1e3, prefill_ms)
        kind = "decode" if not prefill else "mixed" if plan.num_decodes else "prefill"
        wall_ms = (self.now - begin) * 1e3
        self.log.append("parts", plan.step, commit_us, 0, 0, plan_us, launch_us, device_ms * 1e3, 0, 0, 0)
        self.log.append("time", plan.step, plan_us, launch_us, commit_us, wall_ms, device_ms, kind)
        self.now = begin + (self.now - begin) * self.pace
        self.steps_run += 1
        for out in emitted:
            if out.finish_reason:
                self._answered(out.request)

    def _device_ms(self, decodes: int, prefill: int) -> float:
        base = self.load.step_ms * (1 + 0.004 * decodes + 0.004 * prefill)
        if self._random.random() < 0.002:
            base *= 2.5
        return base * (0.96 + 0.08 * self._random.random())

    def _draw(self, scheduled: Scheduled) -> StepResult:
        ids = []
        for request, samples in zip(scheduled.requests, scheduled.plan.samples, strict=True):
            reply = self._chats[request.id].reply
            ids.append((reply.popleft() if reply else END) if samples else -1)
        return StepResult(ids)

    # ---- the chats

    def _new_chat(self, index: int) -> _Chat:
        system = SYSTEM_PROMPTS[index % len(SYSTEM_PROMPTS)]
        ids = [START, SYSTEM, NEWLINE, *self.words.encode(" ".join([system] * self.load.system_repeat)), END, NEWLINE]
        return _Chat(f"chat-{index + 1}", ids)

    def _ask(self) -> None:
        while self._speaking and self._speaking[0][0] <= self.now:
            when, index = heapq.heappop(self._speaking)
            if index == PROBE:
                heapq.heappush(self._speaking, (when + 1 / self.load.probes, PROBE))
                words = self._babble(self._random.randint(12, 40))
                chat = _Chat("passer-by", [])
                self._submit(PROBE, chat, "passer-by", [START, USER, NEWLINE, *words, END, START, ASSISTANT], 2)
                continue
            chat = self._people[index]
            if chat.turn >= self.load.turns:
                chat = self._people[index] = self._new_chat(index)
            question = self._question(chat)
            text = self.words.encode(question)
            if self._random.random() < self.load.paste:
                text += self._babble(self._random.randint(self.load.context // 6, self.load.context // 3))
            ids = [*chat.ids, START, USER, NEWLINE, *text, END, NEWLINE, START, ASSISTANT, NEWLINE]
            if len(ids) + self.load.reply[1] > self.load.context:
                self._people[index] = self._new_chat(index)
                heapq.heappush(self._speaking, (self.now + 0.01, index))
                continue
            self._submit(index, chat, question, ids)

    def _submit(self, index: int, chat: _Chat, question: str, ids: list[int], tokens: int = 0) -> None:
        chat.question = question
        if index != PROBE:
            self.group_names[chat.name] = f"{index + 1} {question.split('?')[0][:18]}"
        reply = self._babble(tokens or self._random.randint(*self.load.reply))
        params = SamplingParams(max_tokens=self.load.reply[1] + 8)
        request = Request(
            id=self._next_id,
            ids=ids,
            params=params,
            seed=0,
            max_total=self.scheduler.limit_for(len(ids), params),
            stop_ids=frozenset({END}),
            group=chat.name,
            prompt_len=len(ids),
        )
        self._next_id += 1
        self._chats[request.id] = _Chat(chat.name, ids, index, question, deque(reply))
        self._submitted[request.id] = (self.now, 0.0)
        self.scheduler.add(request)

    def _answered(self, request: Request) -> None:
        index = self._chats.pop(request.id).turn  # `_submit` stores the index of the chat as `turn`
        del self._submitted[request.id]
        if index == PROBE:
            return
        chat = self._people[index]
        chat.ids = [*request.ids, NEWLINE]
        chat.turn += 1
        heapq.heappush(self._speaking, (self.now + self._random.expovariate(1 / self.load.think), index))

    def _question(self, chat: _Chat) -> str:
        if chat.turn and self._random.random() < 0.8:
            return self._random.choice(FOLLOW_UPS)
        return self._random.choice(OPENINGS).format(self._random.choice(TOPICS))

    def _babble(self, n: int) -> list[int]:
        return [self.words._id(word) for word in self._random.choices(WORDS, k=n)]
