"""Highest memory and time of an update over 32,000 tokens of vocabulary, in a process of its own.

`python -m benchmarks.loss_peak NAME UPDATES` prints, as JSON, the bytes at the highest point of so many updates above what the
process held before the model was made, and the seconds of each update but the first.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from torch import nn

from halfstep._compat import accelerator_device
from halfstep.measure.memory import memory_use, reset_peak
from halfstep.train.chunked_loss import chunk_tokens
from halfstep.train.head import causal_loss
from halfstep.train.models import config_of_architecture, new_model

VOCABULARY = 32_000
LENGTH, SEQUENCES = 256, 8
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
KINDS = ("plain", "chunked")


def small_llama(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return new_model(config_of_architecture("llama", SIZES), "sdpa").to(device).train()


def updates(kind: str, number: int, device: torch.device) -> dict[str, object]:
    """Peak bytes and seconds of updates with fused AdamW and the plain or the chunked loss."""
    before = memory_use(device).allocated_bytes
    model = small_llama(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss = causal_loss(chunk_tokens(VOCABULARY, device) if kind == "chunked" else 0)
    tokens = torch.randint(0, VOCABULARY, (SEQUENCES, LENGTH), device=device)
    reset_peak(device)
    seconds: list[float] = []
    for _ in range(number):
        started = time.perf_counter()
        total, weight = loss(model, {"input_ids": tokens, "labels": tokens})
        (total / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        told = total.item()
        seconds.append(time.perf_counter() - started)
    highest = memory_use(device).peak_allocated_bytes
    assert before is not None
    assert highest is not None
    return {"peak_bytes": highest - before, "seconds": seconds[1:], "last_loss": told}


if __name__ == "__main__":
    print(json.dumps(updates(sys.argv[1], int(sys.argv[2]), accelerator_device())))
