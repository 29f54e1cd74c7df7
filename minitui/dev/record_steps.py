"""Records the steps of a GPU for the lessons: what a step costs, and the same steps eager, with graphs, with overlap.

    python -m minitui.dev.record_steps --out minitui/teaching/h200.json

The models are Qwen3 shapes with random weights; no checkpoint is needed. For each shape:

- "decode" and "prefill": the median time of a step that decodes n rows, and of a step that computes a prompt of n
  tokens, for n = 1, 2, 4 … The sizes take turns in random order, so slow moments of the machine meet all sizes
- "timelines": the records "step", "parts" and "time" of STEPS consecutive decode steps, for each of MODES and ROWS.
  All modes run the same kernels. "eager" launches those that the other modes have captured, one after the other
- "kernels": the number of kernels of a decode step, and the time in which at least one of them runs, from a profiler.
  Without CUDA graphs, the device waits between kernels

"launch_us": how long this host takes to launch one small kernel of PyTorch.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from engine.llm import LLM
from engine.params import SamplingParams
from engine.trace.kind import Record, kind_of, named
from minitui.bench.limits import MEASURED, SIZES, measure_limits, write_config
from minitui.bench.rows import greedy, random_prompts
from minitui.viewmodel.history.steps import StepRow, Steps

PROMPT = 128  # tokens of a prompt whose reply is decoded
STEPS = 20  # steps of a timeline, and of each pass of "decode"
WARM_UP = 8  # steps that are not measured
PASSES = 5  # over all sizes of "decode"; of a timeline, the one with the median time is kept
REPEATS = 15  # prompts for each median of "prefill"
LAUNCHES = 1000  # kernels of each measurement of "launch_us"
MOST_ROWS = 256
MOST_PROMPT = 4096
TIMED = ("step", "parts", "time")  # the records of a timeline
KV_TOKENS = 65_536  # enough for MOST_ROWS
ROWS = (1, 64)  # rows of the timelines
MODES = {"overlap": "on", "graphs": "off", "eager": "off"}  # whether steps overlap


def record_shape(model: str, **options: Any) -> dict[str, Any]:
    """Returns the costs and timelines of a model. `options`: fields of EngineConfig for all engines."""
    found: dict[str, Any] = {"timelines": []}
    for mode in MODES:
        with _engine(model, mode, **options) as recorder:
            for rows in ROWS:
                found["timelines"].append({"mode": mode, "rows": rows, "records": recorder.timeline(rows)})
            if mode == "overlap":
                names = ("model", "parameters", "dtype", "attention", "kv_bytes_per_token")
                found |= {name: getattr(recorder.info, name) for name in names}
                found |= {"context": _context(), "decode": recorder.decode_costs(), "prefill": recorder.prefill_costs()}
    return found


@contextmanager
def _engine(model: str, mode: str, **options: Any) -> Iterator[StepRecorder]:
    with patch("engine.worker.graphs.capture._capture", Launches) if mode == "eager" else nullcontext():
        llm = LLM(
            model, dummy_weights=True, load_tokenizer=False, enable_prefix_caching=False, kv_tokens=KV_TOKENS,
            overlap=MODES[mode], **options,
        )  # fmt: skip
    recorder = StepRecorder(llm)
    recorder.run(PROMPT, 8)
    yield recorder
    llm.engine.check()
    llm.close()
    del llm, recorder
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Launches:
    """Stands in for a captured graph: a replay launches the kernels again, one after the other.

    Takes the arguments of engine.worker.graphs.capture._capture.
    """

    def __init__(self, run: Callable[[], None], *_: Any) -> None:
        run()  # compiles the kernels
        self.replay = run


def launch_us() -> float:
    """Returns the median time of the host for the launch of one small kernel by PyTorch, in microseconds."""
    numbers, found = torch.zeros(1, device="cuda"), []
    for _ in range(REPEATS + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            numbers.add_(1)
        found.append((time.perf_counter() - begin) / LAUNCHES * 1e6)
    return round(median(found[1:]), 2)


class StepRecorder:
    """Runs requests on an engine and reads its records."""

    def __init__(self, llm: LLM) -> None:
        self.info, self._engine = llm.info, llm.engine
        self._seed = 0

    def run(self, prompt: int, rows: int, tokens: int = WARM_UP) -> list[Record]:
        """Runs `rows` new prompts of `prompt` tokens to the end of their replies; returns the records."""
        self._add(prompt, rows, greedy(tokens))
        records: list[Record] = []
        while self._engine.has_work:
            self._engine.step()
            records += self._engine.log.drain()
        return records

    def decode_costs(self) -> list[dict[str, Any]]:
        """Returns the cost of a decode step for 1, 2, 4 … rows."""
        sizes = _doubling(min(MOST_ROWS, int(self.info.max_num_seqs)))
        return _costs(sizes, PASSES, self._decode_steps)

    def _decode_steps(self, n: int) -> list[StepRow]:
        found = [row for row in _steps(self.run(PROMPT, n, 2 * WARM_UP + STEPS)) if _decodes(row, n)]
        return found[WARM_UP:][-STEPS:]

    def prefill_costs(self) -> list[dict[str, Any]]:
        """Returns the cost of a step that computes a prompt of 1, 2, 4 … tokens."""
        most = min(MOST_PROMPT, int(self.info.max_num_batched_tokens), int(self.info.max_model_len) - 1)
        return _costs(_doubling(most), REPEATS, lambda n: [row for row in _steps(self.run(n, 1, 1)) if row.chunks])

    def timeline(self, rows: int) -> list[Record]:
        """Returns the records of STEPS consecutive decode steps: of PASSES runs, those with the median time."""
        runs = sorted((self._timeline(rows) for _ in range(PASSES)), key=_duration)
        return runs[PASSES // 2]

    def _timeline(self, rows: int) -> list[Record]:
        records = [record for record in self.run(PROMPT, rows, 2 * WARM_UP + STEPS) if kind_of(record) in TIMED]
        first = next(row.step for row in _steps(records) if _decodes(row, rows)) + WARM_UP
        return [record for record in records if first <= named(record).step < first + STEPS]

    def kernels(self, rows: int) -> dict[str, float]:
        """Returns the mean number of kernels of an eager decode step, and the ms in which at least one of them runs."""
        self._add(PROMPT, rows, greedy(2 * WARM_UP + STEPS))
        for _ in range(WARM_UP + 4):  # prefill included
            self._engine.step()
        self._engine.drain()
        with profile(activities=[ProfilerActivity.CUDA]) as profiled:
            for _ in range(WARM_UP):
                self._engine.step()
            self._engine.drain()
            torch.cuda.synchronize()
        while self._engine.has_work:
            self._engine.step()
        self._engine.log.drain()
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profiled.events() or ()
            if event.device_type == DeviceType.CUDA and not event.name.startswith("Mem")  # copies
        )
        return {"count": len(spans) / WARM_UP, "busy_ms": round(_covered(spans) / 1e3 / WARM_UP, 4)}

    def _add(self, prompt: int, rows: int, params: SamplingParams) -> None:
        self._seed += 1
        for ids in random_prompts([prompt] * rows, int(self.info.vocab_size), self._seed):
            self._engine.add_request(ids, params)


def _steps(records: Iterable[Record]) -> Iterator[StepRow]:
    """Yields the steps of some records whose times are known."""
    steps = Steps(1024)
    for record in records:
        steps.read(record)
    for step in range(max(0, steps.first), steps.last + 1):
        row = steps.get(step)
        if row is not None and row.wall_ms is not None:
            yield row


def _duration(records: list[Record]) -> float:
    """Returns the time from the end of the first step to the end of the last one, in seconds."""
    ends = [row.ended or 0.0 for row in _steps(records)]
    return ends[-1] - ends[0]


def _decodes(row: StepRow, n: int) -> bool:
    return row.kind == "decode" and row.decodes == n


def _costs(sizes: Sequence[int], passes: int, measure: Callable[[int], list[StepRow]]) -> list[dict[str, Any]]:
    """Returns the median times of steps of each size, in ms. One more pass comes first, which does not count.

    A CPU reports the time of its work as the device's time, too.
    """
    found: dict[int, list[StepRow]] = {n: [] for n in sizes}
    random = Random(0)
    for done in range(passes + 1):
        for n in random.sample(sizes, len(sizes)):
            rows = measure(n)
            found[n] += rows if done else []
    costs = []
    for n, rows in found.items():
        device = [row.device_ms for row in rows if row.device_ms is not None]
        costs.append({
            "n": n, "steps": len(rows), "wall_ms": round(median(row.wall_ms or 0.0 for row in rows), 4),
            "device_ms": round(median(device), 4) if device else None,
        })  # fmt: skip
    return costs


def _context() -> int:
    """Returns the mean length of a row's text in the measured steps of "decode", in tokens."""
    return round(PROMPT + 2 * WARM_UP + (STEPS - 1) / 2)


def _doubling(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def _covered(spans: list[tuple[float, float]]) -> float:
    """Returns the time that the spans, sorted by their begin, cover together."""
    covered, until = 0.0, float("-inf")
    for begin, end in spans:
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


def main(
    out: Annotated[Path, typer.Option(help="The JSON file to write.")],
    shape: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(SIZES)}; repeatable.")] = None,
) -> None:
    """Record the steps of this machine's GPU for the lessons."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("this machine has no CUDA device")
    sizes = shape or list(MEASURED)
    if unknown := set(sizes) - set(SIZES):
        raise typer.BadParameter(f"{min(unknown)!r} is not one of {', '.join(SIZES)}", param_hint="--shape")
    limits = measure_limits(torch.device("cuda"), torch.bfloat16)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "random_weights": True,
        "read_bytes_per_s": round(limits.read), "operations_per_s": round(limits.matmul),
        "launch_us": launch_us(), "models": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="minitui-steps-") as folder:
        models = [str(write_config(size, Path(folder))) for size in sizes]
        for model in models:
            report["models"].append(record_shape(model, max_model_len=8192))
            _write(report, out)  # an error in a later model loses nothing
        for model, found in zip(models, report["models"], strict=True):
            with _engine(model, "eager", max_model_len=8192) as recorder:  # last: a profiler may slow later steps
                found["kernels"] = [{"rows": rows, **recorder.kernels(rows)} for rows in ROWS]
            _write(report, out)


def _write(report: dict[str, Any], out: Path) -> None:
    out.write_text(json.dumps(report, separators=(",", ":")), encoding="utf-8")
    print(f"{out}: {report['models'][-1]['model']}, {out.stat().st_size / 1e3:,.0f} kB", flush=True)


if __name__ == "__main__":
    typer.run(main)
