"""Backward from one scalar, straight into autograd's engine where nothing needs what comes before it."""

from __future__ import annotations

import logging

import torch
from torch.autograd import Variable
from torch.overrides import has_torch_function

_GRAPH_LOG = logging.getLogger("torch.autograd.graph")


def backward(total: torch.Tensor, root: torch.Tensor, *, retain_graph: bool) -> None:
    """Add the gradients of `total` to the parameters' `.grad`.

    `torch.autograd.backward` first takes its arguments through many cases: 32 us of a tiny model's 770 for a micro-batch here.
    On the CPU, where backward runs in the caller's own thread, a plain scalar with its gradient needs none of that.

    Args:
        total: scalar with a graph.
        root: the gradient that backward starts from, a scalar of the same dtype and device.
        retain_graph: keep the graph for another backward through it.
    """
    if total.is_cpu and _is_plain(total):
        Variable._execution_engine.run_backward(
            (total,), (root,), retain_graph, False, (), allow_unreachable=True, accumulate_grad=True
        )
    else:
        torch.autograd.backward(total, grad_tensors=root, retain_graph=retain_graph)


def _is_plain(total: torch.Tensor) -> bool:
    """Whether nobody listens to `torch.autograd.backward`: no recorder in its place, no subclass, no mode, no graph log."""
    in_place = getattr(torch.autograd.backward, "__globals__", None) is vars(torch.autograd)
    return in_place and not has_torch_function((total,)) and _GRAPH_LOG.getEffectiveLevel() > logging.DEBUG
