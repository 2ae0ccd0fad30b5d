"""A mixed batch as `Plan.show` draws it: shares of the decode work, and a chunk in splits."""

from unittest import mock

from matplotlib.figure import Figure

from flashattn_ext import _plan_gpus, _plan_picture
from flashattn_ext.planning import Gpu, plan


def made():
    """For a GPU of eight multiprocessors of sm_90, whatever this build has."""
    with mock.patch.object(_plan_gpus, "BUILD", {}):
        return plan(
            batch=3, heads=8, heads_kv=2, head_dim=128, seqlen_q=[1, 90, 2],
            seqlen_k=[1280, 420, 330], cache=16, causal=True, gpu=Gpu("small", 90, 8),
        )  # fmt: skip


def draw():
    figure = Figure()
    _plan_picture.draw(figure, made().tile_maps(heads=[0, 4]))
    return figure
