"""Passes over one data set, each through another trainer, each in a process of its own that waits for its turn.

`python -m benchmarks.trainers NAME FOLDER` trains on what `benchmarks.instructions` has written into the folder: each line on
stdin, which is JSON, names options of a trainer and is answered with a pass over the data: its seconds from the first
update's begin to the last one's end, and what else is known of it. All train the same architecture on the same tokens; what
a trainer decides by itself (precision, padding, order, optimizer) is left to it unless the options say otherwise. Waiting
threads of all of them sleep soon, which `halfstep train` sees to by itself and which the others would have to be told.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.instructions import CONTEXT, MODEL
from halfstep.train.launch import SLEEP_SOON

Numbers = dict[str, float]
Pass = Callable[[], Numbers]
"""One pass over the data: its "seconds", the "cpu_s" of all threads, and other numbers."""
IGNORED = -100
AT_ONCE = 8
"""HF Trainer's own batch size."""
LEARNING_RATE = 1e-3
EQUAL_LENGTH = 256
EQUAL = {**MODEL, "vocab_size": 256}


class Trainers:
    """Trainers of one kind in a process of their own.

    Args:
        name: one of `KINDS`.
        folder: with the data.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.trainers", name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **SLEEP_SOON},
        )

    def __enter__(self) -> Trainers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def one_pass(self, **options: Any) -> Numbers:
        """Ask for a pass of the trainer with these options, which is made when it is first asked for, and wait for it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(options), file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith('{"seconds"'):
                found: Numbers = json.loads(line)
                return found
        raise RuntimeError(f"the process of {options} has ended")


def serve(name: str, folder: Path) -> None:
    """Answer each line of stdin with a pass of the trainer that it asks for."""
    for library in ("torch", "transformers"):
        import_module(library)
    made: dict[str, Pass] = {}
    for line in sys.stdin:
        if line not in made:
            made[line] = KINDS[name](folder, **json.loads(line))
        print(json.dumps(made[line]()), flush=True)


@dataclass(slots=True)
class Waiting:
    """A loader that keeps the seconds which its reader waits for it."""

    loader: Any
    seconds: float = 0.0

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self.seconds += time.perf_counter() - began
            if batch is None:
                return
            yield batch


def table_of(folder: Path, *, equal: bool = False, **changed: Any) -> dict[str, Any]:
    """A configuration of halfstep over the data in `folder`; `changed` goes into its sections."""
    rows = {"files": str(folder / "rows.jsonl"), "tokenizer": str(folder), "sequence_length": CONTEXT}
    text = {"files": str(folder / "text.txt"), "sequence_length": EQUAL_LENGTH}
    table: dict[str, Any] = {
        "model": {"architecture": "llama", "config": EQUAL if equal else MODEL},
        "data": text if equal else rows,
        "evaluation": {"share": 1e-9, "every_updates": 0},
        "limits": {"epochs": 1},
        "run": {"folder": str(folder / "run")},
    }
    for section, values in changed.items():
        table[section] = {**table.get(section, {}), **values} if isinstance(values, dict) else values
    return table


def halfstep(folder: Path, **changed: Any) -> Pass:
    """A configuration as `halfstep train` runs it, without log and evaluation."""
    from datetime import datetime

    from halfstep.config.schema import validate
    from halfstep.train.build import build_engine, build_loader
    from halfstep.train.job import prepare

    job = prepare(validate(table_of(folder, **changed)), started=datetime.now())
    engine, _ = build_engine(job.model, job.resolved, None, job.opened.train)
    loader = Waiting(build_loader(job.opened.train, job.run, job.group, job.device))

    def one_pass() -> Numbers:
        loader.seconds, began, cpu_began = 0.0, time.perf_counter(), time.process_time()
        updates = list(engine.updates(loader))
        loss = float(updates[-1].loss)
        seconds = time.perf_counter() - began
        tokens = sum(update.weight for update in updates)
        numbers = {"waited_s": loader.seconds, "loss": loss, "tokens": tokens, "updates": len(updates)}
        return {"seconds": seconds, "cpu_s": time.process_time() - cpu_began, **numbers}

    return one_pass


Sample = dict[str, list[int]]


def samples_in(folder: Path, *, equal: bool) -> list[Sample]:
    """The data in `folder` as the other trainers take them, read and made into tokens by halfstep."""
    from halfstep.config.schema import validate
    from halfstep.train.documents import Documents
    from halfstep.train.opening import open_inputs
    from halfstep.train.samples import Shape

    source = open_inputs(validate(table_of(folder, equal=equal))).train
    if not isinstance(source.content, Documents):
        windows = source.samples(Shape(length=EQUAL_LENGTH, packing=None, too_long=None))
        batches = (windows.__getitems__([index]) for index in range(len(windows)))
        return [_sample(batch["input_ids"][0].tolist(), batch["labels"][0].tolist()) for batch in batches]
    return [*map(_document, *_spans(source.content))]


def _spans(documents: Any) -> tuple[list[Any], list[Any]]:
    spans = [slice(start, start + length) for start, length in zip(documents.starts, documents.lengths, strict=True)]
    return [documents.tokens[span].tolist() for span in spans], [documents.counted[span].tolist() for span in spans]


def _document(tokens: list[int], counted: list[bool]) -> Sample:
    return _sample(tokens, [token if counts else IGNORED for token, counts in zip(tokens, counted, strict=True)])


def _sample(tokens: list[int], labels: list[int]) -> Sample:
    return {"input_ids": tokens, "attention_mask": [1] * len(tokens), "labels": labels}


def filled_up(samples: Sequence[Sample]) -> dict[str, Any]:
    """A batch as long as its longest sample, as transformers' collators make it."""
    import torch

    longest = max(len(sample["input_ids"]) for sample in samples)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": IGNORED}
    return {
        name: torch.tensor([sample[name] + [value] * (longest - len(sample[name])) for sample in samples])
        for name, value in fill.items()
    }


def model_of(*, equal: bool) -> Any:
    """The architecture with transformers' own choice of attention."""
    import torch

    from halfstep.train.models import config_of_architecture, new_model

    torch.manual_seed(0)
    return new_model(config_of_architecture("llama", EQUAL if equal else MODEL), "sdpa").train()


def trainer(folder: Path, *, equal: bool = False, bf16: bool = False) -> Pass:
    """HF Trainer with its defaults; `bf16` turns its mixed precision on. Bars and reports are off."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Clock(TrainerCallback):  # type: ignore[misc]  # of a library without types
        began = ended = cpu_began = cpu_ended = 0.0

        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            self.began, self.cpu_began = time.perf_counter(), time.process_time()

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            self.ended, self.cpu_ended = time.perf_counter(), time.process_time()

    clock = Clock()
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        num_train_epochs=1,
        bf16=bf16,
        use_cpu=not torch.accelerator.is_available(),
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    made = Trainer(model_of(equal=equal), arguments, filled_up, samples_in(folder, equal=equal), callbacks=[clock])

    def one_pass() -> Numbers:
        loss = made.train().training_loss
        return {"seconds": clock.ended - clock.began, "cpu_s": clock.cpu_ended - clock.cpu_began, "loss": loss}

    return one_pass


def accelerate(folder: Path, *, equal: bool = False, bf16: bool = False) -> Pass:
    """Accelerate's example loop, with the clipping of its guide."""
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader
    from transformers import get_linear_schedule_with_warmup

    accelerator = Accelerator(mixed_precision="bf16" if bf16 else "no", cpu=not torch.accelerator.is_available())
    model = model_of(equal=equal)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    samples: Any = samples_in(folder, equal=equal)
    loader = DataLoader(samples, shuffle=True, collate_fn=filled_up, batch_size=AT_ONCE)
    scheduler = get_linear_schedule_with_warmup(optimizer, 0, 100_000)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def one_pass() -> Numbers:
        began, cpu_began = time.perf_counter(), time.process_time()
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        last = loss.item()
        return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began, "loss": last}

    return one_pass


def by_hand(folder: Path, *, equal: bool = False, bf16: bool = False) -> Pass:
    """The plain loop of PyTorch's examples."""
    import torch
    from torch.utils.data import DataLoader

    from halfstep._compat import accelerator_device

    device = accelerator_device()
    model = model_of(equal=equal).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    samples: Any = samples_in(folder, equal=equal)
    loader = DataLoader(samples, shuffle=True, collate_fn=filled_up, batch_size=AT_ONCE)

    def one_pass() -> Numbers:
        began, cpu_began = time.perf_counter(), time.process_time()
        for batch in loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        last = loss.item()
        return {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_began, "loss": last}

    return one_pass


KINDS: dict[str, Callable[..., Pass]] = {
    "halfstep": halfstep,
    "trainer": trainer,
    "accelerate": accelerate,
    "by hand": by_hand,
}

if __name__ == "__main__":
    serve(sys.argv[1], Path(sys.argv[2]))
