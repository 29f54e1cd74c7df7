"""Chats with a model that keeps recurrent states beside keys and values: the demo `hybrid`.

The model has the tokenizer of the bundled model, the layers of a small Qwen3.5 and random weights: its replies are
noise. What is cached does not depend on them. The workload is that of vLLM's issue 45238: many prompts share a
beginning, and a shift of about 100 tokens decides whether a checkpoint lies in what they share.
"""

from __future__ import annotations

from typing import Any

from minitui.teaching.contrasts import notes
from minitui.teaching.stage import Stage
from minitui.text import duration, match_reason
from minitui.viewmodel.explain.cut_hits import CUT, again_ms

LAYERS = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
MODEL = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "layer_types": LAYERS,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
OPTIONS: dict[str, Any] = {
    "dummy_weights": True, "hf_overrides": MODEL, "kv_blocks": 192, "max_num_batched_tokens": 1024,
}
INTERVAL = 512  # tokens between two checkpoints of a long prompt
LONG, SHORT = 25, 19  # notes in the system prompt
SAME, FOUND, PROMPT = 420, 416, 555  # with SHORT: tokens that two prompts share, those in full blocks, tokens of each
NAMES = ("Oslo", "Lima", "Cairo")


async def three_chats(stage: Stage, lines: int) -> list[dict[str, Any]]:
    """Runs three chats, one after the other, with one system prompt and different questions; returns their metrics.
    `lines`: notes in the system prompt. Two metrics are added: "first_ms", the time to the first token, and "again_ms",
    that of the tokens that were computed again because no checkpoint was nearer (None: unknown)."""
    found = []
    for name in NAMES:
        session = stage.chat(f"{stage.system} {notes(lines)}", name, max_tokens=4, whole=True)
        stage.show(session)
        request = await stage.ask(session, " ".join(f"{name} asks for part {i}." for i in range(14)))
        (metrics,) = await stage.answers([session])
        await stage.gate()
        lane = stage.view.history.lanes.lanes[request]
        stop, at, _ = lane.request.match
        again = again_ms(stage.view.history, lane, at, lane.request.cached_tokens) if stop in CUT else None
        found.append(metrics | {"first_ms": lane.ttft[1] if lane.ttft else 0.0, "again_ms": again})
    return found


def told(metrics: dict[str, Any], again_ms: float | None = None) -> str:
    """Returns how much of a prompt came from the cache, and why the rest did not, with the time that this took."""
    match, cached = metrics["match"], metrics["cached_tokens"]
    why = match_reason(match["stop"], match["at"], cached, match["detail"], again_ms)
    return f"{cached} of {metrics['prompt_tokens']} tokens ({why})"


async def hybrid(stage: Stage) -> None:
    """Shows that a shift of about 100 tokens takes all hits of a hybrid model, until a checkpoint is there."""
    await stage.gate()
    stage.look("inspect")
    stage.say(
        "This model has random weights and the layers of a small Qwen3.5: three of four keep no keys and values. They "
        "keep one state, which changes with each token. The engine keeps copies of it, checkpoints: here one after "
        f"{INTERVAL} tokens and one at the end of a prompt. Three chats ask with one long system prompt."
    )
    await stage.pause(4)
    before = await three_chats(stage, LONG)
    stage.say(
        f"Oslo's checkpoints were at {INTERVAL} and near the end of its prompt. "
        f"Lima took {told(before[1], before[1]['again_ms'])}. "
        f"Where its hit in full attention ended, Lima left one more checkpoint. Cairo took {told(before[2])}."
    )
    await stage.pause(4)
    stage.remove_chats()
    await stage.source.control("clear_cache")
    shift = before[0]["prompt_tokens"] - PROMPT
    await stage.predict(
        f"The cache is cleared, and the shared text is {shift} tokens shorter: {SAME} tokens. The questions stay. "
        "What does the second chat take from the cache?",
        [f"{FOUND} tokens: the full blocks of the shared text", f"{INTERVAL} tokens: up to the checkpoint", "nothing"],
    )
    after = await three_chats(stage, SHORT)
    stage.say(
        f"{stage.verdict(2)}Lima took {told(after[1], after[1]['again_ms'])}. "
        f"The checkpoint at {INTERVAL} is now behind the shared text. A "
        "state cannot be taken back to an earlier token, so the cached keys and values do not help."
    )
    await stage.read_answer()
    rows = []
    for what, found in (("before", before), ("shifted", after)):
        for name, metrics in zip(NAMES, found, strict=True):
            computed = metrics["prompt_tokens"] - metrics["cached_tokens"]
            rows.append((f"{name}, {what}", float(computed), f"{computed}, {duration(metrics['first_ms'])}"))
    stage.say(f"Prompt tokens computed, and the time to the first token:\n{stage.bars(rows)}")
    await stage.pause(4)
    stage.say(
        "Cairo hits again, because Lima left a checkpoint where the texts part. In vLLM, a shift of 100 tokens took "
        "such hits from 52 of 64 requests to 0, and the first token from 433 to 905 ms (its issue 45238)."
    )
