"""Beam search finds the sequences that transformers' beam search finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine import LLM, BeamSearchParams, InvalidRequest
from minitui.tutor import model_dir
from tests.support.models import prompt, reference, save


@pytest.mark.parametrize("width", [1, 3, 5])
def test_the_sequences_are_those_of_transformers(tmp_path: Path, width: int) -> None:
    model = reference("qwen3")
    prompts = [prompt(seed, 12) for seed in range(2)]
    with LLM(str(save(model, tmp_path)), load_tokenizer=False, num_blocks=64, dtype="float32") as llm:
        found = llm.beam_search(
            [{"prompt_token_ids": ids} for ids in prompts], BeamSearchParams(width, max_tokens=5, ignore_eos=True)
        )
        assert not llm.engine.has_work
    for ids, output in zip(prompts, found, strict=True):
        expected = model.generate(
            torch.tensor([ids]), num_beams=width, num_return_sequences=width, max_new_tokens=5, min_new_tokens=5,
            do_sample=False, eos_token_id=None, pad_token_id=0, output_scores=True, return_dict_in_generate=True,
            length_penalty=1.0,
        )
        assert [each.tokens for each in output.sequences] == expected.sequences.tolist()
        if width > 1:
            scores = [each.cum_logprob / 5 for each in output.sequences]
            assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)


def test_an_end_token_ends_a_sequence_and_the_length_penalty_decides() -> None:
    with LLM(str(model_dir()), num_blocks=256) as llm:
        ids = llm.get_tokenizer().apply_chat_template([{"role": "user", "content": "What is the KV cache?"}])
        [output] = llm.beam_search(ids, BeamSearchParams(beam_width=2, max_tokens=60))
        best = output.sequences[0]
        assert best.finish_reason == "stop" and best.tokens[-1] in llm.get_tokenizer().eos_ids
        assert best.tokens[: len(ids)] == ids and "cache" in (best.text or "")
        assert sum(choices[token].logprob for token, choices in zip(best.tokens[len(ids) :], best.logprobs, strict=True)
                   ) == pytest.approx(best.cum_logprob)
        for width in (0, 11, True):
            with pytest.raises(InvalidRequest, match="from 1 to 10"):
                llm.beam_search("a", BeamSearchParams(width, 5))
        with pytest.raises(InvalidRequest, match="at least 1"):
            llm.beam_search("a", BeamSearchParams(2, 0))
