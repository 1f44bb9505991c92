from dataclasses import replace

import pytest

from halfstep.config.options import Precision, Sharding
from halfstep.errors import ConfigError, DeviceError
from halfstep.plan.known_models import KNOWN
from halfstep.plan.machines import named
from halfstep.plan.model_facts import from_config
from halfstep.plan.recipe import BaseWeights, Checkpointing, Optimizer
from halfstep.plan.search import MARGIN, TIE, Plan, Verdict, Wish, lora_parameters, remedies, search

LLAMA = from_config(KNOWN["llama-7b"], "llama-7b")
RESNET = from_config(KNOWN["resnet50"], "resnet50")
EIGHT, ONE = named("A100-80GB", 8, None), named("A100-80GB", 1, None)
WISH = Wish(sequence=4096, global_batch=256)


def plans(**wishes: object) -> list[Plan]:
    return search(LLAMA, EIGHT, replace(WISH, **wishes))  # type: ignore[arg-type]


def test_those_that_fit_come_first_and_the_fastest_of_them_before() -> None:
    found = plans()
    verdicts = [plan.verdict for plan in found]
    assert verdicts == sorted(verdicts, key=list(Verdict).index)
    first, *others = [plan.time.rate for plan in found if plan.verdict is Verdict.FITS]
    assert others == sorted(others, reverse=True)
    assert first * (1 + TIE) >= max(others)


def test_of_plans_as_fast_as_each_other_the_one_with_the_most_room_comes_first() -> None:
    first, *others = plans()
    equal = [plan for plan in others if plan.verdict is Verdict.FITS and plan.time.rate * (1 + TIE) > first.time.rate]
    assert len(equal) > 0
    assert first.left_bytes >= max(plan.left_bytes for plan in equal)


def test_every_micro_batch_is_told_where_that_is_asked_for() -> None:
    wish = replace(WISH, precision=Precision.BF16, sharding=Sharding.ZERO3, checkpointing=Checkpointing.FULL)
    assert sorted(plan.recipe.micro_batch for plan in search(LLAMA, EIGHT, wish, every=True)) == [1, 2, 4, 8, 16, 32]


def test_every_plan_makes_the_global_batch() -> None:
    assert {plan.recipe.global_batch for plan in plans()} == {256}


def test_what_fits_leaves_a_margin() -> None:
    room = EIGHT.memory_bytes
    assert all(plan.bill.device_bytes <= (1 - MARGIN) * room for plan in plans() if plan.verdict is Verdict.FITS)


def test_each_precision_sharding_and_checkpointing_is_tried() -> None:
    ways = {(p.recipe.precision, p.recipe.sharding, p.recipe.checkpointing) for p in plans()}
    assert len(ways) == 2 * 3 * 2


def test_pure_bf16_is_tried_only_when_asked() -> None:
    assert Precision.BF16_PURE not in {plan.recipe.precision for plan in plans()}
    assert {plan.recipe.precision for plan in plans(precision=Precision.BF16_PURE)} == {Precision.BF16_PURE}


def test_what_was_decided_is_kept() -> None:
    (plan,) = plans(
        precision=Precision.BF16, sharding=Sharding.ZERO3, checkpointing=Checkpointing.FULL, micro_batch=4, compiled=True
    )
    recipe = plan.recipe
    assert (recipe.micro_batch, recipe.accumulation, recipe.sharding, recipe.compiled) == (4, 8, Sharding.ZERO3, True)


def test_the_first_says_what_it_leaves_and_others_how_much_longer_they_take() -> None:
    first, second, third, *_ = plans()
    room = f"leaves {first.left_bytes / 2**30:.1f} GiB; as fast as any that fits, to 2%, with the most room"
    assert first.reason.startswith(room)
    assert "as fast as the first" in second.reason
    assert f"takes {100 * (first.time.rate / third.time.rate - 1):.0f} % longer" in third.reason


def test_what_does_not_fit_says_which_item_takes_the_most() -> None:
    found = search(LLAMA, ONE, Wish(sequence=2048, global_batch=8))
    assert {plan.verdict for plan in found} == {Verdict.NO}
    assert found[0].reason == "105.4 of 78.8 GiB in the backward, first block, 50.2 of them optimizer states"
    sizes = [plan.bill.device_bytes for plan in found]
    assert sizes == sorted(sizes)


def test_remedies_all_fit_and_more_devices_are_named_once() -> None:
    wish = Wish(sequence=2048, global_batch=8)
    changes = remedies(LLAMA, ONE, wish)
    assert {each.plan.verdict for each in changes} == {Verdict.FITS}
    assert [each.change for each in changes if "--gpus" in each.change] == ["2 devices (`--gpus 2`)"]
    assert any("--lora 8" in each.change for each in changes)
    assert any(each.plan.recipe.optimizer is Optimizer.ADAMW_8BIT for each in changes)


def test_a_gpu_without_native_bf16_gets_fp16() -> None:
    found = search(RESNET, named("V100-32", 1, None), Wish(sequence=1, global_batch=256))
    assert {plan.recipe.precision for plan in found} == {Precision.FP16, Precision.FP32}


def test_adapters_have_as_many_parameters_as_peft_gives_them() -> None:
    gpt2 = from_config(KNOWN["gpt2"], "gpt2")
    assert (lora_parameters(LLAMA, 8), lora_parameters(LLAMA, 8, everywhere=False)) == (19_988_480, 4_194_304)
    assert lora_parameters(gpt2, 8) == 1_179_648


@pytest.mark.parametrize(
    ("wishes", "lacking"),
    [
        ({"optimizer": Optimizer.ADAMW_8BIT, "sharding": Sharding.ZERO3}, "8-bit states in shards"),
        ({"optimizer": Optimizer.LION}, "lion"),
        ({"lora_rank": 8, "weights": BaseWeights.NF4}, "weights of 4 bits"),
        ({"checkpointing": Checkpointing.SELECTIVE}, "checkpointing that is selective"),
    ],
)
def test_what_train_has_not_is_said(wishes: dict[str, object], lacking: str) -> None:
    assert plans(**wishes)[0].reason.endswith(f"; `halfstep train` has no {lacking}")
    assert not [plan for plan in plans() if "halfstep train" in plan.reason]


def test_what_cannot_be_on_these_devices_is_told() -> None:
    with pytest.raises(ConfigError) as error:
        search(LLAMA, ONE, Wish(sequence=128, sharding=Sharding.ZERO3))
    assert str(error.value) == "`--sharding zero3` cannot be on one device. Use none."
    with pytest.raises(ConfigError) as error:
        search(LLAMA, EIGHT, Wish(sequence=128, sharding=Sharding.NONE))
    assert str(error.value) == "`--sharding none` cannot be on 8 devices. Use ddp or zero2 or zero3."
    with pytest.raises(DeviceError) as error:
        search(LLAMA, named("V100", 1, None), Wish(sequence=128, precision=Precision.BF16))
    assert str(error.value) == "`--precision bf16`: V100-SXM2-16GB has no instructions for it. Use fp16 or fp32."


def test_a_batch_that_cannot_be_split_is_told_with_those_that_can() -> None:
    with pytest.raises(ConfigError) as error:
        search(LLAMA, EIGHT, Wish(sequence=128, global_batch=100))
    assert str(error.value) == "A global batch of 100 cannot be split over 8 devices. Use 96 or 104."
    with pytest.raises(ConfigError) as error:
        search(LLAMA, EIGHT, Wish(sequence=128, global_batch=96, micro_batch=5))
    assert str(error.value) == (
        "A micro-batch of 5 does not divide the 12 sequences that a device has of 96. Use one of 1, 2, 3, 4, 6, 12."
    )


def test_an_unknown_device_is_told_with_the_nearest() -> None:
    with pytest.raises(DeviceError) as error:
        named("H1000", 1, None)
    assert str(error.value) == "`--gpu H1000` is no device that the planner knows. Did you mean H100-SXM-80GB?"
