"""Stochastic rounding: the two neighbours on the coarse grid, in such shares that the mean is the value itself.

The grids are tables of all 65,536 values of a 16-bit type, so that neighbours are looked up and not computed.
"""

import copy
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from tests.helpers import tiny
from tests.weight_sync.helpers import V, lora
from trl_pdm.weight_sync.engine import exceptional_dtypes
from trl_pdm.weight_sync.parameters import adapter_tensors, held_parameters
from trl_pdm.weight_sync.rounding import WeightRounding, round_stochastically
from trl_pdm.weight_sync.strategies import FullSync


COARSE = [torch.bfloat16, torch.float16]
FINE = [torch.float32, torch.float64]


def all_values(dtype):
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def grid(dtype):
    values = all_values(dtype).double().numpy()
    return np.unique(values[np.isfinite(values)])


def neighbours(values, dtype):
    """The values of `dtype` around each of `values`, and how far, from 0 to 1, it is on the way from one to the other."""
    table = grid(dtype)
    below = table[(np.searchsorted(table, values, side="right") - 1).clip(0)]
    above = table[np.searchsorted(table, values, side="left").clip(max=len(table) - 1)]
    return below, above, np.divide(values - below, above - below, out=np.zeros_like(values), where=above > below)


@pytest.mark.parametrize("dtype", COARSE)
@pytest.mark.parametrize("source", FINE)
@given(
    values=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=20),
    seed=st.integers(),
)
def test_a_value_becomes_one_of_its_neighbours(source, dtype, values, seed):
    values = torch.tensor(values, dtype=source)
    before = values.clone()
    rounded = round_stochastically(values, dtype, "weight", seed)
    assert rounded.dtype == dtype and torch.equal(values, before)
    below, above, _ = neighbours(values.double().numpy(), dtype)
    inside = np.clip(values.double().numpy(), grid(dtype)[0], grid(dtype)[-1])  # no finite value becomes infinite
    rounded = rounded.double().numpy()
    assert (((rounded == below) | (rounded == above)) & (abs(rounded - inside) <= above - below)).all()


# Typical weights, numbers beyond powers of two, what float16 and bfloat16 hold as subnormals, and the largest
TYPICAL = [0.05, -0.0333, 1 + 1e-5, 0.99999, -2.0001, 3.1e-6, -5.9e-8, 123.456, 60001.0]
SMALL = [1e-39, -7.3e-40, 2.5e-41]


@pytest.mark.parametrize("dtype", COARSE)
@pytest.mark.parametrize("source", FINE)
def test_the_mean_is_the_value(source, dtype):
    values = torch.tensor(TYPICAL + SMALL * (dtype == torch.bfloat16), dtype=source)
    positions, seeds = 1000, 200
    spread = values.repeat(positions, 1)
    below, above, share = neighbours(values.double().numpy(), dtype)
    ups = sum(
        (round_stochastically(spread, dtype, "w", seed).double().numpy() == above).sum(0) for seed in range(seeds)
    )
    n = positions * seeds
    error = (ups / n - share) / np.sqrt(share * (1 - share) / n).clip(1 / n)
    assert (below < above).all() and (abs(error) < 4.5).all(), error
    assert abs(error).mean() < 1.3, "of 0.8 for a normal distribution"


def test_the_mean_over_seeds_of_a_tensor_of_weights():
    torch.manual_seed(0)
    weights, seeds = torch.randn(5000) * 0.05, 2000
    mean = sum(round_stochastically(weights, torch.bfloat16, "w", seed).double() for seed in range(seeds)) / seeds
    below, above, share = neighbours(weights.double().numpy(), torch.bfloat16)
    z = (mean.numpy() - weights.double().numpy()) / ((above - below) * np.sqrt(share * (1 - share) / seeds)).clip(
        1e-12
    )
    assert 0.95 < z[share > 0.01].std() < 1.05 and abs(z.mean()) < 0.06 and abs(z).max() < 6


@pytest.mark.parametrize("dtype", COARSE)
@pytest.mark.parametrize("source", FINE)
def test_what_lies_on_the_grid_stays_bit_by_bit(source, dtype):
    values = all_values(dtype)  # zeros, subnormals, the largest, infinities and NaN among them
    rounded = round_stochastically(values.to(source), dtype, "weight")
    number = ~values.isnan()
    assert torch.equal(rounded.view(torch.int16)[number], values.view(torch.int16)[number])
    assert rounded[~number].isnan().all() and not rounded[number].isnan().any()


@pytest.mark.parametrize("dtype", COARSE)
@pytest.mark.parametrize("source", FINE)
def test_no_finite_value_becomes_infinite(source, dtype):
    largest = torch.finfo(dtype).max
    values = torch.tensor([largest * 1.0001, largest * 1.003, torch.finfo(torch.float32).max], dtype=source)
    values = torch.cat([values, -values, torch.tensor([torch.inf, -torch.inf, torch.nan, 0.05], dtype=source)])
    for seed in range(50):
        rounded = round_stochastically(values, dtype, "weight", seed).double()
        assert rounded[:6].tolist() == [largest] * 3 + [-largest] * 3
        assert rounded[6:8].tolist() == [torch.inf, -torch.inf] and rounded[8].isnan() and 0.049 < rounded[9] < 0.051


def test_finer_types_and_odd_nan_payloads():
    nan = torch.tensor([0x7F800001, -0x7FFFFF, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    assert nan.isnan().all() and round_stochastically(nan, torch.bfloat16, "w").isnan().all()
    weights = torch.randn(100).bfloat16()
    assert torch.equal(round_stochastically(weights, torch.float32, "w"), weights.float())
    copy = round_stochastically(weights, torch.bfloat16, "w")
    assert torch.equal(copy, weights) and copy.data_ptr() != weights.data_ptr()


def ups(weights, name="model.layers.0.mlp.up_proj.weight", seed=0):
    """-1 where rounded down, 1 where rounded up."""
    return np.where(round_stochastically(weights, torch.bfloat16, name, seed).double() > weights.double(), 1.0, -1.0)


def test_positions_tensors_and_seeds_do_not_know_of_each_other():
    half = torch.full((512, 768), 1.00390625)  # half way between 1 and 1.0078125
    one = ups(half)
    n = one.size
    for other in (ups(half, "model.layers.1.mlp.up_proj.weight"), ups(half, seed=1)):
        assert abs((one * other).sum()) < 4.5 * n**0.5
    for rows in (one, one.T):  # 2 x 130,816 and 294,528 pairs: the largest of so many normal numbers is about 5
        correlation = np.corrcoef(rows)[np.triu_indices(len(rows), 1)] * rows.shape[1] ** 0.5
        assert abs(correlation).max() < 6 and 0.98 < correlation.std() < 1.02
        assert abs(rows.sum(1)).max() < 5 * rows.shape[1] ** 0.5
    flat = one.reshape(-1)
    for lag in (1, 2, 3, 64, 255, 256, 1024, 1 << 15, 1 << 16, 1 << 18):
        assert abs((flat[lag:] * flat[:-lag]).sum()) < 4.5 * (n - lag) ** 0.5, lag


@pytest.mark.parametrize("dtype", COARSE)
def test_how_a_tensor_lies_in_memory_does_not_matter(dtype):
    weights = torch.randn(1700, 1300) * 0.05  # of three blocks
    expected = round_stochastically(weights, dtype, "w")
    transposed = weights.T.contiguous().T
    assert not transposed.is_contiguous()
    assert torch.equal(round_stochastically(transposed, dtype, "w"), expected)
    assert torch.equal(round_stochastically(weights.view(-1), dtype, "w"), expected.view(-1))


def test_unchanged_weights_do_not_flicker_and_larger_ones_are_not_rounded_to_less():
    weights = torch.randn(1000) * 0.05
    before = round_stochastically(weights, torch.bfloat16, "w")
    grown = torch.where(torch.arange(1000) % 2 == 0, weights, weights + 1e-4 * torch.rand(1000))
    after = round_stochastically(grown, torch.bfloat16, "w")
    positive = weights > 0
    assert torch.equal(before[::2], after[::2]) and (before <= after)[positive].all()


@pytest.mark.slow
def test_another_process_gets_the_same_bits():
    code = (
        "import torch; from trl_pdm.weight_sync.rounding import round_stochastically as r;"
        "torch.manual_seed(3);"  # of no importance
        "w = torch.arange(1, 5001).float().log();"
        "print(r(w, torch.bfloat16, 'a.weight', 7).view(torch.int16).tolist())"
    )
    env = os.environ | {"PYTHONHASHSEED": "5"}
    output = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, env=env
    ).stdout
    own = round_stochastically(torch.arange(1, 5001).float().log(), torch.bfloat16, "a.weight", 7)
    assert own.view(torch.int16).tolist() == json.loads(output)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5, 1, 3)])
def test_shapes(shape):
    rounded = round_stochastically(torch.full(shape, 1.001), torch.bfloat16, "w")
    assert rounded.shape == shape and ((rounded == 1) | (rounded == 1.0078125)).all()


# ---- Which weights, how


OFF_GRID = 1.003  # about 0.4 of the spacing of bfloat16 from 1


def model_off_the_grid(**lora_overrides):
    """A tied float32 model whose weights bfloat16 does not hold."""
    model = tiny.model(V, tie_word_embeddings=True)
    if lora_overrides:
        model = get_peft_model(model, lora(init_lora_weights=False, **lora_overrides))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(param.bfloat16().float() * OFF_GRID)
    return model


def rounded(model, mode="auto", dtype=torch.bfloat16, merged=True, params=None, **kwargs):
    """How each pushed weight relates to what the trainer holds, by name: `nearest`, `neighbours` or `same`."""
    rounding, found = WeightRounding(mode, model, merged=merged, **kwargs), {}
    rounding.dtype = dtype
    for name, param in params or model.named_parameters():
        pushed, value = rounding.rounded(name, param.detach()), param.detach()
        assert pushed.dtype == dtype and pushed.data_ptr() != param.data_ptr()
        spacing = 2.0 ** (value.abs().double().log2().floor() - 7)
        if torch.equal(pushed.double(), value.double()):
            found[name] = "same"
        elif torch.equal(pushed.double(), value.bfloat16().double()):
            found[name] = "nearest"
        else:
            share = (pushed.double() != value.bfloat16().double()).double().mean()
            error = (pushed.double() - value.double()).abs()  # a little more for float16 in between
            assert ((error < 1.07 * spacing + 2**-24) | (value == 0)).all() and 0.005 < share < 0.7
            found[name] = "neighbours"
    return found


def test_what_a_float32_trainer_trains_is_rounded_stochastically_and_what_it_does_not_to_nearest():
    model = model_off_the_grid()
    model.model.norm.requires_grad_(False)
    found = rounded(model)
    assert found.pop("model.norm.weight") == "nearest" and set(found.values()) == {"neighbours"}
    assert "lm_head.weight" not in found, "tied: the same tensor as the embedding, under one name"
    assert set(rounded(model, "nearest").values()) == {"nearest"}
    assert set(rounded(model, "stochastic").values()) == {"neighbours"}


def test_weights_that_the_engine_holds_are_pushed_as_they_are():
    model = model_off_the_grid()
    assert set(rounded(model, dtype=torch.float32).values()) == {"same"}
    model = model.bfloat16()
    for mode in ("auto", "nearest", "stochastic"):
        assert set(rounded(model, mode).values()) == {"same"}


def test_autocast_has_rounded_to_nearest_before():
    model = model_off_the_grid()
    assert set(rounded(model, autocast=torch.bfloat16).values()) == {"nearest"}
    # An engine of a finer dtype is to compute with what autocast makes of the weights, too
    assert set(rounded(model, autocast=torch.bfloat16, dtype=torch.float32).values()) == {"nearest"}
    assert set(rounded(model, autocast=torch.float16).values()) == {"neighbours"}, "float16 is finer than bfloat16"


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
def test_merged_adapters_are_rounded_stochastically_whatever_the_base(autocast, base):
    model = model_off_the_grid(target_modules=["q_proj", "down_proj"])
    for name, param in model.named_parameters():
        if "lora_" not in name:
            param.data = param.data.to(base)
        else:  # less than bfloat16's spacing at the weights
            param.data.mul_(0.03)
    found = rounded(model, autocast=autocast, params=held_parameters(model, merged=True))
    merged = {name: how for name, how in found.items() if "q_proj" in name or "down_proj" in name}
    assert len(merged) == 4 and set(merged.values()) == {"neighbours"}
    others = {how for name, how in found.items() if name not in merged}
    assert others == {"same" if base == torch.bfloat16 else "nearest"}


def test_a_base_whose_adapter_is_served_apart_is_rounded_to_nearest_and_the_adapter_stochastically():
    model = model_off_the_grid()
    model = get_peft_model(model, lora(init_lora_weights=False))
    found = rounded(model, merged=False, params=held_parameters(model, merged=False))
    assert set(found.values()) == {"nearest"}
    assert set(rounded(model, merged=False, params=adapter_tensors(model).items()).values()) == {"neighbours"}


def test_copies_in_modules_to_save_count_as_trained():
    model = model_off_the_grid(modules_to_save=["model.norm"], target_modules=["q_proj"])
    found = rounded(model, params=held_parameters(model, merged=True))
    assert {name for name, how in found.items() if how == "neighbours" and "q_proj" not in name} == {
        "model.norm.weight"
    }


def test_what_the_engine_holds_in_another_dtype_is_pushed_in_that():
    model = model_off_the_grid()
    rounding = WeightRounding("stochastic", model, merged=False)
    weight = model.model.norm.weight.detach()
    assert torch.equal(rounding.rounded("model.norm.weight", weight), weight), "nothing is known of an engine yet"
    engine = torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(2), "linear": torch.nn.Linear(2, 2)}).bfloat16()
    engine["norm"].float()
    engine["linear"].weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.float8_e4m3fn), requires_grad=False)
    assert exceptional_dtypes(engine, torch.bfloat16) == {"norm.weight": torch.float32, "norm.bias": torch.float32}
    rounding.dtype, rounding.exceptions = torch.bfloat16, {"model.norm.weight": torch.float32}
    assert torch.equal(rounding.rounded("model.norm.weight", weight), weight)
    assert rounding.rounded("model.other.weight", weight).dtype == torch.bfloat16
    assert rounding.rounded("codes", torch.arange(3, dtype=torch.int8)).dtype == torch.int8


def test_buffers_are_left_to_the_engine():
    model = tiny.model(V, router_bias=True)
    sync = FullSync(model, rounding=WeightRounding("stochastic", model, merged=True))
    sync.rounding.dtype = torch.bfloat16
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias.add_(1e-5)
    pushed = dict(sync.tensors())["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert pushed.dtype == torch.float32 and torch.equal(pushed, bias) and pushed.data_ptr() != bias.data_ptr()


@pytest.mark.parametrize("merged", [True, False])
@pytest.mark.parametrize("adapted", [True, False])
def test_the_trainer_computes_with_the_engines_weights_for_a_while(adapted, merged):
    model = tiny.model(30)
    if adapted:
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    before = {name: param.clone() for name, param in model.named_parameters()}
    ids = torch.arange(12)[None]
    # By hand: PEFT's own merge, then every weight through bfloat16; or the adapter's matrices through it as well
    expected = copy.deepcopy(model)
    expected = expected.merge_and_unload() if adapted and merged else expected
    for param in expected.parameters():
        param.data = param.data.bfloat16().float()
    rounding = WeightRounding("nearest", model, merged=merged)
    rounding.dtype = torch.bfloat16
    with torch.no_grad():
        exact = model(ids).logits
        with rounding.rounded_trainer():
            torch.testing.assert_close(model(ids).logits, expected(ids).logits)
        assert torch.equal(model(ids).logits, exact)
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    assert (expected(ids).logits - exact).abs().mean() > 1e-5
    assert {name for name, param in model.named_parameters() if param.requires_grad} == {
        name for name in before if not adapted or "lora_" in name
    }
