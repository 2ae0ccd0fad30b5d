"""docs/migration.md: its code runs, in its order, and its results are right."""

import re

import pytest
import torch
from pages import Page
from reference import Cache, Rule, Sequence, attend, merge

import flashattn_ext.flash_attn_interface as flash_attn

PAGE = Page("docs/migration.md")


@pytest.fixture
def page(device):
    """All that the page's code defines."""
    torch.manual_seed(0)
    return PAGE.run({}, device)


def close(out, expected, tolerance=2e-2):
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_all_code_is_found():
    assert len(PAGE.python) == PAGE.text.count("```") / 2 == 6
    assert PAGE.text.count('device = "cpu"') == 1


def test_names(page):
    mentioned = set(re.findall(r"`(flash_attn_\w+)", PAGE.text))
    assert mentioned == set(flash_attn.__all__)
    # From the whole page: what it says is found here is here.
    import flashattn_ext

    for name in ("flash_fwd", "flash_fwd_splitkv", "flash_combine", "merge_attention_states"):
        assert f"`{name}" in PAGE.text and hasattr(flashattn_ext, name)


def test_flash_attn(page):
    q, k, v = (page[name] for name in "qkv")
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True)
    for n in range(2):
        expected, expected_lse = attend(Sequence(q[n], k[n], v[n]), Rule(64**-0.5))
        close(page["merged"][n], expected)
        close(page["merged_lse"][n].t(), expected_lse, 1e-4)
        expected, expected_lse = attend(Sequence(q[n], k[n], v[n]), Rule(64**-0.5, (-1, 0)))
        close(page["softmax_lse"][n], expected_lse, 1e-4)
    assert page["s_dmask"].numel() == 0
    assert torch.equal(page["k_cache"][:, 300], page["new_k"][:, 0])


def test_page_lists_and_hnd_pages(page):
    """The tokens of page lists, gathered by hand out of the HND pages."""
    assert page["lengths"].tolist() == [47, 3, 49]
    assert page["table"].tolist() == [[5, 0, 9, -1], [7, -1, -1, -1], [2, 1, 8, 4]]
    kv = page["kv_cache"].permute(1, 0, 3, 2, 4)
    cache = Cache(kv[0], kv[1], page["table"].tolist())
    for n, length in enumerate((47, 3, 49)):
        keys = Sequence(page["query"][n : n + 1], *cache.gather(n, 0, length))
        expected, expected_lse = attend(keys, Rule(64**-0.5))
        close(page["decoded"][n], expected)
        close(page["lse"][n], expected_lse, 1e-4)


def test_states_of_base_2(page):
    """FlashInfer's formula, in its base and its shapes."""
    expected, expected_lse = attend(
        Sequence(page["rows"], page["keys"], page["keys"]), Rule(64**-0.5)
    )
    in_base_2 = torch.stack([page["s_a"].double(), expected_lse.t() / torch.log(torch.tensor(2.0))])
    weights = torch.exp2(in_base_2 - in_base_2.amax(0))
    outs = torch.stack([page["v_a"].double(), expected])
    close(page["merged_v"], (weights[..., None] * outs).sum(0) / weights.sum(0)[..., None])
    close(page["flashinfer_s"], torch.log2(weights.sum(0)) + in_base_2.amax(0), 1e-4)
    lses = torch.stack([page["s_a"].double() * torch.log(torch.tensor(2.0)), expected_lse.t()])
    close(page["merged_s"].t(), merge(outs, lses)[1], 1e-4)


def test_unified_attention(page):
    kv = page["kv_cache"].permute(1, 0, 3, 2, 4)
    table = page["table"].tolist()
    cache = Cache(kv[0], kv[1], table)
    starts = page["starts"].tolist()
    for n, length in enumerate((48, 4, 50)):
        keys = Sequence(page["packed"][starts[n] : starts[n + 1]], *cache.gather(n, 0, length))
        expected, _ = attend(keys, Rule(64**-0.5, (-1, 0)))
        close(page["output"][starts[n] : starts[n + 1]], expected)
