"""The last loss of `halfstep train` against that of a plain PyTorch loop: same updates, seed and order of the data.

`python -m benchmarks.same_loss FOLDER` prints both as JSON, FP32.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.trainers import table_of
from halfstep.config.schema import validate
from halfstep.train.build import build_engine, build_loader, build_scheduler, parameter_groups
from halfstep.train.job import Prepared, prepare

MICRO = 4


def prepared(folder: Path) -> Prepared:
    table = table_of(folder, equal=True, precision="fp32", batch={"global": 2 * MICRO, "micro": MICRO})
    return prepare(validate(table), started=datetime.now())


def through_engine(folder: Path) -> float:
    """As `halfstep train` does it."""
    job = prepared(folder)
    engine, _ = build_engine(job.model, job.resolved, None, job.opened.train)
    loader = build_loader(job.opened.train, job.run, job.group, job.device)
    return float([update.loss for update in engine.updates(loader)][-1])


def by_hand(folder: Path) -> float:
    """What the guide's loop does, with everything in one batch an update."""
    job = prepared(folder)
    settings, model = job.run.optimizer, job.model
    groups = parameter_groups(model, settings.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps)
    scheduler = build_scheduler(optimizer, job.run.scheduler, job.planned)
    pending: list[dict[str, torch.Tensor]] = []
    for batch in build_loader(job.opened.train, job.run, job.group, job.device):
        pending.append(batch)
        if len(pending) < job.run.accumulate:
            continue
        whole = {name: torch.cat([part[name] for part in pending]) for name in pending[0]}
        pending.clear()
        optimizer.zero_grad()
        logits = model(input_ids=whole["input_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), whole["labels"][:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        scheduler.step()
    return float(loss)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    print(json.dumps({"halfstep": through_engine(where), "by hand": by_hand(where)}))
