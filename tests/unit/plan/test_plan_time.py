from dataclasses import replace

import pytest

from halfstep.config.options import Precision, Sharding
from halfstep.plan.accelerators import accelerator, accelerators
from halfstep.plan.known_models import KNOWN
from halfstep.plan.model_facts import Model, Transformer, from_config
from halfstep.plan.recipe import Adapter, Checkpointing, Recipe
from halfstep.plan.time import Estimate, estimate, flops_of_attention, flops_of_products, rates_of

LLAMA = from_config(KNOWN["llama-7b"], "llama-7b")
assert isinstance(LLAMA, Transformer)
ONE = Recipe(micro_batch=4, sequence=2048, precision=Precision.BF16_PURE)
MATRICES = 32 * LLAMA.block_matrices + LLAMA.head_matrix


def timed(recipe: Recipe, model: Model = LLAMA, gpu: str = "A100-80GB") -> Estimate:
    return estimate(model, recipe, rates_of(accelerator(gpu), recipe))


def test_a_weight_costs_six_operations_a_token() -> None:
    assert flops_of_products(LLAMA, ONE) == 6 * MATRICES * 8192


def test_a_frozen_weight_costs_four_and_one_computed_again_eight() -> None:
    assert flops_of_products(LLAMA, replace(ONE, adapter=Adapter.LORA)) == 4 * MATRICES * 8192
    blocks = 32 * LLAMA.block_matrices
    assert flops_of_products(LLAMA, replace(ONE, checkpointing=Checkpointing.FULL)) == (8 * blocks + 6 * LLAMA.head_matrix) * 8192


def test_causal_attention_looks_at_half_of_the_sequence() -> None:
    assert flops_of_attention(LLAMA, ONE) == 4 * 8192 * 1024 * 4096 * 32 * 3.5


def test_parts_add_up_to_the_update() -> None:
    time = timed(ONE)
    assert sum(time.parts.values()) == pytest.approx(time.update_s)
    assert time.rate == pytest.approx(8192 / time.update_s)
    assert time.rate_low < time.rate < time.rate_high


def test_accumulation_never_lowers_throughput_on_one_device() -> None:
    """One optimizer step for four micro-batches: the guide's table has the sign the wrong way round."""
    assert timed(replace(ONE, accumulation=4)).rate > timed(ONE).rate


def test_checkpointing_costs_up_to_a_third_more_time() -> None:
    longer = timed(ONE).rate / timed(replace(ONE, checkpointing=Checkpointing.FULL)).rate
    assert 1.2 < longer < 1.34


def test_fewer_collectives_and_a_smaller_share_of_the_states_change_the_step() -> None:
    shared = replace(ONE, ranks=8, sharding=Sharding.ZERO3, accumulation=8)
    assert timed(replace(shared, sync_every=False)).update_s <= timed(shared).update_s
    assert timed(shared).parts["optimizer step"] == pytest.approx(timed(ONE).parts["optimizer step"] / 8)


def test_fp32_uses_tf32_where_the_device_has_it() -> None:
    fp32 = replace(ONE, precision=Precision.FP32)
    assert rates_of(accelerator("A100-80GB"), fp32).matmul == rates_of(accelerator("A100-80GB"), ONE).matmul / 2
    assert rates_of(accelerator("V100-SXM2-32"), fp32).matmul < rates_of(accelerator("V100-SXM2-32"), ONE).matmul / 7


def test_llama_7b_on_an_a100_is_within_the_range_of_published_runs() -> None:
    """llm-foundry's MPT-7b, 6 x 2048, no checkpointing: 4641 tokens a second and GPU."""
    time = timed(replace(ONE, precision=Precision.BF16, micro_batch=6, ranks=8, sharding=Sharding.ZERO3))
    assert time.rate_low / 8 < 4641 < time.rate_high / 8


def test_the_range_is_wide_where_no_run_was_compared() -> None:
    gpt2 = from_config(KNOWN["gpt2"], "gpt2")
    assert timed(ONE).spread < timed(ONE, gpt2).spread
    assert timed(ONE).spread < timed(ONE, gpu="MI300X").spread


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("A100-80GB", "A100-SXM-80GB"),
        ("a100-sxm4-40gb", "A100-SXM-40GB"),
        ("RTX4090", "RTX 4090"),
        ("rtx 4090", "RTX 4090"),
        ("H100", "H100-SXM-80GB"),
        ("H100-PCIe", "H100-PCIe-80GB"),
        ("V100-32GB", "V100-SXM2-32GB"),
        ("T4", "T4"),
        ("A10G-24GB", "A10G (AWS)"),
        ("M4", "Apple M4 8-core"),
    ],
)
def test_devices_are_found_by_their_words(asked: str, name: str) -> None:
    assert accelerator(asked).name == name


def test_every_device_says_where_its_figures_come_from() -> None:
    assert [each.name for each in accelerators() if not each.source or not each.confidence] == []
    assert len(accelerators()) > 40
