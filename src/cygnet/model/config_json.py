"""Typed reading of a `config.json`: a missing or ill-typed field is a `ModelLoadError` that names it."""

import math
from collections.abc import Mapping
from typing import Any, TypeVar

from cygnet.base.errors import ModelLoadError
from cygnet.model.description import RopeScaling, RopeSpec

T = TypeVar("T")

_REQUIRED: Any = object()


class ConfigFields:
    """Fields of one JSON object. A field that is null counts as absent; a default makes a field optional."""

    def __init__(self, fields: Mapping[str, Any], where: str = "config.json") -> None:
        self.fields = fields
        self.where = where

    def get(self, name: str, kind: type[T], default: T = _REQUIRED) -> T:
        """Field `name`, an instance of `kind` (an int is taken as a float too)."""
        value = self.fields.get(name)
        if value is None:
            if default is _REQUIRED:
                raise ModelLoadError(f"{self.where} lacks the field {name!r}")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ModelLoadError(f"{self.where}: {name} = {value!r} should be of type {kind.__name__}")
        return value

    def has(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def section(self, name: str) -> "ConfigFields":
        """The JSON object `name`; an empty one if absent."""
        return ConfigFields(self.get(name, dict, {}), f"{self.where}: {name}")

    def per_layer(self, name: str, num_layers: int) -> list[Any] | None:
        """The list `name`, checked to have one entry per layer; `None` if absent."""
        if not self.has(name):
            return None
        values = self.get(name, list)
        if len(values) != num_layers:
            raise ModelLoadError(f"{self.where}: {name} has {len(values)} entries for {num_layers} layers")
        return values

    def reject(self, name: str, *accepted: object) -> None:
        """Raise if `name` is set to something other than null or one of `accepted`."""
        value = self.fields.get(name)
        if value is not None and value not in accepted:
            expected = " or ".join(repr(a) for a in (None, *accepted))
            raise ModelLoadError(f"{self.where}: {name} = {value!r} is not supported (only {expected})")


def eos_token_ids(fields: ConfigFields) -> tuple[int, ...]:
    """`eos_token_id`, which is one id, a list of ids, or absent."""
    value = fields.fields.get("eos_token_id")
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list) else (int(value),)


def rope_spec(parameters: ConfigFields, *, theta: float, rotary_dim: int) -> RopeSpec:
    """Read a `rope_parameters` or `rope_scaling` object (it may be empty) into a spec.

    `theta` is used unless the object has its own `rope_theta`. Raises `ModelLoadError` for an unknown scaling.
    """
    theta = parameters.get("rope_theta", float, theta)
    kind = parameters.get("rope_type", str, parameters.get("type", str, "default"))
    if kind == "default":
        return RopeSpec(theta, rotary_dim)
    if kind == "linear":
        return RopeSpec(theta, rotary_dim, RopeScaling(kind, parameters.get("factor", float)))
    if kind == "llama3":
        scaling = RopeScaling(
            kind,
            parameters.get("factor", float),
            parameters.get("low_freq_factor", float),
            parameters.get("high_freq_factor", float),
            parameters.get("original_max_position_embeddings", int),
        )
        return RopeSpec(theta, rotary_dim, scaling)
    if kind == "yarn":
        return RopeSpec(theta, rotary_dim, _yarn(parameters))
    raise ModelLoadError(f"{parameters.where}: rope type {kind!r} is not supported (default, linear, llama3, yarn)")


def _yarn(parameters: ConfigFields) -> RopeScaling:
    factor = parameters.get("factor", float)
    return RopeScaling(
        "yarn",
        factor,
        original_max_len=parameters.get("original_max_position_embeddings", int),
        beta_fast=parameters.get("beta_fast", float, 32.0),
        beta_slow=parameters.get("beta_slow", float, 1.0),
        truncate=parameters.get("truncate", bool, True),
        amplitude=parameters.get("attention_factor", float, _yarn_amplitude(parameters, factor)),
    )


def _yarn_amplitude(parameters: ConfigFields, factor: float) -> float:
    """The amplitude that a config implies if it does not say."""

    def grown(weight: float) -> float:
        return 1.0 + 0.1 * weight * math.log(factor) if factor > 1 else 1.0

    weight, all_dims = (parameters.get(name, float, 0.0) for name in ("mscale", "mscale_all_dim"))
    return grown(weight) / grown(all_dims) if weight and all_dims else grown(1.0)
