"""The events of a training loop.

Every event says where it happened, in which turn of which loops, and which objects it concerns. What a speaker
cannot know stays `None` (or empty): the imagined run knows no seconds, the recorder knows no text of a condition.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A position in a source file; lines count from 1, columns from 0."""

    path: str
    line: int
    column: int = 0
    end_line: int = 0
    end_column: int = 0


@dataclass(frozen=True, slots=True)
class Ref:
    """An object of the program by identity. `given` means that it came from outside of what was heard."""

    kind: str
    number: int
    name: str = ""
    place: Place | None = field(default=None, compare=False)
    given: bool = field(default=False, compare=False)
    escaped: bool = field(default=False, compare=False)
    """Handed to code that was not heard, which may have done anything to it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one loop: `loop` numbers the run of the loop, `index` its turns."""

    loop: int
    index: int
    place: Place | None = field(default=None, compare=False)
    over: str = field(default="", compare=False)
    """What it runs over: `loader`, `count`, `items` or `while`."""
    tags: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True, slots=True)
class Divisor:
    """One division of a loss or of gradients: by how much, by what (`accum`, `world`, ...), where."""

    value: float | None
    tags: frozenset[str] = frozenset()
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class Region:
    """An autocast region: what it casts to, and where the context was made."""

    number: int
    device: str | None
    dtype: str | None
    enabled: bool
    place: Place | None = None
    dtype_given: bool = True
    refused: bool = False
    """It was asked for, and torch switched it off: the machine has no such device, or the device no such number format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What all events share."""

    serial: int = 0
    place: Place | None = None
    stack: tuple[Place, ...] = ()
    loops: tuple[Turn, ...] = ()
    guards: frozenset[str] = frozenset()
    """What the conditions around it depend on: `rank`, `data`, `scale`, `index`, `modulo`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunBegin(Event):
    """The run starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd(Event):
    """The run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Made(Event):
    """An object was constructed. `facts` holds what is known of its arguments."""

    what: Ref
    facts: dict[str, object] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochBegin(Event):
    """A pass over a finite source of batches begins."""

    loader: Ref
    index: int
    function: str = ""
    """Name of the function that runs the loop."""
    called: str = ""
    """What the loop calls its source."""
    length: int | None = None
    """How many batches it has, where the program says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd(Event):
    """A pass over a source of batches ends, by running out or by leaving early."""

    loader: Ref
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopLeft(Event):
    """A loop was left by `break`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetEpoch(Event):
    """A sampler or a data set was told the epoch."""

    target: Ref
    value: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch(Event):
    """A micro-batch was taken from a loader."""

    loader: Ref
    micro_batch: int
    wait_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastEnter(Event):
    """An autocast region opens."""

    region: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastExit(Event):
    """An autocast region closes."""

    region: Region


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSyncEnter(Event):
    """Gradient reduction is switched off."""

    model: Ref | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSyncExit(Event):
    """Gradient reduction is switched on again."""

    model: Ref | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode(Event):
    """`train()` or `eval()` was called on a model."""

    model: Ref
    training: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Event):
    """A model was called."""

    model: Ref
    training: bool | None = None
    grad_enabled: bool = True
    wrapped: bool = False
    """Called through its DDP wrapper."""
    region: Region | None = None
    device: str | None = None
    partly_frozen: bool = False
    """The program has set by hand which of its parameters get gradients."""
    mode_dependent: bool | None = None
    """Holds dropout or batch normalisation, so that `training` matters."""
    buffers: bool | None = None
    """Holds buffers, which DDP sends to all ranks at the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss(Event):
    """A loss was computed by a named criterion."""

    criterion: str
    reduction: str | None = None
    region: Region | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleLoss(Event):
    """A loss was multiplied by the loss scale."""

    scaler: Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(Event):
    """Gradients were added. `optimizers` are those whose parameters the loss reaches."""

    optimizers: tuple[Ref, ...] = ()
    models: tuple[Ref, ...] = ()
    scaler: Ref | None = None
    divisors: tuple[Divisor, ...] = ()
    reduction: str | None = None
    region: Region | None = None
    """The autocast region that is open now."""
    forward_regions: tuple[Region, ...] = ()
    """The autocast regions in which the loss was computed."""
    in_no_sync: bool = False
    forward_in_no_sync: bool | None = None
    ddp: tuple[Ref, ...] = ()
    """DDP wrappers through which the loss was computed."""
    bypassed: Place | None = None
    """Where the inner module of a DDP wrapper was called instead of the wrapper."""
    scaled_penalty: Place | None = None
    """Where gradients of a scaled output were taken that entered the loss unchanged."""
    eval_mode: tuple[Ref, ...] = ()
    """Models that were in evaluation mode at the forward pass."""
    retained: frozenset[int] = frozenset()
    untrained: tuple[Ref, ...] = ()
    """Models whose parameters get gradients here and are in no optimizer."""
    apart: tuple[Place, ...] = ()
    """Where modules keep layers that get gradients here in plain containers, so that no optimizer has them."""
    half_params: tuple[Ref, ...] = ()
    by_framework: bool = False
    """Called through Accelerate, Fabric, DeepSpeed or Lightning, which scale and divide themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unscale(Event):
    """Gradients of an optimizer were divided by the loss scale."""

    scaler: Ref
    optimizer: Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip(Event):
    """Gradients were clipped or rewritten."""

    optimizers: tuple[Ref, ...] = ()
    kind: str = "norm"
    partial: tuple[Ref, ...] = ()
    """Optimizers of which only some parameters were clipped."""
    exhausted: bool = False
    """The parameters came from a generator that was used up before."""
    divisor: Divisor | None = None
    enabled: bool = True
    scaled: bool = False
    """A framework has multiplied the gradients by its loss scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradRead(Event):
    """Gradients were read."""

    optimizers: tuple[Ref, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Event):
    """An optimizer stepped."""

    optimizer: Ref
    scaler: Ref | None = None
    closure: bool = False
    region: Region | None = None
    half_params: tuple[Ref, ...] = ()
    bf16_params: tuple[Ref, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerUpdate(Event):
    """The loss scale was updated."""

    scaler: Ref
    scale: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRead(Event):
    """Two readings of the loss scale were compared, which tells whether the step was skipped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroGrad(Event):
    """Gradients were cleared."""

    optimizers: tuple[Ref, ...] = ()
    partial: bool = False
    """Of parameters that the program picked one by one, which may be a part of the optimizer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStep(Event):
    """A learning-rate scheduler moved on."""

    scheduler: Ref
    optimizer: Ref | None = None
    metric: str = ""
    measured: str = ""
    """How the metric was computed, as far as that was heard."""
    """Text of what a plateau scheduler was given, with a leading minus where it is negated."""
    argument: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AverageUpdate(Event):
    """Weights of a second model were moved towards those of the trained one."""

    target: Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleReplaced(Event):
    """A module was put into a model whose parameters an optimizer already holds."""

    model: Ref
    module: Ref
    optimizers: tuple[Ref, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRead(Event):
    """The host waited for a value of the device."""

    what: str
    scaled: bool = False
    device: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retain(Event):
    """A tensor with its graph was put into a container that lives on."""

    container: int
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer(Event):
    """A tensor moved between host and device."""

    to: str
    blocking: bool = True
    loader: Ref | None = None
    in_worker: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RacyRead(Event):
    """A copy to the host that may not have arrived yet was read; `copied` is where it started."""

    copied: Place


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(Event):
    """All ranks must take part."""

    kind: str
    of_some: bool = False
    """In a group that not all ranks belong to."""
    averages: bool = False
    """What is put together are gradients or parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed(Event):
    """A random generator was seeded: the global one, or one that the program keeps itself."""

    constant: bool
    in_worker: bool = False
    own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomDraw(Event):
    """Random numbers were drawn from the global generator, or from one that the program keeps itself."""

    own: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFlush(Event):
    """The allocator's cache or the garbage collector was flushed."""

    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Save(Event):
    """A checkpoint was written; `states` says of what kinds of object, `by_rank_aware` if ranks write files of their own."""

    states: frozenset[str] = frozenset()
    by_rank_aware: bool = False
    written: Place | None = None
    """Where what is saved was put together, if that was heard."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load(Event):
    """A state was loaded into an object, or a file was read (`target` is None)."""

    target: Ref | None = None
    map_location: bool = True
    handed_over: bool = False
    """The state is that of another object of this run, which this one goes on for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numeric(Event):
    """A computation whose numbers do not fit: `kind` names it."""

    kind: str
    detail: str = ""
    region: Region | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Event):
    """A number computed from the named loader was shown or stored."""

    loader: Ref
    kind: str = ""
