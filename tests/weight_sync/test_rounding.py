"""Stochastic rounding: the two neighbours on the coarse grid, in such shares that the mean is the value itself.

The grids are tables of all 65,536 values of a 16-bit type, so that neighbours are looked up and not computed.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_pdm.weight_sync import rounding
from trl_pdm.weight_sync.rounding import round_stochastically


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
@pytest.mark.parametrize("size", [6, 64, 1000, 1 << 20])
def test_chunks_do_not_matter(size, dtype, monkeypatch):
    weights = torch.randn(17, 53) * 0.05
    expected = round_stochastically(weights, dtype, "w")
    monkeypatch.setitem(rounding._CHUNK, "cpu", size)
    assert torch.equal(round_stochastically(weights, dtype, "w"), expected)
    transposed = weights.T.contiguous().T
    assert not transposed.is_contiguous()
    assert torch.equal(round_stochastically(transposed, dtype, "w"), expected), "nor how the tensor lies in memory"


def test_unchanged_weights_do_not_flicker_and_larger_ones_are_not_rounded_to_less():
    weights = torch.randn(1000) * 0.05
    before = round_stochastically(weights, torch.bfloat16, "w")
    grown = torch.where(torch.arange(1000) % 2 == 0, weights, weights + 1e-4 * torch.rand(1000))
    after = round_stochastically(grown, torch.bfloat16, "w")
    positive = weights > 0
    assert torch.equal(before[::2], after[::2]) and (before <= after)[positive].all()


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
