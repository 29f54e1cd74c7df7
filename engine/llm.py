"""LLM runs the engine inside a script's process. The classes and methods have the names that they have in vLLM.

with LLM("Qwen/Qwen3-0.6B") as llm:
    for output in llm.generate(["The capital of France is"], SamplingParams(max_tokens=20)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from engine.beam_search import BeamSearchOutput, BeamSearchParams, search
from engine.errors import InvalidRequest
from engine.llm_engine import LLMEngine
from engine.outputs import RequestOutput
from engine.params import RequestOutputKind, SamplingParams
from engine.prompts import Message, as_list, check_names, conversation, each_params, needed, read
from engine.text.tokenizer import Tokenizer

Params = SamplingParams | Sequence[SamplingParams] | None


class LLM:
    """A model and its engine. Keyword arguments are the fields of EngineConfig, or vLLM's names (engine/options.py)."""

    def __init__(self, model: str, **options: Any) -> None:
        self.llm_engine = LLMEngine(model, **options)
        self.engine, self.tokenizer = self.llm_engine.engine, self.llm_engine.tokenizer
        self.info, self.close = self.llm_engine.info, self.llm_engine.close
        self.reset_prefix_cache, self.get_metrics = self.llm_engine.reset_prefix_cache, self.llm_engine.get_metrics
        self.start_profile, self.stop_profile = self.llm_engine.profiler.start, self.llm_engine.profiler.stop
        self._prompts = 0  # how many were added; this is the next request_id

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def generate(
        self, prompts: Any, sampling_params: Params = None, use_tqdm: bool | None = None, *,
        add_special_tokens: bool = True, priority: Sequence[int] | None = None, **others: Any,
    ) -> list[RequestOutput]:
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
        engine, names, shown = self.llm_engine, [], sys.stderr.isatty() if use_tqdm is None else use_tqdm
        try:
            for number, (prompt, each) in enumerate(zip(batch, params, strict=True)):
                names.append(str(self._prompts))
                self._prompts += 1
                if isinstance(each, SamplingParams):
                    each = each.clone(output_kind=RequestOutputKind.FINAL_ONLY)
                engine.add_request(
                    names[-1], prompt, each, add_special_tokens=add_special_tokens,
                    priority=0 if priority is None else priority[number],
                )
            done = self._run(shown)
        finally:
            engine.abort_request(names)  # after an error or Ctrl+C, end the open requests
        return [done[name] for name in names]

    def beam_search(
        self, prompts: Any, params: BeamSearchParams, use_tqdm: bool = False, **others: Any
    ) -> list[BeamSearchOutput]:
        """Returns the most likely replies to one or several prompts, in the forms that `generate` takes."""
        check_names("beam_search", others)
        found = [read(prompt, self.tokenizer) for prompt in as_list(prompts)]
        return search(lambda batch, each: self.generate(batch, each, use_tqdm), found, params, self.tokenizer)

    def chat(
        self, messages: list[Message] | list[list[Message]], sampling_params: Params = None,
        use_tqdm: bool | None = None, *, chat_template: str | None = None, add_generation_prompt: bool = True,
        continue_final_message: bool = False, tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None, **others: Any,
    ) -> list[RequestOutput]:
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
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer. Raises InvalidRequest if it was not loaded."""
        return needed(self.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the settings that the checkpoint's generation_config.json recommends."""
        return SamplingParams(**self.info.generation)

    def _run(self, show: bool) -> dict[str, RequestOutput]:
        """Returns the outputs of all open requests, by name."""
        engine, done = self.llm_engine, dict[str, RequestOutput]()
        total, before, started = engine.get_num_unfinished_requests(), engine.generated_tokens, time.monotonic()
        while engine.has_unfinished_requests():
            done |= {output.request_id: output for output in engine.step()}
            if show:
                tokens = engine.generated_tokens - before
                rate = tokens / max(1e-9, time.monotonic() - started)
                sys.stderr.write(f"\r{len(done)}/{total} replies, {tokens:,} tokens, {rate:,.0f} tok/s ")
        if show:
            sys.stderr.write("\n")
        return done


def cleanup_dist_env_and_memory() -> None:
    """Free the memory of engines that were deleted, also on the GPU."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
