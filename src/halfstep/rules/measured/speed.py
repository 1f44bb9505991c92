"""What costs time: found by `halfstep watch --profile`, ranked by the seconds that could be saved."""

from __future__ import annotations

from halfstep.findings.card import Card
from halfstep.findings.finding import Severity


def _card(code: str, name: str, what: str, why: str, example: str, instead: str, needs: str) -> Card:
    return Card(
        code=code,
        name=name,
        severity=Severity.PERF,
        what=what,
        why=why,
        example=example,
        instead=instead,
        speakers=("watch",),
        needs=(needs,),
    )


FP32_PRODUCTS = _card(
    "HS821",
    "fp32-matrix-products",
    "Matrix products run in FP32 on a device that is faster in low precision.",
    "They are where autocast gains; the factor was measured on this device.",
    "loss = model(x)\n",
    'with torch.autocast("cuda", dtype=torch.bfloat16):\n    loss = model(x)\n',
    "floating operations by dtype",
)
CASTS = _card(
    "HS822",
    "time-in-casts",
    "Much time goes into casts between number formats.",
    "Autocast casts each weight once while its region is open: open it once over an accumulation window, not once a micro-batch.",
    'for x in window:\n    with torch.autocast("cuda", dtype=torch.bfloat16):\n        losses.append(model(x))\n',
    'with torch.autocast("cuda", dtype=torch.bfloat16):\n    for x in window:\n        losses.append(model(x))\n',
    "seconds in casts",
)
HOST_READS = _card(
    "HS823",
    "host-reads",
    "The host waits for values of the device in every update.",
    "While it waits it gives the device nothing to do. Keep values on the device and read them every few dozen updates.",
    "running += loss.item()\n",
    "running += loss.detach()\n",
    "host reads",
)
TRANSFERS = _card(
    "HS824",
    "slow-transfers",
    "Batches are copied to the device from memory that is not pinned, or while the host waits.",
    "Only a copy from pinned memory runs beside the computation.",
    "x = x.to(device)\n",
    "loader = DataLoader(data, pin_memory=True)\nx = x.to(device, non_blocking=True)\n",
    "transfers",
)
INPUT_WAIT = _card(
    "HS825",
    "input-wait",
    "The loop waits for data.",
    "Workers prepare batches beside the computation; what is the same in every epoch can be prepared once.",
    "loader = DataLoader(data, batch_size=32)\n",
    "loader = DataLoader(data, batch_size=32, num_workers=4, persistent_workers=True)\n",
    "seconds in the loader",
)
OPTIMIZER_LOOP = _card(
    "HS826",
    "optimizer-loop",
    "The optimizer goes through the parameters one operation after the other.",
    "The fused form reads and writes every value once.",
    "optimizer = torch.optim.AdamW(model.parameters())\n",
    "optimizer = torch.optim.AdamW(model.parameters(), fused=True)\n",
    "seconds in the step",
)
ODD_SHAPES = _card(
    "HS827",
    "odd-shapes",
    "Matrix products in low precision have sides that are not multiples of 8.",
    "Tensor Cores take tiles of 8 and more: an odd side is filled up or takes a slower kernel. Pad the vocabulary and the batch.",
    "head = nn.Linear(768, 50257)\n",
    "head = nn.Linear(768, 50304)\n",
    "shapes of matrix products",
)
SMALL_KERNELS = _card(
    "HS828",
    "small-kernels",
    "Much of the time goes into operations that are too small to be worth their launch.",
    "`torch.compile` joins them; a larger micro-batch gives each more to do.",
    "model = Model()\n",
    "model = torch.compile(Model())\n",
    "seconds of each operation",
)
TF32_OFF = _card(
    "HS829",
    "tf32-off",
    "FP32 matrix products do not use TF32, which this GPU has.",
    "TF32 rounds the inputs of FP32 products to 11 bits and is several times faster.",
    "loss = model(x)\n",
    'torch.set_float32_matmul_precision("high")\nloss = model(x)\n',
    "floating operations by dtype",
)
RECOMPILES = _card(
    "HS830",
    "recompiles",
    "torch.compile compiles again after the first updates.",
    "A shape or a Python value that changes makes new code. Pad to a few sizes, or mark the size as dynamic.",
    "step = torch.compile(model)\n",
    "step = torch.compile(model, dynamic=True)\n",
    "graphs compiled",
)

CARDS = (
    FP32_PRODUCTS,
    CASTS,
    HOST_READS,
    TRANSFERS,
    INPUT_WAIT,
    OPTIMIZER_LOOP,
    ODD_SHAPES,
    SMALL_KERNELS,
    TF32_OFF,
    RECOMPILES,
)
