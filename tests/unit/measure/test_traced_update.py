from dataclasses import replace

import pytest

from halfstep.config.options import Precision
from halfstep.errors import ModelError
from halfstep.measure.traced_update import LAYERS, TracedJob, trace
from halfstep.plan.memory import memory_bill
from halfstep.plan.model_facts import from_config
from halfstep.plan.recipe import Adapter, Checkpointing, Loss, Recipe
from halfstep.plan.search import lora_parameters

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
}
JOB = TracedJob(config=LLAMA, precision="fp32", micro_batch=4, sequence=256)


def test_depth_beyond_what_is_traced_is_a_straight_line() -> None:
    short, long = (trace(replace(JOB, config={**LLAMA, "num_hidden_layers": layers})) for layers in (3, 6))
    assert (short.layers, long.layers) == ((), LAYERS)
    model = from_config({**LLAMA, "num_hidden_layers": 6}, "m")
    assert long.parameters == model.parameters
    whole = trace(replace(JOB, config={**LLAMA, "num_hidden_layers": 3}))
    steps = {name: (size - whole.phases[name]) / 3 for name, size in long.phases.items()}
    again = trace(replace(JOB, config={**LLAMA, "num_hidden_layers": 5}))
    assert again.phases == pytest.approx({name: whole.phases[name] + 2 * step for name, step in steps.items()})


@pytest.mark.parametrize("precision", ["fp32", "bf16-pure"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("chunked", [False, True])
def test_closed_form_and_trace_agree_within_a_tenth(precision: str, checkpointing: str, chunked: bool) -> None:
    traced = trace(replace(JOB, precision=precision, checkpointing=checkpointing, chunked_loss=chunked))
    recipe = Recipe(
        micro_batch=4,
        sequence=256,
        precision=Precision(precision),
        checkpointing=Checkpointing(checkpointing),
        loss=Loss.CHUNKED if chunked else Loss.WHOLE,
    )
    closed = memory_bill(from_config(LLAMA, "m"), recipe).allocated_bytes
    assert max(traced.phases.values()) == pytest.approx(closed, rel=0.1)


SMALL = {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 3}
VIT = {"model_type": "vit", **SMALL, "intermediate_size": 768, "image_size": 224, "patch_size": 16}


def test_an_image_classifier_is_counted() -> None:
    traced = trace(replace(JOB, config=VIT, sequence=197))
    closed = memory_bill(from_config(VIT, "m"), Recipe(micro_batch=4, sequence=197, precision=Precision.FP32)).allocated_bytes
    assert max(traced.phases.values()) == pytest.approx(closed, rel=0.1)


def test_adapters_leave_the_weights_without_gradients_and_states() -> None:
    traced = trace(replace(JOB, lora_rank=8))
    model = from_config(LLAMA, "m")
    adapters = lora_parameters(model, 8)
    assert traced.parameters == model.parameters + adapters
    recipe = Recipe(
        micro_batch=4,
        sequence=256,
        precision=Precision.FP32,
        adapter=Adapter.LORA,
        adapts_all=True,
        adapter_dropout=False,
        trainable=adapters,
    )
    assert max(traced.phases.values()) == pytest.approx(memory_bill(model, recipe).allocated_bytes, rel=0.1)


def test_8_bit_states_take_a_quarter_of_whole_ones() -> None:
    whole, eight, none = (trace(replace(JOB, optimizer=name)).phases["optimizer step"] for name in ("adamw", "adamw-8bit", "sgd"))
    assert eight - none == pytest.approx((whole - none) / 4, rel=0.03)


def test_earlier_micro_batches_leave_their_gradients() -> None:
    once, twice = (trace(replace(JOB, accumulation=times)) for times in (1, 2))
    grown = twice.phases["forward and loss"] - once.phases["forward and loss"]
    assert grown == pytest.approx(4 * once.parameters, rel=0.001)


def test_what_transformers_cannot_build_is_told() -> None:
    with pytest.raises(ModelError) as error:
        trace(replace(JOB, config={"model_type": "mpt", "n_layers": 1}))
    assert str(error.value).startswith(
        "transformers cannot build it: MptForCausalLM does not support an attention implementation"
    )
