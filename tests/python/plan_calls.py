"""Calls that tests of `plan` ask about. Test files take the fixture by name: it is for all."""

import pytest

from flashattn_ext import _plan_gpus
from flashattn_ext.planning import plan

DECODE = dict(batch=64, heads=32, heads_kv=8, head_dim=128, seqlen_q=1, seqlen_k=8192, cache=16)
MIXED = dict(
    batch=3, heads=8, heads_kv=2, head_dim=64, seqlen_q=[1, 200, 2], seqlen_k=[900, 300, 64],
    cache=16, causal=True,
)  # fmt: skip
PREFILL = dict(batch=1, heads=2, heads_kv=1, head_dim=64, seqlen_q=3, seqlen_k=5)


@pytest.fixture(autouse=True)
def default_build(monkeypatch):
    """The numbers of the tests are those of sm_80 and sm_90, whatever this build has."""
    monkeypatch.setattr(_plan_gpus, "BUILD", {})


def planned(base=DECODE, **changes):
    return plan(**{"gpu": "H200", **base, **changes})
