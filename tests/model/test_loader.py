"""Loading: every parameter filled once, nothing left over, one copy of each weight."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cygnet.base.errors import ConfigError, ModelLoadError
from cygnet.model import layers
from cygnet.model.loader import build_model
from model.harness import Harness, Request
from model.tiny import Tiny

TinyModel = Callable[[str], Tiny]
Edit = Callable[[dict[str, Tensor]], None]


class ListedCheckpoint:
    """A checkpoint out of a list, so that a name may occur twice."""

    def __init__(self, config: dict[str, Any], listed: list[tuple[str, Tensor]]) -> None:
        self.config = config
        self.listed = listed
        self.num_bytes = sum(tensor.nbytes for _, tensor in listed)

    def tensors(self) -> Iterator[tuple[str, Tensor, int]]:
        for name, tensor in self.listed:
            yield name, tensor, tensor.nbytes


def edited(model: Tiny, edit: Edit) -> ListedCheckpoint:
    named = {name: tensor for name, tensor, _ in model.checkpoint.tensors()}
    edit(named)
    return ListedCheckpoint(model.checkpoint.config, list(named.items()))


def load(checkpoint: ListedCheckpoint) -> None:
    build_model(checkpoint, dtype=torch.float32)


def test_missing_tensors_are_named(tiny_model: TinyModel) -> None:
    def edit(named: dict[str, Tensor]) -> None:
        del named["model.layers.1.mlp.up_proj.weight"]
        del named["model.layers.2.self_attn.q_norm.weight"]

    with pytest.raises(ModelLoadError, match=r"lacks layers\.1\.mlp\.up\.weight, layers\.2\.attention\.q_norm\.weight"):
        load(edited(tiny_model("gemma3"), edit))


def test_unknown_tensors_are_named(tiny_model: TinyModel) -> None:
    def edit(named: dict[str, Tensor]) -> None:
        named["model.layers.0.adapter.weight"] = torch.zeros(3)

    with pytest.raises(ModelLoadError, match=r"unknown to this family: model\.layers\.0\.adapter\.weight"):
        load(edited(tiny_model("llama"), edit))


def test_a_tensor_of_another_shape_is_named(tiny_model: TinyModel) -> None:
    def edit(named: dict[str, Tensor]) -> None:
        named["model.norm.weight"] = torch.zeros(3)

    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \(3,\), the config implies \(48,\)"):
        load(edited(tiny_model("llama"), edit))


def test_one_expert_missing(tiny_model: TinyModel) -> None:
    def edit(named: dict[str, Tensor]) -> None:
        del named["model.layers.3.mlp.experts.4.down_proj.weight"]

    with pytest.raises(ModelLoadError, match=r"lacks layers\.3\.mlp\.experts\.4\.down\.weight"):
        load(edited(tiny_model("mimo"), edit))


def test_doubled_tensor(tiny_model: TinyModel) -> None:
    listed = [(name, tensor) for name, tensor, _ in tiny_model("llama").checkpoint.tensors()]
    with pytest.raises(ModelLoadError, match="two tensors for"):
        load(ListedCheckpoint(tiny_model("llama").checkpoint.config, [*listed, listed[0]]))


def test_quantized_weights_are_refused(tiny_model: TinyModel) -> None:
    def edit(named: dict[str, Tensor]) -> None:
        named["model.layers.0.self_attn.q_proj.weight_scale_inv"] = torch.zeros(1, 1)

    with pytest.raises(ModelLoadError, match="quantized"):
        load(edited(tiny_model("mimo"), edit))


def test_parts_that_are_not_served_are_left_out(tiny_model: TinyModel) -> None:
    def mimo(named: dict[str, Tensor]) -> None:
        named["model.mtp.layers.0.eh_proj.weight"] = torch.zeros(2, 2)
        named["visual.blocks.0.weight"] = torch.zeros(2)

    load(edited(tiny_model("mimo"), mimo))

    def head(named: dict[str, Tensor]) -> None:
        named["lm_head.weight"] = named["model.embed_tokens.weight"]

    load(edited(tiny_model("gemma3"), head))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_multimodal_gemma_loads_its_text_model(tiny_model: TinyModel, prefix: str) -> None:
    model = tiny_model("gemma3")
    named = {name.replace("model.", prefix, 1): tensor for name, tensor, _ in model.checkpoint.tensors()}
    named["vision_tower.vision_model.embeddings.weight"] = torch.zeros(2)
    named["model.multi_modal_projector.weight"] = torch.zeros(2)
    config = {"model_type": "gemma3", "text_config": model.checkpoint.config}
    built = build_model(ListedCheckpoint(config, list(named.items())), dtype=torch.float32)
    assert torch.equal(built.embedding, model.build().embedding)


@pytest.mark.parametrize("family", ["gemma3", "mimo", "gpt_oss", "llama"])
@pytest.mark.parametrize("packing", [True, False])
def test_each_weight_is_in_memory_once(
    tiny_model: TinyModel, family: str, packing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not packing:
        monkeypatch.setattr(layers, "can_pack", lambda dtype, device_type: False)
    model = tiny_model(family).build(torch.bfloat16)
    held = {id(p): p for p in model.parameters()}
    tensors = [*held.values(), *(m._packed for m in model.modules() if getattr(m, "_packed", None) is not None)]
    # Query and key norms keep a row of weights per head.
    spread = sum(
        (layer.num_heads + layer.num_kv_heads - 2) * layer.key_dim
        for layer in (spec.attention for spec in model.description.layers)
        if layer.qk_norm
    )
    assert sum(t.shape.numel() for t in tensors) == model.description.num_parameters + spread
    small = [p for p in held.values() if p.dtype == torch.float32]
    assert all(p.numel() < 400 for p in small), "only norms, routers and sinks are wide"
    assert (model.lm_head is None) == model.description.tied_embeddings


def test_packed_weights_give_the_plain_results(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied head, packed or shared, and packed or plain projections: the same logits."""
    checkpoint = tiny_model("gemma3").checkpoint
    packed = build_model(checkpoint, dtype=torch.float32, pack_tied_head=True)
    monkeypatch.setattr(layers, "can_pack", lambda dtype, device_type: False)
    plain = build_model(checkpoint, dtype=torch.float32)
    assert all(m.weight is not None for m in plain.modules() if isinstance(m, layers.Linear))
    got, want = (Harness(m).prefill(Request(list(range(40))), 7) for m in (packed, plain))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)


def test_progress_ends_at_the_total(tiny_model: TinyModel) -> None:
    checkpoint = edited(tiny_model("llama"), lambda named: None)
    seen: list[tuple[int, int]] = []
    build_model(checkpoint, dtype=torch.float32, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (checkpoint.num_bytes, checkpoint.num_bytes)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_unknown_backend(tiny_model: TinyModel) -> None:
    with pytest.raises(ConfigError, match="unknown attention backend 'cuda-magic'"):
        build_model(tiny_model("llama").checkpoint, dtype=torch.float32, attention_backend="cuda-magic")
