"""Records vLLM's scheduler under the requests of a lesson, in minitui/teaching/vllm.trace; needs vLLM.

    python -m tests.support.vllm_lesson

This engine runs the requests first: vLLM's scheduler then gets the same prompts, and each step the same tokens.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

from engine.info import EngineInfo
from minitui.chat.conversation import Sampling
from minitui.chat.model_choice import load_codec
from minitui.cli.teaching import lesson_source
from minitui.teaching.lessons.l6_scheduler import FILE, submit
from minitui.teaching.stage import plain_stage
from minitui.trace.recorder import Recorder
from minitui.vllm.translate import Translator
from tests.support.vllm_direct import Kept

LESSON = 6


async def run_here() -> tuple[EngineInfo, list[tuple[list[int], list[int]]]]:
    """Returns facts about this engine, and the prompt and the reply of each request."""
    _, source, _ = lesson_source(LESSON)
    async with plain_stage(source, Sampling(temperature=0), load_codec, system="", say=print, beat=0.0) as stage:
        chats, _ = await submit(stage)
        prompts = [list(stage.chats.prompt(chat).ids) for chat in chats]
        await stage.answers(chats)
        return source.info, [(ids, chat.ids[len(ids) :]) for ids, chat in zip(prompts, chats, strict=True)]


def run_vllm(info: EngineInfo, texts: list[tuple[list[int], list[int]]]) -> list[Any]:
    """Returns the messages of vLLM's scheduler."""
    import minitui.vllm.recorder as recording
    from tests.support.vllm_driver import Load, make_scheduler

    recording.Pipe = Kept  # type: ignore[assignment, misc]
    with tempfile.TemporaryDirectory() as directory:
        scheduler = make_scheduler(  # vLLM counts its null block
            Path(directory), info.num_blocks + 1, info.max_num_seqs, info.max_num_batched_tokens
        )
        load = Load(scheduler, 1)
        replies = {load.add(prompt, len(reply)): reply for prompt, reply in texts}
        load.sample = lambda id: replies[id][scheduler.requests[id].num_output_tokens]  # type: ignore[method-assign]
        load.finish()
        return scheduler._recorder.pipe.messages


def main() -> None:
    """Write the file."""
    info, texts = asyncio.run(run_here())
    (_, *init), *messages = run_vllm(info, texts)
    translator = Translator(*init)
    recorder = Recorder(FILE)
    facts = {name: init[1][name] for name in ("engine", "num_blocks", "block_size", "dtype", "prefix_caching")}
    about = EngineInfo(**facts, model="tutor", device="no model: only the scheduler", random_text=True)
    recorder.begin(about, translator.blocks.state.snapshot())
    for message in messages:
        translator.take(message)
    recorder.feed(translator.drain())
    recorder.close()
    print(f"{FILE.stat().st_size:,} bytes, {recorder.steps} steps, {dict(translator.blocks.counts)}")


if __name__ == "__main__":
    main()
