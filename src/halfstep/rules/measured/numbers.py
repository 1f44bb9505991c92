"""Values that are not finite, and a loss scale that falls."""

from __future__ import annotations

from halfstep.findings.card import Card
from halfstep.findings.finding import Severity

DATA = Card(
    code="HS801",
    name="data-not-finite",
    severity=Severity.ERROR,
    what="A batch holds NaN or infinity.",
    why="One such sample makes the loss and every gradient NaN; without a scaler the next step writes NaN into all weights.",
    example="x = (raw - raw.mean(0)) / raw.std(0)  # a constant column: 0 / 0\n",
    instead="x = (raw - raw.mean(0)) / raw.std(0).clamp_min(1e-6)\nassert torch.isfinite(x).all()\n",
    speakers=("watch",),
    needs=("first value that is not finite",),
)
WEIGHTS = Card(
    code="HS802",
    name="weights-not-finite",
    severity=Severity.ERROR,
    what="A parameter or buffer holds NaN or infinity.",
    why="Every later loss is NaN and nothing brings the weights back: the run must go on from a checkpoint before that update.",
    example='model.load_state_dict(torch.load("after_nan.pt"))\n',
    instead='model.load_state_dict(torch.load("last_finite.pt"))\n',
    speakers=("watch",),
    needs=("first value that is not finite",),
)
LEARNING_RATE = Card(
    code="HS803",
    name="learning-rate-too-high",
    severity=Severity.ERROR,
    what="Gradients grew from update to update until they were no longer finite.",
    why="Each update overshoots more than the one before. Lower the learning rate, warm up for longer, or clip the gradients.",
    example="optimizer = torch.optim.SGD(model.parameters(), lr=10.0)\n",
    instead="optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n",
    speakers=("watch",),
    needs=("first value that is not finite", "gradient norm"),
)
FP16_RANGE = Card(
    code="HS804",
    name="fp16-range",
    severity=Severity.ERROR,
    what="A value does not fit FP16, which ends at 65504.",
    why=(
        "It becomes infinity, whatever the loss scale is where it happens in forward. BF16 has the range of FP32; or compute "
        "this part with autocast disabled, or make its inputs smaller."
    ),
    example='with torch.autocast("cuda", dtype=torch.float16):\n    y = big(x)  # activations of 1e5\n',
    instead='with torch.autocast("cuda", dtype=torch.bfloat16):\n    y = big(x)\n',
    speakers=("watch",),
    needs=("first value that is not finite", "largest activation"),
)
LOG_OR_DIVISION = Card(
    code="HS805",
    name="log-or-division",
    severity=Severity.ERROR,
    what="A logarithm, division, root or power got a value at which it or its gradient is not finite.",
    why="The logarithm of 0, 0 / 0 and the gradient of a root at 0 are not finite in any precision.",
    example="loss = -(target * probability.log()).sum()\n",
    instead="loss = torch.nn.functional.cross_entropy(logits, target)  # log_softmax inside\n",
    speakers=("watch",),
    needs=("first value that is not finite",),
)
SCALE_COLLAPSE = Card(
    code="HS806",
    name="amp-scale-collapse",
    severity=Severity.ERROR,
    what="Update after update is skipped and the loss scale falls without end.",
    why=(
        "A skip halves the scale, which helps against an overflow of scaled gradients and against nothing else: where data, "
        "weights or forward are not finite, nothing is trained while the loop reports success."
    ),
    example="x = (raw - raw.mean(0)) / raw.std(0)  # NaN: every step is skipped\nscaler.step(optimizer)\nscaler.update()\n",
    instead="x = (raw - raw.mean(0)) / raw.std(0).clamp_min(1e-6)\nscaler.step(optimizer)\nscaler.update()\n",
    speakers=("watch",),
    needs=("loss scale",),
)
SCALE_FALLING = Card(
    code="HS807",
    name="amp-scale-falling",
    severity=Severity.WARNING,
    what="Updates go on being skipped long after the loss scale should have settled.",
    why="A settled scale overflows about once in 2000 updates. Far more often means: BF16, or smaller values.",
    example='with torch.autocast("cuda", dtype=torch.float16):\n    loss = model(x)\n',
    instead='with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = model(x)\n',
    speakers=("watch",),
    needs=("loss scale",),
)
NOT_FINITE = Card(
    code="HS808",
    name="not-finite",
    severity=Severity.ERROR,
    what="A gradient is not finite, and what made it was not seen.",
    why="Without a scaler the step writes it into the weights.",
    example='loss = model(x).sum() * float("inf")\nloss.backward()\noptimizer.step()\n',
    instead="loss = model(x).sum()\nloss.backward()\noptimizer.step()\n",
    speakers=("watch",),
    needs=("gradient norm",),
)
UNDERFLOW = Card(
    code="HS809",
    name="fp16-gradient-underflow",
    severity=Severity.INFO,
    what="A large share of a layer's gradient values is below what FP16 holds at this loss scale.",
    why="They are zero or lose their digits, so the layer learns from the rest alone. BF16 has the range of FP32.",
    example='scaler = torch.amp.GradScaler("cuda", init_scale=1.0)\n',
    instead='scaler = torch.amp.GradScaler("cuda")  # starts at 65536 and finds its scale\n',
    speakers=("watch",),
    needs=("gradient values",),
)
MASKED_ROW = Card(
    code="HS810",
    name="mask-covers-a-row",
    severity=Severity.ERROR,
    what="A mask of minus infinity leaves nothing of a row, and softmax makes NaN of it.",
    why="Softmax over nothing is 0 / 0. Let every row keep one place, or fill with `torch.finfo(x.dtype).min`.",
    example='scores.masked_fill(mask, float("-inf")).softmax(-1)  # a row of padding only\n',
    instead="scores.masked_fill(mask, torch.finfo(scores.dtype).min).softmax(-1)\n",
    speakers=("watch",),
    needs=("first value that is not finite",),
)

CARDS = (
    DATA,
    WEIGHTS,
    LEARNING_RATE,
    FP16_RANGE,
    LOG_OR_DIVISION,
    SCALE_COLLAPSE,
    SCALE_FALLING,
    NOT_FINITE,
    UNDERFLOW,
    MASKED_ROW,
)
