"""Why the guide's table of LLaMA-7B on an A100 cannot be as printed, and what to expect instead: the planner's own arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace

from halfstep.config.options import Precision
from halfstep.plan.accelerators import accelerator
from halfstep.plan.known_models import KNOWN
from halfstep.plan.memory import GB, GIB, memory_bill
from halfstep.plan.model_facts import Transformer, from_config
from halfstep.plan.recipe import Checkpointing, Recipe
from halfstep.plan.time import Estimate, estimate, rates_of

SEQUENCE = 512
"""The guide tells no length; at this one the largest part of its table is possible."""
DEVICE = "A100-SXM-80GB"
FLOPS_A_TOKEN_AND_PARAMETER = 6
TFLOPS_WITHOUT_TF32 = 19.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A row of the guide's table.

    Attributes:
        row: what the guide calls it.
        recipe: the usual reading of it.
        rate: tokens a second that it claims.
        memory_gb: GB that it claims; `None` where it claims none.
        finding: why it cannot be, or what else it must have been.
    """

    row: str
    recipe: Recipe
    rate: float
    memory_gb: float | None
    finding: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A claim beside what the planner expects of it."""

    claim: Claim
    states_bytes: float
    peak_bytes: float
    available_bytes: float
    expected: Estimate

    @property
    def fits(self) -> bool:
        """Whether the usual reading runs at all."""
        return self.peak_bytes <= self.available_bytes


def verdicts() -> list[Verdict]:
    """Every row of the table, then the honest runs that come nearest to it."""
    return [_verdict(claim) for claim in (*_claims(), *_expectations())]


def inequality() -> str:
    """Why its second row must take at least what its first takes, whatever the optimizer and the length."""
    model, first, second = _model(), _claims()[0].recipe, _claims()[1].recipe
    plain, amp = (memory_bill(model, recipe).phases for recipe in (first, second))
    loss = next(iter(plain))
    kept, kept_amp = plain[loss]["activations"], amp[loss]["activations"]
    return (
        "Autocast leaves parameters, gradients and optimizer states in FP32, so at the end of the backward the FP16 row holds "
        f"what the FP32 row holds. At the end of the forward it holds {amp[loss]['cast cache'] / GB:.1f} GB of casts and "
        f"{kept_amp / GB:.1f} GB of activations for batch 8, where the FP32 row holds {kept / GB:.1f} GB for batch 2. "
        "So 72 GB cannot stand beside 78 GB unless something that the table does not say was changed."
    )


def available() -> tuple[float, str]:
    """Bytes that torch can use of the table's device, and its name."""
    device = accelerator(DEVICE)
    return device.visible_bytes, device.name


def _model() -> Transformer:
    model = from_config(KNOWN["llama-7b"], "llama-7b")
    assert isinstance(model, Transformer)
    return model


def _claims() -> tuple[Claim, ...]:
    parameters = _model().parameters
    fp32 = Recipe(micro_batch=2, sequence=SEQUENCE, precision=Precision.FP32)
    tflops = FLOPS_A_TOKEN_AND_PARAMETER * parameters * 380 / 1e12
    pure = replace(fp32, micro_batch=8, precision=Precision.BF16_PURE)
    return (
        Claim(
            row="FP32, batch 2",
            recipe=fp32,
            rate=380,
            memory_gb=78,
            finding=f"impossible as full fine-tuning with AdamW. 380 tokens/s are {tflops:.1f} TFLOP/s, "
            f"{100 * tflops / TFLOPS_WITHOUT_TF32:.0f} % of the peak without TF32; the same 380 is what LLaMA-65B reached "
            "a GPU in its paper",
        ),
        Claim(
            row="FP16 + AMP, batch 8",
            recipe=replace(fp32, micro_batch=8, precision=Precision.FP16),
            rate=2100,
            memory_gb=72,
            finding="impossible: autocast does not shrink the states, and adds a cast of every weight",
        ),
        Claim(
            row="BF16 without scaler, batch 8",
            recipe=pure,
            rate=2250,
            memory_gb=70,
            finding="possible only with parameters, gradients and states in BF16, another recipe than the rows above; FP16 and "
            "BF16 take the same bytes and the same time on an A100, so 2 GB and 7 % are not the format's",
        ),
        Claim(
            row="BF16 + accumulation 4",
            recipe=replace(pure, accumulation=4),
            rate=2180,
            memory_gb=None,
            finding="the wrong sign: on one GPU accumulation takes one optimizer step for four micro-batches, so tokens/s rise a "
            "little; the gradients that wait meanwhile are in the memory",
        ),
    )


def _expectations() -> tuple[Claim, ...]:
    pure = Recipe(micro_batch=8, sequence=SEQUENCE, precision=Precision.BF16_PURE)
    shared = Recipe(micro_batch=2, sequence=4 * SEQUENCE, precision=Precision.BF16, checkpointing=Checkpointing.FULL)
    return (
        Claim(row="expect: pure BF16, AdamW, batch 8 x 512", recipe=pure, rate=0, memory_gb=None, finding="fits one A100"),
        Claim(
            row="expect: AMP, AdamW, batch 2 x 2048, checkpointed",
            recipe=shared,
            rate=0,
            memory_gb=None,
            finding="needs more than one: `halfstep plan llama-7b --gpu A100-80GB --gpus 8 --seq 2048`",
        ),
    )


def _verdict(claim: Claim) -> Verdict:
    model, device = _model(), accelerator(DEVICE)
    bill = memory_bill(model, claim.recipe)
    states = model.parameters * claim.recipe.state_bytes * 4
    return Verdict(
        claim=claim,
        states_bytes=states,
        peak_bytes=bill.device_bytes,
        available_bytes=device.visible_bytes,
        expected=estimate(model, claim.recipe, rates_of(device, claim.recipe)),
    )


def told() -> str:
    """The whole explanation, as text."""
    room, name = available()
    lines = [
        f"The guide's table: LLaMA-7B ({_model().parameters / 1e9:.3f} billion parameters) on one {name}, of which torch can use",
        f"{room / GB:.1f} GB ({room / GIB:.1f} GiB). It tells neither length nor optimizer: {SEQUENCE} tokens and AdamW here.",
        "",
    ]
    for verdict in verdicts():
        lines += [*_told(verdict), ""]
    return "\n".join([*lines, inequality()])


def _told(verdict: Verdict) -> list[str]:
    claim, rate = verdict.claim, verdict.expected
    printed = f"{claim.rate:.0f} tokens/s" + (f", {claim.memory_gb:.0f} GB" if claim.memory_gb else "")
    memory = f"{verdict.peak_bytes / GB:.1f} GB ({verdict.peak_bytes / GIB:.1f} GiB)"
    states = f"parameters, gradients and AdamW states alone are {verdict.states_bytes / GB:.1f} GB"
    speed = f"{rate.rate_low:.0f} to {rate.rate_high:.0f} tokens/s" if verdict.fits else "does not fit"
    return [
        claim.row,
        *([f"  printed:  {printed}"] if claim.rate else []),
        f"  expected: {memory}, {speed}; {states}",
        f"  so:       {claim.finding}",
    ]
