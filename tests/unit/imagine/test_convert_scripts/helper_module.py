# ruff: noqa
# fmt: off
"""What `with_helper.py` imports."""

from torch.nn.functional import mse_loss


def make_loss(model, weight):
    def compute(batch):
        x, y = batch

        def penalty(out):
            return weight * out.pow(2).mean()

        out = model(x)
        return mse_loss(out, y) + penalty(out)

    return compute
