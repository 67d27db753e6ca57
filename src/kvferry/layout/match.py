"""Compares the caches of two sides, and gives every reason why they do not match.

Groups, layers, units, tensors and widths must match. Sharding, paging and page order may differ.
"""

from __future__ import annotations

from kvferry.errors import Reason, ReasonCode
from kvferry.layout.spec import CacheSpec, Group, Tensor, Window


def mismatches(source: CacheSpec, target: CacheSpec) -> tuple[Reason, ...]:
    """Return every reason why ``target`` cannot use the cache of ``source``."""
    at_source = {group.name: group for group in source.groups}
    at_target = {group.name: group for group in target.groups}
    reasons: list[Reason] = []
    if at_source.keys() != at_target.keys():
        message = (
            f"prefill has the groups {', '.join(sorted(at_source))} and decode "
            f"{', '.join(sorted(at_target))}; serve the same model on both sides"
        )
        reasons.append(Reason(ReasonCode.GROUPS, message))
    if source.num_layers != target.num_layers:
        message = (
            f"prefill's model has {source.num_layers} layers and decode's {target.num_layers}; "
            f"serve the same model on both sides"
        )
        reasons.append(Reason(ReasonCode.LAYERS, message))
    for name in (name for name in at_source if name in at_target):
        reasons += _group_mismatches(at_source[name], at_target[name])
    return tuple(reasons)


def _group_mismatches(source: Group, target: Group) -> list[Reason]:
    reasons: list[Reason] = []
    name = source.name
    if type(source.kind) is not type(target.kind):
        text = f"is {_kind_name(source)} at prefill and {_kind_name(target)} at decode"
        reasons.append(Reason(ReasonCode.KIND, f"group {name!r} {text}; describe it alike"))
    elif source.kind != target.kind:
        text = f"keeps {_window(source)} tokens at prefill and {_window(target)} at decode"
        reasons.append(Reason(ReasonCode.WINDOW, f"group {name!r} {text}; use one window"))
    if source.layers != target.layers:
        text = "has other layers at prefill than at decode; layers pair by number"
        reasons.append(Reason(ReasonCode.LAYERS, f"group {name!r} {text}"))
    if source.tokens_per_entry != target.tokens_per_entry:
        text = (
            f"has an entry for {source.tokens_per_entry} tokens at prefill and for "
            f"{target.tokens_per_entry} at decode"
        )
        reasons.append(Reason(ReasonCode.ENTRY, f"group {name!r} {text}; serve the same model"))
    if source.units != target.units:
        text = f"has {source.units} units (heads) at prefill and {target.units} at decode"
        reasons.append(
            Reason(ReasonCode.UNITS, f"group {name!r} {text}; count them over all ranks")
        )
    return reasons + _tensor_mismatches(source, target)


def _tensor_mismatches(source: Group, target: Group) -> list[Reason]:
    at_source = {tensor.name: tensor for tensor in source.tensors}
    at_target = {tensor.name: tensor for tensor in target.tensors}
    if list(at_source) != list(at_target):
        names = f"{', '.join(at_source)} at prefill and {', '.join(at_target)} at decode"
        message = (
            f"group {source.name!r} has the tensors {names}, so one can't read the other's; use "
            f"engines with the same form of cache, and list its tensors in the same order"
        )
        return [Reason(ReasonCode.TENSORS, message)]
    return [
        reason
        for name in at_source
        for reason in _one_tensor_mismatch(source.name, at_source[name], at_target[name])
    ]


def _one_tensor_mismatch(group: str, source: Tensor, target: Tensor) -> list[Reason]:
    where = f"{group}.{source.name}"
    if source.parts != target.parts:
        message = (
            f"an entry of {where} is {_parts(source)} at prefill and {_parts(target)} at decode; "
            f"give both sides one KV-cache dtype"
        )
        return [Reason(ReasonCode.ENTRY, message)]
    reasons = []
    if source.dtype != target.dtype:
        message = (
            f"{where} is {source.dtype} at prefill and {target.dtype} at decode; "
            f"give both sides one KV-cache dtype"
        )
        reasons.append(Reason(ReasonCode.DTYPE, message))
    if source.elements != target.elements:
        message = (
            f"{where} has {source.elements} elements per head at prefill and {target.elements} "
            f"at decode; serve the same model on both sides"
        )
        reasons.append(Reason(ReasonCode.HEAD_DIM, message))
    return reasons


def _parts(tensor: Tensor) -> str:
    parts = tensor.parts or (tensor,)
    return " + ".join(f"{part.elements} × {part.dtype}" for part in parts)


def _kind_name(group: Group) -> str:
    return type(group.kind).__name__.lower()


def _window(group: Group) -> int:
    assert isinstance(group.kind, Window)
    return group.kind.num_tokens
