"""What BF16 loses, where a model does not run in the precision it was asked to, and updates that are large."""

from __future__ import annotations

from halfstep.findings.card import Card
from halfstep.findings.finding import Severity

STATE = Card(
    code="HS811",
    name="bf16-optimizer-state",
    severity=Severity.INFO,
    what="The optimizer keeps its averages in BF16.",
    why=(
        "With 8 bits an average that moves by a thousandth at a time (beta2 = 0.999) stands still: it never falls. Keep weights "
        "in FP32 under autocast, and the state is FP32 as well."
    ),
    example="model.to(torch.bfloat16)\noptimizer = torch.optim.AdamW(model.parameters())\n",
    instead="optimizer = torch.optim.AdamW(model.parameters())  # FP32 weights; autocast in forward\n",
    speakers=("watch",),
    needs=("dtype of the optimizer's state",),
)
ACCUMULATION = Card(
    code="HS812",
    name="bf16-accumulation",
    severity=Severity.INFO,
    what="Gradients of several micro-batches are added up in BF16.",
    why="A sum of k numbers in BF16 loses up to k / 256 of its size. FP32 weights have FP32 gradients.",
    example="model.to(torch.bfloat16)\n(loss / 8).backward()  # eight times a step\n",
    instead="""\
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = model(x)
(loss / 8).backward()  # into FP32 gradients
""",
    speakers=("watch",),
    needs=("dtype of gradients",),
)
LARGE_UPDATES = Card(
    code="HS813",
    name="large-updates",
    severity=Severity.INFO,
    what="Updates are large against the weights they change.",
    why="About a thousandth is usual. Far more makes a loss that jumps or stays: lower the learning rate, or warm up for longer.",
    example="optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)\n",
    instead="optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)\n",
    speakers=("watch",),
    needs=("update ratio",),
)
LEFT_PRECISION = Card(
    code="HS814",
    name="left-low-precision",
    severity=Severity.INFO,
    what="Matrix products inside an autocast region run in FP32.",
    why="They give none of the speed, and change where values are rounded. A custom function, a region that is switched off or a "
    "custom operator took them out.",
    example='@torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)\ndef forward(ctx, x): ...\n',
    instead='@torch.amp.custom_fwd(device_type="cuda")\ndef forward(ctx, x): ...\n',
    speakers=("watch",),
    needs=("dtype of every operation",),
)
CARDS = (STATE, ACCUMULATION, LARGE_UPDATES, LEFT_PRECISION)
