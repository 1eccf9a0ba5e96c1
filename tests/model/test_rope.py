"""Rotary frequencies and amplitudes under YaRN, against transformers'."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cygnet.model.config_json import ConfigFields, rope_spec
from cygnet.model.rope import cos_sin, inverse_frequencies

GPT_OSS = {
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
DEFAULTS = {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768}

CASES: list[tuple[int, dict[str, Any]]] = [
    (64, GPT_OSS),
    (64, {**GPT_OSS, "truncate": True}),
    (128, DEFAULTS),
    (128, {**DEFAULTS, "attention_factor": 0.75}),
    (128, {**DEFAULTS, "factor": 1.0}),
    (64, {**DEFAULTS, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5}),
    (64, {**DEFAULTS, "factor": 40.0, "mscale": 0.707}),
    # Both ends of the blend beyond the slowest frequency, then before the fastest: nothing or everything is stretched.
    (32, {**DEFAULTS, "original_max_position_embeddings": 10**9}),
    (32, {**DEFAULTS, "original_max_position_embeddings": 2}),
]


def transformers_yarn(head_dim: int, settings: dict[str, Any]) -> tuple[torch.Tensor, float]:
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        max_position_embeddings=131_072,
        rope_parameters={"rope_type": "yarn", **settings},
    )
    return ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))


@pytest.mark.parametrize(("head_dim", "settings"), CASES)
def test_yarn_is_transformers_yarn(head_dim: int, settings: dict[str, Any]) -> None:
    spec = rope_spec(ConfigFields({"rope_type": "yarn", **settings}), theta=1.0, rotary_dim=head_dim)
    expected, amplitude = transformers_yarn(head_dim, settings)
    torch.testing.assert_close(inverse_frequencies(spec), expected, rtol=1e-6, atol=0)
    assert spec.amplitude == pytest.approx(amplitude, rel=1e-12)


def test_cases_blend_partly_and_the_amplitude_is_applied() -> None:
    spec = rope_spec(ConfigFields({"rope_type": "yarn", **GPT_OSS}), theta=1.0, rotary_dim=64)
    plain = rope_spec(ConfigFields({}), theta=150_000.0, rotary_dim=64)
    ratio = inverse_frequencies(spec) / inverse_frequencies(plain)
    assert (ratio[0], ratio[-1]) == (1.0, pytest.approx(1 / 32))
    assert 5 < ((ratio < 0.999) & (ratio > 1.001 / 32)).sum() < 15
    assert spec.amplitude == pytest.approx(1.3465735902799727)
    cos, sin = cos_sin(inverse_frequencies(spec), torch.tensor([0, 7]), torch.float32, amplitude=spec.amplitude)
    torch.testing.assert_close(cos**2 + sin**2, torch.full_like(cos, spec.amplitude**2))
