"""How a global batch is split over ranks and micro-batches."""

from __future__ import annotations

from halfstep.config.choice import Choice
from halfstep.config.facts import Facts
from halfstep.errors import ConfigError

UPDATE_TOKENS = 4096
"""Tokens of an update when nobody said: enough for a quiet gradient, few enough for many updates."""
UPDATE_SAMPLES = 32
"""The same for pictures and other samples that are no tokens."""
CPU_MICRO_TOKENS = 4096
"""Beyond this a CPU's matmuls gain nothing and its caches lose."""
MEMORY_SHARE = 0.6
"""Of what the model states leave free: the estimate of activations is rough."""
CONTEXT_BYTES = 1.5e9
"""What a GPU context and its libraries take before the first tensor."""
UPDATES_AN_EPOCH = 20
"""An epoch of a small text should still be this many updates."""


def automatic_global(*, micro: int | None, ranks: int, sequence_length: int | None, windows: int) -> Choice[int]:
    """A global batch of about 4,096 tokens, or of 32 samples that are no tokens, smaller where the data are few.

    Args:
        micro: sequences in a micro-batch, where that is asked for.
        ranks: how many there are.
        sequence_length: tokens of a sequence, or of a document as they usually are; `None` where samples are no tokens.
        windows: sequences or samples that there are.
    """
    unit = ranks * (micro or 1)
    aim = min(UPDATE_SAMPLES if sequence_length is None else UPDATE_TOKENS // sequence_length, windows // UPDATES_AN_EPOCH)
    size = max(1, aim // unit) * unit
    if sequence_length is None:
        return Choice(value=size, reason=f"usual, and small enough for {windows:,} samples")
    reason = f"{size * sequence_length:,} tokens an update"
    return Choice(value=size, reason=f"{reason}, of a text of {windows:,} sequences")


def automatic_micro(*, global_batch: int, ranks: int, sequence_length: int | None, facts: Facts) -> Choice[int]:
    """The largest micro-batch that divides the rank's share and suits the device."""
    share = max(1, global_batch // ranks)
    most, reason = _most_sequences(sequence_length, facts)
    return Choice(value=largest_divisor(share, at_most=most), reason=reason)


def _most_sequences(sequence_length: int | None, facts: Facts) -> tuple[int, str]:
    if sequence_length is None:
        return UPDATE_SAMPLES, f"at most {UPDATE_SAMPLES}, because the memory that a sample takes is unknown"
    if facts.machine.device == "cpu":
        return max(1, CPU_MICRO_TOKENS // sequence_length), f"at most {CPU_MICRO_TOKENS:,} tokens at a time on a CPU"
    if facts.machine.memory_bytes is None:
        return 8, "at most 8, because the memory of the device is unknown"
    states = 16 * facts.model.parameters
    free = max(0.0, facts.machine.memory_bytes - CONTEXT_BYTES - states)
    sequence = max(1, activation_bytes(facts) * sequence_length)
    most = max(1, int(MEMORY_SHARE * free / sequence))
    return most, (
        f"about {sequence / 1e9:.2f} GB of activations a sequence, {states / 1e9:.1f} GB of model states, "
        f"{facts.machine.memory_bytes / 1e9:.0f} GB on the device"
    )


def activation_bytes(facts: Facts) -> int:
    """Roughly the bytes that one token keeps alive until backward: 34 a hidden unit and layer, 10 a logit.

    The 34 is of Korthikanti et al. (arXiv 2205.05198) for 16-bit activations; eager LLaMA keeps up to 56, which
    the share of memory that is left free pays for.
    """
    model = facts.model
    return 34 * (model.hidden or 0) * (model.layers or 0) + 10 * (model.vocabulary or 0)


def largest_divisor(number: int, *, at_most: int) -> int:
    """The largest divisor of `number` that is not above `at_most`."""
    return max(divisor for divisor in range(1, min(number, max(1, at_most)) + 1) if number % divisor == 0)


def check_division(*, global_batch: int, micro: int, ranks: int) -> None:
    """Raise a `ConfigError` unless the global batch is a whole number of micro-batches on every rank."""
    unit = ranks * micro
    if global_batch % unit == 0:
        return
    over = f"over {ranks} ranks of {micro}" if ranks > 1 else f"into micro-batches of {micro}"
    below, above = global_batch // unit * unit, -(-global_batch // unit) * unit
    use = f"Use {below} or {above}" if below else f"Use {above}"
    other = ""
    if global_batch % ranks == 0:
        other = f", or `batch.micro = {largest_divisor(global_batch // ranks, at_most=micro)}`"
    raise ConfigError(
        f"`batch.global = {global_batch}` cannot be split {over}: {global_batch} / {unit} is not whole. {use}{other}."
    )
