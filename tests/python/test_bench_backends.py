"""Who is compared in the benchmarks, with what, and what a wrong result leads to."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import bench_calls
import pytest
import torch
from bench_calls import SHAPES, SUITES

import flashattn_ext
from flashattn_ext.bench import peers, problems, reference, run
from flashattn_ext.bench.cases import Prefill

quick = bench_calls.quick


def test_the_reference_is_attention():
    """Against torch's, which has masks but no alignment, windows or caps: one head at a time."""
    torch.manual_seed(0)
    case = Prefill(batch=1, heads=2, kv_heads=1, head_dim=8, seqlen=5, kv_len=7, causal=True,
                   dtype="float32", window=(3, 0), softcap=2.0, alibi=True)  # fmt: skip
    problem = problems.build(case, "cpu", copies=False)
    expected = reference.expected(problem)
    q, k, v = (t.double() for t in (problem.q[0], problem.k[0, :, 0], problem.v[0, :, 0]))
    for head in range(2):
        for row in range(5):
            last = row + 2
            seen = range(max(0, last - 3), last + 1)
            scores = torch.stack([q[row, head] @ k[j] / math.sqrt(8) for j in seen])
            scores = 2.0 * torch.tanh(scores / 2.0)
            scores -= problem.slopes[head].double() * (last - torch.tensor(list(seen))).abs()
            want = scores.softmax(0) @ v[list(seen)]
            torch.testing.assert_close(expected[0, row, head], want)


def test_a_wrong_row_is_seen():
    good = torch.randn(2, 1000, 3, 16)
    assert reference.difference(good.bfloat16(), good.double()) < 0.01
    bad = good.clone()
    bad[1, 77, 2] = good[1, 78, 2]
    assert reference.difference(bad, good) > 0.5
    bad[1, 77, 2, 3] = torch.nan
    assert not reference.difference(bad, good) <= 1e9
    with pytest.raises(ValueError, match="shape"):
        reference.difference(good[:1], good)


def fa3(q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, block_table=None, softmax_scale=None, causal=False, window=(-1, -1),
        softcap=0.0, num_splits=1, **unused):  # fmt: skip
    """The peer's signature over our calls."""
    assert not unused and softmax_scale is None
    common = {"causal": causal, "window_size": window, "softcap": softcap, "return_lse": True}
    if seqused_k is None:
        return flashattn_ext.flash_fwd(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, **common,
        )  # fmt: skip
    assert num_splits == 0 and max_seqlen_k == seqused_k.max()
    return flashattn_ext.flash_fwd_splitkv(
        q, k, v, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, cache_seqlens=seqused_k,
        block_table=block_table, **common,
    )  # fmt: skip


def unified_attention(q, k, v, *, cu_seqlens_q, seqused_k, max_seqlen_q, max_seqlen_k, block_table,
                      window=(-1, -1), softcap=0.0, alibi_slopes=None):  # fmt: skip
    assert max_seqlen_k == seqused_k.max()
    return flashattn_ext.flash_fwd_splitkv(
        q, k, v, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, cache_seqlens=seqused_k,
        block_table=block_table, causal=True, window_size=window, softcap=softcap,
        alibi_slopes=alibi_slopes,
    )  # fmt: skip


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_and_backend_agrees_on_small_shapes(suite, monkeypatch, quick, capsys):
    """What a GPU would run, with the peers' signatures over our calls, on the CPU."""
    monkeypatch.setitem(SUITES, suite, replace(SUITES[suite], device="cpu"))
    monkeypatch.setattr(
        peers, "_load", lambda: (SimpleNamespace(fa3=fa3, unified_attention=unified_attention), "")
    )
    for backend in (peers.Fa3(), peers.Triton()):
        monkeypatch.setattr(type(backend), "missing", lambda self, device: "")
    plan = []
    monkeypatch.setattr(run.Run, "_write", lambda self, *rest: plan.extend(self.records))
    words = [suite, *SHAPES[suite].split()]
    assert run.main([*words, "--refcheck", "--seconds", "0"]) == 0
    measured = {r.backend for r in plan if r.status == "measured"}
    assert measured == set(SUITES[suite].backends) - {"sdpa-cudnn"}
    for record in plan:
        if record.backend == "sdpa-cudnn":
            assert record.status == "absent" and record.reason == "needs a GPU"
        elif record.status == "measured":
            assert 0 <= record.difference < 0.02 and record.median_us > 0
        else:
            assert record.status == "refuses" and record.reason
    assert max(map(len, capsys.readouterr().out.split("\n"))) <= 100


def test_a_wrong_backend_is_not_timed(monkeypatch, quick, capsys, tmp_path):
    wrong = SimpleNamespace(fa3=lambda q, k, v, **rest: (q * 0, None), unified_attention=None)
    monkeypatch.setattr(peers, "_load", lambda: (wrong, ""))
    monkeypatch.setattr(peers.Fa3, "missing", lambda self, device: "")
    monkeypatch.setitem(SUITES, "prefill", replace(SUITES["prefill"], device="cpu"))
    words = ["prefill", *SHAPES["prefill"].split(), "--backends", "ours,fa3", "--seconds", "0"]
    assert run.main([*words, "--refcheck"]) == 1
    out = capsys.readouterr().out
    assert "FA3: wrong 2 cases: a row is off by 1 of its norm, 0.03 is allowed" in out
    assert run.main(words) == 0 and "wrong" not in capsys.readouterr().out
    wrong.fa3 = lambda q, k, v, **rest: (q * torch.nan, None)
    assert run.main([*words, "--refcheck", "--json", str(tmp_path / "run.json")]) == 1
    assert "a row is off by nan" in capsys.readouterr().out
    result = (tmp_path / "run.json").read_text()
    assert (
        "NaN" not in result and [r["difference"] for r in json.loads(result)["records"]][1] is None
    )


def test_a_backend_that_raises_does_not_end_the_run(monkeypatch, quick, capsys):
    def fail(*arguments, **options):
        raise RuntimeError("no such tile\nand more")

    monkeypatch.setattr(flashattn_ext, "flash_fwd", fail)
    words = ["cpu", *SHAPES["cpu"].split(), "--seconds", "0", "--causal", "no"]
    assert run.main(words) == 1
    out = capsys.readouterr().out
    assert "ours: failed 2 cases: RuntimeError: no such tile\n" in out
