# ruff: noqa
# fmt: off
"""A class with methods for a step, an epoch, validation and saving."""

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Linear(5, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.inner(x)))


class Trainer:
    def __init__(self, model, loader, valid, device="cpu", lr=1e-2):
        self.device = device
        self.model = model.to(device)
        self.loader, self.valid = loader, valid
        self.optimizer = optim.AdamW(self.model.parameters(), lr=lr)
        self.schedule = optim.lr_scheduler.ExponentialLR(self.optimizer, gamma=0.9)

    def compute_loss(self, batch):
        x, y = (t.to(self.device) for t in batch)
        return F.cross_entropy(self.model(x), y)

    def train_step(self, batch):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.compute_loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return loss.item()

    def validate(self):
        self.model.eval()
        with torch.no_grad():
            return sum(self.compute_loss(b).item() for b in self.valid) / len(self.valid)

    def save(self, path):
        torch.save({'net': self.model.state_dict(), 'optim': self.optimizer.state_dict()}, path)

    def load(self, path):
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state['net'])
        self.optimizer.load_state_dict(state['optim'])

    def fit(self, epochs):
        for _ in range(epochs):
            self.model.train()
            losses = [self.train_step(batch) for batch in self.loader]
            self.schedule.step()
            print("loss", sum(losses) / len(losses))
            print("eval", self.validate())
            self.save("trainer.pt")
        self.load("trainer.pt")


def main():
    torch.manual_seed(2)
    x, y = torch.randn(40, 5), torch.randint(3, (40,))
    loader = DataLoader(TensorDataset(x, y), batch_size=8)
    Trainer(Net(10), loader, loader).fit(3)


main()
