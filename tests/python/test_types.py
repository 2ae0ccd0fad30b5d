"""What py.typed promises and mypy, which `make lint` runs, cannot see: overloads that know every
keyword."""

import inspect

import pytest

from flashattn_ext import _options, flash_fwd, flash_fwd_splitkv


@pytest.mark.parametrize(
    "function, options, others",
    [
        (flash_fwd, _options.FwdOptions, {"return_lse"}),
        (flash_fwd_splitkv, _options.SplitkvOptions, {"return_lse", "cache_seqlens"}),
    ],
    ids=["flash_fwd", "flash_fwd_splitkv"],
)
def test_overloads_have_every_keyword(function, options, others):
    parameters = inspect.signature(function).parameters.values()
    keywords = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}
    for name in others:
        del keywords[name]
    typed = inspect.get_annotations(options)  # those of its base too
    assert {name: kind.__forward_arg__ for name, kind in typed.items()} == keywords
