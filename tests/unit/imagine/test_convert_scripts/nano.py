# ruff: noqa
# fmt: off
# as nanoGPT is written: globals, batches without a loader, accumulation in an inner loop, a rate set by hand
import math

import torch
import torch.nn as nn
from torch.nn import functional as F

# settings
device = 'cpu'
gradient_accumulation_steps = 3
grad_clip = 1.0
learning_rate = 1e-2
max_iters = 8
warmup_iters = 2

torch.manual_seed(1337)
text = torch.randint(11, (400,))


def get_batch(split):
    ix = torch.randint(len(text) - 9, (4,))
    x = torch.stack([text[i : i + 8] for i in ix])
    y = torch.stack([text[i + 1 : i + 9] for i in ix])
    return x.to(device), y.to(device)


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 16)
        self.head = nn.Linear(16, 11)

    def forward(self, idx, targets=None):
        logits = self.head(self.emb(idx))
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))
        return logits, loss


model = GPT()
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)


@torch.no_grad()
def estimate_loss():
    model.eval()
    out = {}
    for split in ['train', 'val']:
        losses = torch.zeros(2)
        for k in range(2):
            X, Y = get_batch(split)
            logits, loss = model(X, Y)
            losses[k] = loss.item()
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    return learning_rate * 0.5 * (1 + math.cos(math.pi * it / max_iters))


X, Y = get_batch('train')
iter_num = 0
while True:
    lr = get_lr(iter_num)
    for param_group in optimizer.param_groups:
        param_group['lr'] = lr
    if iter_num % 4 == 0:
        print("eval", estimate_loss()['val'].item())
    # the gradients of several micro-batches
    for micro_step in range(gradient_accumulation_steps):
        logits, loss = model(X, Y)
        loss = loss / gradient_accumulation_steps
        X, Y = get_batch('train')  # prefetched while the model runs
        loss.backward()
    if grad_clip != 0.0:
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print("loss", loss.item() * gradient_accumulation_steps)
    iter_num += 1
    if iter_num > max_iters:
        break
