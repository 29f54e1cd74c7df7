"""The scenarios of the demos that do the same work under two settings (contrasts.py), and then compare the two runs."""

from __future__ import annotations

from typing import Any

from engine.config import EngineConfig
from minitui.teaching.contrasts import BUSY, CONTRASTS, LENGTHS, SHORT, WRITERS, Contrast, ask_again
from minitui.teaching.figures import Figures
from minitui.teaching.recorded_steps import recorded_device
from minitui.teaching.stage import Stage
from minitui.text import duration, ms
from minitui.viewmodel.compare.runs import Run


async def _first(stage: Stage, contrast: Contrast) -> Figures:
    """Does the work of a contrast under its first setting, which the engine already has."""
    await stage.begin_run(contrast.first.name, first=True)
    return await _worked(stage, contrast)


async def _second(stage: Stage, contrast: Contrast, name: str = "", **options: Any) -> Figures:
    """Does the work under the second setting, in another engine, and shows both runs side by side. `name`, `options`:
    instead of the setting's own."""
    await stage.other_engine(**contrast.second.options | options)
    await stage.begin_run(name or contrast.second.name)
    figures = await _worked(stage, contrast)
    stage.look("compare")
    return figures


async def _worked(stage: Stage, contrast: Contrast) -> Figures:
    stage.begin_count()
    await contrast.work(stage)
    await stage.settle()
    return stage.figures()


def _step_times(times: dict[int, float], one: str, several: str) -> str:
    """Returns sentences on the smallest and the largest decode steps, here and on a GPU. `times`: tokens -> ms."""
    least, most = min(times), max(times)
    device = recorded_device()
    model = device.models["8B"]
    there = model.decode
    few, many = min(there), max(n for n in there if n <= most)
    return (
        f"Here, a decode step with {least} {one if least == 1 else several} took {ms(times[least])} ms, and one with "
        f"{most} {several} took {ms(times[most])} ms. {model.name} on an {device.name}: {ms(there[few])} ms "
        f"with {few}, {ms(there[many])} ms with {many}."
    )


# ---- cache


async def cache_on_off(stage: Stage) -> None:
    """Runs the same six requests without the prefix cache, and then with it."""
    contrast = CONTRASTS["cache"]
    stage.say("The prefix cache is off. Six chats with the same system prompt ask at once. Every prompt is computed.")
    await stage.pause(1.5)
    without = await _first(stage, contrast)
    stage.say(
        f"Without the cache, {without.computed} prompt tokens were computed. "
        "Now the same six requests run in an engine with the cache on."
    )
    with_cache = await _second(stage, contrast)
    rows = [
        ("cache off", without.computed, f"{without.computed:,} tokens computed"),
        ("cache on", with_cache.computed, f"{with_cache.computed:,} computed, {with_cache.cached:,} shared"),
    ]
    stage.say(
        f"Both runs had the same prompts, with {with_cache.prompt_tokens:,} tokens. "
        f"The cache saved {with_cache.share_cached:.0%} of the prefill.\n{stage.bars(rows)}\n"
        f"The prompts took {duration(without.prefill_ms)} without the cache and {duration(with_cache.prefill_ms)} with "
        "it. One step computed the first request's blocks. The other five requests shared them in that step."
    )


# ---- chunked-prefill


def _pasted(stage: Stage) -> tuple[float, int, int, float]:
    """Returns (longest gap between two tokens of a reply in ms, tokens of the long prompt, number of steps that
    computed the prompt, time from its first step to its first token in ms)."""
    run = Run(stage.view)
    lane = run.lanes[-1]
    assert lane.ttft is not None and run.figures.longest is not None
    chunks = sum(
        any(chunk[0] == lane.id for chunk in stage.view.history.steps.chunks(step))
        for step in range(run.first, run.last + 1)
    )
    return run.figures.longest.ms, lane.request.prompt_tokens, chunks, lane.ttft[1]


async def chunked_prefill(stage: Stage) -> None:
    """Computes a long prompt at once, and then in chunks, while three chats write."""
    contrast = CONTRASTS["chunked-prefill"]
    stage.say(
        f"Chunked prefill is off. {WRITERS} chats write, each one token in a step. Then a user pastes a long text."
    )
    await stage.pause(1.5)
    await _first(stage, contrast)
    at_once, tokens, _, whole = _pasted(stage)
    stage.say(
        f"All {tokens:,} tokens of the long prompt were computed in one step. The {WRITERS} writing chats waited for "
        f"it: {duration(at_once)} without a token. Now the same with chunks: no step may compute more than "
        f"{stage.source.info.max_num_batched_tokens} tokens."
    )
    await _second(stage, contrast)
    chunked, tokens, chunks, in_chunks = _pasted(stage)
    rows = [
        ("at once", at_once, f"{duration(at_once)} without a token"),
        ("in chunks", chunked, f"{duration(chunked)} at most, {chunks} chunks"),
    ]
    stage.say(
        f"The longest wait of a writing chat for its next token, while {tokens:,} prompt tokens were computed:\n"
        f"{stage.bars(rows)}\n"
        f"The first token of the long prompt itself came after {duration(in_chunks)} instead of {duration(whole)}"
        f", in {chunks} steps instead of one."
    )


# ---- fairness


def _beside(stage: Stage) -> tuple[float, list[float], float]:
    """Returns the longest gap of the writing chats beside prompts, the times to the first token of the short questions,
    and that of the long prompt, in ms."""
    run = Run(stage.view)
    rows = [stage.view.history.steps.get(step) for step in range(run.first, run.last + 1)]
    gaps = [row.took_ms for row in rows if row is not None and row.chunks and row.tokens > row.prefill_tokens]
    pasted, *short = (sum(lane.ttft) for lane in run.lanes[BUSY:] if lane.ttft is not None)
    return max(gap for gap in gaps if gap is not None), short, pasted


async def fairness(stage: Stage) -> None:
    """Computes a long prompt and many short ones while chats write, without and with a target for gaps."""
    contrast = CONTRASTS["fairness"]
    stage.say(
        f"{BUSY} chats write. Then a user pastes a long text, and {SHORT} others ask short questions, all at the same "
        "moment."
    )
    await stage.pause(1.5)
    figures = await _first(stage, contrast)
    usual, (without, _, soon) = figures.decode_step_ms[BUSY], _beside(stage)
    target = round(1.7 * usual, 1)
    stage.say(
        f"The writing chats usually get a token every {duration(usual)}. Beside the prompts, their longest gap was "
        f"{duration(without)}, {without / usual:.0f} times as long. Now the same with --max-gap-ms {target:g}: a step "
        "computes as many prompt tokens as fit into this time, as measured, and a long prompt leaves half of them to "
        "short ones."
    )
    await _second(stage, contrast, f"target of {target:g} ms", max_gap_ms=target)
    longest, waits, late = _beside(stage)
    mean, most = sum(waits) / len(waits), max(waits)
    rows = [
        ("no target", without, f"{duration(without)}, {without / usual:.1f} times the usual gap"),
        ("target", longest, f"{duration(longest)}, {longest / usual:.1f} times"),
    ]
    stage.say(
        f"The longest gap of a writing chat beside the prompts:\n{stage.bars(rows)}\n"
        f"The short questions passed the long text. They waited {duration(mean)} on average and {duration(most)} at "
        f"most, {most / mean:.1f} times the average. The long text got its first token after {duration(late)} instead "
        f"of {duration(soon)}."
    )


# ---- batching


async def batching(stage: Stage) -> None:
    """Writes eight replies of different lengths in four rows, with static and then with continuous batching."""
    stage.say(
        f"Static batching: {len(LENGTHS)} replies of {min(LENGTHS)} to {max(LENGTHS)} tokens, four rows. "
        "The next four start when all of the first four have ended."
    )
    await stage.pause(2)
    contrast = CONTRASTS["batching"]
    static = await _first(stage, contrast)
    times = [Run(stage.view).figures.time]
    stage.say(
        f"That took {static.steps} steps. Now the same replies with continuous batching: a finished request frees its "
        "row at once."
    )
    continuous = await _second(stage, contrast)
    times.append(Run(stage.view).figures.time)
    rows = [
        (name, run.steps, f"{run.steps} steps, {duration(time)}")
        for name, run, time in zip(("static", "continuous"), (static, continuous), times, strict=True)
    ]
    step_times = _step_times(static.decode_step_ms, "row", "rows")
    less = times[1] * static.steps > times[0] * continuous.steps
    stage.say(
        f"The same {sum(LENGTHS)} tokens in the same four rows:\n{stage.bars(rows)}\n{step_times} "
        "Continuous batching gives a free row to the next request at once, so here it needs fewer steps."
        + " The time differs less than the number of steps." * less
    )


# ---- speculation


async def speculation(stage: Stage) -> None:
    """Writes the same reply without and with speculation, which copies drafts from the text and checks them."""
    stage.say(
        "A chat asks a question, and then the same question again, so the second reply may repeat the first. Without "
        "speculation, each token still needs its own step."
    )
    await stage.pause(2)
    contrast = CONTRASTS["speculation"]
    await stage.begin_run(contrast.first.name, first=True)
    session = await ask_again(stage)
    await stage.slow(0.05)
    [metrics] = await stage.answers([session])
    without = stage.figures()
    tokens = metrics["output_tokens"]
    stage.say(f"The second reply has {tokens} tokens and took {without.steps} steps. Now with prompt lookup.")
    await stage.other_engine(**contrast.second.options)
    await stage.begin_run(contrast.second.name)
    session = await ask_again(stage)
    stage.say(
        "Prompt lookup takes the last three tokens, and searches the earlier text for the same three. The tokens after "
        f"them, at most {EngineConfig.speculative_tokens}, are drafts: guesses of the next tokens. The next step "
        "computes the last token and the drafts, and samples a token after each of them. Each draft is compared with "
        "the token sampled for its place. The drafts before the first difference are accepted. So, apart from "
        "rounding, the reply stays the same, but it can need fewer steps."
    )
    await stage.pause(4)
    await stage.predict(
        f"How many steps does the same reply of {tokens} tokens take now?",
        [f"{without.steps}, as before", f"{without.steps // 2}, half as many", f"fewer than {without.steps // 4}"],
    )
    await stage.step_until("an accepted draft", lambda: stage.last_row().accepted > 0, seconds=0.5)
    row = stage.last_row()
    request, drafted, accepted = row.drafts[0]
    stage.say(
        f"Step {row.step} computed {row.tokens} tokens for r{request}: its last token and {drafted} drafts. "
        f"{accepted} drafts were accepted, and the token sampled after them is used, too: {accepted + 1} tokens in "
        "one step."
    )
    await stage.pause(4)
    await stage.slow(0.25)
    await stage.answers([session])
    await stage.settle()
    drafting = stage.figures()
    stage.look("compare")
    rows = [
        ("one by one", without.steps, f"{without.steps} steps, {duration(without.decode_ms)}"),
        ("with drafts", drafting.steps, f"{drafting.steps} steps, {duration(drafting.decode_ms)}"),
    ]
    times = _step_times(without.decode_step_ms | drafting.decode_step_ms, "token", "tokens")
    right = 2 if drafting.steps < without.steps // 4 else 1 if drafting.steps < without.steps else 0
    stage.say(
        f"{stage.verdict(right)}The same {tokens} tokens of the second reply:\n{stage.bars(rows)}\n"
        f"{drafting.accepted} of {drafting.drafted} drafts were accepted. {times} A reply without repetition can get "
        "slower. If its drafts fail again and again, a request gets fewer drafts."
    )
