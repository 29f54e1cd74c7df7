"""The fitted cost of a step: known costs are found again, also for work that was recorded only in other mixtures."""

from __future__ import annotations

import numpy as np
import pytest

from minitui.viewmodel.history.steps import PARTS, Steps
from minitui.whatif.cost import FEATURES, NO_GRAPH, Costs, Deviations, StepPath, Timeline, costs_of, path_of, share_of


def recorded(
    rows: np.ndarray, keys: np.ndarray, in_use: np.ndarray, took: np.ndarray, host: np.ndarray | None = None
) -> Steps:
    """Returns steps that decode. `host`: ms that the host needs for the launch of each step; then steps overlap, and
    `took` is the device's time."""
    steps, n = Steps(len(rows)), len(rows)
    steps.first, steps.last = 0, n - 1
    steps.column("step")[:] = np.arange(n)
    for name, values in {"tokens": rows, "decodes": rows, "keys": keys, "in_use": in_use, "end_seq": 1}.items():
        steps.column(name)[:] = values
    for name in PARTS:
        steps.column(f"part:{name}")[:] = 0.0
    launch = np.zeros(n) if host is None else np.append(host[1:], host[0])  # in the time of the step before
    steps.column("launch")[:] = 0 if host is None else host
    device, took = took, np.maximum(took, launch)
    ends = np.cumsum(took) / 1e3
    steps.column("part:launch")[:], steps.column("part:wait")[:] = launch, took - launch
    steps.column("took")[:] = steps.column("wall")[:] = took
    steps.column("ended")[:] = ends
    steps.column("t")[:] = ends - (took * (0.5 if host is None else 1.5)) / 1e3
    steps.column("device")[:] = np.nan if host is None else device
    return steps


def work(rows: float, keys: float, held: float) -> list[float]:
    """Returns the features of a step that decodes."""
    named = {"steps": 1.0, "steps with several rows": float(rows > 1), "rows": rows, "keys": keys, "held keys": held}
    return [named.get(name, 0.0) for name in FEATURES]


def predicted(costs: Costs, *step: float) -> float:
    """Returns the time of a step after which as much work follows, without deviation."""
    path = path_of(features := work(*step), 0, 1, costs.graphs)
    return Deviations(costs).took(path, max(costs.of(features, path.kind)))


@pytest.fixture
def mixture() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    r = np.random.default_rng(1)
    rows = r.integers(2, 40, 600)
    own = rows * r.integers(100, 300, 600)
    return rows, own + rows * 400, own + 1200  # each row reads one of three texts of 400 tokens, and tokens of its own


def test_a_key_that_several_rows_share_is_cheaper_than_one_for_each(mixture):
    rows, keys, held = mixture
    costs = costs_of(recorded(rows, keys, held, 1.0 + 1e-5 * keys + 5e-5 * held), "here")
    assert costs.error < 0.01
    assert predicted(costs, 30, 18_000, 18_000) == pytest.approx(1.0 + 0.18 + 0.9, rel=0.02)
    assert predicted(costs, 30, 18_000, 7_000) == pytest.approx(1.0 + 0.18 + 0.35, rel=0.02)


def test_padding_of_sizes_is_kept_with_work_that_was_never_recorded_with_them(mixture):
    rows, keys, held = mixture
    padded = np.where(rows > 16, 1.0, 0.0)  # a graph of a larger size
    costs = costs_of(recorded(rows, keys, held, 2.0 + padded + 1e-5 * keys), "here")
    for n in (16, 17, 24):
        assert predicted(costs, n, n * 600, n * 200 + 1200) == pytest.approx(2.0 + (n > 16) + n * 600e-5, rel=0.04), n


def test_stalls_come_after_as_many_steps_as_recorded_and_again_but_for_that_of_the_start(mixture):
    rows, keys, held = mixture
    took = 1.0 + 1e-5 * keys
    at = [0, 150, 480]
    stalled = took + 30.0 * np.isin(np.arange(600), at)
    costs = costs_of(recorded(rows, keys, held, stalled), "here")
    deviations = Deviations(costs)
    times = [
        deviations.took(path_of(w := work(*one), 0, 1, {}), sum(costs.of(w, 1)))
        for one in zip(*([*each, *each] for each in mixture), strict=True)
    ]
    assert [i for i, time in enumerate(times) if time > 20] == [*at, 750, 1080]
    assert sum(times[:600]) == pytest.approx(stalled.sum(), rel=0.02)
    assert sorted(times)[-6] < 1.5 * took.max()


def test_a_kind_of_steps_that_is_rare_finds_no_stalls_in_the_others(mixture):
    """4 % of the steps with several rows are slow: their multiples have that already. In all steps, these are 2 %."""
    single = zip(mixture, (1, 500, 500), strict=True)
    rows, keys, held = (np.append(np.full(300, value), each[:300]) for each, value in single)
    slow = np.isin(np.arange(600), range(310, 600, 25))
    costs = costs_of(recorded(rows, keys, held, (1.0 + 1e-5 * keys) * np.where(slow, 10.0, 1.0)), "here")
    assert max(costs.recorded[1].multiples) > 5 and not costs.stalls


def test_the_host_s_time_of_a_step_that_none_precedes_is_added_to_such_steps_only(mixture):
    rows, keys, held = mixture
    device, alone = 2.0 + 1e-5 * keys, np.arange(600) % 40 == 0
    steps = recorded(rows, keys, held, device + np.where(alone, 15.0, 0.0), np.full(600, 0.1))
    steps.column("device")[:], steps.column("part:plan")[:] = device, np.nan
    steps.column("t")[alone] = steps.column("ended")[alone] - 1e-3
    costs = costs_of(steps, "here")
    assert costs.alone == pytest.approx([15.0] * 15) and not costs.stalls
    deviations, path = Deviations(costs), path_of(step := work(20, 12_000, 5_200), 0, 1, costs.graphs)
    times = [deviations.took(path, max(costs.of(step, 1)), alone=not i % 2) for i in range(10)]
    assert times == pytest.approx([17.12, 2.12] * 5, rel=0.02)
    timeline = Timeline()
    assert timeline.idle
    timeline.launch(1.0, 0.0, 1)
    assert not timeline.idle and timeline.arrive() == 1.0 and timeline.idle


def test_a_gpu_reads_the_weights_while_it_multiplies_prompts(mixture):
    """All recorded prompts fill the budget, and all texts are about as long."""
    rows, keys, held = mixture
    r = np.random.default_rng(5)
    full = r.random(600) < 0.5
    longest, starts = r.integers(2680, 2720, 600), r.integers(0, 700, 600).tolist()
    took = (np.where(full, 10.0, 2.0) + 1e-5 * keys) * r.normal(1.0, 0.03, 600)
    steps = recorded(rows, keys, held, took, np.full(600, 0.1))
    steps.column("tokens")[:], steps.column("longest")[:] = rows + 2000 * full, longest
    steps._chunks = [[(1, start, 2000, True)] * bool(one) for start, one in zip(starts, full, strict=True)]
    costs = costs_of(steps, "here", GRAPHS | {"tokens": 4096, "prompts": 64})
    step = prompts(20, 500, 2700)
    step[FEATURES.index("keys")], step[FEATURES.index("longest share")] = 12_000, 2700
    assert costs.of(step, 2)[0] == pytest.approx(2.5 + 0.12, rel=0.15)


@pytest.mark.parametrize("full", [0.5, 0.0])
def test_a_step_with_few_prompt_tokens_costs_no_less_than_its_decodes_alone(mixture, full):
    """All recorded prompts fill the budget, or there are none."""
    rows, keys, held = mixture
    r = np.random.default_rng(5)
    filled, starts = r.random(600) < full, r.integers(0, 700, 600).tolist()
    took = (np.where(filled, 10.0, 2.0) + 1e-5 * keys) * r.normal(1.0, 0.03, 600)
    steps = recorded(rows, keys, held, took, np.full(600, 0.1))
    steps.column("tokens")[:] = rows + 2000 * filled
    steps._chunks = [[(1, start, 2000, True)] * bool(one) for start, one in zip(starts, filled, strict=True)]
    costs = costs_of(steps, "here", GRAPHS | {"tokens": 4096, "prompts": 64})
    step = prompts(20, 16, 2700)
    step[FEATURES.index("keys")], step[FEATURES.index("held keys")] = 12_000, 5_200
    assert costs.of(step, 2) == pytest.approx((2.12, 0.1), rel=0.05)


def test_a_step_takes_the_longer_of_device_and_host(mixture):
    rows, keys, held = mixture
    device, host = 0.2 + 5e-5 * keys, 0.05 * rows
    assert (host > device).sum() > 100 < (host < device).sum()
    costs = costs_of(recorded(rows, keys, held, device, host), "here")
    assert costs.overlap
    assert predicted(costs, 30, 18_000, 7_000) == pytest.approx(1.5, rel=0.02)  # the host; the device needs 1.1
    assert predicted(costs, 12, 8_000, 4_400) == pytest.approx(0.6, rel=0.02)  # the device needs 0.6 as well
    assert predicted(costs, 6, 4_000, 2_800) == pytest.approx(0.4, rel=0.05)  # the device; the host needs 0.3


@pytest.mark.parametrize("parallel", [True, False])
def test_a_chunk_late_in_a_long_text(parallel, mixture):
    rows, keys, held = mixture
    r = np.random.default_rng(2)
    n, start = r.integers(100, 1000, 600), r.integers(0, 3000, 600)
    pairs = n * (start + n // 2)
    took = 1.0 + 1e-5 * keys + 1e-3 * n + (4e-4 * (start + n) if parallel else 2e-6 * pairs)
    steps = recorded(rows, keys, held, took, np.full(600, 0.1) if parallel else None)
    steps.column("tokens")[:], steps.column("pairs")[:] = rows + n, pairs
    steps._chunks = [[(1, *chunk, True)] for chunk in zip(start.tolist(), n.tolist(), strict=True)]
    own = dict(zip(FEATURES, costs_of(steps, "here").own, strict=True))
    assert own["longest prompt"] == pytest.approx(4e-4 * parallel, rel=0.05)
    assert own["prefill pairs"] == pytest.approx(2e-6 * (not parallel), rel=0.05)


SPLITS = {"splits": [32, 32, 32, 16, 8, 4], "programs": 128}


def test_a_device_waits_for_the_longest_text_which_more_programs_share_if_there_are_fewer_rows(mixture):
    rows, keys, held = mixture
    graphs, longest = GRAPHS | SPLITS, np.random.default_rng(3).integers(500, 4000, 600)
    share = longest / np.select([rows <= 4, rows <= 8, rows <= 16, rows <= 32], [32, 16, 8, 4], 128 / rows)
    steps = recorded(rows, keys, held, 1.0 + 1e-5 * keys + 1e-3 * share, np.full(600, 0.1))
    steps.column("longest")[:] = longest
    own = dict(zip(FEATURES, costs_of(steps, "here", graphs).own, strict=True))
    assert own["longest share"] == pytest.approx(1e-3, rel=0.05)
    assert [share_of(n, prompts, 3200, graphs) for n, prompts in ((1, 0), (12, 0), (12, 1), (4, 1), (64, 0))] == [
        100, 400, 400, 0, 1600
    ]
    assert share_of(12, 0, 3200, GRAPHS) == 3200


def test_a_step_with_more_rows_than_any_recorded_one_is_extrapolated(mixture):
    rows, keys, held = mixture
    deviations = Deviations(costs_of(recorded(rows, keys, held, 1.0 + 1e-5 * keys), "here"))
    for n, unlike in ((20, False), (39, False), (80, True)):
        deviations.took(path_of(work(n, n * 600, n * 200), 0, 1, {}), 2.0)
        assert deviations.extrapolated is unlike, n


GRAPHS = {"rows": [1, 2, 4, 8, 16, 32], "decodes": [16, 32], "tokens": 512, "prompts": 8, "launch_ms": 20.0}


def test_paths():
    sizes = [1, 2, 3, 5, 8, 9, 16, 17, 33, 64, 65, 127, 128, 130, 1000, 2048]
    assert [path_of(work(n, 0, 0), 0, 1, {}).size for n in sizes] == [
        1, 2, 4, 8, 8, 16, 16, 24, 40, 64, 72, 128, 128, 136, 1008, 2048
    ]
    assert [path_of(work(n, 0, 0), 0, 1, GRAPHS).size for n in sizes[:9]] == [1, 2, 4, 8, 8, 16, 16, 32, 40]
    mixed = [(7, 1, 90), (7, 2, 90), (30, 2, 480), (30, 2, 483), (3, 9, 90)]  # rows, prompts, prompt tokens
    assert [path_of(prompts(rows, tokens), n, 1, GRAPHS)[:2] for rows, n, tokens in mixed] == [
        (2, 1), (2, 16), (2, 32), (NO_GRAPH, 2), (NO_GRAPH, 2)
    ]
    assert path_of(prompts(30, 483), 2, 1, {})[:2] == (2, 1)


def prompts(rows: float, tokens: float, end: float = 0) -> list[float]:
    more = {"steps with several rows": 0.0, "prefill steps": 1, "prefill tokens": tokens, "longest prompt": end}
    features = dict(zip(FEATURES, work(rows, 0, 0), strict=True)) | more
    return list(features.values())


def test_a_step_without_a_graph_takes_its_launch_and_the_device_computes_meanwhile(mixture):
    rows, keys, held = mixture
    costs = costs_of(recorded(rows, keys, held, 1.0 + 1e-5 * keys, np.full(600, 0.3)), "here", GRAPHS)
    assert costs.no_graph == pytest.approx(19.7)
    own, launched = costs.of(prompts(20, 800), NO_GRAPH)
    assert own > 0 and launched == pytest.approx(20, rel=0.05)
    assert costs.of(prompts(20, 300), 2)[1] < 1


def test_a_step_that_was_computed_during_a_long_launch_makes_no_other_step_long(mixture):
    rows, keys, held = mixture
    slow = np.arange(600) % 60 == 30
    steps = recorded(rows, keys, held, 2.0 + 1e-5 * keys, np.where(slow, 8.0, 0.1))
    steps.column("tokens")[:] = rows + 100 * slow
    steps._chunks = [[(1, 0, 100, True)] * bool(one) for one in slow]
    steps.column("took")[slow] = 0.5
    after = np.roll(slow, 1)  # not launched before the results
    steps.column("t")[after] = steps.column("ended")[slow] + 1e-6
    costs = costs_of(steps, "here", GRAPHS | {"tokens": 64})
    deviations, path = Deviations(costs), path_of(step := prompts(20, 100, 100), 1, 1, costs.graphs)
    assert path.kind == NO_GRAPH
    assert all(deviations.took(path, max(costs.of(step, NO_GRAPH))) < 12 for _ in range(20))


def test_when_results_come():
    timeline = Timeline(tail=0.5)
    timeline.launch(4, 1, 1)
    timeline.launch(4, 1, 1)
    assert timeline.arrive() == 5  # launched after 1, computed after 5; the second one is launched meanwhile
    timeline.launch(6, 10, NO_GRAPH)
    assert timeline.arrive() == 10  # the launch; the device computes the second step until 4, then the third
    timeline.launch(3, 1, 1)
    assert timeline.arrive() == 1  # the launch; the third step ended half a millisecond after its own launch
    assert timeline.arrive() == 3


def test_of_an_engine_that_reports_only_results_the_time_between_two_steps_counts(mixture):
    rows, keys, held = mixture
    steps = recorded(rows, keys, held, took := 2.0 + 1e-5 * keys)
    steps.column("part:wait")[:] = np.nan
    idle = np.where(np.arange(len(rows)) % 100 == 50, 200.0, 0.0)  # then a step begins without decodes
    steps.column("arrived")[:] = np.cumsum(took + 0.5 + idle) / 1e3
    steps.column("decodes")[idle > 0] = 0
    assert predicted(costs_of(steps, "here"), 30, 18_000, 7_200) == pytest.approx(2.5 + 0.18, rel=0.01)


def test_of_an_engine_that_reports_only_results_the_steps_beside_prompts_tell_what_their_launch_takes(mixture):
    rows, keys, held = mixture
    r = np.random.default_rng(4)
    tokens = np.where(r.random(600) < 0.3, r.integers(10, 2000, 600), 0)
    here, ahead = tokens > 0, np.roll(tokens, -1)
    device = np.where(here, 5.0 + 0.02 * tokens, 1.0 + 1e-5 * keys)
    launch = np.where(ahead > 0, 20.0 + 0.001 * ahead, 0.5)
    took = np.maximum(device, launch)
    steps = recorded(rows, keys, held, took, np.full(600, 0.1))
    steps.column("tokens")[:], steps.column("device")[:] = rows + tokens, np.nan
    steps._chunks = [[(1, 0, int(n), True)] * bool(n) for n in tokens]
    costs = costs_of(steps, "here")
    assert costs.no_graph == pytest.approx(20, rel=0.02)
    decodes, mixed = work(20, 12_000, 5_200), prompts(20, 1000, 1000)
    assert path_of(mixed, 1, 1, costs.graphs) == StepPath(NO_GRAPH, 2, 20, 1)
    assert costs.of(decodes, 1)[0] == pytest.approx(1.12, rel=0.02)
    # The device begins with it behind the step before, and still needs 25 ms when it is launched, some in any case.
    assert 5 < costs.tail < 10
    own, launched = costs.of(mixed, NO_GRAPH)
    assert (own, launched) == (pytest.approx(25 - costs.tail + 21 - 1.1, rel=0.05), pytest.approx(21, rel=0.05))
    timeline, deviations, played = Timeline(costs.tail), Deviations(costs), []
    steps_played = [
        (prompts(rows[i], n, n), NO_GRAPH) if n else (work(rows[i], keys[i], held[i]), 1) for i, n in enumerate(tokens)
    ]
    for i, (step, kind) in enumerate(steps_played):
        timeline.launch(*costs.of(step, kind), kind)
        if i:
            path = StepPath(NO_GRAPH, 1 + bool(here[i - 1]), rows[i - 1], 1)
            quiet = path_of(steps_played[i - 1][0], 0, 1, costs.graphs)
            played.append(deviations.took(path if here[i] or here[i - 1] else quiet, timeline.arrive()))
    assert sum(played) == pytest.approx(took[:-1].sum(), rel=0.03)


def test_of_an_engine_that_does_not_report_its_host_one_step_before_prompts_tells_what_full_ones_hide(mixture):
    rows, keys, held = mixture
    here = (np.arange(600) >= 100) & (np.arange(600) < 400)  # all prompts fill the budget, one step after the other
    device = np.where(here, 45.0, 1.0 + 1e-5 * keys)
    steps = recorded(rows, keys, held, np.maximum(device, np.where(np.roll(here, -1), 20.0, 0.5)), np.full(600, 0.1))
    steps.column("tokens")[:], steps.column("device")[:] = rows + 2000 * here, device
    steps.column("part:plan")[:] = np.nan
    steps._chunks = [[(1, 0, 2000, True)] * bool(one) for one in here]
    assert costs_of(steps, "here").no_graph == pytest.approx(20)
