"""The two functions that transformers calls, without a model."""

import subprocess
import sys

import pytest
import torch
from reference import Rule, Sequence, attend
from tiny_models import BATCH, LENGTH, adapter, hf, padding_mask

from flashattn_ext.integrations import _transformers_masks as masks


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Lengths that break flash_fwd's contract raise instead of being clamped."""
    monkeypatch.setenv("FLASHATTN_EXT_CHECK", "1")


class Layer(torch.nn.Module):
    is_causal = True
    num_key_value_groups = 2


def operands(sq, sk, device="cpu", batch=BATCH):
    torch.manual_seed(2)
    dtype = torch.float32 if device == "cpu" else torch.float16
    shapes = ((batch, 4, sq, 16), (batch, 2, sk, 16), (batch, 2, sk, 16))
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


@pytest.mark.parametrize("sq", [1, 4, LENGTH])
@pytest.mark.parametrize("padding", ["none", "left", "right", "both"])
def test_sinks_and_padded_queries(padding, sq, device):
    """Against float64: sinks count, padded keys do not exist, padded queries are zeros."""
    q, k, v = operands(sq, LENGTH, device)
    sinks = torch.tensor([-1.0, 0.0, 1.0, 2.0], device=device).to(q.dtype)
    used = padding_mask(padding, device).bool()
    mask = masks.attention_mask_for(
        BATCH, sq, LENGTH, q_offset=LENGTH - sq, attention_mask=used, device=device
    )
    # What does not exist must not be read.
    k = torch.where(used[:, None, :, None], k, torch.nan)
    v = torch.where(used[:, None, :, None], v, torch.nan)
    out, weights = adapter.attention_forward(Layer(), q, k, v, mask, scaling=0.3, s_aux=sinks)
    assert weights is None and out.shape == (BATCH, sq, 4, 16)
    for row in range(BATCH):
        keys, queries = used[row], used[row, LENGTH - sq :]
        q_row, k_row, v_row = (x[row].transpose(0, 1).cpu() for x in (q, k, v))
        sequence = Sequence(
            q_row[queries.cpu()], k_row[keys.cpu()], v_row[keys.cpu()], sinks=sinks.cpu()
        )
        expected, _ = attend(sequence, Rule(0.3, (-1, 0)))
        tolerance = 1e-5 if device == "cpu" else 4e-3
        torch.testing.assert_close(
            out[row][queries].double().cpu(), expected, atol=tolerance, rtol=0
        )
        assert (out[row][~queries] == 0).all()


@pytest.mark.parametrize("layout", ["cache", "projection", "cropped cache"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_keys_and_values_are_not_copied(padding, layout, monkeypatch):
    q, k, v = operands(1, LENGTH)
    if layout == "projection":
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    elif layout == "cropped cache":
        k, v = (torch.cat([torch.full_like(x, torch.nan), x], 2)[:, :, LENGTH:] for x in (k, v))
    mask = masks.attention_mask_for(
        BATCH, 1, LENGTH, q_offset=LENGTH - 1, attention_mask=padding_mask(padding)
    )
    assert (mask is None) == (padding == "none")
    seen = []
    kernel = adapter.flash_fwd

    def watched(q, k, v, **options):
        seen.extend((k, v))
        return kernel(q, k, v, **options)

    monkeypatch.setattr(adapter, "flash_fwd", watched)
    out, _ = adapter.attention_forward(Layer(), q, k, v, mask)
    assert [x.data_ptr() for x in seen] == [k.data_ptr(), v.data_ptr()]
    copied = [x.clone(memory_format=torch.contiguous_format) for x in (k, v)]
    assert torch.equal(out, adapter.attention_forward(Layer(), q, *copied, mask)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("padding", ["none", "left"])
def test_layers_do_not_wait_for_the_device(padding, monkeypatch):
    monkeypatch.delenv("FLASHATTN_EXT_CHECK")
    q, k, v = operands(1, LENGTH, "cuda")
    mask = masks.attention_mask_for(
        BATCH, 1, LENGTH, q_offset=LENGTH - 1, attention_mask=padding_mask(padding, "cuda"),
        device="cuda",
    )  # fmt: skip
    adapter.attention_forward(Layer(), q, k, v, mask)
    torch.cuda.set_sync_debug_mode("error")
    try:
        adapter.attention_forward(Layer(), q, k, v, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"dropout": 0.1}, NotImplementedError, "dropout"),
        ({"output_attentions": True}, NotImplementedError, "output_attentions"),
        ({"position_bias": torch.zeros(1)}, NotImplementedError, "position_bias"),
        ({"attention_mask": torch.ones(BATCH, LENGTH)}, ValueError, "attention_mask"),
        ({"attention_mask": torch.ones(BATCH, 1, 12, 12).int()}, ValueError, "attention_mask"),
        (
            {"attention_mask": torch.ones(BATCH, 1, 12, 12), "s_aux": torch.zeros(4)},
            NotImplementedError,
            "s_aux",
        ),
        ({"cu_seq_lens_q": torch.tensor([0, 12])}, ValueError, "cu_seq_lens_k"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 12]), "cu_seq_lens_k": torch.tensor([0, 12])},
            ValueError,
            "batch size 3",
        ),
    ],
)
def test_refused(options, error, named):
    q, k, v = operands(LENGTH, LENGTH)
    with pytest.raises(error, match=named):
        adapter.attention_forward(Layer(), q, k, v, **{"attention_mask": None, **options})


def assert_as_masked(out, q, k, v, exact, rows=slice(None)):
    """Against torch SDPA in float32 with the mask of every query and key."""
    q, k, v = q.float(), k.float(), v.float()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, exact, enable_gqa=True)
    expected = expected.transpose(1, 2)[rows]
    tolerance = 4e-3 if q.is_cuda else 1e-5
    torch.testing.assert_close(out.float()[rows], expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("window", [2, LENGTH - 1, LENGTH])
@pytest.mark.parametrize("padding", ["none", "left", "both"])
@pytest.mark.parametrize("direction", ["causal", "bidirectional"])
def test_the_mask_decides_about_the_window(direction, padding, window, device):
    """Layers may pass none, or in both directions one key less than their mask shows."""
    q, k, v = operands(LENGTH, LENGTH, device)
    pattern = getattr(hf.masking_utils, f"sliding_window_{direction}_mask_function")(window)
    used = padding_mask(padding, device).bool()
    options = {"mask_function": pattern, "attention_mask": used, "device": device}
    exact = hf.masking_utils.sdpa_mask(BATCH, LENGTH, LENGTH, allow_is_causal_skip=False, **options)
    options |= {"allow_is_bidirectional_skip": True, "local_size": window}
    mask = masks.attention_mask_for(BATCH, LENGTH, LENGTH, **options)
    assert mask is None or mask.dtype == torch.int32
    for passed in (window, window + 1) if mask is None else (window, window + 1, None):
        causal = direction == "causal"
        out, _ = adapter.attention_forward(
            Layer(), q, k, v, mask, is_causal=causal, sliding_window=passed
        )
        assert_as_masked(out, q, k, v, exact, used)


@pytest.mark.parametrize("padding", ["none", "left", "right", "both"])
@pytest.mark.parametrize("sq", [1, 5, LENGTH, LENGTH + 3])
def test_every_query_sees_the_tokens_of_an_encoder(sq, padding, device):
    """As in cross-attention, where the padding says nothing of the queries."""
    q, k, v = operands(sq, LENGTH, device)
    used = padding_mask(padding, device).bool()
    mask = masks.attention_mask_for(
        BATCH, sq, LENGTH, mask_function=hf.masking_utils.bidirectional_mask_function,
        attention_mask=used, allow_is_causal_skip=False, allow_is_bidirectional_skip=True,
        device=device,
    )  # fmt: skip
    assert (mask is None) == (padding == "none")
    # What does not exist must not be read.
    poisoned = [x.masked_fill(~used[:, None, :, None], torch.nan) for x in (k, v)]
    out, _ = adapter.attention_forward(Layer(), q, *poisoned, mask, is_causal=False)
    assert_as_masked(out, q, k, v, used[:, None, None].expand(-1, 1, sq, -1))


def test_a_window_in_both_directions_beside_a_cache_is_exact():
    """No lengths say which keys a query sees that is none of the last ones."""
    pattern = hf.masking_utils.sliding_window_bidirectional_mask_function(3)
    sizes = {"mask_function": pattern, "allow_is_bidirectional_skip": True, "local_size": 3}
    mask = masks.attention_mask_for(1, 2, LENGTH, q_offset=4, **sizes)
    assert mask.dtype == torch.bool
    assert mask[0, 0].long().argmax(-1).tolist() == [1, 2] and mask.sum() == 14


def test_a_mask_without_the_cached_tokens_is_refused():
    with pytest.raises(ValueError, match="attention_mask"):
        masks.attention_mask_for(
            BATCH, 1, 5, q_offset=4, attention_mask=padding_mask("none")[:, :1]
        )


def test_slots_behind_the_last_query_are_no_keys():
    """A caller may pass one mask for the whole of a preallocated cache."""
    q, k, v = operands(2, LENGTH)
    k[:, :, 8:] = v[:, :, 8:] = torch.nan
    mask = masks.attention_mask_for(
        BATCH, 2, LENGTH, q_offset=torch.tensor(6), attention_mask=padding_mask("none")
    )
    out, _ = adapter.attention_forward(Layer(), q, k, v, mask)
    assert torch.equal(
        out, adapter.attention_forward(Layer(), q, k[:, :, :8], v[:, :, :8], None)[0]
    )


def test_a_causal_mask_holds_in_layers_that_do_not_say_causal():
    q, k, v = operands(LENGTH, LENGTH)
    mask = masks.attention_mask_for(BATCH, LENGTH, LENGTH, attention_mask=padding_mask("left"))
    layer = Layer()
    expected, _ = adapter.attention_forward(layer, q, k, v, mask)
    layer.is_causal = False
    assert torch.equal(adapter.attention_forward(layer, q, k, v, mask)[0], expected)


def test_a_model_that_edits_its_mask_gets_one():
    mask = masks.attention_mask_for(BATCH, LENGTH, LENGTH, allow_is_causal_skip=False)
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    assert torch.equal(mask, causal.expand(BATCH, 1, -1, -1))


def test_patterns_of_other_models_are_exact():
    """Chunked attention is no sliding window, though both come as a local size."""
    pattern = hf.masking_utils.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long))
    mask = masks.attention_mask_for(1, 8, 8, mask_function=pattern, local_size=4)
    i, j = torch.arange(8)[:, None], torch.arange(8)[None]
    assert mask.dtype == torch.bool and torch.equal(mask[0, 0], (j <= i) & (j // 4 == i // 4))


@pytest.mark.parametrize("window", [None, 3])
def test_packed_sequences_whose_positions_are_the_rows(window):
    """As older versions describe them; newer ones remap the positions (see the tests of models)."""
    of = hf.masking_utils
    ids = torch.tensor([[0] * 7 + [1] + [2] * 4, [0] * 12, [0] * 2 + [1] * 10])
    causal = of.causal_mask_function
    if window is not None:
        causal = of.sliding_window_causal_mask_function(window)
    pattern = of.and_masks(causal, of.packed_sequence_mask_function(ids))
    mask = masks.attention_mask_for(BATCH, LENGTH, LENGTH, mask_function=pattern)
    assert mask.dtype == torch.int32
    exact = of.sdpa_mask(BATCH, LENGTH, LENGTH, mask_function=pattern, allow_is_causal_skip=False)
    q, k, v = operands(LENGTH, LENGTH)
    out, _ = adapter.attention_forward(Layer(), q, k, v, mask, sliding_window=window)
    assert_as_masked(out, q, k, v, exact)
    padding = padding_mask("left")
    padded = masks.attention_mask_for(
        BATCH, LENGTH, LENGTH, mask_function=pattern, attention_mask=padding
    )
    assert torch.equal(padded, exact & padding[:, None, None].bool())


def test_older_versions_of_transformers_are_refused(monkeypatch):
    monkeypatch.setattr(adapter.transformers, "__version__", "5.16.1")
    with pytest.raises(ImportError, match="needs transformers 5.17 or newer"):
        adapter.register()


def test_name_with_flash_is_refused():
    with pytest.raises(ValueError, match="flash"):
        adapter.register("flashattn_ext")


def test_transformers_is_not_imported_with_the_package():
    code = "import sys, flashattn_ext; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
