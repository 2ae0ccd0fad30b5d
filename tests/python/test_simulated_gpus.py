"""Two GPUs, simulated: fake tensors on cuda:1 and cuda:0. What is on one GPU gives results there;
each tensor that is on the other one is refused by its name. Real ones: c99 in test_gpu.py."""

import re

import pytest
import torch
from bad_inputs import outcome
from good_calls import CALLS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from flashattn_ext._build import BUILD

pytestmark = pytest.mark.skipif(
    not BUILD.get("cuda_archs"), reason="flashattn_ext was built without CUDA kernels"
)
TENSORS = {
    situation: [name for name, value in make("cpu").items() if torch.is_tensor(value)]
    for situation, (_, make) in CALLS.items()
}


@pytest.fixture(autouse=True)
def no_real_gpu(monkeypatch):
    """Or a fake tensor on cuda:1 would want a GPU of that number."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("situation", [situation for situation in CALLS if TENSORS[situation]])
def test_results_are_where_the_tensors_are(situation):
    function, make = CALLS[situation]
    with FakeTensorMode():
        results = tree_leaves(function(**make("cuda:1")))
    assert results and {result.device for result in results} == {torch.device("cuda:1")}


@pytest.mark.parametrize(
    ("situation", "name"), [(situation, name) for situation in CALLS for name in TENSORS[situation]]
)
def test_a_tensor_of_another_gpu_is_refused(situation, name):
    function, make = CALLS[situation]
    kind, names = outcome(situation, name, "another GPU")
    with FakeTensorMode():
        given = make("cuda:1")
        given[name] = given[name].to("cuda:0")
        with pytest.raises(kind) as refused:
            function(**given)
    assert re.match(rf"({names}): \w", str(refused.value)), refused.value
    assert {"cuda:0", "cuda:1"} <= set(re.findall(r"cuda:\d", str(refused.value)))
