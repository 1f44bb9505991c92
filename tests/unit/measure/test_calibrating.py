from pathlib import Path

import torch

from halfstep.config.options import Precision
from halfstep.measure.calibrating import calibrate
from halfstep.measure.clock import processor_s
from halfstep.plan.calibration import keep, kept
from halfstep.plan.known_models import KNOWN
from halfstep.plan.machines import measured
from halfstep.plan.model_facts import from_config
from halfstep.plan.search import Wish, search

CPU = torch.device("cpu")


def test_what_was_measured_here_is_kept_and_planned_with(tmp_path: Path) -> None:
    calibration = calibrate(CPU, (Precision.FP32,), budget_s=0.02)
    assert set(calibration.matmul_tflops) == set(calibration.efficiency) == {"fp32"}
    assert 0 < calibration.efficiency["fp32"] <= 1
    keep(calibration, tmp_path)
    assert kept(tmp_path) == calibration
    (plan,) = search(from_config(KNOWN["resnet18"], "resnet18"), measured(calibration, 1, None), Wish(sequence=1, micro_batch=2))
    assert plan.recipe.precision is Precision.FP32
    assert plan.time.rate > 0


def test_processor_time_counts_what_this_process_computes() -> None:
    assert processor_s(lambda: None, CPU) < processor_s(lambda: torch.ones(1 << 20).sort(), CPU)
