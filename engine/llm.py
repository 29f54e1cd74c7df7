"""LLM runs the engine inside a script's process. The classes and methods have the names that they have in vLLM.

llm = LLM("Qwen/Qwen3-0.6B")
for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=20)):
    print(output.outputs[0].text)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.build import build_engine
from engine.config import EngineConfig
from engine.core.step import TokenLogprobs
from engine.errors import EngineError, InvalidRequest
from engine.params import SamplingParams
from engine.text.output import Delta, OutputProcessor

Message = dict[str, Any]


@dataclass(slots=True)
class CompletionOutput:
    """One sample of a reply. `token_ids` includes the end token; `text` does not."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its `n` samples."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


class LLM:
    """A model and its engine. Keyword arguments are the fields of engine.config.EngineConfig."""

    def __init__(self, model: str, **options: Any) -> None:
        try:
            config = EngineConfig(model=model, **options)
        except TypeError as error:
            known = ", ".join(EngineConfig.__dataclass_fields__)
            raise EngineError(f"LLM: {error}; the options are {known}") from None
        built = build_engine(config)
        self.engine, self.tokenizer, self.info = built.engine, built.tokenizer, built.info
        self.close = built.close  # also ends the processes of the ranks other than 0
        self._outputs = OutputProcessor(self.tokenizer, self.engine.log)

    def generate(
        self,
        prompts: str | list[int] | Sequence[str | list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Reply to each prompt (text or token ids); return the outputs in the order of the prompts.

        `use_tqdm`: show progress on stderr; None: show it only if stderr is a terminal. Raises InvalidRequest, before
        any prompt runs, if a prompt or a parameter cannot be used.
        """
        batch: list[Any] = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)
        given = sampling_params if sampling_params is not None else SamplingParams()
        each_params = [given] * len(batch) if isinstance(given, SamplingParams) else list(given)
        if len(each_params) != len(batch):
            raise InvalidRequest(
                f"there are {len(batch)} prompts and {len(each_params)} sampling_params", "sampling_params"
            )
        results: list[RequestOutput] = []
        open_samples: dict[int, tuple[RequestOutput, CompletionOutput]] = {}
        try:
            for prompt, params in zip(batch, each_params, strict=True):
                ids = self._encode(prompt) if isinstance(prompt, str) else list(prompt)
                result = RequestOutput(prompt if isinstance(prompt, str) else None, ids, [])
                results.append(result)
                # add_request validates too, but with n = 0 it is not called.
                params.validate(self.engine.runner.vocab_size)
                for index in range(params.n):
                    request = self.engine.add_request(ids, params, sample_index=index)
                    self._outputs.open(request)
                    result.outputs.append(CompletionOutput(index))
                    open_samples[request.id] = (result, result.outputs[-1])
            self._run(open_samples, len(open_samples), sys.stderr.isatty() if use_tqdm is None else use_tqdm)
        finally:
            for request_id in open_samples:  # after an error or Ctrl+C, end the open requests
                self._outputs.close(request_id, "abort")
                self.engine.abort(request_id)
        return results

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Reply to one or several conversations, each a list of {"role", "content"}.

        `template`: further arguments for the chat template.
        """
        if self.tokenizer is None:
            raise EngineError("this engine has no tokenizer (load_tokenizer=False): give generate() token ids")
        conversations: list[Any] = list(messages) if messages and isinstance(messages[0], list) else [messages]
        prompts = [self.tokenizer.apply_chat_template(conversation, **template) for conversation in conversations]
        return self.generate(prompts, sampling_params, use_tqdm)

    def _encode(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise EngineError("this engine has no tokenizer (load_tokenizer=False): give token ids")
        return self.tokenizer.encode(prompt)

    def _run(self, open_samples: dict[int, Any], total: int, show: bool) -> None:
        tokens, started = 0, self.engine.log.now()
        while open_samples:
            deltas, stopped = self._outputs.process(self.engine.step())
            for request_id in stopped:
                self.engine.abort(request_id, "stop")
            for delta in deltas:
                tokens += len(delta.ids)
                self._add(open_samples, delta)
            self.engine.log.trim()
            if show:
                done, rate = total - len(open_samples), tokens / max(1e-9, self.engine.log.now() - started)
                sys.stderr.write(f"\r{done}/{total} replies, {tokens:,} tokens, {rate:,.0f} tok/s ")
        if show:
            sys.stderr.write("\n")

    @staticmethod
    def _add(open_samples: dict[int, tuple[RequestOutput, CompletionOutput]], delta: Delta) -> None:
        result, sample = open_samples[delta.request_id]
        sample.text += delta.text
        sample.token_ids += delta.ids
        sample.logprobs += delta.logprobs
        result.prompt_logprobs += delta.prompt_logprobs
        if delta.finish_reason:
            sample.finish_reason, sample.metrics = delta.finish_reason, delta.metrics or {}
            del open_samples[delta.request_id]


def _is_ids(prompts: Any) -> bool:
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], int)
