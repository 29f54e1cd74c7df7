"""Records what the steps of an engine in this process call, with torch's profiler: see LLM.start_profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.errors import InvalidRequest

if TYPE_CHECKING:
    from torch.profiler import profile


@dataclass(frozen=True, slots=True)
class ProfilerConfig:
    """vLLM's options of the profiler, for `LLM(profiler_config=…)`: an object of this class or a dict."""

    profiler: str = "torch"  # there is no other
    torch_profiler_dir: str = ""  # where the traces are written, as JSON for chrome://tracing or Perfetto
    delay_iterations: int = 0  # steps that are left out
    max_iterations: int = 0  # the number of steps; 0: all until stop_profile

    def __post_init__(self) -> None:
        if self.profiler != "torch" or not self.torch_profiler_dir:
            raise InvalidRequest('profiler_config needs profiler="torch" and torch_profiler_dir, a directory')
        for name in ("delay_iterations", "max_iterations"):
            if not isinstance(value := getattr(self, name), int) or value < 0:
                raise InvalidRequest(f"profiler_config: {name} is {value!r}: it must be a whole number, 0 or more")


class Profiler:
    """Profiles the steps between `start` and `stop`. Without a configuration, `start` raises InvalidRequest."""

    def __init__(self, config: ProfilerConfig | dict[str, Any] | None) -> None:
        try:
            self._config = ProfilerConfig(**config) if isinstance(config, dict) else config
        except TypeError as error:
            known = ", ".join(ProfilerConfig.__dataclass_fields__)
            raise InvalidRequest(f"profiler_config: {error}; its fields are {known}") from None
        self._running: profile | None = None

    def start(self) -> None:
        """Begin. Does nothing if it has begun."""
        from torch.profiler import profile, schedule, tensorboard_trace_handler

        if (config := self._config) is None:
            raise InvalidRequest('start_profile needs LLM(…, profiler_config={"torch_profiler_dir": a directory})')
        if self._running is None:
            steps = schedule(wait=config.delay_iterations, warmup=0, active=config.max_iterations or 1 << 62, repeat=1)
            written = tensorboard_trace_handler(config.torch_profiler_dir, use_gzip=True)
            self._running = profile(schedule=steps, on_trace_ready=written)
            self._running.start()

    def step(self) -> None:
        if self._running is not None:
            self._running.step()

    def stop(self) -> None:
        """End, and write the trace. Does nothing if it has not begun."""
        if self._running is not None:
            self._running.stop()
            self._running = None
