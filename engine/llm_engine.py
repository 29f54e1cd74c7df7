"""LLMEngine adds requests one by one and runs step by step, in this process. Its methods have their names in vLLM.

engine = LLMEngine("Qwen/Qwen3-0.6B")
engine.add_request("a", "The capital of France is", SamplingParams(max_tokens=20))
while engine.has_unfinished_requests():
    for output in engine.step():
        print(output.outputs[0].text)  # the reply so far
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from engine.build import build_engine
from engine.errors import InvalidRequest
from engine.metrics.values import Counted, Metric
from engine.options import EngineArgs, engine_config
from engine.outputs import Collector, RequestOutput
from engine.params import SamplingParams
from engine.profiler import Profiler, ProfilerConfig
from engine.prompts import own, read
from engine.text.output import OutputProcessor


class LLMEngine:
    """A model and its engine. The options are those of LLM."""

    def __init__(
        self, model: str, *, disable_log_stats: bool = True,
        profiler_config: ProfilerConfig | dict[str, Any] | None = None, **options: Any,
    ) -> None:
        self.profiler = Profiler(profiler_config)
        built = build_engine(engine_config(model, options))
        self.engine, self.tokenizer, self.info = built.engine, built.tokenizer, built.info
        self.close = built.close  # also ends the processes of the ranks other than 0
        self.generated_tokens = 0
        self._counted = None if disable_log_stats else Counted(self.engine, self.info)
        self._outputs = OutputProcessor(self.tokenizer, self.engine)
        self._samples: dict[int, tuple[Collector, int]] = {}  # by the number of the engine's request
        self._numbers: dict[str, list[int]] = {}  # of the samples of an open request

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        return cls(**asdict(engine_args))

    def add_request(
        self, request_id: str, prompt: Any, params: SamplingParams, *, add_special_tokens: bool = True,
        priority: int = 0,
    ) -> None:
        """Add a request, in a form that LLM.generate takes. Raises InvalidRequest."""
        params = own(params, self.engine.runner.vocab_size)
        if request_id in self._numbers:
            raise InvalidRequest(f"request_id {request_id!r} is in use: another request with this name has not ended",
                                 "request_id")
        found = read(prompt, self.tokenizer, add_special_tokens)
        collector = Collector(request_id, found, params, self.tokenizer)
        numbers: list[int] = []
        self._numbers[request_id] = numbers
        try:
            for index in range(params.n):
                request = self.engine.add_request(
                    found.ids, params, sample_index=index, priority=priority, cache_salt=found.cache_salt
                )
                self._outputs.open(request)
                self._samples[request.id] = (collector, index)
                numbers.append(request.id)
            self._count()
        except BaseException:
            self.abort_request([request_id])
            raise

    def step(self) -> list[RequestOutput]:
        """Run one step; return the outputs of the requests that have news, as params.output_kind wants them."""
        changed: dict[str, Collector] = {}
        for delta in self._outputs.process(self.engine.step()):
            collector, index = self._samples[delta.request_id]
            collector.add(index, delta)
            self.generated_tokens += len(delta.ids)
            if self._counted is not None:
                self._counted.metrics.generated.add(len(delta.ids))
            changed[collector.output.request_id] = collector
            if delta.finish_reason:
                del self._samples[delta.request_id]
        self._count()
        self.profiler.step()
        outputs = []
        for request_id, collector in changed.items():
            if collector.output.finished:
                del self._numbers[request_id]
            if (output := collector.take()) is not None:
                outputs.append(output)
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Returns True if step() has something to do."""
        return bool(self._numbers)

    def get_num_unfinished_requests(self) -> int:
        return len(self._numbers)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; there are no further outputs of them. Requests that have ended are left out."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            for number in self._numbers.pop(request_id, ()):
                if self._samples.pop(number, None) is not None:
                    self._outputs.close(number, "abort")
                    self.engine.abort(number)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes. Returns True, as in vLLM.

        reset_running_requests   preempt the running requests first, so that their prefixes are computed again too
        """
        self.engine.clear_cache(reset_running_requests)
        return True

    def get_metrics(self) -> list[Metric]:
        """Returns the metrics since the engine began: those of the server's /metrics, under their names in vLLM. Raises
        InvalidRequest unless the engine was made with disable_log_stats=False."""
        if self._counted is None:
            raise InvalidRequest("nothing was counted: get_metrics needs LLM(…, disable_log_stats=False)")
        return self._counted.values()

    def _count(self) -> None:
        """Count the new records, or drop old ones if nothing counts them."""
        if self._counted is None:
            self.engine.log.trim()
        else:
            self._counted.update()
