"""float32, which exists on the CPU only, is as right as plain PyTorch in float32: no step of the
library is of lower precision, and long sums are cut into blocks."""

import pytest
import torch
from caches import dense_cache
from cases import dense
from reference import attend

SEEDS = range(8)


def errors(call):
    """The largest of the library and of plain PyTorch, against float64."""
    out, _ = call.run()
    seq, rule = call.sequences[0], call.case.rule()
    exact = attend(seq, rule)[0]
    plain = attend(seq, rule, torch.float32)[0]
    return (out[0] - exact).abs().max(), (plain - exact).abs().max()


def assert_as_right_as_torch(cases, factor):
    mine, plain = zip(*(errors(case.build("cpu")) for case in cases), strict=True)
    assert sum(mine) <= factor * sum(plain), f"{sum(mine) / sum(plain):.2f} times the error"


@pytest.mark.parametrize("keys", [64, 1000, 5000])
@pytest.mark.parametrize("d", [32, 128])
def test_sums_over_many_keys(d, keys):
    options = {"heads": (4, 2), "d": d, "dtype": torch.float32}
    assert_as_right_as_torch([dense(1, 12, keys, seed=n, **options) for n in SEEDS], 1.6)
    cases = [dense_cache(2, keys, seed=n, splits=n % 4, **options) for n in SEEDS]
    assert_as_right_as_torch(cases, 1.6)


@pytest.mark.parametrize("scale", [0.003, 0.03, 0.3])
@pytest.mark.parametrize("softcap", [1.0, 30.0, 300.0])
def test_softcap_of_small_and_of_large_scores(softcap, scale):
    """A large cap multiplies the error of tanh into the score."""
    options = {"heads": (4, 2), "dtype": torch.float32, "softcap": softcap, "scale": scale}
    assert_as_right_as_torch([dense(1, 20, 70, seed=n, **options) for n in SEEDS], 1.6)
