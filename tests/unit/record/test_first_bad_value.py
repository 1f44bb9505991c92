"""Problem 1: the first value that is not finite is named, with its cause, and a run that is well is left alone."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from halfstep.errors import DataError
from halfstep.record.probes.evidence import Replay, Replayed, load, replay, save
from halfstep.record.probes.judgement import Bad, Counts, findings_of
from halfstep.record.probes.numbers import Numbers
from halfstep.record.probes.origin import Origin, Phase, cannot_run_alone
from halfstep.report.parts import Lines
from unit.record.watched import mlp, pairs, squares, watched

NAN, INF = float("nan"), float("inf")


def with_nan(row: int) -> tuple[Tensor, Tensor]:
    x, y = pairs(1)[0]
    x[row, 1] = NAN
    return x, y


def rules(probe: Numbers) -> list[str]:
    return [finding.rule for finding in probe.findings()]


class Log(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + (x * 0).log()


class Guarded(nn.Module):
    """Divides by a guard that FP16 rounds to zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.layer(x) * 0
        return scores / (scores + 1e-8)


class Masked(nn.Module):
    def __init__(self, fill: float, row: int | None) -> None:
        super().__init__()
        self.layer, self.fill, self.row = nn.Linear(4, 4), fill, row

    def forward(self, x: Tensor) -> Tensor:
        scores = self.layer(x)
        mask = torch.zeros_like(scores, dtype=torch.bool)
        mask[:, 0] = True
        if self.row is not None:
            mask[self.row] = True
        return torch.where(mask, self.fill, scores).softmax(-1)


def test_a_bad_sample_is_named_with_its_update_micro_batch_row_and_id() -> None:
    probe = watched(Numbers(rank=3), mlp(), [*pairs(3), with_nan(5)], accumulate=2)
    (finding,) = probe.findings()
    assert finding.rule == "data-not-finite"
    assert Path(finding.path).name == "watched.py"
    assert finding.message == (
        "the batch that `0` takes is the first value that is not finite: `args[0]`, sample 5 of 8; "
        "update 1, micro-batch 1 (samples 24, 25, 26, 27, 28, 29, 30, 31), rank 3, the step was taken with it"
    )


def test_a_bad_weight_is_named() -> None:
    model = mlp()
    model[2].weight.data[1, 2] = INF
    probe = watched(Numbers(), model, pairs(2))
    assert rules(probe) == ["weights-not-finite"]
    assert probe.first is not None
    assert (probe.first.phase, probe.first.module, probe.first.detail) == (Phase.WEIGHTS, "2", "`2.weight`")


def test_a_logarithm_of_zero_is_found_in_the_module_and_line_that_takes_it() -> None:
    probe = watched(Numbers(), mlp(Log()), pairs(1))
    (finding,) = probe.findings()
    assert finding.rule == "log-or-division"
    assert "(x * 0).log()" in Path(__file__).read_text().splitlines()[finding.line - 1]
    assert probe.first is not None
    assert (probe.first.module, probe.first.op) == ("2", "log")


def test_a_logarithm_of_zero_in_the_loss_is_the_losss() -> None:
    probe = watched(Numbers(), mlp(), pairs(1), loss=lambda output, _: (output * 0).log().mean())
    assert rules(probe) == ["log-or-division"]
    assert probe.first is not None
    assert (probe.first.phase, probe.first.op) == (Phase.LOSS, "LogBackward0")


def test_a_loss_that_is_added_up_in_fp16_is_told() -> None:
    model = mlp()
    model[2].bias.data.fill_(200.0)
    probe = watched(Numbers(), model, pairs(1), dtype=torch.float16, loss=lambda output, _: (output.half() ** 2).sum())
    (finding,) = probe.findings()
    assert finding.rule == "amp-loss-half-reduction"
    assert finding.message.startswith(
        "the loss (SumBackward0) is the first value that is not finite: `SumBackward0` is computed in FP16, which ends at 65504"
    )


def test_an_activation_beyond_fp16_is_told_with_its_size() -> None:
    model = mlp()
    model[0].bias.data.fill_(6e4)
    model[2].weight.data.fill_(1.0)
    probe = watched(Numbers(), model, pairs(1), dtype=torch.float16)
    (finding,) = probe.findings()
    assert finding.rule == "fp16-range"
    assert "the forward of `2` (`addmm`)" in finding.message
    assert "in FP32 the largest value is 2.4e+05, FP16 ends at 65504" in finding.message


@pytest.mark.parametrize(
    ("model", "rule"),
    [(Guarded(), "amp-fp16-eps"), (Masked(-1e9, None), None), (Masked(-1e9, 1), "amp-fp16-mask-overflow")],
)
def test_constants_that_fp16_does_not_hold(model: nn.Module, rule: str | None) -> None:
    probe = watched(Numbers(), model, pairs(1), dtype=torch.float16)
    assert rules(probe) == ([rule] if rule else [])


def test_a_mask_of_infinity_is_a_fault_only_where_it_covers_a_row() -> None:
    assert rules(watched(Numbers(), Masked(-INF, None), pairs(2))) == []
    assert rules(watched(Numbers(), Masked(-INF, 2), pairs(2))) == ["mask-covers-a-row"]


def test_gradients_that_grow_until_they_overflow_are_the_learning_rates() -> None:
    assert rules(watched(Numbers(), mlp(), pairs(12), lr=1e3)) == ["learning-rate-too-high"]


def test_a_scale_that_finds_its_height_is_no_fault_and_leaves_no_evidence(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    probe = watched(Numbers(evidence=tmp_path), mlp(), pairs(20), dtype=torch.float16, scaler=scaler)
    assert list(tmp_path.iterdir()) == []
    scale = next(part for part in probe.measurements() if part.title == "Loss scale")
    assert isinstance(scale, Lines)
    assert len(scale.marks) > 5
    assert probe.findings() == []


def test_data_that_is_bad_in_every_batch_is_a_collapse_with_its_cause() -> None:
    probe = watched(Numbers(), mlp(), [with_nan(0)] * 8, dtype=torch.float16, scaler=torch.amp.GradScaler("cpu"))
    (finding,) = probe.findings()
    assert finding.rule == "amp-scale-collapse"
    assert finding.message == (
        "the last 8 updates were skipped in a row and the loss scale fell to 256; the batch that `0` takes is not finite, "
        "which no loss scale cures: `args[0]`, sample 0 of 8"
    )


def test_one_bad_batch_that_the_scaler_skips_is_named() -> None:
    batches = [*pairs(2), with_nan(4), *pairs(2)]
    probe = watched(Numbers(), mlp(), batches, dtype=torch.float16, scaler=torch.amp.GradScaler("cpu"))
    (finding,) = probe.findings()
    assert finding.rule == "data-not-finite"
    assert finding.message == (
        "the batch that `0` takes is the first value that is not finite: `args[0]`, sample 4 of 8; "
        "update 2, micro-batch 0 (samples 16, 17, 18, 19, 20, 21, 22, 23), rank 0, skipped by the scaler"
    )


def test_a_loss_that_is_nan_once_is_a_fault_though_the_scaler_skips_it() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return squares(output, target) * (NAN if target[0, 0] == 0 else 1)

    batches = pairs(25)
    batches[3][1][0, 0] = 0
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    probe = watched(Numbers(), mlp(), batches, dtype=torch.float16, scaler=scaler, loss=loss)
    assert [bad.update for bad in probe._bad][:4] == [0, 1, 2, 3]
    assert rules(probe) == ["not-finite"]
    origin = probe._bad[3].origin
    assert origin is not None
    assert (origin.phase, origin.loss_is_finite) == (Phase.LOSS, False)


def test_nan_in_the_loss_is_shown_as_nan() -> None:
    probe = watched(Numbers(), mlp(), [*pairs(2), with_nan(0)])
    loss = next(part for part in probe.measurements() if part.title == "Loss")
    assert isinstance(loss, Lines)
    assert [math.isnan(value) for _, value in loss.series[0].points] == [False, False, True]


def test_gradient_norm_is_that_of_the_true_gradient_under_a_scale() -> None:
    norms = []
    for scaler in (torch.amp.GradScaler("cpu", enabled=False), torch.amp.GradScaler("cpu", init_scale=1024.0)):
        for fused in (False, True):
            torch.manual_seed(0)
            model = mlp()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
            probe = watched(Numbers(), model, pairs(1), scaler=scaler, optimizer=optimizer)
            norms.append(next(p for p in probe.measurements() if p.title == "Gradient norm").series[0].points[0][1])
    torch.manual_seed(0)
    model = mlp()
    (x, y) = pairs(1)[0]
    squares(model(x), y).backward()
    true = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    assert norms == pytest.approx([true] * 4, rel=1e-6)


@pytest.mark.parametrize("bad", [False, True])
def test_the_loop_is_bitwise_the_same_with_the_probe(bad: bool) -> None:
    def end(probe: Numbers | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if probe is not None:
            probe.attach(model, optimizer, None)
        for number, (x, y) in enumerate(pairs(4)):
            squares(model(x * NAN if bad and number == 2 else x), y).backward()
            optimizer.step()
            if probe is not None:
                probe.update_ended(number)
            optimizer.zero_grad()
        return [*model.state_dict().values(), torch.get_rng_state()]

    for without, watched_ in zip(end(None), end(Numbers()), strict=True):
        assert torch.equal(without.nan_to_num(7.0), watched_.nan_to_num(7.0))


def test_a_saved_batch_is_replayed_and_ends_the_script(tmp_path: Path) -> None:
    watched(Numbers(evidence=tmp_path, script=("train.py",)), mlp(Log()), pairs(1))
    (file,) = tmp_path.iterdir()
    content = load(file)
    assert content["script"] == ["train.py"]
    assert replay(mlp(Log()), content, torch.device("cpu")).module == "2"
    with pytest.raises(Replayed) as ended:
        watched(Replay(file), mlp(Log()), pairs(1))
    told = "the forward of `2` (`log`) is the first value that is not finite: `log` of zero is not finite in FP32 either"
    assert str(ended.value) == f"Run again, {told}.\nWhen it was saved, {told}."
    assert ended.value.ending.code == 1


def test_dropout_is_the_same_when_a_batch_is_replayed(tmp_path: Path) -> None:
    """The NaN comes only with the mask that the script drew."""

    class Unlucky(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (torch.rand(()) > drawn).float()

    torch.manual_seed(5)
    drawn = torch.rand(4)[3].item() - 1e-4
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(1, 1, bias=False), Unlucky())
    torch.manual_seed(5)
    watched(Numbers(evidence=tmp_path), model, [(torch.ones(1, 1), torch.ones(1, 1)) for _ in range(6)])
    content = load(next(iter(tmp_path.iterdir())))
    assert replay(model, content, torch.device("cpu")).phase is Phase.FORWARD


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"format": 1, "model": nn.Linear(1, 1)}, tmp_path / "bad.pt")
    with pytest.raises(DataError) as raised:
        load(tmp_path / "bad.pt")
    assert (
        str(raised.value)
        == f"{tmp_path / 'bad.pt'} is no batch that `halfstep watch` saved: it is damaged, or holds more than tensors."
    )


def test_a_file_that_is_not_there_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        load(tmp_path / "none.pt")
    assert str(raised.value) == f"{tmp_path / 'none.pt'} cannot be read: No such file or directory."


def test_a_batch_for_another_model_is_refused(tmp_path: Path) -> None:
    watched(Numbers(evidence=tmp_path), mlp(), [with_nan(0)])
    with pytest.raises(DataError) as raised:
        replay(mlp(width=6), load(next(iter(tmp_path.iterdir()))), torch.device("cpu"))
    assert str(raised.value) == "the saved batch belongs to another model: its parameters have other names or shapes."


def test_what_cannot_be_written_safely_is_said(tmp_path: Path) -> None:
    class Odd:
        pass

    model = mlp()
    probe = Numbers(evidence=tmp_path)
    probe.attach(model, torch.optim.SGD(model.parameters()), None)
    model(pairs(1)[0][0])
    call = probe._keeper.calls[0]
    call.kwargs["odd"] = Odd()
    said = save(tmp_path / "odd.pt", model, call, Origin(phase=Phase.DATA))
    assert said == "the batch could not be saved (the model was given a Odd, which cannot be written safely)"
    assert list(tmp_path.iterdir()) == []
    probe.detach()


def test_a_batch_that_the_script_overwrote_is_not_run_again() -> None:
    model = mlp()
    x, y = with_nan(0)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        x.zero_()
        return squares(output.clone(), target)

    probe = watched(Numbers(), nn.Sequential(nn.Identity(), Detached(), model), [(x, y)], loss=loss)
    assert probe.first is not None
    assert probe.first.detail == "the script wrote over the batch, so that it cannot be run again"
    assert rules(probe) == ["not-finite"]


class Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.clone()


def test_the_memory_of_the_probe_does_not_grow() -> None:
    probe = Numbers()
    model = nn.Linear(1, 1)
    probe.attach(model, torch.optim.SGD(model.parameters()), None)
    for update in range(20_000):
        probe._looked = [float(update % 7)] if update % 3 else [NAN]
        probe._is_bad = update % 3 == 0
        probe.update_ended(update)
    points = [len(series.points) for part in probe.measurements() if isinstance(part, Lines) for series in part.series]
    assert max(points) <= 2 * 1024 + 1
    assert len(probe._bad) == 100
    probe.detach()


def test_a_model_that_needs_all_ranks_is_not_run_again_by_one() -> None:
    model = nn.Sequential(nn.SyncBatchNorm(4), nn.Linear(4, 4))
    assert cannot_run_alone(model) == "SyncBatchNorm inside of the model needs all ranks, so that one cannot run the batch again"
    assert cannot_run_alone(mlp()) == ""


def test_a_rank_whose_own_values_are_finite_leaves_the_finding_to_the_other() -> None:
    bad = Bad(update=0, scale=None, skipped=False, origin=Origin(phase=Phase.ELSEWHERE), norms=())
    assert findings_of([bad], Counts(), scale=None, rank=0, place=None) == []


def test_a_scale_that_goes_on_falling_is_told_with_its_share_and_limit() -> None:
    counts = Counts()
    for update in range(1000):
        counts.add(skipped=update % 10 == 0)
    (finding,) = findings_of([], counts, scale=8.0, rank=0, place=None)
    assert finding.message == "10.0% of the updates after the first 200 were skipped, limit 2%; the loss scale is 8"


def test_a_bad_batch_long_ago_is_not_blamed_for_the_skips_at_the_end() -> None:
    counts = Counts()
    for update in range(40):
        counts.add(skipped=update in (3, *range(34, 40)))
    origin = Origin(phase=Phase.DATA, detail="`args[0]`, sample 1 of 8")
    bad = Bad(update=3, scale=65536.0, skipped=True, origin=origin, norms=())
    assert [f.rule for f in findings_of([bad], counts, scale=512.0, rank=0, place=None)] == ["data-not-finite"]
