"""The kernels of the gated delta rule and its convolution against engine/model/delta.py in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from engine.attention.base import StateMeta  # noqa: E402
from engine.build import DELTA_SIZES  # noqa: E402
from engine.kernels import delta  # noqa: E402
from tests.support.delta_steps import Case, Heads, Segments, error, make  # noqa: E402

DEVICE = torch.device("cuda")
# Relative error of outputs and states. In half precision the products round their arguments.
OUTPUT = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
STATE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
HEADS = [(16, 32, 128, 128), (2, 2, 64, 64), (1, 3, 128, 64), (2, 4, 64, 128)]  # key heads, value heads, Dk, Dv
DECODES: Segments = [[1]] * 5
DRAFTS: Segments = [[1], [1, 1, 1, 1, 1], [1], [1, 1]]
PROMPTS: Segments = [[130], [64], [1], [5], [700]]
CHECKPOINTS: Segments = [[64, 64, 1], [16] * 20, [100, 200, 3], [1, 63, 65, 1]]
EVERYTHING: Segments = [*DECODES, *DRAFTS, *PROMPTS, *CHECKPOINTS]
SHAPES = {"decodes": DECODES, "drafts": DRAFTS, "prompts": PROMPTS, "checkpoints": CHECKPOINTS, "all": EVERYTHING}


FORMS = [*itertools.product(HEADS, [torch.bfloat16]), (HEADS[0], torch.float32), (HEADS[1], torch.float16)]


@pytest.mark.parametrize("lengths", SHAPES)
@pytest.mark.parametrize(("heads", "dtype"), FORMS, ids=str)
def test_all_shapes_of_a_step(heads: Heads, dtype: torch.dtype, lengths: str) -> None:
    check(make(SHAPES[lengths], heads, dtype), dtype)


@pytest.mark.parametrize(("dk", "dv"), list(itertools.product(sorted(DELTA_SIZES), repeat=2)), ids=str)
def test_all_sizes_of_keys_and_values(dk: int, dv: int) -> None:
    check(make(EVERYTHING, (2, 4, dk, dv)), torch.bfloat16)


def check(case: Case, dtype: torch.dtype) -> None:
    """Compare what the kernels compute and write with the specification."""
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
        case = make([[2000]], HEADS[0], dtype)
        keys = slice(16 * 128, 32 * 128)
        case.x[:, keys] = 1 + 0.3 * case.x[:, keys]
        case.g *= 1e-3
        case.beta.fill_(0.99)
        *_, out, recurrent = case.run()
        *_, out_, recurrent_ = case.wanted()
        assert error(out, out_) < 2 * OUTPUT[dtype]
        assert error(recurrent[1], recurrent_[1]) < 2 * OUTPUT[dtype]


def alone_of(
    case: Case, rows: list[tuple[int, int, int, int]], conv: torch.Tensor, recurrent: torch.Tensor
) -> tuple[Case, slice]:
    """Returns the step that has only these segments, with these states, and which tokens of the case it has."""
    begin, end = rows[0][0], rows[-1][1]
    own = [(first - begin, last - begin, source, target) for first, last, source, target in rows]
    tokens, bounds = slice(begin, end), [0, len(own)]
    states = StateMeta(
        *(torch.tensor(each, dtype=torch.int32, device=DEVICE) for each in (own, bounds)), own, int(end - begin == 1)
    )
    x, g, beta = (each[tokens] for each in (case.x, case.g, case.beta))
    return Case(x, g, beta, case.weight, conv, recurrent, states, own, bounds, case.heads), tokens


def test_an_entry_alone_computes_what_it_does_in_a_batch() -> None:
    case = make(EVERYTHING, HEADS[0])
    y, conv, out, recurrent = case.run()
    for entry, (low, high) in enumerate(zip(case.bounds, case.bounds[1:], strict=False)):
        part, tokens = alone_of(case, case.rows[low:high], case.conv, case.recurrent)
        alone = part.run()
        assert torch.equal(alone[0], y[tokens]) and torch.equal(alone[2], out[tokens]), entry
        for *_, target in part.rows:
            assert torch.equal(alone[1][target], conv[target]) and torch.equal(alone[3][target], recurrent[target])


def test_a_checkpoint_continues_as_if_it_had_been_passed() -> None:
    """A prompt in one step, and in two steps from the checkpoint between its segments: the same numbers."""
    whole = make([[192, 300, 77]], HEADS[0])
    y, conv, out, recurrent = whole.run()
    for cut in (1, 2):
        part, tokens = alone_of(whole, whole.rows[cut:], conv, recurrent)
        rest = part.run()
        assert torch.equal(rest[0], y[tokens]) and torch.equal(rest[2], out[tokens])
        assert torch.equal(rest[3][part.rows[-1][3]], recurrent[whole.rows[-1][3]])


@pytest.mark.parametrize("lengths,padding", [(DECODES, 0), (DRAFTS, 0), (EVERYTHING, 40)], ids=str)
def test_one_graph_serves_other_segments_of_the_same_size(lengths: Segments, padding: int) -> None:
    """A graph is captured with empty segments and replayed with others: tokens of padding are finite, nothing else is
    written."""
    case = make([*lengths, *([[]] * 3 if padding else [])], HEADS[0], padding=padding)
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
