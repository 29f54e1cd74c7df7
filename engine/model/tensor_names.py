"""What the names of a checkpoint's tensors say: which tensors have no effect, and what a wrong checkpoint is."""

from __future__ import annotations

from engine.model.config import Packing

OF_QUANTISED = ("weight_scale", "_scale_inv", "weight_packed", "qweight", "_blocks", ".SCB", ".absmax")
FIRST = "embed_tokens.weight"


def plain_name(name: str) -> str:
    """Returns the name that a tensor has in a checkpoint without images: the text model is there the whole model."""
    for prefix, plain in (("language_model.model.", "model."), ("model.language_model.", "model.")):
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    return name.removeprefix("language_model.") if name.startswith("language_model.lm_head") else name


def is_unused(name: str) -> bool:
    """Returns True for tensors without an effect: rotary frequencies, and the parts of a model that read images.

    Older Llama checkpoints have rotary frequencies, but the configuration determines them. `mtp`: layers that predict
    several tokens at once.
    """
    parts = ("vision_tower.", "multi_modal_projector.", "visual.", "mtp.")
    # This engine computes the scales of activations, keys and values itself, if it rounds them at all.
    unused = (
        ".rotary_emb.inv_freq", ".input_scale", ".input_global_scale", ".input_zero_point", ".activation_scale",
        ".k_scale", ".v_scale", ".q_scale", ".prob_scale", "k_proj.output_scale", "v_proj.output_scale",
        "q_proj.output_scale",
    )  # fmt: skip
    return name.endswith(unused) or name.removeprefix("model.").startswith(parts)


def advice(missing: list[str], unexpected: list[str], packing: Packing | None) -> str:
    """Returns what to do about a checkpoint that lacks tensors and has tensors that are not expected."""
    if missing == ["lm_head.weight"] and not unexpected:
        return "download it again, or set tie_word_embeddings to true in config.json if the embedding is this matrix"
    if FIRST in unexpected and f"model.{FIRST}" in missing:
        return (
            "names without 'model.' are those of an embedding model, which does not generate text; use the chat model "
            "of this family"
        )
    if packing is None and any(name.endswith(OF_QUANTISED) for name in unexpected):
        return (
            "these are tensors of a quantised checkpoint, but config.json has no quantization_config: use the "
            "config.json that belongs to them, or another quantisation"
        )
    return "use config.json and weights of the same model"
