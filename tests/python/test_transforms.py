"""Transforms and layouts of torch that are not served: refused by name, from supports() too."""

import pytest
import torch
from test_errors import Arguments
from test_splitkv_errors import CacheArguments

import flashattn_ext

fwd = flashattn_ext.flash_fwd


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_dual_tensors_are_refused(name, device):
    arguments = Arguments(device)
    given = getattr(arguments, name)
    with torch.autograd.forward_ad.dual_level():
        arguments.call()
        arguments.set(**{name: torch.autograd.forward_ad.make_dual(given, given.clone())})
        with pytest.raises(NotImplementedError, match="no backward"):
            arguments.call()
        assert not arguments.call(flashattn_ext.supports)[0]


@pytest.mark.parametrize("name", ["q", "k", "sinks", "k_new", "rotary_cos"])
def test_dual_tensors_are_refused_by_splitkv(name, device):
    arguments = CacheArguments(device, "dense append")
    arguments.set(sinks=arguments.empty(4))
    given = arguments.options.get(name, getattr(arguments, name, None))
    with torch.autograd.forward_ad.dual_level():
        arguments.call()
        arguments.set(**{name: torch.autograd.forward_ad.make_dual(given, given.clone())})
        with pytest.raises(NotImplementedError, match="no backward"):
            arguments.call()


def test_transforms_of_torch_func_are_refused(device):
    a = Arguments(device)
    with pytest.raises(NotImplementedError, match="no backward"):
        torch.func.grad(lambda q: fwd(q, a.k, a.v).float().sum())(a.q)
    with pytest.raises(NotImplementedError, match="no backward"):
        torch.func.jvp(lambda q: fwd(q, a.k, a.v), (a.q,), (a.q,))
    with pytest.raises(NotImplementedError, match="q.*vmap"):
        torch.vmap(lambda q: fwd(q, a.k, a.v))(a.q[None])


@pytest.mark.parametrize("name", ["q", "k", "v", "sinks", "seqused_k"])
def test_other_layouts_are_refused_by_name(name, device):
    arguments = Arguments(device)
    arguments.set(sinks=arguments.empty(4), seqused_k=arguments.ints([32, 9]))
    given = arguments.options.get(name, getattr(arguments, name, None))
    arguments.set(**{name: given.to_sparse()})
    with pytest.raises(ValueError, match=f"{name}: .*sparse_coo"):
        arguments.call()
    supported, reason = arguments.call(flashattn_ext.supports)
    assert not supported and name in reason


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout, device):
    arguments = Arguments(device)
    parts = [arguments.empty(length, 4, 64) for length in (3, 5)]
    arguments.set(q=torch.nested.nested_tensor(parts, layout=layout))
    with pytest.raises(ValueError, match="q: .*nested"):
        arguments.call()
    assert not arguments.call(flashattn_ext.supports)[0]
