"""A Source in this process: the real scheduler, cache, tree and records, over a device that answers from a script. So
the application's tests see true records and true metrics in milliseconds, without weights and without a process."""

from __future__ import annotations

import asyncio
import codecs
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.core.engine import Engine
from engine.core.request import Grammar, Request
from engine.core.scheduler import Scheduler, SchedulerConfig
from engine.core.step import StepPlan, StepResult, TokenLogprobs
from engine.errors import EngineDead, EngineError, InvalidRequest
from engine.info import EngineInfo
from engine.params import SamplingParams
from engine.process.heartbeat import Condition
from engine.text.output import Delta, OutputProcessor
from engine.trace.records import Record
from minitui.chat.conversation import Sampling
from minitui.sources.base import Source

START, END, VOCABULARY = 256, 257, 258


def sampling(max_tokens: int) -> Sampling:
    """Greedy sampling: every run writes the same text."""
    return Sampling(temperature=0.0, max_tokens=max_tokens)


class ByteCodec:
    """A tokenizer whose tokens are bytes, with a template in the manner of Qwen's."""

    special_ids = frozenset({START, END})

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        parts, run = [], bytearray()
        for token in [*ids, START]:
            if token < 256:
                run.append(token)
                continue
            parts.append(run.decode("utf-8", "replace"))
            run.clear()
            if not skip_special_tokens:
                parts.append("<start>" if token == START else "<end>")
        return "".join(parts[:-1] if not skip_special_tokens else parts)

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        ids: list[int] = []
        for m in messages:
            content = m["content"]
            if m["role"] == "assistant" and "</think>" in content:  # as Qwen3's template does
                content = content.partition("</think>")[2].lstrip("\n")
            ids += [START, *f"{m['role']}\n{content}".encode(), END, 10]
        return ids + ([START, *b"assistant\n"] if add_generation_prompt else [])

    def detokenizer(self, skip_special_tokens: bool = True) -> ByteStream:
        return ByteStream()


class ByteStream:
    """Holds back bytes that may be the beginning of a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: list[int]) -> str:
        return self._decoder.decode(bytes(i for i in ids if i < 256))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ScriptedRunner:
    """Draws the tokens of `answer(prompt text)`, then the end token."""

    vocab_size = VOCABULARY
    synchronous, groups = True, ()

    def __init__(self, num_blocks: int, block_size: int, answer: Callable[[str], str]) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._answer = answer
        self._codec = ByteCodec()
        self.fail_next = False
        self.scheduler: Scheduler  # set when there is an engine

    def launch(self, plan: StepPlan, grammars: Mapping[int, Grammar]) -> ScriptedRunner._Launched:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device stumbled")
        requests = {request.row: request for request in self.scheduler.running}
        drawn = [
            self._next(requests[row]) if samples else -1 for row, samples in zip(plan.rows, plan.samples, strict=True)
        ]
        wanting = [i for i, row in enumerate(plan.rows) if requests[row].params.logprobs is not None and drawn[i] >= 0]
        return self._Launched(StepResult(drawn, logprobs={i: [self._logprobs(drawn[i])] for i in wanting}))

    @staticmethod
    def _logprobs(token: int) -> TokenLogprobs:
        """The token with 3/4, and the byte whose last bit differs with 1/4."""
        return TokenLogprobs(token, math.log(0.75), 1, [(token, math.log(0.75)), (token ^ 1, math.log(0.25))])

    def _next(self, request: Request) -> int:
        script = [*self._answer(self._codec.decode(request.ids[: request.prompt_len])).encode(), END]
        at = len(request.ids) - request.prompt_len
        return script[at % len(script)] if request.params.ignore_eos else script[min(at, len(script) - 1)]

    class _Launched:
        def __init__(self, result: StepResult) -> None:
            self.result = result

        def wait(self) -> StepResult:
            return self.result


class FakeStream:
    def __init__(self, source: FakeSource) -> None:
        self.source = source
        self.request: Request | None = None
        self.refusal: EngineError | None = None
        self.news: asyncio.Queue[Delta | EngineError] = asyncio.Queue()
        self.ended = False

    async def started(self) -> int:
        if self.refusal:
            raise self.refusal
        assert self.request is not None
        return self.request.id

    async def _iterate(self) -> AsyncIterator[Delta]:
        while not self.ended:
            item = await self.news.get()
            if isinstance(item, EngineError):
                raise item
            self.ended = bool(item.finish_reason)
            yield item

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._iterate()

    def cancel(self) -> None:
        self.source.abort(self)


class FakeSource(Source):
    """See the module. `speed`: seconds a step takes; `answer` is given the prompt as text. Unless it `loads_at_once` it
    is loading until the test sets `loaded`."""

    condition = Condition()
    recording_error = ""

    def __init__(
        self,
        answer: Callable[[str], str] = lambda prompt: "A **block table** maps positions to blocks.",
        num_blocks: int = 257,
        speed: float = 0.0,
        start_error: str = "",
        loads_at_once: bool = True,
        notes: Sequence[str] = (),
    ) -> None:
        self.runner = ScriptedRunner(num_blocks, 16, answer)
        self.speed, self.start_error, self.notes = speed, start_error, list(notes)
        self.loaded = asyncio.Event()
        if loads_at_once:
            self.loaded.set()
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.records: deque[Record] = deque()
        self.closed = False
        self.log_file = Path("fake.log")

    async def start(self, on_progress: Callable[[dict[str, Any]], None]) -> None:
        on_progress({"stage": "weights", "done": 1, "total": 4, "text": "loading weights"})
        await self.loaded.wait()
        if self.start_error:
            self.error = self.start_error
            self._ready.set()
            raise EngineError(self.start_error)
        self.engine = Engine(
            self.runner,
            SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=16, max_model_len=4096),
            eos_ids=frozenset({END}),
        )
        self.runner.scheduler = self.engine.scheduler
        self.outputs = OutputProcessor(ByteCodec(), self.engine)
        self.streams: dict[int, FakeStream] = {}
        self.error = None
        self.info = EngineInfo(
            model="scripted", device="cpu", dtype="float32", num_blocks=self.runner.num_blocks - 1, block_size=16,
            max_model_len=4096, vocab_size=VOCABULARY, generation={"temperature": 0.0}, notes=self.notes,
        )
        self._ready.set()
        self._loop = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        while self.error is None:
            if not (self.engine.has_work and self.engine.gate.allows()):
                self._flush()
                await asyncio.sleep(0.002)
                continue
            self.take_step()
            await asyncio.sleep(self.speed)

    def take_step(self) -> None:
        """One step of the engine; its tokens go to the streams."""
        for delta in self.outputs.process(self.engine.step()):
            self.streams[delta.request_id].news.put_nowait(delta)
        self._flush()

    def _flush(self) -> None:
        self.records.extend(self.engine.log.drain())

    def submit(self, ids: list[int], params: SamplingParams, group: str = "") -> FakeStream:
        if self.error:
            raise EngineDead(self.error)
        stream = FakeStream(self)
        try:
            stream.request = self.engine.add_request(ids, params, group)
        except InvalidRequest as refusal:
            stream.refusal = refusal
            stream.news.put_nowait(refusal)
            return stream
        self.outputs.open(stream.request)
        self.streams[stream.request.id] = stream
        return stream

    def abort(self, stream: FakeStream) -> None:
        if stream.request is None or stream.ended:
            return
        delta = self.outputs.close(stream.request.id, "abort")
        self.engine.abort(stream.request.id)
        if delta is not None:
            stream.news.put_nowait(delta)

    async def control(self, verb: str, **arguments: Any) -> Any:
        self.calls.append((verb, arguments))
        if self.error or not self.info:
            raise EngineDead(self.error or "the engine is still loading")
        gate = self.engine.gate
        if verb == "run_until":
            gate.run_until(arguments["predicate"]["event"], arguments["predicate"].get("ms", 0.0))
        elif verb == "clear_cache":
            return self.engine.clear_cache()
        elif verb == "records":
            self.engine.log.enabled = arguments["enabled"]
        else:
            {
                "pause": gate.pause,
                "resume": gate.resume,
                "step": gate.step,
                "pace": lambda factor: gate.set_pace(factor),
            }[verb](**arguments)
        return None

    async def snapshot(self) -> dict[str, Any]:
        self._flush()
        return self.engine.snapshot()

    def drain_records(self) -> list[Record]:
        records = list(self.records)
        self.records.clear()
        return records

    def die(self, sentence: str = "the engine process ended by signal SIGKILL") -> None:
        """As if its process had been killed."""
        for stream in self.streams.values():
            if not stream.ended:
                stream.news.put_nowait(EngineDead(sentence))
        self._died(sentence)

    async def restart(self, on_progress: Callable[[dict[str, Any]], None]) -> None:
        self.start_error, self.condition = "", Condition()
        await self.start(on_progress)

    async def close(self) -> None:
        self.closed = True
        self.error = self.error or "the engine was closed"
