"""AsyncLLM runs the engine in a process of its own; `generate` is an async iterator, as in vLLM.

async with AsyncLLM("Qwen/Qwen3-0.6B") as llm:
    async for output in llm.generate("The capital of France is", SamplingParams(max_tokens=20)):
        print(output.outputs[0].text)  # the reply so far
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

from engine.errors import EngineError, InvalidRequest
from engine.options import EngineArgs, engine_config
from engine.outputs import Collector, RequestOutput
from engine.params import SamplingParams
from engine.process.client import EngineClient
from engine.process.stream import Merged, Stream
from engine.prompts import check_names, needed, own, read
from engine.text import early_tokenizer
from engine.text.tokenizer import Tokenizer


class AsyncLLM:
    """A model and its engine, for one event loop. The options are those of LLM. The first use starts the process."""

    def __init__(self, model: str, **options: Any) -> None:
        self._config = engine_config(model, options)
        self._client: EngineClient | None = None
        self._tokenizer: Tokenizer | None = None
        self._starting = asyncio.Lock()
        self._streams: dict[str, list[Stream]] = {}  # request id -> the streams of its samples
        self._prompts = 0

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        return cls(**asdict(engine_args))

    async def start(self) -> EngineClient:
        """Start the process, unless it runs, and wait until the model is loaded. Raises EngineError if it cannot."""
        async with self._starting:
            if self._client is None:
                client = await EngineClient.start(self._config)
                try:
                    if self._config.load_tokenizer:
                        self._tokenizer = await asyncio.to_thread(early_tokenizer.load, client.info.model_dir)
                        self._tokenizer.context = client.info.max_model_len
                except BaseException:  # also a cancelled start: the process must not outlive it
                    client.kill()
                    raise
                self._client = client
            return self._client

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def generate(
        self, prompt: Any, sampling_params: SamplingParams | None = None, request_id: str | None = None, *,
        add_special_tokens: bool = True, priority: int = 0, **others: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yields the reply so far to one prompt, after each new text; the last output is `finished`. params.output_kind
        chooses: the reply so far, only what is new, or only the last output. The arguments are those of LLM.generate.
        `request_id`: the name for `abort`; None: a number. If the caller leaves the iteration, the request ends."""
        check_names("generate", others)
        client = await self.start()
        params = await self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = own(params, client.info.vocab_size)
        found = await asyncio.to_thread(read, prompt, self._tokenizer, add_special_tokens)
        name = str(self._prompts) if request_id is None else request_id
        self._prompts += 1
        if name in self._streams:
            raise InvalidRequest(f"request_id {name!r} is in use: another request with this name has not ended",
                                 "request_id")
        collector = Collector(name, found, params, self._tokenizer)
        streams = self._streams[name] = []
        merged = None
        try:
            for index in range(params.n):
                streams.append(client.submit(
                    found.ids, params, sample_index=index, priority=priority, cache_salt=found.cache_salt
                ))
            merged = Merged(streams)
            async for index, delta in merged:
                collector.add(index, delta)
                if (output := collector.take()) is not None:
                    yield output
        finally:
            if merged is not None:
                merged.cancel()
            await self.abort(name)

    async def abort(self, request_id: str) -> None:
        """End a request. Its last output has finish_reason "abort". Does nothing if the request has ended."""
        for stream in self._streams.pop(request_id, ()):
            if not stream.finish_reason:
                with contextlib.suppress(EngineError):  # the process has ended
                    stream.cancel()

    async def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer. Raises InvalidRequest if it was not loaded."""
        await self.start()
        return needed(self._tokenizer)

    async def get_default_sampling_params(self) -> SamplingParams:
        """Returns the settings that the checkpoint's generation_config.json recommends."""
        return SamplingParams(**(await self.start()).info.generation)

    async def pause_generation(self, *, mode: str = "keep") -> None:
        """Pause the engine between two steps. All requests stay and continue after resume_generation. When this
        returns, the readers of `generate` have got everything that was computed."""
        if mode != "keep":
            raise InvalidRequest(f"mode is {mode!r}: it must be 'keep', all requests stay; abort() ends one", "mode")
        await (await self.start()).control("pause")
        left, same = -1, 0
        while same < 4:  # until the readers have what came before the answer; one that does not read is left alone
            unread = sum(stream.unread for streams in self._streams.values() for stream in streams)
            left, same = unread, same + 1 if unread == left else 0
            await asyncio.sleep(0)

    async def resume_generation(self) -> None:
        """Let a paused engine run."""
        await (await self.start()).control("resume")

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes, as LLMEngine.reset_prefix_cache does. Returns True, as in vLLM."""
        await (await self.start()).control("clear_cache", preempt=reset_running_requests)
        return True

    async def close(self) -> None:
        """End the process. Open requests end with an error."""
        if self._client is not None:
            await self._client.close()

    def shutdown(self) -> None:
        """End the process at once. Safe without a running event loop."""
        if self._client is not None:
            self._client.kill()


AsyncLLMEngine = AsyncLLM  # its older name in vLLM
