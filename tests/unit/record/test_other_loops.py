"""Loops that other people's libraries run are heard, and are right where they are right."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from halfstep.events.vocabulary import Backward, ModuleReplaced, Step

DATA = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
loader = DataLoader(data, batch_size=2, shuffle=True)
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
"""
ACCELERATE = f"""{DATA}
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
"""
FABRIC = f"""{DATA}
import warnings
warnings.simplefilter("ignore")
from lightning.fabric import Fabric

fabric = Fabric(accelerator="cpu", devices=1)
model, optimizer = fabric.setup(model, optimizer)
loader = fabric.setup_dataloaders(loader)
for epoch in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        fabric.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
"""
TRAINER = """\
import tempfile
import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 2)

    def forward(self, x, labels):
        scores = self.line(x)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


rows = [{"x": torch.randn(4), "labels": torch.tensor(i % 2)} for i in range(16)]
with tempfile.TemporaryDirectory() as folder:
    asked = TrainingArguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, num_train_epochs=2, use_cpu=True,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, max_grad_norm=1.0,
    )
    Trainer(Model(), asked, train_dataset=rows).train()
"""
GAN = """\
import torch
from torch import nn

G, D = nn.Linear(2, 4), nn.Linear(4, 1)
opt_g, opt_d = torch.optim.Adam(G.parameters(), lr=1e-3), torch.optim.Adam(D.parameters(), lr=1e-3)
criterion = nn.BCEWithLogitsLoss()
for step in range(6):
    real, fake = torch.randn(8, 4), G(torch.randn(8, 2))
    opt_d.zero_grad()
    (criterion(D(real), torch.ones(8, 1)) + criterion(D(fake.detach()), torch.zeros(8, 1))).backward()
    opt_d.step()
    opt_g.zero_grad()
    criterion(D(fake), torch.ones(8, 1)).backward()
    opt_g.step()
"""

ENGINE = """\
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from halfstep import Engine

data = TensorDataset(torch.randn(36, 4), torch.randint(0, 2, (36,)))
loader = DataLoader(data, batch_size=4, shuffle=True)
model = nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)


engine = Engine(model, optimizer, loss=loss, precision="PRECISION", accumulate=4, clip_norm=1.0)
for update in engine.updates(loader, epochs=2):
    pass
"""


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("text", "steps", "backwards"),
    [
        pytest.param(ACCELERATE, 8, 16, marks=needs("accelerate"), id="accelerate"),
        pytest.param(FABRIC, 16, 16, marks=needs("lightning"), id="fabric"),
        pytest.param(TRAINER, 8, 16, marks=needs("transformers", "accelerate"), id="trainer"),
        pytest.param(GAN, 12, 12, id="gan"),
    ],
)
def test_a_right_loop_of_another_library_is_heard_and_has_no_fault(
    run: Callable[..., Any], text: str, steps: int, backwards: int
) -> None:
    watched = run(text)
    assert watched.ending.words == ""
    assert [sum(isinstance(e, kind) for e in watched.events) for kind in (Step, Backward)] == [steps, backwards]
    assert watched.findings("error", "warning") == []


def test_a_gan_whose_discriminator_keeps_the_generators_gradients_is_found(run: Callable[..., Any]) -> None:
    watched = run(GAN.replace("    opt_d.zero_grad()\n", ""))
    assert "grad-zero-missing" in watched.rules()


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_the_engines_own_loop_passes_every_rule(run: Callable[..., Any], precision: str) -> None:
    watched = run(ENGINE.replace("PRECISION", precision))
    assert watched.heard[0].updates == 6
    assert watched.findings() == []


SCALED = """\
import warnings
import torch
from torch import nn

warnings.simplefilter("ignore")
torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
SCALER
for _ in range(4):
    x = torch.randn(16, 8)
    with AUTOCAST:
        out = model(x)
    loss = LOSS
    optimizer.zero_grad()
    NEW_SCALER
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""
HALF = 'torch.autocast("cpu", dtype=torch.float16)'


def scaled(scaler: str, autocast: str, loss: str, *, anew: bool = False) -> str:
    made = f"scaler = {scaler}"
    text = SCALED.replace("    NEW_SCALER", f"    {made}" if anew else "    pass").replace(
        "SCALER\n", "\n" if anew else f"{made}\n"
    )
    return text.replace("AUTOCAST", autocast).replace("LOSS", loss)


def test_a_scaler_that_is_made_for_every_batch_is_known_to_skip_the_step(run: Callable[..., Any]) -> None:
    """The first forward comes before the first scaler."""
    done = run(scaled('torch.amp.GradScaler("cpu")', HALF, "(100 * out.float()).square().mean() * 30", anew=True))
    assert [f.rule for f in done.findings("error", "warning")] == ["amp-scaler-recreated"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch switches these off only where there is no such device")
def test_autocast_and_a_scaler_that_torch_switches_off_are_said_to_do_nothing(run: Callable[..., Any]) -> None:
    loss = "out.float().square().mean()"
    done = run(scaled('torch.amp.GradScaler("cpu")', 'torch.autocast("cuda", dtype=torch.float16)', loss))
    messages = {f.rule: f.message for f in done.findings("error", "warning")}
    assert messages["amp-autocast-device-mismatch"] == "autocast is for cuda, but the model is on cpu"
    done = run(scaled('torch.amp.GradScaler("cuda")', HALF, loss))
    messages = {f.rule: f.message for f in done.findings("error", "warning")}
    told = "the loss scaler is for a device that this machine lacks, and does nothing"
    assert messages["amp-autocast-device-mismatch"] == told


def test_a_divisor_that_overflows_in_fp16_is_no_guard_that_is_zero(run: Callable[..., Any]) -> None:
    loss = "1 - out.sum() / (out.square() * 60000).sum().clamp(min=1)"
    done = run(scaled('torch.amp.GradScaler("cpu")', HALF, loss))
    assert "amp-loss-half-reduction" in done.rules()
    assert "amp-fp16-eps" not in done.rules()


BY_TEXT = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def average(model, count):
    for p in model.parameters():
        p.grad.div_(count)


def train(chunks):
    for _ in range(2):
        optimizer.zero_grad()
        for x in torch.randn(16, 4).chunk(chunks):
            loss = model(x).square().mean() / chunks
            loss.backward()
        average(model, chunks)
        optimizer.step()


def other(steps):
    for _ in range(steps):
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()


"""


def test_what_no_hook_hears_is_read_from_the_text(run: Callable[..., Any]) -> None:
    done = run(f"{BY_TEXT}train(4)\n")
    assert [(f.rule, f.line) for f in done.findings("error", "warning")] == [("accum-double-division", 11)]


def test_a_fault_in_a_function_that_did_not_run_is_not_told(run: Callable[..., Any]) -> None:
    assert run(f"{BY_TEXT.replace('average(model, chunks)', 'pass')}train(4)\n").rules() == set()


def test_losses_that_are_scaled_in_a_list_are_scaled(run: Callable[..., Any]) -> None:
    text = scaled('torch.amp.GradScaler("cpu", init_scale=2.0)', HALF, "[out.float().mean(), out.float().square().mean()]")
    assert run(text.replace("scaler.scale(loss).backward()", "torch.autograd.backward(scaler.scale(loss))")).rules() == set()


def test_a_loss_that_is_scaled_by_hand_needs_no_scaler(run: Callable[..., Any]) -> None:
    text = scaled("None", HALF, "out.float().square().mean() * loss_scale").replace("scaler.scale(loss)", "loss")
    stepping = "for p in model.parameters():\n        p.grad.div_(loss_scale)\n    optimizer.step()"
    text = text.replace("scaler = None", "loss_scale = 1024.0").replace("    scaler.update()\n", "")
    assert run(text.replace("scaler.step(optimizer)", stepping)).rules() == set()


REPLACED = """\
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential()
model.body, model.head = nn.Linear(4, 8), nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model.head = nn.Linear(8, 3)
ADDED
for _ in range(3):
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("added", "left_out"), [("pass", 1), ('optimizer.add_param_group({"params": model.head.parameters()})', 0)]
)
def test_a_new_head_is_left_out_unless_the_optimizer_is_given_it(run: Callable[..., Any], added: str, left_out: int) -> None:
    events = run(REPLACED.replace("ADDED", added)).events
    assert [len(event.optimizers) for event in events if isinstance(event, ModuleReplaced)] == [left_out]


STEPLESS = """\
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    optimizer.zero_grad()
    for i, x in enumerate(torch.randn(16, 4).chunk(4)):
        (model(x).square().mean() / 8).backward()
        if i + 1 == 8:
            optimizer.step()
            optimizer.zero_grad()
"""


def test_an_optimizer_whose_window_is_never_full_is_said_never_to_step(run: Callable[..., Any]) -> None:
    (found,) = run(STEPLESS).findings("error", "warning")
    assert (found.rule, found.line) == ("accum-tail-dropped", 11)
    measured = "`optimizer` never steps: what 8 backward passes left was cleared before it could"
    assert found.message == f"a window of 8 is longer than the epoch's 4 micro-batches: there is no step; measured: {measured}"
    (found,) = run(STEPLESS.replace(" / 8", "")).findings("error", "warning")
    assert (found.rule, found.line, found.message) == ("accum-tail-dropped", 9, measured)
    assert run(STEPLESS.replace("== 8", "== 4").replace("/ 8", "/ 4")).rules() == set()


BUFFERED = """\
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for window in torch.randn(3, 4, 8, 4):
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for x in window:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for total, p in zip(sums, model.parameters()):
            total.add_(p.grad)
    for total, p in zip(sums, model.parameters()):
        p.grad = total / 4
    optimizer.step()
"""


def test_gradients_that_a_script_adds_up_itself_may_be_cleared_for_each_micro_batch(run: Callable[..., Any]) -> None:
    assert run(BUFFERED).rules() == set()
