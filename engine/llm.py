"""LLM runs the engine inside a script's process. The classes and methods have the names that they have in vLLM.

with LLM("Qwen/Qwen3-0.6B") as llm:
    for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=20)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from engine.build import build_engine
from engine.errors import InvalidRequest
from engine.options import engine_config
from engine.outputs import Collector, RequestOutput
from engine.params import SamplingParams
from engine.prompts import Message, Prompt, as_list, check_names, conversation, each_params, needed, read
from engine.text.output import OutputProcessor
from engine.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model and its engine. Keyword arguments are the fields of EngineConfig, or vLLM's names (engine/options.py)."""

    def __init__(self, model: str, **options: Any) -> None:
        built = build_engine(engine_config(model, options))
        self.engine, self.tokenizer, self.info = built.engine, built.tokenizer, built.info
        self.close = built.close  # also ends the processes of the ranks other than 0
        self._outputs = OutputProcessor(self.tokenizer, self.engine.log)
        self._prompts = 0  # how many were added; this is the next request_id

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self, prompts: Any, sampling_params: Params = None, use_tqdm: bool | None = None, *,
        add_special_tokens: bool = True, priority: Sequence[int] | None = None, **others: Any,
    ) -> list[RequestOutput]:  # fmt: skip
        """Reply to one or several prompts; return the outputs in the order of the prompts.

        prompts              a text, token ids (a list, a numpy array or a torch tensor), {"prompt": text} or
                             {"prompt_token_ids": ids}, or a list of these. A text that spells out a control token, such
                             as "<|im_start|>", gets that token's id
        sampling_params      for all prompts, or one for each; None: those of get_default_sampling_params
        use_tqdm             show progress on stderr; None: show it only if stderr is a terminal
        add_special_tokens   False: do not add the tokens that the tokenizer puts around a text, such as a BOS
        priority             one number for each prompt, for scheduling_policy="priority"

        Raises InvalidRequest, before any prompt runs, if a prompt or a parameter cannot be used.
        """
        check_names("generate", others)
        batch = as_list(prompts)
        params = each_params(sampling_params, len(batch), self.get_default_sampling_params())
        if priority is not None and len(priority) != len(batch):
            raise InvalidRequest(f"there are {len(batch)} prompts and {len(priority)} priorities", "priority")
        collectors: list[Collector] = []
        open_samples: dict[int, tuple[Collector, int]] = {}
        try:
            for number, (given, each) in enumerate(zip(batch, params, strict=True)):
                prompt = read(given, self.tokenizer, add_special_tokens)
                collectors.append(self._add(prompt, each, 0 if priority is None else priority[number], open_samples))
            self._run(open_samples, sys.stderr.isatty() if use_tqdm is None else use_tqdm)
        finally:
            for request_id in open_samples:  # after an error or Ctrl+C, end the open requests
                self._outputs.close(request_id, "abort")
                self.engine.abort(request_id)
        return [collector.output for collector in collectors]

    def chat(
        self, messages: list[Message] | list[list[Message]], sampling_params: Params = None,
        use_tqdm: bool | None = None, *, chat_template: str | None = None, add_generation_prompt: bool = True,
        continue_final_message: bool = False, tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None, **others: Any,
    ) -> list[RequestOutput]:  # fmt: skip
        """Reply to one or several conversations, each a list of {"role", "content"}.

        chat_template            the source of a template that replaces the checkpoint's
        add_generation_prompt    end the prompt with the beginning of a reply
        continue_final_message   continue the last message instead of beginning a reply
        tools                    functions that the model may call, in OpenAI's form
        chat_template_kwargs     further variables of the template, such as {"enable_thinking": False}
        """
        check_names("chat", others)
        several = bool(messages) and isinstance(messages[0], list)
        conversations: list[Any] = list(messages) if several else [messages]
        prompts = [
            conversation(self.tokenizer, each, tools, add_generation_prompt, continue_final_message, chat_template,
                         chat_template_kwargs)
            for each in conversations
        ]  # fmt: skip
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer. Raises InvalidRequest if it was not loaded."""
        return needed(self.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the settings that the checkpoint's generation_config.json recommends."""
        return SamplingParams(**self.info["generation"])

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Returns True, as in vLLM."""
        self.engine.clear_cache()
        return True

    def _add(
        self, prompt: Prompt, params: SamplingParams, priority: int, open_samples: dict[int, tuple[Collector, int]]
    ) -> Collector:
        if not isinstance(params, SamplingParams):
            kind = type(params).__name__
            raise InvalidRequest(f"sampling_params contains a {kind}: it must be SamplingParams", "sampling_params")
        params.validate(self.engine.runner.vocab_size)  # add_request validates too, but with n = 0 it is not called
        collector = Collector(str(self._prompts), prompt, params, self.tokenizer)
        self._prompts += 1
        for index in range(params.n):
            request = self.engine.add_request(
                prompt.ids, params, sample_index=index, priority=priority, cache_salt=prompt.cache_salt
            )
            self._outputs.open(request)
            open_samples[request.id] = (collector, index)
        return collector

    def _run(self, open_samples: dict[int, tuple[Collector, int]], show: bool) -> None:
        total, tokens, started = len(open_samples), 0, self.engine.log.now()
        while open_samples:
            deltas, stopped = self._outputs.process(self.engine.step())
            for request_id, tokens_shown in stopped:
                self.engine.abort(request_id, "stop", tokens_shown)
            for delta in deltas:
                tokens += len(delta.ids)
                collector, index = open_samples[delta.request_id]
                collector.add(index, delta)
                if delta.finish_reason:
                    del open_samples[delta.request_id]
            self.engine.log.trim()
            if show:
                done, rate = total - len(open_samples), tokens / max(1e-9, self.engine.log.now() - started)
                sys.stderr.write(f"\r{done}/{total} replies, {tokens:,} tokens, {rate:,.0f} tok/s ")
        if show:
            sys.stderr.write("\n")
