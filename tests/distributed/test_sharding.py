"""Two ranks with a model in shards make the updates that one process makes of the same samples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.swa_utils import AveragedModel

from distributed.conftest import Both
from distributed.jobs import Deal, Job, Trained, assert_equals_one_process, batch_of, mine, train
from halfstep import Engine
from halfstep.config.run import LoraRun
from halfstep.engine import assembly
from halfstep.errors import UsageError
from parity.by_hand import assert_bitwise, assert_near, blocks_model, samples, state, tiny_model, weighted_loss

RAGGED = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.0, 5.0, 8.0]
EVEN: Deal = [[[0, 1], [2]], [[3, 4, 5], [6]]]
UNEVEN: Deal = [[[0], [1, 2, 3], [4, 5]], [[6, 7]]]
ALONE: Deal = [[], [[8, 9], [10, 11]]]
ALONE_TOO: Deal = [[[8, 9], [10, 11]], []]

sharded = pytest.mark.parametrize("sharding", ["zero2", "zero3"])
on_both_paths = pytest.mark.parametrize("on_host", [True, False], ids=["as on a CPU", "as on a device"])


def sharded_job(sharding: str, windows: list[Deal], **given: Any) -> Job:
    fields = {name: given.pop(name) for name in ("weights", "factors", "optimizer", "on_host") if name in given}
    return Job(windows=windows, model=blocks_model, **{"weights": RAGGED, **fields}, given={"sharding": sharding, **given})


@sharded
@pytest.mark.parametrize("windows", [[EVEN] * 3, [UNEVEN] * 3, [ALONE, EVEN, ALONE_TOO, UNEVEN]], ids=["even", "uneven", "alone"])
@pytest.mark.parametrize("given", [{}, {"clip_norm": 0.05}, {"clip_value": 0.01}, {"checkpoint_activations": True}], ids=str)
def test_shards_do_what_one_process_does(both: Both, sharding: str, windows: list[Deal], given: dict[str, Any]) -> None:
    job = sharded_job(sharding, windows, **given)
    one = assert_equals_one_process(job, both(train, job))
    assert all(told["applied"] for told in one.told)


@sharded
@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", "AdamW"), ("bf16", "SGD"), ("fp16", "SGD")])
@on_both_paths
def test_every_precision_and_both_ends_of_an_update(
    both: Both, sharding: str, precision: str, optimizer: str, on_host: bool
) -> None:
    windows = [EVEN, UNEVEN, ALONE, EVEN]
    job = sharded_job(sharding, windows, precision=precision, optimizer=optimizer, clip_norm=0.5, on_host=on_host)
    assert_equals_one_process(job, both(train, job))


@sharded
@pytest.mark.parametrize("factor", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@on_both_paths
def test_what_is_not_finite_on_one_rank_makes_all_skip(
    both: Both, sharding: str, factor: float, precision: str, on_host: bool
) -> None:
    bad_alone: Deal = [[], [[8, 9], [6]]]
    windows = [UNEVEN, ALONE, EVEN, bad_alone, ALONE]
    job = sharded_job(sharding, windows, precision=precision, factors={6: factor}, on_host=on_host)
    ranks = both(train, job)
    one = assert_equals_one_process(job, ranks)
    assert [told["applied"] for told in one.told] == [False, True, False, False, True]
    assert ranks[0].kept["ledger"]["applied"] == ranks[1].kept["ledger"]["applied"] == 2


def train_with_memory(job: Job, free: int | None) -> Trained:
    """As `train`, on a machine that has so much memory left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "free_bytes", lambda device: free)
        return train(job)


@sharded
def test_gradients_reduced_after_every_micro_batch_where_whole_ones_do_not_fit(both: Both, sharding: str) -> None:
    job = sharded_job(sharding, [UNEVEN, ALONE, EVEN], precision="fp16", clip_norm=0.05)
    ranks = both(train_with_memory, job, 100)
    assert_equals_one_process(job, ranks)
    assert ranks[0].choices["gradient_sync"] == (
        "after every micro-batch (whole gradients of 3.76e-07 GB, of 0 GB that sharded states leave, are more than 30%)"
    )


LEFT = "on the rank that has least, 30% are left for activations"
SIZE = "1.5e-06 GB of weights, gradients and states do not fit on a rank"
AUTO = {
    None: "ddp (the memory of this device is unknown, so the states are taken to fit)",
    2000: f"ddp (weights, gradients and states of 1.5e-06 GB fit on every rank: of 2.38e-06 GB at hand {LEFT})",
    1500: f"zero2 ({SIZE}, 1.13e-06 GB do: of 1.88e-06 GB at hand {LEFT})",
    1000: f"zero3 ({SIZE}, 7.52e-07 GB do: of 1.38e-06 GB at hand {LEFT})",
    100: "zero3 (the least memory, and still 7.52e-07 GB of weights, gradients and states: of 4.76e-07 GB at hand "
    f"{LEFT}; more ranks would help)",
}
"""By free bytes; the model takes 376 bytes, and with gradients and AdamW's states 1,504."""


@pytest.mark.parametrize(("free", "told"), AUTO.items(), ids=AUTO)
def test_auto_takes_the_simplest_sharding_that_fits(both: Both, free: int | None, told: str) -> None:
    job = sharded_job("auto", [UNEVEN, ALONE], optimizer="AdamW")
    ranks = both(train_with_memory, job, free)
    assert_equals_one_process(job, ranks)
    assert [rank.choices["sharding"] for rank in ranks] == [told] * 2


@pytest.mark.parametrize("asked", ["none", "auto", "ddp", "zero2", "zero3"])
def test_one_process_has_nothing_to_divide(asked: str) -> None:
    model = blocks_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), loss=weighted_loss, precision="fp32", sharding=asked)
    reason = {"none": "asked for", "auto": "one process"}.get(asked, f'one process, so that "{asked}" has nothing to divide')
    assert str(engine.choices["sharding"]) == f"none ({reason})"
    assert type(model) is nn.Sequential


def refusal(work: str) -> str:
    """What is said of a model that cannot be sharded as asked."""
    model: nn.Module = tiny_model() if work == "no blocks" else blocks_model()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    given: dict[str, Any] = {"sharding": "zero9" if work == "unknown" else "zero3"}
    if work == "in DDP":
        model = DistributedDataParallel(model)
    if work == "stepped":
        weighted_loss(model, samples(2))[0].backward()
        optimizer.step()
    if work == "average":
        given["ema"] = AveragedModel(model)
    with pytest.raises(UsageError) as told:
        Engine(model, optimizer, loss=weighted_loss, precision="fp32", **given)
    return str(told.value)


def test_none_on_several_ranks_divides_nothing(both: Both) -> None:
    job = sharded_job("none", [UNEVEN, ALONE])
    ranks = both(train, job)
    assert_equals_one_process(job, ranks)
    told = 'ddp (nothing is divided, as asked for with "none"; 2 ranks share the work)'
    assert [rank.choices["sharding"] for rank in ranks] == [told] * 2


REFUSED = {
    "unknown": '`sharding` is \'zero9\', which is not one of "auto", "none", "ddp", "zero2", "zero3".',
    "no blocks": '`sharding = "zero3"` gathers a model block by block, and Sequential has no repeated blocks. Use "zero2", or '
    "shard it with `torch.distributed.fsdp.fully_shard` and give the engine the result.",
    "in DDP": '`sharding = "zero3"` was asked of a model that is wrapped in DDP. Give the engine the model itself.',
    "stepped": "The SGD has states already, of parameters that are sharded only now. Make the engine before the optimizer's "
    "first step, or before its states are loaded.",
    "average": '`ema` holds whole weights, and `sharding = "zero3"` divides those of the model. Shard the model with '
    "`torch.distributed.fsdp.fully_shard` first and make the average from it.",
}


@pytest.mark.parametrize("work", REFUSED)
def test_what_cannot_be_sharded_is_a_sentence(both: Both, work: str) -> None:
    assert both(refusal, work) == [REFUSED[work]] * 2


def train_language_model(sharding: str, windows: list[Deal], adapters: bool) -> tuple[dict[str, Any], list[float], list[str]]:
    """A tiny LLaMA with tied embeddings on texts of several lengths, whole or by adapters beside frozen weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from halfstep.train.adapters import with_adapters

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 20}
    config = LlamaConfig(num_hidden_layers=2, tie_word_embeddings=True, attn_implementation="eager", **sizes)
    model: nn.Module = LlamaForCausalLM(config)
    if adapters:
        model = with_adapters(model, LoraRun(rank=2, alpha=2, dropout=0.0, targets=("q_proj", "v_proj")), ())
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    before = state(model)

    def loss(called: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
        logits = called(input_ids=tokens, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"), tokens[:, 1:].numel()

    optimizer = SGD((p for p in model.parameters() if p.requires_grad), lr=0.5)
    engine = Engine(model, optimizer, loss=loss, precision="fp32", clip_norm=1.0, sharding=sharding)
    texts = [[torch.arange(3 + sum(each)).remainder(20)[None] for each in mine(deal)] for deal in windows]
    losses = [engine.update(window).loss for window in texts]
    after = state(model)
    assert all(torch.equal(before[f"/model/{name}"], after[f"/model/{name}"]) for name in frozen)
    return after, losses, sorted(name for name in before if not torch.equal(before[name], after[name]))


@pytest.mark.parametrize("adapters", [False, True], ids=["tied embeddings", "adapters beside frozen weights"])
def test_a_language_model_in_shards_trains_as_in_one_process(both: Both, adapters: bool) -> None:
    windows = [EVEN, UNEVEN, ALONE]
    first, second = both(train_language_model, "zero3", windows, adapters)
    assert_bitwise(first[0], second[0])
    one = train_language_model("auto", windows, adapters)
    assert first[1] == second[1] == pytest.approx(one[1], rel=1e-5)
    assert_near(first[0], one[0], rtol=1e-4, atol=1e-5)
    assert first[2] == one[2]
    assert all("lora" in name for name in one[2]) is adapters


@sharded
def test_pure_bf16_is_equal_on_both_ranks(both: Both, sharding: str) -> None:
    first, second = both(train, sharded_job(sharding, [EVEN, UNEVEN, ALONE], precision="bf16-pure"))
    assert first.told == second.told
    assert_bitwise(first.state, second.state)
    assert {value.dtype for name, value in first.state.items() if name.startswith("/model")} == {torch.bfloat16}


class Branches(nn.Module):
    """A batch of odd length takes one way, of even length another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        taken: Tensor = (self.left if len(x) % 2 else self.right)(x)
        return taken


def test_ranks_may_use_different_parameters(both: Both) -> None:
    """What no rank uses in a window has a gradient of zeros there, which momentum would act on: each is used by some."""
    windows: list[Deal] = [[[[0], [1]], [[2, 3], [4, 5]]], [[[0, 1], [2]], [[4], [5, 6]]], [[], [[8, 9], [10]]]]
    given = {"sharding": "zero2", "find_unused_parameters": True}
    job = Job(windows=windows, model=Branches, weights=RAGGED, given=given)
    assert_equals_one_process(job, both(train, job))


def given_in_shards() -> nn.Module:
    """A model that its owner sharded."""
    model = blocks_model()
    if dist.is_initialized():
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model


def test_a_model_that_was_sharded_already_is_taken_as_it_is(both: Both) -> None:
    job = Job(windows=[UNEVEN, ALONE, EVEN], model=given_in_shards, weights=RAGGED, given={"clip_norm": 0.05})
    ranks = both(train, job)
    assert_equals_one_process(job, ranks)
    assert ranks[0].choices["sharding"] == "zero3 (the model was given in shards)"


def train_in_own_windows(sharding: str, windows: list[Deal]) -> dict[str, Any]:
    model = blocks_model()
    engine = Engine(model, SGD(model.parameters(), lr=0.1), precision="fp32", clip_norm=0.5, sharding=sharding)
    job = Job(windows=windows, weights=RAGGED)
    for deal in windows:
        with engine.window() as window:
            for batch in (batch_of(job, each) for each in mine(deal)):
                with window.forward():
                    total, weight = weighted_loss(engine.model, batch)
                window.backward(total, weight)
    return state(model)


@sharded
def test_windows_of_the_callers_own_reduce_in_every_backward(both: Both, sharding: str) -> None:
    first, second = both(train_in_own_windows, sharding, [EVEN] * 3)
    assert_bitwise(first, second)
    assert_near(first, train_in_own_windows("auto", [EVEN] * 3), rtol=1e-5, atol=2e-6)
