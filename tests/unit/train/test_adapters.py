"""Frozen parts and adapters: what is trained, what they come to when they are merged, and names that are none."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from halfstep.config.run import LoraRun
from halfstep.errors import ModelError
from halfstep.train.adapters import freeze, merged, trained, with_adapters
from halfstep.train.folder import _save
from hugging_face import gpt2, llama, vit

TOKENS = torch.tensor([[5, 6, 7, 8]])


def settings(*targets: str) -> LoraRun:
    return LoraRun(rank=2, alpha=4.0, dropout=0.0, targets=targets or ("all-linear",))


def names_trained(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def moved(model: nn.Module) -> nn.Module:
    """The model after its trainable parameters went somewhere else."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def test_frozen_parts_are_named_by_parameter_module_or_pattern(tmp_path: Path) -> None:
    model = llama(tmp_path / "llama")
    choice = freeze(model, ["model.embed_tokens", "model.layers.*.mlp.*", "lm_head.weight"])
    assert names_trained(model) == [
        *(f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkvo"),
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    ]
    assert choice.value == 16 * (16 + 8 + 8 + 16) + 3 * 16
    assert choice.reason == "7.67% of 10,640 parameters"


def test_a_pattern_that_names_nothing_shows_the_names_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        freeze(llama(tmp_path / "llama", num_hidden_layers=3), ["model.norm", "embeddings"])
    layer = [f"self_attn.{name}_proj.weight" for name in "qkvo"] + [f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    layer += ["input_layernorm.weight", "post_attention_layernorm.weight"]
    known = ["model.embed_tokens.weight", *(f"model.layers.*.{name}" for name in layer), "model.norm.weight", "lm_head.weight"]
    assert str(error.value) == (
        f'`model.frozen`: "embeddings" names no parameter of the model. Its parameters are {", ".join(known)}.'
    )


def test_a_model_that_is_all_frozen_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        freeze(llama(tmp_path / "llama"), ["*"])
    assert str(error.value) == "`model.frozen` names every parameter of the model: nothing is left to train."


def test_adapters_alone_are_trained_and_change_nothing_at_first(tmp_path: Path) -> None:
    model = llama(tmp_path / "llama").eval()
    before = model(TOKENS).logits
    adapted = with_adapters(model, settings("q_proj", "model.layers.0.mlp.*"), ())
    assert torch.equal(adapted.eval()(TOKENS).logits, before)
    assert {name.rpartition(".lora_")[0].rpartition("layers.0.")[2] for name in names_trained(adapted)} == {
        "self_attn.q_proj",
        "mlp.gate_proj",
        "mlp.up_proj",
        "mlp.down_proj",
    }
    assert trained(adapted).value == 2 * ((16 + 16) + 3 * (16 + 32))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("make", [llama, gpt2], ids=["linear layers", "the Conv1D of GPT-2"])
def test_a_saved_model_is_plain_and_gives_the_same_outputs_and_so_does_its_adapter(make: object, tmp_path: Path) -> None:
    base = make(tmp_path / "base")  # type: ignore[operator]
    adapted = moved(with_adapters(base, settings(), ()))
    (tmp_path / "run").mkdir()
    expected, state = adapted(TOKENS).logits, copy.deepcopy(adapted.state_dict())
    _save(adapted, tmp_path / "run")
    assert all(torch.equal(value, state[name]) for name, value in adapted.state_dict().items()), "saving changed the model"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "run").eval()
    assert not [name for name, _ in plain.named_parameters() if "lora" in name]
    torch.testing.assert_close(plain(TOKENS).logits, expected, rtol=1e-5, atol=1e-6)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), str(tmp_path / "run" / "adapter"))
    torch.testing.assert_close(again.eval()(TOKENS).logits, expected, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(AutoModelForCausalLM.from_pretrained(tmp_path / "base")(TOKENS).logits, expected, atol=1e-3)


def test_a_new_head_is_trained_whole(tmp_path: Path) -> None:
    model = vit(tmp_path / "vit")
    adapted = moved(with_adapters(model, settings(), ["classifier.bias", "classifier.weight"]))
    assert "base_model.model.classifier.modules_to_save.default.weight" in names_trained(adapted)
    assert not [name for name in names_trained(adapted) if "classifier" in name and "lora" in name]
    pixels = torch.randn(1, 3, 16, 16)
    torch.testing.assert_close(merged(adapted)(pixels).logits, adapted(pixels).logits, rtol=1e-5, atol=1e-6)


def test_a_target_that_names_nothing_shows_the_names_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as error:
        with_adapters(llama(tmp_path / "llama"), settings("q_proj", "query"), ())
    layer = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    known = ["model.embed_tokens", *(f"model.layers.*.{name}" for name in layer), "lm_head"]
    assert str(error.value) == f'`lora.targets`: "query" names no module of the model. Its modules are {", ".join(known)}.'


def test_what_peft_cannot_do_is_said_in_its_words() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(2, 2, 2))
    with pytest.raises(ModelError) as error:
        with_adapters(model, settings(), ())
    assert str(error.value) == '`lora.targets`: "all-linear" names no module of the model. Its modules are 0.'
    with pytest.raises(ModelError, match=r"`lora.targets = \['0'\]` cannot be: Target module ConvTranspose2d.* is not supported"):
        with_adapters(model, settings("0"), ())


def test_peft_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfstep.train.adapters.find_spec", lambda name: None)
    with pytest.raises(ModelError) as error:
        with_adapters(nn.Linear(2, 2), settings(), ())
    assert str(error.value) == "`[lora]` needs peft, which is not installed: pip install 'halfstep[train]'."
