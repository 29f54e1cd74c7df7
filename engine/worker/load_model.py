"""Makes the decoder of a rank and fills it: from a checkpoint, from rounded weights kept on disk, or at random."""

from __future__ import annotations

from pathlib import Path

from engine.config import EngineConfig
from engine.errors import EngineError
from engine.model.checkpoint import checkpoint_slots
from engine.model.config import ModelConfig
from engine.model.decoder import Decoder
from engine.model.experts import Ops
from engine.model.group import Group
from engine.model.weights import dummy_weights, load_weights
from engine.progress import Progress
from engine.worker import kept_weights
from engine.worker.kept_files import KINDS, entry_name
from engine.worker.limits import Limits
from engine.worker.parameters import in_large_pages
from engine.worker.quantised import KEPT, describe_kept, kept_matrices, matrices


def load_model(
    model_config: ModelConfig, limits: Limits, config: EngineConfig, group: Group, ops: Ops, directory: Path | None,
    on_progress: Progress | None,
) -> tuple[Decoder, tuple[str, ...]]:  # fmt: skip
    """Returns the decoder of this rank with its weights, and sentences for the user. Raises EngineError.

    `limits`: with the device of this rank. The weights are random if config.dummy_weights.
    """
    kind, shard = limits.quantization, group.shard(model_config)
    files = None if config.dummy_weights else directory
    kept = kept_matrices(shard, model_config, ops, group, files) if kind == KEPT else None
    how = matrices(kind, model_config), group, kept

    def make() -> Decoder:
        return Decoder(shard, limits.dtype, limits.device, limits.max_model_len, ops, *how)

    def fill(model: Decoder) -> None:
        slots = group.shard_slots(model.slots(), model_config)
        if config.dummy_weights:
            dummy_weights(slots, config.seed)
        elif files is None:
            raise EngineError("there is neither a model directory nor dummy_weights: give one of these two options")
        else:
            slots = checkpoint_slots(slots, model_config, limits.dtype)
            load_weights(slots, files, model_config.tie_word_embeddings, on_progress, model_config.packing)

    if kind in KINDS and config.keep_weights and files is not None:
        name = entry_name(config.model or files.name, files, model_config, kind)
        return kept_weights.load(name, make, fill, on_progress)
    model = in_large_pages(make)[0] if limits.device.type == "cpu" else make()
    fill(model)
    return model, () if kept is None else (describe_kept(model, kept, limits.dtype),)
