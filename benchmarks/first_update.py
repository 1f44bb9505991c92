"""From the start of a process to its first update: `python -m benchmarks.first_update FOLDER` is HF Trainer's way there.

Model and data are those of `benchmarks.trainers`; the tokens are read from where `datasets` keeps them. The parent notes the
time of the line "update 1".
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.instructions import MODEL


def seconds_to_first_update(command: list[str]) -> float:
    """Seconds until a process says "update 1" on stderr; it is ended then."""
    began = time.perf_counter()
    with subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("update 1"):
                seconds = time.perf_counter() - began
                process.kill()
                return seconds
    raise RuntimeError("".join(said[-20:]))


def by_trainer(folder: Path) -> None:
    """A script as HF's documentation shows it: data set, tokenizer, model, Trainer."""
    import torch
    from datasets import load_from_disk
    from transformers import (
        AutoTokenizer,
        DataCollatorForSeq2Seq,
        LlamaConfig,
        LlamaForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    class Said(TrainerCallback):  # type: ignore[misc]  # of a library without types
        def on_step_end(self, *_: Any, **__: Any) -> None:
            print("update 1", file=sys.stderr, flush=True)

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    arguments = TrainingArguments(
        output_dir=tempfile.gettempdir(),
        max_steps=1,
        use_cpu=not torch.accelerator.is_available(),
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    Trainer(
        LlamaForCausalLM(LlamaConfig(**MODEL)),
        arguments,
        DataCollatorForSeq2Seq(tokenizer),
        load_from_disk(str(folder / "tokens")),
        callbacks=[Said()],
    ).train()


if __name__ == "__main__":
    by_trainer(Path(sys.argv[1]))
