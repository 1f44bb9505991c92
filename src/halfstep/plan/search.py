"""All sensible ways to train a model on a machine, each with its bill, its time, and why it stands where it does.

`search` is what `halfstep plan` shows and `halfstep tune` prunes by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import product

from halfstep.config.options import Attention, Precision, Sharding
from halfstep.errors import ConfigError
from halfstep.plan.convnet import Convnet
from halfstep.plan.memory import GIB, Bill, memory_bill
from halfstep.plan.model_facts import Model, Transformer
from halfstep.plan.recipe import Adapter, BaseWeights, Checkpointing, Loss, Optimizer, Recipe
from halfstep.plan.time import Estimate, Rates, estimate

MARGIN = 0.05
"""Share of the memory that is left alone before a plan is said to fit: the error of nine in ten predictions on one device."""
TIE = 0.02
"""Of plans whose times differ by less, the one that takes the least memory comes first: predictions do not tell them apart."""
LARGEST_MICRO_BATCH = 512
RanksOf = Callable[[Recipe], Rates]


class Verdict(str, Enum):
    """Whether a plan fits."""

    FITS = "fits"
    TIGHT = "may not fit"
    """Within the error of the prediction."""
    NO = "does not fit"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where is trained.

    Attributes:
        name: of one device.
        memory_bytes: what torch can use of it.
        devices: how many there are.
        nodes: on how many machines.
        precisions: which it computes in hardware, the fastest first.
        rates: what it reaches with a recipe.
        source: where its figures come from.
    """

    name: str
    memory_bytes: float
    devices: int
    nodes: int
    precisions: tuple[Precision, ...]
    rates: RanksOf
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user has decided; `None` and empty leave it to the search.

    Attributes:
        sequence: tokens of a sequence; 1 for images.
        global_batch: sequences of an update on all devices.
        micro_batch: sequences at a time on one.
        precision: the arithmetic.
        sharding: what is divided.
        checkpointing: what is computed again.
        optimizer: what keeps states.
        lora_rank: rank of adapters to train; `None` trains everything.
        lora_everywhere: whether all products of a block have adapters, as `halfstep train` has it; otherwise query and value.
        lora_dropout: whether they drop inputs.
        weights: how frozen weights are kept.
        attention: how attention is computed.
        compiled: whether the model is compiled.
        labels_samples: whether there is one prediction a sample instead of one a token.
        loss: how logits become a loss.
    """

    sequence: int
    global_batch: int | None = None
    micro_batch: int | None = None
    precision: Precision | None = None
    sharding: Sharding | None = None
    checkpointing: Checkpointing | None = None
    optimizer: Optimizer = Optimizer.ADAMW
    lora_rank: int | None = None
    lora_everywhere: bool = True
    lora_dropout: bool = False
    weights: BaseWeights = BaseWeights.PLAIN
    attention: Attention = Attention.SDPA
    compiled: bool = False
    labels_samples: bool = False
    loss: Loss = Loss.WHOLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to train, judged.

    Attributes:
        recipe: the way.
        bill: what it takes on one device.
        time: how long an update takes.
        verdict: whether it fits.
        left_bytes: memory that it leaves on a device; negative where it does not fit.
        reason: why it stands where it does.
    """

    recipe: Recipe
    bill: Bill
    time: Estimate
    verdict: Verdict
    left_bytes: float
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """What would make it fit: a change, and the plan that it leads to."""

    change: str
    plan: Plan


def search(model: Model, machine: Machine, wish: Wish, *, every: bool = False) -> list[Plan]:
    """The best micro-batch for each precision, sharding and checkpointing: those that fit, the fastest before; then the smallest.

    Args:
        model: what is trained.
        machine: where.
        wish: what the user has decided.
        every: every micro-batch instead of the best.

    Pure BF16, which rounds every update to 8 bits of mantissa, is tried only where the wish names it.

    Raises:
        ConfigError: the global batch cannot be split over the devices.
    """
    choices = product(_precisions(machine, wish), *_ways(model, machine, wish))
    groups = [_judged(model, machine, wish, *choice) for choice in choices]
    found = [plan for group in groups for plan in (group if every else [_best(group)])]
    order = list(Verdict)
    fits = Verdict.FITS
    ranked = sorted(found, key=lambda p: (order.index(p.verdict), _cost(p) if p.verdict is fits else p.bill.device_bytes))
    best = _best(found)
    ranked = [best, *(plan for plan in ranked if plan is not best)]
    return [replace(plan, reason=_reason(model, machine, plan, ranked)) for plan in ranked]


def judge(model: Model, machine: Machine, recipe: Recipe) -> Plan:
    """The bill, the time and the verdict of one recipe."""
    bill = memory_bill(model, recipe)
    left = machine.memory_bytes - bill.device_bytes
    spare = left >= MARGIN * machine.memory_bytes
    verdict = Verdict.FITS if spare else Verdict.TIGHT if left >= -MARGIN * machine.memory_bytes else Verdict.NO
    time = estimate(model, recipe, machine.rates(recipe))
    return Plan(recipe=recipe, bill=bill, time=time, verdict=verdict, left_bytes=left)


def remedies(model: Model, machine: Machine, wish: Wish) -> list[Remedy]:
    """What would make it fit where nothing does, the gentlest change first."""
    found: list[Remedy] = []
    for change, other_machine, other in _changes(model, machine, wish):
        if other_machine.devices > machine.devices and any(each.plan.recipe.ranks > machine.devices for each in found):
            continue
        best = search(model, other_machine, other)[0]
        if best.verdict is Verdict.FITS:
            found.append(Remedy(change=change, plan=best))
    return found


def lora_parameters(model: Model, rank: int, *, everywhere: bool = True) -> int:
    """Parameters of adapters of this rank: a row and a column for each of its ranks (Hu et al. 2021, section 4.1)."""
    if isinstance(model, Convnet):
        raise ConfigError(f"`--lora {rank}`: {model.name} has no attention to put adapters on. Leave it out.")
    hidden, q, kv = model.hidden, model.q_width, model.kv_width
    query_and_value = 2 * hidden + q + kv
    if not everywhere:
        return model.layers * rank * query_and_value
    merged = 2 * hidden + q + q + 2 * kv
    attention = merged if model.traits.merged else query_and_value + 2 * hidden + q + kv
    return model.layers * rank * (attention + model.experts * model.mlp_matrices * (hidden + model.ffn))


def _judged(
    model: Model, machine: Machine, wish: Wish, precision: Precision, sharding: Sharding, checkpointing: Checkpointing
) -> list[Plan]:
    """Every micro-batch of one group; of two ways to reduce gradients the better."""
    return [
        _best(
            [
                judge(model, machine, _recipe(model, machine, wish, precision, sharding, checkpointing, micro, sync_every))
                for sync_every in ((True, False) if sharding.divides else (True,))
            ]
        )
        for micro in _micro_batches(machine, wish)
    ]


def _best(plans: Sequence[Plan]) -> Plan:
    """The fastest that fits, of equals the smallest; the smallest of all where none fits."""
    fitting = [plan for plan in plans if plan.verdict is Verdict.FITS]
    least = min(map(_cost, fitting), default=0.0)
    equal = [plan for plan in fitting if _cost(plan) <= (1 + TIE) * least]
    return min(equal or plans, key=lambda plan: plan.bill.device_bytes)


def _cost(plan: Plan) -> float:
    """Device-seconds a token: all devices are paid for alike."""
    return 1 / plan.time.rate


def _precisions(machine: Machine, wish: Wish) -> tuple[Precision, ...]:
    return (wish.precision,) if wish.precision else machine.precisions


def _ways(model: Model, machine: Machine, wish: Wish) -> tuple[tuple[Sharding, ...], tuple[Checkpointing, ...]]:
    many = (Sharding.DDP, Sharding.ZERO2, Sharding.ZERO3)
    allowed = many if machine.devices > 1 else (Sharding.NONE,)
    if wish.sharding not in (None, *allowed):
        has = f"{machine.devices} devices" if machine.devices > 1 else "one device"
        raise ConfigError(f"`--sharding {wish.sharding}` cannot be on {has}. Use {' or '.join(map(str, allowed))}.")
    shardings = (wish.sharding,) if wish.sharding else allowed
    both = (Checkpointing.NONE,) if isinstance(model, Convnet) else (Checkpointing.NONE, Checkpointing.FULL)
    again = (wish.checkpointing,) if wish.checkpointing else both
    return shardings, again


def _micro_batches(machine: Machine, wish: Wish) -> list[int]:
    """What divides the share of a device: the powers of two, and the share itself."""
    share = _share(machine, wish)
    if wish.micro_batch:
        if share % wish.micro_batch:
            raise ConfigError(
                f"A micro-batch of {wish.micro_batch} does not divide the {share} sequences that a device has of "
                f"{wish.global_batch}. Use one of {', '.join(map(str, _divisors(share)))}."
            )
        return [wish.micro_batch]
    powers = [1 << power for power in range(10)]
    return [size for size in powers if share % size == 0 and size <= LARGEST_MICRO_BATCH]


def _share(machine: Machine, wish: Wish) -> int:
    """Sequences of an update that one device has; without a global batch, whatever a micro-batch is."""
    if wish.global_batch is None:
        return wish.micro_batch or LARGEST_MICRO_BATCH
    share, rest = divmod(wish.global_batch, machine.devices)
    if rest:
        near = max(1, share) * machine.devices
        raise ConfigError(
            f"A global batch of {wish.global_batch} cannot be split over {machine.devices} devices. "
            f"Use {near} or {near + machine.devices}."
        )
    return share


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _recipe(
    model: Model,
    machine: Machine,
    wish: Wish,
    precision: Precision,
    sharding: Sharding,
    checkpointing: Checkpointing,
    micro_batch: int,
    sync_every: bool,
) -> Recipe:
    return Recipe(
        micro_batch=micro_batch,
        sequence=wish.sequence,
        accumulation=_share(machine, wish) // micro_batch if wish.global_batch else 1,
        ranks=machine.devices,
        nodes=machine.nodes,
        precision=precision,
        weights=wish.weights,
        sharding=sharding,
        checkpointing=checkpointing,
        optimizer=wish.optimizer,
        adapter=Adapter.LORA if wish.lora_rank else None,
        adapts_all=wish.lora_everywhere,
        adapter_dropout=wish.lora_dropout,
        trainable=lora_parameters(model, wish.lora_rank, everywhere=wish.lora_everywhere) if wish.lora_rank else None,
        attention=wish.attention,
        compiled=wish.compiled,
        labels_samples=wish.labels_samples,
        loss=wish.loss,
        sync_every=sync_every,
    )


def _changes(model: Model, machine: Machine, wish: Wish) -> Iterator[tuple[str, Machine, Wish]]:
    transformer = isinstance(model, Transformer)
    if wish.loss is not Loss.CHUNKED and transformer:
        yield "a chunked loss (`--loss chunked`)", machine, replace(wish, loss=Loss.CHUNKED)
    for times in (2, 4, 8, 16, 32, 64):
        devices = machine.devices * times
        if wish.global_batch is None or wish.global_batch % devices == 0:
            nodes = -(-devices // 8)
            yield f"{devices} devices (`--gpus {devices}`)", replace(machine, devices=devices, nodes=nodes), wish
    if wish.optimizer is Optimizer.ADAMW:
        yield "8-bit AdamW (`--optimizer adamw-8bit`)", machine, replace(wish, optimizer=Optimizer.ADAMW_8BIT)
    if wish.precision is not Precision.BF16_PURE and Precision.BF16 in machine.precisions:
        pure = replace(wish, precision=Precision.BF16_PURE)
        yield "BF16 without FP32 weights (`--precision bf16-pure`), which loses small updates", machine, pure
    if wish.lora_rank is None and transformer:
        lora = replace(wish, lora_rank=8)
        yield "adapters instead of all weights (`--lora 8`)", machine, lora
        four_bits = replace(lora, weights=BaseWeights.NF4_DOUBLE, precision=Precision.BF16_PURE)
        yield "adapters on weights of 4 bits (`--lora 8 --weights nf4-dq --precision bf16-pure`)", machine, four_bits
    if wish.sequence > 1024:
        half = replace(wish, sequence=wish.sequence // 2)
        yield f"half the sequence (`--seq {wish.sequence // 2}`)", machine, half


def _reason(model: Model, machine: Machine, plan: Plan, ranked: list[Plan]) -> str:
    recipe, first = plan.recipe, ranked[0]
    if plan.verdict is not Verdict.FITS:
        return _why_not(machine, plan)
    parts = [f"leaves {plan.left_bytes / GIB:.1f} GiB"]
    longer = first.time.rate / plan.time.rate - 1
    if plan is first:
        faster = min(map(_cost, (each for each in ranked if each.verdict is Verdict.FITS))) < _cost(first)
        parts.append(f"as fast as any that fits, to {TIE:.0%}, with the most room" if faster else "the fastest that fits")
    else:
        parts.append("as fast as the first" if longer < TIE else f"takes {100 * longer:.0f} % longer")
    if recipe.sharding.divides and recipe.accumulation > 1:
        parts.append(_why_sync(model, recipe))
    if not recipe.checkpointing.keeps_blocks and any(other.recipe.checkpointing.keeps_blocks for other in ranked):
        parts.append("computing blocks again buys the memory" if plan is first else "computes blocks again")
    if lacking := _not_in_train(recipe):
        parts.append(f"`halfstep train` has no {lacking}")
    return "; ".join(parts)


def _not_in_train(recipe: Recipe) -> str | None:
    """What other libraries have and ours has not."""
    if recipe.weights.four_bits:
        return "weights of 4 bits"
    if recipe.optimizer is Optimizer.ADAMW_8BIT and recipe.sharding.divides:
        return "8-bit states in shards"
    if recipe.optimizer is Optimizer.LION:
        return "lion"
    odd = recipe.checkpointing in (Checkpointing.SELECTIVE, Checkpointing.OFFLOAD)
    return f"checkpointing that is {recipe.checkpointing}" if odd else None


def _why_not(machine: Machine, plan: Plan) -> str:
    items = plan.bill.phases[plan.bill.peak_phase]
    name, size = max(items.items(), key=lambda item: item[1])
    what = f"{plan.bill.device_bytes / GIB:.1f} of {machine.memory_bytes / GIB:.1f} GiB in the {plan.bill.peak_phase}"
    return f"{what}, {size / GIB:.1f} of them {name}"


def _why_sync(model: Model, recipe: Recipe) -> str:
    whole = model.parameters * recipe.reduce_bytes / recipe.tensor_ranks / GIB
    if recipe.sync_every:
        return f"reduces in every micro-batch, or whole gradients would take {whole:.1f} GiB"
    return f"reduces in the last micro-batch alone, and keeps {whole:.1f} GiB of whole gradients till then"
