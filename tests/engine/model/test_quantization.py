"""8-bit matrices: what rounding does is known, bounded, and the same on every path."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.build import make_runner as build_runner
from engine.config import EngineConfig
from engine.errors import CheckpointError, EngineError
from engine.llm import LLM
from engine.model import linear as matrices
from engine.model.decoder import Decoder
from engine.model.four_bits import Int4Weight
from engine.model.hf.config import read_model_config
from engine.model.linear import Bf16Pairs, Fp8Weight, Int8Weight, embed, linear, quantise_rows
from engine.model.weights import load_weights
from engine.params import SamplingParams
from engine.worker.weights import quantised
from minitui import tutor
from tests.support.families import checkpoint
from tests.support.models import Driver, make_request, make_runner, prompt, reference, save
from tests.support.parity import (  # noqa: F401 (fixtures)
    decodes_on_a_cpu,
    needs_kernels,
    our_logits,
    processor,
    step_logits,
)

CPU = torch.device("cpu")
OPTIONS = {"quantization": "int8"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference("qwen3", tie_word_embeddings=True), tmp_path_factory.mktemp("qwen3"))


def test_a_rounded_row_is_off_by_half_a_step_at_most() -> None:
    x = torch.randn(7, 33) * torch.logspace(-3, 3, 7)[:, None]
    x[3] = 0
    values, scale = quantise_rows(x)
    assert values.dtype == torch.int8
    assert values.abs().amax(1).tolist() == [127, 127, 127, 0, 127, 127, 127]
    assert ((values * scale[:, None] - x).abs() <= scale[:, None] / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_matrix_that_is_rounded_in_parts_is_rounded_as_a_whole(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(matrices, "WIDENED", 10 * 33)
    weight, x = Int8Weight.empty(37, 33, CPU), torch.randn(37, 33, dtype=dtype)
    weight.copy_(x)
    values, scale = quantise_rows(x.float())
    assert torch.equal(weight.values, values) and torch.equal(weight.scale, scale)


def test_a_product_is_that_of_the_rounded_matrices() -> None:
    """torch rounds no activations, so that two orders of sums do not become two steps of 1 / 127."""
    weight, x, bias = Int8Weight.empty(5, 33, CPU), torch.randn(4, 33), torch.randn(5)
    weight.copy_(torch.randn(5, 33).bfloat16())
    wide = (weight.values.double() * weight.scale.double()[:, None]).t()
    expected = x.double() @ wide + bias
    torch.testing.assert_close(linear(x, weight, bias).double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(embed(torch.tensor([4, 0]), weight), (weight.values * weight.scale[:, None])[[4, 0]])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_values_that_are_not_finite_show_in_the_product(bad: float) -> None:
    weight, x = Int8Weight.empty(3, 8, CPU), torch.randn(2, 8)
    weight.copy_(torch.randn(3, 8))
    x[1, 5] = bad
    product = linear(x, weight)
    assert product[0].isfinite().all()
    assert not product[1].isfinite().any()


def test_a_checkpoint_is_rounded_tensor_by_tensor(directory: Path) -> None:
    config = read_model_config(directory)
    plain, small = (Decoder(config, torch.float32, CPU, 16, quantised=quantised) for quantised in (None, Int8Weight))
    for model in (plain, small):
        load_weights(model.slots(), directory, config.tie_word_embeddings)
    assert small.nbytes < 0.32 * plain.nbytes
    assert small.head is small.embedding
    for ours, theirs in zip(small.slots(), plain.slots(), strict=True):
        if isinstance(ours.view, Int8Weight):
            values, scale = quantise_rows(theirs.view)
            assert torch.equal(ours.view.values, values), ours.name
            assert torch.equal(ours.view.scale, scale), ours.name
        else:
            assert "norm" in ours.name
            assert torch.equal(ours.view, theirs.view)


def test_rounding_to_e4m3_keeps_three_bits_of_mantissa(directory: Path) -> None:
    x = torch.randn(7, 64) * torch.logspace(-3, 3, 7)[:, None]
    x[3] = 0
    values, scale = Fp8Weight.rounded(x)
    wide = values.float() * scale[:, None]
    assert values.float().abs().amax(1).tolist() == [448, 448, 448, 0, 448, 448, 448]
    assert ((wide - x).abs() <= (x.abs() / 16).clamp_min(scale[:, None] * 2**-10) * (1 + 1e-5)).all()
    config = read_model_config(directory)
    model = Decoder(config, torch.float32, CPU, 16, quantised=Fp8Weight)
    load_weights(model.slots(), directory, config.tie_word_embeddings)
    plain = Decoder(config, torch.float32, CPU, 16)
    load_weights(plain.slots(), directory, config.tie_word_embeddings)
    rows = embed(torch.tensor([4, 0, 198]), model.embedding)
    assert rows.dtype == torch.bfloat16
    torch.testing.assert_close(rows.float(), plain.embedding[[4, 0, 198]], rtol=0.08, atol=1e-3)
    assert torch.equal(model.layers[1].mlp.down.scale, plain.layers[1].mlp.down.abs().amax(1) / 448)


@pytest.mark.parametrize("stacked", [False, True])
def test_experts_are_rounded_row_by_row(stacked: bool, tmp_path: Path) -> None:
    checkpoint = save(reference("qwen3_moe"), tmp_path, stacked=stacked)
    config = read_model_config(checkpoint)
    plain, small = (Decoder(config, torch.float32, CPU, 16, quantised=kind) for kind in (None, Fp8Weight))
    for model in (plain, small):
        load_weights(model.slots(), checkpoint, config.tie_word_embeddings)
    for ours, theirs in zip(small.layers, plain.layers, strict=True):
        for matrix, wide in ((ours.mlp.gate_up, theirs.mlp.gate_up), (ours.mlp.down, theirs.mlp.down)):
            values, scale = Fp8Weight.rounded(wide.flatten(0, 1))
            assert torch.equal(matrix.values.view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(matrix.scale, scale)
    assert small.nbytes == quantised.weight_bytes("fp8", config, torch.float32)


def test_an_output_matrix_that_contradicts_a_tied_embedding_is_refused(tmp_path: Path) -> None:
    checkpoint = save(reference("qwen3"), tmp_path, edit={"tie_word_embeddings": True})
    config = read_model_config(checkpoint)
    model = Decoder(config, torch.float32, CPU, 16, quantised=Int8Weight)
    with pytest.raises(CheckpointError, match="differs from the embedding"):
        load_weights(model.slots(), checkpoint, tied=True)


@pytest.mark.parametrize("count", [1, 2, 7])
def test_decode_steps_compute_what_the_decoder_does(count: int, directory: Path) -> None:
    """Of the same weights. Only the compiled kernels round activations."""
    (fast, *_), (plain, *_) = decodes_on_a_cpu(directory, count, **OPTIONS)
    torch.testing.assert_close(fast, plain, rtol=0, atol=0.03 * float(plain.abs().max()))


def test_bf16_weights_compute_what_float32_does_without_products_of_pairs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bf16Pairs, "why_not", lambda: "there is no such processor")
    checkpoint = save(reference("qwen3").bfloat16(), tmp_path)
    wide, half = (decodes_on_a_cpu(checkpoint, 3, quantization=kind) for kind in ("none", "bf16"))
    for ours, theirs in zip(half[0] + half[1], wide[0] + wide[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))


def pairs(rows: int, columns: int) -> tuple[Bf16Pairs, torch.Tensor]:
    """A matrix for products of pairs, and its numbers."""
    if why_not := Bf16Pairs.why_not():
        pytest.skip(why_not)
    weight, dense = Bf16Pairs.empty(rows, columns, CPU), torch.randn(rows, columns).bfloat16()
    weight.copy_(dense)
    return weight, dense


def test_a_product_of_bf16_pairs_rounds_nothing_but_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, dense = pairs(96, 160)
    assert torch.equal(weight.dense(), dense)
    assert torch.equal(weight.split([32, 64])[1].dense(), dense[32:])
    x = torch.randn(13, 160) * torch.logspace(-3, 3, 160)
    product, exact = linear(x, weight, torch.ones(96)), x.bfloat16().double() @ dense.double().t() + 1
    torch.testing.assert_close(product.double(), exact, rtol=0, atol=1e-6 * float(exact.abs().max()))
    for count in (1, 2, 4):
        assert torch.equal(linear(x[:count], weight, torch.ones(96)), product[:count])
    monkeypatch.setattr("engine.kernels.cpu.linear.ROWS_AT_ONCE", 4)
    assert torch.equal(linear(x, weight, torch.ones(96)), product)
    x[7, 3], x[8, 5] = torch.nan, torch.inf
    finite = linear(x, weight).isfinite().all(1)
    assert not finite[7] and not finite[8] and finite.sum() == 11


def test_the_model_of_bf16_pairs_is_closer_to_float32_than_torch_in_bfloat16(tmp_path: Path) -> None:
    """Every step has the same rounding: a prompt, a chunk, a decode alone or beside others."""
    pairs(32, 32)
    checkpoint = save(reference("qwen3").bfloat16(), tmp_path)
    exact, ours, torchs = (
        torch.cat([
            our_logits(Driver(runner), make_request(prompt(0, 40), 0), chunks)
            for runner in [make_runner(checkpoint, dtype, quantization=kind)]
            for chunks in ([40],)
        ]).double()
        for dtype, kind in (("float64", "none"), ("float32", "bf16"), ("bfloat16", "none"))
    )
    error, limit = ((found - exact).norm() / exact.norm() for found in (ours, torchs))
    assert 1e-4 < error < min(0.6 * limit, 0.005)
    (fast, *_), (plain, *_) = decodes_on_a_cpu(checkpoint, 2, [(0, 9), (11, 3), (4, 5)], quantization="bf16")
    torch.testing.assert_close(fast, plain, rtol=0, atol=0.01 * float(plain.abs().max()))


DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16
}
UNEVEN = {"num_key_value_heads": 2, "global_head_dim": 64, "enable_moe_block": False, "hidden_size_per_layer_input": 16}


@pytest.mark.parametrize(
    ("kind", "fields", "chosen"),
    [
        ("qwen3_5_text", DELTA, "bf16"), ("gemma4_text", UNEVEN, "bf16"),
        ("qwen3_5_text", DELTA | {"linear_key_head_dim": 8}, "none"), ("qwen3_moe", {}, "none"),
    ],
)
def test_models_without_compiled_steps_have_bf16_pairs_if_their_sizes_allow_it(
    kind: str, fields: dict[str, Any], chosen: str, tmp_path: Path
) -> None:
    """The logits are closer to float32 than torch's in bfloat16. A matrix that no other is computed with may have other
    sizes: it stays a tensor."""
    pairs(32, 32)
    checkpoint(kind, 1, tmp_path, dtype="bfloat16", **fields)
    wide, runner, half = (make_runner(tmp_path, dtype) for dtype in ("float32", "auto", "bfloat16"))
    assert runner.loaded.quantization == chosen and runner.executors[0].compiled is None
    exact, ours, torchs = (
        our_logits(Driver(each), make_request(prompt(0, 40), 0), [40]).double() for each in (wide, runner, half)
    )
    error, limit = ((found - exact).norm() / exact.norm() for found in (ours, torchs))
    assert 1e-4 < error < limit if chosen == "bf16" else error == 0


def test_what_fits_into_memory_is_chosen(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_kernels("bf16")
    config, model = EngineConfig(), read_model_config(directory)
    big = replace(model, dtype="bfloat16", num_layers=1000, intermediate_size=235_008)  # about 45 billion numbers

    def chosen(free: int, model: Any = big, **options: Any) -> tuple[str, str]:
        monkeypatch.setattr(quantised, "free_memory", lambda: free * 10**9)
        return quantised.choose(replace(config, **options), model, CPU, "float32")

    assert 4e10 < big.num_parameters < 5e10
    assert chosen(200) == ("bf16", "")
    assert chosen(200, replace(big, dtype="float32")) == ("none", "")
    kind, sentence = chosen(60)
    assert kind == "int8" and "60.0 GB are free" in sentence
    if not Int4Weight.why_not():
        kind, sentence = chosen(40)
        assert kind == "int4" and "rounded to 4 bits (int4)" in sentence
        monkeypatch.setattr(Int4Weight, "why_not", lambda: "there is no such processor")
    assert chosen(40)[0] == "int8"
    assert chosen(200, dtype="float32") == chosen(60, quantization="none") == ("none", "")


@pytest.mark.parametrize("kind", ["none", "bf16", "int8", "int4"])
def test_compiled_kernels_give_a_row_the_same_bits_in_every_batch(kind: str, directory: Path) -> None:
    needs_kernels(kind)
    alone, batch = (decodes_on_a_cpu(directory, count, quantization=kind)[0][0] for count in (1, 7))
    assert torch.equal(alone[0], batch[0])


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(
    ("processor", "kind"),
    [
        ("this", "none"), ("this", "bf16"), ("this", "int8"), ("this", "int4"), ("none", "int8"),
        ("without llvmlite", "none"), ("without llvmlite", "int8"), ("without GNU OpenMP", "int4"),
    ], indirect=["processor"],
)
def test_a_reply_is_the_same_alone_and_in_a_batch(kind: str) -> None:
    """Greedy and seeded; log-probabilities too. The batch has more prompt tokens than kernels for few rows take."""
    if kind == "int4" and Int4Weight.why_not():
        with pytest.raises(EngineError, match=r"int4 weights need compiled kernels, but .*: use --quantization int8"):
            LLM(str(tutor.model_dir()), quantization=kind)
        return
    llm = LLM(str(tutor.model_dir()), quantization=kind, enable_prefix_caching=False)
    questions = ["What is paging?", "Why is decoding slow? Explain it to a student."]
    chats = [[{"role": "user", "content": question}] for question in questions for _ in range(2)]
    given = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=8, logprobs=1, ignore_eos=True)
        for i in range(len(chats))
    ]
    alone = [llm.chat([chat], [params], False)[0].outputs[0] for chat, params in zip(chats, given, strict=True)]
    batch = [each.outputs[0] for each in llm.chat(chats, given, False)]
    assert [each.token_ids for each in batch] == [each.token_ids for each in alone]
    for ours, theirs in zip(batch, alone, strict=True):
        for token, one, other in zip(ours.token_ids, ours.logprobs, theirs.logprobs, strict=True):
            assert abs(one[token].logprob - other[token].logprob) < 1e-3


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(("N", "other"), [(23, False), (48, False), (23, True)])
def test_a_product_with_8_bits_is_that_of_the_rounded_matrices(N: int, other: bool) -> None:
    """Bit by bit, for any number of rows. The largest numbers saturate no sum. Only 48 rows of the weight fill tiles.
    other: as compiled for processors without products of bytes."""
    needs_kernels("int8")
    from llvmlite import ir

    from engine.kernels.cpu import library
    from engine.kernels.cpu.byte_products import VECTORS
    from engine.kernels.cpu.features import features
    from engine.kernels.cpu.product import PREPARE, Before, emit_product, scratch_floats

    has, module, K = replace(features(), **({"x86": False} if other else {})), ir.Module(), 192
    emit_product(module, "int8", "int8", has.lanes, math.gcd(VECTORS[has.dot], K), 1e-6, has)
    kernels, threads = library.Kernels(lambda: module, has.flags, str(module)), 2
    values, weight_scale, bias = torch.randint(-128, 128, (N, K), dtype=torch.int8), torch.rand(N), torch.randn(N)
    values[0], values[1] = 127, -128
    x = torch.randn(93, K) * torch.logspace(-30, 30, 93)[:, None]
    x[0], x[1] = 3, -3
    rounded, scale = quantise_rows(x)
    expected = (rounded.double() @ values.double().t()).float() * scale[:, None] * weight_scale + bias
    whole = torch.empty(0)
    for rows in (93, 64, 17, 7, 2, 1):
        each = scratch_floats(rows, K)
        out, scratch = torch.empty(rows, N), torch.empty(threads, each)
        calls = np.zeros((2, library.FIELDS), dtype=np.int64)
        calls[:, :12] = [
            (values.data_ptr(), weight_scale.data_ptr(), source.data_ptr(), 0, bias.data_ptr(), out.data_ptr(),
             scratch.data_ptr(), K, N, rows, each, before)
            for source, before in ((x, Before.NOTHING), (scratch, Before.READY))
        ]
        kernels.run(np.array([kernels.address(name) for name in ("int8" + PREPARE, "int8")]), calls, threads)
        whole = out.clone() if rows == len(x) else whole
        assert torch.equal(out, whole[:rows])
        kernels.run(np.array([kernels.address("int8")]), calls[:1], threads)
        assert torch.equal(out, whole[:rows]), "rounded in the kernel of the product"
    assert torch.equal(whole, expected)


def four_bits(rows: int, columns: int, group: int = 32, offsets: bool = False) -> Int4Weight:
    """A random matrix. Its row 3 has numbers of 1e-6, its row 4 has zeros."""
    if why_not := Int4Weight.why_not():
        pytest.skip(why_not)
    kind = type("Kind", (Int4Weight,), {"__slots__": (), "group": group, "with_offsets": offsets})
    weight = kind.empty(rows, columns, CPU)
    scales = torch.rand(rows, columns // group) + 0.1
    scales[3], scales[4] = 1e-6, 0
    moved = torch.randint(-8, 9, scales.shape) if offsets else None
    weight.store(0, torch.randint(0, 16, (rows, columns), dtype=torch.uint8), scales, moved)
    return weight


@pytest.mark.parametrize(("group", "offsets"), [(32, False), (64, True), (128, False), (128, True)])
def test_a_product_with_4_bits_is_that_of_the_rounded_matrices(
    group: int, offsets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The only other rounding is that of the activations: 127 steps for each 32 numbers."""
    weight, x = four_bits(80, 384, group, offsets), torch.randn(11, 384) * torch.logspace(-3, 3, 384)
    values, scale = quantise_rows(x.view(-1, 32))
    rounded = (values.double() * scale.double()[:, None]).view(x.shape)
    product = linear(x, weight, torch.ones(80))
    exact, largest = rounded @ weight.dense().t() + 1, float((rounded.abs() @ weight.dense().abs().t()).max())
    atol = torch.finfo(torch.float32).eps * largest / 8  # terms may cancel, and sums are rounded to float32
    torch.testing.assert_close(product.double(), exact, rtol=1e-5, atol=atol)
    assert (product[:, 4] == 1).all()
    for count in (1, 2, 4):
        assert torch.equal(linear(x[:count], weight, torch.ones(80)), product[:count])
    from engine.kernels.cpu import linear as compiled
    from engine.kernels.cpu.features import features

    monkeypatch.setattr(compiled, "ROWS_AT_ONCE", 4)
    assert torch.equal(linear(x, weight, torch.ones(80)), product)
    for name in ("vnni", "avx512", "avxvnni", "avx2"):  # whole sums are the same, so all bits are
        monkeypatch.setenv("MINITUI_CPU", name)
        assert torch.equal(linear(x, weight, torch.ones(80)), product)
    monkeypatch.setattr(compiled, "features", lambda: replace(features(), x86=False))
    assert torch.equal(linear(x, weight, torch.ones(80)), product)


@pytest.mark.parametrize(("triple", "cpu", "names", "has", "lacks"), [
    ("aarch64-unknown-linux-gnu", "neoverse-n1", "neon dotprod", "sdot", "smmla"),
    ("x86_64-unknown-linux-gnu", "alderlake", "avx2 avxvnni", "vpdpbusd", "zmm"),
    ("x86_64-unknown-linux-gnu", "skylake-avx512", "avx2 avx512f avx512bw avx512vl", "vpmaddubsw", "vpdpbusd"),
    ("x86_64-unknown-linux-gnu", "icelake-server", "avx512f avx512bw avx512vl avx512vnni", "vpdpbusd", "vpmaddubsw"),
])
def test_the_kernels_compile_for_other_processors(triple: str, cpu: str, names: str, has: str, lacks: str) -> None:
    """Only compiled: of processors that are not this one, this is all that is tested."""
    llvm = pytest.importorskip("llvmlite.binding")
    from engine.kernels.cpu.features import Features
    from engine.kernels.cpu.library import KernelShapes, emit_model

    kinds = ("float32", "bfloat16", "int8", "int4_offsets")
    shapes = KernelShapes(kinds, (1024, 3072), (4, 2), 64, 16, 0.1, 1e-6, True)
    module = emit_model(shapes, Features(frozenset(names.split()), "", triple.startswith("x86")))
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu, opt=2)
    assembly = machine.emit_assembly(llvm.parse_assembly(str(module)))
    assert assembly.count(has) >= 24 and lacks not in assembly


def test_4_bits_take_what_they_should_and_keep_the_output_matrix_in_8(directory: Path) -> None:
    if why_not := Int4Weight.why_not():
        pytest.skip(why_not)
    config = read_model_config(directory)
    model = Decoder(config, torch.float32, CPU, 16, quantised=Int4Weight)
    load_weights(model.slots(), directory, config.tie_word_embeddings)
    plain = Decoder(config, torch.float32, CPU, 16)
    load_weights(plain.slots(), directory, config.tie_word_embeddings)
    assert isinstance(model.head, Int8Weight) and model.head is model.embedding
    for ours, theirs in zip(model.layers, plain.layers, strict=True):
        for small, wide in (ours.qkv, theirs.qkv), (ours.mlp.down, theirs.mlp.down):
            error = (small.dense() - wide).square().sum() / wide.square().sum()
            assert 0.006 < error < 0.0073
    layers = model.nbytes - model.embedding.nbytes
    assert quantised.weight_bytes("int4", config, torch.float32) == model.nbytes
    assert layers < 0.17 * (plain.nbytes - plain.embedding.nbytes)


def test_the_4_bit_model_computes_what_its_matrices_stand_for(directory: Path) -> None:
    """Of the same matrices in float64. The rounding of activations to 8 bits causes the difference."""
    if why_not := Int4Weight.why_not():
        pytest.skip(why_not)
    small, exact = (
        Driver(make_runner(directory, dtype, quantization=kind))
        for dtype, kind in (("float32", "int4"), ("float64", "none"))
    )
    with torch.inference_mode():
        for ours, theirs in zip(small.runner.loaded.model.slots(), exact.runner.loaded.model.slots(), strict=True):
            view = ours.view
            if isinstance(view, Int4Weight):
                view = view.dense()
            theirs.view.copy_(view.rows(torch.arange(len(view.scale))) if isinstance(view, Int8Weight) else view)
    found, expected = (our_logits(driver, make_request(prompt(0, 37), 0), [20, 17]) for driver in (small, exact))
    error = (found - expected).norm() / expected.norm()
    assert 1e-4 < error < 0.02
    for count in (1, 7):
        fast, plain = decodes_on_a_cpu(directory, count, quantization="int4")
        for ours, theirs in zip(fast, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0.01 * float(theirs.abs().max()))


def test_the_bundled_model_answers_as_in_float32() -> None:
    questions = ["What is a KV cache?", "What does the scheduler do?"]
    chats = [
        [{"role": "system", "content": tutor.DEFAULT_SYSTEM_PROMPT}, {"role": "user", "content": q}] for q in questions
    ]
    params = SamplingParams(temperature=0, max_tokens=80)
    kinds = ("none", "int8") if Int4Weight.why_not() else ("none", "int8", "int4")
    plain, *others = (
        [out.outputs[0].text for out in LLM(str(tutor.model_dir()), quantization=q).chat(chats, params, False)]
        for q in kinds
    )
    assert others == [plain] * len(others)


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    [
        ("qwen3", {"quantization": "int3"}, "must be auto, none, bf16, int8, int4, fp8 or checkpoint"),
        ("qwen3", {"quantization": "fp8"}, "run on a GPU only, but the device is cpu: use --quantization int8"),
        ("qwen3", {"quantization": "int8", "dtype": "bfloat16"}, "the dtype is bfloat16: use float32"),
        ("qwen3_moe", {"quantization": "int8"}, "has experts"),
        ("qwen3", {"quantization": "int8", "tensor_parallel_size": 2}, "support only one rank"),
    ],
)
def test_models_that_cannot_have_8_bit_weights_are_refused(
    kind: str, options: dict[str, str], sentence: str, tmp_path: Path
) -> None:
    checkpoint = save(reference(kind), tmp_path)
    with pytest.raises(EngineError, match=sentence):
        build_runner(read_model_config(checkpoint), EngineConfig(device="cpu", **options), checkpoint)


def test_the_size_of_weights_is_known_without_computing_on_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arithmetic on torch's "meta" device imports torch's compiler, which would take a second at each start."""
    monkeypatch.setattr("engine.model.decoder.rope_table", lambda *_: pytest.fail("a table without memory is computed"))
    assert quantised.weight_bytes("none", read_model_config(tutor.model_dir()), torch.float32) > 0


@pytest.mark.parametrize(
    ("options", "changes", "sentence"),
    [
        ({"dtype": "float16"}, {}, "need bfloat16 activations, but the dtype is float16: use bfloat16"),
        ({"tensor_parallel_size": 2}, {}, "fp8 weights support only one rank"),
        ({}, {"intermediate_size": 96}, "need intermediate_size to be a multiple of 128, but it is 96"),
        ({}, {"vocab_size": 199}, "need vocab_size to be a multiple of 16, but it is 199"),
        ({"capability": (8, 6)}, {}, "compute capability 8.9 or more, but Some GPU has 8.6"),
        ({"triton": None}, {}, "need triton, which is not installed"),
    ],
)
def test_fp8_weights_that_cannot_run_are_refused_with_the_reason(
    options: dict[str, Any], changes: dict[str, int], sentence: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability, triton = options.pop("capability", (9, 0)), options.pop("triton", object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(quantised.importlib.util, "find_spec", lambda name: triton)
    config = EngineConfig(quantization="fp8", **{"dtype": "bfloat16", **options})
    sizes = {"hidden_size": 128, "intermediate_size": 128, "vocab_size": 160}
    model = replace(read_model_config(directory), **{**sizes, **changes})
    with pytest.raises(EngineError, match=sentence):
        quantised.check(config, model, torch.device("cuda"), config.dtype)
