"""Checkpoints as they lie on people's disks: what has no effect is ignored, anything else ends with one sentence."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from engine.errors import CheckpointError
from engine.files import eos_ids
from engine.hub.resolve import resolve_model
from engine.llm import LLM
from engine.model.decoder import Decoder
from engine.model.families import WITH_IMAGES
from engine.model.hf.config import read_model_config
from engine.text.tokenizer import Tokenizer
from minitui import tutor
from tests.support.checkpoints.images import IMAGES, save_layouts, with_images
from tests.support.models import Driver, load_decoder, make_request, make_runner, prompt, reference, rewrite, save
from tests.support.parity import PROMPT, our_logits, their_logits


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model in one file, and the same model in several."""
    model, folder = reference("qwen3"), tmp_path_factory.mktemp("odd")
    return {"one": save(model, folder / "one"), "shards": save(model, folder / "shards", shards=True)}


@pytest.fixture
def one(sources: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(sources["one"], tmp_path / "m"))


@pytest.fixture
def shards(sources: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(sources["shards"], tmp_path / "m"))


def equal(ours: Decoder, theirs: Decoder) -> bool:
    return all(torch.equal(a.view, b.view) for a, b in zip(ours.slots(), theirs.slots(), strict=True))


def test_shards_without_an_index_are_named(shards: Path) -> None:
    (shards / "model.safetensors.index.json").unlink()
    message = r"m has model-00001-of-.*\.safetensors.*, but neither model\.safetensors nor .*: download model\.safet"
    with pytest.raises(CheckpointError, match=message):
        load_decoder(shards)


def test_an_index_may_name_the_wrong_shard_of_a_tensor_but_not_the_wrong_shards(
    shards: Path, sources: dict[str, Path]
) -> None:
    path = shards / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = sorted(set(index["weight_map"].values()))
    turned = {name: files[(files.index(file) + 1) % len(files)] for name, file in index["weight_map"].items()}
    path.write_text(json.dumps({"weight_map": turned}))
    assert equal(load_decoder(shards), load_decoder(sources["one"]))
    lacking = dict.fromkeys(turned, files[0])
    path.write_text(json.dumps({"weight_map": lacking}))
    with pytest.raises(CheckpointError, match=rf"the checkpoint .*{files[0]} lacks .*: use config\.json and weights"):
        load_decoder(shards)


def test_a_missing_shard_is_named(shards: Path) -> None:
    (shards / sorted(path.name for path in shards.glob("model-*"))[1]).unlink()
    with pytest.raises(CheckpointError, match=r"index\.json names .* files, of which model-00002-of-.* is missing"):
        load_decoder(shards)


def test_tensors_without_an_effect_and_a_mixture_of_types_are_no_fault(one: Path, sources: dict[str, Path]) -> None:
    """Scales of a KV cache, of activations and of projections' outputs; layers that predict several tokens at once;
    rotary frequencies; norms in float64 beside float16 matrices."""
    scales = ("self_attn.k_scale", "self_attn.k_proj.output_scale", "mlp.up_proj.input_scale", "self_attn.prob_scale")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors |= {f"model.layers.1.{name}": torch.ones(1) for name in scales}
        tensors["mtp.layers.0.mlp.up_proj.weight"] = torch.ones(2)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)  # of old checkpoints
        tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
        tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"].half()

    rewrite(one, change)
    ours, theirs = load_decoder(one), load_decoder(sources["one"])
    ours.layers[0].mlp.gate_up.copy_(theirs.layers[0].mlp.gate_up)  # rounded to float16
    assert equal(ours, theirs)


def test_an_absent_output_matrix_names_the_field_that_ties_it(one: Path) -> None:
    rewrite(one, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight: .* set tie_word_embeddings to true in config"):
        load_decoder(one)


def test_an_embedding_model_is_recognised(one: Path) -> None:
    """Its tensors have the names of transformers' model without an output matrix, as in Qwen3-Embedding."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop("lm_head.weight")
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    rewrite(one, change)
    with pytest.raises(CheckpointError, match=r"and \d+ more, unknown .*: names without .model\.. are those of an"):
        load_decoder(one)


def test_quantised_tensors_without_a_quantization_config_are_recognised(one: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        stem = "model.layers.0.mlp.up_proj."
        tensors.pop(f"{stem}weight")
        tensors |= {f"{stem}{leaf}": torch.zeros(8, 8, dtype=torch.int32) for leaf in ("qweight", "qzeros")}

    rewrite(one, change)
    message = r"lacks .*up_proj\.weight; it has .*up_proj\.qweight.*, but config\.json has no quantization_config"
    with pytest.raises(CheckpointError, match=message):
        load_decoder(one)


def test_a_quantization_config_without_quantised_tensors_changes_nothing(one: Path, sources: dict[str, Path]) -> None:
    path = one / "config.json"
    fields = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    assert equal(load_decoder(one), load_decoder(sources["one"]))
    key = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(one / "model.safetensors")
    save_file(tensors | {key: tensors[key].to(torch.float8_e4m3fn)}, one / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight is of type F8_E4M3 and should be one of F64"):
        load_decoder(one)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize("edits", [
    [{"dtype": "bfloat16"}, {"torch_dtype": "torch.bfloat16"}, {"dtype": None, "torch_dtype": "bfloat16"}],
    [{"rope_theta": 5e3}, {"rope_theta": 5e3, "rope_scaling": None}, {"rope_parameters": {"rope_theta": 5e3}}],
    [{"rope_theta": 5e3, "rope_scaling": YARN}, {"rope_parameters": {**YARN, "rope_theta": 5e3}},
     {"rope_theta": 5e3, "rope_scaling": YARN, "rope_parameters": {**YARN, "rope_theta": 5e3}}],
    [{"head_dim": 16}, {"head_dim": None}],
    [{}, {"architectures": None}, {"model_type": None}, {"quantization_config": None}, {"tie_word_embeddings": None},
     {"auto_map": {"AutoModelForCausalLM": "modeling_m.M"}}],
])
def test_fields_may_be_absent_null_or_of_another_version(edits: list[dict[str, Any]], one: Path) -> None:
    path = one / "config.json"
    raw = json.loads(path.read_text())
    raw = {key: value for key, value in raw.items() if not key.startswith(("rope_", "dtype", "torch_dtype"))}
    found = []
    for edit in edits:
        path.write_text(json.dumps(raw | edit))
        found.append(read_model_config(one))
    assert found == found[:1] * len(edits)


BITS = {"group_size": 64, "bits": 4}
ELSEWHERE = (
    r"holds neither model\.safetensors nor .*, only {}: download the weights in safetensors that belong to config"
)
CONVERT = ELSEWHERE + r"\.json, or convert these with from_pretrained"


@pytest.mark.parametrize(("name", "sentence"), [
    ("pytorch_model.bin", CONVERT), ("consolidated.00.pth", ELSEWHERE), ("consolidated.safetensors", ELSEWHERE),
    ("onnx/model_q4.onnx", ELSEWHERE), ("tf_model.h5", CONVERT), ("openvino_model.xml", ELSEWHERE),
    ("gptq_model-4bit-128g.safetensors", "has {}, but neither .*: if this file holds the whole model, rename it to"),
    ("adapter_model.safetensors", r"holds a LoRA adapter of Org/Base \(adapter_config\.json\), .*merge_and_unload"),
])
def test_weights_in_another_format_are_named(name: str, sentence: str, one: Path) -> None:
    (one / name).parent.mkdir(exist_ok=True)
    (one / "model.safetensors").rename(one / name)
    if name.startswith("adapter"):
        (one / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "Org/Base"}))
    with pytest.raises(CheckpointError, match=sentence.format(re.escape(name))):
        load_decoder(one)
    (one / name).unlink()
    if name == "pytorch_model.bin":
        with pytest.raises(CheckpointError, match="download the checkpoint again, or use --dummy-weights"):
            load_decoder(one)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "model.safetensors", "model-00002-of-00003.safetensors"]
)
def test_a_link_to_a_file_that_is_gone_is_named(name: str, one: Path) -> None:
    """As in a hub cache whose blobs were deleted."""
    if "-of-" in name:
        (one / "model.safetensors").unlink()
        (one / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    (one / name).unlink(missing_ok=True)
    (one / name).symlink_to("../../blobs/0123abc")
    with pytest.raises(
        CheckpointError, match=rf"{re.escape(name)} is a link to \.\./\.\./blobs/0123abc, which does not"
    ):
        Tokenizer(one) if name.startswith("tokenizer") else load_decoder(one)


@pytest.mark.parametrize(("name", "sentence"), [
    ("params.json", "holds a model in Mistral's or Meta's own format, not a Hugging Face checkpoint: download the"),
    ("model_index.json", "holds a pipeline that makes images, not a language model"),
])
def test_a_directory_of_another_kind_of_model_is_named(name: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=rf"{sentence}.*{re.escape(name)} is there"):
        read_model_config(tmp_path)


def test_of_several_gguf_files_beside_a_config_one_must_be_named(one: Path) -> None:
    for name in "m-Q4_K_M.gguf", "m-Q8_0.gguf":
        (one / name).write_bytes(b"GGUF")
    assert resolve_model(str(one)) == one
    (one / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has 2 GGUF files: name one of them, as in --model .*m-Q4_K_M\.gguf"):
        resolve_model(str(one))


@pytest.mark.parametrize("inside", ["m", "snapshots/0123"])
def test_a_directory_that_only_holds_a_checkpoint_names_it(inside: str, tmp_path: Path) -> None:
    (tmp_path / inside).mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"give the directory that holds config\.json$"):
        read_model_config(tmp_path)
    (tmp_path / inside / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=rf"give the directory that holds config\.json, as in .*/{inside}$"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pointer_of_git_lfs_says_how_to_get_the_file(name: str, one: Path) -> None:
    (one / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)} .*it is a Git LFS pointer; run `git lfs pull`"):
        Tokenizer(one) if name.startswith("tokenizer") else load_decoder(one)


@pytest.mark.parametrize(("fields", "sentence"), [
    ({"quantization": BITS}, "the fields of mlx .*, and awq is the nearest"),
    ({"quantization": BITS, "quantization_config": BITS}, "the fields of mlx .*, and awq is the nearest"),
    ({"quantization_config": {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}},
      "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}}, "has transform_config .* without rotations"),
    ({"compression_config": {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"},
      "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}}, "has sparsity_config .* dense matrices"),
    ({"quantization_config": {"load_in_4bit": True}}, "the fields of bitsandbytes .*, and awq is the nearest"),
    ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "has quant_algo 'NVFP4' of "),
    ({"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "float", "strategy": "channel"}},
    }}}, "has format 'nvfp4-pack-quantized' with 4 bits, .* or its original checkpoint with --quantization int4"),
])
def test_a_quantisation_that_is_not_supported_is_named(fields: dict[str, Any], sentence: str, one: Path) -> None:
    path = one / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(CheckpointError, match=sentence):
        read_model_config(one)


@pytest.mark.parametrize(
    ("method", "nearest"), [("bitsandbytes", "awq"), ("torchao", "compressed-tensors"), ("exl2", "gptq"), ("mine", "")]
)
def test_the_nearest_method_of_quantisation_is_named(one: Path, method: str, nearest: str) -> None:
    path = one / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": method}}))
    like = f", and {nearest} is the nearest to it" if nearest else ""
    with pytest.raises(CheckpointError, match=rf"quant_method '{method}' .*mxfp4{like}; use a checkpoint in one of"):
        read_model_config(one)


def test_every_model_with_images_is_tested() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    assert {NAMES[kind] for kind, *_ in IMAGES.values()} == set(WITH_IMAGES)


@pytest.mark.parametrize("name", IMAGES)
def test_the_text_part_of_a_model_with_images_is_loaded(name: str, tmp_path: Path) -> None:
    """Also if all fields are in one object, as published of Qwen2.5-VL; the token that ends a reply is found, too."""
    theirs, ids = with_images(name, eos_token_id=7), prompt(0, PROMPT)
    expected = their_logits(theirs, ids).log_softmax(-1)
    directories = save_layouts(theirs, tmp_path)
    assert eos_ids(directories[0]) == (7,)
    if name.startswith("qwen2"):
        path = directories[1] / "config.json"
        raw = json.loads(path.read_text())
        flat = {**raw["text_config"], **{key: raw[key] for key in ("architectures", "model_type")}}
        del flat["rope_parameters"]
        flat |= {"rope_theta": 5000.0, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
        path.write_text(json.dumps(flat))
    for directory in directories:
        ours = our_logits(Driver(make_runner(directory, "float64")), make_request(ids, 0), [PROMPT])
        torch.testing.assert_close(ours.log_softmax(-1), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("given", [{}, {"window_blocks": 9, "state_slots": 4}])
def test_a_size_of_a_pool_that_the_model_lacks_has_no_effect_and_says_so(given: dict[str, int], one: Path) -> None:
    with LLM(str(one), load_tokenizer=False, num_blocks=8, **given) as llm:
        told = [note for note in llm.info.notes if "has no effect" in note]
    assert [note.split()[0] for note in told] == [f"--{name.replace('_', '-')}" for name in given]


@pytest.mark.parametrize("ids", [None, [7, 9]])
def test_a_checkpoint_without_end_tokens_says_so(ids: Any, one: Path) -> None:
    path = one / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ids}))
    (one / "generation_config.json").unlink(missing_ok=True)
    with LLM(str(one), load_tokenizer=False, num_blocks=8) as llm:
        assert llm.info.eos_ids == (ids or [])
        assert any("names no token that ends a reply" in note for note in llm.info.notes) == (ids is None)


@pytest.mark.parametrize("base", ["Qwen/Qwen3-0.6B", None])
def test_a_lora_adapter_names_its_model_and_the_way_out(base: Any, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base, "r": 8}))
    of = r" of Qwen/Qwen3-0\.6B" if base else ""
    message = rf"holds a LoRA adapter{of} \(adapter_config\.json\), .*merge_and_unload"
    with pytest.raises(CheckpointError, match=message):
        read_model_config(tmp_path)


@pytest.mark.parametrize("files", [["tokenizer.model"], ["merges.txt", "vocab.json"], ["tekken.json"], []])
def test_a_tokenizer_in_another_format_is_named(files: list[str], tmp_path: Path) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json does not exist.*save_pretrained") as caught:
        Tokenizer(tmp_path)
    assert all(name in str(caught.value) for name in files)
    assert (", only " in str(caught.value)) == bool(files)


@pytest.mark.parametrize("newer", [False, True])
def test_special_tokens_are_named_where_transformers_finds_them(newer: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    shutil.copy(tutor.model_dir() / "tokenizer.json", tmp_path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    config |= {"chat_template": "{{ bos_token }}"} | ({"added_tokens_decoder": {}} if newer else {})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    names = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|endoftext|>"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(names))
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.render_chat([]) == (theirs.bos_token or "")
    ours.stop_rendering()


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_a_chat_template_in_a_file_of_its_own_is_found(name: str, tmp_path: Path) -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    shutil.copy(tutor.model_dir() / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / name).write_text(source if name.endswith("jinja") else json.dumps({"chat_template": source}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.render_chat([{"role": "user", "content": "Hello"}]) == "<user>Hello"


def with_tokens(directory: Path, name: str, contents: dict[str, Any]) -> Path:
    """The bundled tokenizer, whose tokenizer.json has lost its control tokens, and a file that lists tokens."""
    raw = json.loads((tutor.model_dir() / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps(raw | {"added_tokens": raw["added_tokens"][:1]}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    for file, fields in ("tokenizer_config.json", config), (name, contents):
        path = directory / file
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | fields))
    return directory


NEW = 2560  # the first id after the bundled vocabulary


@pytest.mark.parametrize("older", [False, True])
def test_tokens_listed_beside_tokenizer_json_are_those_of_transformers(older: bool, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    listed: dict[str, Any] = {
        str(NEW + 1): {"content": "<plain>", "normalized": True},
        str(NEW): {"content": "<tool>", "special": True, "rstrip": True},
        "1": {"content": "<|im_start|>", "special": True},
    }
    if older:
        contents = {each["content"]: int(number) for number, each in listed.items()}
        with_tokens(tmp_path, "added_tokens.json", contents)
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"extra_special_tokens": ["<tool>"]}))
    else:
        with_tokens(tmp_path, "tokenizer_config.json", {"added_tokens_decoder": listed})
    ours, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "a<|im_start|>user<tool>  b <plain> c<|im_end|>"
    ids = ours.encode(text, allow_special=True)
    assert ids == theirs.encode(text) and {1, 2, NEW, NEW + 1} <= set(ids)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == NEW + 2 and ours.special_ids >= {2, NEW} and NEW + 1 not in ours.special_ids
    assert tokenizers.Tokenizer.from_str(ours.to_json()).encode(text).ids == ids
    assert NEW not in ours.encode(text), "the text of a user makes no control token"


@pytest.mark.parametrize(("name", "contents", "sentence"), [
    ("tokenizer_config.json", {"added_tokens_decoder": {"9999": {"content": "<x>"}}},
     r"lists the token '<x>' with the id 9999, but after the tokens of tokenizer\.json it would have the id 2560"),
    ("tokenizer_config.json", {"added_tokens_decoder": [1]}, r"has added_tokens_decoder = \[1\]: it must be an object"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"2": {"content": ""}}}, "a token has a content, flags that"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"2": {"content": "x", "special": 1}}}, "flags that are true"),
    ("tokenizer_config.json", {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}}, "a whole number as its id"),
    ("added_tokens.json", {"<x>": [2560]}, r"added_tokens\.json lists the token .* with the id \[2560\]"),
])
def test_damaged_lists_of_tokens_are_one_sentence(
    name: str, contents: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        Tokenizer(with_tokens(tmp_path, name, contents))
