"""The kernels of the gated delta rule and its convolution against engine/model/delta.py in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from engine.attention.base import StateMeta  # noqa: E402
from engine.kernels import delta  # noqa: E402
from engine.model import delta as reference  # noqa: E402

DEVICE = torch.device("cuda")
# Relative error of outputs and states. In half precision the products round their arguments.
OUTPUT = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
STATE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
HEADS = [(16, 32, 128, 128), (2, 2, 64, 64), (1, 3, 128, 64), (2, 4, 64, 128)]  # key heads, value heads, Dk, Dv
TAPS = 4
Segments = list[list[int]]  # the lengths of the segments of each entry
DECODES: Segments = [[1]] * 5
DRAFTS: Segments = [[1], [1, 1, 1, 1, 1], [1], [1, 1]]
PROMPTS: Segments = [[130], [64], [1], [5], [700]]
CHECKPOINTS: Segments = [[64, 64, 1], [16] * 20, [100, 200, 3], [1, 63, 65, 1]]
EVERYTHING: Segments = [*DECODES, *DRAFTS, *PROMPTS, *CHECKPOINTS]
SHAPES = {"decodes": DECODES, "drafts": DRAFTS, "prompts": PROMPTS, "checkpoints": CHECKPOINTS, "all": EVERYTHING}


@dataclass
class Case:
    """The inputs of one layer in one step. Slots that no segment reads are NaN, as are tokens of padding."""

    x: torch.Tensor  # [T, C]: queries, keys and values
    g: torch.Tensor
    beta: torch.Tensor
    weight: torch.Tensor
    conv: torch.Tensor
    recurrent: torch.Tensor
    states: StateMeta
    rows: list[tuple[int, int, int, int]]
    bounds: list[int]
    heads: tuple[int, int, int, int]

    def split(self, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
        key_heads, heads, dk, dv = self.heads
        x = self.x if dtype is None else self.x.to(dtype)
        q, k, v = x.split([key_heads * dk, key_heads * dk, heads * dv], 1)
        return q.unflatten(1, (key_heads, dk)), k.unflatten(1, (key_heads, dk)), v.unflatten(1, (heads, dv))

    def run(self, graph: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns (convolution, its states, output, states) of the kernels."""
        states = self.states
        if graph:
            states = StateMeta(states.segments, states.cu_segments, None, states.num_decodes)
        conv, recurrent = self.conv.clone(), self.recurrent.clone()
        y = delta.causal_conv(self.x, self.weight, conv, states)
        return y, conv, delta.delta_rule(*self.split(), self.g, self.beta, recurrent, states), recurrent

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns what `run` does, by the specification in float64."""
        conv, recurrent, wide = self.conv.double(), self.recurrent.double(), torch.float64
        y = reference.causal_conv(self.x.double(), self.weight.double(), conv, self.states)
        g, beta = self.g.double(), self.beta.double()
        return y, conv, reference.delta_rule(*self.split(wide), g, beta, recurrent, self.states), recurrent

    @property
    def written(self) -> list[int]:
        """The slots that the step writes, each once."""
        return sorted({target for *_, target in self.rows if target})


def make(
    lengths: Segments, heads: tuple[int, int, int, int] = HEADS[0], dtype: torch.dtype = torch.bfloat16,
    padding: int = 0,
) -> Case:  # fmt: skip
    """Every second entry begins with a state, and an entry of one segment writes its state in place."""
    torch.manual_seed(sum(map(sum, lengths)))
    rows: list[tuple[int, int, int, int]] = []
    bounds, at, slot, read = [0], 0, 1, [0]
    for entry, parts in enumerate(lengths):
        source = slot if entry % 2 else 0
        slot += source > 0
        read.append(source)
        for part in parts:
            target = source if source and len(parts) == 1 else slot
            slot += target == slot
            rows.append((at, at + part, source, target))
            at, source = at + part, target
        bounds.append(len(rows))
    key_heads, value_heads, dk, dv = heads
    tokens, channels = at + padding, 2 * key_heads * dk + value_heads * dv

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE)

    x, conv, recurrent = normal(tokens, channels), normal(slot, channels, TAPS - 1), normal(slot, value_heads, dk, dv)
    unread = [i for i in range(slot) if i not in read]
    conv[unread], recurrent[unread], x[at:] = float("nan"), float("nan"), float("nan")
    conv[0], recurrent[0] = 0, 0
    padded = rows + [(at, at, 0, 0)] * (3 if padding else 0)
    decodes = next((i for i, parts in enumerate(lengths) if parts != [1]), len(lengths))
    states = StateMeta(
        torch.tensor(padded, dtype=torch.int32, device=DEVICE), torch.tensor(bounds, dtype=torch.int32, device=DEVICE),
        rows, decodes,
    )  # fmt: skip
    g, beta = -2 * torch.rand(tokens, value_heads, device=DEVICE), torch.rand(tokens, value_heads, device=DEVICE)
    weight = normal(channels, TAPS)
    return Case(x.to(dtype), g, beta, weight.to(dtype), conv.to(dtype), recurrent, states, rows, bounds, heads)


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """||got - wanted|| / ||wanted||; NaN is infinite."""
    distance = ((got.double() - wanted).norm() / wanted.norm()).item()
    return distance if distance == distance else float("inf")


FORMS = [*itertools.product(HEADS, [torch.bfloat16]), (HEADS[0], torch.float32), (HEADS[1], torch.float16)]


@pytest.mark.parametrize("lengths", SHAPES)
@pytest.mark.parametrize(("heads", "dtype"), FORMS, ids=str)
def test_all_shapes_of_a_step(heads: tuple[int, int, int, int], dtype: torch.dtype, lengths: str) -> None:
    case = make(SHAPES[lengths], heads, dtype)
    (y, conv, out, recurrent), (y_, conv_, out_, recurrent_) = case.run(), case.wanted()
    assert error(y, y_) < OUTPUT[dtype] and error(out, out_) < OUTPUT[dtype]
    assert all(torch.equal(conv[slot].double(), conv_[slot]) for slot in case.written), "inputs are copied"
    assert max(error(recurrent[slot], recurrent_[slot]) for slot in case.written) < STATE[dtype]
    others = [slot for slot in range(len(conv)) if slot not in case.written]
    for before, after in ((case.conv, conv), (case.recurrent, recurrent)):
        torch.testing.assert_close(after[others], before[others], rtol=0, atol=0, equal_nan=True)


def test_similar_keys_and_slow_decay() -> None:
    """The triangular system is far from the unit matrix."""
    for dtype in (torch.float32, torch.bfloat16):
        case = make([[2000]], dtype=dtype)
        keys = slice(16 * 128, 32 * 128)
        case.x[:, keys] = 1 + 0.3 * case.x[:, keys]
        case.g *= 1e-3
        case.beta.fill_(0.99)
        *_, out, recurrent = case.run()
        *_, out_, recurrent_ = case.wanted()
        assert error(out, out_) < 2 * OUTPUT[dtype]
        assert error(recurrent[1], recurrent_[1]) < 2 * OUTPUT[dtype]


def test_an_entry_alone_computes_what_it_does_in_a_batch() -> None:
    case = make(EVERYTHING)
    y, conv, out, recurrent = case.run()
    for entry, (low, high) in enumerate(zip(case.bounds, case.bounds[1:], strict=False)):
        rows = case.rows[low:high]
        begin, end = rows[0][0], rows[-1][1]
        own = [(first - begin, last - begin, source, target) for first, last, source, target in rows]
        part = slice(begin, end)
        states = StateMeta(
            torch.tensor(own, dtype=torch.int32, device=DEVICE),
            torch.tensor([0, len(own)], dtype=torch.int32, device=DEVICE), own, int(end - begin == 1),
        )  # fmt: skip
        alone = Case(
            case.x[part], case.g[part], case.beta[part], case.weight, case.conv, case.recurrent, states, own,
            [0, len(own)], case.heads,
        ).run()  # fmt: skip
        assert torch.equal(alone[0], y[part]) and torch.equal(alone[2], out[part]), entry
        for *_, target in own:
            assert torch.equal(alone[1][target], conv[target]) and torch.equal(alone[3][target], recurrent[target])


def test_a_checkpoint_continues_as_if_it_had_been_passed() -> None:
    """A prompt in one step, and in two steps from the checkpoint between its segments: the same numbers."""
    whole = make([[192, 300, 77]])
    y, conv, out, recurrent = whole.run()
    for cut in (1, 2):
        begin, end = whole.rows[cut][0], whole.rows[-1][1]
        own = [(a - begin, b - begin, source, target) for a, b, source, target in whole.rows[cut:]]
        states = StateMeta(
            torch.tensor(own, dtype=torch.int32, device=DEVICE),
            torch.tensor([0, len(own)], dtype=torch.int32, device=DEVICE), own, 0,
        )  # fmt: skip
        rest = Case(
            whole.x[begin:end], whole.g[begin:end], whole.beta[begin:end], whole.weight, conv, recurrent, states, own,
            [0, len(own)], whole.heads,
        ).run()  # fmt: skip
        assert torch.equal(rest[0], y[begin:end]) and torch.equal(rest[2], out[begin:end])
        assert torch.equal(rest[3][own[-1][3]], recurrent[whole.rows[-1][3]])


@pytest.mark.parametrize("lengths,padding", [(DECODES, 0), (DRAFTS, 0), (EVERYTHING, 40)], ids=str)
def test_one_graph_serves_other_segments_of_the_same_size(lengths: Segments, padding: int) -> None:
    """A graph is captured with empty segments and replayed with others: tokens of padding are finite, nothing else is
    written."""
    case = make([*lengths, *([[]] * 3 if padding else [])], padding=padding)
    wanted = case.run(graph=True)
    live = case.rows[-1][1]
    segments, bounds = case.states.segments.clone(), case.states.cu_segments.clone()
    capturing = StateMeta(torch.zeros_like(segments), torch.zeros_like(bounds), None, case.states.num_decodes)
    if not padding:  # each token has a segment, those of padding with target 0
        capturing.segments[:, 0] = torch.arange(len(segments), device=DEVICE)
        capturing.segments[:, 1] = capturing.segments[:, 0] + 1
        capturing.cu_segments[1:] = bounds[1:]
    conv, recurrent = case.conv.clone(), case.recurrent.clone()

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        y = delta.causal_conv(case.x, case.weight, conv, capturing)
        return y, delta.delta_rule(*case.split(), case.g, case.beta, recurrent, capturing)

    graph = captured(run)
    torch.testing.assert_close(recurrent, case.recurrent, rtol=0, atol=0, equal_nan=True)
    capturing.segments.copy_(segments)
    capturing.cu_segments.copy_(bounds)
    y, out = graph()
    assert torch.equal(y[:live], wanted[0][:live]) and torch.equal(out[:live], wanted[2][:live])
    assert out.isfinite().all()
    for got, expected in ((conv, wanted[1]), (recurrent, wanted[3])):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def captured(run: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Returns a function that replays `run` as a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()

    def replay() -> tuple[torch.Tensor, torch.Tensor]:
        graph.replay()
        torch.cuda.synchronize()
        return results

    return replay
