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
    why=(
        "After the reduction gradients are the same on all ranks: where they are not, these parameters are not reduced. "
        "A rank that brings nothing to the reduction works for nothing, and shrinks the average."
    ),
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
SHAPES = Card(
    code="HS525",
    name="ddp-unequal-shapes",
    severity=Severity.ERROR,
    what="Ranks meet in a collective with tensors of differing shapes, or train on batches of differing sizes.",
    why="A collective needs the same shape everywhere: it hangs, raises or mixes numbers up. Batches of unequal size are "
    "averaged as if they were equal, so their samples do not count alike.",
    example="dist.all_reduce(losses)  # as many as this rank had batches\n",
    instead="dist.all_reduce(losses.sum())\n",
    speakers=("watch",),
    needs=("shapes on every rank",),
)
UNSEEN = Card(
    code="HS526",
    name="data-samples-unseen",
    severity=Severity.WARNING,
    what="Samples of the data set reach no rank, epoch after epoch.",
    why="They are paid for and never trained on. Most often a last incomplete batch is dropped in the same order every time, "
    "or a sampler that leaves a part out.",
    example="loader = DataLoader(dataset, batch_size=64, drop_last=True)  # the same last samples are dropped every epoch\n",
    instead="loader = DataLoader(dataset, batch_size=64, drop_last=True, shuffle=True)\n",
    speakers=("watch",),
    needs=("indices that loaders hand out",),
)
CARDS = (REPLICAS, ZERO, SAMPLER, SCALES, SHAPES, UNSEEN)
