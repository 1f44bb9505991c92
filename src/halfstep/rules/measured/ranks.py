"""What ranks must have alike, and have not."""

from __future__ import annotations

from halfstep.findings.card import Card
from halfstep.findings.finding import Severity

REPLICAS = Card(
    code="HS521",
    name="ddp-replicas-differ",
    severity=Severity.ERROR,
    what="The ranks hold different parameters.",
    why="Replicas that differ once stay different: every rank trains a model of its own, and only rank 0's is saved.",
    example="if rank == 0:\n    model.module.head.reset_parameters()  # after the model was wrapped\n",
    instead="model.head.reset_parameters()\nmodel = DDP(model)  # sends rank 0's parameters to all\n",
    speakers=("watch",),
    needs=("checksums of parameters on every rank",),
)
ZERO = Card(
    code="HS522",
    name="ddp-zero-gradients",
    severity=Severity.ERROR,
    what="Gradients are zero, or missing, on some ranks and not on others.",
    why="After the reduction gradients are the same on all ranks. Where they are not, these parameters are not reduced.",
    example="loss = model.module.head(features).mean() if rank == 0 else model(x).mean()\n",
    instead="loss = model(x).mean()\n",
    speakers=("watch",),
    needs=("gradients on every rank",),
)
SAMPLER = Card(
    code="HS523",
    name="ddp-sampler-arguments",
    severity=Severity.ERROR,
    what="The ranks' samplers do not split the same order into as many parts as there are ranks.",
    why="With another number of replicas, another rank or another seed, some samples are seen twice and others never.",
    example="sampler = DistributedSampler(dataset, num_replicas=1, rank=0)\n",
    instead="sampler = DistributedSampler(dataset)  # asks the process group\n",
    speakers=("watch",),
    needs=("samplers of every rank",),
)
SCALES = Card(
    code="HS524",
    name="ddp-unequal-scales",
    severity=Severity.ERROR,
    what="The loss scale differs between the ranks.",
    why="Each rank divides the same reduced gradients by a scale of its own: the parameters drift apart.",
    example='scaler = torch.amp.GradScaler("cuda", init_scale=2.0 ** (16 - rank))\n',
    instead='scaler = torch.amp.GradScaler("cuda")\n',
    speakers=("watch",),
    needs=("loss scale on every rank",),
)
CARDS = (REPLICAS, ZERO, SAMPLER, SCALES)
